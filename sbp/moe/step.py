"""The training step: loss, gradients over microbatches, clipping, the optimiser's update."""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

import sbp
from sbp.moe.config import PAD, ModelConfig, TrainConfig
from sbp.moe.layers import EXPERT_WEIGHTS, Segments, balance_biases, subkey, wide_dtype
from sbp.moe.model import Batch, Metrics, init_params, loss_fn
from sbp.moe.sharding import PLAIN, Mesh, Sharding, Tree, check_parts, leaf_types, sharding_of

# ---- optimisers ---------------------------------------------------------------------------------


def sqrt_decay(learning_rate: float = 1.0, warmup_steps: int = 10_000) -> Callable[[Any], Any]:
    """The schedule learning_rate / sqrt(max(step, warmup_steps)): flat, then square-root decay
    (GShard appendix A.2).

    Arguments:
      learning_rate: 1.0 in the paper.
      warmup_steps: 10 000 in the paper, so 0.01 until then.

    Returns:
      A function from the step (from 0) to the rate.
    """
    return lambda step: (
        learning_rate
        * jax.lax.rsqrt(jnp.maximum(jnp.asarray(step, jnp.float32), float(warmup_steps)))
    )


def _with_ramp(train: TrainConfig, schedule: optax.Schedule) -> Callable[[Any], Any]:
    """A schedule behind a linear ramp from zero, which short runs with a high rate need."""

    def rate(step: Any) -> Any:
        ramp = (jnp.asarray(step, jnp.float32) + 1.0) / max(train.ramp_steps, 1)
        return schedule(step) * jnp.minimum(1.0, ramp)

    return rate


