"""Checkpoints of a run: state, place in the data, and what they belong to."""

from __future__ import annotations

import fcntl
import functools
import json
import logging
import os
import shutil
import sys
import traceback
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import jax
import orbax.checkpoint as ocp

from sbp.errors import SbpError
from sbp.moe.binding import (
    digest_of,
    kept,
    run_of,
    same_content,
    same_run,
    saved_steps,
    write_whole,
    writing,
)
from sbp.moe.fingerprint import fingerprints
from sbp.moe.hosts import from_first, gathered, is_first, share_folder
from sbp.moe.step import TrainState


def _usable(workdir: Path) -> int:
    """Make the folder of a run and take its lock, which ends with the process.

    Returns:
      The descriptor that holds the lock.

    Raises:
      SbpError: `bad-checkpoint` where the folder cannot be written, or another run is in it.
    """
    with writing(workdir):
        workdir.mkdir(parents=True, exist_ok=True)
        held = os.open(workdir / ".lock", os.O_RDWR | os.O_CREAT, 0o644)
    try:
        fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(held)
        raise SbpError(
            f"another run is training in {workdir}; wait for it, or choose another --workdir",
            code="bad-checkpoint",
        ) from None
    return held


def need_room(folder: Path, shapes: TrainState) -> None:
    """Refuse a disk that has no room for one more checkpoint of a state.

    Arguments:
      folder: on the disk.
      shapes: the state as ShapeDtypeStructs.

    Raises:
      SbpError: `bad-checkpoint` where it has less than the bytes of the arrays.
    """
    need = sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(shapes))
    free = shutil.disk_usage(folder).free
    if free < need:
        raise SbpError(
            f"{folder} has {free / 2**20:,.1f} MiB of room left, and a checkpoint takes"
            f" {need / 2**20:,.1f} MiB; make room, or choose another --workdir",
            code="bad-checkpoint",
        )


_WRITE_ERRORS = (OSError, ValueError)  # the latter are tensorstore's


def _is_of_orbax(record: logging.LogRecord) -> bool:
    frames = traceback.extract_tb(record.exc_info[2]) if record.exc_info else []
    files = (record.pathname, *(frame.filename for frame in frames))
    return any("orbax" in Path(file).parts for file in files)


@functools.cache
def quiet() -> None:
    """Silence what orbax says of errors by itself: they reach us as exceptions.

    Each of its threads logs them with a trace. Where one array fails, tensorstore goes on with the
    others, and says of each that nobody waits for it any more.
    """
    for name in ("absl", "asyncio"):
        logging.getLogger(name).addFilter(lambda record: not _is_of_orbax(record))
    before = sys.unraisablehook

    def hook(unraisable: sys.UnraisableHookArgs) -> None:
        frames = traceback.extract_tb(unraisable.exc_traceback)
        if not frames or frames[-1].name != "_check_closed":  # of an event loop
            before(unraisable)

    sys.unraisablehook = hook


