"""What was asked differently of two plans, in words."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from sbp.explain.settings import HardwareName, LinePolicies, PinnedAtoms, ProgramPolicies, Setting
from sbp.limits import Budget, policies_text
from sbp.machine.hardware import Network


def setting_cells(setting: Setting) -> tuple[str, str, str]:
    """What was asked, and what each plan was asked for."""
    return _what(setting), _value(setting, setting.this), _value(setting, setting.other)


def _what(setting: Setting) -> str:
    match setting.kind:
        case "figure":
            return setting.subject
        case "network":
            return f"network of `{setting.subject}`"
        case "policy":
            return f"policy of `{setting.subject}`"
        case "input" | "output":
            return f"{setting.kind} `{setting.subject}`"
        case "annotation":
            return f"`{setting.subject}`"
        case _:
            return setting.kind


def _value(setting: Setting, value: Any) -> str:
    match setting.kind:
        case "mesh":
            return " ".join(f"{axis}={size}" for axis, size in value)
        case "hardware":
            return _hardware(value)
        case "figure":
            return _figure(value)
        case "network":
            return _figure(value) if value else "none of its own"
        case "boxing":
            return _policies(value)
        case "memory limit":
            return "none" if value is None else f"{value:.0f} B"
        case "budgets":
            return _several(map(_budget, value))
        case "reduce_dtype":
            return value or "the platform's own"
        case "donated":
            return _several(f"`{name}`" for name in value)
        case "policy":
            return _line_policies(value)
        case "input" | "output" | "annotation":
            return _pins(value)
        case _:
            return str(value)


def _several(texts: Iterable[str]) -> str:
    return ", ".join(sorted(set(texts))) or "none"


def _budget(budget: Budget) -> str:
    """A budget, its size to the byte."""
    return f"{budget} ({budget.above:.0f} B)" if budget.above else str(budget)


def _hardware(hardware: HardwareName) -> str:
    return hardware.name if hardware.is_known else f"{hardware.name} with other figures"


def _figure(value: object) -> str:
    """A value of a description of hardware. No two values look alike."""
    match value:
        case None:
            return "none"
        case Network():
            return f"{_figure(value.bytes_per_second)} B/s after {_figure(value.latency_seconds)} s"
        case float() if float(short := f"{value:g}") == value:
            return short
        case _:
            return str(value)


def _policies(policies: ProgramPolicies) -> str:
    return policies_text(policies.boxing, policies.axis_policies, policies.axes)


def _line_policies(policies: LinePolicies) -> str:
    return _several(
        ", within ".join(f"{p} on `{axis}`" if axis else p for p, axis in around)
        for around in policies
    )


def _pins(pins: tuple[PinnedAtoms, ...]) -> str:
    texts = (" ".join(f"{axis}:{atom!r}" for axis, atom in atoms) or "B" for atoms in pins)
    return "; ".join(texts) or "not pinned"
