"""Attention and recurrences over split sequences."""

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import PartitionSpec as P

from tests.shardmap.practice.case import case, floats

full_attention = lambda q, k, v: jax.nn.softmax(q @ k.T / np.sqrt(q.shape[1])) @ v


@case(
    {"seq": 8},
    full_attention,
    lambda: floats((16, 4), (16, 4), (16, 4)),
    "one step short",
    "sum not rescaled",
    "only keys go round",
    ins=(P("seq"),) * 3,
    outs=P("seq"),
)
def ring_attention(bug, q, k, v):
    n = lax.axis_size("seq")
    ring = [(i, (i + 1) % n) for i in range(n)]

    def step(carry, _):
        k, v, top, total, out = carry
        s = q @ k.T / np.sqrt(q.shape[1])
        new = jnp.maximum(top, s.max(1))
        p = jnp.exp(s - new[:, None])
        scale = jnp.exp(top - new)
        out = out * scale[:, None] + p @ v
        total = (total if bug == "sum not rescaled" else total * scale) + p.sum(1)
        k = lax.ppermute(k, "seq", ring)
        v = v if bug == "only keys go round" else lax.ppermute(v, "seq", ring)
        return (k, v, new, total, out), None

    start = (
        k,
        v,
        jnp.full(q.shape[0], -jnp.inf),
        jnp.zeros(q.shape[0]),
        jnp.zeros((q.shape[0], v.shape[1])),
    )
    length = n - 1 if bug == "one step short" else n
    (_, _, _, total, out), _ = lax.scan(step, start, None, length=length)
    return out / total[:, None]


def causal(q, k, v):
    s = jnp.einsum("qhd,khd->hqk", q, k)
    s = jnp.where(jnp.tril(jnp.ones(s.shape[-2:], bool)), s, -jnp.inf)
    return jnp.einsum("hqk,khd->qhd", jax.nn.softmax(s), v)


@case(
    {"seq": 4},
    causal,
    lambda: floats((16, 2, 4), (16, 2, 4), (16, 2, 4)),
    "key offset of the wrong device",
    "mask by local position",
    ins=(P("seq"),) * 3,
    outs=P("seq"),
)
def causal_ring_attention(bug, q, k, v):
    n, me = lax.axis_size("seq"), lax.axis_index("seq")
    c = q.shape[0]
    rows = me * c + jnp.arange(c)

    def step(i, carry):
        k, v, top, total, out = carry
        owner = (me + i) % n if bug == "key offset of the wrong device" else (me - i) % n
        cols = owner * c + jnp.arange(c)
        s = jnp.einsum("qhd,khd->hqk", q, k)
        mask = rows[:, None] >= cols[None]
        mask = jnp.tril(jnp.ones((c, c), bool)) if bug == "mask by local position" else mask
        s = jnp.where(mask, s, -1e30)
        new = jnp.maximum(top, s.max(-1))
        p = jnp.where(mask, jnp.exp(s - new[..., None]), 0.0)
        scale = jnp.exp(top - new)
        out = out * scale[..., None] + jnp.einsum("hqk,khd->hqd", p, v)
        total = total * scale + p.sum(-1)
        k, v = lax.ppermute((k, v), "seq", [(j, (j + 1) % n) for j in range(n)])
        return k, v, new, total, out

    heads = q.shape[1]
    zero = jnp.zeros((heads, c))
    carry = (k, v, zero - 1e30, zero, jnp.zeros((heads, c, v.shape[2])))
    _, _, _, total, out = lax.fori_loop(0, n, step, carry)
    return jnp.transpose(out / total[..., None], (1, 0, 2))


