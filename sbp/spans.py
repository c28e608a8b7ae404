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
        return position_text(self.file, self.line, self.column)


@dataclass(frozen=True, slots=True, kw_only=True)
class Label:
    """A span with a remark. Carets mark the span of a primary label, dashes that of others."""

    span: Span
    text: str
    primary: bool = False


def file_name(path: str) -> str:
    """The name that a source file is shown under: relative to the working folder or to the
    installed libraries, else its last two parts.

    A cell of a notebook is shown as IPython shows it, by the number of its run: `Cell In[3]`.
    """
    cell = _cell_number(path)
    if cell is not None:
        return f"Cell In[{cell}]"
    if _is_cell(path):
        return "Cell"
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


def position_text(path: str, line: int, column: int | None = None) -> str:
    """A place in a source file as errors and reports show it: `train.py:3:5`, and in a notebook
    `Cell In[3], line 2`, where the marks below the line show the column.

    >>> position_text("train.py", 3, 5), position_text("train.py", 3)
    ('train.py:3:5', 'train.py:3')
    """
    if _is_cell(path) or _cell_number(path) is not None:
        return f"{file_name(path)}, line {line}"
    return f"{file_name(path)}:{line}" + ("" if column is None else f":{column}")


def _is_cell(path: str) -> bool:
    """Whether a path is the one that a Jupyter kernel gives to a cell."""
    return os.path.basename(os.path.dirname(path)).startswith("ipykernel_")


def _cell_number(path: str) -> int | None:
    ipython: Any = sys.modules.get("IPython")
    shell = ipython.get_ipython() if ipython is not None else None
    names = getattr(getattr(shell, "compile", None), "_filename_map", None)
    return names.get(path) if isinstance(names, dict) else None
