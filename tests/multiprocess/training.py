"""A short training run of the smallest preset, in one process or in several, with the place where
each is kept."""

import io
import os
import signal
import sys
from pathlib import Path
from typing import Any

import jax
from rich.console import Console

from examples.gshard.options import parse_args
from examples.gshard.sources import load
from examples.gshard.tests.runs import OneDevice, train_on
from sbp.moe.step import init_state, make_train_step

STEPS, STOP_AT, FIRST = 5, 3, 2
"""All steps; the one at which two processes are stopped; those that one process does first."""


def options(folder: Path, steps: int = STEPS) -> Any:
    """The options of a run."""
    # AdamW compiles in half the time of Adafactor.
    fixed = "--preset tiny-test --mesh expert=8 --set checkpoint_every=100 --set optimizer=adamw"
    return parse_args([*fixed.split(), "--steps", str(steps), "--workdir", str(folder)])


def train_in(folder: Path, plan: Any, steps: int = STEPS) -> tuple[int, int]:
    """Begin or resume a run; gives the step at its end and the signal that ended it."""
    run = options(folder, steps)
    state, stopped, _ = train_on(run, load(run.train, print), plan, Console(file=io.StringIO()))
    return int(state.step), stopped


class StoppedPlan:
    """A plan, and a signal at this process after one of its steps."""

    def __init__(self, plan: Any, stop_at: int) -> None:
        self.in_shardings = plan.in_shardings
        self._plan, self._left = plan, stop_at

    def __call__(self, state: Any, batch: Any) -> Any:
        done = self._plan(state, batch)
        self._left -= 1
        if self._left == 0:
            os.kill(os.getpid(), signal.SIGTERM)
        return done


if __name__ == "__main__":  # one process: begins a run that two end, and ends one that two begin
    run = options(Path())
    shapes = jax.eval_shape(lambda: init_state(run.model, run.train))
    step = jax.jit(make_train_step(run.model, run.train))
    plan = OneDevice(step, shapes, lambda number: None)
    assert train_in(Path(sys.argv[1]), plan, FIRST) == (FIRST, 0)
    input()  # a line comes when the two have done their part
    assert train_in(Path(sys.argv[2]), plan) == (STEPS, 0)
