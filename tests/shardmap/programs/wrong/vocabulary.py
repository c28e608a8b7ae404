"""Wrong programs on split vocabularies and sequences, each with its corrected twin."""

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import PartitionSpec as PS

from tests.shardmap.programs.kinds import N_DATA, N_MODEL, Pair, draw
from tests.shardmap.programs.wrong.layers import X
from tests.shardmap.programs.wrong.products import BOTH
from tests.shardmap.programs.wrong.training import CHOSEN

LOGITS, LABELS = (
    draw(16, 32, seed=13),
    np.random.default_rng(14).integers(0, 32, 16).astype(np.int32),
)
TABLE, IDS = draw(32, 8, seed=15), np.random.default_rng(16).integers(0, 32, 16).astype(np.int32)


def softmax_by_shard(logits):
    shifted = jnp.exp(logits - logits.max(-1, keepdims=True))
    return shifted / shifted.sum(-1, keepdims=True)


def softmax(logits):
    shifted = jnp.exp(logits - lax.pmax(logits.max(-1, keepdims=True), "model"))
    return shifted / lax.psum(shifted.sum(-1, keepdims=True), "model")


def softmax_own_maximum(logits):
    shifted = jnp.exp(logits - logits.max(-1, keepdims=True))
    return shifted / lax.psum(shifted.sum(-1, keepdims=True), "model")


def own_labels(logits, labels):
    """The logit of each label, on the device that holds it; zero elsewhere."""
    here = labels - lax.axis_index("model") * logits.shape[1]
    mine = (here >= 0) & (here < logits.shape[1])
    picked = jnp.take_along_axis(logits, jnp.clip(here, 0, logits.shape[1] - 1)[:, None], 1)[:, 0]
    return jnp.where(mine, picked, 0.0)


def cross_entropy_by_shard(logits, labels):
    total = jnp.exp(logits).sum(-1)
    return (jnp.log(total) - lax.psum(own_labels(logits, labels), "model")).mean()


def cross_entropy(logits, labels):
    total = lax.psum(jnp.exp(logits).sum(-1), "model")
    return (jnp.log(total) - lax.psum(own_labels(logits, labels), "model")).mean()


def cross_entropy_reference(logits, labels):
    return -jnp.take_along_axis(jax.nn.log_softmax(logits), labels[:, None], 1).mean()


def argmax(logits):
    best, at = logits.max(-1), jnp.argmax(logits, -1) + lax.axis_index("model") * logits.shape[1]
    return lax.pmin(
        jnp.where(best == lax.pmax(best, "model"), at, logits.shape[1] * N_MODEL), "model"
    )


def own_lookup(table, ids):
    """The rows of a table that this device has; zeros for others."""
    here = ids - lax.axis_index("model") * table.shape[0]
    mine = (here >= 0) & (here < table.shape[0])
    return jnp.where(mine[:, None], table[jnp.clip(here, 0, table.shape[0] - 1)], 0.0)


def looked_up(table, ids):
    return lax.psum(own_lookup(table, ids), "model")


def places(mask):
    own = jnp.cumsum(mask, 0)
    before = lax.all_gather(own[-1], "data")
    earlier = jnp.where(jnp.arange(N_DATA)[:, None] < lax.axis_index("data"), before, 0.0).sum(0)
    return own + earlier - 1.0


PAIRS = {
    "softmax_by_shard": Pair(
        "missing-reduction",
        ("model",),
        "logits - logits.max",
        softmax_by_shard,
        softmax,
        lambda x: jax.nn.softmax(x, -1),
        (LOGITS,),
        (BOTH,),
        BOTH,
    ),
    "softmax_own_maximum": Pair(
        "misplaced-reduction",
        ("model",),
        "logits - logits.max",
        softmax_own_maximum,
        softmax,
        lambda x: jax.nn.softmax(x, -1),
        (LOGITS,),
        (BOTH,),
        BOTH,
    ),
    "cross_entropy_by_shard": Pair(
        "missing-reduction",
        ("model",),
        "jnp.log(total)",
        cross_entropy_by_shard,
        cross_entropy,
        cross_entropy_reference,
        (LOGITS, LABELS),
        (PS(None, "model"), PS()),
        PS(),
    ),
    "argmax_by_shard": Pair(
        "local-result",
        ("model",),
        "jnp.argmax",
        lambda logits: jnp.argmax(logits, -1),
        argmax,
        lambda x: jnp.argmax(x, -1),
        (LOGITS,),
        (BOTH,),
        PS("data"),
        repaired=False,
    ),
    "looked_up_by_shard": Pair(
        "local-result",
        ("model",),
        "table[ids]",
        lambda table, ids: lax.psum(table[ids], "model"),
        looked_up,
        lambda t, i: t[i],
        (TABLE, IDS),
        (PS("model"), PS()),
        PS(),
        repaired=False,
    ),
    "places_by_shard": Pair(
        "local-result",
        ("data",),
        "jnp.cumsum",
        lambda mask: jnp.cumsum(mask, 0) - 1.0,
        places,
        lambda m: jnp.cumsum(m, 0) - 1.0,
        (CHOSEN,),
        (PS("data"),),
        PS("data"),
        repaired=False,
    ),
    "gathered_over_data": Pair(
        "wrong-placement",
        ("data",),
        "lax.all_gather(x",
        lambda x: lax.all_gather(x, "data", axis=1, tiled=True),
        lambda x: lax.all_gather(x, "model", axis=1, tiled=True),
        lambda x: x,
        (X,),
        (BOTH,),
        PS("data", None),
        wrong_outs=PS(None, "model"),
        repaired=False,
    ),
}
