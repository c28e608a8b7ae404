"""More programs in which each device computes its place from its own index: positions of sequences
and vocabularies, masked means, rows and experts that a device picks, batches split over two mesh
axes."""

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import PartitionSpec as PS

from tests.shardmap.programs.kinds import N_DATA, N_MODEL, Pair, draw

# ---- sequences ----------------------------------------------------------------------------------


def with_places(x, table):
    at = lax.broadcasted_iota(jnp.int32, (x.shape[0],), 0) + x.shape[0] * lax.axis_index("model")
    return at, x + table[at]


def pooled(x, table, length):
    at, x = with_places(x, table)
    real = (at < length).astype(x.dtype)[:, None]
    return lax.psum((x * real).sum(0), "model") / lax.psum(real.sum(), "model")


def pooled_of_shards(x, table, length):
    at, x = with_places(x, table)
    real = (at < length).astype(x.dtype)[:, None]
    return lax.pmean((x * real).sum(0) / jnp.maximum(real.sum(), 1.0), "model")


def pooled_unreduced_count(x, table, length):
    at, x = with_places(x, table)
    real = (at < length).astype(x.dtype)[:, None]
    return lax.psum((x * real).sum(0), "model") / real.sum()


def pooled_reference(x, table, length):
    real = (jnp.arange(x.shape[0]) < length).astype(x.dtype)[:, None]
    return ((x + table[: x.shape[0]]) * real).sum(0) / real.sum()


WINDOW = 9


def windowed(q, k):
    """Scores of this device's queries; keys of all devices."""
    rows = q.shape[0]
    mine = lax.axis_index("model") * rows + lax.iota(jnp.int32, rows)[:, None]
    all_keys = lax.all_gather(k, "model", axis=0, tiled=True)
    other = lax.iota(jnp.int32, all_keys.shape[0])[None, :]
    near = (other <= mine) & (mine - other < WINDOW)
    return jnp.where(near, q @ all_keys.T / 4.0, -jnp.inf)


def windowed_over_own_values(q, k, v):
    weights = jax.nn.softmax(windowed(q, k), -1)
    rows = q.shape[0]
    block = lax.dynamic_slice_in_dim(weights, lax.axis_index("model") * rows, rows, 1)
    return lax.psum(block @ v, "model")


def windowed_reference(q, k, v):
    at = jnp.arange(q.shape[0])
    near = (at[None, :] <= at[:, None]) & (at[:, None] - at[None, :] < WINDOW)
    return jax.nn.softmax(jnp.where(near, q @ k.T / 4.0, -jnp.inf), -1) @ v


# ---- vocabularies -------------------------------------------------------------------------------

IDS = np.random.default_rng(106).integers(0, 32, 16).astype(np.int32)


def embedded_rows(table, ids):
    return jax.nn.one_hot(ids - lax.axis_index("model") * table.shape[0], table.shape[0]) @ table


def smoothed(logits, ids):
    """Cross-entropy with smoothed labels. Each device has a part of the vocabulary."""
    at = lax.axis_index("model") * logits.shape[1] + jnp.arange(logits.shape[1])
    wanted = 0.9 * (ids[:, None] == at[None, :]) + 0.1 / (logits.shape[1] * N_MODEL)
    total = jnp.log(lax.psum(jnp.exp(logits).sum(-1), "model"))
    return total, (wanted * logits).sum(-1)


def smoothed_loss(logits, ids):
    total, picked = smoothed(logits, ids)
    return (total - lax.psum(picked, "model")).mean()


def smoothed_unreduced(logits, ids):
    total, picked = smoothed(logits, ids)
    return lax.psum((total - picked).mean(), "model")


# ---- a batch split over both axes ---------------------------------------------------------------


BOTH = PS(("data", "model"))


def sigmoid_loss(images, texts):
    """The sum over this device's images of the loss of all pairs (https://arxiv.org/abs/2303.15343)."""
    rows = images.shape[0]
    at = lax.axis_index(("data", "model")) * rows + jnp.arange(rows)
    logits = images @ lax.all_gather(texts, ("data", "model"), axis=0, tiled=True).T
    same = at[:, None] == jnp.arange(logits.shape[1])[None, :]
    return -jax.nn.log_sigmoid(jnp.where(same, logits, -logits)).sum()


def sigmoid_reference(images, texts):
    logits = images @ texts.T
    return -jax.nn.log_sigmoid(jnp.where(jnp.eye(logits.shape[0]) > 0, logits, -logits)).sum()


# ---- experts ------------------------------------------------------------------------------------

TOKENS, EXPERTS = draw(32, 12, seed=110), draw(4, 12, 12, seed=112)


def picked_expert(x, w):
    """Each device applies its own expert. All devices have the weights of all experts."""
    mine = lax.dynamic_index_in_dim(w, lax.axis_index("model"), 0, keepdims=True)
    return jnp.einsum("td,edh->teh", x, mine)


