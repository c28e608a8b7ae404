"""Lookups by rows, counts of a shard, and the blocks and positions of a device. Each class of
programs has several spellings and right versions."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import PartitionSpec as PS

from sbp.handwritten.compared import DIFFERS
from tests.shardmap.practice.case import devices
from tests.shardmap.programs.kinds import mapped, report_of
from tests.shardmap.programs.wrong.subtle import (
    NOT_TOLD,
    SQUARE as NUMBERS,
    STEP,
    W,
    X,
    Y,
    squared,
)

MESH = devices({"data": 4})
N = 4
LOGITS = jax.ShapeDtypeStruct((12, 10), jnp.float32)
LABELS = jax.ShapeDtypeStruct((12,), jnp.int32)
ROWS = jax.ShapeDtypeStruct((24, 6), jnp.float32)
TARGET = jax.ShapeDtypeStruct((24, 8), jnp.float32)
SQUARE = jax.ShapeDtypeStruct((16, 16), jnp.float32)
SPLIT, WHOLE = PS("data"), PS()
PAIR = (SPLIT, SPLIT)
SUMMED, MISSING = [("wrong-reduction", "error")], [("missing-reduction", "error")]


def verdict(body, ins, outs, *args) -> list[tuple[str, str]]:
    found = report_of(body, ins, outs, *args, over=MESH).diagnostics
    return [(d.code, d.severity) for d in found if d.severity != "note"]


me = lambda: lax.axis_index("data")
summed = lambda f: lambda *args: lax.psum(f(*args), "data")
averaged = lambda f: lambda *args: lax.pmean(f(*args), "data")


# ---- lookups by rows ----------------------------------------------------------------------------

helper = jax.jit(lambda lg, rows, labels: lg[rows, labels])

LOOKUPS = {
    "indexed": lambda lg, y: lg[jnp.arange(len(y)), y],
    "helper": lambda lg, y: helper(lg, jnp.arange(lg.shape[0]), y),
    "vmap": lambda lg, y: jax.vmap(lambda row, i: row[i])(lg, y),
    "take_along_axis": lambda lg, y: jnp.take_along_axis(lg, y[:, None], 1)[:, 0],
    "one_hot": lambda lg, y: jnp.einsum("nc,nc->n", lg, jax.nn.one_hot(y, lg.shape[1])),
    "numpy_rows": lambda lg, y: lg.T[y, jnp.arange(len(y))],
    "row_by_row": lambda lg, y: lax.map(lambda a: a[0][a[1]], (lg, y)),
    "other_order": lambda lg, y: lg[lax.iota(jnp.int32, len(y)), y.astype(jnp.int32)],
}


@pytest.mark.parametrize("name", list(LOOKUPS))
def test_a_lookup_at_the_rows_of_a_shard_is_split(name):
    """sbp checks the reduction of the rows that the lookup finds, and the reduction of its
    gradient."""
    look, loss = LOOKUPS[name], lambda lg, y: LOOKUPS[name](lg, y).mean()
    assert verdict(look, PAIR, SPLIT, LOGITS, LABELS) == []
    assert verdict(averaged(loss), PAIR, WHOLE, LOGITS, LABELS) == []
    assert verdict(summed(loss), PAIR, WHOLE, LOGITS, LABELS) == SUMMED
    gradient = jax.grad(lambda w, x, y: loss(x @ w, y))
    args = jax.ShapeDtypeStruct((10, 10), jnp.float32), LOGITS, LABELS
    assert verdict(averaged(gradient), (WHOLE, *PAIR), WHOLE, *args) == []
    assert verdict(lambda *a: gradient(*a), (WHOLE, *PAIR), WHOLE, *args) == MISSING


def test_the_same_labels_for_other_rows():
    """The labels index gathered columns, but count from zero on every device."""

    def at(labels):
        def body(x):
            logits = x @ lax.all_gather(x, "data", tiled=True).T
            mine = jnp.arange(len(x))
            return lax.pmean(logits[mine, labels(mine)].mean(), "data")

        return body

    assert verdict(at(lambda mine: mine), (SPLIT,), WHOLE, ROWS) == [("wrong-placement", "error")]
    assert verdict(at(lambda mine: mine + me() * len(mine)), (SPLIT,), WHOLE, ROWS) == []


# ---- counts of a shard --------------------------------------------------------------------------

by_batch = jax.jit(lambda d, n: d / n, static_argnums=1)

COUNTED = {
    "before": lambda x, d: x.T @ (d / d.shape[0]),
    "after": lambda x, d: x.T @ d / x.shape[0],
    "einsum": lambda x, d: jnp.einsum("ni,nj->ij", x, d) / len(x),
    "contraction": lambda x, d: lax.dot_general(x, d, (((0,), (0,)), ((), ()))) / x.shape[0],
    "helper": lambda x, d: x.T @ by_batch(d, d.shape[0]),
    "elements": lambda x, d: x.T @ (d / d.size),
    "vmap": lambda x, d: jax.vmap(lambda c: x.T @ c, 1, 1)(d) / len(x),
}


@pytest.mark.parametrize("name", list(COUNTED))
def test_a_division_by_the_count_of_a_shard(name):
    product = COUNTED[name]
    bodies = averaged(product), summed(product), lambda x, d: lax.psum(product(x, d), "data") / N
    assert [verdict(b, PAIR, WHOLE, ROWS, TARGET) for b in bodies] == [[], SUMMED, []]


def test_a_scale_that_equals_the_count_is_no_count():
    """Six rows a device, scaled by six before a softmax along another dim."""
    body = lambda x: lax.pmean(jax.nn.softmax(x / 6.0).sum(1).mean(), "data")
    assert verdict(body, (SPLIT,), WHOLE, ROWS) == []
    assert verdict(lambda x: x / 6.0, (SPLIT,), SPLIT, ROWS) == []


def test_a_mean_over_devices_and_microbatches():
    def total(x):
        step = lambda a, rows: (a + rows.mean(0), None)
        return lax.scan(step, jnp.zeros(x.shape[1]), x.reshape(3, -1, x.shape[1]))[0]

    for divisor in (3 * N, float(3 * N)):
        body = lambda x, d=divisor: lax.psum(total(x), "data") / d
        # 12 may be 3 times the devices
        assert verdict(body, (SPLIT,), WHOLE, ROWS) == [("wrong-reduction", "warning")]
    assert verdict(lambda x: lax.psum(total(x), "data") / 3, (SPLIT,), WHOLE, ROWS) == SUMMED


# ---- blocks and positions of a device's own -----------------------------------------------------

OWN_BLOCKS = {
    "slice": lambda g: lax.dynamic_slice_in_dim(g, me() * 2, 2),
    "slice_of_both": lambda g: lax.dynamic_slice(g, (2 * me(), 0), (2, g.shape[1])),
    "after_scaling": lambda g: lax.dynamic_slice_in_dim(0.5 * g, me() * 2, 2),
}


@pytest.mark.parametrize("name", list(OWN_BLOCKS))
def test_a_block_of_a_partial_value(name):
    """Each device takes its own block. A reduce-scatter would sum the blocks."""
    cut = OWN_BLOCKS[name]
    bodies = (
        lambda x, d: cut(x.T @ d),
        lambda x, d: cut(lax.psum(x.T @ d, "data")),
        lambda x, d: lax.psum_scatter(x.T @ d, "data", tiled=True),
    )
    assert [verdict(b, PAIR, SPLIT, TARGET, TARGET) for b in bodies] == [MISSING, [], []]


PLACED, CROSSED = [("wrong-placement", "error")], [("local-result", "error")]
ONE_BLOCK = [(DIFFERS, "warning")]
"""A slice may be meant for one device."""
LOCAL = {
    "positions": (lambda x: x + jnp.arange(x.shape[0])[:, None], PLACED),
    "mask": (lambda x: jnp.where(jnp.arange(x.shape[0])[:, None] < 3, x, 0.0), PLACED),
    "helper": (lambda x: jax.jit(jnp.tril)(x), PLACED),
    "one_hot": (lambda x: x * jax.nn.one_hot(2, x.shape[0])[:, None], PLACED),
    "vmap": (lambda x: jax.vmap(lambda i, r: r * i)(jnp.arange(x.shape[0]), x), PLACED),
    "block": (lambda x: x * lax.all_gather(x, "data", tiled=True)[: x.shape[0]], ONE_BLOCK),
    "block_at": (
        lambda x: (
            x + lax.dynamic_slice_in_dim(lax.all_gather(x, "data", tiled=True), 0, x.shape[0])
        ),
        PLACED,
    ),
    "scaled_block": (
        lambda x: x - 0.1 * lax.all_gather(x, "data", tiled=True)[: x.shape[0]],
        ONE_BLOCK,
    ),
    "crossed": (lambda x: x @ jnp.swapaxes(x, 0, 1), CROSSED),
    "crossed_einsum": (lambda x: jnp.einsum("ik,jk->ij", x, x), CROSSED),
    "crossed_vmap": (lambda x: jax.vmap(lambda r: x @ r)(x), CROSSED),
}
MOVED = {
    "positions": lambda x: x + (me() * x.shape[0] + jnp.arange(x.shape[0]))[:, None],
    "mask": lambda x: jnp.where((me() * len(x) + jnp.arange(len(x)))[:, None] < 3, x, 0.0),
    "block": lambda x: (
        x
        * lax.dynamic_slice_in_dim(
            lax.all_gather(x, "data", tiled=True), me() * x.shape[0], x.shape[0]
        )
    ),
    "crossed": lambda x: x @ lax.all_gather(x, "data", tiled=True).T,
    "columns": lambda x: x + jnp.arange(x.shape[1]),
}


@pytest.mark.parametrize(
    ("body", "found"),
    [*LOCAL.values(), *((body, []) for body in MOVED.values())],
    ids=[*LOCAL, *(f"of the shard: {name}" for name in MOVED)],
)
def test_what_does_not_belong_to_a_shard_is_found(body, found):
    assert verdict(body, (SPLIT,), SPLIT, SQUARE) == found


@pytest.mark.parametrize("name", ["positions", "mask"])
def test_the_error_says_where_the_own_shard_begins(name):
    (found,) = report_of(LOCAL[name][0], SPLIT, SPLIT, SQUARE, over=MESH).diagnostics
    assert found.primary is not None
    assert 'begins at lax.axis_index("data") times its length' in found.primary.text


# ---- lookups that are added up ------------------------------------------------------------------

UNMASKED = {
    "clip": lambda t, i: t[jnp.clip(i - me() * len(t), 0, len(t) - 1)],
    "take": lambda t, i: jnp.take(t, i - me() * len(t), 0, mode="clip"),
    "helper": lambda t, i: jax.jit(lambda t, k: t[k])(t, (i - me() * len(t)).clip(0, len(t) - 1)),
}


@pytest.mark.parametrize("name", list(UNMASKED))
def test_a_lookup_in_a_shard_is_masked_before_it_is_added_up(name):
    look, ins = UNMASKED[name], (SPLIT, WHOLE)
    added = lambda t, i: lax.psum(look(t, i), "data")
    assert verdict(added, ins, WHOLE, SQUARE, np.arange(12) % 16) == [(DIFFERS, "warning")]

    def masked(t, i):
        here = i - me() * len(t)
        mine = (here >= 0) & (here < len(t))
        return lax.psum(jnp.where(mine[:, None], look(t, i), 0.0), "data")

    assert verdict(masked, ins, WHOLE, SQUARE, LABELS) == []


# ---- shards used each for itself, or in another order --------------------------------------------

program = lambda body, ins, outs: mapped(body, ins, outs)(False)


def said(body, ins, outs, *args):
    """Codes and severities of what is said of a program."""
    return [(d.code, d.severity) for d in report_of(body, ins, outs, *args).diagnostics]


@pytest.mark.parametrize("name", list(NOT_TOLD))
def test_an_operation_on_each_shard_alone(name):
    body, reference, ins, outs, codes = NOT_TOLD[name]
    assert said(body, (ins,), outs, NUMBERS) == [(code, "error") for code in codes]
    got = np.asarray(jax.jit(program(body, (ins,), outs))(NUMBERS))
    assert not np.allclose(got, np.asarray(jax.jit(reference)(NUMBERS)))


def test_the_same_columns_against_different_rows():
    body = lambda x, w: lax.psum(x[:, : w.shape[0]] @ w, "model")

    def own(x, w):
        return lax.psum(
            lax.dynamic_slice_in_dim(x, lax.axis_index("model") * w.shape[0], w.shape[0], 1) @ w,
            "model",
        )

    ins = (PS("data"), PS("model"))
    assert [said(f, ins, PS("data"), X, W) for f in (body, own)] == [[(DIFFERS, "warning")], []]
    np.testing.assert_allclose(
        jax.jit(program(own, ins, PS("data")))(X, W),
        X @ W,
        rtol=1e-4,
        atol=1e-4,
    )
    assert not np.allclose(jax.jit(program(body, ins, PS("data")))(X, W), X @ W, atol=1e-2)


@pytest.mark.parametrize("number", [2.0, 16, 32])
def test_a_number_that_is_written_down_is_that_number(number):
    """Half of a sum of squares, on two devices."""
    assert said(lambda x: lax.psum((x * x).sum(), "data") / number, (PS("data"),), PS(), X) == []


def test_a_number_that_is_written_down_may_count_devices():
    assert said(lambda x: lax.psum(x.mean(), "model") / 4.0, (PS("model"),), PS(), X) == []
    twice = lambda x: lax.psum(x.sum(), "model") / lax.axis_size("model")
    (found,) = said(twice, (PS("model"),), PS(), X)
    assert found[0] == "wrong-reduction"


def test_a_gather_of_the_outer_axis_first():
    def inside_out(x):
        return lax.all_gather(lax.all_gather(x, "data", tiled=True), "model", tiled=True)

    in_order = lambda x: lax.all_gather(lax.all_gather(x, "model", tiled=True), "data", tiled=True)

    ins = (PS(("data", "model")),)
    assert [said(f, ins, PS(), X) for f in (inside_out, in_order)] == [
        [("local-result", "error")],
        [],
    ]
    np.testing.assert_array_equal(jax.jit(program(in_order, ins, PS()))(X), X)
    assert not np.array_equal(jax.jit(program(inside_out, ins, PS()))(X), X)


def mean_divided_again(w, x, y):
    return lax.pmean(jax.grad(squared)(w, x, y), "data") / lax.axis_size("data")


@pytest.mark.parametrize(
    "loop",
    [
        lambda w, x, y: lax.fori_loop(0, 3, lambda i, w: w - mean_divided_again(w, x, y), w),
        lambda w, x, y: lax.scan(
            lambda c, _: (c + mean_divided_again(w, x, y), None), w, None, length=3
        )[0],
        lambda w, x, y: lax.scan(
            lambda c, _: (mean_divided_again(w, x, y), None), w, None, length=3
        )[0],
    ],
)
def test_a_fault_in_a_loop(loop):
    ((code, _),) = said(loop, STEP, PS(), W, X, Y)
    assert code == "wrong-reduction"
