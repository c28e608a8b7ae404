"""The command `sbp check`: whether a training run would begin, without training it.

sbp check --preset tiny-mt --mesh data=4,model=2
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from jax.sharding import AbstractMesh
from rich.console import Console

from examples.gshard.config import TranslationConfig
from examples.gshard.data import encode_pairs
from examples.gshard.machine import need_room
from examples.gshard.options import Run, parse_args
from examples.gshard.sources import load
from examples.gshard.train import show_corpus, show_plan, tokenizers
from sbp.errors import SbpError
from sbp.moe.checkpoint import (
    describe,
    same_content,
    same_run,
    saved_steps,
    take_lock,
    writing,
)
from sbp.moe.step import plan_train_step, state_shapes

_ABOUT = (
    "Tell whether sbp train would begin with the same options, and the types of its step. Nothing"
    " is trained or written, and no device is used."
)


def _folder(workdir: Path) -> Path:
    """The nearest folder above a run that is there.

    Raises:
      SbpError: `bad-checkpoint` where the run cannot be written there, or another one is training.
    """
    place = workdir.absolute()
    while not place.exists():
        place = place.parent
    if not place.is_dir() or not os.access(place, os.W_OK | os.X_OK):
        why = "is not writable" if place.is_dir() else "is a file"
        raise SbpError(
            f"cannot write to {workdir}: {place} {why}; choose another --workdir",
            code="bad-checkpoint",
        )
    lock = workdir / ".lock"
    if lock.exists():
        with lock.open("rb") as held:
            take_lock(held.fileno(), workdir, shared=True)
    return place


def check(run: Run, console: Console) -> None:
    """Do what training does before its first step, but on an abstract mesh, and write nothing.

    Arguments:
      run: the options of the run.
      console: where the text, the vocabularies and the report of the step are shown.

    Raises:
      SbpError: what `sbp train` would raise before its first step, but for too few devices.
    """
    with writing(run.workdir):
        place = _folder(run.workdir)
    corpus = load(run.train, lambda line: console.print(line, highlight=False, markup=False))
    same_run(run.workdir, describe(run.model, run.train, corpus.digest), TranslationConfig)
    need_room(place, state_shapes(run.model, run.train))
    resumes = bool(saved_steps(run.workdir / "checkpoints"))
    source, target = tokenizers(
        corpus, run.model, run.train, run.workdir, resumes=resumes, keep=False
    )
    same_content(run.workdir, "vocabulary", {"source": source.digest, "target": target.digest})
    show_corpus(console, corpus, encode_pairs(corpus.train, source, target, run.model))
    console.print(f"vocabularies of {len(source):,} and {len(target):,} pieces", highlight=False)
    names, sizes = zip(*run.mesh, strict=True)
    show_plan(run, plan_train_step(run.model, run.train, AbstractMesh(sizes, names)), console)


def main(argv: Sequence[str]) -> int:
    """The command line, with the options of `sbp train`.

    Raises:
      SbpError: where training would be refused.
    """
    run, console = parse_args(argv, program="sbp check", description=_ABOUT), Console()
    check(run, console)
    console.print(f"sbp train would begin in {run.workdir}", highlight=False, markup=False)
    return 0
