"""Programs planned with one thing changed, and the conversions of a value: the reason for the place
of each, and the cost of the program with the conversion elsewhere."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

from sbp.annotations import annotate_p
from sbp.explain.edits import Types, pin_subject
from sbp.explain.origins import Origins
from sbp.explain.reasons import ConversionNeed, ConversionReason, Reasons
from sbp.explain.subjects import AtomChange, Subject, ValueName, changed_axes
from sbp.infer.check import check
from sbp.infer.choose import EndCondition, choose_under
from sbp.infer.constraints import pin_sites
from sbp.infer.request import Request
from sbp.infer.space import Code, Codes, Step
from sbp.limits import boxing_text
from sbp.machine.mesh import MeshSpec
from sbp.plan.fit import best_program, cheapest
from sbp.plan.program import Cost, PlannedBox, Program
from sbp.trace.graph import Node, Operand
from sbp.trace.regions import bodies_of, interface_of
from sbp.types import NdSbp

# ---- alternatives -------------------------------------------------------------------------------
# A program planned with one thing changed: its cost, or why it has no plan.


RefusalKind = Literal[
    "joint", "memory", "exceeds memory", "rows", "result", "reader", "not there", "no row"
]


@dataclass(frozen=True, slots=True, kw_only=True)
class Refusal:
    """Why a changed program has no plan.

    Arguments:
      kind: "joint": each mesh axis has types, all together have none; "memory": no plan fits the
        memory limit; "exceeds memory": the cheapest plan does not fit it; "rows": no row reaches
        the type; "result": the program may not return the value so; "reader": a node does not take
        what arrives; "not there": the conversion reads a node that the program has only after
        conversions were taken together; "no row": no row of the reader takes the other type.
      mesh_axis: the mesh axis without types; empty where no single axis is to blame.
      node: the reader.
      arriving: the codes in which the value could arrive at the reader or the result.
      policies: the boxing policies in words, where these are to blame; empty elsewhere.
    """

    kind: RefusalKind
    mesh_axis: str = ""
    node: Node | None = None
    arriving: tuple[Code, ...] = ()
    policies: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Alternative:
    """The program planned with a change: with another type of a value, or a conversion elsewhere.

    Arguments:
      wanted: the pinned atoms of the value as (mesh axis, atom); empty for another change.
      freed: the mesh axis on which the value's pin was dropped; empty where there was none.
      type: the type of the value in that plan; None when there is no plan.
      cost: of a call of that plan; None when there is no plan.
      refusal: why there is no plan; None when there is one.
    """

    wanted: tuple[tuple[str, str], ...] = ()
    freed: str = ""
    type: NdSbp | None = None
    cost: Cost | None = None
    refusal: Refusal | None = None

    @classmethod
    def of(
        cls,
        found: Program | Refusal,
        request: Request,
        subject: Subject,
        *,
        wanted: tuple[tuple[str, str], ...] = (),
        freed: str = "",
    ) -> Alternative:
        """The plan of a changed program, for one value.

        Arguments:
          found: the plan, or why there is none.
          request: the program before the change.
          subject: the value.
          wanted, freed: the change.
        """
        if isinstance(found, Refusal):
            return cls(wanted=wanted, freed=freed, refusal=found)
        t = Types.of(found, request.graph).type_of(subject)
        return cls(wanted=wanted, freed=freed, type=t, cost=found.cost)

    @property
    def change(self) -> str:
        """The change in the notation of types: `model:S(1)`; `model:?` for a dropped pin."""
        return " ".join(f"{axis}:{atom}" for axis, atom in self.wanted) or f"{self.freed}:?"


def planned(request: Request) -> Program | Refusal:
    """The plan of a changed program, or why it has none."""
    program = best_program(request)
    return refusal(request) if program is None else program


def refusal(request: Request) -> Refusal:
    """Why a program has no plan, as far as one mesh axis shows it."""
    fault = check(request)
    if fault.status != "unsat":
        return Refusal(kind="joint" if request.memory_limit is None else "memory")
    node = fault.sink[0].node if fault.sink else None
    policies = boxing_text(request.boxing, request.axis_policies, request.mesh.names)
    return Refusal(
        kind="rows" if not fault.sink else "result" if node is None else "reader",
        mesh_axis=fault.mesh_axis,
        node=node,
        arriving=tuple(fault.made[0]) if fault.sink else (),
        policies=policies if fault.policy else "",
    )


# ---- deferral -----------------------------------------------------------------------------------
# The cost of a program with a conversion deferred: without the pin that asks for it, with the
# value carried or returned unconverted, read by another row, or reduced one consumer later.


@dataclass(frozen=True, slots=True)
class Deferral:
    """Plans the program with one conversion deferred.

    Arguments:
      request: the program as it was asked for.
      group: the conversion at all places that are alike.
    """

    request: Request
    group: Sequence[PlannedBox]

    @property
    def _changed(self) -> list[int]:
        return changed_axes(self.group[0].box)

    @property
    def _before(self) -> Codes:
        return self.group[0].box.source.codes

    def plan(self, need: ConversionNeed) -> Program | Refusal:
        """The plan in which a need is met otherwise, or why there is none.

        Arguments:
          need: a need of the conversion that is not forced.
        """
        match need.kind:
            case "pin":
                return self._without_pin(need)
            case "carry" | "body" if need.is_read:
                return self._holding([self._entering(need)])
            case "carry" | "body":
                return self._holding([self._returned(need)])
            case "row":
                return self._holding(self._other_rows(need))
            case "partners" | "choice":
                return self._one_consumer_later(need)
            case _:
                return self._returned_unconverted(need)

    def _on_changed(self, codes: Codes) -> tuple[Code | None, ...]:
        """Codes on the mesh axes that the conversion changes, None on the others."""
        return tuple(c if k in self._changed else None for k, c in enumerate(codes))

    def _entering(self, need: ConversionNeed) -> EndCondition:
        """A body that takes the operand as it is; of a slice, the type of one slice."""
        assert need.node is not None
        body, position = bodies_of(need.node, need.number)[0]
        is_slice = interface_of(need.node).entries[need.number].kind == "slice"
        codes = tuple(c - 1 if is_slice and c > 0 else c for c in self._before)
        return EndCondition(end="made", at=(body.inputs[position],), codes=self._on_changed(codes))

    def _returned(self, need: ConversionNeed) -> EndCondition:
        """A body that returns the value as it is."""
        assert need.node is not None
        at = (need.node.id, need.region, need.number)
        return EndCondition(end="returned", at=at, codes=self._on_changed(self._before))

    def _other_rows(self, need: ConversionNeed) -> list[EndCondition]:
        """A reader that takes another type than the converted one, at every copy of the value."""
        assert need.node is not None
        codes = self._on_changed(self.group[0].box.target.codes)
        places = dict.fromkeys(
            (node.id, number)
            for planned_box in self.group
            for node, number in planned_box.readers()
            if number == need.number and _same_expression(node, need.node)
        )
        return [EndCondition(end="operand", at=at, codes=codes, differs=True) for at in places]

    def _holding(self, holds: Sequence[EndCondition]) -> Program | Refusal:
        """The cheapest plan in which conditions on ends of values hold."""
        request = self.request
        if not {h.at[0] for h in holds if h.end != "made"} <= {n.id for n in request.graph.walk()}:
            return Refusal(kind="not there")
        program = cheapest(functools.partial(choose_under, request, holds), request)
        if program is None:
            return Refusal(kind="no row")
        limit = request.memory_limit
        if limit is not None and program.cost.peak_memory_bytes > limit:
            return Refusal(kind="exceeds memory")
        return program

    def _one_consumer_later(self, need: ConversionNeed) -> Program | Refusal:
        """With the results of the reader pinned partial, wherever its line was traced."""
        assert need.node is not None and need.result is not None
        nodes = {
            node.id
            for planned_box in self.group
            for node, _ in planned_box.readers()
            if _same_expression(node, need.node)
        }
        graph = self.request.graph
        outputs = tuple(v for n in graph.walk() if n.id in nodes for v in n.outputs)
        results = Subject(label="", kind="made", values=outputs)
        return planned(pin_subject(self.request, results, {need.change.axis: need.result}))

    def _without_pin(self, need: ConversionNeed) -> Program | Refusal:
        assert need.node is not None
        request = self.request
        nodes = [
            n
            for site in pin_sites(request)
            if any(n.id == need.node.id for n in site.nodes)
            for n in site.nodes
        ]
        subject = Subject(label="", kind="annotation", values=tuple(n.outputs[0] for n in nodes))
        return planned(pin_subject(request, subject, dict.fromkeys(self._changed)))

    def _returned_unconverted(self, need: ConversionNeed) -> Program | Refusal:
        """With a result of the program pinned to the type it is made in."""
        source = self.group[0].box.source
        output = Subject(label="", kind="output", values=(source.value,), position=need.number)
        wanted = {k: source.codes[k] for k in self._changed}
        return planned(pin_subject(self.request, output, wanted))


def _same_expression(node: Node, other: Node) -> bool:
    return (node.op, node.span, node.backward) == (other.op, other.span, other.backward)


# ---- conversions --------------------------------------------------------------------------------


Group = list[PlannedBox]
"""One conversion at all places of the program that are alike."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ExplainedConversion:
    """A conversion of a value with its reason.

    Arguments:
      steps: its collectives and local steps.
      mesh: the mesh, for names.
      runs: executions per call.
      bytes_per_device: bytes that one device sends for it per call.
      value: the converted value.
      reason: the maker of the value, and the reader that needs it converted.
      is_tried: whether the program was planned with the conversion elsewhere. A forced conversion
        cannot stand elsewhere, and of the others only some are tried, to save time.
      instead: that plan; None when `is_tried` is false.
      others: further readers of the converted value.
      onward: whether it converts a value that is computed from the subject and partial like it.
    """

    steps: tuple[Step, ...]
    mesh: MeshSpec = field(repr=False)
    runs: int
    bytes_per_device: float
    value: ValueName
    reason: ConversionReason
    is_tried: bool
    instead: Alternative | None
    others: int = 0
    onward: bool = False


