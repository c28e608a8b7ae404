"""Computations on slices, moved to where their readers put the results.

`lax.associative_scan` computes `f(odd[:-1], x[2::2])` and puts it behind `x[:1]`, on each of its
levels; gradients pad what they computed on such slices. If the dim is split over devices, the
second slice and the concatenation each move an element from every device to the next one. In
`f(shifted odd, x[::2])`, whose first element nobody reads, only the first operand moves. The odd
results of a level are interleaved from those of the next level, and the shifted array is, too: only
the last level sends anything.
"""

import dataclasses
import functools
import itertools
from collections.abc import Iterator, Sequence, Set
from typing import NamedTuple

import numpy as np

from sbp import _jax
from sbp.signatures.kernels.halo import bytes_beside
from sbp.signatures.rewrites import Bound, Wiring, bound_to
from sbp.trace.graph import Graph, Node, Operand, constant, rewriting
from sbp.trace.slices import (
    Slice,
    View,
    Writer,
    has_all_beside,
    is_zero,
    join_node,
    padding,
    resize,
    view_of,
    whole,
    with_cut,
    without_unread,
)

# ---- shifts -------------------------------------------------------------------------------------
# Shifted arrays, and slices of arrays that begin earlier or end later.
#
# A *lifted* value has some elements before and after those of the value itself; nobody reads them.


class Place(NamedTuple):
    """Where an array has the elements of another one along a dim.

    Arguments:
      first: the index of the first element.
      step: the distance of two elements.
    """

    first: int
    step: int

    @property
    def is_far(self) -> bool:
        """Whether elements cross shards: the first one is not among the first `step`."""
        return not 0 <= self.first < self.step


def padded_at(node: Node, dim: int) -> Place | None:
    """The place that a pad gives the elements along a dim; None for nodes that do something else,
    or pad other dims."""
    config = [tuple(map(int, c)) for c in node.params.get("padding_config", ())]
    is_pad = node.op == "pad" and not any(any(c) for d, c in enumerate(config) if d != dim)
    return Place(config[dim][0], config[dim][2] + 1) if is_pad else None


def places(graph: Graph, node: Node) -> list[tuple[Operand, int, int]]:
    """The operands of a concatenation, each with its first index in the result and its size."""
    sizes = [graph.aval(o).shape[node.params["dimension"]] for o in node.inputs]
    ends = itertools.accumulate(sizes, initial=0)
    return list(zip(node.inputs, ends, sizes, strict=False))


