"""Candidates for the repair of a finding: reductions dropped, added, moved or replaced, each as an
edit of the program and of its source; and the programs after these edits.

An edit is offered only where the source shows its place: an expression, a variable or a call of the
user, in every call of its line. Functions that are differentiated inside a region are not edited,
because their gradient is already traced.

Edits of the source have spans of the original text. Two insertions wrap an expression in a call,
and two deletions remove a call, so the edits of one help may nest.
"""

import ast
import functools
import itertools
import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import jax
import numpy as np

from sbp import _jax
from sbp.errors import OptionEdit, SourceEdit
from sbp.handwritten.emulation import (
    function_of,
    inner_graphs,
    is_bound,
    nodes_of,
    outs_of,
    split_over,
    with_graphs,
    without,
)
from sbp.handwritten.measured import PMEAN, Fault, Finding
from sbp.handwritten.sites import CollectiveCall, Site, Sites
from sbp.machine.mesh import MeshSpec
from sbp.source.editing import (
    Edits,
    after_statement,
    axes_text,
    divide_by_sizes,
    in_order,
    into_call,
    sizes_text,
)
from sbp.source.reader import (
    exact_text,
    expression_at,
    name_called,
    source_text,
    span_of,
    users_span,
)
from sbp.trace.collectives import CALLED, REDUCING_CALLS, SHARD_MAP, names_of
from sbp.trace.graph import Graph, Node, Operand, constant
from sbp.trace.slices import Writer
from sbp.types import Split, Unreduced

# ---- edits of the program -----------------------------------------------------------------------
# They drop, add, move or replace reductions. The edited program is checked like the original.


@dataclass(frozen=True, slots=True)
class Reduce:
    """An all-reduce of one result of a node, or of a region's body. All readers get the reduced
    value.

    Arguments:
      node: the id of the node that makes the value, or of the region.
      result: the position of the result.
      mesh_axes: the mesh axes to reduce over.
      collective: `psum`, `pmax` or `pmin`; `reduce_scatter` or `all_gather` for a region's result.
      divisor: the number that divides the result; 1 for a plain reduction.
      dim: the dim that is scattered or gathered.
    """

    node: int
    result: int
    mesh_axes: tuple[str, ...]
    collective: str = CALLED["sum"]
    divisor: int = 1
    dim: int = 0


@dataclass(frozen=True, slots=True)
class GraphEdit:
    """An edit of a program.

    Arguments:
      text: the edit in words.
      source: the edit as edits of the source.
      options: the edit as new values of arguments of `jax.shard_map`.
      reduce: collectives that are added.
      nodes: the nodes in the place of others, by the id; None for a reduction or a division that is
          dropped.
      divide: divisors of results, by the id of the reduction.
      place: the values that are reduced. Only the first accepted repair of a place is offered.
    """

    text: str
    source: tuple[SourceEdit, ...] = ()
    reduce: tuple[Reduce, ...] = ()
    nodes: dict[int, Node | None] = field(default_factory=dict)
    divide: dict[int, int] = field(default_factory=dict)
    options: tuple[OptionEdit, ...] = ()
    place: object = None


