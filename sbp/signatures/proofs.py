"""Proofs of partial rows: for each, the scalar law f(join(p1, p2)) = join(f(p1), f(p2)) as a theorem of Z3.

Floats are read as reals, integers as bit vectors, so that they wrap. What a row says about *dims* has no scalar theorem; the laws
enumerate it. A theorem from premises that contradict each other proves anything, so premises are shown satisfiable first; a limit that is
hit is `unknown`, which is never `proved`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import jax.numpy as jnp
import numpy as np
import z3

from sbp.signatures.elementwise import MONOTONE
from sbp.signatures.rule import Op, Row, names, rule_for
from sbp.types import Broadcast, Split, Unreduced

Outcome = Literal["proved", "refuted", "unknown", "vacuous"]
Status = Literal["proved", "enumerated", "assumed"]

BITS = 5
"""Width of the integers in proofs: the laws are the same for every width, and multipliers are slow to reason about."""

RLIMIT = 20_000_000

Term = Any
Premises = list[Any]


@dataclass(frozen=True, slots=True)
class Theorem:
    """What is assumed, and what follows from it."""

    premises: tuple[Any, ...]
    claim: Any


def decide(theorem: Theorem, rlimit: int = RLIMIT) -> Outcome:
    """Whether a theorem holds; `vacuous` when its premises cannot be met, `unknown` when a limit was hit."""
    solver = z3.Solver()
    solver.set(rlimit=rlimit)
    solver.add(*theorem.premises)
    possible = solver.check()
    if possible != z3.sat:
        return "vacuous" if possible == z3.unsat else "unknown"
    solver.add(z3.Not(theorem.claim))
    found = solver.check()
    return "proved" if found == z3.unsat else "refuted" if found == z3.sat else "unknown"


def counterexample(theorem: Theorem, rlimit: int = RLIMIT) -> str:
    """Values that a theorem's claim is wrong for; empty where it holds, or where none were found within the limit.

    >>> x = z3.Real("x")
    >>> counterexample(Theorem((x > 0, x <= 1), x < 1))
    'x = 1'
    """
    solver = z3.Solver()
    solver.set(rlimit=rlimit)
    solver.add(*theorem.premises, z3.Not(theorem.claim))
    if solver.check() != z3.sat:
        return ""
    model = solver.model()
    return ", ".join(sorted(f"{d.name()} = {model[d]}" for d in model.decls()))


def _join(monoid: str, x: Term, y: Term) -> Term:
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


def _variable(name: str, dtype: np.dtype) -> Term:
    if dtype == np.bool_:
        return z3.Bool(name)
    return z3.BitVec(name, BITS) if jnp.issubdtype(dtype, np.integer) else z3.Real(name)


def _chosen(index: Term, *cases: Term) -> Term:
    """select_n: by a boolean or by a number."""
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


SCALAR: dict[str, Callable[..., Term]] = {
    "abs": lambda x: z3.If(x >= 0, x, -x),
    "add": lambda x, y: x + y,
    "add_any": lambda x, y: x + y,
    "and": lambda x, y: _join("and", x, y),
    "ceil": _ceil,
    "clamp": lambda low, x, high: _join("min", _join("max", x, low), high),
    "div": lambda x, y: x / y,
    "floor": lambda x: z3.ToReal(z3.ToInt(x)),
    "max": lambda x, y: _join("max", x, y),
    "min": lambda x, y: _join("min", x, y),
    "mul": lambda x, y: x * y,
    "neg": lambda x: -x,
    "not": lambda x: z3.Not(x) if z3.is_bool(x) else ~x,
    "or": lambda x, y: _join("or", x, y),
    "select_n": _chosen,
    "sign": lambda x: z3.If(x > 0, z3.RealVal(1), z3.If(x < 0, z3.RealVal(-1), z3.RealVal(0))),
    "square": lambda x: x * x,
    "sub": lambda x, y: x - y,
    "tie": lambda x, y: y,
    "truncate": _truncated,
}
"""What elementwise primitives compute, one element at a time."""

_MOVES = frozenset(
    names("""broadcast_in_dim concatenate copy dynamic_slice dynamic_update_slice gather name optimization_barrier pad reshape
    rev scatter slice split squeeze stack stop_gradient tile transpose unstack""")
)
"""Each element of a result is an element of some operand, chosen by what is B: the law is that of the identity."""

_REDUCES = {f"{kind}{m}": m for kind in ("reduce_", "reduce_window_", "cum") for m in ("sum", "max", "min", "prod", "and", "or")}
_CONTRACTS = frozenset(names("dot_general ragged_dot_general conv_general_dilated"))
_SCATTERS = {"scatter-add": "sum", "scatter-sub": "sum", "scatter-mul": "prod", "scatter-min": "min", "scatter-max": "max"}


def scalar_function(op: Op) -> Callable[..., Term] | None:
    """The function of a primitive on one element of each operand; for a reduction, on two elements of its operand."""
    if op.name in SCALAR:
        return SCALAR[op.name]
    if op.name in _REDUCES:
        return lambda x: _join(_REDUCES[op.name], x[0], x[1])
    if op.name in _CONTRACTS and op.outs[0].dtype == np.bool_:
        return lambda x, y, *rest: z3.Or(z3.And(x[0], y[0]), z3.And(x[1], y[1]))
    if op.name in _CONTRACTS:
        return lambda x, y, *rest: x[0] * y[0] + x[1] * y[1]
    if op.name in _SCATTERS:
        sign = -1 if op.name == "scatter-sub" else 1
        return lambda x, index, y: _join(_SCATTERS[op.name], x, sign * y if sign < 0 else y)
    return None


def _shape_of(op: Op, position: int) -> int:
    """How many elements of an operand the scalar function takes: two where the primitive reduces."""
    return 2 if op.name in _REDUCES or (op.name in _CONTRACTS and position < 2) else 0


def theorem(op: Op, row: Row) -> Theorem | None:
    """The scalar law of a row with partial operands; None where there is none (splits alone, or no known function).

    Moved elements need the law of the identity; functions that rise or fall on their whole domain are any function that does.
    """
    if any(isinstance(a, Split) for a in (*row.ins, *row.outs)) or not any(isinstance(a, Unreduced) for a in row.ins):
        return None
    if any(jnp.issubdtype(a.dtype, np.complexfloating) for a in (*op.ins, *op.outs)):
        return None  # two reals side by side: the law is that of each, which the laws enumerate
    (out,) = set(row.outs)
    if isinstance(out, Broadcast):
        return None
    if op.name in _MOVES or (op.name == "convert_element_type" and op.ins[0].dtype == op.outs[0].dtype):
        if {a for a in row.ins if isinstance(a, Unreduced)} != {out}:
            return None
        return law([op.outs[0].dtype], [out], out, lambda x: x, [0], ())
    dtypes_ = [a.dtype for a in op.ins]
    function, premises = scalar_function(op), ()
    if op.name in MONOTONE and op.name not in SCALAR and all(a.monoid in ("max", "min") for a in row.ins if isinstance(a, Unreduced)):
        return _monotone(MONOTONE[op.name], row)
    if function is None:
        return None
    if op.name == "div":
        divisors = ("p1", "q1") if isinstance(row.ins[1], Unreduced) else ("b1",)
        premises = tuple(_variable(name, dtypes_[1]) != 0 for name in divisors)
    return law(dtypes_, row.ins, out, function, [_shape_of(op, i) for i in range(len(op.ins))], premises)


def _operand(name: str, dtype: Any, count: int) -> Term:
    return [_variable(f"{name}_{k}", dtype) for k in range(count)] if count else _variable(name, dtype)


def law(
    types: Sequence[Any], ins: Sequence[Any], out: Any, function: Callable[..., Term], counts: Sequence[int], premises: Sequence[Any]
) -> Theorem:
    """f(join(p, q), b) = join(f(p, b), f(q, b)), p and q the parts of partial operands, b the broadcast ones."""
    whole, left, right = [], [], []
    for i, (dtype, atom, count) in enumerate(zip(types, ins, counts, strict=True)):
        if isinstance(atom, Unreduced):
            p, q = _operand(f"p{i}", dtype, count), _operand(f"q{i}", dtype, count)
            whole.append([_join(atom.monoid, a, b) for a, b in zip(p, q, strict=True)] if count else _join(atom.monoid, p, q))
        else:
            p = q = _operand(f"b{i}", dtype, count)
            whole.append(p)
        left.append(p)
        right.append(q)
    return Theorem(tuple(premises), function(*whole) == _join(out.monoid, function(*left), function(*right)))


def _monotone(directions: str, row: Row) -> Theorem:
    """The law for any function that rises (falls) in one operand, the others held: an uninterpreted one, monotone at the two parts."""
    (position,) = (i for i, a in enumerate(row.ins) if isinstance(a, Unreduced))
    f: Term = z3.Function("f", z3.RealSort(), z3.RealSort())
    p, q = _variable("p", np.dtype(np.float32)), _variable("q", np.dtype(np.float32))
    rises = [z3.Implies(a <= b, f(a) <= f(b) if directions[position] == "+" else f(a) >= f(b)) for a, b in ((p, q), (q, p))]
    atom, out = row.ins[position], row.outs[0]
    assert isinstance(atom, Unreduced) and isinstance(out, Unreduced)
    return Theorem(tuple(rises), f(_join(atom.monoid, p, q)) == _join(out.monoid, f(p), f(q)))


def contraction(monoid: str) -> Theorem:
    """Why a split of a reduced dim leaves a partial: the reduction of four is the join of the reductions of two and two."""
    a, b, c, d = (z3.Reals if monoid not in ("and", "or") else z3.Bools)("a b c d")
    j = functools.partial(_join, monoid)
    return Theorem((), j(j(j(a, b), c), d) == j(j(a, b), j(c, d)))


@functools.cache
def _contraction_outcome(monoid: str) -> Outcome:
    return decide(contraction(monoid))


def row_status(op: Op, row: Row) -> Status:
    """How a row is known: by a theorem, by the laws' enumeration, or (a theorem that Z3 could not decide) by neither alone."""
    split = any(isinstance(a, Split) for a in row.ins)
    if split and len(row.outs) == 1 and isinstance(row.outs[0], Unreduced) and op.name in {*_REDUCES, *_CONTRACTS}:
        return "proved" if _contraction_outcome(row.outs[0].monoid) == "proved" else "assumed"
    found = theorem(op, row)
    if found is None:
        return "enumerated"
    return "proved" if decide(found) == "proved" else "assumed"


def status(op: Op) -> dict[Row, Status]:
    """How each row of an op is known."""
    found = rule_for(op.name)
    return {} if found is None else {row: row_status(op, row) for row in found.rows(op)}
