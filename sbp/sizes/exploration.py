"""Questions about symbolic sizes, decided for all of them: a rule runs on sizes that note what they
are asked, Z3 finds sizes not yet seen.

A `Size` is a number at one point and an expression everywhere. Whoever computes with it gets the
answers of the point; each answer of a comparison is noted as a fact. A computation that depends on
sizes through these answers alone has the same result wherever the same facts hold. So one run
decides a whole region; Z3 is asked for a point outside of all regions seen, until there is none
(King 1976, "Symbolic execution and program testing"; Godefroid, Klarlund and Sen 2005, "DART").
Nothing is told of the rules: whatever they ask of sizes, divisibility and order for the most part,
is what is decided.

    >>> import jax
    >>> from sbp.sizes.scope import Scope
    >>> (size,) = jax.export.symbolic_shape("4*b")
    >>> scope = Scope(names=("b",), constraints=())
    >>> found = explore(lambda lift: lift(size) % 8 == 0, scope, {"b": 6})
    >>> found.holds_at({"b": 2}), found.holds_at({"b": 3}), found.holds_at({"b": 10**9 + 1})
    (True, False, False)
"""

from __future__ import annotations

import operator
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax

from sbp.errors import SbpWarning, noting
from sbp.sizes.expressions import COMPARISONS, Point, value_of
from sbp.sizes.scope import Fact, Region, Scope, Unanswered

REGIONS = 128
"""Regions of sizes after which an exploration is given up."""


class Size:
    """A size of a tensor: its value at one point, its expression, and where to note what is asked
    of it."""

    __slots__ = ("expression", "noted", "value")

    def __init__(self, expression: Any, value: int, noted: dict[Fact, None]) -> None:
        self.expression, self.value, self.noted = expression, value, noted

    def _combine(self, other: Any, of: Callable[[Any, Any], Any], swapped: bool = False) -> Any:
        if isinstance(other, Size):
            theirs, number = other.expression, other.value
        elif hasattr(other, "__index__"):
            theirs = number = operator.index(other)
        else:
            return NotImplemented
        ours = (theirs, self.expression) if swapped else (self.expression, theirs)
        value = of(number, self.value) if swapped else of(self.value, number)
        expression = of(*ours)
        return (
            Size(expression, value, self.noted) if jax.export.is_symbolic_dim(expression) else value
        )

    def _compare(self, other: Any, comparison: str) -> Any:
        of = COMPARISONS[comparison]
        if isinstance(other, Size):
            theirs, number = other.expression, other.value
        elif hasattr(other, "__index__"):
            theirs = number = operator.index(other)
        else:
            return NotImplemented
        answer = bool(of(self.value, number))
        if jax.export.is_symbolic_dim(
            self.expression - theirs
        ):  # else it has one answer everywhere
            fact = Fact(str(self.expression), comparison, str(theirs))
            self.noted[fact if answer else fact.opposite] = None
        return answer

    def _number(self) -> int:
        """The value itself, for who wants a number: good for this one point alone."""
        self.noted[Fact(str(self.expression), "==", str(self.value))] = None
        return self.value

    def __add__(self, other: Any) -> Any:
        return self._combine(other, operator.add)

    def __radd__(self, other: Any) -> Any:
        return self._combine(other, operator.add, True)

    def __sub__(self, other: Any) -> Any:
        return self._combine(other, operator.sub)

    def __rsub__(self, other: Any) -> Any:
        return self._combine(other, operator.sub, True)

    def __mul__(self, other: Any) -> Any:
        return self._combine(other, operator.mul)

    def __rmul__(self, other: Any) -> Any:
        return self._combine(other, operator.mul, True)

    def __floordiv__(self, other: Any) -> Any:
        return self._combine(other, operator.floordiv)

    def __rfloordiv__(self, other: Any) -> Any:
        return self._combine(other, operator.floordiv, True)

    def __mod__(self, other: Any) -> Any:
        return self._combine(other, operator.mod)

    def __rmod__(self, other: Any) -> Any:
        return self._combine(other, operator.mod, True)

    def __divmod__(self, other: Any) -> Any:
        return self // other, self % other

    def __neg__(self) -> Any:
        return self * -1

    def __pos__(self) -> Size:
        return self

    def __abs__(self) -> Any:
        return self if self >= 0 else -self

    def __eq__(self, other: object) -> Any:
        return self._compare(other, "==")

    def __ne__(self, other: object) -> Any:
        return self._compare(other, "!=")

    def __lt__(self, other: Any) -> Any:
        return self._compare(other, "<")

    def __le__(self, other: Any) -> Any:
        return self._compare(other, "<=")

    def __gt__(self, other: Any) -> Any:
        return self._compare(other, ">")

    def __ge__(self, other: Any) -> Any:
        return self._compare(other, ">=")

    def __bool__(self) -> bool:
        return bool(self != 0)

    def __hash__(self) -> int:
        return hash(self._number())

    def __index__(self) -> int:
        return self._number()

    __int__ = __index__

    def __float__(self) -> float:
        return float(self._number())

    def __truediv__(self, other: Any) -> float:
        return self._number() / other

    def __rtruediv__(self, other: Any) -> float:
        return other / self._number()

    def __repr__(self) -> str:
        return str(self.expression)


