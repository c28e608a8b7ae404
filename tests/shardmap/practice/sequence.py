"""Attention, recurrences and convolutions over split sequences, and programs that send values from
device to device."""

from dataclasses import dataclass
from functools import partial, reduce

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


# ---- values that go round: written after the comparison with one device -------------------------


@case(
    {"ring": 4},
    lambda x: 2 * x + x.sum(0),
    lambda: floats((16, 8)),
    "chunk of the wrong device gathered",
    "one hop short in the gathering",
    ins=(P("ring"),),
    outs=P("ring"),
)
def ring_all_reduce(bug, x):
    """The sums of all rows: chunks are added up on their way round, then go round whole."""
    n, me = lax.psum(1, "ring"), lax.axis_index("ring")
    right = [(i, (i + 1) % n) for i in range(n)]
    chunks = x.sum(0).reshape(n, -1)
    for i in range(n - 1):
        sent = lax.dynamic_index_in_dim(chunks, (me - i) % n, 0, keepdims=False)
        got = lax.ppermute(sent, "ring", right)
        chunks = chunks.at[(me - i - 1) % n].add(got)
    hops = n - 2 if bug == "one hop short in the gathering" else n - 1
    for i in range(hops):
        sent = lax.dynamic_index_in_dim(chunks, (me + 1 - i) % n, 0, keepdims=False)
        got = lax.ppermute(sent, "ring", right)
        at = me - i - 1 if bug == "chunk of the wrong device gathered" else me - i
        chunks = chunks.at[at % n].set(got)
    return 2 * x + chunks.reshape(-1)


@case(
    {"stage": 4},
    lambda x, w: reduce(lambda x, w: x + jax.nn.relu(x @ w), w, x),
    lambda: (floats((5, 3, 6))[0], floats((8, 6, 6), seed=3)[0] * 0.4),
    "collected one tick early",
    "stages of one layer",
)
def pipeline_of_layers(bug):
    """Eight layers on four devices, as a scan over ticks with the number of stages in a closure."""
    stages = 4

    def stage(x, w):
        if bug == "stages of one layer":
            return x + jax.nn.relu(x @ w[0])
        return lax.scan(lambda x, w: (x + jax.nn.relu(x @ w), None), x, w)[0]

    def region(x, w):
        me, count = lax.axis_index("stage"), x.shape[0]
        ahead = [(i, i + 1) for i in range(stages - 1)]

        def tick(carry, t):
            held, done = carry
            held = jnp.where(me == 0, x[jnp.clip(t, 0, count - 1)], held)
            held = stage(held, w)
            at = t - stages + (2 if bug == "collected one tick early" else 1)
            done = jnp.where(at >= 0, done.at[jnp.clip(at, 0, count - 1)].set(held), done)
            return (lax.ppermute(held, "stage", ahead), done), None

        start = jnp.zeros_like(x[0]), jnp.zeros_like(x)
        (_, done), _ = lax.scan(tick, start, jnp.arange(count + stages - 1))
        return lax.psum(jnp.where(me == stages - 1, done, 0.0), "stage")

    return region, (P(), P("stage")), P()


@dataclass(frozen=True)
class Settings:
    axis: str = "model"
    devices: int = 8


@case(
    {"model": 8},
    lambda x, w: x @ w,
    lambda: floats((16, 24), (24, 5)),
    "own block left out",
)
def matmul_scattered_in_a_ring(bug):
    """Columns of x and rows of w are split; the sum of a block of rows is added up on its way to
    the device that keeps it."""

    def region(settings, x, w):
        n, me = settings.devices, lax.axis_index(settings.axis)
        rows = x.shape[0] // n
        total = jnp.zeros((rows, w.shape[1]))
        for i in range(1, n if bug == "own block left out" else n + 1):
            total = total + lax.dynamic_slice_in_dim(x, (me - i) % n * rows, rows) @ w
            if i < n:
                total = lax.ppermute(total, settings.axis, [(j, (j + 1) % n) for j in range(n)])
        return total

    return partial(region, Settings()), (P(None, "model"), P("model")), P("model")


@case(
    {"time": 8},
    recurrence,
    lambda: (0.9 + 0.1 * jax.nn.sigmoid(floats((32, 3))[0]), floats((32, 3), seed=8)[0]),
    "last doubling left out",
    ins=(P("time"), P("time")),
    outs=P("time"),
)
def recurrence_by_doubling(bug, a, b):
    """The ends of the shards are combined in log2(n) steps, each over twice the distance."""
    n, me = lax.axis_size("time"), lax.axis_index("time")
    decay, local = lax.associative_scan(lambda x, y: (x[0] * y[0], y[0] * x[1] + y[1]), (a, b))
    end_a, end_b = decay[-1], local[-1]
    distance = 1
    while distance < (n // 2 if bug == "last doubling left out" else n):
        pairs = [(i, i + distance) for i in range(n - distance)]
        far_a, far_b = lax.ppermute((end_a, end_b), "time", pairs)
        reached = me >= distance
        end_b = jnp.where(reached, end_a * far_b + end_b, end_b)
        end_a = jnp.where(reached, far_a * end_a, end_a)
        distance *= 2
    before = lax.ppermute(end_b, "time", [(i, i + 1) for i in range(n - 1)])
    return local + decay * before
