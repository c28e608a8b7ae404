"""The place of mesh axes in a network, and the time of collectives along them, in closed form.

`lay_out` places the mesh from the inside. The devices of one chip differ in their index on the
innermost axis that has an even share for them. The torus of chips is as near to a cube as their
number allows. The largest axis is placed first: on whole dims of the torus where their product is
its size, else on factors of the largest dims. Factors that do not fit into a node or a pod lie on
the network `beyond`. A dim of the torus closes into a ring where its chips are a multiple of
`Hardware.ring_chips`. An axis on a part of a dim, or on a dim that does not close, has a line
there; where an earlier axis has the inner part of the dim, it has a ring over every k-th chip, and
the k rings share the links.

Gathers and reductions use all links of the rings of their dims in parallel (bucket algorithm);
lines of hardware that has both are taken one after the other, each in both directions. Both are
hierarchical: an all-gather crosses the slowest network first, while the buffers are smallest. A
chip receives once for all its devices. The fullest link limits an all-to-all: with e chips along a
ring, messages travel e/4 links on average, so it takes bytes * e / 4 / (2 * link) seconds there,
and twice that along a line: O(sqrt n) on a square torus (GShard: Lepikhin et al., 2020, section 5.2
and table 4).
"""

import functools
import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from sbp.errors import SbpInternalError
from sbp.machine.hardware import Hardware, Network

Axes = tuple[tuple[str, int], ...]


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
    def mean_distance(self) -> float:
        """Links from one chip to another, averaged over all pairs, for the load of the fullest
        link.

        >>> Stretch(8, 1, True).mean_distance
        2.0
        """
        return (self.extent**2 // 4) / self.extent

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
      ring_chips: as in `Hardware`.
    """

    on_chip: tuple[int, ...]
    inside: tuple[int, ...]
    across: tuple[int, ...]
    slow: tuple[tuple[int, int, Network], ...]
    torus: tuple[tuple[tuple[int, int], ...], ...]
    ring_chips: int = 1

    def crossings(self, hardware: Hardware, positions: Sequence[int]) -> list[tuple[int, Network]]:
        """The slower networks that the axes at `positions` run over, slowest first, each with the
        number of groups that it joins."""
        found = [(n, network) for k, n, network in self.slow if k in positions and n > 1]
        groups = math.prod(self.across[k] for k in positions)
        if groups > 1 and hardware.beyond is not None:
            found.append((groups, hardware.beyond))
        return sorted(found, key=lambda pair: pair[1].bytes_per_second)

    def stretches(self, positions: Sequence[int]) -> list[Stretch]:
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
                closes = whole > 2 and whole % self.ring_chips == 0
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
    on_chip = [1] * len(axes)
    innermost = next(
        (k for k in reversed(range(len(axes))) if inside[k] % hardware.devices_per_chip == 0), None
    )
    if innermost is not None:
        on_chip[innermost] = hardware.devices_per_chip
    chips = [n // c for n, c in zip(inside, on_chip, strict=True)]
    torus = _on_torus(chips, hardware.torus_dims) if hardware.topology == "torus" else ()
    return AxisPlacement(
        tuple(on_chip), tuple(inside), tuple(across), slow, torus, hardware.ring_chips
    )


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
        factors = [1] * dims
        if whole is not None:
            for d in whole:
                factors[d] = extents[d]
        else:
            for p in _primes(chips[axis]):
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
        stretches = place.stretches(positions)
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
        stretches = place.stretches(positions)
        links = max((s.mean_distance / s.width for s in stretches), default=(chips - 1) / chips)
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
        stride = max((s.stride for s in place.stretches(positions)), default=1)
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
