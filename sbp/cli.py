"""The command line: `sbp explain CODE`, `sbp signatures [PRIMITIVE]`, `sbp hardware`, `sbp train`,
`sbp check`, `sbp curves`, `sbp export`, `sbp plan`, `sbp translate`, `sbp evaluate`,
`sbp --version`."""

from __future__ import annotations

import argparse
import importlib
import signal
import sys
from collections.abc import Callable, Mapping, Sequence
from difflib import get_close_matches
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from rich.console import Console

from sbp.commands.completion import SHELLS, completion_script
from sbp.commands.program import is_target
from sbp.errors import CODES, SbpError, nearest
from sbp.kinds import Kind, takes
from sbp.report.codes import PAGES, PRELUDE
from sbp.report.concepts import CONCEPTS, concept_named, concept_words
from sbp.report.hardware import hardware_page
from sbp.report.parts import Page, Paragraph, Part
from sbp.report.report import Shown

_WORDS = Kind(
    "a list of strings, or None for the arguments of the process",
    lambda x: x is None or (isinstance(x, list | tuple) and all(isinstance(w, str) for w in x)),
)


_PROGRAMS: Mapping[str, tuple[str, str]] = {
    "report": ("sbp.commands.check", "report_program"),
    "signatures": ("sbp.commands.signatures", "show_signatures"),
    "train": ("examples.gshard.train", "main"),
    "check": ("examples.gshard.check", "main"),
    "curves": ("examples.gshard.curves", "main"),
    "export": ("examples.gshard.export", "main"),
    "plan": ("benchmarks.gshard.costs", "main"),
    "translate": ("examples.gshard.commands", "translate"),
    "evaluate": ("examples.gshard.commands", "evaluate_run"),
}
"""Commands with a command line of their own, a module and its function, imported when asked for.
Modules outside `sbp` are only in a checkout, and need the `gshard` extra."""

_CHECKOUT = Path(__file__).parents[1]

_CHECK = ("sbp.commands.check", "check_program")
"""`sbp check` where it is given FILE:FUNCTION."""

_COMMANDS: Mapping[str, str] = {
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


@takes("sbp.cli.main", argv=_WORDS)
def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command line.

    Arguments:
      argv: the arguments; None takes those of the process.

    Returns:
      The exit status: 0, 2 when the arguments do not fit, or 130 when Ctrl-C ended it.
    """
    words = list(sys.argv[1:] if argv is None else argv)
    try:
        if words and words[0] in _PROGRAMS:
            return _program(words)(words[1:])
        if words and not words[0].startswith("-") and words[0] not in _COMMANDS:
            hint = nearest(words[0], _COMMANDS)
            raise SbpError(f"no command {words[0]!r}{hint}", code="unknown-option")
        parser = _parser()
        options = parser.parse_args(words)
        console = Console(highlight=False)
        match options.command:
            case "explain":
                _explain(console, " ".join(options.name))
            case "completion":
                print(completion_script(options.shell, _COMMANDS))
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


def _program(words: Sequence[str]) -> Callable[[Sequence[str]], int]:
    """The command line of a command; `sbp check` has two, for a program and for a training run.

    Raises:
      SbpError: `unknown-option` outside a checkout that has the command, or where a library of the
        extra is not installed.
    """
    name, rest = words[0], words[1:]
    about_program = rest in (["--help"], ["-h"]) or any(map(is_target, rest))
    module, function = _CHECK if name == "check" and about_program else _PROGRAMS[name]
    folder, _, _ = module.replace(".", "/").rpartition("/")
    if not (_CHECKOUT / folder).is_dir():
        called = "sbp check without FILE:FUNCTION" if name == "check" else f"sbp {name}"
        raise SbpError(
            f"{called} is in {folder} of the sbp repository, which the installed package leaves"
            " out; run it in a checkout of the repository",
            code="unknown-option",
        )
    if not module.startswith("sbp."):
        sys.path.insert(0, str(_CHECKOUT))
    try:
        return getattr(importlib.import_module(module), function)
    except ModuleNotFoundError as error:
        raise SbpError(
            f"sbp {name} needs {error.name}; install the extra: pip install 'sbp-jax[gshard]'",
            code="unknown-option",
        ) from None


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="sbp", description="A distributed type system for JAX.")
    parser.add_argument("--version", action="version", version=f"sbp {_version()}")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND")
    parts = {name: commands.add_parser(name, help=about) for name, about in _COMMANDS.items()}
    parts["explain"].add_argument(
        "name",
        metavar="NAME",
        nargs="*",
        help="a code such as no-signature, or a concept such as P, boxing or mesh axis; all of them"
        " when left out",
    )
    parts["completion"].add_argument("shell", choices=SHELLS)
    return parser


def _version() -> str:
    try:
        return version("sbp-jax")
    except PackageNotFoundError:  # used from a source tree that is not installed
        return "(not installed)"


def _explain(console: Console, name: str) -> None:
    if not name:
        meanings = CODES | {c.name: f"concept; also {', '.join(c.also)}" for c in CONCEPTS}
        room = max(map(len, meanings))
        for word, meaning in meanings.items():
            console.print(f"{word:<{room}}  {meaning}", markup=False, soft_wrap=True)
    elif name in CODES:
        _explain_code(console, name)
    elif (concept := concept_named(name)) is not None:
        also = f"also called: {', '.join(concept.also)}" if concept.also else ""
        see = f"see: {', '.join(f'`sbp explain {n}`' for n in concept.see)}"
        paragraphs = [Paragraph(text=text) for text in (concept.text, also, see) if text]
        console.print(Shown(page=Page(title=concept.name, parts=tuple(paragraphs))), soft_wrap=True)
    else:
        near = get_close_matches(name, (*CODES, *concept_words()), n=1, cutoff=0.5)
        meant = concept_named(near[0]) if near else None
        nearest_name = meant.name if meant else "".join(near)
        hint = f'; did you mean "{nearest_name}"?' if near else "; `sbp explain` lists them"
        raise SbpError(f"no diagnostic code or concept {name!r}{hint}", code="unknown-option")


def _explain_code(console: Console, code: str) -> None:
    page = PAGES[code]
    parts: list[Part] = [Paragraph(text=text) for text in page.paragraphs()]
    console.print(Shown(page=Page(title=f"{code}: {CODES[code]}", parts=())))
    for part in parts:
        console.print()
        console.print(Shown(page=Page(parts=(part,))))
    prelude = PRELUDE.strip("\n") if page.runs else ""
    for name, source in (
        ("every example starts with", prelude),
        ("this gets it", page.wrong),
        ("this does not", page.right),
    ):
        if source:
            console.print(f"\n{name}:\n", style="bold", markup=False)
            console.print(
                "\n".join(f"    {line}".rstrip() for line in source.strip("\n").splitlines()),
                markup=False,
                soft_wrap=True,
            )


if __name__ == "__main__":
    sys.exit(main())
