"""Computations on slices, moved to where their readers put the results.

`lax.associative_scan` computes `f(odd[:-1], x[2::2])` and puts it behind `x[:1]`, on each of its
levels; gradients pad what they computed on such slices. If the dim is split over devices, the
second slice and the concatenation each move an element from every device to the next one. In
`f(shifted odd, x[::2])`, whose first element nobody reads, only the first operand moves. The odd
results of a level are interleaved from those of the next level, and the shifted array is, too: only
the last level sends anything.
"""

import dataclasses
import itertools
from collections import defaultdict
from collections.abc import Iterator, Sequence, Set
from typing import Any, NamedTuple

import numpy as np
from jax import lax

from sbp import _jax
from sbp.signatures.clusters import Cluster, Wiring, cluster_of
from sbp.signatures.kernels.halo import bytes_beside
from sbp.trace.graph import Graph, Node, Operand, constant, rewrite_graph
from sbp.trace.slices import (
    Cuts,
    Slice,
    cuts_of,
    is_zero,
    join_node,
    shape_of,
    slicing,
    whole,
    without_unread,
)

# ---- shifts -------------------------------------------------------------------------------------
# Shifted arrays, and slices of arrays that begin earlier or end later.
#
# A *lifted* value has some elements before and after those of the value itself; nobody reads them.


def resize(aval: Any, dim: int, size: int) -> Any:
    """An aval with another size of one dim."""
    return aval.update(shape=(*aval.shape[:dim], size, *aval.shape[dim + 1 :]))


class Strided(NamedTuple):
    """A value as every `stride`-th element of another one, along a dim.

    Arguments:
      source: the other value.
      cuts: where the source is cut, for each dim.
      start: the first element along the dim.
      stride: the distance of two elements in the source.
      size: the number of elements.
      beside: where the slice cuts other dims.
      cuts_one_dim: whether it has all elements along the other dims.
    """

    source: Operand
    cuts: Cuts
    start: int
    stride: int
    size: int
    beside: Cuts
    cuts_one_dim: bool


def view_of(wiring: Wiring, value: Operand, dim: int) -> Strided | None:
    """The slice that a value is; None for values that are not cut out of others."""
    node = wiring.maker(value)
    if not isinstance(value, int) or node is None or node.op not in ("slice", "split"):
        return None
    (source,) = node.inputs
    shape = wiring.graph.aval(source).shape
    cuts = cuts_of(node, value, shape)
    if cuts is None:
        return None
    start, _, stride = cuts[dim]
    beside, others = cuts[:dim] + cuts[dim + 1 :], whole(shape[:dim] + shape[dim + 1 :])
    return Strided(source, cuts, start, stride, shape_of(cuts)[dim], beside, beside == others)


def padded_at(node: Node, dim: int) -> tuple[int, int] | None:
    """The place that a pad gives the first element along a dim, and the distance of two elements;
    None for nodes that do something else, or pad other dims."""
    if node.op != "pad":
        return None
    config = [tuple(map(int, c)) for c in node.params["padding_config"]]
    if any(c != (0, 0, 0) for d, c in enumerate(config) if d != dim):
        return None
    return config[dim][0], config[dim][2] + 1


def between(fill: Operand, part: Slice, before: int, after: int) -> list[Slice]:
    """A slice between copies of a scalar."""
    return [s for s in (Slice(fill, 0, before), part, Slice(fill, 0, after)) if s.size]


def padding(aval: Any, dim: int, low: int, interior: int, out: int) -> tuple[Any, ...]:
    """The parameter of a pad along one dim.

    Arguments:
      aval: the operand.
      dim: the dim.
      low: padding before the first element; negative to cut off.
      interior: padding between elements.
      out: number of elements of the result.
    """
    high = out - low - (aval.shape[dim] - 1) * (interior + 1) - 1
    rank = len(aval.shape)
    return tuple((low, high, interior) if d == dim else (0, 0, 0) for d in range(rank))


