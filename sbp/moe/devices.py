"""The devices of a run."""

from __future__ import annotations

import math
import os
from collections.abc import Sequence

import jax
import numpy as np

import sbp
from sbp.errors import SbpError


def simulate_devices(count: int) -> None:
    """Ask XLA for `count` simulated host devices; it listens only before the first use of any
    device."""
    flags = os.environ.get("XLA_FLAGS", "")
    if "xla_force_host_platform_device_count" not in flags:
        os.environ["XLA_FLAGS"] = f"{flags} --xla_force_host_platform_device_count={count}".strip()


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
      SbpError: `mesh-devices` when both are too few, or are not those of all processes.
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
