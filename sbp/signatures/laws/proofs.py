"""Proofs of rows. A row with partial operands rests on a scalar law f(join(p1, p2)) = join(f(p1),
f(p2)), which is a theorem of Z3.

Floats are reals, and integers are bit vectors, which wrap. A row with a split rests on a theorem
about indices. That a primitive treats each index of a dim in the same way is its
definition; where this is not obvious, the tests enumerate cases.
"""

import functools
import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import jax.numpy as jnp
import numpy as np
import z3

from sbp.signatures.rule import Op, Row, traits_of
from sbp.types import Atom, Broadcast, Split, Unreduced

# ---- theorems -----------------------------------------------------------------------------------
# Premises that contradict each other would prove anything, so `decide` first shows that they can be
# met. A proof that reaches the limit is `unknown`, not `proved`.


Outcome = Literal["proved", "refuted", "unknown", "vacuous"]
"""What Z3 finds: `vacuous` if the premises contradict each other, `unknown` if it reached the
limit."""

RLIMIT = 20_000_000
"""The default limit for one proof, in Z3's resource units, which do not depend on the machine. A
proof that reaches it is `unknown`."""


@dataclass(frozen=True, slots=True)
class Theorem:
    """The claim that follows from premises.

    Arguments:
      premises: what is assumed, as terms of Z3.
      claim: what follows.
    """

    premises: tuple[Any, ...]
    claim: Any


def decide(theorem: Theorem, rlimit: int = RLIMIT) -> Outcome:
    """Whether a theorem holds; `vacuous` if its premises cannot be met, `unknown` if Z3 reached the
    limit."""
    solver = z3.Solver()
    solver.set(rlimit=rlimit)
    solver.add(*theorem.premises)
    possible = solver.check()
    if possible != z3.sat:
        return "vacuous" if possible == z3.unsat else "unknown"
    solver.add(z3.Not(theorem.claim))
    found = solver.check()
    return "proved" if found == z3.unsat else "refuted" if found == z3.sat else "unknown"


Term = Any
"""A term of Z3, whose classes have no useful types."""


# ---- indices ------------------------------------------------------------------------------------
# Theorems about the places of elements, on which split rows and their kernels rest. They are in
# linear arithmetic, for all sizes.
#
# A dim of length L is on n devices in blocks of c = ceil(L / n) elements: device i has the
# elements from index i * c on, and the last blocks are padded. Each theorem is stated for a given
# n; every other number is any integer.


def _ints(names: str) -> tuple[Term, ...]:
    return tuple(z3.Ints(names))


JOIN: dict[str, Callable[[Term, Term], Term]] = {
    "sum": lambda x, y: x + y,
    "prod": lambda x, y: x * y,
    "max": lambda x, y: z3.If(x >= y, x, y),
    "min": lambda x, y: z3.If(x <= y, x, y),
    "and": lambda x, y: z3.And(x, y) if z3.is_bool(x) else x & y,
    "or": lambda x, y: z3.Or(x, y) if z3.is_bool(x) else x | y,
}
"""The value that two parts stand for under each monoid."""

_minimum, _maximum = JOIN["min"], JOIN["max"]


def _clip(x: Term, low: Term, high: Term) -> Term:
    return _minimum(_maximum(x, low), high)


class _Blocks:
    """A dim of any length, split over n devices.

    Arguments:
      n: number of devices.
    """

    def __init__(self, n: int) -> None:
        self.n = n
        self.length, self.chunk = _ints("length chunk")
        self.premises = [
            self.length >= 1,
            n * self.chunk >= self.length,
            n * (self.chunk - 1) < self.length,
        ]

    def start(self, device: int) -> Term:
        """The global index of a block's first element."""
        return device * self.chunk

    def extent(self, device: int) -> Term:
        """How many elements of a block are not padding."""
        return _clip(self.length - self.start(device), 0, self.chunk)

    def owns(self, device: int, index: Term) -> Term:
        """Whether a device's block has the element at a global index."""
        here = index - self.start(device)
        return z3.And(here >= 0, here < self.extent(device))


def one_holder(n: int) -> Theorem:
    """Each element is on exactly one device, within its block. So concatenation commutes with any
    function of one index."""
    b = _Blocks(n)
    k: Term = z3.Int("k")
    owned = [z3.And(b.owns(i, k), k - b.start(i) < b.chunk) for i in range(n)]
    return Theorem(
        (*b.premises, k >= 0, k < b.length), z3.Sum([z3.If(o, 1, 0) for o in owned]) == 1
    )


