"""A planned training step, compiled by the TPU compiler ahead of time for a slice that is not here:
the bytes, seconds and memory of the compiled program beside those of the plan."""

from __future__ import annotations

import importlib.util
import math
import os
import time
from collections.abc import Sequence
from dataclasses import dataclass

import jax
import numpy as np
from jax.experimental import topologies
from rich.console import Console
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.table import Table

import sbp
from benchmarks.hlo.schedule import CHIPS, step_time
from benchmarks.hlo.traffic import bytes_by_kind, collectives
from sbp.errors import SbpError

_ENVIRONMENT = {
    "TPU_SKIP_MDS_QUERY": "1",
    "TPU_ACCELERATOR_TYPE": "v4-8",
    "TPU_WORKER_HOSTNAMES": "localhost",
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
}
"""What the TPU compiler needs on a machine without TPUs, read when it is loaded."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CompiledStep:
    """What the TPU compiler made of a step; sizes are of one device.

    Attributes:
      sent: bytes sent in a step, by kind of collective.
      held: bytes held, arguments and temporaries; a donated argument and the result in its place
        count once.
      seconds: of a step, on the compiler's schedule; None for a chip without a clock in
        `benchmarks.hlo.schedule.CHIPS`.
      unknown: instructions without an estimate, which `seconds` leaves out.
      compile_seconds: that the compiler took.
    """

    sent: dict[str, float]
    held: float
    seconds: float | None
    unknown: tuple[str, ...]
    compile_seconds: float


def slice_mesh(topology: str, axes: Sequence[tuple[str, int]]) -> jax.sharding.Mesh:
    """The devices of a TPU slice as a mesh; they need not be present.

    Arguments:
      topology: as the compiler has it, such as "v3:32x32".
      axes: names and sizes, outer first; as many devices as the slice has.

    Raises:
      SbpError: `unknown-option` without the TPU compiler, or where it does not know the slice.
    """
    if importlib.util.find_spec("libtpu") is None:
        raise SbpError(
            "--compile needs the TPU compiler, which works without a TPU; install the extra: pip"
            " install 'sbp-jax[tpu]'",
            code="unknown-option",
        )
    for name, value in _ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    if "JAX_PLATFORMS" not in os.environ:
        jax.config.update("jax_platforms", "cpu")
    try:
        found = topologies.get_topology_desc(platform="tpu", topology_name=topology)
    except (RuntimeError, ValueError, NotImplementedError) as error:
        raise SbpError(
            f"the TPU compiler has no topology {topology!r}: {_first_line(error)}",
            code="unknown-option",
        ) from None
    names, sizes = zip(*axes, strict=True)
    devices = np.array(found.devices)
    if devices.size != math.prod(sizes):
        raise SbpError(
            f"topology {topology} has {devices.size:,} devices for the TPU compiler, and the mesh"
            f" has {math.prod(sizes):,}; give --mesh with as many",
            code="mesh-devices",
        )
    return jax.sharding.Mesh(devices.reshape(sizes), names)


def compile_step(plan: sbp.Plan, devices: int, chip: str, console: Console) -> CompiledStep:
    """Compile a plan.

    Arguments:
      plan: made on a mesh of `slice_mesh`.
      devices: of the mesh.
      chip: the generation, such as "v3".
      console: where progress is shown.

    Raises:
      SbpError: `unknown-option` where the compiler refuses the program, as when a device has too
        little memory.
    """
    started = time.monotonic()
    columns = (SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn())
    if not console.is_terminal:
        console.print("compiling by the TPU compiler ..")
    with Progress(*columns, console=console, transient=True) as progress:
        task = progress.add_task("lowering", total=None)
        lowered = plan.lower()
        progress.update(task, description="compiling by the TPU compiler")
        try:
            compiled = lowered.compile()
        except jax.errors.JaxRuntimeError as error:
            raise SbpError(
                f"the TPU compiler refuses the step: {_first_line(error)}", code="unknown-option"
            ) from None
        progress.update(task, description="reading the program")
        text, memory = compiled.as_text(), compiled.memory_analysis()
        assert text is not None and memory is not None
        timed = step_time(text, devices, chip) if chip in CHIPS else None
        return CompiledStep(
            sent=bytes_by_kind(collectives(text, devices)),
            held=memory.argument_size_in_bytes
            + memory.output_size_in_bytes
            + memory.temp_size_in_bytes
            - memory.alias_size_in_bytes,
            seconds=timed and timed.seconds,
            unknown=timed.unknown if timed else (),
            compile_seconds=time.monotonic() - started,
        )


def _first_line(error: Exception) -> str:
    return str(error).strip().split("\n")[0]


def comparison(plan: sbp.Plan, found: CompiledStep) -> Table:
    """The plan beside the compiled program."""
    shown = Table(
        title=f"compiled by the TPU compiler, in {found.compile_seconds:.0f} s",
        box=None,
        header_style="bold",
        title_justify="left",
    )
    shown.add_column("")
    for name in ("plan", "compiled", "ratio"):
        shown.add_column(name, justify="right")
    cost, sent = plan.cost, sum(found.sent.values())
    for name, planned, real, form in (
        ("MiB sent in a step, by a device", cost.bytes_per_device / 2**20, sent / 2**20, ",.2f"),
        ("MiB held by a device", cost.peak_memory_bytes / 2**20, found.held / 2**20, ",.2f"),
        ("seconds of a step", cost.seconds, found.seconds, ".4f"),
    ):
        if real is None:
            shown.add_row(name, f"{planned:{form}}", "-", "-")
        else:
            ratio = f"{planned / real:.2f}" if real else "-"
            shown.add_row(name, f"{planned:{form}}", f"{real:{form}}", ratio)
    for kind, size in found.sent.items():
        shown.add_row(f"  of it by {kind}", "", f"{size / 2**20:,.2f}", "")
    if found.unknown:
        shown.add_row(f"  not counted: {len(found.unknown)} instructions without an estimate")
    return shown
