"""Explored claims -> a formula: where all of them hold, as alternatives of facts about sizes.

A formula can be pasted as constraints of `jax.export.symbolic_shape` where it has one alternative.

>>> from sbp.sizes.exploration import explore
>>> import jax
>>> (size,) = jax.export.symbolic_shape("4*b")
>>> scope = Scope(("b",), ())
>>> claim = explore(lambda lift: lift(size) % 8 == 0, scope, {"b": 6})
>>> found = formula_of(scope, [claim], {"b": 6})
>>> found.status, found.text
('reduced', 'mod(b, 2) == 0')
"""

from __future__ import annotations

import ast
import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from sbp.sizes.exploration import Explored
from sbp.sizes.expressions import Point, parsed
from sbp.sizes.scope import Fact, Region, Scope, Solver, Unanswered

ALTERNATIVES = 8
"""Most alternatives that a formula has."""

RLIMIT = 300_000
"""Z3's resource limit of one question about how to write a formula."""

FormulaStatus = Literal["reduced", "unreduced", "too many alternatives", "unanswered"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Formula:
    """Where claims hold.

    Arguments:
      status: `reduced`: Z3 has decided of each fact whether the formula needs it; `unreduced`: Z3
          gave up on some, so the formula may be longer than needed; `too many alternatives`: it
          would have more than `ALTERNATIVES`; `unanswered`: Z3 gave up on finding one.
      needed: positions of the claims that do not follow from the claims before them.
      alternatives: the claims hold where all facts of one alternative do; empty where no formula
          was found.
    """

    status: FormulaStatus
    needed: tuple[int, ...]
    alternatives: tuple[Region, ...] = ()

    @property
    def terms(self) -> Region:
        """The facts of a formula with one alternative; empty for other formulas."""
        return self.alternatives[0] if len(self.alternatives) == 1 else ()

    @property
    def text(self) -> str:
        """The formula in the syntax of constraints, joined by `and` and `or`; empty where none was
        found."""
        written = [" and ".join(map(str, a)) for a in self.alternatives]
        if len(written) == 1:
            return written[0]
        return " or ".join(f"({w})" if " and " in w else w for w in written)


def formula_of(
    scope: Scope, explored: Sequence[Explored], point: Point, *, rlimit: int = RLIMIT
) -> Formula:
    """The formula of some claims.

    Arguments:
      scope: the sizes that are asked for.
      explored: the claims; all of them are decided everywhere.
      point: sizes of the scope, tried first for the first alternative.
      rlimit: Z3's resource limit of one question.
    """
    solver = scope.solver(rlimit)
    needed = _needed_claims(solver, explored)
    writer = _FormulaWriter(scope, [explored[k] for k in needed], rlimit, gave_up=solver.gave_up)
    try:
        found = tuple(itertools.islice(writer.alternatives(point), ALTERNATIVES + 1))
    except Unanswered:
        found = ()
    if not found or len(found) > ALTERNATIVES:
        return Formula(status="too many alternatives" if found else "unanswered", needed=needed)
    status = "unreduced" if writer.gave_up else "reduced"
    return Formula(status=status, needed=needed, alternatives=found)


def _needed_claims(solver: Solver, explored: Sequence[Explored]) -> tuple[int, ...]:
    """The positions of the claims that do not follow from the claims before them. Many operators
    claim what their operands claim."""
    found: list[int] = []
    for position, one in enumerate(explored):
        term = solver.any_of(one.holds)
        if not solver.shows(term):
            found.append(position)
            solver.add(term)
    return tuple(found)


@dataclass(slots=True, eq=False)
class _FormulaWriter:
    """Writes the formula of claims.

    Arguments:
      scope: the sizes that are asked for.
      explored: the claims.
      rlimit: Z3's resource limit of one question.
      gave_up: whether Z3 has left a question open.
    """

    scope: Scope
    explored: Sequence[Explored]
    rlimit: int
    gave_up: bool = False

    def alternatives(self, point: Point) -> Iterator[Region]:
        """Conjunctions of facts that together cover the sizes where all claims hold; one, where one
        does.

        The first try is the conjunction of all facts that follow from the claims. Where that is not
        enough, a point where the claims hold is described by all facts, and facts without which the
        claims still hold are left out. The same is done with the points that are not covered yet
        (prime implicants).

        Raises:
          Unanswered: where Z3 gives up.
        """
        solver = self.scope.solver(self.rlimit)
        holding = solver.all_terms([solver.any_of(e.holds) for e in self.explored])
        noted, rests = self.facts()
        bounds = [
            Fact(name, ">=", str(least))
            for name in self.scope.names
            if (least := solver.least(name, holding)) > 1
        ]
        for universe in ([*bounds, *rests], [*noted, *bounds, *rests]):
            common = [f for f in universe if solver.implied(holding, f)]
            self.gave_up |= solver.gave_up
            if self.suffice(common):
                yield self.needed(common)
                return
        rest: Point | None = (
            point if all(e.holds_at(point) for e in self.explored) else solver.point(holding)
        )
        while rest is not None:
            here = [f if f.value(rest) else f.opposite for f in (*noted, *bounds, *rests[::-1])]
            if not self.suffice(here):
                raise Unanswered("Z3 gives up")
            found = self.needed(here)
            yield found
            solver.add(solver.none_of(found))
            rest = solver.point(holding)

    def suffice(self, facts: Sequence[Fact]) -> bool:
        """Whether Z3 shows that all claims hold wherever all of some facts do."""
        solver = self.scope.narrowed(facts).solver(self.rlimit)
        shown = all(solver.shows(solver.any_of(e.holds)) for e in self.explored)
        self.gave_up |= solver.gave_up
        return shown

    def needed(self, facts: Sequence[Fact]) -> Region:
        """Facts without the facts that the claims do not need. The first ones are left out
        first."""
        kept = list(facts)
        for fact in facts:
            fewer = [f for f in kept if f is not fact]
            if self.suffice(fewer):
                kept = fewer
        return tuple(kept)

    def facts(self) -> tuple[list[Fact], list[Fact]]:
        """The facts that a formula may have: those noted while the claims were explored, longest
        first; and the divisibility of single symbols, which reads best."""
        noted = sorted(
            {f for e in self.explored for r in (*e.holds, *e.fails) for f in r},
            key=lambda f: (-len(str(f)), f),
        )
        noted = list({min(f, f.opposite): f for f in noted}.values())
        steps = {k for f in noted for side in (f.left, f.right) for k in _divisors(side)}
        moduli = sorted({k for step in steps for k in range(2, min(step, 64) + 1) if step % k == 0})
        return noted, [Fact(f"mod({n}, {k})", "==", "0") for n in self.scope.names for k in moduli]


def _divisors(text: str) -> Iterator[int]:
    """The numbers that a size is divided by."""
    for node in ast.walk(parsed(text)):
        match node:
            case ast.Call(args=[_, ast.Constant(value=int(value))]):
                yield value
            case _:
                continue