SCHEDULES: Mapping[str, Callable[[TrainConfig], Callable[[Any], Any]]] = {
    "sqrt_decay": lambda t: _with_ramp(t, sqrt_decay(t.learning_rate, t.warmup_steps)),
    "constant": lambda t: _with_ramp(t, optax.constant_schedule(t.learning_rate)),
    "linear": lambda t: _with_ramp(t, optax.linear_schedule(t.learning_rate, 0.0, t.steps)),
    "cosine": lambda t: _with_ramp(t, optax.cosine_decay_schedule(t.learning_rate, t.steps)),
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
    # The count is one for all, everything else has a row per stacked weight.
    none: Any = None
    zero: Any = 0  # the state holds vmap axes here in place of arrays
    axes: Any = optax.FactoredState(count=none, v_row=zero, v_col=zero, v=zero)

    def init(params: Tree) -> AdafactorState:
        states = jax.tree.map(
            lambda depth, w: _map(moments.init, depth, 0, axes)(w), stacked_dims, params
        )
        apart = jax.tree.transpose(
            jax.tree.structure(params), jax.tree.structure(optax.FactoredState(0, 0, 0, 0)), states
        )
        return AdafactorState(jnp.zeros((), jnp.int32), apart.v_row, apart.v_col, apart.v)

    def update(grads: Tree, state: AdafactorState, params: Tree) -> tuple[Tree, AdafactorState]:
        rate = schedule(state.updates)
        scaled = optax.chain(
            optax.clip_by_block_rms(1.0),
            optax.stateless(lambda u, _: jax.tree.map(lambda u: u * -rate.astype(u.dtype), u)),
            optax.scale_by_param_block_rms(1e-3),
        )

        def one(
            depth: int, g: jax.Array, row: jax.Array, col: jax.Array, v: jax.Array, w: jax.Array
        ) -> Any:
            def single(g: Any, s: Any, w: jax.Array) -> tuple[Any, Any]:
                u, s = moments.update(g, s, w)
                return scaled.update(u, scaled.init(w), w)[0], s

            return _map(single, depth, (0, axes, 0), (0, axes))(
                g, optax.FactoredState(count=state.updates, v_row=row, v_col=col, v=v), w
            )

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

    tree = jax.tree.structure(values)
    return jax.tree.map(one, tree.unflatten(range(tree.num_leaves)), values, like)


def _map(fn: Callable[..., Any], depth: int, in_axes: Any, out_axes: Any) -> Any:
    """A function mapped over `depth` leading dims."""
    for _ in range(depth):
        fn = jax.vmap(fn, in_axes=in_axes, out_axes=out_axes)
    return fn


class TrainState(NamedTuple):
    """All that a step reads and writes; the random keys follow from the seed and the step."""

    step: Any
    params: Tree
    optimizer: Tree


def stacked_dims(params: Tree) -> Tree:
    """For each leaf, how many leading dims stack independent weights: the layers, and for expert
    weights the experts."""

    def count(path: tuple[Any, ...], _: Any) -> int:
        names = [getattr(entry, "key", "") for entry in path]
        return (
            0 if names[0] not in ("encoder", "decoder") else 2 if names[-1] in EXPERT_WEIGHTS else 1
        )

    return jax.tree_util.tree_map_with_path(count, params)


def make_optimizer(model: ModelConfig, train: TrainConfig) -> Optimizer:
    """The optimiser of a run."""
    schedule = SCHEDULES[train.schedule](train)
    if train.optimizer == "adamw":
        adamw = optax.adamw(schedule, train.beta1, train.beta2, weight_decay=train.weight_decay)
        return Optimizer(adamw.init, adamw.update, lambda state: state[0].count)
    shapes = jax.eval_shape(lambda: init_params(jax.random.key(0), model))
    return adafactor(stacked_dims(shapes), schedule, min_dim_to_factor=train.min_dim_to_factor)


def init_state(model: ModelConfig, train: TrainConfig) -> TrainState:
    """The state before the first step, from `train.seed`."""
    params = init_params(jax.random.key(train.seed), model)
    moments = make_optimizer(model, train).init(_wide(params))
    return TrainState(jnp.zeros((), jnp.int32), params, moments)


def _wide(tree: Tree) -> Tree:
    """A tree in the dtype in which the optimiser computes."""
    return jax.tree.map(lambda w: w.astype(wide_dtype(w.dtype)), tree)


def state_types(train: TrainConfig, mesh: Mesh) -> TrainState:
    """The entry of `in_types` for the state: how it lies between steps.

    ZeRO (Rajbhandari et al., 2020): stage 1 splits the state of the optimiser, stage 3 the
    parameters too. Gradients are never kept, and are reduced to the split in which the update
    reads them: that is stage 2.
    """
    return TrainState(
        None,
        leaf_types(mesh, spread=train.zero == 3),
        leaf_types(mesh, spread=train.zero > 0),
    )


def batch_shapes(model: ModelConfig, *, packed: bool = False) -> Batch:
    """Shapes of one batch, to plan without data; with segments where it is packed."""
    lead = (model.groups, model.sequences_per_group)
    source = jax.ShapeDtypeStruct((*lead, model.source_length), jnp.int32)
    target = jax.ShapeDtypeStruct((*lead, model.target_length), jnp.int32)
    return Batch(source, target, target, Segments(source, target) if packed else None)


def gradients(
    params: Tree,
    batch: Batch,
    model: ModelConfig,
    *,
    microbatches: int = 1,
    key: jax.Array | None = None,
    sharding: Sharding = PLAIN,
) -> tuple[Tree, Metrics]:
    """Gradients of the loss of a batch, and its metrics.

    Several microbatches have every n-th group each, one after the other; their gradients add up to
    those of the batch. Each device keeps the groups that it has.
    """
    grad = jax.grad(loss_fn, has_aux=True)
    if microbatches == 1:
        return grad(params, batch, model, key=key, sharding=sharding)
    share = jnp.sum(batch.target_out != PAD).astype(jnp.float32), microbatches

    def one(part: Batch, index: jax.Array | int) -> tuple[Tree, Metrics]:
        grads, metrics = grad(
            params, part, model, key=subkey(key, index), sharding=sharding, share=share
        )
        return _wide(grads), metrics  # added up in the optimiser's dtype

    def turn(sums: tuple[Tree, Metrics], turn: tuple[Batch, jax.Array]) -> Any:
        return jax.tree.map(jnp.add, sums, one(*turn)), None

    parts = jax.tree.map(
        lambda x: jnp.moveaxis(x.reshape(-1, microbatches, *x.shape[1:]), 1, 0), batch
    )
    zeros = jax.tree.map(
        lambda s: jnp.zeros(s.shape, s.dtype),
        jax.eval_shape(lambda: one(jax.tree.map(lambda x: x[0], parts), 0)),
    )
    sums, _ = jax.lax.scan(turn, zeros, (parts, jnp.arange(microbatches)))
    return sums


def make_train_step(
    model: ModelConfig, train: TrainConfig, sharding: Sharding = PLAIN
) -> Callable[[TrainState, Batch], tuple[TrainState, Metrics]]:
    """The step of a run, for `sbp.jit` or `jax.jit`.

    A step whose loss, gradients or updates are not finite changes nothing but the count of steps;
    all devices decide alike, by norms over the whole model.

    Raises:
      SbpError: `unknown-option` where the microbatches do not divide the groups.
    """
    check_parts(model, train, sharding)
    optimizer, schedule = make_optimizer(model, train), SCHEDULES[train.schedule](train)

    def train_step(state: TrainState, batch: Batch) -> tuple[TrainState, Metrics]:
        # A key of its own for every step, from the seed: a resumed run draws what an uninterrupted
        # one would have.
        key = jax.random.fold_in(jax.random.key(train.seed + 1), state.step)
        grads, metrics = gradients(
            state.params,
            batch,
            model,
            microbatches=train.accumulate,
            key=key,
            sharding=sharding,
        )
        grads, old = _wide(grads), _wide(state.params)
        norm = optax.tree.norm(grads)
        if train.clip_norm:
            scale = jnp.minimum(1.0, train.clip_norm / jnp.maximum(norm, train.clip_norm))
            grads = jax.tree.map(lambda g: g * scale.astype(g.dtype), grads)
        updates, opt = optimizer.update(grads, state.optimizer, old)
        new = balance_biases(jax.tree.map(jnp.add, old, updates), old, metrics.sides, model)
        if model.rounding == "stochastic":
            new = round_at_random(
                jax.random.fold_in(jax.random.key(train.seed + 2), state.step), new, state.params
            )
        new = jax.tree.map(lambda new, old: new.astype(old.dtype), new, state.params)
        finite = (
            jnp.isfinite(metrics.loss) & jnp.isfinite(norm) & jnp.isfinite(optax.tree.norm(updates))
        )
        params, opt = jax.tree.map(
            lambda new, old: jnp.where(finite, new, old),
            (new, opt),
            (state.params, state.optimizer),
        )
        metrics = metrics._replace(
            grad_norm=norm,
            skipped_step=1.0 - finite,
            skipped_steps=(state.step + 1 - optimizer.updates(opt)).astype(jnp.float32),
            learning_rate=jnp.asarray(schedule(optimizer.updates(state.optimizer)), jnp.float32),
        )
        return TrainState(state.step + 1, params, opt), metrics

    return train_step


def state_shapes(model: ModelConfig, train: TrainConfig) -> TrainState:
    """Shapes of the state of a run."""
    return jax.eval_shape(lambda: init_state(model, train))


def plan_train_step(
    model: ModelConfig, train: TrainConfig, mesh: Any, hardware: str | None = None
) -> sbp.Plan:
    """Type and price the step of a run on a mesh, from shapes alone. The state is donated.

    Arguments:
      model: the model.
      train: the training run.
      mesh: a mesh with axes of `sharding.AXES`, or an abstract one to plan without devices.
      hardware: a device kind of `sbp.HARDWARE`; None for that of the mesh.

    Raises:
      SbpError: where the step has no typing, or the device kind is unknown.
    """
    axes = tuple(mesh.shape.items())
    sharding = sharding_of(
        axes,
        sequence_parallel=train.sequence_parallel,
        microbatches=train.pipeline_microbatches,
    )
    step = sbp.jit(
        make_train_step(model, train, sharding),
        mesh,
        in_types=(state_types(train, axes), None),
        hardware=hardware,
        donate_argnums=(0,),
    )
    return step.plan(state_shapes(model, train), batch_shapes(model, packed=train.pack))
