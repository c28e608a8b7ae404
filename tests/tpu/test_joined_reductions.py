"""The TPU compiler joins all-reduces that do not wait for each other, and no other collective:
what `sbp.infer.together` charges."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.experimental import topologies
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from benchmarks.hlo.traffic import collectives
from sbp.infer.space import JOINED_BYTES

pytestmark = pytest.mark.tpu

SHAPES = [(1024, 64 * k) for k in (1, 2, 3, 4)]
WHOLE, SPLIT = PartitionSpec(), PartitionSpec("a")


def compiled(collective, before, after, shapes=SHAPES):
    """The kinds of the collectives that the compiler makes of some over one axis of two."""
    chips = topologies.get_topology_desc(platform="tpu", topology_name="v5e:4x4").devices
    mesh = Mesh(np.array(chips).reshape(4, 4), ("a", "b"))
    f = jax.shard_map(
        lambda xs: [collective(x) for x in xs],
        mesh=mesh,
        in_specs=([before] * len(shapes),),
        out_specs=[after] * len(shapes),
        check_vma=False,
    )
    sharding = NamedSharding(mesh, before)
    args = [jax.ShapeDtypeStruct(s, jnp.float32, sharding=sharding) for s in shapes]
    text = jax.jit(f).lower(args).compile().as_text()
    assert text
    return [c.kind for c in collectives(text, mesh.size)]


def test_all_reduces_are_one():
    assert compiled(lambda x: lax.psum(x, "a"), WHOLE, WHOLE) == ["all-reduce"]


@pytest.mark.parametrize("mib", [8, 16, 32])
def test_all_reduces_are_one_up_to_a_size(mib):
    size = mib * 2**20
    shapes = [(size // 4 // 1024, 1024)] * 16
    found = compiled(lambda x: lax.psum(x, "a"), WHOLE, WHOLE, shapes)
    assert found == ["all-reduce"] * math.ceil(16 * size / JOINED_BYTES)


def test_other_collectives_are_not():
    scattered = compiled(lambda x: lax.psum_scatter(x, "a", tiled=True), WHOLE, SPLIT)
    gathered = compiled(lambda x: lax.all_gather(x, "a", tiled=True), SPLIT, WHOLE)
    assert scattered == ["reduce-scatter"] * 4
    assert gathered == ["all-gather"] * 4
