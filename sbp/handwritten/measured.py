"""Measured types: which of B, S and P each value of a hand-written region is, by running it.

A program runs on the mesh and with one device on a mesh axis. By the definition of the types, a
value on the mesh is B, S(d) or P(sum) on that axis where its parts make up, in numbers, the value
of the run with one device. A power of the axis size counts as well: the sum over n devices of the
means of their shards is n times the mean.
"""

from collections.abc import Collection, Iterator, Mapping
from dataclasses import replace
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec

from sbp import _jax
from sbp.handwritten.emulation import (
    Ran,
    atom_of,
    axes_by_dim,
    claims,
    differ,
    inner_graphs,
    nodes_of,
    regions_of,
    with_graphs,
)
from sbp.signatures import traits_of
from sbp.signatures.rule import KEEPS_INDICES, RANKS
from sbp.trace.collectives import AXIS_INDEX, KINDS, names_of
from sbp.trace.graph import Constant, Graph, Node, Operand, group_by, interface_of
from sbp.types import Atom, B, P, Split, Unreduced


class Reading(NamedTuple):
    """A type that a value has on a mesh axis: the parts make up the value of one device, times the
    size of the axis to a power."""

    atom: Atom
    power: int


Readings = frozenset[Reading]
Types = Mapping[int, Readings]
"""The readings of each value that the program has with one device as well; a value without any has
lost its meaning."""

_OPERATORS = ("numpy.array_methods.", "numpy.ufunc", "lax.lax.div", "lax.lax.mul")
"""JAX's functions below a product or ratio that the user writes."""

PICKED = 1e-5
"""Relative tolerance of a maximum or minimum over devices, which is the value of one of them: a
larger one takes values that lie near each other, as signs do, for it."""

_POWERS = (0, 1, -1, 2, -2)

_NUMBERS = {"sum": np.sum, "max": np.max, "min": np.min}
_TESTS = {"and": np.all, "or": np.any}
"""How the parts of P make up a value."""


def readings(parts: np.ndarray, whole: np.ndarray, axis: int, axes: int) -> Readings:
    """The readings of a value on a mesh axis.

    Arguments:
      parts: the value on the mesh: a leading dim for each mesh axis, then its own dims.
      whole: the value with one device on the axis.
      axis: the position of the mesh axis.
      axes: the number of mesh axes.
    """
    n = parts.shape[axis]
    each, want = np.moveaxis(parts, axis, 0), np.take(whole, 0, axis)
    found: set[Reading] = set()
    if each.shape[1:] == want.shape:
        if not any(differ(x, each[0]) for x in each[1:]):
            found |= {Reading(B, k) for k in _powers(each[0], want, n)}
        wide = each.astype(np.float64) if jnp.issubdtype(each.dtype, jnp.floating) else each
        for monoid, join in (_TESTS if parts.dtype == np.bool_ else _NUMBERS).items():
            joined = join(wide, axis=0)
            if monoid == "sum":
                found |= {Reading(P, k) for k in _powers(joined, want, n)}
            elif not differ(np.asarray(joined, want.dtype), want, PICKED):
                found.add(Reading(Unreduced(monoid), 0))
    for d in range(axes - 1, want.ndim):
        if [s * (n if i == d else 1) for i, s in enumerate(each.shape[1:])] == [*want.shape]:
            joined = np.concatenate([*each], d)
            found |= {Reading(Split(d - axes + 1), k) for k in _powers(joined, want, n)}
    return frozenset(found)


def _powers(got: np.ndarray, want: np.ndarray, n: int) -> Iterator[int]:
    """The powers of `n` by which a value is the wanted one; 0 alone for integers."""
    if not differ(np.asarray(got, want.dtype), want):
        yield 0
    elif jnp.issubdtype(want.dtype, jnp.inexact) and np.any(want):
        yield from (
            k for k in _POWERS[1:] if not differ(got, np.asarray(want * float(n) ** k, want.dtype))
        )


