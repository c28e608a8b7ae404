"""Bytes that a step of a convolutional network moves with its images split in space, under sbp and
under `jax.jit`.

    python -m benchmarks.halo_bytes [--topology v5e:2x4]

Both are compiled ahead of time by the TPU compiler from the same function and the same shardings:
images split by height and width over the two mesh axes, weights whole. XLA's partitioner exchanges
halos itself; sbp writes them into its plan.
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import topologies
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import sbp
from benchmarks.gshard_bytes import MIB  # sets the ahead-of-time environment before JAX is used
from benchmarks.hlo.traffic import bytes_by_kind, collectives

IMAGES = (2, 512, 512, 16)
KERNELS = ((3, 3, 16, 32), (5, 5, 32, 64), (3, 3, 64, 64))
STRIDES = (1, 2, 1)


@dataclass(frozen=True, slots=True, kw_only=True)
class Moved:
    """What one device sends per step by kind of collective, and its temporaries, in bytes;
    `planned` is the plan's own count."""

    by_kind: dict[str, float]
    temporaries: int
    planned: float | None = None

    @property
    def total(self) -> float:
        """Bytes of all kinds."""
        return sum(self.by_kind.values())


def loss(kernels: list[jax.Array], images: jax.Array) -> jax.Array:
    """Convolutions of several windows and strides, a pooling, a mean."""
    x = images
    for kernel, stride in zip(kernels, STRIDES, strict=True):
        x = lax.conv_general_dilated(
            x, kernel, (stride, stride), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC")
        )
        x = jax.nn.relu(x)
    x = lax.reduce_window(x, -jnp.inf, lax.max, (1, 3, 3, 1), (1, 2, 2, 1), "SAME")
    return jnp.mean(x**2)


def tpu_mesh(topology: str) -> Mesh:
    """A mesh of two axes over the devices of a TPU topology of that form."""
    rows, columns = (int(n) for n in topology.split(":")[1].split("x"))
    devices = topologies.get_topology_desc(platform="tpu", topology_name=topology).devices
    return Mesh(np.array(devices).reshape(rows, columns), ("x", "y"))


def arguments() -> tuple[Any, Any]:
    """Kernels and images, as shapes."""
    return [jax.ShapeDtypeStruct(k, jnp.float32) for k in KERNELS], jax.ShapeDtypeStruct(
        IMAGES, jnp.float32
    )


def sbp_plan(mesh: Mesh) -> sbp.Plan:
    """The step under sbp."""
    step = sbp.jit(jax.value_and_grad(loss), mesh, in_types=("B", "x:S(1) y:S(2)"), out_types="B")
    return step.plan(*arguments())


def under_sbp(mesh: Mesh) -> Moved:
    """What sbp's plan moves once compiled."""
    plan = sbp_plan(mesh)
    return _moved(plan.lower().compile(), mesh, plan.cost.bytes_per_device)


def under_jit(mesh: Mesh) -> Moved:
    """What `jax.jit` moves with the same shardings of arguments and results."""
    whole = NamedSharding(mesh, PartitionSpec())
    split = NamedSharding(mesh, PartitionSpec(None, "x", "y"))
    step = jax.jit(
        jax.value_and_grad(loss), in_shardings=([whole] * len(KERNELS), split), out_shardings=whole
    )
    return _moved(step.lower(*arguments()).compile(), mesh, None)


def _moved(compiled: Any, mesh: Mesh, planned: float | None) -> Moved:
    by_kind = bytes_by_kind(collectives(compiled.as_text(), mesh.size))
    return Moved(
        by_kind=dict(by_kind),
        temporaries=compiled.memory_analysis().temp_size_in_bytes,
        planned=planned,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument(
        "--topology", default="v5e:2x4", help="a TPU topology of two dims (default v5e:2x4)"
    )
    args = parser.parse_args()
    mesh = tpu_mesh(args.topology)
    jit, ours = under_jit(mesh), under_sbp(mesh)
    for name, moved in (("jax.jit", jit), ("sbp.jit", ours)):
        kinds = ", ".join(
            f"{kind} {size / MIB:.2f} MiB" for kind, size in sorted(moved.by_kind.items())
        )
        print(
            f"{name}: {moved.total / MIB:.2f} MiB per device ({kinds}); temporaries"
            f" {moved.temporaries / MIB:.1f} MiB"
        )
    assert ours.planned is not None
    print(
        f"ratio {ours.total / jit.total:.3f} of the bytes, {ours.temporaries / jit.temporaries:.3f}"
        " of the temporaries"
    )
    print(f"the plan counts {ours.planned / MIB:.2f} MiB: XLA merges some of its messages")


if __name__ == "__main__":
    main()
