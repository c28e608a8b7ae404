"""A ring product on the TPU compiler: it multiplies while it sends, and never holds the operand
that goes round as a whole."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import topologies
from jax.sharding import Mesh

import sbp
from benchmarks.hlo.traffic import bytes_by_kind, collectives
from tests.run.test_collectives import assert_within_plan
from tests.run.test_shifts import ONLY_RINGS

pytestmark = pytest.mark.tpu

SIZE = 8192


def tpu_mesh(shape):
    devices = topologies.get_topology_desc(platform="tpu", topology_name="v5e:2x4").devices
    return Mesh(np.array(devices).reshape(shape), ("x", "y")[: len(shape)])


def product(mesh, types, out, rows=SIZE):
    x, y = (jax.ShapeDtypeStruct((n, SIZE), jnp.bfloat16) for n in (rows, SIZE))
    f = sbp.jit(
        lambda a, b: a @ b,
        mesh,
        in_types=types,
        out_types=out,
        budgets=ONLY_RINGS,
    )
    return f.plan(x, y)


def test_products_are_computed_while_shards_go_round():
    plan = product(
        tpu_mesh((8,)), ("x:S(0)", "x:S(1)"), "x:S(0)", rows=4 * SIZE
    )  # enough work to hide one link's transfer
    assert [o.row.kernels for o, _ in plan.program.kernels()] == [("rotate_rhs",)]
    assert_within_plan(plan, (8,))
    compiled = plan.lower().compile()
    text = compiled.as_text()
    body = next(c for c in text.split("\n\n") if "collective-permute-start(" in c)
    lines = body.splitlines()
    start, done = (
        next(k for k, line in enumerate(lines) if re.search(rf" collective-permute-{w}\(", line))
        for w in ("start", "done")
    )
    between = [
        line for line in lines[start + 1 : done] if " fusion(" in line or " convolution(" in line
    ]
    assert any("dot_general" in line for line in between), "\n".join(lines[start : done + 1])
    gathered = SIZE * SIZE * 2
    assert compiled.memory_analysis().temp_size_in_bytes < gathered


def test_summa_moves_shards_along_both_axes():
    plan = product(tpu_mesh((2, 4)), ("x:S(0) y:S(1)",) * 2, "x:S(0) y:S(1)")
    assert [o.row.kernels for o, _ in plan.program.kernels()] == [("rotate_rhs", "rotate_lhs")]
    assert_within_plan(plan, (2, 4))
    each = SIZE * SIZE * 2 / 8
    assert plan.cost.bytes_per_device == (1 + 3) * each
    compiled = plan.lower().compile()
    sent = bytes_by_kind(collectives(compiled.as_text(), 8))
    assert sent == {"collective-permute": (1 + 3) * each}
    assert compiled.memory_analysis().temp_size_in_bytes < 2 * each  # no operand is held whole
