"""What a limit of a diagnosis or of `plan.why` leaves out is said."""

import re
from typing import Any

import jax
import jax.numpy as jnp
import pytest

import sbp
from sbp.errors import SHOWN, Diagnostic, OptionEdit
from sbp.explain import change, helps
from sbp.explain.change import BlamedFault, Diagnosis, DiagnosisLimits, left_out
from sbp.explain.faults import diagnostic, explain
from sbp.explain.names import Names
from sbp.explain.relaxations import budget_help
from sbp.explain.why import WhyLimits, why
from sbp.infer.check import Checker
from sbp.report.answers import explanation
from tests.edits import helped
from tests.explain.answers import planned
from tests.explain.expected import MESH, MESH_2D, SQUARE, shape

STRICT = {"boxing": "explicit"}


def diagnosed(fn, args, mesh=MESH, options=STRICT, **limits) -> tuple[Diagnostic, ...]:
    """The diagnostics of a program under other limits than usual."""
    return explain(
        sbp.jit(fn, mesh, **options).trace(*args).request, limits=DiagnosisLimits(**limits)
    )


def wrong(x, y):
    return sbp.split(x, 0, "tensor") + sbp.split(y, 1, "tensor")


def test_accepted_changes_that_are_not_shown_are_counted():
    """So are rows of a rule."""
    (every,) = diagnosed(wrong, (SQUARE, SQUARE), shown=100, rows=100)
    (one,) = diagnosed(wrong, (SQUARE, SQUARE), shown=1, rows=1)
    assert not any("not shown" in n for n in every.notes)
    assert len(one.helps) == len(one.rows) == 1
    changes, rows = len(every.helps) - 1, len(every.rows) - 1
    assert changes > 1 and left_out(changes, 0)[0] in one.notes and rows
    assert f"not shown: {rows} more row{'s' * (rows > 1)} of the rule, equally close" in one.notes


def test_a_core_that_is_not_minimal_says_so():
    """Z3 finds the core, and then answers no question about smaller ones."""
    request = sbp.jit(wrong, MESH, boxing="explicit").trace(SQUARE, SQUARE).request
    whole, limited = Checker(request), Checker(request, rlimit=1)
    (system,) = whole.systems
    names = [c.name for c in system.constraints]
    _, core = whole.axis(system).check(names)
    said = "the solver reached its resource limit, so fewer constraints may be to blame"
    for axis, count in ((whole.axis(system), 0), (limited.axis(system), 1)):
        blamed = axis.blame(names, core)
        found = Diagnosis(
            request=request,
            checker=whole,
            limits=DiagnosisLimits(),
            groups=((blamed,),),
            last=blamed,
        )
        d = diagnostic(BlamedFault(found, (blamed,), Names(request.graph)))
        assert [n for n in d.notes if n == said] == [said] * count


def several(x, y, z):
    a = sbp.split(x, 0, "tensor") + sbp.split(y, 1, "tensor")
    b, c = jnp.sin(sbp.partial(z, "tensor")), jnp.cos(sbp.partial(y * 2, "tensor"))
    return a, b, c, jnp.tanh(sbp.partial(x * 2, "tensor"))


def test_a_large_program_makes_few_plans(monkeypatch):
    """Every plan of a large program costs seconds: edits are refused by the constraints at hand."""
    made: list[int] = []
    best_program = helps.best_program
    for module in (change, helps):
        monkeypatch.setattr(
            module, "best_program", lambda request: made.append(1) or best_program(request)
        )
    found = diagnosed(several, (SQUARE, SQUARE, SQUARE), work=1)
    assert len(found) == 4 and all(d.helps for d in found) and len(made) <= 8


