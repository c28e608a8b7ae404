"""What the user calls things: names, expressions and places, read from the source text under a
span."""

from __future__ import annotations

import ast
import functools
import linecache
import re
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from sbp import _jax
from sbp.errors import Span
from sbp.infer.constraints import PinSite
from sbp.infer.space import Code, decode
from sbp.limits import policies_in
from sbp.mesh import MeshSpec
from sbp.trace.graph import Constant, Graph, Node, Operand

Targets = tuple[tuple[str, ...], ...]
"""The names on the left of an assignment, flat: those of each element of a tuple on its own; one
element for a single name."""

_Position = tuple[int, int, int, int]


def _position(at: ast.expr | ast.stmt) -> _Position:
    return at.lineno, at.col_offset, at.end_lineno or 0, at.end_col_offset or 0


@dataclass(frozen=True, slots=True)
class _Source:
    """What a source text has at each position: the expression, and the names that it is assigned
    to."""

    expressions: dict[_Position, ast.expr]
    assigned: dict[_Position, Targets]


@functools.lru_cache(maxsize=64)
def _parsed(text: str) -> _Source:
    """A source text; empty for one that does not parse, such as a notebook cell with magics."""
    found = _Source({}, {})
    try:
        tree = ast.parse(text)
    except (SyntaxError, ValueError):
        return found
    for node in ast.walk(tree):
        if isinstance(node, ast.expr) and not isinstance(node, ast.Name | ast.Constant):
            found.expressions.setdefault(_position(node), node)
        match node:
            case ast.Assign(targets=[target], value=value):
                found.assigned.update(_assigned(target, value))
            case (
                ast.AnnAssign(target=target, value=ast.expr() as value)
                | ast.NamedExpr(target=target, value=value)
            ):
                found.assigned.update(_assigned(target, value))
            case ast.AugAssign(target=target):
                found.assigned.update(_assigned(target, node))
            case _:
                pass
    return found


def _assigned(target: ast.expr, at: ast.expr | ast.stmt) -> Iterator[tuple[_Position, Targets]]:
    parts = target.elts if isinstance(target, ast.Tuple | ast.List) else [target]
    if isinstance(at, ast.Tuple) and len(at.elts) == len(parts) > 1:
        for part, value in zip(parts, at.elts, strict=True):
            yield from _assigned(part, value)
        return
    names = tuple(
        tuple(map(_name, p.elts if isinstance(p, ast.Tuple | ast.List) else [p])) for p in parts
    )
    if all(name for group in names for name in group):
        yield _position(at), names


def _name(target: ast.expr) -> str:
    return target.id if isinstance(target, ast.Name) else ""


def _at(span: Span) -> tuple[_Source, _Position]:
    """The source text of a span, and the span as a position in it."""
    source = _parsed("".join(linecache.getlines(span.file)))
    return source, (span.line, span.column - 1, span.end_line or span.line, span.end_column - 1)


def names_at(span: Span | None) -> Targets:
    """The names that the expression at a span is assigned to; empty when it is not."""
    if span is None:
        return ()
    source, position = _at(span)
    return source.assigned.get(position, ())


def expression_at(span: Span | None) -> tuple[ast.expr | None, str]:
    """The expression at a span and the name it is assigned to."""
    if span is None:
        return None, ""
    source, position = _at(span)
    match source.assigned.get(position):
        case ((name,),):
            return source.expressions.get(position), name
        case _:
            return source.expressions.get(position), ""


def source_text(span: Span | None, limit: int = 60) -> str:
    """The source text at a span on one line; empty when there is none."""
    if span is None:
        return ""
    lines = [
        line.encode()
        for line in linecache.getlines(span.file)[span.line - 1 : span.end_line or span.line]
    ]
    if not lines:
        return ""
    if len(lines) == 1:
        lines[0] = lines[0][span.column - 1 : span.end_column - 1]
    else:
        lines[0], lines[-1] = lines[0][span.column - 1 :], lines[-1][: span.end_column - 1]
    text = " ".join(b" ".join(lines).decode(errors="replace").split())
    return text if len(text) <= limit else text[: limit - 3].rstrip() + " .."


def in_library(file: str) -> bool:
    """Whether a file belongs to an installed library, which a user does not edit.

    >>> path = "/env/lib/python3.11/site-packages/optax/_src/clipping.py"
    >>> in_library(path), in_library("train.py")
    (True, False)
    """
    return _INSTALLED.search(file) is not None


_INSTALLED = re.compile(r"[\\/](site|dist)-packages[\\/]")


def users_span(node: Node) -> Span | None:
    """The innermost line of a node that is the user's own: the call, where an installed library
    does the work."""
    return next((s for s in node.stack if not in_library(s.file)), node.span)


