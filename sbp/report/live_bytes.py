"""Program -> what a device has in memory, moment by moment and by class, and what is alive when it
has most."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Literal

from sbp.explain.names import Names
from sbp.plan.ir import Block, Loop, Register
from sbp.plan.memory import DeviceMemory, Moment
from sbp.plan.program import Program
from sbp.plan.stored import stored
from sbp.plan.traffic import PHASES, Phase
from sbp.report.facts import tensor
from sbp.report.flows import PLACE_NAMES
from sbp.report.input_uses import InputClass, InputUses
from sbp.report.wording import common_name, without_numbers
from sbp.types import NdSbp

MemoryClass = (
    InputClass
    | Literal["results", "copies of weights", "activations", "gradients", "temporaries", "gaps"]
)
"""What bytes are for.

* `weights`, `optimiser`, `other arguments`: arguments, as `InputUses` tells them;
* `results`: those that take no buffers of donated arguments;
* `copies of weights`: gathered, cast or rearranged;
* `activations`: what the forward pass makes and a later pass needs;
* `gradients`: what the backward pass makes and the update needs;
* `temporaries`: all else that operations make, and what they need while they run;
* `gaps`: what is lost between the last four.
"""
CLASSES: tuple[MemoryClass, ...] = (
    "weights",
    "optimiser",
    "other arguments",
    "results",
    "copies of weights",
    "activations",
    "gradients",
    "temporaries",
    "gaps",
)

COLUMNS = 165
"""Moments that a picture shows. Of several that it shows as one, the fullest is taken."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LiveMoment:
    """What a device has while one instruction runs.

    Attributes:
      phase: the pass that it belongs to.
      what, where: the operation, and its file and line.
      bytes: by class.
    """

    phase: Phase
    what: str
    where: str
    bytes: dict[MemoryClass, float]

    @property
    def total(self) -> float:
        """Bytes of all classes."""
        return sum(self.bytes.values())


@dataclass(frozen=True, slots=True, kw_only=True)
class HeldTensor:
    """Tensors of one kind that are alive when a device has most.

    Attributes:
      name: the user's name, or the operation that makes it. Layers have the same name, with a star
        in place of their number.
      where: file and line of that operation; empty for an argument.
      kind: its class.
      shape: dtype and shape of the tensor.
      type: its type.
      count: how many tensors there are with the same name, line, class, shape and type.
      bytes: of one device, of all of them.
    """

    name: str
    where: str
    kind: MemoryClass
    shape: str
    type: NdSbp
    count: int
    bytes: float


@dataclass(frozen=True, slots=True, kw_only=True)
class LiveBytes:
    """What a device has in its own memory.

    Attributes:
      moments: in program order; the body of a loop stands there once.
      instructions: how many moments the program has.
      held: arguments and temporaries that are alive at the peak, the largest first.
      limit: bytes that a device may have.
      is_asked: whether `memory_limit` says so; otherwise it is what the hardware has.
      host: bytes at the fullest moment in host memory.
    """

    moments: tuple[LiveMoment, ...]
    instructions: int
    held: tuple[HeldTensor, ...]
    limit: float
    is_asked: bool
    host: float

    @property
    def peak(self) -> LiveMoment:
        """The fullest moment."""
        return max(self.moments, key=lambda m: m.total)


def live_bytes(program: Program) -> LiveBytes:
    """What a device has in memory as the program runs.

    Arguments:
      program: the plan.
    """
    return _Memory(program).live()


