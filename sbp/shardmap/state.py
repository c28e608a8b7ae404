"""What the checker carries along a body: the mesh axes, the divisions it knows, and what it has
found."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from sbp.errors import Severity, Span
from sbp.shardmap.held import Doubt, Fault
from sbp.shardmap.readings import Reader
from sbp.trace.graph import Graph, Node


@dataclass(frozen=True, slots=True, eq=False)
class Finding:
    """Something wrong, and what makes it count.

    Arguments:
      fault: what is wrong.
      mesh_axes: on which mesh axes.
      observer: the reduction that takes it; None when it is returned.
      region: the shard_map.
      result: which result of the region, where it is returned.
      claim: how out_specs say that the result is held.
    """

    fault: Fault
    mesh_axes: tuple[str, ...]
    observer: Node | None
    region: Node
    result: int = 0
    claim: str = ""

    @property
    def key(self) -> tuple[Any, ...]:
        """What makes two findings one: the same fault of the same line."""
        f = self.fault
        where = (
            (f.node.span or f.node.id, f.node.op, f.node.backward)
            if f.node is not self.region
            else (f.node.id, self.result)
        )
        return f.kind, where


@dataclass(frozen=True, slots=True, eq=False)
class Note:
    """Something that the checker cannot say.

    Arguments:
      node: the operation.
      text: what is not known, and why.
      severity: a warning where the analysis ends, a note where a claim is taken on trust.
    """

    node: Node
    text: str
    severity: Severity


@dataclass(slots=True, eq=False)
class Divisions:
    """What the divisions of means did, by place and divisor: their gradients divide by the same,
    and have the same place.

    Arguments:
      known: for each place and divisor, the changes of the excess by division; one helper may be
          called with what is split and what is not.
    """

    known: dict[tuple[Any, float], dict[int, dict[int, int | None]]] = field(default_factory=dict)

    def enter(self, node: Node, divisor: float, change: dict[int, int | None]) -> None:
        """Remembers what a division of the forward pass did to the excess, by mesh axis."""
        for place in {node.stack, node.span}:
            self.known.setdefault((place, divisor), {})[node.id] = change

    def of_gradient(self, node: Node, divisor: float) -> dict[int, int | None] | None:
        """What the gradient of a division does: None when no division is known, an axis is None
        where there are several that differ."""
        found = self.known.get((node.stack, divisor)) or self.known.get((node.span, divisor))
        if not found:
            return None
        changes = list(found.values())
        axes = sorted({k for change in changes for k in change})
        return {
            k: (
                changes[0].get(k)
                if all(k in c and c[k] == changes[0].get(k) for c in changes)
                else None
            )
            for k in axes
        }


@dataclass(slots=True, eq=False)
class State:
    """One region under analysis.

    Arguments:
      region: the shard_map.
      graph: its body.
      names: mesh axes of more than one device over which the region is manual.
      sizes: their sizes.
      averages: by the line of a pmean, or of any sum over devices, the axes that it runs over.
      divisions: what the divisions of means are by.
    """

    region: Node
    graph: Graph
    names: tuple[str, ...]
    sizes: tuple[int, ...]
    averages: dict[Span | None, tuple[tuple[int, ...], ...]]
    divisions: Divisions
    reader: Reader = field(init=False)
    findings: dict[tuple[Any, ...], Finding] = field(default_factory=dict)
    notes: dict[tuple[Any, ...], Note] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.reader = Reader(self.graph)

    def report(
        self, fault: Fault, axis: int, observer: Node | None, result: int = 0, claim: str = ""
    ) -> None:
        """Enters a finding; of the same on several axes there is one."""
        found = Finding(fault, (self.names[axis],), observer, self.region, result, claim)
        known = self.findings.get(found.key)
        if known is not None:
            if self.names[axis] in known.mesh_axes:
                return
            axes = tuple(a for a in self.names if a in (*known.mesh_axes, self.names[axis]))
            found = Finding(
                known.fault, axes, known.observer, self.region, known.result, known.claim
            )
        self.findings[found.key] = found

    def unanalysed(self, node: Node, why: str, severity: Severity = "warning") -> None:
        """Enters that nothing is known of what an operation returns."""
        self.notes.setdefault((node.span or node.id, node.op, severity), Note(node, why, severity))

    def doubtful(self, doubt: Doubt) -> None:
        """Enters a doubt, now that a value which has it is reduced or returned."""
        self.unanalysed(doubt.node, doubt.text, "note")

    def axes_of(self, named: Any) -> tuple[int, ...]:
        """Positions of the mesh axes that a collective names."""
        listed: Sequence[Any] = named if isinstance(named, tuple | list) else (named,)
        return tuple(self.names.index(a) for a in listed if a in self.names)
