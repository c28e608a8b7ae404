"""Runs the checker on a body: operations in order, loops until the types of the carry stay as they
are, branches joined."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from sbp.errors import SbpInternalError
from sbp.shardmap.communication import collective
from sbp.shardmap.coverage import axes_over
from sbp.shardmap.distribution import (
    UNKNOWN,
    Distribution,
    Doubt,
    Fault,
    LocalValue,
    literal,
)
from sbp.shardmap.joins import join, joined
from sbp.shardmap.local import local
from sbp.shardmap.state import State
from sbp.trace.collectives import SHARD_MAP, is_collective
from sbp.trace.graph import BARRIER, Constant, Graph, Node
from sbp.trace.regions import interface_of, trips_of
from sbp.types import B, Split

TURNS = 12
"""The number of trips after which a changing carry is unknown, for a loop that carries one value.
Each trip leaves at most as many readings as the one before."""

TURNS_EACH = 2
"""The number of additional trips for each other value of the carry: a value that each trip moves to
the next position of the carry takes a trip for each position."""


def run(state: State, graph: Graph, args: Sequence[LocalValue]) -> list[LocalValue]:
    """The local values of a body's results, from the local values of its inputs."""
    env: dict[int, LocalValue] = dict(zip(graph.inputs, args, strict=True))

    def read(operand: int | Constant) -> LocalValue:
        return (
            literal(operand.value, operand.aval, len(state.sizes))
            if isinstance(operand, Constant)
            else env[operand]
        )

    for node in graph.nodes:
        ins = [read(o) for o in node.inputs]
        outs = _results(state, node, ins)
        state.sighted.see(node, ins, outs, axes_over(node, state.names))
        env.update(zip(node.outputs, outs, strict=True))
    return [read(o) for o in graph.outputs]


def _results(state: State, node: Node, ins: list[LocalValue]) -> list[LocalValue]:
    if node.regions:
        return _with_regions(state, node, ins)
    match node.op:
        case op if op == BARRIER:
            return ins
        case op if op == SHARD_MAP:
            state.enter(Doubt(node, "nested", "warning"))
            return [LocalValue((UNKNOWN,) * len(state.sizes)) for _ in node.outputs]
        case op if is_collective(op):
            return collective(state, node, ins)
        case _:
            return local(state, node, ins)


def _with_regions(state: State, node: Node, ins: list[LocalValue]) -> list[LocalValue]:
    interface = interface_of(node)
    if not interface.loop:
        return _cond(state, node, ins)
    decides = any(e.kind == "predicate" for e in interface.exits)
    return _while(state, node, ins) if decides else _scan(state, node, ins)


def _fixpoint(state: State, node: Node, region: int, ins: list[LocalValue]) -> list[LocalValue]:
    """The results of a loop's body, once a trip leaves the types of the carry as they are. Findings
    of earlier trips count: these trips run, too."""
    interface, graph = interface_of(node), node.regions[region]
    carry = interface.operands("carry", ins)
    slices = [_without_lead(v) for v in interface.operands("slice", ins)]
    count = len(carry)
    turns = TURNS + TURNS_EACH * count
    doubt = Doubt(node, "carry")
    given_up = LocalValue((replace(UNKNOWN, doubt=doubt),) * len(state.sizes))
    for turn in range(2 * turns):
        out = run(state, graph, interface.inputs(region, ins, carries=carry, slices=slices))
        wider = [join(a, b, node) for a, b in zip(carry, out[:count], strict=True)]
        if wider == carry:
            return [*wider, *out[count:]]
        if turn >= turns:  # each is given up once at most, so that there is an end
            wider = [given_up if a != b else a for a, b in zip(carry, wider, strict=True)]
        carry = wider
    raise SbpInternalError(
        f"the carry of {node.op} takes more than {2 * turns} turns to keep its type"
    )


def _scan(state: State, node: Node, ins: list[LocalValue]) -> list[LocalValue]:
    interface = interface_of(node)
    state.turns.append(trips_of(node))
    out = _fixpoint(state, node, 0, ins)
    state.turns.pop()
    return [
        _with_lead(out[e.output]) if e.kind == "stacked" else out[e.output] for e in interface.exits
    ]


def _without_lead(v: LocalValue) -> LocalValue:
    """One trip's slice of a scan's operand."""
    return replace(
        v,
        per_axis=tuple(_shifted(h, -1) for h in v.per_axis),
        lengths=(),
        added=None,
        position=None,
    )


def _with_lead(v: LocalValue) -> LocalValue:
    return replace(
        v, per_axis=tuple(_shifted(h, 1) for h in v.per_axis), lengths=(), added=None, position=None
    )


def _shifted(h: Distribution, by: int) -> Distribution:
    atoms = {
        Split(a.dim + by) if isinstance(a, Split) else a
        for a in h.atoms
        if not (isinstance(a, Split) and a.dim + by < 0)
    }
    return replace(h, atoms=frozenset(atoms)) if atoms or h.fault else UNKNOWN


def _while(state: State, node: Node, ins: list[LocalValue]) -> list[LocalValue]:
    carry = _fixpoint(state, node, 1, ins)
    (go,) = run(state, node.regions[0], interface_of(node).inputs(0, ins, carries=carry))
    varies = _predicate(state, node, go)
    return [_varying(v, varies) for v in carry]


def _cond(state: State, node: Node, ins: list[LocalValue]) -> list[LocalValue]:
    interface = interface_of(node)
    outs = [run(state, b, interface.inputs(n, ins)) for n, b in enumerate(node.regions)]
    (chosen,) = interface.operands("predicate", ins)
    varies = _predicate(state, node, chosen)
    return [_varying(joined(values, node), varies) for values in zip(*outs, strict=True)]


def _varying(v: LocalValue, varies: Sequence[int]) -> LocalValue:
    """A result of a loop or branch: unknown on mesh axes along which devices take different
    ways."""
    return (
        replace(v, per_axis=tuple(UNKNOWN if k in varies else h for k, h in enumerate(v.per_axis)))
        if varies
        else v
    )


def _predicate(state: State, node: Node, v: LocalValue) -> list[int]:
    """The mesh axes along which devices may take different ways; reports a partial predicate."""
    varies = []
    for k, h in enumerate(v.per_axis):
        if B in h.atoms:
            continue
        if h.fault:
            state.report(h.fault, k, node)
        elif h.partial:
            state.report(Fault("predicate", node, h.made, 0, (h.partial,)), k, node)
        else:
            varies.append(k)
    return varies
