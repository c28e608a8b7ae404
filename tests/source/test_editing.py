"""Edits of annotations and policies, made on small sources and written out; what a variable stands
for at a line, read from the text alone."""

import ast
import linecache
from typing import Any

import pytest

from sbp.errors import Span
from sbp.source.editing import (
    constants_in,
    convert_value,
    repin,
)
from sbp.source.reader import SourceRead, VariableBinding, binding_of, exact_text, span_of
from sbp.types import B, P, S
from tests.edits import edited_text

FILE = "edited_source.py"


def remember(text: str) -> str:
    linecache.cache[FILE] = (len(text), None, text.splitlines(keepends=True), FILE)
    return text


def span(text: str, part: str, nth: int = 0) -> Span:
    """Where the expression `part` stands in a text for the nth time."""
    found = [
        span_of(node, FILE)
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.expr) and ast.unparse(node) == part
    ]
    return sorted(found)[nth]


BOTH = "sbp.annotate(x, a=sbp.B, cotangent='a:P(sum)')"
"""Pins of a value and of its cotangent."""


@pytest.mark.parametrize(
    ("line", "call", "atoms", "options", "after"),
    [
        ("y = sbp.split(x, 0, 'a')", "sbp.split(x, 0, 'a')", {}, {}, "y = x"),
        ("y = sbp.split(a + b, 0, 'a').T", "sbp.split(a + b, 0, 'a')", {}, {}, "y = (a + b).T"),
        ("y = sbp.split(a + b, 0, 'a')", "sbp.split(a + b, 0, 'a')", {}, {}, "y = a + b"),
        ("y = sbp.split(a +\n  b, 0, 'a')", "sbp.split(a + b, 0, 'a')", {}, {}, "y = (a +\n  b)"),
        (
            "y = sbp.split(h := a.T, 0, 'a')",
            "sbp.split((h := a.T), 0, 'a')",
            {},
            {},
            "y = (h := a.T)",
        ),
        ("y = sbp.split(\n  x\n  .T, 0, 'a')", "sbp.split(x.T, 0, 'a')", {}, {}, "y = (x\n  .T)"),
        ("y = sbp.split(x\n  .f(), 0, 'a')", "sbp.split(x.f(), 0, 'a')", {}, {}, "y = (x\n  .f())"),
        ("y = sbp.split(f(\n  x), 0, 'a')", "sbp.split(f(x), 0, 'a')", {}, {}, "y = f(\n  x)"),
        ("é = 2 * sbp.replicate(é)", "sbp.replicate(é)", {}, {}, "é = 2 * é"),
        (
            "y = jax.tree.map(sbp.replicate, xs)",
            "jax.tree.map(sbp.replicate, xs)",
            {},
            {},
            "y = xs",
        ),
        (
            "y = sbp.split(x, 0, 'a', 'b')",
            "sbp.split(x, 0, 'a', 'b')",
            {"b": S(0)},
            {},
            'y = sbp.split(x, 0, "b")',
        ),
        (
            "y = sbp.annotate(x, 'a:S(0)')",
            "sbp.annotate(x, 'a:S(0)')",
            {"a": S(1), "b": P("max")},
            {},
            'y = sbp.annotate(x, a=sbp.S(1), b=sbp.P("max"))',
        ),
        (
            "y = sbp.replicate(x, 'a')",
            "sbp.replicate(x, 'a')",
            {"type": S(1), "lambda": B, "b": P},
            {},
            'y = sbp.annotate(sbp.split(x, 1, "type"), b=sbp.P("sum"), **{"lambda": sbp.B})',
        ),
        ("y = place(x)", "place(x)", {"a": B}, {}, 'y = sbp.replicate(x, "a")'),
        (
            "from rules import at; y = at(x, 'd')",
            "at(x, 'd')",
            {},
            {},
            "from rules import at; y = x",
        ),
        # The pins of a result and of its cotangent go apart.
        *(
            (f"y = {BOTH}", BOTH, atoms, options, f"y = {after}")
            for atoms, options, after in (
                ({}, {"part": "cotangent"}, "sbp.annotate(x, a=sbp.B)"),
                ({}, {"part": "result"}, "sbp.annotate(x, cotangent='a:P(sum)')"),
                ({}, {"part": "whole"}, "x"),
                (
                    {"a": S(0)},
                    {"part": "cotangent", "free": ("b",)},
                    'sbp.annotate(x, a=sbp.B, cotangent="a:S(0) b:?")',
                ),
            )
        ),
        # The dtype of sums stays.
        *(
            (f"y = {call}", call, atoms, {"part": part, "reduce_dtype": "float32"}, f"y = {after}")
            for call, atoms, part, after in (
                (
                    "sbp.annotate(x, a=sbp.B, reduce_dtype=jnp.float32)",
                    {"a": S(0)},
                    "whole",
                    'sbp.annotate(x, a=sbp.S(0), reduce_dtype="float32")',
                ),
                ("sbp.annotate(x, a=sbp.B, reduce_dtype=jnp.float32)", {}, "whole", "x"),
                (
                    "sbp.annotate(x, a=sbp.B, cotangent='a', reduce_dtype=jnp.float32)",
                    {},
                    "result",
                    "sbp.annotate(x, cotangent='a', reduce_dtype=\"float32\")",
                ),
                (
                    "sbp.annotate(x, cotangent='a:P(sum)', reduce_dtype=jnp.float32)",
                    {},
                    "cotangent",
                    "x",
                ),
            )
        ),
    ],
)
def test_an_annotation_is_changed_or_taken_out(line, call, atoms, options: dict[str, Any], after):
    text = remember(f"import jax\nimport sbp\n{line}\n")
    edits = repin(span(text, call), atoms, **options)
    assert edited_text(text, edits) == f"import jax\nimport sbp\n{after}\n"


