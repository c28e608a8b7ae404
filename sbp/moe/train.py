"""The main job: train the GShard MoE Transformer through the plan executor and measure its
translations.

python -m sbp.moe.train --preset tiny-mt --workdir runs/tiny-mt
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import os
import signal
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn, Protocol

import jax
import numpy as np
from rich.console import Console

import sbp
from sbp.errors import SbpError, nearest
from sbp.moe.checkpoint import Checkpoints, describe
from sbp.moe.config import PRESETS, ModelConfig, TrainConfig, override, preset
from sbp.moe.corpus import Corpus, load
from sbp.moe.counting import CountingTranslator
from sbp.moe.data import Encoded, batches, encode_pairs
from sbp.moe.display import TrainingDisplay, show_evaluation
from sbp.moe.evaluate import Evaluation, evaluate, translate
from sbp.moe.model import Batch, Metrics
from sbp.moe.sharding import Sharding
from sbp.moe.step import TrainState, batch_shapes, init_state, make_train_step
from sbp.moe.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """A training run as the command line asks for it."""

    model: ModelConfig
    train: TrainConfig
    mesh: tuple[tuple[str, int], ...]
    workdir: Path
    tensorboard: bool
    evaluate: bool


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise SbpError(f"{message}; see --help", code="unknown-option")


def _parser() -> _Parser:
    parser = _Parser(
        prog="python -m sbp.moe.train",
        description=(__doc__ or "").splitlines()[0],
        allow_abbrev=False,
    )
    parser.add_argument(
        "--preset", default="tiny-mt", help=f"one of {', '.join(PRESETS)} (default tiny-mt)"
    )
    parser.add_argument("--steps", help="optimiser steps in all")
    parser.add_argument("--languages", help="languages of the embedded corpus, at most 100")
    parser.add_argument("--seed", help="seed of parameters, dropout, routing and data order")
    parser.add_argument(
        "--data", help="your own parallel text: UTF-8, source <tab> target <tab> language per line"
    )
    parser.add_argument(
        "--workdir",
        help="folder of the run (default runs/<preset>); an interrupted run resumes there",
    )
    parser.add_argument("--mesh", help="axes and sizes, outer first, such as data=2,expert=4")
    parser.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="NAME=VALUE",
        help="any field of the model or training configuration",
    )
    parser.add_argument(
        "--tensorboard", action="store_true", help="also write TensorBoard curves to <workdir>/log"
    )
    parser.add_argument("--no-eval", action="store_true", help="skip the evaluation at the end")
    return parser


def parse_args(argv: Sequence[str]) -> Run:
    """Read the command line.

    Raises:
      SbpError: `unknown-option`, for a preset, option or value that does not exist, with the
          nearest name.
    """
    parser = _parser()
    args, unknown = parser.parse_known_args(argv)
    if unknown:
        known = [option for action in parser._actions for option in action.option_strings]
        raise SbpError(
            f"no option {unknown[0]!r}{nearest(unknown[0].split('=')[0], known)}",
            code="unknown-option",
        )
    chosen = preset(args.preset)
    model_fields = {f.name for f in dataclasses.fields(ModelConfig)}
    train_fields = {f.name for f in dataclasses.fields(TrainConfig)}
    options: dict[str, str] = {}
    for text in args.set:
        name, equals, value = text.partition("=")
        if not equals or name not in model_fields | train_fields:
            hint = nearest(name, model_fields | train_fields) if equals else "; write NAME=VALUE"
            raise SbpError(f"no option {text!r}{hint}", code="unknown-option")
        options[name] = value
    options |= {
        name: value
        for name in ("steps", "languages", "seed", "data")
        if (value := getattr(args, name)) is not None
    }
    return Run(
        model=override(chosen.model, {k: v for k, v in options.items() if k in model_fields}),
        train=override(chosen.train, {k: v for k, v in options.items() if k in train_fields}),
        mesh=parse_mesh(args.mesh) if args.mesh else chosen.mesh,
        workdir=Path(args.workdir or f"runs/{args.preset}"),
        tensorboard=args.tensorboard,
        evaluate=not args.no_eval,
    )


def parse_mesh(text: str) -> tuple[tuple[str, int], ...]:
    """Read `data=2,expert=4`.

    Raises:
      SbpError: `unknown-option` for a text of another form or axes other than data and expert.
    """
    axes = []
    for part in text.split(","):
        name, _, size = part.partition("=")
        if not size.isdecimal() or int(size) < 1 or name in dict(axes):
            raise SbpError(
                f"mesh {text!r} is not of the form data=2,expert=4", code="unknown-option"
            )
        if name not in ("data", "expert"):
            raise SbpError(
                f"no mesh axis {name!r} in this program{nearest(name, ('data', 'expert'))}",
                code="unknown-axis",
            )
        axes.append((name, int(size)))
    return tuple(axes)


def sharding_of(mesh: Sequence[tuple[str, int]]) -> Sharding:
    """Groups on every axis, experts on `expert` where the mesh has it."""
    names = tuple(name for name, _ in mesh)
    return Sharding.over(names, [name for name in names if name == "expert"])


def simulate_devices(count: int) -> None:
    """Ask XLA for `count` simulated host devices; it listens only before the first use of any
    device."""
    flags = os.environ.get("XLA_FLAGS", "")
    if "xla_force_host_platform_device_count" not in flags:
        os.environ["XLA_FLAGS"] = f"{flags} --xla_force_host_platform_device_count={count}".strip()


def make_mesh(axes: Sequence[tuple[str, int]]) -> jax.sharding.Mesh:
    """A mesh of the devices present, or of simulated host devices where those are too few.

    Raises:
      SbpError: `mesh-devices` when both are too few.
    """
    names, sizes = zip(*axes, strict=True)
    need = math.prod(sizes)
    host = jax.devices("cpu")
    if len(jax.devices()) < need <= len(host):
        jax.config.update("jax_default_device", host[0])
        return jax.sharding.Mesh(np.asarray(host[:need]).reshape(sizes), names)
    return sbp.make_mesh(sizes, names)


def tokenizers(corpus: Corpus, cfg: ModelConfig, workdir: Path) -> tuple[Tokenizer, Tokenizer]:
    """The source and target vocabularies of a run, trained on its training text the first time."""
    found = []
    for name, size in (("source", cfg.source_vocab), ("target", cfg.target_vocab)):
        path = workdir / f"{name}.model"
        if path.exists():
            found.append(Tokenizer.load(path))
            continue
        tokenizer = Tokenizer.train((getattr(pair, name) for pair in corpus.train), size)
        tokenizer.save(path)
        found.append(tokenizer)
    return found[0], found[1]


class StepPlan(Protocol):
    """What training needs of a plan: call it, and ask where its arguments live. An `sbp.Plan` is
    one."""

    @property
    def in_shardings(self) -> Any: ...

    def __call__(self, state: TrainState, batch: Batch, /) -> tuple[TrainState, Metrics]: ...


def plan_step(run: Run, console: Console) -> StepPlan:
    """Type, price and plan the training step from shapes alone, and print the report.

    Raises:
      SbpError: when the mesh is larger than the devices, or the step has no typing on it.
    """
    started = time.monotonic()
    mesh = make_mesh(run.mesh)
    step = sbp.jit(
        make_train_step(run.model, run.train, sharding_of(run.mesh)), mesh, donate_argnums=(0,)
    )
    plan = step.plan(state_shapes(run), batch_shapes(run.model))
    console.print(plan.report().short())
    console.print(f"planned in {time.monotonic() - started:.1f} s; compiling ..", highlight=False)
    return plan


def state_shapes(run: Run) -> TrainState:
    """Shapes of the run's state."""
    return jax.eval_shape(lambda: init_state(run.model, run.train))


