"""A plan converts nothing that a policy forbids, and a diagnosis names the policy to blame."""

import dataclasses
import re

import jax
import jax.numpy as jnp
import pytest

import sbp
from sbp.explain.change import DiagnosisLimits
from sbp.explain.faults import explain
from sbp.infer.check import Checker
from sbp.machine.hardware import HARDWARE
from sbp.machine.mesh import mesh_spec
from sbp.plan.ir import Apply, Box
from sbp.signatures import kernel_named
from tests.edits import check_helps
from tests.explain.budgeted import (
    ACROSS,
    MESH,
    PARTS,
    ROWS,
    SQUARE,
    W,
    X,
    crossed,
    deep,
    loss,
    planned,
    step,
)

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

    split = ("model:S(1)", "model:S(1)")
    assert (
        sbp.jit(lambda x, w: (x @ w).sum(), MESH, in_types=split, boxing="explicit").check(X, W).ok
        is False
    )
    assert sbp.jit(inside, MESH, in_types=split, boxing="explicit").check(X, W).ok is True


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


def region_of_two_lines(a, b):
    with sbp.policy("explicit"):
        h = jnp.tanh(a @ b)
        g = jnp.sin(a @ b)
    return h * g


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
        (in_a_region, ACROSS, "auto", 'put line N under sbp.policy("auto", "dcn")'),
        (in_a_region, ACROSS, {"dcn": "explicit"}, 'put line N under sbp.policy("auto", "dcn")'),
        (
            region_of_two_lines,
            PARTS,
            "auto",
            'write "reduce" instead of "explicit" on `dcn` in every sbp.policy',
        ),
    ],
)
def test_the_policy_that_is_at_fault_is_told_and_gives_way(fn, in_types, boxing, help_):
    """Of the program, of the axis or of the region: as one policy for the program it has the same
    rows and notes."""
    options = {"in_types": in_types, "boxing": boxing}
    (found,) = sbp.jit(fn, MESH, in_types=in_types, boxing=boxing).check(SQUARE, SQUARE).diagnostics
    check_helps(fn, MESH, options, (SQUARE, SQUARE), [found])
    (alone,) = (
        sbp.jit(fn, MESH, in_types=in_types, boxing="explicit").check(SQUARE, SQUARE).diagnostics
    )
    assert found.rows == alone.rows
    (note,) = [n for n in found.notes if n.startswith("boxing is")]
    where = "" if boxing == "explicit" else " on `dcn`"
    assert note == f'boxing is "explicit"{where}, so no operand may be resharded here'
    request = sbp.jit(fn, MESH, in_types=in_types, boxing=boxing).trace(SQUARE, SQUARE).request
    (full,) = explain(request, limits=DiagnosisLimits(shown=20))
    assert help_ in [re.sub(r"line \d+", "line N", h.text) for h in full.helps]


@pytest.mark.parametrize("boxing", ["explicit", {"dcn": "explicit"}])
def test_no_row_is_told_whose_kernel_the_policy_forbids(boxing):
    """Under "auto" a ring takes S(0) and S(1); that it sends is what the policy is against."""
    trial = sbp.jit(crossed, MESH, in_types=ACROSS).trace(SQUARE, SQUARE)
    node = next(n for n in trial.request.graph.nodes if n.op == "dot_general")
    spec = mesh_spec(MESH, HARDWARE["tpu-v3"])
    rows = dataclasses.replace(trial.request, mesh=spec).axis_rows(node, 0)
    assert any(kernel_named(r.kernel).communicates for r in rows)
    (found,) = (
        sbp.jit(crossed, MESH, in_types=ACROSS, boxing=boxing).check(SQUARE, SQUARE).diagnostics
    )
    assert {r.inputs for r in found.rows} == {("S(1)", "S(0)"), ("B", "S(1)")}


EACH = ({"dcn": "explicit", "model": "explicit"}, 'boxing={"dcn": "explicit", "model": "explicit"}')


@pytest.mark.parametrize(("boxing", "told"), [("explicit", 'boxing="explicit"'), EACH])
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
    request = dataclasses.replace(traced.request, mesh=mesh_spec(MESH, HARDWARE["tpu-v3"]))
    found = Checker(request).check()
    assert found.pins and found.policy
    core = tuple(c for c in found.core if pinned or c in found.equations)
    same = dataclasses.replace(found, core=core, sink=found.sink if pinned else ())
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
