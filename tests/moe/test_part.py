"""Each process makes its rows of a batch, and those of all are the batch of one process."""

import dataclasses

import jax
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from examples.gshard.data import Encoded, batches
from examples.gshard.presets import preset
from sbp.moe.hosts import BatchPart
from sbp.moe.packing import Segments
from sbp.moe.step import batch_shapes

MODEL = dataclasses.replace(preset("tiny-test").model, groups=8, sequences_per_group=2)


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
        (mesh_of(DEVICES, data=8), PartitionSpec("data"), [0, 1, 2, 3]),
        (mesh_of(TURNED, data=8), PartitionSpec("data"), [0, 2, 4, 6]),
        (mesh_of(DEVICES, data=2, expert=4), PartitionSpec("expert"), range(8)),
        (mesh_of(TURNED, expert=4, model=2), PartitionSpec("expert", None, "model"), range(8)),
        (mesh_of(DEVICES, data=8), PartitionSpec(), range(8)),
    ],
    ids=["split", "turned", "copied", "tokens", "whole"],
)
def test_the_parts_of_two_processes_are_the_batch_of_one(mesh, spec, groups, rows):
    encoded, shapes = text(rows), batch_shapes(MODEL, packed=True)
    shardings = jax.tree.map(lambda _: NamedSharding(mesh, spec), shapes)
    parts = [BatchPart.of(shardings, shapes, half) for half in (DEVICES[:4], DEVICES[4:])]
    assert parts[0].groups.tolist() == list(groups)
    assert {*parts[0].groups, *parts[1].groups} == set(range(8))
    every = batches(encoded, MODEL, 3)
    makers = [batches(encoded, MODEL, 3, part.groups) for part in parts]
    for _ in range(9):  # more than an epoch
        batch = next(every)
        for part, made in zip(parts, map(next, makers), strict=True):
            for whole, mine in zip(jax.tree.leaves(batch), jax.tree.leaves(made), strict=True):
                np.testing.assert_array_equal(whole[part.groups], mine)
    assert every.get_state() == makers[0].get_state() == makers[1].get_state()


def test_a_process_with_all_devices_places_the_whole_batch():
    shapes = batch_shapes(MODEL, packed=True)
    mesh = mesh_of(TURNED, data=4, model=2)
    sharding = NamedSharding(mesh, PartitionSpec("data", None, "model"))
    shardings = jax.tree.map(lambda _: sharding, shapes)
    part = BatchPart.of(shardings, shapes)
    batch = next(batches(text(100), MODEL, 3, part.groups))
    placed = part.place(batch)
    for want, got in zip(jax.tree.leaves(batch), jax.tree.leaves(placed), strict=True):
        assert got.sharding == sharding
        np.testing.assert_array_equal(got, want)
