"""What the limits of the search for types are worth: each is made smaller and larger.

    python -m benchmarks.search_limits
    python -m benchmarks.search_limits --only STALE NEAR_LIMIT

The problems come from `benchmarks.steps`, from the everyday programs of
`benchmarks.planning_speed`, and from a scan on two mesh axes. Each line has the CPU time of the
search, as a ratio to the time under the usual limits. It names each problem for which the cost or
the gap of the bound changes. The limits are in `sbp/solve`; `docs/constants.md` explains each one.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any, NamedTuple
from unittest import mock

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import AbstractMesh

import sbp
from benchmarks.planning_speed import EVERYDAY
from benchmarks.steps.suite import SUITE
from benchmarks.steps.unseen import UNSEEN
from sbp.infer import choose
from sbp.solve import costgraph, messages, search
from sbp.solve.search import solve

Problem = tuple[Any, ...]
"""The arguments of `solve`."""


class Solved(NamedTuple):
    """The solution of a problem: modelled seconds, their gap, and CPU seconds of the search."""

    cost: float
    gap: float
    took: float


def defaults(function: Callable[..., Any], **values: Any) -> AbstractContextManager[Any]:
    """Other defaults of keyword parameters."""
    return mock.patch.dict(function.__kwdefaults__, values)


CHANGES: dict[str, list[tuple[str, AbstractContextManager[Any]]]] = {
    "STALE": [(f"{v:g}", mock.patch.object(search, "STALE", v)) for v in (0.0, 1e-2)],
    "SHARES": [("every other", mock.patch.object(search, "SHARES", search.SHARES[::2]))],
    "TABLE_LIMIT": [
        (f"{v:,}", defaults(search.Search.__init__, table_limit=v)) for v in (75_000, 1_200_000)
    ],
    "NEAR_LIMIT": [
        (f"{v:,}", defaults(search.Search.__init__, near_limit=v)) for v in (500_000, 8_000_000)
    ],
    "PATIENCE": [(f"{v}", defaults(messages.pass_messages, patience=v)) for v in (3, 10)],
    "FORBIDDEN": [(f"{v:g}", defaults(messages.pass_messages, forbidden=v)) for v in (1e2, 1e4)],
    "WINDOW": [(f"{v}", defaults(search.windows, width=v)) for v in (24, 96)],
    "PASSES": [(f"{v}", defaults(search.windows, passes=v)) for v in (1, 6)],
    "FEW": [(f"{v}", mock.patch.object(costgraph, "FEW", v)) for v in (4, 36)],
}


def problems() -> dict[str, Problem]:
    """The problems whose search takes longest, one for each program."""
    found: dict[str, Problem] = {}
    for name, make in (SUITE | UNSEEN).items():
        step = make()
        mesh = AbstractMesh(tuple(n for _, n in step.mesh), tuple(axis for axis, _ in step.mesh))
        found[name] = _problem(lambda s=step, m=mesh: s.planned(m, hardware=f"tpu-{s.chip}"))
    for name, (make, _) in EVERYDAY.items():
        f, arguments = make()
        found[name] = _problem(lambda f=f, arguments=arguments: f.plan(*arguments))
    found["scan"] = _problem(_scan)
    return found


def _scan() -> object:
    """A linear recurrence over a dim that two mesh axes split."""

    def run(a: jax.Array, b: jax.Array) -> Any:
        return lax.associative_scan(lambda p, q: (p[0] * q[0], q[0] * p[1] + q[1]), (a, b))

    types, mesh = ("x:S(0) y:S(0)",) * 2, AbstractMesh((2, 4), ("x", "y"))
    f = sbp.jit(run, mesh, types, types, hardware="tpu-v5e")
    return f.plan(*[jax.ShapeDtypeStruct((2**16, 4), jnp.float32)] * 2)


def _problem(plan: Callable[[], object]) -> Problem:
    """The first problem of a plan, in which repeated conversions are free."""
    with mock.patch.object(choose, "solve", wraps=solve) as solving:
        plan()
    return solving.call_args_list[0].args


def solved(problem: Problem) -> Solved:
    """Searches the states of a problem."""
    start = time.process_time()
    found = solve(*problem)
    assert found is not None
    gap = 1 - found.lower_bound / found.cost if found.cost else 0.0
    return Solved(found.cost, gap, time.process_time() - start)


def differences(was: dict[str, Solved], now: dict[str, Solved]) -> Iterator[str]:
    """The problems with another cost or another gap."""
    for name, one in now.items():
        rise, old = one.cost / was[name].cost - 1, was[name].gap
        if abs(rise) > 1e-9 or abs(one.gap - old) > 1e-6:
            yield f"{name} {rise:+.3%}, gap {old:.3%} -> {one.gap:.3%}"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", nargs="*", choices=list(CHANGES), default=list(CHANGES))
    arguments = parser.parse_args()
    known = problems()
    was = {name: solved(problem) for name, problem in known.items()}
    for limit in arguments.only:
        for value, changed in CHANGES[limit]:
            with changed:
                now = {name: solved(problem) for name, problem in known.items()}
            ratio = sum(s.took for s in now.values()) / sum(s.took for s in was.values())
            found = "; ".join(differences(was, now)) or "no plan and no gap differs"
            print(f"{limit} {value}: {ratio:.2f} of the time; {found}", flush=True)


if __name__ == "__main__":
    main()
