"""Values that are still to be reduced, where only reduced ones mean anything."""

import jax
import jax.numpy as jnp

import sbp
from tests.gallery.broken import broken, f32, i32

N, D = 64, 256


@broken(f32(N, D), f32(D, D), cause="a nonlinear function of a sum that has not been taken (trap 1)")
def tanh_of_a_partial_product(x, w):
    x = sbp.split(x, 1, "model")  # and: x is S(1) on `model`: dim 1 of 64x256
    w = sbp.split(w, 0, "model")
    h = x @ w
    return jnp.tanh(h)  # error: no-signature: `jnp.tanh(h)` has no SBP signature on mesh axis `model`


@broken(f32(N, D), f32(N, D), cause="a product of two partial values (trap 3): the sums do not multiply part by part")
def product_of_two_means(gates, mask):
    gates, mask = sbp.split(gates, 0, "model"), sbp.split(mask, 0, "model")  # and: gates is S(0) on `model  # and: mask is S(0) on `model`
    density = mask.mean(0)
    proxy = gates.mean(0)
    return (density * proxy).sum() * D  # error: no-signature: `density * proxy` has no SBP signature on mesh axis `model`


@broken(f32(N, D), cause="a partial matrix times itself (trap 3): one variable, twice partial")
def gram_of_a_partial(x):
    h = sbp.partial(x, "model")  # and: h is P(sum) on `model`
    return h @ h.T  # error: no-signature: `h @ h.T` has no SBP signature on mesh axis `model`


@broken(f32(N, D), cause="rounding before the sum (trap 9)")
def integer_of_a_partial(x):
    x = sbp.split(x, 1, "model")  # and: x is S(1) on `model`: dim 1 of 64x256
    return x.sum(1).astype(jnp.int32)  # error: no-signature: `x.sum(1).astype(jnp.int32)` has no SBP signature on mesh axis `model`


@broken(i32(N), cause="integer division before the sum (trap 4): 16 of 81 small splits give another quotient")
def integer_division_of_a_partial_count(used):
    used = sbp.split(used, 0, "model")  # and: used is S(0) on `model`: dim 0 of 64
    total = used.sum()
    return total // 2  # error: no-signature: `total // 2` has no SBP signature on mesh axis `model`


@broken(f32(N, D), f32(D), cause="a partial denominator (trap 4)")
def division_by_a_partial(x, scale):
    x = sbp.split(x, 0, "model")  # and: x is S(0) on `model`: dim 0 of 64x256
    total = x.sum(0)
    return scale / total  # error: no-signature: `scale / total` has no SBP signature on mesh axis `model`


@broken(f32(N, D), f32(D), f32(D), cause="select by a comparison of partial values (trap 22)")
def select_by_a_partial(x, a, b):
    x = sbp.split(x, 0, "model")  # and: x is S(0) on `model`: dim 0 of 64x256
    return jnp.where(x.sum(0) > 0, a, b)  # error: no-signature: `x.sum(0) > 0` has no SBP signature on mesh axis `model`


@broken(f32(N, D), f32(N, D), cause="maxima over a split dim are added before they are taken (trap 5)")
def sum_of_partial_maxima(x, y):
    x, y = sbp.split(x, 0, "model"), sbp.split(y, 0, "model")  # and: x is S(0) on `model`: dim 0 of  # and: y is S(0) on `model`: dim 0 of
    return x.max(0) + y.max(0)  # error: no-signature: `x.max(0) + y.max(0)` has no SBP signature on mesh axis `model`


@broken(f32(N, D), cause="a partial maximum is subtracted: the sign turns maxima into minima (trap 5)")
def subtract_a_partial_maximum(x):
    x = sbp.split(x, 1, "model")  # and: x is S(1) on `model`: dim 1 of 64x256
    return x - x.max(1, keepdims=True)  # error: no-signature: `x - x.max(1, keepdims=True)` has no SBP signature on mesh axis `model`


@broken(f32(N, D), cause="is the gradient finite? asked of parts, which may be while the sum is not (trap 25, Paddle #64202)")
def finite_check_of_a_partial(x):
    x = sbp.split(x, 0, "model")  # and: x is S(0) on `model`: dim 0 of 64x256
    g = x.sum(0)
    return jnp.isfinite(g).all()  # error: no-signature: `jnp.isfinite(g)` has no SBP signature on mesh axis `model`


@broken(f32(N, D), cause="bf16 parts of a sum (trap 9, PyTorch #183363)")
def narrowed_before_the_sum(x):
    x = sbp.split(x, 0, "model")  # and: x is S(0) on `model`: dim 0 of 64x256
    total = x.sum(0)
    return total.astype(jnp.bfloat16) * jnp.bfloat16(2)  # error: no-signature: `total.astype(jnp.bfloat16)` has no SBP signature on mesh a


@broken(f32(N, D), cause="a print sees a part of a sum (trap 23)")
def print_of_a_partial(x):
    x = sbp.split(x, 0, "model")  # and: x is S(0) on `model`: dim 0 of 64x256
    total = x.sum()
    jax.debug.print("total {}", total)  # error: no-signature: `jax.debug.print("total {}", total)` has no SBP signature on mesh axis `mode
    return x * 2


@broken(f32(N, D), cause="root of a sum of squares over a split dim (trap 20, B11)")
def norm_of_a_split_vector(x):
    x = sbp.split(x, 1, "model")  # and: x is S(1) on `model`: dim 1 of 64x256
    return jnp.linalg.norm(x, axis=1)  # error: no-signature: `jnp.linalg.norm(x, axis=1)` has no SBP signature on mesh axis `model`
