"""Primitives of other libraries that are lowered by a function of JAX: that function is typed."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import sparse
from jax.experimental.custom_partitioning import custom_partitioning
from jax.sharding import AbstractMesh

import sbp
from sbp import _jax
from sbp.api.symbolic import SizedReport
from sbp.signatures import registered
from tests.same import assert_close

LINE = AbstractMesh((8,), ("data",))


def primitive(name, function, multiple=False):
    """A primitive as libraries make them: an implementation, and a lowering by it."""
    found = _jax.Primitive(name)
    found.multiple_results = multiple
    found.def_impl(function)

    def abstract(*avals, **params):
        shapes = jax.eval_shape(lambda *x: function(*x, **params), *avals)
        return jax.tree.map(lambda s: _jax.ShapedArray(s.shape, s.dtype), shapes)

    found.def_abstract_eval(abstract)
    _jax.mlir.register_lowering(found, _jax.mlir.lower_fun(function, multiple_results=multiple))
    _jax.batching.defvectorized(found)
    return found


shifted = primitive("shifted_tanh", lambda x: jnp.tanh(x) + 1)


def both(x, *, like):
    if jax.eval_shape(lambda: x) != like:  # as Lineax does
        raise ValueError("the structure changed")
    return [x.sum(0), jnp.cumsum(x, 1)]


pair = primitive("sum_and_cumsum", both, multiple=True)


def test_their_functions_are_split():
    f = sbp.jit(lambda x, w: shifted.bind(x @ w) @ w.T, LINE, in_types=("data:S(0)", "B"))
    plan = f.plan(jnp.ones((64, 16)), jnp.ones((16, 32)))
    assert plan.cost.bytes_per_device == 0 and "tanh" in str(plan)
    assert "test_lowered_primitives.py" in str(plan).split("tanh")[1]


@pytest.mark.parametrize("shape", [(16, 8), (5, 3)])
def test_they_compute_what_one_device_does(shape):
    def f(x):
        return shifted.bind(x), *pair.bind(x, like=jax.eval_shape(lambda: x))

    x = jnp.asarray(np.random.default_rng(0).standard_normal(shape), jnp.float32)
    assert_close(sbp.jit(f, sbp.make_mesh((2, 4), ("x", "y")))(x), f(x), rtol=1e-5, atol=1e-5)


def test_a_signature_of_the_user_comes_first():
    with registered("shifted_tanh", ["S(0) -> S(0)"]):
        plan = sbp.jit(shifted.bind, LINE, in_types="data:S(0)").plan(jnp.ones((64, 16)))
    assert "shifted_tanh" in str(plan) and plan.cost.bytes_per_device == 0


def test_sparse_products():
    matrix = sparse.BCOO.fromdense(jnp.diag(jnp.arange(1.0, 9.0)))

    def loss(data, v):
        return (sparse.BCOO((data, matrix.indices), shape=matrix.shape) @ v).sum()

    v = jnp.arange(128.0).reshape(8, 16)
    got = sbp.jit(jax.grad(loss), sbp.make_mesh((8,), ("x",)))(matrix.data, v)
    np.testing.assert_allclose(got, jax.grad(loss)(matrix.data, v), rtol=1e-6)


def partitioned(function):
    """A function with a partitioning of its own, which a plan does not call."""
    found = custom_partitioning(function)
    found.def_partition(
        infer_sharding_from_operands=lambda *a: None,
        partition=lambda *a: None,
        sharding_rule="i j, j k -> i k",
        need_replication_factors=("j",),
    )
    return found


def projected(x, w):
    return jnp.tanh(x / jnp.linalg.norm(x, axis=1, keepdims=True)) @ w


@pytest.mark.parametrize("function", [projected, lambda x, w: x @ w])
def test_partitioned_functions_are_split(function):
    x, w = jnp.arange(64.0).reshape(16, 4), jnp.ones((4, 3))
    mesh = sbp.make_mesh((8,), ("data",))
    f = sbp.jit(partitioned(function), mesh, in_types=("data:S(0)", "B"))
    assert f.plan(x, w).cost.bytes_per_device == 0
    np.testing.assert_allclose(f(x, w), function(x, w), rtol=1e-6)


def test_at_all_sizes():
    (b,) = jax.export.symbolic_shape("b", constraints=["mod(b, 8) == 0"])
    x = jax.ShapeDtypeStruct((b, 4), jnp.float32)
    report = sbp.jit(shifted.bind, LINE, in_types="data:S(0)").check(x)
    assert isinstance(report, SizedReport)
    assert report.diagnostics == () and report.sizes.status == "every"
