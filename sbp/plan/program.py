"""The plan of a program: instructions with boundary types and cost. `sbp.jit(..).plan(..)` runs it,
prints it and prices it."""

from collections.abc import Iterator, Sequence, Set
from dataclasses import dataclass, field, replace
from typing import Any, Literal, NamedTuple

import numpy as np

from sbp import _jax
from sbp.annotations import annotate_p
from sbp.errors import ArgumentTypeError, Span, counted, position_text
from sbp.infer.cost import late_values, step_sends, step_stages
from sbp.infer.request import Request
from sbp.infer.space import Codes, Step, decode, local_shape, to_type
from sbp.infer.typing import Typing
from sbp.machine.mesh import MeshSpec
from sbp.plan.ir import (
    ORDERED_TYPES,
    Apply,
    Block,
    Box,
    ConstantRegister,
    Instruction,
    Loop,
    Register,
    Source,
    lower,
    types_read,
    walk,
)
from sbp.plan.memory import DeviceMemory, reused_inputs
from sbp.plan.saving import Repeat
from sbp.plan.verify import over_budget, verify, verify_budgets
from sbp.signatures import Sent
from sbp.trace.collectives import (
    KINDS,
    SHARD_MAP,
    collective_runs,
    handwritten_bytes,
    mesh_sizes,
    names_of,
)
from sbp.trace.graph import CONTROL_FLOW, Constant, Graph, Node, Operand, amount, trips_of
from sbp.types import NdSbp


