"""Does to the source of a program what a help says, word for word, as a user would: text is edited,
not the traced program."""

from __future__ import annotations

import ast
import dataclasses
import importlib
import inspect
import itertools
import linecache
import re
from collections.abc import Callable
from typing import Any

from tests.gallery.broken import GALLERY, Broken

_COUNT = itertools.count()
_CALL = r"sbp\.(?:replicate|split)\(.+?, \"\w+\"\)"


def repaired(entry: Broken, help_text: str, mesh_axis: str) -> Broken:
    """The program after a help.

    Arguments:
      entry: the broken program.
      help_text: what the diagnostic suggests.
      mesh_axis: the axis that its title names.
    """
    text = re.sub(r"; [^;]* becomes [^;]*$", "", help_text)
    if found := re.match(r'boxing=("\w+"|\{.*?\})', text):
        return entry.of(entry.fn, boxing=ast.literal_eval(found[1]))
    if found := re.match(r"allow ([\d.]+) (B|KiB|MiB) in `(.+)`", text):
        return _allowed(
            entry, float(found[1]) * {"B": 1, "KiB": 2**10, "MiB": 2**20}[found[2]], found[3]
        )
    if found := re.match(r"memory_limit=(\d+)$", text):
        return entry.of(entry.fn, memory_limit=int(found[1]))
    if found := re.match(r"leave (\w+) free (?:on `(\w+)` )?in in_types", text):
        return entry.of(entry.fn, in_types=_freed(entry, found[1], found[2]))
    return _recompiled(entry, _edit(text, mesh_axis))


def pins_of(entry: Broken) -> set[tuple[int, str]]:
    """The annotations that the source of a program holds: line and text of each."""
    lines, start = inspect.getsourcelines(entry.fn)
    file = inspect.getsourcefile(entry.fn) or ""
    source = "".join(linecache.getlines(file))
    found: set[tuple[int, str]] = set()
    for node in ast.walk(ast.parse(source)):
        match node:
            case ast.Call(
                func=ast.Attribute(
                    value=ast.Name(id="sbp"),
                    attr="split" | "annotate" | "replicate" | "partial" | "shard",
                )
            ):
                if start <= node.lineno < start + len(lines):
                    found.add((node.lineno, _words(ast.get_source_segment(source, node) or "")))
            case _:
                pass
    return found


def without_pins(entry: Broken, pins: set[tuple[int, str]], inputs: set[str]) -> Broken:
    """The program without some annotations, given by line and text, and with some inputs left
    free."""

    def edit(source: str) -> str:
        for line, call in sorted(pins):
            source = _replace(source, line, call, _first_argument)
        return source

    made = _recompiled(entry, edit) if pins else entry
    for name in sorted(inputs):
        made = made.of(made.fn, in_types=_freed(made, name, None))
    return made


def pinned_inputs(entry: Broken) -> set[str]:
    """The names of the inputs that `in_types` pins."""
    names = list(inspect.signature(entry.fn).parameters)
    return {
        name
        for name, t in zip(names, entry.options.get("in_types") or (), strict=False)
        if t is not None
    }


def _words(text: str) -> str:
    return " ".join(text.split())


def _freed(entry: Broken, name: str, mesh_axis: str | None) -> Any:
    """in_types with one of them free, on one mesh axis or altogether."""
    position = list(inspect.signature(entry.fn).parameters).index(name)
    types = list(entry.options["in_types"])
    kept = [t for t in types[position].split() if ":" in t and not t.startswith(f"{mesh_axis}:")]
    types[position] = " ".join([*kept, f"{mesh_axis}:?"]) if mesh_axis else None
    return tuple(types)


def _allowed(entry: Broken, size: float, budget: str) -> Broken:
    """The budgets with one of them raised to a size."""
    budgets = [
        dataclasses.replace(b, above=size) if str(b) == budget else b
        for b in entry.options["budgets"]
    ]
    assert budgets != list(entry.options["budgets"])
    return entry.of(entry.fn, budgets=budgets)


