"""What the fields of configurations may be."""

from __future__ import annotations

import math
from collections.abc import Mapping

from sbp.errors import nearest
from sbp.moe.routers import ROUTERS

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
        ),
        (1, math.inf),
    ),
    "kv_heads": (0, math.inf),
    "rotary_base": (1, math.inf),
    "moe_every": (1, 3),
    "dropout": (0, 1),
    "label_smoothing": (0, 1),
    **dict.fromkeys(("aux_coefficient", "router_z_loss", "router_bias_rate"), (0, math.inf)),
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


def out_of_bounds(config: object, bounds: Bounds) -> list[str]:
    """One fault for each field that is out of its bounds, or not a number."""
    faults = []
    for name, (least, below) in bounds.items():
        value = getattr(config, name)
        if not least <= value < below:  # nor is NaN
            bound = "a finite number" if below == math.inf else f"below {below}"
            faults.append(f"{name} is {value}; it must be at least {least} and {bound}")
    return faults


def unknown(config: object, choices: Mapping[str, tuple[str, ...]]) -> list[str]:
    """One fault for each field whose value is none of its choices."""
    return [
        f"{name} is {chosen!r}{nearest(chosen, known)}; it is one of {', '.join(known)}"
        for name, known in choices.items()
        if (chosen := getattr(config, name)) not in known
    ]