def test_what_is_no_annotation_is_left_alone():
    assert repin(span(remember("import jax\ny = jax.numpy.sum(x)\n"), "jax.numpy.sum(x)"), {}) == ()
    assert repin(None, {}) == ()
    assert repin(Span(file="nowhere.py", line=1, column=1, end_column=5), {}) == ()


@pytest.mark.parametrize(
    ("source", "line", "read", "after"),
    [
        (  # a local variable: a statement before
            "import sbp\ndef f(x):\n\ty = g(\n\t\tx + 1)\n",
            "x + 1",
            "x",
            'import sbp\ndef f(x):\n\tx = sbp.replicate(x, "a")\n\ty = g(\n\t\tx + 1)\n',
        ),
        (  # on a line with others
            "import sbp\ndef f(x, c):\n    if c: y = x + 1\n",
            "x + 1",
            "x",
            'import sbp\ndef f(x, c):\n    if c: x = sbp.replicate(x, "a"); y = x + 1\n',
        ),
        (  # a variable of an outer function cannot be assigned: where it is read, from there on
            "import sbp\ndef f(w):\n    def g(x):\n        y = x * w\n        return x @ w + w\n",
            "x @ w",
            "w",
            "import sbp\ndef f(w):\n    def g(x):\n        y = x * w\n"
            '        return x @ sbp.replicate(w, "a") + sbp.replicate(w, "a")\n',
        ),
        (  # the parameter of a lambda
            "import sbp\ndef f(w):\n    return scan(lambda c: c @ w, c)\n",
            "c @ w",
            "c",
            'import sbp\ndef f(w):\n    return scan(lambda c: sbp.replicate(c, "a") @ w, c)\n',
        ),
        (  # an input by its path, in either kind of quotes
            'import sbp\ndef f(p, x):\n    return p["w"] @ x\n',
            "p['w'] @ x",
            "p['w']",
            'import sbp\ndef f(p, x):\n    return sbp.replicate(p["w"], "a") @ x\n',
        ),
        (  # no place for a statement
            "import sbp\ndef f(x):\n    if a:\n        pass\n    elif g(x):\n        pass\n",
            "g(x)",
            "x",
            "import sbp\ndef f(x):\n    if a:\n        pass\n"
            '    elif g(sbp.replicate(x, "a")):\n        pass\n',
        ),
        (  # a variable that the statement itself assigns
            "import sbp\ndef f(a, w):\n    return (h := a @ w) + g(h @ w)\n",
            "h @ w",
            "h",
            'import sbp\ndef f(a, w):\n    return (h := a @ w) + g(sbp.replicate(h, "a") @ w)\n',
        ),
        (  # another name of sbp
            "import sbp as s\ndef f(x):\n    return x + 1\n",
            "x + 1",
            "x",
            'import sbp as s\ndef f(x):\n    x = s.replicate(x, "a")\n    return x + 1\n',
        ),
        (  # no name of sbp
            '"""Doc."""\nfrom __future__ import annotations\ndef f(x):\n    return x + 1\n',
            "x + 1",
            "x",
            '"""Doc."""\nfrom __future__ import annotations\nimport sbp\n'
            'def f(x):\n    x = sbp.replicate(x, "a")\n    return x + 1\n',
        ),
    ],
)
def test_a_value_is_annotated_before_a_line(source, line, read, after):
    text = remember(source)
    made = edited_text(text, convert_value(span(text, line), SourceRead(read), {"a": B}))
    compile(made, FILE, "exec")
    assert made == after


