"""Parts stand for their value, and are adversarial: wrong sums, orders and padding show on them."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest
from samples import b, c, equation, f, i, rows, u

from sbp.signatures import Row
from sbp.signatures.laws.oracle import Oracle
from sbp.signatures.laws.parts import combine, parts
from sbp.types import MONOIDS, Atom, B, P, S

PMAX, PMIN = P("max"), P("min")


ATOMS = [B, S(0), S(1), *(P(m) for m in MONOIDS)]


@pytest.mark.parametrize("n", [1, 2, 3, 4, 7])
@pytest.mark.parametrize("atom", ATOMS, ids=repr)
def test_parts_stand_for_their_value(atom: Atom, n: int):
    rng = np.random.default_rng(n)
    values = (
        [i(5, 3), u(5, 3), b(5, 3)]
        if getattr(atom, "monoid", "") in ("and", "or")
        else [f(5, 3, low=1), i(5, 3), c(5, 3)]
    )
    for x in values:
        if atom in (PMAX, PMIN) and np.iscomplexobj(x):
            continue
        split = parts(x, atom, n, rng)
        assert len(split) == n and all(p.dtype == x.dtype for p in split)
        for reader in range(n):
            np.testing.assert_allclose(combine(split, atom, x.shape, reader), x, atol=1e-4)


def test_parts_are_adversarial():
    """Not halves, not all of one sign, not within the range of the value; padding is not zero."""
    x = f(40, 3)
    split = parts(x, P, 3, np.random.default_rng(0))
    assert (
        any((p == 0).any() for p in split)
        and max(np.abs(p).max() for p in split) > 2 * np.abs(x).max()
    )
    assert (np.sign(split[0]) * np.sign(split[1]) < 0).any()
    assert np.isnan(parts(x, S(0), 7, np.random.default_rng(1))[-1]).any()
    assert np.isneginf(parts(x, PMAX, 2, np.random.default_rng(0))[0]).any()


def test_masking_is_what_makes_uneven_shards_right():
    """The primitive itself on padded shards is refuted: the oracle sees padding."""
    eqn = equation("reduce_sum", lambda x: jnp.sum(x, 0), (f(5, 3),))
    row = Row((S(0),), (P,))
    assert row in rows(eqn, 2) and not Oracle(eqn.op, eqn.primitive, eqn.args).refute_row(
        row, 2, np.random.default_rng(0)
    )
    split = parts(eqn.args[0], S(0), 2, np.random.default_rng(0))
    assert not np.allclose(sum(p.sum(0) for p in split), eqn.args[0].sum(0), equal_nan=False)
