"""What a program asks for in JAX's own words: a sharding is a pin at the user's line, and only
where the user wrote it. Devices, layouts and kinds of memory give one warning a line."""

import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jax.experimental.compute_on import compute_on
from jax.experimental.layout import Format, Layout
from jax.sharding import AxisType, NamedSharding, PartitionSpec

import sbp
from sbp.errors import SbpWarning

MESH = jax.sharding.AbstractMesh((2, 4), ("x", "y"))
AUTO = jax.sharding.AbstractMesh((2, 4), ("x", "y"), axis_types=(AxisType.Auto,) * 2)
EXPLICIT = jax.sharding.AbstractMesh((2, 4), ("x", "y"), axis_types=(AxisType.Explicit,) * 2)
ROWS = NamedSharding(AUTO, PartitionSpec("x"))
CONCRETE_ROWS = NamedSharding(sbp.make_mesh((2, 4), ("x", "y")), PartitionSpec("x"))
COLUMNS = NamedSharding(AUTO, PartitionSpec(None, "y"))
OPEN = PartitionSpec.UNCONSTRAINED
HOST = ROWS.with_memory_kind("pinned_host")
X = jax.ShapeDtypeStruct((8, 4), jnp.float32)
constrain = lax.with_sharding_constraint
offloading = jax.checkpoint_policies.save_and_offload_only_these_names(
    names_which_can_be_saved=[],
    names_which_can_be_offloaded=["a"],
    offload_src="device",
    offload_dst="pinned_host",
)


def line_of(fn, span):
    """A line of the user, counted from the function's own."""
    return span.line - fn.__code__.co_firstlineno


