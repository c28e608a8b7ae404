"""The differences between two plans: settings, costs, types of values, conversions.

The programs need not be the same. Values are matched by the user's names and by the text of their
line, not by its number.
"""

from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields
from typing import Any, NamedTuple

from sbp.explain.names import Names
from sbp.explain.pin_changes import Types
from sbp.explain.subjects import SourcePlace, Subjects, distinct
from sbp.infer.constraints import pin_sites
from sbp.infer.space import decode, from_type, local_bytes
from sbp.limits import policies_in
from sbp.plan.program import Cost, Program, Send, sends
from sbp.source.reader import source_text, users_span
from sbp.trace.graph import Node
from sbp.types import NdSbp


@dataclass(frozen=True, slots=True, kw_only=True)
class ComparedPlan:
    """One of the two plans that are compared, with the names that its user knows.

    Arguments:
      title: the function's name.
      program: the plan.
      output_names: names of the results.
      donated: names of the inputs that are donated.
    """

    title: str
    program: Program
    output_names: tuple[str, ...] = ()
    donated: tuple[str, ...] = ()


# ---- settings -----------------------------------------------------------------------------------
# The settings that differ between two plans: mesh, hardware, policies, limits, budgets, donation
# and pins.


class Setting(NamedTuple):
    """A setting that differs between two plans.

    Attributes:
      kind: which setting. "figure": a figure of the hardware; "network": that of a mesh axis;
        "policy": the policies around a line; "input", "output" and "annotation": a pin.
      subject: the figure, the mesh axis, the text of the line, or the name of the pinned value;
        empty for other kinds.
      this, other: the setting of each plan, by kind; None where a plan has none. A mesh is (mesh
        axis, size) pairs, boxing (mesh axis, policy) pairs, the policies around a line are the sets
        of (policy, mesh axis) pairs, innermost first, and pins the (mesh axis, atom) pairs of each.
    """

    kind: str
    subject: str
    this: Any
    other: Any


_OF_BOTH = frozenset({"figure", "policy"})
"""Settings that are compared where both plans have the hardware or the line."""


def settings(this: ComparedPlan, other: ComparedPlan) -> Iterator[Setting]:
    """The settings that differ between two plans."""
    ours, theirs = _settings(this), _settings(other)
    for key in dict.fromkeys((*ours, *theirs)):
        both = key in ours and key in theirs
        if ours.get(key) != theirs.get(key) and (both or key[0] not in _OF_BOTH):
            yield Setting(key[0], key[1], ours.get(key), theirs.get(key))


def _settings(side: ComparedPlan) -> dict[tuple[str, str, str], Any]:
    """The settings of a plan by kind, subject, and the function of a line."""
    request, names = side.program.request, side.program.mesh.names
    hardware, own = request.mesh.hardware, request.axis_policies or (None,) * len(names)
    policies = [policy or request.boxing for policy in own]
    found: dict[tuple[str, str, str], Any] = {
        ("function", "", ""): side.title,
        ("mesh", "", ""): tuple(zip(names, request.mesh.sizes, strict=True)),
        ("hardware", "", ""): hardware.name,
        **{
            ("figure", f"{field.name} of {hardware.name}", ""): getattr(hardware, field.name)
            for field in fields(hardware)
            if field.name != "slow_axes"
        },
        **{("network", axis, ""): network for axis, network in sorted(hardware.slow_axes)},
        # One policy for all mesh axes is the same on meshes with other axes.
        ("boxing", "", ""): (
            policies[0] if len(set(policies)) == 1 else tuple(zip(names, policies, strict=True))
        ),
        ("memory limit", "", ""): request.memory_limit,
        ("budgets", "", ""): frozenset(request.budgets),
        ("reduce_dtype", "", ""): request.reduce_dtype,
        ("donated", "", ""): frozenset(side.donated),
    }
    for node in request.graph.walk():
        span = users_span(node)
        text = source_text(span, 44).replace("`", "'")
        if span and text:
            key, around = ("policy", text, span.function), tuple(reversed(policies_in(node.scope)))
            found[key] = found.get(key, frozenset()) | ({around} if around else set())
    graph_names = Names(request.graph)
    for site in pin_sites(request):
        named = site.source == "output" and side.output_names
        name = side.output_names[site.position] if named else graph_names.site(site)
        # Types of inputs and outputs are complete, so B is left out there.
        atoms = tuple(
            (axis, decode(c))
            for axis, c in zip(request.mesh.names, site.codes, strict=True)
            if c is not None and (c != 0 or site.source == "annotation")
        )
        pins = found.get((site.source, name, ""), ())
        found[site.source, name, ""] = pins if atoms in pins else (*pins, atoms)
    return found


# ---- differences --------------------------------------------------------------------------------


class ComparedValue(NamedTuple):
    """A value in one plan: its type, the bytes of one device's shard, and its line; None for inputs
    and outputs."""

    type: NdSbp
    bytes_per_device: float
    place: SourcePlace | None


class ValueDifference(NamedTuple):
    """A value whose type is not the same in both plans, as each plan has it."""

    name: str
    is_gradient: bool
    this: ComparedValue
    other: ComparedValue


