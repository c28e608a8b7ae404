"""Helps that change two pins together."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import sbp
from sbp.errors import OptionEdit
from sbp.explain.change import DiagnosisLimits
from sbp.explain.faults import explain
from tests.edits import check_helps

MESH = jax.sharding.AbstractMesh((8,), ("d",))
SQUARE = jax.ShapeDtypeStruct((64, 64), jnp.float32)
FOUR = (SQUARE,) * 4
STRICT: dict[str, Any] = {"boxing": "explicit"}
SIDES = ("d:S(1)", "d:S(1)", "d:S(0)", "d:S(0)")


def sums(a, b, c, d):
    return (a + b) * (c + d)


def pinned_sums(a, b, c, d):
    a = sbp.split(a, 1, "d")
    b = sbp.split(b, 1, "d")
    c = sbp.split(c, 0, "d")
    d = sbp.split(d, 0, "d")
    return (a + b) * (c + d)


def found(fn, args=FOUR, **options):
    diagnostics = sbp.jit(fn, MESH, **STRICT, **options).check(*args).diagnostics
    check_helps(fn, MESH, {**STRICT, **options}, args, diagnostics)
    (d,) = diagnostics
    return d.helps


def test_two_annotations_change_together():
    texts = [h.text for h in found(pinned_sums)]
    line = pinned_sums.__code__.co_firstlineno
    a, b = f"a on dim 0 at line {line + 1}", f"b on dim 0 at line {line + 2}"
    assert texts[0] == f"split {a} and split {b}; the result becomes S(0)"
    assert sum(" and " in t for t in texts) == 1


def test_a_pair_that_gives_up_a_split_hides_no_change_of_one_place():
    """A row split of `x` with `w` replicated has a typing, too."""

    def tanh(x, w):
        return jnp.tanh(sbp.split(x, 1, "d") @ sbp.split(w, 0, "d"))

    request = sbp.jit(tanh, MESH, **STRICT).trace(SQUARE, SQUARE).request
    (every,) = explain(request, limits=DiagnosisLimits(helps=100))
    pair = [" on dim 0" in h.text and " and replicate " in h.text for h in every.helps]
    assert sum(pair) == 1 and pair[-1]
    (few,) = explain(request, limits=DiagnosisLimits(helps=len(pair) - 1))
    assert len(few.helps) == len(pair) - 1
    assert [h.text for h in few.helps if " and " in h.text] == []


def test_two_inputs_change_together():
    first = found(sums, in_types=SIDES)[0]
    assert first.text.startswith("split a on dim 0 in in_types and split b on dim 0 in in_types")
    assert [(e.position, e.value) for e in first.edits if isinstance(e, OptionEdit)] == [
        (0, "d:S(0)"),
        (1, "d:S(0)"),
    ]


@pytest.mark.parametrize("types", [("d:S(1)", None, "d:S(0)", None), ("d:S(1)", *SIDES[1:3], None)])
def test_where_one_change_works_no_pair_is_offered(types):
    assert not any(" and " in h.text for h in found(sums, in_types=types))


def test_pairs_that_were_not_tried_are_counted():
    request = sbp.jit(sums, MESH, in_types=SIDES, **STRICT).trace(*FOUR).request
    (every,) = explain(request, limits=DiagnosisLimits(plans=100, helps=100))
    assert sum(" and " in h.text for h in every.helps) == 2
    assert not any("not tried" in n for n in every.notes)
    (few,) = explain(request, limits=DiagnosisLimits(plans=1))
    assert any("not tried" in n for n in few.notes)
    (large,) = explain(request, limits=DiagnosisLimits(large=1))
    assert any("not tried" in n for n in large.notes)


def test_types_of_arguments_change_together():
    """`in_types` then names the types that the other arguments have."""
    devices = np.array(jax.devices()[:2])
    mesh = jax.sharding.Mesh(devices, ("d",))
    spec = jax.sharding.PartitionSpec
    specs = [spec(None, "d"), spec(None, "d"), spec("d"), spec("d")]
    args = [jax.device_put(jnp.ones((64, 64)), jax.sharding.NamedSharding(mesh, s)) for s in specs]
    (d,) = sbp.jit(sums, mesh, **STRICT).check(*args).diagnostics
    first = d.helps[0]
    assert "and name the types of the other inputs there" in first.text
    edits = {e.position: e.value for e in first.edits if isinstance(e, OptionEdit)}
    assert edits == {0: "d:S(0)", 1: "d:S(0)", 2: "d:S(0)", 3: "d:S(0)"}
    assert len(first.edits) == 4
