"""What was checked of a program: its collectives with the bytes that they send, and its comparisons
with one device."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from sbp.errors import Span
from sbp.shardmap.one_device import ComparedRun, Comparisons
from sbp.source.reader import source_text, users_span
from sbp.trace.collectives import SHARD_MAP, CollectiveRun, collective_runs


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckedCollective:
    """A collective of a region, with all calls of its line.

    Arguments:
      text: the user's expression.
      span: its place; None where the user's line is not known.
      op: the primitive's name.
      mesh_axes: the mesh axes that it runs over.
      runs: how often it runs in one call of the program.
      bytes_per_device: the bytes that one device sends in all runs.
    """

    text: str
    span: Span | None
    op: str
    mesh_axes: tuple[str, ...]
    runs: int
    bytes_per_device: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Coverage:
    """What was checked of a program.

    Arguments:
      regions: the number of its regions, those of gradients included.
      values: the number of values in them.
      collectives: its collectives, in program order.
      runs: its comparisons with one device of each mesh axis.
    """

    regions: int
    values: int
    collectives: tuple[CheckedCollective, ...]
    runs: tuple[ComparedRun, ...] = ()


def coverage(compared: Comparisons) -> Coverage:
    """What was checked of a program, by its comparisons."""
    regions = [node for node in compared.graph.walk() if node.op == SHARD_MAP]
    grouped: dict[Any, list[CollectiveRun]] = {}
    for run in (run for region in regions for run in collective_runs(region)):
        span = users_span(run.node)
        grouped.setdefault((span or run.node.id, run.node.op, run.mesh_axes), []).append(run)
    return Coverage(
        regions=len(regions),
        values=sum(len(n.outputs) for r in regions for n in r.params["body"].walk()),
        collectives=tuple(
            CheckedCollective(
                text=source_text(users_span(runs[0].node)) or runs[0].node.op,
                span=users_span(runs[0].node),
                op=runs[0].node.op,
                mesh_axes=runs[0].mesh_axes,
                runs=sum(r.runs for r in runs),
                bytes_per_device=sum(r.bytes_per_device for r in runs),
            )
            for runs in grouped.values()
        ),
        runs=tuple(c.run for c in compared.compared),
    )
