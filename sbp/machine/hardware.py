"""Device kinds and their networks: the classes that describe them, the figures of the device kinds
that sbp knows, from which costs are computed, and shapes that suit the tiles of a TPU."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, Literal, get_args

import numpy as np

from sbp.kinds import AXIS, FLAG, NUMBER, TEXT, Kind, is_whole, made_of, one_of, or_none, takes

Topology = Literal["torus", "switch"]
Platform = Literal["cpu", "cuda", "rocm", "tpu"]
TOPOLOGIES: tuple[Topology, ...] = get_args(Topology)
PLATFORMS: tuple[Platform, ...] = get_args(Platform)
Precision = Literal["default", "high", "highest"]
_PRECISION = one_of(get_args(Precision))
_BYTES = Kind("a number of bytes, above 0", lambda x: is_whole(x) and x > 0)


# Sums and quotients of figures in these limits are floats that compare. An infinite rate is free.
_RATE = Kind(
    "a number from 1e-30 to 1e30, or infinite",
    lambda x: NUMBER.accepts(x) and (1e-30 <= x <= 1e30 or x == math.inf),
)
_FIGURE = Kind("a number from 0 to 1e30", lambda x: NUMBER.accepts(x) and 0 <= x <= 1e30)


@made_of("Network", bytes_per_second=_RATE, latency_seconds=_FIGURE)
@dataclass(frozen=True, slots=True, kw_only=True)
class Network:
    """A slower network between groups of devices: between nodes of GPUs, or between TPU slices.

    Arguments:
      bytes_per_second: the rate at which one device can send, one way.
      latency_seconds: time until the first byte arrives.

    Raises:
      SbpError: `bad-argument` for a rate that is not above 0 or a latency below 0.
    """

    bytes_per_second: float
    latency_seconds: float


_COUNT = Kind("a whole number of 1 or more", lambda x: is_whole(x) and x >= 1)


def _are_slow_axes(axes: Any) -> bool:
    pairs = isinstance(axes, tuple) and all(isinstance(a, tuple) and len(a) == 2 for a in axes)
    return pairs and all(isinstance(n, str) and isinstance(net, Network) for n, net in axes)


_FIGURES: dict[str, Kind] = {
    "name": TEXT,
    **dict.fromkeys(
        (
            *("flops_per_second", "hbm_bytes_per_second", "hbm_bytes", "link_bytes_per_second"),
            "host_bytes_per_second",
        ),
        _RATE,
    ),
    **dict.fromkeys(
        ("f32_flops_per_second", "highest_flops_per_second", "vector_flops_per_second"),
        or_none(_RATE),
    ),
    **dict.fromkeys(("latency_seconds", "hop_seconds", "fast_memory_bytes"), _FIGURE),
    **dict.fromkeys(("ring_chips", "devices_per_chip", "joined_devices", "product_rows"), _COUNT),
    "torus_dims": Kind("a whole number from 1 to 16", lambda x: is_whole(x) and 1 <= x <= 16),
    "whole_scatter_devices": or_none(_FIGURE),
    "overlaps": FLAG,
    "topology": one_of(TOPOLOGIES),
    "platform": one_of(PLATFORMS),
    "beyond": Kind("a Network or None", lambda x: x is None or isinstance(x, Network)),
    "slow_axes": Kind("a tuple of (mesh axis, Network), made by with_axis", _are_slow_axes),
}


@made_of("Hardware", **_FIGURES)
@dataclass(frozen=True, slots=True, kw_only=True)
class Hardware:
    """The figures of one device, as JAX counts devices, and of the links between devices.

    Arguments:
      name: the table's name of the device kind.
      flops_per_second: rate of matrix products of 16-bit numbers.
      f32_flops_per_second: rate of float32 products at JAX's default precision; None where it
          equals `flops_per_second`.
      highest_flops_per_second: rate of float32 products at `Precision.HIGHEST`; None where the
          precision makes no difference.
      vector_flops_per_second: rate of products of one row, which are no products of matrices; None
          where they run like those of more rows.
      product_rows: a product of fewer rows, or of fewer columns, takes as long as one of so many.
      hbm_bytes_per_second: memory bandwidth of one device.
      hbm_bytes: memory of one device.
      fast_memory_bytes: memory beside the cores, into which arguments that a product reads are
          copied while the device computes something else; 0 where the compiler does not do so.
      topology: `switch`: every device reaches every other one at its full rate; `torus`: a chip
          has links to two neighbours along each dim.
      torus_dims: number of dims of the torus.
      ring_chips: the ends of a dim of the torus are joined where its number of chips is a multiple
          of this; elsewhere the dim is a line.
      link_bytes_per_second: one way; for a switch the rate of one device, for a torus the rate of
          one link of a chip.
      devices_per_chip: devices that share a chip's links.
      latency_seconds: start-up time of one collective (the alpha of alpha-beta).
      hop_seconds: time of the first byte from a device to the next one; a collective pays it once
          for each step of its longest path.
      joined_devices: devices of one node or pod. Where `beyond` is None, a node has no limit.
      beyond: the network between nodes or pods; None for none.
      slow_axes: mesh axes that run over a network of their own; see `with_axis`.
      whole_scatter_devices: the compiler keeps a reduce-scatter over the whole mesh up to this
          number of devices. On larger meshes it makes an all-reduce of the reduce-scatter. There
          sbp runs two stages over groups of devices, which send as many bytes. None is any number;
          on a torus of TPUs, None is the number of the v6e.
      overlaps: whether a device computes while it sends.
      host_bytes_per_second: the rate at which one device copies to or from host memory, one way.
      platform: JAX's name of the platform, which a plan on an abstract mesh is lowered for.

    Raises:
      SbpError: `bad-argument` for a figure that is no number or out of its range, `unknown-option`
          for another topology or platform.
    """

    name: str
    flops_per_second: float
    hbm_bytes_per_second: float
    hbm_bytes: float
    link_bytes_per_second: float
    f32_flops_per_second: float | None = None
    highest_flops_per_second: float | None = None
    vector_flops_per_second: float | None = None
    product_rows: int = 1
    fast_memory_bytes: float = 0
    topology: Topology = "switch"
    torus_dims: int = 2
    ring_chips: int = 1
    devices_per_chip: int = 1
    latency_seconds: float = 1e-6
    hop_seconds: float = 0.0
    joined_devices: int = 1
    beyond: Network | None = None
    slow_axes: tuple[tuple[str, Network], ...] = ()
    whole_scatter_devices: float | None = None
    overlaps: bool = True
    host_bytes_per_second: float = 15e9
    platform: Platform = "tpu"

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if isinstance(value, np.number):  # JSON takes numbers of Python only
                object.__setattr__(self, field.name, value.item())

    @takes("Hardware.with_axis", skip=1, mesh_axis=AXIS)
    def with_axis(
        self, mesh_axis: str, *, bytes_per_second: float, latency_seconds: float = 20e-6
    ) -> "Hardware":
        """The same devices, with one mesh axis over a slower network: each index along that axis is
        another pod or node.

        Arguments:
          mesh_axis: name of the mesh axis.
          bytes_per_second: the rate at which one device can send along it, one way.
          latency_seconds: time until the first byte arrives.

        Raises:
          SbpError: `bad-argument` for a rate that is not above 0 or a latency below 0.

        >>> import sbp
        >>> sbp.HARDWARE["tpu-v5e"].with_axis("dcn", bytes_per_second=3e9).slow_axes[0][0]
        'dcn'
        """
        network = Network(bytes_per_second=bytes_per_second, latency_seconds=latency_seconds)
        others = (pair for pair in self.slow_axes if pair[0] != mesh_axis)
        return replace(self, slow_axes=(*others, (mesh_axis, network)))

    @takes("Hardware.product_flops_per_second", skip=1, itemsize=_BYTES, precision=_PRECISION)
    def product_flops_per_second(self, itemsize: int, precision: Precision = "default") -> float:
        """Floating-point operations per second of matrix products of `itemsize`-byte numbers.

        >>> import sbp
        >>> h100 = sbp.HARDWARE["h100"]
        >>> h100.product_flops_per_second(4) < h100.product_flops_per_second(2)
        True
        """
        if itemsize <= 2:
            return self.flops_per_second
        default = self.f32_flops_per_second or self.flops_per_second
        highest = self.highest_flops_per_second or default
        return (
            highest
            if precision == "highest" or itemsize > 4
            else default
            if precision == "default"
            else min(default, 2 * highest)  # three passes of 16 bits for six
        )


# ---- device kinds -------------------------------------------------------------------------------
# The figures of the device kinds that sbp knows, each with its source.


GIB = 2**30
MIB = 2**20
_HOP = 1e-6  # "about 1 us per hop": jax-ml.github.io/scaling-book, "How to Think About TPUs"
_DCN_LATENCY = 20e-6  # no vendor figure; tens of microseconds from host to host


def _gbit(per_second: float) -> Network:
    return Network(bytes_per_second=per_second * 1e9 / 8, latency_seconds=_DCN_LATENCY)


SLICE_NETWORK = _gbit(25)
"""The network between slices of TPUs that the table has no figure for: that of the v5e."""

_H100 = Hardware(
    name="h100",
    # nvidia.com, H100 and H200 data sheets (SXM), without sparsity: BF16, TF32 (JAX's default for
    # float32), FP32.
    flops_per_second=989e12,
    f32_flops_per_second=495e12,
    highest_flops_per_second=67e12,
    hbm_bytes_per_second=3350e9,
    hbm_bytes=80e9,
    # HGX: 18 NVLinks of 25 GB/s each way through NVSwitch, and one 400 Gbit/s adapter a GPU between
    # nodes of eight.
    link_bytes_per_second=450e9,
    latency_seconds=5e-6,
    hop_seconds=1e-6,
    joined_devices=8,
    beyond=Network(bytes_per_second=50e9, latency_seconds=5e-6),
    host_bytes_per_second=64e9,  # PCIe Gen5 x16: 128 GB/s both ways
    platform="cuda",
)


# cloud.google.com/tpu/docs/{v2,v3,v4,v5e,v5p,v6e,tpu7x}: peak in bf16, memory, "bidirectional ICI
# bandwidth per chip" (half of it is one way, over four or six links), pod size, "data center
# network bandwidth". Products of float32 are one pass of bf16 by default and six at `HIGHEST`. To
# host memory: 15 GB/s a chip over PCIe, of the scaling book (link at `_HOP`). `fast_memory_bytes`:
# VMEM of one core (`jax.experimental.pallas.tpu.get_tpu_info`); of v4 CMEM, Jouppi et al., TPU v4,
# ISCA 2023. `vector_flops_per_second` and `product_rows` are the estimates of libtpu 0.0.51
# (`python -m benchmarks.few_rows`); the v2 has the figures of the v3, scaled by its clock. The v7x
# takes a single row like more rows, and has the `product_rows` of the v6e. `whole_scatter_devices`:
# libtpu 0.0.52 keeps a reduce-scatter over all devices of slices of 8 v5e or v6e and of 4 v5p, but
# not of 16 or 8, and of no slice of v3 or v4 (benchmarks/lowerings.csv). Numbers between go with
# the nearer slice. The v2 is taken to be as the v3, and the v7x as the v5p.
HARDWARE: dict[str, Hardware] = {
    h.name: h
    for h in (
        # Two devices (cores) a chip. Links are 496 (v2) and 656 (v3) Gbit/s: Jouppi et al., A
        # Domain-Specific Supercomputer for Training Deep Neural Networks, CACM 63(7), 2020. Half of
        # that is taken to be one way: it gives the all-to-all times that the GShard paper measured
        # on v3 (figure 8), which twice as much does not (`benchmarks/gshard/figure8.py`).
        Hardware(
            name="tpu-v2",
            flops_per_second=22.5e12,
            highest_flops_per_second=22.5e12 / 6,
            vector_flops_per_second=104e9,
            product_rows=64,
            hbm_bytes_per_second=350e9,
            hbm_bytes=8 * GIB,
            fast_memory_bytes=16 * MIB,
            topology="torus",
            link_bytes_per_second=31e9,
            devices_per_chip=2,
            hop_seconds=_HOP,
            whole_scatter_devices=0,
        ),
        Hardware(
            name="tpu-v3",
            flops_per_second=61.5e12,
            highest_flops_per_second=61.5e12 / 6,
            vector_flops_per_second=138e9,
            product_rows=64,
            hbm_bytes_per_second=450e9,
            hbm_bytes=16 * GIB,
            fast_memory_bytes=16 * MIB,
            topology="torus",
            link_bytes_per_second=41e9,
            devices_per_chip=2,
            hop_seconds=_HOP,
            whole_scatter_devices=0,
        ),
        # One device a chip from here on, but for TPU7x. v4: 50 GB/s a link one way (Jouppi et al.,
        # TPU v4, ISCA 2023). Which slices have rings is from the scaling book (link at `_HOP`): on
        # v4 and v5p, slices of whole cubes of 4 chips a side; on v5e and v6e, slices with the whole
        # side of a pod, 16 chips. TPU7x is taken to be as v5p. On v2 and v3, every dim is taken for
        # a ring: half the rate on twice the links agrees with the paper's figure.
        Hardware(
            name="tpu-v4",
            flops_per_second=275e12,
            highest_flops_per_second=275e12 / 6,
            vector_flops_per_second=154e9,
            product_rows=64,
            hbm_bytes_per_second=1228e9,
            hbm_bytes=32 * GIB,
            fast_memory_bytes=128 * MIB,
            topology="torus",
            torus_dims=3,
            link_bytes_per_second=50e9,
            ring_chips=4,
            hop_seconds=_HOP,
            whole_scatter_devices=0,
        ),
        Hardware(
            name="tpu-v5e",
            flops_per_second=197e12,
            highest_flops_per_second=197e12 / 6,
            vector_flops_per_second=210e9,
            product_rows=48,
            hbm_bytes_per_second=819e9,
            hbm_bytes=16 * GIB,
            fast_memory_bytes=128 * MIB,
            topology="torus",
            link_bytes_per_second=50e9,
            ring_chips=16,
            hop_seconds=_HOP,
            whole_scatter_devices=11,
            joined_devices=256,
            beyond=_gbit(25),
        ),
        Hardware(
            name="tpu-v5p",
            flops_per_second=459e12,
            highest_flops_per_second=459e12 / 6,
            vector_flops_per_second=602e9,
            product_rows=64,
            hbm_bytes_per_second=2765e9,
            hbm_bytes=95 * GIB,
            fast_memory_bytes=64 * MIB,
            topology="torus",
            torus_dims=3,
            link_bytes_per_second=100e9,
            ring_chips=4,
            hop_seconds=_HOP,
            whole_scatter_devices=5,
            joined_devices=6144,  # the largest slice
            beyond=_gbit(50),
        ),
        Hardware(
            name="tpu-v6e",
            flops_per_second=918e12,
            highest_flops_per_second=918e12 / 6,
            vector_flops_per_second=433e9,
            product_rows=192,
            hbm_bytes_per_second=1638e9,
            hbm_bytes=32 * GIB,
            fast_memory_bytes=128 * MIB,
            topology="torus",
            link_bytes_per_second=100e9,
            ring_chips=16,
            hop_seconds=_HOP,
            whole_scatter_devices=11,
            joined_devices=256,
            beyond=_gbit(100),
        ),
        # Ironwood: a chip is two devices, so half of a chip's compute and memory each.
        Hardware(
            name="tpu-v7x",
            flops_per_second=2307e12 / 2,
            highest_flops_per_second=2307e12 / 12,
            product_rows=192,
            hbm_bytes_per_second=7380e9 / 2,
            hbm_bytes=96 * GIB,
            fast_memory_bytes=64 * MIB,
            topology="torus",
            torus_dims=3,
            link_bytes_per_second=100e9,
            devices_per_chip=2,
            ring_chips=4,
            hop_seconds=_HOP,
            whole_scatter_devices=5,
            joined_devices=2 * 9216,
            beyond=_gbit(50),
        ),
        _H100,
        replace(_H100, name="h200", hbm_bytes_per_second=4800e9, hbm_bytes=141e9),
        # glennklockwood.com/garden/processors/B200, without sparsity: HGX and GB200; NVLink of 1.8
        # TB/s both ways. Memory of HGX: 180 GB. NVLink-C2C to the host of the GB200: 900 GB/s both
        # ways for two GPUs. MI300X: matrices; seven links of 64 GB/s each way, priced as a switch,
        # so a permute over one link looks faster than it is. Adapters between nodes as for H100.
        replace(
            _H100,
            name="b200",
            flops_per_second=2250e12,
            f32_flops_per_second=1100e12,
            highest_flops_per_second=80e12,
            hbm_bytes_per_second=8000e9,
            hbm_bytes=180e9,
            link_bytes_per_second=900e9,
        ),
        replace(
            _H100,
            name="gb200",
            flops_per_second=2500e12,
            f32_flops_per_second=1250e12,
            highest_flops_per_second=90e12,
            hbm_bytes_per_second=8000e9,
            hbm_bytes=186e9,
            link_bytes_per_second=900e9,
            joined_devices=72,
            host_bytes_per_second=225e9,
        ),
        replace(
            _H100,
            name="mi300x",
            flops_per_second=1307e12,
            f32_flops_per_second=654e12,
            highest_flops_per_second=163e12,
            hbm_bytes_per_second=5300e9,
            hbm_bytes=192e9,
            link_bytes_per_second=448e9,
            platform="rocm",
        ),
        # Simulated host devices share one memory: a collective is a copy and a rendezvous of
        # threads.
        Hardware(
            name="cpu",
            flops_per_second=50e9,
            hbm_bytes_per_second=10e9,
            hbm_bytes=16 * GIB,
            link_bytes_per_second=2e9,
            latency_seconds=20e-6,
            overlaps=False,
            host_bytes_per_second=10e9,
            platform="cpu",
        ),
    )
}
"""Hardware by name; figures are the vendors' published peaks, per JAX device."""

