"""Right programs that use the index of a device or an exchange."""

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import PartitionSpec as PS

from tests.shardmap.programs.kinds import N_MODEL, Program, draw, mapped
from tests.shardmap.programs.wrong.vocabulary import own_lookup

ROWS = PS("model")

# ---- sequences ----------------------------------------------------------------------------------

S, HEADS, D = 16, 4, 8
Q, K, V = draw(S, HEADS, D, seed=120), draw(S, HEADS, D, seed=121), draw(S, HEADS, D, seed=122)


def turned(x, at):
    """Rotary embedding (https://arxiv.org/abs/2104.09864) of x [place, head, feature]."""
    angle = at[:, None, None] * 0.1 ** jnp.arange(D // 2)
    a, b = jnp.split(x, 2, -1)
    return jnp.concatenate(
        [a * jnp.cos(angle) - b * jnp.sin(angle), a * jnp.sin(angle) + b * jnp.cos(angle)], -1
    )


def attended(q, k, v, at):
    """Attention of queries at these places to the keys up to them."""
    scores = jnp.einsum("qhd,khd->hqk", q, k)
    scores = jnp.where(jnp.arange(k.shape[0])[None, :] <= at[:, None], scores, -jnp.inf)
    return jnp.einsum("hqk,khd->qhd", jax.nn.softmax(scores, -1), v)


def attention(q, k, v):
    at = jnp.arange(q.shape[0])
    return attended(turned(q, at), turned(k, at), v, at)


def places(x):
    """The places of a device's rows."""
    return lax.axis_index("model") * x.shape[0] + jnp.arange(x.shape[0])


def attention_by_heads(q, k, v):
    """DeepSpeed-Ulysses (https://arxiv.org/abs/2309.14509): an exchange from sequences to heads and
    back. The local values weigh the result."""
    at = places(q)
    q, k = turned(q, at), turned(k, at)
    heads_q, heads_k, heads_v = (lax.all_to_all(x, "model", 1, 0, tiled=True) for x in (q, k, v))
    out = attended(heads_q, heads_k, heads_v, jnp.arange(heads_q.shape[0]))
    return q * lax.all_to_all(out, "model", 0, 1, tiled=True)


def gathered_keys(q, k, v):
    at = places(q)
    k, v = (lax.all_gather(x, "model", axis=0, tiled=True) for x in (turned(k, at), v))
    return attended(turned(q, at), k, v, at)


CACHE, NEW, PLACE = draw(32, 8, seed=123), draw(8, seed=124), np.int32(13)


def written_where_it_belongs(cache, new, place):
    here = place - lax.axis_index("model") * cache.shape[0]
    mine = (here >= 0) & (here < cache.shape[0])
    return jnp.where(mine, cache.at[jnp.clip(here, 0, cache.shape[0] - 1)].set(new), cache)


def written_by_a_mask(cache, new, place):
    return jnp.where((places(cache) == place)[:, None], new, cache)


def read_by_a_mask(cache, place):
    return lax.psum(jnp.where((places(cache) == place)[:, None], cache, 0.0).sum(0), "model")


def upper(x):
    at = lax.axis_index("model") * x.shape[0] + lax.broadcasted_iota(jnp.int32, x.shape, 0)
    return jnp.where(at <= lax.broadcasted_iota(jnp.int32, x.shape, 1), x, 0.0)


def numbered(x):
    """Each device returns its index as one element, and its places side by side."""
    return lax.axis_index("model")[None], places(x) * 2 + 1


def squares_of_lookups(table, ids):
    """A lookup is zero on all devices but one, so that its squares add up."""
    return lax.psum(2.0 * (jnp.tanh(2.0 * own_lookup(table, ids)) ** 2).sum(), "model")


# ---- blocks -------------------------------------------------------------------------------------

WHOLE, U = draw(16, 12, seed=125), draw(16, 16, seed=126)


def own_block_of_sum(x):
    """Each device takes its own rows of a sum."""
    total, rows = lax.psum(x @ x.T, "model"), WHOLE.shape[0] // N_MODEL
    return jnp.tanh(lax.dynamic_slice_in_dim(total, lax.axis_index("model") * rows, rows, 0))


def into_zeros(x):
    """A device writes its rows into zeros."""
    out = jnp.zeros((x.shape[0] * N_MODEL, x.shape[1]))
    return lax.dynamic_update_slice(out, x, (lax.axis_index("model") * x.shape[0], 0))


def rewritten_and_read(w, g):
    """Each device updates its own rows in a copy of the weights, and returns these rows."""
    start = lax.axis_index("model") * g.shape[0]
    mine = lax.dynamic_slice_in_dim(w, start, g.shape[0], 0)
    kept = lax.dynamic_update_slice_in_dim(w, mine - g, start, 0)
    return lax.dynamic_slice_in_dim(kept, start, g.shape[0], 0)


def nested_rows(w):
    rows = w.shape[0] // 8
    return jnp.exp(lax.dynamic_slice_in_dim(w, lax.axis_index(("data", "model")) * rows, rows, 0))


# ---- exchanges ----------------------------------------------------------------------------------


def symmetric(x):
    """x [rows split] times its transpose, element by element, in blocks."""
    rows = x.shape[0]
    other = lax.all_to_all(x.reshape(rows, N_MODEL, rows).transpose(1, 0, 2), "model", 0, 0)
    return x + other.transpose(0, 2, 1).transpose(1, 0, 2).reshape(x.shape)


def embeddings_to_samples(tables, ids, dense):
    """DLRM (https://arxiv.org/abs/1906.00091): tables are split, samples are; embeddings go to the
    samples' devices and meet the dense features there."""
    found = jax.vmap(lambda t, i: t[i], (0, 1), 1)(tables, ids)
    return jnp.einsum("sfd,sd->sf", lax.all_to_all(found, "model", 0, 1, tiled=True), dense)


KEEP = (PS("model"), PS(), PS())

PROGRAMS = {
    "attention_by_heads": Program(
        mapped(attention_by_heads, (ROWS,) * 3, ROWS),
        lambda q, k, v: turned(q, jnp.arange(S)) * attention(q, k, v),
        (Q, K, V),
    ),
    "gathered_keys": Program(mapped(gathered_keys, (ROWS,) * 3, ROWS), attention, (Q, K, V)),
    "written_where_it_belongs": Program(
        mapped(written_where_it_belongs, KEEP, ROWS),
        lambda c, new, place: c.at[place].set(new),
        (CACHE, NEW, PLACE),
    ),
    "written_by_a_mask": Program(
        mapped(written_by_a_mask, KEEP, ROWS),
        lambda c, new, place: c.at[place].set(new),
        (CACHE, NEW, PLACE),
    ),
    "read_by_a_mask": Program(
        mapped(read_by_a_mask, (ROWS, PS()), PS()), lambda c, place: c[place], (CACHE, PLACE)
    ),
    "upper": Program(mapped(upper, (ROWS,), ROWS), jnp.triu, (U,)),
    "numbered": Program(
        mapped(numbered, (ROWS,), ROWS),
        lambda x: (jnp.arange(N_MODEL), 2 * jnp.arange(x.shape[0]) + 1),
        (U,),
        notes=("differs-on-one-device",),
    ),
    "squares_of_lookups": Program(
        mapped(squares_of_lookups, (ROWS, PS()), PS()),
        lambda table, ids: 2.0 * (jnp.tanh(2.0 * table[ids]) ** 2).sum(),
        (draw(32, 8, seed=129), np.asarray([3, 31, 8, 7, 16, 16, 0], np.int32)),
    ),
    "squares_put_together": Program(
        mapped(lambda x: lax.psum(into_zeros(jnp.sin(x)) ** 2, "model"), (ROWS,), PS()),
        lambda x: jnp.sin(x) ** 2,
        (WHOLE,),
    ),
    "own_block_of_sum": Program(
        mapped(own_block_of_sum, (PS(None, "model"),), ROWS),
        lambda x: jnp.tanh(x @ x.T),
        (WHOLE,),
    ),
    # All-gather by hand: the zeros add nothing.
    "put_together": Program(
        mapped(lambda x: lax.psum(into_zeros(jnp.tanh(x)), "model"), (ROWS,), PS()),
        jnp.tanh,
        (WHOLE,),
    ),
    "rewritten_and_read": Program(
        mapped(rewritten_and_read, (PS(), ROWS), ROWS), lambda w, g: w - g, (WHOLE, 0.1 * WHOLE)
    ),
    "nested_rows": Program(mapped(nested_rows, (PS(),), PS(("data", "model"))), jnp.exp, (WHOLE,)),
    "symmetric": Program(mapped(symmetric, (ROWS,), ROWS), lambda x: x + x.T, (U,)),
    "embeddings_to_samples": Program(
        mapped(embeddings_to_samples, (ROWS, PS(None, "model"), ROWS), ROWS),
        lambda tables, ids, dense: jnp.einsum(
            "sfd,sd->sf", jax.vmap(lambda t, i: t[i], (0, 1), 1)(tables, ids), dense
        ),
        (draw(8, 6, 4, seed=128), np.arange(128, dtype=np.int32).reshape(16, 8) % 6, draw(16, 4)),
    ),
}
