"""GShard's table 4 from plans: how communication and computation of partitioned operators grow with
the devices.

    python -m benchmarks.gshard.table4

Every row of the table (Lepikhin et al., 2020) is a program whose types are pinned as the row says
and which is planned for several device counts D; exponents of D are fitted to the modelled seconds.
Nothing is compiled and no device is needed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import AbstractMesh

import sbp
from sbp.plan.program import sends

DEVICES = (32, 128, 512, 2048)
"""Square tori of TPU v3 chips, two cores each."""

EACH = 256
"""Size of a device's share of a dim that grows with the devices."""

TOKENS, M = 2048, 1024
"""Tokens of a group, and the model's size."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Operator:
    """A row of table 4: dims of size O(D) are split over D devices.

    Arguments:
      title: the operator, with the dims that grow.
      fn: the program.
      shapes: of its operands, by D.
      in_types, out_type: the types of the row.
      kinds: the collectives that the row names.
      sent: bytes that one device sends, by D.
      communication, compute: exponents of D in the time that one device takes; None where nothing
        is sent.
    """

    title: str
    fn: Callable[..., Any]
    shapes: Callable[[int], tuple[tuple[int, ...], ...]]
    in_types: tuple[str, ...]
    out_type: str
    kinds: frozenset[str] = frozenset()
    sent: Callable[[int], float] = lambda d: 0.0
    communication: float | None = None
    compute: float = 0.0


def _conv(x: jax.Array, w: jax.Array) -> jax.Array:
    return lax.conv_general_dilated(
        x, w, (1, 1), "SAME", dimension_numbers=("NCHW", "HWIO", "NCHW")
    )


_GATHERED = frozenset({"all_gather", "permute"})

TABLE4 = (
    Operator(
        title="Add(A,A->A), A",
        fn=lambda x, y: x + y,
        shapes=lambda d: ((d * 2**20,),) * 2,
        in_types=("d:S(0)", "d:S(0)"),
        out_type="d:S(0)",
    ),
    Operator(
        title="Matmul(AB,BC->AC), B",
        fn=lambda x, y: x @ y,
        shapes=lambda d: ((4096, d * EACH), (d * EACH, 8192)),
        in_types=("d:S(1)", "d:S(0)"),
        out_type="B",
        kinds=frozenset({"all_reduce"}),
        sent=lambda d: 2 * (d - 1) / d * 4096 * 8192 * 4,
        communication=0,
    ),
    Operator(
        title="Matmul(AB,BC->AC), A",
        fn=lambda x, y: x @ y,
        shapes=lambda d: ((d * EACH, 4096), (4096, 8192)),
        in_types=("d:S(0)", "B"),
        out_type="d:S(0)",
    ),
    Operator(
        title="Matmul(AB,BC->AC), A and B",
        fn=lambda x, y: x @ y,
        shapes=lambda d: ((d * EACH, d * EACH), (d * EACH, 8192)),
        in_types=("d:S(0)", "d:S(0)"),
        out_type="d:S(0)",
        kinds=_GATHERED,
        sent=lambda d: (d - 1) * EACH * 8192 * 4,
        communication=1,
        compute=1,
    ),
    Operator(
        title="Matmul(AB,BC->AC), A and C",
        fn=lambda x, y: x @ y,
        shapes=lambda d: ((d * EACH, 8192), (8192, d * EACH)),
        in_types=("d:S(0)", "d:S(1)"),
        out_type="d:S(0)",
        kinds=_GATHERED,
        sent=lambda d: (d - 1) * EACH * 8192 * 4,
        communication=1,
        compute=1,
    ),
    Operator(
        title="Reduce(AB->A), A",
        fn=lambda x: x.sum(1),
        shapes=lambda d: ((d * EACH, 2**16),),
        in_types=("d:S(0)",),
        out_type="d:S(0)",
    ),
    Operator(
        title="Reduce(AB->B), A",
        fn=lambda x: x.sum(0),
        shapes=lambda d: ((d * 2, 2**26),),
        in_types=("d:S(0)",),
        out_type="B",
        kinds=frozenset({"all_reduce"}),
        sent=lambda d: 2 * (d - 1) / d * 2**26 * 4,
        communication=0,
    ),
    Operator(
        title="Einsum(GSEC,GSM->EGCM), G and E",
        fn=lambda x, y: jnp.einsum("gsec,gsm->egcm", x, y),
        shapes=lambda d: ((d, TOKENS, d, 2 * TOKENS // d), (d, TOKENS, M)),
        in_types=("d:S(0)", "d:S(0)"),
        out_type="d:S(0)",
        kinds=frozenset({"all_to_all"}),
        sent=lambda d: (d - 1) / d * 2 * TOKENS * M * 4,
        # the paper's text, section 5.2: on a two-dimensional torus; its table prints O(1)
        communication=0.5,
    ),
    Operator(
        title="Convolution(BIXY,xyIO->BOXY), X",
        fn=_conv,
        shapes=lambda d: ((8, 64, d * 32, 4096), (3, 3, 64, 64)),
        in_types=("d:S(2)", "B"),
        out_type="d:S(2)",
        kinds=frozenset({"permute"}),
        sent=lambda d: 2 * 8 * 64 * 4096 * 4,  # a row to each neighbour
        communication=0,
    ),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Planned:
    """What a plan says of one operator on some devices: collectives, bytes that a device sends,
    seconds of sending and of the rest."""

    kinds: frozenset[str]
    sent: float
    communication: float
    compute: float


def planned(row: Operator, devices: int, hardware: str = "tpu-v3") -> Planned:
    """Plans one operator on a mesh of one axis."""
    f = sbp.jit(
        row.fn,
        AbstractMesh((devices,), ("d",)),
        in_types=row.in_types,
        out_types=row.out_type,
        hardware=hardware,
    )
    plan = f.plan(*(jax.ShapeDtypeStruct(s, jnp.float32) for s in row.shapes(devices)))
    found, mesh = sends(plan.program), plan.program.mesh
    communication = sum(
        s.step.seconds if s.step else mesh.collective(s.kind, (0,)).of(s.bytes, s.runs)
        for s in found
    )
    return Planned(
        kinds=frozenset(s.kind for s in found),
        sent=plan.cost.bytes_per_device,
        communication=communication,
        compute=plan.cost.seconds - communication,
    )


def exponent(devices: Sequence[int], values: Sequence[float]) -> float:
    """The slope of a straight line through values over devices, both as logarithms.

    >>> round(exponent((1, 4, 16), (1, 2, 4)), 6)
    0.5
    """
    return float(np.polyfit(np.log(devices), np.log(values), 1)[0])


def main() -> None:
    sizes = f"{'MiB at 2048':>12} {'asked':>8}"
    print(
        f"{'operator and dims that grow':34} {'collective':>14} {sizes} {'sending':>8} {'asked':>6}"
        f" {'compute':>8}  asked"
    )
    for row in TABLE4:
        found = [planned(row, d) for d in DEVICES]
        last, kind = found[-1], ",".join(sorted(found[-1].kinds)) or "none"
        sends = f"{exponent(DEVICES, [p.communication for p in found]):.2f}" if last.sent else "-"
        asked = "-" if row.communication is None else f"{row.communication:g}"
        compute = exponent(DEVICES, [p.compute for p in found])
        sizes = f"{last.sent / 2**20:12.1f} {row.sent(DEVICES[-1]) / 2**20:8.1f}"
        print(
            f"{row.title:34} {kind:>14} {sizes} {sends:>8} {asked:>6} {compute:8.2f} "
            f" {row.compute:g}"
        )


if __name__ == "__main__":
    main()
