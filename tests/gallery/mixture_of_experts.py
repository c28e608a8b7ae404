"""GShard's mixture of experts with what went wrong in public implementations of it."""

import jax
import jax.numpy as jnp
from jax import lax

import sbp
from tests.gallery.broken import MESH_2D, broken, f32

G, S, M, E, C, H = 8, 32, 64, 16, 4, 128


@broken(f32(G, S, M), f32(G, S, E, C), f32(E, M, H), cause="tokens are dispatched by groups, experts are held by experts: no all-to-all")
def dispatch_without_all_to_all(x, dispatch, w_in):
    x = sbp.split(x, 0, "model")  # and: x is S(0) on `model`: dim 0 of 8x32x64
    w_in = sbp.split(w_in, 0, "model")  # and: w_in is S(0) on `model`, a batch dim
    dispatched = jnp.einsum("gsec,gsm->egcm", dispatch, x)
    return jax.nn.relu(jnp.einsum("egcm,emh->egch", dispatched, w_in))  # error: no-signature: `jnp.einsum("egcm,emh->egch", dispatched, w_


@broken(f32(E, G, C, H), f32(E, H, M), f32(G, S, E, C), cause="the way back: outputs stay by experts, combine weights are by groups")
def combine_without_all_to_all(hidden, w_out, combine):
    combine = sbp.split(combine, 0, "model")  # and: combine is S(0) on `model`, a batch dim
    hidden = sbp.split(hidden, 0, "model")  # and: hidden is S(0) on `model`: dim 0 of 16x8x4x128
    outputs = jnp.einsum("egch,ehm->egcm", hidden, w_out)
    y = jnp.einsum("gsec,egcm->gsm", combine, outputs)  # error: no-signature: `jnp.einsum("gsec,egcm->gsm", combine, outputs)` has no SBP
    return y


@broken(f32(E, G, C, M), f32(E, M, H), cause="B12: the expert axis holds slots of the capacity instead of experts")
def capacity_split_for_experts(dispatched, w_in):
    w_in = sbp.split(w_in, 0, "model")  # and: w_in is S(0) on `model`, a batch dim
    dispatched = sbp.split(dispatched, 1, "model")  # and: dispatched is S(1) on `model`, not contracted
    return jnp.einsum("egcm,emh->egch", dispatched, w_in)  # error: no-signature: `jnp.einsum("egcm,emh->egch", dispatched, w_in)` has no S


@broken(f32(G, S, E), cause="trap 18: the position of a token in its expert is counted along a split token axis")
def position_along_split_tokens(gates):
    gates = sbp.split(gates, 1, "model")  # and: gates is S(1) on `model`: dim 1 of 8x32x16
    mask = jax.nn.one_hot(jnp.argmax(gates, -1), E)
    position = jnp.cumsum(mask, axis=1) * mask  # error: no-signature: `jnp.cumsum(mask, axis=1)` has no SBP signature on mesh axis `model`
    return position < C


@broken(f32(S, M), f32(M, E), cause="the router's columns are split, and its softmax runs over the experts")
def router_split_by_experts(x, w_gate):
    w_gate = sbp.split(w_gate, 1, "model")  # and: w_gate is S(1) on `model`: dim 1 of 64x16
    logits = x @ w_gate
    return lax.top_k(jax.nn.softmax(logits), 2)  # error: no-signature: `lax.top_k(jax.nn.softmax(logits), 2)` has no SBP signature on mesh


@broken(f32(S, E), f32(S, E), cause="I4, B9: the global auxiliary loss multiplies two means over split tokens before they are taken")
def auxiliary_loss_of_global_means(gates, mask):
    gates = sbp.split(gates, 0, "model")  # and: gates is S(0) on `model`: dim 0 of 32x16
    mask = sbp.split(mask, 0, "model")  # and: mask is S(0) on `model`: dim 0 of 32x16
    importance = gates.mean(0)
    load = mask.mean(0)
    return E * (importance * load).sum()  # error: no-signature: `importance * load` has no SBP signature on mesh axis `model`


@broken(f32(S, M), f32(M, E), f32(), cause="B10: the loss is B, the auxiliary loss still partial; the sum decides when to stop")
def stop_by_an_unreduced_loss(x, w_gate, best):
    x = sbp.split(x, 0, "model")  # and: x is S(0) on `model`: dim 0 of 32x64
    logits = x @ w_gate
    z_loss = (jax.nn.logsumexp(logits, -1) ** 2).mean()
    loss = sbp.replicate(best, "model") + 1e-3 * z_loss
    return lax.cond(loss < best, lambda: loss, lambda: best)  # error: no-signature: `loss < best` has no SBP signature on mesh axis `model


@broken(f32(E, S), f32(S, M), cause="expert choice: every expert picks its best tokens out of a split batch")
def experts_choose_split_tokens(scores, x):
    scores = sbp.split(scores, 1, "model")  # and: scores is S(1) on `model`: dim 1 of 16x32
    x = sbp.split(x, 0, "model")
    weights, picked = lax.top_k(scores, C)  # error: no-signature: `lax.top_k(scores, C)` has no SBP signature on mesh axis `model`
    return weights[..., None] * x[picked]


@broken(
    f32(E, M, H),
    f32(S, M),
    mesh=MESH_2D,
    in_types=("data:S(0) model:S(2)", "data:S(0) model:B"),
    cause="B12: experts and tokens are split over the same axis, so each expert sees the tokens of its own device alone",
)
def own_tokens_only(w, x):
    return jnp.einsum("sm,emh->esh", x, w)  # error: no-signature: `jnp.einsum("sm,emh->esh", x, w)` has no SBP signature on mesh axis `dat


@broken(f32(G, S), cause="dropped tokens are counted per device (B12: metrics are P), then turned into a whole number")
def dropped_tokens_of_one_device(kept):
    kept = sbp.split(kept, 0, "model")  # and: kept is S(0) on `model`: dim 0 of 8x32
    dropped = (1.0 - kept).sum()
    return dropped.astype(jnp.int32)  # error: no-signature: `dropped.astype(jnp.int32)` has no SBP signature on mesh axis `model`
