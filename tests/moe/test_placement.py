"""The training step on meshes with tensor and data parallelism, with a state that is split over all
devices, and as a pipeline, against one device."""

import dataclasses
import math
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import sbp
from examples.gshard.options import parse_args
from examples.gshard.presets import preset
from sbp.moe.model import init_params
from sbp.moe.sharding import PLAIN, Pipeline, leaf_types, sharding_of
from sbp.moe.step import gradients, state_shapes
from tests.moe.steps import (
    assert_equal_to_one_device,
    assert_leaves_close,
    assert_same_counts,
    planned_step,
)
from tests.moe.test_model import random_batch
from tests.slices import EXHAUSTIVE, sliced

CASES = (
    "expert=1",
    "expert=2",
    "expert=4",
    "expert=8",
    "data=2,expert=4",
    "data=4,expert=2",
    "pod=2,data=2,expert=2",
    "data=8",
    "data=3",
    "model=4",
    "pod=2,data=2,model=2",
    "data=2,expert=2,model=2",
    "expert=2,model=3",
    "data=2,model=2 --set sequence_parallel=true",
    "data=8 --set zero=1",
    "data=2,expert=4 --set zero=2 --set accumulate=2",
    "data=2,expert=2 --set zero=3",
    "data=2,expert=2,model=2 --set zero=3",
    "data=1,expert=3",  # eight experts
    "data=2,expert=2 --set router=noisy_top_k --set dispatch=gather --set clip_norm=1",
    "expert=4 --set router=sigmoid --set dispatch=sort --set shared_experts=1",
    "data=2,model=2 --set router=top_k --set experts_per_token=3 --set expert_activation=swiglu",
    "data=4 --set zero=3 --set optimizer=adamw --set schedule=constant --set learning_rate=0.001",
)


def run_of(case):
    mesh, *others = case.split()
    return parse_args(["--preset", "tiny-test", "--mesh", mesh, *others])


@pytest.mark.laws
@pytest.mark.parametrize("case", sliced(CASES, 3 / 23, laws=5 / 23, seed=2210))
def test_three_steps_equal_one_device(case):
    """G8, R1, A4, E5; `make laws` leaves out 18 of the 23 cases."""
    assert_equal_to_one_device(run_of(case), 3)


@pytest.mark.laws
@pytest.mark.skipif(not EXHAUSTIVE, reason="`make laws` runs it")
def test_twenty_steps_equal_one_device():
    """Dropout and random routing included."""
    assert_equal_to_one_device(run_of("data=2,expert=4"), 20)


def held(tree, shardings):
    """Bytes of one device."""
    return sum(
        math.prod(place.shard_shape(leaf.shape)) * leaf.dtype.itemsize
        for leaf, place in zip(jax.tree.leaves(tree), jax.tree.leaves(shardings), strict=True)
    )


@pytest.mark.parametrize(("zero", "part"), [(1, "optimizer"), (3, "params")])
def test_what_zero_splits_takes_an_eighth_on_each_of_eight_devices(zero, part):
    run = run_of(f"data=2,expert=4 --set zero={zero} --set optimizer=adamw")
    plan = planned_step(run.model, run.train, run.mesh)
    state = state_shapes(run.model, run.train)
    one = held(getattr(state, part), getattr(plan.in_shardings[0], part))
    whole = sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(getattr(state, part)))
    assert one < 1.01 * whole / 8


@pytest.mark.parametrize(
    ("key", "shape", "mesh", "spread", "text"),
    [
        ("w_in", (3, 16, 64), {"data": 8}, False, None),
        ("w_in", (3, 16, 63), {"data": 2, "model": 2}, True, "data:S(1) model:S(1)"),
        ("w_in", (3, 15, 63), {"data": 2, "model": 2}, True, "data:B model:B"),
        ("w_in", (3, 6, 63), {"data": 2, "pod": 4}, True, "data:S(1) pod:B"),
        ("w_in", (2, 6, 64), {"data": 4, "pod": 2}, True, "data:S(2) pod:S(2)"),
        ("query", (3, 16, 2, 5), {"model": 4}, False, None),  # two heads
        ("w_in", (3, 64), {"data": 2, "model": 2}, True, "data:S(1) model:S(1)"),  # factored
        ("expert_in", (3, 8, 16, 64), {"expert": 8}, False, None),
        ("expert_in", (3, 8, 16, 64), {"data": 2, "expert": 8}, True, "data:S(3) expert:S(1)"),
        ("expert_in", (3, 6, 16, 64), {"expert": 4}, True, "expert:S(3)"),
        ("norm", (1, 1), {"data": 8}, True, "data:B"),
        # Heads, hidden units and vocabularies.
        ("query", (3, 16, 2, 8), {"model": 2}, False, "model:S(2)"),
        ("output", (3, 2, 8, 16), {"model": 2}, False, "model:S(1)"),
        ("w_in", (3, 16, 64), {"model": 2}, False, "model:S(2)"),
        ("w_out", (3, 64, 16), {"model": 2}, False, "model:S(1)"),
        ("expert_in", (3, 8, 16, 64), {"model": 2}, False, "model:S(3)"),
        ("expert_out", (3, 8, 64, 16), {"model": 2}, False, "model:S(2)"),
        ("logits", (16, 32), {"model": 2}, False, "model:S(1)"),
        ("target_embedding", (32, 16), {"model": 2}, False, "model:S(0)"),
    ],
)
def test_types_of_leaves(key, shape, mesh, spread, text):
    type_of = leaf_types(tuple(mesh.items()), spread=spread)
    assert type_of((jax.tree_util.DictKey(key),), jax.ShapeDtypeStruct(shape, np.float32)) == text


