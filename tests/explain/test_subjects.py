"""What a user may call a value in `plan.why`: variables, inputs, outputs, lines."""

import jax.numpy as jnp
import pytest

from sbp.errors import SbpError
from tests.explain.answers import planned, shape
from tests.report import programs, why_programs


def test_names():
    source = """
def f(x, ws):
    def loss(ws):
        h = jax.nn.silu(x @ ws["a"])
        return (h * h).sum()
    value, grads = jax.value_and_grad(loss)(ws)
    return value, grads
"""
    plan = planned(source, (shape(64, 64), {"a": shape(64, 64)}), in_types=("data:S(0)", None))
    names = ("h", "ws['a']", "[0]", "[1]['a']", "line 7", 7, "gradient of line 7", "value", "grads")
    why = {name: plan.why(name).why for name in names}
    kinds = {name: why[name].subject.kind for name in names}
    assert [n for n in names if kinds[n] == "input"] == ["ws['a']"]
    assert [n for n in names if kinds[n] == "output"] == ["[0]", "[1]['a']"]
    assert why["line 7"] == why[7]
    assert why["line 7"].subject.label == why["h"].subject.label == "h"
    assert [n for n in names if why[n].subject.gradient] == ["gradient of line 7", "grads"]
    assert {s.label for s, _ in why["line 7"].others} >= {'x @ ws["a"]'}
    assert (why["value"].shape, why["grads"].shape) == ((), (64, 64))


def test_files():
    plan = why_programs.plan("accumulated_step")
    assert plan.why("why_programs.py:59").why == plan.why("tests/report/why_programs.py:59").why
    with pytest.raises(SbpError, match=r"no value of the program is called 'other\.py:59'"):
        plan.why("other.py:59")


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("hh", 'did you mean "h"?'),
        ("gradz", '"grads"'),
        ("qqqqqq", "known: "),
        ("line 9999", "lines near it with values: "),
    ],
)
def test_unknown_names(name, said):
    with pytest.raises(SbpError, match="no value of the program is called") as error:
        why_programs.plan("megatron_step").why(name)
    assert said in str(error.value)


def test_assignments():
    source = """
def f(x, w):
    a, b = jnp.exp(x), jnp.sin(x)
    c: jax.Array = a * b
    c += w
    (d, e), g = jax.lax.top_k(c, 2), 3
    if (k := d.sum()) is not None:
        g = g * k
    return g, e
"""
    plan = planned(source, (shape(64, 64), shape(64, 64)))
    kinds = {
        name: plan.program.graph.avals[plan.why(name).why.subject.values[0]] for name in "abcdegk"
    }
    assert [kinds[n].shape for n in "abcdegk"] == [(64, 64)] * 3 + [(64, 2)] * 2 + [(), ()]
    assert kinds["e"].dtype == jnp.int32
    assert len(plan.why("c").why.others) == 1


@pytest.mark.parametrize("name", ["layers", "iterate", "choose"])
def test_every_line_can_be_asked_about(name):
    plan = programs.plan(name)
    lines = {node.span for node in plan.program.graph.walk() if node.span and not node.backward}
    for place in sorted({f"{span.file}:{span.line}" for span in lines}):
        told = plan.why(place)
        frame = told.why.subject.frame
        assert frame is not None and f"{frame.file}:{frame.line}" == place
        assert len(str(told).splitlines()) <= 60
