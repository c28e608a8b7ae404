"""Learning rates over time, and Adafactor blind to the dims that stack layers and experts."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from sbp.moe.config import TrainConfig

Tree = Any


def sqrt_decay(learning_rate: float = 1.0, warmup_steps: int = 10_000) -> Callable[[Any], Any]:
    """The schedule learning_rate / sqrt(max(step, warmup_steps)): flat, then square-root decay
    (GShard appendix A.2).

    Arguments:
      learning_rate: 1.0 in the paper.
      warmup_steps: 10 000 in the paper, so 0.01 until then.

    Returns:
      A function from the step (from 0) to the rate.
    """

    def schedule(step: Any) -> Any:
        step = jnp.asarray(step, jnp.float32)
        return learning_rate * jax.lax.rsqrt(jnp.maximum(step, float(warmup_steps)))

    return schedule


def _ramped(train: TrainConfig, schedule: optax.Schedule) -> Callable[[Any], Any]:
    """A schedule behind a linear ramp from zero, which short runs with a high rate need."""

    def rate(step: Any) -> Any:
        ramp = (jnp.asarray(step, jnp.float32) + 1.0) / max(train.ramp_steps, 1)
        return schedule(step) * jnp.minimum(1.0, ramp)

    return rate


SCHEDULES: Mapping[str, Callable[[TrainConfig], Callable[[Any], Any]]] = {
    "sqrt_decay": lambda t: _ramped(t, sqrt_decay(t.learning_rate, t.warmup_steps)),
    "constant": lambda t: _ramped(t, optax.constant_schedule(t.learning_rate)),
    "linear": lambda t: _ramped(t, optax.linear_schedule(t.learning_rate, 0.0, t.steps)),
    "cosine": lambda t: _ramped(t, optax.cosine_decay_schedule(t.learning_rate, t.steps)),
}
"""For each name of a schedule: from a run to the function of the step (from 0)."""


class AdafactorState(NamedTuple):
    """Updates done, and per leaf the second moments: factored rows and columns, or the whole.

    Each has the leaf's stacked dims in front; what a leaf does not use is a (1,) placeholder behind
    them.
    """

    updates: jax.Array
    v_row: Tree
    v_col: Tree
    v: Tree


class Optimizer(NamedTuple):
    """An optax.GradientTransformation: `init(params)`, `update(grads, state, params)`; and
    `updates(state)`, how many it has done."""

    init: Callable[[Tree], Tree]
    update: Callable[[Tree, Tree, Tree], tuple[Tree, Tree]]
    updates: Callable[[Tree], jax.Array]


def adafactor(
    stacked_dims: Tree, schedule: Callable[[Any], Any], *, min_dim_to_factor: int = 128
) -> Optimizer:
    """optax's Adafactor applied to each layer's and each expert's own weight.

    Plain Adafactor factors the two largest dims of a leaf and clips by the RMS of the whole leaf.
    For stacked experts [E, M, H] with E > M these are E and H: the statistics of one expert then
    depend on all others, and on a mesh that splits E every step reduces over it. Here the leading
    `stacked_dims` are mapped over, so all statistics are local to one matrix and the update is
    elementwise in E. Settings are GShard's (appendix A.2): beta1 0, decay 1 - t^-0.8, update
    clipped to RMS 1, rate multiplied by max(RMS(w), 1e-3).

    Arguments:
      stacked_dims: a tree like the parameters, of ints.
      schedule: step to learning rate.
      min_dim_to_factor: smallest dim for which statistics are factored.
    """
    moments = optax.scale_by_factored_rms(min_dim_size_to_factor=min_dim_to_factor)
    clip = optax.clip_by_block_rms(1.0)
    by_param_rms = optax.scale_by_param_block_rms(1e-3)
    # The count is one for all, everything else has a row per stacked weight.
    none: Any = None
    zero: Any = 0  # the state holds vmap axes here in place of arrays
    axes: Any = optax.FactoredState(count=none, v_row=zero, v_col=zero, v=zero)

    def init(params: Tree) -> AdafactorState:
        def one(depth: int, w: jax.Array) -> Any:
            return _mapped(moments.init, depth, 0, axes)(w)

        states = jax.tree.map(one, stacked_dims, params)
        return _join(jnp.zeros((), jnp.int32), states)

    def update(grads: Tree, state: AdafactorState, params: Tree) -> tuple[Tree, AdafactorState]:
        rate = schedule(state.updates)

        def one(
            depth: int, g: jax.Array, row: jax.Array, col: jax.Array, v: jax.Array, w: jax.Array
        ) -> Any:
            def single(g: Any, s: Any, w: jax.Array) -> tuple[Any, Any]:
                u, s = moments.update(g, s, w)
                u, _ = clip.update(u, clip.init(w))
                u = jax.tree.map(lambda u: u * -rate.astype(u.dtype), u)
                u, _ = by_param_rms.update(u, by_param_rms.init(w), w)
                return u, s

            fn = _mapped(single, depth, (0, axes, 0), (0, axes))
            return fn(g, optax.FactoredState(count=state.updates, v_row=row, v_col=col, v=v), w)

        both = jax.tree.map(one, stacked_dims, grads, state.v_row, state.v_col, state.v, params)
        updates, states = jax.tree.transpose(
            jax.tree.structure(params),
            jax.tree.structure((0, optax.FactoredState(0, 0, 0, 0))),
            both,
        )
        return updates, AdafactorState(state.updates + 1, states.v_row, states.v_col, states.v)

    return Optimizer(init, update, lambda state: state.updates)


def round_at_random(key: jax.Array, values: Tree, like: Tree) -> Tree:
    """Stochastic rounding of float32 values to bfloat16: up or down with the probability that makes
    the mean exact (Gupta et al., 2015).

    Arguments:
      key: randomness; each leaf draws with its own.
      values: a tree of float32.
      like: a tree of the results' dtypes; values of another dtype than bfloat16 stay.
    """

    def one(index: int, x: jax.Array, old: jax.Array) -> jax.Array:
        if old.dtype != jnp.bfloat16:
            return x
        # bfloat16 is the high half of float32: a random low half carries into it.
        bits = jax.lax.bitcast_convert_type(x, jnp.uint32)
        low = jax.random.bits(jax.random.fold_in(key, index), x.shape, jnp.uint32) >> 16
        high = jnp.uint32(0xFFFF0000)
        raised = jax.lax.bitcast_convert_type((bits + low) & high, jnp.float32)
        # Next to the largest number, up would be infinite.
        cut = jax.lax.bitcast_convert_type(bits & high, jnp.float32)
        rounded = jnp.where(jnp.isfinite(raised), raised, cut)
        return jnp.where(jnp.isfinite(x), rounded, x).astype(jnp.bfloat16)

    leaves, tree = jax.tree.flatten(values)
    others = jax.tree.leaves(like)
    return tree.unflatten(
        [one(i, x, old) for i, (x, old) in enumerate(zip(leaves, others, strict=True))]
    )


def _mapped(fn: Callable[..., Any], depth: int, in_axes: Any, out_axes: Any) -> Any:
    """A function mapped over `depth` leading dims."""
    for _ in range(depth):
        fn = jax.vmap(fn, in_axes=in_axes, out_axes=out_axes)
    return fn


def _join(updates: jax.Array, states: Tree) -> AdafactorState:
    """One state from a tree of optax states, whose counts all equal `updates`."""

    def pick(name: str) -> Tree:
        return jax.tree.map(
            lambda s: getattr(s, name), states, is_leaf=lambda s: isinstance(s, optax.FactoredState)
        )

    return AdafactorState(updates, pick("v_row"), pick("v_col"), pick("v"))
