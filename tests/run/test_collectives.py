"""The compiled program holds the plan's collectives and no others: per group of mesh axes, bytes
are at most the planned ones."""

import functools
import re
from collections import defaultdict
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import sbp
from benchmarks.hlo.traffic import collectives
from sbp.machine.mesh import mesh_spec
from sbp.plan.program import sends
from sbp.run.boxing import reduce_scatter
from sbp.run.execute import description, difference, place_array, processes_of, values_digest
from tests.hardware import SENDS_FREELY
from tests.run.programs import CASES, NAMES, Case, arguments, function_of
from tests.same import checked_plan


def compiled_bytes(plan, shape):
    """Bytes one device sends in the compiled program, by the set of mesh axes along which it
    exchanges them."""
    coordinates = np.stack(np.unravel_index(np.arange(int(np.prod(shape))), shape))
    found = defaultdict(float)
    for c in collectives(plan.lower().compile().as_text(), int(np.prod(shape))):
        varying = coordinates[:, list(c.members)]
        axes = frozenset(a for a in range(len(shape)) if len(set(varying[a])) > 1)
        found[axes] += c.bytes_per_device
    return dict(found)


def planned_bytes(plan):
    found, names = defaultdict(float), plan.program.mesh.names
    for s in sends(plan.program):
        found[frozenset(map(names.index, s.mesh_axes))] += s.bytes
    return dict(found)


def assert_within_plan(plan, shape):
    compiled, planned = compiled_bytes(plan, shape), planned_bytes(plan)
    assert set(compiled) <= set(planned), (
        f"a group that the plan lacks: {compiled} against {planned}"
    )
    assert not [
        f"{axes}: {size} B compiled, {planned[axes]} B planned"
        for axes, size in compiled.items()
        if size > planned[axes] * (1 + 1e-9) + 1e-9
    ]


@pytest.mark.parametrize("shape", [(8,), (2, 4), (2, 2, 2)], ids=["8", "2x4", "2x2x2"])
@pytest.mark.parametrize(
    "case", [c for c in CASES if c.name != "control-flow"], ids=lambda c: c.name
)
def test_compiled_bytes_are_planned(case: Case, shape):
    names = NAMES[: len(shape)]
    plan = sbp.jit(function_of(case, names), sbp.make_mesh(shape, names)).plan(*arguments(case))
    assert_within_plan(plan, shape)


def test_the_chain_reduces_once_after_w():
    """(U @ V) @ W with the first contraction split: one reduction, of the last product, in the plan
    and in the compiled program."""
    mesh = sbp.make_mesh((8,), ("x",))
    u, v, w = jnp.ones((64, 256)), jnp.ones((256, 512)), jnp.ones((512, 16))
    f = sbp.jit(
        lambda u, v, w: (u @ v) @ w, mesh, in_types=("x:S(1)", "x:S(0)", "B"), out_types="B"
    )
    plan = f.plan(u, v, w)
    moving = [p for p in plan.program.boxes() if p.bytes_per_device]
    assert [[s.kind for s in p.box.steps] for p in moving] == [["all_reduce"]]
    assert plan.program.graph.avals[moving[0].box.source.value].shape == (64, 16)
    assert plan.cost.bytes_per_device == 2 * 7 / 8 * 64 * 16 * 4
    assert compiled_bytes(plan, (8,)) == {frozenset({0}): plan.cost.bytes_per_device}
    np.testing.assert_array_equal(np.asarray(f(u, v, w)), np.asarray(u @ v @ w))


def test_a_sum_of_partials_is_reduced_once():
    """Parallel branches: P + P stays P, whatever the order of the Python additions."""
    block = lambda x, a, b: x + (x @ a["in"]) @ a["out"] + (x @ b["in"]) @ b["out"]
    layer = {"in": "x:S(1)", "out": "x:S(0)"}
    f = sbp.jit(block, sbp.make_mesh((8,), ("x",)), in_types=("B", layer, layer), out_types="B")
    shapes = {
        "in": jax.ShapeDtypeStruct((64, 256), jnp.float32),
        "out": jax.ShapeDtypeStruct((256, 64), jnp.float32),
    }
    plan = f.plan(jax.ShapeDtypeStruct((32, 64), jnp.float32), shapes, shapes)
    assert plan.cost.bytes_per_device == 2 * 7 / 8 * 32 * 64 * 4


