"""Runs programs with hand-written regions without devices: nested `vmap`s bind the named axes of a
region, and its body runs for all devices of the mesh in one call."""

import contextlib
import functools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from sbp import _jax
from sbp.annotations import as_type, axes_of_entry
from sbp.errors import SbpError
from sbp.signatures import traits_of
from sbp.signatures.kernels.shards import reduce_dims
from sbp.signatures.laws.oracle import permute_batches
from sbp.signatures.rule import RAGGED_PRODUCT, REDUCE_PRECISION
from sbp.trace.build import body_graph
from sbp.trace.collectives import (
    KINDS,
    REDUCTIONS,
    SHARD_MAP,
    environment,
    mesh_sizes,
    names_of,
    run_node,
    run_regions,
)
from sbp.trace.graph import SCAN, Constant, Dataflow, Graph, Node, trips_of
from sbp.types import Atom, B, NdSbp, Split, Unreduced

# ---- types of a region --------------------------------------------------------------------------
# The types that a region states for its operands and results: the PartitionSpecs of a
# `jax.shard_map`, and the `NdSbp` types of an `sbp.manual`.


def outs_of(region: Node) -> str:
    """The argument that states the types of a region's results. A region without results and
    operands is a `jax.shard_map`."""
    specs = *region.params["in_specs"], *region.params["out_specs"]
    return "out_types" if any(isinstance(s, NdSbp) for s in specs) else "out_specs"


def function_of(region: Node) -> str:
    """The function that makes a region."""
    return "sbp.manual" if outs_of(region) == "out_types" else "jax.shard_map"


def atom_of(spec: Any, mesh_axis: str) -> Atom:
    """The atom that a spec or a type states on a mesh axis.

    >>> from jax.sharding import PartitionSpec
    >>> from sbp.types import P
    >>> atom_of(PartitionSpec(None, "model"), "model"), atom_of(NdSbp({"model": P}), "model")
    (S(1), P(sum))
    """
    return as_type(spec).get(mesh_axis)


def axes_by_dim(spec: Any, rank: int, names: Sequence[str]) -> list[tuple[str, ...]]:
    """The mesh axes that split each dim, outermost first."""
    if isinstance(spec, NdSbp):
        return [tuple(a for a in names if spec.get(a) == Split(d)) for d in range(rank)]
    return [tuple(map(str, axes_of_entry(entry))) for entry in spec] + [()] * (rank - len(spec))


def split_over(spec: Any, mesh_axis: str, dim: int) -> Any:
    """A spec or a type that splits a dim over one more mesh axis, the innermost in a spec.

    >>> split_over(NdSbp({"data": Split(0)}), "model", 0)
    data:S(0) model:S(0)
    """
    if isinstance(spec, NdSbp):
        return NdSbp({**spec, mesh_axis: Split(dim)})
    entries = [*spec, *(None for _ in range(dim + 1 - len(spec)))]
    entries[dim] = (*axes_of_entry(entries[dim]), mesh_axis)
    return type(spec)(*entries)


def without(spec: Any, mesh_axis: str) -> Any:
    """A spec or a type in which a mesh axis splits nothing.

    >>> without(NdSbp({"data": Split(0), "model": Split(1)}), "data")
    model:S(1)
    """
    if isinstance(spec, NdSbp):
        return NdSbp({name: atom for name, atom in spec.items() if name != mesh_axis})
    return type(spec)(
        *(
            kept or None
            for kept in (tuple(a for a in axes_of_entry(entry) if a != mesh_axis) for entry in spec)
        )
    )


def regions_of(graph: Graph) -> Iterator[Node]:
    """The regions of a program."""
    return (node for node in graph.walk() if node.op == SHARD_MAP)


def nodes_of(graph: Graph) -> Iterator[Node]:
    """The operations of a program and of the regions in it."""
    for node in graph.nodes:
        yield node
        for inner in inner_graphs(node):
            yield from nodes_of(inner)


