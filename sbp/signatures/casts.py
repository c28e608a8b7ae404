"""Casts of tables of which few rows are read.

`table.astype(bfloat16)[tokens]` casts the whole table: XLA does not move a cast behind a lookup.
The rows that were looked up are cast instead (`sbp.run.interpret`).
"""

from __future__ import annotations

import numpy as np
from jax import numpy as jnp

from sbp import _jax
from sbp.signatures.fallback import traits_of
from sbp.trace.graph import Graph, Node


def rounds(graph: Graph, node: Node) -> bool:
    """Whether a node rounds numbers to a dtype of fewer bytes.

    Arguments:
      graph: a program with the node.
      node: the node.
    """
    traits = traits_of(node.op)
    if not (traits.carries == "rounded" and traits.adapts and len(node.inputs) == 1):
        return False
    before, after = graph.aval(node.inputs[0]).dtype, graph.avals[node.outputs[0]].dtype
    return (
        _jax.itemsize(after) < _jax.itemsize(before)
        and jnp.issubdtype(before, np.floating)
        and jnp.issubdtype(after, np.floating)
    )


def looks_up(node: Node, operand: int) -> bool:
    """Whether a node takes elements of an operand at indices, and does nothing else with it.

    Arguments:
      node: a node.
      operand: the position of an operand.
    """
    return node.op == "gather" and operand == 0