def test_gradient_accumulation_reduces_once_after_the_loop():
    """Also where the body divides by the number of microbatches, which XLA does not sink out of the
    loop."""
    mesh = sbp.make_mesh((8,), ("x",))
    case = next(c for c in CASES if c.name == "accumulation")
    plan = sbp.jit(function_of(case, ("x",)), mesh, out_types="B").plan(*arguments(case))
    moving = [p for p in plan.program.boxes() if p.bytes_per_device]
    assert [(p.trips, [s.kind for s in p.box.steps]) for p in moving] == [(1, ["all_reduce"])]


# ---- halo bytes ----------------------------------------------------------------------------------
# Halos along two dims over two mesh axes: the second exchange carries what the first one has
# brought, and the plan counts it.


normal = lambda *shape, seed=0: np.random.default_rng(seed).normal(size=shape).astype(np.float32)


def conv(window, strides=(1, 1), padding: Any = "SAME", **options):
    return lambda x: lax.conv_general_dilated(
        x, jnp.asarray(normal(4, 4, *window, seed=1)), strides, padding, **options
    )


HALOS = {
    "convolution": (conv((3, 3)), (2, 4, 16, 16)),
    "transposed dims": (
        lambda x: jnp.swapaxes(conv((5, 3))(jnp.swapaxes(x, 2, 3)), 2, 3),
        (2, 4, 16, 16),
    ),
    "strided": (conv((5, 5), (2, 2)), (2, 4, 32, 32)),
    "dilated": (
        conv((3, 3), (3, 2), [(2, 2), (1, 3)], lhs_dilation=(3, 2), rhs_dilation=(1, 2)),
        (1, 4, 16, 16),
    ),
    "pooling": (
        lambda x: lax.reduce_window(x, -np.inf, lax.max, (1, 1, 3, 3), (1, 1, 2, 2), "SAME"),
        (2, 4, 32, 32),
    ),
    "padding": (
        lambda x: lax.pad(x, np.float32(0), [(0, 0, 0), (0, 0, 0), (3, 5, 0), (2, 6, 1)]),
        (2, 4, 16, 16),
    ),
    "reversal": (lambda x: lax.rev(x, (2, 3)), (2, 4, 16, 16)),
}


@pytest.mark.parametrize("dims", [(2, 3), (3, 2)], ids=["rows, columns", "columns, rows"])
@pytest.mark.parametrize(("fn", "shape"), HALOS.values(), ids=HALOS)
def test_the_plan_counts_what_two_halos_send(fn, shape, dims):
    mesh = sbp.make_mesh((2, 4), ("x", "y"))
    split = lambda v: sbp.annotate(v, x=sbp.S(dims[0]), y=sbp.S(dims[1]))
    plan = checked_plan(lambda x: split(fn(split(x))), mesh, normal(*shape), hardware=SENDS_FREELY)
    assert any("halo" in o.row.kernels for o, _ in plan.program.kernels())
    assert_within_plan(plan, (2, 4))
    assert sum(compiled_bytes(plan, (2, 4)).values()) >= 0.9 * sum(planned_bytes(plan).values())


# ---- convolution gradients -----------------------------------------------------------------------
# Gradients of convolutions whose image is split in space: by halo exchange, as the forward pass,
# on every mesh and for every kind of window. The results have sizes that no mesh axis divides.


CONVOLUTIONS: dict[str, tuple[tuple[int, ...], tuple[int, int], dict[str, Any]]] = {
    "VALID": ((8,), (32, 9), {"padding": "VALID"}),
    "stride 3": ((4,), (32, 9), {"padding": "VALID", "window_strides": (3, 2)}),
    "padding (1, 1)": ((2,), (18, 8), {"padding": [(1, 1)] * 2, "window_strides": (2, 2)}),
    "lhs_dilation": ((2, 4), (12, 16), {"padding": [(1, 1)] * 2, "lhs_dilation": (2, 2)}),
    "rhs_dilation": ((2, 4), (18, 28), {"padding": "VALID", "rhs_dilation": (2, 3)}),
}


MOVES = [
    *(sbp.forbid(kind) for kind in ("all_to_all", "all_gather", "reduce_scatter")),
    sbp.forbid("all_reduce", above=756),  # the gradient of the kernel on eight devices
]


