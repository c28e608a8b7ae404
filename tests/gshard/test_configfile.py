"""Options of a training run in a TOML file."""

import pytest

from examples.gshard.options import parse_args
from sbp.errors import SbpError

RUNS = [
    ["--preset", "tiny-test"],
    ["--preset", "tiny-mt-dense", "--mesh", "data=4,model=2", "--set", "zero=1", "--no-eval"],
    [
        "--set",
        "optimizer=adamw",
        "--set",
        "weight_decay=0.1",
        "--workdir",
        'a "b" \\ é',
        "--seed=3",
    ],
    ["--corpus", "catalogues", "--set", "learning_rate=1e-05", "--tensorboard", "--steps", "9"],
    ["--data", "mine.tsv", "--eval-data", "theirs.tsv", "--set", "pack=true"],
]


def printed(argv, capsys):
    with pytest.raises(SystemExit) as ended:
        parse_args([*argv, "--print-config"])
    assert ended.value.code == 0
    return capsys.readouterr().out


@pytest.mark.parametrize("argv", RUNS, ids=" ".join)
def test_what_is_printed_reads_back_as_the_same_run(argv, tmp_path, capsys):
    file = tmp_path / "run.toml"
    file.write_text(printed(argv, capsys), "utf-8")
    assert parse_args(["--config", str(file)]) == parse_args(argv)
    assert printed(["--config", str(file)], capsys) == file.read_text("utf-8")


def test_the_command_line_goes_before_the_file(tmp_path):
    file = tmp_path / "run.toml"
    file.write_text('preset = "tiny-test"\nmesh = "data=8"\n[train]\nsteps = 5\nseed = 1\n')
    run = parse_args(["--config", str(file), "--steps", "6", "--mesh", "expert=2"])
    assert (run.train.steps, run.train.seed, run.mesh) == (6, 1, (("expert", 2),))
    assert run.workdir.as_posix() == "runs/tiny-test"
    assert parse_args(["--config", str(file), "--preset", "tiny-mt"]).model.experts == 8


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("stepps = 3", "no option 'stepps'; did you mean \"steps\""),
        ("steps = 3", "no option 'steps'; it belongs under [train]"),
        ("[model]\nsteps = 3", "no option 'steps' under [model]; it belongs under [train]"),
        ("[model]\nexpert = 3", 'did you mean "experts"'),
        ('[train]\nsteps = "3"', "steps is '3' under [train]; it must be a whole number"),
        ("[train]\nsteps = 3.5", "it must be a whole number"),
        ("[train]\nsteps = true", "it must be a whole number"),
        ("[train]\npack = 1", "it must be true or false"),
        ("[model]\ndtype = 16", "it must be text in quotes"),
        ("[train]\nseed = -5", "seed is -5"),
        ("model = 3", "model is a table"),
        ('evaluate = "no"', "evaluate is 'no'; it must be true or false"),
        ("[train", "is not TOML"),
        ("[train]\nsteps = 1\nsteps = 2", "is not TOML"),
        ('preset = "tiny"', "no preset 'tiny'"),
        ('mesh = "row=8"', "no mesh axis 'row'"),
        ("[train]\nweight_decay = 0.1", "weight_decay does nothing here"),
        ("# mine\nsteps = 3", "run.toml:2: no option 'steps'"),
        ("[model]\nexperts = 8\n\nexpert = 3\n[train]", "run.toml:4: no option 'expert'"),
        ("[model]\n[train]\nsteps = 1\npack = 1", "run.toml:4: pack is 1 under [train]"),
        ('evaluate = """\nno"""\nmodel = 3', "run.toml:2: evaluate is 'no'"),
        ("[model]\n[model.experts]\nof = 3", "run.toml:2: experts is {"),
    ],
)
def test_bad_files(text, message, tmp_path):
    file = tmp_path / "run.toml"
    file.write_text(text)
    with pytest.raises(SbpError) as caught:
        parse_args(["--config", str(file)])
    assert message in str(caught.value)


def test_files_that_cannot_be_read(tmp_path):
    with pytest.raises(SbpError, match=r"cannot read .*none: No such file"):
        parse_args(["--config", str(tmp_path / "none")])
    with pytest.raises(SbpError, match=r"cannot read .*: Is a directory"):
        parse_args(["--config", str(tmp_path)])
    (tmp_path / "latin").write_bytes(b"# \xe9")
    with pytest.raises(SbpError, match=r"is not TOML: .*utf-8"):
        parse_args(["--config", str(tmp_path / "latin")])