def places_of(node: Node) -> range:
    """The positions of the operands that say where elements of the first one are."""
    indices, count = traits_of(node.op).indices, len(node.inputs)
    return range(indices.start, min(indices.stop, count)) if traits_of(node.op).moves else range(0)


def bodies(graph: Graph) -> Iterator[Node]:
    """The operations of all regions."""
    return (node for region in regions_of(graph) for node in region.params["body"].walk())


def inner_graphs(node: Node) -> Sequence[Graph]:
    """The body of a region, or of a loop or branch."""
    return (node.params["body"],) if node.op == SHARD_MAP else node.regions


def with_graphs(node: Node, graphs: Sequence[Graph]) -> Node:
    """An operation with others in the place of its `inner_graphs`."""
    return (
        replace(node, params=node.params | {"body": graphs[0]})
        if node.op == SHARD_MAP
        else replace(node, regions=tuple(graphs))
    )


def is_bound(node: Node | None) -> bool:
    """Whether an operation bounds a value by a constant."""
    return (
        node is not None
        and traits_of(node.op).numpy in (np.maximum, np.minimum)
        and any(isinstance(o, Constant) for o in node.inputs)
    )


def with_nodes(graph: Graph, change: Callable[[Node], Node]) -> Graph:
    """A program in which each operation is changed, and then those in its `inner_graphs`."""
    return replace(
        graph,
        nodes=tuple(
            with_graphs(change(node), [with_nodes(g, change) for g in inner_graphs(node)])
            for node in graph.nodes
        ),
    )


def splits_jointly(region: Node, mesh_axis: str) -> bool:
    """Whether an operand or result of a region has a dim that a mesh axis splits with others."""
    body, names = region.params["body"], list(mesh_sizes(region))
    stated = [
        *zip(body.inputs, region.params["in_specs"], strict=True),
        *zip(body.outputs, region.params["out_specs"], strict=True),
    ]
    return any(
        len(axes) > 1 and mesh_axis in axes
        for value, spec in stated
        for axes in axes_by_dim(spec, len(body.aval(value).shape), names)
    )


def with_folded(graph: Graph, mesh_axis: str, size: int) -> Graph:
    """A program with one device on a mesh axis. Each shard of its regions holds the shards that the
    devices of that axis had. If several axes split a dim, these are not next to each other."""
    return with_nodes(
        graph,
        lambda node: (
            replace(node, params=node.params | {"folded": {mesh_axis: size}})
            if node.op == SHARD_MAP
            else node
        ),
    )


def claims(graph: Graph) -> Iterator[tuple[Node, list[int]]]:
    """The regions of a program in order, each with the positions of the results that claim a type.
    A residual claims none: only the region of a gradient reads it, with the same spec."""
    readers = Dataflow(graph).readers
    return (
        (
            node,
            [
                i
                for i, (v, spec) in enumerate(
                    zip(node.outputs, node.params["out_specs"], strict=True)
                )
                if v not in readers or not all(_takes_back(r, v, spec) for r in readers[v])
            ],
        )
        for node in regions_of(graph)
    )


def _takes_back(reader: Node | None, value: int, spec: Any) -> bool:
    """Whether a reader is the region of a gradient that reads the result with the same spec. A
    residual has no other readers, and its spec claims nothing."""
    return (
        reader is not None
        and reader.op == SHARD_MAP
        and reader.backward
        and all(
            own == spec
            for operand, own in zip(reader.inputs, reader.params["in_specs"], strict=True)
            if operand == value
        )
    )


# ---- emulation ----------------------------------------------------------------------------------


CHECKED_ELEMENTS = 2**22
"""Elements that any value of a region may have, over all devices, for the region to be run without
devices. The run is on the real shapes. What a larger region computes is not tried, and a warning or
the report says so."""

CHECKED_WORK = 2**28
"""Elements that all operations of a program may make together, over all devices and with the trips
of loops, for the program to be run without devices."""

