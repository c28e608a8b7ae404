"""The excess of an operation's results, from the excess of its operands: products add it, quotients
subtract it, and the terms of a sum must agree."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Literal

from sbp.signatures import traits_of

Clash = Literal["clash"]


def excess_of(
    op: str, params: dict[str, Any], found: Sequence[int | None], free: Sequence[bool]
) -> int | Clash | None:
    """The excess of an operation's results.

    Arguments:
      op: the primitive's name.
      params: its parameters.
      found: the excess of each operand under the chosen reading.
      free: whether an operand fits any excess: zeros, and constants in a sum.

    Returns:
      None when it is not known; "clash" when operands that need one excess differ, or an operand
      with an excess enters a function that does not scale with it.

    >>> excess_of("mul", {}, [1, 1], [False, False])
    2
    >>> excess_of("add", {}, [1, 0], [False, False])
    'clash'
    """
    traits = traits_of(op)
    indices = traits.indices if traits.scales == "together" else ()
    numbers = [
        e for i, (e, f) in enumerate(zip(found, free, strict=True)) if not f and i not in indices
    ]
    counted = [0 if f else e for e, f in zip(found, free, strict=True)]
    match traits.scales:
        case "together":
            if None in numbers:
                return None
            return "clash" if len(set(numbers)) > 1 else next(iter(numbers), 0)
        case "never":
            return 0
        case "compared" if None not in numbers and len(set(numbers)) == 1:
            return 0
        case "each":
            return _total(counted[:2])
        case "ratio":
            return _total([counted[0], None if counted[1] is None else -counted[1]])
        case "power":
            return None if counted[0] is None else counted[0] * params.get("y", 2)
        case "root" if counted[0] is not None and counted[0] % 2 == 0:
            return counted[0] // 2
        case _ if any(numbers):
            return None if None in numbers else "clash"
        case _:
            return 0


def _total(terms: Sequence[int | None]) -> int | None:
    return None if None in terms else sum(t for t in terms if t is not None)


def close(a: float, b: float) -> bool:
    """Whether two counts are the same, one of them rounded to its dtype."""
    return math.isclose(a, b, rel_tol=1e-6)
