"""Rules that are run on symbolic sizes note every fact that they ask for: wherever the same facts
hold, they give the same rows."""

import zlib

import jax
import numpy as np
import pytest
from jax.export import symbolic_shape
from samples import SAMPLES, equations, primitives

from sbp.signatures import Op, rule_for
from sbp.sizes.scope import Size, holds_at


def rows(op, shapes, n):
    avals = [
        jax.ShapeDtypeStruct(tuple(shape), a.dtype)
        for shape, a in zip(shapes, (*op.ins, *op.outs), strict=True)
    ]
    found = rule_for(op.name)
    assert found is not None
    return tuple(
        found.rows(
            Op(op.name, op.params, tuple(avals[: len(op.ins)]), tuple(avals[len(op.ins) :]), n)
        )
    )


def shaped(op, sizes):
    rest = iter(sizes)
    return [[next(rest) for _ in a.shape] for a in (*op.ins, *op.outs)]


def beyond(values, rng):
    """Sizes near the given ones; equal ones stay equal, as the program that an equation stands in
    makes them."""
    changed = {
        v: max(0, v * int(rng.choice((1, 1, 2, 4))) + int(rng.choice((-1, 0, 0, 1))))
        for v in sorted(set(values))
    }
    return (
        [changed[v] for v in values]
        if rng.random() < 0.7
        else [v if rng.random() < 0.6 else changed[v] for v in values]
    )


def wants_a_number(size):
    raise AssertionError(f"a rule wants to know {size!r} itself, which holds at one size alone")


@pytest.mark.parametrize("name", sorted(set(SAMPLES) & set(primitives())))
def test_facts_decide_rows(name, monkeypatch):
    monkeypatch.setattr(Size, "_number", wants_a_number)
    rng = np.random.default_rng(zlib.crc32(name.encode()))
    for eqn in equations(name, SAMPLES[name]):
        op = eqn.op
        values = [int(s) for a in (*op.ins, *op.outs) for s in a.shape]
        if not values:
            continue
        names = [f"d{k}" for k in range(len(values))]
        symbols = symbolic_shape(", ".join(names))
        for n in (2, 4):
            noted = {}
            found = rows(
                op, shaped(op, [Size(s, v, noted) for s, v in zip(symbols, values, strict=True)]), n
            )
            assert found == rows(op, shaped(op, values), n)
            for other in [beyond(values, rng) for _ in range(20)]:
                if holds_at(tuple(noted), dict(zip(names, other, strict=True))):
                    assert found == rows(op, shaped(op, other), n), (values, other, noted)