def measure_types(ran: Ran, want: Ran, axis: int, axes: int, trip: int | None = None) -> Types:
    """The types of the values of all regions on a mesh axis.

    Arguments:
      ran: the run on the mesh.
      want: the run with one device on the axis.
      axis: the position of the mesh axis.
      axes: the number of mesh axes.
      trip: the trip of each scan that counts; None for all trips.
    """
    same = _counterparts(ran.graph, want.graph)
    by_index = index_values(ran.graph)

    found: dict[int, Readings] = {}
    for v, parts in ran.values.items():
        whole = want.values.get(same.get(v, -1))
        if whole is None or not (parts.size and whole.size):
            continue  # in a loop without trips
        scans = parts.ndim - axes - _rank(ran.graph.avals[v])
        for _ in range(0 if trip is None else scans):  # the first dim behind the mesh axes
            last = min(parts.shape[axes], whole.shape[axes]) - 1
            parts, whole = (np.take(y, min(trip or 0, last), axes) for y in (parts, whole))
        with np.errstate(all="ignore"):
            own = readings(parts, whole, axis, axes)
        # The least index of a device is that of one device alone.
        partial = {r for r in own if isinstance(r.atom, Unreduced)}
        found[v] = own - partial if v in by_index else own
    return found


def index_values(graph: Graph) -> set[int]:
    """The integers and tests that depend on the index of their device, and numbers that depend on
    nothing else."""
    found, literal = set[int](), set[int]()
    for node in bodies(graph):
        made, own = {o for o in node.inputs if isinstance(o, int)}, {*node.outputs}
        dtypes = [graph.avals[v].dtype for v in own]
        counts = all(d == np.bool_ or jnp.issubdtype(d, jnp.integer) for d in dtypes)
        if node.op == AXIS_INDEX or (found & made and (counts or made <= found | literal)):
            found |= own
        elif made <= literal:
            literal |= own
        entered = (
            pair
            for region, fed in zip(node.regions, interface_of(node).fed, strict=True)
            for pair in zip(region.inputs, fed, strict=True)
        )
        found |= {v for v, entry in entered if node.inputs[entry.operand] in found}
    return found


def _rank(aval: Any) -> int:
    """The number of dims of a value; keys are given by their data."""
    return len(aval.shape) + (
        len(_jax.key_shape(aval.dtype)) if _jax.is_extended(aval.dtype) else 0
    )


def _match(graph: Graph, alone: Graph) -> Iterator[tuple[Node, Node]]:
    """The operations of a program with the same ones in another trace of it. Operations of one line
    and kind are matched in order."""

    def listed(program: Graph) -> dict[object, list[Node]]:
        return group_by(nodes_of(program), lambda node: (node.op, node.stack, node.backward))

    others = listed(alone)
    for key, nodes in listed(graph).items():
        yield from zip(nodes, others.get(key, ()), strict=False)


def _counterparts(graph: Graph, alone: Graph) -> dict[int, int]:
    """For each value of a program the same one in another trace of it."""
    same = dict[int, int]()
    for a, b in _match(graph, alone):
        pairs = [
            (a.outputs, b.outputs),
            *((x.inputs, y.inputs) for x, y in zip(inner_graphs(a), inner_graphs(b), strict=False)),
        ]
        for mine, theirs in pairs:
            if len(mine) == len(theirs):
                same |= dict(zip(mine, theirs, strict=True))
    return same


def fixed_numbers(
    graph: Graph, alone: Graph, n: int, lengths: Collection[int]
) -> dict[int, tuple[int, str]]:
    """Numbers that the user's lines multiply or divide by, that are the same with one device, and
    that may count devices or the elements of a shard.

    Arguments:
      graph: the program.
      alone: the program with one device on the mesh axis.
      n: the size of the axis.
      lengths: the lengths of shards along it.

    Returns:
      By the id of an operation, the id of the same one with one device, and the number.
    """
    found: dict[int, tuple[int, str]] = {}
    for a, b in _match(graph, alone):
        for number in scalars(a) & scalars(b):
            times = number if number >= 1 else 1 / number if number > 0 else 0.0
            if times >= 2 and (times % n == 0 or (times > 2 and times in lengths)):
                found[a.id] = b.id, f"{number:g}"
    return found


def changed_numbers(graph: Graph, alone: Graph) -> set[int]:
    """The ids of operations whose numbers are others in another trace of a program."""
    return {a.id for a, b in _match(graph, alone) if scalars(a) != scalars(b)}


def scalars(node: Node) -> set[float]:
    """The numbers in a product or ratio that the user writes; empty for any other operation."""
    written = all(f.startswith(_OPERATORS) for f in node.library)
    if not written or traits_of(node.op).numpy not in (np.divide, np.multiply):
        return set()
    return {
        float(np.real(x.value)) for x in node.inputs if isinstance(x, Constant) and not x.aval.shape
    }


