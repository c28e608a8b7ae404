"""Corners of values and types: NaN in an extreme, bits, empty tensors, callbacks, statics, uneven
free types; and bad input."""

import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import AbstractMesh, NamedSharding, PartitionSpec

import sbp

GRID = np.arange(64, dtype=np.float32).reshape(8, 8) - 20


@pytest.fixture(scope="module")
def mesh():
    return jax.make_mesh((2, 4), ("x", "y"))  # Explicit axes, which is what users have


@pytest.mark.parametrize(
    "dtype", [np.float32, jnp.bfloat16, np.float16], ids=["f32", "bf16", "f16"]
)
@pytest.mark.parametrize("op", ["max", "min"])
def test_extremes_keep_nan_and_infinity(mesh, op, dtype):
    """A NaN in any part is the result, though XLA's CPU collective would drop it."""
    f = sbp.jit(lambda x: sbp.replicate(getattr(sbp.split(x, 0, "x"), op)(0)), mesh)
    with_nan = GRID.copy()
    with_nan[2, 3] = np.nan
    for values in (
        GRID,
        -GRID,
        with_nan,
        np.where(GRID > 10, np.inf, GRID),
        np.where(GRID < 10, -np.inf, GRID),
    ):
        x = jnp.asarray(values, dtype)
        assert any(p.box.steps[0].kind == "all_reduce" for p in f.plan(x).program.boxes())
        np.testing.assert_array_equal(np.asarray(f(x), float), np.asarray(getattr(x, op)(0), float))


def test_bits_reduce_and_scatter(mesh):
    whole = lambda i: lax.reduce(i, np.int32(0), lax.bitwise_or, (0,))
    ints = GRID.astype(np.int32)
    for place in (lambda y: sbp.split(y, 0, "x"), sbp.replicate):
        f = sbp.jit(
            lambda i, place=place: place(sbp.partial(whole(sbp.split(i, 0, "x")), "x", op="or")),
            mesh,
        )
        np.testing.assert_array_equal(f(ints), np.bitwise_or.reduce(ints, axis=0))
        g = sbp.jit(lambda b, place=place: place(sbp.split(b, 0, "x").all(0)), mesh)
        np.testing.assert_array_equal(g(GRID > -20), (GRID > -20).all(0))


def test_empty_tensors(mesh):
    total, rows = sbp.jit(lambda x: (sbp.split(x, 0, "x").sum(), x.sum(1)), mesh)(
        np.zeros((0, 8), np.float32)
    )
    assert float(total) == 0 and rows.shape == (0,)


def test_callbacks_see_whole_values_and_run_once(mesh, capfd):
    def fn(x):
        x = sbp.split(x, 0, "x")
        jax.debug.print("sum {}", x.sum())
        return jax.pure_callback(
            lambda v: np.asarray(v) * 2, jax.ShapeDtypeStruct(x.shape, x.dtype), x
        )

    y = sbp.jit(fn, mesh)(GRID)
    np.testing.assert_array_equal(y, GRID * 2)
    assert y.sharding.mesh == mesh
    jax.effects_barrier()
    assert capfd.readouterr().out.count("sum 736.0") == 1


def test_static_arguments_of_equal_value_and_other_type(mesh):
    f = sbp.jit(lambda x, n: x * n, mesh, static_argnums=1)
    assert f(jnp.arange(4), 1).dtype == np.int32
    assert f(jnp.arange(4), 1.0).dtype == np.float32


def test_uneven_boundary_with_a_free_axis(mesh):
    f = sbp.jit(lambda x: x * 2, mesh, in_types=("x:S(0) y:?",), out_types="x:S(0) y:?")
    with pytest.warns(sbp.SbpWarning, match="uneven-boundary"):
        np.testing.assert_array_equal(f(GRID[:7]), GRID[:7] * 2)


