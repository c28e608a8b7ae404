"""Scattered sums that a loop does not read come before it."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import sbp
from sbp.plan.ir import Loop
from sbp.run.order import reduced_before

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
    found = reduced_before(program.graph, program.block)
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
