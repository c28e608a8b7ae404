"""Configurations of the GShard MoE Transformer and of its training runs."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TypeVar

from sbp.errors import SbpError, nearest

_Bounds = Mapping[str, tuple[float, float]]
"""The least value of a field, and what it must be below."""

_MODEL_BOUNDS: _Bounds = {
    **dict.fromkeys(
        (
            "model_dim",
            "ffn_dim",
            "expert_dim",
            "heads",
            "head_dim",
            "source_vocab",
            "target_vocab",
            "source_length",
            "target_length",
            "groups",
            "sequences_per_group",
        ),
        (1, math.inf),
    ),
    "dropout": (0, 1),
    "label_smoothing": (0, 1),
    "aux_coefficient": (0, math.inf),
    "capacity_factor_per_choice": (0, math.inf),
    "eval_capacity_factor_per_choice": (0, math.inf),
}
_MODEL_CHOICES = {
    "counter": ("lingvo", "paper"),
    "aux_scale": ("lingvo", "paper"),
    "dtype": ("float32", "bfloat16", "float16", "float64"),
}
_TRAIN_BOUNDS: _Bounds = {
    **dict.fromkeys(
        (
            "steps",
            "checkpoint_every",
            "warmup_steps",
            "min_dim_to_factor",
            "languages",
            "train_pairs",
            "heldout_per_language",
            "accumulate",
            "max_skipped",
        ),
        (1, math.inf),
    ),
    **dict.fromkeys(
        ("learning_rate", "ramp_steps", "power", "clip_norm", "weight_decay"), (0, math.inf)
    ),
    **dict.fromkeys(("beta1", "beta2"), (0, 1)),
    "seed": (0, 2**32),
}
_TRAIN_CHOICES = {
    "optimizer": ("adafactor", "adamw"),
    "schedule": ("sqrt_decay", "constant", "linear", "cosine"),
    "corpus": ("phrases", "catalogues"),
}


def _out_of_bounds(config: object, bounds: _Bounds) -> list[str]:
    """One fault for each field that is out of its bounds, or not a number."""
    faults = []
    for name, (least, below) in bounds.items():
        value = getattr(config, name)
        if not least <= value < below:  # nor is NaN
            bound = "a finite number" if below == math.inf else f"below {below}"
            faults.append(f"{name} is {value}; it must be at least {least} and {bound}")
    return faults


def _unknown(config: object, choices: Mapping[str, tuple[str, ...]]) -> list[str]:
    """One fault for each field whose value is none of its choices."""
    return [
        f"{name} is {chosen!r}{nearest(chosen, known)}; it is one of {', '.join(known)}"
        for name, known in choices.items()
        if (chosen := getattr(config, name)) not in known
    ]


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """Shape of the encoder-decoder. Defaults are GShard's (paper section 4.1 and appendix A.2).

    The number of groups is a hyper-parameter of the *model*: a group routes its own tokens with its
    own capacity, so the loss depends on `groups` and never on the mesh.

    Attributes:
      model_dim: M, the width of the residual stream.
      ffn_dim: H of the dense feed-forward layers.
      expert_dim: H of each expert.
      heads, head_dim: attention heads and their width.
      experts: E, experts per MoE layer; 0 for a dense model, which has layers of 2 * `expert_dim`
        in their place: as many FLOPs for a token as two experts.
      encoder_layers, decoder_layers: feed-forward layers on each side, even: every other one is an
      MoE layer.
      source_vocab, target_vocab: rows of the two untied embedding tables.
      source_length, target_length: tokens per sequence, padding included.
      groups: G.
      sequences_per_group: n; a group has S = n * length tokens.
      capacity_factor_per_choice: slots of an expert in a group are floor(2 * S / E * this); 1.0 is
        the paper's 2S/E. "Per choice" because other libraries count both choices in one factor.
      eval_capacity_factor_per_choice: the same when not training.
      counter: "lingvo", where only dispatched second choices take a slot, or "paper", the literal
          listing.
      aux_scale: "lingvo" (E^2 times the paper's, 1.0 when balanced) or "paper".
      aux_coefficient: k in L = nll + k * sum of the layers' auxiliary losses.
      dropout: rate on embeddings, residual branches and attention weights.
      label_smoothing: probability mass spread over the target vocabulary.
      remat: recompute a layer pair in the backward pass.
      dtype: of parameters and activations; the router is float32, or float64 when this is.
    """

    model_dim: int = 1024
    ffn_dim: int = 8192
    expert_dim: int = 8192
    heads: int = 16
    head_dim: int = 128
    experts: int = 128
    encoder_layers: int = 6
    decoder_layers: int = 6
    source_vocab: int = 64_000
    target_vocab: int = 32_000
    source_length: int = 128
    target_length: int = 128
    groups: int = 128
    sequences_per_group: int = 16
    capacity_factor_per_choice: float = 1.0
    eval_capacity_factor_per_choice: float = 2.0
    counter: str = "lingvo"
    aux_scale: str = "lingvo"
    aux_coefficient: float = 0.01
    dropout: float = 0.1
    label_smoothing: float = 0.1
    remat: bool = True
    dtype: str = "float32"

    def __post_init__(self) -> None:
        faults = _out_of_bounds(self, _MODEL_BOUNDS)
        for name in ("encoder_layers", "decoder_layers"):
            if (count := getattr(self, name)) < 2 or count % 2:
                faults.append(
                    f"{name} is {count}; layers come in pairs (dense, MoE), so it must be even and"
                    " positive"
                )
        if self.experts < 2 and self.experts != 0:
            faults.append(
                f"experts is {self.experts}; top-2 gating needs at least 2 (0 makes a dense model)"
            )
        faults += _unknown(self, _MODEL_CHOICES)
        if faults:
            raise SbpError("; ".join(faults), code="unknown-option")

    @property
    def sequences(self) -> int:
        """Sequence pairs per batch."""
        return self.groups * self.sequences_per_group


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainConfig:
    """One training run.

    Attributes:
      steps: optimiser steps in all.
      optimizer: "adafactor", or "adamw".
      schedule: "sqrt_decay", the paper's `learning_rate / sqrt(max(step, warmup_steps))`;
        "constant"; "linear" or "cosine", which fall from `learning_rate` to zero at `steps`.
      learning_rate: factor of the schedule.
      warmup_steps: steps at the flat rate before the square-root decay; GShard's is 10 000.
      ramp_steps: steps of a linear ramp from zero before any schedule; GShard has none.
      min_dim_to_factor: smallest dim for which Adafactor keeps factored statistics.
      beta1, beta2, weight_decay: of AdamW.
      clip_norm: gradients are scaled down to this norm of all of them together; 0 for never.
      accumulate: microbatches of a step, which divide the groups; gradients are reduced over
        devices once.
      max_skipped: steps in a row with a loss or gradients that are not finite, each of which
        changes nothing, after which training stops.
      seed: of the parameters, the dropout, the routing and the order of the data.
      languages: how many of the corpus' languages to use, largest first.
      train_pairs: sentence pairs of the embedded corpus to generate.
      heldout_per_language: evaluation pairs for each language, in each held-out set.
      power: exponent of the power law over languages; language i gets a share proportional to (i +
          1) ** -power.
      checkpoint_every: steps between checkpoints.
      corpus: "phrases", generated, or "catalogues", human translations that Python packages ship.
      data: path of the user's own parallel text (source, target, language per line), "" for
          `corpus`.
      eval_data: path of a test set for the user's text, in the same form; "" to hold out a part of
          `data`.
    """

    steps: int = 1000
    optimizer: str = "adafactor"
    schedule: str = "sqrt_decay"
    learning_rate: float = 1.0
    warmup_steps: int = 10_000
    ramp_steps: int = 0
    min_dim_to_factor: int = 128
    beta1: float = 0.9
    beta2: float = 0.98
    weight_decay: float = 0.0
    clip_norm: float = 0.0
    accumulate: int = 1
    max_skipped: int = 10
    seed: int = 0
    languages: int = 20
    train_pairs: int = 60_000
    heldout_per_language: int = 20
    power: float = 0.5
    checkpoint_every: int = 200
    corpus: str = "phrases"
    data: str = ""
    eval_data: str = ""

    def __post_init__(self) -> None:
        faults = _out_of_bounds(self, _TRAIN_BOUNDS) + _unknown(self, _TRAIN_CHOICES)
        if faults:
            raise SbpError("; ".join(faults), code="unknown-option")


_Config = TypeVar("_Config", ModelConfig, TrainConfig)


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
