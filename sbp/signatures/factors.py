"""Factor maps: an operator as named factors on the dims of its operands and results, einsum-like;
rows follow from them.

A factor names a loop of the operator. Splitting that loop over a mesh axis splits every dim that
carries the factor; a result that lacks it is then a partial reduction (when the operator reduces
over the loop) or has no such row.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
import numpy as np

from sbp import _jax
from sbp.signatures.rule import Op, Row
from sbp.types import Atom, B, P, Split, Unreduced

Dims = tuple[str | None, ...]
"""The factor of each dim of one tensor; None for a dim that may not be split."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FactorMap:
    """An operator's factors.

    Arguments:
      ins: factors of each operand's dims.
      outs: factors of each result's dims.
      contract: the monoid that joins parts where a factor is on operands but not on results; None
          when there is no such row.
      accumulate: positions of operands that the contraction adds to (a scatter's operand): partial
          in contracting rows.
      masks_padding: the kernel makes padding neutral, so that contracting rows need no even shards.
    """

    ins: tuple[Dims, ...]
    outs: tuple[Dims, ...]
    contract: str | None = None
    accumulate: tuple[int, ...] = ()
    masks_padding: bool = False


def named(letters: str) -> Dims:
    """`named("ik")` is ("i", "k"); a dot is a dim that may not be split."""
    return tuple(None if c == "." else c for c in letters)


def _atom(dims: Dims, factor: str) -> Atom:
    return Split(dims.index(factor)) if factor in dims else B


def split_rows(op: Op, m: FactorMap) -> list[Row]:
    """The rows in which one factor is split over the mesh axis.

    Contracting rows ask for even shards, unless the kernel masks: the padding of an uneven one
    would enter the reduction.
    """
    sizes: dict[str, int] = {}
    for dims, aval in zip((*m.ins, *m.outs), (*op.ins, *op.outs), strict=True):
        for factor, size in zip(dims, aval.shape, strict=True):
            if factor is not None:
                sizes.setdefault(factor, size)
    rows: list[Row] = []
    for factor, size in sizes.items():
        ins = [_atom(dims, factor) for dims in m.ins]
        on_operand = any(factor in dims for dims in m.ins)
        missing = [factor not in dims for dims in m.outs]
        if on_operand and any(missing):
            if m.contract is None or not all(missing) or not (m.masks_padding or op.divides(size)):
                continue
            for position in m.accumulate:
                ins[position] = Unreduced(m.contract)
            rows.append(Row(tuple(ins), (Unreduced(m.contract),) * len(m.outs)))
        else:
            rows.append(Row(tuple(ins), tuple(_atom(dims, factor) for dims in m.outs)))
    return rows


def admissible(dtype: np.dtype) -> tuple[str, ...]:
    """The monoids that a dtype has: numbers add and multiply, real ones are ordered, booleans and
    integers have bits.

    >>> admissible(np.dtype(bool))
    ('and', 'or')
    """
    if _jax.is_extended(dtype):
        return ()
    if dtype == np.bool_:
        return ("and", "or")
    ordered = () if jnp.issubdtype(dtype, np.complexfloating) else ("max", "min")
    bits = ("and", "or") if jnp.issubdtype(dtype, np.integer) else ()
    return ("sum", *ordered, "prod", *bits)


def owned_monoid(dtype: Any) -> str | None:
    """The monoid under which one owner's value and zeros elsewhere are parts; None where the dtype
    has none."""
    monoids = admissible(dtype)
    return "sum" if "sum" in monoids else "or" if "or" in monoids else None


def moved_rows(op: Op, positions: Sequence[int] | None = None) -> list[Row]:
    """Partial rows of an operator that only moves elements: it commutes with every monoid of the
    dtype."""
    chosen = range(len(op.ins)) if positions is None else positions
    rows = []
    for monoid in admissible(op.outs[0].dtype):
        atom = Unreduced(monoid)
        rows.append(
            Row(
                tuple(atom if i in chosen else B for i in range(len(op.ins))),
                (atom,) * len(op.outs),
            )
        )
    return rows


def linear_rows(op: Op, positions: Sequence[int] | None = None) -> list[Row]:
    """Partial sums in all the given operands at once (all of them by default) give partial sums:
    f(a+b) = f(a) + f(b)."""
    chosen = range(len(op.ins)) if positions is None else positions
    ins = tuple(P if i in chosen else B for i in range(len(op.ins)))
    return [Row(ins, (P,) * len(op.outs))]


def multilinear_rows(op: Op, positions: Sequence[int]) -> list[Row]:
    """A partial sum in exactly one of the given operands, the others B: f(a+b, y) = f(a, y) + f(b,
    y)."""
    return [row for i in positions for row in linear_rows(op, (i,))]


def monoid_rows(op: Op, *monoids: str) -> list[Row]:
    """All operands partial under a monoid that the operator commutes with."""
    return [Row((Unreduced(m),) * len(op.ins), (Unreduced(m),) * len(op.outs)) for m in monoids]
