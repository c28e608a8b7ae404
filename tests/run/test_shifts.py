"""Rolls, shifts and shifted pads along a split dim: one permute, on every mesh, in loops and in
gradients."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import sbp
from tests.hardware import SENDS_FREELY
from tests.run.test_collectives import assert_within_plan, normal
from tests.same import checked_plan
from tests.signatures.test_alignment import gradient, scanned
from tests.trace.test_joins import squares, stencil

NOTHING_ELSE = [
    sbp.forbid(kind) for kind in ("all_to_all", "all_gather", "reduce_scatter", "all_reduce")
]


shifted = lambda new, x: jnp.concatenate([new, x[:-1]])


def permutes(plan: sbp.Plan) -> list[float]:
    """The rounds of each operation of a plan that sends; all are permutes."""
    sent = [s for o, _ in plan.program.kernels() for _, s in o.sends]
    assert {s.kind for s in sent} <= {"permute"}
    return [s.rounds for s in sent]


@pytest.mark.parametrize("n", [2, 4, 8])
@pytest.mark.parametrize("length", [1, 3])
def test_one_permute(n: int, length: int):
    """One stage per device, and several; the whole shard goes, or one element of it."""
    mesh = sbp.make_mesh((n,), ("x",))
    x = np.arange(n * length * 2, dtype=np.float32).reshape(n * length, 2)
    for fn, args, types in (
        (lambda x: jnp.roll(x, 1, 0), (x,), ("x:S(0)",)),
        (lambda x: jnp.roll(x, -1, 0), (x,), ("x:S(0)",)),
        (shifted, (-np.ones((1, 2), np.float32), x), ("B", "x:S(0)")),
        (lambda x: jnp.diff(x, axis=0, prepend=x[:1]), (x,), ("x:S(0)",)),
        (lambda x: jax.lax.pad(x, np.float32(0), [(1, -1, 0), (0, 0, 0)]), (x,), ("x:S(0)",)),
    ):
        plan = checked_plan(
            fn,
            mesh,
            *args,
            rtol=1e-6,
            atol=0,
            in_types=types,
            out_types="x:S(0)",
            hardware=SENDS_FREELY,
            budgets=NOTHING_ELSE,
        )
        assert permutes(plan) == [1] and plan.cost.bytes_per_device == 2 * 4
        assert_within_plan(plan, (n,))


@pytest.mark.parametrize("sizes", [(8,), (2, 4)])
def test_uneven_rolls(sizes: tuple[int, ...]):
    """Shards with padding, by a shift longer than a shard, along two dims."""
    names = ("x", "y")[: len(sizes)]
    split = " ".join(f"{name}:S({d})" for d, name in enumerate(names))

    def fn(x):
        x = sbp.annotate(x, split)
        rows = jnp.diff(x, axis=0, append=x[-1:] * 3)
        return sbp.annotate(jnp.roll(x, (5, -2), (0, 1)) + shifted(x[:1] * 2, x) + rows, split)

    x = np.arange(13 * 11, dtype=np.int32).reshape(13, 11)
    plan = checked_plan(fn, sbp.make_mesh(sizes, names), x, rtol=0, atol=0, hardware=SENDS_FREELY)
    assert {"join_slices"} == {o.node.op for o, _ in plan.program.kernels()}


def pipeline(weights, microbatches):
    """A pipeline as a buffer with one stage per device: each tick shifts it by one."""
    buffer = jnp.zeros((weights.shape[0], *microbatches.shape[1:]))

    def tick(state, new):
        state = sbp.annotate(shifted(new[None], state), x=sbp.S(0))
        state = jnp.tanh(jnp.einsum("sbi,sij->sbj", state, weights))
        return state, state[-1]

    return jnp.mean(jax.lax.scan(tick, buffer, microbatches)[1] ** 2)


def test_the_papers_pipeline():
    """Each tick shifts by one permute, forward and backward, under a budget that allows no other
    move of the buffer in a loop."""
    rng = np.random.default_rng(0)
    weights, batches = rng.normal(size=(4, 6, 6)), rng.normal(size=(5, 3, 6))
    plan = checked_plan(
        jax.value_and_grad(pipeline),
        sbp.make_mesh((4,), ("x",)),
        weights.astype(np.float32),
        batches.astype(np.float32),
        atol=1e-6,
        in_types=("x:S(0)", "B"),
        out_types=("B", "x:S(0)"),
        hardware=SENDS_FREELY,
        budgets=[sbp.forbid(k, where="loop") for k in ("all_to_all", "all_gather")],
    )
    shifts = [(o.node, times) for o, times in plan.program.kernels() if o.node.op == "join_slices"]
    assert permutes(plan) == [1, 1] and [times for _, times in shifts] == [5, 5]
    assert [node.backward for node, _ in shifts] == [False, True]
    assert_within_plan(plan, (4,))


@pytest.mark.parametrize("fn", [stencil, squares(stencil)], ids=["stencil", "gradient"])
@pytest.mark.parametrize("sizes", [(8,), (2, 4), (2, 2, 2)])
def test_stencils(sizes: tuple[int, ...], fn):
    """Even and uneven; each neighbour receives one row or column."""
    mesh = sbp.make_mesh(sizes, ("x", "y", "z")[: len(sizes)])
    axes = dict(zip(mesh.axis_names, map(sbp.S, range(2)), strict=False))
    split = lambda x: sbp.annotate(fn(sbp.annotate(x, **axes)), **axes)
    f = sbp.jit(split, mesh, hardware=SENDS_FREELY, budgets=NOTHING_ELSE[:1])
    for length in (16, 13):
        x = np.random.default_rng(length).normal(size=(length, length)).astype(np.float32)
        np.testing.assert_allclose(np.asarray(f(x)), np.asarray(fn(x)), rtol=1e-5, atol=1e-5)
    if sizes == (8,):
        g = sbp.jit(fn, mesh, in_types=("x:S(0)",), out_types="x:S(0)", hardware=SENDS_FREELY)
        rows = 2 if fn is stencil else 4
        plan = g.plan(jax.ShapeDtypeStruct((16, 16), np.float32))
        assert plan.cost.bytes_per_device == rows * 16 * 4


# ---- rotation ------------------------------------------------------------------------------------
# Products whose operands are split along different loops run as rings: right, within the plan's
# bytes, and without a whole operand.


PRODUCTS = {
    "columns, rows": (
        (8,),
        "ik,kj->ij",
        (32, 24),
        (24, 16),
        ("x:S(0)", "x:S(1)"),
        "x:S(0)",
        {"rotate_rhs"},
    ),
    "columns, rows, the other result": (
        (8,),
        "ik,kj->ij",
        (32, 24),
        (24, 16),
        ("x:S(0)", "x:S(1)"),
        "x:S(1)",
        {"rotate_lhs"},
    ),
    "contracted on one side": (
        (8,),
        "ik,kj->ij",
        (32, 24),
        (24, 16),
        ("x:S(0)", "x:S(0)"),
        "x:S(0)",
        {"rotate_rhs"},
    ),
    "contracted on the other": (
        (8,),
        "ik,kj->ij",
        (32, 24),
        (24, 16),
        ("x:S(1)", "x:S(1)"),
        "x:S(1)",
        {"rotate_lhs"},
    ),
    "batched": (
        (4,),
        "bik,bkj->bij",
        (2, 8, 12),
        (2, 12, 8),
        ("x:S(1)", "x:S(1)"),
        "x:S(1)",
        {"rotate_rhs"},
    ),
    "heads": (
        (4,),
        "bshd,hdm->bsm",
        (2, 8, 4, 3),
        (4, 3, 8),
        ("x:S(1)", "x:S(0)"),
        "x:S(1)",
        {"rotate_rhs"},
    ),
    "SUMMA": (
        (2, 4),
        "ik,kj->ij",
        (16, 24),
        (24, 32),
        ("x:S(0) y:S(1)",) * 2,
        "x:S(0) y:S(1)",
        {"rotate_lhs", "rotate_rhs"},
    ),
    "SUMMA, more rows": (
        (4, 2),
        "ik,kj->ij",
        (64, 8),
        (8, 8),
        ("x:S(0) y:S(1)",) * 2,
        "x:S(0) y:S(1)",
        {"rotate_lhs", "rotate_rhs"},
    ),
}


ONLY_RINGS = [
    sbp.forbid(kind, above=64)
    for kind in ("all_gather", "all_to_all", "all_reduce", "reduce_scatter")
]
"""Where memory allows it, a gathered operand takes less time than one that goes round."""


BALANCED = replace(SENDS_FREELY, link_bytes_per_second=3e5)
"""A transfer takes about as long as the product beside it, and is worth hiding."""


def ring_of(case, dtype=np.float32):
    shape, equation, a, b, types, out, _ = PRODUCTS[case]
    fn = sbp.jit(
        lambda x, y: jnp.einsum(equation, x, y),
        sbp.make_mesh(shape, ("x", "y")[: len(shape)]),
        in_types=types,
        out_types=out,
        hardware=SENDS_FREELY,
        budgets=ONLY_RINGS,
    )
    x, y = normal(*a).astype(dtype), normal(*b, seed=1).astype(dtype)
    return fn, fn.plan(x, y), x, y


def kernels(plan):
    return {
        k for operation, _ in plan.program.kernels() for k in operation.row.kernels if k != "local"
    }


@pytest.mark.parametrize("case", PRODUCTS)
def test_products_go_round(case):
    fn, plan, x, y = ring_of(case)
    assert kernels(plan) == PRODUCTS[case][-1]
    assert not any(p.bytes_per_device for p in plan.program.boxes())
    assert_within_plan(plan, PRODUCTS[case][0])
    assert "all-gather" not in plan.lower().compile().as_text()
    want = np.einsum(PRODUCTS[case][1], x.astype(np.float64), y.astype(np.float64))
    np.testing.assert_allclose(np.asarray(fn(x, y)), want, rtol=1e-4, atol=1e-4)


def test_the_bytes_are_those_of_gathering():
    _, plan, _, y = ring_of("columns, rows")
    assert plan.cost.bytes_per_device == 7 / 8 * y.nbytes


def test_sums_of_short_products_are_kept_in_32_bits():
    """bfloat16 from shard to shard would round eight times."""
    fn, plan, x, y = ring_of("contracted on one side", dtype=jnp.bfloat16)
    assert kernels(plan) == {"rotate_rhs"}
    want = np.asarray(x, np.float64) @ np.asarray(y, np.float64)
    np.testing.assert_allclose(np.asarray(fn(x, y), np.float64), want, rtol=2**-7, atol=2**-7)


@pytest.mark.parametrize("sizes", [(30, 25, 17), (41, 25, 27)])
def test_uneven_shards_go_round(sizes):
    """Padding of a shard that comes by is neither multiplied nor written."""
    i, k, j = sizes

    def product(x, y):
        return sbp.annotate(sbp.annotate(x, x=sbp.S(0)) @ sbp.annotate(y, x=sbp.S(1)), x=sbp.S(0))

    mesh, args = sbp.make_mesh((8,), ("x",)), (normal(i, k), normal(k, j, seed=1))
    assert kernels(checked_plan(product, mesh, *args, hardware=BALANCED)) == {"rotate_rhs"}


def test_gradients_go_round():
    plan = checked_plan(
        jax.value_and_grad(lambda x, y: jnp.sum(jnp.tanh(x @ y) ** 2), argnums=(0, 1)),
        sbp.make_mesh((4,), ("x",)),
        normal(16, 24),
        normal(24, 8, seed=1),
        in_types=("x:S(0)", "x:S(1)"),
        out_types=("B", ("x:S(0)", "x:S(1)")),
        hardware=BALANCED,
    )
    assert "rotate_rhs" in kernels(plan)


def test_a_ring_that_hides_nothing_is_not_taken():
    """Where a device does not compute while it sends, one gather is as good, and starts once."""
    mesh = sbp.make_mesh((8,), ("x",))
    plan = sbp.jit(
        lambda x, y: x @ y, mesh, in_types=("x:S(0)", "x:S(1)"), out_types="x:S(0)", hardware="cpu"
    ).plan(normal(4096, 512), normal(512, 64))
    assert not kernels(plan) and any(p.bytes_per_device for p in plan.program.boxes())


# ---- scans ---------------------------------------------------------------------------------------
# `lax.associative_scan` along a split dim: devices exchange a few elements, and each level of the
# scan runs on shards.


SCANS = {
    "forward": scanned,
    "gradient": gradient,
}


def pairs(length: int):
    a, b = np.random.default_rng(length).normal(size=(2, length, 4)).astype(np.float32)
    return a, b


@pytest.mark.parametrize("sizes", [(2,), (4,), (8,), (2, 4)])
@pytest.mark.parametrize("case", SCANS)
def test_scans_of_shards(case: str, sizes):
    types = "x:S(0)" if len(sizes) == 1 else "x:S(0) y:S(1)"
    plan = checked_plan(
        SCANS[case],
        sbp.make_mesh(sizes, ("x", "y")[: len(sizes)]),
        *pairs(32),
        rtol=1e-5,
        atol=1e-5,
        in_types=(types, types),
        out_types=(types, types),
        hardware=SENDS_FREELY,
        budgets=[sbp.forbid("all_to_all")],
    )
    if case == "forward":
        assert_within_plan(plan, sizes)
    # Of both arrays, up to three rows of each device are gathered; it has 32 / n of them. So are
    # those of the gradient.
    rows = 6 if case == "gradient" else 3
    row = 16 / (sizes[1] if len(sizes) > 1 else 1)
    assert plan.cost.bytes_per_device <= 2 * rows * row * (sizes[0] - 1)


@pytest.mark.parametrize("case", SCANS)
def test_sizes_that_do_not_divide(case: str):
    checked_plan(
        lambda a, b: SCANS[case](*(sbp.split(v, 0, "x") for v in (a, b))),
        sbp.make_mesh((4,), ("x",)),
        *pairs(21),
        rtol=1e-5,
        atol=1e-5,
        hardware=SENDS_FREELY,
        budgets=[sbp.forbid("all_to_all")],
    )


@pytest.mark.parametrize("sizes", [(2, 4), (2, 2, 2)])
@pytest.mark.parametrize("length", [64, 61])
def test_a_dim_that_all_axes_split(sizes, length: int):
    mesh = sbp.make_mesh(sizes, ("x", "y", "z")[: len(sizes)])
    axes = dict.fromkeys(mesh.axis_names, sbp.S(0))

    def split(a, b):
        found = scanned(*(sbp.annotate(v, **axes) for v in (a, b)))
        return jax.tree.map(lambda v: sbp.annotate(v, **axes), found)

    checked_plan(
        split, mesh, *pairs(length), rtol=1e-5, atol=1e-5, in_types=("B", "B"), hardware="tpu-v5e"
    )


def test_levels_run_on_shards_of_two_axes():
    """A few rows of small levels are sent, and no shard."""
    types = "x:S(0) y:S(0)"
    mesh = jax.sharding.AbstractMesh((2, 4), ("x", "y"))
    plan = sbp.jit(scanned, mesh, (types, types), (types, types), hardware="tpu-v5e").plan(
        *[jax.ShapeDtypeStruct((2**16, 4), np.float32)] * 2
    )
    assert plan.cost.bytes_per_device < 2**16 * 16 / 8 / 100


def segmented(x):
    """Running sums that begin anew at every fifth row."""
    joined = lambda p, q: (p[0] | q[0], jnp.where(q[0][:, None], q[1], p[1] + q[1]))
    return jax.lax.associative_scan(joined, (jnp.arange(len(x)) % 5 == 0, x))[1]


def products(x):
    """Products of 2x2 matrices."""
    near_one = 0.3 * x.reshape(-1, 2, 2) + jnp.eye(2)
    return jax.lax.associative_scan(lambda a, b: b @ a, near_one, reverse=True)


def smallest(x):
    """The smallest element so far, where it was first, and how often it was there."""

    def joined(p, q):
        count = jnp.where(q[0] < p[0], q[2], p[2] + jnp.where(q[0] == p[0], q[2], 0))
        return jnp.minimum(p[0], q[0]), jnp.where(q[0] < p[0], q[1], p[1]), count

    x = jnp.round(2 * x)
    numbers = jax.lax.broadcasted_iota(jnp.int32, x.shape, 0)
    return jax.lax.associative_scan(joined, (x, numbers, jnp.ones_like(numbers)))


@pytest.mark.parametrize(("sizes", "length"), [((8,), 16), ((2, 2, 2), 13)])
@pytest.mark.parametrize(
    "fn",
    [segmented, squares(segmented), products, smallest],
    ids=["segmented", "gradient", "products", "smallest"],
)
def test_other_scans(fn, sizes, length: int):
    """Sums of segments, products of matrices, and triples, even and uneven."""
    mesh = sbp.make_mesh(sizes, ("x", "y", "z")[: len(sizes)])
    axes = dict.fromkeys(mesh.axis_names, sbp.S(0))
    split = lambda x: jax.tree.leaves(fn(sbp.annotate(x, **axes)))
    checked_plan(split, mesh, pairs(length)[0], rtol=1e-5, atol=1e-5, hardware=SENDS_FREELY)
