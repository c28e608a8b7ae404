"""Pairs of plans: which count, and which are right; and that their programs fit their types."""

import jax
import pytest

import sbp
from benchmarks.order_programs import TUNED
from benchmarks.order_unseen import UNSEEN
from benchmarks.plan_order import TimedPlan, pairs_of


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
    plans = [timed("a", 1, 1), timed("b", 2, 2, "cycles of fusion.3")]
    assert pairs_of("program", plans) == []


def test_half_of_the_programs_are_unseen_and_each_gives_three_pairs():
    assert len(UNSEEN) == len(TUNED) and len({*UNSEEN, *TUNED}) >= 12
    assert all(len(make().ways) == 3 for make in (*TUNED, *UNSEEN))


@pytest.mark.parametrize("make", [m for m in (*TUNED, *UNSEEN) if m.__name__ != "transformer"])
def test_the_types_of_each_way_fit_the_program(make):
    program = make()
    sizes = tuple(size for _, size in program.mesh)
    mesh = jax.sharding.AbstractMesh(sizes, tuple(axis for axis, _ in program.mesh))
    for options in program.ways.values():
        f = sbp.jit(program.fn, mesh, **options)
        assert f.trace(*program.avals).results is not None
