"""A hand-written region inside an auto program gives the values and gradients of the plain program.
sbp refuses false claims of a region, and says which claims it does not check. It replaces an entry
of `in_types` if another entry was probably intended."""

import re
import textwrap
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import PartitionSpec

import sbp
from benchmarks.fault_suite import checked
from sbp import B, P, S
from sbp.errors import OptionEdit, SourceEdit
from tests.edits import edited_text
from tests.same import refused

ONE, TWO = (("model", 8),), (("data", 2), ("model", 4))
MESHES = [ONE, TWO]


mesh_of = lambda axes: sbp.make_mesh([n for _, n in axes], [name for name, _ in axes])


def arrays(*shapes: tuple[int, ...]) -> list[Any]:
    keys = jax.random.split(jax.random.key(0), len(shapes))
    return [jax.random.normal(k, s) for k, s in zip(keys, shapes, strict=True)]


def assert_close(got: Any, want: Any) -> None:
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(np.asarray(a), np.asarray(b), rtol=2e-5, atol=2e-5),
        got,
        want,
    )


@pytest.fixture(params=MESHES, ids=["8", "2x4"])
def mesh(request: pytest.FixtureRequest) -> Any:
    return mesh_of(request.param)


def kinds(plan: Any) -> list[str]:
    return [step.kind for box in plan.program.boxes() for step in box.box.steps if step.bytes_sent]


FFN = ("B", "model:S(1)", "model:S(0)")


def ffn(x: Any, w: Any, v: Any) -> Any:
    """A Megatron feed-forward layer: the reduction is written by hand."""
    return lax.psum(jnp.tanh(x @ w) @ v, "model")


plain_ffn = lambda x, w, v: jnp.tanh(x @ w) @ v


total = lambda fn: lambda *args: jnp.sum(jnp.sin(fn(*args)))


def assert_same(program: Any, plain: Any, mesh: Any, args: Any, numbers: Any) -> None:
    """Both programs have the same values, and the same gradients by the arguments with these
    numbers."""
    assert_close(sbp.jit(program, mesh)(*args), plain(*args))
    gradient, want = (jax.grad(total(f), numbers) for f in (program, plain))
    assert_close(sbp.jit(gradient, mesh)(*args), want(*args))


# ---- values and gradients -----------------------------------------------------------------------


def test_gather_inside_an_auto_region(mesh: Any):
    """Checklist S4: GShard's manual Gather; the embedding table is split by rows, each device looks
    up its own."""

    def lookup(table: Any, ids: Any) -> Any:
        ids = ids - lax.axis_index("model") * table.shape[0]
        here = (ids >= 0) & (ids < table.shape[0])
        return jnp.where(here[..., None], table[jnp.clip(ids, 0, table.shape[0] - 1)], 0)

    gather = sbp.manual(
        lambda t, i: lax.psum(lookup(t, i), "model"), in_types=("model:S(0)", "B"), out_types="B"
    )

    program = lambda take: lambda table, ids, w: jax.nn.relu(take(table * 2, ids) @ w)
    table, w = arrays((24, 16), (16, 8))
    args = table, jnp.arange(10).reshape(2, 5) * 7 % 24, w
    assert_same(program(gather), program(lambda t, i: t[i]), mesh, args, (0, 2))


def test_megatron_ffn_and_its_gradient(mesh: Any):
    g = sbp.manual(ffn, in_types=FFN, out_types="B")
    assert_same(g, plain_ffn, mesh, arrays((8, 16), (16, 32), (32, 16)), (0, 1, 2))


def test_hand_written_collectives_are_priced():
    """A ring all-reduce of the result: 2 x 3/4 of 8 x 16 floats, as in the compiled program."""
    x, w, v = arrays((8, 16), (16, 32), (32, 16))
    f = sbp.jit(
        sbp.manual(ffn, in_types=FFN, out_types="B"), mesh_of(TWO), in_types=FFN, out_types="B"
    )
    plan = f.plan(x, w, v)
    assert plan.cost.bytes_per_device == 2 * 3 / 4 * 8 * 16 * 4
    assert plan.lower().compile().as_text().count(" all-reduce(") == 1


