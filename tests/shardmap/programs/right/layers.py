"""Right tensor-, sequence- and vocabulary-parallel layers, each with the plain function that it
computes."""

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec as PS

from tests.shardmap.programs.kinds import N_MODEL, Program, draw, mapped, outer_grad
from tests.shardmap.programs.right.idioms import ROWS
from tests.shardmap.programs.wrong.layers import MLP, W1, W2, X, mlp, mlp_reduced
from tests.shardmap.programs.wrong.vocabulary import (
    IDS,
    LABELS,
    LOGITS,
    TABLE,
    cross_entropy,
    cross_entropy_reference,
    looked_up,
)

mlp_loss = lambda x, w1, w2: (mlp(x, w1, w2) ** 2).mean()


@jax.custom_vjp
def enter(x):
    """Megatron's f: the identity, whose gradient is summed."""
    return x


@jax.custom_vjp
def leave(x):
    """Megatron's g: a sum, whose gradient is passed on."""
    return lax.psum(x, "model")


enter.defvjp(lambda x: (x, None), lambda _, ct: (lax.psum(ct, "model"),))
leave.defvjp(lambda x: (lax.psum(x, "model"), None), lambda _, ct: (ct,))


def megatron_step(x, w1, w2):
    def loss(weights):
        return ((x + leave(jax.nn.gelu(enter(x) @ weights[0]) @ weights[1])) ** 2).mean()

    value, (g1, g2) = jax.value_and_grad(loss)((w1, w2))
    value, g1, g2 = lax.pmean((value, g1, g2), "data")
    return value, w1 - 0.1 * g1, w2 - 0.1 * g2


def megatron_reference(x, w1, w2):
    value, (g1, g2) = jax.value_and_grad(lambda w: mlp_loss(x, *w))((w1, w2))
    return value, w1 - 0.1 * g1, w2 - 0.1 * g2


normed = lambda x: x * lax.rsqrt((x * x).mean(-1, keepdims=True) + 1e-6)


def sequence_parallel(x, w1, w2):
    """Tokens are split outside of the two products, features inside."""
    h = lax.all_gather(normed(x), "model", axis=0, tiled=True)
    y = jax.nn.gelu(h @ w1) @ w2
    return x + lax.psum_scatter(y, "model", scatter_dimension=0, tiled=True)


WQ, WK, WV = (draw(24, 32, seed=30 + i) * 0.2 for i in range(3))


def attention(x, wq, wk, wv, wo, heads):
    q, k, v = ((x @ w).reshape(*x.shape[:2], heads, -1) for w in (wq, wk, wv))
    scores = jnp.einsum("bqhd,bkhd->bhqk", q, k) / jnp.sqrt(q.shape[-1])
    scores = jnp.where(jnp.tril(jnp.ones(scores.shape[-2:], bool)), scores, -1e9)
    return (
        jnp.einsum("bhqk,bkhd->bqhd", jax.nn.softmax(scores, -1), v).reshape(*x.shape[:2], -1) @ wo
    )


def attention_loss(x, wq, wk, wv, wo):
    @jax.checkpoint
    def block(x):
        return x + lax.psum(attention(normed(x), wq, wk, wv, wo, 4 // N_MODEL), "model")

    return lax.pmean((block(x) ** 2).mean(), "data")


ATTENTION = (PS("data"), PS(None, "model"), PS(None, "model"), PS(None, "model"), PS("model"))


def stable_cross_entropy(logits, labels):
    top = lax.stop_gradient(lax.pmax(lax.stop_gradient(logits).max(-1), "model"))
    total = lax.psum(jnp.exp(logits - top[:, None]).sum(-1), "model")
    here = labels - lax.axis_index("model") * logits.shape[1]
    one_hot = here[:, None] == jnp.arange(logits.shape[1])
    picked = lax.psum(jnp.where(one_hot, logits, 0.0).sum(-1), "model")
    return (jnp.log(total) + top - picked).mean()


PROGRAMS = {
    "megatron_mlp": Program(mapped(mlp_reduced, MLP, ROWS), mlp, (X, W1, W2)),
    "megatron_mlp_gradient": Program(
        outer_grad(
            lambda x, w1, w2: lax.pmean((mlp_reduced(x, w1, w2) ** 2).mean(), "data"),
            MLP,
            PS(),
            (0, 1, 2),
        ),
        jax.value_and_grad(mlp_loss, (0, 1, 2)),
        (X, W1, W2),
    ),
    "megatron_step": Program(
        mapped(megatron_step, MLP, (PS(), PS(None, "model"), PS("model", None))),
        megatron_reference,
        (X, W1, W2),
        vma=(False,),
    ),
    "sequence_parallel": Program(
        mapped(
            sequence_parallel,
            (PS("model", None), PS(None, "model"), PS("model", None)),
            PS("model", None),
        ),
        lambda x, w1, w2: x + jax.nn.gelu(normed(x) @ w1) @ w2,
        (X, W1, W2),
    ),
    "attention_gradient": Program(
        outer_grad(attention_loss, ATTENTION, PS(), (0, 1, 2, 3, 4)),
        jax.value_and_grad(
            lambda x, wq, wk, wv, wo: ((x + attention(normed(x), wq, wk, wv, wo, 4)) ** 2).mean(),
            (0, 1, 2, 3, 4),
        ),
        (draw(4, 8, 24, seed=34), WQ, WK, WV, draw(32, 24, seed=33) * 0.2),
    ),
    "cross_entropy": Program(
        mapped(cross_entropy, (PS(None, "model"), PS()), PS()),
        cross_entropy_reference,
        (LOGITS, LABELS),
    ),
    "stable_cross_entropy": Program(
        mapped(stable_cross_entropy, (PS(None, "model"), PS()), PS()),
        cross_entropy_reference,
        (LOGITS, LABELS),
    ),
    "cross_entropy_gradient": Program(
        outer_grad(stable_cross_entropy, (PS(None, "model"), PS()), PS(), 0),
        jax.value_and_grad(cross_entropy_reference),
        (LOGITS, LABELS),
    ),
    "embedding": Program(
        mapped(looked_up, (PS("model"), PS()), PS()), lambda t, i: t[i], (TABLE, IDS)
    ),
}
