"""Layers of the GShard Transformer as plain functions of plain pytrees; activations are [G, S, M].

Dims: G groups, n sequences per group, T tokens per sequence, S = n * T, M model, A heads of width
D, H hidden.
"""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from sbp.moe.config import ModelConfig

Params = Mapping[str, jax.Array]


def wide_dtype(dtype: Any) -> jnp.dtype:
    """The dtype of statistics over values of a dtype.

    >>> wide_dtype("bfloat16"), wide_dtype("float64")
    (dtype('float32'), dtype('float64'))
    """
    return jnp.promote_types(dtype, jnp.float32)


_WIDE = ("norm", "gate", "noise", "bias")
"""Weights that are used as they are: of norms and routers."""


def cast_weights(params: Any, dtype: Any) -> Any:
    """The weights of a layer in the dtype in which it computes, but those of norms and routers."""

    def cast(path: tuple[Any, ...], w: jax.Array) -> jax.Array:
        return w if path[-1].key in _WIDE else w.astype(dtype)

    return jax.tree_util.tree_map_with_path(cast, params)


def rms_norm(x: jax.Array, scale: jax.Array) -> jax.Array:
    """Scale-only root-mean-square norm over the last dim, as lingvo's GShard models have it
    (epsilon 1e-6); in float32 at least."""
    wide = x.astype(wide_dtype(x.dtype))
    y = wide * jax.lax.rsqrt(jnp.mean(wide * wide, axis=-1, keepdims=True) + 1e-6) * scale
    return y.astype(x.dtype)


def dropout(x: jax.Array, rate: float, key: jax.Array | None) -> jax.Array:
    """Zero entries with probability `rate` and scale the others up; the identity when `key` is
    None."""
    if key is None or rate == 0.0:
        return x
    keep = jax.random.bernoulli(key, 1.0 - rate, x.shape)
    return jnp.where(keep, x / (1.0 - rate), jnp.zeros_like(x))


def subkey(key: jax.Array | None, index: int | jax.Array) -> jax.Array | None:
    """The key of place `index` under `key`; None stays None (not training)."""
    return None if key is None else jax.random.fold_in(key, index)


def feed_forward(params: Params, x: jax.Array) -> jax.Array:
    """Dense feed-forward: relu(x @ w_in) @ w_out, for x [G, S, M]; no biases."""
    return jax.nn.relu(x @ params["w_in"]) @ params["w_out"]


# ---- attention ----------------------------------------------------------------------------------
# Attention inside each sequence, and the positions of tokens. Dims: G groups, n sequences of a
# group, T tokens of one, M model, A heads of queries and K heads of keys and values, of width D.


class KeysValues(NamedTuple):
    """What attention looks at, both [G, n, K, T', D]."""

    keys: jax.Array
    values: jax.Array


class Rotary(NamedTuple):
    """Rotary positions (RoFormer, Su et al. 2021, section 3.2.2): entries i and i + D / 2 of a head
    are turned by the angle place * base ** (-2 i / D), so that the product of a query and a key
    depends on how far apart they are.

    Attributes:
      places: [T] or [G, n, T], of each token.
      base: what makes the wavelengths; 10,000 in the paper.
    """

    places: jax.Array
    base: float

    def __call__(self, x: jax.Array) -> jax.Array:
        """Heads [G, n, A, T, D], turned; in float32 at least.

        >>> rotary = Rotary(jnp.array([0, 1]), 10_000.0)
        >>> rotary(jnp.ones((1, 1, 1, 2, 2)))[0, 0, 0].round(2).tolist()[0]
        [1.0, 1.0]
        """
        wide, half = wide_dtype(x.dtype), x.shape[-1] // 2
        rates = jnp.asarray(self.base ** -(np.arange(half) / half), wide)
        angles = self.places[..., None, :, None].astype(wide) * rates
        cos, sin = jnp.cos(angles), jnp.sin(angles)
        a, b = x[..., :half].astype(wide), x[..., half:].astype(wide)
        return jnp.concatenate([a * cos - b * sin, a * sin + b * cos], axis=-1).astype(x.dtype)


