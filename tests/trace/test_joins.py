"""Slices that are put together again are one node, where more than half of each array is read."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from sbp.trace.build import trace
from sbp.trace.evaluate import evaluate
from sbp.trace.graph import Graph

X = np.arange(24, dtype=np.float32).reshape(8, 3) + 1
NEW = -np.ones((1, 3), np.float32)


def squares(fn: Callable[..., Any]) -> Callable[..., Any]:
    """The gradient of the sum of the squares of a function."""
    return jax.grad(lambda *args: jnp.sum(fn(*args) ** 2))


def shifted(x: Any, new: Any) -> Any:
    return jnp.concatenate([new, x[:-1]])


def looped(x: Any) -> Any:
    return lax.scan(lambda c, _: (jnp.roll(c, 1, 0) * 2, None), x, length=3)[0]


JOINED: dict[str, tuple[Callable[..., Any], tuple[Any, ...], int]] = {
    "roll": (lambda x: jnp.roll(x, 3, 0), (X,), 1),
    "roll of two dims": (lambda x: jnp.roll(x, (3, 1), (0, 1)), (X,), 2),
    "shift": (shifted, (X, NEW), 1),
    "shift to the left": (lambda x, new: jnp.concatenate([x[1:], new]), (X, NEW), 1),
    "from split": (lambda x: jnp.concatenate(lax.split(x, (5, 3))[::-1]), (X,), 1),
    "padded slice": (lambda x: lax.pad(x[1:], np.float32(2), [(2, 1, 0), (0, 0, 0)]), (X,), 1),
    "gradient of roll": (squares(lambda x: jnp.roll(x, 1, 0)), (X,), 2),
    "gradient of shift": (squares(shifted), (X, NEW), 2),
    "in a loop": (looped, (X,), 1),
}

APART: dict[str, tuple[Callable[..., Any], tuple[Any, ...]]] = {
    "half of it": (lambda x: jnp.concatenate([-x[4:], x[:4]]), (X,)),
    "a small slice": (lambda x, new: jnp.concatenate([new, x[:3]]), (X, NEW)),
    "strided": (lambda x: jnp.concatenate([x[::2], x[1::2]]), (X,)),
    "cut along another dim": (lambda x: jnp.concatenate([x[:, :2], x[:, 1:]]), (X,)),
    "overlapping pads": (
        lambda ct: jax.linear_transpose(lambda x: jnp.concatenate([x[:5], x[3:]]), X)(ct)[0],
        (np.ones((10, 3), np.float32),),
    ),
    "computed between": (lambda x: jnp.concatenate([x[7:] * 2, x[:7] * 2]), (X,)),
}


def graph_of(fn: Callable[..., Any], args: tuple[Any, ...]) -> Graph:
    graph, _ = trace(fn, [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in args])
    return graph


def assert_same_values(graph: Graph, fn: Callable[..., Any], args: tuple[Any, ...]) -> None:
    (got,) = evaluate(graph, args, {})
    np.testing.assert_array_equal(np.asarray(got), np.asarray(fn(*args)))


@pytest.mark.parametrize("case", JOINED)
def test_joined(case: str):
    fn, args, count = JOINED[case]
    graph = graph_of(fn, args)
    found = [node.op for node in graph.walk()]
    assert found.count("join_slices") == count
    if case != "gradient of shift":  # the gradient of `new` is a slice by itself
        assert not {"slice", "split", "pad", "concatenate", "add_any"} & set(found)
    assert_same_values(graph, fn, args)


@pytest.mark.parametrize("case", APART)
def test_apart(case: str):
    fn, args = APART[case]
    graph = graph_of(fn, args)
    assert "join_slices" not in {node.op for node in graph.walk()}
    assert_same_values(graph, fn, args)


def padded(x: Any) -> Any:
    return jnp.pad(x, ((1, 1), (0, 0)))


def halves(x: Any, sizes: tuple[int, int]) -> Any:
    first, second = lax.split(x, sizes)
    return jnp.concatenate([first * 2, second * 3])


def stencil(x: Any) -> Any:
    """The sum of the four neighbours."""
    p = jnp.pad(x, 1)
    return p[:-2, 1:-1] + p[2:, 1:-1] + p[1:-1, :-2] + p[1:-1, 2:]


READ_THROUGH: dict[str, tuple[Callable[..., Any], tuple[Any, ...], list[str]]] = {
    "diff of rows before": (
        lambda x: jnp.diff(x, axis=0, prepend=x[:1]),
        (X,),
        ["join_slices"],
    ),
    "diff of a row behind": (
        lambda x, new: jnp.diff(x, axis=0, append=new),
        (X, NEW),
        ["join_slices"],
    ),
    "one operand": (lambda x, new: jnp.concatenate([new, x, new])[1:9] * 2, (X, NEW), []),
    "a part of one": (
        lambda x, new: jnp.concatenate([new, x, new])[2:9] * 2,
        (X, NEW),
        ["slice"],
    ),
    "parts of operands": (
        lambda x, new: jnp.concatenate([new, x, new, -x])[3:9] * 2,
        (X, NEW),
        ["slice"],
    ),
    "in a loop": (
        lambda x: lax.scan(lambda c, _: (jnp.diff(c, axis=0, prepend=c[:1]), None), x, length=2)[0],
        (X,),
        ["join_slices"],
    ),
    "split": (
        lambda x, new: halves(jnp.concatenate([new, x, new]), (1, 9)),
        (X, NEW),
        ["concatenate"] * 2,
    ),
    "pad": (lambda x: padded(x)[1:9] * 2, (X,), []),
    "edge of a pad": (lambda x: padded(x)[:9] * 2, (X,), ["pad"]),
    "shifts of a pad": (lambda x: padded(x)[:-2] + padded(x)[2:], (X,), ["join_slices"] * 2),
    "cotangents of a stencil": (squares(stencil), (X,), ["join_slices"] * 8),
    "all sides": (stencil, (X,), ["join_slices"] * 4),
    "returned slice": (lambda x: padded(x)[1:9], (X,), ["slice"]),
}


MOVING = ("slice", "split", "pad", "join_slices", "concatenate")


def nodes_of(graph: Graph) -> list[Any]:
    """All nodes, those of loops too."""
    return [m for n in graph.nodes for m in (n, *(i for r in n.regions for i in nodes_of(r)))]


@pytest.mark.parametrize("case", READ_THROUGH)
def test_slices_read_through_a_concatenation(case: str):
    """The concatenation is not made where only slices read it."""
    fn, args, want = READ_THROUGH[case]
    graph = graph_of(fn, args)
    assert sorted([n.op for n in nodes_of(graph) if n.op in MOVING]) == sorted(want)
    assert_same_values(graph, fn, args)


def test_a_concatenation_of_a_symbolic_size_stays():
    """Which operand a slice ends in depends on the size."""
    (n,) = jax.export.symbolic_shape("n", constraints=["n >= 1"])
    args = [jax.ShapeDtypeStruct((n, 3), np.float32), jax.ShapeDtypeStruct((1, 3), np.float32)]
    graph, _ = trace(lambda x, new: lax.slice_in_dim(jnp.concatenate([x, new]), 0, 2), args)
    assert [node.op for node in graph.nodes] == ["concatenate", "slice"]


def test_a_concatenation_with_other_readers_stays():
    """It is made in any case, so slices of it read it."""

    def fn(x: Any, new: Any) -> Any:
        longer = jnp.concatenate([new, x])
        return (longer[1:] - longer[:-1]) * jnp.sum(longer)

    graph = graph_of(fn, (X, NEW))
    assert [n.op for n in graph.nodes].count("slice") == 2
    assert "join_slices" not in [n.op for n in graph.nodes]
    assert_same_values(graph, fn, (X, NEW))


def test_slices_with_other_readers_stay():
    def fn(x: Any) -> Any:
        first, rest = x[:2], x[2:]
        return jnp.concatenate([rest, first]) * jnp.sum(first)

    found = [node.op for node in graph_of(fn, (X,)).nodes]
    assert found.count("slice") == 1 and "join_slices" in found


def test_inspected_values_stay():
    def fn(x: Any) -> Any:
        rest = x[1:]
        jax.debug.inspect_array_sharding(rest, callback=lambda s: None)
        return jnp.concatenate([rest, x[:1]])

    graph = graph_of(fn, (X,))
    assert {i.value for i in graph.inspections} <= {v for n in graph.nodes for v in n.outputs}


@pytest.mark.parametrize(
    ("case", "title"),
    [("roll", "roll"), ("shift", "concatenate"), ("padded slice", "pad"), ("in a loop", "roll")],
)
def test_reports_call_a_join_what_the_user_wrote(case: str, title: str):
    fn, args, _ = JOINED[case]
    joins = [n for n in graph_of(fn, args).walk() if n.op == "join_slices"]
    assert [n.name for n in joins] == [title] * len(joins) and joins