def one_reader(n: int) -> Theorem:
    """A masked lookup. The index is clipped to the dim; its owner reads the element and the other
    devices have zero; the sum of the parts is the element."""
    b = _Blocks(n)
    x: Term = z3.Function("x", z3.IntSort(), z3.IntSort())
    index: Term = z3.Int("index")
    inside = _clip(index, 0, b.length - 1)
    # Position j of a shard has the element start + j. The position is clipped before it is read.
    parts = [
        z3.If(b.owns(i, inside), x(b.start(i) + _clip(inside - b.start(i), 0, b.chunk - 1)), 0)
        for i in range(n)
    ]
    return Theorem(tuple(b.premises), z3.Sum(parts) == x(inside))


def one_reader_of_windows(n: int) -> Theorem:
    """Windows that reach across shards. Each shard has margins of zeros as long as a window, and
    the start of the window is clipped; the sum of the parts is the window."""
    b = _Blocks(n)
    x: Term = z3.Function("x", z3.IntSort(), z3.IntSort())
    start, window, k = _ints("start window k")
    premises = [
        *b.premises,
        window >= 1,
        window <= b.length,
        start >= 0,
        start <= b.length - window,
        k >= 0,
        k < window,
    ]

    def read(i: int) -> Term:
        position = _clip(start - b.start(i) + window, 0, b.chunk + window) + k - window
        return z3.If(z3.And(position >= 0, position < b.extent(i)), x(b.start(i) + position), 0)

    return Theorem(tuple(premises), z3.Sum([read(i) for i in range(n)]) == x(start + k))


def own_update(_: int) -> Theorem:
    """An update of a window. A device writes a position of its shard if and only if the window
    covers it, and with the right element.

    The device rewrites `min(window, chunk)` positions: from the start of the window on, moved so
    that they are inside of the shard.
    """
    first, chunk, start, window, k = _ints("first chunk start window k")
    size = _minimum(window, chunk)
    here = _clip(start - first, 0, chunk - size)
    looks = z3.And(k >= here, k < here + size)
    element = (k - here) + here - (start - first)
    written = z3.And(looks, element >= 0, element < window)
    covered = z3.And(first + k >= start, first + k < start + window)
    premises = (chunk >= 1, window >= 1, k >= 0, k < chunk)
    return Theorem(
        premises, z3.And(written == covered, z3.Implies(written, element == first + k - start))
    )


def window_products(dilation: int) -> Theorem:
    """The products of an image element and an element of an uneven shard of a window, of which
    `real` elements are no padding. Each product of a real element is in exactly one of the two
    convolutions of `families.windows.convolve_uneven`, and the first has zeros where padding reads.

    Result o reads, with element k of the shard, position `dilation * k + start` of the image; here
    `start` is `stride * o`, and `last` is that of the last result.
    """
    chunk, real, k, start, last = _ints("chunk real k start last")
    position = dilation * k + start
    first = position < dilation * real
    count = _minimum(last / dilation, chunk)
    second = z3.And(k >= real - count, k < real, dilation * (k - real) + start >= 0)
    premises = (
        *(chunk >= 1, real >= 0, real <= chunk, k >= 0, k < chunk),
        *(start >= 0, start <= last),
    )
    once = z3.Implies(k < real, z3.Xor(first, second))
    return Theorem(premises, z3.And(once, z3.Implies(k >= real, z3.Not(z3.Or(first, second)))))


def _in_group(row: Term, sizes: Sequence[Term], k: int) -> Term:
    """Whether a row is in a group."""
    return z3.And(row >= z3.Sum(sizes[:k]), row < z3.Sum(sizes[:k]) + sizes[k])


def ragged_shard(groups: int) -> Theorem:
    """Each device counts how many rows of each group its shard has; then every row of the shard is
    in its own group."""
    sizes = _ints(" ".join(f"s{k}" for k in range(groups)))
    start, extent, row = _ints("start extent row")
    ends = [(z3.Sum(sizes[:k]), z3.Sum(sizes[:k]) + size) for k, size in enumerate(sizes)]
    local = [_maximum(_minimum(b, start + extent) - _maximum(a, start), 0) for a, b in ends]
    same = (_in_group(row, sizes, k) == _in_group(row - start, local, k) for k in range(groups))
    return Theorem(
        (*(s >= 0 for s in sizes), start >= 0, extent >= 1, row >= start, row < start + extent),
        z3.And(*same),
    )


def ragged_groups(groups: int) -> Theorem:
    """Each device counts the rows before its groups as part of its first group and leaves them out;
    then every row is in its own group."""
    sizes = _ints(" ".join(f"s{k}" for k in range(groups)))
    row: Term = z3.Int("row")
    claims = []
    for first, last in itertools.combinations(range(groups + 1), 2):
        skipped = z3.Sum(sizes[:first])
        counted = [sizes[first] + skipped, *sizes[first + 1 : last]]
        claims += [
            _in_group(row, sizes, k) == z3.And(row >= skipped, _in_group(row, counted, k - first))
            for k in range(first, last)
        ]
    return Theorem((*(s >= 0 for s in sizes), row >= 0), z3.And(*claims))


