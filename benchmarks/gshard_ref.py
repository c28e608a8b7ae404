"""A GShard MoE encoder-decoder Transformer and its SGD step in plain JAX: the program whose
communication is measured.

Layer pairs (a dense one, then an MoE one) run under `scan`, rematerialised unless asked otherwise;
everything is float32. Gating is GShard's Algorithm 1 (Lepikhin et al., 2020, section 2.2) without
its random dispatch. Nothing here knows of devices: `mark(x, name)` is called where a sharding could
be stated, and the caller decides what each name means.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

Params = dict[str, Any]
Batch = tuple[jax.Array, jax.Array, jax.Array]
Mark = Callable[[jax.Array, str], jax.Array]

AUX_WEIGHT = 0.01


@dataclass(frozen=True, slots=True, kw_only=True)
class Config:
    """Sizes of the model and of one batch.

    Arguments:
        experts: experts per MoE layer (E).
        layers: encoder plus decoder layers, a multiple of four.
        groups: token groups of a batch (G); the split dim of the batch.
        group_size: tokens per group (S), a multiple of `sequence`.
        sequence: tokens per attention window (T).
        unrolled: whether the layer pairs are a Python loop over their slices instead of a `scan`.
        remat: first layer pairs of each stack whose activations the backward pass makes again; None
            for all, the others keep theirs.
    """

    experts: int
    layers: int
    groups: int
    d_model: int = 1024
    d_ff: int = 8192
    heads: int = 16
    d_head: int = 128
    source_vocab: int = 64000
    target_vocab: int = 32000
    group_size: int = 2048
    sequence: int = 128
    unrolled: bool = False
    remat: int | None = None

    @property
    def capacity(self) -> int:
        """Tokens one expert takes from one group: C = 2S/E, at least one."""
        return max(1, 2 * self.group_size // self.experts)


def unmarked(x: jax.Array, name: str) -> jax.Array:
    """States no sharding at all: the single-device program."""
    del name
    return x


def param_shapes(cfg: Config) -> Params:
    """The shape of every parameter; leaves of `enc` and `dec` carry a leading dim of layer pairs,
    expert weights then one of experts."""
    m, h, e, pairs = cfg.d_model, cfg.d_ff, cfg.experts, cfg.layers // 4

    def attention(name: str) -> Params:
        projection = (pairs, m, cfg.heads, cfg.d_head)
        return {
            f"{name}_q": projection,
            f"{name}_k": projection,
            f"{name}_v": projection,
            f"{name}_o": (pairs, cfg.heads, cfg.d_head, m),
            f"{name}_ln": (pairs, m),
        }

    feed_forward = {"wi": (pairs, m, h), "wo": (pairs, h, m), "ffn_ln": (pairs, m)}
    experts = {
        "wg": (pairs, m, e),
        "ewi": (pairs, e, m, h),
        "ewo": (pairs, e, h, m),
        "moe_ln": (pairs, m),
    }
    enc = {**attention("a"), **attention("b"), **feed_forward, **experts}
    dec = {**enc, **attention("ca"), **attention("cb")}
    return {
        "src_emb": (cfg.source_vocab, m),
        "tgt_emb": (cfg.target_vocab, m),
        "out": (m, cfg.target_vocab),
        "enc": enc,
        "dec": dec,
    }


def abstract_arguments(cfg: Config) -> tuple[Params, tuple[jax.ShapeDtypeStruct, ...]]:
    """Parameters and batch (source, target, label tokens, each `(G, S)` int32) as shapes, which is
    all that compiling needs."""
    params = jax.tree.map(
        lambda shape: jax.ShapeDtypeStruct(shape, jnp.float32),
        param_shapes(cfg),
        is_leaf=lambda x: isinstance(x, tuple),
    )
    tokens = jax.ShapeDtypeStruct((cfg.groups, cfg.group_size), jnp.int32)
    return params, (tokens, tokens, tokens)


def rms_norm(x: jax.Array, scale: jax.Array) -> jax.Array:
    return x * lax.rsqrt(jnp.mean(x * x, -1, keepdims=True) + 1e-6) * scale


def attention(
    p: Params, name: str, x: jax.Array, memory: jax.Array, cfg: Config, *, causal: bool
) -> jax.Array:
    """Multi-head attention of `x` over `memory`, both `(G, S, M)`, within windows of `cfg.sequence`
    tokens."""
    g, s, m = x.shape
    t = cfg.sequence
    windows = x.reshape(g, s // t, t, m)
    memory_windows = memory.reshape(g, s // t, t, m)
    q = jnp.einsum("gntm,mhd->gnhtd", windows, p[f"{name}_q"])
    k = jnp.einsum("gntm,mhd->gnhtd", memory_windows, p[f"{name}_k"])
    v = jnp.einsum("gntm,mhd->gnhtd", memory_windows, p[f"{name}_v"])
    scores = jnp.einsum("gnhtd,gnhud->gnhtu", q, k) * (q.shape[-1] ** -0.5)
    if causal:
        scores = jnp.where(jnp.tril(jnp.ones((t, t), bool)), scores, -1e9)
    mixed = jnp.einsum("gnhtu,gnhud->gnhtd", jax.nn.softmax(scores, -1), v)
    return jnp.einsum("gnhtd,hdm->gntm", mixed, p[f"{name}_o"]).reshape(g, s, m)


def top2_gating(logits: jax.Array, capacity: int) -> tuple[jax.Array, jax.Array]:
    """Combine weights `(G, S, E, C)` of the two best experts of every token, and the auxiliary load
    loss, from `logits` `(G, S, E)`."""
    gates = jax.nn.softmax(logits, -1)
    num_experts = gates.shape[-1]

    mask1 = jax.nn.one_hot(jnp.argmax(gates, -1), num_experts, dtype=gates.dtype)
    gate1 = (gates * mask1).sum(-1)
    others = gates * (1 - mask1)
    mask2 = jax.nn.one_hot(jnp.argmax(others, -1), num_experts, dtype=gates.dtype)
    gate2 = (others * mask2).sum(-1)
    norm = gate1 + gate2 + 1e-9
    gate1, gate2 = gate1 / norm, gate2 / norm
    aux = jnp.mean(jnp.mean(gates, 1) * jnp.mean(mask1, 1)) * num_experts * num_experts

    order1 = jnp.cumsum(mask1, 1) - mask1
    count1 = mask1.sum(1, keepdims=True)
    mask1 = mask1 * (order1 < capacity)
    position1 = (order1 * mask1).sum(-1)
    gate1 = gate1 * mask1.sum(-1)
    order2 = jnp.cumsum(mask2, 1) - mask2 + count1
    mask2 = mask2 * (order2 < capacity)
    position2 = (order2 * mask2).sum(-1)
    gate2 = gate2 * mask2.sum(-1)

    def slots(gate: jax.Array, mask: jax.Array, position: jax.Array) -> jax.Array:
        return (
            gate[..., None, None]
            * mask[..., None]
            * jax.nn.one_hot(position.astype(jnp.int32), capacity)[..., None, :]
        )

    return slots(gate1, mask1, position1) + slots(gate2, mask2, position2), aux


def moe_layer(p: Params, x: jax.Array, cfg: Config, mark: Mark) -> tuple[jax.Array, jax.Array]:
    """The position-wise MoE layer on `(G, S, M)`: its output and its auxiliary loss."""
    logits = mark(jnp.einsum("gsm,me->gse", x, p["wg"]), "router_logits")
    combine, aux = top2_gating(logits, cfg.capacity)
    combine = mark(combine, "combine_weights")
    dispatch = (combine > 0).astype(x.dtype)
    dispatched = jnp.einsum("gsec,gsm->egcm", dispatch, x)
    dispatched = mark(mark(dispatched, "dispatched_before"), "dispatched")
    hidden = jax.nn.relu(jnp.einsum("egcm,emh->egch", dispatched, p["ewi"]))
    outputs = jnp.einsum("egch,ehm->egcm", hidden, p["ewo"])
    outputs = mark(mark(outputs, "outputs_before"), "outputs")
    return jnp.einsum("gsec,egcm->gsm", combine.astype(x.dtype), outputs), aux


def layer_stack(
    stacked: Params, x: jax.Array, memory: jax.Array | None, cfg: Config, mark: Mark
) -> tuple[jax.Array, jax.Array]:
    """All layer pairs of the encoder (`memory` is None) or of the decoder: activations `(G, S, M)`
    and the summed auxiliary loss."""
    causal = memory is not None

    def pair(
        carry: tuple[jax.Array, jax.Array], p: Params
    ) -> tuple[tuple[jax.Array, jax.Array], None]:
        x, aux = carry
        x = mark(x, "block_input")
        normed = rms_norm(x, p["a_ln"])
        x = mark(x + attention(p, "a", normed, normed, cfg, causal=causal), "tokens")
        if memory is not None:
            x = x + attention(p, "ca", rms_norm(x, p["ca_ln"]), memory, cfg, causal=False)
        x = x + jax.nn.relu(rms_norm(x, p["ffn_ln"]) @ p["wi"]) @ p["wo"]
        normed = rms_norm(x, p["b_ln"])
        x = x + attention(p, "b", normed, normed, cfg, causal=causal)
        if memory is not None:
            x = x + attention(p, "cb", rms_norm(x, p["cb_ln"]), memory, cfg, causal=False)
        y, pair_aux = moe_layer(p, rms_norm(x, p["moe_ln"]), cfg, mark)
        return (mark(x + y, "tokens"), aux + pair_aux), None

    start = x, jnp.zeros((), jnp.float32)
    pairs = cfg.layers // 4
    remat = pairs if cfg.remat is None else cfg.remat
    if cfg.unrolled:
        for number in range(pairs):
            layer = jax.checkpoint(pair) if number < remat else pair
            start, _ = layer(start, jax.tree.map(lambda leaf, n=number: leaf[n], stacked))
        return start
    if remat:
        start, _ = lax.scan(
            jax.checkpoint(pair),
            start,
            jax.tree.map(lambda leaf: leaf[:remat], stacked) if remat < pairs else stacked,
        )
    if remat < pairs:
        start, _ = lax.scan(
            pair, start, jax.tree.map(lambda leaf: leaf[remat:], stacked) if remat else stacked
        )
    return start


def loss_fn(params: Params, batch: Batch, cfg: Config, mark: Mark = unmarked) -> jax.Array:
    """Mean cross-entropy of the labels plus the weighted auxiliary loss."""
    source, target, labels = batch
    memory, enc_aux = layer_stack(
        params["enc"], mark(params["src_emb"][source], "tokens"), None, cfg, mark
    )
    y, dec_aux = layer_stack(
        params["dec"], mark(params["tgt_emb"][target], "tokens"), memory, cfg, mark
    )
    logits = y @ params["out"]
    cross_entropy = (
        jax.nn.logsumexp(logits, -1) - jnp.take_along_axis(logits, labels[..., None], -1)[..., 0]
    )
    return cross_entropy.mean() + AUX_WEIGHT * (enc_aux + dec_aux) / cfg.layers


def sgd_step(
    params: Params, batch: Batch, cfg: Config, mark: Mark = unmarked, learning_rate: float = 1e-3
) -> tuple[Params, jax.Array]:
    """One step of SGD: the new parameters and the loss."""
    loss, grads = jax.value_and_grad(loss_fn)(params, batch, cfg, mark)
    return jax.tree.map(lambda p, g: p - learning_rate * g, params, grads), loss
