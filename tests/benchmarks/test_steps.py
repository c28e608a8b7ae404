"""The everyday steps: what is compared, and what is not."""

import dataclasses

import jax
import pytest
from jax.sharding import AxisType

from benchmarks.hlo_time import StepTime
from benchmarks.steps.__main__ import Measured, compared
from benchmarks.steps.program import Mark, Step, aval
from benchmarks.steps.suite import SUITE


def measured(seconds, *unknown):
    step = StepTime(
        cycles=0,
        compute=seconds,
        products=0,
        exposed=0,
        exposed_by_kind={},
        bytes_per_device=8 * seconds,
        unknown=unknown,
    )
    return Measured(step=step, memory=3 * seconds)


def test_what_is_not_counted_on_one_side_only_makes_the_step_void():
    all_three = {"bytes": 2.0, "step": 2.0, "memory": 2.0}
    assert compared(measured(4), measured(2)) == all_three
    both = measured(4, "cycles of fusion.3"), measured(2, "cycles of fusion.17")
    assert compared(*both) == all_three
    assert compared(measured(4, "cycles of fusion.3"), measured(2)).keys() == {"bytes", "memory"}
    assert compared(measured(4), measured(2, "trips of while.1")).keys() == {"bytes", "memory"}


def test_each_figure_is_over_that_of_the_better_expert():
    quick = dataclasses.replace(measured(2), memory=12)
    assert compared(measured(4), measured(8), quick) == {"bytes": 2.0, "step": 2.0, "memory": 1.0}
    void = dataclasses.replace(measured(2, "trips of while.1"), memory=12)
    assert compared(measured(4), measured(8), void) == {"bytes": 2.0, "step": 0.5, "memory": 1.0}


@pytest.mark.parametrize("name", SUITE)
def test_marks_change_no_value_and_specs_fit(name):
    """The expert's program has the results' shapes of the unmarked one, and its shardings divide
    them."""
    step = SUITE[name]()
    names = tuple(axis for axis, _ in step.mesh)
    mesh = jax.sharding.AbstractMesh(
        tuple(size for _, size in step.mesh), names, axis_types=(AxisType.Auto,) * len(names)
    )
    marked = jax.eval_shape(step.make(Mark(mesh)), *step.avals)
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
    mesh = jax.sharding.AbstractMesh((8,), ("d",))
    pinned, free = step.planned(mesh), step.planned(mesh, pinned=False)
    weights = [plan.in_shardings[1].is_fully_replicated for plan in (pinned, free)]
    assert weights == [True, False]  # a device then reads an eighth of them
    assert free.cost.seconds < pinned.cost.seconds
