"""Finding the rows of a program of 2,000 operations takes less than two seconds of one core."""

from __future__ import annotations

import time
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AbstractMesh

from sbp.infer.flow import flow_of
from sbp.infer.partials import native_partials
from sbp.infer.rows import RowTable
from sbp.machine.mesh import mesh_spec
from sbp.trace.build import trace
from sbp.trace.graph import Graph

LAYERS, WIDTH, HEADS = 16, 256, 8
BUDGET_SECONDS = 2.0


def layer(x: Any, p: dict[str, Any]) -> Any:
    """A Transformer layer."""
    h = x - x.mean(-1, keepdims=True)
    h = h * jax.lax.rsqrt((h * h).mean(-1, keepdims=True) + 1e-6) * p["scale"]
    q, k, v = (jnp.einsum("bsd,dhe->bhse", h, p[name]) for name in "qkv")
    seen = jax.nn.softmax(jnp.einsum("bhse,bhte->bhst", q, k) / 8.0)
    x = x + jnp.einsum("bhst,bhte,hed->bsd", seen, v, p["o"])
    return x + jax.nn.gelu(x @ p["w_in"]) @ p["w_out"]


def training_step(params: list[Any], x: Any, y: Any) -> Any:
    """Unrolled, so that each layer is equations of its own."""

    def loss(params: list[Any]) -> Any:
        h = x
        for p in params:
            h = layer(h, p)
        return ((h - y) ** 2).mean()

    return jax.tree.map(lambda p, g: p - 0.1 * g, params, jax.grad(loss)(params))


def traced(alike: bool) -> Graph:
    """The step; of layers that are `alike`, or each of another width, so that no layer's rows serve
    another."""

    def shape(*sizes: int) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(sizes, jnp.float32)

    params = []
    for number in range(LAYERS):
        hidden = 512 if alike else 512 + 64 * number
        heads = {name: shape(WIDTH, HEADS, WIDTH // HEADS) for name in "qkv"}
        params.append({**heads, "scale": shape(WIDTH), "o": shape(HEADS, WIDTH // HEADS, WIDTH)})
        params[-1] |= {"w_in": shape(WIDTH, hidden), "w_out": shape(hidden, WIDTH)}
    batch = shape(32, 128, WIDTH)
    leaves, tree = jax.tree.flatten((params, batch, batch))
    return trace(lambda *flat: training_step(*jax.tree.unflatten(tree, flat)), leaves)[0]


def seconds(graph: Graph, sizes: tuple[int, ...]) -> float:
    """Processor seconds to find the rows of all nodes, as choosing types does."""
    table = RowTable(mesh_spec(AbstractMesh(sizes, tuple("xyz"[: len(sizes)]))))
    start = time.process_time()
    native = native_partials(flow_of(graph), table, {})
    for node in graph.walk():
        of_each = [
            native.get(o, frozenset()) if isinstance(o, int) else frozenset[str]()
            for o in node.inputs
        ]
        table.rows(
            node,
            [graph.aval(o) for o in node.inputs],
            [graph.avals[o] for o in node.outputs],
            of_each,
        )
    return time.process_time() - start


@pytest.mark.parametrize(
    ("alike", "sizes"),
    [(True, (8,)), (True, (2, 4)), (True, (2, 2, 2)), (False, (8,)), (False, (2, 4))],
    ids=lambda x: (
        {True: "alike", False: "each its own"}.get(x, str(x)) if isinstance(x, bool) else str(x)
    ),
)
def test_rows_are_found_in_time(alike: bool, sizes: tuple[int, ...]):
    graph = traced(alike)
    assert sum(1 for _ in graph.walk()) > 2000
    runs = [seconds(graph, sizes) for _ in range(2)]  # other processes may slow one
    assert min(runs) < BUDGET_SECONDS, runs
