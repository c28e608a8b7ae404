"""`MeshSpec`: named mesh axes, outer first, and the hardware of their devices, which need not be
present."""

import contextlib
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
import numpy as np
from jax.sharding import AbstractMesh, AxisType, Mesh, PartitionSpec

from sbp._jax import ENDS_ON_AXIS_NAMES
from sbp.errors import ArgumentError, SbpError, nearest, refused
from sbp.kinds import AXES, AXIS_NAMES, Kind, can_name, is_whole, show, takes
from sbp.machine.hardware import HARDWARE as HARDWARE, Hardware as Hardware, hardware_of_kind
from sbp.machine.lowerings import Arrangement, arrangement, scatters_whole_mesh
from sbp.machine.network import AlphaBeta, alpha_beta


@dataclass(frozen=True, slots=True, kw_only=True)
class MeshSpec:
    """Named mesh axes with their sizes, outer first, and the hardware of the devices.

    Arguments:
      axes: (name, size) pairs; the order is the nesting order of splits of one dim.
      hardware: the figures that costs are computed from.
      is_assumed: whether neither the user nor a device names the hardware.
    """

    axes: tuple[tuple[str, int], ...]
    hardware: Hardware
    is_assumed: bool = field(default=False, compare=False)

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
        """The size of one axis.

        Raises:
          SbpError: `unknown-axis` with the nearest name.
        """
        sizes = dict(self.axes)
        if not isinstance(mesh_axis, str) or mesh_axis not in sizes:
            given = show(mesh_axis)
            raise SbpError(
                f"the mesh has no axis {given}{nearest(given, self.names)}",
                code="unknown-axis",
            )
        return sizes[mesh_axis]

    def collective(self, kind: str, positions: tuple[int, ...]) -> AlphaBeta:
        """The time of a collective over the mesh axes at these positions; see
        `sbp.machine.network.alpha_beta`.

        >>> mesh = MeshSpec(axes=(("d", 8),), hardware=HARDWARE["h100"])
        >>> mesh.collective("all_gather", (0,)).of(450e6) > 1e-3
        True
        """
        return alpha_beta(self.hardware, self.axes, kind, positions)

    def stages(self, devices: int) -> tuple[int, ...]:
        """The sizes of the groups in which a reduce-scatter over so many devices runs, one stage
        after the other; empty where it runs as one.

        >>> MeshSpec(axes=(("d", 12),), hardware=HARDWARE["tpu-v5e"]).stages(12)
        (3, 4)
        """
        if devices != self.num_devices:
            return ()
        measured = scatters_whole_mesh(self.hardware, devices)
        keeps = self.hardware.scatters_whole_mesh if measured is None else measured.holds
        if keeps is not False:
            return ()
        outer = next(n for n in range(math.isqrt(devices), 0, -1) if devices % n == 0)
        return (outer, devices // outer) if outer > 1 else ()

    def arrangements(
        self, shape: Sequence[int], dim: int, devices: int, itemsize: int
    ) -> tuple[Arrangement, ...]:
        """How a value is arranged for each stage of a reduce-scatter; see `sbp.machine.lowerings`.

        Arguments:
          shape: of one device's part; `devices` divides the size of its `dim`.
          dim: the dim that is split.
          devices: number of devices.
          itemsize: bytes of one element.
        """
        left, found, is_tpu = list(shape), list[Arrangement](), self.hardware.platform == "tpu"
        for n in self.stages(devices) or (devices,):
            found.append(arrangement(left, dim, n, itemsize, is_tpu=is_tpu))
            left[dim] //= n
        return tuple(found)

    def __str__(self) -> str:
        return " ".join(f"{name}={size}" for name, size in self.axes)


def mesh_spec(mesh: Mesh | AbstractMesh, hardware: Hardware | str | None = None) -> MeshSpec:
    """Reads axes and device kind from a JAX mesh.

    Arguments:
      mesh: a `jax.sharding.Mesh` (Auto or Explicit) or an `AbstractMesh`.
      hardware: a `Hardware`, the name of one in `HARDWARE`, or None for the mesh's own device kind
          (`tpu-v3` for an abstract mesh).

    Raises:
      SbpError: `unknown-option` for a hardware name that is not in the table, `unknown-axis` for a
        slow axis that the mesh does not have, `bad-argument` for another kind of mesh and for an
        axis name that no type text can hold or that this JAX cannot run with.

    >>> mesh_spec(jax.sharding.AbstractMesh((2, 4), ("data", "model"))).num_devices
    8
    """
    if not isinstance(mesh, Mesh | AbstractMesh):
        raise refused(
            f"mesh must be a jax.sharding.Mesh or AbstractMesh, got {type(mesh).__name__}",
            TypeError,
        )
    axes = tuple((str(name), int(size)) for name, size in mesh.shape.items())
    _check_names(mesh.axis_names, devices=mesh.size if isinstance(mesh, Mesh) else 0)
    is_assumed = hardware is None and isinstance(mesh, AbstractMesh)
    if hardware is None:
        hardware = _hardware_of(mesh)
    elif isinstance(hardware, str):
        if hardware not in HARDWARE:
            raise SbpError(
                f"no hardware {show(hardware)}{nearest(hardware, HARDWARE)}",
                code="unknown-option",
            )
        hardware = HARDWARE[hardware]
    if not isinstance(hardware, Hardware):
        raise SbpError(f"hardware must be an sbp.Hardware or the name of one, got {show(hardware)}")
    spec = MeshSpec(axes=axes, hardware=hardware, is_assumed=is_assumed)
    for mesh_axis, _ in hardware.slow_axes:
        spec.size(mesh_axis)
    return spec


def _check_names(names: Sequence[Any], *, devices: int) -> None:
    """Refuses the names of mesh axes that no text can have, and those with which JAX ends the
    process on so many devices; 0 for a mesh without devices."""
    for name in map(str, names):
        if not can_name(name):
            raise SbpError(f"rename the mesh axis {show(name)}: {AXIS_NAMES}")
        ends = (devices and not name.isascii()) or (devices > 1 and "\\" in name)
        if ends and ENDS_ON_AXIS_NAMES:
            raise SbpError(
                f"this version of JAX crashes on the devices of a mesh with an axis {show(name)};"
                " use ASCII characters without backslashes, plan on a jax.sharding.AbstractMesh, or"
                " upgrade to JAX 0.12"
            )


def _hardware_of(mesh: Mesh | AbstractMesh) -> Hardware:
    if isinstance(mesh, AbstractMesh):
        return HARDWARE["tpu-v3"]
    device = mesh.devices.flat[0]
    return hardware_of_kind(device.device_kind, device.platform)


_SIZES = Kind(
    "a sequence of sizes, one whole number for each axis, such as (2, 4)",
    lambda x: (
        (isinstance(x, Sequence) or (isinstance(x, np.ndarray) and x.ndim == 1))
        and all(is_whole(n) and n >= 0 for n in x)
    ),
)


@takes("sbp.make_mesh", axis_sizes=_SIZES, axis_names=AXES)
def make_mesh(axis_sizes: Sequence[int], axis_names: Sequence[str]) -> Mesh:
    """A mesh over the first of `jax.devices()`, with Auto axes.

    Arguments:
      axis_sizes: the size of each axis, outer first.
      axis_names: the name of each axis.

    Raises:
      SbpError: `bad-argument` for sizes and names that do not fit together, `mesh-devices` when
        the mesh is larger than the devices present.

    >>> make_mesh((1,), ("data",)).shape["data"]
    1
    """
    names = tuple(axis_names)
    if len(axis_sizes) != len(names) or len(set(names)) != len(names) or 0 in axis_sizes:
        raise ArgumentError(
            "make_mesh takes one size of 1 or more for each axis, and different axis names, got"
            f" sizes {show(axis_sizes)} and names {show(names)}"
        )
    _check_names(names, devices=math.prod(map(int, axis_sizes)))
    devices = jax.devices()
    need = math.prod(map(int, axis_sizes))
    if need > len(devices):
        raise ArgumentError(
            f"the mesh has {' x '.join(map(str, axis_sizes))} = {need} devices, but JAX has only"
            f" {len(devices)}; use a smaller mesh, plan on a jax.sharding.AbstractMesh, or simulate"
            f" host devices with XLA_FLAGS=--xla_force_host_platform_device_count={need}",
            code="mesh-devices",
        )
    return Mesh(np.asarray(devices[:need]).reshape(tuple(axis_sizes)), names)


# ---- the user's mesh ----------------------------------------------------------------------------
# The mesh that the user sets with `jax.set_mesh`.


def no_mesh() -> contextlib.AbstractContextManager[Any]:
    """Hides the caller's mesh context, so that traced equations carry no mesh."""
    return jax.sharding.use_abstract_mesh(AbstractMesh((), ()))


def other_mesh(names: tuple[str, ...], sizes: tuple[int, ...]) -> AbstractMesh | None:
    """The mesh that the user set, where it has other axes than these; None where none is set."""
    mesh = jax.sharding.get_abstract_mesh()
    return None if mesh.empty or (mesh.axis_names, mesh.axis_sizes) == (names, sizes) else mesh


@contextlib.contextmanager
def users_mesh(
    names: tuple[str, ...], sizes: tuple[int, ...], *, other: bool = False
) -> Iterator[AbstractMesh | None]:
    """Hides the mesh that the user set with `jax.set_mesh`, unless it has these axes: then a
    PartitionSpec in the program means it. Yields this mesh where all its axes are Explicit, and the
    types of JAX have shardings; else None.

    Arguments:
      names, sizes: the axes.
      other: whether a PartitionSpec means a mesh with other axes, too.
    """
    mesh = jax.sharding.get_abstract_mesh()
    if (mesh.axis_names, mesh.axis_sizes) == (names, sizes):
        yield mesh if set(mesh.axis_types) == {AxisType.Explicit} else None
    else:
        auto = (AxisType.Auto,) * len(mesh.axis_names)
        shown = AbstractMesh(mesh.axis_sizes, mesh.axis_names, axis_types=auto)
        with jax.sharding.use_abstract_mesh(shown) if other else no_mesh():
            yield None


def call_without_mesh(fn: Callable[..., Any], *args: Any) -> Any:
    """Calls a function where no mesh is set. On Explicit axes, it takes and returns arrays whose
    JAX types have no sharding."""

    def call(*args: Any) -> Any:
        with no_mesh():
            return fn(*args)

    explicit = AxisType.Explicit in jax.sharding.get_abstract_mesh().axis_types
    return (jax.sharding.auto_axes(call, out_sharding=PartitionSpec()) if explicit else call)(*args)
