"""Elementwise primitives. Every dim splits; linear and monotone functions keep partial operands."""

import functools
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax

from sbp import _jax
from sbp.signatures.factors import (
    admissible,
    keeps_sums,
    monoid_rows,
    moved_rows,
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

ELEMENTWISE.update(
    (name, replace(ELEMENTWISE[name], costly=True))
    for name in names("div exp exp2 expm1 log log1p pow")
)


def is_float(dtype: Any) -> bool:
    """Whether a dtype is real floating, JAX's small floats included."""
    return jnp.issubdtype(dtype, np.floating)


def monotone_rows(op: Op, directions: str) -> list[Row]:
    """Rows in which one operand is P(max) or P(min) and the others are B.

    Arguments:
      op: the equation.
      directions: how the function changes in each operand, as in `Traits.monotone`.
    """
    return [
        Row(
            tuple(Unreduced(monoid) if i == position else B for i in range(len(op.ins))),
            (Unreduced(monoid if direction == "+" else swapped),),
        )
        for position, direction in enumerate(directions)
        for monoid, swapped in (("max", "min"), ("min", "max"))
        if direction != "."
    ]


def _of_integers(source: Any, target: Any) -> bool:
    return all(jnp.issubdtype(d, np.integer) for d in (source, target))


def _adds_parts(source: Any, target: Any) -> bool:
    """Whether a cast commutes with sums and products: from a float to a wider float, and from an
    integer to one with as many or fewer bits (reduction modulo 2**k is a homomorphism).

    A cast to a narrower float rounds each part, which is a row for `sum` only where the user allows
    it. A cast from float to integer truncates each part, and integer parts wrap, so that no wider
    integer has their sum.
    """
    wraps = _of_integers(source, target) and jnp.iinfo(target).bits <= jnp.iinfo(source).bits
    return wraps or keeps_sums(source, target)


def _keeps_order(source: Any, target: Any) -> bool:
    """Whether a cast of numbers is monotone. One from float to integer is not (NaN becomes a
    number). A cast to a float without infinities is excluded too: the neutral element becomes NaN.
    """
    if _of_integers(source, target):
        low, high = (
            [getattr(jnp.iinfo(d), end) for d in (source, target)] for end in ("min", "max")
        )
        return low[1] <= low[0] and high[0] <= high[1]
    has_order = "max" in admissible(source) and is_float(target)
    return has_order and bool(np.isinf(np.array(np.inf, target)))


_KINDS: dict[str, Callable[[Any, Any], bool]] = {
    "": lambda x, out: True,
    "numbers": lambda x, out: "sum" in admissible(x),
    "products": lambda x, out: "sum" in admissible(x) and keeps_sums(x, out),
    "reals": lambda x, out: "max" in admissible(x),
    "inexact": lambda x, out: jnp.issubdtype(x, np.inexact),
    "floats": lambda x, out: is_float(x),
    "integers": lambda x, out: jnp.issubdtype(x, np.integer),
    "unsigned": lambda x, out: jnp.issubdtype(x, np.unsignedinteger),
    "booleans to reals": lambda x, out: x == np.bool_ and "max" in admissible(out),
    "to integers": lambda x, out: x == np.bool_ and jnp.issubdtype(out, np.integer),
    "between integers": _of_integers,
    "integers to booleans": lambda x, out: jnp.issubdtype(x, np.integer) and out == np.bool_,
    "adds parts": _adds_parts,
    "keeps order": _keeps_order,
}
"""The kinds of dtypes of first operand and result that laws are for."""

_MONOTONE = "reals: monotone"
"""The law of a monotone function, whose rows follow from its traits."""

_LAWS = {
    # Linear functions. Integers wrap around, so a sum of them is not monotone.
    "add add_any sub": ("numbers: sum sum -> sum", "floats: monotone"),
    "complex": ("numbers: sum sum -> sum",),
    "conj": ("numbers: sum -> sum", "prod -> prod"),
    "imag real": ("numbers: sum -> sum",),
    "neg": ("numbers: sum -> sum", "floats: monotone"),
    "mul": ("products: sum B -> sum", "products: B sum -> sum", "products: prod prod -> prod"),
    "div": ("inexact: sum B -> sum", "inexact: prod prod -> prod"),
    "abs": ("inexact: prod -> prod",),
    "cbrt": (_MONOTONE, "prod -> prod"),
    # Casts between integers drop bits or repeat the sign bit. A cast to booleans asks whether any
    # bit is set.
    "convert_element_type": (
        *("booleans to reals: or -> max", "booleans to reals: and -> min"),
        *("booleans to reals: and -> prod", "to integers: and -> and", "to integers: or -> or"),
        *("between integers: and -> and", "between integers: or -> or"),
        "integers to booleans: or -> or",
        *("adds parts: sum -> sum", "adds parts: prod -> prod"),
        *("keeps order: max -> max", "keeps order: min -> min"),
    ),
    "integer_pow square": ("prod -> prod",),
    # Functions that are NaN up to some point and rise above it. No part of a minimum is below the
    # value, so no part is NaN if the value is not.
    "acosh log log1p log2 sqrt": ("floats: min -> min",),
    # max(p, q) <= y if and only if p <= y and q <= y, so the results join by `and`. min(p, q) <= y
    # if and only if p <= y or q <= y, so the results join by `or`; this law is for integers only,
    # because a NaN part makes min(p, q) NaN.
    "le lt": (
        *("reals: max B -> and", "integers: min B -> or"),
        *("reals: B min -> and", "integers: B max -> or"),
    ),
    "ge gt": (
        *("reals: min B -> and", "integers: max B -> or"),
        *("reals: B max -> and", "integers: B min -> or"),
    ),
    "max": (_MONOTONE, "reals: max max -> max"),
    "min": (_MONOTONE, "reals: min min -> min"),
    # clamp is min(max(x, low), high). In the first row, max joins two partial operands and min
    # takes one that is B; in the others, max takes one that is B and min joins two.
    "clamp": (
        *(_MONOTONE, "reals: max max B -> max"),
        *("reals: B min min -> min", "reals: min B min -> min"),
    ),
    # The sign says whether any bit is set, and whether the sign bit is.
    "sign": (_MONOTONE, "integers: or -> or"),
    "not": (_MONOTONE, "and -> or", "or -> and"),
    # `and` and `or` distribute over each other, and each is associative.
    "and": ("and and -> and", "or B -> or", "B or -> or"),
    "or": ("or or -> or", "and B -> and", "B and -> and"),
    # The first bit of a bitwise or is the first one among the parts. To this function and to a
    # logical shift, a sign is a bit.
    "mulhi": ("unsigned: monotone",),
    "clz": ("unsigned: monotone", "or -> min"),
    # A shift moves each bit independently of the others. A left shift is also a product with a
    # power of two.
    "shift_left": ("and B -> and", "or B -> or", "sum B -> sum"),
    "shift_right_arithmetic": (_MONOTONE, "and B -> and", "or B -> or"),
    "shift_right_logical": ("unsigned: monotone", "and B -> and", "or B -> or"),
}
"""The laws of elementwise primitives: rows of monoids and B, each with the kind of dtypes that it
holds for. A monotone primitive without an entry has the law `_MONOTONE`."""

_LAWS_OF = {name: laws for text, laws in _LAWS.items() for name in names(text)}


@functools.cache
def _row(law: str) -> Row:
    """The row that a law states.

    >>> _row("max B -> and")
    P(max), B -> P(and)
    """
    sides = (side.split() for side in law.split("->"))
    ins, outs = (tuple(B if a == "B" else Unreduced(a) for a in atoms) for atoms in sides)
    return Row(ins, outs)


def partial_rows(op: Op) -> list[Row]:
    """The partial rows of an elementwise primitive; without such rows it takes no partial
    operand."""
    if any(_jax.is_extended(a.dtype) for a in (*op.ins, *op.outs)) or not op.ins:
        return []
    traits = traits_of(op.name)
    dtype, target = op.ins[0].dtype, op.outs[0].dtype
    rows = moved_rows(op) if traits.moves else []
    for text in _LAWS_OF.get(op.name, (_MONOTONE,) if traits.monotone else ()):
        kind, _, law = text.rpartition(": ")
        if _KINDS[kind](dtype, target):
            rows += monotone_rows(op, traits.monotone) if law == "monotone" else [_row(law)]
    match op.name:
        case "integer_pow" if is_float(dtype) and op.params["y"] > 0 and op.params["y"] % 2 == 1:
            rows += monotone_rows(op, "+")
        case "select_n" | "tie":
            rows += moved_rows(op, range(1, len(op.ins)))
        case "convert_element_type" if dtype == target:
            rows = moved_rows(op)
        case "convert_element_type" if (
            op.rounds_parts
            and not keeps_sums(dtype, target)
            and all(jnp.issubdtype(d, np.inexact) for d in (dtype, target))
        ):
            rows = [
                *(replace(row, kernel=ROUNDED_PARTS.name) for row in monoid_rows(op, "sum")),
                *rows,
            ]
        case _:
            pass
    return rows


def elementwise_rows(op: Op) -> Sequence[Row]:
    """All rows of an elementwise primitive except all-B."""
    return [*rows_beside(op), *partial_rows(op)]


rule(*ELEMENTWISE, traits=ELEMENTWISE.__getitem__, local=bind_with)(elementwise_rows)


# One operand of the barrier: it keeps every type.
rule(
    "optimization_barrier",
    traits=Traits(moves=True, scales="together", fusion="free"),
    local=lambda ctx, args: lax.optimization_barrier(list(args)),
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
