"""Helps: edits of the source that rid a program of a finding and bring no other, priced by what the
edited program sends.

A help is followed to the word, so it is offered where the words name what the edit was tried at: an
expression, a variable or a call of the user's own, at every call of its line. What is
differentiated inside of a region is left alone, for its gradient was traced before.
"""

from __future__ import annotations

import ast
import math
from collections.abc import Iterator
from dataclasses import dataclass, field

from sbp.errors import Help
from sbp.machine.mesh import MeshSpec
from sbp.shardmap.edits import Edit, Reduce, bytes_sent, edited
from sbp.shardmap.held import Fault
from sbp.shardmap.regions import Analysis, analyse
from sbp.shardmap.sites import Read, Site, Sites
from sbp.shardmap.state import Finding
from sbp.shardmap.words import primary
from sbp.source.reader import expression_at, source_text, users_span
from sbp.trace.graph import Graph, Node
from sbp.types import Split, Unreduced

MAX_HELPS = 3

TRIED = 24
"""Edits that are tried for one finding."""

_ONE = ("copies-as-split", "doubled", "missing", "pending")
"""Findings whose candidates are one repair in several words: the first that is accepted is told."""

_REDUCTION = {"sum": "psum", "max": "pmax", "min": "pmin"}


@dataclass(frozen=True, slots=True)
class Choice:
    """One repair in the ways that it may be meant: a sum first, then a mean, where it is one or the
    other.

    Arguments:
      edits: the ways.
      either: the words when the checker cannot tell which one is right.
      contrary: what is wrong if these are right: where one is accepted as well, the checker has
          lost track of the value.
      place: what is reduced, where it may go with another reduction left out, or kept: the first
          that is accepted is told.
      spare: whether it is told only where no other repair is.
    """

    edits: tuple[Edit, ...]
    either: str = ""
    contrary: tuple[Edit, ...] = ()
    place: object = None
    spare: bool = False