def test_a_large_program_counts_the_changes_that_were_not_tried():
    (small,) = diagnosed(wrong, (SQUARE, SQUARE))
    (large,) = diagnosed(wrong, (SQUARE, SQUARE), work=12)
    (huge,) = diagnosed(wrong, (SQUARE, SQUARE), work=1)
    notes = [[n for n in d.notes if n.startswith("not tried: ")] for d in (small, large, huge)]
    assert [len(n) for n in notes] == [0, 1, 1]
    assert [h.text[:6] for h in huge.helps] == ["split ", "boxing"]


def test_faults_past_the_limit_are_counted():
    def many(x):
        x = x * 2
        return [
            jnp.sin(sbp.partial(x, "tensor")),
            jnp.cos(sbp.partial(x, "tensor")),
            jnp.tan(sbp.partial(x, "tensor")),
            jnp.tanh(sbp.partial(x, "tensor")),
            jnp.exp(sbp.partial(x, "tensor")),
        ]

    (told,) = diagnosed(many, (SQUARE,), faults=1)
    assert "not shown: at least 2 more errors" in told.notes
    first, _ = diagnosed(many, (SQUARE,), faults=2)
    assert "not shown: at least 3 more errors" in first.notes


def test_prices_without_reuse_of_forward_conversions_say_so():
    @jax.checkpoint
    def layer(x, w):
        return jnp.tanh(sbp.split(x, 0, "tensor") + sbp.split(w, 1, "tensor"))

    program = lambda x, w: jax.grad(lambda x: (layer(x, w) ** 2).sum())(x)

    def said(fn, **limits):
        found = diagnosed(fn, (SQUARE, SQUARE), **limits)
        return [any("do not count conversions" in n for n in d.notes) for d in found if d.helps]

    assert any(said(program, work=0)) and not any(said(program))


def test_pins_of_all_axes_that_are_not_shown_are_counted():
    program = lambda x, y, z: (x + y, jnp.sin(z))
    options = STRICT | {"in_types": ("data:S(1) tensor:S(1)", "data:B tensor:S(1)", "data:S(0)")}
    args = [shape(8, 8)] * 3
    (exact,) = diagnosed(program, args, MESH_2D, options)
    assert [label.text.split()[0] for label in exact.labels] == ["x", "y"]
    (rough,) = diagnosed(program, args, MESH_2D, options, work=5, pins=2, shown=1)
    assert (
        "some of these pins may not be part of the conflict: with 2 operations, sbp did"
        in " ".join(rough.notes)
    )
    assert "not shown: 1 more pin" in rough.notes and len(rough.helps) == 1
    assert any(n.startswith("not shown: ") and "change" in n for n in rough.notes)


def test_a_budget_that_was_not_searched_to_the_end_says_so():
    product = sbp.jit(
        lambda x, w: jnp.tanh(x @ w),
        jax.sharding.AbstractMesh((2, 4), ("dcn", "model")),
        in_types=("model:S(1)", "model:S(0)"),
        out_types="B",
        budgets=[sbp.forbid(above=64)],
    )
    request = product.trace(shape(64, 64), shape(64, 64)).request
    rough, found = (budget_help(request, 0, plans=plans) for plans in (1, 10))
    assert rough is not None and found is not None
    edits = [h.edits[0] for h in (rough, found)]
    assert [isinstance(e, OptionEdit) and e.value for e in edits] == [12288, 8192]


def test_a_help_for_one_of_several_budgets_says_so():
    options = {
        "in_types": ("tensor:S(1)", "tensor:S(0)"),
        "boxing": "reduce",
        "budgets": [sbp.forbid("all_reduce"), sbp.forbid("reduce_scatter")],
    }
    (found,) = diagnosed(lambda x, w: jnp.tanh(x @ w), (SQUARE, SQUARE), options=options)
    assert sum(n.startswith("the budget: ") for n in found.notes) == 2
    assert "sbp looked for a larger size only in the first of these budgets" in found.notes


# ---- plan.why -----------------------------------------------------------------------------------


def answer(plan, name, **limits):
    """The answer of `plan.why`, and its text, under other limits than usual."""
    found = why(plan.program, name, limits=WhyLimits(**limits))
    return found, explanation(found, plan.program.mesh).text()


