"""The table of rows: operators with equal parameters share their rows."""

import dataclasses

import jax.numpy as jnp
from jax.sharding import AbstractMesh

from sbp.infer.rows import RowTable
from tests.infer.test_check import shape, traced


def program(x, w):
    return x @ w, (x + 1.0) @ (w + 1.0), jnp.tanh(x @ w), x * w


def test_equal_operators_share_rows_and_others_do_not():
    request = traced(program, [shape(16, 16)] * 2, AbstractMesh((4,), ("x",)), [None, None])
    graph, fresh = request.graph, lambda: RowTable(request.mesh)
    products = [n for n in graph.nodes if n.op == "dot_general"]
    (mul,), table = [n for n in graph.nodes if n.op == "mul"], fresh()
    first, second, *_ = products
    assert first.params is not second.params
    assert table.rows_in(graph, first, {}) is table.rows_in(graph, second, {})
    # Two operators that have one dictionary of parameters are two.
    add = next(n for n in graph.nodes if n.op == "add")
    product = dataclasses.replace(mul, params=add.params)
    table.rows_in(graph, dataclasses.replace(add, inputs=mul.inputs), {})
    assert table.rows_in(graph, product, {}) == fresh().rows_in(graph, mul, {})
