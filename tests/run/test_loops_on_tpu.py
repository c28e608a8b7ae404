"""Plans for TPU run on simulated devices. The tests cover loops and the casts in them, lookups in
cast tables, stacks of loops, layouts of arrays that meet arguments, and values that a plan computes
before a loop.
"""

import dataclasses
import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import sbp
from sbp.plan.ir import Loop
from sbp.plan.memory import DeviceMemory
from sbp.run.interpret import computed_before, meets_arguments, stacks_of_matrices
from tests.same import assert_close, assert_same_results

BF16 = jnp.bfloat16


mesh = lambda: jax.make_mesh((4,), ("d",), devices=jax.devices()[:4])


def on_tpu(fn, in_types):
    """The function with the plan for a TPU, which runs on the simulated devices."""
    return sbp.jit(fn, mesh(), in_types=in_types, hardware="tpu-v5e")


def same(fn, in_types, *args):
    with jax.numpy_dtype_promotion("standard"):
        expected, got = jax.jit(fn)(*args), on_tpu(fn, in_types)(*args)
    assert_same_results(expected, got, rtol=2e-2, atol=1e-6)


lowered = lambda plan: plan.lower().as_text()


@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize("length", [0, 1, 5])
@pytest.mark.parametrize("unroll", [1, 2])
def test_a_scan_has_its_carry_and_its_stacks(reverse, length, unroll):
    def fn(x, xs):
        def turn(c, x):
            i, c = c
            return (i + 1, c + x), {"sum": c, "index": i, "twice": 2 * x, "fixed": jnp.float32(3)}

        return lax.scan(turn, (0, x), xs, length=length, reverse=reverse, unroll=unroll)

    rng = np.random.default_rng(length)
    x, xs = rng.normal(size=8), rng.normal(size=(length, 8))
    same(fn, ("d:S(0)", "d:S(1)" if length else None), np.float32(x), np.float32(xs))


def without_slices_and_without_stacks(x):
    y, powers = lax.scan(lambda c, _: (c * x, c), x, length=4)
    z, none = lax.scan(lambda c, p: (c + p, None), y, powers)
    return y, powers, z, none


def in_scans(w, x):
    turn = lambda c, w: (jnp.tanh(c @ w), c.sum())
    y, sums = lax.scan(jax.checkpoint(lambda c, w: lax.scan(turn, c, w)), x, w)
    return jnp.sum(y**2) + jnp.sum(sums)


def of_keys(key):
    def turn(key, _):
        key, other = jax.random.split(key)
        return key, (other, jax.random.normal(other, (8,)))

    return lax.scan(turn, key, length=3)


NORMAL = np.random.default_rng(0).normal(size=(7, 8, 8)).astype(np.float32)


@pytest.mark.parametrize(
    ("fn", "types", "args"),
    [
        (without_slices_and_without_stacks, ("d:S(0)",), (np.arange(1.0, 9.0, dtype=np.float32),)),
        (
            jax.value_and_grad(in_scans),
            (None, "d:S(0)"),
            (NORMAL[:6].reshape(3, 2, 8, 8) / 3, NORMAL[6]),
        ),
        (of_keys, None, (jax.random.key(0),)),
    ],
    ids=["slices and stacks", "scans in scans", "keys"],
)
def test_other_scans(fn, types, args):
    same(fn, types, *args)


SPECIAL = (0.0, -0.0, np.inf, -np.inf, np.nan, 3.4e38, 1e-40, 1 + 2**-8, 1 + 3 * 2**-8, 1 + 2**-9)


def test_a_cast_of_slices_stays_in_the_loop_and_gives_the_same_bits():
    def fn(xs):
        turn = lambda c, x: (c, lax.bitcast_convert_type(x.astype(BF16), jnp.uint16))
        return lax.scan(turn, 0, xs)[1]

    rng = np.random.default_rng(1)
    bits = rng.integers(0, 2**32, size=(4, 1014), dtype=np.uint32).view(np.float32)
    xs = np.concatenate([bits, np.tile(np.array(SPECIAL, np.float32), (4, 1))], 1)
    f = on_tpu(fn, ("d:S(1)",))
    assert "reduce_precision" in lowered(f.plan(xs))
    numbers = ~np.isnan(xs)
    expected, got = np.asarray(fn(xs)), np.asarray(f(xs))
    np.testing.assert_array_equal(got[numbers], expected[numbers])
    assert np.isnan(got.view(BF16)[~numbers].astype(np.float32)).all()


