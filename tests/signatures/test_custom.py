"""Registered signatures. A program with a right signature runs as on one device. sbp refuses a
wrong signature with a counterexample, and bad input with an error."""

import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import pallas as pl
from jax.experimental.custom_partitioning import custom_partitioning
from jax.experimental.pallas import tpu as pltpu
from jax.experimental.pallas.ops.tpu.flash_attention import flash_attention

import sbp
from sbp import _jax
from sbp.signatures import Op, Row, register, rule_for, unregister
from sbp.signatures.custom import CUSTOM, draw, parse_row
from sbp.types import B, P, S
from tests.same import checked_plan, refused, registered

X = (np.random.default_rng(0).integers(-16, 16, (8, 12)) / 4).astype(np.float32)
W = (np.random.default_rng(1).integers(-16, 16, (12, 8)) / 4).astype(np.float32)


triple_p = _jax.Primitive("triple")
triple_p.def_abstract_eval(lambda x: _jax.empty_aval(x.shape, x.dtype))
_jax.mlir.register_lowering(triple_p, _jax.mlir.lower_fun(lambda x: 3 * x, multiple_results=False))
_jax.ad.deflinear(triple_p, lambda g: [triple_p.bind(g)])

TRIPLE = ["S(0) -> S(0)", "S(1) -> S(1)", "P(sum) -> P(sum)"]


triple = lambda x: triple_p.bind(x)


def matmul_call(x, w):
    def matmul(x_ref, w_ref, o_ref):
        o_ref[...] = jnp.dot(x_ref[...], w_ref[...])

    return pl.pallas_call(
        matmul, jax.ShapeDtypeStruct((x.shape[0], w.shape[1]), x.dtype), interpret=True
    )(x, w)


@jax.custom_vjp
def matmul(x, w):
    """A kernel whose gradient calls the same kernel."""
    return matmul_call(x, w)


matmul.defvjp(
    lambda x, w: (matmul(x, w), (x, w)),
    lambda kept, g: (matmul(g, kept[1].T), matmul(kept[0].T, g)),
)

MATMUL = ["S(0), B -> S(0)", "B, S(1) -> S(1)", "S(1), S(0) -> P"]


def matmul_local(ctx, x, w):
    """The contracted dim may be split: its padding is made zero."""
    keep = jnp.arange(x.shape[1]) < ctx.in_extent(0, 1)
    return matmul_call(jnp.where(keep, x, 0), jnp.where(keep[:, None], w, 0))


@custom_partitioning
def row_sums(x):
    return x.sum(1)


row_sums.def_partition(
    infer_sharding_from_operands=lambda *a: None,
    partition=lambda *a: None,
    sharding_rule="i j -> i",
    need_replication_factors=("j",),
)
ROW_SUMS = ["S(0) -> S(0)", "P -> P"]


row_sums_local = lambda ctx, x: jnp.where(jnp.arange(x.shape[1]) < ctx.in_extent(0, 1), x, 0).sum(1)


def kinds(plan):
    return [step.kind for p in plan.program.boxes() if p.bytes_per_device for step in p.box.steps]


def test_a_primitive_of_the_user(mesh):
    step = jax.value_and_grad(lambda x, w: triple(x @ w).sum(), argnums=(0, 1))
    with registered(triple_p, TRIPLE):
        plan = checked_plan(step, mesh, X, W, rtol=0, atol=0, in_types=("x:S(0) y:S(1)", "y:S(0)"))
        assert any(n.op == "triple" for n in plan.program.graph.nodes)
        plan = sbp.jit(
            lambda x, w: triple(x @ w), mesh, in_types=("y:S(1)", "y:S(0)"), out_types="B"
        ).plan(X, W)
        assert kinds(plan) == ["all_reduce"]  # of the result: the operand stayed partial
    assert all(n.op != "triple" for n in sbp.jit(triple, mesh).plan(X).program.graph.nodes)


def test_a_pallas_kernel_with_its_gradient(mesh):
    """The kernel is named by its function; the gradient calls it on two other shapes."""
    step = jax.value_and_grad(lambda x, w: jnp.sin(matmul(x, w)).sum(), argnums=(0, 1))
    with registered("pallas_call:matmul", MATMUL, local=matmul_local):
        plan = checked_plan(step, mesh, X, W, in_types=("x:S(0)", "y:S(1)"), boxing="reduce")
        assert {n.op for n in plan.program.graph.nodes if "call" in n.op} == {"pallas_call:matmul"}


