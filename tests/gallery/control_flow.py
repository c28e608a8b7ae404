"""Loops, branches and predicates."""

import jax
import jax.numpy as jnp
from jax import lax

import sbp
from tests.gallery.broken import broken, f32, i32

N, D = 64, 256


@broken(f32(N, D), f32(3, D, D), cause="the carry leaves a step transposed: it cannot keep one type (trap 14)")
def carry_transposed_in_each_step(x, ws):
    def step(c, w):
        return (c @ w).reshape(D, N).T, None

    x = sbp.split(x, 0, "model")  # and: x is S(0) on `model`: dim 0 of 64x256
    return lax.scan(step, x, ws)[0]  # error: no-signature: carry 0 of `lax.scan(step, x, ws)` cannot keep one type on mesh axis `model`


@broken(f32(N, D), f32(3, D, D), cause="the carry enters split by rows, each step leaves it split by columns")
def carry_pinned_twice(x, ws):
    x = sbp.split(x, 0, "model")  # and: x is S(0) on `model`: dim 0 of 64x256

    def step(c, w):
        return jnp.tanh(sbp.split(c, 1, "model") * w[0]), None  # and: c is S(1) on `model`: dim 1 of 64x256

    return lax.scan(step, x, ws)[0]  # error: annotation-conflict: carry 0 of `lax.scan(step, x, ws)` cannot keep one type on mesh axis


@broken(f32(N, D), f32(N, D), cause="an accumulator that is partial from step to step, and is clipped in each")
def clipped_accumulator(x, ys):
    x = sbp.split(x, 0, "model")  # and: x is S(0) on `model`: dim 0 of 64x256

    def step(total, y):
        total = total + (x * y).sum(0)
        return jnp.clip(total, -1.0, 1.0), None  # error: no-signature: `jnp.clip(total, -1.0, 1.0)` has no SBP signature on mesh axis `mod

    return lax.scan(step, jnp.zeros(D), ys)[0]


@broken(
    f32(8, D, D), f32(N, D), cause="a scan over a split dim: the layers lie on different devices, and all run them (a pipeline by mistake)"
)
def scan_over_split_layers(ws, x):
    ws = sbp.split(ws, 0, "model")  # and: ws is S(0) on `model`: dim 0 of 8x256x256
    return lax.scan(lambda h, w: (jnp.tanh(h @ w), None), x, ws)[0]  # error: no-signature: `lax.scan(lambda h, w: (jnp.tanh(h @ w), None),


@broken(f32(N, D), cause="does any token overflow? The answer of one device decides for all (trap 14)")
def partial_predicate(x):
    x = sbp.split(x, 0, "model")  # and: x is S(0) on `model`: dim 0 of 64x256
    return lax.cond((x > 1).any(), lambda: x / 2, lambda: x)  # error: no-signature: the predicate of `lax.cond((x > 1).any(), lambda: x /


@broken(f32(N), cause="a while loop whose bound is a count over split tokens (trap 14)")
def partial_loop_bound(mask):
    mask = sbp.split(mask, 0, "model")  # and: mask is S(0) on `model`: dim 0 of 64
    count = (mask > 0).sum()
    return lax.while_loop(lambda i: i < count, lambda i: i + 1, 0)  # error: no-signature: the predicate of `lax.while_loop(


@broken(f32(N, N), i32(), cause="the branches of a cond return one result in two types")
def branches_of_two_types(x, i):
    x = sbp.split(x, 0, "model")  # and: x is S(0) on `model`: dim 0 of 64x64
    return jnp.exp(lax.cond(i > 0, lambda: jnp.sin(x), lambda: jnp.cos(x).T)) * x  # error: no-signature: result 0 of `lax.cond(i > 0, lamb


@broken(
    f32(N, D), f32(D, D), cause="a partial value leaves one step and is used in the next: Newton's iteration on a sum that is not taken"
)
def while_carry_left_partial(x, w):
    w = sbp.split(w, 0, "model")

    def step(c):
        i, h = c
        return i + 1, jnp.tanh(sbp.split(h, 1, "model") @ w)  # error: no-signature: `jnp.tanh(sbp.  # and: h is S(1) on `model`: dim 1 of

    return lax.while_loop(lambda c: c[0] < 3, step, (0, x))[1]


@broken(f32(4, N, D), f32(D, D), cause="a fault inside vmap, whose operator has one dim more than the user wrote")
def inside_vmap(x, w):
    def one(x):
        h = sbp.split(x, 1, "model") @ w  # and: x is S(1) on `model` under vmap: dim 1 of 64x256
        return jnp.tanh(h)  # error: no-signature: `jnp.tanh(h)` has no SBP signature on mesh axis `model`

    return jax.vmap(one)(x)


@broken(f32(N, D), f32(6, D, D), cause="one line in six unrolled layers: one fault")
def unrolled_layers(x, ws):
    for i in range(6):
        y = sbp.split(x, 1, "model") @ ws[i]  # and: x is S(1) on `model`: dim 1 of 64x256
        x = x + jnp.tanh(y)  # error: no-signature: `jnp.tanh(y)` has no SBP signature on mesh axis `model`
    return x


@broken(f32(N, D), f32(6, D, D), cause="a fault inside a rematerialised scan body, told once")
def rematerialised_body(x, ws):
    @jax.checkpoint
    def layer(h, w):
        y = sbp.split(h, 1, "model") @ w  # and: h is S(1) on `model`: dim 1 of 64x256
        return jax.nn.gelu(y), None  # error: no-signature: `jax.nn.gelu(y)` has no SBP signature on mesh axis `model`

    return jax.grad(lambda ws: lax.scan(layer, x, ws)[0].sum())(ws)
