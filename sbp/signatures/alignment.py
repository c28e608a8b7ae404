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
from collections.abc import Iterator, Sequence, Set
from typing import Any

import numpy as np
from jax import lax

from sbp import _jax
from sbp.signatures.kernels.halo import bytes_beside
from sbp.signatures.rewrites import Cluster, Wiring, cluster_of
from sbp.trace.graph import Graph, Node, Operand, constant, rewriting
from sbp.trace.slices import (
    Slice,
    Strided,
    Writer,
    is_zero,
    join_node,
    sum_pads,
    view_of,
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


def padded_at(node: Node, dim: int) -> tuple[int, int] | None:
    """The place that a pad gives the first element along a dim, and the distance of two elements;
    None for nodes that do something else, or pad other dims."""
    if node.op != "pad":
        return None
    config = [tuple(map(int, c)) for c in node.params["padding_config"]]
    if any(c != (0, 0, 0) for d, c in enumerate(config) if d != dim):
        return None
    return config[dim][0], config[dim][2] + 1


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

    def view(self, value: Operand, dim: int) -> Strided | None:
        """The slice that a value is; None for values that are not cut out of others."""
        return view_of(self.graph, self.wiring.maker(value), value, dim)

    def pad(
        self, like: Node, x: Operand, fill: Operand, dim: int, shape: tuple[int, int, int]
    ) -> int:
        """A value with padding along a dim.

        Arguments:
          like: as in `emit`.
          x: the value.
          fill: the scalar to pad with.
          dim: the dim.
          shape: padding before the first element, padding between elements, size of the result.
        """
        low, interior, out = shape
        aval = self.graph.aval(x)
        return self.emit(
            like,
            resize(aval, dim, out),
            op="pad",
            primitive=lax.pad_p,
            params={"padding_config": padding(aval, dim, low, interior, out)},
            inputs=(x, fill),
        )

    def join(self, like: Node, dim: int, pieces: Sequence[Slice], x: Operand) -> int:
        """Slices one after the other along a dim, of the shape of a value."""
        pad = dataclasses.replace(like, title="pad")
        return self.emit(join_node(pad, dim, pieces), self.graph.aval(x))

    def shift(self, like: Node, x: Operand, dim: int, by: int, size: int) -> Operand:
        """A value behind `by` elements that nobody reads, cut off at a size.

        An array that is interleaved from two is interleaved again, with the second one shifted.
        """
        aval, key = self.graph.aval(x), (x, dim, by, size)
        if by == 0 and aval.shape[dim] == size:
            return x
        if key not in self._shifted:
            halves = self._interleaving(x, dim) if by == 1 and aval.shape[dim] == size else None
            if halves is None:
                zero = constant(np.zeros((), aval.dtype))
                found = self.pad(like, x, zero, dim, (by, 0, size))
            else:
                total, first, second, zero = halves
                behind = self.shift(total, second, dim, 1, size // 2)
                parts = (
                    self.pad(total, behind, zero, dim, (0, 1, size)),
                    self.pad(total, first, zero, dim, (1, 1, size)),
                )
                found = self.emit(total, aval, inputs=parts)
            self._shifted[key] = found
        return self._shifted[key]

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


@rewriting
def with_alignment(graph: Graph, asked: Set[int], ids: Iterator[int]) -> Graph:
    """A graph that computes on lifted values where that moves fewer elements, in regions too."""
    maker = Maker(Wiring(graph), asked, ids)
    lifts: dict[int, _Lifting] = {}
    seen: set[int] = set()
    for node in graph.nodes:
        for lift in _lifts(maker, node, seen):
            if lift.saves() > 0 and lifts.keys().isdisjoint(lift.reached):
                lifts |= dict.fromkeys(lift.replaced, lift)
    for at, node in enumerate(graph.nodes):
        if at in lifts:
            lifts[at].write(at, node)
        else:
            maker.nodes.append((_put_back(maker, node) if node.op == "pad" else None) or node)
    if tuple(maker.nodes) == graph.nodes:
        return graph
    return dataclasses.replace(graph, nodes=tuple(without_unread(maker.nodes, asked)))


def _put_back(maker: Maker, node: Node) -> Node | None:
    """The node instead of a pad that puts a slice where the array has it: a pad of the array with
    the other elements replaced; None for other pads. Gradients of slices are such pads.

    Arguments:
      maker: makes a further node.
      node: the pad.
    """
    x, fill = node.inputs
    graph, out = maker.graph, maker.graph.avals[node.outputs[0]]
    for dim, size in enumerate(out.shape):
        view, how = maker.view(x, dim), padded_at(node, dim)
        if view is None or how is None or view.stride != 1 or not view.cuts_one_dim:
            continue
        whole_size, count = graph.aval(view.source).shape[dim], graph.aval(x).shape[dim]
        if not count:
            continue
        low, step = how if count > 1 else (how[0], -(-size // whole_size))
        if low != view.start * step or not 0 <= size - 1 - (whole_size - 1) * step < step:
            continue
        after = whole_size - view.start - count
        part = Slice(view.source, view.start, count)
        kept = sum_pads((Slice(fill, 0, view.start), part, Slice(fill, 0, after)))
        if step == 1:
            return join_node(node, dim, kept)
        masked = maker.join(node, dim, kept, view.source)
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
        self.maker, self.graph, self.cluster = maker, maker.graph, cluster
        self.size, self.by, self.total = size, by, total
        self.lifted: dict[Operand, Operand] = {}
        self.views: list[tuple[Strided, Operand]] = []
        self.reads = list(self._reads())
        self.reached = {at for at, *_ in self.reads} | cluster.nodes.keys()
        changed = {at for at, _, joins, how in self.reads if joins or how is not None}
        self.replaced = changed | cluster.nodes.keys()

    # ---- what moves ------------------------------------------------------------------------------

    def _reads(self) -> Iterator[tuple[int, int, bool, tuple[int, int] | None]]:
        """The reads of the cluster's values by other nodes: the position of the node, the value,
        whether the node puts it where it is lifted to, and where a pad puts it (`padded_at`)."""
        for value, dim in self.cluster.dims.items():
            for at in dict.fromkeys(self.maker.wiring.readers.get(value, ())):
                node = self.graph.nodes[at]
                if at not in self.cluster.nodes:
                    how = padded_at(node, dim) if node.inputs[0] == value else None
                    yield at, value, self.joins(node, value), how

    def saves(self) -> float:
        """The bytes that each device sends less to its neighbour, where a dim is split."""
        saved = 0.0
        for leaf, dim in self.cluster.leaves.items():
            view = self.maker.view(leaf, dim)
            was = view is not None and view.start >= view.stride
            moves = view is None or not 0 <= self.first(view) < view.stride
            saved += (was - moves) * bytes_beside(self.graph.aval(leaf), dim)
        across = {v: bytes_beside(self.graph.avals[v], d) for v, d in self.cluster.dims.items()}
        stays = across.keys() & self.maker.asked
        for _, value, joins, how in self.reads:
            if joins:
                saved += across[value]
            elif how is not None:
                low, step = how
                moved, moves = not 0 <= low < step, not 0 <= low - self.by * step < step
                saved += across[value] * (moved - moves)
            else:
                stays.add(value)
        return saved - sum(across[value] for value in stays)

    def first(self, view: Strided) -> int:
        """The element of a slice's source that is first in the lifted slice."""
        return view.start - view.stride * self.by

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

    # ---- new nodes -------------------------------------------------------------------------------

    def write(self, at: int, node: Node) -> None:
        """Writes down the nodes that replace one: of the cluster, or a reader of its values."""
        if at in self.cluster.nodes:
            self.compute(node, dict(self.cluster.nodes[at]))
        else:
            self.maker.nodes.append(self.join(node) if node.op == "concatenate" else self.pad(node))

    def compute(self, node: Node, split: dict[Operand, int]) -> None:
        """A node of the cluster on lifted operands, and slices of its results as they were.

        Arguments:
          node: the node.
          split: the dims of its operands and results.
        """
        graph = self.graph
        inputs = tuple(self.operand(node, o) if o in split else o for o in node.inputs)
        outputs = tuple(
            graph.new_value(resize(graph.avals[v], split[v], self.total)) for v in node.outputs
        )
        params = dict(node.params)
        if "shape" in params:
            params["shape"] = graph.aval(outputs[0]).shape
        new = dataclasses.replace(node, inputs=inputs, outputs=outputs, params=params)
        self.maker.nodes.append(new)
        for value, out in zip(node.outputs, outputs, strict=True):
            dim, shape = split[value], graph.avals[value].shape
            cut = (self.by, self.by + shape[dim], 1)
            self.maker.slice(node, out, (*whole(shape[:dim]), cut, *whole(shape[dim + 1 :])), value)
            self.lifted[value] = out

    def operand(self, node: Node, operand: Operand) -> Operand:
        """An operand of a node of the cluster, lifted; that of a leaf is made before the node."""
        if operand not in self.lifted:
            self.lifted[operand] = self.leaf(node, operand)
        return self.lifted[operand]

    def leaf(self, node: Node, operand: Operand) -> Operand:
        """A lifted leaf: a slice that begins earlier, or a shifted array."""
        dim = self.cluster.leaves[operand]
        view = self.maker.view(operand, dim)
        if view is None:
            return self.maker.shift(node, operand, dim, self.by, self.total)
        shape, first = self.graph.aval(view.source).shape, self.first(view)
        last = first + (self.total - 1) * view.stride
        if first >= 0 and last < shape[dim]:
            cuts = (*view.cuts[:dim], (first, last + 1, view.stride), *view.cuts[dim + 1 :])
            is_whole = cuts == whole(shape)
            found = view.source if is_whole else self.maker.slice(node, view.source, cuts)
            self.views.append((view._replace(start=first), found))
            return found
        if view.stride == 1 and view.cuts_one_dim:
            return self.maker.shift(node, view.source, dim, -first, self.total)
        return self.maker.shift(node, operand, dim, self.by, self.total)

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
        own = self.maker.view(operand, dim)
        if own is None:
            return Slice(operand, 0, size)
        for view, lifted in self.views:
            stride = own.stride if size > 1 else view.stride
            same = own.source == view.source and own.beside == view.beside
            if same and stride == view.stride and own.start == view.start + at * stride:
                return Slice(lifted, at, size)
        return Slice(operand, 0, size)

    def pad(self, node: Node) -> Node:
        """A pad of a lifted value. Elements that the value itself does not have are replaced by the
        padding, if they are in the result."""
        value, fill = node.inputs
        assert isinstance(value, int)
        dim, lifted = self.cluster.dims[value], self.lifted[value]
        how = padded_at(node, dim)
        assert how is not None
        low, step = how
        out = self.graph.avals[node.outputs[0]].shape[dim]
        after = self.total - self.by - self.size
        ends = low + (self.size - 1) * step  # the last element of the value itself
        if (low >= step and self.by) or (after and ends + step < out):
            part = Slice(lifted, self.by, self.size)
            pieces = sum_pads((Slice(fill, 0, self.by), part, Slice(fill, 0, after)))
            lifted = self.maker.join(node, dim, pieces, lifted)
        first = low - self.by * step
        params = {"padding_config": padding(self.graph.aval(lifted), dim, first, step - 1, out)}
        return dataclasses.replace(node, inputs=(lifted, fill), params=params)
