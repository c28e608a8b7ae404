"""Follows a help of the checker to the word: what the text says is done to the source, and to
nothing else."""

import ast
import importlib.util
import re
import sys
from collections.abc import Iterator

AXES = r'"\w+"|\("\w+"(?:, "\w+")*\)'
WHERE = (
    r"(?:(?P<read>.+) in `(?P<within>.+)` at line (?P<there>\d+)"
    r"|`(?P<name>.+)`, which line (?P<set>\d+) sets,"
    r"|`(?P<text>.+)` at line (?P<line>\d+))"
)
LATE = r"(?:, and drop `(?P<late>.+)` at line (?P<then>\d+)(?: over (?P<over>.+))?)?"
FORMS = {
    "either": (
        rf"reduce {WHERE} with lax\.psum\(\.\., (?P<axes>{AXES})\) if it is a share of a sum, "
        rf"with lax\.pmean\(\.\., (?:{AXES})\) if it is the mean of its own shard{LATE}"
    ),
    "reduce": (
        rf"reduce {WHERE} with lax\.(?P<op>\w+)\(\.\., (?P<axes>{AXES})\){LATE}"
        r"(?:, and leave (?P<out>`.+`) out of out_specs of result (?P<result>\d+))?"
    ),
    "drop": rf"drop {WHERE}(?: over (?P<over>.+))?",
    "instead": rf"lax\.(?P<op>\w+) in place of {WHERE}",
    "divide": rf"divide {WHERE} by (?P<by>\d+), the size of .+",
    "return": rf"return lax\.(?P<op>\w+)\(\.\., (?P<arguments>.+)\) of {WHERE}",
    "unsplit": r"leave (?P<out>`.+`) out of out_specs of result (?P<result>\d+)",
    "redirect": (
        rf"(?P<axes>{AXES}) in place of (?P<others>{AXES}) in {WHERE}"
        r"(?:, and `(?P<more>\w+)` at dim (?P<dim>\d+) in out_specs of result (?P<result>\d+))?"
    ),
}


def followed(help_text: str, source: str) -> Iterator[tuple[str, tuple]]:
    """The edited sources, one for each reading that the help leaves open, with what it says of
    out_specs: (result, axis, dim or None)."""
    form, found = next(
        (f, m) for f, pattern in FORMS.items() if (m := re.fullmatch(pattern, help_text))
    )
    said = found.groupdict()
    for op in ("psum", "pmean") if form == "either" else (said.get("op"),):
        tree = ast.parse(source)
        edits = list(_edits(form, said, op, tree))
        tree = ast.fix_missing_locations(_Replace(dict(edits)).visit(tree))
        yield ast.unparse(tree), tuple(_specs(said))


def _specs(said):
    if said.get("out"):
        yield from ((int(said["result"]), axis, None) for axis in re.findall(r"\w+", said["out"]))
    if said.get("more"):
        yield int(said["result"]), said["more"], int(said["dim"])


def _edits(form, said, op, tree):
    """What is done to which node of the source."""
    if form == "unsplit":
        return
    if form in ("reduce", "either") and said["name"]:
        statement = next(
            s
            for s in ast.walk(tree)
            if isinstance(s, ast.Assign)
            and s.lineno == int(said["set"])
            and said["name"] in _targets(s)
        )
        reduction = ast.parse(f"{said['name']} = lax.{op}({said['name']}, {said['axes']})").body[0]
        yield statement, lambda s: [s, reduction]
    elif form in ("reduce", "either") and said["read"]:
        within = _at(tree, said["within"], said["there"])
        for text in re.findall(r"`(.+?)`", said["read"]):
            for part in _all(within, text, direct=True):
                yield part, lambda e: _called(f"lax.{op}(it, {said['axes']})", e)
    elif form in ("reduce", "either"):
        yield (
            _at(tree, said["text"], said["line"]),
            lambda e: _called(f"lax.{op}(it, {said['axes']})", e),
        )
    elif form == "return":
        yield (
            _at(tree, said["text"], said["line"]),
            lambda e: _called(f"lax.{op}(it, {said['arguments']})", e),
        )
    elif form == "divide":
        yield _at(tree, said["text"], said["line"]), lambda e: _called(f"it / {said['by']}", e)
    elif form == "instead":
        yield _at(tree, said["text"], said["line"]), lambda e: _named(e, f"lax.{op}")
    elif form == "redirect":
        yield _at(tree, said["text"], said["line"]), lambda e: _over(e, said["axes"])
    elif form == "drop":
        yield _at(tree, said["text"], said["line"]), lambda e: _dropped(e, said["over"])
    if said.get("late"):
        yield _at(tree, said["late"], said["then"]), lambda e: _dropped(e, said["over"])


class _Replace(ast.NodeTransformer):
    def __init__(self, edits):
        self.edits = edits

    def visit(self, node):
        made = super().visit(node)
        return self.edits[node](made) if node in self.edits else made


def _targets(statement):
    return [n.id for t in statement.targets for n in ast.walk(t) if isinstance(n, ast.Name)]


def _at(tree, text, line):
    """The one expression of a line that has this text; long texts are told by their beginning."""
    (found,) = (e for e in _all(tree, text) if e.lineno == int(line))
    return found


def _all(tree, text, direct=False):
    def same(e):
        # Both in the parser's own spelling, so that blanks do not matter.
        written = ast.unparse(e)
        if text.endswith(" .."):
            return re.sub(r"\s|'|\"", "", written).startswith(re.sub(r"\s|'|\"", "", text[:-3]))
        return written == ast.unparse(ast.parse(text, mode="eval").body)

    found = [
        e
        for e in (ast.iter_child_nodes(tree) if direct else ast.walk(tree))
        if isinstance(e, ast.expr) and same(e)
    ]
    if direct and not found:  # what a method is called on
        found = [e for e in ast.walk(tree) if isinstance(e, ast.expr) and same(e)]
    return found if direct else found[:1] if text.endswith(" ..") else found


def _called(template, it):
    class Fill(ast.NodeTransformer):
        def visit_Name(self, node):
            return it if node.id == "it" else node

    return Fill().visit(ast.parse(template, mode="eval").body)


def _named(call, name):
    call.func = ast.parse(name, mode="eval").body
    return call


def _over(call, axes):
    call.args[1] = ast.parse(axes, mode="eval").body
    return call


def _dropped(call, over):
    """A reduction without some of its axes, which is its operand when none is left."""
    left = (
        [a for a in ast.literal_eval(call.args[1]) if a not in re.findall(r"\w+", over)]
        if over
        else []
    )
    return _over(call, repr(tuple(left))) if left else call.args[0]


def module(source, path):
    """A source text as a module; written to a file, since the checker reads it."""
    path.write_text(source)
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None and spec.loader is not None
    made = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = made  # where dataclasses look for annotations
    try:
        spec.loader.exec_module(made)
    finally:
        del sys.modules[path.stem]
    return made
