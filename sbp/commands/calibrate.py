"""The command `sbp calibrate`: measures products, memory and collectives on the devices at hand."""

import argparse
import datetime
import itertools
import json
import math
import os
import time
import timeit
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh, PartitionSpec
from rich.console import Console
from rich.progress import track
from scipy.optimize import nnls

from sbp.commands.command_line import mesh_axes
from sbp.errors import SbpError, bytes_text, seconds_text
from sbp.machine.calibration import KINDS, RATES
from sbp.machine.hardware import hardware_of_kind
from sbp.machine.mesh import make_mesh, mesh_spec
from sbp.moe.sharding import simulate_devices
from sbp.plan.saved import write_file
from sbp.report.parts import Page, table
from sbp.report.report import Shown

SIZES = tuple(4096 * 4**k for k in range(8))
"""The sizes of one device's operand, in bytes. sbp measures each collective at each size."""

SPAN = 0.02
"""Seconds that a measured loop takes at least."""

ROUNDS = 5
"""Runs of each loop. The fastest run counts."""

LIMIT = 240.0
"""Seconds after which only the smallest and the largest size of a collective are measured."""

ROWS = 4096
"""The most rows of the square matrices whose product is measured."""


_PRODUCTS = (
    *zip(RATES, ("bfloat16", "float32", "float32"), (None, None, "highest"), strict=False),
    ("hbm_bytes_per_second", None, None),
)
"""The rates of products, each with its dtype and precision, and the rate of memory."""


def calibrate(given: argparse.Namespace) -> None:
    """`sbp calibrate`.

    Arguments:
      given: the options of the command.

    Raises:
      SbpError: `unknown-option` for a file that cannot be written, or that exists without --force.
    """
    file = Path(given.output)
    checks = {
        f"the name of the file must end in .toml, got {file}": file.suffix != ".toml",
        f"--devices must be at least 1, got {given.devices}": (
            given.devices is not None and given.devices < 1
        ),
        f"{file} exists; pass --force to replace it": os.path.exists(file) and not given.force,
        f"cannot write {file}: not a file in a folder": (
            os.path.isdir(file) or not os.path.isdir(file.absolute().parent)
        ),
    }
    if wrong := [text for text, is_wrong in checks.items() if is_wrong]:
        raise SbpError(wrong[0], code="unknown-option")
    if given.devices:
        jax.config.update("jax_platforms", "cpu")
        simulate_devices(given.devices, replaces=True)
    axes = mesh_axes(given.mesh) if given.mesh else {"devices": len(jax.devices())}
    mesh, console = make_mesh(tuple(axes.values()), tuple(axes)), Console(stderr=True)
    rates, links = measured(mesh, console)
    write_file(file, _toml(mesh, rates, links))
    Console(highlight=False).print(Shown(page=_page(mesh, rates, links)))
    console.print(f"wrote {file}; pass hardware={str(file)!r} to sbp.jit", highlight=False)


Link = tuple[str, tuple[str, ...], float, float]
"""A collective, its mesh axes, seconds to start it, seconds per byte that a device sends."""


def measured(mesh: Mesh, console: Console) -> tuple[dict[str, float], list[Link]]:
    """The rates of a device, and the times of collectives.

    Arguments:
      mesh: the devices; all of them work at the same time.
      console: shows the progress.
    """
    begun, links = time.perf_counter(), list[Link]()
    rates = {
        name: _product(mesh, dtype, precision) if dtype else _memory(mesh)
        for name, dtype, precision in track(_PRODUCTS, "products and memory", console=console)
    }
    for kind, names in track(list(_collectives(mesh)), "collectives", console=console):
        late = time.perf_counter() - begun > LIMIT
        if late:
            console.print(
                f"{LIMIT:.0f} s are over: {kind} over {', '.join(names)} at two sizes only"
            )
        pairs = [
            (sent, _seconds(mesh, step, (length,)))
            for size in ((SIZES[0], SIZES[-1]) if late else SIZES)
            for n in [math.prod(mesh.shape[name] for name in names)]
            for step, length, sent in [_step(kind, names, n, size)]
        ]
        links.append((kind, names, *fitted(pairs)))
    return rates, links


def fitted(pairs: Sequence[tuple[float, float]]) -> tuple[float, float]:
    """Seconds to start, and seconds per byte, with the least squares of relative errors.

    Arguments:
      pairs: bytes, and seconds that were measured.

    >>> start, per_byte = fitted([(1e3, 2e-6), (1e6, 1.001e-3)])
    >>> round(start * 1e6, 2), round(per_byte * 1e9, 2)
    (1.0, 1.0)
    """
    sent, seconds = np.array(pairs, float).T
    # The bytes are scaled, so that both columns have numbers of one size.
    columns = np.stack([1 / seconds, sent / sent.max() / seconds], axis=1)
    (start, whole), _ = nnls(columns * seconds.max(), np.ones(len(pairs)))
    least = seconds.max() / sent.max() * 1e-6  # a rate is finite
    return float(start * seconds.max()), max(float(whole * seconds.max() / sent.max()), least)


def _collectives(mesh: Mesh) -> Iterator[tuple[str, tuple[str, ...]]]:
    """The collectives on each mesh axis, on each pair, and on all axes."""
    names = [name for name, n in mesh.shape.items() if n > 1]
    counts = sorted({1, 2, len(names)} & {*range(1, len(names) + 1)})
    return (
        (kind, chosen)
        for count in counts
        for chosen in itertools.combinations(names, count)
        for kind in KINDS
        if kind != "permute" or count == 1
    )


