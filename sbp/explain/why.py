"""Why a value has its type: where the type comes from, what every other type would cost, and why
each conversion is where it is.

Everything that is quoted was planned: a question about another type is answered by solving the
program with that type pinned.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from sbp import _jax
from sbp.explain.moves import Alternative, Conversion, Moves, no_typing
from sbp.explain.origins import Link, Origins
from sbp.explain.pinning import Types, Wanted, pin_subject, unpin_subject
from sbp.explain.subjects import Found, Subject, Subjects
from sbp.infer.constraints import pin_sites
from sbp.infer.request import Request
from sbp.infer.rows import EMPTY
from sbp.infer.space import Code, Codes, decode, from_type, is_even, local_shape, to_type
from sbp.machine.mesh import MeshSpec
from sbp.plan.fit import best_program
from sbp.plan.program import Cost, Program
from sbp.types import MONOIDS, NdSbp

MAX_PLANS, FEW_PLANS, NODES_PLANNED = 28, 6, 6000
"""Plans made for one question: so many; of large programs as many as amount to so many nodes, but
not below the second figure."""

MAX_JOINT = 3
"""Types that differ on several mesh axes at once."""

MAX_MOVES = 4
"""Conversions of a value that are tried elsewhere, most bytes first."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AxisStory:
    """How the atom on one mesh axis came about.

    Arguments:
      mesh_axis: the axis.
      atom: what was chosen.
      links: the chain of origins, the value's own link first.
      pinned: whether the user pins this value on this axis.
      next_best: the cheapest plan in which the value has another atom here (for a pinned one:
        without the pin); None when there is none, or none was tried.
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
      types: the types of all its copies with how many have it; one entry unless copies differ.
      shape, dtype: of the whole value.
      local_shape: of what one device holds.
      bytes_per_device: of that, in bytes.
      cost: of the plan as it is.
      axes: one story for each mesh axis of more than one device.
      alternatives: other types with the cost of the plan that has them, cheapest first, those
          without a plan last.
      untried: types that were left out to save time.
      conversions: of this value, most bytes first.
      nodes: size of the program.
      proved: whether the bound shows that no plan under the same policies and limits is cheaper.
      evades: whether the annotation of an alternative may convert what the policy forbids where
          nothing is annotated.
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
    conversions: tuple[Conversion, ...]
    nodes: int
    proved: bool
    evades: bool


def why(program: Program, name: str | int, output_names: Sequence[str] = ()) -> Why:
    """Explains the type of a value.

    Arguments:
      program: the plan.
      name: as for `sbp.explain.subjects.Subjects.find`.
      output_names: names of the results.

    Raises:
      SbpError: when no value has that name.
    """
    found = Subjects.of(program.request.graph, output_names).find(name)
    return _Asking(program, found, tuple(output_names)).answer()


@dataclass(slots=True)
class _Asking:
    """One question about one program."""

    program: Program
    found: Found
    output_names: tuple[str, ...]
    origins: Origins = field(init=False)
    types: Types = field(init=False)
    native: frozenset[str] = field(init=False)
    left: int = field(init=False)

    def __post_init__(self) -> None:
        self.origins = Origins.of(self.program.typing)
        self.types = Types.of(self.program, self.request.graph)
        self.native = self.natively_partial()
        self.left = min(MAX_PLANS, max(FEW_PLANS, NODES_PLANNED // max(1, self.nodes)))

    @property
    def subject(self) -> Subject:
        return self.found.subject

    @property
    def held(self) -> list[int]:
        """The subject's values that the plan has."""
        return [v for v in self.subject.values if v in self.program.typing.values]

    @property
    def mesh(self) -> MeshSpec:
        return self.program.mesh

    @property
    def request(self) -> Request:
        return self.program.request

    @property
    def nodes(self) -> int:
        return self.request.size

    @property
    def axes(self) -> list[int]:
        """Positions of the mesh axes that have more than one device."""
        return [k for k, n in enumerate(self.mesh.sizes) if n > 1]

    def answer(self) -> Why:
        subject, typing = self.subject, self.program.typing
        aval = self.request.graph.avals[subject.values[0]]
        codes = self.codes(subject)
        kinds = [typing.values[v] for v in self.held] if subject.kind != "output" else [codes]
        moves = Moves(self.program, subject, self.origins, self.output_names)
        found = moves.found()
        self.left -= min(MAX_MOVES, len(found))
        free = {k: self.unpinned(k) for k in self.axes if self.is_pinned(k)}
        singles, untried = self.singles(codes)
        joint = self.joint(codes, singles)
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
            conversions=tuple(
                moves.conversion(group, tried=number < MAX_MOVES)
                for number, group in enumerate(found)
            ),
            nodes=self.nodes,
            # A bound without what gradients keep is not one of plans that keep it, nor is one at
            # the price of a byte.
            proved=typing.optimal and typing.keeps and self.request.memory_limit is None,
            evades=subject.kind == "made"
            and any(p != "auto" for p in self.request.strictest.policies),
        )

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

    def planned(self, request: Request, change: str, wanted: Wanted) -> Alternative:
        self.left -= 1
        atoms_wanted = tuple(
            (self.mesh.names[k], repr(decode(c))) for k, c in sorted(wanted.items())
        )
        program = best_program(request)
        if program is None:
            return Alternative(change=change, wanted=atoms_wanted, reason=no_typing(request))
        types = Types.of(program, self.request.graph)
        return Alternative(
            change=change, wanted=atoms_wanted, type=types.type_of(self.subject), cost=program.cost
        )

    def pinned(self, wanted: Wanted) -> Alternative:
        change = " ".join(f"{self.mesh.names[k]}:{decode(c)!r}" for k, c in sorted(wanted.items()))
        return self.planned(pin_subject(self.request, self.subject, wanted), change, wanted)

    def unpinned(self, position: int) -> Alternative:
        return self.planned(
            unpin_subject(self.request, self.subject, position),
            f"{self.mesh.names[position]}:?",
            {},
        )

    def options(self, position: int, current: Code) -> list[Code]:
        """Other atoms that the value may have on a mesh axis: B, then P where some row makes it so,
        then the splits."""
        subject, n = self.subject, self.mesh.sizes[position]
        aval = self.request.graph.avals[subject.values[0]]
        boundary = subject.kind in ("input", "output")
        splits = [
            1 + d
            for d, size in enumerate(aval.shape)
            if size >= n and (not boundary or size % n == 0)
        ]
        partial = [] if boundary else [-1 - MONOIDS.index(m) for m in sorted(self.native)]
        return [c for c in (0, *partial, *splits) if c != current]

    def natively_partial(self) -> frozenset[str]:
        """The monoids under which some row makes the value partial."""
        return self.request.native.get(self.subject.values[0], EMPTY)

    def singles(self, codes: Codes) -> tuple[dict[int, list[Alternative]], int]:
        """For each mesh axis, the plans with another atom there; and how many were left out."""
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

    def joint(self, codes: Codes, singles: dict[int, list[Alternative]]) -> list[Alternative]:
        """Plans with other atoms on two mesh axes, those whose atoms cost least one by one
        first."""
        seen = {a.type for found in singles.values() for a in found}
        shape = tuple(self.request.graph.avals[self.subject.values[0]].shape)
        estimated: list[tuple[float, int, Wanted]] = []
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
        made: list[Alternative] = []
        for _, _, wanted in sorted(estimated, key=lambda e: e[:2])[:MAX_JOINT]:
            if self.left > 0:
                made.append(self.pinned(wanted))
        return made

    def is_type(self, shape: tuple[int, ...], codes: Codes) -> bool:
        """Whether a shape has room for a type, and its parts one monoid."""
        if self.subject.kind in ("input", "output") and not is_even(shape, codes, self.mesh.sizes):
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
        subject = self.subject
        links = self.origins.chain(self.held[0], position)
        links = (dataclasses.replace(links[0], subject=f"`{subject.label}`"), *links[1:])
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
        """The links of an output: its own type, then those of what is returned unless something
        else holds that type."""
        own = f"`{self.subject.label}`"
        tied = dict(self.request.demand.tied).get(self.subject.position)
        if self.is_pinned(position):
            return (
                Link(kind="input", subject=own, atom=code, because="pinned by the output's type"),
            )
        if tied is not None:
            donated = self.origins.label(self.request.graph.inputs[tied])
            because = f"it takes the buffer, and so the type, of the donated input {donated}"
            return Link(kind="tied", subject=own, atom=code, because=because), *links
        return (
            Link(kind="row", subject=own, atom=code, because="an output whose type is left free"),
            *links,
        )


def _by_cost(alternative: Alternative) -> tuple[bool, float, float, str]:
    cost = alternative.cost
    return (
        (True, 0.0, 0.0, alternative.change)
        if cost is None
        else (False, cost.seconds, cost.bytes_per_device, alternative.change)
    )
