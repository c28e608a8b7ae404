"""What the TPU compiler makes of collectives, as measured ahead of time on slices of each hardware
(`python -m benchmarks.collective_table --write`, which writes `lowerings.csv`), and of arrays that
fill no whole tiles."""

import csv
import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import resources
from typing import Literal

from sbp.machine.hardware import Hardware

_LIKE = {"tpu-v2": "tpu-v3", "tpu-v7x": "tpu-v5p"}
"""For hardware that the compiler here has no slices of, the nearest that it has."""

_NEWEST = "tpu-v6e"
"""For TPUs that the user describes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Lowering:
    """One collective on one slice.

    Arguments:
      hardware: name of the hardware.
      slice: its chips along each dim, `4x4`.
      devices: number of devices.
      mesh: sizes of the mesh axes over them.
      axis: the mesh axis that the collective runs over.
      kind: the collective, by its name in plans.
      dtype: of its operand.
      compiled: XLA's opcodes of what the compiler made of it.
      beside_work: whether it runs while the device computes something else.
    """

    hardware: str
    slice: str
    devices: int
    mesh: tuple[int, ...]
    axis: int
    kind: str
    dtype: str
    compiled: tuple[str, ...]
    beside_work: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """A fact about a slice, with the slice that it was measured on.

    Arguments:
      holds: the fact.
      hardware, slice: of the measurement.
      is_exact: whether these are the hardware and the number of devices that were asked for.
    """

    holds: bool
    hardware: str
    slice: str
    is_exact: bool


@functools.cache
def lowerings() -> tuple[Lowering, ...]:
    """All measurements."""
    return tuple(
        Lowering(
            hardware=row["hardware"],
            slice=row["slice"],
            devices=int(row["devices"]),
            mesh=tuple(map(int, row["mesh"].split("x"))),
            axis=int(row["axis"]),
            kind=row["kind"],
            dtype=row["dtype"],
            compiled=tuple(row["compiled"].split("+")),
            beside_work=row["runs"] == "beside work",
        )
        for row in csv.DictReader(_lines()[1:])
    )


def compiler() -> str:
    """The compiler that was measured, with its version.

    >>> compiler().split()[0]
    'libtpu'
    """
    return _lines()[0].removeprefix("# ")


@functools.cache
def _lines() -> tuple[str, ...]:
    path = resources.files("sbp.machine").joinpath("lowerings.csv")
    return tuple(path.read_text(encoding="utf-8").splitlines())


@functools.lru_cache(maxsize=256)
def scatters_whole_mesh(hardware: Hardware, devices: int) -> Measured | None:
    """Whether the compiler keeps a reduce-scatter over all devices of a slice, as measured on the
    slice whose number of devices is nearest; None for hardware that says so itself, and for other
    platforms.

    Arguments:
      hardware: the hardware.
      devices: number of devices of the slice.
    """
    described = hardware.scatters_whole_mesh is not None
    if described or (hardware.platform, hardware.topology) != ("tpu", "torus"):
        return None
    known = {row.hardware for row in lowerings()}
    name = hardware.name if hardware.name in known else _LIKE.get(hardware.name, _NEWEST)
    rows = [
        row
        for row in lowerings()
        if row.hardware == name and row.kind == "reduce_scatter" and len(row.mesh) == 1
    ]
    nearest = min(rows, key=lambda row: (abs(math.log(row.devices / devices)), -row.devices))
    return Measured(
        holds=all(
            "all-reduce" not in row.compiled for row in rows if row.devices == nearest.devices
        ),
        hardware=name,
        slice=nearest.slice,
        is_exact=name == hardware.name and nearest.devices == devices,
    )


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
    if not joins_lanes(part, whole):
        return False
    parts = -(-whole[-1] // part[-1])
    return whole[-2] % (TILE[0] * parts) == 0


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
    if last > 1 and dim < last:
        return "dim first"
    return "rows of lanes" if math.prod(shape) // devices % TILE[1] == 0 else "exchange"


def _suits(shape: Sequence[int], dim: int, block: int, itemsize: int) -> bool:
    """Whether blocks of a dim are whole tiles, or lie one after the other."""
    last = len(shape) - 1
    if dim == last:
        return block * itemsize % (TILE[1] * WORD_BYTES) == 0
    return block % TILE[0] == 0 if dim == last - 1 else dim == 0
