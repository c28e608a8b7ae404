"""A plan has nothing that a budget forbids. Where no plan keeps a budget, the diagnosis has the
line and the nearest budget."""

from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax import lax

import sbp
from sbp.errors import SbpError, SbpTypeError
from sbp.explain import faults
from sbp.explain.change import DiagnosisLimits, left_out
from sbp.explain.faults import explain
from sbp.explain.relaxations import nearest_budget
from tests.edits import check_helps
from tests.explain.budgeted import (
    ACROSS,
    MESH,
    ROWS,
    SQUARE,
    W,
    X,
    crossed,
    deep,
    looped,
    loss,
    made_late,
    planned,
    sends,
    step,
    trained,
)

MOST = 2**21
BUDGETS = {
    "a collective": (
        sbp.forbid("reduce_scatter"),
        lambda kind, axes, sent, back, loop: kind == "reduce_scatter",
    ),
    "a size": (
        sbp.forbid("all_reduce", above=MOST),
        lambda kind, axes, sent, back, loop: kind == "all_reduce" and sent > MOST,
    ),
    "an axis": (sbp.forbid(axis="dcn"), lambda kind, axes, sent, back, loop: 0 in axes),
    "forward": (
        sbp.forbid("reduce_scatter", where="forward"),
        lambda kind, axes, sent, back, loop: kind == "reduce_scatter" and not back,
    ),
    "backward": (
        sbp.forbid(axis="model", where="backward"),
        lambda kind, axes, sent, back, loop: 1 in axes and back,
    ),
    "a collective backward": (
        sbp.forbid("all_gather", where="backward"),
        lambda kind, axes, sent, back, loop: kind == "all_gather" and back,
    ),
    "loop": (
        sbp.forbid(axis="model", where="loop"),
        lambda kind, axes, sent, back, loop: 1 in axes and loop,
    ),
    "a size in loops": (
        sbp.forbid("all_reduce", above=MOST, where="loop"),
        lambda kind, axes, sent, back, loop: kind == "all_reduce" and sent > MOST and loop,
    ),
}

BITES = {
    "a collective": [("tpu-v3", loss), ("tpu-v3", step), ("tpu-v3", looped), ("tpu-v3", trained)],
    "a size": [("tpu-v5p", loss), ("tpu-v5p", step), ("tpu-v5p", looped), ("h100", trained)],
    "an axis": [("tpu-v3", loss), ("tpu-v3", step), ("tpu-v3", looped), ("tpu-v3", trained)],
    "forward": [("tpu-v3", loss), ("tpu-v3", step), ("tpu-v3", looped), ("tpu-v3", trained)],
    "backward": [("tpu-v3", step), ("tpu-v3", deep), ("h100", step)],
    "a collective backward": [("tpu-v3", trained), ("tpu-v5p", deep), ("cpu", step)],
    "loop": [("tpu-v3", looped), ("tpu-v3", trained)],
    "a size in loops": [("tpu-v5p", looped), ("h100", trained)],
}
"""Programs that break a budget where nothing forbids it."""


@pytest.mark.parametrize(
    ("name", "hardware", "fn"),
    [(n, h, f) for n, found in BITES.items() for h, f in found],
    ids=lambda p: getattr(p, "__name__", p),
)
def test_a_plan_keeps_its_budget(name, hardware, fn):
    budget, breaks = BUDGETS[name]
    assert [s for s in planned(fn, hardware=hardware) if breaks(*s)], (
        "the budget forbids nothing that is wanted"
    )
    assert not [s for s in planned(fn, hardware=hardware, budgets=[budget]) if breaks(*s)]


def test_every_kind_of_budget_has_a_program():
    assert BITES.keys() == BUDGETS.keys()


def residual(ws, x):
    """The gradient of layers whose carry has two readers in the loop."""

    def layer(h, w):
        return jnp.tanh(jnp.tanh(h @ w[0]) @ w[1]) + h, None

    return jax.grad(lambda ws, x: (lax.scan(layer, x, ws)[0] ** 2).sum())(ws, x)


LAYERS = (
    jax.ShapeDtypeStruct((3, 1024, 2048), jnp.float32),
    jax.ShapeDtypeStruct((3, 2048, 1024), jnp.float32),
)
TOKENS = jax.ShapeDtypeStruct((256, 1024), jnp.float32)
BESIDE = {
    "a size forward": (
        sbp.forbid("all_gather", above=2**18, where="forward"),
        lambda kind, axes, sent, back, loop: kind == "all_gather" and sent > 2**18 and not back,
    ),
    "an axis forward": (
        sbp.forbid(axis="dcn", where="forward"),
        lambda kind, axes, sent, back, loop: 0 in axes and not back,
    ),
    "an axis backward": (
        sbp.forbid(axis="dcn", where="backward"),
        lambda kind, axes, sent, back, loop: 0 in axes and back,
    ),
}


@pytest.mark.parametrize("pinned", [None, "model:S(1)"])
@pytest.mark.parametrize("name", BESIDE)
def test_a_budget_in_loops_beside_one_of_a_pass(name, pinned):
    """What a loop hands on to its next turn is converted in the loop, for the chooser as for the
    check of what it chose."""
    of_loops = (
        sbp.forbid(axis="model", above=2**14, where="loop"),
        lambda kind, axes, sent, back, loop: 1 in axes and sent > 2**14 and loop,
    )
    both = [BESIDE[name], of_loops]

    def broken(*budgets):
        program = (
            sbp.jit(residual, MESH, in_types=(None, pinned), hardware="tpu-v3", budgets=budgets)
            .plan(LAYERS, TOKENS)
            .program
        )
        found = list(sends(program.block, made_late(program.graph)))
        return [any(breaks(*s) for s in found) for _, breaks in both]

    assert broken() == [True, True]
    assert broken(*(budget for budget, _ in both)) == [False, False]


