"""What checkpoints belong to: the configuration, the text and the vocabularies of a run."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

from sbp.errors import SbpError
from sbp.moe.config import ModelConfig, TrainConfig
from sbp.moe.corpus import Corpus

_FREE = (
    "steps",
    "checkpoint_every",
    "heldout_per_language",
    "data",
    "eval_data",
    "max_skipped",
    "zero",
    "sequence_parallel",
    "vocabulary_threads",
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


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """What writes to a file or folder of the user's.

    Raises:
      SbpError: `bad-checkpoint` with the system's reason where that fails.
    """
    try:
        yield
    except OSError as error:
        raise SbpError(
            f"cannot write to {path}: {error.strerror}. Make room or mend the folder, or choose"
            " another place",
            code="bad-checkpoint",
        ) from None


def between_processes(
    first: Mapping[str, Mapping[str, Any]], mine: Mapping[str, Mapping[str, Any]]
) -> list[str]:
    """One line per option of which process 0 has another value than this one. The paths of a text
    may differ, its digest may not."""
    return [
        f"{section}.{name}: {first[section].get(name)!r} in process 0, {value!r} in this one"
        for section, options in mine.items()
        for name, value in options.items()
        if name not in ("data", "eval_data") and first[section].get(name) != value
    ]


def write_whole(path: Path, content: bytes) -> None:
    """Write a file so that it is never seen in part, also where the process is killed.

    Raises:
      SbpError: `bad-checkpoint` where it cannot be written; what it held is kept.
    """
    part = path.with_name(f"{path.name}.part")
    with writing(path):
        part.write_bytes(content)
        part.replace(path)


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


def digest_of(run: Mapping[str, Any]) -> str:
    text = json.dumps(run, sort_keys=True)
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()


def run_of(checkpoint: Path) -> dict[str, Any] | None:
    """What a checkpoint says that it belongs to; None where it does not, or is damaged there."""
    try:
        saved = json.loads((checkpoint / "run" / "metadata").read_text("utf-8"))
        whole = saved["digest"] == digest_of(saved["run"])
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


def same_run(workdir: Path, description: Mapping[str, Any]) -> None:
    """Refuse a folder with checkpoints of another configuration than `describe` gives.

    Raises:
      SbpError: `bad-checkpoint`, with a line for each option that differs.
    """
    if saved_steps(workdir / "checkpoints") and (lines := differences(bound(workdir), description)):
        raise SbpError(
            f"{workdir} holds a run of another configuration; choose another --workdir, or move"
            " this one away:",
            code="bad-checkpoint",
            details=lines,
        )


def same_content(workdir: Path, name: str, content: Mapping[str, str]) -> None:
    """Refuse a folder whose checkpoints belong to other content, such as other vocabularies.

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
            f"the {name} {' and '.join(other)} in {workdir} is not that of its checkpoints; put"
            " the file of the run back, or choose another --workdir",
            code="bad-checkpoint",
        )
