"""Several pairs in one row of a batch train as one pair a row. Each process makes its own rows of a
batch, and the rows of all processes are the batch of one process."""

import dataclasses

import jax
import numpy as np
import pytest

import sbp
from examples.gshard.data import Encoded, batches, make_batch, pack
from examples.gshard.presets import preset
from sbp.moe.config import BOS, EOS
from sbp.moe.hosts import BatchPart
from sbp.moe.layers import Segments
from sbp.moe.model import init_params, loss_fn
from sbp.moe.sharding import PLAIN, leaf_types, sharding_of
from sbp.moe.step import batch_shapes
from tests.moe.steps import assert_leaves_close
from tests.moe.test_model import QUICK
from tests.slices import sliced

LONG, MANY = 16, 60
AXES = (("data", 2), ("expert", 4))
MODEL = dataclasses.replace(
    preset("tiny-test").model,
    dtype="float64",
    source_length=LONG,
    target_length=LONG,
    groups=8,
    sequences_per_group=8,
    eval_capacity_factor_per_choice=8.0,  # of eight experts: every choice has a slot
    aux_coefficient=0.0,  # a mean over groups, which packing changes
)


def rows_of(rng, count, most):
    """Rows of ids that end in EOS, 0 behind."""
    sizes = rng.integers(1, most + 1, count)
    ids = rng.integers(4, 300, (count, LONG)).astype(np.int32)
    ids[np.arange(count), sizes - 1] = EOS
    return np.where(np.arange(LONG) < sizes[:, None], ids, 0).astype(np.int32)


def drawn(seed):
    rng = np.random.default_rng(seed)
    return rows_of(rng, MANY, 7), rows_of(rng, MANY, 9)


def pairs_in(ids, numbers):
    """The tokens of each pair of a row, in order."""
    return [tuple(ids[numbers == n].tolist()) for n in range(1, numbers.max(initial=0) + 1)]


@pytest.mark.parametrize("seed", range(5))
def test_every_pair_is_in_one_row_and_rows_have_no_gaps(seed):
    source, target = drawn(seed)
    packed = pack(source, target, seed)
    found = []
    for s, t, of_s, of_t in zip(packed.source, packed.target, *packed.segments, strict=True):
        for ids, numbers in ((s, of_s), (t, of_t)):
            filled = np.count_nonzero(ids)
            assert (ids[:filled] != 0).all() and (numbers[filled:] == 0).all()
            assert (np.diff(numbers[:filled]) >= 0).all() and numbers[0] == 1
        found += zip(pairs_in(s, of_s), pairs_in(t, of_t), strict=True)
    whole = [
        tuple(tuple(x[x != 0].tolist()) for x in pair) for pair in zip(source, target, strict=True)
    ]
    assert sorted(found) == sorted(whole)
    assert len(packed.source) < 0.7 * MANY


def test_each_target_starts_behind_its_own_bos():
    target = np.array([[7, 8, EOS, 9, EOS, 0]], np.int32)
    numbers = np.array([[1, 1, 1, 2, 2, 0]], np.int32)
    cfg = dataclasses.replace(MODEL, groups=1, sequences_per_group=2)
    batch = make_batch(target, target, cfg, Segments(numbers, numbers))
    assert [batch.target_in[0].tolist(), batch.segments.target[0].tolist()] == [
        [[BOS, 7, 8, BOS, 9, 0], [0] * 6],
        [numbers[0].tolist(), [0] * 6],
    ]
    alone = np.array([[7, 8, EOS], [9, EOS, 0]], np.int32)
    assert make_batch(alone, alone, cfg).target_in[0].tolist() == [[BOS, 7, 8], [BOS, 9, 0]]


def assert_packing_changes_nothing(cfg, params, axes, source, target):
    """Loss and gradients, added up over tokens and not averaged, are those of a row for each pair:
    packed on one device, and packed on a mesh."""

    def summed(sharding):
        return jax.value_and_grad(
            lambda p, batch: loss_fn(p, batch, cfg, sharding=sharding, share=(1.0, 1))[0]
        )

    rows = pack(source, target, seed=0)
    assert len(rows.source) < len(source)
    together = make_batch(rows.source, rows.target, cfg, rows.segments)
    alone = jax.jit(summed(PLAIN), compiler_options=QUICK)
    loss, grads = alone(params, make_batch(source, target, cfg))
    names, sizes = zip(*axes, strict=True)
    mesh, types = sbp.make_mesh(sizes, names), (leaf_types(axes), None)
    for step in (alone, sbp.jit(summed(sharding_of(axes)), mesh, types)):
        got, slopes = step(params, together)
        np.testing.assert_allclose(got, loss, rtol=1e-11)
        assert_leaves_close(slopes, grads, 1e-9, 1e-9)


