"""Corners of values and types: NaN in an extreme, bits, empty tensors, callbacks, statics, uneven
free types; and bad input."""

import copy
import itertools
import math
import pickle
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest
from jax.sharding import AbstractMesh, NamedSharding, PartitionSpec, SingleDeviceSharding

import sbp
from sbp.run.arrays import Padding
from sbp.types import NdSbp, Split
from tests.same import checked_plan, refused

GRID = np.arange(64, dtype=np.float32).reshape(8, 8) - 20


@pytest.fixture(scope="module")
def mesh():
    return jax.make_mesh((2, 4), ("x", "y"))  # Explicit axes, which is what users have


def test_a_partial_value_times_an_infinity():
    """It may be NaN in place of an infinity (docs/types.md), unless it is reduced first."""
    line, x, y = sbp.make_mesh((8,), ("x",)), np.ones((2, 16), np.float32), np.ones((16, 2))
    x[:, ::3] = -2.5
    by = np.array([np.inf, 3], np.float32)
    product = lambda x, y: sbp.split(x, 1, "x") @ sbp.split(y, 0, "x")
    want = (x @ y) * by
    early = sbp.jit(lambda x, y, by: sbp.replicate(product(x, y)) * by, line)(x, y, by)
    np.testing.assert_array_equal(early, want)
    late = sbp.jit(lambda x, y, by: product(x, y) * by, line)(x, y, by)
    np.testing.assert_array_equal(late[:, 1], want[:, 1])
    assert not np.isfinite(late[:, 0]).any()


@pytest.mark.parametrize("shape", [(2, 2), (8, 8), (3, 4, 6)])
@pytest.mark.parametrize("transform", ["fft", "rfft", "fft2"])
def test_a_transform_that_is_read_by_columns(shape, transform):
    """XLA for CPU refuses a transform whose result lies column by column."""
    checked_plan(
        lambda x: sbp.split(jnp.abs(getattr(jnp.fft, transform)(x)), len(shape) - 1, "x"),
        sbp.make_mesh((8,), ("x",)),
        np.arange(np.prod(shape), dtype=np.float32).reshape(shape),
        atol=1e-3,
    )


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
    whole = lambda i: jax.lax.reduce(i, np.int32(0), jax.lax.bitwise_or, (0,))
    ints = GRID.astype(np.int32)
    for place in (lambda y: sbp.split(y, 0, "x"), sbp.replicate):
        f = sbp.jit(
            lambda i, place=place: place(sbp.partial(whole(sbp.split(i, 0, "x")), "x", op="or")),
            mesh,
        )
        np.testing.assert_array_equal(f(ints), np.bitwise_or.reduce(ints, axis=0))
        g = sbp.jit(lambda b, place=place: place(sbp.split(b, 0, "x").all(0)), mesh)
        np.testing.assert_array_equal(g(GRID > -20), (GRID > -20).all(0))


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


def test_uneven_boundary_with_a_free_axis(mesh):
    f = sbp.jit(lambda x: x * 2, mesh, in_types=("x:S(0) y:?",), out_types="x:S(0) y:?")
    with pytest.warns(sbp.SbpWarning, match="uneven-boundary"):
        np.testing.assert_array_equal(f(GRID[:7]), GRID[:7] * 2)


def test_partial_in_and_out(mesh):
    f = sbp.jit(lambda u, v: u @ v, mesh, in_types=("y:S(1)", "y:S(0)"), out_types="y:P(sum)")
    p = f(GRID, GRID)
    assert isinstance(p, sbp.Partial) and f.plan(GRID, GRID).cost.bytes_per_device == 0
    np.testing.assert_allclose(p.reduce(), GRID @ GRID, rtol=1e-6)
    g = sbp.jit(lambda p: p * 2, mesh, in_types=("y:P(sum)",))
    np.testing.assert_allclose(g(p), 2 * (GRID @ GRID), rtol=1e-6)
    (h,) = sbp.jit(lambda d: [d[0] * 2], mesh, in_types="y:P(sum)")([p])
    np.testing.assert_allclose(h, 2 * (GRID @ GRID), rtol=1e-6)


