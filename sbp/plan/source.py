"""What the user calls things: names, expressions and places, read from the source text under a span."""

from __future__ import annotations

import ast
import functools
import linecache
import re
from dataclasses import dataclass

from sbp.errors import Span
from sbp.infer.constraints import PinSite
from sbp.infer.space import decode
from sbp.mesh import MeshSpec
from sbp.trace.graph import Constant, Graph, Node, Operand


@functools.lru_cache(maxsize=64)
def _expressions(file: str, text: str) -> dict[tuple[int, int, int, int], tuple[ast.expr, str]]:
    """All expressions of a source text by position, each with the name it is assigned to, if any."""
    try:
        tree = ast.parse(text)
    except (SyntaxError, ValueError):  # a notebook cell with magics
        return {}
    found: dict[tuple[int, int, int, int], tuple[ast.expr, str]] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.expr) and not isinstance(node, ast.Name | ast.Constant):
            found.setdefault((node.lineno, node.col_offset, node.end_lineno or 0, node.end_col_offset or 0), (node, ""))
    for node in ast.walk(tree):
        if isinstance(node, ast.Assign) and len(node.targets) == 1 and isinstance(node.targets[0], ast.Name):
            value = node.value
            key = (value.lineno, value.col_offset, value.end_lineno or 0, value.end_col_offset or 0)
            if key in found:
                found[key] = (found[key][0], node.targets[0].id)
    return found


def expression_at(span: Span | None) -> tuple[ast.expr | None, str]:
    """The expression at a span and the name it is assigned to."""
    if span is None:
        return None, ""
    text = "".join(linecache.getlines(span.file))
    key = (span.line, span.column - 1, span.end_line or span.line, span.end_column - 1)
    return _expressions(span.file, text).get(key, (None, ""))


def source_text(span: Span | None, limit: int = 60) -> str:
    """The source text at a span on one line; empty when there is none."""
    if span is None:
        return ""
    lines = [line.encode() for line in linecache.getlines(span.file)[span.line - 1 : span.end_line or span.line]]
    if not lines:
        return ""
    if len(lines) == 1:
        lines[0] = lines[0][span.column - 1 : span.end_column - 1]
    else:
        lines[0], lines[-1] = lines[0][span.column - 1 :], lines[-1][: span.end_column - 1]
    text = " ".join(b" ".join(lines).decode(errors="replace").split())
    return text if len(text) <= limit else text[: limit - 3].rstrip() + " .."


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
    return [_called(p, node.span.file) for p in parts] if node.span and len(parts) == len(node.inputs) else []


def _called(part: ast.expr, file: str) -> str:
    """The source text of an expression; of an annotation, that of what it annotates."""
    while (
        isinstance(part, ast.Call)
        and part.args
        and re.fullmatch(r"(sbp\.)?(annotate|split|replicate|shard|partial)", ast.unparse(part.func))
    ):
        part = part.args[0]
    column, end = part.col_offset + 1, (part.end_col_offset or 0) + 1
    return source_text(Span(file=file, line=part.lineno, column=column, end_column=end, end_line=part.end_lineno or part.lineno))


@dataclass(frozen=True, slots=True)
class Names:
    """What the user calls the values of a program."""

    graph: Graph
    makers: dict[int, Node]

    @classmethod
    def of(cls, graph: Graph) -> Names:
        return cls(graph, {v: node for node in graph.walk() for v in node.outputs})

    def value(self, operand: Operand) -> str:
        """The name of a value: of an input, or what its line assigns it to; empty when it has none."""
        if isinstance(operand, Constant):
            return ""
        if operand in self.graph.inputs and self.graph.input_names:
            return self.graph.input_names[self.graph.inputs.index(operand)]
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
        texts = _operand_texts(node)
        return texts[number] if texts and len(texts[number]) <= 40 else self.value(operand)

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
                asked = isinstance(expression, ast.Call) and any(k.arg == "cotangent" for k in expression.keywords)
                return f"the cotangent of {name}" if asked and all(n.backward for n in site.nodes) else name


def scope_of(node: Node) -> str:
    """Where a node stands, such as `in ffn/expert_mlp, forward`."""
    if node.backward and node.span:
        return f"in the gradient of line {node.span.line}"
    parts = re.sub(r"\b(transpose|jvp|vmap|jit)\(|\)", "", node.scope).split("/")
    named = [p for p in parts if p and p not in ("rematted_computation", "checkpoint", "while", "body", "cond", "scan", "closed_call")]
    called = [s.function for s in reversed(node.stack) if s.function and not s.function.startswith("<")]
    return f"in {'/'.join(named or called)}, forward" if named or called else "forward"


def pinned_text(site: PinSite, mesh: MeshSpec) -> str:
    """What a pin asks, such as `data:S(0) tensor:B`."""
    return " ".join(f"{axis}:{decode(c)!r}" for axis, c in zip(mesh.names, site.codes, strict=True) if c is not None)