TOLERANCE = 1e-6
"""Relative tolerance of floats, which all are float64: an update with a small learning rate that is
not reduced shows. Constants of the program have the digits of their own dtype."""

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


def too_large(graph: Graph) -> str:
    """Why a program with regions is not run without devices; empty where it is small enough."""
    largest, work = _sizes(graph)
    reasons = (
        f"{what} {amount:,} elements over all devices, and sbp runs programs with at most"
        f" {limit:,}; pass smaller arguments"
        for what, amount, limit in (
            ("one of its values has", largest, CHECKED_ELEMENTS),
            ("its operations compute", work, CHECKED_WORK),
        )
        if amount > limit
    )
    return next(reasons, "")


def _sizes(graph: Graph, devices: int = 1) -> tuple[int, int]:
    """The elements of the largest value over all devices, and those that all operations make."""
    own = (*graph.inputs, *(v for node in graph.nodes for v in node.outputs))
    elements = {v: devices * math.prod(graph.avals[v].shape) for v in own}
    largest, work = max(elements.values(), default=0), 0
    for node in graph.nodes:
        work += sum(elements[v] for v in node.outputs)
        for inner in inner_graphs(node):
            most, made = _sizes(
                inner,
                math.prod(mesh_sizes(node).values()) if node.op == SHARD_MAP else devices,
            )
            largest, work = max(largest, most), work + trips_of(node) * made
    return largest, work


def differ(got: np.ndarray, want: np.ndarray) -> bool:
    """Whether two values differ by more than `TOLERANCE`; any two non-finite floats are equal."""
    if not jnp.issubdtype(want.dtype, np.inexact):
        return not np.array_equal(got, want)
    scale = max(1e-6, float(np.max(np.abs(want), where=np.isfinite(want), initial=0.0)))
    near = np.isclose(got, want, 0.0, TOLERANCE * scale)
    return not bool((near | ~(np.isfinite(want) | np.isfinite(got))).all())


def factor_of(got: np.ndarray, want: np.ndarray) -> float | None:
    """The number by which a value is another one; None where there is none."""
    if got.shape != want.shape or not want.size or not want.any():
        return None
    most = int(np.argmax(np.abs(want)))
    factor = (got.flat[most] / want.flat[most]).real
    same = np.isfinite(factor) and not differ(got, np.asarray(want * factor, want.dtype))
    return float(factor) if same else None


def are_equal(parts: np.ndarray) -> bool:
    """Whether the parts of all devices are the same, to within `TOLERANCE`."""
    return not any(differ(x, parts[0]) for x in parts[1:])


# ---- runs ---------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, eq=False)
class Ran:
    """A run of a program.

    Arguments:
      graph: the program.
      results: its results; keys are given by their data.
      values: the values of its regions that were kept: a leading dim for each mesh axis, a dim for
          the trips of each scan around it, then its own dims.
    """

    graph: Graph
    results: list[np.ndarray]
    values: dict[int, np.ndarray]

    @property
    def is_finite(self) -> bool:
        """Whether each result has a finite number in it."""
        return all(np.isfinite(x).any() for x in self.results if x.size)

    @property
    def is_telling(self) -> bool:
        """Whether each result is finite and has an element that is not zero."""
        return self.is_finite and all(x.any() for x in self.results if x.size)


