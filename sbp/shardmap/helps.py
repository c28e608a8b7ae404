"""Helps: edits that rid a program of a finding and bring no other, priced by what the edited program sends."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

from sbp.errors import Help
from sbp.mesh import MeshSpec
from sbp.plan.source import source_text, users_span
from sbp.shardmap.edits import Edit, Reduce, bytes_sent, edited
from sbp.shardmap.regions import analyse
from sbp.shardmap.state import Finding
from sbp.trace.graph import Graph, Node

MAX_HELPS = 3

TRIED = 24
"""Edits that are tried for one finding."""

_ONE = ("doubled", "pending")
"""Findings whose candidates are one repair in several words: the first that is accepted is told."""

_REDUCTION = {"sum": "psum", "max": "pmax", "min": "pmin"}


@dataclass(frozen=True, slots=True)
class Helper:
    """Tries edits on a program.

    Arguments:
      graph: the program.
      mesh: its mesh.
      keys: what is wrong with it.
    """

    graph: Graph
    mesh: MeshSpec
    keys: frozenset[object]

    def helps(self, finding: Finding) -> tuple[Help, ...]:
        """The accepted edits, cheapest first."""
        found: dict[str, Help] = {}
        for edit, _ in zip(self.edits(finding), range(TRIED), strict=False):
            if edit.text in found:
                continue
            made = edited(self.graph, edit, dict(self.mesh.axes))
            left = {f.key for f in analyse(made, self.mesh).findings}
            if finding.key not in left and left <= self.keys:
                found[edit.text] = Help(text=edit.text, bytes_per_device=bytes_sent(made))
                if len(found) == (1 if finding.fault.kind in _ONE else MAX_HELPS):
                    break
        return tuple(sorted(found.values(), key=lambda h: h.bytes_per_device))

    def edits(self, finding: Finding) -> Iterator[Edit]:
        """Candidates, the likeliest first."""
        fault, axes = finding.fault, finding.mesh_axes
        n = math.prod(self.mesh.size(a) for a in axes)
        quoted = _quoted(axes)
        match fault.kind:
            case "doubled":
                yield Edit(f"drop {_call(fault.node)}{_runs_on(fault.node, axes)}", drop=self.without(finding, fault.node, axes))
                yield Edit(f"lax.pmean in place of {_call(fault.node)}", divide={fault.node.id: n})
            case "averaged":
                yield Edit(f"lax.psum in place of {_call(fault.node)}", drop={fault.node.id: ()})
            case "pending" if fault.made is not None:
                yield Edit(f"lax.pmean in place of {_call(fault.made)}", divide={fault.made.id: n})
                yield Edit(f"drop {_call(fault.made)}{_runs_on(fault.made, axes)}", drop=self.without(finding, fault.made, axes))
            case "monoid":
                op = _REDUCTION.get(fault.detail[2:-1])
                if op:
                    yield Edit(f"lax.{op} in place of {_call(fault.node)}", rename={fault.node.id: op})
            case "missing":
                yield from self.returned(finding, n)
            case "partial-as-split" if finding.claim:
                dim = int(finding.claim[2:-1])
                reduce = Reduce(finding.region.id, finding.result, axes, "reduce_scatter", dim=dim)
                if self.divides(finding, dim, n):
                    yield Edit(
                        f"return lax.psum_scatter(.., {quoted}, scatter_dimension={dim}, tiled=True) of {_expression(fault.node)}",
                        (reduce,),
                    )
                unsplit = tuple((finding.region.id, finding.result, a) for a in axes)
                plain = Reduce(finding.region.id, finding.result, axes)
                text = f"reduce {_expression(fault.node)} with lax.psum(.., {quoted}), and leave {_names(axes)} out of out_specs"
                yield Edit(text, (plain,), unsplit=unsplit)
            case "split-as-whole":
                for dim in range(len(self.result_shape(finding))):
                    reduce = Reduce(finding.region.id, finding.result, axes, "all_gather", dim=dim)
                    yield Edit(f"return lax.all_gather(.., {quoted}, axis={dim}, tiled=True) of {_expression(fault.node)}", (reduce,))
            case "copies-as-split":
                unsplit = tuple((finding.region.id, finding.result, a) for a in axes)
                yield Edit(f"leave {_names(axes)} out of out_specs of result {finding.result}", unsplit=unsplit)
            case "nonlinear" | "product" | "ratio" | "added" | "scales" | "mixed":
                yield from self.earlier(finding, n)
            case _:
                pass

    def returned(self, finding: Finding, n: int) -> Iterator[Edit]:
        """A reduction of what is returned, or where it became partial."""
        fault, axes = finding.fault, finding.mesh_axes
        op = _REDUCTION.get(fault.detail[2:-1])
        if op is None:
            return
        for divisor, name in ((1, op), (n, "pmean")) if op == "psum" else ((1, op),):
            reduce = Reduce(finding.region.id, finding.result, axes, op, divisor)
            yield Edit(f"reduce {_expression(fault.node)} with lax.{name}(.., {_quoted(axes)}) before it is returned", (reduce,))

    def earlier(self, finding: Finding, n: int) -> Iterator[Edit]:
        """A reduction where the value became partial, or of what the operation takes; the one that comes too late is dropped, or kept."""
        fault, axes, observer = finding.fault, finding.mesh_axes, finding.observer
        late = observer is not None and "axes" in observer.params
        ops = [op for monoid, op in _REDUCTION.items() if monoid in fault.detail] or ["psum"]
        for dropped in (True, False) if late else (False,):
            drop = self.without(finding, observer, axes) if dropped and observer is not None else {}
            for op, divisor in (*((op, 1) for op in ops), *((op, n) for op in ops if op == "psum")):
                for what, reduce in self.places(finding, op, divisor):
                    text = f"reduce {what} with lax.{'pmean' if divisor > 1 else op}(.., {_quoted(axes)})"
                    if dropped and observer is not None:
                        text += f", and drop {_call(observer)}{_runs_on(observer, axes)}"
                    yield Edit(text, reduce, drop=drop)

    def places(self, finding: Finding, op: str, divisor: int) -> Iterator[tuple[str, tuple[Reduce, ...]]]:
        """Where a value may be reduced before an operation."""
        fault, axes = finding.fault, finding.mesh_axes
        if fault.made is not None:
            yield _call(fault.made), (Reduce(fault.made.id, 0, axes, op, divisor, after=True),)
        for chosen in [*((i,) for i in fault.partial), *([fault.partial] if len(fault.partial) > 1 else [])]:
            if len(chosen) == 1 and self.only_reader(finding, fault.node.inputs[chosen[0]]):
                continue
            what = " and ".join(dict.fromkeys(self.operand(finding, i) for i in chosen))
            yield f"{what} in {_call(fault.node)}", tuple(Reduce(fault.node.id, i, axes, op, divisor) for i in chosen)

    def only_reader(self, finding: Finding, operand: object) -> bool:
        """Whether a value is read once, and is what was partial first: then it has been reduced already."""
        made = finding.fault.made
        readers = sum(n.inputs.count(operand) for n in finding.region.params["body"].walk() if isinstance(operand, int))
        return made is not None and operand in made.outputs and readers == 1

    def without(self, finding: Finding, node: Node, axes: tuple[str, ...]) -> dict[int, tuple[str, ...]]:
        """What goes with a reduction: of a pmean, its division, when no axis is left."""
        gone = {node.id: axes}
        if set(node.params.get("axes", ())) <= set(axes):
            body: Graph = finding.region.params["body"]
            gone |= {d.id: () for d in body.walk() if d.op == "div" and d.span == node.span and d.inputs[0] in node.outputs}
        return gone

    def operand(self, finding: Finding, index: int) -> str:
        """An operand of the faulty operation in words: the expression that makes it."""
        node = finding.fault.node
        for maker in finding.region.params["body"].walk():
            if node.inputs[index] in maker.outputs and maker.span and maker.span != node.span:
                return _expression(maker)
        return "the operand" if len(node.inputs) == 1 else f"operand {index}"

    def result_shape(self, finding: Finding) -> tuple[int, ...]:
        """The local shape of the result that a finding is about."""
        body: Graph = finding.region.params["body"]
        return tuple(body.aval(body.outputs[finding.result]).shape)

    def divides(self, finding: Finding, dim: int, n: int) -> bool:
        """Whether a result can be scattered."""
        return self.result_shape(finding)[dim] % n == 0


def _expression(node: Node) -> str:
    text = source_text(users_span(node))
    return f"`{text}`" if text else node.op


def _call(node: Node) -> str:
    span = users_span(node)
    return f"{_expression(node)} at line {span.line}" if span else node.op


def _runs_on(node: Node, axes: tuple[str, ...]) -> str:
    """Where a reduction over several axes loses some of them."""
    left = [a for a in node.params.get("axes", ()) if a not in axes]
    return f" over {_names(axes)}" if left else ""


def _quoted(axes: tuple[str, ...]) -> str:
    return f'"{axes[0]}"' if len(axes) == 1 else "(" + ", ".join(f'"{a}"' for a in axes) + ")"


def _names(axes: tuple[str, ...]) -> str:
    return ", ".join(f"`{a}`" for a in axes)
