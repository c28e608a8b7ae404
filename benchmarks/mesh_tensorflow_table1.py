"""Mesh-TensorFlow's table 1 from plans: what the layouts of a two-layer network send, compute and
hold.

    python -m benchmarks.mesh_tensorflow_table1

The five layouts of Shazeer et al., 2018, with the factors of two that the table drops. Beside them
stands what sbp sends when inputs and results have the same types and it may choose those between.
"""

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial

import jax
import jax.numpy as jnp
from jax.sharding import AbstractMesh

import sbp
from sbp.infer.space import local_shape
from sbp.plan.program import Apply

BATCH, D_IO, D_H = 4096, 1024, 8192
"""Sizes of the two-layer network y = relu(x w) v: x is b x d_io, w is d_io x d_h, v is d_h x
d_io."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TwoLayers:
    """A layout of table 1: which mesh axis splits each of the three dims, and what it costs one
    processor by the table.

    Arguments:
      mesh: names and sizes of the mesh axes.
      batch, io, hidden: the mesh axis of each dim, or None.
      reduced: by mesh axis, how many values are all-reduced over it: the paper's terms with their
          exact factors of two.
    """

    mesh: Mapping[str, int]
    batch: str | None = None
    io: str | None = None
    hidden: str | None = None
    reduced: Mapping[str, int]

    def part(self, size: int, mesh_axis: str | None) -> int:
        return size // (self.mesh[mesh_axis] if mesh_axis else 1)

    @property
    def parts(self) -> tuple[int, int, int]:
        """Batch, io and hidden as one processor has them."""
        return self.part(BATCH, self.batch), self.part(D_IO, self.io), self.part(D_H, self.hidden)

    @property
    def bytes_sent(self) -> float:
        """The all-reduced values as bytes that a processor sends: 2 (n-1)/n of each, four bytes a
        value."""
        return sum(
            2 * (self.mesh[a] - 1) / self.mesh[a] * 4 * values for a, values in self.reduced.items()
        )

    @property
    def flops(self) -> float:
        """Two products forward and four backward, without redundant work."""
        b, io, h = self.parts
        return 6 * 2 * b * io * h

    @property
    def kept_bytes(self) -> float:
        """Arguments and results: x, y and their gradients, w, v and their gradients."""
        b, io, h = self.parts
        return 4 * 4 * (b * io + io * h)

    @property
    def hidden_bytes(self) -> float:
        """One activation of the hidden layer, the table's third term."""
        b, _, h = self.parts
        return 4 * b * h


N, R, C, Q = 64, 8, 4, 2