def program_run(graph: Graph, *, every: bool = False) -> Callable[[Sequence[Any]], Ran]:
    """A function that runs a program on values of its inputs, its regions for all devices in one
    call.

    Random draws are replaced by a constant: the devices of a right program may draw other numbers
    than one device does. Floats become float64, so that no rounding hides a difference, or makes
    one.

    Arguments:
      graph: a program with `shard_map`s.
      every: whether to keep every value of its regions, or of a program without regions; if not,
          sbp keeps only the results of regions.
    """
    returned = {v for node in regions_of(graph) for v in node.params["body"].outputs}

    def whole(*inputs: Any) -> Any:
        values = dict[int, Any]()
        outs = _record(graph, inputs, 0 if any(regions_of(graph)) else 1, values)
        return [_jax.words(y) for y in outs], {
            v: _jax.words(y) for v, y in values.items() if every or v in returned
        }

    compiled: list[Any] = []

    def run(args: Sequence[Any]) -> Ran:
        # Compiled first: under `jax.ensure_compile_time_eval`, JAX would evaluate an `axis_index`
        # in a loop at once, outside of its axis. The function may be called where JAX is tracing.
        with jax.enable_x64(True):
            if not compiled:
                compiled.append(jax.jit(whole).lower(*args).compile(_QUICKLY))
            with jax.ensure_compile_time_eval():
                outs, values = jax.device_get(compiled[0](*args))
        return Ran(
            graph, list(map(np.asarray, outs)), {v: np.asarray(y) for v, y in values.items()}
        )

    return run


_QUICKLY = {
    "xla_backend_optimization_level": "0",
    "xla_llvm_disable_expensive_passes": True,
    # Of JAX 0.10, a softmax behind a sum of batched products is wrong with these fusions.
    "xla_cpu_experimental_ynn_fusion_type": "",
}
"""Options of the compiler: these programs run once."""

TRIPS = 10_000
"""The most trips of a while loop that run."""

_DRAWN = 0x1EB851EC
"""The bits that a random draw gives: a uniform number of 0.12. Masks that keep 15 % or 90 % of the
elements then keep all of them."""


def _record(graph: Graph, args: Sequence[Any], axes: int, found: dict[int, Any]) -> list[Any]:
    """The results of a graph.

    Arguments:
      graph: the graph.
      args: values of its inputs.
      axes: the number of mesh axes, in a region; 0 outside.
      found: gets the values of all regions in the graph.
    """

    def act(node: Node, ins: list[Any]) -> list[Any]:
        ins = [_wide(x) for x in ins]
        if node.op == SHARD_MAP:
            outs = _region(node, ins, axes, found)
        elif node.op == SCAN:
            outs = _scan(node, ins, axes, found)
        elif node.regions:
            run = functools.partial(_run_body, node, axes)
            outs = run_regions(node, ins, run, while_loop=_bounded_loop)
        elif draws(node):
            outs = [_drawn(graph.avals[v], ins) for v in node.outputs]
        elif traits_of(node.op).effect:  # a check prints and logs nothing
            outs = []
        else:
            outs = _run_wide(graph, node, ins)
        if axes:
            found.update(zip(node.outputs, outs, strict=True))
        return outs

    if axes:
        found.update(zip(graph.inputs, args, strict=True))
    return [_wide(y) for y in environment(graph, args, act)]


def _run_body(node: Node, axes: int, number: int, args: Sequence[Any]) -> list[Any]:
    return _record(node.regions[number], args, axes, {})


def draws(node: Node) -> bool:
    """Whether an operation draws random numbers."""
    generates = traits_of(node.op).generates
    return generates == "draws" or (generates == "counter" and bool(node.inputs))


def _drawn(aval: Any, ins: Sequence[Any]) -> Any:
    """What a draw gives: the same number everywhere; the next key is the one before."""
    if any((x.shape, x.dtype) == (aval.shape, aval.dtype) for x in ins):
        return next(x for x in ins if (x.shape, x.dtype) == (aval.shape, aval.dtype))
    inexact, itemsize = jnp.issubdtype(aval.dtype, jnp.inexact), aval.dtype.itemsize
    drawn = _DRAWN / 2**32 if inexact else (_DRAWN << 32) >> (64 - 8 * itemsize)
    return jnp.full(aval.shape, drawn, aval.dtype)


