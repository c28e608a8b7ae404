"""Why a value has its type: where the type comes from, what other types cost, and why each of its
conversions stands where it does.

Every cost is that of a plan: for another type, the program is planned with that type pinned.
"""

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from sbp.annotations import annotate_p
from sbp.errors import SHOWN
from sbp.explain.origins import ConversionNeed, ConversionReason, Link, Origins
from sbp.explain.pin_changes import pin_boundary, pin_nodes, pin_subject
from sbp.explain.subjects import Subject, Subjects, Types, ValueName, changed_axes
from sbp.infer.check import CheckResult, check
from sbp.infer.constraints import pin_sites
from sbp.infer.flow import Place
from sbp.infer.request import Request
from sbp.infer.space import (
    Code,
    Codes,
    Step,
    decode,
    from_type,
    local_bytes,
    local_shape,
    to_type,
)
from sbp.plan.fit import PlanSearch, best_program
from sbp.plan.program import Cost, PlannedBox, Program
from sbp.trace.graph import Operand
from sbp.types import MONOIDS, NdSbp

# ---- alternatives -------------------------------------------------------------------------------
# A program planned with one thing changed: its cost, or why it has no plan.


Refusal = tuple[Request, CheckResult] | Literal["joint", "memory", "elsewhere"]
"""Why a changed program has no plan. The program and its fault: one mesh axis has no types.
"joint": each mesh axis has types, all together have none. "memory": no plan fits the memory limit.
"elsewhere": no row takes the conversion there."""


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

    @property
    def change(self) -> str:
        """The change in the notation of types: `model:S(1)`; `model:?` for a dropped pin."""
        return " ".join(f"{axis}:{atom}" for axis, atom in self.wanted)


def plan_of(request: Request) -> Program | Refusal:
    """The plan of a changed program, or why it has none, as far as one mesh axis shows it."""
    program = best_program(request)
    if program is not None:
        return program
    fault = check(request)
    return (
        (request, fault)
        if fault.status == "unsat"
        else "joint"
        if request.memory_limit is None
        else "memory"
    )


# ---- deferral -----------------------------------------------------------------------------------


def plan_deferred(request: Request, group: "Group", need: ConversionNeed) -> Program | Refusal:
    """The plan in which a need of a conversion is met otherwise, or why there is none: without the
    pin that asks for it, with the value carried or returned unconverted, read by another row, or
    reduced one consumer later.

    Arguments:
      request: the program as it was asked for.
      group: the conversion at all places that are alike.
      need: a need of the conversion that is not forced.
    """
    box, node = group[0].box, need.node
    axes = changed_axes(box.source.codes, box.target.codes)
    before = {k: box.source.codes[k] for k in axes}
    if node is None:
        return plan_of(pin_boundary(request, "output", need.number, before))
    if need.kind == "pin":
        pinned = [
            n for s in pin_sites(request) if node.id in {n.id for n in s.nodes} for n in s.nodes
        ]
        return plan_of(pin_nodes(request, pinned, dict.fromkeys(axes)))
    is_row = need.kind == "row"
    register = box.target if is_row else box.source
    codes = tuple(c if k in before else None for k, c in enumerate(register.codes))
    # Another row, or the value as it is; at every copy of the reader.
    reads: list[Place] = [
        ("operand", reader.id, number)
        for one in group
        for reader, number in one.readers()
        if number == need.number
        and (reader.op, reader.span, reader.backward) == (node.op, node.span, node.backward)
    ]
    returned: Place = "result", node.id, need.region, need.number

    def admits(have: Codes) -> bool:
        """Of another row, whether it differs on one of the axes; else whether it agrees on all."""
        return is_row != all(w in (None, c) for w, c in zip(codes, have, strict=True))

    conditions = dict.fromkeys(reads if need.is_read else [returned], admits)
    present = {n.id for n in request.graph.walk()}
    # Others are in the program since conversions were shared.
    known = all(at[1] in present for at in conditions)
    program = PlanSearch(request, conditions=conditions).cheapest() if known else None
    return "elsewhere" if program is None else program if program.fits else "memory"


# ---- conversions --------------------------------------------------------------------------------


