"""Graph -> where its values come from: the operation that makes each one, and the way by which each
input of a region enters."""

from __future__ import annotations

from dataclasses import dataclass, field

from sbp.trace.graph import Graph, Node
from sbp.trace.regions import CONTROL_FLOW, Entry, interface_of


@dataclass(frozen=True, slots=True)
class ValueSources:
    """Of all values of a program, those of regions included.

    Attributes:
      makers: the node that makes a value; none for the inputs of the program and of regions.
      entries: of each input of the region of a loop or branch, the loop or branch, and how the
        operand enters it.
    """

    makers: dict[int, Node] = field(default_factory=dict[int, Node])
    entries: dict[int, tuple[Node, Entry]] = field(default_factory=dict[int, tuple[Node, Entry]])

    @classmethod
    def of(cls, graph: Graph) -> ValueSources:
        """Those of a program."""
        found = cls()
        for node in graph.walk():
            found.makers.update((v, node) for v in node.outputs)
            if node.op in CONTROL_FLOW:
                for region, fed in zip(node.regions, interface_of(node).fed, strict=True):
                    pairs = zip(region.inputs, fed, strict=True)
                    found.entries.update((v, (node, entry)) for v, entry in pairs)
        return found
