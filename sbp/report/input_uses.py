"""Program -> what its inputs are: weights, the optimiser's state, or other arguments."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from sbp.annotations import annotate_p
from sbp.plan.program import Program
from sbp.plan.traffic import Phases
from sbp.signatures import traits_of
from sbp.trace.dataflow import Dataflow
from sbp.trace.graph import Graph, Node, Operand
from sbp.trace.regions import CONTROL_FLOW, interface_of, trips_of

InputClass = Literal["weights", "optimiser", "other arguments"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Product:
    """A product of the forward pass.

    Attributes:
      node: the node.
      flops: of all its runs, on whole tensors.
      weight: the operand that is a weight, 0 or 1, and the input of the program that it is; None
        where both are activations.
    """

    node: Node
    flops: float
    weight: tuple[int, int] | None


class InputUses:
    """How a program uses its inputs.

    Arguments:
      program: the plan.

    Attributes:
      phases: of its operations.
      dataflow: the values of the program.
      readers: for the number of each input, the phases that read it, directly or as an operand that
        is the input rearranged or cast.
      products: those of the forward pass.
      lookups: those of the forward pass, each with the number of the input that is its table, or
        None.
      weights: the numbers of the inputs that products and lookups take as weights.
    """

    def __init__(self, program: Program) -> None:
        self.graph: Graph = program.graph
        self.phases = Phases(self.graph)
        self.dataflow = Dataflow(self.graph)
        self._position = {v: n for n, v in enumerate(self.graph.inputs)}
        self.readers = self._readers()
        self.products = list(self._products(self.graph, 1))
        self.lookups = [
            (node, self.root(node.inputs[0]))
            for node in self.graph.walk()
            if self.phases.of[node.id] == "forward" and is_lookup(node)
        ]
        self.weights = {p.weight[1] for p in self.products if p.weight}
        self.weights |= {root for _, root in self.lookups if root is not None}

    def class_of(self, number: int) -> InputClass:
        """What an input is. In a step with an update, weights are what the update reads too, and
        the optimiser's state is what it alone reads; elsewhere weights are those of products and
        lookups.

        Arguments:
          number: of the input.
        """
        read = self.readers[number]
        if number in self.weights or ("update" in read and len(read) > 1):
            return "weights"
        return "optimiser" if read == {"update"} else "other arguments"

    def _readers(self) -> dict[int, set[str]]:
        """The phases that read each input of the program, directly or as an operand that is the
        input rearranged or cast."""
        found: dict[int, set[str]] = {n: set() for n in range(len(self.graph.inputs))}
        for node in self.graph.walk():
            if node.op in CONTROL_FLOW or _passes(node):
                continue
            for operand in node.inputs:
                root = self.root(operand)
                if root is not None:
                    found[root].add(self.phases.of[node.id])
        return found

    def root(self, operand: Operand) -> int | None:
        """The input of the program that a value is, rearranged, cast, or read in a loop."""
        while isinstance(operand, int):
            if operand in self._position:
                return self._position[operand]
            if operand in self.dataflow.entries:
                node, entry = self.dataflow.entries[operand]
                if entry.kind == "carry":
                    return None
                operand = node.inputs[entry.operand]
                continue
            node = self.dataflow.makers.get(operand)
            if node is not None and node.op in CONTROL_FLOW:  # a loop that casts or rearranges
                left = interface_of(node).exit_to(node.outputs.index(operand))
                operand = node.regions[left.region].outputs[left.output]
                continue
            if node is None or not _passes(node):
                return None
            operand = node.inputs[
                _moved(node) if len(node.outputs) == 1 else node.outputs.index(operand)
            ]
        return None

    def _products(self, graph: Graph, runs: int) -> Iterator[Product]:
        for node in graph.nodes:
            for region in node.regions:
                yield from self._products(region, runs * trips_of(node))
            traits = traits_of(node.op)
            if self.phases.of[node.id] == "forward" and traits.contracts and traits.flops:
                flops = runs * flops_of(self.graph, node)
                yield Product(node=node, flops=flops, weight=self._weight(node))

    def _weight(self, node: Node) -> tuple[int, int] | None:
        """Which operand of a product is a weight: an input that the update reads too;
        without an update, the only operand that is an input, or the second of two."""
        roots = [(n, r) for n in (1, 0) if (r := self.root(node.inputs[n])) is not None]
        if "update" in self.phases.of.values():
            updated = [(n, r) for n, r in roots if "update" in self.readers[r]]
            roots = updated or (roots if len(roots) == 1 else [])
        return roots[0] if roots else None


def flops_of(graph: Graph, node: Node) -> float:
    """The floating-point operations of a product; 0 for other operations."""
    flops = traits_of(node.op).flops
    shapes = [tuple(graph.aval(o).shape) for o in node.inputs]
    results = [tuple(graph.avals[v].shape) for v in node.outputs]
    return 0.0 if flops is None else flops(node.params, shapes, results)


def is_lookup(node: Node) -> bool:
    traits = traits_of(node.op)
    return traits.moves and 1 in traits.indices and len(node.inputs) == 2


def _passes(node: Node) -> bool:
    """Whether a result is an operand of the node, rearranged or cast."""
    if node.is_barrier or node.op == annotate_p.name:
        return True
    traits = traits_of(node.op)
    if is_lookup(node) or not (traits.moves or traits.regroups or traits.carries):
        return False
    return len(node.outputs) == 1 and _moved(node) >= 0


def _moved(node: Node) -> int:
    """The only operand of a node that is no index; -1 where there are several."""
    indices = traits_of(node.op).indices
    moved = [n for n in range(len(node.inputs)) if n not in indices]
    return moved[0] if len(moved) == 1 else -1
