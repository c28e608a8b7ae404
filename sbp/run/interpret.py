"""The interpreter: runs a block's instructions on the shards of one device, inside `shard_map`."""

import functools
from collections import Counter
from collections.abc import Callable, Iterator, Sequence, Set
from contextlib import contextmanager, nullcontext
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import AxisType, NamedSharding

from sbp import _jax
from sbp.annotations import annotate_p
from sbp.errors import SbpInternalError
from sbp.infer.space import Codes, Step, local_shape
from sbp.infer.typing import Typing
from sbp.machine.hardware import TILE, fills_tiles
from sbp.plan.ir import (
    Apply,
    Block,
    Box,
    ConstantRegister,
    Instruction,
    Loop,
    Register,
    Source,
)
from sbp.plan.memory import DeviceMemory, stored_values
from sbp.run.boxing import run_steps, split_axes
from sbp.signatures import LocalContext, rule_for, traits_of
from sbp.signatures.kernels.shards import in_rows
from sbp.signatures.region import REGION_OPS, parts, pick_p
from sbp.signatures.rewrites import looks_up, rounds
from sbp.signatures.rule import SplitAxes
from sbp.trace.collectives import SHARD_MAP, evaluate, run_regions
from sbp.trace.graph import LOOPS, SCAN, Graph, Node, interface_of
from sbp.trace.scopes import scope_within

# ---- scans --------------------------------------------------------------------------------------
# A scan whose stacked results start as memory that nothing has written.


def scan_in_place(
    turn: Callable[[Any, Any], tuple[Any, Any]],
    carry: Any,
    slices: Any,
    made: Sequence[tuple[Sequence[int], Any]],
    length: int,
    reverse: bool = False,
) -> tuple[Any, Any]:
    """As `lax.scan`, which writes zeros into the stacks of results before each turn writes its part
    of them. Here the stacks begin as memory that nothing has written. `made` has the shape and the
    dtype of each result of a turn."""

    def one(state: Any) -> Any:
        number, carry, stacks = state
        at = length - 1 - number if reverse else number
        parts = tuple(
            lax.dynamic_index_in_dim(x, at, keepdims=False, allow_negative_indices=False)
            for x in slices
        )
        carry, results = turn(carry, parts)
        stacks = tuple(
            lax.dynamic_update_index_in_dim(stack, x, at, 0, allow_negative_indices=False)
            for stack, x in zip(stacks, results, strict=True)
        )
        return number + 1, carry, stacks

    def empty() -> Any:
        return tuple(lax.empty((length, *shape), dtype) for shape, dtype in made)

    # The TPU compiler does not see that nothing reads the zeros (`benchmarks.scan_loops`). It may
    # take empty memory at the start of the program, and hold it through all that runs before
    # (`benchmarks.gshard_bytes`: 4.59 GiB in place of 4.02). A conditional cannot run before its
    # predicate, here whether a number of the carry is NaN. Both branches do the same.
    floats = [x for x in carry if jnp.issubdtype(x.dtype, jnp.floating) and x.size]
    if floats:
        number = lax.slice(floats[0], (0,) * floats[0].ndim, (1,) * floats[0].ndim).reshape(())
        stacks = lax.cond(number != number, lambda: empty(), lambda: empty())
    else:
        stacks = empty()
    _, carry, stacks = lax.while_loop(lambda state: state[0] < length, one, (0, carry, stacks))
    return carry, stacks


# ---- layouts ------------------------------------------------------------------------------------
# Which exchanged values meet arguments of the program, element by element.


