"""`reduce_dtype=jnp.float32`: 16-bit parts are summed in float32 along a tensor dim; without it the
sum is the platform's own. `reduce_dtype=jnp.bfloat16`: sums of float32 parts behind the casts of
the user, and only there; and `Partial.reduce` as the plan sums.

Values behind casts are compared with sums of rounded parts by NumPy. On simulated devices XLA adds
bfloat16 in float32 and rounds once, so the sums are exact.
"""

import pickle
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import sbp
from sbp.errors import OptionEdit
from sbp.infer.space import WideSum
from sbp.plan.saved import SavedPlan
from tests.same import refused

MESH = jax.sharding.AbstractMesh((2, 4), ("x", "y"))


product = lambda a, b: a @ b


def plan_of(
    rows=64, columns=24, out: Any = "B", mesh=MESH, dtype=jnp.bfloat16, fn=product, **options: Any
):
    a, b = jax.ShapeDtypeStruct((rows, 64), dtype), jax.ShapeDtypeStruct((64, columns), dtype)
    return sbp.jit(
        fn, mesh, ("x:S(1) y:S(1)", "x:S(0) y:S(0)"), out, "reduce", hardware="tpu-v5e", **options
    ).plan(a, b)


def reductions(plan):
    """The kind and the way of summing of each reduction of a plan."""
    steps = [s for p in plan.program.boxes() for s in p.box.steps]
    return [(s.kind, s.wide) for s in steps if s.kind in ("all_reduce", "reduce_scatter")]


def test_float32_sums_go_along_a_dim_for_the_same_bytes():
    native, wide = plan_of(), plan_of(reduce_dtype=jnp.float32)
    text = native.lower().as_text()
    assert reductions(native) == [("all_reduce", None)]
    assert "all_reduce" in text and "all_to_all" not in text
    assert reductions(wide) == [("all_reduce", WideSum("float32", 0))]
    assert wide.cost.bytes_per_device == native.cost.bytes_per_device
    assert wide.cost.seconds > native.cost.seconds
    text = wide.lower().as_text()
    assert "all_to_all" in text and "all_gather" in text and "all_reduce" not in text
    assert "tensor<8x8x24xf32>" in text  # eight parts of a block of eight rows, not a flat tensor


@pytest.mark.parametrize("rows", [64, 3])
def test_the_plan_says_how_it_sums(rows):
    plan = plan_of(rows, 2 if rows == 3 else 24, reduce_dtype="float32")
    said = "; float32 along dim 0]" if rows == 64 else "; native: no dim for float32]"
    assert said in str(plan)
    saved = SavedPlan.loads(SavedPlan.of(plan.program).dumps())
    assert str(saved.program_for(plan.program.request)) == str(plan)
    assert said.strip("]; ") in str(plan.report())


def test_padding_is_priced():
    """Ten rows are twelve on four devices."""
    plan = plan_of(
        10, 3, mesh=jax.sharding.AbstractMesh((1, 4), ("x", "y")), reduce_dtype=jnp.float32
    )
    assert reductions(plan) == [("all_reduce", WideSum("float32", 0))]
    assert plan.cost.bytes_per_device == 2 * 3 / 4 * 12 * 3 * 2


def annotated(a, b):
    return sbp.annotate(a @ b, "B", reduce_dtype=jnp.float32), sbp.annotate(jnp.tanh(a) @ b, "B")


@pytest.mark.parametrize(
    ("options", "kind", "ways"),
    [
        # Only 16-bit floats are summed otherwise.
        ({"dtype": jnp.float32, "reduce_dtype": jnp.float32}, "all_reduce", [None]),
        # An annotation chooses for its value alone.
        ({"out": None, "fn": annotated}, "all_reduce", [WideSum("float32", 0), None]),
        (
            {"out": "x:S(0) y:S(1)", "reduce_dtype": jnp.float32},
            "reduce_scatter",
            [WideSum("float32", 0), WideSum("float32", 1)],
        ),
    ],
)
def test_values_that_are_summed_in_float32(options, kind, ways):
    assert reductions(plan_of(**options)) == [(kind, way) for way in ways]


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

        return jax.lax.scan(body, jnp.bfloat16(0), None, length=3)[0]

    plan = plan_of(fn=program)
    assert ("all_reduce", WideSum("float32", 0)) in reductions(plan)
    assert [p.trips for p in plan.program.boxes() if p.box.steps[0].wide] == [1]


