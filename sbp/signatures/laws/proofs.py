"""Proofs of rows. A row with partial operands rests on a scalar law f(join(p1, p2)) = join(f(p1),
f(p2)), which is a theorem of Z3.

Floats are reals, and integers are bit vectors, which wrap. A row with a split rests on a theorem
about indices, in `laws.indices`. That a primitive treats each index of a dim in the same way is its
definition; where this is not obvious, the tests enumerate cases.
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
from sbp.signatures.laws.scalars import SCALAR, cast, join, variable
from sbp.signatures.laws.theorems import Outcome, Theorem, decide
from sbp.signatures.rule import Op, Row, rule_for
from sbp.types import Broadcast, Split, Unreduced

Status = Literal["proved", "enumerated", "assumed"]
"""How a row is known: `proved` by Z3; `enumerated`, without a theorem, by the tests on numbers;
`assumed`, with a theorem that Z3 did not prove, by these tests too."""

Term = Any
"""A term of Z3, whose classes have no useful types."""


def scalar_function(op: Op) -> Callable[..., Term] | None:
    """A primitive as a function of one element of each operand; None for one that has no such
    function.

    For a reduction or a product, the function takes a list of two elements of an operand.
    """
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


def _element_count(op: Op, position: int) -> int:
    """The number of elements of an operand that the scalar function takes as a list; 0 for one
    element by itself."""
    traits = traits_of(op.name)
    return 2 if traits.reduces or (traits.contracts and position < 2) else 0


def theorem(op: Op, row: Row) -> Theorem | None:
    """The scalar law of a row with partial operands; None for a row with splits, or without a known
    function.

    An operator that moves elements has the law of the identity. A monotone function is any function
    that is monotone in the operand.
    """
    if any(isinstance(a, Split) for a in (*row.ins, *row.outs)) or not any(
        isinstance(a, Unreduced) for a in row.ins
    ):
        return None
    if any(jnp.issubdtype(a.dtype, np.complexfloating) for a in (*op.ins, *op.outs)):
        return None  # not two independent reals: the tests on numbers check complex rows
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
    operand_dtypes = [a.dtype for a in op.ins]
    if op.name in ("ge", "gt", "le", "lt"):
        operand_dtypes = [np.dtype(np.float32)] * 2  # the law holds for every order; reals have one
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
    if function is None or (
        op.name == "sign" and jnp.issubdtype(operand_dtypes[0], np.unsignedinteger)
    ):
        return None
    if op.name == "div":
        divisors = ("p1", "q1") if isinstance(row.ins[1], Unreduced) else ("b1",)
        premises = tuple(variable(name, operand_dtypes[1]) != 0 for name in divisors)
    operands = [
        ScalarOperand(dtype, atom, _element_count(op, k))
        for k, (dtype, atom) in enumerate(zip(operand_dtypes, row.ins, strict=True))
    ]
    return law(operands, out, function, premises, op.outs[0].dtype)


@dataclass(frozen=True, slots=True)
class ScalarOperand:
    """An operand of a scalar law.

    Arguments:
      dtype: the dtype of its elements.
      atom: its type.
      count: number of elements that the function takes as a list; 0 for one element by itself.
    """

    dtype: Any
    atom: Any
    count: int = 0


def _operand(name: str, dtype: Any, count: int) -> Term:
    """Variables for the elements of an operand: a list of `count`, or one variable if `count` is
    0."""
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
    """The theorem f(join(p, q), b) = join(f(p, b), f(q, b)). p and q are the parts of partial
    operands, b are the operands that are B.

    Arguments:
      operands: the operands.
      out: the type of the result, which is partial.
      function: f.
      premises: what is assumed of the variables.
      result: the dtype of the result, which says whether its order is that of unsigned integers;
          None for a signed order.
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
    """The law for any function f that rises (or falls) in one operand: f is uninterpreted, and
    monotone at the two parts."""
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
    """Splitting a reduced dim gives a partial result: the reduction of four elements is the join of
    the reductions of the first two and the last two."""
    a, b, c, d = (z3.Reals if monoid not in ("and", "or") else z3.Bools)("a b c d")
    j = functools.partial(join, monoid)
    return Theorem((), j(j(j(a, b), c), d) == j(j(a, b), j(c, d)))


@functools.cache
def _index_outcome(name: str) -> Outcome:
    """Whether a theorem about indices is proved for all the device counts that `INDEX_THEOREMS`
    states it for. A monoid's name stands for its two theorems about reductions."""
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
    """The name of the theorem that a row with a split rests on; None for a row without one."""
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
    """How a row is known."""
    if all(isinstance(a, Broadcast) for a in (*row.ins, *row.outs)):
        return "proved"  # every device runs the whole operator
    name = index_theorem(op, row)
    if name is not None:
        return "proved" if _index_outcome(name) == "proved" else "assumed"
    found = theorem(op, row)
    if found is None:
        return "enumerated"
    return "proved" if decide(found) == "proved" else "assumed"


def status(op: Op) -> dict[Row, Status]:
    """For each row of an equation, how it is known."""
    found = rule_for(op.name)
    return {} if found is None else {row: row_status(op, row) for row in found.rows(op)}
