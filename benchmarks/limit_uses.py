"""A pytest plug-in that measures how much of their limits checks and explanations use.

    python -m pytest -p benchmarks.limit_uses --gate tests/shardmap tests/handwritten
    python -m pytest -p benchmarks.limit_uses --gate tests/explain tests/gallery tests/sizes

At the end, it prints for each limit its value, how often the tests came to it, how often they would
have used more, and otherwise the most that they used. `docs/constants.md` explains each limit. Run
it in one process, without `-n`.
"""

# It measures inside of the functions that have the limits.
# pyright: reportPrivateUsage=false
from __future__ import annotations

import itertools
import math
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
import z3

from sbp.api import slips
from sbp.explain import change, faults, helps, relaxations, why
from sbp.handwritten import check, emulation, measured, one_device, written_sizes
from sbp.plan import fit, ir
from sbp.signatures import custom
from sbp.signatures.laws import proofs
from sbp.sizes import claims, scope

USES: dict[str, Counter[float]] = defaultdict(Counter)
"""For each limit, how often the tests used how much of it."""

LIMITS: dict[str, Any] = {
    "handwritten.one_device.NUMBERS": one_device.NUMBERS,
    "handwritten.one_device.SLICES": one_device.SLICES,
    "handwritten.check.TRIED": check.TRIED,
    "handwritten.measured._POWERS": max(measured._POWERS),
    "handwritten.emulation.TOLERANCE, values taken for equal": emulation.TOLERANCE,
    "handwritten.emulation.TOLERANCE, 1 / values that differ": 1 / emulation.TOLERANCE,
    "handwritten.emulation.CHECKED_ELEMENTS": emulation.CHECKED_ELEMENTS,
    "handwritten.emulation.CHECKED_WORK": emulation.CHECKED_WORK,
    "handwritten.written_sizes.DEPTH": written_sizes.DEPTH,
    "sizes.scope.REGIONS": scope.REGIONS,
    "signatures.laws.proofs.RLIMIT": proofs.RLIMIT,
    "signatures.custom.DRAWS": custom.DRAWS,
    "explain.DiagnosisLimits.plans": change.DiagnosisLimits().plans,
    "explain.DiagnosisLimits.faults": change.DiagnosisLimits().faults,
    "explain.DiagnosisLimits.pins": change.DiagnosisLimits().pins,
    "explain.why.WhyLimits.plans": why.WhyLimits().plans,
    "explain.relaxations.SOLUTIONS": relaxations.SOLUTIONS,
    "plan.ir.ORDERED_TYPES": ir.ORDERED_TYPES,
    "plan.fit.PRICES, from the lowest": len(fit.PRICES),
}


def wrap(owners: Iterable[Any], name: str, around: Callable[..., Any]) -> None:
    """Puts a function around one of the package, in each module that has its name."""
    for owner in owners:
        before = getattr(owner, name)

        def call(*args: Any, before: Callable[..., Any] = before, **kwargs: Any) -> Any:
            return around(before, *args, **kwargs)

        setattr(owner, name, call)


def use(limit: str, amount: float) -> None:
    assert limit in LIMITS, limit
    USES[limit][amount] += 1


# ---- hand-written code --------------------------------------------------------------------------


def attempts(before: Any, written: Any, chained: bool) -> Iterator[Any]:
    yield from before(written, chained)
    use("handwritten.one_device.NUMBERS", len(written.numbers))


def few_slices(before: Any, x: Any) -> bool:
    if x.ndim and jnp.issubdtype(x.dtype, jnp.floating):
        use("handwritten.one_device.SLICES", x.shape[0])
    return before(x)


def repairs(before: Any, self: Any, finding: Any) -> Iterator[Any]:
    seen = itertools.count()
    for one in before(self, finding):
        next(seen)
        yield one
    use("handwritten.check.TRIED", next(seen))


def readings(before: Any, *args: Any) -> Any:
    found = before(*args)
    for reading in found:
        use("handwritten.measured._POWERS", abs(reading.power))
    return found


def differ(before: Any, got: Any, want: Any) -> bool:
    found = before(got, want)
    if jnp.issubdtype(want.dtype, np.inexact) and want.size:
        both = np.isfinite(want) & np.isfinite(got)
        scale = max(1e-6, float(np.max(np.abs(want), where=both, initial=0.0)))
        apart = np.where(both, got, 0) - np.where(both, want, 0)
        most = float(np.max(np.abs(apart), initial=0.0)) / scale
        if found and most:
            use("handwritten.emulation.TOLERANCE, 1 / values that differ", 1 / most)
        if not found:
            use("handwritten.emulation.TOLERANCE, values taken for equal", most)
    return found


def too_large(before: Any, graph: Any) -> str:
    largest, work = emulation._sizes(graph)
    use("handwritten.emulation.CHECKED_ELEMENTS", largest)
    use("handwritten.emulation.CHECKED_WORK", work)
    return before(graph)


