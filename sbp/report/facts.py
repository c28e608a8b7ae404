"""Program -> facts: tensors with types, annotated tensors, regions, collectives with the lines that
make the values and need them converted, what inputs are (weights, the optimiser's state, or other
arguments), and the strategy: what each mesh axis is used for, in the names of the field."""

from collections import Counter, defaultdict
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, replace
from typing import Any, Literal

from sbp.annotations import Pin, annotate_p
from sbp.errors import listed, position_text
from sbp.explain.change import applicable
from sbp.explain.names import Names
from sbp.explain.origins import ConversionReason, Origins
from sbp.infer.rows import seen_codes
from sbp.infer.space import Code, local_bytes, to_type
from sbp.plan.ir import Register, Source
from sbp.plan.program import Phase, Phases, Program, Send, place, sends, shape_text
from sbp.report.wording import (
    SEGMENT_LIMIT,
    common_name,
    maker_text,
    need_text,
    node_text,
    output_name,
    span_text,
    without_numbers,
)
from sbp.signatures import kernel_named, traits_of
from sbp.source.reader import annotated_text, shorten, users_span
from sbp.trace.graph import (
    CONTROL_FLOW,
    Graph,
    Node,
    Operand,
    group_by,
    nodes_with_runs,
    reached,
)
from sbp.types import NdSbp

# ---- tensors ------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Tensor:
    """An argument, a result, an annotated tensor, or what is in memory.

    Arguments:
      name: the user's name.
      shape, local_shape: dtype and shape of the tensor and of one device's shard.
      global_shape: the shape of the tensor.
      type: its type.
      bytes_per_device: bytes of one device's shard.
      donated: whether it is a donated argument.
      padded: whether it is held as `sbp.Padded`.
      kind: the class of what is in memory.
      where: the line of an annotation, and the line that makes what is in memory.
      pin: the type that an annotation asks for.
      is_repeat: whether it is a copy in a backward pass, with another type than the first.
    """

    name: str
    shape: str
    global_shape: tuple[int, ...]
    type: NdSbp
    local_shape: str = ""
    bytes_per_device: float = 0.0
    donated: bool = False
    padded: bool = False
    kind: str = ""
    where: str = ""
    pin: Pin | None = None
    is_repeat: bool = False


def tensor(program: Program, source: Source, name: str) -> Tensor:
    """A register or constant as a fact.

    Arguments:
      program: the plan.
      source: the register or constant.
      name: the user's name.
    """
    aval = (
        program.graph.avals[source.value] if isinstance(source, Register) else source.constant.aval
    )
    return Tensor(
        name=name,
        shape=shape_text(aval),
        global_shape=tuple(aval.shape),
        type=to_type(source.codes, program.mesh),
        local_shape=shape_text(aval, source.codes, program.mesh.sizes),
        bytes_per_device=local_bytes(aval, source.codes, program.mesh.sizes),
    )


def inputs(program: Program) -> list[Tensor]:
    """The arguments."""
    return [
        replace(
            tensor(program, register, name),
            donated=number in program.reused,
            padded=program.request.demand.is_padded("input", number),
        )
        for number, (register, name) in enumerate(
            zip(program.block.inputs, program.graph.input_names, strict=True)
        )
    ]


def outputs(program: Program, output_names: tuple[str, ...]) -> list[Tensor]:
    """The results."""
    return [
        replace(
            tensor(program, s, output_name(output_names, i)),
            padded=program.request.demand.is_padded("output", i),
        )
        for i, s in enumerate(program.block.outputs)
    ]


def alike(tensors: Sequence[Tensor]) -> list[tuple[Tensor, int]]:
    """Tensors in order, each with how many there are of it: those of several layers, which have the
    same shape and type and names that differ only in numbers, are one, with a star in its name.

    Arguments:
      tensors: the tensors.
    """
    return [
        (replace(one, name=common_name([t.name for t in same])), len(same))
        for one, same in group_by(
            tensors, lambda one: replace(one, name=without_numbers(one.name))
        ).items()
    ]


