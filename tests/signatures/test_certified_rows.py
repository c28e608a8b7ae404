"""The tables of `tools/certify.py` against the primitives: no row that it accepts is wrong, and it
accepts the rows of sbp whose kernel is the primitive itself."""

import itertools
import math

import numpy as np
import pytest
from samples import SAMPLES, equations, primitives, rows

from sbp.infer.space import encode
from sbp.plan.certificate import atoms
from sbp.plan.saved import plain
from sbp.signatures import Row
from sbp.signatures.laws.oracle import Oracle
from sbp.types import B, P, S
from tests.plan.test_certificate import certify
from tests.slices import sliced

pytestmark = pytest.mark.laws

KNOWN = [name for name in sorted(certify.TABLE) if name in SAMPLES]
LARGE = 100_000  # more rows are not enumerated


def call_of(eqn, n):
    """The equation as the checker sees it on one mesh axis."""
    ins = [[str(a.dtype), list(a.shape)] for a in (*eqn.op.ins, *eqn.op.outs)]
    values = range(len(ins))
    operation = certify.Operation(
        {
            "op": eqn.op.name,
            "params": {name: plain(value) for name, value in eqn.op.params.items()},
            "in": values[: len(eqn.op.ins)],
            "out": values[len(eqn.op.ins) :],
        },
        0,
        "",
    )
    program = type("Avals", (), {"aval": lambda _, v: ins[v]})()
    return certify.Call(operation, program, [[] for _ in values], [], n)


def accepts(call, ins, outs):
    """Whether the checker accepts a row; None where it has no table for it."""
    try:
        return certify.row_fault(call, list(ins), list(outs)) is None
    except certify.Outside:
        return None


@pytest.mark.parametrize("name", sliced(KNOWN, 0.15))
def test_rows(name: str):
    if name not in primitives():
        pytest.skip("this JAX has no such primitive")
    for eqn, n in itertools.product(equations(name, SAMPLES[name]), (2, 4)):
        call, known = call_of(eqn, n), set()
        for row in rows(eqn, n):
            ins, outs = (tuple(atoms(tuple(map(encode, side)))) for side in (row.ins, row.outs))
            known.add((ins, outs))
            if row.kernel == "local":
                assert accepts(call, ins, outs) is not False, (name, call.whole, row)
        choices = [
            ["B", *range(len(shape)), *certify.monoids_of(dtype)]
            for shape, dtype in zip(call.whole, call.dtypes, strict=True)
        ]
        if math.prod(map(len, choices)) > LARGE:
            continue
        oracle = Oracle(eqn.op, eqn.primitive, eqn.args)
        for found in itertools.product(*choices):
            sides = found[: len(call.ins)], found[len(call.ins) :]
            if {*found} == {"B"} or sides in known or not accepts(call, *sides):
                continue
            atom = lambda a: B if a == "B" else S(a) if isinstance(a, int) else P(a)
            row = Row(tuple(map(atom, sides[0])), tuple(map(atom, sides[1])))
            for seed in range(3):
                assert not oracle.refute_row(row, n, np.random.default_rng(seed)), (
                    name,
                    call.whole,
                    sides,
                )
