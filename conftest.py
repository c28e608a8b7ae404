"""What every test process needs before JAX is first imported: eight simulated CPU devices, quick
compilation, and a cache of compiled programs. Fixtures are a mesh and the command line."""

import os
import shutil
import signal
from pathlib import Path

import pytest

pytest_plugins = ("tests.gate", "tests.lock", "tests.case_seconds")

FLAGS = {
    "--xla_force_host_platform_device_count": "8",
    # Most of a test's time is compilation, most of which is LLVM's optimisation of code that runs
    # for microseconds. What XLA does to the program itself stays on. `make laws` and `make fuzz`
    # compile as users do.
    **(
        {}
        if os.environ.get("SBP_EXHAUSTIVE")
        else {
            "--xla_backend_optimization_level": "0",
            "--xla_llvm_disable_expensive_passes": "true",
        }
    ),
}
CACHE = Path(__file__).parent / ".jax_cache"
CACHE_BYTES = 2**30
"""The size above which the cache is emptied before a run: a changed program leaves its old entry
behind."""

given = os.environ.get("XLA_FLAGS", "")
os.environ["XLA_FLAGS"] = " ".join(
    [given, *(f"{flag}={value}" for flag, value in FLAGS.items() if flag not in given)]
).strip()

for name, value in {
    "JAX_PLATFORMS": "cpu",
    "JAX_COMPILATION_CACHE_DIR": str(CACHE),
    "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0.05",
    "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
}.items():
    os.environ.setdefault(name, value)


@pytest.fixture(autouse=True)
def _in_the_project(monkeypatch: pytest.MonkeyPatch) -> None:
    """Files are named relative to the working folder."""
    monkeypatch.chdir(CACHE.parent)


@pytest.fixture(scope="module")
def mesh():
    """Two axes of eight devices."""
    import sbp  # imports JAX, which reads the environment that is set above

    return sbp.make_mesh((2, 4), ("x", "y"))


@pytest.fixture
def command(capsys: pytest.CaptureFixture[str]):
    """Runs the command line of sbp, checks its exit status, and returns what it prints."""
    from sbp.cli import main

    def run(*argv: str, status: int = 0):
        assert main(argv) == status, capsys.readouterr().err
        return capsys.readouterr()

    return run


class Running:
    """Names the cases that ran when the run was stopped by SIGTERM, as `timeout` stops it."""

    def __init__(self) -> None:
        self.cases: dict[str, None] = {}
        signal.signal(signal.SIGTERM, self.stop)

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        self.cases[nodeid] = None

    def pytest_runtest_logfinish(self, nodeid: str) -> None:
        self.cases.pop(nodeid, None)

    def stop(self, *_: object) -> None:
        pytest.exit(f"stopped while these cases ran: {', '.join(self.cases) or 'none'}", 1)


def pytest_configure(config: pytest.Config) -> None:
    """In the process that starts the workers: empties a cache that has grown too large."""
    if "PYTEST_XDIST_WORKER" in os.environ:
        return
    config.pluginmanager.register(Running())
    if CACHE.exists() and sum(path.stat().st_size for path in CACHE.iterdir()) > CACHE_BYTES:
        shutil.rmtree(CACHE)
