"""The instructions of a plan: local operations, conversions and regions; and how a typing becomes
instructions.

Every collective is a conversion, or runs inside the kernel of an operation. All instructions read
the registers `ins` and write the registers `outs`."""

import itertools
import math
from collections.abc import Collection, Iterator
from dataclasses import dataclass

import numpy as np

from sbp.infer.cost import row_sends
from sbp.infer.flow import Edge, Place
from sbp.infer.rows import EMPTY, NdRow
from sbp.infer.space import Codes, Step, TypeSpace, all_needs_of
from sbp.infer.typing import Typing
from sbp.limits import Rules
from sbp.signatures import Sent, kernel_named
from sbp.trace.graph import Constant, Dataflow, Graph, Node, group_by, trips_of


@dataclass(frozen=True, slots=True)
class Register:
    """A value in one type, on a device the part that the type gives it."""

    value: int
    codes: Codes


@dataclass(frozen=True, slots=True, eq=False)
class ConstantRegister:
    """A constant in one type."""

    constant: Constant
    codes: Codes


Source = Register | ConstantRegister


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Apply:
    """An operation: the node's kernels on the shards.

    Arguments:
      node: the node.
      row: the row of its rule that was chosen.
      ins: operands in the types that the row takes.
      outs: results.
      sends: the collectives inside the row's kernels, each with the position of its mesh axis.
    """

    node: Node
    row: NdRow
    ins: tuple[Source, ...]
    outs: tuple[Register, ...]
    sends: tuple[tuple[int, Sent], ...] = ()

    @property
    def bytes_sent(self) -> float:
        """Bytes one device sends each time the operation runs."""
        return sum(sent.bytes for _, sent in self.sends)

    @property
    def scratch_bytes(self) -> float:
        """Bytes that the kernels need while they run, for what other devices send. Of the operand
        with the largest shards among those that travel around a ring, two shards count."""
        rings = [s for p, s in self.sends if kernel_named(self.row.kernels[p]).gathers is not None]
        around = max(rings, key=lambda s: s.bytes / s.rounds, default=None)
        return sum(2 * s.bytes / s.rounds if s is around else s.bytes for _, s in self.sends)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Box:
    """A conversion of one value to another type.

    Arguments:
      source: the value in the type that it has.
      target: the value in the type that its reader takes.
      steps: the cheapest sequence of collectives and local steps.
      reader: the first node that reads `target`; None where the program or a region returns it.
      maker: the node that made the value; None for an argument of the program or of a region.
    """

    source: Register
    target: Register
    steps: tuple[Step, ...]
    reader: Node | None
    maker: Node | None

    @property
    def ins(self) -> tuple[Register, ...]:
        """The register that it reads."""
        return (self.source,)

    @property
    def outs(self) -> tuple[Register, ...]:
        """The register that it writes."""
        return (self.target,)

    @property
    def bytes_sent(self) -> float:
        """Bytes one device sends each time the conversion runs."""
        return sum(s.bytes_sent for s in self.steps)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Loop:
    """A `scan`, `while` or `cond` over blocks.

    Arguments:
      node: the node.
      ins: operands in the types in which the blocks take them.
      outs: results.
      blocks: the bodies, in the order of the node's regions.
    """

    node: Node
    ins: tuple[Source, ...]
    outs: tuple[Register, ...]
    blocks: "tuple[Block, ...]"


Instruction = Apply | Box | Loop


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Block:
    """Instructions in order, from input registers to outputs."""

    inputs: tuple[Register, ...]
    instructions: tuple[Instruction, ...]
    outputs: tuple[Source, ...]


def blocks(block: Block) -> Iterator[Block]:
    """A block and the blocks of its regions, outer ones first."""
    yield block
    for loop in block.instructions:
        for inner in loop.blocks if isinstance(loop, Loop) else ():
            yield from blocks(inner)


def walk(
    block: Block, trips: int = 1, regions: tuple[tuple[Node, int], ...] = ()
) -> Iterator[tuple[Apply | Box, int, tuple[tuple[Node, int], ...], Block]]:
    """All operations and conversions of a block and of its regions, in program order, each with its
    executions per call, the regions around it, outermost first, and its block.

    Arguments:
      block: the instructions.
      trips: executions of the block per call.
      regions: the regions around the block: each node and the number of its body.
    """
    for instruction in block.instructions:
        if isinstance(instruction, Loop):
            for number, inner in enumerate(instruction.blocks):
                yield from walk(
                    inner,
                    trips * trips_of(instruction.node),
                    (*regions, (instruction.node, number)),
                )
        else:
            yield instruction, trips, regions, block


# ---- lowering -----------------------------------------------------------------------------------
# Typing -> instructions: each operand is converted to the type that its reader takes, before its
# first reader and once per type.


ORDERED_TYPES = 4
"""Types of one value for which all orders of its conversions are priced: 4 types have 24 orders. Of
more types one order is priced."""


def lower(typing: Typing) -> Block:
    """Writes a typing out as instructions.

    The order is the program's. A value that readers take in several types is converted along the
    cheapest tree that the rules of the readers allow: gathered for one reader, it is sliced for the
    next.
    """
    return _Lowering(typing).block(typing.graph, ("output",))


def types_read(typing: Typing) -> dict[int, dict[Codes, set[Rules]]]:
    """For each value that is read, the types in which its readers take it, each with the rules of
    these readers."""
    request = typing.graph_request
    return {
        value: {
            codes: {
                request.rules(e.node, value=value, in_loop=e.in_loop, free=e.free) for e in same
            }
            for codes, same in group_by(reads, lambda e: typing.codes_at(e.place)).items()
        }
        for value, reads in request.flow.readers().items()
    }


