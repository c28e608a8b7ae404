"""Programs of `benchmarks.plan_order` on which no price is corrected."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

from benchmarks.order_programs import BF16, OrderProgram, descent, product, types
from benchmarks.steps.program import aval


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


def contrastive() -> OrderProgram:
    """A contrastive loss over the whole batch, with its gradients."""

    def loss(u: jax.Array, v: jax.Array) -> jax.Array:
        u, v = (z / jnp.linalg.norm(z, axis=-1, keepdims=True) for z in (u, v))
        scores = 20 * jnp.matmul(
            u.astype(BF16), v.astype(BF16).T, preferred_element_type=jnp.float32
        )
        sums = jax.nn.logsumexp(scores, 0) + jax.nn.logsumexp(scores, 1)
        return jnp.mean(sums / 2 - 20 * jnp.sum(u * v, -1))

    x = aval(8192, 1024)
    return OrderProgram(
        fn=jax.grad(loss, argnums=(0, 1)),
        avals=(x, x),
        ways={
            "examples": {**types(P("d"), P("d")), "out_types": P("d")},
            "features": {**types(P(None, "d"), P(None, "d")), "out_types": P(None, "d")},
            "whole": {**types(P(), P()), "out_types": P()},
        },
    )


def decoding() -> OrderProgram:
    """One token of attention to a cache."""

    def token(p: Any, k: jax.Array, v: jax.Array, x: jax.Array) -> Any:
        q, new_k, new_v = (jnp.einsum("bd,dhk->bhk", x, p[name]) for name in "qkv")
        k, v = k.at[:, 1000].set(new_k), v.at[:, 1000].set(new_v)
        scores = jnp.einsum("bhk,bshk->bhs", q, k, preferred_element_type=jnp.float32)
        weights = jax.nn.softmax(scores * 128**-0.5).astype(BF16)
        y = jnp.einsum("bhs,bshk->bhk", weights, v)
        return k, v, jnp.einsum("bhk,hkd->bd", y, p["o"])

    params = {name: aval(2048, 16, 128, dtype=BF16) for name in "qkv"}
    params["o"] = aval(16, 128, 2048, dtype=BF16)
    cache = aval(32, 2048, 16, 128, dtype=BF16)

    def way(weights: P, out: P, cache: P, x: P) -> dict[str, Any]:
        layer = {"q": weights, "k": weights, "v": weights, "o": out}
        return {**types(layer, cache, cache, x), "out_types": (cache, cache, x)}

    return OrderProgram(
        fn=token,
        avals=(params, cache, cache, aval(32, 2048, dtype=BF16)),
        ways={
            "heads": way(P(None, "d"), P("d"), P(None, None, "d"), P()),
            "examples": way(P(), P(), P("d"), P("d")),
            "positions": way(P(), P(), P(None, "d"), P()),
        },
        donate=(1, 2),
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


def narrow_sums() -> OrderProgram:
    """Three layers with bfloat16 weights, whose gradients are summed in bfloat16 or float32."""

    def loss(p: Any, x: jax.Array) -> jax.Array:
        for w in p:
            x = jax.nn.relu(x @ w)
        return jnp.mean(jnp.square(x.astype(jnp.float32)))

    params = [aval(4096, 4096, dtype=BF16)] * 3
    data = types(P(), P("d"))
    return OrderProgram(
        fn=descent(loss),
        avals=(params, aval(32768, 4096, dtype=BF16)),
        ways={
            "in bfloat16": data,
            "in float32": {**data, "reduce_dtype": jnp.float32},
            "fully sharded": types(P("d"), P("d")),
        },
        donate=(0,),
    )


def two_dims() -> OrderProgram:
    """A chain of large matrix products on a square of four chips."""

    def chain(a: jax.Array, b: jax.Array, c: jax.Array) -> jax.Array:
        return jax.nn.relu(a @ b) @ c

    x = aval(8192, 8192, dtype=BF16)
    panels, rows = P("d", "t"), P(("d", "t"))
    return OrderProgram(
        fn=chain,
        avals=(x, x, x),
        ways={
            "panels": {**types(panels, panels, panels), "out_types": panels},
            "rows": {**types(rows, rows, rows), "out_types": rows},
            "rows and whole": {**types(rows, P(), P()), "out_types": rows},
        },
        mesh=(("d", 2), ("t", 2)),
        topology="v5e:2x2",
    )


def graph_network() -> OrderProgram:
    """Messages along the edges of a graph, summed at its nodes, by gradient descent."""

    def loss(w: jax.Array, x: jax.Array, source: jax.Array, target: jax.Array) -> jax.Array:
        messages = jax.nn.relu(product(x[source], w)).astype(jnp.float32)
        sums = jax.ops.segment_sum(messages, target, x.shape[0])
        return jnp.mean(jnp.square(sums))

    edges = aval(65536, dtype="int32")
    return OrderProgram(
        fn=descent(loss),
        avals=(aval(512, 512), aval(8192, 512), edges, edges),
        ways={
            "edges": types(P(), P(), P("d"), P("d")),
            "features": types(P(None, "d"), P(), P(), P()),
            "whole": types(P(), P(), P(), P()),
        },
        donate=(0,),
    )


UNSEEN = (
    scanned_layers,
    contrastive,
    decoding,
    recurrence,
    narrow_sums,
    two_dims,
    graph_network,
)
"""Programs on which nothing is corrected."""
