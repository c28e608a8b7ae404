"""Right merges of log-sum-exps, attention and statistics; groups, loops and callbacks."""

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import PartitionSpec as PS

from tests.shardmap.programs.everyday.precision import MATMUL, U, V
from tests.shardmap.programs.kinds import N_DATA, Program, draw, mapped
from tests.shardmap.programs.wrong.experts import (
    COMBINE,
    DISPATCH,
    TOKENS,
    W_IN,
    W_OUT,
    exchanged,
    experts,
)
from tests.shardmap.programs.wrong.layers import X
from tests.shardmap.programs.wrong.training import W, Y, squared
from tests.shardmap.programs.wrong.vocabulary import LOGITS

BATCH, STEP = PS("data"), (PS(), PS("data"), PS("data"))
BOTH = PS("data", "model")
NOTED, DIFFERS = ("not-analysed",) * 2, ("differs-on-one-device",)


QUERIES, KEYS, VALUES = draw(4, 8, seed=76), draw(32, 8, seed=77), draw(32, 8, seed=78)
SPLIT_KEYS = (PS(), PS("model"), PS("model"))


def merged(logits):
    lse = jax.nn.logsumexp(logits, -1)
    top = lax.pmax(lse, "model")
    return top + jnp.log(lax.psum(jnp.exp(lse - top), "model"))


def merged_by_maximum(logits):
    own = logits.max(-1)
    lse = own + jnp.log(jnp.exp(logits - own[:, None]).sum(-1))
    top = lax.pmax(own, "model")
    return top + jnp.log(lax.psum(jnp.exp(lse - top), "model"))


attention = lambda q, k, v: jax.nn.softmax(q @ k.T) @ v


def weights_of_shards(q, k, v):
    scores = q @ k.T
    own = scores.max(-1, keepdims=True)
    weights = jnp.exp(scores - own)
    total = weights.sum(-1, keepdims=True)
    out, lse = weights @ v / total, own + jnp.log(total)
    share = jnp.exp(lse - lax.pmax(lse, "model"))
    return lax.psum(out * share, "model") / lax.psum(share, "model")


def weights_of_normalised(q, k, v):
    share = jnp.exp(jax.nn.logsumexp(q @ k.T, -1))
    return (
        lax.psum(attention(q, k, v) * share[:, None], "model") / lax.psum(share, "model")[:, None]
    )


def weighted_by_count(x, mask):
    mean, count = (x * mask).sum() / mask.sum(), mask.sum()
    return lax.psum(mean * count, "data") / lax.psum(count, "data")


def variance_in_two_parts(x):
    """Chan, Golub and LeVeque's: the squares within the shards, and those of their means."""
    n, mean = x.shape[0], x.mean(0)
    within = ((x - mean) ** 2).sum(0)
    return lax.psum(within + n * (mean - lax.pmean(mean, "data")) ** 2, "data") / (
        n * lax.axis_size("data")
    )


loss_of_worst = lambda w, x, y: lax.pmax(squared(w, x, y), "data")


def loss_of_worst_reference(w, x, y):
    return jax.vmap(squared, (None, 0, 0))(
        w, x.reshape(N_DATA, -1, x.shape[1]), y.reshape(N_DATA, -1, y.shape[1])
    ).max()


