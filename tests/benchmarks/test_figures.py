"""Figures of the everyday steps: what is compared, kept and shown, and how they are read from the
text of compiled programs."""

import dataclasses
from pathlib import Path

import pytest

from benchmarks.hlo.schedule import CHIPS, StepTime, step_time
from benchmarks.hlo.traffic import collectives
from benchmarks.steps.figures import (
    Figures,
    compared,
    floor,
    free_table,
    geometric_means,
    read,
    table,
    tables,
    write,
)
from benchmarks.steps.suite import SUITE
from benchmarks.steps.unseen import UNSEEN


def figures(seconds, *unknown, held=None):
    step = StepTime(
        cycles=0,
        compute=seconds,
        products=seconds / 2 * CHIPS["v5e"].hertz,
        exposed=0,
        exposed_by_kind={},
        bytes_per_device=8 * seconds,
        unknown=unknown,
    )
    return Figures.of(step, 3 * seconds if held is None else held, "v5e")


def test_what_is_not_counted_on_one_side_only_makes_the_step_void():
    all_three = {"bytes": 2.0, "step": 2.0, "memory": 2.0}
    assert compared(figures(4), figures(2)) == all_three
    both = figures(4, "cycles of fusion.3"), figures(2, "cycles of fusion.17")
    assert compared(*both) == all_three
    assert compared(figures(4, "cycles of fusion.3"), figures(2)).keys() == {"bytes", "memory"}
    assert compared(figures(4), figures(2, "trips of while.1")).keys() == {"bytes", "memory"}


def test_each_figure_is_over_that_of_the_better_expert():
    quick = figures(2, held=12)
    assert compared(figures(4), figures(8), quick) == {"bytes": 2.0, "step": 2.0, "memory": 1.0}
    void = figures(2, "trips of while.1", held=12)
    assert compared(figures(4), figures(8), void) == {"bytes": 2.0, "step": 0.5, "memory": 1.0}


def test_means_are_of_the_rows_that_have_the_figure():
    rows = [{"bytes": 4.0, "memory": 1.0}, {"bytes": 1.0, "memory": 1.0, "step": 0.5}]
    assert geometric_means(rows) == {"bytes": (2.0, 2), "step": (0.5, 1), "memory": (1.0, 2)}


def test_figures_are_kept_and_replaced_side_by_side(tmp_path):
    path = tmp_path / "figures.csv"
    first = {"a": {"sbp": figures(2, "trips of while.1", "cycles of fusion.7"), "jax": figures(3)}}
    write(first, "1.0", path)
    write({"a": {"sbp": figures(4)}, "b": {"expert": figures(5)}}, "1.1", path)
    assert read(path) == {
        "a": {"sbp": figures(4), "jax": figures(3)},
        "b": {"expert": figures(5)},
    }
    write(first, "1.0", path)
    assert read(path)["a"] == first["a"]


def test_table_has_the_worst_first_and_marks_what_is_above_what_is_asked():
    good, bad = figures(2), dataclasses.replace(figures(2), held=12)
    kept = {
        "fine": {"expert": good, "sbp": good},
        "heavy": {"expert": good, "shard_map": good, "sbp": bad},
        "void": {"expert": good, "sbp": figures(2, "trips of while.1")},
        "alone": {"sbp": good},
    }
    assert table(kept, {name: name.upper() for name in kept}).splitlines()[2:] == [
        "| HEAVY | `jit`, by hand | 1.00 | 1.00 | **2.00** | 0.50 |",
        "| FINE | `jit` | 1.00 | 1.00 | 1.00 | 0.50 |",
        "| VOID | `jit` | 1.00 | void | 1.00 | 0.50 |",
        "| geometric mean | | 1.00 | 1.00 of 2 | 1.26 | |",
    ]
    assert floor([good, figures(1)]) == pytest.approx(0.5)


