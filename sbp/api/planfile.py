"""Files of plans: `plan.save` writes them, `sbp.jit(.., plan=path)` reads them."""

from __future__ import annotations

import contextlib
import os
from typing import Any

from sbp.errors import SbpError, refused
from sbp.infer.request import Request
from sbp.kinds import shown
from sbp.plan.program import Program
from sbp.plan.saved import SavedPlan


def path_of(path: Any, option: str) -> str:
    """The path of a plan's file.

    Raises:
      SbpError: `bad-argument` for what is no path.
    """
    try:
        found = os.fsdecode(path)
        if b"\0" in os.fsencode(found):
            raise ValueError("a path has no null character")
        return os.path.abspath(found)
    except (TypeError, ValueError) as error:  # ValueError for characters that no path has
        raise refused(
            f"{option} is the path of a file from plan.save; got {shown(path)}", error
        ) from error


def paths_of_plans(given: Any) -> tuple[str, ...]:
    """The paths of `sbp.jit(.., plan=)`: of one file or folder, or of several.

    Raises:
      SbpError: `bad-argument` for what is no path.
    """
    several = given if isinstance(given, list | tuple) else [given]
    if not several or any(isinstance(path, str) and not path for path in several):
        raise refused("plan has no path; name a file from plan.save", ValueError)
    return tuple(path_of(path, "plan") for path in several)


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


def load_program(paths: tuple[str, ...], request: Request) -> Program:
    """The first plan of some files that fits a request, verified.

    Arguments:
      paths: of files, and of folders of files that end in `.json`, which are read in the order of
        their names.
      request: the program with everything that its plan is chosen by.

    Raises:
      SbpError: `saved-plan` where a file cannot be read, and where each file was made for another
        program, mesh, version or option, or does not hold.
    """
    files = [file for path in paths for file in _files(path)]
    texts = [_read(file) for file in files]  # one that is missing is refused wherever it stands
    wrong: list[SbpError] = []
    for path, text in zip(files, texts, strict=True):
        try:
            return _loaded(path, text, request)
        except SbpError as error:
            if error.code != "saved-plan":
                raise
            wrong.append(error)
    if len(wrong) == 1:
        raise wrong[0]
    raise SbpError(
        f"none of {len(files)} saved plans is for this call; plan it without plan=, and save the"
        " plan beside them",
        code="saved-plan",
        details=[f"{path}: {error.title}" for path, error in zip(files, wrong, strict=True)],
    )


def _files(path: str) -> list[str]:
    """The file at a path, or the plans of a folder.

    Raises:
      SbpError: `saved-plan` for a folder without any.
    """
    if not os.path.isdir(path):
        return [path]
    names = sorted(name for name in os.listdir(path) if name.endswith(".json"))
    if not names:
        raise SbpError(
            f"the folder {path} has no .json files; write them with plan.save(path)",
            code="saved-plan",
        )
    return [os.path.join(path, name) for name in names]


def _read(path: str) -> str:
    """The text of a file.

    Raises:
      SbpError: `saved-plan` where it cannot be read.
    """
    try:
        with open(path, encoding="utf-8") as file:
            return file.read()
    except (OSError, UnicodeDecodeError) as error:
        why = error.strerror if isinstance(error, OSError) else "it is no UTF-8"
        raise SbpError(
            f"{path} cannot be read: {why}; write it with plan.save(path)", code="saved-plan"
        ) from error


def _loaded(path: str, text: str, request: Request) -> Program:
    """The plan of a file for a request, verified.

    Arguments:
      path: the file.
      text: what it has.
      request: as for `load_program`.

    Raises:
      SbpError: `saved-plan`, as `load_program` does.
    """
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
