"""Primitives as terms of Z3, on one element of each operand. Floats are reals; integers are bit
vectors, which wrap."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
import numpy as np
import z3

BITS = 5
"""Bits of the integers in proofs. The laws are the same for every width, and Z3 is slow on wide
multiplications."""

Term = Any
"""A term of Z3, whose classes have no useful types."""


def join(monoid: str, x: Term, y: Term, unsigned: bool = False) -> Term:
    """The value that two parts stand for under a monoid.

    Arguments:
      monoid: the monoid.
      x: one part.
      y: the other part.
      unsigned: whether integers are unsigned, for `max` and `min`.
    """
    if unsigned and monoid in ("max", "min"):
        return z3.If(z3.UGE(x, y) if monoid == "max" else z3.ULE(x, y), x, y)
    match monoid:
        case "sum":
            return x + y
        case "prod":
            return x * y
        case "max":
            return z3.If(x >= y, x, y)
        case "min":
            return z3.If(x <= y, x, y)
        case "and":
            return z3.And(x, y) if z3.is_bool(x) else x & y
        case _:
            return z3.Or(x, y) if z3.is_bool(x) else x | y


def variable(name: str, dtype: np.dtype) -> Term:
    """A variable for any value of a dtype."""
    if dtype == np.bool_:
        return z3.Bool(name)
    return z3.BitVec(name, BITS) if jnp.issubdtype(dtype, np.integer) else z3.Real(name)


def _chosen(index: Term, *cases: Term) -> Term:
    """`select_n`: the index is a boolean or a number."""
    out = cases[0]
    for k, case in enumerate(cases[1:], 1):
        out = z3.If(index if z3.is_bool(index) else index == k, case, out)
    return out


def _ceil(x: Term) -> Term:
    below: Term = z3.ToReal(z3.ToInt(x))
    return z3.If(z3.IsInt(x), x, below + 1)


def _truncated(x: Term) -> Term:
    above: Term = z3.ToReal(z3.ToInt(-x))
    return z3.If(x >= 0, z3.ToReal(z3.ToInt(x)), -above)


def _sign(x: Term) -> Term:
    """The sign; integers are signed."""
    one: Term = z3.BitVecVal(1, BITS) if z3.is_bv(x) else z3.RealVal(1)
    return z3.If(x > 0, one, z3.If(x < 0, -one, one - one))


def _leading_zeros(x: Term) -> Term:
    """The number of zero bits before the first set bit."""
    out: Term = z3.BitVecVal(BITS, BITS)
    for k in range(BITS):
        out = z3.If(z3.Extract(k, k, x) == 1, z3.BitVecVal(BITS - 1 - k, BITS), out)
    return out


SCALAR: dict[str, Callable[..., Term]] = {
    "abs": lambda x: z3.If(x >= 0, x, -x),
    "add": lambda x, y: x + y,
    "add_any": lambda x, y: x + y,
    "and": lambda x, y: join("and", x, y),
    "ceil": _ceil,
    "clamp": lambda low, x, high: join("min", join("max", x, low), high),
    "div": lambda x, y: x / y,
    "floor": lambda x: z3.ToReal(z3.ToInt(x)),
    "max": lambda x, y: join("max", x, y),
    "min": lambda x, y: join("min", x, y),
    "mul": lambda x, y: x * y,
    "neg": lambda x: -x,
    "not": lambda x: z3.Not(x) if z3.is_bool(x) else ~x,
    "or": lambda x, y: join("or", x, y),
    "select_n": _chosen,
    "mulhi": lambda x, y: z3.Extract(2 * BITS - 1, BITS, z3.ZeroExt(BITS, x) * z3.ZeroExt(BITS, y)),
    "ge": lambda x, y: x >= y,
    "gt": lambda x, y: x > y,
    "le": lambda x, y: x <= y,
    "lt": lambda x, y: x < y,
    "clz": _leading_zeros,
    "shift_left": lambda x, y: x << y,
    "shift_right_arithmetic": lambda x, y: x >> y,
    "shift_right_logical": lambda x, y: z3.LShR(x, y),
    "sign": _sign,
    "square": lambda x: x * x,
    "sub": lambda x, y: x - y,
    "tie": lambda x, y: y,
    "truncate": _truncated,
}
"""Elementwise primitives on one element of each operand."""


def cast(source: Any, target: Any) -> Callable[..., Term] | None:
    """A cast on one element; None for a cast between integers and floats, which has no term.

    Between integers of different widths, the bit vectors differ by one bit. Casts between floats do
    not round.
    """
    if source == np.bool_:
        one: Term = z3.BitVecVal(1, BITS) if jnp.issubdtype(target, np.integer) else z3.RealVal(1)
        return lambda x: z3.If(x, one, one - one)
    if jnp.issubdtype(source, np.integer) and target == np.bool_:
        return lambda x: x != 0
    if all(jnp.issubdtype(d, np.inexact) for d in (source, target)):
        return lambda x: x
    if not all(jnp.issubdtype(d, np.integer) for d in (source, target)):
        return None
    wider = jnp.iinfo(target).bits - jnp.iinfo(source).bits
    if wider == 0:
        return lambda x: x
    if wider < 0:
        return lambda x: z3.Extract(BITS - 2, 0, x)
    return lambda x: (
        z3.ZeroExt(1, x) if jnp.issubdtype(source, np.unsignedinteger) else z3.SignExt(1, x)
    )
