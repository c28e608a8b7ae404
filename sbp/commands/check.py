"""The commands `sbp check FILE:FUNCTION` and `sbp report FILE:FUNCTION`."""

import argparse
import contextlib
import dataclasses
import importlib.util
import inspect
import itertools
import json
import math
import sys
import sysconfig
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import jax
from jax.sharding import AbstractMesh
from rich.console import Console

import sbp
from sbp._jax import context_mesh
from sbp.api.jit import Jitted, JittedMethod, check_shard_map, jit
from sbp.commands.parser import arguments, mesh_axes, required_parameters
from sbp.errors import SbpError, bytes_text, nearest, seconds_text
from sbp.moe.sharding import simulate_devices
from sbp.report.pages import diagnostics_of, refusal
from sbp.report.parts import Facts, Page
from sbp.report.report import Report, Shown
from sbp.source.reader import in_library


def show_program(given: argparse.Namespace) -> int:
    """`sbp check FILE:FUNCTION`: the findings, and what the program costs; `sbp report
    FILE:FUNCTION`: the full report.

    Arguments:
      given: the options of the command.

    Returns:
      The exit status: 0 without an error, 1 with one, 2 where the program could not be checked.

    Raises:
      SbpError: `unknown-option` where the HTML file cannot be written.
    """
    try:
        report = _check(given)
    except UserCodeError as error:
        _show_users_error(error, given.target)
        return 2
    page = _page(report, given)
    if given.json:
        print(json.dumps(report.to_json(), indent=2, ensure_ascii=False))
    elif getattr(given, "html", None):
        try:
            Path(given.html).write_text(page.html(standalone=True), encoding="utf-8")
        except OSError as error:
            raise SbpError(
                f"cannot write {given.html}: {error.strerror}; name another file",
                code="unknown-option",
            ) from None
        print(f"wrote {given.html}")
    else:
        Console(highlight=False).print(page, soft_wrap=True)
    return 0 if report.ok else 1


def _page(report: Report, given: argparse.Namespace) -> Shown:
    if "short" not in given:
        return Shown(page=_findings(report))
    if given.source and report.program is not None:
        return report.source()
    return report.short() if given.short else report.full()


def _findings(report: Report) -> Page:
    """The findings, a line that counts them, and the cost of the plan where there is one."""
    parts = refusal(report.title, report.diagnostics, report.coverage).parts
    if report.program is None:
        return Page(parts=parts)
    cost, mesh = report.program.cost, report.program.mesh
    assumed = " (assumed; --hardware names another)" if mesh.is_assumed else ""
    pairs = (
        ("mesh", f"{mesh}"),
        ("sent per call", f"{bytes_text(cost.bytes_per_device)} per device"),
        ("peak memory", f"{bytes_text(cost.peak_memory_bytes)} per device"),
        ("modelled time", f"{seconds_text(cost.seconds)} on {mesh.hardware.name}{assumed}"),
    )
    return Page(parts=(*parts, Facts(pairs=pairs)))


def _show_users_error(error: "UserCodeError", target: str) -> None:
    """Prints what the user's code raised, from the user's first line on."""
    cause = error.__cause__
    assert cause is not None  # `raise .. from`
    ours = str(Path(sbp.__file__).parent), sysconfig.get_path("stdlib"), "<"
    frames = traceback.extract_tb(cause.__traceback__)
    theirs = [not (f.filename.startswith(ours) or in_library(f.filename)) for f in frames]
    first = theirs.index(True) if any(theirs) else 0
    name = type(cause).__name__
    print(
        f"{''.join(traceback.format_list(frames[first:]))}{name}: {cause}\nsbp could not check"
        f" {target}: its code raised {name}.{error}",
        file=sys.stderr,
    )


# ---- the program --------------------------------------------------------------------------------


SIMULATED = 8
"""Simulated devices where nothing says how many."""


class UsageError(SbpError):
    """The words of the command line name no program that can be checked."""


class UserCodeError(Exception):
    """The user's own code raised an exception, which is the cause of this one. The text is a hint,
    or empty."""


def is_target(word: str) -> bool:
    """Whether a word of the command line names a program.

    >>> is_target("train.py:step"), is_target("train.py"), is_target("data=2"), is_target("10:15")
    (True, True, False, False)
    """
    name, _, function = word.partition(":")
    is_module = all(map(str.isidentifier, name.split(".")))
    return name.endswith(".py") or (is_module and function[:1].isidentifier())


def _check(given: argparse.Namespace) -> Report:
    """The report on the program that the options name.

    Raises:
      SbpError: `unknown-option` where there is no such program, or it lacks arguments or a mesh.
      UserCodeError: where the user's code raises something else while it is loaded or traced.
    """
    mesh = mesh_axes(given.mesh) if given.mesh is not None else {}
    if given.devices is not None:  # other kinds of devices are not used
        jax.config.update("jax_platforms", "cpu")
    # Programs that are checked send nothing to simulated devices.
    simulate_devices(given.devices or max(SIMULATED, math.prod(mesh.values())))
    values = None if given.args is None else arguments(given.args)
    try:
        function, args, kwargs = _call(_find(given.target), values, given.target)
    except SbpError as error:
        if isinstance(error, UsageError) or error.code == "mesh-devices":
            raise
        return Report(program=None, diagnostics=diagnostics_of(error), title=given.target)
    axes = AbstractMesh(tuple(mesh.values()), tuple(mesh)) if mesh else None
    if given.shard_map:
        if axes is None:
            raise SbpError(
                "--shard-map needs the mesh of the program, such as --mesh data=2,model=4",
                code="unknown-option",
            )
        return _run(lambda: check_shard_map(function, *args, mesh=axes, **kwargs), "")
    jitted = _jit(function, axes, given)
    return _run(lambda: jitted.check(*args, **kwargs), "")


