"""A plan has no conversion that a policy forbids and no collective that a budget forbids. A
diagnosis names the policy to blame. If no plan keeps a budget, the error has the line and the
nearest budget.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import pytest

import sbp
from sbp.explain import relaxations
from sbp.explain.change import DiagnosisLimits, left_out
from sbp.explain.faults import explain
from sbp.infer.check import Checker
from sbp.machine.mesh import mesh_spec
from sbp.plan.ir import Apply, Box, Loop
from tests.edits import check_helps, helped

# ---- programs, and what their plans send ---------------------------------------------------------

MESH = jax.sharding.AbstractMesh((2, 4), ("dcn", "model"))
X, W = (
    jax.ShapeDtypeStruct((1024, 4096), jnp.float32),
    jax.ShapeDtypeStruct((4096, 2048), jnp.float32),
)
ROWS = ("model:S(1)", "model:S(0)")


loss = lambda x, w: (jnp.tanh(x @ w) @ w.T).sum()


step = lambda x, w: jax.grad(loss, argnums=(0, 1))(x, w)


def looped(x, w):
    return jax.lax.scan(lambda c, _: (jnp.tanh(c @ w) @ w.T, None), x, None, length=5)[0].sum()


trained = lambda x, w: jax.grad(looped, argnums=(0, 1))(x, w)


def deep(x, w):
    return jax.grad(lambda x, w: jnp.tanh(jnp.tanh(x @ w) @ w.T).sum(), argnums=(0, 1))(x, w)


def made_late(graph):
    """The values of the backward pass and what is made of them, read off the names that JAX gives
    its gradients."""
    late = set()
    while True:
        before = len(late)
        for node in graph.walk():
            bodies = {o for r in node.regions for o in r.outputs}
            if "transpose(" in node.scope or not late.isdisjoint(
                o for o in (*node.inputs, *bodies) if isinstance(o, int)
            ):
                late.update(node.outputs, *(r.inputs for r in node.regions))
        if len(late) == before:
            return late


def sends(block, late, in_loop=False):
    """(kind, mesh axes, bytes, whether in a gradient, whether in a loop) of all collectives, read
    from the instructions."""
    for instruction in block.instructions:
        match instruction:
            case Box(source=source, steps=steps, reader=reader):
                backward = source.value in late or (
                    reader is not None and not late.isdisjoint(reader.outputs)
                )
                for s in steps:
                    if s.bytes_sent:
                        yield s.kind, s.mesh_axes, s.bytes_sent, backward, in_loop
            case Apply(node=node, sends=kernels):
                yield from (
                    (s.kind, (k,), s.bytes, not late.isdisjoint(node.outputs), in_loop)
                    for k, s in kernels
                )
            case Loop(node=node, blocks=blocks):
                for inner in blocks:
                    yield from sends(inner, late, in_loop or node.op != "cond")
            case _:
                raise AssertionError(instruction)


def planned(fn, in_types=ROWS, hardware="tpu-v3", **options):
    program = sbp.jit(fn, MESH, in_types=in_types, hardware=hardware, **options).plan(X, W).program
    return list(sends(program.block, made_late(program.graph)))


def crossed(a, b):
    return (a @ b) * 2


SQUARE = jax.ShapeDtypeStruct((64, 64), jnp.float32)
ACROSS, PARTS = ("dcn:S(1)", "dcn:S(1)"), ("dcn:S(1)", "dcn:S(0)")


# ---- policies ------------------------------------------------------------------------------------

FROM_PARTS = ("all_reduce", "reduce_scatter")
"""What the policy "reduce" lets be sent."""


@pytest.mark.parametrize(
    ("axis", "fn", "in_types", "hardware"),
    [
        ("model", loss, ROWS, "tpu-v3"),
        ("model", step, ROWS, "cpu"),
        ("dcn", step, ("dcn:S(1)", "dcn:S(0)"), "tpu-v3"),
        ("dcn", deep, (None, "dcn:S(1)"), "cpu"),
    ],
)
def test_a_policy_of_one_axis(axis, fn, in_types, hardware):
    k = MESH.axis_names.index(axis)
    free, found = (
        planned(fn, in_types, hardware, boxing=boxing) for boxing in ("auto", {axis: "reduce"})
    )
    assert any(k in axes and kind not in FROM_PARTS for kind, axes, *_ in free)
    assert all(kind in FROM_PARTS for kind, axes, *_ in found if k in axes)


@pytest.mark.parametrize(
    ("in_types", "hardware"),
    [(ROWS, "cpu"), (("model:S(0)", None), "tpu-v3"), (("model:S(0)", None), "h100")],
)
def test_a_policy_of_a_region_holds_in_its_gradient(in_types, hardware):
    def sent_in_region(boxing):
        """(kind, whether in the gradient) of what is sent for the region's operations."""

        def inside(x, w):
            with sbp.policy(boxing):
                h = jnp.tanh(x @ w)
            return (h @ w.T).sum()

        f = sbp.jit(
            lambda x, w: jax.grad(inside, argnums=(0, 1))(x, w),
            MESH,
            in_types=in_types,
            hardware=hardware,
        )
        for i in f.plan(X, W).program.block.instructions:
            match i:
                case Box(reader=node, steps=steps) if (
                    node is not None and "sbp_policy" in node.scope
                ):
                    yield from ((s.kind, "transpose(" in node.scope) for s in steps if s.bytes_sent)
                case Apply(node=node, sends=kernels) if "sbp_policy" in node.scope:
                    yield from ((s.kind, "transpose(" in node.scope) for _, s in kernels)
                case _:
                    pass

    assert any(backward and kind not in FROM_PARTS for kind, backward in sent_in_region("auto"))
    assert all(kind in FROM_PARTS for kind, _ in sent_in_region("reduce"))


