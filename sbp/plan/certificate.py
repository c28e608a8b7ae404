"""A plan as a certificate, which `tools/certify.py` checks without sbp.

The file is JSON. It has the program that was traced, the instructions that compute it on shards,
the types of arguments and results, and the cost graph that the types were chosen by, with messages
that prove a lower bound on its cost. docs/certificates.md describes the form.
"""

import base64
import hashlib
import json
import zlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, replace
from typing import Any

import jax
import numpy as np

from sbp import _jax
from sbp.infer.choose import JOINT_ENTRIES, Problem
from sbp.infer.cost import row_seconds
from sbp.infer.flow import Decision
from sbp.infer.request import JOINT_AXES, Request
from sbp.infer.rows import NdRow
from sbp.infer.space import LOCAL, Codes, Step
from sbp.infer.typing import Typing
from sbp.plan.ir import Apply, Block, Box, ConstantRegister, Source
from sbp.plan.program import Program, bytes_sent, node_place
from sbp.plan.saved import atom, plain
from sbp.plan.saving import repeated_values
from sbp.solve.costgraph import CostGraph
from sbp.solve.messages import dual_of
from sbp.solve.search import solve
from sbp.trace.graph import Constant, Graph, Node, Operand, group_by, trips_of

FORMAT = 1
"""The version of the file's own form."""


def certificate(program: Program, output_names: Sequence[str]) -> str:
    """The text of a plan's certificate.

    Arguments:
      program: the plan.
      output_names: names of its results.
    """
    writer, mesh, request = ProgramWriter(program), program.mesh, program.request
    whole = writer.graph(request.graph)
    known = len(writer.values)
    plan = writer.block(program.block)
    avals = program.graph.avals
    values = [[str(avals[v].dtype), avals[v].shape] for v in writer.values]
    names = (request.graph.input_names, output_names)
    sides = zip(names, (program.input_types, program.output_types), strict=True)
    parts = {
        "sbp certificate": FORMAT,
        "mesh": mesh.axes,
        "program": {"values": values[:known], **whole},
        "lines": [node_place(node) for node in request.graph.walk()],
        "plan": {"values": values[known:], **plan},
        "bytes_per_device": program.cost.bytes_per_device,
        **{
            side: [[name, repr(t)] for name, t in zip(of_side, types, strict=True)]
            for side, (of_side, types) in zip(("arguments", "results"), sides, strict=True)
        },
        "cost": costs(program, writer),
    }
    lines = (f"{json.dumps(name)}: {json.dumps(part)}" for name, part in parts.items())
    return "{" + ",\n".join(lines) + "}\n"


