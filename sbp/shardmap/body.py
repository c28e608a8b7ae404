"""Runs the checker on a body: operations in order, loops until the types of the carry stay as they
are, branches joined."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace

from sbp.errors import SbpInternalError
from sbp.shardmap.blocks import exchanged
from sbp.shardmap.coverage import axes_over
from sbp.shardmap.distribution import (
    UNKNOWN,
    WHOLE,
    Distribution,
    Doubt,
    Fault,
    LocalValue,
    faulty,
    literal,
    unsure,
)
from sbp.shardmap.local import local
from sbp.shardmap.operators import fills_with_zero
from sbp.shardmap.positions import index_of_device
from sbp.shardmap.state import State
from sbp.trace.collectives import (
    AXIS_INDEX,
    KINDS,
    REDUCTIONS,
    SHARD_MAP,
    SUMS,
    Collective,
    is_collective,
    names_of,
)
from sbp.trace.graph import BARRIER, Constant, Graph, Node
from sbp.trace.regions import interface_of, trips_of
from sbp.types import Atom, B, P, Split, Unreduced

# ---- joins --------------------------------------------------------------------------------------
# A value that comes by one of two ways: the carry of a loop, the result of a branch.


def join(a: LocalValue, b: LocalValue, node: Node) -> LocalValue:
    """A value that is one of two, with the readings of both."""
    given = tuple(
        replace(_join(x, y, a, b, node), sources=x.sources | y.sources, away=x.away or y.away)
        for x, y in zip(a.per_axis, b.per_axis, strict=True)
    )
    same = a.const is not None and a.const == b.const
    return LocalValue(
        given,
        const=a.const if same else None,
        literal=a.literal and b.literal,
        position=a.position if a.position == b.position else None,
    )


def joined(values: Sequence[LocalValue], node: Node) -> LocalValue:
    """A value that is one of several, with the readings of all."""
    first, *rest = values
    for v in rest:
        first = join(first, v, node)
    return first


def _join(
    x: Distribution, y: Distribution, a: LocalValue, b: LocalValue, node: Node
) -> Distribution:
    if x.unknown or y.unknown:
        return replace(unsure((x, y)), rewritten=x.rewritten or y.rewritten)
    if x.fault or y.fault:
        return x if x.fault else y
    excess = y.excess if a.zero else x.excess if b.zero or x.excess == y.excess else None
    atoms = x.atoms & y.atoms
    doubt, twice = x.doubt or y.doubt, x.twice or y.twice
    under = x.under if x.under is not None else y.under
    made, reduced, cause = x.made or y.made, x.reduced or y.reduced, x.cause or y.cause
    if atoms:
        if (
            excess is None
            and None not in (x.excess, y.excess)
            and cause
            and not any(isinstance(t, Split) for t in atoms)
        ):
            return faulty(cause)  # each iteration multiplies by the axis size
        return Distribution(
            atoms,
            excess,
            None,
            made,
            reduced,
            cause,
            x.blocks or y.blocks,
            doubt=doubt,
            twice=twice,
            under=under,
        )
    for p, w in ((x, y), (y, x)):
        if p.partial == P and B in w.atoms:
            if p.excess is not None and w.excess is not None and p.excess != w.excess + 1:
                return faulty(Fault("added", node, p.made))
            return Distribution(
                p.atoms, p.excess, None, made, reduced, cause, doubt=doubt, twice=twice
            )
    return UNKNOWN


# ---- communication ------------------------------------------------------------------------------
# The result of a collective, on the mesh axes that it runs over and on the others.


def collective(state: State, node: Node, ins: Sequence[LocalValue]) -> list[LocalValue]:
    """The results of a collective, or of another operation that names mesh axes."""
    over = state.axes_of(names_of(node))
    if node.op == AXIS_INDEX:
        position = index_of_device(state, node)
        every = range(len(state.sizes))
        per_axis = tuple(UNKNOWN if k in over else WHOLE for k in every)
        return [LocalValue(per_axis, position=position)]
    kind = KINDS.get(node.op)
    act = None if kind is None else _ACTS[kind]
    if act is None or node.params.get("axis_index_groups") is not None:
        state.enter(Doubt(node, "groups" if act else "collective", "warning"))
        return [LocalValue((UNKNOWN,) * len(state.sizes)) for _ in node.outputs]
    return [
        _one(state, node, v, state.graph.aval(o).shape, over, act)
        for v, o in zip(ins, node.inputs, strict=True)
    ]


Act = Callable[[State, Node, LocalValue, int, Sequence[int]], Distribution]


def _one(
    state: State, node: Node, v: LocalValue, shape: Sequence[int], over: Sequence[int], act: Act
) -> LocalValue:
    per_axis = [
        _with_sources(node, h, act(state, node, v, k, shape))
        if k in over
        else _beside(node, h, len(shape), over)
        for k, h in enumerate(v.per_axis)
    ]
    const = None
    if v.const is not None and v.literal and node.op in REDUCTIONS:
        const = (
            v.const * math.prod(state.sizes[k] for k in over)
            if REDUCTIONS[node.op] == "sum"
            else v.const
        )
    counted = node.op in SUMS
    return LocalValue(
        tuple(per_axis),
        const,
        v.literal,
        v.lengths if counted else (),
        v.added if counted else None,
    )


def _with_sources(node: Node, before: Distribution, after: Distribution) -> Distribution:
    """The result of a collective with the split operands of the region that it depends on."""
    match KINDS[node.op]:
        case "exchange":
            return exchanged(node, before, after)
        case "reduce" | "gathering" | "broadcast":
            return replace(after, sources=frozenset(), away=None)
        case "scattering" | "permute":
            back = before.away.sources if before.away else frozenset[int]()
            away = before.away if KINDS[node.op] == "permute" else None
            return replace(after, sources=before.sources | back, away=away)


# ---- reductions ---------------------------------------------------------------------------------


def _reduced(
    state: State, node: Node, v: LocalValue, axis: int, shape: Sequence[int]
) -> Distribution:
    """All-reduce by the sum, the maximum or the minimum."""
    h, monoid = v.per_axis[axis], REDUCTIONS.get(node.op, "sum")
    if h.tag == "log-sum-exp" and monoid == "max":
        return replace(WHOLE, excess=None, reduced=node)  # as good a shift as the maximum of all
    if h.fault:
        state.report(h.fault, axis, node)
        return replace(WHOLE, excess=None, reduced=node)
    wrong = h.copies or h.rewritten
    if wrong and monoid == "sum":
        state.report(wrong, axis, node)
        return replace(WHOLE, excess=None, reduced=node)
    if h.doubt:
        state.enter(h.doubt)
    if h.tag == "looked-up" and h.made and monoid == "sum" and not fills_with_zero(h.made):
        state.report(Fault("unmasked", h.made), axis, node)
    if h.unknown:
        return replace(WHOLE, excess=None, reduced=node)
    partial = h.partial
    if partial is not None:
        if h.tag in ("finite", "test") and monoid == "sum":  # on how many devices it is so
            if h.tag == "test":
                state.enter(Doubt(node, "counts-tests"))
            return replace(WHOLE, excess=None, reduced=node)
        if partial == P and h.excess == 1 and monoid in ("max", "min"):
            state.enter(Doubt(node, "compares-means"))
            return replace(WHOLE, excess=None, reduced=node)
        if partial.monoid != monoid:
            state.report(Fault("monoid", node, h.made, 0, (partial,)), axis, node)
            return replace(WHOLE, excess=None, reduced=node)
        cause = replace(h.cause, made=node) if h.cause and h.excess else None
        return Distribution(frozenset({B}), h.excess, made=h.made, reduced=node, cause=cause)
    if B not in h.atoms:  # the shards of a split value, added element by element
        if not node.backward:
            state.enter(Doubt(node, "joins-shards", atoms=h.readings))
        return replace(WHOLE, excess=None, reduced=node, blocks=node)
    if monoid != "sum" or v.zero:
        return replace(h, atoms=frozenset({B}), reduced=h.reduced or node)
    return _counted(node, v, h)


def _counted(node: Node, v: LocalValue, h: Distribution) -> Distribution:
    """The sum of n equal parts, which is n times the value. The sum of a literal counts devices,
    except in a gradient, where the literal is a cotangent."""
    if v.literal and not node.backward:
        return replace(WHOLE, excess=h.excess, reduced=node)
    excess = None if h.excess is None or h.share else h.excess + 1
    cause = Fault("pending" if v.literal else "doubled", node, h.reduced)
    return Distribution(
        frozenset({B}), excess, reduced=h.reduced or node, cause=cause if excess else None
    )


def _scattered(
    state: State, node: Node, v: LocalValue, axis: int, shape: Sequence[int]
) -> Distribution:
    dim, tiled = node.params["scatter_dimension"], node.params["tiled"]
    if v.per_axis[axis].split:
        return UNKNOWN
    whole = _reduced(state, node, v, axis, shape)
    if not tiled:
        return replace(whole, atoms=frozenset())
    return replace(whole, atoms=frozenset({Split(dim)}), under=_outside(state, node, v, axis, dim))


def _outside(state: State, node: Node, v: LocalValue, axis: int, dim: int) -> frozenset[int]:
    """The mesh axes outside of `axis` that split a dim of a collective's result."""
    over = state.axes_of(names_of(node))
    before = {k for k, h in enumerate(v.per_axis) if Split(dim) in h.atoms and k not in over}
    return frozenset(before | set(over[: over.index(axis)]))


