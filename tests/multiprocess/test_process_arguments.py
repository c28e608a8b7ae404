"""Arguments in several processes: NumPy arrays as in `jax.jit`, parts of each process, arrays that
are moved."""

from __future__ import annotations

import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import sbp
from tests.multiprocess.programs import numbers
from tests.multiprocess.world import assert_shards, mesh_of, put

pytestmark = pytest.mark.multiprocess

X = numbers(16, 8)


def times_two(x):
    return x * 2


def test_numpy_arrays_that_are_free_are_one_global_value():
    mesh = mesh_of("2x4")
    f = sbp.jit(lambda x, y, n: (x @ y.T + n, y.sum()), mesh)
    got = f(X, X.astype(np.float64), 3.0)
    sharding = f.plan(X, X, 3.0).in_shardings[0]
    assert not sharding.is_fully_replicated  # so each process took its part
    assert_shards(got, (X @ X.T + 3, X.sum()))


def test_numbers_and_arrays_without_elements():
    fn = lambda x, a, b, empty: (x.sum() + a, b * 2, empty)
    args = X, 3, True, np.zeros((0, 8), np.float32)
    assert_shards(sbp.jit(fn, mesh_of("2x4"))(*args), jax.jit(fn)(*args))


def test_numpy_arrays_are_refused_and_taken_as_in_jax_jit():
    """What is pinned split could be the whole or a part. What is B, is the whole."""
    mesh = mesh_of("2x4")
    for spec in (PartitionSpec("data"), PartitionSpec(None, ("data", "model"))):
        for jit in (jax.jit, lambda fn, **options: sbp.jit(fn, mesh, **options)):
            with pytest.raises(ValueError, match="make_array_from_process_local_data"):
                jit(times_two, in_shardings=NamedSharding(mesh, spec))(X)
    with pytest.raises(sbp.SbpError, match="argument x is pinned data:P\\(sum\\)"):
        parts = sbp.Partial(np.ones((2, 8), np.float32), sbp.NdSbp({"data": sbp.P}))
        sbp.jit(times_two, mesh, in_types="data:P(sum)")(parts)
    whole = NamedSharding(mesh, PartitionSpec())
    assert_shards(jax.jit(times_two, in_shardings=whole)(X), X * 2)
    assert_shards(sbp.jit(times_two, mesh, in_shardings=whole)(X), X * 2)


def test_a_shape_in_place_of_an_array():
    for types in (None, "data:S(0)"):
        f = sbp.jit(times_two, mesh_of("2x4"), in_types=types)
        with pytest.raises(sbp.SbpError, match="input x is a ShapeDtypeStruct"):
            f(jax.ShapeDtypeStruct((16, 8), np.float32))


@pytest.mark.parametrize("name", ["8", "2x2x2"])
def test_each_process_gives_its_part(name: str):
    mesh = mesh_of(name)
    f = sbp.jit(lambda x: (x.sum(0), x[::-1]), mesh, in_types="data:S(0)")
    sharding = f.plan(jax.ShapeDtypeStruct(X.shape, X.dtype)).in_shardings[0]
    rows = sorted(
        {
            (i[0].start or 0, i[0].stop or 16)
            for i in sharding.addressable_devices_indices_map(X.shape).values()
        }
    )
    mine = X[rows[0][0] : rows[-1][1]]
    x = jax.make_array_from_process_local_data(sharding, mine, X.shape)
    with warnings.catch_warnings(action="error"):
        assert_shards(f(x), (X.sum(0), X[::-1]))


def test_arrays_on_devices_of_this_process_are_one_global_value():
    mesh = mesh_of("2x4")
    f = sbp.jit(times_two, mesh, in_types="data:S(0)")
    assert_shards(f(jnp.asarray(X)), X * 2)
    with pytest.warns(sbp.SbpWarning, match="input-moved") as given:
        assert_shards(f(jax.device_put(X, jax.local_devices()[-1])), X * 2)
        assert_shards(f(jax.device_put(X, jax.local_devices()[0])), X * 2)
    assert len(given) == 1


def test_keys():
    mesh = mesh_of("2x4")
    keys = jax.random.split(jax.random.key(3), 8)
    draw = jax.vmap(lambda key: jax.random.bits(key, (4,)))
    want = draw(keys)
    f = sbp.jit(draw, mesh, in_types="data:S(0)")
    assert_shards(f(keys), want, exact=True)
    with pytest.warns(sbp.SbpWarning, match="input-moved"):
        assert_shards(f(jax.device_put(keys, jax.local_devices()[-1])), want, exact=True)


def test_global_arrays_in_another_sharding_are_moved_with_one_warning():
    mesh = mesh_of("2x4")
    f = sbp.jit(times_two, mesh, in_types="model:S(0)")
    with pytest.warns(sbp.SbpWarning, match="input-moved") as given:
        for spec in (("data",), (None, "model"), ("data",)):
            assert_shards(f(put(X, mesh, *spec)), X * 2)
    assert len(given) == 1


def test_a_warning_is_given_once_in_each_process():
    mesh = mesh_of("8")
    f = sbp.jit(times_two, mesh, in_types="data:S(0)")
    x = put(X[:13], mesh)
    with pytest.warns(sbp.SbpWarning, match="uneven-boundary: input x") as given:
        assert_shards(f(x), X[:13] * 2)
        assert_shards(f(x), X[:13] * 2)
    assert len(given) == 1


def test_results_live_on_the_users_mesh():
    mesh = jax.make_mesh((2, 4), ("data", "model"))  # with Explicit axes
    got = sbp.jit(times_two, mesh, in_types="data:S(0)")(put(X, mesh, "data"))
    assert got.sharding.mesh is mesh or got.sharding.mesh == mesh
    assert_shards(got, X * 2)


def test_a_mesh_of_one_process():
    """It waits for no other process, and may run another program there."""
    here = jax.local_devices()
    mesh = Mesh(np.array(here), ("data",))
    factor = jax.process_index() + 2
    got = sbp.jit(lambda x: (x * factor).sum(0), mesh, in_types="data:S(0)")(X)
    assert got.sharding.device_set == set(here)
    np.testing.assert_allclose(got, (X * factor).sum(0), rtol=2e-5, atol=2e-5)
