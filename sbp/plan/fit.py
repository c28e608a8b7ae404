"""Request -> Program: the cheapest plan that fits the memory limit.

Types are chosen several times: with other shares of the seconds of repeated conversions, and with
other prices of the bytes that values take on a device. Of each typing the plan runs repeated
conversions once where their results are worth their memory. Where no types fit, the backward pass
makes values of the forward pass again.
"""

import functools
import itertools
import math
from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from sbp import _jax
from sbp.infer.choose import NOTHING, choose
from sbp.infer.constraints import System, constraints_of
from sbp.infer.request import Recomputation, Request
from sbp.infer.space import local_bytes
from sbp.infer.typing import certify
from sbp.plan.ir import Loop, Register, blocks
from sbp.plan.memory import DeviceMemory
from sbp.plan.program import Program, resolve
from sbp.plan.saving import repeated_values, repeats, save
from sbp.signatures import traits_of
from sbp.trace.collectives import SHARD_MAP
from sbp.trace.graph import (
    BARRIER,
    LOOPS,
    Graph,
    Node,
    Operand,
    collecting_less,
    group_by,
    reached,
)
from sbp.trace.scopes import REMATTED

WORTH = 0.4
"""Share of a plan's seconds that a rise of its peak by as large a share must save at least, where
the user gives no memory limit: 1 % more memory has to save 0.4 % of the time."""

FREE = 0.001
"""Share of the device's memory by which reuses may raise the peak at no price."""

TRIALS = 16
"""Sets of reuses that are tried for one plan."""

FREED = 0.1
"""Share of the fastest plan's peak by which another plan must lower the peak. sbp looks for another
plan only if loops hold at least this share."""

NOTED = 0.01
"""Share of the device's memory by which the other plan must lower the peak as well."""

ROUNDS = 5
"""Prices of memory that are tried to trade memory for time; also how often the highest price is
tried again to meet a memory limit. Each plan is fullest at another moment, and the values that are
live then are charged from the next plan on."""

PRICES = tuple(10.0**n for n in range(-14, -6))
"""Prices of memory, in seconds per byte on one device, tried in turn. At 1e-11 a gigabyte costs
10 ms; at 1e-7 it costs more than the rest of any plan."""

HALVINGS = 3
"""Prices of memory that are tried between the last price whose plan does not fit and the first
whose plan fits."""

LARGE, AXIS_FACTOR = 6000, 8
"""Nodes of a program up to which the reuse of forward conversions counts when types are chosen on
one mesh axis, and the factor by which each further axis lowers that number."""

SEGMENTS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64)
"""Numbers of segments into which sbp tries to cut a forward pass that it recomputes."""


@collecting_less()
def fit(request: Request) -> tuple[Program | None, Program | None]:
    """The cheapest program that fits.

    Returns:
      The program, or None where none fits; and the program of least memory that was found, or None
      where there is no typing at all.
    """
    if request.budgets:
        # A reader for which a collective is forbidden may use the result of the same collective
        # for another reader. So the cheapest plan without budgets is tried first.
        free = best_program(replace(request, budgets=()))
        program = free and free.within(request)
        if program is not None:
            return program, program
    search = PlanSearch(request)
    program = search.cheapest()
    if program is None or program.fits:
        if program is not None and request.memory_limit is None:
            program = _trade_memory(search, program)
        return program, program
    return _recomputing(search, program)


def best_program(request: Request) -> Program | None:
    """The cheapest program that fits, or None."""
    return fit(request)[0]


def best_if_near(request: Request, full: Program) -> Program | None:
    """The cheapest program that fits. None if none fits, and if no plan fits at three middle prices
    of memory: then sbp does not try the other prices.

    Arguments:
      request: with a memory limit.
      full: a plan of a similar request. The price applies to the values that are live at the
        fullest moment of this plan.
    """
    search = PlanSearch(request)
    for price in PRICES[3:6]:
        full = search.at_full(price, full) or full
        if full.request is request and full.fits:
            return best_program(request)
    return None


