"""The report says how many annotations were not checked for their cost, and why."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AbstractMesh

import sbp

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


@pytest.mark.parametrize(
    ("count", "dear", "operations", "unchecked"),
    [(23, True, 0, 3), (23, False, 0, 0), (2, True, 13_000, 2)],
)
def test_annotations_that_were_not_checked_are_counted(
    tmp_path, count, dear, operations, unchecked
):
    """Cheap annotations are cleared together, however many there are."""
    lines = annotated(count, dear)
    lines[-1:] = [f"    for _ in range({operations}):", "        h = jnp.tanh(h)", lines[-1]]
    found = report(lines, tmp_path)
    titles = [title for title, _ in notes(found)]
    title = f"{unchecked} of {count} annotations were not checked for what they cost"
    assert titles == ([title] if unchecked else [])
    assert found.ok and all(t in found.text() and t in found.short().text() for t in titles)


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
    assert warned[1].notes == ("both plans and the helps are without the dearer annotations above",)
