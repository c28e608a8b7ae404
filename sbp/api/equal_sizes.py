"""Two symbolic sizes that a program takes for one: `check` says which, where JAX refuses the
program for different sizes and takes it for equal ones."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Iterator

import jax

from sbp import _jax
from sbp.api.call import CallSignature
from sbp.api.symbolic import SizedCall, priced_constraints
from sbp.errors import Diagnostic, Label, SbpError
from sbp.plan.program import Program
from sbp.sizes.expressions import map_sizes

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
