"""The cost model counts the bytes of an update and of a loop's stacks that reach memory. It also
models the time of products with few rows: their multiplications, and the reads that nothing
hides."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import optax
import pytest
from jax.sharding import AbstractMesh, PartitionSpec as P

import sbp
from sbp.infer.cost import MemoryShares, row_seconds
from sbp.infer.rows import NdRow
from sbp.infer.space import Reduction, Spaces
from sbp.machine.mesh import mesh_spec
from tests.cases import shape as aval

V5E = sbp.HARDWARE["tpu-v5e"]
ROWS, WIDTH = 4096, 2048
SIZE = 4 * WIDTH * WIDTH
BF16 = jnp.bfloat16


def planned(fn, *args, mesh=None, hardware: Any = "tpu-v5e", types=None):
    mesh = mesh or AbstractMesh((1,), ("d",))
    return sbp.jit(fn, mesh, hardware=hardware, in_types=types).plan(*args).program


seconds = lambda fn, *args, hardware="tpu-v5e": planned(fn, *args, hardware=hardware).cost.seconds


loss = lambda w, x: jnp.sum(x @ w)


def stacks(body):
    """A loop that stacks a function of each slice."""
    return lambda x: jax.lax.scan(lambda c, x: (c, body(x)), 0.0, x)[1]


ADAMW = optax.adamw(1e-3)


def adamw(w, g, state):
    change, state = ADAMW.update(g, state, w)
    return optax.apply_updates(w, change), state


@pytest.mark.parametrize(
    ("update", "states", "arrays", "rel"),
    [
        (lambda w, g: w - 0.1 * g, (), 3, 0.03),  # it reads two arrays and writes one
        # A gradient that is clipped is read once more for its norm.
        (
            lambda w, g: w - g * jnp.minimum(1.0, jax.lax.rsqrt(jnp.sum(g * g))),
            (),
            3 + 4 * 0.25,
            0.03,
        ),
        # What is broadcast is not read whole.
        (lambda w, g: w - jnp.where(g > 0, g, jnp.zeros_like(g)) * jnp.full((), 0.1), (), 3, 0.05),
        (
            lambda w, g: w - jnp.where(g > 0, g, jnp.zeros_like(g)) * jnp.full(WIDTH, 0.1),
            (),
            3,
            0.05,
        ),
        # It reads weights, gradient and two moments, and writes weights and moments.
        (adamw, (jax.eval_shape(ADAMW.init, aval(WIDTH, WIDTH)),), 7, 0.06),
    ],
    ids=["descent", "clipped", "scalar", "row", "adamw"],
)
def test_arrays_that_an_update_moves(update, states, arrays, rel):
    """In sizes of the weights, beyond the gradient's own product."""
    x, w = aval(ROWS, WIDTH), aval(WIDTH, WIDTH)
    step = lambda w, x, *states: update(w, jax.grad(loss)(w, x), *states)
    taken = seconds(step, w, x, *states) - seconds(lambda w, x: jax.grad(loss)(w, x), w, x)
    assert taken * V5E.hbm_bytes_per_second / SIZE == pytest.approx(arrays, rel=rel)


def test_other_hardware_keeps_its_prices():
    w, x = aval(WIDTH, WIDTH), aval(ROWS, WIDTH)
    shares = planned(
        lambda w, x: w - jax.grad(loss)(w, x), w, x, hardware="cpu"
    ).typing.request.memory_shares
    assert not shares.read and not shares.written and not shares.fused


def test_a_value_inside_an_update_is_dearer_to_gather_than_its_gradient():
    """The gradient is whole on every device before the update, not in the middle of it."""
    mesh = AbstractMesh((8,), ("d",))
    step = lambda w, x: w - 0.1 * jax.grad(loss)(w, x).astype(jnp.float32)
    args = aval(WIDTH, WIDTH, dtype=BF16), aval(8 * ROWS, WIDTH, dtype=BF16)
    request = planned(step, *args, mesh=mesh, types=(P(), P("d"))).typing.request
    fused = request.memory_shares.fused
    graph = request.graph
    names = {v: node.op for node in graph.nodes for v in node.outputs}
    assert {names[v] for v in fused} >= {"convert_element_type", "mul"}
    (returned,) = graph.outputs
    assert returned not in fused
    value = next(v for v in fused if names[v] == "mul")
    space = request.spaces.of(
        graph.avals[value], frozenset({"sum"}), reduction=request.reduction(value)
    )
    plain = request.spaces.of(graph.avals[value], frozenset({"sum"}))
    b, split = space.index[0,], space.index[1,]
    more = space.seconds()[split, b] - plain.seconds()[split, b]
    assert more == pytest.approx((1 + 1 / 8) * SIZE / V5E.hbm_bytes_per_second)
    assert space.seconds()[b, split] == plain.seconds()[b, split]  # a slice stays inside


