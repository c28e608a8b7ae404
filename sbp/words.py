"""Pieces of the sentences of errors and reports."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


def bytes_text(count: float) -> str:
    """Bytes with one decimal in the largest unit that leaves at least 1.

    >>> bytes_text(448), bytes_text(6 * 2**20)
    ('448.0 B', '6.0 MiB')
    """
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(count) < 1023.95:
            return f"{count:.1f} {unit}"
        count /= 1024
    return f"{count:.1f} TiB"


def nearest(name: object, known: Iterable[str]) -> str:
    """A clause naming the nearest of `known`, for error messages.

    >>> nearest("modle", ["data", "model"])
    '; did you mean "model"?'
    """
    options = sorted(known)
    close = difflib.get_close_matches(str(name), options, n=1, cutoff=0.5)
    if close:
        return f'; did you mean "{close[0]}"?'
    return f"; known: {', '.join(o[:80] for o in options)}" if options else ""
