"""Program -> what its inputs are (weights, the optimiser's state, or other arguments), and its
strategy: what each mesh axis is used for, in the names of the field.

The strategy is read from the types of the plan: the mesh axes may have any names. The share of a
role is that of the floating-point operations of the forward pass; products of the backward pass
follow those of the forward pass.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator, Set
from dataclasses import dataclass
from typing import Literal

from sbp import _jax
from sbp.annotations import annotate_p
from sbp.infer.space import Code
from sbp.plan.program import Program
from sbp.plan.traffic import Phase, Phases, sends
from sbp.report.parts import grouped
from sbp.signatures import kernel_named, traits_of
from sbp.trace.dataflow import Dataflow
from sbp.trace.graph import Graph, Node, Operand
from sbp.trace.regions import CONTROL_FLOW, Entry, interface_of, trips_of

# ---- inputs -------------------------------------------------------------------------------------


InputClass = Literal["weights", "optimiser", "other arguments"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Product:
    """A product of the forward pass.

    Attributes:
      node: the node.
      flops: of all its runs, on whole tensors.
      weight: the operand that is a weight, 0 or 1, and the input of the program that it is; None
        where both are activations.
    """

    node: Node
    flops: float
    weight: tuple[int, int] | None


class InputUses:
    """How a program uses its inputs.

    Arguments:
      program: the plan.

    Attributes:
      phases: of its operations.
      dataflow: the values of the program.
      readers: for the number of each input, the phases that read it, directly or as an operand that
        is the input rearranged or cast.
      products: those of the forward pass.
      lookups: those of the forward pass, each with the number of the input that is its table, or
        None.
      weights: the numbers of the inputs that products and lookups take as weights.
    """

    def __init__(self, program: Program) -> None:
        self.graph: Graph = program.graph
        self.phases = Phases(self.graph)
        self.dataflow = Dataflow(self.graph)
        self._position = {v: n for n, v in enumerate(self.graph.inputs)}
        self.readers = self._readers()
        self.products = list(self._products())
        self.lookups = [
            (node, self.root(node.inputs[0]))
            for node in self.graph.walk()
            if self.phases.of[node.id] == "forward" and is_lookup(node)
        ]
        self.weights = {p.weight[1] for p in self.products if p.weight}
        self.weights |= {root for _, root in self.lookups if root is not None}

    def class_of(self, number: int) -> InputClass:
        """What an input is. In a step with an update, weights are what the update reads too, and
        the optimiser's state is what it alone reads; elsewhere weights are those of products and
        lookups.

        Arguments:
          number: of the input.
        """
        read = self.readers[number]
        if number in self.weights or ("update" in read and len(read) > 1):
            return "weights"
        return "optimiser" if read == {"update"} else "other arguments"

    def _readers(self) -> dict[int, set[Phase]]:
        """The phases that read each input of the program, directly or as an operand that is the
        input rearranged or cast."""
        reads: Iterator[tuple[int, Phase]] = (
            (root, self.phases.of[node.id])
            for node in self.graph.walk()
            if node.op not in CONTROL_FLOW and not _passes(node)
            for operand in node.inputs
            if (root := self.root(operand)) is not None
        )
        found = grouped(reads, lambda read: read[0])
        return {n: {phase for _, phase in found.get(n, ())} for n in range(len(self.graph.inputs))}

    def root(self, operand: Operand) -> int | None:
        """The input of the program that a value is, rearranged, cast, or read in a loop."""
        return self.origin(operand)[0]

    def origin(self, operand: Operand) -> tuple[int | None, list[tuple[Node, Entry]]]:
        """The same, with the regions that it enters on its way."""
        entered = list[tuple[Node, Entry]]()
        while isinstance(operand, int) and operand not in self._position:
            node = self.dataflow.makers.get(operand)
            if operand in self.dataflow.entries:
                node, entry = self.dataflow.entries[operand]
                if entry.kind == "carry":
                    return None, entered
                entered.append((node, entry))
                operand = node.inputs[entry.operand]
            elif node is not None and node.op in CONTROL_FLOW:  # a loop that casts or rearranges
                left = interface_of(node).exit_to(node.outputs.index(operand))
                operand = node.regions[left.region].outputs[left.output]
            elif node is not None and _passes(node):
                single = len(node.outputs) == 1
                operand = node.inputs[_moved(node) if single else node.outputs.index(operand)]
            else:
                return None, entered
        return self._position[operand] if isinstance(operand, int) else None, entered

    def _products(self) -> Iterator[Product]:
        for node, runs in nodes_with_runs(self.graph):
            traits = traits_of(node.op)
            if self.phases.of[node.id] == "forward" and traits.contracts and traits.flops:
                weight, *others = self._weights(node) or [None]
                if not others:
                    yield Product(node=node, flops=runs * flops_of(self.graph, node), weight=weight)

    def _weights(self, node: Node) -> list[tuple[int, int]]:
        """Which operand of a product is a weight: an input that the update reads too; without an
        update, the only operand that is an input, or the second of two. Both operands where they
        are inputs that the update does not read: frozen weights, or data."""
        roots = [(n, r) for n in (1, 0) if (r := self.root(node.inputs[n])) is not None]
        if "update" not in self.phases.of.values():
            return roots[:1]
        return [(n, r) for n, r in roots if "update" in self.readers[r]][:1] or roots


def nodes_with_runs(graph: Graph, runs: int = 1) -> Iterator[tuple[Node, int]]:
    """The nodes of a graph and of its regions, each with how often it runs per call."""
    for node in graph.nodes:
        yield node, runs
        for region in node.regions:
            yield from nodes_with_runs(region, runs * trips_of(node))


def flops_of(graph: Graph, node: Node) -> float:
    """The floating-point operations of a product; 0 for other operations."""
    flops = traits_of(node.op).flops
    shapes = [tuple(graph.aval(o).shape) for o in node.inputs]
    results = [tuple(graph.avals[v].shape) for v in node.outputs]
    return 0.0 if flops is None else flops(node.params, shapes, results)


def is_lookup(node: Node) -> bool:
    traits = traits_of(node.op)
    return traits.moves and 1 in traits.indices and len(node.inputs) == 2


def _passes(node: Node) -> bool:
    """Whether a result is an operand of the node, rearranged or cast."""
    traits = traits_of(node.op)
    rearranges = bool(traits.moves or traits.regroups or traits.carries)
    single = len(node.outputs) == 1 and _moved(node) >= 0 and not is_lookup(node)
    return node.is_barrier or node.op == annotate_p.name or (rearranges and single)


def _moved(node: Node) -> int:
    """The only operand of a node that is no index; -1 where there are several."""
    indices = traits_of(node.op).indices
    moved = [n for n in range(len(node.inputs)) if n not in indices]
    return moved[0] if len(moved) == 1 else -1


# ---- strategy -----------------------------------------------------------------------------------


Role = Literal["data", "sequence", "space", "tensor", "expert", "pipeline", "activations", "none"]
"""What a product splits along a mesh axis.