@pytest.mark.parametrize(
    ("held", "x"),
    [
        *((f"y:P({op})", np.arange(8, dtype=np.int16)) for op in ("sum", "prod")),
        # XLA's CPU collectives have no reduction of bits, and drop NaN.
        ("x:P(or) y:P(or)", np.array([3, 0, 7, 12], np.uint32)),
        ("x:P(and) y:P(and)", np.array([3, 0, 7, 12], np.int8)),
        ("x:P(or) y:P(or)", np.array([True, False, True, True])),
        ("x:P(max) y:P(max)", np.array([3, 0, 7, np.nan], np.float32)),
    ],
)
def test_partial_keeps_its_dtype(mesh, held, x):
    p = sbp.jit(lambda x: x, mesh, out_types=held)(x)
    assert p.reduce().dtype == x.dtype
    np.testing.assert_array_equal(p.reduce(), x)


SLICED = {
    "slice, then shard": (lambda x, i: jax.lax.dynamic_slice(x, (i,), (6,)), None, "x:S(0)"),
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


@pytest.mark.parametrize(("fn", "held", "out"), SLICED.values(), ids=SLICED)
def test_indices_outside_a_shard_stay_outside(mesh, fn, held, out):
    """XLA below JAX 0.12 merges the slice B -> S with the program's own, without its clamp."""
    x = np.arange(7, dtype=np.float32)
    f = sbp.jit(fn, mesh, in_types=(held, None), out_types=out)
    for i in (-20, -1, 1, 4, 6, 9, 40):
        np.testing.assert_array_equal(f(x, np.int32(i)), jax.jit(fn)(x, np.int32(i)))


def test_views_of_donated_shards_keep_their_numbers(mesh):
    """JAX copies a shard that NumPy looks at instead of donating it; the others are donated."""
    plan = sbp.jit(lambda s: s + 1, mesh, in_types="x:S(0)", donate_argnums=0).plan(jnp.zeros(8))
    state, views = jax.device_put(jnp.zeros(8), plan.in_shardings[0]), []
    for _ in range(5):
        state = plan(state)
        views.append(np.asarray(state.addressable_shards[0].data))
    jax.tree.map(
        np.testing.assert_array_equal,
        views,
        [np.full(view.shape, k + 1, np.float32) for k, view in enumerate(views)],
    )


SBP: Any = sbp  # wrong calls are meant here

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
        "mesh-devices: .*16 devices, but JAX has only 8",
    ),
    "not partial": (
        lambda m: sbp.jit(lambda x: x, m, in_types=("x:P(sum)",))(GRID),
        "not-partial: input x",
    ),
    "policy": (
        lambda m: SBP.jit(lambda x: x, m, boxing="explict"),
        'did you mean "explicit"',
    ),
    "hardware": (lambda m: sbp.jit(lambda x: x, m, hardware="tpu-v33"), 'did you mean "tpu-v3"'),
    "split order": (
        lambda m: sbp.jit(lambda x: x, m, in_types=(PartitionSpec(("y", "x")),)),
        "bad-placement: .*name them in the order of the mesh",
    ),
    "abstract mesh": (
        lambda m: sbp.jit(lambda x: x, AbstractMesh((2,), ("a",)))(GRID),
        "abstract-mesh",
    ),
    "entry count": (
        lambda m: sbp.jit(lambda x, y: x, m, in_types=("B",))(GRID, GRID),
        "1 entry for 2",
    ),
    "no array": (lambda m: sbp.jit(lambda x: x, m)("text"), "input x is not an array: str"),
    "sum of booleans": (
        lambda m: sbp.jit(lambda x: sbp.partial(x > 0, "x"), m)(GRID),
        "an array of bool cannot be P\\(sum\\)",
    ),
    "axis by number": (lambda m: SBP.split(GRID, 0, 1), "the name of a mesh axis"),
    "memory limit": (
        lambda m: SBP.jit(lambda x: x, m, memory_limit="2GB"),
        "bytes per device, a number above 0",
    ),
    "two monoids": (lambda m: sbp.annotate(GRID, x=sbp.P, y=sbp.P("max")), "mixed-monoids"),
    "reduce_dtype alone": (
        lambda m: sbp.annotate(GRID, reduce_dtype=jnp.float32),
        "annotate needs a type",
    ),
    "text of an entry": (
        lambda m: sbp.jit(lambda x: x, m, in_types=({"w": "x:S0"},)),
        r"type-syntax: in_types\[0\]\['w'\]: ",
    ),
    "Padded in JAX": (
        lambda m: jnp.sum(SBP.Padded.of(W, "x:S(0)", m)),
        "not an array until you call its .full",
    ),
    "partial sum for a maximum": (
        lambda m: sbp.jit(lambda x: x, m).plan(sbp.Partial(GRID[:2], sbp.parse("x:P(max)")))(
            sbp.Partial(GRID[:2], sbp.parse("x:P(sum)"))
        ),
        r"is float32\[.*\] as x:P\(sum\), but the plan takes float32\[.*\] as x:P\(max\)",
    ),
    "Partial of another mesh": (
        lambda m: sbp.jit(lambda x: x, m)(sbp.Partial(GRID[:5], sbp.parse("x:P(sum)"))),
        r"input x is a Partial of x:P\(sum\) with parts \(5,\), which do not fit the mesh",
    ),
    "plan inside of jit": (
        lambda m: jax.jit(sbp.jit(lambda x: x, m).plan(GRID))(GRID),
        "a plan does not run inside another transformation",
    ),
    "dim by name": (lambda m: SBP.split(GRID, "rows", "x"), "a dim number, as in split"),
    **{
        f"partial value in {name}": (
            lambda m, use=use: use(sbp.Partial(GRID, sbp.parse("x:P(sum)"))),
            "not an array until you call its .reduce",
        )
        for name, use in {
            "NumPy": np.asarray,
            "JAX": lambda p: jnp.sum(p),
            "a sum": lambda p: 1 + p,
        }.items()
    },
    "device order": (
        lambda m: sbp.jit(lambda x: sbp.shard(x, np.arange(8)[::-1].reshape(2, 4)), m)(GRID),
        "bad-placement",
    ),
}


