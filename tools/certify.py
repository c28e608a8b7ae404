"""Checks a certificate of sbp without sbp.

    python tools/certify.py CERTIFICATE [--program OTHER] [--list] [--allow-unchecked]

`plan.certificate(path)` of sbp writes the certificate. This file imports numpy and nothing of sbp
or JAX, and has its own table of which types an operator takes and gives.

On each axis of a device mesh, a tensor has one of three kinds of types. In the file, a type is a
list with one entry for each mesh axis, outer axis first:

    0, 1, ..       S(d): the tensor is the concatenation of the devices' parts along dim d. A dim of
                   L elements over n devices has parts of ceil(L / n) elements. The last parts may
                   be shorter or empty. An inner axis splits the parts of the outer axes.
    "B"            Each device has the whole tensor.
    "sum", ..      P(sum), P(max), ..: the sum (maximum, ..) of the devices' parts is the tensor.

The checks, in this order. The first that fails is told in one line:
 1. The file is complete, and each type fits its tensor.
 2. The instructions compute the program: each reads the values that the program reads there.
 3. Each operation computes the parts of its results from the parts of its operands, by the tables
    below. Operations that the tables do not know are counted, not guessed.
 4. Each step of a conversion is the collective that leads from its type to the next one.
 5. A loop's carry has one type, and so have the results of all branches.
 6. The types of arguments and results are those that the certificate claims.
 7. The bytes that one device sends, recomputed from shapes, types and mesh, are those claimed.
 8. The cost graph holds the types of the plan, and adds up to the seconds claimed. Its dual is a
    lower bound on the cost of all choices of states. The seconds of single states are not checked.

Exit status: 0 accepted, 1 rejected, 2 wrong usage, 3 accepted but for unknown operations.
"""

import argparse
import base64
import hashlib
import json
import math
import re
import sys
import zlib
from collections import Counter, namedtuple
from functools import partial

import numpy as np

MONOIDS = ("sum", "max", "min", "prod", "and", "or")
MALFORMED = (ArithmeticError, AttributeError, LookupError, TypeError, ValueError)
matched = partial(zip, strict=True)
is_near = partial(math.isclose, rel_tol=1e-9)


class Wrong(Exception):
    """What does not fit, in one line."""


class Outside(Exception):
    """The tables do not know an operation."""


def expect(condition, message):
    """Rejects the certificate unless a condition holds."""
    if not condition:
        raise Wrong(message)


# ---- types --------------------------------------------------------------------------------------


def is_split(atom):
    """Whether an atom is S(d). JSON's true and false are Python's bools, which are ints."""
    return type(atom) is int


def monoids_of(dtype):
    """The monoids with which parts of a dtype may be joined."""
    if "float" in dtype:
        return MONOIDS[:4]
    special = {"bool": ("and", "or"), "complex": ("sum", "prod"), "key": ()}
    return next((m for name, m in special.items() if dtype.startswith(name)), MONOIDS)


def check_type(atoms, aval, sizes, what):
    """Checks that a type has an atom for each mesh axis, splits dims that exist, and has one
    monoid at most: sums and maxima do not commute."""
    dtype, shape = aval
    fits = isinstance(atoms, list) and len(atoms) == len(sizes)
    expect(fits, f"{what}: {atoms} is no type of {len(sizes)} mesh axes")
    for atom, n in matched(atoms, sizes):
        known = 0 <= atom < len(shape) if is_split(atom) else atom in ("B", *monoids_of(dtype))
        expect(known, f"{what}: {atom!r} is no atom of a tensor {dtype}{shape}")
        expect(n > 1 or atom == "B", f"{what}: an axis of one device has type B, not {atom!r}")
    monoids = {a for a in atoms if a in MONOIDS}
    expect(len(monoids) <= 1, f"{what}: {atoms} has two monoids")


