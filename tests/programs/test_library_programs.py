"""Programs like those in the documentation of Flax, Equinox and Optax. On a 2x4 mesh they train the
same under `sbp.jit` as under `jax.jit`."""

from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen, nnx

import sbp
from tests.same import assert_same_results

# ---- programs ------------------------------------------------------------------------------------

Program = tuple[Callable[..., Any], Any, tuple[Any, ...]]
"""A step `(state, *batch) -> (state, loss)`, the first state, and the batch."""

X = jax.random.normal(jax.random.key(1), (16, 8))
Y = jax.random.normal(jax.random.key(2), (16, 4))
LABELS = jnp.arange(16) % 4
IMAGES = jax.random.normal(jax.random.key(3), (8, 8, 8, 1))
TOKENS = jax.random.randint(jax.random.key(4), (8, 8), 0, 16)


def program(
    loss: Callable[..., Any], params: Any, batch: tuple[Any, ...], optimizer: Any = None
) -> Program:
    """The program of `loss(params, *batch)` under an optimiser; the state is (params, its state).
    It is SGD with momentum if no optimiser is given."""
    optimizer = optimizer or optax.sgd(0.1, momentum=0.9)

    def step(state: Any, *batch: Any) -> Any:
        params, inner = state
        value, grads = jax.value_and_grad(loss)(params, *batch)
        updates, inner = optimizer.update(grads, inner, params)
        return (optax.apply_updates(params, updates), inner), value

    return step, (params, optimizer.init(params)), batch


def cnn() -> Program:
    """Flax Linen: convolutions and pooling."""

    class Cnn(linen.Module):
        @linen.compact
        def __call__(self, x: Any) -> Any:
            x = linen.relu(linen.Conv(8, (3, 3))(x))
            x = linen.avg_pool(x, (2, 2), strides=(2, 2))
            return linen.Dense(4)(x.reshape(x.shape[0], -1))

    model = Cnn()

    def loss(params: Any, x: Any, labels: Any) -> Any:
        logits: Any = model.apply(params, x)
        return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()

    return program(loss, model.init(jax.random.key(0), IMAGES), (IMAGES, LABELS[:8]))


def lstm() -> Program:
    """Equinox: an LSTM cell under `jax.lax.scan`."""
    cell = eqx.nn.LSTMCell(4, 16, key=jax.random.key(0))
    head = eqx.nn.Linear(16, 1, key=jax.random.key(1))
    params, static = eqx.partition((cell, head), eqx.is_inexact_array)

    def loss(params: Any, x: Any, y: Any) -> Any:
        cell, head = eqx.combine(params, static)

        def one(sequence: Any) -> Any:
            (h, _), _ = jax.lax.scan(
                lambda c, s: (cell(s, c), None), (jnp.zeros(16), jnp.zeros(16)), sequence
            )
            return head(h)[0]

        return jnp.mean((jax.vmap(one)(x) - y) ** 2)

    return program(loss, params, (X.reshape(16, 2, 4), Y[:, 0]))


def transformer_block() -> Program:
    """Flax Linen: embedding, attention with a causal mask, layer norm."""

    class Block(linen.Module):
        @linen.compact
        def __call__(self, tokens: Any) -> Any:
            x = linen.Embed(16, 16)(tokens)
            mask = linen.make_causal_mask(tokens)
            x = x + linen.MultiHeadDotProductAttention(num_heads=4)(linen.LayerNorm()(x), mask=mask)
            x = x + linen.Dense(16)(linen.gelu(linen.Dense(32)(linen.LayerNorm()(x))))
            return linen.Dense(16)(x)

    model = Block()

    def loss(params: Any, tokens: Any) -> Any:
        logits: Any = model.apply(params, tokens)
        return optax.softmax_cross_entropy_with_integer_labels(logits[:, :-1], tokens[:, 1:]).mean()

    return program(loss, model.init(jax.random.key(0), TOKENS), (TOKENS,))


def vae() -> Program:
    """Flax NNX: a variational autoencoder; its key is part of the state."""

    class Vae(nnx.Module):
        def __init__(self, rngs: nnx.Rngs):
            self.encode, self.decode = nnx.Linear(8, 6, rngs=rngs), nnx.Linear(3, 8, rngs=rngs)

        def __call__(self, x: Any, key: Any) -> Any:
            mean, logvar = jnp.split(self.encode(x), 2, axis=-1)
            z = mean + jnp.exp(logvar / 2) * jax.random.normal(key, mean.shape)
            return self.decode(z), mean, logvar

    graph, params = nnx.split(Vae(nnx.Rngs(0)))

    def step(state: Any, x: Any) -> Any:
        params, key = state
        key, now = jax.random.split(key)

        def loss(params: Any) -> Any:
            out, mean, logvar = nnx.merge(graph, params)(x, now)
            kl = -0.5 * jnp.sum(1 + logvar - mean**2 - jnp.exp(logvar), -1)
            return jnp.mean(jnp.sum((out - x) ** 2, -1) + kl)

        value, grads = jax.value_and_grad(loss)(params)
        return (jax.tree.map(lambda p, g: p - 0.01 * g, params, grads), key), value

    return step, (params, jax.random.key(5)), (X,)


def reconstruction(params: Any, x: Any) -> Any:
    """The loss of a linear autoencoder with a tanh between."""
    return jnp.mean((jnp.tanh(x @ params["in"]) @ params["out"] - x) ** 2)


