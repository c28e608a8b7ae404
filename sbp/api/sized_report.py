"""The report on a program with symbolic sizes says for which sizes its typing holds."""

from __future__ import annotations

import dataclasses
import itertools
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import jax

from sbp.api.call import CallSignature
from sbp.api.symbolic import SizedCall, priced_constraints
from sbp.errors import (
    Diagnostic,
    Help,
    Label,
    SbpError,
    SbpWarning,
    SourceEdit,
    bytes_text,
    noting,
)
from sbp.plan.program import Program
from sbp.report.parts import Facts, Page, Section
from sbp.report.report import Report, Shown
from sbp.sizes.conditions import Decided, point_text
from sbp.sizes.expressions import first_difference, graph_at
from sbp.sizes.formula import ALTERNATIVES, FormulaStatus
from sbp.trace.graph import Graph


@dataclass(frozen=True, kw_only=True)
class SizedReport(Report):
    """A report on a program with symbolic sizes: the plan at one choice of sizes, and the sizes for
    which its typing holds.

    Arguments:
      sizes: for which sizes the typing holds; `sizes.holds_at(b=24)` answers for one size.
      limits: the options (`memory limit`, `budgets`) that the plan meets at the chosen sizes, and
          that are not decided for other sizes.
    """

    sizes: Decided
    limits: tuple[str, ...] = ()

    def full(self) -> Shown:
        """The full report, the sizes first."""
        page = super().full().page
        return Shown(page=Page(title=page.title, parts=(self._sizes(), *page.parts)))

    def short(self) -> Shown:
        """The short form, the sizes first."""
        page = super().short().page
        return Shown(page=Page(title=page.title, parts=(self._sizes(), *page.parts)))

    def _sizes(self) -> Section:
        found, at = self.sizes, point_text(self.sizes.point)
        how = {
            "every": f"every {found.holds}",
            "some": found.holds,
            "open": f"not proved; {found.holds} is needed",
        }[found.status]
        how += "" if found.formula is None else _LEFT_OUT[found.formula]
        pairs = [
            ("asked for", f"every {found.asked}; other sizes are not covered"),
            ("typing holds for", how),
            ("shown by", f"Z3, {found.claims} conditions on sizes"),
            ("planned at", f"{at}; bytes, memory and time are of these sizes"),
        ]
        pairs += [(limit, f"met where {at}; not decided for other sizes") for limit in self.limits]
        return Section(title="symbolic sizes", parts=(Facts(pairs=tuple(pairs)),))


_LEFT_OUT: dict[FormulaStatus, str] = {
    "reduced": "",
    "unreduced": "; Z3 gave up on whether all of this is needed",
    "too many alternatives": f"; as a formula it has more than {ALTERNATIVES} alternatives",
    "unanswered": "; Z3 gave up on a formula",
}
"""What the search for a formula left out."""

PlanFor = Callable[[CallSignature, Callable[..., Any]], Any]
"""Plans a call signature; the second argument traces it."""


def sized_report(
    report: Report,
    found: Decided,
    call: SizedCall,
    plan_for: PlanFor,
    trace_for: Callable[[CallSignature], Graph],
    *,
    limits: tuple[str, ...],
) -> SizedReport:
    """The report on a program with symbolic sizes.

    Arguments:
      report: the report of the plan at the chosen sizes.
      found: for which sizes its typing holds.
      call: the call.
      plan_for: plans the call at other sizes.
      trace_for: traces a call with numbers.
      limits: the options that depend on sizes and are met at the chosen sizes only.
    """
    limited = (*_limited(found, report, call, plan_for), *_traced_otherwise(call, trace_for))
    return SizedReport(
        program=report.program,
        diagnostics=(*limited, *_undecided(found), *report.diagnostics),
        title=report.title,
        output_names=report.output_names,
        sizes=found,
        limits=limits,
    )