def test_a_pallas_kernel_on_uneven_shards_of_two_axes(mesh):
    with registered("pallas_call:matmul", MATMUL, local=matmul_local):
        plan = checked_plan(
            lambda x, w: matmul(sbp.split(x, 1, "y"), w),
            mesh,
            X[:, :11],
            W[:11],
            rtol=0,
            atol=0,
            out_types="B",
            boxing="reduce",
        )
        assert kinds(plan) == ["all_reduce"]
        checked_plan(
            lambda x, w: matmul(sbp.annotate(x, x=S(0), y=S(0)), w),
            mesh,
            X[:7],
            W,
            rtol=0,
            atol=0,
            out_types="B",
        )


def test_a_kernel_has_the_name_of_its_function():
    call = lambda x: pl.pallas_call(
        lambda r, o: None, jax.ShapeDtypeStruct(x.shape, x.dtype), interpret=True, name="mine"
    )(x)
    names = [
        _jax.op_name(e)
        for fn in (call, lambda x: matmul_call(x, x.T), row_sums)
        for e in jax.make_jaxpr(fn)(X).jaxpr.eqns
    ]
    assert [n for n in names if ":" in n] == [
        "pallas_call:mine",
        "pallas_call:matmul",
        "custom_partitioning:row_sums",
    ]


def test_a_partitioned_function(mesh):
    fn = lambda x: row_sums(sbp.split(x, 1, "y") * 2)
    with registered("custom_partitioning:row_sums", [*ROW_SUMS, "S(1) -> P"], local=row_sums_local):
        plan = checked_plan(fn, mesh, X[:, :11], rtol=0, atol=0, out_types="B")
        assert kinds(plan) == ["all_reduce"]


def test_rows_may_depend_on_the_equation(mesh):
    asked: list[Op] = []

    def rows(op: Op):
        asked.append(op)
        return [
            Row((S(d),), (S(d),))
            for d in range(len(op.ins[0].shape))
            if op.divides(op.ins[0].shape[d])
        ]

    with registered(triple_p, rows):
        np.testing.assert_array_equal(
            sbp.jit(lambda x: triple(sbp.split(x, 0, "y")), mesh)(X), 3 * X
        )
    assert {op.axis_size for op in asked} == {2, 3, 4} and {op.name for op in asked} == {"triple"}


def test_even_rows_are_left_out_where_splits_do_not_divide(mesh):
    with registered(
        "custom_partitioning:row_sums", ["S(1) -> P"], local=lambda ctx, x: x.sum(1), even=True
    ):
        name = "custom_partitioning:row_sums"
        found = rule_for(name)
        assert found is not None
        f = sbp.jit(lambda x: row_sums(sbp.split(x, 1, "y")), mesh)
        for x, count in ((X, 2), (X[:, :11], 1)):
            avals = (_jax.empty_aval(x.shape, x.dtype),), (_jax.empty_aval((8,), x.dtype),)
            assert len(found.rows(Op(name, {}, *avals, 4))) == count
            np.testing.assert_array_equal(f(x), x.sum(1))


def test_a_signature_is_checked_once(mesh, monkeypatch):
    with registered(triple_p, TRIPLE):
        custom = CUSTOM["triple"]
        calls: list[Any] = []
        refute = type(custom).refute
        monkeypatch.setattr(
            type(custom), "refute", lambda self, *a: calls.append(a[2]) or refute(self, *a)
        )
        for _ in range(3):
            sbp.jit(lambda x: triple(triple(x)), mesh).plan(X)
        assert len(calls) == 1
        sbp.jit(triple, mesh).plan(X[:4])
        assert len(calls) == 2


LARGE, SMALL = (jax.ShapeDtypeStruct(shape, jnp.float32) for shape in ((512, 512), (5, 7)))


def test_large_operands_are_checked_on_samples(mesh):
    other = jax.jit(lambda a: triple(a["x"] + 1))
    with registered(triple_p, TRIPLE, samples=[(triple, (X[:3],)), (other, ({"x": SMALL},))]):
        assert sbp.jit(triple, mesh).plan(LARGE)


