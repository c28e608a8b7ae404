"""Results of equal arrays are worked out once."""

import numpy as np
import pytest

from sbp.solve.costgraph import CostGraph
from sbp.solve.reduction import Core, Repeats


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


def reduced(layers: int) -> Core:
    """A program of equal layers that share nothing, reduced."""
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
    one, many = reduced(1), reduced(20)
    assert 0 < len(one.repeats) == len(many.repeats)
    assert len(many.solved) == 20 * len(one.solved)
    assert many.constant == pytest.approx(20 * one.constant)