class _Lowering:
    """Lowers one typing."""

    def __init__(self, typing: Typing) -> None:
        self.typing = typing
        self.request = typing.graph_request
        self.reads = self.request.flow.reads()
        self.makers = Dataflow(typing.graph).makers
        self.there = {v: {codes} for v, codes in typing.values.items()}
        self.parents = {
            v: self.tree(v, types)
            for v, types in types_read(typing).items()
            if types.keys() != {typing.values[v]}
        }

    def space(self, value: int, types: Collection[Codes]) -> TypeSpace:
        """The type space of a value, with the given types among its types."""
        request, (forced, monoids) = self.request, all_needs_of(types)
        return request.spaces.of(
            self.typing.graph.avals[value],
            monoids | request.native.get(value, EMPTY),
            forced,
            request.reduction(value),
            request.kept(types),
        )

    def block(self, graph: Graph, place: Place) -> Block:
        """A graph as instructions.

        Arguments:
          graph: the program, or a region.
          place: where a typing stores the types in which it returns its results, without the number
            of the result.
        """
        typing = self.typing
        written: list[Instruction] = []
        for node in graph.nodes:
            row = typing.rows[node.id]
            ins = tuple(
                self.read(written, self.reads["operand", node.id, i], codes)
                for i, codes in enumerate(row.ins)
            )
            outs = tuple(Register(v, typing.values[v]) for v in node.outputs)
            if node.regions:
                blocks = tuple(
                    self.block(region, ("result", node.id, number))
                    for number, region in enumerate(node.regions)
                )
                written.append(Loop(node=node, ins=ins, outs=outs, blocks=blocks))
            else:
                written.append(
                    Apply(
                        node=node,
                        row=row,
                        ins=ins,
                        outs=outs,
                        sends=tuple(row_sends(graph, node, row, typing.mesh)),
                    )
                )
        outputs = tuple(
            self.read(written, self.reads[(*place, i)], typing.codes_at((*place, i)))
            for i in range(len(graph.outputs))
        )
        return Block(
            inputs=tuple(Register(v, typing.values[v]) for v in graph.inputs),
            instructions=tuple(written),
            outputs=outputs,
        )

    def read(self, written: list[Instruction], edge: Edge, codes: Codes) -> Source:
        """The register of a value or constant in the type in which it is read. Writes the
        conversions that lead to it first.

        Arguments:
          written: the instructions of the reader's block so far.
          edge: the read.
          codes: the type.
        """
        if isinstance(operand := edge.operand, Constant):
            return ConstantRegister(operand, codes)
        there = self.there[operand]
        if codes not in there:
            rules = self.request.rules(
                edge.node, value=operand, in_loop=edge.in_loop, free=edge.free
            )
            parent = self.parents[operand][codes]
            source = self.read(written, edge, parent)
            assert isinstance(source, Register)
            written.append(
                Box(
                    source=source,
                    target=Register(operand, codes),
                    steps=self.space(operand, (parent, codes)).path(parent, codes, rules),
                    reader=None if edge.kind == "exit" else edge.node,
                    maker=self.makers.get(operand),
                )
            )
            there.add(codes)
        return Register(operand, codes)

    def tree(self, value: int, reads: dict[Codes, set[Rules]]) -> dict[Codes, Codes]:
        """For each type in which a value is read, the type that it is converted from.

        In an order of conversions, each type is made from the cheapest type before it. The
        cheapest order is taken, of more than `ORDERED_TYPES` types the sorted one. All conversions
        up to a type obey the rules of its readers, since the first reader runs them.

        Arguments:
          value: the value.
          reads: the types, each with the rules of its readers.
        """
        made = self.typing.values[value]
        targets = sorted(reads.keys() - {made})
        every = len(targets) <= ORDERED_TYPES
        orders = list(itertools.permutations(targets) if every else [tuple(targets)])
        # A type that no reader takes may serve several: gathered once, then sliced for each.
        between = (
            {tuple(0 if c < 0 else c for c in made), (0,) * len(made)} - {made, *targets}
            if len(targets) > 1
            else set()
        )
        space = self.space(value, {made, *reads, *between})
        orders += [(extra, *order) for extra in sorted(between) for order in orders]
        best: tuple[float, dict[Codes, Codes]] | None = None
        for order in orders:
            cost, parents = 0.0, dict[Codes, Codes]()  # in the order of the conversions
            for t in order:
                price, _, parents[t] = min(
                    (self.price(space, (s, t), parents, reads.get(t)), i, s)
                    for i, s in enumerate((made, *parents))
                )
                cost += price
            if best is None or cost < best[0] - 1e-18:
                best = cost, parents
        assert best is not None
        return best[1]

    @staticmethod
    def price(
        space: TypeSpace,
        ends: tuple[Codes, Codes],
        parents: dict[Codes, Codes],
        rules: set[Rules] | None,
    ) -> float:
        """Seconds of a conversion; infinite if some of the rules forbid it or a conversion before
        it."""
        chain = [*ends[::-1]]
        while chain[-1] in parents:
            chain.append(parents[chain[-1]])
        after, before = ([space.index[t] for t in part] for part in (chain[:-1], chain[1:]))
        # For each of the rules, the seconds of the conversion, then of those before it.
        every = [space.seconds(each)[before, after] for each in rules or (space.unlimited,)]
        return max(float(costs[0]) if np.isfinite(costs).all() else math.inf for costs in every)
