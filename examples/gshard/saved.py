"""The folder of a training run as others read it: nothing in it is changed or locked."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax

from examples.gshard.config import TranslationConfig
from examples.gshard.tokenizer import Tokenizer
from sbp.errors import SbpError, nearest
from sbp.moe.checkpoint import bound, read_params, saved_steps
from sbp.moe.config import ModelConfig
from sbp.moe.devices import need_x64
from sbp.moe.model import init_params

Tree = Any


@dataclass(frozen=True, slots=True, kw_only=True)
class SavedRun:
    """A training run with a checkpoint.

    Attributes:
      workdir: its folder.
      model: the model.
      train: how it was trained.
      corpus: the digest of the training text.
      source, target: the vocabularies.
    """

    workdir: Path
    model: ModelConfig
    train: TranslationConfig
    corpus: str
    source: Tokenizer
    target: Tokenizer

    @property
    def shapes(self) -> Tree:
        """Shapes of the parameters."""
        return jax.eval_shape(lambda: init_params(jax.random.key(0), self.model))

    def params(self, shardings: Tree, say: Callable[[str], None]) -> Tree:
        """The parameters of the newest checkpoint that is whole, each leaf straight to its
        sharding.

        Arguments:
          shardings: a tree like the parameters.
          say: is called with a line about each checkpoint that is damaged or cannot be verified.

        Raises:
          SbpError: `bad-checkpoint` where every one is damaged.
        """
        return read_params(self.workdir, self.shapes, shardings, say)


def open_run(workdir: Path) -> SavedRun:
    """A run from what its checkpoints say that they belong to.

    Raises:
      SbpError: `bad-checkpoint` where the folder has no checkpoint, or its configuration or
        vocabularies cannot be read; `unknown-option` for a model in float64 without x64.
    """
    if not saved_steps(workdir / "checkpoints"):
        others = workdir.parent.iterdir() if workdir.parent.is_dir() else ()
        known = [str(path) for path in others if saved_steps(path / "checkpoints")]
        hint = nearest(str(workdir), sorted(known)).rstrip("?") if known else ""
        raise SbpError(
            f"no checkpoint in {workdir}{hint}. Name the --workdir of a training run, or train one"
            " there (sbp train)",
            code="bad-checkpoint",
        )
    run = bound(workdir)
    try:
        model = ModelConfig(**run["model"])
        train = TranslationConfig(**{**run["train"], **run.get("free", {})})
    except (TypeError, SbpError) as error:
        raise SbpError(
            f"{workdir} holds a run that this version of sbp does not know: {error}",
            code="bad-checkpoint",
        ) from None
    need_x64(model.dtype)
    return SavedRun(
        workdir=workdir,
        model=model,
        train=train,
        corpus=run["corpus"].get("digest", ""),
        source=_vocabulary(workdir, "source", run),
        target=_vocabulary(workdir, "target", run),
    )


def _vocabulary(workdir: Path, side: str, run: Mapping[str, Any]) -> Tokenizer:
    path = workdir / f"{side}.model"
    if not path.exists():
        raise SbpError(
            f"{path} is missing; put the file of the run back, or name another --workdir",
            code="bad-checkpoint",
        )
    found = Tokenizer.load(path)
    if run.get("vocabulary", {}).get(side, found.digest) != found.digest:
        raise SbpError(
            f"{path} is not the vocabulary of the checkpoints beside it; put the file of the run"
            " back, or name another --workdir",
            code="bad-checkpoint",
        )
    return found
