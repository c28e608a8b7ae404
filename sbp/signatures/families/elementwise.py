"""Elementwise primitives. Every dim splits; linear and monotone functions keep partial operands."""

import functools
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax

from sbp import _jax
from sbp.signatures.factors import (
    admissible,
    keeps_sums,
    linear_rows,
    monoid_rows,
    moved_rows,
    multilinear_rows,
    partial_row,
    rows_beside,
)
from sbp.signatures.rule import (
    ROUNDED_PARTS,
    Op,
    Row,
    Traits,
    bind_with,
    names,
    rule,
    traits_of,
)
from sbp.types import B, Unreduced

_of = functools.partial(Traits, elementwise=True, pointwise=True)
"""Traits that elementwise primitives share, and others as arguments."""

ELEMENTWISE: dict[str, Traits] = {
    **dict.fromkeys(
        names("""
            acos acosh and asin atan2 atanh bessel_i0e bessel_i1e complex cos cosh digamma eq_to
            erf_inv igamma igamma_grad_a igammac le_to lgamma log1p log2 lt_to
            one_minus_square or philox2x32 philox4x32 polygamma polynomial population_count pow
            regularized_incomplete_beta rem rsqrt shift_left sin tan threefry2x32 threefry4x32 xor
            zeta
        """),
        _of(),
    ),
    **dict.fromkeys(names("abs conj imag real tie"), _of(scales="together")),
    **dict.fromkeys(names("add add_any"), _of(monotone="++", scales="together", numpy=np.add)),
    **dict.fromkeys(
        names("asinh atan cbrt ceil erf exp2 expm1 floor logistic round sinh tanh"),
        _of(monotone="+"),
    ),
    "clamp": _of(monotone="+++"),
    **dict.fromkeys(names("clz erfc not"), _of(monotone="-")),
    "convert_element_type": _of(
        carries="rounded", scales="together", fusion="inlined", unnamed=True, adapts=True
    ),
    "copy": _of(moves=True, carries="copied", scales="together", adapts=True),
    "device_put": _of(moves=True, carries="copied", scales="together", unnamed=True, adapts=True),
    "div": _of(scales="ratio", numpy=np.divide),
    "eq": _of(scales="compared", numpy=np.equal),
    "exp": _of(monotone="+", numpy=np.exp),
    "ge": _of(scales="compared", numpy=np.greater_equal),
    "gt": _of(scales="compared", numpy=np.greater),
    "integer_pow": _of(scales="power"),
    "is_finite": _of(scales="never", numpy=np.isfinite),
    "le": _of(scales="compared", numpy=np.less_equal),
    "log": _of(numpy=np.log),
    "lt": _of(scales="compared", numpy=np.less),
    "max": _of(monotone="++", scales="together", numpy=np.maximum),
    "min": _of(monotone="++", scales="together", numpy=np.minimum),
    "mul": _of(scales="each", multiplies=True, numpy=np.multiply),
    "name": _of(moves=True, carries="copied", scales="together"),
    "ne": _of(scales="compared", numpy=np.not_equal),
    "neg": _of(carries="negated", monotone="-", scales="together", numpy=np.negative),
    "nextafter": _of(monotone="++"),
    "reduce_precision": _of(carries="rounded", monotone="+", scales="together"),
    "select_n": _of(scales="together", indices=range(1)),
    **dict.fromkeys(names("shift_right_arithmetic shift_right_logical"), _of(monotone="+.")),
    "sign": _of(monotone="+", scales="never"),
    "sqrt": _of(scales="root", numpy=np.sqrt),
    "square": _of(scales="power", numpy=np.square),
    "stop_gradient": _of(moves=True, carries="copied", scales="together", unnamed=True),
    "sub": _of(monotone="+-", scales="together", numpy=np.subtract),
    "xla_metadata_value": _of(moves=True, carries="copied", scales="together"),
}
"""Elementwise primitives with their traits. Enter a new one here.

A function is `monotone` if it is so on its *whole* domain. The square root is not: one part of a
nonnegative number may be negative. In a monotone function one operand may be P(max) or P(min) while
the others are B; a falling function swaps the two monoids.
"""

