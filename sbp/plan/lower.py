"""Typing -> instructions: each operand is converted to the type its row takes, before its first
reader and once per type."""

from __future__ import annotations

import itertools
from collections import defaultdict

from sbp import _jax
from sbp.annotations import annotate_p
from sbp.infer.policy import Rules, detour
from sbp.infer.rows import EMPTY, row_sends
from sbp.infer.space import Codes, TypeSpace
from sbp.infer.typing import Typing
from sbp.plan.ir import Apply, Block, Box, ConstantRegister, Instruction, Loop, Register, Source
from sbp.trace.graph import Constant, Graph, Node, Operand
from sbp.trace.regions import LOOPS, trips_of
from sbp.types import MONOIDS


def lower(typing: Typing) -> Block:
    """Writes a typing out as instructions.

    The order is the program's. A value that readers take in several types is converted along the
    cheapest tree: gathered for one reader, it is sliced for the next. A reader whose rules forbid
    some conversion takes the path that its rules allow.
    """
    return _Lowering(typing).block(typing.graph, typing.outputs)


class _Lowering:
    """Lowers one typing."""

    def __init__(self, typing: Typing) -> None:
        self.typing = typing
        self.request = typing.graph_request
        self.loops = 0
        self.zero: Codes = (0,) * len(typing.mesh.sizes)

    def space(self, value: int, types: list[Codes]) -> TypeSpace:
        """A space of a value that holds the given types."""
        aval = self.typing.graph.avals[value]
        monoids = frozenset(MONOIDS[-1 - c] for t in types for c in t if c < 0) or EMPTY
        monoids = detour(aval.dtype, monoids) if self.request.budgets else monoids
        shape = tuple(aval.shape)
        forced = frozenset((i, c - 1) for t in types for i, c in enumerate(t) if c > 0)
        return self.request.spaces.of(
            shape, _jax.itemsize(aval.dtype), monoids, forced, value in self.typing.float32
        )

    def block(self, graph: Graph, returned: tuple[Codes, ...], owner: Node | None = None) -> Block:
        """A graph as instructions.

        Arguments:
          graph: the program, or a region.
          returned: the types in which it returns its results.
          owner: the node whose region it is; None for the program.
        """
        typing = self.typing
        writer = _BlockWriter(self, graph, returned, owner)
        for node in graph.nodes:
            row = typing.rows[node.id]
            ins = tuple(writer.read(o, c, node) for o, c in zip(node.inputs, row.ins, strict=True))
            outs = tuple(Register(v, typing.values[v]) for v in node.outputs)
            if node.regions:
                self.loops += node.op in LOOPS
                blocks = tuple(
                    self.block(r, typing.region_outputs[node.id, i], node)
                    for i, r in enumerate(node.regions)
                )
                self.loops -= node.op in LOOPS
                writer.instructions.append(
                    Loop(node=node, ins=ins, outs=outs, blocks=blocks, trips=trips_of(node))
                )
            else:
                sends = row_sends(graph, node, row, typing.mesh)
                writer.instructions.append(
                    Apply(node=node, row=row, ins=ins, outs=outs, sends=sends)
                )
        outputs = tuple(
            writer.read(o, c, None) for o, c in zip(graph.outputs, returned, strict=True)
        )
        inputs = tuple(Register(v, typing.values[v]) for v in graph.inputs)
        return Block(inputs=inputs, instructions=tuple(writer.instructions), outputs=outputs)

    def rules(self, reader: Node | None, value: int) -> Rules:
        """The conversions allowed for a reader: the policies do not hold for annotations and the
        program's results."""
        free = reader is None or reader.op == annotate_p.name
        return self.request.rules(reader, in_loop=self.loops > 0, free=free, value=value)

    def reached(self, value: int, have: list[Codes], target: Codes, rules: Rules) -> Codes:
        """The type in `have` from which the conversion to `target` is cheapest under the rules."""
        space = self.space(value, [*have, target])
        seconds = space.seconds(rules)[:, space.index[target]]
        return min(have, key=lambda t: (float(seconds[space.index[t]]), t))

    def tree(self, value: int, types: list[Codes]) -> dict[Codes, Codes]:
        """For each type that is read, the type it is converted from. All orders are priced (of more
        than four types one order), each type made from the cheapest one before it."""
        made = self.typing.values[value]
        space = self.space(value, [made, *types])
        seconds = space.seconds()
        targets = sorted(t for t in types if t != made)
        orders = list(itertools.permutations(targets) if len(targets) <= 4 else [tuple(targets)])
        # A type that no reader takes may serve several: gathered once, then sliced for each.
        between = (
            {tuple(0 if c < 0 else c for c in made), (0,) * len(made)} - {made, *targets}
            if len(targets) > 1
            else set()
        )
        orders += [(extra, *order) for extra in sorted(between) for order in orders[: len(orders)]]
        best: tuple[float, dict[Codes, Codes]] | None = None
        for order in orders:
            there, cost, parents = [made], 0.0, {}
            for t in order:
                price, parent = min(
                    (float(seconds[space.index[s], space.index[t]]), i) for i, s in enumerate(there)
                )
                cost += price
                parents[t] = there[parent]
                there.append(t)
            if best is None or cost < best[0] - 1e-18:
                best = cost, parents
        assert best is not None
        return best[1]


class _BlockWriter:
    """Writes the instructions of one block, conversions where they are first read.

    Arguments:
      lowering: the program's.
      graph: the block's graph.
      returned: the types in which it returns its results.
      owner: the node whose region it is; None for the program.
    """

    def __init__(
        self, lowering: _Lowering, graph: Graph, returned: tuple[Codes, ...], owner: Node | None
    ) -> None:
        self.lowering, self.owner = lowering, owner
        typing = lowering.typing
        self.makers: dict[int, Node | None] = dict.fromkeys(graph.inputs)
        for node in graph.nodes:
            self.makers.update(dict.fromkeys(node.outputs, node))
        wanted: dict[int, dict[Codes, None]] = defaultdict(dict)
        for node in graph.nodes:
            for operand, codes in zip(node.inputs, typing.rows[node.id].ins, strict=True):
                if isinstance(operand, int):
                    wanted[operand].setdefault(codes)
        for operand, codes in zip(graph.outputs, returned, strict=True):
            if isinstance(operand, int):
                wanted[operand].setdefault(codes)
        self.parents = {
            v: lowering.tree(v, list(types))
            for v, types in wanted.items()
            if set(types) != {typing.values[v]}
        }
        self.there: dict[int, set[Codes]] = {v: {typing.values[v]} for v in self.makers}
        self.instructions: list[Instruction] = []

    def read(self, operand: Operand, codes: Codes, reader: Node | None) -> Source:
        """The register of an operand in a type, after the conversions that it takes.

        Arguments:
          operand: a value or a constant.
          codes: the type.
          reader: the node that reads it; None for the block's results.
        """
        if isinstance(operand, Constant):
            return ConstantRegister(operand, codes)
        there = self.there[operand]
        if codes not in there:
            rules = self.lowering.rules(reader or self.owner, operand)
            parent = (
                self.parents[operand][codes]
                if rules.unlimited
                else self.lowering.reached(operand, sorted(there), codes, rules)
            )
            source = self.read(operand, parent, reader)
            assert isinstance(source, Register)
            space = self.lowering.space(operand, [parent, codes])
            self.instructions.append(
                Box(
                    source=source,
                    target=Register(operand, codes),
                    steps=space.path(parent, codes, rules),
                    reader=reader,
                    maker=self.makers[operand],
                )
            )
            there.add(codes)
        return Register(operand, codes)