def _reason(error: Exception) -> str:
    """The system's words for what went wrong in writing."""
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    number = str(error).partition("os_error_code='")[2].partition("'")[0]  # as tensorstore says it
    return os.strerror(int(number)) if number.isdecimal() else type(error).__name__


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
        quiet()
        held: list[int] = []
        from_first(lambda: held.append(_usable(workdir)))
        # The other processes of a run hold nothing that would have to be released.
        self._lock: int | None = held[0] if held else os.open(os.devnull, os.O_RDONLY)
        self._workdir, self._description = workdir, dict(description)
        self._folder = workdir / "checkpoints"
        try:
            self._open()
        except BaseException:
            os.close(self._lock)
            raise

    def __enter__(self) -> Checkpoints:
        return self

    def __exit__(self, kind: object, error: BaseException | None, tb: object) -> None:
        try:
            self.close()
        except SbpError as unwritten:
            if error is None:
                raise
            error.add_note(unwritten.message)

    def _open(self) -> None:
        share_folder(self._workdir)
        same_run(self._workdir, self._description)
        with writing(self._folder):
            self._folder.mkdir(exist_ok=True)
            self._manager = ocp.CheckpointManager(
                self._folder.absolute(),
                options=ocp.CheckpointManagerOptions(
                    max_to_keep=2, create=False, cleanup_tmp_directories=True
                ),
            )

    def bind(self, name: str, content: Mapping[str, str]) -> None:
        """Add what the checkpoints of this run belong to besides: digests by name.

        Raises:
          SbpError: `bad-checkpoint` where those that are here belong to something else.
        """
        same_content(self._workdir, name, content)
        self._description[name] = dict(content)

    @property
    def latest(self) -> int | None:
        """Step of the newest checkpoint, None when there is none."""
        return self._manager.latest_step()

    def save(self, state: TrainState, iterator_state: Mapping[str, Any]) -> None:
        """Begin to write a checkpoint of `state` at its own step, unless it is there.

        The state may be donated as soon as this returns: a copy of it is written by other threads.
        One checkpoint at a time is; a second call waits for the one before.

        Raises:
          SbpError: `bad-checkpoint` where this one or the one before cannot be written, as on a
            full disk. Older ones are kept.
        """
        self.wait()
        step = int(state.step)
        if step == self.latest:
            return
        data = dict(iterator_state)
        run = {**self._description, "checksums": fingerprints(state), "data": data}
        try:
            if self.latest is None and is_first():
                text = json.dumps(self._description, indent=2, sort_keys=True) + "\n"
                write_whole(self._workdir / "config.json", text.encode())
            self._manager.save(
                step,
                args=ocp.args.Composite(
                    state=ocp.args.StandardSave(state),
                    data=ocp.args.JsonSave(data),
                    run=ocp.args.JsonSave({"run": run, "digest": digest_of(run)}),
                ),
            )
        except _WRITE_ERRORS as error:
            raise self._unwritten(error) from None

    def check(self) -> None:
        """Raise the error of `wait` now where a checkpoint has failed; wait for nothing."""
        if not self._manager.is_saving_in_progress():
            self.wait()

    def wait(self) -> None:
        """Wait until the checkpoint that was begun is written.

        Raises:
          SbpError: `bad-checkpoint` where it cannot be. Older ones are kept.
        """
        try:
            self._manager.wait_until_finished()
        except _WRITE_ERRORS as error:
            raise self._unwritten(error) from None

    def _unwritten(self, error: Exception) -> SbpError:
        return SbpError(
            f"cannot write a checkpoint to {self._folder}: {_reason(error)};"
            f" {kept(self._workdir)}. Make room or mend the folder, and the same command goes on",
            code="bad-checkpoint",
        )

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
        for step in from_first(lambda: saved_steps(self._folder)):
            try:
                found = self._read(step, target, say)
            except _DamagedError as error:
                damaged.append(f"the checkpoint of step {step} is damaged: {error}")
                continue
            for line in damaged:
                say(f"{line}; that of step {step} is used")
            from_first(lambda step=step: self._set_aside(step))
            self._manager.reload()
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
        run, named = from_first(lambda: (run_of(checkpoint), (checkpoint / "run").exists()))
        if run is None and named:
            raise _DamagedError("what it belongs to cannot be read")
        if run is None:
            say(f"the checkpoint of step {step} has no checksums, so it is not verified")
        where: Any = checkpoint.absolute()
        state: Any = None
        data: dict[str, Any] = {}
        # Each process reads its own shards, one of which may be damaged. The manager would wait for
        # all processes where one has failed.
        try:
            state = ocp.StandardCheckpointHandler().restore(
                where / "state", args=ocp.args.StandardRestore(target)
            )
            data = dict(ocp.JsonCheckpointHandler().restore(where / "data"))
        except Exception:  # whatever the libraries raise over damaged files
            state = None
        if any(gathered(state is None)):
            raise _DamagedError(UNREADABLE)
        if run is not None:
            sums, found = run["checksums"], fingerprints(state)
            if wrong := [path for path, digits in found.items() if sums.get(path) != digits]:
                raise _DamagedError(f"the content of {wrong[0]} has changed")
            data = run["data"]
        return state, data

    def _set_aside(self, last: int) -> None:
        """Move checkpoints of later steps out of the way of those that will be written."""
        for step in [s for s in saved_steps(self._folder) if s > last]:
            aside = self._workdir / f"damaged-{step}"
            if aside.exists():
                shutil.rmtree(aside)
            (self._folder / str(step)).rename(aside)

    def close(self) -> None:
        """Wait for the checkpoint that was begun, and release the folder; twice does nothing more.

        Raises:
          SbpError: as `wait` does; the folder is released.
        """
        if self._lock is None:
            return
        try:
            self.wait()
        finally:
            self._manager.close()
            os.close(self._lock)
            self._lock = None


UNREADABLE = "a file of it is missing or cannot be read"


class _DamagedError(Exception):
    """A checkpoint that cannot be read, or is not what was written."""
