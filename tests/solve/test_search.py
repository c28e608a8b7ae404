"""The numeric minimiser against brute force on small random cost graphs."""

from __future__ import annotations

import itertools
import math
from collections import Counter
from typing import ClassVar

import numpy as np
import pytest

from sbp.solve.axes import JOINT_ENTRIES, solve_axes
from sbp.solve.costgraph import CostGraph
from sbp.solve.messages import Bounded, pass_messages
from sbp.solve.reduction import Core
from sbp.solve.search import UNSURE, Search, Solution, eliminate
from tests.solve.graphs import cases, least, reduced


def solve(
    graph: CostGraph, table_limit: int, ordered_limit: int, unsure: int = UNSURE
) -> Solution | None:
    search = Search(
        graph,
        table_limit=table_limit,
        ordered_limit=ordered_limit,
        near_limit=table_limit,
        unsure=unsure,
    )
    return search.solution(search.run(reduced(graph)))


@pytest.mark.parametrize(
    ("table_limit", "ordered_limit", "unsure"),
    [(300_000, 8, 8), (8, 300_000, 8), (8, 8, 8), (8, 8, 0)],
    ids=["elimination", "in order", "messages", "halving"],
)
def test_small_graphs(table_limit: int, ordered_limit: int, unsure: int):
    exact = 0
    for _, graph, want in cases(400):
        found = solve(graph, table_limit, ordered_limit, unsure)
        if not math.isfinite(want):
            assert found is None or not math.isfinite(found.cost)
            continue
        assert found is not None
        assert graph.cost_of(found.states) == pytest.approx(found.cost)
        assert found.lower_bound <= want + 1e-9 <= found.cost + 2e-9
        exact += found.cost == pytest.approx(want)
        if max(table_limit, ordered_limit) > 8:
            assert found.cost == pytest.approx(want) == pytest.approx(found.lower_bound)
    assert exact > 250


class CountedSearch(Search):
    """A search that counts the searches near the bound, by its cutoff."""

    searched: ClassVar[Counter[float]] = Counter()

    def _within(self, core: Core, found: Bounded, slack: float, *, guess: bool = False) -> int:
        self.searched[self.cutoff] += 1
        return super()._within(core, found, slack, guess=guess)


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


@pytest.mark.parametrize("joint_entries", [JOINT_ENTRIES, 0], ids=["joint", "in turn"])
@pytest.mark.parametrize("axes", [2, 3, 4])
def test_axes_keep_their_bound(axes: int, joint_entries: int):
    """With too many entries for a joint search, three and more axes have no bound but 0, except
    where a solution to start from is found only by the joint search."""
    without_bound = 0
    for seed, graph, want in cases(60):
        rng = np.random.default_rng(seed)
        profiles = [rng.integers(0, 2, (len(u), axes)) for u in graph.unary]
        found = solve_axes(graph, profiles, axes, joint_entries=joint_entries)
        if math.isfinite(want):
            assert found is not None and found.lower_bound <= want + 1e-9 <= found.cost + 2e-9
            assert graph.cost_of(found.states) == pytest.approx(found.cost)
            without_bound += found.lower_bound == 0 < want
            if axes <= 2 or joint_entries:
                assert found.cost == pytest.approx(want)
    assert (without_bound > 20) == (axes > 2 and not joint_entries)


def test_reductions_lose_no_optimum():
    emptied = 0
    for _, graph, want in cases(200):
        core = reduced(graph)
        if not math.isfinite(want):
            continue
        assert core.feasible
        states, guessed = eliminate(core, 300_000)
        assert guessed == 0
        assert graph.cost_of(core.extend(states)) == pytest.approx(want)
        emptied += not core.unary
    assert emptied > 100


def test_elimination_with_small_tables_says_how_much_it_guessed():
    guesses = 0
    for _, graph, want in cases(200):
        core = Core.of(graph)
        states, guessed = eliminate(core, 8)
        guesses += guessed > 0
        if guessed == 0 and math.isfinite(want):
            assert graph.cost_of(core.extend(states)) == pytest.approx(want)
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
        for v, marginal in found.marginals.items():
            for state, above in enumerate(marginal):
                assert found.lower_bound + above <= least(graph, v, state) + 1e-9
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
