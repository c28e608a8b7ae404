"""The loop that trains a model through the plan of its step, with checkpoints, and the metrics that
it reports of each step."""

import json
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import jax
import numpy as np

import sbp
from sbp.errors import SbpError
from sbp.machine.hardware import hardware_of_kind
from sbp.moe.checkpoint import Checkpoints, newest_text, write_whole, writing
from sbp.moe.config import ModelConfig, TrainConfig
from sbp.moe.hosts import BatchPart, gather, is_first, whole
from sbp.moe.model import Batch, Metrics, init_params
from sbp.moe.step import TrainState, init_state, state_shapes

# ---- metrics ------------------------------------------------------------------------------------
# What a run reports of each step, by name, and where it is kept: `metrics.jsonl`.


Values = Mapping[str, Any]
"""Numbers of a step by name; a list has one number for each expert."""

FILE = "metrics.jsonl"


def summarize(metrics: Metrics) -> dict[str, Any]:
    """Numbers of one step by name, from host arrays.

    Returns:
      `loss`, `nll`, `accuracy`, `tokens` (source and target, without padding), `grad_norm`,
      `learning_rate`, `skipped_step` and `skipped_steps`; of a model with experts also `aux`;
      `drop`, the share of wanted choices that found no slot; `skipped`, the choices for each token
      that random routing left out, which do not count as wanted; `imbalance`, the busiest expert's
      load over the even share, worst layer; and what `layers` gives.
    """
    sides = tuple(metrics.sides.values())
    values: dict[str, Any] = {
        "loss": float(metrics.loss),
        "nll": float(metrics.nll),
        "accuracy": float(metrics.correct),
        "tokens": float(sum(side.tokens[0] for side in sides)),
        "grad_norm": float(metrics.grad_norm),
        "learning_rate": float(metrics.learning_rate),
        "skipped_step": float(metrics.skipped_step),
        "skipped_steps": float(metrics.skipped_steps),
    }
    if all(np.shape(side.load)[-1] == 1 for side in sides):  # a dense model
        return values
    tokens = sum(float(np.sum(side.tokens)) for side in sides)
    dropped = sum(float(np.sum(side.dropped_first) + np.sum(side.dropped_second)) for side in sides)
    skipped = sum(float(np.sum(side.skipped_second)) for side in sides)
    wanted = sum(float(np.sum(side.demand)) for side in sides)
    loads = np.concatenate([np.asarray(side.load) for side in sides])
    return values | {
        "aux": float(metrics.aux),
        "drop": dropped / max(wanted, 1.0),
        "skipped": skipped / max(tokens, 1.0),
        "imbalance": float(np.max(loads.max(axis=1) / np.maximum(loads.mean(axis=1), 1.0))),
        **layers(metrics),
    }


def layers(metrics: Metrics) -> dict[str, Any]:
    """What each MoE layer did, by names such as `encoder/0/drop`.

    Arguments:
      metrics: of one step, as host arrays, of a model with experts.

    Returns:
      For each layer of a side, from 0: `load`, the tokens of each expert; `unused`, how many
      experts have none; `drop`, the share of wanted choices that found no slot; `entropy` of the
      router's softmax, the mean over tokens, in nats: log E where it knows nothing; `aux`.
    """
    values: dict[str, Any] = {}
    aux = iter(np.asarray(metrics.layer_aux))
    for name, side in metrics.sides.items():
        for i, load in enumerate(np.asarray(side.load, np.float64)):
            dropped = float(side.dropped_first[i] + side.dropped_second[i])
            values |= {
                f"{name}/{i}/load": load.tolist(),
                f"{name}/{i}/unused": float(np.sum(load == 0)),
                f"{name}/{i}/drop": dropped / max(float(np.sum(side.demand[i])), 1.0),
                f"{name}/{i}/entropy": float(side.entropy[i] / max(side.tokens[i], 1.0)),
                f"{name}/{i}/aux": float(next(aux)),
            }
    return values


def rates(tokens: float, seconds: float, flops: float, peak: float) -> dict[str, float]:
    """Rates of a step: tokens and operations per second, and the model FLOPs utilization:
    operations of a step / (its seconds * peak).

    Arguments:
      tokens: of source and target, without padding.
      seconds: of the step.
      flops: operations that the model needs in a step.
      peak: operations per second of all devices together.
    """
    return {
        "seconds": seconds,
        "tokens_per_second": tokens / seconds,
        "flops_per_second": flops / seconds,
        "mfu": flops / (seconds * peak),
    }


