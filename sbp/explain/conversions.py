"""Programs planned with one thing changed, and the conversions of a value: the reason for the place
of each, and the cost of the program with the conversion elsewhere."""

from __future__ import annotations

import functools
from dataclasses import dataclass, field
from typing import Literal

from sbp.annotations import annotate_p
from sbp.explain.edits import Types, pin_subject
from sbp.explain.origins import Origins
from sbp.explain.reasons import ConversionNeed, ConversionReason, Reasons
from sbp.explain.subjects import AtomChange, Subject, changed_axes
from sbp.infer.check import CheckResult, check
from sbp.infer.conditioned import EndCondition, choose_under
from sbp.infer.constraints import pin_sites
from sbp.infer.request import Request
from sbp.infer.space import Code, Codes, Step
from sbp.machine.mesh import MeshSpec
from sbp.plan.fit import best_program, cheapest
from sbp.plan.program import Cost, PlannedBox, Program
from sbp.trace.graph import Node, Operand
from sbp.trace.regions import bodies_of, interface_of
from sbp.types import NdSbp

# ---- alternatives -------------------------------------------------------------------------------
# A program planned with one thing changed: its cost, or why it has no plan.


@dataclass(frozen=True, slots=True)
class Refusal:
    """Why a changed program has no plan.

    Arguments:
      kind: "fault": one mesh axis has no types; "joint": each has types, all together have none;
        "memory": no plan fits the memory limit; "elsewhere": no row takes the conversion there.
      request: the changed program.
      fault: of the kind "fault", the fault.
    """

    kind: Literal["fault", "joint", "memory", "elsewhere"]
    request: Request
    fault: CheckResult | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Alternative:
    """The program planned with a change: with another type of a value, or a conversion elsewhere.

    Arguments:
      wanted: the atoms that the value is pinned to, as (mesh axis, atom), "?" for a dropped pin;
        empty for another change.
      type: the type of the value in that plan; None when there is no plan.
      cost: of a call of that plan; None when there is no plan.
      refusal: why there is no plan; None when there is one.
    """

    wanted: tuple[tuple[str, str], ...] = ()
    type: NdSbp | None = None
    cost: Cost | None = None
    refusal: Refusal | None = None

    @classmethod
    def of(
        cls,
        found: Program | Refusal,
        request: Request,
        subject: Subject,
        wanted: tuple[tuple[str, str], ...] = (),
    ) -> Alternative:
        """The plan of a changed program, for one value.

        Arguments:
          found: the plan, or why there is none.
          request: the program before the change.
          subject: the value.
          wanted: the change.
        """
        if isinstance(found, Refusal):
            return cls(wanted=wanted, refusal=found)
        t = Types.of(found, request.graph).type_of(subject)
        return cls(wanted=wanted, type=t, cost=found.cost)

    @property
    def change(self) -> str:
        """The change in the notation of types: `model:S(1)`; `model:?` for a dropped pin."""
        return " ".join(f"{axis}:{atom}" for axis, atom in self.wanted)


def planned(request: Request) -> Program | Refusal:
    """The plan of a changed program, or why it has none, as far as one mesh axis shows it."""
    program = best_program(request)
    if program is not None:
        return program
    fault = check(request)
    if fault.status == "unsat":
        return Refusal("fault", request, fault)
    return Refusal("joint" if request.memory_limit is None else "memory", request)


# ---- deferral -----------------------------------------------------------------------------------


