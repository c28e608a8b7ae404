"""`plan.why`: why a conversion is not later, and what the plan costs with it elsewhere."""

import re

import pytest

from sbp.report.wording import full_need_text
from tests.explain.answers import planned, shape
from tests.report import why_programs

SUM = (shape(64, 4096), shape(4096, 64))
FORBIDDEN = {
    "return jnp.tanh(y)": (
        r"needed by tanh `jnp.tanh\(y\)` at .*:6, which has no row for P\(sum\): it is not linear"
        r" in this operand"
    ),
    "return y * y": (
        r"needed by (square|mul) `y \* y` at .*:6, which (has no row for|takes) P\(sum\)"
    ),
    "return y.astype(jnp.bfloat16)": (
        r"needed by convert_element_type .*: a cast to bfloat16 would round each part, so the sum"
        r" comes first"
    ),
    "return sbp.replicate(y)": r"pinned as B by `sbp.replicate\(y\)` at .*:6",
    "return y": (r"returned as `result`: an output is partial only if its type says so"),
}


def needed(conversion):
    return full_need_text(conversion.reason.need, ("result",))


@pytest.mark.parametrize("line", list(FORBIDDEN))
def test_why_a_reduction_is_not_later(line):
    source = f"def f(x, w):\n    y = x @ w\n    {line}\n"
    found = planned(source, SUM, in_types=("model:S(1)", "model:S(0)")).why("y").why.conversions
    said = [needed(c) for c in found if c.steps[0].kind in ("all_reduce", "reduce_scatter")]
    assert any(re.search(FORBIDDEN[line], s) for s in said), said


def test_a_carry_that_each_trip_reads_whole():
    source = """
def f(x, w):
    def step(state, part):
        out = jnp.tanh(state)
        new = part @ w
        return new, out
    return jax.lax.scan(step, jnp.zeros((64, 64)), x)
"""
    plan = planned(
        source,
        (shape(4, 64, 4096), shape(4096, 64)),
        in_types=("model:S(2)", "model:S(0)"),
        out_types="B",
    )
    (one,) = plan.why("new").why.conversions
    pattern = (
        r"carried as .* over all trips of scan .*: each trip reads it in tanh `jnp.tanh\(state\)`"
        r" at .*:7, which has no row for P\(sum\)"
    )
    assert re.fullmatch(pattern, needed(one))


def test_where_a_partial_carry_is_reduced():
    told = why_programs.plan("accumulated_step").why("total").why
    assert repr(told.type) == "data:P(sum)"
    (one,) = told.conversions
    assert one.runs == 1
    assert one.bytes_per_device == told.cost.bytes_per_device == 2 * 7 / 8 * 512 * 512 * 4


def test_other_conversions_have_a_next_best():
    source = "def f(x, w):\n    y = jnp.tanh(x)\n    return y @ w\n"
    args, in_types = (shape(2048, 2048), shape(2048, 2048)), ("model:S(1)", "model:S(1)")
    plan = planned(source, args, in_types=in_types, out_types="model:S(1)")
    gathers = [
        c for c in plan.why("y").why.conversions if c.steps[0].kind in ("all_gather", "all_to_all")
    ]
    assert gathers
    for c in gathers:
        assert c.reason.need.kind == "row"
        assert c.instead is not None and c.instead.cost is not None
        assert c.instead.cost.seconds >= plan.cost.seconds
