"""Reduce-scatters in the arrangements that a TPU needs give what a plain sum gives, here run on CPU
devices with a TPU's plan."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec

import sbp
from sbp.machine.mesh import mesh_spec
from sbp.plan.traffic import sends
from sbp.run.boxing import Boxing

CASES = (
    ((24, 512), 1),
    ((3, 256), 1),
    ((3, 512), 1),
    ((3, 16), 1),
    ((16, 8, 16), 0),
    ((2, 16, 5, 8), 1),
    ((1024,), 0),
    ((2048,), 0),
    ((24, 5), 0),
)


@pytest.mark.parametrize("mesh_shape", [(8,), (2, 4)], ids=["8", "2x4"])
def test_arranged_reduce_scatters(mesh_shape):
    names, n = ("x", "d")[-len(mesh_shape) :], mesh_shape[-1]
    mesh = sbp.make_mesh(mesh_shape, names)
    spec = mesh_spec(mesh, "tpu-v5e")
    cases = [(shape, dim) for shape, dim in CASES if shape[dim] >= n]
    parts = [np.arange(n * np.prod(s)).reshape(n, *s).astype(np.int32) ** 2 for s, _ in cases]
    ways = {spec.arrangements(shape, dim, n, 4)[-1] for shape, dim in cases}
    assert ways == {"as it is", "dim first", "blocks first", "rows of lanes", "exchange"}

    def scatter(*parts):
        return tuple(
            Boxing(spec).reduce_scatter(p[0], "sum", "d", n, dim, shape[dim] // n)
            for p, (shape, dim) in zip(parts, cases, strict=True)
        )

    found = jax.shard_map(
        scatter,
        mesh=mesh,
        in_specs=PartitionSpec("d"),
        out_specs=tuple(PartitionSpec(*[None] * dim, "d") for _, dim in cases),
        check_vma=False,
    )(*parts)
    for total, part in zip(found, parts, strict=True):
        np.testing.assert_array_equal(np.asarray(total), part.sum(0, dtype=np.int32))


def test_a_plan_says_what_its_sums_send():
    """A reduce-scatter in two stages, a product and a sum in a wider dtype are several collectives
    in the plan, its text and its report."""
    mesh = jax.sharding.AbstractMesh((16,), ("d",))
    aval = jax.ShapeDtypeStruct((65536, 1024), jnp.bfloat16)

    def plan(out, **options):
        f = sbp.jit(
            lambda x, y: x.T @ y,
            mesh,
            in_types=("d:S(0)", "d:S(0)"),
            out_types=out,
            hardware="tpu-v5e",
            **options,
        )
        return f.plan(aval, aval)

    def sent(plan):
        return [(s.kind, s.mesh_axes, s.runs) for s in sends(plan.program)]

    staged = plan("d:S(0)")
    assert sent(staged) == [("reduce_scatter", ("d",), 2)]
    assert "reduce_scatter[d; in stages of 4 and 4]" in str(staged)
    assert "in stages of 4 and 4" in str(staged.report())
    wide = plan("d:B", reduce_dtype=jnp.float32)
    assert sent(wide) == [("all_to_all", ("d",), 1), ("all_gather", ("d",), 1)]
    assert sum(s.bytes for s in sends(wide.program)) == wide.cost.bytes_per_device
