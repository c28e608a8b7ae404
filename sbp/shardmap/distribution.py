"""How the parts of a value on the devices make up the intended value, on each mesh axis.

A hand-written program does not state types, so a part has *readings*: every atom that it may have.
A bias broadcast along a batch is both B and S(0); zeros are B, S and P. A part without a reading is
unknown (a block in a ring, a slice by axis index); unknown is no fault. If no rule covers an
operation on the way, the part has a `doubt`.

A value may differ from the intended one by a power of the axis size n, its `excess`. The sum over
devices of the means of their shards is n times the mean (excess 1), and `pmean` divides by n. The
sum of n equal parts is n times too large, too. B with excess e is P(sum) with excess e + 1.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import jax.numpy as jnp
import numpy as np

from sbp import _jax
from sbp.errors import Severity
from sbp.trace.graph import Node
from sbp.types import Atom, B, Split, Unreduced

Kind = Literal[
    "nonlinear",
    "product",
    "ratio",
    "added",
    "scales",
    "mixed",
    "local",
    "blocks",
    "wrong-gather",
    "copies",
    "claimed-order",
    "doubled",
    "averaged",
    "pending",
    "monoid",
    "predicate",
    "missing",
    "rewritten",
    "not-returned",
    "own-block",
    "unmasked",
    "partial-as-split",
    "split-as-whole",
    "copies-as-split",
    "copies-as-partial",
    "wrong-dim",
    "order",
]
"""The kinds of faults; the module `words` has their text."""


Tag = Literal[
    "",
    "finite",
    "test",
    "shard-log",
    "log-sum-exp",
    "weight",
    "routed",
    "place",
    "looked-up",
    "owned",
]
"""Properties of a value that later operations depend on.

* `finite`, `test`: each part was checked for finite elements, or for another property;
* `shard-log`: the log of a shard's own sum of exponentials;
* `log-sum-exp`: a shard's own log-sum-exp;
* `weight`: the exponential of that;
* `routed`: unknown, because a capacity was compared with positions in a shard;
* `place`: unknown: a place counted from the beginning of the device's own shard, or a test of one;
* `looked-up`: unknown: elements of the device's own shard at such places;
* `owned`: P(sum) in which each element is zero on all devices but one, so that functions of it that
  are zero at zero add up, too.
