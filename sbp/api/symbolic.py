"""A call with symbolic sizes: typed at one choice of sizes, with the typing decided for all."""

import contextlib
import itertools
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import jax

from sbp.api.boundary import Leaf, Leaves, even_boundary
from sbp.api.call import CallReader, CallSignature
from sbp.api.plan import Plan, make_plan
from sbp.api.tracing import traced_call, with_result_types
from sbp.errors import (
    SHOWN,
    ArgumentTypeError,
    Diagnostic,
    SbpError,
    SbpTypeError,
    SbpWarning,
    counted,
    noting,
)
from sbp.explain.change import applicable, labels_at
from sbp.infer.typing import Typing
from sbp.machine.mesh import MeshSpec
from sbp.report.parts import Facts, Page, Section
from sbp.report.report import Report
from sbp.signatures.rule import is_known
from sbp.sizes.claims import (
    Claim,
    Decided,
    check_symbols,
    claims_of,
    decide,
    deciding_sizes,
    element_claims,
    point_text,
)
from sbp.sizes.scope import (
    Lift,
    Point,
    Scope,
    Solver,
    Unanswered,
    constraints_of,
    first_difference,
    graph_at,
    map_sizes,
    numbers,
    shape_text,
    symbolic_in,
    symbols_in,
)
from sbp.trace.build import trace
from sbp.trace.graph import Graph

PRIMES = (5, 7, 11, 13, 17, 19, 23, 29, 31)
"""The device count times these are the sizes that a program is typed at, if the constraints have
them: they are large, and different symbols have different sizes."""


class UnequalElements(ArgumentTypeError):
    """A reshape to another number of elements; `jax.jit` raises `TypeError` for numbers."""


@dataclass(slots=True, kw_only=True, eq=False)
class SizedCall:
    """A call whose shapes have symbolic sizes, with the sizes at which it is typed.

    Arguments:
      reader: the function with its mesh and options.
      symbolic: its signature, with symbolic sizes.
      scope: the sizes that are asked for.
      point: one choice of sizes.
      program: the program with symbolic sizes and the shapes of its results. `trace` sets it; a
          copy at other sizes has none.
    """

    reader: CallReader
    symbolic: CallSignature
    scope: Scope
    point: Point
    program: tuple[Graph, Any] = field(init=False, repr=False)

    @classmethod
    def of(cls, reader: CallReader, signature: CallSignature) -> "SizedCall":
        """Reads the scope from the shapes and chooses sizes in it, multiples of the device count
        where the scope has some.

        Arguments:
          reader: the function with its mesh and options.
          signature: the signature, with symbolic sizes.

        Raises:
          SbpError: `symbolic-sizes` for shapes of several scopes, or constraints that no sizes
              meet.
        """
        sizes = symbolic_in(signature.avals)
        names = {s for d in sizes for s in symbols_in(str(d))}
        whole = dict.fromkeys(
            f"{d} >= 0" for d in sizes if not str(d).isidentifier() and "-" in str(d)
        )
        scope = Scope(names, [*constraints_of(sizes), *whole])
        return cls(
            reader=reader,
            symbolic=signature,
            scope=scope,
            point=_choice(scope, reader.spec.num_devices),
        )

    @property
    def signature(self) -> CallSignature:
        """The signature at the chosen sizes."""
        return replace(
            self.symbolic,
            leaves=_with_sizes(self.symbolic, numbers(self.point)),
            key=("at", tuple(sorted(self.point.items())), self.symbolic.key),
        )

    def plan(self) -> Plan:
        """The plan at the chosen sizes.

        Raises:
          SbpTypeError: where the program has no typing; a note has the chosen sizes.
        """
        try:
            return make_plan(self.reader, self.signature, self.trace)
        except SbpTypeError as error:
            note = (
                f"symbolic sizes: sbp found this error for {point_text(self.point)}; it did not try"
                " other sizes"
            )
            raise SbpTypeError(
                [replace(d, notes=(*d.notes, note)) for d in error.diagnostics]
            ) from None

    def trace(self, fn: Callable[..., Any], avals: Any, names: Any) -> tuple[Graph, Any]:
        """Traces with symbolic sizes. `sbp.api.tracing.traced_call` takes it in place of
        `sbp.trace.build.trace`.

        Arguments:
          fn: the function of flat arguments.
          avals: not read; the shapes are those of `symbolic`.
          names: names of the flat arguments.

        Returns:
          The program and the shapes of its results at the chosen sizes.

        Raises:
          SbpError: `symbolic-sizes` where the trace asks something that the scope does not decide,
              or uses sizes that no argument has.
          UnequalElements: where a reshape does not keep the number of elements at the chosen sizes.
        """
        with deciding_sizes(
            "add a constraint that decides it to constraints= of jax.export.symbolic_shape, or"
            " check it at concrete sizes"
        ):
            graph, out_shape = trace(fn, self.symbolic.avals, names, is_known=is_known)
        check_symbols(graph, self.scope.names, self.symbolic.avals)
        self.program, at = (graph, out_shape), numbers(self.point)
        for claim in element_claims(graph):
            if not claim.holds(at):
                raise UnequalElements(
                    f"{claim.text} only where {claim.fact}", code="symbolic-sizes", span=claim.span
                )
        return graph_at(graph, self.point), jax.tree.map(lambda x: _shape_with(x, at), out_shape)

    def at_equal_elements(self) -> "SizedCall":
        """The call, once it is traced, at sizes at which each reshape keeps the number of elements.

        Raises:
          UnequalElements: where the scope has no such sizes.
        """
        narrowed = self.scope
        for claim in element_claims(self.program[0]):
            narrowed = narrowed.narrow((claim.fact,))
            with contextlib.suppress(Unanswered):
                if Solver(narrowed).point() is None:
                    raise UnequalElements(
                        f"{claim.text} at no sizes that are asked for; give it a shape of as many"
                        " elements",
                        code="symbolic-sizes",
                        span=claim.span,
                    )
        return replace(self, point=_choice(narrowed, self.reader.spec.num_devices))

    def decide(self, typing: Typing, results: Leaves) -> Decided:
        """Decides a typing of the traced program for all sizes.

        Arguments:
          typing: its typing at the chosen sizes.
          results: what it returns at the chosen sizes.
        """
        graph, avals = self.program
        claims = [
            *element_claims(graph),
            *claims_of(graph, typing),
            *self._boundary_claims(typing.mesh),
        ]
        if symbolic_in(avals):

            def asked(lift: Lift) -> list[Any]:
                at = replace(
                    results,
                    leaves=tuple(
                        replace(leaf, aval=_shape_with(aval, lift))
                        for leaf, aval in zip(results.leaves, avals, strict=True)
                    ),
                )
                return [leaf.demand for leaf in with_result_types(self.reader, at).leaves]

            with noting(), warnings.catch_warnings(action="ignore", category=SbpWarning):
                here = asked(numbers(self.point))
            text = f"outputs have the same types at the boundary as for {point_text(self.point)}"
            claims.append(Claim(text=text, key="outputs", holds=lambda lift: asked(lift) == here))
        return decide(claims, self.scope, self.point)

    def _boundary_claims(self, mesh: MeshSpec) -> Iterator[Claim]:
        """A claim for each pinned input that does not divide at the chosen sizes, so that its type
        at the boundary is not its pin. Sizes at which it divides have another typing."""
        for leaf, here in zip(self.symbolic.leaves, self.signature.leaves, strict=True):
            if leaf.type is None or here.aval.shape == leaf.aval.shape:
                continue
            with noting(), warnings.catch_warnings(action="ignore", category=SbpWarning):
                even = even_boundary(leaf, here.aval.shape, mesh, leaf.name).type
            if even == leaf.type:
                continue  # it divides; `claims_of` claims that
            yield Claim(
                text=f"input {leaf.name} of shape {shape_text(leaf.aval.shape)} is held {even!r}",
                key=("boundary", leaf.name),
                holds=lambda lift, leaf=leaf, even=even: (
                    even_boundary(leaf, tuple(map(lift, leaf.aval.shape)), mesh, leaf.name).type
                    == even
                ),
            )