# Arguments are wrong on purpose here, which the type checker would refuse.
forbid: Any = sbp.forbid
jit: Any = sbp.jit
policy: Any = sbp.policy


@pytest.mark.parametrize(
    ("wrong", "code"),
    [
        (lambda: forbid("all_gathers"), "unknown-option"),
        (lambda: forbid(where="forwards"), "unknown-option"),
        (lambda: forbid(above=-1), "bad-argument"),
        (lambda: jit(loss, MESH, budgets=[sbp.forbid(axis="modle")]), "unknown-axis"),
        (lambda: jit(loss, MESH, budgets=sbp.forbid()), "bad-argument"),
        (lambda: jit(loss, MESH, boxing={"modle": "auto"}), "unknown-axis"),
        (lambda: jit(loss, MESH, boxing={"model": "some"}), "unknown-option"),
        (lambda: policy("some").__enter__(), "unknown-option"),
        (lambda: forbid(where=["loop"]), "unknown-option"),
        (lambda: forbid(where={"loop": 1}), "unknown-option"),
        (lambda: forbid(["all_gather"]), "unknown-option"),
        (lambda: forbid(axis=""), "bad-argument"),
        (lambda: forbid(axis=["dcn"]), "bad-argument"),
        (lambda: policy(["auto"]).__enter__(), "unknown-option"),
        (lambda: policy("explicit", "").__enter__(), "bad-argument"),
        (lambda: policy("explicit", "model", None).__enter__(), "bad-argument"),
        (lambda: policy("explicit", ("dcn", "model")).__enter__(), "bad-argument"),
    ],
)
def test_bad_input(wrong, code):
    with pytest.raises(SbpError) as caught:
        wrong()
    assert caught.value.code == code


def test_rows_of_a_budget_say_what_does_not_fit():
    f = sbp.jit(
        crossed, MESH, in_types=ACROSS, out_types="dcn:P(sum)", budgets=[sbp.forbid(axis="dcn")]
    )
    (found,) = f.check(SQUARE, SQUARE).diagnostics
    assert found.code == "budget"
    assert {(r.inputs, r.remark) for r in found.rows} >= {
        (("S(1)", "S(0)"), "a fits, b does not"),
        (("B", "S(1)"), "b fits, a does not"),
    }


def test_what_no_plan_keeps_is_a_type_error_with_the_nearest_budget():
    f = sbp.jit(loss, MESH, in_types=ROWS, budgets=[sbp.forbid(above=1000, where="forward")])
    with pytest.raises(SbpTypeError) as caught:
        f.plan(X, W)
    (diagnostic,) = caught.value.diagnostics
    assert diagnostic.code == "budget"
    budgets = [sbp.forbid(above=1000, where="forward")]
    check_helps(loss, MESH, {"in_types": ROWS, "budgets": budgets}, (X, W), [diagnostic])
    found = nearest_budget(f.trace(X, W).request, 0, plans=DiagnosisLimits().plans)
    assert found is not None
    budget, program = found
    (help_,) = diagnostic.helps
    assert help_.bytes_per_device == program.cost.bytes_per_device
    # What it names is possible, and a byte less is not.
    nearest = sbp.forbid(above=budget.above, where="forward")
    assert sbp.jit(loss, MESH, in_types=ROWS, budgets=[nearest]).plan(X, W).cost == program.cost
    assert (
        not sbp.jit(
            loss, MESH, in_types=ROWS, budgets=[sbp.forbid(above=budget.above - 1, where="forward")]
        )
        .check(X, W)
        .ok
    )


@pytest.mark.parametrize("named", [False, True])
def test_a_result_that_may_not_be_reduced_is_told_at_its_line(named):
    def product(x, w):
        return x @ w

    def assigned(x, w):
        y = x @ w
        return y

    (diagnostic,) = (
        sbp.jit(
            assigned if named else product, MESH, in_types=ROWS, budgets=[sbp.forbid(axis="model")]
        )
        .check(X, W)
        .diagnostics
    )
    assert diagnostic.code == "budget" and diagnostic.primary is not None
    assert (
        diagnostic.title
        == "returning `x @ w` needs a collective that a budget forbids on mesh axis `model`"
    )
    assert diagnostic.primary.text == "P(sum) here; the program returns this value"
    (help_,) = diagnostic.helps
    assert help_.bytes_per_device > 0


@pytest.mark.parametrize("nearest", [True, False])
def test_the_nearest_budget_takes_the_place_of_one_help(nearest, monkeypatch):
    """Where there is none, because other budgets are impossible, too, that place is free."""
    f = sbp.jit(
        crossed, MESH, in_types=ACROSS, out_types="dcn:P(sum)", budgets=[sbp.forbid(axis="dcn")]
    )
    request = f.trace(SQUARE, SQUARE).request
    if not nearest:
        monkeypatch.setattr(faults, "budget_help", lambda *_, **__: None)
    (every,) = explain(request, limits=DiagnosisLimits(shown=100))
    (few,) = explain(request, limits=DiagnosisLimits(shown=2))
    left = len(every.helps) - 2
    assert len(few.helps) == 2 and left > 0
    assert few.helps[-1].text.startswith("allow ") == nearest
    assert left_out(left, 0)[0] in few.notes
