"""Budgets and policies: what a plan may not have, it does not have; and the nearest budget where there is none."""

from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax import lax
from jax.sharding import AbstractMesh

import sbp
from sbp.errors import SbpError, SbpTypeError
from sbp.mesh import mesh_spec
from sbp.plan.budgets import nearest_budget
from sbp.plan.edits import Case
from sbp.plan.ir import Apply, Box, Loop

MESH = AbstractMesh((2, 4), ("dcn", "model"))
X, W = jax.ShapeDtypeStruct((1024, 4096), jnp.float32), jax.ShapeDtypeStruct((4096, 2048), jnp.float32)
ROWS = ("model:S(1)", "model:S(0)")


def loss(x, w):
    return (jnp.tanh(x @ w) @ w.T).sum()


def step(x, w):
    return jax.grad(loss, argnums=(0, 1))(x, w)


def looped(x, w):
    return lax.scan(lambda c, _: (jnp.tanh(c @ w) @ w.T, None), x, None, length=5)[0].sum()


def sends(block, in_loop=False):
    """(kind, mesh axes, bytes, whether in a gradient, whether in a loop) of all collectives, read from the instructions."""
    for instruction in block.instructions:
        match instruction:
            case Box(steps=steps, reader=reader):
                for s in steps:
                    if s.bytes_sent:
                        yield s.kind, s.mesh_axes, s.bytes_sent, reader is not None and reader.backward, in_loop
            case Apply(node=node, sends=kernels):
                yield from ((s.kind, (k,), s.bytes, node.backward, in_loop) for k, s in kernels)
            case Loop(node=node, blocks=blocks):
                for inner in blocks:
                    yield from sends(inner, in_loop or node.op != "cond")
            case _:
                raise AssertionError(instruction)


def planned(fn, in_types=ROWS, **options):
    return list(sends(sbp.jit(fn, MESH, in_types=in_types, **options).plan(X, W).program.block))


BUDGETS = {
    "a collective": (sbp.forbid("reduce_scatter"), lambda kind, axes, sent, backward, loop: kind == "reduce_scatter"),
    "a size": (sbp.forbid("all_reduce", above=2**21), lambda kind, axes, sent, backward, loop: kind == "all_reduce" and sent > 2**21),
    "an axis": (sbp.forbid(axis="dcn"), lambda kind, axes, sent, backward, loop: 0 in axes),
    "forward": (sbp.forbid("reduce_scatter", where="forward"), lambda kind, axes, sent, back, loop: kind == "reduce_scatter" and not back),
    "backward": (sbp.forbid("all_gather", where="backward"), lambda kind, axes, sent, back, loop: kind == "all_gather" and back),
    "loop": (sbp.forbid(axis="model", where="loop"), lambda kind, axes, sent, backward, loop: 1 in axes and loop),
}


@pytest.mark.parametrize("fn", [loss, step, looped], ids=lambda f: f.__name__)
@pytest.mark.parametrize("name", BUDGETS)
def test_a_plan_keeps_its_budget(name, fn):
    budget, breaks = BUDGETS[name]
    assert not [s for s in planned(fn, budgets=[budget]) if breaks(*s)]


def test_the_budgets_bite():
    assert all(
        any(breaks(*s) for fn in (loss, step, looped) for s in planned(fn))
        for name, (_, breaks) in BUDGETS.items()
        if name in ("a collective", "forward", "a size")
    )


@pytest.mark.parametrize("axis", ["dcn", "model"])
def test_a_policy_of_one_axis(axis):
    k = MESH.axis_names.index(axis)
    allowed = {"all_reduce", "reduce_scatter"}
    found = planned(loss, boxing={axis: "reduce"})
    assert all(kind in allowed for kind, axes, *_ in found if k in axes)


def test_a_policy_of_a_region_holds_in_its_gradient():
    def inside(x, w):
        with sbp.policy("reduce"):
            h = jnp.tanh(x @ w)
        return (h @ w.T).sum()

    def gradient(x, w):
        return jax.grad(inside)(x, w)

    plan = sbp.jit(gradient, MESH, in_types=ROWS).plan(X, W)
    marked = [i for i in plan.program.block.instructions if isinstance(i, Box) and i.reader is not None and "sbp_policy" in i.reader.scope]
    assert marked
    assert all(s.kind in ("all_reduce", "reduce_scatter", "slice", "mask") for i in marked for s in i.steps)


def test_a_region_may_allow_what_the_program_does_not():
    def inside(x, w):
        with sbp.policy("auto"):
            h = x @ w
        return h.sum()

    split = ("model:S(1)", "model:S(1)")
    assert sbp.jit(lambda x, w: (x @ w).sum(), MESH, in_types=split, boxing="explicit").check(X, W).ok is False
    assert sbp.jit(inside, MESH, in_types=split, boxing="explicit").check(X, W).ok is True


def test_the_mark_of_a_region_is_not_shown():
    def inside(x, w):
        with jax.named_scope("layer"), sbp.policy("explicit", "model"):
            return jnp.tanh(x @ w)

    (diagnostic,) = sbp.jit(inside, MESH, in_types=ROWS).check(X, W).diagnostics
    assert diagnostic.scope == "in layer, forward"


def test_what_no_plan_keeps_is_a_type_error_with_the_nearest_budget():
    f = sbp.jit(loss, MESH, in_types=ROWS, budgets=[sbp.forbid(above=1000, where="forward")])
    with pytest.raises(SbpTypeError) as caught:
        f.plan(X, W)
    (diagnostic,) = caught.value.diagnostics
    assert diagnostic.code == "budget"
    traced = f.trace(X, W)
    found = nearest_budget(Case(traced.graph, mesh_spec(MESH), traced.demand, "auto"), 0)
    assert found is not None
    budget, program, least = found
    assert least
    (help_,) = diagnostic.helps
    assert help_.bytes_per_device == program.cost.bytes_per_device
    # What it names is possible, and a byte less is not.
    nearest = sbp.forbid(above=budget.above, where="forward")
    assert sbp.jit(loss, MESH, in_types=ROWS, budgets=[nearest]).plan(X, W).cost == program.cost
    assert not sbp.jit(loss, MESH, in_types=ROWS, budgets=[sbp.forbid(above=budget.above - 1, where="forward")]).check(X, W).ok


@pytest.mark.parametrize("named", [False, True])
def test_a_result_that_may_not_be_reduced_is_told_at_its_line(named):
    def product(x, w):
        return x @ w

    def assigned(x, w):
        y = x @ w
        return y

    (diagnostic,) = sbp.jit(assigned if named else product, MESH, in_types=ROWS, budgets=[sbp.forbid(axis="model")]).check(X, W).diagnostics
    assert diagnostic.code == "budget" and diagnostic.primary is not None
    assert diagnostic.title == "`x @ w`, which is returned, needs what a budget forbids on mesh axis `model`"
    assert diagnostic.primary.text == "P(sum) here, and returned"
    (help_,) = diagnostic.helps
    assert help_.bytes_per_device > 0


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
    ],
)
def test_bad_input(wrong, code):
    with pytest.raises(SbpError) as caught:
        wrong()
    assert caught.value.code == code