DEEP = ("--set", "encoder_layers=4", "--set", "decoder_layers=4")


@pytest.mark.parametrize("microbatches", [1, 2, 5])
@pytest.mark.parametrize("stages", [1, 2, 4])
def test_every_microbatch_goes_through_every_layer_once(stages, microbatches):
    """x -> x * w + b for each of eight layers, where b lies beside the microbatch; and log(x) of
    each layer's operand is counted, so that a stage without a microbatch must not count."""
    rng = np.random.default_rng(stages + microbatches)
    weights, x = rng.uniform(0.5, 2, 8), rng.uniform(1, 2, (microbatches, 3))
    beside = rng.uniform(0, 1, (microbatches, 3))

    def stage(layers, x, beside, index):
        return jax.lax.scan(lambda x, w: (x * w + beside + index, jnp.sum(jnp.log(x))), x, layers)

    def run(weights, x):
        line = Pipeline(stages, microbatches, sbp.Layout())
        done, counts = line.run(stage, weights, x, jnp.asarray(beside))
        return jnp.sum(counts), (done, counts)

    with jax.enable_x64(True):
        grad, (done, counts) = jax.grad(run, has_aux=True)(jnp.asarray(weights), jnp.asarray(x))
    want, logs = x.copy(), np.zeros(8)
    for m in range(microbatches):
        for n, w in enumerate(weights):
            logs[n] += np.log(want[m]).sum()
            want[m] = want[m] * w + beside[m] + m
    np.testing.assert_allclose(done, want, rtol=1e-12)
    np.testing.assert_allclose(counts, logs, rtol=1e-12)
    assert np.isfinite(grad).all()


def test_turns_and_bubble():
    """GPipe: (G - 1) / (M + G - 1) of the turns."""
    for stages, microbatches in ((1, 4), (2, 1), (4, 8), (8, 3)):
        line = Pipeline(stages, microbatches, sbp.Layout())
        idle = sum(
            not 0 <= turn - stage < microbatches
            for turn in range(line.turns)
            for stage in range(stages)
        )
        assert line.bubble == pytest.approx(idle / (stages * line.turns))


def test_split_and_join_are_inverse():
    x = np.arange(24).reshape(12, 2)
    line = Pipeline(2, 3, sbp.Layout())
    parts = line.split(x)
    assert parts.shape == (3, 4, 2)
    np.testing.assert_array_equal(parts[1], x[1::3])
    np.testing.assert_array_equal(line.join(parts), x)


def test_gradients_are_those_of_the_layers_in_order():
    """Nothing is drawn at random here, so microbatches cannot be told from the whole batch."""
    cfg = dataclasses.replace(
        preset("tiny-test").model,
        **dict(dtype="float64", dropout=0.0, router="mixtral", encoder_layers=4, decoder_layers=4),
    )
    with jax.enable_x64(True):
        params, batch = init_params(jax.random.key(1), cfg), random_batch(cfg, 3)

        (grads, metrics), (got, counted) = (
            jax.jit(lambda p, s=s: gradients(p, batch, cfg, sharding=s))(params)
            for s in (PLAIN, PLAIN._replace(pipeline=Pipeline(2, 4, sbp.Layout())))
        )
        for name in ("loss", "nll", "aux", "correct", "layer_aux"):
            np.testing.assert_allclose(getattr(counted, name), getattr(metrics, name), rtol=1e-9)
        for side in ("encoder", "decoder"):
            assert_same_counts(getattr(counted, side), getattr(metrics, side))
        assert_leaves_close(got, grads, 1e-7, 1e-9)


@pytest.mark.laws
@pytest.mark.parametrize(
    "case",
    sliced(
        (
            "pipeline=2,data=2",
            "pipeline=2",
            "pipeline=2,expert=4",
            "pipeline=2,model=2",
            "pipeline=2,data=2,expert=2",
            "pipeline=2,data=2 --set zero=3",
            "data=2,expert=2",  # one stage
        ),
        1 / 7,
        laws=3 / 7,
        seed=3,
    ),
)
def test_two_steps_equal_one_device(case):
    """In float64, dropout and random routing included; `make laws` leaves out four cases."""
    mesh, *others = case.split()
    options = ["--preset", "tiny-test", "--mesh", mesh, *DEEP, *others]
    run = parse_args([*options, "--set", "pipeline_microbatches=2"])
    plan = assert_equal_to_one_device(run, 2, sharding_of((), microbatches=2))
    assert (pipeline := run.step_sharding.pipeline) is not None
    # Two sides, forward and backward.
    assert len(re.findall(rf"\b{pipeline.turns} trips", str(plan))) == 4


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ("--mesh pipeline=3", "pipeline has 3 devices; it must divide the 1 layer pairs"),
        (
            "--mesh data=2 --set pipeline_microbatches=3",
            "pipeline_microbatches is 3; it must divide the 8 groups",
        ),
        (
            "--mesh data=2 --set pipeline_microbatches=4 --set accumulate=4",
            "pipeline_microbatches is 4; it must divide the 2 groups",
        ),
        (
            "--mesh data=2 --set pipeline_microbatches=2 --set dispatch=sort --set router=top_k",
            'dispatch is "sort"; in a pipeline, or with pipeline_microbatches',
        ),
    ],
)
def test_what_does_not_fit_is_refused(options, said):
    with pytest.raises(sbp.SbpError, match=f"^unknown-option: .*{re.escape(said)}"):
        parse_args(["--preset", "tiny-test", *options.split()])
