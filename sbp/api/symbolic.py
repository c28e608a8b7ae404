"""A call with symbolic sizes: typed at one choice of them, and the typing decided for all."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import math
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import jax

from sbp import _jax
from sbp.api.call import Signature, even_boundary
from sbp.errors import (
    Diagnostic,
    Help,
    Label,
    OptionEdit,
    SbpError,
    SbpInternalError,
    SbpTypeError,
    SbpWarning,
    bytes_text,
    noting,
)
from sbp.infer.typing import Typing
from sbp.machine.mesh import MeshSpec
from sbp.report.parts import Facts, Page, Section
from sbp.report.report import Report, Shown
from sbp.sizes.claims import Claim, claims_of
from sbp.sizes.conditions import Decided, decide, point_text, points
from sbp.sizes.exploration import Lift, numbers
from sbp.sizes.expressions import (
    Point,
    constraints_of,
    first_difference,
    graph_at,
    map_sizes,
    shape_text,
    symbols_in,
    value_of,
)
from sbp.sizes.scope import Scope
from sbp.trace.build import trace
from sbp.trace.graph import Graph
from sbp.types import NdSbp

PRIMES = (5, 7, 11, 13, 17, 19, 23, 29, 31)
"""Multiples of the device count by these are the first choice of sizes: large, and no two alike by
chance."""


@dataclass(slots=True, kw_only=True, eq=False)
class SizedCall:
    """A call whose shapes have symbols, and the sizes to type it at.

    Arguments:
      symbolic: its signature.
      scope: the sizes that are asked for.
      point: one choice of them.
      traced: the program with symbolic sizes and the shapes of its results, once `trace` has made
          it; a copy at other sizes starts anew.
    """

    symbolic: Signature
    scope: Scope
    point: Point
    traced: tuple[Graph, Any] | None = field(default=None, init=False, repr=False)

    @classmethod
    def of(cls, signature: Signature, devices: int) -> SizedCall:
        """Reads the scope off the shapes, and chooses sizes, multiples of the device count where it
        allows them.

        Raises:
          SbpError: `symbolic-sizes` for shapes of several scopes, or constraints that nothing
              meets.
        """
        sizes = [d for aval in signature.avals for d in aval.shape if jax.export.is_symbolic_dim(d)]
        names = {s for d in sizes for s in symbols_in(str(d))}
        whole = dict.fromkeys(
            f"{d} >= 0" for d in sizes if not str(d).isidentifier() and "-" in str(d)
        )
        scope = Scope(names, [*constraints_of(sizes), *whole])
        return cls(symbolic=signature, scope=scope, point=_choice(scope, devices))

    @property
    def signature(self) -> Signature:
        """The signature at the sizes that were chosen."""
        return self.at(self.point)

    def at(self, point: Point) -> Signature:
        """The signature at some sizes."""
        avals = tuple(
            _shape_with(a, lambda d: value_of(str(d), point)) for a in self.symbolic.avals
        )
        return dataclasses.replace(
            self.symbolic, avals=avals, key=("at", tuple(sorted(point.items())), self.symbolic.key)
        )

    @contextlib.contextmanager
    def typed_here(self) -> Iterator[None]:
        """Says of type errors inside at which sizes they are."""
        try:
            yield
        except SbpTypeError as error:
            note = (
                f"symbolic sizes: this is where {point_text(self.point)}; other sizes were not"
                " tried"
            )
            raise SbpTypeError(
                dataclasses.replace(d, notes=(*d.notes, note)) for d in error.diagnostics
            ) from None

    def trace(self, fn: Callable[..., Any], avals: Any, names: Any) -> tuple[Graph, Any]:
        """Traces with symbolic sizes, in place of `sbp.trace.build.trace`; what it returns is the
        program at the sizes that were chosen.

        Raises:
          SbpError: `symbolic-sizes` where the trace needs to know what the scope does not say.
        """
        del avals
        try:
            graph, out_shape = trace(fn, self.symbolic.avals, names)
        except jax.errors.InconclusiveDimensionOperation as error:
            first = " ".join(str(error).split("\n")[0].split()).removesuffix(".")
            raise SbpError(
                f"the program asks what its symbolic sizes do not say: {first}; add a constraint to"
                " the scope that decides it, or check it at concrete sizes",
                code="symbolic-sizes",
                span=_jax.raising_span(error),
            ) from error
        self.traced = graph, out_shape
        at = lambda d: value_of(str(d), self.point)  # noqa: E731
        return graph_at(graph, self.point), jax.tree.map(lambda x: _shape_with(x, at), out_shape)

    def decide(self, typing: Typing, wanted: Callable[[Any], list[NdSbp | None]]) -> Decided:
        """Decides a typing of the traced program for all sizes.

        Arguments:
          typing: at the sizes that were chosen.
          wanted: the types that outputs are held in at the boundary, for their shapes.
        """
        graph, out_shape = self._traced
        claims = [*claims_of(graph, typing), *self._held(typing.mesh)]
        if any(jax.export.is_symbolic_dim(d) for x in jax.tree.leaves(out_shape) for d in x.shape):
            held = lambda lift: wanted(jax.tree.map(lambda x: _shape_with(x, lift), out_shape))  # noqa: E731
            with noting(), warnings.catch_warnings(action="ignore", category=SbpWarning):
                here = held(numbers(self.point))
            text = f"outputs are held at the boundary as they are where {point_text(self.point)}"
            claims.append(Claim(text=text, key="outputs", holds=lambda lift: held(lift) == here))
        return decide(claims, self.scope, self.point)

    @property
    def _traced(self) -> tuple[Graph, Any]:
        if self.traced is None:
            raise SbpInternalError("a call with symbolic sizes is decided before it is traced")
        return self.traced

    @property
    def graph(self) -> Graph:
        """The program with symbolic sizes, once it is traced."""
        return self._traced[0]

    def _held(self, mesh: MeshSpec) -> Iterator[Claim]:
        """Pinned inputs that do not divide are held otherwise than pinned: where they do divide,
        the typing is another one."""
        for want, aval, here, name in zip(
            self.symbolic.wanted,
            self.symbolic.avals,
            self.signature.avals,
            self.symbolic.names,
            strict=True,
        ):
            if want is None or here.shape == aval.shape:
                continue
            with noting(), warnings.catch_warnings(action="ignore", category=SbpWarning):
                held = even_boundary(want, here.shape, mesh, name)[0]
            if held == want:
                continue  # it divides, which is claimed already
            shape = tuple(aval.shape)

            def holds(
                lift: Lift, want: Any = want, shape: Any = shape, held: Any = held, name: str = name
            ) -> bool:
                return even_boundary(want, tuple(map(lift, shape)), mesh, name)[0] == held

            yield Claim(
                text=f"input {name} of shape {shape_text(shape)} is held {held!r}",
                key=("held", name),
                holds=holds,
            )


def _shape_with(aval: Any, of: Callable[[Any], Any]) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(
        map_sizes(tuple(aval.shape), of),
        aval.dtype,
        weak_type=bool(getattr(aval, "weak_type", False)),
    )


def _choice(scope: Scope, devices: int) -> Point:
    """Sizes of the scope: multiples of the device count by different primes, multiples at all, the
    smallest, whatever Z3 finds."""
    for primes in itertools.islice(itertools.permutations(PRIMES, len(scope.names)), 64):
        point = {name: devices * p for name, p in zip(scope.names, primes, strict=True)}
        if scope.allows(point):
            return point
    small = list(points(scope))
    if small:
        return max(
            small,
            key=lambda p: (
                sum(math.gcd(v, devices) for v in p.values()),
                -abs(max(p.values()) - PRIMES[0] * devices),
            ),
        )
    found = scope.solver().point()
    if found is None:
        raise SbpError(
            f"no sizes meet the constraints {', '.join(scope.constraints)}; drop one of them",
            code="symbolic-sizes",
        )
    return found


# ---- what is said of it -------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class SizedReport(Report):
    """A report on a program with symbolic sizes: the plan of one choice of them, and for which its
    typing holds.

    Arguments:
      sizes: for which sizes the typing holds; `sizes.holds_at(b=24)` asks for one.
      limits: what else the plan meets at the sizes that it was made for, and is not decided for
          others.
    """

    sizes: Decided
    limits: tuple[str, ...] = ()

    def full(self) -> Shown:
        """The whole report, the sizes first."""
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


PlanFor = Callable[[Signature, Callable[..., Any]], Any]
"""Plans a signature, traced in some way."""


def sized_report(
    report: Report,
    found: Decided,
    call: SizedCall,
    plan_for: PlanFor,
    trace_for: Callable[[Signature], Graph],
    *,
    limits: tuple[str, ...],
) -> SizedReport:
    """The report on a program with symbolic sizes.

    Arguments:
      report: that of the plan at the sizes that were chosen.
      found: for which sizes its typing holds.
      call: the call.
      plan_for: plans the call at other sizes.
      trace_for: traces a call with numbers.
      limits: what else was asked for, that depends on sizes.
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
    """What is to be said where a typing does not hold for all sizes; the help is a constraint that
    Z3 has accepted."""
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
        quoted = ", ".join(f'"{t}"' for t in found.terms)
        helps = (
            Help(
                text=(
                    f"make the sizes with constraints=[{quoted}]: the typing holds for all of these"
                ),
                edits=(
                    OptionEdit(
                        option="constraints",
                        value=tuple(found.terms),
                        function="jax.export.symbolic_shape",
                    ),
                ),
                bytes_per_device=report.program.cost.bytes_per_device,
                peak_memory_bytes=report.program.cost.peak_memory_bytes,
                clears_all_errors=True,
            ),
        )
    yield Diagnostic(
        code="size-condition",
        severity="error",
        title=f"the typing does not hold for every {found.asked}"
        + (f"; it holds where {found.holds}" if found.status == "some" else ""),
        labels=tuple(labels),
        notes=tuple(notes),
        helps=helps,
    )


def _there(call: SizedCall, plan_for: PlanFor) -> str:
    """What comes of a call at other sizes."""
    with noting(), warnings.catch_warnings(action="ignore", category=SbpWarning):
        try:
            sent = plan_for(call.signature, call.trace).cost.bytes_per_device
        except SbpError as error:
            return f"has no plan: {error.message}"
    return f"gets a typing of its own, which sends {bytes_text(sent)} per device"


def _traced_otherwise(
    call: SizedCall, trace_for: Callable[[Signature], Graph]
) -> Iterator[Diagnostic]:
    """What is to be said where numbers make another program: only that with symbols is shown to be
    typed."""
    with noting(), warnings.catch_warnings(action="ignore", category=SbpWarning):
        try:
            concrete = trace_for(call.signature)
        except SbpError:
            return  # the function closes over its symbols: there is no call with numbers
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


def _undecided(found: Decided) -> Iterator[Diagnostic]:
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
