"""Runs programs with hand-written regions without devices: nested `vmap`s bind the named axes of a
region, and its body runs for all devices of the mesh in one call."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import PartitionSpec

from sbp import _jax
from sbp.errors import SbpError
from sbp.trace.collectives import KINDS, SHARD_MAP
from sbp.trace.evaluate import evaluate
from sbp.trace.graph import Graph, Node
from sbp.trace.regions import trips_of

CHECKED_ELEMENTS = 2**22
"""Elements that any value of a region may have, over all devices, for the region to be run without
devices. The run is on the real shapes. What a larger region computes is not tried, and a warning or
the report says so."""

CHECKED_WORK = 2**28
"""Elements that all operations of a program may make together, over all devices and with the trips
of loops, for the program to be run without devices."""

TOLERANCE = {8: 1e-8, 4: 1e-3, 2: 1e-1, 1: 5e-1}
"""Relative tolerance by bytes of one real number. Parts that cancel lose some digits; where a claim
does not hold, all digits differ."""

FAILURES = (
    ArithmeticError,
    AssertionError,
    LookupError,
    NameError,
    NotImplementedError,
    RuntimeError,
    SbpError,
    TypeError,
    ValueError,
)
"""What a region may raise on mesh axes of size 1, for which it was not written, or when it is run
without devices: `vmap` has no rule for some collectives and callbacks."""


def reason_of(error: Exception) -> str:
    """The first line of an error, or its name if it has no text."""
    return (str(error).splitlines() or [type(error).__name__])[0]


def not_emulated(error: Exception) -> str:
    """Why a region was not run without devices, by the error of the run."""
    return f"its collectives cannot be run without devices ({reason_of(error)})"


def too_large(graph: Graph, devices: int) -> str:
    """Why a region, or a program with regions, is not run without devices; empty where it is small
    enough.

    Arguments:
      graph: the region's body, or the program.
      devices: the number of devices that each hold the values.
    """
    largest, work = _sizes(graph, devices)
    if largest > CHECKED_ELEMENTS:
        return (
            f"a value in it has {largest:,} elements over all devices, and only"
            f" {CHECKED_ELEMENTS:,} are tried"
        )
    if work > CHECKED_WORK:
        return (
            f"its operations make {work:,} elements over all devices, and only {CHECKED_WORK:,} are"
            " tried"
        )
    return ""


def _sizes(graph: Graph, devices: int) -> tuple[int, int]:
    """The elements of the largest value over all devices, and those that all operations make."""
    elements = {v: devices * math.prod(a.shape) for v, a in graph.avals.items()}
    largest, work = max(elements.values(), default=0), 0
    for node in graph.nodes:
        work += sum(elements[v] for v in node.outputs)
        inner, times = node.regions, trips_of(node)
        count = devices
        if node.op == SHARD_MAP:
            inner, times = (node.params["body"],), 1
            count = math.prod(node.params["mesh"].shape.values())
        for region in inner:
            most, made = _sizes(region, count)
            largest, work = max(largest, most), work + times * made
    return largest, work


def differ(got: np.ndarray, want: np.ndarray, tolerance: float = 0.0) -> bool:
    """Whether two values differ by more than `TOLERANCE`; any two non-finite floats are equal.

    Arguments:
      got: one value.
      want: the other one.
      tolerance: a relative tolerance that is used where it is larger.
    """
    if not jnp.issubdtype(want.dtype, np.inexact):
        return not np.array_equal(got, want)
    wide, itemsize = np.dtype(np.float64), want.dtype.itemsize
    if jnp.issubdtype(want.dtype, np.complexfloating):
        wide, itemsize = np.dtype(np.complex128), itemsize // 2
    got, want = got.astype(wide), want.astype(wide)
    finite = np.isfinite(want) & np.isfinite(got)
    scale = max(1e-6, float(np.max(np.abs(want), where=finite, initial=0.0)))
    with np.errstate(invalid="ignore"):
        near = np.abs(got - want) <= max(tolerance, TOLERANCE[itemsize]) * scale
    return not bool(np.where(finite, near, ~np.isfinite(want) & ~np.isfinite(got)).all())


# ---- regions ------------------------------------------------------------------------------------


def program_run(graph: Graph) -> Callable[[Sequence[Any]], list[np.ndarray]]:
    """A function that runs a program on values of its inputs, its regions device by device.

    Arguments:
      graph: a program with `shard_map`s.

    Returns:
      The function; keys in its results are given by their data.
    """

    def whole(*args: Any) -> list[Any]:
        return [plain(y) for y in evaluate(graph, args, {SHARD_MAP: _region})]

    compiled: list[Any] = []

    def run(args: Sequence[Any]) -> list[np.ndarray]:
        if not compiled:
            compiled.append(jax.jit(whole).lower(*args).compile())
        return executed(compiled[0], args)

    return run


def executed(compiled: Any, args: Sequence[Any]) -> list[np.ndarray]:
    """The results of a compiled function, also where JAX is tracing another one.

    It is compiled before: under `jax.ensure_compile_time_eval`, JAX would evaluate an `axis_index`
    in a loop at once, outside of its axis.
    """
    with jax.ensure_compile_time_eval():
        return [np.asarray(y) for y in jax.device_get(compiled(*args))]


def plain(y: Any) -> Any:
    """A value; the data of a key."""
    return jax.random.key_data(y) if _jax.is_extended(y.dtype) else y


def _region(node: Node, args: Sequence[Any]) -> list[Any]:
    """The results of a `shard_map`."""
    sizes = {str(name): int(n) for name, n in node.params["mesh"].shape.items()}
    body = node.params["body"]
    shards = [_cut(x, s, sizes) for x, s in zip(args, node.params["in_specs"], strict=True)]
    results = on_every_device(lambda *x: evaluate(body, x, ONE_AXIS_AT_A_TIME), list(sizes))(
        *shards
    )
    return [_joined(y, s, sizes) for y, s in zip(results, node.params["out_specs"], strict=True)]


def on_every_device(fn: Callable[..., Any], names: Sequence[str]) -> Callable[..., Any]:
    """A function on shards as one on arrays with a leading dim for each mesh axis, in this order.

    Arguments:
      fn: the function on the shards of one device, with collectives.
      names: the mesh axes.
    """
    for name in reversed(names):
        fn = jax.vmap(fn, axis_name=name)
    return fn


def _axes_by_dim(spec: Any, rank: int) -> list[tuple[str, ...]]:
    """The mesh axes that split each dim, outermost first."""
    if not isinstance(spec, PartitionSpec) or getattr(spec, "unreduced", None):
        raise NotImplementedError(f"operands and results of type {spec}")
    entries = [() if e is None else e if isinstance(e, tuple) else (e,) for e in tuple(spec)]
    return [tuple(str(a) for a in e) for e in entries] + [()] * (rank - len(entries))


def _cut(x: Any, spec: Any, sizes: dict[str, int]) -> Any:
    """The shards of an array: a leading dim for each mesh axis, in the order of the mesh."""
    shape: list[int] = []
    places: dict[str, int] = {}
    for length, axes in zip(x.shape, _axes_by_dim(spec, x.ndim), strict=True):
        for a in axes:
            places[a] = len(shape)
            shape.append(sizes[a])
            length //= sizes[a]
        shape.append(length)
    split = [a for a in sizes if a in places]
    y = jnp.moveaxis(x.reshape(shape), [places[a] for a in split], range(len(split)))
    for i, (a, n) in enumerate(sizes.items()):
        if a not in places:
            y = jnp.broadcast_to(jnp.expand_dims(y, i), (*y.shape[:i], n, *y.shape[i:]))
    return y


def _joined(y: Any, spec: Any, sizes: dict[str, int]) -> Any:
    """The array that shards make up; of equal parts, that of the first device."""
    by_dim = _axes_by_dim(spec, y.ndim - len(sizes))
    used = {a for axes in by_dim for a in axes}
    for i, a in reversed(list(enumerate(sizes))):
        y = y if a in used else y[(slice(None),) * i + (0,)]
    left = [a for a in sizes if a in used]
    order: list[int] = []
    shape: list[int] = []
    for d, axes in enumerate(by_dim):
        order += [*(left.index(a) for a in axes), len(left) + d]
        shape.append(math.prod([y.shape[len(left) + d], *(sizes[a] for a in axes)]))
    return y.transpose(order).reshape(shape)


# ---- collectives for which vmap has no rule -----------------------------------------------------


def _gather(node: Node, args: Sequence[Any]) -> list[Any]:
    """An all-gather one axis at a time, the inner one first: `vmap` has none over several axes."""
    p = node.params
    names = p["axis_name"] if isinstance(p["axis_name"], tuple) else (p["axis_name"],)
    if len(names) == 1 or p["axis_index_groups"] is not None or not p["tiled"]:
        return _jax.bind(node.primitive, args, p)
    (x,) = args
    for name in reversed(names):
        x = lax.all_gather(x, name, axis=p["all_gather_dimension"], tiled=True)
    return [x]


def _scatter(node: Node, args: Sequence[Any]) -> list[Any]:
    """A reduce-scatter one axis at a time, the outer one first."""
    p = node.params
    names = p["axis_name"] if isinstance(p["axis_name"], tuple) else (p["axis_name"],)
    if len(names) == 1 or p["axis_index_groups"] is not None or not p["tiled"]:
        return _jax.bind(node.primitive, args, p)
    (x,) = args
    for name in names:
        x = lax.psum_scatter(x, name, scatter_dimension=p["scatter_dimension"], tiled=True)
    return [x]


def _permute(node: Node, args: Sequence[Any]) -> list[Any]:
    """A permutation in which some devices send or get nothing, which `vmap` does not take: each
    device picks from what all have, or gets zeros."""
    p = node.params
    names = p["axis_name"] if isinstance(p["axis_name"], tuple) else (p["axis_name"],)
    name, *others = names
    n = lax.axis_size(name)
    absent = [] if others else [i for pair in p["perm"] for i in pair if not 0 <= i < n]
    if absent:
        raise SbpError(
            f"ppermute names index {absent[0]} on mesh axis {name!r}, which has {n} devices",
            span=node.span,
        )
    if others or len(p["perm"]) == n:
        return _jax.bind(node.primitive, args, p)
    source = np.full(n, -1)
    for start, target in p["perm"]:
        source[target] = start
    mine = jnp.asarray(source)[lax.axis_index(name)]
    (x,) = args
    every = lax.all_gather(x, name)
    return [jnp.where(mine < 0, jnp.zeros_like(x), every[mine])]


ONE_AXIS_AT_A_TIME = {"all_gather": _gather, "reduce_scatter": _scatter} | dict.fromkeys(
    (op for op, kind in KINDS.items() if kind == "permute"), _permute
)
"""Functions in the place of collectives whose rules for `vmap` lack a case."""
