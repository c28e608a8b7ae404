"""An `sbp.jit` function inside the transformations of JAX has the results of the plain function,
and is run by plans."""

import functools
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import sbp
from tests.same import assert_close, assert_same_results, refused

KEYS = jax.random.split(jax.random.key(0), 4)
W = {"up": jax.random.normal(KEYS[0], (16, 32)), "down": jax.random.normal(KEYS[1], (32, 10))}
X, Y = jax.random.normal(KEYS[2], (24, 16)), jax.random.randint(KEYS[3], (24,), 0, 10)
T = jax.tree.map(jnp.cos, W)
TYPES = ({"up": "model:S(1)", "down": "model:S(0)"}, "data:S(0)", "data:S(0)")
EXPLICIT = jax.make_mesh(
    (4, 2), ("data", "model"), axis_types=(jax.sharding.AxisType.Explicit,) * 2
)
close = functools.partial(assert_same_results, rtol=2e-5, atol=2e-5)


def loss(w, x, y):
    logits = jax.checkpoint(lambda h: jnp.tanh(h @ w["up"]) @ w["down"])(x)
    return -jnp.take_along_axis(jax.nn.log_softmax(logits), y[:, None], 1).mean()


def planned(fn, sizes=(4, 2), **options):
    return sbp.jit(fn, sbp.make_mesh(sizes, ("data", "model", "pod")[: len(sizes)]), **options)


def in_a_scan(f, w):
    def add(total, x):
        return total + jax.lax.cond(x[0, 0] > 0, f, lambda w, x, y: 1.0, w, x, Y), None

    return jax.lax.scan(add, 0.0, jnp.stack([X, -X]))[0]


TRANSFORMATIONS = {
    "jit": lambda f: jax.jit(f)(W, X, Y),
    "grad": lambda f: jax.grad(f)(W, X, Y),
    "grad of two": lambda f: jax.value_and_grad(f, argnums=(0, 1))(W, X, Y),
    "jit of grad": lambda f: jax.jit(jax.grad(f))(W, X, Y),
    "grad of jit": lambda f: jax.grad(jax.jit(f))(W, X, Y),
    "vjp": lambda f: jax.vjp(f, W, X, Y)[1](2.0)[0],
    "jvp": lambda f: jax.jvp(lambda w: f(w, X, Y), (W,), (T,)),
    "jit of linearize": lambda f: jax.jit(jax.linearize(lambda w: f(w, X, Y), W)[1])(T),
    "jvp of grad": lambda f: jax.jvp(lambda w: jax.grad(f)(w, X, Y), (W,), (T,)),
    "grad of grad": lambda f: jax.jit(
        jax.grad(lambda w: sum(map(jnp.sum, jax.tree.leaves(jax.grad(f)(w, X, Y)))))
    )(W),
    "grad of jvp": lambda f: jax.grad(lambda w: jax.jvp(lambda w: f(w, X, Y), (w,), (T,))[1])(W),
    "checkpoint": lambda f: jax.grad(jax.checkpoint(f))(W, X, Y),
    "scan and cond": lambda f: jax.jit(jax.grad(functools.partial(in_a_scan, f)))(W),
    "vmap of jit": lambda f: jax.vmap(jax.jit(lambda x: f(W, x, Y)))(jnp.stack([X, -X])),
}


@pytest.mark.parametrize("transformed", TRANSFORMATIONS.values(), ids=TRANSFORMATIONS)
def test_transformations(transformed):
    close(transformed(loss), transformed(planned(loss, in_types=TYPES)))


@pytest.mark.parametrize("sizes", [(1,), (8,), (2, 4), (2, 2, 2)], ids=str)
@pytest.mark.parametrize("rows", [24, 21])
@pytest.mark.filterwarnings("ignore:uneven-boundary")
def test_meshes_and_rows_that_do_not_divide(sizes, rows):
    f, x, y = planned(loss, sizes, in_types=(None, "data:S(0)", "data:S(0)")), X[:rows], Y[:rows]
    close(jax.grad(loss)(W, x, y), jax.jit(jax.grad(f))(W, x, y))


def test_plans_have_all_collectives():
    """Residuals are held between the forward and the backward plan as both take them."""
    text = jax.jit(jax.grad(planned(loss, in_types=TYPES))).lower(W, X, Y).compile().as_text() or ""
    sent = re.findall(r"= .* (?:all|reduce|collective)-.*op_name=\"([^\"]*)\"", text)
    assert len(sent) > 1 and all("shard_map" in name for name in sent)
    assert all(f"jit({name})" in text for name in ("loss_forward", "loss_cotangents"))


def test_gradients_have_the_types_of_their_arguments():
    f = planned(loss, in_types=TYPES)
    want = f.plan(W, X, Y).in_shardings[0]
    for got in (jax.grad(f)(W, X, Y), jax.jit(jax.grad(f))(W, X, Y)):
        assert all(
            g.sharding.is_equivalent_to(sharding, g.ndim)
            for g, sharding in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True)
        )


def noisy(key, n, w, x, *, scale):
    kept = jax.random.bernoulli(key, 0.5, x.shape)
    out = (x * kept * scale) @ w["up"] + n
    return (out**2).sum(), {"kept": kept, "most": out.argmax(), "key": jax.random.split(key)[0]}