def test_a_region_may_allow_what_the_program_does_not():
    def inside(x, w):
        with sbp.policy("auto"):
            h = x @ w
        return h.sum()

    for fn, ok in ((lambda x, w: (x @ w).sum(), False), (inside, True)):
        f = sbp.jit(fn, MESH, in_types=("model:S(1)", "model:S(1)"), boxing="explicit")
        assert f.check(X, W).ok is ok


def test_the_mark_of_a_region_is_not_shown():
    def inside(x, w):
        with jax.named_scope("layer"), sbp.policy("explicit", "model"):
            return jnp.tanh(x @ w)

    (diagnostic,) = sbp.jit(inside, MESH, in_types=ROWS).check(X, W).diagnostics
    assert diagnostic.scope == "layer, forward"


def in_a_region(a, b):
    with sbp.policy("explicit", "dcn"):
        h = a @ b
    return h * 2


@pytest.mark.parametrize(
    ("fn", "in_types", "boxing", "help_"),
    [
        (crossed, ACROSS, "explicit", 'boxing="auto"'),
        (crossed, ACROSS, {"dcn": "explicit"}, 'boxing={"dcn": "auto"}'),
        (
            crossed,
            ACROSS,
            {"dcn": "explicit", "model": "reduce"},
            'boxing={"dcn": "auto", "model": "reduce"}',
        ),
    ],
)
def test_the_policy_that_is_at_fault_is_told_and_gives_way(fn, in_types, boxing, help_):
    """Of the program or of the axis: as one policy for the program it has the same rows and
    notes."""
    (found,) = helped(fn, MESH, (SQUARE, SQUARE), in_types=in_types, boxing=boxing)
    alone = sbp.jit(fn, MESH, in_types=in_types, boxing="explicit").check(SQUARE, SQUARE)
    assert [d.rows for d in alone.diagnostics] == [found.rows]
    (note,) = [n for n in found.notes if n.startswith("boxing is")]
    where = "" if boxing == "explicit" else " on `dcn`"
    assert note == f'boxing is "explicit"{where}, so no operand may be resharded here'
    request = sbp.jit(fn, MESH, in_types=in_types, boxing=boxing).trace(SQUARE, SQUARE).request
    (full,) = explain(request, limits=DiagnosisLimits(shown=20))
    assert help_ in [h.text for h in full.helps]


@pytest.mark.parametrize(
    ("boxing", "told"),
    [
        ("explicit", 'boxing="explicit"'),
        (
            {"dcn": "explicit", "model": "explicit"},
            'boxing={"dcn": "explicit", "model": "explicit"}',
        ),
    ],
)
def test_all_policies_are_told(boxing, told):
    """Where axes have their own, the one that the program has beside is not the whole of it."""
    types = (
        "dcn:S(1) model:S(1)",
        "dcn:B model:S(1)",
    )  # of 8 elements, which 2 and 4 devices split alike for x alone
    f = sbp.jit(lambda x, y: x + y, MESH, in_types=types, boxing=boxing)
    (together,) = f.check(*[jax.ShapeDtypeStruct((8, 8), jnp.float32)] * 2).diagnostics
    assert together.code == "no-typing" and any(
        n.startswith(f"under {told}, the program has types on each mesh axis alone")
        for n in together.notes
    )
    traced = sbp.jit(in_a_region, MESH, in_types=ACROSS, boxing=boxing).trace(SQUARE, SQUARE)
    (limit,) = explain(traced.request, limits=DiagnosisLimits(solver_resources=1))
    assert limit.code == "solver-limit" and limit.notes == (
        f"the program has no types under {told}; check a smaller part of it",
    )