def edit_program(graph: Graph, edit: GraphEdit, mesh: MeshSpec) -> Graph:
    """The whole program `graph` after an edit."""
    ids = itertools.count(max((n.id for n in nodes_of(graph)), default=0) + 1)
    avals = dict(graph.avals)  # gets the new values of all graphs

    def edited(graph: Graph, region: Node | None) -> Graph:
        """A graph after the edits of its nodes; `region` is the shard_map that the graph is a body
        of."""
        alias = dict[Operand, Operand]()
        writer = Writer(replace(graph, avals=avals), frozenset(), ids)

        def reduced(values: list[Operand], like: Node) -> list[Operand]:
            """The results of a node, some of them through a new collective."""
            for add in edit.reduce:
                if add.node == like.id:
                    values[add.result] = _reduced(writer, add, values[add.result], like, mesh)
            return values

        for node in graph.nodes:
            inputs = [alias.get(o, o) for o in node.inputs]
            new = edit.nodes.get(node.id, node)
            if new is None:
                alias.update(zip(node.outputs, inputs, strict=False))
                continue
            inner = [edited(g, new if new.op == SHARD_MAP else None) for g in inner_graphs(new)]
            node = with_graphs(replace(new, inputs=tuple(inputs)), inner)
            writer.nodes.append(node)
            made = (
                [_divided(writer, v, edit.divide[node.id], node) for v in node.outputs]
                if node.id in edit.divide
                else [*node.outputs]
                if node.op == SHARD_MAP
                else reduced([*node.outputs], node)
            )
            alias.update(zip(node.outputs, made, strict=True))
        outputs = [alias.get(o, o) for o in graph.outputs]
        outputs = outputs if region is None else reduced(outputs, region)
        return replace(writer.graph, nodes=tuple(writer.nodes), outputs=tuple(outputs))

    return edited(graph, None)


def _reduced(writer: Writer, add: Reduce, operand: Operand, like: Node, mesh: MeshSpec) -> Operand:
    """The value of a new collective of an operand."""
    aval, n = writer.graph.aval(operand), math.prod(map(mesh.size, add.mesh_axes))
    shape = list(aval.shape)
    params: dict[str, Any] = {"axes": add.mesh_axes, "axis_index_groups": None}
    if add.collective in ("reduce_scatter", "all_gather"):
        gathers = add.collective == "all_gather"
        params = {
            "axis_name": add.mesh_axes,
            "axis_index_groups": None,
            "tiled": True,
            "all_gather_dimension" if gathers else "scatter_dimension": add.dim,
        }
        shape[add.dim] = shape[add.dim] * n if gathers else shape[add.dim] // n
    made, op = _jax.empty_aval(shape, aval.dtype), add.collective
    out = writer.emit(like, made, op=op, primitive=None, params=params, inputs=(operand,))
    return _divided(writer, out, add.divisor, like) if add.divisor > 1 else out


def _divided(writer: Writer, operand: int, divisor: int, like: Node) -> int:
    """The value of a new division of a value."""
    aval, div = writer.graph.aval(operand), jax.lax.div_p
    return writer.emit(
        like,
        aval,
        op=div.name,
        primitive=div,
        params={},
        inputs=(operand, constant(np.asarray(divisor, aval.dtype))),
    )


# ---- edits of the source ------------------------------------------------------------------------


def put_through(site: Site, function: str, arguments: str) -> Edits:
    """The edits that put the value of a site through a function of `jax.lax`."""
    return (
        after_statement(site.spans[0], site.name, function, arguments)
        if site.name
        else tuple(e for span in site.spans for e in into_call(span, function, arguments))
    )


# ---- candidates ---------------------------------------------------------------------------------


Variants = tuple[GraphEdit, ...]
"""One repair with its variants: a sum and a mean, where either may be meant. The first one that is
right is offered."""


# ---- repairs ------------------------------------------------------------------------------------


READS_OF_PARTIAL = ("nonlinear", "product", "ratio", "added", "scales", "mixed", "own-block")
"""Kinds of faults in which an operation reads a value that is to be reduced first."""


