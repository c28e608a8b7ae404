"""The paper's annotations: which mesh axes split the groups, and which split the experts; and how
weights and the optimiser's state lie between steps, where the user asks for more. Also simulated
devices, and the pipeline."""

import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

import sbp
from sbp.errors import SbpError
from sbp.moe.config import ModelConfig, TrainConfig

# ---- pipeline -----------------------------------------------------------------------------------
# A pipeline as one program: a buffer with a place for each stage, which moves on every turn.
#
# GPipe (Huang et al., 2019) in the form of GSPMD (Xu et al., 2021, section 3.3): the dim of stages
# is split on a mesh axis, all stages compute in the same turn, each on another microbatch, and the
# shift of the buffer sends each stage's result to the next device.


Tree = Any


class Pipeline(NamedTuple):
    """How a stack of layers is cut into stages, and a batch into microbatches.

    Attributes:
      stages: how many parts of the layers work at the same time.
      microbatches: how many parts of the batch go through them.
      layout: maps the dim `stage` to the mesh axis that splits it.
    """

    stages: int
    microbatches: int
    layout: sbp.Layout

    @property
    def turns(self) -> int:
        """Turns until the last microbatch has left the last stage.

        >>> Pipeline(4, 8, sbp.Layout()).turns
        11
        """
        return self.microbatches + self.stages - 1

    @property
    def bubble(self) -> float:
        """The share of its turns in which a stage has no microbatch.

        >>> Pipeline(4, 12, sbp.Layout()).bubble
        0.2
        """
        return (self.stages - 1) / self.turns

    def split(self, tree: Tree) -> Tree:
        """Groups [G, ...] as microbatches [n, G / n, ...]: each has every n-th group, so that a
        device keeps the groups that it has."""
        return jax.tree.map(
            lambda x: jnp.moveaxis(x.reshape(-1, self.microbatches, *x.shape[1:]), 1, 0), tree
        )

    def join(self, x: jax.Array) -> jax.Array:
        """The groups of microbatches: the inverse of `split`, of one array."""
        return jnp.moveaxis(x, 0, 1).reshape(-1, *x.shape[2:])

    def run(
        self,
        stage: Callable[[Tree, jax.Array, Tree, jax.Array], tuple[jax.Array, Tree]],
        layers: Tree,
        parts: jax.Array,
        beside: Tree,
    ) -> tuple[jax.Array, Tree]:
        """All microbatches through all layers.

        Arguments:
          stage: computes some of the layers: from these, a microbatch, what lies beside it, and its
            index, to the microbatch and counts of these layers.
          layers: leaves stacked on dim 0, in order; stages divide them.
          parts: the microbatches, [microbatches, ...].
          beside: what goes with each of them, leaves [microbatches, ...].

        Returns:
          The microbatches after the last stage, and for each layer the sum of its counts over
          microbatches, leaves stacked on dim 0.
        """
        own = jax.tree.map(lambda w: w.reshape(self.stages, -1, *w.shape[1:]), layers)
        stages, all_stages = self.stages, jax.vmap(stage)
        index = jnp.arange(self.turns)[:, None] - jnp.arange(stages)
        working = (index >= 0) & (index < self.microbatches)
        index = jnp.clip(index, 0, self.microbatches - 1)
        # A stage without a microbatch computes the first or the last one again; what comes of it
        # is dropped. Zeros could become NaN.
        entering = jax.tree.map(lambda x: x[index[:, 0]], (parts, beside))
        buffer = jax.tree.map(
            lambda x: jnp.broadcast_to(x[0], (stages, *x.shape[1:])), (parts, beside)
        )

        def turn(buffer: Tree, now: tuple[Tree, jax.Array, jax.Array]) -> tuple[Tree, Any]:
            entering, index, working = now
            buffer = jax.tree.map(
                lambda old, new: jnp.roll(old, 1, 0).at[0].set(new), buffer, entering
            )
            x, beside = self._split_stages(buffer)
            x, counts = all_stages(own, x, beside, index)
            counts = jax.tree.map(
                lambda c: jnp.where(working.reshape(-1, *[1] * (c.ndim - 1)), c, 0), counts
            )
            return self._split_stages((x, beside)), (x[-1], counts)

        _, (done, counts) = jax.lax.scan(turn, buffer, (entering, index, working))
        counts = jax.tree.map(lambda c: jnp.sum(c, 0).reshape(-1, *c.shape[3:]), counts)
        return done[stages - 1 :], counts

    def _split_stages(self, tree: Tree) -> Tree:
        """Pins dim 0, the stages."""
        return jax.tree.map(lambda x: self.layout(x, "stage", *[None] * (x.ndim - 1)), tree)


