"""What a theorem is, and whether Z3 proves it.

A theorem from premises that contradict each other proves anything, so premises are shown
satisfiable first; a limit that is hit is `unknown`, which is never `proved`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import z3

Outcome = Literal["proved", "refuted", "unknown", "vacuous"]

RLIMIT = 20_000_000


@dataclass(frozen=True, slots=True)
class Theorem:
    """What is assumed, and what follows from it."""

    premises: tuple[Any, ...]
    claim: Any


def decide(theorem: Theorem, rlimit: int = RLIMIT) -> Outcome:
    """Whether a theorem holds; `vacuous` when its premises cannot be met, `unknown` when a limit
    was hit."""
    solver = z3.Solver()
    solver.set(rlimit=rlimit)
    solver.add(*theorem.premises)
    possible = solver.check()
    if possible != z3.sat:
        return "vacuous" if possible == z3.unsat else "unknown"
    solver.add(z3.Not(theorem.claim))
    found = solver.check()
    return "proved" if found == z3.unsat else "refuted" if found == z3.sat else "unknown"


def counterexample(theorem: Theorem, rlimit: int = RLIMIT) -> str:
    """Values that a theorem's claim is wrong for; empty where it holds, or where none were found
    within the limit.

    >>> x = z3.Real("x")
    >>> counterexample(Theorem((x > 0, x <= 1), x < 1))
    'x = 1'
    """
    solver = z3.Solver()
    solver.set(rlimit=rlimit)
    solver.add(*theorem.premises, z3.Not(theorem.claim))
    if solver.check() != z3.sat:
        return ""
    model = solver.model()
    return ", ".join(sorted(f"{d.name()} = {model[d]}" for d in model.decls()))
