"""Words of the Philox stream equal those of `rng_bit_generator`."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from samples import equation, rows, u

from sbp.signatures.families.random import words
from sbp.signatures.laws.oracle import Oracle
from sbp.types import B, S

LAST = 2**32 - 1


@pytest.mark.parametrize(
    "state", [(1, 2, 3, 4), (5, 6, LAST, 0), (LAST, 6, LAST, LAST), (LAST, LAST, LAST, LAST)]
)
@pytest.mark.parametrize(("start", "count"), [(0, 40), (7, 21), (29, 1)])
def test_words_from_any_position(state, start, count):
    """Positions inside of a block, and counters that overflow into the key's half."""
    state = jnp.array(state, jnp.uint32)
    whole = np.asarray(lax.rng_bit_generator(state, (8, 5))[1]).ravel()
    found = words(state, jnp.uint32(start), count)
    np.testing.assert_array_equal(found, whole[start : start + count])


def test_words_of_64_bits():
    with jax.enable_x64(True):
        f = jax.jit(lambda k: lax.rng_bit_generator(k, (9,), jnp.uint64)[1])
        state = jnp.array([1, 2, 3, 4], jnp.uint32)
        found = np.asarray(words(state, jnp.uint32(0), 18)).view(np.uint64)
        np.testing.assert_array_equal(found, f(state))


def test_pieces_where_the_generator_is_another(monkeypatch):
    """On platforms other than CPU and GPU, a piece is cut from the whole draw."""
    monkeypatch.setattr(lax, "platform_dependent", lambda *args, default, **_: default(*args))
    eqn = equation("rng_bit_generator", lambda k: lax.rng_bit_generator(k, (7, 3)), (u(4),))
    oracle = Oracle(eqn.op, eqn.primitive, eqn.args)
    for n in (2, 4):
        (row,) = [r for r in rows(eqn, n) if r.outs == (B, S(0))]
        assert not oracle.refute_row(row, n, np.random.default_rng(0))


def test_another_algorithm_does_not_split():
    def draw(k):
        return lax.rng_bit_generator(k, (8,), algorithm=lax.RandomAlgorithm.RNG_THREE_FRY)

    assert len(rows(equation("rng_bit_generator", draw, (u(4),)), 2)) == 1
