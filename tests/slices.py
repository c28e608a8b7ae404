"""Which cases a test has: a seeded choice, and more of them in `make laws`.

The environment variable `SBP_EXHAUSTIVE` says which: "1" in `make laws`, unset elsewhere, and "all"
in `make laws EXHAUSTIVE=all`, which takes every case and hours. A test that takes a slice has the
mark `laws`.

`make laws` leaves out some cases of these, and each of them says which: `tests/run/test_boxing.py`
(`test_two_axes`, `test_three_axes`, `test_paths_are_cheapest`), `tests/moe/test_placement.py`
(`test_three_steps_equal_one_device`, `test_two_steps_equal_one_device`),
`tests/moe/test_experts.py` (`test_training_on_meshes_equals_one_device`) and
`tests/moe/test_decode.py` (beams on meshes and of other models).
"""

import os
from collections.abc import Iterable
from typing import TypeVar

import numpy as np

Case = TypeVar("Case")

SCOPE = os.environ.get("SBP_EXHAUSTIVE", "")
assert SCOPE in ("", "1", "all"), f"SBP_EXHAUSTIVE is {SCOPE!r}: set it to 1 or all, or unset it"
EXHAUSTIVE = bool(SCOPE)
"""Whether this run is `make laws`."""


def sliced(cases: Iterable[Case], share: float, *, laws: float = 1.0, seed: int = 0) -> list[Case]:
    """The cases that this run takes, in their order.

    Arguments:
      cases: in a fixed order.
      share: the part of them that other runs take, in (0, 1]; at least one case.
      laws: the part that `make laws` takes, in (0, 1]. Below 1 where all of them take many minutes.
      seed: of the choice.
    """
    every = list(cases)
    taken = {"": share, "1": laws, "all": 1.0}[SCOPE]
    count = max(1, round(min(1.0, taken) * len(every)))
    chosen = np.random.default_rng(seed).choice(len(every), count, replace=False)
    return [every[k] for k in sorted(chosen)]