def meets_arguments(graph: Graph, block: Block) -> frozenset[Register]:
    """The results of collectives that elementwise operations combine with two or more arguments, or
    with one where the program returns them.

    An argument is laid out row by row if its last two dims fill tiles (`hardware.fills_tiles`). The
    TPU compiler lays the result of a collective out as what it comes from, a gradient of a matrix
    often column by column, and copies every array that meets it into that layout: a weight and its
    moments, from the start of the program to its end. Where it meets one argument only, as with
    SGD, laying the result out by rows takes as long.

    Arguments:
      graph: the program.
      block: the program, written out.
    """
    # What each result of a collective meets: arguments, and itself where it is returned.
    met: dict[Register, set[Register]] = {}
    returned = set(block.outputs)
    arguments: dict[Register, frozenset[Register]] = {r: frozenset([r]) for r in block.inputs}
    received: dict[Register, frozenset[Register]] = {}
    for instruction in block.instructions:
        if isinstance(instruction, Box):
            source, target = instruction.source, instruction.target
            if instruction.bytes_sent:
                received[target], met[target] = frozenset([target]), {target} & returned
            elif source in arguments:
                arguments[target] = arguments[source]
        elif isinstance(instruction, Apply) and traits_of(instruction.node.op).elementwise:
            shape = graph.avals[instruction.outs[0].value].shape
            ins = [
                s
                for s in instruction.ins
                if isinstance(s, Register) and graph.avals[s.value].shape == shape
            ]
            own = frozenset[Register]().union(*(arguments.get(s, ()) for s in ins))
            others = frozenset[Register]().union(*(received.get(s, ()) for s in ins))
            for result in others:
                met[result] |= own
            arguments |= dict.fromkeys(instruction.outs, own) if own else {}
            received |= dict.fromkeys(instruction.outs, others) if others else {}
    return frozenset(result for result, those in met.items() if len(those) > 1)


# ---- lookups ------------------------------------------------------------------------------------
# If a program casts a table and reads few rows of the result, sbp casts these rows instead.


def late_casts(memory: DeviceMemory, block: Block) -> frozenset[Register]:
    """The results of casts whose only readers are lookups of no more elements, in the type of the
    cast.

    Arguments:
      memory: the device's own memory, for elements of shards.
      block: a block of the program.
    """
    graph = memory.typing.graph
    cast = {
        i.outs[0]
        for i in block.instructions
        if isinstance(i, Apply) and rounds(graph, i.node) and isinstance(i.ins[0], Register)
    }
    read_otherwise = {
        source
        for instruction in block.instructions
        for position, source in enumerate(instruction.ins)
        if isinstance(source, Register)
        and source in cast
        and not (
            isinstance(instruction, Apply)
            and looks_up(instruction.node, position)
            and memory.elements(instruction.outs[0]) <= memory.elements(source)
        )
    }
    return frozenset(cast.difference(read_otherwise, block.outputs))


# ---- stacks -------------------------------------------------------------------------------------
# Values that one loop stacks for a later loop. They are stored as matrices that fill the tiles of a
# TPU.


def stacks_of_matrices(block: Block, kept: Set[int]) -> frozenset[Register]:
    """The stacks of a program that are held as stacks of matrices.

    The TPU compiler lays out an array whose dim before the last is short in tiles of few rows, of
    which padding takes a part: half of each tile for the tokens of two slots in bfloat16. A matrix
    with the same rows, one below the other, has no padding.

    Arguments:
      block: the program, written out.
      kept: the values that the plan stacks for a later loop and that the user's program does not
        have.
    """
    loops = [(i, interface_of(i.node)) for i in block.instructions if isinstance(i, Loop)]
    made = {i.outs[e.result] for i, at in loops for e in at.exits if e.kind == "stacked"}
    sliced = {(i, e.operand) for i, at in loops for e in at.entering("slice")}
    reads = ((i, n, s) for i in block.instructions for n, s in enumerate(i.ins))
    others = {*block.outputs, *(s for i, n, s in reads if (i, n) not in sliced)}
    return frozenset(r for r in made.difference(others) if r.value in kept)


def _with_matrices(loop: Loop, values: Sequence[Any], stacks: Set[Register]) -> list[Any]:
    """The outputs of a scan's body. An output that a stack of matrices takes is a matrix."""
    narrow = {
        e.output
        for e in interface_of(loop.node).leaving(0)
        if e.kind == "stacked" and loop.outs[e.result] in stacks
    }
    return [_matrix(x) if n in narrow else x for n, x in enumerate(values)]


