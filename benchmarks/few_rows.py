"""Our price of products of few rows beside the TPU compiler's estimate, on one device.

    python -m benchmarks.few_rows                # v5e
    python -m benchmarks.few_rows --chip v3 v6e

The figures of products in `sbp/machine/hardware.py` are chosen by this table. A product is compiled
ahead of time as a program of its own. Chips with enough fast memory fetch its weights before it
starts, and the compiler's estimate of the product leaves that out; the others read them within the
product.
"""

from __future__ import annotations

import argparse
import statistics
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import topologies
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec

import sbp
from benchmarks.gshard_bytes import MIB  # sets the ahead-of-time environment before JAX is used
from benchmarks.hlo.schedule import CHIPS, step_time
from sbp.infer.cost import MemoryShares, row_seconds

ROWS = (1, 2, 8, 16, 64, 128, 256, 512)
SIZES = ((2048, 8192), (8192, 2048), (4096, 4096))
TOPOLOGIES = {"v3": "2x2", "v4": "2x2x1", "v5e": "2x2", "v5p": "2x2x1", "v6e": "2x2"}


def estimated(rows: int, size: tuple[int, int], dtype: str, device: Any, chip: str) -> float:
    """The compiler's seconds of a product of a matrix of `rows` rows."""
    place = NamedSharding(Mesh(np.array([device]), ("d",)), PartitionSpec())
    shapes = (rows, size[0]), size
    args = [jax.ShapeDtypeStruct(s, np.dtype(jnp.dtype(dtype)), sharding=place) for s in shapes]
    text = jax.jit(jnp.matmul).lower(*args).compile().as_text()
    assert text is not None
    return step_time(text, 1, chip).cycles / CHIPS[chip].hertz


def priced(rows: int, size: tuple[int, int], dtype: str, chip: str) -> float:
    """Our seconds of the same, with weights that are fetched before where they have room."""
    mesh = AbstractMesh((1,), ("d",))
    shapes = [jax.ShapeDtypeStruct(s, np.dtype(jnp.dtype(dtype))) for s in ((rows, size[0]), size)]
    request = sbp.jit(jnp.matmul, mesh, hardware=f"tpu-{chip}").trace(*shapes).request
    (node,) = request.graph.nodes
    _, weights = node.inputs
    assert isinstance(weights, int)
    row = request.rows_of(node)[0]  # on one device all are alike
    return row_seconds(request.graph, node, row, request.mesh, MemoryShares(waited={weights: 0.0}))


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--chip", nargs="*", choices=TOPOLOGIES, default=["v5e"])
    for chip in parser.parse_args().chip:
        topology = f"{chip}:{TOPOLOGIES[chip]}"
        devices = topologies.get_topology_desc(platform="tpu", topology_name=topology).devices
        errors = []
        for dtype in ("bfloat16", "float32"):
            for size in SIZES:
                for rows in ROWS:
                    judge = estimated(rows, size, dtype, devices[0], chip)
                    price = priced(rows, size, dtype, chip)
                    errors.append(abs(price / judge - 1))
                    weights = size[0] * size[1] * jnp.dtype(dtype).itemsize / MIB
                    print(
                        f"{chip} {dtype:9s}{rows:4d} x {size[0]} by {size[0]} x {size[1]}"
                        f" ({weights:3.0f} MiB): estimate {judge * 1e6:7.1f} us, price"
                        f" {price * 1e6:7.1f} us, {price / judge:5.2f}",
                        flush=True,
                    )
        print(f"{chip}: median error {statistics.median(errors):.1%}, worst {max(errors):.0%}")


if __name__ == "__main__":
    main()