class _Memory:
    """Sorts what a program has in memory into classes."""

    def __init__(self, program: Program) -> None:
        self.program, self.graph = program, program.graph
        self.memory = DeviceMemory(program.typing, in_host=False)
        self.uses = InputUses(program)
        self.last: dict[Register, Phase] = {}
        self._find_last(program.block)
        self.known: dict[Register, MemoryClass] = {}
        self.fixed: dict[MemoryClass, float] = dict.fromkeys(CLASSES, 0.0)
        for number, register in enumerate(program.block.inputs):
            self.fixed[self.uses.class_of(number)] += self.memory.size(register)
        self.fixed["results"] = self.memory.results(program.block)

    def live(self) -> LiveBytes:
        """The result."""
        sizes = [moment.bytes for moment in self.memory.moments(self.program.block)]
        count = min(len(sizes), COLUMNS)
        columns = [
            range(len(sizes) * n // count, len(sizes) * (n + 1) // count) for n in range(count)
        ]
        shown = {max(column, key=lambda i: sizes[i]) for column in columns}
        most = max(range(len(sizes)), key=lambda i: sizes[i], default=-1)
        moments, held = list[LiveMoment](), tuple[HeldTensor, ...]()
        for number, moment in enumerate(self.memory.moments(self.program.block)):
            if number in shown:
                moments.append(self._moment(moment))
            if number == most:
                held = self._held(moment)
        if not moments:  # the program returns its arguments
            moments = [LiveMoment(phase=PHASES[0], what="", where="", bytes=dict(self.fixed))]
            held = self._sorted(self._arguments())
        request, hardware = self.program.request, self.program.mesh.hardware
        asked = request.memory_limit
        return LiveBytes(
            moments=tuple(moments),
            instructions=len(sizes),
            held=held,
            limit=hardware.hbm_bytes if asked is None else asked,
            is_asked=asked is not None,
            host=self.program.cost.host_memory_bytes,
        )

    def _find_last(self, block: Block) -> None:
        """The pass of the last instruction that needs each register."""
        found = stored(block, self.program.typing.graph.avals, self.memory.elements)
        for register, at in found.last.items():
            self.last[register] = self.uses.phases.place(block.instructions[at])[1]
        for instruction in block.instructions:
            for inner in instruction.blocks if isinstance(instruction, Loop) else ():
                self._find_last(inner)

    def _class(self, register: Register) -> MemoryClass:
        if register not in self.known:
            self.known[register] = self._class_of(register)
        return self.known[register]

    def _class_of(self, register: Register) -> MemoryClass:
        root = self.uses.root(register.value)
        if root is not None and self.uses.class_of(root) == "weights":
            return "copies of weights"
        maker = self.uses.dataflow.makers.get(register.value)
        if maker is None:
            return "temporaries"
        made, needed = self.uses.phases.of[maker.id], self.last.get(register)
        if made == "forward" and needed in ("backward", "update"):
            return "activations"
        return "gradients" if (made, needed) == ("backward", "update") else "temporaries"

    def _moment(self, moment: Moment) -> LiveMoment:
        found = dict(self.fixed)
        for sizes in moment.live:
            for register, size in sizes.items():
                found[self._class(register)] += size
        found["temporaries"] += moment.scratch
        found["gaps"] += self.memory.gaps(moment.bytes)
        node, phase = self.uses.phases.place(moment.instruction)
        return LiveMoment(
            phase=phase,
            what="" if node is None else node.name,
            where="" if node is None else PLACE_NAMES["line"](node).where,
            bytes={kind: found[kind] for kind in CLASSES if found[kind]},
        )

    def _held(self, moment: Moment) -> tuple[HeldTensor, ...]:
        found = list(self._arguments())
        names = Names.of(self.graph)
        for register in moment.registers():
            maker = names.makers.get(register.value)
            root = self.uses.root(register.value)
            name = names.value(register.value) or (
                self._name(root) if root is not None else maker.name if maker else "in a loop"
            )
            where = "" if maker is None else PLACE_NAMES["line"](maker).where
            found.append(self._tensor(register, self._class(register), name, where))
        return self._sorted(found)

    def _sorted(self, found: list[HeldTensor] | Iterator[HeldTensor]) -> tuple[HeldTensor, ...]:
        alike = defaultdict[HeldTensor, list[HeldTensor]](list)
        for one in found:
            alike[replace(one, name=without_numbers(one.name), bytes=0.0)].append(one)
        joined = [
            replace(
                ones[0],
                name=common_name([o.name for o in ones]),
                count=len(ones),
                bytes=sum(o.bytes for o in ones),
            )
            for ones in alike.values()
        ]
        return tuple(sorted(joined, key=lambda one: -one.bytes))

    def _arguments(self) -> Iterator[HeldTensor]:
        for number, register in enumerate(self.program.block.inputs):
            if self.memory.size(register):
                yield self._tensor(register, self.uses.class_of(number), self._name(number), "")

    def _name(self, number: int) -> str:
        """The name of an argument."""
        names = self.graph.input_names
        return names[number] if names else f"args[{number}]"

    def _tensor(self, register: Register, kind: MemoryClass, name: str, where: str) -> HeldTensor:
        fact = tensor(self.program, register, name)
        return HeldTensor(
            name=name,
            where=where,
            kind=kind,
            shape=fact.shape,
            type=fact.type,
            count=1,
            bytes=self.memory.size(register),
        )
