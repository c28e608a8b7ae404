"""Checkpoints of a run: state, place in the data, and the configuration they belong to."""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

import jax
import orbax.checkpoint as ocp

from sbp.errors import SbpError
from sbp.moe.config import ModelConfig, TrainConfig
from sbp.moe.corpus import Corpus
from sbp.moe.fingerprint import fingerprints
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


def text_digest(corpus: Corpus) -> str:
    """Tells training text from other text, as another version of the library that renders the
    embedded corpus makes it."""
    digest = hashlib.blake2b(digest_size=8)
    for pair in corpus.train:
        digest.update(f"{pair.source}\t{pair.target}\t{pair.language}\n".encode())
    return digest.hexdigest()


def describe(model: ModelConfig, train: TrainConfig, corpus: Corpus) -> dict[str, Any]:
    """What a checkpoint is bound to, as JSON: the configuration and a digest of the training text.

    The section `free` has the options that it is not bound to. The mesh is absent on purpose:
    results do not depend on it, and a run may resume on another one.
    """
    free = set(_FREE)
    if train.schedule in ("linear", "cosine"):  # they end at the last step
        free -= {"steps"}
    every = asdict(train)
    options = {k: v for k, v in every.items() if k not in free}
    return {
        "model": asdict(model),
        "train": options,
        "corpus": {"digest": text_digest(corpus)},
        "free": {k: v for k, v in every.items() if k in free},
    }


def differences(saved: Mapping[str, Any], wanted: Mapping[str, Any]) -> list[str]:
    """One line per option that differs, in the order of the sections."""
    lines = []
    for section, kind in (("model", ModelConfig), ("train", TrainConfig), ("corpus", None)):
        # A run of before an option was there has its default.
        default = {f.name: f.default for f in fields(kind)} if kind else {}
        old, new = saved.get(section, {}), wanted[section]
        for name in sorted({*old, *new}):
            if name in _FREE and not (name in old and name in new):
                continue  # one of the two is not bound to it
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


_SECTIONS = ("model", "train", "corpus")


def _saved(sidecar: Path) -> dict[str, Any]:
    """The configuration in a file.

    Raises:
      SbpError: `bad-checkpoint` for a file that is none.
    """
    try:
        saved = json.loads(sidecar.read_text("utf-8"))
        if not all(isinstance(saved[name], dict) for name in _SECTIONS):
            raise ValueError(sidecar)
    except (OSError, ValueError, KeyError, TypeError):
        raise SbpError(
            f"{sidecar} is not the configuration of a run; choose another --workdir",
            code="bad-checkpoint",
        ) from None
    return saved


def _digest(run: Mapping[str, Any]) -> str:
    text = json.dumps(run, sort_keys=True)
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()


def run_of(checkpoint: Path) -> dict[str, Any] | None:
    """What a checkpoint says that it belongs to; None where it does not, or is damaged there."""
    try:
        saved = json.loads((checkpoint / "run" / "metadata").read_text("utf-8"))
        whole = saved["digest"] == _digest(saved["run"])
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return saved["run"] if whole else None


def saved_steps(folder: Path) -> list[int]:
    """Steps that have a checkpoint in a folder, newest first."""
    if not folder.is_dir():
        return []
    names = (path.name for path in folder.iterdir())
    return sorted((int(name) for name in names if name.isdecimal()), reverse=True)


def kept(workdir: Path) -> str:
    """Which checkpoint a run in a folder has where it ends now, in words."""
    steps = saved_steps(workdir / "checkpoints")
    return f"the checkpoint of step {steps[0]} is kept" if steps else "no checkpoint is there yet"


def bound(workdir: Path) -> dict[str, Any]:
    """The configuration that the checkpoints of a run belong to: of the newest that can be read,
    else of the folder.

    Raises:
      SbpError: `bad-checkpoint` where none can be read.
    """
    for step in saved_steps(workdir / "checkpoints"):
        if run := run_of(workdir / "checkpoints" / str(step)):
            return run
    return _saved(workdir / "config.json")


