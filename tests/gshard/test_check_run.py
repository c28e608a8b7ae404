"""`sbp check`: what training would refuse is refused without training."""

import fcntl

import pytest

from examples.gshard.options import parse_args
from sbp.cli import main
from sbp.errors import SbpError
from tests.gshard.runs import begin

TINY = ["--preset", "tiny-test", "--mesh", "expert=2"]


def checked(capsys, *argv):
    code = main(["check", *TINY, *argv])
    said = capsys.readouterr()
    return code, said.out, " ".join(said.err.split())


def test_a_right_run_shows_its_types_and_writes_nothing(tmp_path, capsys):
    folder = tmp_path / "runs" / "new"
    code, out, err = checked(capsys, "--workdir", str(folder))
    assert (code, err) == (0, "")
    assert "sentence pairs in" in out and "vocabularies of" in out and "precision:" in out
    assert "sbp train would begin in" in out
    assert list(tmp_path.iterdir()) == []


def test_folders_that_training_refuses(tmp_path, capsys):
    begun = begin(tmp_path / "begun", parse_args(TINY)).folder
    where = ["--workdir", str(begun)]
    for argv, message in (
        ([*where, "--seed", "3"], "train.seed: checkpoint 0, now 3"),
        ([*where, "--set", "model_dim=64"], "model.model_dim: checkpoint"),
        (["--workdir", str(begun / "config.json")], "config.json is a file"),
        (["--workdir", str(begun / "config.json" / "new")], "config.json is a file"),
    ):
        code, out, err = checked(capsys, *argv)
        assert (code, message in err, "would begin" in out) == (2, True, False), err
    with (begun / ".lock").open("rb") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        assert "another run is training" in checked(capsys, *where)[2]
    (begun / "source.model").write_bytes((begun / "target.model").read_bytes())
    assert "the vocabulary source in" in checked(capsys, *where)[2]
    assert "would begin" not in checked(capsys, *where)[1]


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--preset", "tiny-tests"], "no preset 'tiny-tests'"),
        (["--mesh", "row=2"], "no mesh axis 'row'"),
        (["--set", "learning_rate=nan"], "learning_rate is nan"),
        (["--data", "absent.tsv"], "absent.tsv"),
        (["--set", "source_length=1"], "no sentence pair fits 1 source"),
        (["--eval-data", "absent.tsv"], "--eval-data is a test set for your own text"),
    ],
)
def test_what_training_refuses_is_refused(argv, message, tmp_path, capsys):
    code, _, err = checked(capsys, "--workdir", str(tmp_path / "run"), *argv)
    assert code == 2 and message in err


def test_a_disk_without_room_is_refused(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("shutil.disk_usage", lambda path: type("Full", (), {"free": 4096}))
    code, _, err = checked(capsys, "--workdir", str(tmp_path / "run"))
    assert code == 2 and "has 0.0 MiB of room left" in err


def test_help_names_the_command(capsys):
    assert main(["train", "--help"]) == 0
    assert capsys.readouterr().out.startswith("usage: sbp train ")
    assert main(["check", "--help"]) == 0
    said = capsys.readouterr().out
    assert said.startswith("usage: sbp check ") and "the options of\n`sbp train`" in said
    with pytest.raises(SbpError, match="no option"):
        parse_args(["--presett", "tiny-mt"])
