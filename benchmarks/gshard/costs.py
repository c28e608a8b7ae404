"""The command `sbp plan`: what a training step costs on devices that are not here.

sbp plan --preset gshard-600b --topology v3:32x32
sbp plan --figures FOLDER
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from rich.console import Console

import sbp
from benchmarks.gshard.compiled import comparison, compile_step, slice_mesh
from benchmarks.gshard.figures import draw
from benchmarks.gshard.study import operators, study, table
from examples.gshard.options import CommandParser, Run, parse_args
from sbp.errors import SbpError, nearest


class Topology(NamedTuple):
    """A TPU slice.

    Attributes:
      name: as the TPU compiler has it, such as "v3:32x32": a generation, and chips by torus dim.
      hardware: the device kind, a key of `sbp.HARDWARE`.
      devices: JAX devices: cores of v2, v3 and v7x, chips of the others.
    """

    name: str
    hardware: str
    devices: int


def parse_topology(text: str) -> Topology:
    """Read `v3:32x32`.

    Raises:
      SbpError: `unknown-option` for a text of another form, a generation that `sbp.HARDWARE` has
        not, or another number of torus dims than the generation has.

    >>> parse_topology("v3:32x32")
    Topology(name='v3:32x32', hardware='tpu-v3', devices=2048)
    """
    generation, _, chips = text.partition(":")
    known = [name.removeprefix("tpu-") for name in sbp.HARDWARE if name.startswith("tpu-")]
    if generation not in known:
        raise SbpError(
            f"no TPU generation {generation!r}{nearest(generation, known).rstrip('?')}. There are"
            f" {', '.join(known)}, as in v3:32x32",
            code="unknown-option",
        )
    kind = sbp.HARDWARE[f"tpu-{generation}"]
    sizes = chips.split("x")
    if not all(size.isdecimal() and int(size) for size in sizes):
        raise SbpError(f"topology {text!r} is not of the form v3:32x32", code="unknown-option")
    if len(sizes) != kind.torus_dims:
        raise SbpError(
            f"topology {text!r} has {len(sizes)} dims; {generation} is a torus of"
            f" {kind.torus_dims}",
            code="unknown-option",
        )
    return Topology(text, kind.name, math.prod(map(int, sizes)) * kind.devices_per_chip)


def plan_parser() -> CommandParser:
    """The options that only `sbp plan` has; it takes those of `sbp train` too."""
    parser = CommandParser(
        prog="sbp plan",
        description="Types, price and memory of a training step, without devices, beside the"
        " figures of the GShard paper.",
        epilog="Other options are those of sbp train, such as --preset, --mesh and --set.",
        allow_abbrev=False,
    )
    parser.add_argument(
        "--hardware", help="a device kind, as sbp hardware lists them (default tpu-v3)"
    )
    parser.add_argument(
        "--topology", help="a TPU slice by chips, such as v3:32x32, in the place of --hardware"
    )
    parser.add_argument(
        "--compile",
        action="store_true",
        help="compile the step for the topology by the TPU compiler, which needs no TPU, and"
        " compare (minutes for the large models)",
    )
    parser.add_argument(
        "--figures",
        metavar="FOLDER",
        help="draw figures 7 to 9 of the paper from the cost model instead, as PNG and HTML",
    )
    return parser


def _topology(args: argparse.Namespace, run: Run) -> Topology | None:
    """The slice of the options.

    Raises:
      SbpError: `mesh-devices` where the mesh has another number of devices; `unknown-option` where
        the hardware is another.
    """
    if args.topology is None:
        if args.compile:
            raise SbpError(
                "--compile is for a TPU slice; give it, as in --topology v3:32x32",
                code="unknown-option",
            )
        return None
    found = parse_topology(args.topology)
    if args.hardware not in (None, found.hardware):
        raise SbpError(
            f"--topology {found.name} is {found.hardware}, and --hardware says {args.hardware};"
            " leave out --hardware",
            code="unknown-option",
        )
    devices = math.prod(size for _, size in run.mesh)
    if devices != found.devices:
        axes = ",".join(f"{name}={size}" for name, size in run.mesh)
        raise SbpError(
            f"topology {found.name} has {found.devices:,} devices, and the mesh {axes} has"
            f" {devices:,}; give --mesh with as many, or another topology",
            code="mesh-devices",
        )
    return found


def main(argv: Sequence[str]) -> int:
    """The command line of `sbp plan`. It takes the options of a training run and of `plan_parser`.

    Raises:
      SbpError: for options that do not fit, and what planning raises.
    """
    args, rest = plan_parser().parse_known_args(argv)
    console = Console(highlight=False)
    if args.figures is not None:
        _figures(args, rest, console)
    else:
        _show(args, parse_args(rest), console)
    return 0


def _show(args: argparse.Namespace, run: Run, console: Console) -> None:
    """Print what the options ask for."""
    place = _topology(args, run)
    hardware = place.hardware if place else args.hardware or "tpu-v3"
    mesh = slice_mesh(place.name, run.mesh) if place and args.compile else None
    found = study(run, hardware, mesh)
    console.print(table(found))
    console.print()
    if found.published:
        console.print(operators(hardware))
        console.print()
    if place and args.compile:
        chip = place.hardware.removeprefix("tpu-")
        console.print(
            comparison(found.plan, compile_step(found.plan, found.devices, chip, console))
        )
        console.print()
    console.print(found.plan.report().short())


def _figures(args: argparse.Namespace, rest: Sequence[str], console: Console) -> None:
    """Draw the figures of the paper's models; no other option is read.

    Raises:
      SbpError: `unknown-option` for other options.
    """
    others = [f"--{name}" for name in ("topology", "compile") if getattr(args, name)]
    if ignored := [*others, *rest]:
        raise SbpError(
            f"--figures draws the models of the paper; {ignored[0]} does nothing there. Leave it"
            " out",
            code="unknown-option",
        )
    hardware = args.hardware or "tpu-v3"
    if hardware not in sbp.HARDWARE:
        raise SbpError(
            f"no device kind {hardware!r}{nearest(hardware, sbp.HARDWARE)}; sbp hardware lists"
            " them",
            code="unknown-option",
        )
    draw(Path(args.figures), hardware, console)
