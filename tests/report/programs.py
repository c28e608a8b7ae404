"""Small programs whose plans are listed and reported in the tests; golden files quote these
lines."""

import jax
import jax.numpy as jnp

import sbp
from sbp import B, S


def abstract(*shape):
    return jax.ShapeDtypeStruct(shape, jnp.float32)


def chain(u, v, w):
    h = u @ v
    return h @ w


def split_groups(x):
    return sbp.annotate(x, data=S(0), model=B)


def megatron(x, w_in, w_out):
    x = split_groups(x)
    w_in = sbp.annotate(w_in, model=S(1), data=B)
    w_out = sbp.annotate(w_out, model=S(0), data=B)
    h = jax.nn.relu(x @ w_in)
    y = h @ w_out
    return jnp.tanh(y)


def megatron_step(x, params):
    def loss(params):
        return (megatron(x, *params) ** 2).mean()

    value, gradients = jax.value_and_grad(loss)(params)
    return [p - 0.1 * g for p, g in zip(params, gradients, strict=True)], value


def layers(x, ws):
    x = sbp.annotate(x, data=S(0), model=B)

    @jax.checkpoint
    def layer(h, w):
        h = jnp.tanh(
            h @ sbp.annotate(w, model=S(0), data=B),
        )
        return h, h.sum()

    h, sums = jax.lax.scan(layer, x, ws)
    return h.sum() + sums.sum()


def iterate(x):
    x = sbp.annotate(x, data=S(0), model=S(1))
    return jax.lax.while_loop(
        lambda c: c[0] < 3, lambda c: (c[0] + 1, jnp.tanh(c[1] @ c[1])), (0, x)
    )


def choose(i, x):
    x = sbp.annotate(x, data=S(0), model=B)
    return jax.lax.cond(i > 0, lambda x: x.sum(0), lambda x: -x.max(0), x)


def local(x):
    return jnp.tanh(x) * 2.0


MESH = jax.sharding.AbstractMesh((2, 4), ("data", "model"))

STEADY = sbp.Hardware(
    name="tpu-v3",
    flops_per_second=61.5e12,
    hbm_bytes_per_second=450e9,
    hbm_bytes=2**34,
    link_bytes_per_second=82e9,
    whole_scatter_devices=0,
)
"""What these plans are priced on: one latency a collective, and figures that do not move with the
table's."""

PROGRAMS = {
    "chain": (
        chain,
        (abstract(16, 32), abstract(32, 64), abstract(64, 8)),
        ("model:S(1)", "model:S(0)", "B"),
        "B",
    ),
    "megatron": (
        megatron,
        (abstract(16, 32), abstract(32, 64), abstract(64, 32)),
        ("data:S(0)", "model:S(1)", "model:S(0)"),
        "data:S(0)",
    ),
    "megatron_step": (
        megatron_step,
        (abstract(16, 32), [abstract(32, 64), abstract(64, 32)]),
        ("data:S(0)", ["model:S(1)", "model:S(0)"]),
        (["model:S(1)", "model:S(0)"], "B"),
    ),
    "layers": (
        jax.grad(layers, argnums=1),
        (abstract(16, 16), abstract(6, 16, 16)),
        ("data:S(0)", "model:S(1)"),
        "model:S(1)",
    ),
    "iterate": (iterate, (abstract(16, 16),), ("data:S(0) model:S(1)",), None),
    "choose": (
        choose,
        (jax.ShapeDtypeStruct((), jnp.int32), abstract(16, 16)),
        ("B", "data:S(0)"),
        "B",
    ),
    "local": (local, (abstract(16, 4),), ("data:S(0) model:S(1)",), "data:S(0) model:S(1)"),
}
"""By name: the function, its arguments, their types, and the types of what it returns."""


def plan(name):
    fn, args, in_types, out_types = PROGRAMS[name]
    return sbp.jit(fn, MESH, in_types=in_types, out_types=out_types, hardware=STEADY).plan(*args)
