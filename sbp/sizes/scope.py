"""Decides predicates on symbolic sizes for all sizes that a user asks for.

A `Size` has a value at one point and an expression for all points. Comparisons answer with the
value, and each answer is noted as a fact about the expressions. A computation that uses sizes only
through such answers has the same result wherever the same facts hold, so one run decides a whole
region. Z3 then finds a point outside of all regions so far, until there is none (King 1976,
"Symbolic execution and program testing"; Godefroid, Klarlund and Sen 2005, "DART"). The predicates
are the rules of operators themselves; what they require of sizes is written nowhere else.

    >>> import jax
    >>> (size,) = jax.export.symbolic_shape("4*b")
    >>> scope = Scope(names=("b",), constraints=())
    >>> found = explore(lambda lift: lift(size) % 8 == 0, scope, {"b": 6})
    >>> found.holds_at({"b": 2}), found.holds_at({"b": 3}), found.holds_at({"b": 10**9 + 1})
    (True, False, False)
"""

import itertools
import math
import operator
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partialmethod
from typing import Any, TypeVar

import jax
import z3

from sbp.errors import SbpWarning, noting
from sbp.sizes.expressions import (
    COMPARISONS,
    MULTIPLE,
    OPPOSITE,
    Functions,
    Point,
    symbols_in,
    value_of,
)

RLIMIT = 3_000_000
"""Z3's resource limit of one question about sizes. Linear questions take a few thousand. Where Z3
reaches the limit, the claim in question is undecided, and the report says so."""

REGIONS = 128
"""Regions of sizes after which a predicate is left undecided at the other sizes; the report says
so."""

SMALL = 4096
"""Small sizes among which a counterexample is looked for before Z3 finds one."""

Region = tuple[str, ...]
"""Constraints, such as `mod(b, 4) == 0`: the points where all of them hold."""

Lift = Callable[[Any], Any]
"""Symbolic size -> `Size`; other values stay as they are."""

T = TypeVar("T")


class Unanswered(Exception):
    """A question about sizes without an answer: Z3 gives up, or code wants a number."""


# ---- scopes -------------------------------------------------------------------------------------


class Scope:
    """The sizes that are asked for: symbols from 1 on, and constraints between them.

    Arguments:
      names: the symbols.
      constraints: texts, such as `b >= 2` and `mod(b, 4) == 0`.

    >>> scope = Scope(("b",), ("mod(b, 4) == 0",))
    >>> scope.allows({"b": 8}), scope.allows({"b": 6})
    (True, False)
    >>> scope.always(("mod(2*b, 8) == 0",)), scope.always(("b >= 8",))
    (True, False)
    """

    def __init__(self, names: Iterable[str], constraints: Iterable[str]) -> None:
        self.constraints = tuple(dict.fromkeys(constraints))
        self.names = tuple(sorted({*names, *(s for c in self.constraints for s in symbols_in(c))}))
        self._always: dict[Region, bool] = {}

    def allows(self, point: Point) -> bool:
        """Whether a point is in the scope."""
        return all(point[n] >= 1 for n in self.names) and holds_at(self.constraints, point)

    def narrow(self, region: Iterable[str]) -> "Scope":
        """The points of the scope in a region."""
        return Scope(self.names, (*self.constraints, *region))

    def with_terms(self, terms: Sequence[str]) -> Region:
        """The constraints together with others; those that follow from the rest are left out.

        >>> Scope(("b",), ("mod(b, 2) == 0", "b >= 4")).with_terms(["mod(b, 8) == 0"])
        ('mod(b, 8) == 0',)
        """
        own = [c for c in self.constraints if c not in terms]
        kept = minimal(own, lambda c: Scope(self.names, (*c, *terms)).always(self.constraints))
        return (*kept, *terms)

    def always(self, region: Region) -> bool:
        """Whether Z3 shows that a region is the whole scope."""
        if region not in self._always:
            self._always[region] = Solver(self).shows([region])
        return self._always[region]

    def points(self, count: int = SMALL) -> Iterator[Point]:
        """Points of the scope by their largest size, smallest first.

        Arguments:
          count: how many points are looked at, whether the scope allows them or not: of one symbol
            the sizes up to `count`, of two up to its square root.

        >>> [tuple(p.values()) for p in Scope(("a", "b"), ("a >= b",)).points(4)]
        [(1, 1), (2, 1), (2, 2)]
        """
        largest = int(count ** (1 / max(1, len(self.names))) + 1e-9)
        every = itertools.product(range(1, largest + 1), repeat=len(self.names))
        for values in sorted(every, key=lambda v: (max(v, default=0), v)):
            point = dict(zip(self.names, values, strict=True))
            if self.allows(point):
                yield point


def holds_at(region: Region, point: Point) -> bool:
    """Whether a point is in a region."""
    return all(value_of(c, point) for c in region)


