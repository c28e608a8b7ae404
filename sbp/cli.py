"""The command line: `sbp explain CODE`, `sbp signatures [PRIMITIVE]`, `sbp hardware`, `sbp train`,
`sbp check`, `sbp curves`, `sbp export`, `sbp plan`, `sbp translate`, `sbp evaluate`,
`sbp --version`."""

from __future__ import annotations

import argparse
import importlib
import signal
import sys
from collections.abc import Callable, Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version

from rich.console import Console

from sbp.commands.program import is_target
from sbp.errors import CODES, SbpError, nearest
from sbp.kinds import Kind, takes
from sbp.report.codes import PAGES, PRELUDE
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
    "train": ("sbp.moe.train", "main"),
    "check": ("sbp.moe.check", "main"),
    "curves": ("sbp.moe.curves", "main"),
    "export": ("sbp.moe.export", "main"),
    "plan": ("sbp.moe.costs", "main"),
    "translate": ("sbp.moe.commands", "translate"),
    "evaluate": ("sbp.moe.commands", "evaluate_run"),
}
"""Commands with a command line of their own, a module and its function, imported when asked for:
they need the `moe` extra."""

_CHECK = ("sbp.commands.check", "check_program")
"""`sbp check` where it is given FILE:FUNCTION."""

_COMMANDS = ("explain", "hardware", *_PROGRAMS)


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
                _explain(console, options.code)
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
      SbpError: `unknown-option` where a library of the extra is not installed.
    """
    name, rest = words[0], words[1:]
    about_program = rest in (["--help"], ["-h"]) or any(map(is_target, rest))
    module, function = _CHECK if name == "check" and about_program else _PROGRAMS[name]
    try:
        return getattr(importlib.import_module(module), function)
    except ModuleNotFoundError as error:
        raise SbpError(
            f"sbp {name} needs {error.name}; install the extra: pip install 'sbp-jax[moe]'",
            code="unknown-option",
        ) from None


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="sbp", description="A distributed type system for JAX.")
    parser.add_argument("--version", action="version", version=f"sbp {_version()}")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND")
    explain = commands.add_parser(
        "explain", help="what a diagnostic code means, with an example and its repair"
    )
    explain.add_argument(
        "code",
        metavar="CODE",
        nargs="?",
        help="a code such as no-signature; all codes when left out",
    )
    commands.add_parser(
        "signatures", help="the rows of a primitive, or of a function such as softmax"
    )
    commands.add_parser(
        "hardware", help="the device kinds that costs can be counted on, with their figures"
    )
    commands.add_parser("train", help="train the GShard MoE Transformer (sbp train --help)")
    commands.add_parser(
        "check", help="check FILE:FUNCTION; or whether sbp train would begin with these options"
    )
    commands.add_parser("report", help="the full report on FILE:FUNCTION")
    commands.add_parser("curves", help="draw the curves of a training run as an HTML page")
    commands.add_parser("export", help="a trained model as one safetensors file")
    commands.add_parser("plan", help="types and price of a training step, without training it")
    commands.add_parser("translate", help="translate text with a trained model")
    commands.add_parser("evaluate", help="score a trained model on a test set")
    return parser


def _version() -> str:
    try:
        return version("sbp-jax")
    except PackageNotFoundError:  # used from a source tree that is not installed
        return "(not installed)"


def _explain(console: Console, code: str | None) -> None:
    if code is None:
        room = max(map(len, CODES))
        for name, meaning in CODES.items():
            console.print(f"{name:<{room}}  {meaning}", markup=False, soft_wrap=True)
        return
    if code not in CODES:
        raise SbpError(f"no diagnostic code {code!r}{nearest(code, CODES)}", code="unknown-option")
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
