"""Pieces of training programs for `benchmarks.fragments`: a maker and sizes for each class."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax import lax

from benchmarks.steps.program import aval
from benchmarks.steps.transformer import attention, rms_norm, rotated

BF16, SEED = "bfloat16", 11

Make = Callable[..., tuple[Callable[..., Any], tuple[Any, ...]]]
"""`make(*sizes)`: a function and the shapes of its arguments."""


@dataclass(frozen=True, slots=True)
class Fragment:
    """A piece of a program.

    Arguments:
        kind: its class.
        sizes: what its class was made with.
        fn: the function.
        avals: shapes of its arguments.
        unseen: whether prices may not be tuned on it.
    """

    kind: str
    sizes: tuple[Any, ...]
    fn: Callable[..., Any]
    avals: tuple[Any, ...]
    unseen: bool

    def __str__(self) -> str:
        return f"{self.kind} {' '.join(map(str, self.sizes))}"


CLASSES: dict[str, tuple[Make, list[tuple[Any, ...]]]] = {}


def _fragments(*sizes: Any) -> Callable[[Make], Make]:
    """Enters a maker with the sizes of its fragments."""

    def enter(make: Make) -> Make:
        CLASSES[make.__name__] = make, [s if isinstance(s, tuple) else (s,) for s in sizes]
        return make

    return enter


def _both(fn: Callable[..., Any], count: int = 1) -> Callable[..., Any]:
    """A function with its gradient by the first arguments; the cotangent is the last argument."""

    def run(*args: Any) -> Any:
        out, back = jax.vjp(lambda *a: fn(*a, *args[count:-1]), *args[:count])
        return out, back(args[-1])

    return run


ROWS = ((8192, 4096), (16384, 2048), (4096, 8192), (32768, 1024), (8192, 2048), (16384, 4096))
TYPED = tuple((*s, d) for s in ROWS[:4] for d in (BF16, "float32"))


def _updated(tx: optax.GradientTransformation, m: int, n: int) -> Any:
    """An optimiser's update of one matrix, with the shapes of its arguments."""

    def step(p: Any, g: Any, s: Any) -> Any:
        u, s = tx.update(g, s, p)
        return optax.apply_updates(p, u), s

    return step, (aval(m, n), aval(m, n), jax.eval_shape(tx.init, aval(m, n)))


@_fragments(*ROWS, (1024, 50304), (4096, 11008))
def adamw(m: int, n: int) -> Any:
    return _updated(optax.adamw(3e-4, weight_decay=0.1), m, n)


@_fragments(*ROWS)
def momentum(m: int, n: int) -> Any:
    return _updated(optax.sgd(0.1, momentum=0.9), m, n)


@_fragments(*ROWS)
def sgd_mixed(m: int, n: int) -> Any:
    def step(p: Any, g: Any) -> Any:
        p = p - 0.1 * g.astype("float32")
        return p, p.astype(BF16)

    return step, (aval(m, n), aval(m, n, dtype=BF16))


@_fragments(*TYPED)
def layer_norm(m: int, n: int, dtype: str) -> Any:
    def norm(x: Any, w: Any, b: Any) -> Any:
        y = x.astype("float32")
        y = y - y.mean(-1, keepdims=True)
        y = y * lax.rsqrt((y * y).mean(-1, keepdims=True) + 1e-6)
        return (y * w + b).astype(dtype)

    return norm, (aval(m, n, dtype=dtype), aval(n), aval(n))


@_fragments(*TYPED)
def rms_norm_both(m: int, n: int, dtype: str) -> Any:
    x = aval(m, n, dtype=dtype)
    return _both(rms_norm, 2), (x, aval(n), x)


@_fragments(*TYPED)
def softmax(m: int, n: int, dtype: str) -> Any:
    return lambda x: jax.nn.softmax(x * 0.1), (aval(m, n, dtype=dtype),)


@_fragments(*TYPED)
def softmax_both(m: int, n: int, dtype: str) -> Any:
    x = aval(m, n, dtype=dtype)
    return _both(jax.nn.softmax), (x, x)


