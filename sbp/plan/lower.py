"""Typing -> instructions: operands are boxed to the types their rows take, as late as a reader
allows and once per type."""

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

    The order is the program's. A value that several readers want in several types is brought there
    along the cheapest tree: what is gathered for one reader is sliced for the next. A reader that
    may not convert everything takes what its own rules reach.
    """
    return _Lowering(typing).block(typing.graph, typing.outputs)


class _Lowering:
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

    def needs(self, node: Node) -> tuple[Codes, ...]:
        return self.typing.rows[node.id].ins

    def block(self, graph: Graph, returned: tuple[Codes, ...], owner: Node | None = None) -> Block:
        """A graph as instructions; `owner` is the node whose region it is."""
        typing = self.typing
        made: dict[int, Node | None] = dict.fromkeys(graph.inputs)
        for node in graph.nodes:
            made.update(dict.fromkeys(node.outputs, node))
        wanted: dict[int, dict[Codes, Node | None]] = defaultdict(dict)
        for node in graph.nodes:
            for operand, codes in zip(node.inputs, self.needs(node), strict=True):
                if isinstance(operand, int):
                    wanted[operand].setdefault(codes, node)
        for operand, codes in zip(graph.outputs, returned, strict=True):
            if isinstance(operand, int):
                wanted[operand].setdefault(codes, None)
        parents = {
            v: self.tree(v, list(types))
            for v, types in wanted.items()
            if set(types) != {typing.values[v]}
        }
        held: dict[int, set[Codes]] = {v: {typing.values[v]} for v in made}
        instructions: list[Instruction] = []

        def fetch(operand: Operand, codes: Codes, reader: Node | None) -> Source:
            if isinstance(operand, Constant):
                return ConstantRegister(operand, codes)
            if codes not in held[operand]:
                rules = self.rules(reader or owner, operand)
                parent = (
                    parents[operand][codes]
                    if rules.unlimited
                    else self.reached(operand, sorted(held[operand]), codes, rules)
                )
                source = fetch(operand, parent, reader)
                assert isinstance(source, Register)
                space = self.space(operand, [parent, codes])
                target = Register(operand, codes)
                steps = space.path(parent, codes, rules)
                instructions.append(
                    Box(
                        source=source,
                        target=target,
                        steps=steps,
                        reader=reader,
                        maker=made[operand],
                    )
                )
                held[operand].add(codes)
            return Register(operand, codes)

        for node in graph.nodes:
            row = typing.rows[node.id]
            ins = tuple(fetch(o, c, node) for o, c in zip(node.inputs, row.ins, strict=True))
            outs = tuple(Register(v, typing.values[v]) for v in node.outputs)
            if node.regions:
                self.loops += node.op in LOOPS
                blocks = tuple(
                    self.block(r, typing.region_outputs[node.id, i], node)
                    for i, r in enumerate(node.regions)
                )
                self.loops -= node.op in LOOPS
                instructions.append(
                    Loop(node=node, ins=ins, outs=outs, blocks=blocks, trips=trips_of(node))
                )
            else:
                sends = row_sends(graph, node, row, typing.mesh)
                instructions.append(Apply(node=node, row=row, ins=ins, outs=outs, sends=sends))
        outputs = tuple(fetch(o, c, None) for o, c in zip(graph.outputs, returned, strict=True))
        inputs = tuple(Register(v, typing.values[v]) for v in graph.inputs)
        return Block(inputs=inputs, instructions=tuple(instructions), outputs=outputs)

    def rules(self, reader: Node | None, value: int) -> Rules:
        """What may be converted for a reader: annotations and the end of the program convert
        freely."""
        free = reader is None or reader.op == annotate_p.name
        return self.request.rules(reader, in_loop=self.loops > 0, free=free, value=value)

    def reached(self, value: int, held: list[Codes], target: Codes, rules: Rules) -> Codes:
        """Of the types that are there, the one from which the rules reach a type most cheaply."""
        space = self.space(value, [*held, target])
        seconds = space.seconds(rules)[:, space.index[target]]
        return min(held, key=lambda t: (float(seconds[space.index[t]]), t))

    def tree(self, value: int, types: list[Codes]) -> dict[Codes, Codes]:
        """For each wanted type, the type it is made from: the cheapest order of acquiring them,
        each from what is there by then."""
        made = self.typing.values[value]
        space = self.space(value, [made, *types])
        seconds = space.seconds()
        targets = sorted(t for t in types if t != made)
        orders = list(itertools.permutations(targets) if len(targets) <= 4 else [tuple(targets)])
        # A type that nobody asked for may serve several readers: what is gathered once is sliced
        # for each.
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