@dataclass(frozen=True, slots=True, kw_only=True)
class TrafficDifference:
    """Collectives that the plans do not have alike.

    Arguments:
      send: the first of them.
      made: the operation that makes the value or that sends, with the user's expression; or the
        name of an argument.
      read: the operation that reads the value; empty where an operation sends itself.
      runs: executions per call, in each plan.
      bytes_per_device: bytes that one device sends per call, in each plan.
    """

    send: Send
    made: str
    read: str
    runs: tuple[int, int]
    bytes_per_device: tuple[float, float]

    @property
    def bytes_more(self) -> float:
        """Bytes that the other plan sends beyond this one."""
        return self.bytes_per_device[1] - self.bytes_per_device[0]


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """All that differs between two plans; each list has most bytes first.

    Arguments:
      titles: the functions.
      settings: what was asked differently.
      costs: of a call of each.
      inputs, outputs, values: types that differ, by name.
      sent: collectives that differ.
      matched: number of values that both have, inputs and outputs included.
      unmatched: number of values that only one has, for each.
    """

    titles: tuple[str, str]
    settings: tuple[Setting, ...]
    costs: tuple[Cost, Cost]
    inputs: tuple[ValueDifference, ...]
    outputs: tuple[ValueDifference, ...]
    values: tuple[ValueDifference, ...]
    sent: tuple[TrafficDifference, ...]
    matched: int
    unmatched: tuple[int, int]

    @property
    def same(self) -> bool:
        """Whether nothing differs."""
        return (
            not (self.settings or self.inputs or self.outputs or self.values or self.sent)
            and self.costs[0] == self.costs[1]
        )


def compare(this: ComparedPlan, other: ComparedPlan) -> Difference:
    """The differences of another plan from this one."""
    ours, theirs = _values(this), _values(other)
    return Difference(
        titles=(this.title, other.title),
        settings=tuple(settings(this, other)),
        costs=(this.program.cost, other.program.cost),
        inputs=_differing("input", ours, theirs),
        outputs=_differing("output", ours, theirs),
        values=_differing("value", ours, theirs),
        sent=_traffic(this.program, other.program),
        matched=len(ours.keys() & theirs.keys()),
        unmatched=(len(ours.keys() - theirs.keys()), len(theirs.keys() - ours.keys())),
    )


ValueKey = tuple[str, str, bool, str, int]
"""The key by which values of two programs are matched: "input", "output" or "value", the user's
name or expression, whether it is the gradient of that, the function it stands in, and which of the
values with that label."""


def _values(side: ComparedPlan) -> dict[ValueKey, ComparedValue]:
    """The inputs, the outputs, and the values that the expressions of a program make. Each value
    belongs to its innermost expression; values with one label are numbered in order."""
    subjects = Subjects(side.program.request.graph, side.output_names)
    values = side.program.typing.values
    inner = (s for s in subjects.innermost(subjects.places) if any(v in values for v in s.values))
    found: dict[ValueKey, ComparedValue] = {}
    count: Counter[tuple[Any, ...]] = Counter()
    graph, mesh = side.program.request.graph, side.program.mesh
    types = Types(side.program, graph)
    for s in (*subjects.boundary(), *sorted(distinct(inner), key=lambda s: s.values[0])):
        kind = s.kind if s.kind in ("input", "output") else "value"
        alike = kind, s.label, s.gradient, s.frame.function if s.frame else ""
        t, aval = types.type_of(s), graph.avals[s.values[0]]
        size = float(local_bytes(aval, from_type(t, mesh), mesh.sizes))
        found[*alike, count[alike]] = ComparedValue(t, size, s.place)
        count[alike] += 1
    return found


def _differing(
    kind: str, ours: Mapping[ValueKey, ComparedValue], theirs: Mapping[ValueKey, ComparedValue]
) -> tuple[ValueDifference, ...]:
    """Values of both plans whose types differ, most bytes first."""
    found = [
        ValueDifference(*key[1:3], value, theirs[key])
        for key, value in ours.items()
        if key[0] == kind and key in theirs and theirs[key].type != value.type
    ]
    return tuple(
        sorted(found, key=lambda d: -max(d.this.bytes_per_device, d.other.bytes_per_device))
    )


# ---- traffic ------------------------------------------------------------------------------------


def _traffic(this: Program, other: Program) -> tuple[TrafficDifference, ...]:
    sides = _sends(this), _sends(other)
    found: list[TrafficDifference] = []
    for key in dict.fromkeys((*sides[0], *sides[1])):
        here, there = (side.get(key, []) for side in sides)
        runs = sum(send.runs for send in here), sum(send.runs for send in there)
        sent = sum(send.bytes for send in here), sum(send.bytes for send in there)
        if runs[0] != runs[1] or sent[0] != sent[1]:
            ends = {"made": key[3], "read": key[4]}
            first = (here or there)[0]
            one = TrafficDifference(send=first, **ends, runs=runs, bytes_per_device=sent)
            found.append(one)
    return tuple(sorted(found, key=lambda d: -abs(d.bytes_more)))


def _sends(program: Program) -> dict[tuple[Any, ...], list[Send]]:
    """The collectives of a plan by what they may have in common with another plan's: kind, mesh
    axes, change, maker, reader, the passes of these two, and kernel."""
    names, found = Names(program.graph), defaultdict[tuple[Any, ...], list[Send]](list)
    for s in sends(program):
        value = names.value(s.planned.box.source.value) if s.planned else ""
        made = _end(s.maker) or (f"`{value}`" if value else "an argument of a body")
        read = (_end(s.reader) or "the end") if s.planned else ""
        passes = [n.backward if n else None for n in (s.maker, s.reader)]
        found[s.kind, s.mesh_axes, s.change, made, read, *passes, s.kernel].append(s)
    return found


def _end(node: Node | None) -> str:
    """An operation that makes or reads a value; empty for none."""
    text = source_text(node.span, 44).replace("`", "'") if node else ""
    return "" if node is None else f"{node.name} `{text}`" if text else node.name
