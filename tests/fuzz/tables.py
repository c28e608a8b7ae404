"""All operations, and those for the bodies of functions."""

from tests.fuzz import ops_contract, ops_control, ops_elementwise, ops_reduce, ops_shape
from tests.fuzz.draw import Op

ALL: tuple[Op, ...] = tuple(
    op
    for op in (
        *ops_elementwise.OPS,
        *ops_reduce.OPS,
        *ops_shape.OPS,
        *ops_shape.INDEXING,
        *ops_contract.OPS,
        *ops_reduce.RANDOM,
        *ops_control.OPS,
    )
    if op.guard
)
"""The tables, one after the other: a seed makes the same program while their order is the same."""

INNER: tuple[Op, ...] = tuple(
    op for op in ALL if op.name not in ("eigenvalues", "singular_values", "random_gamma")
)
"""Without the slow ones: a body may be compiled many times."""

BY_NAME: dict[str, Op] = {op.name: op for op in ALL}
assert len(BY_NAME) == len(ALL), "two operations of one name"