class Maker:
    """Makes new nodes of a graph, each before a node that it has already.

    Arguments:
      wiring: the graph as it was; new values are entered in its table of avals.
      asked: values that the program returns or asks the type of.
      ids: unused numbers of nodes.
    """

    def __init__(self, wiring: Wiring, asked: Set[int], ids: Iterator[int]) -> None:
        self.wiring, self.graph, self.asked, self.ids = wiring, wiring.graph, asked, ids
        self.before: dict[int, list[Node]] = defaultdict(list)
        self._shifted: dict[tuple[Operand, int, int, int], tuple[int, Operand]] = {}

    def emit(self, at: int, like: Node, aval: Any, **changes: Any) -> int:
        """The result of a new node, which is like another one but for some changes.

        Arguments:
          at: the position of the node before which it is.
          like: the node that it is like: at the same line of the user's.
          aval: shape and dtype of the result.
          changes: what differs.
        """
        out = self.graph.new_value(aval)
        node = dataclasses.replace(like, id=next(self.ids), outputs=(out,), regions=(), **changes)
        self.before[at].append(node)
        return out

    def pad(
        self, at: int, like: Node, x: Operand, fill: Operand, dim: int, shape: tuple[int, int, int]
    ) -> int:
        """A value with padding along a dim.

        Arguments:
          at: as in `emit`.
          like: as in `emit`.
          x: the value.
          fill: the scalar to pad with.
          dim: the dim.
          shape: padding before the first element, padding between elements, size of the result.
        """
        low, interior, out = shape
        aval = self.graph.aval(x)
        config = padding(aval, dim, low, interior, out)
        return self.emit(
            at,
            like,
            resize(aval, dim, out),
            op="pad",
            primitive=lax.pad_p,
            params={"padding_config": config},
            inputs=(x, fill),
        )

    def slice(self, at: int, like: Node, source: Operand, cuts: Cuts) -> Operand:
        """A slice of a value; the value itself if the slice has all of it.

        Arguments:
          at: as in `emit`.
          like: as in `emit`.
          source: the value.
          cuts: where it is cut.
        """
        aval = self.graph.aval(source)
        if cuts == whole(aval.shape):
            return source
        sliced = aval.update(shape=shape_of(cuts))
        return self.emit(at, like, sliced, inputs=(source,), **slicing(cuts))

    def join(self, at: int, like: Node, dim: int, pieces: Sequence[Slice], x: Operand) -> int:
        """Slices one after the other, of the shape of a value.

        Arguments:
          at: as in `emit`.
          like: as in `emit`.
          dim: the dim.
          pieces: the slices.
          x: the value.
        """
        out = self.graph.new_value(self.graph.aval(x))
        node = dataclasses.replace(like, id=next(self.ids), outputs=(out,), title="pad")
        self.before[at].append(join_node(node, dim, pieces))
        return out

    def shift(self, at: int, like: Node, x: Operand, dim: int, by: int, size: int) -> Operand:
        """A value behind `by` elements that nobody reads, cut off at a size.

        An array that is interleaved from two is interleaved again, with the second one shifted.
        """
        aval = self.graph.aval(x)
        if by == 0 and aval.shape[dim] == size:
            return x
        key = (x, dim, by, size)
        if key in self._shifted and self._shifted[key][0] <= at:
            return self._shifted[key][1]
        halves = self._interleaving(x, dim) if by == 1 and aval.shape[dim] == size else None
        if halves is None:
            zero = constant(np.zeros((), aval.dtype))
            found = self.pad(at, like, x, zero, dim, (by, 0, size))
        else:
            total, first, second, zero = halves
            behind = self.shift(at, total, second, dim, 1, size // 2)
            parts = (
                self.pad(at, total, behind, zero, dim, (0, 1, size)),
                self.pad(at, total, first, zero, dim, (1, 1, size)),
            )
            found = self.emit(at, total, aval, inputs=parts)
        self._shifted[key] = (at, found)
        return found

    def _interleaving(self, x: Operand, dim: int) -> tuple[Node, Operand, Operand, Operand] | None:
        """The sum that interleaves two arrays of one size; the two, and the zero between them."""
        total = self.wiring.maker(x)
        if total is None or total.op not in ("add", "add_any", "or"):
            return None
        found: dict[int, Node] = {}
        for operand in total.inputs:
            node = self.wiring.maker(operand)
            how = padded_at(node, dim) if node is not None else None
            if node is None or how is None or how[1] != 2 or not is_zero(node.inputs[1]):
                return None
            found[how[0]] = node
        size = self.graph.aval(x).shape[dim]
        if set(found) != {0, 1} or any(
            2 * self.graph.aval(n.inputs[0]).shape[dim] != size for n in found.values()
        ):
            return None
        return total, found[0].inputs[0], found[1].inputs[0], found[0].inputs[1]


# ---- alignment ----------------------------------------------------------------------------------


def with_alignment(graph: Graph) -> Graph:
    """A graph that computes on lifted values where that moves fewer elements, in regions too.

    Arguments:
      graph: a traced program; new values are entered in its table of avals.
    """
    return rewrite_graph(graph, _align)


def _align(graph: Graph, inspected: Set[int], ids: Iterator[int]) -> Graph:
    wiring = Wiring.of(graph)
    asked = inspected | {o for o in graph.outputs if isinstance(o, int)}
    maker = Maker(wiring, asked, ids)
    instead: dict[int, list[Node]] = {}
    seen: set[int] = set()
    for node in graph.nodes:
        for lift in _lifts(maker, node, seen):
            if lift.saves() > 0 and not lift.replaces(instead):
                instead |= lift.nodes()
    for at, node in enumerate(graph.nodes):
        if at not in instead and node.op == "pad":
            put = _put_back(maker, at, node)
            instead |= {at: [put]} if put is not None else {}
    if not instead:
        return graph
    made = [
        new
        for at, old in enumerate(graph.nodes)
        for new in (*maker.before[at], *instead.get(at, [old]))
    ]
    return dataclasses.replace(graph, nodes=tuple(without_unread(made, asked)))


def _put_back(maker: Maker, at: int, node: Node) -> Node | None:
    """The node instead of a pad that puts a slice where the array has it: a pad of the array with
    the other elements replaced; None for other pads. Gradients of slices are such pads.

    Arguments:
      maker: makes a further node.
      at: the position of the pad.
      node: the pad.
    """
    x, fill = node.inputs
    graph, out = maker.graph, maker.graph.avals[node.outputs[0]]
    for dim, size in enumerate(out.shape):
        view, how = view_of(maker.wiring, x, dim), padded_at(node, dim)
        if view is None or how is None or view.stride != 1 or not view.cuts_one_dim:
            continue
        whole_size, count = graph.aval(view.source).shape[dim], view.size
        if not count:
            continue
        low, step = how if count > 1 else (how[0], -(-size // whole_size))
        if low != view.start * step or not 0 <= size - 1 - (whole_size - 1) * step < step:
            continue
        after = whole_size - view.start - count
        part = Slice(view.source, view.start, count)
        kept = between(fill, part, view.start, after)
        if step == 1:
            return join_node(node, dim, kept)
        masked = maker.join(at, node, dim, kept, view.source)
        config = padding(graph.aval(masked), dim, 0, step - 1, size)
        params = {"padding_config": config}
        return dataclasses.replace(node, inputs=(masked, fill), params=params)
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
    dim, at, graph = int(node.params["dimension"]), 0, maker.graph
    total = graph.avals[node.outputs[0]].shape[dim]
    for operand in node.inputs:
        size = graph.aval(operand).shape[dim]
        if isinstance(operand, int) and at and size and operand not in seen:
            cluster = cluster_of(maker.wiring, operand, dim)
            if cluster is not None and operand in cluster.dims:
                seen |= cluster.dims.keys()
                # Leaves are shifted behind zeros. Keys have no zero.
                avals = map(graph.aval, cluster.leaves)
                if not any(_jax.is_extended(a.dtype) for a in avals):
                    yield _Lifting(maker, cluster, size=size, by=at, total=total)
        at += size


class _Lifting:
    """A cluster whose values are lifted to where a reader puts them.

    Arguments:
      maker: makes further nodes.
      cluster: what is lifted.
      size: the number of elements of its values along the dim.
      by: where the reader puts the first one.
      total: the number of elements of the reader's result.
    """

    def __init__(self, maker: Maker, cluster: Cluster, *, size: int, by: int, total: int) -> None:
        self.maker, self.wiring, self.graph = maker, maker.wiring, maker.graph
        self.cluster, self.size, self.by, self.total = cluster, size, by, total
        self.lifted: dict[Operand, Operand] = {}
        self.views: list[tuple[Strided, Operand]] = []

    # ---- what moves ------------------------------------------------------------------------------

    def saves(self) -> float:
        """The bytes that each device sends less to its neighbour, where a dim is split."""
        graph = self.graph
        saved = 0.0
        for leaf, dim in self.cluster.leaves.items():
            view = view_of(self.wiring, leaf, dim)
            was = view is not None and view.start >= view.stride
            moves = view is None or not 0 <= self.first(view) < view.stride
            saved += (was - moves) * bytes_beside(graph.aval(leaf), dim)
        for value, dim in self.cluster.dims.items():
            across = bytes_beside(graph.avals[value], dim)
            stays = value in self.maker.asked
            for at in self.outside(value):
                node = graph.nodes[at]
                how = padded_at(node, dim)
                if self.joins(node, value):
                    saved += across
                elif how is not None and node.inputs[0] == value:
                    low, step = how
                    saved += across * (not 0 <= low < step)
                    saved -= across * (not 0 <= low - self.by * step < step)
                else:
                    stays = True
            saved -= across * stays
        return saved

    def first(self, view: Strided) -> int:
        """The element of a slice's source that is first in the lifted slice."""
        return view.start - view.stride * self.by

    def outside(self, value: int) -> list[int]:
        """The positions of the nodes that read a value and are not in the cluster."""
        found = self.wiring.readers.get(value, ())
        return [at for at in dict.fromkeys(found) if at not in self.cluster.nodes]

    def joins(self, node: Node, value: int) -> bool:
        """Whether a node concatenates a value at the place that it is lifted to."""
        dim = self.cluster.dims[value]
        if node.op != "concatenate" or node.params["dimension"] != dim:
            return False
        avals = [self.graph.aval(o) for o in node.inputs]
        ends = itertools.accumulate((a.shape[dim] for a in avals), initial=0)
        at = [end for end, operand in zip(ends, node.inputs, strict=False) if operand == value]
        total = sum(a.shape[dim] for a in avals)
        return at == [self.by] and total == self.total

    def replaces(self, instead: dict[int, list[Node]]) -> bool:
        """Whether another lift has replaced one of the nodes that this one replaces."""
        at = {at for v in self.cluster.dims for at in self.outside(v)}
        return not instead.keys().isdisjoint(at | self.cluster.nodes.keys())

    # ---- new nodes -------------------------------------------------------------------------------

    def nodes(self) -> dict[int, list[Node]]:
        """For each position of a node that is replaced, the nodes that come there."""
        found = {at: self.compute(at) for at in self.cluster.nodes}
        for value in self.cluster.dims:
            for at in self.outside(value):
                node = self.graph.nodes[at]
                if at not in found and self.joins(node, value):
                    found[at] = [self.join(node)]
                elif padded_at(node, self.cluster.dims[value]) and node.inputs[0] == value:
                    found[at] = [self.pad(at, node, value)]
        return found

    def compute(self, at: int) -> list[Node]:
        """A node of the cluster on lifted operands, and slices of its results as they were."""
        node, graph = self.graph.nodes[at], self.graph
        split = dict(self.cluster.nodes[at])
        inputs = tuple(self.operand(at, node, o) if o in split else o for o in node.inputs)
        outputs, slices = [], []
        for value in node.outputs:
            dim = split[value]
            out = graph.new_value(resize(graph.avals[value], dim, self.total))
            self.lifted[value] = out
            outputs.append(out)
            shape = graph.avals[out].shape
            cut = (self.by, self.by + graph.avals[value].shape[dim], 1)
            cuts = (*whole(shape[:dim]), cut, *whole(shape[dim + 1 :]))
            fields = {"id": next(self.maker.ids), "inputs": (out,), "outputs": (value,)}
            slices.append(dataclasses.replace(node, **fields, **slicing(cuts)))
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
        dim = self.cluster.leaves[operand]
        view = view_of(self.wiring, operand, dim)
        if view is None:
            return self.maker.shift(at, node, operand, dim, self.by, self.total)
        shape, first = self.graph.aval(view.source).shape, self.first(view)
        if first >= 0 and first + (self.total - 1) * view.stride < shape[dim]:
            cut = (first, first + (self.total - 1) * view.stride + 1, view.stride)
            cuts = (*view.cuts[:dim], cut, *view.cuts[dim + 1 :])
            found = self.maker.slice(at, node, view.source, cuts)
            self.views.append((view._replace(start=first), found))
            return found
        if view.stride == 1 and view.cuts_one_dim:
            return self.maker.shift(at, node, view.source, dim, -first, self.total)
        return self.maker.shift(at, node, operand, dim, self.by, self.total)

    def join(self, node: Node) -> Node:
        """A concatenation of lifted operands, each at its place."""
        dim, at = int(node.params["dimension"]), 0
        pieces: list[Slice] = []
        for operand in node.inputs:
            size = self.graph.aval(operand).shape[dim]
            if operand in self.cluster.dims and at == self.by:
                pieces.append(Slice(self.lifted[operand], at, size))
            else:
                pieces.append(self.in_place(operand, dim, at, size))
            at += size
        return join_node(node, dim, pieces)

    def in_place(self, operand: Operand, dim: int, at: int, size: int) -> Slice:
        """An operand of a concatenation as a part of a lifted slice of the same array, if there is
        one that has the same elements at the same place."""
        own = view_of(self.wiring, operand, dim)
        if own is None:
            return Slice(operand, 0, size)
        for view, lifted in self.views:
            stride = own.stride if size > 1 else view.stride
            same = own.source == view.source and own.beside == view.beside
            if same and stride == view.stride and own.start == view.start + at * stride:
                return Slice(lifted, at, size)
        return Slice(operand, 0, size)

    def pad(self, at: int, node: Node, value: int) -> Node:
        """A pad of a lifted value. Elements that the value itself does not have are replaced by the
        padding, if they are in the result."""
        dim = self.cluster.dims[value]
        how = padded_at(node, dim)
        assert how is not None
        lifted, (low, step) = self.lifted[value], how
        out = self.graph.avals[node.outputs[0]].shape[dim]
        after = self.total - self.by - self.size
        ends = low + (self.size - 1) * step  # the last element of the value itself
        if (low >= step and self.by) or (after and ends + step < out):
            part = Slice(lifted, self.by, self.size)
            pieces = between(node.inputs[1], part, self.by, after)
            lifted = self.maker.join(at, node, dim, pieces, lifted)
        first = low - self.by * step
        params = {"padding_config": padding(self.graph.aval(lifted), dim, first, step - 1, out)}
        return dataclasses.replace(node, inputs=(lifted, node.inputs[1]), params=params)