def read_metrics(workdir: Path) -> list[dict[str, Any]]:
    """The steps that a run has reported, in order; a line that is damaged is left out."""
    return [json.loads(line) for line in _whole_lines(workdir / FILE)]


def _whole_lines(path: Path) -> Iterator[str]:
    """The lines of a file that are JSON objects with a step."""
    if not path.exists():
        return
    try:
        text = path.read_text("utf-8", errors="replace")
    except OSError as error:
        raise SbpError(
            f"cannot read {path}: {error.strerror}; make it readable, or move it away",
            code="bad-checkpoint",
        ) from None
    for line in text.splitlines():
        try:
            if isinstance(json.loads(line)["step"], int):
                yield line
        except (ValueError, KeyError, TypeError):
            continue


class MetricsLog(AbstractContextManager["MetricsLog"]):
    """Appends one JSON object for each step to `<workdir>/metrics.jsonl`."""

    def __init__(self, workdir: Path, first: int) -> None:
        """Open the file of a run, new or old.

        Arguments:
          workdir: the folder of the run.
          first: steps done. What the file has of later steps, which no checkpoint kept, is left
            out.
        """
        path = workdir / FILE
        kept = [line for line in _whole_lines(path) if json.loads(line)["step"] <= first]
        write_whole(path, "".join(f"{line}\n" for line in kept).encode())
        with writing(path):
            self._file = path.open("a", encoding="utf-8")

    def write(self, step: int, values: Values) -> None:
        """Keep the numbers of a step. A number that is not finite is null in the file.

        Raises:
          SbpError: `bad-checkpoint` where they cannot be written.
        """
        finite = {
            name: value if isinstance(value, list) or math.isfinite(value) else None
            for name, value in values.items()
        }
        with writing(Path(self._file.name)):
            print(json.dumps({"step": step, **finite}), file=self._file, flush=True)

    def __exit__(self, *_: object) -> None:
        with suppress(OSError):  # each line was flushed, or its error raised
            self._file.close()


# ---- operations of a step -----------------------------------------------------------------------


def step_flops(cfg: ModelConfig) -> float:
    """Operations of a training step on one batch: three times the operations of the forward pass.

    A weight matrix takes two operations for each of its numbers and each token that meets it; of
    experts a token meets `ModelConfig.choices`. Attention takes two products of T * T' * A * D for
    each sequence.
    """
    source, target = (cfg.sequences * n for n in (cfg.source_length, cfg.target_length))
    shapes: Any = jax.eval_shape(lambda: init_params(jax.random.key(0), cfg))
    forward = 2.0 * target * math.prod(shapes["logits"].shape)
    rows = target + cfg.sequences * cfg.prefix_length
    for side, tokens, own in (("encoder", source, cfg), ("decoder", rows, cfg.decoder())):
        for path, leaf in jax.tree_util.tree_flatten_with_path(shapes.get(side, {}))[0]:
            layer, name = path[0].key, path[-1].key
            if len(leaf.shape) < 3:  # a norm of each layer
                continue
            is_memory = layer.startswith("cross") and name in ("key", "value")
            met = 2.0 * (source if is_memory else tokens) * math.prod(leaf.shape)
            if name.startswith("expert_"):
                met *= own.choices / cfg.experts
            forward += met
            if name == "query":
                looked = cfg.source_length if layer.startswith("cross") else tokens / cfg.sequences
                pairs, width = leaf.shape[0], math.prod(leaf.shape[2:])
                forward += 2 * 2.0 * pairs * tokens * looked * width
    return 3.0 * forward


# ---- loop ---------------------------------------------------------------------------------------


class Batches(Protocol):
    """An endless iterator of batches, whose place a checkpoint keeps as JSON."""

    def __next__(self) -> Batch: ...

    def get_state(self) -> Mapping[str, Any]: ...

    def set_state(self, state: Any, /) -> None: ...


