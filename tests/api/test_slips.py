"""Slips before a program is typed have helps, which are edits that were tried."""

import textwrap
from typing import Any

import jax
import jax.numpy as jnp
import pytest

import sbp
from benchmarks.fault_suite import checked
from sbp.errors import SourceEdit
from tests.edits import edited_text

HEAD = textwrap.dedent(
    """
    import jax, jax.numpy as jnp, sbp
    mesh = jax.sharding.AbstractMesh((2, 4), ("data", "model"))
    layout = sbp.Layout(batch="data", heads="model")
    x, w = jax.ShapeDtypeStruct((8, 16), jnp.float32), jax.ShapeDtypeStruct((16, 16), jnp.float32)
    args = (x, {"blocks": [{"up": w}, {"up": w}]})
    def program(x, params):
        {line}
        for p in params["blocks"]:
            x = x @ p["up"]
        return (x * x).mean(), x
    f = sbp.jit(program, mesh{options})
    report = f.check(*args)
    """
)


def mended(line: str = "pass", options: str = "") -> tuple[Any, str]:
    """The diagnostic of a program, and its source after its first help."""
    text = HEAD.replace("{line}", line).replace("{options}", options)
    found = checked("slip", text)
    (diagnostic,) = found.found
    edits = diagnostic.helps[0].edits
    assert all(isinstance(e, SourceEdit) for e in edits)
    after = edited_text(text, [e for e in edits if isinstance(e, SourceEdit)])
    assert not [d for d in checked("mended", after).found if d.severity == "error"]
    return diagnostic, after


@pytest.mark.parametrize(
    ("line", "meant"),
    [
        ('x = sbp.split(x, 0, "dta")', 'x = sbp.split(x, 0, "data")'),
        ('x = sbp.split(x, 2, "data")', 'x = sbp.split(x, 1, "data")'),
        ("x = sbp.annotate(x, modle=sbp.S(1))", "x = sbp.annotate(x, model=sbp.S(1))"),
        ("x = sbp.annotate(x, model=sbp.S(2))", "x = sbp.annotate(x, model=sbp.S(1))"),
        ('x = sbp.annotate(x, "dat:S(0)")', 'x = sbp.annotate(x, "data:S(0)")'),
        ('x = layout(x, "batch", "haeds")', 'x = layout(x, "batch", "heads")'),
    ],
)
def test_a_slip_in_an_annotation(line, meant):
    diagnostic, after = mended(line)
    assert meant in after
    assert diagnostic.primary.span.line == HEAD.splitlines().index("    {line}") + 1


@pytest.mark.parametrize(
    ("options", "meant"),
    [
        (', in_types=("data:S(2)", "B")', '("data:S(1)", "B")'),
        (', out_types=("data:S(1)", "B")', '("B", "data:S(1)")'),
        (', in_types=({"blocks": "B"}, "data:S(0)")', '("data:S(0)", {"blocks": "B"})'),
        (', in_types=("B", {"block": "B"})', '("B", {"blocks": "B"})'),
        (
            ', in_shardings=({"blocks": None}, jax.sharding.PartitionSpec("data"))',
            '(jax.sharding.PartitionSpec("data"), {"blocks": None})',
        ),
        (
            ', out_shardings=(jax.sharding.PartitionSpec("data"), None)',
            '(None, jax.sharding.PartitionSpec("data"))',
        ),
    ],
)
def test_a_slip_in_an_option(options, meant):
    diagnostic, after = mended(options=options)
    assert meant in after
    line = next(n for n, t in enumerate(HEAD.splitlines(), 1) if t.startswith("f ="))
    assert {label.span.line for label in diagnostic.labels} == {line}


@pytest.mark.parametrize("option", ["in_types", "out_types"])
@pytest.mark.parametrize("entry", ['"dta:S(0)"', 'jax.sharding.PartitionSpec("dta")'])
def test_a_misspelt_axis_in_an_option_is_refused_at_its_place(option, entry):
    """`sbp.jit` refuses it; where the mesh is that of the context, `check` has helps."""
    options = f", {option}=" + (f"({entry}, None)" if option == "in_types" else f"(None, {entry})")
    text = HEAD.replace("{line}", "pass").replace("{options}", options)
    (found,) = checked("slip", text).found
    assert found.code == "unknown-axis" and found.title.endswith('did you mean "data"?')
    assert found.title.startswith(option) and found.primary is not None
    line = text.splitlines()[found.primary.span.line - 1].encode()
    marked = line[found.primary.span.column - 1 : found.primary.span.end_column - 1].decode()
    assert marked in ('"dta:S(0)"', '"dta"'), marked
    inside = options.replace(", ", "", 1)
    later = text.replace(f"mesh{options})", inside + ")").replace(
        "report =", "with jax.sharding.use_abstract_mesh(mesh):\n    report ="
    )
    (found,) = checked("slip", later).found
    assert next(h.text for h in found.helps) == f"write 'data' for 'dta' in {option}"
    after = edited_text(later, [e for e in found.helps[0].edits if isinstance(e, SourceEdit)])
    assert not checked("slip", after).found