def times_text(name: str, count: int) -> str:
    """A name, and how many there are of it where there are several.

    >>> times_text("w", 1), times_text("blocks[*]", 3)
    ('w', 'blocks[*] (3)')
    """
    return name if count == 1 else f"{name} ({count})"


def exceptions(tensors: Sequence[Tensor]) -> list[tuple[list[Tensor], NdSbp, int]]:
    """Tensors whose type differs from the type that most layers have for the tensor of the same
    name and shape. Each group has such tensors of one type, the type in the other layers, and how
    many other layers there are.

    Arguments:
      tensors: the tensors.
    """
    found = list[tuple[Tensor, NdSbp, int]]()
    for same in group_by(tensors, lambda t: (without_numbers(t.name), t.shape)).values():
        (common, count), *_ = Counter(t.type for t in same).most_common()
        if count > 2 * (len(same) - count):
            found += [(t, common, count) for t in same if t.type != common]
    return [
        ([t for t, *_ in group], *group[0][1:])
        for group in group_by(found, lambda odd: (odd[0].type, *odd[1:])).values()
    ]


def counted_bytes(found: Iterable[tuple[Tensor, int]]) -> float:
    """The bytes of tensors on one device, each with how many there are of it."""
    return sum(count * one.bytes_per_device for one, count in found)


def annotated_tensors(program: Program) -> list[Tensor]:
    """The annotated tensors in program order, each by its source text. Copies of an annotation that
    autodiff and rematerialisation make are one where they have the same type."""
    found: dict[Tensor, None] = {}
    for node in program.graph.walk():
        if node.op == annotate_p.name and node.params["pin"] is not None and (span := node.span):
            value = node.outputs[0]
            name = shorten(annotated_text(span), SEGMENT_LIMIT) or span_text(span) or "a tensor"
            made = replace(
                tensor(program, Register(value, program.typing.values[value]), name),
                where=position_text(span.file, span.line),
                pin=node.params["pin"],
            )
            if made not in found:
                same = (
                    (f.where, f.pin, f.name) == (made.where, made.pin, made.name) for f in found
                )
                found[replace(made, is_repeat=node.backward and any(same))] = None
    return list(found)


# ---- collectives --------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Collective:
    """Collectives of one kind on the same mesh axes, made and needed at the same lines.

    Arguments:
      kind: the collective.
      mesh_axes: names of the mesh axes it runs over.
      changes: the atoms on these axes before and after, in words.
      runs: executions per call.
      bytes_per_device: bytes one device sends per call.
      tensors: dtype and global shape of the converted values.
      line: the line that makes the value; the line of the reader where there is none.
      made: the makers of the values, in words.
      needed: the readers that need the values converted, in words, without results of the program.
      returned: names of the results of the program that are returned converted.
    """

    kind: str
    mesh_axes: str
    changes: tuple[str, ...]
    runs: int
    bytes_per_device: float
    tensors: tuple[str, ...]
    line: str
    made: tuple[str, ...]
    needed: tuple[str, ...]
    returned: tuple[str, ...] = ()


def collectives(program: Program, output_names: tuple[str, ...] = ()) -> list[Collective]:
    """The plan's collectives, grouped, most bytes first; groups of equal bytes in program order.

    Arguments:
      program: the plan.
      output_names: names of the results.
    """
    origins = Origins(program)
    groups = defaultdict[Hashable, list[Collective]](list)
    for send in sends(program):
        if send.planned is None or send.step is None:
            one = _of_operation(program, send)
            groups[one.kind, one.mesh_axes, one.line].append(one)
        else:
            reason = origins.reason(send.planned, send.step.source, send.step.target)
            results = [output_name(output_names, n.number) for n in reason.needs if n.is_returned]
            one = _collective(
                program.graph,
                send,
                (send.planned.box.target.value,),
                line=_line(reason),
                made=(maker_text(reason),),
                needed=() if reason.need.is_returned else (need_text(reason),),
                returned=(listed(results, 1),) if reason.need.is_returned else (),
            )
            key = (one.kind, one.mesh_axes, one.changes, one.made)
            groups[*key, one.needed if reason.need.is_read else ()].append(one)
    return _merge(groups)