BITS = 5
"""Bits of the integers in proofs. The laws are the same for every width, and Z3 is slow on wide
multiplications."""


def counter(_: int) -> Theorem:
    """The linear index of an element, computed in words that wrap, is right while the whole array
    has fewer elements than a word has values."""
    values: tuple[Term, ...] = tuple(
        z3.BitVec(name, 2 * BITS) for name in ("r", "c", "at_r", "at_c", "i", "j")
    )
    rows, columns, at_row, at_column, row, column = values
    premises = [
        *(z3.ULT(v, 2**BITS) for v in values),
        z3.ULT(rows * columns, 2**BITS),
        z3.ULT(at_row + row, rows),
        z3.ULT(at_column + column, columns),
    ]
    low: list[Term] = [z3.Extract(BITS - 1, 0, v) for v in values]
    narrow = (low[2] + low[4]) * low[1] + (low[3] + low[5])
    wide = (at_row + row) * columns + (at_column + column)
    return Theorem(tuple(premises), z3.ZeroExt(BITS, narrow) == wide)


def neutral_padding(monoid: str) -> Theorem:
    """A neutral element as padding does not change a reduction."""
    bits = monoid in ("and", "or")
    x, e = z3.BitVecs("x e", BITS) if bits else z3.Reals("x e")
    neutral = {
        "sum": lambda: e == 0,
        "prod": lambda: e == 1,
        "max": lambda: e <= x,
        "min": lambda: e >= x,
        "and": lambda: e == -1,  # all bits are set
        "or": lambda: e == 0,
    }
    return Theorem((neutral[monoid](),), JOIN[monoid](x, e) == x)


def strided_blocks(stride: int) -> Theorem:
    """Every `stride`-th element of a dim of `stride` times as many: a block of the shorter dim and
    the block of the same device of the longer one have the same elements."""
    first, chunk, at, low = _ints("first chunk at low")
    short = z3.And(first <= at, at < first + chunk)
    place = stride * at + low
    long = z3.And(stride * first <= place, place < stride * (first + chunk))
    return Theorem((chunk >= 1, low >= 0, low < stride), short == long)


INDEX_THEOREMS: dict[str, tuple[Callable[[int], Theorem], tuple[int, ...]]] = {
    "one_holder": (one_holder, (2, 3, 4)),
    "one_reader": (one_reader, (2, 3, 4)),
    "one_reader_of_windows": (one_reader_of_windows, (2, 3, 4)),
    "own_update": (own_update, (2,)),
    "ragged_shard": (ragged_shard, (2, 3)),
    "ragged_groups": (ragged_groups, (2, 3)),
    "window_products": (window_products, (1, 2, 3)),
    "strided_blocks": (strided_blocks, (1, 2, 3)),
    "counter": (counter, (2,)),
}
"""For each theorem, by its name: a function that states it, and the numbers of devices that it is
stated for; for the ragged ones, numbers of groups, for `window_products` dilations, and for
`strided_blocks` strides."""

OF_KERNEL: dict[str, str] = {
    "masked_gather": "one_reader",
    "masked_slice": "one_reader",
    "masked_dynamic_slice": "one_reader",
    "masked_windows": "one_reader_of_windows",
    "owned_update": "own_update",
    "shifted_scatter": "own_update",
    "shifted_windows": "own_update",
    "ragged_shards": "ragged_shard",
    "ragged_groups": "ragged_groups",
    "aligned": "strided_blocks",
}
"""For each kernel, the name of the theorem that its rows rest on."""


# ---- scalars ------------------------------------------------------------------------------------
# Primitives as terms of Z3, on one element of each operand. Floats are reals; integers are bit
# vectors, which wrap.


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
    return JOIN[monoid](x, y)


def variable(name: str, dtype: np.dtype) -> Term:
    """A variable for any value of a dtype."""
    return (
        z3.Bool(name)
        if dtype == np.bool_
        else z3.BitVec(name, BITS)
        if jnp.issubdtype(dtype, np.integer)
        else z3.Real(name)
    )


def _select(index: Term, *cases: Term) -> Term:
    """`select_n`: the index is a boolean or a number."""
    out = cases[0]
    for k, case in enumerate(cases[1:], 1):
        out = z3.If(index if z3.is_bool(index) else index == k, case, out)
    return out


def _ceil(x: Term) -> Term:
    below: Term = z3.ToReal(z3.ToInt(x))
    return z3.If(z3.IsInt(x), x, below + 1)


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
    "select_n": _select,
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


