"""The report says on which mesh axes a registered signature is not checked."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax.sharding import AbstractMesh

import sbp
from sbp import _jax
from sbp.signatures import registered

twice_p = _jax.Primitive("twice")
twice_p.def_abstract_eval(lambda x: _jax.empty_aval(x.shape, x.dtype))
_jax.mlir.register_lowering(twice_p, _jax.mlir.lower_fun(lambda x: 2 * x, multiple_results=False))

X = jax.ShapeDtypeStruct((128, 4), jnp.float32)


def notes(*sizes: int) -> list[str]:
    mesh = AbstractMesh(sizes, tuple("abc"[: len(sizes)]))
    f = sbp.jit(lambda x: twice_p.bind(twice_p.bind(x) + 1), mesh, hardware="tpu-v5e")
    with registered(twice_p, ["S(0) -> S(0)"]):
        found = f.check(X).diagnostics
        assert f.plan(X).report().diagnostics == found
    assert {(d.code, d.severity) for d in found} <= {("wrong-signature", "note")}
    return [d.title for d in found]


def test_an_axis_that_is_too_large_is_named_once_for_each_signature():
    assert notes(2, 64) == []
    said = "the registered signature of `twice` is checked on mesh axes of at most 64 devices, not"
    assert notes(65) == [f"{said} on `a` with 65"]
    assert notes(128, 2, 1024) == [f"{said} on `a` with 128 and `c` with 1,024"]


def test_the_note_is_in_the_text():
    with registered(twice_p, ["S(0) -> S(0)"]):
        plan = sbp.jit(twice_p.bind, AbstractMesh((128,), ("a",)), hardware="tpu-v5e").plan(X)
    assert "note[wrong-signature]: the registered signature of `twice`" in plan.report().text(200)
