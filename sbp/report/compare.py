"""Difference -> page: two plans side by side."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import starmap
from typing import Any

from sbp.explain.difference import (
    Difference,
    Traffic,
    TrafficDifference,
    TrafficEnd,
    ValueDifference,
    compare,
)
from sbp.explain.places import SourcePlace
from sbp.explain.settings import (
    ComparedPlan,
    HardwareName,
    LinePolicies,
    PinnedAtoms,
    ProgramPolicies,
    Setting,
)
from sbp.limits import Budget, policies_text
from sbp.machine.hardware import Network
from sbp.plan.text import place
from sbp.report.parts import Page, Paragraph, Part, Section, Table, table
from sbp.report.report import Shown
from sbp.report.wording import (
    bytes_text,
    counted,
    place_text,
    seconds_text,
    signed,
)

# ---- settings -----------------------------------------------------------------------------------
# What was asked differently of two plans, in words.


def setting_cells(setting: Setting) -> tuple[str, str, str]:
    """What was asked, and what each plan was asked for."""
    return _what(setting), _value(setting, setting.this), _value(setting, setting.other)


def _what(setting: Setting) -> str:
    match setting.kind:
        case "figure":
            return setting.subject
        case "network":
            return f"network of `{setting.subject}`"
        case "policy":
            return f"policy of `{setting.subject}`"
        case "input" | "output":
            return f"{setting.kind} `{setting.subject}`"
        case "annotation":
            return f"`{setting.subject}`"
        case _:
            return setting.kind


def _value(setting: Setting, value: Any) -> str:
    match setting.kind:
        case "mesh":
            return " ".join(f"{axis}={size}" for axis, size in value)
        case "hardware":
            return _hardware(value)
        case "figure":
            return _figure(value)
        case "network":
            return _figure(value) if value else "none of its own"
        case "boxing":
            return _policies(value)
        case "memory limit":
            return "none" if value is None else f"{value:.0f} B"
        case "budgets":
            return _several(map(_budget, value))
        case "reduce_dtype":
            return value or "the platform's own"
        case "donated":
            return _several(f"`{name}`" for name in value)
        case "policy":
            return _line_policies(value)
        case "input" | "output" | "annotation":
            return _pins(value)
        case _:
            return str(value)


def _several(texts: Iterable[str]) -> str:
    return ", ".join(sorted(set(texts))) or "none"


def _budget(budget: Budget) -> str:
    """A budget, its size to the byte."""
    return f"{budget} ({budget.above:.0f} B)" if budget.above else str(budget)


def _hardware(hardware: HardwareName) -> str:
    return hardware.name if hardware.is_known else f"{hardware.name} with other figures"


def _figure(value: object) -> str:
    """A value of a description of hardware. No two values look alike."""
    match value:
        case None:
            return "none"
        case Network():
            return f"{_figure(value.bytes_per_second)} B/s after {_figure(value.latency_seconds)} s"
        case float() if float(short := f"{value:g}") == value:
            return short
        case _:
            return str(value)


def _policies(policies: ProgramPolicies) -> str:
    return policies_text(policies.boxing, policies.axis_policies, policies.axes)


def _line_policies(policies: LinePolicies) -> str:
    return _several(
        ", within ".join(f"{p} on `{axis}`" if axis else p for p, axis in around)
        for around in policies
    )


def _pins(pins: tuple[PinnedAtoms, ...]) -> str:
    texts = (" ".join(f"{axis}:{atom!r}" for axis, atom in atoms) or "B" for atoms in pins)
    return "; ".join(texts) or "not pinned"


# ---- comparison ---------------------------------------------------------------------------------


SHOWN_SETTINGS, SHOWN_SENT, SHOWN_VALUES, SHOWN_BOUNDARY = 6, 5, 6, 4


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class Comparison(Shown):
    """The result of `plan.diff(other)`. It shows itself; `difference` has the figures."""

    difference: Difference

    def __repr__(self) -> str:
        return self.text()


def comparison(this: ComparedPlan, other: ComparedPlan) -> Comparison:
    """Two plans compared."""
    found = compare(this, other)
    return Comparison(page=page(found), difference=found)


def page(found: Difference) -> Page:
    """A difference as parts."""
    first, second = found.titles
    title = (
        f"`{first}`: this plan and the other"
        if first == second
        else f"`{first}` and `{second}`: this plan and the other"
    )
    parts: list[Part] = []
    if first != second:
        parts.append(
            Paragraph(
                text=(
                    f"these are plans of different functions; {counted(found.matched, 'value')}"
                    " with the same name or line text"
                )
            )
        )
    if found.same:
        return Page(title=title, parts=(*parts, Paragraph(text="nothing differs")))
    if found.settings:
        parts.append(Section(title="asked differently", parts=(_settings(found.settings),)))
    parts.append(Section(title="cost of a call, per device", parts=(_costs(found),)))
    if found.sent:
        more = sum(d.bytes_more for d in found.sent)
        title_sent = (
            f"conversions that differ: {counted(len(found.sent), 'kind')},"
            f" {signed(more, bytes_text)} in the other"
        )
        parts.append(Section(title=title_sent, parts=(_sent(found.sent),)))
    for noun, differing, shown in (
        ("input", found.inputs, SHOWN_BOUNDARY),
        ("output", found.outputs, SHOWN_BOUNDARY),
        ("value", found.values, SHOWN_VALUES),
    ):
        if differing:
            parts.append(
                Section(
                    title=f"{counted(len(differing), noun)} of another type",
                    parts=(_values(noun, differing, shown),),
                )
            )
    only = " and ".join(
        f"{n} only in {which}"
        for n, which in zip(found.unmatched, ("this", "the other"), strict=True)
        if n
    )
    alike = found.matched - len(found.inputs) - len(found.outputs) - len(found.values)
    parts.append(
        Paragraph(
            text=f"{counted(alike, 'value')} of the same type in both"
            + (f"; {only}" if only else "")
        )
    )
    return Page(title=title, parts=tuple(parts))


def _settings(found: Sequence[Setting]) -> Table:
    return table(("what", "this", "other"), map(setting_cells, found), shown=SHOWN_SETTINGS)


def _costs(found: Difference) -> Table:
    a, b = found.costs
    figures: list[tuple[str, float, float, Callable[[float], str]]] = [
        ("sent", a.bytes_per_device, b.bytes_per_device, bytes_text),
        ("modelled time", a.seconds, b.seconds, seconds_text),
        ("peak memory", a.peak_memory_bytes, b.peak_memory_bytes, bytes_text),
    ]
    if a.host_memory_bytes or b.host_memory_bytes:
        figures.append(("host memory", a.host_memory_bytes, b.host_memory_bytes, bytes_text))

    def row(name: str, x: float, y: float, text: Callable[[float], str]) -> tuple[str, ...]:
        share = f" ({100 * (y - x) / x:+.1f} %)" if x and y != x else ""
        return name, text(x), text(y), f"{signed(y - x, text)}{share}" if y != x else "none"

    return table(("cost", ">this", ">other", ">difference"), starmap(row, figures))


def _values(noun: str, found: Sequence[ValueDifference], shown: int) -> Table:
    rows = (
        (
            f"{'gradient of ' if d.is_gradient else ''}`{d.name}`",
            repr(d.this.type),
            repr(d.other.type),
            bytes_text(d.this.bytes_per_device),
            bytes_text(d.other.bytes_per_device),
            "" if d.this.place is None or d.this.place.span is None else place(d.this.place.span),
        )
        for d in found
    )
    headings = (noun, "this", "other", ">per device", ">other's", "line")
    return table(headings, rows, shown=shown, rest="and {} smaller".format)


def _sent(found: Sequence[TrafficDifference]) -> Table:
    def sent(one: Traffic | None) -> str:
        if one is None:
            return "none"
        return f"{bytes_text(one.bytes_per_device)} in {counted(one.runs, 'run')}"

    rows = (
        (d.key.kind, ", ".join(d.key.mesh_axes), d.key.change, sent(d.this), sent(d.other))
        for d in found
    )
    more = signed(sum(d.bytes_more for d in found[SHOWN_SENT:]), bytes_text)
    return table(
        ("step", "mesh axes", "change", ">this", ">other"),
        rows,
        details=map(_ends, found),
        shown=SHOWN_SENT,
        rest=lambda n: f"and {n} more: {more} in the other",
    )


def _ends(one: TrafficDifference) -> str:
    """The maker and the reader of a value that is sent."""
    key = one.key
    made = f"{_end(key.maker, 'an argument of a body')}{_at(one.made_at)}"
    if key.reader is None:
        return made
    return f"{made}, for {_end(key.reader, 'the end')}{_at(one.read_at)}"


def _end(end: TrafficEnd, otherwise: str) -> str:
    if not end.op:
        return f"`{end.text}`" if end.text else otherwise
    return f"{end.op} `{end.text}`" if end.text else end.op


def _at(at: SourcePlace | None) -> str:
    return "" if at is None else f" {place_text(at)}"