class PlanSearch:
    """Plans of one request at shares and prices.

    Arguments:
      request: the program, with everything that its types are chosen by.
      options: of `choose`.

    Attributes:
      live: the values that are charged besides arguments and results.
    """

    def __init__(self, request: Request, **options: Any) -> None:
        self.request, self.options = request, options
        self.live: set[tuple[int, bool]] = set()

    @functools.cached_property
    def systems(self) -> tuple[System, ...]:
        """The constraints, which certify all plans."""
        return constraints_of(self.request)

    def at(self, shares: Mapping[int, float] = NOTHING, **prices: Any) -> Program | None:
        """The plan of the types that are chosen; None where there are none."""
        typing = choose(self.request, shares=shares, **prices, **self.options)
        if typing is None:
            return None
        certify(typing, self.systems)
        return resolve(typing)

    def cheapest(self) -> Program | None:
        """The cheapest program, with one run of conversions that the backward pass repeats.

        A rematerialised block repeats conversions of the forward pass; the plan can reuse their
        results. Whether it can depends on three types (value, first use, second use), but the cost
        graph has pairwise costs. So the chooser runs three times: with repeated conversions priced
        at 0 (its bound holds for every plan), at 1/k for k copies, and in full. Of the three plans
        the cheapest is taken, with `room_of` saying what memory costs.
        """
        request, (again, times) = self.request, repeated_values(self.request.graph)
        large = request.size * AXIS_FACTOR ** (len(request.mesh.sizes) - 1) > LARGE
        if not again or not request.reuse or large:
            best = _best(self.at())
            return best and best.with_typing(bounds_reuse=not again)
        bounding = self.at(dict.fromkeys(again, 0.0))
        best = _best(bounding)
        if bounding is None or best is None or (best.typing.optimal and best.fits):
            return best
        best = _best(bounding, self.at({v: 1 / n for v, n in times.items()}), self.at())
        return best and best.with_typing(lower_bound=bounding.typing.lower_bound)

    def at_full(self, price: float, fuller: Program | None) -> Program | None:
        """As `at_price`, without a bound, and without reuses."""
        if fuller is not None:
            self.live |= {
                (r.value, r.codes != fuller.typing.values.get(r.value))
                for r in fuller.fullest
                if r.value in self.request.graph.avals
            }
        return self.at(byte_price=price, live=frozenset(self.live))

    def at_price(
        self, price: float, free: Program, fuller: Program | None = None
    ) -> Program | None:
        """The plan at a price of memory; None where no typing was found.

        Arguments:
          price: seconds per byte on one device.
          free: the cheapest plan without a price.
          fuller: a plan. From now on, the price also applies to the values that are live at its
            fullest moment.
        """
        found, typing = self.at_full(price, fuller), free.typing
        # A bound on seconds with a price of memory bounds only typings that take no more memory.
        # The bound without a price holds for all typings.
        bounds = {"lower_bound": typing.lower_bound, "bounds_reuse": typing.bounds_reuse}
        return _best(found and found.with_typing(**bounds))


# ---- reuse --------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Room:
    """The memory that plans of one request may take, and the price of taking it.

    Arguments:
      least: the least peak of the plans that reuse nothing, in bytes on one device.
      most: bytes on one device that a plan may take.
      free: bytes above `least` that have no price.
      worth: as `WORTH`; 0 where the user gave a memory limit, which says that memory up to it costs
        nothing.
    """

    least: float
    most: float
    free: float
    worth: float

    def order(self, program: Program) -> tuple[bool, float]:
        """The key by which plans are compared; the least is best."""
        peak = program.cost.peak_memory_bytes
        rise = max(0.0, peak - self.least - self.free) / max(1.0, self.least)
        return peak > self.most, program.cost.seconds * (1 + self.worth * rise)


def room_of(programs: Sequence[Program]) -> Room:
    """The memory that plans may take with the results of conversions that they keep.

    With a memory limit, they may take all of it. Without a limit, the fastest plan holds every
    gathered weight of a model. It is a few percent faster and takes a third more memory. So a reuse
    must be worth the memory that it takes.

    Arguments:
      programs: plans of one request that reuse nothing.
    """
    least = min(p.cost.peak_memory_bytes for p in programs)
    limit, whole = programs[0].request.memory_limit, programs[0].mesh.hardware.hbm_bytes
    most, free, worth = (whole, FREE * whole, WORTH) if limit is None else (limit, 0.0, 0.0)
    return Room(least=least, most=most, free=free, worth=worth)