class Maker(Writer):
    """Writes down nodes on shifted arrays.

    Arguments:
      wiring: the graph as it was; new values are entered in its table of avals.
      asked, ids: as for `Writer`.
    """

    def __init__(self, wiring: Wiring, asked: Set[int], ids: Iterator[int]) -> None:
        super().__init__(wiring.graph, asked, ids)
        self.wiring = wiring
        self._shifted: dict[tuple[Operand, int, int, int], Operand] = {}

    def view(self, value: Operand) -> View:
        """A value as a slice; of itself if it is not cut out of others."""
        return view_of(self.graph, self.wiring.maker(value), value)

    def pad_around(self, node: Node, dim: int, x: Operand, start: int, place: Place) -> Node:
        """The node instead of a pad of neighboring elements of an array: a pad of the array, in
        which the padding replaces the array's other elements, if they are in the result.

        Arguments:
          node: the pad.
          dim: the dim that it pads.
          x: the array.
          start: the first of the elements in the array.
          place: where the pad puts the elements.
        """
        part, fill = node.inputs
        size, whole_size = (self.graph.aval(v).shape[dim] for v in (part, x))
        out, low, step = self.graph.avals[node.outputs[0]].shape[dim], *place
        after = whole_size - start - size
        if (start and low >= step) or (after and low + size * step < out):
            kept = [Slice(fill, 0, start), Slice(x, start, size), Slice(fill, 0, after)]
            kept = [s for s in kept if s.size]
            if start == low and step == 1 and out == whole_size:
                return join_node(node, dim, kept)
            like = dataclasses.replace(node, title="pad")
            x = self.emit(join_node(like, dim, kept), self.graph.aval(x))
        config = padding(self.graph.aval(x), dim, low - start * step, step - 1, out)
        return dataclasses.replace(node, inputs=(x, fill), params={"padding_config": config})

    def shift(self, like: Node, x: Operand, dim: int, by: int, size: int) -> Operand:
        """A value behind `by` elements that nobody reads, cut off at a size.

        An array that is interleaved from two is interleaved again, with the second one shifted.
        """
        aval, key = self.graph.aval(x), (x, dim, by, size)
        if by == 0 and aval.shape[dim] == size:
            return x
        if key not in self._shifted:
            total = self.wiring.maker(x)
            halves = self._halves(total, dim) if by == 1 and aval.shape[dim] == size else None
            if halves is None or total is None:
                zero = constant(np.zeros((), aval.dtype))
                found = self.pad(like, x, zero, dim, (by, 0, size))
            else:
                (first, zero), (second, _) = halves
                behind = self.shift(total, second, dim, 1, size // 2)
                parts = (
                    self.pad(total, behind, zero, dim, (0, 1, size)),
                    self.pad(total, first, zero, dim, (1, 1, size)),
                )
                found = self.emit(total, aval, inputs=parts)
            self._shifted[key] = found
        return self._shifted[key]

    def _halves(self, total: Node | None, dim: int) -> list[tuple[Operand, ...]] | None:
        """The two arrays of one size that a sum interleaves, each with the zero between its
        elements; None for other nodes."""
        if total is None or total.op not in ("add", "add_any", "or"):
            return None
        size = self.graph.avals[total.outputs[0]].shape[dim]
        found = {
            padded_at(node, dim): node.inputs
            for node in map(self.wiring.maker, total.inputs)
            if node is not None and node.op == "pad" and is_zero(node.inputs[1])
            if 2 * self.graph.aval(node.inputs[0]).shape[dim] == size
        }
        halves = [found.get(Place(first, 2)) for first in (0, 1)]
        return [half for half in halves if half] if all(halves) else None


# ---- alignment ----------------------------------------------------------------------------------


@rewriting
def with_alignment(graph: Graph, asked: Set[int], ids: Iterator[int]) -> Graph:
    """A graph that computes on lifted values where that moves fewer elements, in regions too."""
    maker = Maker(Wiring(graph), asked, ids)
    lifts: dict[Node, _Lifting] = {}
    seen: set[int] = set()
    for node in graph.nodes:
        for lift in _lifts(maker, node, seen):
            if lift.saves() > 0 and lifts.keys().isdisjoint(lift.reached):
                lifts |= dict.fromkeys(lift.replaced, lift)
    for node in graph.nodes:
        if node in lifts:
            lifts[node].write(node)
        else:
            maker.nodes.append((_put_back(maker, node) if node.op == "pad" else None) or node)
    return (
        graph
        if tuple(maker.nodes) == graph.nodes
        else dataclasses.replace(graph, nodes=tuple(without_unread(maker.nodes, asked)))
    )


def _put_back(maker: Maker, node: Node) -> Node | None:
    """The node instead of a pad that puts a slice where the array has it: a pad of the array with
    the other elements replaced; None for other pads. Gradients of slices are such pads.

    Arguments:
      maker: makes a further node.
      node: the pad.
    """
    x, graph = node.inputs[0], maker.graph
    view = maker.view(x)
    for dim, size in enumerate(graph.avals[node.outputs[0]].shape if view.source != x else ()):
        place, count = padded_at(node, dim), graph.aval(x).shape[dim]
        if place is None or not count or not has_all_beside(graph, view, dim):
            continue
        whole_size, start = graph.aval(view.source).shape[dim], view.cuts[dim][0]
        place = place if count > 1 else place._replace(step=-(-size // whole_size))
        ends = size - 1 - (whole_size - 1) * place.step
        if place.first == start * place.step and 0 <= ends < place.step:
            return maker.pad_around(node, dim, view.source, start, place)
    return None


def _lifts(maker: Maker, node: Node, seen: set[int]) -> "Iterator[_Lifting]":
    """The lifts that put operands of a concatenation at their places.

    Arguments:
      maker: makes further nodes.
      node: a node, of any operator.
      seen: values whose clusters have been found; new ones are added.
    """
    if node.op != "concatenate":
        return
    dim, graph = int(node.params["dimension"]), maker.graph
    total = graph.avals[node.outputs[0]].shape[dim]
    for operand, at, size in places(graph, node):
        if isinstance(operand, int) and at and size and operand not in seen:
            cluster = bound_to(maker.wiring, operand, dim, maker.wiring.pointwise)
            lift = cluster and _Lifting(maker, *cluster, by=at, total=total)
            if lift is not None and operand in lift.dims:
                seen |= lift.dims.keys()
                # Leaves are shifted behind zeros. Keys have no zero.
                if not any(_jax.is_extended(graph.aval(leaf).dtype) for leaf in lift.leaves):
                    yield lift


class _Lifting:
    """A cluster whose values are lifted to where a reader puts them: operations on values that have
    one size along a dim, each index by itself.

    Arguments:
      maker: makes further nodes.
      bound: the dim of each value that the nodes of the cluster make or read.
      nodes: the operands and results that each node binds.
      by: where the reader puts the first element.
      total: the number of elements of the reader's result.

    Attributes:
      dims: the dim of each value that a node of the cluster makes.
      leaves: the dim of each other value that the nodes read.
      reads: other nodes that read values of `dims`: the node, the value, and the place that a pad
        gives it, or a concatenation that puts it where it is lifted to; None for other readers.
    """

    def __init__(
        self,
        maker: Maker,
        bound: dict[Operand, int],
        nodes: dict[Node, Sequence[Bound]],
        *,
        by: int,
        total: int,
    ) -> None:
        self.maker, self.graph, self.nodes = maker, maker.graph, nodes
        self.by, self.total = by, total
        made = {v for node in nodes for v in node.outputs}
        self.dims = {v: d for v, d in bound.items() if isinstance(v, int) and v in made}
        self.leaves = {v: d for v, d in bound.items() if v not in made}
        self.lifted: dict[Operand, Operand] = {}
        self.views: list[tuple[View, Operand]] = []
        self.reads = [
            (node, value, self.place(node, value))
            for value in self.dims
            for node, is_made in maker.wiring.beside(value)
            if not is_made and node not in nodes
        ]
        self.reached = {node for node, *_ in self.reads} | nodes.keys()
        self.replaced = {node for node, _, place in self.reads if place} | nodes.keys()

    # ---- what moves ------------------------------------------------------------------------------

    def place(self, node: Node, value: int) -> Place | None:
        """The place of a value in the result of a reader, as in `reads`."""
        dim = self.dims[value]
        if node.op != "concatenate" or node.params["dimension"] != dim:
            return padded_at(node, dim) if node.inputs[0] == value else None
        at = [start for o, start, _ in places(self.graph, node) if o == value]
        is_there = at == [self.by] and self.graph.avals[node.outputs[0]].shape[dim] == self.total
        return Place(self.by, 1) if is_there else None

    def saves(self) -> float:
        """The bytes that the lift saves in each device's messages to its neighbor, if the dim is
        split."""
        views = ((leaf, self.maker.view(leaf).cuts[dim]) for leaf, dim in self.leaves.items())
        links = [(leaf, Place(start, stride)) for leaf, (start, _, stride) in views]
        links += [(value, place) for _, value, place in self.reads if place]
        stays = {value for _, value, place in self.reads if not place}
        stays |= self.dims.keys() & self.maker.asked
        dims = self.dims | self.leaves
        return sum(
            (place.is_far - Place(place.first - self.by * place.step, place.step).is_far)
            * bytes_beside(self.graph.aval(value), dims[value])
            for value, place in links
        ) - sum(bytes_beside(self.graph.avals[value], dims[value]) for value in stays)

    # ---- new nodes -------------------------------------------------------------------------------

    def write(self, node: Node) -> None:
        """Writes the nodes that replace a node of the cluster or a reader of its values."""
        value = node.inputs[0]
        if node in self.nodes:
            self.compute(node, dict(self.nodes[node]))
        elif node.op == "concatenate":
            dim = int(node.params["dimension"])
            pieces = [self.in_place(dim, *place) for place in places(self.graph, node)]
            self.maker.nodes.append(join_node(node, dim, pieces))
        elif isinstance(value, int) and (place := self.place(node, value)):
            x, dim = self.lifted[value], self.dims[value]
            self.maker.nodes.append(self.maker.pad_around(node, dim, x, self.by, place))

    def compute(self, node: Node, split: dict[Operand, int]) -> None:
        """Writes a node of the cluster on lifted operands, and the slices that give its results.

        Arguments:
          node: the node.
          split: the dims of its operands and results.
        """
        graph = self.graph
        inputs = tuple(self.operand(node, o) if o in split else o for o in node.inputs)
        outputs = tuple(
            graph.new_value(resize(graph.avals[v], split[v], self.total)) for v in node.outputs
        )
        sized = {"shape": graph.aval(outputs[0]).shape} if "shape" in node.params else {}
        self.maker.nodes.append(
            dataclasses.replace(
                node, inputs=inputs, outputs=outputs, params={**node.params, **sized}
            )
        )
        for value, out in zip(node.outputs, outputs, strict=True):
            dim, shape = split[value], graph.avals[value].shape
            self.maker.slice(
                node, out, with_cut(whole(shape), dim, (self.by, self.by + shape[dim], 1)), value
            )
            self.lifted[value] = out

    def operand(self, node: Node, operand: Operand) -> Operand:
        """The lifted form of an operand of the cluster. A leaf is lifted before the node: it is a
        slice that begins earlier, or a shifted array."""
        if operand not in self.lifted:
            dim, view = self.leaves[operand], self.maker.view(operand)
            start, _, stride = view.cuts[dim]
            shape, first = self.graph.aval(view.source).shape, start - stride * self.by
            last = first + (self.total - 1) * stride
            shift = functools.partial(self.maker.shift, node, dim=dim, size=self.total)
            if first >= 0 and last < shape[dim]:
                cuts = with_cut(view.cuts, dim, (first, last + 1, stride))
                is_whole = cuts == whole(shape)
                found = view.source if is_whole else self.maker.slice(node, view.source, cuts)
                self.views.append((View(view.source, cuts), found))
            elif has_all_beside(self.graph, view, dim):
                found = shift(view.source, by=-first)
            else:
                found = shift(operand, by=self.by)
            self.lifted[operand] = found
        return self.lifted[operand]

    def in_place(self, dim: int, operand: Operand, at: int, size: int) -> Slice:
        """An operand of a concatenation as a part of its lifted form, or of a lifted slice of the
        same array that has the same elements at the same place; all of it if there is none."""
        if operand in self.dims and at == self.by:
            return Slice(self.lifted[operand], at, size)
        own = self.maker.view(operand)
        start, _, stride = own.cuts[dim]
        # A view of another array may have no such dim.
        for view, lifted in [v for v in self.views if v[0].source == own.source]:
            first, _, step = view.cuts[dim]
            is_at = start == first + at * step and (size == 1 or stride == step)
            if is_at and with_cut(own.cuts, dim, view.cuts[dim]) == view.cuts:
                return Slice(lifted, at, size)
        return Slice(operand, 0, size)