def _scan(node: Node, args: Sequence[Any], axes: int, found: dict[int, Any]) -> list[Any]:
    """The results of a scan; enters the values of its region, stacked over all trips."""
    values: dict[int, Any] = {}

    def scan(step: Any, initial: Any, xs: Any, **options: Any) -> Any:
        def with_values(carry: Any, x: Any) -> Any:
            carry, ys = step(carry, x)
            return carry, (ys, dict(values))

        carry, (ys, every) = lax.scan(with_values, initial, xs, **options)
        # In place of the values of one trip. The first trip comes first in gradients, too.
        values.update({v: y[::-1] for v, y in every.items()} if options["reverse"] else every)
        return carry, ys

    outs = run_regions(node, args, lambda n, x: _record(node.regions[n], x, axes, values), scan)
    if not axes:  # of a scan around regions: its trips come after the mesh axes
        behind = next((len(n.params["mesh"].shape) for n in regions_of(node.regions[0])), 0)
        values = {v: jnp.moveaxis(y, 0, behind) for v, y in values.items()}
    found.update(values)
    return outs


def _bounded_loop(goes_on: Any, turn: Any, initial: Any) -> Any:
    """The results of a while loop; NaN if it does not end after `TRIPS` trips, as one may whose
    random numbers are all the same."""
    trips, outs = lax.while_loop(
        lambda state: (state[0] < TRIPS) & goes_on(state[1]),
        lambda state: (state[0] + 1, turn(state[1])),
        (0, initial),
    )
    ends = trips < TRIPS
    return [
        jnp.where(ends, y, jnp.nan) if jnp.issubdtype(y.dtype, jnp.inexact) else y for y in outs
    ]


def _wide_dtype(dtype: Any) -> Any:
    wide = np.dtype(np.complex128 if jnp.issubdtype(dtype, np.complexfloating) else np.float64)
    return wide if jnp.issubdtype(dtype, np.inexact) else dtype


def _wide(x: Any) -> Any:
    return x if _jax.is_extended(x.dtype) else jnp.asarray(x, _wide_dtype(x.dtype))


def _run_wide(graph: Graph, node: Node, ins: list[Any]) -> list[Any]:
    """The results of an operation in float64. An operation that does not take float64, such as a
    callback or a bitcast, runs in its own dtypes."""
    if node.op == REDUCE_PRECISION:
        return ins
    params = {k: _wide_dtype(v) if isinstance(v, np.dtype) else v for k, v in node.params.items()}
    params |= {k: _wide_jaxpr(v) for k, v in params.items() if _jax.is_jaxpr(v)}
    params |= {"precision": None} if "precision" in params else {}
    with contextlib.suppress(*FAILURES):  # it does not take float64; a real error comes again below
        outs = run_node(replace(node, params=params), ins, _VMAP_RULES)
        if all(
            (y.shape, y.dtype) == (aval.shape, _wide_dtype(aval.dtype))
            for y, aval in zip(outs, map(graph.aval, node.outputs), strict=True)
        ):
            return outs
    return run_node(
        node,
        [jnp.asarray(x, graph.aval(o).dtype) for x, o in zip(ins, node.inputs, strict=True)],
        _VMAP_RULES,
    )


def _wide_jaxpr(jaxpr: Any) -> Any:
    """A function of scalars among the parameters, such as the sum of a scatter, on the wider
    floats; other jaxprs as they are."""
    opened, _ = _jax.open_jaxpr(jaxpr)
    avals: list[Any] = [v.aval for v in opened.invars]
    if any(getattr(a, "shape", None) != () for a in avals):  # such as a kernel on blocks
        return jaxpr
    graph = body_graph(jax.make_jaxpr(lambda *x: _jax.eval_jaxpr(jaxpr, x))(*avals))
    wide = [jax.ShapeDtypeStruct((), _wide_dtype(a.dtype)) for a in avals]
    made = jax.make_jaxpr(lambda *x: _record(graph, x, 0, {}))(*wide)
    return made if opened is not jaxpr else made.jaxpr


