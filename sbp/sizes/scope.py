"""Facts about symbolic sizes, the sizes that a user asks for, and Z3's integers for them.

>>> scope = Scope(("b",), ("mod(b, 4) == 0",))
>>> scope.allows({"b": 8}), scope.allows({"b": 6})
(True, False)
>>> scope.always((Fact("mod(2*b, 8)", "==", "0"),)), scope.always((Fact("b", ">=", "8"),))
(True, False)
"""

from __future__ import annotations

import ast
import contextlib
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import z3

from sbp.sizes.expressions import COMPARISONS, Functions, Point, parsed, symbols_in, value_of

RLIMIT = 3_000_000
"""Z3's resource limit of one question about sizes. Linear questions take a few thousand. Where Z3
reaches the limit, the claim in question is undecided, and the report says so."""

_OPPOSITE = {"==": "!=", "!=": "==", "<": ">=", ">=": "<", ">": "<=", "<=": ">"}


@dataclass(frozen=True, slots=True, order=True)
class Fact:
    """A comparison of two sizes that holds, such as `mod(b, 4) == 0`."""

    left: str
    comparison: str
    right: str

    def __str__(self) -> str:
        return f"{self.left} {self.comparison} {self.right}"

    @property
    def opposite(self) -> Fact:
        """The fact that holds where this one does not."""
        return Fact(self.left, _OPPOSITE[self.comparison], self.right)

    def value(self, values: Mapping[str, Any], functions: Functions | None = None) -> Any:
        """Whether it holds for values of the symbols: True or False for integers, a term for
        terms.

        Arguments:
          values: a number or a term for each symbol.
          functions: floordiv, mod, max and min of terms; None for integers.
        """
        sides = (
            value_of(t, values) if functions is None else value_of(t, values, functions)
            for t in (self.left, self.right)
        )
        return COMPARISONS[self.comparison](*sides)


Region = tuple[Fact, ...]
"""The points where all of these facts hold."""


class Unanswered(Exception):
    """A question about sizes without an answer: Z3 gives up, or code wants a number."""


class Scope:
    """The sizes that are asked for: symbols from 1 on, and constraints between them.

    Arguments:
      names: the symbols.
      constraints: texts, such as `b >= 2` and `mod(b, 4) == 0`.
    """

    def __init__(self, names: Iterable[str], constraints: Iterable[str]) -> None:
        self.constraints = tuple(dict.fromkeys(constraints))
        self.names = tuple(sorted({*names, *(s for c in self.constraints for s in symbols_in(c))}))
        self._always: dict[Region, bool] = {}

    def allows(self, point: Point) -> bool:
        """Whether a point is in the scope."""
        return all(point[n] >= 1 for n in self.names) and all(
            value_of(c, point) for c in self.constraints
        )

    @property
    def defined(self) -> dict[str, str]:
        """The symbols that a constraint says to be another size.

        >>> Scope(("b", "s"), ("b == 2*s", "mod(s, 4) == 0")).defined
        {'b': '2 * s'}
        """
        found: dict[str, str] = {}
        for constraint in self.constraints:
            match parsed(constraint):
                case ast.Compare(left=ast.Name(id=name), ops=[ast.Eq()], comparators=[size]):
                    found.setdefault(name, ast.unparse(size))
                case _:
                    continue
        return found

    def solver(self, rlimit: int = RLIMIT) -> Solver:
        """Z3 with the scope asserted, in a context of its own."""
        return Solver(self, rlimit)

    def narrowed(self, facts: Iterable[Fact]) -> Scope:
        """The points of the scope where some facts hold."""
        return Scope(self.names, (*self.constraints, *map(str, facts)))

    def with_terms(self, terms: Iterable[str]) -> tuple[str, ...]:
        """The constraints together with others; those that follow from the rest are left out.

        >>> Scope(("b",), ("mod(b, 2) == 0", "b >= 4")).with_terms(["mod(b, 8) == 0"])
        ('mod(b, 8) == 0',)
        """
        terms = tuple(terms)
        kept = [c for c in self.constraints if c not in terms]
        for one in tuple(kept):
            others = [c for c in kept if c != one]
            solver = Scope(self.names, (*others, *terms)).solver()
            with contextlib.suppress(Unanswered):  # then the constraint stays, which is right, too
                if solver.point(solver.none_of_texts((one,))) is None:
                    kept = others
        return (*kept, *terms)

    def always(self, region: Region) -> bool:
        """Whether some facts hold at all points.

        Raises:
          Unanswered: where Z3 gives up.
        """
        if region not in self._always:
            solver = self.solver()
            self._always[region] = solver.point(solver.none_of(region)) is None
        return self._always[region]