@dataclass(frozen=True, slots=True, kw_only=True)
class Cost:
    """The cost of one call.

    Arguments:
      bytes_per_device: bytes that one device sends, each collective by its ring optimum, with loop
          trips and padding counted.
      seconds: modelled time of compute and communication on the mesh's hardware.
      peak_memory_bytes: bytes on one device at the fullest moment
        (`sbp.plan.memory.DeviceMemory.fullest`).
      host_memory_bytes: bytes that one device has in host memory at the fullest moment there.
    """

    bytes_per_device: float
    seconds: float
    peak_memory_bytes: float
    host_memory_bytes: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PlannedBox:
    """A conversion with its place in the plan.

    Arguments:
      box: the conversion.
      trips: executions per call.
      regions: the regions around it, outermost first: each node and the number of its body.
      block: the block that it is an instruction of.
    """

    box: Box
    trips: int
    regions: tuple[tuple[Node, int], ...]
    block: Block

    @property
    def bytes_per_device(self) -> float:
        """Bytes one device sends per call for this conversion."""
        return self.box.bytes_sent * self.trips

    def readers(self) -> list[tuple[Node, int]]:
        """The nodes that read the converted value, each with the position of the operand."""
        target: Source = self.box.target
        reading = (i for i in self.block.instructions if isinstance(i, Apply | Loop))
        return [(i.node, n) for i in reading for n, source in enumerate(i.ins) if source == target]

    def result_positions(self) -> list[int]:
        """The positions at which the block returns the converted value."""
        return [n for n, source in enumerate(self.block.outputs) if source == self.box.target]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Program:
    """A typed program written out as instructions.

    Arguments:
      typing: types and rows.
      block: the instructions.
      cost: the cost of one call.
      fullest: the temporaries that are live when memory is fullest.
      before: the plan before repeated conversions were removed; None where none were.
      removed: the repeated conversions that were removed from it.
      declined: the repeated conversions that run again, since their first results would take too
        much memory.
      faster: the cost of a faster plan that holds more than it is worth, where no memory limit
          forbids it.
    """

    typing: Typing = field(repr=False)
    block: Block = field(repr=False)
    cost: Cost
    fullest: tuple[Register, ...] = field(default=(), repr=False)
    before: "Program | None" = field(default=None, repr=False)
    removed: tuple[Repeat, ...] = field(default=(), repr=False)
    declined: tuple[Repeat, ...] = field(default=(), repr=False)
    faster: Cost | None = None

    def __deepcopy__(self, memo: dict[int, Any]) -> "Program":
        return self

    def __reduce__(self) -> Any:
        raise ArgumentTypeError(
            "pickle does not take plans of sbp; save the plan with plan.save(path), and a report as"
            " its text(), html() or to_json()"
        )

    @property
    def request(self) -> Request:
        """The program as it was traced, with everything that its plan was chosen by."""
        return self.typing.request

    @property
    def graph(self) -> Graph:
        """The program that runs: the traced one, or `plan.saving`'s without repeated
        conversions."""
        return self.typing.graph

    @property
    def mesh(self) -> MeshSpec:
        """The mesh."""
        return self.typing.mesh

    def with_typing(self, **fields: Any) -> "Program":
        """The program with other fields of its typing."""
        return replace(self, typing=replace(self.typing, **fields))

    def within(self, request: Request) -> "Program | None":
        """The plan as that of a request with budgets; None where they forbid one of its
        collectives. It has no faster plan, because the budgets may forbid the collectives of that
        plan."""
        request = replace(self.request, budgets=request.budgets)  # it may recompute
        if any(over_budget(self.block, request)):
            return None
        return replace(self.with_typing(request=request), faster=None)

    @property
    def fits(self) -> bool:
        """Whether it fits the memory limit."""
        limit = self.request.memory_limit
        return limit is None or self.cost.peak_memory_bytes <= limit

    @property
    def reused(self) -> frozenset[int]:
        """The positions of the donated inputs whose buffers outputs take."""
        return frozenset(reused_inputs(self.typing, self.block))

    @property
    def input_types(self) -> tuple[NdSbp, ...]:
        """The type of each flat input."""
        return tuple(to_type(r.codes, self.mesh) for r in self.block.inputs)

    @property
    def output_types(self) -> tuple[NdSbp, ...]:
        """The type of each flat output."""
        return tuple(to_type(c, self.mesh) for c in self.typing.outputs)

    def output_sum(self, position: int) -> str | None:
        """The `reduce_dtype` of an output, by its position; None for none."""
        operand = self.graph.outputs[position]
        chosen = self.typing.sums.get(operand) if isinstance(operand, int) else None
        return chosen or self.request.reduce_dtype

    @property
    def unordered_values(self) -> int:
        """The number of values that are read in more than `ir.ORDERED_TYPES` other types. One
        order of their conversions was priced."""
        return sum(
            len(types.keys() - {self.typing.values[value]}) > ORDERED_TYPES
            for value, types in types_read(self.typing).items()
        )

    def __str__(self) -> str:
        # Each operation, each step of a conversion and each region has its own line. Registers are
        # numbered in the order of their definition. A converted value keeps its number and gets one
        # prime for each conversion: `%3'`.
        axes = "".join(f"{name}={size} " for name, size in self.mesh.axes)
        sent = _figure(float(self.cost.bytes_per_device))
        body = _Writer(self.mesh, self.graph).body(self.block, "  ", self.graph.input_names)
        head = f"plan {axes}boxing={self.request.boxing} {sent} B per device {{"
        return "\n".join([head, *body, "}"])

    def boxes(self) -> Iterator[PlannedBox]:
        """All conversions in program order, with their trips."""
        return (
            PlannedBox(box=box, trips=trips, regions=regions, block=block)
            for box, trips, regions, block in walk(self.block)
            if isinstance(box, Box)
        )

    def kernels(self) -> Iterator[tuple[Apply, int]]:
        """All operations whose kernels send something, in program order, each with its executions
        per call."""
        return ((i, n) for i, n, *_ in walk(self.block) if isinstance(i, Apply) and i.sends)

    def written_by_hand(self) -> list[Node]:
        """The regions written by hand, in program order."""
        return [node for node in self.graph.walk() if node.op == SHARD_MAP]


def resolve(typing: Typing) -> Program:
    """Typing -> Program: lowers, verifies and prices a typing.

    Raises:
      SbpInternalError: where the instructions do not agree with the typing, or a budget forbids a
          collective.
    """
    block = lower(typing)
    verify(block)
    verify_budgets(block, typing.graph_request)
    held, fullest = DeviceMemory(typing, in_host=False).fullest(block)
    return Program(
        typing=typing,
        block=block,
        cost=Cost(
            bytes_per_device=sum(map(bytes_sent, block.instructions), 0.0),
            seconds=typing.seconds - typing.saved_seconds,
            peak_memory_bytes=held,
            host_memory_bytes=DeviceMemory(typing, in_host=True).fullest(block)[0]
            if any(map(_jax.in_host, typing.graph.avals.values()))
            else 0.0,
        ),
        fullest=fullest,
    )


def bytes_sent(instruction: Instruction) -> float:
    """Bytes one device sends when an instruction runs once, with loop trips counted. Of the
    branches of a `cond`, the one that sends most counts."""
    match instruction:
        case Loop(node=node, blocks=blocks):
            return amount(node, [sum(map(bytes_sent, b.instructions), 0.0) for b in blocks])
        case Apply(node=node) if node.op == SHARD_MAP:
            return handwritten_bytes(node.params["body"], mesh_sizes(node))
        case Apply() | Box():
            return instruction.bytes_sent