def test_data_parallel_gradient_of_a_b_operand_is_partial():
    """A region over the batch: the weight is B, so its gradient leaves the region P and is reduced
    once, outside."""
    x, w = arrays((8, 16), (16, 4))
    g = sbp.manual(
        lambda x, w: jnp.tanh(x @ w), in_types=("data:S(0) model:B", "B"), out_types="data:S(0)"
    )
    types = ("data:S(0)", "B")
    f = sbp.jit(jax.grad(total(g), 1), mesh_of(TWO), in_types=types, out_types="B")
    assert kinds(f.plan(x, w)) in (["all_reduce"], ["reduce_scatter", "all_gather"])
    assert_close(f(x, w), jax.grad(total(lambda x, w: jnp.tanh(x @ w)), 1)(x, w))


def test_partial_results_are_reduced_once(mesh: Any):
    """Two regions return P. sbp reduces their sum in one collective, at the operation that needs
    the whole value."""
    g = sbp.manual(
        lambda x, w: x @ w, in_types=("model:S(1)", "model:S(0)"), out_types="model:P(sum)"
    )

    program = lambda mm: lambda x, w, v: jnp.tanh(mm(x, w) + mm(x, v))
    x, w, v = arrays((8, 64), (64, 16), (64, 16))
    f = sbp.jit(
        program(g), mesh, in_types=("model:S(1)", "model:S(0)", "model:S(0)"), out_types="B"
    )
    assert kinds(f.plan(x, w, v)) in (["all_reduce"], ["reduce_scatter", "all_gather"])
    assert_close(f(x, w, v), program(jnp.matmul)(x, w, v))
    assert_same(program(g), program(jnp.matmul), mesh, (x, w, v), (0, 1, 2))


def test_partial_operands_come_as_they_are(mesh: Any):
    """A P operand enters the region without a collective, and the region reduces it."""
    g = sbp.manual(lambda h: jnp.tanh(lax.psum(h, "model")), in_types="model:P(sum)", out_types="B")
    x, w = arrays((8, 64), (64, 16))
    f = sbp.jit(lambda x, w: g(x @ w), mesh, in_types=("model:S(1)", "model:S(0)"), out_types="B")
    assert kinds(f.plan(x, w)) == []
    assert_close(f(x, w), jnp.tanh(x @ w))
    assert_same(lambda x, w: g(x @ w), lambda x, w: jnp.tanh(x @ w), mesh, (x, w), (0, 1))


@pytest.mark.parametrize("monoid", ["max", "min"])
def test_extrema_in_and_out(monoid: str):
    local, reduce = (jnp.max, lax.pmax) if monoid == "max" else (jnp.min, lax.pmin)
    out = sbp.manual(lambda x: local(x, 1), in_types="model:S(1)", out_types=f"model:P({monoid})")
    inn = sbp.manual(lambda x: reduce(x, "model") * 2, in_types=f"model:P({monoid})", out_types="B")
    (x,) = arrays((8, 64))
    assert_close(sbp.jit(lambda x: inn(out(x)), mesh_of(TWO))(x), 2 * local(x, 1))


def test_bits_and_products_out():
    x = jnp.arange(1, 17, dtype=jnp.int32).reshape(16)
    g = sbp.manual(
        lambda x: (jnp.prod(x % 5 + 1), jnp.any(x == 7), jnp.all(x > 3)),
        in_types="model:S(0)",
        out_types=("model:P(prod)", "model:P(or)", "model:P(and)"),
    )
    want = (jnp.prod(x % 5 + 1), jnp.array(True), jnp.array(False))
    jax.tree.map(np.testing.assert_array_equal, sbp.jit(g, mesh_of(ONE))(x), want)


