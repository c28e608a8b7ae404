"""The program is killed and started again, and ends as one that is not, bit for bit."""

import os
import subprocess
import sys

import pytest

from sbp.moe.checkpoint import saved_steps
from tests.gshard.killing import NEVER, assert_same_runs, folders, kill, moments
from tests.slices import EXHAUSTIVE


@pytest.mark.laws
@pytest.mark.skipif(not EXHAUSTIVE, reason="`make laws` runs it")
def test_a_program_that_is_killed_twenty_times_ends_as_one_that_is_not(tmp_path):
    """`sbp train` on the devices of its preset."""
    env = {
        "JAX_COMPILATION_CACHE_DIR": str(tmp_path / "cache"),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
    }
    killed, whole = tmp_path / "killed", tmp_path / "whole"

    def program(workdir, steps):
        options = ["--steps", str(steps), "--set", "checkpoint_every=2", "--no-eval"]
        train = [sys.executable, "-m", "examples.gshard.train", "--preset", "tiny-test"]
        return [*train, "--workdir", str(workdir), *options]

    halfway = 0
    for moment in moments(20, seed=0):
        kill(program(killed, NEVER), env, killed, moment)
        halfway += bool(folders(killed, whole=False))
    assert halfway >= 3, "few of the kills were within the writing of a checkpoint"
    steps = saved_steps(killed / "checkpoints")[0] + 3
    for workdir in (killed, whole):
        command = program(workdir, steps)
        subprocess.run(command, env={**os.environ, **env}, check=True, stdout=subprocess.DEVNULL)
    assert_same_runs(killed, whole)
