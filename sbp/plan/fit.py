"""Request -> Program: the cheapest plan that fits the memory limit.

Types are chosen several times: with other shares of the seconds of repeated conversions, and with
other prices of the bytes that values take on a device. Of each typing the plan runs repeated
conversions once where their results are worth their memory.
"""

import functools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from sbp import _jax
from sbp.infer.choose import NOTHING, choose
from sbp.infer.constraints import System, constraints_of
from sbp.infer.request import Request
from sbp.infer.typing import certify
from sbp.plan.ir import Loop, Register, blocks
from sbp.plan.memory import DeviceMemory
from sbp.plan.program import Program, resolve
from sbp.plan.recompute import recomputations, with_recomputation
from sbp.plan.saving import repeated_values, repeats, save
from sbp.trace.graph import LOOPS, collecting_less

WORTH = 0.4
"""Share of a plan's seconds that a rise of its peak by as large a share must save at least, where
the user gives no memory limit: 1 % more memory has to save 0.4 % of the time."""

FREE = 0.001
"""Share of the device's memory by which reuses may raise the peak at no price."""

TRIALS = 16
"""Sets of reuses that are tried for one plan."""

FREED = 0.1
"""Share of the fastest plan's peak that another one has to hold less. Where loops hold less than
that, no other types are looked for."""

NOTED = 0.01
"""Share of the device's memory that the other plan has to hold less, too."""

ROUNDS = 5
"""Prices of memory that are tried. Each plan is fullest at another moment, and the values that are
live then are charged from the next price on."""

PRICES = tuple(10.0**n for n in range(-14, -6))
"""Prices of memory, in seconds per byte on one device, tried in turn. At 1e-11 a gigabyte costs
10 ms; at 1e-7 it costs more than the rest of any plan."""

HALVINGS = 3
"""Prices of memory that are tried between the last price whose plan does not fit and the first
whose plan fits. `Program.memory_prices` counts all prices, for the report."""

LARGE, AXIS_FACTOR = 6000, 8
"""Nodes of a program up to which the reuse of forward conversions counts when types are chosen on
one mesh axis, and the factor by which each further axis lowers that number."""


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
    """The cheapest program that fits, or None, also where no plan fits at three middle prices of
    memory: then sbp does not try all prices.

    Arguments:
      request: with a memory limit.
      full: a plan of a similar request. What is live at its fullest moment is charged.
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
      prices: how many prices of memory were tried so far.
      live: the values that are charged besides arguments and results.
    """

    def __init__(self, request: Request, **options: Any) -> None:
        self.request, self.options = request, options
        self.live: set[tuple[int, bool]] = set()
        self.prices = 0

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
        self.prices += 1
        return self.at(byte_price=price, live=frozenset(self.live))

    def at_price(
        self, price: float, free: Program, fuller: Program | None = None
    ) -> Program | None:
        """The plan at a price of memory; None where no typing was found.

        Arguments:
          price: seconds per byte on one device.
          free: the cheapest plan without a price.
          fuller: a plan. What is live at its fullest moment is charged from now on.
        """
        found = self.at_full(price, fuller)
        if found is None:
            return None
        # A bound on seconds with a price of memory bounds only typings that take no more memory.
        # The bound without a price holds for all typings.
        typing = free.typing
        return _best(
            found.with_typing(lower_bound=typing.lower_bound, bounds_reuse=typing.bounds_reuse)
        )


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

    With a memory limit that is all of the limit. Without one, a plan that holds every gathered
    weight of a model is the fastest one by a few percent, for a third more memory that nobody asked
    for. So reuses have to be worth the memory that they take.

    Arguments:
      programs: plans of one request that reuse nothing.
    """
    first, least = programs[0], min(p.cost.peak_memory_bytes for p in programs)
    limit = first.request.memory_limit
    if limit is not None:
        return Room(least=least, most=limit, free=0.0, worth=0.0)
    whole = first.mesh.hardware.hbm_bytes
    return Room(least=least, most=whole, free=FREE * whole, worth=WORTH)


def _best(*programs: Program | None) -> Program | None:
    """The best of some plans, with the reuses that they have room for."""
    known = [p for p in programs if p is not None]
    if not known:
        return None
    room = room_of(known)
    made = [without_repeats(p, room) for p in known]
    best = min(made, key=room.order)
    fastest = min(made, key=lambda p: (not p.fits, p.cost.seconds))
    slower = best.cost.seconds > fastest.cost.seconds
    return replace(best, faster=fastest.cost) if slower else best


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

    The fastest plan of a loop over microbatches gathers split weights once, before the loop, and
    holds them whole, with a whole gradient for each. Who splits weights does so to hold less. A
    plan that gathers them in every turn is taken where it is worth the time: 1 % less memory may
    take `WORTH` % more.

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
    if best.cost.peak_memory_bytes > peak - enough:
        return program
    return replace(best, memory_prices=search.prices, faster=program.faster or program.cost)


def held_for_loops(program: Program) -> float:
    """Bytes on one device by which values around loops are larger, at the fullest moment, than the
    inputs of their shapes: gathered weights, gradients that are not reduced yet. Values around a
    loop are its operands, what it carries, and what it returns.

    Arguments:
      program: a plan.
    """
    graph, elements = program.request.graph, DeviceMemory(program.typing, in_host=False).elements
    split: dict[tuple[int, ...], int] = {}
    for register in program.block.inputs:
        shape, size = graph.avals[register.value].shape, elements(register)
        split[shape] = min(size, split.get(shape, size))
    found, every = 0.0, (i for block in blocks(program.block) for i in block.instructions)
    loops = [i for i in every if isinstance(i, Loop) and i.node.op in LOOPS]
    around = {s for i in loops for s in (*i.ins, *i.outs) if isinstance(s, Register)}
    for register in around.intersection(program.fullest):
        # What the backward pass reuses is no value of the traced program: it was judged before.
        aval = graph.avals.get(register.value)
        if aval is not None and aval.shape in split:
            more = max(0, elements(register) - split[aval.shape])
            found += more * _jax.itemsize(aval.dtype)
    return found


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
    for price in sorted((*PRICES, even, 4 * even)):
        found = search.at_price(price, free, fuller=program)
        if found is None or found.cost.seconds > most:
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
            best = replace(best, memory_prices=search.prices)
            return best, best
        too_low = price
    return None, least