@pytest.mark.laws
@pytest.mark.parametrize(
    ("axes", "options"),
    sliced(
        [
            (AXES, {}),
            ((("data", 2), ("model", 2)), {"experts": 0}),
            (
                (("expert", 4),),
                {"dispatch": "sort", "expert_activation": "swiglu", "shared_experts": 1},
            ),
            ((("data", 2), ("expert", 2)), {"router": "switch", "dispatch": "gather"}),
            ((("pod", 2), ("model", 2)), {"router": "sigmoid", "experts_per_token": 3}),
        ],
        0.2,
    ),
    ids=str,
)
def test_a_packed_batch_has_the_loss_and_the_gradients_of_its_pairs(axes, options):
    """M2. Pairs see neither each other nor each other's places; also on a mesh."""
    with jax.enable_x64(True):
        cfg = dataclasses.replace(MODEL, **options)
        assert_packing_changes_nothing(cfg, init_params(jax.random.key(0), cfg), axes, *drawn(0))


PARTS = dataclasses.replace(preset("tiny-test").model, groups=8, sequences_per_group=2)


def text(rows):
    """Rows of ids that are all different."""
    rng = np.random.default_rng(0)
    source, target = (rng.integers(4, 2**30, (rows, 16), np.int32) for _ in range(2))
    numbers = np.ones((rows, 16), np.int32)
    segments = Segments(numbers, numbers * 2)
    return Encoded(source=source, target=target, kept=tuple(range(rows)), segments=segments)


def mesh_of(devices, **axes):
    return jax.sharding.Mesh(np.asarray(devices).reshape(tuple(axes.values())), tuple(axes))


DEVICES = jax.devices()[:8]
TURNED = [DEVICES[i] for i in (0, 4, 1, 5, 2, 6, 3, 7)]  # groups of a process are not neighbours


@pytest.mark.parametrize("rows", [100, 11])  # 11 do not fill a batch
@pytest.mark.parametrize(
    ("mesh", "spec", "groups"),
    [
        (mesh_of(DEVICES, data=8), jax.sharding.PartitionSpec("data"), [0, 1, 2, 3]),
        (mesh_of(TURNED, data=8), jax.sharding.PartitionSpec("data"), [0, 2, 4, 6]),
        (mesh_of(DEVICES, data=2, expert=4), jax.sharding.PartitionSpec("expert"), range(8)),
        (
            mesh_of(TURNED, expert=4, model=2),
            jax.sharding.PartitionSpec("expert", None, "model"),
            range(8),
        ),
        (mesh_of(DEVICES, data=8), jax.sharding.PartitionSpec(), range(8)),
    ],
    ids=["split", "turned", "copied", "tokens", "whole"],
)
def test_the_parts_of_two_processes_are_the_batch_of_one(mesh, spec, groups, rows):
    encoded, shapes = text(rows), batch_shapes(PARTS, packed=True)
    shardings = jax.tree.map(lambda _: jax.sharding.NamedSharding(mesh, spec), shapes)
    parts = [BatchPart.of(shardings, shapes, half) for half in (DEVICES[:4], DEVICES[4:])]
    assert parts[0].groups.tolist() == list(groups)
    assert {*parts[0].groups, *parts[1].groups} == set(range(8))
    every = batches(encoded, PARTS, 3)
    makers = [batches(encoded, PARTS, 3, part.groups) for part in parts]
    for _ in range(9):  # more than an epoch
        batch = next(every)
        for part, made in zip(parts, map(next, makers), strict=True):
            for whole, mine in zip(jax.tree.leaves(batch), jax.tree.leaves(made), strict=True):
                np.testing.assert_array_equal(whole[part.groups], mine)
    assert every.get_state() == makers[0].get_state() == makers[1].get_state()


def test_a_process_with_all_devices_places_the_whole_batch():
    shapes = batch_shapes(PARTS, packed=True)
    sharding = jax.sharding.NamedSharding(
        mesh_of(TURNED, data=4, model=2), jax.sharding.PartitionSpec("data", None, "model")
    )
    part = BatchPart.of(jax.tree.map(lambda _: sharding, shapes), shapes)
    batch = next(batches(text(100), PARTS, 3, part.groups))
    for want, got in zip(jax.tree.leaves(batch), jax.tree.leaves(part.place(batch)), strict=True):
        assert got.sharding == sharding
        np.testing.assert_array_equal(got, want)
