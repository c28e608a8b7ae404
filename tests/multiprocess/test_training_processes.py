"""`sbp train` in two processes has the losses of one, and each goes on where the other stopped."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import jax
import numpy as np
import pytest
from jax.experimental import multihost_utils

from examples.gshard.machine import make_mesh
from sbp.moe.hosts import from_first, is_first
from sbp.moe.step import plan_train_step
from sbp.moe.trainer import read_metrics
from tests.multiprocess.run import ROOT
from tests.multiprocess.training import FIRST, STEPS, STOP_AT, StoppedPlan, options, train_in

pytestmark = pytest.mark.multiprocess


def alone(begun: Path, ended: Path) -> subprocess.Popen[str]:
    """Start the part of one process, which knows nothing of the others."""
    quick = "--xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true"
    known = {k: v for k, v in os.environ.items() if k != "SBP_PROCESS"} | {"XLA_FLAGS": quick}
    command = [sys.executable, "-m", "tests.multiprocess.training", str(begun), str(ended)]
    return subprocess.Popen(command, cwd=ROOT, env=known, stdin=subprocess.PIPE, text=True)


def damage(folder: Path) -> None:
    """Cut off half of each file that one process wrote; a file may also have what nothing reads."""
    for file in folder.glob("d/*"):
        os.truncate(file, file.stat().st_size // 2)


def test_two_processes_train_as_one(tmp_path: Path):
    """One folder: three steps by two processes, at the third of which one of them gets a signal,
    and two by one process. Another folder: two steps by one process and three by two, which then
    find that the shards of one of them are damaged, and go on from the checkpoint before."""
    if jax.process_count() != 2:
        pytest.skip("one number of processes is enough")
    two_first, one_first = map(Path, from_first(lambda: [str(tmp_path / k) for k in "ab"]))
    single = alone(one_first, two_first) if is_first() else None
    run = options(two_first)
    plan = plan_train_step(run.model, run.train, make_mesh(run.mesh))
    stopped = plan if is_first() else StoppedPlan(plan, STOP_AT)
    assert train_in(two_first, stopped) == (STOP_AT, signal.SIGTERM)
    if single:
        single.communicate("\n", timeout=120)
        assert single.returncode == 0
    multihost_utils.sync_global_devices("one process has ended")
    assert train_in(one_first, plan) == (STEPS, 0)
    a, b = read_metrics(two_first), read_metrics(one_first)
    assert [x["step"] for x in a] == [x["step"] for x in b] == list(range(1, STEPS + 1))
    for name in ("loss", "grad_norm", "drop", "tokens"):
        np.testing.assert_allclose([x[name] for x in a], [x[name] for x in b], rtol=2e-5)
    if is_first():
        damage(one_first / "checkpoints" / str(STEPS) / "state" / "ocdbt.process_1")
    multihost_utils.sync_global_devices("a file of one process is damaged")
    assert train_in(one_first, plan, STOP_AT) == (STOP_AT, 0)  # from the step before, in both
    assert read_metrics(one_first)[-1]["loss"] == b[STOP_AT - 1]["loss"]
    assert (one_first / f"damaged-{STEPS}").exists()
    assert FIRST < STOP_AT < STEPS  # each step but one is by one process in one of the folders
