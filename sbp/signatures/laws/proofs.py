"""Proofs of rows: for partial operands, the scalar law f(join(p1, p2)) = join(f(p1), f(p2)) as a
theorem of Z3.

Floats are read as reals, integers as bit vectors, so that they wrap. What split rows and their
kernels rest on are theorems about indices, in `indices`; that a primitive treats each index of a
dim alike is its definition, and where that is more than a word the laws enumerate it.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import jax.numpy as jnp
import numpy as np
import z3

from sbp.signatures.fallback import traits_of
from sbp.signatures.laws.indices import INDEX_THEOREMS, OF_KERNEL, neutral_padding
from sbp.signatures.laws.scalars import SCALAR as SCALAR
from sbp.signatures.laws.scalars import cast, join, variable
from sbp.signatures.laws.theorems import Outcome, Theorem, decide
from sbp.signatures.laws.theorems import counterexample as counterexample
from sbp.signatures.rule import Op, Row, rule_for
from sbp.types import Broadcast, Split, Unreduced

Status = Literal["proved", "enumerated", "assumed"]

Term = Any


def scalar_function(op: Op) -> Callable[..., Term] | None:
    """The function of a primitive on one element of each operand; for a reduction, on two elements
    of its operand."""
    if op.name in SCALAR:
        return SCALAR[op.name]
    traits = traits_of(op.name)
    if traits.reduces:
        return lambda x: join(traits.reduces, x[0], x[1])
    if traits.contracts:
        if op.outs[0].dtype == np.bool_:
            return lambda x, y, *rest: z3.Or(z3.And(x[0], y[0]), z3.And(x[1], y[1]))
        return lambda x, y, *rest: x[0] * y[0] + x[1] * y[1]
    if op.name == "integer_pow" and op.params["y"] > 0:
        return lambda x: functools.reduce(lambda p, q: p * q, [x] * op.params["y"])
    if op.name in ("convert_element_type", "bitcast_convert_type"):
        return cast(op.ins[0].dtype, op.outs[0].dtype)
    if traits.scatters:
        sign = -1 if op.name == "scatter-sub" else 1
        return lambda x, index, y: join(traits.scatters, x, sign * y if sign < 0 else y)
    return None


def _shape_of(op: Op, position: int) -> int:
    """How many elements of an operand the scalar function takes: two where the primitive
    reduces."""
    traits = traits_of(op.name)
    return 2 if traits.reduces or (traits.contracts and position < 2) else 0


def theorem(op: Op, row: Row) -> Theorem | None:
    """The scalar law of a row with partial operands; None where there is none (splits alone, or no
    known function).

    Moved elements need the law of the identity; functions that rise or fall on their whole domain
    are any function that does.
    """
    if any(isinstance(a, Split) for a in (*row.ins, *row.outs)) or not any(
        isinstance(a, Unreduced) for a in row.ins
    ):
        return None
    if any(jnp.issubdtype(a.dtype, np.complexfloating) for a in (*op.ins, *op.outs)):
        return None  # two reals side by side: the law is that of each, which the laws enumerate
    partial = {a for a in row.outs if isinstance(a, Unreduced)}
    if len(partial) != 1:
        return None
    (out,) = partial
    traits = traits_of(op.name)
    if traits.moves or (op.name == "convert_element_type" and op.ins[0].dtype == op.outs[0].dtype):
        if {a for a in row.ins if isinstance(a, Unreduced)} != {out}:
            return None
        moved = ScalarOperand(op.outs[row.outs.index(out)].dtype, out)
        return law([moved], out, lambda x: x)
    if any(isinstance(a, Broadcast) for a in row.outs):
        return None
    if traits.linear_map:
        a, b = _operand("a", op.outs[0].dtype, 2)
        return law([ScalarOperand(op.outs[0].dtype, out, 2)], out, lambda x: a * x[0] + b * x[1])
    dtypes_ = [a.dtype for a in op.ins]
    if op.name in ("ge", "gt", "le", "lt"):
        dtypes_ = [np.dtype(np.float32)] * 2  # an order, whatever is ordered
    function, premises = scalar_function(op), ()
    if (
        traits.monotone
        and op.name not in SCALAR
        and all(a.monoid in ("max", "min") for a in row.ins if isinstance(a, Unreduced))
    ):
        return _monotone(traits.monotone, row)
    ordered = (
        op.name == "convert_element_type"
        and out.monoid in ("max", "min")
        and op.ins[0].dtype != np.bool_
    )
    if ordered and not jnp.issubdtype(op.outs[0].dtype, np.integer):
        return _monotone("+", row)
    if function is None or (op.name == "sign" and jnp.issubdtype(dtypes_[0], np.unsignedinteger)):
        return None
    if op.name == "div":
        divisors = ("p1", "q1") if isinstance(row.ins[1], Unreduced) else ("b1",)
        premises = tuple(variable(name, dtypes_[1]) != 0 for name in divisors)
    operands = [
        ScalarOperand(dtype, atom, _shape_of(op, k))
        for k, (dtype, atom) in enumerate(zip(dtypes_, row.ins, strict=True))
    ]
    return law(operands, out, function, premises, op.outs[0].dtype)


@dataclass(frozen=True, slots=True)
class ScalarOperand:
    """An operand of a scalar law.

    Arguments:
      dtype: the dtype of its elements.
      atom: its type.
      count: how many elements the function takes of it, as a list; 0 for one element by itself.
    """

    dtype: Any
    atom: Any
    count: int = 0


def _operand(name: str, dtype: Any, count: int) -> Term:
    return (
        [variable(f"{name}_{k}", dtype) for k in range(count)] if count else variable(name, dtype)
    )


def law(
    operands: Sequence[ScalarOperand],
    out: Any,
    function: Callable[..., Term],
    premises: Sequence[Any] = (),
    result: Any = None,
) -> Theorem:
    """f(join(p, q), b) = join(f(p, b), f(q, b)), with p and q the parts of partial operands and b
    the broadcast ones.

    Arguments:
      operands: the operands; those that are partial have the parts p and q.
      out: the type of the result, which is partial.
      function: f.
      premises: what is assumed of the operands.
      result: the dtype of the result; None where its order is not asked for.
    """
    whole, left, right = [], [], []
    for i, operand in enumerate(operands):
        dtype, atom, count = operand.dtype, operand.atom, operand.count
        if isinstance(atom, Unreduced):
            p, q = _operand(f"p{i}", dtype, count), _operand(f"q{i}", dtype, count)
            joined = functools.partial(
                join, atom.monoid, unsigned=jnp.issubdtype(dtype, np.unsignedinteger)
            )
            whole.append(
                [joined(a, b) for a, b in zip(p, q, strict=True)] if count else joined(p, q)
            )
        else:
            p = q = _operand(f"b{i}", dtype, count)
            whole.append(p)
        left.append(p)
        right.append(q)
    unsigned = result is not None and jnp.issubdtype(result, np.unsignedinteger)
    return Theorem(
        tuple(premises),
        function(*whole) == join(out.monoid, function(*left), function(*right), unsigned),
    )


def _monotone(directions: str, row: Row) -> Theorem:
    """The law for any function that rises (falls) in one operand, the others held: an uninterpreted
    one, monotone at the two parts."""
    (position,) = (i for i, a in enumerate(row.ins) if isinstance(a, Unreduced))
    f: Term = z3.Function("f", z3.RealSort(), z3.RealSort())
    p, q = variable("p", np.dtype(np.float32)), variable("q", np.dtype(np.float32))
    rises = [
        z3.Implies(a <= b, f(a) <= f(b) if directions[position] == "+" else f(a) >= f(b))
        for a, b in ((p, q), (q, p))
    ]
    atom, out = row.ins[position], row.outs[0]
    assert isinstance(atom, Unreduced) and isinstance(out, Unreduced)
    return Theorem(tuple(rises), f(join(atom.monoid, p, q)) == join(out.monoid, f(p), f(q)))


def contraction(monoid: str) -> Theorem:
    """Why a split of a reduced dim leaves a partial: the reduction of four is the join of the
    reductions of two and two."""
    a, b, c, d = (z3.Reals if monoid not in ("and", "or") else z3.Bools)("a b c d")
    j = functools.partial(join, monoid)
    return Theorem((), j(j(j(a, b), c), d) == j(j(a, b), j(c, d)))


@functools.cache
def _index_outcome(name: str) -> Outcome:
    """Whether a theorem about indices is proved for all the device counts it is stated for."""
    if name in ("sum", "prod", "max", "min", "and", "or"):
        theorems = [contraction(name), neutral_padding(name)]
    else:
        state, sizes = INDEX_THEOREMS[name]
        theorems = [state(n) for n in sizes]
    for stated in theorems:
        outcome = decide(stated)
        if outcome != "proved":
            return outcome
    return "proved"


def index_theorem(op: Op, row: Row) -> str | None:
    """The name of the theorem that a row with a split rests on; None where there is none."""
    if row.kernel in OF_KERNEL:
        return OF_KERNEL[row.kernel]
    if row.kernel != "local" or not any(isinstance(a, Split) for a in (*row.ins, *row.outs)):
        return None
    traits = traits_of(op.name)
    if traits.generates == "counter":
        return "counter"
    if not traits.pointwise and not (traits.scatters and isinstance(row.outs[0], Unreduced)):
        return None
    partial = {a for a in (*row.ins, *row.outs) if isinstance(a, Unreduced)}
    if not partial:
        return "one_holder"
    (out,) = set(row.outs)
    joins = traits.reduces or traits.contracts or traits.scatters
    return out.monoid if joins and isinstance(out, Unreduced) and partial == {out} else None


def row_status(op: Op, row: Row) -> Status:
    """How a row is known: by a theorem, by the laws' enumeration, or (a theorem that Z3 could not
    decide) by neither alone."""
    if all(isinstance(a, Broadcast) for a in (*row.ins, *row.outs)):
        return "proved"  # the whole op on whole values
    name = index_theorem(op, row)
    if name is not None:
        return "proved" if _index_outcome(name) == "proved" else "assumed"
    found = theorem(op, row)
    if found is None:
        return "enumerated"
    return "proved" if decide(found) == "proved" else "assumed"


def status(op: Op) -> dict[Row, Status]:
    """How each row of an op is known."""
    found = rule_for(op.name)
    return {} if found is None else {row: row_status(op, row) for row in found.rows(op)}