@pytest.mark.parametrize("sizes", [(2, 4), (2, 2, 2)])
def test_a_conversion_in_several_steps_writes_and_reads_once(sizes):
    mesh = mesh_spec(AbstractMesh(sizes, ("a", "b", "c")[: len(sizes)]), hardware="tpu-v5e")
    spaces, sums = Spaces(mesh), frozenset({"sum"})
    shape = aval(64, 256)
    plain, space = (spaces.of(shape, sums, reduction=Reduction(fused=f)) for f in (False, True))
    found, rate = space.seconds(), V5E.hbm_bytes_per_second
    for i, source in enumerate(space.types):
        for k, target in enumerate(space.types):
            steps = space.path(source, target)
            assert sum(s.seconds for s in steps) == pytest.approx(found[i, k], abs=1e-15)
            more = found[i, k] - plain.seconds()[i, k]
            once = (space.local_bytes[i] + space.local_bytes[k]) / rate
            assert -1e-15 <= more <= once + 1e-15
            sent = [s for s in steps if s.bytes_sent]
            if sent == list(steps):  # with local steps it may write or read less
                assert more == pytest.approx(once if sent else 0.0)
    # No conversion is dearer than two that have the same result.
    assert all(
        (found <= found[:, k, None] + found[None, k, :] + 1e-12).all()
        for k in range(len(space.types))
    )


def momentum(mark):
    def step(w, mu, x):
        mu = mark(0.9 * mark(mu) + mark(jax.grad(loss)(w, x)))
        return mark(w - 0.1 * mu), mu

    return step


def test_an_annotation_is_free():
    mesh, args = AbstractMesh((8,), ("d",)), [aval(WIDTH, WIDTH)] * 2 + [aval(8 * ROWS, WIDTH)]
    types = (P("d"), P("d"), P("d"))
    plain, marked = (
        planned(momentum(mark), *args, mesh=mesh, types=types).cost.seconds
        for mark in (lambda x: x, lambda x: sbp.split(x, 0, "d"))
    )
    assert marked == pytest.approx(plain, rel=1e-6)


@pytest.mark.parametrize("lay", [lambda w: w.T.T, lambda w: w.reshape(-1).reshape(w.shape)])
def test_a_layout_of_a_slice_is_read_once(lay):
    layers = lambda lay: lambda x, w: jax.lax.scan(lambda h, w: (h @ lay(w), None), x, w)[0]

    x, w = aval(64, WIDTH), aval(8, WIDTH, WIDTH)
    plain, laid = (seconds(layers(lay), x, w) for lay in (lambda w: w, lay))
    assert plain < laid < plain + 0.25 * 8 * SIZE / V5E.hbm_bytes_per_second


@pytest.mark.parametrize("mark", [lambda x: sbp.replicate(x, "d"), jax.lax.optimization_barrier])
def test_slices_and_stacks_behind_annotations_and_barriers_are_whole(mark):
    x = aval(16, WIDTH, WIDTH)
    marked = seconds(stacks(lambda x: mark(jnp.tanh(mark(x)))), x)
    assert marked == pytest.approx(seconds(stacks(jnp.tanh), x), rel=1e-3)


@pytest.mark.parametrize(
    ("fn", "dims", "arrays", "rel"),
    [
        (lambda x: jnp.tanh(x * 2.0) + 1.0, (WIDTH, WIDTH), 3 * 2 * 0.25, 1e-3),
        # Stacks of a loop are written and read whole.
        (stacks(jnp.tanh), (16, WIDTH, WIDTH), 2 * 16, 1e-2),
        (stacks(lambda x: (jnp.tanh(x), jnp.sin(x))), (16, WIDTH, WIDTH), (3 + 0.25) * 16, 1e-2),
    ],
    ids=["forward", "one stack", "two stacks"],
)
def test_arrays_that_a_forward_pass_moves(fn, dims, arrays, rel):
    moved = seconds(fn, aval(*dims)) * V5E.hbm_bytes_per_second / SIZE
    assert moved == pytest.approx(arrays, rel=rel)


def test_a_stacked_product_is_written_once():
    w, x = aval(WIDTH, WIDTH), aval(16, WIDTH, WIDTH)
    products = lambda w, x: jax.lax.scan(lambda c, x: (c, (x @ w).T), 0.0, x)[1]
    sums = lambda w, x: jax.lax.scan(lambda c, x: (c + jnp.sum(x @ w), None), 0.0, x)[0]
    # A sum reads a quarter of the product, a transpose moves next to nothing.
    more = seconds(products, w, x) - seconds(sums, w, x)
    assert abs(more) * V5E.hbm_bytes_per_second < 16 * SIZE * 0.25


# ---- products of few rows -----------------------------------------------------------------------


read = lambda size: size / V5E.hbm_bytes_per_second


