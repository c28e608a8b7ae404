"""`sbp.Padded` by itself: its values, what JAX and files make of it, and bad input."""

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
from sbp.run.padding import Padding
from sbp.types import NdSbp, Split

W = np.random.default_rng(0).normal(size=(13, 7)).astype(np.float32)
TYPES = ("x:S(0)", "y:S(1)", "x:S(0) y:S(0)", "x:S(1) y:S(0)", "B")
SBP: Any = sbp  # wrong calls are meant here


@pytest.fixture(scope="module")
def mesh():
    return jax.make_mesh((2, 4), ("x", "y"))  # Explicit axes, which is what users have


@pytest.mark.parametrize("t", TYPES)
def test_an_array_in_and_out(mesh, t):
    whole = NamedSharding(mesh, PartitionSpec())
    for x in (W, W.tolist(), jnp.asarray(W), jax.device_put(W, whole)):
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
    shapes = {"w": shape, "moments": [shape]}
    path = Path(tmp_path) / "state"
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(path, state)
    for target in (state, shapes):
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
    rows = NamedSharding(mesh, PartitionSpec("x"), memory_kind="pinned_host")
    x = np.arange(math.prod(shape), dtype=np.float32).reshape(shape)
    one = SingleDeviceSharding(jax.devices()[0], memory_kind="pinned_host")
    arrays = jax.device_put(x, there), jax.device_put(x, one)
    asked = sbp.Padded.of(x, rows, mesh)
    for held in (asked, *(sbp.Padded.of(a, "x:S(0)", mesh) for a in arrays)):
        assert held.parts.sharding.memory_kind == "pinned_host"
        np.testing.assert_array_equal(held, x)
    target = sbp.Padded.of(jax.ShapeDtypeStruct(shape, x.dtype, sharding=there), "x:S(0)", mesh)
    assert target.parts.sharding.memory_kind == "pinned_host"
    f = sbp.jit(lambda w: jax.device_put(w, jax.memory.Space.Device) + 1, mesh)
    np.testing.assert_array_equal(f(asked), x + 1)


BAD = {
    "parts of the true shape": (
        lambda m: sbp.Padded(W, W.shape, "x:S(0)", m),
        "Padded: parts of shape \\(13, 7\\), but \\(13, 7\\) under x:S\\(0\\) is padded to "
        "\\(14, 7\\); sbp.Padded.of",
    ),
    "no parts": (
        lambda m: SBP.Padded([1.0], (1,), "B", m),
        "Padded takes a padded array for `parts`, got \\[1.0\\]",
    ),
    "no shape": (
        lambda m: SBP.Padded(W, 13, "B", m),
        "Padded takes a tuple of whole numbers.* for `shape`, got 13",
    ),
    "no type": (lambda m: SBP.Padded.of(W, 3, m), "takes a type without P, .* for `type`, got 3"),
    "no mesh": (
        lambda m: SBP.Padded.of(W, "x:S(0)", None),
        "Padded.of takes a jax.sharding.Mesh or an AbstractMesh for `mesh`",
    ),
    "no array": (
        lambda m: sbp.Padded.of("text", "x:S(0)", m),
        "Padded.of takes an array for `x`, got 'text'",
    ),
    "no part of the whole": (
        lambda m: sbp.Padded.of(W, "x:S(0)", m, shape=(14, 7)),
        "Padded.of: an array of shape \\(13, 7\\) is neither the whole, \\(14, 7\\), nor",
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
    "entry of no type": (lambda m: SBP.padded(3), "type-syntax: a type is"),
    "entry of an atom": (lambda m: SBP.padded(sbp.S(0)), "alone names no mesh axis"),
    "entry of an unknown axis": (
        lambda m: sbp.jit(lambda x: x, m, in_types=sbp.padded("z:S(0)")),
        "unknown-axis",
    ),
    "parts that JAX replaced": (
        lambda m: sbp.jit(lambda x: x, m)(jax.tree.map(lambda a: None, sbp.Padded.of(W, "B", m))),
        "input x is Padded\\(\\(13, 7\\), B\\) and has parts that are no array, None",
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
        "this Padded has parts that are no array, None",
    ),
    "a file of a shape": (
        lambda m: pickle.dumps(sbp.Padded.of(jax.ShapeDtypeStruct((13,), np.float32), "x:S(0)", m)),
        "has no elements",
    ),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_input_says_what_to_change(mesh, name):
    program, wanted = BAD[name]
    with pytest.raises(sbp.SbpError, match=wanted):
        program(mesh)


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


def test_keys_are_padded_by_their_words():
    keys = jax.random.split(jax.random.key(1), 5)
    padding = Padding((5,), ((4,),))
    back = padding.cut(padding.pad(keys))
    assert back.dtype == keys.dtype
    np.testing.assert_array_equal(jax.random.key_data(back), jax.random.key_data(keys))