@pytest.mark.parametrize("index", [-9, -1, 0, 3, 4, 6, 7, 9])
def test_a_lone_index_outside_the_shard_changes_nothing(index):
    """XLA's CPU compiler in JAX 0.10 merges the slice that makes the shard with the element that a
    lone index hits, without the bound."""
    x = np.arange(8, dtype=np.float32).reshape(1, 8)

    def both(x, k):
        split = sbp.split(x, 1, "x")
        return split.at[:, k].add(100.0), split.at[:, k].set(7.0), split[:, k], x + 1

    f = sbp.jit(both, sbp.make_mesh((2,), ("x",)), in_types="B")
    jax.tree.map(
        np.testing.assert_array_equal, f(x, np.int32(index)), jax.jit(both)(x, np.int32(index))
    )


SAME = {
    # Its equation names the dim by an integer of NumPy.
    "vmapped argmax": (
        jax.vmap(lambda v: jnp.argmax(v, 0, keepdims=True)),
        (np.arange(12.0, dtype=np.float32).reshape(6, 2),),
    ),
    "Fortran's order": (lambda x: x.ravel(order="F"), (np.arange(8.0).reshape(1, 4, 2),)),
    "Fortran's order of a split dim": (
        lambda x: sbp.split(x, 1, "x").reshape(2, 4, order="F"),
        (np.arange(8.0).reshape(4, 2),),
    ),
    "gradient in groups": (
        # Of a convolution: a reshape that names an order of dims.
        jax.grad(
            lambda x, w: (
                jax.lax.conv_general_dilated(x, w, (1,), "VALID", feature_group_count=2) ** 2
            ).sum(),
            argnums=(0, 1),
        ),
        (np.arange(8.0).reshape(1, 4, 2), np.arange(1, 9.0).reshape(4, 2, 1)),
    ),
    "argmax of booleans": (lambda x: jnp.argmax(sbp.split(x > 3, 0, "x")), (np.arange(5),)),
}