def _collective(graph: Graph, send: Send, values: Iterable[int], **told: Any) -> Collective:
    return Collective(
        kind=send.kind,
        mesh_axes=send.axes,
        changes=(send.change,),
        runs=send.runs,
        bytes_per_device=send.bytes,
        tensors=tuple(shape_text(graph.avals[v]) for v in values),
        **told,
    )


def _of_operation(program: Program, send: Send) -> Collective:
    """A collective inside a kernel or a region written by hand."""
    assert send.node is not None and send.maker is not None
    graph, node, needed = program.graph, send.maker, "it is in a hand-written region"
    if send.kernel:
        kernel = kernel_named(send.kernel)
        needed = f"its kernel {kernel.name!r}: {kernel.summary}"
    else:
        op = node.op.removesuffix("_invariant")  # JAX's name of a `psum` with check_vma=True
        graph, node = send.node.params["body"], replace(node, op=op)
    return _collective(
        graph,
        send,
        node.outputs,
        line=place(span) if (span := users_span(node)) else "",
        made=(node_text(node),),
        needed=(needed,),
    )


def by_line(found: Iterable[Collective]) -> list[Collective]:
    """Groups of collectives merged by kind, mesh axes and source line."""
    return _merge(group_by(found, lambda one: (one.kind, one.mesh_axes, one.line)))


def _merge(groups: Mapping[Any, Sequence[Collective]]) -> list[Collective]:
    """One collective for each group, most bytes first."""
    return sorted(
        (
            replace(
                group[0],
                changes=tuple(dict.fromkeys(change for c in group for change in c.changes)),
                runs=sum(c.runs for c in group),
                bytes_per_device=sum(c.bytes_per_device for c in group),
                tensors=tuple(t for c in group for t in c.tensors),
                made=tuple(dict.fromkeys(m for c in group for m in c.made)),
                needed=tuple(dict.fromkeys(n for c in group for n in c.needed)),
                returned=tuple(dict.fromkeys(n for c in group for n in c.returned)),
            )
            for group in groups.values()
        ),
        key=lambda c: -c.bytes_per_device,
    )


def detail(one: Collective, limit: int = 2) -> str:
    """The makers and readers of a collective, in a sentence.

    Arguments:
      one: the collective.
      limit: how many makers, readers and results are named; the others are counted.
    """
    returned = (f"returned as {listed(one.returned, limit)}",) if one.returned else ()
    return f"made by {listed(one.made, limit)}; {listed((*one.needed, *returned), limit)}"


def _line(reason: ConversionReason) -> str:
    """The line of the maker; where it has none, that of the reader."""
    lines = (
        f"{'the gradient of ' if node.in_gradient else ''}{place(span)}"
        for node in (reason.maker, reason.need.node if reason.need.is_read else None)
        if node
        for span in [node.span if node.op == annotate_p.name else users_span(node)]
        if span
    )
    return next(lines, str(reason.value))


# ---- inputs -------------------------------------------------------------------------------------


InputClass = Literal["weights", "optimiser", "other arguments"]


Weight = tuple[int, int]
"""The operand of a product that is a weight, 0 or 1, and the input of the program that it is."""


