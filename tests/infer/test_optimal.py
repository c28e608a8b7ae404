"""The chooser against brute force over all typings of small programs, each priced from its plan."""

import itertools
from typing import Any

import jax
import jax.numpy as jnp
import pytest

import sbp
from sbp.infer.cost import row_seconds
from sbp.infer.flow import flow_of
from sbp.infer.request import native_partials
from sbp.infer.rows import RowTable
from sbp.infer.space import is_even
from sbp.infer.typing import Typing
from sbp.plan.ir import Box, lower
from tests.slices import sliced

pytestmark = pytest.mark.laws


PROGRAMS = {
    "chain": (lambda u, v, w: (u @ v) @ w, ((8, 64), (64, 8), (8, 16))),
    "forked": (lambda x, w: (lambda h: (jnp.tanh(h), h * 2.0))(x @ w), ((16, 8), (8, 16))),
    "normed": (lambda x: x / jnp.sqrt((x * x).sum()), ((8, 12),)),
    "joined": (lambda a, b: (a + b.T).sum(0), ((8, 16), (16, 8))),
    "tall": (lambda x, w: (x @ w).max(1), ((32, 8), (8, 16))),
}


def typings(typing: Typing, table: RowTable):
    """All typings of a program without regions, on one mesh axis."""
    graph, mesh = typing.graph, typing.mesh
    native = native_partials(flow_of(graph), table, {})
    (n,) = mesh.sizes

    def ends(aval):
        codes = [(0,), *((1 + d,) for d, size in enumerate(aval.shape) if size >= n)]
        return [c for c in codes if is_even(aval.shape, c, mesh.sizes)]

    def rows(node):
        ins, outs = [graph.aval(o) for o in node.inputs], [graph.avals[v] for v in node.outputs]
        return table.rows(
            node,
            False,
            ins,
            outs,
            tuple(
                native.get(o, frozenset()) if isinstance(o, int) else frozenset()
                for o in node.inputs
            ),
        )

    choices = [
        *(ends(graph.avals[v]) for v in graph.inputs),
        *(rows(n) for n in graph.nodes),
        *(ends(graph.aval(o)) for o in graph.outputs),
    ]
    chosen: Any
    for chosen in itertools.product(*choices):
        inputs = chosen[: len(graph.inputs)]
        found = chosen[len(graph.inputs) : len(graph.inputs) + len(graph.nodes)]
        values = dict(zip(graph.inputs, inputs, strict=True))
        for node, row in zip(graph.nodes, found, strict=True):
            values.update(zip(node.outputs, row.outs, strict=True))
        yield Typing(
            request=typing.request,
            graph=graph,
            values=values,
            rows={node.id: row for node, row in zip(graph.nodes, found, strict=True)},
            region_outputs={},
            outputs=tuple(chosen[len(graph.inputs) + len(graph.nodes) :]),
            seconds=0.0,
            lower_bound=0.0,
        )


def price(typing: Typing) -> float:
    """Seconds of the lowered program: each row and each conversion once."""
    shares = typing.request.memory_shares
    rows = sum(
        row_seconds(typing.graph, node, typing.rows[node.id], typing.mesh, shares)
        for node in typing.graph.nodes
    )
    return rows + sum(
        s.seconds for i in lower(typing).instructions if isinstance(i, Box) for s in i.steps
    )


@pytest.mark.parametrize(
    ("name", "hardware"),
    sliced(itertools.product(PROGRAMS, ("tpu-v5p", "cpu")), 1 / 2),
)
def test_no_typing_of_a_small_program_is_cheaper(name, hardware):
    fn, shapes = PROGRAMS[name]
    args = [jax.ShapeDtypeStruct(s, jnp.float32) for s in shapes]
    program = (
        sbp.jit(fn, jax.sharding.AbstractMesh((4,), ("d",)), hardware=hardware).plan(*args).program
    )
    assert program.typing.optimal
    every = [price(t) for t in typings(program.typing, RowTable(program.mesh))]
    assert len(every) > 50
    # Among equals a partial is carried on: `DEFERRAL` is the only thing the chooser adds to the
    # price.
    assert price(program.typing) <= min(every) + 1e-10
