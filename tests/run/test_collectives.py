"""The compiled program holds the plan's collectives and no others: per group of mesh axes, bytes
are at most the planned ones."""

from collections import defaultdict

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import sbp
from benchmarks.hlo.traffic import collectives
from tests.run.programs import CASES, NAMES, Case, arguments, function_of


def compiled_bytes(plan, shape):
    """Bytes one device sends in the compiled program, by the set of mesh axes along which it
    exchanges them."""
    coordinates = np.stack(np.unravel_index(np.arange(int(np.prod(shape))), shape))
    found = defaultdict(float)
    for c in collectives(plan.lower().compile().as_text(), int(np.prod(shape))):
        varying = coordinates[:, list(c.members)]
        axes = frozenset(a for a in range(len(shape)) if len(set(varying[a])) > 1)
        found[axes] += c.bytes_per_device
    return dict(found)


def planned_bytes(plan):
    found = defaultdict(float)
    for planned in plan.program.boxes():
        for step in planned.box.steps:
            if step.bytes_sent:
                found[frozenset(step.mesh_axes)] += step.bytes_sent * planned.trips
    for operation, trips in plan.program.kernels():
        for position, sent in operation.sends:
            found[frozenset([position])] += sent.bytes * trips
    return dict(found)


def assert_within_plan(plan, shape):
    compiled, planned = compiled_bytes(plan, shape), planned_bytes(plan)
    assert set(compiled) <= set(planned), (
        f"a group that the plan lacks: {compiled} against {planned}"
    )
    for axes, size in compiled.items():
        assert size <= planned[axes] * (1 + 1e-9) + 1e-9, (
            f"{axes}: {size} B compiled, {planned[axes]} B planned"
        )


@pytest.mark.parametrize("shape", [(8,), (2, 4), (2, 2, 2)], ids=["8", "2x4", "2x2x2"])
@pytest.mark.parametrize(
    "case", [c for c in CASES if c.name not in ("control-flow",)], ids=lambda c: c.name
)
def test_compiled_bytes_are_planned(case: Case, shape):
    names = NAMES[: len(shape)]
    mesh = sbp.make_mesh(shape, names)
    plan = sbp.jit(function_of(case, names), mesh).plan(*arguments(case))
    assert_within_plan(plan, shape)


def test_the_chain_reduces_once_after_w():
    """(U @ V) @ W with the first contraction split: one reduction, of the last product, in the plan
    and in the compiled program."""
    mesh = sbp.make_mesh((8,), ("x",))
    u, v, w = jnp.ones((64, 256)), jnp.ones((256, 512)), jnp.ones((512, 16))
    f = sbp.jit(
        lambda u, v, w: (u @ v) @ w, mesh, in_types=("x:S(1)", "x:S(0)", "B"), out_types="B"
    )
    plan = f.plan(u, v, w)
    moving = [p for p in plan.program.boxes() if p.bytes_per_device]
    assert [[s.kind for s in p.box.steps] for p in moving] == [["all_reduce"]]
    assert plan.program.graph.avals[moving[0].box.source.value].shape == (64, 16)
    assert plan.cost.bytes_per_device == 2 * 7 / 8 * 64 * 16 * 4
    assert compiled_bytes(plan, (8,)) == {frozenset({0}): plan.cost.bytes_per_device}
    np.testing.assert_array_equal(np.asarray(f(u, v, w)), np.asarray(u @ v @ w))


def test_a_sum_of_partials_is_reduced_once():
    """Parallel branches: P + P stays P, whatever the order of the Python additions."""
    mesh = sbp.make_mesh((8,), ("x",))

    def block(x, a, b):
        return x + (x @ a["in"]) @ a["out"] + (x @ b["in"]) @ b["out"]

    layer = {"in": "x:S(1)", "out": "x:S(0)"}
    f = sbp.jit(block, mesh, in_types=("B", layer, layer), out_types="B")
    shapes = {
        "in": jax.ShapeDtypeStruct((64, 256), jnp.float32),
        "out": jax.ShapeDtypeStruct((256, 64), jnp.float32),
    }
    plan = f.plan(jax.ShapeDtypeStruct((32, 64), jnp.float32), shapes, shapes)
    assert plan.cost.bytes_per_device == 2 * 7 / 8 * 32 * 64 * 4


def test_gradient_accumulation_reduces_once_after_the_loop():
    """Also where the body divides by the number of microbatches, which XLA does not sink out of the
    loop."""
    mesh = sbp.make_mesh((8,), ("x",))
    case = next(c for c in CASES if c.name == "accumulation")
    plan = sbp.jit(function_of(case, ("x",)), mesh, out_types="B").plan(*arguments(case))
    moving = [p for p in plan.program.boxes() if p.bytes_per_device]
    assert [(p.trips, [s.kind for s in p.box.steps]) for p in moving] == [(1, ["all_reduce"])]


def test_a_value_wanted_twice_is_reduced_once():
    """One partial value with two nonlinear readers: one all-reduce."""
    mesh = sbp.make_mesh((8,), ("x",))
    f = sbp.jit(
        lambda u, v: (jnp.tanh(u @ v), jnp.exp(u @ v)),
        mesh,
        in_types=("x:S(1)", "x:S(0)"),
        out_types="B",
    )
    u, v = jnp.ones((64, 128)), jnp.ones((128, 64))

    def once(u, v):
        y = u @ v
        return jnp.tanh(y), jnp.exp(y)

    g = sbp.jit(once, mesh, in_types=("x:S(1)", "x:S(0)"), out_types="B")
    assert g.plan(u, v).cost.bytes_per_device == 2 * 7 / 8 * 64 * 64 * 4
    assert f.plan(u, v).cost.bytes_per_device == 2 * g.plan(u, v).cost.bytes_per_device
