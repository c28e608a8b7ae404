"""What the operations of a program read from memory and write to it after XLA has fused them, from
the graph alone.

A fusion computes values that are stored, or the operands of a product or a reduction. It reads each
stored value that it needs once, and writes each value that it stores once. Values inside of it
never reach memory. `sbp.plan.memory` asks the same of a plan, for its memory.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from sbp import _jax
from sbp.plan.memory import fills_lines, fuses_with_readers
from sbp.signatures import traits_of
from sbp.trace.graph import Graph, Node, Operand

Place = tuple[int, int]
"""The id of a node, and the position of one of its operands."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Traffic:
    """What the nodes of a graph and of its regions read and write.

    Arguments:
      reads: how many fusions read an operand through its place; a place that is absent is not read
        from memory.
      stored: the values that are written to memory.
      alone: the ids of operations that XLA would fuse, but that have no neighbour to fuse with.
      joined: the ids of reductions that XLA computes with a product, or with another reduction.
      waited: for operations into which a product continues, the share of what they read and write
        that takes longer than the product.
    """

    reads: Mapping[Place, int]
    stored: frozenset[int]
    alone: frozenset[int]
    joined: frozenset[int]
    waited: Mapping[int, float]


def traffic(graph: Graph, product_bytes: Callable[[Node], float] = lambda node: 0.0) -> Traffic:
    """What the nodes of a graph and of its regions read and write.

    Arguments:
      graph: the graph.
      product_bytes: the bytes that one device could read or write while it computes a product.
    """
    parts = [_Fusions(graph)]
    parts += [_Fusions(region) for node in graph.walk() for region in node.regions]
    return Traffic(
        reads={place: count for part in parts for place, count in part.reads().items()},
        stored=frozenset().union(*(part.stored for part in parts)),
        alone=frozenset().union(*(part.alone() for part in parts)),
        joined=frozenset().union(*(part.joined for part in parts)),
        waited={
            node: share for part in parts for node, share in part.waited(product_bytes).items()
        },
    )


def fuses(node: Node, avals: Mapping[int, Any]) -> bool:
    """Whether XLA computes a node inside of those that read its result.

    Arguments:
      node: the node.
      avals: shape and dtype of each value.
    """
    if node.regions or node.is_barrier:
        return False
    sources = [avals[o].shape for o in node.inputs if isinstance(o, int)]
    return fuses_with_readers(node.op, sources, [avals[o].shape for o in node.outputs])


@dataclass(slots=True)
class _Part:
    """What computes a value that is in a fusion.

    Arguments:
      reads: where each stored value that it is computed from is read first.
      nodes: the ids of the nodes that compute it.
      home: the fusion that computes it, where it is computed from a value that is stored by a
        fusion of the same stage.
      reduces: of a fusion: whether a reduction is in it.
    """

    reads: dict[int, Place] = field(default_factory=dict)
    nodes: set[int] = field(default_factory=set)
    home: _Part | None = None
    reduces: bool = False

    def join(self, other: _Part) -> None:
        """Adds what computes a further value."""
        for value, place in other.reads.items():
            self.reads.setdefault(value, place)
        self.nodes |= other.nodes
        self.home = self.home or other.home


