"""A program of the gallery after a help, made by the edits of the help alone; and without some of
its pins."""

import ast
import importlib
import inspect
import linecache

from sbp.errors import Help, SourceEdit
from sbp.source.reader import span_of
from tests.edits import edited_function, edited_options, edited_text, recompiled, split_edits
from tests.gallery.broken import GALLERY, Broken

PINS = {f"sbp.{name}" for name in ("split", "annotate", "replicate", "partial", "shard")}


def repaired(entry: Broken, help_: Help) -> Broken:
    """The program after a help."""
    source, options = split_edits(help_.edits)
    assert source or options, f"no edit: {help_.text}; sbp/explain makes the edits of a help"
    after = edited_options(entry.options, options, len(entry.args))
    return entry.of(edited_function(entry.fn, source), **after)


def pins_of(entry: Broken) -> set[tuple[int, str]]:
    """The annotations that the source of a program holds: line and text of each."""
    lines, start = inspect.getsourcelines(entry.fn)
    source = _source(entry)
    return {
        (node.lineno, _words(ast.get_source_segment(source, node) or ""))
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.Call) and ast.unparse(node.func) in PINS
        if start <= node.lineno < start + len(lines)
    }


def without_pins(entry: Broken, pins: set[tuple[int, str]], inputs: set[str]) -> Broken:
    """The program without some annotations, given by line and text, and with some inputs left
    free."""
    source = _source(entry)
    for line, call in sorted(pins):
        source = _without_call(source, line, call)
    fn = recompiled(entry.fn, source) if pins else entry.fn
    if not inputs:
        return entry.of(fn)
    named = zip(inspect.signature(entry.fn).parameters, entry.options["in_types"], strict=True)
    return entry.of(fn, in_types=tuple(None if n in inputs else t for n, t in named))


def pinned_inputs(entry: Broken) -> set[str]:
    """The names of the inputs that `in_types` pins."""
    types = entry.options.get("in_types") or ()
    named = zip(inspect.signature(entry.fn).parameters, types, strict=False)
    return {name for name, t in named if t is not None}


_source = lambda entry: "".join(linecache.getlines(inspect.getsourcefile(entry.fn) or ""))


_words = lambda text: " ".join(text.split())


def _without_call(source: str, line: int, text: str) -> str:
    """A source text with the first argument of a call in place of the call."""
    for node in ast.walk(ast.parse(source)):
        if (
            isinstance(node, ast.Call)
            and node.lineno == line
            and _words(ast.get_source_segment(source, node) or "") == text
        ):
            span, argument = span_of(node, "gallery"), ast.unparse(node.args[0])
            return edited_text(source, [SourceEdit(span=span, replacement=argument)])
    raise AssertionError(f"`{text}` does not stand in line {line}")


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