# ---- movements ----------------------------------------------------------------------------------


def _gathered(
    state: State, node: Node, v: LocalValue, axis: int, shape: Sequence[int]
) -> Distribution:
    """All-gather: the concatenated shards of a split value; without tiling, the devices' parts
    stacked along a new dim."""
    h, dim = v.per_axis[axis], node.params["all_gather_dimension"]
    if not node.params["tiled"] and (h.fault or h.partial):
        return replace(WHOLE, excess=None, stack=(dim, h))  # the parts side by side
    if not node.params["tiled"] or h.unknown:
        return replace(WHOLE, excess=h.excess, cause=h.cause, reduced=h.reduced)
    if Split(dim) in h.atoms:
        over = state.axes_of(names_of(node))
        if h.under is not None and h.under & set(over) != frozenset(over[: over.index(axis)]):
            return faulty(Fault("order", node, None, dim))
        return replace(h, atoms=frozenset({B}), under=None)
    if h.fault and h.fault.kind == "local" and h.fault.candidates == dim:
        return replace(WHOLE, doubt=Doubt(node, "candidates"), reduced=node)
    if shape[dim] == 1:
        return replace(WHOLE, excess=None)
    if h.fault:
        return h
    if h.split:
        return faulty(Fault("wrong-gather", node, h.made, dim, h.readings))
    if h.partial:
        return faulty(Fault("partial-as-split", node, h.made, dim, h.readings))
    return faulty(Fault("copies", node, h.reduced, dim))


