"""A trained model as one safetensors file: `sbp export` writes it, `--from FILE` reads it.

sbp export --workdir runs/tiny-mt tiny-mt.safetensors
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors.flax import save

from examples.gshard.config import TranslationConfig
from examples.gshard.machine import need_x64
from examples.gshard.options import CommandParser
from examples.gshard.tokenizer import Tokenizer
from sbp.errors import SbpError, nearest
from sbp.moe.checkpoint import bound, digest_of, fingerprints, read_params, saved_steps, write_whole
from sbp.moe.config import ModelConfig
from sbp.moe.model import init_params

# ---- folders of runs ----------------------------------------------------------------------------

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
        known = sorted(_runs_in(workdir.parent))
        hint = nearest(str(workdir), known).rstrip("?") if known else ""
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


def _runs_in(folder: Path) -> Iterator[str]:
    """The runs in a folder that can be read."""
    with suppress(OSError):
        for path in folder.iterdir():
            with suppress(SbpError):
                if saved_steps(path / "checkpoints"):
                    yield str(path)


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


_FORMAT = "sbp.moe 1"
_VOCABULARY = "vocabulary/"
"""Before the names of the vocabularies, which are uint8 arrays of SentencePiece's file."""


def _named(tree: Tree) -> dict[str, Any]:
    """The leaves of a tree by names such as `params/encoder/expert_in`."""
    leaves, _ = jax.tree_util.tree_flatten_with_path(tree)
    return {
        f"params/{jax.tree_util.keystr(path, simple=True, separator='/')}": leaf
        for path, leaf in leaves
    }


def export_run(saved: SavedRun, file: Path, say: Callable[[str], None]) -> None:
    """Write the parameters of a run's newest whole checkpoint.

    The file has the parameters and both vocabularies as arrays. Its metadata has the configuration,
    a checksum of each parameter, and a digest of each vocabulary, of the training text and of all
    this.

    Arguments:
      saved: the run.
      file: where; a file that is there is replaced.
      say: is called with a line about each checkpoint that is damaged.

    Raises:
      SbpError: `bad-checkpoint` where no checkpoint can be read, or the file cannot be written.
    """
    here = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    params = saved.params(jax.tree.map(lambda _: here, saved.shapes), say)
    about = {
        "model": asdict(saved.model),
        "train": asdict(saved.train),
        "corpus": saved.corpus,
        "vocabulary": {"source": saved.source.digest, "target": saved.target.digest},
        "checksums": fingerprints(_named(params)),
    }
    arrays = _named(params)
    for side, vocabulary in (("source", saved.source), ("target", saved.target)):
        arrays[_VOCABULARY + side] = jnp.asarray(np.frombuffer(vocabulary.model, np.uint8))
    text = json.dumps({"format": _FORMAT, "run": about, "digest": digest_of(about)})
    write_whole(file, save(arrays, metadata={"sbp": text}))


@dataclass(frozen=True, slots=True, kw_only=True)
class ExportedRun(SavedRun):
    """A training run of which there is only the exported file, which `workdir` names.

    Attributes:
      arrays: the parameters by name, as `_named` gives them.
    """

    arrays: Mapping[str, Any]

    def params(self, shardings: Tree, say: Callable[[str], None]) -> Tree:
        """The parameters, each leaf on its sharding; `say` is not called."""
        places = jax.tree.leaves(shardings)
        leaves = [jax.device_put(x, at) for x, at in zip(self.arrays.values(), places, strict=True)]
        return jax.tree.unflatten(jax.tree.structure(self.shapes), leaves)


def read_export(file: Path) -> ExportedRun:
    """Read an exported model and verify its content.

    Raises:
      SbpError: `bad-checkpoint` for a file that cannot be read, is not one of `sbp export`, is
        damaged, or is of a model that this version does not know; `unknown-option` for a model in
        float64 without x64.
    """
    try:
        with safe_open(file, framework="flax") as opened:
            words = opened.metadata() or {}
            arrays = {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118
    except OSError as error:
        raise _bad(
            f"cannot read {file}: {error.strerror or 'no such file, or not a file'}"
        ) from None
    except SafetensorError:
        raise _bad(f"{file} is damaged, or not a safetensors file; export it again") from None
    about = _about(file, words)
    try:
        model, train = ModelConfig(**about["model"]), TranslationConfig(**about["train"])
    except (TypeError, SbpError) as error:
        raise _bad(
            f"{file} holds a model that this version of sbp does not know: {error}"
        ) from None
    need_x64(model.dtype)
    source, target = (
        _exported_vocabulary(file, arrays, about, side) for side in ("source", "target")
    )
    params = {name: x for name, x in arrays.items() if not name.startswith(_VOCABULARY)}
    found = fingerprints(params)
    if wrong := sorted(n for n, s in about["checksums"].items() if found.get(n) != s):
        raise _bad(f"{file} is damaged: the content of {wrong[0]} has changed; export it again")
    run = ExportedRun(
        workdir=file,
        model=model,
        train=train,
        corpus=about["corpus"],
        source=source,
        target=target,
        arrays=params,
    )
    shapes = _named(run.shapes)
    if {n: (x.shape, x.dtype) for n, x in shapes.items()} != {
        n: (x.shape, x.dtype) for n, x in params.items()
    }:
        raise _bad(f"{file} holds other parameters than this version of sbp has; export it again")
    return ExportedRun(
        **{f: getattr(run, f) for f in ("workdir", "model", "train", "corpus", "source", "target")},
        arrays={name: params[name] for name in shapes},  # in the order of the leaves
    )


def _about(file: Path, words: Mapping[str, str]) -> dict[str, Any]:
    """What a file says of itself."""
    if "sbp" not in words:
        raise _bad(f"{file} was not written by sbp export; name another file")
    try:
        said = json.loads(words["sbp"])
        if said["format"] == _FORMAT and said["digest"] == digest_of(said["run"]):
            return said["run"]
    except (ValueError, KeyError, TypeError):
        pass
    raise _bad(
        f"{file} is damaged, or of another version of sbp: what it says of the run has changed;"
        " export it again"
    )


def _exported_vocabulary(
    file: Path, arrays: Mapping[str, Any], about: Mapping[str, Any], side: str
) -> Tokenizer:
    array = arrays.get(_VOCABULARY + side)
    try:
        found = None if array is None else Tokenizer(np.asarray(array).tobytes())
    except RuntimeError:  # SentencePiece's
        found = None
    if found is None or found.digest != about["vocabulary"][side]:
        raise _bad(f"{file} is damaged: its {side} vocabulary has changed; export it again")
    return found


def _bad(message: str) -> SbpError:
    return SbpError(message, code="bad-checkpoint")


def main(argv: Sequence[str]) -> int:
    """The command line of `sbp export`.

    Raises:
      SbpError: as `open_run` and `export_run` do.
    """
    parser = CommandParser(
        prog="sbp export",
        description="Write a trained model, its configuration and its vocabularies as one"
        " safetensors file, which sbp translate and sbp evaluate read (--from).",
        allow_abbrev=False,
    )
    parser.add_argument("--workdir", required=True, help="folder of a training run")
    parser.add_argument("file", metavar="FILE", help="such as model.safetensors")
    args = parser.parse_all(argv)
    file = Path(args.file)
    export_run(open_run(Path(args.workdir)), file, lambda line: print(line, file=sys.stderr))
    print(f"wrote {file} ({file.stat().st_size / 2**20:,.1f} MiB)")
    return 0