class Repairs:
    """Finds candidates.

    Arguments:
      graph: the whole program.
      mesh: its mesh.
    """

    def __init__(self, graph: Graph, mesh: MeshSpec) -> None:
        self.mesh, self.sites = mesh, Sites(graph)

    def of(self, finding: Finding) -> Iterator[Variants]:
        """The candidates for a finding, the likeliest first."""
        fault, axes = finding.fault, finding.mesh_axes
        match fault.kind:
            case "doubled":
                yield from self.drop(fault.node, axes)
                yield from self.average(fault.node, axes)
            case "blocks":
                yield from self.drop(fault.node, axes)
            case "averaged" if PMEAN in fault.node.library:  # another divisor may be meant
                yield from self.rename(fault.made, CALLED["sum"])
            case "pending" | "scaled" if fault.made is not None:
                yield from self.average_loss(fault.made, axes)
                yield from self.average(fault.made, axes)
                yield from self.drop(fault.made, axes)
                yield from self.divide(finding.observer, axes)
            case "monoid":
                yield from self.rename(fault.node, reduction_of(fault))
            case "missing":
                yield from self.redirect(finding)
                yield from self.reduce(finding)
            case "partial-as-split" if isinstance(finding.claim, Split):
                yield from self.scatter(finding, finding.claim.dim)
            case "split-as-whole" | "wrong-dim":
                yield from self.split_as_it_is(finding)
                if fault.kind == "split-as-whole":
                    yield from self.gather(finding)
            case "copies-as-split":
                if fault.made is not None:  # a sum over the shards of what was to stay split
                    yield from self.drop(fault.made, axes)
                yield (self.leave_out_axes(finding, GraphEdit("")),)
            case kind if kind in READS_OF_PARTIAL:
                yield from self.redirect(finding)
                yield from self.reduce_earlier(finding)
            case _:
                pass

    # ---- other reductions in place of one -------------------------------------------------------

    def drop(self, node: Node, axes: tuple[str, ...]) -> Iterator[Variants]:
        """A reduction left out, or over fewer axes."""
        if (edit := self.without(node, axes)) is not None:
            yield (edit,)

    def average(self, node: Node, axes: tuple[str, ...]) -> Iterator[Variants]:
        """A mean instead of a sum."""
        call = self.call(node)
        n = self.size(axes)
        if call is None:
            return
        divide, over = {m.id: n for m in call.nodes}, {*names_of(node)}
        if "axes" not in node.params or (call.name == CALLED["sum"] and {*axes} < over):
            yield (
                GraphEdit(
                    f"divide {call.text} by {n}, the size of {_names(axes)}",
                    divide_by_sizes(call.span, axes),
                    divide=divide,
                ),
            )
        elif call.name == CALLED["sum"] and {*axes} == over:
            source = call.renamed(CALLED["mean"])
            yield (GraphEdit(f"use lax.pmean in place of {call.text}", source, divide=divide),)

    def average_loss(self, node: Node, axes: tuple[str, ...]) -> Iterator[Variants]:
        """The mean of the devices' losses in place of their own, whose gradients JAX adds up."""
        site, sums = self.sites.loss(node), self.sites.sums(node, axes)
        if site is None or not sums or not (node.in_gradient or node is site.values[0][0]):
            return
        text = f"take lax.pmean(.., {axes_text(axes)}) of the loss {site.text}"
        source, loss = put_through(site, CALLED["mean"], axes_text(axes)), site.values[0][0]
        call = expression_at(site.spans[0])[0]
        if isinstance(call, ast.Call) and name_called(call) == CALLED["sum"]:
            if {*names_of(loss)} != {*axes}:
                return
            text, sums = f"use lax.pmean in place of {site.text}", [*sums, loss]
            source = CollectiveCall(text, site.spans[0], call, (loss,)).renamed(CALLED["mean"])
        yield (GraphEdit(text, source, divide={n.id: self.size(axes) for n in sums}),)

    def divide(self, observer: Node | None, axes: tuple[str, ...]) -> Iterator[Variants]:
        """A division instead of a `lax.pmean` of gradients that JAX has added up already."""
        call = None if observer is None else self.call(observer)
        if (
            observer is not None
            and call is not None
            and call.name == CALLED["mean"]
            and {*names_of(observer)} == {*axes}
            and call.call.args
        ):
            text = f"divide by {sizes_text(axes)} in place of {call.text}"
            source = divide_by_sizes(
                call.span, axes, exact_text(span_of(call.call.args[0], call.span.file))
            )
            yield (GraphEdit(text, source, nodes=_dropped(call.nodes)),)

    def rename(self, node: Node | None, op: str) -> Iterator[Variants]:
        """Another reduction."""
        call = None if node is None else self.call(node)
        if call is not None and op and call.name in REDUCING_CALLS:
            nodes = {n.id: replace(n, op=op) for n in call.nodes} | _dropped(
                d for n in call.nodes for d in self.divisions(n)
            )
            yield (
                GraphEdit(f"use lax.{op} in place of {call.text}", call.renamed(op), nodes=nodes),
            )

    def redirect(self, finding: Finding) -> Iterator[Variants]:
        """A sum of each call over another mesh axis; the result stays split along the first one."""
        body: Graph = finding.region.params["body"]
        for node in {(users_span(n), n.op, names_of(n)): n for n in body.walk()}.values():
            over = {*names_of(node)}
            others = tuple(a for a in self.mesh.names if a in over - {*finding.mesh_axes})
            call = self.call(node) if others and {*others} == over else None
            if call is None or call.name != CALLED["sum"]:
                continue
            own = axes_text(finding.mesh_axes)
            text = f"write {own} in place of {axes_text(others)} in {call.text}"
            change = GraphEdit(
                text,
                source=call.over(finding.mesh_axes),
                nodes={n.id: _over(n, finding.mesh_axes) for n in call.nodes},
            )
            yield (change,)
            for dim in range(len(self.result_shape(finding))) if finding.claim is not None else ():
                also = f"{_names(others)} at dim {dim} in {_outs(finding)}"
                yield (
                    _specified(
                        finding,
                        replace(change, text=f"{text}, and {also}"),
                        functools.partial(split_over, dim=dim),
                        others,
                    ),
                )

    # ---- a reduction more -----------------------------------------------------------------------

    def reduce(self, finding: Finding) -> Iterator[Variants]:
        """A reduction of a value where it becomes partial, or of a region's result."""
        op = reduction_of(finding.fault)
        body: Graph = finding.region.params["body"]
        maker, _ = self.sites.makers.get(body.outputs[finding.result], (None, 0))
        sites = [self.sites.value(node) for node in (finding.fault.made, maker) if node is not None]
        for site in dict.fromkeys(s for s in sites if s) if op else ():
            yield self.reduction(finding, site, op)

    def reduction(
        self,
        finding: Finding,
        site: Site,
        op: str,
        late: GraphEdit | None = None,
    ) -> Variants:
        """A reduction of a value, as a sum and, where either may be meant, as a mean; `late`
        changes another reduction, which comes too late, and is None where that is kept."""
        axes, n = finding.mesh_axes, self.size(finding.mesh_axes)
        named = axes_text(finding.mesh_axes)

        def edit(name: str, divisor: int) -> GraphEdit:
            change = GraphEdit("") if late is None else late
            also = "" if late is None else f", and {late.text}"
            return replace(
                change,
                text=f"reduce {site.text} with lax.{name}(.., {named}){also}",
                source=in_order((*put_through(site, name, named), *change.source)),
                reduce=tuple(Reduce(node.id, k, axes, op, divisor) for node, k in site.values),
                place=(op, site),
            )

        # Where nothing averages, a mean of parts would be right only because of another fault.
        averaged = finding.observer is not None and self.divisions(finding.observer)
        may_mean = op == CALLED["sum"] and (finding.means or averaged)
        made, read = self.bounds(site) if op == CALLED["sum"] else (False, False)
        if made:  # a sum of bounded parts is not the bounded sum
            return ()
        may_mean = may_mean and not read  # its mean has another bound
        ways = [edit(op, 1), *([edit(CALLED["mean"], n)] if may_mean else [])]
        return tuple(reversed(ways) if finding.means else ways)

    def bounds(self, site: Site) -> tuple[bool, bool]:
        """Whether a constant bounds a value where it is made, and where it is read."""
        readers = (r for n, k in site.values for r in self.sites.readers[n.outputs[k]])
        return any(is_bound(n) for n, _ in site.values), any(map(is_bound, readers))

    def scatter(self, finding: Finding, dim: int) -> Iterator[Variants]:
        """A partial result that is returned as split: scattered, or reduced and returned as
        whole."""
        site, axes, named = self.result(finding), finding.mesh_axes, axes_text(finding.mesh_axes)
        if site is None:
            return
        if self.result_shape(finding)[dim] % self.size(axes) == 0:
            yield _resharded(finding, site, "scattered", "scatter_dimension", dim)
        edit = GraphEdit(
            f"reduce {site.text} with lax.psum(.., {named}), and ",
            into_call(site.spans[0], CALLED["sum"], named),
            (Reduce(finding.region.id, finding.result, axes),),
        )
        yield (self.leave_out_axes(finding, edit),)

    def gather(self, finding: Finding) -> Iterator[Variants]:
        """A split result that is returned as whole."""
        site = self.result(finding)
        if site is None:
            return
        for dim in range(len(self.result_shape(finding))):
            yield _resharded(finding, site, "gathered", "axis", dim)

    def split_as_it_is(self, finding: Finding) -> Iterator[Variants]:
        """A split result that is stated to be split along its own dim."""

        def change(spec: Any, mesh_axis: str) -> Any:
            return split_over(without(spec, mesh_axis), mesh_axis, dim)

        for dim in (a.dim for a in finding.fault.atoms if isinstance(a, Split)):
            text = f"split dim {dim} over {_names(finding.mesh_axes)} in {_outs(finding)}"
            yield (_specified(finding, GraphEdit(text), change, finding.mesh_axes),)

    def leave_out_axes(self, finding: Finding, edit: GraphEdit) -> GraphEdit:
        """An edit after which the result is stated to be whole on the mesh axes of the finding."""
        return _specified(
            finding,
            replace(
                edit, text=f"{edit.text}leave {_names(finding.mesh_axes)} out of {_outs(finding)}"
            ),
            without,
            finding.mesh_axes,
        )

    # ---- a reduction before the operation that is at fault --------------------------------------

    def reduce_earlier(self, finding: Finding) -> Iterator[Variants]:
        """A reduction where the value becomes partial; the later reduction is dropped or kept."""
        made = finding.fault.made
        site = None if made is None else self.sites.value(made)
        if site is None:
            return
        op = reduction_of(finding.fault) or CALLED["sum"]
        late = finding.observer
        gone = self.without(late, finding.mesh_axes) if late is not None else None
        for change in (None,) if gone is None else (gone, None):
            yield self.reduction(finding, site, op, change)

    # ---- parts of candidates --------------------------------------------------------------------

    def call(self, node: Node) -> CollectiveCall | None:
        """The call of a collective, with all operations that it made; None where no line of the
        user calls it, or a gradient depends on it."""
        span, nodes = users_span(node), self.sites.alike(node)
        call = expression_at(span)[0]
        if span is None or not nodes or node.in_gradient or not isinstance(call, ast.Call):
            return None
        found = CollectiveCall(f"{_expression(node)} at line {span.line}", span, call, nodes)
        return found if found.name in {*REDUCING_CALLS, CALLED["scattered"]} else None

    def without(self, node: Node, axes: tuple[str, ...]) -> GraphEdit | None:
        """A collective without some mesh axes, and its new divisor: a pmean over fewer axes has
        another one."""
        call = self.call(node)
        if call is None or any("axes" not in n.params for n in call.nodes):
            return None
        nodes, divide = dict[int, Node | None](), dict[int, int]()
        for n in call.nodes:
            divisions = self.divisions(n)
            kept = tuple(a for a in n.params["axes"] if a not in axes)
            nodes |= {n.id: _over(n, kept), **_dropped(divisions)}
            left = self.size(tuple(set(names_of(n)) - set(axes)))
            if divisions and left > 1:
                divide[n.id] = left
        kept = tuple(a for a in names_of(call.nodes[0]) if a not in axes)
        text = f"drop {call.text}"
        if kept:
            text = f"drop {_names(axes)} from {call.text}"
        elif call.call.args and isinstance(call.call.args[0], ast.Call):
            inner = source_text(span_of(call.call.args[0], call.span.file))
            text = f"put `{inner}` in place of {call.text}"
        return GraphEdit(text, call.over(kept), nodes=nodes, divide=divide)

    def divisions(self, node: Node) -> tuple[Node, ...]:
        """The divisions of a pmean."""
        return tuple(
            d
            for d in self.sites.graph(node).nodes
            if PMEAN in d.library and d.inputs[0] in node.outputs
        )

    def result(self, finding: Finding) -> Site | None:
        """The expression that a region returns, and nothing else reads."""
        made = self.sites.makers.get(finding.region.params["body"].outputs[finding.result])
        site = self.sites.value(made[0]) if made is not None else None
        return (
            site
            if made is not None and site is not None and not site.name and site.values == (made,)
            else None
        )

    def result_shape(self, finding: Finding) -> tuple[int, ...]:
        """The local shape of the result that a finding is about."""
        body: Graph = finding.region.params["body"]
        return tuple(body.aval(body.outputs[finding.result]).shape)

    def size(self, axes: tuple[str, ...]) -> int:
        """The number of devices along some mesh axes."""
        return math.prod(self.mesh.size(a) for a in axes)


