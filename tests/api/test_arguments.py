"""Static and donated arguments, and arguments that are no arrays, as `jax.jit` takes them."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import sbp
from tests.api.same import assert_same_results, both, outcome
from tests.cases import case_name


@pytest.fixture(scope="module")
def mesh():
    return sbp.make_mesh((2,), ("x",))


def two(a, b):
    return a * b


def defaulted(a, b=2):
    return a, b


def variadic(*args, **kwargs):
    return args[0], kwargs.get("k", 0)


def worded(a, word="x"):
    return a * len(word)


WRONG_OPTIONS = [
    {"static_argnums": 5},
    {"static_argnums": -3},
    {"static_argnums": "a"},
    {"static_argnums": 1.5},
    {"static_argnums": (0, "b")},
    {"static_argnames": "c"},
    {"static_argnames": 3},
    {"static_argnames": (1,)},
    {"donate_argnums": 7},
    {"donate_argnums": -3},
    {"donate_argnums": object()},
    {"donate_argnames": "z"},
    {"donate_argnames": ("a", "z")},
    {"static_argnums": 0, "donate_argnums": 0},
    {"static_argnums": 0, "donate_argnames": "a"},
    {"static_argnames": "a", "donate_argnums": (0, 1)},
    {"in_shardings": "x"},
    {"out_shardings": 3},
    {"in_shardings": ({1: None, "a": None}, None)},
]


@pytest.mark.parametrize("options", WRONG_OPTIONS, ids=case_name)
def test_options_are_refused_where_jax_refuses_them(options, mesh):
    """Both refuse when the function is decorated, with the same kind of exception."""
    want = outcome(lambda: jax.jit(two, **options))
    assert outcome(lambda: sbp.jit(two, mesh, **options)) == want
    if want != "ok":
        with pytest.raises(sbp.SbpError):
            sbp.jit(two, mesh, **options)


NO_FUNCTIONS = [3, None, "f", staticmethod(two)]


@pytest.mark.parametrize("fn", NO_FUNCTIONS, ids=lambda fn: type(fn).__name__)
def test_what_is_no_function_is_refused(fn, mesh):
    with pytest.raises(TypeError):
        jax.jit(fn)
    with pytest.raises(sbp.SbpError, match="takes a function") as refused:
        sbp.jit(fn, mesh)
    assert isinstance(refused.value, TypeError)


def test_a_generator_function_is_refused(mesh):
    def generator():
        yield 1

    assert outcome(lambda: sbp.jit(generator, mesh)) == outcome(lambda: jax.jit(generator))


CALLS = {
    "static": (two, {"static_argnums": 1}, (2.0, 3), {}),
    "static by name": (two, {"static_argnames": "b"}, (2.0,), {"b": 3}),
    "static name, passed by position": (two, {"static_argnames": "b"}, (2.0, 3), {}),
    "static number, passed by name": (two, {"static_argnums": 1}, (2.0,), {"b": 3}),
    "twice": (two, {"static_argnums": (1, 1)}, (2.0, 3), {}),
    "negative": (two, {"static_argnums": -1}, (2.0, 3), {}),
    "both negative": (defaulted, {"static_argnums": (0, -1)}, (1, 3), {}),
    "all static": (two, {"static_argnums": (0, 1)}, (2.0, 3), {}),
    "a set of numbers": (two, {"static_argnums": {1}}, (2.0, 3), {}),
    "a number of NumPy": (two, {"static_argnums": np.int64(1)}, (2.0, 3), {}),
    "True": (two, {"static_argnums": True}, (2.0, 3), {}),
    "left out": (defaulted, {"static_argnums": 1}, (1,), {}),
    "keyword only": (lambda a, *, n: a * n, {"static_argnames": "n"}, (2.0,), {"n": 3}),
    "positional only": (lambda a, /, b: a * b, {"static_argnums": 0}, (2.0, 3), {}),
    "variadic": (variadic, {"static_argnums": 1, "static_argnames": "k"}, (1.0, 2), {"k": 3}),
    "beyond a variadic call": (variadic, {"static_argnums": 3}, (1.0, 2), {}),
    "donated name of a variadic": (variadic, {"donate_argnames": "k"}, (1.0,), {"k": 2.0}),
    "numbers and names": (two, {"static_argnums": 0, "static_argnames": "b"}, (2, 3.0), {}),
    "static and donated, negative": (
        two,
        {"static_argnums": -1, "donate_argnums": 0},
        (2.0, 3),
        {},
    ),
    "not hashable": (two, {"static_argnums": 1}, (2.0, [1]), {}),
    "not hashable by name": (two, {"static_argnames": "b"}, (2.0,), {"b": {}}),
    "a static array": (two, {"static_argnums": 1}, (2.0, jnp.ones(3)), {}),
    "a word": (worded, {}, (2.0, "ab"), {}),
    "a static word": (worded, {"static_argnames": "word"}, (2.0, "ab"), {}),
    "a default word": (worded, {}, (2.0,), {}),
    "an object": (two, {}, (2.0, object()), {}),
    "words of NumPy": (two, {}, (2.0, np.array(["a"])), {}),
    "objects of NumPy": (two, {}, (2.0, np.array([object()])), {}),
    "a date": (lambda a, b: a, {}, (2.0, np.datetime64("2020")), {}),
    "None": (lambda a, b: a, {}, (2.0, None), {}),
    "a list": (lambda a, b: b, {}, (2.0, [1, 2.0, True]), {}),
    "an overflow": (two, {}, (2.0, 2**40), {}),
    "one too few": (two, {}, (2.0,), {}),
    "one too many": (two, {}, (2.0, 3.0, 4.0), {}),
    "an unknown name": (two, {}, (2.0,), {"b": 1.0, "c": 2.0}),
    "a class": (dict, {}, (), {"a": 1.0}),
    "a partial": (functools.partial(two, 2.0), {}, (3.0,), {}),
    "a returned word": (lambda a: "a", {}, (2.0,), {}),
    "a returned object": (lambda a: {"x": [object()]}, {}, (2.0,), {}),
    "a returned type": (lambda a: int, {}, (2.0,), {}),
    "a decision": (lambda a: 1 if a > 0 else 2, {}, (2.0,), {}),
    "scalars of NumPy": (two, {}, (np.float16(2), np.int64(3)), {}),
    "arrays of NumPy": (two, {}, (np.arange(4), np.ones((4, 4))), {}),
    "big-endian": (two, {}, (np.arange(4, dtype=">f4"), 1), {}),
    "Fortran order": (lambda a: a + 1, {}, (np.asfortranarray(np.arange(8.0).reshape(2, 4)),), {}),
}


@pytest.mark.parametrize("case", CALLS.values(), ids=CALLS)
def test_calls_end_as_those_of_jax(case, mesh):
    fn, options, args, kwargs = case
    plain, ours = both(fn, mesh, **options)
    want = outcome(lambda: plain(*args, **kwargs))
    assert outcome(lambda: ours(*args, **kwargs)) == want
    if want == "ok":
        assert_same_results(plain(*args, **kwargs), ours(*args, **kwargs))


@pytest.mark.parametrize(
    ("options", "deleted"),
    [
        ({"donate_argnums": 0}, (True, False)),
        ({"donate_argnums": (0, 1)}, (True, True)),
        ({"donate_argnums": -1}, (False, True)),
        ({"donate_argnames": "b"}, (False, True)),
        ({"donate_argnums": 0, "donate_argnames": "b"}, (True, False)),
        ({}, (False, False)),
    ],
    ids=case_name,
)
def test_donated_arguments_are_taken(options, deleted, mesh):
    f = sbp.jit(lambda a, b: (a + 1, b + 1), mesh, **options)
    args = jax.device_put((jnp.ones(8), jnp.ones(8)), f.plan(jnp.ones(8), jnp.ones(8)).in_shardings)
    f(*args)
    assert tuple(x.is_deleted() for x in args) == deleted


@pytest.mark.parametrize("donated", [0, 1, (0, 1)], ids=str)
def test_a_donated_array_is_passed_once(donated, mesh):
    """The runtime ends the process where it gets the array twice."""
    f = sbp.jit(lambda a, b: (a + b, a * b), mesh, donate_argnums=donated)
    x = jnp.ones((8,))
    with pytest.raises(sbp.SbpError, match="is donated, and is the same array as input") as refused:
        f(x, x)
    assert isinstance(refused.value, ValueError)
    assert not x.is_deleted()
    np.testing.assert_array_equal(f(x, x + 1), ([3] * 8, [2] * 8))


def test_a_negative_number_beyond_a_variadic_call(mesh):
    f = sbp.jit(variadic, mesh, static_argnums=-3)
    with pytest.raises(ValueError, match="static_argnums has -3, but the call has 1 positional"):
        f(1.0)


@pytest.mark.parametrize("method", ["__call__", "plan", "lower", "eval_shape", "trace"])
@pytest.mark.parametrize(
    ("args", "kwargs", "said"),
    [
        ((1.0,), {}, "missing 1 required positional argument: 'b'"),
        ((1.0, 2.0, 3.0), {}, "takes 2 positional arguments but 3 were given"),
        ((1.0,), {"b": 1.0, "c": 2.0}, "unexpected keyword argument 'c'"),
        ((1.0, 2.0), {"a": 1.0}, "multiple values for argument 'a'"),
    ],
)
def test_calls_that_the_function_does_not_take(method, args, kwargs, said, mesh):
    with pytest.raises(sbp.SbpError, match=f"two was called wrongly: .*{said}") as refused:
        getattr(sbp.jit(two, mesh), method)(*args, **kwargs)
    assert isinstance(refused.value, TypeError)
    (found,) = sbp.jit(two, mesh).check(*args, **kwargs).diagnostics
    assert said in found.title


def test_a_wrapper_may_take_other_arguments_than_what_it_wraps(mesh):
    @functools.wraps(two)
    def wrapper(a):
        return two(a, 3.0)

    assert_same_results(jax.jit(wrapper)(2.0), sbp.jit(wrapper, mesh)(2.0))


def test_errors_of_the_function_pass_unchanged(mesh):
    with pytest.raises(TypeError, match="missing 1 required") as raised:
        sbp.jit(lambda x: two(*[x]), mesh)(1.0)
    assert not isinstance(raised.value, sbp.SbpError)


WRONG_KINDS = [
    *({"mesh": wrong} for wrong in (3, "x", [0], {0}, np.ones(3), slice(1), object())),
    *({"boxing": wrong} for wrong in (3, None, np.ones(3), {"x": 3}, {0: "auto"}, ["auto"])),
    *({"reduce_dtype": wrong} for wrong in ("x", {"x": 1}, 3, object())),
    *({"memory_limit": wrong} for wrong in ("1", -1, 0, True, float("nan"), [1])),
    *({"hardware": wrong} for wrong in ("x", 3, [], object())),
    *({"budgets": wrong} for wrong in (3, "x", [3], {"a": 1})),
    *({"plan": wrong} for wrong in (3, object(), [1])),
    *({"compiler_options": wrong} for wrong in (3, "x", [1])),
    {"keep_unused": np.ones(3)},
    {"in_types": (len, None)},
    {"in_types": ("S(9)", None)},
    {"out_types": (None, None)},
]


@pytest.mark.parametrize("options", WRONG_KINDS, ids=case_name)
def test_options_of_the_wrong_kind(options, mesh):
    with pytest.raises(sbp.SbpError):
        sbp.jit(two, **({"mesh": mesh} | options)).plan(jnp.ones(8), jnp.ones(8))


@pytest.mark.parametrize("option", ["device", "backend"])
def test_a_device_is_named_by_the_mesh(option, mesh):
    with pytest.raises(sbp.SbpError, match=f"takes no {option}=.*the mesh names the devices"):
        functools.partial(sbp.jit, **{option: "cpu"})(two, mesh)


@pytest.mark.parametrize("held", ["array", "Padded", "Partial"])
def test_a_deleted_array_is_refused(held, mesh):
    """The runtime ends the process where a compiled function gets an array that it has taken."""
    axis = mesh.axis_names[0]
    rows = {"array": f"{axis}:S(0)", "Padded": sbp.padded(f"{axis}:S(0)"), "Partial": f"{axis}:P"}
    f = sbp.jit(lambda a: a * 2, mesh, rows[held], rows[held], donate_argnums=0)
    x = sbp.jit(lambda a: a, mesh, out_types=rows[held])(
        jnp.ones((13 if held == "Padded" else 16,))
    )
    f(x)
    with pytest.raises(sbp.SbpError, match="input a is deleted: an earlier call took it"):
        f(x)
    kept = sbp.jit(lambda a: a * 2, mesh, rows[held], rows[held])
    with pytest.raises(sbp.SbpError, match="input a is deleted"):
        kept(x)
