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
from sbp.sizes.formula import RLIMIT, Formula, FormulaStatus, formula_of
from sbp.sizes.scope import Scope

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
      formula: the status of the formula in `holds`; None where `holds` is the scope.
      terms: the facts of `holds` beyond the scope, where it is one conjunction.
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
    formula: FormulaStatus | None
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
    limited, formula = _limited(scope, pairs, limits, point)
    if formula is not None and formula.terms and any(e.open for _, e in pairs):
        # Products of symbols are easier where the other claims hold: from mod(m, 8) == 0 follows
        # that 8 divides m*k.
        narrowed = scope.narrowed(formula.terms)
        pairs = [(c, explore(c.holds, narrowed, point) if e.open else e) for c, e in pairs]
        limited, formula = _limited(scope, pairs, limits, point)
    failing = [*limited, *((c, e) for c, e in pairs if e.fails and e.open)]
    counterexample, is_smallest = _counterexample(scope, [e for _, e in failing], limits.small)
    at = counterexample or point
    return Decided(
        status="open" if any(e.open for _, e in pairs) else "some" if limited else "every",
        asked=_asked(scope),
        holds=_holds(scope, limited, formula),
        formula=None if formula is None else formula.status,
        terms=() if formula is None else tuple(map(str, formula.terms)),
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
    scope: Scope, pairs: Sequence[tuple[Claim, Explored]], limits: SizeLimits, point: Point
) -> tuple[list[tuple[Claim, Explored]], Formula | None]:
    """The decided claims that do not hold everywhere, without those that follow from others, and
    their formula; None where all decided claims hold everywhere."""
    failing = [(c, e) for c, e in pairs if e.fails and not e.open]
    if not failing:
        return [], None
    formula = formula_of(scope, [e for _, e in failing], point, rlimit=limits.formula_rlimit)
    return [failing[k] for k in formula.needed], formula


def _holds(scope: Scope, limited: Sequence[tuple[Claim, Explored]], formula: Formula | None) -> str:
    """Where the decided claims hold: the formula, or the claims where there is none."""
    if formula is None:
        return _asked(scope)
    if formula.alternatives:
        return formula.text
    texts = [c.text for c, _ in limited]
    rest = f" and {len(texts) - SHOWN} more conditions" if len(texts) > SHOWN else ""
    return " and ".join(texts[:SHOWN]) + rest


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
