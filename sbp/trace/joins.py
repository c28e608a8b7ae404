"""Slices of arrays that the program puts together again, as one node.

`jnp.roll` is two slices and a `concatenate`, `[new, x[:-1]]` a slice and a `concatenate`, and their
gradients pad slices and add them. If the dim is split over devices, each of these operations moves
almost every element to another device. The primitive `join_slices` reads the whole arrays, and each
element moves once.

If a program only slices what it has concatenated or padded, as `jnp.diff` with `prepend` and
stencils on `jnp.pad(x, 1)` do, the slices read what was put together. The longer array, of which no
shard lies where the operands have theirs, is then not made.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Iterator, Sequence, Set
from typing import Any

from sbp.trace.graph import Graph, Node, Operand, rewritten
from sbp.trace.slices import (
    Cuts,
    PaddedSlice,
    Slice,
    at_most,
    cuts_of,
    is_most,
    is_zero,
    join_slices_p,
    plain,
    shape_of,
    slicing,
    summed,
    whole,
    with_single_pads,
    within,
)


def with_joins(graph: Graph) -> Graph:
    """A graph in which slices that are put together again are one node, and slices of what is put
    together read its parts, in regions too.

    Arguments:
      graph: a traced program; new values are entered in its table of avals.
    """
    return rewritten(graph, _with_joins)


def _with_joins(graph: Graph, inspected: Set[int], ids: Iterator[int]) -> Graph:
    """The graph with its joins.

    Arguments:
      graph: the graph.
      inspected: values whose types the program asks for, which stay.
      ids: unused numbers of nodes.
    """
    maker = _Joins(with_single_pads(graph, inspected, ids), inspected, ids)
    nodes = [new for node in maker.graph.nodes for new in maker.visit(node)]
    if maker.changed:
        nodes = without_unread(nodes, maker.asked)
    return dataclasses.replace(graph, nodes=tuple(nodes))


_FEEDING = frozenset({"slice", "split", "pad", "concatenate", "add_any"})
"""Operations whose results a join may read through."""


def without_unread(nodes: Sequence[Node], asked: Set[int]) -> list[Node]:
    """The nodes without the slices, pads, their sums, concatenations and joins that nothing reads
    any more.

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
      ids: unused numbers of nodes.
    """

    def __init__(self, graph: Graph, inspected: Set[int], ids: Iterator[int]) -> None:
        self.graph, self.inspected, self.ids = graph, inspected, ids
        self.makers: dict[int, Node] = {v: n for n in graph.nodes for v in n.outputs}
        self.changed = False
        self.instead: dict[Operand, Operand] = {}
        self.asked = {o for o in graph.outputs if isinstance(o, int)} | inspected
        self.kept = set(self.asked)
        self.cut_values: dict[tuple[Operand, Cuts], Operand] = {}
        sliced: Counter[Operand] = Counter()
        read = set(self.asked)
        for node in reversed(graph.nodes):
            if node.op in _FEEDING and read.isdisjoint(node.outputs):
                continue
            read.update(o for o in node.inputs if isinstance(o, int))
            if self.slices_parts(node):
                sliced.update(node.inputs)
                continue
            # A pad that only slices read is not made, nor is a sum that one slice reads.
            readers = sum(sliced[v] for v in node.outputs)
            is_made = readers == 0 or not self.kept.isdisjoint(node.outputs)
            if node.op == "add_any" and readers == 1 and not is_made:
                sliced.update(node.inputs)
            elif node.op != "pad" or is_made:
                self.kept.update(o for o in node.inputs if isinstance(o, int))

    def visit(self, node: Node) -> list[Node]:
        """The node, or those that replace it."""
        if any(o in self.instead for o in node.inputs):
            inputs = tuple(self.instead.get(o, o) for o in node.inputs)
            node = dataclasses.replace(node, inputs=inputs)
            self.makers |= dict.fromkeys(node.outputs, node)
        if node.regions:
            return [node]
        if self.slices_parts(node) and node.inputs[0] not in self.kept:
            found = self.read_through(node)
            self.changed = self.changed or found is not None
            return [node] if found is None else found
        slices: list[Slice] = []
        dim = 0
        if node.op == "concatenate":
            dim = int(node.params["dimension"])
            slices = [self.cut(o, dim) for o in node.inputs]
        elif node.op in ("pad", "add_any"):
            pads = [self.padded(n) for n in self.pads(node)]
            if pads and all(pads):
                dim, slices = summed([p for p in pads if p is not None])
        if not self.moves(dim, slices):
            return [node]
        self.changed = True
        return [_joined_slices(node, dim, slices)]

    def moves(self, dim: int, slices: Sequence[Slice]) -> bool:
        """Whether a join is better than the operations it replaces: some value is cut, and most of
        each value that is cut is read. Otherwise the whole value may cost more than its slices."""
        taken: dict[Operand, Any] = {}
        for s in slices:
            if s.is_cut and self.graph.aval(s.source).shape:
                taken[s.source] = taken.get(s.source, 0) + s.size
        return bool(taken) and all(
            is_most(size, self.graph.aval(source).shape[dim]) for source, size in taken.items()
        )

    def cut(self, operand: Operand, dim: int) -> Slice:
        """A value as a slice along a dim of the value that it was cut out of."""
        whole = Slice(operand, 0, self.graph.aval(operand).shape[dim])
        maker = self.makers.get(operand) if isinstance(operand, int) else None
        if maker is None or not isinstance(operand, int):
            return whole
        if maker.op == "split" and maker.params["axis"] == dim:
            sizes, at = maker.params["sizes"], maker.outputs.index(operand)
            return Slice(maker.inputs[0], sum(sizes[:at]), sizes[at], True)
        if maker.op == "slice":
            params, shape = maker.params, self.graph.aval(maker.inputs[0]).shape
            ends = zip(params["start_indices"], params["limit_indices"], shape, strict=True)
            whole_beside = all(e == dim or (a, b) == (0, n) for e, (a, b, n) in enumerate(ends))
            if whole_beside and set(params["strides"] or (1,)) == {1}:
                return Slice(maker.inputs[0], params["start_indices"][dim], whole.size, True)
        return whole

    # ---- slices of what is put together ----------------------------------------------------------

    def parts(self, value: Operand) -> tuple[int, list[Slice]] | None:
        """What a concatenation or a pad puts together, and along which dim; None for other
        values."""
        maker = self.makers.get(value) if isinstance(value, int) else None
        if maker is not None and maker.op == "concatenate":
            dim = int(maker.params["dimension"])
            return dim, [self.cut(o, dim) for o in maker.inputs]
        pad = self.padded(maker) if maker is not None and maker.op == "pad" else None
        return None if pad is None else summed([pad])

    def slices_parts(self, node: Node) -> bool:
        """Whether a node slices what a concatenation or a pad puts together: neighbouring elements,
        and of a concatenation all of them along other dims."""
        if node.op not in ("slice", "split"):
            return False
        x, shape = node.inputs[0], self.graph.aval(node.inputs[0]).shape
        found = [cuts_of(node, value, shape) for value in node.outputs]
        return all(cuts is not None and self.is_within(x, cuts) for cuts in found)

    def is_within(self, x: Operand, cuts: Cuts) -> bool:
        """Whether cuts are those of `slices_parts`, or each operand of a sum is made for it and has
        such cuts."""
        if (operands := self.summands(x)) is not None:
            return all(o not in self.kept and self.is_within(o, cuts) for o in operands)
        parts, shape = self.parts(x), self.graph.aval(x).shape
        if parts is None or not isinstance(shape[parts[0]], int):
            return False
        start, end, stride = cuts[parts[0]]
        beside = [
            c == w for d, (c, w) in enumerate(zip(cuts, whole(shape), strict=True)) if d != parts[0]
        ]
        is_pad = isinstance(x, int) and self.makers[x].op == "pad"
        return stride == 1 and start < end and (is_pad or all(beside))

    def read_through(self, node: Node) -> list[Node] | None:
        """The nodes in place of slices of a concatenation or pad; None where they are no better."""
        shape, nodes = self.graph.aval(node.inputs[0]).shape, []
        before = dict(self.cut_values)
        for value in node.outputs:
            cuts = cuts_of(node, value, shape)
            found = None if cuts is None else self.taken(node, value, node.inputs[0], cuts)
            if found is None:
                self.cut_values = before
                return None
            nodes += found
        return nodes

    def taken(self, node: Node, value: int, x: Operand, cuts: Cuts) -> list[Node] | None:
        """The nodes that make a slice of a concatenation or pad of what this puts together.

        Arguments:
          node: slices it, or something made of it.
          value: the slice.
          x: the concatenation or pad.
          cuts: where it is cut.
        """
        if self.summands(x) is not None:
            return self.summed(node, value, x, cuts)
        found = self.parts(x)
        assert found is not None and isinstance(x, int)
        dim, slices = found[0], within(found[1], cuts[found[0]])
        bodies = [s for s in slices if self.graph.aval(s.source).shape]
        if not bodies:
            return None
        if len(slices) == 1:
            part = slices[0]
            own = (part.start, part.start + part.size, 1)
            return self.sliced(node, value, part.source, (*cuts[:dim], own, *cuts[dim + 1 :]))
        nodes: list[Node] = []
        is_join = self.moves(dim, slices)
        if not is_join and any(s.is_cut for s in bodies):
            return None
        for k, s in enumerate(slices):
            if s in bodies:
                source, made = self.cut_beside(node, s.source, dim, cuts)
                slices[k] = dataclasses.replace(s, source=source)
                nodes += made
            else:
                slices[k] = dataclasses.replace(s, start=0)
        like = dataclasses.replace(node, id=next(self.ids), outputs=(value,))
        if is_join:
            return [*nodes, _joined_slices(like, dim, slices)]
        if len(bodies) < len(slices):
            return [*nodes, self.padding(like, x, dim, slices)]
        maker = dataclasses.replace(self.makers[x], id=like.id, outputs=(value,))
        return [*nodes, dataclasses.replace(maker, inputs=tuple(s.source for s in slices))]

    def sliced(self, node: Node, value: int, x: Operand, cuts: Cuts) -> list[Node]:
        """The nodes that make a slice of a value; arguments as those of `taken`."""
        if cuts == whole(self.graph.aval(x).shape) and value not in self.asked:
            self.instead[value] = x
            return []
        if x not in self.kept and self.is_within(x, cuts):
            found = self.taken(node, value, x, cuts)
            if found is not None:
                return found
        fields = {"inputs": (x,), "outputs": (value,), "id": next(self.ids), **slicing(cuts)}
        return [dataclasses.replace(node, **fields)]

    def summands(self, x: Operand) -> tuple[Operand, ...] | None:
        """The operands of a sum of cotangents; None for other values."""
        maker = self.makers.get(x) if isinstance(x, int) else None
        return maker.inputs if maker is not None and maker.op == "add_any" else None

    def summed(self, node: Node, value: int, x: Operand, cuts: Cuts) -> list[Node] | None:
        """The nodes that add slices of the operands of a sum; arguments as those of `taken`."""
        assert isinstance(x, int)
        total = self.makers[x]
        nodes: list[Node] = []
        inputs, before = [], dict(self.cut_values)
        for operand in total.inputs:
            part = self.graph.new_value(self.graph.avals[value])
            found = self.taken(node, part, operand, cuts)
            if found is None:
                self.cut_values = before
                return None
            nodes += found
            inputs.append(self.instead.get(part, part))
        return [
            *nodes,
            dataclasses.replace(total, id=next(self.ids), inputs=tuple(inputs), outputs=(value,)),
        ]

    def cut_beside(
        self, node: Node, x: Operand, dim: int, cuts: Cuts
    ) -> tuple[Operand, list[Node]]:
        """A value cut along all dims but one, and the nodes that make it; arguments as those of
        `taken`."""
        aval = self.graph.aval(x)
        own = (*cuts[:dim], (0, aval.shape[dim], 1), *cuts[dim + 1 :])
        if own == whole(aval.shape):
            return x, []
        if (x, own) in self.cut_values:
            return self.cut_values[x, own], []
        value = self.graph.new_value(aval.update(shape=shape_of(own)))
        nodes = self.sliced(node, value, x, own)
        self.cut_values[x, own] = found = self.instead.get(value, value)
        return found, nodes

    def padding(self, like: Node, x: Operand, dim: int, slices: Sequence[Slice]) -> Node:
        """A pad with fewer copies of its scalar.

        Arguments:
          like: the node that it is like.
          x: the pad.
          dim: its dim.
          slices: copies before and behind one whole value.
        """
        assert isinstance(x, int)
        pad = self.makers[x]
        at = next(k for k, s in enumerate(slices) if self.graph.aval(s.source).shape)
        sides = [sum(s.size for s in part) for part in (slices[:at], slices[at + 1 :])]
        rank = len(self.graph.aval(x).shape)
        config = tuple((*sides, 0) if d == dim else (0, 0, 0) for d in range(rank))
        return dataclasses.replace(
            pad,
            id=like.id,
            outputs=like.outputs,
            inputs=(slices[at].source, pad.inputs[1]),
            params={"padding_config": config},
        )

    def pads(self, node: Node) -> list[Node]:
        """The node itself, or the two pads that it adds; none for other sums."""
        if node.op == "pad":
            return [node]
        makers = [self.makers.get(o) if isinstance(o, int) else None for o in node.inputs]
        found = [m for m in makers if m is not None and m.op == "pad" and is_zero(m.inputs[1])]
        return found if len(found) == 2 else []

    def padded(self, pad: Node) -> PaddedSlice | None:
        """A pad along one dim; None for other pads."""
        x, value = pad.inputs
        config = [tuple(map(plain, c)) for c in pad.params["padding_config"]]
        dims = [d for d, c in enumerate(config) if c != (0, 0, 0)]
        if len(dims) != 1:
            return None
        low, high, interior = config[dims[0]]
        if interior or not (at_most(0, low) and at_most(0, high)):
            return None
        return PaddedSlice(dims[0], low, self.cut(x, dims[0]), high, value)


def _joined_slices(node: Node, dim: int, slices: Sequence[Slice]) -> Node:
    """The node of `join_node`."""
    return join_node(node, dim, [(s.source, s.start, s.size) for s in slices])
