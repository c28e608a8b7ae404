"""Program -> strategy: what each mesh axis is used for, in the names of the field.

Everything is read from the types of the plan: the mesh axes may have any names. The share of a role
is that of the floating-point operations of the forward pass; products of the backward pass follow
those of the forward pass.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

from sbp import _jax
from sbp.infer.space import Code
from sbp.plan.program import Program
from sbp.plan.traffic import sends
from sbp.report.input_uses import InputUses, Product
from sbp.signatures import kernel_named
from sbp.trace.graph import Node, Operand
from sbp.trace.regions import Entry

Role = Literal["data", "sequence", "space", "tensor", "expert", "pipeline", "activations", "none"]
"""What a product splits along a mesh axis.

* `data`: examples, with whole weights; `sequence`: tokens that meet others in attention; `space`:
  places of an image, whose borders are exchanged;
* `tensor`: a free or summed dim of its weights; `expert`: a dim that numbers weights; `pipeline`:
  such a dim, where a loop reads what the products of the turn before gave;
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


@dataclass(frozen=True, slots=True, kw_only=True)
class AxisUse:
    """What one mesh axis is used for.

    Attributes:
      axis: its name.
      size: its devices.
      roles: shares of the floating-point operations of the products with weights in the forward
        pass; of a program without weights, of all products.
      weights: bytes of the weights, by how they are along the axis: `split` (between calls and in
        their products), `gathered` (split between calls, whole in their products), `cut` (whole
        between calls, split in their products), `whole`.
      state: bytes of the optimiser's state, `split` or `whole`.
      tables: what is split of tables that lookups read: `vocabulary` for their rows, `tables` for
        other dims.
      tokens: whether what tensor parallelism adds up stays split between products.
      idle: whether nothing at all is split or partial along the axis, and no region by hand may
        use it.
    """

    axis: str
    size: int
    roles: dict[Role, float]
    weights: dict[str, int]
    state: dict[str, int]
    tables: tuple[str, ...]
    tokens: bool
    idle: bool

    @property
    def text(self) -> str:
        """In words."""
        found: list[tuple[Role, float]] = [
            (role, share)
            for role, share in sorted(self.roles.items(), key=lambda item: -item[1])
            if share >= SEEN and role in NAMES
        ]
        if self.idle:
            return "unused: its devices all do the same"
        said = [
            NAMES[role] + (f" ({share:.0%} of FLOPs)" if share < _MOST and len(found) > 1 else "")
            for role, share in found
        ]
        if "tensor" in dict(found) and self.tokens:
            said.append("tokens split between its products (sequence parallel)")
        said += [f"{table} split" for table in self.tables]
        said += self._stored(dict(found))
        return ", ".join(said) or "products of activations alone"

    def _stored(self, found: dict[Role, float]) -> Iterator[str]:
        """What is split only for its memory."""
        total = sum(self.weights.values())
        gathered = _share(self.weights.get("gathered", 0), total)
        if gathered >= SEEN:
            some = "" if gathered >= _MOST else f" ({gathered:.0%} of them)"
            yield f"weights gathered on use (FSDP){some}"
            if "tensor" not in found and "expert" not in found:
                yield "not tensor parallel"
        else:
            held = _share(self.state.get("split", 0), sum(self.state.values()))
            kept = _share(self.weights.get("split", 0) + self.weights.get("cut", 0), total)
            if held >= SEEN and held > kept + SEEN:
                yield "optimiser split (ZeRO-1)"


def strategy(program: Program) -> list[AxisUse]:
    """What each mesh axis with more than one device is used for, in the order of the mesh."""
    reading = _Reading(program)
    return [
        reading.along(position)
        for position, size in enumerate(program.mesh.sizes)
        if size > 1 and reading.uses.products
    ]


