"""False claims of hand-written regions are refused, and what is not checked is said."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax import lax

import sbp
from sbp import B, P, S
from tests.handwritten.regions import MESHES, ONE, TWO, arrays, assert_close, mesh_of


@pytest.fixture(params=MESHES, ids=["8", "2x4"])
def mesh(request: pytest.FixtureRequest) -> Any:
    return mesh_of(request.param)


def refused(fn: Any, mesh: Any, *args: Any) -> Any:
    with pytest.raises(sbp.SbpTypeError) as caught:
        sbp.jit(fn, mesh).plan(*args)
    (found,) = caught.value.diagnostics
    assert found.code == "manual-types" and found.primary is not None
    assert found.primary.span.file == __file__
    return found


def test_a_missing_reduction_is_refused(mesh: Any):
    x, w = arrays((8, 16), (16, 4))
    g = sbp.manual(lambda x, w: x @ w, in_types=("model:S(1)", "model:S(0)"), out_types="B")
    found = refused(lambda x, w: g(x, w) * 2, mesh, x, w)
    assert [label.text for label in found.labels] == [
        "P(sum) from here on",
        "out_types say that result 0 is whole",
    ]
    assert found.title == "`x @ w` is left partial on mesh axis `model`"
    report = sbp.jit(g, mesh).check(x, w)
    assert not report.ok and report.diagnostics[0].code == "manual-types"


def test_a_reduction_over_the_wrong_axis_is_refused():
    x, w = arrays((8, 16), (16, 4))
    g = sbp.manual(
        lambda x, w: lax.psum(x @ w, "data"), in_types=("model:S(1)", "model:S(0)"), out_types="B"
    )
    found = refused(g, mesh_of(TWO), x, w)
    assert "is left partial on mesh axis `model`" in found.title
    assert "runs over `data`" in found.notes[0]


def test_a_part_that_is_taken_for_the_value_is_refused(mesh: Any):
    """tanh of a part, summed, is not tanh of the sum; a sum of doubled parts is double the sum."""
    (x,) = arrays((8, 16))
    wrong = sbp.manual(
        lambda h: lax.psum(jnp.tanh(h), "model"), in_types="model:P(sum)", out_types="B"
    )
    found = refused(wrong, mesh, x)
    assert found.title == "`jnp.tanh(h)` takes a partial value on mesh axis `model`"
    right = sbp.manual(lambda h: lax.psum(2 * h, "model"), in_types="model:P(sum)", out_types="B")
    assert_close(sbp.jit(right, mesh)(x), 2 * x)
    through = sbp.manual(lambda h: 2 * h, in_types="model:P(sum)", out_types="model:P(sum)")
    assert_close(sbp.jit(through, mesh)(x), 2 * x)
    shifted = sbp.manual(lambda h: h + 1, in_types="model:P(sum)", out_types="model:P(sum)")
    assert "adds a whole value to a partial one" in refused(shifted, mesh, x).title


def weighed_by_index(h):
    """Weighs the parts by the index of the device, so that the parts no longer add up."""
    return lax.psum(h * (lax.axis_index("model") + 1.0), "model")


def first_only(x):
    """Differs by device."""
    return x * (lax.axis_index("model") + 1.0)


def test_a_region_that_depends_on_the_device_is_refused(mesh: Any):
    (x,) = arrays((8, 16))
    wrong = sbp.manual(weighed_by_index, in_types="model:P(sum)", out_types="B")
    found = refused(wrong, mesh, x)
    assert "result 0 differs" in found.title
    found = refused(lambda x: sbp.manual(first_only, "B", "B")(x), mesh, x)
    assert "differs between the devices of mesh axis `model` and is returned as B" in found.title


def test_what_cannot_be_checked_is_said(mesh: Any):
    groups = lambda x: lax.psum(x, "model", axis_index_groups=[list(range(lax.axis_size("model")))])
    g = sbp.manual(groups, in_types="model:S(0)", out_types="B")
    with pytest.warns(sbp.SbpWarning, match="manual-types: .*is not checked"):
        sbp.jit(g, mesh).plan(jnp.ones((16, 2)))


def test_a_region_that_is_too_large_to_check_is_said():
    """Up to 4,194,304 elements of a value over all devices are checked; here are 8 more."""
    total = sbp.manual(lambda x: lax.psum(x.sum(), "model"), in_types="model:S(0)", out_types="B")
    with pytest.warns(sbp.SbpWarning, match="has 4,194,312 elements .* only 4,194,304 are tried"):
        plan = sbp.jit(total, mesh_of(ONE)).plan(jax.ShapeDtypeStruct((2**22 + 8,), "float32"))
    said = plan.report().diagnostics[0]
    assert said.code == "manual-types" and "is not checked" in said.title


@pytest.mark.parametrize(
    ("in_types", "out_types", "text"),
    [
        (("modle:S(0)",), "B", 'no axis "modle"|no axis .modle.; did you mean "model"'),
        (("model:S(2)",), "B", "dim-out-of-range"),
        (("model:?",), "B", "complete types"),
        ((None,), "B", "complete types"),
        (("B", "B"), "B", "2 entries for 1 arguments"),
        (("B",), "model:P(and)", "cannot be P"),
        (("B",), {"a": "B"}, "no prefix"),
    ],
)
def test_types_that_do_not_fit(in_types: Any, out_types: Any, text: str):
    with pytest.raises(sbp.SbpError, match=text):
        sbp.jit(sbp.manual(jnp.sin, in_types, out_types), mesh_of(ONE)).plan(jnp.ones((8, 8)))


def test_the_function_must_be_one():
    number: Any = 3
    with pytest.raises(sbp.SbpError, match="takes a function"):
        sbp.manual(number, "B", "B")
    assert S(0) != B != P
