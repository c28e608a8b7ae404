"""Slices of slices are one slice, and a pad that only cuts off edges is a slice."""

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

X = np.arange(36, dtype=np.float32).reshape(12, 3) + 1
ZERO = np.float32(0)


def looped(x: Any) -> Any:
    return lax.fori_loop(0, 2, lambda _, c: c.at[:4].set(c[1:][::2][:4]), x)


ONE: dict[str, Callable[..., Any]] = {
    "every second of the rest": lambda x: lax.slice(x[1:], (0, 0), (11, 3), (2, 1)),
    "both strided": lambda x: lax.slice(x[::2], (1, 0), (6, 3), (3, 1)),
    "along two dims": lambda x: x[2:, 1:][3:, :1],
    "of a part": lambda x: lax.split(x, (5, 7))[1][1:3],
    "cut off by a pad": lambda x: lax.pad(x, ZERO, [(-2, -1, 0), (0, -1, 0)])[1:],
    "in a loop": looped,
}


@pytest.mark.parametrize("case", ONE)
def test_one_slice(case: str):
    graph, _ = trace(ONE[case], [jax.ShapeDtypeStruct(X.shape, X.dtype)])
    read = {o for n in graph.walk() for o in n.inputs if isinstance(o, int)}
    cut = [n for n in graph.walk() if n.op == "slice"]
    slices = {v for n in graph.walk() if n.op in ("slice", "split") for v in n.outputs}
    assert cut and not any(o in slices for n in cut for o in n.inputs)
    assert read.isdisjoint({v for n in graph.walk() if n.op == "pad" for v in n.outputs})
    if case == "in a loop":
        got = sbp.jit(ONE[case], sbp.make_mesh((2,), ("x",)))(X)
    else:
        (got,) = evaluate(graph, (X,))
    np.testing.assert_array_equal(np.asarray(got), np.asarray(ONE[case](X)))


def test_other_pads_stay():
    def fn(x: Any) -> Any:
        return lax.pad(x, ZERO, [(-1, 1, 0), (0, 0, 0)]), lax.pad(x, ZERO, [(0, 0, 1), (0, 0, 0)])

    graph, _ = trace(fn, [jax.ShapeDtypeStruct(X.shape, X.dtype)])
    assert [n.op for n in graph.nodes] == ["pad", "pad"]
    for got, want in zip(evaluate(graph, (X,)), fn(X), strict=True):
        np.testing.assert_array_equal(np.asarray(got), np.asarray(want))


def test_empty_slices():
    def fn(x: Any) -> Any:
        return x[5:5][:0], jnp.flip(x)[3:]

    graph, _ = trace(fn, [jax.ShapeDtypeStruct(X.shape, X.dtype)])
    for got, want in zip(evaluate(graph, (X,)), fn(X), strict=True):
        np.testing.assert_array_equal(np.asarray(got), np.asarray(want))
