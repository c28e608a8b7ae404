"""The choice of types as costs: one variable per node (its row) and per shared value (its type),
boxing costs between them.

A value with one reader needs no variable of its own: the pair (maker, reader) carries the boxing. A
value with several readers has a variable for the type it is brought into *once*; readers take it
from there. Types of loop carries and of region inputs are variables too, so a carry is typed by the
optimum over all iterations and loop-invariant boxing moves out of the loop by itself.
"""

from __future__ import annotations

import dataclasses
import math
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from sbp import _jax
from sbp.annotations import Pin
from sbp.errors import SbpInternalError
from sbp.infer.accumulation import float32_sums
from sbp.infer.cost import row_seconds, undominated
from sbp.infer.policy import Rules, detour
from sbp.infer.request import Request
from sbp.infer.rows import EMPTY, NdRow, row_sends
from sbp.infer.space import Codes, TypeSpace, from_type, is_even, stack
from sbp.infer.typing import Typing
from sbp.limits import POLICIES
from sbp.machine.mesh import MeshSpec
from sbp.solve.axes import solve_axes
from sbp.solve.costgraph import CostGraph
from sbp.trace.graph import Constant, Graph, Node
from sbp.trace.regions import WHILE_TRIPS
from sbp.types import MONOIDS

DEFERRAL = 1e-12
"""Seconds by which a row that carries a partial on is preferred to one that wants it reduced."""


@dataclass(frozen=True, slots=True)
class _End:
    """One end of a value: who makes or reads it, and which conversions a reader allows. Codes has
    one type per state of the variable."""

    variable: int
    codes: tuple[Codes, ...]
    weight: float = 1.0
    rules: Rules | None = None


