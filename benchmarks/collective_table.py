"""What the TPU compiler makes of each kind of collective, ahead of time: on which slices, over
which mesh axes, in which dtypes it stays what it is, and whether it runs beside independent work.

    python -m benchmarks.collective_table            # prints the rows
    python -m benchmarks.collective_table --write    # and writes benchmarks/lowerings.csv
"""

from __future__ import annotations

import argparse
import csv
import itertools
import math
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import topologies
from jax.sharding import Mesh, PartitionSpec

from benchmarks import gshard_bytes  # sets the ahead-of-time environment before JAX is used
from benchmarks.hlo.traffic import (
    ANY_COLLECTIVE,
    callees,
    computations_of,
    instructions,
    result_shape,
)

assert gshard_bytes

PATH = Path(__file__).with_name("lowerings.csv")

SLICES: dict[str, tuple[str, ...]] = {
    "tpu-v3": ("v3:2x2", "v3:4x4"),
    "tpu-v4": ("v4:2x2x1", "v4:2x2x2"),
    "tpu-v5e": ("v5e:2x2", "v5e:2x4", "v5e:4x4", "v5e:8x8"),
    "tpu-v5p": ("v5p:2x2x1", "v5p:2x2x2"),
    "tpu-v6e": ("v6e:2x2", "v6e:2x4", "v6e:4x4"),
}
"""Slices of each hardware, smallest first."""

ROWS, COLUMNS = 1024, tuple(128 * k for k in (11, 12, 13, 14, 15, 17, 18, 19, 20, 21))
"""Rows of all operands, and the columns by which a compiled collective is known: none is twice
another or a power of two. Blocks of rows have whole tiles on up to 128 devices."""

KINDS: dict[str, Callable[[Any, str], Any]] = {
    "all_reduce": lax.psum,
    "all_gather": lambda x, name: lax.all_gather(x, name, axis=0, tiled=True),
    "reduce_scatter": lambda x, name: lax.psum_scatter(x, name, scatter_dimension=0, tiled=True),
    "all_to_all": lambda x, name: lax.all_to_all(x, name, 0, 1, tiled=True),
    "permute": lambda x, name: lax.ppermute(
        x, name, [(i, (i + 1) % lax.axis_size(name)) for i in range(lax.axis_size(name))]
    ),
}
"""The collectives, by their names in plans."""


DTYPES: tuple[Any, ...] = (jnp.bfloat16, jnp.float32)


def layouts(devices: int) -> Iterator[tuple[tuple[int, ...], int]]:
    """The meshes of a slice with the axis that is tried: all devices as one axis, and the outer and
    the inner one of two axes."""
    yield (devices,), 0
    outer = 2 ** (int(math.log2(devices)) // 2)
    for axis in (0, 1):
        yield (outer, devices // outer), axis


def probe(devices: Any, shape: tuple[int, ...], axis: int) -> Iterator[tuple[str, str, str, str]]:
    """The kind and dtype of each collective, with what the compiler makes of it beside a product,
    and how it runs.

    Arguments:
        devices: of the slice.
        shape: of the mesh.
        axis: the mesh axis that the collectives run over.
    """
    names = tuple("xy"[: len(shape)])
    mesh = Mesh(np.array(devices).reshape(shape), names)
    cases = dict(zip(COLUMNS, itertools.product(KINDS, DTYPES), strict=True))

    def beside(w: Any, *operands: Any) -> tuple[Any, ...]:
        found = (
            KINDS[kind](2 * x, names[axis])[None]
            for x, (kind, _) in zip(operands, cases.values(), strict=True)
        )
        return (w @ w)[None], *found

    run = jax.shard_map(
        beside, mesh=mesh, in_specs=PartitionSpec(), out_specs=PartitionSpec(names), check_vma=False
    )
    operands = [
        jax.ShapeDtypeStruct((ROWS, columns), dtype) for columns, (_, dtype) in cases.items()
    ]
    product = jax.ShapeDtypeStruct((4096, 4096), jnp.bfloat16)
    text = jax.jit(run).lower(product, *operands).compile().as_text()
    assert text is not None
    found = list(compiled(text))
    for columns, (kind, dtype) in cases.items():
        mine = [one for one in found if columns in one.sizes]
        made = "+".join(dict.fromkeys(one.opcode for one in mine))
        beside_work = bool(mine) and all(one.is_asynchronous for one in mine)
        yield kind, dtype.__name__, made, "beside work" if beside_work else "alone"


@dataclass(frozen=True, slots=True, kw_only=True)
class Compiled:
    """One collective of a compiled program.

    Arguments:
        opcode: XLA's.
        sizes: of the dims of its results.
        is_asynchronous: whether the program does something else until it is done.
    """

    opcode: str
    sizes: frozenset[int]
    is_asynchronous: bool


def compiled(hlo_text: str) -> Iterator[Compiled]:
    """The collectives of a compiled program."""
    computations, _ = computations_of(hlo_text)
    inside = {
        callee
        for lines in computations.values()
        for name, rhs in instructions(lines)
        if name.startswith("async-collective-start") or " async-start(" in rhs
        for callee in callees(rhs)
    }
    for computation, lines in computations.items():
        for _, rhs in instructions(lines):
            collective = ANY_COLLECTIVE.search(" " + rhs)
            if collective is None or collective.group(2) == "-done":
                continue
            scatters = computation.startswith("all-reduce-scatter")
            yield Compiled(
                opcode="reduce-scatter" if scatters else collective.group(1),
                sizes=frozenset(
                    int(size)
                    for dims in re.findall(r"\[([\d,]+)\]", result_shape(rhs))
                    for size in dims.split(",")
                ),
                is_asynchronous=collective.group(2) == "-start" or computation in inside,
            )


def rows(hardware: str) -> Iterator[dict[str, Any]]:
    """The rows of the table for one hardware."""
    for name in SLICES[hardware]:
        devices = topologies.get_topology_desc(platform="tpu", topology_name=name).devices
        for shape, axis in layouts(len(devices)):
            for kind, dtype, made, how in probe(devices, shape, axis):
                yield {
                    "hardware": hardware,
                    "slice": name.partition(":")[2],
                    "devices": len(devices),
                    "mesh": "x".join(map(str, shape)),
                    "axis": axis,
                    "kind": kind,
                    "dtype": dtype,
                    "compiled": made,
                    "runs": how,
                }


def recorded() -> Iterator[dict[str, str]]:
    """The rows of the data file."""
    yield from csv.DictReader(PATH.read_text(encoding="utf-8").splitlines()[1:])


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("hardware", nargs="*", help=f"of: {', '.join(SLICES)}")
    parser.add_argument("--write", action="store_true", help="replaces the data file")
    args = parser.parse_args()
    found = []
    for hardware in args.hardware or SLICES:
        for row in rows(hardware):
            found.append(row)
            print(",".join(map(str, row.values())), flush=True)
    if args.write:
        with PATH.open("w", encoding="utf-8", newline="") as file:
            file.write(f"# libtpu {metadata.version('libtpu')}\n")
            writer = csv.DictWriter(file, list(found[0]), lineterminator="\n")
            writer.writeheader()
            writer.writerows(found)


if __name__ == "__main__":
    main()
