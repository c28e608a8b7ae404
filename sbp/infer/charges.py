"""Enters the costs of conversions into a cost graph, as pairwise costs between where a value is
made and where it is read."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from sbp.infer.policy import Rules
from sbp.infer.space import Codes, TypeSpace
from sbp.limits import POLICIES
from sbp.solve.costgraph import CostGraph


@dataclass(frozen=True, slots=True)
class PricedEnd:
    """An end of a value, as its conversions are priced.

    Arguments:
      variable: the variable that decides the type.
      codes: the type in each state of the variable.
      weight: how often the value is made or read there in one run of the program.
      rules: the conversions that are allowed for the reader; None allows all.
    """

    variable: int
    codes: tuple[Codes, ...]
    weight: float = 1.0
    rules: Rules | None = None


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ConversionCharges:
    """Enters the seconds of conversions into a cost graph.

    Arguments:
      costs: the cost graph.
      hbm_bytes_per_second: the rate at which a device reads or writes its memory.
      shares: for each value that is computed more than once, the share of a conversion's seconds
        that is charged, from 0 to 1. The seconds to store the result of the first conversion are
        charged in any case.
      waived: for each pair of variables, the seconds that were not charged for this reason.
    """

    costs: CostGraph
    hbm_bytes_per_second: float
    shares: Mapping[int, float]
    waived: list[tuple[int, int, np.ndarray]] = field(default_factory=list)
    _matrices: dict[Any, np.ndarray] = field(default_factory=dict)

    def charge(self, value: int, space: TypeSpace, source: PricedEnd, end: PricedEnd) -> None:
        """Charges the conversions of a value from one end to another: the share of it in `shares`.

        Arguments:
          value: the value.
          space: its types and their conversions.
          source: where the value comes from.
          end: where it is read; its rules limit the conversions. A conversion runs as often as
            the end that runs less often.
        """
        weight = min(source.weight, end.weight)
        costs = weight * self._matrix(space, source.codes, end.codes, end.rules)
        share = self.shares.get(value)
        if share is not None:
            rate = self.hbm_bytes_per_second
            local_bytes = np.array([space.local_bytes[space.index[t]] for t in end.codes])
            # One loop writes the result to memory, the other loop reads it.
            stored = 2 * end.weight * local_bytes / rate if end.weight > 1 else 0.0
            # A partial result is not reused.
            whole = np.array([not any(c < 0 for c in t) for t in end.codes])
            finite = np.where(np.isfinite(costs) & whole, costs, 0.0)
            waived = (1 - share) * (finite - np.minimum(finite, stored))
            self.waived.append((source.variable, end.variable, waived))
            costs = costs - waived
        self.costs.add_pair(source.variable, end.variable, costs)

    def share(
        self,
        value: int,
        space: TypeSpace,
        maker: PricedEnd,
        ends: Sequence[PricedEnd],
        types: tuple[Codes, ...],
    ) -> list[PricedEnd]:
        """Charges the conversions of a value with several readers. Readers under the same rules
        share one conversion; each may convert its result further.

        Arguments:
          value: the value.
          space: its types and their conversions.
          maker: where it is made.
          ends: where it is read.
          types: the types of the shared result.

        Returns:
          One end for each set of rules, with a new variable for the type that its readers share.
        """
        groups: dict[Rules | None, list[PricedEnd]] = defaultdict(list)
        for end in ends:
            groups[end.rules].append(end)
        copies: list[PricedEnd] = []
        for rules, group in sorted(groups.items(), key=lambda g: -_strictness(g[0])):
            # A result that strict rules allow serves readers whose rules allow more, too.
            within = (
                copy
                for copy in reversed(copies)
                if copy.rules is not None and (rules is None or copy.rules.within(rules))
            )
            source = next(within, maker)
            variable = self.costs.variable(np.zeros(len(types)), after=source.variable)
            copy = PricedEnd(variable, types, maker.weight, rules)
            copies.append(copy)
            self.charge(value, space, source, copy)
            for end in group:
                self.charge(value, space, copy, end)
        return copies

    def _matrix(
        self,
        space: TypeSpace,
        source: tuple[Codes, ...],
        target: tuple[Codes, ...],
        rules: Rules | None,
    ) -> np.ndarray:
        """Seconds of one conversion, an array [state of the source, state of the target]. Equal
        arguments are computed once."""
        key = (id(space), source, target, rules)
        if key not in self._matrices:
            rows = np.array([space.index[t] for t in source], dtype=int)
            columns = np.array([space.index[t] for t in target], dtype=int)
            self._matrices[key] = space.seconds(rules)[np.ix_(rows, columns)]
        return self._matrices[key]


def _strictness(rules: Rules | None) -> int:
    """A number to sort rules by: if rules A allow nothing that rules B forbid, A's is at least
    B's."""
    return 0 if rules is None else sum(POLICIES.index(p) for p in rules.policies) + len(rules.bans)
