"""Peak memory of a plan, by liveness of the values that reach memory: bytes of one device's memory,
and bytes that one device has in host memory.

XLA computes an elementwise value inside each operation that reads it, and does not store the value.
So the operands of the value stay in memory until its last reader has run. XLA stores

* the results of products, convolutions, collectives, loops and all other operations that it does
  not fuse, and arrays that are joined from several arrays. If one elementwise operation reads a
  product, the product continues into that operation, and XLA stores the result of the operation
  instead. It stores this result whole, even if only a slice of it is read, unless the result is a
  cast to a wider dtype for several readers;
* the operands of such operations. Products and reductions are exceptions: they compute their
  operands;
* a value with several readers, if a product continues into it;
* a value that several products or reductions read, if it is drawn at random, or if two costly
  operations compute it, one after the other (exp and division in a softmax). After one costly
  operation only, each reader computes the value again;
* the result of a costly operation that is padded before it is read.
"""

import math
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from sbp import _jax
from sbp.infer.space import local_shape
from sbp.infer.typing import Typing
from sbp.machine.hardware import TILE, elements_in_tiles
from sbp.plan.ir import Apply, Block, Box, Instruction, Loop, Register, Source
from sbp.signatures import Shape, traits_of
from sbp.trace.graph import group_by, interface_of, reached

GAPS = 0.12
"""Share of the temporaries that XLA's allocation leaves unused between them."""


# ---- the fullest moment -------------------------------------------------------------------------


def reused_inputs(typing: Typing, block: Block) -> Iterator[int]:
    """The positions of the donated inputs whose buffers outputs take: as in `jax.jit`, each output
    takes that of the first one with its shape, dtype and type.

    Arguments:
      typing: the types.
      block: the plan.
    """
    avals = typing.graph.avals

    def kind(register: Register) -> object:
        aval = avals[register.value]
        return aval.shape, aval.dtype, _jax.in_host(aval), register.codes

    wanted = Counter(kind(s) for s in block.outputs if isinstance(s, Register))
    for position in typing.request.donated:
        this = kind(block.inputs[position])
        if wanted[this]:
            wanted[this] -= 1
            yield position


@dataclass(frozen=True, slots=True, kw_only=True)
class Moment:
    """What a plan has in memory while one instruction runs, besides arguments and results.

    Arguments:
      instruction: the instruction; a loop for what it has besides its body.
      bytes: of all temporaries.
      scratch: bytes of these that the instruction needs besides its operands and results.
      live: the bytes of each temporary: of the program, then of the body of each loop around the
          instruction. These dicts change when the next moment is asked for.
    """

    instruction: Instruction
    bytes: float
    scratch: float
    live: tuple[Mapping[Register, float], ...]

    def registers(self) -> tuple[Register, ...]:
        """The temporaries that take bytes, in program order."""
        return tuple(r for sizes in self.live for r, b in sizes.items() if b)


