"""Edits of a traced program that drop, add, move or replace reductions. The edited program is
checked like the original."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from jax import lax

from sbp import _jax
from sbp.errors import OptionEdit, SourceEdit, Span
from sbp.handwritten.faults import PMEAN
from sbp.handwritten.specs import nodes_of
from sbp.trace.collectives import CALLED, SHARD_MAP, handwritten_bytes
from sbp.trace.graph import Constant, Graph, Node, Operand, constant
from sbp.trace.regions import amount


@dataclass(frozen=True, slots=True)
class Reduce:
    """An all-reduce of one operand of a node, or of one result of a region's body.

    Arguments:
      node: the id of the node that reads the value.
      operand: the position of the operand; for a region, or with `after`, of the result.
      mesh_axes: the mesh axes to reduce over.
      collective: `psum`, `pmax` or `pmin`; `reduce_scatter` or `all_gather` for a region's result.
      divisor: the number that divides the result; 1 for a plain reduction.
      dim: the dim that is scattered or gathered.
      after: whether `node` makes the value; all readers then get the reduced value.
    """

    node: int
    operand: int
    mesh_axes: tuple[str, ...]
    collective: str = CALLED["sum"]
    divisor: int = 1
    dim: int = 0
    after: bool = False


@dataclass(frozen=True, slots=True)
class GraphEdit:
    """An edit of a program.

    Arguments:
      text: the edit in words.
      source: the edit as edits of the source.
      options: the edit as new values of arguments of `jax.shard_map`.
      reduce: collectives that are added.
      over: the mesh axes that a reduction runs over after the edit, by the id of its node. Over
          none, it is dropped; a division that belongs to it has an entry of its own.
      divide: divisors of results, by the id of the reduction.
      rename: other collectives, by the id of the node.
      stated: the types that a region states for its results after the edit, by the region's id and
          the result.
    """

    text: str
    source: tuple[SourceEdit, ...] = ()
    reduce: tuple[Reduce, ...] = ()
    over: dict[int, tuple[str, ...]] = field(default_factory=dict)
    divide: dict[int, int] = field(default_factory=dict)
    rename: dict[int, str] = field(default_factory=dict)
    stated: dict[tuple[int, int], Any] = field(default_factory=dict)
    options: tuple[OptionEdit, ...] = ()


def edit_program(graph: Graph, edit: GraphEdit, sizes: dict[str, int]) -> Graph:
    """The edited program.

    Arguments:
      graph: the whole program.
      edit: the edit.
      sizes: devices along each mesh axis.
    """
    top = max((n.id for n in nodes_of(graph)), default=0)
    numbers = itertools.count(max(top, *graph.avals, 0) + 1)
    return _Editor(edit, sizes, dict(graph.avals), numbers).graph(graph, None)


def bytes_sent(graph: Graph) -> float:
    """Bytes that one device sends in the collectives of all regions, times the trips of loops."""
    each = (
        handwritten_bytes(node)
        if node.op == SHARD_MAP
        else amount(node, [bytes_sent(region) for region in node.regions])
        for node in graph.nodes
    )
    return sum(each, 0.0)


@dataclass(frozen=True, slots=True, eq=False)
class _Editor:
    """Edits one program. It adds new values to `avals` and numbers them from `numbers`."""

    edit: GraphEdit
    sizes: dict[str, int]
    avals: dict[int, Any]
    numbers: Iterator[int]

    def graph(self, graph: Graph, region: Node | None) -> Graph:
        """A graph after the edits of its nodes; `region` is the shard_map that the graph is a body
        of."""
        edit, alias, nodes = self.edit, dict[Operand, Operand](), list[Node]()
        for node in graph.nodes:
            inputs = [alias.get(o, o) for o in node.inputs]
            for add in edit.reduce:
                if add.node == node.id and node.op != SHARD_MAP and not add.after:
                    inputs[add.operand] = self.collective(add, inputs[add.operand], node, nodes)
            axes = edit.over.get(node.id)
            if axes == ():
                alias.update(zip(node.outputs, inputs, strict=False))
                continue
            params: dict[str, Any] = node.params | ({} if axes is None else {"axes": axes})
            if node.op == SHARD_MAP:
                outs = enumerate(params["out_specs"])
                specs = tuple(edit.stated.get((node.id, i), spec) for i, spec in outs)
                params = params | {"body": self.graph(params["body"], node), "out_specs": specs}
            node = replace(
                node,
                op=edit.rename.get(node.id, node.op),
                params=params,
                inputs=tuple(inputs),
                regions=tuple(self.graph(r, None) for r in node.regions),
            )
            nodes.append(node)
            for add in edit.reduce:
                if add.node == node.id and add.after:
                    output = node.outputs[add.operand]
                    alias[output] = self.collective(add, output, node, nodes)
            if node.id in edit.divide:
                like = replace(node, library=(PMEAN,) if "axes" in node.params else ())
                for output in node.outputs:
                    alias[output] = self.divided(output, edit.divide[node.id], like, nodes)
        outputs = [alias.get(o, o) for o in graph.outputs]
        for add in edit.reduce:
            if region is not None and add.node == region.id:
                outputs[add.operand] = self.collective(add, outputs[add.operand], region, nodes)
        return replace(graph, nodes=tuple(nodes), outputs=tuple(outputs), avals=self.avals)

    def node(self, like: Node, nodes: list[Node], aval: Any, **changed: Any) -> int:
        """The value of a new node."""
        output, number = next(self.numbers), next(self.numbers)
        self.avals[output] = aval
        nodes.append(replace(like, id=number, outputs=(output,), regions=(), **changed))
        return output

    def collective(self, add: Reduce, operand: Operand, like: Node, nodes: list[Node]) -> Operand:
        """The value of a new collective of an operand."""
        aval = operand.aval if isinstance(operand, Constant) else self.avals[operand]
        span = Span(file="<edit>", line=next(self.numbers), column=1, end_column=1)
        library = (PMEAN,) if add.divisor > 1 else ()
        like = replace(like, span=span, stack=(span,), library=library)
        shape, n = list(aval.shape), math.prod(self.sizes[a] for a in add.mesh_axes)
        params: dict[str, Any] = {"axes": add.mesh_axes, "axis_index_groups": None}
        if add.collective in ("reduce_scatter", "all_gather"):
            gathers = add.collective == "all_gather"
            name = "all_gather_dimension" if gathers else "scatter_dimension"
            params = {
                "axis_name": add.mesh_axes,
                "axis_index_groups": None,
                "tiled": True,
                name: add.dim,
            }
            shape[add.dim] = shape[add.dim] * n if gathers else shape[add.dim] // n
        made, op = _jax.empty_aval(shape, aval.dtype), add.collective
        out = self.node(like, nodes, made, op=op, primitive=None, params=params, inputs=(operand,))
        return self.divided(out, add.divisor, like, nodes) if add.divisor > 1 else out

    def divided(self, operand: int, divisor: int, like: Node, nodes: list[Node]) -> int:
        """The value of a new division of a value."""
        aval, div = self.avals[operand], lax.div_p
        by = constant(np.asarray(divisor, aval.dtype))
        return self.node(
            like, nodes, aval, op=div.name, primitive=div, params={}, inputs=(operand, by)
        )