@pytest.mark.parametrize(
    ("rows", "samples", "said"),
    [
        (TRIPLE, (), "too large to check it on; give samples="),
        (
            [*TRIPLE, "P(max) -> P(min)"],
            [(triple, (SMALL,))],
            r"P\(max\) -> P\(min\)` does not hold",
        ),
        (TRIPLE, [(jnp.sin, (SMALL,))], "sample 0 does not call it"),
        (TRIPLE, [(triple, ())], "is called with 0 arguments"),
    ],
    ids=["no samples", "a wrong row", "another function", "too few arguments"],
)
def test_large_operands_need_samples_that_hold(mesh, rows, samples, said):
    with registered(triple_p, rows, samples=samples):
        refused(said, sbp.jit(triple, mesh).plan, LARGE)


def test_values_are_drawn_for_every_kind_of_operand():
    keys = jax.eval_shape(jax.random.key, 0)
    for aval in (
        keys,
        *(
            jax.ShapeDtypeStruct((5,), t)
            for t in (jnp.float32, jnp.bfloat16, jnp.int8, jnp.uint32, jnp.bool_, jnp.complex64)
        ),
    ):
        x = draw(aval, 0)
        assert (x.shape, x.dtype) == (aval.shape, aval.dtype)


# ---- wrong ones ---------------------------------------------------------------------------------


def kernel_of(name, body):
    """A Pallas kernel of one operand that is on one device."""

    def kernel(x_ref, o_ref):
        o_ref[...] = body(x_ref[...])

    return lambda x: pl.pallas_call(
        kernel, jax.ShapeDtypeStruct(x.shape, x.dtype), interpret=True, name=name
    )(x)


def test_the_counterexample_is_shown(mesh):
    cube = kernel_of("cube", lambda x: x**3)
    with registered("pallas_call:cube", ["S(0) -> S(0)", "P -> P"], local=lambda ctx, x: cube(x)):
        f = sbp.jit(cube, mesh)
        first = refused("^wrong-signature: ", f.plan, X[0, :5])
        refused(re.escape(first.message), f.plan, X[0, :5])
    head, *lines = first.message.splitlines()
    assert re.fullmatch(
        r"the signature of 'pallas_call:cube' registered at \S+same.py:\d+:\d+:"
        r" row .*",
        head,
    )
    assert head.endswith("row `P(sum) -> P(sum)` does not hold on 2 devices")
    assert [re.sub(r"\[[-\d. ]+\]", "#", line) for line in lines] == [
        "  operand 0 is #",
        "    device 0 holds #",
        "    device 1 holds #",
        "  result 0 as P(sum): # instead of #",
    ]
    whole, *parts = (
        np.array(re.findall(r"-?\d+\.?\d*", line.split("[")[1]), float) for line in lines[:3]
    )
    np.testing.assert_allclose(sum(parts), whole)


@pytest.mark.parametrize(
    ("rows", "local", "why"),
    [
        (["S(1) -> S(0)"], None, "does not hold.*gives shapes"),
        (["S(1) -> P"], lambda ctx, x: x.sum(1), "does not hold.*nan"),  # padding enters the sum
        (["S(1) -> B"], row_sums_local, "does not hold.*instead of"),
        (["P(max) -> P(max)"], row_sums_local, "does not hold.*instead of"),
        (["B -> P"], row_sums_local, "does not hold.*instead of"),
        (["S(0) -> S(0)"], lambda ctx, x: x, "does not hold.*instead of"),
        (["S(0) -> S(0)"], lambda ctx, x: x.sum(7), "does not hold.*axis 7 is out of bounds"),
        (["P -> P"], lambda ctx, x: 1 / 0, "`local` raised ZeroDivisionError"),
        (["P -> P"], lambda ctx, x: None, "AttributeError|None|result"),
    ],
)
def test_wrong_rows_are_refused(mesh, rows, local, why):
    with registered("custom_partitioning:row_sums", rows, local=local):
        refused(f"(?s)^wrong-signature: .*{why}", sbp.jit(row_sums, mesh).plan, X[:5, :7])


