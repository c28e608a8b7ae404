"""The numeric minimiser against brute force on small random cost graphs; Goldstein's criterion
against its definition, on tables that are compared in several blocks; and results of equal arrays,
which are worked out once."""

import functools
import itertools
import math
from collections import Counter
from typing import ClassVar

import numpy as np
import pytest

from sbp.solve.costgraph import CHUNK, FEW, TIE, Core, CostGraph, Repeats, undominated_states
from sbp.solve.messages import Bounded, dual_of, pass_messages
from sbp.solve.search import Search, Solution, eliminate, solve as cheapest


def cases(count: int) -> list[tuple[int, CostGraph, float]]:
    """Seeds from 0 on, their graphs, and the least cost of each."""
    return [_case(seed) for seed in range(count)]


feasible = lambda count: [case for case in cases(count) if math.isfinite(case[2])]


@functools.cache
def _case(seed: int) -> tuple[int, CostGraph, float]:
    graph = random_graph(seed)
    return seed, graph, least(graph)


def random_graph(seed: int) -> CostGraph:
    """Two to seven variables with one to four states; a fifth of the pairs of states is
    forbidden."""
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


def least(graph: CostGraph, variable: int = 0, state: int | None = None) -> float:
    """The least cost of a graph, of all choices or of those with a variable in a state."""
    return min(
        graph.cost_of(states)
        for states in itertools.product(*(range(len(u)) for u in graph.unary))
        if state is None or states[variable] == state
    )


def reduced(graph: CostGraph) -> Core:
    """The core of a graph after all reductions."""
    core = Core.of(graph)
    core.reduce()
    return core


def solve(graph: CostGraph, table_limit: int, ordered_limit: int) -> Solution | None:
    search = Search(
        graph, table_limit=table_limit, ordered_limit=ordered_limit, near_limit=table_limit
    )
    return search.solution(search.run(reduced(graph)))


@pytest.mark.parametrize(
    ("solver", "is_exact"),
    [
        (functools.partial(solve, table_limit=300_000, ordered_limit=8), True),
        (functools.partial(solve, table_limit=8, ordered_limit=300_000), True),
        (functools.partial(solve, table_limit=8, ordered_limit=8), False),
        (cheapest, True),
    ],
    ids=["elimination", "in order", "messages", "usual limits"],
)
def test_small_graphs(solver, is_exact):
    exact = 0
    for _, graph, want in cases(400):
        found = solver(graph)
        if not math.isfinite(want):
            assert found is None or not math.isfinite(found.cost)
            continue
        assert found is not None and graph.cost_of(found.states) == pytest.approx(found.cost)
        assert found.lower_bound <= want + 1e-9 <= found.cost + 2e-9
        exact += found.cost == pytest.approx(want)
        if is_exact:
            assert found.cost == pytest.approx(want) == pytest.approx(found.lower_bound)
    assert exact > 250


class CountedSearch(Search):
    """A search that counts the searches near the bound, by its cutoff."""

    searched: ClassVar[Counter[float]] = Counter()

    def _within(self, core: Core, found: Bounded, slack: float) -> int:
        self.searched[self.cutoff] += 1
        return super()._within(core, found, slack)


def test_a_cutoff_does_not_change_cheaper_solutions():
    """A cutoff above the optimum changes nothing. Below the optimum the search ends early, and its
    bound is valid."""

    def counted(graph: CostGraph, cutoff: float = math.inf) -> Solution | None:
        search = CountedSearch(graph, table_limit=8, ordered_limit=8, near_limit=8, cutoff=cutoff)
        return search.solution(search.run(reduced(graph)))

    CountedSearch.searched.clear()
    missed = 0  # tables of 8 entries are too small for one of these graphs
    for _, graph, want in cases(1000):
        whole = counted(graph)
        if math.isfinite(want):
            above, below = counted(graph, want + 1.0), counted(graph, -1.0)
            assert above == whole
            missed += whole is None
            if below is not None:
                assert below.lower_bound <= want + 1e-9 <= below.cost + 2e-9
            else:
                assert whole is None
    assert missed <= 1
    # Below the optimum it goes on only while no solution of finite cost is known.
    assert 0 < 2 * CountedSearch.searched[-1.0] < CountedSearch.searched[math.inf]


def full_cost(graph: CostGraph, core: Core, states: dict[int, int]) -> float:
    return graph.cost_of([s for _, s in sorted(core.extend(states).items())])


def test_reductions_lose_no_optimum():
    emptied = 0
    for _, graph, want in feasible(200):
        core = reduced(graph)
        assert core.feasible
        states, guessed = eliminate(core, 300_000)
        assert guessed == 0 and full_cost(graph, core, states) == pytest.approx(want)
        emptied += not core.unary
    assert emptied > 100


def test_elimination_with_small_tables_says_how_much_it_guessed():
    guesses = 0
    for _, graph, want in cases(200):
        core = Core.of(graph)
        states, guessed = eliminate(core, 8)
        guesses += guessed > 0
        if guessed == 0 and math.isfinite(want):
            assert full_cost(graph, core, states) == pytest.approx(want)
    assert guesses > 100


@pytest.mark.parametrize("forbidden", [1e3, 1.0])
def test_messages_bound_every_state(forbidden: float):
    """The bound, and the bound with a variable in a state, are below the cheapest solution,
    whatever number stands for an infinite cost."""
    tight = 0
    for _, graph, want in cases(50):
        found = pass_messages(Core.of(graph), forbidden=forbidden)
        assert found.lower_bound <= want + 1e-9
        tight += math.isclose(found.lower_bound, want)
        assert all(
            found.lower_bound + above <= least(graph, v, state) + 1e-9
            for v, marginal in found.marginals.items()
            for state, above in enumerate(marginal)
        )
    assert tight > (15 if forbidden > 9 else 0)