def minimal(items: Sequence[T], suffice: Callable[[list[T]], bool]) -> list[T]:
    """Items without those that are not needed. The first ones are left out first.

    Arguments:
      items: all items, which suffice.
      suffice: whether fewer of them do.
    """
    kept = list(items)
    for item in items:
        fewer = [one for one in kept if one is not item]
        kept = fewer if suffice(fewer) else kept
    return kept


class Solver:
    """Z3 with the constraints of a scope, in a context of its own.

    A symbol that a constraint makes a multiple of k is k times an integer variable, so that Z3 sees
    that products of symbols divide.
    """

    def __init__(self, scope: Scope) -> None:
        self._context = z3.Context()
        self._solver = z3.Solver(ctx=self._context)
        self._solver.set("rlimit", RLIMIT)
        multiples = [m for m in map(MULTIPLE.fullmatch, scope.constraints) if m is not None]
        self._values: dict[str, Any] = {
            n: math.lcm(*(int(m[2]) for m in multiples if m[1] == n)) * z3.Int(n, self._context)
            for n in scope.names
        }
        self._solver.add(*(v >= 1 for v in self._values.values()), self._all_of(scope.constraints))

    def shows(self, *claims: Iterable[Region]) -> bool:
        """Whether Z3 shows that each claim holds everywhere: that each point is in one of its
        regions. False where Z3 gives up."""
        return all(self._solver.check(z3.Not(self._any_of(c))) == z3.unsat for c in claims)

    def add(self, claim: Iterable[Region]) -> None:
        """Leaves only the points in some of the regions."""
        self._solver.add(self._any_of(claim))

    def exclude(self, region: Region) -> None:
        """Leaves only the points outside of a region."""
        self._solver.add(z3.Not(self._all_of(region)))

    def point(self) -> Point | None:
        """A point; None when none is left.

        Raises:
          Unanswered: where Z3 gives up.
        """
        found = self._solver.check()
        if found == z3.unknown:
            raise Unanswered("Z3 gave up")
        if found == z3.unsat:
            return None
        model: Any = self._solver.model()
        return {
            name: model.eval(value, model_completion=True).as_long()
            for name, value in self._values.items()
        }

    def _all_of(self, region: Region) -> Any:
        terms = [value_of(c, self._values, _TERMS) for c in region]
        return z3.And(*terms, z3.BoolVal(True, self._context))

    def _any_of(self, claim: Iterable[Region]) -> Any:
        return z3.Or(*map(self._all_of, claim), z3.BoolVal(False, self._context))


def _floordiv(a: Any, b: Any) -> Any:
    """Python's `//` on terms. Z3 rounds so that the rest is not negative, which is Python's result
    for positive divisors."""
    if not _is_term(b):
        return a // b if not _is_term(a) else a / b if b > 0 else (-a) / -b
    return z3.If(b > 0, a / b, (-a) / (-b))


def _max(a: Any, b: Any) -> Any:
    return z3.If(a >= b, a, b) if _is_term(a) or _is_term(b) else max(a, b)


def _is_term(x: Any) -> bool:
    return isinstance(x, z3.ExprRef)


_TERMS: Functions = {
    "floordiv": _floordiv,
    "mod": lambda a, b: a % b if not _is_term(b) and b > 0 else a - b * _floordiv(a, b),
    "max": _max,
    "min": lambda a, b: -_max(-a, -b),
}


# ---- sizes that note what is asked of them ------------------------------------------------------


class Size:
    """A size of a tensor.

    Arguments:
      expression: its symbolic size, or a number.
      value: its value at one point.
      noted: the facts that its comparisons answered, in order.
    """

    __slots__ = ("expression", "noted", "value")

    def __init__(self, expression: Any, value: int, noted: dict[str, None]) -> None:
        self.expression, self.value, self.noted = expression, value, noted

    def _combine(self, other: Any, of: Callable[[Any, Any], Any], swapped: bool = False) -> Any:
        """The result of an operator on the values and on the expressions."""
        found = _parts(other)
        if found is None:
            return NotImplemented
        pairs = zip((self.expression, self.value), found, strict=True)
        expression, value = (of(*(pair[::-1] if swapped else pair)) for pair in pairs)
        symbolic = jax.export.is_symbolic_dim(expression)
        return Size(expression, value, self.noted) if symbolic else value

    def _compare(self, other: Any, how: str) -> Any:
        """The answer of a comparison, which is noted where it is not the same everywhere."""
        found = _parts(other)
        if found is None:
            return NotImplemented
        theirs, number = found
        answer = bool(COMPARISONS[how](self.value, number))
        if jax.export.is_symbolic_dim(self.expression - theirs):
            self.noted[f"{self.expression} {how if answer else OPPOSITE[how]} {theirs}"] = None
        return answer

    def _number(self) -> int:
        """The value, for code that needs a number. The noted fact limits the region to sizes with
        this value."""
        self.noted[f"{self.expression} == {self.value}"] = None
        return self.value

    __add__ = partialmethod(_combine, of=operator.add)
    __radd__ = partialmethod(_combine, of=operator.add, swapped=True)
    __sub__ = partialmethod(_combine, of=operator.sub)
    __rsub__ = partialmethod(_combine, of=operator.sub, swapped=True)
    __mul__ = partialmethod(_combine, of=operator.mul)
    __rmul__ = partialmethod(_combine, of=operator.mul, swapped=True)
    __floordiv__ = partialmethod(_combine, of=operator.floordiv)
    __rfloordiv__ = partialmethod(_combine, of=operator.floordiv, swapped=True)
    __mod__ = partialmethod(_combine, of=operator.mod)
    __rmod__ = partialmethod(_combine, of=operator.mod, swapped=True)
    __lt__ = partialmethod(_compare, how="<")
    __le__ = partialmethod(_compare, how="<=")
    __gt__ = partialmethod(_compare, how=">")
    __ge__ = partialmethod(_compare, how=">=")
    # `object` declares these two as methods, not as descriptors.
    __eq__ = partialmethod(_compare, how="==")  # pyright: ignore[reportAssignmentType]
    __ne__ = partialmethod(_compare, how="!=")  # pyright: ignore[reportAssignmentType]

    def __neg__(self) -> Any:
        return self * -1

    def __abs__(self) -> Any:
        return self if self >= 0 else -self

    def __truediv__(self, other: Any) -> float:
        return self._number() / other

    def __rtruediv__(self, other: Any) -> float:
        return other / self._number()

    def __divmod__(self, other: Any) -> Any:
        return self // other, self % other

    def __bool__(self) -> bool:
        return bool(self != 0)

    def __hash__(self) -> int:
        return hash(self._number())

    def __index__(self) -> int:
        return self._number()

    __int__ = __index__

    def __repr__(self) -> str:
        return str(self.expression)


