"""The collectives of a plan beside those of its compiled program: kind, mesh axes, count with loop
trips, bytes that one device sends.

    python -m benchmarks.steps gpt_data --sides sbp --collectives

The compiler may merge collectives, which makes them fewer. It pads some reduce-scatters, and moves
their blocks to their places by permutes of a few rows, which the plan does not name. What else it
has more of than the plan is marked.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from benchmarks.gshard_bytes import MIB  # sets the ahead-of-time environment before JAX is used
from benchmarks.hlo.traffic import collectives
from sbp.plan.program import sends

KINDS = {
    "all_reduce": "all-reduce",
    "all_gather": "all-gather",
    "reduce_scatter": "reduce-scatter",
    "all_to_all": "all-to-all",
    "permute": "collective-permute",
    "broadcast": "collective-broadcast",
}
"""The opcode of XLA for each kind of collective in plans."""

PADDING = 0.1
"""Share of a reduce-scatter up to which the compiler pads it, and permutes its blocks."""

Key = tuple[str, tuple[str, ...]]
"""XLA's opcode, and the mesh axes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Amount:
    """How often collectives run in one call, and the bytes that one device sends in them."""

    count: int = 0
    sent: float = 0.0

    def __str__(self) -> str:
        return (
            f"{self.count:6d} {self.sent / MIB:10.2f} MiB" if self.count else f"{'-':>6}" + 15 * " "
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Compared:
    """Collectives of one kind over the same mesh axes.

    Arguments:
        kind: XLA's opcode.
        mesh_axes: names of the mesh axes.
        planned, compiled: in the plan and in the compiled program.
        of_scatters: whether these are the permutes of padded reduce-scatters.
    """

    kind: str
    mesh_axes: tuple[str, ...]
    planned: Amount
    compiled: Amount
    of_scatters: bool = False

    @property
    def is_more(self) -> bool:
        """Whether the compiled program has what the plan lacks: more collectives, or more bytes."""
        allowed = 1 + (PADDING if self.kind == "reduce-scatter" else 1e-9)
        return not self.of_scatters and (
            self.compiled.count > self.planned.count
            or self.compiled.sent > 1 + allowed * self.planned.sent
        )

    @property
    def verdict(self) -> str:
        """How the compiled program compares with the plan, in words."""
        if self.is_more:
            return "MORE"
        if self.of_scatters:
            return "of padded reduce-scatters"
        more, less = self.compiled.sent, self.planned.sent
        if more > less + 1:
            return f"padded by {more / less - 1:.1%}"
        return "fewer" if self.compiled.count < self.planned.count else "equal"

    def __str__(self) -> str:
        axes = ", ".join(self.mesh_axes)
        return f"{self.kind:20s} {axes:8s} {self.planned} {self.compiled}  {self.verdict}"


def planned(plan: Any) -> dict[Key, Amount]:
    """The collectives of a plan, of which some device sends something."""
    names = plan.program.mesh.names
    return _summed(
        ((KINDS[s.kind], tuple(a for a in names if a in s.mesh_axes)), s.runs, s.bytes)
        for s in sends(plan.program)
        if s.bytes
    )


def compiled(hlo_text: str, mesh: Sequence[tuple[str, int]]) -> dict[Key, Amount]:
    """The collectives of a compiled program.

    Arguments:
        hlo_text: `jax.stages.Compiled.as_text()`.
        mesh: names and sizes of the mesh axes, outer first.
    """
    sizes = [n for _, n in mesh]
    devices = int(np.prod(sizes))
    coordinates = np.stack(np.unravel_index(np.arange(devices), sizes))

    def axes_of(members: Iterable[int]) -> tuple[str, ...]:
        varying = coordinates[:, list(members)]
        return tuple(
            name for (name, _), row in zip(mesh, varying, strict=True) if len(set(row)) > 1
        )

    return _summed(
        ((c.kind, axes_of(c.members)), c.executions, c.bytes_per_device)
        for c in collectives(hlo_text, devices)
    )


def _summed(found: Iterable[tuple[Key, int, float]]) -> dict[Key, Amount]:
    totals: dict[Key, list[float]] = defaultdict(lambda: [0, 0.0])
    for key, count, sent in found:
        totals[key][0] += count
        totals[key][1] += sent
    return {key: Amount(count=int(n), sent=sent) for key, (n, sent) in totals.items()}


def compared(plan: Any, hlo_text: str) -> list[Compared]:
    """The collectives of a plan beside those of its compiled program, most planned bytes first."""
    ours, theirs = planned(plan), compiled(hlo_text, plan.program.mesh.axes)
    found = [
        Compared(
            kind=kind,
            mesh_axes=axes,
            planned=ours.get((kind, axes), Amount()),
            compiled=theirs.get((kind, axes), Amount()),
            of_scatters=kind == KINDS["permute"]
            and (kind, axes) not in ours
            and theirs[kind, axes].sent
            <= PADDING * ours.get((KINDS["reduce_scatter"], axes), Amount()).sent,
        )
        for kind, axes in sorted({*ours, *theirs})
    ]
    return sorted(found, key=lambda c: -max(c.planned.sent, c.compiled.sent))


def table(found: Sequence[Compared]) -> Iterator[str]:
    """The lines of a table, with its totals."""
    yield f"    {'':20s} {'axes':8s} {'planned':>21s} {'compiled':>21s}"
    for one in found:
        yield f"    {one}"
    ours, theirs = sum(c.planned.count for c in found), sum(c.compiled.count for c in found)
    more = sum(c.is_more for c in found)
    yield f"    {ours} planned, {theirs} compiled; {more} of {len(found)} kinds and axes have more"
