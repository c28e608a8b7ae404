"""What the TPU compiler makes of a reduce-scatter, ahead of time: over all devices of most slices
it becomes an all-reduce, twice the bytes; in two stages, over groups of devices, it stays what it
is. Blocks that are no whole tiles make an all-reduce of it, too, unless the value is arranged for
it.

    python -m benchmarks.reduce_scatter_lowering
"""

from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import topologies
from jax.sharding import Mesh, PartitionSpec

from benchmarks.gshard_bytes import MIB  # sets the ahead-of-time environment before JAX is used
from benchmarks.hlo.schedule import step_time
from benchmarks.hlo.traffic import bytes_by_kind, collectives
from sbp.machine.hardware import Arrangement, arrangement
from sbp.machine.mesh import mesh_spec
from sbp.run.boxing import reduce_scatter, run_scatter


def measure(topology: str, shape: tuple[int, ...], *, staged: bool) -> dict[str, float]:
    """MiB per device by collective kind of 32 MiB that are reduce-scattered over the last mesh
    axis, as `sbp` runs it.

    Arguments:
        topology: a TPU topology.
        shape: the mesh over its devices.
        staged: in two stages where the axis is the whole mesh.
    """
    devices = topologies.get_topology_desc(platform="tpu", topology_name=topology).devices
    names = ("x", "y")[: len(shape)]
    mesh = Mesh(np.array(devices).reshape(shape), names)
    hardware = replace(
        mesh_spec(mesh).hardware, whole_scatter_devices=0 if staged else len(devices)
    )
    spec, n = mesh_spec(mesh, hardware), shape[-1]
    scattered = jax.shard_map(
        lambda x: reduce_scatter(x, "sum", names[-1], 0, x.shape[0] // n, spec),
        mesh=mesh,
        in_specs=PartitionSpec(),
        out_specs=PartitionSpec(names[-1]),
        check_vma=False,
    )
    operand = jax.ShapeDtypeStruct((8192, 2048), jnp.bfloat16)
    text = jax.jit(scattered).lower(operand).compile().as_text()
    assert text is not None
    return {kind: size / MIB for kind, size in bytes_by_kind(collectives(text, mesh.size)).items()}


ARRANGED = (
    ((4096, 1024), 1),
    ((4096, 512), 1),
    ((32768, 256), 1),
    ((1024, 3, 16, 64), 3),
    ((3, 16, 128, 512), 1),
    ((16, 8192), 0),
    ((262144,), 0),
)
"""Shapes of which a dim is scattered over four devices."""


def arranged(shape: tuple[int, ...], dim: int, dtype: Any, how: Arrangement) -> str:
    """What becomes of a reduce-scatter on `v5e:4x4`, in one arrangement."""
    devices = topologies.get_topology_desc(platform="tpu", topology_name="v5e:4x4").devices
    mesh = Mesh(np.array(devices).reshape(4, 4), ("x", "y"))
    groups = [[0, 1, 2, 3]]
    scattered = jax.shard_map(
        lambda x: 3 * run_scatter(2 * x, "y", dim, groups, how)[None],
        mesh=mesh,
        in_specs=PartitionSpec(),
        out_specs=PartitionSpec(("x", "y")),
        check_vma=False,
    )
    text = jax.jit(scattered).lower(jax.ShapeDtypeStruct(shape, dtype)).compile().as_text()
    assert text is not None
    found = bytes_by_kind(collectives(text, mesh.size))
    sent = ", ".join(f"{kind} {size / MIB:.2f} MiB" for kind, size in found.items())
    return f"{sent}, {step_time(text, mesh.size, 'v5e').cycles / 1e6:.3f} Mcycles"


def main() -> None:
    for shape, dim in ARRANGED:
        for dtype in (jnp.bfloat16, jnp.float32):
            ours = arrangement(shape, dim, 4, np.dtype(dtype).itemsize, is_tpu=True)
            for how in dict.fromkeys(("as it is", ours)):
                found = arranged(shape, dim, dtype, how)
                print(f"{dtype.__name__}{shape} along dim {dim}, {how}: {found}", flush=True)
    for topology, shapes in (
        ("v3:2x2", ((8,), (2, 4))),
        ("v3:8x8", ((128,), (2, 64))),
        ("v5e:2x4", ((8,), (2, 4))),
        ("v5e:4x4", ((16,), (4, 4))),
        ("v5e:8x8", ((64,),)),
        ("v6e:4x4", ((16,),)),
        ("v5p:2x2x2", ((8,),)),
        ("v5p:4x4x4", ((64,),)),
    ):
        for shape in shapes:
            for staged in (False, True) if len(shape) == 1 else (False,):
                found = ", ".join(
                    f"{kind} {size:.1f} MiB"
                    for kind, size in sorted(measure(topology, shape, staged=staged).items())
                )
                how = ", in two stages" if staged else ""
                print(f"{topology} mesh {'x'.join(map(str, shape))}{how}: {found}")


if __name__ == "__main__":
    main()
