"""Answers about plans as pages: `plan.why(name)`, the type of a value with its origin, the prices
of other types and the reasons of its conversions; and `plan.diff(other)`, two plans together."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

from sbp.errors import counted, seconds_text
from sbp.explain.origins import Link, without_passing
from sbp.explain.subjects import (
    Difference,
    SourcePlace,
    Subject,
    TrafficDifference,
    ValueDifference,
    compare,
)
from sbp.explain.why import Alternative, AxisStory, ExplainedConversion, Why
from sbp.infer.space import decode
from sbp.infer.typing import OPTIMAL_GAP
from sbp.machine.mesh import MeshSpec
from sbp.plan.program import Cost, Program, change_text, place
from sbp.report.parts import Facts, Page, Part, Section, Table, sentences, table, table_section
from sbp.report.report import Shown
from sbp.report.wording import (
    bytes_text,
    deferred_text,
    full_maker_text,
    full_need_text,
    place_cell,
    place_text,
    refusal_text,
    signed_text,
    size_text,
)
from sbp.signatures import Row
from sbp.source.reader import source_text

# ---- links --------------------------------------------------------------------------------------
# The origin of an atom of a value, in words.


_LINKS = {
    "annotation": "pinned by {annotation}",
    "free annotation": "left free by the annotation",
    "input": "pinned by the input's type",
    "output": "pinned by the output's type",
    "free input": "an input whose type is left free",
    "free output": "an output whose type is left free",
    "donated output": "it replaces the input {donor} in the next call, and so has its type",
    "row": "{row}",
    "new": "{row}",
    "converted": "made as {made} and converted for {op}",
    "converted result": "made as {made} and converted where the body returns it",
    "carry": "one type over all trips, chosen with what the body returns",
    "body input": "as it comes into the body of {op}",
    "body carry": "what the body of {op} carries",
    "body result": "what the body of {op} returns",
}


def link_text(link: Link) -> str:
    """How one value of a chain of origins got its atom."""
    op, span = ("", None) if link.node is None else (link.node.name, link.node.span)
    return _LINKS[link.kind].format(
        annotation=f"`{source_text(span, 60)}`" if span else "an annotation",
        donor=link.donor,
        row=_row_text(link.row, link, op) if link.row else "",
        made=repr(decode(link.made)),
        op=op,
    )


def _row_text(row: Row, link: Link, op: str) -> str:
    """The row of an operation."""
    kernel = "" if row.kernel == "local" else f" by its kernel {row.kernel!r}"
    return f"{op}: {row}{kernel}" if row.ins else f"{op} makes it {', '.join(map(repr, row.outs))}"


# ---- why ----------------------------------------------------------------------------------------


SHOWN_LINKS, SHOWN_TYPES, SHOWN_CONVERSIONS, SHOWN_OTHERS = 6, 8, 3, 4


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class Explanation(Shown):
    """The result of `plan.why(name)`. It shows itself; `why` has the figures.

    Arguments:
      why: the answer as data: `why.type`, `why.alternatives`, `why.conversions`, ..
    """

    why: Why


def explanation(why: Why, mesh: MeshSpec) -> Explanation:
    """The answer with its page."""
    title = f"why {_name(why.subject)} is {why.type!r} on mesh {mesh}"
    return Explanation(page=Page(title=title, parts=(*_parts(why, mesh),)), why=why)


def _parts(why: Why, mesh: MeshSpec) -> Iterator[Part]:
    yield _head(why)
    if len(why.types) > 1:
        copies = ", ".join(f"{t!r} {counted(n, 'time')}" for t, n in why.types)
        yield (
            "the program makes it more than once, in unrolled layers or in rematerialisation:"
            f" {copies}"
        )
    yield from (_axis(why, story) for story in why.axes)
    yield from (_alternatives(why), _conversions(why, mesh))
    if why.others:
        yield table_section(
            "of the same name or line",
            why.others,
            {
                "value": lambda one: _name(one[0]),
                "type": lambda one: repr(one[1]),
                "line": lambda one: (
                    place_cell(one[0].place)
                    or {"input": "an input", "output": "an output"}.get(one[0].kind, "")
                ),
            },
            shown=SHOWN_OTHERS,
        )


def _name(subject: Subject) -> str:
    what = {"input": "input ", "output": "output "}.get(
        subject.kind,
        "gradient of " if subject.gradient and not subject.label.isidentifier() else "",
    )
    return f"{what}`{subject.label.replace('`', '')}`"


def _head(why: Why) -> Facts:
    shape = f"{why.dtype}[{','.join(map(str, why.shape))}]"
    local = f"[{','.join(map(str, why.local_shape))}]"
    place, (sent, time) = why.subject.place, _figures(why.cost)
    return Facts(
        pairs=(
            (
                "value",
                f"{shape}, {local} on one device: {bytes_text(why.bytes_per_device)} per device",
            ),
            *([("made", place_text(place))] if place is not None else []),
            ("plan", f"{sent} sent per device, {time}"),
        )
    )


# ---- axes ---------------------------------------------------------------------------------------


def _axis(why: Why, story: AxisStory) -> Section:
    links = without_passing(story.links)
    # The ends of a chain say most.
    order = [*links[: SHOWN_LINKS - 1], *links[-1:], *links[SHOWN_LINKS - 1 : -1]]
    return table_section(
        f"on `{story.mesh_axis}` {story.atom}: {verdict(why, story)}",
        links if len(links) <= SHOWN_LINKS else order,
        {
            "value": lambda link: str(link.subject),
            "type": lambda link: repr(decode(link.atom)),
            "because": link_text,
            "line": lambda link: place_cell(link.place),
        },
        shown=SHOWN_LINKS,
        rest=lambda left: f"and {counted(len(left), 'more value')} between the last two rows",
    )


def verdict(why: Why, story: AxisStory) -> str:
    """Whether an atom is pinned, forced or chosen by its cost, and then by how much.

    A plan with one more annotation may be cheaper than a plan that is proved cheapest, because
    policies do not apply to annotations.
    """
    best = story.next_best
    if story.pinned:
        if best is None or best.cost is None or best.type is None:
            return "pinned here"
        if best.cost.seconds > why.cost.seconds:
            return "pinned here; sbp found no cheaper plan without this pin"
        return (
            f"pinned here; left free it would be {best.type.get(story.mesh_axis)!r},"
            f" {difference(best.cost, why.cost)}"
        )
    if best is None or best.cost is None:
        return "other types were not tried" if why.untried else "no other type was found"
    atom, gap = dict(best.wanted).get(story.mesh_axis, "another"), difference(best.cost, why.cost)
    if story.links[0].kind == "donated output":
        replaced = "the type of the input that it replaces"
        return f"{replaced}; pinned in out_types, it could be {atom}, {gap}"
    if abs(best.cost.seconds - why.cost.seconds) <= OPTIMAL_GAP * why.cost.seconds:
        return f"chosen among equals; {atom} takes the same time"
    if best.cost.seconds > why.cost.seconds:
        tried = " of the types that sbp tried" * (why.untried > 0)
        return f"chosen by cost; next best{tried} {atom}, {gap}"
    return (
        f"found by sbp's search; pinned as {atom} it is {gap}: either the search missed this"
        " type, or a boxing policy forbids it without a pin"
    )


def difference(cost: Cost, base: Cost) -> str:
    """The difference between two costs: time, its share, and bytes sent.

    >>> cost = lambda n: Cost(bytes_per_device=4 * n, seconds=n, peak_memory_bytes=0)
    >>> dear, cheap = cost(3.0), cost(2.0)
    >>> difference(dear, cheap)
    '+1 s (+50.0%), +4.0 B sent'
    """
    time, sent = cost.seconds - base.seconds, cost.bytes_per_device - base.bytes_per_device
    share = f" ({100 * time / base.seconds:+.1f}%)" if abs(time) >= 5e-4 * base.seconds > 0 else ""
    first = (
        "the same time"
        if abs(time) <= OPTIMAL_GAP * base.seconds
        else f"{signed_text(time, seconds_text)}{share}"
    )
    return f"{first}, {signed_text(sent, bytes_text)} sent" if sent else first


# ---- alternatives -------------------------------------------------------------------------------


def _alternatives(why: Why) -> Section:
    dearer = len(why.alternatives) - SHOWN_TYPES
    left = {
        counted(dearer, "more type"): dearer > 0,
        f"{counted(why.untried, 'type')} not tried; plan.why(.., refine=True) tries"
        " more": why.untried,
    }
    made = table(
        ("pinned", "type in that plan", ">sent per device", ">time", "difference"),
        (
            ("this plan", repr(why.type), *_figures(why.cost), ""),
            *(_alternative(why, a) for a in why.alternatives),
        ),
        shown=1 + SHOWN_TYPES,
    )
    made = replace(made, rest=f"and {sentences(left, '; ')}" if any(left.values()) else "")
    return Section(title="other types, with the plan that each gives", parts=(made,))


def _alternative(why: Why, one: Alternative) -> tuple[str, ...]:
    return (
        (one.change, "no typing", "", "", refusal_text(one.refusal) if one.refusal else "")
        if one.cost is None
        else (one.change, repr(one.type), *_figures(one.cost), difference(one.cost, why.cost))
    )


def _figures(cost: Cost) -> tuple[str, str]:
    return bytes_text(cost.bytes_per_device), seconds_text(cost.seconds)


# ---- conversions --------------------------------------------------------------------------------


def _conversions(why: Why, mesh: MeshSpec) -> Section:
    if not why.conversions:
        return Section(
            title="conversions",
            parts=("none: every operation that reads the value takes this type",),
        )
    return table_section(
        f"conversions: {counted(len(why.conversions), 'kind')},"
        f" {size_text(why.conversions)} per device",
        why.conversions,
        {
            "step": lambda c: ", ".join(s.kind for s in c.steps),
            "mesh axes": lambda c: ", ".join(
                dict.fromkeys(mesh.names[k] for s in c.steps for k in s.mesh_axes)
            ),
            "change": lambda c: ", ".join(dict.fromkeys(map(change_text, c.steps))),
            ">runs": lambda c: str(c.runs),
            ">per device": lambda c: bytes_text(c.bytes_per_device),
        },
        detail=lambda c: conversion_text(why, c),
        shown=SHOWN_CONVERSIONS,
        rest=lambda left: f"and {len(left)} more: {size_text(left)} per device",
    )


def conversion_text(why: Why, one: ExplainedConversion) -> str:
    """The maker and the reader of a converted value, and the cost of the plan with the conversion
    elsewhere."""
    need, takes = one.reason.need, "take" if one.others > 1 else "takes"
    more = f"; {counted(one.others, 'more reader')} {takes} the result" if one.others else ""
    text = f"made by {full_maker_text(one.reason)}; {full_need_text(need, why.output_names)}{more}"
    outcome = (
        f"no typing ({refusal_text(one.instead.refusal)})"
        if one.instead and one.instead.refusal
        else difference(one.instead.cost, why.cost)
        if one.instead and one.instead.cost
        else "not tried"
    )
    instead = f". {deferred_text(need, why.output_names)}: {outcome}"
    return text if need.is_forced else text + instead


# ---- comparison ---------------------------------------------------------------------------------


SHOWN_SENT, SHOWN_VALUES, SHOWN_BOUNDARY = 5, 6, 4


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class Comparison(Shown):
    """The result of `plan.diff(other)`. It shows itself; `difference` has the figures."""

    difference: Difference


def comparison(
    titles: tuple[str, str],
    programs: tuple[Program, Program],
    output_names: tuple[tuple[str, ...], tuple[str, ...]],
) -> Comparison:
    """Two plans compared (`sbp.explain.subjects.compare`)."""
    found = compare(titles, programs, output_names)
    names = " and ".join(f"`{title}`" for title in dict.fromkeys(titles))
    page = Page(title=f"{names}: this plan and the other", parts=(*_differences(found),))
    return Comparison(page=page, difference=found)


def _differences(found: Difference) -> Iterator[Part]:
    if len(set(found.titles)) > 1:
        yield (
            f"these are plans of different functions; {counted(found.matched, 'value')} with"
            " the same name or line text"
        )
    if found.same:
        yield "nothing differs"
        return
    yield Section(title="cost of a call, per device", parts=(_costs(found),))
    if found.sent:
        yield _sent(found.sent)
    yield from _values("input", found.inputs, SHOWN_BOUNDARY)
    yield from _values("output", found.outputs, SHOWN_BOUNDARY)
    yield from _values("value", found.values, SHOWN_VALUES)
    alike = found.matched - len(found.inputs) - len(found.outputs) - len(found.values)
    both = zip(found.unmatched, ("this", "the other"), strict=True)
    only = " and ".join(f"{n} only in {which}" for n, which in both if n)
    yield f"{counted(alike, 'value')} of the same type in both{'; ' if only else ''}{only}"


def _costs(found: Difference) -> Table:
    def row(
        name: str, text: Callable[[float], str], figure: Callable[[Cost], float]
    ) -> tuple[str, ...]:
        x, y = map(figure, found.costs)
        share = f" ({100 * (y - x) / x:+.1f}%)" if x and y != x else ""
        return name, text(x), text(y), f"{signed_text(y - x, text)}{share}" if y != x else "none"

    in_host = any(cost.host_memory_bytes for cost in found.costs)
    rows = (
        row("sent", bytes_text, lambda cost: cost.bytes_per_device),
        row("modelled time", seconds_text, lambda cost: cost.seconds),
        row("peak memory", bytes_text, lambda cost: round(cost.peak_memory_bytes)),
        row("host memory", bytes_text, lambda cost: cost.host_memory_bytes),
    )
    return table(("cost", ">this", ">other", ">difference"), rows if in_host else rows[:-1])


def _values(noun: str, found: Sequence[ValueDifference], shown: int) -> Iterator[Section]:
    if found:
        yield table_section(
            f"{counted(len(found), noun)} of another type",
            found,
            {
                noun: lambda d: f"{'gradient of ' if d.is_gradient else ''}`{d.name}`",
                "this": lambda d: repr(d.this.type),
                "other": lambda d: repr(d.other.type),
                ">per device": lambda d: bytes_text(d.this.bytes_per_device),
                ">other's": lambda d: bytes_text(d.other.bytes_per_device),
                "line": lambda d: (
                    place(d.this.place.span) if d.this.place and d.this.place.span else ""
                ),
            },
            shown=shown,
            rest=lambda left: f"and {len(left)} smaller",
        )


def _sent(found: Sequence[TrafficDifference]) -> Section:
    def sent(runs: int, bytes_per_device: float) -> str:
        return f"{bytes_text(bytes_per_device)} in {counted(runs, 'run')}" if runs else "none"

    return table_section(
        f"conversions that differ: {counted(len(found), 'kind')}, {_more_text(found)}",
        found,
        {
            "step": lambda d: d.send.kind,
            "mesh axes": lambda d: ", ".join(d.send.mesh_axes),
            "change": lambda d: d.send.change,
            ">this": lambda d: sent(d.runs[0], d.bytes_per_device[0]),
            ">other": lambda d: sent(d.runs[1], d.bytes_per_device[1]),
        },
        detail=_ends,
        shown=SHOWN_SENT,
        rest=lambda left: f"and {len(left)} more: {_more_text(left)}",
    )


def _more_text(found: Sequence[TrafficDifference]) -> str:
    return f"{signed_text(sum(d.bytes_more for d in found), bytes_text)} in the other"


def _ends(one: TrafficDifference) -> str:
    """The maker and the reader of a value that is sent."""
    made, read = (
        f" {place_text(SourcePlace.of(n))}" if n else "" for n in (one.send.maker, one.send.reader)
    )
    return f"{one.made}{made}" + (f", for {one.read}{read}" if one.read else "")
