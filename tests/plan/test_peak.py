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


def temporaries(fn, *avals, types):
    """Units that a plan needs beside its arguments and results."""
    plan = sbp.jit(fn, MESH, in_types=types).plan(*avals)

    def held(registers):
        total = 0
        for register in registers:
            aval = plan.program.graph.avals[register.value]
            total += aval.size * aval.dtype.itemsize / (4 if any(register.codes) else 1)
        return total

    block = plan.program.block
    known = held(block.inputs) + held(block.outputs)
    return (plan.cost.peak_memory_bytes - known) / (1 + GAPS) / UNIT


X = f32(ROWS, COLUMNS)
SQUARE = f32(COLUMNS, COLUMNS)


def cast_late(x):
    y = lax.sort(x)
    s = jnp.sin(y).astype(jnp.bfloat16)
    z = lax.sort(x * 2)
    return jnp.sum(s + z, 0)


def softmax(x, w):
    scores = x @ w
    top = jnp.exp(scores - lax.stop_gradient(scores).max(-1, keepdims=True))
    weights = top / top.sum(-1, keepdims=True)
    return weights @ w, weights @ (w + 1)


def picked(x, w, labels):
    logits = x @ w
    return -jnp.mean(jnp.take_along_axis(jax.nn.log_softmax(logits), labels[:, None], -1))


def normalized(x, w):
    y = (x @ w).astype(jnp.float32)
    return (y - y.mean(-1, keepdims=True)) @ w.astype(jnp.float32)


def padded_sum(x, w):
    y = x[:, 256:]
    return lax.pad(jnp.exp(y) + jnp.exp(-y), 0.0, ((0, 0, 0), (256, 0, 0))) @ w


def scattered(x, places):
    return jnp.sum(jnp.zeros_like(x).at[places].add(jnp.sin(x)).sort(), 0)


LABELS = jax.ShapeDtypeStruct((ROWS,), jnp.int32)
HALF = [jax.ShapeDtypeStruct(a.shape, jnp.bfloat16) for a in (X, SQUARE)]
KEY = jax.eval_shape(lambda: jax.random.key(0))
WHOLE = 4  # the whole array on each device
SMALL = ROWS * 4 / 4 / UNIT  # a number for each row

STORED = {
    "elementwise work": (lambda x: jnp.cos(jnp.sin(x) * 2) + x, (X,), "d:S(0)", 0, 0),
    # The cast sine of `y` is computed in the sum. Until then `y` is stored, at twice the bytes,
    # beside the operand and the result of the second sort, which works on copies of both.
    "an operand of late work": (cast_late, (X,), "d:S(0)", 3 + 2, 3 + 2),
    # The cast is stored, of half the bytes; the sort works on two copies of it.
    "a product with its reader": (
        lambda x, w: lax.sort((x @ w).astype(jnp.bfloat16)),
        (X, SQUARE),
        ("d:S(0)", "B"),
        0.5 + 2 * 0.5,
        0.5 + 2 * 0.5,
    ),
    "a product that is sliced": (
        lambda x, w: sbp.split(sbp.replicate(jnp.tanh(x @ w), "d"), 0, "d") @ w,
        (X, SQUARE),
        "B",
        WHOLE,
        WHOLE,
    ),
    # The scores and the quotient, the largest value of each row and the sum; no array for the
    # exponentials.
    "an exponential and a quotient": (softmax, (X, SQUARE), ("d:S(0)", "B"), 1, 2 + 2 * SMALL),
    # The gradient of picking one logit of each row adds one number to each row of zeros. XLA
    # compares the position with the label inside of the product that reads it.
    "the gradient of a pick": (
        jax.grad(picked),
        (X, f32(COLUMNS, 4 * COLUMNS), LABELS),
        ("d:S(0)", "B", "d:S(0)"),
        4,
        1.5 * 4,
    ),
    # Many rows go to each place: zeros are stored, and added to in place.
    "a scatter": (scattered, (X, LABELS), "B", 0, 2.5 * WHOLE),
    # The carry, which the loop takes over, and inside of it a sort with its two copies.
    "a loop's carry": (
        lambda x: lax.sort(lax.fori_loop(0, 9, lambda _, c: lax.sort(c), lax.sort(x))),
        (X,),
        "d:S(0)",
        2 + 2,
        2 + 2,
    ),
    # Two arrays beside the argument; slices are not stored.
    "rolled arrays": (
        lambda x: jnp.roll(x, 1, 1) + jnp.roll(x, 2, 1) * x[:, :1],
        (X,),
        "d:S(0)",
        2,
        2,
    ),
    "a random mask": (
        lambda x, key: jnp.where(jax.random.bits(key, x.shape) > 7, jnp.sin(x), 0),
        (X, KEY),
        ("d:S(0)", "B"),
        0,
        0.1,
    ),
    # Two operations read the cast to float32; the product is stored in bfloat16.
    "a product that is cast": (normalized, HALF, ("d:S(0)", "B"), 0, 0.6),
    # The columns before the padding are stored; the operands of the sum are not.
    "a sum that is padded": (padded_sum, (X, SQUARE), ("d:S(0)", "B"), 0.5, 0.5),
}
"""Programs with the types of their arguments, and the least and the most units that they need."""


@pytest.mark.parametrize("name", STORED)
def test_temporaries(name):
    fn, avals, types, least, most = STORED[name]
    assert least - 1e-6 <= temporaries(fn, *avals, types=types) <= most + 1e-6


def test_a_donated_argument_and_its_result_count_once():
    f = sbp.jit(lambda x: x + 1, MESH, in_types="d:S(0)", donate_argnums=(0,))
    assert f.plan(X).cost.peak_memory_bytes == UNIT


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