def test_sums_are_those_of_float32():
    """All shapes in one program: even, uneven and scattered, over one axis and over two."""
    mesh = sbp.make_mesh((2, 4), ("x", "y"))
    rng = np.random.default_rng(0)
    a = rng.normal(size=(16, 64)).astype(jnp.bfloat16)
    bs = [rng.normal(size=(64, n)).astype(jnp.bfloat16) for n in (24, 13, 9)]
    outs = ("B", "x:B y:S(1)", "x:S(0) y:B")
    program = lambda a, *bs: tuple(sbp.annotate(a @ b, t) for b, t in zip(bs, outs, strict=True))
    types = ("x:S(1) y:S(1)", *("x:S(0) y:S(0)" for _ in bs))
    plan = sbp.jit(program, mesh, types, "B", boxing="reduce", reduce_dtype=jnp.float32).plan(
        a, *bs
    )
    assert all(how is not None for _, how in reductions(plan)) and len(reductions(plan)) >= 3
    for got, b in zip(plan(a, *bs), bs, strict=True):
        products = a.astype(np.float32)[:, :, None] * b.astype(np.float32)[None]
        parts = products.reshape(16, 8, 8, -1).sum(2).astype(jnp.bfloat16).astype(np.float32)
        np.testing.assert_allclose(
            np.asarray(got, np.float32), parts.sum(1), rtol=2**-7, atol=2**-7
        )


# ---- sums after casts ----------------------------------------------------------------------------


BF16 = np.dtype(jnp.bfloat16)
MESHES: dict[tuple[int, ...], str] = {
    (2,): "x",
    (4,): "x",
    (8,): "x",
    (2, 4): "xy",
    (2, 2, 2): "xyz",
}


EIGHT = jax.sharding.AbstractMesh((8,), ("x",))
DEVICES = sbp.make_mesh((8,), ("x",))
WIDE = [jax.ShapeDtypeStruct((512, 512), jnp.float32)] * 2
SMALL = [jax.ShapeDtypeStruct((64, 64), jnp.float32)] * 2
PRODUCT: dict[str, Any] = {"in_types": ("x:S(1)", "x:S(0)"), "out_types": "B"}


mesh_of = lambda sizes: sbp.make_mesh(sizes, tuple(MESHES[sizes]))


def type_of(sizes: tuple[int, ...], atom: str) -> str:
    """A type with one atom on all axes."""
    return " ".join(f"{axis}:{atom}" for axis in MESHES[sizes])


def whole_numbers(seed: int, *shape: int) -> np.ndarray:
    """Products of these, and sums of products, are exact in float32 and not in bfloat16."""
    return np.random.default_rng(seed).integers(-24, 25, shape).astype(np.float32)


def parts_of(a: np.ndarray, b: np.ndarray, n: int) -> np.ndarray:
    """The products of the blocks of the contracted dim."""
    blocks = np.split(np.arange(a.shape[1]), n)
    return np.stack([a[:, k].astype(np.float64) @ b[k].astype(np.float64) for k in blocks])


def rounding_nodes(plan: Any) -> int:
    """The casts that round parts."""
    return sum("rounded_parts" in row.kernels for row in plan.program.typing.rows.values())


def summed_dtypes(plan: Any) -> list[tuple[str, str]]:
    """Kind and dtype of each sum over devices."""
    graph = plan.program.graph
    return [
        (step.kind, str(graph.avals[planned.box.target.value].dtype))
        for planned in plan.program.boxes()
        for step in planned.box.steps
        if step.kind in ("all_reduce", "reduce_scatter")
    ]


cast_product = lambda a, b: (a @ b).astype(jnp.bfloat16)


@pytest.mark.parametrize("sizes", MESHES, ids=str)
@pytest.mark.parametrize("columns", [24, 5])
def test_parts_are_rounded_and_then_summed(sizes: tuple[int, ...], columns: int):
    """An even and an uneven number of columns, of which the plan may scatter the sum."""
    mesh, n = mesh_of(sizes), int(np.prod(sizes))
    a, b = whole_numbers(0, 9, 64), whole_numbers(1, 64, columns)
    types = (type_of(sizes, "S(1)"), type_of(sizes, "S(0)"))
    options: dict[str, Any] = {"in_types": types, "out_types": "B", "boxing": "reduce"}
    f = sbp.jit(cast_product, mesh, reduce_dtype=jnp.bfloat16, **options)
    # The parts are rounded first, and their sum is rounded once more.
    want = parts_of(a, b, n).astype(BF16).astype(np.float64).sum(0).astype(BF16)
    got = np.asarray(f(a, b))
    assert got.dtype == BF16
    if len(sizes) == 1:
        np.testing.assert_array_equal(got, want)
    else:  # a sum over one axis after the other rounds between
        np.testing.assert_allclose(got.astype(float), want.astype(float), rtol=2**-6, atol=16)
    before = sbp.jit(cast_product, mesh, **options)
    np.testing.assert_array_equal(before(a, b), (a @ b).astype(BF16))
    assert (want != (a @ b).astype(BF16)).any()  # the test tells the two apart
    assert rounding_nodes(f.plan(a, b)) == 1 and rounding_nodes(before.plan(a, b)) == 0
    assert {d for _, d in summed_dtypes(f.plan(a, b))} == {"bfloat16"}
    assert {d for _, d in summed_dtypes(before.plan(a, b))} == {"float32"}


