"""A program of the gallery after a help, made by the edits of the help alone; and without some of
its pins."""

import ast
import importlib
import inspect
import linecache
from collections.abc import Callable
from typing import Any

from sbp.errors import Help
from tests.edits import edited_function, edited_options, recompiled, split_edits
from tests.gallery.broken import GALLERY, Broken


def repaired(entry: Broken, help_: Help) -> Broken:
    """The program after a help."""
    source, options = split_edits(help_.edits)
    assert source or options, f"no edit: {help_.text}; sbp/explain makes the edits of a help"
    fn = _unregistered(lambda: edited_function(entry.fn, source))
    return entry.of(fn, **edited_options(entry.options, options, len(entry.args)))


def pins_of(entry: Broken) -> set[tuple[int, str]]:
    """The annotations that the source of a program holds: line and text of each."""
    lines, start = inspect.getsourcelines(entry.fn)
    source = _source(entry)
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
    source = _source(entry)
    for line, call in sorted(pins):
        source = _replace(source, line, call, _first_argument)
    fn = _unregistered(lambda: recompiled(entry.fn, source)) if pins else entry.fn
    names = list(inspect.signature(entry.fn).parameters)
    types = entry.options.get("in_types") or ()
    if not inputs:
        return entry.of(fn)
    free = tuple(None if n in inputs else t for n, t in zip(names, types, strict=True))
    return entry.of(fn, in_types=free)


def pinned_inputs(entry: Broken) -> set[str]:
    """The names of the inputs that `in_types` pins."""
    names = list(inspect.signature(entry.fn).parameters)
    return {
        name
        for name, t in zip(names, entry.options.get("in_types") or (), strict=False)
        if t is not None
    }


def _source(entry: Broken) -> str:
    return "".join(linecache.getlines(inspect.getsourcefile(entry.fn) or ""))


def _words(text: str) -> str:
    return " ".join(text.split())


def _first_argument(call: str) -> str:
    tree = ast.parse(call, mode="eval").body
    assert isinstance(tree, ast.Call)
    return ast.unparse(tree.args[0])


def _replace(source: str, line: int, text: str, by: Callable[[str], str]) -> str:
    """An expression of a line, found by its text, replaced by what `by` makes of it."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.expr) and node.lineno == line:
            found = _words(ast.get_source_segment(source, node) or "")
            if found == text:
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


def _unregistered(make: Callable[[], Any]) -> Any:
    """What runs the files of the gallery once more, without new entries in it."""
    before = dict(GALLERY)
    try:
        return make()
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
