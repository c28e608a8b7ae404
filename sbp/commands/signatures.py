"""The command `sbp signatures [NAME]`: primitives, and functions of JAX."""

from __future__ import annotations

import argparse
import dataclasses
import json
import warnings
from collections.abc import Sequence
from typing import Any

from rich.console import Console

from sbp.commands.functions import FunctionSignature, function_signature, near_names
from sbp.commands.shapes import arguments
from sbp.errors import SbpError
from sbp.report.parts import Column, Page, Paragraph, Part, Section, Table, TableRow
from sbp.report.report import Shown
from sbp.report.signatures import AXIS_SIZE, op_of, signature_page, signatures_page
from sbp.report.wording import bytes_text, counted, listed
from sbp.signatures import Row, known_primitives, rule_for
from sbp.signatures.examples import sample


def add_signature_options(parser: argparse.ArgumentParser) -> None:
    """Adds the options of `sbp signatures`."""
    parser.add_argument(
        "name",
        metavar="NAME",
        nargs="?",
        help="a primitive such as dot_general, or a function of JAX such as softmax or"
        " jnp.linalg.norm, which is traced; all primitives when left out",
    )
    parser.add_argument(
        "--args",
        metavar="SHAPES",
        help="the arguments that a function is traced with, such as \"'ij,jk->ik', f32[8,16],"
        ' f32[16,32]"',
    )
    parser.add_argument("--json", action="store_true", help="print JSON")


def show_signatures(words: Sequence[str]) -> int:
    """`sbp signatures [NAME]`.

    Arguments:
      words: the words after `sbp signatures`.

    Returns:
      The exit status, 0.

    Raises:
      SbpError: `unknown-option` where nothing has the name, with the nearest one.
    """
    parser = argparse.ArgumentParser(
        prog="sbp signatures",
        description="Show which types of operands give which types of results, on one mesh axis.",
    )
    add_signature_options(parser)
    given = parser.parse_args(words)
    page, data = _answer(given.name, given.args)
    if given.json:
        print(json.dumps(data, indent=2))
    else:
        Console(highlight=False).print(Shown(page=page), soft_wrap=True)
    return 0


def _answer(name: str | None, args: str | None) -> tuple[Page, Any]:
    """The page and the data of a primitive or function, or of all primitives."""
    if name is None:
        return signatures_page(), {"primitives": sorted(known_primitives())}
    if name in known_primitives() and args is None:
        return signature_page(name), {"primitive": name, "rows": _sample_rows(name)}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of shapes that the user did not choose
        found = function_signature(name, None if args is None else arguments(args))
    if found is None:
        raise SbpError(
            f"no primitive and no function of JAX is called {name!r}{near_names(name)}",
            code="unknown-option",
        )
    return function_page(found), _data(found)


def function_page(found: FunctionSignature) -> Page:
    """The signature of a function as a page."""
    parts: list[Part] = []
    if found.others:
        parts.append(Paragraph(text=f"the same name is also {listed(found.others)}"))
    rows = tuple(
        TableRow(
            cells=(
                p.name if p.count == 1 else f"{p.name} ({p.count} times)",
                f"{', '.join(p.inputs)} -> {', '.join(p.outputs)}",
                "; ".join(map(row_text, p.rows)) or ("none" if p.known else "no rule: held B"),
            )
        )
        for p in found.primitives
    )
    columns = (
        Column(heading="primitive", wraps=True),
        Column(heading="on", wraps=True),
        Column(heading="rows besides all B", wraps=True),
    )
    title = counted(len(rows), "primitive") + ", each with its rows on one mesh axis"
    parts.append(Section(title=title, parts=(Table(columns=columns, rows=rows),)))
    if found.calls:
        parts.append(_calls(found))
    shapes = ", ".join(found.inputs)
    return Page(title=f"`{found.name}` traced on {shapes or 'no arrays'}", parts=tuple(parts))


def row_text(row: Row) -> str:
    """A row on one line.

    >>> from sbp.types import P, S
    >>> row_text(Row((S(1), S(0)), (P,)))
    'S(1) S(0) -> P(sum)'
    """
    kernel = "" if row.kernel == "local" else f" by {row.kernel}"
    return f"{' '.join(map(repr, row.ins))} -> {' '.join(map(repr, row.outs))}{kernel}"


def _calls(found: FunctionSignature) -> Section:
    columns = (
        *(Column(heading=shape) for shape in found.inputs),
        Column(heading=""),
        Column(heading="result", wraps=True),
        Column(heading="sends", right=True),
    )
    rows = tuple(
        TableRow(cells=(*c.inputs, "->", " ".join(c.outputs), f"{bytes_text(c.bytes_per_device)}"))
        for c in found.calls
    )
    title = f"the function as a whole, on one mesh axis of {AXIS_SIZE} devices: its cheapest plans"
    return Section(title=title, parts=(Table(columns=columns, rows=rows),))


def _data(found: FunctionSignature) -> dict[str, Any]:
    """The signature as data that JSON can hold."""
    return {
        "function": found.name,
        "inputs": found.inputs,
        "others": found.others,
        "primitives": [
            {
                "primitive": p.name,
                "inputs": p.inputs,
                "outputs": p.outputs,
                "count": p.count,
                "known": p.known,
                "rows": [*map(_row_data, p.rows)],
            }
            for p in found.primitives
        ],
        "calls": [dataclasses.asdict(c) for c in found.calls],
    }


def _row_data(row: Row) -> dict[str, Any]:
    return {
        "inputs": [*map(repr, row.ins)],
        "outputs": [*map(repr, row.outs)],
        "kernel": row.kernel,
    }


def _sample_rows(primitive: str) -> list[dict[str, Any]]:
    """The rows of a primitive on its sample; none where it has no sample."""
    rule, found = rule_for(primitive), sample(primitive)
    return [] if rule is None or found is None else [*map(_row_data, rule.rows(op_of(*found)))]
