"""The chooser against brute force: over all states of small cost graphs, and over all typings of
small programs, priced as lowered."""

import itertools
import math
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AbstractMesh

import sbp
from sbp.infer.cost import row_seconds
from sbp.infer.flow import flow_of
from sbp.infer.partials import native_partials
from sbp.infer.rows import RowTable
from sbp.infer.space import is_even
from sbp.infer.typing import Typing
from sbp.machine.mesh import MeshSpec
from sbp.plan.ir import Box
from sbp.plan.lower import lower
from sbp.solve import search as solver
from sbp.solve.axes import solve_axes
from sbp.solve.costgraph import CostGraph
from sbp.solve.reduction import Core
from sbp.solve.search import Search, Solution
from tests.slices import sliced

# ---- cost graphs --------------------------------------------------------------------------------


def random_graph(seed: int) -> CostGraph:
    rng = np.random.default_rng(seed)
    graph = CostGraph()
    count = int(rng.integers(2, 8))
    for _ in range(count):
        graph.variable(rng.integers(0, 9, int(rng.integers(1, 5))).astype(float))
    for a, b in itertools.combinations(range(count), 2):
        if rng.random() < 0.6:
            costs = rng.integers(0, 9, (len(graph.unary[a]), len(graph.unary[b]))).astype(float)
            costs[rng.random(costs.shape) < 0.2] = math.inf
            graph.add_pair(a, b, costs)
    return graph


def least(graph: CostGraph) -> float:
    return min(
        graph.cost_of(states) for states in itertools.product(*(range(len(u)) for u in graph.unary))
    )


def solve(graph: CostGraph, table_limit: int, cutoff: float = math.inf) -> Solution | None:
    search, core = (
        Search(graph, table_limit=table_limit, near_limit=table_limit, cutoff=cutoff),
        Core.of(graph),
    )
    core.reduce()
    return search.solution(search.run(core))


@pytest.mark.parametrize(
    ("table_limit", "unsure"),
    [(300_000, 8), (8, 8), (8, 0)],
    ids=["elimination", "messages", "halving"],
)
def test_small_graphs(table_limit, unsure, monkeypatch):
    monkeypatch.setattr(solver, "UNSURE", unsure)
    exact = 0
    for seed in range(400):
        graph = random_graph(seed)
        want, found = least(graph), solve(graph, table_limit=table_limit)
        if not math.isfinite(want):
            assert found is None or not math.isfinite(found.cost)
            continue
        assert found is not None
        assert graph.cost_of(found.states) == pytest.approx(found.cost)
        assert found.lower_bound <= want + 1e-9 <= found.cost + 2e-9
        exact += found.cost == pytest.approx(want)
        if table_limit > 8:
            assert found.cost == pytest.approx(want) == pytest.approx(found.lower_bound)
    assert exact > 250


def test_a_cutoff_takes_nothing_from_what_is_cheaper(monkeypatch):
    """Above the optimum it changes nothing; below it, the search ends early, and the bound still
    holds."""
    searched: dict[float, int] = {}  # how often states near the bound are searched, by cutoff
    within = Search._within

    def counted(self, *args):
        searched[self.cutoff] = searched.get(self.cutoff, 0) + 1
        return within(self, *args)

    monkeypatch.setattr(Search, "_within", counted)
    for seed in range(300):
        graph = random_graph(seed)
        want, whole = least(graph), solve(graph, 8)
        if math.isfinite(want):
            assert whole is not None
            above, below = solve(graph, 8, want + 1.0), solve(graph, 8, -1.0)
            assert above == whole
            assert below is not None and below.lower_bound <= want + 1e-9 <= below.cost + 2e-9
    assert (
        0 < 2 * searched[-1.0] < searched[math.inf]
    )  # it goes on only where nothing of a finite cost was found so far


def test_three_axes_keep_their_bound():
    for seed in range(60):
        graph = random_graph(seed)
        rng = np.random.default_rng(seed)
        profiles = [rng.integers(0, 2, (len(u), 3)) for u in graph.unary]
        want, found = least(graph), solve_axes(graph, profiles, 3)
        if math.isfinite(want):
            assert found is not None and found.lower_bound <= want + 1e-9 <= found.cost + 2e-9


# ---- programs -----------------------------------------------------------------------------------


def chain(u, v, w):
    return (u @ v) @ w


def forked(x, w):
    h = x @ w
    return jnp.tanh(h), h * 2.0


def normed(x):
    return x / jnp.sqrt((x * x).sum())


def joined(a, b):
    return (a + b.T).sum(0)


def tall(x, w):
    return (x @ w).max(1)


SHAPES = {
    chain: ((8, 64), (64, 8), (8, 16)),
    forked: ((16, 8), (8, 16)),
    normed: ((8, 12),),
    joined: ((8, 16), (16, 8)),
    tall: ((32, 8), (8, 16)),
}


def typings(typing: Typing, table: RowTable) -> Iterator[Typing]:
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
    rows = sum(
        row_seconds(typing.graph, node, typing.rows[node.id], typing.mesh)
        for node in typing.graph.nodes
    )
    return rows + sum(
        s.seconds for i in lower(typing).instructions if isinstance(i, Box) for s in i.steps
    )


@pytest.mark.parametrize(
    ("fn", "hardware"),
    sliced(itertools.product(SHAPES, ("tpu-v5p", "cpu")), 1 / 2),
    ids=lambda x: getattr(x, "__name__", x),
)
def test_no_typing_of_a_small_program_is_cheaper(fn, hardware):
    args = [jax.ShapeDtypeStruct(s, jnp.float32) for s in SHAPES[fn]]
    program = sbp.jit(fn, AbstractMesh((4,), ("d",)), hardware=hardware).plan(*args).program
    assert program.typing.optimal
    spec: MeshSpec = program.mesh
    every = [price(t) for t in typings(program.typing, RowTable(spec))]
    assert len(every) > 50
    # Among equals a partial is carried on: `DEFERRAL` is the only thing the chooser adds to the
    # price.
    assert price(program.typing) <= min(every) + 1e-10
