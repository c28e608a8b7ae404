"""Gradients of slices that cut alike are added before they are padded."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import sbp
from sbp.trace.build import trace
from sbp.trace.evaluate import evaluate

X = np.arange(128, dtype=np.float32).reshape(8, 16) / 10 + 1
TARGETS = np.arange(8)[:, None]


def loss(x: Any) -> Any:
    """A cross entropy, which reads a slice for the normaliser and for the targets."""
    logits = jnp.sin(x)
    return jnp.sum(
        jax.nn.logsumexp(logits[:, :-1], -1)
        - jnp.take_along_axis(logits[:, :-1], TARGETS, -1)[:, 0]
    )


def thrice(x: Any) -> Any:
    y = jnp.sin(x)
    return jnp.sum(y[1:] * y[1:] + jnp.cos(y[1:]))


def halves(x: Any) -> Any:
    y = jnp.sin(x).astype(jnp.bfloat16)
    return jnp.sum(jnp.cos(y[:, :-1]) + jnp.tanh(y[:, :-1])).astype(jnp.float32)


def looped(x: Any) -> Any:
    return lax.fori_loop(0, 2, lambda _, c: c + jax.grad(thrice)(c), x)


ONE: dict[str, Callable[..., Any]] = {
    "cross entropy": jax.grad(loss),
    "three slices": jax.grad(thrice),
    "bfloat16": jax.grad(halves),
    "in a loop": looped,
}


def other(x: Any) -> Any:
    """Slices that cut elsewhere."""
    y = jnp.sin(x)
    return jnp.sum(jnp.cos(y[1:]) * jnp.sin(y[:-1]))


def named(x: Any) -> Any:
    """The same slice in two named parts of a program, for which policies may differ."""
    y = jnp.sin(x)
    with jax.named_scope("one"):
        first = jnp.cos(y[1:])
    with jax.named_scope("two"):
        return jnp.sum(first * jnp.sin(y[1:]))


def padded_by_ones(x: Any) -> Any:
    pads = [lax.pad(y, np.float32(1), [(1, 0, 0), (0, 0, 0)]) for y in (jnp.sin(x), jnp.cos(x))]
    return jax.vjp(lambda y: (y, y), x[:1].repeat(9, 0))[1](tuple(pads))[0]


def read_twice(x: Any) -> Any:
    """The gradients of slices are results, too."""
    pads = [lax.pad(y, np.float32(0), [(1, 0, 0), (0, 0, 0)]) for y in (jnp.sin(x), jnp.cos(x))]
    return jax.vjp(lambda y: (y, y), x[:1].repeat(9, 0))[1](tuple(pads))[0], pads


TWO: dict[str, Callable[..., Any]] = {
    "cut elsewhere": jax.grad(other),
    "in named parts": jax.grad(named),
    "padded by ones": padded_by_ones,
    "read elsewhere": read_twice,
}


def pads(fn: Callable[..., Any]) -> int:
    graph, _ = trace(fn, [jax.ShapeDtypeStruct(X.shape, X.dtype)])
    found = evaluate(graph, (X,)) if all(not n.regions for n in graph.nodes) else None
    for got, want in zip(found or (), jax.tree.leaves(fn(X)), strict=bool(found)):
        np.testing.assert_allclose(np.asarray(got), np.asarray(want), rtol=1e-2)
    return sum(n.op == "pad" for n in graph.walk())


@pytest.mark.parametrize("case", ONE)
def test_one_pad(case: str):
    assert pads(ONE[case]) == 1


@pytest.mark.parametrize("case", TWO)
def test_other_pads_stay(case: str):
    assert pads(TWO[case]) == 2


@pytest.mark.parametrize("axis", [0, 1])
@pytest.mark.parametrize("case", ["cross entropy", "three slices", "in a loop"])
@pytest.mark.parametrize("n", [2, 8])
def test_values(case: str, axis: int, n: int):
    split = sbp.jit(ONE[case], sbp.make_mesh((n,), ("x",)), in_types=f"x:S({axis})")
    np.testing.assert_allclose(split(X), jax.jit(ONE[case])(X), rtol=1e-5, atol=1e-6)
