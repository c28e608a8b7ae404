"""Which operation makes each value of a program, how it enters regions, and who reads it."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field

from sbp.trace.graph import Graph, Node, Operand
from sbp.trace.regions import CONTROL_FLOW, Entry, interface_of


@dataclass(frozen=True, slots=True)
class Dataflow:
    """The values of a program, those of regions included.

    Attributes:
      graph: the program.
      makers: the node that makes a value; none for the inputs of the program and of regions.
      entries: of each input of the region of a loop or branch, the loop or branch, and how the
        operand enters it.
      readers: the nodes that read an operand, in program order; a result of a region has the loop
        or branch among them, a result of the program has None.
    """

    graph: Graph
    makers: dict[int, Node] = field(default_factory=dict[int, Node])
    entries: dict[int, tuple[Node, Entry]] = field(default_factory=dict[int, tuple[Node, Entry]])
    readers: dict[Operand, list[Node | None]] = field(
        default_factory=lambda: defaultdict[Operand, list[Node | None]](list)
    )

    def __post_init__(self) -> None:
        self._enter(self.graph, None)

    def _enter(self, graph: Graph, holder: Node | None) -> None:
        for node in graph.nodes:
            self.makers.update(dict.fromkeys(node.outputs, node))
            for operand in dict.fromkeys(node.inputs):
                self.readers[operand].append(node)
            for region, fed in zip(node.regions, interface_of(node).fed, strict=True):
                entered = ((node, entry) for entry in fed)
                self.entries.update(zip(region.inputs, entered, strict=True))
                self._enter(region, node)
        for operand in dict.fromkeys(graph.outputs):
            self.readers[operand].append(holder)

    def sources(self, operand: Operand) -> Iterator[int]:
        """The values that an operand is: those that operations make or the program takes, through
        the regions of loops and branches."""
        waiting, seen = [operand], set[Operand]()
        while waiting:
            value = waiting.pop()
            if not isinstance(value, int) or value in seen:
                continue
            seen.add(value)
            maker = self.makers.get(value)
            if value in self.entries:
                node, entry = self.entries[value]
                exits = interface_of(node).exits if entry.kind == "carry" else ()
                left = [e for e in exits if e.entry == entry]
                waiting += [node.regions[e.region].outputs[e.output] for e in reversed(left)]
                waiting.append(node.inputs[entry.operand])
            elif maker is not None and maker.op in CONTROL_FLOW:
                exit_ = interface_of(maker).exit_to(maker.outputs.index(value))
                waiting.append(maker.regions[exit_.region].outputs[exit_.output])
            else:
                yield value