for _name in names("div exp exp2 expm1 log log1p pow"):
    ELEMENTWISE[_name] = replace(ELEMENTWISE[_name], costly=True)

_LINEAR = frozenset(names("add add_any complex conj imag neg real sub"))
"""Primitives that are linear in all operands together: partial sums in all of them give partial
sums."""

_OF_UNSIGNED = frozenset(names("clz shift_right_logical"))
"""Primitives that are monotone on unsigned integers only: to them a sign is a bit."""

_RISES_ABOVE = frozenset(names("acosh log log1p log2 sqrt"))
"""Functions that are NaN up to some point and rise above it. They keep P(min) only: no part of a
minimum is below the value, so no part is NaN if the value is not."""

_COMPARISONS = {"lt": "-+", "le": "-+", "gt": "+-", "ge": "+-"}
"""How each comparison changes as an operand grows: `+` from false to true, `-` from true to
false."""

_WRAPS = frozenset(names("add add_any neg sub"))
"""Primitives that are monotone on floats only: integers wrap around."""

_SWAPPED = {"max": "min", "min": "max"}
"""The monoid of the result of a falling function, by that of the operand."""

PMAX, PMIN = Unreduced("max"), Unreduced("min")


def is_float(dtype: Any) -> bool:
    """Whether a dtype is real floating, JAX's small floats included."""
    return jnp.issubdtype(dtype, np.floating)


def is_complex(dtype: Any) -> bool:
    """Whether a dtype is complex."""
    return jnp.issubdtype(dtype, np.complexfloating)


def monotone_rows(op: Op, directions: str) -> list[Row]:
    """Rows in which one operand is P(max) or P(min) and the others are B.

    Arguments:
      op: the equation.
      directions: how the function changes in each operand, as in `Traits.monotone`.
    """
    return [
        partial_row(op, position, monoid, monoid if direction == "+" else _SWAPPED[monoid])
        for position, direction in enumerate(directions)
        for monoid in ("max", "min")
        if direction != "."
    ]


def comparison_rows(op: Op, directions: str) -> list[Row]:
    """Rows in which one operand of an order relation is a maximum or minimum of parts, the other
    one B.

    max(p, q) <= y if and only if p <= y and q <= y, so the results join by `and`. min(p, q) <= y if
    and only if p <= y or q <= y, so the results join by `or`; this row is for integers only,
    because a NaN part makes min(p, q) NaN.

    Arguments:
      op: the equation.
      directions: for each operand, `+` where the relation becomes true as it grows, `-` where it
          becomes false.
    """
    rows = []
    for position, direction in enumerate(directions):
        all_of, one_of = ("max", "min") if direction == "-" else ("min", "max")
        rows.append(partial_row(op, position, all_of, "and"))
        if not is_float(op.ins[0].dtype):
            rows.append(partial_row(op, position, one_of, "or"))
    return rows


def partial_rows(op: Op) -> list[Row]:
    """The partial rows of an elementwise primitive; without such rows it takes no partial
    operand."""
    if any(_jax.is_extended(a.dtype) for a in (*op.ins, *op.outs)) or not op.ins:
        return []
    has = admissible(op.ins[0].dtype)
    rows: list[Row] = []
    traits = traits_of(op.name)
    if traits.moves:
        rows += moved_rows(op)
    if op.name in _LINEAR and "sum" in has:
        rows += linear_rows(op)
    if traits.monotone and "max" in has and _rises_on(op):
        rows += monotone_rows(op, traits.monotone)
    if op.name in _RISES_ABOVE and is_float(op.ins[0].dtype):
        rows += monoid_rows(op, "min")
    if op.name in _COMPARISONS and "max" in has:
        rows += comparison_rows(op, _COMPARISONS[op.name])
    return [*rows, *_own_rows(op, has)]