def test_messages_go_on_from_earlier_ones():
    """The bound does not fall back when states are dropped in between, and stays a bound."""
    for _, graph, _ in cases(50):
        core = Core.of(graph)
        first = pass_messages(core, sweeps=3)
        left = max(1, len(graph.unary[0]) - 1)
        core.keep(0, np.arange(len(graph.unary[0])) < left)
        second = pass_messages(core, first, sweeps=1)
        assert second.lower_bound >= first.lower_bound - 1e-9
        assert second.lower_bound <= min(least(graph, 0, s) for s in range(left)) + 1e-9


def test_messages_follow_the_order_of_the_program():
    """One sweep takes costs from one end of a chain to the other, also where the variables between
    were added last."""
    graph = CostGraph()
    ends = [graph.variable(np.zeros(2)) for _ in range(8)]
    graph.add_unary(ends[0], np.array([0.0, 9.0]))
    graph.add_unary(ends[-1], np.array([9.0, 0.0]))
    change = np.array([[0.0, 1.0], [1.0, 0.0]])
    for a, b in itertools.pairwise(ends):
        copy = graph.variable(np.zeros(2), after=a)
        graph.add_pair(a, copy, change)
        graph.add_pair(copy, b, change)
    assert pass_messages(Core.of(graph), sweeps=1).lower_bound == pytest.approx(1.0)


# ---- reductions ----------------------------------------------------------------------------------


STATES, COLUMNS = 70, (900, 40, 3)


def by_definition(unary: np.ndarray, tables: list[np.ndarray]) -> np.ndarray:
    """The states that stay when the states are tried one by one, the last one first."""

    def most(r: np.ndarray, s: np.ndarray) -> float:
        some = np.isfinite(r) | np.isfinite(s)  # columns that forbid both do not matter
        return max(r[some] - s[some], default=0.0)

    def dominates(r: int, s: int) -> bool:
        worst = [most(t[r], t[s]) for t in tables]
        return np.inf not in worst and unary[r] - unary[s] + sum(worst) <= TIE

    stays = np.ones(len(unary), dtype=bool)
    for s in reversed(range(len(unary))):
        stays[s] = not any(dominates(r, s) for r in np.flatnonzero(stays).tolist() if r != s)
    return stays


@pytest.mark.parametrize("seed", range(2))
def test_dominated_states_in_several_blocks(seed: int):
    assert STATES**2 * FEW > CHUNK and STATES * max(COLUMNS) > CHUNK
    rng = np.random.default_rng(seed)
    # Each state is one of a few, or that one with some costs added or forbidden.
    alike = rng.integers(0, 12, STATES)
    worse = rng.random(STATES) < 0.7
    unary = rng.integers(0, 3, 12)[alike] + 0.5 * worse * (rng.random(STATES) < 0.5)
    tables = []
    for columns in COLUMNS:
        table = rng.integers(0, 9, (12, columns)).astype(float)
        table[rng.random(table.shape) < 0.1] = np.inf
        changed = worse[:, None] & (rng.random((STATES, columns)) < 0.02)
        more = rng.choice([1.0, -1.0, np.inf], changed.shape, p=[0.595, 0.005, 0.4])
        tables.append(table[alike] + np.where(changed, more, 0.0))
    stays = undominated_states(unary, np.ones(STATES, dtype=bool), *tables)
    assert (stays == by_definition(unary, tables)).all() and 12 <= stays.sum() < STATES - 12


# ---- repeats -------------------------------------------------------------------------------------


def test_equal_arrays_have_one_result():
    calls: list[int] = []

    def total(*arrays: np.ndarray) -> float:
        calls.append(len(arrays))
        return float(sum(a.sum() for a in arrays))

    repeats, rows = Repeats(), np.arange(6.0).reshape(2, 3)
    for _ in range(2):
        assert repeats.of(total, rows) == repeats.of(total, rows.copy()) == 15.0
        # A transpose has other contents and another shape.
        assert repeats.of(total, rows.T) == 15.0 and repeats.of(total, rows, rows) == 30.0
    assert calls == [1, 1, 2]


def test_the_same_contents_in_another_shape_are_another_array():
    repeats, flat = Repeats(), np.arange(6.0)
    shapes = [repeats.of(np.shape, flat.reshape(s)) for s in ((2, 3), (3, 2), (6,))]
    assert shapes == [(2, 3), (3, 2), (6,)]


def reduced_layers(layers: int) -> Core:
    """A program of equal layers that share nothing, reduced_layers."""
    rng = np.random.default_rng(0)
    unary, tables = rng.random((4, 5)), rng.random((4, 4, 5, 5))
    graph = CostGraph()
    for _ in range(layers):
        layer = [graph.variable(costs) for costs in unary]
        for a in range(4):
            for b in range(a):
                graph.add_pair(layer[b], layer[a], tables[a, b])
    return reduced(graph)


def test_repeated_layers_are_reduced_once():
    one, many = reduced_layers(1), reduced_layers(20)
    assert 0 < len(one.repeats.known) == len(many.repeats.known)
    assert len(many.solved) == 20 * len(one.solved)
    assert many.constant == pytest.approx(20 * one.constant)


def test_duals_prove_their_bound():
    tight = 0
    for seed, graph, best in feasible(60):
        bound, moved = dual_of(graph)
        unary, proved = [u.copy() for u in graph.unary], 0.0
        for (a, b), (to_a, to_b) in moved.items():
            unary[a] += to_a
            unary[b] += to_b
            proved += float((graph.pairs[a, b] - to_a[:, None] - to_b[None, :]).min())
        proved += sum(float(u.min()) for u in unary)
        assert bound == proved <= best + 1e-9, seed
        tight += proved > best - 1e-6
    assert tight > 20
