"""Programs of the benchmarks: they fit what is said of them, small instances compute on a mesh what
they compute on one device, and pairs of plans count as they should."""

import dataclasses
from functools import cache, partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import sbp
from benchmarks import order_unseen, overlap, repro
from benchmarks.order_programs import TUNED
from benchmarks.plan_order import TimedPlan, pairs_of
from benchmarks.steps import by_hand_kernels, kernels
from benchmarks.steps.experts import by_capacity, dropless_step, expert_step
from benchmarks.steps.kernels import flash_decoder
from benchmarks.steps.program import ADAMW, Mark, Step, aval, shardings
from benchmarks.steps.serving import decoding
from benchmarks.steps.stages import pipeline
from benchmarks.steps.suite import SUITE, split_positions
from benchmarks.steps.transformer import Axes, Shape, attention, block, specs_of, weights_of
from benchmarks.steps.unseen import UNSEEN

STEPS = SUITE | UNSEEN


def abstract(axes):
    """A mesh without devices, of axes with their sizes."""
    names, sizes = zip(*axes, strict=True)
    return jax.sharding.AbstractMesh(
        sizes, names, axis_types=(jax.sharding.AxisType.Auto,) * len(names)
    )


@pytest.mark.parametrize("name", STEPS)
def test_marks_change_no_value_and_specs_fit(name):
    """The expert's program has the results' shapes of the unmarked one, and its shardings divide
    them."""
    step = STEPS[name]()
    marked = jax.eval_shape(step.make(Mark(abstract(step.mesh))), *step.avals)
    assert marked == jax.eval_shape(step.make(Mark()), *step.avals)
    sizes = dict(step.mesh)
    is_spec = lambda s: isinstance(s, jax.sharding.PartitionSpec)
    for values, specs in ((step.avals, step.in_specs), (marked, step.out_specs)):
        flat = zip(jax.tree.leaves(values), jax.tree.leaves(specs, is_leaf=is_spec), strict=True)
        for value, spec in flat:
            for size, axis in zip(value.shape, tuple(spec), strict=False):  # a spec may be shorter
                assert axis is None or size % sizes[axis] == 0


def test_without_pins_the_types_of_arguments_are_chosen():
    spec = jax.sharding.PartitionSpec
    step = Step(
        make=lambda mark: lambda x, w: x @ w,
        avals=(aval(8, 1024), aval(1024, 4096)),
        in_specs=(spec("d"), spec()),
        out_specs=spec("d"),
        mesh=(("d", 8),),
    )
    mesh = abstract(step.mesh)
    pinned, free = step.planned(mesh), step.planned(mesh, pinned=False)
    weights = [plan.in_shardings[1].is_fully_replicated for plan in (pinned, free)]
    assert weights == [True, False]  # a device then reads an eighth of them
    assert free.cost.seconds < pinned.cost.seconds


SHAPE = Shape(
    layers=2, width=32, heads=4, hidden=64, vocabulary=64, batch=4, length=16, scanned=True
)
D8 = (("d", 8),)
D2T4 = (("d", 2), ("t", 4))
SMALL_STEPS = {
    "long_context": split_positions(SHAPE, (("d", 2), ("s", 4))),
    "moe_capacity": expert_step(
        dataclasses.replace(SHAPE, batch=8), Axes(batch="d"), by_capacity, 8, ("d", None), D8
    ),
    "moe_dropless": dropless_step(SHAPE, 4, D2T4, region=False),
    "moe_dropless_region": dropless_step(SHAPE, 4, D2T4, region=True),
    "gpt_flash": flash_decoder(SHAPE, D2T4, "v5e:2x4"),
    "decoding": dataclasses.replace(decoding(dataclasses.replace(SHAPE, scanned=False)), mesh=D2T4),
    "pipeline": pipeline(dataclasses.replace(SHAPE, layers=4), microbatches=4, data=2),
}


def mesh_of(step: Step):
    sizes, names = tuple(n for _, n in step.mesh), tuple(a for a, _ in step.mesh)
    devices = np.array(jax.devices()[: np.prod(sizes)]).reshape(sizes)
    return jax.sharding.Mesh(devices, names, axis_types=(jax.sharding.AxisType.Auto,) * len(names))


@pytest.fixture
def no_kernel_for_tpu(monkeypatch):
    """These devices cannot run the kernel: plain attention takes its place on both sides."""
    for module in (kernels, by_hand_kernels):
        monkeypatch.setattr(module, "flash", lambda axes, mark: attention)


@cache
def arguments(name: str):
    rng = np.random.default_rng(0)

    def drawn(x):
        if jnp.issubdtype(x.dtype, jnp.integer):
            return jnp.asarray(rng.integers(0, 16, x.shape), x.dtype)
        return jnp.asarray(rng.normal(0, 0.3, x.shape), x.dtype)

    values = list(map(partial(jax.tree.map, drawn), SMALL_STEPS[name].avals))
    if SMALL_STEPS[name].donate == (0, 1):  # a training step
        values[1] = ADAMW.init(values[0])
    return tuple(values)


@cache
def on_one_device(name: str):
    return jax.jit(SMALL_STEPS[name].make(Mark()))(*arguments(name))


by_sbp = lambda step, mesh: dataclasses.replace(step, donate=()).planned(mesh)


def by_marks(step: Step, mesh):
    return jax.jit(step.make(Mark(mesh)), in_shardings=shardings(mesh, step.in_specs))


by_hand = lambda step, mesh: jax.jit(step.mapped(mesh, step.in_specs, step.out_specs))


