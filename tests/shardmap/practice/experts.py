"""Expert parallelism and pipelines."""

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec as P

from tests.shardmap.practice.case import case, floats


def routed(x, router, w1, w2):
    """Top-1 routing in groups; each token has a place, for the capacity is the size of a group."""
    gates = jax.nn.softmax(x @ router)
    hot = jax.nn.one_hot(jnp.argmax(gates, -1), router.shape[1])
    place = (jnp.cumsum(hot, 1) * hot).sum(-1).astype(int) - 1
    dispatch = hot[..., None] * jax.nn.one_hot(place, x.shape[1])[..., None, :]
    h = jax.nn.relu(jnp.einsum("egcm,emh->egch", jnp.einsum("gsec,gsm->egcm", dispatch, x), w1))
    out = jnp.einsum("egch,ehm->egcm", h, w2)
    return jnp.einsum("gsec,egcm->gsm", dispatch * gates.max(-1)[..., None, None], out)


@case(
    {"expert": 4},
    routed,
    lambda: floats((4, 6, 8), (8, 8), (8, 8, 16), (8, 16, 8)),
    "not sent back",
    "not sent at all",
    "sent back along the wrong dims",
    ins=(P("expert"), P(), P("expert"), P("expert")),
    outs=P("expert"),
)
def expert_parallel(bug, x, router, w1, w2):
    gates = jax.nn.softmax(x @ router)
    hot = jax.nn.one_hot(jnp.argmax(gates, -1), router.shape[1])
    place = (jnp.cumsum(hot, 1) * hot).sum(-1).astype(int) - 1
    dispatch = hot[..., None] * jax.nn.one_hot(place, x.shape[1])[..., None, :]
    tokens = jnp.einsum("gsec,gsm->egcm", dispatch, x)
    if bug == "not sent at all":
        tokens = tokens.reshape(w1.shape[0], -1, *tokens.shape[2:])
    else:
        tokens = lax.all_to_all(tokens, "expert", 0, 1, tiled=True)
    out = jnp.einsum("egch,ehm->egcm", jax.nn.relu(jnp.einsum("egcm,emh->egch", tokens, w1)), w2)
    if bug in ("not sent back", "not sent at all"):
        out = out.reshape(router.shape[1], -1, *out.shape[2:])
    elif bug == "sent back along the wrong dims":
        out = lax.all_to_all(out, "expert", 1, 1, tiled=True)
        out = out.reshape(router.shape[1], -1, *out.shape[2:])
    else:
        out = lax.all_to_all(out, "expert", 1, 0, tiled=True)
    return jnp.einsum("gsec,egcm->gsm", dispatch * gates.max(-1)[..., None, None], out)


def dense_experts(x, router, w1, w2):
    gates = jax.nn.softmax(x @ router)
    return jnp.einsum("te,teh,ehm->tm", gates, jax.nn.relu(jnp.einsum("tm,emh->teh", x, w1)), w2)


@case(
    {"expert": 8},
    dense_experts,
    lambda: floats((6, 8), (8, 8), (8, 8, 4), (8, 4, 8)),
    "softmax over local experts",
    "gates of the first experts",
    "missing psum",
    ins=(P(), P(), P("expert"), P("expert")),
    outs=P(),
)
def dense_mixture(bug, x, router, w1, w2):
    """Every expert sees every token; a device takes the gates of its own experts."""
    n = w1.shape[0]
    logits = x @ router
    mine = lax.axis_index("expert") * n
    if bug == "softmax over local experts":
        gates = jax.nn.softmax(lax.dynamic_slice_in_dim(logits, mine, n, 1))
    elif bug == "gates of the first experts":
        gates = jax.nn.softmax(logits)[:, :n]
    else:
        gates = lax.dynamic_slice_in_dim(jax.nn.softmax(logits), mine, n, 1)
    h = jax.nn.relu(jnp.einsum("tm,emh->teh", x, w1))
    y = jnp.einsum("te,teh,ehm->tm", gates, h, w2)
    return y if bug == "missing psum" else lax.psum(y, "expert")


def stages(x, w):
    for i in range(w.shape[0]):
        x = jnp.tanh(x @ w[i])
    return x


@case(
    {"stage": 4},
    stages,
    lambda: floats((6, 2, 5), (4, 5, 5)),
    "result of the first stage",
    "one tick short",
    "sent backwards",
    "not selected before psum",
    ins=(P(), P("stage")),
    outs=P(),
)
def pipeline(bug, x, w):
    """Six microbatches through four stages, a stage per device."""
    n, me = lax.axis_size("stage"), lax.axis_index("stage")
    micro = x.shape[0]
    step = -1 if bug == "sent backwards" else 1
    ring = [(i, (i + step) % n) for i in range(n)]
    state, outs = jnp.zeros_like(x[0]), jnp.zeros_like(x)

    def tick(t, carry):
        state, outs = carry
        fresh = lax.dynamic_index_in_dim(x, jnp.minimum(t, micro - 1), keepdims=False)
        state = jnp.tanh(jnp.where(me == 0, fresh, state) @ w[0])
        at = jnp.clip(t - (n - 1), 0, micro - 1)
        old = lax.dynamic_index_in_dim(outs, at, keepdims=False)
        new = jnp.where((me == n - 1) & (t >= n - 1), state, old)
        outs = lax.dynamic_update_index_in_dim(outs, new, at, 0)
        return lax.ppermute(state, "stage", ring), outs

    ticks = micro + n - (2 if bug == "one tick short" else 1)
    _, outs = lax.fori_loop(0, ticks, tick, (state, outs))
    if bug == "not selected before psum":
        return lax.pmean(outs, "stage")
    last = 0 if bug == "result of the first stage" else n - 1
    return lax.psum(jnp.where(me == last, outs, 0.0), "stage")
