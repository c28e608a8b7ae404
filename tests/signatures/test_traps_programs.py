"""The traps of whole programs, by number: gradients, loops, random draws, callbacks, shared values.

What other systems let through, sbp refuses or computes right: programs run on eight devices and
equal the plain function on one.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import lax
from samples import f
from traps import V, W, X, kinds, on, partial_product, refused, same, unary

import sbp
from sbp.types import P

PMAX = P("max")


@pytest.fixture(scope="module")
def mesh() -> Any:
    return jax.make_mesh((2, 4), ("x", "y"))


SUMS = unary(P, P)


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


@pytest.mark.parametrize("fn", [jnp.argmax, jnp.argmin])
def test_the_winner_of_a_shard_is_reduced_not_gathered(fn):
    """TPU gathers elements one by one, and its compiler estimates no time for that."""
    mesh = jax.make_mesh((4,), ("x",), devices=jax.devices()[:4])
    f = sbp.jit(lambda x: fn(x, 1), mesh, in_types="x:S(1)", out_types="B")
    x = jax.ShapeDtypeStruct((8, 2**20), jnp.float32)
    assert "stablehlo.gather" not in f.plan(x).lower().as_text()
