"""What the TPU compiler makes of a reduce-scatter, ahead of time: over all devices of most slices
it becomes an all-reduce, twice the bytes; in two stages, over groups of devices, it stays what it
is.

    python -m benchmarks.reduce_scatter_lowering
"""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import topologies
from jax.sharding import Mesh, PartitionSpec

from benchmarks.gshard_bytes import MIB  # sets the ahead-of-time environment before JAX is used
from benchmarks.hlo_comm import bytes_by_kind, collectives
from sbp.machine.mesh import mesh_spec
from sbp.run.boxing import Boxing


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
    hardware = replace(mesh_spec(mesh).hardware, scatters_whole_mesh=not staged)
    boxing, n = Boxing(mesh_spec(mesh, hardware)), shape[-1]
    scattered = jax.shard_map(
        lambda x: boxing.reduce_scatter(x, "sum", names[-1], n, 0, x.shape[0] // n),
        mesh=mesh,
        in_specs=PartitionSpec(),
        out_specs=PartitionSpec(names[-1]),
        check_vma=False,
    )
    operand = jax.ShapeDtypeStruct((8192, 2048), jnp.bfloat16)
    text = jax.jit(scattered).lower(operand).compile().as_text()
    assert text is not None
    return {kind: size / MIB for kind, size in bytes_by_kind(collectives(text, mesh.size)).items()}


def main() -> None:
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
