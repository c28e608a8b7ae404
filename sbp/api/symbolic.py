"""A call with symbolic sizes: typed at one choice of sizes, with the typing decided for all."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import math
import warnings
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import jax

from sbp.api.boundary import Asked, even_boundary
from sbp.api.call import CallSignature
from sbp.errors import (
    ArgumentTypeError,
    Edit,
    Help,
    OptionEdit,
    SbpError,
    SbpInternalError,
    SbpTypeError,
    SbpWarning,
    noting,
)
from sbp.explain.change import priced
from sbp.infer.typing import Typing
from sbp.machine.mesh import MeshSpec
from sbp.plan.program import Program
from sbp.sizes.claims import Claim, claims_of
from sbp.sizes.conditions import Decided, decide, point_text, points
from sbp.sizes.elements import ElementCount, check_symbols, element_counts
from sbp.sizes.exploration import Lift, numbers
from sbp.sizes.expressions import (
    Point,
    constraints_of,
    graph_at,
    map_sizes,
    shape_text,
    symbols_in,
    value_of,
)
from sbp.sizes.scope import Scope, Unanswered
from sbp.sizes.undecided import deciding_sizes
from sbp.source.editing import sizes_edits
from sbp.spans import Span
from sbp.trace.build import trace
from sbp.trace.graph import Graph

PRIMES = (5, 7, 11, 13, 17, 19, 23, 29, 31)
"""The device count times these is the first choice of sizes: they are large, and different symbols
have different sizes."""


class UnequalElements(ArgumentTypeError):
    """A reshape to another number of elements; `jax.jit` raises `TypeError` for numbers."""


@dataclass(slots=True, kw_only=True, eq=False)
class SizedCall:
    """A call whose shapes have symbolic sizes, with the sizes at which it is typed.

    Arguments:
      symbolic: its signature, with symbolic sizes.
      scope: the sizes that are asked for.
      point: one choice of sizes.
      made_at: the user's call of `sbp.jit`, if its line is known.
      traced: the program with symbolic sizes and the shapes of its results; None before `trace`,
          and in a copy at other sizes.
    """

    symbolic: CallSignature
    scope: Scope
    point: Point
    made_at: Span | None = None
    traced: tuple[Graph, Any] | None = field(default=None, init=False, repr=False)

    @classmethod
    def of(cls, signature: CallSignature, devices: int, made_at: Span | None = None) -> SizedCall:
        """Reads the scope from the shapes and chooses sizes in it, multiples of the device count
        where the scope has some.

        Arguments:
          signature: the signature, with symbolic sizes.
          devices: the device count of the mesh.
          made_at: the user's call of `sbp.jit`, if its line is known.

        Raises:
          SbpError: `symbolic-sizes` for shapes of several scopes, or constraints that no sizes
              meet.
        """
        sizes = [d for aval in signature.avals for d in aval.shape if jax.export.is_symbolic_dim(d)]
        names = {s for d in sizes for s in symbols_in(str(d))}
        whole = dict.fromkeys(
            f"{d} >= 0" for d in sizes if not str(d).isidentifier() and "-" in str(d)
        )
        scope = Scope(names, [*constraints_of(sizes), *whole])
        point = _choice(scope, devices)
        return cls(symbolic=signature, scope=scope, point=point, made_at=made_at)

    @property
    def signature(self) -> CallSignature:
        """The signature at the chosen sizes."""
        return self.at(self.point)

    def at(self, point: Point) -> CallSignature:
        """The signature at some sizes."""
        avals = tuple(
            _shape_with(a, lambda d: value_of(str(d), point)) for a in self.symbolic.avals
        )
        return dataclasses.replace(
            self.symbolic, avals=avals, key=("at", tuple(sorted(point.items())), self.symbolic.key)
        )

    @contextlib.contextmanager
    def typed_here(self) -> Iterator[None]:
        """Adds the chosen sizes as a note to type errors that are raised inside."""
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
        del avals
        with deciding_sizes("check it at concrete sizes", self.scope.constraints):
            graph, out_shape = trace(fn, self.symbolic.avals, names)
        check_symbols(graph, self.scope.names, self.symbolic.avals)
        self.traced = graph, out_shape
        unequal = next((c for c in element_counts(graph) if c.fails_at(self.point)), None)
        if unequal is not None:
            at = point_text(self.point)
            raise _unequal(unequal, f"does not keep the number of elements where {at}")
        at = lambda d: value_of(str(d), self.point)  # noqa: E731
        return graph_at(graph, self.point), jax.tree.map(lambda x: _shape_with(x, at), out_shape)

    def at_equal_elements(self, devices: int) -> SizedCall:
        """The call, once it is traced, at sizes at which each reshape keeps the number of elements.

        Arguments:
          devices: the device count of the mesh.

        Raises:
          UnequalElements: where the scope has no such sizes.
        """
        counts = element_counts(self.graph)
        for end in range(1, 1 + len(counts)):
            with contextlib.suppress(Unanswered):
                if self.scope.narrowed(c.fact for c in counts[:end]).solver().point() is None:
                    raise _unequal(
                        counts[end - 1],
                        "keeps the number of elements at no sizes that are asked for; give it a"
                        " shape of as many elements",
                    )
        narrowed = self.scope.narrowed(c.fact for c in counts)
        return dataclasses.replace(self, point=_choice(narrowed, devices))

    def decide(self, typing: Typing, asked: Callable[[list[Any]], list[Asked]]) -> Decided:
        """Decides a typing of the traced program for all sizes.

        Arguments:
          typing: its typing at the chosen sizes.
          asked: shapes of the flat results -> what is asked of each at the boundary.
        """
        graph, out_shape = self._traced
        claims = [c.claim for c in element_counts(graph)]
        claims += [*claims_of(graph, typing), *self._boundary_claims(typing.mesh)]
        if any(jax.export.is_symbolic_dim(d) for x in jax.tree.leaves(out_shape) for d in x.shape):

            def types(lift: Lift) -> list[Asked]:
                return asked(jax.tree.map(lambda x: _shape_with(x, lift), out_shape))

            with noting(), warnings.catch_warnings(action="ignore", category=SbpWarning):
                here = types(numbers(self.point))
            text = f"outputs are held at the boundary as they are where {point_text(self.point)}"
            claims.append(Claim(text=text, key="outputs", holds=lambda lift: types(lift) == here))
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

    def _boundary_claims(self, mesh: MeshSpec) -> Iterator[Claim]:
        """A claim for each pinned input that does not divide at the chosen sizes, so that its type
        at the boundary is not its pin. Sizes at which it divides have another typing."""
        for asked, aval, here, name in zip(
            self.symbolic.asked,
            self.symbolic.avals,
            self.signature.avals,
            self.symbolic.names,
            strict=True,
        ):
            if asked.type is None or here.shape == aval.shape:
                continue
            with noting(), warnings.catch_warnings(action="ignore", category=SbpWarning):
                even = even_boundary(asked, here.shape, mesh, name)[0]
            if even == asked.type:
                continue  # it divides; `claims_of` claims that
            shape = tuple(aval.shape)

            def holds(
                lift: Lift,
                asked: Asked = asked,
                shape: Any = shape,
                even: Any = even,
                name: str = name,
            ) -> bool:
                return even_boundary(asked, tuple(map(lift, shape)), mesh, name)[0] == even

            yield Claim(
                text=f"input {name} of shape {shape_text(shape)} is held {even!r}",
                key=("boundary", name),
                holds=holds,
            )


def _shape_with(aval: Any, of: Callable[[Any], Any]) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(
        map_sizes(tuple(aval.shape), of),
        aval.dtype,
        weak_type=bool(getattr(aval, "weak_type", False)),
    )


def priced_constraints(call: SizedCall, terms: Iterable[str], program: Program, then: str) -> Help:
    """The help that makes the sizes of a call with constraints, beside those that the user gives.

    Arguments:
      call: the call.
      terms: the constraints.
      program: the plan after the help.
      then: what is so after it, in words.
    """
    terms = call.scope.with_terms(terms)
    edits: tuple[Edit, ...] = sizes_edits(call.made_at, call.scope.names, terms)
    if not edits:
        function = "jax.export.symbolic_shape"
        edits = (OptionEdit(option="constraints", value=terms, function=function),)
    quoted = ", ".join(f'"{t}"' for t in terms)
    text = f"make the sizes with constraints=[{quoted}]: {then}"
    return priced(text, edits, program)


def _unequal(count: ElementCount, where: str) -> UnequalElements:
    """The error for a reshape to another number of elements.

    Arguments:
      count: the reshape.
      where: what is said of the sizes.
    """
    shapes = f"{shape_text(count.before)} to {shape_text(count.after)}"
    return UnequalElements(
        f"the reshape from {shapes} {where}", code="symbolic-sizes", span=count.span
    )


def _choice(scope: Scope, devices: int) -> Point:
    """Sizes of the scope to type the call at.

    The first choice are multiples of the device count by different primes. Then come the small
    sizes with the largest common divisors with the device count, and last a point that Z3 finds.

    Raises:
      SbpError: `symbolic-sizes` where no sizes meet the constraints.
    """
    defined = scope.defined
    free = [name for name in scope.names if name not in defined]
    for primes in itertools.islice(itertools.permutations(PRIMES, len(free)), 64):
        point = {name: devices * p for name, p in zip(free, primes, strict=True)}
        for name, size in defined.items():
            if symbols_in(size) <= point.keys():
                point[name] = value_of(size, point)
        if point.keys() == set(scope.names) and scope.allows(point):
            return {name: point[name] for name in scope.names}
    small = list(points(scope))
    if small:
        return max(
            small,
            key=lambda p: (
                sum(math.gcd(v, devices) for v in p.values()),
                -abs(max(p.values()) - PRIMES[0] * devices),
            ),
        )
    constraints = ", ".join(scope.constraints)
    try:
        found = scope.solver().point()
    except Unanswered as error:
        raise SbpError(
            f"no sizes that meet the constraints {constraints} were found; give simpler ones, or"
            " check it at concrete sizes",
            code="symbolic-sizes",
        ) from error
    if found is None:
        raise SbpError(
            f"no sizes meet the constraints {constraints}; drop one of them",
            code="symbolic-sizes",
        )
    return found
