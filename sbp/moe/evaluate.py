"""Held-out translation quality: greedy decoding, and BLEU beside two baselines, copying the source
and counting (`sbp.moe.counting`)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
import sacrebleu

from sbp.moe.config import ModelConfig
from sbp.moe.corpus import Pair
from sbp.moe.data import encode_pairs, evaluation_batches
from sbp.moe.decode import make_greedy_decoder
from sbp.moe.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True, kw_only=True)
class Score:
    """BLEU of some languages: of the model, of copying the source, and of counting."""

    name: str
    languages: tuple[str, ...]
    sentences: int
    bleu: float
    copy_bleu: float
    counting_bleu: float

    @property
    def reaches_target(self) -> bool:
        """BLEU at least 20, and at least three times that of copying."""
        return self.bleu >= 20.0 and self.bleu >= 3.0 * self.copy_bleu


@dataclass(frozen=True, slots=True, kw_only=True)
class Evaluation:
    """The result on the held-out part.

    Attributes:
      overall: all languages together.
      groups: by rank of training text, most first.
      languages: the result of each language.
      samples: (pair, translation), a few languages spread over all ranks.
      left_out: held-out pairs longer than the model's sequences.
      signature: sacrebleu's, which makes the numbers reproducible.
    """

    overall: Score
    groups: tuple[Score, ...]
    languages: tuple[Score, ...]
    samples: tuple[tuple[Pair, str], ...]
    left_out: int
    signature: str


def translate(
    params: Any, pairs: Sequence[Pair], source: Tokenizer, target: Tokenizer, cfg: ModelConfig
) -> tuple[list[Pair], list[str]]:
    """Greedy translations of the pairs that fit the model, with those pairs; runs on one device.

    Arguments:
      params: parameters as host or single-device arrays.
    """
    encoded = encode_pairs(pairs, source, target, cfg)
    decoder = jax.jit(make_greedy_decoder(cfg))
    texts: list[str] = []
    for rows, batch in evaluation_batches(encoded, cfg):
        ids = np.asarray(decoder(params, batch.source)).reshape(cfg.sequences, -1)
        texts += target.decode(ids[: rows.stop - rows.start])
    return [pairs[i] for i in encoded.kept], texts


def language_groups(languages: Sequence[str], groups: int = 4) -> list[tuple[str, tuple[str, ...]]]:
    """Split languages, ordered by training text, into equal groups named by rank."""
    parts: list[list[int]] = [
        part.tolist() for part in np.array_split(np.arange(len(languages)), groups) if len(part)
    ]
    return [
        (f"rank {part[0] + 1}-{part[-1] + 1}", tuple(languages[i] for i in part)) for part in parts
    ]


def evaluate(
    pairs: Sequence[Pair],
    texts: Sequence[str],
    counted: Sequence[str],
    languages: Sequence[str],
    left_out: int = 0,
) -> Evaluation:
    """Score translations.

    Arguments:
      pairs: held-out pairs.
      texts: the model's translation of each.
      counted: the translation of each by `sbp.moe.counting`.
      languages: order of the languages, most training text first.
      left_out: how many held-out pairs were not translated.
    """
    metric = sacrebleu.BLEU(effective_order=False)

    def score(name: str, codes: Sequence[str]) -> Score:
        rows = [i for i, pair in enumerate(pairs) if pair.language in codes]
        references = [[pairs[i].target for i in rows]]
        return Score(
            name=name,
            languages=tuple(codes),
            sentences=len(rows),
            bleu=metric.corpus_score([texts[i] for i in rows], references).score,
            copy_bleu=metric.corpus_score([pairs[i].source for i in rows], references).score,
            counting_bleu=metric.corpus_score([counted[i] for i in rows], references).score,
        )

    present = [code for code in languages if any(pair.language == code for pair in pairs)]
    overall = score("all", present)
    spread = np.unique(np.linspace(0, len(present) - 1, min(len(present), 10)).astype(int))
    samples = []
    for place, rank in enumerate(spread):
        rows = [i for i, pair in enumerate(pairs) if pair.language == present[rank]]
        row = rows[
            (3 * place + 1) % len(rows)
        ]  # not always the same place: neighbours often share a kind of phrase
        samples.append((pairs[row], texts[row]))
    return Evaluation(
        overall=overall,
        groups=tuple(score(name, codes) for name, codes in language_groups(present)),
        languages=tuple(score(code, (code,)) for code in present),
        samples=tuple(samples),
        left_out=left_out,
        signature=str(metric.get_signature()),
    )
