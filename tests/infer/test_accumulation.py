"""Which values have the `reduce_dtype` of an annotation: the values whose parts may reach the
annotation, in barriers, loops and branches; and which casts may round parts before a sum."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import sbp
from sbp.infer.flow import chosen_sums, flow_of, holds, rounding_casts
from sbp.infer.space import Reduction, TypeSpace
from sbp.machine.mesh import mesh_spec
from sbp.report.timeline import Schedule
from sbp.trace.build import trace
from sbp.trace.graph import Node
from tests.cases import GRID, descent, shape as f32
from tests.infer.test_windows import arguments, step


def carried(node: Node):
    """All operands of the linear operators of these programs."""
    yield from range(len(node.inputs) if node.op in ("add", "dot_general", "transpose") else 0)


def chosen(program) -> str:
    """The products of a program that have a `reduce_dtype`, by number."""
    graph, _ = trace(program, [jax.ShapeDtypeStruct((8, 8), jnp.bfloat16)] * 2)
    found = chosen_sums(flow_of(graph), None, carried)
    products = [n.outputs[0] for n in graph.walk() if n.op == "dot_general"]
    return "".join(str(k) for k, value in enumerate(products) if value in found)


wide = lambda x: sbp.annotate(x, "B", reduce_dtype=jnp.float32)


def barrier(x, w):
    a, b = jax.lax.optimization_barrier((x @ w, w @ x))
    return a, wide(b)


def twice(x, w):
    a, b = jax.lax.optimization_barrier((x @ w, w @ x))
    b, a = jax.lax.optimization_barrier((b.T, a))
    return a, wide(b)


def initial_carry(x, w):
    carry, _ = jax.lax.scan(lambda c, _: (jnp.tanh(c), None), x @ w, None, length=3)
    return wide(carry), w @ x


def returned_carry(x, w):
    carry, stacked = jax.lax.scan(lambda c, r: (c + c @ w, r @ w), x, jnp.stack([x, w]))
    return wide(carry), stacked


def stacked(x, w):
    carry, stacked = jax.lax.scan(lambda c, r: (c + c @ w, r @ w), x, jnp.stack([x, w]))
    return carry, wide(stacked)


def loop(x, w):
    """A while loop that hands its carries on crosswise."""
    a, b, _ = jax.lax.while_loop(
        lambda s: s[2] < 3, lambda s: (s[1], jnp.tanh(s[0]), s[2] + 1), (x @ w, w @ x, 0)
    )
    return wide(a), b


def branches(x, w):
    chosen = jax.lax.cond(x[0, 0] > 0, lambda a: a @ w, lambda a: a.T, x)
    return wide(chosen + x @ x), w @ w


@pytest.mark.parametrize(
    ("program", "want"),
    [
        (barrier, "1"),
        (twice, "1"),
        (initial_carry, "0"),
        (returned_carry, "0"),
        (stacked, "1"),
        (loop, "01"),
        (branches, "01"),
    ],
    ids=lambda x: getattr(x, "__name__", x),
)
def test_products_whose_parts_reach_the_annotation(program, want: str):
    assert chosen(program) == want


def test_a_barrier_leaves_the_sums_of_its_other_operands_native():
    plan = sbp.jit(
        barrier,
        jax.sharding.AbstractMesh((4,), ("x",)),
        ("x:S(1)", "x:S(0)"),
        hardware="tpu-v5e",
    ).plan(*[jax.ShapeDtypeStruct((64, 64), jnp.bfloat16)] * 2)
    assert len(plan.program.typing.sums) == 2  # the operand of the annotation, and its product


DTYPES = ("float64", "float32", "float16", "bfloat16", "float8_e5m2", "float8_e4m3fn")


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("other", DTYPES)
def test_a_dtype_holds_another_when_every_value_survives_the_round_trip(dtype: str, other: str):
    """All values of 16 bits or fewer; of wider ones the extremes."""
    theirs = jnp.dtype(other)
    if theirs.itemsize <= 2:
        bits = np.arange(2 ** (8 * theirs.itemsize), dtype=f"uint{8 * theirs.itemsize}")
        values = bits.view(theirs)
    else:
        f = np.finfo(theirs)
        values = np.array([f.max, f.smallest_subnormal, 1 + f.eps], theirs)
    with np.errstate(all="ignore"):
        values = values[np.isfinite(values.astype(np.float64))]
        back = values.astype(jnp.dtype(dtype)).astype(theirs)
    assert holds(dtype, other) == bool((back == values).all())


def chain(x):
    """Casts down, up and down again, and casts that no `reduce_dtype` is about."""
    y = x.astype(jnp.bfloat16).astype(jnp.float32).astype(jnp.float16)
    return y, x.astype(jnp.int32), x.astype(jnp.complex64), x.astype(jnp.float8_e5m2)


def annotated(x):
    """Annotations override the program, and the widest wins: only the last cast has none."""
    narrow, both = x.astype(jnp.bfloat16), (x + 1).astype(jnp.bfloat16)
    return (
        sbp.annotate(narrow, "B", reduce_dtype=jnp.float32),
        sbp.annotate(both, "B", reduce_dtype=jnp.float32),
        sbp.annotate(both, "B", reduce_dtype=jnp.bfloat16),
        (x + 2).astype(jnp.bfloat16),
    )


def down(x):
    return x.astype(jnp.float32), x.astype(jnp.bfloat16)


@pytest.mark.parametrize(
    ("program", "dtype", "reduce_dtype", "want"),
    [
        (chain, "float32", None, []),
        (chain, "float32", "float32", []),
        (chain, "float32", "bfloat16", ["bfloat16"]),
        (chain, "float32", "float16", ["float16"]),
        (annotated, "float32", "bfloat16", ["bfloat16"]),
        (annotated, "float32", None, []),
        (down, "float64", "float32", ["float32"]),
        (down, "float64", "bfloat16", ["float32", "bfloat16"]),
        (lambda z: z.astype(jnp.complex64), "complex128", "float32", []),
    ],
)
def test_casts_to_a_dtype_that_holds_the_reduce_dtype(program, dtype, reduce_dtype, want):
    """The dtypes of the casts that may round parts, in program order."""
    with jax.enable_x64(dtype != "float32"):
        graph, _ = trace(program, [jax.ShapeDtypeStruct((8, 8), dtype)])
        found = rounding_casts(graph, chosen_sums(flow_of(graph), reduce_dtype, carried))
    casts = [n for n in graph.walk() if n.id in found]
    assert [str(graph.avals[n.outputs[0]].dtype) for n in casts] == want


# ---- all-reduces that a compiler runs as one ----------------------------------------------------


MESH = jax.sharding.AbstractMesh((16,), ("d",))
WIDTHS = (64, 96, 32, 48)


def loss(weights, x):
    for w in weights:
        x = jnp.tanh(x @ w)
    return jnp.sum(x * x)


def clipped(weights, x):
    gradients = jax.grad(loss)(weights, x)
    norm = jnp.sqrt(sum(jnp.sum(g * g) for g in gradients))
    return jax.tree.map(lambda w, g: w - 0.1 * g / norm, weights, gradients)


def again(weights, x):
    """Products follow on the gradients."""
    return [w - g @ (g.T @ g) for w, g in zip(weights, jax.grad(loss)(weights, x), strict=True)]


def planned(fn, hardware="tpu-v5e", widths=WIDTHS):
    weights = [f32(*pair) for pair in itertools.pairwise(widths)]
    replicated = [jax.P()] * len(weights)
    return sbp.jit(
        fn,
        MESH,
        in_types=(replicated, jax.P("d")),
        out_types=replicated,
        boxing="reduce",
        hardware=hardware,
    ).plan(weights, f32(512, widths[0]))


def starts(plan):
    """The number of all-reduces, and of starts that they pay for together, from their seconds and
    bytes alone."""
    link = plan.program.mesh.collective("all_reduce", (0,))
    steps = [s for b in plan.program.boxes() for s in b.box.steps if s.kind == "all_reduce"]
    over = [s.seconds - s.bytes_sent * link.seconds_per_byte for s in steps]
    return len(steps), sum(over) / link.seconds


@pytest.mark.parametrize(
    ("fn", "options", "count", "paid"),
    [
        (descent(loss), {}, 3, 1),
        # Of six sums, three gradients and three of their squares, devices add up the gradients.
        (clipped, {}, 3, 3 / 6),
        (again, {}, 3, 3),  # an all-reduce before a product starts alone
        (descent(loss), {"widths": WIDTHS[:2]}, 1, 1),
        (descent(loss), {"hardware": "h100"}, 3, 3),  # other compilers start each by itself
    ],
)
def test_gradients_that_are_reduced_together_pay_for_one_start(fn, options, count, paid):
    assert starts(planned(fn, **options)) == (count, pytest.approx(paid, rel=0.01))


@pytest.mark.parametrize(
    ("mib", "share"), [(1, 1 / 4), (24, 1 / 4), (48, 1 / 2), (96, 1), (500, 1)]
)
def test_a_sum_pays_by_its_size(mib, share):
    mesh = mesh_spec(MESH, "tpu-v5e")

    def seconds(count):
        shape = (mib * 2**18,)
        space = TypeSpace(shape, 4, mesh, frozenset({"sum"}), reduction=Reduction(None, count))
        return space.seconds()[space.index[-1,], space.index[0,]]

    start = mesh.collective("all_reduce", (0,)).seconds
    assert seconds(1) - seconds(4) == pytest.approx((1 - share) * start, abs=1e-12)


def biased(w, b, x):
    gradient = jax.grad(lambda w, b: jnp.mean((x @ w + b) ** 2), (0, 1))(w, b)
    return w - 0.1 * gradient[0], b - 0.1 * gradient[1]


@pytest.mark.parametrize(
    ("fn", "mesh", "types", "options", "args", "rel"),
    [
        # Also where a gradient is gathered: that is no all-reduce of padded parts.
        *(
            (
                biased,
                jax.sharding.AbstractMesh((8,), ("d",)),
                (in_types, (jax.P(None, "d"), jax.P())),
                {"hardware": "tpu-v5e"},
                (f32(1024, 4096), f32(4096), f32(4096, 1024)),
                1e-9,
            )
            for in_types in ((jax.P(None, "d"), jax.P("d"), jax.P()), None)
        ),
        # A gradient that two products read in types of their own, on two mesh axes. The cheapest
        # way from one type to the other pads the parts and adds them up.
        (
            again,
            jax.sharding.AbstractMesh((4, 8), ("a", "b")),
            (None, None),
            {"hardware": "tpu-v5e"},
            ([f32(1024, 4096), f32(4096, 2048), f32(2048, 1000)], f32(16384, 1024)),
            2e-3,
        ),
        # A gradient is read whole and split: it is reduced once, whatever the policy.
        *(
            (
                step,
                GRID,
                (({"up": "model:S(1)", "down": "model:S(0)"}, "data:S(0)"), None),
                {"boxing": boxing},
                arguments(),
                1e-6,
            )
            for boxing in ("auto", "reduce")
        ),
    ],
    ids=["typed", "free", "two axes", "auto", "reduce"],
)
def test_the_plan_costs_what_its_steps_cost(fn, mesh, types, options, args, rel):
    program = sbp.jit(fn, mesh, *types, **options).plan(*args).program
    assert program.cost.seconds == pytest.approx(Schedule(program).seconds, rel=rel)
