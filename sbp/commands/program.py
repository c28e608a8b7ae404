"""A program that the command line names as FILE:FUNCTION, with its arguments and its mesh."""

from __future__ import annotations

import dataclasses
import importlib
import importlib.util
import inspect
import math
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import jax
from jax.sharding import AbstractMesh

from sbp._jax_call import context_mesh
from sbp.api.jit import jit
from sbp.api.jitted import Jitted, JittedMethod
from sbp.api.shard_map import check_shard_map
from sbp.commands.shapes import arguments, mesh_axes
from sbp.errors import Diagnostic, SbpError, nearest
from sbp.moe.devices import simulate_devices
from sbp.report.pages import diagnostics_of
from sbp.report.report import Report

SIMULATED = 8
"""Simulated devices where nothing says how many."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ProgramOptions:
    """The options of `sbp check` and `sbp report` that say what the program is.

    Arguments:
      target: FILE:FUNCTION, or MODULE:FUNCTION.
      args: the text of the arguments; None where the program has its own.
      mesh: the text of the mesh; None for the program's own.
      devices: simulated devices; None for those of the mesh.
      hardware: the hardware that costs are counted on; None for that of the mesh.
      shard_map: whether the program is checked as one that is written with `jax.shard_map`.
    """

    target: str
    args: str | None = None
    mesh: str | None = None
    devices: int | None = None
    hardware: str | None = None
    shard_map: bool = False


class FaultInProgram(Exception):
    """An error of sbp that the program raises before it is traced.

    Arguments:
      diagnostics: the findings of the error.
    """

    def __init__(self, diagnostics: tuple[Diagnostic, ...]) -> None:
        super().__init__()
        self.diagnostics = diagnostics


class UserCodeError(Exception):
    """The user's own code raised an exception, which is the cause of this one.

    Arguments:
      loading: whether it was raised before the program was traced.
    """

    def __init__(self, *, loading: bool) -> None:
        super().__init__()
        self.loading = loading


def is_target(word: str) -> bool:
    """Whether a word of the command line names a program.

    >>> is_target("train.py:step"), is_target("train.py"), is_target("data=2")
    (True, True, False)
    """
    name, _, _ = word.partition(":")
    return name.endswith(".py") or (":" in word and not word.startswith("-") and "=" not in name)


def checked(options: ProgramOptions) -> Report:
    """The report on the program that the options name.

    Raises:
      SbpError: `unknown-option` where there is no such program, or it lacks arguments or a mesh.
      UserCodeError: where the user's code raises something else while it is loaded or traced.
    """
    mesh = mesh_axes(options.mesh) if options.mesh is not None else None
    _simulate(options.devices or max(SIMULATED, math.prod((mesh or {}).values())), options.devices)
    given = None if options.args is None else arguments(options.args)
    try:
        found = _found(options.target)
        function, args, kwargs = _call(found, given, options.target)
    except FaultInProgram as fault:
        return Report(program=None, diagnostics=fault.diagnostics, title=options.target)
    axes = None if mesh is None else AbstractMesh(tuple(mesh.values()), tuple(mesh))
    if options.shard_map:
        if axes is None:
            raise SbpError(
                "--shard-map needs the mesh of the program, such as --mesh data=2,model=4",
                code="unknown-option",
            )
        return _run(lambda: check_shard_map(function, *args, mesh=axes, **kwargs))
    jitted = _jitted(function, axes, options)
    return _run(lambda: jitted.check(*args, **kwargs))


def _simulate(count: int, asked: int | None) -> None:
    """Have JAX simulate devices on the processor; programs that are checked send nothing to them.
    Where the user asks for simulated devices, other kinds of devices are not used."""
    if asked is not None:
        jax.config.update("jax_platforms", "cpu")
    simulate_devices(count)


def _loading(action: Callable[[], Any]) -> Any:
    """What an action returns that runs the user's code before it is traced.

    Raises:
      FaultInProgram: where it raises an error of sbp.
      SbpError: `mesh-devices` where the file makes a mesh of more devices than there are.
      UserCodeError: where it raises anything else.
    """
    try:
        return _run(action, loading=True)
    except SbpError as error:
        if error.code == "mesh-devices":
            raise
        raise FaultInProgram(diagnostics_of(error)) from error


def _run(action: Callable[[], Any], *, loading: bool = False) -> Any:
    """What an action returns that runs the user's code.

    Raises:
      SbpError: where it raises one.
      UserCodeError: where it raises anything else.
    """
    try:
        return action()
    except SbpError:
        raise
    except (Exception, SystemExit) as error:  # any exception may come from the user's code
        raise UserCodeError(loading=loading) from error


# ---- finding the function -----------------------------------------------------------------------


def _found(target: str) -> Any:
    """The object that FILE:FUNCTION names.

    Raises:
      SbpError: `unknown-option` where the file or the name does not exist.
    """
    place, _, path = target.partition(":")
    if not path:
        raise SbpError(f"{target} names no function; write {place}:FUNCTION", code="unknown-option")
    if place.endswith(".py"):
        if not Path(place).is_file():
            raise SbpError(f"no file {place}{_near_file(place)}", code="unknown-option")
        found: Any = _loading(lambda: _loaded(Path(place)))
    else:
        sys.path.insert(0, str(Path.cwd()))
        try:
            found = _loading(lambda: importlib.import_module(place))
        except UserCodeError as error:
            missing = error.__cause__
            if isinstance(missing, ModuleNotFoundError) and place.startswith(f"{missing.name}"):
                raise SbpError(
                    f"no module {place}; a file is named with its ending, such as model.py:step",
                    code="unknown-option",
                ) from None
            raise
    for name in path.split("."):
        if not hasattr(found, name):
            names = [n for n in dir(found) if callable(getattr(found, n)) and n[0] != "_"]
            raise SbpError(f"{place} has no {path!r}{nearest(name, names)}", code="unknown-option")
        found = getattr(found, name)
    return found


def _near_file(place: str) -> str:
    """The nearest file of the same folder, in words."""
    folder = Path(place).parent
    names = [str(folder / p.name) for p in folder.glob("*.py")] if folder.is_dir() else []
    return nearest(place, names)


def _loaded(file: Path) -> ModuleType:
    """The module of a file, imported as the part of its package where it lies in one."""
    file = file.resolve()
    root, names = file.parent, [file.stem]
    while (root / "__init__.py").is_file():
        names.insert(0, root.name)
        root = root.parent
    sys.path.insert(0, str(root))
    if len(names) > 1:
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
    if isinstance(found, tuple):
        made = _program(found)
        if made is not None and given is None:
            return made
    if not callable(found):
        raise SbpError(
            f"{target} is {type(found).__name__}, not a function; name a function, or an sbp.jit"
            " function",
            code="unknown-option",
        )
    if given is not None:
        return (found, *given)
    needed = _needed(found)
    if needed:
        raise SbpError(
            f"{target} takes {', '.join(needed)}; give their shapes, such as --args"
            f' "{", ".join(["float32[8,16]"] * len(needed))}", or name a function without'
            " arguments that returns (function, arguments)",
            code="unknown-option",
        )
    if not isinstance(found, Jitted):
        made = _program(_loading(found))
        if made is not None:
            return made
    return found, (), {}


def _program(value: Any) -> _Call | None:
    """(function, arguments) or (function, arguments, keyword arguments); None for other values."""
    match value:
        case (fn, tuple() | list() as args) if callable(fn):
            return fn, args, {}
        case (fn, tuple() | list() as args, dict() as kwargs) if callable(fn):
            return fn, args, kwargs
        case _:
            return None


def _needed(function: Callable[..., Any]) -> list[str]:
    """The parameters that have no default."""
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):  # some built-in functions have none
        return []
    variable = inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD
    return [
        p.name
        for p in parameters
        if p.default is inspect.Parameter.empty and p.kind not in variable
    ]


def _jitted(
    function: Callable[..., Any], axes: AbstractMesh | None, options: ProgramOptions
) -> Any:
    """The function under `sbp.jit`, with the mesh and the hardware of the command line.

    Raises:
      SbpError: `unknown-option` where no mesh is given.
    """
    if isinstance(function, Jitted):
        if axes is None and options.hardware is None:
            return function
        chosen = function.options
        if options.hardware is not None:
            chosen = dataclasses.replace(chosen, hardware=options.hardware)
        return Jitted(
            inspect.unwrap(function, stop=lambda f: not isinstance(f, Jitted)),
            axes or function.mesh,
            chosen,
        )
    if isinstance(function, JittedMethod):
        if axes is not None or options.hardware is not None:
            raise SbpError(
                f"{options.target} is a method, which keeps the mesh and the hardware of its"
                " sbp.jit; leave out --mesh and --hardware, or name a function",
                code="unknown-option",
            )
        return function
    if axes is None and context_mesh() is None:
        raise SbpError(
            f"{options.target} is a plain function and has no mesh; give one, such as --mesh"
            " data=2,model=4, or name an sbp.jit function",
            code="unknown-option",
        )
    return jit(function, axes, hardware=options.hardware)
