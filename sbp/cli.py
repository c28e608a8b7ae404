"""The command line: `sbp explain CODE`, `sbp signatures [PRIMITIVE]`, `sbp hardware`,
`sbp calibrate`, `sbp train`, `sbp check`, `sbp curves`, `sbp export`, `sbp plan`, `sbp translate`,
`sbp evaluate`, `sbp --version`."""

import argparse
import importlib
import shlex
import signal
import sys
import textwrap
from collections.abc import Callable, Mapping, Sequence
from difflib import get_close_matches
from pathlib import Path
from typing import Any

import shtab
from rich.console import Console

from sbp.commands.calibrate import calibrate
from sbp.commands.command_line import (
    COMMANDS,
    command_parser,
    is_target,
    show_program,
)
from sbp.commands.signatures import show_signatures
from sbp.errors import CODES, SbpError, nearest
from sbp.kinds import Kind, takes
from sbp.report.codes import PAGES, PRELUDE
from sbp.report.concepts import CONCEPT_WORDS, CONCEPTS, concept_named
from sbp.report.pages import hardware_page
from sbp.report.parts import Page, plain
from sbp.report.report import Shown
from sbp.signatures import known_primitives
from sbp.source.reader import shorten
from sbp.version import VERSION

_PROGRAMS: Mapping[str, tuple[str, str]] = {
    "train": ("examples.gshard.train", "main"),
    "check": ("examples.gshard.check", "main"),
    "curves": ("examples.gshard.curves", "main"),
    "export": ("examples.gshard.export", "main"),
    "plan": ("benchmarks.gshard.costs", "main"),
    "translate": ("examples.gshard.commands", "translate"),
    "evaluate": ("examples.gshard.commands", "evaluate_run"),
}
"""Commands with a command line of their own, a module and its function, imported when asked for.
They are only in a checkout, and need the `gshard` extra. `sbp check` is also a command for
FILE:FUNCTION."""

_TRAIN_OPTIONS = ("examples.gshard.options", "train_parser")
_PARSERS: Mapping[str, Sequence[tuple[str, str]]] = {
    "train": (_TRAIN_OPTIONS,),
    "check": (_TRAIN_OPTIONS,),
    "plan": (_TRAIN_OPTIONS, ("benchmarks.gshard.costs", "plan_parser")),
    "translate": (("examples.gshard.commands", "translate_parser"),),
    "evaluate": (("examples.gshard.commands", "evaluate_parser"),),
}
"""Functions that make the parsers of these commands, for completion."""

_CHECKOUT = Path(__file__).parents[1]


