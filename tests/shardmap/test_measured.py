"""Everyday programs whose verdict depends on what they compute, not on how they are written: means
of one row a device, whole values among zeros, gradients by sample, microbatches, short rings."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import PartitionSpec as PS

import sbp
from tests.shardmap.practice.case import devices, floats

N = 8
MESH = devices({"d": N})
RING = [(i, (i + 1) % N) for i in range(N)]
ROWS, WHOLE = PS("d"), PS()


def squares(w, x, y):
    return ((x @ w - y) ** 2).sum() / x.shape[0]


def norms(p, s):
    g = jax.vmap(jax.grad(lambda p, x: jnp.tanh(p @ x)), (None, 0))(p, s)
    return jnp.linalg.norm(g, axis=-1).mean()


def scores(steps):
    def region(q, k):
        def turn(carry, _):
            k, y = carry
            return (lax.ppermute(k, "d", RING), y + jnp.tanh(q @ k.T).sum(1)), None

        return lax.scan(turn, (k, jnp.zeros(q.shape[0])), None, length=steps)[0][1]

    return region


def with_rule(fn):
    """The function with a gradient of its own."""
    ruled = jax.custom_vjp(fn)
    ruled.defvjp(lambda q, k: (fn(q, k), (q, k)), lambda r, g: jax.vjp(fn, *r)[1](g))
    return lambda q, k: ruled(q, k)


def of_microbatches(w, x, y):
    pairs = zip(jnp.split(x, 2), jnp.split(y, 2), strict=True)
    return sum(jax.grad(squares)(w, a, b) for a, b in pairs) / 2


STEP, PAIR = (WHOLE, ROWS, ROWS), (ROWS, ROWS)
W, X, Y, U, V = floats((5, 3), (16, 5), (16, 3), (16, 4), (16, 4))
PROGRAMS: dict[str, tuple[Any, Any, Any, tuple[Any, ...], str]] = {
    "one_row": (lambda x: lax.pmean(x.mean(0), "d"), ROWS, WHOLE, (X[:N],), ""),
    "mean": (lambda *a: lax.pmean(jax.grad(squares)(*a), "d"), STEP, WHOLE, (W, X, Y), ""),
    "sum": (
        lambda *a: lax.psum(jax.grad(squares)(*a), "d"),
        STEP,
        WHOLE,
        (W, X, Y),
        "wrong-reduction",
    ),
    "padded": (
        lambda x: lax.psum(jnp.pad(lax.psum(x.sum(0), "d"), (1, 1)), "d"),
        ROWS,
        WHOLE,
        (X,),
        "doubled-reduction",
    ),
    "concatenated": (
        lambda x: lax.psum(jnp.concatenate([lax.psum(x.sum(0), "d"), jnp.zeros(3)]), "d"),
        ROWS,
        WHOLE,
        (X,),
        "doubled-reduction",
    ),
    "by_sample": (
        lambda p, s: lax.pmean(norms(p, s), "d"),
        (WHOLE, ROWS),
        WHOLE,
        (U[0], U),
        "",
    ),
    "microbatches": (
        lambda *a: lax.pmean(of_microbatches(*a), "d"),
        STEP,
        WHOLE,
        (W, X, Y),
        "",
    ),
    "microbatches_alone": (of_microbatches, STEP, WHOLE, (W, X, Y), "missing-reduction"),
    "one_reduced": (
        lambda u, v: lax.psum(u.sum(0), "d") + v.mean(0),
        PAIR,
        WHOLE,
        (U, V),
        "missing-reduction",
    ),
    "ring": (scores(N), PAIR, ROWS, (U, V), ""),
    "ring_one_short": (scores(N - 1), PAIR, ROWS, (U, V), "differs-on-one-device"),
    "ring_with_rule": (with_rule(scores(N)), PAIR, ROWS, (U, V), ""),
    "ring_with_rule_one_short": (
        with_rule(scores(N - 1)),
        PAIR,
        ROWS,
        (U, V),
        "differs-on-one-device",
    ),
}
"""The region, in_specs, out_specs, arguments, and the code of what sbp says; empty for nothing."""


@pytest.mark.parametrize("given", [True, False])
@pytest.mark.parametrize("name", list(PROGRAMS))
def test_the_verdict_is_that_of_the_values(name, given):
    body, ins, outs, args, code = PROGRAMS[name]
    region = jax.shard_map(body, mesh=MESH, in_specs=ins, out_specs=outs, check_vma=False)
    shapes = args if given else [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in args]
    found = sbp.check_shard_map(region, *shapes, mesh=MESH).diagnostics
    assert [d.code for d in found] == [code] * bool(code)


def test_the_gradients_of_unlike_samples_are_not_added_up():
    """With check_vma=True, JAX adds up the gradients of the samples of all devices."""
    region = jax.shard_map(
        lambda p, s: lax.pmean(norms(p, s), "d"),
        mesh=MESH,
        in_specs=(WHOLE, ROWS),
        out_specs=WHOLE,
        check_vma=True,
    )
    got, want = np.asarray(jax.jit(region)(U[0], U)), np.asarray(norms(U[0], U))
    found = sbp.check_shard_map(region, U[0], U, mesh=MESH)
    assert found.ok == np.allclose(got, want, rtol=1e-3)
    assert not found.ok


def test_a_manual_region_that_counts_a_whole_value_is_refused():
    region = sbp.manual(lambda s: lax.psum(jnp.pad(s, (1, 1)), "d"), in_types="B", out_types="B")
    (found,) = sbp.jit(region, MESH).check(U[0]).diagnostics
    assert (found.code, found.severity) == ("manual-types", "error")
