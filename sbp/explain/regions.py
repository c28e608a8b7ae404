"""What is wrong at the edge of a loop or branch, in words: predicates, carries, results of
branches, scanned operands."""

from __future__ import annotations

import re
from collections.abc import Sequence

from sbp.explain.names import Names
from sbp.infer.check import CheckResult
from sbp.infer.constraints import Constraint
from sbp.infer.space import Code, decode
from sbp.trace.graph import Node
from sbp.trace.regions import interface_of


def atoms_text(codes: Sequence[Code]) -> str:
    """Atoms that are possible, in words.

    >>> atoms_text((1, -1)), atoms_text(())
    ('S(0) or P(sum)', 'of no type')
    """
    return " or ".join(repr(decode(c)) for c in codes) or "of no type"


def left(codes: Sequence[Code]) -> str:
    """How a value arrives that should be whole."""
    return "partial" if codes and all(c < 0 for c in codes) else "split"


def region_words(
    node: Node, fault: CheckResult, names: Names, subject: str, text: str
) -> tuple[str, str]:
    """The title, up to the mesh axis, and the primary label of a fault at the edge of a region.

    Arguments:
      node: the scan, while or cond.
      fault: a fault whose sink is conversions into one variable of the region.
      names: what the user calls the values.
      subject: what the title calls the node.
      text: its source text.
    """
    first, made = fault.sink[0], fault.made[0]
    edge = _edge(first)
    if edge == "predicate" or (
        edge == "constant" and interface_of(node).entries[first.operand].decides
    ):
        hint = "; reduce it first" if left(made) == "partial" else ""
        what, said = f"the predicate of {subject}", "the predicate"
        if edge == "constant":
            said = _value(first, names) or "what the predicate reads"
            what = (
                f"`{said}`, which the predicate of {subject} reads,"
                if said.isidentifier()
                else f"{said} in {subject}"
            )
        return (
            f"{what} is left {left(made)}",
            f"{said} is {atoms_text(made)}, but all devices have to decide alike{hint}",
        )
    if edge in ("carry", "initial carry"):
        number = carry_of(node, first)
        name = next(
            (n for c in fault.sink if _edge(c) == "initial carry" and (n := _value(c, names))), ""
        )
        called = f"carry {number}" + (f" ({name})" if name else "")
        ends = {_edge(c): codes for c, codes in zip(fault.sink, fault.made, strict=True)}
        if len(ends) > 1:
            return (
                f"{called} of {subject} cannot keep one type",
                (
                    f"{called} enters as {atoms_text(ends['initial carry'])} and is"
                    f" {atoms_text(ends['carry'])} after a step"
                ),
            )
        label = (
            f"{edge} {number} is {atoms_text(made)}, but {atoms_text(fault.wanted[0])} is kept here"
        )
        return f"carry {number} of {subject} cannot keep one type", label
    if edge == "result":
        told = [
            f"{_branch(node, c, text)} returns {atoms_text(codes)}"
            for c, codes in zip(fault.sink, fault.made, strict=True)
        ]
        if len(told) == 1:
            told.append(f"{atoms_text(fault.wanted[0])} is kept here")
        return f"result {first.operand} of {subject} is not of one type in all branches", ", ".join(
            told
        )
    said = _value(first, names) or first.because.text.rsplit(" of ", 1)[0]
    if edge == "scanned operand" and set(made) == {1}:
        return (
            f"{subject} runs along the split dim of `{said}`",
            f"{said} is S(0), and the scan takes its rows one after the other",
        )
    return (
        f"{said} of {subject} cannot keep one type",
        f"{said} is {atoms_text(made)}, but {atoms_text(fault.wanted[0])} is kept here",
    )


def _edge(constraint: Constraint) -> str:
    """Which edge of a region a constraint is about."""
    found = re.match(r"[a-z ]*[a-z]", constraint.because.text.split(" of ", 1)[0])
    return found.group() if found else ""


def carry_of(node: Node, constraint: Constraint) -> int | None:
    """The number among the carries of what enters or leaves a step; None for what is no carry."""
    edge = _edge(constraint)
    if edge == "carry":
        return constraint.operand
    return (
        interface_of(node).entries[constraint.operand].number if edge == "initial carry" else None
    )


def _branch(node: Node, constraint: Constraint, text: str) -> str:
    """Which branch of a cond returns."""
    found = re.search(r"branch (\d+)", constraint.because.text)
    number = int(found.group(1)) if found else 0
    if len(node.regions) == 2 and re.match(
        r"[\w.]*\bcond\(", text
    ):  # lax.cond(predicate, true branch, false branch)
        return "the true branch" if number else "the false branch"
    return f"branch {number}"


def _value(constraint: Constraint, names: Names) -> str:
    """What the user calls the value that enters or leaves."""
    return names.value(constraint.convert.value) if constraint.convert else ""
