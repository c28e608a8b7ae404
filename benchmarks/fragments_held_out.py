"""Pieces of programs for `benchmarks.fragments` on which no price was ever tuned. A class that
is off is a finding, and no reason to change it here."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import optax

from benchmarks.fragment_classes import BF16, Fragment
from benchmarks.steps.program import aval

SIZES = ((8192, 2048), (4096, 4096), (16384, 1024))


def lion(m: int, n: int) -> Any:
    tx = optax.lion(1e-4, weight_decay=0.1)

    def step(p: Any, g: Any, state: Any) -> Any:
        updates, state = tx.update(g, state, p)
        return optax.apply_updates(p, updates), state

    return step, (aval(m, n), aval(m, n), jax.eval_shape(tx.init, aval(m, n)))


def averaged_weights(m: int, n: int) -> Any:
    def step(p: Any, mean: Any, g: Any) -> Any:
        p = p - 0.1 * g.astype("float32")
        return p, 0.999 * mean + 0.001 * p

    return step, (aval(m, n), aval(m, n), aval(m, n, dtype=BF16))


def group_norm(m: int, n: int) -> Any:
    def norm(x: Any, w: Any) -> Any:
        y = x.astype("float32").reshape(m // 256, 256, 32, n // 32)
        mean = y.mean((1, 3), keepdims=True)
        spread = ((y - mean) ** 2).mean((1, 3), keepdims=True)
        return ((y - mean) * jax.lax.rsqrt(spread + 1e-5)).reshape(m, n) * w

    return norm, (aval(m, n, dtype=BF16), aval(n))


def unit_rows(m: int, n: int) -> Any:
    return lambda x: x / jnp.linalg.norm(x, axis=-1, keepdims=True), (aval(m, n),)


def quantised(m: int, n: int) -> Any:
    def quantise(x: Any) -> Any:
        scale = jnp.abs(x).max(1, keepdims=True) / 127
        return jnp.round(x / scale).astype("int8"), scale

    return quantise, (aval(m, n),)


def squared_relu_products(m: int, n: int) -> Any:
    def fn(x: Any, up: Any, down: Any) -> Any:
        return jnp.square(jax.nn.relu(x @ up)) @ down

    wide = aval(n, 4 * n, dtype=BF16), aval(4 * n, n, dtype=BF16)
    return fn, (aval(m, n, dtype=BF16), *wide)


def huber_both(m: int, n: int) -> Any:
    def loss(x: Any, y: Any) -> Any:
        return optax.huber_loss(x.astype("float32"), y).mean()

    return jax.value_and_grad(loss), (aval(m, n, dtype=BF16), aval(m, n))


def masked_mean(m: int, n: int) -> Any:
    def mean(x: Any, mask: Any) -> Any:
        kept = jnp.where(mask[:, None], x.astype("float32"), 0)
        return kept.sum(0) / mask.sum()

    return mean, (aval(m, n, dtype=BF16), aval(m, dtype="bool"))


HELD_OUT = (
    lion,
    averaged_weights,
    group_norm,
    unit_rows,
    quantised,
    squared_relu_products,
    huber_both,
    masked_mean,
)


def held_out() -> Iterator[Fragment]:
    """The fragments, three of each class."""
    for make in HELD_OUT:
        for sizes in SIZES:
            yield Fragment(make.__name__, sizes, *make(*sizes), unseen=True)
