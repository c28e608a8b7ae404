"""Helps for errors before a program is typed: a misspelt name, a dim that a tensor does not have,
entries of `in_types` and `out_types` in another order.

Each help has been tried: the call was planned with it.
"""

import dataclasses
import functools
import itertools
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from jax.sharding import PartitionSpec

from sbp import _jax
from sbp.api.boundary import other_option
from sbp.api.call import JitOptions
from sbp.errors import (
    Correction,
    Diagnostic,
    Label,
    OptionEdit,
    SbpError,
    SbpInternalError,
    SourceEdit,
    Span,
    correcting,
    counted,
    noting,
    rename_axis,
)
from sbp.explain.change import Change, applicable, labels_at, tried
from sbp.explain.faults import LIMITS
from sbp.kinds import show
from sbp.plan.program import Program
from sbp.report.pages import diagnostics_of
from sbp.source.editing import argument_span, constants_in, items_of
from sbp.types import Split

Attempt = Callable[[JitOptions], Program]
"""Plans the call with other options."""


def diagnose(error: SbpError, options: JitOptions, attempt: Attempt) -> tuple[Diagnostic, ...]:
    """The diagnostics of an error. The diagnostic of a slip has helps.

    Arguments:
      error: the error.
      options: of `sbp.jit`.
      attempt: plans the call with other options.
    """
    found = diagnostics_of(error)
    if len(found) != 1 or not (error.slip or error.option) or found[0].helps:
        return found
    changes = _changes(error, options)
    tries = tried(
        changes,
        plans=LIMITS.plans,
        helps=LIMITS.shown,
        plan=functools.partial(_plan_of, attempt),
    )
    # The labels of a swap say that entries look swapped, which only a plan shows.
    plain = (one for one in changes if not any(label.text for label in one.labels))
    likely = next((one for one, _ in tries.accepted), next(plain, None))
    changed = likely.labels if likely is not None else ()
    labels = found[0].labels or changed or labels_at([argument_span(options.at, error.option)], "")
    if error.call is not None and changed:
        labels = (*changed, *(dataclasses.replace(label, primary=False) for label in labels))
    return (
        dataclasses.replace(
            found[0],
            labels=labels,
            notes=(
                *found[0].notes,
                *applicable(
                    {f"sbp did not try {counted(tries.untried, 'more change')}": tries.untried}
                ),
            ),
            helps=tuple(one.help(program) for one, program in tries.accepted),
        ),
    )


def _plan_of(attempt: Attempt, changed: tuple[JitOptions, Correction | None]) -> Program | None:
    """The plan of the call after a change; None where there is none. Its warnings are about a
    program that the user has not written, so they are dropped."""
    options, correction = changed
    with noting(), warnings.catch_warnings(action="ignore"), correcting(correction):
        try:
            return attempt(options)
        except SbpInternalError:
            raise
        except Exception:  # the user's function, which may raise anything with another value
            return None


def _changes(error: SbpError, options: JitOptions) -> list[Change]:
    """The changes to try, the likeliest first. If there are many swaps, some of them come last, so
    that sbp also tries the corrections of misspelt names."""
    if error.call is not None:
        return list(_entries(error, options, error.call))
    swaps = list(_swaps(error.option, options)) if error.option else []
    corrected = list(_corrections(error, options))
    first = max(0, LIMITS.plans - len(corrected))
    return [*swaps[:first], *corrected, *swaps[first:]]


def _corrections(error: SbpError, options: JitOptions) -> Iterator[Change]:
    """The option or the call that has a slip, with each likely value in place of the wrong one: a
    key, a type text or an axis."""
    option, field = error.option, other_option(error.option)
    wrong, likely = error.slip or (None, ())
    at = argument_span(options.at, option) if option else error.span or _jax.raising_span(error)
    for right in likely:
        # The source has the dim of a split.
        old, new = (v.dim if isinstance(v, Split) else v for v in (wrong, right))
        written = [
            (edit, "") for edit in (constants_in(at, old, new, of_call=not option) if at else ())
        ]
        text = f"write {show(new)} for {show(old)}"
        if option:
            value = _replace(getattr(options, field), wrong, right)
            if repr(value) != repr(getattr(options, field)):
                yield _change(
                    f"{text} in {option}",
                    written,
                    OptionEdit(option=option, value=value),
                    (dataclasses.replace(options, **{field: value}), None),
                )
        elif at:
            yield _change(
                f"{text} at line {at.line}",
                written,
                None,
                (options, Correction(at, wrong, right)),
            )