@_fragments(
    (8192, 1024, 4096),
    (8192, 2048, 8192),
    (4096, 4096, 4096),
    (16384, 512, 2048),
    (2048, 4096, 16384),
)
def gelu_products(m: int, d: int, h: int) -> Any:
    def mlp(x: Any, w: Any, v: Any) -> Any:
        return jax.nn.gelu(x @ w) @ v

    return mlp, (aval(m, d, dtype=BF16), aval(d, h, dtype=BF16), aval(h, d, dtype=BF16))


@_fragments(
    (8192, 1024, 4096),
    (8192, 2048, 8192),
    (4096, 4096, 4096),
    (16384, 512, 2048),
    (2048, 4096, 16384),
)
def gelu_products_both(m: int, d: int, h: int) -> Any:
    fn, args = gelu_products(m, d, h)
    return _both(fn, 3), (*args, args[0])


@_fragments((8192, 1024, 4096), (8192, 2048, 5632), (4096, 4096, 4096), (16384, 512, 2048))
def gated_products(m: int, d: int, h: int) -> Any:
    def mlp(x: Any, w: Any, g: Any, v: Any) -> Any:
        up = jnp.dot(x, w.astype(BF16)) * jax.nn.silu(jnp.dot(x, g.astype(BF16)))
        return x + up @ v.astype(BF16)

    return mlp, (aval(m, d, dtype=BF16), aval(d, h), aval(d, h), aval(h, d))


@_fragments(
    (8, 1024, 16, 64), (4, 2048, 16, 128), (16, 512, 32, 64), (2, 4096, 16, 128), (8, 2048, 8, 128)
)
def rotary(b: int, s: int, h: int, k: int) -> Any:
    return lambda x: rotated(x, jnp.arange(s)), (aval(b, s, h, k, dtype=BF16),)


HEADS = (
    (4, 1024, 16, 64),
    (2, 2048, 8, 128),
    (8, 512, 16, 64),
    (1, 4096, 4, 128),
    (4, 1024, 8, 128),
)


@_fragments(*HEADS)
def attention_causal(b: int, s: int, h: int, k: int) -> Any:
    x = aval(b, s, h, k, dtype=BF16)
    return lambda q, k, v: attention(q, k, v, True), (x, x, x)


@_fragments(*HEADS)
def attention_both(b: int, s: int, h: int, k: int) -> Any:
    x = aval(b, s, h, k, dtype=BF16)
    return _both(lambda q, k, v: attention(q, k, v, False), 3), (x, x, x, x)


LOGITS = ((4096, 32768), (8192, 8192), (2048, 50304), (16384, 4096), (1024, 131072))


def _entropy(x: Any, labels: Any) -> Any:
    picked = jnp.take_along_axis(x, labels[:, None], -1)[:, 0]
    return jnp.mean(jax.nn.logsumexp(x, -1) - picked)


@_fragments(*LOGITS)
def cross_entropy(m: int, n: int) -> Any:
    return _entropy, (aval(m, n), aval(m, dtype="int32"))


@_fragments(*LOGITS)
def cross_entropy_both(m: int, n: int) -> Any:
    return jax.value_and_grad(_entropy), (aval(m, n), aval(m, dtype="int32"))


@_fragments((8192, 1024, 32768), (4096, 1024, 8192), (16384, 512, 16384), (4096, 1024, 32000))
def logits_loss(m: int, d: int, n: int) -> Any:
    def loss(x: Any, w: Any, labels: Any) -> Any:
        return _entropy(jnp.dot(x, w.astype(BF16), preferred_element_type="float32"), labels)

    x, w = aval(m, d, dtype=BF16), aval(d, n)
    return jax.value_and_grad(loss, (0, 1)), (x, w, aval(m, dtype="int32"))


EMBEDDINGS = ((8192, 32768, 1024), (16384, 32000, 512), (4096, 50304, 2048), (32768, 8192, 768))


@_fragments(*EMBEDDINGS)
def embedding(m: int, v: int, d: int) -> Any:
    return lambda e, t: e.astype(BF16)[t], (aval(v, d), aval(m, dtype="int32"))


