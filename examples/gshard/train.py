"""The main job: train the GShard MoE Transformer through the plan executor and measure its
translations.

sbp train --preset tiny-mt --workdir runs/tiny-mt
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import math
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext, suppress
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from rich.console import Console

import sbp
from examples.gshard.config import TranslationConfig
from examples.gshard.corpus import Corpus, Pair, pairs_digest
from examples.gshard.curves import PAGE, TensorBoard, write_curves
from examples.gshard.data import Encoded, batches, encode_pairs, evaluation_batches
from examples.gshard.display import TrainingDisplay, show_error, show_evaluation
from examples.gshard.evaluate import MODEL, Evaluation, baselines, evaluate
from examples.gshard.hosts import between_processes
from examples.gshard.machine import make_mesh, need_room
from examples.gshard.options import Run, parse_args, undivided
from examples.gshard.profiler import Profiler
from examples.gshard.sources import load
from examples.gshard.tokenizer import Tokenizer
from examples.gshard.translator import Translator, plan_search
from sbp.errors import SbpError
from sbp.moe.checkpoint import (
    Checkpoints,
    describe,
    newest_text,
    write_whole,
)
from sbp.moe.config import PAD, ModelConfig
from sbp.moe.decode import BeamSearch
from sbp.moe.hosts import BatchPart, agree, from_first, is_first
from sbp.moe.model import Batch, loss_fn
from sbp.moe.sharding import Sharding, simulate_devices
from sbp.moe.step import TrainState, batch_shapes, plan_train_step, state_shapes
from sbp.moe.trainer import Trainer

# ---- loss on held-out text ----------------------------------------------------------------------

_BATCHES = 2
"""Batches of held-out pairs that the loss is taken of: a small share of what lies between two
checkpoints."""


def sample(
    pairs: Sequence[Pair], source: Tokenizer, target: Tokenizer, cfg: ModelConfig, seed: int
) -> list[Batch]:
    """A few batches of held-out pairs that were drawn at random, the same for a seed; none where
    all pairs are longer than the model's sequences."""
    rows = np.random.default_rng(seed).permutation(len(pairs))
    try:
        encoded = encode_pairs([pairs[i] for i in rows], source, target, cfg)
    except SbpError:  # no pair fits: the run says so and trains without this loss
        return []
    every = evaluation_batches(encoded, cfg)
    return [batch for _, batch in itertools.islice(every, _BATCHES)]


def make_loss(cfg: ModelConfig, sharding: Sharding) -> Callable[[Any, Batch], jax.Array]:
    """A function from (parameters, batch) to the negative log-likelihood per target token, in nats,
    without dropout, random routing and label smoothing. Experts have their capacity for evaluation,
    so they may drop tokens that they take when translating."""

    def loss(params: Any, batch: Batch) -> jax.Array:
        return loss_fn(params, batch, cfg, sharding=sharding)[1].nll

    return loss


def plan_loss(
    cfg: ModelConfig, sharding: Sharding, shapes: Any, shardings: Any
) -> Callable[[Any, Sequence[Batch]], float]:
    """Plan the loss on the training mesh.

    Arguments:
      cfg: the model.
      sharding: the annotations of the training step.
      shapes: of the parameters.
      shardings: of the parameters, as the training step keeps them: nothing is moved.

    Returns:
      A function from (parameters, batches) to the loss per target token of all batches, in nats.

    Raises:
      SbpError: when the loss has no typing on the mesh.
    """
    mesh = jax.tree.leaves(shardings)[0].mesh
    types = jax.tree.map(lambda sharding: sharding.spec, shardings)
    plan = sbp.jit(make_loss(cfg, sharding), mesh, in_types=(types, None)).plan(
        shapes, batch_shapes(cfg)
    )

    def mean(params: Any, batches: Sequence[Batch]) -> float:
        tokens = [int(np.sum(batch.target_out != PAD)) for batch in batches]
        losses = [plan(params, jax.tree.map(jnp.asarray, batch)) for batch in batches]
        return sum(n * float(x) for n, x in zip(tokens, losses, strict=True)) / sum(tokens)

    return mean


# ---- signals ------------------------------------------------------------------------------------

_SIGNALS = (signal.SIGINT, signal.SIGTERM)
_SHOW_CURSOR = "\x1b[?25h"


