"""Request -> Typing: the cheapest types in the cost model, on all mesh axes together; also under
conditions on types at single places, such as the operand of one reader.

The choice is a cost graph: a variable for each decision, with conversions as pairwise costs. The
conversions of a value with one reader are a pairwise cost of its maker and its reader. A value with
several readers has a further variable: the type into which it is converted once, and from which the
readers take it. The types of loop carries and of region inputs are variables, too. So the type of a
carry is the best one over all iterations, and a conversion that no iteration needs is outside the
loop.
"""

import functools
import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np

from sbp import _jax
from sbp.errors import SbpInternalError
from sbp.infer.cost import allowed_rows, row_seconds, undominated_rows
from sbp.infer.flow import End, Place
from sbp.infer.request import JOINT_AXES, Request
from sbp.infer.rows import EMPTY, NdRow
from sbp.infer.space import (
    NATIVE,
    Codes,
    Reduction,
    TypeSpace,
    all_needs_of,
    kept_codes,
    needs_of,
    stack,
)
from sbp.infer.typing import Options, Typing, Window, typing_fields
from sbp.limits import Rules
from sbp.solve.costgraph import CostGraph
from sbp.solve.search import solve
from sbp.trace.graph import Node, group_by

# ---- cost graphs --------------------------------------------------------------------------------
# The costs of conversions are pairwise costs between where a value is made and where it is read.


@dataclass(frozen=True, slots=True)
class PricedEnd:
    """An end of a value, as its conversions are priced.

    Arguments:
      variable: the variable that decides the type.
      codes: the type in each state of the variable.
      weight: how often the value is made or read there in one run of the program.
      rules: the conversions that are allowed for the reader; None allows all.
    """

    variable: int
    codes: tuple[Codes, ...]
    weight: float = 1.0
    rules: Rules | None = None


def _seconds_between(
    space: TypeSpace, source: tuple[Codes, ...], target: tuple[Codes, ...], rules: Rules | None
) -> np.ndarray:
    """Seconds of one conversion, an array [state of the source, state of the target]."""
    rows, columns = ([space.index[t] for t in types] for types in (source, target))
    return space.seconds(rules)[np.ix_(rows, columns)]


DEFERRAL = 1e-12
"""Seconds by which a row that takes a partial and yields a partial is preferred."""


class Solved(NamedTuple):
    """A solution of a problem.

    Attributes:
      cost: seconds with the price of memory, without what `shares` leaves out.
      bound: seconds. No solution costs less.
      typing: the types.
    """

    cost: float
    bound: float
    typing: Typing


