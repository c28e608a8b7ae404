"""How far apart the devices of a mesh are on their torus."""

import itertools
from collections.abc import Sequence

import jax
import numpy as np
from jax.sharding import AxisType, Mesh

from sbp.machine.hardware import Hardware

Detours = tuple[tuple[tuple[int, ...], float], ...]
"""For sets of mesh axes, by their positions, how many times as far apart the devices along them are
as in the order of `jax.make_mesh`."""


def detours(mesh: Mesh, hardware: Hardware) -> Detours:
    """The sets of mesh axes along which devices are farther apart or nearer than in the order of
    `jax.make_mesh`.

    Arguments:
      mesh: a mesh. The result is empty if its devices have no coordinates, or if a chip has two of
          them: `jax.make_mesh` does not use the coordinates of such devices.
      hardware: that of the devices.

    Raises:
      ValueError: if the devices do not fill a box of the torus.
    """
    devices, count = sorted(mesh.devices.flat, key=lambda d: d.id), len(mesh.axis_names)
    places = {tuple(getattr(d, "coords", None) or ()) for d in devices}
    if hardware.topology != "torus" or () in places or len(places) < len(devices):
        return ()
    auto = (AxisType.Auto,) * count
    try:
        best = jax.make_mesh(mesh.axis_sizes, mesh.axis_names, axis_types=auto, devices=devices)
    except (AssertionError, NotImplementedError) as error:  # JAX raises them for no other reason
        raise ValueError("the devices do not fill a box of the torus") from error
    sets = itertools.chain(*(itertools.combinations(range(count), k) for k in range(1, count)))
    spreads = ((axes, *(_spread(m.devices, axes, hardware) for m in (mesh, best))) for axes in sets)
    return tuple((axes, own / least) for axes, own, least in spreads if own != least)


def _spread(devices: np.ndarray, axes: Sequence[int], hardware: Hardware) -> float:
    """The mean number of links between two devices of a group along some mesh axes, for the group
    in which it is largest. A collective uses links in proportion to it."""
    coords = np.array([d.coords for d in devices.flat]).reshape(*devices.shape, -1)
    coords = np.moveaxis(coords, axes, range(len(axes)))
    coords = coords.reshape(-1, int(np.prod(coords.shape[len(axes) : -1])), coords.shape[-1])
    links = np.zeros(coords.shape[1])
    for of_dim in np.moveaxis(coords - coords.min((0, 1)), -1, 0):
        extent = int(of_dim.max()) + 1
        shares = (of_dim[..., None] == np.arange(extent)).mean(0)
        steps = abs(np.subtract.outer(np.arange(extent), np.arange(extent)))
        if extent > 2 and extent % hardware.ring_chips == 0:
            steps = np.minimum(steps, extent - steps)
        links += np.einsum("gi,ij,gj->g", shares, steps, shares)
    return float(links.max().round(9))