def _with_sizes(leaves: Leaves, of: Callable[[Any], Any]) -> tuple[Leaf, ...]:
    """Leaves with other sizes in place of symbolic ones."""
    return tuple(replace(leaf, aval=_shape_with(leaf.aval, of)) for leaf in leaves.leaves)


def _shape_with(aval: Any, of: Callable[[Any], Any]) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(
        map_sizes(tuple(aval.shape), of),
        aval.dtype,
        weak_type=bool(getattr(aval, "weak_type", False)),
    )


def _choice(scope: Scope, devices: int) -> Point:
    """Sizes of the scope to type the call at: for each symbol the device count times a prime of its
    own, or else a multiple of the device count, where the scope has such sizes.

    Raises:
      SbpError: `symbolic-sizes` where no sizes meet the constraints.
    """
    constraints = ", ".join(scope.constraints)
    # Last the symbols that a constraint defines by others, such as `b == 2*s`.
    defined = [n for n in scope.names if any(c.startswith(f"{n} ==") for c in scope.constraints)]
    names = [*(n for n in scope.names if n not in defined), *defined]
    for name, prime in zip(names, itertools.cycle(PRIMES), strict=False):
        for wish in (f"{name} == {devices * prime}", f"mod({name}, {devices}) == 0"):
            narrowed = scope.narrow((wish,))
            with contextlib.suppress(Unanswered):
                if Solver(narrowed).point() is not None:
                    scope = narrowed
                    break
    try:
        found, wrong = Solver(scope).point(), f"no sizes meet the constraints {constraints}"
    except Unanswered:
        found, wrong = None, f"Z3 finds no sizes that meet the constraints {constraints}"
    if found is None:
        raise SbpError(f"{wrong}; drop one of them, or give numbers", code="symbolic-sizes")
    return found


# ---- reports at symbolic sizes ------------------------------------------------------------------
# The report on a program with symbolic sizes says for which sizes its typing holds.


