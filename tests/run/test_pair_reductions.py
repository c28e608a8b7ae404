"""`lax.reduce` by a function of pairs along a split dim: only the pairs of the shards are sent."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import sbp
from tests.hardware import SENDS_FREELY
from tests.run.test_collectives import assert_within_plan


def first_greatest(x: Any, at: Any) -> Any:
    """The greatest elements along dims 0 and 1, each with the smallest of its indices."""

    def better(p: Any, q: Any) -> Any:
        left = (p[0] > q[0]) | ((p[0] == q[0]) & (p[1] < q[1]))
        return jnp.where(left, p[0], q[0]), jnp.where(left, p[1], q[1])

    starts = np.float32(-np.inf), np.int32(np.iinfo(np.int32).max)
    return lax.reduce((x, at), starts, better, (0, 1))


def log_sum_exp(x: Any, ones: Any) -> Any:
    """The maxima and the sums of exponentials along dims 0 and 1."""

    def joined(p: Any, q: Any) -> Any:
        top = jnp.maximum(p[0], q[0])
        safe = jnp.where(top == -jnp.inf, 0.0, top)
        return top, p[1] * jnp.exp(p[0] - safe) + q[1] * jnp.exp(q[0] - safe)

    return lax.reduce((x, ones), (np.float32(-np.inf), np.float32(0)), joined, (0, 1))


@pytest.mark.parametrize("sizes", [(2,), (4,), (8,), (2, 4)])
@pytest.mark.parametrize("split", ["x:S(0) y:S(1)", "x:S(0) y:S(0)"])
def test_pairs_are_exchanged(sizes: tuple[int, ...], split: str):
    """One dim over two mesh axes, and a dim over each; sizes that do not divide."""
    names = ("x", "y")[: len(sizes)]
    split = " ".join(split.split()[: len(sizes)])
    shape = 13, 9, 3
    x = np.random.default_rng(0).integers(-3, 4, shape).astype(np.float32)
    index = np.arange(x.size, dtype=np.int32).reshape(shape)

    def fn(x: Any, index: Any) -> Any:
        x, index, ones = (sbp.annotate(v, split) for v in (x, index, jnp.ones_like(x)))
        return first_greatest(x, index), log_sum_exp(x, ones)

    f = sbp.jit(
        fn,
        sbp.make_mesh(sizes, names),
        hardware=SENDS_FREELY,
        budgets=[sbp.forbid("all_gather", above=3 * 4 * 2 * 7), sbp.forbid("all_to_all")],
    )
    plan = f.plan(x, index)
    kernels = {k for o, _ in plan.program.kernels() for k in o.row.kernels}
    assert kernels == {"reduced_shards"}
    assert_within_plan(plan, sizes)
    (top, at), (maximum, total) = f(x, index)
    flat, rows = x.reshape(-1, 3), index.reshape(-1, 3)
    np.testing.assert_array_equal(top, flat.max(0))
    np.testing.assert_array_equal(at, rows[flat.argmax(0), range(3)])
    np.testing.assert_array_equal(maximum, flat.max(0))
    np.testing.assert_allclose(total, np.exp(flat - flat.max(0)).sum(0), rtol=1e-5)


AFFINE = lambda p, q: (p[0] * q[0] % 7, (p[1] * q[0] + q[1]) % 7)
"""Affine maps after each other, which do not commute."""
FOLDS: dict[str, Callable[[Any], Any]] = {
    "a sum from 5": lambda x: lax.reduce(x, np.int32(5), lax.add, (0, 1)),
    "a product from 3 along one dim": lambda x: lax.reduce(x, np.int32(3), lax.mul, (0,)),
    "maps": lambda x: lax.reduce((x, x + 1), (np.int32(2), np.int32(1)), AFFINE, (0,)),
    "maps along the last dim": lambda x: lax.reduce(
        (x, x + 1), (np.int32(2), np.int32(1)), AFFINE, (1,)
    ),
}


@pytest.mark.parametrize("shape", [(13, 8), (3, 5)], ids=str)
@pytest.mark.parametrize("case", FOLDS)
def test_initial_values_count_once_and_in_order(case: str, shape: tuple[int, int]):
    """They need not be neutral, and the function need not commute."""
    mesh, fn = sbp.make_mesh((2, 4), ("x", "y")), FOLDS[case]
    x = np.random.default_rng(1).integers(1, 6, shape).astype(np.int32)
    for split in ("y:S(0)", "x:S(0) y:S(1)", "x:S(1) y:S(1)", "x:S(0) y:S(0)"):
        f = sbp.jit(lambda x, split=split: fn(sbp.annotate(x, split)), mesh, hardware=SENDS_FREELY)
        for found, wanted in zip(jax.tree.leaves(f(x)), jax.tree.leaves(fn(x)), strict=True):
            np.testing.assert_array_equal(found, wanted)
