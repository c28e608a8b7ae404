"""What operations cost: the collectives of steps of conversions and of the kernels of rows; and the
modelled seconds of local operations, floating-point work of contractions and memory traffic of the
others."""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import numpy as np
from jax import lax

from sbp import _jax
from sbp.annotations import annotate_p
from sbp.infer.rows import NdRow, seen_codes
from sbp.infer.space import (
    LOCAL,
    Codes,
    Reduction,
    Step,
    TypeSpace,
    decode,
    local_bytes,
    local_shape,
)
from sbp.limits import Rules
from sbp.machine.hardware import Hardware
from sbp.machine.mesh import MeshSpec
from sbp.signatures import Op, Row, Sent, Shape, kernel_named, traits_of
from sbp.trace.collectives import KINDS, SHARD_MAP, collective_runs, names_of
from sbp.trace.graph import LOOPS, Graph, Node, Operand, amount, body_of, interface_of
from sbp.trace.places import TRANSFER, computes_in_host
from sbp.types import Unreduced

# ---- what the compiler makes cheaper -------------------------------------------------------------
# On TPUs, some operations cost less than the constants below say. This part finds the share of an
# operation's operands and results that reaches memory, and the all-reduces that start together.
#
# The TPU compiler computes the operations of an update in one pass. It reads gradients, weights and
# moments once and writes the new ones once. The values in between never reach memory. In a loop,
# each turn reads its whole slices of stacks, and writes whole slices to stacks.


FUSED_SHARE = 0.01
"""The share that is charged for an operand or a result that never reaches memory. It stands for the
work on it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryShares:
    """The shares of operands and results that reach memory. A value that is not listed has the
    constant share of its operation.

    Arguments:
      waited: for values that are fetched before products read them, the share that products wait
          for (`infer.request`).
      read: for an operation that is no product, by its id, the share of each operand; None for the
          constant one.
      written: for results of such operations, the share that is written.
      fused: the values that an update computes and reads again without memory, unless a collective
          converts them.
    """

    waited: Mapping[int, float] = field(default_factory=dict)
    read: Mapping[int, tuple[float | None, ...]] = field(default_factory=dict)
    written: Mapping[int, float] = field(default_factory=dict)
    fused: frozenset[int] = frozenset()

    def of(self, node: Node) -> tuple[float | None, ...]:
        """The shares of the operands of a node, then of its results; None for the constant one."""
        if traits_of(node.op).flops is not None:
            ins = (self.waited.get(o) if isinstance(o, int) else None for o in node.inputs)
            return (*ins, *(None for _ in node.outputs))
        unknown = (None,) * len(node.inputs)
        return (*self.read.get(node.id, unknown), *map(self.written.get, node.outputs))


def memory_shares(graph: Graph, mesh: MeshSpec, waited: Mapping[int, float]) -> MemoryShares:
    """The shares of a program. Only `waited` is known where the compiler is not one for TPUs.

    An update is found where the program takes the gradients itself, outside of loops and branches.

    Arguments:
      graph: the program.
      mesh: the mesh and its hardware.
      waited: as `MemoryShares` has it.
    """
    if mesh.hardware.platform != "tpu":
        return MemoryShares(waited=waited)
    update = _update(graph)
    read, written = dict(update.read), dict(update.written)
    for loop in (node for node in graph.walk() if node.op in LOOPS):
        read |= _slices(loop)
        written |= dict.fromkeys(_stacked_values(loop), 1.0)
    return MemoryShares(waited=waited, read=read, written=written, fused=update.fused)


def _update(graph: Graph) -> MemoryShares:
    """What the operations of an update read and write.

    An operation of an update is elementwise. A gradient reaches it, and its results are returned or
    read by such operations alone. Operations whose results only these read, such as the decay of a
    moment, belong to the update as well.
    """
    stands_for = _passed_on(graph, barriers=False)

    def values(operands: Iterable[Operand]) -> list[int | None]:
        return [stands_for.get(o, o) if isinstance(o, int) else None for o in operands]

    returned = set(values(graph.outputs))
    closing = closing_values(graph)
    here, elsewhere = set[int | None](), set[int | None]()  # read by the update, and by others
    found: list[Node] = []
    for node in reversed([n for n in graph.nodes if stands_for.keys().isdisjoint(n.outputs)]):
        results = set(node.outputs)
        only_here = results <= closing or (results <= here and results.isdisjoint(returned))
        joins = only_here and results.isdisjoint(elsewhere) and _is_elementwise(graph, node)
        (here if joins else elsewhere).update(values(node.inputs))
        if joins:
            found.append(node)
    read: dict[int, tuple[float | None, ...]] = {}
    written: dict[int, float] = {}
    in_reach: set[int | None] = {None}  # constants, and what the pass has read or computed
    taken: set[int | None] = set()
    for node in reversed(found):
        operands = values(node.inputs)
        if _lays_out(graph, node) and written.keys().isdisjoint(operands):
            continue  # its product writes this layout
        shares: list[float | None] = []
        for o in operands:
            shares.append(FUSED_SHARE if o in in_reach else 1.0)
            in_reach.add(o)
        read[node.id] = tuple(shares)
        in_reach.update(node.outputs)
        taken.update(operands)
        written |= {v: 1.0 if v in returned else FUSED_SHARE for v in node.outputs}
    fused = {v for v in written if v in taken}
    fused |= {v for v, source in stands_for.items() if source in fused}
    return MemoryShares(read=read, written=written, fused=frozenset(fused))


def _passed_on(graph: Graph, *, barriers: bool) -> dict[int, int]:
    """For what annotations return, and barriers if they count, the value for which it stands: they
    compute nothing."""
    found: dict[int, int] = {}
    for node in graph.nodes:
        if node.op == annotate_p.name or (barriers and node.is_barrier):
            for o, v in zip(node.inputs, node.outputs, strict=True):
                if isinstance(o, int):
                    found[v] = found.get(o, o)
    return found


def _lays_out(graph: Graph, node: Node) -> bool:
    """Whether an operation is another layout of its operand, such as a transpose."""
    if not node.inputs or not traits_of(node.op).moves:
        return False
    source, result = (graph.aval(side[0]).shape for side in (node.inputs, node.outputs))
    return math.prod(source) == math.prod(result)


def _is_elementwise(graph: Graph, node: Node) -> bool:
    """Whether XLA fuses an operation with others that compute arrays of its result's size."""
    traits = traits_of(node.op)
    avals = [graph.aval(o) for o in (*node.inputs, *node.outputs)]
    if (
        node.regions
        or node.is_barrier
        or traits.flops is not None
        or len(node.outputs) != 1
        or node.op == TRANSFER
        or computes_in_host(node, avals)
    ):
        return False
    *sizes, size = (math.prod(aval.shape) for aval in avals)
    return traits.fusion != "partly" or (traits.elementwise and max(sizes, default=0) <= size)