def _best(*programs: Program | None) -> Program | None:
    """The best of some plans, with the reuses that they have room for."""
    known = [p for p in programs if p is not None]
    if not known:
        return None
    room = room_of(known)
    made = [without_repeats(p, room) for p in known]
    best = min(made, key=room.order)
    fastest = min(made, key=lambda p: (not p.fits, p.cost.seconds))
    return replace(best, faster=fastest.cost) if best.cost.seconds > fastest.cost.seconds else best


def without_repeats(program: Program, room: Room) -> Program:
    """The program without repeated conversions; readers take the first result.

    The conversions that save most time per byte are taken first. A set that is not worth its memory
    is halved, and each half is tried.

    Arguments:
      program: a plan that reuses nothing.
      room: the memory that the plan may take.
    """
    found = sorted(
        repeats(program.typing, program.block),
        key=lambda r: (-r.seconds / max(1.0, r.bytes_kept), r.value),
    )
    best, waiting, tried = program, [found] if found else [], 0
    while waiting and tried < TRIALS:
        group = waiting.pop()
        tried += 1
        removed = (*best.removed, *group)
        saved = resolve(save(program.typing, removed))
        over, seconds = room.order(saved)
        less = saved.cost.bytes_per_device < best.cost.bytes_per_device
        if less and not over and seconds <= room.order(best)[1]:
            best = replace(saved, before=program, removed=removed)
        elif len(group) > 1:
            half = len(group) // 2
            waiting += [group[half:], group[:half]]
    if best is not program:
        certify(best.typing)
    return replace(best, declined=tuple(r for r in found if r not in best.removed))


# ---- less memory for more time ------------------------------------------------------------------


def _trade_memory(search: PlanSearch, program: Program) -> Program:
    """The fastest plan, or one that holds so much less that it is worth the time. No memory limit
    is given.

    The fastest plan of a loop over microbatches gathers split weights once, before the loop. It
    holds the whole weights, and a whole gradient for each. But users split weights to save memory.
    So sbp takes a plan that gathers them in every turn if this is worth the time: 1 % less memory
    may cost `WORTH` % more time.

    Arguments:
      search: of the request.
      program: the fastest plan.
    """
    peak = program.cost.peak_memory_bytes
    enough = max(FREED * peak, NOTED * program.mesh.hardware.hbm_bytes)
    if held_for_loops(program) < enough:
        return program
    tried = [program]
    for _ in range(ROUNDS):
        last = tried[-1]
        # Values that are live at different moments are charged as if they were live together. So
        # the price is the one at which memory would weigh as much as time.
        price = last.cost.seconds / last.cost.peak_memory_bytes
        found = search.at_price(price, program, fuller=last)
        if found is None or found.cost == last.cost:
            break
        tried.append(found)
    best = min(tried, key=lambda p: p.cost.seconds * p.cost.peak_memory_bytes**WORTH)
    cheap = replace(best, faster=program.faster or program.cost)
    return cheap if best.cost.peak_memory_bytes <= peak - enough else program


def held_for_loops(program: Program) -> float:
    """Bytes on one device by which values around loops are larger, at the fullest moment, than the
    inputs of their shapes: gathered weights, gradients that are not reduced yet. Values around a
    loop are its operands, what it carries, and what it returns.

    Arguments:
      program: a plan.
    """
    graph, elements = program.request.graph, DeviceMemory(program.typing, in_host=False).elements
    by_shape = group_by(program.block.inputs, lambda r: graph.avals[r.value].shape)
    split = {shape: min(map(elements, inputs)) for shape, inputs in by_shape.items()}
    every = (i for block in blocks(program.block) for i in block.instructions)
    loops = [i for i in every if isinstance(i, Loop) and i.node.op in LOOPS]
    around = {s for i in loops for s in (*i.ins, *i.outs) if isinstance(s, Register)}
    # A value that the backward pass reuses is no value of the traced program. It was judged before.
    known = [r for r in around.intersection(program.fullest) if r.value in graph.avals]
    pairs = ((r, graph.avals[r.value]) for r in known if graph.avals[r.value].shape in split)
    more = (max(0, elements(r) - split[a.shape]) * _jax.itemsize(a.dtype) for r, a in pairs)
    return sum(more, 0.0)