def part(shape, atoms, sizes):
    """The shape of the largest part of a tensor on the mesh axes given."""
    local = list(shape)
    for atom, n in matched(atoms, sizes):
        if is_split(atom):
            local[atom] = -(-local[atom] // n)
    return local


def stacked(atoms):
    """The type of a stack of tensors along a new first dim."""
    return [a + 1 if is_split(a) else a for a in atoms]


def text_of(atoms, names):
    """A type in words: `data:S(0) model:P(sum)`."""
    shown = (f"S({a})" if is_split(a) else f"P({a})" for a in atoms)
    words = [f"{n}:{s}" for n, s, a in matched(names, shown, atoms) if a != "B"]
    return " ".join(words) or "B"


def bytes_of(dtype):
    """Bytes of one element."""
    keys = {"bool": 1, "key<fry>": 8, "key<rbg>": 16, "key<urbg>": 16}
    bits = re.search(r"\d+", dtype)
    expect(dtype in keys or bits, f"unknown dtype {dtype}")
    return keys[dtype] if dtype in keys else max(1, int(bits.group()) // 8)


# ---- the program --------------------------------------------------------------------------------
# Operations over numbered values. A body of a loop or branch has values of its own.


class Operation:
    """One operation of the program: `number` in program order, bodies after their operation."""

    def __init__(self, data, number, line):
        self.op, self.params, self.number, self.line = data["op"], data["params"], number, line
        self.ins, self.outs, self.trips = data["in"], data["out"], data.get("trips", 1)
        self.bodies = []

    def __str__(self):
        return f"operation {self.number}, {self.op} {self.line}"

    def has_effects(self):
        inner = (o for body in self.bodies for o in body.operations)
        return not self.outs or self.op == "io_callback" or any(o.has_effects() for o in inner)


Body = namedtuple("Body", "ins operations outs")


class Program:
    """The program of a certificate. `values` has the dtype and shape of each value, those of values
    that only the plan has at the end. `digest` stands for the program without its source lines."""

    def __init__(self, certificate):
        section = certificate["program"]
        self.values = [*section["values"], *certificate["plan"]["values"]]
        for dtype, shape in self.values:
            bytes_of(dtype)
            expect(all(type(n) is int and n >= 0 for n in shape), f"{shape} is no shape")
        self.count, self.operations, self.defined = len(section["values"]), [], set()
        self.lines = certificate["lines"]
        self.body = self.read(section)
        expect(len(self.lines) == len(self.operations), "the source lines are not complete")
        self.digest = hashlib.sha256(json.dumps(section, sort_keys=True).encode()).hexdigest()[:16]

    def read(self, data):
        scope = set()

        def define(values, what):
            for v in values:
                is_new = 0 <= v < self.count and v not in self.defined
                expect(is_new, f"{what}: %{v} is no value, or defined twice")
                self.defined.add(v)
                scope.add(v)

        def read(operands, what):
            unknown = [o for o in operands if not isinstance(o, dict) and o not in scope]
            expect(not unknown, f"{what} reads values that are not there: {unknown}")

        define(data["in"], "the arguments")
        operations = []
        for each in data["do"]:
            number = len(self.operations)
            operations.append(operation := Operation(each, number, self.lines[number]))
            self.operations.append(operation)
            read(operation.ins, operation)
            operation.bodies = [self.read(body) for body in each.get("bodies", ())]
            define(operation.outs, operation)
        read(data["out"], "the end of a body")
        return Body(data["in"], operations, data["out"])

    def aval(self, o):
        """Dtype and shape of a value or constant."""
        return [o["dtype"], o["shape"]] if isinstance(o, dict) else self.values[o]


# ---- equal values -------------------------------------------------------------------------------
# The plan may read a value in place of an equal one: a block that the gradient computes again.
# Equal numbers mean equal values; inside a scan, at the same index of the arrays that it goes over.

SAME = ("sbp_annotate", "optimization_barrier")  # each result is its operand


class Numbers:
    def __init__(self, program):
        self.known, self.keys, self.number = {}, {}, {}
        for v in program.body.ins:
            self.number[v] = self.of(("argument", v))
        self.visit(program.body, None)

    def of(self, key):
        number = self.known.setdefault(key, len(self.known))
        self.keys[number] = key
        return number

    def operand(self, operand):
        if isinstance(operand, dict):
            return self.of(("constant", json.dumps(operand, sort_keys=True)))
        return self.number[operand]

    def slice(self, index, number):
        """An element of an array at the index of a scan. Of what another scan stacked, it is the
        value at that index."""
        kind, *rest = self.keys[number]
        if kind == "stacked" and rest[0] == index:
            return rest[1]
        return self.of(("slice", index, number))

    def visit(self, body, inside):
        for o in body.operations:
            ins = [self.operand(x) for x in o.ins]
            made = [self.of(("result", o.number, k)) for k in range(len(o.outs))]
            if o.op in SAME:
                made = ins
            elif o.op == "scan":
                index = (inside, o.trips)
                constants, carries = o.params["num_consts"], o.params["num_carry"]
                for k, v in enumerate(o.bodies[0].ins):
                    if k < constants:
                        self.number[v] = ins[k]
                    elif k < constants + carries:
                        self.number[v] = self.of(("carry", o.number, k))
                    else:
                        self.number[v] = self.slice(index, ins[k])
                self.visit(o.bodies[0], index)
                for k, x in enumerate(o.bodies[0].outs[carries:], carries):
                    made[k] = self.of(("stacked", index, self.operand(x)))
            elif o.bodies:
                for each in o.bodies:
                    self.number |= {v: self.of(("input", v)) for v in each.ins}
                    self.visit(each, inside)
            else:
                opaque = any(w in o.op for w in ("callback", "custom", "pallas"))
                params = o.number if opaque else json.dumps(o.params, sort_keys=True)
                made = [self.of(("run", o.op, params, *ins, k)) for k in range(len(o.outs))]
            self.number.update(matched(o.outs, made))


# ---- splits -------------------------------------------------------------------------------------
# A row splits one letter of an operator. As in einsum, a letter is a dim that operands and results
# share: "ik,kj->ij". Operands and results with the letter are split there. An operand without it is
# whole. A result without it is partial, if the operator reduces over the letter. A dim without a
# letter (None) may not be split.


class Call:
    """An operation on an axis of `n` devices, with the shapes of the parts of operands and results
    that the outer mesh axes leave (`ins`, `outs`), and of all of them as a whole (`whole`)."""

    def __init__(self, operation, program, types, outer, n):
        avals = [program.aval(o) for o in (*operation.ins, *operation.outs)]
        self.op, self.params, self.n = operation.op, operation.params, n
        self.dtypes = [dtype for dtype, _ in avals]
        self.whole = [shape for _, shape in avals]
        parts = [part(s, t, outer) for (_, s), t in matched(avals, types)]
        self.ins, self.outs = parts[: len(operation.ins)], parts[len(operation.ins) :]

    def own(self, value, but=()):
        """Letters of a tensor by their positions, None for some dims."""
        return [None if d in but else d for d in range(len(value))]


def elementwise(c):
    """Operands have the dims of the result, or one element in place of them."""
    whole = c.whole[-1]
    letters = []
    for shape in c.whole:
        fits = all(size in (1, full) for size, full in matched(shape, whole)) if shape else True
        expect(fits, f"{c.op} of shapes {shape} and {whole}")
        letters.append([d if size == whole[d] else None for d, size in enumerate(shape)])
    return letters[: len(c.ins)], letters[len(c.ins) :]


def along(name):
    """Operators that mix the elements along some dims, which a parameter names, and no others."""

    def letters(c):
        dims = np.ravel(c.params[name]).tolist()
        return [c.own(s, dims) for s in c.ins], [c.own(s, dims) for s in c.outs]

    return letters


def reduction(c):
    """The dims in `axes` are reduced; `argmax` needs them whole."""
    axes, whole = c.params["axes"], c.op in ("argmax", "argmin")
    kept = [d for d in range(len(c.ins[0])) if d not in axes]
    return [c.own(c.ins[0], axes if whole else ())], [kept]


def dot_general(c):
    (left, right), (left_batch, right_batch) = c.params["dimension_numbers"]
    a = [("left", d) for d in range(len(c.ins[0]))]
    b = [("right", d) for d in range(len(c.ins[1]))]
    for i, j in matched([*left, *left_batch], [*right, *right_batch]):
        b[j] = a[i]
    batch = [a[i] for i in left_batch]
    free = [x for i, x in enumerate(a) if i not in (*left, *left_batch)]
    free += [x for j, x in enumerate(b) if j not in (*right, *right_batch)]
    return [a, b], [[*batch, *free]]


def convolution(c):
    """Batch and features. A dim of windows is whole."""
    dims, rank = c.params["dimension_numbers"], len(c.ins[0])
    if (c.params["feature_group_count"], c.params["batch_group_count"]) != (1, 1):
        raise Outside
    a, b, out = ([None] * rank for _ in range(3))
    a[dims["lhs_spec"][0]] = out[dims["out_spec"][0]] = "batch"
    a[dims["lhs_spec"][1]] = b[dims["rhs_spec"][1]] = "in"
    b[dims["rhs_spec"][0]] = out[dims["out_spec"][1]] = "out"
    return [a, b], [out]


def broadcast_in_dim(c):
    """New dims, and dims of one element that are repeated, are made where they are needed."""
    source, out = [], [("new", d) for d in range(len(c.outs[0]))]
    for i, d in enumerate(c.params["broadcast_dimensions"]):
        source.append(d if c.whole[0][i] == c.whole[-1][d] else None)
        out[d] = d if source[-1] is not None else out[d]
    return [source, *([None] * len(s) for s in c.ins[1:])], [out]


def reshape(c):
    """Dims i of the operand and j of the result share a letter if the dims before them have equally
    many elements, and the parts of both have, too: then each part is the same run of elements."""
    if c.op == "reshape" and c.params["dimensions"] is not None:
        raise Outside

    def runs(shape):
        before = (math.prod(shape[:d]) for d in range(len(shape)))
        after = (-(-size // c.n) * math.prod(shape[d + 1 :]) for d, size in enumerate(shape))
        return [tuple(run) if size > 1 else None for *run, size in matched(before, after, shape)]

    source, out = runs(c.ins[0]), runs(c.outs[0])
    return [[x if x in out else None for x in source]], [[x if x in source else None for x in out]]


def uncut(c):
    """The dims of which the result of a slice, update or window has as many elements."""
    sides = [s for s in c.whole if len(s) == len(c.whole[0])]
    cut = [len(c.whole[0])]  # where a cast to fewer bits puts the pieces of a number
    cut += [d for d in range(cut[0]) if len({s[d] for s in sides}) > 1]
    for name in ("window_dimensions", "window_strides", "base_dilation"):
        cut += [d for d, size in enumerate(c.params.get(name, ())) if size != 1]
    for name in ("padding", "padding_config"):
        cut += [d for d, lows in enumerate(c.params.get(name, ())) if any(lows)]
    return [c.own(s, cut) for s in c.ins], [c.own(s, cut) for s in c.outs]


def indexed(c):
    """Gather and scatter. `moved` is what is read or written at the indices: the result of the
    one, the updates of the other. It shares with the operand the dims of which each slice has all
    elements, and with the indices all of their dims but the last."""
    dims, rank, is_gather = c.params["dimension_numbers"], len(c.whole[0]), c.op == "gather"
    moved_shape = c.whole[-1] if is_gather else c.whole[2]
    window_dims = dims["offset_dims" if is_gather else "update_window_dims"]
    dropped = dims["collapsed_slice_dims" if is_gather else "inserted_window_dims"]
    batching = dims["start_indices_batching_dims" if is_gather else "scatter_indices_batching_dims"]
    indices = [("index", k) for k in range(len(c.whole[1]) - 1)]
    operand, moved = [None] * rank, [None] * len(moved_shape)
    for k, d in matched(batching, dims["operand_batching_dims"]):
        operand[d] = ("index", k)
    kept = [d for d in range(rank) if d not in (*dropped, *dims["operand_batching_dims"])]
    for at, d in matched(window_dims, kept):
        if moved_shape[at] == c.whole[0][d]:
            operand[d] = moved[at] = ("window", d)
    rest = [d for d in range(len(moved)) if d not in window_dims]
    for at, letter in matched(rest, indices):
        moved[at] = letter
    if is_gather:
        return [operand, [*indices, None]], [moved]
    return [operand, [*indices, None], moved], [operand]


# ---- partials -----------------------------------------------------------------------------------
# Rows of partial operands, for parts that no axis splits: `sum,B->sum` says that a sum of parts,
# times a whole factor, is the sum of the products. `m` is any one monoid, `..` repeats the entry
# before it as often as there are operands, and `f:` is for floats only.

RISING = "max->max min->min"  # f(max(x, y)) = max(f(x), f(y))
FALLING = "max->min min->max"
BILINEAR = "sum,B->sum B,sum->sum"
MOVED = "m->m"
EITHER = "{0},{0}->{0} {0},B->{0} B,{0}->{0} {1},B->{1} B,{1}->{1}"
SHIFTED = "f:max,B->max f:B,max->max f:min,B->min f:B,min->min"  # integers wrap around

TABLE = {}  # primitive -> (function that names the letters, rows of partials, monoid over letters)


def enter(names, letters, rows="", reduces=None):
    for name in names.split():
        TABLE[name] = letters, rows, reduces


enter(
    "acos asin atan2 atanh cos cosh digamma eq erf_inv is_finite lgamma ne population_count pow rem"
    " rsqrt sin tan threefry2x32 xor convert_element_type",
    elementwise,
)
enter("asinh atan ceil erf exp exp2 expm1 floor logistic round sinh tanh", elementwise, RISING)
enter("reduce_precision", elementwise, RISING)
enter("sign", elementwise, f"{RISING} or->or")
enter("cbrt", elementwise, f"{RISING} prod->prod")
enter("acosh log log1p log2 sqrt", elementwise, "min->min")  # of a negative part they are NaN
enter("erfc", elementwise, FALLING)
enter("square", elementwise, "prod->prod")
enter("abs integer_pow", elementwise, "f:prod->prod")
enter("neg", elementwise, "sum->sum f:max->min f:min->max")
enter("nextafter", elementwise, SHIFTED)
enter("conj", elementwise, "sum->sum prod->prod")
enter("real imag", elementwise, "sum->sum")
enter("not", elementwise, f"and->or or->and {FALLING}")
enter("copy copy_p name stop_gradient", elementwise, MOVED)
enter("add add_any", elementwise, f"sum,sum->sum {SHIFTED}")
enter("sub", elementwise, "sum,sum->sum f:max,B->max f:min,B->min f:B,max->min f:B,min->max")
enter("complex", elementwise, "sum,sum->sum")
enter("mul", elementwise, f"{BILINEAR} prod,prod->prod")
enter("div", elementwise, "f:sum,B->sum f:prod,prod->prod")
enter("max", elementwise, EITHER.format("max", "min"))
enter("min", elementwise, EITHER.format("min", "max"))
enter("and", elementwise, "and,and->and or,B->or B,or->or")
enter("or", elementwise, "or,or->or and,B->and B,and->and")
enter("shift_left", elementwise, "sum,B->sum and,B->and or,B->or")
enter("shift_right_logical", elementwise, "and,B->and or,B->or")
enter("shift_right_arithmetic", elementwise, "max,B->max min,B->min and,B->and or,B->or")
enter("ge gt", elementwise, "min,B->and B,max->and")  # all parts are greater if the least one is
enter("le lt", elementwise, "max,B->and B,min->and")
enter("select_n", elementwise, "B,m..->m")
CLAMPED = "{0},B,B->{0} B,{0},B->{0} B,B,{0}->{0} "
CLAMPED = CLAMPED.format("max") + CLAMPED.format("min") + "max,max,B->max B,min,min->min"
enter("clamp", elementwise, f"{CLAMPED} min,B,min->min")
enter("dot_general", dot_general, BILINEAR, "sum")
enter("conv_general_dilated", convolution, BILINEAR, "sum")
enter("transpose", lambda c: ([c.own(c.ins[0])], [[*c.params["permutation"]]]), MOVED)
enter("broadcast_in_dim", broadcast_in_dim, MOVED)
enter("reshape squeeze", reshape, MOVED)
enter("slice", uncut, MOVED)
enter("rev", along("dimensions"), MOVED)
enter("concatenate", along("dimension"), "m..->m")
enter("split", along("axis"), "m->m..")
enter("pad", uncut, "m,m->m")
enter("iota empty", lambda c: ([], [c.own(c.outs[0])]))  # each device makes its own part
enter("dynamic_slice", uncut, "m,B..->m")
enter("dynamic_update_slice", uncut, "m,m,B..->m")
enter("gather", indexed, "m,B->m")
enter("scatter", indexed, "m,B,m->m")  # where each element is written once
enter("scatter-add", indexed, "sum,B,sum->sum f:max,B,B->max f:min,B,B->min", "sum")
enter("sort", along("dimension"), "B,m..->B,m..")  # moved by the first operand
enter("argmax argmin", reduction)
enter("top_k cumlogsumexp", along("axis"))
enter("bitcast_convert_type", uncut, "and->and or->or")
for monoid in MONOIDS:
    enter(f"reduce_{monoid}", reduction, f"{monoid}->{monoid}", monoid)
    enter(f"cum{monoid}", along("axis"), f"{monoid}->{monoid}")
    enter(f"reduce_window_{monoid}", uncut, f"{monoid}->{monoid}")


def cast_rows(source, target):
    """The rows of partials of a cast."""
    integers = ["float" not in d and "complex" not in d for d in (source, target)]
    if source == target:
        return MOVED
    if re.search(r"float\d_", source + target):
        raise Outside  # some of these have no infinities
    if source == "bool":
        return "or->max and->min and->prod" + (" and->and or->or" if integers[1] else "")
    if target == "bool":
        return "or->or"
    bits = [int(re.search(r"\d+", d).group()) for d in (source, target)]
    if integers[0] and integers[1]:
        fewer = bits[1] <= bits[0]
        rising = "" if target[0] == "u" != source[0] else RISING  # -1 becomes the largest number
        return "sum->sum prod->prod and->and or->or" if fewer else f"{rising} and->and or->or"
    rising = "" if integers[1] or "complex" in source + target else RISING
    return rising + (" sum->sum prod->prod" if bits[1] > bits[0] and not any(integers) else "")


def partial_rows(c):
    """The rows of partials of an operation, as (operands, results)."""
    rows, dtype = TABLE[c.op][1], c.dtypes[0]
    if c.op == "convert_element_type":
        rows = cast_rows(dtype, c.dtypes[-1])
    if c.op == "integer_pow" and c.params["y"] > 0:
        rows = "prod->prod f:max->max f:min->min" if c.params["y"] % 2 else "prod->prod"
    once = c.op != "scatter" or c.params["unique_indices"] or math.prod(c.whole[1][:-1]) == 1
    if (c.op == "sort" and c.params["num_keys"] != 1) or not once:
        rows = ""
    for row in rows.split():
        exact = row.removeprefix("f:")
        if exact != row and "float" not in dtype and "complex" not in dtype:
            continue
        for m in MONOIDS if re.search(r"\bm\b", exact) else ("",):
            if c.op == "gather" and not fill_joins(c, m):
                continue
            sides = []
            for side, count in matched(exact.split("->"), (len(c.ins), len(c.outs))):
                *first, last = side.split(",")
                rest = [last[:-2]] * (count - len(first)) if last.endswith("..") else [last]
                sides.append([m if x == "m" else x for x in (*first, *rest)])
            yield tuple(sides)


def fill_joins(c, monoid):
    """Whether parts that are filled where an index is out of bounds join to the fill value."""
    fill = c.params["fill_value"]
    nan = fill == "nan" or (fill is None and "float" in c.dtypes[0])
    zero = fill in ("0.0", 0) and monoid != "prod"
    return "FILL" not in str(c.params["mode"]) or monoid not in ("sum", "prod") or nan or zero


def row_fault(c, ins, outs):
    """Why parts of the types `outs` do not follow from parts of the types `ins` on one mesh axis;
    None where they do."""
    atoms = [*ins, *outs]
    if all(a == "B" for a in atoms):
        return None
    table, rows, reduces = TABLE[c.op]
    exact = not all("float" in d or "complex" in d for d in c.dtypes)
    if BILINEAR in rows and exact and (len({*c.dtypes}) > 1 or c.dtypes[0] == "bool"):
        raise Outside  # parts of narrow integers wrap around
    letters_in, letters_out = table(c)
    letters = [*letters_in, *letters_out]
    if not any(is_split(a) for a in atoms):
        return None if (ins, outs) in partial_rows(c) else "no rule for partials allows this"
    split = {x[a] for x, a in matched(letters, atoms) if is_split(a)}
    if len(split) != 1 or None in split:
        return "it splits a dim that has to be whole, or two dims that are not the same"
    (letter,) = split
    sizes = {s[x.index(letter)] for x, s in matched(letters, [*c.ins, *c.outs]) if letter in x}
    if len(sizes) != 1 and c.op not in ("reshape", "squeeze"):
        return f"the dims that it splits have {sorted(sizes)} elements"
    added = c.op == "scatter-add" and letter not in letters_out[0]  # its operand is a summand
    for k, (x, a) in enumerate(matched(letters, atoms)):
        summed = k >= len(ins) or (added and k == 0)
        want = x.index(letter) if letter in x else reduces if summed else "B"
        if want is None:
            return "a result depends on all elements of the split dim"
        if a != want:
            what = f"result {k - len(ins)}" if k >= len(ins) else f"operand {k}"
            return f"{what} must be {want!r}, not {a!r}"
    return None


# ---- conversions --------------------------------------------------------------------------------

CHANGES = {
    "all_reduce": ("P", "B"),
    "reduce_scatter": ("P", "S"),
    "all_gather": ("S", "B"),
    "all_to_all": ("S", "S"),
    "slice": ("B", "S"),  # each device keeps its own part
    "mask": ("B", "P"),  # the first device keeps the value, others the neutral element
    "zero_pad": ("S", "P"),  # each device puts its part among neutral elements
}


def step_fault(step, source, target):
    """Why a step does not lead from one type to another; None where it does."""
    kind, axes = step["kind"], step["axes"]
    if kind in ("to_host", "to_device"):
        return None if source == target and not axes else f"{kind} changes a type"
    several = len(axes) > 1 and kind not in ("all_reduce", "all_gather")
    if kind not in CHANGES or not axes or axes != sorted({*axes}) or several:
        return f"there is no step {kind!r} over the mesh axes {axes}"
    for k, (a, b) in enumerate(matched(source, target)):
        if k not in axes:
            if a != b:
                return f"{kind} over the mesh axes {axes} changes axis {k}, {a!r} -> {b!r}"
            continue
        kinds = tuple("S" if is_split(x) else "P" if x in MONOIDS else "B" for x in (a, b))
        if kinds != CHANGES[kind] or a == b:
            return f"{kind} does not lead from {a!r} to {b!r}"
        # An inner axis splits the parts of an outer one: joined or cut on the outer axis alone,
        # the elements would lie in another order.
        inner = [i for i in range(k + 1, len(source)) if i not in axes]
        for x, atoms in ((a, source), (b, target)):
            if is_split(x) and any(atoms[i] == x for i in inner):
                return f"{kind} on axis {k}, while an inner axis splits dim {x}"
    return None


def step_bytes(step, source, target, aval, sizes):
    """Bytes that one device sends in a step (rings, with padding)."""
    dtype, shape = aval
    kind, n = step["kind"], math.prod(sizes[k] for k in step["axes"])
    here, there = (math.prod(part(shape, t, sizes)) * bytes_of(dtype) for t in (source, target))

    def exchanged(dim):
        blocks = part(shape, source, sizes)
        blocks[dim] = -(-blocks[dim] // n) * n
        return (n - 1) / n * math.prod(blocks) * bytes_of(dtype)

    wide = step.get("wide", {}).get("dim")
    if wide is not None and kind in ("all_reduce", "reduce_scatter"):  # added up in a wider dtype
        return exchanged(wide) * (2 if kind == "all_reduce" else 1)
    match kind:
        case "all_reduce":
            return 2 * (n - 1) / n * here
        case "reduce_scatter":
            return (n - 1) / n * max(here, there * n)
        case "all_gather":
            return (n - 1) * here
        case "all_to_all":
            return exchanged(target[step["axes"][0]])
    return 0.0


# ---- the plan -----------------------------------------------------------------------------------


class Plan:
    """Walks the instructions of a plan, and checks each of them. `made` has the type in which each
    value is made, `rows` the types of operands and results of each operation that runs."""

    def __init__(self, certificate, program):
        self.program, self.numbers = program, Numbers(program)
        self.names = [name for name, _ in certificate["mesh"]]
        self.sizes = [n for _, n in certificate["mesh"]]
        self.made, self.rows, self.unchecked = {}, {}, Counter()
        self.padded, self.steps, self.of_kernels = 0, 0, 0.0
        plan = certificate["plan"]
        self.ins, self.outs, self.bytes = self.block(plan, program.body, None, "the program")

    def block(self, data, body, inside, what):
        """Checks the instructions of a body; returns the types of its inputs and outputs, and the
        bytes that one device sends."""
        there, total, left = {}, 0.0, {o.number: o for o in body.operations}

        def read(sources, operands, what):
            expect(len(sources) >= len(operands), f"{what} has {len(sources)} operands")
            types = []
            for k, (value, atoms) in enumerate(sources):
                operand = operands[k] if k < len(operands) else value
                aval = self.program.aval(operand)
                check_type(atoms, aval, self.sizes, f"{what}, operand {k}")
                if value is not None or not isinstance(operand, dict):
                    have = tuple(atoms) in there.get(value, ())
                    shown = text_of(atoms, self.names)
                    expect(have, f"{what}: %{value} is not there in type {shown}")
                    numbers = self.numbers.number[value], self.numbers.operand(operand)
                    same = numbers[0] == numbers[1] and self.program.aval(value) == aval
                    expect(same, f"{what}: operand {k} is %{value}, the program has %{operand}")
                types.append(atoms)
            return types

        def write(sources, values, what):
            expect([v for v, _ in sources[: len(values)]] == values, f"{what} makes other values")
            for value, atoms in sources:
                check_type(atoms, self.program.aval(value), self.sizes, what)
                expect(value not in there, f"{what} makes %{value} twice")
                there[value] = {tuple(atoms)}
                self.made[value] = atoms
            return [atoms for _, atoms in sources]

        ins = write(data["in"], body.ins, f"the inputs of {what}")
        for each in data["do"]:
            if "convert" in each:
                total += self.conversion(each, there)
                continue
            number = each["run"] if "run" in each else each["loop"]
            expect(number in left, f"operation {number} does not belong to {what}, or runs twice")
            operation = left.pop(number)
            given = read(each["in"], operation.ins, operation)
            if "loop" in each:
                total += self.loop(operation, each, given, inside)
            made = write(each["out"], operation.outs, operation)
            if "run" in each:
                expect(not operation.bodies, f"{operation} has a body")
                exact = (len(given), len(made)) == (len(operation.ins), len(operation.outs))
                expect(exact, f"{operation} has other operands or results")
                self.rows[number] = [*given, *made]
                total += self.run(operation, each, given, made)
        for operation in left.values():
            expect(not operation.has_effects(), f"{operation} does not run")
        expect(inside or len(data["out"]) == len(body.outs), f"{what} has other results")
        return ins, read(data["out"], body.outs, f"the end of {what}"), total

    def run(self, operation, data, ins, outs):
        """Checks the row of an operation; returns the bytes that its kernels send."""
        sent, kernels = data.get("bytes", 0.0), data.get("kernels", [])
        expect(sent >= 0, f"{operation} sends {sent} bytes")
        self.of_kernels += sent
        if operation.op in SAME:
            expect(ins == outs, f"{operation} changes a type")
            self.check_pin(operation, outs[0] if outs else [])
            return sent
        if all(a == "B" for t in (*ins, *outs) for a in t) and not (sent or kernels):
            return sent  # each device computes all
        if operation.op not in TABLE or kernels:
            self.unchecked[operation.op + "".join(f" <{k}>" for k in kernels)] += 1
            return sent
        expect(not sent, f"{operation} sends {sent} bytes, but it is local")
        padded = False
        for k, n in enumerate(self.sizes):
            c = Call(operation, self.program, [t[:k] for t in (*ins, *outs)], self.sizes[:k], n)
            try:
                row = [t[k] for t in ins], [t[k] for t in outs]
                fault = row_fault(c, *row)
            except Outside:
                self.unchecked[operation.op] += 1
                return sent
            expect(fault is None, f"{operation}: {row} on {self.names[k]}: {fault}")
            splits = [s[t[k]] for s, t in matched(c.ins, ins) if is_split(t[k])]
            padded |= any(size % n for size in splits) and any(t[k] in MONOIDS for t in outs)
        self.padded += padded
        return sent

    def check_pin(self, operation, atoms):
        """Checks that an annotation has the type that the user pins."""
        pin = operation.params.get("pin")
        for k, name in enumerate(self.names if pin else ()):
            pinned = pin["type"].get(name, "B" if pin["complete"] else None)
            fits = pinned is None or self.sizes[k] == 1 or atoms[k] == pinned
            expect(fits, f"{operation} pins {pinned!r} on {name}, the plan has {atoms[k]!r}")

    def conversion(self, data, there):
        """Checks the steps of a conversion; returns the bytes that one device sends."""
        value, here, total = data["convert"], data["from"], 0.0
        what, aval = f"the conversion of %{value}", self.program.aval(value)
        expect(tuple(here) in there.get(value, ()), f"{what} reads what is not there: {here}")
        for step in data["steps"]:
            after = step["to"]
            check_type(after, aval, self.sizes, what)
            fault = step_fault(step, here, after)
            expect(fault is None, f"{what}: {fault}")
            sent = step_bytes(step, here, after, aval, self.sizes)
            claimed = step.get("bytes", 0.0)
            message = f"{what}: {step['kind']} sends {sent} bytes, not {claimed}"
            expect(is_near(sent, claimed), message)
            total, here = total + sent, after
            self.steps += 1
        expect(tuple(here) not in there[value], f"{what} makes {here}, which is there")
        there[value].add(tuple(here))
        return total

    def loop(self, operation, data, ins, inside):
        """Checks a scan, while or cond; returns the bytes that one device sends."""
        bodies, index = data["bodies"], inside
        expect(len(bodies) == len(operation.bodies), f"{operation} has {len(bodies)} bodies")
        outs = [atoms for _, atoms in data["out"]]
        read, kept = data["in"][len(operation.ins) :], data["out"][len(operation.outs) :]
        if operation.op == "scan":
            index, length = (inside, operation.trips), operation.params["length"]
            expect(operation.trips == length, f"{operation} of length {length} has other trips")
            # Stacks of an earlier scan that this one reads in place of a value of its own.
            inner = bodies[0]["in"][len(operation.ins) :]
            for (whole, _), (value, _) in matched(read, inner):
                number = self.numbers.slice(index, self.numbers.number[whole])
                self.define(operation, value, number, whole, value)
        expect(operation.op == "scan" or not (read or kept), f"{operation} has other operands")
        found = [
            self.block(b, body, index, f"body {k} of {operation}")
            for k, (b, body) in enumerate(matched(bodies, operation.bodies))
        ]
        fits = self.loop_fits(operation, ins, outs, found)
        expect(fits, f"{operation}: types in its bodies differ from those outside")
        if operation.op == "scan":
            inner = bodies[0]["out"][len(operation.outs) :]
            for (whole, _), (value, _) in matched(kept, inner):
                number = self.numbers.of(("stacked", index, self.numbers.number[value]))
                self.define(operation, whole, number, whole, value)
        sent = [total for _, _, total in found]
        return max(sent) if operation.op == "cond" else operation.trips * sum(sent)

    def define(self, scan, value, number, whole, part_of_it):
        """Numbers a value that only the plan has: a stack of parts, or a part of a stack."""
        is_new = value >= self.program.count and value not in self.numbers.number
        (dtype, shape), stack = self.program.aval(part_of_it), self.program.aval(whole)
        fits = is_new and stack == [dtype, [scan.trips, *shape]]
        expect(fits, f"{scan}: %{value} is no new value, or of another shape")
        self.numbers.number[value] = number

    def loop_fits(self, operation, ins, outs, found):
        """Whether the types of a loop or branch agree with those of its bodies."""
        entries, exits = [f[0] for f in found], [f[1] for f in found]
        whole, params = ["B"] * len(self.sizes), operation.params
        if operation.op == "scan":
            constants, carries = params["num_consts"], params["num_carry"]
            first = constants + carries
            return (
                ins[:first] == entries[0][:first]
                and entries[0][constants:first] == exits[0][:carries] == outs[:carries]
                and [stacked(t) for t in entries[0][first:]] == ins[first:]
                and [stacked(t) for t in exits[0][carries:]] == outs[carries:]
            )
        if operation.op == "while":
            c, b = params["cond_nconsts"], params["body_nconsts"]
            return (
                entries[0] == [*ins[:c], *ins[c + b :]]
                and entries[1] == ins[c:]
                and exits[1] == ins[c + b :] == outs
                and exits[0] == [whole]
            )
        expect(operation.op == "cond", f"{operation} has bodies")
        branches = [ins[1:]] * len(found), [outs] * len(found)
        return ins[0] == whole and (entries, exits) == branches


# ---- the cost graph -----------------------------------------------------------------------------
# A variable is a choice: the row of an operation, or the type of a value. Its states have seconds,
# and pairs of variables have a table of seconds, those of conversions. The cost of a choice of
# states is the sum. Seconds can be moved from a table to the states of its two variables without a
# change of any sum. After that, the least entries of all states and tables add up to no more than
# any choice costs: the dual.


class Costs:
    def __init__(self, cost, plan):
        expect(np.isfinite([x or 0 for x in cost["numbers"]]).all(), "a price is infinite")
        numbers = np.array([math.inf if x is None else x for x in cost["numbers"]])
        tables = [numbers[unpacked(t, "<i4").reshape(s)] for s, t in cost["tables"]]
        variables = cost["variables"]
        unary = [tables[v["seconds"]].copy() for v in variables]
        chosen = [v["chosen"] for v in variables]
        for v, u, k in matched(variables, unary, chosen):
            count = len(cost["states"][v["states"]])
            expect(0 <= k < count == len(u), f"a variable of {count} states has no state {k}")
        total = sum(float(u[k]) for u, k in matched(unary, chosen))
        moved, bound, at = unpacked(cost["messages"], "<f8"), 0.0, 0
        expect(np.isfinite(moved).all(), "a message of the dual is not a number")
        for a, b, number in cost["pairs"]:
            table = tables[number]
            expect(table.shape == (len(unary[a]), len(unary[b])), f"the table of {a} and {b}")
            total += float(table[chosen[a], chosen[b]])
            ends = moved[at : at + len(unary[a])], moved[at + len(unary[a]) :][: len(unary[b])]
            at += len(unary[a]) + len(unary[b])
            unary[a] += ends[0]
            unary[b] += ends[1]
            bound += float((table - ends[0][:, None] - ends[1][None, :]).min())
        expect(at == len(moved), "the dual has not as many messages as the tables have states")
        bound += sum(float(u.min()) for u in unary)
        self.correspond(cost, plan)
        message = f"the states of the plan cost {total!r} seconds, not {cost['chosen']!r}"
        expect(is_near(total, cost["chosen"]), message)
        message = f"the dual proves {bound!r} seconds, less than {cost['bound']!r}"
        expect(cost["bound"] <= bound + 1e-9 * abs(total), message)
        claimed, free = cost["seconds"], cost["reuse is free"]
        fits = math.isclose(claimed, total, rel_tol=1e-6) or (free and claimed > total)
        expect(fits, f"the plan costs {total!r} seconds, the certificate claims {claimed!r}")
        within = claimed <= 0 or cost["bound of sbp"] <= claimed * (1 + 1e-6)
        expect(within, "the bound that sbp claims is above the seconds of the plan")
        self.free, self.repeated = free, cost["repeated"]
        self.seconds, self.bound, self.claimed_bound = claimed, bound, cost["bound of sbp"]

    def correspond(self, cost, plan):
        """Checks that the states of the variables are the types of the plan."""
        types, rows, made = cost["types"], set(), plan.made
        for v in cost["variables"]:
            state = [types[t] for t in cost["states"][v["states"]][v["chosen"]]]
            if "row" in v:
                rows.add(v["row"])
                fits = plan.rows.get(v["row"], state) == state  # what need not run has none
                expect(fits, f"the cost graph has another row of operation {v['row']}: {state}")
            elif "result" in v:
                fits = plan.outs[v["result"]] == state[0]
                expect(fits, f"the cost graph has another type of result {v['result']}")
            for value, is_stacked in v.get("values", ()):
                want = stacked(state[0]) if is_stacked else state[0]
                fits = made.get(value, want) == want
                expect(fits, f"the cost graph has another type of %{value}: {want}")
        for o in plan.program.operations:
            known = o.bodies or o.op in SAME or o.number in rows
            expect(known, f"the cost graph lacks {o}")


def unpacked(text, dtype):
    return np.frombuffer(zlib.decompress(base64.b64decode(text)), dtype)


# ---- main ---------------------------------------------------------------------------------------


def read(path):
    try:
        with open(path, encoding="utf-8") as file:
            certificate = json.load(file, parse_constant=int)  # refuses NaN
    except (OSError, ValueError, RecursionError) as error:
        raise Wrong(f"{path} is not complete JSON, or cannot be read: {error}") from None
    is_one = isinstance(certificate, dict) and certificate.get("sbp certificate") == 1
    expect(is_one, f"{path} is no certificate of form 1")
    return certificate


def certify(certificate):
    """Checks a certificate: its program, plan, and costs, None where it has none."""
    try:
        for _, n in certificate["mesh"]:
            expect(type(n) is int and n > 0, f"a mesh axis of {n} devices")
        program = Program(certificate)
        plan = Plan(certificate, program)
        sides = ("arguments", program.body.ins, plan.ins), ("results", program.body.outs, plan.outs)
        for side, values, types in sides:
            claims = certificate[side]
            expect(len(claims) == len(values), f"it claims {len(claims)} {side}, not {len(values)}")
            for (name, claimed), atoms in matched(claims, types):
                have = text_of(atoms, plan.names)
                expect(claimed == have, f"{side}: {name} is claimed {claimed}, the plan has {have}")
        sent = certificate["bytes_per_device"]
        expect(is_near(plan.bytes, sent), f"it claims {sent} bytes, the plan sends {plan.bytes}")
        cost = certificate["cost"]
        return program, plan, None if cost is None else Costs(cost, plan)
    except (*MALFORMED, RecursionError, zlib.error) as error:
        text = f"no field {error}" if isinstance(error, KeyError) else f"a wrong value: {error}"
        raise Wrong(f"the certificate is incomplete or damaged: it has {text}") from error


def compare(program, other):
    """Checks that two programs are the same."""
    if program.digest == other.digest:
        return
    for a, b in zip(program.operations, other.operations, strict=False):
        same = all(getattr(a, name) == getattr(b, name) for name in ("op", "params", "ins", "outs"))
        avals = [[p.aval(v) for v in (*o.ins, *o.outs)] for p, o in ((program, a), (other, b))]
        expect(same and avals[0] == avals[1], f"another program: {a} is {b} there")
    raise Wrong("another program: the arguments, results or numbers of operations differ")


def report(program, plan, costs, certificate):
    """The lines for a certificate that holds."""
    axes = " ".join(f"{n}={size}" for n, size in certificate["mesh"])
    yield f"program {program.digest} of {len(program.operations)} operations, mesh {axes}"
    for side in ("arguments", "results"):
        for name, text in certificate[side]:
            yield f"  {side[:-1]} {name}: {text}"
    outside, total = sum(plan.unchecked.values()), len(plan.rows)
    yield f"rows: {total - outside} of {total} operations are right"
    if outside:
        shown = ", ".join(f"{name} ({count})" for name, count in sorted(plan.unchecked.items()))
        yield f"  {outside} of {total} operations are outside this checker's tables: {shown}"
    if plan.padded:
        yield f"  {plan.padded} operations reduce parts with padding, which the executor must mask"
    yield f"conversions: {plan.steps} steps are right"
    yield f"sent: {plan.bytes:,.0f} bytes per device and call"
    if plan.of_kernels:
        yield f"  operations send {plan.of_kernels:,.0f} of these per run: not recomputed"
    if any(o.op == "while" for o in program.operations):
        yield "  the numbers of trips of `while` are assumed"
    if costs is None:
        yield "cost: the certificate has no cost graph"
        return
    above = costs.seconds - np.array([costs.bound, costs.claimed_bound])
    proved, claimed = 100 * np.maximum(0.0, above) / (costs.seconds or 1.0)
    yield f"modelled seconds: {costs.seconds:.6g}, taken on trust"
    yield f"  the dual proves that no states of the cost graph take less than {costs.bound:.6g}:"
    yield f"  the plan is within {proved:.4f} % of the cheapest; sbp claims {claimed:.4f} %"
    if costs.repeated and not costs.free:
        yield "  among plans that run each conversion, also those of values that are computed again"


def listed(program):
    """The program, one line for each operation."""
    for o in program.operations:
        ins = ", ".join("constant" if isinstance(x, dict) else f"%{x}" for x in o.ins)
        outs = ", ".join(f"%{v}: {' '.join(map(str, program.aval(v)))}" for v in o.outs)
        yield f"{o.number:5} {outs} = {o.op}({ins})  # {o.line}"


def main(arguments):
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("certificate")
    parser.add_argument("--program", metavar="OTHER", help="a certificate of the same program")
    parser.add_argument("--list", action="store_true", help="also list the program")
    parser.add_argument("--allow-unchecked", action="store_true", help="status 0 in place of 3")
    given = parser.parse_args(arguments)
    try:
        certificate = read(given.certificate)
        program, plan, costs = certify(certificate)
        if given.program is not None:
            compare(program, certify(read(given.program))[0])
    except Wrong as wrong:
        print(f"rejected: {' '.join(str(wrong).split())}")
        return 1
    print("\n".join([*report(program, plan, costs, certificate)]))
    if given.list:
        print("\n".join(listed(program)))
    is_whole = not plan.unchecked or given.allow_unchecked
    print("accepted" if is_whole else "accepted, but for what is outside the tables")
    return 0 if is_whole else 3


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
