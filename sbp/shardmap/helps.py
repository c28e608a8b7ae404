"""Helps: edits of the source that remove a finding and add none, with the bytes that the edited
program sends as their price."""

from __future__ import annotations

from itertools import islice

from sbp.errors import Help
from sbp.machine.mesh import MeshSpec
from sbp.shardmap.edits import GraphEdit, bytes_sent, edited
from sbp.shardmap.regions import Analysis, analyse
from sbp.shardmap.repairs import RepairCandidate, Repairs
from sbp.shardmap.sites import Sites
from sbp.shardmap.state import Finding, FoundRepairs
from sbp.shardmap.words import primary
from sbp.trace.graph import Graph

MAX_HELPS = 3
"""The most repairs that are offered for one finding."""

TRIED = 24
"""The largest number of repairs that are tried for one finding."""

_ONE = ("copies-as-split", "doubled", "missing", "pending")
"""Kinds of faults whose candidates are one repair in several spellings: only the first accepted one
is offered."""


class Helper:
    """Tries repairs on a program.

    Arguments:
      graph: the program.
      mesh: its mesh.
      found: its findings and doubts.
      tried: the largest number of repairs that are tried for one finding.
    """

    def __init__(
        self, graph: Graph, mesh: MeshSpec, found: Analysis, *, tried: int = TRIED
    ) -> None:
        self.tried = tried
        self.graph, self.mesh = graph, mesh
        self.sites = Sites(graph)
        self.keys = frozenset(f.key for f in found.findings)
        self.doubts = frozenset(d.key for d in found.doubts)

    def helps(self, finding: Finding) -> FoundRepairs:
        """The accepted repairs."""
        found: dict[str, Help] = {}
        places: set[object] = set()
        if finding.region.backward:  # it follows from the region that is differentiated
            return FoundRepairs()
        most = 1 if finding.fault.kind in _ONE else MAX_HELPS
        accepted = 0
        repairs = Repairs(self.mesh, self.sites).of(finding)
        for repair in islice(repairs, self.tried):
            if repair.place in places or (repair.spare and found):
                continue
            new = {h.text: h for h in self.ways(finding, repair) if h.text not in found}
            found |= new
            if new:
                places |= {repair.place} - {None}
                accepted += 1
                if accepted == most:
                    break
        return FoundRepairs(
            helps=tuple(sorted(found.values(), key=lambda h: h.bytes_per_device)),
            untried=most > 1 and next(repairs, None) is not None,
        )

    def ways(self, finding: Finding, repair: RepairCandidate) -> list[Help]:
        """The accepted variants of a repair, as helps: one, or several with a condition each where
        the checker cannot decide between them."""
        made = [(e, self.accepted(finding, e)) for e in repair.edits]
        right = [(k, e, g) for k, (e, g) in enumerate(made) if g is not None]
        if any(self.accepted(finding, e) is not None for e in repair.contrary if right):
            return []
        if len(right) == 1 or repair.contrary:
            return [self.help(finding, e, g) for _, e, g in right[:1]]
        return [self.help(finding, e, g, repair.conditions[k]) for k, e, g in right]

    def help(self, finding: Finding, edit: GraphEdit, made: Graph, condition: str = "") -> Help:
        """An edit with its price.

        Arguments:
          finding: what it repairs.
          edit: the edit.
          made: the edited program.
          condition: the condition under which it is right; empty for none.
        """
        return Help(
            text=f"{edit.text}, {condition}" if condition else edit.text,
            edits=(*edit.source, *edit.options),
            bytes_per_device=bytes_sent(made),
            peak_memory_bytes=None,
            clears_all_errors=not self.keys - {finding.key},
            condition=condition,
        )

    def accepted(self, finding: Finding, edit: GraphEdit) -> Graph | None:
        """The edited program. None where the finding remains, another one appears, something about
        the edited values is unknown, or the source does not show the place of the edit."""
        if not (edit.source or edit.options):
            return None
        made = edited(self.graph, edit, dict(self.mesh.axes))
        found = analyse(made, self.mesh)
        left = [f for f in found.findings if not f.region.backward]
        if any(
            f.key == finding.key or f.key not in self.keys or _follows(f, finding) for f in left
        ):
            return None
        return None if self.open(found, finding, edit) else made

    def open(self, found: Analysis, finding: Finding, edit: GraphEdit) -> bool:
        """Whether something about the edited values is unknown, so that the edit is not shown to be
        right."""
        claims = {(finding.region.id, finding.result, a) for a in finding.mesh_axes}
        if finding.claim is not None and claims & found.unshown:
            return True
        maker = self.sites.maker(finding.region, finding.result)
        claimed = set[int]() if maker is None or finding.claim is None else {maker.id}
        near = self.sites.connected(edit.touched() | claimed)
        return any(
            d.key not in self.doubts or d.node.id in near or d.node.id == finding.region.id
            for d in found.doubts
        )


def _follows(other: Finding, finding: Finding) -> bool:
    """Whether a finding in a gradient is a consequence of another one in the forward part; a repair
    must remove both."""
    return (
        primary(other).backward
        and not primary(finding).backward
        and bool(set(other.mesh_axes) & set(finding.mesh_axes))
    )
