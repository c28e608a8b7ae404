"""What the checker read of a program and what it did not: its collectives with the bytes that they
send, and the values at which readings end."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from sbp.errors import Span
from sbp.shardmap.comparison import ComparedRun
from sbp.shardmap.distribution import LocalValue
from sbp.source.reader import source_text, users_span
from sbp.trace.collectives import (
    AXIS_INDEX,
    KINDS,
    SHARD_MAP,
    CollectiveRun,
    collective_runs,
    is_collective,
    names_of,
)
from sbp.trace.graph import Graph, Node
from sbp.trace.regions import LOOPS

Why = Literal[
    "branch",
    "collective",
    "exchange",
    "index",
    "loop",
    "nested",
    "part",
    "permute",
    "row",
    "side-by-side",
]
"""Why a value has no reading on a mesh axis, though the operands of its operation have one.

* `branch`: branches that give it different types, or a predicate that differs by device;
* `collective`: a collective that is not analysed, or runs in groups of an axis;
* `exchange`: an all-to-all that exchanges no split dim for another;
* `index`: it depends on the index of its device, and is no position or block of a whole value;
* `loop`: a loop along a split dim, with a carry that changes its type, or whose trips differ by
  device;
* `nested`: a `shard_map` inside of a `shard_map`;
* `part`: it is made of one device's own part, for a later step to merge;
* `permute`: it came from another device;
* `row`: no row of the operation's signature takes the types of its operands;
* `side-by-side`: it is made of what the devices found of their own parts, gathered side by side.
"""


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
      read: whether its operand has a reading on all of these mesh axes.
    """

    text: str
    span: Span | None
    op: str
    mesh_axes: tuple[str, ...]
    runs: int
    bytes_per_device: float
    read: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class UnreadValue:
    """A value at which readings end: it has none on a mesh axis, and its operands have.

    Arguments:
      text: the user's expression.
      span: its place; None where the user's line is not known.
      op: the primitive's name.
      mesh_axes: the mesh axes on which it has no reading.
      why: the reason.
      types: the types of its operands on the first of these mesh axes, where the reason is `row`.
    """

    text: str
    span: Span | None
    op: str
    mesh_axes: tuple[str, ...]
    why: Why
    types: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Coverage:
    """What was checked of a program.

    Arguments:
      regions: the number of its regions, those of gradients included.
      values: the number of values in them.
      collectives: its collectives, in program order.
      unread: the values at which readings end, in program order.
      dependent: the number of further values that have no reading because they depend on these.
      unshown: claims about values without a reading: the region's place, the position of the
          result, the mesh axis.
      runs: comparisons with one device of each mesh axis on which values have no reading.
    """

    regions: int
    values: int
    collectives: tuple[CheckedCollective, ...]
    unread: tuple[UnreadValue, ...]
    dependent: int
    unshown: tuple[tuple[Span | None, int, str], ...]
    runs: tuple[ComparedRun, ...] = ()


_RANKS = ("candidates", "pair", "prefix", "sorting_network")
"""Kernels of operations whose results say where an element stands among others."""


@dataclass(slots=True, eq=False)
class Sighted:
    """What the analysis saw of each operation, the last time that it came by.

    Arguments:
      ends: the reasons and types of operands of the values at which readings end, by the id of the
          operation and the position of the mesh axis.
      dependent: operations whose results have no reading because operands have none, likewise.
      unread: ids of collectives whose operand has no reading.
      ranked: ids of operations that rank or add up the elements of each shard where they need the
          whole dim.
    """

    ends: dict[tuple[int, int], tuple[Why, tuple[str, ...]]] = field(default_factory=dict)
    dependent: set[tuple[int, int]] = field(default_factory=set)
    unread: set[int] = field(default_factory=set)
    ranked: set[int] = field(default_factory=set)

    def see(
        self, node: Node, ins: Sequence[LocalValue], outs: Sequence[LocalValue], over: Sequence[int]
    ) -> None:
        """Enters an operation with its operands and results; `over` are the positions of the mesh
        axes that a collective runs over."""
        self.unread.discard(node.id)
        faults = [h.fault for v in outs for h in v.per_axis if h.fault]
        if any(f.node is node and f.kernel in _RANKS for f in faults):
            self.ranked.add(node.id)
        if any(_unread(v, k) for v in ins for k in over):
            self.unread.add(node.id)
        for k in range(len(outs[0].per_axis) if outs else 0):
            key = node.id, k
            self.dependent.discard(key)
            if any(v.per_axis[k].stack for v in ins) and _scale_lost(outs, k):
                self.ends[key] = "side-by-side", ()
                continue
            if not any(_unread(v, k) for v in outs):
                self.ends.pop(key, None)
                continue
            if key in self.ends:  # in an earlier trip of a loop, before its carry depended on it
                continue
            if any(_unread(v, k) for v in ins):
                self.dependent.add(key)
                continue
            inner = (n.id for region in node.regions for n in region.walk())
            if not any((i, k) in self.ends for i in inner):
                types = tuple(_types(v, k) for v in ins)
                self.ends[key] = _why(node, ins, k), types