def _entries(error: SbpError, options: JitOptions, call: Span) -> Iterator[Change]:
    """The `in_types` of a hand-written region with each likely entry.

    Arguments:
      error: the error about them.
      options: of `sbp.jit`.
      call: the call that made the region.
    """
    wrong, likely = error.slip or ((), ())
    parts = items_of(call, "in_types", len(wrong))
    for right in likely:
        changed = next(i for i, entry in enumerate(right) if entry is not wrong[i])
        source = next((k for k, other in enumerate(wrong) if other is right[changed]), None)
        written = parts[source][1] if parts and source is not None else f'"{right[changed]}"'
        yield _change(
            f"write {written} for entry {changed} of in_types at line {call.line}",
            [(SourceEdit(span=parts[changed][0], replacement=written), "")] if parts else [],
            OptionEdit(option="in_types", value=right, function="sbp.manual"),
            (options, Correction(call, wrong, right)),
        )


def _change(
    text: str,
    written: Sequence[tuple[SourceEdit, str]],
    option: OptionEdit | None,
    changed: tuple[JitOptions, Correction | None],
) -> Change:
    """A change of an option or of a call.

    Arguments:
      text: the change in words.
      written: the edits of the source, each with the text of its label; none where the source does
        not show the option.
      option: the edit of the option then; None where there is none.
      changed: the options after it, or a correction of another call.
    """
    return Change(
        text=text,
        edits=tuple(edit for edit, _ in written) or ((option,) if option else ()),
        labels=tuple(
            Label(span=edit.span, text=said, primary=not n)
            for n, (edit, said) in enumerate(written)
        ),
        make=lambda: changed,
    )


def _swaps(option: str, options: JitOptions) -> Iterator[Change]:
    """An option with two of its entries swapped."""
    field = other_option(option)
    entries = getattr(options, field)
    if type(entries) not in (tuple, list):
        return
    parts = items_of(options.at, option, len(entries))
    for i, k in itertools.combinations(range(len(entries)), 2):
        if repr(entries[i]) == repr(entries[k]):  # entries may hold arrays
            continue
        swapped = list(entries)
        swapped[i], swapped[k] = swapped[k], swapped[i]
        value, written = type(entries)(swapped), list[tuple[SourceEdit, str]]()
        if parts:
            (a, a_text), (b, b_text) = parts[i], parts[k]
            said = f"entries {i} and {k} of {option} look swapped"
            written = [
                (SourceEdit(span=a, replacement=b_text), said),
                (SourceEdit(span=b, replacement=a_text), "the other one"),
            ]
        yield _change(
            f"swap entries {i} and {k} of {option}",
            written,
            OptionEdit(option=option, value=value),
            (dataclasses.replace(options, **{field: value}), None),
        )


def _replace(entry: Any, wrong: Any, right: Any) -> Any:
    """An entry of an option with another value for a key of a dict, or for a type text or the name
    in it."""
    match entry:
        case dict():
            return {
                (right if k == wrong else k): _replace(v, wrong, right) for k, v in entry.items()
            }
        case list() | tuple() if type(entry) in (list, tuple):
            return type(entry)(_replace(v, wrong, right) for v in entry)
        case str() if isinstance(wrong, str):
            return rename_axis(entry, wrong, right)
        case PartitionSpec():
            return PartitionSpec(
                *(
                    tuple(right if a == wrong else a for a in part)
                    if isinstance(part, tuple)
                    else right
                    if part == wrong
                    else part
                    for part in entry
                )
            )
        case str():
            return entry.replace(repr(wrong), repr(right))
        case _:
            return entry