class Helper:
    """Tries edits on a program.

    Arguments:
      graph: the program.
      mesh: its mesh.
      keys: what is wrong with it.
    """

    def __init__(self, graph: Graph, mesh: MeshSpec, keys: frozenset[object]) -> None:
        self.graph, self.mesh, self.keys = graph, mesh, keys
        self.sites = Sites(graph)
        self.known: frozenset[object] | None = None

    def helps(self, finding: Finding) -> tuple[Help, ...]:
        """The accepted edits, cheapest first."""
        found: dict[str, Help] = {}
        told: set[object] = set()
        if finding.region.backward:  # it follows from the region that is differentiated
            return ()
        for choice, _ in zip(self.choices(finding), range(TRIED), strict=False):
            help_ = (
                None
                if choice.place in told or (choice.spare and found)
                else self.help(finding, choice)
            )
            if help_ is not None and help_.text not in found:
                found[help_.text] = help_
                told |= {choice.place} - {None}
                if len(found) == (1 if finding.fault.kind in _ONE else MAX_HELPS):
                    break
        return tuple(sorted(found.values(), key=lambda h: h.bytes_per_device))

    def help(self, finding: Finding, choice: Choice) -> Help | None:
        """The one way of a repair that is right, or both where that cannot be told."""
        right = [(e, made) for e in choice.edits if (made := self.accepted(finding, e)) is not None]
        if not right:
            return None
        edit, made = right[0]
        if any(self.accepted(finding, e) is not None for e in choice.contrary):
            return None
        text = edit.text if len(right) == 1 or choice.contrary else choice.either
        return Help(
            text=text,
            edits=(),
            bytes_per_device=bytes_sent(made),
            peak_memory_bytes=None,
            clears_all_errors=False,
        )

    def accepted(self, finding: Finding, edit: Edit) -> Graph | None:
        """The edited program, where the finding is gone, nothing else is, and nothing that the edit
        has to do with is left open."""
        if self.known is None:
            self.known = frozenset(d.key for d in analyse(self.graph, self.mesh).doubts)
        made = edited(self.graph, edit, dict(self.mesh.axes))
        found = analyse(made, self.mesh)
        left = [f for f in found.findings if not f.region.backward]
        if any(
            f.key == finding.key or f.key not in self.keys or _follows(f, finding) for f in left
        ):
            return None
        return None if self.open(found, finding, edit, self.known) else made

    def open(self, found: Analysis, finding: Finding, edit: Edit, known: frozenset[object]) -> bool:
        """Whether something is not known of the edited program: nothing vouches for the edit
        then."""
        maker = self.sites.maker(finding.region, finding.result)
        claimed = set() if maker is None or finding.claim is None else {maker.id}
        near = self.sites.connected(edit.touched() | claimed)
        return any(
            d.key not in known or d.node.id in near or d.node.id == finding.region.id
            for d in found.doubts
        )

    # ---- candidates -----------------------------------------------------------------------------

    def choices(self, finding: Finding) -> Iterator[Choice]:
        """Candidates, the likeliest first."""
        fault, axes = finding.fault, finding.mesh_axes
        match fault.kind:
            case "doubled":
                yield from self.dropped(fault.node, axes)
                yield from self.averaged(fault.node, axes)
            case "averaged":
                yield from self.summed(fault.node)
            case "pending" if fault.made is not None:
                yield from self.averaged(fault.made, axes)
                yield from self.dropped(fault.made, axes)
            case "monoid":
                yield from self.renamed(fault.node, _reduction(fault))
            case "missing":
                yield from self.redirected(finding)
                yield from self.reduced(finding)
            case "partial-as-split" if isinstance(finding.claim, Split):
                yield from self.scattered(finding, finding.claim.dim)
            case "split-as-whole":
                yield from self.gathered(finding)
            case "copies-as-split":
                if fault.made is not None:  # a sum over the shards of what was to stay split
                    yield from self.dropped(fault.made, axes)
                unsplit = tuple((finding.region.id, finding.result, a) for a in axes)
                yield _one(
                    Edit(
                        f"leave {_names(axes)} out of out_specs of result {finding.result}",
                        unsplit=unsplit,
                    )
                )
            case "nonlinear" | "product" | "ratio" | "added" | "scales" | "mixed":
                yield from self.earlier(finding)
            case _:
                pass

    def dropped(self, node: Node, axes: tuple[str, ...]) -> Iterator[Choice]:
        """A reduction left out, or over fewer axes."""
        call, nodes = self.call(node)
        gone = self.without(nodes, axes)
        if call and gone is not None:
            yield _one(Edit(f"drop {call}{_runs_on(node, axes)}", drop=gone[0], divide=gone[1]))

    def averaged(self, node: Node, axes: tuple[str, ...]) -> Iterator[Choice]:
        """A mean in place of a sum."""
        call, nodes = self.call(node)
        n = self.size(axes)
        divide = {m.id: n for m in nodes}
        if call and node.op == "reduce_scatter":
            yield _one(Edit(f"divide {call} by {n}, the size of {_names(axes)}", divide=divide))
        elif call and _name(node) == "psum" and _over(node) == set(axes):
            yield _one(Edit(f"lax.pmean in place of {call}", divide=divide))

    def summed(self, division: Node) -> Iterator[Choice]:
        """A sum in place of a mean: a division by hand may be meant, but by another count."""
        call, nodes = self.call(division)
        if call and _name(division) == "pmean":
            yield _one(Edit(f"lax.psum in place of {call}", drop={d.id: () for d in nodes}))

    def renamed(self, node: Node, op: str) -> Iterator[Choice]:
        """Another reduction."""
        call, nodes = self.call(node)
        if call and op and _name(node) in ("psum", "pmean", "pmax", "pmin"):
            divisions = {d.id: () for n in nodes for d in self.divisions(n)}
            yield _one(
                Edit(
                    f"lax.{op} in place of {call}", rename={n.id: op for n in nodes}, drop=divisions
                )
            )

    def redirected(self, finding: Finding) -> Iterator[Choice]:
        """A sum over another axis than the one that is meant, along which the result stays
        split."""
        body: Graph = finding.region.params["body"]
        for node in body.walk():
            others = tuple(a for a in self.mesh.names if a in _over(node) - set(finding.mesh_axes))
            call, nodes = self.call(node) if others and set(others) == _over(node) else ("", ())
            if not call or _name(node) != "psum":
                continue
            text = f"{_quoted(finding.mesh_axes)} in place of {_quoted(others)} in {call}"
            over = {n.id: finding.mesh_axes for n in nodes}
            yield _one(Edit(text, over=over))
            for dim in range(len(self.result_shape(finding))) if finding.claim is not None else ():
                split = tuple((finding.region.id, finding.result, a, dim) for a in others)
                yield _one(
                    Edit(
                        f"{text}, and {_names(others)} at dim {dim} in out_specs of result"
                        f" {finding.result}",
                        over=over,
                        split=split,
                    )
                )

    def reduced(self, finding: Finding) -> Iterator[Choice]:
        """A reduction where a value became partial, or of what is returned."""
        op = _reduction(finding.fault)
        maker = self.sites.maker(finding.region, finding.result)
        sites = [self.sites.value(node) for node in (finding.fault.made, maker) if node is not None]
        for site in dict.fromkeys(s for s in sites if s) if op else ():
            yield self.reduction(finding, ((site.text, _after(site)),), op or "")

    def reduction(
        self, finding: Finding, places: Places, op: str, late: Late | None = None
    ) -> Choice:
        """A reduction of some values: a sum or a mean, where it is one of the two.

        Arguments:
          finding: what is wrong.
          places: what is reduced.
          op: with which collective.
          late: another reduction that comes too late: left out, or kept.
        """
        axes, n = finding.mesh_axes, self.size(finding.mesh_axes)
        what, quoted = " and ".join(text for text, _ in places), _quoted(finding.mesh_axes)
        late = late or Late()

        def edit(name: str, divisors: tuple[int, ...], again: dict[int, int] | None = None) -> Edit:
            added = tuple(
                Reduce(node, k, axes, op, d, after=is_after)
                for (_, values), d in zip(places, divisors, strict=True)
                for node, k, is_after in values
            )
            return Edit(
                f"reduce {what} with lax.{name}(.., {quoted}){late.text}",
                added,
                drop=late.drop,
                divide=again or late.divide,
            )

        ones = (1,) * len(places)
        ways = (
            (edit(op, ones), edit("pmean", (n,) * len(places)))
            if op == "psum"
            else (edit(op, ones),)
        )
        contrary = [edit("", (n, *ones[1:]))] if op == "psum" and len(places) > 1 else []
        contrary += [edit("", ones, late.kept)] if late.kept else []
        total_or_mean = (
            f"lax.psum(.., {quoted}) if it is a share of a sum, with lax.pmean(.., {quoted}) if it"
            " is the mean of its own shard"
        )
        operands = any(not is_after for _, values in places for *_, is_after in values)
        return Choice(
            ways,
            f"reduce {what} with {total_or_mean}{late.text}",
            tuple(contrary),
            (op, places),
            operands,
        )

    def scattered(self, finding: Finding, dim: int) -> Iterator[Choice]:
        """A partial result that is returned as split: scattered, or reduced and returned as
        whole."""
        site, axes = self.result(finding), finding.mesh_axes
        if site is None:
            return
        if self.result_shape(finding)[dim] % self.size(axes) == 0:
            scatter = Reduce(finding.region.id, finding.result, axes, "reduce_scatter", dim=dim)
            text = (
                f"return lax.psum_scatter(.., {_quoted(axes)}, scatter_dimension={dim}, tiled=True)"
                f" of {site.text}"
            )
            yield _one(Edit(text, (scatter,)))
        unsplit = tuple((finding.region.id, finding.result, a) for a in axes)
        text = (
            f"reduce {site.text} with lax.psum(.., {_quoted(axes)}), and leave {_names(axes)} out"
            f" of out_specs of result {finding.result}"
        )
        yield _one(Edit(text, (Reduce(finding.region.id, finding.result, axes),), unsplit=unsplit))

    def gathered(self, finding: Finding) -> Iterator[Choice]:
        """A split result that is returned as whole."""
        site, axes = self.result(finding), finding.mesh_axes
        for dim in range(len(self.result_shape(finding))) if site else ():
            gather = Reduce(finding.region.id, finding.result, axes, "all_gather", dim=dim)
            yield _one(
                Edit(
                    f"return lax.all_gather(.., {_quoted(axes)}, axis={dim}, tiled=True) of"
                    f" {site.text if site else ''}",
                    (gather,),
                )
            )

    def earlier(self, finding: Finding) -> Iterator[Choice]:
        """A reduction where the value became partial, or of what the operation takes; the one that
        comes too late is dropped, or kept."""
        ops = [_reduction(finding.fault) or "psum"]
        for late in self.late(finding.observer, finding.mesh_axes):
            for op in ops:
                for places in self.places(finding, op):
                    yield self.reduction(finding, places, op, late)

    def late(self, observer: Node | None, axes: tuple[str, ...]) -> Iterator[Late]:
        """What may become of a reduction once there is an earlier one: a kept sum that counts for
        nothing is none."""
        call, nodes = self.call(observer) if observer is not None else ("", ())
        gone = self.without(nodes, axes) if call else None
        if observer is not None and gone is not None:
            yield Late(f", and drop {call}{_runs_on(observer, axes)}", *gone)
        yield Late(
            kept=(
                {n.id: self.size(axes) for n in nodes}
                if observer is not None and _name(observer) == "psum"
                else {}
            )
        )

    def places(self, finding: Finding, op: str) -> Iterator[Places]:
        """Where a value may be reduced before an operation: for all that read it, or for that
        operation."""
        fault = finding.fault
        made = self.sites.value(fault.made) if fault.made is not None else None
        if made is not None and not self.sites.leads_to(made, fault.node):
            made = None  # the operation is a part of the expression
        if made is not None:
            yield ((made.text, _after(made)),)
        calls = self.sites.alike(fault.node)
        reads = self.sites.reads(fault.node, fault.partial or (fault.operand,)) if calls else None
        span = users_span(fault.node)
        if not reads or span is None:
            return
        where = f" in {_expression(fault.node)} at line {span.line}"
        if op != "psum":  # what is shifted by a maximum has the same maximum added again
            reads = tuple(r for r in reads if self.sites.alone(fault.node, r))
        for chosen in [*((r,) for r in reads), *([reads] if len(reads) > 1 else [])]:
            if not (
                len(chosen) == 1
                and made is not None
                and self.sites.only(made, fault.node, chosen[0])
            ):
                yield tuple((r.text + where * (r is chosen[-1]), _before(calls, r)) for r in chosen)

    # ---- parts of candidates --------------------------------------------------------------------

    def call(self, node: Node) -> tuple[str, tuple[Node, ...]]:
        """A call of a collective in words, and all that it made; no words where the user has no
        such line, or a gradient hangs on it."""
        span, nodes = users_span(node), self.sites.alike(node)
        if span is None or not nodes or node.backward or not _name(node):
            return "", ()
        return f"{_expression(node)} at line {span.line}", nodes

    def without(
        self, nodes: tuple[Node, ...], axes: tuple[str, ...]
    ) -> tuple[dict[int, tuple[str, ...]], dict[int, int]] | None:
        """What goes with reductions, and what they are divided by then: a pmean over fewer axes has
        another divisor."""
        gone: dict[int, tuple[str, ...]] = {}
        divide: dict[int, int] = {}
        for node in nodes:
            if "axes" not in node.params:
                return None
            gone[node.id] = axes
            divisions = self.divisions(node)
            gone |= {d.id: () for d in divisions}
            left = self.size(tuple(_over(node) - set(axes)))
            if divisions and left > 1:
                divide[node.id] = left
        return gone, divide

    def divisions(self, node: Node) -> tuple[Node, ...]:
        """The divisions of a pmean."""
        nodes = self.sites.graph(node).nodes
        return tuple(
            d
            for d in nodes
            if d.op == "div" and d.span == node.span and d.inputs[0] in node.outputs
        )

    def result(self, finding: Finding) -> Site | None:
        """The expression that a region returns, and nothing else reads."""
        maker = self.sites.maker(finding.region, finding.result)
        site = self.sites.value(maker) if maker is not None else None
        return (
            site
            if site is not None
            and len(site.values) == 1
            and self.sites.is_result(site, finding.region, finding.result)
            else None
        )

    def result_shape(self, finding: Finding) -> tuple[int, ...]:
        """The local shape of the result that a finding is about."""
        body: Graph = finding.region.params["body"]
        return tuple(body.aval(body.outputs[finding.result]).shape)

    def size(self, axes: tuple[str, ...]) -> int:
        """How many devices there are along some mesh axes."""
        return math.prod(self.mesh.size(a) for a in axes)


