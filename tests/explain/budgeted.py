"""Programs under budgets and policies, and what their plans send."""

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import AbstractMesh

import sbp
from sbp.plan.ir import Apply, Box, Loop

MESH = AbstractMesh((2, 4), ("dcn", "model"))
X, W = (
    jax.ShapeDtypeStruct((1024, 4096), jnp.float32),
    jax.ShapeDtypeStruct((4096, 2048), jnp.float32),
)
ROWS = ("model:S(1)", "model:S(0)")


def loss(x, w):
    return (jnp.tanh(x @ w) @ w.T).sum()


def step(x, w):
    return jax.grad(loss, argnums=(0, 1))(x, w)


def looped(x, w):
    return lax.scan(lambda c, _: (jnp.tanh(c @ w) @ w.T, None), x, None, length=5)[0].sum()


def trained(x, w):
    return jax.grad(looped, argnums=(0, 1))(x, w)


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
