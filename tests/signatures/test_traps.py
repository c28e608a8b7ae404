"""The traps of partial values, split dims and conversions, by number.

Other systems accept these programs. sbp refuses each program or computes the right result on eight
devices. `test_wrong_rows.py` has the rows that would lead into the traps.
"""

from collections import Counter
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from samples import b, f, i

import sbp
from tests.same import assert_same_results

X, W, V = f(6, 8), f(8, 4, seed=1), f(4, 3, seed=2)
WITH_NAN = np.where(np.arange(48).reshape(6, 8) == 26, np.float32(np.nan), X)
LARGE = np.full((8, 2), 4e4, np.float16) * np.repeat([[1, 1], [1, -1]], 4, 0).astype(np.float16)
IDS = np.array([0, 6, -1, 3, 3, 99, -99], np.int32)


def on(n: int) -> Any:
    """One axis of n devices."""
    return jax.make_mesh((n,), ("x",), devices=jax.devices()[:n])


def same(fn: Callable[..., Any], mesh: Any, *args: Any, rtol: float = 3e-5) -> sbp.Plan:
    """Checks that the planned program computes the results of the plain function; returns the plan.

    Arguments:
      fn: the function.
      mesh: the mesh.
      args: its arguments.
      rtol: relative and absolute tolerance of floats.
    """
    planned = sbp.jit(fn, mesh)
    assert_same_results(jax.jit(fn)(*args), planned(*args), rtol=rtol, atol=rtol)
    return planned.plan(*args)


def kinds(plan: sbp.Plan) -> Counter[str]:
    """How often each kind of conversion occurs in a plan."""
    return Counter(step.kind for box in plan.program.boxes() for step in box.box.steps)


def partial_product(x: Any, w: Any) -> Any:
    """A product whose contracted dim is split: partial sums."""
    return sbp.partial(sbp.split(x, 1, "x") @ w, "x")


def auxiliary_loss(x: Any, w: Any, valid: Any) -> Any:
    """A product of two means over split tokens, of which some are padding."""
    gates = jax.nn.softmax(sbp.split(x, 0, "x", "y") @ w) * valid[:, None]
    first = jax.nn.one_hot(jnp.argmax(gates, -1), 4) * valid[:, None]
    return (gates.mean(0) * first.mean(0)).sum() * 16


def tied_embeddings(table: Any, w: Any, ids: Any) -> Any:
    """The table is read and multiplied by: two cotangents of different types, also when it is split
    by rows."""
    table = sbp.split(table, 0, "y")
    logits = jnp.tanh(sbp.split(table[ids], 0, "x") @ w) @ table.T
    return -jax.nn.log_softmax(logits)[jnp.arange(6), ids].mean()


mask = lambda key: jax.random.bernoulli(key, 0.5, (6, 4))


def over_padding(x: Any) -> Any:
    x = sbp.split(x, 0, "y")
    return (
        x.sum(0),
        x.max(0),
        jnp.prod(x / 4, 0),
        jax.nn.softmax(x, 0),
        jnp.cumsum(x, 0),
        jax.lax.top_k(x.T, 3),
        jnp.sort(x, 0),
    )


def two_readers(x: Any, w: Any) -> Any:
    y = partial_product(x, w)
    return sbp.replicate(y * 2), sbp.replicate(jnp.tanh(y))