Group = list[PlannedBox]
"""One conversion at all places of the program that are alike."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ExplainedConversion:
    """A conversion of a value with its reason.

    Arguments:
      steps: its collectives and local steps.
      runs: executions per call.
      bytes_per_device: bytes that one device sends for it per call.
      reason: the maker of the value, and the reader that needs it converted.
      instead: the plan with the conversion elsewhere. None for a forced conversion, which cannot
        stand elsewhere, and where that was not tried to save time.
      others: further readers of the converted value.
    """

    steps: tuple[Step, ...]
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
            end = reader or (found.regions[-1][0] if found.regions else None)
            place = (end.op, end.span or end.id, end.backward) if end else None
            groups.setdefault((steps, place, reader is None), []).append(found)
    return sorted(groups.values(), key=lambda g: -sum(p.bytes_per_device for p in g))


def _aliases(program: Program, subject: Subject, origins: Origins) -> set[Operand]:
    """The subject's values, the values from which the last steps of its expression make them, and
    the inputs of bodies that they feed. The last steps are those such as the transpose after a
    product; an annotation belongs to the annotated expression."""
    mine, names = set[Operand](subject.values), origins.names
    for node in reversed(list(program.graph.walk())):
        alone = len(node.inputs) == 1 and not node.regions and not mine.isdisjoint(node.outputs)
        maker = names.maker(node.inputs[0]) if alone else None
        if maker is not None and (
            node.op == annotate_p.name
            or (maker.span, maker.in_gradient) == (node.span, node.in_gradient)
        ):
            mine.update(node.inputs)
    for value, (node, entry) in names.entries.items():
        if node.inputs[entry.operand] in mine:
            mine.add(value)
    return mine


# ---- answers ------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class WhyLimits:
    """Limits on the plans made for one question to `plan.why`.

    Arguments:
      plans: the most plans of a refined answer.
      first_operations: operations that the plans of a first answer have together.
      deferred: the most conversions of the value for which the program is planned with the
        conversion elsewhere. Conversions that send most bytes come first.
    """

    plans: int = 28
    first_operations: int = 500
    deferred: int = SHOWN


LIMITS = WhyLimits()


@dataclass(frozen=True, slots=True, kw_only=True)
class AxisStory:
    """Where the atom of a value on one mesh axis comes from.

    Arguments:
      mesh_axis: the axis.
      atom: the chosen atom.
      links: the chain of origins, the value's own link first.
      pinned: whether the user pins this value on this axis.
      next_best: the cheapest plan in which the value has another atom here. For a pinned value: the
        plan without the pin. None when there is no such plan, or none was tried.
    """

    mesh_axis: str
    atom: str
    links: tuple[Link, ...]
    pinned: bool
    next_best: Alternative | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Why:
    """The answer to `plan.why(name)`.

    Arguments:
      subject: the value.
      others: other values of that name or line, with their types.
      type: the chosen type; of an output, the type it is returned in.
      types: the types of its copies, each with the number of copies; one entry unless copies
        differ.
      shape, dtype: of the whole value.
      local_shape: of one device's shard.
      bytes_per_device: bytes of one device's shard.
      cost: of the plan.
      axes: one story for each mesh axis of more than one device.
      alternatives: other types, each with its plan, cheapest first; types without a plan last.
      untried: number of types with another atom on one mesh axis that were not tried, to save time.
      conversions: of this value, most bytes first.
      output_names: names of the program's results.
    """

    subject: Subject
    others: tuple[tuple[Subject, NdSbp], ...]
    type: NdSbp
    types: tuple[tuple[NdSbp, int], ...]
    shape: tuple[int, ...]
    dtype: str
    local_shape: tuple[int, ...]
    bytes_per_device: float
    cost: Cost
    axes: tuple[AxisStory, ...]
    alternatives: tuple[Alternative, ...]
    untried: int
    conversions: tuple[ExplainedConversion, ...]
    output_names: tuple[str, ...]


def why(
    program: Program,
    name: str | int,
    output_names: Sequence[str] = (),
    *,
    refine: bool = False,
    planning: Callable[[int], None] = lambda left: None,
    limits: WhyLimits = LIMITS,
) -> Why:
    """Explains the type of a value.

    Arguments:
      program: the plan.
      name: the name of the value, as for `sbp.explain.subjects.Subjects.find`.
      output_names: the names of the results.
      refine: whether to make the plans of a refined answer, and not of a first one.
      planning: called before each plan with the most plans that are left.
      limits: on the number of plans. The answer counts what they leave out.

    Raises:
      SbpError: when no value has that name.
    """
    *others, subject = Subjects(program.request.graph, output_names).find(name)
    first = min(limits.plans, limits.first_operations // max(1, program.request.size))
    inquiry = _Inquiry(program, subject, limits, planning, limits.plans if refine else first)
    return inquiry.answer(tuple(others), tuple(output_names))


Wanted = tuple[tuple[int, Code | None], ...]
"""(position of a mesh axis, code) of a type that is tried; None for a dropped pin."""


class _Inquiry:
    """One question about one program.

    Arguments:
      program: the plan.
      subject: the value.
      limits: on the number of plans.
      planning: called before each plan with `left`.
      left: the number of plans that may still be made.

    Attributes:
      origins: of the atoms in the plan.
      types: of the values in the plan.
    """

    def __init__(
        self,
        program: Program,
        subject: Subject,
        limits: WhyLimits,
        planning: Callable[[int], None],
        left: int,
    ) -> None:
        self.program, self.subject, self.limits = program, subject, limits
        self.planning, self.left = planning, left
        self.origins, self.types = Origins(program), Types(program, program.request.graph)
        self.is_boundary = subject.kind in ("input", "output")
        # Splits of an input or output have to divide, unless it is held padded.
        self.must_divide = self.is_boundary and not program.request.demand.is_padded(
            subject.kind, subject.position
        )

    def answer(self, others: tuple[Subject, ...], output_names: tuple[str, ...]) -> Why:
        """The answer."""
        subject, typing, codes = self.subject, self.program.typing, self.codes(self.subject)
        aval = self.program.request.graph.avals[subject.values[0]]
        # Copies whose conversions are not repeated are not in the plan.
        present = [v for v in subject.values if v in typing.values]
        kinds = [typing.values[v] for v in present] if subject.kind != "output" else [codes]
        groups = groups_of(self.program, subject, self.origins)
        deferred = min(self.limits.deferred, len(groups), self.left)
        self.left -= deferred
        axes = [k for k, n in enumerate(self.program.mesh.sizes) if n > 1]
        turns = itertools.zip_longest(*([(k, c) for c in self.options(k, codes[k])] for k in axes))
        asked: list[Wanted] = [
            *(((k, None),) for k in axes if self.is_pinned(k)),
            *((one,) for turn in turns for one in turn if one is not None),
        ]
        singles = {wanted: self.plan(wanted) for wanted in asked[: max(0, self.left)]}
        return Why(
            subject=subject,
            others=tuple((s, to_type(self.codes(s), self.program.mesh)) for s in others),
            type=to_type(codes, self.program.mesh),
            types=tuple(
                (to_type(t, self.program.mesh), kinds.count(t)) for t in dict.fromkeys(kinds)
            ),
            shape=tuple(aval.shape),
            dtype=str(aval.dtype),
            local_shape=local_shape(aval.shape, codes, self.program.mesh.sizes),
            bytes_per_device=float(local_bytes(aval, codes, self.program.mesh.sizes)),
            cost=self.program.cost,
            axes=tuple(self.story(k, codes, present[0], singles) for k in axes),
            alternatives=tuple(sorted(singles.values(), key=_by_cost)),
            untried=len(asked) - len(singles),
            conversions=tuple(
                self.explain_conversion(group, tried=number < deferred)
                for number, group in enumerate(groups)
            ),
            output_names=output_names,
        )

    def explain_conversion(self, group: Group, *, tried: bool) -> ExplainedConversion:
        """A conversion with its reason, and a plan with the conversion elsewhere if asked."""
        first = group[0]
        reason = self.origins.reason(first, first.box.source.codes, first.box.target.codes)
        if tried:
            self.planning(self.left)
        instead = (
            self.alternative(plan_deferred(self.program.request, group, reason.need))
            if tried and not reason.need.is_forced
            else None
        )
        return ExplainedConversion(
            steps=first.box.steps,
            runs=sum(p.trips for p in group),
            bytes_per_device=sum(p.bytes_per_device for p in group),
            reason=reason,
            instead=instead,
            others=max(0, len(first.readers()) + len(first.result_positions()) - 1),
        )

    def alternative(
        self, found: Program | Refusal, wanted: tuple[tuple[str, str], ...] = ()
    ) -> Alternative:
        """The plan of a changed program, for the value.

        Arguments:
          found: the plan, or why there is none.
          wanted: the change.
        """
        if not isinstance(found, Program):
            return Alternative(wanted=wanted, refusal=found)
        t = Types(found, self.program.request.graph).type_of(self.subject)
        return Alternative(wanted=wanted, type=t, cost=found.cost)

    def codes(self, subject: Subject) -> Codes:
        """The type of a subject in the plan."""
        return from_type(self.types.type_of(subject), self.program.mesh)

    # ---- alternatives ---------------------------------------------------------------------------

    def is_pinned(self, position: int) -> bool:
        """Whether the user pins the subject itself on a mesh axis."""
        return any(
            any(n.outputs[0] in self.subject.values for n in site.nodes)
            if self.subject.kind == "annotation"
            else (site.source, site.position) == (self.subject.kind, self.subject.position)
            for site in pin_sites(self.program.request)
            if site.codes[position] is not None
        )

    def plan(self, wanted: Wanted) -> Alternative:
        """The program with the subject pinned, or left free, on some mesh axes, planned."""
        self.planning(self.left)
        self.left -= 1
        atoms = tuple(
            (self.program.mesh.names[k], "?" if c is None else repr(decode(c))) for k, c in wanted
        )
        return self.alternative(
            plan_of(pin_subject(self.program.request, self.subject, dict(wanted))), atoms
        )

    def options(self, position: int, current: Code) -> list[Code]:
        """Other atoms that the value may have on a mesh axis: B, then P where some row makes it so,
        then the splits."""
        value, n = self.subject.values[0], self.program.mesh.sizes[position]
        splits = [
            1 + d
            for d, size in enumerate(self.program.request.graph.avals[value].shape)
            if size >= n and not (self.must_divide and size % n)
        ]
        monoids = () if self.is_boundary else sorted(self.program.request.native.get(value, ()))
        partial = [-1 - MONOIDS.index(m) for m in monoids]
        return [c for c in (0, *partial, *splits) if c != current]

    # ---- origins --------------------------------------------------------------------------------

    def story(
        self, position: int, codes: Codes, value: int, singles: Mapping[Wanted, Alternative]
    ) -> AxisStory:
        """Where the atom of the value on one mesh axis comes from.

        Arguments:
          position: the position of the mesh axis.
          codes: the type of the value in the plan.
          value: one of the subject's values in the plan.
          singles: the plans with another atom on one mesh axis.
        """
        own, code = ValueName(self.subject.label), codes[position]
        first, *rest = self.origins.chain(value, position)
        links = (replace(first, subject=own), *rest)
        if self.subject.kind == "output":
            # Its own link, then those of the returned value unless a pin ends the chain.
            donor = self.origins.donor(self.subject.position)
            kind = "free output" if donor is None else "donated output"
            links = (Link(kind=kind, subject=own, atom=code, donor=donor), *links)
            if self.is_pinned(position):
                links = (Link(kind="output", subject=own, atom=code),)
        possible = (
            a
            for ((k, c),), a in singles.items()
            if k == position and c is not None and a.cost is not None
        )
        return AxisStory(
            mesh_axis=self.program.mesh.names[position],
            atom=repr(decode(code)),
            links=links,
            pinned=self.is_pinned(position),
            next_best=singles.get(((position, None),), min(possible, key=_by_cost, default=None)),
        )


def _by_cost(alternative: Alternative) -> tuple[float, float, str]:
    cost = alternative.cost
    figures = (cost.seconds, cost.bytes_per_device) if cost else (math.inf, math.inf)
    return *figures, alternative.change
