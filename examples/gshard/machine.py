"""The devices and the disk of a run: whether they have what it needs."""

from __future__ import annotations

import math
import shutil
from collections.abc import Sequence
from pathlib import Path

import jax
import numpy as np

import sbp
from sbp.errors import SbpError
from sbp.moe.step import TrainState


def need_x64(dtype: str) -> None:
    """Refuse float64 where JAX would compute it in float32.

    Raises:
      SbpError: `unknown-option`.
    """
    if dtype == "float64" and not jax.config.read("jax_enable_x64"):
        raise SbpError(
            "JAX computes dtype float64 in float32; set JAX_ENABLE_X64=1, or another dtype",
            code="unknown-option",
        )


def make_mesh(axes: Sequence[tuple[str, int]]) -> jax.sharding.Mesh:
    """A mesh of the devices present, or of simulated host devices where those are too few.

    Raises:
      SbpError: `mesh-devices` if neither has enough devices, or if some process has none of them.
    """
    names, sizes = zip(*axes, strict=True)
    need = math.prod(sizes)
    if jax.process_count() > 1 and need != jax.device_count():
        raise SbpError(
            f"--mesh has {need} devices, and the {jax.process_count()} processes have"
            f" {jax.device_count()}; give axes whose sizes multiply to {jax.device_count()}",
            code="mesh-devices",
        )
    host = jax.devices("cpu")
    if len(jax.devices()) < need <= len(host):
        jax.config.update("jax_default_device", host[0])
        return jax.sharding.Mesh(np.asarray(host[:need]).reshape(sizes), names)
    return sbp.make_mesh(sizes, names)


def need_room(folder: Path, shapes: TrainState) -> None:
    """Refuse a disk that has no room for one more checkpoint of a state.

    Arguments:
      folder: on the disk.
      shapes: the state as ShapeDtypeStructs.

    Raises:
      SbpError: `bad-checkpoint` where it has less than the bytes of the arrays.
    """
    need = sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(shapes))
    free = shutil.disk_usage(folder).free
    if free < need:
        raise SbpError(
            f"{folder} has {free / 2**20:,.1f} MiB of room left, and a checkpoint takes"
            f" {need / 2**20:,.1f} MiB; make room, or choose another --workdir",
            code="bad-checkpoint",
        )
