"""Files of plans: `plan.save` writes them, `sbp.jit(.., plan=path)` reads them."""

from __future__ import annotations

import contextlib
import os
from typing import Any

from sbp.errors import SbpError, refused
from sbp.infer.request import Request
from sbp.plan.program import Program
from sbp.plan.saved import SavedPlan


def path_of(path: Any, option: str) -> str:
    """The path of a plan's file.

    Raises:
      SbpError: `bad-argument` for what is no path.
    """
    try:
        return os.path.abspath(os.fsdecode(path))
    except TypeError as error:
        raise refused(
            f"{option} is the path of a file from plan.save; got {path!r}", TypeError
        ) from error


def write_plan(path: Any, saved: SavedPlan) -> None:
    """Writes a plan. Readers see the old file or the new one, and nothing between.

    Raises:
      SbpError: `saved-plan` where the file cannot be written.
    """
    target = path_of(path, "path")
    partial = f"{target}.{os.getpid()}.partial"
    try:
        with open(partial, "w", encoding="utf-8") as file:
            file.write(saved.dumps())
        os.replace(partial, target)
    except OSError as error:
        with contextlib.suppress(OSError):
            os.remove(partial)
        raise SbpError(
            f"{target} cannot be written: {error.strerror}", code="saved-plan"
        ) from error


def load_program(path: str, request: Request) -> Program:
    """The plan of a file for a request, verified.

    Raises:
      SbpError: `saved-plan` where the file cannot be read, was made for another program, mesh,
        version or option, or does not hold.
    """
    try:
        with open(path, encoding="utf-8") as file:
            text = file.read()
    except (OSError, UnicodeDecodeError) as error:
        why = error.strerror if isinstance(error, OSError) else "it is no UTF-8"
        raise SbpError(
            f"{path} cannot be read: {why}; write it with plan.save(path)", code="saved-plan"
        ) from error
    try:
        return SavedPlan.loads(text).program_for(request)
    except SbpError as error:
        if error.code != "saved-plan":
            raise
        raise SbpError(
            f"{error.title}; plan again without plan=, and save the new plan",
            code="saved-plan",
            details=(*error.details, f"file: {path}"),
        ) from error