@pytest.fixture(scope="module")
def plan():
    return planned("def f(x, w):\n    h = x @ w\n    return jnp.tanh(h)\n", [shape(64, 64)] * 2)


def test_types_that_were_not_tried_are_counted(plan):
    found, text = answer(plan, "h", plans=2)
    assert len(found.alternatives) <= 2 and found.untried > 0
    assert f"{found.untried} types not tried" in text


def test_a_first_answer_makes_few_plans(plan):
    made, limits = [], WhyLimits(first_operations=0)
    found = why(plan.program, "h", planning=made.append, limits=limits)
    assert not made and not found.alternatives
    assert found.axes[0].links and found.conversions is not None
    text = " ".join(explanation(found, plan.program.mesh).text().split())
    assert f"{found.untried} types not tried; plan.why(.., refine=True) tries more" in text
    refined = why(plan.program, "h", refine=True, planning=made.append, limits=limits)
    assert refined.alternatives and not refined.untried
    assert made == sorted(made, reverse=True) and len(made) >= len(refined.alternatives)


def test_a_conversion_that_was_not_tried_elsewhere_says_so():
    source = "def f(x, w):\n    y = jnp.tanh(x)\n    return y @ w\n"
    in_types = ("model:S(1)", "model:S(1)")
    plan = planned(source, [shape(2048, 2048)] * 2, in_types=in_types, out_types="model:S(1)")
    tried, text = answer(plan, "y")
    costs = [c.instead.cost for c in tried.conversions if c.instead is not None]
    assert costs and all(c and c.seconds >= plan.cost.seconds for c in costs)
    assert "not tried" not in text
    untried, text = answer(plan, "y", deferred=0)
    assert untried.conversions and not any(c.instead for c in untried.conversions)
    assert "The next-best plan in which it takes another type: not tried" in " ".join(text.split())


# ---- pins that break a memory limit --------------------------------------------------------------
# A memory limit that a pin breaks: the error offers to free that pin, with the plan's price.


GRID = jax.sharding.AbstractMesh((2, 4), ("x", "y"))
LARGE = jax.ShapeDtypeStruct((1024, 1024), jnp.float32)


def annotated(w, x):
    return (x @ sbp.replicate(w * 2, "x", "y")).sum()


def plain(w, x):
    return (x @ w).sum()


@pytest.mark.parametrize(
    ("fn", "options", "said"),
    [
        (annotated, {}, 'drop `sbp.replicate(w * 2, "x", "y")` at line {line}'),
        (plain, {"in_types": ("B", "x:S(0)")}, "leave w free in in_types"),
    ],
)
def test_the_pin_without_which_a_plan_fits_is_freed(fn, options, said):
    asked: dict[str, Any] = {**options, "memory_limit": 4.5e6}
    (found,) = helped(fn, GRID, (LARGE, LARGE), **asked)
    assert found.code == "memory-limit"
    pin, dropped, limit = [h.text for h in found.helps]
    assert dropped == said.format(line=annotated.__code__.co_firstlineno + 1)
    pinned = [label.text for label in found.labels if not label.primary]
    assert pinned == (["w * 2 is pinned x:B y:B"] if fn is annotated else [])
    assert 0 < (found.helps[0].peak_memory_bytes or 0) <= 4.5e6
    assert pin.startswith("pin ") and limit.startswith("memory_limit=")


def step(params, x, y):
    loss = lambda params: ((jnp.tanh(x @ params["a"]) @ params["b"] - y) ** 2).mean()
    return jax.tree.map(lambda p, g: p - g, params, jax.grad(loss)(params))


