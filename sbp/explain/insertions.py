"""Helps that leave all pins as they are: annotations before the line of a fault, and policies that
allow more."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from sbp.annotations import annotate_p
from sbp.errors import OptionEdit, SourceEdit, Span
from sbp.explain.change import BlamedFault, Change, Looser
from sbp.explain.edits import Placed, Placement, insert_pin
from sbp.infer.accumulation import allowing
from sbp.infer.check import CheckResult
from sbp.infer.constraints import ReadBecause, System, allowed, state_literal
from sbp.infer.flow import End
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
from sbp.signatures import rule_for, traits_of
from sbp.source.editing import Region, converted, loosened_policies, reads, under_policy
from sbp.source.reader import SourceRead, first_argument, users_span
from sbp.source.text import contains
from sbp.trace.graph import Graph, Node

# ---- policies -----------------------------------------------------------------------------------
# Policies that allow more in place of the one to blame.


@dataclass(frozen=True, slots=True)
class Blamed:
    """The policy that a fault is due to.

    Arguments:
      node: the node that reads under the policy: where the fault shows, if the policy applies
          there.
      policy: which.
      origin: whether it is the program's, that of the mesh axis, or that of a region around the
          node.
    """

    node: Node | None
    policy: Policy
    origin: Literal["program", "axis", "region"]


def blamed(request: Request, fault: CheckResult) -> Blamed | None:
    """The policy that is to blame for a fault: the one where the fault shows, else the one at the
    last place before it. None when no policy is to blame."""
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


def loosened(request: Request, found: Blamed, position: int) -> Iterator[Looser]:
    """The policies that allow more than the one that is to blame, and before them the
    `reduce_dtype` with which a cast needs no conversion. The policy of the program changes on all
    mesh axes without a policy of their own, another policy on one axis.

    Regions have no names, so two regions with one policy look alike in the program. A region's
    policy therefore changes only for the line, or in all regions that set it.

    Arguments:
      request: the program.
      found: the policy that is to blame.
      position: the position of the mesh axis.
    """
    dtype = found.node and allowing(request.graph, found.node)
    if dtype and request.reduce_dtype is None:
        yield Looser(
            ("reduce_dtype", dtype),
            f"reduce_dtype=jnp.{dtype}, so that P(sum) passes the cast and is summed in {dtype}",
            (OptionEdit(option="reduce_dtype", value=dtype),),
            functools.partial(replace, reduce_dtype=dtype),
        )
    names = request.mesh.names
    looser, axis = POLICIES[: POLICIES.index(found.policy)][::-1], names[position]
    line = users_span(found.node) if found.node else None
    if found.origin != "region":
        for policy in looser:
            base, per_axis = policy, request.axis_policies
            if found.origin == "axis":
                each = request.axis_policies or (None,) * len(names)
                base = request.boxing
                per_axis = (*each[:position], policy, *each[position + 1 :])
            yield Looser(
                (base, per_axis),
                boxing_text(base, per_axis, names),
                (OptionEdit(option="boxing", value=boxing_option(base, per_axis, names)),),
                functools.partial(replace, boxing=base, axis_policies=per_axis),
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
        any(contains(body, span) for body, _ in found for span in node.stack) for node in concerned
    )
    return tuple(edit for _, edit in found) if shown else ()


def _under(region: Region, mark: str, request: Request) -> Request:
    """The program with a statement, and everything called from it, in a region of its own.

    Arguments:
      region: the statement.
      mark: the mark of the region's policy in a scope.
      request: the program.
    """

    def visit(graph: Graph, inside: bool) -> Graph:
        """The program or a body, which `inside` says is in the region."""
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
    """The program with another policy in all regions that set one on a mesh axis.

    Arguments:
      old: the policy of these regions.
      new: the policy in its place.
      axis: the mesh axis.
      request: the program.
    """

    def visit(graph: Graph) -> Graph:
        """The program or a body with the new policy."""
        nodes = (
            replace(
                n, scope=with_policy(n.scope, old, new, axis), regions=tuple(map(visit, n.regions))
            )
            for n in graph.nodes
        )
        return replace(graph, nodes=tuple(nodes))

    return replace(request, graph=visit(request.graph))


# ---- insertions ---------------------------------------------------------------------------------


def policy_at(request: Request, node: Node, position: int) -> Policy:
    """The policy for the operands of a node on one mesh axis: the policy of its region, of the axis
    or of the program.

    Arguments:
      request: the program.
      node: the node.
      position: the position of the mesh axis.
    """
    return request.rules(node).policies[position]


def axis_rows(request: Request, node: Node, position: int) -> Sequence[Any]:
    """The rows of a node on one mesh axis that the policy there allows.

    Arguments:
      request: the program.
      node: the node.
      position: the position of the mesh axis.
    """
    ins, outs = (
        [request.graph.aval(o) for o in node.inputs],
        [request.graph.avals[o] for o in node.outputs],
    )
    table = request.caches.table(
        request.mesh, communicates=policy_at(request, node, position) == "auto"
    )
    return (
        table.rows_on(node, ins, outs, position, node.id in request.rounding)
        if rule_for(node.op) is not None
        else ()
    )


@dataclass(frozen=True, slots=True)
class Insertions:
    """Annotations before the line of a fault.

    Arguments:
      fault: the fault.
      base: the program without the pins of its other faults.
      node: the node at which the fault shows.
    """

    fault: BlamedFault
    base: Request
    node: Node

    def changes(self) -> Iterator[Change]:
        """Annotations before the line: first on operands that do not fit a row which the other
        operands fit, then on values that enter the line."""
        node = self.node
        if self.fault.found.sink[0].kind == "region":
            yield from self.at_region()
            return
        if node.span == users_span(node):
            wanted: list[dict[int, Code]] = []
            made = self.fault.trials.arriving(self.fault.found).made
            policy = policy_at(self.base, node, self.fault.position)
            for row in axis_rows(self.base, node, self.fault.position):
                codes = {i: encode(row.ins[i]) for i in made}
                wrong = {
                    i: c
                    for i, c in codes.items()
                    if not any(allowed(m, c, policy) for m in made[i])
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
                        node.inputs[i]: (self.fault.names.read(node, i), c)
                        for i, c in wrong.items()
                    }
                    yield from self.insertion(values)
        for value in self.entering():
            name = self.fault.names.entering(value, node, alone=True)
            if name and reads(users_span(node), name):
                yield from (
                    change
                    for code in self.codes(value)
                    for change in self.insertion({value: (SourceRead(name), code)})
                )

    def at_region(self) -> Iterator[Change]:
        """Annotations of the values that enter a loop or a branch."""
        for c, wanted in zip(self.fault.found.sink, self.fault.found.wanted, strict=True):
            value = c.convert.value if c.convert else -1
            entered = [i for i, o in enumerate(self.node.inputs) if o == value]
            maker = self.fault.names.makers.get(value)
            name = self.fault.names.value(value)
            read = SourceRead(name) if name else None
            entry = c.because.entry if isinstance(c.because, ReadBecause) else None
            if entry is not None and entry.kind == "predicate":
                read = first_argument(self.node)
                while (
                    maker is not None
                    and traits_of(maker.op).adapts
                    and maker.span == self.node.span
                ):
                    value = maker.inputs[0]
                    maker = self.fault.names.makers.get(value) if isinstance(value, int) else None
            if entered and read is not None and isinstance(value, int):
                for code in (c for c in self.codes(value) if c in wanted):
                    yield from self.insertion({value: (read, code)})

    def entering(self) -> list[int]:
        """The values that bring the pinned types into the line, last ones first."""
        here = users_span(self.node)
        found: dict[int, None] = {}
        for c in reversed(self.fault.found.equations):
            maker = self.fault.names.makers.get(c.convert.value) if c.convert else None
            if (
                c.convert
                and c.node
                and users_span(c.node) == here
                and (maker is None or users_span(maker) != here)
            ):
                found[c.convert.value] = None
        return list(found)

    def codes(self, value: int) -> list[Code]:
        """The codes that a value may be annotated with: B, and splits of a dim that divides. Under
        `jax.vmap` there are no splits, since the user does not see all dims."""
        shape = self.base.graph.avals[value].shape
        n = self.base.mesh.sizes[self.fault.position]
        split = not self.fault.trials.large and not self.node.is_batched
        return [0, *(1 + d for d, size in enumerate(shape) if split and size % n == 0)]

    def insertion(self, values: Mapping[Any, tuple[SourceRead | None, Code]]) -> Iterator[Change]:
        """Annotations of values before the line that reads them; none when the source does not
        show one of them.

        Arguments:
          values: for each value, how the line reads it and the code to annotate it with.
        """
        line = users_span(self.node)
        readers = [
            n
            for n in self.base.graph.walk()
            if users_span(n) == line and not n.in_gradient and n.op != annotate_p.name
        ]
        found = list[_Annotated]()
        for value, (read, code) in values.items():
            one = self.annotated(value, read, code, readers) if read is not None else None
            if one is None:
                return
            found.append(one)
        if line and found:
            calls = [call for one in found for call in one.calls]
            where = "before" if all(one.is_statement for one in found) else "at"
            yield Change(
                text=f"{' and '.join(calls)} {where} line {line.line}",
                edits=tuple(edit for one in found for edit in one.edits),
                make=functools.partial(_inserted, self.base, found, self.fault.position),
                without=frozenset((self.fault.axis, c) for one in found for c in one.reads),
                assumed=next((one.assumed for one in found if one.assumed), ()),
                kind="conversion",
            )

    def annotated(
        self, value: int, read: SourceRead, code: Code, readers: Sequence[Node]
    ) -> _Annotated | None:
        """An annotation of a value; None when the source does not show it, or when it is annotated
        in the line already.

        Arguments:
          value: the value.
          read: how the line reads it.
          code: the code to annotate it with.
          readers: the nodes of the line.
        """
        axis, line = self.fault.axis, users_span(self.node)
        reader = next((n for n in readers if value in n.inputs), None)
        maker = self.fault.names.makers.get(value)
        inline = (
            maker is not None
            and maker.op == annotate_p.name
            and maker.span
            and line
            and maker.span.line == line.line
        )
        hidden = code > 0 and self.node.is_batched  # dims that the user does not see
        if reader is None or line is None or inline or hidden:
            return None
        if read.variable and self.fault.names.denotes(read.code, reader, value, line) is False:
            return None
        number = reader.inputs.index(value)
        values = {n.inputs[number]: n for n in readers if _alike(n, reader)}
        # A library may do the same to each leaf of a tree in one line: each leaf is annotated.
        others = {o: n for o, n in values.items() if o != value and read.variable}
        every = dict.fromkeys((read, *self.variables(others, line)))
        edits = [converted(line, each, {axis: decode(code)}) for each in every]
        ends = (
            c.convert.target
            for c in self.fault.found.sink
            if c.convert and c.convert.value == value
        )
        end = next(ends, None)
        assumed = states_of(self.fault.system, end, code) if end else ()
        if not all(edits) or (end and not assumed):
            return None
        placement = Placement(self.base.graph, self.fault.names.makers, line, edits[0][0])
        return _Annotated(
            placed=placement.of((value, *others)),
            code=code,
            calls=tuple(
                f'sbp.replicate({each.code}, "{axis}")'
                if code == 0
                else f'sbp.split({each.code}, {code - 1}, "{axis}")'
                for each in every
            ),
            edits=tuple(itertools.chain(*edits)),
            reads=tuple(
                c.name
                for c in self.fault.system.constraints
                if c.convert is not None and c.convert.value in values
            ),
            assumed=assumed,
        )

    def variables(self, values: Mapping[Any, Node], line: Span) -> list[SourceRead]:
        """The variables of a line that are some values; values without a variable are left out.

        Arguments:
          values: the values, each with the node that reads it.
          line: the line.
        """
        named = ((self.fault.names.value(o), o, node) for o, node in values.items())
        return [
            SourceRead(name)
            for name, o, node in named
            if name.isidentifier() and self.fault.names.denotes(name, node, o, line) is not False
        ]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Annotated:
    """A new annotation of one value.

    Arguments:
      placed: where it stands in the program, also for values that the line reads alike.
      code: the code that it is annotated with.
      calls: the annotation in words, one for each variable of the line that means the same.
      edits: the annotation as edits.
      reads: names of the constraints of its reads.
      assumed: literals of the reader's states after it; empty for any.
    """

    placed: Placed
    code: Code
    calls: tuple[str, ...]
    edits: tuple[SourceEdit, ...]
    reads: tuple[str, ...]
    assumed: tuple[str, ...]

    @property
    def is_statement(self) -> bool:
        """Whether statements on lines before it annotate it. The parameter of a lambda, and a
        variable of an outer function, have their annotation where they are read."""
        return all(e.replacement.rstrip(" \t").endswith("\n") for e in self.edits)


def _inserted(base: Request, found: Sequence[_Annotated], position: int) -> Request | None:
    """The program with new annotations; None where a value has too few dims for its annotation.

    Arguments:
      base: the program.
      found: the annotations.
      position: the position of their mesh axis.
    """
    edited: Request | None = base
    for one in found:
        edited = edited and insert_pin(edited, one.placed, position, one.code)
    return edited


def states_of(system: System, end: End, code: Code) -> tuple[str, ...]:
    """The literals of the states in which an end has a code.

    Arguments:
      system: the constraints of a mesh axis.
      end: the end of a value.
      code: the code.
    """
    return tuple(
        state_literal(end.variable, i)
        for i, s in enumerate(system.variables[end.variable].states)
        if s[end.column] == code
    )


def _alike(node: Node, line: Node) -> bool:
    """Whether two nodes are one line of the user, traced more than once: in unrolled layers, in
    rematerialisation."""
    if node.id == line.id or node.span is None:
        return node.id == line.id
    return (node.op, node.span, node.in_gradient, len(node.inputs)) == (
        line.op,
        line.span,
        line.in_gradient,
        len(line.inputs),
    )