# ---- flat parameters of a split optimiser -------------------------------------------------------


loss_of_flat = lambda flat, x, y: ((x @ flat.reshape(32, 24) - y) ** 2).mean()


def flat_steps(written):
    """Three steps. Each step updates this device's piece of the flat parameters."""

    def body(flat, x, y):
        size = flat.shape[0] // lax.axis_size("data")
        start = lax.axis_index("data") * size

        def step(flat, _):
            g = lax.psum_scatter(jax.grad(loss_of_flat)(flat, x, y), "data", tiled=True) / N_DATA
            mine = lax.dynamic_slice(flat, (start,), (size,)) - 0.5 * g
            return written(flat, mine, start), None

        return lax.scan(step, flat, None, length=3)[0].reshape(32, 24)

    return body


def flat_reference(flat, x, y):
    for _ in range(3):
        flat = flat - 0.5 * jax.grad(loss_of_flat)(flat, x, y)
    return flat.reshape(32, 24)


OF_SEQUENCE = (
    pooled,
    pooled_reference,
    (draw(32, 12, seed=100), draw(64, 12, seed=101), np.int32(19)),
    (PS("model"), PS(), PS()),
    PS(),
)


PAIRS = {
    "pooled_of_shards": Pair(
        "misplaced-reduction",
        ("model",),
        "lax.pmean(",
        pooled_of_shards,
        *OF_SEQUENCE,
    ),
    "pooled_unreduced_count": Pair(
        "missing-reduction",
        ("model",),
        'lax.psum((x * real).sum(0), "model") / real.sum()',
        pooled_unreduced_count,
        *OF_SEQUENCE,
    ),
    "windowed_over_own_values": Pair(
        "differs-on-one-device",
        ("model",),
        "dynamic_slice_in_dim",
        windowed_over_own_values,
        lambda q, k, v: (
            jax.nn.softmax(windowed(q, k), -1) @ lax.all_gather(v, "model", axis=0, tiled=True)
        ),
        windowed_reference,
        (draw(32, 16, seed=102), draw(32, 16, seed=103), draw(32, 16, seed=104)),
        (PS("model"),) * 3,
        PS("model"),
        severity="warning",
        repaired=False,
    ),
    "embedded_and_averaged": Pair(
        "wrong-reduction",
        ("model",),
        "lax.pmean",
        lambda table, ids: lax.pmean(embedded_rows(table, ids), "model"),
        lambda table, ids: lax.psum(embedded_rows(table, ids), "model"),
        lambda table, ids: table[ids],
        (draw(32, 8, seed=105), IDS),
        (PS("model"), PS()),
        PS(),
    ),
    "smoothed_unreduced": Pair(
        "misplaced-reduction",
        ("model",),
        "total - picked",
        smoothed_unreduced,
        smoothed_loss,
        lambda logits, ids: (
            -((0.9 * jax.nn.one_hot(ids, 32) + 0.1 / 32) * jax.nn.log_softmax(logits))
            .sum(-1)
            .mean()
        ),
        (draw(16, 32, seed=107), IDS),
        (PS(None, "model"), PS()),
        PS(),
    ),
    "sigmoid_over_one": Pair(
        "missing-reduction",
        ("model",),
        ".sum()",
        lambda images, texts: lax.psum(sigmoid_loss(images, texts), "data"),
        lambda images, texts: lax.psum(sigmoid_loss(images, texts), ("data", "model")),
        sigmoid_reference,
        (draw(16, 24, seed=108) * 0.3, draw(16, 24, seed=109) * 0.3),
        (BOTH, BOTH),
        PS(),
    ),
    "experts_not_added": Pair(
        "wrong-placement",
        ("model",),
        "mine =",
        lambda x, w: jnp.tanh(picked_expert(x, w)).sum(1),
        lambda x, w: lax.psum(jnp.tanh(picked_expert(x, w)).sum(1), "model"),
        lambda x, w: jnp.tanh(jnp.einsum("td,edh->teh", x, w)).sum(1),
        (TOKENS, EXPERTS),
        (PS(), PS()),
        PS(),
        repaired=False,
    ),
    "flat_kept": Pair(
        "wrong-placement",
        ("data",),
        "flat.reshape(32, 24)",
        flat_steps(lambda flat, mine, start: lax.dynamic_update_slice(flat, mine, (start,))),
        flat_steps(lambda flat, mine, start: lax.all_gather(mine, "data", tiled=True)),
        flat_reference,
        (draw(32 * 24, seed=113), draw(16, 32, seed=114), draw(16, 24, seed=115)),
        (PS(), PS("data"), PS("data")),
        PS(),
        vma=False,
        repaired=False,
    ),
}