class ProgramWriter:
    """Writes programs and instructions. Values are numbered in the order in which they occur,
    operations in the order of `Graph.walk`.

    Attributes:
      values: the number of each value.
      numbers: the number of each node of the traced program, by its id.
    """

    def __init__(self, program: Program) -> None:
        self.values = dict[int, int]()
        self.numbers = {node.id: n for n, node in enumerate(program.request.graph.walk())}

    def value(self, value: int) -> int:
        """The number of a value."""
        return self.values.setdefault(value, len(self.values))

    # ---- the program ----------------------------------------------------------------------------

    def graph(self, graph: Graph) -> dict[str, Any]:
        """A program, or the body of a loop or branch."""
        return {
            "in": [self.value(v) for v in graph.inputs],
            "do": [self.operation(node) for node in graph.nodes],
            "out": [self.operand(o) for o in graph.outputs],
        }

    def operation(self, node: Node) -> dict[str, Any]:
        """An operation of the program, with its bodies after its operands."""
        made: dict[str, Any] = {
            "op": node.op,
            "params": {name: plain(node.params[name]) for name in sorted(node.params)},
            "in": [self.operand(o) for o in node.inputs],
        }
        if node.regions:
            made |= {"bodies": [self.graph(r) for r in node.regions], "trips": trips_of(node)}
        return made | {"out": [self.value(v) for v in node.outputs]}

    def operand(self, operand: Operand) -> Any:
        """The number of a value; of a constant its dtype, shape and bytes, or their digest."""
        if not isinstance(operand, Constant):
            return self.value(operand)
        value, aval = operand.value, operand.aval
        data = np.asarray(jax.random.key_data(value) if _jax.is_extended(aval.dtype) else value)
        held = data.tobytes()
        text = held.hex() if len(held) <= 16 else hashlib.sha256(held).hexdigest()
        return {"constant": text, "dtype": str(aval.dtype), "shape": aval.shape}

    # ---- the plan -------------------------------------------------------------------------------

    def block(self, block: Block) -> dict[str, Any]:
        """Instructions in order."""
        return {
            "in": self.sources(block.inputs),
            "do": [self.instruction(i) for i in block.instructions],
            "out": self.sources(block.outputs),
        }

    def sources(self, sources: Iterable[Source]) -> list[Any]:
        """Registers: the number of the value, none for a constant, and the type."""
        return [
            [None if isinstance(s, ConstantRegister) else self.value(s.value), atoms(s.codes)]
            for s in sources
        ]

    def instruction(self, instruction: Any) -> dict[str, Any]:
        """An operation, a conversion, or a loop or branch."""
        if isinstance(instruction, Box):
            return {
                "convert": self.value(instruction.source.value),
                "from": atoms(instruction.source.codes),
                "steps": [_step(step) for step in instruction.steps],
            }
        ins, outs = self.sources(instruction.ins), self.sources(instruction.outs)
        number = self.numbers[instruction.node.id]
        if isinstance(instruction, Apply):
            made: dict[str, Any] = {"run": number, "in": ins, "out": outs}
            if kernels := sorted({*instruction.row.kernels} - {"local"}):
                made["kernels"] = kernels
            if sent := bytes_sent(instruction):
                made["bytes"] = sent
            return made
        bodies = [self.block(block) for block in instruction.blocks]
        return {"loop": number, "in": ins, "bodies": bodies, "out": outs}


def _step(step: Step) -> dict[str, Any]:
    made = {"kind": step.kind, "axes": step.mesh_axes, "to": atoms(step.target)}
    sent = {} if step.kind in LOCAL else {"bytes": step.bytes_sent}
    return made | sent | ({"wide": asdict(step.wide)} if step.wide else {})


def atoms(codes: Codes) -> list[int | str]:
    """A type: for each mesh axis the dim of a split, `B`, or the monoid of a partial.

    >>> atoms((1, 0, -1))
    [0, 'B', 'sum']
    """
    return [atom(c) for c in codes]


# ---- costs --------------------------------------------------------------------------------------
# The cost graph of a program, with the states that the plan has, and the dual.


class _CertifiedProblem(Problem):
    """The costs of a program's typings. The typing of the plan is among them, even if the choice of
    types left out one of its rows."""

    def __init__(self, typing: Typing, request: Request, shares: Mapping[int, float]) -> None:
        self.typing = typing
        super().__init__(request, 0.0, frozenset(), shares)

    def _priced_rows(self, node: Node, in_loop: bool) -> tuple[tuple[NdRow, ...], np.ndarray]:
        rows, seconds = super()._priced_rows(node, in_loop)
        own, request = self.typing.rows[node.id], self.request
        if own in rows:
            return rows, seconds
        # Under a price of memory, or with other axes fixed, a row may be chosen that is dominated.
        price = row_seconds(request.graph, node, own, request.mesh, request.memory_shares)
        return (*rows, own), np.append(seconds, price)

    def states(self) -> tuple[int, ...] | None:
        """The state of each variable: that of the typing, and where the typing has none, the
        cheapest one beside it. None where the budgets of the request forbid the typing."""
        fixed = CostGraph(list(self.costs.unary), self.costs.pairs, self.costs.places)
        for number, decision in enumerate(self.request.flow.decisions):
            options, own = self.rows.get(number) or self.types[number], self.typing.choice(decision)
            is_own = np.array([option == own for option in options], dtype=bool)
            fixed.add_unary(number, np.where(is_own, 0.0, np.inf))
        found = solve(fixed)
        return None if found is None else found.states