TRAPS: dict[str, tuple[Callable[..., Any], tuple[Any, ...]]] = {
    "1 nonlinear functions of a partial sum": (
        lambda x, w: (
            jax.nn.softmax(partial_product(x, w)),
            jnp.abs(partial_product(x, w)),
            jax.lax.top_k(x @ w, 2),
        ),
        (X, W),
    ),
    "2 a broadcast term is added once": (
        lambda x, w, bias: sbp.replicate(partial_product(x, w) + bias + 1.5),
        (X, W, f(4, seed=3)),
    ),
    "3 a product of two partials": (
        lambda x, w: (lambda y: (y * y, y @ y.T))(partial_product(x, w)),
        (X, W),
    ),
    "4 division takes a partial numerator of floats": (
        lambda x: (sbp.split(x, 0, "x").sum(0) // 3, 7.0 / (sbp.split(x, 0, "x").sum(0) + 100)),
        (i(8, 3),),
    ),
    "5 maxima": (
        lambda x: (
            -(sbp.split(x, 0, "x").max(0)),
            sbp.split(x, 0, "x").max(0) * x[0],
            jnp.exp(sbp.split(x, 0, "x").max(0)),
        ),
        (WITH_NAN,),
    ),
    "6 ties of an argmax along a split dim": (
        lambda x: (jnp.argmax(sbp.split(x, 0, "x", "y"), 0), jnp.argmin(sbp.split(x, 0, "y"), 0)),
        (i(8, 5, low=0, high=2).astype(np.float32),),
    ),
    "7 the mean of uneven shards": (
        lambda x: (
            sbp.split(x, 0, "x").mean(0),
            sbp.split(x, 0, "y").mean(),
            sbp.split(x, 0, "x", "y").var(0),
        ),
        (f(7, 5),),
    ),
    "8 the auxiliary loss of MoE": (
        jax.value_and_grad(auxiliary_loss, 1),
        (X, W, np.array([1, 1, 1, 1, 1, 0], np.float32)),
    ),
    # `astype(int)` of parts truncates each: JAX's own unreduced types let it through.
    "9 casts": (lambda x, w: partial_product(x, w).astype(np.int32), (X, W)),
    "13 tied embeddings": (
        jax.value_and_grad(tied_embeddings, (0, 1)),
        (f(8, 4) / 4, f(4, 4, seed=1) / 4, np.array([0, 3, 3, 7, 1, 3])),
    ),
    "14 a predicate is whole": (
        lambda x: jax.lax.cond(sbp.split(x, 0, "x").sum() > 0, lambda a: a + 1, lambda a: -a, x),
        (X,),
    ),
    "14 a bound is whole": (
        lambda x: jax.lax.while_loop(
            lambda s: s < jnp.abs(sbp.split(x, 0, "x").sum()) + 5, lambda s: s + 2.0, 0.0
        ),
        (X,),
    ),
    "15 one mask falls on all parts of a sum": (
        lambda x, w, k: sbp.replicate(jnp.where(mask(k), partial_product(x, w), 0.0) * 2),
        (X, W, jax.random.key(3)),
    ),
    "15 a batch of keys": (
        lambda k: jax.vmap(lambda q: jax.random.normal(q, (3,)))(
            sbp.split(jax.random.split(k, 7), 0, "x")
        ),
        (jax.random.key(4),),
    ),
    "16 padding is never seen": (over_padding, (f(7, 3),)),
    "16 padding between operands": (
        lambda x: sbp.split(jnp.concatenate([sbp.split(x, 0, "x"), x + 1]), 0, "x"),
        (f(3, 2),),
    ),
    "16 a partial sum is padded with zeros": (
        lambda x, w: sbp.replicate(jnp.pad(partial_product(x, w), 1)),
        (X, W),
    ),
    "17 reshapes of split dims": (
        lambda x: [
            sbp.split(x, d, "x").reshape(shape)
            for d in (0, 1)
            for shape in ((24,), (4, 6), (2, 3, 4), (6, 1, 4))
        ],
        (f(6, 4),),
    ),
    "18 positions in an expert": (
        lambda m: jnp.cumsum(sbp.split(m, 0, "x", "y"), 0) * m - 1,
        (i(9, 4, low=0, high=2),),
    ),
    "19 lookups that clip": (
        lambda t, k: sbp.split(t, 0, "x", "y").at[k].get(mode="clip"),
        (f(7, 2), IDS),
    ),
    "19 lookups that fill": (
        lambda t, k: sbp.split(t, 0, "x", "y").at[k].get(mode="fill"),
        (f(7, 2), IDS),
    ),
    "19 sums into a split table": (
        lambda t, k, u: sbp.split(t, 0, "y").at[sbp.split(k, 0, "x")].add(u),
        (f(7, 2), IDS, f(7, 2, seed=1)),
    ),
    "19 a slice of a split table": (
        lambda t, k: jax.lax.dynamic_slice_in_dim(sbp.split(t, 0, "y"), k, 3),
        (f(8, 2), np.int32(7)),
    ),
    "19 an update of a split table": (
        lambda t, u, k: jax.lax.dynamic_update_slice_in_dim(sbp.split(t, 0, "y"), u, k, 0),
        (f(8, 2), f(3, 2), np.int32(4)),
    ),
    "21 two monoids do not commute": (
        lambda x, w: sbp.split(partial_product(x, w), 0, "y").max(0),
        (f(8, 8), W),
    ),
    "22 a branch that is not partial": (
        lambda x, w, m: sbp.replicate(jnp.where(m, partial_product(x, w), -1e9)),
        (X, W, b(6, 4)),
    ),
    "24 one value with two readers": (two_readers, (X, W)),
    "25 finite parts of an infinite sum": (
        lambda x: (
            jnp.isfinite(sbp.split(x, 0, "x", "y").sum(0)),
            jnp.isnan(sbp.split(x, 0, "x").sum(0)),
        ),
        (LARGE,),
    ),
}


@pytest.mark.parametrize("trap", TRAPS)
def test_a_trap_is_computed_right(mesh: Any, trap: str):
    fn, args = TRAPS[trap]
    same(fn, mesh, *args)


def accumulated(x: Any, w: Any) -> Any:
    """A sum carried through a scan, which is reduced after it."""
    step = lambda total, part: (total + sbp.split(part, 1, "x") @ w, None)
    return sbp.replicate(jax.lax.scan(step, jnp.zeros((2, 4)), x)[0])


REDUCED_ONCE: dict[str, tuple[Callable[..., Any], tuple[Any, ...]]] = {
    "14 a carried sum": (accumulated, (f(3, 2, 8), W)),
    # `pad(P, 1.0)` adds 1 for each part in JAX's own unreduced types; here it is added once.
    "16 a partial sum padded with a constant": (
        lambda x, w: sbp.replicate(jnp.pad(partial_product(x, w), 1, constant_values=1.0)),
        (X, W),
    ),
    "22 a selected partial sum": (
        lambda x, w, m: sbp.replicate(jnp.where(m, partial_product(x, w), 0.0) * 2),
        (X, W, b(6, 4)),
    ),
    "24 one value with two readers": (two_readers, (X, W)),
}


@pytest.mark.parametrize("trap", REDUCED_ONCE)
def test_a_partial_sum_is_reduced_once(trap: str):
    fn, args = REDUCED_ONCE[trap]
    assert kinds(same(fn, on(2), *args))["all_reduce"] == 1


@pytest.mark.parametrize("n", [1, 2, 4, 8])
def test_15_a_key_draws_the_same_numbers_however_the_result_lies(n: int):
    for place in (lambda d: sbp.split(d, 0, "x"), lambda d: sbp.split(d, 1, "x"), sbp.replicate):
        found = sbp.jit(lambda k, p=place: p(mask(k)), on(n))(jax.random.key(3))
        np.testing.assert_array_equal(found, mask(jax.random.key(3)))


@pytest.mark.parametrize(
    "optimizer",
    [optax.chain(optax.clip_by_global_norm(0.5), optax.sgd(0.1)), optax.adafactor(0.1)],
    ids=["clip", "adafactor"],
)
def test_20_norms_of_partial_gradients(mesh: Any, optimizer: Any):
    """The square follows the reduction: `sqrt(sum(square(parts)))` is not the norm."""

    def step(params: Any, x: Any) -> Any:
        loss = lambda p: jnp.square(jnp.tanh(sbp.split(x, 0, "x") @ p["w"]) @ p["v"]).mean()
        grads = jax.grad(loss)(params)
        updates, _ = optimizer.update(grads, optimizer.init(params), params)
        return optax.apply_updates(params, updates), optax.tree.norm(grads)

    same(step, mesh, {"w": W, "v": V}, X, rtol=2e-4)


def test_23_partial_values_are_not_observed(mesh: Any):
    seen: list[np.ndarray] = []

    def fn(x: Any, w: Any) -> Any:
        y = partial_product(x, w)
        jax.debug.callback(lambda v: seen.append(np.asarray(v)), y)
        return y

    np.testing.assert_allclose(sbp.jit(fn, mesh)(X, W), X @ W, rtol=1e-5)
    jax.effects_barrier()
    assert len(seen) == 1
    np.testing.assert_allclose(seen[0], X @ W, rtol=1e-5)


@pytest.mark.parametrize("shape", [(1,), (1, 8), (8, 1)], ids=str)
def test_26_axes_of_one_device(shape: tuple[int, ...]):
    fn = lambda x, w: (sbp.replicate(jnp.abs(partial_product(x, w))), sbp.split(x, 0, "x").sum(0))
    plan = same(fn, on(1) if shape == (1,) else jax.make_mesh(shape, ("x", "y")), X, W)
    moving = {"all_reduce", "all_gather", "reduce_scatter", "all_to_all"}
    assert shape != (1,) or not kinds(plan).keys() & moving


@pytest.mark.parametrize("fn", [jnp.argmax, jnp.argmin])
def test_the_winner_of_a_shard_is_reduced_not_gathered(fn: Callable[..., Any]):
    """TPU gathers elements one by one, and its compiler estimates no time for that."""
    plan = sbp.jit(lambda x: fn(x, 1), on(4), in_types="x:S(1)", out_types="B").plan(
        jax.ShapeDtypeStruct((8, 2**20), jnp.float32)
    )
    assert "stablehlo.gather" not in plan.lower().as_text()


def test_a_scatter_at_whole_indices_keeps_what_is_said_of_them():
    fn = lambda x, at, rows: x.at[at].set(rows, indices_are_sorted=True, unique_indices=True)
    plan = sbp.jit(fn, on(4), in_types=("x:S(1)", "B", "x:S(1)")).plan(
        f(8, 4), np.array([1, 3, 6], np.int32), f(3, 4)
    )
    text = plan.lower().as_text()
    assert "indices_are_sorted = true" in text and "unique_indices = true" in text
