"""Steps that were written after the cost model, and that nothing was corrected on: an encoder with
dropout, a recommender, adapters on frozen weights, and the first pass over a prompt; and those of
`unseen_data_parallel`."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec as P

from benchmarks.steps.program import Mark, Step, aval, training
from benchmarks.steps.transformer import BF16, rms_norm
from benchmarks.steps.unseen_data_parallel import mixer, separable, tabular

EIGHT = (("d", 8),)

Loss = Callable[..., jax.Array]


def _layer_norm(p: Any, x: jax.Array) -> jax.Array:
    """Layer normalisation, in float32."""
    y = x.astype(jnp.float32)
    y = (y - y.mean(-1, keepdims=True)) * lax.rsqrt(y.var(-1, keepdims=True) + 1e-5)
    return (y * p["scale"] + p["shift"]).astype(x.dtype)


def _affine(p: Any, x: jax.Array, dims: str) -> jax.Array:
    return jnp.einsum(dims, x, p["w"].astype(BF16)) + p["b"].astype(BF16)


def _dropped(key: jax.Array, x: jax.Array) -> jax.Array:
    """A tenth of `x` is set to zero."""
    return jnp.where(jax.random.bernoulli(key, 0.9, x.shape), x / 0.9, 0).astype(x.dtype)


def _cross_entropy(scores: jax.Array, labels: jax.Array) -> jax.Array:
    chosen = jnp.take_along_axis(scores, labels[..., None], -1)[..., 0]
    return (jax.nn.logsumexp(scores, -1) - chosen).mean()


def _encoder_loss(heads: int) -> Callable[[Mark], Loss]:
    def encoded(p: Any, x: jax.Array, key: jax.Array, mark: Mark) -> jax.Array:
        scores_key, out_key, down_key = jax.random.split(key, 3)
        q, k, v = (_affine(p[name], x, "bsd,dhk->bshk") for name in "qkv")
        scores = jnp.einsum("bqhk,bshk->bhqs", q, k, preferred_element_type=jnp.float32)
        shares = jax.nn.softmax(scores * q.shape[-1] ** -0.5).astype(BF16)
        shares = mark(_dropped(scores_key, shares), "d", None, None, None)
        seen = jnp.einsum("bhqs,bshk->bqhk", shares, v)
        y = _affine(p["out"], seen, "bshk,hkd->bsd")
        x = mark(_layer_norm(p["norm1"], x + _dropped(out_key, y)), "d", None, None)
        y = _affine(p["down"], jax.nn.gelu(_affine(p["up"], x, "bsd,df->bsf")), "bsf,fd->bsd")
        return mark(_layer_norm(p["norm2"], x + _dropped(down_key, y)), "d", None, None)

    def of(mark: Mark) -> Loss:
        def loss(p: Any, tokens: Any, segments: Any, places: Any, labels: Any, seed: Any) -> Any:
            x = p["tokens"].astype(BF16)[tokens] + p["segments"].astype(BF16)[segments]
            x = mark(_layer_norm(p["norm"], x + p["positions"].astype(BF16)), "d", None, None)
            for i, block in enumerate(p["blocks"]):
                x = encoded(block, x, jax.random.fold_in(jax.random.wrap_key_data(seed), i), mark)
            y = jnp.take_along_axis(x, places[..., None], axis=1)
            y = jax.nn.gelu(_affine(p["head"], y, "bmd,de->bme"))
            return _cross_entropy((y @ p["tokens"].astype(BF16).T).astype(jnp.float32), labels)

        return loss

    return of


def bert() -> Step:
    """BERT with dropout, data parallel. Masked tokens are gathered before the vocabulary."""
    width, heads, hidden, batch, length, masked = 768, 12, 3072, 64, 512, 80

    def affine(*shape: int, out: tuple[int, ...]) -> Any:
        return {"w": aval(*shape), "b": aval(*out)}

    norm = {"scale": aval(width), "shift": aval(width)}
    each = width // heads
    block = {
        **{n: affine(width, heads, each, out=(heads, each)) for n in "qkv"},
        "out": affine(heads, each, width, out=(width,)),
        "up": affine(width, hidden, out=(hidden,)),
        "down": affine(hidden, width, out=(width,)),
        "norm1": norm,
        "norm2": norm,
    }
    params = {
        "tokens": aval(30592, width),
        "positions": aval(length, width),
        "segments": aval(2, width),
        "norm": norm,
        "head": affine(width, width, out=(width,)),
        "blocks": [block] * 4,
    }
    ids = [(batch, length), (batch, length), (batch, masked), (batch, masked)]
    return training(
        loss=_encoder_loss(heads),
        params=params,
        specs=jax.tree.map(lambda _: P(), params),
        batch=(*(aval(*shape, dtype="int32") for shape in ids), aval(2, dtype="uint32")),
        batch_specs=(P("d"), P("d"), P("d"), P("d"), P()),
        mesh=EIGHT,
        topology="v5e:2x4",
    )


def _recommender_loss(tables: int) -> Callable[[Mark], Loss]:
    def of(mark: Mark) -> Loss:
        def loss(p: Any, features: jax.Array, ids: jax.Array, clicked: jax.Array) -> jax.Array:
            x = features.astype(BF16)
            for w in p["bottom"]:
                x = jax.nn.relu(x @ w.astype(BF16))
            rows = mark(p["rows"][ids].astype(BF16), "d", None, None)
            every = jnp.concatenate([x[:, None], rows], 1)
            first, second = jnp.triu_indices(tables + 1, 1)
            products = jnp.einsum("bid,bjd->bij", every, every)[:, first, second]
            h = mark(jnp.concatenate([x, products], 1), "d", None)
            for w in p["top"][:-1]:
                h = jax.nn.relu(h @ w.astype(BF16))
            score = (h @ p["top"][-1].astype(BF16))[:, 0].astype(jnp.float32)
            return jnp.mean(jax.nn.softplus(score) - score * clicked)

        return loss

    return of


def recommender() -> Step:
    """Recommender (DLRM), rows of its tables split. The batch is split over the same devices."""
    tables, width, batch, wide = 26, 64, 16384, P("d", None)
    pairs = (tables + 1) * tables // 2
    params = {
        "rows": aval(tables * 32768, width),
        "bottom": [aval(13, 512), aval(512, 256), aval(256, width)],
        "top": [aval(width + pairs, 1024), aval(1024, 512), aval(512, 1)],
    }
    return training(
        loss=_recommender_loss(tables),
        params=params,
        specs={"rows": wide, "bottom": [P()] * 3, "top": [P()] * 3},
        batch=(aval(batch, 13), aval(batch, tables, dtype="int32"), aval(batch)),
        batch_specs=(P("d"), P("d"), P("d")),
        mesh=EIGHT,
        topology="v5e:2x4",
    )


def _causal(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
    """Attention of `q` (batch, length, heads, features) to `k` and `v` of as many heads or fewer,
    each of which serves several successive ones of `q`."""
    batch, length, heads, each = q.shape
    groups = k.shape[2]
    q = q.reshape(batch, length, groups, heads // groups, each)
    scores = jnp.einsum("bqgrk,bsgk->bgrqs", q, k, preferred_element_type=jnp.float32)
    before = jnp.tril(jnp.ones((length, length), bool))
    shares = jax.nn.softmax(jnp.where(before, scores * each**-0.5, -1e30)).astype(BF16)
    return jnp.einsum("bgrqs,bsgk->bqgrk", shares, v).reshape(batch, length, heads, each)


def _adapted_loss(mark: Mark) -> Loss:
    plain = jnp.ones((), jnp.float32)

    def adapted(p: Any, adapter: Any, x: jax.Array) -> jax.Array:
        h = rms_norm(x, plain)
        low = h @ adapter["down"].astype(BF16)
        qkv = jnp.einsum("bsd,dthk->tbshk", h, p["qkv"])
        qkv = qkv + jnp.einsum("bsr,rthk->tbshk", low, adapter["up"].astype(BF16))
        q, k, v = (mark(y, "d", None, "t", None) for y in qkv)
        y = jnp.einsum("bshk,hkd->bsd", _causal(q, k, v), p["out"])
        x = mark(x + y, "d", None, None)
        gate, up = jnp.moveaxis(jnp.einsum("bsd,dtf->bstf", rms_norm(x, plain), p["up"]), 2, 0)
        return mark(x + mark(jax.nn.silu(gate) * up, "d", None, "t") @ p["down"], "d", None, None)

    def loss(adapters: Any, frozen: Any, tokens: jax.Array) -> jax.Array:
        x = mark(frozen["tokens"][tokens], "d", None, None)
        for block, adapter in zip(frozen["blocks"], adapters, strict=True):
            x = adapted(block, adapter, x)
        scores = (rms_norm(x, plain) @ frozen["tokens"].T).astype(jnp.float32)
        return _cross_entropy(mark(scores, "d", None, "t"), jnp.roll(tokens, -1, 1))

    return loss


def adapters() -> Step:
    """Adapters (LoRA) on frozen weights, tensor and data parallel. Only the adapters train."""
    layers, width, heads, hidden, vocabulary, batch, rank = 4, 2048, 16, 5632, 32000, 16, 16
    each = width // heads
    weight = functools.partial(aval, dtype=BF16)
    block = {
        "qkv": weight(width, 3, heads, each),
        "out": weight(heads, each, width),
        "up": weight(width, 2, hidden),
        "down": weight(hidden, width),
    }
    split = {
        "qkv": P(None, None, "t", None),
        "out": P("t", None, None),
        "up": P(None, None, "t"),
        "down": P("t", None),
    }
    adapter = {"down": aval(width, rank), "up": aval(rank, 3, heads, each)}
    frozen = {"tokens": weight(vocabulary, width), "blocks": [block] * layers}
    return training(
        loss=_adapted_loss,
        params=[adapter] * layers,
        specs=[{"down": P(), "up": P(None, None, "t", None)}] * layers,
        batch=(frozen, aval(batch, 1024, dtype="int32")),
        batch_specs=({"tokens": P("t", None), "blocks": [split] * layers}, P("d")),
        mesh=(("d", 2), ("t", 4)),
        topology="v5e:2x4",
    )


def _prompt_read(mark: Mark) -> Callable[..., Any]:
    plain = jnp.ones((), jnp.float32)

    def layer(x: jax.Array, p: Any) -> Any:
        h = rms_norm(x, plain)
        q, k, v = (
            mark(jnp.einsum("bsd,dhk->bshk", h, p[name]), None, None, "t", None) for name in "qkv"
        )
        x = x + jnp.einsum("bshk,hkd->bsd", _causal(q, k, v), p["out"])
        h = rms_norm(mark(x, None, None, None), plain)
        y = mark(jax.nn.silu(h @ p["gate"]) * (h @ p["up"]), None, None, "t") @ p["down"]
        return mark(x + y, None, None, None), (k, v)

    def step(p: Any, tokens: jax.Array) -> Any:
        x = mark(p["tokens"][tokens], None, None, None)
        x, cache = lax.scan(layer, x, p["blocks"])
        return cache, jnp.argmax(rms_norm(x[:, -1], plain) @ p["tokens"].T, -1)

    return step


def prefill() -> Step:
    """First pass over a prompt, tensor parallel. Keys and values have a quarter of the heads."""
    layers, width, heads, groups, hidden, vocabulary = 4, 4096, 32, 8, 14336, 32000
    each = width // heads
    shapes = {
        "q": (width, heads, each),
        "k": (width, groups, each),
        "v": (width, groups, each),
        "out": (heads, each, width),
        "gate": (width, hidden),
        "up": (width, hidden),
        "down": (hidden, width),
    }
    split = {
        **dict.fromkeys("qkv", (None, "t", None)),
        "out": ("t", None, None),
        "gate": (None, "t"),
        "up": (None, "t"),
        "down": ("t", None),
    }
    blocks = {name: aval(layers, *shape, dtype=BF16) for name, shape in shapes.items()}
    params = {"tokens": aval(vocabulary, width, dtype=BF16), "blocks": blocks}
    specs = {
        "tokens": P("t", None),
        "blocks": {name: P(None, *dims) for name, dims in split.items()},
    }
    cache = P(None, None, None, "t", None)
    return Step(
        make=_prompt_read,
        avals=(params, aval(4, 2048, dtype="int32")),
        in_specs=(specs, P()),
        out_specs=((cache, cache), P()),
        mesh=(("t", 8),),
        topology="v5e:2x4",
    )


UNSEEN: dict[str, Callable[[], Step]] = {
    f.__name__: f for f in (bert, recommender, adapters, prefill, mixer, separable, tabular)
}
