"""Programs of `benchmarks.plan_order` on which no price is corrected."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

from benchmarks.order_programs import BF16, OrderProgram, descent, product, types
from benchmarks.steps.program import ADAMW, aval, training_step
from benchmarks.steps.transformer import attention, rms_norm


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


def gated_recurrence() -> OrderProgram:
    """A gated recurrent layer over 32 positions, with AdamW."""

    def loss(p: Any, x: jax.Array) -> jax.Array:
        def turn(h: jax.Array, x: jax.Array) -> tuple[jax.Array, jax.Array]:
            kept, read = jnp.split(jax.nn.sigmoid(product(x, p["gates"]) + p["bias"]), 2, -1)
            new = jnp.tanh(product(x, p["in"]) + product(read.astype(BF16) * h, p["state"]))
            h = (kept * h + (1 - kept) * new).astype(BF16)
            return h, h

        _, states = jax.lax.scan(turn, jnp.zeros((x.shape[1], 1024), BF16), x)
        return jnp.mean(jnp.square(product(states, p["out"]).astype(jnp.float32)))

    params = {
        "gates": aval(512, 2048),
        "bias": aval(2048),
        "in": aval(512, 1024),
        "state": aval(1024, 1024),
        "out": aval(1024, 512),
    }
    columns = {name: P(*[None] * (len(p.shape) - 1), "d") for name, p in params.items()}
    rows = {name: P("d") for name in params}
    state = jax.eval_shape(ADAMW.init, params)
    return OrderProgram(
        fn=training_step(loss),
        avals=(params, state, aval(32, 2048, 512)),
        ways={
            "examples": types(P(), P(), P(None, "d")),
            "columns": types(columns, None, P()),
            "fully sharded": types(rows, None, P(None, "d")),
        },
        donate=(0, 1),
    )


def scanned_adamw() -> OrderProgram:
    """A scan over normalised gated layers that keeps what the backward pass needs, with AdamW."""

    def loss(p: Any, x: jax.Array) -> jax.Array:
        def layer(x: jax.Array, w: Any) -> tuple[jax.Array, None]:
            h = rms_norm(x, w["norm"])
            h = jax.nn.gelu(product(h, w["gate"])) * product(h, w["up"])
            return x + product(h, w["down"]), None

        x, _ = jax.lax.scan(layer, x.astype(BF16), p)
        return jnp.mean(jnp.square(x.astype(jnp.float32)))

    up, down = aval(8, 1024, 2048), aval(8, 2048, 1024)
    params = {"norm": aval(8, 1024), "gate": up, "up": up, "down": down}
    hidden = {
        "norm": P(),
        "gate": P(None, None, "d"),
        "up": P(None, None, "d"),
        "down": P(None, "d"),
    }
    state = jax.eval_shape(ADAMW.init, params)
    split = jax.tree.map(lambda m: P(None, "d") if m.ndim > 1 else P(), state)
    return OrderProgram(
        fn=training_step(loss),
        avals=(params, state, aval(16384, 1024)),
        ways={
            "data parallel": types(P(), P(), P("d")),
            "hidden units": types(hidden, None, P()),
            "moments split": types(P(), split, P("d")),
        },
        donate=(0, 1),
    )


def ensemble() -> OrderProgram:
    """Eight networks that learn from the same examples, by gradient descent."""

    def loss(p: Any, x: jax.Array) -> jax.Array:
        def one(p: Any) -> jax.Array:
            y = product(jax.nn.relu(product(x, p["up"])), p["down"])
            return jnp.mean(jnp.square(y.astype(jnp.float32)))

        return jnp.sum(jax.vmap(one)(p))

    params = {"up": aval(8, 1024, 2048), "down": aval(8, 2048, 256)}
    return OrderProgram(
        fn=descent(loss),
        avals=(params, aval(8192, 1024)),
        ways={
            "networks": types(P("d"), P()),
            "examples": types(P(), P("d")),
            "hidden units": types({"up": P(None, None, "d"), "down": P(None, "d")}, P()),
        },
        donate=(0,),
    )


def cross_attention() -> OrderProgram:
    """Attention of few queries to a long context, by gradient descent."""

    def loss(p: Any, x: jax.Array, context: jax.Array) -> jax.Array:
        def heads(x: jax.Array, w: jax.Array) -> jax.Array:
            return jnp.einsum("bsd,dhk->bshk", x.astype(BF16), w.astype(BF16))

        found = attention(heads(x, p["q"]), heads(context, p["k"]), heads(context, p["v"]), False)
        y = jnp.einsum("bshk,hkd->bsd", found, p["out"].astype(BF16))
        return jnp.mean(jnp.square(y.astype(jnp.float32)))

    heads, out = aval(1024, 16, 64), aval(16, 64, 1024)
    split = {name: P(None, "d") for name in "qkv"} | {"out": P("d")}
    return OrderProgram(
        fn=descent(loss),
        avals=(
            {"q": heads, "k": heads, "v": heads, "out": out},
            aval(8, 256, 1024),
            aval(8, 4096, 1024),
        ),
        ways={
            "examples": types(P(), P("d"), P("d")),
            "heads": types(split, P(), P()),
            "context": types(P(), P(), P(None, "d")),
        },
        donate=(0,),
    )


UNSEEN = (
    contrastive,
    decoding,
    narrow_sums,
    two_dims,
    graph_network,
    gated_recurrence,
    scanned_adamw,
    ensemble,
    cross_attention,
)
"""Programs on which nothing is corrected."""