def deferred(request: Request, group: Group, need: ConversionNeed) -> Program | Refusal:
    """The plan in which a need of a conversion is met otherwise, or why there is none: without the
    pin that asks for it, with the value carried or returned unconverted, read by another row, or
    reduced one consumer later.

    Arguments:
      request: the program as it was asked for.
      group: the conversion at all places that are alike.
      need: a need of the conversion that is not forced.
    """
    box, node = group[0].box, need.node
    axes = changed_axes(box)
    before = {k: box.source.codes[k] for k in axes}
    if node is None:
        output = Subject(label="", kind="output", values=(box.source.value,), position=need.number)
        return planned(pin_subject(request, output, before))
    if need.kind == "pin":
        sites = (s for s in pin_sites(request) if any(n.id == node.id for n in s.nodes))
        values = tuple(n.outputs[0] for s in sites for n in s.nodes)
        pinned = Subject(label="", kind="annotation", values=values)
        return planned(pin_subject(request, pinned, dict.fromkeys(axes)))
    alike = [
        (reader, number)
        for one in group
        for reader, number in one.readers()
        if (reader.op, reader.span, reader.backward) == (node.op, node.span, node.backward)
    ]
    if need.kind in ("partners", "choice"):
        assert need.result is not None
        nodes = {reader.id for reader, _ in alike}
        outputs = tuple(v for n in request.graph.walk() if n.id in nodes for v in n.outputs)
        results = Subject(label="", kind="made", values=outputs)
        return planned(pin_subject(request, results, {need.change.axis: need.result}))

    def on_changed(codes: Codes) -> tuple[Code | None, ...]:
        return tuple(c if k in before else None for k, c in enumerate(codes))

    if need.kind == "row":
        codes = on_changed(box.target.codes)
        places = dict.fromkeys((n.id, number) for n, number in alike if number == need.number)
        held = [EndCondition(end="operand", at=at, codes=codes, differs=True) for at in places]
    elif need.is_read:
        # A body that takes the operand as it is; of a slice, the type of one slice.
        body, position = bodies_of(node, need.number)[0]
        is_slice = interface_of(node).entries[need.number].kind == "slice"
        codes = on_changed(tuple(c - 1 if is_slice and c > 0 else c for c in box.source.codes))
        held = [EndCondition(end="made", at=(body.inputs[position],), codes=codes)]
    else:
        at, codes = (node.id, need.region, need.number), on_changed(box.source.codes)
        held = [EndCondition(end="returned", at=at, codes=codes)]
    present = {n.id for n in request.graph.walk()}
    if any(h.end != "made" and h.at[0] not in present for h in held):
        return Refusal("elsewhere", request)  # in the program since conversions were shared
    limit, choosing = request.memory_limit, functools.partial(choose_under, request, held)
    program = cheapest(choosing, request)
    if program is None:
        return Refusal("elsewhere", request)
    fits = limit is None or program.cost.peak_memory_bytes <= limit
    return program if fits else Refusal("memory", request)


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
      reason: the maker of the value, and the reader that needs it converted.
      instead: the plan with the conversion elsewhere. None for a forced conversion, which cannot
        stand elsewhere, and where that was not tried to save time.
      others: further readers of the converted value.
    """

    steps: tuple[Step, ...]
    mesh: MeshSpec = field(repr=False)
    runs: int
    bytes_per_device: float
    reason: ConversionReason
    instead: Alternative | None
    others: int = 0


def groups_of(program: Program, subject: Subject, origins: Origins) -> list[Group]:
    """The conversions of a value, alike ones together, most bytes first.

    Arguments:
      program: the plan.
      subject: the value.
      origins: of the program.
    """
    aliases, groups = _aliases(program, subject, origins), dict[object, Group]()
    for found in program.boxes():
        box, reader = found.box, found.box.reader
        into = subject.kind == "annotation" and reader and not aliases.isdisjoint(reader.outputs)
        if box.source.value in aliases or into:
            steps = tuple((s.kind, s.mesh_axes, s.source, s.target) for s in box.steps)
            holder = found.regions[-1][0] if found.regions else None
            end = reader or holder
            place = (end.op, end.span or end.id, end.backward) if end else None
            groups.setdefault((steps, place, reader is None), []).append(found)
    return sorted(groups.values(), key=lambda g: -sum(p.bytes_per_device for p in g))


def explained(
    program: Program, subject: Subject, origins: Origins, group: Group, *, tried: bool
) -> ExplainedConversion:
    """A conversion with its reason.

    Arguments:
      program: the plan.
      subject: the converted value.
      origins: of the program.
      group: the conversion.
      tried: whether the program is planned with the conversion elsewhere.
    """
    first, instead = group[0], None
    reason = Reasons(program, origins).of(first, AtomChange.of_box(first.box))
    if tried and not reason.need.is_forced:
        found = deferred(program.request, group, reason.need)
        instead = Alternative.of(found, program.request, subject)
    return ExplainedConversion(
        steps=first.box.steps,
        mesh=program.mesh,
        runs=sum(p.trips for p in group),
        bytes_per_device=sum(p.bytes_per_device for p in group),
        reason=reason,
        instead=instead,
        others=max(0, len(first.readers()) + len(first.returned()) - 1),
    )


def _aliases(program: Program, subject: Subject, origins: Origins) -> set[Operand]:
    """The subject's values, the values from which the last steps of its expression make them, and
    the inputs of bodies that they feed. The last steps are those such as the transpose after a
    product; an annotation belongs to the annotated expression."""
    mine, dataflow = set[Operand](subject.values), origins.names.dataflow
    for node in reversed(list(program.graph.walk())):
        alone = len(node.inputs) == 1 and not node.regions and not mine.isdisjoint(node.outputs)
        maker = dataflow.maker(node.inputs[0]) if alone else None
        if maker is not None and (node.op == annotate_p.name or _place(maker) == _place(node)):
            mine.update(node.inputs)
    for value, (node, entry) in dataflow.entries.items():
        if node.inputs[entry.operand] in mine:
            mine.add(value)
    return mine


def _place(node: Node) -> object:
    return node.span, node.in_gradient