def _resharded(finding: Finding, site: Site, act: str, dimension: str, dim: int) -> Variants:
    """The result of a region scattered or gathered along a dim; `dimension` is the argument of the
    function of `jax.lax` that takes the dim."""
    arguments = f"{axes_text(finding.mesh_axes)}, {dimension}={dim}, tiled=True"
    return (
        GraphEdit(
            f"return lax.{CALLED[act]}(.., {arguments}) of {site.text}",
            into_call(site.spans[0], CALLED[act], arguments),
            (
                Reduce(
                    finding.region.id,
                    finding.result,
                    finding.mesh_axes,
                    {"scattered": "reduce_scatter", "gathered": "all_gather"}[act],
                    dim=dim,
                ),
            ),
        ),
    )


def reduction_of(fault: Fault) -> str:
    """The function of `jax.lax` that reduces the operand at fault; empty when there is none."""
    monoids = [a.monoid for a in fault.atoms if isinstance(a, Unreduced)]
    return CALLED.get(monoids[0], "") if monoids else ""


def _specified(
    finding: Finding, edit: GraphEdit, change: Callable[[Any, str], Any], axes: tuple[str, ...]
) -> GraphEdit:
    """An edit after which the region states another type for its result: the one that comes of the
    old type and a mesh axis, for each of the axes."""
    region, position = finding.region, finding.result
    outs, stated = outs_of(region), [*region.params["out_specs"]]
    stated[position] = spec = functools.reduce(change, axes, stated[position])
    option = OptionEdit(
        option=outs,
        value=repr(spec) if outs == "out_types" else spec,
        position=position,
        function=function_of(region),
    )
    new = replace(region, params=region.params | {"out_specs": tuple(stated)})
    return replace(edit, options=(option,), nodes=edit.nodes | {region.id: new})


def _over(node: Node, axes: tuple[str, ...]) -> Node | None:
    """A reduction over other mesh axes; None for none."""
    return replace(node, params=node.params | {"axes": axes}) if axes else None


def _dropped(nodes: Iterable[Node]) -> dict[int, Node | None]:
    return {node.id: None for node in nodes}


def _expression(node: Node) -> str:
    return f"`{source_text(users_span(node))}`"


def _outs(finding: Finding) -> str:
    return f"{outs_of(finding.region)} of result {finding.result_text}"


def _names(axes: tuple[str, ...]) -> str:
    return ", ".join(f"`{a}`" for a in axes)
