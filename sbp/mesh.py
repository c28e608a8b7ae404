"""The mesh: named axes, outer first, and the hardware that stands under them. Works with no devices present."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import jax
import numpy as np
from jax.sharding import AbstractMesh, Mesh

from sbp.errors import SbpError, nearest


@dataclass(frozen=True, slots=True, kw_only=True)
class Hardware:
    """What the cost model knows of one device and its links.

    Arguments:
      name: the table's name of the device kind.
      flops_per_second: matrix units, in the precision models usually run (bf16 on accelerators).
      hbm_bytes_per_second: memory bandwidth of one device.
      hbm_bytes: memory of one device.
      link_bytes_per_second: what one device can send per second in a collective along one mesh axis.
      latency_seconds: start-up time of one collective step (the alpha of alpha-beta).
      topology: `torus` or `switch`.
      scatters_whole_mesh: whether the compiler keeps a reduce-scatter over all devices; where it does not (two cores a chip), it
        runs an all-reduce and slices (`benchmarks/reduce_scatter_lowering.py` shows it), and is priced as one.
      overlaps: whether a device computes while it sends.
    """

    name: str
    flops_per_second: float
    hbm_bytes_per_second: float
    hbm_bytes: float
    link_bytes_per_second: float
    latency_seconds: float = 1e-6
    topology: Literal["torus", "switch"] = "torus"
    scatters_whole_mesh: bool = True
    overlaps: bool = True


HARDWARE: dict[str, Hardware] = {
    h.name: h
    for h in (
        # Per core, as JAX sees TPU v2/v3 (two cores a chip); cloud.google.com/tpu/docs/v3.
        Hardware(
            name="tpu-v3",
            flops_per_second=61.5e12,
            hbm_bytes_per_second=450e9,
            hbm_bytes=16 * 2**30,
            link_bytes_per_second=82e9,
            scatters_whole_mesh=False,
        ),
        Hardware(name="tpu-v4", flops_per_second=275e12, hbm_bytes_per_second=1228e9, hbm_bytes=32 * 2**30, link_bytes_per_second=100e9),
        Hardware(name="tpu-v5e", flops_per_second=197e12, hbm_bytes_per_second=819e9, hbm_bytes=16 * 2**30, link_bytes_per_second=100e9),
        Hardware(name="tpu-v5p", flops_per_second=459e12, hbm_bytes_per_second=2765e9, hbm_bytes=95 * 2**30, link_bytes_per_second=180e9),
        Hardware(name="tpu-v6e", flops_per_second=918e12, hbm_bytes_per_second=1640e9, hbm_bytes=32 * 2**30, link_bytes_per_second=180e9),
        Hardware(
            name="h100",
            flops_per_second=990e12,
            hbm_bytes_per_second=3350e9,
            hbm_bytes=80 * 2**30,
            link_bytes_per_second=450e9,
            topology="switch",
        ),
        Hardware(
            name="h200",
            flops_per_second=990e12,
            hbm_bytes_per_second=4800e9,
            hbm_bytes=141 * 2**30,
            link_bytes_per_second=450e9,
            topology="switch",
        ),
        # Simulated host devices share one memory: a collective is a copy and a rendezvous of threads.
        Hardware(
            name="cpu",
            flops_per_second=50e9,
            hbm_bytes_per_second=10e9,
            hbm_bytes=16 * 2**30,
            link_bytes_per_second=2e9,
            latency_seconds=20e-6,
            topology="switch",
            overlaps=False,
        ),
    )
}
"""Hardware by name; figures are the vendors' published peaks per JAX device."""

