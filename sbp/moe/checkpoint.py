"""Checkpoints of a run: state, place in the data, and what they belong to."""

import fcntl
import functools
import hashlib
import json
import logging
import os
import shutil
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp

from sbp.errors import SbpError
from sbp.moe.config import ModelConfig, TrainConfig
from sbp.moe.hosts import from_first, gather, share_folder, whole
from sbp.moe.step import TrainState, Tree

# ---- what checkpoints belong to -----------------------------------------------------------------


def describe(model: ModelConfig, train: TrainConfig, text: str) -> dict[str, Any]:
    """The configuration and a digest of the training text, as JSON. A checkpoint works only with
    these.

    The section `free` has the options that may change between runs. The mesh is absent on purpose:
    results do not depend on it, and a run may resume on another one.

    Arguments:
      model: the model.
      train: how it is trained, with the options of a subclass. Options in `FREE` go to `free`.
      text: a digest of the training text.
    """
    free = set(train.FREE)
    if train.schedule in ("linear", "cosine"):  # they end at the last step
        free -= {"steps"}
    every = asdict(train)
    return {
        "model": asdict(model),
        "train": {k: v for k, v in every.items() if k not in free},
        "corpus": {"digest": text},
        "free": {k: v for k, v in every.items() if k in free},
    }


def differences(
    saved: Mapping[str, Any], wanted: Mapping[str, Any], config: type[TrainConfig] = TrainConfig
) -> list[str]:
    """A line for each option that differs, in the order of the sections.

    Arguments:
      saved, wanted: from `describe`.
      config: the class of the training options.
    """
    lines = []
    for section, kind in (("model", ModelConfig), ("train", config), ("corpus", None)):
        # A run from before an option existed has the default of the option.
        default = {f.name: f.default for f in fields(kind)} if kind else {}
        old, new = saved.get(section, {}), wanted[section]
        for name in sorted({*old, *new}):
            if name in config.FREE and not (name in old and name in new):
                continue  # the option is free in one of the two
            before = old.get(name, default.get(name))
            if before != new.get(name):
                lines.append(f"{section}.{name}: checkpoint {before!r}, now {new.get(name)!r}")
    return lines


def same_run(
    workdir: Path, description: Mapping[str, Any], config: type[TrainConfig] = TrainConfig
) -> None:
    """Refuses a folder whose checkpoints have another configuration.

    Raises:
      SbpError: `bad-checkpoint`, with a line for each option that differs.
    """
    if not saved_steps(workdir / "checkpoints"):
        return
    if lines := differences(bound(workdir), description, config):
        raise SbpError(
            f"{workdir} holds a run of another configuration; choose another --workdir, or move"
            " this one away:",
            code="bad-checkpoint",
            details=lines,
        )


def same_content(workdir: Path, name: str, content: Mapping[str, str]) -> None:
    """Refuses a folder whose checkpoints were made with other content, such as other vocabularies.

    Arguments:
      workdir: the folder.
      name: what the content is, such as "vocabulary".
      content: digests by name.

    Raises:
      SbpError: `bad-checkpoint`.
    """
    if not saved_steps(workdir / "checkpoints"):
        return
    old = bound(workdir).get(name)
    if old and old != content:
        other = [key for key in content if old.get(key) != content[key]]
        raise SbpError(
            f"the checkpoints in {workdir} were made with another {name} {' and '.join(other)};"
            " restore the original files, or choose another --workdir",
            code="bad-checkpoint",
        )


def digest_of(run: Mapping[str, Any]) -> str:
    return hashlib.blake2b(json.dumps(run, sort_keys=True).encode(), digest_size=16).hexdigest()


def run_of(checkpoint: Path) -> dict[str, Any] | None:
    """The configuration that a checkpoint records; None where the record is missing or damaged."""
    try:
        saved = json.loads((checkpoint / "run" / "metadata").read_text("utf-8"))
        return saved["run"] if saved["digest"] == digest_of(saved["run"]) else None
    except (OSError, ValueError, KeyError, TypeError):
        return None


_NO_RUN = "its `run` entry cannot be read"


def _damage(step: int, what: str) -> str:
    return f"the checkpoint of step {step} is damaged: {what}"


def _unreadable(folder: Path, damaged: list[str]) -> SbpError:
    return SbpError(
        f"no checkpoint in {folder} can be read; choose another --workdir:",
        code="bad-checkpoint",
        details=damaged,
    )