def _slices(loop: Node) -> dict[int, tuple[float | None, ...]]:
    """The operations in a loop's body that read slices of stacks first, as `MemoryShares.read`.

    A cast or another layout of a slice passes it on to what reads that, which reads it in the bytes
    of the result. A product reads its operands whole anyway.
    """
    number = body_of(loop)
    body = loop.regions[number]
    unread = {
        body.inputs[position]
        for entry in interface_of(loop).entering("slice")
        for region, position in entry.inputs
        if region == number
    }
    found: dict[int, tuple[float | None, ...]] = {}
    for node in body.nodes:
        first = unread.intersection(o for o in node.inputs if isinstance(o, int))
        unread -= first
        if not first or node.regions:
            continue
        inlined = node.is_barrier or traits_of(node.op).fusion != "partly"
        shares: list[float | None] = [1.0 if o in first else None for o in node.inputs]
        for k, (o, v) in enumerate(zip(node.inputs, node.outputs, strict=False)):
            if inlined and o in first:
                unread.add(v)
                written, sliced = (local_bytes(body.aval(x), (), ()) for x in (v, o))
                shares[k] = max(0.0, 1.0 - written / max(1, sliced))
        found[node.id] = tuple(shares)
    return found


def _stacked_values(loop: Node) -> set[int]:
    """The values that a loop's body computes and stacks. Not those that it moves: the transpose of
    a gradient is another layout of what its product writes."""
    number = body_of(loop)
    body = loop.regions[number]
    exits, stands_for = interface_of(loop).leaving(number), _passed_on(body, barriers=True)
    outputs = [body.outputs[e.output] for e in exits if e.kind == "stacked"]
    computed = {v for n in body.nodes if not traits_of(n.op).moves for v in n.outputs}
    return computed.intersection(stands_for.get(v, v) for v in outputs if isinstance(v, int))


# ---- all-reduces that start together ------------------------------------------------------------
# The compiler runs the all-reduces of gradients as one collective.
#
# No all-reduce of a gradient waits for another one. So XLA joins the all-reduces over the same mesh
# axes into one collective, which starts once. An all-reduce in front of a product cannot wait for
# the others. XLA does not join other collectives (`tests/tpu/test_compiled_plans.py`).


