"""The traps of partial tensors, one test for each, by number: what others let through, we refuse or
compute right.

Rows are shown absent and refuted; programs run on eight devices and equal the plain function on
one.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import lax
from samples import SAMPLES, b, equation, f, i
from traps import V, W, X, kinds, on, partial_product, refused, same, table, unary

import sbp
from sbp.signatures import Row
from sbp.types import B, P, S, Unreduced

PMAX = P("max")


@pytest.fixture(scope="module")
def mesh() -> Any:
    return jax.make_mesh((2, 4), ("x", "y"))


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


def test_6_ties_of_an_argmax_along_a_split_dim(mesh):
    refused("argmax", lambda x: lax.argmax(x, 0, np.int32), (f(6),), unary(S(0), PMAX))
    refused("reduce_max", lambda x: jnp.max(x, 0), (f(6, 3),), unary(S(0), P))
    ties = i(8, 5, low=0, high=2).astype(np.float32)
    same(
        lambda x: (jnp.argmax(sbp.split(x, 0, "x", "y"), 0), jnp.argmin(sbp.split(x, 0, "y"), 0)),
        mesh,
        ties,
    )


def test_7_the_mean_of_uneven_shards(mesh):
    same(
        lambda x: (
            sbp.split(x, 0, "x").mean(0),
            sbp.split(x, 0, "y").mean(),
            sbp.split(x, 0, "x", "y").var(0),
        ),
        mesh,
        f(7, 5),
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


@pytest.mark.parametrize("n", [2, 3, 5, 8])
def test_10_a_broadcast_value_as_a_partial_one_and_back(n):
    """By masking, not by dividing: bit for bit, integers too."""
    for x in (i(7), f(7) * np.float32(0.1), b(7)):
        monoid = "or" if x.dtype == bool else "sum"
        back = sbp.jit(
            lambda x, m=monoid: sbp.replicate(sbp.partial(sbp.replicate(x), "x", op=m)), on(n)
        )(x)
        assert back.dtype == x.dtype and np.array_equal(back, x)


def test_11_a_split_value_as_a_partial_one(mesh):
    fn = lambda x: sbp.replicate(sbp.partial(sbp.split(x, 0, "x", "y"), "x", "y"))
    for size in (3, 7, 8):
        np.testing.assert_array_equal(sbp.jit(fn, mesh)(f(size, 2)), f(size, 2))


@pytest.mark.parametrize("n", [1, 2, 4, 8])
def test_12_neither_a_double_reduction_nor_a_missing_one(n):
    def loss(w: Any, x: Any) -> Any:
        return jnp.square(jnp.tanh(sbp.split(x, 0, "x") @ w)).sum()

    same(jax.value_and_grad(loss), on(n), W, f(8, 8))


def test_13_tied_embeddings(mesh):
    """The table is read and multiplied by: two cotangents of different types, also when it is split
    by rows."""

    def loss(table: Any, w: Any, ids: Any) -> Any:
        table = sbp.split(table, 0, "y")
        logits = jnp.tanh(sbp.split(table[ids], 0, "x") @ w) @ table.T
        return -jax.nn.log_softmax(logits)[jnp.arange(6), ids].mean()

    same(
        jax.value_and_grad(loss, (0, 1)),
        mesh,
        f(8, 4) / 4,
        f(4, 4, seed=1) / 4,
        np.array([0, 3, 3, 7, 1, 3]),
    )


def test_14_control_flow(mesh):
    """A predicate and a bound are whole values; a sum carried through a scan is reduced once, after
    it."""
    same(
        lambda x: lax.cond(sbp.split(x, 0, "x").sum() > 0, lambda a: a + 1, lambda a: -a, x),
        mesh,
        X,
    )
    same(
        lambda x: lax.while_loop(
            lambda s: s < jnp.abs(sbp.split(x, 0, "x").sum()) + 5, lambda s: s + 2.0, 0.0
        ),
        mesh,
        X,
    )

    def accumulated(x: Any, w: Any) -> Any:
        step = lambda total, part: (total + sbp.split(part, 1, "x") @ w, None)
        return sbp.replicate(lax.scan(step, jnp.zeros((2, 4)), x)[0])

    plan = same(accumulated, on(2), f(3, 2, 8), W)
    assert kinds(plan)["all_reduce"] == 1 and "scan" in str(plan)


def test_15_random_masks(mesh):
    """The same key draws the same numbers however the result lies, and one mask falls on all parts
    of a sum."""
    draw = lambda key: jax.random.bernoulli(key, 0.5, (6, 4))
    want = draw(jax.random.key(3))
    for n in (1, 2, 4, 8):
        for place in (
            lambda d: sbp.split(d, 0, "x"),
            lambda d: sbp.split(d, 1, "x"),
            sbp.replicate,
        ):
            np.testing.assert_array_equal(
                sbp.jit(lambda k, p=place: p(draw(k)), on(n))(jax.random.key(3)), want
            )
    same(
        lambda x, w, k: sbp.replicate(jnp.where(draw(k), partial_product(x, w), 0.0) * 2),
        mesh,
        X,
        W,
        jax.random.key(3),
    )
    same(
        lambda k: jax.vmap(lambda q: jax.random.normal(q, (3,)))(
            sbp.split(jax.random.split(k, 7), 0, "x")
        ),
        mesh,
        jax.random.key(4),
    )


def test_16_padding_is_never_seen(mesh):
    refused("pad", lambda x: lax.pad(x, np.float32(1), [(1, 1, 0)]), (f(5),), Row((P, B), (P,)))

    def fn(x: Any) -> Any:
        x = sbp.split(x, 0, "y")
        return (
            x.sum(0),
            x.max(0),
            jnp.prod(x / 4, 0),
            jax.nn.softmax(x, 0),
            jnp.cumsum(x, 0),
            lax.top_k(x.T, 3),
            jnp.sort(x, 0),
        )

    same(fn, mesh, f(7, 3))
    same(lambda x: sbp.split(jnp.concatenate([sbp.split(x, 0, "x"), x + 1]), 0, "x"), mesh, f(3, 2))


def test_16_padding_a_partial_sum_with_a_constant(mesh):
    """`pad(P, 1.0)` adds 1 for each part in JAX's own unreduced types; here it is added once, and a
    constant is masked for nothing."""
    plan = same(
        lambda x, w: sbp.replicate(jnp.pad(partial_product(x, w), 1, constant_values=1.0)),
        on(2),
        X,
        W,
    )
    assert kinds(plan)["all_reduce"] == 1
    same(lambda x, w: sbp.replicate(jnp.pad(partial_product(x, w), 1)), on(2), X, W)


def test_17_reshapes_of_split_dims(mesh):
    refused("reshape", lambda x: x.reshape(4, 3), (f(12),), Row((S(0),), (S(1),)))
    same(
        lambda x: [
            sbp.split(x, d, "x").reshape(shape)
            for d in (0, 1)
            for shape in ((24,), (4, 6), (2, 3, 4), (6, 1, 4))
        ],
        mesh,
        f(6, 4),
    )


def test_18_positions_in_expert(mesh):
    refused("cumsum", jnp.cumsum, (f(6),), unary(S(0), S(0)), unary(S(0), P))
    same(lambda m: jnp.cumsum(sbp.split(m, 0, "x", "y"), 0) * m - 1, mesh, i(9, 4, low=0, high=2))


def test_19_lookups_in_a_split_table(mesh):
    refused(
        "gather",
        lambda x, k: x.at[k].get(mode="clip"),
        (f(6, 2), i(4, low=0, high=6)),
        Row((S(0), B), (B,)),
        Row((B, P), (P,)),
    )
    ids = np.array([0, 6, -1, 3, 3, 99, -99], np.int32)
    for mode in ("clip", "fill"):
        same(lambda t, k, m=mode: sbp.split(t, 0, "x", "y").at[k].get(mode=m), mesh, f(7, 2), ids)
    same(
        lambda t, k, u: sbp.split(t, 0, "y").at[sbp.split(k, 0, "x")].add(u),
        mesh,
        f(7, 2),
        ids,
        f(7, 2, seed=1),
    )
    same(
        lambda t, k: lax.dynamic_slice_in_dim(sbp.split(t, 0, "y"), k, 3),
        mesh,
        f(8, 2),
        np.int32(7),
    )
    same(
        lambda t, u, k: lax.dynamic_update_slice_in_dim(sbp.split(t, 0, "y"), u, k, 0),
        mesh,
        f(8, 2),
        f(3, 2),
        np.int32(4),
    )


@pytest.mark.parametrize(
    "optimizer",
    [optax.chain(optax.clip_by_global_norm(0.5), optax.sgd(0.1)), optax.adafactor(0.1)],
    ids=["clip", "adafactor"],
)
def test_20_norms_of_partial_gradients(mesh, optimizer):
    """The square follows the reduction: `sqrt(sum(square(parts)))` is not the norm."""
    refused("square", lax.square, (f(9),), SUMS)

    def step(params: Any, x: Any) -> Any:
        loss = lambda p: jnp.square(jnp.tanh(sbp.split(x, 0, "x") @ p["w"]) @ p["v"]).mean()
        grads = jax.grad(loss)(params)
        updates, _ = optimizer.update(grads, optimizer.init(params), params)
        return optax.apply_updates(params, updates), optax.tree.norm(grads)

    same(step, mesh, {"w": W, "v": V}, X, rtol=2e-4)


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


def test_23_partial_values_are_not_observed(mesh):
    seen: list[np.ndarray] = []

    def fn(x: Any, w: Any) -> Any:
        y = partial_product(x, w)
        jax.debug.callback(lambda v: seen.append(np.asarray(v)), y)
        return y

    np.testing.assert_allclose(sbp.jit(fn, mesh)(X, W), X @ W, rtol=1e-5)
    jax.effects_barrier()
    assert len(seen) == 1
    np.testing.assert_allclose(seen[0], X @ W, rtol=1e-5)


def test_24_one_value_with_two_readers_is_reduced_once(mesh):
    def fn(x: Any, w: Any) -> Any:
        y = partial_product(x, w)
        return sbp.replicate(y * 2), sbp.replicate(jnp.tanh(y))

    assert kinds(same(fn, on(2), X, W))["all_reduce"] == 1
    same(fn, mesh, X, W)


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


def test_26_axes_of_one_device():
    fn = lambda x, w: (sbp.replicate(jnp.abs(partial_product(x, w))), sbp.split(x, 0, "x").sum(0))
    assert not kinds(same(fn, on(1), X, W)).keys() & {
        "all_reduce",
        "all_gather",
        "reduce_scatter",
        "all_to_all",
    }
    for shape in ((1, 8), (8, 1)):
        same(fn, jax.make_mesh(shape, ("x", "y")), X, W)


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
