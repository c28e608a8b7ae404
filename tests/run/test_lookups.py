"""Tables are looked up before they are cast. The values are those of one device, bit by bit."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import sbp
from sbp.run.interpret import late_casts


def looked_up(table, tokens):
    return table.astype(jnp.bfloat16)[tokens] * 2


def looked_up_and_multiplied(table, tokens):
    cast = table.astype(jnp.bfloat16)
    return cast[tokens] @ cast.T


@pytest.mark.parametrize("sizes", [(2,), (8,), (2, 4), (2, 2, 2)], ids=str)
@pytest.mark.parametrize("atom", ["S(0)", "S(1)", "B"])
def test_values(sizes, atom):
    names = "xyz"[: len(sizes)]
    pins = dict.fromkeys(names, sbp.S(int(atom[2])) if atom != "B" else sbp.B)
    f = sbp.jit(
        lambda table, tokens: looked_up(sbp.annotate(table, **pins), tokens),
        sbp.make_mesh(sizes, tuple(names)),
    )
    rng = np.random.default_rng(0)
    table = rng.normal(size=(67, 17)).astype(np.float32)
    tokens = np.array([[0, 66, 5], [-1, 70, 66]], np.int32)  # the last row, and outside
    got = f(table, tokens)
    want = jax.jit(looked_up)(table, tokens)
    np.testing.assert_array_equal(
        np.asarray(got).astype(np.float32), np.asarray(want).astype(np.float32)
    )


@pytest.mark.parametrize(
    ("fn", "count", "late"),
    [(looked_up, 8, 1), (looked_up, 4096, 0), (looked_up_and_multiplied, 8, 0)],
    ids=["few", "many", "also_multiplied"],
)
def test_casts_of_few_rows_are_late(fn, count, late):
    """With more lookups than rows, and with another reader, the table is cast."""
    f = sbp.jit(fn, jax.sharding.AbstractMesh((1,), ("x",)))
    table = jax.ShapeDtypeStruct((512, 16), "float32")
    program = f.plan(table, jax.ShapeDtypeStruct((count,), "int32")).program
    assert len(late_casts(program.graph, program.block, program.mesh.sizes)) == late


def test_the_program_casts_the_rows():
    f = sbp.jit(looked_up, sbp.make_mesh((1,), ("x",)))
    table = jax.ShapeDtypeStruct((512, 16), "float32")
    text = f.plan(table, jax.ShapeDtypeStruct((8,), "int32")).lower().as_text()
    assert re.search(r"convert.*tensor<8x16xf32>\) -> tensor<8x16xbf16>", text)
    assert not re.search(r"tensor<512x16xf32>\) -> tensor<512x16xbf16>", text)
