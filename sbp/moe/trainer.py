"""The loop that trains a model through the plan of its step, with checkpoints."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import jax

from sbp.errors import SbpError
from sbp.moe.checkpoint import Checkpoints, newest_text
from sbp.moe.config import ModelConfig, TrainConfig
from sbp.moe.hosts import BatchPart, gather, is_first, whole
from sbp.moe.metrics import MetricsLog, Speed, Values, summarize
from sbp.moe.model import Batch, Metrics
from sbp.moe.step import TrainState, init_state, state_shapes


class StepPlan(Protocol):
    """What training needs of a plan: call it, and ask where its arguments live. An `sbp.Plan` is
    one."""

    @property
    def in_shardings(self) -> Any: ...

    def __call__(self, state: TrainState, batch: Batch, /) -> tuple[TrainState, Metrics]: ...


class Batches(Protocol):
    """An endless iterator of batches, whose place a checkpoint keeps as JSON."""

    def __next__(self) -> Batch: ...

    def get_state(self) -> Mapping[str, Any]: ...

    def set_state(self, state: Any, /) -> None: ...


Callback = Callable[[int, Values], None]
"""Is called after each step with its number and what `sbp.moe.metrics` reports of it; at a
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
    plan: StepPlan
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
            first = partial(init_state, self.model, self.train)
            return jax.jit(first, out_shardings=shardings)()
        shapes = state_shapes(self.model, self.train)
        state, place = self.checkpoints.restore(shapes, shardings, self.say)
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
        speed = Speed.of(self.model, jax.tree.leaves(self.plan.in_shardings[0])[0].device_set)
        workdir = self.checkpoints.workdir if is_first() else None
        with MetricsLog(workdir, first) as log:
            callbacks = (*callbacks, log.write)
            for step in range(first + 1, train.steps + 1):
                started, batch = time.monotonic(), next(self.batches)
                with around(step):
                    state, metrics = self.plan(
                        state, self.part.place(batch) if self.part else batch
                    )
                    values = summarize(whole(metrics))
                self.checkpoints.check()
                if step > first + 1:  # the first step compiles
                    values |= speed.rates(values["tokens"], time.monotonic() - started)
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
