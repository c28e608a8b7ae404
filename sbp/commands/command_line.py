"""The command line of `sbp`: its options, what their texts stand for, and the commands
`sbp check FILE:FUNCTION` and `sbp report FILE:FUNCTION`."""

import argparse
import ast
import contextlib
import dataclasses
import functools
import importlib.util
import inspect
import itertools
import json
import math
import os
import sys
import sysconfig
import traceback
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any, NoReturn

import jax
import jax.numpy as jnp
from jax.export import SymbolicScope, symbolic_shape
from jax.sharding import AbstractMesh
from rich.console import Console

import sbp
from sbp._jax import context_mesh
from sbp.api.jit import Jitted, JittedMethod, check_shard_map, jit
from sbp.api.symbolic import SizedReport
from sbp.errors import SbpError, bytes_text, counted, nearest, seconds_text, short_words
from sbp.kinds import AXIS_NAMES, can_name, is_whole
from sbp.moe.sharding import simulate_devices
from sbp.plan.saved import write_file
from sbp.report.pages import diagnostics_of, refusal
from sbp.report.parts import Facts, Page
from sbp.report.report import Report, Shown
from sbp.source.reader import in_library

COMMANDS: Mapping[str, str] = {
    "explain": "what a code or a word of reports means: no-signature, P, boxing, ZeRO",
    "signatures": "the rows of a primitive, or of a function such as softmax",
    "hardware": "the device kinds that costs can be counted on, with their figures",
    "calibrate": "measure products, memory and collectives on the devices at hand",
    "train": "in a checkout: train the GShard MoE Transformer",
    "check": "check FILE:FUNCTION; in a checkout also whether sbp train would begin",
    "report": "the full report on FILE:FUNCTION",
    "emit": "write the plan of FILE:FUNCTION as a Python file that needs JAX alone",
    "curves": "in a checkout: draw the curves of a training run as an HTML page",
    "export": "in a checkout: a trained model as one safetensors file",
    "plan": "in a checkout: types and price of a training step, without training it",
    "translate": "in a checkout: translate text with a trained model",
    "evaluate": "in a checkout: score a trained model on a test set",
    "completion": "a script that completes commands in bash, zsh or fish",
}
"""All commands, each with its line of help."""

_PROGRAM: Mapping[str, Mapping[str, Any]] = {
    "target": {
        "metavar": "TARGET",
        "help": "FILE:FUNCTION or MODULE:FUNCTION. The function is an sbp.jit function, a plain"
        " function (with --mesh), or a function without arguments that returns (function,"
        " arguments)",
    },
    "--args": {
        "metavar": "SHAPES",
        "help": "the arguments, such as \"float32[8,16], {'w': f32[16,32]}, training=True\"",
    },
    "--mesh": {
        "metavar": "AXES",
        "help": "mesh axes, outer first, such as data=2,model=4",
    },
    "--hardware": {
        "metavar": "NAME",
        "help": "count costs on this hardware: of sbp hardware, or a .toml of sbp calibrate",
    },
    "--devices": {
        "metavar": "N",
        "type": int,
        "help": "simulate N devices, for a file that makes a mesh of devices itself",
    },
    "--shard-map": {
        "action": "store_true",
        "help": "check the collectives of a program that is written with jax.shard_map",
    },
    "--against": {
        "metavar": "TARGET",
        "help": "compare a program that is written with jax.shard_map with this plain function",
    },
    "--json": {"action": "store_true", "help": "print JSON"},
}
"""The options that name a program."""

_OPTIONS: Mapping[str, Mapping[str, Mapping[str, Any]]] = {
    "explain": {
        "name": {
            "metavar": "NAME",
            "nargs": "*",
            "help": "a code such as no-signature, or a concept such as P, boxing or mesh axis; all"
            " of them when left out",
        }
    },
    "check": _PROGRAM,
    "report": {
        **_PROGRAM,
        "--short": {"action": "store_true", "help": "the short report"},
        "--source": {"action": "store_true", "help": "the source, each line with types and bytes"},
        "--html": {"metavar": "FILE", "help": "write the report to this file as HTML"},
    },
    "emit": {
        **{k: v for k, v in _PROGRAM.items() if k not in ("--shard-map", "--against", "--json")},
        "-o": {"dest": "output", "metavar": "FILE", "required": True, "help": "the file to write"},
        "--force": {"action": "store_true", "help": "replace the file if it exists"},
    },
    "signatures": {
        "name": {
            "metavar": "NAME",
            "nargs": "?",
            "help": "a primitive such as dot_general, or a function of JAX such as softmax or"
            " jnp.linalg.norm, which is traced; all primitives when left out",
        },
        "--args": {
            "metavar": "SHAPES",
            "help": "the arguments that a function is traced with, such as \"'ij,jk->ik',"
            ' f32[8,16], f32[16,32]"',
        },
        "--json": {"action": "store_true", "help": "print JSON"},
    },
    "calibrate": {
        "--mesh": _PROGRAM["--mesh"],
        "-o": {
            "dest": "output",
            "metavar": "FILE",
            "required": True,
            "help": "the file to write, NAME.toml",
        },
        "--devices": {"metavar": "N", "type": int, "help": "simulate N devices"},
        "--force": {"action": "store_true", "help": "replace the file if it exists"},
    },
    "completion": {"shell": {"choices": ("bash", "zsh", "fish")}},
}
"""The options of a command; those of a training run are in its own `--help`."""

