"""Slices: of slices, as one slice of the whole array; and put together again, as one node.

JAX takes the gradient of a pad with padding between elements by cutting off the edges and then
every second element. If the dim is split over devices, the first step moves elements that the
second step moves back. So slices read the arrays that were sliced first.

`jnp.roll` is two slices and a `concatenate`, `[new, x[:-1]]` a slice and a `concatenate`, and their
gradients pad slices and add them. If the dim is split over devices, each of these operations moves
almost every element to another device. The primitive `join_slices` reads the whole arrays, and each
element moves once.

If a program only slices what it has concatenated or padded, as `jnp.diff` with `prepend` and
stencils on `jnp.pad(x, 1)` do, the slices read what was put together. The longer array, of which no
shard lies where the operands have theirs, is then not made.
"""

import dataclasses
import itertools
from collections import Counter
from collections.abc import Callable, Iterator, Sequence, Set
from typing import Any, NamedTuple

import numpy as np
from jax import errors, lax

from sbp import _jax
from sbp.trace.graph import Constant, Dataflow, Graph, Node, Operand, group_by, rewriting

Cut = tuple[int, int, int]
"""First index, last index (exclusive) and stride of a slice along a dim."""

Cuts = tuple[Cut, ...]
"""Where an array is cut, for each dim."""


def whole(shape: tuple[int, ...]) -> Cuts:
    """The cuts of a slice that has all elements of an array."""
    return tuple((0, size, 1) for size in shape)


