"""Makes the edits of a help, by their fields alone: in a source text, and in the options of
`sbp.jit`."""

import ast
import dataclasses
import inspect
import itertools
import linecache
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import sbp
from sbp.errors import Diagnostic, Edit, OptionEdit, SourceEdit

_COUNT = itertools.count()


def edited_text(text: str, edits: Iterable[SourceEdit]) -> str:
    """A source text after edits.

    >>> from sbp.errors import Span
    >>> at = Span(file="f", line=1, column=5, end_column=6)
    >>> edited_text("y = x", [SourceEdit(span=at, replacement="x.T", imports=("import jax",))])
    'import jax\\ny = x.T'
    """
    edits = list(edits)
    lines = [line.encode() for line in text.splitlines(keepends=True)]
    starts = [0, *itertools.accumulate(map(len, lines))]
    source = b"".join(lines)
    at = sorted(
        (starts[e.span.line - 1] + e.span.column - 1, number) for number, e in enumerate(edits)
    )
    for start, number in reversed(at):
        span = edits[number].span
        end = starts[(span.end_line or span.line) - 1] + span.end_column - 1
        source = source[:start] + edits[number].replacement.encode() + source[end:]
    return _imported(source.decode(), dict.fromkeys(i for e in edits for i in e.imports))


def _imported(text: str, imports: Iterable[str]) -> str:
    """A source text with statements more at its top, behind its docstring and `__future__`."""
    line = 0
    for number, node in enumerate(ast.parse(text).body):
        match node:
            case ast.ImportFrom(module="__future__"):
                line = node.end_lineno or 0
            case ast.Expr(value=ast.Constant(value=str())) if number == 0:
                line = node.end_lineno or 0
            case _:
                break
    lines = text.splitlines(keepends=True)
    return "".join([*lines[:line], *(f"{i}\n" for i in imports), *lines[line:]])


def edited_options(
    options: Mapping[str, Any], edits: Iterable[OptionEdit], inputs: int
) -> dict[str, Any]:
    """Options of `sbp.jit` after edits, for a function of so many arrays."""
    made = dict(options)
    for edit in edits:
        assert edit.function == "sbp.jit"
        if edit.position is None:
            made[edit.option] = edit.value
            continue
        parts: list[Any] = list(made.get(edit.option) or [None] * inputs)
        if edit.option == "budgets":
            parts[edit.position] = dataclasses.replace(parts[edit.position], above=edit.value)
        else:
            parts[edit.position] = edit.value
        made[edit.option] = tuple(parts)
    return made


def edited_function(fn: Callable[..., Any], edits: Iterable[SourceEdit]) -> Callable[..., Any]:
    """A function as its file defines it after edits, which are all of that file."""
    edits = list(edits)
    if not edits:
        return fn
    file = inspect.getsourcefile(fn)
    assert file is not None and {e.span.file for e in edits} == {file}
    return recompiled(fn, edited_text("".join(linecache.getlines(file)), edits))


def run_source(text: str, file: str, names: Mapping[str, Any] = {}) -> dict[str, Any]:
    """The names that a source text makes, beside those it starts with. Only linecache has its
    lines, as of a notebook's cell."""
    linecache.cache[file] = (len(text), None, text.splitlines(keepends=True), file)
    made = dict(names)
    exec(compile(text, file, "exec"), made)
    return made


def recompiled(fn: Callable[..., Any], text: str) -> Callable[..., Any]:
    """A function as another text of its file defines it."""
    file = f"<edited {next(_COUNT)}>"
    names = run_source(text, file, fn.__globals__)
    *outer, last = fn.__qualname__.replace(".<locals>", "").split(".")
    body: list[ast.stmt] = ast.parse(text).body
    for part in outer:
        (function,) = (n for n in _functions(body) if n.name == part)
        body = function.body
    if outer:  # what it takes from the functions around it are constants here
        (function,) = (n for n in _functions(body) if n.name == last)
        names |= inspect.getclosurevars(fn).nonlocals
        exec(compile(ast.Module([function], []), file, "exec"), names)
    return names[last]


def _functions(body: list[ast.stmt]) -> list[ast.FunctionDef]:
    return [n for s in body for n in ast.walk(s) if isinstance(n, ast.FunctionDef)]


def is_policy(edit: Edit) -> bool:
    """Whether an edit sets the policy of the program."""
    return isinstance(edit, OptionEdit) and edit.option == "boxing"


def split_edits(edits: Iterable[Edit]) -> tuple[list[SourceEdit], list[OptionEdit]]:
    """Edits of source texts, and edits of options."""
    edits = list(edits)
    return (
        [e for e in edits if isinstance(e, SourceEdit)],
        [e for e in edits if isinstance(e, OptionEdit)],
    )


def check_helps(
    fn: Callable[..., Any],
    mesh: Any,
    options: Mapping[str, Any],
    args: tuple[Any, ...],
    found: Iterable[Diagnostic],
) -> None:
    """Makes the edits of each help of a program's diagnostics. Checks that the edited program has
    the bytes and the memory that the help names, or at least fewer errors.

    Arguments:
      fn: the program, a function of arrays.
      mesh: where it runs.
      options: of `sbp.jit`.
      args: the arrays.
      found: what was found in it.
    """
    found = list(found)
    for help_ in (h for d in found for h in d.helps):
        assert help_.edits, f"no edit: {help_.text}; `sbp/explain` makes the edits of a help"
        source, others = split_edits(help_.edits)
        after = sbp.jit(
            edited_function(fn, source), mesh, **edited_options(options, others, len(args))
        )
        if help_.clears_all_errors:
            cost = after.plan(*args).cost
            assert cost.bytes_per_device == help_.bytes_per_device, help_.text
            assert cost.peak_memory_bytes == help_.peak_memory_bytes, help_.text
        else:
            errors = [d for d in after.check(*args).diagnostics if d.severity == "error"]
            assert len(errors) < len(found), help_.text


def helped(
    fn: Callable[..., Any], mesh: Any, args: tuple[Any, ...], **options: Any
) -> tuple[Diagnostic, ...]:
    """The diagnostics of a program, after `check_helps` has tried each of their helps."""
    found = sbp.jit(fn, mesh, **options).check(*args).diagnostics
    check_helps(fn, mesh, options, args, found)
    return found
