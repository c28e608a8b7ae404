"""Edits of the user's source that put `sbp.policy` around a statement, or change its policy."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from sbp.errors import SourceEdit, Span
from sbp.limits import Policy
from sbp.source.imports import SbpNames, names_of_sbp
from sbp.source.text import contains, exact_text, line_text, parsed_file, span_of

_SIMPLE = (
    ast.Assign | ast.AnnAssign | ast.AugAssign | ast.Expr | ast.Return | ast.Assert | ast.Delete
)


@dataclass(frozen=True, slots=True)
class Region:
    """A statement under a policy.

    Arguments:
      edits: the edits that put the policy around the statement.
      statement: the span of the statement.
      inner: spans of lambdas in it, which run where they are called.
    """

    edits: tuple[SourceEdit, ...]
    statement: Span
    inner: tuple[Span, ...]

    def runs(self, stack: Sequence[Span]) -> bool:
        """Whether an operation with these frames is traced while the statement runs."""
        return any(
            contains(self.statement, frame) and not any(contains(i, frame) for i in self.inner)
            for frame in stack
        )


def under_policy(line: Span, policy: Policy, axis: str) -> Region | None:
    """The statement of a line, with a policy around it on one mesh axis; None where the statement
    has statements inside, or shares a line with another one."""
    source, names = parsed_file(line.file), names_of_sbp(line.file)
    parts = (
        node
        for node in (ast.walk(source.tree) if source.tree else ())
        if isinstance(node, ast.stmt) and contains(span_of(node, line.file), line)
    )
    statement = max(parts, key=lambda node: (node.lineno, node.col_offset), default=None)
    if statement is None or not isinstance(statement, _SIMPLE):
        return None
    span = span_of(statement, line.file)
    first, last = line_text(line.file, span.line) or "", line_text(line.file, span.end_line) or ""
    head, tail = first.encode()[: span.column - 1], last.encode()[span.end_column - 1 :].strip()
    if head.strip() or (tail and not tail.startswith(b"#")):
        return None  # it shares a line with another statement
    imports = () if names.module else ("import sbp",)
    indent, step = head.decode(), "\t" if head[:1] == b"\t" else "    "
    opened = f'with {names.module or "sbp"}.policy("{policy}", "{axis}"):\n{indent}{step}'
    edits = [SourceEdit(span=_start(span), replacement=opened, imports=imports)]
    edits += [
        SourceEdit(span=_at(line.file, number), replacement=step)
        for number in range(span.line + 1, span.end_line + 1)
        if not _in_text(statement, number)
    ]
    lambdas = (n for n in ast.walk(statement) if isinstance(n, ast.Lambda))
    return Region(tuple(edits), span, tuple(span_of(n, line.file) for n in lambdas))


def _start(span: Span) -> Span:
    return Span(
        file=span.file,
        line=span.line,
        column=span.column,
        end_column=span.column,
        end_line=span.line,
    )


def _at(file: str, line: int) -> Span:
    return Span(file=file, line=line, column=1, end_column=1, end_line=line)


def _in_text(statement: ast.stmt, line: int) -> bool:
    """Whether a line begins inside a string, which an indent would change."""
    return any(
        isinstance(node, ast.Constant | ast.JoinedStr)
        and node.lineno < line <= (node.end_lineno or node.lineno)
        for node in ast.walk(statement)
    )


@dataclass(frozen=True, slots=True)
class PolicyEdit:
    """A region whose policy an edit changes.

    Arguments:
      body: the statements of the region.
      edit: the change of its `sbp.policy` call.
    """

    body: Span
    edit: SourceEdit


def loosened_policies(file: str, old: Policy, new: Policy, axis: str) -> Iterator[PolicyEdit]:
    """Edits that change the policy of a file's regions on one mesh axis.

    Arguments:
      file: the file.
      old: the policy to replace; a region that sets it on all axes gets a policy on `axis` inside.
      new: the policy in its place.
      axis: the mesh axis.
    """
    source, names = parsed_file(file), names_of_sbp(file)
    for node in ast.walk(source.tree) if source.tree else ():
        if not isinstance(node, ast.With):
            continue
        body = _around(span_of(node.body[0], file), span_of(node.body[-1], file))
        for item in node.items:
            text = _changed(item.context_expr, names, (old, new, axis), file)
            if text:
                edit = SourceEdit(span=span_of(item.context_expr, file), replacement=text)
                yield PolicyEdit(body, edit)


def _changed(call: ast.expr, names: SbpNames, change: tuple[Policy, Policy, str], file: str) -> str:
    """The new source text of a policy call; empty where the call stays.

    Arguments:
      call: the call.
      names: the names that the file has for sbp.
      change: the old policy, the new one and the mesh axis.
      file: the file.
    """
    old, new, axis = change
    if not isinstance(call, ast.Call) or names.function(call.func) != "policy":
        return ""
    written = [a.value if isinstance(a, ast.Constant) else None for a in call.args]
    if not written or written[0] != old or None in written:
        return ""
    func = exact_text(span_of(call.func, file))
    if written[1:] == [axis]:
        return f'{func}("{new}", "{axis}")'
    if len(written) > 1 and axis not in written[1:]:
        return ""
    return f'{exact_text(span_of(call, file))}, {func}("{new}", "{axis}")'


def _around(first: Span, last: Span) -> Span:
    return Span(
        file=first.file,
        line=first.line,
        column=first.column,
        end_column=last.end_column,
        end_line=last.end_line,
    )