def fit(
    run: Run, plan: StepPlan, encoded: Encoded, checkpoints: Checkpoints, console: Console
) -> tuple[TrainState, int]:
    """Initialise or resume, and train.

    Arguments:
      run: the options of the run.
      plan: the step.
      encoded: the training text.
      checkpoints: where the run is kept.
      console: where progress is shown.

    Returns:
      The state, and the signal that stopped training (0 when it ran to the end); a checkpoint of
      the state is saved.
    """
    data = batches(encoded, run.model, run.train.seed)
    shardings = plan.in_shardings[0]
    if checkpoints.latest is None:
        state = jax.jit(lambda: init_state(run.model, run.train), out_shardings=shardings)()
    else:
        state, where = checkpoints.restore(state_shapes(run), shardings)
        data.set_state(where)
        console.print(f"resumed at step {int(state.step)}", highlight=False)

    writer = _tensorboard(run)
    stop = _StopSignal()
    first = int(state.step)
    with stop, TrainingDisplay(console, first, run.train.steps) as display:
        for step in range(first + 1, run.train.steps + 1):
            state, metrics = plan(state, next(data))
            values = display.update(step, jax.device_get(metrics))
            if writer:
                for name, value in values.items():
                    writer.add_scalar(name, value, step)
            if step % run.train.checkpoint_every == 0 or step == run.train.steps or stop.signal:
                checkpoints.save(state, data.get_state())
            if stop.signal:
                break
    if writer:
        writer.close()
    return state, stop.signal


