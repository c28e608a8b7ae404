"""Data parallel steps that were written after all-reduces of gradients were priced as joined, and
that nothing was corrected on: a mixer of patches, a net of separable convolutions, and one for
tables of features."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec as P

from benchmarks.steps.images import replicated
from benchmarks.steps.program import Mark, Step, aval, training
from benchmarks.steps.transformer import BF16, rms_norm

SIXTEEN = (("d", 16),)


def _affine(x: jax.Array, w: jax.Array, b: jax.Array) -> jax.Array:
    return x @ w.astype(BF16) + b.astype(BF16)


def _cross_entropy(scores: jax.Array, labels: jax.Array) -> jax.Array:
    chosen = jnp.take_along_axis(scores, labels[:, None], -1)[:, 0]
    return (jax.nn.logsumexp(scores, -1) - chosen).mean()


def _data_parallel(loss: Callable[[Mark], Any], params: Any, batch: Sequence[Any]) -> Step:
    return training(
        loss=loss,
        params=params,
        specs=replicated(params),
        batch=tuple(batch),
        batch_specs=tuple(P("d") for _ in batch),
        mesh=SIXTEEN,
    )


def mixer(batch: int = 512, patches: int = 196, width: int = 768, layers: int = 6) -> Step:
    """MLP-Mixer, data parallel."""

    def pair(before: int, inside: int) -> tuple[Any, ...]:
        return aval(before, inside), aval(inside), aval(inside, before), aval(before)

    def block() -> Any:
        return {
            "norms": (aval(width), aval(width)),
            "patches": pair(patches, width // 2),
            "channels": pair(width, 4 * width),
        }

    def mixed(p: Any, x: jax.Array) -> jax.Array:
        up, up_bias, down, down_bias = p
        return _affine(jax.nn.gelu(_affine(x, up, up_bias)), down, down_bias)

    def of(mark: Mark) -> Any:
        def loss(p: Any, x: jax.Array, labels: jax.Array) -> jax.Array:
            x = mark(x.astype(BF16) @ p["in"].astype(BF16), "d", None, None)
            for b in p["blocks"]:
                h = rms_norm(x, b["norms"][0]).swapaxes(1, 2)
                x = mark(x + mixed(b["patches"], h).swapaxes(1, 2), "d", None, None)
                x = mark(x + mixed(b["channels"], rms_norm(x, b["norms"][1])), "d", None, None)
            scores = (x.mean(1) @ p["out"].astype(BF16)).astype(jnp.float32)
            return _cross_entropy(mark(scores, "d", None), labels)

        return loss

    params = {
        "in": aval(768, width),
        "blocks": [block() for _ in range(layers)],
        "out": aval(width, 1000),
    }
    return _data_parallel(of, params, (aval(batch, patches, 768), aval(batch, dtype="int32")))


def separable(batch: int = 1024, side: int = 96) -> Step:
    """Net of depthwise separable convolutions, data parallel."""
    channels = (64, 64, 128, 128, 256, 256, 512)

    def convolved(x: jax.Array, w: jax.Array, stride: int, groups: int = 1) -> jax.Array:
        return lax.conv_general_dilated(
            x,
            w.astype(BF16),
            (stride, stride),
            "SAME",
            dimension_numbers=("NHWC", "HWIO", "NHWC"),
            feature_group_count=groups,
        )

    def of(mark: Mark) -> Any:
        def split(x: jax.Array) -> jax.Array:
            return mark(x, "d", None, None, None)

        def loss(p: Any, x: jax.Array, labels: jax.Array) -> jax.Array:
            x = split(jax.nn.relu(convolved(x.astype(BF16), p["in"], 2)))
            for i, b in enumerate(p["blocks"]):
                each = convolved(x, b["each"], 1 + i % 2, x.shape[-1])
                each = split(each * b["scale"].astype(BF16) + b["shift"].astype(BF16))
                x = split(jax.nn.relu6(convolved(each, b["mix"], 1) + b["bias"].astype(BF16)))
            scores = (x.mean((1, 2)) @ p["out"].astype(BF16)).astype(jnp.float32)
            return _cross_entropy(mark(scores, "d", None), labels)

        return loss

    blocks = [
        {
            "each": aval(3, 3, 1, before),
            "scale": aval(before),
            "shift": aval(before),
            "mix": aval(1, 1, before, after),
            "bias": aval(after),
        }
        for before, after in pairwise(channels)
    ]
    params = {"in": aval(3, 3, 3, channels[0]), "blocks": blocks, "out": aval(channels[-1], 100)}
    return _data_parallel(of, params, (aval(batch, side, side, 3), aval(batch, dtype="int32")))


def tabular(batch: int = 65536, columns: int = 6) -> Step:
    """Net for tables of features with gated layers, data parallel."""
    widths = (64 * (columns + 1), 512, 1024, 1024, 512, 256, 64)

    def of(mark: Mark) -> Any:
        def loss(p: Any, numbers: jax.Array, x: jax.Array, wanted: jax.Array) -> jax.Array:
            found = [table.astype(BF16)[numbers[:, i]] for i, table in enumerate(p["tables"])]
            h = mark(jnp.concatenate([x.astype(BF16), *found], -1), "d", None)
            for layer in p["layers"]:
                h = jax.nn.silu(_affine(h, layer["w"], layer["b"]))
                h = mark(h * jax.nn.sigmoid(layer["gate"].astype(BF16)), "d", None)
            score = (h @ p["out"].astype(BF16))[:, 0].astype(jnp.float32)
            return jnp.mean(jax.nn.softplus(score) - score * wanted)

        return loss

    params = {
        "tables": [aval(1000, 64) for _ in range(columns)],
        "layers": [
            {"w": aval(before, after), "b": aval(after), "gate": aval(after)}
            for before, after in pairwise(widths)
        ],
        "out": aval(widths[-1], 1),
    }
    return _data_parallel(
        of, params, (aval(batch, columns, dtype="int32"), aval(batch, 64), aval(batch))
    )
