"""The hardware table as a page: the figures that costs are modelled with, by the names that
`sbp.jit(.., hardware=..)` takes."""

from __future__ import annotations

from sbp.errors import bytes_text
from sbp.machine.hardware import Hardware
from sbp.machine.table import HARDWARE
from sbp.report.parts import Page, table


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