def _parts(size: Any) -> tuple[Any, int] | None:
    """The expression and the value of a size or a number; None of anything else."""
    if isinstance(size, Size):
        return size.expression, size.value
    number = operator.index(size) if hasattr(size, "__index__") else None
    return None if number is None else (number, number)


# ---- exploration --------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Explored:
    """Where a predicate on sizes holds.

    Arguments:
      cases: for each region that was decided, whether it holds there, and a point of the region; no
        two regions overlap.
      open: why the points outside of these regions are not decided; empty where there are none.
    """

    cases: tuple[tuple[bool, Region, Point], ...]
    open: str = ""

    def where(self, answer: bool) -> list[Region]:
        """The regions where it holds, or where it does not."""
        return [region for holds, region, _ in self.cases if holds == answer]

    def holds_at(self, point: Point) -> bool | None:
        """Whether it holds at a point of the scope; None where that is not decided."""
        return next((holds for holds, region, _ in self.cases if holds_at(region, point)), None)


def explore(predicate: Callable[[Lift], bool], scope: Scope, start: Point) -> Explored:
    """Decides a predicate at all points of a scope.

    Arguments:
      predicate: takes a function that gives the sizes to compute with. Its result depends on
        nothing else that varies.
      scope: the points.
      start: the first point that it is run at.
    """
    cases: list[tuple[bool, Region, Point]] = []
    solver, point = None, start
    try:
        while point is not None:
            if len(cases) == REGIONS:
                raise Unanswered(f"there are more than {REGIONS} cases")
            holds, region = _run(predicate, point)
            cases.append((holds, region, point))
            if solver is None and scope.always(region):
                break
            solver = solver or Solver(scope)
            solver.exclude(region)
            point = solver.point()
    except Unanswered as error:
        if not cases:  # it runs on the numbers of the first point
            here = tuple(f"{n} == {v}" for n, v in sorted(start.items()))
            cases.append((predicate(numbers(start)), here, start))
        return Explored(cases=tuple(cases), open=str(error))
    return Explored(cases=tuple(cases))


def numbers(point: Point) -> Lift:
    """Symbolic size -> its value at a point; other values stay as they are."""
    return lambda d: value_of(str(d), point) if jax.export.is_symbolic_dim(d) else d


def _run(predicate: Callable[[Lift], bool], point: Point) -> tuple[bool, Region]:
    """The result of a predicate at a point, and the region of points with the same noted facts.

    Raises:
      Unanswered: where the predicate needs integers and does not run on `Size`s, or gives another
        result on integers.
    """
    noted: dict[str, None] = {}
    at = numbers(point)
    # The plan gives the warnings of rules; here each would come once for each region.
    with noting(), warnings.catch_warnings(action="ignore", category=SbpWarning):
        try:
            answer = predicate(
                lambda d: Size(d, at(d), noted) if jax.export.is_symbolic_dim(d) else d
            )
        # Code that needs integers raises one of these on a `Size`; it compares none, so it notes no
        # facts, and its answer would hold for no region.
        except (
            TypeError,
            AttributeError,
            NotImplementedError,
            jax.errors.InconclusiveDimensionOperation,
        ) as error:
            raise Unanswered(f"it needs sizes as numbers ({error})") from error
        if answer != predicate(at):
            raise Unanswered("it decides otherwise for numbers")
    return answer, tuple(noted)