def test_steps_without_types_are_compared_with_those_with_types():
    kept = {
        "both": {"sbp": figures(4), "free": dataclasses.replace(figures(2), held=24)},
        "pinned": {"sbp": figures(4)},
    }
    assert free_table(kept, {"both": "BOTH", "pinned": "PINNED"}).splitlines()[2:] == [
        "| BOTH | 0.50 | 0.50 | **2.00** |"
    ]


def test_readme_shows_the_figures_that_are_kept():
    text = (Path(__file__).parents[2] / "docs" / "benchmarks.md").read_text(encoding="utf-8")
    assert all(table in text for table in tables())


def test_every_step_has_figures_of_sbp_and_of_an_expert():
    assert read().keys() == (SUITE | UNSEEN).keys()
    assert all({"expert", "sbp"} <= sides.keys() for sides in read().values())


PROGRAM = """\
HloModule jit_step, is_scheduled=true

%add (a: f32[], b: f32[]) -> f32[] {
  %a = f32[] parameter(0)
  %b = f32[] parameter(1)
  ROOT %sum = f32[] add(%a, %b)
}

%body (p: (u32[], f32[8,4])) -> (u32[], f32[8,4]) {
  %p = (u32[], f32[8,4]) parameter(0)
  %i = u32[] get-tuple-element(%p), index=0
  %x = f32[8,4]{1,0} get-tuple-element(%p), index=1
  %one = u32[] constant(1)
  %next = u32[] add(%i, %one)
  %work = f32[8,4]{1,0} fusion(%x), kind=kLoop, calls=%add, CYCLES{"estimated_cycles":"10"}
  %r = f32[8,4]{1,0} all-reduce(%work), replica_groups={{0,1}}, to_apply=%add
  ROOT %t = (u32[], f32[8,4]) tuple(%next, %r)
}

%cond (p: (u32[], f32[8,4])) -> pred[] {
  %p = (u32[], f32[8,4]) parameter(0)
  %i = u32[] get-tuple-element(%p), index=0
  BOUND
  ROOT %less = pred[] compare(%i, %bound), direction=LT
}

ENTRY %main (x: f32[8,4]) -> f32[8,4] {
  %x = f32[8,4]{1,0} parameter(0)
  %zero = u32[] constant(0)
  %init = (u32[], f32[8,4]) tuple(%zero, %x)
  %loop = (u32[], f32[8,4]) while(%init), condition=%cond, body=%bodyTRIPS
  %out = f32[8,4]{1,0} get-tuple-element(%loop), index=1
  ROOT %last = f32[8,4]{1,0} fusion(%out), kind=kLoop, calls=%add, CYCLES{"estimated_cycles":"5"}
}
""".replace("CYCLES", "backend_config=")

BOUNDS = {
    "signed": ("%bound = s32[] constant(7)", ""),
    "unsigned": ("%bound = u32[] constant(7)", ""),
    "laid out": ("%bound = u32[]{:T(128)} constant(7)", ""),
    "known": (
        "%bound = u32[] get-tuple-element(%p), index=0",
        ', backend_config={"known_trip_count":{"n":"7"}}',
    ),
}


UNSIGNED = PROGRAM.replace("BOUND", BOUNDS["unsigned"][0]).replace("TRIPS", "")


@pytest.mark.parametrize(("bound", "trips"), BOUNDS.values(), ids=BOUNDS)
def test_a_loop_counts_once_per_trip(bound, trips):
    text = PROGRAM.replace("BOUND", bound).replace("TRIPS", trips)
    (found,) = collectives(text, 2)
    assert (found.executions, found.bytes_per_device) == (7, 7 * 8 * 4 * 4)
    step = step_time(text, 2)
    assert (step.cycles, step.unknown) == (7 * 10 + 5, ())
    v5e = CHIPS["v5e"]
    assert step.exposed == pytest.approx(7 * (v5e.latency + 8 * 4 * 4 / v5e.bandwidth))
    assert step.bytes_per_device == 7 * 8 * 4 * 4


def test_a_loop_without_a_bound_is_named():
    text = PROGRAM.replace("BOUND", BOUNDS["known"][0]).replace("TRIPS", "")
    assert step_time(text, 2).unknown == ("trips of loop",)
    assert [c.executions for c in collectives(text, 2)] == [1]


