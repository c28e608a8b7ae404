"""Parallel text "many languages to English": generated from CLDR, or read from the user's own
file."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from sbp.errors import SbpError
from sbp.moe.config import TrainConfig
from sbp.moe.phrases import LANGUAGES, draw, render


@dataclass(frozen=True, slots=True, kw_only=True)
class Pair:
    """One sentence with its English translation; `language` is the code of the source language."""

    source: str
    target: str
    language: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Corpus:
    """Training and held-out pairs; `languages` orders the languages from most to least training
    text."""

    train: tuple[Pair, ...]
    heldout: tuple[Pair, ...]
    languages: tuple[str, ...]


_HELDOUT_OF = 20
"""One English text in this many is held out, in all languages."""


def is_heldout(target: str) -> bool:
    """Whether an English text belongs to the held-out part; a hash of the text decides.

    The same text is held out in all languages, so training never sees a held-out English text.
    """
    digest = hashlib.blake2b(target.encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") % _HELDOUT_OF == 0


def language_counts(languages: Sequence[str], total: int, power: float) -> dict[str, int]:
    """Pairs per language: shares proportional to (rank + 1) ** -power, at least one each.

    GShard's 100 languages follow a power law from billions of pairs to tens of thousands, flattened
    by sampling with a temperature; `power` is what is left of it.
    """
    weights = [(rank + 1) ** -power for rank in range(len(languages))]
    return {
        lang: max(1, round(total * w / sum(weights)))
        for lang, w in zip(languages, weights, strict=True)
    }


def generate(train: TrainConfig) -> Corpus:
    """The embedded corpus, the same for the same configuration.

    No held-out text, source or English, is a text of the training part.

    Arguments:
      train: gives `languages`, `train_pairs`, `heldout_per_language`, `power` and `seed`.

    Raises:
      SbpError: `unknown-option` for more languages than there are.
    """
    if not 1 <= train.languages <= len(LANGUAGES):
        raise SbpError(
            f"languages is {train.languages}; the embedded corpus has 1 to {len(LANGUAGES)}",
            code="unknown-option",
        )
    languages = LANGUAGES[: train.languages]
    parts: dict[bool, list[Pair]] = {True: [], False: []}  # keyed by whether a pair is held out
    sources: dict[bool, set[str]] = {True: set(), False: set()}
    for language, count in language_counts(languages, train.train_pairs, train.power).items():
        # A generator per language: adding languages leaves the text of the others as it was.
        rng = random.Random(f"{train.seed} {language}")
        seen: set[str] = set()
        room = {True: train.heldout_per_language, False: count}
        while any(room.values()):
            meaning = draw(rng)
            source, target = render(meaning, language), render(meaning, "en")
            if source is None or target is None or _is_english(source, target):
                continue
            out = is_heldout(target)
            # Two meanings may render alike: 19 and 19.0, or a date with and without its weekday.
            if not room[out] or source in sources[not out] or (out and source in seen):
                continue
            seen.add(source)
            sources[out].add(source)
            room[out] -= 1
            parts[out].append(Pair(source=source, target=target, language=language))
    training, heldout = parts[False], parts[True]
    random.Random(train.seed).shuffle(training)
    return Corpus(train=tuple(training), heldout=tuple(heldout), languages=languages)


def _is_english(source: str, target: str) -> bool:
    """Whether CLDR has the words in English only, so that there is nothing to translate."""
    return source == target and any(ch.isalpha() for ch in source)


def read_tsv(path: str | Path) -> tuple[Pair, ...]:
    """Read parallel text: UTF-8, one pair per line, three columns: source, target, language code.

    Raises:
      SbpError: `bad-corpus`, for a file that is missing, empty, not UTF-8 or has a line without
          three columns.
    """
    path = Path(path)
    try:
        raw = path.read_bytes()
    except OSError as error:
        raise SbpError(f"cannot read {path}: {error.strerror}", code="bad-corpus") from None
    pairs: list[Pair] = []
    for number, line in enumerate(raw.split(b"\n"), start=1):
        try:
            text = line.decode("utf-8").rstrip("\r")
        except UnicodeDecodeError as error:
            raise SbpError(
                f"{path}:{number}: byte {error.start + 1} is not UTF-8; save the file as UTF-8",
                code="bad-corpus",
            ) from None
        if not text.strip():
            continue
        columns = [column.strip() for column in text.split("\t")]
        if len(columns) != 3 or not all(columns):
            found = (
                f"{len(columns)} column{'s' * (len(columns) != 1)}"
                if len(columns) != 3
                else "an empty column"
            )
            raise SbpError(
                f"{path}:{number}: {found}; a line is source, target and language code, separated"
                " by tabs",
                code="bad-corpus",
            )
        pairs.append(Pair(source=columns[0], target=columns[1], language=columns[2]))
    if not pairs:
        raise SbpError(f"{path} holds no sentence pair", code="bad-corpus")
    return tuple(pairs)


def from_pairs(pairs: Iterable[Pair], heldout_per_language: int) -> Corpus:
    """Split the user's pairs into a training part and a held-out part.

    A pair is held out when its English text hashes to the held-out part (`is_heldout`). Held-out
    pairs beyond `heldout_per_language` are dropped, and so are training pairs whose source is a
    held-out source: training never sees a held-out text.

    Arguments:
      pairs: the user's parallel text.
      heldout_per_language: the largest number of held-out pairs of one language.

    Raises:
      SbpError: `bad-corpus` when either part would be empty.
    """
    training: list[Pair] = []
    heldout: dict[str, list[Pair]] = {}
    counts: dict[str, int] = {}
    for pair in pairs:
        counts[pair.language] = counts.get(pair.language, 0) + 1
        if not is_heldout(pair.target):
            training.append(pair)
        elif len(kept := heldout.setdefault(pair.language, [])) < heldout_per_language:
            kept.append(pair)
    languages = tuple(sorted(counts, key=lambda lang: (-counts[lang], lang)))
    sources = {pair.source for kept in heldout.values() for pair in kept}
    corpus = Corpus(
        train=tuple(pair for pair in training if pair.source not in sources),
        heldout=tuple(pair for lang in languages for pair in heldout.get(lang, ())),
        languages=languages,
    )
    if not corpus.train or not corpus.heldout:
        part = "held-out" if corpus.train else "training"
        raise SbpError(
            f"{sum(counts.values())} sentence pairs leave none for the {part} part (one text in"
            f" {_HELDOUT_OF} is held out); add more text",
            code="bad-corpus",
        )
    return corpus


def load(train: TrainConfig) -> Corpus:
    """The corpus of a run: the user's file when `train.data` names one, else the embedded one."""
    return (
        from_pairs(read_tsv(train.data), train.heldout_per_language)
        if train.data
        else generate(train)
    )