"""


@dataclass(frozen=True, slots=True)
class Fault:
    """A fault of a value. It becomes a finding once an operation reduces the value, or a claim
    takes it for whole or split.

    Arguments:
      kind: the kind of fault.
      node: the operation that makes the faulty value.
      made: the operation that made its operand partial, or that first reduced it.
      operand: the position of the faulty operand, or of its dim.
      atoms: the types that the operand may have on the mesh axis.
      kernel: the kernel that the operation needs, where it works on each shard separately.
      partial: positions of the partial operands.
      candidates: the dim along which each shard chose its best elements, which contain the best
          elements of the whole value; None for other faults.
    """

    kind: Kind
    node: Node
    made: Node | None = None
    operand: int = 0
    atoms: tuple[Atom, ...] = ()
    kernel: str = ""
    partial: tuple[int, ...] = ()
    candidates: int | None = None


DoubtKind = Literal[
    "added-shards",
    "candidates",
    "carry",
    "claim",
    "collective",
    "copies-back",
    "counted",
    "counts-tests",
    "compares-means",
    "crossed",
    "divided-again",
    "each-shard",
    "gathered-inside-out",
    "groups",
    "joins-shards",
    "nested",
    "no-rule",
    "own-positions",
    "reordered",
    "replaced",
    "routed",
    "same-block",
    "weighs",
    "with-whole",
]
"""The kinds of doubts; the module `words` has their text."""


@dataclass(frozen=True, slots=True)
class Doubt:
    """Something that the checker cannot decide about an operation.

    A value carries its doubt; it is reported once an operation reduces the value or a region
    returns it.

    Arguments:
      node: the operation.
      kind: the kind of doubt.
      severity: a warning where the analysis ends or two readings differ, a note where the checker
          accepts a claim that it cannot check.
      lasting: whether the doubt is about the values of elements; False where it is about their
          order or selection.
      axis: the mesh axis.
      atoms: the types that the operand may have on it.
      number: the number that the operation divides by.
      result: the position of the region's result.
    """

    node: Node
    kind: DoubtKind
    severity: Severity = "note"
    lasting: bool = False
    axis: str = ""
    atoms: tuple[Atom, ...] = ()
    number: float = 0.0
    result: int = 0

    @property
    def key(self) -> tuple[Any, ...]:
        """Two doubts of one program are the same if their keys are equal."""
        return self.node.id, self.kind, self.axis, self.atoms, self.number, self.result


@dataclass(frozen=True, slots=True)
class Exchanged:
    """An exchange of a value between the devices.

    Arguments:
      node: the collective.
      sources: the split operands of the region that the value depended on before.
    """

    node: Node
    sources: frozenset[int]


@dataclass(frozen=True, slots=True)
class Position:
    """Integers that are linear in the index of their device and in their own index: `start`, plus
    an index on each mesh axis and along each dim, times a number, plus a term that is not linear.

    Arguments:
      axes: for each mesh axis, the number that the index of the device is multiplied by.
      dims: for each dim, the number that the local index along it is multiplied by.
      start: the constant term.
      term: the distribution of the other term on each mesh axis; None where there is none.
    """

    axes: tuple[int, ...]
    dims: tuple[int, ...]
    start: int = 0
    term: tuple[Distribution, ...] | None = None


@dataclass(frozen=True, slots=True)
class Distribution:
    """How the parts of a value on the devices of one mesh axis make it up.

    Arguments:
      atoms: its readings; empty when nothing is known.
      excess: the parts make up the intended value times n ** excess; None if it is not known.
      fault: its fault; a value with a fault has no readings.
      made: the operation that made it partial.
      reduced: the operation that first reduced it.
      cause: the fault that led to the excess.
      blocks: the operation that added the shards of a split value.
      share: whether it was divided by n, and so may be meant as one of n equal parts.
      doubt: the doubt about an operation that it depends on. An unknown value without a doubt
          depends on the position of its device on purpose.
      twice: the doubt about a second division by the number of devices, which is right if the
          value is summed over the devices.
      tag: a property that later operations depend on.
      stack: the dim along which an all-gather put the devices' parts side by side, and the
          distribution of these parts.
      copies: the exchange that sent equal copies, which came back whole.
      under: mesh axes outside of this one on the dim that it is split on; None when they are not
          known.
      rewritten: the fault of a value that was whole until each device replaced its own block; None
          for other values. It counts if the value is taken for whole.
      sources: the split operands of the region that it depends on; empty once it was gathered,
          reduced or exchanged.
      away: the exchange that brought it from other devices, which have not got it back; None for
          other values.
    """

    atoms: frozenset[Atom] = frozenset()
    excess: int | None = 0
    fault: Fault | None = None
    made: Node | None = None
    reduced: Node | None = None
    cause: Fault | None = None
    blocks: Node | None = None
    share: bool = False
    doubt: Doubt | None = None
    twice: Doubt | None = None
    tag: Tag = ""
    stack: tuple[int, Distribution] | None = None
    copies: Fault | None = None
    under: frozenset[int] | None = None
    rewritten: Fault | None = None
    sources: frozenset[int] = frozenset()
    away: Exchanged | None = None

    @property
    def unknown(self) -> bool:
        """Whether it has neither a reading nor a fault."""
        return not self.atoms and self.fault is None

    @property
    def partial(self) -> Unreduced | None:
        """The partial type, if every reading is partial; else None."""
        found = [a for a in self.atoms if isinstance(a, Unreduced)]
        return min(found, key=repr) if found and len(found) == len(self.atoms) else None

    @property
    def split(self) -> Split | None:
        """The split type, if every reading is split; else None."""
        found = [a for a in self.atoms if isinstance(a, Split)]
        return min(found, key=repr) if found and len(found) == len(self.atoms) else None

    @property
    def readings(self) -> tuple[Atom, ...]:
        """The readings in a fixed order."""
        return tuple(sorted(self.atoms, key=repr))


UNKNOWN = Distribution(excess=None)
WHOLE = Distribution(frozenset({B}))


def unsure(given: Sequence[Distribution]) -> Distribution:
    """The result of an operation with an unknown operand.

    It keeps a fault of another operand, with two exceptions: the value is meant for each shard, or
    it is a shift by a shard's own maximum, which the unknown operand compensates.
    """
    by_place = any(h.unknown and h.doubt is None for h in given)
    put_right = {h.made for h in given if h.unknown and h.made}
    for h in given:
        if (
            h.fault
            and not (by_place and h.fault.kind in ("local", "own-block"))
            and not (h.fault.kind == "mixed" and h.fault.made in put_right)
        ):
            return faulty(h.fault)
    made = next((h.made for h in given if h.unknown and h.made), None)
    return replace(
        UNKNOWN,
        made=made,
        doubt=None if by_place else next((h.doubt for h in given if h.doubt), None),
    )


def faulty(fault: Fault) -> Distribution:
    """A value with a fault."""
    return Distribution(excess=None, fault=fault)


@dataclass(frozen=True, slots=True)
class LocalValue:
    """A value of a body.

    Arguments:
      per_axis: its distribution on each mesh axis.
      const: the number that all its elements equal; None when they differ or are not known.
      literal: whether it depends on no input.
      lengths: for each dim that its elements are sums along, its local length and the mesh axes
          that split it.
      added: the operation that summed along these dims.
      position: its elements as functions of their place; None where they are not known to be
          linear.
      columns: the columns that it joins, if it may be the indices of a lookup.
      numbered: the operation that counted elements from zero on every device, if its elements
          depend on that count; None for other values.
    """

    per_axis: tuple[Distribution, ...]
    const: Any = None
    literal: bool = False
    lengths: tuple[tuple[int, tuple[int, ...]], ...] = ()
    added: Node | None = None
    position: Position | None = None
    columns: tuple[LocalValue, ...] = ()
    numbered: Node | None = None

    @property
    def count(self) -> int:
        """The number of local elements whose sum each element is."""
        return math.prod(length for length, _ in self.lengths)

    @property
    def zero(self) -> bool:
        """Whether it is zero everywhere, and so neutral in every sum, whatever the excess."""
        return self.const is not None and self.const == 0


def literal(value: Any, aval: Any, axes: int) -> LocalValue:
    """A constant of the program."""
    const = None
    if not _jax.is_extended(aval.dtype):
        array = np.asarray(value)
        if (
            array.size
            and array.size <= 2**20
            and (array.size == 1 or bool((array == array.flat[0]).all()))
        ):
            const = array.flat[0].item()
    return neutral(LocalValue((WHOLE,) * axes, const=const, literal=True), aval)


def neutral(value: LocalValue, aval: Any) -> LocalValue:
    """A value with all readings that its elements allow: equal elements may be split along any dim,
    and zeros are partial."""
    if value.const is None or isinstance(value.const, complex):
        return value
    more: set[Atom] = {Split(d) for d in range(len(aval.shape))}
    more |= {Unreduced(m) for m in _neutral_of(value.const, aval.dtype)}
    given = tuple(replace(h, atoms=h.atoms | more) if B in h.atoms else h for h in value.per_axis)
    return replace(value, per_axis=given)


def _neutral_of(const: Any, dtype: Any) -> Iterator[str]:
    if dtype == np.bool_:
        yield "and" if const else "or"
        return
    if const == 0:
        yield "sum"
    if jnp.issubdtype(dtype, jnp.floating):
        if const <= float(jnp.finfo(dtype).min):
            yield "max"
        if const >= float(jnp.finfo(dtype).max):
            yield "min"
    elif jnp.issubdtype(dtype, jnp.integer):
        if const == jnp.iinfo(dtype).min:
            yield "max"
        if const == jnp.iinfo(dtype).max:
            yield "min"
