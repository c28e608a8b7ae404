"""sbp joins slices into one node if it reads more than half of each array. A slice of a slice is
one slice. sbp adds the gradients of equal slices before it pads them. The graph of a function
computes the results of the function.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.experimental.xla_metadata import set_xla_metadata

import sbp
from sbp.trace.build import trace
from sbp.trace.collectives import evaluate
from sbp.trace.graph import Graph
from tests.same import assert_close, checked_plan

# ---- graphs of functions -------------------------------------------------------------------------


def graph_of(fn, args) -> Graph:
    """The graph of a function of arrays with these shapes."""
    graph, _ = trace(fn, [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in args])
    return graph


def ops(graph: Graph) -> list[str]:
    """The operators of a graph, those of loops too."""
    return [node.op for node in graph.walk()]


def assert_same_values(graph: Graph, fn, args, tolerance: float = 0.0) -> None:
    """Checks that the graph, evaluated as one program, gives the results of the function."""
    found = jax.jit(lambda *args: evaluate(graph, args))(*args)
    assert_close(list(found), jax.tree.leaves(jax.jit(fn)(*args)), rtol=tolerance, atol=tolerance)


# ---- joins ---------------------------------------------------------------------------------------

X = np.arange(24, dtype=np.float32).reshape(8, 3) + 1
NEW = -np.ones((1, 3), np.float32)


def squares(fn: Callable[..., Any]) -> Callable[..., Any]:
    """The gradient of the sum of the squares of a function."""
    return jax.grad(lambda *args: jnp.sum(fn(*args) ** 2))


shifted = lambda x, new: jnp.concatenate([new, x[:-1]])


JOINED: dict[str, tuple[Callable[..., Any], tuple[Any, ...], int]] = {
    "roll": (lambda x: jnp.roll(x, 3, 0), (X,), 1),
    "roll of two dims": (lambda x: jnp.roll(x, (3, 1), (0, 1)), (X,), 2),
    "shift": (shifted, (X, NEW), 1),
    "shift to the left": (lambda x, new: jnp.concatenate([x[1:], new]), (X, NEW), 1),
    "from split": (lambda x: jnp.concatenate(lax.split(x, (5, 3))[::-1]), (X,), 1),
    "padded slice": (lambda x: lax.pad(x[1:], np.float32(2), [(2, 1, 0), (0, 0, 0)]), (X,), 1),
    "gradient of roll": (squares(lambda x: jnp.roll(x, 1, 0)), (X,), 2),
    "gradient of shift": (squares(shifted), (X, NEW), 2),
    "in a loop": (
        lambda x: lax.scan(lambda c, _: (jnp.roll(c, 1, 0) * 2, None), x, length=3)[0],
        (X,),
        1,
    ),
}

APART: dict[str, tuple[Callable[..., Any], tuple[Any, ...], int]] = {
    "half of it": (lambda x: jnp.concatenate([-x[4:], x[:4]]), (X,), 0),
    "a small slice": (lambda x, new: jnp.concatenate([new, x[:3]]), (X, NEW), 0),
    "strided": (lambda x: jnp.concatenate([x[::2], x[1::2]]), (X,), 0),
    "cut along another dim": (lambda x: jnp.concatenate([x[:, :2], x[:, 1:]]), (X,), 0),
    "overlapping pads": (
        lambda ct: jax.linear_transpose(lambda x: jnp.concatenate([x[:5], x[3:]]), X)(ct)[0],
        (np.ones((10, 3), np.float32),),
        0,
    ),
    "computed between": (lambda x: jnp.concatenate([x[7:] * 2, x[:7] * 2]), (X,), 0),
    "empty": (lambda x: (x[5:5][:0], jnp.flip(x)[3:]), (X,), 0),
}


@pytest.mark.parametrize("case", JOINED | APART)
def test_joined_or_apart(case: str):
    fn, args, count = (JOINED | APART)[case]
    graph = graph_of(fn, args)
    assert ops(graph).count("join_slices") == count
    # The gradient of `new` is a slice by itself.
    if case in JOINED and case != "gradient of shift":
        assert not {"slice", "split", "pad", "concatenate", "add_any"} & set(ops(graph))
    assert_same_values(graph, fn, args)


padded = lambda x: jnp.pad(x, ((1, 1), (0, 0)))


def halves(x: Any, sizes: tuple[int, int]) -> Any:
    first, second = lax.split(x, sizes)
    return jnp.concatenate([first * 2, second * 3])


def stencil(x: Any) -> Any:
    """The sum of the four neighbours, zeros around."""
    p = jnp.pad(x, 1)
    return p[:-2, 1:-1] + p[2:, 1:-1] + p[1:-1, :-2] + p[1:-1, 2:]


def returned_sum(x: Any, new: Any) -> Any:
    """The concatenation is made in any case, so slices of it read it."""
    longer = jnp.concatenate([new, x])
    return (longer[1:] - longer[:-1]) * jnp.sum(longer)


def returned_first(x: Any) -> Any:
    first, rest = x[:2], x[2:]
    return jnp.concatenate([rest, first]) * jnp.sum(first)


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
    "pads that add elements": (
        lambda x: (
            lax.pad(x, np.float32(0), [(-1, 1, 0), (0, 0, 0)]),
            lax.pad(x, np.float32(0), [(0, 0, 1), (0, 0, 0)]),
        ),
        (X,),
        ["pad"] * 2,
    ),
    "other readers of a concatenation": (returned_sum, (X, NEW), ["concatenate", "slice", "slice"]),
    "other readers of a slice": (returned_first, (X,), ["join_slices", "slice"]),
}


@pytest.mark.parametrize(("fn", "args", "want"), READ_THROUGH.values(), ids=READ_THROUGH)
def test_slices_read_through_a_concatenation(fn, args, want):
    """The concatenation is not made where only slices read it."""
    graph = graph_of(fn, args)
    assert sorted(
        op for op in ops(graph) if op in ("slice", "split", "pad", "join_slices", "concatenate")
    ) == sorted(want)
    assert_same_values(graph, fn, args)


def test_a_concatenation_of_a_symbolic_size_stays():
    """Which operand a slice ends in depends on the size."""
    (n,) = jax.export.symbolic_shape("n", constraints=["n >= 1"])
    args = [jax.ShapeDtypeStruct((n, 3), np.float32), jax.ShapeDtypeStruct((1, 3), np.float32)]
    graph, _ = trace(lambda x, new: lax.slice_in_dim(jnp.concatenate([x, new]), 0, 2), args)
    assert [node.op for node in graph.nodes] == ["concatenate", "slice"]


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


# ---- slices of slices ---------------------------------------------------------------------------

Y = np.arange(36, dtype=np.float32).reshape(12, 3) + 1
ZERO = np.float32(0)


ONE_SLICE: dict[str, Callable[..., Any]] = {
    "every second of the rest": lambda x: lax.slice(x[1:], (0, 0), (11, 3), (2, 1)),
    "both strided": lambda x: lax.slice(x[::2], (1, 0), (6, 3), (3, 1)),
    "along two dims": lambda x: x[2:, 1:][3:, :1],
    "of a part": lambda x: lax.split(x, (5, 7))[1][1:3],
    "cut off by a pad": lambda x: lax.pad(x, ZERO, [(-2, -1, 0), (0, -1, 0)])[1:],
    "in a loop": lambda x: lax.fori_loop(0, 2, lambda _, c: c.at[:4].set(c[1:][::2][:4]), x),
}


@pytest.mark.parametrize("case", ONE_SLICE)
def test_one_slice(case: str):
    nodes = list(graph_of(ONE_SLICE[case], (Y,)).walk())
    read = {o for n in nodes for o in n.inputs if isinstance(o, int)}
    cut = [n for n in nodes if n.op == "slice"]
    slices = {v for n in nodes if n.op in ("slice", "split") for v in n.outputs}
    assert cut and not any(o in slices for n in cut for o in n.inputs)
    assert read.isdisjoint({v for n in nodes if n.op == "pad" for v in n.outputs})
    checked_plan(ONE_SLICE[case], sbp.make_mesh((2,), ("x",)), Y, rtol=0, atol=0)


# ---- gradients of slices ------------------------------------------------------------------------

Z = np.arange(128, dtype=np.float32).reshape(8, 16) / 10 + 1


def loss(x: Any) -> Any:
    """A cross entropy, which reads a slice for the normaliser and for the targets."""
    logits = jnp.sin(x)
    return jnp.sum(
        jax.nn.logsumexp(logits[:, :-1], -1)
        - jnp.take_along_axis(logits[:, :-1], np.arange(8)[:, None], -1)[:, 0]
    )


def thrice(x: Any) -> Any:
    y = jnp.sin(x)
    return jnp.sum(y[1:] * y[1:] + jnp.cos(y[1:]))


def rounded(x: Any) -> Any:
    y = jnp.sin(x).astype(jnp.bfloat16)
    return jnp.sum(jnp.cos(y[:, :-1]) + jnp.tanh(y[:, :-1])).astype(jnp.float32)


ONE_PAD: dict[str, Callable[..., Any]] = {
    "cross entropy": jax.grad(loss),
    "three slices": jax.grad(thrice),
    "bfloat16": jax.grad(rounded),
    "in a loop": lambda x: lax.fori_loop(0, 2, lambda _, c: c + jax.grad(thrice)(c), x),
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


TWO_PADS: dict[str, Callable[..., Any]] = {
    "cut elsewhere": jax.grad(other),
    "in named parts": jax.grad(named),
    "padded by ones": padded_by_ones,
    "read elsewhere": read_twice,
}


@pytest.mark.parametrize(
    ("fn", "count"),
    [*((fn, 1) for fn in ONE_PAD.values()), *((fn, 2) for fn in TWO_PADS.values())],
    ids=[*ONE_PAD, *TWO_PADS],
)
def test_gradients_of_slices_that_cut_alike_have_one_pad(fn: Callable[..., Any], count: int):
    graph = graph_of(fn, (Z,))
    assert ops(graph).count("pad") == count
    assert_close(list(evaluate(graph, (Z,))), jax.tree.leaves(fn(Z)), rtol=1e-2, atol=0)


@pytest.mark.parametrize("axis", [0, 1])
@pytest.mark.parametrize("case", ["cross entropy", "three slices", "in a loop"])
@pytest.mark.parametrize("n", [2, 8])
def test_values_of_gradients_of_slices(case: str, axis: int, n: int):
    checked_plan(
        ONE_PAD[case], sbp.make_mesh((n,), ("x",)), Z, rtol=1e-5, atol=1e-6, in_types=f"x:S({axis})"
    )


# ---- windows of padded arrays -------------------------------------------------------------------


IMAGES = np.random.default_rng(0).normal(size=(2, 16, 9, 3)).astype(np.float32)
KERNEL = np.random.default_rng(1).normal(size=(3, 3, 3, 5)).astype(np.float32)


def convolved(x: Any, w: Any, padding: Any = "VALID", **options: Any) -> Any:
    dims = ("NHWC", "HWIO", "NHWC")
    return lax.conv_general_dilated(x, w, (1, 1), padding, dimension_numbers=dims, **options)


bordered = lambda x, value=0.0: jnp.pad(x, ((0, 0), (1, 1), (2, 0), (0, 0)), constant_values=value)


def cut_with_metadata(x: Any) -> Any:
    with set_xla_metadata(group="cuts"):
        return x[:, 1:]


def summed(x: Any) -> Any:
    window, strides = (1, 3, 3, 1), (1, 2, 2, 1)
    return lax.reduce_window(x, 0.0, lax.add, window, strides, [(0, 0), (2, 3), (0, 3), (0, 0)])


def averaged(x: Any) -> Any:
    window, strides = (1, 3, 3, 1), (1, 2, 2, 1)
    return jnp.sin(lax.reduce_window(x, 0.0, lax.add, window, strides, "SAME")).sum()


WINDOWS: dict[str, tuple[Callable[..., Any], int]] = {
    "VALID": (lambda x, w: convolved(bordered(x), w), 0),
    "SAME": (lambda x, w: convolved(bordered(x), w, "SAME", rhs_dilation=(2, 1)), 0),
    "holes": (
        lambda x, w: convolved(
            lax.pad(x, np.float32(0), ((0, 0, 0), (1, 2, 1), (0, 1, 2), (0, 0, 0))), w
        ),
        0,
    ),
    "gradient of the kernel": (jax.grad(lambda w, x: convolved(bordered(x), w).sum()), 0),
    "gradient of an average": (lambda x, w: jax.grad(averaged)(x), 0),
    "read twice": (lambda x, w: (convolved(p := bordered(x), w), p.max()), 1),
    "other padding": (lambda x, w: convolved(bordered(x, 1.0), w), 1),
    "maximum": (
        lambda x, w: lax.reduce_window(
            bordered(x), -jnp.inf, lax.max, (1, 3, 3, 1), (1, 1, 1, 1), "VALID"
        ),
        1,
    ),
    "dilated": (lambda x, w: convolved(bordered(x), w, [(0, 0)] * 2, lhs_dilation=(2, 1)), 1),
    "padded batch": (lambda x, w: convolved(jnp.pad(x, ((0, 1), *[(0, 0)] * 3)), w), 1),
    "another policy": (lambda x, w: convolved(under_policy(x), w), 1),
    "gradient of the images": (jax.grad(lambda x, w: convolved(bordered(x), w).sum()), 0),
    "cut": (lambda x, w: convolved(x, w, [(4, 5), (2, 1)], rhs_dilation=(2, 2))[:, 4:-3, 1:], 0),
    "cut, stride 2": (lambda x, w: summed(x)[:, 1:-1, :-1], 0),
    "cut inside": (lambda x, w: convolved(x, w, [(1, 1)] * 2)[:, 2:], 1),
    "cut and read": (lambda x, w: (y := convolved(x, w, "SAME"), y[:, 1:]), 1),
    "cut with steps": (lambda x, w: convolved(x, w, [(2, 2)] * 2)[:, 1::2], 1),
    "cut with metadata": (lambda x, w: cut_with_metadata(convolved(x, w, "SAME")), 1),
    "cut features": (lambda x, w: convolved(x, w, "SAME")[..., 1:], 1),
}


def under_policy(x: Any) -> Any:
    with sbp.policy("auto"):
        return bordered(x)


@pytest.mark.parametrize("name", WINDOWS)
def test_windows_pad_arrays_themselves(name: str):
    """The graph has no such pads and cuts, and computes the same values, also with split rows."""
    fn, edges = WINDOWS[name]
    args = (KERNEL, IMAGES) if name == "gradient of the kernel" else (IMAGES, KERNEL)
    graph = graph_of(fn, args)
    assert ops(graph).count("pad") + ops(graph).count("slice") == edges
    assert_same_values(graph, fn, args, 1e-4)
    checked_plan(
        fn,
        sbp.make_mesh((8,), ("x",)),
        *args,
        in_types=tuple("x:S(1)" if x is IMAGES else None for x in args),
    )
