"""Reports as data that JSON can hold."""

from __future__ import annotations

from typing import Any

from sbp.errors import Diagnostic, Label
from sbp.report.report import Report


def report_data(report: Report) -> dict[str, Any]:
    """What `sbp check --json` prints: the verdict, the cost of the plan and the findings.

    Arguments:
      report: the report.
    """
    program = report.program
    plan = None
    if program is not None:
        plan = {
            "mesh": dict(program.mesh.axes),
            "hardware": program.mesh.hardware.name,
            "bytes_sent_per_device": program.cost.bytes_per_device,
            "peak_memory_bytes_per_device": program.cost.peak_memory_bytes,
            "modelled_seconds": program.cost.seconds,
        }
    return {
        "function": report.title,
        "ok": report.ok,
        "plan": plan,
        "diagnostics": [_diagnostic(d) for d in report.diagnostics],
    }


def _diagnostic(diagnostic: Diagnostic) -> dict[str, Any]:
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