# ---- a memory limit -----------------------------------------------------------------------------


def _recomputing(search: PlanSearch, free: Program) -> tuple[Program | None, Program]:
    """A cheap program that fits the memory limit, by other types or by values that the backward
    pass makes again, and the program of least memory that was found.

    Arguments:
      search: of the request.
      free: the cheapest program, which does not fit.

    Returns:
      As `fit`.
    """
    request, best, smaller = search.request, None, list[Program]()
    allowed = request.remat == "auto" and request.recomputed is None
    for how in recomputations(free) if allowed else ():
        found = PlanSearch(with_recomputation(request, how), **search.options).cheapest()
        smaller += [] if found is None else [found]
        if found is not None and found.fits:
            best = found
            break
    most = math.inf if best is None else best.cost.seconds
    fitting, least = _within_memory(search, free, most)
    if fitting is None and best is None and smaller:
        last = min(smaller, key=lambda p: p.cost.peak_memory_bytes)
        fitting, other = _within_memory(PlanSearch(last.request, **search.options), last)
        least = min(least, other, key=lambda p: p.cost.peak_memory_bytes)
    plans = [p for p in (fitting, best) if p is not None]
    found = min(plans, key=lambda p: p.cost.seconds, default=None)
    return found, found or least


def _within_memory(
    search: PlanSearch, free: Program, most: float = math.inf
) -> tuple[Program | None, Program]:
    """A cheap program that fits the memory limit by its types, and the program of least memory that
    was found.

    Arguments:
      search: of the request.
      free: the cheapest program, which does not fit.
      most: the seconds of a program that fits.

    Returns:
      As `fit`.
    """
    program, least, too_low = free, free, PRICES[0] / 10
    even = free.cost.seconds / free.cost.peak_memory_bytes  # memory weighs as much as time
    highest = PRICES[-1]
    for price in sorted((*PRICES, even, 4 * even, *[highest] * ROUNDS)):
        found = search.at_price(price, free, fuller=program)
        if found is None or found.cost.seconds > most:
            break
        if price == highest and found.cost == program.cost:
            break
        program = found
        least = min(least, program, key=lambda p: p.cost.peak_memory_bytes)
        if program.fits:
            best, enough = program, price
            for _ in range(HALVINGS):
                middle = math.sqrt(too_low * enough)
                found = search.at_price(middle, free)
                if found is not None and found.fits:
                    enough = middle
                    best = min(best, found, key=lambda p: p.cost.seconds)
                else:
                    too_low = middle
            return best, best
        # Plans at the highest price may be full at new moments. Then lower prices may do as well.
        too_low = price if price < highest else PRICES[0] / 10
    return None, least


# ---- recomputation ------------------------------------------------------------------------------
# Values of the forward pass that the backward pass makes again, so that no device holds them in
# between.
#
# The forward pass is cut into segments. Where the backward pass first reads a value of a segment,
# it runs the operations of the segment again, as `jax.checkpoint` does: from the values that enter
# the segment, through a barrier that keeps XLA from merging both runs.


def with_recomputation(request: Request, how: Recomputation) -> Request:
    """The request for the program whose backward pass makes values of the forward pass again."""
    graph = replace(request.graph, avals=dict(request.graph.avals))
    made = _Segments(graph, how).graph_with_copies()
    return replace(request, graph=made, recomputed=how)