@takes(
    "sbp.cli.main",
    argv=Kind(
        "a list of strings, or None for the arguments of the process",
        lambda x: x is None or (isinstance(x, list | tuple) and all(isinstance(w, str) for w in x)),
    ),
)
def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command line.

    Arguments:
      argv: the arguments; None takes those of the process.

    Returns:
      The exit status: 0; 1 for a program with an error; 2 when the arguments do not fit; 130 when
      Ctrl-C ended it.
    """
    words = list(sys.argv[1:] if argv is None else argv)
    try:
        name, rest = (words[0], words[1:]) if words else ("", [])
        about_program = rest in (["--help"], ["-h"]) or any(map(is_target, rest))
        if name in _PROGRAMS and not (name == "check" and about_program):
            if name in ("train", "plan") and any(map(is_target, rest)):
                raise SbpError(
                    f"sbp {name} takes options of the MoE Transformer, and no program of yours; use"
                    f" sbp report {shlex.join(rest)}",
                    code="unknown-option",
                )
            return _load(name, *_PROGRAMS[name])(rest)
        if name and not name.startswith("-") and name not in COMMANDS:
            raise SbpError(f"no command {name!r}{nearest(name, COMMANDS)}", code="unknown-option")
        parser = command_parser(VERSION)
        given = parser.parse_args(words)
        console = Console(highlight=False)
        match given.command:
            case "check" | "report" | "emit":
                return show_program(given)
            case "explain":
                _explain(console, " ".join(given.name))
            case "signatures":
                show_signatures(given)
            case "calibrate":
                calibrate(given)
            case "completion":
                print(_completion(given.shell))
            case "hardware":
                console.print(Shown(page=hardware_page()))
            case _:
                parser.print_help()
    except SbpError as error:
        print(f"error[{error.code}]: {error.message}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 128 + signal.SIGINT
    except SystemExit as stop:  # argparse has said why
        return int(stop.code or 0)
    except BrokenPipeError:  # the reader has seen enough
        sys.stderr.close()
    return 0


def _completion(shell: str) -> str:
    """The script that completes commands in a shell."""
    parents, hidden = _parsers(), {"help": None, "metavar": None}  # too long for a shell
    replaced: dict[tuple[str, str], Any] = {
        ("explain", "name"): {
            "choices": [*CODES, *(word for word in CONCEPT_WORDS if " " not in word)],
            **hidden,
        },
        ("signatures", "name"): {"choices": sorted(known_primitives()), **hidden},
        ("check", "target"): {"complete": shtab.FILE, **hidden},
        ("report", "target"): {"complete": shtab.FILE, **hidden},
        ("emit", "target"): {"complete": shtab.FILE, **hidden},
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


def _parsers() -> dict[str, list[argparse.ArgumentParser]]:
    """The parsers of commands that have a command line of their own; of those that are not here,
    standard error says why."""
    try:
        return {
            command: [_load(command, *maker)() for maker in makers]
            for command, makers in _PARSERS.items()
        }
    except SbpError as error:
        print(
            f"the script does not complete the options of {', '.join(_PARSERS)}: {error.message}",
            file=sys.stderr,
        )
        return {}


def _load(name: str, module: str, function: str) -> Callable[..., Any]:
    """A function of a command.

    Raises:
      SbpError: `unknown-option` outside a checkout that has the command, or where a library of the
        extra is not installed.
    """
    folder, _, _ = module.replace(".", "/").rpartition("/")
    if not (_CHECKOUT / folder).is_dir():
        called = "sbp check without FILE:FUNCTION" if name == "check" else f"sbp {name}"
        raise SbpError(
            f"{called} is in {folder} of the sbp repository, which the installed package leaves"
            " out; run it in a checkout of the repository",
            code="unknown-option",
        )
    sys.path.insert(0, str(_CHECKOUT))
    try:
        return getattr(importlib.import_module(module), function)
    except ModuleNotFoundError as error:
        raise SbpError(
            f"sbp {name} needs {error.name}; install the extra: pip install 'sbp-jax[gshard]'",
            code="unknown-option",
        ) from None


def _explain(console: Console, name: str) -> None:
    if not name:
        meanings = CODES | {c.name: shorten(plain(c.text), 100) for c in CONCEPTS}
        room = max(map(len, meanings))
        for word, meaning in meanings.items():
            console.print(f"{word:<{room}}  {meaning}", markup=False, soft_wrap=True)
    elif name in CODES:
        code = PAGES[name]
        console.print(Shown(page=Page(title=f"{name}: {CODES[name]}", parts=())))
        for text in code.paragraphs():
            console.print()
            console.print(Shown(page=Page(parts=(text,))))
        for head, source in (
            ("every example starts with", PRELUDE if code.runs else ""),
            ("a program that gets this code", code.wrong),
            ("a program that does not", code.right),
        ):
            if source:
                console.print(f"\n{head}:\n", style="bold", markup=False)
                console.print(
                    textwrap.indent(source.strip("\n"), "    "), markup=False, soft_wrap=True
                )
    elif (concept := concept_named(name)) is not None:
        also = f"also called: {', '.join(concept.also)}" if concept.also else ""
        see = f"see: {', '.join(f'`sbp explain {n}`' for n in concept.see)}"
        page = Page(title=concept.name, parts=tuple(filter(None, (concept.text, also, see))))
        console.print(Shown(page=page), soft_wrap=True)
    else:
        near = get_close_matches(name, (*CODES, *CONCEPT_WORDS), n=1, cutoff=0.5)
        meant = concept_named(near[0]) if near else None
        hint = (
            f'; did you mean "{meant.name if meant else near[0]}"?'
            if near
            else "; `sbp explain` lists them"
        )
        raise SbpError(f"no diagnostic code or concept {name!r}{hint}", code="unknown-option")
