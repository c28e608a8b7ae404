"""The file that `sbp calibrate` writes: rates that were measured on the devices at hand."""

import functools
import itertools
import os
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import jax

from sbp.errors import SbpError
from sbp.machine.hardware import HARDWARE, Hardware, Network

RATES = (
    "flops_per_second",
    "f32_flops_per_second",
    "highest_flops_per_second",
    "hbm_bytes_per_second",
)
"""The figures of `Hardware` that `sbp calibrate` measures."""

KINDS = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "permute")
"""The collectives that `sbp calibrate` measures over each mesh axis."""


@dataclass(frozen=True, slots=True, eq=False)
class Calibration:
    """What was measured on the devices of a mesh.

    Arguments:
      file: where it was read.
      date: when it was measured.
      device_kind: `Device.device_kind` of the devices.
      axes: the mesh as (name, size) pairs, outer first.
      hardware: the table's figures of these devices, with the measured rates.
      links: by collective and mesh axes, the seconds to start it, and the seconds per byte that a
        device sends.
    """

    file: str
    date: str
    device_kind: str
    axes: tuple[tuple[str, int], ...]
    hardware: Hardware
    links: Mapping[tuple[str, tuple[str, ...]], tuple[float, float]]

    def check(self, axes: tuple[tuple[str, int], ...], device_kind: str | None) -> None:
        """Checks that it is for a mesh.

        Arguments:
          axes: of the mesh.
          device_kind: of its devices; None for an abstract mesh.

        Raises:
          SbpError: `bad-argument` where it is not.
        """
        own, other = (" ".join(f"{k}={n}" for k, n in a) for a in (self.axes, axes))
        if device_kind not in (None, self.device_kind):
            own, other = self.device_kind, str(device_kind)
        if own != other:
            raise SbpError(
                f"the calibration {self.file} was measured on {own}, but the mesh has {other}; run"
                " sbp calibrate on this mesh"
            )


def read_calibration(file: str) -> Calibration:
    """A file of `sbp calibrate`.

    Raises:
      SbpError: `bad-argument` where there is no such file, where it is damaged, or where another
        version of JAX measured it.
    """
    try:
        return _read(file, os.stat(file).st_mtime_ns)
    except OSError as error:
        raise SbpError(f"cannot read the calibration {file}: {error.strerror}") from None


@functools.lru_cache(maxsize=16)
def _read(file: str, _: int) -> Calibration:
    try:
        with open(file, "rb") as opened:
            found = tomllib.load(opened)
        made, version = found["made"], found["made"]["jax"]
        rates = {name: float(found["rates"][name]) for name in RATES}
        links = {(c["kind"], tuple(c["mesh_axes"])): _link(c) for c in found.get("collective", ())}
        axes = tuple((name, int(size)) for name, size in found["mesh"].items())
        for kind, (name, size) in itertools.product(KINDS, axes):
            if size > 1 and (kind, (name,)) not in links:
                raise ValueError(f"it has no {kind} over {name}")
        calibration = Calibration(
            file=file,
            date=str(made["date"]),
            device_kind=made["device_kind"],
            axes=axes,
            hardware=replace(_hardware(made["hardware"]), **rates),
            links=links,
        )
    except (
        ValueError,
        KeyError,
        TypeError,
        AttributeError,
        OverflowError,
        RecursionError,
    ) as error:
        what = f"it lacks {error}" if isinstance(error, KeyError) else str(error)
        what = error.message if isinstance(error, SbpError) else what
        raise SbpError(
            f"the calibration {file} is damaged: {what}; run sbp calibrate again"
        ) from None
    if version != jax.__version__:
        raise SbpError(
            f"the calibration {file} was measured with JAX {version}, and this is JAX"
            f" {jax.__version__}; run sbp calibrate again"
        )
    return calibration


def _hardware(name: Any) -> Hardware:
    if name not in HARDWARE:
        raise ValueError(f"there is no hardware {name!r}")
    return HARDWARE[name]


def _link(collective: Any) -> tuple[float, float]:
    network = Network(
        bytes_per_second=float(collective["bytes_per_second"]),
        latency_seconds=float(collective["seconds"]),
    )
    return network.latency_seconds, 1 / network.bytes_per_second
