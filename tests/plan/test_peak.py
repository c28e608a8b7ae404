"""The planned peak counts what XLA stores: sums by hand, in units of one device's array."""

import math

import jax
import jax.numpy as jnp
import pytest
from jax import lax
from jax.sharding import AbstractMesh

import sbp
from sbp.plan.memory import GAPS

MESH = AbstractMesh((4,), ("d",))
ROWS, COLUMNS = 1024, 512
UNIT = ROWS * COLUMNS  # bytes of a float32 array (ROWS, COLUMNS) on one of four devices


def f32(*shape):
    return jax.ShapeDtypeStruct(shape, jnp.float32)


def temporaries(fn, *avals, types=None, donate=()):
    """Units that a plan needs beside its arguments and results."""
    f = sbp.jit(fn, MESH, in_types=types or "d:S(0)", donate_argnums=donate)
    plan = f.plan(*avals)

    def held(registers):
        total = 0
        for register in registers:
            aval = plan.program.graph.avals[register.value]
            total += aval.size * aval.dtype.itemsize / (4 if any(register.codes) else 1)
        return total

    block = plan.program.block
    known = held(block.inputs) + (0 if donate else held(block.outputs))
    return (plan.cost.peak_memory_bytes - known) / (1 + GAPS) / UNIT


X = f32(ROWS, COLUMNS)
SQUARE = f32(COLUMNS, COLUMNS)


def test_elementwise_work_stores_nothing():
    assert temporaries(lambda x: jnp.cos(jnp.sin(x) * 2) + x, X) == 0


def test_an_operand_stays_until_the_last_operation_that_computes_from_it():
    """The cast sine of `y` is computed in the sum. Until then `y` is stored, at twice the bytes,
    beside the operand and the result of the second sort, which works on copies of both."""

    def fn(x):
        y = lax.sort(x)
        s = jnp.sin(y).astype(jnp.bfloat16)
        z = lax.sort(x * 2)
        return jnp.sum(s + z, 0)

    assert temporaries(fn, X) == pytest.approx(3 + 2)


def test_a_product_continues_into_the_operation_that_reads_it():
    """What is stored is the cast, of half the bytes; the sort works on two copies of it."""

    def fn(x, w):
        return lax.sort((x @ w).astype(jnp.bfloat16))

    assert temporaries(fn, X, SQUARE, types=("d:S(0)", "B")) == pytest.approx(0.5 + 2 * 0.5)


def test_a_product_of_which_a_slice_is_read_is_stored_whole():
    def fn(x, w):
        h = sbp.replicate(jnp.tanh(x @ w), "d")
        return sbp.split(h, 0, "d") @ w

    assert temporaries(fn, X, SQUARE, types="B") == pytest.approx(4)


def softmax(x, w):
    scores = x @ w
    top = jnp.exp(scores - lax.stop_gradient(scores).max(-1, keepdims=True))
    weights = top / top.sum(-1, keepdims=True)
    return weights @ w, weights @ (w + 1)


def test_an_exponential_is_computed_again_and_a_quotient_is_stored():
    """The scores and the quotient; no array for the exponentials."""
    small = ROWS * 4 / 4 / UNIT  # the largest value of each row, and the sum
    found = temporaries(softmax, X, SQUARE, types=("d:S(0)", "B"))
    assert 1 <= found <= 2 + 2 * small


def picked(x, w, labels):
    logits = x @ w
    return -jnp.mean(jnp.take_along_axis(jax.nn.log_softmax(logits), labels[:, None], -1))


def test_the_gradient_of_a_pick_is_no_array():
    """The gradient of picking one logit of each row adds one number to each row of zeros. XLA
    compares the position with the label inside of the product that reads it."""
    labels = jax.ShapeDtypeStruct((ROWS,), jnp.int32)
    wide = f32(COLUMNS, 4 * COLUMNS)
    types = ("d:S(0)", "B", "d:S(0)")
    logits = 4
    found = temporaries(lambda *a: jax.grad(picked, 0)(*a), X, wide, labels, types=types)
    assert logits <= found < 1.5 * logits


