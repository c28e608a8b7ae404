"""What collectives give is laid out row by row where it meets arguments of the program."""

import jax
import jax.numpy as jnp
import pytest

import sbp
from sbp.run.interpret import meets_arguments

MESH = jax.sharding.AbstractMesh((4,), ("d",))


def step(w, moment, x):
    gradient = jax.grad(lambda w: jnp.tanh(x @ w).sum())(w)
    moment = 0.9 * moment + 0.1 * gradient
    return w - 0.1 * moment, moment


def planned(hardware):
    """A plan that may not split the update and gather its results."""
    f = sbp.jit(
        step,
        MESH,
        in_types=("B", "B", "d:S(0)"),
        out_types=("B", "B"),
        boxing="reduce",
        hardware=hardware,
    )
    square = jax.ShapeDtypeStruct((512, 512), jnp.float32)
    return f.plan(square, square, jax.ShapeDtypeStruct((4096, 512), jnp.float32))


def test_a_reduced_gradient_meets_the_moment():
    program = planned("tpu-v5e").program
    sent = {p.box.target for p in program.boxes() if p.box.bytes_sent}
    assert len(sent) == 1 and meets_arguments(program.graph, program.block) == sent


def test_what_meets_no_argument_is_left_to_the_compiler():
    f = sbp.jit(lambda w, x: jnp.sin(sbp.replicate(x @ w, "d")), MESH, in_types=("B", "d:S(0)"))
    plan = f.plan(*(jax.ShapeDtypeStruct((512, 512), jnp.float32),) * 2)
    assert any(p.box.bytes_sent for p in plan.program.boxes())
    assert not meets_arguments(plan.program.graph, plan.program.block)


def test_a_gradient_that_meets_its_weight_alone_is_left_to_the_compiler():
    def plain(w, x):
        return w - 0.1 * jax.grad(lambda w: jnp.tanh(x @ w).sum())(w)

    f = sbp.jit(plain, MESH, in_types=("B", "d:S(0)"), out_types="B")
    plan = f.plan(*(jax.ShapeDtypeStruct((n, 512), jnp.float32) for n in (512, 4096)))
    assert any(p.box.bytes_sent for p in plan.program.boxes())
    assert not meets_arguments(plan.program.graph, plan.program.block)


@pytest.mark.parametrize(("heads", "features", "told"), [(8, 64, False), (8, 128, True)])
def test_arrays_that_fill_no_tiles_are_left_to_the_compiler(heads, features, told):
    """Heads of 64 features fill no lanes, and rows of them would be copied."""

    def step(w, moment, x):
        gradient = jax.grad(lambda w: jnp.tanh(jnp.einsum("bd,dhk->bhk", x, w)).sum())(w)
        moment = 0.9 * moment + 0.1 * gradient
        return w - 0.1 * moment, moment

    f = sbp.jit(step, MESH, in_types=("B", "B", "d:S(0)"), out_types=("B", "B"), hardware="tpu-v5e")
    w = jax.ShapeDtypeStruct((512, heads, features), jnp.float32)
    plan = f.plan(w, w, jax.ShapeDtypeStruct((4096, 512), jnp.float32))
    assert any(p.box.bytes_sent for p in plan.program.boxes())
    assert ("LayoutConstraint" in plan.lower().as_text()) == told


def test_only_a_tpu_is_told():
    told = {h: "LayoutConstraint" in planned(h).lower().as_text() for h in ("tpu-v5e", "h100")}
    assert told == {"tpu-v5e": True, "h100": False}
