"""Titles and labels of faults at the edge of a loop or branch: predicates, carries, results of
branches, scanned operands."""

from __future__ import annotations

from collections.abc import Sequence

from jax import lax

from sbp.explain.names import Names
from sbp.infer.because import ReadBecause
from sbp.infer.check import CheckResult
from sbp.infer.constraints import Constraint
from sbp.infer.space import Code, decode
from sbp.source.reader import called_name, users_span
from sbp.trace.graph import Node


def atoms_text(codes: Sequence[Code]) -> str:
    """Atoms that are possible, in words.

    >>> atoms_text((1, -1)), atoms_text(())
    ('S(0) or P(sum)', 'of no type')
    """
    return " or ".join(repr(decode(c)) for c in codes) or "of no type"


def left(codes: Sequence[Code]) -> str:
    """How a value that should be B arrives: "partial" or "split"."""
    return "partial" if codes and all(c < 0 for c in codes) else "split"


def region_words(node: Node, fault: CheckResult, names: Names, subject: str) -> tuple[str, str]:
    """The title, up to the mesh axis, and the primary label of a fault at the edge of a region.

    Arguments:
      node: the scan, while or cond.
      fault: a fault whose sink is conversions into one variable of the region.
      names: the user's names of the values.
      subject: the name of the node in the title.
    """
    first = _read(fault.sink[0])
    entry, left_by = first.entry, first.exit
    if first.predicate or (entry is not None and entry.decides):
        return _predicate_words(fault, names, subject)
    if first.carry is not None:
        return _carry_words(first, fault, names, subject)
    if left_by is not None and left_by.kind == "result":
        return _result_words(node, fault, subject)
    made = fault.made[0]
    said = _value(fault.sink[0], names) or first.role
    if entry is not None and entry.kind == "slice" and set(made) == {1}:
        return (
            f"{subject} runs along the split dim of `{said}`",
            f"{said} is S(0), and the scan takes its rows one after the other",
        )
    return (
        f"{said} of {subject} cannot keep one type",
        f"{said} is {atoms_text(made)}, but {atoms_text(fault.wanted[0])} is kept here",
    )


def _predicate_words(fault: CheckResult, names: Names, subject: str) -> tuple[str, str]:
    """A predicate that is not B, or a constant that the predicate of a while reads.

    Arguments:
      fault: the fault.
      names: the user's names of the values.
      subject: the name of the node in the title.
    """
    made = fault.made[0]
    hint = "; reduce it first" if left(made) == "partial" else ""
    what, said = f"the predicate of {subject}", "the predicate"
    if not _read(fault.sink[0]).predicate:
        name = _value(fault.sink[0], names)
        said = name or "what the predicate reads"
        what = (
            f"`{said}`, which the predicate of {subject} reads,"
            if name.isidentifier()
            else f"{said} in {subject}"
        )
    return (
        f"{what} is left {left(made)}",
        f"{said} is {atoms_text(made)}, but all devices have to decide alike{hint}",
    )


def _carry_words(
    first: ReadBecause, fault: CheckResult, names: Names, subject: str
) -> tuple[str, str]:
    """A carry that enters a step in another type than it leaves it.

    Arguments:
      first: why the first constraint of the fault stands.
      fault: the fault.
      names: the user's names of the values.
      subject: the name of the node in the title.
    """
    initial, after = list[Sequence[Code]](), list[Sequence[Code]]()
    name = ""
    for constraint, codes in zip(fault.sink, fault.made, strict=True):
        if _read(constraint).initial_carry:
            initial.append(codes)
            name = name or _value(constraint, names)
        else:
            after.append(codes)
    title = f"carry {first.carry}"
    if initial and after:
        called = title + (f" ({name})" if name else "")
        return (
            f"{called} of {subject} cannot keep one type",
            (
                f"{called} enters as {atoms_text(initial[-1])} and is {atoms_text(after[-1])} after"
                " a step"
            ),
        )
    which = f"initial {title}" if initial else title
    made, wanted = atoms_text(fault.made[0]), atoms_text(fault.wanted[0])
    return (
        f"{title} of {subject} cannot keep one type",
        f"{which} is {made}, but {wanted} is kept here",
    )


def _result_words(node: Node, fault: CheckResult, subject: str) -> tuple[str, str]:
    """A result that the branches of a cond return in different types.

    Arguments:
      node: the cond.
      fault: the fault.
      subject: the name of the node in the title.
    """
    told = [
        f"{_branch(node, _read(c))} returns {atoms_text(codes)}"
        for c, codes in zip(fault.sink, fault.made, strict=True)
    ]
    if len(told) == 1:
        told.append(f"{atoms_text(fault.wanted[0])} is kept here")
    number = fault.sink[0].operand
    return f"result {number} of {subject} is not of one type in all branches", ", ".join(told)


def _read(constraint: Constraint) -> ReadBecause:
    """Why a constraint at the edge of a region stands: a value is read there."""
    assert isinstance(constraint.because, ReadBecause)
    return constraint.because


def carry_of(constraint: Constraint) -> int | None:
    """The number of the carry that enters or leaves a step; None for a value that is no carry."""
    return _read(constraint).carry


def _branch(node: Node, because: ReadBecause) -> str:
    """Which branch of a cond returns."""
    number = because.exit.region if because.exit is not None else 0
    if len(node.regions) == 2 and called_name(users_span(node)) == lax.cond.__name__:
        # lax.cond(predicate, true branch, false branch)
        return "the true branch" if number else "the false branch"
    return f"branch {number}"


def _value(constraint: Constraint, names: Names) -> str:
    """The user's name of the value that enters or leaves."""
    return names.value(constraint.convert.value) if constraint.convert else ""
