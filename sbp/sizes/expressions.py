"""Symbolic sizes in a traced program: expressions such as `8*b`, their values, the program at one
choice of them, and questions of a trace that they do not decide.

`jax.export.symbolic_shape` makes the expressions. `value_of` evaluates their text: on integers
here, on Z3's integer terms in `sbp.sizes.scope`.

    >>> import jax
    >>> (size,) = jax.export.symbolic_shape("8*b + 4")
    >>> value_of(str(size), {"b": 3})
    28
"""

import ast
import contextlib
import dataclasses
import functools
import itertools
import operator
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import jax
import numpy as np

from sbp import _jax
from sbp.errors import SbpError, SbpInternalError
from sbp.trace.graph import DIM_AS_VALUE, Constant, Graph, Node, Operand

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


@functools.lru_cache(maxsize=4096)
def parse(text: str) -> ast.expr:
    """The syntax tree of a size or of a constraint on sizes, as `jax.export` writes them."""
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
                return functools.reduce(operator.mul, [of(left)] * power)
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


def is_symbolic(shapes: Iterable[Any]) -> bool:
    """Whether any shape has a symbolic size; arrays and avals count with their shapes."""
    return any(jax.export.is_symbolic_dim(d) for x in shapes for d in getattr(x, "shape", x))


def symbolic_in(avals: Iterable[Any]) -> list[Any]:
    """The symbolic sizes of some shapes."""
    return [d for a in avals for d in a.shape if jax.export.is_symbolic_dim(d)]


def refuse_symbolic(avals: Iterable[Any], what: str) -> None:
    """Checks that all sizes are numbers.

    Raises:
      SbpError: `symbolic-sizes` for a shape with a symbolic size.
    """
    for aval in avals:
        if is_symbolic([aval]):
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
            if all(a is b for a, b in zip(items, value, strict=True)):
                return value
            return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)
        case dict():
            return {k: map_sizes(v, of) for k, v in value.items()}
        case _ if (
            hasattr(value, "shape") and hasattr(value, "update") and is_symbolic([value])
        ):  # an aval
            return value.update(shape=map_sizes(tuple(value.shape), of))
        case _ if dataclasses.is_dataclass(value) and not isinstance(value, type | Graph):
            changed = {
                f.name: map_sizes(getattr(value, f.name), of)
                for f in dataclasses.fields(value)
                if f.init
            }
            same = all(v is getattr(value, k) for k, v in changed.items())
            return value if same else dataclasses.replace(value, **changed)
        case _:
            if _jax.is_jaxpr(value) and is_symbolic(_jax.avals_in(value)):
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
    at = lambda size: value_of(str(size), point)  # noqa: E731
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
                dataclasses.replace(
                    node,
                    params=params,
                    inputs=tuple(constants.get(o, o) for o in node.inputs),
                    regions=tuple(map(visit, node.regions)),
                )
            )
        outputs = tuple(constants.get(o, o) for o in g.outputs)
        return dataclasses.replace(g, nodes=tuple(nodes), outputs=outputs, avals=avals)

    return visit(graph)


def first_difference(graph: Graph, other: Graph) -> tuple[Node | None, Node | None] | None:
    """The first nodes in which two traces of one function differ, apart from nodes that compute
    with sizes only; None where they agree.

    A function may trace to other operations when its sizes are symbolic: `x[:n]` is a gather for a
    symbolic n and a slice for a number.
    """
    for mine, theirs in itertools.zip_longest(_computing(graph), _computing(other)):
        if (
            mine is None
            or theirs is None
            or (mine.op, len(mine.outputs)) != (theirs.op, len(theirs.outputs))
        ):
            return mine, theirs
    return None


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


# ---- questions that sizes do not decide ---------------------------------------------------------

# JAX removes the frames that hold the sizes from the traceback of its errors. Only its messages
# have them.
_REST = re.compile(r"remainder (.+) should be 0")
_COMPARISON = re.compile(r"comparison '(.+?)' (>=|<=|>|<) '(.+?)' is inconclusive")


@contextlib.contextmanager
def deciding_sizes(advice: str, given: tuple[str, ...] | None = None) -> Iterator[None]:
    """Traces the user's function inside.

    Arguments:
      advice: what to change where the function asks something that symbolic sizes do not decide.
      given: the constraints on the sizes of the arguments; None where the arguments have numbers.

    Raises:
      SbpError: `symbolic-sizes`, at the user's line that asks it.
    """
    try:
        yield
    except jax.errors.InconclusiveDimensionOperation as error:
        first = " ".join(str(error).split("\n")[0].split()).removesuffix(".")
        found = () if given is None else deciding_constraints(error, given)
        if found:
            either = " or ".join(f'"{c}"' for c in found)
            advice = f"add {either} to the constraints of jax.export.symbolic_shape, or {advice}"
        raise SbpError(
            f"the program depends on more than its symbolic sizes say: {first}; {advice}",
            code="symbolic-sizes",
            span=_jax.raising_span(error),
        ) from error


def deciding_constraints(error: BaseException, given: tuple[str, ...]) -> tuple[str, ...]:
    """The constraints of which each answers the question behind an error, as JAX finds when it has
    them; empty where there are none, or the question is not known.

    Arguments:
      error: JAX's error about symbolic sizes.
      given: the constraints that there are.

    >>> (b,) = jax.export.symbolic_shape("b")
    >>> try:
    ...     b > 5
    ... except jax.errors.InconclusiveDimensionOperation as error:
    ...     print(deciding_constraints(error, ()))
    ('b >= 6', 'b <= 5')
    """
    asked: list[tuple[str, str, str]] = []
    if rest := _REST.search(str(error)):
        asked = [(rest[1], "==", "0")]
    elif comparison := _COMPARISON.search(str(error)):
        left, how, right = comparison.groups()
        asked = [(left, how, right), (left, OPPOSITE[how], right)]
    return tuple(text for a in asked if _answers((*given, text := _as_constraint(*a)), *a))


def _as_constraint(left: str, how: str, right: str) -> str:
    """A comparison as JAX takes it in a constraint: with `>=` or `<=`."""
    step = {">": 1, "<": -1}.get(how, 0)
    if step:
        right = str(int(right) + step) if right.lstrip("-").isdigit() else f"{right} {step:+d}"
    return f"{left} {how}{'=' if step else ''} {right}"


def _answers(constraints: tuple[str, ...], left: str, how: str, right: str) -> bool:
    """Whether JAX answers a comparison with yes under some constraints."""
    try:
        sizes = jax.export.symbolic_shape(f"{left}, {right}", constraints=constraints)
        return bool(COMPARISONS[how](*sizes))
    except (ValueError, jax.errors.InconclusiveDimensionOperation):
        return False
