"""Readings of local operations: the rows of an operation's signature for each combination of its
operands' types.

The equations of a body have local shapes, and the rows of `sbp.signatures` are for global shapes.
So a dim that a reading splits is made n times as long, in the operands and, one after the other, in
the results. Parameters stay, because rules read no sizes from them.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from typing import Any

import jax.numpy as jnp

from sbp import _jax
from sbp.shardmap.operators import reshapes
from sbp.signatures import rule_for, traits_of
from sbp.signatures.kernels.halo import reshape_groups
from sbp.signatures.rule import Op, Row
from sbp.trace.graph import Graph, Node
from sbp.types import Atom, B, Split, Unreduced

Atoms = tuple[Atom, ...]

WHOLE_DIM = frozenset({"candidates", "masked_gather", "pair", "prefix", "sorting_network"})
"""Kernels of operations that read a whole dim."""

_IDEMPOTENT = ("max", "min", "and", "or")


class Reader:
    """Looks up readings, and remembers them.

    Arguments:
      graph: the body that the nodes belong to, for their avals.
    """

    def __init__(self, graph: Graph) -> None:
        self.graph = graph
        self.known: dict[Any, tuple[Row, ...]] = {}

    def rows(self, node: Node, ins: Atoms, n: int) -> tuple[Row, ...]:
        """The rows with operands of these types that run the primitive itself on the shards."""
        key = node.id, ins, n
        if key not in self.known:
            local = (row for row in self._all_rows(node, ins, n) if row.kernel == "local")
            self.known[key] = tuple(
                dict.fromkeys((*local, *self._regrouped(node, ins), *self._rounded(node, ins)))
            )
        return self.known[key]

    def reorders(self, node: Node, ins: Atoms, n: int) -> bool:
        """Whether the results are split, with the elements of the shards in another order."""
        return (
            reshapes(node)
            and bool(self.rows(node, ins, n))
            and not any(r.kernel == "local" for r in self._all_rows(node, ins, n))
        )

    def whole_dim(self, node: Node, ins: Atoms, n: int) -> str:
        """The kernel of an operation on a split dim that reads the whole dim; empty for none."""
        kernels = {row.kernel for row in self._all_rows(node, ins, n)} & WHOLE_DIM
        return min(kernels, default="")

    def _all_rows(self, node: Node, ins: Atoms, n: int) -> Iterator[Row]:
        rule = rule_for(node.op)
        if rule is None or traits_of(node.op).generates:
            if all(a == B for a in ins):
                yield Row(ins, (B,) * len(node.outputs))
            return
        avals = [self.graph.aval(o) for o in node.inputs]
        outs = [self.graph.avals[o] for o in node.outputs]
        if any(
            isinstance(a, Split) and a.dim >= len(v.shape) for a, v in zip(ins, avals, strict=True)
        ):
            return
        op_ins = tuple(_scaled(v, a, n) for v, a in zip(avals, ins, strict=True))
        rank = max((len(v.shape) for v in outs), default=0)
        splits: list[Atom] = [Split(d) for d in range(rank)]
        if traits_of(node.op).elementwise:
            splits = [s for s in splits if _together(s, ins, avals, outs[0].shape)]
        if (
            "broadcast_dimensions" in node.params and ins[0] == B
        ):  # a dim that is kept is no copy of another: one global length on each device
            pairs = zip(node.params["broadcast_dimensions"], avals[0].shape, strict=True)
            kept = {Split(d) for d, length in pairs if length > 1}
            splits = [s for s in splits if s not in kept]
        for guess in (B, *splits):
            if any(isinstance(guess, Split) and guess.dim >= len(v.shape) for v in outs):
                continue
            op = Op(
                name=node.op,
                params=node.params,
                ins=op_ins,
                outs=tuple(_scaled(v, guess, n) for v in outs),
                axis_size=n,
            )
            for row in rule.rows(op):
                fits = all(
                    (atom == guess) if isinstance(guess, Split) else not isinstance(atom, Split)
                    for atom in row.outs
                )
                if fits and row.ins == ins:
                    yield row

    def _regrouped(self, node: Node, ins: Atoms) -> Iterator[Row]:
        """Rows of a reshape whose split dim does not lead its group: they reorder elements, which
        changes no sum."""
        if (
            not reshapes(node)
            or node.params.get("dimensions") is not None
            or not isinstance(ins[0], Split)
        ):
            return
        source, target = (
            self.graph.aval(node.inputs[0]).shape,
            self.graph.avals[node.outputs[0]].shape,
        )
        for left, right in reshape_groups(source, target) if 0 not in source else ():
            if ins[0].dim in left and (len(left) == 1 or len(right) == 1):
                yield from (Row(ins, (Split(d),)) for d in right if target[d] > 1)

    def _rounded(self, node: Node, ins: Atoms) -> Iterator[Row]:
        """Rows of a conversion that rounds the parts of a sum to fewer bits, as mixed precision
        does."""
        if (
            traits_of(node.op).carries == "rounded"
            and isinstance(ins[0], Unreduced)
            and ins[0].monoid == "sum"
        ):
            dtypes = self.graph.aval(node.inputs[0]).dtype, self.graph.avals[node.outputs[0]].dtype
            if all(jnp.issubdtype(d, jnp.inexact) for d in dtypes):
                yield Row(ins, ins)


def _together(split: Any, ins: Atoms, avals: Sequence[Any], out: Sequence[int]) -> bool:
    """Whether all operands with the full dim, rather than size 1 to broadcast, are split on it;
    rules cannot decide this by sizes."""
    whole = [len(v.shape) == len(out) and v.shape[split.dim] == out[split.dim] for v in avals]
    return any(whole) and all((a == split) == w for a, w in zip(ins, whole, strict=True))


def _scaled(aval: Any, atom: Atom, n: int) -> Any:
    if not isinstance(atom, Split):
        return aval
    shape = list(aval.shape)
    shape[atom.dim] *= n
    return _jax.empty_aval(shape, aval.dtype)


def ways(
    node: Node, readings: Sequence[frozenset[Atom]], uniform: Sequence[bool]
) -> Iterator[Atoms]:
    """The ways to read all operands together, in a fixed order.

    Where another operand is P(max), P(min) or P(sum), an operand that is B may be read like it: its
    equal parts have that maximum or minimum, and as P(sum) it has one more excess.
    """
    choices: list[list[Atom]] = []
    for i, own in enumerate(readings):
        others = set().union(*(r for k, r in enumerate(readings) if k != i))
        options: set[Atom] = set(own)
        if uniform[i] and traits_of(node.op).elementwise:
            options &= others | {B}
        if B in own:
            options |= {
                a for a in others if isinstance(a, Unreduced) and a.monoid in (*_IDEMPOTENT, "sum")
            }
        choices.append(sorted(options, key=repr))
    yield from itertools.product(*choices)