@_fragments(*EMBEDDINGS)
def embedding_gradient(m: int, v: int, d: int) -> Any:
    def grad(t: Any, y: Any) -> Any:
        return jnp.zeros((v, d), BF16).at[t].add(y).astype("float32")

    return grad, (aval(m, dtype="int32"), aval(m, d, dtype=BF16))


IMAGES = ((64, 56, 256), (128, 28, 512), (256, 28, 128), (32, 112, 128), (256, 14, 1024))


@_fragments(*IMAGES)
def batch_norm(b: int, s: int, c: int) -> Any:
    def norm(x: Any, w: Any) -> Any:
        y = x.astype("float32")
        mean = y.mean((0, 1, 2))
        var = (y * y).mean((0, 1, 2)) - mean * mean
        return jax.nn.relu((y - mean) * lax.rsqrt(var + 1e-5) * w).astype(BF16), mean, var

    return norm, (aval(b, s, s, c, dtype=BF16), aval(c))


@_fragments((64, 56, 64), (128, 28, 128), (128, 14, 256), (32, 56, 128))
def conv_block(b: int, s: int, c: int) -> Any:
    def block(x: Any, w: Any, scale: Any) -> Any:
        y = lax.conv_general_dilated(
            x, w, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC")
        )
        return jax.nn.relu(y * scale) + x

    return block, (aval(b, s, s, c, dtype=BF16), aval(3, 3, c, c, dtype=BF16), aval(c, dtype=BF16))


@_fragments((64, 56, 64), (128, 28, 128), (128, 14, 256), (32, 56, 128))
def conv_block_both(b: int, s: int, c: int) -> Any:
    fn, args = conv_block(b, s, c)
    return _both(fn, 2), (*args, args[0])


@_fragments((8192, 2048), (16384, 1024), (4096, 4096), (32768, 1024))
def dropout(m: int, n: int) -> Any:
    def drop(key: Any, x: Any) -> Any:
        keep = jax.random.bernoulli(jax.random.wrap_key_data(key), 0.9, x.shape)
        return jnp.where(keep, x / 0.9, 0)

    return drop, (aval(2, dtype="uint32"), aval(m, n, dtype=BF16))


@_fragments((8, 4096, 1024), (16, 8192, 512), (4, 2048, 2048), (12, 4096, 768))
def scanned_layers(layers: int, m: int, d: int) -> Any:
    def run(x: Any, ws: Any) -> Any:
        return lax.scan(
            lambda x, w: (x + jnp.tanh(rms_norm(x, w[0]) @ w.astype(BF16)), None), x, ws
        )[0]

    return run, (aval(m, d, dtype=BF16), aval(layers, d, d))