@dataclass(frozen=True)
class SubjectConversions:
    """The conversions of one subject of a program.

    Arguments:
      program: the plan.
      subject: the value.
      origins: of the program.
    """

    program: Program
    subject: Subject
    origins: Origins

    def groups(self) -> list[Group]:
        """The conversions of the value, alike ones together, most bytes first; then the conversions
        of partial values that are computed from it."""
        groups: dict[object, Group] = {}
        for found in self.program.boxes():
            box = found.box
            into = (
                self.subject.kind == "annotation"
                and box.reader is not None
                and not self.aliases.isdisjoint(box.reader.outputs)
            )
            later = box.source.value in self.onward and any(c < 0 for c in box.source.codes)
            if box.source.value in self.aliases or into or later:
                steps = tuple((s.kind, s.mesh_axes, s.source, s.target) for s in box.steps)
                groups.setdefault((steps, _end_of(found)), []).append(found)
        return sorted(
            groups.values(),
            key=lambda g: (self.is_onward(g), -sum(p.bytes_per_device for p in g)),
        )

    def is_onward(self, group: Group) -> bool:
        """Whether a conversion converts a partial value that is computed from the subject."""
        return group[0].box.source.value in self.onward

    def explained(self, group: Group, *, tried: bool) -> ExplainedConversion:
        """A conversion with its reason.

        Arguments:
          group: the conversion.
          tried: whether the program is planned with the conversion elsewhere.
        """
        first = group[0]
        reason = Reasons(self.program, self.origins).of(first, AtomChange.of_box(first.box))
        instead: Alternative | None = None
        is_tried = tried and not reason.need.is_forced
        if is_tried:
            found = Deferral(self.program.request, group).plan(reason.need)
            instead = Alternative.of(found, self.program.request, self.subject)
        return ExplainedConversion(
            steps=first.box.steps,
            mesh=self.program.mesh,
            runs=sum(p.trips for p in group),
            bytes_per_device=sum(p.bytes_per_device for p in group),
            value=self.origins.label(first.box.source.value),
            reason=reason,
            is_tried=is_tried,
            instead=instead,
            others=max(0, len(first.readers()) + len(first.returned()) - 1),
            onward=self.is_onward(group),
        )

    @functools.cached_property
    def aliases(self) -> frozenset[int]:
        """The subject's values, the values from which the last steps of its expression make them,
        and the inputs of bodies that they feed."""
        mine, dataflow = set[Operand](self.subject.values), self.origins.names.dataflow
        for node in reversed(list(self.program.graph.walk())):
            if not mine.isdisjoint(node.outputs) and self._is_last_step(node):
                mine.update(node.inputs)
        for value, (node, entry) in dataflow.entries.items():
            if node.inputs[entry.operand] in mine:
                mine.add(value)
        return frozenset(v for v in mine if isinstance(v, int))

    def _is_last_step(self, node: Node) -> bool:
        """Whether a node and the maker of its operand belong to one expression of the user, as a
        product and the transpose after it do. An annotation belongs to the annotated expression."""
        if len(node.inputs) != 1 or node.regions or not isinstance(node.inputs[0], int):
            return False
        maker = self.origins.names.makers.get(node.inputs[0])
        if maker is None:
            return False
        same = (maker.span, maker.in_gradient) == (node.span, node.in_gradient)
        return same or node.op == annotate_p.name

    @functools.cached_property
    def onward(self) -> frozenset[int]:
        """The values that are computed from the subject and are partial on the same mesh axis."""
        values, mine = self.program.typing.values, self.aliases
        axes = [
            k
            for k in range(len(self.program.mesh.sizes))
            if any(values[v][k] < 0 for v in mine if v in values)
        ]
        reached, before = set(mine), 0
        while axes and len(reached) > before:
            before = len(reached)
            for node in self.program.graph.walk():
                made = self._made_of(node, reached, axes)
                reached |= {v for v in made if any(values[v][k] < 0 for k in axes)}
        return frozenset(reached - mine)

    def _made_of(self, node: Node, values: set[int], axes: list[int]) -> set[int]:
        """The results of a node that are computed from partial operands.

        Arguments:
          node: the node.
          values: the partial values.
          axes: positions of the mesh axes on which an operand must be partial.
        """
        made = set[int]()
        ins = self.program.typing.rows[node.id].ins
        for number, operand in enumerate(node.inputs):
            if operand in values and any(ins[number][k] < 0 for k in axes):
                made |= {body.inputs[i] for body, i in bodies_of(node, number)}
                made |= set(() if node.regions else node.outputs)
        made |= {
            node.outputs[e.result]
            for e in interface_of(node).exits
            if e.result >= 0 and node.regions[e.region].outputs[e.output] in values
        }
        return made


def _end_of(planned: PlannedBox) -> object:
    """The end that alike conversions have in common: the reader, or the region."""
    reader = planned.box.reader
    if reader is not None:
        return reader.op, reader.span or reader.id, reader.backward
    holder = planned.regions[-1][0] if planned.regions else None
    return (holder and (holder.span or holder.id),)
