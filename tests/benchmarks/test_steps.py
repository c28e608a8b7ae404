"""The everyday steps: their programs fit what is said of them."""

import jax
import pytest
from jax.sharding import AxisType

from benchmarks.steps.program import Mark, Step, aval
from benchmarks.steps.suite import SUITE
from benchmarks.steps.unseen import UNSEEN

STEPS = SUITE | UNSEEN


@pytest.mark.parametrize("name", STEPS)
def test_marks_change_no_value_and_specs_fit(name):
    """The expert's program has the results' shapes of the unmarked one, and its shardings divide
    them."""
    step = STEPS[name]()
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
