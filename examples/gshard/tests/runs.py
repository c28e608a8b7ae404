"""Runs the training program in one process, on one device and without a plan. Kills processes that
train, and compares the checkpoints that are left. A limit on the size of files stands for a full
disk."""

import io
import os
import random
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
from rich.console import Console

from examples.gshard.corpus import Corpus, generate
from examples.gshard.data import encode_pairs
from examples.gshard.options import Run, parse_args
from examples.gshard.tokenizer import Tokenizer
from examples.gshard.train import fit, tokenizers
from sbp.moe.checkpoint import Checkpoints, bound, describe
from sbp.moe.hosts import from_first
from sbp.moe.step import TrainState, init_state, make_train_step
from sbp.moe.trainer import read_metrics
from tests.moe.test_model import MODEL, QUICK, TRAIN

After = Callable[[int], None]

SHAPES = jax.eval_shape(lambda: init_state(MODEL, TRAIN))
PLACES = jax.tree.map(lambda _: jax.sharding.SingleDeviceSharding(jax.devices()[0]), SHAPES)
"""The state of a run of the smallest preset, and one device for it."""


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

    def __call__(self, folder: Path, steps: int, after: After = lambda number: None) -> Ended:
        """Begin or resume the run of a folder."""
        run = parse_args(
            [
                *["--preset", "tiny-test", "--steps", str(steps), "--set", "checkpoint_every=2"],
                *["--workdir", str(folder)],
            ]
        )
        shown = io.StringIO()
        console = Console(file=shown, force_terminal=False)
        plan = OneDevice(self.step, SHAPES, after)
        return Ended(*train_on(run, self.corpus, plan, console), plan.losses, shown.getvalue())


def train_on(
    run: Run, corpus: Corpus, plan: Any, console: Console
) -> tuple[TrainState, int, int | None]:
    """Begins or resumes a run, in one process or in several.

    Returns:
      The state at the end, the signal that stopped training, and the step of the newest checkpoint.
    """
    with Checkpoints(run.workdir, describe(run.model, run.train, corpus.digest)) as checkpoints:
        resumes = checkpoints.latest is not None
        found = from_first(
            lambda: tokenizers(corpus, run.model, run.train, run.workdir, resumes=resumes)
        )
        encoded = encode_pairs(corpus.train, *found, run.model)
        state, stopped = fit(run, plan, encoded, checkpoints, console)
        return state, stopped, checkpoints.latest


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


# ---- killed processes and disks without room -----------------------------------------------------

NEVER = 10**6  # steps; a run is killed before
TIMES = {"seconds", "tokens_per_second", "flops_per_second", "mfu"}


@dataclass(frozen=True)
class Moment:
    """When a process is killed: some seconds after it was started, after it began to write a
    checkpoint ("begun"), or after one was whole ("written")."""

    event: str
    seconds: float


def moments(count: int, seed: int) -> list[Moment]:
    """Each kind has the same number of moments. The longest wait of a kind is about as long as what
    the process does then."""
    rng, longest = random.Random(seed), {"started": 20.0, "begun": 0.2, "written": 0.4}
    events = [event for event in longest for _ in range(-(-count // len(longest)))][-count:]
    rng.shuffle(events)
    return [Moment(event, rng.uniform(0, longest[event])) for event in events]


def folders(workdir: Path, *, whole: bool) -> set[tuple[str, int]]:
    """Checkpoints that are whole, or those that are being written."""
    found = workdir / "checkpoints"
    if not found.exists():
        return set()
    with os.scandir(found) as entries:
        return {(e.name, e.inode()) for e in entries if e.name.isdecimal() == whole}


def kill(command: Sequence[str], env: Mapping[str, str], workdir: Path, moment: Moment) -> None:
    """Start the program, and kill it at a moment."""
    whole = moment.event == "written"
    before = folders(workdir, whole=whole)
    with open(workdir.with_suffix(".out"), "w") as out:
        process = subprocess.Popen(command, env={**os.environ, **env}, stdout=out, stderr=out)
    while moment.event != "started" and not folders(workdir, whole=whole) - before:
        assert process.poll() is None, workdir.with_suffix(".out").read_text()
        time.sleep(0.002)
    time.sleep(moment.seconds)
    process.kill()
    assert process.wait() == -signal.SIGKILL, workdir.with_suffix(".out").read_text()


def restored(workdir: Path, description: Mapping[str, Any]) -> tuple[Any, Any, list[str]]:
    """What the newest checkpoint of a run has, as arrays of this process, its place in the data,
    and what was said."""
    said: list[str] = []
    with Checkpoints(workdir, description) as checkpoints:
        state, data = checkpoints.restore(SHAPES, PLACES, said.append)
    return jax.device_get(state), data, said


def bits(x: Any) -> tuple[Any, ...]:
    """An array with the sign of each zero."""
    x = np.asarray(x)
    return x.dtype, x.shape, x.tobytes()


def assert_same_runs(a: Path, b: Path) -> None:
    """The same bits in all arrays, the same place in the data, the same numbers of each step."""
    (state, data, said), (want, place, also) = (restored(run, bound(run)) for run in (a, b))
    assert not said + also
    assert jax.tree.map(bits, state) == jax.tree.map(bits, want)
    assert data == place
    lines, wanted = (
        [{k: v for k, v in line.items() if k not in TIMES} for line in read_metrics(workdir)]
        for workdir in (a, b)
    )
    assert lines == wanted
    assert [line["step"] for line in lines] == list(range(1, int(want.step) + 1))
    assert sorted(p.name for p in a.iterdir()) == sorted(p.name for p in b.iterdir())
    assert folders(a, whole=False) == set()


@contextmanager
def files_of_at_most(size: int) -> Iterator[None]:
    """Writing fails behind the first `size` bytes of any file."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


if __name__ == "__main__":
    Training()(Path(sys.argv[1]), int(sys.argv[2]))