class InputUses:
    """How a program uses its inputs.

    Arguments:
      program: the plan.

    Attributes:
      phases: the phase of each operation.
      names: the maker, the readers and the user's name of each value.
      readers: by the number of an input, the phases that read it. A phase also reads an input if an
        operand is the input after casts and rearrangements.
      products: the products of the forward pass. Each has the floating-point operations of all its
        runs, on whole tensors, and its weight; None if both operands are activations.
      lookups: the lookups of the forward pass, each with the number of the input that is its table;
        None if its table is no input.
      reads: the products and lookups that read weights, each with the number of the operand and the
        number of the input.
      weights: the numbers of these inputs.
    """

    def __init__(self, program: Program) -> None:
        self.graph: Graph = program.graph
        self.phases, self.names = Phases(self.graph), Names(self.graph)
        reads: Iterator[tuple[int, Phase]] = (
            (root, self.phases.of[node.id])
            for node in self.graph.walk()
            if node.op not in CONTROL_FLOW and not _passes(node)
            for operand in node.inputs
            if (root := self.root(operand)) is not None
        )
        found = group_by(reads, lambda read: read[0])
        self.readers: dict[int, set[Phase]] = {
            n: {phase for _, phase in found.get(n, ())} for n in range(len(self.graph.inputs))
        }
        self.products: list[tuple[Node, float, Weight | None]] = [
            (node, runs * flops_of(self.graph, node), next(iter(weights), None))
            for node, runs in nodes_with_runs(self.graph)
            if self.phases.of[node.id] == "forward"
            if traits_of(node.op).contracts and traits_of(node.op).flops
            if len(weights := self._weights(node)) < 2  # two inputs: data or frozen weights
        ]
        self.lookups = [
            (node, self.root(node.inputs[0]))
            for node in self.graph.walk()
            if self.phases.of[node.id] == "forward" and is_lookup(node)
        ]
        self.reads = [
            *((node, *weight) for node, _, weight in self.products if weight),
            *((node, 0, root) for node, root in self.lookups if root is not None),
        ]
        self.weights = {root for *_, root in self.reads}

    def class_of(self, number: int) -> InputClass:
        """What an input is. In a step with an update, weights are what the update reads too, and
        the optimiser's state is what it alone reads; elsewhere weights are those of products and
        lookups.

        Arguments:
          number: of the input.
        """
        read = self.readers[number]
        is_weight = number in self.weights or ("update" in read and len(read) > 1)
        other = "optimiser" if read == {"update"} else "other arguments"
        return "weights" if is_weight else other

    def root(self, operand: Operand) -> int | None:
        """The input of the program that a value is, rearranged, cast, or read in a loop."""
        *_, last = reached([operand], self.before)
        return self.names.inputs.get(last)

    def before(self, operand: Operand) -> list[Operand]:
        """The value that a value is, rearranged, cast, or read in a loop; none for an input of the
        program, for a carry of a loop, and for what an operation computes."""
        node, around = self.names.maker(operand), self.names.within(operand)
        is_carry = operand in self.names.entries and len(around) > 1  # also what the body returns
        if is_carry or operand in self.names.inputs:
            return []
        if around or node is None or not _passes(node):
            return around[:1]
        many = len(node.outputs) > 1  # a barrier, whose results are its operands
        return [node.inputs[node.outputs.index(operand) if many else _moved_operand(node)]]

    def _weights(self, node: Node) -> list[Weight]:
        """Which operand of a product is a weight: an input that the update reads too; without an
        update, the only operand that is an input, or the second of two; of a product with two
        batch dims, such as one of attention, neither. Both operands where they are inputs that the
        update does not read: frozen weights, or data."""
        roots = [(n, r) for n in (1, 0) if (r := self.root(node.inputs[n])) is not None]
        if "update" not in self.phases.of.values():
            numbers = node.params.get("dimension_numbers", ())  # contracted and batch dims
            is_numbered = len(numbers) == 2 and len(numbers[1][0]) > 1
            return [] if is_numbered else roots[:1]
        return [(n, r) for n, r in roots if "update" in self.readers[r]][:1] or roots


def flops_of(graph: Graph, node: Node) -> float:
    """The floating-point operations of a product; 0 for other operations."""
    flops = traits_of(node.op).flops
    ins, outs = ([tuple(graph.aval(o).shape) for o in side] for side in (node.inputs, node.outputs))
    return 0.0 if flops is None else flops(node.params, ins, outs)


def is_lookup(node: Node) -> bool:
    traits = traits_of(node.op)
    return traits.moves and 1 in traits.indices and len(node.inputs) == 2


