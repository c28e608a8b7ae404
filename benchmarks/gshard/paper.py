"""What the GShard paper (Lepikhin et al., 2020) says of its models: tables 1 to 3, and the figures
of its section 5 that its text gives as numbers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple


class Published(NamedTuple):
    """A row of the tables 1, 2 and 3.

    Attributes:
      weights: parameters, in units of 2**30 (the paper's "B").
      cores: TPU v3 cores.
      layers: of encoder and decoder together.
      experts: of a layer; `layers / 2` layers have them. (Two totals in the paper's table 1 are
        misprinted: 36684 for 36864 and 12228 for 12288.)
      steps_per_second: of training.
      tokens: of a batch.
      core_years: of training on 10**12 tokens.
      days: the same.
      bleu: average over 100 languages.
      tokens_to_loss: billions of tokens until the training loss is below 0.7, 0.6 and 0.5; those
        that were not reached are left out.
    """

    weights: float
    cores: int
    layers: int
    experts: int
    steps_per_second: float
    tokens: float
    core_years: float
    days: float
    bleu: float
    tokens_to_loss: tuple[float, ...]


PUBLISHED: Mapping[str, Published] = {
    "gshard-36l-2048e": Published(600, 2048, 36, 2048, 0.72, 4e6, 22.4, 4.0, 44.3, (82, 175, 542)),
    "gshard-12l-2048e": Published(200, 2048, 12, 2048, 2.15, 4e6, 7.5, 1.4, 41.3, (176, 484, 1780)),
    "gshard-36l-512e": Published(150, 512, 36, 512, 1.05, 1e6, 15.5, 11.0, 43.7, (66, 170, 567)),
    "gshard-12l-512e": Published(50, 512, 12, 512, 3.28, 1e6, 4.9, 3.5, 40.0, (141, 486)),
    "gshard-36l-128e": Published(37, 128, 36, 128, 0.67, 1e6, 6.1, 17.3, 39.0, (321, 1074)),
    "gshard-12l-128e": Published(12.5, 128, 12, 128, 2.16, 1e6, 1.9, 5.4, 36.7, (995,)),
}
"""The MoE models of the paper's tables 1, 2 and 3, by preset."""

LOSSES = (0.7, 0.6, 0.5)
"""Training losses of table 2, in nats per token."""

BASELINE_BLEU = 30.8
"""Average of the paper's 100 bilingual models of 0.4B weights each."""


def training_days(tokens: float, steps_per_second: float, total: float = 1e12) -> float:
    """Days of training.

    Arguments:
      tokens: of a batch.
      steps_per_second: of training.
      total: tokens of the whole training; each model of the paper saw 10**12 (section 4.3).

    >>> round(training_days(4e6, 0.72), 1)  # the paper's model of 600B parameters
    4.0
    """
    return total / tokens / steps_per_second / 86_400


def core_years(days: float, cores: int) -> float:
    """Years of one core.

    >>> round(core_years(4.02, 2048), 1)
    22.6
    """
    return days * cores / 365


class LayerPairShare(NamedTuple):
    """A bar of figure 8.

    Attributes:
      time: of an MoE layer and its neighbour, over that with 128 experts.
      all_to_all: share of it for dispatch and combine.
    """

    time: float
    all_to_all: float


LAYER_PAIR: Mapping[int, LayerPairShare] = {
    128: LayerPairShare(1.0, 0.16),
    2048: LayerPairShare(1.7, 0.36),
}
"""Figure 8 by experts, as far as the text of section 5.2 has numbers."""

RECOMPUTED: Mapping[int, float] = {12: 0.0, 24: 0.0, 36: 0.28, 60: 0.34}
"""Share of cycles for rematerialisation by layers (section 5.1), beside figure 7."""

ALL_TO_ALL_GROWTH = 9
"""Time of an all-to-all on 2048 partitions over that on 16 (section 5.3), beside figure 9."""