_KINDS = (
    ("tpu v3", "tpu-v3"),
    ("tpu v2", "tpu-v3"),
    ("tpu v4", "tpu-v4"),
    ("tpu v5 lite", "tpu-v5e"),
    ("tpu v5e", "tpu-v5e"),
    ("tpu v5", "tpu-v5p"),
    ("tpu v6", "tpu-v6e"),
    ("h200", "h200"),
    ("h100", "h100"),
    ("cpu", "cpu"),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class MeshSpec:
    """Named mesh axes with their sizes, outer first, and the hardware below.

    Arguments:
      axes: (name, size) pairs; the order is the nesting order of splits of one dim.
      hardware: the device kind that costs are counted on.
    """

    axes: tuple[tuple[str, int], ...]
    hardware: Hardware

    @property
    def names(self) -> tuple[str, ...]:
        """Axis names, outer first."""
        return tuple(name for name, _ in self.axes)

    @property
    def sizes(self) -> tuple[int, ...]:
        """Axis sizes, outer first."""
        return tuple(size for _, size in self.axes)

    @property
    def num_devices(self) -> int:
        """Product of the axis sizes."""
        return math.prod(self.sizes)

    def size(self, mesh_axis: str) -> int:
        """The size of one axis; raises `unknown-axis` with the nearest name."""
        sizes = dict(self.axes)
        if mesh_axis not in sizes:
            raise SbpError(f"the mesh has no axis {mesh_axis!r}{nearest(mesh_axis, self.names)}", code="unknown-axis")
        return sizes[mesh_axis]

    def __str__(self) -> str:
        return " ".join(f"{name}={size}" for name, size in self.axes)


def mesh_spec(mesh: Mesh | AbstractMesh, hardware: Hardware | str | None = None) -> MeshSpec:
    """Reads axes and device kind from a JAX mesh.

    Arguments:
      mesh: a `jax.sharding.Mesh` (Auto or Explicit) or an `AbstractMesh`.
      hardware: a `Hardware`, the name of one in `HARDWARE`, or None for the mesh's own device kind (`tpu-v3` for an abstract mesh).

    Raises:
      SbpError: `unknown-option` for a hardware name that is not in the table, `bad-argument` for another kind of mesh.

    >>> mesh_spec(jax.sharding.AbstractMesh((2, 4), ("data", "model"))).num_devices
    8
    """
    if not isinstance(mesh, Mesh | AbstractMesh):
        raise SbpError(f"mesh is a jax.sharding.Mesh or AbstractMesh, got {type(mesh).__name__}")
    axes = tuple((str(name), int(size)) for name, size in mesh.shape.items())
    if isinstance(hardware, Hardware):
        return MeshSpec(axes=axes, hardware=hardware)
    if hardware is None:
        hardware = _hardware_name(mesh)
    if hardware not in HARDWARE:
        raise SbpError(f"no hardware {hardware!r}{nearest(hardware, HARDWARE)}", code="unknown-option")
    return MeshSpec(axes=axes, hardware=HARDWARE[hardware])


def _hardware_name(mesh: Mesh | AbstractMesh) -> str:
    if isinstance(mesh, AbstractMesh):
        return "tpu-v3"
    kind = mesh.devices.flat[0].device_kind.lower()
    for prefix, name in _KINDS:
        if prefix in kind:
            return name
    return "h100" if mesh.devices.flat[0].platform == "gpu" else "cpu"


def make_mesh(axis_sizes: Sequence[int], axis_names: Sequence[str]) -> Mesh:
    """A mesh over the first devices that are present, with Auto axes.

    Raises:
      SbpError: `mesh-devices` when the mesh is larger than the devices present.

    >>> make_mesh((1,), ("data",)).shape["data"]
    1
    """
    devices = jax.devices()
    need = math.prod(axis_sizes)
    if need > len(devices):
        raise SbpError(
            f"a mesh of {' x '.join(map(str, axis_sizes))} = {need} devices, but {len(devices)} present; "
            f"take a smaller mesh, plan on a jax.sharding.AbstractMesh, or simulate host devices with "
            f"XLA_FLAGS=--xla_force_host_platform_device_count={need}",
            code="mesh-devices",
        )
    return Mesh(np.asarray(devices[:need]).reshape(tuple(axis_sizes)), tuple(axis_names))
