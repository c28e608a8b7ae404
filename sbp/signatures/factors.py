"""Factor maps: the loops of an operator, named on the dims of its operands and results as in
einsum.

A factor names a loop. Splitting the loop over a mesh axis splits every dim that has the factor. A
result without the factor is a partial reduction if the operator reduces over the loop; otherwise
the loop has no row.
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
import numpy as np

from sbp import _jax
from sbp.signatures.rule import Op, Row
from sbp.types import Atom, B, Split, Unreduced

Dims = tuple[str | None, ...]
"""The factor of each dim of one tensor; None for a dim that no row splits."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FactorMap:
    """The factors of an operator.

    Arguments:
      ins: for each operand, the factors of its dims.
      outs: for each result, the factors of its dims.
      contract: the monoid that joins the parts of a result where operands have a factor that no
          result has; such a factor has no row for None, and where the result cannot have the
          monoid.
      accumulate: positions of operands that the reduction is added to, such as the first one of a
          scatter; they are partial in rows that split a reduced factor.
      masks_padding: whether the kernel replaces padding by the monoid's neutral element. If not,
          rows that split a reduced factor need shards of equal size.
    """

    ins: tuple[Dims, ...]
    outs: tuple[Dims, ...]
    contract: str | None = None
    accumulate: tuple[int, ...] = ()
    masks_padding: bool = False


def factor_atom(dims: Dims, factor: str) -> Atom:
    """The atom of a tensor when a factor is split: S of the dim with the factor, B without one."""
    return Split(dims.index(factor)) if factor in dims else B


def split_rows(op: Op, m: FactorMap) -> list[Row]:
    """The rows that split one factor over the mesh axis.

    A row whose factor is reduced needs shards of equal size, unless the kernel masks: padding would
    enter the reduction.

    Arguments:
      op: the equation.
      m: the factors of its operands and results.
    """
    sizes = {
        factor: size
        for dims, aval in zip((*m.ins, *m.outs), (*op.ins, *op.outs), strict=True)
        for factor, size in zip(dims, aval.shape, strict=True)
        if factor is not None
    }
    rows: list[Row] = []
    for factor, size in sizes.items():
        ins, outs = ([factor_atom(dims, factor) for dims in side] for side in (m.ins, m.outs))
        if B in outs and any(atom != B for atom in ins):
            is_partial = set(outs) == {B} and m.contract in admissible(op.outs[0].dtype)
            if m.contract is None or not is_partial or not (m.masks_padding or op.divides(size)):
                continue
            part = Unreduced(m.contract)
            ins = [part if k in m.accumulate else atom for k, atom in enumerate(ins)]
            outs = [part] * len(outs)
        rows.append(Row(tuple(ins), tuple(outs)))
    return rows


def rows_beside(op: Op, dims: Collection[int] = ()) -> list[Row]:
    """The rows of an operator whose operands and results have the same dims: each splits one dim in
    all of them.

    Scalar operands stay B, and so do operands with size 1 where the result is longer.

    Arguments:
      op: the equation.
      dims: the dims that no row splits.
    """
    rank = max((len(a.shape) for a in op.outs), default=0)

    def atom(aval: Any, dim: int) -> Atom:
        has = len(aval.shape) == rank and aval.shape[dim] == op.outs[0].shape[dim]
        return Split(dim) if has else B

    return [
        Row(tuple(atom(a, dim) for a in op.ins), (Split(dim),) * len(op.outs))
        for dim in range(rank)
        if dim not in dims
    ]


def rows_without(op: Op, dims: Collection[int], contract: str | None = None) -> list[Row]:
    """The rows of an operator whose results lack some dims of its operands: each splits another
    dim, or one of these with partial results. Scalars stay B.

    Arguments:
      op: the equation.
      dims: the dims that the results lack.
      contract: the monoid by which the operator reduces these dims, where its kernel replaces
        padding; None where they have no row.
    """
    factors = tuple(f"d{d}" for d in range(len(op.ins[0].shape)))
    kept = tuple(factor for d, factor in enumerate(factors) if d not in dims)
    m = FactorMap(
        ins=tuple(factors if a.shape else () for a in op.ins),
        outs=(kept,) * len(op.outs),
        contract=contract,
        masks_padding=True,
    )
    return split_rows(op, m)


def admissible(dtype: np.dtype) -> tuple[str, ...]:
    """The monoids under which values of a dtype can be partial.

    Numbers have `sum` (unless they have no 0) and `prod`, real numbers also `max` and `min`,
    integers also `and` and `or`.
    Booleans have only `and` and `or`; keys have none.

    >>> admissible(np.dtype(bool))
    ('and', 'or')
    """
    if _jax.is_extended(dtype):
        return ()
    if dtype == np.bool_:
        return ("and", "or")
    ordered = () if jnp.issubdtype(dtype, np.complexfloating) else ("max", "min")
    bits = ("and", "or") if jnp.issubdtype(dtype, np.integer) else ()
    added = ("sum",) if np.zeros((), dtype) == 0 else ()  # float8_e8m0fnu has no 0
    return (*added, *ordered, "prod", *bits)


def monoid_refusal(dtype: Any, atom: Atom, mesh_axis: str) -> str:
    """The text of an error about a partial type that arrays of a dtype cannot have."""
    known = " or ".join(f"P({monoid})" for monoid in admissible(dtype))
    return (
        f"an array of {dtype} cannot be {atom!r} on mesh axis {mesh_axis!r}"
        f"{f', only {known}' if known else ''}; convert it first or pin another type"
    )


def owned_monoid(dtype: Any) -> str | None:
    """The monoid under which the value on one device and zeros on the others are parts of the
    value; None if the dtype has no such monoid."""
    return next((monoid for monoid in ("sum", "or") if monoid in admissible(dtype)), None)


def monoid_rows(op: Op, *monoids: str, positions: Sequence[int] | None = None) -> list[Row]:
    """Rows in which operands are partial together, under a monoid that the operator commutes with.

    Arguments:
      op: the equation.
      monoids: the monoids, one for each row. Those that the result cannot have have no row.
      positions: the operands that are partial; None for all.
    """
    chosen = range(len(op.ins)) if positions is None else positions
    return [
        Row(tuple(atom if i in chosen else B for i in range(len(op.ins))), (atom,) * len(op.outs))
        for atom in map(Unreduced, monoids)
        if atom.monoid in admissible(op.outs[0].dtype)
    ]


def moved_rows(op: Op, positions: Sequence[int] | None = None) -> list[Row]:
    """Partial rows of an operator that only moves elements; it commutes with every monoid of the
    dtype.

    Arguments:
      op: the equation.
      positions: the operands whose elements move, which are partial together; None for all.
    """
    return monoid_rows(op, *admissible(op.outs[0].dtype), positions=positions)


def keeps_sums(source: Any, target: Any) -> bool:
    """Whether the sum of partial operands has the same meaning in the dtype of a product.

    Integers with fewer bits than the product wrap at another size. Floats with more bits than the
    product are rounded before they are summed.

    Arguments:
      source: the dtype of an operand.
      target: that of the product.
    """
    inexact = all(jnp.issubdtype(d, np.inexact) for d in (source, target))
    return source == target or (inexact and target.itemsize > source.itemsize)
