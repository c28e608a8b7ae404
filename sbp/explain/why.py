"""Why a value has its type: where the type comes from, what other types cost, and why each of its
conversions stands where it does.

Every cost is that of a plan: for another type, the program is planned with that type pinned.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from sbp import _jax
from sbp.explain.conversions import (
    Alternative,
    ExplainedConversion,
    Group,
    SubjectConversions,
    planned,
)
from sbp.explain.edits import Types, pin_subject
from sbp.explain.origins import Link, Origins
from sbp.explain.subjects import Found, Subject, Subjects, ValueName
from sbp.infer.constraints import pin_sites
from sbp.infer.request import Request
from sbp.infer.rows import EMPTY
from sbp.infer.space import Code, Codes, decode, from_type, is_even, local_shape, to_type
from sbp.machine.mesh import MeshSpec
from sbp.plan.program import Cost, Program
from sbp.types import MONOIDS, NdSbp


@dataclass(frozen=True, slots=True, kw_only=True)
class WhyLimits:
    """Limits on the plans made for one question to `plan.why`.

    Arguments:
      plans: the most plans of a refined answer.
      first_operations: operations that the plans of a first answer have together.
      joint: the most alternatives that differ from the plan on two mesh axes.
      deferred: the most conversions of the value for which the program is planned with the
        conversion elsewhere. Conversions that send most bytes come first.
      links: the most links of a chain of origins.
    """

    plans: int = 28
    first_operations: int = 500
    joint: int = 3
    deferred: int = 4
    links: int = 200

    def plans_of(self, size: int, *, refine: bool) -> int:
        """The most plans for a question about a program with `size` operations: for a first answer,
        or for a refined one."""
        return self.plans if refine else min(self.plans, self.first_operations // max(1, size))


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
      tried: how many other atoms were tried.
    """

    mesh_axis: str
    atom: str
    links: tuple[Link, ...]
    pinned: bool
    next_best: Alternative | None
    tried: int


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
      untried_pairs: number of types with other atoms on two mesh axes that were not tried, to save
        time. Both atoms were tried one by one.
      conversions: of this value, most bytes first.
      output_names: names of the program's results.
      nodes: number of the program's equations.
      proved: whether the bound shows that no plan under the same policies and limits is cheaper.
      evades: whether the annotation of an alternative may convert what the boxing policy forbids
        elsewhere.
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
    untried_pairs: int
    conversions: tuple[ExplainedConversion, ...]
    output_names: tuple[str, ...]
    nodes: int
    proved: bool
    evades: bool


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
    found = Subjects.of(program.request.graph, output_names).find(name)
    most = limits.plans_of(program.request.size, refine=refine)
    return _Inquiry(program, found, tuple(output_names), limits, planning, most).answer()


