"""All-reduces that a compiler runs as one start once."""

import itertools

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AbstractMesh, PartitionSpec

import sbp
from sbp.infer.accumulation import Reduction
from sbp.infer.space import TypeSpace
from sbp.machine.mesh import mesh_spec
from sbp.report.timeline import schedule

MESH = AbstractMesh((16,), ("d",))
WIDTHS = (64, 96, 32, 48)


def f32(*shape):
    return jax.ShapeDtypeStruct(shape, jnp.float32)


def loss(weights, x):
    for w in weights:
        x = jnp.tanh(x @ w)
    return jnp.sum(x * x)


def updated(weights, x):
    return jax.tree.map(lambda w, g: w - 0.1 * g, weights, jax.grad(loss)(weights, x))


def clipped(weights, x):
    gradients = jax.grad(loss)(weights, x)
    norm = jnp.sqrt(sum(jnp.sum(g * g) for g in gradients))
    return jax.tree.map(lambda w, g: w - 0.1 * g / norm, weights, gradients)


def again(weights, x):
    """Products follow on the gradients."""
    return [w - g @ (g.T @ g) for w, g in zip(weights, jax.grad(loss)(weights, x), strict=True)]


def planned(fn, hardware="tpu-v5e", widths=WIDTHS):
    weights = [f32(*pair) for pair in itertools.pairwise(widths)]
    replicated = [PartitionSpec()] * len(weights)
    f = sbp.jit(
        fn,
        MESH,
        in_types=(replicated, PartitionSpec("d")),
        out_types=replicated,
        boxing="reduce",
        hardware=hardware,
    )
    return f.plan(weights, f32(512, widths[0]))


def starts(plan):
    """The number of all-reduces, and of starts that they pay for together, from their seconds and
    bytes alone."""
    link = plan.program.mesh.collective("all_reduce", (0,))
    steps = [s for b in plan.program.boxes() for s in b.box.steps if s.kind == "all_reduce"]
    over = [s.seconds - s.bytes_sent * link.seconds_per_byte for s in steps]
    return len(steps), sum(over) / link.seconds


def test_gradients_pay_for_one_start():
    assert starts(planned(updated)) == (3, pytest.approx(1, rel=0.01))


def test_sums_that_are_not_all_reduced_pay_nothing():
    """Of six sums, three gradients and three of their squares, devices add up the gradients."""
    assert starts(planned(clipped)) == (3, pytest.approx(3 / 6, rel=0.01))


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


def test_an_all_reduce_before_a_product_starts_alone():
    assert starts(planned(again)) == (3, pytest.approx(3, rel=0.01))


def test_a_single_gradient_pays_for_its_start():
    assert starts(planned(updated, widths=WIDTHS[:2])) == (1, pytest.approx(1, rel=0.01))


def test_other_compilers_are_charged_each_start():
    assert starts(planned(updated, "h100")) == (3, pytest.approx(3, rel=0.01))


def biased(w, b, x):
    gradient = jax.grad(lambda w, b: jnp.mean((x @ w + b) ** 2), (0, 1))(w, b)
    return w - 0.1 * gradient[0], b - 0.1 * gradient[1]


@pytest.mark.parametrize("typed", [True, False])
def test_the_plan_costs_what_its_steps_cost(typed):
    """Also where a gradient is gathered: that is no all-reduce of padded parts."""
    split = (PartitionSpec(None, "d"), PartitionSpec("d"), PartitionSpec())
    f = sbp.jit(
        biased,
        AbstractMesh((8,), ("d",)),
        in_types=split if typed else None,
        out_types=(PartitionSpec(None, "d"), PartitionSpec()),
        hardware="tpu-v5e",
    )
    program = f.plan(f32(1024, 4096), f32(4096), f32(4096, 1024)).program
    assert program.cost.seconds == pytest.approx(schedule(program).seconds, rel=1e-9)


def test_a_conversion_runs_the_steps_that_it_costs():
    """A gradient that two products read in types of their own, on two mesh axes. The cheapest way
    from one type to the other pads the parts and adds them up."""
    mesh = AbstractMesh((4, 8), ("a", "b"))
    weights = [f32(1024, 4096), f32(4096, 2048), f32(2048, 1000)]
    f = sbp.jit(again, mesh, hardware="tpu-v5e")
    program = f.plan(weights, f32(16384, 1024)).program
    assert program.cost.seconds == pytest.approx(schedule(program).seconds, rel=2e-3)
