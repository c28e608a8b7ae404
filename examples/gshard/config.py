"""The configuration of a translation model's training: `TrainConfig` and its text."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, TypeVar

from sbp.errors import SbpError, nearest
from sbp.moe.config import Bounds, ModelConfig, TrainConfig, out_of_bounds, unknown_choices

_BOUNDS: Bounds = {
    **dict.fromkeys(
        (
            "languages",
            "train_pairs",
            "heldout_per_language",
            "sampling_temperature",
            "vocabulary_threads",
        ),
        (1, math.inf),
    ),
    "power": (0, math.inf),
}
_CHOICES = {
    "corpus": ("phrases", "catalogues"),
    "normalization": ("nmt_nfkc", "identity"),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class TranslationConfig(TrainConfig):
    """How a translation model is trained, and on which text.

    Attributes:
      languages: how many of the corpus' languages to use, largest first.
      train_pairs: sentence pairs of the embedded corpus to generate.
      heldout_per_language: evaluation pairs for each language, in each held-out set.
      sampling_temperature: T; pairs of a language with n of them are drawn with a probability
        proportional to n ** (1 / T). 1 takes the text as it is.
      character_coverage: share of the text's characters that the vocabularies have, 0.98 to 1.
      byte_fallback: other characters are spelled by their bytes, not lost.
      normalization: SentencePiece's rule for characters: "nmt_nfkc" writes variants of a character
        as one (full-width letters, ligatures), so no translation has them; "identity" keeps the
        text.
      vocabulary_threads: threads that train a vocabulary.
      power: exponent of the power law over languages; language i gets a share proportional to (i +
          1) ** -power.
      corpus: "phrases", generated, or "catalogues", human translations that Python packages ship.
      data: path of the user's own text (source, target, language per line, or plain text for a
          decoder-only model), "" for `corpus`.
      eval_data: path of a test set for the user's text, in the same form; "" to hold out a part of
          `data`.
    """

    FREE: ClassVar[tuple[str, ...]] = (
        *TrainConfig.FREE,
        "heldout_per_language",
        "data",
        "eval_data",
        "vocabulary_threads",
    )

    languages: int = 20
    train_pairs: int = 60_000
    heldout_per_language: int = 20
    sampling_temperature: float = 1.0
    character_coverage: float = 1.0
    byte_fallback: bool = False
    normalization: str = "nmt_nfkc"
    vocabulary_threads: int = 1
    power: float = 0.5
    corpus: str = "phrases"
    data: str = ""
    eval_data: str = ""

    def faults(self) -> list[str]:
        """What is wrong with the options, a clause each."""
        checks = (
            (
                f"character_coverage is {self.character_coverage}; SentencePiece takes 0.98 to 1",
                not 0.98 <= self.character_coverage <= 1,
            ),
            (
                "pack lays pairs into rows that stay as they are, so sampling_temperature cannot"
                " draw them by language; leave out one of the two",
                self.pack and self.sampling_temperature != 1,
            ),
        )
        return [
            *TrainConfig.faults(self),
            *out_of_bounds(self, _BOUNDS),
            *unknown_choices(self, _CHOICES),
            *(text for text, wrong in checks if wrong),
        ]


_Config = TypeVar("_Config", ModelConfig, TranslationConfig)


def override(config: _Config, options: Mapping[str, str]) -> _Config:
    """Return `config` with fields set from text, each parsed as the type of the field it replaces.

    Arguments:
      config: the configuration to start from.
      options: field name to text.

    Raises:
      SbpError: `unknown-option` for a field that does not exist or a text that does not parse.
    """
    values: dict[str, object] = {}
    for name, text in options.items():
        if name not in (known := [f.name for f in dataclasses.fields(config)]):
            raise SbpError(f"no option {name!r}{nearest(name, known)}", code="unknown-option")
        old = getattr(config, name)
        try:
            if isinstance(old, bool):
                values[name] = {"true": True, "false": False}[text.lower()]
            else:
                values[name] = type(old)(text)
        except (ValueError, KeyError):
            raise SbpError(
                f"option {name} needs a value like {old!r}, not {text!r}", code="unknown-option"
            ) from None
    return dataclasses.replace(config, **values)
