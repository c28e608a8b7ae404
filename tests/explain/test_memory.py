"""A memory limit that a pin breaks: the error offers to free that pin, with the plan's price."""

import re
from typing import Any

import jax
import jax.numpy as jnp
import pytest

import sbp
from sbp.errors import SHOWN, OptionEdit
from tests.edits import helped

MESH = jax.sharding.AbstractMesh((2, 4), ("x", "y"))
SQUARE = jax.ShapeDtypeStruct((1024, 1024), jnp.float32)


def annotated(w, x):
    return (x @ sbp.replicate(w * 2, "x", "y")).sum()


def plain(w, x):
    return (x @ w).sum()


@pytest.mark.parametrize(
    ("fn", "options", "said"),
    [
        (annotated, {}, 'drop `sbp.replicate(w * 2, "x", "y")` at line 19'),
        (plain, {"in_types": ("B", "x:S(0)")}, "leave w free in in_types"),
    ],
)
def test_the_pin_without_which_a_plan_fits_is_freed(fn, options, said):
    asked: dict[str, Any] = {**options, "memory_limit": 4.5e6}
    (found,) = helped(fn, MESH, (SQUARE, SQUARE), **asked)
    assert found.code == "memory-limit"
    *first, dropped = [h.text for h in found.helps[:-1]]
    assert dropped == said
    assert [t[:4] for t in first] == ["pin "]
    pinned = [label.text for label in found.labels if not label.primary]
    assert pinned == (["w * 2 is pinned x:B y:B"] if fn is annotated else [])
    assert found.helps[0].peak_memory_bytes is not None
    assert found.helps[0].peak_memory_bytes <= 4.5e6
    assert found.helps[-1].text.startswith("memory_limit=")


def step(params, x, y):
    def loss(params):
        return ((jnp.tanh(x @ params["a"]) @ params["b"] - y) ** 2).mean()

    return jax.tree.map(lambda p, g: p - g, params, jax.grad(loss)(params))


def test_pins_without_which_a_plan_fits_only_together_are_freed_together():
    shape = lambda *s: jax.ShapeDtypeStruct(s, jnp.float32)
    args = {"a": shape(256, 1024), "b": shape(1024, 256)}, shape(512, 256), shape(512, 256)
    options: dict[str, Any] = {
        "in_types": ({"a": "B", "b": "B"}, None, None),
        "out_types": {"a": "x:? y:?", "b": "x:? y:?"},
        "memory_limit": int(2.5 * 2**20),
        "hardware": "tpu-v5e",
    }
    (found,) = helped(step, MESH, args, **options)
    first = found.helps[0]
    assert first.text.startswith("leave params['")
    assert " free in in_types and leave params['" in first.text
    assert first.peak_memory_bytes is not None
    assert first.peak_memory_bytes <= options["memory_limit"]


def test_no_pin_is_freed_in_vain():
    (found,) = (
        sbp.jit(plain, MESH, in_types=("x:S(0)", None), memory_limit=1e4)
        .check(SQUARE, SQUARE)
        .diagnostics
    )
    assert [h.text.split("=")[0] for h in found.helps] == ["memory_limit"]


def test_equal_values_are_told_once():
    """Three stacked results of one scan fill the memory alike."""
    mesh = jax.sharding.AbstractMesh((8,), ("data",))

    def program(w, x):
        def body(c, _):
            c = sbp.replicate(jnp.tanh(c @ w))
            return c, (c, c + 1, 2 * c)

        first, second, third = jax.lax.scan(body, x, None, length=8)[1]
        return (first * second * third).sum()

    aval = jax.ShapeDtypeStruct((256, 256), jnp.float32)
    (fault,) = sbp.jit(jax.grad(program), mesh, memory_limit=3e5).check(aval, aval).diagnostics
    *notes, rest = [note for note in fault.notes if "per device" in note]
    assert len(notes) == len(set(notes)) == SHOWN
    assert re.fullmatch(r"\d+ more values: .* per device in all", rest)


def test_the_error_says_the_floor_and_what_fills_it():
    (found,) = sbp.jit(annotated, MESH, memory_limit=1e5).check(SQUARE, SQUARE).diagnostics
    (edit,) = found.helps[-1].edits
    assert isinstance(edit, OptionEdit)
    floor = f"{edit.value / 2**20:.1f} MiB per device"
    assert found.title.endswith(f"the smallest plan that it found takes {floor}")
    first, second, *_ = found.notes
    assert first.startswith(
        "w of shape (1024, 1024) as B takes 4.0 MiB per device; split as S(0) on `y`, "
    )
    assert second.endswith("takes 512.0 KiB per device")


def test_values_that_fill_nothing_are_counted_only():
    (found,) = sbp.jit(annotated, MESH, memory_limit=1e5).check(SQUARE, SQUARE).diagnostics
    assert found.notes[-2] == "2 more values: 8.0 B per device in all"
    assert found.notes[-1] == "a smaller plan may exist: sbp does not try every plan"
    assert not any("4.0 B" in label.text for label in found.labels)


def test_what_helps_leave_out_is_said():
    """A pin that gives a help of its own, one that gives two, and one that is not tried."""

    def program(a, b, c):
        h = sbp.annotate(a @ b, x=sbp.P, y=sbp.B)
        return jnp.exp(h).sum() + (jnp.exp(c) @ c).sum()

    shape = lambda *s: jax.ShapeDtypeStruct(s, jnp.float32)
    args = shape(2048, 8), shape(8, 2048), shape(1024, 1024)
    options: dict[str, Any] = {"in_types": ("x:S(1)", None, "B"), "memory_limit": 24e6}
    (found,) = sbp.jit(program, MESH, **options).check(*args).diagnostics
    assert len(found.helps) == 3
    assert "not shown: 1 more change that fixes this error" in found.notes
    assert "not tried: 1 more change" in found.notes