Callback = Callable[[int, Values], None]
"""Is called after each step with its number and what `sbp.moe.trainer` reports of it; at a
checkpoint `heldout_nll` is the loss on held-out text."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Trainer:
    """A run of training.

    Attributes:
      model: the model.
      train: how it is trained.
      plan: of the step, from `sbp.moe.step.plan_train_step`.
      batches: what is trained on; in several processes, the groups of `part`.
      checkpoints: where the run is kept.
      part: what this process makes of each batch; None for all of it.
      heldout: the loss on held-out text, taken with each checkpoint; None for none.
      say: is called with a line about what the run goes on from.
    """

    model: ModelConfig
    train: TrainConfig
    plan: sbp.Plan
    batches: Batches
    checkpoints: Checkpoints
    part: BatchPart | None = None
    heldout: Callable[[TrainState], float] | None = None
    say: Callable[[str], None] = print

    def begin(self) -> TrainState:
        """The state to go on from: of the newest checkpoint, with its place in the data, or the
        first."""
        shardings = self.plan.in_shardings[0]
        if self.checkpoints.latest is None:
            return jax.jit(partial(init_state, self.model, self.train), out_shardings=shardings)()
        state, place = self.checkpoints.restore(
            state_shapes(self.model, self.train), shardings, self.say
        )
        if place:
            self.batches.set_state(place)
        step, steps = int(state.step), self.train.steps
        self.say(f"resumed at step {step}")
        if step >= steps:
            self.say(f"nothing to train: step {step} is done, and steps is {steps}")
        return state

    def fit(
        self,
        state: TrainState,
        callbacks: Sequence[Callback] = (),
        *,
        stop: Callable[[], int] = lambda: 0,
        around: Callable[[int], AbstractContextManager[Any]] = nullcontext,
    ) -> tuple[TrainState, int]:
        """Train to the last step.

        Arguments:
          state: from `begin`; it is donated.
          callbacks: are called after each step.
          stop: gives the number of the signal that asks to stop, 0 for none; training ends after
            the step, with a checkpoint.
          around: a context for each step, by its number, such as a profiler's.

        Returns:
          The state, which is saved, and the signal that stopped training (0 where none did).

        Raises:
          SbpError: `not-finite` where `max_skipped` steps in a row changed nothing.
        """
        train, first, skipped, stopped = self.train, int(state.step), 0, 0
        flops, itemsize = step_flops(self.model), np.dtype(self.model.dtype).itemsize
        peak = sum(
            hardware_of_kind(device.device_kind, device.platform).product_flops_per_second(itemsize)
            for device in jax.tree.leaves(self.plan.in_shardings[0])[0].device_set
        )
        log = MetricsLog(self.checkpoints.workdir, first) if is_first() else None
        with log or nullcontext():
            callbacks = (*callbacks, *([log.write] if log else []))
            for step in range(first + 1, train.steps + 1):
                started, batch = time.monotonic(), next(self.batches)
                with around(step):
                    state, metrics = self.plan(
                        state, self.part.place(batch) if self.part else batch
                    )
                    values = summarize(whole(metrics))
                self.checkpoints.check()
                if step > first + 1:  # the first step compiles
                    values |= rates(values["tokens"], time.monotonic() - started, flops, peak)
                skipped = skipped + 1 if values["skipped_step"] else 0
                fails = skipped == train.max_skipped
                due = step % train.checkpoint_every == 0 or step == train.steps
                if due and self.heldout and not fails:
                    values["heldout_nll"] = self.heldout(state)
                for callback in callbacks:
                    callback(step, values)
                if fails:
                    raise self._not_finite(step, values)
                stopped = max(gather(stop()))  # all processes stop behind the same step
                if due or stopped:
                    self.checkpoints.save(state, self.batches.get_state())
                if stopped:
                    break
            self.checkpoints.wait()
        return state, max(gather(stop()))

    def _not_finite(self, step: int, values: Values) -> SbpError:
        self.checkpoints.wait()
        return SbpError(
            f"steps {step - self.train.max_skipped + 1} to {step} were skipped: the loss, the"
            " gradients or the updates were not finite"
            f" (loss {values['loss']:g}, norm of the gradients {values['grad_norm']:g});"
            f" {newest_text(self.checkpoints.workdir)}. Lower learning_rate, set clip_norm or raise"
            " ramp_steps in another --workdir, or raise max_skipped in this one",
            code="not-finite",
        )