# ---- exploration --------------------------------------------------------------------------------

Lift = Callable[[Any], Any]
"""Symbolic sizes become `Size`s; other values stay."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Explored:
    """Where a predicate on sizes holds.

    Arguments:
      holds, fails: the regions where it does and where it does not; they do not overlap.
      open: why other points, if there are any, are not decided; empty when all are.
      example: a point where it does not hold.
    """

    holds: tuple[Region, ...]
    fails: tuple[Region, ...]
    open: str = ""
    example: Point | None = None

    def holds_at(self, point: Point) -> bool | None:
        """Whether it holds at a point of the scope; None when that is not decided."""
        for regions, answer in ((self.holds, True), (self.fails, False)):
            if any(all(f.value(point) for f in r) for r in regions):
                return answer
        return None


def explore(
    predicate: Callable[[Lift], bool], scope: Scope, start: Point, *, limit: int = REGIONS
) -> Explored:
    """Decides a predicate at all points of a scope.

    Arguments:
      predicate: computes with sizes that it lifts, and with nothing else that varies.
      scope: the points.
      start: the first point.
      limit: regions after which to give up.
    """
    holds: list[Region] = []
    fails: list[Region] = []
    example: Point | None = None
    point: Point | None = start
    reason = f"there are more than {limit} cases"
    solver = None
    try:
        for _ in range(limit):
            answer, region = _run(predicate, point)
            (holds if answer else fails).append(region)
            example = point if example is None and not answer else example
            if solver is None and scope.always(region):
                reason = ""
                break
            solver = solver or scope.solver()
            solver.add(solver.none_of(region))
            point = solver.point()
            if point is None:
                reason = ""
                break
    except Unanswered as error:
        reason = str(error)
        if not holds and not fails:  # at the first point, at least, numbers tell
            here = tuple(Fact(n, "==", str(v)) for n, v in sorted(start.items()))
            (holds if predicate(numbers(start)) else fails).append(here)
    return Explored(holds=tuple(holds), fails=tuple(fails), open=reason, example=example)


def numbers(point: Point) -> Lift:
    """Symbolic sizes become their values at a point."""
    return lambda d: value_of(str(d), point) if jax.export.is_symbolic_dim(d) else d


def _run(predicate: Callable[[Lift], bool], point: Point) -> tuple[bool, Region]:
    """The answer at a point, and the region of points that have it for the same reasons."""
    noted: dict[Fact, None] = {}
    with noting(), warnings.catch_warnings():
        warnings.simplefilter(
            "ignore", SbpWarning
        )  # they would come once for each region; the plan gives them
        try:
            answer = predicate(
                lambda d: (
                    Size(d, value_of(str(d), point), noted) if jax.export.is_symbolic_dim(d) else d
                )
            )
        except (
            TypeError,
            AttributeError,
            NotImplementedError,
            jax.errors.InconclusiveDimensionOperation,
        ) as error:
            # code that wants integers: what it asks is not noted
            raise Unanswered(f"it wants numbers ({error})") from error
        if answer != predicate(numbers(point)):
            raise Unanswered("its answer on numbers is another one")
    return answer, tuple(noted)
