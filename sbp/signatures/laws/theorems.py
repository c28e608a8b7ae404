"""Theorems, and whether Z3 proves them.

Premises that contradict each other would prove anything, so `decide` first shows that they can be
met. A proof that reaches the limit is `unknown`, not `proved`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import z3

Outcome = Literal["proved", "refuted", "unknown", "vacuous"]
"""What Z3 finds: `vacuous` if the premises contradict each other, `unknown` if it reached the
limit."""

RLIMIT = 20_000_000
"""The default limit for one proof, in Z3's resource units, which do not depend on the machine. A
proof that reaches it is `unknown`."""


@dataclass(frozen=True, slots=True)
class Theorem:
    """The claim that follows from premises.

    Arguments:
      premises: what is assumed, as terms of Z3.
      claim: what follows.
    """

    premises: tuple[Any, ...]
    claim: Any


def decide(theorem: Theorem, rlimit: int = RLIMIT) -> Outcome:
    """Whether a theorem holds; `vacuous` if its premises cannot be met, `unknown` if Z3 reached the
    limit."""
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
    """Values for which a theorem's claim is wrong; empty if it holds, or if Z3 found none within
    the limit.

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
