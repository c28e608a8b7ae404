"""The hardware table as a page: the figures that costs are modelled with, by the names that
`sbp.jit(.., hardware=..)` takes; and the slice whose measurements stand for another one."""

from __future__ import annotations

import math
from collections.abc import Iterator

from sbp.errors import bytes_text
from sbp.machine.hardware import Hardware
from sbp.machine.lowerings import compiler, scatters_whole_mesh
from sbp.machine.table import HARDWARE
from sbp.plan.program import Program
from sbp.plan.traffic import sends
from sbp.report.parts import Page, table
from sbp.report.wording import counted


def hardware_page() -> Page:
    """All hardware that has a name. Figures are those of one JAX device, links those of a chip.

    >>> hardware_page().parts[0].rows[1].cells[:2]
    ('tpu-v3', '61.5')
    """
    headings = (
        "name",
        ">TFLOP/s",
        ">float32",
        ">memory",
        ">GB/s",
        "network",
        ">link",
        ">joins",
        ">beyond",
    )
    return Page(
        title="hardware, of one JAX device; links and what is beyond in GB/s, one way",
        parts=(table(headings, map(_cells, HARDWARE.values())),),
    )


def _cells(h: Hardware) -> tuple[str, ...]:
    return (
        h.name,
        _figure(h.flops_per_second / 1e12),
        _figure(h.product_flops_per_second(4) / 1e12),
        bytes_text(h.hbm_bytes),
        _figure(h.hbm_bytes_per_second / 1e9),
        f"{h.torus_dims}-D torus" if h.topology == "torus" else "switch",
        _figure(h.link_bytes_per_second / 1e9),
        "" if h.beyond is None else str(h.joined_devices),
        "" if h.beyond is None else _figure(h.beyond.bytes_per_second / 1e9),
    )


def _figure(value: float) -> str:
    return f"{value:.4g}"


def unmeasured(program: Program) -> Iterator[str]:
    """The slice whose measured collectives stand for those of this mesh, where a reduce-scatter
    over all devices depends on it."""
    mesh = program.mesh
    found = scatters_whole_mesh(mesh.hardware, mesh.num_devices)
    whole = any(
        send.step is not None
        and send.step.kind == "reduce_scatter"
        and math.prod(mesh.size(axis) for axis in send.mesh_axes) == mesh.num_devices
        for send in sends(program)
    )
    if found is not None and not found.is_exact and whole:
        yield (
            f"collectives of {mesh.hardware.name} with {counted(mesh.num_devices, 'device')} were"
            f" not measured: reduce-scatters over all devices are taken to compile as on"
            f" {found.hardware} {found.slice} ({compiler()}); `scatters_whole_mesh` of"
            " `sbp.Hardware` says otherwise"
        )
