"""The plans of one function, by call signature."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, replace
from typing import Any

from sbp.api.plan import Plan
from sbp.errors import warn

MOST_PLANS = 256
"""Plans of one function that are kept. Beyond that number the plan that was not used for longest is
dropped, with one `many-plans` warning."""


@dataclass(slots=True)
class _Entry:
    """A plan, with the number of its last use."""

    plan: Plan
    used: int


class PlanCache:
    """The plans of one function that were used last.

    Arguments:
      name: the function's name, for the warning.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._plans: dict[Any, _Entry] = {}
        self._quick: dict[Any, _Entry] = {}
        self._uses = itertools.count()
        self._warned = False

    def __len__(self) -> int:
        return len(self._plans)

    def get(self, key: Any) -> Plan | None:
        """The plan of a call signature's key."""
        return self._used(self._plans.get(key))

    def key_for(self, key: Any) -> Any:
        """The call's own key, or the key of an existing plan that takes the arguments as they are
        placed already."""
        if key in self._plans:
            return key
        return next((k for k, e in self._plans.items() if _serves(k, e.plan, key)), key)

    def quick(self, key: Any) -> Plan | None:
        """The plan of a key from `quick_key`."""
        return self._used(self._quick.get(key))

    def add(self, key: Any, plan: Plan) -> None:
        """Keeps a plan. The plan that was not used for longest may be dropped."""
        while len(self._plans) >= MOST_PLANS:
            oldest = min(self._plans, key=lambda k: self._plans[k].used)
            dropped = self._plans.pop(oldest)
            self._quick = {k: e for k, e in self._quick.items() if e is not dropped}
            if not self._warned:
                self._warned = True
                warn(
                    "many-plans",
                    f"{self._name} was called with more than {MOST_PLANS} signatures",
                    "and drops the plan that was not used for longest; pad shapes to fewer sizes,"
                    " or pass what changes as an array",
                )
        self._plans[key] = _Entry(plan, next(self._uses))

    def add_quick(self, quick: Any, key: Any) -> None:
        """Lets a second key lead to the plan of a call signature's key."""
        if len(self._quick) >= MOST_PLANS:
            self._quick.clear()  # they come back with the next calls
        self._quick[quick] = self._plans[key]

    def clear(self) -> None:
        """Drops all plans with their compiled programs."""
        self._plans.clear()
        self._quick.clear()

    def _used(self, entry: _Entry | None) -> Plan | None:
        if entry is None:
            return None
        entry.used = next(self._uses)
        return entry.plan


def _serves(key: Any, plan: Plan, call: Any) -> bool:
    """Whether a call is the one that a plan was made for, except that free arguments are on the
    mesh now: their pinned types are the types that the plan chose."""
    (mesh, mine), (its_mesh, its) = key, call
    same = mesh == its_mesh and (*mine[:4], *mine[5:]) == (*its[:4], *its[5:])
    return same and all(
        a == b or (a.type is None and b == replace(a, type=t))
        for a, b, t in zip(mine[4], its[4], plan.program.input_types, strict=True)
    )
