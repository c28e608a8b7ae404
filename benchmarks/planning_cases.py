"""Everyday training steps that `benchmarks.planning_speed` plans: models as users write them, with
the batch split over the first mesh axis and everything else free."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import AbstractMesh, PartitionSpec as P

import sbp
from benchmarks.steps.program import ADAMW, Mark, aval, training_step
from benchmarks.steps.transformer import Axes, Shape, language_model_loss, weights_of
from sbp.api.jit import Jitted

Planned = tuple[Jitted, tuple[Any, ...]]
"""A function to plan, and its arguments."""

STAGES = ((3, 64), (4, 128), (6, 256), (3, 512))
"""Blocks and width of each stage of ResNet-50."""


def _step(step: Callable[..., Any], mesh: dict[str, int], arguments: tuple[Any, ...]) -> Planned:
    """A training step of weights and moments of any type and a batch that is split."""
    f = sbp.jit(
        step,
        AbstractMesh(tuple(mesh.values()), tuple(mesh)),
        in_types=(None, None, *(P("data") for _ in arguments[2:])),
        donate_argnums=(0, 1),
        hardware="tpu-v5e",
    )
    return f, arguments


def gpt(layers: int) -> Planned:
    """An unrolled GPT with AdamW on `data=4 model=8`."""
    shape = Shape(
        layers=layers,
        width=1024,
        heads=16,
        hidden=4096,
        vocabulary=32768,
        batch=32,
        length=1024,
    )
    params = weights_of(shape)
    loss = language_model_loss(shape, Axes())(Mark())
    arguments = params, jax.eval_shape(ADAMW.init, params), aval(32, 1024, dtype="int32")
    return _step(training_step(loss), {"data": 4, "model": 8}, arguments)


class _Block(nnx.Module):
    """One layer of a transformer."""

    def __init__(self, width: int, heads: int, rngs: nnx.Rngs) -> None:
        self.first, self.second = nnx.LayerNorm(width, rngs=rngs), nnx.LayerNorm(width, rngs=rngs)
        self.attention = nnx.MultiHeadAttention(heads, width, decode=False, rngs=rngs)
        self.up = nnx.Linear(width, 4 * width, rngs=rngs)
        self.down = nnx.Linear(4 * width, width, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        mask = nnx.make_causal_mask(x[..., 0])
        x = x + self.attention(self.first(x), mask=mask)
        return x + self.down(nnx.gelu(self.up(self.second(x))))


class _Transformer(nnx.Module):
    """A decoder of two layers."""

    def __init__(self, vocabulary: int, width: int, heads: int, rngs: nnx.Rngs) -> None:
        self.embed = nnx.Embed(vocabulary, width, rngs=rngs)
        self.blocks = nnx.List([_Block(width, heads, rngs) for _ in range(2)])
        self.norm = nnx.LayerNorm(width, rngs=rngs)
        self.head = nnx.Linear(width, vocabulary, rngs=rngs)

    def __call__(self, tokens: jax.Array) -> jax.Array:
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def flax_transformer() -> Planned:
    """Two blocks of Flax NNX with AdamW on `data=2 model=4`."""

    def make() -> Any:
        return nnx.split(_Transformer(8192, 512, 8, nnx.Rngs(0)), nnx.Param, ...)

    definition, params, rest = nnx.eval_shape(make)

    def loss(params: Any, tokens: jax.Array) -> jax.Array:
        logits = nnx.merge(definition, params, rest)(tokens[:, :-1])
        picked = jnp.take_along_axis(jax.nn.log_softmax(logits), tokens[:, 1:, None], -1)
        return -jnp.mean(picked)

    arguments = params, jax.eval_shape(ADAMW.init, params), aval(16, 257, dtype="int32")
    return _step(training_step(loss), {"data": 2, "model": 4}, arguments)


def _convolution(x: jax.Array, w: jax.Array, stride: int) -> jax.Array:
    return jax.lax.conv_general_dilated(
        x, w, (stride, stride), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC")
    )


def _normalised(x: jax.Array, p: Any) -> jax.Array:
    """Batch normalisation with the statistics of the batch."""
    mean = jnp.mean(x, (0, 1, 2))
    variance = jnp.mean(jnp.square(x - mean), (0, 1, 2))
    return (x - mean) * jax.lax.rsqrt(variance + 1e-5) * p["scale"] + p["bias"]


def _unit(size: int, width_in: int, width: int) -> Any:
    """Weights of a convolution with its normalisation."""
    kernel = aval(size, size, width_in, width)
    return {"kernel": kernel, "scale": aval(width), "bias": aval(width)}


def _apply(p: Any, x: jax.Array, stride: int = 1) -> jax.Array:
    return _normalised(_convolution(x, p["kernel"], stride), p)


def _bottleneck(p: Any, x: jax.Array, stride: int) -> jax.Array:
    y = jax.nn.relu(_apply(p["reduce"], x))
    y = _apply(p["expand"], jax.nn.relu(_apply(p["middle"], y, stride)))
    return jax.nn.relu(y + (_apply(p["join"], x, stride) if "join" in p else x))


def resnet(mesh: dict[str, int]) -> Planned:
    """ResNet-50 (He et al., 2015, table 1) with AdamW."""
    params: dict[str, Any] = {"stem": _unit(7, 3, 64), "blocks": []}
    strides: list[int] = []
    before = 64
    for stage, (blocks, width) in enumerate(STAGES):
        for block in range(blocks):
            one = {
                "reduce": _unit(1, before, width),
                "middle": _unit(3, width, width),
                "expand": _unit(1, width, 4 * width),
            }
            params["blocks"].append(one if block else {**one, "join": _unit(1, before, 4 * width)})
            strides.append(2 if stage and not block else 1)
            before = 4 * width
    params["head"] = aval(before, 1000)

    def loss(params: Any, images: jax.Array, labels: jax.Array) -> jax.Array:
        x = jax.nn.relu(_apply(params["stem"], images, 2))
        x = jax.lax.reduce_window(x, -jnp.inf, jax.lax.max, (1, 3, 3, 1), (1, 2, 2, 1), "SAME")
        for p, stride in zip(params["blocks"], strides, strict=True):
            x = _bottleneck(p, x, stride)
        logits = jax.nn.log_softmax(jnp.mean(x, (1, 2)) @ params["head"])
        return -jnp.mean(jnp.take_along_axis(logits, labels[:, None], -1))

    images, labels = aval(256, 224, 224, 3), aval(256, dtype="int32")
    arguments = params, jax.eval_shape(ADAMW.init, params), images, labels
    return _step(training_step(loss), mesh, arguments)