@_fragments((64, 8192, 1024), (128, 4096, 512), (32, 16384, 1024), (64, 4096, 2048))
def recurrence(steps: int, m: int, d: int) -> Any:
    def run(x: Any, h: Any) -> Any:
        return lax.scan(lambda h, x: ((h := 0.9 * h + x), h.astype(BF16)), h, x)

    return run, (
        aval(steps, m, d, dtype=BF16) if steps < 64 else aval(steps, m // 8, d, dtype=BF16),
        aval(m if steps < 64 else m // 8, d),
    )


@_fragments((65536, 512, 16384), (32768, 1024, 32768), (16384, 2048, 8192), (8192, 4096, 8192))
def gather_rows(n: int, d: int, m: int) -> Any:
    return lambda x, i: x[i] * 2, (aval(n, d), aval(m, dtype="int32"))


@_fragments((65536, 512, 16384), (32768, 1024, 8192), (16384, 2048, 8192), (8192, 4096, 4096))
def scatter_rows(n: int, d: int, m: int) -> Any:
    return lambda x, i, y: x.at[i].add(y), (aval(n, d), aval(m, dtype="int32"), aval(m, d))


@_fragments((4096, 4096), (8192, 1024), (1024, 16384), (16384, 2048))
def cumulative_sum(m: int, n: int) -> Any:
    return lambda x: jnp.cumsum(x, 1), (aval(m, n),)


@_fragments((1024, 4096), (4096, 1024), (256, 16384), (2048, 2048))
def sort(m: int, n: int) -> Any:
    return lambda x: jnp.sort(x, 1), (aval(m, n),)


@_fragments(*TYPED)
def transpose(m: int, n: int, dtype: str) -> Any:
    return lambda x: x.T * 2, (aval(m, n, dtype=dtype),)


@_fragments((8, 1024, 16, 64), (4, 2048, 16, 128), (16, 512, 32, 64), (2, 4096, 16, 128))
def transpose_heads(b: int, s: int, h: int, k: int) -> Any:
    return lambda x: x.transpose(0, 2, 1, 3) + 1, (aval(b, s, h, k, dtype=BF16),)


@_fragments((8192, 4096, 8), (16384, 2048, 16), (4096, 8192, 32), (32768, 1024, 4))
def reshape(m: int, n: int, k: int) -> Any:
    return lambda x: x.reshape(m, k, n // k).sum(1), (aval(m, n),)


@_fragments(*ROWS)
def cast(m: int, n: int) -> Any:
    return lambda x: x.astype(BF16), (aval(m, n),)


@_fragments(*ROWS)
def gelu(m: int, n: int) -> Any:
    return jax.nn.gelu, (aval(m, n, dtype=BF16),)


@_fragments(*ROWS)
def residual(m: int, n: int) -> Any:
    return lambda x, y, w: (x + y * w).astype(BF16), (aval(m, n, dtype=BF16), aval(m, n), aval(n))


@_fragments(*TYPED)
def reduce_rows(m: int, n: int, dtype: str) -> Any:
    return lambda x: (x.astype("float32") ** 2).sum(1), (aval(m, n, dtype=dtype),)


@_fragments(*TYPED)
def reduce_columns(m: int, n: int, dtype: str) -> Any:
    return lambda x: jnp.abs(x).astype("float32").sum(0), (aval(m, n, dtype=dtype),)


@_fragments((4096, 4096, 4096), (8192, 1024, 8192), (2048, 8192, 2048), (16384, 2048, 2048))
def product_bias(m: int, k: int, n: int) -> Any:
    return lambda x, w, b: jax.nn.relu(x @ w + b), (
        aval(m, k, dtype=BF16),
        aval(k, n, dtype=BF16),
        aval(n, dtype=BF16),
    )


@_fragments((4096, 4096), (8192, 2048), (2048, 8192), (16384, 1024))
def clipped_norm(m: int, n: int) -> Any:
    def step(p: Any, g: Any) -> Any:
        norm = jnp.sqrt(jnp.sum(g.astype("float32") ** 2))
        return p - 0.1 * g * jnp.minimum(1.0, 1.0 / norm)

    return step, (aval(m, n), aval(m, n))


@_fragments((64, 56, 256), (128, 28, 512), (32, 112, 128))
def max_pool(b: int, s: int, c: int) -> Any:
    def pool(x: Any) -> Any:
        return lax.reduce_window(x, -jnp.inf, lax.max, (1, 2, 2, 1), (1, 2, 2, 1), "VALID")

    return pool, (aval(b, s, s, c),)


@_fragments((8192, 4096), (4096, 8192), (16384, 2048), (32768, 1024))
def shifted(m: int, n: int) -> Any:
    return lambda x: x[1:] - x[:-1], (aval(m, n),)


@_fragments((8192, 2048), (4096, 4096), (16384, 1024), (2048, 8192))
def joined(m: int, n: int) -> Any:
    return lambda x, y: jnp.concatenate([x * 2, jnp.tanh(y)], 1), (aval(m, n), aval(m, n))


def fragments() -> Iterator[Fragment]:
    """All fragments; of each class, half are unseen."""
    for kind, (make, every) in CLASSES.items():
        order = random.Random(f"{SEED} {kind}").sample(range(len(every)), len(every))
        for i, sizes in enumerate(every):
            yield Fragment(kind, sizes, *make(*sizes), unseen=order.index(i) % 2 == 1)