@pytest.mark.parametrize(("fn", "args"), SAME.values(), ids=SAME)
def test_a_program_has_the_values_of_one_device(fn, args):
    args = tuple(map(jnp.asarray, args))
    jax.tree.map(
        np.testing.assert_array_equal, sbp.jit(fn, sbp.make_mesh((2,), ("x",)))(*args), fn(*args)
    )


@pytest.mark.parametrize("hardware", sorted(sbp.HARDWARE))
def test_a_plan_on_an_abstract_mesh_lowers(hardware):
    """Without devices the program is lowered for the platform of the hardware."""
    plan = sbp.jit(
        lambda x, w: (x @ w).sum(),
        AbstractMesh((4,), ("d",)),
        in_types=("d:S(1)", "d:S(0)"),
        hardware=hardware,
    ).plan(*(jax.ShapeDtypeStruct(s, jnp.float32) for s in ((8, 16), (16, 8))))
    assert plan.lower().as_text().count("stablehlo.all_reduce") == 1


@pytest.mark.parametrize("limit", [np.int64(10**6), np.float32(1e6), 10**6])
def test_a_memory_limit_is_any_number(mesh, limit):
    assert (
        sbp.jit(lambda x: x @ x.T, mesh, memory_limit=limit).plan(GRID).cost.peak_memory_bytes
        <= 1e6
    )


# ---- device assignment ---------------------------------------------------------------------------
# GShard's `shard(device_assignment)` (Lepikhin et al., 2020, section 3.2 and appendix A.3): which
# slice lies on which device.


CUBE = np.arange(3 * 16 * 64, dtype=np.float32).reshape(3, 16, 64)


@pytest.mark.parametrize(
    ("sizes", "ids"),
    [
        ((2, 4), np.arange(8).reshape(1, 2, 4)),
        ((4, 2), np.arange(8).reshape(4, 2).T[None]),
    ],
    ids=["rows", "columns"],
)
def test_a_device_assignment_places_each_slice_on_its_device(sizes, ids):
    """S1: [3, 16, 64] over an assignment of shape [1, 2, 4] has parts of [3, 8, 16]; the id at a
    position of the assignment has the slice at that position."""
    mesh = sbp.make_mesh(sizes, ("x", "y"))
    found = sbp.jit(lambda x: sbp.shard(x * 1, ids), mesh)(CUBE)
    shards = {shard.device: np.asarray(shard.data) for shard in found.addressable_shards}
    devices = mesh.devices.ravel()
    for (_, i, j), number in np.ndenumerate(ids):
        part = shards[devices[number]]
        assert part.shape == (3, 8, 16)
        np.testing.assert_array_equal(part, CUBE[:, 8 * i : 8 * i + 8, 16 * j : 16 * j + 16])
    assert isinstance(found, jax.Array) and found.shape == CUBE.shape


def test_annotations_keep_shape_and_value():
    """S2: every placement of a tensor on a 2 x 4 mesh, partial ones included."""
    places = [sbp.S(0), sbp.S(1), sbp.S(2), sbp.B, sbp.P]
    every = lambda x: [sbp.annotate(x, x=a, y=b) for a in places for b in places]
    found = sbp.jit(every, sbp.make_mesh((2, 4), ("x", "y")), in_types=("B",), out_types="B")(CUBE)
    np.testing.assert_array_equal(np.stack(found), np.stack([CUBE] * 25), strict=True)


# ---- padded --------------------------------------------------------------------------------------
# `sbp.Padded` by itself: its values, what JAX and files make of it, and bad input.


W = np.random.default_rng(0).normal(size=(13, 7)).astype(np.float32)
TYPES = ("x:S(0)", "y:S(1)", "x:S(0) y:S(0)", "x:S(1) y:S(0)", "B")


