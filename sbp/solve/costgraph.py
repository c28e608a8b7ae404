"""Finite variables with unary and pairwise costs, which the chooser minimizes, and exact reductions
of such problems."""

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

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
        self.pairs[key] = self.pairs[key] + table if key in self.pairs else table

    def cost_of(self, states: Sequence[int]) -> float:
        """The total cost of a state for each variable."""
        total = sum(float(u[s]) for u, s in zip(self.unary, states, strict=True))
        return total + sum(float(m[states[a], states[b]]) for (a, b), m in self.pairs.items())


# ---- repeats ------------------------------------------------------------------------------------
# Results by the contents of the arrays that they follow from: repeated layers of a program have
# equal tables, and what follows from them is worked out once.


DIGEST = 16
"""Bytes of the digest that stands for the contents of arrays."""


@dataclass(slots=True, eq=False)
class Repeats:
    """The results of functions of arrays, `known` by function and contents.

    >>> repeats = Repeats()
    >>> repeats.of(np.add, np.ones(2), np.ones(2)) is repeats.of(np.add, np.ones(2), np.ones(2))
    True
    """

    known: dict[tuple[Any, ...], Any] = field(default_factory=dict[tuple[Any, ...], Any])

    def of(self, function: Callable[..., Any], *arrays: np.ndarray) -> Any:
        """`function(*arrays)`, from an earlier call with equal arrays where there was one. The
        caller may not change the result.

        Arguments:
          function: a function of these arrays and of nothing else.
          arrays: its arguments.
        """
        contents = hashlib.blake2b(digest_size=DIGEST)
        for array in arrays:
            contents.update(array.tobytes())
        key = function, tuple([array.shape for array in arrays]), contents.digest()
        if key not in self.known:
            self.known[key] = function(*arrays)
        return self.known[key]


# ---- reduction ----------------------------------------------------------------------------------
# Exact reductions of a cost graph: states that no cheapest solution needs are dropped, and
# variables with at most two neighbors are solved away. These are the R0, R1 and R2 reductions of
# partitioned Boolean quadratic problems, with Goldstein's dominance between them. Chains of
# operators with one operand (`exp` of `sub` of ..) vanish here. Variables with three and more
# neighbors are left.


FEW = 12
"""Columns of each table that the first comparison of states reads, for all pairs of states. The
second one reads all columns, for the pairs that are left."""

CHUNK = 32_768
"""Costs that are compared in one numpy operation: so few that they stay in the processor's
cache."""

HUGE = 1e30
"""Seconds whose negative stands for minus infinity: more than any sum of costs, but finite, since
the sum of two infinities of different sign is NaN."""

TIE = 1e-15
"""Seconds up to which a state may cost more and still replace another one. Of two states that
replace each other the first one stays."""


Solved = tuple[int, tuple[int, ...], np.ndarray, np.ndarray, tuple[np.ndarray, ...]]
"""A variable that was solved away; its neighbours; its best state, an array [state of each
neighbour, ..]; for each of its states, the number in the whole graph; and the same for each
neighbour. States are numbered as when the variable was solved away, without those dropped before.
"""