_KINDS = (
    ("tpu v2", "tpu-v2"),
    ("tpu v3", "tpu-v3"),
    ("tpu v4", "tpu-v4"),
    ("tpu v5 lite", "tpu-v5e"),
    ("tpu v5e", "tpu-v5e"),
    ("tpu v5", "tpu-v5p"),
    ("tpu v6", "tpu-v6e"),
    ("tpu7x", "tpu-v7x"),
    ("gb200", "gb200"),
    ("b200", "b200"),
    ("mi300x", "mi300x"),
    ("h200", "h200"),
    ("h100", "h100"),
    ("cpu", "cpu"),
)
"""Parts of `Device.device_kind` in lower case, each with its hardware; the first match counts. The
libtpu 0.0.51 compiler writes `TPU v5 lite` and `TPU7x`."""


def hardware_of_kind(device_kind: str, platform: str) -> Hardware:
    """The hardware of a JAX device; for a kind that is not in the table an entry of its platform.

    Arguments:
      device_kind: `Device.device_kind`.
      platform: `Device.platform`.

    >>> hardware_of_kind("TPU v5 lite", "tpu").name
    'tpu-v5e'
    """
    kind = device_kind.lower()
    found = next((name for part, name in _KINDS if part in kind), None)
    return HARDWARE[found or {"gpu": "h100", "tpu": "tpu-v6e"}.get(platform, "cpu")]


