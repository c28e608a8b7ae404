"""Symbolic sizes in a traced program: expressions such as `4*b`, their values, the program at one
choice of them, and predicates on them, decided for all sizes that a user asks for.

`jax.export.symbolic_shape` makes the expressions. `value_of` evaluates their text, on integers and
on Z3's integer terms.

    >>> import jax
    >>> (size,) = jax.export.symbolic_shape("4*b")
    >>> value_of(str(size), {"b": 3})
    12

A `Size` has a value at one point and an expression for all points. Comparisons answer with the
value, and each answer is noted as a fact about the expressions. A computation that uses sizes only
through such answers has the same result wherever the same facts hold, so one run decides a whole
region. Z3 then finds a point outside of all regions so far, until there is none (King 1976,
"Symbolic execution and program testing"; Godefroid, Klarlund and Sen 2005, "DART"). The predicates
are the rules of operators themselves; what they require of sizes is written nowhere else.

    >>> scope = Scope(names=("b",), constraints=())
    >>> found = explore(lambda lift: lift(size) % 8 == 0, scope, {"b": 6})
    >>> found.holds_at({"b": 2}), found.holds_at({"b": 3}), found.holds_at({"b": 10**9 + 1})
    (True, False, False)"""

import ast
import itertools
import keyword
import math
import operator
import re
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, fields, is_dataclass, replace
from functools import cache, lru_cache, partialmethod, reduce
from typing import Any

import jax
import numpy as np
import z3

from sbp import _jax
from sbp.errors import SbpError, SbpInternalError, SbpWarning, noting
from sbp.trace.graph import DIM_AS_VALUE, Constant, Graph, Node, Operand

# ---- expressions --------------------------------------------------------------------------------


Point = Mapping[str, int]
"""A number for each symbol."""

Functions = Mapping[str, Callable[[Any, Any], Any]]
"""The functions of expressions (`floordiv`, `mod`, `max`, `min`) for one kind of number."""

INTEGERS: Functions = {"floordiv": operator.floordiv, "mod": operator.mod, "max": max, "min": min}

COMPARISONS: dict[str, Callable[[Any, Any], Any]] = {
    "==": operator.eq,
    "!=": operator.ne,
    "<": operator.lt,
    "<=": operator.le,
    ">": operator.gt,
    ">=": operator.ge,
}
MULTIPLE = re.compile(r"\s*mod\((\w+), *(\d+)\) *== *0\s*")
"""A constraint that a symbol is a multiple of a number, such as `mod(b, 4) == 0`."""

_WORD = re.compile(r"\w+")

