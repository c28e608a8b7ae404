"""Every row of every rule holds on the samples, and every kernel occurs in one."""

import zlib

import numpy as np
import pytest
from samples import SAMPLES, equations, on, primitives, rows, skip_where_jax_lacks

from sbp.signatures import all_b, known_kernels, known_primitives
from sbp.signatures.laws.oracle import Oracle
from sbp.signatures.rule import ROUNDED_PARTS
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
