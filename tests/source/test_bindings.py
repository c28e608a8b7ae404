"""What a variable stands for at a line, read from the text alone."""

import ast
import linecache

import pytest

from sbp.source.scopes import VariableBinding, binding_of
from sbp.source.text import exact_text, span_of

FILE = "bound_source.py"


def bound(text: str) -> VariableBinding | None:
    """What `x` stands for where `read(x)` reads it."""
    linecache.cache[FILE] = (len(text), None, text.splitlines(keepends=True), FILE)
    (call,) = [
        node
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.Call) and ast.unparse(node) == "read(x)"
    ]
    return binding_of("x", span_of(call, FILE))


@pytest.mark.parametrize(
    ("body", "expression"),
    [
        ("x = a + 1; y = read(x)", "a + 1"),
        ("x = a; x = b.T; y = read(x)", "b.T"),
        ("x = a.T; x = read(x)", "a.T"),
        ("x, y = a.T, b; y = read(x)", "a.T"),
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


def test_another_name_and_an_element():
    found = bound("def f(a):\n  x = a; read(x)\n")
    assert found is not None and (found.name, found.whole) == ("a", True)
    found = bound("def f(a):\n  x, y = a; read(x)\n")
    assert found is not None and (found.name, found.whole) == ("", False)


def test_a_parameter():
    found = bound("def f(a, x):\n  return read(x)\n")
    assert found == VariableBinding(function="f", position=1)
    found = bound("def f(a, *, x):\n  return read(x)\n")
    assert found == VariableBinding(function="f", position=-1)


@pytest.mark.parametrize(
    "body",
    [
        "if a:\n    x = a.T\n  read(x)",
        "if a:\n    x = a.T\n  else:\n    read(x)",
        "x = a\n  for _ in a:\n    y = read(x)\n    x = y",
        "for x in a:\n    read(x)",
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


def test_what_is_no_source():
    text = "def f(x): return read(x)\n"
    assert bound(text) is not None
    (call,) = [n for n in ast.walk(ast.parse(text)) if isinstance(n, ast.Call)]
    assert binding_of("x", span_of(call, "nowhere.py")) is None