def test_inputs_that_arrive_elsewhere_are_moved_with_a_warning(mesh):
    own = jax.sharding.Mesh(mesh.devices, mesh.axis_names)
    f = sbp.jit(lambda x: x * 2, own, in_types=("x:S(0)",))
    with pytest.warns(sbp.SbpWarning, match="input-moved"):
        y = f(jax.device_put(GRID, NamedSharding(own, PartitionSpec(None, "y"))))
    np.testing.assert_array_equal(y, GRID * 2)


def test_an_arriving_sharding_pins_its_input(mesh):
    own = jax.sharding.Mesh(mesh.devices, mesh.axis_names)
    plan = sbp.jit(lambda x: x * 2, own).plan(
        jax.device_put(GRID, NamedSharding(own, PartitionSpec(None, "y")))
    )
    assert plan.in_types == ((sbp.parse("y:S(1)"),), {})


def test_partial_in_and_out(mesh):
    f = sbp.jit(lambda u, v: u @ v, mesh, in_types=("y:S(1)", "y:S(0)"), out_types="y:P(sum)")
    p = f(GRID, GRID)
    assert isinstance(p, sbp.Partial) and f.plan(GRID, GRID).cost.bytes_per_device == 0
    np.testing.assert_allclose(p.reduce(), GRID @ GRID, rtol=1e-6)
    g = sbp.jit(lambda p: p * 2, mesh, in_types=("y:P(sum)",))
    np.testing.assert_allclose(g(p), 2 * (GRID @ GRID), rtol=1e-6)


@pytest.mark.parametrize("op", ["sum", "prod"])
def test_partial_keeps_its_dtype(mesh, op):
    x = np.arange(8, dtype=np.int16)
    p = sbp.jit(lambda x: x, mesh, out_types=f"y:P({op})")(x)
    assert p.reduce().dtype == np.int16
    np.testing.assert_array_equal(p.reduce(), x)


@pytest.mark.parametrize(
    ("op", "dtype"), [("or", np.uint32), ("and", np.int8), ("or", bool), ("max", np.float32)]
)
def test_partial_reduces_what_xla_cannot_across_devices(mesh, op, dtype):
    """XLA's CPU collectives have no reduction of bits, and drop NaN."""
    x = np.array([3, 0, 7, np.nan] if op == "max" else [3, 0, 7, 12], np.float32).astype(dtype)
    p = sbp.jit(lambda x: x, mesh, out_types=f"x:P({op}) y:P({op})")(x)
    np.testing.assert_array_equal(p.reduce(), x)


SLICED = {
    "slice, then shard": (lambda x, i: lax.dynamic_slice(x, (i,), (6,)), None, "x:S(0)"),
    "shard, then scatter": (
        lambda x, i: sbp.split(x, 0, "x").at[i].add(5.0, mode="drop"),
        "B",
        None,
    ),
    "shard, then minimum": (
        lambda x, i: sbp.split(x, 0, "x").at[i].min(-5.0, mode="drop"),
        "B",
        None,
    ),
}


@pytest.mark.parametrize("name", SLICED)
def test_indices_outside_a_shard_stay_outside(mesh, name):
    """XLA below JAX 0.12 merges the slice B -> S with the program's own, without its clamp."""
    fn, held, out = SLICED[name]
    x = np.arange(7, dtype=np.float32)
    f = sbp.jit(fn, mesh, in_types=(held, None), out_types=out)
    for i in (-20, -1, 1, 4, 6, 9, 40):
        np.testing.assert_array_equal(f(x, np.int32(i)), jax.jit(fn)(x, np.int32(i)))


def test_donated_state_has_one_type(mesh):
    plan = sbp.jit(lambda s, x: (s + x.sum(0), 1.0), mesh, donate_argnums=0).plan(jnp.ones(8), GRID)
    assert plan.out_types[0] == plan.in_types[0][0]


def test_views_of_donated_shards_keep_their_numbers(mesh):
    """JAX copies a shard that NumPy looks at instead of donating it; the others are donated."""
    plan = sbp.jit(lambda s: s + 1, mesh, in_types="x:S(0)", donate_argnums=0).plan(jnp.zeros(8))
    state, views = jax.device_put(jnp.zeros(8), plan.in_shardings[0]), []
    for _ in range(5):
        state = plan(state)
        views.append(np.asarray(state.addressable_shards[0].data))
    for k, view in enumerate(views):
        np.testing.assert_array_equal(view, np.full(view.shape, k + 1, np.float32))