class DeviceMemory:
    """What a plan has in one of a device's two memories.

    Arguments:
      typing: the types, for shapes and the mesh.
      in_host: whether the memory is the host's.
    """

    def __init__(self, typing: Typing, *, in_host: bool) -> None:
        self.typing, self.in_host = typing, in_host
        self.avals, self.sizes = typing.graph.avals, typing.mesh.sizes
        self.on_tpu = typing.mesh.hardware.platform == "tpu" and not in_host

    def fullest(self, block: Block) -> tuple[float, tuple[Register, ...]]:
        """The fullest moment of a plan.

        Arguments:
          block: the plan.

        Returns:
          Bytes: arguments + outputs - donated inputs whose buffers outputs take + temporaries, with
          the gaps between them. The live temporaries, in program order; those inside a region come
          last.
        """
        peak, live = 0.0, tuple[Register, ...]()
        for moment in self.moments(block):
            if moment.bytes > peak:
                peak, live = moment.bytes, moment.registers()
        held = self.arguments(block) + self.results(block)
        return held + peak + self.gaps(peak), live

    def arguments(self, block: Block) -> float:
        """Bytes of the arguments of the program."""
        return sum(map(self.size, block.inputs))

    def results(self, block: Block) -> float:
        """Bytes of the results that take no buffers of donated arguments."""
        outputs = sum(self.size(s) for s in block.outputs if isinstance(s, Register))
        donated = sum(self.size(block.inputs[i]) for i in reused_inputs(self.typing, block))
        return outputs - donated

    def gaps(self, temporaries: float) -> float:
        """Bytes between temporaries."""
        return 0.0 if self.in_host else GAPS * temporaries

    def elements(self, register: Register) -> int:
        """Elements of a register on one device, in any memory."""
        return math.prod(local_shape(self.avals[register.value].shape, register.codes, self.sizes))

    def size(self, register: Register, *, copied: bool = False) -> float:
        """Bytes of a register in this memory: 0 for one in the other memory. `copied` asks for the
        bytes in device memory of a register in host memory, while it is converted."""
        aval = self.avals[register.value]
        in_host = _jax.in_host(aval)
        is_here = (in_host and not copied) if self.in_host else in_host == copied
        return self.elements(register) * _jax.itemsize(aval.dtype) if is_here else 0.0

    def scratch(self, instruction: Instruction) -> float:
        """Bytes that an instruction needs besides its operands, its results and its body."""
        match instruction:
            case Loop():
                return 0.0
            case Apply():
                own = 0.0 if self.in_host else instruction.scratch_bytes
                return own + self.copies(instruction)
            case Box(source=source, target=target):
                return self.size(source, copied=True) + self.size(target, copied=True)

    def copies(self, instruction: Apply) -> float:
        """Bytes of the copies on which XLA sorts or transforms whole lines, or adds up lines."""
        traits = traits_of(instruction.node.op)
        if traits.scatters and self.on_tpu:
            return self.lines(instruction)
        is_copied = traits.whole or (traits.orderless and traits.moves)
        every = (*instruction.ins, *instruction.outs) if is_copied else ()
        return sum((self.size(s) for s in every if isinstance(s, Register)), 0.0)

    def lines(self, instruction: Apply) -> float:
        """Bytes that a TPU needs to add lines to the places that indices give, besides the lines.

        It has them in whole tiles, and where their tiles are no rows of a matrix, in one as well
        (`python -m benchmarks.steps recommender`: lines of 64 elements in groups of 26).
        """
        *_, updates = instruction.ins
        numbers = instruction.node.params["dimension_numbers"]
        if not isinstance(updates, Register) or is_one_hot(instruction, self.avals):
            return 0.0
        shape = local_shape(self.avals[updates.value].shape, updates.codes, self.sizes)
        if len(shape) < 2 or len(shape) - 1 not in numbers.update_window_dims or 0 in shape:
            return 0.0
        taken = elements_in_tiles(shape)
        if len(shape) > 2 and shape[-2] % TILE[0]:
            taken += elements_in_tiles((math.prod(shape[:-1]), shape[-1]))
        return (taken - math.prod(shape)) * _jax.itemsize(self.avals[updates.value].dtype)

    def moments(self, block: Block, *, top: bool = True) -> Iterator[Moment]:
        """What a block has in memory as each of its instructions runs, those of loops included.

        Arguments:
          block: the block.
          top: whether the block is the program, whose results are counted beside the moments.
        """
        kept = {s for s in block.outputs if isinstance(s, Register)}
        stored, last, early = stored_values(block, self)
        ends = group_by((r for r in last if r not in kept), last.__getitem__)
        live = 0.0
        sizes: dict[Register, float] = {}
        for at, instruction in enumerate(block.instructions):
            ending = [s for s in ends.get(at, ()) if s in sizes]
            entering: list[tuple[Register, list[Source]]] = [(r, []) for r in early.get(at, ())]
            entering += [
                (r, self.in_place(instruction, n, ending))
                for n, r in enumerate(instruction.outs)
                if r in stored and r not in sizes and (r in last or r in kept)
            ]
            for register, sources in entering:
                bytes_ = 0.0 if top and register in kept else self.size(register)
                for source in sources:
                    if source in ending and sizes[source] == bytes_:
                        ending.remove(source)
                        live -= sizes.pop(source)
                        break
                sizes[register] = bytes_
                live += bytes_
            scratch = self.scratch(instruction)
            yield Moment(
                instruction=instruction, bytes=live + scratch, scratch=scratch, live=(sizes,)
            )
            for inner in instruction.blocks if isinstance(instruction, Loop) else ():
                for one in self.moments(inner, top=False):
                    yield replace(one, bytes=live + one.bytes, live=(sizes, *one.live))
            for source in ending:
                live -= sizes.pop(source)

    def in_place(
        self, instruction: Instruction, position: int, ending: list[Register]
    ) -> list[Source]:
        """The operands whose buffers a result may take, if nothing needs them any more.

        Arguments:
          instruction: the instruction.
          position: of the result.
          ending: what nothing needs after the instruction.
        """
        match instruction:
            case Loop(node=node, ins=ins):
                entries = interface_of(node).entries
                carried = (e for e in entries if e.kind == "carry" and e.result == position)
                return [ins[e.operand] for e in carried]
            case Apply(node=node, ins=ins) if traits_of(node.op).scatters:
                return list(ins[:1])
            case _:
                return list(ending) if fuses(instruction, self.avals) else []


