"""Checkpoints of a run: state, place in the data, and the configuration they belong to."""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
from collections.abc import Mapping
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

import jax
import orbax.checkpoint as ocp

from sbp.errors import SbpError
from sbp.moe.config import ModelConfig, TrainConfig
from sbp.moe.corpus import Corpus
from sbp.moe.step import TrainState

_FREE = (
    "steps",
    "checkpoint_every",
    "heldout_per_language",
    "data",
    "eval_data",
    "max_skipped",
    "zero",
    "sequence_parallel",
)
"""Options of a run that a resumed one may change: they alter neither the state nor what comes next,
but where it lies."""


def describe(model: ModelConfig, train: TrainConfig, corpus: Corpus) -> dict[str, Any]:
    """What a checkpoint is bound to, as JSON: the configuration and a digest of the training text.

    The digest also catches another version of the library that renders the embedded corpus. The
    mesh is absent on purpose: results do not depend on it, and a run may resume on another one.
    """
    digest = hashlib.blake2b(digest_size=8)
    for pair in corpus.train:
        digest.update(f"{pair.source}\t{pair.target}\t{pair.language}\n".encode())
    free = set(_FREE)
    if train.schedule in ("linear", "cosine"):  # they end at the last step
        free -= {"steps"}
    options = {k: v for k, v in asdict(train).items() if k not in free}
    return {"model": asdict(model), "train": options, "corpus": {"digest": digest.hexdigest()}}


def differences(saved: Mapping[str, Any], wanted: Mapping[str, Any]) -> list[str]:
    """One line per option that differs, in the order of the sections."""
    lines = []
    for section, kind in (("model", ModelConfig), ("train", TrainConfig), ("corpus", None)):
        # A run of before an option was there has its default.
        default = {f.name: f.default for f in fields(kind)} if kind else {}
        old, new = saved.get(section, {}), wanted[section]
        for name in sorted({*old, *new}):
            before = old.get(name, default.get(name))
            if before != new.get(name):
                lines.append(f"{section}.{name}: checkpoint {before!r}, now {new.get(name)!r}")
    return lines


def write_whole(path: Path, content: bytes) -> None:
    """Write a file so that it is never seen in part, also where the process is killed."""
    part = path.with_name(f"{path.name}.part")
    part.write_bytes(content)
    part.replace(path)


def _usable(workdir: Path) -> int:
    """Make the folder of a run and take its lock, which ends with the process.

    Returns:
      The descriptor that holds the lock.

    Raises:
      SbpError: `bad-checkpoint` where the folder cannot be written, or another run is in it.
    """
    try:
        workdir.mkdir(parents=True, exist_ok=True)
        held = os.open(workdir / ".lock", os.O_RDWR | os.O_CREAT, 0o644)
    except OSError as error:
        raise SbpError(
            f"cannot write to {workdir}: {error.strerror}; choose another --workdir",
            code="bad-checkpoint",
        ) from None
    try:
        fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(held)
        raise SbpError(
            f"another run is training in {workdir}; wait for it, or choose another --workdir",
            code="bad-checkpoint",
        ) from None
    return held


def _saved(sidecar: Path) -> dict[str, Any]:
    """The configuration that a folder's checkpoints belong to.

    Raises:
      SbpError: `bad-checkpoint` for a file that is none.
    """
    try:
        saved = json.loads(sidecar.read_text("utf-8"))
        if not all(isinstance(saved[name], dict) for name in ("model", "train", "corpus")):
            raise ValueError(sidecar)
    except (OSError, ValueError, KeyError, TypeError):
        raise SbpError(
            f"{sidecar} is not the configuration of a run; choose another --workdir",
            code="bad-checkpoint",
        ) from None
    return saved


class Checkpoints:
    """The checkpoints in one folder; the newest two are kept, each written whole or not at all.

    From opening to `close`, no other run can open the folder. The first checkpoint binds the folder
    to its configuration.
    """

    def __init__(self, workdir: Path, description: Mapping[str, Any]) -> None:
        """Open the folder of a run, new or old.

        Raises:
          SbpError: `bad-checkpoint` when it holds checkpoints of another configuration, another run
              is in it, or it cannot be written.
        """
        self._lock: int | None = _usable(workdir)
        self._sidecar, self._description = workdir / "config.json", description
        try:
            self._open(workdir / "checkpoints")
        except BaseException:
            os.close(self._lock)
            raise

    def __enter__(self) -> Checkpoints:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _open(self, folder: Path) -> None:
        started = folder.is_dir() and any(path.name.isdecimal() for path in folder.iterdir())
        if started and (lines := differences(_saved(self._sidecar), self._description)):
            raise SbpError(
                f"{folder.parent} holds a run of another configuration; choose another --workdir,"
                " or move this one away:",
                code="bad-checkpoint",
                details=lines,
            )
        try:
            self._manager = ocp.CheckpointManager(
                folder.absolute(),
                options=ocp.CheckpointManagerOptions(
                    max_to_keep=2, create=True, enable_async_checkpointing=False
                ),
            )
        except OSError as error:
            raise SbpError(
                f"cannot write to {folder}: {error.strerror}; choose another --workdir",
                code="bad-checkpoint",
            ) from None

    @property
    def latest(self) -> int | None:
        """Step of the newest checkpoint, None when there is none."""
        return self._manager.latest_step()

    def save(self, state: TrainState, iterator_state: Mapping[str, Any]) -> None:
        """Write a checkpoint of `state` at its own step, unless it is there."""
        step = int(state.step)
        if step == self.latest:
            return
        if self.latest is None:
            text = json.dumps(self._description, indent=2, sort_keys=True) + "\n"
            write_whole(self._sidecar, text.encode())
        self._manager.save(
            step,
            args=ocp.args.Composite(
                state=ocp.args.StandardSave(state), data=ocp.args.JsonSave(dict(iterator_state))
            ),
        )

    def restore(self, shapes: TrainState, shardings: Any) -> tuple[TrainState, dict[str, Any]]:
        """Read the newest checkpoint, each leaf straight to its sharding.

        Arguments:
          shapes: the state as ShapeDtypeStructs.
          shardings: a tree like it, for this run's mesh, whatever mesh wrote the checkpoint.

        Returns:
          The state and the state of the data iterator.
        """
        target = jax.tree.map(
            lambda leaf, sharding: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding),
            shapes,
            shardings,
        )
        read = self._manager.restore(
            self.latest,
            args=ocp.args.Composite(
                state=ocp.args.StandardRestore(target), data=ocp.args.JsonRestore()
            ),
        )
        return read["state"], read["data"]

    def close(self) -> None:
        """Release the folder; twice does nothing more."""
        if self._lock is not None:
            self._manager.close()
            os.close(self._lock)
            self._lock = None