Places = tuple[tuple[str, tuple[tuple[int, int, bool], ...]], ...]
"""What is reduced: in words, and the nodes, which of their results or operands, and whether it is a
result."""


@dataclass(frozen=True, slots=True)
class Late:
    """What becomes of a reduction that comes too late.

    Arguments:
      text: the same in words; empty where it is kept.
      drop: the mesh axes that it loses, by the id of the node.
      divide: its new divisors, by the id of the node.
      kept: divisors of a kept sum, which would matter if it still added anything up.
    """

    text: str = ""
    drop: dict[int, tuple[str, ...]] = field(default_factory=dict)
    divide: dict[int, int] = field(default_factory=dict)
    kept: dict[int, int] = field(default_factory=dict)


def _one(edit: Edit) -> Choice:
    return Choice((edit,))


def _follows(other: Finding, finding: Finding) -> bool:
    """Whether a finding counts as a consequence of another one: in a gradient, of what is wrong
    forward. It has to go with its cause."""
    return (
        primary(other).backward
        and not primary(finding).backward
        and bool(set(other.mesh_axes) & set(finding.mesh_axes))
    )


def _reduction(fault: Fault) -> str:
    """The collective that reduces the operand at fault; empty when there is none."""
    monoids = [a.monoid for a in fault.atoms if isinstance(a, Unreduced)]
    return _REDUCTION.get(monoids[0], "") if monoids else ""


