"""Operators that read along a split dim, and dims that do not line up."""

import jax
import jax.numpy as jnp
from jax import lax

import sbp
from tests.gallery.broken import broken, f32, i32

N, D = 64, 256


@broken(f32(N, D), f32(D, D), cause="the contracted dim is split on one side, the other operand on a free dim")
def contracted_against_free(x, w):
    x = sbp.split(x, 1, "model")  # and: x is S(1) on `model`, the contracted dim
    w = sbp.split(w, 1, "model")  # and: w is S(1) on `model`, not contracted
    return x @ w  # error: no-signature: `x @ w` has no SBP signature on mesh axis `model`


@broken(f32(16, N, D), f32(16, D, N), cause="the batch dim of one operand is split, a free dim of the other")
def batch_dim_of_one_operand(a, b):
    a = sbp.split(a, 0, "model")  # and: a is S(0) on `model`, a batch dim
    b = sbp.split(b, 2, "model")  # and: b is S(2) on `model`, not contracted
    return jnp.einsum("bij,bjk->bik", a, b)  # error: no-signature: `jnp.einsum("bij,bjk->bik", a, b)` has no SBP signature on mesh axis `m


@broken(f32(N, D), cause="softmax along a split dim, with the max and the sum of one device")
def softmax_along_a_split_dim(scores):
    scores = sbp.split(scores, 1, "model")  # and: scores is S(1) on `model`: dim 1 of 64x256
    return jax.nn.softmax(scores, axis=1)  # error: no-signature: `jax.nn.softmax(scores, axis=1)` has no SBP signature on mesh axis `model


@broken(f32(N, D), cause="argmax along a split dim: its index needs an offset and the order of ties (trap 6)")
def argmax_along_a_split_dim(logits):
    logits = sbp.split(logits, 1, "model")  # and: logits is S(1) on `model`: dim 1 of 64x256
    return jnp.argmax(logits, 1)  # error: no-signature: `jnp.argmax(logits, 1)` has no SBP signature on mesh axis `model`


@broken(f32(N, D), cause="top-k along a split dim, under a policy that moves nothing but reductions", boxing="reduce")
def top_k_along_a_split_dim(gates):
    gates = sbp.split(gates, 1, "model")  # and: gates is S(1) on `model`: dim 1 of 64x256
    return lax.top_k(gates, 2)  # error: no-signature: `lax.top_k(gates, 2)` has no SBP signature on mesh axis `model`


@broken(f32(N, D), cause="sort along a split dim")
def sort_along_a_split_dim(x):
    x = sbp.split(x, 0, "model")  # and: x is S(0) on `model`: dim 0 of 64x256
    return jnp.sort(x, axis=0)  # error: no-signature: `jnp.sort(x, axis=0)` has no SBP signature on mesh axis `model`


@broken(f32(N, N), f32(N, N), cause="a transpose turns the split, and the sum wants it as it was")
def transposed_before_the_sum(x, y):
    x = sbp.split(x, 0, "model")  # and: x is S(0) on `model`: dim 0 of 64x64
    y = sbp.split(y, 0, "model")  # and: y is S(0) on `model`: dim 0 of 64x64
    return x.T + y  # error: no-signature: `x.T + y` has no SBP signature on mesh axis `model`


@broken(f32(N, 4, D), cause="heads merged into the model dim from the inside (trap 17)")
def merge_a_split_inner_dim(x):
    x = sbp.split(x, 2, "model")  # and: x is S(2) on `model`: dim 2 of 64x4x256
    return x.reshape(N, 4 * D)  # error: no-signature: `x.reshape(N, 4 * D)` has no SBP signature on mesh axis `model`


@broken(f32(N, D), f32(N, D), cause="two sequences joined along the dim that is split")
def concatenate_along_a_split_dim(x, y):
    x, y = sbp.split(x, 0, "model"), sbp.split(y, 0, "model")  # and: x is S(0) on `model`: dim 0 of  # and: y is S(0) on `model`: dim 0 of
    return jnp.concatenate([x, y], axis=0)  # error: no-signature: `jnp.concatenate([x, y], axis=0)` has no SBP signature on mesh axis `mod


@broken(f32(N, D), i32(), f32(4, D), cause="a slice at a start that is not known is compared before it is whole (openxla #42481)")
def slice_at_an_unknown_start(cache, step, new):
    cache = sbp.split(cache, 0, "model")  # and: cache is S(0) on `model`: dim 0 of 64x256
    rows = lax.dynamic_slice_in_dim(cache, step, 4, axis=0)
    return jnp.maximum(rows, new)  # error: no-signature: `jnp.maximum(rows, new)` has no SBP signature on mesh axis `model`


@broken(f32(2, 8, 32, 32), f32(8, 8, 3, 3), cause="a convolution over a split image, without its halo")
def convolution_over_split_space(image, kernel):
    image = sbp.split(image, 2, "model")  # and: image is S(2) on `model`: dim 2 of 2x8x32x32
    return lax.conv(image, kernel, (1, 1), "SAME")  # error: no-signature: `lax.conv(image, kernel, (1, 1), "SAME")` has no SBP signature o


@broken(f32(N, D), cause="differences along a split dim: each device lacks its neighbour's first row")
def shift_along_a_split_dim(x):
    x = sbp.split(x, 0, "model")  # and: x is S(0) on `model`: dim 0 of 64x256
    return x - jnp.roll(x, 1, axis=0)  # error: no-signature: `jnp.roll(x, 1, axis=0)` has no SBP signature on mesh axis `model`


@broken(f32(N, 4), cause="a dim that is shorter than the axis is long")
def shorter_than_the_axis(x):
    x = sbp.split(x, 1, "model")  # and: x is S(1) on `model`: dim 1 of 64x4
    return jnp.tanh(x)  # error: no-signature: `jnp.tanh(x)` has no SBP signature on mesh axis `model`


@broken(f32(N, N), cause="an inverse: no device has a row or column of it alone")
def inverse_of_a_split_matrix(x):
    x = sbp.split(x, 0, "model")  # and: x is S(0) on `model`: dim 0 of 64x64
    return jnp.linalg.inv(x)  # error: no-signature: `jnp.linalg.inv(x)` has no SBP signature on mesh axis `model`
