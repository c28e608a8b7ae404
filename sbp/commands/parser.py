"""The command line of `sbp`, what the texts of its options stand for, and the script that completes
it in a shell."""

import argparse
import ast
import functools
import inspect
import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import shtab
from jax.export import SymbolicScope, symbolic_shape

from sbp.errors import CODES, SbpError, nearest
from sbp.kinds import AXIS_NAMES, can_name
from sbp.report.concepts import CONCEPT_WORDS
from sbp.signatures import known_primitives

COMMANDS: Mapping[str, str] = {
    "explain": "what a code or a word of reports means: no-signature, P, boxing, ZeRO",
    "signatures": "the rows of a primitive, or of a function such as softmax",
    "hardware": "the device kinds that costs can be counted on, with their figures",
    "train": "in a checkout: train the GShard MoE Transformer",
    "check": "check FILE:FUNCTION; in a checkout also whether sbp train would begin",
    "report": "the full report on FILE:FUNCTION",
    "curves": "in a checkout: draw the curves of a training run as an HTML page",
    "export": "in a checkout: a trained model as one safetensors file",
    "plan": "in a checkout: types and price of a training step, without training it",
    "translate": "in a checkout: translate text with a trained model",
    "evaluate": "in a checkout: score a trained model on a test set",
    "completion": "a script that completes commands in bash, zsh or fish",
}
"""All commands, each with its line of help."""

SHELLS = ("bash", "zsh", "fish")
"""Shells that scripts are made for."""

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
        "help": "count costs on this hardware (sbp hardware lists it)",
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
        "--source": {
            "action": "store_true",
            "help": "the source, each line with its types and bytes",
        },
        "--html": {"metavar": "FILE", "help": "write the report to this file as HTML"},
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
    "completion": {"shell": {"choices": SHELLS}},
}
"""The options of a command; those of a training run are in its own `--help`."""

_STATUSES = (
    "Exit status: 0 where the program has no error, 1 where it has one, 2 where it could not be"
    " checked."
)
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
}
"""What the `--help` of a command says around its options."""


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
    parser = argparse.ArgumentParser(prog="sbp", description="A distributed type system for JAX.")
    parser.add_argument("--version", action="version", version=f"sbp {version}")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND")
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


def completion_script(shell: str, parents: Mapping[str, Sequence[argparse.ArgumentParser]]) -> str:
    """The script of a shell.

    Arguments:
      shell: one of `SHELLS`.
      parents: by command, parsers whose options it takes too.
    """
    # Helps of these are too long for a shell.
    file = {"complete": shtab.FILE, "help": None, "metavar": None}
    names = {
        "explain": [*CODES, *(word for word in CONCEPT_WORDS if " " not in word)],
        "signatures": sorted(known_primitives()),
    }
    replaced: dict[tuple[str, str], Any] = {
        **{
            (command, "name"): {"choices": choices, "help": None, "metavar": None}
            for command, choices in names.items()
        },
        **dict.fromkeys([("check", "target"), ("report", "target")], file),
    }
    for action in (a for parsers in parents.values() for p in parsers for a in p._actions):
        if action.dest in _PATHS:
            vars(action)["complete"] = _PATHS[action.dest]
    return shtab.complete(command_parser("", replaced, parents), shell=shell)


_PATHS: Mapping[str, Any] = {
    **dict.fromkeys(["config", "data", "eval_data", "file", "file_of"], shtab.FILE),
    **dict.fromkeys(["workdir", "figures", "against"], shtab.DIRECTORY),
}
"""Options of training and translation that take a path."""


# ---- values -------------------------------------------------------------------------------------
# What the text of an option stands for: `--args 'float32[8,16], {"w": f32[16,32]}, training=True'`,
# and `--mesh data=2,model=4`.


FORM = "float32[8,16], int32[8]"
"""The form that errors quote."""

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
        raise _refused(text, "is not of the form") from None
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
    return SbpError(f"--args {text!r} {why} {FORM!r}", code="unknown-option")


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
    try:
        shape = symbolic_shape(given, scope=scope)
    except ValueError:
        raise _refused(text, f"has the sizes [{given}]; it is not of the form") from None
    if any(isinstance(size, int) and size < 0 for size in shape):
        raise _refused(text, f"has the sizes [{given}]; it is not of the form")
    return tuple(shape)


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
        raise SbpError(
            f"--args: no dtype {name!r}{nearest(name, _NAMES)}", code="unknown-option"
        ) from None


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
        if not can_name(name) or not size.isdecimal() or int(size) < 1 or name in axes:
            raise SbpError(
                f"--mesh {text!r} is not of the form data=2,model=4; {AXIS_NAMES}",
                code="unknown-option",
            )
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
