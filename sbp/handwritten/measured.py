"""Measured types: which of B, S and P each value of a hand-written region is, by running it; and
where a value loses its meaning.

A program runs on the mesh and with one device on a mesh axis. By the definition of the types, a
value on the mesh is B, S(d) or P(sum) on that axis where its parts make up, in numbers, the value
of the run with one device. A power of the axis size counts as well: the sum over n devices of the
means of their shards is n times the mean.
"""

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import jax.numpy as jnp
import numpy as np

from sbp import _jax
from sbp.handwritten.arguments import result_text
from sbp.handwritten.emulation import (
    Ran,
    are_equal,
    atom_of,
    bodies,
    differ,
    inner_graphs,
    nodes_of,
    places_of,
)
from sbp.signatures import traits_of
from sbp.trace.collectives import AXIS_INDEX, CALLED, KINDS, REDUCTIONS, SENDING, names_of
from sbp.trace.graph import (
    CONTROL_FLOW,
    Dataflow,
    Graph,
    Node,
    Operand,
    group_by,
    interface_of,
    reached,
)
from sbp.types import Atom, B, Broadcast, P, Split, Unreduced


class Reading(NamedTuple):
    """A type that a value has on a mesh axis: the parts make up the value of one device, times the
    size of the axis to a power."""

    atom: Atom
    power: int


Readings = frozenset[Reading]
Types = Mapping[int, Readings]
"""The readings of the values that both runs have. A value without any has lost its meaning."""

_POWERS = (0, 1, -1, 2, -2)

_NUMBERS = {"sum": np.sum, "max": np.max, "min": np.min}
_TESTS = {"and": np.all, "or": np.any}
"""How the parts of P make up a value."""


def readings(parts: np.ndarray, whole: np.ndarray, axis: int, axes: int) -> Readings:
    """The readings of a value on a mesh axis.

    Arguments:
      parts: the value on the mesh: a leading dim for each mesh axis, then its own dims.
      whole: the value with one device on the axis.
      axis: the position of the mesh axis.
      axes: the number of mesh axes.
    """
    n = parts.shape[axis]
    each, want = np.moveaxis(parts, axis, 0), np.take(whole, 0, axis)
    return frozenset(
        Reading(atom, power)
        for atom, joined in made_up(each, axes - 1)
        if joined.shape == want.shape
        for power in _powers(joined, want, n)
        if power == 0 or atom == P or not isinstance(atom, Unreduced)
    )


def made_up(each: np.ndarray, first: int) -> Iterator[tuple[Atom, np.ndarray]]:
    """What the parts on the devices of a mesh axis make up, by the type.

    Arguments:
      each: the part of each device.
      first: the first dim of a part that can be split; the dims before it are other mesh axes.
    """
    if are_equal(each):
        yield B, each[0]
    wide = each.astype(np.float64) if jnp.issubdtype(each.dtype, jnp.floating) else each
    for monoid, join in (_TESTS if each.dtype == np.bool_ else _NUMBERS).items():
        yield Unreduced(monoid), join(wide, axis=0)
    for d in range(first, each.ndim - 1):
        yield Split(d - first), np.concatenate([*each], d)


def _powers(got: np.ndarray, want: np.ndarray, n: int) -> Iterator[int]:
    """The powers of `n` by which a value is the wanted one: all of zeros, 0 alone for integers."""
    is_float = jnp.issubdtype(want.dtype, jnp.inexact)
    if not differ(np.asarray(got, want.dtype), want):
        yield from (0,) if not is_float or np.any(want) else _POWERS
    elif is_float:
        yield from (
            k for k in _POWERS[1:] if not differ(got, np.asarray(want * float(n) ** k, want.dtype))
        )