class Checkpoints:
    """The checkpoints in one folder; the newest two are kept, each written whole or not at all.

    From opening to `close`, no other run can open the folder. A checkpoint has in itself what it
    belongs to (model, options, text, vocabularies) and a checksum of each array.
    """

    def __init__(self, workdir: Path, description: Mapping[str, Any]) -> None:
        """Open the folder of a run, new or old.

        Raises:
          SbpError: `bad-checkpoint` when it holds checkpoints of another configuration, another run
              is in it, or it cannot be written.
        """
        self._lock: int | None = _usable(workdir)
        self._workdir, self._description = workdir, dict(description)
        self._folder = workdir / "checkpoints"
        try:
            self._open()
        except BaseException:
            os.close(self._lock)
            raise

    def __enter__(self) -> Checkpoints:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _open(self) -> None:
        if saved_steps(self._folder) and (
            lines := differences(bound(self._workdir), self._description)
        ):
            raise SbpError(
                f"{self._workdir} holds a run of another configuration; choose another --workdir,"
                " or move this one away:",
                code="bad-checkpoint",
                details=lines,
            )
        try:
            self._manager = ocp.CheckpointManager(
                self._folder.absolute(),
                options=ocp.CheckpointManagerOptions(
                    max_to_keep=2, create=True, enable_async_checkpointing=False
                ),
            )
        except OSError as error:
            raise SbpError(
                f"cannot write to {self._folder}: {error.strerror}; choose another --workdir",
                code="bad-checkpoint",
            ) from None

    def bind(self, name: str, content: Mapping[str, str]) -> None:
        """Add what the checkpoints of this run belong to besides: digests by name.

        Raises:
          SbpError: `bad-checkpoint` where those that are here belong to something else.
        """
        if saved_steps(self._folder) and (old := bound(self._workdir).get(name)) and old != content:
            other = [key for key in content if old.get(key) != content[key]]
            raise SbpError(
                f"the {name} {' and '.join(other)} in {self._workdir} is not that of its"
                " checkpoints; put the file of the run back, or choose another --workdir",
                code="bad-checkpoint",
            )
        self._description[name] = dict(content)

    @property
    def latest(self) -> int | None:
        """Step of the newest checkpoint, None when there is none."""
        return self._manager.latest_step()

    def save(self, state: TrainState, iterator_state: Mapping[str, Any]) -> None:
        """Write a checkpoint of `state` at its own step, unless it is there.

        Raises:
          SbpError: `bad-checkpoint` where it cannot be written, as on a full disk. The checkpoints
            before it are kept.
        """
        step = int(state.step)
        if step == self.latest:
            return
        data = dict(iterator_state)
        run = {**self._description, "checksums": fingerprints(state), "data": data}
        try:
            if self.latest is None:
                text = json.dumps(self._description, indent=2, sort_keys=True) + "\n"
                write_whole(self._workdir / "config.json", text.encode())
            self._manager.save(
                step,
                args=ocp.args.Composite(
                    state=ocp.args.StandardSave(state),
                    data=ocp.args.JsonSave(data),
                    run=ocp.args.JsonSave({"run": run, "digest": _digest(run)}),
                ),
            )
        except (OSError, ValueError) as error:  # tensorstore's errors are ValueErrors
            why = str(error).splitlines()[0]
            raise SbpError(
                f"cannot write the checkpoint of step {step} to {self._folder}: {why};"
                f" {kept(self._workdir)}",
                code="bad-checkpoint",
            ) from None

    def restore(
        self, shapes: TrainState, shardings: Any, say: Callable[[str], None] = print
    ) -> tuple[TrainState, dict[str, Any]]:
        """Read the newest checkpoint that is whole, each leaf straight to its sharding. One that is
        damaged is moved to `damaged-<step>` in the folder of the run.

        Arguments:
          shapes: the state as ShapeDtypeStructs.
          shardings: a tree like it, for this run's mesh, whatever mesh wrote the checkpoint.
          say: is called with a line about each checkpoint that is damaged or cannot be verified.

        Returns:
          The state and the state of the data iterator.

        Raises:
          SbpError: `bad-checkpoint` where every one is damaged; then none is moved.
        """
        target = jax.tree.map(
            lambda leaf, sharding: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding),
            shapes,
            shardings,
        )
        damaged: list[str] = []
        for step in saved_steps(self._folder):
            try:
                found = self._read(step, target, say)
            except _DamagedError as error:
                damaged.append(f"the checkpoint of step {step} is damaged: {error}")
                continue
            for line in damaged:
                say(f"{line}; that of step {step} is used")
            self._set_aside([s for s in saved_steps(self._folder) if s > step])
            return found
        raise SbpError(
            f"no checkpoint in {self._folder} can be read; choose another --workdir:",
            code="bad-checkpoint",
            details=damaged,
        )

    def _read(
        self, step: int, target: TrainState, say: Callable[[str], None]
    ) -> tuple[TrainState, dict[str, Any]]:
        checkpoint = self._folder / str(step)
        run = run_of(checkpoint)
        if run is None and (checkpoint / "run").exists():
            raise _DamagedError("what it belongs to cannot be read")
        if run is None:
            say(f"the checkpoint of step {step} has no checksums, so it is not verified")
        try:
            read = self._manager.restore(
                step,
                args=ocp.args.Composite(
                    state=ocp.args.StandardRestore(target), data=ocp.args.JsonRestore()
                ),
            )
            state, data = read["state"], dict(read["data"])
        except Exception as error:  # whatever the libraries raise over damaged files
            why = str(error).strip().splitlines() or [type(error).__name__]
            raise _DamagedError(why[0]) from None
        if run is not None:
            sums, found = run["checksums"], fingerprints(state)
            if wrong := [path for path, digits in found.items() if sums.get(path) != digits]:
                raise _DamagedError(f"the content of {wrong[0]} has changed")
            data = run["data"]
        return state, data

    def _set_aside(self, steps: Sequence[int]) -> None:
        """Move checkpoints out of the way of those that will be written."""
        for step in steps:
            aside = self._workdir / f"damaged-{step}"
            if aside.exists():
                shutil.rmtree(aside)
            (self._folder / str(step)).rename(aside)
        if steps:
            self._manager.reload()

    def close(self) -> None:
        """Release the folder; twice does nothing more."""
        if self._lock is not None:
            self._manager.close()
            os.close(self._lock)
            self._lock = None


class _DamagedError(Exception):
    """A checkpoint that cannot be read, or is not what was written."""