@dataclass(slots=True)
class Core:
    """The variables of a cost graph that reductions have left, and what extends a solution of them
    to the whole graph.

    Arguments:
      unary: for each variable that is left, the costs of its states.
      near: for each variable that is left, its neighbours, each with the matrix [own state,
        neighbour's state].
      kept: for every variable of the whole graph, the states that are left, by their numbers in
        the whole graph.
      places: for every variable of the whole graph, where it stands in the program.
      solved: the variables that were solved away, in order.
      constant: seconds. A solution of the whole graph costs this much more than its part in the
        core.
      feasible: whether every variable has a state left. If not, no solution has a finite cost.
      repeats: what was worked out for equal tables, also by cores that this one is a copy of.
    """

    unary: dict[int, np.ndarray]
    near: dict[int, dict[int, np.ndarray]]
    kept: list[np.ndarray]
    places: list[Place]
    solved: list[Solved] = field(default_factory=list)
    constant: float = 0.0
    feasible: bool = True
    repeats: Repeats = field(default_factory=Repeats)

    @staticmethod
    def of(graph: CostGraph) -> "Core":
        """The whole graph as a core."""
        near: dict[int, dict[int, np.ndarray]] = {v: {} for v in range(len(graph.unary))}
        for (a, b), table in graph.pairs.items():
            near[a][b], near[b][a] = table, table.T
        return Core(
            unary=dict(enumerate(graph.unary)),
            near=near,
            kept=[np.arange(len(u)) for u in graph.unary],
            places=graph.places,
        )

    @property
    def order(self) -> list[int]:
        """The variables that are left, in the order of the program."""
        return sorted(self.unary, key=self.places.__getitem__)

    def reduce(self, touched: list[int] | None = None) -> None:
        """Applies dominance and the reductions until none applies.

        Arguments:
          touched: the variables whose costs or states have changed; None for all.
        """
        pending = (
            sorted(self.unary, reverse=True) if touched is None else sorted(touched, reverse=True)
        )
        queued = set(pending)
        while pending:
            v = pending.pop()
            queued.discard(v)
            if v not in self.unary:
                continue
            tables = [self.near[v][w] for w in sorted(self.near[v])]
            alive = self.repeats.of(_useful, self.unary[v], *tables)
            if not alive.any():
                self.feasible = False
                return
            changed: set[int] = set() if alive.all() else self.keep(v, alive)
            if len(self.unary[v]) == 1 or len(self.near[v]) <= 2:
                changed |= self._solve_away(v)
            for w in sorted((changed - queued) & self.unary.keys(), reverse=True):
                queued.add(w)
                pending.append(w)

    def keep(self, v: int, alive: np.ndarray) -> set[int]:
        """Drops states of a variable.

        Arguments:
          v: the variable.
          alive: for each of its states, whether to keep it.

        Returns:
          The neighbours of the variable.
        """
        self.unary[v] = self.unary[v][alive]
        self.kept[v] = self.kept[v][alive]
        for w, table in self.near[v].items():
            smaller = np.ascontiguousarray(table[alive])
            self.near[v][w] = smaller
            self.near[w][v] = smaller.T
        return set(self.near[v])

    def _solve_away(self, v: int) -> set[int]:
        """Replaces a variable with one state, or with at most two neighbours, by costs of its
        neighbours; returns these."""
        unary, near = self.unary.pop(v), self.near.pop(v)
        scope = tuple(sorted(near)) if len(unary) > 1 else ()
        for w, table in near.items():
            del self.near[w][v]
            if len(unary) == 1:
                self.unary[w] = self.unary[w] + table[0]
        if not scope:
            self.constant += float(unary.min())
            best = np.array(unary.argmin())
        elif len(scope) == 1:
            (a,) = scope
            joined = unary[:, None] + near[a]
            best = joined.argmin(axis=0)
            self.unary[a] = self.unary[a] + joined.min(axis=0)
        else:
            a, b = scope
            table, best = self.repeats.of(_least_over, unary[:, None] + near[a], near[b])
            if b in self.near[a]:
                table = table + self.near[a][b]
            self.near[a][b] = table
            self.near[b][a] = table.T
        self.solved.append((v, scope, best, self.kept[v], tuple(self.kept[w] for w in scope)))
        return set(near)

    def extend(self, states: dict[int, int]) -> dict[int, int]:
        """A state for each variable of the core and of `solved`, in the numbering of the whole
        graph, from states of the core."""
        full = {v: int(self.kept[v][s]) for v, s in states.items()}
        for variable, scope, best, own, others in reversed(self.solved):
            at = tuple(
                int(np.searchsorted(kept, full[w])) for w, kept in zip(scope, others, strict=True)
            )
            full[variable] = int(own[int(best[at])])
        return full


def _useful(unary: np.ndarray, *tables: np.ndarray) -> np.ndarray:
    """Which states of a variable are neither forbidden nor dominated.

    Arguments:
      unary: the costs of the states.
      tables: for each neighbour, a matrix [state, neighbour's state].
    """
    alive = np.isfinite(unary)
    for table in tables:
        alive &= np.isfinite(table).any(axis=1)
    return undominated_states(unary, alive, *tables) if alive.sum() > 1 else alive


