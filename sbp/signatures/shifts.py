"""Shifted arrays, and slices of arrays that begin earlier or end later.

A *lifted* value has some elements before and after those of the value itself; nobody reads them.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from jax import lax

from sbp.signatures.clusters import Wiring
from sbp.trace.graph import Node, Operand, constant
from sbp.trace.joins import Joined, join_node
from sbp.trace.parts import is_zero
from sbp.trace.slices import Cut, cuts_of, shape_of, slicing, whole


def resized(aval: Any, dim: int, size: int) -> Any:
    """An aval with another size of one dim."""
    return aval.update(shape=(*aval.shape[:dim], size, *aval.shape[dim + 1 :]))


@dataclass(frozen=True, slots=True)
class Strided:
    """A value as every `stride`-th element of another one, along a dim.

    Arguments:
      source: the other value.
      dim: the dim.
      cuts: where the source is cut, for each dim.
    """

    source: Operand
    dim: int
    cuts: tuple[Cut, ...]

    @property
    def start(self) -> int:
        """The first element."""
        return self.cuts[self.dim][0]

    @property
    def stride(self) -> int:
        """The distance of two elements in the source."""
        return self.cuts[self.dim][2]

    @property
    def size(self) -> int:
        """The number of elements."""
        return shape_of(self.cuts)[self.dim]

    def cuts_one_dim(self, wiring: Wiring) -> bool:
        """Whether it has all elements along the other dims."""
        shape = wiring.graph.aval(self.source).shape
        return self.beside == whole(shape[: self.dim] + shape[self.dim + 1 :])

    @property
    def beside(self) -> tuple[Cut, ...]:
        """Where the slice cuts other dims."""
        return tuple(cut for d, cut in enumerate(self.cuts) if d != self.dim)

    @property
    def is_shifted(self) -> bool:
        """Whether its elements are further on in the source than in the value."""
        return self.start >= self.stride

    def moved(self, first: int, size: int) -> tuple[Cut, ...]:
        """The cuts of a slice that begins elsewhere along the dim.

        Arguments:
          first: the first element.
          size: the number of elements.
        """
        cut = (first, first + (size - 1) * self.stride + 1, self.stride)
        return (*self.cuts[: self.dim], cut, *self.cuts[self.dim + 1 :])


def strided(wiring: Wiring, value: Operand, dim: int) -> Strided | None:
    """The slice that a value is; None for values that are not cut out of others."""
    node = wiring.maker(value)
    if not isinstance(value, int) or node is None or node.op not in ("slice", "split"):
        return None
    cuts = cuts_of(node, value, wiring.graph.aval(node.inputs[0]).shape)
    return None if cuts is None else Strided(node.inputs[0], dim, cuts)


@dataclass(frozen=True, slots=True)
class Interior:
    """A node that pads along one dim.

    Arguments:
      low: padding before the first element.
      interior: padding between two elements.
    """

    low: int
    interior: int


def padded(node: Node, dim: int) -> Interior | None:
    """How a node pads along a dim; None for nodes that do something else, or pad other dims."""
    if node.op != "pad":
        return None
    config = [tuple(map(int, c)) for c in node.params["padding_config"]]
    if any(c != (0, 0, 0) for d, c in enumerate(config) if d != dim):
        return None
    return Interior(config[dim][0], config[dim][2])


def padding(aval: Any, dim: int, low: int, interior: int, out: int) -> tuple[Any, ...]:
    """The parameter of a pad along one dim.

    Arguments:
      aval: the operand.
      dim: the dim.
      low: padding before the first element; negative to cut off.
      interior: padding between elements.
      out: number of elements of the result.
    """
    high = out - low - (aval.shape[dim] - 1) * (interior + 1) - 1
    rank = len(aval.shape)
    return tuple((low, high, interior) if d == dim else (0, 0, 0) for d in range(rank))


class Maker:
    """Makes new nodes of a graph, each before a node that it has already.

    Arguments:
      wiring: the graph as it was; new values are entered in its table of avals.
      ids: unused numbers of nodes.
    """

    def __init__(self, wiring: Wiring, ids: Iterator[int]) -> None:
        self.wiring, self.graph, self.ids = wiring, wiring.graph, ids
        self.before: dict[int, list[Node]] = defaultdict(list)
        self._values = itertools.count(max(self.graph.avals, default=0) + 1)
        self._shifted: dict[tuple[Operand, int, int, int], tuple[int, Operand]] = {}

    def value(self, aval: Any) -> int:
        """A new value."""
        value = next(self._values)
        self.graph.avals[value] = aval
        return value

    def emit(self, at: int, like: Node, aval: Any, **changes: Any) -> int:
        """The result of a new node, which is like another one but for some changes.

        Arguments:
          at: the position of the node before which it is.
          like: the node that it is like: at the same line of the user's.
          aval: shape and dtype of the result.
          changes: what differs.
        """
        out = self.value(aval)
        node = dataclasses.replace(like, id=next(self.ids), outputs=(out,), regions=(), **changes)
        self.before[at].append(node)
        return out

    def pad(
        self, at: int, like: Node, x: Operand, fill: Operand, dim: int, shape: tuple[int, int, int]
    ) -> int:
        """A value with padding along a dim.

        Arguments:
          at: as in `emit`.
          like: as in `emit`.
          x: the value.
          fill: the scalar to pad with.
          dim: the dim.
          shape: padding before the first element, padding between elements, size of the result.
        """
        low, interior, out = shape
        aval = self.graph.aval(x)
        config = padding(aval, dim, low, interior, out)
        return self.emit(
            at,
            like,
            resized(aval, dim, out),
            op="pad",
            primitive=lax.pad_p,
            params={"padding_config": config},
            inputs=(x, fill),
        )

    def slice(self, at: int, like: Node, source: Operand, cuts: tuple[Cut, ...]) -> Operand:
        """A slice of a value; the value itself if the slice has all of it.

        Arguments:
          at: as in `emit`.
          like: as in `emit`.
          source: the value.
          cuts: where it is cut.
        """
        aval = self.graph.aval(source)
        if cuts == whole(aval.shape):
            return source
        sliced = aval.update(shape=shape_of(cuts))
        return self.emit(at, like, sliced, inputs=(source,), **slicing(cuts))

    def cut(self, like: Node, x: int, dim: int, first: int, value: int) -> Node:
        """A node that makes a value as a slice of another one.

        Arguments:
          like: the node that it is like.
          x: the other value.
          dim: the dim.
          first: the first element.
          value: the value.
        """
        shape, out = self.graph.avals[x].shape, self.graph.avals[value].shape
        cut = (first, first + out[dim], 1)
        cuts = (*whole(shape[:dim]), cut, *whole(shape[dim + 1 :]))
        return dataclasses.replace(
            like, id=next(self.ids), inputs=(x,), outputs=(value,), **slicing(cuts)
        )

    def join(self, at: int, like: Node, dim: int, pieces: Sequence[Joined], x: Operand) -> int:
        """Slices one after the other, of the shape of a value.

        Arguments:
          at: as in `emit`.
          like: as in `emit`.
          dim: the dim.
          pieces: the slices.
          x: the value.
        """
        out = self.value(self.graph.aval(x))
        node = dataclasses.replace(like, id=next(self.ids), outputs=(out,), title="pad")
        self.before[at].append(join_node(node, dim, pieces))
        return out

    def shifted(self, at: int, like: Node, x: Operand, dim: int, by: int, size: int) -> Operand:
        """A value behind `by` elements that nobody reads, cut off at a size.

        An array that is interleaved from two is interleaved again, with the second one shifted.
        """
        aval = self.graph.aval(x)
        if by == 0 and aval.shape[dim] == size:
            return x
        key = (x, dim, by, size)
        if key in self._shifted and self._shifted[key][0] <= at:
            return self._shifted[key][1]
        halves = self._interleaved(x, dim) if by == 1 and aval.shape[dim] == size else None
        if halves is None:
            zero = constant(np.zeros((), aval.dtype))
            found = self.pad(at, like, x, zero, dim, (by, 0, size))
        else:
            total, first, second, zero = halves
            behind = self.shifted(at, total, second, dim, 1, size // 2)
            parts = (
                self.pad(at, total, behind, zero, dim, (0, 1, size)),
                self.pad(at, total, first, zero, dim, (1, 1, size)),
            )
            found = self.emit(at, total, aval, inputs=parts)
        self._shifted[key] = (at, found)
        return found

    def _interleaved(self, x: Operand, dim: int) -> tuple[Node, Operand, Operand, Operand] | None:
        """The sum that interleaves two arrays of one size; the two, and the zero between them."""
        total = self.wiring.maker(x)
        if total is None or total.op not in ("add", "add_any", "or"):
            return None
        found: dict[int, Node] = {}
        for operand in total.inputs:
            node = self.wiring.maker(operand)
            how = padded(node, dim) if node is not None else None
            if node is None or how is None or how.interior != 1 or not is_zero(node.inputs[1]):
                return None
            found[how.low] = node
        size = self.graph.aval(x).shape[dim]
        if set(found) != {0, 1} or any(
            2 * self.graph.aval(n.inputs[0]).shape[dim] != size for n in found.values()
        ):
            return None
        return total, found[0].inputs[0], found[1].inputs[0], found[0].inputs[1]
