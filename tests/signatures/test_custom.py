"""Registered signatures that are right: programs with them run as on one device."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import pallas as pl
from registrations import (
    MATMUL,
    ROW_SUMS,
    TRIPLE,
    W,
    X,
    matmul,
    matmul_call,
    matmul_local,
    row_sums,
    row_sums_local,
    triple,
    triple_p,
)

import sbp
from sbp import _jax
from sbp.errors import SbpError, SbpWarning
from sbp.infer.registered import drawn
from sbp.signatures import Op, Row, registered, rule_for
from sbp.signatures.custom import custom_for
from sbp.types import S


@pytest.fixture(scope="module")
def mesh():
    return sbp.make_mesh((2, 4), ("x", "y"))


def kinds(plan):
    return [step.kind for p in plan.program.boxes() if p.bytes_per_device for step in p.box.steps]


def test_a_primitive_of_the_user(mesh):
    fn = lambda x, w: triple(x @ w).sum()
    with registered(triple_p, TRIPLE):
        f = sbp.jit(
            jax.value_and_grad(fn, argnums=(0, 1)), mesh, in_types=("x:S(0) y:S(1)", "y:S(0)")
        )
        assert any(n.op == "triple" for n in f.plan(X, W).program.graph.nodes)
        got, want = f(X, W), jax.jit(jax.value_and_grad(fn, argnums=(0, 1)))(X, W)
        jax.tree.map(np.testing.assert_array_equal, got, want)
        plan = sbp.jit(
            lambda x, w: triple(x @ w), mesh, in_types=("y:S(1)", "y:S(0)"), out_types="B"
        ).plan(X, W)
        assert kinds(plan) == ["all_reduce"]  # of the result: the operand stayed partial
    with pytest.warns(SbpWarning, match="missing-rule: primitive 'triple'"):
        sbp.jit(triple, mesh).plan(X)


def test_a_pallas_kernel_with_its_gradient(mesh):
    """The kernel is named by its function; the gradient calls it on two other shapes."""
    fn = lambda x, w: jnp.sin(matmul(x, w)).sum()
    with registered("pallas_call:matmul", MATMUL, local=matmul_local):
        f = sbp.jit(
            jax.value_and_grad(fn, argnums=(0, 1)),
            mesh,
            in_types=("x:S(0)", "y:S(1)"),
            boxing="reduce",
        )
        assert {n.op for n in f.plan(X, W).program.graph.nodes if "call" in n.op} == {
            "pallas_call:matmul"
        }
        got, want = f(X, W), jax.value_and_grad(fn, argnums=(0, 1))(X, W)
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-4), got, want)


def test_a_pallas_kernel_on_uneven_shards_of_two_axes(mesh):
    with registered("pallas_call:matmul", MATMUL, local=matmul_local):
        f = sbp.jit(
            lambda x, w: matmul(sbp.split(x, 1, "y"), w), mesh, out_types="B", boxing="reduce"
        )
        np.testing.assert_array_equal(f(X[:, :11], W[:11]), X[:, :11] @ W[:11])
        assert kinds(f.plan(X[:, :11], W[:11])) == ["all_reduce"]
        g = sbp.jit(lambda x, w: matmul(sbp.annotate(x, x=S(0), y=S(0)), w), mesh, out_types="B")
        np.testing.assert_array_equal(g(X[:7], W), X[:7] @ W)


def test_a_kernel_has_the_name_of_its_function():
    call = lambda x: pl.pallas_call(
        lambda r, o: None, jax.ShapeDtypeStruct(x.shape, x.dtype), interpret=True, name="mine"
    )(x)
    names = [
        _jax.op_name(e)
        for fn in (call, lambda x: matmul_call(x, x.T), row_sums)
        for e in jax.make_jaxpr(fn)(X).jaxpr.eqns
    ]
    assert [n for n in names if ":" in n] == [
        "pallas_call:mine",
        "pallas_call:matmul",
        "custom_partitioning:row_sums",
    ]


def test_a_partitioned_function(mesh):
    fn = lambda x: row_sums(sbp.split(x, 1, "y") * 2)
    with registered("custom_partitioning:row_sums", [*ROW_SUMS, "S(1) -> P"], local=row_sums_local):
        f = sbp.jit(fn, mesh, out_types="B")
        np.testing.assert_array_equal(f(X[:, :11]), (X[:, :11] * 2).sum(1))
        assert kinds(f.plan(X[:, :11])) == ["all_reduce"]


def test_rows_may_depend_on_the_equation(mesh):
    asked: list[Op] = []

    def rows(op: Op):
        asked.append(op)
        return [
            Row((S(d),), (S(d),))
            for d in range(len(op.ins[0].shape))
            if op.divides(op.ins[0].shape[d])
        ]

    with registered(triple_p, rows):
        np.testing.assert_array_equal(
            sbp.jit(lambda x: triple(sbp.split(x, 0, "y")), mesh)(X), 3 * X
        )
    assert {op.axis_size for op in asked} == {2, 3, 4} and {op.name for op in asked} == {"triple"}


def test_even_rows_are_left_out_where_splits_do_not_divide(mesh):
    with registered(
        "custom_partitioning:row_sums", ["S(1) -> P"], local=lambda ctx, x: x.sum(1), even=True
    ):
        op = Op(
            "custom_partitioning:row_sums",
            {},
            (_jax.empty_aval((8, 12), X.dtype),),
            (_jax.empty_aval((8,), X.dtype),),
            4,
        )
        found = rule_for(op.name)
        assert found is not None and len(found.rows(op)) == 2
        odd = Op(op.name, {}, (_jax.empty_aval((8, 11), X.dtype),), op.outs, 4)
        assert len(found.rows(odd)) == 1
        np.testing.assert_array_equal(
            sbp.jit(lambda x: row_sums(sbp.split(x, 1, "y")), mesh)(X), X.sum(1)
        )
        np.testing.assert_array_equal(
            sbp.jit(lambda x: row_sums(sbp.split(x, 1, "y")), mesh)(X[:, :11]), X[:, :11].sum(1)
        )


def test_a_signature_is_checked_once(mesh, monkeypatch):
    with registered(triple_p, TRIPLE):
        custom = custom_for("triple")
        assert custom is not None
        calls: list[Any] = []
        refute = type(custom).refute
        monkeypatch.setattr(
            type(custom), "refute", lambda self, *a: calls.append(a[2]) or refute(self, *a)
        )
        for _ in range(3):
            sbp.jit(lambda x: triple(triple(x)), mesh).plan(X)
        assert len(calls) == 1
        sbp.jit(triple, mesh).plan(X[:4])
        assert len(calls) == 2


def test_large_operands_are_checked_on_samples(mesh):
    large = jax.ShapeDtypeStruct((512, 512), jnp.float32)
    small = jax.ShapeDtypeStruct((5, 7), jnp.float32)
    with registered(triple_p, TRIPLE):
        with pytest.raises(SbpError, match=r"too large to check it on; give samples="):
            sbp.jit(triple, mesh).plan(large)
    with registered(
        triple_p,
        TRIPLE,
        samples=[(triple, (X[:3],)), (jax.jit(lambda a: triple(a["x"] + 1)), ({"x": small},))],
    ):
        assert sbp.jit(triple, mesh).plan(large)
    with registered(triple_p, [*TRIPLE, "P(max) -> P(min)"], samples=[(triple, (small,))]):
        with pytest.raises(SbpError, match=r"P\(max\) -> P\(min\)` does not hold"):
            sbp.jit(triple, mesh).plan(large)
    with registered(triple_p, TRIPLE, samples=[(jnp.sin, (small,))]):
        with pytest.raises(SbpError, match="sample 0 does not call it"):
            sbp.jit(triple, mesh).plan(large)


def test_values_are_drawn_for_every_kind_of_operand():
    keys = jax.eval_shape(jax.random.key, 0)
    for aval in (
        keys,
        *(
            jax.ShapeDtypeStruct((5,), t)
            for t in (jnp.float32, jnp.bfloat16, jnp.int8, jnp.uint32, jnp.bool_, jnp.complex64)
        ),
    ):
        x = drawn(aval, 0)
        assert (x.shape, x.dtype) == (aval.shape, aval.dtype)
