"""The traps of partial values in arithmetic, by number.

What other systems let through, sbp refuses or computes right. Rows are shown absent and refuted;
programs run on eight devices and equal the plain function on one.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from samples import SAMPLES, b, equation, f, i
from traps import PMAX, W, X, kinds, on, partial_product, refused, same, table, unary

import sbp
from sbp.signatures import Row
from sbp.types import B, P, Unreduced

SUMS = unary(P, P)


def test_1_nonlinear_functions_of_a_partial_sum(mesh):
    for name in (
        "abs",
        "exp",
        "square",
        "sqrt",
        "logistic",
        "tanh",
        "sin",
        "floor",
        "round",
        "sign",
    ):
        refused(name, getattr(lax, name), (f(9, low=1, high=12),), SUMS)
    refused("sort", lax.sort, (f(9),), SUMS)
    refused("max", lambda x: jnp.maximum(x, 0), (f(9),), Row((P, B), (P,)))
    for name, samples in SAMPLES.items():
        if name in ("eq", "ne", "lt", "le", "gt", "ge", "is_finite", "argmax", "argmin", "top_k"):
            assert not any(P in row.ins for row in table(name, equation(name, *samples[0]).op)), (
                name
            )
    same(
        lambda x, w: (
            jax.nn.softmax(partial_product(x, w)),
            jnp.abs(partial_product(x, w)),
            lax.top_k(x @ w, 2),
        ),
        mesh,
        X,
        W,
    )


def test_2_a_broadcast_term_is_added_once(mesh):
    refused("add", lax.add, (f(9), f(9, seed=1)), Row((P, B), (P,)), Row((B, P), (P,)))
    refused("sub", lambda x: 1.5 - x, (f(9),), Row((B, P), (P,)))
    same(
        lambda x, w, bias: sbp.replicate(partial_product(x, w) + bias + 1.5),
        mesh,
        X,
        W,
        f(4, seed=3),
    )


def test_3_a_product_of_two_partials(mesh):
    refused("mul", lambda x: x * x, (f(9),), Row((P, P), (P,)))
    refused("dot_general", lambda x: x @ x, (f(3, 3),), Row((P, P), (P,)))
    same(lambda x, w: (lambda y: (y * y, y @ y.T))(partial_product(x, w)), mesh, X, W)


def test_4_division_takes_a_partial_numerator_of_floats(mesh):
    refused("div", lax.div, (i(9, low=1, high=99), i(9, low=2, high=5)), Row((P, B), (P,)))
    refused("div", lax.div, (f(9, low=1), f(9, low=1, seed=1)), Row((B, P), (P,)))
    refused("integer_pow", lambda x: lax.integer_pow(x, -1), (f(9, low=1),), SUMS)
    same(
        lambda x: (sbp.split(x, 0, "x").sum(0) // 3, 7.0 / (sbp.split(x, 0, "x").sum(0) + 100)),
        mesh,
        i(8, 3),
    )


def test_5_maxima(mesh):
    refused("mul", lax.mul, (f(9), f(9, seed=1)), Row((PMAX, B), (PMAX,)))
    refused("reduce_sum", lambda x: jnp.sum(x, 0), (f(5, 3),), unary(PMAX, PMAX))
    refused("abs", lax.abs, (f(9),), unary(PMAX, PMAX))
    refused("neg", lax.neg, (f(9),), unary(PMAX, PMAX))
    with_nan = X.copy()
    with_nan[3, 2] = np.nan
    same(
        lambda x: (
            -(sbp.split(x, 0, "x").max(0)),
            sbp.split(x, 0, "x").max(0) * x[0],
            jnp.exp(sbp.split(x, 0, "x").max(0)),
        ),
        mesh,
        with_nan,
    )


def test_8_the_auxiliary_loss_of_moe(mesh):
    """A product of two means over split tokens, of which some are padding; and its gradient."""

    def loss(x: Any, w: Any, valid: Any) -> Any:
        gates = jax.nn.softmax(sbp.split(x, 0, "x", "y") @ w) * valid[:, None]
        first = jax.nn.one_hot(jnp.argmax(gates, -1), 4) * valid[:, None]
        return (gates.mean(0) * first.mean(0)).sum() * 16

    same(jax.value_and_grad(loss, 1), mesh, X, W, np.array([1, 1, 1, 1, 1, 0], np.float32))


def test_9_casts(mesh):
    """`astype(int)` of parts truncates each: JAX's own unreduced types let it through."""
    refused("convert_element_type", lambda x: x.astype(np.int32), (f(9),), SUMS)
    refused(
        "convert_element_type",
        lambda x: x.astype(np.bool_),
        (f(9, low=-2, high=2),),
        unary(P, P("or")),
    )
    narrow = equation("convert_element_type", lambda x: x.astype(jnp.bfloat16), (f(9),))
    assert SUMS not in table("convert_element_type", narrow.op)
    same(lambda x, w: partial_product(x, w).astype(np.int32), mesh, X, W)


def test_21_two_monoids_do_not_commute(mesh):
    refused("reduce_max", lambda x: jnp.max(x, 0), (f(5, 3),), unary(P, PMAX), unary(P, P))
    with pytest.raises(sbp.SbpError, match="mixed-monoids"):
        sbp.jit(lambda x: sbp.annotate(x, x=P, y=PMAX), mesh).plan(X)
    same(lambda x, w: sbp.split(partial_product(x, w), 0, "y").max(0), mesh, f(8, 8), W)


def test_22_select(mesh):
    refused(
        "select_n",
        lax.select_n,
        (b(9), f(9), f(9, seed=1)),
        Row((B, P, B), (P,)),
        Row((P("or"), P, P), (P,)),
    )
    plan = same(
        lambda x, w, m: sbp.replicate(jnp.where(m, partial_product(x, w), 0.0) * 2),
        on(2),
        X,
        W,
        b(6, 4),
    )
    assert kinds(plan)["all_reduce"] == 1
    same(
        lambda x, w, m: sbp.replicate(jnp.where(m, partial_product(x, w), -1e9)),
        mesh,
        X,
        W,
        b(6, 4),
    )


def test_25_finite_parts_of_an_infinite_sum(mesh):
    assert not any(
        isinstance(a, Unreduced)
        for r in table("is_finite", equation("is_finite", lax.is_finite, (f(9),)).op)
        for a in r.ins
    )
    large = np.full((8, 2), 4e4, np.float16)
    large[4:, 1] *= -1
    same(
        lambda x: (
            jnp.isfinite(sbp.split(x, 0, "x", "y").sum(0)),
            jnp.isnan(sbp.split(x, 0, "x").sum(0)),
        ),
        mesh,
        large,
    )


def test_27_a_lucky_sample_is_no_proof():
    """Integer division passes where every part divides; the adversarial parts of the oracle refute
    it."""
    whole, parts = np.array([12, 24]), (np.array([6, 18]), np.array([6, 6]))
    assert np.array_equal(sum(p // 6 for p in parts), whole // 6)
    refused(
        "div",
        lax.div,
        (np.array([12, 24], np.int32), np.array([6, 6], np.int32)),
        Row((P, B), (P,)),
    )


def test_oneflow_isnan_and_isinf():
    refused("ne", lambda x: x != x, (f(9),), Row((P, P), (P("or"),)))
    refused(
        "is_finite",
        lax.is_finite,
        (np.array([1, np.nan, 2, 3], np.float32),),
        unary(PMAX, P("and")),
    )