# ---- text ---------------------------------------------------------------------------------------
# The text of a plan.


def change_text(step: Step, stages: Sequence[int] = ()) -> str:
    """The atoms before and after a step of a conversion, such as `P(sum) -> S(0)`, and how it sums
    where the user chose a wider dtype or where it runs in several stages.

    Arguments:
      step: the step.
      stages: sizes of the groups of its stages; empty where it has none, or they are not shown.
    """
    before, after = (
        ", ".join(dict.fromkeys(repr(decode(codes[i])) for i in step.mesh_axes))
        for codes in (step.source, step.target)
    )
    return f"{before} -> {after}{''.join(f' ({how})' for how in _ways(step, stages))}"


def _ways(step: Step, stages: Sequence[int]) -> list[str]:
    """How a step runs, where that is not as usual: a reduce-scatter in several stages is `in stages
    of 2 and 4`, and a sum in a wider dtype is `float32 along dim 0`, or `native: no dim for
    float32`."""
    wide = [
        f"native: no dim for {how.dtype}" if how.dim is None else f"{how.dtype} along dim {how.dim}"
        for how in (step.wide,)
        if how
    ]
    return [*wide, f"in stages of {' and '.join(map(str, stages))}"] if stages else wide


def place(span: Span) -> str:
    """A source position as `file:line`."""
    return position_text(span.file, span.line)


def node_place(node: Node) -> str:
    """The source line of a node as a phrase: `at file:line`; `in the gradient of file:line` for a
    node of a backward pass."""
    return (
        "in generated code"
        if node.span is None
        else f"in the gradient of {place(node.span)}"
        if node.backward
        else f"at {place(node.span)}"
    )


def reader_text(reader: Node, where: str) -> str:
    """The reader of a conversion as a phrase, with its place; the pin of an argument or a result
    has none."""
    is_given = reader.op == annotate_p.name and reader.span is None
    return "in_types or out_types" if is_given else f"{reader.name} {where}"


def shape_text(aval: Any, codes: Codes | None = None, sizes: Sequence[int] = ()) -> str:
    """Dtype and shape in short form, such as `f32[8,16]`; `f32<host>[8,16]` in host memory.

    Arguments:
      aval: shape and dtype.
      codes: a type; with it, the shape is that of one device's shard.
      sizes: sizes of the mesh axes, needed with `codes`.

    >>> shape_text(_jax.empty_aval((8, 16), np.dtype("float32")))
    'f32[8,16]'
    """
    name = str(aval.dtype)
    for long, short in (("float", "f"), ("uint", "u"), ("int", "i"), ("complex", "c")):
        name = name.replace(long, short)
    shape = aval.shape if codes is None else local_shape(aval.shape, codes, sizes)
    name += "<host>" if _jax.in_host(aval) else ""
    return f"{name}[{','.join(map(str, shape))}]"


def constant_text(constant: Constant) -> str:
    """A constant as an operand: the value of a scalar, the shape of an array."""
    aval, shape = constant.aval, shape_text(constant.aval)
    is_plain = not aval.shape and not _jax.is_extended(aval.dtype)
    value = np.asarray(constant.value).item() if is_plain else None
    known = isinstance(value, bool | int | float)
    return f"{value!r}:{shape[:-2]}" if known else f"const:{shape}"


def _figure(value: float) -> str:
    return str(int(value)) if value == int(value) else repr(value)


