"""What the TPU compiler makes of a reduce-scatter, ahead of time: on TPU v3 one over all cores
becomes an all-reduce, twice the bytes.

python -m benchmarks.reduce_scatter_lowering
"""

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import topologies
from jax.sharding import Mesh, PartitionSpec

from benchmarks.gshard_bytes import MIB  # sets the ahead-of-time environment before JAX is used
from benchmarks.hlo_comm import bytes_by_kind, collectives


def measure(topology: str, shape: tuple[int, ...]) -> dict[str, float]:
    """MiB per device by collective kind of one matmul whose partial result is reduce-scattered over
    the last mesh axis."""
    devices = topologies.get_topology_desc(platform="tpu", topology_name=topology).devices
    names = ("x", "y")[: len(shape)]
    mesh = Mesh(np.array(devices).reshape(shape), names)
    axis = names[-1]
    specs = (PartitionSpec(None, axis), PartitionSpec(axis))
    step = jax.shard_map(
        lambda u, v: lax.psum_scatter(u @ v, axis, scatter_dimension=1, tiled=True),
        mesh=mesh,
        in_specs=specs,
        out_specs=PartitionSpec(None, axis),
        check_vma=False,
    )
    operands = (
        jax.ShapeDtypeStruct((4096, 4096), jnp.float32),
        jax.ShapeDtypeStruct((4096, 2048), jnp.float32),
    )
    text = jax.jit(step).lower(*operands).compile().as_text()
    assert text is not None
    return {kind: size / MIB for kind, size in bytes_by_kind(collectives(text, mesh.size)).items()}


def main() -> None:
    for topology, shapes in (
        ("v3:2x2", ((8,), (2, 4))),
        ("v3:8x8", ((128,), (2, 64))),
        ("v5e:2x4", ((8,), (2, 4))),
    ):
        for shape in shapes:
            found = ", ".join(
                f"{kind} {size:.1f} MiB" for kind, size in sorted(measure(topology, shape).items())
            )
            print(f"{topology} mesh {'x'.join(map(str, shape))}: {found}")


if __name__ == "__main__":
    main()