def test_in_scan_under_vmap_and_with_pytrees():
    mesh = mesh_of(TWO)
    g = sbp.manual(
        lambda p, x: {"y": lax.psum(x @ p["w"], "model") + p["b"]},
        in_types=({"w": "model:S(0)", "b": "B"}, "model:S(1)"),
        out_types="B",
    )

    def program(layer: Any) -> Any:
        def step(x: Any, p: Any) -> Any:
            y = jnp.tanh(jax.vmap(layer, (None, 0))(p, x)["y"])
            return y, y.sum()

        return lambda layers, x: lax.scan(step, x, layers)

    w, b, x = arrays((3, 16, 16), (3, 16), (2, 8, 16))
    args = {"w": w / 4, "b": b}, x
    plain = program(lambda p, x: {"y": x @ p["w"] + p["b"]})
    assert_close(sbp.jit(program(g), mesh)(*args), plain(*args))
    assert_same(lambda *a: program(g)(*a)[0], lambda *a: plain(*a)[0], mesh, args, 0)


def test_arrays_closed_over_are_b():
    def program(x: Any, w: Any) -> Any:
        w = w * 2
        return sbp.manual(lambda x: x @ w + jnp.ones(16), "model:S(0)", "model:S(0)")(x)

    assert_same(
        program, (lambda x, w: x @ (w * 2) + 1.0), mesh_of(TWO), arrays((8, 16), (16, 16)), (0, 1)
    )


def test_collectives_of_all_kinds():
    """All of them over one axis, a gather over two; random keys and integers as operands."""

    def body(key: Any, x: Any) -> Any:
        n = lax.axis_size("model")
        ring = [(k, (k + 1) % n) for k in range(n)]
        x = lax.ppermute(lax.ppermute(x, "model", ring), "model", [(b, a) for a, b in ring])
        x = lax.all_to_all(lax.all_to_all(x, "model", 0, 1, tiled=True), "model", 1, 0, tiled=True)
        whole = lax.all_gather(x, ("data", "model"), axis=0, tiled=True)
        part = lax.psum_scatter(whole, ("data", "model"), scatter_dimension=0, tiled=True) / (2 * n)
        return whole, part, jax.random.normal(key, (3,))

    (x,) = arrays((64, 8))
    key = jax.random.key(3)
    g = sbp.manual(
        body, in_types=("B", "data:S(0) model:S(0)"), out_types=("B", "data:S(0) model:S(0)", "B")
    )
    assert_close(sbp.jit(g, mesh_of(TWO))(key, x), (x, x, jax.random.normal(key, (3,))))


def test_several_meshes_one_traced_function():
    """The body of the scan is one function. JAX's trace caches do not give its region on one mesh
    to a program on another mesh."""
    g = sbp.manual(
        lambda x: lax.psum(x.sum(0, keepdims=True), "model") + 0 * x,
        in_types="model:S(0)",
        out_types="model:S(0)",
    )

    step = lambda x, _: (g(x), None)

    program = jax.jit(lambda x: lax.scan(step, x, None, length=2)[0])
    (x,) = arrays((16, 4))
    want = jnp.broadcast_to(16 * x.sum(0, keepdims=True), x.shape)
    for axes in MESHES:
        np.testing.assert_allclose(sbp.jit(program, mesh_of(axes))(x), want, rtol=1e-5, atol=1e-4)
        np.testing.assert_allclose(program(x), want, rtol=1e-5, atol=1e-4)


# ---- uneven dims, and outside sbp.jit -----------------------------------------------------------


def test_uneven_dims_need_padding(mesh: Any):
    (x,) = arrays((15, 4))
    body = lambda x: jnp.sin(x)
    refused(
        "15 elements on dim 0.*padded=True",
        sbp.jit(sbp.manual(body, "model:S(0)", "model:S(0)"), mesh),
        x,
    )
    out = sbp.jit(sbp.manual(body, "model:S(0)", "model:S(0)", padded=True), mesh)(x)
    assert out.shape[0] == 16
    assert_close(out[:15], jnp.sin(x))


def test_outside_of_jit_axes_have_size_one():
    """This holds for gradients and for an axis that no type names, too."""
    x, w, v = arrays((8, 16), (16, 32), (32, 16))
    g = sbp.manual(ffn, in_types=FFN, out_types="B")
    assert_close(g(x, w, v), plain_ffn(x, w, v))
    assert_close(
        jax.jit(jax.grad(total(g), (0, 1, 2)))(x, w, v),
        jax.grad(total(plain_ffn), (0, 1, 2))(x, w, v),
    )
    h = sbp.manual(
        lambda x: (lax.psum(x, ("data", "model")) * lax.axis_size("other"), {"p": x}),
        in_types="model:P",
        out_types="B",
    )
    assert_close(h(x), (x, {"p": x}))


