"""The state of the checker in a body: the mesh axes, the known divisions, and the findings."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from sbp.errors import Help, Severity, Span
from sbp.shardmap.coverage import Sighted
from sbp.shardmap.distribution import Doubt, Fault
from sbp.shardmap.readings import Reader
from sbp.trace.graph import Graph, Node, Operand
from sbp.types import Atom


@dataclass(frozen=True, slots=True)
class Reading:
    """The reading of a division under which its number is a count.

    Arguments:
      node: the division.
      counts: the things that the number may count: devices, or the elements of one shard.
      number: the number.
    """

    node: Node
    counts: Literal["devices", "elements"]
    number: float


@dataclass(frozen=True, slots=True, eq=False)
class Finding:
    """A fault that counts, because an operation reduces the faulty value or a region returns it.

    Arguments:
      fault: the fault.
      mesh_axes: the mesh axes on which it occurs.
      observer: the reduction that reads the value; None when a region returns it.
      region: the shard_map.
      result: the position of the region's result, if a region returns the value.
      claim: the type that out_specs give that result on the mesh axis; None when the finding is not
          about out_specs.
      reading: the reading of a division under which this is wrong, where nothing is wrong if the
          number is another one; None where the finding does not depend on a reading.
    """

    fault: Fault
    mesh_axes: tuple[str, ...]
    observer: Node | None
    region: Node
    result: int = 0
    claim: Atom | None = None
    reading: Reading | None = None

    @property
    def severity(self) -> Severity:
        """A warning where one of two readings of a division is right."""
        return "error" if self.reading is None else "warning"

    @property
    def key(self) -> tuple[Any, ...]:
        """Two findings are one if their keys are equal: the same fault of one call."""
        f = self.fault
        where = (
            (f.node.span or f.node.id, f.node.op, f.node.backward)
            if f.node is not self.region
            else (f.node.id, self.result)
        )
        return f.kind, where


@dataclass(slots=True, eq=False)
class Divisions:
    """The divisions of a program.

    A gradient divides by the same numbers as its forward part, and its equations carry the same
    call path: the user's frames from the equation outwards.

    Arguments:
      pmeans: by the call path of a `lax.pmean`, the mesh axes that it runs over.
      flipped: ids of divisions that are read the other way.
      open: readings of divisions whose number may be another one, by the id of the division.
      counted: ids of divisions whose number is read as the count of a shard's elements.
      shards: readings of divisions whose number may be that, by the id of the division.
      by_devices: ids of divisions by a number of devices.
      known: by call path and divisor, the changes of the excess by each division; a function may be
          called on split values and on whole ones.
    """

    pmeans: Mapping[tuple[Span, ...], tuple[tuple[int, ...], ...]]
    flipped: frozenset[int] = frozenset()
    open: dict[int, Reading] = field(default_factory=dict)
    counted: frozenset[int] = frozenset()
    shards: dict[int, Reading] = field(default_factory=dict)
    by_devices: set[int] = field(default_factory=set)
    known: dict[tuple[Any, float], dict[int, dict[int, int | None]]] = field(default_factory=dict)

    def enter(self, node: Node, divisor: float, change: dict[int, int | None]) -> None:
        """Stores the change of the excess by a division of the forward pass, by mesh axis."""
        self.known.setdefault((node.stack, divisor), {})[node.id] = change

    def of_gradient(self, node: Node, divisor: float) -> dict[int, int | None] | None:
        """The change of the excess by the gradient of a division. None when the forward division is
        not known; None on a mesh axis where several forward divisions differ."""
        changes = list(self.known.get((node.stack, divisor), {}).values())
        if not changes:
            return None
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
      divisions: the divisions of the program.
      findings: the findings by their keys.
      doubts: the doubts by source line, operation and severity.
      turns: the lengths of the scans around the operation that is analysed.
      sighted: what was read of each operation.
    """

    region: Node
    graph: Graph
    names: tuple[str, ...]
    sizes: tuple[int, ...]
    divisions: Divisions
    reader: Reader = field(init=False)
    makers: dict[int, Node] = field(init=False)
    findings: dict[tuple[Any, ...], Finding] = field(default_factory=dict)
    doubts: dict[tuple[Any, ...], Doubt] = field(default_factory=dict)
    turns: list[int] = field(default_factory=list)
    sighted: Sighted = field(default_factory=Sighted)

    def __post_init__(self) -> None:
        self.reader = Reader(self.graph)
        self.makers = {v: node for node in self.graph.walk() for v in node.outputs}

    def maker(self, operand: Operand) -> Node | None:
        """The operation that makes a value; None for a constant and for an input of a body."""
        return self.makers.get(operand) if isinstance(operand, int) else None

    def report(
        self,
        fault: Fault,
        axis: int,
        observer: Node | None,
        result: int = 0,
        claim: Atom | None = None,
    ) -> None:
        """Enters a finding; the same one on several axes is entered once.

        Arguments:
          fault: the fault.
          axis: the position of the mesh axis.
          observer: the reduction that reads the value; None when the region returns it.
          result: the position of the region's result, if the region returns the value.
          claim: the type that out_specs give that result.
        """
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

    def enter(self, doubt: Doubt) -> None:
        """Enters a doubt; one operation has one of each severity."""
        node = doubt.node
        self.doubts.setdefault((node.span or node.id, node.op, doubt.severity), doubt)

    def axes_of(self, named: Any) -> tuple[int, ...]:
        """Positions of the mesh axes that a collective names."""
        listed: Sequence[Any] = named if isinstance(named, tuple | list) else (named,)
        return tuple(self.names.index(a) for a in listed if a in self.names)


@dataclass(frozen=True, slots=True)
class FoundRepairs:
    """The helps of one finding.

    Arguments:
      helps: the accepted repairs, cheapest first.
      untried: whether the search for repairs stopped at a limit before all were tried.
    """

    helps: tuple[Help, ...] = ()
    untried: bool = False