class StopSignal:
    """While active, SIGINT and SIGTERM end the process at once, with a line that says what is kept;
    or they are first noted, so that the step can be saved.

    Python runs its handlers between two of its own instructions, so not while XLA compiles or
    computes. A thread reads the signals from a pipe, to which the system's handler writes them, and
    that handler runs at any time.

    Attributes:
      signal: the signal that was noted last, 0 for none.
    """

    def __init__(self, kept: Callable[[], str], asked: Callable[[], None] | None = None) -> None:
        """Signals in one place of a program; those of a place within it come first.

        Arguments:
          kept: gives what to say when the process ends at once.
          asked: is called in the thread when the first signal comes, which is then noted; None
            where the first one ends the process.
        """
        self.signal = 0
        self._kept, self._asked = kept, asked

    def __enter__(self) -> StopSignal:
        read, self._write = os.pipe()
        os.set_blocking(self._write, False)
        self._thread = threading.Thread(target=self._watch, args=(read,), daemon=True)
        self._thread.start()
        self._old_fd = signal.set_wakeup_fd(self._write, warn_on_full_buffer=False)
        self._old = {number: signal.signal(number, self._note) for number in _SIGNALS}
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._old.items():
            signal.signal(number, handler)
        signal.set_wakeup_fd(self._old_fd)
        os.close(self._write)
        self._thread.join()

    def _note(self, number: int, frame: FrameType | None) -> None:
        self.signal = number

    def _watch(self, read: int) -> None:
        asked = self._asked
        while byte := os.read(read, 1):
            if byte[0] not in _SIGNALS:
                continue
            if asked is None:
                self._end(byte[0])
            else:
                asked()
                asked = None
        os.close(read)

    def _end(self, number: int) -> None:
        """End the process without a word to the other threads, which may be in XLA or hold locks of
        the console. Nothing that a run writes is lost or left in part by that."""
        if sys.stdout.isatty():
            os.write(1, _SHOW_CURSOR.encode())
        os.write(2, f"\ninterrupted at once: {self._kept()}\n".encode())
        os._exit(128 + number)


def tokenizers(
    corpus: Corpus,
    cfg: ModelConfig,
    train: TranslationConfig,
    workdir: Path,
    *,
    resumes: bool,
    keep: bool = True,
) -> tuple[Tokenizer, Tokenizer]:
    """The source and target vocabularies of a run: trained on its training text and kept in its
    folder (unless `keep` is false), or those of the run that it resumes. A decoder-only
    model has two alike, trained on both sides."""
    found = []
    for name, size in (("source", cfg.source_vocab), ("target", cfg.target_vocab)):
        path = workdir / f"{name}.model"
        if resumes and path.exists():
            found.append(Tokenizer.load(path))
            continue
        sides = (name,) if cfg.encoder_layers else ("source", "target")
        tokenizer = Tokenizer.train(
            (getattr(pair, side) for side in sides for pair in corpus.train),
            size,
            byte_fallback=train.byte_fallback,
            coverage=train.character_coverage,
            normalization=train.normalization,
            threads=train.vocabulary_threads,
        )
        if keep:
            write_whole(path, tokenizer.model)
        found.append(tokenizer)
    return found[0], found[1]


def plan_step(run: Run, console: Console) -> sbp.Plan:
    """Type, price and plan the training step from shapes alone, and print the report.

    Raises:
      SbpError: when the mesh is larger than the devices, or the step has no typing on it.
    """
    started = time.monotonic()
    plan = plan_train_step(run.model, run.train, make_mesh(run.mesh))
    show_plan(run, plan, console)
    console.print(f"planned in {time.monotonic() - started:.1f} s; compiling ..", highlight=False)
    return plan


def show_plan(run: Run, plan: sbp.Plan, console: Console) -> None:
    """Print the report of the step, what computes in which dtype, and what is not split. What the
    model refuses when it evaluates is refused here, before the first step."""
    params, batch = state_shapes(run.model, run.train).params, batch_shapes(run.model)
    jax.eval_shape(partial(loss_fn, cfg=run.model), params, batch)
    console.print(plan.report().short())
    console.print(f"precision: {run.model.precision}", highlight=False)
    for line in undivided(run):
        console.print(line, highlight=False)
    if (pipeline := run.step_sharding.pipeline) is not None:
        line = f"pipeline: {pipeline.microbatches} microbatches, one after the other"
        if pipeline.stages > 1:
            line += f", in {pipeline.stages} stages; a stage has none in {pipeline.bubble:.0%}"
            line += " of the turns"
        console.print(line, highlight=False)