def autoencoder() -> Program:
    """Optax: a chain of clipping, weight decay, a schedule and SGD."""
    chain = optax.chain(
        optax.clip_by_global_norm(1.0),
        optax.add_decayed_weights(1e-3),
        optax.sgd(optax.cosine_decay_schedule(0.1, 10), momentum=0.9, nesterov=True),
    )
    keys = jax.random.split(jax.random.key(0))
    params = {
        "in": jax.random.normal(keys[0], (8, 3)) / 3,
        "out": jax.random.normal(keys[1], (3, 8)) / 2,
    }
    return program(reconstruction, params, (X,), chain)


def lora() -> Program:
    """Optax: low-rank updates of frozen weights, by `multi_transform`."""
    keys = jax.random.split(jax.random.key(0))
    params = {
        "w": jax.random.normal(keys[0], (8, 4)),
        "a": jax.random.normal(keys[1], (8, 2)),
        "b": jnp.zeros((2, 4)),
    }
    labels = {"w": "frozen", "a": "trained", "b": "trained"}
    optimizer = optax.multi_transform(
        {"frozen": optax.set_to_zero(), "trained": optax.sgd(0.1)}, labels
    )
    loss = lambda params, x, y: jnp.mean((x @ params["w"] + x @ params["a"] @ params["b"] - y) ** 2)
    return program(loss, params, (X, Y), optimizer)


def accumulation() -> Program:
    """Optax: `MultiSteps` applies the mean of two gradients in every second step."""
    _, (params, _), batch = autoencoder()
    steps: Any = optax.MultiSteps(optax.sgd(0.1), every_k_schedule=2)
    return program(reconstruction, params, batch, steps)


def batch_norm() -> Program:
    """Flax Linen: batch norm with its statistics as a mutable collection."""

    class Net(linen.Module):
        @linen.compact
        def __call__(self, x: Any) -> Any:
            x = linen.BatchNorm(use_running_average=False)(linen.Dense(16, use_bias=False)(x))
            return linen.Dense(4)(linen.relu(x))

    model = Net()
    variables = model.init(jax.random.key(0), X)

    def step(state: Any, x: Any, y: Any) -> Any:
        params, statistics = state

        def loss(params: Any) -> Any:
            given = {"params": params, "batch_stats": statistics}
            out, changed = model.apply(given, x, mutable=["batch_stats"])
            return jnp.mean((out - y) ** 2), changed["batch_stats"]

        (value, changed), grads = jax.value_and_grad(loss, has_aux=True)(params)
        return (jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), changed), value

    return step, (variables["params"], variables["batch_stats"]), (X, Y)


def loss_scaling() -> Program:
    """Mixed precision with a dynamic scale: a step whose gradients overflow is left out."""
    params = jax.random.normal(jax.random.split(jax.random.key(0))[0], (8, 4)) / 3

    def step(state: Any, x: Any, y: Any) -> Any:
        params, scale = state

        def loss(params: Any) -> Any:
            out = x.astype(jnp.float16) @ params.astype(jnp.float16)
            return jnp.mean((out.astype(jnp.float32) - y) ** 2) * scale

        value, grads = jax.value_and_grad(loss)(params)
        grads = grads / scale
        finite = jnp.isfinite(grads).all()
        params = jnp.where(finite, params - 0.1 * grads, params)
        return (params, jnp.where(finite, scale, scale / 2)), value / scale

    return step, (params, jnp.float32(2.0**12)), (X, Y)


def meta_learning() -> Program:
    """MAML: the gradient of a loss after an inner gradient step, for a batch of tasks."""
    _, (params, _), _ = lora()

    def inner(params: Any, x: Any, y: Any) -> Any:
        return jnp.mean((jnp.tanh(x @ params["w"] + x @ params["a"] @ params["b"]) - y) ** 2)

    def loss(params: Any, x: Any, y: Any) -> Any:
        def task(x: Any, y: Any) -> Any:
            grads = jax.grad(inner)(params, x[:2], y[:2])
            adapted = jax.tree.map(lambda p, g: p - 0.1 * g, params, grads)
            return inner(adapted, x[2:], y[2:])

        return jax.vmap(task)(x, y).mean()

    return program(loss, params, (X.reshape(4, 4, 8), Y.reshape(4, 4, 4)))


PROGRAMS = (
    cnn,
    lstm,
    transformer_block,
    vae,
    autoencoder,
    lora,
    accumulation,
    batch_norm,
    loss_scaling,
    meta_learning,
)


# ---- training ------------------------------------------------------------------------------------

STEPS = 3


@pytest.mark.parametrize("make", PROGRAMS, ids=lambda make: make.__name__)
def test_trains_as_under_jax_jit(make):
    step, state, batch = make()
    mesh = jax.make_mesh((2, 4), ("data", "model"))
    on_data = tuple("data:S(0)" for _ in batch)
    plain = jax.jit(step)
    # A donated state comes back with the types that it had.
    planned = sbp.jit(step, mesh, in_types=(None, *on_data), donate_argnums=0)
    want, got = state, jax.tree.map(jnp.copy, state)
    losses = []
    for _ in range(STEPS):
        want, loss = plain(want, *batch)
        got, planned_loss = planned(got, *batch)
        np.testing.assert_allclose(planned_loss, loss, rtol=1e-3)
        losses.append(float(loss))
    assert_same_results(want, got, rtol=1e-3, atol=1e-4)
    assert len(set(losses)) > 1, "the program does not train"
