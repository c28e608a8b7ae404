"""The regions (`shard_map`s) of a program: their operands, the claims of their out_specs, and the
residuals and cotangents that autodiff passes between them."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from sbp.errors import SbpError, Span, position_text
from sbp.machine.mesh import MeshSpec
from sbp.shardmap.body import run
from sbp.shardmap.coverage import Coverage, Sighted, coverage
from sbp.shardmap.distribution import Distribution, Doubt, Fault, LocalValue, literal
from sbp.shardmap.divisions import PMEAN
from sbp.shardmap.excess import close
from sbp.shardmap.operators import divides
from sbp.shardmap.specs import atom_of, outside
from sbp.shardmap.state import Divisions, Finding, Reading, State
from sbp.trace.collectives import SHARD_MAP, SUMS, names_of
from sbp.trace.graph import Constant, Graph, Node, Operand
from sbp.types import Atom, B, Split, Unreduced


@dataclass(frozen=True, slots=True)
class Analysis:
    """The analysis of a program.

    Arguments:
      findings: the faults that count.
      doubts: the operations that could not be decided.
      unshown: claims about values without a reading: the region's id, the position of the result,
          the mesh axis.
      regions: the regions.
      names: the mesh axes of more than one device.
      sighted: what was read of each operation.
    """

    findings: tuple[Finding, ...]
    doubts: tuple[Doubt, ...]
    unshown: frozenset[tuple[int, int, str]]
    regions: tuple[Node, ...]
    names: tuple[str, ...]
    sighted: Sighted

    @property
    def coverage(self) -> Coverage:
        """What was checked, and what was not."""
        return coverage(self.regions, self.names, self.sighted, tuple(self.unshown))


def analyse(graph: Graph, mesh: MeshSpec) -> Analysis:
    """Types every `shard_map` of a program.

    Raises:
      SbpError: `bad-argument` when there is none, or one over another mesh.
    """
    every = list(shard_maps(graph))
    if not every:
        raise SbpError(
            "the function has no jax.shard_map in it, and there is nothing to check; sbp.jit types"
            " plain functions"
        )
    for node in every:
        given = {str(k): int(n) for k, n in node.params["mesh"].shape.items()}
        if given != dict(mesh.axes):
            where = f" at {position_text(node.span.file, node.span.line)}" if node.span else ""
            own = " ".join(f"{k}={n}" for k, n in given.items())
            raise SbpError(
                f"the shard_map{where} is over the mesh {own}, but mesh={mesh}; give the mesh of"
                " the program"
            )
    pmeans = _pmeans(every, mesh)
    first, doubtful = _counted(graph, mesh, pmeans, _under(graph, mesh, Divisions(pmeans)))
    return _weighed(graph, mesh, pmeans, first, doubtful)


def _under(graph: Graph, mesh: MeshSpec, divisions: Divisions) -> _Program:
    """The program, analysed under one reading of its divisions."""
    program = _Program(mesh, divisions)
    program.level(graph)
    return program


_MISCOUNTED = ("averaged", "scales")
"""Kinds of faults that a division by the count of a shard's elements puts right."""


def _counted(
    graph: Graph, mesh: MeshSpec, pmeans: Pmeans, first: _Program
) -> tuple[_Program, dict[tuple[Any, ...], Finding]]:
    """The analysis in which those divisions by the count of a shard's elements are read as such
    that are right only then; and the findings about sums over devices that others have under this
    reading, as warnings.

    Arguments:
      graph: the program.
      mesh: its mesh.
      pmeans: the call paths of its `lax.pmean`s.
      first: the analysis in which their numbers count nothing.
    """
    counted, doubtful = frozenset[int](), dict[tuple[Any, ...], Finding]()
    for i, reading in first.divisions.shards.items():
        other = _under(graph, mesh, Divisions(pmeans, counted=counted | {i}))
        gone = [f for key, f in first.findings.items() if key not in other.findings]
        new = {key: f for key, f in other.findings.items() if key not in first.findings}
        if gone and not new and all(f.fault.kind in _MISCOUNTED for f in gone):
            counted, first = counted | {i}, other
        elif not gone and all(_adds_means(f, reading) for f in new.values()):
            doubtful |= {key: replace(f, reading=reading) for key, f in new.items()}
    return first, doubtful


def _adds_means(finding: Finding, reading: Reading) -> bool:
    """Whether a finding is that a sum over devices adds what a division by the count of a shard's
    elements made."""
    fault = finding.fault
    by_it = fault.node is reading.node or (
        fault.node.backward and fault.node.stack == reading.node.stack
    )
    return fault.kind == "pending" and by_it and fault.made is not None and fault.made.op in SUMS


