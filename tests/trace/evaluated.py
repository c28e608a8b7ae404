"""Graphs of functions, and whether a graph computes what its function computes."""

import jax
import numpy as np

from sbp.trace.build import trace
from sbp.trace.evaluate import evaluate
from sbp.trace.graph import Graph


def graph_of(fn, args) -> Graph:
    """The graph of a function of arrays with these shapes."""
    graph, _ = trace(fn, [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in args])
    return graph


def ops(graph: Graph) -> list[str]:
    """The operators of a graph, those of loops too."""
    return [node.op for node in graph.walk()]


def assert_same_values(graph: Graph, fn, args, tolerance: float = 0.0) -> None:
    """Checks that the graph, evaluated as one program, gives the results of the function."""
    found = jax.jit(lambda *args: evaluate(graph, args))(*args)
    for got, want in zip(found, jax.tree.leaves(jax.jit(fn)(*args)), strict=True):
        np.testing.assert_allclose(
            np.asarray(got), np.asarray(want), rtol=tolerance, atol=tolerance
        )
