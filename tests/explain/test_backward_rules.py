"""Lines and names in programs whose backward pass runs the user's own code: rules of `custom_vjp`,
and forward operations that `jax.checkpoint` repeats."""

import jax
import jax.numpy as jnp
import numpy as np

import sbp
from sbp.errors import SourceEdit

MESH = sbp.make_mesh((2, 4), ("x", "y"))
X = np.ones((8, 8), np.float32)


@jax.custom_vjp
def sine(x):
    return jnp.sin(x)


def sine_backward(x, g):
    g = sbp.split(g, 0, "y")
    return (g * sbp.split(x, 1, "y"),)


sine.defvjp(lambda x: (sine(x), x), sine_backward)


def only_error(fn, *args):
    (found,) = sbp.jit(fn, MESH, boxing="explicit").check(*args).diagnostics
    return found


def line_of(fn, label):
    return label.span.line - fn.__code__.co_firstlineno


def test_an_annotation_in_a_backward_rule_has_its_own_line():
    found = only_error(jax.grad(lambda x: sine(x).sum()), X)
    assert {line_of(sine_backward, label) for label in found.labels if not label.primary} == {1, 2}
    edited = {e.span.line for h in found.helps for e in h.edits if isinstance(e, SourceEdit)}
    assert edited
    assert {line - sine_backward.__code__.co_firstlineno for line in edited} <= {1, 2}


@jax.checkpoint
def block(x, w):
    h = sbp.split(jnp.tanh(x @ w), 0, "y")
    return jnp.sin(h)


def pinned_cotangent(w, x):
    y = sbp.annotate(block(x, w), cotangent="y:S(1)")
    return (y * y).sum()


def test_a_recomputed_forward_value_is_no_cotangent():
    found = only_error(jax.grad(pinned_cotangent), X, X)
    remarks = [row.remark for row in found.rows]
    assert any(r.startswith("the cotangent fits, the result of its cos") for r in remarks)
    assert "cotangent from line" not in found.text()


def test_a_value_that_only_the_backward_pass_computes_is_found_by_its_name():
    plan = sbp.jit(jax.grad(pinned_cotangent), MESH).plan(X, X)
    assert "why `h` is" in str(plan.why("h"))