@pytest.mark.parametrize("pinned", [True, False])
def test_a_core_that_nothing_takes_away_is_told_once(monkeypatch, pinned):
    """Were there a conflict without pin, policy or budget, it would be found again whatever is left
    out."""
    traced = sbp.jit(crossed, MESH, in_types=ACROSS, boxing="explicit").trace(SQUARE, SQUARE)
    request = dataclasses.replace(traced.request, mesh=mesh_spec(MESH, sbp.HARDWARE["tpu-v3"]))
    found = Checker(request).check()
    assert found.pins and found.policy
    core = tuple(c for c in found.core if pinned or c in found.equations)
    same = dataclasses.replace(found, core=core, **({} if pinned else {"sink": (), "made": ()}))
    monkeypatch.setattr(Checker, "check", lambda self, without=(), *, explain=True: same)
    (told,) = explain(request)
    assert told.code == ("no-signature" if pinned else "no-typing")
    assert pinned or told.title == "no types fit on mesh axis `dcn`"


@pytest.mark.parametrize(
    ("boxing", "told"),
    [
        ("auto", "auto"),
        ("reduce", "reduce"),
        ({"dcn": "reduce"}, '{"dcn": "reduce"}'),
        ({"model": "auto"}, '{"model": "auto"}'),
    ],
)
def test_a_report_tells_all_policies(boxing, told):
    f = sbp.jit(crossed, MESH, in_types=PARTS, boxing=boxing)
    assert f"; boxing `{told}`; the types are" in " ".join(f.check(SQUARE, SQUARE).text().split())


# ---- budgets -------------------------------------------------------------------------------------

MOST = 2**21
# Budgets, what breaks them, and the programs that do where nothing forbids it.
BUDGETS = {
    "a collective": (
        sbp.forbid("reduce_scatter"),
        lambda kind, axes, sent, back, loop: kind == "reduce_scatter",
        [("tpu-v3", loss), ("tpu-v3", step), ("tpu-v3", looped), ("tpu-v3", trained)],
    ),
    "a size": (
        sbp.forbid("all_reduce", above=MOST),
        lambda kind, axes, sent, back, loop: kind == "all_reduce" and sent > MOST,
        [("tpu-v5p", loss), ("tpu-v5p", step), ("tpu-v5p", looped), ("h100", trained)],
    ),
    "an axis": (
        sbp.forbid(axis="dcn"),
        lambda kind, axes, sent, back, loop: 0 in axes,
        [("tpu-v3", loss), ("tpu-v3", step), ("tpu-v3", looped), ("tpu-v3", trained)],
    ),
    "forward": (
        sbp.forbid("reduce_scatter", where="forward"),
        lambda kind, axes, sent, back, loop: kind == "reduce_scatter" and not back,
        [("tpu-v3", loss), ("tpu-v3", step), ("tpu-v3", looped), ("tpu-v3", trained)],
    ),
    "backward": (
        sbp.forbid(axis="model", where="backward"),
        lambda kind, axes, sent, back, loop: 1 in axes and back,
        [("tpu-v3", step), ("tpu-v3", deep), ("h100", step)],
    ),
    "a collective backward": (
        sbp.forbid("all_gather", where="backward"),
        lambda kind, axes, sent, back, loop: kind == "all_gather" and back,
        [("tpu-v3", trained), ("tpu-v5p", deep), ("cpu", step)],
    ),
    "loop": (
        sbp.forbid(axis="model", where="loop"),
        lambda kind, axes, sent, back, loop: 1 in axes and loop,
        [("tpu-v3", looped), ("tpu-v3", trained)],
    ),
    "a size in loops": (
        sbp.forbid("all_reduce", above=MOST, where="loop"),
        lambda kind, axes, sent, back, loop: kind == "all_reduce" and sent > MOST and loop,
        [("tpu-v5p", looped), ("h100", trained)],
    ),
}