@pytest.mark.parametrize(("sizes", "space", "options"), CONVOLUTIONS.values(), ids=CONVOLUTIONS)
def test_gradients_in_space(sizes, space, options):
    """Forward pass and both gradients have a plan in which only halos and sums are sent."""
    names = ("x", "y")[: len(sizes)]
    conv = functools.partial(lax.conv_general_dilated, window_strides=(1, 1))
    split = " ".join(f"{name}:S({d})" for name, d in zip(names, (2, 3), strict=False))

    def loss(kernel: Any, image: Any) -> Any:
        out: Any = conv(image, kernel, **options)
        return jnp.mean(jnp.tanh(sbp.annotate(out, split, cotangent=split)) ** 2)

    plan = checked_plan(
        jax.value_and_grad(loss, argnums=(0, 1)),
        sbp.make_mesh(sizes, names),
        normal(4, 3, 3, 3, seed=0),
        normal(2, 3, *space, seed=1),
        atol=1e-5,
        in_types=("B", split),
        out_types=("B", ("B", split)),
        hardware=SENDS_FREELY,
        budgets=MOVES,
    )
    convolutions = [o.row for o, _ in plan.program.kernels() if o.node.op == "conv_general_dilated"]
    assert len(convolutions) == 3
    assert all(set(row.kernels) == {"halo"} for row in convolutions), plan
    assert_within_plan(plan, sizes)


# ---- small reductions ----------------------------------------------------------------------------
# What a split dim is reduced to travels, not the dim: softmax, cross-entropy, means, argmax,
# top-k, prefixes over a split dim.


ROWS, VOCABULARY = 512, 8190
"""8190 does not divide by 8: the last shard has padding."""

LOGITS = np.random.default_rng(0).normal(size=(ROWS, VOCABULARY)).astype(np.float32)
LABELS = np.random.default_rng(1).integers(0, VOCABULARY, ROWS).astype(np.int32)


def cross_entropy(logits, labels):
    return -jnp.mean(jnp.take_along_axis(jax.nn.log_softmax(logits), labels[:, None], axis=-1))


def normalised(x, labels):
    centred = x - jnp.mean(x, -1, keepdims=True)
    return jnp.max(centred * lax.rsqrt(jnp.mean(centred**2, -1, keepdims=True) + 1e-6), -1)


SCALARS = 8
"""Reduced values per row that a program may move: some maxima, sums and indices."""

PROGRAMS = {
    "softmax": (lambda x, y: jnp.max(jax.nn.softmax(x) * x, -1), SCALARS),
    "logsumexp": (lambda x, y: jax.nn.logsumexp(x, axis=-1), SCALARS),
    "cross-entropy": (cross_entropy, SCALARS),
    "cross-entropy and its gradient": (
        lambda x, y: jax.tree.map(jnp.max, jax.value_and_grad(cross_entropy)(x, y)),
        2 * SCALARS,
    ),
    "cross-entropy with one-hot labels": (
        lambda x, y: jax.tree.map(
            jnp.max,
            jax.value_and_grad(
                lambda logits, labels: (
                    -jnp.mean(
                        jnp.sum(jax.nn.log_softmax(logits) * jax.nn.one_hot(labels, VOCABULARY), -1)
                    )
                )
            )(x, y),
        ),
        2 * SCALARS,
    ),
    "mean": (lambda x, y: jnp.mean(x, -1), SCALARS),
    "layer norm": (normalised, SCALARS),
    "argmax": (lambda x, y: jnp.argmax(x, -1), 4 * SCALARS),
    "top-k": (lambda x, y: lax.top_k(x, 2), 4 * SCALARS),
    "prefix sum": (lambda x, y: jnp.max(jnp.cumsum(x, -1), -1), SCALARS),
}


@pytest.mark.parametrize("shape", [(8,), (2, 4)], ids=["8", "2x4"])
@pytest.mark.parametrize(("fn", "scalars"), PROGRAMS.values(), ids=PROGRAMS)
def test_a_split_vocabulary_moves_little(fn, scalars, shape):
    """Plan and compiled program move a few values per row and device, a hundredth of what gathering
    the rows would."""
    names = ("x", "y")[: len(shape)]
    plan = checked_plan(
        lambda x, y: fn(sbp.annotate(x, **{names[-1]: sbp.S(1)}), y),
        sbp.make_mesh(shape, names),
        LOGITS,
        LABELS,
        rtol=2e-4,
        atol=2e-4,
        in_types=(None, "B"),
        hardware="tpu-v5e",
    )
    n = shape[-1]
    # Inputs and results that do not divide are whole at the annotation and at the program's end.
    in_the_middle = sum(
        p.bytes_per_device
        for p in plan.program.boxes()
        if p.box.reader is not None and p.box.reader.op != "sbp_annotate"
    )
    moved = in_the_middle + sum(o.bytes_sent * runs for o, runs in plan.program.kernels())
    assert moved <= scalars * ROWS * 4 * n and moved * 25 < (n - 1) / n * LOGITS.nbytes
    assert_within_plan(plan, shape)