# ---- lanes --------------------------------------------------------------------------------------
# Parts of arrays that fill no whole tile of a TPU.


def joins_lanes(part: Sequence[int], whole: Sequence[int]) -> bool:
    """Whether a collective joins parts along the last dim that do not fill the lanes of a TPU's
    tiles. An array whose whole last dim is shorter than the lanes has another layout.

    Arguments:
      part: the shape of a part.
      whole: the shape of the array.

    >>> joins_lanes((32768, 64), (32768, 1024)), joins_lanes((32768, 128), (32768, 1024))
    (True, False)
    """
    lanes = TILE[1]
    return len(whole) > 1 and whole[-1] >= lanes and part[-1] < whole[-1] and part[-1] % lanes != 0


def copies_for_lanes(part: Sequence[int], whole: Sequence[int]) -> bool:
    """Whether a gather that joins lanes makes copies that a gather of rows would not make.

    Rows that are no whole tiles are copied as well: the gather holds its result twice.

    Arguments:
      part: the shape of a part.
      whole: the shape of the array.

    >>> copies_for_lanes((32768, 64), (32768, 1024)), copies_for_lanes((64000, 8), (64000, 1024))
    (True, False)
    """
    # The last dim is joined from `-(-whole[-1] // part[-1])` parts.
    return joins_lanes(part, whole) and whole[-2] % (TILE[0] * -(-whole[-1] // part[-1])) == 0


def fills_tiles(shape: Sequence[int]) -> bool:
    """Whether the last two dims of an array are whole tiles, so that the compiler has no reason to
    lay it out in another order.

    Arguments:
      shape: of one device's part.

    >>> fills_tiles((4, 2048, 1024)), fills_tiles((768, 3, 12, 64))
    (True, False)
    """
    return len(shape) > 1 and shape[-1] % TILE[1] == 0 and shape[-2] % TILE[0] == 0


def elements_in_tiles(shape: Sequence[int]) -> int:
    """Elements that an array takes with its last two dims in whole tiles.

    Arguments:
      shape: of one device's part.

    >>> elements_in_tiles((16384, 26, 64)), elements_in_tiles((4096, 256))
    (67108864, 1048576)
    """
    last = [-(-n // tile) * tile for n, tile in zip(shape[-2:], TILE[-len(shape) :], strict=True)]
    return math.prod((*shape[:-2], *last))


# ---- reduce-scatters ----------------------------------------------------------------------------
# The shape in which a TPU reduce-scatters a value. The TPU compiler makes an all-reduce, twice the
# bytes, of a reduce-scatter whose blocks do not suit the tiles of its layout (`python -m
# benchmarks.reduce_scatter_lowering`). A reduce-scatter along the first dim of an array of three
# dims stays what it is, if the other two are tiles of a memory layout. So the value is brought
# into such a shape where its own does not suit.


Arrangement = Literal["as it is", "dim first", "blocks first", "rows of lanes", "exchange"]
"""How a value is arranged for a reduce-scatter along a dim.

`dim first`: the dim is moved to the front, and all between it and the last dim is joined. `blocks
first`: the last dim is cut into blocks, which come first, and all other dims are joined. `rows of
lanes`: each block is a matrix with 128 columns. `exchange`: no shape suits, so the devices
exchange blocks, and each one adds the blocks that it receives.
"""

TILE = (8, 128)
"""Rows and columns of a tile in a TPU's memory. The last two dims of an array are stored in
tiles."""

WORD_BYTES = 4
"""Bytes of a word: narrower numbers share one, so that a block of lanes has to be longer."""

BROAD_BLOCK = 64
"""Elements of a block of the last dim from which on its blocks come first: a block of fewer fills
less than half of the lanes."""


def arrangement(
    shape: Sequence[int], dim: int, devices: int, itemsize: int, *, is_tpu: bool
) -> Arrangement:
    """How a value is arranged for a reduce-scatter.

    Arguments:
      shape: of one device's part.
      dim: the dim that is split; `devices` divides its size.
      devices: number of devices.
      itemsize: bytes of one element.
      is_tpu: whether the devices are TPUs; other platforms take every shape as it is.

    >>> arrangement((4096, 512), 1, 4, 2, is_tpu=True)
    'blocks first'
    >>> arrangement((4096, 512), 0, 4, 2, is_tpu=True)
    'as it is'
    """
    block, last = shape[dim] // devices, len(shape) - 1
    if not is_tpu or (last > 0 and _suits(shape, dim, block, itemsize)):
        return "as it is"
    if 0 < dim == last and block >= BROAD_BLOCK:
        return "blocks first"
    return (
        "dim first"
        if last > 1 and dim < last
        else "rows of lanes"
        if math.prod(shape) // devices % TILE[1] == 0
        else "exchange"
    )


def _suits(shape: Sequence[int], dim: int, block: int, itemsize: int) -> bool:
    """Whether blocks of a dim are whole tiles, or lie one after the other."""
    last = len(shape) - 1
    return (
        block * itemsize % (TILE[1] * WORD_BYTES) == 0
        if dim == last
        else block % TILE[0] == 0
        if dim == last - 1
        else dim == 0
    )