@pytest.mark.parametrize(
    ("name", "hardware", "fn"),
    [(n, h, f) for n, (_, _, found) in BUDGETS.items() for h, f in found],
    ids=lambda p: getattr(p, "__name__", p),
)
def test_a_plan_keeps_its_budget(name, hardware, fn):
    budget, breaks, _ = BUDGETS[name]
    assert [s for s in planned(fn, hardware=hardware) if breaks(*s)], (
        "the budget forbids nothing that is wanted"
    )
    assert not [s for s in planned(fn, hardware=hardware, budgets=[budget]) if breaks(*s)]


def residual(ws, x):
    """The gradient of layers whose carry has two readers in the loop."""
    layer = lambda h, w: (jnp.tanh(jnp.tanh(h @ w[0]) @ w[1]) + h, None)
    return jax.grad(lambda ws, x: (jax.lax.scan(layer, x, ws)[0] ** 2).sum())(ws, x)


LAYERS = (
    jax.ShapeDtypeStruct((3, 1024, 2048), jnp.float32),
    jax.ShapeDtypeStruct((3, 2048, 1024), jnp.float32),
)
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
            .plan(LAYERS, jax.ShapeDtypeStruct((256, 1024), jnp.float32))
            .program
        )
        found = list(sends(program.block, made_late(program.graph)))
        return [any(breaks(*s) for s in found) for _, breaks in both]

    assert broken() == [True, True] and broken(*(budget for budget, _ in both)) == [False, False]


@pytest.mark.parametrize(
    "call",
    [
        "sbp.forbid()",
        'sbp.forbid("all_gather", where="loop")',
        'sbp.forbid("permute", axis="a\\"b", above=1048576, where="backward")',
        'sbp.forbid(axis="model", above=0.5)',
    ],
)
def test_a_budget_shows_the_call_that_makes_it(call):
    assert repr(eval(call)) == call


def test_what_no_plan_keeps_is_a_type_error_with_the_nearest_budget():
    budget = lambda most: [sbp.forbid(above=most, where="forward")]
    within = lambda most: sbp.jit(loss, MESH, in_types=ROWS, budgets=budget(most))
    with pytest.raises(sbp.SbpTypeError) as caught:
        within(1000).plan(X, W)
    (diagnostic,) = caught.value.diagnostics
    assert diagnostic.code == "budget"
    check_helps(loss, MESH, {"in_types": ROWS, "budgets": budget(1000)}, (X, W), [diagnostic])
    (help_,) = diagnostic.helps
    edit: Any = help_.edits[0]
    call, _ = help_.text.split(" allows ")
    assert eval(call) == budget(edit.value)[0]
    # What it names is possible, and a byte less is not.
    assert help_.bytes_per_device == within(edit.value).plan(X, W).cost.bytes_per_device
    assert not within(edit.value - 1).check(X, W).ok


@pytest.mark.parametrize("named", [False, True])
def test_a_result_that_may_not_be_reduced_is_told_at_its_line(named):
    product = lambda x, w: x @ w

    def assigned(x, w):
        y = x @ w
        return y

    fn, budgets = assigned if named else product, [sbp.forbid(axis="model")]
    (diagnostic,) = sbp.jit(fn, MESH, in_types=ROWS, budgets=budgets).check(X, W).diagnostics
    said = "returning `x @ w` needs a collective that a budget forbids on mesh axis `model`"
    assert (diagnostic.code, diagnostic.title) == ("budget", said)
    pinned = [label.text for label in diagnostic.labels if label.primary]
    assert pinned == ["P(sum) here; the program returns this value"]
    assert [help_.bytes_per_device > 0 for help_ in diagnostic.helps] == [True]


@pytest.mark.parametrize("nearest", [True, False])
def test_the_nearest_budget_takes_the_place_of_one_help(nearest, monkeypatch):
    """Where there is none, because other budgets are impossible, too, that place is free."""
    f = sbp.jit(
        crossed, MESH, in_types=ACROSS, out_types="dcn:P(sum)", budgets=[sbp.forbid(axis="dcn")]
    )
    request = f.trace(SQUARE, SQUARE).request
    if not nearest:
        monkeypatch.setattr(relaxations, "budget_help", lambda *_, **__: None)
    (every,) = explain(request, limits=DiagnosisLimits(shown=100))
    assert every.code == "budget" and {(r.inputs, r.remark) for r in every.rows} >= {
        (("S(1)", "S(0)"), "a fits, b does not"),
        (("B", "S(1)"), "b fits, a does not"),
    }
    (few,) = explain(request, limits=DiagnosisLimits(shown=2))
    left = len(every.helps) - 2
    assert len(few.helps) == 2 and left > 0 and ("sbp.forbid(" in few.helps[-1].text) == nearest
    assert left_out(left, 0)[0] in few.notes
