"""Reuse of conversions: a rematerialised block repeats conversions of the forward pass, and the
plan reads the first result instead.

Value numbering says which values are equal. Where a scan repeats the conversion of an earlier
scan, the earlier scan returns the converted value as an additional stacked result, and the later
scan takes it as an additional stacked operand. Within one block, operations of the backward pass
read the converted value of the forward pass. Operations that only the repeated conversion needed
are removed."""

import itertools
from collections import defaultdict
from collections.abc import Hashable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from sbp import _jax
from sbp.infer.rows import NdRow
from sbp.infer.space import Codes, local_bytes, stack
from sbp.infer.typing import Typing
from sbp.plan.ir import Apply, Block, Box, Instruction, Loop, Register
from sbp.signatures import traits_of
from sbp.trace.graph import SAME, SCAN, Constant, Graph, Node, Operand, interface_of, trips_of
from sbp.trace.slices import without_unread

# ---- value numbering ----------------------------------------------------------------------------
# Two values have one number if the same operations make them from equal values.
#
# Gradients repeat computations of the forward pass: in scans under `jax.checkpoint`, and where JAX
# traces the operations of one block twice. A slice of a stacked value has the number of the value
# in the loop that stacked it.


class Numbering:
    """A number for each value of a program. Values with one number are equal; inside loops they are
    equal at the same index of the loops' stacked operands."""

    def __init__(self, graph: Graph) -> None:
        self._known: dict[Any, int] = {}
        self._of: dict[int, int] = {}
        self._keys: dict[int, tuple[Any, ...]] = {}
        self._keep: list[Any] = []
        self._inside: Any = None
        self.enter(graph)

    def of(self, operand: Operand) -> Hashable:
        """The number of a value, or a key for a constant."""
        return (
            self._of[operand]
            if not isinstance(operand, Constant)
            else ("constant", str(operand.aval.dtype), np.asarray(operand.value).tobytes())
            if np.ndim(operand.value) == 0 and not _jax.is_extended(operand.aval.dtype)
            else ("array", id(operand.value))
        )

    def _number(self, key: Any) -> int:
        number = self._known.setdefault(key, len(self._known))
        self._keys[number] = key
        return number

    def _same(self, operand: Operand) -> int:
        """The number of a value that equals an operand."""
        known = self.of(operand)
        return self._number(("same", known)) if isinstance(operand, Constant) else self._of[operand]

    def _new(self, value: int) -> None:
        self._of[value] = self._number(("value", value))

    def enter(self, graph: Graph) -> None:
        """Numbers the values of a graph; inputs without a number get new ones."""
        for value in graph.inputs:
            if value not in self._of:
                self._new(value)
        for node in graph.nodes:
            if node.op in SAME:
                for operand, value in zip(node.inputs, node.outputs, strict=True):
                    self._of[value] = self._same(operand)
            elif node.op == SCAN:
                self._scan(node)
            elif node.regions:
                for region in node.regions:
                    self.enter(region)
                for value in node.outputs:
                    self._new(value)
            else:
                key = (node.op, node.params_key(self._keep), tuple(self.of(o) for o in node.inputs))
                for position, value in enumerate(node.outputs):
                    self._of[value] = self._number((*key, position))

    def _scan(self, node: Node) -> None:
        (body,) = node.regions
        interface = interface_of(node)
        # The index that values depend on: one for all loops of a length side by side, another for
        # each depth.
        index = (self._inside, int(node.params["length"]))
        for entry, value in zip(interface.fed[0], body.inputs, strict=True):
            operand = node.inputs[entry.operand]
            if entry.kind == "constant":
                self._of[value] = self._same(operand)
            elif entry.kind == "slice":
                whole: tuple[Any, ...] = (
                    self._keys.get(self._of[operand], ()) if isinstance(operand, int) else ()
                )
                self._of[value] = (
                    whole[2]
                    if whole[:2] == ("stacked", index)
                    else self._number(("at", index, self.of(operand)))
                )
        outside, self._inside = self._inside, index
        self.enter(body)
        self._inside = outside
        for left in interface.exits:
            value = node.outputs[left.result]
            if left.kind == "carry":
                self._new(value)
            else:
                self._of[value] = self._number(
                    ("stacked", index, self.of(body.outputs[left.output]))
                )