# ---- values that reach memory -------------------------------------------------------------------


Stored = tuple[frozenset[Register], Mapping[Register, int], Mapping[int, list[Register]]]
"""The values of a block that reach memory. First, all of these values. Second, for each register
the position of the last instruction that reads it, or that reads a value computed from it without
memory. Third, the values that XLA may compute before their place in the plan, by the position from
which they count."""


def fuses(instruction: Instruction, avals: Mapping[int, Any]) -> bool:
    """Whether XLA computes an instruction inside of those that read its result.

    Arguments:
      instruction: the instruction.
      avals: shapes of its values.
    """
    return (
        not instruction.bytes_sent
        if isinstance(instruction, Box)
        else _is_plain(instruction)
        and fuses_with_readers(
            instruction.node.op,
            [avals[s.value].shape for s in instruction.ins if isinstance(s, Register)],
            [avals[r.value].shape for r in instruction.outs],
        )
    )


def fuses_with_readers(op: str, sources: Sequence[Shape], results: Sequence[Shape]) -> bool:
    """Whether XLA computes an operation inside of those that read its result.

    Arguments:
      op: the operation.
      sources: shapes of its operands that are no constants.
      results: shapes of its results.
    """
    traits = traits_of(op)
    if traits.moves and not (traits.carries or traits.elementwise):
        # A lookup or a sort moves elements to places that only the data say.
        by_data = traits.indices or traits.scatters or traits.whole or traits.orderless
        if by_data or len(results) != 1 or len(sources) != 1:
            return False
        # A slice or padding is fused, a roll or reversal is not.
        return len({math.prod(shape) for shape in (*sources, *results)}) > 1
    return bool(
        traits.elementwise or traits.carries or traits.fusion != "partly" or traits.generates
    )


def stored_values(block: Block, memory: DeviceMemory) -> Stored:
    """What of a block reaches memory.

    Arguments:
      block: the block.
      memory: one of a device's memories, for shapes.
    """
    fusion = _Fusion(block, memory)
    early: dict[int, list[Register]] = defaultdict(list)
    joined: dict[Instruction, int] = {}
    numbered = enumerate(block.instructions)
    for at, instruction in ((at, i) for at, i in numbered if i not in fusion.passing):
        fusion.decide(instruction)
        for register in fusion.found.intersection(instruction.outs, fusion.padded):
            joining = fusion.joining(register)
            before = at if joining is None else joined.setdefault(joining, at)
            # A one-hot array waits for nothing but indices: it may be there when what it is added
            # to is computed.
            if before < at and instruction in fusion.one_hot:
                early[before].append(register)
    moved = dict[Instruction, int]()
    for register, at, inside in _scaled_gradients(block, fusion):
        early[at].append(register)
        moved |= dict.fromkeys(inside, at)
    last = _last_uses(block, fusion.found, moved)
    return frozenset(fusion.found), last, early


def _scaled_gradients(
    block: Block, fusion: "_Fusion"
) -> Iterator[tuple[Register, int, set[Instruction]]]:
    """The gradients that are products which an update continues, as `0.1 * gradient`. XLA computes
    them where the operands are there, not where the update stands.

    Yields:
      The gradient; that position; the instructions that XLA computes there.
    """
    places = {o: at for at, i in enumerate(block.instructions) for o in i.outs}

    def computed(one: Instruction) -> list[Instruction]:
        read = {s for s in one.ins if isinstance(s, Register) and s in places} - fusion.found
        return [block.instructions[places[s]] for s in read]

    for at, last in enumerate(block.instructions):
        if last not in fusion.fused or fusion.products.isdisjoint(last.ins) or _is_backward(last):
            continue
        inside = set(reached([last], computed))
        read = fusion.found & places.keys() & {s for one in inside for s in one.ins}
        ready = max((places[s] + 1 for s in read), default=at)
        if ready < at and any(map(_is_backward, inside)):
            for register in fusion.found.intersection(last.outs):
                yield register, ready, inside


