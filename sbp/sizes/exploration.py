"""Decides a predicate on symbolic sizes for all sizes, by running it at some of them.

A `Size` has a value at one point and an expression for all points. Comparisons answer with the
value, and each answer is noted as a fact about the expressions. A computation that uses sizes only
through such answers has the same result wherever the same facts hold, so one run decides a whole
region. Z3 then finds a point outside of all regions so far, until there is none (King 1976,
"Symbolic execution and program testing"; Godefroid, Klarlund and Sen 2005, "DART"). The predicates
are the rules of operators themselves; what they require of sizes is written nowhere else.

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
"""Regions of sizes after which a predicate is left undecided at the other sizes; the report says
so."""


class Size:
    """A size of a tensor.

    Arguments:
      expression: its symbolic size, or a number.
      value: its value at one point.
      noted: the facts that its comparisons answered, in order.
    """

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
        # Where the difference is a number, the answer is the same everywhere.
        if jax.export.is_symbolic_dim(self.expression - theirs):
            fact = Fact(str(self.expression), comparison, str(theirs))
            self.noted[fact if answer else fact.opposite] = None
        return answer

    def _number(self) -> int:
        """The value, for code that needs a number. The noted fact limits the region to sizes with
        this value."""
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
"""Symbolic size -> `Size`; other values stay as they are."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Explored:
    """Where a predicate on sizes holds.

    Arguments:
      holds, fails: the regions where it holds and where it does not; no two of them overlap.
      open: why the points outside of these regions are not decided; empty where there are none.
      example: a point where it does not hold; None where none was found.
    """

    holds: tuple[Region, ...]
    fails: tuple[Region, ...]
    open: str = ""
    example: Point | None = None

    def holds_at(self, point: Point) -> bool | None:
        """Whether it holds at a point of the scope; None where that is not decided."""
        for regions, answer in ((self.holds, True), (self.fails, False)):
            if any(all(f.value(point) for f in r) for r in regions):
                return answer
        return None


def explore(
    predicate: Callable[[Lift], bool], scope: Scope, start: Point, *, limit: int = REGIONS
) -> Explored:
    """Decides a predicate at all points of a scope.

    Arguments:
      predicate: takes a function that gives the sizes to compute with. Its result depends on
        nothing else that varies.
      scope: the points.
      start: the first point that it is run at.
      limit: the most regions that are explored.
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
        if not holds and not fails:  # the predicate runs on the numbers of the first point
            here = tuple(Fact(n, "==", str(v)) for n, v in sorted(start.items()))
            (holds if predicate(numbers(start)) else fails).append(here)
    return Explored(holds=tuple(holds), fails=tuple(fails), open=reason, example=example)


def numbers(point: Point) -> Lift:
    """Symbolic size -> its value at a point; other values stay as they are."""
    return lambda d: value_of(str(d), point) if jax.export.is_symbolic_dim(d) else d


def _run(predicate: Callable[[Lift], bool], point: Point) -> tuple[bool, Region]:
    """The result of a predicate at a point, and the region of points with the same noted facts.

    Raises:
      Unanswered: where the predicate needs integers and does not run on `Size`s, or gives another
        result on integers.
    """
    noted: dict[Fact, None] = {}
    with noting(), warnings.catch_warnings():
        # The plan gives these warnings; here each would come once for each region.
        warnings.simplefilter("ignore", SbpWarning)
        try:
            answer = predicate(
                lambda d: (
                    Size(d, value_of(str(d), point), noted) if jax.export.is_symbolic_dim(d) else d
                )
            )
        # Code that needs integers raises one of these on a `Size`; it compares none, so it notes no
        # facts, and its answer would hold for no region.
        except (
            TypeError,
            AttributeError,
            NotImplementedError,
            jax.errors.InconclusiveDimensionOperation,
        ) as error:
            raise Unanswered(f"it wants numbers ({error})") from error
        if answer != predicate(numbers(point)):
            raise Unanswered("its answer on numbers is another one")
    return answer, tuple(noted)