def test_an_expression_is_annotated_where_it_stands():
    text = remember("import sbp\ny = g(x.sum(0))\n")
    at = span(text, "x.sum(0)")
    (edit,) = convert_value(span(text, "g(x.sum(0))"), SourceRead("x.sum(0)", at), {"a": S(1)})
    assert edited_text(text, [edit]) == 'import sbp\ny = g(sbp.split(x.sum(0), 1, "a"))\n'


def test_what_the_line_does_not_show_is_not_annotated():
    text = remember("import sbp\ndef f(x):\n    return x + 1\n")
    assert convert_value(span(text, "x + 1"), SourceRead("other"), {"a": B}) == ()


@pytest.mark.parametrize(
    ("call", "old", "new", "after"),
    [
        ('sbp.split(2 * x, 2, "d")', 2, 1, 'sbp.split(2 * x, 1, "d")'),
        ("sbp.split(f(x.sum(2), -2)[:, 2], 2)", 2, 0, "sbp.split(f(x.sum(2), -2)[:, 2], 0)"),
        ("sbp.split(x, -3)", -3, 0, "sbp.split(x, 0)"),
        ("sbp.annotate(x + 2, d=sbp.S(2))", 2, 1, "sbp.annotate(x + 2, d=sbp.S(1))"),
        ('sbp.replicate(p["a"], "a")', "a", "b", 'sbp.replicate(p["a"], "b")'),
        ('sbp.annotate(x, **{"a": sbp.B})', "a", "b", 'sbp.annotate(x, **{"b": sbp.B})'),
        ("sbp.annotate(f(a=x), a=sbp.B)", "a", "b", "sbp.annotate(f(a=x), b=sbp.B)"),
        ('layout(x, "a", *["a"])', "a", "b", 'layout(x, "b", *["b"])'),
    ],
)
def test_arguments_of_a_call_are_replaced(call, old, new, after):
    text = remember(f"import sbp\ny = {call}\n")
    line = text.splitlines()[1].encode()
    at = Span(file=FILE, line=2, column=5, end_column=len(line) + 1, end_line=2)
    edits = constants_in(at, old, new, of_call=True)
    assert edited_text(text, edits) == f"import sbp\ny = {after}\n"


def bound(text: str) -> VariableBinding | None:
    """What `x` stands for where `read(x)` reads it."""
    return binding_of("x", span(remember(text), "read(x)"))


@pytest.mark.parametrize(
    ("body", "expression"),
    [
        ("x = a + 1; y = read(x)", "a + 1"),
        ("x = a; x = b.T; y = read(x)", "b.T"),
        ("x = a.T; x = read(x)", "a.T"),
        ("x, y = a.T, b; y = read(x)", "a.T"),
        ("x, *y = a.T, b, a; y = read(x)", "a.T"),
        ("y = x = a.T; read(x)", "a.T"),
        ("x: Array = a.T; read(x)", "a.T"),
        ("y = (x := a.T) + read(x)", "a.T"),
        ("with a:\n    x = a.T\n  read(x)", "a.T"),
        ("x = a.T\n  if a:\n    read(x)", "a.T"),
        ("if a:\n    x = a.T\n    read(x)", "a.T"),
        ("x = a.T\n  def g(): x = b\n  read(x)", "a.T"),
        ("for _ in a:\n    x = a.T\n    read(x)", "a.T"),
    ],
)
def test_an_expression(body, expression):
    found = bound(f"def f(a, b):\n  {body}\n")
    assert found is not None and found.span is not None and found.whole
    assert exact_text(found.span) == expression


@pytest.mark.parametrize(
    ("target", "name", "whole"), [("x", "a", True), ("x, y", "", False)], ids=["name", "element"]
)
def test_another_name_and_an_element(target, name, whole):
    found = bound(f"def f(a):\n  {target} = a; read(x)\n")
    assert found is not None and (found.name, found.whole) == (name, whole)


@pytest.mark.parametrize(("parameters", "position"), [("a, x", 1), ("a, *, x", -1)])
def test_a_parameter(parameters, position):
    found = bound(f"def f({parameters}):\n  return read(x)\n")
    assert found == VariableBinding(function="f", position=position)


@pytest.mark.parametrize(
    "body",
    [
        "if a:\n    x = a.T\n  read(x)",
        "if a:\n    x = a.T\n  else:\n    read(x)",
        "x = a\n  for _ in a:\n    y = read(x)\n    x = y",
        "for x in a:\n    read(x)",
        "*b, x = a, a.T, 1\n  read(x)",
        "x = a\n  x += 1\n  read(x)",
        "with a as x:\n    read(x)",
        "y = lambda x: read(x)",
        "y = [read(x) for x in a]",
        "def g(): return read(x)\n  x = a",
        "try:\n    x = a.T\n  except E:\n    x = a\n  read(x)",
    ],
)
def test_the_text_does_not_decide(body):
    assert bound(f"def f(a):\n  {body}\n") is None
