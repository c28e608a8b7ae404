"""Which repeated conversions a plan reuses: what their results may take of the memory."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from dataclasses import dataclass

from sbp.infer.certificate import certify
from sbp.plan.program import Program, resolve
from sbp.plan.saving import Repeat, repeats, save

WORTH = 0.4
"""Share of a plan's seconds that a rise of its peak by as large a share must save at least, where
the user gives no memory limit: 1 % more memory has to save 0.4 % of the time."""

FREE = 0.001
"""Share of the device's memory by which reuses may raise the peak at no price."""

TRIALS = 16
"""Sets of reuses that are tried for one plan."""


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


def room_of(programs: Iterable[Program]) -> Room:
    """The memory that plans may take with the results of conversions that they keep.

    With a memory limit that is all of the limit. Without one, a plan that holds every gathered
    weight of a model is the fastest one by a few percent, for a third more memory that nobody asked
    for. So reuses have to be worth the memory that they take.

    Arguments:
      programs: plans of one request that reuse nothing.
    """
    programs = tuple(programs)
    first, least = programs[0], min(p.cost.peak_memory_bytes for p in programs)
    limit = first.request.memory_limit
    if limit is not None:
        return Room(least=least, most=limit, free=0.0, worth=0.0)
    whole = first.mesh.hardware.hbm_bytes
    return Room(least=least, most=whole, free=FREE * whole, worth=WORTH)


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
        saved = _saved(program, (*best.removed, *group))
        over, seconds = room.order(saved)
        less = saved.cost.bytes_per_device < best.cost.bytes_per_device
        if less and not over and seconds <= room.order(best)[1]:
            best = saved
        elif len(group) > 1:
            half = len(group) // 2
            waiting += [group[half:], group[:half]]
    if best is not program:
        certify(best.typing)
    return dataclasses.replace(best, declined=tuple(r for r in found if r not in best.removed))


def _saved(program: Program, removed: tuple[Repeat, ...]) -> Program:
    """The program without some of its repeated conversions."""
    saved = resolve(save(program.typing, removed))
    return dataclasses.replace(saved, before=program, removed=removed)
