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
from collections import defaultdict
from collections.abc import Iterator, Sequence, Set
from dataclasses import dataclass
from typing import Any

import numpy as np
from jax import lax

from sbp import _jax
from sbp.signatures.clusters import Cluster, Wiring, cluster_of, split_values
from sbp.signatures.kernels.halo import bytes_beside
from sbp.trace.graph import Graph, Node, Operand, constant, rewritten
from sbp.trace.joins import Joined, join_node, without_unread
from sbp.trace.slices import Cut, cuts_of, is_zero, shape_of, slicing, whole

# ---- shifts -------------------------------------------------------------------------------------
# Shifted arrays, and slices of arrays that begin earlier or end later.
#
# A *lifted* value has some elements before and after those of the value itself; nobody reads them.


def resized(aval: Any, dim: int, size: int) -> Any:
    """An aval with another size of one dim."""
    return aval.update(shape=(*aval.shape[:dim], size, *aval.shape[dim + 1 :]))


@dataclass(frozen=True, slots=True)
class Strided:
    """A value as every `stride`-th element of another one, along a dim.

    Arguments:
      source: the other value.
      dim: the dim.
      cuts: where the source is cut, for each dim.
    """

    source: Operand
    dim: int
    cuts: tuple[Cut, ...]

    @property
    def start(self) -> int:
        """The first element."""
        return self.cuts[self.dim][0]

    @property
    def stride(self) -> int:
        """The distance of two elements in the source."""
        return self.cuts[self.dim][2]

    @property
    def size(self) -> int:
        """The number of elements."""
        return shape_of(self.cuts)[self.dim]

    def cuts_one_dim(self, wiring: Wiring) -> bool:
        """Whether it has all elements along the other dims."""
        shape = wiring.graph.aval(self.source).shape
        return self.beside == whole(shape[: self.dim] + shape[self.dim + 1 :])

    @property
    def beside(self) -> tuple[Cut, ...]:
        """Where the slice cuts other dims."""
        return tuple(cut for d, cut in enumerate(self.cuts) if d != self.dim)

    @property
    def is_shifted(self) -> bool:
        """Whether its elements are further on in the source than in the value."""
        return self.start >= self.stride

    def moved(self, first: int, size: int) -> tuple[Cut, ...]:
        """The cuts of a slice that begins elsewhere along the dim.

        Arguments:
          first: the first element.
          size: the number of elements.
        """
        cut = (first, first + (size - 1) * self.stride + 1, self.stride)
        return (*self.cuts[: self.dim], cut, *self.cuts[self.dim + 1 :])


def strided(wiring: Wiring, value: Operand, dim: int) -> Strided | None:
    """The slice that a value is; None for values that are not cut out of others."""
    node = wiring.maker(value)
    if not isinstance(value, int) or node is None or node.op not in ("slice", "split"):
        return None
    cuts = cuts_of(node, value, wiring.graph.aval(node.inputs[0]).shape)
    return None if cuts is None else Strided(node.inputs[0], dim, cuts)


@dataclass(frozen=True, slots=True)
class Interior:
    """A node that pads along one dim.

    Arguments:
      low: padding before the first element.
      interior: padding between two elements.
    """

    low: int
    interior: int


def padded(node: Node, dim: int) -> Interior | None:
    """How a node pads along a dim; None for nodes that do something else, or pad other dims."""
    if node.op != "pad":
        return None
    config = [tuple(map(int, c)) for c in node.params["padding_config"]]
    if any(c != (0, 0, 0) for d, c in enumerate(config) if d != dim):
        return None
    return Interior(config[dim][0], config[dim][2])


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
      ids: unused numbers of nodes.
    """

    def __init__(self, wiring: Wiring, ids: Iterator[int]) -> None:
        self.wiring, self.graph, self.ids = wiring, wiring.graph, ids
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
            resized(aval, dim, out),
            op="pad",
            primitive=lax.pad_p,
            params={"padding_config": config},
            inputs=(x, fill),
        )

    def slice(self, at: int, like: Node, source: Operand, cuts: tuple[Cut, ...]) -> Operand:
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

    def cut(self, like: Node, x: int, dim: int, first: int, value: int) -> Node:
        """A node that makes a value as a slice of another one.

        Arguments:
          like: the node that it is like.
          x: the other value.
          dim: the dim.
          first: the first element.
          value: the value.
        """
        shape, out = self.graph.avals[x].shape, self.graph.avals[value].shape
        cut = (first, first + out[dim], 1)
        cuts = (*whole(shape[:dim]), cut, *whole(shape[dim + 1 :]))
        return dataclasses.replace(
            like, id=next(self.ids), inputs=(x,), outputs=(value,), **slicing(cuts)
        )

    def join(self, at: int, like: Node, dim: int, pieces: Sequence[Joined], x: Operand) -> int:
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

    def shifted(self, at: int, like: Node, x: Operand, dim: int, by: int, size: int) -> Operand:
        """A value behind `by` elements that nobody reads, cut off at a size.

        An array that is interleaved from two is interleaved again, with the second one shifted.
        """
        aval = self.graph.aval(x)
        if by == 0 and aval.shape[dim] == size:
            return x
        key = (x, dim, by, size)
        if key in self._shifted and self._shifted[key][0] <= at:
            return self._shifted[key][1]
        halves = self._interleaved(x, dim) if by == 1 and aval.shape[dim] == size else None
        if halves is None:
            zero = constant(np.zeros((), aval.dtype))
            found = self.pad(at, like, x, zero, dim, (by, 0, size))
        else:
            total, first, second, zero = halves
            behind = self.shifted(at, total, second, dim, 1, size // 2)
            parts = (
                self.pad(at, total, behind, zero, dim, (0, 1, size)),
                self.pad(at, total, first, zero, dim, (1, 1, size)),
            )
            found = self.emit(at, total, aval, inputs=parts)
        self._shifted[key] = (at, found)
        return found

    def _interleaved(self, x: Operand, dim: int) -> tuple[Node, Operand, Operand, Operand] | None:
        """The sum that interleaves two arrays of one size; the two, and the zero between them."""
        total = self.wiring.maker(x)
        if total is None or total.op not in ("add", "add_any", "or"):
            return None
        found: dict[int, Node] = {}
        for operand in total.inputs:
            node = self.wiring.maker(operand)
            how = padded(node, dim) if node is not None else None
            if node is None or how is None or how.interior != 1 or not is_zero(node.inputs[1]):
                return None
            found[how.low] = node
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
            out = graph.new_value(resized(graph.avals[value], dim, self.lift.total))
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
