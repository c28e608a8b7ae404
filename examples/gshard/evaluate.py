"""Held-out translation quality: exact match, chrF and BLEU of the model's greedy translations,
beside baselines that learn nothing: copying the source and counting
(`examples.gshard.counting`)."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import sacrebleu

from examples.gshard.corpus import Pair
from examples.gshard.counting import CountingTranslator
from examples.gshard.tokenizer import Tokenizer

MODEL = "model"
"""What the model's translations are called beside those of the baselines."""

_FOR_BLEU = 100
"""Sentences from which BLEU is given: of a few short ones it is 0 or chance."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Quality:
    """How good some translations are, all of 100.

    Attributes:
      exact: share of translations that equal the reference.
      chrf: chrF (Popović, 2015, "chrF: character n-gram F-score").
      bleu: BLEU (Papineni et al., 2002); None for fewer than 100 sentences.
    """

    exact: float
    chrf: float
    bleu: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Score:
    """Translations of some sentences by the model and by each baseline.

    Attributes:
      name: what the sentences have in common: a held-out set, ranks of languages, a language.
      languages: their source languages.
      sentences: their number.
      systems: the quality of each system by name, `MODEL` first.
    """

    name: str
    languages: tuple[str, ...]
    sentences: int
    systems: Mapping[str, Quality]

    @property
    def model(self) -> Quality:
        """The model's."""
        return self.systems[MODEL]

    @property
    def baseline(self) -> str:
        """The baseline with the best chrF."""
        return max((n for n in self.systems if n != MODEL), key=lambda n: self.systems[n].chrf)

    @property
    def beats_baselines(self) -> bool:
        """Whether the model's chrF is above that of each baseline."""
        return self.model.chrf > self.systems[self.baseline].chrf


@dataclass(frozen=True, slots=True, kw_only=True)
class Evaluation:
    """The result on the held-out sets.

    Attributes:
      sets: by held-out set.
      overall: all sets together.
      groups: all sets by rank of training text, most first.
      languages: all sets by language.
      samples: (pair, the model's translation), some of each set, spread over all ranks.
      too_long: held-out pairs whose source is longer than the model's, which has no translation of
        them; they count as empty translations.
      unsayable: references that the model's vocabulary cannot spell as they are.
      signatures: of sacrebleu, which make the numbers reproducible.
    """

    sets: tuple[Score, ...]
    overall: Score
    groups: tuple[Score, ...]
    languages: tuple[Score, ...]
    samples: tuple[tuple[Pair, str], ...]
    too_long: int
    unsayable: int
    signatures: tuple[str, ...]


def language_groups(languages: Sequence[str], groups: int = 4) -> list[tuple[str, tuple[str, ...]]]:
    """Split languages, ordered by training text, into equal groups named by rank."""
    parts: list[list[int]] = [
        part.tolist() for part in np.array_split(np.arange(len(languages)), groups) if len(part)
    ]
    return [
        (f"rank {part[0] + 1}-{part[-1] + 1}", tuple(languages[i] for i in part)) for part in parts
    ]


def baselines(train: Iterable[Pair], pairs: Sequence[Pair]) -> dict[str, list[str]]:
    """Translations of `pairs` by what learns nothing, by name of the system.

    Arguments:
      train: the training text, which is counted.
      pairs: what to translate.
    """
    train = list(train)
    numbers = CountingTranslator.learn(train, names=False)
    both = CountingTranslator.learn(train, names=True)
    return {
        "templates": [numbers.translate(pair) for pair in pairs],
        "templates, names": [both.translate(pair) for pair in pairs],
        **copying(pairs),
    }


def copying(pairs: Sequence[Pair]) -> dict[str, list[str]]:
    """The sources as translations of themselves."""
    return {"copying": [pair.source for pair in pairs]}


def evaluate(
    heldout: Mapping[str, Sequence[Pair]],
    texts: Mapping[str, Sequence[str | None]],
    languages: Sequence[str],
    vocabulary: Tokenizer | None = None,
) -> Evaluation:
    """Score translations.

    Arguments:
      heldout: pairs by held-out set.
      texts: by system, `MODEL` first, the translation of each pair of each set in order; None where
        a system has none.
      languages: order of the languages, most training text first.
      vocabulary: the model's, of the target side; None for a system that spells all text.
    """
    bleu, chrf = sacrebleu.BLEU(), sacrebleu.CHRF()
    every = [pair for pairs in heldout.values() for pair in pairs]
    answers = {
        system: {pair: text or "" for pair, text in zip(every, found, strict=True)}
        for system, found in texts.items()
    }

    def score(name: str, pairs: Sequence[Pair]) -> Score:
        references = [[pair.target for pair in pairs]]
        systems = {}
        for system, found in answers.items():
            said = [found[pair] for pair in pairs]
            right = sum(a == b for a, b in zip(said, references[0], strict=True))
            systems[system] = Quality(
                exact=100 * right / len(pairs),
                chrf=chrf.corpus_score(said, references).score,
                bleu=bleu.corpus_score(said, references).score if len(pairs) >= _FOR_BLEU else None,
            )
        codes = [code for code in languages if any(pair.language == code for pair in pairs)]
        return Score(name=name, languages=tuple(codes), sentences=len(pairs), systems=systems)

    overall = score("all", every)

    def spoken(codes: Sequence[str]) -> list[Pair]:
        return [pair for pair in every if pair.language in codes]

    present = overall.languages
    return Evaluation(
        sets=tuple(score(name, pairs) for name, pairs in heldout.items() if pairs),
        overall=overall,
        groups=tuple(score(name, spoken(codes)) for name, codes in language_groups(present)),
        languages=tuple(score(code, spoken((code,))) for code in present),
        samples=tuple(
            (pair, answers[MODEL][pair]) for pairs in heldout.values() for pair in _spread(pairs)
        ),
        too_long=sum(text is None for text in texts[MODEL]),
        unsayable=vocabulary.changed([pair.target for pair in every]) if vocabulary else 0,
        # A metric that scored nothing has no signature.
        signatures=tuple(
            str(metric.get_signature())
            for metric in ((chrf, bleu) if overall.model.bleu is not None else (chrf,))
        ),
    )


def _spread(pairs: Sequence[Pair]) -> list[Pair]:
    """Five pairs from all over a set; not always a language's first, whose kinds are alike."""
    step = max(1, len(pairs) // 5)
    return list(pairs[step // 2 :: step + 1][:5])
