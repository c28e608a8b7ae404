"""The counters of threefry draws with more than 2**32 elements. Each test makes one shard."""

import jax
import numpy as np
import pytest
from jax.extend.random import threefry_prng_impl  # noqa: TID251  (JAX's own counters)

import sbp
from sbp.signatures.families.random import counters


def words_of(shape, whole, offsets):
    """The counters as Python integers."""
    index = 0
    for size, place, offset in zip(whole, np.indices(shape, object), offsets, strict=True):
        index = index * size + place + offset
    return index // 2**32, index % 2**32


@pytest.mark.parametrize(
    ("shape", "whole", "offsets"),
    [
        # shape of the shard, of the whole array, and where the shard starts
        ((3, 5), (8, 2**31), (5, 2**31 - 5)),
        ((3, 5), (2**31 - 1, 2**31 - 1), (2**31 - 4, 2**31 - 6)),
        ((2, 3, 2, 5), (2048, 16, 2**17, 2**16), (2046, 13, 2**17 - 2, 2**16 - 5)),
        ((2, 3, 2), (2**20, 2**20, 2**20), (2**20 - 2, 2**20 - 4, 2**20 - 2)),
        ((2, 4), (2**16, 2**16), (2**16 - 2, 2**16 - 4)),
        ((2, 4), (2**16, 2**16 + 1), (2**16 - 2, 2**16 - 3)),
        ((2, 3), (7, 11), (3, 8)),
        ((4,), (2**31 + 10,), (2**31 + 6,)),
    ],
)
def test_a_shard_counts_as_python_integers_do(shape, whole, offsets):
    want = np.array(words_of(shape, whole, offsets)).astype(np.uint32)
    np.testing.assert_array_equal(counters(shape, whole, offsets), want)


def test_a_shard_counts_as_jax_does():
    """JAX's counters of the whole array, of which XLA makes the asked ones alone."""
    whole, offsets, shape = (6, 2**17, 2**16), (4, 2**17 - 3, 100), (2, 3, 5)
    part = tuple(slice(o, o + n) for o, n in zip(offsets, shape, strict=True))
    draw = jax.make_jaxpr(lambda words: threefry_prng_impl.random_bits(words, 32, (2, 3)))
    (count,) = (
        equation.primitive
        for equation in draw(np.zeros(2, np.uint32)).eqns
        if equation.primitive.name == "iota_2x32_shape"
    )
    want = jax.jit(lambda: [w[part] for w in count.bind(shape=whole)])()
    assert int(want[0].max()) == 11  # the whole array has 12 * 2**32 elements
    np.testing.assert_array_equal(counters(shape, whole, offsets), want)


def test_dropout_of_a_large_model_is_drawn_where_it_is_used():
    """2**33 elements: split as the activations are, with nothing sent."""
    step = lambda key, x: x * jax.random.bernoulli(key, 0.9, x.shape)
    mesh = jax.sharding.AbstractMesh((2048,), ("d",))
    plan = sbp.jit(step, mesh, in_types=(None, "d:S(0)"), hardware="tpu-v3").plan(
        jax.eval_shape(lambda: jax.random.key(0)),
        jax.ShapeDtypeStruct((2048, 2**12, 2**10), np.float32),
    )
    assert plan.cost.bytes_per_device == 0 and plan.cost.peak_memory_bytes < 2**27