@dataclass(slots=True)
class _Inquiry:
    """One question about one program.

    Arguments:
      program: the plan.
      found: the value.
      output_names: the names of the results.
      limits: on the number of plans.
      planning: called before each plan with `left`.
      left: the number of plans that may still be made.
    """

    program: Program
    found: Found
    output_names: tuple[str, ...]
    limits: WhyLimits
    planning: Callable[[int], None]
    left: int
    origins: Origins = field(init=False)
    types: Types = field(init=False)

    def __post_init__(self) -> None:
        self.origins = Origins.of(self.program.typing)
        self.types = Types.of(self.program, self.request.graph)

    @property
    def subject(self) -> Subject:
        """The value that the question is about."""
        return self.found.subject

    @property
    def present(self) -> list[int]:
        """The subject's values that the plan has. Copies whose conversions are not repeated are not
        in it."""
        return [v for v in self.subject.values if v in self.program.typing.values]

    @property
    def mesh(self) -> MeshSpec:
        """The mesh."""
        return self.program.mesh

    @property
    def request(self) -> Request:
        """The program, and what its types are chosen by."""
        return self.program.request

    @property
    def axes(self) -> list[int]:
        """Positions of the mesh axes that have more than one device."""
        return [k for k, n in enumerate(self.mesh.sizes) if n > 1]

    def answer(self) -> Why:
        """The answer."""
        subject, typing = self.subject, self.program.typing
        aval = self.request.graph.avals[subject.values[0]]
        codes = self.codes(subject)
        kinds = [typing.values[v] for v in self.present] if subject.kind != "output" else [codes]
        conversions = SubjectConversions(self.program, subject, self.origins)
        found = conversions.groups()
        deferred = min(self.limits.deferred, len(found), self.left)
        self.left -= deferred
        pinned = [k for k in self.axes if self.is_pinned(k)]
        free = {k: self.unpinned(k) for k in pinned[: self.left]}
        singles, untried = self.singles(codes)
        untried += len(pinned) - len(free)
        joint, untried_pairs = self.joint(codes, singles)
        alternatives = [*free.values(), *itertools.chain.from_iterable(singles.values()), *joint]
        local = local_shape(aval.shape, codes, self.mesh.sizes)
        return Why(
            subject=subject,
            others=tuple((s, to_type(self.codes(s), self.mesh)) for s in self.found.others),
            type=to_type(codes, self.mesh),
            types=tuple((to_type(t, self.mesh), kinds.count(t)) for t in dict.fromkeys(kinds)),
            shape=tuple(aval.shape),
            dtype=str(aval.dtype),
            local_shape=local,
            bytes_per_device=float(math.prod(local) * _jax.itemsize(aval.dtype)),
            cost=self.program.cost,
            axes=tuple(self.story(k, codes, free.get(k), singles[k]) for k in self.axes),
            alternatives=tuple(sorted(alternatives, key=_by_cost)),
            untried=untried,
            untried_pairs=untried_pairs,
            conversions=tuple(
                self.explained(conversions, group, tried=number < deferred)
                for number, group in enumerate(found)
            ),
            output_names=self.output_names,
            nodes=self.request.size,
            # The bound does not hold for plans that reuse forward conversions if the search left
            # these out, nor under a memory limit, where bytes have a price.
            proved=typing.optimal and typing.bounds_reuse and self.request.memory_limit is None,
            evades=subject.kind == "made"
            and any(p != "auto" for p in self.request.strictest.policies),
        )

    def explained(
        self, conversions: SubjectConversions, group: Group, *, tried: bool
    ) -> ExplainedConversion:
        """A conversion with its reason, and a plan with the conversion elsewhere if asked."""
        if tried:
            self.planning(self.left)
        return conversions.explained(group, tried=tried)

    def codes(self, subject: Subject) -> Codes:
        """The type of a subject in the plan."""
        return from_type(self.types.type_of(subject), self.mesh)

    # ---- alternatives ---------------------------------------------------------------------------

    def is_pinned(self, position: int) -> bool:
        """Whether the user pins the subject itself on a mesh axis."""
        subject, demand = self.subject, self.request.demand
        if subject.kind == "annotation":
            mine = set(subject.values)
            sites = pin_sites(self.request)
            return any(
                s.codes[position] is not None
                for s in sites
                if any(n.outputs[0] in mine for n in s.nodes)
            )
        asked = {"input": demand.inputs, "output": demand.outputs}.get(subject.kind)
        codes = asked[subject.position] if asked is not None else None
        return codes is not None and codes[position] is not None

    def planned(
        self, request: Request, *, wanted: tuple[tuple[str, str], ...] = (), freed: str = ""
    ) -> Alternative:
        """A changed program, planned."""
        self.planning(self.left)
        self.left -= 1
        found = planned(request)
        return Alternative.of(found, self.request, self.subject, wanted=wanted, freed=freed)

    def pinned(self, wanted: Mapping[int, Code]) -> Alternative:
        """The program with the subject pinned on some mesh axes."""
        atoms = tuple((self.mesh.names[k], repr(decode(c))) for k, c in sorted(wanted.items()))
        return self.planned(pin_subject(self.request, self.subject, wanted), wanted=atoms)

    def unpinned(self, position: int) -> Alternative:
        """The program without the subject's pin on a mesh axis."""
        freed = pin_subject(self.request, self.subject, {position: None})
        return self.planned(freed, freed=self.mesh.names[position])

    def options(self, position: int, current: Code) -> list[Code]:
        """Other atoms that the value may have on a mesh axis: B, then P where some row makes it so,
        then the splits."""
        subject, n = self.subject, self.mesh.sizes[position]
        aval = self.request.graph.avals[subject.values[0]]
        boundary = subject.kind in ("input", "output")
        splits = [
            1 + d
            for d, size in enumerate(aval.shape)
            if size >= n and (not self.must_divide or size % n == 0)
        ]
        monoids = self.request.native.get(subject.values[0], EMPTY)
        partial = [] if boundary else [-1 - MONOIDS.index(m) for m in sorted(monoids)]
        return [c for c in (0, *partial, *splits) if c != current]

    @property
    def must_divide(self) -> bool:
        """Whether the value is an input or output whose splits have to divide."""
        kind, position = self.subject.kind, self.subject.position
        return kind in ("input", "output") and not self.request.demand.is_padded(kind, position)

    def singles(self, codes: Codes) -> tuple[dict[int, list[Alternative]], int]:
        """For each mesh axis, the plans with another atom there; and how many were not made."""
        made: dict[int, list[Alternative]] = {k: [] for k in self.axes}
        options = {k: self.options(k, codes[k]) for k in self.axes}
        untried = 0
        for turn in itertools.zip_longest(*([(k, c) for c in options[k]] for k in self.axes)):
            for k, code in (pair for pair in turn if pair is not None):
                if self.left <= 0:
                    untried += 1
                else:
                    made[k].append(self.pinned({k: code}))
        return made, untried

    def joint(
        self, codes: Codes, singles: dict[int, list[Alternative]]
    ) -> tuple[list[Alternative], int]:
        """Plans with other atoms on two mesh axes, and how many were not made. Pairs of atoms that
        are cheapest one by one come first.

        Arguments:
          codes: the type in the plan.
          singles: for each mesh axis, the plans with another atom there.
        """
        seen = {a.type for found in singles.values() for a in found}
        shape = tuple(self.request.graph.avals[self.subject.values[0]].shape)
        estimated: list[tuple[float, int, Mapping[int, Code]]] = []
        for k, j in itertools.combinations(self.axes, 2):
            tried = [list(zip(self.options(i, codes[i]), singles[i], strict=False)) for i in (k, j)]
            pairs = itertools.product(*tried)
            for (a, first), (b, second) in pairs:
                t = tuple(a if i == k else b if i == j else c for i, c in enumerate(codes))
                if (
                    first.cost is None
                    or second.cost is None
                    or not self.is_type(shape, t)
                    or to_type(t, self.mesh) in seen
                ):
                    continue
                estimated.append(
                    (first.cost.seconds + second.cost.seconds, len(estimated), {k: a, j: b})
                )
        most = max(0, min(self.limits.joint, self.left))
        cheapest = sorted(estimated, key=lambda e: e[:2])[:most]
        made = [self.pinned(wanted) for _, _, wanted in cheapest]
        return made, len(estimated) - len(made)

    def is_type(self, shape: tuple[int, ...], codes: Codes) -> bool:
        """Whether a shape can have a type: its dims are long enough to split, and its partial atoms
        have one monoid."""
        if self.must_divide and not is_even(shape, codes, self.mesh.sizes):
            return False
        parts: dict[int, int] = {}
        for c, n in zip(codes, self.mesh.sizes, strict=True):
            parts[c] = parts.get(c, 1) * n
        return (
            all(shape[c - 1] >= n for c, n in parts.items() if c > 0)
            and sum(c < 0 for c in parts) <= 1
        )

    # ---- origins --------------------------------------------------------------------------------

    def story(
        self, position: int, codes: Codes, free: Alternative | None, singles: list[Alternative]
    ) -> AxisStory:
        """Where the atom of the value on one mesh axis comes from.

        Arguments:
          position: the position of the mesh axis.
          codes: the type of the value in the plan.
          free: the plan without the value's pin on the axis; None where it has none.
          singles: the plans with another atom on the axis.
        """
        subject = self.subject
        links = self.origins.chain(self.present[0], position, most=self.limits.links)
        links = (dataclasses.replace(links[0], subject=ValueName(subject.label)), *links[1:])
        if subject.kind == "output":
            links = self.returned(position, codes[position], links)
        possible = [a for a in singles if a.cost is not None]
        return AxisStory(
            mesh_axis=self.mesh.names[position],
            atom=repr(decode(codes[position])),
            links=links,
            pinned=self.is_pinned(position),
            next_best=free if free is not None else min(possible, key=_by_cost, default=None),
            tried=len(singles),
        )

    def returned(self, position: int, code: Code, links: tuple[Link, ...]) -> tuple[Link, ...]:
        """The links of an output: its own, then the links of the returned value unless a pin ends
        the chain.

        Arguments:
          position: the position of the mesh axis.
          code: the code of the output.
          links: the links of the returned value.
        """
        own = ValueName(self.subject.label)
        tied = dict(self.request.demand.tied).get(self.subject.position)
        if self.is_pinned(position):
            return (Link(kind="output", subject=own, atom=code),)
        if tied is not None:
            donor = self.origins.label(self.request.graph.inputs[tied])
            return Link(kind="donated output", subject=own, atom=code, donor=donor), *links
        return Link(kind="free output", subject=own, atom=code), *links


def _by_cost(alternative: Alternative) -> tuple[bool, float, float, str]:
    cost = alternative.cost
    return (
        (True, 0.0, 0.0, alternative.change)
        if cost is None
        else (False, cost.seconds, cost.bytes_per_device, alternative.change)
    )