def _operand_texts(node: Node) -> list[str]:
    """The source texts of a node's operands, when its line shows one for each."""
    match expression_at(node.span)[0]:
        case ast.BinOp(left=left, right=right):
            parts: list[ast.expr] = [left, right]
        case ast.Compare(left=left, comparators=[right]):
            parts = [left, right]
        case ast.UnaryOp(operand=operand):
            parts = [operand]
        case ast.Call(func=ast.Attribute(value=base), args=args):
            module = isinstance(base, ast.Name) and base.id in ("jnp", "jax", "lax", "np", "sbp")
            parts = [*args] if module or isinstance(base, ast.Attribute) else [base, *args]
        case ast.Call(args=args):
            parts = [*args]
        case _:
            parts = []
    if node.op == "concatenate" and len(parts) != len(node.inputs):
        parts = [p for part in parts if isinstance(part, ast.List | ast.Tuple) for p in part.elts]
    return (
        [_called(p, node.span.file) for p in parts]
        if node.span and len(parts) == len(node.inputs)
        else []
    )


def _within(inner: Span, outer: Span) -> bool:
    """Whether one expression is a part of another."""
    first, last = (outer.line, outer.column), (outer.end_line or outer.line, outer.end_column)
    starts, ends = (inner.line, inner.column), (inner.end_line or inner.line, inner.end_column)
    return inner.file == outer.file and inner != outer and first <= starts and ends <= last


def _called(part: ast.expr, file: str) -> str:
    """The source text of an expression; of an annotation, that of what it annotates."""
    while (
        isinstance(part, ast.Call)
        and part.args
        and re.fullmatch(
            r"(sbp\.)?(annotate|split|replicate|shard|partial)", ast.unparse(part.func)
        )
    ):
        part = part.args[0]
    column, end = part.col_offset + 1, (part.end_col_offset or 0) + 1
    return source_text(
        Span(
            file=file,
            line=part.lineno,
            column=column,
            end_column=end,
            end_line=part.end_lineno or part.lineno,
        )
    )


def first_argument(node: Node) -> str:
    """The source text of the first argument of the call at a node; empty when its line is no
    call."""
    expression = expression_at(users_span(node))[0]
    span = users_span(node)
    return (
        _called(expression.args[0], span.file)
        if isinstance(expression, ast.Call) and expression.args and span
        else ""
    )


def behind_vmap(site: PinSite, code: Code) -> int | None:
    """How many dims of vmap stand before those that the user sees where a pin is written; None when
    that is not known.

    Arguments:
      site: the pin.
      code: what it asks on one mesh axis.
    """
    if not any("vmap(" in n.scope for n in site.nodes):
        return 0
    expression = expression_at(site.span)[0]
    written = (
        expression.args[1]
        if isinstance(expression, ast.Call) and len(expression.args) > 1
        else None
    )
    if code <= 0 or not isinstance(written, ast.Constant) or not isinstance(written.value, int):
        return None
    batch = code - 1 - written.value
    return (
        batch if batch > 0 else None
    )  # behind dims of vmap, or beside them: the first is what `in_axes=0` gives


