"""The settings that differ between two plans: mesh, hardware, policies, limits, budgets, donation
and pins."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

from sbp.explain.names import Names
from sbp.explain.pinning import Types
from sbp.infer.constraints import pin_sites
from sbp.infer.request import Request
from sbp.infer.space import decode
from sbp.limits import Policy, policies_in
from sbp.machine.hardware import Hardware
from sbp.machine.table import HARDWARE
from sbp.plan.program import Program
from sbp.source.reader import source_text, users_span
from sbp.trace.graph import Graph
from sbp.types import Atom

SettingKind = Literal[
    "function",
    "mesh",
    "hardware",
    "figure",
    "network",
    "boxing",
    "memory limit",
    "budgets",
    "reduce_dtype",
    "donated",
    "policy",
    "input",
    "output",
    "annotation",
]


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """A setting that differs between two plans.

    Arguments:
      kind: which setting. "figure": a figure of the hardware; "network": that of a mesh axis;
        "policy": the policies around a line; "input", "output" and "annotation": a pin.
      subject: the figure, the mesh axis, the text of the line, or the name of the pinned value;
        empty for other kinds.
      this, other: the setting of each plan, by kind. Names, numbers, bytes, budgets and dtypes
        are themselves, or None; a mesh is (mesh axis, size) pairs, hardware a `HardwareName`, a
        figure a number or a `Network`, boxing a `ProgramPolicies`, the policies around a line
        `LinePolicies`, pins `PinnedAtoms` for each pin.
    """

    kind: SettingKind
    subject: str = ""
    this: Any
    other: Any


@dataclass(frozen=True, slots=True, kw_only=True)
class HardwareName:
    """A description of hardware by its name.

    Arguments:
      name: the name.
      is_known: whether it has the figures of the table.
    """

    name: str
    is_known: bool

    @classmethod
    def of(cls, hardware: Hardware) -> HardwareName:
        """The name of hardware, the networks of its mesh axes left out."""
        known = HARDWARE.get(hardware.name)
        figures = known is None or dataclasses.replace(hardware, slow_axes=known.slow_axes)
        return cls(name=hardware.name, is_known=known is None or figures == known)


@dataclass(frozen=True, slots=True, kw_only=True)
class ProgramPolicies:
    """The policies of a program: for mesh axes without one of their own, and for each axis."""

    boxing: Policy
    axis_policies: tuple[Policy | None, ...]
    axes: tuple[str, ...]

    @classmethod
    def of(cls, request: Request) -> ProgramPolicies:
        """The policies of a request."""
        policies, axes = request.axis_policies, request.mesh.names
        return cls(boxing=request.boxing, axis_policies=policies, axes=axes)

    def on(self, axis: str) -> Policy:
        """The policy of a mesh axis."""
        own = dict(zip(self.axes, self.axis_policies, strict=False)).get(axis)
        return own or self.boxing


@dataclass(frozen=True, kw_only=True)
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

    @functools.cached_property
    def types(self) -> Types:
        """The types of its subjects."""
        return Types.of(self.program, self.program.request.graph)


def settings(this: ComparedPlan, other: ComparedPlan) -> Iterator[Setting]:
    """The settings that differ between two plans."""
    a, b = this.program.request, other.program.request
    yield from _differing("function", this.title, other.title)
    meshes = [tuple(zip(q.mesh.names, q.mesh.sizes, strict=True)) for q in (a, b)]
    yield from _differing("mesh", *meshes)
    yield from _hardware(a.mesh.hardware, b.mesh.hardware)
    ours, theirs = ProgramPolicies.of(a), ProgramPolicies.of(b)
    if any(ours.on(axis) != theirs.on(axis) for axis in (*a.mesh.names, *b.mesh.names)):
        yield Setting(kind="boxing", this=ours, other=theirs)
    yield from _differing("memory limit", a.memory_limit, b.memory_limit)
    yield from _differing("budgets", frozenset(a.budgets), frozenset(b.budgets))
    yield from _differing("reduce_dtype", a.reduce_dtype, b.reduce_dtype)
    yield from _differing("donated", frozenset(this.donated), frozenset(other.donated))
    yield from _regions(a.graph, b.graph)
    pins, others = _pins(this), _pins(other)
    for key in dict.fromkeys((*pins, *others)):
        x, y = pins.get(key, ()), others.get(key, ())
        if x != y:
            kind, name = key
            yield Setting(kind=kind, subject=name, this=x, other=y)


def _differing(kind: SettingKind, this: Any, other: Any) -> Iterator[Setting]:
    if this != other:
        yield Setting(kind=kind, this=this, other=other)


def _hardware(a: Hardware, b: Hardware) -> Iterator[Setting]:
    """Hardware by value: figures of one name may have been replaced, and mesh axes put on networks
    of their own."""
    yield from _differing("hardware", HardwareName.of(a), HardwareName.of(b))
    if a.name == b.name:
        for field in dataclasses.fields(a):
            x, y = getattr(a, field.name), getattr(b, field.name)
            if field.name != "slow_axes" and x != y:
                subject = f"{field.name} of {a.name}"
                yield Setting(kind="figure", subject=subject, this=x, other=y)
    ours, theirs = dict(a.slow_axes), dict(b.slow_axes)
    for axis in sorted(ours.keys() | theirs.keys()):
        if ours.get(axis) != theirs.get(axis):
            yield Setting(kind="network", subject=axis, this=ours.get(axis), other=theirs.get(axis))


LinePolicies = frozenset[tuple[tuple[Policy, str], ...]]
"""The policies around a line, one sequence of (policy, mesh axis) for each way in which the line
was traced under some; the innermost policy first, "" for all axes."""


def _regions(a: Graph, b: Graph) -> Iterator[Setting]:
    """Lines of both programs that stand under policies of their own in one."""
    ours, theirs = _policed(a), _policed(b)
    for key, policies in ours.items():
        other = theirs.get(key, policies)
        if policies != other:
            yield Setting(kind="policy", subject=key[0], this=policies, other=other)


def _policed(graph: Graph) -> dict[tuple[str, str], LinePolicies]:
    """The policies around each line of a program, by its text and function."""
    found: dict[tuple[str, str], LinePolicies] = {}
    for node in graph.walk():
        span = users_span(node)
        text = source_text(span, 44).replace("`", "'")
        if span and text:
            key = text, span.function
            around = tuple(reversed(policies_in(node.scope)))
            found[key] = found.get(key, frozenset()) | ({around} if around else set())
    return found


PinKind = Literal["input", "output", "annotation"]
PinnedAtoms = tuple[tuple[str, Atom], ...]
"""(mesh axis, atom) of a pin."""


def _pins(side: ComparedPlan) -> dict[tuple[PinKind, str], tuple[PinnedAtoms, ...]]:
    """The user's pins by the pinned value, each pin once. Types of inputs and outputs are complete,
    so B is left out there."""
    request = side.program.request
    names = Names.of(request.graph)
    found: dict[tuple[PinKind, str], tuple[PinnedAtoms, ...]] = {}
    for site in pin_sites(request):
        named = site.source == "output" and side.output_names
        name = side.output_names[site.position] if named else names.site(site)
        atoms = tuple(
            (axis, decode(c))
            for axis, c in zip(request.mesh.names, site.codes, strict=True)
            if c is not None and (c != 0 or site.source == "annotation")
        )
        key = site.source, name
        found[key] = tuple(dict.fromkeys((*found.get(key, ()), atoms)))
    return found