def shape_of(cuts: Cuts) -> tuple[int, ...]:
    """The shape of a slice."""
    return tuple(-(-(end - start) // stride) for start, end, stride in cuts)


def slicing(cuts: Cuts) -> dict[str, Any]:
    """The fields of a node that slices its operand."""
    starts, limits, strides = zip(*cuts, strict=True)
    params = {
        "start_indices": starts,
        "limit_indices": limits,
        "strides": None if set(strides) == {1} else strides,
    }
    return {"op": "slice", "primitive": lax.slice_p, "params": params}


def with_cut(cuts: Cuts, dim: int, cut: Cut) -> Cuts:
    """Cuts with another one along a dim."""
    return (*cuts[:dim], cut, *cuts[dim + 1 :])


def resize(aval: Any, dim: int, size: Any) -> Any:
    """An aval with another size of one dim."""
    return aval.update(shape=(*aval.shape[:dim], size, *aval.shape[dim + 1 :]))


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
    return tuple((low, high, interior) if d == dim else (0, 0, 0) for d in range(len(aval.shape)))


class View(NamedTuple):
    """A value as a slice of another one.

    Arguments:
      source: the other value.
      cuts: where it is cut.
    """

    source: Operand
    cuts: Cuts


def view_of(graph: Graph, node: Node | None, value: Operand, *, symbolic: bool = False) -> View:
    """A value as a slice of the first operand of its node, or of itself if nothing cuts it out.

    Arguments:
      graph: the graph.
      node: makes the value; None for an input or a constant.
      value: the value.
      symbolic: whether cuts may be symbolic; otherwise such a value is a slice of itself.
    """
    own = View(value, whole(graph.aval(value).shape))
    params, source = (node.params, node.inputs[0]) if node and node.inputs else ({}, value)
    shape = graph.aval(source).shape
    match node.op if node else "":
        case "slice":
            strides = params["strides"] or (1,) * len(shape)
            cuts = zip(params["start_indices"], params["limit_indices"], strides, strict=True)
        case "split":
            at = node.outputs.index(value) if node else 0
            end = sum(params["sizes"][: at + 1])
            cuts = with_cut(whole(shape), params["axis"], (end - params["sizes"][at], end, 1))
        case "pad" if all(at_most(size, 0) for sides in params["padding_config"] for size in sides):
            sides = zip(params["padding_config"], shape, strict=True)
            cuts = ((-low, size + high, 1) for (low, high, _), size in sides)
        case _:
            return own
    found = tuple((plain(a), plain(b), plain(c)) for a, b, c in cuts)
    is_static = all(isinstance(i, int) for cut in found for i in cut)
    return View(source, found) if is_static or symbolic else own


def has_all_beside(graph: Graph, view: View, dim: int) -> bool:
    """Whether a slice has neighbouring elements along a dim, and all elements along other dims."""
    shape = graph.aval(view.source).shape
    return view.cuts[dim][2] == 1 and with_cut(view.cuts, dim, (0, shape[dim], 1)) == whole(shape)


@rewriting
def with_slices(graph: Graph, _: Set[int], __: Iterator[int]) -> Graph:
    """A graph in which slices read the arrays that were sliced first, in regions too. A pad that
    only cuts off edges is a slice."""
    makers: dict[Operand, Node] = {}
    nodes = []
    for node in graph.nodes:
        if node.op in ("slice", "pad"):
            x, cuts = view_of(graph, node, node.outputs[0])
            first = view_of(graph, makers.get(x), x)
            is_slice = x != node.outputs[0] and cuts and all(a < b for a, b, _ in cuts)
            if is_slice and (first.source != x or node.op == "pad"):
                fields = slicing(tuple(map(_through, first.cuts, cuts)))
                node = dataclasses.replace(node, inputs=(first.source,), **fields)
        makers.update(dict.fromkeys(node.outputs, node))
        nodes.append(node)
    return dataclasses.replace(graph, nodes=tuple(nodes))


def _through(first: Cut, then: Cut) -> Cut:
    """A cut of a cut, as one."""
    start, stride = first[0] + then[0] * first[2], then[2] * first[2]
    count = -(-(then[1] - then[0]) // then[2])
    return (start, start + (count - 1) * stride + 1, stride)


# ---- slices one after the other -----------------------------------------------------------------
# Slices of values and copies of scalars, one after the other along a dim.


class Slice(NamedTuple):
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


def within(parts: Sequence[Slice], cut: Cut) -> list[Slice]:
    """What a cut takes of each of some parts that lie one after the other."""
    starts = itertools.accumulate((part.size for part in parts), initial=0)
    return [
        Slice(part.source, part.start + low, high - low, part.is_cut or high - low < part.size)
        for part, at in zip(parts, starts, strict=False)
        for low, high in [(max(cut[0] - at, 0), min(cut[1] - at, part.size))]
        if low < high
    ]


Padded = tuple[Slice, Slice, Slice]
"""Copies of a scalar, a slice, and copies of the scalar."""


def sum_pads(first: Padded, *others: Padded) -> list[Slice]:
    """The slices of a pad, or of the sum of two pads with zeros; none for other sums, and where the
    slices of the two overlap."""
    slices = [
        [
            *(before, left, before._replace(size=low.size - before.size - left.size)),
            *(right, before._replace(size=after.size)),
        ]
        for (before, left, _), (low, right, after) in itertools.permutations((first, *others), 2)
        if is_zero(before.source) and is_zero(low.source)
        if at_most(before.size + left.size, low.size)
    ]
    return [s for s in next(iter(slices if others else [first]), ()) if s.size != 0]


def is_zero(operand: Operand) -> bool:
    """Whether an operand is the constant zero."""
    return isinstance(operand, Constant) and not np.any(np.asarray(operand.value))


def plain(size: Any) -> Any:
    """A NumPy integer as a Python integer; a symbolic size unchanged."""
    return int(size) if isinstance(size, np.integer) else size


def at_most(a: Any, b: Any) -> bool:
    """Whether a <= b; False where symbolic sizes do not say."""
    try:
        return bool(a <= b)
    except errors.InconclusiveDimensionOperation:
        return False


def is_most(size: Any, of: Any) -> bool:
    """Whether a size is all of another one but 1, or more than half of it; for symbolic sizes also,
    whether it is all but a number."""
    left = of - size
    return (isinstance(left, int) and not isinstance(of, int)) or (
        at_most(left, 1) or at_most(left + 1, size)
    )


def with_single_pads(graph: Graph, asked: Set[int], ids: Iterator[int]) -> Graph:
    """A graph in which a pad of several dims is several pads of one dim, if only slices read it, or
    sums that only slices read.

    Arguments:
      graph: the graph, without the nodes of its regions.
      asked: values that are read outside of the nodes, or whose types the program asks for.
      ids: unused numbers of nodes.
    """
    others, sliced = set(asked), set[int]()
    for node in reversed(graph.nodes):
        is_sum = node.op == "add_any" and node.outputs[0] in sliced - others
        readers = sliced if is_sum or node.op in ("slice", "split") else others
        readers.update(o for o in node.inputs if isinstance(o, int))
    writer = Writer(graph, asked, ids)
    for node in graph.nodes:
        if node.op != "pad" or node.outputs[0] not in sliced - others:
            writer.nodes.append(node)
            continue
        x, fill = node.inputs
        config = [tuple(c) for c in node.params["padding_config"]]
        shape, aval = list(graph.aval(x).shape), graph.avals[node.outputs[0]]
        dims = [d for d, c in enumerate(config) if c != (0, 0, 0)] or [0]
        for d in dims:
            shape[d] = aval.shape[d]
            own = tuple(c if e == d else (0, 0, 0) for e, c in enumerate(config))
            value = node.outputs[0] if d == dims[-1] else None
            fields = {"inputs": (x, fill), "params": {"padding_config": own}}
            x = writer.emit(node, aval.update(shape=tuple(shape)), value, **fields)
    return dataclasses.replace(graph, nodes=tuple(writer.nodes))


# ---- join_slices --------------------------------------------------------------------------------
# The primitive `join_slices`: slices of arrays, one after the other.


Piece = tuple[int, Any, Any]
"""(operand, start, size): a slice of an operand of `join_slices` along its dim; of a scalar
operand, `size` copies."""


def join_slices(*args: Any, dimension: int, pieces: tuple[Piece, ...]) -> Any:
    """Slices of arrays, one after the other.

    Arguments:
      args: arrays of one shape but for one dim, and scalars.
      dimension: the dim.
      pieces: the slices, in the order of the result.
    """
    shape = next(x.shape for x in args if x.ndim)
    found = [
        lax.slice_in_dim(args[operand], start, start + size, axis=dimension)
        if args[operand].ndim
        else lax.broadcast(args[operand], (*shape[:dimension], size, *shape[dimension + 1 :]))
        for operand, start, size in pieces
    ]
    return lax.concatenate(found, dimension)


def _abstract(*avals: Any, dimension: int, pieces: tuple[Piece, ...]) -> Any:
    return resize(next(a for a in avals if a.ndim), dimension, sum(size for _, _, size in pieces))


join_slices_p = _jax.OwnPrimitive("join_slices", join_slices, _abstract)


# ---- joins --------------------------------------------------------------------------------------
# Slices that the program puts together again, as one node of `join_slices`.


@rewriting
def with_joins(graph: Graph, asked: Set[int], ids: Iterator[int]) -> Graph:
    """A graph in which slices that are put together again are one node, and slices of what is put
    together read its parts, in regions too."""
    maker = _Joins(with_single_pads(graph, asked, ids), asked, ids)
    for node in maker.graph.nodes:
        maker.visit(node)
    return dataclasses.replace(graph, nodes=tuple(without_unread(maker.nodes, asked)))


_FEEDING = frozenset({"slice", "split", "pad", "concatenate", "add_any", join_slices_p.name})
"""Operations whose results a join may read through: slices, pads, sums of these, concatenations and
joins."""


def without_unread(
    nodes: Sequence[Node],
    asked: Set[Operand],
    goes: Callable[[Node], bool] = lambda node: node.op in _FEEDING,
) -> list[Node]:
    """The nodes without some operations that nothing reads any more.

    Arguments:
      nodes: the nodes of a graph.
      asked: what is read outside of the nodes.
      goes: whether a node is such an operation; by default slices, pads, their sums, concatenations
        and joins.
    """
    read, kept = set(asked), list[Node]()
    for node in reversed(nodes):
        if not (goes(node) and read.isdisjoint(node.outputs)):
            read.update(node.inputs)
            kept.append(node)
    return kept[::-1]


def join_node(node: Node, dim: int, slices: Sequence[Slice]) -> Node:
    """The node that puts slices together, with the place and the result of another one.

    Arguments:
      node: the other node.
      dim: the dim of the slices.
      slices: the slices, in order.
    """
    inputs = tuple(dict.fromkeys(s.source for s in slices))
    pieces = tuple((inputs.index(s.source), s.start, s.size) for s in slices)
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
    is_roll = any(function.endswith("._roll_static") for function in node.library)
    return "roll" if is_roll else "pad" if node.op == "add_any" else node.name


class Writer:
    """Writes down the nodes of a graph that takes the place of another one.

    Arguments:
      graph: the other one; new values are entered in its table of avals.
      asked: values that are read outside of the nodes, or whose types the program asks for.
      ids: unused numbers of nodes.
    """

    def __init__(self, graph: Graph, asked: Set[int], ids: Iterator[int]) -> None:
        self.graph, self.asked, self.ids = graph, asked, ids
        self.nodes: list[Node] = []

    def emit(self, like: Node, aval: Any, value: int | None = None, **fields: Any) -> int:
        """The result of a new node, which is like another one but for some fields.

        Arguments:
          like: the other node: at the same line of the user's.
          aval: shape and dtype of the result.
          value: the number of the result; None for a new one.
          fields: what differs.
        """
        value = self.graph.new_value(aval) if value is None else value
        fields |= {"id": next(self.ids), "outputs": (value,), "regions": ()}
        self.nodes.append(dataclasses.replace(like, **fields))
        return value

    def slice(self, like: Node, x: Operand, cuts: Cuts, value: int | None = None) -> int:
        """A slice of a value; other arguments as those of `emit`."""
        return self.emit(
            like,
            self.graph.aval(x).update(shape=shape_of(cuts)),
            value,
            inputs=(x,),
            **slicing(cuts),
        )

    def pad(
        self,
        like: Node,
        x: Operand,
        fill: Operand,
        dim: int,
        shape: tuple[int, int, int],
        value: int | None = None,
    ) -> int:
        """A value with padding along a dim.

        Arguments:
          like: as in `emit`.
          x: the value.
          fill: the scalar to pad with.
          dim: the dim.
          shape: padding before the first element, padding between elements, size of the result.
          value: as in `emit`.
        """
        aval = self.graph.aval(x)
        return self.emit(
            like,
            resize(aval, dim, shape[2]),
            value,
            op="pad",
            primitive=lax.pad_p,
            params={"padding_config": padding(aval, dim, *shape)},
            inputs=(x, fill),
        )


class _Joins(Writer):
    """Finds the joins of a graph. Its arguments are the arguments of `Writer`.

    Attributes:
      kept: values that something else reads than slices of what is put together.
      instead: for results that are not made, the values in their place.
      taken: the slices that replace slices of what is put together.
    """

    def __init__(self, graph: Graph, asked: Set[int], ids: Iterator[int]) -> None:
        super().__init__(graph, asked, ids)
        self.flow = Dataflow(graph)
        self.instead: dict[Operand, Operand] = {}
        self.taken: dict[tuple[Operand, Cuts, int | None], Operand] = {}
        self.kept = set(asked)
        sliced: Counter[Operand] = Counter()
        for node in reversed(graph.nodes):
            if self.slices_parts(node):
                sliced.update(node.inputs)
                continue
            # A pad that only slices read is not made, nor is a sum that one slice reads.
            is_made = not self.kept.isdisjoint(node.outputs)
            if node.op == "add_any" and not is_made and sliced[node.outputs[0]] == 1:
                sliced.update(node.inputs)
            elif node.op != "pad" or is_made:
                self.kept.update(o for o in node.inputs if isinstance(o, int))

    def visit(self, node: Node) -> None:
        """Appends the node, or those that replace it."""
        if any(o in self.instead for o in node.inputs):
            inputs = tuple(self.instead.get(o, o) for o in node.inputs)
            node = dataclasses.replace(node, inputs=inputs)
            self.flow.makers.update(dict.fromkeys(node.outputs, node))
        if self.slices_parts(node) and node.inputs[0] not in self.kept:
            views = {value: view_of(self.graph, node, value) for value in node.outputs}
            if all(self.is_better(*view) for view in views.values()):
                made = {v: self.through(node, *view, v) for v, view in views.items()}
                self.instead |= {v: new for v, new in made.items() if v != new}
                return
        dim, slices = self.parts(node) or (0, [])
        self.nodes.append(join_node(node, dim, slices) if self.moves(dim, slices) else node)

    def moves(self, dim: int, slices: Sequence[Slice]) -> bool:
        """Whether a join is better than the operations it replaces: some value is cut, and most of
        each value that is cut is read. Otherwise the whole value may cost more than its slices."""
        cut = (s for s in slices if s.is_cut and self.graph.aval(s.source).shape)
        taken = group_by(cut, lambda s: s.source)
        return bool(taken) and all(
            is_most(sum(s.size for s in same), self.graph.aval(source).shape[dim])
            for source, same in taken.items()
        )

    # ---- what is put together --------------------------------------------------------------------

    def cut(self, operand: Operand, dim: int) -> Slice:
        """A value as a slice along a dim of the value that it was cut out of."""
        view = view_of(self.graph, self.flow.maker(operand), operand, symbolic=True)
        size = self.graph.aval(operand).shape[dim]
        return (
            Slice(view.source, view.cuts[dim][0], size, view.source != operand)
            if has_all_beside(self.graph, view, dim)
            else Slice(operand, 0, size)
        )

    def parts(self, node: Node | None) -> tuple[int, list[Slice]] | None:
        """What a concatenation, a pad or a sum of two pads puts together, and along which dim; None
        for other nodes."""
        if node is None or node.op not in ("concatenate", "pad", "add_any"):
            return None
        if node.op == "concatenate":
            dim = int(node.params["dimension"])
            return dim, [self.cut(o, dim) for o in node.inputs]
        pads = [node] if node.op == "pad" else [*map(self.flow.maker, node.inputs)]
        found = [self.slices_of_pad(pad) for pad in pads if pad is not None and pad.op == "pad"]
        slices = [padded for _, padded in found if padded]
        is_along_one_dim = len(slices) == len(pads) and len({dim for dim, _ in found}) == 1
        return (found[0][0], sum_pads(*slices)) if is_along_one_dim else None

    def slices_of_pad(self, pad: Node) -> tuple[int, Padded | None]:
        """The dim of a pad along one dim, and its slices; None for other pads."""
        x, value = pad.inputs
        config = [tuple(map(plain, c)) for c in pad.params["padding_config"]]
        dims = [d for d, c in enumerate(config) if c != (0, 0, 0)] or [0]
        low, high, interior = config[dims[0]] if len(dims) == 1 and config else (0, 0, 1)
        is_around = (
            not interior and at_most(0, low) and at_most(0, high) and (low != 0 or high != 0)
        )
        padded = (Slice(value, 0, low), self.cut(x, dims[0]), Slice(value, 0, high))
        return dims[0], padded if is_around else None

    # ---- slices of what is put together ----------------------------------------------------------

    def slices_parts(self, node: Node) -> bool:
        """Whether a node slices what a concatenation or a pad puts together: neighbouring elements,
        and of a concatenation all of them along other dims."""
        return node.op in ("slice", "split") and all(
            self.is_within(*view_of(self.graph, node, value)) for value in node.outputs
        )

    def is_within(self, x: Operand, cuts: Cuts) -> bool:
        """Whether cuts are those of `slices_parts`, or each operand of a sum is made for it and has
        such cuts."""
        if operands := self.summands(x):
            return all(o not in self.kept and self.is_within(o, cuts) for o in operands)
        maker = self.flow.maker(x)
        parts = self.parts(maker)
        if maker is None or parts is None:
            return False
        dim = parts[0]
        start, end, stride = cuts[dim]
        is_cut = isinstance(self.graph.aval(x).shape[dim], int) and stride == 1 and start < end
        return is_cut and (maker.op == "pad" or has_all_beside(self.graph, View(x, cuts), dim))

    def summands(self, x: Operand) -> tuple[Operand, ...]:
        """The operands of a sum of cotangents; none for other values."""
        maker = self.flow.maker(x)
        return maker.inputs if maker is not None and maker.op == "add_any" else ()

    def is_better(self, x: Operand, cuts: Cuts) -> bool:
        """Whether slices of the parts of a value may replace a slice of it, as in `is_within`."""
        if operands := self.summands(x):
            return all(self.is_better(o, cuts) for o in operands)
        dim, slices, bodies = self.composed(x, cuts)
        is_whole = len(slices) == 1 or not any(s.is_cut for s in bodies)
        return bool(bodies) and (is_whole or self.moves(dim, slices))

    def composed(self, x: Operand, cuts: Cuts) -> tuple[int, list[Slice], list[Slice]]:
        """The dim along which a value is put together, the slices of its parts that a slice of it
        has, and the slices that are not copies of a scalar."""
        dim, parts = self.parts(self.flow.maker(x)) or (0, [])
        slices = within(parts, cuts[dim])
        return dim, slices, [s for s in slices if self.graph.aval(s.source).shape]

    def through(self, node: Node, x: Operand, cuts: Cuts, value: int | None = None) -> Operand:
        """A slice of a concatenation or pad, of what this puts together.

        Arguments:
          node: slices it, or something made of it.
          x: the concatenation or pad, or a sum of them.
          cuts: where it is cut.
          value: the number of the slice; None for a new one.
        """
        assert isinstance(x, int)
        maker, aval = self.flow.makers[x], self.graph.avals[x].update(shape=shape_of(cuts))
        if operands := self.summands(x):
            inputs = tuple(self.through(node, o, cuts) for o in operands)
            return self.emit(maker, aval, value, inputs=inputs)
        dim, slices, bodies = self.composed(x, cuts)
        if len(slices) == 1:
            source, start, size, _ = slices[0]
            return self.take(node, source, with_cut(cuts, dim, (start, start + size, 1)), value)
        is_join = self.moves(dim, slices)
        sizes = [self.graph.aval(s.source).shape[dim] for s in bodies]
        wholes = [with_cut(cuts, dim, (0, size, 1)) for size in sizes]
        taken = {s: self.take(node, s.source, own) for s, own in zip(bodies, wholes, strict=True)}
        slices = [
            s._replace(source=taken[s]) if s in taken else s._replace(start=0) for s in slices
        ]
        if is_join:
            return self.emit(join_node(node, dim, slices), aval, value)
        if len(bodies) == len(slices):
            return self.emit(maker, aval, value, inputs=tuple(s.source for s in slices))
        # A pad with fewer copies of its scalar, before and behind one whole value.
        (x,) = taken.values()
        low = 0 if slices[0].source == x else slices[0].size
        return self.pad(maker, x, maker.inputs[1], dim, (low, 0, aval.shape[dim]), value)

    def take(self, node: Node, x: Operand, cuts: Cuts, value: int | None = None) -> Operand:
        """A slice of a value; arguments as those of `through`."""
        if cuts == whole(self.graph.aval(x).shape) and value not in self.asked:
            return x
        key = x, cuts, value
        if key not in self.taken:
            is_within = x not in self.kept and self.is_within(x, cuts)
            made = self.through if is_within and self.is_better(x, cuts) else self.slice
            self.taken[key] = made(node, x, cuts, value)
        return self.taken[key]
