"""What the TPU compiler makes cheaper than the constants of `infer.cost` say: how much of what an
operation reads and writes reaches memory, and which all-reduces start together.

It computes the operations of an update in one pass: gradients, weights and moments are read once,
new ones written once, and values in between never reach memory. In a loop, each turn reads its
slices of stacks whole, and writes what it adds to stacks whole.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from sbp import _jax
from sbp.annotations import annotate_p
from sbp.machine.mesh import MeshSpec
from sbp.signatures import traits_of
from sbp.trace.graph import LOOPS, Graph, Node, Operand, body_of, interface_of
from sbp.trace.places import TRANSFER, computes_in_host

FUSED_SHARE = 0.01
"""Share of an operand or a result that never reaches memory, for the work on it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryShares:
    """Shares that are known. A value that is absent has the constant share of its operation.

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
        read = self.read.get(node.id, (None,) * len(node.inputs))
        return (*read, *map(self.written.get, node.outputs))


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
    for loop in graph.walk():
        if loop.op in LOOPS:
            read |= _slices(loop)
            written |= dict.fromkeys(_stacked_values(loop), 1.0)
    return MemoryShares(waited=waited, read=read, written=written, fused=update.fused)


def _update(graph: Graph) -> MemoryShares:
    """What the operations of an update read and write.

    These are elementwise operations that a gradient reaches and whose results are returned or only
    read by such operations, and those that only these read, such as the decay of a moment.
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

    def size(o: Operand) -> int:
        aval = body.aval(o)
        return math.prod(aval.shape) * _jax.itemsize(aval.dtype)

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
                shares[k] = max(0.0, 1.0 - size(v) / max(1, size(o)))
        found[node.id] = tuple(shares)
    return found


def _stacked_values(loop: Node) -> set[int]:
    """The values that a loop's body computes and stacks. Not those that it moves: the transpose of
    a gradient is another layout of what its product writes."""
    number = body_of(loop)
    body = loop.regions[number]
    exits = interface_of(loop).leaving(number)
    stands_for = _passed_on(body, barriers=True)
    outputs = [body.outputs[e.output] for e in exits if e.kind == "stacked"]
    stacked = {stands_for.get(v, v) for v in outputs if isinstance(v, int)}
    computed = {v for n in body.nodes if not traits_of(n.op).moves for v in n.outputs}
    return stacked & computed


# ---- all-reduces that start together ------------------------------------------------------------
# Which all-reduces a compiler runs as one: those of gradients.
#
# No all-reduce of a gradient waits for another one, so XLA joins those over the same mesh axes into
# one collective, which starts once. An all-reduce in front of a product cannot wait for the others,
# and other collectives are not joined (`tests/tpu/test_compiled_plans.py`).


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
            entering = frozenset(region.inputs) if is_late else frozenset[int]()
            inside = late_values(region, entering)
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
        waits = node.regions or traits_of(node.op).flops is not None
        if waits or not early.isdisjoint(node.outputs):
            early.update(o for o in node.inputs if isinstance(o, int))
    here = {v for node in graph.nodes for v in node.outputs}
    return (late_values(graph) & here) - early


def _sums(graph: Graph, node: Node) -> bool:
    """Whether an operation may add up elements."""
    if node.regions or traits_of(node.op).flops is not None:
        return True
    sizes = [math.prod(graph.aval(o).shape) for o in node.inputs]
    return any(math.prod(graph.avals[v].shape) < max(sizes, default=0) for v in node.outputs)