@dataclass(slots=True)
class Problem:
    """The costs of a program's typings, ready for the solver.

    Arguments:
      request: the program, and what its types are chosen by.
      byte_price: seconds charged per byte held by inputs, outputs and `held`, to meet a memory
          limit.
      held: values that are live when memory is fullest, and those of them that are live as another
          type than they were made in.
      shares: for values that are made more than once: the share of a conversion's time that is
        charged where it exceeds what it takes to keep the result of the first one (`plan.saving`).
        The typing's seconds have all of it.
    """

    request: Request
    byte_price: float = 0.0
    held: frozenset[tuple[int, bool]] = frozenset()
    shares: Mapping[int, float] = field(default_factory=dict)
    _float32: frozenset[int] = field(init=False)
    costs: CostGraph = field(default_factory=CostGraph)
    native: Mapping[int, frozenset[str]] = field(default_factory=dict)
    makers: dict[int, _End] = field(default_factory=dict)
    readers: dict[int, list[_End]] = field(default_factory=lambda: defaultdict(list))
    node_rows: dict[int, tuple[int, tuple[NdRow, ...]]] = field(default_factory=dict)
    barriers: dict[int, list[tuple[int, tuple[Codes, ...]]]] = field(default_factory=dict)
    returned: dict[tuple[int, int], list[_End | None]] = field(default_factory=dict)
    program_outputs: list[_End | None] = field(default_factory=list)
    typed: dict[int, tuple[Codes, ...]] = field(default_factory=dict)
    charged: dict[int, np.ndarray] = field(default_factory=dict)
    waived: list[tuple[int, int, np.ndarray]] = field(default_factory=list)
    _row_costs: dict[Any, tuple[tuple[NdRow, ...], np.ndarray, Any]] = field(default_factory=dict)
    _loops: int = 0

    @property
    def graph(self) -> Graph:
        """The program."""
        return self.request.graph

    @property
    def mesh(self) -> MeshSpec:
        """The mesh."""
        return self.request.mesh

    def build(self) -> None:
        """Fills `costs`."""
        self.native = self.request.native
        self._float32 = float32_sums(self.graph, self.request.reduce_dtype, self._carried)
        for value, wanted in zip(self.graph.inputs, self.request.demand.inputs, strict=True):
            types = self._boundary_types(self.graph.avals[value], wanted)
            self.makers[value] = self._value_end(value, types, price=True)
        self._visit(self.graph, 1.0)
        self._bind_outputs()
        self._price_held()
        self._connect()

    # ---- ends -----------------------------------------------------------------------------------

    def _space(
        self,
        aval: Any,
        monoids: frozenset[str],
        codes: Sequence[Codes] = (),
        float32: bool = False,
    ) -> TypeSpace:
        forced = set()
        for t in codes:
            for position, c in enumerate(t):
                if c > 0 and _small(aval.shape, t, self.mesh.sizes, c):
                    forced.add((position, c - 1))
        if any(c < 0 for t in codes for c in t):
            monoids = monoids | {MONOIDS[-1 - c] for t in codes for c in t if c < 0}
        return self.request.spaces.of(
            tuple(aval.shape), _jax.itemsize(aval.dtype), monoids, frozenset(forced), float32
        )

    def _boundary_types(
        self, aval: Any, wanted: tuple[int | None, ...] | None
    ) -> tuple[Codes, ...]:
        """Types an input or output may have: even ones, partial only where asked for."""
        wanted = wanted or (None,) * len(self.mesh.sizes)
        pinned = tuple(0 if c is None else c for c in wanted)
        space = self._space(aval, EMPTY, (pinned,))
        return tuple(
            t
            for t in space.types
            if is_even(aval.shape, t, self.mesh.sizes)
            and all(
                (have >= 0) if want is None else have == want
                for have, want in zip(t, wanted, strict=True)
            )
        )

    def _value_end(
        self, value: int, types: tuple[Codes, ...], *, price: bool = False, weight: float = 1.0
    ) -> _End:
        end = _End(self._typed_variable(types), types, weight)
        if price:
            self._charge(end, self.graph.avals[value], EMPTY)
        return end

    def _charge(self, end: _End, aval: Any, monoids: frozenset[str], *, share: int = 1) -> None:
        """Charges what an end holds on a device; of `share` ends that hold it together, one's
        part."""
        if self.byte_price and end.codes:
            space = self._space(aval, monoids, sorted(set(end.codes)))
            costs = (
                self.byte_price
                / share
                * np.array([space.local_bytes[space.index[t]] for t in end.codes])
            )
            self.costs.add_unary(end.variable, costs)
            self.charged[end.variable] = self.charged.get(end.variable, 0.0) + costs

    def _typed_variable(self, types: tuple[Codes, ...]) -> int:
        """A variable whose states are types."""
        variable = self.costs.variable(np.zeros(len(types)))
        self.typed[variable] = types
        return variable

    def _free_end(self, value_aval: Any, monoids: frozenset[str]) -> tuple[int, tuple[Codes, ...]]:
        types = tuple(self._space(value_aval, monoids).types)
        return self._typed_variable(types), types

    def _read(self, operand: Any, end: _End) -> None:
        if isinstance(operand, Constant):
            return
        if operand in self.request.late and end.rules is not None:
            late = self.request.rules(None, value=operand, in_loop=self._loops > 0)
            end = dataclasses.replace(end, rules=Rules(end.rules.policies, late.bans))
        self.readers[operand].append(end)

    def _fixed(self, codes: Codes, weight: float, rules: Rules) -> _End:
        return _End(self._typed_variable((codes,)), (codes,), weight, rules)

    def _rules(self, node: Node | None, *, free: bool = False) -> Rules:
        """What may be converted for a reader that is visited now."""
        return self.request.rules(node, in_loop=self._loops > 0, free=free)

    # ---- nodes ----------------------------------------------------------------------------------

    def _visit(self, graph: Graph, weight: float) -> None:
        for node in graph.nodes:
            match node.op:
                case "scan":
                    self._scan(node, weight)
                case "while":
                    self._while(node, weight)
                case "cond":
                    self._cond(node, weight)
                case "sbp_annotate":
                    self._annotation(graph, node, weight)
                case "optimization_barrier":
                    self._barrier(graph, node, weight)
                case _:
                    self._node(graph, node, weight)

    def _carried(self, node: Node) -> Iterator[int]:
        """The operands of a node whose parts of a sum some row of it hands on."""
        if node.op in ("sbp_annotate", "optimization_barrier"):
            yield from range(len(node.inputs))
            return
        given = tuple(
            self.native.get(o, EMPTY) if isinstance(o, int) else EMPTY for o in node.inputs
        )
        ins = tuple(self.graph.aval(o) for o in node.inputs)
        outs = tuple(self.graph.avals[o] for o in node.outputs)
        rows = self.request.table.rows(node, ins, outs, given)
        yield from (k for k in range(len(ins)) if any(c < 0 for row in rows for c in row.ins[k]))

    def _node(self, graph: Graph, node: Node, weight: float) -> None:
        native = tuple(
            self.native.get(o, EMPTY) if isinstance(o, int) else EMPTY for o in node.inputs
        )
        ins = tuple(graph.aval(o) for o in node.inputs)
        outs = tuple(graph.avals[o] for o in node.outputs)
        rows, rules = self.request.table.rows(node, ins, outs, native), self._rules(node)
        float32 = tuple(o in self._float32 for o in (*node.inputs, *node.outputs))
        key = id(rows), node.op, rules, float32
        if key not in self._row_costs:
            every = rows
            if not rules.unlimited:
                rows = tuple(
                    r
                    for r in rows
                    if rules.allows_kernel(r.kernels)
                    and rules.allows_sent(row_sends(graph, node, r, self.mesh))
                )
            # Among equals, reductions wait: a row that carries a partial on is ahead by less than
            # any real cost.
            carries = np.array(
                [
                    any(c < 0 for t in r.ins for c in t) and any(c < 0 for t in r.outs for c in t)
                    for r in rows
                ]
            )
            seconds = (
                np.array([row_seconds(graph, node, r, self.mesh) for r in rows])
                - DEFERRAL * carries
            )
            kept = undominated(
                rows, seconds, (*ins, *outs), float32, self.request.spaces, self.request.strictest
            )
            self._row_costs[key] = (
                tuple(r for r, k in zip(rows, kept, strict=True) if k),
                seconds[kept],
                every,
            )  # kept alive for its id
        rows, seconds, _ = self._row_costs[key]
        variable = self.costs.variable(weight * seconds)
        self.node_rows[node.id] = (variable, rows)
        for i, operand in enumerate(node.inputs):
            self._read(operand, _End(variable, tuple(r.ins[i] for r in rows), weight, rules))
        for i, value in enumerate(node.outputs):
            self.makers[value] = _End(variable, tuple(r.outs[i] for r in rows), weight)

    def _annotation(self, graph: Graph, node: Node, weight: float) -> None:
        aval = graph.avals[node.outputs[0]]
        pin: Pin | None = node.params["pin"]
        native = self.native.get(node.outputs[0], EMPTY)
        if pin is None:
            types = tuple(self._space(aval, native).types)
        else:
            wanted = pinned_codes(pin, self.mesh)
            filled = tuple(0 if c is None else c for c in wanted)
            space = self._space(aval, native, (filled,))
            types = tuple(
                t
                for t in space.types
                if all(w is None or w == c for w, c in zip(wanted, t, strict=True))
            )
        rows = tuple(NdRow((t,), (t,)) for t in types)
        variable = self.costs.variable(np.zeros(len(rows)))
        self.node_rows[node.id] = (variable, rows)
        self._read(node.inputs[0], _End(variable, types, weight, self._rules(node, free=True)))
        self.makers[node.outputs[0]] = _End(variable, types, weight)

    def _barrier(self, graph: Graph, node: Node, weight: float) -> None:
        pairs = []
        for operand, value in zip(node.inputs, node.outputs, strict=True):
            variable, types = self._free_end(graph.avals[value], self.native.get(value, EMPTY))
            self._read(operand, _End(variable, types, weight, self._rules(node)))
            self.makers[value] = _End(variable, types, weight)
            pairs.append((variable, types))
        self.barriers[node.id] = pairs

    # ---- regions --------------------------------------------------------------------------------

    def _scan(self, node: Node, weight: float) -> None:
        (body,) = node.regions
        consts, carry = node.params["num_consts"], node.params["num_carry"]
        inner = weight * max(1, int(node.params["length"]))
        for position, (operand, value) in enumerate(zip(node.inputs, body.inputs, strict=True)):
            variable, types = self._free_end(self.graph.avals[value], self.native.get(value, EMPTY))
            self.makers[value] = _End(variable, types, inner)
            stacked = position >= consts + carry
            outer = tuple(stack(t) for t in types) if stacked else types
            self._read(operand, _End(variable, outer, weight, self._rules(node)))
            if consts <= position < consts + carry:
                self.makers[node.outputs[position - consts]] = _End(variable, types, weight)
        self._loops += 1
        self._visit(body, inner)
        rules = self._rules(node)
        ends: list[_End | None] = []
        for position, operand in enumerate(body.outputs):
            if position < carry:
                entry = self.makers[body.inputs[consts + position]]
                end = _End(entry.variable, entry.codes, inner, rules)
            else:
                value = node.outputs[position]
                native = self.native.get(operand, EMPTY) if isinstance(operand, int) else EMPTY
                variable, types = self._free_end(body.aval(operand), native)
                end = _End(variable, types, inner, rules)
                self.makers[value] = _End(variable, tuple(stack(t) for t in types), weight)
            self._read(operand, end)
            ends.append(end)
        self._loops -= 1
        self.returned[node.id, 0] = ends

    def _while(self, node: Node, weight: float) -> None:
        cond, body = node.regions
        c, b = node.params["cond_nconsts"], node.params["body_nconsts"]
        inner = weight * WHILE_TRIPS
        for operand, value in zip(node.inputs[:c], cond.inputs[:c], strict=True):
            variable, types = self._free_end(self.graph.avals[value], EMPTY)
            self.makers[value] = _End(variable, types, inner)
            self._read(operand, _End(variable, types, weight, self._rules(node)))
        for operand, value in zip(node.inputs[c : c + b], body.inputs[:b], strict=True):
            variable, types = self._free_end(self.graph.avals[value], self.native.get(value, EMPTY))
            self.makers[value] = _End(variable, types, inner)
            self._read(operand, _End(variable, types, weight, self._rules(node)))
        carried = zip(
            node.inputs[c + b :], body.inputs[b:], cond.inputs[c:], node.outputs, strict=True
        )
        for operand, value, seen, result in carried:
            variable, types = self._free_end(self.graph.avals[value], self.native.get(value, EMPTY))
            self.makers[value] = _End(variable, types, inner)
            self.makers[seen] = _End(variable, types, inner)
            self.makers[result] = _End(variable, types, weight)
            self._read(operand, _End(variable, types, weight, self._rules(node)))
        self._loops += 1
        self._visit(cond, inner)
        self._visit(body, inner)
        rules = self._rules(node)
        predicate = self._fixed((0,) * len(self.mesh.sizes), inner, rules)
        self._read(cond.outputs[0], predicate)
        self.returned[node.id, 0] = [predicate]
        ends: list[_End | None] = []
        for position, operand in enumerate(body.outputs):
            entry = self.makers[body.inputs[b + position]]
            end = _End(entry.variable, entry.codes, inner, rules)
            self._read(operand, end)
            ends.append(end)
        self._loops -= 1
        self.returned[node.id, 1] = ends

    def _cond(self, node: Node, weight: float) -> None:
        index, *operands = node.inputs
        rules = self._rules(node)
        self._read(index, self._fixed((0,) * len(self.mesh.sizes), weight, rules))
        inner = weight / len(node.regions)
        for position, operand in enumerate(operands):
            native = EMPTY.union(
                *(self.native.get(r.inputs[position], EMPTY) for r in node.regions)
            )
            variable, types = self._free_end(
                self.graph.avals[node.regions[0].inputs[position]], native
            )
            for region in node.regions:
                self.makers[region.inputs[position]] = _End(variable, types, inner)
            self._read(operand, _End(variable, types, weight, rules))
        ends: list[_End | None] = []
        for value in node.outputs:
            variable, types = self._free_end(self.graph.avals[value], self.native.get(value, EMPTY))
            self.makers[value] = _End(variable, types, weight)
            ends.append(_End(variable, types, inner, rules))
        for number, region in enumerate(node.regions):
            self._visit(region, inner)
            for operand, end in zip(region.outputs, ends, strict=True):
                if end is not None:
                    self._read(operand, end)
            self.returned[node.id, number] = ends

    # ---- boundary and edges ---------------------------------------------------------------------

    def _bind_outputs(self) -> None:
        tied, rules = dict(self.request.demand.tied), self._rules(None, free=True)
        for position, (operand, wanted) in enumerate(
            zip(self.graph.outputs, self.request.demand.outputs, strict=True)
        ):
            if position in tied and wanted is None:
                entry = self.makers[self.graph.inputs[tied[position]]]
                end = _End(entry.variable, entry.codes, 1.0, rules)
            else:
                aval = self.graph.aval(operand)
                types = self._boundary_types(aval, wanted)
                end = _End(self._typed_variable(types), types, 1.0, rules)
                self._charge(end, aval, EMPTY)
            self._read(operand, end)
            self.program_outputs.append(end)

    def _price_held(self) -> None:
        """Charges what is live at the fullest moment: a value as it is made, or as its readers take
        it."""
        for value, converted in sorted(self.held):
            maker, readers = self.makers.get(value), self.readers.get(value, [])
            for end in readers if converted else (maker,) if maker is not None else ():
                self._charge(
                    end,
                    self.graph.avals[value],
                    self.native.get(value, EMPTY),
                    share=len(readers) if converted else 1,
                )

    def _connect(self) -> None:
        matrices: dict[Any, np.ndarray] = {}

        def boxing(
            space: TypeSpace,
            source: tuple[Codes, ...],
            target: tuple[Codes, ...],
            rules: Rules | None,
        ) -> np.ndarray:
            key = (id(space), source, target, rules)
            if key not in matrices:
                rows = np.array([space.index[t] for t in source], dtype=int)
                columns = np.array([space.index[t] for t in target], dtype=int)
                matrices[key] = space.seconds(rules)[np.ix_(rows, columns)]
            return matrices[key]

        for value, ends in self.readers.items():
            maker = self.makers.get(value)
            if maker is None:
                raise SbpInternalError(f"value {value} is read but not made")
            aval = self.graph.avals[value]
            every = {t for e in (maker, *ends) for t in e.codes}
            monoids = self.native.get(value, EMPTY)
            if self.request.budgets:
                monoids = detour(aval.dtype, monoids)
            space = self._space(aval, monoids, sorted(every), value in self._float32)
            groups: dict[Rules | None, list[_End]] = defaultdict(list)
            for end in ends:
                groups[end.rules].append(end)
            if len(ends) == 1:
                (end,) = ends
                costs = min(maker.weight, end.weight) * boxing(
                    space, maker.codes, end.codes, end.rules
                )
                self._convert(value, space, maker, end, costs)
                continue
            shared = tuple(t for t in space.types if t in every)
            copies: list[_End] = []
            for rules, group in sorted(groups.items(), key=lambda g: -_strictness(g[0])):
                # What was converted under strict rules is there for readers that allow more; not
                # the other way round.
                within = (
                    copy
                    for copy in reversed(copies)
                    if copy.rules is not None and (rules is None or copy.rules.within(rules))
                )
                source = next(within, maker)
                copy = _End(self._typed_variable(shared), shared, maker.weight, rules)
                copies.append(copy)
                self._convert(
                    value,
                    space,
                    source,
                    copy,
                    maker.weight * boxing(space, source.codes, shared, rules),
                )
                for end in group:
                    costs = min(maker.weight, end.weight) * boxing(space, shared, end.codes, rules)
                    self._convert(value, space, copy, end, costs)

    def _convert(
        self, value: int, space: TypeSpace, source: _End, end: _End, costs: np.ndarray
    ) -> None:
        """Charges the conversions of a value from one end to another, as far as its share goes."""
        share = self.shares.get(value)
        if share is not None:
            rate = self.mesh.hardware.hbm_bytes_per_second
            held = np.array([space.local_bytes[space.index[t]] for t in end.codes])
            kept = (
                2 * end.weight * held / rate if end.weight > 1 else 0.0
            )  # written by one loop, read by the other
            whole = np.array(
                [not any(c < 0 for c in t) for t in end.codes]
            )  # what is partial is not kept
            finite = np.where(np.isfinite(costs) & whole, costs, 0.0)
            waived = (1 - share) * (finite - np.minimum(finite, kept))
            self.waived.append((source.variable, end.variable, waived))
            costs = costs - waived
        self.costs.add_pair(source.variable, end.variable, costs)

    # ---- solution -------------------------------------------------------------------------------

    def solve(self, cutoff: float = math.inf) -> Typing | None:
        """The cheapest typing, or None when there is none under the policy; any dearer one when
        none takes `cutoff` seconds or less."""
        if any(len(u) == 0 for u in self.costs.unary):
            return None
        solution = solve_axes(self.costs, self._profiles(), len(self.mesh.sizes), cutoff)
        if solution is None:
            return None
        states = solution.states
        charged = sum(float(costs[states[variable]]) for variable, costs in self.charged.items())
        waived = sum(
            float(costs[states[source], states[end]]) for source, end, costs in self.waived
        )
        values = {v: e.codes[states[e.variable]] for v, e in self.makers.items()}
        rows = {n: found[states[variable]] for n, (variable, found) in self.node_rows.items()}
        for node_id, pairs in self.barriers.items():
            types = tuple(types[states[variable]] for variable, types in pairs)
            rows[node_id] = NdRow(types, types)
        returned = {
            key: tuple(e.codes[states[e.variable]] for e in ends if e is not None)
            for key, ends in self.returned.items()
        }
        for node in self.graph.walk():
            if node.regions:
                rows[node.id] = _region_row(node, values)
        outputs = tuple(e.codes[states[e.variable]] for e in self.program_outputs if e is not None)
        return Typing(
            request=self.request,
            graph=self.graph,
            values=values,
            rows=rows,
            region_outputs=returned,
            outputs=outputs,
            float32=self._float32,
            # Without what was charged for memory: no typing that holds as little is cheaper than
            # this bound.
            seconds=solution.cost - charged + waived,
            lower_bound=solution.lower_bound - charged,
        )

    def _profiles(self) -> list[np.ndarray]:
        """For each variable an array [state, axis] that tells apart what a state says on an axis; 0
        is all B."""
        profiles = [np.zeros((len(u), len(self.mesh.sizes)), dtype=int) for u in self.costs.unary]
        for variable, rows in self.node_rows.values():
            profiles[variable] = _profile([(*r.ins, *r.outs) for r in rows], len(self.mesh.sizes))
        for variable, types in self.typed.items():
            profiles[variable] = _profile([(t,) for t in types], len(self.mesh.sizes))
        return profiles