OPPOSITE = {"==": "!=", "!=": "==", "<": ">=", ">=": "<", ">": "<=", "<=": ">"}
_OPERATORS: dict[type, Callable[[Any, Any], Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Eq: operator.eq,
    ast.NotEq: operator.ne,
    ast.Lt: operator.lt,
    ast.LtE: operator.le,
    ast.Gt: operator.gt,
    ast.GtE: operator.ge,
}


@lru_cache(maxsize=4096)
def parse(text: str) -> ast.expr:
    """The syntax tree of a size or of a constraint on sizes, as `jax.export` writes them.

    Raises:
      SbpError: `symbolic-sizes` for a size with the name of a Python keyword.
    """
    for word in _WORD.findall(text):
        if keyword.iskeyword(word):
            raise SbpError(
                f"rename the size `{word}`, which is a word of Python", code="symbolic-sizes"
            )
    return ast.parse(text.replace("^", "**"), mode="eval").body


def value_of(text: str, values: Mapping[str, Any], functions: Functions = INTEGERS) -> Any:
    """The value of a size, or the truth of a constraint, for any kind of number.

    Arguments:
      text: such as `8*b + mod(s, 4)` or `b >= 2`.
      values: a number for each symbol.
      functions: `floordiv`, `mod`, `max` and `min` of such numbers.

    Raises:
      SbpInternalError: for a text that `jax.export` does not write.
    """

    def of(node: ast.expr) -> Any:
        match node:
            case ast.Constant(value=int(value)):
                return value
            case ast.Name(id=name):
                return values[name]
            case ast.UnaryOp(op=ast.USub(), operand=operand):
                return -of(operand)
            case ast.BinOp(left=left, op=ast.Pow(), right=ast.Constant(value=int(power))):
                return reduce(operator.mul, [of(left)] * power)
            case ast.Call(func=ast.Name(id=name), args=[left, right]) if name in functions:
                return functions[name](of(left), of(right))
            case (
                ast.BinOp(left=left, op=op, right=right)
                | ast.Compare(left=left, ops=[op], comparators=[right])
            ) if type(op) in _OPERATORS:
                return _OPERATORS[type(op)](of(left), of(right))
            case _:
                raise SbpInternalError(f"no size: {text!r}")

    return of(parse(text))


def symbols_in(text: str) -> frozenset[str]:
    """The symbols of an expression."""
    tree = ast.walk(parse(text))
    return frozenset(n.id for n in tree if isinstance(n, ast.Name)) - INTEGERS.keys()


def symbolic_in(shapes: Iterable[Any]) -> list[Any]:
    """The symbolic sizes of some shapes; arrays and avals count with their shapes."""
    return [d for x in shapes for d in getattr(x, "shape", x) if jax.export.is_symbolic_dim(d)]


def refuse_symbolic(avals: Iterable[Any], what: str) -> None:
    """Checks that all sizes are numbers.

    Raises:
      SbpError: `symbolic-sizes` for a shape with a symbolic size.
    """
    for aval in avals:
        if symbolic_in([aval]):
            raise SbpError(
                f"{what} needs concrete sizes, got the shape {shape_text(aval.shape)}; give"
                " numbers, and use .check for symbolic sizes",
                code="symbolic-sizes",
            )


def shape_text(shape: Iterable[Any]) -> str:
    """A shape, such as `(8*b, 128)`."""
    sizes = [str(d) for d in shape]
    return f"({', '.join(sizes)}{',' if len(sizes) == 1 else ''})"


def constraints_of(dims: Iterable[Any]) -> tuple[str, ...]:
    """The constraints of the scope that symbolic sizes belong to.

    Raises:
      SbpError: `symbolic-sizes` for sizes of different scopes.
    """
    scopes = {id(d.scope): d.scope for d in dims}
    if len(scopes) > 1:
        raise SbpError(
            "the inputs have symbolic sizes from different scopes, where equal names can mean"
            " different sizes; make all shapes with one jax.export.SymbolicScope:"
            " symbolic_shape(.., scope=scope)",
            code="symbolic-sizes",
        )
    return tuple(c for scope in scopes.values() for c in _jax.scope_constraints(scope))


def map_sizes(value: Any, of: Callable[[Any], Any]) -> Any:
    """A parameter of an equation with each symbolic size replaced; the same object where it has
    none.

    Raises:
      SbpError: `symbolic-sizes` for a symbolic size inside a jaxpr that sbp does not type.
    """
    if jax.export.is_symbolic_dim(value):
        return of(value)
    match value:
        case tuple() | list():
            items = [map_sizes(v, of) for v in value]
            return (
                value
                if all(a is b for a, b in zip(items, value, strict=True))
                else type(value)(*items)
                if hasattr(value, "_fields")
                else type(value)(items)
            )
        case dict():
            return {k: map_sizes(v, of) for k, v in value.items()}
        case _ if (
            hasattr(value, "shape") and hasattr(value, "update") and symbolic_in([value])
        ):  # an aval
            return value.update(shape=map_sizes(tuple(value.shape), of))
        case _ if is_dataclass(value) and not isinstance(value, type | Graph):
            changed = {
                f.name: map_sizes(getattr(value, f.name), of) for f in fields(value) if f.init
            }
            same = all(v is getattr(value, k) for k, v in changed.items())
            return value if same else replace(value, **changed)
        case _:
            if _jax.is_jaxpr(value) and symbolic_in(_jax.avals_in(value)):
                raise SbpError(
                    "a symbolic size inside of a body that sbp does not type", code="symbolic-sizes"
                )
            return value


def graph_at(graph: Graph, point: Point) -> Graph:
    """A program traced with symbolic sizes, at one choice of them. Values and nodes keep their
    numbers.

    A size that the program computes with, such as the divisor of a mean, becomes a constant.

    Raises:
      SbpError: `symbolic-sizes` for a primitive whose body has symbolic sizes and is not typed by
          sbp.
    """
    at = numbers(point)
    avals = {
        v: _jax.empty_aval(map_sizes(a.shape, at), a.dtype, a.weak_type)
        for v, a in graph.avals.items()
    }
    constants: dict[Operand, Constant] = {}

    def visit(g: Graph) -> Graph:
        nodes: list[Node] = []
        for node in g.nodes:
            if node.op == DIM_AS_VALUE:
                (out,) = node.outputs
                constants[out] = Constant(
                    np.asarray(at(node.params["dim"]), avals[out].dtype), avals[out]
                )
                continue
            try:
                params = {
                    k: visit(v) if isinstance(v, Graph) else map_sizes(v, at)
                    for k, v in node.params.items()
                }
            except SbpError as error:
                raise SbpError(
                    f"{node.op} has {error.message}; give numbers there",
                    code=error.code,
                    span=node.span,
                ) from error
            nodes.append(
                replace(
                    node,
                    params=params,
                    inputs=tuple(constants.get(o, o) for o in node.inputs),
                    regions=tuple(map(visit, node.regions)),
                )
            )
        return replace(
            g,
            nodes=tuple(nodes),
            outputs=tuple(constants.get(o, o) for o in g.outputs),
            avals=avals,
        )

    return visit(graph)


def first_difference(graph: Graph, other: Graph) -> tuple[Node | None, Node | None] | None:
    """The first nodes in which two traces of one function differ, apart from nodes that compute
    with sizes only; None where they agree.

    A function may trace to other operations when its sizes are symbolic: `x[:n]` is a gather for a
    symbolic n and a slice for a number.
    """
    return next(
        (
            (mine, theirs)
            for mine, theirs in itertools.zip_longest(_computing(graph), _computing(other))
            if mine is None
            or theirs is None
            or (mine.op, len(mine.outputs)) != (theirs.op, len(theirs.outputs))
        ),
        None,
    )


def _computing(graph: Graph) -> Iterator[Node]:
    """The nodes of a graph and of its regions that have an operand that depends on its inputs, or
    no operands."""
    known: set[Operand] = set()
    for node in graph.nodes:
        if node.inputs and all(isinstance(o, Constant) or o in known for o in node.inputs):
            known |= set(node.outputs)
        else:
            yield node
            for region in node.regions:
                yield from _computing(region)


RLIMIT = 3_000_000
"""Z3's resource limit of one question about sizes. Linear questions take a few thousand. Where Z3
reaches the limit, the claim in question is undecided, and the report says so."""

REGIONS = 128
"""Regions of sizes after which a predicate is left undecided at the other sizes; the report says
so."""

Region = tuple[str, ...]
"""Constraints, such as `mod(b, 4) == 0`: the points where all of them hold."""

Lift = Callable[[Any], Any]
"""Symbolic size -> `Size`; other values stay as they are."""


class Unanswered(Exception):
    """A question about sizes without an answer: Z3 gives up, or code wants a number."""


# ---- scopes -------------------------------------------------------------------------------------


class Scope:
    """The sizes that are asked for: symbols from 1 on, and constraints between them.

    Arguments:
      names: the symbols.
      constraints: texts, such as `b >= 2` and `mod(b, 4) == 0`.

    Attributes:
      always: says whether Z3 shows that a region is the whole scope.

    >>> scope = Scope(("b",), ("mod(b, 4) == 0",))
    >>> scope.allows({"b": 8}), scope.allows({"b": 6})
    (True, False)
    >>> scope.always(("mod(2*b, 8) == 0",)), scope.always(("b >= 8",))
    (True, False)
    """

    def __init__(self, names: Iterable[str], constraints: Iterable[str]) -> None:
        self.constraints = tuple(dict.fromkeys(constraints))
        self.names = tuple(sorted({*names, *(s for c in self.constraints for s in symbols_in(c))}))
        self.always = cache(lambda region: Solver(self).shows([region]))

    def allows(self, point: Point) -> bool:
        """Whether a point is in the scope."""
        return all(point[n] >= 1 for n in self.names) and holds_at(self.constraints, point)

    def narrow(self, region: Iterable[str]) -> "Scope":
        """The points of the scope in a region."""
        return Scope(self.names, (*self.constraints, *region))


def holds_at(region: Region, point: Point) -> bool:
    """Whether a point is in a region."""
    return all(value_of(c, point) for c in region)


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
        return (
            Size(expression, value, self.noted) if jax.export.is_symbolic_dim(expression) else value
        )

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