@dataclass(frozen=True, kw_only=True, repr=False)
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

    def _shown(self, *, short: bool = False) -> Page:
        """The page with the sizes first."""
        page = super()._shown(short=short)
        return Page(title=page.title, parts=(self.of_sizes, *page.parts))

    def to_json(self) -> dict[str, Any]:
        """`Report.to_json`, with the rows of `of_sizes` under `sizes`."""
        return {**super().to_json(), "sizes": dict(self.sizes_in_words())}

    @property
    def of_sizes(self) -> Section:
        """The section on sizes."""
        return Section(title="symbolic sizes", parts=(Facts(pairs=self.sizes_in_words()),))

    def sizes_in_words(self) -> tuple[tuple[str, str], ...]:
        """For which sizes the typing holds."""
        found = self.sizes
        at = point_text(found.point)
        how = {
            "every": f"every {found.holds}",
            "some": f"sizes where {found.holds}",
            "open": f"not proved; {found.holds} is needed",
        }[found.status]
        return (
            ("asked for", f"every {found.asked}; other sizes are not covered"),
            ("typing holds for", how),
            ("shown by", f"Z3, {counted(found.claims, 'condition')} on sizes"),
            ("planned at", f"{at}; bytes, memory and time are for these sizes"),
            *((limit, f"met for {at}; sbp did not check other sizes") for limit in self.limits),
        )


def sized_report(reader: CallReader, signature: CallSignature) -> SizedReport:
    """The report on a call with symbolic sizes: the plan at one choice of sizes, with its typing
    decided for all.

    Arguments:
      reader: the function with its mesh and options.
      signature: the call.

    Raises:
      SbpError: where there is no plan.
    """
    call = SizedCall.of(reader, signature)
    try:
        plan = call.plan()
    except UnequalElements:
        call = call.at_equal_elements()
        plan = call.plan()
    found, report = call.decide(plan.program.typing, plan.results), plan.report()
    return SizedReport(
        program=report.program,
        diagnostics=(
            *_limit_error(found),
            *_traced_otherwise(call),
            *_undecided_warning(found),
            *report.diagnostics,
        ),
        title=report.title,
        output_names=report.output_names,
        sizes=found,
        limits=applicable(
            {
                "memory limit": reader.options.memory_limit is not None,
                "budgets": reader.options.budgets,
            }
        ),
    )


def _limit_error(found: Decided) -> Iterator[Diagnostic]:
    """The error for a typing that does not hold for all sizes."""
    if found.counterexample is None:
        return
    at = numbers(found.counterexample)
    failing = [c.text for c in found.limits if not c.holds(at)][:SHOWN]
    more = len(found.limits) - len(failing)
    yield Diagnostic(
        code="size-condition",
        severity="error",
        title=f"the typing does not hold for every {found.asked}"
        + (f"; it holds where {found.holds}" if found.status == "some" else ""),
        labels=labels_at((c.span for c in found.limits), "not for all sizes")[:4],
        notes=(
            *(f"this does not hold for {point_text(found.counterexample)}: {t}" for t in failing),
            *applicable(
                {f"not shown: {counted(more, 'more condition')} that some sizes break": more > 0}
            ),
        ),
    )


def _traced_otherwise(call: SizedCall) -> Iterator[Diagnostic]:
    """The warning for a function whose trace with numbers is another program than the trace with
    symbols: the typing was decided for the second one."""
    with noting(), warnings.catch_warnings(action="ignore", category=SbpWarning):
        try:
            concrete = traced_call(call.reader, call.signature).request.graph
        except SbpError as error:  # it uses symbols from outside of its arguments
            yield Diagnostic(
                code="sizes-unproved",
                severity="note",
                title="sbp did not compare the program with symbolic sizes to the one with numbers",
                labels=labels_at([error.span], "JAX cannot trace this with numbers"),
                notes=(f"JAX cannot trace it with numbers: {error.message}",),
            )
            return
    different = first_difference(graph_at(call.program[0], call.point), concrete)
    if different is None:
        return
    mine, theirs = (node.op if node is not None else "nothing" for node in different)
    yield Diagnostic(
        code="sizes-unproved",
        severity="warning",
        title=(
            "JAX traces a different program for symbolic sizes than for numbers; what this report"
            " says about all sizes holds for the symbolic program"
        ),
        labels=labels_at(
            (node.span for node in different if node is not None), f"{mine} with symbolic sizes"
        )[:1],
        notes=(
            (
                f"the first difference: {mine} with symbolic sizes, {theirs} with"
                f" {point_text(call.point)}"
            ),
        ),
    )


def _undecided_warning(found: Decided) -> Iterator[Diagnostic]:
    """The warning for claims that are not decided for all sizes."""
    reasons, more = [why for _, why in found.undecided], len(found.undecided) - 3
    if reasons:
        yield Diagnostic(
            code="sizes-unproved",
            severity="warning",
            title=f"the typing is not proved for all sizes where {found.holds}",
            labels=labels_at((c.span for c, _ in found.undecided), "not proved for all sizes")[:4],
            notes=(
                *reasons[:3],
                *applicable({f"not shown: {counted(more, 'condition')} without a proof": more > 0}),
            ),
        )