def _profile(states: Sequence[tuple[Codes, ...]], axes: int) -> np.ndarray:
    out = np.zeros((len(states), axes), dtype=int)
    for axis in range(axes):
        numbers: dict[tuple[int, ...], int] = {}
        for i, state in enumerate(states):
            said = tuple(t[axis] for t in state)
            out[i, axis] = 0 if not any(said) else numbers.setdefault(said, len(numbers) + 1)
    return out


def _region_row(node: Node, values: dict[int, Codes]) -> NdRow:
    outs = tuple(values[v] for v in node.outputs)
    match node.op:
        case "scan":
            (body,) = node.regions
            stacked = node.params["num_consts"] + node.params["num_carry"]
            ins = tuple(
                values[v] if i < stacked else stack(values[v]) for i, v in enumerate(body.inputs)
            )
        case "while":
            cond, body = node.regions
            ins = tuple(
                values[v] for v in (*cond.inputs[: node.params["cond_nconsts"]], *body.inputs)
            )
        case "cond":
            zero = (0,) * len(outs[0]) if outs else (0,) * len(next(iter(values.values())))
            ins = (zero, *(values[v] for v in node.regions[0].inputs))
        case _:
            raise SbpInternalError(f"no region row for {node.op}")
    return NdRow(ins, outs)


def _strictness(rules: Rules | None) -> int:
    """A number that is larger for rules that lie within others."""
    return 0 if rules is None else sum(POLICIES.index(p) for p in rules.policies) + len(rules.bans)


def _small(shape: Sequence[int], t: Codes, sizes: Sequence[int], code: int) -> bool:
    parts = math.prod(n for c, n in zip(t, sizes, strict=True) if c == code)
    return shape[code - 1] < parts


def pinned_codes(pin: Pin, mesh: MeshSpec) -> tuple[int | None, ...]:
    """What a pin asks on each mesh axis; None where it leaves the axis to inference."""
    codes = from_type(pin.type, mesh)
    return tuple(
        c if (axis in pin.type or (pin.complete and axis not in pin.type.free)) else None
        for axis, c in zip(mesh.names, codes, strict=True)
    )
