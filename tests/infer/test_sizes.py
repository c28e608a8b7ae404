"""Symbolic sizes: what is claimed of all sizes is what happens at each, found by typing the program there."""

import dataclasses
import itertools
import math
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.export import SymbolicScope, symbolic_shape

import sbp
from sbp.errors import SbpError, SbpInternalError, SbpWarning
from sbp.infer.check import certify
from sbp.infer.scope import Fact, Scope
from sbp.infer.sizes import explore
from sbp.infer.typing import Typing
from sbp.symbolic import SizedReport

MESH = jax.sharding.AbstractMesh((2, 4), ("data", "model"))
F32 = jnp.float32


def f32(*shape):
    return jax.ShapeDtypeStruct(shape, F32)


def dims(text, *constraints):
    return symbolic_shape(text, constraints=constraints)


# ---- the oracle: the program traced with numbers, the typing written onto it, and certified ------------------------------------------


def nodes_of(graph):
    """The nodes that stand in a trace with numbers, too: what computes a size there is a number from the start."""
    known, kept = set(), []
    for node in graph.nodes:
        if node.op == "convert_element_type" and all(not isinstance(o, int) or o in known for o in node.inputs):
            known |= set(node.outputs)
        else:
            kept.append(node)
    return kept


def written_onto(typing: Typing, graph) -> Typing:
    """The same typing of another trace of the same program."""
    values, rows, returned = {}, {}, {}

    def visit(mine, theirs):
        values.update(zip(theirs.inputs, (typing.values[v] for v in mine.inputs), strict=True))
        assert [n.op for n in nodes_of(mine)] == [n.op for n in nodes_of(theirs)]
        for node, other in zip(nodes_of(mine), nodes_of(theirs), strict=True):
            rows[other.id] = typing.rows[node.id]
            values.update(zip(other.outputs, (typing.values[v] for v in node.outputs), strict=True))
            for k, (a, b) in enumerate(zip(node.regions, other.regions, strict=True)):
                visit(a, b)
                returned[other.id, k] = typing.region_outputs[node.id, k]

    visit(typing.graph, graph)
    return dataclasses.replace(typing, graph=graph, values=values, rows=rows, region_outputs=returned)


def divides(shape, codes):
    return all(size % math.prod(n for c, n in zip(codes, (2, 4), strict=True) if c == d + 1) == 0 for d, size in enumerate(shape))


def holds_there(jitted, typing: Typing, args) -> bool:
    """Whether a program at given sizes has a typing, with the boundary that sbp gives it there."""
    with warnings.catch_warnings(action="ignore", category=SbpWarning):
        traced = jitted.trace(*args)
    typing = written_onto(typing, traced.graph)
    graph = traced.graph
    boundary = [(graph.avals[v].shape, typing.values[v]) for v in graph.inputs]
    boundary += [(graph.aval(o).shape, codes) for o, codes in zip(graph.outputs, typing.outputs, strict=True)]
    if not all(divides(shape, codes) for shape, codes in boundary):
        return False
    try:
        certify(typing, traced.demand)
    except SbpInternalError:
        return False
    return True


# ---- programs ------------------------------------------------------------------------------------------------------------------------

W = {"a": f32(16, 32), "b": f32(32, 4)}
TP = {"a": "model:S(1)", "b": "model:S(0)"}


def mlp(w, x):
    return jnp.maximum(x @ w["a"], 0) @ w["b"]


def training_step(w, x, y):
    def loss(w):
        return jnp.mean((mlp(w, x) - y) ** 2)

    value, grads = jax.value_and_grad(loss)(w)
    return jax.tree.map(lambda p, g: p - 0.1 * g, w, grads), value


def microbatches(w, x, y):
    def body(grads, batch):
        new, value = training_step(w, *batch)
        return jax.tree.map(jnp.add, grads, new), value

    return lax.scan(body, jax.tree.map(jnp.zeros_like, w), (x.reshape(4, -1, 16), y.reshape(4, -1, 4)))


def split_in_rows(x):
    return jnp.tanh(x.reshape(6, -1, 16)) * 2


def split_in_columns(x):
    return jnp.tanh(x.reshape(-1, 3, 16)).sum(1)


def merged(x):
    return sbp.split(jnp.tanh(x.reshape(-1, 16)), 0, "data") + 1


def joined(x, y):
    return sbp.split(jnp.concatenate([x, y]), 0, "data") * 2


def halves(x):
    n = x.shape[0] // 2
    return x[:n] + x[n:]


def inner_split(x):
    return sbp.split(jnp.exp(x), 0, "data", "model").sum(0)


def shifted(x):
    return sbp.split(x, 0, "data")[1:] * 2


def rolled(x):
    return jnp.cumsum(sbp.split(x, 0, "model"), axis=0)


def reversed_rows(x):
    return sbp.split(lax.rev(sbp.split(x, 0, "model"), (0,)), 0, "model")