# ---- jax.shard_map of the user's own ------------------------------------------------------------


@pytest.mark.parametrize("check_vma", [False, True])
def test_a_users_shard_map(check_vma: bool, mesh: Any):
    """With and without JAX's own type check, scan and gradient inside."""
    specs = (PartitionSpec(), PartitionSpec(None, "model"), PartitionSpec("model"))

    def body(x: Any, w: Any, v: Any) -> Any:
        return lax.scan(lambda c, _: (jnp.sin(c), None), ffn(x, w, v), None, length=2)[0]

    def program(x: Any, w: Any, v: Any) -> Any:
        return jax.shard_map(
            body, mesh=mesh, in_specs=specs, out_specs=PartitionSpec(), check_vma=check_vma
        )(x * 2, w, v)

    plain = lambda x, w, v: jnp.sin(jnp.sin(plain_ffn(x * 2, w, v)))
    assert_same(program, plain, mesh, arrays((8, 16), (16, 32), (32, 16)), (0, 1, 2))


def test_a_shard_map_of_another_mesh_is_refused():
    (x,) = arrays((8, 16))
    one, two = mesh_of(ONE), mesh_of(TWO)
    f = lambda mesh, spec: jax.shard_map(jnp.sin, mesh=mesh, in_specs=spec, out_specs=spec)
    refused(
        r"uses the mesh model=8, but sbp\.jit uses data=2 model=4",
        sbp.jit(f(one, PartitionSpec("model")), two),
        x,
    )
    refused(
        "in another order than the mesh", sbp.jit(f(two, PartitionSpec(("model", "data"))), two), x
    )


# ---- false claims -------------------------------------------------------------------------------


PARTS = "model:P(sum)"
by_device = lambda x: x * (lax.axis_index("model") + 1.0)


@pytest.mark.parametrize(
    ("program", "title"),
    [
        (
            sbp.manual(lambda h: lax.psum(jnp.tanh(h), "model"), PARTS, "B"),
            r"`jnp\.tanh\(h\)` takes a partial value on mesh axis `model`",
        ),
        (sbp.manual(lambda h: h + 1, PARTS, PARTS), ".*adds a whole value to a partial one.*"),
        # Weighs the parts by the index of the device, so that the parts no longer add up.
        (
            sbp.manual(
                lambda h: lax.psum(h * (lax.axis_index("model") + 1.0), "model"), PARTS, "B"
            ),
            ".*result 0 changes.*",
        ),
        (
            lambda x: sbp.manual(by_device, "B", "B")(x),
            ".*differs between the devices of mesh axis `model` and is returned as B.*",
        ),
    ],
    ids=["tanh of a part", "one more in each part", "weighed parts", "values that differ"],
)
def test_a_false_claim_is_refused(program: Any, title: str, mesh: Any):
    error: Any = refused(None, sbp.jit(program, mesh).plan, *arrays((8, 16)), kind=sbp.SbpTypeError)
    (found,) = error.diagnostics
    assert found.primary and (found.code, found.primary.span.file) == ("manual-types", __file__)
    assert re.fullmatch(title, found.title)


@pytest.mark.parametrize(
    ("body", "out_types"), [(lambda h: lax.psum(2 * h, "model"), "B"), (lambda h: 2 * h, PARTS)]
)
def test_a_sum_of_doubled_parts_is_double_the_sum(body: Any, out_types: str, mesh: Any):
    (x,) = arrays((8, 16))
    assert_close(sbp.jit(sbp.manual(body, PARTS, out_types), mesh)(x), 2 * x)


def test_what_cannot_be_checked_is_said(mesh: Any):
    groups = lambda x: lax.psum(x, "model", axis_index_groups=[list(range(lax.axis_size("model")))])
    g = sbp.manual(groups, in_types="model:S(0)", out_types="B")
    with pytest.warns(sbp.SbpWarning, match="manual-types: .*sbp did not check"):
        sbp.jit(g, mesh).plan(jnp.ones((16, 2)))