MERGES = {
    "merged": Program(mapped(merged, (BOTH,), BATCH), lambda x: jax.nn.logsumexp(x, -1), (LOGITS,)),
    "merged_by_maximum": Program(
        mapped(merged_by_maximum, (BOTH,), BATCH), lambda x: jax.nn.logsumexp(x, -1), (LOGITS,)
    ),
    "merged_without_shift": Program(
        mapped(
            lambda logits: jnp.log(lax.psum(jnp.exp(jax.nn.logsumexp(logits, -1)), "model")),
            (BOTH,),
            BATCH,
        ),
        lambda x: jax.nn.logsumexp(x, -1),
        (LOGITS,),
    ),
    "weights_of_shards": Program(
        mapped(weights_of_shards, SPLIT_KEYS, PS()), attention, (QUERIES, KEYS, VALUES)
    ),
    "weights_of_normalised": Program(
        mapped(weights_of_normalised, SPLIT_KEYS, PS()),
        attention,
        (QUERIES, KEYS, VALUES),
    ),
    "weighted_by_count": Program(
        mapped(weighted_by_count, (BATCH, BATCH), PS()),
        lambda x, m: (x * m).sum() / m.sum(),
        (X[:, 0], np.float32(np.arange(16) < 11)),
    ),
    "variance_in_two_parts": Program(
        mapped(variance_in_two_parts, (BATCH,), PS()), lambda x: x.var(0), (X,)
    ),
    "loss_of_worst": Program(
        mapped(loss_of_worst, STEP, PS()), loss_of_worst_reference, (W, X, Y), notes=DIFFERS
    ),
    "gathered_means": Program(
        mapped(lambda x: lax.all_gather(x.mean(0), "data").mean(0), (BATCH,), PS()),
        lambda x: x.mean(0),
        (X,),
        vma=(False,),
    ),
    "tokens_on_every_expert_and_back": Program(
        mapped(exchanged, (BATCH, BATCH, BATCH, PS("model"), PS("model")), BATCH),
        experts,
        (DISPATCH, COMBINE, TOKENS, W_IN, W_OUT),
        vma=(False,),
    ),
}


def normalised_in_groups(x):
    """Statistics of each device's own batch (ghost batch norm): groups are a dim of their own, and
    that is what is split."""
    return (x - x.mean(1, keepdims=True)) * lax.rsqrt(x.var(1, keepdims=True) + 1e-5)


def in_groups(body):
    def make(vma):
        region = mapped(body, (BATCH,), BATCH)(vma)
        return lambda x: region(x.reshape(N_DATA, -1, x.shape[1])).reshape(x.shape)

    return make


def noise(vma):
    """What each device found alone is returned side by side, and averaged outside: the squares of
    the gradients of some samples."""

    def body(w, x, y):
        g = jax.grad(squared)(w, x, y)
        return (g * g).sum()[None], (lax.pmean(g, "data") ** 2).sum()

    def scale(w, x, y):
        small, big = mapped(body, STEP, (BATCH, PS()))(vma)(w, x, y)
        return small.mean(), big

    return scale


def noise_reference(w, x, y):
    g = jax.vmap(jax.grad(squared), (None, 0, 0))(
        w, x.reshape(N_DATA, -1, x.shape[1]), y.reshape(N_DATA, -1, y.shape[1])
    )
    return (g**2).sum((1, 2)).mean(), (g.mean(0) ** 2).sum()


def handed_on(places):
    """Every turn hands each value on by one place."""

    def body(x, w):
        start = tuple(jnp.zeros((x.shape[0], w.shape[1])) for _ in range(places))
        return lax.psum(
            lax.fori_loop(0, places + 2, lambda _, c: (x @ w, *c[:-1]), start)[-1], "model"
        )

    return body


def called_back(u, v):
    y = jax.pure_callback(
        lambda a: np.asarray(a) * 2, jax.ShapeDtypeStruct((8, 24), jnp.float32), u @ v
    )
    return lax.psum(y, "model")


OTHERS = {
    "normalised_in_groups": Program(
        in_groups(normalised_in_groups),
        lambda x: normalised_in_groups(x.reshape(N_DATA, -1, x.shape[1])).reshape(x.shape),
        (X,),
    ),
    "noise": Program(noise, noise_reference, (W, X, Y), vma=(False,), notes=DIFFERS),
    **{
        f"handed_on_{n}": Program(
            mapped(handed_on(n), (PS(None, "model"), PS("model")), PS()),
            lambda x, w: x @ w,
            (U, V),
            vma=(False,),
        )
        for n in (3, 16)
    },
    "called_back": Program(
        mapped(called_back, MATMUL, BATCH),
        lambda u, v: 2 * (u @ v),
        (U, V),
        vma=(False,),
        notes=NOTED,
    ),
}


PROGRAMS = MERGES | OTHERS