def looked_up(table, tokens):
    return table[tokens] @ jnp.ones((16, 8))


def tokens_merged(x, w):
    b, s, _ = x.shape
    return (x.reshape(b * s, 16) @ w).reshape(b, s, 8)


def attention(x, w):
    q = sbp.split((x @ w).reshape(*x.shape[:2], 4, 4), 2, "model")
    scores = jax.nn.softmax(jnp.einsum("bqhd,bkhd->bhqk", q, q))
    return jnp.einsum("bhqk,bkhd->bqhd", scores, q)


def carried(x):
    def body(c, _):
        return jnp.sin(sbp.split(c, 0, "model")), c.sum()

    return lax.scan(body, x, None, length=3)


def i32(*shape):
    return jax.ShapeDtypeStruct(shape, jnp.int32)


def case(name, fn, shapes, *constraints, holds="every", **options):
    return pytest.param(fn, shapes, constraints, holds, options, id=name)


ONE = [
    case("mlp", mlp, lambda b: (W, f32(b, 16)), in_types=(TP, "data:S(0)"), out_types="data:S(0)", holds="mod(b, 2) == 0"),
    case("mlp-free", mlp, lambda b: (W, f32(b, 16)), holds="mod(b, 8) == 0"),
    case("mlp-eights", mlp, lambda b: (W, f32(8 * b, 16))),
    case("mlp-constraint", mlp, lambda b: (W, f32(b, 16)), "mod(b, 8) == 0", "b >= 16"),
    case(
        "mlp-both-axes", mlp, lambda b: (W, f32(b, 16)), "mod(b, 4) == 0", in_types=(None, "data:S(0) model:S(0)"), holds="mod(b, 8) == 0"
    ),
    case("mlp-odd", mlp, lambda b: (W, f32(2 * b + 1, 16)), in_types=(TP, "data:S(0)")),
    case("step", training_step, lambda b: (W, f32(b, 16), f32(b, 4)), in_types=(TP, "data:S(0)", "data:S(0)"), holds="mod(b, 2) == 0"),
    case("step-free", training_step, lambda b: (W, f32(8 * b, 16), f32(8 * b, 4)), donate_argnums=(0,)),
    case("microbatches", microbatches, lambda b: (W, f32(4 * b, 16), f32(4 * b, 4)), in_types=(TP, None, None)),
    case("rows", split_in_rows, lambda b: (f32(6 * b, 16),), in_types=("data:S(0)",)),
    case("columns", split_in_columns, lambda b: (f32(3 * b, 16),), in_types=("data:S(0)",), out_types="data:S(0)"),
    case("columns-explicit", split_in_columns, lambda b: (f32(3 * b, 16),), in_types=("data:S(0)",), boxing="explicit"),
    case("merged", merged, lambda b: (f32(b, 3, 16),), in_types=("data:S(0)",)),
    case("joined", joined, lambda b: (f32(b, 8), f32(b + 3, 8)), in_types=("data:S(0)", None)),
    case("halves", halves, lambda b: (f32(2 * b, 8),), in_types=("data:S(0)",)),
    case("inner-split", inner_split, lambda b: (f32(b, 8),), in_types=("B",), out_types="B"),
    case("shifted", shifted, lambda b: (f32(b + 1, 8),), in_types=("B",), out_types="B"),
    case("rolled", rolled, lambda b: (f32(b, 8),), in_types=("model:S(0)",), out_types="B"),
    case("reversed", reversed_rows, lambda b: (f32(b, 8),), in_types=("B",), out_types="B"),
    case("looked-up", looked_up, lambda b: (f32(32, 16), i32(b)), in_types=("model:S(0)", "data:S(0)")),
    case("carried", carried, lambda b: (f32(b, 8),), in_types=("B",), out_types="B"),
]


def check(fn, shapes, constraints, options, names="b"):
    symbols = dims(names, *constraints)
    jitted = sbp.jit(fn, MESH, **options)
    with warnings.catch_warnings(action="ignore", category=SbpWarning):
        report = jitted.check(*shapes(*symbols))
    assert isinstance(report, SizedReport) and report.program is not None, report.text()
    return jitted, report


def agree(jitted, report, shapes, points):
    """The claimed condition against what happens, at each point."""
    wrong = []
    for point in points:
        claimed = report.sizes.holds_at(**point)
        if claimed != holds_there(jitted, report.program.typing, shapes(*point.values())):
            wrong.append((point, claimed))
    assert not wrong, f"{report.sizes}\n{wrong}"


@pytest.mark.parametrize("fn,shapes,constraints,holds,options", ONE)
def test_what_is_claimed_is_what_happens(fn, shapes, constraints, holds, options):
    jitted, report = check(fn, shapes, constraints, options)
    scope = Scope(("b",), constraints)
    agree(jitted, report, shapes, [{"b": b} for b in range(1, 65) if scope.allows({"b": b})])
    assert report.sizes.status != "open"
    print(report.sizes.status, report.sizes.holds)