_STATUSES = "Exit status: 0 for no error, 1 for an error, 2 if sbp could not check the program."
_ABOUT: Mapping[str, Mapping[str, Any]] = {
    "check": {
        "description": "Check the types of a program. Nothing of it runs, and no device is needed.",
        "epilog": f"{_STATUSES} Without FILE:FUNCTION, `sbp check` takes the options of `sbp train`"
        " and tells whether that run would begin.",
    },
    "report": {
        "description": "Show the full report on a program: types, collectives, bytes, memory,"
        " time.",
        "epilog": _STATUSES,
    },
    "signatures": {
        "description": "Show which types of operands give which types of results, on one mesh axis."
    },
    "calibrate": {
        "description": "Measure products, memory and collectives on the devices at hand, and write"
        " a file that hardware= and --hardware take. It takes up to five minutes."
    },
}
"""What the `--help` of a command says around its options."""


class Parser(argparse.ArgumentParser):
    """A parser whose errors repeat no long words."""

    def error(self, message: str) -> NoReturn:
        super().error(short_words(message))


def command_parser(
    version: str,
    replaced: Mapping[tuple[str, str], Mapping[str, Any]] | None = None,
    parents: Mapping[str, Sequence[argparse.ArgumentParser]] | None = None,
) -> argparse.ArgumentParser:
    """The parser of all commands.

    Arguments:
      version: what `sbp --version` prints.
      replaced: by command and option, other properties of an option.
      parents: by command, parsers whose options it takes too.
    """
    parser = Parser(prog="sbp", description="A distributed type system for JAX.")
    parser.add_argument("--version", action="version", version=f"sbp {version}")
    commands: Any = parser.add_subparsers(dest="command", metavar="COMMAND")
    for command, summary in COMMANDS.items():
        about = {} if replaced else _ABOUT.get(command, {})  # shells show the line of help
        part = commands.add_parser(
            command,
            help=summary,
            parents=(parents or {}).get(command, ()),
            conflict_handler="resolve",
            **about,
        )
        for name, properties in _OPTIONS.get(command, {}).items():
            replacing = (replaced or {}).get((command, name), {})
            vars(part.add_argument(name, **properties)).update(replacing)
    return parser


# ---- values -------------------------------------------------------------------------------------
# What the text of an option stands for: `--args 'float32[8,16], {"w": f32[16,32]}, training=True'`,
# and `--mesh data=2,model=4`.


_SHORT = {"key": "key", "bool": "bool_", "bf16": "bfloat16"} | {
    f"{letter}{bits}": f"{name}{bits}"
    for letter, name, widths in (
        ("f", "float", (16, 32, 64)),
        ("i", "int", (4, 8, 16, 32, 64)),
        ("u", "uint", (4, 8, 16, 32, 64)),
        ("c", "complex", (64, 128)),
    )
    for bits in widths
}
"""Short names of dtypes, as a jaxpr prints them."""

_NAMES = (*_SHORT, *_SHORT.values(), "bool_", "float8_e4m3fn", "float8_e5m2")