@pytest.mark.parametrize("t", TYPES)
def test_an_array_in_and_out(mesh, t):
    for x in (
        W,
        W.tolist(),
        jnp.asarray(W),
        jax.device_put(W, NamedSharding(mesh, PartitionSpec())),
    ):
        held = sbp.Padded.of(x, t, mesh)
        assert (held.shape, held.ndim, held.size, held.dtype) == ((13, 7), 2, 91, np.float32)
        assert held.type == sbp.parse(t) and repr(held) == f"Padded((13, 7), {t})"
        np.testing.assert_array_equal(np.asarray(held), W)
        np.testing.assert_array_equal(held.full(), W)
        assert held.full().sharding.is_fully_replicated
    parts = sbp.jit(lambda w: w, mesh, out_types=sbp.padded(t))(W).parts
    np.testing.assert_array_equal(sbp.Padded.of(W, t, mesh).parts, parts)
    assert held.parts.sharding.is_equivalent_to(parts.sharding, 2)


def test_it_is_smaller_than_a_copy_on_each_device(mesh):
    held = sbp.Padded.of(W, "x:S(0) y:S(0)", mesh)
    assert {s.data.shape for s in held.parts.addressable_shards} == {(2, 7)}


@pytest.mark.parametrize("shape", [(3,), (1,), (0,), (0, 7), (1, 1), (8, 3)], ids=str)
def test_dims_smaller_than_the_mesh(mesh, shape):
    x = np.arange(np.prod(shape), dtype=np.float32).reshape(shape)
    held = sbp.Padded.of(x, "x:S(0) y:S(0)", mesh)
    assert held.shape == shape and np.asarray(held).shape == shape
    np.testing.assert_array_equal(held.full(), x)


@pytest.mark.parametrize("t", TYPES)
def test_saved_by_pickle_and_numpy(mesh, t, tmp_path):
    held = sbp.Padded.of(W, t, mesh)
    back = pickle.loads(pickle.dumps(held))
    assert jax.tree.structure(back) == jax.tree.structure(held)
    np.testing.assert_array_equal(back, W)
    np.testing.assert_array_equal(sbp.jit(lambda w: w * 2, mesh)(back), W * 2)
    np.save(tmp_path / "w.npy", held)
    np.testing.assert_array_equal(np.load(tmp_path / "w.npy"), W)
    for copied in (copy.copy(held), copy.deepcopy(held)):
        assert isinstance(copied.parts, jax.Array)
        np.testing.assert_array_equal(copied, W)


def test_saved_by_orbax(mesh, tmp_path):
    """A checkpoint is restored into the state that was saved, or into shapes."""
    t = "x:S(0) y:S(0)"
    w = sbp.Padded.of(W, t, mesh)
    state = {"w": w, "moments": [sbp.Padded.of(W * W, t, mesh)]}
    shape = sbp.Padded.of(jax.ShapeDtypeStruct(W.shape, W.dtype), t, mesh)
    path = Path(tmp_path) / "state"
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(path, state)
    for target in (state, {"w": shape, "moments": [shape]}):
        with ocp.StandardCheckpointer() as checkpointer:
            back = checkpointer.restore(path, target)
        assert jax.tree.structure(back) == jax.tree.structure(state)
        assert back["w"].parts.sharding.is_equivalent_to(w.parts.sharding, 2)
        np.testing.assert_array_equal(back["w"], W)
        np.testing.assert_array_equal(back["moments"][0], W * W)


def test_as_a_pytree_it_is_a_node_with_one_leaf(mesh):
    held = sbp.Padded.of(W, "x:S(0)", mesh)
    ((path, leaf),) = jax.tree_util.tree_leaves_with_path({"w": held})
    assert jax.tree_util.keystr(path) == "['w'].parts" and leaf is held.parts
    np.testing.assert_array_equal(jax.tree.map(lambda a, b: a + b, held, held), W * 2)
    assert jax.block_until_ready(held) is held
    np.testing.assert_array_equal(jax.jit(lambda held: 3 * held.full())(held), W * 3)
    np.testing.assert_array_equal(jax.tree.map(np.asarray, held).full(), W)


def test_keys(mesh):
    keys = jax.random.split(jax.random.key(0), 5)
    held = sbp.Padded.of(keys, "y:S(0)", mesh)
    assert held.parts.shape == (8,)
    np.testing.assert_array_equal(jax.random.key_data(held.full()), jax.random.key_data(keys))


