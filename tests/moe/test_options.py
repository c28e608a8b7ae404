"""The command line of the training program."""

import pytest

from sbp.errors import SbpError
from sbp.moe.options import parse_args, parse_mesh
from sbp.moe.sharding import sharding_of


def test_options_override_the_preset():
    run = parse_args(
        [
            "--preset",
            "tiny-test",
            "--steps",
            "7",
            "--set",
            "dropout=0.3",
            "--set",
            "power=1",
            "--mesh",
            "expert=8",
        ]
    )
    assert (run.train.steps, run.model.dropout, run.train.power, run.mesh) == (
        7,
        0.3,
        1.0,
        (("expert", 8),),
    )
    assert str(run.workdir) == "runs/tiny-test"
    where = sharding_of(run.mesh)
    assert (where.groups["group"], where.experts["expert"]) == (("expert",), ("expert",))


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--preset", "tiny"], 'did you mean "tiny-mt"'),
        (["--stepz", "3"], 'did you mean "--steps"'),
        (["--set", "expertz=3"], 'did you mean "experts"'),
        (["--set", "experts"], "write NAME=VALUE"),
        (["--steps", "many"], "steps needs a value like"),
        (["--mesh", "data=2,expert"], "not of the form"),
        (["--mesh", "data=2,experts=4"], 'did you mean "expert"'),
        (["--steps"], "expected one argument"),
        (["--steps", "5", "--set", "steps=7"], "--steps 5 and --set steps=7 contradict"),
        (["--set", "steps=5", "--set", "steps=7"], "steps is set twice, to 5 and to 7"),
        (["--data", ""], "--data is empty"),
        (["--set", "sequence_parallel=true"], "which --mesh has not"),
        (["--mesh", "model=2", "--set", "dispatch=sort"], "leave the axis out of --mesh"),
        (["--data", "mine.tsv", "--languages", "3"], "--languages chooses languages of a corpus"),
        (["--set", "optimizer=adam"], 'did you mean "adamw"'),
        (["--set", "learning_rate=nan"], "learning_rate is nan"),
        (["--set", "clip_norm=-1"], "clip_norm is -1.0"),
    ],
)
def test_bad_options(argv, message):
    with pytest.raises(SbpError) as caught:
        parse_args(argv)
    assert message in str(caught.value)


def test_parse_mesh():
    assert parse_mesh("data=2,expert=4") == (("data", 2), ("expert", 4))
