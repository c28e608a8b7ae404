"""Every row of every rule holds on the samples, and every kernel occurs in one."""

from __future__ import annotations

import zlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from samples import SAMPLES, equation, equations, f, on, primitives, rows, skip_where_jax_lacks

from sbp.signatures import Row, all_b, kernel_named, known_kernels, known_primitives
from sbp.signatures.laws.oracle import Oracle
from sbp.signatures.laws.parts import parts
from sbp.signatures.rule import ROUNDED_PARTS
from sbp.types import B, S
from tests.slices import sliced

pytestmark = pytest.mark.laws


def test_every_rule_has_samples_and_every_sample_a_rule():
    assert sorted(SAMPLES) == sorted(known_primitives())


@pytest.mark.parametrize("name", sorted(SAMPLES))
def test_rows_hold(name: str):
    skip_where_jax_lacks(name)
    rng = np.random.default_rng(zlib.crc32(name.encode()))
    for eqn in equations(name, SAMPLES[name]):
        oracle = Oracle(eqn.op, eqn.primitive, eqn.args)
        for n in sliced((2, 3, 4), 1 / 3, seed=int(rng.integers(99))):
            op = on(eqn, n)
            found = rows(eqn, n)
            assert all_b(op) in found
            for row in found:
                if n > 2 and row == all_b(op):
                    continue  # the same call on the same values
                wrong = oracle.refute_row(row, n, rng)
                assert not wrong, f"{name} {op.params}\n{row} on {n} devices: {wrong}"


ALONG_A_SPLIT_DIM = [
    ("cumsum", lambda x: jnp.cumsum(x), (f(6),)),
    ("cummax", lambda x: lax.cummax(x), (f(6),)),
    ("sort", lambda x: lax.sort(x), (f(6),)),
    ("rev", lambda x: lax.rev(x, (0,)), (f(6),)),
    ("concatenate", lambda x, y: jnp.concatenate([x, y]), (f(6), f(6, seed=1))),
]


@pytest.mark.parametrize(
    ("name", "fn", "args"), ALONG_A_SPLIT_DIM, ids=[c[0] for c in ALONG_A_SPLIT_DIM]
)
def test_neighbours_are_what_makes_an_order_along_a_split_dim_right(name, fn, args):
    """6, 18: the primitive itself on the shards is wrong, the kernel that its row names is
    right."""
    eqn = equation(name, fn, args)
    (row,) = [r for r in rows(eqn, 2) if set(r.ins) == {S(0)}]
    assert kernel_named(row.kernel).communicates
    rng = np.random.default_rng(0)
    assert not Oracle(eqn.op, eqn.primitive, eqn.args).refute_row(row, 2, rng)
    shards = zip(*(parts(x, S(0), 2, rng) for x in eqn.args), strict=True)
    alone = np.concatenate([np.asarray(fn(*shard)) for shard in shards])
    assert not np.array_equal(alone, np.asarray(fn(*args)))


def test_every_kernel_is_in_a_row_of_a_sample():
    """Each kernel occurs in a row of some sample, evenly and unevenly split, on 2, 3 and 4
    devices; but that of rows which the user asks for with `reduce_dtype`."""
    seen: dict[str, set[int]] = {}
    for name in set(SAMPLES) & set(primitives()):
        for eqn in equations(name, SAMPLES[name]):
            for n in (2, 3, 4):
                for row in rows(eqn, n):
                    seen.setdefault(row.kernel, set()).add(n)
    assert seen.keys() == {k.name for k in known_kernels()} - {ROUNDED_PARTS.name}
    assert all({2, 4} <= where for where in seen.values()), seen


def test_a_print_runs_once():
    seen = []
    eqn = equation(
        "debug_callback", lambda x: jax.debug.callback(lambda a: seen.append(1), x), (f(5),)
    )
    oracle = Oracle(eqn.op, eqn.primitive, eqn.args)
    jax.effects_barrier()
    seen.clear()
    assert not oracle.refute_row(Row((B,), ()), 4, np.random.default_rng(0))
    jax.effects_barrier()
    assert seen == [1]
