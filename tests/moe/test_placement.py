"""The training step on meshes with tensor and data parallelism, and with a state that is split over
all devices, against one device."""

import dataclasses
import math

import jax
import numpy as np
import pytest

import sbp
from sbp.moe.options import parse_args
from sbp.moe.sharding import leaf_types
from sbp.moe.step import batch_shapes, init_state, make_train_step, state_types
from tests.moe.routing import assert_same_counts
from tests.moe.test_model import random_batch
from tests.slices import sliced

CASES = (
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
    "data=4 --set zero=3 --set optimizer=adamw --set schedule=constant --set learning_rate=0.001",
)


def run_of(case):
    mesh, *others = case.split()
    return parse_args(["--preset", "tiny-test", "--mesh", mesh, *others])


def planned(run, model):
    mesh = sbp.make_mesh([size for _, size in run.mesh], [name for name, _ in run.mesh])
    step = sbp.jit(
        make_train_step(model, run.train, run.sharding),
        mesh,
        in_types=(state_types(run.train, run.mesh), None),
        donate_argnums=(0,),
    )
    return step.plan(jax.eval_shape(lambda: init_state(model, run.train)), batch_shapes(model))


@pytest.mark.parametrize("case", sliced(CASES, 3 / 12, laws=9 / 12, seed=5))
def test_three_steps_equal_one_device(case):
    """In float64 and free-running: losses, routing, and all of the state. `make laws` leaves out a
    quarter of the cases."""
    with jax.enable_x64(True):
        run = run_of(case)
        model = dataclasses.replace(run.model, dtype="float64")
        plan = planned(run, model)
        single = jax.jit(make_train_step(model, run.train))
        whole = init_state(model, run.train)
        split = jax.device_put(jax.device_get(whole), plan.in_shardings[0])
        for seed in range(3):
            batch = random_batch(model, seed)
            whole, want = single(whole, batch)
            split, got = plan(split, batch)
            np.testing.assert_allclose(got.loss, want.loss, rtol=1e-9)
            np.testing.assert_allclose(got.grad_norm, want.grad_norm, rtol=1e-9)
            for side in ("encoder", "decoder"):
                assert_same_counts(getattr(got, side), getattr(want, side))
        for a, b in zip(*map(jax.tree.leaves, (split, whole)), strict=True):
            scale = float(np.abs(b).max(initial=0.0)) or 1.0
            assert np.mean(np.abs(np.asarray(a) - np.asarray(b))) <= 1e-7 * scale


def held(tree, shardings):
    """Bytes of one device."""
    return sum(
        math.prod(place.shard_shape(leaf.shape)) * leaf.dtype.itemsize
        for leaf, place in zip(jax.tree.leaves(tree), jax.tree.leaves(shardings), strict=True)
    )


@pytest.mark.parametrize(("zero", "part"), [(1, "optimizer"), (3, "params")])
def test_what_zero_splits_takes_an_eighth_on_each_of_eight_devices(zero, part):
    run = run_of(f"data=2,expert=4 --set zero={zero} --set optimizer=adamw")
    plan = planned(run, run.model)
    state = jax.eval_shape(lambda: init_state(run.model, run.train))
    one = held(getattr(state, part), getattr(plan.in_shardings[0], part))
    whole = sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(getattr(state, part)))
    assert one < 1.01 * whole / 8


def test_tensor_parallelism_splits_heads_hidden_units_and_vocabularies():
    run = run_of("model=2")
    placed = planned(run, run.model).in_shardings[0].params
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
