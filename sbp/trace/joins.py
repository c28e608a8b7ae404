"""Slices of arrays that the program puts together again, as one node.

`jnp.roll` is two slices and a `concatenate`, `[new, x[:-1]]` a slice and a `concatenate`, and their
gradients pad slices and add them. If the dim is split over devices, each of these operations moves
almost every element to another device. The primitive `join_slices` reads the whole arrays, and each
element moves once.

If a program only slices what it has concatenated, as `jnp.diff` with `prepend` does, the slices
read what was concatenated. The longer array, of which no shard lies where the operands have theirs,
is then not made.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence, Set
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from jax import lax

from sbp import _jax
from sbp.trace.graph import Constant, Graph, Node, Operand
from sbp.trace.slices import Cut, cuts_of, slicing, whole

Piece = tuple[int, Any, Any]
"""(operand, start, size): a slice of an operand of `join_slices` along its dim; of a scalar
operand, `size` copies."""

join_slices_p = _jax.Primitive("join_slices")


def joined(*args: Any, dimension: int, pieces: tuple[Piece, ...]) -> Any:
    """Slices of arrays, one after the other.

    Arguments:
      args: arrays of one shape but for one dim, and scalars.
      dimension: the dim.
      pieces: the slices, in the order of the result.
    """
    array = next(x for x in args if x.ndim)
    found = []
    for operand, start, size in pieces:
        x = args[operand]
        if x.ndim:
            found.append(lax.slice_in_dim(x, start, start + size, axis=dimension))
        else:
            shape = (*array.shape[:dimension], size, *array.shape[dimension + 1 :])
            found.append(lax.broadcast(x, shape))
    return lax.concatenate(found, dimension)


def _abstract(*avals: Any, dimension: int, pieces: tuple[Piece, ...]) -> Any:
    array = next(a for a in avals if a.ndim)
    size = sum(size for _, _, size in pieces)
    return array.update(shape=(*array.shape[:dimension], size, *array.shape[dimension + 1 :]))


join_slices_p.def_impl(joined)
join_slices_p.def_abstract_eval(_abstract)
_jax.mlir.register_lowering(join_slices_p, _jax.mlir.lower_fun(joined, multiple_results=False))


@dataclass(frozen=True, slots=True)
class _Slice:
    """Neighbouring elements of a value along a dim; of a scalar, copies.

    Arguments:
      source: the value.
      start: the first element.
      size: number of elements.
      is_cut: whether an operation of the program cut it out of a longer value.
    """

    source: Operand
    start: Any
    size: Any
    is_cut: bool = False


def with_joins(graph: Graph) -> Graph:
    """A graph in which slices that are put together again are one node, in regions too."""
    return _with_joins(graph, {i.value for i in graph.inspections if isinstance(i.value, int)})


def _with_joins(graph: Graph, inspected: Set[int]) -> Graph:
    """The graph with its joins.

    Arguments:
      graph: the graph.
      inspected: values whose types the program asks for, which stay.
    """
    maker = _Joins(graph, inspected)
    nodes = [maker.visit(node) for node in graph.nodes]
    if maker.changed:
        asked = {o for o in graph.outputs if isinstance(o, int)} | inspected
        nodes = without_unread(nodes, asked)
    return dataclasses.replace(graph, nodes=tuple(nodes))


_FEEDING = frozenset({"slice", "split", "pad", "concatenate"})
"""Operations whose results a join may read through."""


def without_unread(nodes: Sequence[Node], asked: Set[int]) -> list[Node]:
    """The nodes without the slices, pads, concatenations and joins that nothing reads any more.

    Arguments:
      nodes: the nodes of a graph.
      asked: values that are read outside of the nodes.
    """
    read, kept = set(asked), []
    for node in reversed(nodes):
        moves = node.op in _FEEDING or node.op == join_slices_p.name
        if moves and not read.intersection(node.outputs):
            continue
        read.update(o for o in node.inputs if isinstance(o, int))
        kept.append(node)
    return kept[::-1]


Joined = tuple[Operand, Any, Any]
"""(value, start, size): a slice of a value; of a scalar, copies."""


def join_node(node: Node, dim: int, slices: Sequence[Joined]) -> Node:
    """The node that puts slices together, with the place and the result of another one.

    Arguments:
      node: the other node.
      dim: the dim of the slices.
      slices: the slices, in order.
    """
    inputs = tuple(dict.fromkeys(source for source, _, _ in slices))
    pieces = tuple((inputs.index(source), start, size) for source, start, size in slices)
    return dataclasses.replace(
        node,
        title=_title(node),
        op=join_slices_p.name,
        primitive=join_slices_p,
        params={"dimension": dim, "pieces": pieces},
        inputs=inputs,
    )


def _title(node: Node) -> str:
    """What the user knows a node as that a join replaces: `roll`, or the operator. A sum of pads is
    the gradient of slices, and named by its pads."""
    if any(function.endswith("._roll_static") for function in node.library):
        return "roll"
    return "pad" if node.op == "add_any" else node.name


class _Joins:
    """Finds the joins of a graph.

    Arguments:
      graph: the graph.
      inspected: values whose types the program asks for.
    """

    def __init__(self, graph: Graph, inspected: Set[int]) -> None:
        self.graph, self.inspected = graph, inspected
        self.makers: dict[int, Node] = {v: n for n in graph.nodes for v in n.outputs}
        self.changed = False
        self.kept = {o for o in graph.outputs if isinstance(o, int)} | inspected
        for node in graph.nodes:
            if node.op != "slice" or self.sliced(node) is None:
                self.kept.update(o for o in node.inputs if isinstance(o, int))

    def visit(self, node: Node) -> Node:
        """The node, or the join that replaces it."""
        if node.regions:
            regions = tuple(_with_joins(r, self.inspected) for r in node.regions)
            return dataclasses.replace(node, regions=regions)
        slices: list[_Slice] = []
        dim = 0
        if node.op == "concatenate":
            dim = int(node.params["dimension"])
            slices = [self.cut(o, dim) for o in node.inputs]
        elif node.op == "slice":
            dim, slices = self.through(node)
            if len(slices) == 1:
                return self.narrowed(node, dim, slices[0])
        elif node.op in ("pad", "add_any"):
            pads = [self.padded(n) for n in self.pads(node)]
            if pads and all(pads):
                dim, slices = _summed([p for p in pads if p is not None])
        if not self.moves(dim, slices):
            return node
        self.changed = True
        return join_node(node, dim, [(s.source, s.start, s.size) for s in slices])

    def moves(self, dim: int, slices: Sequence[_Slice]) -> bool:
        """Whether a join is better than the operations it replaces: some value is cut, and most of
        each value that is cut is read. Otherwise the whole value may cost more than its slices."""
        taken: dict[Operand, Any] = {}
        for s in slices:
            if s.is_cut:
                taken[s.source] = taken.get(s.source, 0) + s.size
        return bool(taken) and all(
            _is_most(size, self.graph.aval(source).shape[dim]) for source, size in taken.items()
        )

    def cut(self, operand: Operand, dim: int) -> _Slice:
        """A value as a slice along a dim of the value that it was cut out of."""
        whole = _Slice(operand, 0, self.graph.aval(operand).shape[dim])
        maker = self.makers.get(operand) if isinstance(operand, int) else None
        if maker is None or not isinstance(operand, int):
            return whole
        if maker.op == "split" and maker.params["axis"] == dim:
            sizes, at = maker.params["sizes"], maker.outputs.index(operand)
            return _Slice(maker.inputs[0], sum(sizes[:at]), sizes[at], True)
        if maker.op == "slice":
            params, shape = maker.params, self.graph.aval(maker.inputs[0]).shape
            ends = zip(params["start_indices"], params["limit_indices"], shape, strict=True)
            whole_beside = all(e == dim or (a, b) == (0, n) for e, (a, b, n) in enumerate(ends))
            if whole_beside and set(params["strides"] or (1,)) == {1}:
                return _Slice(maker.inputs[0], params["start_indices"][dim], whole.size, True)
        return whole

    def sliced(self, node: Node) -> tuple[int, Cut] | None:
        """The dim of a concatenation that a slice cuts, and where it cuts it; None for slices of
        something else, strided slices, slices that cut other dims too, and symbolic sizes."""
        x = node.inputs[0]
        maker = self.makers.get(x) if isinstance(x, int) else None
        if maker is None or maker.op != "concatenate":
            return None
        dim, shape = int(maker.params["dimension"]), self.graph.aval(x).shape
        cuts = cuts_of(node, node.outputs[0], shape)
        if cuts is None or not isinstance(shape[dim], int):
            return None
        if cuts[dim][2] != 1 or cuts[dim][0] >= cuts[dim][1]:
            return None
        beside = [d for d in range(len(shape)) if d != dim]
        return (dim, cuts[dim]) if all(cuts[d] == whole(shape)[d] for d in beside) else None

    def through(self, node: Node) -> tuple[int, list[_Slice]]:
        """What a slice takes from each operand of a concatenation; nothing where an operation other
        than such slices reads the concatenation, which is then made in any case."""
        found, x = self.sliced(node), node.inputs[0]
        if found is None or not isinstance(x, int) or x in self.kept:
            return 0, []
        dim, (start, end, _) = found
        slices, at = [], 0
        for operand in self.makers[x].inputs:
            part = self.cut(operand, dim)
            low, high = max(start - at, 0), min(end - at, part.size)
            if low < high:
                is_cut = part.is_cut or high - low < part.size
                slices.append(_Slice(part.source, part.start + low, high - low, is_cut))
            at += part.size
        return dim, slices

    def narrowed(self, node: Node, dim: int, part: _Slice) -> Node:
        """A slice of one operand of a concatenation, in place of a slice of the concatenation.

        Arguments:
          node: the slice of the concatenation.
          dim: the dim.
          part: what it takes.
        """
        self.changed = True
        cuts = list(whole(self.graph.aval(part.source).shape))
        cuts[dim] = (part.start, part.start + part.size, 1)
        return dataclasses.replace(node, inputs=(part.source,), **slicing(tuple(cuts)))

    def pads(self, node: Node) -> list[Node]:
        """The node itself, or the two pads that it adds; none for other sums."""
        if node.op == "pad":
            return [node]
        makers = [self.makers.get(o) if isinstance(o, int) else None for o in node.inputs]
        found = [m for m in makers if m is not None and m.op == "pad" and is_zero(m.inputs[1])]
        return found if len(found) == 2 else []

    def padded(self, pad: Node) -> _Padded | None:
        """A pad along one dim; None for other pads."""
        x, value = pad.inputs
        config = [tuple(map(_plain, c)) for c in pad.params["padding_config"]]
        dims = [d for d, c in enumerate(config) if c != (0, 0, 0)]
        if len(dims) != 1:
            return None
        low, high, interior = config[dims[0]]
        if interior or not (_at_most(0, low) and _at_most(0, high)):
            return None
        return _Padded(dims[0], low, self.cut(x, dims[0]), high, value)


@dataclass(frozen=True, slots=True)
class _Padded:
    """A slice between copies of a scalar.

    Arguments:
      dim: the dim.
      low: copies before the slice.
      body: the slice.
      high: copies after it.
      value: the scalar.
    """

    dim: int
    low: Any
    body: _Slice
    high: Any
    value: Operand


def _summed(pads: Sequence[_Padded]) -> tuple[int, list[_Slice]]:
    """The slices of a pad, or of the sum of two pads with zeros; none where the slices of the two
    overlap."""
    first, last = pads[0], pads[-1]
    if len(pads) == 2:
        if first.dim != last.dim:
            return first.dim, []
        if not _at_most(first.low + first.body.size, last.low):
            first, last = last, first
        if not _at_most(first.low + first.body.size, last.low):
            return first.dim, []

    def copies(size: Any) -> _Slice:
        return _Slice(first.value, 0, size)

    between = [copies(last.low - first.low - first.body.size), last.body] if len(pads) == 2 else []
    slices = [copies(first.low), first.body, *between, copies(last.high)]
    return first.dim, [s for s in slices if s.size != 0]


def is_zero(operand: Operand) -> bool:
    """Whether an operand is the constant zero."""
    return isinstance(operand, Constant) and not np.any(np.asarray(operand.value))


def _plain(size: Any) -> Any:
    """A NumPy integer as a Python integer; a symbolic size unchanged."""
    return int(size) if isinstance(size, np.integer) else size


def _at_most(a: Any, b: Any) -> bool:
    """Whether a <= b; False where symbolic sizes do not say."""
    try:
        return bool(a <= b)
    except jax.errors.InconclusiveDimensionOperation:
        return False


def _is_most(size: Any, of: Any) -> bool:
    """Whether a size is all of another one but 1, or more than half of it; for symbolic sizes also,
    whether it is all but a number."""
    left = of - size
    return (isinstance(left, int) and not isinstance(of, int)) or (
        _at_most(left, 1) or _at_most(left + 1, size)
    )
