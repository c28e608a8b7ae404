"""Right programs whose values go from device to device: rings and pipelines."""

import jax
import jax.numpy as jnp
from jax import lax

from tests.shardmap.programs.kinds import N_MODEL, draw

RING = [(i, (i + 1) % N_MODEL) for i in range(N_MODEL)]
Q, K, VALUES = (draw(32, 16, seed=50 + i) for i in range(3))


def ring_attention(q, k, v):
    """Keys and values go round; a running maximum keeps the exponentials small."""

    def turn(state, _):
        k, v, top, total, out = state
        scores = q @ k.T / 4.0
        new = jnp.maximum(top, scores.max(-1, keepdims=True))
        weights, old = jnp.exp(scores - new), jnp.exp(top - new)
        total, out = total * old + weights.sum(-1, keepdims=True), out * old + weights @ v
        return (
            lax.ppermute(k, "model", RING),
            lax.ppermute(v, "model", RING),
            new,
            total,
            out,
        ), None

    lead = 0.0 * q[:, :1]
    start = (k, v, lead - jnp.inf, lead, 0.0 * q)
    (_, _, _, total, out), _ = lax.scan(turn, start, None, length=N_MODEL)
    return out / total


attention_of_rows = lambda q, k, v: jax.nn.softmax(q @ k.T / 4.0, -1) @ v


def ring_product(x, w):
    """x [rows split] times w [columns split]: blocks of x go round, each fills its rows of the
    result."""
    me, rows = lax.axis_index("model"), x.shape[0]
    out = jnp.zeros((rows * N_MODEL, w.shape[1]))
    for i in range(N_MODEL):
        out = lax.dynamic_update_slice(out, x @ w, (((me - i) % N_MODEL) * rows, 0))
        x = lax.ppermute(x, "model", RING)
    return out


def ring_sum(x):
    total, part = x, x
    for _ in range(N_MODEL - 1):
        part = lax.ppermute(part, "model", RING)
        total = total + part
    return total


STAGES, MICRO = draw(N_MODEL, 8, 8, seed=60) * 0.4, draw(6, 4, 8, seed=61)


def pipeline(stages, micro):
    """A shifting buffer: device i applies stage i; results leave the last one."""
    (w,) = stages
    me, count = lax.axis_index("model"), micro.shape[0]

    def tick(carry, t):
        state, out = carry
        state = jnp.where(me == 0, micro[jnp.minimum(t, count - 1)], state)
        state = jnp.tanh(state @ w)
        place = t - (N_MODEL - 1)
        written = lax.dynamic_update_index_in_dim(out, state, jnp.maximum(place, 0), 0)
        out = jnp.where((me == N_MODEL - 1) & (place >= 0), written, out)
        return (lax.ppermute(state, "model", RING), out), None

    start = (jnp.zeros(micro.shape[1:]), jnp.zeros(micro.shape))
    start = jax.tree.map(lambda x: lax.pcast(x, "model", to="varying"), start)
    (_, out), _ = lax.scan(tick, start, jnp.arange(count + N_MODEL - 1))
    return lax.psum(jnp.where(me == N_MODEL - 1, out, 0.0), "model")