def test_keys_integers_keywords_static_arguments_and_other_results():
    key, transform = jax.random.key(7), functools.partial(jax.value_and_grad, has_aux=True)
    f = planned(noisy, in_types=(None, None, "data:S(0)"), static_argnums=1)
    for argnums in (2, (2, 3)):
        want = transform(noisy, argnums)(key, 2, W, X, scale=3.0)
        close(want, transform(f, argnums)(key, 2, W, X, scale=3.0))
        close(want, jax.jit(transform(f, argnums), static_argnums=1)(key, 2, W, X, scale=3.0))
    by_scale = jax.grad(lambda s: noisy(key, 2, W, X, scale=s)[0])(3.0)
    close(by_scale, jax.grad(lambda s: f(key, 2, W, X, scale=s)[0])(3.0))


def test_derivatives_of_the_users_own():
    @jax.custom_vjp
    def clipped(x):
        return x

    clipped.defvjp(lambda x: (x, x), lambda x, g: (jnp.clip(g, -1, 1) + x * 0,))
    total = lambda z, x: jnp.abs(z * z).sum() + (3 * clipped(x)).sum()
    args = X + 1j * X, X
    close(jax.grad(total, (0, 1))(*args), jax.grad(planned(total), (0, 1))(*args))


def test_explicit_axes():
    """Arguments are pinned to the types that JAX derived for them."""
    layer = lambda w, x: jnp.tanh(x @ w)

    program = lambda f: lambda w, x: (f(w, f(w, x)) ** 2).sum()

    w = jnp.cos(jnp.arange(256.0)).reshape(16, 16)
    f = sbp.jit(layer, EXPLICIT)
    held = jax.device_put(w, jax.NamedSharding(EXPLICIT, jax.P(None, "model")))
    x = jax.device_put(X, jax.NamedSharding(EXPLICIT, jax.P("data")))
    want = jax.grad(program(layer), (0, 1))(w, X)
    with jax.set_mesh(EXPLICIT):
        for transformed in (jax.grad(program(f), (0, 1)), jax.jit(jax.grad(program(f), (0, 1)))):
            assert_close(want, transformed(held, x), rtol=2e-5, atol=2e-5)
        scaled = jax.grad(sbp.jit(lambda w: (w**2).mean(), EXPLICIT))
        np.testing.assert_allclose(scaled(held), jax.jit(scaled)(held), rtol=2e-5)


@pytest.mark.parametrize("wrapped", [lambda f: f, jax.jit], ids=["eager", "jit"])
def test_auto_axes_inside_explicit_ones(wrapped):
    f = planned(lambda w, x: jnp.tanh(x @ w["up"]).sum(), in_types=(None, "data:S(0)"))
    want = jax.grad(lambda w, x: jnp.tanh(x @ w["up"]).sum())(W, X)
    with jax.set_mesh(EXPLICIT):
        close(want, wrapped(jax.grad(f))(W, X))


def test_a_function_that_changes_between_traces():
    layers = []

    def deeper(x):
        layers.append(jnp.sin)
        for layer in layers:
            x = layer(x)
        return x.sum()

    refused("deeper computes something else each time", jax.grad(planned(deeper)), X)


def test_export():
    """`jax.export` takes the function."""
    f: Any = planned(loss, in_types=TYPES)
    exported = jax.export.deserialize(jax.export.export(f)(W, X, Y).serialize())
    assert exported.nr_devices == 8
    args = jax.device_put((W, X, Y), jax.NamedSharding(f.mesh, jax.P()))
    close(loss(W, X, Y), jax.jit(exported.call)(*args))
    with pytest.raises(AttributeError, match="no_such_stage"):
        f.trace(W, X, Y).no_such_stage


def mapped(f):
    mesh, whole = sbp.make_mesh((8,), ("rows",)), jax.P()
    return jax.shard_map(f, mesh=mesh, in_specs=whole, out_specs=whole, check_vma=False)


@pytest.mark.parametrize(
    ("program", "reason"),
    [
        (lambda f: jax.vmap(lambda x: f(x, 1.0))(X), "jax.vmap or jax.shard_map"),
        (lambda f: jax.vmap(jax.grad(lambda x: f(x, 1.0).sum()))(X), "jax.vmap"),
        (lambda f: planned(lambda x: f(x, 1.0))(X), "another sbp.jit"),
        (lambda f: mapped(lambda x: f(x, 1.0))(X), "jax.shard_map"),
    ],
)
def test_transformations_that_take_the_plain_function(program, reason):
    def scaled(x, by):
        return jnp.sin(x) * by

    with pytest.warns(sbp.SbpWarning, match=f"nested-jit: scaled is called inside .*{reason}"):
        got = program(planned(scaled))
    close(program(scaled), got)


def test_functions_without_a_backward_pass():
    def loop(x):
        return jax.lax.while_loop(lambda c: c[0] < 3, lambda c: (c[0] + 1, jnp.sin(c[1])), (0, x))

    with_aux = lambda x: ((x**2).sum(), loop(x))
    f = planned(with_aux)
    close(jax.jvp(with_aux, (X,), (X,)), jax.jvp(f, (X,), (X,)))
    gradient = functools.partial(jax.grad, has_aux=True)
    close(gradient(with_aux)(X), gradient(f)(X))
    with pytest.raises(ValueError, match="Reverse-mode differentiation does not work for"):
        jax.grad(planned(lambda x: loop(x)[1].sum()))(X)


def test_arrays_keep_the_types_that_they_have():
    f, place = planned(loss), jax.NamedSharding(planned(loss).mesh, jax.P(None, "data"))
    got = jax.grad(f)({"up": jax.device_put(W["up"], place), "down": W["down"]}, X, Y)
    close(jax.grad(loss)(W, X, Y), got)
    assert got["up"].sharding.is_equivalent_to(place, 2)


def test_an_error_is_that_of_the_plan():
    f = planned(loss, in_types=({"up": "model:S(7)", "down": None}, None, None))
    refused("dim-out-of-range", jax.jit(jax.grad(f)), W, X, Y)
