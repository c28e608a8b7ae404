"""What a program is, without its source lines: a digest for each operation. Programs with equal
digests have the same operations on the same values, and so the same plans."""

from __future__ import annotations

import dataclasses
import enum
import hashlib
from collections.abc import Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from typing import Any

import jax
import numpy as np

from sbp import _jax
from sbp.errors import Span
from sbp.limits import policies_in
from sbp.trace.graph import Constant, Graph, Node, Operand


def digests(graph: Graph) -> tuple[str, ...]:
    """The digest of the program's arguments, that of each operation in the order of `Graph.walk`,
    and that of its results. They are equal in every process and after edits that move lines."""
    nodes = (_digest(_node(graph, node)) for node in graph.walk())
    inputs, outputs = _operands(graph, graph.inputs), _operands(graph, graph.outputs)
    return (_digest(inputs), *nodes, _digest(outputs))


def _digest(parts: Iterator[str]) -> str:
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()[:12]


def _operands(graph: Graph, operands: Sequence[Operand]) -> Iterator[str]:
    return (_operand(graph, operand) for operand in operands)


def _node(graph: Graph, node: Node) -> Iterator[str]:
    yield node.op
    yield from _operands(graph, node.inputs)
    yield from _operands(graph, node.outputs)
    for name in sorted(node.params):
        yield f"{name}={_parameter(node.params[name])}"
    yield repr(list(policies_in(node.scope)))
    yield f"{node.backward} {node.is_recomputed}"
    for region in node.regions:
        yield from _operands(region, region.inputs)
        yield from _operands(region, region.outputs)


def _operand(graph: Graph, operand: Operand) -> str:
    aval = graph.aval(operand)
    shape = f"{aval.dtype}{'<host>' if _jax.in_host(aval) else ''}{list(aval.shape)}"
    if not isinstance(operand, Constant):
        return f"%{operand} {shape}"
    # The elements of an array that a program closes over do not change its plan.
    plain = not aval.shape and not _jax.is_extended(aval.dtype)
    return f"{_parameter(np.asarray(operand.value))} {shape}" if plain else shape


def _parameter(value: Any) -> str:
    """A parameter of a primitive as a text without addresses and source lines."""
    match value:
        case None | bool() | int() | float() | complex() | str() | bytes():
            return repr(value)
        case enum.Enum():
            return f"{type(value).__name__}.{value.name}"
        case Span():
            return "line"
        case jax.sharding.Sharding():
            # JAX notes shardings of arrays on Explicit axes. What the user asks for is a pin.
            return repr(None)
        case np.ndarray():
            return f"{value.dtype}{value.shape}{hashlib.sha256(value.tobytes()).hexdigest()}"
        case Graph():
            return " ".join(digests(value))
        case Mapping():
            return _items((str(k), value[k]) for k in sorted(value, key=str))
        case AbstractSet():
            return f"{{{', '.join(sorted(map(_parameter, value)))}}}"
        case _ if _jax.is_jaxpr(value):
            return _jaxpr(value)
        case _ if dataclasses.is_dataclass(value) and not isinstance(value, type):
            names = [f.name for f in dataclasses.fields(value)]
            return _items((name, getattr(value, name)) for name in names)
        case np.dtype() | np.generic():
            return str(value)
        case Sequence():
            return f"[{', '.join(map(_parameter, value))}]"
        case _:
            return _other(value)


def _items(items: Iterator[tuple[str, Any]]) -> str:
    return f"({', '.join(f'{name}: {_parameter(value)}' for name, value in items)})"


def _jaxpr(value: Any) -> str:
    opened, _ = _jax.open_jaxpr(value)
    steps = [
        f"{eqn.primitive.name} {_items((k, eqn.params[k]) for k in sorted(eqn.params))}"
        for eqn in opened.eqns
    ]
    return "; ".join([*steps, *(f"{a.dtype}{a.shape}" for a in _jax.avals_in(value))])


def _other(value: Any) -> str:
    """A function or another object by its name: its text may have an address."""
    named = getattr(value, "__qualname__", None) or getattr(value, "name", None)
    own = value if isinstance(value, type) else type(value)
    return f"{own.__module__}.{own.__qualname__} {named if isinstance(named, str) else ''}"
