"""Edits of a traced program that drop, add, move or replace reductions. The edited program is
checked like the original."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from jax import lax

from sbp import _jax
from sbp.errors import OptionEdit, SourceEdit, Span
from sbp.handwritten.faults import PMEAN
from sbp.handwritten.specs import split_over, without
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
      drop: mesh axes that a reduction no longer runs over, by the id of its node; a division that
          belongs to it has an entry of its own.
      divide: divisors of results, by the id of the reduction.
      rename: other collectives, by the id of the node.
      over: the mesh axes that a reduction runs over now, by the id of its node.
      unsplit: (region id, result, mesh axis) that out_specs no longer name.
      split: (region id, result, mesh axis, dim) that out_specs name after the edit.
    """

    text: str
    source: tuple[SourceEdit, ...] = ()
    reduce: tuple[Reduce, ...] = ()
    drop: dict[int, tuple[str, ...]] = field(default_factory=dict)
    divide: dict[int, int] = field(default_factory=dict)
    rename: dict[int, str] = field(default_factory=dict)
    over: dict[int, tuple[str, ...]] = field(default_factory=dict)
    unsplit: tuple[tuple[int, int, str], ...] = ()
    split: tuple[tuple[int, int, str, int], ...] = ()
    options: tuple[OptionEdit, ...] = ()

    def with_option(self, option: OptionEdit) -> GraphEdit:
        """The edit with one more argument changed."""
        return replace(self, options=(*self.options, option))

    def touched(self) -> frozenset[int]:
        """The ids of the nodes that it changes."""
        return frozenset(
            (
                *(r.node for r in self.reduce),
                *self.drop,
                *self.divide,
                *self.rename,
                *self.over,
                *(u[0] for u in self.unsplit),
            )
        )


def edited(graph: Graph, edit: GraphEdit, sizes: dict[str, int]) -> Graph:
    """The edited program.

    Arguments:
      graph: the whole program.
      edit: the edit.
      sizes: devices along each mesh axis.
    """
    avals = dict(graph.avals)
    top = max((n.id for n in _everywhere(graph)), default=0)
    return _Editor(
        edit, sizes, avals, itertools.count(max(avals, default=0) + 1), itertools.count(top + 1)
    ).graph(graph, None)


def bytes_sent(graph: Graph) -> float:
    """Bytes that one device sends in the collectives of all regions, times the trips of loops."""
    total = 0.0
    for node in graph.nodes:
        inner = [bytes_sent(region) for region in node.regions]
        total += amount(node, inner)
        total += handwritten_bytes(node) if node.op == SHARD_MAP else 0.0
    return total


def _everywhere(graph: Graph) -> Iterator[Node]:
    for node in graph.walk():
        yield node
        if node.op == SHARD_MAP:
            yield from _everywhere(node.params["body"])


@dataclass(frozen=True, slots=True, eq=False)
class _Editor:
    edit: GraphEdit
    sizes: dict[str, int]
    avals: dict[int, Any]
    value_ids: Iterator[int]
    node_ids: Iterator[int]

    def graph(self, graph: Graph, region: Node | None) -> Graph:
        """A graph after the edits of its nodes; `region` is the shard_map that the graph is a body
        of."""
        alias: dict[int, Operand] = {}
        nodes: list[Node] = []

        def read(operand: Operand) -> Operand:
            return operand if isinstance(operand, Constant) else alias.get(operand, operand)

        for node in graph.nodes:
            inputs = [read(o) for o in node.inputs]
            for add in self.edit.reduce:
                if add.node == node.id and node.op != SHARD_MAP and not add.after:
                    inputs[add.operand] = self.collective(add, inputs[add.operand], node, nodes)
            node = self.renewed(replace(node, inputs=tuple(inputs)))
            gone = self.edit.drop.get(node.id)
            if gone is not None:
                left = tuple(a for a in node.params.get("axes", ()) if a not in gone)
                if not left:
                    alias.update(zip(node.outputs, inputs, strict=False))
                    continue
                node = replace(node, params=node.params | {"axes": left})
            nodes.append(node)
            for add in self.edit.reduce:
                if add.node == node.id and add.after:
                    output = node.outputs[add.operand]
                    alias[output] = self.collective(add, output, node, nodes)
            if node.id in self.edit.divide:
                like = replace(node, library=(PMEAN,) if "axes" in node.params else ())
                for output in node.outputs:
                    alias[output] = self.divided(output, self.edit.divide[node.id], like, nodes)
        outputs = [read(o) for o in graph.outputs]
        for add in self.edit.reduce:
            if region is not None and add.node == region.id:
                outputs[add.operand] = self.collective(add, outputs[add.operand], region, nodes)
        return replace(graph, nodes=tuple(nodes), outputs=tuple(outputs), avals=self.avals)

    def renewed(self, node: Node) -> Node:
        """A node after the edits of its bodies and parameters."""
        if node.op == SHARD_MAP:
            node = replace(
                node,
                params=node.params
                | {
                    "body": self.graph(node.params["body"], node),
                    "out_specs": respecified(node, self.edit),
                },
            )
        if node.id in self.edit.rename:
            node = replace(node, op=self.edit.rename[node.id])
        if node.id in self.edit.over:
            node = replace(node, params=node.params | {"axes": self.edit.over[node.id]})
        return (
            replace(node, regions=tuple(self.graph(r, None) for r in node.regions))
            if node.regions
            else node
        )

    def aval(self, operand: Operand) -> Any:
        return operand.aval if isinstance(operand, Constant) else self.avals[operand]

    def node(
        self,
        like: Node,
        op: str,
        params: dict[str, Any],
        inputs: Sequence[Operand],
        aval: Any,
        nodes: list[Node],
    ) -> int:
        output = next(self.value_ids)
        self.avals[output] = aval
        new = next(self.node_ids)
        nodes.append(
            replace(
                like,
                id=new,
                op=op,
                primitive=lax.div_p if op == lax.div_p.name else None,
                params=params,
                inputs=tuple(inputs),
                outputs=(output,),
                regions=(),
            )
        )
        return output

    def collective(self, add: Reduce, operand: Operand, like: Node, nodes: list[Node]) -> Operand:
        aval = self.aval(operand)
        span = Span(file="<edit>", line=next(self.node_ids), column=1, end_column=1)
        library = (PMEAN,) if add.divisor > 1 else ()
        like = replace(like, span=span, stack=(span,), library=library)
        shape, n = list(aval.shape), 1
        for a in add.mesh_axes:
            n *= self.sizes[a]
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
        out = self.node(
            like, add.collective, params, [operand], _jax.empty_aval(shape, aval.dtype), nodes
        )
        return self.divided(out, add.divisor, like, nodes) if add.divisor > 1 else out

    def divided(self, operand: int, divisor: int, like: Node, nodes: list[Node]) -> int:
        aval = self.avals[operand]
        return self.node(
            like,
            lax.div_p.name,
            {},
            [operand, constant(np.asarray(divisor, aval.dtype))],
            aval,
            nodes,
        )


def respecified(region: Node, edit: GraphEdit) -> tuple[Any, ...]:
    """The types of a region's results after an edit, as the region states them."""
    specs = list(region.params["out_specs"])
    for node, result, mesh_axis in edit.unsplit:
        if node == region.id:
            specs[result] = without(specs[result], mesh_axis)
    for node, result, mesh_axis, dim in edit.split:
        if node == region.id:
            specs[result] = split_over(specs[result], mesh_axis, dim)
    return tuple(specs)
