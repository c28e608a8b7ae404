"""The excess of results: a power of the axis size by which a value is off multiplies, adds up and
divides as the value does."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Literal

from sbp.signatures.rule import names

ALIKE = frozenset(
    names("""
    abs add add_any broadcast_in_dim concatenate conj convert_element_type copy cummax cummin cumsum
    dynamic_slice dynamic_update_slice gather imag max min neg optimization_barrier pad real
    reduce_max reduce_min reduce_precision reduce_sum reshape rev scatter scatter-add scatter-sub
    select_n slice sort split squeeze stack stop_gradient sub tie tile top_k transpose unstack
""")
)
"""Homogeneous of degree 1 in all their operands together: these have one excess."""

INDICES = {
    "dynamic_slice": 1,
    "dynamic_update_slice": 2,
}
"""From which operand on all are indices."""

_INDEX = {"gather": 1, "scatter": 1, "scatter-add": 1, "scatter-sub": 1, "select_n": 0}
"""The one operand that is an index or a predicate."""

SCALE_FREE = frozenset(names("is_finite sign"))
"""Of a multiple of a value these say the same."""

COMPARES = frozenset(names("eq ge gt le lt ne"))
"""Of equal multiples of two values these say the same."""

PRODUCTS = frozenset(names("conv_general_dilated dot_general mul ragged_dot ragged_dot_general"))
"""Homogeneous of degree 1 in each of two operands."""

Clash = Literal["clash"]


def is_index(op: str, operand: int) -> bool:
    """Whether an operand only says where: it has no excess."""
    return operand >= INDICES.get(op, operand + 1) or _INDEX.get(op) == operand


def excess_of(
    op: str, params: dict[str, Any], found: Sequence[int | None], free: Sequence[bool]
) -> int | Clash | None:
    """The excess of an operation's results.

    Arguments:
      op: the primitive's name.
      params: its parameters.
      found: excess of each operand, as it is read.
      free: operands of any excess: zeros, and constants in a sum.

    Returns:
      None when it is not known; "clash" when operands that have one excess have two, or an excess
      meets a function that shows it.

    >>> excess_of("mul", {}, [1, 1], [False, False])
    2
    >>> excess_of("add", {}, [1, 0], [False, False])
    'clash'
    """
    numbers = [
        e for i, (e, f) in enumerate(zip(found, free, strict=True)) if not f and not is_index(op, i)
    ]
    if op in ALIKE:
        if None in numbers:
            return None
        return "clash" if len(set(numbers)) > 1 else next(iter(numbers), 0)
    if op in SCALE_FREE or (op in COMPARES and None not in numbers and len(set(numbers)) == 1):
        return 0
    counted = [0 if f else e for e, f in zip(found, free, strict=True)]
    if op in PRODUCTS:
        return _total(counted[:2])
    if op == "div":
        return _total([counted[0], None if counted[1] is None else -counted[1]])
    if op in ("integer_pow", "square"):
        return None if counted[0] is None else counted[0] * params.get("y", 2)
    if op == "sqrt" and counted[0] is not None and counted[0] % 2 == 0:
        return counted[0] // 2
    if any(numbers):
        return None if None in numbers else "clash"
    return 0


def _total(terms: Sequence[int | None]) -> int | None:
    return None if None in terms else sum(t for t in terms if t is not None)


def close(a: float, b: float) -> bool:
    """Whether two counts are the same, one of them rounded to its dtype."""
    return math.isclose(a, b, rel_tol=1e-6)