class _Writer:
    def __init__(self, mesh: Any, graph: Any) -> None:
        self.mesh, self.graph = mesh, graph
        self.numbers: dict[int, int] = {}
        self.primes: dict[int, int] = {}
        self.names: dict[Register, str] = {}

    def define(self, register: Register, *, shape: bool = True) -> str:
        """A register where it is defined: its name, its shape, its type."""
        value = register.value
        number = self.numbers.setdefault(value, len(self.numbers))
        count = self.primes[value] = self.primes.get(value, -1) + 1
        name = self.names[register] = f"%{number}{chr(39) * count}"
        text = f"{shape_text(self.graph.avals[value])} " if shape else ""
        return f"{name}: {text}{to_type(register.codes, self.mesh)!r}"

    def operand(self, source: Source) -> str:
        if isinstance(source, ConstantRegister):
            t = to_type(source.codes, self.mesh)
            return constant_text(source.constant) + (f"{{{t!r}}}" if any(source.codes) else "")
        return self.names[source]

    def body(self, block: Block, indent: str, input_names: Sequence[str] = ()) -> Iterator[str]:
        """The lines of a program, or of the body of a region."""
        names = dict(zip(block.inputs, input_names, strict=False))
        for register in block.inputs:
            comment = f"  # {names[register]}" if names.get(register) else ""
            yield f"{indent}input {self.define(register)}{comment}"
        for instruction in block.instructions:
            if isinstance(instruction, Box):
                yield from (indent + line for line in self.conversions(instruction))
                continue
            node, operands = instruction.node, ", ".join(map(self.operand, instruction.ins))
            results = ", ".join(map(self.define, instruction.outs))
            results += " = " if results else ""
            where = node_place(node)
            if isinstance(instruction, Loop):
                trips = counted(trips_of(node), "trip")
                yield f"{indent}{results}{node.op}({operands})  {trips}  # {where}"
                for inner in instruction.blocks:
                    yield indent + "{"
                    yield from self.body(inner, indent + "  ")
                    yield indent + "}"
            else:
                by_axis = zip(self.mesh.names, instruction.row.kernels, strict=False)
                kernels = ", ".join(f"{a}={k}" for a, k in by_axis if k not in ("", "local"))
                call = f"{node.op}{f'<{kernels}>' if kernels else ''}({operands})"
                sent = f"  {_figure(instruction.bytes_sent)} B" if instruction.bytes_sent else ""
                where = f"{node.title} {where}" if node.title else where
                yield f"{indent}{results}{call}{sent}  # {where}"
        yield f"{indent}return {', '.join(map(self.operand, block.outputs))}".rstrip()

    def conversions(self, box: Box) -> Iterator[str]:
        """A line for each step of a conversion: a collective, or a local slice, mask or pad."""
        reader = box.reader
        needed = f"by {reader_text(reader, node_place(reader))}" if reader else "at the end"
        operand = self.operand(box.source)
        for step in box.steps:
            register = Register(box.target.value, step.target)
            stages = step_stages(step, self.graph.avals[box.target.value], self.mesh)
            axes = ", ".join(self.mesh.names[i] for i in step.mesh_axes)
            how = "; ".join((axes, *_ways(step, stages)))
            sent = _figure(float(step.bytes_sent))
            result = self.define(register, shape=False)
            yield f"{result} = {step.kind}[{how}]({operand})  {sent} B  # needed {needed}"
            operand = self.names[register]


# ---- traffic ------------------------------------------------------------------------------------
# What a plan sends: one list of its collectives, which every report, comparison and benchmark
# groups; and the pass of a step that each instruction belongs to.


Phase = Literal["forward", "backward", "update"]
PHASES: tuple[Phase, ...] = ("forward", "backward", "update")


class Send(NamedTuple):
    """A collective of a plan, with all its runs.

    Attributes:
      kind: `all_reduce`, `all_gather`, `reduce_scatter`, `all_to_all`, `permute` or `broadcast`.
      mesh_axes: names of the mesh axes that it runs over.
      change: the atoms before and after a conversion; of another collective, where it runs.
      runs: per call.
      bytes: that one device sends per call.
      node: the operation that it belongs to; None for a result that is an argument.
      phase: the pass of that operation.
      maker: the operation that makes the value, or that sends it; in a region written by hand the
        collective itself; None for an argument.
      reader: the first operation that reads the converted value; None where it is returned.
      regions: the loops and branches around it, outermost first.
      planned, step: the conversion and its step; None for other collectives.
      kernel: the kernel that sends; empty for other collectives.
    """

    kind: str
    mesh_axes: tuple[str, ...]
    change: str
    runs: int
    bytes: float
    node: Node | None
    phase: Phase
    maker: Node | None
    reader: Node | None
    regions: tuple[Node, ...]
    planned: PlannedBox | None = None
    step: Step | None = None
    kernel: str = ""

    @property
    def axes(self) -> str:
        """The mesh axes in words."""
        return ", ".join(self.mesh_axes)

    @property
    def is_returned(self) -> bool:
        """Whether it converts a result of the program."""
        return self.planned is not None and self.reader is None and not self.regions

    @property
    def reduces(self) -> bool:
        """Whether it ends a partial value."""
        return self.step is not None and _reduces(self.step.source, self.step.target)


def sends(program: Program) -> tuple[Send, ...]:
    """The collectives of a plan in program order: of conversions, of kernels, and of regions
    written by hand. All branches of a `cond` are there.

    Arguments:
      program: the plan.
    """
    return tuple(send for send in _sends(program) if send.bytes or not send.runs)