def reduced_together(graph: Graph, mesh: MeshSpec) -> Mapping[int, int]:
    """For each value whose all-reduce starts with those of other values, how many start together;
    empty where the compiler is not one for TPUs.

    These are values of the backward pass and of the update from which no product and no region
    follows. Types are not known here: all sums among them are taken to be all-reduced over the same
    mesh axes, so each pays an equal share of one start, or more where it is large
    (`space.JOINED_BYTES`).

    Arguments:
      graph: the program.
      mesh: the mesh and its hardware.
    """
    if mesh.hardware.platform != "tpu":
        return {}
    late = closing_values(graph)
    sums = sum(len(late.intersection(node.outputs)) for node in graph.nodes if _sums(graph, node))
    return dict.fromkeys(late, sums) if sums > 1 else {}


def late_values(graph: Graph, given: frozenset[int] = frozenset()) -> frozenset[int]:
    """The values of the backward pass and of the update: results of gradients, and values that are
    computed from them.

    Arguments:
      graph: the program.
      given: inputs of `graph` that are such values.
    """
    late = set(given)
    for node in graph.nodes:
        is_late = node.backward or not late.isdisjoint(o for o in node.inputs if isinstance(o, int))
        for region in node.regions:
            inside = late_values(region, frozenset(region.inputs if is_late else ()))
            late |= inside
            is_late = is_late or not inside.isdisjoint(
                o for o in region.outputs if isinstance(o, int)
            )
        if is_late:
            late.update(node.outputs)
    return frozenset(late)


def closing_values(graph: Graph) -> frozenset[int]:
    """The values of the backward pass and of the update from which no product and no region
    follows.

    Arguments:
      graph: the program.
    """
    early: set[int] = set()
    for node in reversed(graph.nodes):
        is_product = traits_of(node.op).flops is not None
        if node.regions or is_product or not early.isdisjoint(node.outputs):
            early.update(o for o in node.inputs if isinstance(o, int))
    return late_values(graph).intersection(v for n in graph.nodes for v in n.outputs) - early


def _sums(graph: Graph, node: Node) -> bool:
    """Whether an operation may add up elements."""
    if node.regions or traits_of(node.op).flops is not None:
        return True
    largest = max((math.prod(graph.aval(o).shape) for o in node.inputs), default=0)
    return any(math.prod(graph.avals[v].shape) < largest for v in node.outputs)


# ---- what is sent --------------------------------------------------------------------------------
# The collectives of steps of conversions, those of the kernels of a row with their memory traffic,
# and the rows whose collectives rules allow.


def row_sends(graph: Graph, node: Node, row: NdRow, mesh: MeshSpec) -> Iterator[tuple[int, Sent]]:
    """The collectives of a row's kernels, each with the position of its mesh axis.

    Arguments:
      graph: the program.
      node: the node.
      row: the row. The kernel of each axis sees the shapes that the other axes leave.
      mesh: the mesh.
    """
    for position, name in enumerate(row.kernels):
        sends = kernel_named(name).sends
        if sends is not None:
            op, own = on_axis(graph, node, row, mesh, position)
            for other, name_there in enumerate(row.kernels):
                if other != position and kernel_named(name_there).widens is not None:
                    op = _widened(op, on_axis(graph, node, row, mesh, other), row, position)
            times = _times(graph, node, row, mesh, position)
            yield from (
                (position, replace(sent, rounds=times * sent.rounds)) for sent in sends(op, own)
            )


def row_traffic(graph: Graph, node: Node, row: NdRow, mesh: MeshSpec) -> float:
    """Bytes that a device moves to or from memory in a row's kernels beside one pass over operands
    and results; arguments as `row_sends`."""
    of_kernels = enumerate(kernel_named(name).traffic for name in row.kernels)
    return sum((t(*on_axis(graph, node, row, mesh, k)) for k, t in of_kernels if t), 0.0)


def allowed_rows(
    graph: Graph, node: Node, rows: tuple[NdRow, ...], rules: Rules, mesh: MeshSpec
) -> tuple[NdRow, ...]:
    """The rows whose collectives the rules allow.

    Arguments:
      graph: the program.
      node: the node.
      rows: its rows.
      rules: the rules at the node.
      mesh: the mesh.
    """

    def is_allowed(row: NdRow) -> bool:
        # Only the policy "auto" allows collectives of kernels.
        return all(
            policy == "auto" or not kernel_named(name).communicates
            for policy, name in zip(rules.policies, row.kernels, strict=True)
        ) and not any(
            ban.forbids(sent.kind, (position,), sent.bytes)
            for position, sent in row_sends(graph, node, row, mesh)
            for ban in rules.bans
        )

    return rows if rules.unlimited else tuple(filter(is_allowed, rows))


