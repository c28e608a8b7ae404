"""A help names a variable only where that is the value: programs that rebind names."""

from typing import Any

import jax
import jax.numpy as jnp
import pytest

import sbp
from tests.edits import check_helps
from tests.explain.expected import MESH, SQUARE


def swapped(x, w):
    x = sbp.split(x, 1, "tensor")
    w = sbp.split(w, 1, "tensor")
    x, w = w, x
    return w @ x


def another_array(x, w):
    x = sbp.split(x, 1, "tensor")
    h = x
    x = w
    return jax.nn.softmax(h) * x


def unpacked(*args):
    x, w = args
    x = sbp.partial(x, "tensor")
    v = x
    x = jnp.zeros(3)
    return jnp.linalg.norm(v) + x + w.sum()


def in_each_layer(x, w):
    for _ in range(2):
        h = sbp.partial(x, "tensor")
        y = h
        h = w
        x = jax.nn.softmax(y) + h
    return x


def operands_in_another_order(x, w):
    x = sbp.split(x, 0, "tensor")
    y = sbp.split(w, 1, "tensor")
    a = x
    x = w
    return jnp.where(a > 0, a, y) + x


def parameters_in_another_order(x, w):
    def inner(w, x):
        return jnp.einsum("ij,jk,kl->il", w, x, jnp.ones((1024, 1024)))

    x = sbp.split(x, 1, "tensor")
    w = sbp.split(w, 1, "tensor")
    return inner(x, w)


def an_input_in_another_order(x, w):
    def inner(w, x):
        return jnp.einsum("ij,jk,kl->il", w, x, jnp.ones((1024, 1024)))

    return inner(x, w)


def an_input_rebound(x, w):
    y = x
    x = w
    return jax.nn.softmax(y) * x


PROGRAMS = {
    swapped: ("sbp.replicate(x,", None),
    another_array: ("sbp.replicate(x,", None),
    unpacked: ("sbp.replicate(x,", None),
    in_each_layer: ("sbp.replicate(h,", None),
    operands_in_another_order: ("sbp.split(a, 0", None),
    parameters_in_another_order: ("sbp.split(w, 0", None),
    an_input_in_another_order: ("sbp.split(w, 0", ("tensor:S(1)", "tensor:S(1)")),
    an_input_rebound: ("sbp.replicate(x,", ("tensor:S(1)", None)),
}
"""Programs, each with a help that would name another array, and its `in_types`."""


@pytest.mark.parametrize("program", PROGRAMS, ids=lambda p: p.__name__)
def test_helps_do_what_they_say_where_names_are_rebound(program):
    wrong, in_types = PROGRAMS[program]
    options: dict[str, Any] = {"boxing": "explicit", "in_types": in_types}
    found = sbp.jit(program, MESH, **options).check(SQUARE, SQUARE).diagnostics
    helps = [h.text for d in found for h in d.helps]
    assert helps and not any(wrong in text for text in helps), helps
    check_helps(program, MESH, options, (SQUARE, SQUARE), found)


def test_an_operand_is_named_as_its_line_reads_it():
    """`jnp.where(p, a, b)` has its operands in the order p, b, a."""
    (found,) = (
        sbp.jit(operands_in_another_order, MESH, boxing="explicit")
        .check(SQUARE, SQUARE)
        .diagnostics
    )
    assert "(a > 0, y, a ->" in found.rule
    assert 'sbp.split(y, 0, "tensor") before line' in " ".join(h.text for h in found.helps)
