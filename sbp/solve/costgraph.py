"""Finite variables with unary and pairwise costs: what the chooser minimises."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

Place = tuple[int, ...]
"""Where a variable stands in the program: its number, or the place of the variable that it stands
after, followed by its number."""


@dataclass(slots=True)
class CostGraph:
    """Variables with unary costs, and pairwise costs between them. An infinite cost forbids.

    Arguments:
      unary: for each variable, a cost for each of its states.
      pairs: for two variables, the smaller number first, a matrix with a cost for each pair of
        states.
      places: for each variable, where it stands in the program: these are sorted.
    """

    unary: list[np.ndarray] = field(default_factory=list)
    pairs: dict[tuple[int, int], np.ndarray] = field(default_factory=dict)
    places: list[Place] = field(default_factory=list)

    def variable(self, costs: np.ndarray, after: int | None = None) -> int:
        """Adds a variable with its unary costs; returns its number.

        Arguments:
          costs: the cost of each state.
          after: the variable directly after which it stands in the program; None for the end.
        """
        number = len(self.unary)
        self.unary.append(np.asarray(costs, dtype=float))
        self.places.append((*(() if after is None else self.places[after]), number))
        return number

    def add_unary(self, variable: int, costs: np.ndarray) -> None:
        """Adds to a variable's unary costs."""
        self.unary[variable] = self.unary[variable] + costs

    def add_pair(self, a: int, b: int, costs: np.ndarray) -> None:
        """Adds pairwise costs.

        Arguments:
          a, b: the variables. Where they are the same variable, the diagonal is added to its unary
            costs.
          costs: a matrix [state of a, state of b].
        """
        if a == b:
            self.add_unary(a, np.diagonal(costs))
            return
        key, table = ((a, b), costs) if a < b else ((b, a), costs.T)
        if key in self.pairs:
            self.pairs[key] = self.pairs[key] + table
        else:
            self.pairs[key] = table

    def cost_of(self, states: Sequence[int]) -> float:
        """The total cost of a state for each variable."""
        total = sum(float(u[s]) for u, s in zip(self.unary, states, strict=True))
        return total + sum(float(m[states[a], states[b]]) for (a, b), m in self.pairs.items())

    def neighbours(self) -> list[dict[int, np.ndarray]]:
        """For each variable, its neighbours, each with the matrix [own state, neighbour's
        state]."""
        near: list[dict[int, np.ndarray]] = [{} for _ in self.unary]
        for (a, b), m in self.pairs.items():
            near[a][b] = m
            near[b][a] = m.T
        return near