def loop_with(cast_of):
    return lambda w, x: lax.scan(lambda c, w: (jnp.tanh(cast_of(c, w)), None), x, w)[0]


W = jax.ShapeDtypeStruct((3, 8, 8), "float32")
X = jax.ShapeDtypeStruct((8, 8), BF16)


CAST = loop_with(lambda c, w: c @ w.astype(BF16))


@pytest.mark.parametrize(
    ("fn", "kept"),
    [
        (CAST, True),
        (loop_with(lambda c, w: c @ w.T.astype(BF16)), True),
        (loop_with(lambda c, w: c @ lax.optimization_barrier((c, w))[1].astype(BF16)), True),
        (loop_with(lambda c, w: c @ (2 * w).astype(BF16)), False),
        (loop_with(lambda c, w: c @ w.astype(jnp.float16).astype(BF16)), False),
        (loop_with(lambda c, w: (c.astype(jnp.float32) @ w).astype(BF16)), False),
        # A loop in a loop has its casts ahead of both.
        (lambda w, x: lax.fori_loop(0, 4, lambda _, x: CAST(w, x), x), False),
    ],
)
def test_casts_of_slices_as_they_are_are_kept(fn, kept):
    with jax.numpy_dtype_promotion("standard"):
        plan = on_tpu(fn, (None, "d:S(0)")).plan(W, X)
    assert ("reduce_precision" in lowered(plan)) == kept


def test_of_a_gathered_stack_the_compiler_moves_the_cast_ahead_of_the_gather():
    plan = on_tpu(lambda w, x: CAST(sbp.replicate(w, "d"), x), ("d:S(1)", "d:S(0)")).plan(W, X)
    assert "all_gather" in lowered(plan) and "reduce_precision" not in lowered(plan)


def test_on_other_platforms_a_scan_is_that_of_jax():
    assert "reduce_precision" not in lowered(
        sbp.jit(CAST, mesh(), in_types=(None, "d:S(0)")).plan(W, X)
    )


# ---- lookups -------------------------------------------------------------------------------------
# Tables are looked up before they are cast. The values are those of one device, bit by bit.


looked_up = lambda table, tokens: table.astype(jnp.bfloat16)[tokens] * 2


def looked_up_and_multiplied(table, tokens):
    cast = table.astype(jnp.bfloat16)
    return cast[tokens] @ cast.T


@pytest.mark.parametrize("sizes", [(2,), (8,), (2, 4), (2, 2, 2)], ids=str)
@pytest.mark.parametrize("atom", ["S(0)", "S(1)", "B"])
def test_lookups_in_cast_tables(sizes, atom):
    names = "xyz"[: len(sizes)]
    pins = dict.fromkeys(names, sbp.S(int(atom[2])) if atom != "B" else sbp.B)
    f = sbp.jit(
        lambda table, tokens: looked_up(sbp.annotate(table, **pins), tokens),
        sbp.make_mesh(sizes, tuple(names)),
    )
    table = np.random.default_rng(0).normal(size=(67, 17)).astype(np.float32)
    tokens = np.array([[0, 66, 5], [-1, 70, 66]], np.int32)  # the last row, and outside
    want = jax.jit(looked_up)(table, tokens)
    np.testing.assert_array_equal(
        np.asarray(f(table, tokens)).astype(np.float32), np.asarray(want).astype(np.float32)
    )


@pytest.mark.parametrize(
    ("fn", "count", "late"),
    [(looked_up, 8, True), (looked_up, 4096, False), (looked_up_and_multiplied, 8, False)],
    ids=["few", "many", "also_multiplied"],
)
def test_the_program_casts_the_rows(fn, count, late):
    """With more lookups than rows, and with another reader, it casts the table."""
    f = sbp.jit(fn, sbp.make_mesh((1,), ("x",)))
    table = jax.ShapeDtypeStruct((512, 16), "float32")
    text = lowered(f.plan(table, jax.ShapeDtypeStruct((count,), "int32")))
    casts = lambda rows: rf"convert.*tensor<{rows}x16xf32>\) -> tensor<{rows}x16xbf16>"
    assert [bool(re.search(casts(rows), text)) for rows in (count, 512)] == [late, not late]


# ---- stacks --------------------------------------------------------------------------------------
# What one loop stacks for a later one is held in whole tiles of a TPU.


LAYERS, WIDTH = 3, 128
FOUR = jax.sharding.AbstractMesh((4,), ("d",))