def plan_heldout(
    run: Run, plan: sbp.Plan, batches: Sequence[Batch]
) -> Callable[[TrainState], float]:
    """Plan the loss of the model on some held-out batches, with its weights where `plan` has
    them."""
    shardings = plan.in_shardings[0].params
    loss = plan_loss(run.model, run.sharding, state_shapes(run.model, run.train).params, shardings)
    return lambda state: loss(state.params, batches)


def fit(
    run: Run,
    plan: sbp.Plan,
    encoded: Encoded,
    checkpoints: Checkpoints,
    console: Console,
    heldout: Callable[[TrainState], float] | None = None,
) -> tuple[TrainState, int]:
    """Initialise or resume, and train, with progress on the console and curves on request.

    Arguments:
      run: the options of the run.
      plan: the step.
      encoded: the training text.
      checkpoints: where the run is kept.
      console: where progress is shown.
      heldout: the loss on held-out text, taken with each checkpoint; None for none.

    Returns:
      The state, which is saved, and the signal that stopped training (0 where none did).

    Raises:
      SbpError: `not-finite` where `max_skipped` steps in a row changed nothing.
    """
    part = None
    if jax.process_count() > 1:
        part = BatchPart.of(plan.in_shardings[1], batch_shapes(run.model, packed=run.train.pack))
    train, say = run.train, partial(console.print, highlight=False, markup=False)
    stop = StopSignal(partial(_last_words, run), partial(say, _ASKED))
    trainer = Trainer(
        model=run.model,
        train=train,
        plan=plan,
        batches=batches(
            encoded,
            run.model,
            train.seed,
            part and part.groups,
            temperature=train.sampling_temperature,
        ),
        checkpoints=checkpoints,
        part=part,
        heldout=heldout,
        say=say,
    )
    state = trainer.begin()
    first = int(state.step)
    curves = TensorBoard(run.workdir, first) if run.tensorboard and is_first() else None
    profiler, display = (
        Profiler(run.profile, run.workdir, first),
        TrainingDisplay(console, first, train.steps),
    )
    with stop, curves or nullcontext(), profiler, display:
        callbacks = [display.update, *([curves.write] if curves else [])]
        return trainer.fit(state, callbacks, stop=lambda: stop.signal, around=profiler.step)


_ASKED = "stops after this step, with a checkpoint; another signal ends the run at once"


def _last_words(run: Run) -> str:
    """What to say of a run that ends at once."""
    return f"{newest_text(run.workdir)}; the same command resumes the run, or begins it again"


def _packed(run: Run, encoded: Encoded, console: Console) -> Encoded:
    """The text as rows of several pairs, where the run asks for them."""
    if not run.train.pack:
        return encoded
    rows = encoded.packed(run.train.seed)
    console.print(
        f"packed into {len(rows.source):,} rows, {rows.filled:.0%} of which are tokens",
        highlight=False,
    )
    return rows


def show_corpus(console: Console, corpus: Corpus, encoded: Encoded) -> None:
    """Say what is trained on, what is held out, and what is neither."""
    sets = ", ".join(f"{len(pairs):,} {name}" for name, pairs in corpus.heldout.items())
    used, what = len(set(encoded.kept)), "texts" if corpus.is_plain else "pairs"
    kind = "texts" if corpus.is_plain else f"sentence pairs in {len(corpus.languages)} languages"
    lines = [
        f"{used:,} {kind} to train on; held out: {sets}",
        *(f"{n:,} {what} are left out: they {why}" for why, n in corpus.discarded.items() if n),
    ]
    if long := len(corpus.train) - used:
        lines.append(f"{long:,} pairs are left out: they are longer than the model's sequences")
    console.print("\n".join(lines), highlight=False, markup=False)


def translator(
    run: Run, plan: sbp.Plan, params: Any, source: Tokenizer, target: Tokenizer
) -> Translator:
    """Greedy decoding on the training mesh, with the parameters where the step has them."""
    shardings = plan.in_shardings[0].params
    search = BeamSearch(cfg=run.model, sharding=run.sharding)
    types = jax.tree.map(lambda sharding: sharding.spec, shardings)
    mesh = jax.tree.leaves(shardings)[0].mesh
    found = plan_search(search, mesh, jax.eval_shape(lambda: params), types)
    return Translator(plan=found, params=params, source=source, target=target, cfg=run.model)


def score(corpus: Corpus, said: Sequence[str | None], vocabulary: Tokenizer) -> Evaluation:
    """Compare translations of the held-out sets with those of each baseline."""
    pairs = corpus.heldout_pairs
    systems = {MODEL: said, **baselines(corpus.train, pairs)}
    return evaluate(corpus.heldout, systems, corpus.languages, vocabulary)


