"""What a program says of places in JAX's own words has no effect, and a warning with the line says
so: once a line, and only of what the user wrote."""

import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jax.experimental.layout import Format, Layout
from jax.sharding import AxisType, NamedSharding, PartitionSpec

import sbp
from sbp.errors import SbpWarning

MESH = jax.sharding.AbstractMesh((2, 4), ("x", "y"))
AUTO = jax.sharding.AbstractMesh((2, 4), ("x", "y"), axis_types=(AxisType.Auto,) * 2)
EXPLICIT = jax.sharding.AbstractMesh((2, 4), ("x", "y"), axis_types=(AxisType.Explicit,) * 2)
ROWS = NamedSharding(AUTO, PartitionSpec("x"))
CONCRETE_ROWS = NamedSharding(sbp.make_mesh((2, 4), ("x", "y")), PartitionSpec("x"))
HOST = ROWS.with_memory_kind("pinned_host")
X = jax.ShapeDtypeStruct((8, 4), jnp.float32)
constrain = lax.with_sharding_constraint
offloading = jax.checkpoint_policies.save_and_offload_only_these_names(
    names_which_can_be_saved=[],
    names_which_can_be_offloaded=["a"],
    offload_src="device",
    offload_dst="pinned_host",
)


def said(fn):
    """The code of each warning of a plan with the line, counted from the function's own."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        plan = sbp.jit(fn, MESH, hardware="tpu-v5e").plan(X)
    first = fn.__wrapped__.__code__ if hasattr(fn, "__wrapped__") else fn.__code__
    found = [
        (d.code, d.primary.span.line - first.co_firstlineno)
        for d in plan.report().diagnostics
        if d.code.startswith("ignored") and d.primary
    ]
    assert [str(w.message).split(":")[0] for w in caught] == [code for code, _ in found]
    assert all(w.category is SbpWarning for w in caught)
    return found


CONSTRAINT, MEMORY = "ignored-constraint", "ignored-memory"


def forward(x):
    return constrain(jnp.sin(x), ROWS)


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


def put(x):
    return jax.device_put(jnp.sin(x), ROWS)


def put_on_a_device(x):
    return jax.device_put(jnp.sin(x), jax.devices()[0])


def explicit(x):
    return jax.sharding.reshard(jnp.sin(x), NamedSharding(EXPLICIT, PartitionSpec("x")))


def inner_jit(x):
    return jax.jit(jnp.sin, out_shardings=ROWS)(x)


def to_host_and_back(x):
    y = jax.device_put(jnp.sin(x), jax.memory.Space.Host)
    return jax.device_put(y, jax.memory.Space.Device) + 1


def to_where_it_is(x):
    """All values stay in the devices' own memory: this asks for what holds."""
    return jax.device_put(jnp.sin(x), jax.memory.Space.Device) * 2


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


@pytest.mark.parametrize(
    ("fn", "expected"),
    [
        (forward, [(CONSTRAINT, 1)]),
        (in_gradient, [(CONSTRAINT, 2)]),
        (in_gradient_alone, [(CONSTRAINT, 2)]),
        (in_scan, [(CONSTRAINT, 2)]),
        (in_gradient_of_scan, [(CONSTRAINT, 2)]),
        (gradient_in_scan, [(CONSTRAINT, 4)]),
        (in_remat, [(CONSTRAINT, 3)]),
        (in_remat_of_scan, [(CONSTRAINT, 3)]),
        (in_vmap, [(CONSTRAINT, 2)]),
        (of_a_gradient, [(CONSTRAINT, 2)]),
        (many_times, [(CONSTRAINT, 2)]),
        (two_lines, [(CONSTRAINT, 1), (CONSTRAINT, 2)]),
        (put, [(CONSTRAINT, 1)]),
        (put_on_a_device, [(CONSTRAINT, 1)]),
        (explicit, [(CONSTRAINT, 1)]),
        (inner_jit, [(CONSTRAINT, 1)]),
        (to_host_and_back, [(MEMORY, 1)]),
        (to_where_it_is, []),
        (in_a_layout, [(CONSTRAINT, 1)]),
        (with_memory_kind, [(CONSTRAINT, 1), (MEMORY, 1)]),
        (offloaded, [(MEMORY, 5)]),
    ],
    ids=lambda v: v.__name__ if callable(v) else "",
)
def test_what_the_user_wrote_is_said_once(fn, expected):
    assert said(fn) == expected


def constants(x):
    return x + jnp.asarray(np.ones((8, 4))) + jax.device_put(jnp.float32(1)) + jnp.zeros((8, 4))


def test_what_jax_adds_is_not_said():
    with jax.set_mesh(jax.make_mesh((2, 4), ("x", "y"))):
        assert said(constants) == []


@pytest.mark.parametrize(
    ("fn", "call"),
    [
        (lambda x: jnp.array(x * 2, device=CONCRETE_ROWS), "device= of array"),
        (lambda x: jnp.asarray(x * 2, device=CONCRETE_ROWS), "device= of asarray"),
        (lambda x: x + jnp.asarray(np.ones((8, 4)), device=CONCRETE_ROWS), "device= of asarray"),
        (lambda x: x + jnp.arange(4.0, device=CONCRETE_ROWS), "device= of arange"),
        (lambda x: (x * 2).to_device(CONCRETE_ROWS), "device= of to_device"),
        (lambda x: jax.device_put(x * 2, ROWS), "device_put"),
        (lambda x: constrain(x * 2, ROWS), "with_sharding_constraint"),
        (inner_jit, "in_shardings or out_shardings of jax.jit"),
        (offloaded, "the offload of a checkpoint policy to host memory"),
    ],
)
def test_a_warning_names_what_the_user_wrote(fn, call):
    with pytest.warns(SbpWarning, match=f"^ignored-[a-z]+: {call} at .* has no effect"):
        sbp.jit(fn, MESH, hardware="tpu-v5e").plan(X)


def test_the_value_is_what_it_was():
    x = np.arange(8.0, dtype=np.float32)
    mesh = sbp.make_mesh((2, 4), ("x", "y"))
    own = NamedSharding(mesh, PartitionSpec("x"))
    with pytest.warns(SbpWarning, match="ignored-constraint: device_put at .* has no effect"):
        y = sbp.jit(lambda x: jax.device_put(x * 2, own), mesh)(x)
    np.testing.assert_array_equal(y, x * 2)