def undominated_states(unary: np.ndarray, alive: np.ndarray, *tables: np.ndarray) -> np.ndarray:
    """Which states of a variable are not dominated (Goldstein's criterion).

    State r dominates state s if u[r] - u[s] + sum over neighbours of max(T[r] - T[s]) <= `TIE`.
    A few columns of each table rule this out for nearly all pairs; only the other pairs are
    compared over all columns.

    Arguments:
      unary: the costs of the states.
      alive: which states are considered.
      tables: for each neighbour, a matrix [state, neighbour's state].

    Returns:
      For each state, whether it is in `alive` and not dominated by a state that stays.
    """
    index = np.flatnonzero(alive)
    own, near = unary[index], [table[index] for table in tables]
    # At most `FEW` columns of each table, evenly spaced.
    some = [np.ascontiguousarray(table[:, :: -(-table.shape[1] // FEW)]) for table in near]
    worst = _worst_of_all(own, some)  # [s, r], from below
    np.fill_diagonal(worst, np.inf)
    losers, winners = np.nonzero(worst <= TIE)
    keep = _worst(own, near, losers, winners) <= TIE
    losers, winners = losers[keep], winners[keep]
    out = alive.copy()
    gone: set[int] = set()
    beaten: dict[int, list[int]] = {}
    for s, r in zip(losers.tolist(), winners.tolist(), strict=True):
        beaten.setdefault(s, []).append(r)
    for s in sorted(beaten, reverse=True):
        # Of two states that dominate each other one has to stay: a dropped state drops no other.
        if any(r not in gone for r in beaten[s]):
            gone.add(s)
    out[index[sorted(gone)]] = False
    return out


def _least_over(left: np.ndarray, right: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The least of left[s, i] + right[s, j] over s, and the first s with this sum, as arrays [i,
    j].

    One s is added at a time: an array [s, i, j] would not fit the processor's cache.
    """
    least = np.full((left.shape[1], right.shape[1]), np.inf)
    best = np.zeros(least.shape, dtype=np.int32)
    total, less = np.empty_like(least), np.empty(least.shape, dtype=bool)
    for s in range(len(left)):
        np.add(left[s][:, None], right[s][None, :], out=total)
        np.less(total, least, out=less)
        np.copyto(least, total, where=less)
        np.copyto(best, s, where=less)
    return least, best


def _worst_of_all(own: np.ndarray, near: list[np.ndarray]) -> np.ndarray:
    """As `_worst`, for all pairs of states, as an array [s, r].

    It goes over whole arrays of pairs, which is faster than selecting pairs.
    """
    total = own[None, :] - own[:, None]
    step = max(1, CHUNK // total.size)
    with np.errstate(invalid="ignore"):
        for t in near:
            columns, most = np.ascontiguousarray(t.T), np.full(total.shape, -HUGE)
            for start in range(0, len(columns), step):
                some = columns[start : start + step]
                difference = some[:, None, :] - some[:, :, None]  # [column, s, r]
                np.fmax(most, np.fmax.reduce(difference, axis=0), out=most)
            total += most
    return total


def _worst(own: np.ndarray, near: list[np.ndarray], s: np.ndarray, r: np.ndarray) -> np.ndarray:
    """For each pair of states, the most by which `r` can cost more than `s`.

    Arguments:
      own: unary costs.
      near: for each neighbour, a matrix [state, column]. Columns that forbid both states are left
        out.
      s, r: the first and the second state of each pair.
    """
    total = own[r] - own[s]
    with np.errstate(invalid="ignore"):
        for t in near:
            step = max(1, CHUNK // t.shape[1])
            for start in range(0, len(total), step):
                some = slice(start, start + step)
                difference = t.take(r[some], axis=0) - t.take(s[some], axis=0)  # [pair, column]
                total[some] += np.fmax.reduce(difference, axis=1, initial=-HUGE)
    return total