DEPTHS: list[int] = []


def copied(before: Any, self: Any, name: str, value: Any, used: Any, depth: int) -> Any:
    DEPTHS.append(depth)
    try:
        return before(self, name, value, used, depth)
    finally:
        DEPTHS.pop()


def number(before: Any, self: Any, name: str, value: Any, **source: bool) -> Any:
    if self.found.axis.alone(value, **source) is not None:
        use("handwritten.written_sizes.DEPTH", written_sizes.DEPTH - DEPTHS[-1])
    return before(self, name, value, **source)


# ---- signatures, sizes, explanations, plans ------------------------------------------------------


def explore(before: Any, *args: Any) -> Any:
    found = before(*args)
    use("sizes.scope.REGIONS", len(found.cases))
    return found


def decide(before: Any, theorem: Any, **options: Any) -> Any:
    solver = z3.Solver()
    solver.add(*theorem.premises, z3.Not(theorem.claim))
    solver.set(rlimit=proofs.RLIMIT)
    solver.check()  # the first check of a solver, so its count is that of this theorem
    counts = dict(iter(solver.statistics()))
    use("signatures.laws.proofs.RLIMIT", counts.get("rlimit count", 0))
    return before(theorem, **options)


def refute_row(before: Any, self: Any, oracle: Any, row: Any, n: int, seed: int) -> None:
    try:
        before(self, oracle, row, n, seed)
    except Exception:
        use("signatures.custom.DRAWS", seed + 1)
        raise


def tried(before: Any, *args: Any, plan: Any = None, **kwargs: Any) -> Any:
    made = itertools.count(1)
    first: list[int] = []

    def counted(changed: Any) -> Any:
        at, program = next(made), (plan or change.best_program)(changed)
        if program is not None and not first:
            first.append(at)
        return program

    found = before(*args, plan=counted, **kwargs)
    if first:
        use("explain.DiagnosisLimits.plans", first[0])
    return found


def diagnosed(before: Any, *args: Any, **kwargs: Any) -> Any:
    found = before(*args, **kwargs)
    use("explain.DiagnosisLimits.faults", len(found.groups))
    return found


def conflicting(before: Any, *args: Any) -> Any:
    found = before(*args)
    use("explain.DiagnosisLimits.pins", len(found[0]))
    return found


def answer(before: Any, self: Any, *args: Any) -> Any:
    start = self.left
    found = before(self, *args)
    use("explain.why.WhyLimits.plans", start - self.left)
    return found


def dearest(before: Any, request: Any, program: Any, sites: Any) -> Any:
    count = sum(1 for s in relaxations.pin_sites(request) if s.source == "annotation" and s.span)
    use("explain.relaxations.SOLUTIONS", count)
    return before(request, program, sites)


def tree(before: Any, self: Any, value: int, types: Any) -> Any:
    use("plan.ir.ORDERED_TYPES", len({*types} - {self.typing.values[value]}))
    return before(self, value, types)


def at_price(before: Any, self: Any, price: float, *args: Any, **kwargs: Any) -> Any:
    if price in fit.PRICES:
        use("plan.fit.PRICES, from the lowest", fit.PRICES.index(price) + 1)
    return before(self, price, *args, **kwargs)


def pytest_configure(config: pytest.Config) -> None:
    wrap((one_device,), "_attempts", attempts)
    wrap((one_device,), "_has_few_slices", few_slices)
    wrap((check.Repairs,), "of", repairs)
    wrap((measured,), "readings", readings)
    wrap((emulation, measured, one_device), "differ", differ)
    wrap((emulation, one_device), "too_large", too_large)
    wrap((written_sizes._Copier,), "value", copied)
    wrap((written_sizes._Copier,), "number", number)
    wrap((claims,), "explore", explore)
    wrap((proofs,), "decide", decide)
    wrap((custom.Custom,), "_refute_row", refute_row)
    wrap((helps, relaxations, faults, slips), "tried", tried)
    wrap((faults,), "_diagnosis", diagnosed)
    wrap((relaxations,), "_conflicting_pins", conflicting)
    wrap((why._Inquiry,), "answer", answer)
    wrap((relaxations,), "_dearest_first", dearest)
    wrap((ir._Lowering,), "tree", tree)
    wrap((fit.PlanSearch,), "at_price", at_price)


def pytest_terminal_summary(terminalreporter: Any) -> None:
    write = terminalreporter.write_line
    write(f"{'limit':66s} {'value':>12s} {'uses':>9s} {'beyond':>7s} {'most within':>12s}")
    for name, value in LIMITS.items():
        within = {amount: n for amount, n in USES[name].items() if amount <= value}
        uses, beyond = USES[name].total(), USES[name].total() - sum(within.values())
        if uses:
            most = max(within, default=math.nan)
            write(f"{name:66s} {value:12.4g} {uses:9,d} {beyond:7,d} {most:12.4g}")
