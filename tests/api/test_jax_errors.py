"""Errors that JAX raises while it traces call the function and its arguments by the user's names,
word for word as under `jax.jit`; and arguments that `jax.jit` takes no more or never took."""

import copy
import pickle
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import sbp

MESH = sbp.make_mesh((8,), ("data",))
JIT: Any = sbp.jit  # wrong calls are meant here


def branches(x: Any, params: Any) -> Any:
    return params["w"] if x > 0 else x


def reads_a_leaf(x: Any, params: Any) -> Any:
    return x * float(params["w"])


def to_numpy(x: Any, params: Any) -> Any:
    return np.asarray(params["w"]) + x


def indexes(x: Any, params: Any) -> Any:
    return [params["w"], x][params["i"]]


def derived(x: Any, params: Any) -> Any:
    return x if (x + params["w"]).sum() else -x


def by_keyword(x: Any, *, params: Any) -> Any:
    return x if params["w"] else -x


class Model:
    def method(self, x: Any, params: Any) -> Any:
        return x if params["w"] else -x


def message(jit: Callable[..., Any], fn: Any, kwargs: dict[str, Any]) -> tuple[type, str]:
    params = {"w": jnp.float32(2), "i": jnp.int32(1)}
    args = (jnp.float32(1),) if kwargs else (jnp.float32(1), params)
    with pytest.raises(Exception) as caught:
        jit(fn)(*args, **{name: params for name in kwargs})
    return caught.type, str(caught.value)


@pytest.mark.parametrize(
    "fn",
    [branches, reads_a_leaf, to_numpy, indexes, derived, by_keyword, Model().method],
    ids=lambda fn: fn.__name__,
)
def test_errors_of_tracing_are_those_of_jit(fn: Any):
    kwargs = {"params": None} if fn is by_keyword else {}
    kind, text = message(lambda fn: sbp.jit(fn, MESH), fn, kwargs)
    assert (kind, text) == message(jax.jit, fn, kwargs)
    assert f"{fn.__name__} at " in text and "flat" not in text


def test_static_arguments_are_left_out_of_the_names():
    def program(flag: bool, x: Any, y: Any) -> Any:
        return x if y > 0 and flag else y

    with pytest.raises(jax.errors.TracerBoolConversionError, match="value of the argument y"):
        sbp.jit(program, MESH, static_argnums=0)(True, 1.0, 2.0)
    with pytest.raises(jax.errors.TracerBoolConversionError, match="value of the argument y"):
        sbp.jit(program, MESH, static_argnums=0).eval_shape(True, 1.0, 2.0)


def test_a_leaked_value_names_the_function():
    leaked: list[Any] = []

    def leaking(x: Any) -> Any:
        leaked.append(x * 2)
        return x

    sbp.jit(leaking, MESH)(1.0)
    with pytest.raises(jax.errors.UnexpectedTracerError, match=r"leaking at .* traced for jit"):
        _ = leaked[0] + 1


OTHER_ORDER = np.dtype(np.float32).newbyteorder("S")


@pytest.mark.parametrize(
    ("x", "says"),
    [
        (
            np.zeros(3, OTHER_ORDER),
            r"has dtype .f4, the other byte order than this machine's; pass x\.astype\('float32'\)",
        ),
        (np.array([None, 1], object), "has dtype .O, which JAX does not take"),
        (np.array(["a"]), "has dtype <U1, which JAX does not take"),
        (np.zeros(3, "M8[s]"), "has dtype <M8"),
        (np.datetime64("2020-01-01"), "has dtype <M8"),
        ("text", "is not an array: str; mark it static or pass an array"),
    ],
    ids=["order", "object", "text array", "times", "time", "text"],
)
def test_arrays_of_dtypes_that_jax_lacks(x: Any, says: str):
    with pytest.raises(TypeError):
        jax.jit(lambda batch: batch["x"])({"x": x})
    with pytest.raises(sbp.SbpError, match=rf"input batch\['x'\] {says}") as caught:
        sbp.jit(lambda batch: batch["x"], MESH)({"x": x})
    assert isinstance(caught.value, TypeError) and caught.value.code == "bad-argument"


def test_an_argument_that_jit_takes_no_more():
    with pytest.raises(sbp.SbpError, match=r"jax\.export\.symbolic_shape") as caught:
        JIT(branches, MESH, abstracted_axes=({0: "n"},))
    assert isinstance(caught.value, TypeError)


def test_the_signature_in_an_error_shows_no_address():
    with pytest.raises(sbp.SbpError, match=r"it takes \(fn, mesh=None") as caught:
        JIT(branches, MESH, nonsense=1)
    assert "0x" not in str(caught.value)


def test_a_shape_among_the_results_is_no_array():
    def program(x: Any) -> Any:
        return {"x": x, "shape": jax.ShapeDtypeStruct((3,), jnp.float32)}

    with pytest.raises(TypeError):
        jax.jit(program)(1.0)
    with pytest.raises(sbp.SbpError, match=r"type ShapeDtypeStruct at result\['shape'\]") as caught:
        sbp.jit(program, MESH)(1.0)
    assert isinstance(caught.value, TypeError)
    assert not sbp.jit(program, MESH).check(1.0).ok


def test_errors_come_back_from_another_process():
    """As `pickle` brings them: with their text, code and diagnostics."""
    small = sbp.jit(lambda x: x + 1, MESH, memory_limit=1)
    for call in (lambda: sbp.parse("x("), lambda: small.plan(jnp.ones(8)), lambda: JIT(3)):
        with pytest.raises(sbp.SbpError) as caught:
            call()
        error = caught.value
        for same in (pickle.loads(pickle.dumps(error)), copy.deepcopy(error)):
            assert (type(same), str(same), same.code) == (type(error), str(error), error.code)
