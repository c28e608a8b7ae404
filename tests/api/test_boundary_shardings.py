"""Shardings of arguments and results, and a PartitionSpec in the program: what JAX refuses is an
error of the same kind at its line, and results have the sharding that was asked for."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec as P, SingleDeviceSharding

import sbp

MESH = Mesh(np.array(jax.devices()).reshape(2, 4), ("x", "y"))
X = np.arange(64.0, dtype=np.float32).reshape(8, 8)
FREE = P.UNCONSTRAINED


def spec_of(spec):
    return NamedSharding(MESH, spec)


@pytest.mark.parametrize(
    "spec", [P(), P("x"), P(None, "x"), P("x", None), P(("x", "y")), P("x", "y"), P(("x",), "y")]
)
def test_results_have_the_sharding_that_was_asked_for(spec):
    wanted = jax.jit(lambda x: x + 1, out_shardings=spec_of(spec))(X)
    result = sbp.jit(lambda x: x + 1, MESH, out_shardings=spec_of(spec))(X)
    assert result.sharding == wanted.sharding == spec_of(spec)
    assert sbp.jit(lambda x: x + 1, MESH, out_shardings=spec)(X).sharding == spec_of(spec)
    np.testing.assert_array_equal(result, X + 1)


def test_a_sharding_that_does_not_divide_is_not_that_of_the_result():
    """Then the boundary holds the dim whole, and the spec of the user says otherwise."""
    with pytest.warns(sbp.SbpWarning, match="uneven-boundary"):
        result = sbp.jit(lambda x: x[:7], MESH, out_shardings=spec_of(P("x")))(X)
    assert result.sharding.is_fully_replicated


@pytest.mark.parametrize("option", ["in_shardings", "out_shardings"])
@pytest.mark.parametrize("spec", [P("x", FREE), spec_of(P(FREE))])
def test_unconstrained_dims_are_refused(option, spec):
    options: Any = {option: spec}
    with jax.set_mesh(MESH), pytest.raises(ValueError, match="Unconstrained"):
        jax.jit(lambda x: x, **options)(X)
    with pytest.raises(sbp.SbpError, match="UNCONSTRAINED") as caught:
        sbp.jit(lambda x: x, MESH, **options)
    assert isinstance(caught.value, ValueError)
    types: Any = {option.replace("shardings", "types"): spec}
    with pytest.raises(sbp.SbpError, match="UNCONSTRAINED"):
        sbp.jit(lambda x: x, MESH, **types)(X)


OTHERS = {
    kind: jax.make_mesh((8,), ("q",), axis_types=(kind,))
    for kind in (AxisType.Auto, AxisType.Explicit)
}


@pytest.mark.parametrize("kind", sorted(OTHERS, key=str))
@pytest.mark.parametrize("put", [lax.with_sharding_constraint, jax.sharding.reshard])
def test_a_spec_of_another_mesh(kind, put):
    """`jax.jit` refuses an axis that the mesh of the context lacks. One that it has is none of the
    mesh of `sbp.jit`."""

    def own_axis(x):
        return put(x * 2, P("x"))

    def other_axis(x):
        return put(x * 2, P("q"))

    with jax.set_mesh(OTHERS[kind]):
        with pytest.raises(ValueError, match="not found in mesh"):
            jax.jit(own_axis)(X)
        with pytest.raises(sbp.SbpError, match=r"\(q=8\), but sbp.jit uses") as caught:
            sbp.jit(own_axis, MESH)(X)
        error = caught.value
        assert isinstance(error, ValueError) and error.code == "bad-placement"
        assert error.span and error.span.line == own_axis.__code__.co_firstlineno + 1
        with pytest.raises(sbp.SbpError) as caught:
            sbp.jit(other_axis, MESH)(X)
        assert caught.value.code in ("unknown-axis", "bad-placement")
        span = caught.value.span
        assert span and span.line == other_axis.__code__.co_firstlineno + 1
        (found,) = sbp.jit(own_axis, MESH).check(X).diagnostics
        assert found.code == "bad-placement"


def test_other_programs_do_not_see_another_mesh():
    def fails(x):
        raise RuntimeError("of the user")

    with jax.set_mesh(OTHERS[AxisType.Explicit]):
        np.testing.assert_array_equal(sbp.jit(lambda x: x + 1, MESH)(X), X + 1)
        whole = sbp.jit(lambda x: lax.with_sharding_constraint(x + 1, P()), MESH)(X)
        np.testing.assert_array_equal(whole, X + 1)
        assert sbp.jit(jnp.sum, MESH).eval_shape(X).shape == ()
        with pytest.raises(RuntimeError, match="of the user"):
            sbp.jit(fails, MESH)(X)


def test_what_is_moved_is_found_by_shardings(monkeypatch):
    """An error of JAX passes where all arguments lie as the plan takes them, whatever it says."""
    elsewhere = jax.device_put(X, SingleDeviceSharding(jax.devices()[3]))
    here = jax.device_put(X, spec_of(P("x")))
    fn = sbp.jit(lambda x: x * 2, MESH, in_shardings=spec_of(P("x")))
    with pytest.warns(sbp.SbpWarning, match="input-moved"):
        np.testing.assert_array_equal(fn(elsewhere), X * 2)
    calls = []

    def refuse(executable, flat, shapes):
        calls.append(flat)
        raise ValueError("incompatible devices, committed to another sharding")

    monkeypatch.setattr("sbp.run.execute.Executable.__call__", refuse)
    for x, count in ((here, 1), (elsewhere, 2)):
        calls.clear()
        with pytest.raises(ValueError, match="incompatible devices"):
            fn(x)
        assert len(calls) == count


@pytest.mark.parametrize("order", [slice(4), slice(None, None, -1)], ids=["fewer", "reversed"])
def test_a_set_mesh_of_other_devices(order):
    """The mesh of `sbp.jit` says where the program runs."""
    with jax.set_mesh(jax.sharding.Mesh(MESH.devices.flatten()[order], ("q",))):
        fn = sbp.jit(lambda x: x + 1, MESH, in_types="x:S(0)")
        for x in (X, jax.device_put(X, spec_of(P("x")))):
            np.testing.assert_array_equal(fn(x), X + 1)
        assert fn.lower(X).compile() is not None
        parts = sbp.jit(lambda x: x.sum(0), MESH, "x:S(0)", "x:P")(X)
        np.testing.assert_array_equal(parts.reduce(), X.sum(0))
        uneven = sbp.Padded.of(jax.device_put(X[:5], spec_of(P())), "x:S(0)", MESH)
        np.testing.assert_array_equal(uneven.full(), X[:5])
        kept = sbp.jit(lambda x: x + 1, MESH, out_types=sbp.padded("x:S(0)"))(uneven)
        np.testing.assert_array_equal(kept, X[:5] + 1)


WRONG = {
    "no such axis": (P("z"), "no axis 'z'"),
    "one of two axes": (P(("x", "z")), "no axis 'z'"),
    "no such dim": (
        P(None, None, "x"),
        r"x:S\(2\) splits dim 2, but the tensor has only dims 0..1",
    ),
    "one device": (SingleDeviceSharding(jax.devices()[0]), "SingleDeviceSharding"),
    "another tree": ({"a": P("x")}, "does not fit"),
}


@pytest.mark.parametrize("option", ["in_shardings", "out_shardings"])
@pytest.mark.parametrize("name", WRONG)
def test_wrong_shardings_are_value_errors_that_name_the_option(option, name):
    sharding, said = WRONG[name]
    options: Any = {option: sharding}
    with jax.set_mesh(MESH):
        with pytest.raises(ValueError):
            jax.jit(lambda x: x + 1, **options)(X)
        with pytest.raises(sbp.SbpError, match=said) as caught:
            sbp.jit(lambda x: x + 1, **options)(X)
    assert isinstance(caught.value, ValueError)
    assert option in str(caught.value) and "_types" not in str(caught.value)


def test_keyword_arguments_go_with_in_types_beside_out_shardings():
    options: Any = {"out_shardings": spec_of(P("x"))}
    result = sbp.jit(lambda x, *, y: x + y, MESH, in_types=("x:S(0)",), **options)(X, y=X)
    np.testing.assert_array_equal(result, X + X)
    with pytest.raises(ValueError, match="in_shardings names positional"):
        sbp.jit(lambda x, *, y: x + y, MESH, in_shardings=(P("x"),))(X, y=X)
