"""The faults of a program with `jax.shard_map`, from its comparisons with one device."""

import itertools
from dataclasses import replace
from typing import Any

from jax.sharding import PartitionSpec

from sbp.handwritten.emulation import axes_by_dim, claims, regions_of
from sbp.handwritten.measured import BY_SHARD, COUNTED, Body, Fault, Finding, region_findings
from sbp.handwritten.one_device import Comparisons
from sbp.handwritten.written_sizes import scalars
from sbp.trace.collectives import KINDS, names_of
from sbp.trace.graph import Node, Operand, nodes_with_runs


def _short_ring(finding: Finding, mesh_axis: str, size: int) -> list[Node]:
    """The last step of the ring that makes the result of a finding, if the ring has one step too
    few to go around a mesh axis; empty for other results."""
    body = Body(finding.region.params["body"], {}, mesh_axis)
    runs = {node.id: count for node, count in nodes_with_runs(body.graph)}
    steps, last = dict[Operand, int](), list[Node]()
    for node in body.sent(body.graph.outputs[finding.result]):
        if KINDS[node.op] == "permute" and names_of(node) == (mesh_axis,):
            steps[node.outputs[0]] = steps.get(node.inputs[0], 0) + (
                runs[node.id] if len(node.params["perm"]) == size else size
            )
            last = [node]
    # On three devices, a single step is more often a shift than a ring.
    return last if size > 3 and max(steps.values(), default=0) == size - 2 else []


def find_faults(compared: Comparisons) -> tuple[tuple[Finding, ...], dict[str, list[Node]]]:
    """The faults of a program; and for each mesh axis, operations at which types end because of a
    value of another device or of the device's index."""
    found, ends = dict[tuple[Any, ...], Finding](), dict[str, list[Node]]()
    graph = compared.graph
    # Of a value that is returned twice, the first path counts.
    paths = dict(reversed([*zip(graph.outputs, graph.output_names, strict=False)]))
    for c in compared.compared:
        name, written = c.run.mesh_axis, compared.axes[c.run.mesh_axis]
        own = (
            (node, results)
            for node, results in claims(graph)
            if name in node.params.get("newly_manual_axes", node.params.get("manual_axes", ()))
        )
        for node, results in own if c.wrong else ():
            uneven = [i for at, i, a in compared.uneven if (at, a) == (node.id, name)]
            typed = [Body(node.params["body"], t, name, c.changed) for t in c.types]
            powers = {
                i: power
                for i, v in enumerate(node.outputs)
                for k, power in c.powers.items()
                if graph.outputs[k] == v
            }
            results = [i for i in results if node.outputs[i] not in c.one_each]
            findings = [
                *region_findings(node, typed, c.numbers, results, uneven, ends.setdefault(name, []))
            ]
            for i in powers.keys() - {f.result for f in findings if f.fault.kind not in BY_SHARD}:
                if (fault := typed[0].scaled(typed[0].graph.outputs[i], powers[i])) is not None:
                    findings = [
                        *(f for f in findings if f.result != i),
                        Finding(fault, (name,), None, node, i),
                    ]
            for finding in findings:
                kind = finding.fault.kind
                meant = c.meant or node.outputs[finding.result] in c.excused
                harmless = {"local": c.placed, "own-positions": c.longer}.get(kind, ())
                is_meant = meant and not c.uneven and kind in (*COUNTED, *BY_SHARD)
                if is_meant or finding.fault.node.id in harmless:
                    continue
                if kind == "missing" and (ring := _short_ring(finding, name, c.run.size)):
                    ends[name] += ring
                    continue
                scales = kind in COUNTED and scalars(finding.fault.node)
                numbers = (
                    *finding.numbers,
                    *(c.run.stuck if kind in (*COUNTED, *BY_SHARD) else ()),
                    *(sorted(written.numbers) if scales else ()),
                )
                finding = replace(
                    finding,
                    numbers=tuple(dict.fromkeys(numbers)),
                    reordered=c.run.reordered,
                    path=paths.get(node.outputs[finding.result], ""),
                )
                # The same fault on several mesh axes is one.
                known = found.get(finding.key, finding)
                axes = tuple(
                    a for a in compared.mesh.names if a in {*known.mesh_axes, *finding.mesh_axes}
                )
                found[finding.key] = replace(known, mesh_axes=axes)
    if not found and all(c.wrong for c in compared.compared):
        orders = ((node, reversed_order(node)) for node in regions_of(graph))
        wrong = (Finding(Fault("order", node), axes, None, node) for node, axes in orders if axes)
        found = {finding.key: finding for finding in wrong}
    # A collective that mixes up the dims of a value does so on other mesh axes as well.
    placed = {f.fault.node.id for f in found.values() if f.fault.kind != "local"}
    return tuple(
        f for f in found.values() if f.fault.kind != "local" or f.fault.node.id not in placed
    ), ends


def reversed_order(region: Node) -> tuple[str, ...]:
    """Two mesh axes that the specs of a region order in two ways on a dim; empty where none do."""
    # A type orders the axes of a dim as the mesh does.
    found = {
        pair
        for spec in (*region.params["in_specs"], *region.params["out_specs"])
        if isinstance(spec, PartitionSpec)
        for axes in axes_by_dim(spec, len(spec), ())
        for pair in itertools.combinations(axes, 2)
    }
    return next(((a, b) for a, b in sorted(found) if (b, a) in found), ())