def test_cycles_that_the_compiler_does_not_know_are_named():
    text = UNSIGNED.replace('"estimated_cycles":"5"', f'"estimated_cycles":"{2**62}"')
    assert step_time(text, 2).unknown == ("cycles of last",)


def test_cycles_of_products_are_those_of_fusions_that_hold_one():
    """Seven turns of a fusion of ten cycles; an operation of five beside it holds none."""
    text = UNSIGNED.replace("fusion(%out), kind=kLoop, calls=%add", "copy(%out)")
    assert step_time(text, 2).products == 0
    product = "  %m = f32[] convolution(%a, %b), dim_labels=b_io->bf\n  ROOT %sum"
    assert step_time(text.replace("  ROOT %sum", product), 2).products == 7 * 10


def test_a_turn_of_a_collective_matmul_makes_several_steps():
    """Four permutes in the body are two steps each way."""
    permutes = "\n".join(
        f"  %permute.{k} = f32[8,4]{{1,0}} collective-permute(%x), source_target_pairs=PAIRS"
        for k in range(4)
    )
    permutes = permutes.replace("PAIRS", "{{0,1},{1,0}}")
    reduce = next(line for line in PROGRAM.splitlines() if " all-reduce(" in line)
    text = PROGRAM.replace("BOUND", "%bound = s32[] constant(8)").replace("TRIPS", "")
    for name in ("cond", "body"):
        text = text.replace(f"%{name}", f"%windowed_dot_general_{name}_ag.1")
    text = text.replace(reduce, permutes + "\n  %r = f32[8,4]{1,0} copy(%permute.3)")
    assert [c.executions for c in collectives(text, 2)] == [4] * 4


ASYNCHRONOUS = """\
HloModule jit_step, is_scheduled=true

%SCATTERED (p: f32[8,4]) -> f32[4,4] {
  %p = f32[8,4]{1,0} parameter(0)
  %whole = f32[8,4]{1,0} all-reduce(%p), replica_groups={{0,1}}, to_apply=%add
  ROOT %own = f32[4,4]{1,0} slice(%whole), slice={[0:4], [0:4]}
}

ENTRY %main (x: f32[8,4], y: f32[1048576]) -> f32[4,4] {
  %x = f32[8,4]{1,0} parameter(0)
  %y = f32[1048576]{0} parameter(1)
  %start = (f32[1048576], f32[2097152]) all-gather-start(%y), replica_groups={{0,1}}, dimensions={0}
  %work = f32[8,4]{1,0} fusion(%x), kind=kLoop, calls=%add, CYCLES{"estimated_cycles":"HIDDEN"}
  %done = f32[2097152]{0} all-gather-done(%start)
  ROOT %last = f32[4,4]{1,0} fusion(%work), calls=%SCATTERED, CYCLES{"estimated_cycles":"9"}
}
""".replace("CYCLES", "backend_config=").replace("SCATTERED", "all-reduce-scatter.1")


@pytest.mark.parametrize("hidden", [1000, 10_000, 10_000_000])
def test_a_collective_runs_beside_what_is_scheduled_until_its_done(hidden):
    """Of the all-gather counts what the work beside it leaves; the reduce-scatter in a fusion
    counts wholly, and once."""
    v5e = CHIPS["v5e"]
    gathered = v5e.latency + 4 * 2**20 / v5e.bandwidth
    scattered = v5e.latency + 8 * 4 * 4 / 2 / v5e.bandwidth
    step = step_time(ASYNCHRONOUS.replace("HIDDEN", str(hidden)), 2)
    assert step.cycles == hidden + 9
    left = max(0.0, gathered - hidden / v5e.hertz)
    assert step.exposed == pytest.approx(left + scattered)
    assert step.exposed_by_kind == pytest.approx(
        {"asynchronous all-gather": left, "synchronous reduce-scatter": scattered}
    )
    assert step.bytes_per_device == 4 * 2**20 + 8 * 4 * 4 / 2
    assert step.seconds == step.compute + step.exposed
