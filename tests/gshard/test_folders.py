"""Folders in which `sbp train` cannot keep a run: an error before the first step, nothing lost; and
`sbp check`, which refuses what training would refuse."""

import fcntl
import json
import os
import shutil

import numpy as np
import pytest

from examples.gshard.config import TranslationConfig
from examples.gshard.corpus import generate
from examples.gshard.options import parse_args
from examples.gshard.tokenizer import Tokenizer
from sbp.errors import SbpError
from sbp.moe.checkpoint import Checkpoints, describe
from sbp.moe.step import TrainState
from sbp.moe.trainer import MetricsLog, read_metrics
from tests.gshard.runs import MODEL, TRAIN, begin, files_of_at_most

STATE = TrainState(np.int32(2), {"w": np.ones(4)}, None)
DESCRIPTION = describe(MODEL, TRAIN, generate(TRAIN).digest)
ANOTHER = {**DESCRIPTION, "model": {**DESCRIPTION["model"], "experts": 4}}


def is_a_file(folder):
    folder.write_text("mine")


def is_in_no_folder(folder):
    """Nobody can make folders here, not even root."""
    folder.symlink_to("/proc/1/run")


def has_a_file_for_checkpoints(folder):
    folder.mkdir()
    (folder / "checkpoints").write_text("mine")


def is_full(folder):
    """Linux says of /dev/full what it says of a full disk."""
    folder.mkdir()
    (folder / "source.model.part").symlink_to("/dev/full")


def has_another_model(folder):
    with Checkpoints(folder, ANOTHER) as checkpoints:
        checkpoints.save(STATE, {})


def has_another_vocabulary(folder):
    with Checkpoints(folder, DESCRIPTION) as checkpoints:
        checkpoints.bind("vocabulary", {"source": "a", "target": "b"})
        checkpoints.save(STATE, {})


FOLDERS = {
    is_a_file: "cannot write to {}: File exists. Free disk space, fix the folder",
    is_in_no_folder: "cannot write to {}: ",
    has_a_file_for_checkpoints: "cannot write to {}/checkpoints: ",
    is_full: "cannot write to {}/source.model: No space left on device. Free disk space",
    has_another_model: "{} holds a run of another configuration",
    has_another_vocabulary: "the checkpoints in {} were made with another vocabulary source and",
}


def contents(folder):
    """What files hold, but for the lock, and but for vocabularies, which a first run makes."""
    if not folder.is_dir():
        return folder.read_text() if folder.is_file() else None
    left_out = {".lock", "source.model", "target.model", "source.model.part"}
    files = (path for path in folder.rglob("*") if path.is_file() and path.name not in left_out)
    return {path: path.read_bytes() for path in files}


@pytest.mark.parametrize("make", FOLDERS, ids=lambda make: make.__name__)
def test_a_run_is_refused_before_its_first_step(make, tmp_path, command):
    folder = tmp_path / "run"
    make(folder)
    before = contents(folder)
    shown = command("train", "--preset", "tiny-test", "--workdir", str(folder), status=2)
    assert shown.err.startswith(f"error[bad-checkpoint]: {FOLDERS[make].format(folder)}")
    assert "Traceback" not in shown.err and "planned" not in shown.out
    assert contents(folder) == before


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
    others; a damaged or an older configuration of one with checkpoints is told or read."""
    with Checkpoints(tmp_path, DESCRIPTION):
        pass
    has_another_model(tmp_path)
    with pytest.raises(SbpError, match="another configuration"):
        Checkpoints(tmp_path, DESCRIPTION)
    # Checkpoints of older versions did not know their run by themselves.
    shutil.rmtree(tmp_path / "checkpoints" / "2" / "run")
    older = json.loads((tmp_path / "config.json").read_text())
    del older["train"]["corpus"]
    (tmp_path / "config.json").write_text(json.dumps(older))
    Checkpoints(tmp_path, ANOTHER, TranslationConfig).close()
    for damaged in ("[]", '{"model": null}', '{"model'):
        (tmp_path / "config.json").write_text(damaged)
        with pytest.raises(SbpError, match=r"config\.json is not the configuration of a run"):
            Checkpoints(tmp_path, ANOTHER)


def test_a_damaged_vocabulary_is_named(tmp_path):
    path = tmp_path / "source.model"
    for content in (b"", b"no model"):
        path.write_bytes(content)
        with pytest.raises(SbpError, match=r"source\.model is damaged; delete it"):
            Tokenizer.load(path)


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
    for path in (begun / "config.json", begun / "config.json" / "new"):
        assert_refused("config.json is a file", str(path))
    with (begun / ".lock").open("rb") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        assert_refused("another run is training", str(begun))
    (begun / "source.model").write_bytes((begun / "target.model").read_bytes())
    assert_refused("made with another vocabulary source;", str(begun))


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
