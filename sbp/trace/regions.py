"""The operands and results of the regions of a `scan`, `while` or `cond`, as data.

`interface_of(node)` says what enters and leaves each region. Two modules read the parameters that
count constants and carries: this one, and `plan.verify`, which checks plans without the code that
made them.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass
from typing import Any, Literal

from sbp.errors import SbpInternalError
from sbp.trace.graph import Graph, Node, Operand

NO_TRIP = 1e-6
"""Trips of a loop that has none, when types are chosen: its body needs types too, which then cost
next to nothing."""

WHILE_TRIPS = 8
"""The number of trips assumed for a `while` loop; the true number is unknown before it runs."""

SCAN = "scan"
"""The operator whose region runs a known number of times, on slices of its operands."""

LOOPS = frozenset({SCAN, "while"})
"""Operators whose regions run more than once."""

CONTROL_FLOW = LOOPS | {"cond"}
"""Operators whose regions have an `Interface`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """How one operand of a node enters its regions.

    Arguments:
      kind: `predicate`: it chooses the branch and enters no region; `constant`: each trip and each
          branch reads the same value; `carry`: the first trip reads it, later trips read what the
          body returns; `slice`: each trip reads one index of its first dim.
      operand: position among the operands of the node.
      inputs: (region, position among the region's inputs) of each place where it enters; the body
          of a `while` comes before its predicate.
      number: position among the entries of its kind.
      result: position of the node's result that is the last value of the carry; -1 for other kinds.
      decides: whether only the predicate of a `while` reads it.
    """

    kind: Literal["predicate", "constant", "carry", "slice"]
    operand: int
    inputs: tuple[tuple[int, int], ...]
    number: int
    result: int = -1
    decides: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Exit:
    """How one output of a region leaves its node.

    Arguments:
      kind: `carry`: the next trip reads it; `stacked`: the results of all trips are stacked along a
          new first dim; `result`: a branch returns it; `predicate`: it says whether a `while` goes
          on.
      region: number of the region.
      output: position among the region's outputs.
      number: position among the exits of its kind in this region.
      result: position of the node's result; -1 for a predicate.
      entry: the carry to which it returns; None for other kinds.
    """

    kind: Literal["carry", "stacked", "result", "predicate"]
    region: int
    output: int
    number: int
    result: int = -1
    entry: Entry | None = None

    def entry_position(self, region: int) -> int:
        """The position of a carry among the inputs of a region."""
        assert self.entry is not None
        return next(position for r, position in self.entry.inputs if r == region)


@dataclass(frozen=True, slots=True, kw_only=True)
class Interface:
    """What enters and what leaves the regions of a node.

    Arguments:
      loop: whether regions run more than once.
      entries: one for each operand, in order.
      exits: one for each output of each region, in order.
      fed: for each region and each of its inputs, the entry that feeds it.
    """

    loop: bool
    entries: tuple[Entry, ...]
    exits: tuple[Exit, ...]
    fed: tuple[tuple[Entry, ...], ...]

    def entering(self, kind: str) -> tuple[Entry, ...]:
        """The entries of a kind."""
        return tuple(e for e in self.entries if e.kind == kind)

    def leaving(self, region: int) -> tuple[Exit, ...]:
        """The exits of a region, one for each of its outputs."""
        return tuple(e for e in self.exits if e.region == region)

    def operands(self, kind: str, operands: Sequence[Any]) -> list[Any]:
        """Selects the operands of a kind.

        Arguments:
          kind: `predicate`, `constant`, `carry` or `slice`.
          operands: one item for each operand of the node.

        Returns:
          The items of the operands of that kind, in order.
        """
        return [operands[e.operand] for e in self.entering(kind)]

    def inputs(
        self,
        region: int,
        operands: Sequence[Any],
        *,
        carries: Sequence[Any] | None = None,
        slices: Sequence[Any] | None = None,
    ) -> list[Any]:
        """The inputs of a region, in order, made of items for the operands of the node.

        Arguments:
          region: number of the region.
          operands: one item for each operand of the node.
          carries: one item for each carry in this trip; None takes those of `operands`.
          slices: one item for each slice in this trip; None takes those of `operands`.
        """
        given = {"carry": carries, "slice": slices}

        def of(entry: Entry) -> Any:
            found = given.get(entry.kind)
            return operands[entry.operand] if found is None else found[entry.number]

        return [of(entry) for entry in self.fed[region]]

    def exit_to(self, result: int) -> Exit:
        """The exit that becomes a result of the node; for a `cond` that of the first branch."""
        return next(e for e in self.exits if e.result == result)


def interface_of(node: Node) -> Interface:
    """The interface of a node's regions; an empty one for a node without regions.

    Raises:
      SbpInternalError: for a node with regions that is no scan, while or cond.
    """
    ins, outs = len(node.inputs), len(node.outputs)
    match node.op:
        case "scan":
            return _scan(node.params["num_consts"], node.params["num_carry"], ins, outs)
        case "while":
            return _while(node.params["cond_nconsts"], node.params["body_nconsts"], ins)
        case "cond":
            return _cond(len(node.regions), ins, outs)
        case _ if node.regions:
            raise SbpInternalError(f"no interface of the regions of {node.op}")
        case _:
            return _NONE