def measure_types(ran: Ran, want: Ran, axis: int, axes: int, trip: int | None = None) -> Types:
    """The types of the values of all regions on a mesh axis.

    Arguments:
      ran: the run on the mesh.
      want: the run with one device on the axis.
      axis: the position of the mesh axis.
      axes: the number of mesh axes.
      trip: the trip of each scan that counts; None for all trips.
    """
    same, found = _counterparts(ran.graph, want.graph), dict[int, Readings]()
    by_index = index_values(ran.graph)
    for v, parts in ran.values.items():
        whole = want.values.get(same.get(v, -1))
        if whole is None or not (parts.size and whole.size):
            continue  # in a loop without trips
        scans = parts.ndim - axes - _rank(ran.graph.avals[v])
        for _ in range(0 if trip is None else scans):  # the first dim behind the mesh axes
            last = min(parts.shape[axes], whole.shape[axes]) - 1
            parts, whole = (np.take(y, min(trip or 0, last), axes) for y in (parts, whole))
        with np.errstate(all="ignore"):
            own = readings(parts, whole, axis, axes)
        # The least index of a device is that of one device alone.
        partial = {r for r in own if isinstance(r.atom, Unreduced) and r.atom != P}
        # The length of its shard changes an index that all devices share.
        is_shared = any(r.atom == B for r in own) or are_equal(np.moveaxis(parts, axis, 0))
        kept = own - partial - {r for r in own if is_shared and r.atom == P}
        found[v] = kept if v in by_index else own
    # Of a value without a meaning, a bound such as `maximum(x, 1.0)` may be that of one device.
    for node in bodies(ran.graph):
        ins = [o for o in node.inputs if isinstance(o, int)]
        if ins and not any(found.get(o, ins) for o in ins):
            found |= {
                v: frozenset(
                    r for r in found[v] if r.atom == P or not isinstance(r.atom, Unreduced)
                )
                for v in {*node.outputs} & {*found}
            }
    return found


def index_values(graph: Graph) -> set[int]:
    """The integers and tests that depend on the index of their device, and numbers that depend on
    nothing else."""
    found, literal = set[int](), set[int]()
    for node in bodies(graph):
        made, own = {o for o in node.inputs if isinstance(o, int)}, {*node.outputs}
        dtypes = [graph.avals[v].dtype for v in own]
        counts = all(d == np.bool_ or jnp.issubdtype(d, jnp.integer) for d in dtypes)
        if node.op == AXIS_INDEX or (found & made and (counts or made <= found | literal)):
            found |= own
        elif made <= literal:
            literal |= own
        found |= {
            v
            for region, fed in zip(node.regions, interface_of(node).fed, strict=True)
            for v, entry in zip(region.inputs, fed, strict=True)
            if node.inputs[entry.operand] in found
        }
    return found


def _rank(aval: Any) -> int:
    """The number of dims of a value; keys are given by their data."""
    return len(aval.shape) + (
        len(_jax.key_shape(aval.dtype)) if _jax.is_extended(aval.dtype) else 0
    )


def matched(graph: Graph, alone: Graph) -> Iterator[tuple[Node, Node]]:
    """The operations of a program with the same ones in another trace of it. Operations of one line
    and kind are matched in order."""
    own, others = (
        group_by(nodes_of(program), lambda node: (node.op, node.stack, node.backward))
        for program in (graph, alone)
    )
    for key, nodes in own.items():
        yield from zip(nodes, others.get(key, ()), strict=False)


def _counterparts(graph: Graph, alone: Graph) -> dict[int, int]:
    """For each value of a program the same one in another trace of it."""
    pairs = (
        pair
        for a, b in matched(graph, alone)
        for pair in (
            (a.outputs, b.outputs),
            *(
                ends
                for x, y in zip(inner_graphs(a), inner_graphs(b), strict=False)
                # With one device, JAX may leave out the operation that makes a result.
                for ends in ((x.inputs, y.inputs), (x.outputs, y.outputs))
            ),
        )
    )
    same = {
        a: b
        for mine, theirs in pairs
        if len(mine) == len(theirs)
        for a, b in zip(mine, theirs, strict=True)
        if isinstance(a, int) and isinstance(b, int)
    }
    reduced = set[int]()
    # With one device, a sum or a mean equals its operand. The program lacks the sums of a repair.
    for node in bodies(graph):
        operand = next((o for o in node.inputs if isinstance(o, int)), -1)
        is_mean = operand in reduced and traits_of(node.op).numpy is np.divide
        if node.op in REDUCTIONS or is_mean:
            reduced.add(node.outputs[0])
            if operand in same:
                same.setdefault(node.outputs[0], same[operand])
    return same


