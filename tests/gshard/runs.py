"""The training program in one process, on one device and without a plan."""

import io
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import jax
from rich.console import Console

from examples.gshard.corpus import Corpus, generate
from examples.gshard.data import encode_pairs
from examples.gshard.options import Run, parse_args
from examples.gshard.presets import preset
from examples.gshard.tokenizer import Tokenizer
from examples.gshard.train import fit, tokenizers
from sbp.moe.checkpoint import Checkpoints, describe
from sbp.moe.step import TrainState, init_state, make_train_step

MODEL, TRAIN = preset("tiny-test").model, preset("tiny-test").train
QUICK = {"xla_backend_optimization_level": 0, "xla_llvm_disable_expensive_passes": True}
"""Whole steps take longer to compile than to run here."""

After = Callable[[int], None]


class OneDevice:
    """The step on one device, in place of an sbp.Plan; `after` is called behind each step with its
    number."""

    def __init__(self, step: Any, state: Any, after: After) -> None:
        place = jax.sharding.SingleDeviceSharding(jax.devices()[0])
        self.in_shardings = (jax.tree.map(lambda _: place, state),)
        self.step, self.after, self.losses = step, after, []

    def __call__(self, state: Any, batch: Any) -> Any:
        state, metrics = self.step(state, batch)
        self.losses.append(float(metrics.loss))
        self.after(int(state.step))
        return state, metrics


class Ended(NamedTuple):
    """How a run has ended; `losses` are those of the steps since it began or was resumed."""

    state: TrainState
    stopped: int
    latest: int | None
    losses: list[float]
    shown: str


class Training:
    """Runs of the smallest preset with a checkpoint after every second step; they share one
    compiled step."""

    def __init__(self) -> None:
        self.corpus = generate(TRAIN)
        self.step = jax.jit(make_train_step(MODEL, TRAIN), donate_argnums=0, compiler_options=QUICK)
        self.shapes = jax.eval_shape(partial(init_state, MODEL, TRAIN))

    def __call__(self, folder: Path, steps: int, after: After = lambda number: None) -> Ended:
        """Begin or resume the run of a folder."""
        argv = ["--preset", "tiny-test", "--steps", str(steps), "--set", "checkpoint_every=2"]
        run = parse_args([*argv, "--workdir", str(folder)])
        shown = io.StringIO()
        console = Console(file=shown, force_terminal=False)
        plan = OneDevice(self.step, self.shapes, after)
        with Checkpoints(folder, describe(run.model, run.train, self.corpus.digest)) as checkpoints:
            resumes = checkpoints.latest is not None
            found = tokenizers(self.corpus, run.model, run.train, folder, resumes=resumes)
            encoded = encode_pairs(self.corpus.train, *found, run.model)
            state, stopped = fit(run, plan, encoded, checkpoints, console)
            return Ended(state, stopped, checkpoints.latest, plan.losses, shown.getvalue())


class Begun(NamedTuple):
    """What is in the folder of a run that has one checkpoint, of step 0."""

    folder: Path
    corpus: Corpus
    params: Any
    source: Tokenizer
    target: Tokenizer


def begin(folder: Path, run: Run, changed: Callable[[Any], Any] = lambda params: params) -> Begun:
    """Makes the folder of a run, with parameters that are changed."""
    corpus = generate(run.train)
    with Checkpoints(folder, describe(run.model, run.train, corpus.digest)) as checkpoints:
        source, target = tokenizers(corpus, run.model, run.train, folder, resumes=False)
        checkpoints.bind("vocabulary", {"source": source.digest, "target": target.digest})
        state = init_state(run.model, run.train)
        state = state._replace(params=changed(state.params))
        checkpoints.save(state, {"next": 0})
    return Begun(folder, corpus, state.params, source, target)


if __name__ == "__main__":
    Training()(Path(sys.argv[1]), int(sys.argv[2]))
