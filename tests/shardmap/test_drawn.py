"""Random bodies: the checker rejects what is wrong and accepts what is right, by what running them
shows."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AbstractMesh, AxisType, PartitionSpec

import sbp
from tests.shardmap.drawn import AXIS, SHAPES, N, draw_body, is_right, outcome, split_dim
from tests.slices import sliced

pytestmark = pytest.mark.laws

SEEDS = sliced(range(120), 1 / 3)


@pytest.fixture(scope="module", autouse=True)
def double_precision():
    with jax.enable_x64(True):
        yield


def checked(body):
    """The report on a body whose out_specs say what its shapes do."""
    one, several = outcome(body)
    dim = split_dim(one.shape, several.shape[1:])
    outs = PartitionSpec() if dim is None else PartitionSpec(*([None] * dim), AXIS)
    mesh = AbstractMesh((N,), (AXIS,), axis_types=(AxisType.Auto,))
    region = jax.shard_map(
        body, mesh=mesh, in_specs=tuple(body.specs.values()), out_specs=outs, check_vma=False
    )
    return sbp.check_shard_map(
        region, *(jax.ShapeDtypeStruct(s, jnp.float64) for s in SHAPES.values()), mesh=mesh
    )


@pytest.mark.parametrize("seed", SEEDS)
def test_the_verdict_is_right(seed):
    body = draw_body(seed)
    if body is None:
        pytest.skip("nothing that was drawn fits together")
    report, right = checked(body), is_right(body)
    assert report.ok == right, f"{body}\n{report.text()}"


def test_the_draws_are_of_both_kinds():
    bodies = [b for b in map(draw_body, SEEDS) if b is not None]
    right = sum(map(is_right, bodies))
    assert len(bodies) > 5 / 6 * len(SEEDS)
    assert 1 / 6 < right / len(bodies) < 5 / 6
    assert np.mean([len(b.steps) for b in bodies]) > 2