def test_a_scatter_takes_the_buffer_of_its_operand():
    """Many rows go to each place: zeros are stored, and added to in place."""

    def fn(x, places):
        return jnp.sum(jnp.zeros_like(x).at[places].add(jnp.sin(x)).sort(), 0)

    places = jax.ShapeDtypeStruct((ROWS,), jnp.int32)
    whole = 4  # the whole array on each device
    found = temporaries(fn, X, places, types=("B", "B"))
    assert found < 2.5 * whole


def test_a_loop_takes_the_buffer_of_its_carry():
    def fn(x):
        y = lax.sort(x)
        return lax.sort(lax.fori_loop(0, 9, lambda _, c: lax.sort(c), y))

    # y, which the loop takes over, and inside of it the result of a sort with its two copies
    assert temporaries(fn, X, types=("d:S(0)",)) == pytest.approx(2 + 2)


def test_rolled_arrays_are_stored():
    """Two of them, beside the argument; slices are not."""

    def fn(x):
        return jnp.roll(x, 1, 1) + jnp.roll(x, 2, 1) * x[:, :1]

    assert temporaries(fn, X) == pytest.approx(2)


def test_random_masks_are_computed_again():
    def fn(x, key):
        mask = jax.random.bits(key, x.shape) > 7
        return jnp.where(mask, jnp.sin(x), 0)

    key = jax.eval_shape(lambda: jax.random.key(0))
    assert temporaries(fn, X, key, types=("d:S(0)", "B")) < 0.1


def test_a_product_is_stored_in_its_own_dtype():
    """Two operations read the cast to float32; the product is stored in bfloat16."""

    def fn(x, w):
        y = (x @ w).astype(jnp.float32)
        return (y - y.mean(-1, keepdims=True)) @ w.astype(jnp.float32)

    bf16 = jnp.bfloat16
    avals = jax.ShapeDtypeStruct(X.shape, bf16), jax.ShapeDtypeStruct(SQUARE.shape, bf16)
    assert temporaries(fn, *avals, types=("d:S(0)", "B")) < 0.6


def test_a_donated_argument_and_its_result_count_once():
    f = sbp.jit(lambda x: x + 1, MESH, in_types="d:S(0)", donate_argnums=(0,))
    assert f.plan(X).cost.peak_memory_bytes == UNIT


def test_a_sum_that_is_padded_is_stored_and_what_is_added_up_is_not():
    def fn(x, w):
        y = x[:, 256:]
        return lax.pad(jnp.exp(y) + jnp.exp(-y), 0.0, ((0, 0, 0), (256, 0, 0))) @ w

    found = temporaries(fn, X, SQUARE, types=("d:S(0)", "B"))
    assert found == pytest.approx(0.5)  # the columns before the padding


def test_lines_that_are_added_up_fill_tiles():
    """Lines of 32 elements take those of 128; in groups of 6, tiles of 8, and a matrix beside.
    Sums of whole lines, and programs for CPU, need their bytes only."""

    def fn(x, places):
        return jnp.zeros((256, x.shape[-1])).at[places].add(jnp.sin(x))

    def peak(*shape, **options):
        places = jax.ShapeDtypeStruct(shape[:-1], jnp.int32)
        f = sbp.jit(fn, MESH, in_types="B", out_types="B", **options)
        cost = f.plan(f32(*shape), places).cost
        known = 4 * (math.prod(shape) + math.prod(shape[:-1]) + 256 * shape[-1])
        return (cost.peak_memory_bytes - known) / (1 + GAPS) / 4

    small = 50_000  # the sums and the indices
    assert peak(4096, 32) == pytest.approx(4096 * 128, abs=small)
    assert peak(512, 6, 32) == pytest.approx(512 * (8 + 6) * 128, abs=small)
    assert peak(512, 6, 128) == pytest.approx(512 * (8 + 6) * 128, abs=small)
    assert peak(512, 8, 128) == pytest.approx(512 * 8 * 128, abs=small)
    assert peak(4096, 32, hardware="cpu") == pytest.approx(4096 * 32, abs=small)