def save_evaluation(result: Evaluation, path: Path) -> None:
    """Write the scores as JSON."""
    text = json.dumps(dataclasses.asdict(result), indent=2, ensure_ascii=False) + "\n"
    write_whole(path, text.encode())


def train(run: Run, console: Console) -> int:
    """Do the whole job; returns the process's exit code (128 + signal when interrupted)."""
    started = time.monotonic()
    if not run.hosts.distributed:  # which has the devices that the hosts have
        simulate_devices(run.devices // run.hosts.processes)
    run.hosts.check()
    if not is_first():
        console = Console(quiet=True, force_terminal=False)
    with StopSignal(partial(_last_words, run)):
        corpus = load(run.train, lambda line: console.print(line, highlight=False, markup=False))
        if corpus.is_plain and run.model.encoder_layers:
            raise SbpError(
                f"{run.train.data} is plain text, which a model with an encoder cannot learn from;"
                " train a decoder-only model (--set encoder_layers=0, with one vocabulary size), or"
                " give pairs: source, target and language code, separated by tabs",
                code="bad-corpus",
            )
        described = describe(run.model, run.train, corpus.digest)
        of_all = {"mesh": run.mesh, "evaluate": run.evaluate}
        heldout = {"digest": pairs_digest(corpus.heldout_pairs)}
        together = {**described, "run": of_all, "heldout": heldout}
        agree("options or text", together, between_processes)
        with Checkpoints(run.workdir, described, TranslationConfig) as checkpoints:
            code, line = _train(run, corpus, checkpoints, console)
    line += f" ({time.monotonic() - started:.0f} s)"
    console.print(line, highlight=False, markup=False)
    return code


def _draw(run: Run) -> None:
    """Draw the curves, in the first process."""
    if is_first():
        write_curves(run.workdir)


def _train(run: Run, corpus: Corpus, checkpoints: Checkpoints, console: Console) -> tuple[int, str]:
    """Train and evaluate; returns the process's exit code and the last line to show."""
    started = time.monotonic()
    resumes = checkpoints.latest is not None
    need_room(run.workdir, state_shapes(run.model, run.train))
    source, target = from_first(
        lambda: tokenizers(corpus, run.model, run.train, run.workdir, resumes=resumes)
    )
    checkpoints.bind("vocabulary", {"source": source.digest, "target": target.digest})
    encoded = encode_pairs(corpus.train, source, target, run.model)
    show_corpus(console, corpus, encoded)
    encoded = _packed(run, encoded, console)
    console.print(
        f"vocabularies of {len(source):,} and {len(target):,} pieces"
        f" ({time.monotonic() - started:.1f} s)",
        highlight=False,
    )
    held = sample(corpus.heldout_pairs, source, target, run.model, run.train.seed)
    if not held:
        console.print("no held-out pair fits the model's sequences: no held-out loss is shown")
    plan = plan_step(run, console)
    heldout = plan_heldout(run, plan, held) if held else None
    try:
        state, stopped = fit(run, plan, encoded, checkpoints, console, heldout)
    except SbpError:
        with suppress(SbpError):  # that of the run is the one to show
            _draw(run)
        raise
    _draw(run)
    if stopped:
        line = f"interrupted: step {int(state.step)} is saved in {run.workdir}; the same command"
        return 128 + stopped, f"{line} resumes"
    then = f"sbp translate --workdir {run.workdir} FILE translates text"
    if corpus.is_plain:
        assert heldout is not None  # any plain text fits the model's sequences
        loss = heldout(state)
        then = f"held-out loss {loss:.3f} per token, perplexity {math.exp(loss):.1f}"
    elif run.evaluate:
        said = translator(run, plan, state.params, source, target)(
            [pair.source for pair in corpus.heldout_pairs]
        )
        if is_first():
            result = score(corpus, said, target)
            save_evaluation(result, run.workdir / "evaluation.json")
            show_evaluation(console, result)
    return 0, f"done; checkpoint in {run.workdir}, curves in {run.workdir / PAGE}; {then}"


def main(argv: Sequence[str]) -> int:
    """The command line of `sbp train`.

    Raises:
      SbpError: what is wrong with the options or stops the run; in several processes only for the
        options.
    """
    run = parse_args(argv)
    with run.hosts.together(show_error):
        return train(run, Console())
