"""Joins this process to the others that `tests/multiprocess/run.py` started."""

import contextlib
import os
import sys

import pytest

PROCESS = os.environ.get("SBP_PROCESS", "")
_ENDED: list[int] = []


def pytest_configure(config: pytest.Config) -> None:
    """Connects the processes before the tests are imported."""
    if not PROCESS:
        return
    import jax

    number, count, port = map(int, PROCESS.split())
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.distributed.initialize(f"localhost:{port}", count, number)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skips the tests that would wait for other processes where there are none."""
    for item in items:
        if not PROCESS and item.get_closest_marker("multiprocess"):
            item.add_marker(pytest.mark.skip(reason="`make test-multiprocess` runs these"))


def pytest_sessionfinish(exitstatus: int) -> None:
    """Notes how the tests ended."""
    _ENDED.append(int(exitstatus))


def pytest_unconfigure() -> None:
    """Ends at once after a failure: otherwise JAX waits at its exit for the other processes, which
    may wait for this one. JAX kills the others when the first process ends, so that one lets them
    write their reports before."""
    if PROCESS and _ENDED and _ENDED[-1] != 0:
        from sbp import _jax

        number, count, _ = map(int, PROCESS.split())
        client = _jax.distributed_client()
        client.key_value_set(f"ended/{number}", "")
        for other in range(1, count) if number == 0 else ():
            with contextlib.suppress(Exception):  # it may hang, and the runner ends it
                client.blocking_key_value_get(f"ended/{other}", 2000)
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(_ENDED[-1])
