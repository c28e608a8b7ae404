"""Meshes on the hardware of the table, and the kinds of collectives."""

from sbp.machine.mesh import MeshSpec
from sbp.machine.table import HARDWARE

GATHERS = ("all_gather", "reduce_scatter")
KINDS = (*GATHERS, "all_reduce", "all_to_all", "permute")


def spec(hardware, **sizes):
    return MeshSpec(
        axes=tuple(sizes.items()),
        hardware=HARDWARE[hardware] if isinstance(hardware, str) else hardware,
    )