# ---- devices ------------------------------------------------------------------------------------


def simulate_devices(count: int, *, replaces: bool = False) -> None:
    """Asks XLA for `count` simulated host devices, unless `XLA_FLAGS` has a number already;
    `replaces` replaces that number. XLA reads it before the first use of any device."""
    flag, flags = "--xla_force_host_platform_device_count", os.environ.get("XLA_FLAGS", "").split()
    others = [each for each in flags if not each.startswith(flag)]
    if replaces or others == flags:
        os.environ["XLA_FLAGS"] = " ".join([*others, f"{flag}={count}"])


# ---- sharding -----------------------------------------------------------------------------------


class Sharding(NamedTuple):
    """Where groups and experts live (GShard section 3.2).

    A program is annotated at three kinds of places and nowhere else: tokens are split on the group
    dim, expert weights and dispatched tokens on the expert dim, and outputs on the group dim again.
    These are two layouts, because dispatched tokens [E, G, C, M] have both dims and are split on
    one of them at a time.

    Attributes:
      groups: maps the dim `group` to the mesh axes that split it, outer first, and the dim `token`
        to others for sequence parallelism.
      experts: maps the dim `expert` to the mesh axes that split it, outer first.
      pipeline: how layers run in stages; None for one after the other on all devices.
    """

    groups: sbp.Layout
    experts: sbp.Layout
    pipeline: Pipeline | None = None

    @classmethod
    def over(
        cls, groups: Sequence[str], experts: Sequence[str], tokens: Sequence[str] = ()
    ) -> "Sharding":
        """Groups split over some mesh axes, experts over others, and tokens of a group over others;
        no axes leave a dim free.

        >>> Sharding.over(("data", "expert"), ("expert",)).experts.type("expert", None)
        expert:S(0)
        """
        return cls(
            sbp.Layout(
                {dim: axes for dim, axes in (("group", groups), ("token", tokens)) if axes} or None
            ),
            sbp.Layout({"expert": experts} if experts else None),
        )

    def split_groups(self, x: jax.Array) -> jax.Array:
        """Pins the dims 0 and 1 of tokens [G, S, ...], the groups and their tokens."""
        return self.groups(x, "group", "token", *[None] * (x.ndim - 2))

    def split_experts(self, x: jax.Array) -> jax.Array:
        """Pins dim 0 of a weight or of dispatched tokens [E, ...], the experts."""
        return self.experts(x, "expert", *[None] * (x.ndim - 1))


AXES = ("pipeline", "pod", "data", "expert", "model")
"""Names of mesh axes, outer first by custom: one that splits the layers into stages, two of data
parallelism, one that splits the experts, and one of tensor parallelism."""


Mesh = Sequence[tuple[str, int]]
"""Name and size of each axis, outer first."""


def sharding_of(mesh: Mesh, *, sequence_parallel: bool = False, microbatches: int = 0) -> Sharding:
    """The annotations on a mesh: groups are split on every axis but `model` and `pipeline`, experts
    on `expert`.

    Arguments:
      mesh: its axes.
      sequence_parallel: split the tokens of a group on `model`, between the layers.
      microbatches: of a pipeline, which has a stage for each device along `pipeline`; 0 for none.

    >>> sharding_of((("data", 2), ("expert", 4), ("model", 2))).groups.type("group", None)
    data:S(0) expert:S(0)
    """
    names = tuple(name for name, _ in mesh)
    sharding = Sharding.over(
        [name for name in names if name not in ("model", "pipeline")],
        [name for name in names if name == "expert"],
        [name for name in names if name == "model" and sequence_parallel],
    )
    stages = dict(mesh).get("pipeline", 1)
    if not microbatches or (stages == 1 and microbatches == 1):
        return sharding
    layout = sbp.Layout({"stage": ["pipeline"]} if "pipeline" in names else None)
    return sharding._replace(pipeline=Pipeline(stages, microbatches, layout))


