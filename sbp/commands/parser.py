"""The command line of `sbp`, and the script that completes it in a shell."""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from typing import Any

import shtab

from sbp.errors import CODES
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
        more = (parents or {}).get(command, ())
        part = commands.add_parser(
            command, help=summary, parents=more, conflict_handler="resolve", **about
        )
        for name, properties in _OPTIONS.get(command, {}).items():
            option = part.add_argument(name, **properties)
            vars(option).update((replaced or {}).get((command, name), {}))
    return parser


def completion_script(shell: str, parents: Mapping[str, Sequence[argparse.ArgumentParser]]) -> str:
    """The script of a shell.

    Arguments:
      shell: one of `SHELLS`.
      parents: by command, parsers whose options it takes too.
    """
    # Helps of these are too long for a shell.
    file = {"complete": shtab.FILE, "help": None, "metavar": None}
    concepts = [word for word in CONCEPT_WORDS if " " not in word]
    names = {"explain": [*CODES, *concepts], "signatures": sorted(known_primitives())}
    replaced: dict[tuple[str, str], Any] = {
        (command, "name"): {"choices": choices, "help": None, "metavar": None}
        for command, choices in names.items()
    }
    replaced |= {("check", "target"): file, ("report", "target"): file}
    for action in (a for parsers in parents.values() for p in parsers for a in p._actions):
        if action.dest in _PATHS:
            vars(action)["complete"] = _PATHS[action.dest]
    return shtab.complete(command_parser("", replaced, parents), shell=shell)


_PATHS: Mapping[str, Any] = {
    **dict.fromkeys(["config", "data", "eval_data", "file", "file_of"], shtab.FILE),
    **dict.fromkeys(["workdir", "figures", "against"], shtab.DIRECTORY),
}
"""Options of training and translation that take a path."""