TABLE1 = {
    "[]": TwoLayers(mesh={"all": N}, reduced={}),
    "batch->all": TwoLayers(mesh={"all": N}, batch="all", reduced={"all": 2 * D_IO * D_H}),
    "hidden->all": TwoLayers(mesh={"all": N}, hidden="all", reduced={"all": 2 * BATCH * D_IO}),
    "batch->rows, hidden->cols": TwoLayers(
        mesh={"rows": R, "cols": C},
        batch="rows",
        hidden="cols",
        reduced={"cols": 2 * BATCH * D_IO // R, "rows": 2 * D_IO * D_H // C},
    ),
    "batch->rows, hidden->cols, io->planes": TwoLayers(
        mesh={"rows": R, "cols": C, "planes": Q},
        batch="rows",
        hidden="cols",
        io="planes",
        reduced={
            "cols": 2 * BATCH * D_IO // (R * Q),
            "planes": 2 * BATCH * D_H // (R * C),
            "rows": 2 * D_IO * D_H // (C * Q),
        },
    ),
}


def _two_layers(
    x: jax.Array, w: jax.Array, v: jax.Array, dy: jax.Array, *, hidden: str
) -> tuple[jax.Array, ...]:
    """The result, and the gradients of x, w and v from that of the result."""

    def forward(x: jax.Array, w: jax.Array, v: jax.Array) -> jax.Array:
        h = sbp.annotate(x @ w, hidden, cotangent=hidden)
        return sbp.annotate(jax.nn.relu(h), hidden, cotangent=hidden) @ v

    y, backward = jax.vjp(forward, x, w, v)
    return y, *backward(dy)


def plan_layout(layout: TwoLayers, *, pinned: bool = True) -> sbp.Plan:
    """Plans the network forward and backward.

    Arguments:
      layout: the types of all inputs and results.
      pinned: whether the hidden layer has the layout's type too, and nothing but a reduction moves
        data, as Mesh-TensorFlow has it; else sbp chooses.
    """

    def split(*mesh_axes: str | None) -> str:
        return " ".join(f"{a}:S({dim})" for dim, a in enumerate(mesh_axes) if a) or "B"

    x, w, v = (
        split(layout.batch, layout.io),
        split(layout.io, layout.hidden),
        split(layout.hidden, layout.io),
    )
    hidden = split(layout.batch, layout.hidden)
    hardware = sbp.HARDWARE["tpu-v3"]
    # The paper's [] computes everything everywhere: it pays where sending costs too much.
    if pinned and not layout.reduced:
        hardware = dataclasses.replace(hardware, link_bytes_per_second=1e3)
    f = sbp.jit(
        partial(_two_layers, hidden=hidden if pinned else " ".join(f"{a}:?" for a in layout.mesh)),
        AbstractMesh(tuple(layout.mesh.values()), tuple(layout.mesh)),
        in_types=(x, w, v, x),
        out_types=(x, x, w, v),
        boxing="reduce" if pinned else "auto",
        hardware=hardware,
    )
    shapes = ((BATCH, D_IO), (D_IO, D_H), (D_H, D_IO), (BATCH, D_IO))
    return f.plan(*(jax.ShapeDtypeStruct(s, jnp.float32) for s in shapes))


def local_flops(plan: sbp.Plan) -> float:
    """Floating-point operations of the products that one processor computes."""
    program, flops = plan.program, 0.0
    for step in program.block.instructions:
        if isinstance(step, Apply) and step.node.op == "dot_general":
            left, out = (
                local_shape(program.graph.aval(o).shape, codes, program.mesh.sizes)
                for o, codes in (
                    (step.node.inputs[0], step.row.ins[0]),
                    (step.node.outputs[0], step.row.outs[0]),
                )
            )
            (contracted, _), _ = step.node.params["dimension_numbers"]
            flops += 2.0 * math.prod(out) * math.prod(left[k] for k in contracted)
    return flops


def kept_bytes(plan: sbp.Plan) -> float:
    """Bytes of the function's arguments and results on one processor."""
    program = plan.program
    held = [(program.graph.avals[r.value].shape, r.codes) for r in program.block.inputs]
    held += [
        (program.graph.aval(o).shape, codes)
        for o, codes in zip(program.graph.outputs, program.typing.outputs, strict=True)
    ]
    return sum(
        4 * math.prod(local_shape(shape, codes, program.mesh.sizes)) for shape, codes in held
    )


def main() -> None:
    print(
        f"{'layout':38} {'MiB sent':>9} {'asked':>8} {'chosen':>8} {'GFLOP':>7} {'asked':>7}"
        f" {'MiB kept':>9} {'asked':>8} {'peak':>7}"
    )
    for name, layout in TABLE1.items():
        plan = plan_layout(layout)
        sizes = (
            plan.cost.bytes_per_device,
            layout.bytes_sent,
            plan_layout(layout, pinned=False).cost.bytes_per_device,
        )
        sent, asked, chosen = (f"{s / 2**20:8.1f}" for s in sizes)
        print(
            f"{name:38} {sent:>9} {asked} {chosen} {local_flops(plan) / 1e9:7.1f}"
            f" {layout.flops / 1e9:7.1f} {kept_bytes(plan) / 2**20:9.1f}"
            f" {layout.kept_bytes / 2**20:8.1f} {plan.cost.peak_memory_bytes / 2**20:7.1f}"
        )
    print(
        "chosen: what sbp sends with the same inputs and results when it may choose the types"
        " between"
    )


if __name__ == "__main__":
    main()
