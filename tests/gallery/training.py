"""Gradients, optimisers and what a training step does around them."""

import jax
import jax.numpy as jnp
import optax

import sbp
from tests.gallery.broken import MESH_2D, broken, f32, i32

N, D = 64, 256


@broken(f32(N, D), f32(D, D), in_types=("model:S(0)", "B"), cause="a fault of the backward pass alone: the cotangent is held partial")
def cotangent_held_partial(x, w):
    def loss(w):
        h = sbp.annotate(x @ w, cotangent="model:P(sum)")  # error: no-signature: the gradient of  # and: the cotangent of h is P(sum) on `
        return (h * h).sum()

    return jax.grad(loss)(w)


@broken(f32(N, D), f32(D, D), in_types=("model:S(0)", "B"), cause="data parallelism: the gradient's sum is not taken when Adam squares it")
def adam_on_a_partial_gradient(x, w):
    g = jax.grad(lambda w: (jnp.tanh(x @ w) ** 2).sum())(w)
    optimizer = optax.scale_by_adam()
    updates, _ = optimizer.update(g, optimizer.init(w))  # error: no-signature: `optimizer.update(g, optimizer.init(w))` has no SBP signatu
    return updates


@broken(
    f32(16, D, N),
    f32(16, D, N),
    in_types=("model:S(0)", "model:S(0)"),
    cause="B11 (DeepSpeed #8469): the global norm of gradients that are split by experts",
)
def clip_by_the_norm_of_split_experts(g_in, g_out):
    clip = optax.clip_by_global_norm(1.0)
    updates, _ = clip.update((g_in, g_out), clip.init(g_in))  # error: no-signature: `clip.update((g_in, g_out), clip.init(g_in))` has no S
    return updates


@broken(f32(D, D), f32(D, D), in_types=("model:S(0)", "model:S(0)"), cause="B18: Adafactor's column statistics run over the split dim")
def adafactor_over_a_split_dim(w, g):
    optimizer = optax.scale_by_factored_rms(min_dim_size_to_factor=128)
    updates, _ = optimizer.update(g, optimizer.init(w), w)  # error: no-signature: `optimizer.update(g, optimizer.init(w), w)` has no SBP s
    return updates


@broken(f32(N, D), f32(D), cause="two independent faults in one run")
def two_faults(x, b):
    rows = sbp.split(x, 0, "model")  # and: rows is S(0) on `model`: dim 0 of 64x256
    columns = sbp.split(x, 1, "model")  # and: columns is S(1) on `model`: dim 1 of 64x256
    y = rows + columns  # error: no-signature: `rows + columns` has no SBP signature on mesh axis `model`
    b = sbp.partial(b, "model")  # and: b is P(sum) on `model`
    return y, jnp.exp(b)  # error: no-signature: `jnp.exp(b)` has no SBP signature on mesh axis `model`


@broken(f32(N, D), f32(D, D), mesh=MESH_2D, cause="data parallelism is right; the fault is on the second mesh axis alone")
def second_axis_only(x, w):
    x = sbp.annotate(x, data=sbp.S(0), model=sbp.S(1))  # and: x is S(1) on `model`, the contracted dim
    w = sbp.annotate(w, data=sbp.B, model=sbp.S(1))  # and: w is S(1) on `model`, not contracted
    return x @ w  # error: no-signature: `x @ w` has no SBP signature on mesh axis `model`


@broken(f32(N, D), f32(D, 16), i32(N), cause="a loss of a library takes partial logits: the user's line is named")
def inside_a_library(x, w, labels):
    logits = sbp.split(x, 1, "model") @ sbp.split(w, 0, "model")  # and: x is S(1) on `model`: dim 1 of 64x256
    return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()  # error: no-signature: `optax.softmax_cross_entropy_with


@broken(f32(N, D), cause="standardised by the mean and variance of a split batch (batch norm)")
def batch_norm_over_a_split_batch(x):
    x = sbp.split(x, 0, "model")  # and: x is S(0) on `model`: dim 0 of 64x256
    mean = x.mean(0)
    return (x - mean) * jax.lax.rsqrt(x.var(0) + 1e-5)  # error: no-signature: `x - mean` has no SBP signature on mesh axis `model`


@broken(f32(D, D), f32(D, D), memory_limit=1e4, boxing="auto", cause="a limit that no typing meets")
def memory_for_nothing(x, w):
    z = x @ w
    h = jax.nn.relu(z)  # error: memory-limit: sbp found no plan that fits in memory_limit, 9.8 KiB per device
    return h @ w


@broken(f32(4096, 4096), f32(4096, 4096), boxing="auto", in_types=("model:S(0)", None), cause="one annotation makes the plan much dearer")
def gathered_for_nothing(x, w):
    h = sbp.replicate(x @ w, "model")  # warning: costly-annotation: pinning h to model:B makes the plan
    return jnp.tanh(h) @ w
