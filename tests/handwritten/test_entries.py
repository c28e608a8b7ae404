"""Entries of `in_types` of a region that were probably meant to be others, each tried."""

import textwrap

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import sbp
from sbp.errors import OptionEdit, SourceEdit
from tests.edits import edited_text
from tests.explain.fault_programs import checked

HEAD = textwrap.dedent(
    """
    import jax, jax.numpy as jnp, sbp
    mesh = jax.sharding.AbstractMesh((2, 4), ("data", "model"))
    rows, columns = "model:S(0)", "model:S(1)"
    def gated(x, gate, up, down):
        hidden = jax.nn.silu(x @ gate) * (x @ up)
        return jax.lax.psum(hidden @ down, "model")
    {made}
    def program(x, p):
        return x + region(x, p["gate"], p["up"], p["down"])
    f32 = lambda *s: jax.ShapeDtypeStruct(s, jnp.float32)
    args = f32(8, 16), {"gate": f32(16, 32), "up": f32(16, 32), "down": f32(32, 16)}
    f = sbp.jit(program, mesh)
    report = f.check(*args)
    """
)
RIGHT = '("data:S(0)", columns, columns, rows)'


def source(types, keyword="in_types="):
    made = f'region = sbp.manual(gated, {keyword}{types}, out_types="data:S(0)")'
    return HEAD.replace("{made}", made)


@pytest.mark.parametrize(
    "types,code",
    [
        ('("data:S(0)", columns, None, rows)', "type-syntax"),
        ('("data:S(0)", columns, "B", rows)', "manual-types"),
        ('("data:S(0)", columns, columns, columns)', "manual-types"),
    ],
)
def test_an_entry_is_replaced_by_another_one(types, code):
    text = source(types)
    (found,) = checked("entries", text).found
    assert found.code == code and found.primary is not None
    assert text.splitlines()[found.primary.span.line - 1].startswith("region = ")
    after = edited_text(text, [e for e in found.helps[0].edits if isinstance(e, SourceEdit)])
    mended = checked("entries_after", after)
    assert not mended.found
    assert RIGHT in after.replace('"model:S(0)")', "rows)")
    assert mended.mark == checked("entries_meant", source(RIGHT)).mark


def test_an_array_among_the_entries_is_refused_as_what_it_is():
    checked_inside = sbp.jit(
        lambda x: sbp.manual(gated_alone, in_types=(np.ones(2),), out_types="B")(x),
        jax.sharding.AbstractMesh((2,), ("data",)),
    )
    with pytest.raises(sbp.SbpError, match=r"type-syntax: .* got array"):
        checked_inside.plan(jax.ShapeDtypeStruct((8, 16), jnp.float32))


gated_alone = lambda x: x


def test_types_by_position_are_an_option():
    (found,) = checked("entries", source('("data:S(0)", columns, None, rows)', "")).found
    (edit,) = found.helps[0].edits
    assert isinstance(edit, OptionEdit) and edit.function == "sbp.manual"
    assert edit.value == ("data:S(0)", "model:S(1)", "model:S(1)", "model:S(0)")


def test_the_error_is_of_the_kind_that_the_body_raises():
    mesh = jax.make_mesh((1,), ("model",)) if jax.device_count() < 4 else jax.make_mesh((4,), "m")
    axis = mesh.axis_names[0]

    product = lambda x, w: jax.lax.psum(x @ w, axis)

    region = sbp.manual(product, in_types=(f"{axis}:S(1)", "B"), out_types="B")
    x = jnp.ones((8, 8))
    if mesh.size == 1:
        assert jnp.allclose(sbp.jit(region, mesh)(x, x), x @ x)
        return
    with pytest.raises(TypeError, match="does not take the shards that its in_types give") as error:
        sbp.jit(region, mesh)(x, x)
    assert isinstance(error.value, sbp.SbpError) and "(8, 2), (8, 8)" in str(error.value)


def test_a_body_that_takes_no_whole_operands_raises_as_it_is():
    mesh = jax.sharding.AbstractMesh((4,), ("model",))
    region = sbp.manual(jnp.matmul, in_types=("model:S(0)", "B"), out_types="model:S(0)")
    with pytest.raises(TypeError) as error:
        sbp.jit(region, mesh).plan(jnp.ones((8, 8)), jnp.ones((4, 8)))
    assert not isinstance(error.value, sbp.SbpError)