def test_wrong_under_loops_and_conditions(mesh):
    """Regions are walked too."""
    fn = lambda x: jax.lax.scan(
        lambda c, _: (jax.lax.cond(c.sum() > 0, triple, lambda c: c, c), None), x, None, length=2
    )[0]
    with registered(triple_p, ["B -> P"]), pytest.raises(sbp.SbpError, match="does not hold"):
        sbp.jit(fn, mesh).plan(X)


# ---- bad input ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("primitive", "options", "code", "message"),
    [
        (
            "trple",
            {},
            "unknown-option",
            r"""no primitive is named 'trple'; did you mean "triple"\?""",
        ),
        ("zzzzzzzzz", {}, "unknown-option", "import first what defines it"),
        (3, {}, "bad-argument", "a signature is for a JAX primitive or its name, got 3"),
        ("pallas_call", {}, "bad-argument", "register 'pallas_call:NAME'"),
        ("custom_partitioning", {}, "bad-argument", "register 'custom_partitioning:NAME'"),
        *[
            (name, {}, "bad-argument", "cannot register a signature")
            for name in ("scan", "cond", "jit", "remat", "psum", "reshard", "rng_uniform")
        ],
        ("add", {}, "bad-argument", "'add' has a signature already, which sbp gives it"),
        (
            "add",
            {"replace": True},
            "bad-argument",
            "'add' has a signature already, which sbp gives it",
        ),
        ("triple", {"rows": ["S(0)"]}, "type-syntax", "a row must be `operand atoms -> result"),
        (
            "triple",
            {"rows": ["S(0) -> Q"]},
            "type-syntax",
            r"'Q' in row 'S\(0\) -> Q' is not an atom",
        ),
        ("triple", {"rows": ["? -> B"]}, "type-syntax", "'[?]' in row '[?] -> B' is not an atom"),
        ("triple", {"rows": ["S(0) S(1) -> B"]}, "type-syntax", "is not an atom"),
        ("triple", {"rows": [("S(0)", "S(0)")]}, "bad-argument", "a row must be a `Row` or a text"),
        (
            "triple",
            {"local": 3},
            "bad-argument",
            "`local` must be a function of a LocalContext .*, got 3",
        ),
        *[
            ("pallas_call:nothing", {"rows": rows}, "bad-argument", "rows= must be a list of rows")
            for rows in (None, "S(0) -> S(0)", 3)
        ],
        ("triple", {"samples": [triple]}, "bad-argument", "must be a pair of a function and a"),
    ],
)
def test_bad_registrations(primitive, options, code, message):
    refused(rf"(?s)^{code}: .*{message}", register, primitive, **options)
    assert "triple" not in CUSTOM


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ("S(0), B -> S(0)", r"row `S\(0\), B -> S\(0\)` has 2 operands, the equation 1"),
        ("S(0) -> S(0), B", "has 2 results, the equation 1"),
        ("S(2) -> S(0)", r"splits dim 2 of operand 0, which is float32\[8,12\]"),
        ("S(0) -> S(2)", "splits dim 2 of result 0"),
        ("P(and) -> B", r"has P\(and\) for operand 0, but float32\[8,12\] cannot be"),
        (Row((B,), (B,), "halo"), "names kernel 'halo'"),
    ],
)
def test_rows_that_do_not_fit_the_equation(mesh, row, message):
    with registered(triple_p, [row]):
        refused(rf"(?s)^bad-argument: .*{message}", sbp.jit(triple, mesh).plan, X)


def test_a_second_registration_is_refused():
    with registered(triple_p, TRIPLE):
        refused(
            r"'triple' has a signature already, registered at \S+same.py:\d+:\d+;"
            r" replace=True",
            register,
            "triple",
            TRIPLE,
        )
        register("triple", [], replace=True)
        assert CUSTOM["triple"].rows == ()
    assert rule_for("triple") is None
    for name in ("triple", "add"):
        refused(f"no signature was registered for '{name}'", unregister, name)


def test_rows_parse_back():
    for row in (Row((S(1), S(0)), (P,)), Row((), (B,)), Row((P("max"), B), (P("max"), S(3)))):
        assert parse_row(repr(row)) == row


