"""`reduce_dtype=jnp.float32`: 16-bit parts are summed in float32 along a tensor dim; without it the
sum is the platform's own."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import sbp
from sbp.infer.accumulation import WideSum
from sbp.plan.saved import SavedPlan

MESH = jax.sharding.AbstractMesh((2, 4), ("x", "y"))
IN_TYPES = ("x:S(1) y:S(1)", "x:S(0) y:S(0)")


def product(a, b):
    return a @ b


def plan_of(
    rows=64, columns=24, out: Any = "B", mesh=MESH, dtype=jnp.bfloat16, fn=product, **options: Any
):
    a, b = jax.ShapeDtypeStruct((rows, 64), dtype), jax.ShapeDtypeStruct((64, columns), dtype)
    return sbp.jit(fn, mesh, IN_TYPES, out, "reduce", hardware="tpu-v5e", **options).plan(a, b)


def reductions(plan):
    """The kind and the way of summing of each reduction of a plan."""
    steps = [s for p in plan.program.boxes() for s in p.box.steps]
    return [(s.kind, s.wide) for s in steps if s.kind in ("all_reduce", "reduce_scatter")]


def test_the_platform_sums_unless_the_user_chooses():
    assert reductions(plan_of()) == [("all_reduce", None)]
    text = plan_of().lower().as_text()
    assert "all_reduce" in text and "all_to_all" not in text


def test_float32_sums_go_along_a_dim_for_the_same_bytes():
    native, wide = plan_of(), plan_of(reduce_dtype=jnp.float32)
    assert reductions(wide) == [("all_reduce", WideSum("float32", 0))]
    assert wide.cost.bytes_per_device == native.cost.bytes_per_device
    assert wide.cost.seconds > native.cost.seconds
    text = wide.lower().as_text()
    assert "all_to_all" in text and "all_gather" in text and "all_reduce" not in text
    assert "tensor<8x8x24xf32>" in text  # eight parts of a block of eight rows, not a flat tensor


def test_a_scattered_sum_is_in_float32_too():
    plan = plan_of(out="x:S(0) y:S(1)", reduce_dtype=jnp.float32)
    assert {kind for kind, _ in reductions(plan)} == {"reduce_scatter"}
    assert {how for _, how in reductions(plan)} == {WideSum("float32", 0), WideSum("float32", 1)}


@pytest.mark.parametrize("rows", [64, 3])
def test_the_plan_says_how_it_sums(rows):
    plan = plan_of(rows, 2 if rows == 3 else 24, reduce_dtype="float32")
    said = "; float32 along dim 0]" if rows == 64 else "; native: no dim for float32]"
    assert said in str(plan)
    saved = SavedPlan.loads(SavedPlan.of(plan.program).dumps())
    assert str(saved.program_for(plan.program.request)) == str(plan)
    assert said.strip("]; ") in str(plan.report())


def test_only_16_bit_floats_are_summed_otherwise():
    assert reductions(plan_of(dtype=jnp.float32, reduce_dtype=jnp.float32)) == [
        ("all_reduce", None)
    ]


def test_padding_is_priced():
    """Ten rows are twelve on four devices."""
    mesh = jax.sharding.AbstractMesh((1, 4), ("x", "y"))
    plan = plan_of(10, 3, mesh=mesh, reduce_dtype=jnp.float32)
    assert reductions(plan) == [("all_reduce", WideSum("float32", 0))]
    assert plan.cost.bytes_per_device == 2 * 3 / 4 * 12 * 3 * 2


def test_an_annotation_chooses_for_its_value_alone():
    def program(a, b):
        y = a @ b
        return sbp.annotate(y, "B", reduce_dtype=jnp.float32), sbp.annotate(jnp.tanh(a) @ b, "B")

    assert reductions(plan_of(out=None, fn=program)) == [
        ("all_reduce", WideSum("float32", 0)),
        ("all_reduce", None),
    ]


def test_an_annotation_chooses_for_the_cotangent_that_it_pins():
    def program(a, b):
        b = sbp.annotate(b, cotangent="B", reduce_dtype=jnp.float32)
        return jnp.sum((a @ b).astype(jnp.float32))

    a, b = (jax.ShapeDtypeStruct((64, 64), jnp.bfloat16) for _ in range(2))
    types = ("x:S(0) y:S(0)", "B")
    plan = sbp.jit(jax.grad(program, argnums=1), MESH, types, "B", boxing="reduce").plan(a, b)
    assert reductions(plan) == [("all_reduce", WideSum("float32", 0))]


def test_an_annotation_in_a_loop_chooses_for_the_value_outside():
    """The reduction is made once, ahead of the loop."""

    def program(a, b):
        y = a @ b

        def body(carry, _):
            return carry + jnp.sum(sbp.annotate(y, "B", reduce_dtype=jnp.float32)), None

        return lax.scan(body, jnp.bfloat16(0), None, length=3)[0]

    plan = plan_of(fn=program)
    assert ("all_reduce", WideSum("float32", 0)) in reductions(plan)
    assert [p.trips for p in plan.program.boxes() if p.box.steps[0].wide] == [1]


@pytest.mark.parametrize(
    "reduce_dtype", [jnp.float64, jnp.int32, jnp.complex64, jnp.float8_e5m2, "f32", 32]
)
def test_other_dtypes_are_refused(reduce_dtype):
    with pytest.raises(sbp.SbpError, match=r"unknown-option: reduce_dtype is jnp\.float32"):
        sbp.jit(product, MESH, reduce_dtype=reduce_dtype)


def test_an_annotation_needs_a_type_beside_it():
    with pytest.raises(sbp.SbpError, match="annotate needs a type"):
        sbp.annotate(jnp.zeros(3, jnp.bfloat16), reduce_dtype=jnp.float32)


def test_diff_names_the_choice():
    settings = plan_of().diff(plan_of(reduce_dtype=jnp.float32)).difference.settings
    assert [(s.kind, s.this, s.other) for s in settings] == [("reduce_dtype", None, "float32")]


def test_sums_are_those_of_float32():
    """All shapes in one program: even, uneven and scattered, over one axis and over two."""
    mesh = sbp.make_mesh((2, 4), ("x", "y"))
    rng = np.random.default_rng(0)
    a = rng.normal(size=(16, 64)).astype(jnp.bfloat16)
    bs = [rng.normal(size=(64, n)).astype(jnp.bfloat16) for n in (24, 13, 9)]
    outs = ("B", "x:B y:S(1)", "x:S(0) y:B")

    def program(a, *bs):
        return tuple(sbp.annotate(a @ b, t) for b, t in zip(bs, outs, strict=True))

    types = ("x:S(1) y:S(1)", *("x:S(0) y:S(0)" for _ in bs))
    f = sbp.jit(program, mesh, types, "B", boxing="reduce", reduce_dtype=jnp.float32)
    plan = f.plan(a, *bs)
    assert all(how is not None for _, how in reductions(plan)) and len(reductions(plan)) >= 3
    for got, b in zip(plan(a, *bs), bs, strict=True):
        products = a.astype(np.float32)[:, :, None] * b.astype(np.float32)[None]
        parts = products.reshape(16, 8, 8, -1).sum(2).astype(jnp.bfloat16).astype(np.float32)
        np.testing.assert_allclose(
            np.asarray(got, np.float32), parts.sum(1), rtol=2**-7, atol=2**-7
        )
