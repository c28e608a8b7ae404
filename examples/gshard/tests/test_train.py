"""Runs of the training program that are stopped, killed, and out of room, and end as others do;
folders in which `sbp train` cannot keep a run: an error before the first step, nothing lost; and
`sbp check`, which refuses what training would refuse."""

import errno
import fcntl
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from contextlib import ExitStack
from pathlib import Path

import jax
import numpy as np
import pytest
from rich.console import Console

from examples.gshard.config import TranslationConfig
from examples.gshard.corpus import generate
from examples.gshard.export import open_run
from examples.gshard.hosts import between_processes
from examples.gshard.options import parse_args
from examples.gshard.tests.runs import (
    MODEL,
    NEVER,
    TRAIN,
    Moment,
    Training,
    assert_same_runs,
    begin,
    files_of_at_most,
    folders,
    kill,
    moments,
)
from examples.gshard.tokenizer import Tokenizer
from examples.gshard.train import StopSignal, train as train_run
from sbp.errors import SbpError
from sbp.moe.checkpoint import Checkpoints, describe, saved_steps
from sbp.moe.step import TrainState
from sbp.moe.trainer import MetricsLog, read_metrics
from tests.same import refused
from tests.slices import EXHAUSTIVE


def test_user_errors_exit_without_a_traceback(tmp_path, command):
    argv = ["--data", str(tmp_path / "missing.tsv"), "--workdir", str(tmp_path / "run")]
    assert command("train", *argv, status=2).err.startswith("error[bad-corpus]: cannot read")
    assert not (tmp_path / "run").exists()


def test_a_decoder_only_model_trains_on_plain_text(tmp_path, command):
    text = tmp_path / "corpus.txt"
    text.write_text("".join(f"{i} is the next number of a text\n" for i in range(200)), "utf-8")
    argv = [
        *["--preset", "tiny-test", "--steps", "3", "--data", str(text)],
        *["--workdir", str(tmp_path / "run")],
    ]
    assert "a model with an encoder cannot learn from" in command("train", *argv, status=2).err
    vocabulary = ["--set", "source_vocab=64", "--set", "target_vocab=64"]
    shown = command("train", *argv, "--set", "encoder_layers=0", *vocabulary).out
    assert " texts to train on; held out: " in shown
    loss, perplexity = map(
        float, re.findall(r"held-out loss ([\d.]+) per token, perplexity ([\d.]+)", shown)[-1]
    )
    assert perplexity == pytest.approx(np.exp(loss), rel=0.01)
    assert read_metrics(tmp_path / "run")[-1]["heldout_nll"] == pytest.approx(loss, abs=1e-3)
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
    """The disk gets full between the checkpoints of steps 2 and 4."""
    whole, folder = train(tmp_path / "room", 5), tmp_path / "full"
    with ExitStack() as full:

        def fill(number):
            while number == 3 and not (folder / "checkpoints" / "2").exists():
                time.sleep(0.01)  # it is still being written
            if number == 4:
                full.enter_context(files_of_at_most(2**14))

        refused(r"File too large; the checkpoint of step 2 is kept", train, folder, 5, fill)
    # Threads of this process may still write to the checkpoint that failed.
    shutil.copytree(
        folder, tmp_path / "copy", ignore=shutil.ignore_patterns("*.orbax-checkpoint-tmp")
    )
    rest = train(tmp_path / "copy", 5)
    assert (rest.stopped, rest.latest, len(rest.losses)) == (0, 5, 3)
    assert "resumed at step 2" in rest.shown
    jax.tree.map(np.testing.assert_array_equal, whole.state, rest.state)


def test_a_run_that_is_killed_as_it_saves_goes_on_as_if_it_were_not(train, tmp_path):
    killed, whole = tmp_path / "killed", tmp_path / "whole"
    command = [sys.executable, "-m", "examples.gshard.tests.runs", str(killed), str(NEVER)]
    train(whole, 4)  # fills the cache of compiled programs, which a kill must not damage
    kill(command, {}, killed, Moment("begun", 0.02))
    steps = max([0, *saved_steps(killed / "checkpoints")]) + 5
    train(killed, steps)
    train(whole, steps)
    assert_same_runs(killed, whole)


def test_a_rate_that_destroys_the_model_ends_the_run(tmp_path, command):
    """No update is finite. Through the command line."""
    shown = command(
        *["train", "--preset", "tiny-test", "--workdir", str(tmp_path), "--no-eval"],
        *["--steps", "9", "--set", "checkpoint_every=1", "--set", "max_skipped=3"],
        *["--set", "learning_rate=1e38", "--set", "warmup_steps=1"],
        status=2,
    )
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
        return [
            *[sys.executable, "-m", "sbp", "train", "--preset", "tiny-test"],
            *["--workdir", str(workdir), "--steps", str(steps)],
            *["--set", "checkpoint_every=2", "--no-eval"],
        ]

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
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
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


