"""Elementwise primitives: every dim splits; what is linear or monotone carries partials."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from sbp import _jax
from sbp.signatures.factors import linear_rows, monoid_rows, multilinear_rows
from sbp.signatures.rule import LocalContext, Op, Row, Rule, add_rule, bind_with, rule
from sbp.types import Atom, B, Split, Unreduced

_NONLINEAR = """
    abs acos acosh asin asinh atan atan2 atanh bessel_i0e bessel_i1e cbrt ceil clamp cos cosh digamma
    eq erf erf_inv erfc exp exp2 expm1 floor ge gt igamma igamma_grad_a igammac integer_pow is_finite le lgamma log log1p log2
    logistic lt ne nextafter not or and xor pow polygamma population_count clz rem round rsqrt
    random_gamma_grad regularized_incomplete_beta shift_left shift_right_arithmetic shift_right_logical sign sin sinh sqrt square tan tanh zeta
    erf_inv eq_to le_to lt_to max min mul div add sub add_any neg real imag complex conj select_n convert_element_type copy copy_p
    stop_gradient reduce_precision threefry2x32 mulhi one_minus_square polynomial device_put
""".split()

_LINEAR = frozenset("add sub add_any neg real imag complex conj copy copy_p stop_gradient device_put".split())
_INCREASING = frozenset("exp exp2 expm1 tanh logistic floor ceil round cbrt sinh asinh atan erf copy copy_p stop_gradient device_put".split())
"""Non-decreasing on their whole domain: they carry P(max) and P(min)."""


def split_atoms(op: Op) -> list[Row]:
    """One row for each dim; scalar operands, and those that a size-1 dim is broadcast along, stay B."""
    rank = max((len(a.shape) for a in op.outs), default=0)
    rows = []
    for dim in range(rank):
        split = Split(dim)
        size = op.outs[0].shape[dim]
        ins = tuple(split if len(a.shape) == rank and a.shape[dim] == size else B for a in op.ins)
        rows.append(Row(ins, (split,) * len(op.outs)))
    return rows


def _is_float(aval: Any) -> bool:
    return not _jax.is_extended(aval.dtype) and np.issubdtype(_numpy_kind(aval.dtype), np.inexact)


def _numpy_kind(dtype: Any) -> Any:
    """The dtype, with JAX's small floats (bfloat16, float8) seen as floats."""
    import jax.numpy as jnp

    return np.float32 if jnp.issubdtype(dtype, jnp.floating) else dtype


def _is_bool(aval: Any) -> bool:
    return aval.dtype == np.bool_


def _swap(op: Op, pairs: Sequence[tuple[str, str]]) -> list[Row]:
    return [Row((Unreduced(a),), (Unreduced(b),)) for a, b in pairs]


def partial_rows(op: Op) -> list[Row]:
    """The partial rows of an elementwise primitive; what is not listed here denies P."""
    rows: list[Row] = []
    if any(_jax.is_extended(a.dtype) for a in (*op.ins, *op.outs)):
        return rows
    if op.name in _LINEAR and not any(_is_bool(a) for a in op.ins):
        rows += linear_rows(op)
    if op.name in _INCREASING and not _is_bool(op.ins[0]) and not _is_complex(op.ins[0]):
        rows += monoid_rows(op, "max", "min")
    ordered = not any(_is_complex(a) for a in op.ins)
    match op.name:
        case "mul" if not _is_bool(op.ins[0]):
            rows += multilinear_rows(op, (0, 1))
        case "div" if _is_float(op.outs[0]) or _is_complex(op.outs[0]):
            rows += multilinear_rows(op, (0,))
        case "select_n":
            cases = range(1, len(op.ins))
            if not _is_bool(op.outs[0]):
                rows += linear_rows(op, cases)
            if ordered:
                rows += [_select(op, m) for m in ("max", "min")]
        case "max":
            rows += monoid_rows(op, "max") if ordered else []
        case "min":
            rows += monoid_rows(op, "min") if ordered else []
        case "add" | "sub" if ordered and not _is_bool(op.ins[0]) and _is_float(op.ins[0]):
            # Adding a broadcast value is increasing in the partial one; subtracting a partial is decreasing in it.
            for m, swapped in (("max", "min"), ("min", "max")):
                rows.append(Row((Unreduced(m), B), (Unreduced(m),)))
                rows.append(Row((B, Unreduced(m)), (Unreduced(m if op.name == "add" else swapped),)))
        case "neg" if ordered and _is_float(op.ins[0]):
            rows += _swap(op, (("max", "min"), ("min", "max")))
        case "convert_element_type":
            rows += _cast_rows(op)
        case "and":
            rows += monoid_rows(op, "and")
        case "or":
            rows += monoid_rows(op, "or")
        case "not":
            rows += _swap(op, (("and", "or"), ("or", "and")))
        case _:
            pass
    return rows


def _is_complex(aval: Any) -> bool:
    return not _jax.is_extended(aval.dtype) and np.issubdtype(aval.dtype, np.complexfloating)


def _select(op: Op, monoid: str) -> Row:
    return Row((B, *(Unreduced(monoid),) * (len(op.ins) - 1)), (Unreduced(monoid),))


def _cast_rows(op: Op) -> list[Row]:
    """Casts carry a partial sum only float to float and never to fewer bits: a cast down before the reduction rounds every part."""
    source, target = op.ins[0].dtype, op.outs[0].dtype
    if source == target:
        return [*linear_rows(op), *monoid_rows(op, "max", "min")] if not _is_bool(op.ins[0]) else []
    if _is_complex(op.ins[0]) or not (_is_float(op.ins[0]) and (_is_float(op.outs[0]) or _is_complex(op.outs[0]))):
        return []
    if target.itemsize > source.itemsize:
        return [*linear_rows(op), *(() if _is_complex(op.outs[0]) else monoid_rows(op, "max", "min"))]
    return []


def elementwise_rows(op: Op) -> Sequence[Row]:
    """All rows of an elementwise primitive."""
    return [*split_atoms(op), *partial_rows(op)]


def _local(ctx: LocalContext, args: Sequence[Any]) -> list[Any]:
    return bind_with(ctx, args)


for _name in dict.fromkeys(_NONLINEAR):
    rule(_name, local=_local)(elementwise_rows)


def _barrier_rows(op: Op) -> Sequence[Row]:
    """One operand of the barrier: any type passes."""
    atoms: list[Atom] = [B, *(Split(d) for d in range(len(op.ins[0].shape)))]
    if not _jax.is_extended(op.ins[0].dtype):
        atoms += [Unreduced(m) for m in ("sum", "max", "min", "and", "or")]
    return [Row((a,), (a,)) for a in atoms]


add_rule(
    Rule(
        name="optimization_barrier",
        rows=_barrier_rows,
        local=lambda ctx, args: _jax.optimization_barrier(args),
        operandwise=True,
    )
)
