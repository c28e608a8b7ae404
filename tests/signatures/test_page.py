"""docs/signatures.md has every primitive with its rows, as the rules and the samples give them."""

import os
import re
import textwrap
from collections import Counter
from pathlib import Path
from typing import Any

import jax
import pytest
from samples import SAMPLES, equations, on, primitives, rule_of

from sbp.commands.signatures import KNOWN, family
from sbp.plan.program import shape_text
from sbp.signatures import Op, Row, all_b, known_kernels, known_primitives
from sbp.signatures.laws.proofs import row_status
from sbp.signatures.rule import FALLBACK, REFUSED
from sbp.trace.graph import group_by
from sbp.types import Split, Unreduced

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "signatures.md"
LOWEST = re.search(r'"jax>=([\d.]+)', (ROOT / "pyproject.toml").read_text("utf-8"))


SIZES = (2, 3, 4)
"""Sizes of the mesh axis that samples are tried on, as in the laws."""

MAX_ROWS = 12

HEAD = """# Signatures

Written by `SBP_UPDATE_GOLDEN=1 pytest tests/signatures/test_page.py`, from the rules and the
samples that they are tested on. `sbp signatures PRIMITIVE` shows one in the terminal;
[types.md](types.md) says what S, B and P mean, and how to add a signature of your own.

{primitives} primitives have a rule, with {rows} rows on {samples} sample equations, {known}; all
operands and results B, which holds for every primitive, is not counted.

* **rows**: on one mesh axis of size 2, for the sample that has the most.
* **partial**: what passes from operands to results, over all samples; `S → sum` is a split that
  leaves a partial sum.
{known_rows}
* **uneven**: whether a dim may be split that the axis size does not divide.
* **kernels**: what runs on the shards where it is not the primitive itself, see [below](#kernels).
"""

REMARKS = {
    "random": (
        "A draw of an `rbg` or `unsafe_rbg` key is whole on each device, since all of its elements"
        " are of one stream."
    )
}
"""What the user of a family must know besides its rows."""

FALLBACK_HEAD = """
## Without a rule

Computed on whole operands (all B) with the warning `missing-rule`, unless the trace decomposes
them.

| primitives | because |
|---|---|"""


def page() -> str:
    """The text of the page."""
    lines: list[str] = []
    families = group_by(known_primitives(), _title)
    total: Counter[str] = Counter()
    samples = 0
    for title in sorted(families, key=lambda t: (t == "replicated", t)):
        lines += ["", f"## {title.capitalize()}", ""]
        if title == "replicated":
            lines += ["All B, whatever the operands.", "", "| primitive | because |", "|---|---|"]
            for name in families[title]:
                lines.append(_line([f"`{name}`", rule_of(name).reason]))
            continue
        if title in REMARKS:
            lines += [*textwrap.wrap(REMARKS[title], 100), ""]
        lines += [
            "| primitive | rows | partial | known | uneven | kernels |",
            "|---|---|---|---|---|---|",
        ]
        for name in families[title]:
            if name not in primitives():
                lines.append(_line([f"`{name}`", "newer JAX only", "", "", "", ""]))
                continue
            ops = list(_ops(name))
            samples += len(ops)
            counted = Counter(status for op in ops for status in _known(op))
            total += counted
            lines.append(_line(_cells(name, ops, counted)))
    lines += ["", "## Kernels", "", "| kernel | what runs on the shards | sends |", "|---|---|---|"]
    lines += [
        _line([f"`{k.name}`", k.summary, "yes" if k.communicates else ""]) for k in known_kernels()
    ]
    lines += [
        FALLBACK_HEAD,
        *(
            _line([" ".join(f"`{name}`" for name in sorted(names)), why])
            for why, names in group_by(FALLBACK, lambda name: FALLBACK[name]).items()
        ),
    ]
    lines += [
        "",
        "Refused, as no type is right:",
        "",
        *(_item(f"`{name}` {why}") for name, why in sorted(REFUSED.items())),
    ]
    head = HEAD.format(
        primitives=len(known_primitives()),
        rows=total.total(),
        samples=samples,
        known=_counts(total),
        known_rows=_item(f"**known**: how many rows are {_legend(total)}."),
    )
    return head + "\n".join(lines) + "\n"


def _title(name: str) -> str:
    """The section of a primitive."""
    return "replicated" if rule_of(name).reason else family(rule_of(name))


