"""The folder of a training run as others read it: nothing in it is changed or locked."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import orbax.checkpoint as ocp

from sbp.errors import SbpError, nearest
from sbp.moe.binding import bound, run_of, saved_steps
from sbp.moe.checkpoint import UNREADABLE, quiet
from sbp.moe.config import ModelConfig, TrainConfig
from sbp.moe.devices import need_x64
from sbp.moe.fingerprint import fingerprints
from sbp.moe.model import init_params
from sbp.moe.step import TrainState
from sbp.moe.tokenizer import Tokenizer

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
    train: TrainConfig
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
        target = jax.tree.map(
            lambda leaf, place: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=place),
            self.shapes,
            shardings,
        )
        folder, damaged = self.workdir / "checkpoints", []
        for step in saved_steps(folder):
            params, fault = _read(folder / str(step), target, say)
            if not fault:
                for line in damaged:
                    say(f"{line}; that of step {step} is used")
                return params
            damaged.append(f"the checkpoint of step {step} is damaged: {fault}")
        raise SbpError(
            f"no checkpoint in {folder} can be read; name another --workdir:",
            code="bad-checkpoint",
            details=damaged,
        )


def _read(checkpoint: Path, target: Tree, say: Callable[[str], None]) -> tuple[Tree, str]:
    """Parameters in a checkpoint, and what is wrong with them; "" where they are what was saved."""
    run, item = run_of(checkpoint), {"params": target}
    if run is None and (checkpoint / "run").exists():
        return None, "what it belongs to cannot be read"
    quiet()
    try:
        with ocp.Checkpointer(ocp.PyTreeCheckpointHandler()) as reader:
            params = reader.restore(
                (checkpoint / "state").absolute(),
                args=ocp.args.PyTreeRestore(
                    item=item,
                    restore_args=ocp.checkpoint_utils.construct_restore_args(item),
                    partial_restore=True,
                ),
            )["params"]
    except Exception:  # whatever the libraries raise over damaged files
        return None, UNREADABLE
    if run is None:
        say(f"the checkpoint {checkpoint.name} has no checksums, so it is not verified")
        return params, ""
    sums = fingerprints(TrainState(None, params, None))
    wrong = [path for path, digits in sums.items() if run["checksums"].get(path) != digits]
    return params, f"the content of {wrong[0]} has changed" if wrong else ""


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
        train = TrainConfig(**{**run["train"], **run.get("free", {})})
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
