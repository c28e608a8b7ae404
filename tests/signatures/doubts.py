"""Gaps between the registry and the samples: rules, rows and kernels that no sample shows."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from samples import equations, primitives

from sbp.signatures import Op, Row, known_kernels, rule_for
from sbp.signatures.rule import ROUNDED_PARTS
from sbp.types import B

SIZES = (2, 3, 4)
"""Sizes of the mesh axes on which samples are tried."""


ONE_MATRIX = frozenset({"cholesky_update"})
"""Primitives of a family that splits batch dims, for which JAX has no batch dims."""


def without_samples(known: Iterable[str], samples: Mapping[str, list[Any]]) -> list[str]:
    """Primitives with a rule and no sample of an equation."""
    return [name for name in known if not samples.get(name)]


def without_rows(samples: Mapping[str, list[Any]]) -> list[str]:
    """Primitives for which no sample shows a row other than all-B, though the rule gives no reason
    for that."""
    found = []
    for name in sorted((samples.keys() & primitives().keys()) - ONE_MATRIX):
        rule = rule_for(name)
        if (
            rule is not None
            and not rule.reason
            and not any(set((*row.ins, *row.outs)) - {B} for row in _rows(name, samples[name]))
        ):
            found.append(name)
    return found


def unused_kernels(samples: Mapping[str, list[Any]]) -> list[str]:
    """Kernels that no row on a sample names.

    `rounded_parts` is left out: the user asks for its rows, which hold to rounding, and
    tests/run/test_sums_after_casts.py tries them.
    """
    used = {
        row.kernel
        for name in samples.keys() & primitives().keys()
        for row in _rows(name, samples[name])
    }
    used.add(ROUNDED_PARTS.name)
    return [kernel.name for kernel in known_kernels() if kernel.name not in used]


def _rows(name: str, samples: list[Any]) -> Iterator[Row]:
    rule = rule_for(name)
    for eqn in equations(name, samples):
        op = eqn.op
        for n in SIZES:
            yield from () if rule is None else rule.rows(Op(name, op.params, op.ins, op.outs, n))