def _exchanged(
    state: State, node: Node, v: LocalValue, axis: int, shape: Sequence[int]
) -> Distribution:
    h, split, concat = v.per_axis[axis], node.params["split_axis"], node.params["concat_axis"]
    if h.fault and h.fault.kind == "copies":
        there = h.fault.node.params
        if (split, concat) != (there["concat_axis"], there["split_axis"]) or not node.params[
            "tiled"
        ]:
            return h
        doubt = Doubt(h.fault.node, "copies-back", lasting=True)
        return replace(WHOLE, copies=h.fault, doubt=doubt)
    if h.unknown or h.fault:
        return UNKNOWN  # what each device found for each other one
    if Split(concat) in h.atoms and split != concat and node.params["tiled"]:
        return replace(
            h, atoms=frozenset({Split(split)}), under=_outside(state, node, v, axis, split)
        )
    if B in h.atoms and not v.literal:
        return faulty(Fault("copies", node, h.reduced, concat))
    return UNKNOWN


def _permuted(
    state: State, node: Node, v: LocalValue, axis: int, shape: Sequence[int]
) -> Distribution:
    h = v.per_axis[axis]
    everyone = len({target for _, target in node.params["perm"]}) == math.prod(
        state.sizes[k] for k in state.axes_of(names_of(node))
    )
    block = h.fault is not None and h.fault.kind == "own-block"  # a reduce-scatter in a ring
    keeps = everyone and not block and (h.fault or B in h.atoms or h.partial)
    return (
        replace(h, atoms=frozenset(a for a in h.atoms if not isinstance(a, Split)))
        if keeps
        else UNKNOWN
    )


def _same_everywhere(
    state: State, node: Node, v: LocalValue, axis: int, shape: Sequence[int]
) -> Distribution:
    return replace(WHOLE, excess=None)


def _beside(node: Node, h: Distribution, rank: int, over: Sequence[int]) -> Distribution:
    """The result on a mesh axis that the collective does not run over."""
    if (
        REDUCTIONS.get(node.op, "sum") != "sum"
        and isinstance(h.partial, Unreduced)
        and h.partial.monoid != REDUCTIONS[node.op]
    ):
        return faulty(Fault("nonlinear", node, h.made, 0, (h.partial,)))
    moved = _moved_dims(node, rank)
    atoms: set[Atom] = set()
    for a in h.atoms:
        if not isinstance(a, Split):
            atoms.add(a)
        elif moved[a.dim] is not None:
            atoms.add(Split(moved[a.dim] or 0))
    doubt = h.doubt
    if (
        KINDS[node.op] == "gathering"
        and h.split == Split(node.params["all_gather_dimension"])
        and (h.under or frozenset()) & set(over)
    ):
        doubt = doubt or Doubt(node, "gathered-inside-out")
    return replace(
        h, atoms=frozenset(atoms), excess=h.excess if atoms or h.fault else None, doubt=doubt
    )


def _moved_dims(node: Node, rank: int) -> list[int | None]:
    """The position in the result of each dim of the operand; None for a dim that the collective
    removes or whose elements it reorders."""
    dims: list[int | None] = list(range(rank))
    p = node.params
    match KINDS[node.op]:
        case "gathering" if not p["tiled"]:
            return [d + (d >= p["all_gather_dimension"]) for d in range(rank)]
        case "scattering" if not p["tiled"]:
            return [
                None if d == p["scatter_dimension"] else d - (d > p["scatter_dimension"])
                for d in range(rank)
            ]
        case "exchange" if p["tiled"]:
            return [None if d in (p["split_axis"], p["concat_axis"]) else d for d in range(rank)]
        case "exchange":
            rest = [d for d in range(rank) if d != p["split_axis"]]
            rest.insert(p["concat_axis"], p["split_axis"])
            return [None if d == p["split_axis"] else rest.index(d) for d in range(rank)]
        case _:
            return dims


_ACTS: dict[Collective, Act] = {
    "reduce": _reduced,
    "scattering": _scattered,
    "gathering": _gathered,
    "exchange": _exchanged,
    "permute": _permuted,
    "broadcast": _same_everywhere,
}
"""For each kind of collective, the function that types its result on the mesh axes it runs over."""


# ---- bodies -------------------------------------------------------------------------------------


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