def check_parts(model: ModelConfig, train: TrainConfig, sharding: Sharding) -> None:
    """Refuses parts of a batch, and stages, that do not divide what they are parts of.

    Raises:
      SbpError: `unknown-option`, with all that does not fit.
    """
    pipeline = sharding.pipeline or Pipeline(1, 1, sbp.Layout())  # one divides everything
    sides = {"encoder": model.encoder_layers, "decoder": model.decoder_layers}
    pairs = {side: layers // model.moe_every for side, layers in sides.items()}
    rows, rest = divmod(model.groups, train.accumulate)
    checks: list[tuple[str, object]] = [
        (f"accumulate is {train.accumulate}; it must divide the {model.groups} groups", rest),
        (
            f"pipeline_microbatches is {pipeline.microbatches}; it must divide the {rows} groups of"
            " a microbatch",
            not rest and rows % pipeline.microbatches,
        ),
        *(
            (
                f"the mesh axis pipeline has {pipeline.stages} devices; it must divide the {count}"
                f" layer pairs of the {side}",
                count % pipeline.stages,
            )
            for side, count in pairs.items()
        ),
        (
            f'dispatch is "{model.dispatch}"; in a pipeline, or with pipeline_microbatches, it must'
            ' be "einsum"',
            sharding.pipeline and model.experts and model.dispatch != "einsum",
        ),
    ]
    if faults := [text for text, wrong in checks if wrong]:
        raise SbpError("; ".join(faults), code="unknown-option")


_WEIGHTS: Mapping[str, tuple[str | None, ...]] = {
    **dict.fromkeys(("query", "key", "value"), ("layer", None, "heads", None)),
    "output": ("layer", "heads", None, None),
    **dict.fromkeys(("w_in", "shared_in", "shared_linear"), ("layer", None, "hidden")),
    **dict.fromkeys(("w_out", "shared_out"), ("layer", "hidden", None)),
    **dict.fromkeys(("expert_in", "expert_linear"), ("layer", "expert", None, "hidden")),
    "expert_out": ("layer", "expert", "hidden", None),
    **dict.fromkeys(("source_embedding", "target_embedding"), ("vocab", None)),
    "logits": (None, "vocab"),
}
"""The dims of each kind of weight by name."""

_SPLIT_BY = {
    "layer": "pipeline",
    "heads": "model",
    "hidden": "model",
    "vocab": "model",
    "expert": "expert",
}
"""The mesh axis that splits a dim."""


def leaf_types(
    mesh: Mesh, *, spread: bool = False
) -> Callable[[Any, jax.ShapeDtypeStruct], str | None]:
    """How parameters, or moments that are shaped like them, lie between steps: an entry of
    `in_types`.

    Tensor parallelism: heads, hidden units and vocabularies are split on `model`, where the mesh
    has it and it divides them. Layers are split on `pipeline`. Nothing is said of the other axes
    unless `spread`.

    Arguments:
      mesh: its axes.
      spread: split each leaf over all axes that divide it: experts on `expert`, then for each axis
        that is left the largest dim of what a device has (ZeRO; Rajbhandari et al., 2020).

    Returns:
      A function from the path and the shape of a leaf to its type; None leaves the leaf free.

    >>> leaf = jax.ShapeDtypeStruct((3, 16, 64), "float32")
    >>> path = (jax.tree_util.DictKey("w_in"),)
    >>> leaf_types((("data", 2), ("model", 2)))(path, leaf)
    'data:? model:S(2)'
    >>> leaf_types((("data", 2), ("model", 2)), spread=True)(path, leaf)
    'data:S(1) model:S(2)'
    """
    sizes = dict(mesh)
    known = {"model", "pipeline", "expert"} if spread else {"model", "pipeline"}

    def type_of(path: Any, leaf: jax.ShapeDtypeStruct) -> str | None:
        dims = _WEIGHTS.get(getattr(path[-1], "key", ""), ())
        atoms: dict[str, int] = {}
        if len(dims) == len(leaf.shape):  # factored moments have fewer
            for dim, name in enumerate(dims):
                axis = _SPLIT_BY.get(name or "", "")
                if axis in known & set(sizes) and leaf.shape[dim] % sizes[axis] == 0:
                    atoms[axis] = dim
        left = [axis for axis in sizes if axis not in atoms]
        if not spread:
            return _text(atoms, left, "?") if atoms else None
        shard = [1 if dim in atoms.values() else size for dim, size in enumerate(leaf.shape)]
        for axis in left:
            fits = [dim for dim, size in enumerate(shard) if size > 1 and size % sizes[axis] == 0]
            if fits:
                atoms[axis] = max(fits, key=lambda dim: shard[dim])
                shard[atoms[axis]] //= sizes[axis]
        return _text(atoms, [axis for axis in sizes if axis not in atoms], "B")

    return type_of


def _text(split: Mapping[str, int], others: Sequence[str], atom: str) -> str:
    """A type as text: some axes split dims, the others have one atom."""
    atoms = {axis: f"S({dim})" for axis, dim in split.items()} | dict.fromkeys(others, atom)
    return " ".join(f"{axis}:{atoms[axis]}" for axis in sorted(atoms))


PLAIN = Sharding.over((), ())
"""No annotation: a program for one device."""