def body_of(loop: Node) -> int:
    """The number of the region of a loop that is its body."""
    return 0 if loop.op == SCAN else 1


def with_body_constants(
    loop: Node, body: Graph, read: Set[Operand], more: Mapping[int, Operand]
) -> Node:
    """A loop with another body, which has other constants.

    Arguments:
      loop: the loop.
      body: the new body, with the inputs of the old one.
      read: the values that it reads; constants that are not among them are left out.
      more: the values that it reads as constants besides, each with the operand of the loop.
    """
    number, is_scan = body_of(loop), loop.op == SCAN
    fed = interface_of(loop).fed[number]
    count = sum(entry.kind == "constant" for entry in fed)
    before = 0 if is_scan else loop.params["cond_nconsts"]
    kept = [k for k in range(count) if body.inputs[k] in read]
    inputs = (*(body.inputs[k] for k in kept), *more, *body.inputs[count:])
    regions = list(loop.regions)
    regions[number] = dataclasses.replace(body, inputs=inputs)
    name = "num_consts" if is_scan else "body_nconsts"
    return dataclasses.replace(
        loop,
        params={**loop.params, name: len(kept) + len(more)},
        inputs=(
            *loop.inputs[:before],
            *(loop.inputs[before + k] for k in kept),
            *more.values(),
            *loop.inputs[before + count :],
        ),
        regions=tuple(regions),
    )


_NONE = Interface(loop=False, entries=(), exits=(), fed=())


@functools.lru_cache(maxsize=4096)
def _scan(constants: int, carries: int, operands: int, results: int) -> Interface:
    before = constants + carries
    entries = (
        *(Entry(kind="constant", operand=i, inputs=((0, i),), number=i) for i in range(constants)),
        *(
            Entry(kind="carry", operand=i, inputs=((0, i),), number=n, result=n)
            for n, i in enumerate(range(constants, before))
        ),
        *(
            Entry(kind="slice", operand=i, inputs=((0, i),), number=n)
            for n, i in enumerate(range(before, operands))
        ),
    )
    carry = tuple(
        Exit(kind="carry", region=0, output=i, number=i, result=i, entry=entries[constants + i])
        for i in range(carries)
    )
    stacked = tuple(
        Exit(kind="stacked", region=0, output=i, number=i - carries, result=i)
        for i in range(carries, results)
    )
    return Interface(loop=True, entries=entries, exits=(*carry, *stacked), fed=(entries,))


@functools.lru_cache(maxsize=4096)
def _while(of_cond: int, of_body: int, operands: int) -> Interface:
    before = of_cond + of_body
    cond = tuple(
        Entry(kind="constant", operand=i, inputs=((0, i),), number=i, decides=True)
        for i in range(of_cond)
    )
    body = tuple(
        Entry(kind="constant", operand=of_cond + i, inputs=((1, i),), number=of_cond + i)
        for i in range(of_body)
    )
    carries = tuple(
        Entry(
            kind="carry",
            operand=before + i,
            inputs=((1, of_body + i), (0, of_cond + i)),
            number=i,
            result=i,
        )
        for i in range(operands - before)
    )
    returned = tuple(
        Exit(kind="carry", region=1, output=e.number, number=e.number, result=e.number, entry=e)
        for e in carries
    )
    return Interface(
        loop=True,
        entries=(*cond, *body, *carries),
        exits=(Exit(kind="predicate", region=0, output=0, number=0), *returned),
        fed=((*cond, *carries), (*body, *carries)),
    )


@functools.lru_cache(maxsize=4096)
def _cond(branches: int, operands: int, results: int) -> Interface:
    predicate = Entry(kind="predicate", operand=0, inputs=(), number=0)
    given = tuple(
        Entry(
            kind="constant",
            operand=1 + i,
            inputs=tuple((branch, i) for branch in range(branches)),
            number=i,
        )
        for i in range(operands - 1)
    )
    exits = tuple(
        Exit(kind="result", region=branch, output=i, number=i, result=i)
        for branch in range(branches)
        for i in range(results)
    )
    return Interface(loop=False, entries=(predicate, *given), exits=exits, fed=(given,) * branches)


def bodies_of(node: Node, operand: int) -> list[tuple[Graph, int]]:
    """The regions that an operand of a node enters, each with the position among its inputs."""
    entries = interface_of(node).entries
    places = entries[operand].inputs if entries else ()
    return [(node.regions[region], position) for region, position in sorted(places)]


def amount(node: Node, of_regions: Sequence[float]) -> float:
    """The bytes that the regions of a node send when the node runs once.

    Arguments:
      node: the node.
      of_regions: the bytes that each region sends when it runs once.

    Returns:
      For a `cond` the largest of its branches, for a loop the sum over its trips.
    """
    if not of_regions:
        return 0.0
    return trips_of(node) * sum(of_regions) if node.op in LOOPS else max(of_regions)


def trips_are_assumed(node: Node) -> bool:
    """Whether the number of trips is not known before the region runs."""
    return node.op == "while"


def weighed_trips(node: Node) -> float:
    """How often a region's body is taken to run when types are chosen."""
    return trips_of(node) or NO_TRIP


def trips_of(node: Node) -> int:
    """How often a region's body runs."""
    match node.op:
        case "scan":
            return int(node.params["length"])
        case "while":
            return WHILE_TRIPS
        case _:
            return 1
