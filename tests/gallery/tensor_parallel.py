"""Tensor parallelism gone wrong: Megatron's layers, and the post on parallel strategies that the project started from."""

import jax
import jax.numpy as jnp

import sbp
from tests.gallery.broken import MESH_2D, broken, f32, i32

TOKENS, D, FF, VOCAB = 64, 256, 1024, 4096


@broken(f32(TOKENS, D), f32(D, FF), f32(FF, D), cause="both weights split by columns; the second wants rows")
def column_then_column(x, w1, w2):
    w1 = sbp.split(w1, 1, "model")  # and: w1 is S(1) on `model`: dim 1 of 256x1024
    w2 = sbp.split(w2, 1, "model")  # and: w2 is S(1) on `model`, not contracted
    h = jax.nn.gelu(x @ w1)
    return h @ w2  # error: no-signature: `h @ w2` has no SBP signature on mesh axis `model`


@broken(f32(TOKENS, D), f32(D, FF), f32(FF, D), cause="K21: the sum after the second layer is missing, and the residual is normalised")
def no_sum_after_the_second_layer(x, w1, w2):
    w1 = sbp.split(w1, 1, "model")
    w2 = sbp.split(w2, 0, "model")  # and: w2 is S(0) on `model`: dim 0 of 1024x256
    h = x + jax.nn.relu(x @ w1) @ w2
    variance = jnp.mean(h * h, -1, keepdims=True)  # error: no-signature: `h * h` has no SBP signature on mesh axis `model`
    return h * jax.lax.rsqrt(variance + 1e-6)


@broken(f32(TOKENS, FF), f32(FF, D), f32(D), cause="the bias of a row-parallel layer goes in before the sum (PyTorch #163193)")
def bias_before_the_sum(h, w, b):
    h = sbp.split(h, 1, "model")  # and: h is S(1) on `model`: dim 1 of 64x1024
    w = sbp.split(w, 0, "model")
    y = h @ w + sbp.replicate(b, "model")
    return jax.nn.relu(y)  # error: no-signature: `jax.nn.relu(y)` has no SBP signature on mesh axis `model`


@broken(f32(TOKENS, D), f32(D, VOCAB), i32(TOKENS), cause="cross-entropy over a split vocabulary, written as on one device")
def vocabulary_parallel_loss(h, table, labels):
    table = sbp.split(table, 1, "model")  # and: table is S(1) on `model`: dim 1 of 256x4096
    logits = h @ table
    log_z = jax.nn.logsumexp(logits, -1)  # error: no-signature: `jax.nn.logsumexp(logits, -1)` has no SBP signature on mesh axis `model`
    picked = jnp.take_along_axis(logits, labels[:, None], -1)[:, 0]
    return (log_z - picked).mean()


@broken(i32(TOKENS), f32(VOCAB, D), cause="rows of a split embedding table are normalised before the devices that lack them are added")
def lookup_in_a_split_table(tokens, table):
    table = sbp.split(table, 0, "model")  # and: table is S(0) on `model`: dim 0 of 4096x256
    h = table[tokens]
    return h / jnp.linalg.norm(h, axis=-1, keepdims=True)  # error: no-signature: `jnp.linalg.norm(h, axis=-1, keepdims=True)` has no SBP s


@broken(f32(4, TOKENS, D), f32(D, 16, 16), f32(16, 16, D), cause="queries split by heads meet values split by head size")
def heads_against_head_size(x, wq, wv):
    q = jnp.einsum("bsd,dhk->bhsk", x, sbp.split(wq, 1, "model"))  # and: wq is S(1) on `model`: dim 1 of 256x16x16
    v = jnp.einsum("bsd,hkd->bhsk", x, sbp.split(wv, 1, "model"))  # and: wv is S(1) on `model`: dim 1 of 16x16x256
    scores = jax.nn.softmax(jnp.einsum("bhsk,bhtk->bhst", q, q))
    return jnp.einsum("bhst,bhtk->bshk", scores, v)  # error: annotation-conflict: wq as S(1) and wv as S(1) cannot meet in `jnp.einsum("bh


@broken(
    f32(TOKENS, D),
    f32(D, FF),
    f32(FF, D),
    mesh=MESH_2D,
    cause="data and tensor parallelism together: the weights are right, the batch takes the model axis, too",
    in_types=("data:S(0) model:S(0)", "model:S(1)", "model:S(0)"),
)
def batch_on_the_model_axis(x, w1, w2):
    h = jax.nn.relu(x @ w1)  # error: no-signature: `x @ w1` has no SBP signature on mesh axis `model`
    return h @ w2


@broken(
    f32(TOKENS, D),
    f32(D, FF),
    f32(FF, D),
    cause="K21: gradients of different slices of a weight are held as if they were one, and clipped by their own norm",
    in_types=("B", "model:S(1)", "model:S(0)"),
)
def norm_of_split_gradients(x, w1, w2):
    def loss(w1, w2):
        return (sbp.replicate(jax.nn.relu(x @ w1) @ w2, "model") ** 2).sum()

    g1, g2 = jax.grad(loss, argnums=(0, 1))(w1, w2)
    norm = jnp.sqrt(jnp.sum(g1 * g1) + jnp.sum(g2 * g2))  # error: no-signature: `jnp.sqrt(jnp.sum(g1 * g1) + jnp.sum(g2 * g2))` has no SBP
    return g1 / norm, g2 / norm
