"""`MeshSpec`: named mesh axes, outer first, and the hardware of their devices, which need not be
present; the place of mesh axes in a network, and the time of collectives along them."""

import contextlib
import functools
import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import jax
import numpy as np
from jax.sharding import AbstractMesh, AxisType, Mesh, PartitionSpec

from sbp._jax import ENDS_ON_AXIS_NAMES, raising_span
from sbp.errors import ArgumentError, SbpError, SbpInternalError, listed, nearest, refused, warn
from sbp.frames import is_users, tracebacks
from sbp.kinds import AXIS_NAMES, MESH, ORDERED_AXES, Kind, can_name, is_whole, show, takes
from sbp.machine.calibration import Calibration, read_calibration
from sbp.machine.distance import Detours, detours
from sbp.machine.hardware import (
    HARDWARE as HARDWARE,
    SLICE_NETWORK,
    Arrangement,
    Hardware as Hardware,
    Network,
    arrangement,
    hardware_of_kind,
)

# ---- network -------------------------------------------------------------------------------------
# The place of mesh axes in a network, and the time of collectives along them, in closed form.
#
# `lay_out` places the mesh from the inside. The devices of one chip differ in their index on the
# innermost axis that has an even share for them. The torus of chips is as near to a cube as their
# number allows. The largest axis is placed first: on whole dims of the torus where their product is
# its size, else on factors of the largest dims. Factors that do not fit into a node or a pod lie on
# the network `beyond`. A dim of the torus closes into a ring where its chips are a multiple of
# `Hardware.ring_chips`. An axis on a part of a dim, or on a dim that does not close, has a line
# there; where an earlier axis has the inner part of the dim, it has a ring over every k-th chip,
# and the k rings share the links.
#
# Gathers and reductions use all links of the rings of their dims in parallel (bucket algorithm);
# lines of hardware that has both are taken one after the other, each in both directions. Both are
# hierarchical: an all-gather crosses the slowest network first, while the buffers are smallest. A
# chip receives once for all its devices. The fullest link limits an all-to-all: with e chips along
# a ring, messages travel e/4 links on average, so it takes bytes * e / 4 / (2 * link) seconds
# there, and twice that along a line: O(sqrt n) on a square torus (GShard: Lepikhin et al., 2020,
# section 5.2 and table 4).


Axes = tuple[tuple[str, int], ...]
"""Names and sizes of mesh axes, outer first."""


@dataclass(frozen=True, slots=True)
class AlphaBeta:
    """The time of a collective over some mesh axes.

    Arguments:
      seconds: to start the collective and to bring the first byte to the farthest device.
      seconds_per_byte: for each byte that one device sends, counted as `Cost.bytes_per_device`
          counts (ring optimum).
    """

    seconds: float
    seconds_per_byte: float

    def of(self, bytes_sent: float, rounds: float = 1) -> float:
        """Seconds of `rounds` collectives that send `bytes_sent` bytes per device in total.

        >>> AlphaBeta(1.0, 0.5).of(4.0, rounds=2)
        4.0
        """
        return rounds * self.seconds + bytes_sent * self.seconds_per_byte