HIDDEN = MemoryShares(waited={0: 0.0, 1: 0.0})
"""Of products whose operands are read while other work runs."""
WEIGHTS = (2048, 8192)
PRODUCT = 2 * 48 * 2048 * 8192 / V5E.flops_per_second
"""Seconds of the product of `product_rows` rows, or fewer, with the weights."""
ONE_ROW = 2 * 2048 * 8192 / (V5E.vector_flops_per_second or 0)
"""Seconds of the product of a row on vector units."""
PLAIN = dataclasses.replace(V5E, vector_flops_per_second=None, fast_memory_bytes=0)
SMALL = dataclasses.replace(V5E, fast_memory_bytes=2**25 - 1)


@pytest.mark.parametrize(
    ("left", "right", "hardware", "shares", "seconds"),
    [
        *(((rows, 2048), WEIGHTS, V5E, HIDDEN, PRODUCT) for rows in (2, 16, 48)),
        ((96, 2048), WEIGHTS, V5E, HIDDEN, 2 * PRODUCT),
        ((8192, 2048), (2048, 16), V5E, HIDDEN, PRODUCT),
        ((2048,), WEIGHTS, V5E, None, ONE_ROW),
        ((1, 2048), WEIGHTS, V5E, None, ONE_ROW),
        ((8192, 2048), (2048,), V5E, None, ONE_ROW),
        ((2048,), WEIGHTS, PLAIN, None, read(2 * (2048 + 2048 * 8192 + 8192))),
        # Reading is waited for where nothing hides it.
        ((16, 2048), WEIGHTS, V5E, None, read(2 * (16 * 2048 + 2048 * 8192 + 16 * 8192))),
        # Weights beyond the fast memory are read by the product.
        ((16, 2048), WEIGHTS, SMALL, HIDDEN, read(2**25 + 2 * 16 * 8192)),
    ],
)
def test_the_time_of_products_of_few_rows(left, right, hardware, shares, seconds):
    """In a program of one operation on one device."""
    args = [aval(*left, dtype=BF16), aval(*right, dtype=BF16)]
    request = planned(jnp.matmul, *args, hardware=hardware, types=(P(), P())).typing.request
    (node,) = request.graph.nodes
    row = NdRow(((0,), (0,)), ((0,),))
    found = row_seconds(request.graph, node, row, request.mesh, shares or request.memory_shares)
    assert found == pytest.approx(seconds)


def attended_then_projected(q, cache, x, w):
    """A product of single rows, which keeps the device busy, and weights that wait for nothing."""
    scores = jnp.einsum("bq,bsq->bs", q, cache)
    return scores, jnp.einsum("bd,vd->bv", x, w, preferred_element_type=jnp.float32)


SHAPES = tuple(
    jax.ShapeDtypeStruct(s, BF16) for s in ((64, 128), (64, 8192, 128), (64, 2048), (32768, 2048))
)


def test_other_work_hides_the_reading_of_weights():
    def request_on(types, hardware="tpu-v5e"):
        mesh = AbstractMesh((4,), ("t",))
        return planned(
            attended_then_projected, *SHAPES, mesh=mesh, types=types, hardware=hardware
        ).typing.request

    busy = request_on((P(),) * 4)
    waited = busy.memory_shares.waited[busy.graph.inputs[3]]
    reads = read(sum(2 * s.size for s in SHAPES))
    assert V5E.vector_flops_per_second is not None
    rows = 2 * 64 * 8192 * 128 / V5E.vector_flops_per_second
    idle = (rows - read(2 * (64 * 128 + 64 * 8192 * 128 + 64 * 8192))) / 4
    assert idle < reads and waited == pytest.approx(1 - idle / reads)
    assert max(request_on((P("t"),) * 4).memory_shares.waited.values()) < waited
    assert not request_on((P(),) * 4, "cpu").memory_shares.waited


def decoder(hardware):
    """A step of decoding: attention to a cache, then the table of tokens."""

    def fn(q, cache, x, table):
        scores = jnp.einsum("bhq,bshq->bhs", q, cache, preferred_element_type=jnp.float32)
        logits = jnp.einsum("bd,vd->bv", x, table, preferred_element_type=jnp.float32)
        return jnp.sum(scores, (1, 2)), jnp.argmax(logits, -1)

    args = [
        jax.ShapeDtypeStruct(s, BF16)
        for s in ((64, 16, 128), (64, 8192, 16, 128), (64, 2048), (32768, 2048))
    ]
    types = (
        P("d", "t"),
        P("d", None, "t"),
        P("d"),
        P("t"),
    )
    mesh = AbstractMesh((4, 4), ("d", "t"))
    return sbp.jit(fn, mesh, types, P("d"), hardware=hardware).plan(*args)


def test_a_decoder_does_not_split_features_to_read_fewer_weights():
    # The winners of the parts of the table, nothing else.
    assert decoder(V5E).cost.bytes_per_device < 2**14
    # Without fast memory the same saving is real, and worth a reduce-scatter of the logits.
    slow = dataclasses.replace(V5E, fast_memory_bytes=0, vector_flops_per_second=None)
    assert decoder(slow).cost.bytes_per_device > 2**20
