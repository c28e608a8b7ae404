"""Rewrites of a traced program under which fewer bytes cross shards: computations between reversals
are mirrored, and casts to narrower types are moved; and the clusters that rewrites move as one."""

import functools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field, replace
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax

from sbp import _jax
from sbp.signatures.rule import Op, Row, rule_for, traits_of
from sbp.trace.graph import (
    LOOPS,
    Dataflow,
    Graph,
    Node,
    Operand,
    body_of,
    constant,
    interface_of,
    rewriting,
    with_body_constants,
)
from sbp.trace.slices import Writer, slicing, view_of, with_cut, without_unread
from sbp.types import Split

# ---- clusters -----------------------------------------------------------------------------------
# Neighbouring operations that compute each index of a dim without the others: what
# `Wiring.pointwise` binds to a value.


Bound = tuple[Operand, int]
"""An operand or result of a node, with a dim that the node computes together with others."""


@dataclass(frozen=True)
class Wiring(Dataflow):
    """Who makes and who reads the values of a graph, and which dims nodes compute index by index.

    Arguments:
      graph: the graph.
      rows: rows of nodes that were asked for.
    """

    rows: dict[Node, tuple[Row, ...]] = field(default_factory=dict)

    def beside(self, value: int) -> list[tuple[Node, bool]]:
        """The nodes that read a value, and the node that makes it, each with whether it makes the
        value."""
        found = [(node, False) for node in self.readers.get(value, ()) if node is not None]
        return found + ([(self.makers[value], True)] if value in self.makers else [])

    def pointwise(self, node: Node, value: Operand, dim: int, made: bool) -> Sequence[Bound]:
        """The operands and results of a node that a row splits together with one of them, if the
        node computes each index of the dim without the others; none for other nodes.

        Arguments:
          node: the node.
          value: the operand or result.
          dim: its dim.
          made: whether the value is a result.
        """

        for row in self._rows(node):
            values, atoms = (node.outputs, row.outs) if made else (node.inputs, row.ins)
            pairs = zip(values, atoms, strict=True)
            if {atom for v, atom in pairs if v is value or v == value} == {Split(dim)}:
                return split_values(node, row)
        return ()

    def _rows(self, node: Node) -> tuple[Row, ...]:
        """The rows that split a dim in all results of a node, and compute each index without the
        others."""
        if node not in self.rows:
            # A sum of pads puts arrays side by side: it is no computation.
            sums_pads = all(m is not None and m.op == "pad" for m in map(self.maker, node.inputs))
            computes = traits_of(node.op).pointwise and not sums_pads
            rows = self._rows_on(node, 1) if computes else ()
            self.rows[node] = tuple(row for row in rows if self._is_by_index(node, row))
        return self.rows[node]

    def _rows_on(self, node: Node, n: int) -> Sequence[Row]:
        """The rows of a node on `n` devices."""
        rule, aval = rule_for(node.op), self.graph.aval
        ins, outs = tuple(map(aval, node.inputs)), tuple(map(aval, node.outputs))
        return () if rule is None else rule.rows(Op(node.op, node.params, ins, outs, n))

    def _is_by_index(self, node: Node, row: Row) -> bool:
        """Whether a row splits a dim of one size in all results, and would do so with one index on
        each device. Groups of features of a convolution are split whole."""
        if row.kernel != "local" or not all(isinstance(atom, Split) for atom in row.outs):
            return False
        sizes = {self.graph.aval(v).shape[dim] for v, dim in split_values(node, row)}
        return len(sizes) == 1 and (
            traits_of(node.op).elementwise or row in self._rows_on(node, max(1, *sizes))
        )


def split_values(node: Node, row: Row) -> list[Bound]:
    """The operands and results of a node that a row splits, each with its dim."""
    values, atoms = (*node.inputs, *node.outputs), (*row.ins, *row.outs)
    return [
        (value, atom.dim)
        for value, atom in zip(values, atoms, strict=True)
        if isinstance(atom, Split)
    ]