def exchanged_loss(w, x):
    """Tokens (group, expert, slot, width) are exchanged in each layer, and again in its
    gradient."""

    def body(x, w):
        sent = sbp.split(x, 1, "d")
        out = sbp.split(jnp.tanh(jnp.einsum("gecm,mn->gecn", sent, w)), 0, "d")
        return x + jnp.tanh(out), None

    return (lax.scan(jax.checkpoint(body), sbp.split(x, 0, "d"), w)[0] ** 2).mean()


exchanged_step = lambda w, x: w - jax.grad(exchanged_loss)(w, x)


def planned_stack(mesh, slots, hardware="tpu-v3"):
    f = sbp.jit(exchanged_step, mesh, ("B", "d:S(0)"), "B", hardware=hardware, memory_limit=2**40)
    w = jax.ShapeDtypeStruct((LAYERS, WIDTH, WIDTH), jnp.float32)
    return f.plan(w, jax.ShapeDtypeStruct((16, 16, slots, WIDTH), jnp.float32))


@pytest.mark.parametrize(
    ("slots", "hardware", "whole"),
    [
        # Slots that fill no rows of a tile are stacked as a matrix.
        (2, "tpu-v3", False),
        (6, "tpu-v3", False),
        (8, "tpu-v3", True),
        (2, "h100", True),  # it has no tiles
    ],
)
def test_stacks_that_fill_tiles_are_stacked_as_they_are(slots, hardware, whole):
    """Then the second loop takes exchanged tokens in their own shape, four dims and the layers."""
    plan = planned_stack(FOUR, slots, hardware)
    assert plan.program.removed
    assert (f"tensor<{LAYERS}x16x4x{slots}x{WIDTH}xf32>" in lowered(plan)) == whole


def test_a_stack_that_is_read_outside_of_loops_keeps_its_shape():
    program = planned_stack(FOUR, 2).program
    kept = program.graph.avals.keys() - program.request.graph.avals.keys()
    (register,) = stacks_of_matrices(program.block, kept)
    returned = dataclasses.replace(program.block, outputs=(*program.block.outputs, register))
    assert not stacks_of_matrices(returned, kept)


@pytest.mark.parametrize("devices", [4, 8])
def test_results_are_those_of_one_device(devices):
    plan = planned_stack(sbp.make_mesh((devices,), ("d",)), 2)
    assert plan.program.removed
    key, other = jax.random.split(jax.random.key(0))
    w = jax.random.normal(key, (LAYERS, WIDTH, WIDTH)) / 16
    x = jax.random.normal(other, (16, 16, 2, WIDTH))
    np.testing.assert_allclose(plan(w, x), exchanged_step(w, x), rtol=1e-5, atol=1e-6)


# ---- argument layouts ----------------------------------------------------------------------------
# What collectives give is laid out row by row where it meets arguments of the program.


def planned_update(hardware="tpu-v5e", w=(512, 512), product=jnp.matmul, **options):
    """The plan of an update with a moment."""

    def step(w, moment, x):
        gradient = jax.grad(lambda w: jnp.tanh(product(x, w)).sum())(w)
        moment = 0.9 * moment + 0.1 * gradient
        return w - 0.1 * moment, moment

    types = {"in_types": ("B", "B", "d:S(0)"), "out_types": ("B", "B")}
    avals = (jax.ShapeDtypeStruct(s, jnp.float32) for s in (w, w, (4096, 512)))
    return sbp.jit(step, FOUR, hardware=hardware, **types, **options).plan(*avals)


sends = lambda plan: {p.box.target for p in plan.program.boxes() if p.box.bytes_sent}


def test_a_reduced_gradient_meets_the_moment():
    """The plan may not split the update and gather its results."""
    plan = planned_update(boxing="reduce")
    assert len(sends(plan)) == 1
    assert meets_arguments(plan.program.graph, plan.program.block) == sends(plan)
    assert "LayoutConstraint" in plan.lower().as_text()
    assert "LayoutConstraint" not in planned_update("h100", boxing="reduce").lower().as_text()