def _after(site: Site) -> tuple[tuple[int, int, bool], ...]:
    return tuple((node, k, True) for node, k in site.values)


def _before(calls: tuple[Node, ...], read: Read) -> tuple[tuple[int, int, bool], ...]:
    return tuple((node.id, i, False) for node in calls for i in read.operands)


def _name(node: Node) -> str:
    """Which collective the user calls at a node; empty when its line calls none."""
    expression = expression_at(users_span(node))[0]
    func = expression.func if isinstance(expression, ast.Call) else None
    name = (
        func.attr
        if isinstance(func, ast.Attribute)
        else func.id
        if isinstance(func, ast.Name)
        else ""
    )
    return name if name in ("psum", "pmean", "pmax", "pmin", "psum_scatter") else ""


def _over(node: Node) -> set[str]:
    return {a for a in node.params.get("axes", ()) if isinstance(a, str)}


def _expression(node: Node) -> str:
    text = source_text(users_span(node))
    return f"`{text}`" if text else node.op


def _runs_on(node: Node, axes: tuple[str, ...]) -> str:
    """Where a reduction over several axes loses some of them."""
    return f" over {_names(axes)}" if _over(node) - set(axes) else ""


def _quoted(axes: tuple[str, ...]) -> str:
    return f'"{axes[0]}"' if len(axes) == 1 else "(" + ", ".join(f'"{a}"' for a in axes) + ")"


def _names(axes: tuple[str, ...]) -> str:
    return ", ".join(f"`{a}`" for a in axes)
