"""Right rings, pipelines and small idioms, each with the plain function that it computes."""

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import PartitionSpec as PS

from tests.shardmap.programs.kinds import N_DATA, N_MODEL, Program, draw, mapped
from tests.shardmap.programs.rings import (
    MICRO,
    STAGES,
    VALUES,
    K,
    Q,
    attention_of_rows,
    heads_for_tokens,
    heads_reference,
    pipeline,
    pipeline_reference,
    ring_attention,
    ring_product,
    ring_sum,
    split_keys,
    split_keys_gathered,
)
from tests.shardmap.programs.wrong.layers import W1, X


def power_iteration(a):
    """Rows of a symmetric matrix are split; the loop ends when the vector keeps still."""
    n = a.shape[1]

    def turn(state):
        v, _, i = state
        w = lax.all_gather(a @ v, "model", tiled=True)
        w = w / jnp.sqrt((w * w).sum())
        return w, jnp.abs(w - v).max(), i + 1

    start = (jnp.ones(n) / jnp.sqrt(n), jnp.float32(1.0), 0)
    return lax.while_loop(lambda s: (s[1] > 1e-6) & (s[2] < 50), turn, start)[0]


def power_reference(a):
    v = jnp.ones(a.shape[0]) / jnp.sqrt(a.shape[0])
    for _ in range(50):
        v = a @ v
        v = v / jnp.sqrt((v * v).sum())
    return v


SYMMETRIC = np.diag(np.arange(1, 9)).astype(np.float32) + 0.1
SYMMETRIC[7, 7] = 30.0


def standard(x):
    """Batch statistics over all devices."""
    mean = lax.pmean(x.mean(0), "data")
    return (x - mean) / jnp.sqrt(lax.pmean((x * x).mean(0), "data") - mean * mean + 1e-3)


def dropped(x):
    key = jax.random.fold_in(jax.random.key(0), lax.axis_index("data"))
    keep = jax.random.bernoulli(key, 0.5, x.shape)
    return lax.pmean((jnp.where(keep, x, 0.0) + jnp.where(keep, 0.0, x)).mean(), "data")


def half_precision(u, v):
    return lax.psum(
        jnp.matmul(
            u.astype(jnp.bfloat16), v.astype(jnp.bfloat16), preferred_element_type=jnp.float32
        ),
        "model",
    )


def deferred(us, v):
    """A sum over microbatches of products stays partial in the carry, and is reduced once."""

    body = lambda total, u: (total + 2.0 * (u @ v), None)

    start = lax.pcast(jnp.zeros((us.shape[1], v.shape[1])), ("data", "model"), to="varying")
    return lax.psum(lax.scan(body, start, us)[0], "model")


def scores_scaled(q, k):
    """The contracted dim is split; its length is the square of a number that is the axis size as
    well."""
    return jax.nn.softmax(lax.psum(q @ k.T, "model") / jnp.sqrt(16.0), -1)


def named(x):
    """Names for `jax.checkpoint` change no value."""
    mean = checkpoint_name(x.mean(0), "mean")
    share = checkpoint_name(checkpoint_name(x.sum(0), "sum") / len(x), "share")
    shift = jnp.log(lax.psum(checkpoint_name(jnp.exp(x), "exp").sum(0), "data"))
    return lax.pmean(mean, "data") + lax.pmean(share, "data") + shift


U, V, BIAS = draw(16, 32, seed=1), draw(32, 24, seed=2), draw(24, seed=3)
MATMUL, ROWS = (PS("data", "model"), PS("model", None)), PS("data", None)
SPLIT_ROWS = PS("model", None)

