"""Runs JAX's tests through `sbp.jit`. `tests/peer/run.py` sets the environment variables.

`SBP_PEER`: "jax" (plain `jax.jit`), "free" (free types) or "pins" (random types of the arguments).
`SBP_PEER_PINS`: the seed of random types. `SBP_PEER_SHARE`: the part of the tests that run.
"""

import hashlib
import os

os.environ.setdefault("JAX_NUM_GENERATED_CASES", "2")

import pytest

from tests.peer import outermost

MODE = os.environ.get("SBP_PEER", "free")
SHARE = float(os.environ.get("SBP_PEER_SHARE", "1"))

if MODE != "jax":
    outermost.install(os.environ.get("SBP_PEER_PINS", "1") if MODE == "pins" else "")


def drawn(test: str) -> float:
    """A number in [0, 1) from the test's name."""
    return int(hashlib.md5(test.encode()).hexdigest()[:8], 16) / 16**8


def pytest_collection_modifyitems(items):
    items[:] = [item for item in items if drawn(item.nodeid) < SHARE]


@pytest.fixture(autouse=True)
def count_calls(request):
    before = outermost.Calls.count
    yield
    request.node.user_properties.append(("calls", outermost.Calls.count - before))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item, call):
    report = yield
    if call.excinfo is not None and call.excinfo.errisinstance(AssertionError):
        files = [str(entry.path) for entry in call.excinfo.traceback]
        if any("numpy/testing" in file for file in files):
            item.user_properties.append(("values", "differ"))
            report.user_properties = list(item.user_properties)
    return report