def _region(node: Node, args: Sequence[Any], axes: int, found: dict[int, Any]) -> list[Any]:
    """The results of a `shard_map`; enters the values of its body."""
    if axes:
        raise NotImplementedError("a shard_map inside a shard_map")
    sizes, body = mesh_sizes(node), node.params["body"]
    folded = node.params.get("folded", {})
    shards = [
        _cut(_folded(x, s, sizes, folded), s, sizes)
        for x, s in zip(args, node.params["in_specs"], strict=True)
    ]

    def run(*x: Any) -> Any:
        values = dict[int, Any]()
        return _record(body, x, len(sizes), values), values

    for name in reversed(sizes):
        run = jax.vmap(run, axis_name=name)
    results, values = run(*shards)
    found.update(values)
    return [
        _folded(_join(y, s, sizes), s, sizes, folded, back=True)
        for y, s in zip(results, node.params["out_specs"], strict=True)
    ]


def _folded(
    x: Any, spec: Any, sizes: dict[str, int], folded: dict[str, int], *, back: bool = False
) -> Any:
    """An array with its elements in another order: one shard then holds the shards of all devices
    along the folded mesh axes.

    Arguments:
      x: the array.
      spec: its spec or type.
      sizes: the sizes of the mesh axes; 1 for the folded ones.
      folded: the number of devices along each folded axis.
      back: whether to undo this order.
    """
    for d, axes in enumerate(axes_by_dim(spec, x.ndim, list(sizes))):
        counts = [folded.get(a, sizes[a]) for a in axes]
        # A result with one element for each device has too few on one device.
        if len(axes) > 1 and {*axes} & {*folded} and x.shape[d] % math.prod(counts) == 0:
            order = sorted(range(len(axes)), key=lambda i: axes[i] in folded)
            before = [counts[i] for i in order] if back else counts
            order = list(np.argsort(order)) if back else order
            blocks = x.reshape(*x.shape[:d], *before, -1, *x.shape[d + 1 :])
            moved = [*range(d), *(d + i for i in order), *range(d + len(axes), blocks.ndim)]
            x = blocks.transpose(moved).reshape(x.shape)
    return x


