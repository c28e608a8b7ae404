"""Helps for pins that have a typing on each mesh axis, but not on all axes together."""

import jax
import jax.numpy as jnp

import sbp
from sbp.errors import SourceEdit
from sbp.explain.change import DiagnosisLimits
from sbp.explain.faults import explain
from tests.edits import check_helps

MESH = jax.sharding.AbstractMesh((2, 4), ("data", "model"))
X = jax.ShapeDtypeStruct((16, 16), jnp.float32)
EXPLICIT = {"boxing": "explicit"}


def two_conflicts(x, z):
    a = jnp.tanh(sbp.annotate(x, data=sbp.B, model=sbp.S(0)))
    b = jnp.tanh(sbp.annotate(x, data=sbp.S(0), model=sbp.B))
    c = jnp.tanh(sbp.annotate(z, data=sbp.B, model=sbp.S(0)))
    d = jnp.tanh(sbp.annotate(z, data=sbp.S(0), model=sbp.B))
    return a + b, c * d


def found(program, options, count):
    (error,) = sbp.jit(program, MESH, **options).check(*[X] * count).diagnostics
    assert "on the mesh axes `data`, `model` together" in error.title
    check_helps(program, MESH, options, (X,) * count, [error])
    return error


def test_two_pins_are_dropped_where_no_one_pin_helps():
    error = found(two_conflicts, EXPLICIT, 2)
    start = two_conflicts.__code__.co_firstlineno
    for help_ in error.helps:
        lines = {e.span.line - start for e in help_.edits if isinstance(e, SourceEdit)}
        assert len(lines & {1, 2}) == len(lines & {3, 4}) == 1, help_
    assert "not shown: 1 more change that fixes this error" in error.notes


def test_two_inputs_are_left_free():
    types = ("data:S(1) model:S(1)", "data:B model:S(1)") * 2
    error = found(lambda x, y, z, w: (x + y, z * w), EXPLICIT | {"in_types": types}, 4)
    assert error.helps[0].text == "leave x free in in_types and leave z free in in_types"
    assert len(error.helps[0].edits) == 2


def test_changes_that_were_not_tried_are_counted():
    request = sbp.jit(two_conflicts, MESH, boxing="explicit").trace(X, X).request
    (few,) = explain(request, limits=DiagnosisLimits(plans=1))
    assert len(few.helps) == 1 and "not tried: 5 more changes" in few.notes
