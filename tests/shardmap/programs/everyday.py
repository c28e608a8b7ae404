"""Right programs as they are written every day: means of what was reduced, helpers that take split
and whole values, merges of log-sum-exps, attention and statistics, groups, loops, callbacks, sums
in fewer bits, and steps that are skipped where not all is finite."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax
from jax.sharding import PartitionSpec as PS

from tests.shardmap.programs.kinds import N_DATA, Program, averaged, draw, mapped, valued_step
from tests.shardmap.programs.wrong.counts import (
    FLOW as OVERFLOWN,
    OTHER,
    finite_step,
    kept_or_new,
    mean_square,
    skipped,
    smallest,
    two_losses,
)
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
from tests.shardmap.programs.wrong.vocabulary import LABELS, LOGITS

BATCH, STEP, BOTH = PS("data"), (PS(), PS("data"), PS("data")), PS("data", "model")

# ---- mixed precision ----------------------------------------------------------------------------

HALF_TOLERANCE = 0.01
U, V = draw(16, 32, seed=1), draw(32, 24, seed=2)
MATMUL = (BOTH, PS("model"))


def summed_in_half(u, v):
    y = jnp.dot(u, v, preferred_element_type=jnp.float32).astype(jnp.bfloat16)
    return HALF_TOLERANCE * lax.psum(y, "model").astype(jnp.float32)


def scattered_in_half(u, v):
    y = lax.psum_scatter((u @ v).astype(jnp.bfloat16), "model", scatter_dimension=1, tiled=True)
    return HALF_TOLERANCE * y.astype(jnp.float32)


def averaged_in_half(w, x, y):
    g = jax.grad(squared)(w, x, y).astype(jnp.bfloat16)
    return w - 0.01 * lax.pmean(g, "data").astype(jnp.float32)


ROUNDED = (draw(16, 32, seed=1) / 32, draw(32, 24, seed=2) / 4)
BITS = {
    "summed_in_half": Program(
        mapped(summed_in_half, MATMUL, BATCH), lambda u, v: HALF_TOLERANCE * (u @ v), ROUNDED
    ),
    "scattered_in_half": Program(
        mapped(scattered_in_half, MATMUL, BOTH), lambda u, v: HALF_TOLERANCE * (u @ v), ROUNDED
    ),
    "averaged_in_half": Program(
        mapped(averaged_in_half, STEP, PS()),
        lambda w, x, y: w - 0.01 * jax.grad(squared)(w, x, y),
        (W, X, Y),
        vma=(False,),
    ),
    "rounded": Program(
        mapped(
            lambda u, v: HALF_TOLERANCE * lax.psum(lax.reduce_precision(u @ v, 8, 10), "model"),
            MATMUL,
            BATCH,
        ),
        lambda u, v: HALF_TOLERANCE * (u @ v),
        ROUNDED,
    ),
}


def skipped_for_loss(w, x, y):
    value, g = jax.value_and_grad(squared)(w, x, y)
    bad = lax.psum(jnp.isnan(value).astype(jnp.float32), "data") > 0
    return jnp.where(bad, w, w - 0.1 * lax.pmean(g, "data"))


def skipped_for_norm(w, x, y):
    g = jax.grad(squared)(w, x, y)
    ok = lax.pmin(jnp.isfinite(jnp.sqrt((g * g).sum())).astype(jnp.int32), "data")
    return jnp.where(ok > 0, w - 0.1 * lax.pmean(g, "data"), w)


def checked_after(w, x, y):
    g = lax.psum(jax.grad(squared)(w, x, y), "data")
    return jnp.where(jnp.isfinite(g).all(), w - 0.1 * g / lax.axis_size("data"), w)


FINITE = {
    f"{name}_{kind}": Program(mapped(body, STEP, PS()), finite_step, (W, x, Y), vma=(False,))
    for kind, x in (("finite", X), ("overflown", OVERFLOWN))
    for name, body in {
        "smallest_where": skipped(smallest, lambda ok, old, new: jnp.where(ok, new, old)),
        "smallest_cond": skipped(smallest, kept_or_new),
        "none_fails": skipped(
            lambda ok: lax.psum((~ok).astype(jnp.int32), "data") == 0, kept_or_new
        ),
        "checked_after": checked_after,
    }.items()
} | {
    "skipped_for_loss": Program(
        mapped(skipped_for_loss, STEP, PS()), finite_step, (W, X, Y), vma=(False,)
    ),
    "skipped_for_norm": Program(
        mapped(skipped_for_norm, STEP, PS()), finite_step, (W, X, Y), vma=(False,)
    ),
    "cleaned": Program(
        mapped(
            lambda w, x, y: w - 0.1 * lax.pmean(jnp.nan_to_num(jax.grad(squared)(w, x, y)), "data"),
            STEP,
            PS(),
        ),
        finite_step,
        (W, X, Y),
        vma=(False,),
    ),
    "devices_that_agree": Program(
        mapped(
            lambda x: lax.psum((x > -9.0).all().astype(jnp.int32), "data") == N_DATA, (BATCH,), PS()
        ),
        lambda x: (x > -9.0).all(),
        (X,),
    ),
}


# ---- means and helpers --------------------------------------------------------------------------


def split_labels_cross_entropy(logits, labels):
    total = jnp.log(lax.psum(jnp.exp(logits).sum(-1), "model"))
    return lax.pmean((total - lax.psum((labels * logits).sum(-1), "model")).mean(), "data")


def split_labels_reference(logits, labels):
    return -(labels * jax.nn.log_softmax(logits)).sum(-1).mean()


def switch(gates, of_mean=lambda mean: mean):
    chosen = jax.nn.one_hot(gates.argmax(-1), gates.shape[-1])
    return (of_mean(chosen.mean(0)) * of_mean(jax.nn.softmax(gates).mean(0))).mean() * 64


def normed(h):
    return (h - h.mean()) * lax.rsqrt(h.var() + 1e-5)


def similarity(x, y):
    dot, a, b = lax.psum(((x * y).sum(-1), (x * x).sum(-1), (y * y).sum(-1)), "model")
    return (dot * lax.rsqrt(a * b)).mean()


PARAMS = {"w": draw(24, 8, seed=71) * 0.3, "b": draw(8, seed=72)}


tree_loss = lambda p, x, y: ((jnp.tanh(x @ p["w"]) + p["b"] - y) ** 2).mean()


def optimised(make):
    """A step of an optimizer that takes means of parameters and gradients, and the same step on one
    device."""

    def step(reduce):
        def body(p, x, y):
            optimiser = make()
            g = reduce(jax.grad(tree_loss)(p, x, y))
            updates, _ = optimiser.update(g, optimiser.init(p), p)
            return optax.apply_updates(p, updates)

        return body

    return Program(
        mapped(step(averaged), STEP, PS()), step(lambda g: g), (PARAMS, X, Y), vma=(False,)
    )


MEANS = {
    "log_of_sum": Program(
        mapped(
            lambda logits: lax.pmean(
                jnp.log(lax.psum(jnp.exp(logits).sum(-1), "model")).mean(), "data"
            ),
            (BOTH,),
            PS(),
        ),
        lambda x: jnp.log(jnp.exp(x).sum(-1)).mean(),
        (LOGITS,),
    ),
    "one_hot_cross_entropy": Program(
        mapped(
            lambda logits, labels: split_labels_cross_entropy(
                logits,
                jax.nn.one_hot(labels - lax.axis_index("model") * logits.shape[1], logits.shape[1]),
            ),
            (BOTH, BATCH),
            PS(),
        ),
        lambda logits, labels: split_labels_reference(
            logits, jax.nn.one_hot(labels, logits.shape[1])
        ),
        (LOGITS, LABELS),
    ),
    "split_labels_cross_entropy": Program(
        mapped(split_labels_cross_entropy, (BOTH, BOTH), PS()),
        split_labels_reference,
        (LOGITS, np.eye(32, dtype=np.float32)[LABELS]),
    ),
    "square_of_means": Program(
        mapped(lambda x: (lax.pmean(x.mean(0), "data") ** 2).mean(), (BATCH,), PS()),
        lambda x: (x.mean(0) ** 2).mean(),
        (X,),
    ),
    "switch_auxiliary": Program(
        mapped(lambda gates: switch(gates, averaged), (BATCH,), PS()),
        switch,
        (draw(16, 8, seed=73),),
    ),
    "mean_variance": Program(
        mapped(
            lambda x: lax.pmean(((x - lax.pmean(x.mean(0), "data")) ** 2).mean(0), "data").mean(),
            (BATCH,),
            PS(),
        ),
        lambda x: x.var(0).mean(),
        (X,),
    ),
    "pooled": Program(
        mapped(
            lambda x: normed(lax.psum(x.sum(0), "data") / (x.shape[0] * lax.axis_size("data"))),
            (BATCH,),
            PS(),
        ),
        lambda x: normed(x.mean(0)),
        (X,),
    ),
    "similarity": Program(
        mapped(similarity, (PS(None, "model"),) * 2, PS()),
        lambda x, y: ((x * y).sum(-1) * lax.rsqrt((x * x).sum(-1) * (y * y).sum(-1))).mean(),
        (X, draw(16, 24, seed=74)),
    ),
    "binary_loss": Program(
        mapped(
            lambda x, w, y: lax.pmean(
                jnp.logaddexp(0.0, -y * lax.psum((x * w).sum(-1), "model")).mean(), "data"
            ),
            (BOTH, PS("model"), BATCH),
            PS(),
        ),
        lambda x, w, y: jnp.logaddexp(0.0, -y * (x * w).sum(-1)).mean(),
        (X, W[:, 0], np.sign(Y[:, 0])),
    ),
    "adafactor": optimised(lambda: optax.adafactor(1e-2)),
    "clip_by_block_rms": optimised(lambda: optax.clip_by_block_rms(1e-3)),
}


HELPERS = {
    "two_losses": Program(
        mapped(valued_step(two_losses, averaged, averaged), (PS(), BATCH, PS()), PS()),
        valued_step(two_losses),
        (W, X, OTHER),
        vma=(False,),
    ),
    "one_loss_averaged": Program(
        mapped(
            valued_step(lambda w, x, other: averaged(mean_square(x @ w)) + mean_square(other @ w)),
            (PS(), BATCH, PS()),
            PS(),
        ),
        valued_step(two_losses),
        (W, X, OTHER),
        vma=(True,),
    ),
}


# ---- merges -------------------------------------------------------------------------------------

NOTED, DIFFERS = ("not-analysed",) * 2, ("differs-on-one-device",)


QUERIES, KEYS, VALUES = draw(4, 8, seed=76), draw(32, 8, seed=77), draw(32, 8, seed=78)
SPLIT_KEYS = (PS(), PS("model"), PS("model"))


def merged(logits):
    lse = jax.nn.logsumexp(logits, -1)
    top = lax.pmax(lse, "model")
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
    """The algorithm of Chan, Golub and LeVeque: squares within the shards, and squares of their
    means."""
    n, mean = x.shape[0], x.mean(0)
    within = ((x - mean) ** 2).sum(0)
    return lax.psum(within + n * (mean - lax.pmean(mean, "data")) ** 2, "data") / (
        n * lax.axis_size("data")
    )


by_device = lambda x: x.reshape(N_DATA, -1, x.shape[1])


MERGES = {
    "merged": Program(mapped(merged, (BOTH,), BATCH), lambda x: jax.nn.logsumexp(x, -1), (LOGITS,)),
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
        mapped(lambda w, x, y: lax.pmax(squared(w, x, y), "data"), STEP, PS()),
        lambda w, x, y: jax.vmap(squared, (None, 0, 0))(w, by_device(x), by_device(y)).max(),
        (W, X, Y),
        notes=DIFFERS,
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
    """Ghost batch norm: each device has statistics of its own batch. Groups are a separate dim, and
    the mesh splits this dim."""
    return (x - x.mean(1, keepdims=True)) * lax.rsqrt(x.var(1, keepdims=True) + 1e-5)


def in_groups(body):
    def make(vma):
        region = mapped(body, (BATCH,), BATCH)(vma)
        return lambda x: region(x.reshape(N_DATA, -1, x.shape[1])).reshape(x.shape)

    return make


def noise(vma):
    """The region returns one result for each device, and the program averages them outside: the
    squares of the gradients of some samples."""

    def body(w, x, y):
        g = jax.grad(squared)(w, x, y)
        return (g * g).sum()[None], (lax.pmean(g, "data") ** 2).sum()

    def scale(w, x, y):
        small, big = mapped(body, STEP, (BATCH, PS()))(vma)(w, x, y)
        return small.mean(), big

    return scale


def noise_reference(w, x, y):
    g = jax.vmap(jax.grad(squared), (None, 0, 0))(w, by_device(x), by_device(y))
    return (g**2).sum((1, 2)).mean(), (g.mean(0) ** 2).sum()


def handed_on(places):
    """Every turn of the loop moves each value to the next place of the carry."""

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
        lambda x: normalised_in_groups(by_device(x)).reshape(x.shape),
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


PROGRAMS = MEANS | HELPERS | BITS | FINITE | MERGES | OTHERS