@dataclass(frozen=True, slots=True)
class Stretch:
    """The chips of one dim of the torus along which some mesh axes run.

    Arguments:
      extent: number of chips.
      stride: links from one chip to the next; this many groups share each link.
      closes: whether the last chip is next to the first one.
    """

    extent: int
    stride: int
    closes: bool

    @property
    def width(self) -> float:
        """Links that one chip has here: two on a ring, one on a line, divided by `stride`, the
        number of groups that share them."""
        return (2 if self.closes else 1) / self.stride

    @property
    def longest(self) -> int:
        """Links from a chip to the farthest one."""
        return (self.extent // 2 if self.closes else self.extent - 1) * self.stride


@dataclass(frozen=True, slots=True)
class AxisPlacement:
    """The place of every mesh axis.

    Arguments:
      on_chip: for each axis, its factor within a chip.
      inside: for each axis, its factor within a node or a pod, chips counted.
      across: for each axis, its factor over the network beyond.
      slow: the axes that have a network of their own, with their sizes.
      torus: for each dim of the torus the (axis, factor) pairs on it, inner first; empty for a
          switch.
    """

    on_chip: tuple[int, ...]
    inside: tuple[int, ...]
    across: tuple[int, ...]
    slow: tuple[tuple[int, int, Network], ...]
    torus: tuple[tuple[tuple[int, int], ...], ...]

    def crossings(self, hardware: Hardware, positions: Sequence[int]) -> list[tuple[int, Network]]:
        """The slower networks that the axes at `positions` run over, slowest first, each with the
        number of groups that it joins."""
        found = [(n, network) for k, n, network in self.slow if k in positions and n > 1]
        groups = math.prod(self.across[k] for k in positions)
        if groups > 1 and hardware.beyond is not None:
            found.append((groups, hardware.beyond))
        return sorted(found, key=lambda pair: pair[1].bytes_per_second)

    def stretches(self, hardware: Hardware, positions: Sequence[int]) -> list[Stretch]:
        """The stretches of the axes at these positions, one for each dim of the torus on which they
        lie."""
        found = []
        for dim in self.torus:
            mine = [k for k, (axis, _) in enumerate(dim) if axis in positions]
            if mine:
                extent = math.prod(dim[k][1] for k in mine)
                stride = math.prod(
                    f for k, (_, f) in enumerate(dim) if k < mine[-1] and k not in mine
                )
                whole = math.prod(f for _, f in dim)
                closes = whole > 2 and whole % hardware.ring_chips == 0
                found.append(Stretch(extent, stride, closes and extent * stride == whole))
        return found


@functools.lru_cache(maxsize=1024)
def lay_out(hardware: Hardware, axes: Axes) -> AxisPlacement:
    """Places the axes of a mesh in the network.

    Arguments:
      hardware: the devices and their network.
      axes: (name, size) pairs, outer first.

    >>> from sbp.machine.hardware import HARDWARE
    >>> lay_out(HARDWARE["tpu-v3"], (("d", 128),)).torus
    (((0, 8),), ((0, 8),))
    >>> lay_out(HARDWARE["h100"], (("data", 4), ("model", 16))).inside
    (1, 8)
    """
    networks = dict(hardware.slow_axes)
    slow = tuple((k, n, networks[name]) for k, (name, n) in enumerate(axes) if name in networks)
    sizes = [1 if name in networks else n for name, n in axes]
    inside, across = _divide(hardware, sizes)
    innermost = next(
        (k for k in reversed(range(len(axes))) if inside[k] % hardware.devices_per_chip == 0), None
    )
    on_chip = [hardware.devices_per_chip if k == innermost else 1 for k in range(len(axes))]
    chips = [n // c for n, c in zip(inside, on_chip, strict=True)]
    torus = _on_torus(chips, hardware.torus_dims) if hardware.topology == "torus" else ()
    return AxisPlacement(tuple(on_chip), tuple(inside), tuple(across), slow, torus)


def _divide(hardware: Hardware, sizes: Sequence[int]) -> tuple[list[int], list[int]]:
    """The factors of the axes within and across nodes; inner axes fill a node first."""
    if hardware.beyond is None or math.prod(sizes) <= hardware.joined_devices:
        return list(sizes), [1] * len(sizes)
    inside, room = [1] * len(sizes), hardware.joined_devices
    for k in reversed(range(len(sizes))):
        inside[k] = math.gcd(sizes[k], room)
        room //= inside[k]
    return inside, [n // g for n, g in zip(sizes, inside, strict=True)]


def _primes(n: int) -> list[int]:
    """The prime factors of n, largest first."""
    least = next((p for p in range(2, math.isqrt(n) + 1) if n % p == 0), n)
    return [] if n == 1 else [*_primes(n // least), least]


def _on_torus(chips: Sequence[int], dims: int) -> tuple[tuple[tuple[int, int], ...], ...]:
    extents = [1] * dims
    for p in _primes(math.prod(chips)):
        extents[extents.index(min(extents))] *= p
    extents.sort()
    left = list(extents)
    taken: list[list[tuple[int, int]]] = [[] for _ in range(dims)]
    for axis in sorted((k for k, n in enumerate(chips) if n > 1), key=lambda k: (-chips[k], -k)):
        untouched = [d for d in range(dims) if left[d] == extents[d] > 1]
        subsets = (
            s
            for count in range(len(untouched), 0, -1)
            for s in itertools.combinations(untouched, count)
        )
        whole = next((s for s in subsets if math.prod(extents[d] for d in s) == chips[axis]), None)
        factors = [extents[d] if d in (whole or ()) else 1 for d in range(dims)]
        for p in _primes(chips[axis]) if whole is None else ():
            d = max(
                (d for d in range(dims) if left[d] // factors[d] % p == 0),
                key=lambda d: (left[d] // factors[d], -d),
            )
            factors[d] *= p
        for d, factor in enumerate(factors):
            left[d] //= factor
            if factor > 1:
                taken[d].append((axis, factor))
    return tuple(map(tuple, taken))


def _inside(place: AxisPlacement, positions: Sequence[int]) -> tuple[int, int, int]:
    """Number of chips of a node or pod along the axes, of devices of a chip along them, and of
    devices that share a chip's links."""
    on_chip = math.prod(place.on_chip[k] for k in positions)
    return math.prod(place.inside[k] for k in positions) // on_chip, on_chip, max(place.on_chip)


def _gather(
    hardware: Hardware,
    place: AxisPlacement,
    n: int,
    positions: Sequence[int],
    *,
    together: bool = True,
) -> tuple[float, float]:
    """Seconds for the first byte, and seconds per byte that a device sends.

    Arguments:
      hardware, place: of the devices.
      n: number of devices along the axes.
      positions: the mesh axes.
      together: whether the dims of the torus are used at the same time.
    """
    alpha, beta, had = 0.0, 0.0, 1 / n
    for groups, network in place.crossings(hardware, positions):
        alpha += network.latency_seconds * math.ceil(math.log2(groups))
        beta += (groups - 1) * had / network.bytes_per_second
        had *= groups
    chips, on_chip, sharing = _inside(place, positions)
    if chips > 1:
        stretches = place.stretches(hardware, positions)
        lines = [s for s in stretches if not s.closes and hardware.ring_chips > 1]
        rings = [s.width for s in stretches if s not in lines]
        both_ways = max((2 / s.stride for s in lines), default=0.0)
        width = (sum(rings) + both_ways if together else max(*rings, both_ways, 0.0)) or 1
        steps = sum(s.longest for s in stretches) if stretches else math.ceil(math.log2(chips))
        alpha += hardware.hop_seconds * steps
        beta += (chips - 1) * had * sharing / (width * hardware.link_bytes_per_second)
        had *= chips
    return alpha, max(beta, (on_chip - 1) * had / hardware.hbm_bytes_per_second) * n / (n - 1)


def _exchange(
    hardware: Hardware, place: AxisPlacement, n: int, positions: Sequence[int]
) -> tuple[float, float]:
    """Seconds for the first byte, and seconds per byte that a device sends to the others."""
    alpha, beta = 0.0, 0.0
    for groups, network in place.crossings(hardware, positions):
        alpha += network.latency_seconds
        beta += (groups - 1) / groups / network.bytes_per_second
    chips, on_chip, sharing = _inside(place, positions)
    if chips > 1:
        stretches = place.stretches(hardware, positions)
        # A message goes over `extent**2 // 4 / extent` links, on average over all pairs of chips.
        loads = (s.extent**2 // 4 / s.extent / s.width for s in stretches)
        links = max(loads, default=(chips - 1) / chips)
        alpha += hardware.hop_seconds * (sum(s.longest for s in stretches) if stretches else 1)
        beta += links * sharing / hardware.link_bytes_per_second
    return alpha, max(beta, (on_chip - 1) / on_chip / hardware.hbm_bytes_per_second) * n / (n - 1)


def _shift(
    hardware: Hardware, place: AxisPlacement, _: int, positions: Sequence[int]
) -> tuple[float, float]:
    """Seconds for the first byte, and seconds per byte that each device sends to the next one, for
    the slowest pair."""
    pairs = [
        (network.latency_seconds, 1 / network.bytes_per_second)
        for _, network in place.crossings(hardware, positions)
    ]
    chips, on_chip, sharing = _inside(place, positions)
    if chips > 1:
        stride = max((s.stride for s in place.stretches(hardware, positions)), default=1)
        # Round a ring with both devices of each chip on it, one of the two leaves the chip.
        pairs.append(
            (
                hardware.hop_seconds * stride,
                stride * (1 if on_chip > 1 else sharing) / hardware.link_bytes_per_second,
            )
        )
    if on_chip > 1:
        pairs.append((0.0, 1 / hardware.hbm_bytes_per_second))
    return max(alpha for alpha, _ in pairs), max(beta for _, beta in pairs)


_COLLECTIVES: dict[str, tuple[int, int, Callable[..., tuple[float, float]]]] = {
    "all_gather": (1, 1, _gather),
    "reduce_scatter": (1, 1, _gather),
    "all_reduce": (1, 2, _gather),
    "staged_reduce_scatter": (2, 2, functools.partial(_gather, together=False)),
    "all_to_all": (1, 1, _exchange),
    "permute": (1, 1, _shift),
}
"""For each collective, the number of starts, the number of times that its first byte crosses the
mesh axes, and a function. The function gives the seconds of one crossing, and the seconds of each
byte that a device sends."""


@functools.lru_cache(maxsize=8192)
def alpha_beta(hardware: Hardware, axes: Axes, kind: str, positions: tuple[int, ...]) -> AlphaBeta:
    """The time of a collective over some axes of a mesh.

    Arguments:
      hardware: the devices and their network.
      axes: (name, size) pairs of the whole mesh, outer first.
      kind: `all_reduce`, `reduce_scatter`, `staged_reduce_scatter` (see `MeshSpec.stages`),
          `all_gather`, `all_to_all` or `permute` (to the neighbour along the axis).
      positions: the mesh axes that it runs over.

    >>> from sbp.machine.hardware import HARDWARE
    >>> mesh = (("d", 128),)
    >>> link = alpha_beta(HARDWARE["tpu-v3"], mesh, "all_to_all", (0,))
    >>> round(1e-9 / link.seconds_per_byte, 1)  # GB/s of a device
    20.3
    """
    n = math.prod(axes[k][1] for k in positions)
    if n == 1:
        return AlphaBeta(0.0, 0.0)
    if kind not in _COLLECTIVES:
        raise SbpInternalError(f"no cost of a collective {kind!r}")
    starts, turns, cost = _COLLECTIVES[kind]
    alpha, beta = cost(hardware, lay_out(hardware, axes), n, positions)
    return AlphaBeta(starts * hardware.latency_seconds + turns * alpha, beta)


# ---- meshes --------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class MeshSpec:
    """Named mesh axes with their sizes, outer first, and the hardware of the devices.

    Arguments:
      axes: (name, size) pairs; the order is the nesting order of splits of one dim.
      hardware: the figures that costs are computed from.
      is_assumed: whether neither the user nor a device names the hardware.
      slices: in how many slices the devices are.
      calibration: what was measured on the devices; None where nothing was.
      detours: the mesh axes along which devices are farther apart than in the order of
          `jax.make_mesh`, or nearer.
    """

    axes: tuple[tuple[str, int], ...]
    hardware: Hardware
    is_assumed: bool = field(default=False, compare=False)
    slices: int = field(default=1, compare=False)
    calibration: Calibration | None = None
    detours: Detours = ()

    @property
    def names(self) -> tuple[str, ...]:
        """Axis names, outer first."""
        return tuple(name for name, _ in self.axes)

    @property
    def sizes(self) -> tuple[int, ...]:
        """Axis sizes, outer first."""
        return tuple(size for _, size in self.axes)

    @property
    def measured(self) -> str:
        """When the figures of the hardware were measured; empty where they were not."""
        return f", measured on {self.calibration.date}" if self.calibration else ""

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
            raise SbpError(self.without(mesh_axis), code="unknown-axis")
        return sizes[mesh_axis]

    def without(self, mesh_axis: Any) -> str:
        """That the mesh has no such axis, with the nearest name."""
        return f"the mesh has no axis {show(mesh_axis)}" + nearest(
            show(mesh_axis).strip("'"), self.names
        )

    def collective(self, kind: str, positions: tuple[int, ...]) -> AlphaBeta:
        """The time of a collective over the mesh axes at these positions: as measured, or else by
        `alpha_beta`.

        >>> mesh = MeshSpec(axes=(("d", 8),), hardware=HARDWARE["h100"])
        >>> mesh.collective("all_gather", (0,)).of(450e6) > 1e-3
        True
        """
        if self.calibration is not None:
            names = tuple(self.names[k] for k in sorted(positions) if self.sizes[k] > 1)
            found = self.calibration.links.get((kind.removeprefix("staged_"), names))
            if found is not None:
                return AlphaBeta(*found)
        time = alpha_beta(self.hardware, self.axes, kind, positions)
        detour = dict(self.detours).get(tuple(sorted(positions)), 1.0)
        return AlphaBeta(time.seconds, time.seconds_per_byte * detour)

    def stages(self, devices: int) -> tuple[int, ...]:
        """The sizes of the groups in which a reduce-scatter over so many devices runs, one stage
        after the other; empty where it runs as one.

        >>> MeshSpec(axes=(("d", 12),), hardware=HARDWARE["tpu-v5e"]).stages(12)
        (3, 4)
        """
        most, hardware = self.hardware.whole_scatter_devices, self.hardware
        if most is None and (hardware.platform, hardware.topology) == ("tpu", "torus"):
            most = HARDWARE["tpu-v6e"].whole_scatter_devices
        if devices != self.num_devices or most is None or devices <= most:
            return ()
        outer = next(n for n in range(math.isqrt(devices), 0, -1) if devices % n == 0)
        return (outer, devices // outer) if outer > 1 else ()

    def arrangements(
        self, shape: Sequence[int], dim: int, devices: int, itemsize: int
    ) -> tuple[Arrangement, ...]:
        """How a value is arranged for each stage of a reduce-scatter; see `sbp.machine.hardware`.

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
      hardware: a `Hardware`, the name of one in `HARDWARE`, a `.toml` file of `sbp calibrate`, or
          None for the mesh's own device kind (`tpu-v3` for an abstract mesh).

    Raises:
      SbpError: `unknown-option` for a hardware name that is not in the table, `unknown-axis` for a
        slow axis that the mesh does not have, `bad-argument` for another kind of mesh and for an
        axis name that no type text can hold or that this JAX cannot run with.

    >>> mesh_spec(jax.sharding.AbstractMesh((2, 4), ("data", "model"))).num_devices
    8
    """
    if not MESH.accepts(mesh):
        raise refused(f"mesh must be {MESH.what}, got {show(mesh)}", TypeError)
    _check_names(mesh.axis_names, devices=mesh.size if isinstance(mesh, Mesh) else 0)
    axes = tuple((name, int(size)) for name, size in mesh.shape.items())
    is_assumed = hardware is None and isinstance(mesh, AbstractMesh)
    device = next(mesh.devices.flat, None) if isinstance(mesh, Mesh) else None
    calibration = None
    if isinstance(hardware, str) and hardware.endswith(".toml"):
        calibration = read_calibration(hardware)
        calibration.check(axes, None if device is None else device.device_kind)
        hardware = calibration.hardware
    if hardware is None:
        hardware = (
            HARDWARE["tpu-v3"]
            if device is None
            else hardware_of_kind(device.device_kind, device.platform)
        )
    elif isinstance(hardware, str):
        if hardware not in HARDWARE:
            raise SbpError(
                f"no hardware {show(hardware)}{nearest(hardware, HARDWARE)}; `sbp hardware` lists"
                " what there is, and for other devices pass the .toml file of `sbp calibrate`",
                code="unknown-option",
            )
        hardware = HARDWARE[hardware]
    if not isinstance(hardware, Hardware):
        raise SbpError(f"hardware must be an sbp.Hardware or the name of one, got {show(hardware)}")
    hardware, slices = _on_slices(hardware, mesh)
    spec = MeshSpec(
        axes=axes,
        hardware=hardware,
        is_assumed=is_assumed,
        slices=slices,
        calibration=calibration,
        detours=_detours(mesh, hardware) if slices == 1 else (),
    )
    for mesh_axis, _ in hardware.slow_axes:
        spec.size(mesh_axis)
    return spec


def _detours(mesh: Mesh | AbstractMesh, hardware: Hardware) -> Detours:
    """The detours of a mesh, with a warning that says their price."""
    if isinstance(mesh, AbstractMesh):
        return ()
    try:
        found = detours(mesh, hardware)
    except ValueError as error:
        warn("device-order", "in the mesh,", f"{error}; sbp prices them as if they did")
        return ()
    axes, texts = tuple(mesh.shape.items()), list[str]()
    single = {positions[0]: factor for positions, factor in found if len(positions) == 1}
    for position, factor in single.items():
        near = alpha_beta(hardware, axes, "all_gather", (position,))
        far = replace(near, seconds_per_byte=near.seconds_per_byte * factor)
        prices = [f"{link.of(2**24) * 1e6:,.0f}" for link in (far, near)]
        if factor > 1:
            texts.append(
                f"{factor:.1f} times along `{axes[position][0]}` (gathering 16 MiB takes"
                f" {prices[0]} us instead of {prices[1]} us)"
            )
    if math.prod(single.values()) > 1:
        make = f"sbp.make_mesh({mesh.axis_sizes}, {mesh.axis_names})"
        order = "keeps devices farther apart than the order of jax.make_mesh:"
        warn("device-order", "the mesh", f"{order} {listed(texts)}; use {make}")
    return found


def _check_names(names: Sequence[Any], *, devices: int) -> None:
    """Refuses the names of mesh axes that no text can have, and those with which JAX ends the
    process on so many devices; 0 for a mesh without devices."""
    for name in names:
        if not isinstance(name, str):
            raise refused(f"names of mesh axes must be strings, got {show(name)}", TypeError)
        if not can_name(name):
            raise SbpError(f"rename the mesh axis {show(name)}: {AXIS_NAMES}")
        if ENDS_ON_AXIS_NAMES and (
            (devices and not name.isascii()) or (devices > 1 and "\\" in name)
        ):
            raise SbpError(
                f"this version of JAX crashes on the devices of a mesh with an axis {show(name)};"
                " use ASCII characters without backslashes, plan on a jax.sharding.AbstractMesh, or"
                " upgrade to JAX 0.12"
            )


def _on_slices(hardware: Hardware, mesh: Mesh | AbstractMesh) -> tuple[Hardware, int]:
    """The hardware with the network between slices, unless the user has given one for an axis, and
    the number of slices that the devices of a mesh are in. An axis that is only in part across
    slices, and is not the outermost of these, is priced as if each of its devices were in another
    slice."""
    if isinstance(mesh, AbstractMesh) or hardware.platform != "tpu":
        return hardware, 1
    index: Any = np.vectorize(lambda d: getattr(d, "slice_index", None) or 0, otypes=[int])
    slices: np.ndarray = index(mesh.devices)
    count, network = len(np.unique(slices)), hardware.beyond or SLICE_NETWORK
    if count < 2 or hardware.slow_axes:
        return hardware, count
    if slices.size % count == 0 and not np.diff(slices.reshape(count, -1)).any():  # outer axes
        return replace(hardware, joined_devices=slices.size // count, beyond=network), count
    across = [name for k, name in enumerate(mesh.axis_names) if np.diff(slices, axis=k).any()]
    return replace(hardware, slow_axes=tuple((name, network) for name in across)), count


_SIZES = Kind(
    "a sequence of sizes, one whole number for each axis, such as (2, 4)",
    lambda x: (
        (isinstance(x, Sequence) or (isinstance(x, np.ndarray) and x.ndim == 1))
        and all(is_whole(n) and n >= 0 for n in x)
    ),
)


@takes("sbp.make_mesh", axis_sizes=_SIZES, axis_names=ORDERED_AXES)
def make_mesh(axis_sizes: Sequence[int], axis_names: Sequence[str]) -> Mesh:
    """A mesh over the first of `jax.devices()`, in the order of `jax.make_mesh`, with Auto axes.

    Arguments:
      axis_sizes: the size of each axis, outer first.
      axis_names: the name of each axis.

    Raises:
      SbpError: `bad-argument` for sizes and names that do not fit together, `mesh-devices` when
        the mesh is larger than the devices present.

    >>> make_mesh((1,), ("data",)).shape["data"]
    1
    """
    names, sizes = tuple(axis_names), tuple(map(int, axis_sizes))
    if len(sizes) != len(names) or len(set(names)) != len(names) or 0 in sizes:
        raise ArgumentError(
            "make_mesh takes one size of 1 or more for each axis, and different axis names, got"
            f" sizes {show(axis_sizes)} and names {show(names)}"
        )
    need = math.prod(sizes)
    _check_names(names, devices=need)
    devices = jax.devices()
    product = " x ".join(map(str, axis_sizes)) + f" = {need}" * (len(axis_sizes) > 1)
    if need > len(devices):
        raise ArgumentError(
            f"the mesh has {product} devices, but JAX has only"
            f" {len(devices)}; use a smaller mesh, plan on a jax.sharding.AbstractMesh, or simulate"
            f" host devices with XLA_FLAGS=--xla_force_host_platform_device_count={need}",
            code="mesh-devices",
        )
    return jax.make_mesh(
        sizes, names, axis_types=(AxisType.Auto,) * len(names), devices=devices[:need]
    )


# ---- the user's mesh ----------------------------------------------------------------------------
# The mesh that the user sets with `jax.set_mesh`. Under an empty one, traced equations carry none.


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
        with jax.sharding.use_abstract_mesh(shown if other else AbstractMesh((), ())):
            yield None


@contextlib.contextmanager
def known_axes(mesh: MeshSpec, *kinds: type[Exception]) -> Iterator[None]:
    """Replaces JAX's errors about an axis that the mesh lacks by `unknown-axis` at the user's line.
    It stands inside of what JAX traces, since JAX takes its own frames out of an error outside.

    Arguments:
      mesh: the mesh.
      kinds: the kinds of errors of JAX. The text of one may be empty, so the axis is read from the
        arguments of the call that raises it.
    """
    try:
        yield
    except kinds as error:
        inner = itertools.takewhile(
            lambda frame: not is_users(frame), reversed([at.tb_frame for at in tracebacks(error)])
        )
        given = " ".join(
            show(frame.f_locals.get(name))
            for frame in inner
            for name in ("axis_name", "axes", "axis_names", "in_specs", "out_specs", "spec")
        )
        said = {*str(error).split("'"), *str(error).replace(".", " ").split()} - {""}
        named = (name for name in given.split("'")[1::2] if not said or name in said)
        unknown = next((name for name in named if name not in mesh.names), None)
        if unknown is None or isinstance(error, SbpError | SbpInternalError):
            raise
        raise refused(mesh.without(unknown), error, code="unknown-axis").at(
            raising_span(error)
        ) from error


def call_without_mesh(fn: Callable[..., Any], *args: Any) -> Any:
    """Calls a function where no mesh is set. On Explicit axes, it takes and returns arrays whose
    JAX types have no sharding."""

    def call(*args: Any) -> Any:
        with jax.sharding.use_abstract_mesh(AbstractMesh((), ())):
            return fn(*args)

    explicit = AxisType.Explicit in jax.sharding.get_abstract_mesh().axis_types
    return (jax.sharding.auto_axes(call, out_sharding=PartitionSpec()) if explicit else call)(*args)