def gradient_step(w: Any, x: Any) -> Any:
    """A training step whose gradients are cast for the optimiser."""
    g = jax.grad(lambda w: jnp.sum(jnp.tanh(x @ w["in"]) @ w["out"]))(w)
    return jax.tree.map(lambda w, g: w - 0.125 * g.astype(jnp.bfloat16).astype(w.dtype), w, g)


def microbatches(w: Any, x: Any) -> Any:
    """Gradients that a loop adds in float32; one cast after it."""

    def body(total: Any, rows: Any) -> tuple[Any, None]:
        g = jax.grad(lambda w: jnp.sum(jnp.tanh(rows @ w["in"]) @ w["out"]))(w)
        return jax.tree.map(jnp.add, total, g), None

    rows = x.reshape(-1, 2, x.shape[1])
    total, _ = jax.lax.scan(body, jax.tree.map(jnp.zeros_like, w), rows.swapaxes(0, 1))
    return jax.tree.map(lambda g: g.astype(jnp.bfloat16), total)


def activations(w: Any, x: Any) -> Any:
    """Megatron's layer: bfloat16 operands, products in float32, results in bfloat16."""
    h, low = x.astype(jnp.bfloat16), jax.tree.map(lambda w: w.astype(jnp.bfloat16), w)
    h = jnp.tanh(sbp.split(jnp.dot(h, low["in"]), 1, "x"))
    y = jnp.dot(h, low["out"], preferred_element_type=jnp.float32)
    return jnp.tanh(y.astype(jnp.bfloat16))


@pytest.mark.parametrize(
    ("program", "types"),
    [(gradient_step, ("B", "x:S(0)")), (microbatches, ("B", "x:S(0)")), (activations, ("B", "B"))],
    ids=lambda p: getattr(p, "__name__", ""),
)
def test_programs_send_half_and_compute_the_same(program, types: Any):
    mesh = sbp.make_mesh((2, 4), ("y", "x"))
    keys = jax.random.split(jax.random.key(0), 3)
    w = {"in": jax.random.normal(keys[0], (16, 64)), "out": jax.random.normal(keys[1], (64, 8))}
    x = jax.random.normal(keys[2], (32, 16))
    options: dict[str, Any] = {"in_types": types, "out_types": "B", "hardware": "tpu-v5e"}
    narrow = sbp.jit(program, mesh, reduce_dtype=jnp.bfloat16, boxing="reduce", **options)
    plain = sbp.jit(program, mesh, boxing="reduce", **options)
    assert 2 * narrow.plan(w, x).cost.bytes_per_device == plain.plan(w, x).cost.bytes_per_device
    assert narrow.plan(w, x).cost.seconds < plain.plan(w, x).cost.seconds
    assert rounding_nodes(narrow.plan(w, x)) >= 1 and rounding_nodes(plain.plan(w, x)) == 0
    want = jax.tree.map(lambda y: np.asarray(y, np.float32), program(w, x))
    got = jax.tree.map(lambda y: np.asarray(y, np.float32), narrow(w, x))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=3e-2, atol=6e-2), got, want)


@pytest.mark.parametrize("reduce_dtype", [None, "float32", "float16"])
@pytest.mark.parametrize("boxing", ["auto", "reduce"])
def test_no_other_choice_rounds_parts(reduce_dtype: str | None, boxing: str):
    """Also where rounding first would halve what is sent."""
    options: dict[str, Any] = {"hardware": "tpu-v5e", "boxing": boxing}
    for out in ("B", "x:S(0)", "x:P(sum)"):
        f = sbp.jit(
            cast_product, EIGHT, ("x:S(1)", "x:S(0)"), out, reduce_dtype=reduce_dtype, **options
        )
        assert rounding_nodes(f.plan(*WIDE)) == 0


