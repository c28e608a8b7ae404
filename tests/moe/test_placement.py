"""The training step on meshes with tensor and data parallelism, and with a state that is split over
all devices, against one device."""

import math

import jax
import numpy as np
import pytest

from examples.gshard.options import parse_args
from sbp.moe.sharding import leaf_types
from sbp.moe.step import state_shapes
from tests.moe.steps import assert_equal_to_one_device, planned_step
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
    "data=2,expert=4 --set zero=2",
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


def test_tensor_parallelism_splits_heads_hidden_units_and_vocabularies():
    run = run_of("model=2")
    placed = planned_step(run.model, run.train, run.mesh).in_shardings[0].params
    layers = placed["decoder"]
    assert layers["cross1"]["query"].spec[2] == layers["cross1"]["output"].spec[1] == "model"
    assert layers["dense"]["w_in"].spec[2] == layers["dense"]["w_out"].spec[1] == "model"
    assert layers["moe"]["expert_in"].spec[3] == layers["moe"]["expert_out"].spec[2] == "model"
    assert placed["logits"].spec[1] == placed["target_embedding"].spec[0] == "model"


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
    ],
)
def test_types_of_leaves(key, shape, mesh, spread, text):
    leaf = jax.ShapeDtypeStruct(shape, np.float32)
    type_of = leaf_types(tuple(mesh.items()), spread=spread)
    assert type_of((jax.tree_util.DictKey(key),), leaf) == text