def repeated_values(graph: Graph) -> tuple[frozenset[int], dict[int, int]]:
    """Finds the values that a program computes more than once: in one block, or in scans of equal
    length. Operands of a scan count where an earlier scan takes equal ones.

    Returns:
      The repeated values: those equal to an earlier one, and the values that gradients compute them
      from; and for each value with an equal one, the first included, the number of equal values.
    """
    numbers = Numbering(graph)
    alike: dict[tuple[Hashable, int], dict[int, list[int]]] = defaultdict(lambda: defaultdict(list))
    late = {o for node in graph.nodes if node.backward for o in node.inputs}
    for node in graph.nodes:
        for value in node.outputs:
            turns = alike[numbers.of(value), 0]
            if value in late or not turns:
                turns[value].append(value)
        if node.op == SCAN:
            (body,) = node.regions
            for value in (*body.inputs, *(v for inner in body.nodes for v in inner.outputs)):
                alike[numbers.of(value), int(node.params["length"])][node.id].append(value)
    several = [list(turns.values()) for turns in alike.values() if len(turns) > 1]
    again = {value for turns in several for values in turns[1:] for value in values}
    for node in reversed(graph.nodes):
        if node.backward and not again.isdisjoint(node.outputs):
            again.update(o for o in node.inputs if isinstance(o, int))
    times = {v: len(turns) for turns in several for values in turns for v in values}
    return frozenset(again), times


# ---- reuse --------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Repeat:
    """A conversion that repeats an earlier one.

    Arguments:
      value: the value that the repeated conversion gives, or that is computed from its result.
      first: the equal value that was made before.
      codes: the type in which both are made.
      loop, first_loop: ids of the scan nodes in whose bodies `value` and `first` are made; None
        where both are made in the same block.
      seconds: modelled time that reading `first` saves per call: that of the conversion over all
        trips of its loop, less the time of writing and reading the stacked values.
      bytes_sent: bytes that one device sends for the conversion per call.
      bytes_kept: bytes on one device that `first` takes until it is read.
    """

    value: int
    first: int
    codes: Codes
    loop: int | None
    first_loop: int | None
    seconds: float
    bytes_sent: float
    bytes_kept: float


def repeats(typing: Typing, block: Block) -> tuple[Repeat, ...]:
    """The conversions of a lowered program that repeat one of the same block or of an earlier loop.

    Arguments:
      typing: the types.
      block: the program lowered with them.
    """
    search, readers = _Search(typing), _readers(block)
    for instruction in block.instructions:
        if isinstance(instruction, Loop) and instruction.node.op == SCAN:
            (body,) = instruction.blocks
            inside = _readers(body)
            for inner in body.instructions:
                search.see(inner, instruction, inside)
        search.see(instruction, None, readers)
    return tuple(search.found.values())


def save(typing: Typing, chosen: tuple[Repeat, ...]) -> Typing:
    """The typing of the program without the chosen repeated conversions.

    Its graph is a rewritten one: readers of a repeated value read the first value.
    """
    saving = _Saving(typing, chosen)
    return replace(
        typing,
        graph=saving.block(typing.graph, saving.here, top=True),  # enters the other fields, too
        values=saving.values,
        rows=saving.rows,
        region_outputs=saving.returned,
        saved_seconds=sum(r.seconds for r in chosen),
    )