@case(
    {"seq": 4},
    causal,
    lambda: floats((8, 4, 4), (8, 4, 4), (8, 4, 4)),
    "not exchanged back",
    "values not exchanged",
    "heads gathered in place of exchanged",
    ins=(P("seq"),) * 3,
    outs=P("seq"),
)
def ulysses(bug, q, k, v):
    to_heads = lambda x: lax.all_to_all(x, "seq", split_axis=1, concat_axis=0, tiled=True)
    to_seq = lambda x: lax.all_to_all(x, "seq", split_axis=0, concat_axis=1, tiled=True)

    if bug == "values not exchanged":
        q, k = to_heads(q), to_heads(k)
        v = jnp.tile(v[:, :1], (q.shape[0] // v.shape[0], 1, 1))
    else:
        q, k, v = to_heads(q), to_heads(k), to_heads(v)
    out = causal(q, k, v)
    if bug == "not exchanged back":
        return out.reshape(-1, 4, out.shape[2])
    if bug == "heads gathered in place of exchanged":
        out = lax.all_gather(out, "seq", axis=1, tiled=True)
        return out[: out.shape[0] // 4]
    return to_seq(out)


def decode(q, keys, values, length):
    s = jnp.einsum("bd,btd->bt", q, keys)
    s = jnp.where(jnp.arange(keys.shape[1]) < length, s, -1e30)
    return jnp.einsum("bt,btd->bd", jax.nn.softmax(s), values)


cache = lambda: (*floats((4, 8), (4, 32, 8), (4, 32, 8)), np.int32(21))


@case(
    {"seq": 8},
    decode,
    cache,
    "local softmax",
    "mask by local position",
    "outputs not rescaled",
    "denominator local",
    ins=(P(), P(None, "seq"), P(None, "seq"), P()),
    outs=P(),
)
def split_cache_decode(bug, q, keys, values, length):
    n = keys.shape[1]
    place = jnp.arange(n)
    place = place if bug == "mask by local position" else place + lax.axis_index("seq") * n
    s = jnp.einsum("bd,btd->bt", q, keys)
    s = jnp.where(place < length, s, -1e30)
    if bug == "local softmax":
        return lax.psum(jnp.einsum("bt,btd->bd", jax.nn.softmax(s), values), "seq")
    top = s.max(1)
    shared = top if bug == "outputs not rescaled" else lax.pmax(top, "seq")
    p = jnp.exp(s - shared[:, None])
    out = lax.psum(jnp.einsum("bt,btd->bd", p, values), "seq")
    total = p.sum(1)
    total = total if bug == "denominator local" else lax.psum(total, "seq")
    return out / total[:, None]


@case(
    {"seq": 8},
    decode,
    cache,
    "weights not divided",
    "averaged",
    ins=(P(), P(None, "seq"), P(None, "seq"), P()),
    outs=P(),
)
def lse_combine(bug, q, keys, values, length):
    """Each device gives its output and log-sum-exp; the combination is by weights."""
    n = keys.shape[1]
    place = lax.axis_index("seq") * n + jnp.arange(n)
    s = jnp.where(place < length, jnp.einsum("bd,btd->bt", q, keys), -1e30)
    lse = jax.nn.logsumexp(s, 1)
    out = jnp.einsum("bt,btd->bd", jax.nn.softmax(s), values)
    if bug == "averaged":
        return lax.pmean(out, "seq")
    outs, lses = lax.all_gather((out, lse), "seq")
    if bug == "weights not divided":
        weights = jnp.exp(lses - lses.max(0))
    else:
        weights = jax.nn.softmax(lses, 0)
    return jnp.einsum("nb,nbd->bd", weights, outs)


def recurrence(a, b):
    def step(h, ab):
        h = ab[0] * h + ab[1]
        return h, h

    return lax.scan(step, jnp.zeros(b.shape[1:]), (a, b))[1]


@case(
    {"seq": 4},
    recurrence,
    lambda: (jax.nn.sigmoid(floats((16, 3))[0]), floats((16, 3), seed=4)[0]),
    "prefix not applied",
    "own shard in the prefix",
    ins=(P("seq"), P("seq")),
    outs=P("seq"),
)
def linear_recurrence(bug, a, b):
    """A diagonal linear recurrence: local scan, exchange of the ends, correction."""

    combine = lambda left, right: (left[0] * right[0], right[0] * left[1] + right[1])
    decay, local = lax.associative_scan(combine, (a, b))
    if bug == "prefix not applied":
        return local
    ends = lax.all_gather((decay[-1], local[-1]), "seq")
    me = lax.axis_index("seq")
    h = jnp.zeros_like(b[0])
    for i in range(lax.axis_size("seq")):
        reached = i <= me if bug == "own shard in the prefix" else i < me
        h = jnp.where(reached, ends[0][i] * h + ends[1][i], h)
    return local + decay * h


def conv(x, w):
    padded = jnp.pad(x, ((0, 0), (1, 1), (0, 0)))
    return sum(padded[:, i : i + x.shape[1]] @ w[i] for i in range(3))


@case(
    {"space": 8},
    conv,
    lambda: floats((2, 32, 3), (3, 3, 5)),
    "no halo",
    "neighbours swapped",
    "wraps around",
    ins=(P(None, "space"), P()),
    outs=P(None, "space"),
)
def halo_convolution(bug, x, w):
    n = lax.axis_size("space")
    right = [(i, i + 1) for i in range(n - 1)]
    left = [(i + 1, i) for i in range(n - 1)]
    if bug == "neighbours swapped":
        right, left = left, right
    if bug == "wraps around":
        right.append((n - 1, 0))
    before = lax.ppermute(x[:, -1:], "space", right)
    after = lax.ppermute(x[:, :1], "space", left)
    if bug == "no halo":
        before, after = jnp.zeros_like(before), jnp.zeros_like(after)
    padded = jnp.concatenate([before, x, after], 1)
    return sum(padded[:, i : i + x.shape[1]] @ w[i] for i in range(3))
