"""The command `sbp completion SHELL`: a script that completes the words of `sbp` in a shell."""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from typing import Any

import shtab

from sbp.commands.check import check_parser, report_parser
from sbp.commands.signatures import signatures_parser
from sbp.errors import CODES
from sbp.report.concepts import concept_words
from sbp.signatures import known_primitives

SHELLS = ("bash", "zsh", "fish")
"""Shells that scripts are made for."""


def completion_script(shell: str, commands: Mapping[str, str]) -> str:
    """The script of a shell.

    Arguments:
      shell: one of `SHELLS`.
      commands: the commands of `sbp`, each with a line of help.
    """
    whole = argparse.ArgumentParser(prog="sbp")
    whole.add_argument("--version", action="store_true", help="print the version")
    parts = whole.add_subparsers(dest="command")
    for name, about in commands.items():
        part = parts.add_parser(name, help=about)
        match name:
            case "check":
                _copy(check_parser(), part)
            case "report":
                _copy(report_parser(), part)
            case "signatures":
                _copy(signatures_parser(), part, sorted(known_primitives()))
            case "explain":
                words = [w for w in concept_words() if " " not in w]
                part.add_argument("name", nargs="*", choices=[*CODES, *words])
            case "completion":
                part.add_argument("shell", choices=SHELLS)
            case _:
                pass  # the options of a training run are those that its --help lists
    return shtab.complete(whole, shell=shell)


def _copy(
    source: argparse.ArgumentParser, target: argparse.ArgumentParser, names: Sequence[str] = ()
) -> None:
    """Gives a parser the options of another one; its positional argument is one of `names`, or a
    file where there are none."""
    actions: list[argparse.Action] = vars(source)["_actions"]  # argparse has no other way to read
    for action in actions:
        if "--help" in action.option_strings:
            continue
        if action.option_strings:
            _add(target, action)
        elif names:
            target.add_argument(action.dest, nargs="?", choices=list(names))
        else:
            completed: Any = target.add_argument(action.dest)
            completed.complete = shtab.FILE


def _add(target: argparse.ArgumentParser, action: argparse.Action) -> None:
    if action.nargs == 0:
        target.add_argument(*action.option_strings, action="store_true", help=action.help)
    else:
        target.add_argument(*action.option_strings, metavar=action.metavar, help=action.help)
