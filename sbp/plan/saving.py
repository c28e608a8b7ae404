"""Collectives of equal values are run once: what the forward pass has sent is not sent again by its
rematerialisation.

Where a loop converts a value to what an earlier loop has made of an equal one (`trace.numbering`),
the earlier one hands its result on as one more stacked result; in one block gradients read the
value of the forward pass. What only fed the second collective goes.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from sbp import _jax
from sbp.infer.rows import NdRow
from sbp.infer.space import Codes, local_shape, stack
from sbp.infer.typing import Typing
from sbp.plan.ir import Apply, Block, Box, Instruction, Loop, Register
from sbp.signatures import traits_of
from sbp.trace.graph import Graph, Node, Operand
from sbp.trace.numbering import Numbering


@dataclass(frozen=True, slots=True, kw_only=True)
class Repeat:
    """A conversion that has been made before.

    Arguments:
      value: the value that is converted again.
      first: the equal value that is converted first.
      codes: the type that both are brought to.
      loop, first_loop: the scan nodes whose bodies hold them; None in the same block.
      seconds: modelled time of the second conversion, loop trips counted.
      bytes_held: what it takes to keep the first result: bytes of one device.
    """

    value: int
    first: int
    codes: Codes
    loop: int | None
    first_loop: int | None
    seconds: float
    bytes_held: float


def repeats(typing: Typing, block: Block) -> tuple[Repeat, ...]:
    """The conversions of a lowered program that have been made before, in one block or by an
    earlier loop of the same block.

    An earlier loop hands its result on at its end: it must be allowed to convert there, or have the
    result of an annotation.
    """
    return _Search(typing).repeats(block)


def save(typing: Typing, chosen: tuple[Repeat, ...]) -> Typing:
    """The typing in which the chosen conversions are not made again."""
    return _Saving(typing, chosen).typing()


class _Search:
    """Goes through a program with what has been made so far: each value, by number, in each
    type."""

    def __init__(self, typing: Typing) -> None:
        self.typing, self.request = typing, typing.graph_request
        self.numbers = Numbering()
        self.numbers.enter(typing.graph)
        self.made: dict[tuple[Any, Codes], tuple[int, Loop | None]] = {}
        self.found: dict[tuple[int | None, int], Repeat] = {}

    def repeats(self, block: Block) -> tuple[Repeat, ...]:
        readers = _readers(block)
        for instruction in block.instructions:
            if isinstance(instruction, Loop) and instruction.node.op == "scan":
                (body,) = instruction.blocks
                inside = _readers(body)
                for inner in body.instructions:
                    self.see(inner, instruction, inside)
            self.see(instruction, None, readers)
        return tuple(self.found.values())

    def see(
        self,
        instruction: Instruction,
        loop: Loop | None,
        readers: dict[Register, list[Instruction]],
    ) -> None:
        if isinstance(instruction, Apply):
            for register in instruction.outs:
                self.made.setdefault(
                    (self.numbers.of(register.value), register.codes), (register.value, loop)
                )
        elif (
            isinstance(instruction, Box)
            and instruction.bytes_sent
            and not any(c < 0 for c in instruction.target.codes)
        ):
            for register in _chain(instruction, readers):
                repeat = self.repeat(instruction, register, loop)
                if repeat is not None:
                    self.found.setdefault((repeat.loop, repeat.value), repeat)
                    return
            rules = self.request.rules(loop.node if loop else None, in_loop=loop is not None)
            if loop is None or all(
                rules.allows(s.kind, s.mesh_axes, s.bytes_sent) for s in instruction.steps
            ):
                key = self.numbers.of(instruction.source.value), instruction.target.codes
                self.made.setdefault(key, (instruction.source.value, loop))

    def repeat(self, box: Box, register: Register, loop: Loop | None) -> Repeat | None:
        """What has been made before and is all that a conversion leads to."""
        key = self.numbers.of(register.value), register.codes
        if key not in self.made:
            return None
        value, where = self.made[key]
        trips = loop.trips if loop else 1
        if (
            value == register.value
            or (where is None) != (loop is None)
            or (where and loop and (where is loop or where.trips != trips))
        ):
            return None
        if loop is None and (box.reader is None or not box.reader.backward):
            # what is written twice in one block may be pinned twice on purpose; what is recomputed
            # is not
            return None
        if (
            loop is None
            and self.typing.values[value] != register.codes
            and not self.request.rules(box.reader).unlimited
        ):
            return None  # its readers might not be allowed to convert what was made first
        mesh, aval = self.typing.mesh, self.typing.graph.avals[value]
        size = float(
            math.prod(local_shape(aval.shape, register.codes, mesh.sizes))
        ) * _jax.itemsize(aval.dtype)
        kept = (
            2 * size / mesh.hardware.hbm_bytes_per_second if loop else 0.0
        )  # written by one loop, read by the other
        seconds = trips * (sum(s.seconds for s in box.steps) - kept)
        if seconds <= 0:
            return None
        return Repeat(
            value=register.value,
            first=value,
            codes=register.codes,
            loop=loop and loop.node.id,
            first_loop=where and where.node.id,
            seconds=seconds,
            bytes_held=trips * size,
        )


HOPS = 6
"""Operations behind a conversion that are followed to a value that has been made before."""


def _chain(box: Box, readers: dict[Register, list[Instruction]]) -> Iterator[Register]:
    """What a conversion makes, and what is made of it alone, operation by operation."""
    register = box.target
    for _ in range(HOPS):
        yield register
        match readers.get(register, []):
            case [Apply(outs=(only,))] if not any(c < 0 for c in only.codes):
                register = only
            case _:
                return


def _readers(block: Block) -> dict[Register, list[Instruction]]:
    found: dict[Register, list[Instruction]] = defaultdict(list)
    for instruction in block.instructions:
        sources = (instruction.source,) if isinstance(instruction, Box) else instruction.ins
        for source in sources:
            if isinstance(source, Register):
                found[source].append(instruction)
    for source in block.outputs:
        if isinstance(source, Register):
            found.pop(source, None)  # what is returned is no intermediate
    return found


class _Saving:
    """Rewrites a typing so that the chosen conversions are made once."""

    def __init__(self, typing: Typing, chosen: tuple[Repeat, ...]) -> None:
        self.old, self.chosen, self.request = typing, chosen, typing.graph_request
        self.avals = dict(typing.graph.avals)
        self.values, self.rows = dict(typing.values), dict(typing.rows)
        self.returned = dict(typing.region_outputs)
        self.next = itertools.count(max(self.avals) + 1)
        self.stacked: dict[tuple[int, int, Codes], int] = {}
        self.here: dict[int, int] = {}
        self.kept = {r.value: r.codes for r in chosen}

    def typing(self) -> Typing:
        for r in self.chosen:
            if r.loop is None:
                self.here.setdefault(r.value, r.first)
        graph = self.block(self.old.graph, self.here, top=True)
        return dataclasses.replace(
            self.old,
            graph=dataclasses.replace(graph, avals=self.avals),
            values=self.values,
            rows=self.rows,
            region_outputs=self.returned,
            saved_seconds=sum(r.seconds for r in self.chosen),
        )

    def block(self, graph: Graph, instead: dict[int, int], *, top: bool = False) -> Graph:
        """A graph whose readers of a value in a type read another value, and without what nobody
        reads any more."""
        nodes: list[Node] = []
        for node in graph.nodes:
            row = self.rows[node.id]
            inputs = tuple(
                self.redirect(node, o, c, instead)
                for o, c in zip(node.inputs, row.ins, strict=True)
            )
            node = dataclasses.replace(node, inputs=inputs)
            if top and node.op == "scan":
                node = self.scan(node)
            nodes.append(node)
        graph = dataclasses.replace(graph, nodes=tuple(nodes), avals=self.avals)
        return graph if top and not instead else self.pruned(graph)

    def redirect(
        self, node: Node, operand: Operand, codes: Codes, instead: dict[int, int]
    ) -> Operand:
        """What is read instead of an operand: not by those who take it as it is made before its
        conversion, or may not convert."""
        if not isinstance(operand, int) or operand not in instead:
            return operand
        other, kept = instead[operand], self.kept[operand]
        if codes == self.old.values[operand] != kept:
            return operand
        arrives = self.values[other] == codes
        return (
            other
            if arrives or self.request.rules(node, in_loop=other not in self.old.values).unlimited
            else operand
        )

    def scan(self, node: Node) -> Node:
        """A scan that stacks what a later one needs, or reads what an earlier one has stacked."""
        (body,) = node.regions
        row, returned = self.rows[node.id], self.returned[node.id, 0]
        instead: dict[int, int] = {}
        for r in self.chosen:
            if r.first_loop == node.id:
                key = (node.id, r.first, r.codes)
                if key in self.stacked:
                    continue
                aval = self.avals[r.first]
                whole = self.stacked[key] = next(self.next)
                self.avals[whole] = _jax.empty_aval(
                    (int(node.params["length"]), *aval.shape), aval.dtype
                )
                self.values[whole] = stack(r.codes)
                node = dataclasses.replace(node, outputs=(*node.outputs, whole))
                body = dataclasses.replace(body, outputs=(*body.outputs, r.first))
                row = NdRow(row.ins, (*row.outs, stack(r.codes)), row.kernels)
                returned = (*returned, r.codes)
            elif r.loop == node.id and r.value not in instead:
                value = next(self.next)
                assert r.first_loop is not None
                self.avals[value] = self.avals[r.first]
                self.values[value] = r.codes
                node = dataclasses.replace(
                    node, inputs=(*node.inputs, self.stacked[r.first_loop, r.first, r.codes])
                )
                body = dataclasses.replace(body, inputs=(*body.inputs, value))
                row = NdRow((*row.ins, stack(r.codes)), row.outs, row.kernels)
                instead[r.value] = value
        self.rows[node.id], self.returned[node.id, 0] = row, returned
        return dataclasses.replace(node, regions=(self.block(body, instead) if instead else body,))

    def pruned(self, graph: Graph) -> Graph:
        """A graph without the operations that nobody reads; effects stay."""
        needed = {o for o in graph.outputs if isinstance(o, int)}
        kept: list[Node] = []
        for node in reversed(graph.nodes):
            if _acts(node) or needed.intersection(node.outputs):
                needed.update(o for o in node.inputs if isinstance(o, int))
                kept.append(node)
        return dataclasses.replace(graph, nodes=tuple(reversed(kept)))


def _acts(node: Node) -> bool:
    """Whether a node is there for more than its results."""
    return (
        traits_of(node.op).effect
        or not node.outputs
        or any(_acts(n) for region in node.regions for n in region.nodes)
    )