def renumber(graph: Graph, nodes: Collection[int], n: int) -> Graph:
    """A program in which the numbers of some operations count `n` times fewer things."""

    def of(operand: Operand) -> Operand:
        if not isinstance(operand, Constant) or operand.aval.shape:
            return operand
        x = np.asarray(operand.value)
        return Constant(np.asarray(x / n if x >= 1 else x * n, x.dtype), operand.aval)

    def node(old: Node) -> Node:
        new = replace(old, inputs=tuple(map(of, old.inputs))) if old.id in nodes else old
        return with_graphs(new, [renumber(g, nodes, n) for g in inner_graphs(old)])

    return replace(graph, nodes=tuple(map(node, graph.nodes)))


def is_good(found: Readings) -> bool:
    """Whether a value has its meaning. A partial value that is still to be divided has it."""
    own = [r for r in found if not isinstance(r.atom, Unreduced)]
    return any(r.power == 0 for r in own) if own else bool(found)


# ---- differences that may be meant --------------------------------------------------------------
# What shows that a program is meant to compute something else on one device: each device ranks its
# own elements, picks its own, or returns one of its own.


def places_of(node: Node) -> range:
    """The positions of the operands that say where elements of the first one are."""
    indices, count = traits_of(node.op).indices, len(node.inputs)
    return range(indices.start, min(indices.stop, count)) if traits_of(node.op).moves else range(0)


def bodies(graph: Graph) -> Iterator[Node]:
    """The operations of all regions."""
    return (node for region in regions_of(graph) for node in region.params["body"].walk())


def permutes(graph: Graph, name: str) -> bool:
    """Whether a region sends values along a mesh axis from device to device."""
    return any(KINDS.get(n.op) == "permute" and name in names_of(n) for n in bodies(graph))


def lengths_of(graph: Graph, name: str) -> frozenset[int]:
    """The lengths of one device's shards along dims that a mesh axis splits."""
    return frozenset(
        region.params["body"].aval(value).shape[d]
        for region in regions_of(graph)
        for value, spec in zip(region.params["body"].inputs, region.params["in_specs"], strict=True)
        for d, axes in enumerate(
            axes_by_dim(spec, len(spec), ()) if isinstance(spec, PartitionSpec) else ()
        )
        if name in axes
    )


def ranks(graph: Graph, types: Types) -> Iterator[str]:
    """Whether the devices rank their own elements, and something depends on the ranks, as which
    tokens of a shard are over its capacity.

    Arguments:
      graph: a program with regions.
      types: its types on the mesh axis.
    """
    every = list(bodies(graph))
    ranked = [
        node
        for node in every
        if node.op in RANKS and not is_good(types.get(node.outputs[0], frozenset()))
    ]
    flows = [({*n.inputs}, r.inputs) for n in every for r in n.regions]
    flows += [({*n.inputs, *(v for r in n.regions for v in r.outputs)}, n.outputs) for n in every]
    reached, before = {v for node in ranked for v in node.outputs}, set[int]()
    while reached != before:  # a loop carries ranks back to its start
        before = set(reached)
        for read, made in flows:
            if reached & read:
                reached |= {*made}
    for node in every:
        picked = {node.inputs[i] for i in places_of(node)}
        compares = traits_of(node.op).scales == "compared" and len(node.inputs) == 2
        if reached & (set(node.inputs) if compares else picked):
            yield "each device ranks its own elements, and may drop those over its capacity"


def one_each(graph: Graph, alone: Graph, name: str) -> Iterator[str]:
    """Whether a region returns one element for each device, whatever their number."""
    for (a, results), (b, _) in zip(claims(graph), claims(alone), strict=False):
        for i in results:
            claim = atom_of(a.params["out_specs"][i], name)
            both = (a.params["body"], b.params["body"])
            shapes = [g.aval(g.outputs[i]).shape for g in both if i < len(g.outputs)]
            if isinstance(claim, Split) and all(x[claim.dim] == 1 for x in shapes):
                yield "a region returns one element for each device"


def picks(graph: Graph, n: int) -> Iterator[str]:
    """Whether each device picks one of n elements, as many as there are devices, by its index."""
    for region in regions_of(graph):
        body, own = region.params["body"], set[int]()
        for node in body.walk():
            if node.op == AXIS_INDEX or (node.op in KEEPS_INDICES and own & {*node.inputs}):
                own |= {*node.outputs}
            shape = body.aval(node.inputs[0]).shape if node.inputs else ()
            if n in shape and {node.inputs[i] for i in places_of(node)} & own:
                yield "each device picks the element at its own index, one for each device"