def is_good(found: Readings) -> bool:
    """Whether a value has its meaning. A partial value that is still to be divided has it."""
    own = [r for r in found if not isinstance(r.atom, Unreduced)]
    return any(r.power == 0 for r in own) if own else any(abs(r.power) < 2 for r in found)


# ---- faults -------------------------------------------------------------------------------------
# A result is wrong on a mesh axis if it does not have the type that out_specs claim. sbp looks for
# the fault backwards: through values without a reading to an operation whose operands all have one,
# or, for a result of another type, to the operation that gave it this type.


PMEAN = "lax.parallel.pmean"
"""The function of JAX that `lax.pmean` calls; its division has this frame."""

Kind = Literal[
    "added", "averaged", "blocks", "copies", "copies-as-partial", "copies-as-split", "doubled",
    "local", "missing", "mixed", "monoid", "nonlinear", "number", "order", "own-block",
    "own-positions", "partial-as-split", "pending", "product", "ratio", "same-block", "scaled",
    "scales", "small", "split-as-whole", "uneven", "wrong-dim", "wrong-gather",
]  # fmt: skip
"""The kinds of faults; `sbp.handwritten.check` has their text."""

COUNTED: tuple[Kind, ...] = ("averaged", "doubled", "pending", "scaled", "scales", "small")
"""These kinds are no faults if a number in the program is the number of devices."""

BY_SHARD: tuple[Kind, ...] = ("blocks", "local", "own-positions", "same-block")
"""These kinds are no faults if the devices exchange results of their shards, or rank their own
elements."""


@dataclass(frozen=True, slots=True)
class Fault:
    """A loss of meaning.

    Arguments:
      kind: the kind of fault.
      node: the operation that makes the faulty value.
      made: the operation that made its operand partial, or that first reduced it.
      operand: the position of the faulty operand, or of its dim.
      atoms: the types that the operand has on the mesh axis.
      number: a number in it, and that of the run with one device.
      power: the power of the number of devices by which its result is too large or too small.
    """

    kind: Kind
    node: Node
    made: Node | None = None
    operand: int = 0
    atoms: tuple[Atom, ...] = ()
    number: str = ""
    power: int = 1


@dataclass(frozen=True, slots=True, eq=False)
class Finding:
    """A fault that makes a result of a region wrong.

    Arguments:
      fault: the fault.
      mesh_axes: the mesh axes on which it occurs.
      observer: the first reduction of the faulty value; None without one.
      region: the shard_map.
      result: the position of the region's result.
      claim: the type that out_specs give that result; None if the finding is not about out_specs.
      numbers: numbers that may count devices, in which case the program may be right.
      means: whether the parts that are at fault add up to n times the value of one device.
      reordered: whether it shows only if the elements of each argument are in another order.
      path: of the result in what the program returns, where that is a result of the region.
    """

    fault: Fault
    mesh_axes: tuple[str, ...]
    observer: Node | None
    region: Node
    result: int = 0
    claim: Atom | None = None
    numbers: tuple[str, ...] = ()
    means: bool = False
    reordered: bool = False
    path: str = ""

    @property
    def result_text(self) -> str:
        """The result in words."""
        return result_text(self.result, self.path)

    @property
    def key(self) -> tuple[Any, ...]:
        """Two findings are one if their keys are equal: the same fault of one call."""
        f = self.fault
        where = (
            (f.node.span or f.node.id, f.node.op, f.node.backward)
            if f.node is not self.region
            else (f.node.id, self.result)
        )
        return f.kind, where