class _Search:
    """Walks a program in order and records the first value made of each number and type. Equal
    values have one number."""

    def __init__(self, typing: Typing) -> None:
        self.typing, self.request = typing, typing.graph_request
        self.numbers = Numbering(typing.graph)
        self.made: dict[tuple[Any, Codes], tuple[int, Loop | None]] = {}
        self.found: dict[tuple[int | None, int], Repeat] = {}

    def see(
        self,
        instruction: Instruction,
        loop: Loop | None,
        readers: dict[Register, list[Instruction]],
    ) -> None:
        """Records what an instruction makes, or the repeat that it leads to.

        Arguments:
          instruction: the instruction.
          loop: the scan in whose body it stands; None for the program.
          readers: the readers of each register of its block.
        """
        if isinstance(instruction, Apply):
            for register in instruction.outs:
                self.made.setdefault(
                    (self.numbers.of(register.value), register.codes), (register.value, loop)
                )
        elif (
            isinstance(instruction, Box)
            and instruction.bytes_sent
            and not any(c < 0 for c in instruction.target.codes)
        ):
            every = (self.repeat(instruction, r, loop) for r in _chain(instruction, readers))
            repeat = next(filter(None, every), None)
            if repeat is not None:
                self.found.setdefault((repeat.loop, repeat.value), repeat)
                return
            # A loop would return the converted value: its rules must allow the conversion there.
            rules = self.request.rules(loop.node if loop else None, in_loop=loop is not None)
            if loop is None or all(
                rules.allows(s.kind, s.mesh_axes, s.bytes_sent) for s in instruction.steps
            ):
                key = self.numbers.of(instruction.source.value), instruction.target.codes
                self.made.setdefault(key, (instruction.source.value, loop))

    def repeat(self, box: Box, register: Register, loop: Loop | None) -> Repeat | None:
        """The repeat of a register: an equal value made earlier in the same type, if reading it is
        allowed and saves time.

        Arguments:
          box: the conversion.
          register: its result, or a value computed from it.
          loop: the scan in whose body the conversion stands; None for the program.
        """
        value, where = self.made.get(
            (self.numbers.of(register.value), register.codes), (register.value, None)
        )
        trips = trips_of(loop.node) if loop else 1
        if (
            value == register.value
            or (where is None) != (loop is None)
            or (where and loop and (where is loop or trips_of(where.node) != trips))
            # Two equal forward values in one block may have two pins on purpose. Recomputed values
            # have the pins of the forward pass.
            or (loop is None and (box.reader is None or not box.reader.backward))
            # Readers of `first` may not be allowed to convert it.
            or (
                loop is None
                and self.typing.values[value] != register.codes
                and not self.request.rules(box.reader).unlimited
            )
        ):
            return None
        mesh, aval = self.typing.mesh, self.typing.graph.avals[value]
        size = float(local_bytes(aval, register.codes, mesh.sizes))
        # One loop writes the stacked values, the other reads them.
        kept = 2 * size / mesh.hardware.hbm_bytes_per_second if loop else 0.0
        seconds = trips * (sum(s.seconds for s in box.steps) - kept)
        found = Repeat(
            value=register.value,
            first=value,
            codes=register.codes,
            loop=loop and loop.node.id,
            first_loop=where and where.node.id,
            seconds=seconds,
            bytes_sent=trips * box.bytes_sent,
            bytes_kept=trips * size,
        )
        return found if seconds > 0 else None


def _chain(box: Box, readers: dict[Register, list[Instruction]]) -> Iterator[Register]:
    """The result of a conversion, then the results of operations computed from it, where each
    operation has one result and is the only reader of the register before it."""
    register = box.target
    while True:
        yield register
        match readers.get(register, []):
            case [Apply(outs=(only,))] if not any(c < 0 for c in only.codes):
                register = only
            case _:
                return


def _readers(block: Block) -> dict[Register, list[Instruction]]:
    """The instructions that read each register; none for a register that the block returns."""
    found = defaultdict[Register, list[Instruction]](list)
    returned = set(block.outputs)  # another value cannot be returned in their place
    for source, instruction in ((s, i) for i in block.instructions for s in i.ins):
        if isinstance(source, Register) and source not in returned:
            found[source].append(instruction)
    return found