class Solver:
    """Z3 with the constraints of a scope.

    A symbol that a constraint makes a multiple of k is k times an integer variable, so that Z3 sees
    that products of symbols divide.

    Arguments:
      scope: the scope.
      rlimit: Z3's resource limit of one question.
    """

    def __init__(self, scope: Scope, rlimit: int = RLIMIT) -> None:
        self._context = z3.Context()
        self._solver = z3.Solver(ctx=self._context)
        self._solver.set("rlimit", rlimit)
        self._symbols = {name: z3.Int(name, self._context) for name in scope.names}
        steps = {
            name: math.lcm(*(k for n, k in map(_multiple, scope.constraints) if n == name))
            for name in scope.names
        }
        self._values: dict[str, Any] = {
            name: steps[name] * symbol for name, symbol in self._symbols.items()
        }
        self._solver.add(*(v >= 1 for v in self._symbols.values()))
        self._solver.add(*(self.term(c) for c in scope.constraints))

    def term(self, text: str) -> Any:
        """A constraint as a term."""
        return self._bool(value_of(text, self._values, _TERMS))

    def none_of_texts(self, texts: Iterable[str]) -> Any:
        """The points where not all of some constraints hold, as a term."""
        return z3.Not(self.all_terms(self.term(t) for t in texts))

    def all_of(self, facts: Iterable[Fact]) -> Any:
        """All of some facts as a term."""
        return z3.And(*(self._bool(f.value(self._values, _TERMS)) for f in facts), self._bool(True))

    def any_of(self, regions: Iterable[Region]) -> Any:
        """The points of some regions as a term."""
        return z3.Or(*(self.all_of(r) for r in regions), self._bool(False))

    def all_terms(self, terms: Iterable[Any]) -> Any:
        """The conjunction of terms."""
        return z3.And(*terms, self._bool(True))

    def none_of(self, region: Region) -> Any:
        """The points outside of a region as a term."""
        return z3.Not(self.all_of(region))

    def implied(self, term: Any, fact: Fact) -> bool:
        """Whether Z3 shows that a fact holds wherever a term does; False where Z3 gives up."""
        return self._refutes(term, self.none_of((fact,)))

    def shows(self, term: Any) -> bool:
        """Whether Z3 shows that a term holds everywhere; False where Z3 gives up."""
        return self._refutes(z3.Not(term))

    def least(self, name: str, term: Any) -> int:
        """The least value of a symbol where a term holds; 1 where the term holds nowhere, or Z3
        gives up."""
        value, low = self._values[name], 1
        try:
            high = (self.point(term) or {name: 1})[name]
            while low < high:
                middle = (low + high) // 2
                found = self.point(term, value <= middle)
                low, high = (low, min(middle, found[name])) if found else (middle + 1, high)
        except Unanswered:
            return 1
        return low

    def _refutes(self, *terms: Any) -> bool:
        return self._solver.check(*terms) == z3.unsat

    def add(self, term: Any) -> None:
        """Asserts a term."""
        self._solver.add(term)

    def point(self, *terms: Any) -> dict[str, int] | None:
        """A point where all terms hold, None when there is none.

        Raises:
          Unanswered: where Z3 gives up.
        """
        found = self._solver.check(*terms)
        if found == z3.unknown:
            raise Unanswered("Z3 gives up")
        if found == z3.unsat:
            return None
        model: Any = self._solver.model()
        return {
            name: model.eval(self._values[name], model_completion=True).as_long()
            for name in self._symbols
        }

    def _bool(self, value: Any) -> Any:
        return z3.BoolVal(value, self._context) if isinstance(value, bool) else value


def _floordiv(a: Any, b: Any) -> Any:
    """Python's `//` on terms. Z3 rounds so that the rest is not negative, which is Python's result
    for positive divisors."""
    if not _is_term(b):
        return a // b if not _is_term(a) else a / b if b > 0 else (-a) / -b
    return z3.If(b > 0, a / b, (-a) / (-b))


def _mod(a: Any, b: Any) -> Any:
    return a % b if not _is_term(b) and b > 0 else a - b * _floordiv(a, b)


def _max(a: Any, b: Any) -> Any:
    return z3.If(a >= b, a, b) if _is_term(a) or _is_term(b) else max(a, b)


def _min(a: Any, b: Any) -> Any:
    return z3.If(a <= b, a, b) if _is_term(a) or _is_term(b) else min(a, b)


def _is_term(x: Any) -> bool:
    return isinstance(x, z3.ExprRef)


_TERMS: Functions = {"floordiv": _floordiv, "mod": _mod, "max": _max, "min": _min}


def _multiple(constraint: str) -> tuple[str, int]:
    """The symbol and the number of a constraint like `mod(b, 4) == 0`."""
    left, comparison, right = constraint.partition("==")
    name, _, step = left.strip().removeprefix("mod(").removesuffix(")").partition(",")
    found = (
        comparison
        and left.strip().startswith("mod(")
        and right.strip() == "0"
        and name.strip().isidentifier()
    )
    return (name.strip(), int(step)) if found and step.strip().isdecimal() else ("", 1)
