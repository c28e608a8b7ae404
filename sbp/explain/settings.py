"""What was asked of two plans, and where that differs: mesh, hardware, policies, limits, budgets,
donation and pins."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from sbp.explain.names import Names
from sbp.explain.pinning import Types
from sbp.infer.constraints import pin_sites
from sbp.infer.request import Request
from sbp.infer.space import decode
from sbp.limits import Budget, policies_in, policies_text
from sbp.machine.hardware import HARDWARE, Hardware, Network
from sbp.plan.program import Program
from sbp.source.reader import source_text, users_span
from sbp.trace.graph import Graph

Setting = tuple[str, str, str]
"""Something that was asked: what it is, and its value for each of the two plans."""


@dataclass(frozen=True, kw_only=True)
class Side:
    """One of the two plans.

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


def settings(this: Side, other: Side) -> Iterator[Setting]:
    """What was asked differently of two plans."""
    a, b = this.program.request, other.program.request
    limits = ["none" if q.memory_limit is None else f"{q.memory_limit:.0f} B" for q in (a, b)]
    pairs = [
        ("function", this.title, other.title),
        ("mesh", str(a.mesh), str(b.mesh)),
        *_hardware(a.mesh.hardware, b.mesh.hardware),
        *_policies(a, b),
        ("memory limit", *limits),
        ("budgets", *(_several(map(_budget, q.budgets)) for q in (a, b))),
        ("reduce_dtype", *(q.reduce_dtype or "the platform's own" for q in (a, b))),
        ("donated", *(_several(f"`{name}`" for name in side.donated) for side in (this, other))),
    ]
    yield from ((what, x, y) for what, x, y in pairs if x != y)
    yield from _regions(a.graph, b.graph)
    ours, theirs = _pins(this), _pins(other)
    for name in dict.fromkeys((*ours, *theirs)):
        if ours.get(name) != theirs.get(name):
            yield name, ours.get(name, "not pinned"), theirs.get(name, "not pinned")


def _several(texts: Iterable[str]) -> str:
    return ", ".join(sorted(set(texts))) or "none"


def _budget(budget: Budget) -> str:
    """A budget, its size to the byte."""
    return f"{budget} ({budget.above:.0f} B)" if budget.above else str(budget)


def _hardware(a: Hardware, b: Hardware) -> Iterator[Setting]:
    """Hardware by value: figures of one name may have been replaced, and axes put on networks of
    their own."""
    yield "hardware", _kind(a), _kind(b)
    if a.name == b.name:
        for field in dataclasses.fields(a):
            x, y = getattr(a, field.name), getattr(b, field.name)
            if field.name != "slow_axes" and x != y:
                yield f"{field.name} of {a.name}", _figure(x), _figure(y)
    ours, theirs = dict(a.slow_axes), dict(b.slow_axes)
    for axis in sorted(ours.keys() | theirs.keys()):
        x, y = (
            _figure(own) if own else "none of its own" for own in (ours.get(axis), theirs.get(axis))
        )
        yield f"network of `{axis}`", x, y


def _kind(hardware: Hardware) -> str:
    """A name; whether its figures are those of the table is said, too."""
    known = HARDWARE.get(hardware.name)
    as_known = known is None or dataclasses.replace(hardware, slow_axes=known.slow_axes) == known
    return hardware.name if as_known else f"{hardware.name} with other figures"


def _figure(value: object) -> str:
    """A value of a description of hardware, such that no two look alike."""
    match value:
        case None:
            return "none"
        case Network():
            return f"{_figure(value.bytes_per_second)} B/s after {_figure(value.latency_seconds)} s"
        case float() if float(short := f"{value:g}") == value:
            return short
        case _:
            return str(value)


def _policies(a: Request, b: Request) -> Iterator[Setting]:
    """Boxing policies where one differs on some mesh axis, however both are written."""
    ours, theirs = (dict(zip(q.mesh.names, q.axis_policies, strict=False)) for q in (a, b))
    if any(
        (ours.get(name) or a.boxing) != (theirs.get(name) or b.boxing)
        for name in (*a.mesh.names, *b.mesh.names)
    ):
        first, second = (policies_text(q.boxing, q.axis_policies, q.mesh.names) for q in (a, b))
        yield "boxing", first, second


def _regions(a: Graph, b: Graph) -> Iterator[Setting]:
    """Lines of both programs that stand under policies of their own in one."""
    ours, theirs = _policed(a), _policed(b)
    for key, policies in ours.items():
        if policies != theirs.get(key, policies):
            yield f"policy of `{key[0]}`", _several(policies), _several(theirs[key])


def _policed(graph: Graph) -> dict[tuple[str, str], frozenset[str]]:
    """The policies around each line of a program, by its text and function."""
    found: dict[tuple[str, str], frozenset[str]] = {}
    for node in graph.walk():
        span = users_span(node)
        text = source_text(span, 44).replace("`", "'")
        if span and text:
            around = ", within ".join(
                f"{p} on `{axis}`" if axis else p for p, axis in reversed(policies_in(node.scope))
            )
            found[text, span.function] = found.get((text, span.function), frozenset()) | (
                {around} if around else set()
            )
    return found


def _pins(side: Side) -> dict[str, str]:
    """The user's pins by what they stand on. Types of inputs and outputs are complete, so B is left
    out there."""
    request = side.program.request
    names = Names.of(request.graph)
    found: dict[str, list[str]] = {}
    for site in pin_sites(request):
        on_boundary = site.source != "annotation"
        name = names.site(site)
        if site.source == "output" and side.output_names:
            name = side.output_names[site.position]
        name = f"{site.source} `{name}`" if on_boundary else f"`{name}`"
        atoms = [
            f"{axis}:{decode(c)!r}"
            for axis, c in zip(request.mesh.names, site.codes, strict=True)
            if c is not None and not (on_boundary and c == 0)
        ]
        texts, text = found.setdefault(name, []), " ".join(atoms) or "B"
        if text not in texts:
            texts.append(text)
    return {name: "; ".join(texts) for name, texts in found.items()}
