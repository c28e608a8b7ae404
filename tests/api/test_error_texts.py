"""What a user sees of an error outside of a notebook: her own frames, and one line.
Every warning points at a line of the user.
Errors that JAX raises while it traces call the function and its arguments by the user's names,
word for word as under `jax.jit`. Options that `jax.jit` has removed or never had are refused."""

import copy
import inspect
import pickle
import traceback
import warnings
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import sbp
from sbp import _jax

MESH = jax.sharding.AbstractMesh((2, 4), ("data", "model"))
X = jnp.ones((8, 8))


def split_in_vain(x):
    return sbp.split(x, 7, "model")


def no_typing(x, w):
    return sbp.split(x, 1, "model") @ sbp.split(w, 1, "model")


@pytest.mark.parametrize(
    ("call", "functions"),
    [
        (lambda: sbp.jit(lambda x: split_in_vain(x), MESH)(X), ["<lambda>", "split_in_vain"]),
        (lambda: sbp.jit(no_typing, MESH, boxing="explicit").plan(X, X), []),
        (lambda: sbp.jit(no_typing, MESH, in_types=("modl:S(0)", None)), []),
        (lambda: sbp.jit(no_typing, MESH, in_types=({"a": "B"}, None)).plan(X, X), []),
    ],
)
def test_a_traceback_has_the_frames_of_the_user(call, functions):
    with pytest.raises(sbp.SbpError) as caught:
        call()
    frames = traceback.extract_tb(caught.value.__traceback__)
    own = [f.name for f in frames if f.filename == __file__]
    assert own == ["test_a_traceback_has_the_frames_of_the_user", "<lambda>", *functions]
    assert len(frames) <= len(own) + 2  # a function of sbp that was called, and one that raised
    assert caught.value.__suppress_context__ and caught.value.__cause__ is None


def test_jax_shows_all_frames_where_it_shows_its_own():
    jax.config.update("jax_traceback_filtering", "off")
    try:
        with pytest.raises(sbp.SbpError) as caught:
            sbp.jit(no_typing, MESH, boxing="explicit").plan(X, X)
    finally:
        jax.config.update("jax_traceback_filtering", "auto")
    assert len(traceback.extract_tb(caught.value.__traceback__)) > 4


@pytest.mark.parametrize(
    "call",
    [
        lambda word: sbp.jit(no_typing, MESH).plan(X, X).why(word),
        lambda word: sbp.Layout(**{word: "data"})(X, f"{word}x", None),
        lambda word: sbp.jit(no_typing, MESH, boxing=word),
    ],
)
def test_a_long_argument_is_not_repeated(call):
    with pytest.raises(sbp.SbpError) as caught:
        call("z" * 100_000)
    assert "zzzz" in str(caught.value) and len(str(caught.value)) < 1000


@pytest.mark.parametrize("name", ["a\0b", "\ud800", 5, None])
def test_names_that_no_file_has(name):
    plan = sbp.jit(jnp.sin, MESH).plan(X)
    with pytest.raises(sbp.SbpError, match="bad-argument"):
        sbp.assert_plan_unchanged(plan, name)


def test_a_region_may_return_a_number():
    pair = sbp.manual(lambda x: (x, 3), in_types=("data:S(0)",), out_types=("data:S(0)", "B"))
    doubled, three = sbp.jit(pair, sbp.make_mesh((2,), ("data",)))(X)
    assert three == 3 and (doubled == X).all()


# ---- warnings ------------------------------------------------------------------------------------

ODD = jax.ShapeDtypeStruct((9, 4), jnp.float32)


def mesh():
    return sbp.make_mesh([8], ["d"])


def uneven():
    sbp.jit(jnp.sin, mesh(), in_types=("d:S(0)",)).plan(ODD)


def uneven_when_called():
    sbp.jit(jnp.sin, mesh(), in_types=("d:S(0)",))(jnp.ones((9, 4)))


def uneven_when_checked():
    sbp.jit(jnp.sin, mesh(), out_types="d:S(0)").check(ODD)


def no_rule():
    unknown_p = _jax.Primitive("warned_test")
    unknown_p.def_abstract_eval(lambda x: x)
    sbp.jit(unknown_p.bind, mesh()).plan(ODD)


def ignored():
    sbp.jit(lambda x: jax.device_put(x, jax.devices()[0]), mesh()).plan(ODD)


def unchecked_region():
    groups = lambda x: jax.lax.psum(x, "d", axis_index_groups=[list(range(8))])
    region = sbp.manual(groups, in_types="d:S(0)", out_types="B")
    sbp.jit(lambda x: region(x), mesh()).plan(jax.ShapeDtypeStruct((16, 2), jnp.float32))


def moved():
    whole = jax.sharding.NamedSharding(mesh(), jax.sharding.PartitionSpec(None, None))
    sbp.jit(jnp.sin, mesh(), in_types=("d:S(0)",))(jax.device_put(jnp.ones((16, 4)), whole))


