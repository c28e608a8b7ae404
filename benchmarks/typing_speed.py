"""Processor seconds to find the rows of all nodes of an unrolled training step.

    python -m benchmarks.typing_speed

The step has 16 Transformer layers and more than 2,000 operations. Its layers are alike, or each has
another width, so that no layer's rows serve another. The target is 2 seconds of one core.
"""

from __future__ import annotations

import time
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import AbstractMesh

from sbp.infer.flow import flow_of
from sbp.infer.request import native_partials
from sbp.infer.rows import RowTable
from sbp.machine.mesh import mesh_spec
from sbp.trace.build import trace
from sbp.trace.graph import Graph

LAYERS, WIDTH, HEADS = 16, 256, 8

CASES = ((True, (8,)), (True, (2, 4)), (True, (2, 2, 2)), (False, (8,)), (False, (2, 4)))
"""Whether layers are alike, and the sizes of the mesh axes."""


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


def traced(alike: bool, layers: int = LAYERS) -> Graph:
    """The step, traced.

    Arguments:
      alike: whether all layers have one width; otherwise each has its own.
      layers: how many layers there are.
    """

    def shape(*sizes: int) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(sizes, jnp.float32)

    params = []
    for number in range(layers):
        hidden = 512 if alike else 512 + 64 * number
        heads = {name: shape(WIDTH, HEADS, WIDTH // HEADS) for name in "qkv"}
        params.append({**heads, "scale": shape(WIDTH), "o": shape(HEADS, WIDTH // HEADS, WIDTH)})
        params[-1] |= {"w_in": shape(WIDTH, hidden), "w_out": shape(hidden, WIDTH)}
    batch = shape(32, 128, WIDTH)
    leaves, tree = jax.tree.flatten((params, batch, batch))
    return trace(lambda *flat: training_step(*jax.tree.unflatten(tree, flat)), leaves)[0]


def find_rows(graph: Graph, sizes: tuple[int, ...]) -> None:
    """Finds the rows of all nodes, as the choice of types does, on mesh axes of the given sizes."""
    table = RowTable(mesh_spec(AbstractMesh(sizes, tuple("xyz"[: len(sizes)]))))
    native = native_partials(flow_of(graph), table, {})
    for node in graph.walk():
        of_each = tuple(
            native.get(o, frozenset()) if isinstance(o, int) else frozenset[str]()
            for o in node.inputs
        )
        table.rows(
            node,
            False,
            [graph.aval(o) for o in node.inputs],
            [graph.avals[o] for o in node.outputs],
            of_each,
        )


def seconds(graph: Graph, sizes: tuple[int, ...]) -> float:
    """Processor seconds of `find_rows`, the least of two runs."""
    runs = []
    for _ in range(2):
        start = time.process_time()
        find_rows(graph, sizes)
        runs.append(time.process_time() - start)
    return min(runs)


def main() -> None:
    """Prints one line for each case."""
    for alike, sizes in CASES:
        graph = traced(alike)
        count = sum(1 for _ in graph.walk())
        layers = "layers alike" if alike else "each layer its own width"
        print(f"{count:,} nodes, {layers}, mesh {sizes}: {seconds(graph, sizes):.2f} s")


if __name__ == "__main__":
    main()