class _StopSignal:
    """While active, SIGINT and SIGTERM are noted instead of ending the process, so that the step
    can be saved."""

    def __init__(self) -> None:
        self.signal = 0

    def _note(self, number: int, frame: FrameType | None) -> None:
        self.signal = number

    def __enter__(self) -> None:
        self._old = {
            number: signal.signal(number, self._note) for number in (signal.SIGINT, signal.SIGTERM)
        }

    def __exit__(self, *_: object) -> None:
        for number, handler in self._old.items():
            signal.signal(number, handler)


def _tensorboard(run: Run) -> Any:
    if not run.tensorboard:
        return None
    from tensorboardX import SummaryWriter

    return SummaryWriter(str(run.workdir / "log"))


def save_evaluation(result: Evaluation, path: Path) -> None:
    """Write the scores as JSON."""
    path.write_text(
        json.dumps(dataclasses.asdict(result), indent=2, ensure_ascii=False) + "\n", "utf-8"
    )


def train(run: Run, console: Console) -> int:
    """Do the whole job; returns the process's exit code (128 + signal when interrupted)."""
    started = time.monotonic()
    simulate_devices(math.prod(size for _, size in run.mesh))
    corpus = load(run.train)
    checkpoints = Checkpoints(run.workdir, describe(run.model, run.train, corpus))
    source, target = tokenizers(corpus, run.model, run.workdir)
    encoded = encode_pairs(corpus.train, source, target, run.model)
    console.print(
        f"{len(encoded.kept):,} sentence pairs in {len(corpus.languages)} languages,"
        f" {len(corpus.heldout):,} held out; vocabularies of {len(source):,} and {len(target):,}"
        f" pieces ({time.monotonic() - started:.1f} s)",
        highlight=False,
    )
    plan = plan_step(run, console)
    state, stopped = fit(run, plan, encoded, checkpoints, console)
    checkpoints.close()
    if stopped:
        console.print(
            f"interrupted: step {int(state.step)} is saved in {run.workdir}; the same command"
            " resumes",
            highlight=False,
        )
        return 128 + stopped
    if run.evaluate:
        params = jax.device_get(state.params)
        pairs, texts = translate(params, corpus.heldout, source, target, run.model)
        counting = CountingTranslator.learn(corpus.train, names=True)
        counted = [counting.translate(pair) for pair in pairs]
        left_out = len(corpus.heldout) - len(pairs)
        result = evaluate(pairs, texts, counted, corpus.languages, left_out)
        show_evaluation(console, result)
        save_evaluation(result, run.workdir / "evaluation.json")
    console.print(
        f"done in {time.monotonic() - started:.0f} s; checkpoint in {run.workdir}", highlight=False
    )
    return 0


def main(argv: Sequence[str] | None = None) -> int:
    """The command line; user errors are printed without a traceback and exit with 2."""
    try:
        return train(parse_args(sys.argv[1:] if argv is None else argv), Console())
    except SbpError as error:
        Console(stderr=True).print(
            f"error[{error.code}]: {error.message}", markup=False, highlight=False, soft_wrap=True
        )
        return 2


if __name__ == "__main__":
    sys.exit(main())
