"""The report says how many annotations were not checked for their cost, and why."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AbstractMesh

import sbp
from sbp.explain.costly import CostSearch
from sbp.infer.constraints import pin_sites

MESH = AbstractMesh((8,), ("tensor",))
BIG = jax.ShapeDtypeStruct((4096, 4096), jnp.float32)


def annotated(count: int, dear: bool = True):
    """A program with so many annotations, the first of them costly if asked."""
    lines = ["def program(x, w):", "    h = x @ w"]
    lines += [f'    h = sbp.{"replicate(h," if dear else "split(h, 0,"} "tensor")']
    lines += ['    h = jnp.tanh(sbp.split(h, 0, "tensor"))'] * (count - 1)
    lines += ["    return (h @ w).sum()"]
    return lines


def program_of(lines: list[str], tmp_path):
    path = tmp_path / "written.py"
    path.write_text("\n".join(["import jax.numpy as jnp", "import sbp", *lines, ""]))
    names: dict = {}
    exec(compile(path.read_text(), str(path), "exec"), names)
    return names["program"]


def report(lines: list[str], tmp_path) -> sbp.Report:
    f = sbp.jit(program_of(lines, tmp_path), MESH, in_types=("tensor:S(0)", None))
    return f.check(BIG, BIG)


def notes(found: sbp.Report) -> list[tuple[str, tuple[str, ...]]]:
    return [(d.title, d.notes) for d in found.diagnostics if d.severity == "note"]


def test_annotations_beyond_the_first_twenty_are_counted(tmp_path):
    found = report(annotated(23), tmp_path)
    title = "3 of 23 annotations were not checked for what they cost"
    assert notes(found) == [(title, ("the first 20 of 23 annotations are checked",))]
    assert found.ok
    assert title in found.text() and title in found.short().text()


def test_cheap_annotations_are_cleared_together_however_many(tmp_path):
    assert notes(report(annotated(23, dear=False), tmp_path)) == []


def test_a_large_program_says_that_nothing_was_checked(tmp_path):
    lines = annotated(6)
    lines[-1:] = ["    for _ in range(1500):", "        h = jnp.tanh(h)", lines[-1]]
    found = report(lines, tmp_path)
    ((title, (reason,)),) = notes(found)
    assert title == "6 of 6 annotations were not checked for what they cost"
    assert reason.endswith(
        "operations; above 1,500, programs with more than 4 annotations are not checked"
    )
    assert not any(d.severity == "warning" for d in found.diagnostics)
    assert "\n1 note" in found.text()


@pytest.mark.parametrize(
    ("most", "dear", "undecided"), [(0, 0, 8), (2, 0, 8), (4, 1, 7), (40, 1, 0)]
)
def test_annotations_left_when_the_choices_are_used_up_are_counted(tmp_path, most, dear, undecided):
    f = sbp.jit(program_of(annotated(8), tmp_path), MESH, in_types=("tensor:S(0)", None))
    program = f.plan(BIG, BIG).program
    search = CostSearch(program.request, most)
    sites = [s for s in pin_sites(program.request) if s.source == "annotation"]
    assert len(search.cheaper(sites, 0.9 * program.cost.seconds)) == dear
    assert search.undecided == undecided


def test_the_dearest_is_judged_first_and_the_others_without_it(tmp_path):
    """The second annotation only undoes what the first one asks: without the first it is free."""
    lines = ["def program(x, w):", "    h = jnp.tanh(x @ w)"]
    lines += ['    h = sbp.split(h, 1, "tensor")', '    h = sbp.split(jnp.sin(h), 0, "tensor")']
    lines += ["    return (h @ w).sum()"]
    warned = [d for d in report(lines, tmp_path).diagnostics if d.severity == "warning"]
    assert [d.labels[0].span.line for d in warned] == [5]


def test_a_second_costly_annotation_is_priced_without_the_first(tmp_path):
    lines = ["def program(x, w):", '    h = sbp.replicate(x @ w, "tensor")']
    lines += ['    g = sbp.replicate(jnp.tanh(x @ (2 * w)), "tensor")']
    lines += ["    return (h * 2).sum() + (g @ w).sum()"]
    warned = [d for d in report(lines, tmp_path).diagnostics if d.severity == "warning"]
    assert len(warned) == 2
    assert not warned[0].notes
    assert warned[1].notes == ("both plans and the helps are without the dearer annotation above",)
