"""GShard's `shard(device_assignment)` (Lepikhin et al., 2020, section 3.2 and appendix A.3): which
slice lies on which device."""

import jax
import numpy as np
import pytest

import sbp

X = np.arange(3 * 16 * 64, dtype=np.float32).reshape(3, 16, 64)


@pytest.mark.parametrize("order", ["rows", "columns"])
def test_a_device_assignment_places_each_slice_on_its_device(order):
    """S1: [3, 16, 64] over an assignment of shape [1, 2, 4] has parts of [3, 8, 16]; the id at a
    position of the assignment has the slice at that position."""
    mesh = (
        sbp.make_mesh((2, 4), ("x", "y")) if order == "rows" else sbp.make_mesh((4, 2), ("x", "y"))
    )
    ids = np.arange(8).reshape(1, 2, 4) if order == "rows" else np.arange(8).reshape(4, 2).T[None]
    found = sbp.jit(lambda x: sbp.shard(x * 1, ids), mesh)(X)
    shards = {shard.device: np.asarray(shard.data) for shard in found.addressable_shards}
    devices = mesh.devices.ravel()
    for (_, i, j), number in np.ndenumerate(ids):
        part = shards[devices[number]]
        assert part.shape == (3, 8, 16)
        np.testing.assert_array_equal(part, X[:, 8 * i : 8 * i + 8, 16 * j : 16 * j + 16])
    assert isinstance(found, jax.Array) and found.shape == X.shape


def test_annotations_keep_shape_and_value():
    """S2: every placement of a tensor on a 2 x 4 mesh, partial ones included."""
    mesh = sbp.make_mesh((2, 4), ("x", "y"))
    places = [sbp.S(0), sbp.S(1), sbp.S(2), sbp.B, sbp.P]

    def every(x):
        return [sbp.annotate(x, x=a, y=b) for a in places for b in places]

    found = sbp.jit(every, mesh, in_types=("B",), out_types="B")(X)
    assert len(found) == 25
    for one in found:
        assert one.shape == X.shape and one.dtype == X.dtype
        np.testing.assert_array_equal(one, X)
