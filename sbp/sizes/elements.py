"""What a program itself asks of its symbolic sizes, whatever its typing: a reshape keeps the number
of elements. JAX does not compare the two numbers where they are symbolic.

>>> import jax
>>> b, s = jax.export.symbolic_shape("b, s")
>>> counted((b, s), (8, s))
(b, 8)
"""

from __future__ import annotations

import ast
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import jax

from sbp.errors import SbpError, Span
from sbp.signatures import traits_of
from sbp.sizes.claims import Claim
from sbp.sizes.exploration import Lift, numbers
from sbp.sizes.expressions import (
    Point,
    is_symbolic,
    parsed,
    shape_text,
    symbolic_in,
    symbols_in,
)
from sbp.sizes.scope import Fact
from sbp.trace.graph import Graph


@dataclass(frozen=True, slots=True, kw_only=True)
class ElementCount:
    """Two shapes of the same elements.

    Arguments:
      before, after: the shapes.
      sides: two sizes that are equal where the numbers of elements are.
      span: the user's line.
    """

    before: tuple[Any, ...]
    after: tuple[Any, ...]
    sides: tuple[Any, Any]
    span: Span | None

    @property
    def fact(self) -> Fact:
        """The condition as a constraint of `jax.export.symbolic_shape`."""
        return Fact(str(self.sides[0]), "==", str(self.sides[1]))

    def holds(self, lift: Lift) -> bool:
        """Whether the numbers of elements are equal at some sizes."""
        left, right = map(lift, self.sides)
        return bool(left == right)

    def fails_at(self, point: Point) -> bool:
        """Whether the numbers of elements differ at a point."""
        return not self.holds(numbers(point))

    @property
    def text(self) -> str:
        """The condition in words."""
        return f"{shape_text(self.before)} has as many elements as {shape_text(self.after)}"

    @property
    def claim(self) -> Claim:
        """The condition as a claim."""
        key = ("elements", self.fact)
        return Claim(text=self.text, key=key, holds=self.holds, span=self.span)


def element_counts(graph: Graph) -> tuple[ElementCount, ...]:
    """The numbers of elements that have to be equal in a program, in program order.

    Arguments:
      graph: the program with symbolic sizes.
    """
    return tuple(_counts(graph))


def _counts(graph: Graph) -> Iterator[ElementCount]:
    for node in graph.walk():
        if not traits_of(node.op).regroups:
            continue
        shapes = [tuple(a.shape) for a in (graph.aval(node.inputs[0]), graph.aval(node.outputs[0]))]
        if not is_symbolic(shapes):
            continue
        left, right = counted(*shapes)
        if str(left) != str(right):
            yield ElementCount(
                before=shapes[0],
                after=shapes[1],
                sides=equation(left, right),
                span=node.span,
            )


def check_symbols(graph: Graph, names: Iterable[str], avals: Iterable[Any]) -> None:
    """Checks that a program has no symbolic sizes but those of its arguments.

    Arguments:
      graph: the program.
      names: the symbols of its arguments.
      avals: the arguments.

    Raises:
      SbpError: `symbolic-sizes`, at the first line that has other ones.
    """
    known, scopes = set(names), {id(d.scope) for a in avals for d in symbolic_in([a])}
    for node in graph.walk():
        read = [v for v in node.params.values() if jax.export.is_symbolic_dim(v)]
        others = sorted(
            {
                name
                for size in (
                    *read,
                    *symbolic_in(graph.aval(v) for v in (*node.inputs, *node.outputs)),
                )
                for name in symbols_in(str(size))
                if name not in known or id(size.scope) not in scopes
            }
        )
        if others:
            several = len(others) > 1
            raise SbpError(
                f"the function uses the symbolic size{'s' * several} {' and '.join(others)} from"
                f" outside of its arguments; take {'them' if several else 'it'} from the shapes of"
                " its arguments",
                code="symbolic-sizes",
                span=node.span,
            )


def counted(before: Sequence[Any], after: Sequence[Any]) -> tuple[Any, Any]:
    """The numbers of elements of two shapes, without the sizes that they share."""
    rest, other = list(before), list[Any]()
    for size in after:
        same = next((k for k, s in enumerate(rest) if str(s) == str(size)), None)
        if same is None:
            other.append(size)
        else:
            del rest[same]
    return math.prod(rest), math.prod(other)


def equation(left: Any, right: Any) -> tuple[Any, Any]:
    """Two sizes as the sides of a constraint that they are equal. JAX takes one term on the left
    side; a single symbol reads best.

    >>> m, k = jax.export.symbolic_shape("m, k")
    >>> equation(m + k, 8), equation(8, 2 * m), equation(m, 8 * (m // 8))
    ((m, - k + 8), (2*m, 8), (mod(m, 8), 0))
    """
    difference = left - right
    if not jax.export.is_symbolic_dim(difference):
        return left, right
    tree, scope = parsed(str(difference)), difference.scope
    for part in ast.walk(tree):
        match part:
            case ast.Call(func=ast.Name(id="floordiv"), args=args):
                whole, by = (_size(ast.unparse(a), scope) for a in args)
                if str(whole - by * (whole // by)) in (str(difference), str(-difference)):
                    return whole % by, 0
            case _:
                pass
    sides: list[tuple[Any, Any]] = []
    for text in _terms(tree):
        term = _size(text.lstrip("-"), scope)
        if jax.export.is_symbolic_dim(term):
            sides.append((term, term + difference if text[0] == "-" else term - difference))
    return min(sides, key=lambda side: _effort(*side))


def _effort(term: Any, rest: Any) -> tuple[bool, bool]:
    """Orders equations: a symbol that the other side does not have comes first, one that it has
    last, since JAX replaces the symbol by the other side."""
    single = str(term).isidentifier()
    return single and str(term) in symbols_in(str(rest)), not single


def _terms(tree: ast.expr) -> list[str]:
    """The terms of a sum, those that are subtracted with a minus sign."""
    match tree:
        case ast.BinOp(left=left, op=ast.Add(), right=right):
            return [*_terms(left), *_terms(right)]
        case ast.BinOp(left=left, op=ast.Sub(), right=right):
            return [*_terms(left), *(t[1:] if t[0] == "-" else f"-{t}" for t in _terms(right))]
        case _:
            return [ast.unparse(tree).replace(" ", "").replace("**", "^")]


def _size(text: str, scope: Any) -> Any:
    return jax.export.symbolic_shape(text.replace("**", "^"), scope=scope)[0]