def test_a_sum_without_a_cast_stays_in_its_dtype():
    """`reduce_dtype` moves a sum behind a cast that the user wrote, and adds none."""
    a, b = whole_numbers(2, 8, 64), whole_numbers(3, 64, 8)
    f = sbp.jit(jnp.matmul, DEVICES, reduce_dtype=jnp.bfloat16, **PRODUCT)
    assert str(f.plan(a, b)) == str(sbp.jit(jnp.matmul, DEVICES, **PRODUCT).plan(a, b))
    np.testing.assert_array_equal(f(a, b), a @ b)


@pytest.mark.parametrize(("annotated", "of_program"), [("bfloat16", None), ("float32", "bfloat16")])
def test_annotations_choose_for_what_reaches_them(annotated: str, of_program: str | None):
    """One of two casts may round; and an annotation with float32 overrides the program."""

    def program(a: Any, b: Any) -> Any:
        first = sbp.annotate(cast_product(a, b).T, "B", reduce_dtype=annotated)
        return first, sbp.annotate(cast_product(jnp.tanh(a), b), "B")

    f = sbp.jit(
        program,
        EIGHT,
        ("x:S(1)", "x:S(0)"),
        reduce_dtype=of_program,
        hardware="tpu-v5e",
        boxing="reduce",
    )
    assert rounding_nodes(f.plan(*WIDE)) == 1
    assert sorted(d for _, d in summed_dtypes(f.plan(*WIDE))) == ["bfloat16", "float32"]


def test_bfloat16_accumulates_what_is_narrower():
    """Parts of 8 bits are added in bfloat16, as 16-bit parts are in float32."""
    small = jnp.float8_e5m2
    parts = jnp.asarray([16.0] + [1.0] * 7, small)[:, None] * jnp.ones((1, 16), small)
    value = sbp.Partial(parts, sbp.parse("x:P(sum)"), jnp.bfloat16)
    f = sbp.jit(lambda x: x, DEVICES, ("x:P(sum)",), "B", reduce_dtype=jnp.bfloat16)
    assert "; bfloat16 along dim 0]" in str(f.plan(value))
    want = np.asarray(parts, np.float32).sum(0).astype(jnp.dtype(small))
    np.testing.assert_array_equal(np.asarray(f(value)), want)
    np.testing.assert_array_equal(np.asarray(value.reduce()), want)


def test_the_choice_is_saved_with_the_plan(tmp_path: Any):
    a, b = whole_numbers(4, 8, 64), whole_numbers(5, 64, 8)
    f = sbp.jit(cast_product, DEVICES, reduce_dtype=jnp.bfloat16, **PRODUCT)
    plan = f.plan(a, b)
    plan.save(tmp_path / "plan")
    again = sbp.jit(
        cast_product, DEVICES, reduce_dtype="bfloat16", plan=tmp_path / "plan", **PRODUCT
    )
    assert str(again.plan(a, b)) == str(plan) and rounding_nodes(again.plan(a, b)) == 1
    np.testing.assert_array_equal(again(a, b), f(a, b))
    refused(
        "reduce_dtype", sbp.jit(cast_product, DEVICES, plan=tmp_path / "plan", **PRODUCT).plan, a, b
    )


def test_the_report_counts_the_casts_of_parts():
    options: dict[str, Any] = {"hardware": "tpu-v5e", **PRODUCT}
    plan = sbp.jit(cast_product, EIGHT, reduce_dtype=jnp.bfloat16, **options).plan(*WIDE)
    assert "convert_element_type<x=rounded_parts>" in str(plan)
    said = "1 cast of parts before their sum (`reduce_dtype`)"
    assert said in " ".join(str(plan.report()).split())
    plain = sbp.jit(cast_product, EIGHT, **options).plan(*WIDE)
    assert "parts before their sum" not in str(plain.report())


def test_a_help_names_the_choice():
    """A partial value that is pinned so before and after the cast, where nothing may move."""
    pinned = lambda a, b: sbp.partial(sbp.partial(a @ b, "x").astype(jnp.bfloat16), "x")
    options: dict[str, Any] = {"in_types": ("x:S(1)", "x:S(0)"), "boxing": "explicit"}
    (fault,) = sbp.jit(pinned, EIGHT, **options).check(*SMALL).diagnostics
    assert any("only with reduce_dtype=jnp.bfloat16" in row.remark for row in fault.rows)
    (help_,) = [h for h in fault.helps if "reduce_dtype" in h.text]
    (edit,) = help_.edits
    assert isinstance(edit, OptionEdit)
    chosen = sbp.jit(pinned, EIGHT, **options, **{edit.option: edit.value})
    assert chosen.plan(*SMALL).cost.bytes_per_device == help_.bytes_per_device
    assert rounding_nodes(chosen.plan(*SMALL)) == 1