# ---- proofs -------------------------------------------------------------------------------------


Status = Literal["proved", "enumerated", "assumed"]
"""How a row is known: `proved` by Z3; `enumerated`, without a theorem, by the tests on numbers;
`assumed`, with a theorem that Z3 did not prove, by these tests too."""


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


def theorem(op: Op, row: Row) -> Theorem | None:
    """The scalar law of a row with partial operands; None for a row with splits, or without a known
    function.

    An operator that moves elements has the law of the identity. A monotone function is any function
    that is monotone in the operand.
    """
    ins, outs = ({a for a in side if isinstance(a, Unreduced)} for side in (row.ins, row.outs))
    splits = any(isinstance(a, Split) for a in (*row.ins, *row.outs))
    # A complex number is not two independent reals: the tests on numbers check complex rows.
    is_complex = any(jnp.issubdtype(a.dtype, np.complexfloating) for a in (*op.ins, *op.outs))
    if splits or is_complex or not ins or len(outs) != 1:
        return None
    (out,) = outs
    traits = traits_of(op.name)
    if traits.moves or (op.name == "convert_element_type" and op.ins[0].dtype == op.outs[0].dtype):
        moved = op.outs[row.outs.index(out)].dtype
        return law([(moved, out, 0)], out, lambda x: x) if ins == {out} else None
    if any(isinstance(a, Broadcast) for a in row.outs):
        return None
    if traits.linear_map:
        a, b = _operand("a", op.outs[0].dtype, 2)
        return law([(op.outs[0].dtype, out, 2)], out, lambda x: a * x[0] + b * x[1])
    operand_dtypes = [a.dtype for a in op.ins]
    if op.name in ("ge", "gt", "le", "lt"):
        operand_dtypes = [np.dtype(np.float32)] * 2  # the law holds for every order; reals have one
    function, premises = scalar_function(op), ()
    if traits.monotone and op.name not in SCALAR and all(a.monoid in ("max", "min") for a in ins):
        return _monotone(traits.monotone, row)
    if (
        op.name == "convert_element_type"
        and out.monoid in ("max", "min")
        and op.ins[0].dtype != np.bool_
        and not jnp.issubdtype(op.outs[0].dtype, np.integer)
    ):
        return _monotone("+", row)
    if function is None or (
        op.name == "sign" and jnp.issubdtype(operand_dtypes[0], np.unsignedinteger)
    ):
        return None
    if op.name == "div":
        divisors = ("p1", "q1") if isinstance(row.ins[1], Unreduced) else ("b1",)
        premises = tuple(variable(name, operand_dtypes[1]) != 0 for name in divisors)
    operands = [
        # A reduction or a product takes two elements of an operand, other functions take one.
        (dtype, atom, 2 if traits.reduces or (traits.contracts and k < 2) else 0)
        for k, (dtype, atom) in enumerate(zip(operand_dtypes, row.ins, strict=True))
    ]
    return law(operands, out, function, premises, op.outs[0].dtype)


def _operand(name: str, dtype: Any, count: int) -> Term:
    """Variables for the elements of an operand: a list of `count`, or one variable if `count` is
    0."""
    return (
        [variable(f"{name}_{k}", dtype) for k in range(count)] if count else variable(name, dtype)
    )


def law(
    operands: Sequence[tuple[Any, Atom, int]],
    out: Any,
    function: Callable[..., Term],
    premises: Sequence[Any] = (),
    result: Any = None,
) -> Theorem:
    """The theorem f(join(p, q), b) = join(f(p, b), f(q, b)). p and q are the parts of partial
    operands, b are the operands that are B.

    Arguments:
      operands: for each operand the dtype of its elements, its type, and the number of elements
        that the function takes as a list; 0 for one element by itself.
      out: the type of the result, which is partial.
      function: f.
      premises: what is assumed of the variables.
      result: the dtype of the result, which says whether its order is that of unsigned integers;
          None for a signed order.
    """
    whole, left, right = [], [], []
    for i, (dtype, atom, count) in enumerate(operands):
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
def _is_proved(name: str) -> bool:
    """Whether a theorem about indices is proved for all the device counts that `INDEX_THEOREMS`
    states it for. A monoid's name stands for its two theorems about reductions."""
    if name in ("sum", "prod", "max", "min", "and", "or"):
        theorems = [contraction(name), neutral_padding(name)]
    else:
        state, sizes = INDEX_THEOREMS[name]
        theorems = [state(n) for n in sizes]
    return all(decide(theorem) == "proved" for theorem in theorems)


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
        return "proved" if _is_proved(name) else "assumed"
    found = theorem(op, row)
    return "enumerated" if found is None else "proved" if decide(found) == "proved" else "assumed"