@dataclass(frozen=True, slots=True)
class Names:
    """What the user calls the values of a program.

    Arguments:
      graph: the program.
      makers: for each value, the node that makes it.
      inputs: for each input of the program, its number.
    """

    graph: Graph
    makers: dict[int, Node]
    inputs: dict[int, int]

    @classmethod
    def of(cls, graph: Graph) -> Names:
        makers = {v: node for node in graph.walk() for v in node.outputs}
        return cls(graph, makers, {v: number for number, v in enumerate(graph.inputs)})

    def value(self, operand: Operand) -> str:
        """The name of a value: of an input, or what its line assigns it to; empty when it has
        none."""
        if isinstance(operand, Constant):
            return ""
        if operand in self.inputs and self.graph.input_names:
            return self.graph.input_names[self.inputs[operand]]
        maker = self.makers.get(operand)
        return "" if maker is None or maker.backward else expression_at(maker.span)[1]

    def operand(self, node: Node, number: int) -> str:
        """The name of an operand where it is read; empty when the user has none for it."""
        operand = node.inputs[number]
        maker = self.makers.get(operand) if isinstance(operand, int) else None
        if node.backward:
            return "the cotangent" if maker is not None and maker.backward else self.value(operand)
        if maker is not None and maker.span == node.span:  # a value inside a library function
            return ""
        texts = _operand_texts(node) or self._einsum_texts(node)
        name = texts[number] if texts and len(texts[number]) <= 40 else self.value(operand)
        if (
            not name
            and maker is not None
            and maker.span
            and node.span
            and _within(maker.span, node.span)
        ):
            expression = expression_at(maker.span)[0]  # `x.sum(1)` of `x.sum(1).astype(int)`
            name = _called(expression, maker.span.file) if expression is not None else ""
        return name if len(name) <= 40 else ""

    def _einsum_texts(self, node: Node) -> list[str]:
        """The operands of an einsum of two, which may have changed sides: one of them has to be
        known by its name."""
        call = expression_at(node.span)[0]
        if (
            node.op != "dot_general"
            or node.span is None
            or not isinstance(call, ast.Call)
            or len(call.args) != 3
        ):
            return []
        texts = [_called(a, node.span.file) for a in call.args[1:]]
        names = [
            self.value(o) or (self.entering(o, node) if isinstance(o, int) else "")
            for o in node.inputs
        ]
        if names[0] == texts[0] or names[1] == texts[1]:
            return texts
        return texts[::-1] if names[0] == texts[1] or names[1] == texts[0] else []

    def shown(self, node: Node) -> tuple[str, ...]:
        """What each operand of a node is called where it is told of: none without a word, no two
        values alike."""
        names = [self._word(node, number) for number in range(len(node.inputs))]
        for number in _ambiguous(names, node):
            operand = node.inputs[number]
            maker = self.makers.get(operand) if isinstance(operand, int) else None
            if names[number] == "the cotangent" and maker is not None and maker.span:
                names[number] += f" from line {maker.span.line}"
        for number in _ambiguous(names, node):
            names[number] += f" (operand {number})"
        return tuple(names)

    def _word(self, node: Node, number: int) -> str:
        """What an operand is called, by what makes it when the user has no name for it."""
        operand = node.inputs[number]
        name = self.operand(node, number)
        if isinstance(operand, Constant):
            return name or (
                "a constant"
                if operand.aval.shape or _jax.is_extended(operand.aval.dtype)
                else f"{np.asarray(operand.value)}"
            )
        maker = self.makers.get(operand)
        if not name and maker is not None and maker.span == node.span and maker.op in _RESHAPED:
            return self._word(maker, 0)  # what it was before
        if not name and maker is not None and maker.span == node.span and not maker.regions:
            return f"the result of its {maker.op}"
        return name or self.entering(operand, node) or f"operand {number}"

    def entering(self, value: int, reader: Node, *, alone: bool = False) -> str:
        """The name of what a call returns and a node outside of it reads, as `g` of `g =
        jax.grad(loss)(w)`.

        Arguments:
          value: what is read.
          reader: the node that reads it.
          alone: whether the name must be that of one array, not of a tree of them.
        """
        maker = self.makers.get(value)
        if maker is None:
            return self.value(value)
        shared = sum(
            a == b for a, b in zip(reversed(maker.stack), reversed(reader.stack), strict=False)
        )
        outer = len(maker.stack) - shared - 1
        if outer < 1:
            return self.value(value)
        within = maker.stack[outer:]
        name = expression_at(within[0])[1]
        if not name or not alone:
            return name
        inside = {
            n.id
            for n in self.graph.walk()
            if n.stack[-len(within) :] == within and n.scope == maker.scope
        }
        read = {
            o
            for n in self.graph.walk()
            if n.id not in inside
            for o in n.inputs
            if isinstance(o, int)
        }
        return (
            name
            if {v for v in read if v in self.makers and self.makers[v].id in inside} == {value}
            else ""
        )

    def site(self, site: PinSite) -> str:
        """The name of what a pin stands on."""
        match site.source:
            case "input":
                names = self.graph.input_names
                return names[site.position] if names else f"input {site.position}"
            case "output":
                return f"output {site.position}"
            case _:
                expression, name = expression_at(site.span)
                if not name and expression is not None and site.span:
                    name = _called(expression, site.span.file)
                name = name if name and len(name) <= 40 else "this value"
                asked = isinstance(expression, ast.Call) and any(
                    k.arg == "cotangent" for k in expression.keywords
                )
                return (
                    f"the cotangent of {name}"
                    if asked and all(n.backward for n in site.nodes)
                    else name
                )


_RESHAPED = (
    "broadcast_in_dim",
    "convert_element_type",
    "reshape",
    "squeeze",
    "stop_gradient",
    "transpose",
)
"""Operators that are not worth a word inside a library function."""

_UNTOLD = ("rematted_computation", "checkpoint", "while", "body", "cond", "scan", "closed_call")


def _ambiguous(names: list[str], node: Node) -> list[int]:
    """The operands whose name is that of another value, too."""
    return [
        i
        for i, name in enumerate(names)
        if any(n == name and node.inputs[k] != node.inputs[i] for k, n in enumerate(names))
    ]


def scope_of(node: Node) -> str:
    """Where a node stands, such as `in ffn/expert_mlp, forward`."""
    span = users_span(node)
    if node.backward and span:
        return f"in the gradient of line {span.line}"
    parts = re.sub(r"\b(transpose|jvp|vmap|jit)\(|\)", "", node.scope).split("/")
    named = [p for p in parts if p and "->" not in p and p not in _UNTOLD and not policies_in(p)]
    called = [
        s.function for s in reversed(node.stack) if s.function and not s.function.startswith("<")
    ]
    return f"in {'/'.join(named or called)}, forward" if named or called else "forward"


def pinned_text(site: PinSite, mesh: MeshSpec) -> str:
    """What a pin asks, such as `data:S(0) tensor:B`."""
    return " ".join(
        f"{axis}:{decode(c)!r}"
        for axis, c in zip(mesh.names, site.codes, strict=True)
        if c is not None
    )