def _limited(
    found: Decided, report: Report, call: SizedCall, plan_for: PlanFor
) -> Iterator[Diagnostic]:
    """The error for a typing that does not hold for all sizes. Its help is the formula, as
    constraints."""
    if found.counterexample is None:
        return
    at = point_text(found.counterexample)
    spans = dict.fromkeys(c.span for c in found.limits if c.span is not None)
    labels = [
        Label(span=s, text="not for all sizes", primary=n == 0)
        for n, s in enumerate(itertools.islice(spans, 4))
    ]
    notes = [f"where {at}, this is not so: {c.text}" for c in found.limits[:3]]
    if len(found.limits) > 3:
        notes.append(f"{len(found.limits) - 3} more conditions do not hold for all sizes")
    if not found.is_smallest:
        notes.append(
            "Z3 found these sizes; smaller ones may fail, too, though the smallest that were tried"
            " do not"
        )
    notes.append(
        f"a call where {at}"
        f" {_there(dataclasses.replace(call, point=found.counterexample), plan_for)}"
    )
    helps: tuple[Help, ...] = ()
    if (
        found.terms
        and found.status == "some"
        and report.program is not None
        and not any("!=" in t for t in found.terms)
    ):
        helps = tuple(_constrained(found, call, report.program))
        labels += [
            Label(span=e.span, text="these sizes are asked for", primary=not labels)
            for h in helps
            for e in h.edits
            if isinstance(e, SourceEdit)
        ]
    yield Diagnostic(
        code="size-condition",
        severity="error",
        title=f"the typing does not hold for every {found.asked}"
        + (f"; it holds where {found.holds}" if found.status == "some" else ""),
        labels=tuple(labels),
        notes=tuple(notes),
        helps=helps,
    )


def _constrained(found: Decided, call: SizedCall, program: Program) -> Iterator[Help]:
    """The formula as constraints, beside those that the user gives; none where JAX does not take
    it.

    Arguments:
      found: for which sizes the typing holds.
      call: the call.
      program: its plan.
    """
    terms = call.scope.with_terms(found.terms)
    try:
        jax.export.SymbolicScope(terms)
    except ValueError:
        return
    yield priced_constraints(call, found.terms, program, "the typing holds for all of these")


def _there(call: SizedCall, plan_for: PlanFor) -> str:
    """The plan of a call at other sizes, in words."""
    with noting(), warnings.catch_warnings(action="ignore", category=SbpWarning):
        try:
            sent = plan_for(call.signature, call.trace).cost.bytes_per_device
        except SbpError as error:
            return f"has no plan: {error.message}"
    return f"gets a typing of its own, which sends {bytes_text(sent)} per device"


def _traced_otherwise(
    call: SizedCall, trace_for: Callable[[CallSignature], Graph]
) -> Iterator[Diagnostic]:
    """The warning for a function whose trace with numbers is another program than the trace with
    symbols: the typing was decided for the second one."""
    with noting(), warnings.catch_warnings(action="ignore", category=SbpWarning):
        try:
            concrete = trace_for(call.signature)
        except SbpError as error:  # it uses symbols from outside of its arguments
            yield _without_numbers(error)
            return
    different = first_difference(graph_at(call.graph, call.point), concrete)
    if different is None:
        return
    mine, theirs = (node.op if node is not None else "nothing" for node in different)
    span = next((n.span for n in different if n is not None and n.span is not None), None)
    yield Diagnostic(
        code="sizes-unproved",
        severity="warning",
        title=(
            "the program with symbolic sizes is another one than with numbers; what is said of all"
            " sizes is said of the first"
        ),
        labels=(Label(span=span, text=f"{mine} for symbols", primary=True),) if span else (),
        notes=(
            (
                f"the first difference: {mine} with symbols, {theirs} with numbers where"
                f" {point_text(call.point)}"
            ),
        ),
    )


def _without_numbers(error: SbpError) -> Diagnostic:
    """The note for a function that cannot be traced with numbers."""
    return Diagnostic(
        code="sizes-unproved",
        severity="note",
        title="the program with symbolic sizes is not compared with the one with numbers",
        labels=(Label(span=error.span, text="not traced with numbers", primary=True),)
        if error.span
        else (),
        notes=(f"it cannot be traced with numbers: {error.message}",),
    )


def _undecided(found: Decided) -> Iterator[Diagnostic]:
    """The warning for claims that are not decided for all sizes."""
    if not found.undecided:
        return
    spans = dict.fromkeys(u.claim.span for u in found.undecided if u.claim.span is not None)
    notes = []
    for u in found.undecided[:3]:
        tried = f"tried at {u.tried} small sizes: " + (
            f"not so where {point_text(u.fails)}" if u.fails else "it held at all of them"
        )
        notes.append(f"not proved, since {u.why}: {u.claim.text}; {tried}")
    if len(found.undecided) > 3:
        notes.append(f"{len(found.undecided) - 3} more conditions are not proved")
    yield Diagnostic(
        code="sizes-unproved",
        severity="warning",
        title=f"the typing is not proved for all sizes where {found.holds}",
        labels=tuple(
            Label(span=s, text="not proved for all sizes", primary=n == 0)
            for n, s in enumerate(itertools.islice(spans, 4))
        ),
        notes=tuple(notes),
    )