def bound_to(
    wiring: Wiring,
    value: int,
    dim: int,
    along: Callable[[Node, Operand, int, bool], Sequence[Bound]],
) -> tuple[dict[Operand, int], dict[Node, Sequence[Bound]]] | None:
    """The values that nodes bind to a dim of a value, each with its dim, and what each of these
    nodes binds; None where a value would have two dims.

    Arguments:
      wiring: the graph.
      value: the value.
      dim: its dim.
      along: what a node binds together, from the node, a value that it reads or makes, the dim of
        that, and whether it makes it; nothing for a node that binds nothing.
    """
    dims: dict[Operand, int] = {value: dim}
    nodes: dict[Node, Sequence[Bound]] = {}
    pending: list[Operand] = [value]
    for found in pending:
        for node, made in wiring.beside(found) if isinstance(found, int) else ():
            if node not in nodes and (bound := along(node, found, dims[found], made)):
                nodes[node] = bound
                pending += dict.fromkeys(v for v, _ in bound if v not in dims)
                if any(dims.setdefault(v, d) != d for v, d in bound):
                    return None
    return dims, nodes


# ---- mirrors ------------------------------------------------------------------------------------
# Computations between reversals, in the order of the arrays that the program reverses.
#
# `lax.associative_scan(.., reverse=True)` and `jnp.flip(jnp.cumsum(jnp.flip(x)))` reverse an array,
# compute, and reverse the results. If the dim is split over devices, each reversal moves every
# shard to another device. Nearly every operation between them has a mirror image, which computes
# the reversed result from the reversed operands: a slice that counts from the other end, a pad
# whose two sides change places, an elementwise operation as it is. A mirror image reads the array
# that the program reversed, and gives what the program reverses again.


_MOVING = frozenset({"slice", "split", "pad", "concatenate", "join_slices"})
"""Operations on arrays of one rank that put slices and padding side by side."""
_CUMULATIVE = frozenset({"cumsum", "cumprod", "cummax", "cummin", "cumlogsumexp"})
"""Operations with a parameter for the direction."""


def reversed_dims(node: Node) -> tuple[int, ...]:
    """The dims that a node reverses."""
    return tuple(map(int, node.params["dimensions"])) if node.op == "rev" else ()


def along_with(wiring: Wiring, node: Node, value: Operand, dim: int, made: bool) -> Sequence[Bound]:
    """The operands and results of a node that are reversed together with one of them, each with its
    dim; none for a node that has no mirror image.

    Arguments:
      wiring: the graph.
      node: the node.
      value: one of its operands or results.
      dim: the dim of it that is reversed.
      made: whether it is a result.
    """
    aval = wiring.graph.aval
    moves = node.op in _MOVING or (node.op == "rev" and dim not in reversed_dims(node))
    cumulative = node.op in _CUMULATIVE and node.params["axis"] == dim
    found = (
        [(v, dim) for v in (*node.inputs, *node.outputs) if aval(v).shape]
        if moves or cumulative or traits_of(node.op).elementwise
        else wiring.pointwise(node, value, dim, made)
    )
    dims = dict(found)
    has_one_dim = len(set(found)) == len(dims) and set(node.outputs) <= dims.keys()
    return list(dims.items()) if has_one_dim else ()


def mirror_image(graph: Graph, node: Node, dims: Mapping[Operand, int]) -> dict[str, Any]:
    """The fields of the node that makes reversed results from reversed operands, but for its
    operands and results; those are in the order of the fields `inputs` and `outputs`.

    Arguments:
      graph: the graph.
      node: the node.
      dims: the operands and results that are reversed, each with its dim.
    """
    dim, params = dims[node.outputs[0]], node.params
    match node.op:
        case "slice":
            x, cuts = view_of(graph, node, node.outputs[0])
            (start, end, stride), size = cuts[dim], graph.aval(x).shape[dim]
            last = start + (end - 1 - start) // stride * stride
            turned = (size - 1 - last, size - start, stride) if start < end else (0, 0, 1)
            return slicing(with_cut(cuts, dim, turned))
        case "split" if params["axis"] == dim:
            sizes = tuple(params["sizes"][::-1])
            return {"params": {**params, "sizes": sizes}, "outputs": node.outputs[::-1]}
        case "pad":
            sides = [(*side,) for side in params["padding_config"]]
            sides[dim] = (sides[dim][1], sides[dim][0], sides[dim][2])
            return {"params": {**params, "padding_config": tuple(sides)}}
        case "concatenate" if params["dimension"] == dim:
            return {"inputs": node.inputs[::-1]}
        case "join_slices" if params["dimension"] == dim:
            sizes = [a.shape[dim] if a.shape else None for a in map(graph.aval, node.inputs)]
            pieces = tuple(
                (k, 0 if (whole := sizes[k]) is None else whole - start - size, size)
                for k, start, size in params["pieces"][::-1]
            )
            return {"params": {**params, "pieces": pieces}}
        case op if op in _CUMULATIVE and params["axis"] == dim:
            return {"params": {**params, "reverse": not params["reverse"]}}
        case _:
            return {}