* `data`: examples, with whole weights; `sequence`: tokens that meet others in attention; `space`:
  places of an image, whose borders are exchanged;
* `tensor`: a free or summed dim of its weights; `expert`: a dim that numbers weights; `pipeline`:
  such a dim, in a loop that has the weights all along and passes values to the next device;
* `activations`: of a product of two activations, one at least; `none`: nothing.
"""

NAMES: dict[Role, str] = {
    "data": "data parallel",
    "sequence": "sequence parallel",
    "space": "images split in space",
    "tensor": "tensor parallel",
    "expert": "expert parallel",
    "pipeline": "pipeline of stages",
    "none": "the same on all its devices in forward products",
}
SEEN = 0.05
"""Share of the operations, or of the bytes, from which a role is named."""

_MOST = 1 - SEEN


def strategy(program: Program) -> dict[str, str]:
    """What each mesh axis with more than one device is used for, in words, in the order of the
    mesh; empty for a program without products."""
    reading = _Reading(program)
    axes = program.mesh.axes if reading.uses.products else ()
    return {axis: reading.use(k) for k, (axis, size) in enumerate(axes) if size > 1}


class _Reading:
    """What a program's strategy is read from."""

    def __init__(self, program: Program) -> None:
        self.program = program
        self.graph = program.graph
        self.uses = InputUses(program)
        self.sends = sends(program)

    def use(self, k: int) -> str:
        """What the mesh axis at a position is used for. Of roles, the shares are those of the
        floating-point operations of products with weights; in a program without weights, of all
        products."""
        if self._is_idle(k):
            return "unused: its devices all do the same"
        part = self._part(k)
        roles, split = defaultdict[Role, float](float), defaultdict[int, bool](bool)
        tables = set[str]()
        for product in self.uses.products:
            role, splits = self._role(product, k, part)
            roles[role] += product.flops
            if product.weight is not None:
                split[product.weight[1]] |= splits
        for node, root in self.uses.lookups:
            if root is not None:
                rows = self._taken(node, k)[0] > 0
                split[root] |= rows
                if rows:
                    tables.add("vocabulary" if self._made(node, k) < 0 else "tables")
        total = sum(roles[role] for role in NAMES)
        shares: dict[Role, float] = {role: roles[role] / (total or 1.0) for role in NAMES}
        most = sorted(shares.items(), key=lambda item: -item[1])
        found: dict[Role, float] = {role: share for role, share in most if share >= SEEN}
        said = [
            NAMES[role] + (f" ({share:.0%} of FLOPs)" if share < _MOST and len(found) > 1 else "")
            for role, share in found.items()
        ]
        if "tensor" in found and self._tokens(k):
            said.append("tokens split between its products (sequence parallel)")
        said += [f"{table} split" for table in sorted(tables)]
        said += self._stored(k, split, found.keys())
        return ", ".join(said) or "products of activations alone"

    def _stored(self, k: int, split: dict[int, bool], roles: Set[str]) -> Iterator[str]:
        """What is split only for its memory.

        Arguments:
          k: position of the mesh axis.
          split: for the inputs that are weights, whether products or lookups split them there.
          roles: those of the products.
        """
        inputs, values = self.graph.inputs, self.program.typing.values
        stored = {n for n, value in enumerate(inputs) if values[value][k] > 0}
        state = {n for n in range(len(inputs)) if self.uses.class_of(n) == "optimiser"}
        kept = {n for n, splits in split.items() if splits}
        gathered, held = self._share(stored - kept, split.keys()), self._share(stored, state)
        if gathered >= SEEN:
            some = "" if gathered >= _MOST else f" ({gathered:.0%} of them)"
            yield f"weights gathered on use (FSDP){some}"
            if roles.isdisjoint(("tensor", "expert")):
                yield "not tensor parallel"
        elif held >= SEEN and held > self._share(kept, split.keys()) + SEEN:
            yield "optimiser split (ZeRO-1)"

    def _share(self, part: Set[int], whole: Set[int]) -> float:
        """The share of some inputs in the bytes of others."""
        avals = [self.graph.avals[value] for value in self.graph.inputs]
        sizes = [math.prod(aval.shape) * _jax.itemsize(aval.dtype) for aval in avals]
        total = sum(sizes[n] for n in whole)
        return sum(sizes[n] for n in part & whole) / total if total else 0.0

    def _is_idle(self, k: int) -> bool:
        typing = self.program.typing
        types = [t for row in typing.rows.values() for t in (*row.ins, *row.outs)]
        split = any(t[k] for t in (*types, *typing.values.values(), *typing.outputs))
        return not split and not self.program.written_by_hand()

    def _taken(self, node: Node, k: int) -> list[Code]:
        """The codes in which a node takes its operands; what a kernel gathers is B."""
        row = self.program.typing.rows[node.id]
        codes = [types[k] for types in row.ins]
        if row.kernels and (gathered := kernel_named(row.kernels[k]).gathers) is not None:
            codes[gathered] = 0
        return codes

    def _made(self, node: Node, k: int) -> Code:
        return self.program.typing.rows[node.id].outs[0][k]

    def _role(self, product: Product, k: int, part: Role) -> tuple[Role, bool]:
        """What a product does along a mesh axis, and whether its weight is split there.

        Arguments:
          product: the product.
          k: position of the mesh axis.
          part: what products split there whose weights are whole.
        """
        codes = self._taken(product.node, k)
        if product.weight is None:
            return ("activations" if codes[0] > 0 or codes[1] > 0 else "none"), False
        weight, other = codes[product.weight[0]], codes[1 - product.weight[0]]
        if weight > 0:
            if other > 0 and self._made(product.node, k) > 0:
                return ("pipeline" if self._takes_turns(product, k) else "expert"), True
            return "tensor", True
        if other > 0:
            kernels = self.program.typing.rows[product.node.id].kernels
            if kernels and kernel_named(kernels[k]).widens is not None:
                return "space", False
            return part, False
        return ("tensor" if other < 0 else "none"), False

    def _part(self, k: int) -> Role:
        """What products split whose weights are whole."""
        meets = [p for p in self.uses.products if p.weight is None]
        alone = [p for p in meets if 0 in self._taken(p.node, k)]
        # Of attention that splits its examples, both operands of its products are split.
        if 2 * sum(p.flops for p in alone) > sum(p.flops for p in meets) or self._splits_inner(k):
            return "sequence"
        return "data"

    def _splits_inner(self, k: int) -> bool:
        """Whether most of the batch that is split along a mesh axis when it arrives is split along
        another one too, in a dim before: examples there, and tokens here."""
        types = [self.program.typing.values[value] for value in self.graph.inputs]
        batch = {
            n: codes
            for n, codes in enumerate(types)
            if codes[k] > 0 and self.uses.class_of(n) == "other arguments"
        }
        inner = {n for n, codes in batch.items() if any(0 < c < codes[k] for c in codes)}
        return self._share(inner, batch.keys()) > 0.5

    def _takes_turns(self, product: Product, k: int) -> bool:
        """Whether a product stands in a loop that has its weights all along and passes values to
        the next device of a mesh axis."""
        assert product.weight is not None
        axis = self.program.mesh.names[k]
        passing = (one for one in self.sends if one.kind == "permute" and axis in one.mesh_axes)
        loops = {node.id for one in passing for node in one.regions}
        _, entered = self.uses.origin(product.node.inputs[product.weight[0]])
        return any(node.id in loops and entry.kind == "constant" for node, entry in entered)

    def _tokens(self, k: int) -> bool:
        """Whether more of what products of the forward pass add up along an axis is left split
        than whole."""
        phases = self.uses.phases.of
        sent = [
            (one.step.kind, one.bytes)
            for one in self.sends
            if one.maker and phases[one.maker.id] == "forward"
            if one.step and k in one.step.mesh_axes
        ]
        # Of one sum, an all-reduce sends twice what a reduce-scatter does.
        scattered = sum(size for kind, size in sent if kind == "reduce_scatter")
        return 2 * scattered > sum(size for kind, size in sent if kind == "all_reduce")