def test_what_only_a_nan_refutes_is_refused():
    """Parts under a maximum lose the place of a NaN that the function would have replaced."""
    replaced = kernel_of("replaced", jnp.nan_to_num)
    with registered("pallas_call:replaced", ["P(max) -> P(max)"], local=lambda ctx, x: replaced(x)):
        f = sbp.jit(lambda x: replaced(sbp.split(x, 0, "x").max(0)), sbp.make_mesh((2,), ("x",)))
        refused("wrong-signature", f.plan, jnp.ones((4, 5)))


# ---- mesh axes that are too large to check ------------------------------------------------------

SAID = "the registered signature of `triple` is checked on mesh axes of at most 64 devices, not"


@pytest.mark.parametrize(
    ("sizes", "titles"),
    [
        ((2, 64), []),
        ((65,), [f"{SAID} on `a` with 65"]),
        ((128, 2, 1024), [f"{SAID} on `a` with 128 and `c` with 1,024"]),
    ],
)
def test_an_axis_that_is_too_large_is_named_once_for_each_signature(sizes, titles):
    mesh = jax.sharding.AbstractMesh(sizes, tuple("abc"[: len(sizes)]))
    f = sbp.jit(lambda x: triple(triple(x) + 1), mesh, hardware="tpu-v5e")
    x = jax.ShapeDtypeStruct((128, 4), jnp.float32)
    with registered(triple_p, ["S(0) -> S(0)"]):
        found = f.check(x).diagnostics
        report = f.plan(x).report()
        text = report.text(200)
    assert report.diagnostics == found and [d.title for d in found] == titles
    assert {(d.code, d.severity) for d in found} <= {("wrong-signature", "note")}
    assert ("note[wrong-signature]: the registered signature of `triple`" in text) == bool(titles)


# ---- Pallas kernels ------------------------------------------------------------------------------
# Grid dims of Pallas kernels: which ones split, and what a kernel computes on shards.


WALL = np.arange(96, dtype=np.float32).reshape(8, 12)


def test_flash_attention_and_its_gradient_split_by_examples_and_heads(mesh):
    """No rule by the user, no warning, no collective; q, k and v draw from one key."""
    q, k, v = jax.random.normal(jax.random.key(0), (3, 2, 4, 128, 128))

    def gradient(*operands):
        with pltpu.force_tpu_interpret_mode():
            loss = lambda *x: jnp.sum(flash_attention(*x, causal=True, sm_scale=0.1) ** 2)
            return jax.grad(loss, (0, 1, 2))(*operands)

    plan = checked_plan(
        gradient, mesh, q, k, v, rtol=1e-4, atol=1e-3, in_types=("x:S(0) y:S(1)",) * 3
    )
    assert plan.cost.bytes_per_device == 0
    assert {str(t) for t in plan.out_types} == {"x:S(0) y:S(1)"}


