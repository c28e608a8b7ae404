"""For which sizes a typing holds: its claims decided over a scope, and the condition in words that
can be pasted as constraints.

>>> from sbp.sizes.scope import Scope
>>> import jax
>>> (size,) = jax.export.symbolic_shape("4*b")
>>> claim = Claim(text="x divides", key=0, holds=lambda lift: lift(size) % 8 == 0)
>>> decide((claim,), Scope(("b",), ()), {"b": 6}).holds
'mod(b, 2) == 0'
"""

from __future__ import annotations

import ast
import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Literal

from sbp.sizes.claims import Claim
from sbp.sizes.exploration import Explored, explore, numbers
from sbp.sizes.expressions import Point, parsed
from sbp.sizes.scope import Fact, Region, Scope, Unanswered

ALTERNATIVES = 8
"""Most alternatives of a condition that are written out."""

SHOWN = 3
"""Claims that are listed where the condition has no short form."""

WORDS = 300_000
"""Z3's resource limit of one question about how to say a condition."""

TRIED = 512
"""Small sizes that are tried for a claim that is not decided."""

SMALL = 4096
"""Points that are tried, smallest first, for an example before Z3 is asked for one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Open:
    """A claim that is not decided for all sizes.

    Arguments:
      claim: the claim.
      why: why it is not.
      tried: how many small sizes were tried instead, all that meet the other claims.
      fails: the first of them where it does not hold.
    """

    claim: Claim
    why: str
    tried: int
    fails: Point | None


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Decided:
    """For which sizes a typing holds.

    Arguments:
      status: `every` size of the scope, `some` of them, or `open`: not decided for all.
      asked: the scope in words.
      holds: where the claims that are decided hold, in the syntax of constraints; the scope where
          they hold for all of it.
      terms: the parts of `holds` beyond the scope, when it is one conjunction.
      point: the sizes that the typing was chosen at.
      counterexample: the smallest sizes of the scope where it does not hold.
      limits: the claims that do not hold everywhere, those that fail at the counterexample first.
      undecided: the claims that are not decided everywhere.
      claims: how many there are.
    """

    status: Literal["every", "some", "open"]
    asked: str
    holds: str
    terms: tuple[str, ...]
    point: Point
    counterexample: Point | None
    limits: tuple[Claim, ...]
    undecided: tuple[Open, ...]
    claims: int
    _scope: Scope = field(repr=False)
    _explored: tuple[Explored, ...] = field(repr=False)

    def holds_at(self, **sizes: int) -> bool | None:
        """Whether the typing holds at sizes of the scope; None when that is not decided, or the
        scope does not allow them."""
        if sizes.keys() != set(self._scope.names) or not self._scope.allows(sizes):
            return None
        answers = [e.holds_at(sizes) for e in self._explored]
        return False if False in answers else None if None in answers else True


def decide(claims: Sequence[Claim], scope: Scope, point: Point) -> Decided:
    """Decides the claims of a typing for all sizes of a scope.

    Arguments:
      claims: what the typing asks.
      scope: the sizes that are asked for.
      point: the sizes that the typing was chosen at.
    """
    explored = [explore(c.holds, scope, point) for c in claims]
    limited, terms, holds = _condition(scope, claims, explored, point)
    if terms and any(e.open for e in explored):
        # Products of symbols are easier where the other claims hold: mod(m, 8) == 0 says that 8
        # divides m*k.
        narrowed = scope.narrowed(terms)
        explored = [
            explore(c.holds, narrowed, point) if e.open else e
            for c, e in zip(claims, explored, strict=True)
        ]
        limited, terms, holds = _condition(scope, claims, explored, point)
    pairs = list(zip(claims, explored, strict=True))
    failing = [*limited, *((c, e) for c, e in pairs if e.fails and e.open)]
    counterexample = _counterexample(scope, [e for _, e in failing])
    at = counterexample or point
    return Decided(
        status="open" if any(e.open for e in explored) else "some" if limited else "every",
        asked=_asked(scope),
        holds=holds,
        terms=tuple(map(str, terms)),
        point=point,
        counterexample=counterexample,
        limits=tuple(
            c for c, _ in sorted(failing, key=lambda pair: pair[1].holds_at(at) is not False)
        ),
        undecided=tuple(_tried(c, e, scope, [e for _, e in limited]) for c, e in pairs if e.open),
        claims=len(claims),
        _scope=scope,
        _explored=tuple(explored),
    )


def _condition(
    scope: Scope, claims: Sequence[Claim], explored: Sequence[Explored], point: Point
) -> tuple[list[tuple[Claim, Explored]], Region, str]:
    """The decided claims that do not hold everywhere, without those that follow; their condition if
    it is a conjunction; and in words."""
    limited = _binding(
        scope, [(c, e) for c, e in zip(claims, explored, strict=True) if e.fails and not e.open]
    )
    if not limited:
        return [], (), _asked(scope)
    try:
        found = list(
            itertools.islice(_alternatives(scope, [e for _, e in limited], point), ALTERNATIVES + 1)
        )
    except Unanswered:
        found = []
    if not found or len(found) > ALTERNATIVES:
        texts = [c.text for c, _ in limited]
        rest = f" and {len(texts) - SHOWN} more conditions" if len(texts) > SHOWN else ""
        return limited, (), " and ".join(texts[:SHOWN]) + rest
    written = [" and ".join(map(str, a)) for a in found]
    if len(written) == 1:
        return limited, found[0], written[0]
    return limited, (), " or ".join(f"({w})" if " and " in w else w for w in written)


def _tried(claim: Claim, explored: Explored, scope: Scope, others: Sequence[Explored]) -> Open:
    sizes = [
        p for p in itertools.islice(points(scope), TRIED) if all(e.holds_at(p) for e in others)
    ]
    fails = next((p for p in sizes if not claim.holds(numbers(p))), None)
    return Open(claim=claim, why=explored.open, tried=len(sizes), fails=fails)


def point_text(point: Point) -> str:
    """A point, such as `b = 40 and s = 56`."""
    return " and ".join(f"{name} = {value}" for name, value in sorted(point.items()))


def _asked(scope: Scope) -> str:
    """The scope in words; what JAX adds to a constraint on a rest is left out."""
    divided = {f"{k}*floordiv({n}, {k}) == {n}" for c in scope.constraints for n, k in [_rest(c)]}
    shown = [c for c in scope.constraints if c not in divided]
    bounded = {
        n for c in shown for n in scope.names if c.replace(" ", "").startswith((f"{n}>=", f"{n}>"))
    }
    return " and ".join([*(f"{n} >= 1" for n in scope.names if n not in bounded), *shown])


def _rest(constraint: str) -> tuple[str, int]:
    match parsed(constraint):
        case ast.Compare(
            left=ast.Call(
                func=ast.Name(id="mod"), args=[ast.Name(id=name), ast.Constant(value=int(step))]
            )
        ):
            return name, step
        case _:
            return "", 0


def points(scope: Scope, count: int = SMALL) -> Iterator[Point]:
    """Points of a scope by their largest size, smallest first, as many as are among the first
    `count` of all.

    >>> [tuple(p.values()) for p in points(Scope(("a", "b"), ("a >= b",)), 8)]
    [(1, 1), (2, 1), (2, 2), (3, 1), (3, 2)]
    """
    for values in itertools.islice(_tuples(len(scope.names)), count):
        point = dict(zip(scope.names, values, strict=True))
        if scope.allows(point):
            yield point


def _tuples(length: int) -> Iterator[tuple[int, ...]]:
    """All tuples of sizes, by their largest one."""
    if length == 0:
        yield ()
        return
    for largest in itertools.count(1):
        # Those passed over are the ones that came before, so no more than so many.
        yield from (
            v for v in itertools.product(range(1, largest + 1), repeat=length) if max(v) == largest
        )


def _counterexample(scope: Scope, explored: Sequence[Explored]) -> Point | None:
    failing = [e for e in explored if e.fails]
    if not failing:
        return None
    small = next((p for p in points(scope) if any(e.holds_at(p) is False for e in failing)), None)
    return small or next((e.example for e in failing if e.example is not None), None)


# ---- words --------------------------------------------------------------------------------------


def _binding(
    scope: Scope, limited: Sequence[tuple[Claim, Explored]]
) -> list[tuple[Claim, Explored]]:
    """Claims without those that follow from the ones before: many operators ask what their inputs
    are held to."""
    solver, kept = scope.solver(WORDS), list[tuple[Claim, Explored]]()
    for claim, explored in limited:
        term = solver.any_of(explored.holds)
        if not solver.shows(term):
            kept.append((claim, explored))
            solver.add(term)
    return kept


def _alternatives(scope: Scope, explored: Sequence[Explored], point: Point) -> Iterator[Region]:
    """Conjunctions that together say where all claims hold: one, when there is one that does.

    The first try is all that follows from the claims, which is the condition itself when that is a
    conjunction. Else a point where they hold is described by all facts there are, and of these so
    many are left out as leave the claims true; and so on with the points that no such conjunction
    covers (prime implicants).
    """
    solver = scope.solver(WORDS)
    holding = solver.all_terms([solver.any_of(e.holds) for e in explored])
    noted, rests = _facts(scope, explored)
    bounds = [
        Fact(name, ">=", str(least))
        for name in scope.names
        if (least := solver.least(name, holding)) > 1
    ]
    for universe in ([*bounds, *rests], [*noted, *bounds, *rests]):
        common = [f for f in universe if solver.implied(holding, f)]
        if _suffice(scope, common, explored):
            yield _needed(scope, common, explored)
            return
    rest: Point | None = (
        point if all(e.holds_at(point) for e in explored) else solver.point(holding)
    )
    while rest is not None:
        here = [f if f.value(rest) else f.opposite for f in (*noted, *bounds, *rests[::-1])]
        if not _suffice(scope, here, explored):
            raise Unanswered("Z3 gives up")
        found = _needed(scope, here, explored)
        yield found
        solver.add(solver.none_of(found))
        rest = solver.point(holding)


def _suffice(scope: Scope, facts: Sequence[Fact], explored: Sequence[Explored]) -> bool:
    """Whether claims are shown to hold wherever all of some facts do."""
    solver = scope.narrowed(facts).solver(WORDS)
    return all(solver.shows(solver.any_of(e.holds)) for e in explored)


def _needed(scope: Scope, facts: Sequence[Fact], explored: Sequence[Explored]) -> Region:
    """Facts without those that the condition does not need, the first ones tried first."""
    kept = list(facts)
    for fact in facts:
        fewer = [f for f in kept if f is not fact]
        if _suffice(scope, fewer, explored):
            kept = fewer
    return tuple(kept)


def _facts(scope: Scope, explored: Sequence[Explored]) -> tuple[list[Fact], list[Fact]]:
    """What a condition may be said with: what was noted, longest first; and, which reads best,
    rests of single symbols."""
    noted = sorted(
        {f for e in explored for r in (*e.holds, *e.fails) for f in r},
        key=lambda f: (-len(str(f)), f),
    )
    noted = list({min(f, f.opposite): f for f in noted}.values())
    steps = {k for f in noted for side in (f.left, f.right) for k in _divisors(side)}
    moduli = sorted({k for step in steps for k in range(2, min(step, 64) + 1) if step % k == 0})
    return noted, [Fact(f"mod({n}, {k})", "==", "0") for n in scope.names for k in moduli]


def _divisors(text: str) -> Iterator[int]:
    """The numbers that a size is divided by."""
    for node in ast.walk(parsed(text)):
        match node:
            case ast.Call(args=[_, ast.Constant(value=int(value))]):
                yield value
            case _:
                continue