def moved_keys():
    keys = jax.random.split(jax.random.key(3), 8)
    f = sbp.jit(jax.vmap(jax.random.bits), mesh(), in_types=("d:S(0)",))
    f(keys)
    f(jax.device_put(keys, jax.devices()[-1]))


def nested():
    jax.vmap(sbp.jit(jnp.sin, mesh()))(jnp.ones(8))


@pytest.mark.parametrize(
    ("act", "code"),
    [
        (uneven, "uneven-boundary"),
        (uneven_when_called, "uneven-boundary"),
        (uneven_when_checked, "uneven-boundary"),
        (no_rule, "missing-rule"),
        (ignored, "ignored-constraint"),
        (unchecked_region, "manual-types"),
        (moved, "input-moved"),
        (moved_keys, "input-moved"),
        (nested, "nested-jit"),
    ],
    ids=lambda x: x.__name__ if callable(x) else x,
)
def test_a_warning_has_the_users_line(act, code):
    with warnings.catch_warnings(record=True, action="always", category=sbp.SbpWarning) as found:
        act()
    (said,) = [w for w in found if issubclass(w.category, sbp.SbpWarning)]
    lines, first = inspect.getsourcelines(act)
    last = first + len(lines) - 1
    assert str(said.message).startswith(f"{code}: ")
    assert (said.filename, said.lineno) == (__file__, last)


# ---- errors of JAX -------------------------------------------------------------------------------

EIGHT = sbp.make_mesh((8,), ("data",))
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


def message(jit, fn: Any, kwargs: dict[str, Any]) -> tuple[type, str]:
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
    kind, text = message(lambda fn: sbp.jit(fn, EIGHT), fn, kwargs)
    assert (kind, text) == message(jax.jit, fn, kwargs)
    assert f"{fn.__name__} at " in text and "flat" not in text


def test_static_arguments_are_left_out_of_the_names():
    def program(flag: bool, x: Any, y: Any) -> Any:
        return x if y > 0 and flag else y

    with pytest.raises(jax.errors.TracerBoolConversionError, match="value of the argument y"):
        sbp.jit(program, EIGHT, static_argnums=0)(True, 1.0, 2.0)
    with pytest.raises(jax.errors.TracerBoolConversionError, match="value of the argument y"):
        sbp.jit(program, EIGHT, static_argnums=0).eval_shape(True, 1.0, 2.0)


def test_a_leaked_value_names_the_function():
    leaked: list[Any] = []

    def leaking(x: Any) -> Any:
        leaked.append(x * 2)
        return x

    sbp.jit(leaking, EIGHT)(1.0)
    with pytest.raises(jax.errors.UnexpectedTracerError, match=r"leaking at .* traced for jit"):
        _ = leaked[0] + 1


@pytest.mark.parametrize(
    ("x", "says"),
    [
        (
            np.zeros(3, np.dtype(np.float32).newbyteorder("S")),
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
    with pytest.raises(TypeError, match=rf"^bad-argument: .*input batch\['x'\] {says}"):
        sbp.jit(lambda batch: batch["x"], EIGHT)({"x": x})


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"abstracted_axes": ({0: "n"},)}, r"jax\.export\.symbolic_shape"),
        ({"nonsense": 1}, r"it takes \(fn, mesh=None"),
    ],
)
def test_options_that_jit_lacks(options: dict[str, Any], says: str):
    with pytest.raises(sbp.SbpError, match=says) as caught:
        JIT(branches, EIGHT, **options)
    assert isinstance(caught.value, TypeError) and "0x" not in str(caught.value)


def test_a_shape_among_the_results_is_no_array():
    def program(x: Any) -> Any:
        return {"x": x, "shape": jax.ShapeDtypeStruct((3,), jnp.float32)}

    with pytest.raises(TypeError):
        jax.jit(program)(1.0)
    with pytest.raises(sbp.SbpError, match=r"type ShapeDtypeStruct at result\['shape'\]") as caught:
        sbp.jit(program, EIGHT)(1.0)
    assert isinstance(caught.value, TypeError)
    assert not sbp.jit(program, EIGHT).check(1.0).ok


def test_errors_come_back_from_another_process():
    """As `pickle` brings them: with their text, code and diagnostics."""
    small = sbp.jit(lambda x: x + 1, EIGHT, memory_limit=1)
    for call in (lambda: sbp.parse("x("), lambda: small.plan(jnp.ones(8)), lambda: JIT(3)):
        with pytest.raises(sbp.SbpError) as caught:
            call()
        error = caught.value
        for same in (pickle.loads(pickle.dumps(error)), copy.deepcopy(error)):
            assert (type(same), str(same), same.code) == (type(error), str(error), error.code)