# ---- reversal -----------------------------------------------------------------------------------


@rewriting
def with_mirrors(graph: Graph, asked: Set[int], ids: Iterator[int]) -> Graph:
    """A graph in which operations between reversals are mirrored where that reverses fewer bytes,
    in regions too."""
    seen: set[tuple[Operand, int]] = set()
    while key := next(
        (
            (n.outputs[0], dims[0])
            for n in graph.nodes
            if len(dims := reversed_dims(n)) == 1 and (n.outputs[0], dims[0]) not in seen
        ),
        None,
    ):
        wiring = Wiring(graph)
        seen.add(key)
        found = bound_to(wiring, *key, functools.partial(along_with, wiring))
        if found is None:  # a value would be reversed along two dims
            continue
        part = _Part(wiring, asked, ids, *found)
        seen.update(item for values in part.along.values() for item in values.items())
        if part.shrink():
            graph = replace(graph, nodes=part.run())
    return graph


# ---- mirrors -------------------------------------------------------------------------------------


Form = tuple[Operand, bool]
"""An array that no reversal makes, and whether it is reversed."""


class _Part(Writer):
    """All operations that read a reversed array, and those around them up to other reversals, of
    which some are mirrored.

    An array and its reversal are two forms of one value. A node makes and reads certain forms; its
    mirror image makes and reads the other ones.

    Arguments:
      wiring: the graph.
      asked: values that are read outside of the nodes.
      ids: unused numbers of nodes.
      dims: the dim along which each value is reversed.
      nodes: for each node that has a mirror image, its reversed operands and results.

    Attributes:
      along: the nodes, each with its dims.
      sources: for each reversal, its operand.
      reversals: for each of these operands, its reversal.
      mirrored: the nodes that are mirrored.
      nodes: the nodes of the graph with mirror images, so far.
      made: for each form that these nodes make or the graph takes, its number.
    """

    def __init__(
        self,
        wiring: Wiring,
        asked: Set[int],
        ids: Iterator[int],
        dims: dict[Operand, int],
        nodes: Mapping[Node, Sequence[Bound]],
    ) -> None:
        super().__init__(wiring.graph, asked, ids)
        self.wiring, self.dims = wiring, dims
        self.along = {node: dict(nodes[node]) for node in wiring.graph.nodes if node in nodes}
        self.mirrored = set[Node]()
        self.sources: dict[Operand, Operand] = {}
        self.reversals: dict[Operand, int] = {}
        for node in wiring.graph.nodes:
            for d in reversed_dims(node):
                (x,), (y,) = node.inputs, node.outputs
                is_new = reversed_dims(node) == (d,) and x not in {*self.sources, *self.reversals}
                if is_new and dims.get(x, dims.get(y)) == dims.get(y, dims.get(x)) == d:
                    dims |= {x: d, y: d}
                    self.sources[y], self.reversals[x] = x, y
        self.made: dict[Form, Operand] = {(v, False): v for v in dims if wiring.maker(v) is None}

    def form(self, node: Node | None, value: Operand) -> Form:
        """The form of a value that a node makes or reads in its place; of None, the value's own."""
        is_mirrored = node in self.mirrored and value in self.along[node]
        return self.sources.get(value, value), (value in self.sources) != is_mirrored

    def shrink(self) -> bool:
        """Leaves out nodes whose mirror images reverse no fewer bytes; whether those that remain
        reverse fewer bytes than the program."""
        was = self._cost(self.dims)
        self.mirrored = set(self.along)
        while any([self._turns(node) for node in (*self.along, *reversed(self.along))]):
            pass
        return self._cost(self.dims) < was

    def _turns(self, node: Node) -> bool:
        """Mirrors a node, or no longer does, if that reverses fewer bytes; whether it is better."""
        before = self._cost(self.along[node]), node in self.mirrored
        self.mirrored ^= {node}
        is_better = (self._cost(self.along[node]), node in self.mirrored) < before
        self.mirrored ^= set() if is_better else {node}
        return is_better

    def _cost(self, values: Iterable[Operand]) -> int:
        """The bytes that are reversed to make the forms of values that are read."""
        avals = map(
            self.graph.aval, filter(self.is_reversed, {self.form(None, v)[0] for v in values})
        )
        return sum(math.prod(aval.shape) * _jax.itemsize(aval.dtype) for aval in avals)

    def is_reversed(self, value: Operand) -> bool:
        """Whether one form of an array is made of the other one."""
        other = self.reversals.get(value)
        forms = [v for v in (value, other) if isinstance(v, int)]
        read = {
            self.form(node, v)
            for v in forms
            for node in self.wiring.readers.get(v, ())
            if node is not None and node.outputs != (other,)
        } | {self.form(None, v) for v in forms if v in self.asked}
        made = self.form(self.wiring.maker(value), value)
        return not self.is_free(value) and not read <= {made}

    def is_free(self, value: Operand) -> bool:
        """Whether both forms of an array are made without a reversal: they are equal, or count."""
        node, aval = self.wiring.maker(value), self.graph.aval(value)
        counts = node is not None and node.op == "iota" and not node.inputs and _holds_exactly(aval)
        is_asked = not self.asked.isdisjoint({value, self.reversals.get(value)})
        return (counts or self.is_uniform(value)) and not is_asked

    def is_uniform(self, value: Operand) -> bool:
        """Whether both forms of an array are equal: all elements along the dim are, or there are
        fewer than two."""
        dim, node = self.dims[value], self.wiring.maker(value)
        return self.graph.aval(value).shape[dim] < 2 or (
            node is not None
            and (
                (node.op == "broadcast_in_dim" and dim not in node.params["broadcast_dimensions"])
                or (node.op == "iota" and dim != node.params["dimension"])
            )
        )

    # ---- new nodes -------------------------------------------------------------------------------

    def run(self) -> tuple[Node, ...]:
        """All nodes, in an order in which each one comes after those that it reads."""
        for node in self.graph.nodes:
            if self.sources.keys().isdisjoint(node.outputs):
                inputs = tuple(self.operand(node, node, v) for v in node.inputs)
                turned = node in self.mirrored
                fields = mirror_image(self.graph, node, self.along[node]) if turned else {}
                made = (self.form(node, v) for v in fields.get("outputs", node.outputs))
                fields["outputs"] = tuple(map(self.name, made))
                fields["inputs"] = inputs[::-1] if "inputs" in fields else inputs
                self.nodes.append(replace(node, **fields))
        for value in sorted(self.asked & self.dims.keys()):
            self.operand(self.nodes[-1], None, value)
        return tuple(self.nodes)

    def name(self, form: Form) -> int:
        """The number of a form that a new node makes."""
        value, is_reversed = form
        found = self.reversals.get(value) if is_reversed else value
        if not isinstance(found, int):
            found = self.graph.new_value(self.graph.aval(value))
        self.made[form] = found
        return found

    def operand(self, like: Node, reader: Node | None, value: Operand) -> Operand:
        """The value that a node reads in place of an operand. It is written before the node.

        Arguments:
          like: the node whose line the new value gets.
          reader: the node that reads the value; None for a read outside of the nodes.
          value: the operand.
        """
        if value not in self.dims:
            return value
        form = self.form(reader, value)
        if form not in self.made:
            self.make(like, form)
        return self.made[form]

    def make(self, reader: Node, form: Form) -> None:
        """Makes one form of an array from the other form, for a node that reads it."""
        value, is_reversed = form
        other = self.made.get((value, not is_reversed), value)
        if self.is_free(value) and self.is_uniform(value):
            self.made[form] = other
            return
        aval, dim = self.graph.aval(value), self.dims[value]
        fields: dict[str, Any] = {"op": "rev", "primitive": lax.rev_p, "inputs": (other,)}
        fields["params"] = {"dimensions": (dim,)}
        if self.is_free(value):
            last = constant(np.asarray(aval.shape[dim] - 1, aval.dtype))
            fields = {"op": "sub", "primitive": lax.sub_p, "params": {}, "inputs": (last, other)}
        like = self.wiring.maker(self.reversals.get(value, value)) or reader
        self.emit(like, aval, self.name(form), title="", **fields)


