"""Small programs, each with several ways to split it, for `benchmarks.plan_order`. Prices may be
corrected on these; those of `benchmarks.order_unseen` are left for the test.

Weights are float32 and matrix products bfloat16, unless a program says otherwise. Each way is
options of `sbp.jit`: types of arguments and results, a `memory_limit`, a `reduce_dtype`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

from benchmarks.steps.program import ADAMW, Mark, aval, training_step
from benchmarks.steps.transformer import (
    Axes,
    Shape,
    attention,
    language_model_loss,
    specs_of,
    weights_of,
)

BF16 = jnp.bfloat16
ONE_AXIS = (("d", 8),)


@dataclass(frozen=True, slots=True, kw_only=True)
class OrderProgram:
    """A program and the ways to split it.

    Arguments:
        fn, avals: the program and its arguments.
        ways: options of `sbp.jit` by the name of the way.
        mesh: size of each mesh axis, over all chips of `topology`.
        donate: positions of donated arguments.
    """

    fn: Callable[..., Any]
    avals: tuple[Any, ...]
    ways: Mapping[str, Mapping[str, Any]]
    mesh: tuple[tuple[str, int], ...] = ONE_AXIS
    topology: str = "v5e:2x4"
    donate: tuple[int, ...] = ()


def types(*of_arguments: Any) -> dict[str, Any]:
    """The way of these types of arguments."""
    return {"in_types": of_arguments}


def descent(loss: Callable[..., jax.Array]) -> Callable[..., Any]:
    """A step of gradient descent: `(params, *batch) -> params`."""

    def step(params: Any, *batch: Any) -> Any:
        gradients = jax.grad(loss)(params, *batch)
        return jax.tree.map(lambda p, g: p - 1e-3 * g.astype(p.dtype), params, gradients)

    return step


def product(x: jax.Array, w: jax.Array) -> jax.Array:
    """A matrix product in bfloat16."""
    return x.astype(BF16) @ w.astype(BF16)


def mlp_adamw() -> OrderProgram:
    """A two-layer network with AdamW."""

    def loss(p: Any, x: jax.Array) -> jax.Array:
        h = jax.nn.gelu(product(x, p["up"]))
        return jnp.mean(jnp.square(product(h, p["down"]).astype(jnp.float32)))

    params = {"up": aval(2048, 8192), "down": aval(8192, 2048)}
    state = jax.eval_shape(ADAMW.init, params)
    hidden = {"up": P(None, "d"), "down": P("d", None)}

    return OrderProgram(
        fn=training_step(loss),
        avals=(params, state, aval(8192, 2048)),
        ways={
            "data parallel": types(P(), P(), P("d")),
            "hidden units": types(hidden, None, P()),
            "fully sharded": types(P("d"), None, P("d")),
        },
        donate=(0, 1),
    )


def transformer() -> OrderProgram:
    """One layer of a decoder with its loss, by gradient descent."""
    s = Shape(layers=1, width=1024, heads=16, hidden=4096, vocabulary=8192, batch=32, length=512)

    def way(batch: Any = None, tensor: Any = None, weights: Any = None) -> dict[str, Any]:
        return types(specs_of(s, Axes(tensor=tensor, weights=weights)), P(batch, None))

    return OrderProgram(
        fn=descent(language_model_loss(s, Axes())(Mark())),
        avals=(weights_of(s), aval(32, 512, dtype="int32")),
        ways={
            "data parallel": way(batch="d"),
            "tensor parallel": way(tensor="d"),
            "fully sharded": way(batch="d", weights="d"),
        },
        donate=(0,),
    )


def convolutions() -> OrderProgram:
    """Three convolutions and a mean, by gradient descent."""

    def loss(p: Any, x: jax.Array) -> jax.Array:
        for w in p:
            x = jax.lax.conv_general_dilated(
                x.astype(BF16),
                w.astype(BF16),
                (1, 1),
                "SAME",
                dimension_numbers=("NHWC", "HWIO", "NHWC"),
            )
            x = jax.nn.relu(x)
        return jnp.mean(jnp.square(x.astype(jnp.float32)))

    params = [aval(3, 3, 128, 256), aval(3, 3, 256, 256), aval(3, 3, 256, 512)]
    return OrderProgram(
        fn=descent(loss),
        avals=(params, aval(64, 32, 32, 128)),
        ways={
            "images": types(P(), P("d")),
            "rows of images": types(P(), P(None, "d")),
            "channels": types(P(None, None, None, "d"), P()),
        },
        donate=(0,),
    )


def heads_or_positions() -> OrderProgram:
    """Causal attention with its gradients."""

    def gradients(q: jax.Array, k: jax.Array, v: jax.Array) -> Any:
        def value(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
            return jnp.sum(attention(q, k, v, True).astype(jnp.float32))

        return jax.grad(value, argnums=(0, 1, 2))(q, k, v)

    x = aval(4, 2048, 16, 128, dtype=BF16)
    heads, positions = P(None, None, "d"), P(None, "d")
    return OrderProgram(
        fn=gradients,
        avals=(x, x, x),
        ways={
            "heads": {**types(heads, heads, heads), "out_types": heads},
            "positions": {**types(positions, positions, positions), "out_types": positions},
            "whole": {**types(P(), P(), P()), "out_types": P()},
        },
    )


def embedding_loss() -> OrderProgram:
    """A table of embeddings that is read at both ends, by gradient descent."""

    def loss(table: jax.Array, tokens: jax.Array) -> jax.Array:
        x = table.astype(BF16)[tokens[:, :-1]]
        logits = jnp.einsum(
            "bsd,vd->bsv", x, table.astype(BF16), preferred_element_type=jnp.float32
        )
        picked = jnp.take_along_axis(logits, tokens[:, 1:, None], -1)[..., 0]
        return jnp.mean(jax.nn.logsumexp(logits, -1) - picked)

    return OrderProgram(
        fn=descent(loss),
        avals=(aval(65536, 512), aval(16, 513, dtype="int32")),
        ways={
            "vocabulary": types(P("d"), P()),
            "examples": types(P(), P("d")),
            "features": types(P(None, "d"), P("d")),
        },
        donate=(0,),
    )


def optimiser() -> OrderProgram:
    """AdamW alone, of gradients that every device has."""

    def update(params: Any, state: Any, gradients: Any) -> Any:
        updates, state = ADAMW.update(gradients, state, params)
        return jax.tree.map(jnp.add, params, updates), state

    params = {"a": aval(4096, 4096), "b": aval(4096, 1024)}
    state = jax.eval_shape(ADAMW.init, params)

    def way(weights: P, moments: P) -> dict[str, Any]:
        # The count of steps is no matrix.
        split = jax.tree.map(lambda a: moments if a.ndim else P(), state)
        return {**types(weights, split, P()), "out_types": (weights, split)}

    return OrderProgram(
        fn=update,
        avals=(params, state, params),
        ways={
            "whole": way(P(), P()),
            "moments split": way(P(), P("d")),
            "all split": way(P("d"), P("d")),
        },
        donate=(0, 1),
    )


def experts() -> OrderProgram:
    """A layer of eight experts with a capacity, by gradient descent."""

    def loss(p: Any, x: jax.Array) -> jax.Array:
        gates = jax.nn.softmax(x @ p["gate"])
        chosen = jax.nn.one_hot(jnp.argmax(gates, -1), 8)
        at = jnp.cumsum(chosen, 1) * chosen - 1
        slots = jax.nn.one_hot(at.astype(jnp.int32), 128, dtype=BF16)
        sent = jnp.einsum("gsec,gsd->egcd", slots, x.astype(BF16))
        h = jax.nn.relu(jnp.einsum("egcd,edh->egch", sent, p["up"].astype(BF16)))
        y = jnp.einsum("egch,ehd->egcd", h, p["down"].astype(BF16))
        combine = slots * gates.astype(BF16)[..., None]
        y = jnp.einsum("gsec,egcd->gsd", combine, y)
        return jnp.mean(jnp.square(y.astype(jnp.float32)))

    params = {"gate": aval(1024, 8), "up": aval(8, 1024, 4096), "down": aval(8, 4096, 1024)}
    return OrderProgram(
        fn=descent(loss),
        avals=(params, aval(16, 512, 1024)),
        ways={
            "experts": types({"gate": P(), "up": P("d"), "down": P("d")}, P("d")),
            "data parallel": types(P(), P("d")),
            "hidden units": types(
                {"gate": P(), "up": P(None, None, "d"), "down": P(None, "d")}, P("d")
            ),
        },
        donate=(0,),
    )


def scanned_layers() -> OrderProgram:
    """A scan over layers that are computed again backward, by gradient descent."""

    def loss(p: Any, x: jax.Array) -> jax.Array:
        @jax.checkpoint
        def layer(x: jax.Array, w: Any) -> tuple[jax.Array, None]:
            h = jax.nn.silu(product(x, w["up"]))
            return x + product(h, w["down"]), None

        x, _ = jax.lax.scan(layer, x.astype(BF16), p)
        return jnp.mean(jnp.square(x.astype(jnp.float32)))

    params = {"up": aval(6, 1024, 4096), "down": aval(6, 4096, 1024)}
    return OrderProgram(
        fn=descent(loss),
        avals=(params, aval(8192, 1024)),
        ways={
            "data parallel": types(P(), P("d")),
            "fully sharded": types(P(None, "d"), P("d")),
            "hidden units": types({"up": P(None, None, "d"), "down": P(None, "d")}, P()),
        },
        donate=(0,),
    )


def recurrence() -> OrderProgram:
    """A recurrent layer over 64 positions, by gradient descent."""

    def loss(p: Any, x: jax.Array) -> jax.Array:
        def turn(h: jax.Array, x: jax.Array) -> tuple[jax.Array, None]:
            return jnp.tanh(product(h, p["h"]) + product(x, p["x"])), None

        h, _ = jax.lax.scan(turn, jnp.zeros(x.shape[1:], BF16), x)
        return jnp.mean(jnp.square(h.astype(jnp.float32)))

    params = {"h": aval(2048, 2048), "x": aval(2048, 2048)}
    return OrderProgram(
        fn=descent(loss),
        avals=(params, aval(64, 1024, 2048)),
        ways={
            "examples": types(P(), P(None, "d")),
            "columns": types(P(None, "d"), P()),
            "columns and examples": types(P(None, "d"), P(None, "d")),
        },
        donate=(0,),
    )


TUNED = (
    mlp_adamw,
    transformer,
    convolutions,
    heads_or_positions,
    embedding_loss,
    optimiser,
    experts,
    scanned_layers,
    recurrence,
)
"""Programs on which prices may be corrected."""