def _matrix(x: Any) -> Any:
    """An array with all dims before the last as one, where those fill tiles and the last two of
    them would not."""
    matrix = (x.size // x.shape[-1], x.shape[-1]) if x.ndim > 2 and x.size else x.shape
    short = x.ndim > 2 and x.shape[-2] < TILE[0]
    return x.reshape(matrix) if short and fills_tiles(matrix) else x


# ---- order --------------------------------------------------------------------------------------
# Which values are computed before a loop starts.


def computed_before(memory: DeviceMemory, block: Block) -> dict[int, tuple[Register, ...]]:
    """For each loop, by the id of its node: the values that are computed before it and read after
    it, and an array that it reads. A barrier over them puts their computation before the loop.

    The TPU compiler may compute a value that a loop does not read behind the loop, where it is
    read. The operands of the value are in memory while the loop runs. For a shard of a gradient,
    this is the whole gradient (`tests/tpu/test_compiled_memory.py`). For the loss, these are the
    logits.

    A value is computed before the loop if it has fewer bytes than an array that it frees. The plan
    must not need this array when the loop starts, and must have it before the loop anyway: because
    something else reads it, too, or because a collective makes it smaller. An array that is
    computed for one value alone may wait with the value. For example, the sum of a lookup's
    gradient needs more memory than its operands (`python -m benchmarks.gshard_bytes`). The operand
    of a collective is computed before the loop, and not its result, if the operand has fewer bytes.

    Arguments:
      memory: the device's own memory.
      block: the instructions of the program, or of a region.
    """
    loops = [(at, i) for at, i in enumerate(block.instructions) if isinstance(i, Loop)]
    if not loops:
        return {}
    found: dict[int, tuple[Register, ...]] = {}
    every = _values_before(memory, block, [at for at, _ in loops])
    for (_, loop), values in zip(loops, every, strict=True):
        held = [r for r in values if r not in loop.ins]
        read = [s for s in loop.ins if isinstance(s, Register) and _is_tied(memory.avals[s.value])]
        if held and read:
            found[loop.node.id] = (*held, *read[:1])
    return found


def _values_before(
    memory: DeviceMemory, block: Block, loops: Sequence[int]
) -> Iterator[list[Register]]:
    """For each loop, the values to compute between the loop before and this one.

    Arguments:
      memory, block: as `computed_before` takes them.
      loops: the positions of the loops.
    """
    size, outputs = memory.size, (s for s in block.outputs if isinstance(s, Register))
    stored, last, _ = stored_values(block, memory)
    last = {**last, **dict.fromkeys(outputs, len(block.instructions))}
    readers = Counter(s for i in block.instructions for s in i.ins)

    def freed_bytes(instruction: Instruction, source: Register) -> float:
        """Bytes that an instruction frees, as the last reader of a value that would be there
        without it, or as a collective that makes it smaller."""
        is_freed = (
            size(instruction.target) < size(source)
            if isinstance(instruction, Box)
            else readers[source] > 1
        )
        return size(source) if is_freed and source in stored else 0.0

    for before, loop in zip([-1, *loops], loops, strict=False):
        needed: dict[Register, float] = {}  # bytes that a value frees
        found: dict[Register, None] = {}
        for instruction in block.instructions[before + 1 : loop]:
            sources = [s for s in instruction.ins if isinstance(s, Register)]
            ending = [s for s in sources if last[s] < loop]
            freed = (max(freed_bytes(instruction, s), needed.get(s, 0.0)) for s in ending)
            most = max(freed, default=0.0)
            for register in instruction.outs:
                needed[register] = most
                if last.get(register, 0) > loop and register in stored:
                    # Of a conversion, the smaller one of operand and result.
                    ends = (instruction.source,) if isinstance(instruction, Box) else ()
                    kept = min((*ends, register), key=size)
                    if needed.get(kept, 0.0) > size(kept):
                        found[kept] = None
        yield list(found)


def _is_tied(aval: Any) -> bool:
    """Whether a barrier may hold an operand of a loop: floats in device memory. Of a counter, XLA
    would no longer see that it starts at a constant."""
    return (
        not _jax.is_extended(aval.dtype)
        and not _jax.in_host(aval)
        and bool(jnp.issubdtype(aval.dtype, jnp.floating))
        and 0 not in aval.shape
    )


# ---- turns of a loop ----------------------------------------------------------------------------
# Casts of the slices that a loop takes. They stay inside the loop.


def kept_casts(graph: Graph, loop: Loop, number: int, received: Set[Source]) -> frozenset[Register]:
    """The results of casts from float32 to bfloat16 whose operands are slices that the loop takes,
    or such slices in another layout. No collective sends them before the cast.

    The TPU compiler moves such a cast ahead of the loop. There it casts the whole stack: that takes
    about three times as long as its bytes, and the result lies in memory as long as the loop runs.
    In the loop, a product casts a slice as it reads it (`python -m benchmarks.scan_loops`). The
    compiler does not move `lax.reduce_precision`, and a cast of its result gives the same number.

    sbp keeps casts only in a loop that is in no other loop. If a loop runs once for each
    microbatch, one cast of its weights ahead of the outer loop serves all microbatches. sbp does
    not keep the cast of a stack that comes from a collective. There the compiler moves the cast
    ahead of the collective, which then sends half of the bytes.

    Arguments:
      graph: the program, for dtypes.
      loop: a loop.
      number: of the body among its blocks.
      received: the values around the loop that come from a collective.
    """
    block = loop.blocks[number]
    moved = {
        block.inputs[position]
        for entry in interface_of(loop.node).entering("slice")
        for region, position in entry.inputs
        if region == number and loop.ins[entry.operand] not in received
    }
    found: set[Register] = set()
    for instruction in block.instructions if moved else ():
        passed = zip(instruction.ins, instruction.outs, strict=False)
        if isinstance(instruction, Box):
            moved |= {r for s, r in passed if s in moved and not instruction.bytes_sent}
        elif isinstance(instruction, Apply) and not moved.isdisjoint(instruction.ins):
            node = instruction.node
            if _to_bfloat16(graph, node):
                found.update(instruction.outs)
            elif node.is_barrier or _moves(node):
                moved |= {r for s, r in passed if s in moved}
    return frozenset(found)


def received_values(block: Block) -> frozenset[Register]:
    """The values of a block that come from a collective, also where they were moved afterwards."""
    found: set[Register] = set()
    for instruction in block.instructions:
        match instruction:
            case Box(source=source, target=target):
                found |= {target} if instruction.bytes_sent or source in found else set()
            case Apply(node=node) if _moves(node) and not found.isdisjoint(instruction.ins):
                found.update(instruction.outs)
            case _:
                pass
    return frozenset(found)


def _moves(node: Node) -> bool:
    """Whether a node changes no number of its operand."""
    return node.op == annotate_p.name or traits_of(node.op).carries in ("arranged", "copied")


def _to_bfloat16(graph: Graph, node: Node) -> bool:
    """Whether a node casts float32 to bfloat16, which has as many exponents: there are no numbers
    that one of the two operations makes zero and the other does not."""
    return (
        rounds(graph, node)
        and graph.aval(node.inputs[0]).dtype == np.float32
        and graph.avals[node.outputs[0]].dtype == jnp.bfloat16
    )


# ---- instructions -------------------------------------------------------------------------------


def _off_explicit_axes(value: Any) -> Any:
    """A constant as JAX takes it in a region: JAX refuses arrays on Explicit axes."""
    sharding = getattr(value, "sharding", None)
    if not isinstance(sharding, NamedSharding) or AxisType.Explicit not in sharding.mesh.axis_types:
        return value
    if _jax.is_extended(value.dtype):
        with _jax.without_context_mesh():
            return _jax.wrap_key(np.asarray(_jax.words(value)), value.dtype)
    return np.asarray(value)


class Tracing:
    """How JAX traces an instruction and a scan in place."""

    def called(
        self, instruction: Instruction, run: Callable[..., list[Any]], args: list[Any]
    ) -> list[Any]:
        """Runs an instruction by its function, on the function's arguments."""
        return run(*args)

    def scan(self, *args: Any, length: int, reverse: bool, unroll: int) -> tuple[Any, Any]:
        """A scan in place, by the arguments of `lax.scan` behind the shape and the dtype of each
        result of a turn."""
        assert unroll == 1
        made, turn, carry, slices = args
        return scan_in_place(turn, carry, slices, made, length, reverse)


class Interpreter:
    """Runs blocks of one plan.

    Arguments:
      typing: the types of the program, for shapes and the mesh.
      tracing: how instructions and scans are traced.
    """

    def __init__(self, typing: Typing, tracing: Tracing) -> None:
        self.tracing = tracing
        self.graph, self.mesh = typing.graph, typing.mesh
        self.memory = DeviceMemory(typing, in_host=False)
        # What the plan stacks for the backward pass and the user's program does not.
        self.kept = typing.graph.avals.keys() - typing.request.graph.avals.keys()
        self.stacks: frozenset[Register] = frozenset()  # what is held as stacks of matrices
        self.rows: frozenset[Register] = frozenset()  # what is laid out row by row
        self.scope = ""  # the name stack of the region that runs
        self.loops = 0  # how many loops are around it

    @contextmanager
    def at(self, node: Node) -> Iterator[None]:
        """Operations inside carry a node's line and settings, and its name stack within the region
        that runs."""
        scope = scope_within(node.scope, self.scope)
        with _jax.source_context(node.source_info, scope), _jax.holding(node.params):
            yield

    def program(self, block: Block, args: Sequence[Any]) -> list[Any]:
        """Runs the whole program on the shards of its arguments; returns those of its results."""
        if self.mesh.hardware.platform == "tpu":
            self.rows = meets_arguments(self.graph, block)
            self.stacks = stacks_of_matrices(block, self.kept)
        return self.block(block, args)

    def block(
        self, block: Block, args: Sequence[Any], kept: frozenset[Register] = frozenset()
    ) -> list[Any]:
        """Runs a block on the shards of its inputs; returns the shards of its outputs.

        Arguments:
          block: the block.
          args: its inputs.
          kept: results of casts to bfloat16 that stay in a loop (`sbp.run.interpret`).
        """
        env: dict[Register, Any] = dict(zip(block.inputs, args, strict=True))
        late, early = late_casts(self.memory, block), computed_before(self.memory, block)

        def read(source: Source) -> Any:
            return self.constant(source) if isinstance(source, ConstantRegister) else env[source]

        def run(instruction: Instruction, *args: Any) -> list[Any]:
            match instruction:
                case Apply():
                    results = list(args)
                    if not kept.isdisjoint(instruction.outs):  # the nearest that bfloat16 has
                        info = jnp.finfo(jnp.bfloat16)
                        results = [lax.reduce_precision(x, info.nexp, info.nmant) for x in results]
                    # A late cast passes its operand on, and what is looked up in it is cast.
                    if late.isdisjoint(instruction.outs):
                        results = self.apply(instruction, results)
                    if not late.isdisjoint(instruction.ins):
                        dtype = self.graph.avals[instruction.outs[0].value].dtype
                        results = [x.astype(dtype) for x in results]
                    return results
                case Box():
                    node = instruction.reader or instruction.maker
                    with self.at(node) if node else nullcontext():
                        shape = self.graph.avals[instruction.source.value].shape
                        x = run_steps(args[0], shape, instruction.steps, self.mesh)
                        in_order = instruction.target in self.rows and fills_tiles(x.shape)
                        return [in_rows(x) if in_order else x]
                case Loop():
                    with self.at(instruction.node):
                        return self.loop(instruction, list(args), received_values(block))

        for instruction in block.instructions:
            if isinstance(instruction, Loop) and instruction.node.id in early:
                tied = early[instruction.node.id]
                after = lax.optimization_barrier([env[r] for r in tied])
                env.update(zip(tied, after, strict=True))
            operands = [read(s) for s in instruction.ins]
            results = self.tracing.called(
                instruction, functools.partial(run, instruction), operands
            )
            env.update(zip(instruction.outs, results, strict=True))
        return [read(s) for s in block.outputs]

    def constant(self, source: ConstantRegister) -> Any:
        """A constant in the type of a register. Each device slices or masks its own copy."""
        aval, value, codes = source.constant.aval, source.constant.value, source.codes
        with jax.ensure_compile_time_eval():
            value = _off_explicit_axes(value)
        x = value if _jax.is_extended(aval.dtype) else jnp.asarray(value, aval.dtype)
        for k, code in enumerate(codes):
            if code != 0:
                here, target = ((*codes[:n], *(0 for _ in codes[n:])) for n in (k, k + 1))
                step = Step("slice" if code > 0 else "mask", (k,), here, target, 0.0, 0.0)
                x = run_steps(x, aval.shape, (step,), self.mesh)
        return jax.device_put(x, _jax.space_of(True)) if _jax.in_host(aval) else x

    def local(self, shape: Sequence[int], codes: Codes) -> tuple[int, ...]:
        """The shard's shape."""
        return local_shape(shape, codes, self.mesh.sizes)

    def apply(self, instruction: Apply, args: list[Any]) -> list[Any]:
        """Runs one node's kernel on the shards of its operands, and checks the shapes of the
        results.

        Raises:
          SbpInternalError: for a result whose shape is not that of its type.
        """
        node, row = instruction.node, instruction.row
        if node.op == annotate_p.name:
            return args
        found, outs = rule_for(node.op), tuple(self.graph.avals[v] for v in node.outputs)
        expected = tuple(self.local(a.shape, c) for a, c in zip(outs, row.outs, strict=True))
        with self.at(node):
            if node.op in REGION_OPS:
                results = self.region(instruction, args)
            elif found is None or found.local is None:
                results = _jax.bind(node.primitive, args, node.params)
            else:
                ins = tuple(map(self.graph.aval, node.inputs))
                place = LocalContext(
                    node.params,
                    ins,
                    outs,
                    tuple(self.local(a.shape, c) for a, c in zip(ins, row.ins, strict=True)),
                    expected,
                    node.primitive,
                    self.splits(ins, row.ins),
                    self.splits(outs, row.outs),
                    self.mesh.names,
                )
                results = found.local(place, args)
        got = tuple(tuple(np.shape(r)) for r in results)
        if got != expected:
            raise SbpInternalError(
                f"{node.op} (node {node.id}) under {row} gives shards {got}, its type says"
                f" {expected}"
            )
        return results

    def splits(self, avals: Sequence[Any], types: Sequence[Codes]) -> SplitAxes:
        """For each value and dim, the names and sizes of the mesh axes that split it."""
        return tuple(
            tuple(split_axes(codes, self.mesh, d) for d in range(len(aval.shape)))
            for aval, codes in zip(avals, types, strict=True)
        )

    def region(self, instruction: Apply, args: list[Any]) -> list[Any]:
        """A node of a hand-written region: the user's `shard_map` body, whose collectives run over
        the same axis names, or the conversion of an operand or result to or from parts."""
        node = instruction.node
        if node.op == SHARD_MAP:
            return evaluate(node.params["body"], args)
        (x,) = args
        if node.op == pick_p.name:
            return [x[0]]
        mesh_axis = node.params["mesh_axis"]
        whole = (
            instruction.row.ins[0][self.mesh.names.index(mesh_axis)] == 0
            and self.mesh.size(mesh_axis) > 1
        )
        return [parts(x, mesh_axis, node.params["monoid"], partial=not whole)]

    def loop(self, instruction: Loop, args: list[Any], received: Set[Register]) -> list[Any]:
        """Runs a `scan`, `while` or `cond` over its blocks.

        Arguments:
          instruction: the loop or branch.
          args: its operands.
          received: the values around it that come from a collective.
        """
        node, blocks, outer = instruction.node, instruction.blocks, self.scope
        on_tpu, is_outermost = self.mesh.hardware.platform == "tpu", not self.loops

        def run(region: int, values: Sequence[Any]) -> list[Any]:
            block, kept = blocks[region], frozenset[Register]()
            if on_tpu and is_outermost:
                kept = kept_casts(self.graph, instruction, region, received)
            if node.op != SCAN or not self.stacks:
                return self.block(block, values, kept)
            shapes = [self.local(self.graph.avals[r.value].shape, r.codes) for r in block.inputs]
            # A slice of a stack is a matrix.
            values = [
                x if np.shape(x) == shape else x.reshape(shape)
                for x, shape in zip(values, shapes, strict=True)
            ]
            return _with_matrices(instruction, self.block(block, values, kept), self.stacks)

        self.scope = node.scope
        self.loops += node.op in LOOPS
        try:
            if on_tpu and node.op == SCAN and (made := self.stacked(instruction)):
                return run_regions(node, args, run, functools.partial(self.tracing.scan, made))
            return run_regions(node, args, run)
        finally:
            self.scope = outer
            self.loops -= node.op in LOOPS

    def stacked(self, loop: Loop) -> list[tuple[Sequence[int], Any]]:
        """Shape and dtype of what each turn of a scan adds to its stacks; none where there are no
        turns, the program unrolls the scan, or a stack holds keys or lies in the host's memory."""
        (block,) = loop.blocks
        avals = [
            s.constant.aval if isinstance(s, ConstantRegister) else self.graph.avals[s.value]
            for s in block.outputs
        ]
        stacked = [e.output for e in interface_of(loop.node).leaving(0) if e.kind == "stacked"]
        plain = loop.node.params["unroll"] == 1 and loop.node.params["length"]
        if not plain or any(
            _jax.is_extended(avals[n].dtype) or _jax.in_host(avals[n]) for n in stacked
        ):
            return []
        made = [
            jax.ShapeDtypeStruct(self.local(aval.shape, source.codes), aval.dtype)
            for aval, source in zip(avals, block.outputs, strict=True)
        ]
        if self.stacks:
            made = jax.eval_shape(lambda *outs: _with_matrices(loop, outs, self.stacks), *made)
        return [(made[n].shape, made[n].dtype) for n in stacked]