def _sends(program: Program) -> Iterator[Send]:
    names, mesh, phases = program.mesh.names, program.mesh, Phases(program.graph)
    for i, runs, regions, block in walk(program.block):
        around = tuple(node for node, _ in regions)
        node, phase = phases.place(i, around)
        maker, reader = (i.maker, i.reader) if isinstance(i, Box) else (i.node, None)
        here = Send("", (), "", runs, 0.0, node, phase, maker, reader, around)
        if isinstance(i, Box):
            planned = PlannedBox(box=i, trips=runs, regions=regions, block=block)
            aval = program.graph.avals[i.target.value]
            for step in i.steps:
                change = change_text(step, step_stages(step, aval, mesh))
                over = tuple(names[k] for k in step.mesh_axes)
                for sent in step_sends(step, aval, mesh):
                    yield _collective(here, sent, over, change, planned=planned, step=step)
        elif i.node.op == SHARD_MAP:
            for inner, rounds, sent_bytes in collective_runs(i.node):
                sent, over = Sent(KINDS[inner.op], sent_bytes, rounds), names_of(inner)
                yield _collective(here, sent, over, "in a manual region", maker=inner)
        else:
            for k, sent in i.sends:
                inside, kernel = f"inside {i.node.name}", i.row.kernels[k]
                yield _collective(here, sent, (names[k],), inside, kernel=kernel)


def _collective(
    here: Send, sent: Sent, mesh_axes: tuple[str, ...], change: str, **more: Any
) -> Send:
    """A collective at the place of `here`, which runs as often."""
    return here._replace(
        kind=sent.kind,
        mesh_axes=mesh_axes,
        change=change,
        runs=here.runs * sent.rounds,
        bytes=here.runs * sent.bytes,
        **more,
    )


class Phases:
    """The passes of a step.

    Operations of a gradient, and operations that rematerialization repeats for it, are `backward`.
    Operations outside of a gradient that compute with gradients are `update`: those of an
    optimizer, sums of gradients over microbatches, and operations that only these read. All others
    are `forward`, and so is a program without a gradient.

    Attributes:
      of: the pass of each node, by its id. Nodes of regions are there too.
    """

    def __init__(self, graph: Graph) -> None:
        self.of: dict[int, Phase] = {}
        self._visit(graph, late_values(graph))

    def place(
        self, instruction: Instruction, around: Sequence[Node] = ()
    ) -> tuple[Node | None, Phase]:
        """The operation that an instruction belongs to, and its pass.

        A conversion belongs to what reads it, or else to what makes it, or to the region that
        returns it; the reduction of a gradient for the update belongs to the gradient. A loop or
        branch has the pass of its first operation.

        Arguments:
          instruction: the instruction.
          around: the loops and branches around it, outermost first.
        """
        if not isinstance(instruction, Box):
            return instruction.node, self._first(instruction.node)
        maker, source, target = instruction.maker, instruction.source, instruction.target
        node = instruction.reader or maker or next(reversed(around), None)
        phase: Phase = "forward" if node is None else self._first(node)
        if phase == "update" and maker is not None and _reduces(source.codes, target.codes):
            of_maker = [maker, *(n for region in maker.regions for n in region.walk())]
            if any(n.backward for n in of_maker):
                return maker, "backward"
        return node, phase

    def _first(self, node: Node) -> Phase:
        regions = node.regions if node.op in CONTROL_FLOW else ()
        inner = next((n for region in regions for n in region.nodes), None)
        return self.of[node.id] if inner is None else self._first(inner)

    def _visit(self, graph: Graph, late: Set[int]) -> None:
        """Finds the passes of a graph's nodes, the last one first: what only the update reads, such
        as the decay of old moments, belongs to it."""
        readers: dict[Operand, set[Phase]] = {v: {"forward"} for v in graph.outputs}
        for node in reversed(graph.nodes):
            reading = {phase for v in node.outputs for phase in readers.get(v, ())}
            is_update = reading == {"update"} or not late.isdisjoint(node.outputs)
            phase: Phase = "backward" if node.backward else "update" if is_update else "forward"
            self.of[node.id] = phase
            for region in node.regions:
                self._visit(region, late)
                if phase != "forward" and late.isdisjoint(node.outputs):
                    self.of.update((inner.id, phase) for inner in region.walk())
            for operand in node.inputs:
                readers.setdefault(operand, set()).add(phase)


def _reduces(before: Codes, after: Codes) -> bool:
    return any(a < 0 <= b for a, b in zip(before, after, strict=True))
