"""Products of few rows: what they compute, and what they wait for."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AbstractMesh, PartitionSpec

import sbp
from sbp.infer.cost import row_seconds
from sbp.infer.memory_shares import MemoryShares
from sbp.infer.rows import NdRow
from sbp.machine.table import HARDWARE

V5E = HARDWARE["tpu-v5e"]
MESH = AbstractMesh((4,), ("t",))
BF16 = jnp.bfloat16


def planned(fn, *args, types=None, hardware=V5E, mesh=MESH):
    types = types or (PartitionSpec(),) * len(args)
    return sbp.jit(fn, mesh, in_types=types, hardware=hardware).plan(*args).program


def alone(fn, *shapes, dtype=BF16, hardware=V5E, shares=None):
    """Seconds of a program of one operation on one device."""
    mesh = AbstractMesh((1,), ("t",))
    args = [jax.ShapeDtypeStruct(s, dtype) for s in shapes]
    request = planned(fn, *args, hardware=hardware, mesh=mesh).typing.request
    (node,) = request.graph.nodes
    row = NdRow(tuple((0,) for _ in node.inputs), ((0,),))
    return row_seconds(request.graph, node, row, request.mesh, shares or request.memory_shares)


def read(size):
    return size / V5E.hbm_bytes_per_second


def test_few_rows_take_as_long_as_product_rows():
    hidden = MemoryShares(waited={0: 0.0, 1: 0.0})
    times = {m: alone(jnp.matmul, (m, 2048), (2048, 8192), shares=hidden) for m in (2, 16, 48, 96)}
    assert times[2] == times[16] == times[48] == 2 * 48 * 2048 * 8192 / V5E.flops_per_second
    assert times[96] == pytest.approx(2 * times[48])
    few = alone(jnp.matmul, (8192, 2048), (2048, 16), shares=hidden)
    assert few == pytest.approx(times[16])


def test_a_single_row_runs_on_vector_units():
    assert V5E.vector_flops_per_second is not None
    rate = V5E.vector_flops_per_second
    for shapes in (((2048,), (2048, 8192)), ((1, 2048), (2048, 8192)), ((8192, 2048), (2048,))):
        assert alone(jnp.matmul, *shapes) == 2 * 2048 * 8192 / rate
    plain = dataclasses.replace(V5E, vector_flops_per_second=None, fast_memory_bytes=0)
    size = 2 * (2048 + 2048 * 8192 + 8192)
    assert alone(jnp.matmul, (2048,), (2048, 8192), hardware=plain) == pytest.approx(read(size))


def test_reading_is_waited_for_where_nothing_hides_it():
    size = 2 * (16 * 2048 + 2048 * 8192 + 16 * 8192)
    assert alone(jnp.matmul, (16, 2048), (2048, 8192)) == pytest.approx(read(size))


def test_weights_beyond_the_fast_memory_are_read_by_the_product():
    hidden = MemoryShares(waited={0: 0.0, 1: 0.0})
    small = dataclasses.replace(V5E, fast_memory_bytes=2**25 - 1)
    found = alone(jnp.matmul, (16, 2048), (2048, 8192), hardware=small, shares=hidden)
    assert found == pytest.approx(read(2**25 + 2 * 16 * 8192))


def attended_then_projected(q, cache, x, w):
    """A product of single rows, which keeps the device busy, and weights that wait for nothing."""
    scores = jnp.einsum("bq,bsq->bs", q, cache)
    return scores, jnp.einsum("bd,vd->bv", x, w, preferred_element_type=jnp.float32)


SHAPES = tuple(
    jax.ShapeDtypeStruct(s, BF16) for s in ((64, 128), (64, 8192, 128), (64, 2048), (32768, 2048))
)


def test_other_work_hides_the_reading_of_weights():
    busy = planned(attended_then_projected, *SHAPES).typing.request
    waited = busy.memory_shares.waited[busy.graph.inputs[3]]
    reads = read(sum(2 * s.size for s in SHAPES))
    assert V5E.vector_flops_per_second is not None
    rows = 2 * 64 * 8192 * 128 / V5E.vector_flops_per_second
    idle = (rows - read(2 * (64 * 128 + 64 * 8192 * 128 + 64 * 8192))) / 4
    assert idle < reads
    assert waited == pytest.approx(1 - idle / reads)
    split = planned(
        attended_then_projected,
        *SHAPES,
        types=(
            PartitionSpec("t"),
            PartitionSpec("t"),
            PartitionSpec("t"),
            PartitionSpec("t"),
        ),
    ).typing.request
    assert max(split.memory_shares.waited.values()) < waited
    cpu = planned(attended_then_projected, *SHAPES, hardware=HARDWARE["cpu"]).typing.request
    assert not cpu.memory_shares.waited


def decoder(hardware):
    """A step of decoding: attention to a cache, then the table of tokens."""

    def fn(q, cache, x, table):
        scores = jnp.einsum("bhq,bshq->bhs", q, cache, preferred_element_type=jnp.float32)
        logits = jnp.einsum("bd,vd->bv", x, table, preferred_element_type=jnp.float32)
        return jnp.sum(scores, (1, 2)), jnp.argmax(logits, -1)

    args = [
        jax.ShapeDtypeStruct(s, BF16)
        for s in ((64, 16, 128), (64, 8192, 16, 128), (64, 2048), (32768, 2048))
    ]
    types = (
        PartitionSpec("d", "t"),
        PartitionSpec("d", None, "t"),
        PartitionSpec("d"),
        PartitionSpec("t"),
    )
    mesh = AbstractMesh((4, 4), ("d", "t"))
    plan = sbp.jit(fn, mesh, in_types=types, out_types=PartitionSpec("d"), hardware=hardware)
    return plan.plan(*args)


def test_a_decoder_does_not_split_features_to_read_fewer_weights():
    # The winners of the parts of the table, nothing else.
    assert decoder(V5E).cost.bytes_per_device < 2**14
    # Without fast memory the same saving is real, and worth a reduce-scatter of the logits.
    slow = dataclasses.replace(V5E, fast_memory_bytes=0, vector_flops_per_second=None)
    assert decoder(slow).cost.bytes_per_device > 2**20
