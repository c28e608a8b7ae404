"""Configurations of the GShard MoE Transformer and of its training."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import Any, ClassVar

from sbp.errors import SbpError, counted, nearest
from sbp.kinds import NUMBER, WHOLE_NUMBER, show
from sbp.moe.routers import ROUTERS

PAD, BOS, EOS, UNK = 0, 1, 2, 3
"""Token ids that mean the same in every vocabulary."""


# ---- bounds of fields ---------------------------------------------------------------------------

Bounds = Mapping[str, tuple[float, float]]
"""The least value of a field, and what it must be below."""

MODEL_BOUNDS: Bounds = {
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
            "decoder_layers",
        ),
        (1, math.inf),
    ),
    "kv_heads": (0, math.inf),
    "rotary_base": (1, math.inf),
    "moe_every": (1, 3),
    "dropout": (0, 1),
    "label_smoothing": (0, 1),
    **dict.fromkeys(("aux_coefficient", "router_z_loss", "router_bias_rate"), (0, math.inf)),
    **dict.fromkeys(("encoder_layers", "experts"), (0, math.inf)),
    **dict.fromkeys(("experts_per_token", "shared_experts"), (0, math.inf)),
    "capacity_factor_per_choice": (0, math.inf),
    "eval_capacity_factor_per_choice": (0, math.inf),
}
MODEL_CHOICES = {
    "position": ("sinusoidal", "rotary"),
    "counter": ("lingvo", "paper"),
    "aux_scale": ("lingvo", "paper"),
    "router": tuple(ROUTERS),
    "decoder_router": ("", *ROUTERS),
    "normalise": ("before", "after", "none"),
    "capacity_rounding": ("router", "floor", "ceil", "round"),
    "dispatch": ("einsum", "gather", "sort"),
    "expert_activation": ("relu", "swiglu"),
    "dtype": ("float32", "bfloat16", "float16", "float64"),
    "param_dtype": ("float32", "bfloat16"),
    "rounding": ("nearest", "stochastic"),
}
TRAIN_BOUNDS: Bounds = {
    **dict.fromkeys(
        (
            "steps",
            "checkpoint_every",
            "warmup_steps",
            "min_dim_to_factor",
            "accumulate",
            "pipeline_microbatches",
            "max_skipped",
        ),
        (1, math.inf),
    ),
    **dict.fromkeys(("learning_rate", "ramp_steps", "clip_norm", "weight_decay"), (0, math.inf)),
    **dict.fromkeys(("beta1", "beta2"), (0, 1)),
    "zero": (0, 4),
    "seed": (0, 2**32),
}
TRAIN_CHOICES = {
    "optimizer": ("adafactor", "adamw"),
    "schedule": ("sqrt_decay", "constant", "linear", "cosine"),
}


def out_of_bounds(config: Any, bounds: Bounds) -> list[str]:
    """One fault for each field of a dataclass that is not a number, or out of its bounds."""
    faults = []
    kinds: Mapping[str, object] = {f.name: f.type for f in fields(config)}
    for name, (least, below) in bounds.items():
        value, kind = getattr(config, name), WHOLE_NUMBER if kinds[name] == "int" else NUMBER
        if not kind.accepts(value):
            faults.append(f"{name} must be {kind.what}, got {show(value)}")
        elif not least <= value < below:  # nor is NaN
            bound = "a finite number" if below == math.inf else f"below {below}"
            faults.append(f"{name} is {value}; it must be at least {least} and {bound}")
    return faults


def unknown_choices(config: object, choices: Mapping[str, tuple[str, ...]]) -> list[str]:
    """One fault for each field whose value is none of its choices."""
    return [
        f"{name} is {chosen!r}{nearest(chosen, known)}; it is one of {', '.join(known)}"
        for name, known in choices.items()
        if (chosen := getattr(config, name)) not in known
    ]


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """Shape of the encoder-decoder, or of a decoder-only model.

    Defaults are GShard's (paper section 4.1 and appendix A.2).

    The number of groups is a hyper-parameter of the *model*: a group routes its own tokens with its
    own capacity, so the loss depends on `groups` and never on the mesh.

    Attributes:
      model_dim: M, the width of the residual stream.
      ffn_dim: H of the dense feed-forward layers.
      expert_dim: H of each expert.
      heads, head_dim: attention heads and their width.
      kv_heads: heads of keys and values, which divide `heads` (grouped-query attention); 0 for as
        many.
      position: how tokens know their places: "sinusoidal", added to their embeddings, or "rotary",
        in attention to the own side.
      rotary_base: of the wavelengths of "rotary".
      experts: E, experts per MoE layer; 0 for a dense model, which has layers of 2 * `expert_dim`
        in their place: as many FLOPs for a token as two experts.
      encoder_layers, decoder_layers: feed-forward layers on each side, which `moe_every` divides.
        No encoder layers make a decoder-only model: source and target are one row, the source as a
        prefix, with one vocabulary.
      moe_every: which layers are MoE layers: 2 for every other one, 1 for all.
      source_vocab, target_vocab: rows of the two untied embedding tables; equal in a decoder-only
        model, which has one.
      source_length, target_length: tokens per sequence, padding included.
      groups: G.
      sequences_per_group: n; a group has S = n * length tokens.
      router: how tokens choose experts, by its name in `ROUTERS` of `sbp/moe/routers.py`.
      decoder_router: the same in the decoder; "" for `router`.
      experts_per_token: choices of each token, on average in "expert_choice"; 0 for the router's
        own number, 2 but for "switch".
      normalise: whether the weights of "top2" and "top_k" are divided by their sum over the choices
        "before" capacity and random routing cut any, as in the paper, "after", or not: "none".
      router_z_loss: coefficient of the router's z-loss.
      router_bias_rate: change of a bias of "sigmoid" in a step.
      dispatch: how tokens come to experts: "einsum" (Algorithm 2), "gather" (section 3.2), or
        "sort", which has no capacity.
      shared_experts: experts that all tokens go to besides, as one of their widths together.
      expert_activation: "relu", or "swiglu" with one weight more.
      capacity_factor_per_choice: slots of an expert in a group are `experts_per_token` * S / E *
        this; with top-2, 1.0 is the paper's 2S/E. "Per choice" because other libraries count all
        choices in one factor.
      eval_capacity_factor_per_choice: the same when not training.
      capacity_rounding: "floor", "ceil", "round", or as the "router" has it: ceil for "switch",
        floor for the others.
      counter: "lingvo", where only dispatched second choices take a slot, or "paper", the literal
          listing.
      aux_scale: "lingvo" (E^2 times the paper's, 1.0 when balanced) or "paper".
      aux_coefficient: k in L = nll + k * sum of the layers' auxiliary losses.
      dropout: rate on embeddings, residual branches and attention weights.
      label_smoothing: probability mass spread over the target vocabulary.
      remat: recompute a layer pair in the backward pass.
      dtype: of activations and products. Norms, softmax, router and loss compute in float32, or in
        float64 when this is; weights are cast where they are used.
      param_dtype: of parameters, between steps; float64 when `dtype` is. The statistics and updates
        of the optimiser are float32.
      rounding: "nearest", or "stochastic" for parameters of bfloat16: up or down at random, so that
        updates smaller than half a step of the type are not lost.
    """

    model_dim: int = 1024
    ffn_dim: int = 8192
    expert_dim: int = 8192
    heads: int = 16
    head_dim: int = 128
    kv_heads: int = 0
    position: str = "sinusoidal"
    rotary_base: float = 10_000.0
    experts: int = 128
    encoder_layers: int = 6
    decoder_layers: int = 6
    moe_every: int = 2
    source_vocab: int = 64_000
    target_vocab: int = 32_000
    source_length: int = 128
    target_length: int = 128
    groups: int = 128
    sequences_per_group: int = 16
    router: str = "top2"
    decoder_router: str = ""
    experts_per_token: int = 0
    normalise: str = "before"
    router_z_loss: float = 0.0
    router_bias_rate: float = 0.001
    dispatch: str = "einsum"
    shared_experts: int = 0
    expert_activation: str = "relu"
    capacity_factor_per_choice: float = 1.0
    eval_capacity_factor_per_choice: float = 2.0
    capacity_rounding: str = "router"
    counter: str = "lingvo"
    aux_scale: str = "lingvo"
    aux_coefficient: float = 0.01
    dropout: float = 0.1
    label_smoothing: float = 0.1
    remat: bool = True
    dtype: str = "float32"
    param_dtype: str = "float32"
    rounding: str = "nearest"

    def __post_init__(self) -> None:
        alone = out_of_bounds(self, MODEL_BOUNDS) + unknown_choices(self, MODEL_CHOICES)
        if faults := alone or _senseless(self):
            raise SbpError("; ".join(faults), code="unknown-option")

    @property
    def key_heads(self) -> int:
        """Heads of keys and values."""
        return self.kv_heads or self.heads

    @property
    def prefix_length(self) -> int:
        """Tokens of the source that come before the target in the decoder's rows."""
        return 0 if self.encoder_layers else self.source_length

    @property
    def choices(self) -> int:
        """Experts of a token; on average, where experts choose."""
        return self.experts_per_token or ROUTERS[self.router].choices

    def decoder(self) -> ModelConfig:
        """The configuration as the decoder's layers have it."""
        return replace(self, router=self.decoder_router or self.router)

    @property
    def weight_dtype(self) -> str:
        """The dtype of parameters between steps."""
        return "float64" if self.dtype == "float64" else self.param_dtype

    @property
    def precision(self) -> str:
        """What computes in which dtype, as a line."""
        wide = "float64" if self.dtype == "float64" else "float32"
        rounded = ", rounded at random" if self.rounding == "stochastic" else ""
        return (
            f"activations and products {self.dtype}; norms, softmax, router, loss and optimiser"
            f" {wide}; parameters {self.weight_dtype}{rounded}"
        )

    @property
    def sequences(self) -> int:
        """Sequence pairs per batch."""
        return self.groups * self.sequences_per_group


def _senseless(cfg: ModelConfig) -> list[str]:
    """The first fault of options that make no sense together, or else all faults of the routers."""
    checks: list[tuple[str, object]] = [
        *(
            (
                f"{name} is {layers}; with moe_every 2, layers are pairs of a dense and an MoE"
                " layer, so it must be even",
                cfg.moe_every == 2 and layers % 2,
            )
            for name, layers in (
                ("encoder_layers", cfg.encoder_layers),
                ("decoder_layers", cfg.decoder_layers),
            )
        ),
        ("experts is 1; a router needs at least 2 (0 makes a dense model)", cfg.experts == 1),
        (
            f"param_dtype is {cfg.param_dtype}, but dtype float64 needs parameters of float64",
            cfg.dtype == "float64" and cfg.param_dtype != "float32",
        ),
        (
            'rounding "stochastic" needs param_dtype "bfloat16"; set one of the two',
            cfg.rounding == "stochastic" and cfg.param_dtype != "bfloat16",
        ),
        (
            f"kv_heads is {cfg.kv_heads}; it must divide the {cfg.heads} heads",
            cfg.heads % cfg.key_heads,
        ),
        (
            f"head_dim is {cfg.head_dim}; rotary positions turn pairs, so it must be even",
            cfg.position == "rotary" and cfg.head_dim % 2,
        ),
        (
            f"source_vocab is {cfg.source_vocab} and target_vocab {cfg.target_vocab}; a"
            " decoder-only model (encoder_layers 0) has one vocabulary: set both to the same",
            not cfg.encoder_layers and cfg.source_vocab != cfg.target_vocab,
        ),
        (
            "decoder_router is for a model with an encoder; set router",
            not cfg.encoder_layers and cfg.decoder_router,
        ),
        (
            "shared_experts needs routed experts; set experts, or use a larger ffn_dim",
            not cfg.experts and cfg.shared_experts,
        ),
    ]
    return [text for text, wrong in checks if wrong][:1] or (_misrouted(cfg) if cfg.experts else [])


def _misrouted(cfg: ModelConfig) -> list[str]:
    """One fault for each option that does not fit the routers of a model with experts."""
    in_decoder, asked = cfg.decoder_router or cfg.router, cfg.experts_per_token
    used = {cfg.router, in_decoder}
    checks: list[tuple[str, object]] = [
        (
            'an expert of "expert_choice" looks at later tokens, which a decoder must not; set'
            f' {"decoder_router" if cfg.encoder_layers else "router"} to another, such as "top_k"',
            in_decoder == "expert_choice",
        )
    ]
    for name in sorted(used):
        own = ROUTERS[name]
        count = asked or own.choices
        checks += [
            (
                f'router "{name}" uses {counted(own.choices, "expert")} for each token, but'
                f' experts_per_token is {asked}; use router "top_k" for another number',
                own.fixed and count != own.choices,
            ),
            (
                f"experts_per_token is {count}, but there are {counted(cfg.experts, 'expert')}",
                count > cfg.experts,
            ),
            (
                f'normalise is "{cfg.normalise}", but the weights of router "{name}" are fixed; set'
                ' normalise to "before", or router to "top2" or "top_k"',
                cfg.normalise != "before" and not own.normalised,
            ),
        ]
    checks += [
        (
            'counter "paper" works only with router "top2" and a dispatch with a capacity,'
            ' "einsum" or "gather"; set counter to "lingvo"',
            cfg.counter == "paper" and (used != {"top2"} or cfg.dispatch == "sort"),
        ),
        (
            'aux_scale "paper" does not work with router "noisy_top_k"; set it to "lingvo"',
            cfg.aux_scale == "paper" and "noisy_top_k" in used,
        ),
        (
            'dispatch "sort" does not work with router "expert_choice", which needs a capacity; set'
            ' dispatch to "einsum" or "gather"',
            cfg.dispatch == "sort" and "expert_choice" in used,
        ),
    ]
    return [text for text, wrong in checks if wrong]


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainConfig:
    """How a model is trained.

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
      pipeline_microbatches: parts of each microbatch that go through the stages of a pipeline, one
        after the other; they divide its groups.
      zero: stage of ZeRO: 1 and 2 split the optimiser's state over the devices, 3 the parameters
        too; 0 leaves both to the planner.
      sequence_parallel: split the tokens of each group on the mesh axis `model`, between layers.
      max_skipped: steps in a row with a loss or gradients that are not finite, each of which
        changes nothing, after which training stops.
      seed: of the parameters, the dropout, the routing and the order of the data.
      pack: rows of a batch hold several pairs of sequences, which do not see each other.
      checkpoint_every: steps between checkpoints.
    """

    FREE: ClassVar[tuple[str, ...]] = (
        "steps",
        "checkpoint_every",
        "max_skipped",
        "zero",
        "sequence_parallel",
    )
    """Options that a resumed run may change: they alter neither the state nor what comes next, but
    where it lies."""

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
    pipeline_microbatches: int = 1
    zero: int = 0
    sequence_parallel: bool = False
    max_skipped: int = 10
    seed: int = 0
    pack: bool = False
    checkpoint_every: int = 200

    def __post_init__(self) -> None:
        if faults := self.faults():
            raise SbpError("; ".join(faults), code="unknown-option")

    def faults(self) -> list[str]:
        """What is wrong with the options, a clause each."""
        return out_of_bounds(self, TRAIN_BOUNDS) + unknown_choices(self, TRAIN_CHOICES)
