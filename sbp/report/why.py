"""Why -> page: the type of a value, its origin, the prices of other types, the reasons of its
conversions."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import assert_never

from sbp.explain.alternatives import Outcome
from sbp.explain.answers import Alternative, AxisStory, Why
from sbp.explain.conversions import ExplainedConversion
from sbp.explain.origins import Link, Partner, without_passing
from sbp.explain.subjects import Subject
from sbp.infer.space import decode
from sbp.machine.mesh import MeshSpec
from sbp.plan.program import Cost
from sbp.plan.text import change_text
from sbp.report.parts import Facts, Page, Paragraph, Part, Section, Table, table
from sbp.report.reasons import deferred_text, full_maker_text, full_need_text, refusal_text
from sbp.report.report import Shown
from sbp.report.wording import (
    atoms_text,
    bytes_text,
    counted,
    place_cell,
    place_text,
    seconds_text,
    signed,
)
from sbp.source.reader import source_text

# ---- links --------------------------------------------------------------------------------------
# The origin of an atom of a value, in words.


def link_text(link: Link) -> str:
    """How one value of a chain of origins got its atom."""
    op = "" if link.node is None else link.node.name
    match link.kind:
        case "annotation":
            span = None if link.node is None else link.node.span
            return f"pinned by `{source_text(span, 60)}`" if span else "pinned by an annotation"
        case "free annotation":
            return "left free by the annotation"
        case "input" | "output":
            return f"pinned by the {link.kind}'s type"
        case "free input":
            return "an input whose type is left free"
        case "free output":
            return "an output whose type is left free"
        case "donated output":
            return f"it takes the buffer, and so the type, of the donated input {link.donor}"
        case "row" | "new":
            return _row_text(link, op)
        case "converted":
            return f"made as {decode(link.made)!r} and converted for {op}"
        case "converted result":
            return f"made as {decode(link.made)!r} and converted where the body returns it"
        case "carry":
            return "one type over all trips, chosen with what the body returns"
        case "body input":
            return f"as it comes into the body of {op}"
        case "body carry" | "body result":
            return f"what the body of {op} {'carries' if link.kind == 'body carry' else 'returns'}"
        case "more":
            return f"and so on over {counted(link.left_out, 'value')}"
        case _:
            assert_never(link.kind)


def _row_text(link: Link, op: str) -> str:
    """The row of an operation, with the other operands that decide the atom and their origins."""
    assert link.row is not None
    kernel = f" by its kernel {link.kernel!r}" if link.kernel else ""
    text = (
        f"{op}: {atoms_text(link.row.ins)} -> {atoms_text(link.row.outs)}{kernel}"
        if link.row.ins
        else f"{op} makes it {atoms_text(link.row.outs)}"
    )
    partners = ", ".join(f"{p.name} is {_partner_text(p)}" for p in link.partners)
    return f"{text}; {partners}" if partners else text


def _partner_text(partner: Partner) -> str:
    """The atom of another operand, and the end of its chain of origins."""
    atom, end = repr(decode(partner.atom)), partner.end
    if end.kind == "annotation" and end.place is not None:
        return f"{atom}, pinned {place_text(end.place)}"
    if end.kind not in ("input", "free input"):
        return atom
    return f"{atom}, an input" if end.subject == partner.name else f"{atom}, from {end.subject}"


# ---- answers ------------------------------------------------------------------------------------


SHOWN_LINKS, SHOWN_TYPES, SHOWN_CONVERSIONS, SHOWN_OTHERS = 6, 8, 3, 4

SAME = 1e-6
"""Share of a plan's time below which two plans are called equal: the chooser breaks ties by
less."""


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class Explanation(Shown):
    """The result of `plan.why(name)`. It shows itself; `why` has the figures.

    Arguments:
      why: the answer as data: `why.type`, `why.alternatives`, `why.conversions`, ..
    """

    why: Why

    def __repr__(self) -> str:
        return self.text()


def explanation(why: Why, mesh: MeshSpec) -> Explanation:
    """The answer with its page."""
    return Explanation(page=page(why, mesh), why=why)


def page(why: Why, mesh: MeshSpec) -> Page:
    """An answer as parts."""
    parts: list[Part] = [_head(why)]
    if len(why.types) > 1:
        copies = ", ".join(f"{t!r} {counted(n, 'time')}" for t, n in why.types)
        parts.append(
            Paragraph(
                text=(
                    "the program makes it more than once, in unrolled layers or in"
                    f" rematerialisation: {copies}"
                )
            )
        )
    parts += [_axis(why, story) for story in why.axes]
    parts.append(_alternatives(why))
    parts += _conversions(why)
    if why.others:
        parts.append(_others(why.others))
    return Page(
        title=f"why {_name(why.subject)} is {why.type!r} on mesh {mesh}", parts=tuple(parts)
    )


def _name(subject: Subject) -> str:
    name = f"`{subject.label.replace('`', '')}`"
    what = {"input": "input ", "output": "output "}.get(
        subject.kind,
        "gradient of " if subject.gradient and not subject.label.isidentifier() else "",
    )
    return what + name


def _head(why: Why) -> Facts:
    shape = f"{why.dtype}[{','.join(map(str, why.shape))}]"
    local = f"[{','.join(map(str, why.local_shape))}]"
    pairs = [
        ("value", f"{shape}, {local} on one device: {bytes_text(why.bytes_per_device)} per device")
    ]
    if why.subject.place is not None:
        pairs.append(("made", place_text(why.subject.place)))
    pairs.append(("plan", _cost(why.cost)))
    return Facts(pairs=tuple(pairs))


def _cost(cost: Cost) -> str:
    return f"{bytes_text(cost.bytes_per_device)} sent per device, {seconds_text(cost.seconds)}"


# ---- axes ---------------------------------------------------------------------------------------


def _axis(why: Why, story: AxisStory) -> Section:
    links = without_passing(story.links)
    rows = [
        (str(link.subject), repr(decode(link.atom)), link_text(link), place_cell(link.place))
        for link in links
    ]
    if len(rows) > SHOWN_LINKS:  # the ends of a chain say most
        rows.insert(SHOWN_LINKS - 1, rows.pop())
    made = table(
        ("value", "type", "because", "line"),
        rows,
        shown=SHOWN_LINKS,
        rest="and {} more between the last two".format,
    )
    return Section(
        title=f"on `{story.mesh_axis}` {story.atom}: {verdict(why, story)}", parts=(made,)
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
        return (
            f"pinned here; left free it would be {best.type.get(story.mesh_axis)!r},"
            f" {difference(best.cost, why.cost)}"
        )
    if best is None or best.cost is None:
        return "no other typing" if story.tried else "no other type was tried"
    atom = dict(best.wanted).get(story.mesh_axis, "another")
    if story.links[0].kind == "donated output":
        return (
            f"as the donated input; {atom} if the output's type were given,"
            f" {difference(best.cost, why.cost)}"
        )
    if abs(best.cost.seconds - why.cost.seconds) <= SAME * why.cost.seconds:
        return f"chosen among equals; {atom} costs the same"
    if best.cost.seconds < why.cost.seconds:
        gap = difference(best.cost, why.cost)
        if why.proved and why.evades:
            return (
                "the cheapest under the boxing policy; an annotation may convert what that"
                f" forbids, {atom} is {gap}"
            )
        more = (
            ", and an annotation may convert what the policy forbids" if why.evades else ""
        )  # within the gap that the report states
        return (
            f"found by the chooser, which does not always find the cheapest{more}; {atom} is {gap}"
        )
    return f"chosen by cost; next best {atom}, {difference(best.cost, why.cost)}"


def difference(cost: Cost, base: Cost) -> str:
    """The difference between two costs: time, its share, and bytes sent.

    >>> cost = lambda n: Cost(bytes_per_device=4 * n, seconds=n, peak_memory_bytes=0)
    >>> dear, cheap = cost(3.0), cost(2.0)
    >>> difference(dear, cheap)
    '+1 s (+50.0 %), +4.0 B sent'
    """
    time, sent = cost.seconds - base.seconds, cost.bytes_per_device - base.bytes_per_device
    share = f" ({100 * time / base.seconds:+.1f} %)" if abs(time) >= 5e-4 * base.seconds > 0 else ""
    first = (
        "the same time"
        if abs(time) <= SAME * base.seconds
        else f"{signed(time, seconds_text)}{share}"
    )
    return f"{first}, {signed(sent, bytes_text)} sent" if sent else first


# ---- alternatives -------------------------------------------------------------------------------


def _alternatives(why: Why) -> Section:
    dearer = len(why.alternatives) - SHOWN_TYPES
    left = [counted(dearer, "dearer type")] if dearer > 0 else []
    if why.untried:
        types = counted(why.untried, "type")
        left.append(f"{types} not tried; plan.why(.., refine=True) tries more")
    if why.untried_pairs:
        left.append(f"{counted(why.untried_pairs, 'pair')} of atoms on two mesh axes not tried")
    made = table(
        ("pinned", "type then", ">sent per device", ">time", "difference"),
        (
            ("as it is", repr(why.type), *_figures(why.cost), ""),
            *(_alternative(why, a) for a in why.alternatives),
        ),
        shown=1 + SHOWN_TYPES,
    )
    made = replace(made, rest=f"and {'; '.join(left)}" if left else "")
    return Section(title="other types, each planned anew", parts=(made,))


def _alternative(why: Why, one: Alternative) -> tuple[str, ...]:
    if one.cost is None:
        reason = "" if one.outcome.refusal is None else refusal_text(one.outcome.refusal)
        return one.change, "no typing", "", "", reason
    return one.change, repr(one.type), *_figures(one.cost), difference(one.cost, why.cost)


def _figures(cost: Cost) -> tuple[str, str]:
    return bytes_text(cost.bytes_per_device), seconds_text(cost.seconds)


# ---- conversions --------------------------------------------------------------------------------


def _conversions(why: Why) -> Iterator[Section]:
    own, onward = (
        [c for c in why.conversions if c.onward == is_onward] for is_onward in (False, True)
    )
    if own:
        total = bytes_text(sum(c.bytes_per_device for c in own))
        yield Section(
            title=f"conversions: {counted(len(own), 'kind')}, {total} per device",
            parts=(_steps(why, own),),
        )
    elif not onward:
        yield Section(
            title="conversions",
            parts=(Paragraph(text="none: every reader takes it as it is made"),),
        )
    if onward:
        yield Section(
            title="it goes on partial, and what is made of it is reduced",
            parts=(_steps(why, onward),),
        )


def _steps(why: Why, found: Sequence[ExplainedConversion]) -> Table:
    rows = (
        (
            ", ".join(s.kind for s in one.steps),
            ", ".join(dict.fromkeys(one.mesh.names[k] for s in one.steps for k in s.mesh_axes)),
            ", ".join(dict.fromkeys(map(change_text, one.steps))),
            str(one.runs),
            bytes_text(one.bytes_per_device),
        )
        for one in found
    )
    sent = bytes_text(sum(c.bytes_per_device for c in found[SHOWN_CONVERSIONS:]))
    return table(
        ("step", "mesh axes", "change", ">runs", ">per device"),
        rows,
        details=(conversion_text(why, one) for one in found),
        shown=SHOWN_CONVERSIONS,
        rest=lambda n: f"and {n} more: {sent} per device",
    )


def conversion_text(why: Why, one: ExplainedConversion) -> str:
    """The maker and the reader of a converted value, and the cost of the plan with the conversion
    elsewhere."""
    made = full_maker_text(one.reason, one.value)
    needed = full_need_text(one.reason.need, why.output_names)
    takes = "take" if one.others > 1 else "takes"
    more = f"; {counted(one.others, 'more reader')} {takes} the result" if one.others else ""
    text = f"made by {made}; {needed}{more}"
    if one.reason.need.is_forced:
        return text
    elsewhere = deferred_text(one.reason.need, why.output_names)
    outcome = "not tried" if one.instead is None else _outcome_text(one.instead, why.cost)
    return f"{text}. {elsewhere}: {outcome}"


def _outcome_text(outcome: Outcome, base: Cost) -> str:
    if outcome.refusal is not None:
        return f"no typing ({refusal_text(outcome.refusal)})"
    assert outcome.cost is not None
    return difference(outcome.cost, base)


def _others(found: Sequence[tuple[Subject, object]]) -> Section:
    """Other values with the same name or line."""
    boundary = {"input": "an input", "output": "an output"}
    rows = (
        (_name(s), repr(type_), place_cell(s.place) or boundary.get(s.kind, ""))
        for s, type_ in found
    )
    made = table(("value", "type", "line"), rows, shown=SHOWN_OTHERS)
    return Section(title="of the same name or line", parts=(made,))