def test_why_a_sum_stands_before_a_cast():

    def program(a: Any, b: Any) -> Any:
        y = a @ b
        return y.astype(jnp.bfloat16)

    f = sbp.jit(program, EIGHT, ("x:S(1)", "x:S(0)"), "B", hardware="tpu-v5e")
    text = " ".join(str(f.plan(*SMALL).why("y")).split())
    assert "so the sum comes first (reduce_dtype=jnp.bfloat16 allows it to come after)" in text


# ---- Partial -------------------------------------------------------------------------------------


@pytest.mark.parametrize("sizes", MESHES, ids=str)
@pytest.mark.parametrize("reduce_dtype", [None, "float32", "bfloat16"])
def test_partial_reduces_as_the_plan_does(sizes: tuple[int, ...], reduce_dtype: str | None):
    mesh, n = mesh_of(sizes), int(np.prod(sizes))
    t = sbp.parse(type_of(sizes, "P(sum)"))
    # One part of 256 and n - 1 of 1: 256 + 1 is 256 in bfloat16.
    parts = np.repeat(np.array([256] + [1] * (n - 1), BF16)[:, None], 16, axis=1)
    given = sbp.Partial(parts.reshape(*sizes, 16), t, reduce_dtype)
    summed = sbp.jit(lambda x: x, mesh, (t,), "B", reduce_dtype=reduce_dtype)(given)
    kept = sbp.jit(lambda x: x, mesh, (t,), t, reduce_dtype=reduce_dtype)(given)
    assert isinstance(kept, sbp.Partial) and kept.reduce_dtype == reduce_dtype
    np.testing.assert_array_equal(np.asarray(kept.reduce()), np.asarray(summed))
    want = np.asarray(255 + n, np.float32).astype(BF16)
    assert (np.asarray(kept.reduce()) == want).all() and (np.asarray(given.reduce()) == want).all()
    assert kept.reduce().sharding.is_equivalent_to(
        jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec()), 1
    )
    assert (np.asarray(jax.jit(lambda p: p.reduce())(given)) == want).all()


@pytest.mark.parametrize("monoid", ["sum", "max", "min", "prod"])
@pytest.mark.parametrize("dtype", [np.float32, jnp.bfloat16, np.int32])
def test_partial_on_a_mesh_with_other_axes(monoid: str, dtype: Any):
    """P on one axis, S on another one, and an axis of size 1."""
    mesh = sbp.make_mesh((2, 1, 4), ("x", "one", "y"))
    t = sbp.parse(f"x:P({monoid}) one:P({monoid}) y:S(1)")
    parts = np.random.default_rng(6).integers(1, 9, (2, 1, 3, 8)).astype(dtype)
    out = sbp.jit(lambda x: x, mesh, (t,), t)(sbp.Partial(parts, t))
    reduce = {"sum": np.sum, "max": np.max, "min": np.min, "prod": np.prod}[monoid]
    want = reduce(np.asarray(parts, np.float32), axis=(0, 1))
    np.testing.assert_array_equal(np.asarray(out.reduce(), np.float32), want)
    assert out.reduce().sharding.is_equivalent_to(
        jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec(None, "y")), 2
    )


def test_partial_keeps_its_choice():
    value = sbp.Partial(jnp.ones((2, 4), jnp.bfloat16), sbp.parse("x:P(sum)"), "float32")
    assert repr(value) == "Partial((2, 4), x:P(sum), reduce_dtype=float32)"
    for again in (jax.tree.map(lambda x: x, value), pickle.loads(pickle.dumps(value))):
        assert again.reduce_dtype == "float32" and again.type == value.type
    plain = sbp.Partial(value.parts, value.type)
    assert repr(plain) == "Partial((2, 4), x:P(sum))"
    assert jax.tree.structure(plain) != jax.tree.structure(value)


def test_a_partial_output_of_an_annotation_has_its_choice():
    program = lambda a, b: (sbp.annotate(a @ b, "x:P(sum)", reduce_dtype=jnp.float32), (a + 1) @ b)
    a, b = (whole_numbers(s, 8, 8).astype(BF16) for s in (7, 8))
    first, second = sbp.jit(program, DEVICES, ("x:S(1)", "x:S(0)"), ("x:P(sum)", "x:P(sum)"))(a, b)
    assert first.reduce_dtype == "float32" and second.reduce_dtype is None