@pytest.mark.parametrize(
    ("fn", "rows", "out"),
    [
        (lambda w, x: jnp.sin(sbp.replicate(x @ w, "d")), 512, None),
        # A gradient that meets its weight alone.
        (lambda w, x: w - 0.1 * jax.grad(lambda w: jnp.tanh(x @ w).sum())(w), 4096, "B"),
        # One that is returned, and multiplied with its weight.
        (
            lambda w, x: (lambda g: (g, w @ g))(jax.grad(lambda w: jnp.tanh(x @ w).sum())(w)),
            4096,
            "B",
        ),
    ],
)
def test_what_meets_no_other_argument_is_left_to_the_compiler(fn, rows, out):
    avals = (jax.ShapeDtypeStruct((n, 512), jnp.float32) for n in (512, rows))
    plan = sbp.jit(fn, FOUR, in_types=("B", "d:S(0)"), out_types=out).plan(*avals)
    assert sends(plan) and not meets_arguments(plan.program.graph, plan.program.block)


@pytest.mark.parametrize(("features", "told"), [(64, False), (128, True)])
def test_arrays_that_fill_no_tiles_are_left_to_the_compiler(features, told):
    """Heads of 64 features fill no lanes, and rows of them would be copied."""
    product = functools.partial(jnp.einsum, "bd,dhk->bhk")
    plan = planned_update(w=(512, 8, features), product=product)
    assert sends(plan) and ("LayoutConstraint" in plan.lower().as_text()) == told


# ---- order ---------------------------------------------------------------------------------------
# What a plan computes before a loop, from larger arrays, is computed before it.


SIZE = 64


def behind_a_loop(reduced):
    """The loss of a table behind a loop over layers: backward its gradient comes before the
    loop."""

    def loss(table, weights, x):
        y, _ = lax.scan(lambda y, w: (jnp.tanh(y @ w), None), x, weights)
        return reduced(y @ table)

    return loss


gradients = jax.grad(behind_a_loop(lambda y: jnp.sum(jnp.sin(y))), (0, 1))
with_loss = jax.value_and_grad(behind_a_loop(lambda y: jnp.mean(jax.nn.logsumexp(y, -1))), (0, 1))
"""The loss, which the backward loop does not read, and the gradients. The logits of the loss are
larger than it."""


def table_arguments():
    rng = np.random.default_rng(0)
    shapes = ((SIZE, SIZE), (LAYERS, SIZE, SIZE), (8192, SIZE))
    return tuple(rng.normal(size=s).astype(np.float32) / 8 for s in shapes)


def planned_gradients(n):
    mesh, types = sbp.make_mesh((n,), ("d",)), ("d:S(1)", "B", "d:S(0)")
    return sbp.jit(gradients, mesh, in_types=types, out_types=types[:2])


def test_the_gradient_is_scattered_before_the_loop():
    program = planned_gradients(4).plan(*table_arguments()).program
    found = computed_before(DeviceMemory(program.typing, in_host=False), program.block)
    (backward,) = [n.id for n in program.graph.nodes if n.op == "scan"][1:]
    assert found.keys() == {backward}
    scattered, tied = found[backward]
    assert program.graph.avals[scattered.value].shape == (SIZE, SIZE)
    loops = [i for i in program.block.instructions if isinstance(i, Loop)]
    assert [tied in i.ins for i in loops if i.node.id == backward] == [True]


@pytest.mark.parametrize("n", [2, 8])
def test_gradients_before_the_loop(n):
    assert_close(
        planned_gradients(n)(*table_arguments()),
        jax.jit(gradients)(*table_arguments()),
        rtol=1e-4,
        atol=1e-3,
    )


def test_the_loss_is_computed_before_the_backward_loop():
    """Of its sum over devices, what each device sends."""
    f = sbp.jit(
        with_loss,
        sbp.make_mesh((4,), ("d",)),
        in_types=("B", "B", "d:S(0)"),
        out_types=("B", ("B", "B")),
    )
    program = f.plan(*table_arguments()).program
    (held,) = computed_before(DeviceMemory(program.typing, in_host=False), program.block).values()
    assert [r.codes for r in held if program.graph.avals[r.value].shape == ()] == [(-1,)]
    got, want = f(*table_arguments()), jax.jit(with_loss)(*table_arguments())
    np.testing.assert_allclose(float(got[0]), float(want[0]), rtol=1e-5)


def test_a_value_that_frees_nothing_is_not_held():
    """`y` is as large as `x`, which is an argument and stays."""

    def fn(x):
        y = jnp.cumsum(x, 1)
        return jax.lax.fori_loop(0, 3, lambda _, c: jnp.tanh(c), x), y

    x = jax.ShapeDtypeStruct((8, 64), jnp.float32)
    program = sbp.jit(fn, sbp.make_mesh((4,), ("d",)), in_types="d:S(0)").plan(x).program
    assert computed_before(DeviceMemory(program.typing, in_host=False), program.block) == {}
