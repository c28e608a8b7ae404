"""Parallel text "many languages to English": generated from CLDR, or read from the user's own
file."""

from __future__ import annotations

import codecs
import hashlib
import random
import unicodedata
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from sacrebleu import BLEU

from examples.gshard.config import TranslationConfig
from examples.gshard.phrases import (
    LANGUAGES,
    UNSEEN_NAMES,
    UNSEEN_TEMPLATES,
    Meaning,
    draw,
    names,
    render,
    template,
)
from sbp.errors import SbpError


@dataclass(frozen=True, slots=True, kw_only=True)
class Pair:
    """One sentence with its English translation; `language` is the code of the source language. A
    line of plain text is a target without the other two."""

    source: str
    target: str
    language: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Corpus:
    """Training pairs, and held-out pairs in sets by what is new in them.

    Attributes:
      train: the training text.
      heldout: held-out pairs by the name of their set. No text of them, source or English, is in
        `train`.
      languages: from most to least training text.
      discarded: pairs of the user's file that are in neither part, by reason.
    """

    train: tuple[Pair, ...]
    heldout: Mapping[str, tuple[Pair, ...]]
    languages: tuple[str, ...]
    discarded: Mapping[str, int] = field(default_factory=dict)

    @property
    def heldout_pairs(self) -> tuple[Pair, ...]:
        """Held-out pairs of all sets."""
        return tuple(pair for pairs in self.heldout.values() for pair in pairs)

    @property
    def is_plain(self) -> bool:
        """Whether the text has no sources, so that there is nothing to translate."""
        return not any(pair.source for pair in (*self.train, *self.heldout_pairs))

    @property
    def digest(self) -> str:
        """Tells training text from other text, as another version of the library that renders the
        embedded corpus makes it."""
        return pairs_digest(self.train)


def pairs_digest(pairs: Iterable[Pair]) -> str:
    """Tells pairs from other pairs."""
    digest = hashlib.blake2b(digest_size=8)
    for pair in pairs:
        digest.update(f"{pair.source}\t{pair.target}\t{pair.language}\n".encode())
    return digest.hexdigest()


HELDOUT_SETS = ("recombination", "unseen names", "unseen templates")
"""Held-out sets of the embedded corpus: of names and templates that training text has, in other
combinations; with a name that no training text has (`UNSEEN_NAMES`); of a template that no training
text has (`UNSEEN_TEMPLATES`)."""

_TOKENS = 4
"""Words and marks that a reference of the embedded corpus has at least: BLEU counts groups of four,
so that a right translation of less would score 0."""

_PATIENCE = 400
"""Draws for each held-out pair, after which a language that cannot say enough has fewer."""

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


def parts_of(meaning: Meaning, target: str) -> tuple[str, ...]:
    """The held-out sets that a meaning belongs to: none for one to train on; of several, it is new
    in more than one way, and is not used.

    Arguments:
      meaning: what is said.
      target: the same in English.

    >>> parts_of(("languages", "de", "el"), "German and Greek")
    ('unseen names',)
    """
    of_parts = (
        ("unseen names", not UNSEEN_NAMES.isdisjoint(names(meaning))),
        ("unseen templates", template(meaning) in UNSEEN_TEMPLATES),
    )
    new = tuple(part for part, is_new in of_parts if is_new)
    return new or (("recombination",) if is_heldout(target) else ())


