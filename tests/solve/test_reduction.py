"""Goldstein's criterion against its definition, on tables that are compared in several blocks; and
results of equal arrays, which are worked out once."""

from __future__ import annotations

import numpy as np
import pytest

from sbp.solve.costgraph import CostGraph
from sbp.solve.reduction import CHUNK, FEW, TIE, Core, Repeats, undominated

STATES, COLUMNS = 70, (900, 40, 3)

PARTS = [0.595, 0.005, 0.4]
"""Shares of the changed costs that rise, fall and are forbidden."""


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
        more = rng.choice([1.0, -1.0, np.inf], changed.shape, p=PARTS)
        tables.append(table[alike] + np.where(changed, more, 0.0))
    stays = undominated(unary, np.ones(STATES, dtype=bool), *tables)
    assert (stays == by_definition(unary, tables)).all()
    assert 12 <= stays.sum() < STATES - 12


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
        assert repeats.of(total, rows.T) == 15.0
        assert repeats.of(total, rows, rows) == 30.0
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
    core = Core.of(graph)
    core.reduce()
    return core


def test_repeated_layers_are_reduced_once():
    one, many = reduced_layers(1), reduced_layers(20)
    assert 0 < len(one.repeats) == len(many.repeats)
    assert len(many.solved) == 20 * len(one.solved)
    assert many.constant == pytest.approx(20 * one.constant)
