"""Products whose operands are split along different loops run as rings: right, within the plan's
bytes, and without a whole operand."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import sbp
from tests.hardware import SENDS_FREELY
from tests.run.test_collectives import assert_within_plan


def normal(*shape, seed=0, dtype=np.float32):
    return np.random.default_rng(seed).normal(size=shape).astype(dtype)


CASES = {
    "columns, rows": (
        (8,),
        "ik,kj->ij",
        (32, 24),
        (24, 16),
        ("x:S(0)", "x:S(1)"),
        "x:S(0)",
        {"rotate_rhs"},
    ),
    "columns, rows, the other result": (
        (8,),
        "ik,kj->ij",
        (32, 24),
        (24, 16),
        ("x:S(0)", "x:S(1)"),
        "x:S(1)",
        {"rotate_lhs"},
    ),
    "contracted on one side": (
        (8,),
        "ik,kj->ij",
        (32, 24),
        (24, 16),
        ("x:S(0)", "x:S(0)"),
        "x:S(0)",
        {"rotate_rhs"},
    ),
    "contracted on the other": (
        (8,),
        "ik,kj->ij",
        (32, 24),
        (24, 16),
        ("x:S(1)", "x:S(1)"),
        "x:S(1)",
        {"rotate_lhs"},
    ),
    "batched": (
        (4,),
        "bik,bkj->bij",
        (2, 8, 12),
        (2, 12, 8),
        ("x:S(1)", "x:S(1)"),
        "x:S(1)",
        {"rotate_rhs"},
    ),
    "heads": (
        (4,),
        "bshd,hdm->bsm",
        (2, 8, 4, 3),
        (4, 3, 8),
        ("x:S(1)", "x:S(0)"),
        "x:S(1)",
        {"rotate_rhs"},
    ),
    "SUMMA": (
        (2, 4),
        "ik,kj->ij",
        (16, 24),
        (24, 32),
        ("x:S(0) y:S(1)",) * 2,
        "x:S(0) y:S(1)",
        {"rotate_lhs", "rotate_rhs"},
    ),
    "SUMMA, more rows": (
        (4, 2),
        "ik,kj->ij",
        (64, 8),
        (8, 8),
        ("x:S(0) y:S(1)",) * 2,
        "x:S(0) y:S(1)",
        {"rotate_lhs", "rotate_rhs"},
    ),
}


ONLY_RINGS = [
    sbp.forbid(kind, above=64)
    for kind in ("all_gather", "all_to_all", "all_reduce", "reduce_scatter")
]
"""Where memory allows it, a gathered operand takes less time than one that goes round."""


BALANCED = replace(SENDS_FREELY, link_bytes_per_second=3e5)
"""A transfer takes about as long as the product beside it, and is worth hiding."""


def plan_of(case, dtype=np.float32):
    shape, equation, a, b, types, out, _ = CASES[case]
    mesh = sbp.make_mesh(shape, ("x", "y")[: len(shape)])
    fn = sbp.jit(
        lambda x, y: jnp.einsum(equation, x, y),
        mesh,
        in_types=types,
        out_types=out,
        hardware=SENDS_FREELY,
        budgets=ONLY_RINGS,
    )
    x, y = normal(*a, dtype=dtype), normal(*b, seed=1, dtype=dtype)
    return fn, fn.plan(x, y), x, y


def kernels(plan):
    return {
        k for operation, _ in plan.program.kernels() for k in operation.row.kernels if k != "local"
    }


@pytest.mark.parametrize("case", CASES)
def test_products_go_round(case):
    fn, plan, x, y = plan_of(case)
    assert kernels(plan) == CASES[case][-1]
    assert not any(p.bytes_per_device for p in plan.program.boxes())
    assert_within_plan(plan, CASES[case][0])
    assert "all-gather" not in plan.lower().compile().as_text()
    want = np.einsum(CASES[case][1], x.astype(np.float64), y.astype(np.float64))
    np.testing.assert_allclose(np.asarray(fn(x, y)), want, rtol=1e-4, atol=1e-4)


def test_the_bytes_are_those_of_gathering():
    _, plan, _, y = plan_of("columns, rows")
    assert plan.cost.bytes_per_device == 7 / 8 * y.nbytes


def test_sums_of_short_products_are_kept_in_32_bits():
    """bfloat16 from shard to shard would round eight times."""
    fn, plan, x, y = plan_of("contracted on one side", dtype=jnp.bfloat16)
    assert kernels(plan) == {"rotate_rhs"}
    want = np.asarray(x, np.float64) @ np.asarray(y, np.float64)
    np.testing.assert_allclose(np.asarray(fn(x, y), np.float64), want, rtol=2**-7, atol=2**-7)


@pytest.mark.parametrize("sizes", [(30, 25, 17), (41, 25, 27)])
def test_uneven_shards_go_round(sizes):
    """Padding of a shard that comes by is neither multiplied nor written."""
    mesh = sbp.make_mesh((8,), ("x",))
    i, k, j = sizes

    def product(x, y):
        return sbp.annotate(sbp.annotate(x, x=sbp.S(0)) @ sbp.annotate(y, x=sbp.S(1)), x=sbp.S(0))

    fn = sbp.jit(product, mesh, hardware=BALANCED)
    x, y = normal(i, k), normal(k, j, seed=1)
    assert kernels(fn.plan(x, y)) == {"rotate_rhs"}
    np.testing.assert_allclose(np.asarray(fn(x, y)), x @ y, rtol=1e-4, atol=1e-4)


def test_gradients_go_round():
    mesh = sbp.make_mesh((4,), ("x",))
    fn = jax.value_and_grad(lambda x, y: jnp.sum(jnp.tanh(x @ y) ** 2), argnums=(0, 1))
    f = sbp.jit(
        fn,
        mesh,
        in_types=("x:S(0)", "x:S(1)"),
        out_types=("B", ("x:S(0)", "x:S(1)")),
        hardware=BALANCED,
    )
    x, y = normal(16, 24), normal(24, 8, seed=1)
    assert "rotate_rhs" in kernels(f.plan(x, y))
    for got, want in zip(jax.tree.leaves(f(x, y)), jax.tree.leaves(jax.jit(fn)(x, y)), strict=True):
        np.testing.assert_allclose(np.asarray(got), np.asarray(want), rtol=1e-4, atol=1e-4)


def test_a_ring_that_hides_nothing_is_not_taken():
    """Where a device does not compute while it sends, one gather is as good, and starts once."""
    mesh = sbp.make_mesh((8,), ("x",))
    f = sbp.jit(
        lambda x, y: x @ y, mesh, in_types=("x:S(0)", "x:S(1)"), out_types="x:S(0)", hardware="cpu"
    )
    plan = f.plan(normal(4096, 512), normal(512, 64))
    assert not kernels(plan) and any(p.bytes_per_device for p in plan.program.boxes())