def pinned(fn, mesh=MESH):
    """The line and type of each pin of a program, and the code and line of each warning."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        plan = sbp.jit(fn, mesh, hardware="tpu-v5e").plan(X)
    pins = [
        (line_of(fn, node.span), repr(node.params["pin"].type))
        for node in plan.program.graph.walk()
        if node.op == "sbp_annotate"
    ]
    warned = [
        (d.code, line_of(fn, d.primary.span))
        for d in plan.report().diagnostics
        if d.code.startswith("ignored") and d.primary
    ]
    assert [str(w.message).split(":")[0] for w in caught] == [code for code, _ in warned]
    assert all(w.category is SbpWarning for w in caught)
    return pins, warned


CONSTRAINT, MEMORY = "ignored-constraint", "ignored-memory"


def in_gradient(x):
    def loss(x):
        return constrain(jnp.sin(x), ROWS).sum()

    return jax.value_and_grad(loss)(x)


def in_gradient_alone(x):
    def loss(x):
        return jnp.sin(constrain(x * x, ROWS)).sum()

    return jax.grad(loss)(x)


def in_scan(x):
    def body(c, _):
        return constrain(jnp.sin(c), ROWS), None

    return lax.scan(body, x, None, length=3)[0]


def in_gradient_of_scan(x):
    def body(c, _):
        return constrain(jnp.sin(c), ROWS), None

    return jax.grad(lambda x: lax.scan(body, x, None, length=3)[0].sum())(x)


def gradient_in_scan(x):
    """JAX reshards the cotangent of the sum, on no line of the user."""

    def body(c, _):
        return jax.grad(lambda x: constrain(jnp.sin(x), ROWS).sum())(c), None

    return lax.scan(body, x, None, length=3)[0]


def in_remat(x):
    @jax.checkpoint
    def block(x):
        return jnp.sin(constrain(jnp.sin(x), ROWS))

    return jax.value_and_grad(lambda x: block(x).sum())(x)


def in_remat_of_scan(x):
    @jax.checkpoint
    def body(c, _):
        return jnp.sin(constrain(jnp.sin(c), ROWS)), None

    return jax.grad(lambda x: lax.scan(body, x, None, length=3)[0].sum())(x)


def in_vmap(x):
    def row(x):
        return constrain(jnp.sin(x), NamedSharding(AUTO, PartitionSpec(None)))

    return jax.vmap(row)(x)


def of_a_gradient(x):
    g = jax.grad(lambda x: jnp.sin(x).sum())(x)
    return constrain(g, ROWS)


def many_times(x):
    for _ in range(3):
        x = constrain(jnp.sin(x), ROWS)
    return x


def two_lines(x):
    x = constrain(jnp.sin(x), ROWS)
    return constrain(jnp.cos(x), ROWS)


def put_on_a_device(x):
    return jax.device_put(jnp.sin(x), jax.devices()[0])


def inner_jit(x):
    return jax.jit(jnp.sin, out_shardings=ROWS)(x)


def to_host_and_back(x):
    y = jax.device_put(jnp.sin(x), jax.memory.Space.Host)
    return jax.device_put(y, jax.memory.Space.Device) + 1


def in_a_layout(x):
    return jax.device_put(jnp.sin(x), Format(Layout((1, 0)), CONCRETE_ROWS))


def with_memory_kind(x):
    return constrain(jnp.sin(x), HOST)


def offloaded(x):
    block = jax.checkpoint(
        lambda x: jnp.sin(checkpoint_name(jnp.sin(x), "a")),
        policy=offloading,
    )
    return jax.value_and_grad(lambda x: block(x).sum())(x)


@jax.custom_vjp
def sine(x):
    return jnp.sin(x)


def sine_forward(x):
    return sine(x), x


def sine_backward(x, g):
    return (constrain(g * jnp.cos(x), ROWS),)


sine.defvjp(sine_forward, sine_backward)


def in_a_backward_rule(x):
    return jax.grad(lambda x: sine(x).sum())(x)


@pytest.mark.parametrize(
    ("fn", "pins", "warned"),
    [
        (lambda x: constrain(jnp.sin(x), ROWS), [(0, "x:S(0)")], []),
        (in_gradient, [(2, "x:S(0)")], []),
        (in_gradient_alone, [(2, "x:S(0)")], []),
        (in_scan, [(2, "x:S(0)")], []),
        (in_gradient_of_scan, [(2, "x:S(0)")], []),
        # The gradient needs no value of the constraint, so JAX drops it.
        (gradient_in_scan, [], []),
        # The forward pass and its recomputation.
        (in_remat, [(3, "x:S(0)")] * 2, []),
        (in_remat_of_scan, [(3, "x:S(0)")] * 2, []),
        (in_vmap, [(2, "B")], []),
        (
            lambda x: constrain(jnp.sin(x), NamedSharding(AUTO, PartitionSpec("x", OPEN))),
            [(0, "x:S(0)")],
            [],
        ),
        (of_a_gradient, [(2, "x:S(0)")], []),
        # JAX gives an equation of a backward rule the line of the forward call.
        (in_a_backward_rule, [(1, "x:S(0)")], []),
        (many_times, [(2, "x:S(0)")] * 3, []),
        (two_lines, [(1, "x:S(0)"), (2, "x:S(0)")], []),
        (
            lambda x: constrain({"a": x * 2, "b": x * 3}, {"a": ROWS, "b": COLUMNS}),
            [(0, "x:S(0)"), (0, "y:S(1)")],
            [],
        ),
        (lambda x: jax.device_put(jnp.sin(x), ROWS), [(0, "x:S(0)")], []),
        (put_on_a_device, [], [(CONSTRAINT, 1)]),
        (
            lambda x: jax.sharding.reshard(jnp.sin(x), NamedSharding(EXPLICIT, PartitionSpec("x"))),
            [(0, "x:S(0)")],
            [],
        ),
        (inner_jit, [(1, "x:S(0)")], []),
        (to_host_and_back, [], []),
        # The value is in device memory: this asks for what holds.
        (lambda x: jax.device_put(jnp.sin(x), jax.memory.Space.Device) * 2, [], []),
        (in_a_layout, [(1, "x:S(0)")], [(CONSTRAINT, 1)]),
        (with_memory_kind, [(1, "x:S(0)")], [(MEMORY, 1)]),
        (offloaded, [], []),
        (
            lambda x: jax.device_put(jnp.sin(x), ROWS.with_memory_kind("unpinned_host")) + 1,
            [(0, "x:S(0)")],
            [(MEMORY, 0)],
        ),
        (lambda x: jax.jit(jnp.sin, out_shardings=HOST)(x) + 1, [(0, "x:S(0)")], [(MEMORY, 0)]),
    ],
    ids=lambda v: v.__name__ if callable(v) else "",
)
def test_what_the_user_wrote_is_a_pin_or_a_warning(fn, pins, warned):
    assert pinned(fn) == (pins, warned)


def test_what_jax_adds_is_no_pin():
    def constants(x):
        return x + jnp.asarray(np.ones((8, 4))) + jax.device_put(jnp.float32(1)) + jnp.zeros((8, 4))

    with jax.set_mesh(jax.make_mesh((2, 4), ("x", "y"))):
        assert pinned(constants) == ([], [])


@pytest.mark.parametrize(
    ("fn", "call"),
    [
        (lambda x: jnp.array(x * 2, device=CONCRETE_ROWS), "device= of array"),
        (lambda x: jnp.asarray(x * 2, device=CONCRETE_ROWS), "device= of asarray"),
        (lambda x: x + jnp.asarray(np.ones((8, 4)), device=CONCRETE_ROWS), "device= of asarray"),
        (lambda x: x[:, 0] + jnp.arange(8.0, device=CONCRETE_ROWS), "device= of arange"),
        (lambda x: (x * 2).to_device(CONCRETE_ROWS), "device= of to_device"),
        (lambda x: jax.device_put(x * 2, ROWS), "device_put"),
        (lambda x: constrain(x * 2, ROWS), "with_sharding_constraint"),
        (inner_jit, "in_shardings or out_shardings of jax.jit"),
    ],
)
def test_a_pin_names_what_the_user_wrote(fn, call):
    nodes = sbp.jit(fn, MESH, hardware="tpu-v5e").plan(X).program.graph.walk()
    assert {n.params["pin"].asked_by for n in nodes if n.op == "sbp_annotate"} == {call}


@pytest.mark.parametrize(
    ("fn", "call"),
    [
        (put_on_a_device, "device_put"),
        (in_a_layout, "the layout of device_put"),
        (with_memory_kind, "with_sharding_constraint to pinned_host memory"),
    ],
)
def test_a_warning_names_what_the_user_wrote(fn, call):
    with pytest.warns(SbpWarning, match=f"^ignored-[a-z]+: {call} at .* has no effect"):
        sbp.jit(fn, MESH, hardware="tpu-v5e").plan(X)


@pytest.mark.skipif(jax.__version_info__ >= (0, 11), reason="compute_on is a primitive")
def test_a_place_to_compute_on_gives_a_warning():
    def on_the_host(x):
        with compute_on("device_host"):
            return x * 2

    with pytest.warns(SbpWarning, match=r'^ignored-constraint: compute_on\("device_host"\)'):
        sbp.jit(on_the_host, MESH, hardware="tpu-v5e").plan(X)