def _passes(node: Node) -> bool:
    """Whether a result is an operand of the node, rearranged or cast."""
    traits = traits_of(node.op)
    rearranges = bool(traits.moves or traits.regroups or traits.carries)
    single = len(node.outputs) == 1 and _moved_operand(node) >= 0 and not is_lookup(node)
    return node.is_barrier or node.op == annotate_p.name or (rearranges and single)


def _moved_operand(node: Node) -> int:
    """The only operand of a node that is no index; -1 where there are several."""
    moved = [n for n in range(len(node.inputs)) if n not in traits_of(node.op).indices]
    return moved[0] if len(moved) == 1 else -1


# ---- strategy -----------------------------------------------------------------------------------
# It is read from the types of the plan: the mesh axes may have any names. The share of a role is
# that of the floating-point operations of the forward pass; products of the backward pass follow
# those of the forward pass.


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
    "none": "forward products repeated on all its devices",
}
SEEN = 0.05
"""Share of the operations, or of the bytes, from which a role is named."""


def strategy(program: Program) -> dict[str, str]:
    """What each mesh axis with more than one device is used for, in words, in the order of the
    mesh; empty for a program without products."""
    reading = _Reading(program)
    axes = program.mesh.axes if reading.uses.products else ()
    return {axis: reading.use(k) for k, (axis, size) in enumerate(axes) if size > 1}


