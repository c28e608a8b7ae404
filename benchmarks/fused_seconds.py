"""The seconds of a program on one device, with operations fused as XLA fuses them: a model on
trial, by which no types are chosen yet.

Types are chosen by `sbp.infer.cost`, which prices each operation for itself. Here products have the
same price, and other operations take as long as they read and write memory (`benchmarks.fusions`).
The constants come from the TPU compiler's estimates of fragments of training programs, half of them
unseen (`python -m benchmarks.fragments --model fused`).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from benchmarks.fusions import traffic
from sbp import _jax
from sbp.infer.cost import product_seconds, row_seconds, row_traffic
from sbp.infer.rows import NdRow, seen_codes
from sbp.infer.space import local_shape
from sbp.infer.typing import Typing
from sbp.signatures import kernel_named, traits_of
from sbp.signatures.rule import Shape
from sbp.trace.graph import Node
from sbp.trace.places import TRANSFER, computes_in_host

STREAM_SHARE = 0.8
"""Share of the memory's rate at which fused operations read and write."""

INSIDE_SHARE = {4: 0.01, 2: 0.03}
"""By bytes of an element: share of the bytes of an operation, operands and results, that stands for
its work. Vector units that compute in 32 bits take longer for 16."""

PACKED_SHARE = 1.25
"""Time of a 16-bit element, which fused operations unpack and pack, over that of its bytes."""

REDUCED_BYTES = 4.0
"""Bytes that a device could move in the time in which a reduction joins one element."""

DRAWN_BYTES = 10.0
"""The same for an element that is drawn at random."""

ALONE_BYTES = 9.0
"""The same for an element of a cast or a reduction that fuses with no other operation."""


def estimated_seconds(typing: Typing) -> float:
    """The seconds of one run of a typed program on one device.

    Arguments:
      typing: the program with its types, on a mesh of one device.
    """
    estimate = _Estimate(typing)
    seconds = typing.seconds - typing.saved_seconds
    for decision in typing.graph_request.flow.decisions:
        if decision.kind == "row" and decision.node is not None:
            seconds += decision.weight * estimate.difference(decision.node)
    return seconds


class _Estimate:
    """The local work of the rows of a typing.

    Arguments:
      typing: the typing.
    """

    def __init__(self, typing: Typing) -> None:
        self.typing, self.graph, self.mesh = typing, typing.graph, typing.mesh
        self.shares = typing.graph_request.memory_shares
        self.traffic = traffic(self.graph, self.product_bytes)

    @property
    def stream(self) -> float:
        """Bytes that fused operations read or write in one second."""
        return STREAM_SHARE * self.mesh.hardware.hbm_bytes_per_second

    def product_bytes(self, node: Node) -> float:
        """The bytes that fused operations could move while one device computes a whole product."""
        if traits_of(node.op).flops is None:
            return 0.0
        ins = [self.graph.aval(o).shape for o in node.inputs]
        outs = [self.graph.avals[o].shape for o in node.outputs]
        return self.stream * product_seconds(self.graph, node, ins, outs, self.mesh.hardware)

    def difference(self, node: Node) -> float:
        """Seconds by which a node takes longer than its price for the choice of types."""
        if node.op == TRANSFER:
            return 0.0
        if computes_in_host(node, [self.graph.aval(o) for o in (*node.inputs, *node.outputs)]):
            return 0.0
        row = self.typing.rows[node.id]
        price = row_seconds(self.graph, node, row, self.mesh, self.shares)
        return self.local_seconds(node, row) - price

    def local_seconds(self, node: Node, row: NdRow) -> float:
        """Seconds of the local work of a node under a row."""
        sizes = self.mesh.sizes
        codes = zip(node.inputs, seen_codes(row), strict=True)
        ins = [local_shape(self.graph.aval(o).shape, c, sizes) for o, c in codes]
        codes = zip(node.outputs, row.outs, strict=True)
        outs = [local_shape(self.graph.avals[o].shape, c, sizes) for o, c in codes]
        if traits_of(node.op).flops is None:
            return self.moved_bytes(node, ins, outs) / self.stream
        return self.product(node, row, ins, outs)

    def product(self, node: Node, row: NdRow, ins: Sequence[Shape], outs: Sequence[Shape]) -> float:
        """Seconds of a product, whichever takes longer: to compute, or to read and write.

        Arguments:
          node: the product.
          row: its row.
          ins, outs: local shapes of its operands and results.
        """
        hardware, moved = self.mesh.hardware, row_traffic(self.graph, node, row, self.mesh)
        for at, (o, shape) in enumerate(zip(node.inputs, ins, strict=True)):
            if (node.id, at) in self.traffic.reads:
                size = math.prod(shape) * _jax.itemsize(self.graph.aval(o).dtype)
                if isinstance(o, int) and size <= hardware.fast_memory_bytes:
                    size *= self.shares.waited.get(o, 1.0)
                moved += size
        for o, shape in zip(node.outputs, outs, strict=True):
            if o in self.traffic.stored:
                moved += math.prod(shape) * _jax.itemsize(self.graph.avals[o].dtype)
        work = math.prod(kernel_named(name).work for name in set(row.kernels))
        return max(
            work * product_seconds(self.graph, node, ins, outs, hardware),
            moved / hardware.hbm_bytes_per_second,
        )

    def moved_bytes(self, node: Node, ins: Sequence[Shape], outs: Sequence[Shape]) -> float:
        """The bytes that a device could move in the time of an operation that is no product.

        Arguments:
          node: the operation.
          ins, outs: local shapes of its operands and results.
        """
        found, traits = self.traffic, traits_of(node.op)
        read = [
            math.prod(s) * _size(self.graph.aval(o)) for o, s in zip(node.inputs, ins, strict=True)
        ]
        written = [
            math.prod(s) * _size(self.graph.avals[o])
            for o, s in zip(node.outputs, outs, strict=True)
        ]
        if traits.moves and not (traits.carries or traits.elementwise or traits.scatters):
            read = [min(size, sum(written)) for size in read]  # a part, not the whole array
        moved = sum(found.reads.get((node.id, at), 0) * size for at, size in enumerate(read))
        moved += sum(w for w, o in zip(written, node.outputs, strict=True) if o in found.stored)
        moved *= found.waited.get(node.id, 1.0)
        elements = max((math.prod(s) for s in (*ins, *outs)), default=0)
        joins = bool(traits.reduces) and len(outs[0]) < len(ins[0]) and node.id not in found.joined
        if node.id in found.alone and (joins or traits.carries == "rounded"):
            moved += ALONE_BYTES * elements
        moved += REDUCED_BYTES * elements * joins
        if traits.generates and traits.fusion == "partly":  # random bits, no positions
            moved += DRAWN_BYTES * elements
        narrow = bool(node.outputs) and _jax.itemsize(self.graph.avals[node.outputs[0]].dtype) == 2
        return moved + INSIDE_SHARE[2 if narrow else 4] * (sum(read) + sum(written))


def _size(aval: Any) -> float:
    """The bytes of an element, as long as fused operations take for it."""
    size = _jax.itemsize(aval.dtype)
    return PACKED_SHARE * size if size == 2 else size
