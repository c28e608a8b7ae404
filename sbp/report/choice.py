"""Program -> how its types were chosen: the strategy that they make, how good the choice is, and
what the search left out."""

from __future__ import annotations

import math
from collections.abc import Iterator

from sbp.limits import policies_text
from sbp.plan.lower import ORDERED_TYPES
from sbp.plan.program import Program
from sbp.report.collectives import instructions
from sbp.report.parts import Paragraph
from sbp.report.strategy import strategy
from sbp.report.wording import bytes_text, counted, seconds_text


def strategy_line(program: Program) -> Iterator[Paragraph]:
    """What each mesh axis is used for, in a line."""
    found = strategy(program)
    if found:
        yield Paragraph(text="; ".join(f"`{use.axis}`: {use.text}" for use in found))


def choice(program: Program) -> Iterator[Paragraph]:
    """How the types were chosen, and what the search left out."""
    yield from (Paragraph(text=text) for text in (_choice(program), *_left_out(program)))


def _choice(program: Program) -> str:
    gap = program.typing.gap
    most = max(0.1, math.ceil(1000 * gap) / 10)
    found = "the cheapest that were found; " + (
        f"others may be at most {most:.1f}% cheaper in the cost model"
        if gap < 1
        else "how much cheaper others may be is not known"
    )
    how = "proved cheapest in the cost model" if program.typing.optimal else found
    if not program.typing.bounds_reuse:
        how += ", before what gradients keep from the forward pass"
    boxing = policies_text(
        program.request.boxing, program.request.axis_policies, program.mesh.names
    )
    return (
        f"{counted(instructions(program.block), 'local operation')}; boxing `{boxing}`; the types"
        f" are {how}"
    )


def _left_out(program: Program) -> Iterator[str]:
    """What the search for the plan left out."""
    if program.faster is not None:
        faster = program.faster
        yield (
            f"a faster plan takes {seconds_text(faster.seconds)}, sends"
            f" {bytes_text(faster.bytes_per_device)} and holds"
            f" {bytes_text(faster.peak_memory_bytes)} per device: this one holds less;"
            " memory_limit= says how much a plan may hold, and the fastest that fits is taken"
        )
    elif program.memory_prices:
        yield (
            "the cheapest plan does not fit the memory limit: types were chosen at"
            f" {counted(program.memory_prices, 'price')} per byte of memory, and this is the"
            " cheapest of their plans that fits; a plan at a price between may be cheaper"
        )
    if program.declined:
        declined = program.declined
        why = (
            "; memory_limit= says how much a plan may hold, and what fits is kept"
            if program.request.memory_limit is None
            else ", for which the memory limit has no room"
        )
        yield (
            f"the backward pass repeats {counted(len(declined), 'conversion')} of the forward pass:"
            f" keeping the results would send {bytes_text(sum(r.bytes_sent for r in declined))} and"
            f" take {seconds_text(sum(r.seconds for r in declined))} less per call, and hold up to"
            f" {bytes_text(sum(r.bytes_kept for r in declined))} more per device{why}"
        )
    if program.unordered_values:
        yield (
            f"the conversions of {counted(program.unordered_values, 'value')} to more than"
            f" {ORDERED_TYPES} types were priced in one order; another order may send less"
        )