class _Reading:
    """What a program's strategy is read from."""

    def __init__(self, program: Program) -> None:
        self.program, self.uses, self.sends = program, InputUses(program), sends(program)

    def use(self, k: int) -> str:
        """What the mesh axis at a position is used for. Of roles, the shares are those of the
        floating-point operations of products with weights; in a program without weights, of all
        products."""
        if self._is_idle(k):
            return "unused: its devices all do the same"
        part, roles = self._part(k), defaultdict[Role, float](float)
        for node, flops, weight in self.uses.products:
            roles[self._role(node, weight, k, part)] += flops
        total = sum(roles[role] for role in NAMES) or 1.0
        found: dict[Role, float] = {
            role: roles[role] / total
            for role in sorted(NAMES, key=lambda role: -roles[role])
            if roles[role] / total >= SEEN
        }
        tokens = "tokens split between its products (sequence parallel)"
        tables = {
            "vocabulary" if self.program.typing.rows[node.id].outs[0][k] < 0 else "tables"
            for node, root in self.uses.lookups
            if root is not None and self._taken(node, k)[0] > 0
        }
        said = [
            *(
                NAMES[role]
                + (f" ({share:.0%} of FLOPs)" if share < 1 - SEEN and len(found) > 1 else "")
                for role, share in found.items()
            ),
            *([tokens] if "tensor" in found and self._tokens(k) else []),
            *(f"{table} split" for table in sorted(tables)),
            *self._stored(k, found.keys()),
        ]
        return ", ".join(said) or "products of activations alone"

    def _stored(self, k: int, roles: Set[str]) -> tuple[str, ...]:
        """What is split only for its memory.

        Arguments:
          k: position of the mesh axis.
          roles: those of the products.
        """
        inputs, values = self.uses.graph.inputs, self.program.typing.values
        stored = {n for n, value in enumerate(inputs) if values[value][k] > 0}
        state = {n for n in range(len(inputs)) if self.uses.class_of(n) == "optimiser"}
        # The weights that products and lookups split, too.
        kept = {n for node, at, n in self.uses.reads if self._taken(node, k)[at] > 0}
        gathered, held = self._share(stored - kept, self.uses.weights), self._share(stored, state)
        some = "" if gathered >= 1 - SEEN else f" ({gathered:.0%} of them)"
        is_fsdp, more = gathered >= SEEN, held > self._share(kept, self.uses.weights) + SEEN
        return applicable(
            {
                f"weights gathered on use (FSDP){some}": is_fsdp,
                "not tensor parallel": is_fsdp and roles.isdisjoint(("tensor", "expert")),
                "optimiser split (ZeRO-1)": not is_fsdp and held >= SEEN and more,
            }
        )

    def _share(self, part: Set[int], whole: Set[int]) -> float:
        """The share of some inputs in the bytes of others."""
        sizes = [local_bytes(self.uses.graph.avals[v], (), ()) for v in self.uses.graph.inputs]
        total = sum(sizes[n] for n in whole)
        return sum(sizes[n] for n in part & whole) / total if total else 0.0

    def _is_idle(self, k: int) -> bool:
        typing = self.program.typing
        of_rows = (t for row in typing.rows.values() for t in (*row.ins, *row.outs))
        split = any(t[k] for t in (*of_rows, *typing.values.values(), *typing.outputs))
        return not split and not self.program.written_by_hand()

    def _taken(self, node: Node, k: int) -> list[Code]:
        """The codes in which a node takes its operands; what a kernel gathers is B."""
        return [types[k] for types in seen_codes(self.program.typing.rows[node.id])]

    def _role(self, node: Node, weight: Weight | None, k: int, part: Role) -> Role:
        """What a product does along a mesh axis.

        Arguments:
          node: the product.
          weight: its weight.
          k: position of the mesh axis.
          part: what products split there whose weights are whole.
        """
        codes, row = self._taken(node, k), self.program.typing.rows[node.id]
        if weight is None:
            return "activations" if codes[0] > 0 or codes[1] > 0 else "none"
        own, other = codes[weight[0]], codes[1 - weight[0]]
        if own > 0 and other > 0 and row.outs[0][k] > 0:
            return "pipeline" if self._takes_turns(node.inputs[weight[0]], k) else "expert"
        if own > 0 or other < 0:
            return "tensor"
        return (
            "none"
            if other == 0
            else "space"
            if row.kernels and kernel_named(row.kernels[k]).widens is not None
            else part
        )

    def _part(self, k: int) -> Role:
        """What products split whose weights are whole."""
        meets = [(node, flops) for node, flops, weight in self.uses.products if weight is None]
        # Of attention that splits its examples, both operands of its products are split.
        alone = sum(flops for node, flops in meets if 0 in self._taken(node, k))
        is_alone = 2 * alone > sum(flops for _, flops in meets)
        return "sequence" if is_alone or self._splits_inner(k) else "data"

    def _splits_inner(self, k: int) -> bool:
        """Whether most of the batch that is split along a mesh axis when it arrives is split along
        another one too, in a dim before: examples there, and tokens here."""
        types = self.program.typing.values
        batch = {
            n: types[value]
            for n, value in enumerate(self.uses.graph.inputs)
            if types[value][k] > 0 and self.uses.class_of(n) == "other arguments"
        }
        inner = {n for n, codes in batch.items() if any(0 < c < codes[k] for c in codes)}
        return self._share(inner, batch.keys()) > 0.5

    def _takes_turns(self, weight: Operand, k: int) -> bool:
        """Whether a product stands in a loop that has its weight all along and passes values to
        the next device of a mesh axis."""
        loops = {
            node.id
            for one in self.sends
            if one.kind == "permute" and self.program.mesh.names[k] in one.mesh_axes
            for node in one.regions
        }
        entries, way = self.uses.names.entries, reached([weight], self.uses.before)
        entered = (entries[v] for v in way if isinstance(v, int) and v in entries)
        return any(node.id in loops and entry.kind == "constant" for node, entry in entered)

    def _tokens(self, k: int) -> bool:
        """Whether more of what products of the forward pass add up along an axis is left split
        than whole."""
        sent = [
            (one.step.kind, one.bytes)
            for one in self.sends
            if one.step and k in one.step.mesh_axes
            if one.maker and self.uses.phases.of[one.maker.id] == "forward"
        ]
        # Of one sum, an all-reduce sends twice what a reduce-scatter does.
        scattered = sum(size for kind, size in sent if kind == "reduce_scatter")
        return 2 * scattered > sum(size for kind, size in sent if kind == "all_reduce")
