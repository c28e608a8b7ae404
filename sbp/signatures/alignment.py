"""Computations on slices, moved to where their readers put the results.

`lax.associative_scan` computes `f(odd[:-1], x[2::2])` and puts it behind `x[:1]`, on each of its
levels; gradients pad what they computed on such slices. If the dim is split over devices, the
second slice and the concatenation each move an element from every device to the next one. In
`f(shifted odd, x[::2])`, whose first element nobody reads, only the first operand moves. The odd
results of a level are interleaved from those of the next level, and the shifted array is, too: only
the last level sends anything.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator, Set
from dataclasses import dataclass

from sbp import _jax
from sbp.signatures.clusters import Cluster, Wiring, cluster_of, split_values
from sbp.signatures.kernels.halo import bytes_beside
from sbp.signatures.shifts import (
    Maker,
    Strided,
    padded,
    padding,
    resized,
    strided,
)
from sbp.trace.graph import Graph, Node, Operand, rewritten
from sbp.trace.joins import Joined, join_node, without_unread


def with_alignment(graph: Graph) -> Graph:
    """A graph that computes on lifted values where that moves fewer elements, in regions too.

    Arguments:
      graph: a traced program; new values are entered in its table of avals.
    """
    return rewritten(graph, _aligned)


def _aligned(graph: Graph, inspected: Set[int], ids: Iterator[int]) -> Graph:
    wiring = Wiring.of(graph)
    asked = inspected | {o for o in graph.outputs if isinstance(o, int)}
    maker = Maker(wiring, ids)
    instead: dict[int, list[Node]] = {}
    seen: set[int] = set()
    for node in graph.nodes:
        for lift in _lifts(wiring, node, seen):
            found = _Lifting(wiring, maker, lift, asked)
            if found.saves() > 0 and not found.replaces(instead):
                instead |= found.nodes()
    for at, node in enumerate(graph.nodes):
        if at not in instead and node.op == "pad":
            put = _put_back(wiring, maker, at, node)
            instead |= {at: [put]} if put is not None else {}
    if not instead:
        return graph
    made = [
        new
        for at, old in enumerate(graph.nodes)
        for new in (*maker.before[at], *instead.get(at, [old]))
    ]
    return dataclasses.replace(graph, nodes=tuple(without_unread(made, asked)))


def _put_back(wiring: Wiring, maker: Maker, at: int, node: Node) -> Node | None:
    """The node instead of a pad that puts a slice where the array has it: a pad of the array with
    the other elements replaced; None for other pads. Gradients of slices are such pads.

    Arguments:
      wiring: the graph.
      maker: makes a further node.
      at: the position of the pad.
      node: the pad.
    """
    x, fill = node.inputs
    out = wiring.graph.avals[node.outputs[0]]
    for dim, size in enumerate(out.shape):
        view, how = strided(wiring, x, dim), padded(node, dim)
        if view is None or how is None or view.stride != 1 or not view.cuts_one_dim(wiring):
            continue
        whole_size, count = wiring.graph.aval(view.source).shape[dim], view.size
        if not count:
            continue
        step = how.interior + 1 if count > 1 else -(-size // whole_size)
        if how.low != view.start * step or not 0 <= size - 1 - (whole_size - 1) * step < step:
            continue
        after = whole_size - view.start - count
        pieces = [(fill, 0, view.start), (view.source, view.start, count), (fill, 0, after)]
        kept = [p for p in pieces if p[2]]
        if step == 1:
            return join_node(node, dim, kept)
        masked = maker.join(at, node, dim, kept, view.source)
        config = padding(wiring.graph.aval(masked), dim, 0, step - 1, size)
        params = {"padding_config": config}
        return dataclasses.replace(node, inputs=(masked, fill), params=params)
    return None


@dataclass(frozen=True, slots=True)
class _Lift:
    """A cluster and where a reader puts its values: at `by` in a result of `total` elements."""

    cluster: Cluster
    size: int
    by: int
    total: int


def _lifts(wiring: Wiring, node: Node, seen: set[int]) -> Iterator[_Lift]:
    """The lifts that put operands of a concatenation at their places.

    Arguments:
      wiring: the graph.
      node: a node, of any operator.
      seen: values whose clusters have been found; new ones are added.
    """
    if node.op != "concatenate":
        return
    dim, at = int(node.params["dimension"]), 0
    total = wiring.graph.avals[node.outputs[0]].shape[dim]
    for operand in node.inputs:
        size = wiring.graph.aval(operand).shape[dim]
        if isinstance(operand, int) and at and size and operand not in seen:
            cluster = cluster_of(wiring, operand, dim)
            if cluster is not None and operand in cluster.dims:
                seen |= cluster.dims.keys()
                # Leaves are shifted behind zeros. Keys have no zero.
                avals = map(wiring.graph.aval, cluster.leaves)
                if not any(_jax.is_extended(a.dtype) for a in avals):
                    yield _Lift(cluster, size, at, total)
        at += size


class _Lifting:
    """The nodes of one lift.

    Arguments:
      wiring: the graph.
      maker: makes further nodes.
      lift: what is lifted.
      asked: values that the program returns or asks the type of.
    """

    def __init__(self, wiring: Wiring, maker: Maker, lift: _Lift, asked: Set[int]) -> None:
        self.wiring, self.graph, self.maker = wiring, wiring.graph, maker
        self.lift, self.asked = lift, asked
        self.lifted: dict[Operand, Operand] = {}
        self.views: list[tuple[Strided, Operand]] = []

    # ---- what moves ------------------------------------------------------------------------------

    def saves(self) -> float:
        """The bytes that each device sends less to its neighbour, where a dim is split."""
        lift, graph = self.lift, self.graph
        saved = 0.0
        for leaf, dim in lift.cluster.leaves.items():
            view = strided(self.wiring, leaf, dim)
            was = view is not None and view.is_shifted
            moves = view is None or not 0 <= self.first(view) < view.stride
            saved += (was - moves) * bytes_beside(graph.aval(leaf), dim)
        for value, dim in lift.cluster.dims.items():
            across = bytes_beside(graph.avals[value], dim)
            stays = value in self.asked
            for at in self.outside(value):
                node = graph.nodes[at]
                how = padded(node, dim)
                if self.joins(node, value):
                    saved += across
                elif how is not None and node.inputs[0] == value:
                    step = how.interior + 1
                    saved += across * (not 0 <= how.low < step)
                    saved -= across * (not 0 <= how.low - lift.by * step < step)
                else:
                    stays = True
            saved -= across * stays
        return saved

    def first(self, view: Strided) -> int:
        """The element of a slice's source that is first in the lifted slice."""
        return view.start - view.stride * self.lift.by

    def outside(self, value: int) -> list[int]:
        """The positions of the nodes that read a value and are not in the cluster."""
        found = self.wiring.readers.get(value, ())
        return [at for at in dict.fromkeys(found) if at not in self.lift.cluster.nodes]

    def joins(self, node: Node, value: int) -> bool:
        """Whether a node concatenates a value at the place that it is lifted to."""
        dim = self.lift.cluster.dims[value]
        if node.op != "concatenate" or node.params["dimension"] != dim:
            return False
        avals = [self.graph.aval(o) for o in node.inputs]
        ends = itertools.accumulate((a.shape[dim] for a in avals), initial=0)
        at = [end for end, operand in zip(ends, node.inputs, strict=False) if operand == value]
        total = sum(a.shape[dim] for a in avals)
        return at == [self.lift.by] and total == self.lift.total

    def replaces(self, instead: dict[int, list[Node]]) -> bool:
        """Whether another lift has replaced one of the nodes that this one replaces."""
        at = {at for v in self.lift.cluster.dims for at in self.outside(v)}
        return not instead.keys().isdisjoint(at | self.lift.cluster.nodes.keys())

    # ---- new nodes -------------------------------------------------------------------------------

    def nodes(self) -> dict[int, list[Node]]:
        """For each position of a node that is replaced, the nodes that come there."""
        found = {at: self.computed(at) for at in self.lift.cluster.nodes}
        for value in self.lift.cluster.dims:
            for at in self.outside(value):
                node = self.graph.nodes[at]
                if at not in found and self.joins(node, value):
                    found[at] = [self.joined(node)]
                elif padded(node, self.lift.cluster.dims[value]) and node.inputs[0] == value:
                    found[at] = [self.padded(at, node, value)]
        return found

    def computed(self, at: int) -> list[Node]:
        """A node of the cluster on lifted operands, and slices of its results as they were."""
        node, graph = self.graph.nodes[at], self.graph
        split = dict(split_values(node, self.lift.cluster.nodes[at]))
        inputs = tuple(self.operand(at, node, o) if o in split else o for o in node.inputs)
        outputs, slices = [], []
        for value in node.outputs:
            dim = split[value]
            out = self.maker.value(resized(graph.avals[value], dim, self.lift.total))
            self.lifted[value] = out
            outputs.append(out)
            slices.append(self.maker.cut(node, out, dim, self.lift.by, value))
        params = dict(node.params)
        if "shape" in params:
            params["shape"] = self.graph.aval(outputs[0]).shape
        new = dataclasses.replace(node, inputs=inputs, outputs=tuple(outputs), params=params)
        return [new, *slices]

    def operand(self, at: int, node: Node, operand: Operand) -> Operand:
        """An operand of a node of the cluster, lifted; that of a leaf is made before the node."""
        if operand not in self.lifted:
            self.lifted[operand] = self.leaf(at, node, operand)
        return self.lifted[operand]

    def leaf(self, at: int, node: Node, operand: Operand) -> Operand:
        """A lifted leaf: a slice that begins earlier, or a shifted array."""
        dim, lift = self.lift.cluster.leaves[operand], self.lift
        view = strided(self.wiring, operand, dim)
        if view is None:
            return self.maker.shifted(at, node, operand, dim, lift.by, lift.total)
        shape, first = self.graph.aval(view.source).shape, self.first(view)
        if first >= 0 and first + (lift.total - 1) * view.stride < shape[dim]:
            cuts = view.moved(first, lift.total)
            found = self.maker.slice(at, node, view.source, cuts)
            self.views.append((Strided(view.source, dim, cuts), found))
            return found
        if view.stride == 1 and view.cuts_one_dim(self.wiring):
            return self.maker.shifted(at, node, view.source, dim, -first, lift.total)
        return self.maker.shifted(at, node, operand, dim, lift.by, lift.total)

    def joined(self, node: Node) -> Node:
        """A concatenation of lifted operands, each at its place."""
        dim, at = int(node.params["dimension"]), 0
        pieces: list[Joined] = []
        for operand in node.inputs:
            size = self.graph.aval(operand).shape[dim]
            if operand in self.lift.cluster.dims and at == self.lift.by:
                pieces.append((self.lifted[operand], at, size))
            else:
                pieces.append(self.in_place(operand, dim, at, size))
            at += size
        return join_node(node, dim, pieces)

    def in_place(self, operand: Operand, dim: int, at: int, size: int) -> Joined:
        """An operand of a concatenation as a part of a lifted slice of the same array, if there is
        one that has the same elements at the same place."""
        own = strided(self.wiring, operand, dim)
        if own is None:
            return (operand, 0, size)
        for view, lifted in self.views:
            stride = own.stride if size > 1 else view.stride
            same = own.source == view.source and own.beside == view.beside
            if same and stride == view.stride and own.start == view.start + at * stride:
                return (lifted, at, size)
        return (operand, 0, size)

    def padded(self, at: int, node: Node, value: int) -> Node:
        """A pad of a lifted value. Elements that the value itself does not have are replaced by the
        padding, if they are in the result."""
        dim, lift = self.lift.cluster.dims[value], self.lift
        how = padded(node, dim)
        assert how is not None
        lifted, step = self.lifted[value], how.interior + 1
        low, out = how.low - lift.by * step, self.graph.avals[node.outputs[0]].shape[dim]
        after = lift.total - lift.by - lift.size
        ends = how.low + (lift.size - 1) * step  # the last element of the value itself
        if (how.low >= step and lift.by) or (after and ends + step < out):
            fill = node.inputs[1]
            pieces = [(fill, 0, lift.by), (lifted, lift.by, lift.size), (fill, 0, after)]
            lifted = self.maker.join(at, node, dim, [p for p in pieces if p[2]], lifted)
        params = {"padding_config": padding(self.graph.aval(lifted), dim, low, how.interior, out)}
        return dataclasses.replace(node, inputs=(lifted, node.inputs[1]), params=params)
