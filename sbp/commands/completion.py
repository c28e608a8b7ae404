"""The command `sbp completion SHELL`: a script that completes the words of `sbp` in a shell."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from typing import Any

import shtab

from sbp.commands.check import add_check_options, add_report_options
from sbp.commands.signatures import add_signature_options
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
                add_check_options(part)
                _complete(part, "target", complete=shtab.FILE)
            case "report":
                add_report_options(part)
                _complete(part, "target", complete=shtab.FILE)
            case "signatures":
                add_signature_options(part)
                _complete(part, "name", choices=sorted(known_primitives()))
            case "explain":
                words = [w for w in concept_words() if " " not in w]
                part.add_argument("name", nargs="*", choices=[*CODES, *words])
            case "completion":
                part.add_argument("shell", choices=SHELLS)
            case _:
                pass  # the options of a training run are those that its --help lists
    return shtab.complete(whole, shell=shell)


def _complete(parser: argparse.ArgumentParser, argument: str, **values: Any) -> None:
    """Says what an argument may be; its help is too long for a shell."""
    (action,) = (a for a in vars(parser)["_actions"] if a.dest == argument)
    vars(action).update(values, help=None, metavar=None)