class _Saving:
    """Rewrites a typing and its graph so that the chosen conversions run once."""

    def __init__(self, typing: Typing, chosen: tuple[Repeat, ...]) -> None:
        self.old, self.chosen, self.request = typing, chosen, typing.graph_request
        self.avals = dict(typing.graph.avals)
        self.values, self.rows = dict(typing.values), dict(typing.rows)
        self.returned = dict(typing.region_outputs)
        self.next = itertools.count(max(self.avals) + 1)
        self.stacked: dict[tuple[int | None, int, Codes], int] = {}
        # Of several equal values the first one is read.
        self.here = {r.value: r.first for r in reversed(chosen) if r.loop is None}
        self.kept = {r.value: r.codes for r in chosen}

    def block(self, graph: Graph, instead: dict[int, int], *, top: bool = False) -> Graph:
        """A graph whose nodes read other values, without the operations that nothing reads then.

        Arguments:
          graph: the program, or the body of a scan.
          instead: for each repeated value, the equal value to read.
          top: whether the graph is the program.
        """
        nodes: list[Node] = []
        for node in graph.nodes:
            row = self.rows[node.id]
            inputs = tuple(
                self.redirect(node, o, c, instead)
                for o, c in zip(node.inputs, row.ins, strict=True)
            )
            node = replace(node, inputs=inputs)
            if top and node.op == SCAN:
                node = self.scan(node)
            nodes.append(node)
        if instead or not top:  # operations with effects stay
            nodes = without_unread(nodes, set(graph.outputs), lambda node: not _acts(node))
        return replace(graph, nodes=tuple(nodes), avals=self.avals)

    def redirect(
        self, node: Node, operand: Operand, codes: Codes, instead: dict[int, int]
    ) -> Operand:
        """The operand that a node reads in place of one of its operands.

        It is the equal value of `instead` where the node takes the converted type, and the equal
        value has that type or the node may convert it. Otherwise the operand stays.

        Arguments:
          node: the reader.
          operand: the operand before the rewriting.
          codes: the type in which the node takes it.
          instead: for each repeated value, the equal value to read.
        """
        if not isinstance(operand, int) or operand not in instead:
            return operand
        other, kept = instead[operand], self.kept[operand]
        if codes == self.old.values[operand] != kept:
            return operand
        arrives = self.values[other] == codes
        return (
            other
            if arrives or self.request.rules(node, in_loop=other not in self.old.values).unlimited
            else operand
        )

    def scan(self, node: Node) -> Node:
        """A scan with an additional stacked result for each value that a later scan reads, and an
        additional stacked operand for each value of an earlier scan that it reads."""
        (body,) = node.regions
        row, returned = self.rows[node.id], self.returned[node.id, 0]
        instead: dict[int, int] = {}
        for r in self.chosen:
            key = r.first_loop, r.first, r.codes
            if r.first_loop == node.id and key not in self.stacked:
                aval = self.avals[r.first]
                whole = self.stacked[key] = next(self.next)
                self.avals[whole] = _jax.empty_aval(
                    (int(node.params["length"]), *aval.shape),
                    aval.dtype,
                    host=_jax.in_host(aval),
                )
                self.values[whole] = stack(r.codes)
                node = replace(node, outputs=(*node.outputs, whole))
                body = replace(body, outputs=(*body.outputs, r.first))
                row = NdRow(row.ins, (*row.outs, stack(r.codes)), row.kernels)
                returned = (*returned, r.codes)
            elif r.loop == node.id and r.value not in instead:
                value = next(self.next)
                self.avals[value] = self.avals[r.first]
                self.values[value] = r.codes
                node = replace(node, inputs=(*node.inputs, self.stacked[key]))
                body = replace(body, inputs=(*body.inputs, value))
                row = NdRow((*row.ins, stack(r.codes)), row.outs, row.kernels)
                instead[r.value] = value
        self.rows[node.id], self.returned[node.id, 0] = row, returned
        return replace(node, regions=(self.block(body, instead) if instead else body,))


def _acts(node: Node) -> bool:
    """Whether a node has effects besides its results."""
    return (
        traits_of(node.op).effect
        or not node.outputs
        or any(_acts(n) for region in node.regions for n in region.nodes)
    )