def on_axis(graph: Graph, node: Node, row: NdRow, mesh: MeshSpec, position: int) -> tuple[Op, Row]:
    """An operation and its row on one mesh axis, with the shapes that the other axes leave; other
    arguments as `row_sends`."""
    sizes = tuple(1 if k == position else n for k, n in enumerate(mesh.sizes))
    ins, outs = (
        tuple(
            _jax.empty_aval(local_shape(graph.aval(o).shape, c, sizes), graph.aval(o).dtype)
            for o, c in zip(values, types, strict=True)
        )
        for values, types in ((node.inputs, row.ins), (node.outputs, row.outs))
    )
    return Op(node.op, node.params, ins, outs, mesh.sizes[position]), row.on(position)


def _times(graph: Graph, node: Node, row: NdRow, mesh: MeshSpec, position: int) -> int:
    """In how many parts the collectives of the kernel on one mesh axis send their bytes."""
    times = kernel_named(row.kernels[position]).times
    if times is None:
        return 1
    ins, outs = (tuple(map(graph.aval, v)) for v in (node.inputs, node.outputs))
    rows = [(row.on(k), n) for k, n in enumerate(mesh.sizes)]
    return times(Op(node.op, node.params, ins, outs, 1), rows)


def _widened(op: Op, other: tuple[Op, Row], row: NdRow, position: int) -> Op:
    """An operation on the operands that the kernel on another mesh axis leaves. Its halo widens a
    dim that comes before the dim that this axis splits.

    Arguments:
      op: the operation on this mesh axis.
      other: the operation and its row on the other mesh axis.
      row: the whole row.
      position: the position of this mesh axis.
    """
    ins, widens = list(op.ins), kernel_named(other[1].kernel).widens
    for operand, dim, size in widens(*other) if widens is not None else ():
        if dim + 1 < row.ins[operand][position]:
            shape = list(ins[operand].shape)
            shape[dim] = size
            ins[operand] = _jax.empty_aval(shape, ins[operand].dtype)
    return replace(op, ins=tuple(ins))


def step_stages(step: Step, aval: Any, mesh: MeshSpec) -> tuple[int, ...]:
    """The sizes of the groups in which a reduce-scatter runs, one stage after the other; empty
    where it runs as one collective, and for other steps.

    Arguments:
      step: the step.
      aval: of the whole value.
      mesh: the mesh.
    """
    runs = step.kind == "reduce_scatter" and not _is_exchanged(step, aval, mesh)
    return mesh.stages(math.prod(mesh.sizes[i] for i in step.mesh_axes)) if runs else ()


def step_sends(step: Step, aval: Any, mesh: MeshSpec) -> tuple[Sent, ...]:
    """The collectives of one step of a conversion, in order; arguments as `step_stages`.

    A reduction that no collective computes (a product, a sum in a wider dtype) exchanges blocks,
    reduces them on each device, and for an all-reduce gathers the results.
    """
    sent = step.bytes_sent
    if step.kind in LOCAL:
        return ()
    if not _is_exchanged(step, aval, mesh):
        return (Sent(step.kind, sent, max(1, len(step_stages(step, aval, mesh)))),)
    both = Sent("all_to_all", sent / 2), Sent("all_gather", sent / 2)
    return (Sent("all_to_all", sent),) if step.kind == "reduce_scatter" else both


def _is_exchanged(step: Step, aval: Any, mesh: MeshSpec) -> bool:
    """Whether devices exchange blocks and reduce them themselves."""
    before = decode(step.source[step.mesh_axes[0]])
    if not isinstance(before, Unreduced):
        return False
    if step.wide is not None and step.wide.dim is not None:
        return True
    if step.kind == "all_reduce":
        return before.monoid not in ("sum", "max", "min") and aval.dtype != np.bool_
    if step.kind != "reduce_scatter" or before.monoid != "sum":
        return step.kind == "reduce_scatter"
    (position,) = step.mesh_axes
    dim, n = step.target[position] - 1, mesh.sizes[position]
    part = list(local_shape(aval.shape, step.source, mesh.sizes))
    part[dim] = n * local_shape(aval.shape, step.target, mesh.sizes)[dim]
    return "exchange" in mesh.arrangements(part, dim, n, _jax.itemsize(aval.dtype))