def region_findings(
    node: Node,
    typed: "Sequence[Body]",
    numbers: Mapping[int, str],
    results: Sequence[int],
    uneven: Collection[int],
    ends: list[Node],
) -> Iterator[Finding]:
    """The faults of a region on a mesh axis.

    Arguments:
      node: the region.
      typed: its body with its types on a mesh axis: in all trips of each scan, then in single ones.
      numbers: by the id of an operation, a number in it that may count devices.
      results: positions of the results that claim a type.
      uneven: positions of results that differ between devices and claim to be equal.
      ends: gets the operations whose results lack a type because of another device or its index.
    """
    body, name = typed[0], typed[0].name
    for i in results:
        operand = body.graph.outputs[i]
        claim = atom_of(node.params["out_specs"][i], name)
        fits = operand not in body.types or Reading(claim, 0) in body.readings(operand)
        if not isinstance(operand, int) or (fits and i not in uneven):
            continue
        claimed = body.claimed(operand, claim)
        # A wrong value in one trip of a loop often makes a count wrong in later trips.
        tried = [] if claimed else [(found, b) for b in typed if (found := b.lost(operand))]
        lost = min(tried, key=lambda pair: pair[0][0].kind in COUNTED, default=None)
        ends += next((b.ends for b in typed if b.ends), [])
        if claimed is None and lost is None and i in uneven:
            claimed = Fault("uneven", body.divided(operand) or node)
        (fault, observer), at = lost or ((claimed, None), body)
        if fault is not None:
            # Numbers on the way of a value that is off by a power of the number of devices.
            makers = body.makers(body.reached(operand)) if fault.kind in COUNTED else []
            made = lost is not None and fault.kind == "missing"
            first = 0 if body.over(fault.node) else fault.operand
            at_fault = fault.node.outputs if made else fault.node.inputs[first:]
            parts = [at.readings(o) for o in ((operand,) if claimed else at_fault[:1])]
            yield Finding(
                fault,
                (name,),
                observer,
                node,
                i,
                claim if claimed else None,
                tuple(sorted({numbers[m.id] for m in makers if m.id in numbers})),
                means=any(parts) and all(r.power for r in parts[0]),
            )