# ---- folders that cannot keep a run --------------------------------------------------------------


STATE = TrainState(np.int32(2), {"w": np.ones(4)}, None)
DESCRIPTION = describe(MODEL, TRAIN, generate(TRAIN).digest)
ANOTHER = {**DESCRIPTION, "model": {**DESCRIPTION["model"], "experts": 4}}


def has_a_file_for_checkpoints(folder):
    folder.mkdir()
    (folder / "checkpoints").write_text("mine")


def is_full(folder):
    """Linux says of /dev/full what it says of a full disk."""
    folder.mkdir()
    (folder / "source.model.part").symlink_to("/dev/full")


def has_a_checkpoint(folder, description, **vocabulary):
    with Checkpoints(folder, description) as checkpoints:
        checkpoints.bind("vocabulary", vocabulary)
        checkpoints.save(STATE, {})


FOLDERS = {
    "is_a_file": (
        lambda folder: folder.write_text("mine"),
        "cannot write to {}: File exists. Free disk space, fix the folder",
    ),
    # Nobody can make folders here, not even root.
    "is_in_no_folder": (lambda folder: folder.symlink_to("/proc/1/run"), "cannot write to {}: "),
    "has_a_file_for_checkpoints": (has_a_file_for_checkpoints, "cannot write to {}/checkpoints: "),
    "is_full": (
        is_full,
        "cannot write to {}/source.model: No space left on device. Free disk space",
    ),
    "has_another_model": (
        lambda folder: has_a_checkpoint(folder, ANOTHER),
        "{} holds a run of another configuration",
    ),
    "has_another_vocabulary": (
        lambda folder: has_a_checkpoint(folder, DESCRIPTION, source="a", target="b"),
        "the checkpoints in {} were made with another vocabulary source and",
    ),
}


def contents(folder):
    """What files hold, but for the lock, and but for vocabularies, which a first run makes."""
    if not folder.is_dir():
        return folder.read_text() if folder.is_file() else None
    left_out = {".lock", "source.model", "target.model", "source.model.part"}
    files = (path for path in folder.rglob("*") if path.is_file() and path.name not in left_out)
    return {path: path.read_bytes() for path in files}


@pytest.mark.parametrize(("make", "said"), FOLDERS.values(), ids=list(FOLDERS))
def test_a_run_is_refused_before_its_first_step(make, said, tmp_path, command):
    folder = tmp_path / "run"
    make(folder)
    before = contents(folder)
    shown = command("train", "--preset", "tiny-test", "--workdir", str(folder), status=2)
    assert shown.err.startswith(f"error[bad-checkpoint]: {said.format(folder)}")
    assert "Traceback" not in shown.err and "planned" not in shown.out
    assert contents(folder) == before


def test_processes_compare_the_held_out_text(tmp_path, monkeypatch):
    seen = []

    def agree(what, mine, differences):
        seen.append(mine)
        raise SbpError("seen")

    monkeypatch.setattr("examples.gshard.train.agree", agree)
    own = tmp_path / "own"
    own.write_text("".join(f"{i} mots\t{i} words\tfr\n" for i in range(200)))
    argv = ["--preset", "tiny-test", "--workdir", str(tmp_path / "run"), "--data", str(own)]
    for text in ("one", "two"):
        (tmp_path / text).write_text(f"un\t{text}\tfr\n")
        run = parse_args([*argv, "--eval-data", str(tmp_path / text)])
        refused("seen", train_run, run, Console(quiet=True))
    assert [line.partition(":")[0] for line in between_processes(*seen)] == ["heldout.digest"]


def test_a_disk_without_room_for_a_checkpoint_is_refused(tmp_path, command, monkeypatch):
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=2**18))
    said = "has 0.2 MiB of room left, and a checkpoint takes 0."
    for name in ("train", "check"):
        argv = [name, "--preset", "tiny-test", "--workdir", str(tmp_path / "run")]
        assert said in " ".join(command(*argv, status=2).err.split())
    assert not (tmp_path / "run" / "source.model").exists()


def test_a_folder_in_which_a_run_trains_is_refused(tmp_path, command):
    with Checkpoints(tmp_path, DESCRIPTION):
        said = command("train", "--preset", "tiny-test", "--workdir", str(tmp_path), status=2).err
    assert "another run is training in" in said


def test_a_folder_without_locks_is_named(tmp_path, monkeypatch):
    def flock(held, kind):
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", flock)
    refused(r"cannot lock .*: No locks available; choose", Checkpoints, tmp_path, DESCRIPTION)


