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
    sum_pads,
    view_of,
    whole,
    with_cut,
    without_unread,
)

# ---- shifts -------------------------------------------------------------------------------------
# Shifted arrays, and slices of arrays that begin earlier or end later.
#
# A *lifted* value has some elements before and after those of the value itself; nobody reads them.


def padded_at(node: Node, dim: int) -> tuple[int, int] | None:
    """The place that a pad gives the first element along a dim, and the distance of two elements;
    None for nodes that do something else, or pad other dims."""
    if node.op != "pad":
        return None
    config = [tuple(map(int, c)) for c in node.params["padding_config"]]
    return (
        None
        if any(c != (0, 0, 0) for d, c in enumerate(config) if d != dim)
        else (config[dim][0], config[dim][2] + 1)
    )


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

    def padded(self, node: Node, x: Operand, dim: int, shape: tuple[int, int, int]) -> Node:
        """The same pad of another value; `dim` and `shape` are as in `Writer.pad`."""
        return dataclasses.replace(
            node,
            inputs=(x, node.inputs[1]),
            params={"padding_config": padding(self.graph.aval(x), dim, *shape)},
        )

    def kept(self, fill: Operand, part: Slice, dim: int) -> list[Slice]:
        """A part of a value at its place, with copies of a scalar instead of the other elements."""
        after = self.graph.aval(part.source).shape[dim] - part.start - part.size
        return sum_pads((Slice(fill, 0, part.start), part, Slice(fill, 0, after)))

    def join(self, like: Node, dim: int, pieces: Sequence[Slice], x: Operand) -> int:
        """Slices one after the other along a dim, of the shape of a value."""
        return self.emit(
            join_node(dataclasses.replace(like, title="pad"), dim, pieces), self.graph.aval(x)
        )

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
        found = {
            how: node
            for node in map(self.wiring.maker, total.inputs)
            if node is not None and (how := padded_at(node, dim)) and is_zero(node.inputs[1])
        }
        size = self.graph.aval(x).shape[dim]
        if found.keys() != {(0, 2), (1, 2)} or any(
            2 * self.graph.aval(n.inputs[0]).shape[dim] != size for n in found.values()
        ):
            return None
        (first, zero), (second, _) = found[0, 2].inputs, found[1, 2].inputs
        return total, first, second, zero


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
    (x, fill), graph = node.inputs, maker.graph
    view = maker.view(x)
    for dim, size in enumerate(graph.avals[node.outputs[0]].shape if view.source != x else ()):
        how, count = padded_at(node, dim), graph.aval(x).shape[dim]
        if how is None or not count or not has_all_beside(graph, view, dim):
            continue
        whole_size, start = graph.aval(view.source).shape[dim], view.cuts[dim][0]
        low, step = how if count > 1 else (how[0], -(-size // whole_size))
        if low != start * step or not 0 <= size - 1 - (whole_size - 1) * step < step:
            continue
        kept = maker.kept(fill, Slice(view.source, start, count), dim)
        return (
            join_node(node, dim, kept)
            if step == 1
            else maker.padded(
                node, maker.join(node, dim, kept, view.source), dim, (0, step - 1, size)
            )
        )
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
        self.reads = list(self._reads())
        self.reached = {node for node, *_ in self.reads} | nodes.keys()
        self.replaced = {
            node for node, _, joins, how in self.reads if joins or how is not None
        } | nodes.keys()

    # ---- what moves ------------------------------------------------------------------------------

    def _reads(self) -> Iterator[tuple[Node, int, bool, tuple[int, int] | None]]:
        """The reads of the cluster's values by other nodes: the node, the value, whether the node
        puts it where it is lifted to, and where a pad puts it (`padded_at`)."""
        for value, dim in self.dims.items():
            for node, made in self.maker.wiring.beside(value):
                if not made and node not in self.nodes:
                    how = padded_at(node, dim) if node.inputs[0] == value else None
                    yield node, value, self.joins(node, value), how

    def saves(self) -> float:
        """The bytes that the lift saves in each device's messages to its neighbor, if the dim is
        split."""
        saved = 0.0
        for leaf, dim in self.leaves.items():
            start, _, stride = self.maker.view(leaf).cuts[dim]
            was = start >= stride
            moves = not 0 <= start - stride * self.by < stride
            saved += (was - moves) * bytes_beside(self.graph.aval(leaf), dim)
        across = {v: bytes_beside(self.graph.avals[v], d) for v, d in self.dims.items()}
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

    def joins(self, node: Node, value: int) -> bool:
        """Whether a node concatenates a value at the place to which the value is lifted."""
        dim = self.dims[value]
        if node.op != "concatenate" or node.params["dimension"] != dim:
            return False
        at = [start for o, start, _ in places(self.graph, node) if o == value]
        return at == [self.by] and self.graph.avals[node.outputs[0]].shape[dim] == self.total

    # ---- new nodes -------------------------------------------------------------------------------

    def write(self, node: Node) -> None:
        """Writes the nodes that replace a node of the cluster or a reader of its values."""
        if node in self.nodes:
            self.compute(node, dict(self.nodes[node]))
        else:
            self.maker.nodes.append(self.join(node) if node.op == "concatenate" else self.pad(node))

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
        """The lifted form of an operand of the cluster. A leaf is lifted before the node."""
        if operand not in self.lifted:
            self.lifted[operand] = self.leaf(node, operand)
        return self.lifted[operand]

    def leaf(self, node: Node, operand: Operand) -> Operand:
        """A lifted leaf: a slice that begins earlier, or a shifted array."""
        dim = self.leaves[operand]
        view = self.maker.view(operand)
        start, _, stride = view.cuts[dim]
        shape, first = self.graph.aval(view.source).shape, start - stride * self.by
        last = first + (self.total - 1) * stride
        if first >= 0 and last < shape[dim]:
            cuts = with_cut(view.cuts, dim, (first, last + 1, stride))
            found = (
                view.source if cuts == whole(shape) else self.maker.slice(node, view.source, cuts)
            )
            self.views.append((View(view.source, cuts), found))
            return found
        return (
            self.maker.shift(node, view.source, dim, -first, self.total)
            if has_all_beside(self.graph, view, dim)
            else self.maker.shift(node, operand, dim, self.by, self.total)
        )

    def join(self, node: Node) -> Node:
        """A concatenation of lifted operands, each at its place."""
        dim = int(node.params["dimension"])
        pieces = [
            Slice(self.lifted[o], at, size)
            if o in self.dims and at == self.by
            else self.in_place(o, dim, at, size)
            for o, at, size in places(self.graph, node)
        ]
        return join_node(node, dim, pieces)

    def in_place(self, operand: Operand, dim: int, at: int, size: int) -> Slice:
        """An operand of a concatenation as a part of a lifted slice of the same array, if there is
        one that has the same elements at the same place."""
        own = self.maker.view(operand)
        start, _, stride = own.cuts[dim]
        for view, lifted in self.views:
            first, _, step = view.cuts[dim]
            is_at = start == first + at * step and (size == 1 or stride == step)
            if is_at and View(own.source, with_cut(own.cuts, dim, view.cuts[dim])) == view:
                return Slice(lifted, at, size)
        return Slice(operand, 0, size)

    def pad(self, node: Node) -> Node:
        """A pad of a lifted value. Elements that the value itself does not have are replaced by the
        padding, if they are in the result."""
        value, fill = node.inputs
        assert isinstance(value, int)
        dim, lifted = self.dims[value], self.lifted[value]
        how = padded_at(node, dim)
        assert how is not None
        low, step = how
        size, out = (self.graph.avals[v].shape[dim] for v in (value, node.outputs[0]))
        after = self.total - self.by - size
        ends = low + (size - 1) * step  # the last element of the value itself
        if (low >= step and self.by) or (after and ends + step < out):
            kept = self.maker.kept(fill, Slice(lifted, self.by, size), dim)
            lifted = self.maker.join(node, dim, kept, lifted)
        return self.maker.padded(node, lifted, dim, (low - self.by * step, step - 1, out))