def saved_steps(folder: Path) -> list[int]:
    """The steps that have a checkpoint in a folder, newest first.

    Raises:
      SbpError: `bad-checkpoint` where the folder cannot be read.
    """
    try:
        names = [path.name for path in folder.iterdir() if path.name.isdecimal()]
    except (FileNotFoundError, NotADirectoryError):
        return []
    except OSError as error:
        raise SbpError(
            f"cannot read {folder}: {error.strerror}; choose another --workdir",
            code="bad-checkpoint",
        ) from None
    return sorted((step for name in names if str(step := int(name)) == name), reverse=True)


def newest_text(workdir: Path) -> str:
    """Says which checkpoint is left if the run in a folder ends now."""
    steps = saved_steps(workdir / "checkpoints")
    return f"the checkpoint of step {steps[0]} is kept" if steps else "no checkpoint is there yet"


def bound(workdir: Path) -> dict[str, Any]:
    """The configuration that the checkpoints of a run belong to: of the newest that can be read.

    Raises:
      SbpError: `bad-checkpoint` where none can be read.
    """
    folder = workdir / "checkpoints"
    steps = saved_steps(folder)
    for step in steps:
        if run := run_of(folder / str(step)):
            return run
    raise _unreadable(folder, [_damage(step, _NO_RUN) for step in steps])


# ---- files --------------------------------------------------------------------------------------


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """Turns errors of the operating system, while sbp writes to a path, into errors of sbp.

    Raises:
      SbpError: `bad-checkpoint` with the system's reason, if writing fails.
    """
    try:
        yield
    except OSError as error:
        raise SbpError(
            f"cannot write to {path}: {error.strerror}. Free disk space, fix the folder, or choose"
            " another path",
            code="bad-checkpoint",
        ) from None


def write_whole(path: Path, content: bytes) -> None:
    """Writes a file so that no reader sees a part of it, even if the process is killed.

    Raises:
      SbpError: `bad-checkpoint` if sbp cannot write it. The old file then stays.
    """
    part = path.with_name(f"{path.name}.part")
    with writing(path):
        part.write_bytes(content)
        part.replace(path)


# ---- checksums of arrays, wherever they lie ------------------------------------------------------

_WORDS = {1: jnp.uint8, 2: jnp.uint16, 4: jnp.uint32, 8: jnp.uint32}
"""The words of an array by the bytes of an element; one of 8 bytes is two words, on a new last
dim."""


def fingerprints(tree: Any) -> dict[str, str]:
    """A checksum of each array of a tree, by its path: 16 hexadecimal digits.

    Computed on the devices that hold the array, from integers alone, so that it is the same on
    every mesh. Each word is multiplied by odd numbers that depend on its place, and the products
    are added modulo 2**32, twice: a change of one word always shows, other damage almost
    surely.

    >>> fingerprints({"w": jnp.zeros(3)}) == fingerprints({"w": jnp.ones(3)})
    False
    """
    leaves, _ = jax.tree_util.tree_flatten_with_path(tree)
    sums = whole(_all_sums([x for _, x in leaves]))
    return {
        jax.tree_util.keystr(path): "".join(f"{int(s):08x}" for s in np.asarray(two))
        for (path, _), two in zip(leaves, sums, strict=True)
    }


def _sums(x: Any) -> jax.Array:
    """Two sums of an array's words."""
    x = jnp.asarray(x)
    words = jax.lax.bitcast_convert_type(x, _WORDS[x.dtype.itemsize]).astype(jnp.uint32)
    place = jnp.zeros(words.shape, jnp.uint32)
    for dim, size in enumerate(words.shape):
        place = place * jnp.uint32(size % 2**32) + jax.lax.broadcasted_iota(
            jnp.uint32, words.shape, dim
        )
    return jnp.stack([jnp.sum(words * _odd(place, seed), dtype=jnp.uint32) for seed in (1, 2)])


def _odd(place: jax.Array, seed: int) -> jax.Array:
    """An odd number for each place: the finaliser of MurmurHash3 on it."""
    h = place + jnp.uint32(0x9E3779B9 * seed % 2**32)
    for shift, factor in ((16, 0x85EBCA6B), (13, 0xC2B2AE35), (16, 1)):
        h = (h ^ (h >> shift)) * jnp.uint32(factor)
    return h | jnp.uint32(1)


_all_sums = jax.jit(lambda arrays: [_sums(x) for x in arrays])


# ---- checkpoints --------------------------------------------------------------------------------


