"""The origin of an atom of a value, in words."""

from __future__ import annotations

from typing import assert_never

from sbp.explain.origins import Link, Partner
from sbp.infer.space import decode
from sbp.report.wording import atoms_text, counted, place_text
from sbp.source.reader import source_text


def link_text(link: Link) -> str:
    """How one value of a chain of origins got its atom."""
    op = "" if link.node is None else link.node.name
    match link.kind:
        case "annotation":
            span = None if link.node is None else link.node.span
            return f"pinned by `{source_text(span, 60)}`" if span else "pinned by an annotation"
        case "free annotation":
            return "left free by the annotation"
        case "input" | "output":
            return f"pinned by the {link.kind}'s type"
        case "free input":
            return "an input whose type is left free"
        case "free output":
            return "an output whose type is left free"
        case "donated output":
            return f"it takes the buffer, and so the type, of the donated input {link.donor}"
        case "row" | "new":
            return _row_text(link, op)
        case "converted":
            return f"made as {decode(link.made)!r} and converted for {op}"
        case "converted result":
            return f"made as {decode(link.made)!r} and converted where the body returns it"
        case "carry":
            return "one type over all trips, chosen with what the body returns"
        case "body input":
            return f"as it comes into the body of {op}"
        case "body carry" | "body result":
            return f"what the body of {op} {'carries' if link.kind == 'body carry' else 'returns'}"
        case "more":
            return f"and so on over {counted(link.left_out, 'value')}"
        case _:
            assert_never(link.kind)


def _row_text(link: Link, op: str) -> str:
    """The row of an operation, with the other operands that decide the atom and their origins."""
    assert link.row is not None
    kernel = f" by its kernel {link.kernel!r}" if link.kernel else ""
    text = (
        f"{op}: {atoms_text(link.row.ins)} -> {atoms_text(link.row.outs)}{kernel}"
        if link.row.ins
        else f"{op} makes it {atoms_text(link.row.outs)}"
    )
    partners = ", ".join(f"{p.name} is {_partner_text(p)}" for p in link.partners)
    return f"{text}; {partners}" if partners else text


def _partner_text(partner: Partner) -> str:
    """The atom of another operand, and the end of its chain of origins."""
    atom, end = repr(decode(partner.atom)), partner.end
    if end.kind == "annotation" and end.place is not None:
        return f"{atom}, pinned {place_text(end.place)}"
    if end.kind not in ("input", "free input"):
        return atom
    return f"{atom}, an input" if end.subject == partner.name else f"{atom}, from {end.subject}"