def _holds_exactly(counter: Any) -> bool:
    """Whether the dtype of an array that counts has each of the numbers: a float of few bits rounds
    large ones, a small integer starts again at its smallest.

    Arguments:
      counter: its shape and dtype.
    """
    last = max(counter.shape) - 1
    return (
        last <= jnp.iinfo(counter.dtype).max
        if jnp.issubdtype(counter.dtype, jnp.integer)
        else last <= 2 ** (jnp.finfo(counter.dtype).nmant + 1)
    )


# ---- casts ahead of loops -----------------------------------------------------------------------
# Casts of loop constants to narrower types, ahead of the loop.
#
# A loop that casts a weight in each trip reads the weight itself. If the weight is split over
# devices, it is gathered ahead of the loop, before the cast: in float32 twice the bytes of the
# bfloat16 that the trips compute with. Ahead of the loop the cast comes first, as in a program
# without a loop. XLA moves such casts out of loops, too, but not across the collective of a plan.


@rewriting
def with_hoisted_casts(graph: Graph, asked: Set[int], ids: Iterator[int]) -> Graph:
    """A graph in which casts of loop constants to narrower types stand ahead of their loops, in
    regions too, with the transposes and reshapes before them."""
    nodes: list[Node] = []
    for node in graph.nodes:
        if node.op in LOOPS:
            before, node = _hoist(graph, node, asked, ids)
            nodes += before
        nodes.append(node)
    return replace(graph, nodes=tuple(nodes))