_MORE_DEVICES = " If it needs more devices: --devices N"


def _run(action: Callable[[], Any], hint: str = _MORE_DEVICES) -> Any:
    """What an action returns that runs the user's code, whose prints go to stderr: stdout has the
    report.

    Raises:
      SbpError: where it raises one.
      UserCodeError: where it raises anything else.
    """
    try:
        with contextlib.redirect_stdout(sys.stderr):
            return action()
    except SbpError:
        raise
    except (Exception, SystemExit) as error:  # any exception may come from the user's code
        raise UserCodeError(hint) from error


# ---- finding the function -----------------------------------------------------------------------


def _find(target: str) -> Any:
    """The object that FILE:FUNCTION names.

    Raises:
      SbpError: `unknown-option` where the file or the name does not exist.
    """
    place, _, path = target.partition(":")
    if not path:
        raise UsageError(
            f"{target} names no function; write {place}:FUNCTION", code="unknown-option"
        )
    if place.endswith(".py"):
        if not Path(place).is_file():
            files = [str(Path(place).parent / p.name) for p in Path(place).parent.glob("*.py")]
            raise UsageError(
                f"there is no file {place}{nearest(place, files)}", code="unknown-option"
            )
        found: Any = _run(lambda: _load(Path(place)))
    else:
        sys.path.insert(0, str(Path.cwd()))
        try:
            found = _run(lambda: importlib.import_module(place))
        except UserCodeError as error:
            missing = error.__cause__
            if isinstance(missing, ModuleNotFoundError) and place.startswith(f"{missing.name}"):
                raise UsageError(
                    f"there is no module {place}; name a file with its ending, as in model.py:step",
                    code="unknown-option",
                ) from None
            raise
    for name in path.split("."):
        if not hasattr(found, name):
            names = [n for n in dir(found) if callable(getattr(found, n)) and n[0] != "_"]
            raise UsageError(
                f"{place} has no {path!r}{nearest(name, names)}", code="unknown-option"
            )
        found = getattr(found, name)
    return found


def _load(file: Path) -> ModuleType:
    """The module of a file, imported as the part of its package where it lies in one."""
    file = file.resolve()
    packages = [*itertools.takewhile(lambda p: (p / "__init__.py").is_file(), file.parents)]
    sys.path.insert(0, str(file.parents[len(packages)]))
    if packages:
        names = (*(p.name for p in reversed(packages)), file.stem)
        return importlib.import_module(".".join(n for n in names if n != "__init__"))
    name = file.stem if file.stem not in sys.modules else f"program_{file.stem}"
    spec = importlib.util.spec_from_file_location(name, file)
    assert spec is not None and spec.loader is not None  # the file ends in .py
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


# ---- its arguments and mesh ---------------------------------------------------------------------

_Call = tuple[Callable[..., Any], Sequence[Any], dict[str, Any]]


def _call(found: Any, given: tuple[tuple[Any, ...], dict[str, Any]] | None, target: str) -> _Call:
    """The function that is checked, with its arguments: those of the command line, else those that
    `found` returns together with the function.

    Raises:
      SbpError: `unknown-option` where there are no arguments.
    """
    if given is None and (made := _program(found)):
        return made
    if not callable(found):
        raise UsageError(
            f"{target} is {type(found).__name__}, not a function; name a function, or an sbp.jit"
            " function",
            code="unknown-option",
        )
    if given is not None:
        return (found, *given)
    needed = required_parameters(found)
    if needed:
        raise UsageError(
            f"{target} takes {', '.join(needed)}; give their shapes, such as --args"
            f' "{", ".join(["float32[8,16]"] * len(needed))}", or name a function without'
            " arguments that returns (function, arguments)",
            code="unknown-option",
        )
    made = None if isinstance(found, Jitted) else _program(_run(found))
    return made or (found, (), {})


def _program(value: Any) -> _Call | None:
    """(function, arguments) or (function, arguments, keyword arguments); None for other values."""
    match value:
        case (fn, tuple() | list() as args) if callable(fn):
            return fn, args, {}
        case (fn, tuple() | list() as args, dict() as kwargs) if callable(fn):
            return fn, args, kwargs
        case _:
            return None


def _jit(function: Callable[..., Any], axes: AbstractMesh | None, given: argparse.Namespace) -> Any:
    """The function under `sbp.jit`, with the mesh and the hardware of the command line.

    Raises:
      SbpError: `unknown-option` where no mesh is given.
    """
    if isinstance(function, Jitted):
        if axes is None and given.hardware is None:
            return function
        return Jitted(
            inspect.unwrap(function, stop=lambda f: not isinstance(f, Jitted)),
            axes or function.mesh,
            dataclasses.replace(
                function.options, hardware=given.hardware or function.options.hardware
            ),
        )
    if isinstance(function, JittedMethod):
        if axes is not None or given.hardware is not None:
            raise SbpError(
                f"{given.target} is a method, which keeps the mesh and the hardware of its"
                " sbp.jit; leave out --mesh and --hardware, or name a function",
                code="unknown-option",
            )
        return function
    if axes is None and context_mesh() is None:
        raise SbpError(
            f"{given.target} is a plain function and has no mesh; give one, such as --mesh"
            " data=2,model=4, or name an sbp.jit function",
            code="unknown-option",
        )
    return jit(function, axes, hardware=given.hardware)