def generate(train: TranslationConfig) -> Corpus:
    """The embedded corpus, the same for the same configuration, with `HELDOUT_SETS`.

    No held-out text, source or English, is a text of the training part.

    Arguments:
      train: gives `languages`, `train_pairs`, `heldout_per_language` (in each set), `power` and
        `seed`.

    Raises:
      SbpError: `unknown-option` for more languages than there are.
    """
    if not 1 <= train.languages <= len(LANGUAGES):
        raise SbpError(
            f"languages is {train.languages}; the embedded corpus has 1 to {len(LANGUAGES)}",
            code="unknown-option",
        )
    languages = LANGUAGES[: train.languages]
    parts: dict[str | None, list[Pair]] = {name: [] for name in (None, *HELDOUT_SETS)}
    sources: dict[bool, set[str]] = {True: set(), False: set()}  # keyed by whether held out
    for language, count in language_counts(languages, train.train_pairs, train.power).items():
        # A generator per language: adding languages leaves the text of the others as it was.
        rng = random.Random(f"{train.seed} {language}")
        seen: set[str] = set()
        room: dict[str | None, int] = dict.fromkeys(HELDOUT_SETS, train.heldout_per_language)
        room[None] = count
        draws = 0
        while room[None] or (
            any(room.values()) and draws < _PATIENCE * len(room) * train.heldout_per_language
        ):
            draws += 1
            meaning = draw(rng)
            source, target = render(meaning, language), render(meaning, "en")
            if source is None or target is None or _is_english(source, target):
                continue
            new = parts_of(meaning, target)
            if len(new) > 1:
                continue
            out, where = bool(new), new[0] if new else None
            # Two meanings may render alike: 19 and 19.0, or a date with and without its weekday.
            if not room[where] or source in sources[not out] or (out and source in seen):
                continue
            if out and len(_bleu_tokens(target)) < _TOKENS:
                continue
            seen.add(source)
            sources[out].add(source)
            room[where] -= 1
            parts[where].append(Pair(source=source, target=target, language=language))
    training = parts.pop(None)
    random.Random(train.seed).shuffle(training)
    heldout = {name: tuple(parts[name]) for name in HELDOUT_SETS}
    return Corpus(train=tuple(training), heldout=heldout, languages=languages)


def _bleu_tokens(text: str) -> list[str]:
    return BLEU().tokenizer(text).split()


def _is_english(source: str, target: str) -> bool:
    """Whether CLDR has the words in English only, so that there is nothing to translate."""
    return source == target and any(ch.isalpha() for ch in source)


def read_lines(name: str, read: Callable[[], bytes]) -> Iterator[str]:
    """The lines of UTF-8 text, without their ends; a byte order mark is no text.

    Arguments:
      name: what the text is called in an error.
      read: gives the bytes of the text.

    Raises:
      SbpError: `bad-corpus`, where the text cannot be read, and at a line that is not UTF-8.
    """
    try:
        raw = read()
    except OSError as error:
        raise SbpError(f"cannot read {name}: {error.strerror}", code="bad-corpus") from None
    for number, line in enumerate(raw.removeprefix(codecs.BOM_UTF8).split(b"\n"), start=1):
        try:
            yield line.decode("utf-8").rstrip("\r")
        except UnicodeDecodeError as error:
            raise SbpError(
                f"{name}:{number}: byte {error.start + 1} is not UTF-8; save the text as UTF-8",
                code="bad-corpus",
            ) from None


def read_tsv(path: str | Path) -> tuple[Pair, ...]:
    """Read UTF-8 text: one pair per line, in three columns: source, target, language code. A file
    whose first line has one column is plain text: each line is a target.

    Raises:
      SbpError: `bad-corpus`, for a file that is missing, empty, not UTF-8 or has a line with
          another number of columns.
    """
    pairs: list[Pair] = []
    plain = False
    for number, text in enumerate(read_lines(str(Path(path)), Path(path).read_bytes), 1):
        if not text.strip():
            continue
        columns = [column.strip() for column in text.split("\t")]
        if not pairs:
            plain = len(columns) == 1
        right = 1 if plain else 3
        if len(columns) != right or not all(columns):
            count = f"{len(columns)} column{'s' * (len(columns) != 1)}"
            needed = (
                "the first line has no tab, so that the file is plain text: replace the tabs"
                if plain
                else "a line is source, target and language code, separated by tabs"
            )
            raise SbpError(
                f"{path}:{number}: {count if len(columns) != right else 'an empty column'};"
                f" {needed}",
                code="bad-corpus",
            )
        source, target, language = ("", *columns, "") if plain else columns
        pairs.append(Pair(source=source, target=target, language=language))
    if not pairs:
        raise SbpError(f"{path} holds no text", code="bad-corpus")
    return tuple(pairs)


