"""The registry as pages: which primitives have signatures, and the rows of one on a sample."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from sbp.errors import SbpError, nearest
from sbp.plan.text import shape_text
from sbp.report.parts import Column, Page, Paragraph, Section, Table, TableRow
from sbp.report.wording import counted
from sbp.signatures import Op, Rule, known_primitives, rule_for
from sbp.trace.build import trace
from sbp.trace.graph import Graph, Node

AXIS_SIZE = 4
"""Size of the mesh axis that sample rows are shown for; it divides every dim of the samples."""

X = jax.ShapeDtypeStruct((8, 16), jnp.float32)
W = jax.ShapeDtypeStruct((16, 32), jnp.float32)
Q = jax.ShapeDtypeStruct((8, 16), jnp.bool_)

_UNARY = [
    "abs",
    "ceil",
    "cos",
    "cosh",
    "erf",
    "exp",
    "exp2",
    "expm1",
    "floor",
    "log",
    "log1p",
    "logistic",
    "neg",
    "round",
    "rsqrt",
    "sign",
    "sin",
    "sinh",
    "sqrt",
    "square",
    "tan",
    "tanh",
]
_BINARY = ["add", "atan2", "div", "eq", "ge", "gt", "le", "lt", "max", "min", "mul", "ne", "nextafter", "pow", "rem", "sub"]
_REDUCTIONS: dict[str, Callable[[Any], Any]] = {
    "reduce_sum": lambda x: x.sum(1),
    "reduce_max": lambda x: x.max(1),
    "reduce_min": lambda x: x.min(1),
    "reduce_prod": lambda x: x.prod(1),
    "argmax": lambda x: jnp.argmax(x, 1),
    "argmin": lambda x: jnp.argmin(x, 1),
    "cumsum": lambda x: lax.cumsum(x, 1),
    "cumprod": lambda x: lax.cumprod(x, 1),
    "cummax": lambda x: lax.cummax(x, 1),
    "cummin": lambda x: lax.cummin(x, 1),
}
SAMPLES: dict[str, tuple[Callable[..., Any], tuple[jax.ShapeDtypeStruct, ...]]] = {
    **{name: (getattr(lax, name), (X,)) for name in _UNARY},
    **{name: (getattr(lax, name), (X, X)) for name in _BINARY},
    **{name: (fn, (X,)) for name, fn in _REDUCTIONS.items()},
    "and": (lax.bitwise_and, (Q, Q)),
    "or": (lax.bitwise_or, (Q, Q)),
    "not": (lax.bitwise_not, (Q,)),
    "reduce_and": (lambda q: q.all(1), (Q,)),
    "reduce_or": (lambda q: q.any(1), (Q,)),
    "broadcast_in_dim": (lambda x: jnp.broadcast_to(x, (4, 8, 16)), (X,)),
    "concatenate": (lambda x, y: lax.concatenate([x, y], 1), (X, X)),
    "convert_element_type": (lambda x: x.astype(jnp.bfloat16), (X,)),
    "dot_general": (lambda x, w: x @ w, (X, W)),
    "dynamic_slice": (lambda x, i: lax.dynamic_slice(x, (i, 0), (1, 16)), (X, jax.ShapeDtypeStruct((), jnp.int32))),
    "gather": (lambda x, i: x[i], (X, jax.ShapeDtypeStruct((4,), jnp.int32))),
    "integer_pow": (lambda x: x**3, (X,)),
    "iota": (lambda: lax.iota(jnp.int32, 16), ()),
    "pad": (lambda x: jnp.pad(x, ((0, 0), (0, 4))), (X,)),
    "reshape": (lambda x: x.reshape(8, 4, 4), (X,)),
    "rev": (lambda x: lax.rev(x, (1,)), (X,)),
    "scatter-add": (lambda x, i: x.at[i].add(1.0), (X, jax.ShapeDtypeStruct((4,), jnp.int32))),
    "select_n": (lambda q, x, y: jnp.where(q, x, y), (Q, X, X)),
    "slice": (lambda x: x[:, :8], (X,)),
    "sort": (lambda x: lax.sort(x, dimension=1), (X,)),
    "split": (lambda x: lax.split(x, (8, 8), 1), (X,)),
    "squeeze": (lambda x: x.squeeze(1), (jax.ShapeDtypeStruct((8, 1), jnp.float32),)),
    "stop_gradient": (lax.stop_gradient, (X,)),
    "top_k": (lambda x: lax.top_k(x, 2), (X,)),
    "transpose": (lambda x: x.T, (X,)),
}
"""Programs that hold one equation of the primitive, by its name."""


def signatures_page() -> Page:
    """All primitives that have signatures, by family."""
    rules = [rule for rule in map(rule_for, known_primitives()) if rule is not None]
    families = sorted({family(rule) for rule in rules})
    sections = tuple(_family(name, [r for r in rules if family(r) == name]) for name in families)
    return Page(title=f"signatures of {counted(len(rules), 'primitive')} in {len(families)} families", parts=sections)


def _family(name: str, rules: list[Rule]) -> Section:
    """The primitives of one family, and why those with the all-B row alone have no other."""
    parts: list[Paragraph | Table] = []
    if split := [r.name for r in rules if not r.reason]:
        parts.append(Paragraph(text=", ".join(split)))
    if whole := [r for r in rules if r.reason]:
        columns = (Column(heading="all B"), Column(heading="because", wraps=True))
        parts.append(Table(columns=columns, rows=tuple(TableRow(cells=(r.name, r.reason)) for r in whole)))
    return Section(title=f"{name}: {counted(len(rules), 'primitive')}", parts=tuple(parts))


def family(rule: Rule) -> str:
    """The module that a rule stands in: elementwise, contraction, reduction, .."""
    rows: Any = rule.rows
    while isinstance(rows, functools.partial):
        rows = rows.args[0] if rows.args and callable(rows.args[0]) else rows.func
    found = str(getattr(rows, "__module__", "")).rsplit(".", 1)[-1]
    return "replicated" if rule.reason and found == "rule" else found


def signature_page(primitive: str) -> Page:
    """The rows of one primitive on its sample.

    Raises:
      SbpError: `unknown-option` for a primitive without a rule, with the nearest name.
    """
    rule = rule_for(primitive)
    if rule is None:
        raise SbpError(f"no signature for a primitive {primitive!r}{_suggestion(primitive)}", code="unknown-option")
    parts = [Paragraph(text=f"held B on every mesh axis: {rule.reason}")] if rule.reason else []
    title = f"{primitive}: {family(rule)}"
    found = sample(primitive)
    if found is None:
        return Page(title=title, parts=(*parts, Paragraph(text="there is no sample to show its rows on")))
    graph, node = found
    ins, outs = tuple(map(graph.aval, node.inputs)), tuple(graph.avals[o] for o in node.outputs)
    rows = rule.rows(Op(primitive, node.params, ins, outs, AXIS_SIZE))
    headings = [*(f"{shape_text(a)}" for a in ins), "", *(shape_text(a) for a in outs), "kernel"]
    cells = [(*map(repr, r.ins), "->", *map(repr, r.outs), "" if r.kernel == "local" else r.kernel) for r in rows]
    table = Table(columns=tuple(Column(heading=h) for h in headings), rows=tuple(TableRow(cells=c) for c in cells))
    head = f"{counted(len(rows), 'row')} on one mesh axis of size {AXIS_SIZE}, on a sample"
    return Page(title=title, parts=(*parts, Section(title=head, parts=(table,))))


def _suggestion(primitive: str) -> str:
    """The nearest name; not the whole list, which `sbp signatures` prints."""
    clause = nearest(primitive, known_primitives())
    return clause if "did you mean" in clause else "; `sbp signatures` lists those that have one"


def sample(primitive: str) -> tuple[Graph, Node] | None:
    """A node of the primitive in a traced sample."""
    if primitive not in SAMPLES:
        return None
    fn, args = SAMPLES[primitive]
    graph, _ = trace(fn, args)
    return next(((graph, node) for node in graph.walk() if node.op == primitive), None)