def _own_rows(op: Op, has: Sequence[str]) -> list[Row]:
    """The partial rows that hold for one primitive, by laws of its own.

    Arguments:
      op: the equation.
      has: the monoids of its first operand's dtype.
    """
    match op.name:
        case "shift_left" | "shift_right_arithmetic" | "shift_right_logical":
            # A shift moves each bit independently of the others. A left shift is also a product
            # with a power of two.
            bits = monoid_rows(op, "and", "or", positions=(0,))
            return [*bits, *(multilinear_rows(op, (0,)) if op.name == "shift_left" else [])]
        case "clamp" if "max" in has:
            # clamp is min(max(x, low), high). In the first row, max joins two partial operands and
            # min takes one that is B; in the others, max takes one that is B and min joins two.
            return [
                Row((PMAX, PMAX, B), (PMAX,)),
                Row((B, PMIN, PMIN), (PMIN,)),
                Row((PMIN, B, PMIN), (PMIN,)),
            ]
        case "square" | "conj" | "cbrt":
            return monoid_rows(op, "prod")
        case "abs" if jnp.issubdtype(op.ins[0].dtype, np.inexact):
            return monoid_rows(op, "prod")
        case "clz":
            # The first bit of a bitwise or is the first one among the parts.
            return [partial_row(op, 0, "or", "min")]
        case "mul" if "sum" in has and keeps_sums(op.ins[0].dtype, op.outs[0].dtype):
            return [*multilinear_rows(op, (0, 1)), *monoid_rows(op, "prod")]
        case "div" if jnp.issubdtype(op.outs[0].dtype, np.inexact):
            return [*multilinear_rows(op, (0,)), *monoid_rows(op, "prod")]
        case "integer_pow":
            rises = is_float(op.ins[0].dtype) and op.params["y"] > 0 and op.params["y"] % 2 == 1
            return [*monoid_rows(op, "prod"), *(monotone_rows(op, "+") if rises else [])]
        case "sign" if jnp.issubdtype(op.ins[0].dtype, np.integer):
            # The sign says whether any bit is set, and whether the sign bit is.
            return monoid_rows(op, "or")
        case "select_n":
            return moved_rows(op, range(1, len(op.ins)))
        case "tie":
            return [Row((B, Unreduced(m)), (Unreduced(m),)) for m in admissible(op.outs[0].dtype)]
        case "max" | "min" if op.name in has:
            return monoid_rows(op, op.name)
        case "convert_element_type":
            return cast_rows(op)
        case "not":
            return [partial_row(op, 0, "and", "or"), partial_row(op, 0, "or", "and")]
        case "and" | "or":
            # `and` and `or` distribute over each other, and each is associative.
            other = "or" if op.name == "and" else "and"
            return [*monoid_rows(op, op.name), *(partial_row(op, k, other, other) for k in (0, 1))]
        case _:
            return []


def _rises_on(op: Op) -> bool:
    """Whether a monotone primitive is monotone on the dtype of its operands."""
    if op.name in _WRAPS:
        return is_float(op.ins[0].dtype)
    return op.name not in _OF_UNSIGNED or jnp.issubdtype(op.ins[0].dtype, np.unsignedinteger)


