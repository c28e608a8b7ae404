"""Finite variables with unary and pairwise costs: what the chooser minimises."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np


@dataclass(slots=True)
class CostGraph:
    """Variables with unary costs, and pairwise costs between them; infinite costs forbid."""

    unary: list[np.ndarray] = field(default_factory=list)
    pairs: dict[tuple[int, int], np.ndarray] = field(default_factory=dict)

    def variable(self, costs: np.ndarray) -> int:
        """A new variable with its unary costs; returns its number."""
        self.unary.append(np.asarray(costs, dtype=float))
        return len(self.unary) - 1

    def add_unary(self, variable: int, costs: np.ndarray) -> None:
        """Adds to a variable's unary costs."""
        self.unary[variable] = self.unary[variable] + costs

    def add_pair(self, a: int, b: int, costs: np.ndarray) -> None:
        """Adds a cost matrix between two variables; between a variable and itself, its diagonal."""
        if a == b:
            self.add_unary(a, np.diagonal(costs))
            return
        key, table = ((a, b), costs) if a < b else ((b, a), costs.T)
        if key in self.pairs:
            self.pairs[key] = self.pairs[key] + table
        else:
            self.pairs[key] = table

    def cost_of(self, states: Sequence[int]) -> float:
        """The total cost of a choice of states."""
        total = sum(float(u[s]) for u, s in zip(self.unary, states, strict=True))
        return total + sum(float(m[states[a], states[b]]) for (a, b), m in self.pairs.items())

    def neighbours(self) -> list[dict[int, np.ndarray]]:
        """For each variable, its neighbours with the cost matrix seen from its side."""
        near: list[dict[int, np.ndarray]] = [{} for _ in self.unary]
        for (a, b), m in self.pairs.items():
            near[a][b] = m
            near[b][a] = m.T
        return near
