"""Figures of the everyday steps: what is compared, what is kept, and what the page shows."""

import dataclasses
from pathlib import Path

import pytest

from benchmarks.hlo.schedule import CHIPS, StepTime
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

PAGE = Path(__file__).parents[2] / "docs" / "benchmarks.md"


def figures(seconds, *unknown, held=None):
    hertz = CHIPS["v5e"].hertz
    step = StepTime(
        cycles=0,
        compute=seconds,
        products=seconds / 2 * hertz,
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
    rows = free_table(kept, {"both": "BOTH", "pinned": "PINNED"}).splitlines()[2:]
    assert rows == ["| BOTH | 0.50 | 0.50 | **2.00** |"]


def test_readme_shows_the_figures_that_are_kept():
    text = PAGE.read_text(encoding="utf-8")
    assert all(table in text for table in tables())


def test_every_step_has_figures_of_sbp_and_of_an_expert():
    assert read().keys() == (SUITE | UNSEEN).keys()
    assert all({"expert", "sbp"} <= sides.keys() for sides in read().values())