def _legend(counted: Counter[str]) -> str:
    return ", ".join(f"{name} ({because})" for name, because in KNOWN.items() if counted[name])


def _ops(name: str):
    """The samples' equations, one for each combination of shapes and dtypes."""
    seen: set[Any] = set()
    for eqn in equations(name, SAMPLES[name]):
        op = eqn.op
        key = (
            tuple((a.shape, str(a.dtype)) for a in (*op.ins, *op.outs)),
            str(sorted(op.params.items())),
        )
        if key not in seen:
            seen.add(key)
            yield on(eqn, SIZES[0])


def _rows(op: Op, n: int = SIZES[0]) -> list[Row]:
    at = Op(op.name, op.params, op.ins, op.outs, n)
    return [row for row in rule_of(op.name).rows(at) if row != all_b(at)]


_statuses: dict[Any, str] = {}


def _known(op: Op):
    """How each row is known; Z3 is asked once for rows of equal dtypes."""
    for row in _rows(op):
        key = (
            op.name,
            row,
            tuple(str(a.dtype) for a in (*op.ins, *op.outs)),
            str(op.params.get("y")),
        )
        if key not in _statuses:
            _statuses[key] = row_status(op, row)
        yield _statuses[key]


def _cells(name: str, ops, counted: Counter[str]) -> list[str]:
    shown = max(ops, key=lambda op: len(_rows(op)))
    rows = [f"`{row}`" for row in _rows(shown)]
    if len(rows) > MAX_ROWS:
        rows = [*rows[: MAX_ROWS - 1], f"and {len(rows) - MAX_ROWS + 1} more"]
    sample = f"{', '.join(map(shape_text, shown.ins))} → {', '.join(map(shape_text, shown.outs))}"
    every = [row for op in ops for row in _rows(op)]
    kernels = sorted({row.kernel for row in every} - {"local"})
    return [
        f"`{name}`",
        "<br>".join([f"*{sample}*", *(rows or ["none"])]),
        "<br>".join(sorted({passed for row in every for passed in _passed(row)})),
        _counts(counted, "<br>"),
        (
            "yes"
            if any(_is_uneven(op) for op in ops)
            else "no"
            if any(_splits(row) for row in every)
            else ""
        ),
        "<br>".join(f"`{k}`" for k in kernels),
    ]


def _passed(row: Row):
    """Each monoid of a result, with the monoids, or the split, of the operands that it comes
    from."""
    made = sorted({a.monoid for a in row.outs if isinstance(a, Unreduced)})
    taken = sorted({a.monoid for a in row.ins if isinstance(a, Unreduced)})
    source = ", ".join(taken) if taken else "S"
    for monoid in made:
        yield monoid if taken == [monoid] else f"{source} → {monoid}"
    if taken and not made:
        yield f"{source} → {'S' if _splits(row) else 'B'}"


_splits = lambda row: any(isinstance(a, Split) for a in (*row.ins, *row.outs))


def _is_uneven(op: Op) -> bool:
    """Whether some row splits a dim that the axis size does not divide."""
    for n in SIZES:
        for row in _rows(op, n):
            sides = (*zip(row.ins, op.ins, strict=True), *zip(row.outs, op.outs, strict=True))
            if any(isinstance(a, Split) and aval.shape[a.dim] % n for a, aval in sides):
                return True
    return False


def _counts(counted: Counter[str], joint: str = ", ") -> str:
    return joint.join(f"{counted[name]} {name}" for name in KNOWN if counted[name])


def _item(text: str) -> str:
    """An item of a list, in lines of at most 100 columns."""
    return textwrap.fill(f"* {text}", 100, subsequent_indent="  ", break_on_hyphens=False)


_line = lambda cells: "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


def test_the_page_is_what_the_rules_yield():
    """Written on the lowest supported JAX, as newer ones have more primitives."""
    assert LOWEST is not None
    if jax.__version__ != LOWEST[1]:
        pytest.skip(f"the page is written with JAX {LOWEST[1]}")
    text = page()
    if os.environ.get("SBP_UPDATE_GOLDEN") == "1":
        PAGE.write_text(text, encoding="utf-8")
    assert PAGE.exists(), (
        f"{PAGE.name} is missing; run this test with SBP_UPDATE_GOLDEN=1 and look at what it writes"
    )
    assert text.splitlines() == PAGE.read_text("utf-8").splitlines(), (
        "run this test with SBP_UPDATE_GOLDEN=1 after a change of rules or samples"
    )
