"""Arguments of a call in the user's source: where they stand, and edits of what stands there."""

from __future__ import annotations

import ast
import re
from collections.abc import Sequence
from typing import Any

from sbp.errors import SourceEdit, Span
from sbp.slips import renamed
from sbp.source.bindings import binding_of
from sbp.source.reader import expression_at
from sbp.source.text import contains, exact_text, parsed_file, span_of


def argument_span(call: Span | None, name: str) -> Span | None:
    """The place of a keyword argument: the expression in the call, and where that is a variable,
    the expression that was assigned to it. None where the source does not show it.

    Arguments:
      call: the call.
      name: the keyword.
    """
    expression = expression_at(call)[0]
    keywords = expression.keywords if isinstance(expression, ast.Call) else []
    part = next((k.value for k in keywords if k.arg == name), None)
    if part is None or call is None:
        return None
    span = span_of(part, call.file)
    variable = part.id if isinstance(part, ast.Name) else ""
    while variable:
        binding = binding_of(variable, span)
        if binding is None or binding.span is None or not binding.whole:
            return None
        span, variable = binding.span, binding.name
    return span


def items_of(call: Span | None, name: str, count: int) -> list[tuple[Span, str]]:
    """The places and texts of the items of a keyword argument that is written as a tuple or list;
    empty where the source does not show so many.

    Arguments:
      call: the call.
      name: the keyword.
      count: the number of items.
    """
    at = argument_span(call, name)
    part = expression_at(at)[0]
    if at is None or not isinstance(part, ast.Tuple | ast.List) or len(part.elts) != count:
        return []
    spans = [span_of(item, at.file) for item in part.elts]
    return [(span, exact_text(span)) for span in spans]


def constants_in(at: Span, old: Any, new: Any) -> tuple[SourceEdit, ...]:
    """Edits that replace a constant in an expression. A name of a keyword argument, and a name in
    the text of a type, count as constants.

    Arguments:
      at: the expression.
      old: the constant.
      new: the constant in its place.
    """
    source = parsed_file(at.file)
    found: dict[Span, SourceEdit] = {}
    for part in ast.walk(source.tree) if source.tree is not None else ():
        if isinstance(part, ast.keyword) and part.arg and part.arg == old and type(new) is str:
            end = part.col_offset + len(part.arg.encode()) + 1
            span = Span(
                file=at.file,
                line=part.lineno,
                column=part.col_offset + 1,
                end_column=end,
                end_line=part.lineno,
            )
            if contains(at, span):
                found[span] = SourceEdit(span=span, replacement=new)
        elif isinstance(part, ast.Constant | ast.UnaryOp) and contains(at, span_of(part, at.file)):
            text = _constant(part, old, new)
            if text:
                span = span_of(part, at.file)
                found[span] = SourceEdit(span=span, replacement=text)
    return tuple(found[span] for span in sorted(found))


def _constant(part: ast.expr, old: Any, new: Any) -> str:
    """The source text of a constant after the replacement; empty where it stays."""
    try:
        value = ast.literal_eval(part)
    except (ValueError, TypeError):
        return ""
    changed = value
    if type(value) is type(old) and value == old:
        changed = new
    elif isinstance(value, str) and isinstance(old, str) and isinstance(new, str):
        changed = renamed(value, old, new)
    elif isinstance(value, str) and isinstance(old, int) and isinstance(new, int):
        changed = value.replace(f"S({old})", f"S({new})")
    if changed is value or changed == value:
        return ""
    text = repr(changed)
    return text if '"' in text or not isinstance(changed, str) else f'"{changed}"'


def sizes_edits(
    made_at: Span | None, names: Sequence[str], constraints: Sequence[str]
) -> tuple[SourceEdit, ...]:
    """Edits that give the call of `jax.export.symbolic_shape` which makes some sizes other
    constraints; none where the file does not show one such call.

    Arguments:
      made_at: a place in the file.
      names: the sizes.
      constraints: the constraints.
    """
    source = parsed_file(made_at.file) if made_at is not None else None
    if made_at is None or source is None or source.tree is None:
        return ()
    found = (node for node in ast.walk(source.tree) if isinstance(node, ast.Call))
    calls = [call for call in found if _makes_sizes(call, names)]
    if len(calls) != 1:
        return ()
    (call,) = calls
    texts = ", ".join(f'"{c}"' for c in constraints)
    given = next((k.value for k in call.keywords if k.arg == "constraints"), None)
    if given is not None:
        return (SourceEdit(span=span_of(given, made_at.file), replacement=f"[{texts}]"),)
    whole = span_of(call, made_at.file)
    text = exact_text(whole).rstrip().removesuffix(")").rstrip().removesuffix(",")
    return (SourceEdit(span=whole, replacement=f"{text}, constraints=[{texts}])"),)


def _makes_sizes(call: ast.Call, names: Sequence[str]) -> bool:
    if not call.args:
        return False
    function, first = call.func, call.args[0]
    name = function.attr if isinstance(function, ast.Attribute) else getattr(function, "id", "")
    if name != "symbolic_shape" or not isinstance(first, ast.Constant):
        return False
    words = re.findall(r"\w+", str(first.value))
    return all(n in words for n in names)
