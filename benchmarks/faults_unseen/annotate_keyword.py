"""The keyword of an annotation is no axis of the mesh."""

import jax
import jax.numpy as jnp

import sbp
from benchmarks.fault_shapes import f32, i32, mesh


def graph_layer(p, nodes, edges):
    senders, receivers = edges
    messages = jnp.tanh(nodes[senders] @ p["message"])
    gathered = jax.ops.segment_sum(messages, receivers, nodes.shape[0])
    gathered = sbp.annotate(gathered, modell=sbp.S(1))
    # meant: gathered = sbp.annotate(gathered, model=sbp.S(1))
    return jax.nn.relu(nodes @ p["own"] + gathered @ p["other"])


def network(params, nodes, edges):
    for p in params["layers"]:
        nodes = graph_layer(p, nodes, edges)
    return nodes


def readout(params, nodes, edges, graph):
    h = network(params, nodes, edges)
    pooled = jax.ops.segment_sum(h, graph, 8)
    return pooled @ params["head"]


def loss(params, nodes, edges, graph, y):
    return jnp.mean((readout(params, nodes, edges, graph) - y) ** 2)


D = 64
layer = {"message": f32(D, D), "own": f32(D, D), "other": f32(D, D)}
params = {"layers": [layer, layer], "head": f32(D, 1)}
args = params, f32(256, D), (i32(1024), i32(1024)), i32(256), f32(8, 1)
f = sbp.jit(loss, mesh)
