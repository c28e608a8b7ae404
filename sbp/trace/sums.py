"""Sums of padded arrays, padded after the sum.

JAX makes the gradient of an array that is sliced twice, as `logits[:, :-1]` in a loss that reads it
for its normaliser and for its targets, of one zero pad for each slice, and adds the padded arrays.
XLA stores both arrays, and each product that reads the gradient adds them again. Added before they
are padded, they are one array, which the TPU compiler rounds to the dtype of the products: of the
logits of a large vocabulary, gigabytes less (`tests/tpu/test_sliced_gradients.py`).
"""

from __future__ import annotations

import dataclasses
import itertools
from collections import Counter
from collections.abc import Iterator, Set
from typing import Any

import numpy as np

from sbp.trace.graph import Constant, Graph, Node, Operand, rewritten


def with_sums(graph: Graph) -> Graph:
    """A graph in which gradients that are padded alike by zeros are added before they are padded,
    in regions too.

    Arguments:
      graph: a traced program; new values are entered in its table of avals.
    """
    if not any(node.op == "add_any" for node in graph.walk()):
        return graph
    return rewritten(graph, _summed)


def _summed(graph: Graph, inspected: Set[int], ids: Iterator[int]) -> Graph:
    """The graph whose own nodes add before they pad.

    Arguments:
      graph: the graph.
      inspected: values whose types the program asks for, which stay.
      ids: unused numbers of nodes.
    """
    reads = Counter[Operand](o for node in graph.nodes for o in node.inputs)
    reads.update(graph.outputs)
    pads: dict[Operand, Node] = {}
    nodes: dict[int, Node] = {}
    values = itertools.count(max(graph.avals, default=-1) + 1)
    for node in graph.nodes:
        nodes[node.id] = node
        if _adds_zeros(node) and reads[node.outputs[0]] == 1:
            pads[node.outputs[0]] = node
        if node.op != "add_any" or not inspected.isdisjoint(node.inputs):
            continue
        first, second = map(pads.get, node.inputs)
        if first is None or second is None or not _alike(graph, first, second):
            continue
        value = next(values)
        graph.avals[value] = graph.aval(first.inputs[0])
        added = (first.inputs[0], second.inputs[0])
        whole = dataclasses.replace(
            second, id=next(ids), inputs=(value, second.inputs[1]), outputs=node.outputs
        )
        del nodes[first.id], nodes[second.id]
        nodes[node.id] = dataclasses.replace(node, inputs=added, outputs=(value,))
        nodes[whole.id] = whole
        if reads[whole.outputs[0]] == 1:
            pads[whole.outputs[0]] = whole
    return dataclasses.replace(graph, nodes=tuple(nodes.values()))


def _adds_zeros(node: Node) -> bool:
    """Whether a node adds zeros to an array, and takes no element from it."""
    if node.op != "pad" or not isinstance(node.inputs[0], int):
        return False
    sizes = itertools.chain.from_iterable(node.params["padding_config"])
    by = node.inputs[1]
    return (
        isinstance(by, Constant)
        and np.ndim(by.value) == 0
        and not by.value
        and all(isinstance(size, int | np.integer) and size >= 0 for size in sizes)
    )


def _alike(graph: Graph, first: Node, second: Node) -> bool:
    """Whether two pads lengthen arrays of one shape in one way, in one part of the program: of
    another part, other policies may hold."""

    def of(node: Node) -> tuple[Any, ...]:
        aval = graph.aval(node.inputs[0])
        return aval.shape, aval.dtype, node.params, node.scope

    return of(first) == of(second)