@pytest.mark.parametrize("shape", [(13, 7), (16, 8)], ids=str)
def test_an_array_in_host_memory_stays_there(mesh, shape):
    """Also one that the type asks for there, which is a sharding."""
    there = NamedSharding(mesh, PartitionSpec(), memory_kind="pinned_host")
    x = np.arange(math.prod(shape), dtype=np.float32).reshape(shape)
    one = SingleDeviceSharding(jax.devices()[0], memory_kind="pinned_host")
    arrays = jax.device_put(x, there), jax.device_put(x, one)
    asked = sbp.Padded.of(
        x, NamedSharding(mesh, PartitionSpec("x"), memory_kind="pinned_host"), mesh
    )
    for held in (asked, *(sbp.Padded.of(a, "x:S(0)", mesh) for a in arrays)):
        assert held.parts.sharding.memory_kind == "pinned_host"
        np.testing.assert_array_equal(held, x)
    target = sbp.Padded.of(jax.ShapeDtypeStruct(shape, x.dtype, sharding=there), "x:S(0)", mesh)
    assert target.parts.sharding.memory_kind == "pinned_host"
    f = sbp.jit(lambda w: jax.device_put(w, jax.memory.Space.Device) + 1, mesh)
    np.testing.assert_array_equal(f(asked), x + 1)


BAD_PADDED = {
    "parts of the true shape": (
        lambda m: sbp.Padded(W, W.shape, "x:S(0)", m),
        "Padded: parts of shape \\(13, 7\\), but \\(13, 7\\) under x:S\\(0\\) is padded to "
        "\\(14, 7\\); sbp.Padded.of",
    ),
    "no parts": (
        lambda m: SBP.Padded([1.0], (1,), "B", m),
        "Padded: `parts` must be a padded array, got \\[1.0\\]",
    ),
    "no shape": (
        lambda m: SBP.Padded(W, 13, "B", m),
        "Padded: `shape` must be a tuple of whole numbers.*, got 13",
    ),
    "no type": (lambda m: SBP.Padded.of(W, 3, m), "`type` must be a type without P, .*, got 3"),
    "no mesh": (
        lambda m: SBP.Padded.of(W, "x:S(0)", None),
        "Padded.of: `mesh` must be a jax.sharding.Mesh or an AbstractMesh",
    ),
    "no array": (
        lambda m: sbp.Padded.of("text", "x:S(0)", m),
        "Padded.of takes an array for `x`, got 'text'",
    ),
    "no part of the whole": (
        lambda m: sbp.Padded.of(W, "x:S(0)", m, shape=(14, 7)),
        "Padded.of: the array has shape \\(13, 7\\); pass the whole array, of shape",
    ),
    "partial": (lambda m: sbp.Padded.of(W, "x:P(sum)", m), "Padded: x:P\\(sum\\) has P"),
    "free axis": (lambda m: sbp.Padded.of(W, "x:?", m), "Padded: x:\\? has a free axis"),
    "unknown axis": (lambda m: sbp.Padded.of(W, "z:S(0)", m), "unknown-axis: .* no axis 'z'"),
    "dim out of range": (lambda m: sbp.Padded.of(W, "x:S(2)", m), "dim-out-of-range: x:S\\(2\\)"),
    "abstract mesh": (
        lambda m: sbp.Padded.of(W, "x:S(0)", AbstractMesh((2,), ("x",))),
        "abstract-mesh: Padded.of",
    ),
    "entry of P": (lambda m: sbp.padded("x:P(sum)"), "sbp.padded takes a type without P"),
    "entry of no type": (lambda m: SBP.padded(3), "type-syntax: a type must be"),
    "entry of an atom": (lambda m: SBP.padded(sbp.S(0)), "alone names no mesh axis"),
    "entry of an unknown axis": (
        lambda m: sbp.jit(lambda x: x, m, in_types=sbp.padded("z:S(0)")),
        "unknown-axis",
    ),
    "parts that JAX replaced": (
        lambda m: sbp.jit(lambda x: x, m)(jax.tree.map(lambda a: None, sbp.Padded.of(W, "B", m))),
        "input x is Padded\\(\\(13, 7\\), B\\) and has parts that are not an array, None",
    ),
    "parts that the user cut": (
        lambda m: sbp.jit(lambda w: w, m)(
            {"a": jax.tree.map(lambda a: np.asarray(a)[:3], sbp.Padded.of(W, "x:S(0)", m))}
        ),
        "input w\\['a'\\] is .* has parts of shape \\(3, 7\\), which are not \\(14, 7\\)",
    ),
    "an input pinned partial": (
        lambda m: sbp.jit(lambda x: x, m, in_types="x:P(sum)")(sbp.Padded.of(W, "x:S(0)", m)),
        "not-partial: input x",
    ),
    "shapes in place of arrays": (
        lambda m: sbp.jit(lambda x: x, m)(
            sbp.Padded.of(jax.ShapeDtypeStruct((13, 7), np.float32), "x:S(0)", m)
        ),
        "input x is a ShapeDtypeStruct",
    ),
    "values of a shape": (
        lambda m: np.asarray(sbp.Padded.of(jax.ShapeDtypeStruct((13, 7), np.float32), "B", m)),
        "has no elements",
    ),
    "the whole of a shape": (
        lambda m: sbp.Padded.of(jax.ShapeDtypeStruct((13, 7), np.float32), "x:S(0)", m).full(),
        "has no elements",
    ),
    "the whole of nothing": (
        lambda m: jax.tree.map(lambda a: None, sbp.Padded.of(W, "x:S(0)", m)).full(),
        "this Padded has parts that are not an array, None",
    ),
    "a file of a shape": (
        lambda m: pickle.dumps(sbp.Padded.of(jax.ShapeDtypeStruct((13,), np.float32), "x:S(0)", m)),
        "has no elements",
    ),
}


