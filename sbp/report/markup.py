"""The marks in the texts of a report: words in `backticks` are code.

Only renderers call this module. No other code of sbp reads a text.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Piece:
    """A piece of a text: plain words, or code without its backticks."""

    content: str
    is_code: bool = False


def pieces(text: str) -> list[Piece]:
    """The pieces of a text in order. A backtick without a partner is plain.

    >>> [(p.content, p.is_code) for p in pieces("made by `x @ w` at a.py:1")]
    [('made by ', False), ('x @ w', True), (' at a.py:1', False)]
    """
    parts = text.split("`")
    if len(parts) % 2 == 0:
        parts[-2:] = [f"{parts[-2]}`{parts[-1]}"]
    return [Piece(part, number % 2 == 1) for number, part in enumerate(parts) if part or number % 2]


def plain(text: str) -> str:
    """A text without its marks."""
    return text.replace("`", "")


def words(text: str) -> list[str]:
    """The words of a text with their marks. Code is not split.

    >>> words("made by `x @ w`, once")
    ['made', 'by', '`x @ w`,', 'once']
    """
    found: list[str] = []
    joins = False
    for piece in pieces(text):
        parts = [f"`{piece.content}`"] if piece.is_code else piece.content.split()
        starts_anew = not piece.is_code and piece.content[:1].isspace()
        if joins and not starts_anew and parts:
            found[-1] += parts.pop(0)
        found += parts
        joins = piece.is_code or not piece.content[-1:].isspace()
    return found