def test_pins_without_which_a_plan_fits_only_together_are_freed_together():
    args = {"a": shape(256, 1024), "b": shape(1024, 256)}, shape(512, 256), shape(512, 256)
    options: dict[str, Any] = {
        "in_types": ({"a": "B", "b": "B"}, None, None),
        "out_types": {"a": "x:? y:?", "b": "x:? y:?"},
        "memory_limit": int(2.5 * 2**20),
        "hardware": "tpu-v5e",
    }
    (found,) = helped(step, GRID, args, **options)
    first = found.helps[0]
    assert first.text.startswith("leave params['")
    assert " free in in_types and leave params['" in first.text
    assert 0 < (first.peak_memory_bytes or 0) <= options["memory_limit"]


def test_no_pin_is_freed_in_vain():
    (found,) = (
        sbp.jit(plain, GRID, in_types=("x:S(0)", None), memory_limit=1e4)
        .check(LARGE, LARGE)
        .diagnostics
    )
    assert [h.text.split("=")[0] for h in found.helps] == ["memory_limit"]


def test_equal_values_are_told_once():
    """Three stacked results of one scan fill the memory alike."""
    mesh = jax.sharding.AbstractMesh((8,), ("data",))

    def program(w, x):
        def body(c, _):
            c = sbp.replicate(jnp.tanh(c @ w))
            return c, (c, c + 1, 2 * c)

        first, second, third = jax.lax.scan(body, x, None, length=8)[1]
        return (first * second * third).sum()

    aval = jax.ShapeDtypeStruct((256, 256), jnp.float32)
    (fault,) = sbp.jit(jax.grad(program), mesh, memory_limit=3e5).check(aval, aval).diagnostics
    *notes, rest = [note for note in fault.notes if "per device" in note]
    assert len(notes) == len(set(notes)) == SHOWN
    assert re.fullmatch(r"\d+ more values: .* per device in all", rest)


def test_the_error_says_the_floor_and_what_fills_it():
    (found,) = sbp.jit(annotated, GRID, memory_limit=1e5).check(LARGE, LARGE).diagnostics
    (edit,) = found.helps[-1].edits
    assert isinstance(edit, OptionEdit)
    floor = f"{edit.value / 2**20:.1f} MiB per device"
    assert found.title.endswith(f"the smallest plan that it found takes {floor}")
    first, second, *_ = found.notes
    assert first.startswith(
        "w of shape (1024, 1024) as B takes 4.0 MiB per device; split as S(0) on `y`, "
    )
    assert second.endswith("takes 512.0 KiB per device")
    # Values that fill nothing are counted only.
    assert found.notes[-2:] == (
        "2 more values: 8.0 B per device in all",
        "a smaller plan may exist: sbp does not try every plan",
    )
    assert not any("4.0 B" in label.text for label in found.labels)


def test_what_helps_leave_out_is_said():
    """A pin that gives a help of its own, one that gives two, and one that is not tried."""

    def program(a, b, c):
        h = sbp.annotate(a @ b, x=sbp.P, y=sbp.B)
        return jnp.exp(h).sum() + (jnp.exp(c) @ c).sum()

    args = shape(2048, 8), shape(8, 2048), shape(1024, 1024)
    options: dict[str, Any] = {"in_types": ("x:S(1)", None, "B"), "memory_limit": 24e6}
    (found,) = sbp.jit(program, GRID, **options).check(*args).diagnostics
    left = {"not shown: 1 more change that fixes this error", "not tried: 1 more change"}
    assert len(found.helps) == 3 and left <= {*found.notes}


def test_values_that_are_live_at_any_moment_are_charged():
    """The plans at lower prices split the weights, and are full where they gather them."""

    def mlp(x, w, v):
        return jax.nn.relu(x @ w) @ v

    shapes = [jax.ShapeDtypeStruct(s, "float32") for s in ((64, 32), (32, 64), (64, 8))]
    mesh = jax.sharding.AbstractMesh((2, 4), ("data", "model"))
    plan = sbp.jit(mlp, mesh, memory_limit=11_000).plan(*shapes)
    assert plan.cost.peak_memory_bytes <= 11_000