@pytest.mark.parametrize(
    ("program", "wanted"),
    [*BAD.values(), *BAD_PADDED.values()],
    ids=[*BAD, *(f"Padded, {name}" for name in BAD_PADDED)],
)
def test_bad_input_says_what_to_change(mesh, program, wanted):
    refused(f"(?s){wanted}", program, mesh)


# ---- padding -------------------------------------------------------------------------------------
# The blocks of dims that do not divide, and arrays padded to them.


def blocks_of(size: int, counts: tuple[int, ...]) -> list[list[int]]:
    """The elements of each block, dealt out one by one by the formula of nested splits."""
    found: dict[tuple[int, ...], list[int]] = {
        i: [] for i in itertools.product(*map(range, counts))
    }
    for k in range(size):
        where, rest, length = [], k, size
        for n in counts:
            length = -(-length // n)
            where.append(rest // length)
            rest %= length
        found[tuple(where)].append(k)
    return list(found.values())


@pytest.mark.parametrize("counts", [(), (2,), (8,), (2, 4), (4, 2), (2, 2, 2)], ids=str)
def test_blocks_are_those_of_nested_splits(counts):
    for size in (1, 2, 3, 5, 7, 8, 13, 15, 16):
        padding = Padding((2, size), ((), counts))
        blocks = blocks_of(size, counts)
        assert [list(range(*r)) for r in padding.ranges(1)] == blocks
        length = max(map(len, blocks))
        x = np.arange(1, 2 * size + 1).reshape(2, size)
        want = [np.pad(x[:, b], ((0, 0), (0, length - len(b)))) for b in blocks]
        padded = padding.pad(x)
        assert padded.shape == padding.padded_shape
        np.testing.assert_array_equal(padded, np.concatenate(want, 1))
        np.testing.assert_array_equal(padding.cut(np.where(padded, padded, -1)), x)


@pytest.mark.parametrize("dtype", [bool, np.int8, jnp.bfloat16, np.complex64])
def test_arrays_of_jax_and_their_dtypes(dtype):
    t = NdSbp({"a": Split(1), "b": Split(0), "c": Split(1)})
    padding = Padding.of((3, 5), t, (("a", 2), ("b", 4), ("c", 3)))
    x = (jnp.arange(15).reshape(3, 5) % 2).astype(dtype)
    padded = padding.pad(x)
    assert padded.shape == padding.padded_shape == (4, 6) and padded.dtype == x.dtype
    np.testing.assert_array_equal(padding.cut(padded), x)


# ---- constants, scatters and 8-bit floats -------------------------------------------------------


def test_constants_on_explicit_axes():
    """JAX closes over no such array in a region."""
    explicit = jax.make_mesh((8,), ("x",))
    held = lambda x: jax.device_put(x, NamedSharding(explicit, PartitionSpec()))
    table, key = held(np.arange(8, dtype=np.float32)), held(jax.random.key(3))
    f = lambda x: x + table + jax.random.normal(key, (8,))
    want = np.arange(8) + jax.random.normal(jax.random.key(3), (8,))
    np.testing.assert_allclose(sbp.jit(f, explicit)(np.zeros(8, np.float32)), want, rtol=1e-6)


def test_a_callback_in_a_region_on_explicit_axes():
    each = lambda x: jax.pure_callback(np.negative, x, x, vmap_method="sequential")
    f = sbp.jit(sbp.manual(each, "x:S(0)", "x:S(0)"), jax.make_mesh((8,), ("x",)))
    np.testing.assert_array_equal(f(np.ones(8, np.float32)), -np.ones(8))


def test_constant_keys_are_split():
    keys = jax.random.split(jax.random.key(0), 5)
    draw = lambda keys: jax.vmap(lambda k: jax.random.bits(k, (64,)))(keys)
    f = sbp.jit(lambda n: sbp.split(draw(keys), 0, "x") + n, sbp.make_mesh((2,), ("x",)))
    np.testing.assert_array_equal(f(np.uint32(0)), draw(keys))


def test_keys_are_scattered():
    keys, other = jax.random.split(jax.random.key(0), 4), jax.random.key(9)
    two = sbp.make_mesh((2,), ("x",))
    put = lambda keys, key: sbp.split(sbp.split(keys, 0, "x").at[1].set(key), 0, "x")
    got = sbp.jit(put, two)(keys, other)
    want = jax.random.key_data(keys.at[1].set(other))
    np.testing.assert_array_equal(jax.random.key_data(got), want)


def test_a_function_of_an_element_reads_no_part():
    """`x.at[i].apply(f)` is JAX's scatter with another function in it."""
    x, w = np.arange(8, dtype=np.float32).reshape(2, 4), np.ones((4, 3), np.float32)
    held = lambda y: sbp.partial(y, "x")
    product = lambda x, w: held(sbp.split(x, 1, "x") @ w)
    f = lambda x, w: held(product(x, w).at[0].apply(jnp.square))
    got = sbp.jit(f, sbp.make_mesh((2,), ("x",)), out_types="B")(x, w)
    np.testing.assert_allclose(got, (x @ w) * np.array([[6.0], [1.0]]))


@pytest.mark.parametrize("name", ["float8_e4m3fn", "float8_e4m3b11fnuz", "float8_e5m2"])
def test_extremes_of_8_bit_floats(name):
    """Some of them have no infinity."""
    x = np.array([-3, -2, -4, -8, -1], name)
    two = sbp.make_mesh((2,), ("x",))
    f = lambda x: (jnp.max(sbp.split(x, 0, "x")), jax.lax.cummax(sbp.split(x, 0, "x")))
    largest, rising = sbp.jit(f, two)(x)
    assert largest == -1
    np.testing.assert_array_equal(np.asarray(rising, np.float32), [-3, -2, -2, -2, -1])


def test_the_high_word_of_a_signed_product():
    x = np.array([2**30, 5], np.int32)
    two = sbp.make_mesh((2,), ("x",))
    high = lambda x: jax.lax.mulhi(jnp.max(sbp.split(x, 0, "x")), jnp.int32(-12))
    assert sbp.jit(high, two)(x) == -3


def test_a_reshape_with_blocks_of_equal_length():
    """The shards of both sides have other numbers of elements."""
    x = np.arange(72, dtype=np.float32).reshape(3, 6, 4)
    four = sbp.make_mesh((2, 2), ("a", "b"))
    both = "a:S(0) b:S(1)"
    turned = lambda x: sbp.annotate(sbp.annotate(x, both).reshape(4, 6, 3), both)
    np.testing.assert_array_equal(sbp.jit(turned, four)(x), x.reshape(4, 6, 3))