def _unread(v: LocalValue, axis: int) -> bool:
    return v.per_axis[axis].unknown and v.position is None


def _scale_lost(outs: Sequence[LocalValue], axis: int) -> bool:
    """Whether nothing is known of results but that they are equal on all devices."""
    given = [v.per_axis[axis] for v in outs]
    return all(not h.stack and not h.unknown and h.excess is None and not h.doubt for h in given)


def _types(v: LocalValue, axis: int) -> str:
    return " or ".join(map(repr, v.per_axis[axis].readings)) or "by index"


def _why(node: Node, ins: Sequence[LocalValue], axis: int) -> Why:
    if node.op == SHARD_MAP:
        return "nested"
    if node.regions:
        return "loop" if node.op in LOOPS else "branch"
    if is_collective(node.op):
        kind = KINDS.get(node.op)
        return kind if kind in ("exchange", "permute") else "collective"
    if any(v.per_axis[axis].unknown for v in ins):
        return "index"
    return "part" if any(v.per_axis[axis].partial or v.per_axis[axis].fault for v in ins) else "row"


# ---- as data for the report ---------------------------------------------------------------------


def coverage(
    regions: Sequence[Node],
    names: tuple[str, ...],
    sighted: Sighted,
    unshown: Sequence[tuple[int, int, str]],
) -> Coverage:
    """What was checked of some regions.

    Arguments:
      regions: the regions.
      names: the mesh axes of more than one device.
      sighted: what the analysis saw.
      unshown: claims about values without a reading: the region's id, the result, the mesh axis.
    """
    every = [n for r in regions for n in _walk(r.params["body"])]
    places = {r.id: users_span(r) for r in regions}
    return Coverage(
        regions=len(regions),
        values=sum(len(n.outputs) for n in every),
        collectives=tuple(_collectives(regions, sighted)),
        unread=tuple(_ends(every, names, sighted)),
        dependent=len({i for i, _ in sighted.dependent}),
        unshown=tuple((places.get(r), result, name) for r, result, name in sorted(unshown)),
    )


def _walk(graph: Graph) -> list[Node]:
    return list(graph.walk())


def _collectives(regions: Sequence[Node], sighted: Sighted) -> list[CheckedCollective]:
    grouped: dict[Any, list[CollectiveRun]] = {}
    for region in regions:
        for run in collective_runs(region):
            span = users_span(run.node)
            grouped.setdefault((span or run.node.id, run.node.op, run.mesh_axes), []).append(run)
    return [
        CheckedCollective(
            text=source_text(users_span(runs[0].node)) or runs[0].node.op,
            span=users_span(runs[0].node),
            op=runs[0].node.op,
            mesh_axes=runs[0].mesh_axes,
            runs=sum(r.runs for r in runs),
            bytes_per_device=sum(r.bytes_per_device for r in runs),
            read=not any(r.node.id in sighted.unread for r in runs),
        )
        for runs in grouped.values()
    ]


def _ends(every: Sequence[Node], names: tuple[str, ...], sighted: Sighted) -> list[UnreadValue]:
    found: dict[Any, UnreadValue] = {}
    for node in every:
        axes = [k for k in range(len(names)) if (node.id, k) in sighted.ends]
        if not axes or node.op == AXIS_INDEX:
            continue
        why, types = sighted.ends[node.id, axes[0]]
        span = users_span(node)
        value = UnreadValue(
            text=source_text(span) or node.op,
            span=span,
            op=node.op,
            mesh_axes=tuple(names[k] for k in axes),
            why=why,
            types=types if why == "row" else (),
        )
        found.setdefault((span or node.id, why), value)
    return list(found.values())


def axes_over(node: Node, names: tuple[str, ...]) -> list[int]:
    """The positions of the mesh axes that a collective runs over; none for other operations."""
    named = names_of(node) if node.op in KINDS else ()
    listed = named if isinstance(named, tuple | list) else (named,)
    return [names.index(a) for a in listed if a in names]
