"""The blocks of dims that do not divide, and arrays padded to them."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from sbp.run.padding import Padding
from sbp.types import NdSbp, Split


def blocks_of(size: int, counts: tuple[int, ...]) -> list[list[int]]:
    """The elements of each block, dealt out one by one by the formula of nested splits."""
    found: dict[tuple[int, ...], list[int]] = {
        i: [] for i in itertools.product(*map(range, counts))
    }
    for k in range(size):
        where, rest, length = [], k, size
        for n in counts:
            length = -(-length // n)
            where.append(rest // length)
            rest %= length
        found[tuple(where)].append(k)
    return list(found.values())


@pytest.mark.parametrize("counts", [(), (2,), (8,), (2, 4), (4, 2), (2, 2, 2)], ids=str)
def test_blocks_are_those_of_nested_splits(counts):
    for size in (1, 2, 3, 5, 7, 8, 13, 15, 16):
        padding = Padding((2, size), ((), counts))
        blocks = blocks_of(size, counts)
        assert [list(range(*r)) for r in padding.ranges(1)] == blocks
        length = max(map(len, blocks))
        x = np.arange(1, 2 * size + 1).reshape(2, size)
        want = [np.pad(x[:, b], ((0, 0), (0, length - len(b)))) for b in blocks]
        padded = padding.pad(x)
        assert padded.shape == padding.padded_shape
        np.testing.assert_array_equal(padded, np.concatenate(want, 1))
        np.testing.assert_array_equal(padding.cut(np.where(padded, padded, -1)), x)


@pytest.mark.parametrize("dtype", [bool, np.int8, jnp.bfloat16, np.complex64])
def test_arrays_of_jax_and_their_dtypes(dtype):
    t = NdSbp({"a": Split(1), "b": Split(0), "c": Split(1)})
    padding = Padding.of((3, 5), t, (("a", 2), ("b", 4), ("c", 3)))
    x = (jnp.arange(15).reshape(3, 5) % 2).astype(dtype)
    padded = padding.pad(x)
    assert padded.shape == padding.padded_shape == (4, 6) and padded.dtype == x.dtype
    np.testing.assert_array_equal(padding.cut(padded), x)


def test_keys_are_padded_by_their_words():
    keys = jax.random.split(jax.random.key(1), 5)
    padding = Padding((5,), ((4,),))
    back = padding.cut(padding.pad(keys))
    assert back.dtype == keys.dtype
    np.testing.assert_array_equal(jax.random.key_data(back), jax.random.key_data(keys))