def take_lock(held: int, workdir: Path, *, shared: bool = False) -> None:
    """Take the lock of the folder of a run, which ends when its file is closed.

    Arguments:
      held: the open file of the lock.
      workdir: the folder.
      shared: whether others may hold a shared lock at the same time, as `sbp check` does.

    Raises:
      SbpError: `bad-checkpoint` where another run is in it, and where its file system has no locks.
    """
    try:
        fcntl.flock(held, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
    except BlockingIOError:
        raise SbpError(
            f"another run is training in {workdir}; wait for it, or choose another --workdir",
            code="bad-checkpoint",
        ) from None
    except OSError as error:
        raise SbpError(
            f"cannot lock {workdir}: {error.strerror}; choose another --workdir",
            code="bad-checkpoint",
        ) from None


def _lock(workdir: Path, closing: ExitStack) -> None:
    """Make the folder of a run and take its lock, which ends with the process or with `closing`.

    Raises:
      SbpError: `bad-checkpoint` where the folder cannot be written, or another run is in it.
    """
    with writing(workdir):
        workdir.mkdir(parents=True, exist_ok=True)
        held = os.open(workdir / ".lock", os.O_RDWR | os.O_CREAT, 0o644)
    closing.callback(os.close, held)
    take_lock(held, workdir)


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

    def hook(unraisable: "sys.UnraisableHookArgs") -> None:
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


class Checkpoints(AbstractContextManager["Checkpoints"]):
    """The checkpoints in one folder; the newest two are kept, each written whole or not at all.

    From opening to `close`, no other run can open the folder. A checkpoint has in itself what it
    belongs to (model, options, text, vocabularies) and a checksum of each array.

    Attributes:
      workdir: the folder.
    """

    def __init__(
        self,
        workdir: Path,
        description: Mapping[str, Any],
        config: type[TrainConfig] = TrainConfig,
    ) -> None:
        """Open the folder of a run, new or old.

        Arguments:
          workdir: the folder.
          description: what checkpoints belong to, from `describe`.
          config: the class of the training options, for those that an older run lacks.

        Raises:
          SbpError: `bad-checkpoint` when it holds checkpoints of another configuration, another run
              is in it, or it cannot be written.
        """
        quiet()
        self.workdir, self._description = workdir, dict(description)
        self._folder = workdir / "checkpoints"
        with ExitStack() as closing:
            from_first(lambda: _lock(workdir, closing))  # the other processes hold nothing
            share_folder(workdir)
            same_run(workdir, self._description, config)
            with writing(self._folder):
                self._folder.mkdir(exist_ok=True)
                self._manager = ocp.CheckpointManager(
                    self._folder.absolute(),
                    options=ocp.CheckpointManagerOptions(
                        max_to_keep=2, create=False, cleanup_tmp_directories=True
                    ),
                )
            closing.callback(self._manager.close)
            closing.callback(self.wait)
            self._closing = closing.pop_all()

    def __exit__(self, kind: object, error: BaseException | None, tb: object) -> None:
        try:
            self.close()
        except SbpError as unwritten:
            if error is None:
                raise
            error.add_note(unwritten.message)

    def bind(self, name: str, content: Mapping[str, str]) -> None:
        """Add something else that the checkpoints of this run belong to, by digests of its parts.

        Arguments:
          name: what it is called in the description of the run.
          content: the digest of each part, by the name of the part.

        Raises:
          SbpError: `bad-checkpoint` where those that are here belong to something else.
        """
        same_content(self.workdir, name, content)
        self._description[name] = dict(content)

    @property
    def latest(self) -> int | None:
        """Step of the newest checkpoint, None when there is none."""
        return self._manager.latest_step()

    def save(self, state: TrainState, iterator_state: Mapping[str, Any]) -> None:
        """Begin to write a checkpoint of `state` at its own step, unless it is there.

        The state may be donated as soon as this returns: other threads write a copy of it. They
        write one checkpoint at a time, so a second call waits for the checkpoint before it.

        Raises:
          SbpError: `bad-checkpoint` where this one or the one before cannot be written, as on a
            full disk. Older ones are kept.
        """
        self.wait()
        step = int(state.step)
        if step == self.latest:
            return
        data = dict(iterator_state)
        run = {**self._description, "checksums": fingerprints(state), "data": data, "step": step}
        try:
            self._manager.save(
                step,
                args=ocp.args.Composite(
                    state=ocp.args.StandardSave(state),
                    data=ocp.args.JsonSave(data),
                    run=ocp.args.JsonSave({"run": run, "digest": digest_of(run)}),
                ),
            )
        except _WRITE_ERRORS as error:
            raise self._write_error(error) from None

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
            raise self._write_error(error) from None

    def _write_error(self, error: Exception) -> SbpError:
        return SbpError(
            f"cannot write a checkpoint to {self._folder}: {_reason(error)};"
            f" {newest_text(self.workdir)}. Free disk space or fix the folder, then run the same"
            " command again to continue",
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
        target = _on(shapes, shardings)

        def read(where: Any) -> tuple[TrainState, dict[str, Any]]:
            # Each process reads its own shards, one of which may be damaged. The manager would wait
            # for all processes where one has failed.
            state: Any = ocp.StandardCheckpointHandler().restore(
                where / "state", args=ocp.args.StandardRestore(target)
            )
            return state, dict(ocp.JsonCheckpointHandler().restore(where / "data"))

        step, found = _newest(self._folder, read, say)
        from_first(lambda: self._set_aside(step))
        self._manager.reload()
        return found

    def _set_aside(self, last: int) -> None:
        """Move checkpoints of later steps out of the way of those that will be written."""
        for step in [s for s in saved_steps(self._folder) if s > last]:
            aside = self.workdir / f"damaged-{step}"
            if aside.exists():
                shutil.rmtree(aside)
            (self._folder / str(step)).rename(aside)

    def close(self) -> None:
        """Wait for the checkpoint that was begun, and release the folder; twice does nothing more.

        Raises:
          SbpError: as `wait` does; the folder is released.
        """
        self._closing.close()


def read_params(
    workdir: Path, shapes: Tree, shardings: Tree, say: Callable[[str], None] = print
) -> Tree:
    """The parameters of a run's newest checkpoint that is whole, each leaf straight to its
    sharding. Nothing in the folder is changed or locked.

    Arguments:
      workdir: the folder of the run.
      shapes: the parameters as ShapeDtypeStructs.
      shardings: a tree like them.
      say: is called with a line about each checkpoint that is damaged or cannot be verified.

    Raises:
      SbpError: `bad-checkpoint` where every one is damaged.
    """
    quiet()
    item = {"params": _on(shapes, shardings)}
    asked = ocp.args.PyTreeRestore(
        item=item,
        restore_args=ocp.checkpoint_utils.construct_restore_args(item),
        partial_restore=True,
    )

    def read(where: Any) -> tuple[TrainState, dict[str, Any]]:
        with ocp.Checkpointer(ocp.PyTreeCheckpointHandler()) as reader:
            return TrainState(None, reader.restore(where / "state", args=asked)["params"], None), {}

    _, (state, _) = _newest(workdir / "checkpoints", read, say)
    return state.params


def _on(shapes: Tree, shardings: Tree) -> Tree:
    return jax.tree.map(
        lambda leaf, place: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=place),
        shapes,
        shardings,
    )


_Read = Callable[[Any], tuple[TrainState, dict[str, Any]]]
"""Reads the state and the place in the data from the folder of a checkpoint."""


def _newest(
    folder: Path, read: _Read, say: Callable[[str], None]
) -> tuple[int, tuple[TrainState, dict[str, Any]]]:
    """The newest step whose checkpoint is whole, and what is in it."""
    damaged: list[str] = []
    for step in from_first(lambda: saved_steps(folder)):
        found = _verify(folder / str(step), read)
        if not isinstance(found, str):
            for line in damaged:
                say(f"{line}; sbp uses the checkpoint of step {step}")
            return step, found
        damaged.append(_damage(step, found))
    raise _unreadable(folder, damaged)


def _verify(checkpoint: Path, read: _Read) -> tuple[TrainState, dict[str, Any]] | str:
    """What is in a checkpoint; what is damaged, in words, where it cannot be read or is not what
    was written."""
    run = from_first(lambda: run_of(checkpoint))
    if run is None:
        return _NO_RUN
    if run["step"] != int(checkpoint.name):
        return f"it is a copy of the checkpoint of step {run['step']}"
    found: Any = None
    with suppress(Exception):  # whatever the libraries raise over damaged files
        found = read(checkpoint.absolute())
    if any(gather(found is None)):
        return "a file of it is missing or cannot be read"
    sums = fingerprints(found[0])
    wrong = [path for path, digits in sums.items() if run["checksums"].get(path) != digits]
    return f"the content of {wrong[0]} has changed" if wrong else (found[0], run["data"])