def _weighed(
    graph: Graph,
    mesh: MeshSpec,
    pmeans: Pmeans,
    first: _Program,
    doubtful: dict[tuple[Any, ...], Finding],
) -> Analysis:
    """The findings of an analysis. A finding depends on the reading of a division if it goes, and
    no other comes, when the division's number is read as another one.

    Arguments:
      graph: the program.
      mesh: its mesh.
      pmeans: the call paths of its `lax.pmean`s.
      first: the analysis under the first reading of every division.
      doubtful: findings under another reading.
    """
    findings = dict(first.findings)
    opened, counted = first.divisions.open, first.divisions.counted
    if findings and opened:
        every = _under(graph, mesh, Divisions(pmeans, frozenset(opened), counted=counted))
        depend = findings.keys() - every.findings.keys()
        for i, reading in opened.items() if depend else ():
            other = _under(graph, mesh, Divisions(pmeans, frozenset({i}), counted=counted))
            if other.findings.keys() <= findings.keys():
                for key in depend - other.findings.keys():
                    findings[key] = replace(findings[key], reading=reading)
                depend &= other.findings.keys()
        if every.findings.keys() <= findings.keys():  # several divisions together
            for key in depend:
                findings[key] = replace(findings[key], reading=next(iter(opened.values())))
    return Analysis(
        findings=(*findings.values(), *doubtful.values()),
        doubts=tuple(first.doubts.values()),
        unshown=frozenset(first.unshown),
        regions=tuple(first.regions),
        names=first.names,
        sighted=first.sighted,
    )


def shard_maps(graph: Graph) -> Iterator[Node]:
    """The outermost regions of a program."""
    return (node for node in graph.walk() if node.op == SHARD_MAP)


def _names(mesh: MeshSpec) -> tuple[str, ...]:
    return tuple(name for name, n in mesh.axes if n > 1)


Pmeans = Mapping[tuple[Span, ...], tuple[tuple[int, ...], ...]]
"""By the call path of a `lax.pmean`, the mesh axes that it runs over."""


def _pmeans(every: list[Node], mesh: MeshSpec) -> Pmeans:
    """The `lax.pmean`s of a program: the sums over devices that carry its frame."""
    found: dict[tuple[Span, ...], dict[tuple[int, ...], None]] = defaultdict(dict)
    names = _names(mesh)
    for region in every:
        for node in region.params["body"].walk():
            if PMEAN in node.library and "axes" in node.params:
                listed = [a for a in names_of(node) if a in names]
                found[node.stack][tuple(names.index(a) for a in listed)] = None
    return {path: tuple(axes) for path, axes in found.items()}


