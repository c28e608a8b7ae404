"""`lax.associative_scan` along a split dim: devices exchange a few elements, and each level of the
scan runs on shards."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import sbp
from tests.hardware import SENDS_FREELY
from tests.run.test_collectives import assert_within_plan


def recurrence(p: Any, q: Any) -> Any:
    return p[0] * q[0], q[0] * p[1] + q[1]


def scanned(a: Any, b: Any, **options: Any) -> Any:
    return lax.associative_scan(recurrence, (a, b), **options)


def gradient(a: Any, b: Any) -> Any:
    return jax.grad(lambda a, b: jnp.sum(scanned(a, b)[1] ** 2), argnums=(0, 1))(a, b)


SCANS = {
    "forward": scanned,
    "reverse": functools.partial(scanned, reverse=True),
    "gradient": gradient,
}


def pairs(length: int) -> tuple[Any, Any]:
    rng = np.random.default_rng(length)
    a, b = rng.normal(size=(2, length, 4)).astype(np.float32)
    return a, b


def assert_equals_one_device(f: Any, fn: Any, args: tuple[Any, ...]) -> None:
    for got, want in zip(f(*args), jax.jit(fn)(*args), strict=True):
        np.testing.assert_allclose(np.asarray(got), np.asarray(want), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("sizes", [(2,), (4,), (8,), (2, 4)])
@pytest.mark.parametrize("case", SCANS)
def test_scans_of_shards(case: str, sizes: Any):
    mesh = sbp.make_mesh(sizes, ("x", "y")[: len(sizes)])
    types = "x:S(0)" if len(sizes) == 1 else "x:S(0) y:S(1)"
    fn = SCANS[case]
    f = sbp.jit(
        fn,
        mesh,
        in_types=(types, types),
        out_types=(types, types),
        hardware=SENDS_FREELY,
        budgets=[sbp.forbid("all_to_all")],
    )
    args = pairs(32)
    assert_equals_one_device(f, fn, args)
    plan = f.plan(*args)
    if case == "forward":
        assert_within_plan(plan, sizes)
    # Of both arrays, up to three rows of each device are gathered; it has 32 / n of them. So are
    # those of the gradient.
    rows = 6 if case == "gradient" else 3
    row = 16 / (sizes[1] if len(sizes) > 1 else 1)
    assert plan.cost.bytes_per_device <= 2 * rows * row * (sizes[0] - 1)


@pytest.mark.parametrize("case", SCANS)
def test_sizes_that_do_not_divide(case: str):
    mesh = sbp.make_mesh((4,), ("x",))
    fn = SCANS[case]

    def padded(a: Any, b: Any) -> Any:
        return fn(*(sbp.split(v, 0, "x") for v in (a, b)))

    f = sbp.jit(padded, mesh, hardware=SENDS_FREELY, budgets=[sbp.forbid("all_to_all")])
    assert_equals_one_device(f, padded, pairs(21))


@pytest.mark.parametrize("sizes", [(2, 4), (2, 2, 2)])
@pytest.mark.parametrize("length", [64, 61])
def test_a_dim_that_all_axes_split(sizes: Any, length: int):
    mesh = sbp.make_mesh(sizes, ("x", "y", "z")[: len(sizes)])
    axes = dict.fromkeys(mesh.axis_names, sbp.S(0))

    def split(a: Any, b: Any) -> Any:
        found = scanned(*(sbp.annotate(v, **axes) for v in (a, b)))
        return jax.tree.map(lambda v: sbp.annotate(v, **axes), found)

    f = sbp.jit(split, mesh, in_types=("B", "B"), hardware="tpu-v5e")
    assert_equals_one_device(f, split, pairs(length))


def test_levels_run_on_shards_of_two_axes():
    """A few rows of small levels are sent, and no shard."""
    types = "x:S(0) y:S(0)"
    mesh = jax.sharding.AbstractMesh((2, 4), ("x", "y"))
    f = sbp.jit(scanned, mesh, (types, types), (types, types), hardware="tpu-v5e")
    plan = f.plan(*[jax.ShapeDtypeStruct((2**16, 4), np.float32)] * 2)
    assert plan.cost.bytes_per_device < 2**16 * 16 / 8 / 100


def segmented(x: Any) -> Any:
    """Running sums that begin anew at every fifth row."""

    def joined(p: Any, q: Any) -> Any:
        return p[0] | q[0], jnp.where(q[0][:, None], q[1], p[1] + q[1])

    return lax.associative_scan(joined, (jnp.arange(len(x)) % 5 == 0, x))[1]


def of_segmented(x: Any) -> Any:
    return jax.grad(lambda x: jnp.sum(segmented(x) ** 2))(x)


def products(x: Any) -> Any:
    """Products of 2x2 matrices."""
    near_one = 0.3 * x.reshape(-1, 2, 2) + jnp.eye(2)
    return lax.associative_scan(lambda a, b: b @ a, near_one, reverse=True)


def smallest(x: Any) -> Any:
    """The smallest element so far, where it was first, and how often it was there."""

    def joined(p: Any, q: Any) -> Any:
        count = jnp.where(q[0] < p[0], q[2], p[2] + jnp.where(q[0] == p[0], q[2], 0))
        return jnp.minimum(p[0], q[0]), jnp.where(q[0] < p[0], q[1], p[1]), count

    x = jnp.round(2 * x)
    numbers = lax.broadcasted_iota(jnp.int32, x.shape, 0)
    return lax.associative_scan(joined, (x, numbers, jnp.ones_like(numbers)))


@pytest.mark.parametrize(("sizes", "length"), [((8,), 16), ((2, 2, 2), 13)])
@pytest.mark.parametrize("fn", [segmented, of_segmented, products, smallest])
def test_other_scans(fn: Any, sizes: Any, length: int):
    """Sums of segments, products of matrices, and triples, even and uneven."""
    mesh = sbp.make_mesh(sizes, ("x", "y", "z")[: len(sizes)])
    axes = dict.fromkeys(mesh.axis_names, sbp.S(0))

    def split(x: Any) -> Any:
        return jax.tree.leaves(fn(sbp.annotate(x, **axes)))

    f = sbp.jit(split, mesh, hardware=SENDS_FREELY)
    assert_equals_one_device(f, split, (pairs(length)[0],))
