"""Which cases a run takes: all of them in `make laws`, a seeded choice in `make test`."""

from __future__ import annotations

import os
from collections.abc import Iterable
from typing import TypeVar

import numpy as np

Case = TypeVar("Case")

EXHAUSTIVE = bool(os.environ.get("SBP_EXHAUSTIVE"))
"""Whether this run takes all cases (`make laws`, `make fuzz`)."""


def sliced(cases: Iterable[Case], share: float, *, seed: int = 0) -> list[Case]:
    """All cases where `EXHAUSTIVE` is set, else a seeded choice of them, in their order.

    Arguments:
      cases: in a fixed order.
      share: of the cases to take, in (0, 1]; at least one is taken.
      seed: of the choice.
    """
    every = list(cases)
    if EXHAUSTIVE:
        return every
    count = max(1, round(share * len(every)))
    chosen = np.random.default_rng(seed).choice(len(every), count, replace=False)
    return [every[k] for k in sorted(chosen)]
