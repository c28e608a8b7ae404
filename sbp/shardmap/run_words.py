"""Comparisons with one device in words: a line of the report for each, and a warning where the
results differ and nothing shows that this may be meant."""

from __future__ import annotations

from sbp.errors import Diagnostic, Label, Span
from sbp.shardmap.comparison import ComparedRun
from sbp.shardmap.coverage import Coverage, UnreadValue, Why
from sbp.shardmap.words import why_text

DIFFERS = "differs-on-one-device"

_FIRST: tuple[Why, ...] = ("permute", "exchange", "index", "side-by-side")
"""Reasons why a value has no reading; values that other devices have a part in come first."""


def run_text(run: ComparedRun) -> str:
    """What a comparison came to, as a sentence."""
    where = f"on one device of mesh axis `{run.mesh_axis}`"
    if run.untried:
        return f"it is not compared with a run {where}: {run.untried}"
    if run.lost or not run.apart:
        lost = f"; {_lost(run)}" if run.lost else ""
        return f"{where} it computes the same: {_how(run)}{lost}"
    text = f"{where} it computes another value of {_results(run.apart)}: {_how(run)}"
    return f"{text}; {'; '.join(run.because)}" if run.because else text


def _how(run: ComparedRun) -> str:
    values = "its arguments" if run.given else "random values of its shapes"
    if run.stages:
        return f"its {run.size} stages were run one after the other, on {values}"
    return f"run with {run.size} devices and with one, on {values}"


def _results(numbers: tuple[int, ...]) -> str:
    return f"result{'s' if len(numbers) > 1 else ''} {', '.join(map(str, numbers))}"


def _lost(run: ComparedRun) -> str:
    """That a part of some results is made of constants."""
    return f"{_results(run.lost)}: a slice along the first dim depends on no argument"


def run_diagnostics(coverage: Coverage) -> list[Diagnostic]:
    """A warning for each comparison that shows a fault."""
    return [run_diagnostic(run, coverage) for run in coverage.runs if run.wrong]


def run_diagnostic(run: ComparedRun, coverage: Coverage) -> Diagnostic:
    """A comparison that shows a fault in words.

    Arguments:
      run: the comparison.
      coverage: the values without a reading, on which the results depend.
    """
    axis = f"mesh axis `{run.mesh_axis}`"
    title = (
        f"{_results(run.apart)} differ{'' if len(run.apart) > 1 else 's'} on one device of {axis}"
    )
    if run.lost:
        title = _lost(run)
    return Diagnostic(
        code=DIFFERS,
        severity="warning",
        title=title,
        labels=_labels([u for u in coverage.unread if run.mesh_axis in u.mesh_axes]),
        notes=(
            run_text(run),
            f"what is marked has no type on {axis}: a wrong neighbour, owner, offset or number of"
            " steps changes the result, and so does a part that one device is meant to play",
        ),
    )


def _labels(unread: list[UnreadValue]) -> tuple[Label, ...]:
    """Labels on values without a reading, the most telling one as the primary one."""
    found: dict[Span, str] = {}
    for u in sorted(unread, key=lambda u: _FIRST.index(u.why) if u.why in _FIRST else len(_FIRST)):
        if u.span is not None:
            found.setdefault(u.span, why_text(u))
    return tuple(
        Label(span=span, text=text, primary=i == 0) for i, (span, text) in enumerate(found.items())
    )
