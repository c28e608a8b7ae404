"""Reports as data that JSON can hold: `Report.to_json`."""

from __future__ import annotations

from typing import Any

from sbp.errors import Diagnostic, Label
from sbp.plan.program import Program
from sbp.plan.traffic import PHASES, Send
from sbp.report import facts
from sbp.report.collectives import Collective, collectives
from sbp.report.flows import program_flows
from sbp.report.memory import live_bytes
from sbp.report.strategy import strategy
from sbp.report.timeline import lane_seconds, limits, schedule

FORMAT = "sbp report 1"
"""The form of the data. The number rises when a key goes or changes its meaning; keys may be
added."""


def plan_data(program: Program, output_names: tuple[str, ...]) -> dict[str, Any]:
    """A plan as data. All bytes are those of one device, and of one call where they are sent.

    Arguments:
      program: the plan.
      output_names: names of the results.
    """
    return {
        "mesh": dict(program.mesh.axes),
        "hardware": program.mesh.hardware.name,
        "bytes_sent_per_device": program.cost.bytes_per_device,
        "peak_memory_bytes_per_device": program.cost.peak_memory_bytes,
        "modelled_seconds": program.cost.seconds,
        "seconds_by_lane": lane_seconds(schedule(program)),
        "memory_at_peak": dict(live_bytes(program).peak.bytes),
        "limits": _limits(program),
        "strategy": {use.axis: use.text for use in strategy(program)},
        "inputs": [_tensor(t) for t in facts.inputs(program)],
        "outputs": [_tensor(t) for t in facts.outputs(program, output_names)],
        "collectives": [_collective(c) for c in collectives(program, output_names)],
        "modules": modules(program),
    }


def _limits(program: Program) -> dict[str, Any]:
    found = limits(program)
    return {
        "flops": found.flops,
        "repeated_flops": found.repeated,
        "utilisation": found.utilisation,
        "seconds_by_bound": found.seconds,
    }


def modules(program: Program) -> dict[str, dict[str, list[dict[str, Any]]]]:
    """The collectives of each scope of `jax.named_scope` and of modules, by phase. Numbers in names
    of scopes are `*`, so that layers are one. The empty name has what stands in no scope; results
    have a phase of their own there, `returned`. Of a `cond` all branches are there.

    Arguments:
      program: the plan.
    """
    flows = program_flows(program, "scope")
    found: dict[str, dict[str, list[dict[str, Any]]]] = {}
    for stop in flows.stops:
        if stop.sends:
            of_scope = found.setdefault(stop.name, {phase: [] for phase in PHASES})
            of_scope[stop.phase] += map(_send, stop.sends)
    if flows.results.sends:
        of_none = found.setdefault("", {phase: [] for phase in PHASES})
        of_none.setdefault("returned", []).extend(map(_send, flows.results.sends))
    return found


def _send(send: Send) -> dict[str, Any]:
    return {
        "kind": send.kind,
        "mesh_axes": send.axes,
        "change": send.change,
        "runs": send.runs,
        "bytes_sent_per_device": send.bytes,
    }


def _tensor(tensor: facts.Tensor) -> dict[str, Any]:
    return {
        "name": tensor.name,
        "shape": tensor.shape,
        "type": repr(tensor.type),
        "on_one_device": tensor.local_shape,
        "bytes_per_device": tensor.bytes_per_device,
        "donated": tensor.donated,
        "padded": tensor.padded,
    }


def _collective(one: Collective) -> dict[str, Any]:
    return {
        "kind": one.kind,
        "mesh_axes": one.mesh_axes,
        "changes": list(one.changes),
        "runs": one.runs,
        "bytes_sent_per_device": one.bytes_per_device,
        "tensors": list(one.tensors),
        "line": one.line,
        "made": list(one.made),
        "needed": list(one.needed),
        "returned": list(one.returned),
    }


def finding_data(diagnostic: Diagnostic) -> dict[str, Any]:
    """A finding as data.

    Arguments:
      diagnostic: the finding.
    """
    return {
        "code": diagnostic.code,
        "severity": diagnostic.severity,
        "title": diagnostic.title,
        "scope": diagnostic.scope,
        "labels": [_label(label) for label in diagnostic.labels],
        "notes": list(diagnostic.notes),
        "helps": [
            {
                "text": h.text,
                "bytes_sent_per_device": h.bytes_per_device,
                "peak_memory_bytes_per_device": h.peak_memory_bytes,
            }
            for h in diagnostic.helps
        ],
    }


def _label(label: Label) -> dict[str, Any]:
    span = label.span
    return {
        "file": span.file,
        "line": span.line,
        "column": span.column,
        "end_line": span.end_line or span.line,
        "end_column": span.end_column,
        "text": label.text,
        "primary": label.primary,
    }
