"""Helps that leave all pins as they are: annotations before the line of a fault, and policies that
allow more."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from sbp.annotations import annotate_p
from sbp.errors import Edit, OptionEdit, SourceEdit
from sbp.explain.edits import alike, in_gradient, insert_pin
from sbp.explain.names import Names
from sbp.infer.because import ReadBecause
from sbp.infer.check import CheckResult
from sbp.infer.constraints import System, allowed
from sbp.infer.flow import End
from sbp.infer.literals import state_literal
from sbp.infer.request import Request
from sbp.infer.space import Code, decode, encode
from sbp.limits import (
    POLICIES,
    Policy,
    boxing_option,
    boxing_text,
    policies_in,
    policy_mark,
    with_policy,
)
from sbp.signatures import rule_for
from sbp.source.editing import converted, reads
from sbp.source.policies import Region, loosened_policies, under_policy
from sbp.source.reader import SourceRead, first_argument, users_span
from sbp.source.text import contains
from sbp.trace.graph import Graph, Node


def policy_at(request: Request, node: Node, position: int) -> Policy:
    """The policy that holds for what a node reads on one mesh axis: that of its region, of the axis
    or of the program."""
    return request.rules(node).policies[position]


def axis_rows(request: Request, node: Node, position: int) -> Sequence[Any]:
    """The rows of a node on one mesh axis that the policy there allows."""
    ins, outs = (
        [request.graph.aval(o) for o in node.inputs],
        [request.graph.avals[o] for o in node.outputs],
    )
    table = request.caches.table(
        request.mesh, communicates=policy_at(request, node, position) == "auto"
    )
    return (
        table.axis_rows(node, ins, outs, request.mesh.sizes[position])
        if rule_for(node.op) is not None
        else ()
    )


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Candidate:
    """A change that may give a typing: its words, its edits, and what it does to the constraints.

    Arguments:
      text: the change in words.
      edits: the change itself.
      make: the program after it.
      without: (mesh axis, name) of constraints that the change takes away.
      assumed: literals of states on the fault's mesh axis, one of which holds after the change;
          empty for any.
      inserts: whether it is an annotation more, which leaves all pins as they are.
      instead: a smaller change; where that is accepted, this one is not needed.
    """

    text: str
    edits: tuple[Edit, ...]
    make: Callable[[], Request]
    without: frozenset[tuple[str, str]]
    assumed: tuple[str, ...] = ()
    inserts: bool = False
    instead: Candidate | None = None


@dataclass(frozen=True, slots=True)
class Insertions:
    """Annotations before the line of a fault.

    Arguments:
      base: the program.
      fault: what is wrong.
      made: for each operand of the line the codes that it comes in.
      node: where it shows.
      names: of the program's values.
      system: the constraints of the fault's mesh axis.
      large: whether candidates are few.
    """

    base: Request
    fault: CheckResult
    made: Mapping[int, tuple[Code, ...]]
    node: Node
    names: Names
    system: System
    large: bool

    def candidates(self) -> Iterator[Candidate]:
        """Annotations before the line: on the operands that do not fit a row that the others fit,
        then on what enters the line."""
        node = self.node
        if self.fault.sink[0].kind == "region":
            yield from self.at_region()
            return
        if node.span == users_span(node):
            wanted: list[dict[int, Code]] = []
            policy = policy_at(self.base, node, self.system.position)
            for row in axis_rows(self.base, node, self.system.position):
                codes = {i: encode(row.ins[i]) for i in self.made}
                wrong = {
                    i: c
                    for i, c in codes.items()
                    if not any(allowed(m, c, policy) for m in self.made[i])
                }
                each = {(node.inputs[i], c) for i, c in wrong.items()}
                if (
                    wrong
                    and min(wrong.values()) >= 0
                    and len({o for o, _ in each}) == len(each)
                    and wrong not in wanted
                ):
                    wanted.append(wrong)
            for wrong in wanted:
                if len(wrong) == min(map(len, wanted)):  # no more annotations than it takes
                    values = {
                        node.inputs[i]: (self.names.read(node, i), c) for i, c in wrong.items()
                    }
                    yield from self.insertion(values)
        for value in self.entering():
            name = self.names.entering(value, node, alone=True)
            if name and reads(users_span(node), name):
                yield from (
                    candidate
                    for code in self.codes(value)
                    for candidate in self.insertion({value: (SourceRead(name), code)})
                )

    def at_region(self) -> Iterator[Candidate]:
        """Annotations of what enters a loop or branch."""
        for c, wanted in zip(self.fault.sink, self.fault.wanted, strict=True):
            value = c.convert.value if c.convert else -1
            entered = [i for i, o in enumerate(self.node.inputs) if o == value]
            maker = self.names.makers.get(value)
            name = self.names.value(value)
            read = SourceRead(name) if name else None
            entry = c.because.entry if isinstance(c.because, ReadBecause) else None
            if entry is not None and entry.kind == "predicate":
                read = first_argument(self.node)
                while (
                    maker is not None
                    and maker.op == "convert_element_type"
                    and maker.span == self.node.span
                ):
                    value = maker.inputs[0]
                    maker = self.names.makers.get(value) if isinstance(value, int) else None
            if entered and read is not None and isinstance(value, int):
                for code in (c for c in self.codes(value) if c in wanted):
                    yield from self.insertion({value: (read, code)})

    def entering(self) -> list[int]:
        """The values that bring the pinned types into the line, last ones first."""
        here = users_span(self.node)
        found: dict[int, None] = {}
        for c in reversed(self.fault.equations):
            maker = self.names.makers.get(c.convert.value) if c.convert else None
            if (
                c.convert
                and c.node
                and users_span(c.node) == here
                and (maker is None or users_span(maker) != here)
            ):
                found[c.convert.value] = None
        return list(found)

    def codes(self, value: int) -> list[Code]:
        """What a value may be annotated as: B, and splits of a dim that divides. Under vmap the
        user does not see all dims."""
        shape = self.base.graph.avals[value].shape
        n = self.base.mesh.sizes[self.system.position]
        split = not self.large and "vmap(" not in self.node.scope
        return [0, *(1 + d for d, size in enumerate(shape) if split and size % n == 0)]

    def insertion(
        self, values: Mapping[Any, tuple[SourceRead | None, Code]]
    ) -> Iterator[Candidate]:
        """Annotations of values, by name, before the line that reads them; none when the user has
        no name for one of them."""
        axis, line = self.fault.mesh_axis, users_span(self.node)
        readers = [
            n
            for n in self.base.graph.walk()
            if users_span(n) == line and not in_gradient(n) and n.op != annotate_p.name
        ]
        calls, freed, assumed = list[str](), set[tuple[str, str]](), tuple[str, ...]()
        edits, variables = list[SourceEdit](), list[bool]()
        make: Callable[[], Request] = functools.partial(_same, self.base)
        for value, (read, code) in values.items():
            reader = next((n for n in readers if value in n.inputs), None)
            maker = self.names.makers.get(value)
            inline = (
                maker is not None
                and maker.op == annotate_p.name
                and maker.span
                and line
                and maker.span.line == line.line
            )
            hidden = code > 0 and "vmap(" in self.node.scope  # dims that the user does not see
            if reader is None or read is None or line is None or inline or hidden:
                return
            number = reader.inputs.index(value)
            lines = dict.fromkeys(n.inputs[number] for n in readers if alike(n, reader))
            reads = [
                c
                for c in self.system.constraints
                if c.convert is not None and c.convert.value in lines
            ]
            freed |= {(axis, c.name) for c in reads}
            variables.append(read.variable)
            others = [
                self.names.value(o) for o in lines if o != value
            ]  # what a library does to each leaf of a tree in one line
            known = [SourceRead(o) for o in others if o.isidentifier() and variables[-1]]
            for each in dict.fromkeys((read, *known)):
                calls.append(
                    f'sbp.replicate({each.code}, "{axis}")'
                    if code == 0
                    else f'sbp.split({each.code}, {code - 1}, "{axis}")'
                )
                made = converted(line, each, {axis: decode(code)})
                if not made:
                    return
                edits += made
            ends = (
                c.convert.target for c in self.fault.sink if c.convert and c.convert.value == value
            )
            end = next(ends, None)
            assumed = assumed or (states_of(self.system, end, code) if end else ())
            if end and not assumed:
                return
            make = functools.partial(_inserted, make, reader, number, self.system.position, code)
        if line:
            where = "before" if all(variables) else "at"
            yield Candidate(
                text=f"{' and '.join(calls)} {where} line {line.line}",
                edits=tuple(edits),
                make=make,
                without=frozenset(freed),
                assumed=assumed,
                inserts=True,
            )


def _same(request: Request) -> Request:
    return request


def _inserted(
    make: Callable[[], Request], node: Node, number: int, position: int, code: Code
) -> Request:
    return insert_pin(make(), node, number, position, code)


def states_of(system: System, end: End, code: Code) -> tuple[str, ...]:
    """The literals of the states in which an end has a code."""
    return tuple(
        state_literal(end.variable, i)
        for i, s in enumerate(system.variables[end.variable].states)
        if s[end.column] == code
    )


# ---- policies -----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Blamed:
    """The policy that a fault is due to.

    Arguments:
      node: what reads under it, where the fault shows if it holds there.
      policy: which.
      origin: whether it is the program's, that of the mesh axis, or that of a region around the
          node.
    """

    node: Node | None
    policy: Policy
    origin: Literal["program", "axis", "region"]


def blamed(request: Request, fault: CheckResult) -> Blamed | None:
    """The policy that a fault is due to, if it is to one: where the fault shows, else the last
    place before that has one."""
    if not fault.policy:
        return None
    position = request.mesh.names.index(fault.mesh_axis)
    for c in (*fault.sink, *reversed(fault.equations)):
        policy = (
            c.convert.rules.policies[position] if c.convert and not c.convert.unless else "auto"
        )
        if policy != "auto":
            return Blamed(c.node, policy, request.origin(c.node, position))
    return None


@dataclass(frozen=True, slots=True)
class Looser:
    """A policy that allows more.

    Arguments:
      key: which policy, and where.
      text: the change in words.
      edits: the change itself.
      make: a program under it.
      wide: whether it changes more than the line of the fault, so that it is for when nothing less
          gives a typing.
    """

    key: tuple[Any, ...]
    text: str
    edits: tuple[Edit, ...]
    make: Callable[[Request], Request]
    wide: bool = False


def loosened(request: Request, found: Blamed, position: int) -> Iterator[Looser]:
    """The policies that allow more in place of one that is to blame, on one mesh axis; those of the
    program on all that have no other.

    Regions have no names, and what two of them share is not told apart: so a region's policy gives
    way at the line alone, or in all regions that have it.
    """
    names = request.mesh.names
    per_axis: tuple[Policy | None, ...] = request.axis_policies or (None,) * len(names)
    looser, axis = POLICIES[: POLICIES.index(found.policy)][::-1], names[position]
    line = users_span(found.node) if found.node else None
    if found.origin == "program":
        for policy in looser:
            yield Looser(
                (policy,),
                boxing_text(policy, request.axis_policies, names),
                (boxing_edit(policy, request.axis_policies, names),),
                functools.partial(_based, policy),
            )
        return
    if found.origin == "axis":
        for policy in looser:
            other: tuple[Policy | None, ...] = tuple(
                policy if k == position else p for k, p in enumerate(per_axis)
            )
            yield Looser(
                (axis, policy),
                boxing_text(request.boxing, other, names),
                (boxing_edit(request.boxing, other, names),),
                functools.partial(_on_axes, other),
            )
        return
    if line:
        for policy in looser:
            region = under_policy(line, policy, axis)
            if region is None:
                break
            here = functools.partial(_under, region, policy_mark(policy, axis))
            text = f'put line {line.line} under sbp.policy("{policy}", "{axis}")'
            yield Looser((axis, policy, line), text, region.edits, here)
    for policy in looser:
        text = f'"{policy}" instead of "{found.policy}" on `{axis}` in every sbp.policy'
        edits = _policy_edits(request.graph, found.policy, policy, axis)
        if edits:
            everywhere = functools.partial(_everywhere, found.policy, policy, axis)
            yield Looser((axis, policy, found.policy), text, edits, everywhere, wide=True)


def _policy_edits(graph: Graph, old: Policy, new: Policy, axis: str) -> tuple[SourceEdit, ...]:
    """Edits of all regions that set a policy on a mesh axis; none where the source does not show
    all of them.

    Arguments:
      graph: the program.
      old: the policy of these regions.
      new: the policy in its place.
      axis: the mesh axis.
    """
    concerned = [
        node
        for node in graph.walk()
        if node.stack and any(p == old and a in ("", axis) for p, a in policies_in(node.scope))
    ]
    files = dict.fromkeys(span.file for node in concerned for span in node.stack)
    found = [one for file in files for one in loosened_policies(file, old, new, axis)]
    shown = all(
        any(contains(one.body, span) for one in found for span in node.stack) for node in concerned
    )
    return tuple(one.edit for one in found) if shown else ()


def boxing_edit(
    base: Policy, per_axis: Sequence[Policy | None], names: Sequence[str]
) -> OptionEdit:
    """The edit that gives `sbp.jit` these policies.

    Arguments:
      base: the policy of mesh axes without one of their own.
      per_axis: the policy of each mesh axis, or None.
      names: the mesh axes.
    """
    return OptionEdit(option="boxing", value=boxing_option(base, per_axis, names))


def _based(policy: Policy, request: Request) -> Request:
    return replace(request, boxing=policy)


def _on_axes(policies: tuple[Policy | None, ...], request: Request) -> Request:
    return replace(request, axis_policies=policies)


def _under(region: Region, mark: str, request: Request) -> Request:
    """The program with a statement in a region of its own, and so all that is called from there."""

    def visit(graph: Graph, inside: bool) -> Graph:
        nodes: list[Node] = []
        for node in graph.nodes:
            here = inside or region.runs(node.stack)
            regions = tuple(visit(r, here) for r in node.regions)
            nodes.append(
                replace(node, scope=f"{node.scope}/{mark}" if here else node.scope, regions=regions)
            )
        return replace(graph, nodes=tuple(nodes))

    return replace(request, graph=visit(request.graph, False))


def _everywhere(old: Policy, new: Policy, axis: str, request: Request) -> Request:
    """The program with another policy in all regions that have one on a mesh axis."""

    def visit(graph: Graph) -> Graph:
        nodes = (
            replace(
                n, scope=with_policy(n.scope, old, new, axis), regions=tuple(map(visit, n.regions))
            )
            for n in graph.nodes
        )
        return replace(graph, nodes=tuple(nodes))

    return replace(request, graph=visit(request.graph))