class _Fusion:
    """Who reads the values of a block, and which of them are stored, one instruction after the
    other.

    Arguments:
      block: the block.
      memory: one of a device's memories, for shapes.

    Attributes:
      elements: gives the elements of a register on one device.
      avals: shapes of the values.
      fused: the instructions that XLA computes inside of their readers.
      passing: those whose results are their operands: barriers, and slices and paddings of a dim
        that is padded on the devices anyway.
      one_hot: those that add one element to each line of a constant, at the index that an operand
        gives. XLA compares the index with each position.
      readers: the instructions that read a register, also after such a slice.
      kept: what the block returns.
      padded: the registers that are read through a padding only.
      found: the values that are stored.
      costly: how many costly operations, one after the other, compute another value from those.
      products: the values that a product continues into.
    """

    def __init__(self, block: Block, memory: DeviceMemory) -> None:
        self.elements, self.avals = memory.elements, memory.avals
        self.found: set[Register] = set()
        self.costly: dict[Register, int] = {}
        self.products: set[Register] = set()
        self.fused = {i for i in block.instructions if fuses(i, self.avals)}
        self.kept = {s for s in block.outputs if isinstance(s, Register)}
        self.readers: dict[Register, dict[Instruction, None]] = defaultdict(dict)
        self.padded: set[Register] = set()
        self.passing = {i for i in block.instructions if _is_barrier(i) or self.is_identity(i)}
        computed = {o for i in self.fused for o in i.outs}
        self.one_hot = {
            i
            for i in block.instructions
            if isinstance(i, Apply) and i.ins and i.ins[0] in computed and is_one_hot(i, self.avals)
        }
        for instruction in reversed(block.instructions):
            through = instruction in self.passing and instruction in self.fused
            reading = self.readers[instruction.outs[0]] if through else {instruction: None}
            for source in (s for s in instruction.ins if isinstance(s, Register)):
                self.readers[source].update(reading)
            for register in instruction.outs:
                reading = self.readers[register]
                if reading and all(map(self.pads, reading)):
                    self.padded.add(register)

    def is_identity(self, instruction: Instruction) -> bool:
        """Whether a slice or padding leaves a device's part of its operand as it is."""
        if not isinstance(instruction, Apply) or instruction not in self.fused:
            return False
        traits = traits_of(instruction.node.op)
        sources = [s for s in instruction.ins if isinstance(s, Register)]
        if len(sources) != 1 or not traits.moves or traits.carries or traits.regroups:
            return False
        (result,) = instruction.outs
        return result not in self.kept and self.elements(sources[0]) == self.elements(result)

    def pads(self, reader: Instruction) -> bool:
        """Whether a reader pads its operand, or all that read its result do. An operation that
        joins its operand with another one does not: a sum is padded, not what is added up."""
        if reader not in self.fused:
            return False
        if isinstance(reader, Apply):
            traits = traits_of(reader.node.op)
            sources = [s for s in reader.ins if isinstance(s, Register)]
            if traits.moves and traits.fusion == "partly" and sources:
                return self.elements(sources[0]) < self.elements(reader.outs[0])
            if len(sources) > 1:
                return False
        return self.padded.issuperset(reader.outs)

    def joining(self, register: Register) -> Instruction | None:
        """The operation that joins a value with another one, where each value on the way there has
        one reader."""
        while len(self.readers[register]) == 1:
            (reader,) = self.readers[register]
            if sum(isinstance(s, Register) for s in reader.ins) > 1:
                return reader
            register = reader.outs[0]
        return None

    def is_widened(self, register: Register) -> bool:
        """Whether the only reader of a value casts it for several others, to a wider dtype."""
        (reader, *others) = self.readers[register]
        if (
            others
            or not isinstance(reader, Apply)
            or traits_of(reader.node.op).carries != "rounded"
        ):
            return False
        (result,) = reader.outs
        wide, narrow = (_jax.itemsize(self.avals[r.value].dtype) for r in (result, register))
        return wide > narrow and len(self.readers[result]) > 1

    def computes_operands(self, reader: Instruction) -> bool:
        """Whether XLA computes the operands of an instruction inside of it."""
        traits = (
            traits_of(reader.node.op) if isinstance(reader, Apply) and _is_plain(reader) else None
        )
        computes = traits is not None and (bool(traits.reduces) or traits.multiplies)
        return computes or reader in self.fused or reader in self.one_hot

    def decide(self, instruction: Instruction) -> None:
        """Enters the results of an instruction."""
        sources = [s for s in instruction.ins if isinstance(s, Register)]
        one_hot = instruction in self.one_hot
        fused = one_hot or instruction in self.fused
        traits = traits_of(instruction.node.op) if isinstance(instruction, Apply) else None
        starts = traits is not None and traits.contracts and _is_plain(instruction)
        continues = fused and not self.products.isdisjoint(sources)
        for register in instruction.outs:
            level = 0
            if fused:
                size = self.elements(register)
                large = [self.costly.get(s, 0) for s in sources if self.elements(s) >= size]
                is_costly = one_hot or (traits is not None and traits.costly)
                is_drawn = traits is not None and traits.generates == "draws"
                # Random bits take many operations.
                level = 2 if is_drawn else max(large, default=0) + is_costly
            if (fused or starts) and not self.is_stored(register, level, starts or continues):
                if level:
                    self.costly[register] = level
                if starts or continues:
                    self.products.add(register)
            else:
                self.found.add(register)

    def is_stored(self, register: Register, level: int, of_product: bool) -> bool:
        """Whether a value is stored that XLA could compute inside of its readers.

        Arguments:
          register: the value.
          level: as in `costly`.
          of_product: whether a product continues into it, or gives it.
        """
        reading = self.readers[register]
        several, inside = len(reading) > 1, self.fused.issuperset(reading)
        size = self.elements(register)
        return (
            register in self.kept
            or not reading
            or not all(map(self.computes_operands, reading))
            or (of_product and (several or not inside))
            # No product gives only a slice of its result.
            or (of_product and any(self.elements(o) < size for i in reading for o in i.outs))
            or (of_product and self.is_widened(register))
            or (level > 0 and register in self.padded)
            or (level > 1 and several and not inside)
        )


