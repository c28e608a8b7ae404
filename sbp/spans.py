"""Pieces of the user's source, and the names that files are shown under."""

from __future__ import annotations

import contextlib
import os
import re
import sys
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True, kw_only=True, order=True)
class Span:
    """A piece of the user's source: one expression, with 1-based line and column."""

    file: str
    line: int
    column: int
    end_column: int
    end_line: int = 0
    function: str = ""

    def __str__(self) -> str:
        return f"{file_name(self.file)}:{self.line}:{self.column}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Label:
    """A span with a remark. Carets mark the span of a primary label, dashes that of others."""

    span: Span
    text: str
    primary: bool = False


def file_name(path: str) -> str:
    """The name that a source file is shown under: relative to the working folder or to the
    installed libraries, else its last two parts.

    A cell of a notebook is shown by its number.
    """
    cell = _cell_number(path)
    if cell is not None:
        return f"cell [{cell}]"
    if os.path.basename(os.path.dirname(path)).startswith("ipykernel_"):
        return "cell"
    installed = re.split(r"[\\/](?:site|dist)-packages[\\/]", path)
    if len(installed) > 1:
        return installed[-1].replace(os.sep, "/")
    if not os.path.isabs(path):
        return path
    with contextlib.suppress(FileNotFoundError):  # the working folder may have been removed
        here = os.path.join(os.getcwd(), "")
        if path.startswith(here):
            return os.path.relpath(path, here).replace(os.sep, "/")
    return "/".join(path.split(os.sep)[-2:])


def _cell_number(path: str) -> int | None:
    ipython: Any = sys.modules.get("IPython")
    shell = ipython.get_ipython() if ipython is not None else None
    names = getattr(getattr(shell, "compile", None), "_filename_map", None)
    return names.get(path) if isinstance(names, dict) else None