def _alike(text: str) -> str:
    """What texts have in common that differ in case, marks and punctuation only."""
    letters = unicodedata.normalize("NFKD", text).casefold()
    kept = "".join(ch if ch.isalnum() else " " for ch in letters if not unicodedata.combining(ch))
    return " ".join(kept.split()) or text


def from_pairs(pairs: Iterable[Pair], heldout_per_language: int, *, seed: int = 0) -> Corpus:
    """Split the user's pairs into a training part and a held-out part.

    A pair may be held out when its English text, without case, marks and punctuation, hashes to the
    held-out part (`is_heldout`); a random sample of these is. Training pairs whose source is alike
    to the source of one that may be held out are discarded: training never sees a held-out text,
    nor one that differs in case, marks or punctuation only.

    Arguments:
      pairs: the user's parallel text.
      heldout_per_language: the largest number of held-out pairs of one language.
      seed: of the sample.

    Raises:
      SbpError: `bad-corpus` when either part would be empty.
    """
    pairs = list(pairs)
    rest: list[Pair] = []
    candidates: dict[str, dict[Pair, None]] = {}
    for pair in pairs:
        if is_heldout(_alike(pair.target)):
            candidates.setdefault(pair.language, {})[pair] = None
        else:
            rest.append(pair)
    heldout: list[Pair] = []
    for code, found in candidates.items():
        rng = random.Random(f"{seed} {code}")
        heldout += rng.sample(list(found), min(heldout_per_language, len(found)))
    sources = {_alike(pair.source) for found in candidates.values() for pair in found} - {""}
    training = tuple(pair for pair in rest if _alike(pair.source) not in sources)
    if not training or not heldout:
        part = "held-out" if training else "training"
        raise SbpError(
            f"{len(pairs)} sentence pairs leave none for the {part} part (one text in"
            f" {_HELDOUT_OF} is held out); add more text, or give a test set of your own"
            " (--eval-data)",
            code="bad-corpus",
        )
    discarded = {
        f"could be held out, and are twice in the text or beyond {heldout_per_language} of a"
        " language": len(pairs) - len(rest) - len(heldout),
        "have the source of one that may be held out": len(rest) - len(training),
    }
    languages = by_count(training, heldout)
    heldout.sort(key=lambda pair: languages.index(pair.language))
    return Corpus(
        train=training,
        heldout={"held out": tuple(heldout)},
        languages=languages,
        discarded=discarded,
    )


def with_eval_data(pairs: Iterable[Pair], heldout: Sequence[Pair]) -> Corpus:
    """The user's pairs with a test set of the user's own.

    Arguments:
      pairs: the training text; pairs that share a text with the test set, source or English, are
        discarded, also where it differs in case, marks or punctuation only.
      heldout: the test set.

    Raises:
      SbpError: `bad-corpus` when no pair is left to train on.
    """
    pairs = list(pairs)
    if len({bool(p.source) for p in (*pairs, *heldout)}) > 1:
        raise SbpError(
            "one of --data and --eval-data is plain text, and the other has pairs; give two files"
            " of one kind",
            code="bad-corpus",
        )
    sources = {_alike(p.source) for p in heldout} - {""}
    targets = {_alike(p.target) for p in heldout}
    training = tuple(
        p for p in pairs if _alike(p.source) not in sources and _alike(p.target) not in targets
    )
    if not training:
        raise SbpError(
            f"each of the {len(pairs)} training pairs has a text of the test set (--eval-data);"
            " take other text for one of them",
            code="bad-corpus",
        )
    return Corpus(
        train=training,
        heldout={"test set": tuple(heldout)},
        languages=by_count(training, heldout),
        discarded={"have a text of the test set": len(pairs) - len(training)},
    )


def by_count(train: Iterable[Pair], heldout: Iterable[Pair] = ()) -> tuple[str, ...]:
    """Language codes, most training pairs first.

    Arguments:
      train: the training pairs.
      heldout: pairs whose languages are in the result too, and do not count.
    """
    counts = Counter(pair.language for pair in train)
    counts.update({pair.language: 0 for pair in heldout})
    return tuple(sorted(counts, key=lambda code: (-counts[code], code)))
