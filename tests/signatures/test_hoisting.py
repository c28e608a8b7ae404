"""Casts of loop constants stand ahead of their loops, so that half of the bytes are gathered."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import sbp

SIZE, LARGE = 64, 4096
BF16_GATHER = 7 / 8 * LARGE * LARGE * 2
"""Bytes that a device sends to gather the large weight in bfloat16."""


def step(x, w):
    return jnp.tanh(x @ w.astype(jnp.bfloat16))


def summed(fn, wrapped=lambda body: body):
    """A loop that adds up a function of each slice and the weight."""

    def program(w, xs):
        def body(total, x):
            return total + jnp.sum(fn(x, w).astype(jnp.float32)), None

        return jax.lax.scan(wrapped(body), jnp.float32(0), xs)[0]

    return program


def counted(w, xs):
    """A `while`, whose predicate reads a constant, too."""

    def body(state):
        n, x = state
        return n + 1, step(x, w)

    most = jnp.int32(3)
    _, x = jax.lax.while_loop(lambda state: state[0] < most, body, (jnp.int32(0), xs[0]))
    return jnp.sum(x.astype(jnp.float32))


FUNCTIONS = {
    "scanned": summed(step),
    "transposed": summed(lambda x, w: step(x, w.T)),
    "nested": summed(
        lambda x, w: jax.lax.scan(lambda c, _: (step(c, w), None), x, None, length=2)[0]
    ),
    "rematerialised": summed(step, jax.checkpoint),
    "counted": counted,
    # Both the weight and its cast are read in the loop.
    "widened": summed(lambda x, w: jnp.sum(step(x, w).astype(jnp.float32)) + w[0, 0]),
}


def arguments():
    rng = np.random.default_rng(0)
    w = (rng.normal(size=(SIZE, SIZE)) / 8).astype(np.float32)
    return jnp.asarray(w), jnp.asarray(rng.normal(size=(4, 8 * SIZE, SIZE)), jnp.bfloat16)


def planned(fn, shape=(8,), **options):
    mesh = sbp.make_mesh(shape, ("x", "y")[: len(shape)])
    return sbp.jit(fn, mesh, in_types=("x:S(0)", "x:S(1)"), **options)


@pytest.mark.parametrize("name", FUNCTIONS)
@pytest.mark.parametrize("shape", [(8,), (2, 4)], ids=["8", "2x4"])
def test_values(name, shape):
    found = planned(FUNCTIONS[name], shape)(*arguments())
    want = jax.jit(FUNCTIONS[name])(*arguments())
    np.testing.assert_allclose(np.asarray(found), np.asarray(want), rtol=2e-2, atol=2e-1)


def large_gathers(fn, **options):
    """Trips and bytes of the gathers in a plan for a large weight."""
    f = sbp.jit(
        fn,
        jax.sharding.AbstractMesh((8,), ("x",)),
        in_types=("x:S(0)", "x:S(1)"),
        hardware="tpu-v5e",
        **options,
    )
    w = jax.ShapeDtypeStruct((LARGE, LARGE), jnp.float32)
    plan = f.plan(w, jax.ShapeDtypeStruct((4, 16 * LARGE, LARGE), jnp.bfloat16))
    boxes = [(one.trips, step) for one in plan.program.boxes() for step in one.box.steps]
    return [(trips, step.bytes_sent) for trips, step in boxes if step.kind == "all_gather"]


@pytest.mark.parametrize("name", [name for name in FUNCTIONS if name != "widened"])
def test_the_weight_is_gathered_in_bfloat16(name):
    assert large_gathers(FUNCTIONS[name]) == [(1, BF16_GATHER)]


@pytest.mark.parametrize("name", ["scanned", "rematerialised"])
def test_the_backward_pass_reads_what_the_forward_pass_gathered(name):
    gradient = jax.grad(FUNCTIONS[name])
    assert large_gathers(gradient, out_types="x:S(0)") == [(1, BF16_GATHER)]
    found = planned(gradient, out_types="x:S(0)")(*arguments())
    want = jax.jit(gradient)(*arguments())
    np.testing.assert_allclose(np.asarray(found), np.asarray(want), rtol=5e-2, atol=5e-1)


def test_a_hoisted_weight_does_not_enter_the_loop():
    graph = planned(FUNCTIONS["scanned"]).plan(*arguments()).program.graph
    (scan,) = (node for node in graph.walk() if node.op == "scan")
    dtypes = [str(graph.aval(o).dtype) for o in scan.inputs]
    assert dtypes == ["bfloat16", "float32", "bfloat16"] and scan.params["num_consts"] == 1


def test_a_cast_to_a_wider_type_stays():
    def fn(w, xs):
        return jax.lax.scan(lambda c, x: (c + x @ w.astype(jnp.float32), None), xs[0], xs)[0]

    w, xs = arguments()
    graph = planned(fn).plan(w.astype(jnp.bfloat16), xs.astype(jnp.float32)).program.graph
    (scan,) = (node for node in graph.walk() if node.op == "scan")
    assert "convert_element_type" in [node.op for node in scan.regions[0].nodes]
