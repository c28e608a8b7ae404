"""Convolution nets in bfloat16 with float32 weights: a classifier and a denoiser."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.sharding import PartitionSpec as P

from benchmarks.steps.by_hand import averaged
from benchmarks.steps.program import ADAMW, Mark, Step, aval, training, training_step
from benchmarks.steps.transformer import BF16, attention

Split = Callable[[jax.Array], jax.Array]
"""Marks the first dim, the images, as split."""


def convolved(x: jax.Array, kernel: jax.Array, stride: int = 1) -> jax.Array:
    """`x` (batch, height, width, channels) by a kernel (height, width, in, out), padded."""
    return jax.lax.conv_general_dilated(
        x, kernel.astype(BF16), (stride, stride), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC")
    )


def replicated(tree: Any) -> Any:
    """The specs of what every device holds."""
    return jax.tree.map(lambda _: P(), tree)


# --- ResNet-50 ----------------------------------------------------------------------------------

STAGES = ((64, 3), (128, 4), (256, 6), (512, 3))
"""Inner channels and blocks of each stage of ResNet-50."""


def _resnet_layers() -> dict[str, tuple[int, ...]]:
    """Shapes of the convolutions by name, in the order of the net."""
    found: dict[str, tuple[int, ...]] = {"stem": (7, 7, 3, 64)}
    channels = 64
    for stage, (inner, count) in enumerate(STAGES):
        for i in range(count):
            name = f"{stage}.{i}"
            found[f"{name}.a"] = (1, 1, channels, inner)
            found[f"{name}.b"] = (3, 3, inner, inner)
            found[f"{name}.c"] = (1, 1, inner, 4 * inner)
            if i == 0:
                found[f"{name}.side"] = (1, 1, channels, 4 * inner)
            channels = 4 * inner
    return found


def _as_it_is(x: jax.Array) -> jax.Array:
    return x


def resnet_logits(
    params: Any, means: Any, x: jax.Array, split: Split, average: Split = _as_it_is
) -> tuple[jax.Array, Any]:
    """The classes of images, and the running statistics after this batch.

    Arguments:
        params, means: weights, and running statistics.
        x: the images.
        split: marks images as split.
        average: over the devices, of the statistics of the images of one device.
    """
    running = {}

    def layer(name: str, x: jax.Array, stride: int = 1, last: bool = False) -> jax.Array:
        """Convolution, then batch norm over the whole batch, in float32."""
        p = params[name]
        y = split(convolved(x, p["kernel"], stride)).astype(jnp.float32)
        mean, square = average(jnp.stack([jnp.mean(y, (0, 1, 2)), jnp.mean(y * y, (0, 1, 2))]))
        variance = square - mean * mean
        now = {"mean": mean, "variance": variance}
        running[name] = jax.tree.map(lambda old, new: 0.9 * old + 0.1 * new, means[name], now)
        y = (y - mean) * (jax.lax.rsqrt(variance + 1e-5) * p["scale"]) + p["bias"]
        return (y if last else jax.nn.relu(y)).astype(BF16)

    x = layer("stem", x.astype(BF16), 2)
    x = jax.lax.reduce_window(x, -jnp.inf, jax.lax.max, (1, 3, 3, 1), (1, 2, 2, 1), "SAME")
    for stage, (_, count) in enumerate(STAGES):
        for i in range(count):
            name, stride = f"{stage}.{i}", 2 if i == 0 and stage else 1
            y = layer(f"{name}.b", layer(f"{name}.a", x), stride)
            y = layer(f"{name}.c", y, last=True)
            side = x if i else layer(f"{name}.side", x, stride, last=True)
            x = split(jax.nn.relu(y + side))
    pooled = jnp.mean(x.astype(jnp.float32), (1, 2))
    return pooled @ params["head"], running


def _resnet_step(mark: Mark, average: Split = _as_it_is) -> Callable[..., Any]:
    def split(x: jax.Array) -> jax.Array:
        return mark(x, "d", *[None] * (x.ndim - 1))

    def loss(params: Any, means: Any, images: jax.Array, labels: jax.Array) -> Any:
        logits, means = resnet_logits(params, means, images, split, average)
        losses = optax.softmax_cross_entropy_with_integer_labels(split(logits), labels)
        return average(jnp.mean(losses)), means

    def step(params: Any, means: Any, state: Any, images: jax.Array, labels: jax.Array) -> Any:
        gradient = jax.value_and_grad(loss, has_aux=True)
        (value, means), gradients = gradient(params, means, images, labels)
        updates, state = ADAMW.update(gradients, state, params)
        return optax.apply_updates(params, updates), means, state, value

    return step


def resnet(batch: int = 1024, side: int = 224) -> Step:
    """ResNet-50, batch norm, data parallel. The statistics are those of the whole batch."""
    params: dict[str, Any] = {"head": aval(2048, 1000)}
    means = {}
    for name, shape in _resnet_layers().items():
        channels = aval(shape[-1])
        params[name] = {"kernel": aval(*shape), "scale": channels, "bias": channels}
        means[name] = {"mean": channels, "variance": channels}
    state = jax.eval_shape(ADAMW.init, params)
    held = (params, means, state)
    return Step(
        make=_resnet_step,
        avals=(*held, aval(batch, side, side, 3), aval(batch, dtype="int32")),
        in_specs=(*map(replicated, held), P("d"), P("d")),
        out_specs=(*map(replicated, held), P()),
        mesh=(("d", 16),),
        donate=(0, 1, 2),
        by_hand=_resnet_step(Mark(), lambda x: jax.lax.pmean(x, "d")),
    )


# --- a diffusion U-Net --------------------------------------------------------------------------

CHANNELS = (128, 256, 512)
"""Of each level; each level has half of the height and width of the one before."""


def _residual_shapes(before: int, after: int, time: int) -> dict[str, tuple[int, ...]]:
    return {
        "norm1": (before,),
        "conv1": (3, 3, before, after),
        "time": (time, after),
        "norm2": (after,),
        "conv2": (3, 3, after, after),
        **({"side": (1, 1, before, after)} if before != after else {}),
    }


def unet_shapes(channels: tuple[int, ...] = CHANNELS, image: int = 3) -> Any:
    """Shapes of the weights of a U-Net."""
    first, last, time = channels[0], channels[-1], 4 * channels[0]
    down, up = [], []
    befores = (first, *channels[:-1])
    for level, (before, after) in enumerate(zip(befores, channels, strict=True)):
        down.append({"block": _residual_shapes(before, after, time)})
        up.insert(0, {"block": _residual_shapes(2 * after, before, time)})
        if level < len(channels) - 1:
            down[-1]["half"] = (3, 3, after, after)
            up[0]["twice"] = (3, 3, after, after)
    attend = {"norm": (last,), "qkv": (last, 3, last // 64, 64), "out": (last // 64, 64, last)}
    shapes = {
        "time": [(first, time), (time, time)],
        "first": (3, 3, image, first),
        "down": down,
        "attend": attend,
        "middle": _residual_shapes(last, last, time),
        "up": up,
        "norm": (first,),
        "last": (3, 3, first, image),
    }
    return jax.tree.map(lambda s: aval(*s), shapes, is_leaf=lambda s: isinstance(s, tuple))


def _group_norm(x: jax.Array, scale: jax.Array) -> jax.Array:
    """Normalised over each of 32 groups of channels of each image, in float32."""
    groups = x.astype(jnp.float32).reshape(*x.shape[:3], 32, -1)
    mean = jnp.mean(groups, (1, 2, 4), keepdims=True)
    variance = jnp.mean(jnp.square(groups - mean), (1, 2, 4), keepdims=True)
    y = (groups - mean) * jax.lax.rsqrt(variance + 1e-5)
    return (y.reshape(x.shape) * scale).astype(BF16)


def _residual(p: Any, x: jax.Array, time: jax.Array, split: Split) -> jax.Array:
    h = split(convolved(jax.nn.silu(_group_norm(x, p["norm1"])), p["conv1"]))
    h = h + (time @ p["time"].astype(BF16))[:, None, None]
    h = split(convolved(jax.nn.silu(_group_norm(h, p["norm2"])), p["conv2"]))
    return h + (convolved(x, p["side"]) if "side" in p else x)


def _attended(p: Any, x: jax.Array, split: Split) -> jax.Array:
    flat = _group_norm(x, p["norm"]).reshape(x.shape[0], -1, x.shape[-1])
    q, k, v = split_in_three(jnp.einsum("bsd,dthk->tbshk", flat, p["qkv"].astype(BF16)), split)
    out = jnp.einsum("bshk,hkd->bsd", attention(q, k, v, False), p["out"].astype(BF16))
    return split(x + out.reshape(x.shape))


def split_in_three(x: jax.Array, split: Split) -> tuple[jax.Array, jax.Array, jax.Array]:
    """The queries, keys and values of one product."""
    return split(x[0]), split(x[1]), split(x[2])


def denoised(params: Any, x: jax.Array, times: jax.Array, split: Split) -> jax.Array:
    """The noise that a U-Net sees in images `x` at `times` between 0 and 1."""
    width = params["time"][0].shape[0]
    rates = jnp.exp(-jnp.arange(width // 2) / (width // 2) * 9.0)
    angles = 1000.0 * times[:, None] * rates
    t = jnp.concatenate([jnp.sin(angles), jnp.cos(angles)], -1).astype(BF16)
    for weight in params["time"]:
        t = split(jax.nn.silu(t @ weight.astype(BF16)))
    x = split(convolved(x.astype(BF16), params["first"]))
    kept = []
    for p in params["down"]:
        x = _residual(p["block"], x, t, split)
        kept.append(x)
        if "half" in p:
            x = split(convolved(x, p["half"], 2))
    x = _residual(params["middle"], _attended(params["attend"], x, split), t, split)
    for p in params["up"]:
        if "twice" in p:
            x = jnp.repeat(jnp.repeat(x, 2, 1), 2, 2)
            x = split(convolved(x, p["twice"]))
        x = _residual(p["block"], jnp.concatenate([x, kept.pop()], -1), t, split)
    return convolved(jax.nn.silu(_group_norm(x, params["norm"])), params["last"])


def denoising_loss(mark: Mark) -> Callable[..., jax.Array]:
    """`loss(params, images, seed)`: squared error of the noise, which is drawn from the seed."""

    def split(x: jax.Array) -> jax.Array:
        return mark(x, "d", *[None] * (x.ndim - 1))

    def loss(params: Any, images: jax.Array, seed: jax.Array) -> jax.Array:
        for_noise, for_times = jax.random.split(jax.random.key(seed))
        noise = split(jax.random.normal(for_noise, images.shape, BF16))
        times = split(jax.random.uniform(for_times, images.shape[:1]))
        share = jnp.cos(times * jnp.pi / 2)[:, None, None, None]
        noisy = share * images + jnp.sqrt(1 - share * share) * noise
        error = denoised(params, noisy, times, split).astype(jnp.float32) - noise
        return jnp.mean(jnp.square(error))

    return loss


def unet(batch: int = 256, side: int = 64, channels: tuple[int, ...] = CHANNELS) -> Step:
    """Diffusion U-Net, data parallel."""
    params = unet_shapes(channels)
    step = training(
        loss=denoising_loss,
        params=params,
        specs=replicated(params),
        batch=(aval(batch, side, side, 3), aval(dtype="uint32")),
        batch_specs=(P("d"), P()),
        mesh=(("d", 16),),
    )

    def each_its_noise(params: Any, images: jax.Array, seed: jax.Array) -> jax.Array:
        """The same loss of other numbers: each device draws its own."""
        own = seed + jax.lax.axis_index("d").astype(seed.dtype)
        return denoising_loss(Mark())(params, images, own)

    return replace(step, by_hand=training_step(averaged(each_its_noise, "d")))