# ---- pair reductions -----------------------------------------------------------------------------
# `lax.reduce` by a function of pairs along a split dim: only the pairs of the shards are sent.


def first_greatest(x: Any, at: Any) -> Any:
    """The greatest elements along dims 0 and 1, each with the smallest of its indices."""

    def better(p: Any, q: Any) -> Any:
        left = (p[0] > q[0]) | ((p[0] == q[0]) & (p[1] < q[1]))
        return jnp.where(left, p[0], q[0]), jnp.where(left, p[1], q[1])

    starts = np.float32(-np.inf), np.int32(np.iinfo(np.int32).max)
    return lax.reduce((x, at), starts, better, (0, 1))


def log_sum_exp(x: Any, ones: Any) -> Any:
    """The maxima and the sums of exponentials along dims 0 and 1."""

    def joined(p: Any, q: Any) -> Any:
        top = jnp.maximum(p[0], q[0])
        safe = jnp.where(top == -jnp.inf, 0.0, top)
        return top, p[1] * jnp.exp(p[0] - safe) + q[1] * jnp.exp(q[0] - safe)

    return lax.reduce((x, ones), (np.float32(-np.inf), np.float32(0)), joined, (0, 1))


@pytest.mark.parametrize("sizes", [(2,), (4,), (8,), (2, 4)])
@pytest.mark.parametrize("split", ["x:S(0) y:S(1)", "x:S(0) y:S(0)"])
def test_pairs_are_exchanged(sizes: tuple[int, ...], split: str):
    """One dim over two mesh axes, and a dim over each."""
    split = " ".join(split.split()[: len(sizes)])
    shape = 16, 8, 3
    x = np.random.default_rng(0).integers(-3, 4, shape).astype(np.float32)
    index = np.arange(x.size, dtype=np.int32).reshape(shape)

    def fn(x: Any, index: Any) -> Any:
        x, index, ones = (sbp.annotate(v, split) for v in (x, index, jnp.ones_like(x)))
        return first_greatest(x, index), log_sum_exp(x, ones)

    f = sbp.jit(
        fn,
        sbp.make_mesh(sizes, ("x", "y")[: len(sizes)]),
        hardware=SENDS_FREELY,
        budgets=[sbp.forbid("all_gather", above=3 * 4 * 2 * 7), sbp.forbid("all_to_all")],
    )
    plan = f.plan(x, index)
    assert {k for o, _ in plan.program.kernels() for k in o.row.kernels} == {"reduced_shards"}
    assert_within_plan(plan, sizes)
    (top, at), (maximum, total) = f(x, index)
    flat, rows = x.reshape(-1, 3), index.reshape(-1, 3)
    exact = flat.max(0), rows[flat.argmax(0), range(3)], flat.max(0)
    jax.tree.map(np.testing.assert_array_equal, (top, at, maximum), exact)
    np.testing.assert_allclose(total, np.exp(flat - flat.max(0)).sum(0), rtol=1e-5)


AFFINE = lambda p, q: (p[0] * q[0] % 7, (p[1] * q[0] + q[1]) % 7)
"""Affine maps after each other, which do not commute."""
FOLDS: dict[str, Callable[[Any], Any]] = {
    "a sum from 5": lambda x: lax.reduce(x, np.int32(5), lax.add, (0, 1)),
    "a product from 3 along one dim": lambda x: lax.reduce(x, np.int32(3), lax.mul, (0,)),
    "maps": lambda x: lax.reduce((x, x + 1), (np.int32(2), np.int32(1)), AFFINE, (0,)),
    "maps along the last dim": lambda x: lax.reduce(
        (x, x + 1), (np.int32(2), np.int32(1)), AFFINE, (1,)
    ),
}


