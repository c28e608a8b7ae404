"""What of an update and of a loop's stacks reaches memory, in the cost model."""

import jax
import jax.numpy as jnp
import optax
import pytest
from jax.sharding import AbstractMesh
from jax.sharding import PartitionSpec as P

import sbp
from sbp.infer.accumulation import Reduction
from sbp.infer.value_space import Spaces
from sbp.machine.mesh import mesh_spec
from sbp.machine.table import HARDWARE
from sbp.report.timeline import schedule

V5E = HARDWARE["tpu-v5e"]
ROWS, WIDTH = 4096, 2048
SIZE = 4 * WIDTH * WIDTH
BF16 = jnp.bfloat16


def aval(*shape, dtype=jnp.float32):
    return jax.ShapeDtypeStruct(shape, dtype)


def planned(fn, *args, mesh=None, hardware="tpu-v5e", types=None):
    mesh = mesh or AbstractMesh((1,), ("d",))
    return sbp.jit(fn, mesh, hardware=hardware, in_types=types).plan(*args).program


def seconds(fn, *args, hardware="tpu-v5e"):
    return planned(fn, *args, hardware=hardware).cost.seconds


def loss(w, x):
    return jnp.sum(x @ w)


def passes(update, *states):
    """Bytes that an update moves, in sizes of the weights, beyond the gradient's own product."""
    x, w = aval(ROWS, WIDTH), aval(WIDTH, WIDTH)

    def step(w, x, *states):
        return update(w, jax.grad(loss)(w, x), *states)

    taken = seconds(step, w, x, *states) - seconds(lambda w, x: jax.grad(loss)(w, x), w, x)
    return taken * V5E.hbm_bytes_per_second / SIZE


def test_gradient_descent_reads_two_arrays_and_writes_one():
    assert passes(lambda w, g: w - 0.1 * g) == pytest.approx(3, rel=0.03)


def test_adamw_moves_seven_arrays():
    """It reads weights, gradient and two moments, and writes weights and moments."""
    optimiser = optax.adamw(1e-3)

    def update(w, g, state):
        change, state = optimiser.update(g, state, w)
        return optax.apply_updates(w, change), state

    state = jax.eval_shape(optimiser.init, aval(WIDTH, WIDTH))
    assert passes(update, state) == pytest.approx(7, rel=0.06)


def test_the_forward_pass_is_priced_as_before():
    def forward(x):
        return jnp.tanh(x * 2.0) + 1.0

    x = aval(WIDTH, WIDTH)
    moved = seconds(forward, x) * V5E.hbm_bytes_per_second / SIZE
    assert moved == pytest.approx(3 * 2 * 0.25, rel=1e-3)


def test_a_gradient_that_is_clipped_is_read_once_more_for_its_norm():
    def update(w, g):
        return w - g * jnp.minimum(1.0, jax.lax.rsqrt(jnp.sum(g * g)))

    assert passes(update) == pytest.approx(3 + 4 * 0.25, rel=0.03)


def test_other_hardware_keeps_its_prices():
    w, x = aval(WIDTH, WIDTH), aval(ROWS, WIDTH)
    program = planned(lambda w, x: w - jax.grad(loss)(w, x), w, x, hardware="cpu")
    shares = program.typing.request.memory_shares
    assert not shares.read and not shares.written and not shares.fused


def test_a_value_inside_an_update_is_dearer_to_gather_than_its_gradient():
    """The gradient is whole on every device before the update, not in the middle of it."""
    mesh = AbstractMesh((8,), ("d",))

    def step(w, x):
        return w - 0.1 * jax.grad(loss)(w, x).astype(jnp.float32)

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
        graph.avals[value], frozenset({"sum"}), reduction=request.reduction(value, None)
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
    for k in range(len(space.types)):
        assert (found <= found[:, k, None] + found[None, k, :] + 1e-12).all()


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


@pytest.mark.parametrize("width", [(), (WIDTH,)])
def test_what_is_broadcast_is_not_read_whole(width):
    def update(w, g):
        return w - jnp.where(g > 0, g, jnp.zeros_like(g)) * jnp.full(width, 0.1)

    assert passes(update) == pytest.approx(3, rel=0.05)


@pytest.mark.parametrize("lay", [lambda w: w.T.T, lambda w: w.reshape(-1).reshape(w.shape)])
def test_a_layout_of_a_slice_is_read_once(lay):
    def layers(lay):
        return lambda x, w: jax.lax.scan(lambda h, w: (h @ lay(w), None), x, w)[0]

    x, w = aval(64, WIDTH), aval(8, WIDTH, WIDTH)
    plain, laid = (seconds(layers(lay), x, w) for lay in (lambda w: w, lay))
    assert plain < laid < plain + 0.25 * 8 * SIZE / V5E.hbm_bytes_per_second


@pytest.mark.parametrize("mark", [lambda x: sbp.replicate(x, "d"), jax.lax.optimization_barrier])
def test_slices_and_stacks_behind_annotations_and_barriers_are_whole(mark):
    def stacked(mark):
        return lambda x: jax.lax.scan(lambda c, x: (c, mark(jnp.tanh(mark(x)))), 0.0, x)[1]

    mesh, x = AbstractMesh((1,), ("d",)), aval(16, WIDTH, WIDTH)
    plain, marked = (planned(stacked(m), x, mesh=mesh).cost.seconds for m in (lambda x: x, mark))
    assert marked == pytest.approx(plain, rel=1e-3)


def test_stacks_of_a_loop_are_written_and_read_whole():
    turns = 16
    x = aval(turns, WIDTH, WIDTH)

    def stacked(x):
        return jax.lax.scan(lambda c, x: (c, jnp.tanh(x)), 0.0, x)[1]

    moved = seconds(stacked, x) * V5E.hbm_bytes_per_second / SIZE
    assert moved == pytest.approx(2 * turns, rel=1e-2)

    def twice(x):
        return jax.lax.scan(lambda c, x: (c, (jnp.tanh(x), jnp.sin(x))), 0.0, x)[1]

    moved = seconds(twice, x) * V5E.hbm_bytes_per_second / SIZE
    assert moved == pytest.approx((3 + 0.25) * turns, rel=1e-2)


def test_a_stacked_product_is_written_once():
    w, x = aval(WIDTH, WIDTH), aval(16, WIDTH, WIDTH)

    def products(w, x):
        return jax.lax.scan(lambda c, x: (c, (x @ w).T), 0.0, x)[1]

    def sums(w, x):
        return jax.lax.scan(lambda c, x: (c + jnp.sum(x @ w), None), 0.0, x)[0]

    # A sum reads a quarter of the product, a transpose moves next to nothing.
    more = seconds(products, w, x) - seconds(sums, w, x)
    assert abs(more) * V5E.hbm_bytes_per_second < 16 * SIZE * 0.25


def test_the_plan_costs_what_its_steps_cost():
    mesh = AbstractMesh((2, 4), ("d", "t"))

    def layers(ws, x):
        def layer(x, w):
            return jnp.tanh(x @ w), None

        return jnp.sum(jax.lax.scan(layer, x, ws)[0])

    def step(ws, x):
        return jax.tree.map(lambda w, g: w - 0.1 * g, ws, jax.grad(layers)(ws, x))

    args = aval(6, WIDTH, WIDTH), aval(ROWS, WIDTH)
    program = planned(step, *args, mesh=mesh, types=(P(None, "t"), P("d")))
    assert program.cost.seconds == pytest.approx(schedule(program).seconds, rel=1e-3)
