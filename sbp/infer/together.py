"""Which all-reduces a compiler runs as one: those of gradients.

No all-reduce of a gradient waits for another one, so XLA joins those over the same mesh axes into
one collective, which starts once. An all-reduce in front of a product cannot wait for the others,
and other collectives are not joined (`tests/tpu/test_compiled_plans.py`).
"""

from __future__ import annotations

import math
from collections.abc import Mapping

from sbp.infer.policy import late_values
from sbp.machine.mesh import MeshSpec
from sbp.signatures import traits_of
from sbp.trace.graph import Graph, Node


def reduced_together(graph: Graph, mesh: MeshSpec) -> Mapping[int, int]:
    """For each value whose all-reduce starts with those of other values, how many start together;
    empty where the compiler is not one for TPUs.

    These are values of the backward pass and of the update from which no product and no region
    follows. Types are not known here: all sums among them are taken to be all-reduced over the same
    mesh axes, so each pays an equal share of one start, or more where it is large
    (`space.JOINED_BYTES`).

    Arguments:
      graph: the program.
      mesh: the mesh and its hardware.
    """
    if mesh.hardware.platform != "tpu":
        return {}
    late = closing_values(graph)
    sums = sum(len(late.intersection(node.outputs)) for node in graph.nodes if _sums(graph, node))
    return dict.fromkeys(late, sums) if sums > 1 else {}


def closing_values(graph: Graph) -> frozenset[int]:
    """The values of the backward pass and of the update from which no product and no region
    follows.

    Arguments:
      graph: the program.
    """
    early: set[int] = set()
    for node in reversed(graph.nodes):
        waits = node.regions or traits_of(node.op).flops is not None
        if waits or not early.isdisjoint(node.outputs):
            early.update(o for o in node.inputs if isinstance(o, int))
    here = {v for node in graph.nodes for v in node.outputs}
    return (late_values(graph) & here) - early


def _sums(graph: Graph, node: Node) -> bool:
    """Whether an operation may add up elements."""
    if node.regions or traits_of(node.op).flops is not None:
        return True
    sizes = [math.prod(graph.aval(o).shape) for o in node.inputs]
    return any(math.prod(graph.avals[v].shape) < max(sizes, default=0) for v in node.outputs)