def cast_rows(op: Op) -> list[Row]:
    """The partial rows of a cast.

    * `sum` and `prod`: from a float to a wider float, and from an integer to one with as many or
      fewer bits (reduction modulo 2**k is a homomorphism). A cast to a narrower float rounds each
      part, which is a row for `sum` only where the user allows it. A cast from float to integer
      truncates each part, and integer parts wrap, so that no wider integer has their sum.
    * `max` and `min`: monotone casts. A cast from float to integer is not monotone (NaN becomes a
      number). A cast to a float without infinities is excluded too: the neutral element becomes
      NaN.
    * `and` and `or`: casts between integers drop bits or repeat the sign bit. A cast to booleans
      asks whether any bit is set, which keeps `or`.
    """
    source, target = op.ins[0].dtype, op.outs[0].dtype
    if source == target:
        return moved_rows(op)
    if source == np.bool_:
        if "max" not in admissible(target):
            return []
        bits = monoid_rows(op, "and", "or") if jnp.issubdtype(target, np.integer) else []
        return [
            *(
                Row((Unreduced(a),), (Unreduced(b),))
                for a, b in (("or", "max"), ("and", "min"), ("and", "prod"))
            ),
            *bits,
        ]
    if jnp.issubdtype(source, np.integer) and target == np.bool_:
        return monoid_rows(op, "or")
    integers, floats = (
        all(jnp.issubdtype(d, kind) for d in (source, target)) for kind in (np.integer, np.inexact)
    )
    wider = target.itemsize > source.itemsize and (is_complex(target) or not is_complex(source))
    wraps = integers and jnp.iinfo(target).bits <= jnp.iinfo(source).bits
    sums = monoid_rows(op, "sum", "prod") if wraps or (floats and wider) else []
    if op.rounds_parts and floats and not wider:
        sums = [replace(row, kernel=ROUNDED_PARTS.name) for row in linear_rows(op)]
    holds_all = (
        integers
        and jnp.iinfo(target).min <= jnp.iinfo(source).min
        and jnp.iinfo(source).max <= jnp.iinfo(target).max
    )
    is_ordered = not is_complex(source) and (
        holds_all or (is_float(target) and np.isinf(np.array(np.inf, target)))
    )
    return [
        *(monoid_rows(op, "and", "or") if integers else []),
        *sums,
        *(monoid_rows(op, "max", "min") if is_ordered else []),
    ]


def elementwise_rows(op: Op) -> Sequence[Row]:
    """All rows of an elementwise primitive except all-B."""
    return [*rows_beside(op), *partial_rows(op)]


rule(*ELEMENTWISE, traits=ELEMENTWISE.__getitem__, local=bind_with)(elementwise_rows)


# One operand of the barrier: it keeps every type.
rule(
    "optimization_barrier",
    traits=Traits(moves=True, scales="together", fusion="free"),
    local=lambda ctx, args: _jax.optimization_barrier(args),
)(lambda op: [*rows_beside(op), *moved_rows(op)])


# ---- mulhi --------------------------------------------------------------------------------------
# `mulhi`, the high half of a product of integers, computed from half words: under `shard_map`, JAX
# 0.10 and 0.12 cannot compile the primitive on CPU.


def high_half(x: Any, y: Any) -> Any:
    """The high word of the product of two integers of the same dtype.

    >>> int(high_half(jnp.int32(2**30), jnp.int32(-12)))
    -3
    """
    dtype = x.dtype
    width = jnp.iinfo(dtype).bits
    word = jnp.dtype(f"uint{width}")
    half, mask = jnp.asarray(width // 2, word), jnp.asarray(2 ** (width // 2) - 1, word)
    a, b = lax.bitcast_convert_type(x, word), lax.bitcast_convert_type(y, word)
    (a1, a0), (b1, b0) = ((lax.shift_right_logical(v, half), v & mask) for v in (a, b))
    carried = lax.shift_right_logical(a0 * b0, half) + (a1 * b0 & mask) + (a0 * b1 & mask)
    high = (
        a1 * b1
        + lax.shift_right_logical(a1 * b0, half)
        + lax.shift_right_logical(a0 * b1, half)
        + lax.shift_right_logical(carried, half)
    )
    if jnp.issubdtype(dtype, jnp.signedinteger):
        # Read as an unsigned word, a negative number is larger by 2**width.
        zero = jnp.zeros((), word)
        high = high - jnp.where(x < 0, b, zero) - jnp.where(y < 0, a, zero)
    return lax.bitcast_convert_type(high, dtype)


rule(
    "mulhi",
    traits=Traits(monotone="++"),
    local=lambda ctx, args: [high_half(*jnp.broadcast_arrays(*args))],
)(elementwise_rows)
