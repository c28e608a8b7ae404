"""How much better a run translates each language than others do: figure 6 of the GShard paper."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from examples.gshard.drawing import COLOURS, Drawing, canvas
from examples.gshard.evaluate import MODEL, Evaluation, Quality


@dataclass(frozen=True, slots=True, kw_only=True)
class LanguageDelta:
    """The scores of one language, of 100.

    Attributes:
      language: its code.
      pairs: training pairs of the run.
      sentences: that were translated.
      score: of the run.
      baseline: the best score of the runs that it is compared with.
    """

    language: str
    pairs: int
    sentences: int
    score: float
    baseline: float

    @property
    def delta(self) -> float:
        """By how much the run is better."""
        return self.score - self.baseline


@dataclass(frozen=True, slots=True, kw_only=True)
class Deltas:
    """A run against others.

    Attributes:
      measure: "BLEU" where each language has enough sentences for it, else "chrF".
      languages: most training pairs first.
      against: names of the other runs.
    """

    measure: str
    languages: tuple[LanguageDelta, ...]
    against: tuple[str, ...]

    @property
    def mean(self) -> float:
        """The mean delta over languages, each counted once."""
        return math.fsum(one.delta for one in self.languages) / len(self.languages)

    @property
    def ahead(self) -> int:
        """Languages in which the run is better."""
        return sum(one.delta > 0 for one in self.languages)

    def __str__(self) -> str:
        return (
            f"mean delta {self.mean:+.2f} {self.measure} over {len(self.languages)} languages,"
            f" against {' and '.join(self.against)}; better in {self.ahead}"
        )


def language_deltas(result: Evaluation, against: Sequence[str], pairs: Mapping[str, int]) -> Deltas:
    """Compare the model with other systems of an evaluation, language by language.

    Arguments:
      result: the scores; `against` are among its systems.
      against: names of the systems; of each language the best counts, so that each of several
        bilingual runs stands for its own language.
      pairs: training pairs by language.
    """
    systems = (MODEL, *against)
    enough = all(s.systems[name].bleu is not None for s in result.languages for name in systems)
    measure = "BLEU" if enough else "chrF"

    def number(quality: Quality) -> float:
        return quality.chrf if quality.bleu is None or not enough else quality.bleu

    found = [
        LanguageDelta(
            language=score.name,
            pairs=pairs.get(score.name, 0),
            sentences=score.sentences,
            score=number(score.model),
            baseline=max(number(score.systems[name]) for name in against),
        )
        for score in result.languages
    ]
    found.sort(key=lambda one: (-one.pairs, one.language))
    return Deltas(measure=measure, languages=tuple(found), against=tuple(against))


def figure6(deltas: Deltas) -> Drawing:
    """Deltas by language, most training text first.

    Raises:
      SbpError: `unknown-option` where matplotlib is not installed.
    """
    figure, axes = canvas(max(6.0, 1.5 + 0.13 * len(deltas.languages)))
    names = [one.language for one in deltas.languages]
    heights = [one.delta for one in deltas.languages]
    colours = [COLOURS[0] if height >= 0 else COLOURS[1] for height in heights]
    spots = range(len(names))
    axes.bar(spots, heights, color=colours, width=0.8)
    axes.axhline(0, color="#222222", linewidth=0.8)
    axes.axhline(deltas.mean, color="#222222", linewidth=1, linestyle="--", label="mean")
    axes.text(len(names) - 0.4, deltas.mean, f" mean {deltas.mean:+.1f}", va="center", fontsize=9)
    axes.set_xticks(list(spots), names, rotation=90, fontsize=7 if len(names) > 30 else 9)
    axes.set_xlim(-0.6, len(names) - 0.4)
    axes.set_xlabel("languages, most training text first")
    axes.set_ylabel(f"delta {deltas.measure}")
    return Drawing(
        name="figure6",
        title=f"Figure 6: delta {deltas.measure} by language, against {', '.join(deltas.against)}",
        note=f"{deltas}. Of several other runs the best counts in each language. With few"
        " sentences of a language its delta is uncertain; the table says how many there are.",
        figure=figure,
        header=("language", "training pairs", "sentences", "this run", "the other", "delta"),
        rows=[
            (
                one.language,
                f"{one.pairs:,}",
                f"{one.sentences}",
                f"{one.score:.1f}",
                f"{one.baseline:.1f}",
                f"{one.delta:+.1f}",
            )
            for one in deltas.languages
        ],
    )
