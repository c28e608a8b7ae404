"""From a call to its plan, on one mesh."""

from __future__ import annotations

import dataclasses
import itertools
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import jax
from jax.sharding import AbstractMesh, Mesh

from sbp import _jax
from sbp.api.boundary import about_option, check_meshes, check_types
from sbp.api.call import CallReader, CallSignature, JitOptions, Parameters
from sbp.api.plan import Plan, load_program
from sbp.api.symbolic import SizedCall, UnequalElements, priced_constraints
from sbp.api.tracing import Tracer, asked_outputs, traced_call
from sbp.errors import (
    Diagnostic,
    Help,
    Label,
    SbpError,
    SbpTypeError,
    SbpWarning,
    SourceEdit,
    bytes_text,
    noting,
)
from sbp.explain.faults import explain
from sbp.explain.together import memory_diagnostic
from sbp.machine.mesh import mesh_spec
from sbp.plan.fit import fit
from sbp.plan.program import Program
from sbp.report.parts import Facts, Page, Section
from sbp.report.report import Report, Shown
from sbp.sizes.conditions import Decided, point_text
from sbp.sizes.expressions import first_difference, graph_at, is_symbolic, map_sizes
from sbp.trace.graph import Graph

# ---- equal sizes --------------------------------------------------------------------------------
# Two symbolic sizes that a program takes for one: `check` says which, where JAX refuses the
# program for different sizes and takes it for equal ones.


PAIRS = 6
"""Pairs of sizes that are tried; there are six of four sizes."""


def equal_sizes(
    error: Exception, call: SizedCall, program_of: Callable[[CallSignature], Program | None]
) -> Diagnostic | None:
    """The diagnostic of an error of JAX about a program that traces where two sizes are equal; None
    where no two sizes are that.

    Arguments:
      error: what JAX raised.
      call: the call.
      program_of: the program of a call with symbolic sizes; None where it has errors.
    """
    for term, signature in itertools.islice(_with_equal(call), PAIRS):
        try:
            program = program_of(signature)
        except (SbpError, TypeError, ValueError):
            continue
        if program is None:
            continue
        span = _jax.raising_span(error)
        labels = (Label(span=span, text="", primary=True),) if span else ()
        said = " ".join(str(error).split()).removesuffix(".")
        return Diagnostic(
            code="symbolic-sizes",
            severity="error",
            title=f"JAX refuses the program for these symbolic sizes: {said}",
            labels=labels,
            notes=(f"it takes the program where {term}",),
            helps=(priced_constraints(call, (term,), program, "the program has a typing then"),),
        )
    return None


def _with_equal(call: SizedCall) -> Iterator[tuple[str, CallSignature]]:
    """The call with two of its sizes equal, each with the constraint that says so. The later name
    is replaced by the earlier one."""
    signature = call.symbolic
    for one, other in itertools.combinations(call.scope.names, 2):
        term = f"{other} == {one}"
        try:
            scope = jax.export.SymbolicScope((*call.scope.constraints, term))
        except ValueError:
            continue

        def size(d: object, scope: jax.export.SymbolicScope = scope) -> object:
            return jax.export.symbolic_shape(str(d), scope=scope)[0]

        avals = tuple(
            jax.ShapeDtypeStruct(map_sizes(tuple(a.shape), size), a.dtype, weak_type=a.weak_type)
            for a in signature.avals
        )
        key = ("where", term, signature.key)
        yield term, dataclasses.replace(signature, avals=avals, key=key)


# ---- reports at symbolic sizes ------------------------------------------------------------------
# The report on a program with symbolic sizes says for which sizes its typing holds.


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
        pairs = [
            ("asked for", f"every {found.asked}; other sizes are not covered"),
            ("typing holds for", how),
            ("shown by", f"Z3, {found.claims} conditions on sizes"),
            ("planned at", f"{at}; bytes, memory and time are of these sizes"),
        ]
        pairs += [(limit, f"met where {at}; not decided for other sizes") for limit in self.limits]
        return Section(title="symbolic sizes", parts=(Facts(pairs=tuple(pairs)),))


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


# ---- planning -----------------------------------------------------------------------------------


