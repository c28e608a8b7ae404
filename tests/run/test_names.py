"""The compiled program has the user's names: that of the function, of its arguments and of named
scopes."""

import functools
import re

import jax
import jax.numpy as jnp
import pytest

import sbp


def step(w, batch):
    def loss(w):
        with jax.named_scope("ffn"):
            h = jax.nn.relu(batch["x"] @ w)
            with jax.named_scope("inner"):
                h = jnp.sin(h)

        def layer(h, _):
            with jax.named_scope("mlp"):
                return jax.jit(jnp.tanh)(h @ w), None

        with jax.named_scope("layers"):
            h, _ = jax.lax.scan(layer, h, None, length=3)
        return (h**2).sum()

    with jax.named_scope("backward"):
        return jax.value_and_grad(loss)(w)


@pytest.fixture(scope="module")
def hlo():
    mesh = sbp.make_mesh((2, 4), ("x", "y"))
    f = sbp.jit(step, mesh, in_types=("x:S(1)", "y:S(0)"))
    return f.plan(jnp.ones((8, 8)), {"x": jnp.ones((16, 8))}).lower().compile().as_text()


@pytest.mark.parametrize(
    "fn",
    [functools.partial(jnp.add, 1.0), functools.partial(lambda y, x: x, 2), lambda x: x, jnp.sin],
    ids=["partial of a library", "partial", "lambda", "library"],
)
def test_names_of_programs_are_those_of_jax(fn):
    module = re.compile(r"module @(\w+)")
    want = module.search(jax.jit(fn).lower(1.0).as_text())
    got = module.search(sbp.jit(fn, sbp.make_mesh((2,), ("x",))).plan(1.0).lower().as_text())
    assert want and got and want.group(1) == got.group(1)


OPERATIONS = r'op_name="jit\(step\)/shard_map/backward/'


@pytest.mark.parametrize(
    "pattern",
    [
        r"^HloModule jit_step,",
        # Operations have their named scopes.
        OPERATIONS + r'jvp\(ffn\)/dot_general"',
        OPERATIONS + r'jvp\(ffn\)/inner/sin"',
        OPERATIONS + r'transpose\(jvp\(ffn\)\)/inner/mul"',
        OPERATIONS + r'jvp\(layers\)/while/body/(\w+/)?mlp/tanh"',
        OPERATIONS + r'transpose\(jvp\(layers\)\)/while/body/(\w+/)?mlp/transpose"',
        # Collectives have the scope of their reader, and arguments the user's names.
        "all-gather.*" + OPERATIONS + r"jvp\(\w+\)",
        'op_name="w"',
        re.escape("op_name=\"batch[\\'x\\']\""),
    ],
)
def test_the_compiled_program_has_the_users_names(hlo, pattern):
    assert re.search(pattern, hlo)
