"""The commands `sbp check FILE:FUNCTION` and `sbp report FILE:FUNCTION`."""

from __future__ import annotations

import argparse
import enum
import json
import sys
import sysconfig
import traceback
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType

from rich.console import Console

import sbp
from sbp.commands.program import ProgramOptions, UserCodeError, checked
from sbp.errors import SbpError
from sbp.report.pages import refusal
from sbp.report.parts import Facts, Page, Part
from sbp.report.report import Report, Shown
from sbp.report.wording import bytes_text, seconds_text
from sbp.source.reader import in_library


class ExitStatus(enum.IntEnum):
    """What `sbp check` and `sbp report` exit with."""

    NO_ERROR = 0
    ERROR = 1
    NOT_CHECKED = 2


_STATUSES = (
    "Exit status: 0 where the program has no error, 1 where it has one, 2 where it could not be"
    " checked."
)
_TARGET = (
    "FILE:FUNCTION or MODULE:FUNCTION. The function is an sbp.jit function, a plain function (with"
    " --mesh), or a function without arguments that returns (function, arguments)"
)


def add_check_options(parser: argparse.ArgumentParser) -> None:
    """Adds the options of `sbp check FILE:FUNCTION`."""
    parser.add_argument("target", metavar="TARGET", help=_TARGET)
    parser.add_argument(
        "--args",
        metavar="SHAPES",
        help="the arguments, such as \"float32[8,16], {'w': f32[16,32]}, training=True\"",
    )
    parser.add_argument(
        "--mesh", metavar="AXES", help="mesh axes, outer first, such as data=2,model=4"
    )
    parser.add_argument(
        "--hardware", metavar="NAME", help="count costs on this hardware (sbp hardware lists it)"
    )
    parser.add_argument(
        "--devices",
        metavar="N",
        type=int,
        help="simulate N devices, for a file that makes a mesh of devices itself",
    )
    parser.add_argument(
        "--shard-map",
        action="store_true",
        help="check the collectives of a program that is written with jax.shard_map",
    )
    parser.add_argument("--json", action="store_true", help="print JSON")


def add_report_options(parser: argparse.ArgumentParser) -> None:
    """Adds the options of `sbp report FILE:FUNCTION`."""
    add_check_options(parser)
    parser.add_argument("--short", action="store_true", help="the short report")
    parser.add_argument(
        "--source", action="store_true", help="the source, each line with its types and bytes"
    )
    parser.add_argument("--html", metavar="FILE", help="write the report to this file as HTML")


def check_program(words: Sequence[str]) -> int:
    """`sbp check FILE:FUNCTION`: the findings, and what the program costs.

    Arguments:
      words: the words after `sbp check`.

    Returns:
      The exit status.
    """
    parser = argparse.ArgumentParser(
        prog="sbp check",
        description="Check the types of a program. Nothing of it runs, and no device is needed.",
        epilog=f"{_STATUSES} Without FILE:FUNCTION, `sbp check` takes the options of `sbp train`"
        " and tells whether that run would begin.",
    )
    add_check_options(parser)
    return _answer(parser.parse_args(words))


def report_program(words: Sequence[str]) -> int:
    """`sbp report FILE:FUNCTION`: the full report.

    Arguments:
      words: the words after `sbp report`.

    Returns:
      The exit status.
    """
    parser = argparse.ArgumentParser(
        prog="sbp report",
        description="Show the full report on a program: types, collectives, bytes, memory, time.",
        epilog=_STATUSES,
    )
    add_report_options(parser)
    return _answer(parser.parse_args(words))


def _answer(given: argparse.Namespace) -> int:
    options = ProgramOptions(
        target=given.target,
        args=given.args,
        mesh=given.mesh,
        devices=given.devices,
        hardware=given.hardware,
        shard_map=given.shard_map,
    )
    try:
        report = checked(options)
    except UserCodeError as error:
        _show_users_error(error, given.target)
        return ExitStatus.NOT_CHECKED
    page = _page(report, given)
    if given.json:
        print(json.dumps(report.to_json(), indent=2, ensure_ascii=False))
    elif getattr(given, "html", None):
        _write(Path(given.html), page.html(standalone=True))
        print(f"wrote {given.html}")
    else:
        Console(highlight=False).print(page, soft_wrap=True)
    return ExitStatus.NO_ERROR if report.ok else ExitStatus.ERROR


def _page(report: Report, given: argparse.Namespace) -> Shown:
    if "short" not in given:
        return Shown(page=_findings(report))
    if given.source and report.program is not None:
        return report.source()
    return report.short() if given.short else report.full()


def _findings(report: Report) -> Page:
    """The findings, a line that counts them, and the cost of the plan where there is one."""
    parts: tuple[Part, ...] = refusal(report.title, report.diagnostics, report.coverage).parts
    if report.program is None:
        return Page(parts=parts)
    cost = report.program.cost
    pairs = (
        ("mesh", f"{report.program.mesh}"),
        ("sent per call", f"{bytes_text(cost.bytes_per_device)} per device"),
        ("peak memory", f"{bytes_text(cost.peak_memory_bytes)} per device"),
        ("modelled time", f"{seconds_text(cost.seconds)} on {report.program.mesh.hardware.name}"),
    )
    return Page(parts=(*parts, Facts(pairs=pairs)))


def _write(file: Path, text: str) -> None:
    """Writes a file.

    Raises:
      SbpError: `unknown-option` where it cannot be written.
    """
    try:
        file.write_text(text, encoding="utf-8")
    except OSError as error:
        raise SbpError(
            f"cannot write {file}: {error.strerror}; name another file", code="unknown-option"
        ) from None


def _show_users_error(error: UserCodeError, target: str) -> None:
    """Prints what the user's code raised, from the user's first line on."""
    cause = error.__cause__
    assert cause is not None  # `raise .. from`
    shown = traceback.format_tb(_users_part(cause.__traceback__))
    name = type(cause).__name__
    hint = " If it needs more devices: --devices N" if error.loading else ""
    print(
        f"{''.join(shown)}{name}: {cause}\nsbp could not check {target}: its code raised {name}."
        f"{hint}",
        file=sys.stderr,
    )


def _users_part(trace: TracebackType | None) -> TracebackType | None:
    """The stack trace from the user's first frame on; the whole one where there is none."""
    ours = str(Path(sbp.__file__).parent), sysconfig.get_path("stdlib")
    part = trace
    while part is not None:
        file = part.tb_frame.f_code.co_filename
        if not (file.startswith((*ours, "<")) or in_library(file)):
            return part
        part = part.tb_next
    return trace