def _edit(text: str, mesh_axis: str) -> Callable[[str], str]:
    """The edit of a source text that a help describes."""
    if found := re.fullmatch(r"drop `(.+)` at line (\d+)(?:, column \d+)?", text):
        return lambda source: _replace(source, int(found[2]), found[1], _first_argument)
    if found := re.fullmatch(r"split (.+) on dim (\d+) at line (\d+)", text):
        return lambda source: _resplit(source, int(found[3]), found[1], found[2], mesh_axis)
    if found := re.fullmatch(r"in `(.+)` split dim (\d+) at line (\d+)", text):
        return lambda source: _replace(
            source, int(found[3]), found[1], lambda call: _with_dim(call, found[2], mesh_axis)
        )
    if found := re.fullmatch(r"leave (.+) free on `(\w+)` at line (\d+)", text):
        return lambda source: _release(source, int(found[3]), found[2])
    if found := re.fullmatch(rf"({_CALL})(?: and ({_CALL}))? (before|at) line (\d+)", text):
        calls = [c for c in (found[1], found[2]) if c]
        return lambda source: _convert(source, int(found[4]), calls, before=found[3] == "before")
    if found := re.match(r"put line (\d+) under (sbp\.policy\(.+?\))", text):
        return lambda source: _under(source, int(found[1]), found[2])
    if found := re.match(r'"(\w+)" instead of "(\w+)" on `(\w+)` in every sbp\.policy', text):
        return lambda source: _loosen(source, *found.groups())
    raise AssertionError(f"no user could follow: {text}")


def _under(source: str, line: int, region: str) -> str:
    """The statement of a line in a region of its own."""
    statement = min(
        (n for n in ast.walk(ast.parse(source)) if isinstance(n, ast.stmt) and n.lineno == line),
        key=lambda n: n.col_offset,
    )
    lines = source.splitlines(keepends=True)
    assert statement.end_lineno is not None
    inner = [f"    {text}" for text in lines[line - 1 : statement.end_lineno]]
    return "".join(
        [
            *lines[: line - 1],
            f"{' ' * statement.col_offset}with {region}:\n",
            *inner,
            *lines[statement.end_lineno :],
        ]
    )


def _loosen(source: str, new: str, old: str, mesh_axis: str) -> str:
    """Another policy on one axis in all regions: in place of the one that they have there, or
    inside of the one for all axes."""
    changed = source.replace(
        f'sbp.policy("{old}", "{mesh_axis}")', f'sbp.policy("{new}", "{mesh_axis}")'
    )
    changed = changed.replace(
        f'sbp.policy("{old}")', f'sbp.policy("{old}"), sbp.policy("{new}", "{mesh_axis}")'
    )
    assert changed != source
    return changed


def _convert(source: str, line: int, calls: list[str], *, before: bool) -> str:
    """`x = sbp.split(x, ..)` before the statement of a line, or the call around the expression in
    it."""
    if not before:
        for call in calls:
            target = _words(ast.get_source_segment(call, _parsed(call).args[0]) or "")
            source = _replace(source, line, target, lambda _, call=call: call)
        return source
    statement = min(
        (n for n in ast.walk(ast.parse(source)) if isinstance(n, ast.stmt) and n.lineno == line),
        key=lambda n: n.col_offset,
    )
    lines = source.splitlines(keepends=True)
    made = [
        f"{' ' * statement.col_offset}{ast.unparse(_parsed(call).args[0])} = {call}\n"
        for call in calls
    ]
    return "".join([*lines[: line - 1], *made, *lines[line - 1 :]])


def _parsed(call: str) -> ast.Call:
    tree = ast.parse(call, mode="eval").body
    assert isinstance(tree, ast.Call)
    return tree


def _first_argument(call: str) -> str:
    return ast.unparse(_parsed(call).args[0])


