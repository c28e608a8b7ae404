"""A help is true of all that its edit changes: values of other ranks, other reads in the line,
other calls of a helper, names that mean something else there."""

from typing import Any

import jax
import jax.numpy as jnp
import pytest

import sbp
import sbp as s
from sbp.errors import SourceEdit
from tests.edits import check_helps, helped
from tests.explain.expected import MESH, MESH_2D, shape

SQUARE, VECTOR = shape(16, 16), shape(16)


def sgd(params, gradients):
    return jax.tree.map(lambda p, g: p - 0.1 * g, params, gradients)


def sgd_of_two(bias, weight, bias_gradient, weight_gradient):
    return sgd({"b": bias, "w": weight}, {"b": bias_gradient, "w": weight_gradient})


def pins_in_a_loop(w, b, x):
    pinned = {k: sbp.split(v, 0, "tensor") for k, v in {"b": b, "w": w}.items()}
    return sbp.split(x, 0, "tensor") @ pinned["w"] + pinned["b"]


def shared_helper(x, w, b):
    def add(u, v):
        return u + v

    return add(sbp.split(x, 0, "tensor"), sbp.split(w, 1, "tensor")), add(b, b)


def read_through_a_view(x):
    x = sbp.split(x, 0, "tensor")
    return x + x.T


def read_in_a_helper(x):
    def turned(t):
        return t.T * 2

    x = sbp.split(x, 0, "tensor")
    return x + turned(x)


def results_of_one_line(x, w):
    return jnp.sin(sbp.split(x, 0, "tensor")) + jnp.cos(sbp.split(w, 1, "tensor").T).T


def product_before_the_read(h, a, v):
    h = sbp.split(jnp.sin(h), 0, "tensor")
    o = (a * 2.0) @ h + v
    return sbp.split(o, 1, "tensor") + sbp.split(a, 0, "tensor")


def carried_by_a_loop(x):
    for _ in range(3):
        x = sbp.split(x, 0, "tensor") + jnp.cos(x).T
    return x


def one_pin_for_all(x, w, z):
    def pin(t, dim, axis):
        t = sbp.split(t, dim, axis)
        return t

    a = jnp.sin(pin(x, 1, "tensor"))
    b = jnp.sin(pin(z, 1, "data")) + sbp.split(z * 2, 1, "tensor")
    return a + jnp.cos(sbp.split(w, 0, "tensor")), b


def alias_taken(x, w):
    def scaled(s, t):
        return s + t * 2

    return scaled(sbp.split(x, 0, "tensor"), s.split(w, 1, "tensor"))


@pytest.mark.parametrize(
    ("program", "mesh", "options", "args"),
    [
        (sgd_of_two, MESH, {"in_types": (None, "tensor:S(0)", None, "tensor:S(1)")}, "vmvm"),
        (pins_in_a_loop, MESH, {}, "mvm"),
        (shared_helper, MESH, {}, "mmv"),
        (read_through_a_view, MESH, {}, "m"),
        (read_in_a_helper, MESH, {}, "m"),
        (results_of_one_line, MESH, {}, "mm"),
        (product_before_the_read, MESH, {}, "mmv"),
        (carried_by_a_loop, MESH, {}, "m"),
        (one_pin_for_all, MESH_2D, {}, "mmm"),
        (alias_taken, MESH, {}, "mm"),
    ],
    ids=lambda v: getattr(v, "__name__", ""),
)
def test_helps_do_what_they_say(program, mesh, options: dict[str, Any], args):
    options = options | {"boxing": "explicit"}
    args = tuple(SQUARE if a == "m" else VECTOR for a in args)
    found = sbp.jit(program, mesh, **options).check(*args).diagnostics
    errors = [d for d in found if d.severity == "error"]
    assert errors and all(d.helps for d in errors)
    check_helps(program, mesh, options, args, errors)


def in_a_lambda(x, w):
    x, w = sbp.split(x, 1, "tensor"), sbp.split(w, 1, "tensor")
    return jax.tree.map(lambda row: jnp.exp(row @ w), [x, x + 1.0])


def in_a_mapped_lambda(x, w):
    x, w = sbp.split(x, 1, "tensor"), sbp.split(w, 1, "tensor")
    return jax.lax.map(lambda row: row[None] @ w, x)


def in_a_list(x, w):
    x, w = sbp.split(x, 1, "tensor"), sbp.split(w, 1, "tensor")
    return [jnp.exp(part @ w) for part in (x + 1.0,)]


def in_a_function_of_one_line(x, w):
    x, w = sbp.split(x, 1, "tensor"), sbp.split(w, 1, "tensor")

    def inner(row): return jnp.exp(row @ w)  # fmt: skip

    return inner(x)


def in_a_statement(x, w):
    x, w = sbp.split(x, 1, "tensor"), sbp.split(w, 1, "tensor")
    return jnp.exp(x @ w)


@pytest.mark.parametrize(
    "program,where",
    [
        (in_a_lambda, "row at"),
        (in_a_mapped_lambda, "row at"),
        (in_a_list, "part at"),
        (in_a_function_of_one_line, "row at"),
        (in_a_statement, "x before"),
    ],
    ids=lambda v: getattr(v, "__name__", ""),
)
def test_a_help_says_before_a_line_only_where_its_names_stand_there(program, where):
    found = helped(program, MESH, (SQUARE, SQUARE), boxing="explicit")
    texts = [h.text for d in found for h in d.helps]
    name, place = where.split()
    (first,) = dict.fromkeys(
        t for t in texts if t.startswith((f"sbp.replicate({name}", f"sbp.split({name}"))
    )
    assert f") {place} line " in first, texts


def test_a_local_variable_named_as_the_package_is_not_called():
    found = sbp.jit(alias_taken, MESH, boxing="explicit").check(SQUARE, SQUARE).diagnostics
    edits = [e for d in found for h in d.helps for e in h.edits if isinstance(e, SourceEdit)]
    line = alias_taken.__code__.co_firstlineno + 2
    assert edits and all(e.span.line != line for e in edits)


@pytest.mark.filterwarnings("ignore:.*does not divide:sbp.SbpWarning")
def test_an_uneven_type_of_an_input_is_changed_in_in_types():
    def program(x):
        return jnp.cumsum(x, 0)

    args = (shape(15, 16),)
    options: dict[str, Any] = {"boxing": "explicit", "in_types": ("tensor:S(0)",)}
    found = sbp.jit(program, MESH, **options).check(*args).diagnostics
    assert any("leave x free" in h.text for d in found for h in d.helps)
    check_helps(program, MESH, options, args, [d for d in found if d.severity == "error"])