def test_a_misspelt_key_of_a_pattern():
    diagnostic, after = mended(options=', in_types={"blocks/*/upp": "model:S(1)"}')
    assert '{"blocks/*/up": "model:S(1)"}' in after
    assert len(diagnostic.helps) == 1


def test_an_option_in_variables_that_were_swapped():
    swapped = 'one, other = ("B", "B"), ("data:S(2)", "B"); kept = one; one = other; other = kept\n'
    text = HEAD.replace("{line}", "pass").replace("{options}", ", in_types=one")
    (diagnostic,) = checked("swapped", text.replace("f = sbp", f"{swapped}f = sbp")).found
    assert diagnostic.code == "dim-out-of-range"
    assert diagnostic.helps


def test_swapped_entries_are_shown():
    diagnostic, _ = mended(options=', out_types=("data:S(1)", "B")')
    texts = [label.text for label in diagnostic.labels]
    assert texts == ["entries 0 and 1 of out_types look swapped", "the other one"]


def test_two_dims_on_one_axis_show_where_the_layout_maps_them():
    text = 'twice = sbp.Layout(a="data", b="data"); x = twice(x, "a", "b")'
    diagnostic, _ = mended(text)
    assert [label.text for label in diagnostic.labels if not label.primary] == [
        "'a' and 'b' are mapped to 'data' here"
    ]


def test_a_correction_stays_where_it_was_tried():
    """What an inner `jax.jit` traced under a correction is not found without it."""
    inner = jax.jit(lambda x: sbp.split(x, 2, "data") * 2)
    f = sbp.jit(lambda x: inner(x), jax.sharding.AbstractMesh((2,), ("data",)))
    for _ in range(2):
        report = f.check(jax.ShapeDtypeStruct((8, 4), jnp.float32))
        assert [d.code for d in report.diagnostics] == ["dim-out-of-range"]
        assert report.diagnostics[0].helps


def test_what_is_tried_gives_no_warnings():
    f = sbp.jit(lambda x: x * 2, jax.sharding.AbstractMesh((2,), ("data",)), in_types="data:S(2)")
    report = f.check(jax.ShapeDtypeStruct((13, 9), jnp.float32))  # it divides along no dim
    assert [d.code for d in report.diagnostics] == ["dim-out-of-range"]
    assert [help_.text for help_ in report.diagnostics[0].helps] == [
        f"write {dim} for 2 in in_types" for dim in (1, 0)
    ]


@pytest.mark.parametrize(
    ("shape", "types", "helps", "left"),
    [
        (
            (8, 8),
            ["x:S(2)", *(f"y:S({n % 2}) x:?" for n in range(6))],
            2,
            15 + 2 - 12,
        ),  # swaps and renames
        ((8,) * 5, "x:S(5)", 3, 2),
        ((8,) * 4, "x:S(4)", 3, 1),
        ((8,) * 3, "x:S(3)", 3, 0),
    ],
)
def test_changes_that_were_not_tried_are_counted(shape, types, helps, left):
    """A wrong value is tried also where there are many entries to swap: here 15, beside 2 dims."""
    several = tuple(types) if isinstance(types, list) else (types,)
    mesh = jax.sharding.AbstractMesh((2, 2), ("x", "y"))
    f = sbp.jit(lambda *args: sum(x.sum() for x in args), mesh, in_types=several)
    args = [jax.ShapeDtypeStruct(shape, jnp.float32)] * len(several)
    (found,) = f.check(*args).diagnostics
    assert len(found.helps) == helps
    said = {0: (), 1: ("sbp did not try 1 more change",)}
    assert found.notes == said.get(left, (f"sbp did not try {left} more changes",))


def test_the_end_of_another_axis_name_stays():
    mesh = jax.sharding.AbstractMesh((2, 2), ("xmodel", "model_b"))
    f = sbp.jit(lambda x: sbp.annotate(x, "xmodel:S(0) model:S(1)"), mesh)
    (found,) = f.check(jax.ShapeDtypeStruct((8, 8), jnp.float32)).diagnostics
    (help_,) = found.helps
    assert help_.text.startswith("write 'model_b' for 'model' at line ")


def test_nothing_is_suggested_that_does_not_work():
    mesh = jax.sharding.AbstractMesh((2,), ("data",))
    f = sbp.jit(lambda x: sbp.split(sbp.split(x, 3, "data"), 4, "data"), mesh)
    report = f.check(jax.ShapeDtypeStruct((8, 4), jnp.float32))
    assert [d.helps for d in report.diagnostics] == [()]