class Body:
    """The body of a region with its types on a mesh axis.

    Arguments:
      graph: the body.
      types: its types.
      name: the mesh axis.
      changed: by the ids of operations whose numbers are others with one device, these numbers.
    """

    def __init__(
        self, graph: Graph, types: Types, name: str, changed: Mapping[int, str] | None = None
    ) -> None:
        self.graph, self.types, self.name, self.changed = graph, types, name, changed or {}
        self.flow = Dataflow(graph)
        self.ends: list[Node] = []

    # ---- types ----------------------------------------------------------------------------------

    def readings(self, operand: Operand) -> Readings:
        """The readings of a value; a constant of the program is the same on all devices."""
        whole = frozenset({Reading(B, 0)})
        return self.types.get(operand, frozenset()) if isinstance(operand, int) else whole

    def atoms(self, operand: Operand, power: int | None = 0) -> tuple[Atom, ...]:
        """The types of a value in a fixed order, those with another power left out."""
        found = {r.atom for r in self.readings(operand) if power is None or r.power == power}
        return tuple(sorted(found, key=lambda atom: (atom != P, repr(atom))))

    def is_partial(self, operand: Operand) -> bool:
        """Whether every reading of a value is partial; that of equal parts, which are n times the
        whole value, does not count."""
        found = self.readings(operand)
        return bool(found) and all(isinstance(r.atom, Unreduced) for r in found)

    def is_whole(self, operand: Operand) -> bool:
        return Reading(B, 0) in self.readings(operand)

    def split(self, operand: Operand) -> Split | None:
        """The dim along which a value is split; None for a value that is whole as well."""
        found = [a for a in self.atoms(operand) if isinstance(a, Split)]
        return found[0] if found and not self.is_whole(operand) else None

    def stacked(self, operand: Operand) -> Operand | None:
        """The value whose parts on all devices stand side by side in a value; None for others."""
        maker = self.flow.maker(operand)
        if maker is None or not self.over(maker) or KINDS[maker.op] != CALLED["gathered"]:
            return None
        return None if maker.params["tiled"] else maker.inputs[0]

    def is_good(self, operand: Operand) -> bool:
        stacked = self.stacked(operand)
        return is_good(self.readings(operand if stacked is None else stacked))

    # ---- the way back ---------------------------------------------------------------------------

    def made_of(self, value: int) -> list[Operand]:
        """The values that a value is made of, or is in another round of a loop."""
        maker, found = self.flow.maker(value), self.flow.within(value)
        if maker is None:
            return found
        is_loop = maker.op in CONTROL_FLOW
        read = interface_of(maker).operands("predicate", maker.inputs) if is_loop else maker.inputs
        return [*read, *found]

    def upstream(
        self, value: Operand, through: Callable[[Operand], bool] = lambda v: True
    ) -> Iterator[int]:
        """A value, and the values that it depends on, the nearest first, as far as they are
        `through`."""

        def kept(operands: Iterable[Operand]) -> list[int]:
            return [o for o in operands if isinstance(o, int) and through(o)]

        return reached(kept([value]), lambda v: kept(self.made_of(v)))

    def reached(self, value: Operand) -> set[int]:
        """The values without a meaning through which a value depends on what has one."""
        return {*self.upstream(value, lambda v: not self.is_good(v))}

    def makers(self, values: Iterable[Operand]) -> list[Node]:
        """The operations that make some values, in program order."""
        made = set(values)
        return [node for node in self.graph.walk() if not made.isdisjoint(node.outputs)]

    def divided(self, value: Operand) -> Node | None:
        """The first operation on numbers after which the devices have other values."""
        nodes = self.makers(self.reached(value))
        numbers = (
            m
            for m in nodes
            if m.op not in CONTROL_FLOW
            and jnp.issubdtype(self.graph.avals[m.outputs[0]].dtype, jnp.inexact)
        )
        return next(numbers, nodes[0] if nodes else None)

    def sent(self, value: Operand) -> list[Node]:
        """The operations that a value depends on and that bring values without a meaning from other
        devices. Each device computes such a value from its own shard, for the device that receives
        it. A value that a loop carries counts too: it has a meaning in the first trip alone."""
        near = self.reached(value) | {o for graph in self.graph.graphs() for o in graph.outputs}
        return [
            m
            for m in self.makers(self.upstream(value))
            if self.over(m)
            and (
                (KINDS[m.op] in SENDING and not near.isdisjoint(m.outputs))
                or self.stacked(m.outputs[0]) is not None
            )
        ]

    def origin(self, value: Operand, *, pending: bool = False) -> Node | None:
        """The operation that first made a value partial, or a mean that is still to be divided."""

        def through(v: Operand) -> bool:
            return v == value or (self.is_partial(v) and not (pending and self.atoms(v)))

        made = self.makers(self.upstream(value, through))
        return next((m for m in made if m.op not in CONTROL_FLOW), None)

    def reducer(self, value: Operand) -> Node | None:
        """The last collective over the mesh axis that a whole value went through."""
        whole = self.upstream(value, lambda v: v == value or self.is_whole(v))
        collectives = (m for m in map(self.flow.maker, whole) if m is not None and self.over(m))
        return next((m for m in collectives if KINDS[m.op] not in SENDING), None)

    def power(self, value: Operand) -> int:
        """The power of the number of devices by which a value, or each of its shards, is too large;
        0 for a partial value."""
        found = (r for r in self.readings(value) if not isinstance(r.atom, Unreduced))
        return min((r.power for r in found), key=abs, default=0)

    def scaled(self, value: Operand, power: int) -> Fault | None:
        """The fault of a value that is too large or too small by the number of devices: its last
        reduction. If a product follows it, only `lax.pmean` and sums that JAX makes count."""
        made = [m for m in self.makers(self.upstream(value))[::-1] if self.over(m)]
        made = [m for m in made if KINDS[m.op] not in SENDING]
        if not made or abs(power) != 1:
            return None
        reads = {m: self.flow.readers.get(m.outputs[0], ()) for m in made}
        means = {m: next((r for r in reads[m] if r and PMEAN in r.library), None) for m in made}
        last = next((m for m in made if power > 0 and not means[m]), made[0])
        mean = means[last]
        if power < 0:
            return mean and Fault("averaged", mean, last)
        if last.in_gradient:
            return Fault("pending", last, last)
        behind = self.makers(self.upstream(value, lambda v: v not in last.outputs))
        traits = [traits_of(m.op) for m in behind]
        if mean or any(t.multiplies or t.numpy is np.divide for t in traits):
            return None
        return Fault("pending", self.flow.maker(last.inputs[0]) or last, last)

    def over(self, node: Node) -> bool:
        """Whether a collective runs over the mesh axis."""
        return node.op in KINDS and self.name in names_of(node)

    # ---- faults ---------------------------------------------------------------------------------

    def claimed(self, operand: int, claim: Atom) -> Fault | None:
        """The fault of a result that has a meaning, but not the type that out_specs claim."""
        found, node = self.atoms(operand), self.flow.makers.get(operand)
        if node is None or not is_good(self.readings(operand)):
            return None
        split = tuple(a for a in found if isinstance(a, Split))
        match claim:
            case Unreduced():
                kind = "copies-as-partial" if B in found else "wrong-dim"
                return Fault(kind, node, self.reducer(operand), 0, found[:1])
            case _ if self.is_partial(operand):
                made, partial = self.origin(operand) or node, self.atoms(operand, None)[:1]
                kind = "missing" if claim == B else "partial-as-split"
                return Fault(kind, made, made, 0, partial)
            case Broadcast():
                return Fault("split-as-whole", node, None, 0, split)
            case Split(dim) if B in found:
                return Fault("copies-as-split", node, self.reducer(operand), dim, (B,))
            case Split(dim):
                return Fault("wrong-dim", node, None, dim, split)

    def lost(self, operand: int) -> tuple[Fault, Node | None] | None:
        """The fault of a result without a meaning, and the first reduction of the faulty value.
        None if the result depends on values of other devices or on the index of a device."""
        reached = self.reached(operand)
        nodes = [m for m in self.makers(reached) if m.op not in CONTROL_FLOW]
        of_typed = {
            m: self.of_operation(m)
            for m in nodes
            if any(v in self.types for v in m.outputs) and reached.isdisjoint(m.inputs)
        }
        faults = [(m, fault) for m, fault in of_typed.items() if fault is not None]
        ends = [m for m, fault in of_typed.items() if fault is None]
        sent = self.sent(operand)
        if not faults or any(fault.kind not in (*COUNTED, "monoid") for _, fault in faults):
            ends += sent
        self.ends += ends
        if not faults and not sent:
            # What a loop carries was whole before its first trip, and is a sum of parts after it.
            loops = (n for n in self.makers(reached) if n.op in CONTROL_FLOW)
            exits = ((n, e) for n in loops for e in interface_of(n).exits if e.entry is not None)
            left = (n.regions[e.region].outputs[e.output] for n, e in exits)
            made = next((self.origin(o) for o in left if self.atoms(o, None) == (P,)), None)
            if made is not None and not places_of(made):
                return Fault("missing", made, made, 0, (P,)), None
        if not faults or faults[0][1].kind in BY_SHARD:
            whole = (v for v in sorted(reached) if self.power(v))
            found = next((f for v in whole if (f := self.scaled(v, self.power(v)))), None)
            if found is not None:
                return found, None
        if not faults or ends:
            # Of a partial value, each device takes the block of its own index.
            taking = (
                m
                for m in nodes
                if reached & {m.inputs[i] for i in places_of(m)}
                and self.is_partial(m.inputs[0])
                and self.origin(m.inputs[0])
            )
            own = next(taking, None)
            if sent or own is None:
                return None
            partial = self.atoms(own.inputs[0], None)[:1]
            return Fault("own-block", own, self.origin(own.inputs[0]), 0, partial), None
        node, fault = faults[0]
        after = nodes[nodes.index(node) + 1 :]
        return fault, next((m for m in after if self.over(m) and m.op in REDUCTIONS), None)

    def of_operation(self, node: Node) -> Fault | None:
        """The fault of an operation whose operands have a meaning; None where it depends on other
        devices or on the index of its device on purpose."""
        if node.op == AXIS_INDEX:
            return None
        if self.over(node):
            return self.of_collective(node)
        ins = node.inputs
        stack = next((x for o in ins if (x := self.stacked(o)) is not None), None)
        if stack is not None:
            if self.is_partial(stack) and not self.atoms(stack):  # a mean of each shard
                return Fault("pending", self.origin(stack, pending=True) or node, node)
            return None
        partial = tuple(i for i, o in enumerate(ins) if self.is_partial(o))
        split = [i for i, o in enumerate(ins) if self.split(o)]
        traits, function = traits_of(node.op), traits_of(node.op).numpy
        if partial:
            atoms = self.atoms(ins[partial[0]], None)[:1]
            made = self.origin(ins[partial[0]])
            kind: Kind = "nonlinear"
            if split:
                kind = "mixed"
            elif function is np.divide and 1 in partial:
                return Fault("ratio", node, self.origin(ins[1]), 1)
            elif len(partial) > 1 and traits.multiplies:
                kind = "product"
            elif function in (np.add, np.subtract):
                kind = "added" if len(partial) < len(ins) else "scales"
                whole = next((i for i in range(len(ins)) if i not in partial), 0)
                return Fault(kind, node, made, whole)
            return Fault(kind, node, made, min(partial), atoms)
        out = self.readings(node.outputs[0])
        if any(not isinstance(r.atom, Unreduced) for r in out):
            down = {r.atom for r in out if r.power < 0}
            averaged = B in down and PMEAN in node.library
            scaled = "averaged" if averaged else "small" if down else "scaled"
            power = max(1, min(abs(r.power) for r in out if not isinstance(r.atom, Unreduced)))
            return Fault(scaled, node, self.reducer(ins[0]), power=power)
        if node.id in self.changed:
            return Fault("number", node, number=self.changed[node.id])
        if split:
            atoms = tuple(a for a in self.atoms(ins[split[0]]) if isinstance(a, Split))
            return Fault("local", node, None, split[0], atoms)
        if not ins:
            return Fault("own-positions", node)
        return Fault("same-block", node) if traits.moves else None

    def of_collective(self, node: Node) -> Fault | None:
        """The fault of a collective over the mesh axis."""
        operand, dim = node.inputs[0], node.params.get("all_gather_dimension", 0)
        whole, split = self.is_whole(operand), self.split(operand)
        match KINDS[node.op]:
            case "all_reduce" | "reduce_scatter":
                monoid, atoms = REDUCTIONS.get(node.op, "sum"), self.atoms(operand)
                if whole:
                    return Fault("doubled", node, self.reducer(operand))
                if split:
                    return Fault("blocks", node, None, 0, (split,))
                if monoid == "sum" and not atoms:  # a mean of each shard
                    return Fault("pending", self.origin(operand, pending=True) or node, node)
                if atoms and Unreduced(monoid) not in atoms:
                    return Fault("monoid", node, self.origin(operand), 0, atoms[:1])
            case "all_gather" if node.params["tiled"]:
                if whole:
                    return Fault("copies", node, self.reducer(operand), dim)
                if split:
                    return Fault("wrong-gather", node, None, dim, (split,))
                if self.is_partial(operand):
                    partial = self.atoms(operand)[:1]
                    return Fault("partial-as-split", node, self.origin(operand), dim, partial)
            case "all_to_all" if whole:
                return Fault("copies", node, self.reducer(operand), node.params["concat_axis"])
            case _:
                pass
        return None