def test_a_region_that_is_too_large_to_check_is_said():
    """Up to 4,194,304 elements of a value over all devices are checked; here are 8 more."""
    total = sbp.manual(lambda x: lax.psum(x.sum(), "model"), in_types="model:S(0)", out_types="B")
    with pytest.warns(sbp.SbpWarning, match="has 4,194,312 elements .* at most 4,194,304; pass"):
        plan = sbp.jit(total, mesh_of(ONE)).plan(jax.ShapeDtypeStruct((2**22 + 8,), "float32"))
    said = plan.report().diagnostics[0]
    assert said.code == "manual-types" and "sbp did not check" in said.title


@pytest.mark.parametrize(
    ("in_types", "out_types", "text"),
    [
        (("modle:S(0)",), "B", 'no axis "modle"|no axis .modle.; did you mean "model"'),
        (("model:S(2)",), "B", "dim-out-of-range"),
        (("model:?",), "B", "complete types"),
        ((None,), "B", "complete types"),
        (("B", "B"), "B", "2 entries for 1 argument; "),
        (("B",), "model:P(and)", "cannot be P"),
        (("B",), {"a": "B"}, "out_types does not fit"),
    ],
)
def test_types_that_do_not_fit(in_types: Any, out_types: Any, text: str):
    refused(
        text,
        lambda: sbp.jit(sbp.manual(jnp.sin, in_types, out_types), mesh_of(ONE)).plan(
            jnp.ones((8, 8))
        ),
    )


def test_the_function_must_be_one():
    refused("must be a function", sbp.manual, 3, "B", "B")
    assert S(0) != B != P


# ---- entries of in_types ------------------------------------------------------------------------

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
    refused(
        r"type-syntax: .* got array",
        checked_inside.plan,
        jax.ShapeDtypeStruct((8, 16), jnp.float32),
    )


gated_alone = lambda x: x


def test_types_by_position_are_an_option():
    (found,) = checked("entries", source('("data:S(0)", columns, None, rows)', "")).found
    (edit,) = found.helps[0].edits
    assert isinstance(edit, OptionEdit) and (edit.function, edit.value) == (
        "sbp.manual",
        ("data:S(0)", "model:S(1)", "model:S(1)", "model:S(0)"),
    )


def test_the_error_is_of_the_kind_that_the_body_raises():
    region = sbp.manual(
        lambda x, w: lax.psum(x @ w, "model"), in_types=("model:S(1)", "B"), out_types="B"
    )
    x = jnp.ones((8, 8))
    error = refused(
        "does not take the shards that its in_types give",
        sbp.jit(region, sbp.make_mesh((4,), ("model",))),
        x,
        x,
        kind=TypeError,
    )
    assert "(8, 2), (8, 8)" in str(error)


def test_a_body_that_takes_no_whole_operands_raises_as_it_is():
    mesh = jax.sharding.AbstractMesh((4,), ("model",))
    region = sbp.manual(jnp.matmul, in_types=("model:S(0)", "B"), out_types="model:S(0)")
    with pytest.raises(TypeError) as error:
        sbp.jit(region, mesh).plan(jnp.ones((8, 8)), jnp.ones((4, 8)))
    assert not isinstance(error.value, sbp.SbpError)


def test_a_misspelled_axis_in_a_region_is_named():
    region = lambda x: sbp.manual(lambda p: jax.lax.psum(p, "modle"), "B", "B")(x)
    (found,) = sbp.jit(region, mesh_of(TWO)).check(jnp.ones((8, 4))).diagnostics
    assert found.code == "unknown-axis" and 'did you mean "model"' in found.title


@pytest.mark.parametrize("padded", [False, True])
def test_a_region_of_arrays_without_elements(padded):
    total = sbp.manual(lambda a: jax.lax.psum(a.sum(0), "data"), "data:S(0)", "B", padded=padded)
    assert sbp.jit(total, mesh_of(TWO))(jnp.zeros((0, 3))).tolist() == [0, 0, 0]