def doubled(index=lambda i: (i, 0), *, body=None, rows=1, out=None, shape=(8, 12), **options):
    """A kernel over the rows of WALL."""

    def kernel(x, o, *scratch):
        o[...] = x[...] * 2 + (body(x[...]) if body else 0)

    block = pl.BlockSpec((rows, 12), index)
    return pl.pallas_call(
        kernel,
        jax.ShapeDtypeStruct(shape, np.float32),
        grid=(8 // rows,),
        in_specs=[block],
        out_specs=out or block,
        interpret=True,
        **options,
    )


SCRATCH = [pltpu.VMEM((1, 12), jnp.float32)]
IN_ANY_ORDER = pltpu.CompilerParams(dimension_semantics=("parallel",))
SPLIT = {
    "rows": doubled(),
    "blocks of two rows": doubled(rows=2),
    "scratch memory, in any order": doubled(scratch_shapes=SCRATCH, compiler_params=IN_ANY_ORDER),
    "declared pure": doubled(
        compiler_params=pltpu.CompilerParams(has_side_effects=pltpu.SideEffectType.PURE)
    ),
    "a batch of kernels": jax.vmap(doubled()),
    "in place": doubled(input_output_aliases={0: 0}),
}
WHOLE = {
    "scratch memory, in order": doubled(scratch_shapes=SCRATCH),
    "two grid dims, and a word about one": pl.pallas_call(
        lambda x, y, scratch: y.__setitem__(..., x[...] * 2),
        jax.ShapeDtypeStruct((8, 12), jnp.float32),
        grid=(8, 1),
        in_specs=[pl.BlockSpec((1, 12), lambda i, j: (i, j))],
        out_specs=pl.BlockSpec((1, 12), lambda i, j: (i, j)),
        scratch_shapes=SCRATCH,
        compiler_params=pltpu.CompilerParams(dimension_semantics=("arbitrary",)),
        interpret=True,
    ),
    "its place": doubled(body=lambda x: pl.program_id(0)),
    "its place in a branch": doubled(
        body=lambda x: jax.lax.cond(x[0, 0] > 9, lambda: pl.program_id(0), lambda: 0)
    ),
    "rows in another order": doubled(lambda i: (7 - i, 0)),
    "in place of what all read": doubled(lambda i: (0, 0), input_output_aliases={0: 0}),
    "one block for all": doubled(out=pl.BlockSpec((1, 12), lambda i: (0, 0)), shape=(1, 12)),
}


@pytest.mark.parametrize("name", SPLIT)
def test_a_dim_of_independent_blocks_splits(name, mesh):
    call, x = SPLIT[name], np.stack([WALL, WALL + 1]) if name == "a batch of kernels" else WALL
    plan = checked_plan(
        call, mesh, x, rtol=0, atol=0, in_types="y:S(0)" if x.ndim == 2 else "x:S(0) y:S(1)"
    )
    assert plan.cost.bytes_per_device == 0 and "S" in str(plan.out_types)


@pytest.mark.parametrize("name", WHOLE)
def test_a_dim_of_blocks_that_depend_on_each_other_stays_whole(name, mesh):
    f = sbp.jit(WHOLE[name], mesh, in_types="y:S(0)", out_types=B)
    with pytest.warns(sbp.SbpWarning, match="missing-rule.*sbp cannot split any dim of the kernel"):
        plan = f.plan(WALL)
    assert plan.cost.bytes_per_device > 0
    if name != "its place in a branch":  # which JAX does not interpret
        np.testing.assert_array_equal(plan(WALL), jax.jit(WHOLE[name])(WALL))


def test_blocks_that_cross_shards_stay_whole(mesh):
    """8 rows in blocks of 4 over 4 devices; over 2 they split."""
    types = {
        axis: sbp.jit(doubled(rows=4), mesh, in_types=f"{axis}:S(0)")
        .plan(WALL)
        .cost.bytes_per_device
        for axis in "xy"
    }
    assert types["x"] == 0 and types["y"] > 0


def test_uneven_rows(mesh):
    """7 rows over 4 devices: the last one computes padding, which nobody sees."""

    def call(x):
        block = pl.BlockSpec((1, 12), lambda i: (i, 0))
        kernel = lambda x, o: o.__setitem__(..., jnp.sqrt(x[...]))
        out = jax.ShapeDtypeStruct(x.shape, x.dtype)
        return pl.pallas_call(
            kernel, out, grid=(7,), in_specs=[block], out_specs=block, interpret=True
        )(x)

    checked_plan(lambda x: call(sbp.split(x, 0, "y")), mesh, WALL[:7], rtol=1e-6, atol=0)


def test_a_registered_signature_comes_first(mesh):
    call = lambda x: doubled()(x)
    with registered("pallas_call:kernel", local=lambda ctx, x: call(x)):
        plan = sbp.jit(call, mesh, in_types="y:S(0)", out_types=B).plan(WALL)
        assert plan.cost.bytes_per_device > 0
    assert sbp.jit(call, mesh, in_types="y:S(0)").plan(WALL).cost.bytes_per_device == 0


def test_a_grid_that_does_not_cover_its_operand_is_not_split():
    def double(read, write):
        write[...] = 2 * read[...]

    block = pl.BlockSpec((2,), lambda i: (i,))
    first = jax.ShapeDtypeStruct((4,), jnp.float32)
    call = pl.pallas_call(
        double, first, grid=(2,), in_specs=[block], out_specs=block, interpret=True
    )
    x = np.arange(8, dtype=np.float32)
    split = lambda x: sbp.split(x, 0, "x")
    with pytest.warns(sbp.SbpWarning, match="its blocks cover"):
        got = sbp.jit(lambda x: split(call(split(x))), sbp.make_mesh((2,), ("x",)))(x)
    np.testing.assert_array_equal(got, 2 * x[:4])