CASES = [
    ("decoding", by_sbp),
    ("pipeline", by_sbp),
    ("pipeline", by_hand),
    ("gpt_flash", by_hand),
    ("long_context", by_hand),
    ("moe_capacity", by_hand),
    ("moe_dropless", by_hand),
    ("moe_dropless", by_sbp),
    ("moe_dropless", by_marks),
    ("moe_dropless_region", by_sbp),
]


@pytest.mark.usefixtures("no_kernel_for_tpu")
@pytest.mark.parametrize(("name", "side"), CASES, ids=lambda x: getattr(x, "__name__", x))
def test_a_split_step_computes_what_one_device_computes(name, side):
    """Products round to bfloat16, so that sums in another order differ: each leaf is compared with
    its largest element. A moment of AdamW after one step is the gradient."""
    got = side(SMALL_STEPS[name], mesh_of(SMALL_STEPS[name]))(*arguments(name))
    want = on_one_device(name)
    if name != "decoding":
        got, want = (got[1][0].mu, got[2]), (want[1][0].mu, want[2])
    for x, y in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        x, y = np.asarray(x, np.float32), np.asarray(y, np.float32)
        np.testing.assert_allclose(x, y, atol=0.03 * np.abs(y).max())


SMALL = dataclasses.replace(
    overlap.SHAPE, layers=3, width=32, heads=4, hidden=64, batch=4, length=8
)


@pytest.mark.parametrize("form", overlap.FORMS)
def test_gradients_are_those_of_one_device(form):
    """The forms of a loop over layers."""
    rng = np.random.default_rng(0)
    params = jax.tree.map(
        lambda w: jnp.asarray(rng.normal(0, 0.1, w.shape), jnp.float32),
        weights_of(SMALL)["blocks"],
    )
    x = jnp.asarray(rng.normal(0, 1, (SMALL.batch, SMALL.length, SMALL.width)), jnp.bfloat16)

    def loss(params):
        y = x
        for n in range(SMALL.layers):
            y = block(jax.tree.map(lambda w, n=n: w[n], params), y, SMALL, Axes(), Mark())
        return jnp.mean(y.astype(jnp.float32) ** 2)

    specs = specs_of(SMALL, Axes(batch=overlap.AXIS, weights=overlap.AXIS))["blocks"]
    f = jax.shard_map(
        partial(overlap.gradients, form, SMALL),
        mesh=jax.sharding.Mesh(np.array(jax.devices()[:4]), (overlap.AXIS,)),
        in_specs=(specs, jax.sharding.PartitionSpec(overlap.AXIS, None, None)),
        out_specs=specs,
        check_vma=False,
    )
    # The sums over tokens are rounded to bfloat16 on each device.
    wanted = jax.grad(loss)(params)
    for name, found in jax.jit(f)(params, x).items():
        assert np.linalg.norm(found - wanted[name]) < 0.02 * np.linalg.norm(wanted[name]), name


def timed(way, judged, modelled, *uncounted):
    return TimedPlan(
        way=way,
        modelled=modelled,
        judged=judged,
        modelled_bytes=0,
        judged_bytes=0,
        compute=judged,
        uncounted=uncounted,
    )


def test_a_pair_counts_from_five_percent_on_and_is_right_in_the_judges_order():
    plans = [timed("c", 1.20, 1.1), timed("a", 1.0, 1.0), timed("b", 1.04, 1.3)]
    found = [(p.faster.way, p.slower.way, p.right) for p in pairs_of("program", plans)]
    assert found == [("a", "c", True), ("b", "c", False)]
    assert not any(p.right for p in pairs_of("program", [timed("a", 1, 2), timed("b", 2, 2)]))


def test_a_plan_with_work_that_is_not_counted_is_in_no_pair():
    assert pairs_of("program", [timed("a", 1, 1), timed("b", 2, 2, "cycles of fusion.3")]) == []


def test_half_of_the_programs_are_unseen_and_each_gives_three_pairs():
    assert len(order_unseen.UNSEEN) == len(TUNED) and len({*order_unseen.UNSEEN, *TUNED}) >= 12
    assert all(len(make().ways) == 3 for make in (*TUNED, *order_unseen.UNSEEN))


@pytest.mark.parametrize(
    "make", [m for m in (*TUNED, *order_unseen.UNSEEN) if m.__name__ != "transformer"]
)
def test_the_types_of_each_way_fit_the_program(make):
    program = make()
    for options in program.ways.values():
        f = sbp.jit(program.fn, abstract(program.mesh), **options)
        assert f.trace(*program.avals).results is not None


@pytest.mark.parametrize("name", repro.CASES)
def test_choices_are_public_options_that_take_effect(name):
    """The cases of `benchmarks.repro`, without a TPU."""
    case = repro.CASES[name]
    sent: dict[str, set[str]] = {}
    for label, options in case.choices.items():
        program = case.plan(abstract(case.mesh), {"hardware": "tpu-v5e", **options}).program
        reductions = [
            step
            for planned in program.boxes()
            for step in planned.box.steps
            if step.kind in ("all_reduce", "reduce_scatter")
        ]
        wide = [step for step in reductions if step.wide]
        assert wide == (reductions if label == "sbp float32" else [])
        assert wide or label != "sbp float32"
        if "sbp bfloat16" in case.choices:
            rounded = [
                n for n, row in program.typing.rows.items() if "rounded_parts" in row.kernels
            ]
            assert len(rounded) == (label == "sbp bfloat16")
        sent[label] = {s.kind for operation, _ in program.kernels() for _, s in operation.sends}
    if "sbp rings" in sent:
        assert "permute" in sent["sbp rings"] and "permute" not in sent["sbp"]
