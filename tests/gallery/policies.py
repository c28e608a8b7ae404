"""Policies of one mesh axis and of a region, and budgets: what they forbid is told as theirs, and they are what a help loosens."""

import jax.numpy as jnp
from jax import lax

import sbp
from tests.gallery.broken import MESH_2D, broken, f32

N = 64
TYPES = ("model:S(1)", "model:S(0)")


@broken(
    f32(N, N),
    f32(N, N),
    in_types=("data:S(1)", "data:S(1)"),
    mesh=MESH_2D,
    boxing={"data": "explicit"},
    cause="a policy of one mesh axis, under which neither operand is gathered, nor goes round a ring",
)
def product_under_the_policy_of_an_axis(a, b):
    h = a @ b  # error: no-signature: `a @ b` has no SBP signature on mesh axis `data`
    return h * 2


@broken(f32(N, N), f32(N, N), in_types=TYPES, mesh=MESH_2D, boxing="auto", cause="a region that forbids to reduce what is made in it")
def partial_in_a_region(x, w):
    with sbp.policy("explicit", "model"):
        h = jnp.tanh(x @ w)  # error: no-signature: `jnp.tanh(x @ w)` has no SBP signature on mesh axis `model`
    return h * 2


@broken(f32(N, N), f32(N, N), in_types=TYPES, mesh=MESH_2D, boxing="auto", cause="two lines of a region that each want the same reduced")
def partial_in_two_lines_of_a_region(x, w):
    with sbp.policy("explicit"):
        h = jnp.tanh(x @ w)  # error: no-signature: `jnp.tanh(x @ w)` has no SBP signature on mesh axis `model`
        g = jnp.sin(x @ w)
    return h * g


@broken(f32(N, N), f32(N, N), in_types=TYPES, mesh=MESH_2D, boxing="auto", cause="a loop in a region that forbids to reduce its carry")
def loop_in_a_region(x, w):
    with sbp.policy("explicit"):
        y = lax.scan(lambda c, _: (jnp.tanh(c @ w) @ w.T, None), x, None, length=5)[0]  # error: no-signature: `jnp.tanh(c @ w)` has no
    return y


@broken(
    f32(N, N),
    f32(N, N),
    in_types=TYPES,
    mesh=MESH_2D,
    boxing="auto",
    budgets=[sbp.forbid(axis="model")],
    cause="a budget over one axis, on which a product has to be reduced",
)
def budget_on_the_axis_of_a_partial(x, w):
    return jnp.tanh(x @ w)  # error: budget: `jnp.tanh(x @ w)` needs a collective that a budget forbids on mesh axis `model`