def arguments(text: str) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments of a call, from text in Python's syntax.

    An array is a dtype with its sizes in brackets; a name in place of a size is a symbolic size.
    Tuples, lists and dicts nest. Numbers, strings, True, False and None stand for themselves.

    Arguments:
      text: the arguments, separated by commas.

    Returns:
      Positional arguments and keyword arguments; arrays are `jax.ShapeDtypeStruct`s.

    Raises:
      SbpError: `unknown-option` for a text of another form.

    >>> arguments("f32[8,16], {'w': bf16[]}, training=True")[1]
    {'training': True}
    """
    try:
        call = ast.parse(f"f({_scalars(text)}\n)", mode="eval").body
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        comma = any(rest.lstrip()[:1].isalpha() for rest in text.split("]")[1:])
        raise _refused(text, "lacks a comma, and " * comma + "is not of the form") from None
    if not isinstance(call, ast.Call) or not isinstance(call.func, ast.Name):
        raise _refused(text, "is not of the form")
    scope = SymbolicScope()  # the symbolic sizes of a call are related
    named = {k.arg: _value(k.value, text, scope) for k in call.keywords if k.arg is not None}
    if len(named) != len(call.keywords):
        raise _refused(text, "names an argument twice, or unpacks one; it is not of the form")
    return tuple(_value(part, text, scope) for part in call.args), named


def _scalars(text: str) -> str:
    """The text with `f32[]` written as `f32[()]`, which Python parses."""
    parts = text.split("[]")
    return parts[0] + "".join(
        ("[()]" if before[-1:].isalnum() else "[]") + after
        for before, after in itertools.pairwise(parts)
    )


def _refused(text: str, why: str) -> SbpError:
    return UsageError(f"--args {text!r} {why} 'float32[8,16], int32[8]'")


def _value(part: ast.expr, text: str, scope: SymbolicScope) -> Any:
    """What a syntax tree of the text stands for."""
    read = functools.partial(_value, text=text, scope=scope)
    match part:
        case ast.Constant(value=value):
            return value
        case ast.UnaryOp(op=ast.USub(), operand=ast.Constant(value=int() | float() as value)):
            return -value
        case ast.Tuple(elts=elements):
            return tuple(map(read, elements))
        case ast.List(elts=elements):
            return list(map(read, elements))
        case ast.Dict(keys=keys, values=values) if all(map(_is_key, keys)):
            return {read(k): read(v) for k, v in zip(keys, values, strict=True) if k is not None}
        case ast.Name(id=name):
            return _array(name, ())
        case ast.Subscript(value=ast.Name(id=name), slice=size):
            sizes = size.elts if isinstance(size, ast.Tuple) else [size]
            return _array(name, _shape(sizes, text, scope))
        case _:
            raise _refused(text, f"has {ast.unparse(part)!r}; it is not of the form")


def _is_key(part: ast.expr | None) -> bool:
    """Whether a syntax tree stands for a key of a dict: numbers, texts, and tuples of them."""
    if isinstance(part, ast.Tuple):
        return all(map(_is_key, part.elts))
    return isinstance(part, ast.Constant | ast.UnaryOp)


def _shape(sizes: Sequence[ast.expr], text: str, scope: SymbolicScope) -> tuple[Any, ...]:
    given = ", ".join(map(ast.unparse, sizes))
    whole = all(is_whole(s.value) for s in sizes if isinstance(s, ast.Constant))
    with contextlib.suppress(ValueError):
        shape = symbolic_shape(given, scope=scope)
        if whole and not any(isinstance(size, int) and size < 0 for size in shape):
            return tuple(shape)
    raise _refused(text, f"has the sizes [{given}]; it is not of the form")


def _array(name: str, shape: tuple[Any, ...]) -> Any:
    """An array by its dtype and shape; `key` is a random key.

    Raises:
      SbpError: `unknown-option` for another dtype, with the nearest name.
    """
    full = _SHORT.get(name, name)
    if full == "key":
        return jax.ShapeDtypeStruct(shape, jax.eval_shape(jax.random.key, 0).dtype)
    try:
        return jax.ShapeDtypeStruct(shape, jnp.dtype(getattr(jnp, full)))
    except (AttributeError, TypeError):
        meant = name
        with contextlib.suppress(TypeError):  # `float` is float64 to NumPy, and float32 to JAX
            meant = jax.dtypes.canonicalize_dtype(jnp.dtype(name).name).name
        raise UsageError(f"--args: no dtype {name!r}{nearest(meant, _NAMES)}") from None


def mesh_axes(text: str) -> Mapping[str, int]:
    """The axes of a mesh, outer first, from `data=2,model=4`.

    Raises:
      SbpError: `unknown-option` for a text of another form.

    >>> mesh_axes("data=2,model=4")
    {'data': 2, 'model': 4}
    """
    axes: dict[str, int] = {}
    for part in text.split(","):
        name, _, size = (word.strip() for word in part.partition("="))
        if can_name(name) and size and not (size.isdecimal() and int(size)):
            raise UsageError(
                f"--mesh {text!r}: the size of {name!r} must be a whole number of 1 or more, got"
                f" {size!r}"
            )
        if not can_name(name) or not size or name in axes:
            raise UsageError(f"--mesh {text!r} is not of the form data=2,model=4; {AXIS_NAMES}")
        axes[name] = int(size)
    return axes


def required_parameters(function: Callable[..., Any]) -> list[str]:
    """The parameters that have no default."""
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):  # some built-in functions have none
        return []
    return [
        p.name
        for p in parameters
        if p.default is p.empty and p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)
    ]


# ---- check and report ---------------------------------------------------------------------------


def show_program(given: argparse.Namespace) -> int:
    """`sbp check`: the findings, and what a program costs; `sbp report`: the full report.

    Arguments:
      given: the options of the command.

    Returns:
      The exit status: 0 without an error, 1 with one, 2 where the program could not be checked.

    Raises:
      SbpError: `unknown-option` for wrong options; `bad-argument` if a file cannot be written.
    """
    written = Path(getattr(given, "output", "x") or "x")
    exists = next(filter(os.path.exists, (written, written.with_suffix(".npz"))), None)
    views = [f"--{v}" for v in ("json", "html", "short", "source") if getattr(given, v, None)]
    files = getattr(given, "html", None), getattr(given, "output", None)
    checks = {
        f"{exists} exists; name another file, or replace it with --force": (
            given.command == "emit" and exists is not None and not given.force
        ),
        f"{' and '.join(views)} print one report in several ways; give one of them": (
            len(views) > 1 and views != ["--html", "--short"]
        ),
        "--html and -o need the name of a file": "" in files,
    }
    if wrong := [text for text, is_wrong in checks.items() if is_wrong]:
        raise UsageError(wrong[0])
    progress = Console(stderr=True)
    shown = progress.status(f"sbp {given.command} {given.target}")
    try:
        # Elsewhere, rich would print what the file prints to standard error.
        with shown if progress.is_terminal and sys.stdout.isatty() else contextlib.nullcontext():
            report = _check(given)
    except UserCodeError as error:
        _show_users_error(error, given.target)
        return 2
    if isinstance(report, str):
        arrays = f" and {written.with_suffix('.npz')}" if "ARRAYS = " in report else ""
        print(f"wrote {given.output}{arrays}: {counted(report.count(chr(10)), 'line')}")
        return 0
    page = _page(report, given)
    if getattr(given, "json", None):
        print(json.dumps(report.to_json(), indent=2, ensure_ascii=False))
    elif getattr(given, "html", None):
        write_file(given.html, page.html(standalone=True))
        print(f"wrote {given.html}")
    else:
        Console(highlight=False).print(page, soft_wrap=True)
    wrong_call = any(d.code == "bad-argument" and not d.labels for d in report.diagnostics)
    return 0 if report.ok else 2 if wrong_call and report.program is None else 1


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
    sizes = (report.of_sizes,) if isinstance(report, SizedReport) else ()
    how = " (assumed; --hardware names another)" if mesh.is_assumed else mesh.measured
    pairs = (
        ("mesh", f"{mesh}"),
        ("sent per call", f"{bytes_text(cost.bytes_per_device)} per device"),
        ("peak memory", f"{bytes_text(round(cost.peak_memory_bytes))} per device"),
        ("modelled time", f"{seconds_text(cost.seconds)} on {mesh.hardware.name}{how}"),
    )
    return Page(parts=(*parts, *sizes, Facts(pairs=pairs)))


def _show_users_error(error: "UserCodeError", target: str) -> None:
    """Prints what the user's code raised, from the user's first line on."""
    cause = error.__cause__
    assert cause is not None  # `raise .. from`
    ours = f"{Path(sbp.__file__).parent}{os.sep}", sysconfig.get_path("stdlib"), "<"
    frames = itertools.dropwhile(
        lambda f: f.filename.startswith(ours) or in_library(f.filename),
        traceback.extract_tb(cause.__traceback__),
    )
    name = type(cause).__name__
    said = (
        "".join(traceback.format_exception_only(cause))  # with the line
        if isinstance(cause, SyntaxError)
        else f"{name}: {cause}\n"
    )
    print(
        f"{''.join(traceback.format_list([*frames]))}{said}sbp could not check"
        f" {target}: its code raised {name}.{error}",
        file=sys.stderr,
    )


# ---- the program --------------------------------------------------------------------------------


SIMULATED = 8
"""Simulated devices where nothing says how many."""


class UsageError(SbpError):
    """The words of the command line name no program that can be checked."""

    def __init__(self, title: str) -> None:
        super().__init__(title, code="unknown-option")


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


def _check(given: argparse.Namespace) -> Report | str:
    """The report on the program that the options name; for `sbp emit`, the source of its plan.

    Raises:
      SbpError: `unknown-option` where there is no such program, or it lacks arguments or a mesh.
      UserCodeError: where the user's code raises something else while it is loaded or traced.
    """
    mesh = mesh_axes(given.mesh) if given.mesh is not None else {}
    if given.devices is not None:  # other kinds of devices are not used
        if given.devices < 1:
            raise UsageError(f"--devices must be at least 1, got {given.devices}")
        jax.config.update("jax_platforms", "cpu")
    # Programs that are checked send nothing to simulated devices.
    least = max(SIMULATED, math.prod(mesh.values()))
    simulate_devices(given.devices or least, replaces=given.devices is not None)
    values = None if given.args is None else arguments(given.args)
    try:
        function, args, kwargs = _call(_find(given.target), values, given.target)
    except SbpError as error:
        if isinstance(error, UsageError) or error.code == "mesh-devices":
            raise
        return Report(program=None, diagnostics=diagnostics_of(error), title=given.target)
    axes = AbstractMesh(tuple(mesh.values()), tuple(mesh)) if mesh else None
    if given.command != "emit" and (given.shard_map or given.against):
        if axes is None:
            raise UsageError("checking a shard_map needs its mesh, such as --mesh data=2,model=4")
        plain = _find(given.against) if given.against else None
        return _run(
            lambda: check_shard_map(function, *args, mesh=axes, against=plain, **kwargs), ""
        )
    jitted = _jit(function, axes, given)
    if given.command == "emit":
        try:
            return _run(lambda: jitted.plan(*args, **kwargs).source(given.output), "")
        except SbpError as error:
            return Report(program=None, diagnostics=diagnostics_of(error), title=given.target)
    return _run(lambda: jitted.check(*args, **kwargs), "")


def _run(action: Callable[[], Any], hint: str = " If it needs more devices: --devices N") -> Any:
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
        if "in_specs passed to shard_map" in str(error):
            hint = (
                " --args gives no shardings, which Explicit axes need. Name a function without"
                " arguments that returns (function, arguments), these as jax.ShapeDtypeStruct with"
                " sharding="
            )
        elif isinstance(error, SyntaxError) or "device" not in str(error):
            hint = ""
        raise UserCodeError(hint) from error


# ---- finding the function -----------------------------------------------------------------------


def _find(target: str) -> Any:
    """The object that FILE:FUNCTION names.

    Raises:
      SbpError: `unknown-option` where the file or the name does not exist.
    """
    place, _, path = target.partition(":")
    if not path:
        raise UsageError(f"{target} names no function; write {place}:FUNCTION")
    if not is_target(target):
        raise UsageError(f"{place!r} is neither a file with its ending, .py, nor a module")
    if place.endswith(".py"):
        if not os.path.isfile(place):
            files = [str(Path(place).parent / p.name) for p in Path(place).parent.glob("*.py")]
            raise UsageError(f"there is no file {place}{nearest(place, files)}")
        found: Any = _run(lambda: _load(Path(place)))
    else:
        sys.path.insert(0, str(Path.cwd()))
        try:
            found = _run(lambda: importlib.import_module(place))
        except UserCodeError as error:
            missing = error.__cause__
            if isinstance(missing, ModuleNotFoundError) and f"{place}.".startswith(
                f"{missing.name}."
            ):
                raise UsageError(
                    f"there is no module {place}; name a file with its ending, as in model.py:step"
                ) from None
            raise
    for name in path.split("."):
        if not hasattr(found, name):
            names = [n for n in dir(found) if callable(getattr(found, n)) and n[0] != "_"]
            raise UsageError(f"{place} has no {path!r}{nearest(name, names)}")
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
            " function"
        )
    if given is not None:
        return (found, *given)
    if needed := required_parameters(found):
        raise UsageError(
            f"{target} takes {', '.join(needed)}; give their shapes, such as --args"
            f' "{", ".join(["float32[8,16]"] * len(needed))}", or name a function without'
            " arguments that returns (function, arguments)"
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
            raise UsageError(
                f"{given.target} is a method, which keeps the mesh and the hardware of its"
                " sbp.jit; leave out --mesh and --hardware, or name a function"
            )
        return function
    if axes is None and context_mesh() is None:
        without = ". If it returns (function, arguments), leave out --args"
        raise UsageError(
            f"{given.target} is a plain function and has no mesh; give one, such as --mesh"
            " data=2,model=4, or name an sbp.jit function" + without * (given.args is not None)
        )
    return jit(function, axes, hardware=given.hardware)