PROGRAMS = {
    "ring_attention": Program(
        mapped(ring_attention, (SPLIT_ROWS,) * 3, SPLIT_ROWS), attention_of_rows, (Q, K, VALUES)
    ),
    "ring_product": Program(
        mapped(ring_product, (SPLIT_ROWS, PS(None, "model")), PS(None, "model")),
        lambda x, w: x @ w,
        (X, W1),
        vma=(False,),
    ),
    "ring_sum": Program(
        mapped(ring_sum, (PS("model"),), PS()),
        lambda x: x.reshape(N_MODEL, -1, x.shape[1]).sum(0),
        (X,),
        vma=(False,),
        notes=("differs-on-one-device",),
    ),
    "split_keys": Program(
        mapped(split_keys, (PS(), SPLIT_ROWS, SPLIT_ROWS), PS()), attention_of_rows, (Q, K, VALUES)
    ),
    "split_keys_gathered": Program(
        mapped(split_keys_gathered, (PS(), SPLIT_ROWS, SPLIT_ROWS), PS()),
        attention_of_rows,
        (Q, K, VALUES),
        vma=(False,),
    ),
    "pipeline": Program(
        mapped(pipeline, (PS("model"), PS()), PS()), pipeline_reference, (STAGES, MICRO)
    ),
    "heads_for_tokens": Program(
        mapped(heads_for_tokens, (PS("model"),), PS("model")),
        heads_reference,
        (draw(8, 4, 6, seed=70),),
    ),
    "reduce_scatter_by_hand": Program(
        mapped(
            lambda u, v: lax.all_to_all(
                (u @ v).reshape(N_MODEL, -1, v.shape[1]), "model", 0, 0
            ).sum(0),
            (PS(None, "model"), PS("model", None)),
            SPLIT_ROWS,
        ),
        lambda u, v: u @ v,
        (U, V),
    ),
    "gathered_and_summed": Program(
        mapped(lambda u, v: lax.all_gather(u @ v, "model").sum(0), MATMUL, ROWS),
        lambda u, v: u @ v,
        (U, V),
        vma=(False,),
    ),
    "bias_on_first": Program(
        mapped(
            lambda u, v, b: lax.psum(
                u @ v + jnp.where(lax.axis_index("model") == 0, b, 0.0), "model"
            ),
            (*MATMUL, PS()),
            ROWS,
        ),
        lambda u, v, b: u @ v + b,
        (U, V, BIAS),
    ),
    "bias_shared": Program(
        mapped(
            lambda u, v, b: lax.psum(u @ v + b / lax.axis_size("model"), "model"),
            (*MATMUL, PS()),
            ROWS,
        ),
        lambda u, v, b: u @ v + b,
        (U, V, BIAS),
    ),
    "power_iteration": Program(
        mapped(power_iteration, (SPLIT_ROWS,), PS()), power_reference, (SYMMETRIC,), vma=(False,)
    ),
    "standard": Program(
        mapped(standard, (PS("data"),), PS("data")),
        lambda x: (x - x.mean(0)) / jnp.sqrt(x.var(0) + 1e-3),
        (X,),
    ),
    "parts_side_by_side": Program(
        mapped(
            lambda x: ((x * x).sum()[None], lax.psum((x * x).sum(), "data")),
            (PS("data"),),
            (PS("data"), PS()),
        ),
        lambda x: ((x * x).reshape(N_DATA, -1).sum(1), (x * x).sum()),
        (X,),
        notes=("differs-on-one-device",),
    ),
    "dropped": Program(mapped(dropped, (PS("data"),), PS()), lambda x: x.mean(), (X,)),
    "half_precision": Program(
        mapped(half_precision, MATMUL, ROWS),
        lambda u, v: (
            u.astype(jnp.bfloat16).astype(jnp.float32) @ v.astype(jnp.bfloat16).astype(jnp.float32)
        ),
        (U, V),
    ),
    "deferred": Program(
        mapped(deferred, (PS(None, "data", "model"), PS("model", None)), ROWS),
        lambda us, v: 2.0 * (us @ v).sum(0),
        (draw(3, 16, 32, seed=8), V),
    ),
    "scores_scaled": Program(
        mapped(scores_scaled, (PS(None, "model"), PS(None, "model")), PS()),
        lambda q, k: jax.nn.softmax(q @ k.T / 4.0, -1),
        (Q, K),
    ),
    "named": Program(
        mapped(named, (PS("data"),), PS()),
        lambda x: 2 * x.mean(0) + jnp.log(jnp.exp(x).sum(0)),
        (X,),
    ),
}