class _Segments:
    """The segments of a program that run again.

    Arguments:
      graph: the program. New values are entered in its table of avals.
      how: what is made again.

    Attributes:
      originals: of each value that is made again, the first one.
      entering: the values from which segments are made again.
    """

    def __init__(self, graph: Graph, how: Recomputation) -> None:
        self.graph, self.how = graph, how
        self.ids = itertools.count(max((n.id for n in graph.walk()), default=0) + 1)
        self.makers = {v: i for i, n in enumerate(graph.nodes) for v in n.outputs}
        numbered = reversed([*enumerate(graph.nodes)])
        # In the backward pass: of several readers the first one counts.
        self.first_use = {o: i for i, node in numbered if node.backward for o in node.inputs}
        last, ends = last_forward_reads(graph), (*how.ends, len(graph.nodes) + 1)
        # What goes from one segment to the next is there.
        self.kept = {
            v for v, i in self.makers.items() if ends[bisect_right(ends, i)] <= last.get(v, i)
        }
        self.originals, self.entering = dict[int, int](), set[int]()

    def graph_with_copies(self) -> Graph:
        segments = itertools.starmap(self._segment, itertools.pairwise((0, *self.how.ends)))
        again = group_by(segments, lambda segment: segment[0])
        nodes, instead = list[Node](), dict[Operand, Operand]()
        of_gradients = {v for n in self.graph.nodes if n.backward for v in n.outputs}
        for i, node in enumerate(self.graph.nodes):
            for _, needed, entering in again.get(i, ()):
                self.entering |= {*entering}
                # With a gradient in the barrier, the segment does not run before it is there.
                late = [o for o in node.inputs if isinstance(o, int) and o in of_gradients]
                held = dict.fromkeys((*entering, *late))
                barrier = replace(node, op=BARRIER, primitive=None, params={}, regions=(), title="")
                ins = tuple(instead.get(o, o) if o in late else o for o in held)
                there: dict[Any, Operand] = {**self._append(nodes, barrier, ins, [*held])}
                instead |= {o: there[o] for o in late}
                for old in (self.graph.nodes[k] for k in needed):
                    ins = tuple(there.get(o, o) for o in old.inputs)
                    made = self._append(nodes, old, ins, old.outputs)
                    there |= made
                    instead |= made
            if node.backward:
                node = replace(node, inputs=tuple(instead.get(o, o) for o in node.inputs))
            nodes.append(node)
        return replace(self.graph, nodes=tuple(nodes))

    def _segment(self, start: int, end: int) -> tuple[int, list[int], list[int]]:
        """Of a segment, the node before which it runs again; the positions of what then runs; and
        the values that enter it. The first is -1 where nothing is made again."""
        made = {
            v
            for node in self.graph.nodes[start:end]
            if not (node.backward or node.regions or node.op == SHARD_MAP)
            and "callback" not in node.params
            and not (self.how.keeps_products and traits_of(node.op).flops)
            for v in node.outputs
            if v not in self.kept
        }

        def operands(v: int) -> list[int]:
            read = self.graph.nodes[self.makers[v]].inputs if v in made else ()
            return [o for o in read if isinstance(o, int)]

        used = [v for v in sorted(made) if v in self.first_use]
        first = min((self.first_use[v] for v in used), default=-1)
        every = [*reached(used, operands)]
        entering = [v for v in every if v not in made]
        needed = sorted({self.makers[v] for v in every if v in made})
        if not entering or first <= needed[-1]:  # nothing to hold back, or it is read before
            return -1, [], []
        return first, needed, entering

    def _append(
        self, nodes: list[Node], like: Node, inputs: tuple[Operand, ...], values: Sequence[int]
    ) -> dict[int, int]:
        """Appends a node that makes values again; returns the new ones."""
        own = "" if like.backward else f"/{like.scope}"
        scope = f"transpose(jvp())/{REMATTED}/{REMATTED}{own}"
        new = {v: self.graph.new_value(self.graph.avals[v]) for v in values}
        self.originals |= {copy: self.originals.get(v, v) for v, copy in new.items()}
        outputs = tuple(new.values())
        nodes.append(replace(like, id=next(self.ids), inputs=inputs, outputs=outputs, scope=scope))
        return new