# ---- seconds -------------------------------------------------------------------------------------


STEP_LATENCIES = 3.0
"""Latencies that one step of a ring is charged: it starts a message, a product that is smaller than
the whole one, and a turn of a loop."""

FUSED_FRACTION = 0.25
"""Share of an elementwise operation's bytes, operands and results, that a device still moves to or
from memory after XLA has fused the operation with its neighbours."""

FREE_FRACTION = 0.05
"""The same share for an operation that XLA nearly always fuses into its consumers."""


def _precision(node: Node) -> Literal["default", "high", "highest"]:
    """The most precise of the precisions that a product asks for, one for each operand."""
    # An algorithm given by name is priced as the default precision.
    asked = node.params.get("precision")
    of_each = asked if isinstance(asked, tuple) else (asked,)
    return (
        "highest"
        if lax.Precision.HIGHEST in of_each
        else "high"
        if lax.Precision.HIGH in of_each
        else "default"
    )


def exchanges(
    graph: Graph, node: Node, row: NdRow, mesh: MeshSpec
) -> Iterator[tuple[tuple[int, ...], str, float, float]]:
    """The collectives in the kernels of a row or in a hand-written region, in the order in which
    they run; arguments as `row_seconds`.

    Yields:
      The positions of its mesh axes; its kind; seconds that run before the work of the kernel;
      seconds on the links while the kernel works.
    """
    for inner, runs, sent_bytes in collective_runs(node) if node.op == SHARD_MAP else ():
        positions = tuple(sorted(map(mesh.names.index, names_of(inner))))
        kind = KINDS[inner.op].replace("broadcast", "permute")
        seconds = mesh.collective(kind, positions).of(sent_bytes, runs)
        yield positions, kind, seconds, 0.0
    for position, sent in row_sends(graph, node, row, mesh):
        collective = mesh.collective(sent.kind, (position,))
        if kernel_named(row.kernels[position]).overlaps:
            started = STEP_LATENCIES * sent.rounds * collective.seconds
            yield (position,), sent.kind, started, sent.bytes * collective.seconds_per_byte
        else:
            yield (position,), sent.kind, collective.of(sent.bytes, sent.rounds), 0.0


def row_seconds(
    graph: Graph, node: Node, row: NdRow, mesh: MeshSpec, shares: MemoryShares
) -> float:
    """Seconds of a node's kernel under a row: its local work on one device, and its own
    collectives. Work that several devices repeat, since an operand is B, is counted on each of
    them.

    Arguments:
      graph: the program.
      node: the node.
      row: the row.
      mesh: the mesh.
      shares: how much of what the operation reads and writes reaches memory.
    """
    sent = [*exchanges(graph, node, row, mesh)]
    own = max(local_seconds(graph, node, row, mesh, shares))
    return max(sum((before for *_, before, _ in sent), own), *(beside for *_, beside in sent), 0.0)


def undominated_rows(
    rows: Sequence[NdRow],
    seconds: np.ndarray,
    avals: Sequence[Any],
    reductions: Sequence[Reduction],
    space_of: Callable[[Any, Sequence[Codes], Reduction], TypeSpace],
    rules: Rules,
) -> np.ndarray:
    """Which rows a cheapest typing may need. A row is left out if another row, with conversions of
    the operands before it and of the results after it, costs no more.

    Of rows that replace each other at the same cost, the first one stays. A type that splits a dim
    into more parts than it has elements has no conversions here.

    Arguments:
      rows: the rows of a node.
      seconds: the cost of each row.
      avals: of each operand, then of each result.
      reductions: for each operand, then for each result, how it is converted.
      space_of: the type space of a value for some of its types.
      rules: rules that allow a conversion only where all places of the program allow it.

    Returns:
      For each row, whether it stays.
    """
    operands = len(rows[0].ins) if rows else 0
    # instead[k, l]: the cost of row l in the place of row k, with the conversions of operands and
    # results.
    instead = np.broadcast_to(seconds, (len(rows), len(rows))).copy()
    for position, aval in enumerate(avals):
        is_operand = position < operands
        types = [r.ins[position] if is_operand else r.outs[position - operands] for r in rows]
        distinct = sorted(set(types))
        if len(distinct) > 1:
            space = space_of(aval, distinct, reductions[position])
            known = [t in space.index for t in distinct]
            at = [space.index.get(t, 0) for t in distinct]
            boxing = space.seconds(rules)[np.ix_(at, at)].copy()
            boxing[~np.array(known), :] = boxing[:, ~np.array(known)] = np.inf
            np.fill_diagonal(boxing, 0.0)
            number = np.array([distinct.index(t) for t in types])
            there = boxing[np.ix_(number, number)]
            instead += there if is_operand else there.T
    first = np.arange(len(rows))
    replaced = (instead < seconds[:, None]) | (
        (instead == seconds[:, None]) & (first[None, :] < first[:, None])
    )
    return ~replaced.any(axis=1)