class Planner:
    """Plans calls of one function on one mesh.

    Arguments:
      fn: the user's function.
      parameters: its static and donated arguments.
      mesh: the user's mesh.
      options: the other arguments of `sbp.jit`.

    Raises:
      SbpError: `unknown-axis`, `unknown-option` or `type-syntax` for options that do not fit the
        mesh.
    """

    def __init__(
        self,
        fn: Callable[..., Any],
        parameters: Parameters,
        mesh: Mesh | AbstractMesh,
        options: JitOptions,
    ) -> None:
        self.options = options
        self.spec = mesh_spec(mesh, options.hardware)
        self.reader = CallReader(fn, parameters, mesh, self.spec, options)
        for axis in (
            *options.axis_policies,
            *(b.axis for b in options.budgets if b.axis is not None),
        ):
            self.spec.size(axis)
        given = (options.in_option, options.in_types), (options.out_option, options.out_types)
        for option, types in given:
            if option.endswith("shardings"):
                check_meshes(types, mesh, option)
            with about_option(option, options.at):
                check_types(types, self.spec, option)

    def plan(self, signature: CallSignature) -> Plan:
        """The plan for a call, with the warnings that were given on the way.

        Raises:
          SbpTypeError: where the program has no typing; its diagnostics say why.
        """
        with noting() as noted:
            plan = self._make(signature)
        plan.noted = tuple(noted)
        return plan

    def report(
        self,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        plan_of: Callable[[CallSignature], Plan],
    ) -> Report:
        """The report on a call.

        Arguments:
          args, kwargs: the arguments, which may have symbolic sizes.
          plan_of: the plan for a signature, from the cache.

        Raises:
          SbpError: where there is no plan.
        """
        signature = self.reader.read(args, kwargs)[0]
        if is_symbolic(signature.avals):
            call = self._sized_call(signature)
            try:
                return self._check_sizes(call)
            except SbpError:
                raise
            except (TypeError, ValueError) as error:
                found = equal_sizes(error, call, self._program_at)
                if found is None:
                    raise
                raise SbpTypeError((found,)) from error
        return plan_of(signature).report()

    def _sized_call(self, signature: CallSignature) -> SizedCall:
        return SizedCall.of(signature, self.spec.num_devices, self.options.at)

    def _program_at(self, signature: CallSignature) -> Program | None:
        """The program of a call with symbolic sizes; None where its report has errors."""
        report = self._check_sizes(self._sized_call(signature))
        return report.program if report.ok else None

    def _check_sizes(self, call: SizedCall) -> Report:
        """The report on a call with symbolic sizes: the plan at one choice of them, with its typing
        decided for all."""
        try:
            plan = self._sized(call)
        except UnequalElements:
            call = call.at_equal_elements(self.spec.num_devices)
            plan = self._sized(call)
        found = call.decide(
            plan.program.typing,
            lambda shapes: asked_outputs(
                self.reader, dataclasses.replace(plan.results, shapes=tuple(shapes))
            )[0],
        )
        asked = {
            "memory limit": self.options.memory_limit is not None,
            "budgets": bool(self.options.budgets),
        }
        limits = tuple(name for name, given in asked.items() if given)
        return sized_report(
            plan.report(),
            found,
            call,
            self._make,
            lambda at: traced_call(self.reader, at).request.graph,
            limits=limits,
        )

    def _sized(self, call: SizedCall) -> Plan:
        """The plan at the chosen sizes of a call, with the warnings that were given on the way."""
        with noting() as noted, call.typed_here():
            plan = self._make(call.signature, call.trace)
        plan.noted = tuple(noted)
        return plan

    def _make(self, signature: CallSignature, tracer: Tracer | None = None) -> Plan:
        traced = traced_call(self.reader, signature, tracer)
        request, limit = traced.request, traced.request.memory_limit
        if self.options.plan is not None:
            program = load_program(self.options.plan, request)
            request.caches.clear()
            return Plan(self.reader, signature, program, traced)
        program, least = fit(request)
        if program is None:
            found = (
                explain(request)
                if least is None or limit is None
                else (memory_diagnostic(least, limit),)
            )
            raise SbpTypeError(found)
        request.caches.clear()  # the plan may live long, and does not need them
        return Plan(self.reader, signature, program, traced)
