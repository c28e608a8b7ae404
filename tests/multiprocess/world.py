"""Meshes over all processes, arrays on them, and comparison with one device."""

import contextlib
import hashlib
import warnings
from collections.abc import Iterator
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils

import sbp

MESHES = {
    "8": ((8,), ("data",)),
    "2x4": ((2, 4), ("data", "model")),
    "2x2x2": ((2, 2, 2), ("data", "model", "expert")),
}


def mesh_of(name: str) -> jax.sharding.Mesh:
    """A mesh over the devices of all processes."""
    return sbp.make_mesh(*MESHES[name])


def put(x: Any, mesh: jax.sharding.Mesh, *spec: Any) -> jax.Array:
    """A global array; each process gives its part."""
    x, sharding = np.asarray(x), jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec(*spec))
    return jax.make_array_from_callback(x.shape, sharding, lambda index: x[index])


def assert_shards(got: Any, want: Any, *, exact: bool = False) -> None:
    """The shards of this process are those of a value on one device. All processes together
    compare all shards.

    Arguments:
      got: a tree of global arrays.
      want: the same with arrays on one device.
      exact: whether floats are equal to the last bit.
    """
    assert jax.tree.structure(got) == jax.tree.structure(want)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        assert (a.shape, a.dtype) == (b.shape, b.dtype)
        assert a.sharding.device_set == set(jax.devices())
        assert len(a.addressable_shards) == len(jax.local_devices())
        whole = np.asarray(b)
        for shard in a.addressable_shards:
            if exact or not np.issubdtype(whole.dtype, np.inexact):
                np.testing.assert_array_equal(shard.data, whole[shard.index])
            else:
                np.testing.assert_allclose(shard.data, whole[shard.index], rtol=2e-5, atol=2e-5)


def in_all(text: str) -> list[bytes]:
    """The digest of a text of each process."""
    digest = np.frombuffer(hashlib.sha256(text.encode()).digest(), np.uint8)
    return [row.tobytes() for row in np.asarray(multihost_utils.process_allgather(digest))]


@contextlib.contextmanager
def uneven_boundaries() -> Iterator[None]:
    """Lets the warnings pass that dims do not divide."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "uneven-boundary", sbp.SbpWarning)
        yield
