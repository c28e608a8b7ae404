"""For which sizes a typing holds: its claims decided over a scope, and the condition on sizes that
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
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Literal

from sbp.sizes.claims import Claim
from sbp.sizes.exploration import Explored, explore, numbers
from sbp.sizes.expressions import Point, parsed
from sbp.sizes.scope import Fact, Region, Scope, Solver

RLIMIT = 300_000
"""Z3's resource limit of one question about how to write a formula."""

SHOWN = 3
"""Claims that are listed where they have no formula; the others are counted."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SizeLimits:
    """How far claims are decided.

    Arguments:
      formula_rlimit: Z3's resource limit of one question about how to write the formula.
      tried: small sizes at which a claim is tried that is not decided.
      small: sizes that are tried, smallest first, for a counterexample. Where none of them is one,
          the counterexample is one that Z3 has found, which need not be the smallest.
    """

    formula_rlimit: int = RLIMIT
    tried: int = 512
    small: int = 4096


@dataclass(frozen=True, slots=True, kw_only=True)
class Open:
    """A claim that is not decided for all sizes.

    Arguments:
      claim: the claim.
      why: why it is not.
      tried: the number of small sizes at which it was tried; all of them meet the decided claims.
      fails: the first of these sizes at which it does not hold; None where it holds at all.
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
      holds: where the decided claims hold, in the syntax of constraints; the scope where they hold
          for all of it; the claims themselves where they have no formula.
      terms: the facts of the formula; empty where there is none.
      point: the sizes that the typing was chosen at.
      counterexample: sizes of the scope at which the typing does not hold.
      is_smallest: whether no decided claim fails at smaller sizes; False where Z3 found the
          counterexample, because the smallest sizes, which are tried first, include none.
      limits: the claims that do not hold everywhere, those that fail at the counterexample first.
      undecided: the claims that are not decided everywhere.
      claims: the number of claims.
    """

    status: Literal["every", "some", "open"]
    asked: str
    holds: str
    terms: tuple[str, ...]
    point: Point
    counterexample: Point | None
    is_smallest: bool
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


DEFAULT_LIMITS = SizeLimits()


def decide(
    claims: Sequence[Claim], scope: Scope, point: Point, limits: SizeLimits = DEFAULT_LIMITS
) -> Decided:
    """Decides the claims of a typing for all sizes of a scope.

    Arguments:
      claims: the claims of the typing.
      scope: the sizes that are asked for.
      point: the sizes that the typing was chosen at.
      limits: how far they are decided.
    """
    pairs = [(c, explore(c.holds, scope, point)) for c in claims]
    limited, terms = _limited(scope, pairs, limits)
    if terms and any(e.open for _, e in pairs):
        # Products of symbols are easier where the other claims hold: from mod(m, 8) == 0 follows
        # that 8 divides m*k.
        narrowed = scope.narrowed(terms)
        pairs = [(c, explore(c.holds, narrowed, point) if e.open else e) for c, e in pairs]
        limited, terms = _limited(scope, pairs, limits)
    failing = [*limited, *((c, e) for c, e in pairs if e.fails and e.open)]
    counterexample, is_smallest = _counterexample(scope, [e for _, e in failing], limits.small)
    at = counterexample or point
    return Decided(
        status="open" if any(e.open for _, e in pairs) else "some" if limited else "every",
        asked=_asked(scope),
        holds=_holds(scope, limited, terms),
        terms=tuple(map(str, terms)),
        point=point,
        counterexample=counterexample,
        is_smallest=is_smallest,
        limits=tuple(
            c for c, _ in sorted(failing, key=lambda pair: pair[1].holds_at(at) is not False)
        ),
        undecided=tuple(
            _tried(c, e, itertools.islice(points(scope, limits.small), limits.tried), limited)
            for c, e in pairs
            if e.open
        ),
        claims=len(claims),
        _scope=scope,
        _explored=tuple(e for _, e in pairs),
    )


def _limited(
    scope: Scope, pairs: Sequence[tuple[Claim, Explored]], limits: SizeLimits
) -> tuple[list[tuple[Claim, Explored]], Region]:
    """The decided claims that do not hold everywhere, without those that follow from others, and
    their formula; empty where there is none."""
    failing = [(c, e) for c, e in pairs if e.fails and not e.open]
    if not failing:
        return [], ()
    needed = _needed_claims(scope.solver(limits.formula_rlimit), [e for _, e in failing])
    limited = [failing[k] for k in needed]
    return limited, _FormulaWriter(scope, [e for _, e in limited], limits.formula_rlimit).formula()


def _holds(scope: Scope, limited: Sequence[tuple[Claim, Explored]], terms: Region) -> str:
    """Where the decided claims hold: the formula, or the claims where there is none."""
    texts = [c.text for c, _ in limited]
    more = len(texts) - SHOWN
    rest = f" and {more} more condition{'s' * (more > 1)}" if more > 0 else ""
    return " and ".join(map(str, terms)) or " and ".join(texts[:SHOWN]) + rest or _asked(scope)


def _tried(
    claim: Claim,
    explored: Explored,
    small: Iterable[Point],
    limited: Sequence[tuple[Claim, Explored]],
) -> Open:
    """An undecided claim, tried at small sizes where the decided claims hold."""
    sizes = [p for p in small if all(e.holds_at(p) for _, e in limited)]
    fails = next((p for p in sizes if not claim.holds(numbers(p))), None)
    return Open(claim=claim, why=explored.open, tried=len(sizes), fails=fails)


# ---- formulas -----------------------------------------------------------------------------------


def _needed_claims(solver: Solver, explored: Sequence[Explored]) -> list[int]:
    """The positions of the claims that do not follow from the claims before them. Many operators
    claim what their operands claim."""
    found: list[int] = []
    for position, one in enumerate(explored):
        term = solver.any_of(one.holds)
        if not solver.shows(term):
            found.append(position)
            solver.add(term)
    return found


@dataclass(frozen=True, slots=True, eq=False)
class _FormulaWriter:
    """Writes a formula: facts about sizes that hold exactly where some claims do.

    Arguments:
      scope: the sizes that are asked for.
      explored: the claims; all of them are decided everywhere.
      rlimit: Z3's resource limit of one question.
    """

    scope: Scope
    explored: Sequence[Explored]
    rlimit: int

    def formula(self) -> Region:
        """The facts that follow from the claims and together imply them, without those that are not
        needed; empty where no such facts were found."""
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
            if self.suffice(common):
                return self.needed(common)
        return ()

    def suffice(self, facts: Sequence[Fact]) -> bool:
        """Whether Z3 shows that all claims hold wherever all of some facts do."""
        solver = self.scope.narrowed(facts).solver(self.rlimit)
        return all(solver.shows(solver.any_of(e.holds)) for e in self.explored)

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


# ---- points -------------------------------------------------------------------------------------


def point_text(point: Point) -> str:
    """A point, such as `b = 40 and s = 56`."""
    return " and ".join(f"{name} = {value}" for name, value in sorted(point.items()))


def _asked(scope: Scope) -> str:
    """The scope in words, without the constraints that JAX adds to one on a `mod`."""
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


def points(scope: Scope, count: int = DEFAULT_LIMITS.small) -> Iterator[Point]:
    """Points of a scope by their largest size, smallest first.

    Arguments:
      scope: the scope.
      count: points that are looked at; those that the scope does not allow are left out.

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
        # The tuples that are left out here came before.
        yield from (
            v for v in itertools.product(range(1, largest + 1), repeat=length) if max(v) == largest
        )


def _counterexample(
    scope: Scope, explored: Sequence[Explored], small: int
) -> tuple[Point | None, bool]:
    """Sizes at which a claim does not hold, and whether there are no smaller ones.

    Arguments:
      scope: the sizes that are asked for.
      explored: the claims.
      small: points that are looked at, smallest first.
    """
    failing = [e for e in explored if e.fails]
    for point in points(scope, small):
        if any(e.holds_at(point) is False for e in failing):
            return point, True
    return next((e.example for e in failing if e.example is not None), None), not failing
