"""The typing: the chosen type of every value and the chosen row of every node; and its certificate.

The options of a decision are the rows of a node, or the types of a value that no row makes. The
chooser takes one of them, and the certificate checks that it did.
"""

import functools
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from sbp.errors import SbpInternalError
from sbp.infer.constraints import (
    Constraint,
    PinConstraint,
    ReadConstraint,
    System,
    constraints_of,
)
from sbp.infer.cost import allowed_rows
from sbp.infer.flow import Decision, End, Flow, Place, Sums
from sbp.infer.pins import pinned_codes
from sbp.infer.request import Request
from sbp.infer.rows import AxisRow, Choice, NdRow
from sbp.infer.space import (
    INFINITE,
    Code,
    Codes,
    Kept,
    TypeSpace,
    all_needs_of,
    decode,
    is_even,
    kept_codes,
    needs_of,
    stack,
    to_type,
)
from sbp.machine.mesh import MeshSpec
from sbp.trace.graph import Graph, Node
from sbp.types import NdSbp

OPTIMAL_GAP = 1e-6
"""Gap, as a share of the cost, up to which a typing counts as proved cheapest, and two plans as
equally cheap. Rounding and `choose.DEFERRAL` may leave a gap of that size."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Typing:
    """A program with types.

    Arguments:
      request: the program as it was traced, with its mesh, demand, policies and limits.
      graph: the program that has these types: the graph of the request, or the graph that
        `plan.saving` made from it.
      values: the type in which each value is made, in codes.
      rows: for each node id, the types in which it takes its operands and gives its results, nodes
          with regions included.
      region_outputs: for (node id, region), the types in which the region returns its results.
      outputs: the types in which the program returns its results.
      sums: the values with a `reduce_dtype`, and that dtype.
      seconds: the modelled seconds of the program.
      lower_bound: seconds. No typing takes fewer in the model.
      saved_seconds: the modelled seconds of the conversions that `plan.saving` removed; `seconds`
        includes them.
      bounds_reuse: whether `lower_bound` bounds `seconds - saved_seconds`; otherwise it bounds
        `seconds`.
    """

    request: Request
    graph: Graph
    values: dict[int, Codes] = field(repr=False)
    rows: dict[int, NdRow] = field(repr=False)
    region_outputs: dict[tuple[int, int], tuple[Codes, ...]] = field(repr=False)
    outputs: tuple[Codes, ...]
    seconds: float
    lower_bound: float
    saved_seconds: float = 0.0
    bounds_reuse: bool = True
    sums: Sums = field(default_factory=dict, repr=False)

    @property
    def mesh(self) -> MeshSpec:
        """The mesh."""
        return self.request.mesh

    @functools.cached_property
    def graph_request(self) -> Request:
        """The request with `graph` as its program, for the rules and rows of its nodes."""
        own, graph = self.request, self.graph
        return own if graph is own.graph else replace(own, graph=graph, given_sums=self.sums)

    def choice(self, decision: Decision) -> Choice:
        """The row or type of a decision."""
        kind, key, *_ = decision.place
        return self.rows[key] if kind == "row" else self.codes_at(decision.place)

    def codes_at(self, place: Place) -> Codes:
        """The type that is stored at a place.

        Raises:
          SbpInternalError: for a row, which is more than one type.
        """
        match place:
            case "operand", node_id, operand:
                return self.rows[node_id].ins[operand]
            case "value", value:
                return self.values[value]
            case "result", node_id, region, output:
                return self.region_outputs[node_id, region][output]
            case "output", position:
                return self.outputs[position]
            case _:
                raise SbpInternalError(f"{place} is not one type")

    def type_of(self, value: int) -> NdSbp:
        """The ND type of a value."""
        return to_type(self.values[value], self.mesh)

    @property
    def gap(self) -> float:
        """The distance of the typing from the lower bound, as a share of its cost; 0 is optimal in
        the model."""
        seconds = self.seconds - self.saved_seconds if self.bounds_reuse else self.seconds
        return max(0.0, (seconds - self.lower_bound) / seconds) if seconds > 0 else 0.0

    @property
    def optimal(self) -> bool:
        """Whether the bound proves that no typing is cheaper in the model."""
        return self.gap <= OPTIMAL_GAP


# ---- options of a decision -----------------------------------------------------------------------


@dataclass(frozen=True, slots=True, eq=False)
class Window:
    """Some typings of a program: any types on the mesh axes in `free`, and the types of one typing
    on the other axes.

    Arguments:
      free: positions of mesh axes.
      like: a typing of the program; None for B wherever that is possible.
    """

    free: tuple[int, ...]
    like: Typing | None

    def row(self, node: Node, axes: int) -> tuple[AxisRow | None, ...]:
        """The row of a node on each of the mesh axes, None where they are free."""
        whole = NdRow.whole(len(node.inputs), len(node.outputs), axes)
        return (self.like.rows[node.id] if self.like else whole).by_axis(self.free)

    def codes(self, decision: Decision, pinned: tuple[int | None, ...]) -> tuple[Code | None, ...]:
        """The code of a decision on a type on each mesh axis, None where they are free.

        Arguments:
          decision: the decision.
          pinned: the code that a pin asks on each mesh axis, None for none.
        """
        have = pinned if self.like is None else self.like.codes_at(decision.place)
        return tuple(None if k in self.free else c or 0 for k, c in enumerate(have))


class Options:
    """The options of a program's decisions.

    Arguments:
      request: the program with its mesh, demand, policies and limits.
      window: the typings that are considered; None for all.
    """

    def __init__(self, request: Request, window: Window | None = None) -> None:
        self.request, self.sizes, self.window = request, request.mesh.sizes, window
        # Asked for once: to find them hashes the whole mesh.
        self.spaces, self.native = request.spaces, request.native

    def types(self, decision: Decision) -> tuple[Codes, ...]:
        """The types of a decision on a value."""
        if decision.kind == "predicate":
            return ((0,) * len(self.sizes),)
        wanted = self._pinned_codes(decision)
        codes = self.window.codes(decision, wanted) if self.window else (None,) * len(wanted)
        kept = tuple(None if c is None else frozenset((c,)) for c in codes)
        return tuple(
            t
            for t in self._space(decision, wanted, kept).types
            if all(want in (None, c) for want, c in zip(codes, t, strict=True))
            and self._fits(decision, wanted, t)
        )

    def rows(self, node: Node) -> tuple[NdRow, ...]:
        """The rows of a node, also rows that its rules forbid."""
        window = self.window
        return self.request.rows_of(node, window.row(node, len(self.sizes)) if window else ())

    def has(self, decision: Decision, choice: Choice) -> bool:
        """Whether a choice is one of the options of a decision. Rows that the policies or budgets
        forbid are none."""
        if isinstance(choice, NdRow):
            node, request = decision.node, self.request
            assert node is not None
            rules = request.rules(node, in_loop=decision.in_loop)
            return choice in request.rows_of(node, choice.by_axis()) and bool(
                allowed_rows(request.graph, node, (choice,), rules, request.mesh)
            )
        if decision.kind == "predicate":
            return choice in self.types(decision)
        wanted = self._pinned_codes(decision)
        space = self._space(decision, wanted, kept_codes([choice]))
        return choice in space.index and self._fits(decision, wanted, choice)

    def _pinned_codes(self, decision: Decision) -> tuple[int | None, ...]:
        """The code that a pin asks on each mesh axis; None where the axis is free."""
        demand, free = self.request.demand, (None,) * len(self.sizes)
        match decision.kind:
            case "input":
                return demand.inputs[decision.position] or free
            case "output":
                return demand.outputs[decision.position] or free
            case "annotation" if decision.node and (pin := decision.node.params["pin"]):
                return pinned_codes(pin, self.request.mesh)
            case _:
                return free

    def _space(self, decision: Decision, wanted: tuple[int | None, ...], kept: Kept) -> TypeSpace:
        """The types of the value of a decision, with the pinned ones among them."""
        pinned = tuple(c or 0 for c in wanted)
        forced, partial = needs_of(decision.aval.shape, (pinned,), self.sizes)
        monoids = decision.monoids(self.native) | partial
        return self.spaces.of(decision.aval, monoids, forced, kept=kept)

    def _fits(self, decision: Decision, wanted: tuple[int | None, ...], codes: Codes) -> bool:
        """Whether a type agrees with the pin of a decision. On a free axis an input or output has
        an even split unless it is held padded, and it is partial only where pinned."""
        node, boundary = decision.node, decision.at_boundary
        pin = node.params["pin"] if node and decision.kind == "annotation" else None
        whole = pin.whole if pin else ()
        return all(
            c == want if want is not None else c - 1 not in whole and not (boundary and c < 0)
            for c, want in zip(codes, wanted, strict=True)
        ) and (
            not boundary
            or is_even(decision.aval.shape, codes, self.sizes)
            or (
                self.request.demand.is_padded(decision.kind, decision.position)
                and 0 not in decision.aval.shape
            )
        )


def typing_fields(flow: Flow, choices: Sequence[Choice]) -> dict[str, Any]:
    """The fields of a `Typing` that follow from its decisions.

    Arguments:
      flow: the decisions of the program.
      choices: one for each decision.
    """

    at = functools.partial(_type_at, choices)
    values = {value: at(end) for value, end in flow.makers.items()}
    rows = {
        d.node.id: chosen
        for d, chosen in zip(flow.decisions, choices, strict=True)
        if isinstance(chosen, NdRow) and d.node is not None
    }
    reads = flow.reads()
    for node in flow.graph.walk():
        if node.id not in rows:
            ins = tuple(at(reads["operand", node.id, i].end) for i in range(len(node.inputs)))
            rows[node.id] = NdRow(ins, tuple(values[v] for v in node.outputs))
    return {
        "values": values,
        "rows": rows,
        "region_outputs": {
            (node.id, number): tuple(
                at(reads["result", node.id, number, k].end) for k in range(len(region.outputs))
            )
            for node in flow.graph.walk()
            for number, region in enumerate(node.regions)
        },
        "outputs": tuple(at(e.end) for e in flow.edges if e.kind == "output"),
    }


def _type_at(choices: Sequence[Choice], end: End) -> Codes:
    """The type of an end under the choice of each decision."""
    chosen = choices[end.variable]
    return (
        chosen.at(end.column)
        if isinstance(chosen, NdRow)
        else stack(chosen)
        if end.column
        else chosen
    )


# ---- certificate ---------------------------------------------------------------------------------
# All constraints are evaluated on a typing, without the chooser and without costs: each constraint
# on each mesh axis, each decision and each conversion over all mesh axes. The certificate reads the
# same decisions, options and edges as the chooser. `plan.verify` checks the plan without these.


def certify(typing: Typing, systems: tuple[System, ...] | None = None) -> None:
    """Evaluates every constraint on a typing: each node has one of its rows, each conversion is
    allowed, each pinned value has its type.

    Arguments:
      typing: the types.
      systems: the constraints of their program, by mesh axis, where several typings of it are
        certified; None to write them down.

    Raises:
      SbpInternalError: names the first constraint that the typing breaks.
    """
    request = typing.graph_request
    systems = constraints_of(request) if systems is None else systems
    assert all(s.request is request for s in systems), "constraints of another request"
    states = [
        [
            _state_of(d, states, typing, s.position)
            for d, states in zip(request.flow.decisions, s.states, strict=True)
        ]
        for s in systems
    ]
    for system, have in zip(systems, states, strict=True):
        for constraint in system.constraints:
            _certify_constraint(system, constraint, have)
    _certify_options(typing, request)
    if systems:
        _certify_boxing(typing, systems[0])


def _certify_constraint(
    system: System, constraint: Constraint, have: list[tuple[Code, ...] | None]
) -> None:
    """Checks one constraint on one mesh axis.

    Arguments:
      system: the constraints of the axis.
      constraint: one of them.
      have: the state of each variable.

    Raises:
      SbpInternalError: when the states break it.
    """
    if isinstance(constraint, PinConstraint):
        for end in constraint.fixed:
            if _code(have, end) != constraint.code:
                raise _violation(system, constraint, f"it is {_text(_code(have, end))}")
    elif isinstance(constraint, ReadConstraint) and not constraint.unless:
        source, target = _code(have, constraint.source), _code(have, constraint.because.end)
        aval = system.request.graph.avals[constraint.value]
        if (
            source is None
            or target is None
            or not system.conversions.allows(source, target, aval, constraint.rules)
        ):
            raise _violation(
                system, constraint, f"it is made as {_text(source)} and read as {_text(target)}"
            )


def _certify_options(typing: Typing, request: Request) -> None:
    """Checks that each decision has one of its options over all mesh axes. The options of an inner
    axis depend on the shapes that the outer axes leave.

    Raises:
      SbpInternalError: names the first decision with another row or type.
    """
    options = Options(request)
    for decision in request.flow.decisions:
        choice, node = typing.choice(decision), decision.node
        if not options.has(decision, choice):
            what = f"{decision.kind} {decision.position + 1}" if node is None else node.op
            where = f" at {node.span}" if node and node.span else ""
            given = (
                f"a row that it does not have: {choice.ins} -> {choice.outs}"
                if isinstance(choice, NdRow)
                else f"a type that it does not have: {choice}"
            )
            raise SbpInternalError(f"the chosen typing gives {what}{where} {given}")


def _certify_boxing(typing: Typing, system: System) -> None:
    """Checks each conversion over all mesh axes together: a step may split or join a dim on one
    axis only while no inner axis splits the same dim.

    Arguments:
      typing: the typing.
      system: its constraints on the first mesh axis, with all conversions.

    Raises:
      SbpInternalError: names the first conversion that has no path.
    """
    request, seen = typing.request, dict[tuple[Any, ...], bool]()
    choices = [typing.choice(decision) for decision in typing.graph_request.flow.decisions]
    for read in system.constraints:
        if isinstance(read, ReadConstraint) and not (read.rules.unlimited or read.unless):
            source, target = ends = [_type_at(choices, e) for e in (read.source, read.because.end)]
            aval = typing.graph.avals[read.value]
            key = (aval.shape, source, target, read.rules)
            if source != target and key not in seen:
                forced, monoids = all_needs_of(ends)
                space = request.spaces.of(aval, monoids, forced, kept=request.kept(ends))
                at = space.index[source], space.index[target]
                seen[key] = bool(space.seconds(read.rules)[at] < INFINITE)
            if not seen.get(key, True):
                raise _violation(system, read, f"made as {[*source]}, read as {[*target]}")


def _state_of(
    decision: Decision, states: Sequence[tuple[Code, ...]], typing: Typing, position: int
) -> tuple[Code, ...] | None:
    """The state of a decision on one mesh axis under a typing; None when it has no such state
    there."""
    choice = typing.choice(decision)
    if isinstance(choice, NdRow):
        codes = tuple(t[position] for t in (*choice.ins, *choice.outs))
        return codes if codes in states else None
    return next((s for s in states if s[0] == choice[position]), None)


def _code(states: list[tuple[Code, ...] | None], end: End) -> Code | None:
    state = states[end.variable]
    return None if state is None else state[end.column]


def _text(code: Code | None) -> str:
    return "no atom" if code is None else repr(decode(code))


def _violation(system: System, constraint: Constraint, found: str) -> SbpInternalError:
    span = constraint.because.span
    where = f" at {span}" if span else ""
    return SbpInternalError(
        f"the chosen typing breaks a constraint on mesh axis `{system.mesh_axis}`:"
        f" {constraint.because.text}{where}, but {found}"
    )
