"""Which operation makes each value of a program, how it enters regions, and who reads it."""

from __future__ import annotations

import functools
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass

from sbp.trace.graph import Graph, Node, Operand
from sbp.trace.regions import CONTROL_FLOW, Entry, interface_of


@dataclass(frozen=True)
class Dataflow:
    """The values of a program, those of regions included.

    Arguments:
      graph: the program.
    """

    graph: Graph

    @functools.cached_property
    def makers(self) -> dict[int, Node]:
        """The node that makes a value; none for the inputs of the program and of regions."""
        return {v: node for node in self.graph.walk() for v in node.outputs}

    def maker(self, operand: Operand) -> Node | None:
        """The node that makes an operand; None for inputs and constants."""
        return self.makers.get(operand) if isinstance(operand, int) else None

    @functools.cached_property
    def entries(self) -> dict[int, tuple[Node, Entry]]:
        """Of each input of the region of a loop or branch, the loop or branch, and how the operand
        enters it."""
        return {
            value: (node, entry)
            for node in self.graph.walk()
            for region, fed in zip(node.regions, interface_of(node).fed, strict=True)
            for value, entry in zip(region.inputs, fed, strict=True)
        }

    @functools.cached_property
    def readers(self) -> dict[Operand, list[Node | None]]:
        """The nodes that read an operand, in program order; then the loops and branches whose
        regions return it, and None where the program does."""
        nodes = list(self.graph.walk())
        reads: list[tuple[Operand, Node | None]] = [
            (o, node) for node in nodes for o in node.inputs
        ]
        reads += [(o, node) for node in nodes for r in node.regions for o in r.outputs]
        reads += [(o, None) for o in self.graph.outputs]
        found = defaultdict[Operand, list[Node | None]](list)
        for operand, reader in dict.fromkeys(reads):
            found[operand].append(reader)
        return found

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
