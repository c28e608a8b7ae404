"""Copies of values between device memory and host memory.

JAX's types say in which memory a value lies (`float32<host>[8]`), and its primitives say in which
memory their results lie. A graph keeps both: a value in host memory is one whose aval says so, and
each copy is a node of its own.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Sequence
from typing import Any

from sbp import _jax
from sbp.trace.graph import Graph, Node, Operand
from sbp.trace.numbering import SAME

HOST = "pinned_host"
"""JAX's name of the host memory that devices copy from and to. Values that lie there have another
type in JAX."""

TRANSFER = "device_put"
"""The operator that copies a value from one memory to the other."""


def computes_in_host(node: Node, avals: Sequence[Any]) -> bool:
    """Whether a node computes in host memory.

    Arguments:
      node: the node.
      avals: of its operands and results.
    """
    stays = node.op == TRANSFER or node.op in SAME
    return not stays and any(_jax.in_host(aval) for aval in avals)


def transfer_fields(host: bool, eqn: Any = None, position: int = 0) -> dict[str, Any]:
    """What a node that copies one value has for operator, primitive and parameters.

    Arguments:
      host: whether the copy goes to host memory.
      eqn: the equation that asks for the copy; None for none.
      position: of the value among the operands of that equation.
    """
    primitive, params = _jax.transfer(host)
    if eqn is not None and eqn.primitive is primitive:
        asked = eqn.params.get("copy_semantics", ())
        params = params | {"copy_semantics": (asked[position],)} if asked else params
    return {"op": TRANSFER, "primitive": primitive, "params": params}


def returned_in(graph: Graph, hosts: Sequence[bool | None]) -> Graph:
    """The graph with its results in the memory that the user asked for.

    Arguments:
      graph: a program; new values are entered in its table of avals.
      hosts: for each result, whether it lies in host memory; None leaves it where it is.
    """
    nodes, outputs = list(graph.nodes), list[Operand](graph.outputs)
    numbers = itertools.count(1 + max((n.id for n in graph.walk()), default=-1))
    made: dict[Operand, int] = {}
    for position, (operand, host) in enumerate(zip(graph.outputs, hosts, strict=True)):
        aval = graph.aval(operand)
        if host is None or host == _jax.in_host(aval):
            continue
        if operand not in made:
            copy = _jax.empty_aval(aval.shape, aval.dtype, bool(aval.weak_type), host)
            made[operand] = value = graph.new_value(copy)
            fields = transfer_fields(host)
            nodes.append(Node(id=next(numbers), inputs=(operand,), outputs=(value,), **fields))
        outputs[position] = made[operand]
    return dataclasses.replace(graph, nodes=tuple(nodes), outputs=tuple(outputs))