def _hoist(
    graph: Graph, loop: Node, asked: Set[int], ids: Iterator[int]
) -> tuple[list[Node], Node]:
    """The nodes that stand ahead of a loop, and the loop that reads their results.

    Arguments:
      graph: the graph around the loop.
      loop: the loop.
      asked: values whose types the program asks for, which stay.
      ids: unused numbers of nodes.
    """
    number = body_of(loop)
    body = loop.regions[number]
    fed = interface_of(loop).fed[number]
    # Values of the body that are fixed, each with what it is outside of the loop; and the nodes
    # that move elements of them.
    outside: dict[Operand, Operand] = {
        value: loop.inputs[entry.operand]
        for value, entry in zip(body.inputs, fed, strict=True)
        if entry.kind == "constant"
    }
    makers: dict[Operand, Node] = {}
    hoisted: list[Node] = []
    for node in body.nodes:
        if node.is_barrier:
            pairs = zip(node.inputs, node.outputs, strict=True)
            outside |= {out: outside[o] for o, out in pairs if o in outside}
        elif _moves(graph, node) and node.inputs[0] in {*outside, *makers}:
            makers[node.outputs[0]] = node
            if _narrows(graph, node) and node.outputs[0] not in asked:
                hoisted.append(node)
    if not hoisted:
        return [], loop
    writer = Writer(graph, asked, ids)

    def made(value: Operand) -> Operand:
        """A value of the body, made ahead of the loop."""
        if value not in outside:
            node = makers[value]
            inputs = (made(node.inputs[0]),)
            outside[value] = writer.emit(node, graph.aval(value), inputs=inputs)
        return outside[value]

    constants = {node.outputs[0]: made(node.outputs[0]) for node in hoisted}
    # Nor do the nodes stay that moved elements for those that are hoisted.
    left = [node for node in body.nodes if node not in hoisted]
    kept = {*asked, *body.outputs}
    nodes = without_unread(left, kept, lambda node: bool(traits_of(node.op).carries))
    read = {*kept, *(o for n in nodes for o in n.inputs)}
    body = replace(body, nodes=tuple(nodes))
    return writer.nodes, with_body_constants(loop, body, read, constants)


def _moves(graph: Graph, node: Node) -> bool:
    """Whether a node has each element of its one operand once, perhaps rounded."""
    traits = traits_of(node.op)
    return (
        len(node.inputs) == len(node.outputs) == 1
        and not node.regions
        and (traits.carries in ("arranged", "copied") or _narrows(graph, node))
    )


def _narrows(graph: Graph, node: Node) -> bool:
    """Whether a node casts its operand to a type of fewer bytes."""
    traits = traits_of(node.op)
    return (
        traits.carries == "rounded"
        and traits.adapts
        and _jax.itemsize(graph.avals[node.outputs[0]].dtype)
        < _jax.itemsize(graph.aval(node.inputs[0]).dtype)
    )


# ---- casts behind lookups -----------------------------------------------------------------------
# Casts of tables of which few rows are read.
#
# `table.astype(bfloat16)[tokens]` casts the whole table: XLA does not move a cast behind a lookup.
# The rows that were looked up are cast instead (`sbp.run.interpret`).


def rounds(graph: Graph, node: Node) -> bool:
    """Whether a node rounds numbers to a dtype of fewer bytes.

    Arguments:
      graph: a program with the node.
      node: the node.
    """
    return _narrows(graph, node) and all(
        jnp.issubdtype(graph.aval(o).dtype, np.floating) for o in (*node.inputs, *node.outputs)
    )


def looks_up(node: Node, operand: int) -> bool:
    """Whether a node takes elements of an operand at indices, and does nothing else with it.

    Arguments:
      node: a node.
      operand: the position of an operand.
    """
    return node.op == "gather" and operand == 0
