"""Helpers of the traps: a row is shown absent and refuted, and a program is compared with the plain
function."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from enumeration import Enumeration, axis_sizes
from samples import equation, f

import sbp
from sbp.signatures import Op, Row, rule_for
from sbp.types import Atom, P

PMAX = P("max")

X, W, V = f(6, 8), f(8, 4, seed=1), f(4, 3, seed=2)


def on(n: int) -> Any:
    """One axis of n devices."""
    return jax.make_mesh((n,), ("x",), devices=jax.devices()[:n])


def same(fn: Callable[..., Any], mesh: Any, *args: Any, rtol: float = 3e-5) -> sbp.Plan:
    """Checks that the planned program computes the results of the plain function; returns the plan.

    Arguments:
      fn: the function.
      mesh: the mesh.
      args: its arguments.
      rtol: relative and absolute tolerance of floats.
    """
    planned = sbp.jit(fn, mesh)
    got, want = planned(*args), jax.jit(fn)(*args)
    for g, w in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        assert g.shape == w.shape and g.dtype == w.dtype
        if jnp.issubdtype(w.dtype, np.inexact):
            np.testing.assert_allclose(
                np.asarray(g, np.float64), np.asarray(w, np.float64), rtol=rtol, atol=rtol
            )
        else:
            np.testing.assert_array_equal(g, w)
    return planned.plan(*args)


def kinds(plan: sbp.Plan) -> Counter[str]:
    """How often each kind of conversion occurs in a plan."""
    return Counter(step.kind for box in plan.program.boxes() for step in box.box.steps)


def partial_product(x: Any = X, w: Any = W) -> Any:
    """A product whose contracted dim is split: partial sums."""
    return sbp.partial(sbp.split(x, 1, "x") @ w, "x")


def refused(name: str, fn: Callable[..., Any], args: tuple[Any, ...], *rows: Row) -> None:
    """Checks that no rule gives some rows, and that parts refute each: the primitive on parts is
    not the primitive on whole operands.

    Arguments:
      name: the primitive.
      fn: a function that traces to it.
      args: the arguments.
      rows: the rows.
    """
    eqn = equation(name, fn, args)
    enumeration = Enumeration(eqn)
    for row in rows:
        sizes = axis_sizes(eqn.op.ins, row.ins)
        hold = [all(enumeration.holds(row.ins, [[atom] for atom in row.outs], n)) for n in sizes]
        assert sizes and not all(hold), f"{name}: {row} holds"
        assert row not in table(name, eqn.op), f"{name}: {row} is in the table"


def table(name: str, op: Op, n: int = 2) -> tuple[Row, ...]:
    found = rule_for(name)
    assert found is not None
    return tuple(found.rows(Op(op.name, op.params, op.ins, op.outs, n)))


def unary(*atoms: Atom) -> Row:
    return Row(atoms[:1], atoms[1:])