class _Fusions:
    """The fusions of one graph, without its regions.

    Arguments:
      graph: the graph.

    Attributes:
      stored: the values that are written to memory.
      joined: the ids of reductions that are computed with a product or another reduction.
      continued: by its id, a product with the operations into which it continues.
      found: all fusions, and all nodes that fuse with nothing.
    """

    def __init__(self, graph: Graph) -> None:
        self.graph = graph
        self.readers: dict[int, list[Node]] = {}
        for node in graph.nodes:
            for value in dict.fromkeys(_values(node.inputs)):
                self.readers.setdefault(value, []).append(node)
        self.inside = {node.id for node in graph.nodes if fuses(node, graph.avals)}
        made = {o for n in graph.nodes if n.id in self.inside for o in n.outputs}
        self.inside |= {
            n.id
            for n in graph.nodes
            if n.inputs and n.inputs[0] in made and is_one_hot(n, graph.avals)
        }
        self.stored = frozenset(self._stored())
        self.joined: set[int] = set()
        self.continued: dict[int, tuple[Node, list[Node]]] = {}
        self.found = self._fusions()

    def reads(self) -> Mapping[Place, int]:
        """How many fusions read an operand through each place."""
        return Counter(place for fusion in self.found for place in fusion.reads.values())

    def alone(self) -> frozenset[int]:
        """The nodes without a neighbour to fuse with."""
        return frozenset(
            next(iter(fusion.nodes)) for fusion in self.found if len(fusion.nodes) == 1
        )

    def waited(self, product_bytes: Callable[[Node], float]) -> Mapping[int, float]:
        """For operations into which a product continues, the share of their traffic that takes
        longer than the product; arguments as `traffic`."""
        found: dict[int, float] = {}
        reads = self.reads()
        for product, nodes in self.continued.values():
            moved = sum(
                count * self._bytes(node.inputs[at])
                for node in nodes
                for at in range(len(node.inputs))
                if (count := reads.get((node.id, at), 0))
            )
            moved += sum(self._bytes(o) for n in nodes for o in n.outputs if o in self.stored)
            share = max(0.0, 1.0 - product_bytes(product) / moved) if moved else 1.0
            found.update({node.id: share for node in nodes})
        return found

    def _bytes(self, value: Operand) -> float:
        aval = self.graph.aval(value)
        return math.prod(aval.shape) * _jax.itemsize(aval.dtype)

    def _stored(self) -> set[int]:
        found, products = set(_values(self.graph.outputs)), set()
        for node in self.graph.nodes:
            inside = self._fuses(node)
            starts = traits_of(node.op).contracts and not node.regions
            grows = inside and any(v in products and v not in found for v in _values(node.inputs))
            for out in node.outputs:
                reading = self.readers.get(out, [])
                if starts or grows:
                    products.add(out)
                if _continues(node) or grows:
                    # What a product or a lookup continues into is computed once.
                    computed = len(reading) == 1 and self._fuses(reading[0])
                else:
                    computed = inside and all(map(self._computes_operands, reading))
                if not computed or self._repeats(node):
                    found.add(out)
        return found

    def _fuses(self, node: Node) -> bool:
        return node.id in self.inside

    def _computes_operands(self, node: Node) -> bool:
        """Whether XLA computes the operands of a node inside of it."""
        traits = traits_of(node.op)
        return self._fuses(node) or (not node.regions and bool(traits.reduces or traits.multiplies))

    def _repeats(self, node: Node) -> bool:
        """Whether a costly operation gives the operand of a reduction and of another costly
        operation, as the exponential in a softmax does. Its result is not computed twice."""
        if not traits_of(node.op).costly:
            return False
        reading = self.readers.get(node.outputs[0], [])
        again = [n for n in reading if traits_of(n.op).costly and self._fuses(n)]
        return any(traits_of(n.op).reduces for n in reading) and any(map(self._multiplied, again))

    def _multiplied(self, node: Node) -> bool:
        """Whether a product computes the result of a node, or what is computed from it alone."""
        reading = self.readers.get(node.outputs[0], [])
        if len(reading) == 1 and self._fuses(reading[0]):
            return self._multiplied(reading[0])
        return any(traits_of(n.op).multiplies for n in reading)

    def _fusions(self) -> list[_Part]:
        parts: dict[int, _Part] = {}
        stages: dict[int, int] = {}
        products: dict[int, Node] = {}
        fusions: dict[tuple[int, ...], _Part] = {}
        for node in self.graph.nodes:
            stage = max((stages.get(value, 0) for value in _values(node.inputs)), default=0)
            inside, reduces = self._fuses(node), bool(traits_of(node.op).reduces)
            part = _Part(nodes={node.id})
            for at, value in enumerate(node.inputs):
                if not isinstance(value, int):
                    continue
                if reduces and value in products:
                    self.joined.add(node.id)
                    continue
                before = parts.get(value)
                here = stages.get(value) == stage and (inside or reduces)
                if before is None or (value in self.stored and not (before.home and here)):
                    part.join(_Part(reads={value: (node.id, at)}))
                else:
                    part.join(before)
            if traits_of(node.op).contracts and not node.regions:
                products.update(dict.fromkeys(node.outputs, node))
            elif inside:
                for value in _values(node.inputs):
                    if value in products and value not in self.stored:
                        products.update(dict.fromkeys(node.outputs, products[value]))
                        self.continued.setdefault(products[value].id, (products[value], []))
                        self.continued[products[value].id][1].append(node)
                        break
            if not inside or not self.stored.isdisjoint(node.outputs):
                # Fusions of one stage that read the same largest value become one.
                key = (stage, -1, node.id)
                if (inside or reduces) and part.reads:
                    key = (stage, max(part.reads, key=self._order))
                fusion = part.home or fusions.setdefault(key, _Part())
                part.home = None
                if reduces and fusion.reduces:
                    self.joined.add(node.id)
                fusion.reduces |= reduces
                fusion.join(part)
                part = _Part(reads=part.reads, nodes=part.nodes, home=fusion)
            for out in node.outputs:
                stages[out] = stage if inside else stage + 1
                if inside:
                    parts[out] = part
                elif _continues(node) and out not in self.stored:
                    parts[out] = _Part(nodes={node.id})
        return list(fusions.values())

    def _order(self, value: int) -> tuple[int, int]:
        return math.prod(self.graph.avals[value].shape), -value


def is_one_hot(node: Node, avals: Mapping[int, Any]) -> bool:
    """Whether a node adds one element to each line of its first operand, at the index that an
    operand gives. XLA compares the index with each position.

    Arguments:
      node: the node.
      avals: shape and dtype of each value.
    """
    if not traits_of(node.op).scatters or node.regions or node.is_barrier:
        return False
    whole, _, updates = node.inputs
    if not (isinstance(whole, int) and isinstance(updates, int)):
        return False
    numbers = node.params["dimension_numbers"]
    return fills_lines(numbers, avals[whole].shape, avals[updates].shape)


def _continues(node: Node) -> bool:
    """Whether an operation that reads a node's result is computed with it."""
    traits = traits_of(node.op)
    looks_up = traits.moves and bool(traits.indices) and not traits.scatters
    starts = traits.contracts or looks_up or node.op == "concatenate"
    return starts and not node.regions and not node.is_barrier


def _values(operands: Iterable[Operand]) -> Iterable[int]:
    """The operands that are no constants."""
    return (o for o in operands if isinstance(o, int))
