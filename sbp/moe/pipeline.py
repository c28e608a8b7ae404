"""A pipeline as one program: a buffer with a place for each stage, which moves on every turn.

GPipe (Huang et al., 2019) in the form of GSPMD (Xu et al., 2021, section 3.3): the dim of stages is
split on a mesh axis, all stages compute in the same turn, each on another microbatch, and the shift
of the buffer sends each stage's result to the next device.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

import sbp

Tree = Any
Stage = Callable[[Tree, jax.Array, Tree, jax.Array], tuple[jax.Array, Tree]]


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
        count = self.microbatches
        return jax.tree.map(lambda x: jnp.moveaxis(x.reshape(-1, count, *x.shape[1:]), 1, 0), tree)

    def join(self, x: jax.Array) -> jax.Array:
        """The groups of microbatches: the inverse of `split`, of one array."""
        return jnp.moveaxis(x, 0, 1).reshape(-1, *x.shape[2:])

    def run(
        self, stage: Stage, layers: Tree, parts: jax.Array, beside: Tree
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
