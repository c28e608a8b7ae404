"""Runs of the training program that are stopped, killed, and out of room, and end as others do."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from contextlib import ExitStack

import jax
import numpy as np
import pytest

from examples.gshard.train import StopSignal
from sbp.errors import SbpError
from sbp.moe.checkpoint import saved_steps
from tests.gshard.runs import (
    NEVER,
    Moment,
    Training,
    assert_same_runs,
    files_of_at_most,
    folders,
    kill,
    moments,
)
from tests.slices import EXHAUSTIVE


def test_user_errors_exit_without_a_traceback(tmp_path, command):
    argv = ["--data", str(tmp_path / "missing.tsv"), "--workdir", str(tmp_path / "run")]
    assert command("train", *argv, status=2).err.startswith("error[bad-corpus]: cannot read")
    assert not (tmp_path / "run").exists()


def test_a_decoder_only_model_trains_on_plain_text(tmp_path, command):
    text = tmp_path / "corpus.txt"
    text.write_text("".join(f"{i} is the next number of a text\n" for i in range(200)), "utf-8")
    argv = ["--preset", "tiny-test", "--steps", "3", "--data", str(text)]
    argv += ["--workdir", str(tmp_path / "run")]
    assert "a model with an encoder cannot learn from" in command("train", *argv, status=2).err
    vocabulary = ["--set", "source_vocab=64", "--set", "target_vocab=64"]
    shown = command("train", *argv, "--set", "encoder_layers=0", *vocabulary).out
    assert " texts to train on; held out: " in shown
    found = re.findall(r"held-out loss ([\d.]+) per token, perplexity ([\d.]+)", shown)
    loss, perplexity = map(float, found[-1])
    assert perplexity == pytest.approx(np.exp(loss), rel=0.01)
    lines = (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    assert json.loads(lines[-1])["heldout_nll"] == pytest.approx(loss, abs=1e-3)
    assert (
        "plain text has no translations to score"
        in command("evaluate", "--workdir", str(tmp_path / "run"), status=2).err
    )


@pytest.fixture(scope="module")
def train():
    return Training()


def test_an_interrupted_run_resumes_as_if_it_had_never_stopped(train, tmp_path):
    def end(number):
        if number == 3:
            os.kill(os.getpid(), signal.SIGTERM)

    whole = train(tmp_path / "whole", 5)
    assert (whole.stopped, whole.latest, len(whole.losses)) == (0, 5, 5)
    first = train(tmp_path / "parts", 5, end)
    assert (first.stopped, first.latest, len(first.losses)) == (signal.SIGTERM, 3, 3)
    rest = train(tmp_path / "parts", 5)
    assert (rest.stopped, rest.latest) == (0, 5) and "resumed at step 3" in rest.shown
    assert first.losses + rest.losses == whole.losses
    jax.tree.map(np.testing.assert_array_equal, whole.state, rest.state)
    nothing = train(tmp_path / "parts", 5)
    assert (nothing.latest, nothing.losses) == (5, [])
    assert "nothing to train: step 5 is done, and steps is 5" in nothing.shown


def test_a_disk_that_gets_full_ends_the_run_and_loses_nothing(train, tmp_path):
    """Between the checkpoints of steps 2 and 4."""
    whole, folder = train(tmp_path / "room", 5), tmp_path / "full"
    with ExitStack() as full:

        def fill(number):
            while number == 3 and not (folder / "checkpoints" / "2").exists():
                time.sleep(0.01)  # it is still being written
            if number == 4:
                full.enter_context(files_of_at_most(2**14))

        with pytest.raises(SbpError, match=r"File too large; the checkpoint of step 2 is kept"):
            train(folder, 5, fill)
    # Threads of this process may still write to the checkpoint that failed.
    leave = shutil.ignore_patterns("*.orbax-checkpoint-tmp")
    shutil.copytree(folder, tmp_path / "copy", ignore=leave)
    rest = train(tmp_path / "copy", 5)
    assert (rest.stopped, rest.latest, len(rest.losses)) == (0, 5, 3)
    assert "resumed at step 2" in rest.shown
    jax.tree.map(np.testing.assert_array_equal, whole.state, rest.state)


def test_a_run_that_is_killed_as_it_saves_goes_on_as_if_it_were_not(train, tmp_path):
    killed, whole = tmp_path / "killed", tmp_path / "whole"
    command = [sys.executable, "-m", "tests.gshard.runs", str(killed), str(NEVER)]
    train(whole, 4)  # fills the cache of compiled programs, which a kill must not damage
    kill(command, {}, killed, Moment("begun", 0.02))
    steps = max([0, *saved_steps(killed / "checkpoints")]) + 5
    train(killed, steps)
    train(whole, steps)
    assert_same_runs(killed, whole)


def test_a_rate_that_destroys_the_model_ends_the_run(tmp_path, command):
    """No update is finite. Through the command line."""
    argv = ["--preset", "tiny-test", "--steps", "9", "--no-eval", "--workdir", str(tmp_path)]
    rate = ["--set", "learning_rate=1e38", "--set", "warmup_steps=1", "--set", "max_skipped=3"]
    shown = command("train", *argv, *rate, "--set", "checkpoint_every=1", status=2)
    assert "error[not-finite]: steps 1 to 3 were skipped" in shown.err
    assert "the checkpoint of step 2 is kept" in shown.err
    assert shown.out.count("skipped: loss") == 3
    assert sorted(p.name for p in (tmp_path / "checkpoints").iterdir()) == ["1", "2"]


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


ENDLESS = """
import sys, jax
from examples.gshard.train import StopSignal
say = lambda line: print(line, flush=True)
asked = (lambda: say("asked")) if sys.argv[1] == "asks" else None
endless = jax.jit(lambda x: jax.lax.while_loop(lambda x: x >= 0, lambda x: x * 0, x))
with StopSignal(lambda: "step 4 is kept", asked):
    say("in XLA")
    jax.block_until_ready(endless(1.0))
"""


@pytest.mark.parametrize("number, asks", [(signal.SIGINT, True), (signal.SIGTERM, False)])
def test_a_process_ends_at_once_while_xla_is_busy_for_ever(number, asks):
    """The second signal does it, or the first where none is noted."""
    command = [sys.executable, "-c", ENDLESS, "asks" if asks else "ends"]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdout=pipe, stderr=pipe, text=True) as process:
        assert process.stdout is not None and process.stdout.readline() == "in XLA\n"
        process.send_signal(number)
        if asks:
            assert process.stdout.readline() == "asked\n"
            process.send_signal(number)
        out, err = process.communicate(timeout=60)
    assert (process.returncode, out, err) == (
        128 + number,
        "",
        "\ninterrupted at once: step 4 is kept\n",
    )


def test_the_first_signal_is_noted_and_handlers_come_back():
    before = signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGINT)
    said = []
    with StopSignal(lambda: "", lambda: said.append("asked")) as stop:
        assert stop.signal == 0
        os.kill(os.getpid(), signal.SIGTERM)
        assert stop.signal == signal.SIGTERM
    assert said == ["asked"]  # the thread has ended
    assert (signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGINT)) == before
    assert signal.set_wakeup_fd(-1) == -1