def costs(program: Program, writer: ProgramWriter) -> dict[str, Any] | None:
    """The cost graph of a program, the states of its plan, and messages that prove a bound; None
    for a cost graph that is too large to be made as a whole.

    Arguments:
      program: the plan.
      writer: knows the numbers of values and operations.
    """
    request, typing = program.request, program.typing
    if len(request.axes) > JOINT_AXES:
        return None
    again = repeated_values(request.graph)[0]
    shares = dict.fromkeys(again if program.removed else (), 0.0)
    # A plan may keep budgets that forbid one of its conversions, if the conversion is the same as
    # one for an earlier reader. The bound is then that without budgets.
    wanted = (request, replace(request, budgets=()))
    problems = (_CertifiedProblem(typing, each, shares) for each in wanted)
    problem, states = next(
        ((p, s) for p in problems if p.entries <= JOINT_ENTRIES and (s := p.states()) is not None),
        (None, ()),
    )
    if problem is None:
        return None
    graph, flow = problem.costs, request.flow
    bound, moved = dual_of(graph)
    ends = ((e.variable, writer.value(v), e.column) for v, e in flow.makers.items())
    made = group_by(ends, lambda end: end[0])
    types, lists, tables = dict[Any, int](), dict[Any, int](), dict[Any, int]()
    variables: list[Any] = []
    decided = [
        _decided(d, writer, [end[1:] for end in made.get(number, ())])
        for number, d in enumerate(flow.decisions)
    ]
    for number, unary in enumerate(graph.unary):
        rows = problem.rows.get(number)
        options = (
            [(*r.ins, *r.outs) for r in rows] if rows else [(t,) for t in problem.types[number]]
        )
        listed = tuple(tuple(_number(types, t) for t in columns) for columns in options)
        numbered = {"states": _number(lists, listed), "seconds": _number(tables, _key(unary))}
        own = decided[number] if number < len(decided) else {}
        variables.append({**own, **numbered, "chosen": states[number]})
    pairs = [[a, b, _number(tables, _key(table))] for (a, b), table in graph.pairs.items()]
    seconds = np.unique([x for _, data in tables for x in np.unique(np.frombuffer(data))])
    return {
        "seconds": program.cost.seconds,
        "chosen": graph.cost_of(states),
        "bound": bound,
        "bound of sbp": typing.lower_bound,
        "repeated": len(again),
        "reuse is free": bool(program.removed),
        "types": [atoms(t) for t in types],
        "states": list(lists),
        "numbers": [x if np.isfinite(x) else None for x in seconds.tolist()],
        "tables": [
            [shape, _packed(np.searchsorted(seconds, np.frombuffer(data)).astype("<i4"))]
            for shape, data in tables
        ],
        "variables": variables,
        "pairs": pairs,
        "messages": _packed(np.concatenate([np.zeros(0), *(m for e in moved.values() for m in e)])),
    }


def _number(known: dict[Any, int], item: Any) -> int:
    """The number of an item, in the order in which they first occur."""
    return known.setdefault(item, len(known))


def _key(costs: np.ndarray) -> tuple[tuple[int, ...], bytes]:
    return costs.shape, np.asarray(costs, dtype="<f8").tobytes()


def _packed(array: np.ndarray) -> str:
    return base64.b64encode(zlib.compress(array.tobytes())).decode()


def _decided(
    decision: Decision, writer: ProgramWriter, made: list[tuple[int, int]]
) -> dict[str, Any]:
    """What a decision decides: the row of an operation, the type of values, each with whether the
    values are stacks of it, or that of a result of the program."""
    return (
        {"row": writer.numbers[decision.node.id]}
        if decision.kind == "row" and decision.node is not None
        else {"result": decision.position}
        if decision.kind == "output"
        else {"values": made}
    )