@pytest.mark.parametrize("shape", [(13, 8), (3, 5), (16, 6)], ids=str)
@pytest.mark.parametrize("case", FOLDS)
def test_initial_values_count_once_and_in_order(case: str, shape: tuple[int, int]):
    """They need not be neutral, and the function need not commute. Sizes divide or not."""
    mesh, fn = sbp.make_mesh((2, 4), ("x", "y")), FOLDS[case]
    x = np.random.default_rng(1).integers(1, 6, shape).astype(np.int32)
    for split in ("y:S(0)", "x:S(0) y:S(1)", "x:S(1) y:S(1)", "x:S(0) y:S(0)"):
        f = sbp.jit(lambda x, split=split: fn(sbp.annotate(x, split)), mesh, hardware=SENDS_FREELY)
        jax.tree.map(np.testing.assert_array_equal, f(x), fn(x))


# ---- arranged scatters ---------------------------------------------------------------------------
# Reduce-scatters in the arrangements that a TPU needs give what a plain sum gives, here run on CPU
# devices with a TPU's plan.


SCATTERED = (
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
    cases = [(shape, dim) for shape, dim in SCATTERED if shape[dim] >= n]
    parts = [np.arange(n * np.prod(s)).reshape(n, *s).astype(np.int32) ** 2 for s, _ in cases]
    ways = {spec.arrangements(shape, dim, n, 4)[-1] for shape, dim in cases}
    assert ways == {"as it is", "dim first", "blocks first", "rows of lanes", "exchange"}

    def scatter(*parts):
        return tuple(
            reduce_scatter(p[0], "sum", "d", dim, shape[dim] // n, spec)
            for p, (shape, dim) in zip(parts, cases, strict=True)
        )

    found = jax.shard_map(
        scatter,
        mesh=mesh,
        in_specs=jax.sharding.PartitionSpec("d"),
        out_specs=tuple(jax.sharding.PartitionSpec(*[None] * dim, "d") for _, dim in cases),
        check_vma=False,
    )(*parts)
    jax.tree.map(
        np.testing.assert_array_equal,
        found,
        tuple(part.sum(0, dtype=np.int32) for part in parts),
    )


def test_a_plan_says_what_its_sums_send():
    """A reduce-scatter in two stages, a product and a sum in a wider dtype are several collectives
    in the plan, its text and its report."""
    aval = jax.ShapeDtypeStruct((65536, 1024), jnp.bfloat16)

    def plan(out, **options):
        return sbp.jit(
            lambda x, y: x.T @ y,
            jax.sharding.AbstractMesh((16,), ("d",)),
            in_types=("d:S(0)", "d:S(0)"),
            out_types=out,
            hardware="tpu-v5e",
            **options,
        ).plan(aval, aval)

    sent = lambda plan: [(s.kind, s.mesh_axes, s.runs) for s in sends(plan.program)]
    staged = plan("d:S(0)")
    assert sent(staged) == [("reduce_scatter", ("d",), 2)]
    assert "reduce_scatter[d; in stages of 4 and 4]" in str(staged)
    assert "in stages of 4 and 4" in str(staged.report())
    wide = plan("d:B", reduce_dtype=jnp.float32)
    assert sent(wide) == [("all_to_all", ("d",), 1), ("all_gather", ("d",), 1)]
    assert sum(s.bytes for s in sends(wide.program)) == wide.cost.bytes_per_device


# ---- agreement of processes ----------------------------------------------------------------------
# What processes compare before they run a plan: equal for one program, unequal for another one.


X = np.arange(32, dtype=np.float32).reshape(8, 4)


def parts(fn=lambda x: jnp.sin(x) + X, shape=(2, 4), **options):
    mesh = sbp.make_mesh(shape, ("data", "model"))
    return description(sbp.jit(fn, mesh, **options).plan(X).program, mesh)


def test_a_program_that_is_traced_twice_is_one():
    fn = lambda x: jnp.sin(x) + X.copy()

    def again(x):
        "On other lines."

        return jnp.sin(x) + X.copy()

    assert parts(fn) == parts(again) == parts()


@pytest.mark.parametrize(
    ("other", "part"),
    [
        (lambda: parts(shape=(4, 2)), "mesh"),
        (lambda: parts(in_types="data:S(1)"), "list of arguments"),
        (lambda: parts(lambda x: jnp.cos(x) + X), "program"),
        (lambda: parts(lambda x: jnp.sin(x) + X + 0), "program"),
        (lambda: parts(lambda x: jnp.sin(x) + (X + 1)), "set of constants"),
        (lambda: parts(in_types="data:S(0)", out_types="data:S(1)"), "choice of types"),
    ],
)
def test_the_first_part_that_differs_is_named(other, part):
    pinned = {"in_types": "data:S(0)", "out_types": "data:S(0)"}
    mine = parts(**(pinned if part in ("list of arguments", "choice of types") else {}))
    said = difference({0: mine, 1: other(), 2: mine})
    assert said.startswith(f"the {part} differs") and "processes 0, 2" in said
    assert not difference({0: mine, 1: mine})


def test_eight_processes_are_all_named():
    mine, other = {"mesh": ("a", "a")}, {"mesh": ("b", "b")}
    said = difference({**dict.fromkeys(range(8), mine), 8: other})
    assert said == "the mesh differs: a in processes 0, 1, 2, 3, 4, 5, 6, 7, b in process 8"


def test_elements_are_compared_with_dtype_and_shape():
    values = [X, X + 1, X.astype(np.int32), X.T.copy(), X.astype(jnp.bfloat16), X.reshape(-1)]
    assert len({values_digest(x) for x in values}) == len(values)
    assert values_digest(X) == values_digest(jnp.asarray(X)) == values_digest(X.T.copy().T)
    assert values_digest(3.0) != values_digest(4.0)


def test_one_process_waits_for_none():
    mesh = sbp.make_mesh((8,), ("data",))
    assert processes_of(mesh) == (0,)
    sharding = jax.NamedSharding(mesh, jax.P("data"))
    assert place_array(X, sharding).sharding == sharding
    assert sbp.jit(jnp.sin, mesh).plan(X)._joint is None
    assert jax.process_count() == 1


@pytest.mark.skipif(jax.__version_info__ >= (0, 12), reason="this JAX does not abort")
def test_two_executions_are_in_flight_on_simulated_devices():
    plan = sbp.jit(jnp.sin, sbp.make_mesh((2,), ("data",))).plan(X)
    for _ in range(4):
        plan(X)
    assert plan._executable._in_flight is not None and len(plan._executable._in_flight) == 2


# ---- names ---------------------------------------------------------------------------------------
# The compiled program has the user's names: that of the function, of its arguments and of named
# scopes.


def step(w, batch):
    def loss(w):
        with jax.named_scope("ffn"):
            h = jax.nn.relu(batch["x"] @ w)
            with jax.named_scope("inner"):
                h = jnp.sin(h)

        def layer(h, _):
            with jax.named_scope("mlp"):
                return jax.jit(jnp.tanh)(h @ w), None

        with jax.named_scope("layers"):
            h, _ = jax.lax.scan(layer, h, None, length=3)
        return (h**2).sum()

    with jax.named_scope("backward"):
        return jax.value_and_grad(loss)(w)


@pytest.fixture(scope="module")
def hlo():
    f = sbp.jit(step, sbp.make_mesh((2, 4), ("x", "y")), in_types=("x:S(1)", "y:S(0)"))
    return f.plan(jnp.ones((8, 8)), {"x": jnp.ones((16, 8))}).lower().compile().as_text()


@pytest.mark.parametrize(
    "fn",
    [functools.partial(jnp.add, 1.0), functools.partial(lambda y, x: x, 2), lambda x: x, jnp.sin],
    ids=["partial of a library", "partial", "lambda", "library"],
)
def test_names_of_programs_are_those_of_jax(fn):
    module = re.compile(r"module @(\w+)")
    want = module.search(jax.jit(fn).lower(1.0).as_text())
    got = module.search(sbp.jit(fn, sbp.make_mesh((2,), ("x",))).plan(1.0).lower().as_text())
    assert want and got and want.group(1) == got.group(1)


OPERATIONS = r'op_name="jit\(step\)/shard_map/backward/'


@pytest.mark.parametrize(
    "pattern",
    [
        r"^HloModule jit_step,",
        # Operations have their named scopes.
        OPERATIONS + r'jvp\(ffn\)/dot_general"',
        OPERATIONS + r'jvp\(ffn\)/inner/sin"',
        OPERATIONS + r'transpose\(jvp\(ffn\)\)/inner/mul"',
        OPERATIONS + r'jvp\(layers\)/while/body/(\w+/)?mlp/tanh"',
        OPERATIONS + r'transpose\(jvp\(layers\)\)/while/body/(\w+/)?mlp/transpose"',
        # Collectives have the scope of their reader, and arguments the user's names.
        "all-gather.*" + OPERATIONS + r"jvp\(\w+\)",
        'op_name="w"',
        re.escape("op_name=\"batch[\\'x\\']\""),
    ],
)
def test_the_compiled_program_has_the_users_names(hlo, pattern):
    assert re.search(pattern, hlo)