def test_numbers_for_which_there_is_no_room_end_the_run(tmp_path):
    log, file = MetricsLog(tmp_path, 0), tmp_path / "metrics.jsonl"
    log.write(1, {"loss": 2.0})
    full = pytest.raises(SbpError, match=r"cannot write to .*metrics.jsonl: File too large")
    with files_of_at_most(os.path.getsize(file) + 5), full, log:
        log.write(2, {"loss": 1.0})
    assert len(file.read_text().splitlines()) == 2  # one of them in part
    assert read_metrics(tmp_path) == [{"step": 1, "loss": 2.0}]


def test_a_run_without_a_checkpoint_does_not_bind_its_folder(tmp_path):
    """A first run that was refused, or killed before its first checkpoint, leaves the folder to
    others."""
    with Checkpoints(tmp_path, DESCRIPTION):
        pass
    has_a_checkpoint(tmp_path, ANOTHER)
    refused("another configuration", Checkpoints, tmp_path, DESCRIPTION)


def test_an_option_that_a_run_does_not_know_had_its_default(tmp_path):
    older = {name: value for name, value in DESCRIPTION["train"].items() if name != "corpus"}
    has_a_checkpoint(tmp_path, {**DESCRIPTION, "train": older})
    Checkpoints(tmp_path, DESCRIPTION, TranslationConfig).close()


def test_a_damaged_vocabulary_is_named(tmp_path):
    path = tmp_path / "source.model"
    for content in (b"", b"no model"):
        path.write_bytes(content)
        refused(r"source\.model is damaged; delete it", Tokenizer.load, path)


def test_what_cannot_be_read_is_named(tmp_path, monkeypatch):
    (tmp_path / "private").mkdir()
    refused(r"cannot read .*private: Is a directory", Tokenizer.load, tmp_path / "private")

    def iterdir(path):
        if "private" in path.parts:
            raise PermissionError(errno.EACCES, "Permission denied")
        return (path / name for name in os.listdir(path))

    monkeypatch.setattr(Path, "iterdir", iterdir)
    refused(r"no checkpoint in .*typo\. Name", open_run, tmp_path / "typo")
    refused(r"cannot read .*checkpoints: Permission", open_run, tmp_path / "private")


TINY = ["--preset", "tiny-test", "--mesh", "expert=2"]


def test_a_right_run_shows_its_types_and_writes_nothing(tmp_path, command):
    out, err = command("check", *TINY, "--workdir", str(tmp_path / "runs" / "new"))
    assert not err and "sbp train would begin in" in out
    assert "sentence pairs in" in out and "vocabularies of" in out and "precision:" in out
    assert list(tmp_path.iterdir()) == []


def test_folders_that_training_refuses(tmp_path, command):
    begun = begin(tmp_path / "begun", parse_args(TINY)).folder
    check = ["check", *TINY, "--workdir"]

    def assert_refused(message, *argv):
        out, err = command(*check, *argv, status=2)
        assert message in " ".join(err.split()) and "would begin" not in out

    assert_refused("train.seed: checkpoint 0, now 3", str(begun), "--seed", "3")
    assert_refused("model.model_dim: checkpoint", str(begun), "--set", "model_dim=64")
    for path in (begun / "source.model", begun / "source.model" / "new"):
        assert_refused("source.model is a file", str(path))
    with (begun / ".lock").open("rb") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        assert_refused("another run is training", str(begun))
    (begun / "source.model").write_bytes((begun / "target.model").read_bytes())
    assert_refused("made with another vocabulary source;", str(begun))


def test_a_private_folder_is_named(tmp_path, command, monkeypatch):
    exists = Path.exists

    def of_others(path, **options):
        if "private" in path.parts:
            raise PermissionError(errno.EACCES, "Permission denied")
        return exists(path, **options)

    monkeypatch.setattr(Path, "exists", of_others)
    said = command("check", *TINY, "--workdir", str(tmp_path / "private" / "run"), status=2).err
    assert "run: Permission denied" in " ".join(said.split())


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--preset", "tiny-tests"], "no preset 'tiny-tests'"),
        (["--mesh", "row=2"], "no mesh axis 'row'"),
        (["--set", "learning_rate=nan"], "learning_rate is nan"),
        (["--data", "absent.tsv"], "absent.tsv"),
        (["--set", "source_length=1"], "no sentence pair fits 1 source"),
        (["--eval-data", "absent.tsv"], "--eval-data is a test set for your own text"),
        (["--set", "eval_capacity_factor_per_choice=0"], "an expert has no slot"),
    ],
)
def test_what_training_refuses_is_refused(argv, message, tmp_path, command):
    said = command("check", *TINY, "--workdir", str(tmp_path / "run"), *argv, status=2).err
    assert message in " ".join(said.split())


def test_help_names_the_command(command):
    assert command("train", "--help").out.startswith("usage: sbp train ")
    said = " ".join(command("check", "--help").out.split())
    assert said.startswith("usage: sbp check ") and "the options of `sbp train`" in said