def product_seconds(
    graph: Graph, node: Node, ins: Sequence[Shape], outs: Sequence[Shape], hardware: Hardware
) -> float:
    """Seconds that a product computes, whatever it reads and writes.

    Few rows take as long as `Hardware.product_rows`. A single one is not multiplied as a matrix,
    but by vector operations, at `Hardware.vector_flops_per_second`.

    Arguments:
      graph: the program.
      node: an operator with a number of floating-point operations.
      ins, outs: local shapes of its operands and results.
      hardware: the device.
    """
    traits = traits_of(node.op)
    assert traits.flops is not None
    flops = traits.flops(node.params, ins, outs)
    itemsize = max(_jax.itemsize(graph.aval(o).dtype) for o in node.inputs)
    rate = hardware.product_flops_per_second(itemsize, _precision(node))
    rows = min(traits.sides(node.params, ins)) if traits.sides else hardware.product_rows
    return (
        flops / hardware.vector_flops_per_second
        if rows == 1 and hardware.vector_flops_per_second is not None
        else flops / rate * max(1.0, hardware.product_rows / max(1, rows))
    )


def local_seconds(
    graph: Graph, node: Node, row: NdRow, mesh: MeshSpec, shares: MemoryShares
) -> tuple[float, float]:
    """Seconds of a node's local work on one device, without its collectives; arguments as
    `row_seconds`.

    Returns:
      Seconds of floating-point operations of products; seconds of bytes moved to or from a memory.
      The longer one counts, since they run at the same time.
    """
    if node.op == SHARD_MAP:
        return _body_seconds(node.params["body"], mesh)
    hardware = mesh.hardware
    ins, outs = (
        [
            local_shape(graph.aval(o).shape, c, mesh.sizes)
            for o, c in zip(values, types, strict=True)
        ]
        for values, types in ((node.inputs, seen_codes(row)), (node.outputs, row.outs))
    )
    of_each = [
        math.prod(shape) * _jax.itemsize(graph.aval(o).dtype)
        for o, shape in zip((*node.inputs, *node.outputs), (*ins, *outs), strict=True)
    ]
    traffic, traits = sum(of_each), traits_of(node.op)
    if node.op == TRANSFER:
        # Half is read, half is written.
        return 0.0, 0.5 * traffic / hardware.host_bytes_per_second
    if computes_in_host(node, [graph.aval(o) for o in (*node.inputs, *node.outputs)]):
        # Taken to run at the rate of copies.
        return 0.0, traffic / hardware.host_bytes_per_second
    if traits.flops is None:
        fraction = FUSED_FRACTION if traits.fusion == "partly" else FREE_FRACTION
        moved = sum(
            size * (fraction if share is None else share)
            for size, share in zip(of_each, shares.of(node), strict=True)
        )
        return 0.0, moved / hardware.hbm_bytes_per_second
    for size, share in zip(of_each, shares.of(node), strict=True):
        if share is not None and size <= hardware.fast_memory_bytes:
            traffic -= (1.0 - share) * size
    traffic += row_traffic(graph, node, row, mesh)
    work = math.prod(kernel_named(name).work for name in set(row.kernels))
    compute = work * product_seconds(graph, node, ins, outs, hardware)
    return compute, traffic / hardware.hbm_bytes_per_second


def _body_seconds(body: Graph, mesh: MeshSpec) -> tuple[float, float]:
    """The local work in a hand-written region, whose operands are shards, as `local_seconds`."""
    compute, memory = 0.0, 0.0
    for node in (n for n in body.nodes if n.op not in KINDS):
        row = NdRow.whole(len(node.inputs), len(node.outputs), len(mesh.sizes))
        inner = [_body_seconds(region, mesh) for region in node.regions]
        own = local_seconds(body, node, row, mesh, MemoryShares())
        compute += amount(node, [x for x, _ in inner]) if inner else own[0]
        memory += amount(node, [x for _, x in inner]) if inner else own[1]
    return compute, memory