def test_under_another_transformation_it_is_the_plain_function(mesh):
    f = sbp.jit(lambda x: (x * x).sum(), mesh)
    with pytest.warns(sbp.SbpWarning, match="nested-jit"):
        np.testing.assert_array_equal(jax.grad(f)(GRID), 2 * GRID)


WRONG: Any = {
    "policy": "explict",
    "axis": 1,
    "limit": "2GB",
}  # values that a type checker would refuse

BAD = {
    "unknown axis": (
        lambda m: sbp.jit(lambda x: sbp.split(x, 0, "z"), m)(GRID),
        "unknown-axis: .*test_edges.py:.* has no axis 'z'",
    ),
    "unknown axis, near": (
        lambda m: sbp.jit(lambda x: x, m, in_types=("xx:S(0)",)),
        'did you mean "x"',
    ),
    "dim out of range": (
        lambda m: sbp.jit(lambda x: sbp.annotate(x, x=sbp.S(2)), m)(GRID),
        "dim-out-of-range: x:S\\(2\\) .*dims 0..1",
    ),
    "input dim out of range": (
        lambda m: sbp.jit(lambda x: x, m, in_types=("x:S(5)",))(GRID),
        "dim-out-of-range",
    ),
    "type text": (
        lambda m: sbp.jit(lambda x: x, m, in_types=("x:S(0 y",)),
        "type-syntax: .* column 3",
    ),
    "mesh too large": (
        lambda m: sbp.make_mesh((4, 4), ("a", "b")),
        "mesh-devices: .*16 devices, but 8 present",
    ),
    "not partial": (
        lambda m: sbp.jit(lambda x: x, m, in_types=("x:P(sum)",))(GRID),
        "not-partial: input x",
    ),
    "policy": (
        lambda m: sbp.jit(lambda x: x, m, boxing=WRONG["policy"]),
        'did you mean "explicit"',
    ),
    "hardware": (lambda m: sbp.jit(lambda x: x, m, hardware="tpu-v33"), 'did you mean "tpu-v3"'),
    "split order": (
        lambda m: sbp.jit(lambda x: x, m, in_types=(PartitionSpec(("y", "x")),)),
        "bad-placement: .*against the mesh order",
    ),
    "abstract mesh": (
        lambda m: sbp.jit(lambda x: x, AbstractMesh((2,), ("a",)))(GRID),
        "abstract-mesh",
    ),
    "entry count": (
        lambda m: sbp.jit(lambda x, y: x, m, in_types=("B",))(GRID, GRID),
        "1 entries for 2",
    ),
    "no array": (lambda m: sbp.jit(lambda x: x, m)("text"), "input x is no array: str"),
    "sum of booleans": (
        lambda m: sbp.jit(lambda x: sbp.partial(x > 0, "x"), m)(GRID),
        "x:P\\(sum\\) on bool",
    ),
    "axis by number": (lambda m: sbp.split(GRID, 0, WRONG["axis"]), "the name of a mesh axis"),
    "memory limit": (
        lambda m: sbp.jit(lambda x: x, m, memory_limit=WRONG["limit"]),
        "bytes per device, a number above 0",
    ),
    "two monoids": (lambda m: sbp.annotate(GRID, x=sbp.P, y=sbp.P("max")), "mixed-monoids"),
    "device order": (
        lambda m: sbp.jit(lambda x: sbp.shard(x, np.arange(8)[::-1].reshape(2, 4)), m)(GRID),
        "bad-placement",
    ),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_input_says_what_to_change(mesh, name):
    program, wanted = BAD[name]
    with pytest.raises(sbp.SbpError) as error:
        program(mesh)
    assert re.search(wanted, str(error.value), re.DOTALL), str(error.value)


def test_a_memory_limit_that_nothing_meets(mesh):
    with pytest.raises(sbp.SbpTypeError, match="memory-limit"):
        sbp.jit(lambda x: x @ x.T, mesh, memory_limit=64).plan(GRID)


def test_errors_of_the_function_pass_unchanged(mesh):
    with pytest.raises(ZeroDivisionError):
        sbp.jit(lambda x: 1 / 0, mesh)(GRID)


@pytest.mark.parametrize("index", [-9, -1, 0, 3, 4, 6, 7, 9])
def test_a_lone_index_outside_the_shard_changes_nothing(index):
    """XLA's CPU compiler in JAX 0.10 merges the slice that makes the shard with the element that a
    lone index hits, without the bound."""
    mesh = sbp.make_mesh((2,), ("x",))
    x = np.arange(8, dtype=np.float32).reshape(1, 8)

    def both(x, k):
        split = sbp.split(x, 1, "x")
        return split.at[:, k].add(100.0), split.at[:, k].set(7.0), split[:, k], x + 1

    f = sbp.jit(both, mesh, in_types="B")
    for got, want in zip(f(x, np.int32(index)), jax.jit(both)(x, np.int32(index)), strict=True):
        np.testing.assert_array_equal(np.asarray(got), np.asarray(want))


def test_a_vmapped_argmax_along_a_split_dim():
    """Its equation names the dim by an integer of NumPy."""
    mesh = sbp.make_mesh((2,), ("x",))
    x = np.arange(12.0, dtype=np.float32).reshape(6, 2)
    vmapped = jax.vmap(lambda v: jnp.argmax(v, 0, keepdims=True))
    np.testing.assert_array_equal(np.asarray(sbp.jit(vmapped, mesh)(x)), np.asarray(vmapped(x)))


def test_a_reshape_may_transpose_first():
    """Fortran's order, and the gradient of a convolution in groups, are reshapes that name an order
    of dims."""
    mesh = sbp.make_mesh((2,), ("x",))
    x, w = jnp.arange(8.0).reshape(1, 4, 2), jnp.arange(1, 9.0).reshape(4, 2, 1)

    def grouped(x, w):
        return (jax.lax.conv_general_dilated(x, w, (1,), "VALID", feature_group_count=2) ** 2).sum()

    for fn, args in (
        (lambda x: x.ravel(order="F"), (x,)),
        (lambda x: sbp.split(x, 1, "x").reshape(2, 4, order="F"), (x[0],)),
        (jax.grad(grouped, argnums=(0, 1)), (x, w)),
        (lambda x: jnp.argmax(sbp.split(x > 3, 0, "x")), (jnp.arange(5),)),
    ):
        for got, want in zip(
            jax.tree.leaves(sbp.jit(fn, mesh)(*args)), jax.tree.leaves(fn(*args)), strict=True
        ):
            np.testing.assert_array_equal(np.asarray(got), np.asarray(want))


@pytest.mark.parametrize("hardware", sorted(sbp.HARDWARE))
def test_a_plan_on_an_abstract_mesh_lowers(hardware):
    """Without devices the program is lowered for the platform of the hardware."""
    f = sbp.jit(
        lambda x, w: (x @ w).sum(),
        AbstractMesh((4,), ("d",)),
        in_types=("d:S(1)", "d:S(0)"),
        hardware=hardware,
    )
    text = (
        f.plan(
            jax.ShapeDtypeStruct((8, 16), jnp.float32), jax.ShapeDtypeStruct((16, 8), jnp.float32)
        )
        .lower()
        .as_text()
    )
    assert text.count("stablehlo.all_reduce") == 1


@pytest.mark.parametrize("limit", [np.int64(10**6), np.float32(1e6), 10**6])
def test_a_memory_limit_is_any_number(mesh, limit):
    assert (
        sbp.jit(lambda x: x @ x.T, mesh, memory_limit=limit).plan(GRID).cost.peak_memory_bytes
        <= 1e6
    )