def _cut(x: Any, spec: Any, sizes: dict[str, int]) -> Any:
    """The shards of an array: a leading dim for each mesh axis, in the order of the mesh."""
    for i, (a, n) in enumerate(sizes.items()):
        atom = atom_of(spec, a)
        if isinstance(atom, Unreduced):  # the parts are the same on all other axes
            cut = functools.partial(
                _cut,
                spec=without(spec, a),
                sizes={name: size for name, size in sizes.items() if name != a},
            )
            return jnp.moveaxis(jax.vmap(cut)(_parts(x, atom.monoid, n)), 0, i)
    by_dim = axes_by_dim(spec, x.ndim, list(sizes))
    places = [a for axes in by_dim for a in (*axes, "")]  # the dims of `blocks`; "" is a shard
    blocks = [
        size
        for length, axes in zip(x.shape, by_dim, strict=True)
        for size in (*(sizes[a] for a in axes), length // math.prod(sizes[a] for a in axes))
    ]
    split = [a for a in sizes if a in places]
    y = jnp.moveaxis(x.reshape(blocks), [places.index(a) for a in split], range(len(split)))
    y = jnp.expand_dims(y, [i for i, a in enumerate(sizes) if a not in places])
    return jnp.broadcast_to(y, (*sizes.values(), *y.shape[len(sizes) :]))


def _parts(x: Any, monoid: str, n: int) -> Any:
    """Parts that make up an array, no two of which are equal."""
    if monoid == "sum":
        rest = jnp.asarray(np.random.default_rng(n).standard_normal((n - 1, *x.shape)) * 4, x.dtype)
        return jnp.concatenate([(x - rest.sum(0))[None], rest])
    owner = jnp.arange(x.size).reshape(x.shape) % n
    others: dict[str, Callable[[Any], Any]] = {
        "max": lambda x: x - 1,
        "min": lambda x: x + 1,
        "prod": jnp.ones_like,
        "and": jnp.ones_like,
        "or": jnp.zeros_like,
    }
    return jnp.stack([jnp.where(owner == k, x, others[monoid](x)) for k in range(n)])


def _join(y: Any, spec: Any, sizes: dict[str, int]) -> Any:
    """The array that shards make up; of equal parts, that of the first device."""
    by_dim = axes_by_dim(spec, y.ndim - len(sizes), list(sizes))
    left = [a for a in sizes if isinstance(atom_of(spec, a), Split)]
    for i, a in reversed(list(enumerate(sizes))):
        atom = atom_of(spec, a)
        if isinstance(atom, Unreduced):
            y = reduce_dims(y, atom.monoid, i)
        elif atom == B:
            y = y[(slice(None),) * i + (0,)]
    dims = list(enumerate(by_dim, len(left)))
    return y.transpose([i for d, axes in dims for i in (*map(left.index, axes), d)]).reshape(
        [y.shape[d] * math.prod(sizes[a] for a in axes) for d, axes in dims]
    )


# ---- operations for which vmap has no rule ------------------------------------------------------


def _over_axes(node: Node, args: Sequence[Any]) -> list[Any]:
    """A reduction over devices, which an edit of a program may have renamed; an all-gather, the
    inner axis first; or a reduce-scatter, the outer axis first. `vmap` has none of the last two
    over several axes."""
    p, names, kind = node.params, names_of(node), KINDS[node.op]
    if p.get("axis_index_groups") is not None:
        raise NotImplementedError(f"{node.op} in groups of an axis")
    if kind == "all_reduce":
        reduce = {"sum": lax.psum, "max": lax.pmax, "min": lax.pmin}[REDUCTIONS[node.op]]
        return [reduce(x, p["axes"]) for x in args]
    (x,), gathers = args, kind == "all_gather"
    for name in reversed(names) if gathers else names:
        tiled = p["tiled"] or name != names[-1]  # the inner axis makes the dim, or takes it away
        x = (
            lax.all_gather(x, name, axis=p["all_gather_dimension"], tiled=tiled)
            if gathers
            else lax.psum_scatter(x, name, scatter_dimension=p["scatter_dimension"], tiled=tiled)
        )
    return [x]


def _permute(node: Node, args: Sequence[Any]) -> list[Any]:
    """A permutation, also one in which some devices send or get nothing, which `vmap` does not
    take."""
    p, (name, *others) = node.params, names_of(node)
    n = lax.axis_size(name)
    absent = [] if others else [i for pair in p["perm"] for i in pair if not 0 <= i < n]
    receivers = [receiver for _, receiver in p["perm"]]
    twice = [i for i in receivers if receivers.count(i) > 1]
    if absent or twice:
        said = (
            f"names index {absent[0]} on mesh axis {name!r}, which has {n} devices; take indices"
            f" from 0 to {n - 1}"
            if absent
            else f"over {name!r} sends two values to index {twice[0]}, which can receive one"
        )
        raise SbpError(f"ppermute {said}", span=node.span)
    return (
        _jax.bind(node.primitive, args, p)
        if others or len(p["perm"]) == n
        else [permute_batches(x, name, p["perm"]) for x in args]
    )


def _ragged_product(node: Node, args: Sequence[Any]) -> list[Any]:
    """A ragged product for one device after the other: JAX does not lower one under two `vmap`s."""
    product = jax.custom_batching.sequential_vmap(
        lambda *operands: tuple(_jax.bind(node.primitive, operands, node.params))
    )
    return list(product(*args))


_VMAP_RULES = {
    RAGGED_PRODUCT: _ragged_product,
    **{
        op: _permute if kind == "permute" else _over_axes
        for op, kind in KINDS.items()
        if kind not in ("all_to_all", "broadcast")
    },
}
"""Functions in the place of operations whose rules for `vmap` lack a case."""