def keys_values(
    params: Params, memory: jax.Array, sequences: int, rotary: Rotary | None = None
) -> KeysValues:
    """Keys and values of tokens [G, S', M], with n sequences in a group; keys turned by their
    places."""
    groups, size, width = memory.shape
    rows = memory.reshape(groups, sequences, size // sequences, width)
    keys = jnp.einsum("gnum,mad->gnaud", rows, params["key"])
    values = jnp.einsum("gnum,mad->gnaud", rows, params["value"])
    return KeysValues(rotary(keys) if rotary else keys, values)


def attention(
    params: Params,
    x: jax.Array,
    memory: KeysValues,
    allowed: jax.Array,
    *,
    rotary: Rotary | None = None,
    drop: Callable[[jax.Array], jax.Array] | None = None,
) -> jax.Array:
    """Multi-head attention inside each sequence.

    Each head of keys and values serves A / K heads of queries, one behind the other (grouped-query
    attention, Ainslie et al. 2023). There is no 1/sqrt(D): it is
    folded into the initial scale of `query`.

    Arguments:
      params: query [M, A, D], output [A, D, M].
      x: [G, S, M] queries.
      memory: keys and values of T' tokens of each sequence.
      allowed: [G, n, T or 1, T'], true where a query may look; n is the sequences per group.
      rotary: the places of the queries; None without rotary positions.
      drop: dropout, of the attention weights.

    Returns:
      [G, S, M].
    """
    (groups, size, width), sequences = x.shape, allowed.shape[1]
    queries = x.reshape(groups, sequences, size // sequences, width)
    q = jnp.einsum("gntm,mad->gnatd", queries, params["query"])
    q = rotary(q) if rotary else q
    heads, shared = q.shape[2], memory.keys.shape[2]
    a = "a" if heads == shared else "ar"  # r: the queries of one head of keys
    if heads != shared:
        q = q.reshape(*q.shape[:2], shared, heads // shared, *q.shape[3:])
    wide = wide_dtype(x.dtype)
    scores = jnp.einsum(f"gn{a}td,gnaud->gn{a}tu", q, memory.keys, preferred_element_type=wide)
    # A finite minimum: a row of padding alone stays finite (uniform), where -inf would give NaN.
    seen = jnp.expand_dims(allowed, range(2, 2 + len(a)))
    scores = jnp.where(seen, scores, jnp.asarray(-1e9, scores.dtype))
    weights = jax.nn.softmax(scores, axis=-1).astype(x.dtype)
    weights = drop(weights) if drop else weights
    mixed = jnp.einsum(f"gn{a}tu,gnaud->gn{a}td", weights, memory.values)
    if heads != shared:
        mixed = mixed.reshape(*mixed.shape[:2], heads, *mixed.shape[4:])
    return jnp.einsum("gnatd,adm->gntm", mixed, params["output"]).reshape(groups, size, width)


def positions(length: int, width: int) -> np.ndarray:
    """Sinusoidal position signal [T, M] (sines, then cosines; wavelengths 2 pi to 10 000 * 2 pi),
    float64. An odd width has a last column of zeros, as in Tensor2Tensor."""
    rates = 10_000.0 ** -(np.arange(width // 2) / max(width // 2 - 1, 1))
    angles = np.arange(length)[:, None] * rates[None, :]
    zeros = np.zeros((length, width % 2))
    return np.concatenate([np.sin(angles), np.cos(angles), zeros], axis=-1)


# ---- packing ------------------------------------------------------------------------------------
# Rows of a batch that hold several pairs of sequences.


Array = Any  # a jax.Array inside a step, a numpy array outside


class Segments(NamedTuple):
    """Which pair of its row each token belongs to, int32: 1 for the first, 0 where padded.

    Attributes:
      source: [..., T_source].
      target: [..., T_target].
    """

    source: Array
    target: Array


def same_segment(queries: jax.Array, keys: jax.Array) -> jax.Array:
    """Whether two tokens are of one pair: [..., T] and [..., T'] to [..., T, T']."""
    return queries[..., :, None] == keys[..., None, :]


def places(segments: jax.Array) -> jax.Array:
    """The place of each token in its own segment [..., T], from 0.

    >>> places(np.array([1, 1, 1, 2, 2, 0]))[:5].tolist()
    [0, 1, 2, 0, 1]
    """
    before = np.tri(segments.shape[-1], k=-1, dtype=bool)
    return jnp.sum(same_segment(segments, segments) & before, axis=-1, dtype=jnp.int32)


def signal_of(cfg: ModelConfig, length: int, segments: jax.Array | None) -> jax.Array | None:
    """What is added to embeddings, None with rotary positions: the position signal of T tokens,
    [T, M]; of packed ones [..., T], counted from the start of each segment: [..., T, M]."""
    if cfg.position == "rotary":
        return None
    table = jnp.asarray(positions(length, cfg.model_dim))
    return table if segments is None else jnp.take(table, places(segments), axis=0)