@dataclass(slots=True, eq=False)
class _Program:
    """All regions under analysis; a gradient uses what its forward part knows of divisions."""

    mesh: MeshSpec
    divisions: Divisions
    findings: dict[tuple[Any, ...], Finding] = field(default_factory=dict)
    doubts: dict[tuple[Any, ...], Doubt] = field(default_factory=dict)
    unshown: set[tuple[int, int, str]] = field(default_factory=set)
    regions: list[Node] = field(default_factory=list)
    sighted: Sighted = field(default_factory=Sighted)

    @property
    def names(self) -> tuple[str, ...]:
        return _names(self.mesh)

    def level(self, graph: Graph) -> None:
        """The regions of one graph in order, and those of its loops and branches."""
        makers = {v: node for node in graph.nodes for v in node.outputs}
        readers: dict[Operand, list[tuple[Node | None, Any]]] = defaultdict(list)
        for node in graph.nodes:
            for i, operand in enumerate(node.inputs):
                spec = node.params["in_specs"][i] if node.op == SHARD_MAP else None
                readers[operand].append((node, spec))
        for operand in graph.outputs:
            readers[operand].append((None, None))
        links: dict[Operand, tuple[Any, LocalValue]] = {}
        for node in graph.nodes:
            if node.op == SHARD_MAP:
                self.region(node, makers, readers, links)
            for inner in node.regions:
                self.level(inner)

    def region(
        self,
        node: Node,
        makers: dict[int, Node],
        readers: Any,
        links: dict[Operand, tuple[Any, LocalValue]],
    ) -> None:
        body: Graph = node.params["body"]
        sizes = tuple(self.mesh.size(a) for a in self.names)
        state = State(node, body, self.names, sizes, self.divisions, sighted=self.sighted)
        self.regions.append(node)
        pairs = zip(node.inputs, node.params["in_specs"], strict=True)
        args = [self.argument(node, operand, spec, makers, links) for operand, spec in pairs]
        results = run(state, body, args)
        inside = {v: n for n in body.nodes for v in n.outputs}
        for i, (value, spec) in enumerate(zip(results, node.params["out_specs"], strict=True)):
            output = node.outputs[i]
            links[output] = spec, value
            if not readers[output] or any(
                not _goes_back(reader, spec, taken) for reader, taken in readers[output]
            ):
                operand = body.outputs[i]
                self.claims(
                    state,
                    i,
                    value,
                    spec,
                    body.aval(operand).shape,
                    None if isinstance(operand, Constant) else inside.get(operand),
                )
        for key, finding in state.findings.items():
            self.findings.setdefault(key, finding)
        for key, doubt in state.doubts.items():
            self.doubts.setdefault(key, doubt)

    def argument(
        self,
        node: Node,
        operand: Operand,
        spec: Any,
        makers: dict[int, Node],
        links: dict[Operand, tuple[Any, LocalValue]],
    ) -> LocalValue:
        """An operand of a region: distributed as its spec says or, for a residual or cotangent of
        autodiff, as in the forward region."""
        if node.backward and operand in links and links[operand][0] == spec:
            return links[operand][1]
        if isinstance(operand, Constant):
            return literal(operand.value, operand.aval, len(self.names))
        atoms = [atom_of(spec, a) for a in self.names]
        per_axis = tuple(
            Distribution(
                frozenset({atom}),
                under=outside(spec, a, self.names),
                made=node if isinstance(atom, Unreduced) else None,
                sources=frozenset({operand}) if isinstance(atom, Split) else frozenset(),
            )
            for atom, a in zip(atoms, self.names, strict=True)
        )
        maker = makers.get(operand)
        if (
            node.backward
            and maker is not None
            and divides(maker)
            and isinstance(maker.inputs[1], Constant)
        ):
            # The cotangent of what is B: without check_vma, JAX hands each device its share of it.
            unsplit = [k for k, atom in enumerate(atoms) if atom == B]
            divisor = maker.inputs[1].value
            if maker.inputs[1].aval.shape == () and close(
                float(divisor), math.prod(self.mesh.size(self.names[k]) for k in unsplit)
            ):
                per_axis = tuple(
                    replace(h, excess=-1) if k in unsplit else h for k, h in enumerate(per_axis)
                )
        return LocalValue(per_axis)

    def claims(
        self,
        state: State,
        result: int,
        value: LocalValue,
        spec: Any,
        shape: tuple[int, ...],
        maker: Node | None,
    ) -> None:
        """Reports a result whose distribution contradicts the type that the region states."""
        params, node = state.region.params, maker or state.region
        manual = params.get("newly_manual_axes", params.get("manual_axes", self.names))
        for k, (name, h) in enumerate(zip(self.names, value.per_axis, strict=True)):
            claim = atom_of(spec, name)
            said = outside(spec, name, self.names)
            if said is not None and h.under is not None and claim in h.atoms and name in manual:
                swapped = [j for j in said ^ h.under if atom_of(spec, self.names[j]) == claim]
                if swapped:
                    order = Fault("claimed-order", node, None, _dim(claim))
                    state.report(order, k, None, result, claim)
                    continue
            if name not in manual:
                continue
            one = isinstance(claim, Split) and shape[claim.dim] == 1
            if one and not (h.fault and h.fault.kind == "not-returned"):
                if h.doubt and h.doubt.severity == "warning":
                    state.enter(h.doubt)
                continue  # one element for each device: what each of them has, side by side
            fault = _broken(h, claim, value, node)
            if h.unknown:
                self.unshown.add((state.region.id, result, name))
            if fault is not None:
                state.report(fault, k, None, result, claim)
            elif doubt := h.doubt or h.twice:
                state.enter(doubt)
            elif h.unknown and claim == B and not params.get("check_vma"):
                state.enter(Doubt(node, "claim", axis=name, atoms=(claim,), result=result))


def _goes_back(reader: Node | None, spec: Any, taken: Any) -> bool:
    """Whether only the region of a gradient reads a region's result, with the same spec: a
    residual, whose spec claims nothing."""
    return reader is not None and reader.op == SHARD_MAP and reader.backward and spec == taken


def _broken(h: Distribution, claim: Atom, value: LocalValue, maker: Node) -> Fault | None:
    """The fault of a claim that a value has a type on a mesh axis; None if the claim is right."""
    if h.rewritten and claim == B:
        return h.rewritten
    if h.fault or h.unknown:
        return h.fault
    if isinstance(claim, Unreduced):
        return _broken_partial(h, claim, value, maker)
    if claim in h.atoms:
        return h.cause if h.excess else None
    made = h.made or maker
    if h.partial:
        kind = "missing" if claim == B else "partial-as-split"
        return Fault(kind, made, made, 0, (h.partial,))
    if claim == B:
        return Fault("split-as-whole", maker, None, 0, h.readings)
    kind = "wrong-dim" if h.split else "copies-as-split"
    return Fault(kind, maker, h.reduced, _dim(claim), h.readings)


def _dim(claim: Atom) -> int:
    return claim.dim if isinstance(claim, Split) else 0


def _broken_partial(
    h: Distribution, claim: Unreduced, value: LocalValue, maker: Node
) -> Fault | None:
    """The fault of a claim that a value is partial. The parts of B have their own maximum or
    minimum; their sum is as many times too large as there are devices."""
    if claim in h.atoms:
        return h.cause if h.excess else None
    if h.partial:
        return Fault("wrong-dim", maker, None, 0, h.readings)
    counted = claim.monoid in ("sum", "prod") and B in h.atoms and not (value.literal or h.share)
    return Fault("copies-as-partial", maker, h.reduced) if counted and h.excess == 0 else None