def is_one_hot(instruction: Apply, avals: Mapping[int, Any]) -> bool:
    """Whether an instruction adds one element to each line of its first operand.

    Arguments:
      instruction: the instruction.
      avals: shapes of its values.
    """
    if not traits_of(instruction.node.op).scatters or not _is_plain(instruction):
        return False
    whole, _, updates = instruction.ins
    if not (isinstance(whole, Register) and isinstance(updates, Register)):
        return False
    numbers = instruction.node.params["dimension_numbers"]
    return fills_lines(numbers, avals[whole.value].shape, avals[updates.value].shape)


def fills_lines(numbers: Any, shape: Shape, updates: Shape) -> bool:
    """Whether a scatter adds one element to each line of its first operand.

    Arguments:
      numbers: its `ScatterDimensionNumbers`.
      shape: of the first operand.
      updates: shape of what it adds.
    """
    line = math.prod(shape[d] for d in numbers.scatter_dims_to_operand_dims)
    return math.prod(updates) * line == math.prod(shape)


def _last_uses(
    block: Block, found: set[Register], moved: Mapping[Instruction, int]
) -> dict[Register, int]:
    """The position of the last instruction that needs each register; some run earlier."""
    last: dict[Register, int] = {}
    for place in reversed(range(len(block.instructions))):
        instruction = block.instructions[place]
        at = moved.get(instruction, place)
        barrier = _is_barrier(instruction)
        for n, source in enumerate(instruction.ins):
            if isinstance(source, Register):
                outs = instruction.outs[n : n + 1] if barrier else instruction.outs
                until = max([at, *(last.get(o, at) for o in outs if o not in found)])
                last[source] = max(last.get(source, 0), until)
    return last


def _is_plain(instruction: Instruction) -> bool:
    """Whether an instruction is one operation on shards, which sends nothing."""
    return (
        isinstance(instruction, Apply)
        and not instruction.sends
        and not instruction.node.regions
        and not instruction.node.is_barrier
    )


def _is_backward(instruction: Instruction) -> bool:
    return isinstance(instruction, Apply) and instruction.node.backward


def _is_barrier(instruction: Instruction) -> bool:
    return isinstance(instruction, Apply) and instruction.node.is_barrier