def recomputations(program: Program) -> Iterator[Recomputation]:
    """Recomputations with which a program holds less than with a plan, those first that keep
    products or make less again.

    Arguments:
      program: a plan that does not fit its memory limit.
    """
    graph, typing, limit = program.request.graph, program.typing, program.request.memory_limit
    full = {v: local_bytes(graph.avals[v], t, typing.mesh.sizes) for v, t in typing.values.items()}
    # The compiler makes many values where they are read. Those of the fullest moment are held.
    held = {r.value: full[r.value] for r in program.fullest if r.value in full}
    before, room = live_peak(graph, held), program.cost.peak_memory_bytes - (limit or 0.0)

    def saved(how: Recomputation) -> float:
        segments = _Segments(replace(graph, avals=dict(graph.avals)), how)
        made = segments.graph_with_copies()
        sizes = held | {v: full[v] for v in segments.entering if v in segments.makers}
        copies = {copy: sizes[v] for copy, v in segments.originals.items() if v in sizes}
        return before - live_peak(made, sizes | copies)

    for keeps_products in (True, False):
        ways = [Recomputation(ends, keeps_products) for ends in _cuts(graph, held, full)]
        best = max(ways, key=saved, default=None)
        if best is not None and saved(best) > 0:
            fewer = (replace(best, ends=best.ends[:k]) for k in range(1, len(best.ends)))
            enough = next((how for how in fewer if saved(how) >= room), None)
            yield from (best,) if enough is None else (enough, best)


def _cuts(
    graph: Graph, held: Mapping[int, float], full: Mapping[int, float]
) -> Iterator[tuple[int, ...]]:
    """Ends of segments of the forward pass, for several numbers of segments. What is held for the
    backward pass is spread over the segments evenly, and few bytes go from one to the next.

    Arguments:
      graph: the program.
      held: the bytes of the values that are held.
      full: the bytes of all values.
    """
    count = len(graph.nodes)
    saved, crossing, last = np.zeros(count), np.zeros(count + 1), last_forward_reads(graph)
    read = {o for node in graph.nodes if node.backward for o in node.inputs}
    for i, node in enumerate(graph.nodes):
        for v in () if node.backward else node.outputs:
            saved[i] += held.get(v, 0.0) * (v in read)
            crossing[i + 1] += full[v]
            crossing[max(last.get(v, i), i) + 1] -= full[v]
    # For each node: the bytes that earlier nodes save, and the bytes of earlier values that it or a
    # later node of the forward pass reads.
    made, crossing = np.cumsum(saved) - saved, np.cumsum(crossing)
    whole = saved.sum()
    made = made[: np.searchsorted(made, whole) + 1]
    found = set[tuple[int, ...]]()
    # What follows the last segment is kept; there may be as much of it as in a segment, or none.
    for k, parts in itertools.product(SEGMENTS if whole else (), (0, 1)):
        ends, step = set[int](), whole / (k + parts)
        for target in step * np.arange(1, k + 1):
            away = np.abs(made - target)
            near = np.flatnonzero(away <= step / 2)
            ends |= {int(i) for i in near[np.lexsort((away[near], crossing[near]))][:1]}
        found.add(tuple(sorted(ends - {0})))
    yield from sorted(found - {()}, key=lambda ends: (len(ends), ends))


def last_forward_reads(graph: Graph) -> dict[Operand, int]:
    """The position of the last node of the forward pass that reads a value."""
    numbered = enumerate(graph.nodes)
    return {o: i for i, node in numbered if not node.backward for o in node.inputs}


def live_peak(graph: Graph, sizes: Mapping[int, float]) -> float:
    """The largest sum of the bytes of values that are live at one node; arguments do not count."""
    root = dict[Any, Any]()
    for node in (node for node in graph.nodes if node.is_barrier):
        root |= {v: root.get(o, o) for v, o in zip(node.outputs, node.inputs, strict=True)}
    reads = [*(node.inputs for node in graph.nodes), graph.outputs]
    last = {root.get(o, o): i for i, read in enumerate(reads) for o in read}
    change = np.zeros(len(graph.nodes) + 2)
    for i, node in enumerate(graph.nodes):
        for v in () if node.is_barrier else node.outputs:
            change[i] += sizes.get(v, 0.0)
            change[last.get(v, i) + 1] -= sizes.get(v, 0.0)
    return float(np.cumsum(change).max())
