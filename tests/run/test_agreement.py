"""What processes compare before they run a plan: equal for one program, unequal for another one."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

import sbp
from sbp.run.execute import description, difference, place_array, processes_of, values_digest

X = np.arange(32, dtype=np.float32).reshape(8, 4)


def parts(fn=lambda x: jnp.sin(x) + X, shape=(2, 4), **options):
    mesh = sbp.make_mesh(shape, ("data", "model"))
    plan = sbp.jit(fn, mesh, **options).plan(X)
    return description(plan.program, mesh)


def test_a_program_that_is_traced_twice_is_one():
    def fn(x):
        return jnp.sin(x) + X.copy()

    def again(x):
        "On other lines."

        return jnp.sin(x) + X.copy()

    assert parts(fn) == parts(again) == parts()


@pytest.mark.parametrize(
    ("other", "part"),
    [
        (lambda: parts(shape=(4, 2)), "mesh"),
        (lambda: parts(in_types="data:S(1)"), "list of arguments"),
        (lambda: parts(lambda x: jnp.cos(x) + X), "program"),
        (lambda: parts(lambda x: jnp.sin(x) + X + 0), "program"),
        (lambda: parts(lambda x: jnp.sin(x) + (X + 1)), "set of constants"),
        (lambda: parts(in_types="data:S(0)", out_types="data:S(1)"), "choice of types"),
    ],
)
def test_the_first_part_that_differs_is_named(other, part):
    pinned = {"in_types": "data:S(0)", "out_types": "data:S(0)"}
    mine = parts(**(pinned if part in ("list of arguments", "choice of types") else {}))
    said = difference({0: mine, 1: other(), 2: mine})
    assert said.startswith(f"the {part} differs") and "processes 0, 2" in said
    assert not difference({0: mine, 1: mine})


def test_elements_are_compared_with_dtype_and_shape():
    values = [X, X + 1, X.astype(np.int32), X.T.copy(), X.astype(jnp.bfloat16), X.reshape(-1)]
    assert len({values_digest(x) for x in values}) == len(values)
    assert values_digest(X) == values_digest(jnp.asarray(X)) == values_digest(X.T.copy().T)
    assert values_digest(3.0) != values_digest(4.0)


def test_one_process_waits_for_none():
    mesh = sbp.make_mesh((8,), ("data",))
    assert processes_of(mesh) == (0,)
    sharding = NamedSharding(mesh, PartitionSpec("data"))
    assert place_array(X, sharding).sharding == sharding
    assert sbp.jit(jnp.sin, mesh).plan(X)._joint is None
    assert jax.process_count() == 1


# ---- names ---------------------------------------------------------------------------------------
# The compiled program has the user's names: that of the function, of its arguments and of named
# scopes.


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
