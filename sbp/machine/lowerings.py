"""What the TPU compiler makes of collectives, as measured ahead of time on slices of each hardware
(`python -m benchmarks.collective_table --write`, which writes `lowerings.csv`)."""

from __future__ import annotations

import csv
import functools
import math
from dataclasses import dataclass
from importlib import resources

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
