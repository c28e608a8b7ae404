"""The command line of the training program."""

import pytest

from examples.gshard.options import parse_args, parse_mesh, undivided
from sbp.errors import SbpError
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
        (["--workdir", ""], "--workdir is empty"),
        (["--set", "dtype=float64"], "set JAX_ENABLE_X64=1"),
        (["--set", "weight_decay=0.1"], "only runs with optimizer adamw read it"),
        (["--set", "schedule=cosine", "--set", "warmup_steps=9"], "with schedule sqrt_decay"),
        (["--set", "router_bias_rate=0.1"], "only runs with router sigmoid"),
        (["--set", "dispatch=sort", "--set", "capacity_rounding=ceil"], "einsum or gather"),
        (["--preset", "tiny-mt-dense", "--set", "router=switch"], "only runs with experts"),
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


def test_options_that_something_reads_are_taken():
    run = parse_args(
        [
            "--set",
            "optimizer=adamw",
            "--set",
            "weight_decay=0.1",
            "--set",
            "decoder_router=sigmoid",
            "--set",
            "router_bias_rate=0.1",
            "--set",
            "capacity_rounding=ceil",
        ]
    )
    assert (run.train.weight_decay, run.model.router_bias_rate) == (0.1, 0.1)


def test_what_tensor_parallelism_cannot_split_is_said():
    run = parse_args(["--mesh", "model=8"])  # 4 heads, and all else in powers of two
    heads = "heads is 4, which 8 does not divide: it is not split on the mesh axis model"
    assert heads in undivided(run)
    assert not undivided(parse_args(["--mesh", "data=3,expert=5"]))