class Problem:
    """The costs of a program's typings, ready for the solver: a variable for each decision, by its
    number, then the conversions between them.

    Arguments:
      request: the program with its mesh, demand, policies and limits.
      byte_price: seconds charged per byte that inputs, outputs and `live` take on a device, to meet
          a memory limit.
      live: further values that are charged, as (value, False) in the type they are made in, as
          (value, True) in the type that their readers take.
      shares: for each value that is computed more than once, the share of a conversion's seconds
        that is charged, from 0 to 1 (`plan.saving`). The seconds to store the result of the first
        conversion are charged in any case. The seconds of the typing have all of it.
      window: the typings to choose from; None for all.

    Attributes:
      costs: the costs.
      rows, types: the states of each variable.
      charged, waived: seconds that `byte_price` adds and that `shares` leaves out, by variable.
    """

    def __init__(
        self,
        request: Request,
        byte_price: float,
        live: frozenset[tuple[int, bool]],
        shares: Mapping[int, float],
        window: Window | None = None,
    ) -> None:
        self.request, self.window, self.shares = request, window, shares
        self.byte_price, self.costs = byte_price, CostGraph()
        self.rows: dict[int, tuple[NdRow, ...]] = {}
        self.types: dict[int, tuple[Codes, ...]] = {}
        self.charged: dict[int, np.ndarray] = {}
        self.waived: list[tuple[int, int, np.ndarray]] = []
        # The same questions are asked for many values and ends.
        self._needs, self._matrix = functools.cache(needs_of), functools.cache(_seconds_between)
        self._options = options = Options(request, window)
        self._spaces = options.spaces
        for number, decision in enumerate(request.flow.decisions):
            if decision.kind == "row" and decision.node is not None:
                self.rows[number], seconds = self._priced_rows(decision.node, decision.in_loop)
                self.costs.variable(decision.weight * seconds)
            else:
                types = self.types[number] = options.types(decision)
                self.costs.variable(np.zeros(len(types)))
                if decision.at_boundary:
                    self._charge(number, types, decision.aval, EMPTY)
        makers = {
            v: PricedEnd(e.variable, self.codes(e), request.flow.weights[v])
            for v, e in request.flow.makers.items()
        }
        readers = {
            v: [
                PricedEnd(
                    e.end.variable,
                    self.codes(e.end),
                    e.weight,
                    request.rules(e.node, value=v, in_loop=e.in_loop, free=e.free),
                )
                for e in edges
            ]
            for v, edges in request.flow.readers().items()
        }
        for value, converted in sorted(live):
            maker, reads = makers.get(value), readers.get(value, [])
            for end in reads if converted else (maker,) if maker is not None else ():
                self._charge(
                    end.variable,
                    end.codes,
                    request.graph.avals[value],
                    request.native.get(value, EMPTY),
                    share=len(reads) if converted else 1,
                )
        self._connect(makers, readers)

    # ---- ends -----------------------------------------------------------------------------------

    def _space(
        self,
        aval: Any,
        monoids: frozenset[str],
        codes: Sequence[Codes] = (),
        reduction: Reduction = NATIVE,
    ) -> TypeSpace:
        forced, partial = self._needs(aval.shape, frozenset(codes), self.request.mesh.sizes)
        return self._spaces.of(aval, monoids | partial, forced, reduction, self.request.kept(codes))

    def _space_of(self, aval: Any, types: Sequence[Codes], reduction: Reduction) -> TypeSpace:
        """The space of some types of a value. It lacks the types that split a dim into more parts
        than it has elements."""
        _, monoids = all_needs_of(types)
        return self._spaces.of(aval, monoids, reduction=reduction, kept=self.request.kept(types))

    def codes(self, end: End) -> tuple[Codes, ...]:
        """The type of an end in each state of its variable."""
        rows = self.rows.get(end.variable)
        if rows is not None:
            return tuple(r.at(end.column) for r in rows)
        types = self.types[end.variable]
        return tuple(stack(t) for t in types) if end.column else types

    def _charge(
        self,
        variable: int,
        types: tuple[Codes, ...],
        aval: Any,
        monoids: frozenset[str],
        *,
        share: int = 1,
    ) -> None:
        """Charges the bytes of a value in device memory.

        Arguments:
          variable: decides the type of the value.
          types: the type in each state of the variable.
          aval: shape and dtype of the value.
          monoids: the monoids under which it may be partial.
          share: the number of readers that use the same buffer; each is charged an equal part.
        """
        if self.byte_price and types and not _jax.in_host(aval):
            space = self._space(aval, monoids, sorted(set(types)))
            costs = (
                self.byte_price
                / share
                * np.array([space.local_bytes[space.index[t]] for t in types])
            )
            self.costs.add_unary(variable, costs)
            self.charged[variable] = self.charged.get(variable, 0.0) + costs

    # ---- rows -----------------------------------------------------------------------------------

    def _priced_rows(self, node: Node, in_loop: bool) -> tuple[tuple[NdRow, ...], np.ndarray]:
        """The rows of a node that its rules allow and that are not dominated, with the seconds of
        each."""
        graph, every = self.request.graph, self._options.rows(node)
        rules = self.request.rules(node, in_loop=in_loop)
        avals = tuple(graph.aval(o) for o in (*node.inputs, *node.outputs))
        reductions = tuple(
            self.request.reduction(o) if isinstance(o, int) else NATIVE
            for o in (*node.inputs, *node.outputs)
        )
        known, shares = self.request.caches.row_costs, self.request.memory_shares
        key = id(every), node.op, rules, reductions, shares.of(node), self.request.strictest
        if key not in known:
            rows = allowed_rows(graph, node, every, rules, self.request.mesh)
            # Of rows with equal costs, one that takes and yields a partial is preferred: the
            # reduction comes later. The preference is less than any modelled cost.
            carries = np.array(
                [
                    any(c < 0 for t in r.ins for c in t) and any(c < 0 for t in r.outs for c in t)
                    for r in rows
                ]
            )
            seconds = (
                np.array([row_seconds(graph, node, r, self.request.mesh, shares) for r in rows])
                - DEFERRAL * carries
            )
            kept = undominated_rows(
                rows, seconds, avals, reductions, self._space_of, self.request.strictest
            )
            # The entry keeps `every` alive, since its id is in the key.
            known[key] = (
                tuple(r for r, k in zip(rows, kept, strict=True) if k),
                seconds[kept],
                every,
            )
        return known[key][:2]

    # ---- conversions ----------------------------------------------------------------------------

    def _connect(self, makers: dict[int, PricedEnd], readers: dict[int, list[PricedEnd]]) -> None:
        """Charges the conversions between the maker of each value and its readers."""
        for value, ends in readers.items():
            maker = makers.get(value)
            if maker is None:
                raise SbpInternalError(f"value {value} is read but not made")
            aval = self.request.graph.avals[value]
            every = {t for e in (maker, *ends) for t in e.codes}
            native = self.request.native.get(value, EMPTY)
            space = self._space(aval, native, sorted(every), self.request.reduction(value))
            if len(ends) == 1:
                self._convert(value, space, maker, ends[0])
            else:
                shared = tuple(t for t in space.types if t in every)
                if self.window:  # of the types between the ends, few are types of ends
                    kept = kept_codes(every)
                    shared = tuple(
                        t
                        for t in space.types
                        if all(c in codes for c, codes in zip(t, kept, strict=True))
                    )
                self._share(value, space, maker, ends, shared)

    def _convert(self, value: int, space: TypeSpace, source: PricedEnd, end: PricedEnd) -> None:
        """Charges the conversions of a value from one end to another: the share of it in `shares`.

        Arguments:
          value: the value.
          space: its types and their conversions.
          source: where the value comes from.
          end: where it is read; its rules limit the conversions. A conversion runs as often as
            the end that runs less often.
        """
        costs = min(source.weight, end.weight) * self._matrix(
            space, source.codes, end.codes, end.rules
        )
        share = self.shares.get(value)
        if share is not None:
            rate = self.request.mesh.hardware.hbm_bytes_per_second
            local_bytes = np.array([space.local_bytes[space.index[t]] for t in end.codes])
            # One loop writes the result to memory, the other loop reads it.
            stored = 2 * end.weight * local_bytes / rate if end.weight > 1 else 0.0
            # A partial result is not reused.
            whole = np.array([not any(c < 0 for c in t) for t in end.codes])
            finite = np.where(np.isfinite(costs) & whole, costs, 0.0)
            waived = (1 - share) * (finite - np.minimum(finite, stored))
            self.waived.append((source.variable, end.variable, waived))
            costs = costs - waived
        self.costs.add_pair(source.variable, end.variable, costs)

    def _share(
        self,
        value: int,
        space: TypeSpace,
        maker: PricedEnd,
        ends: Sequence[PricedEnd],
        types: tuple[Codes, ...],
    ) -> None:
        """Charges the conversions of a value with several readers. Readers under the same rules
        share one conversion, which has a new variable for the type of its result; each may convert
        the result further.

        Arguments:
          value: the value.
          space: its types and their conversions.
          maker: where it is made.
          ends: where it is read.
          types: the types of the shared result.
        """
        groups = group_by(ends, lambda end: end.rules)
        copies: list[PricedEnd] = []
        for rules, group in sorted(groups.items(), key=lambda g: -(g[0].strictness if g[0] else 0)):
            # A result that strict rules allow serves readers whose rules allow more, too.
            within = (
                copy
                for copy in reversed(copies)
                if copy.rules is not None and (rules is None or copy.rules.within(rules))
            )
            source = next(within, maker)
            variable = self.costs.variable(np.zeros(len(types)), after=source.variable)
            copy = PricedEnd(variable, types, maker.weight, rules)
            copies.append(copy)
            self.types[variable] = types
            self._convert(value, space, source, copy)
            for end in group:
                self._convert(value, space, copy, end)

    @property
    def entries(self) -> int:
        """The entries of all tables of pairwise costs together."""
        return sum(table.size for table in self.costs.pairs.values())

    # ---- solution -------------------------------------------------------------------------------

    def solve(self, cutoff: float = math.inf, bound: float | None = None) -> Solved | None:
        """The cheapest typing, or None when there is none under the policy.

        Arguments:
          cutoff: seconds. When no typing takes as few, any typing is returned.
          bound: for a window, seconds. No typing of the whole program costs less.
        """
        if any(len(u) == 0 for u in self.costs.unary):
            return None
        solution = solve(self.costs, cutoff)
        if solution is None:
            return None
        bound = solution.lower_bound if bound is None else min(bound, solution.cost)
        states = solution.states
        choices = [
            (self.rows if n in self.rows else self.types)[n][states[n]]
            for n in range(len(self.request.flow.decisions))
        ]
        charged = sum(float(costs[states[variable]]) for variable, costs in self.charged.items())
        waived = sum(
            float(costs[states[source], states[end]]) for source, end, costs in self.waived
        )
        typing = Typing(
            request=self.request,
            graph=self.request.graph,
            **typing_fields(self.request.flow, choices),
            sums=self.request.sums,
            # Both without the price of memory: no typing that takes as few bytes costs less than
            # the bound.
            seconds=solution.cost - charged + waived,
            lower_bound=bound - charged,
        )
        return Solved(solution.cost, bound, typing)