Step = Callable[[Any], Any]


def _step(kind: str, names: tuple[str, ...], n: int, size: int) -> tuple[Step, int, float]:
    """A step of a loop that runs one collective, the length of a device's operand in float32, and
    the bytes that a device sends."""
    length = -(-size // 4 // n) * n
    pairs = [(i, (i + 1) % n) for i in range(n)]
    collective, factor = {
        "all_reduce": (lambda x: lax.psum(x, names), 2 * (n - 1) / n),
        "all_gather": (lambda x: lax.all_gather(x, names, tiled=True), n - 1),
        "reduce_scatter": (lambda x: lax.psum_scatter(x, names, tiled=True), (n - 1) / n),
        "all_to_all": (
            lambda x: lax.all_to_all(x.reshape(n, -1), names, 0, 0),
            (n - 1) / n,
        ),
        "permute": (lambda x: lax.ppermute(x, names, pairs), 1),
    }[kind]

    def step(x: Any) -> Any:
        # The next round depends on this one, and writes one element only.
        return x.at[0].set(collective(x).ravel()[0] / n)

    return step, length, factor * length * 4


def _product(mesh: Mesh, dtype: Any, precision: str | None) -> float:
    """Floating-point operations per second of one device, for the size with the highest rate."""
    best, rows = 0.0, 256
    while rows <= ROWS:
        w = jnp.eye(rows, dtype=dtype)

        def step(x: Any, w: Any = w) -> Any:
            return jnp.dot(x, w, precision=precision)

        seconds = _seconds(mesh, step, (rows, rows), dtype)
        best, rows = max(best, 2 * rows**3 / seconds), rows * 2
        if seconds > 10 * SPAN:
            break
    return best


def _memory(mesh: Mesh) -> float:
    """Bytes per second that one device reads and writes."""
    return 2 * SIZES[-1] / _seconds(mesh, lambda x: x + 1.0, (SIZES[-1] // 4,))


def _seconds(mesh: Mesh, step: Step, shape: tuple[int, ...], dtype: Any = "float32") -> float:
    """Seconds of one step. All devices run it in a loop, each on an array of this shape."""

    def loop(x: Any, count: Any) -> Any:
        return lax.fori_loop(0, count, lambda _, x: step(x), x)

    spec = PartitionSpec(mesh.axis_names)
    mapped = jax.shard_map(
        loop, mesh=mesh, in_specs=(spec, PartitionSpec()), out_specs=spec, check_vma=False
    )
    x = jax.jit(
        lambda: jnp.ones((shape[0] * mesh.size, *shape[1:]), dtype),
        out_shardings=jax.NamedSharding(mesh, spec),
    )()
    compiled = jax.jit(mapped).lower(x, np.int32(1)).compile()

    def run(count: int, rounds: int = ROUNDS) -> float:
        return min(
            timeit.repeat(
                lambda: jax.block_until_ready(compiled(x, np.int32(count))),
                number=1,
                repeat=rounds,
            )
        )

    run(1, 1)  # the first run loads the program
    idle, count = run(0), 1
    while (took := run(count, 1) - idle) < SPAN:
        count *= max(2, min(100, int(1.5 * SPAN / max(took, 1e-6))))
    return max((run(count) - idle) / count, 1e-9)


# ---- the file ------------------------------------------------------------------------------------


def _toml(mesh: Mesh, rates: dict[str, float], links: Sequence[Link]) -> str:
    """The file; `sbp.machine.calibration` reads it."""
    device = mesh.devices.flat[0]
    made = {
        "date": datetime.date.today().isoformat(),
        "jax": jax.__version__,
        "platform_version": device.client.platform_version,
        "device_kind": device.device_kind,
        "hardware": hardware_of_kind(device.device_kind, device.platform).name,
    }
    sections = {"made": made, "mesh": dict(mesh.shape), "rates": rates}
    sections |= {
        f"[collective]#{i}": {
            "kind": kind,
            "mesh_axes": list(names),
            "seconds": start,
            "bytes_per_second": 1 / per_byte,
        }
        for i, (kind, names, start, per_byte) in enumerate(links)
    }
    return "\n".join(
        f"[{title.partition('#')[0]}]\n"
        + "".join(
            f"{key if key.isascii() and key.isidentifier() else json.dumps(key)} ="
            f" {json.dumps(value)}\n"
            for key, value in section.items()
        )
        for title, section in sections.items()
    )


def _page(mesh: Mesh, rates: dict[str, float], links: Sequence[Link]) -> Page:
    """The measured figures, and the figures of the table."""
    spec = mesh_spec(mesh)
    title = f"measured on mesh {spec}, beside the figures of {spec.hardware.name}"
    figures = table(
        ("figure", ">measured", ">in the table"),
        (
            (
                name.replace("_", " "),
                f"{rate / 1e9:,.1f} G",
                f"{(getattr(spec.hardware, name) or spec.hardware.flops_per_second) / 1e9:,.1f} G",
            )
            for name, rate in rates.items()
        ),
    )
    size = SIZES[-1]
    rows = table(
        ("collective", "mesh axes", ">start", f">{bytes_text(size)} sent", ">in the table"),
        (
            (
                kind,
                ", ".join(names),
                seconds_text(start),
                seconds_text(start + size * per_byte),
                seconds_text(spec.collective(kind, tuple(map(spec.names.index, names))).of(size)),
            )
            for kind, names, start, per_byte in links
        ),
    )
    return Page(title=title, parts=(figures, rows))
