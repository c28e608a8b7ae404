"""What a plan computes before a loop, from larger arrays, is computed before it."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import sbp
from sbp.plan.ir import Loop
from sbp.run.order import computed_before

SIZE, LAYERS = 64, 3


def gradients(table, weights, x):
    """Of a table behind a loop over layers: backward its gradient comes before the loop."""

    def loss(table, weights):
        y, _ = jax.lax.scan(lambda y, w: (jnp.tanh(y @ w), None), x, weights)
        return jnp.sum(jnp.sin(y @ table))

    return jax.grad(loss, (0, 1))(table, weights)


def arguments():
    rng = np.random.default_rng(0)
    shapes = ((SIZE, SIZE), (LAYERS, SIZE, SIZE), (8192, SIZE))
    return tuple(rng.normal(size=s).astype(np.float32) / 8 for s in shapes)


def planned(n, fn=gradients):
    return sbp.jit(
        fn,
        sbp.make_mesh((n,), ("d",)),
        in_types=("d:S(1)", "B", "d:S(0)"),
        out_types=("d:S(1)", "B"),
    )


def test_the_gradient_is_scattered_before_the_loop():
    program = planned(4).plan(*arguments()).program
    found = computed_before(program.graph, program.block, program.mesh.sizes)
    (loop,) = found
    (backward,) = [n.id for n in program.graph.nodes if n.op == "scan"][1:]
    assert loop == backward
    scattered, tied = found[loop]
    assert program.graph.avals[scattered.value].shape == (SIZE, SIZE)
    (reads,) = [
        i.ins for i in program.block.instructions if isinstance(i, Loop) and i.node.id == loop
    ]
    assert tied in reads


@pytest.mark.parametrize("n", [2, 8])
def test_values(n):
    for got, want in zip(planned(n)(*arguments()), jax.jit(gradients)(*arguments()), strict=True):
        np.testing.assert_allclose(np.asarray(got), np.asarray(want), rtol=1e-4, atol=1e-3)


def with_loss(table, weights, x):
    """The loss, which the backward loop does not read, and the gradients. The logits of the loss
    are larger than it."""

    def loss(table, weights):
        y, _ = jax.lax.scan(lambda y, w: (jnp.tanh(y @ w), None), x, weights)
        return jnp.mean(jax.nn.logsumexp(y @ table, -1))

    return jax.value_and_grad(loss, (0, 1))(table, weights)


def test_the_loss_is_computed_before_the_backward_loop():
    """Of its sum over devices, what each device sends."""
    f = sbp.jit(
        with_loss,
        sbp.make_mesh((4,), ("d",)),
        in_types=("B", "B", "d:S(0)"),
        out_types=("B", ("B", "B")),
    )
    program = f.plan(*arguments()).program
    (held,) = computed_before(program.graph, program.block, program.mesh.sizes).values()
    scalars = [r for r in held if program.graph.avals[r.value].shape == ()]
    assert [r.codes for r in scalars] == [(-1,)]
    got, want = f(*arguments()), jax.jit(with_loss)(*arguments())
    np.testing.assert_allclose(float(got[0]), float(want[0]), rtol=1e-5)


def test_a_value_that_frees_nothing_is_not_held():
    """`y` is as large as `x`, which is an argument and stays."""

    def fn(x):
        y = jnp.cumsum(x, 1)
        return jax.lax.fori_loop(0, 3, lambda _, c: jnp.tanh(c), x), y

    x = jax.ShapeDtypeStruct((8, 64), jnp.float32)
    program = sbp.jit(fn, sbp.make_mesh((4,), ("d",)), in_types="d:S(0)").plan(x).program
    assert computed_before(program.graph, program.block, program.mesh.sizes) == {}