def _with_dim(call: str, dim: str, mesh_axis: str) -> str:
    """A split over another dim."""
    tree = _parsed(call)
    if len(tree.args) > 1:
        tree.args[1] = ast.parse(dim, mode="eval").body
    else:
        keyword = next(k for k in tree.keywords if k.arg == mesh_axis)
        keyword.value = ast.parse(f"sbp.S({dim})", mode="eval").body
    return ast.unparse(tree)


def _resplit(source: str, line: int, name: str, dim: str, mesh_axis: str) -> str:
    """The one split of a name in a line, over another dim."""
    calls: list[ast.Call] = []
    for node in ast.walk(ast.parse(source)):
        match node:
            case ast.Assign(targets=[ast.Name(id=target)], value=ast.Call() as call) if (
                target == name and call.lineno == line
            ):
                calls.append(call)
            case ast.Call(func=ast.Attribute(value=ast.Name(id="sbp"))) if (
                node.lineno == line and ast.unparse(node.args[0]) == name
            ):
                calls.append(node)
            case _:
                pass
    call, *others = {ast.unparse(c): c for c in calls}.values()
    assert not others, f"{name} is annotated more than once in line {line}"
    return _splice(source, call, _with_dim(ast.unparse(call), dim, mesh_axis))


def _release(source: str, line: int, mesh_axis: str) -> str:
    """An annotation of several axes without one of them."""
    for node in ast.walk(ast.parse(source)):
        if (
            isinstance(node, ast.Call)
            and node.lineno == line
            and any(k.arg == mesh_axis for k in node.keywords)
        ):
            tree = _parsed(ast.unparse(node))
            tree.keywords = [k for k in tree.keywords if k.arg != mesh_axis]
            return _splice(source, node, ast.unparse(tree))
    raise AssertionError(f"no annotation of {mesh_axis} in line {line}")


def _replace(source: str, line: int, text: str, by: Callable[[str], str]) -> str:
    """An expression of a line, found by its text, replaced by what `by` makes of it."""
    wanted = text.removesuffix(" ..") if text.endswith(" ..") else text
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.expr) and node.lineno == line:
            found = _words(ast.get_source_segment(source, node) or "")
            if found == wanted or (wanted != text and found.startswith(wanted)):
                return _splice(source, node, by(found))
    raise AssertionError(f"`{text}` does not stand in line {line}")


def _splice(source: str, node: ast.expr, text: str) -> str:
    lines = source.splitlines(keepends=True)
    assert node.end_lineno is not None and node.end_col_offset is not None
    head, tail = (
        lines[node.lineno - 1][: node.col_offset],
        lines[node.end_lineno - 1][node.end_col_offset :],
    )
    return "".join([*lines[: node.lineno - 1], head + text + tail, *lines[node.end_lineno :]])


def _recompiled(entry: Broken, edit: Callable[[str], str]) -> Broken:
    """The entry as an edited copy of its file defines it."""
    file = inspect.getsourcefile(entry.fn)
    assert file is not None
    source = edit("".join(linecache.getlines(file)))
    name = f"<repair {next(_COUNT)}>"
    linecache.cache[name] = (len(source), None, source.splitlines(keepends=True), name)
    before, names = dict(GALLERY), dict(entry.fn.__globals__)
    try:
        exec(compile(source, name, "exec"), names)
        made = GALLERY[entry.name]
        return (
            made if made is not before[entry.name] else entry.of(names[entry.name])
        )  # a cell registers nothing
    finally:
        GALLERY.clear()
        GALLERY.update(before)


def load() -> dict[str, Broken]:
    """The whole gallery."""
    for theme in THEMES:
        importlib.import_module(f"tests.gallery.{theme}")
    return GALLERY


THEMES = (
    "tensor_parallel",
    "partial_values",
    "split_dims",
    "mixture_of_experts",
    "control_flow",
    "training",
    "annotations",
    "boundary",
    "policies",
)