# ---- choice --------------------------------------------------------------------------------------


NEAR = 0.02
"""Gap of a solution on all mesh axes, as a share of its cost, below which no two of them are
searched again: such searches rarely improve it."""

JOINT_ENTRIES = 80_000_000
"""Most entries of all cost matrices together, 8 bytes each, with which three mesh axes are chosen
jointly."""

WORTHWHILE = 1e-3
"""Share by which a search on two mesh axes has to lower the cost. The choice ends when no two axes
do."""

NOTHING: Mapping[int, float] = MappingProxyType({})


def choose(
    request: Request,
    *,
    byte_price: float = 0.0,
    live: frozenset[tuple[int, bool]] = frozenset(),
    shares: Mapping[int, float] = NOTHING,
    cutoff: float = math.inf,
    conditions: Mapping[Place, Callable[[Codes], bool]] | None = None,
) -> Typing | None:
    """Chooses the cheapest typing of a program.

    Arguments:
      request: the program with its mesh, demand, policies and limits.
      byte_price: seconds charged per byte that inputs, outputs and `live` take on a device.
      live: further values that are charged, as (value, False) in the type they are made in, as
        (value, True) in the type that their readers take.
      shares: for each value that is computed more than once, the share of a conversion's seconds
        that is charged, from 0 to 1. The seconds to store the result are charged in any case.
      cutoff: seconds. Where a bound shows that every typing takes more, any typing may be returned.
      conditions: which types a value may have where it is read, by the place of the read: the
        operand of a node, in the type that its row reads or in which it enters a region; or a
        result of a region. An annotation cannot express it, since any reader may convert the result
        of an annotation. Rows that `sbp.infer.cost.undominated_rows` leaves out are not tried.

    Returns:
      The typing, or None when there is none under the policy and the conditions.
    """
    reads = request.flow.reads() if conditions else {}

    def problem(window: Window | None) -> Problem:
        found = Problem(request, byte_price, live, shares, window)
        for at, admits in (conditions or {}).items():
            end = reads[at].end
            admitted = np.array([admits(t) for t in found.codes(end)], dtype=bool)
            found.costs.add_unary(end.variable, np.where(admitted, 0.0, np.inf))
        return found

    axes = sorted(request.axes, key=lambda k: -request.mesh.sizes[k])
    width = max(0, min(2, len(axes) - 1))
    some = list(itertools.combinations(axes, width)) if width else []
    joint = problem(None) if len(axes) <= JOINT_AXES else None
    is_small = joint is not None and (len(axes) <= 2 or joint.entries <= JOINT_ENTRIES)
    best = joint.solve(cutoff) if joint is not None and is_small else None
    if best is None and some:  # the search of all axes may miss the few typings that there are
        wider = (c for r in range(width, len(axes)) for c in itertools.combinations(axes, r))
        starts = (problem(Window(free, None)).solve(bound=0.0) for free in wider)
        best = next(filter(None, starts), None)
        if best is None and joint is not None and not is_small:
            best = joint.solve(cutoff)
    bound, stale = best.bound if best else 0.0, 0
    for free in itertools.cycle(some):
        if (
            best is None
            or stale >= len(some)
            or bound > cutoff
            or best.cost - bound <= NEAR * best.cost
        ):
            break
        found = problem(Window(free, best.typing)).solve(bound=bound)
        improves = found is not None and found.cost < best.cost * (1 - WORTHWHILE)
        best, stale = (found, 1) if improves else (best, stale + 1)
    return best and best.typing
