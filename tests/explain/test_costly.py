"""Costly annotations: their prices, helps that change them, and how many were not checked."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import pytest

import sbp
from sbp.errors import SourceEdit
from sbp.explain import relaxations
from sbp.explain.change import tried
from sbp.explain.pin_changes import drop_pins, repinned
from sbp.explain.relaxations import following
from sbp.infer.constraints import pin_sites
from sbp.infer.space import encode
from sbp.machine.mesh import HARDWARE
from sbp.plan.fit import best_program
from tests.edits import run_source
from tests.explain.expected import GRID, MESH, shape

BIG = jax.ShapeDtypeStruct((4096, 4096), jnp.float32)
ROWS = ("tensor:S(0)", None)


def annotated(count: int, dear: bool = True):
    """A program with so many annotations, the first of them costly if asked."""
    lines = ["def program(x, w):", "    h = x @ w"]
    lines += [f'    h = sbp.{"replicate(h," if dear else "split(h, 0,"} "tensor")']
    lines += ['    h = jnp.tanh(sbp.split(h, 0, "tensor"))'] * (count - 1)
    lines += ["    return (h @ w).sum()"]
    return lines


def program_of(lines: list[str]):
    text = "\n".join(["import jax.numpy as jnp", "import sbp", *lines, ""])
    return run_source(text, f"<written {hash(text)}>")["program"]


def report(lines: list[str]) -> sbp.Report:
    return sbp.jit(program_of(lines), MESH, in_types=ROWS).check(BIG, BIG)


notes = lambda found: [(d.title, d.notes) for d in found.diagnostics if d.severity == "note"]


@pytest.mark.parametrize(
    ("count", "dear", "operations", "unchecked"),
    [(23, True, 0, 3), (23, False, 0, 0), (2, True, 2_100, 2)],
)
def test_annotations_that_were_not_checked_are_counted(count, dear, operations, unchecked):
    """Cheap annotations are cleared together, however many there are."""
    lines = annotated(count, dear)
    lines[-1:] = [f"    for _ in range({operations}):", "        h = jnp.tanh(h)", lines[-1]]
    found = report(lines)
    titles = [title for title, _ in notes(found)]
    assert all(("refine=True" in why) == (operations > 0) for _, (why,) in notes(found))
    title = f"sbp did not check what {unchecked} of {count} annotations cost"
    assert titles == ([title] if unchecked else [])
    assert found.ok and all(t in found.text() and t in found.short().text() for t in titles)


def test_a_refined_report_checks_what_another_leaves_out(monkeypatch):
    monkeypatch.setattr(relaxations, "FIRST_NODES", 1)
    plan = sbp.jit(program_of(annotated(2)), MESH, in_types=ROWS).plan(BIG, BIG)
    ((_, (why,)),) = notes(plan.report())
    assert "checks 0; plan.report(refine=True) checks 2" in why
    refined = plan.report(refine=True).diagnostics
    assert [d.severity for d in refined] == ["warning"] and plan.report().diagnostics == refined


def test_the_dearest_is_judged_first_and_the_others_without_it():
    """The second annotation only undoes what the first one asks: without the first it is free."""
    lines = ["def program(x, w):", "    h = jnp.tanh(x @ w)"]
    lines += ['    h = sbp.split(h, 1, "tensor")', '    h = sbp.split(jnp.sin(h), 0, "tensor")']
    lines += ["    return (h @ w).sum()"]
    warned = [d for d in report(lines).diagnostics if d.severity == "warning"]
    assert [d.labels[0].span.line for d in warned] == [5]


def test_a_second_costly_annotation_is_priced_without_the_first():
    lines = ["def program(x, w):", '    h = sbp.replicate(x @ w, "tensor")']
    lines += ['    g = sbp.replicate(jnp.tanh(x @ (2 * w)), "tensor")']
    lines += ["    return (h * 2).sum() + (g @ w).sum()"]
    said = "sbp computed these prices without the annotations of the warnings above"
    warned = [d for d in report(lines).diagnostics if d.severity == "warning"]
    assert [d.notes for d in warned] == [(), (said,)]


def test_annotations_that_cost_next_to_nothing_are_not_named():
    """Below 10 microseconds a warning is noise, unless the plan moves a MiB and a tenth of that for
    the annotation."""
    program = lambda x, w1, w2: (jnp.tanh(sbp.replicate(x @ w1, "tensor")) @ w2).sum()

    def warned(size, hardware):
        f = sbp.jit(program, MESH, in_types=("tensor:S(0)", None, None), hardware=hardware)
        return bool(f.check(*[shape(size, size)] * 3).diagnostics)

    slow = dataclasses.replace(HARDWARE["tpu-v3"], latency_seconds=0.0)
    fast = dataclasses.replace(slow, link_bytes_per_second=slow.link_bytes_per_second * 100)
    assert [[warned(size, hw) for size in (64, 1024)] for hw in (slow, fast)] == [[False, True]] * 2


def replicated(x, w):
    h = sbp.replicate(x @ w, "tensor")
    return (jnp.tanh(h) @ w).sum()


def sites():
    request = sbp.jit(replicated, MESH, in_types=ROWS).trace(BIG, BIG).request
    return request, next(s for s in pin_sites(request) if s.source == "annotation")


def test_what_stays_costly_is_no_help(monkeypatch):
    """Where the plan reads the value as it is pinned, another type is no better."""
    request, site = sites()
    with_pin, without = map(best_program, (request, drop_pins(request, site)))
    assert with_pin is not None and not [*following(request, site, with_pin)]
    assert without is not None and [*following(request, site, without)]
    monkeypatch.setattr("sbp.explain.relaxations.DEARER", 1e12)
    assert not [*following(request, site, without)]


def accepted(request, site, atom):
    change = repinned(request, site, (encode(atom),))
    return tried([change] if change.edits else [], plans=1).accepted


def test_a_split_of_a_dim_that_is_not_there_has_no_plan():
    request, site = sites()
    assert not accepted(request, site, sbp.S(2))
    ((change, program),) = accepted(request, site, sbp.S(1))
    assert change.text.split(" to ")[1].startswith("tensor:S(1) at line")
    assert change.help(program).bytes_per_device == program.cost.bytes_per_device


def test_a_dim_of_vmap_is_no_dim_for_a_pin():
    """The plan without the pin splits the batch, which the function inside `jax.vmap` does not
    see: no other pin there asks that. A dim that it sees is named as it is written."""

    def batched(x, w):
        return jax.vmap(lambda row: jnp.tanh(sbp.split(row, 1, "tensor")) @ w)(x)

    shapes = shape(8, 64, 64), shape(64, 64)
    request = sbp.jit(batched, MESH).trace(*shapes).request
    site = next(s for s in pin_sites(request) if s.source == "annotation")
    assert not accepted(request, site, sbp.S(0))
    ((change, _),) = accepted(request, site, sbp.S(1))
    assert " to tensor:S(0) at line" in change.text
    (edit,) = (e for e in change.edits if isinstance(e, SourceEdit))
    assert edit.replacement == 'sbp.split(row, 0, "tensor")'


# ---- gathered matrices ---------------------------------------------------------------------------
# Notes of large matrices that a decomposition or a transform takes whole.


LARGE = jax.ShapeDtypeStruct((2048, 2048), jnp.float32)


def notes_of(fn: Callable[[Any], Any], x: jax.ShapeDtypeStruct, pin: str) -> list[sbp.Diagnostic]:
    report = sbp.jit(fn, GRID, in_types=(pin,), hardware="tpu-v5e").check(x)
    return [d for d in report.diagnostics if d.code == "gathered-matrix"]


@pytest.mark.parametrize(
    ("fn", "pin"),
    [
        (lambda x: jnp.linalg.cholesky(x), "model:S(0)"),
        (lambda x: jnp.linalg.qr(x)[0], "model:S(1)"),
        (lambda x: jax.scipy.linalg.solve_triangular(x, jnp.ones((2048, 1))), "data:S(0)"),
        (lambda x: jnp.fft.fft(jnp.cos(x).reshape(-1)), "model:S(0)"),
    ],
    ids=["cholesky", "qr", "solve", "fft"],
)
def test_a_large_matrix_is_noted(fn: Callable[[Any], Any], pin: str):
    found = notes_of(fn, LARGE, pin)
    assert found and all(d.severity == "note" for d in found)
    (label,) = found[0].labels
    assert label.span.file == __file__ and " whole, so sbp gathers it on `" in label.text
    (note,) = found[0].notes
    assert note.endswith(" only along its batch dims: each device needs the other dims whole")


@pytest.mark.parametrize(
    ("fn", "x", "pin"),
    [
        (lambda x: jnp.linalg.cholesky(x), shape(16, 512, 512), "model:S(0)"),
        (lambda x: jnp.fft.fft(x), LARGE, "model:S(0)"),
        (lambda x: jnp.linalg.cholesky(x[:8, :8]), LARGE, "model:S(0)"),
        (lambda x: x @ x, LARGE, "model:S(0)"),
    ],
    ids=["batch", "other dim", "small", "product"],
)
def test_others_are_not(fn: Callable[[Any], Any], x: jax.ShapeDtypeStruct, pin: str):
    assert not notes_of(fn, x, pin)