class _Reading:
    """What a program's strategy is read from."""

    def __init__(self, program: Program) -> None:
        self.program = program
        self.graph = program.graph
        self.uses = InputUses(program)

    def along(self, k: int) -> AxisUse:
        """What the mesh axis at a position is used for."""
        roles: dict[Role, float] = dict.fromkeys(NAMES, 0.0)
        used: dict[int, bool] = {}
        part = self._part(k)
        for product in self.uses.products:
            role, splits = self._role(product, k, part)
            roles[role] = roles.get(role, 0.0) + product.flops
            if product.weight is not None:
                root = product.weight[1]
                used[root] = used.get(root, False) or splits
        tables = set[str]()
        for node, root in self.uses.lookups:
            rows = self._taken(node, k)
            if root is None:
                continue
            used[root] = used.get(root, False) or rows[0] > 0
            if rows[0] > 0:
                tables.add("vocabulary" if self._made(node, k) < 0 else "tables")
        meeting = roles.pop("activations", 0.0)
        if not any(roles.values()):
            roles["activations"] = meeting
        total = sum(roles.values())
        mesh = self.program.mesh
        return AxisUse(
            axis=mesh.names[k],
            size=mesh.sizes[k],
            roles={role: _share(flops, total) for role, flops in roles.items()},
            weights=self._weights(used, k),
            state=self._state(k),
            tables=tuple(sorted(tables)),
            tokens=self._tokens(k),
            idle=self._is_idle(k),
        )

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
                return ("pipeline" if self._takes_turns(product) else "expert"), True
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
        inner = Counter[bool]()
        for n, value in enumerate(self.graph.inputs):
            codes = self.program.typing.values[value]
            if codes[k] > 0 and n not in self.uses.weights and self.uses.readers[n] != {"update"}:
                inner[any(0 < c < codes[k] for c in codes)] += _bytes(self.graph.avals[value])
        return inner[True] > inner[False]

    def _takes_turns(self, product: Product) -> bool:
        """Whether a product stands in a loop that has its weights all along, and reads there what
        the turn before gave."""
        assert product.weight is not None
        weight = product.node.inputs[product.weight[0]]
        loops = {node.id for node, entry in self._entries(weight) if entry.kind == "constant"}
        other = product.node.inputs[1 - product.weight[0]]
        return any(node.id in loops and e.kind == "carry" for node, e in self._entries(other))

    def _entries(self, operand: Operand) -> Iterator[tuple[Node, Entry]]:
        """How all that a value is computed from entered the regions around it."""
        waiting, seen = [operand], set[Operand]()
        while waiting:
            value = waiting.pop()
            if not isinstance(value, int) or value in seen:
                continue
            seen.add(value)
            if value in self.uses.dataflow.entries:
                node, entry = self.uses.dataflow.entries[value]
                yield node, entry
                waiting.append(node.inputs[entry.operand])
            elif value in self.uses.dataflow.makers:
                waiting += self.uses.dataflow.makers[value].inputs

    def _weights(self, used: dict[int, bool], k: int) -> dict[str, int]:
        found: Counter[str] = Counter()
        for root, splits in used.items():
            value = self.graph.inputs[root]
            stored = self.program.typing.values[value][k] > 0
            kind = ("split" if stored else "cut") if splits else "gathered" if stored else "whole"
            found[kind] += _bytes(self.graph.avals[value])
        return dict(found)

    def _state(self, k: int) -> dict[str, int]:
        found: Counter[str] = Counter()
        for n, value in enumerate(self.graph.inputs):
            if self.uses.readers[n] == {"update"} and n not in self.uses.weights:
                split = self.program.typing.values[value][k] > 0
                found["split" if split else "whole"] += _bytes(self.graph.avals[value])
        return dict(found)

    def _tokens(self, k: int) -> bool:
        """Whether more of what products of the forward pass add up along an axis is left split
        than whole."""
        sent = {"all_reduce": 0.0, "reduce_scatter": 0.0}
        forward = (
            (one, one.step)
            for one in sends(self.program)
            if one.maker and self.uses.phases.of[one.maker.id] == "forward"
        )
        for one, step in forward:
            if step and step.kind in sent and k in step.mesh_axes:
                # Of one sum, an all-reduce sends twice what a reduce-scatter does.
                sent[step.kind] += one.bytes / (2 if step.kind == "all_reduce" else 1)
        return sent["reduce_scatter"] > sent["all_reduce"]


def _bytes(aval: Any) -> int:
    return math.prod(aval.shape) * _jax.itemsize(aval.dtype)


def _share(part: float, whole: float) -> float:
    return part / whole if whole else 0.0
