"""Program -> what limits it: floating-point operations, the modelled seconds of each part of it by
what they are spent on, and the utilisation that follows."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field

from sbp.plan.ir import Apply
from sbp.plan.program import Program
from sbp.plan.traffic import Phase
from sbp.report.flows import PLACE_NAMES, Grouping
from sbp.report.parts import Column, Paragraph, Plain, Section, Table, TableRow
from sbp.report.schedule import Interval, lane_of, schedule
from sbp.report.wording import counted, seconds_text
from sbp.signatures import traits_of
from sbp.trace.graph import Node

SHOWN_PLACES = 12
"""Places that the table of limits shows; the others are folded."""


@dataclass(slots=True, kw_only=True)
class Work:
    """What one part of the program does per call.

    Attributes:
      place: its scopes, or the function that it stands in.
      phase: forward, backward or update.
      flops: floating-point operations of its products on all devices together, without what
        rematerialisation repeats and what several devices do alike.
      repeated: those that rematerialisation repeats.
      seconds: modelled seconds by what they are spent on: `compute`, `memory`, or `link NAME` for
        the links along mesh axes.
    """

    place: str
    phase: Phase
    flops: float = 0.0
    repeated: float = 0.0
    seconds: dict[str, float] = field(default_factory=lambda: defaultdict[str, float](float))

    @property
    def total(self) -> float:
        """Its modelled seconds."""
        return sum(self.seconds.values())

    @property
    def bound(self) -> str:
        """What most of its seconds are spent on; empty where it takes none."""
        return max(self.seconds, key=lambda k: self.seconds[k]) if self.total else ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """What limits a program.

    Attributes:
      works: its parts, in program order.
      peak: floating-point operations per second of all devices at the rate of 16-bit products.
      modelled: the plan's modelled seconds. The parts may add up to slightly less.
      by_hand: how many regions written by hand there are, which are not counted.
    """

    works: tuple[Work, ...]
    peak: float
    modelled: float
    by_hand: int

    @property
    def flops(self) -> float:
        """Model FLOPs of one call."""
        return sum(w.flops for w in self.works)

    @property
    def repeated(self) -> float:
        """Those that rematerialisation repeats."""
        return sum(w.repeated for w in self.works)

    @property
    def seconds(self) -> dict[str, float]:
        """Modelled seconds of one call by what they are spent on."""
        found = defaultdict[str, float](float)
        for work in self.works:
            for name, seconds in work.seconds.items():
                found[name] += seconds
        return dict(sorted(found.items(), key=lambda item: -item[1]))

    @property
    def utilisation(self) -> float:
        """Model FLOPs utilisation: FLOPs over what all devices can do in the modelled seconds.

        Source: Chowdhery et al., "PaLM" (arXiv:2204.02311), appendix B. As there, what
        rematerialisation repeats does not count.
        """
        possible = self.peak * self.modelled
        return self.flops / possible if possible else 0.0


def limits(program: Program) -> Limits:
    """What limits a program. Of a `cond`, the mean of its branches counts, as in the modelled
    time; regions written by hand are not counted, since their time is not modelled."""
    return _Count(program).limits()


class _Count:
    """Adds up the work of a program's instructions."""

    def __init__(self, program: Program) -> None:
        self.program = program
        scoped = any(PLACE_NAMES["scope"](n).name for n in program.graph.walk())
        self._grouping: Grouping = "scope" if scoped else "function"
        self.works: dict[tuple[str, Phase], Work] = {}

    def limits(self) -> Limits:
        """The result."""
        found = schedule(self.program)
        for interval in found.intervals:
            self._add(interval)
        mesh = self.program.mesh
        return Limits(
            works=tuple(self.works.values()),
            peak=mesh.num_devices * mesh.hardware.flops_per_second,
            modelled=self.program.cost.seconds,
            by_hand=found.by_hand,
        )

    def _add(self, interval: Interval) -> None:
        node = interval.node
        place = PLACE_NAMES[self._grouping](node).text if node else "arguments and results"
        work = self.works.setdefault(
            (place, interval.phase), Work(place=place, phase=interval.phase)
        )
        bound = lane_of(interval, self.program.mesh) if interval.axes else interval.bound
        if interval.waited:
            work.seconds[bound] += interval.waited
        if isinstance(interval.instruction, Apply) and not interval.axes:
            self._count(interval.instruction.node, interval.runs, work)

    def _count(self, node: Node, runs: float, work: Work) -> None:
        """Adds the floating-point operations of a product."""
        graph, flops = self.program.graph, traits_of(node.op).flops
        if flops is None:
            return
        shapes = [tuple(graph.aval(o).shape) for o in node.inputs]
        results = [tuple(graph.avals[v].shape) for v in node.outputs]
        count = runs * flops(node.params, shapes, results)
        if node.is_recomputed:
            work.repeated += count
        else:
            work.flops += count


def limits_section(program: Program) -> Section:
    """What limits a program, as a part of a report."""
    found = limits(program)
    parts: tuple[Plain, ...] = (Paragraph(text=_summary(program, found)), _table(found))
    return Section(title=f"limits: {_flops_text(found.flops)} per call", parts=parts)


def _summary(program: Program, found: Limits) -> str:
    total = sum(found.seconds.values())
    spent = ", ".join(f"{name} {_percent(s / total)}" for name, s in found.seconds.items() if s > 0)
    spent = spent or "nothing"
    repeated = (
        f", beside {_flops_text(found.repeated)} that the backward pass repeats"
        if found.repeated
        else ""
    )
    by_hand = (
        f". {counted(found.by_hand, 'region')} written by hand: FLOPs and time are not counted"
        if found.by_hand
        else ""
    )
    return (
        f"{_flops_text(found.flops)} in products on {counted(program.mesh.num_devices, 'device')}"
        f"{repeated}. Predicted utilisation (MFU): {_percent(found.utilisation)}, which is FLOPs /"
        f" (modelled time x {_flops_text(found.peak)}/s, the peak of all devices for 16-bit"
        f" products). The modelled time,"
        f" {seconds_text(found.modelled)}, is spent on {spent}. It is computed by a cost model for"
        f" hardware {program.mesh.hardware.name}; nothing was measured{by_hand}"
    )


def _table(found: Limits) -> Table:
    total = sum(found.seconds.values())
    columns = (
        Column(heading="part", wraps=True),
        Column(heading="pass"),
        Column(heading="FLOPs", right=True),
        Column(heading="modelled", right=True),
        Column(heading="share", right=True),
        Column(heading="bound by", wraps=True),
    )
    works = sorted((w for w in found.works if w.total), key=lambda w: -w.total)
    rows = tuple(
        TableRow(
            cells=(
                w.place,
                w.phase,
                _flops_text(w.flops),
                seconds_text(w.total),
                _percent(w.total / total),
                f"{w.bound} ({_percent(w.seconds[w.bound] / w.total)})",
            )
        )
        for w in works
    )
    rest = rows[SHOWN_PLACES:]
    return Table(
        columns=columns,
        rows=rows[:SHOWN_PLACES],
        folded=rest,
        rest=f"and {counted(len(rest), 'smaller part')}" if rest else "",
    )


def _flops_text(flops: float) -> str:
    """A number of operations with three significant digits and a unit of thousands."""
    units = ["", "K", "M", "G", "T", "P", "E"]
    while flops >= 1000 and len(units) > 1:
        flops /= 1000
        units.pop(0)
    return f"{flops:.3g} {units[0]}FLOP"


def _percent(share: float) -> str:
    return f"{100 * share:.3g}%"
