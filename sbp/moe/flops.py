"""Floating-point operations of a training step, and the share of the devices' peak that they are.

The operations are those that the *model* needs, as in PaLM's model FLOPs utilisation (Chowdhery et
al., 2022, appendix B): products of matrices, two operations for a multiplication with its addition,
the backward pass as twice the forward pass. Rematerialisation, dispatch to experts, empty slots,
norms and the optimiser do not count; padding does.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import jax

from sbp.moe.config import ModelConfig
from sbp.moe.model import init_params


def forward_flops(cfg: ModelConfig) -> Mapping[str, float]:
    """Operations of the forward pass of one batch, by part of the model.

    A weight matrix takes two operations for each of its numbers and each token that meets it; of
    experts a token meets `ModelConfig.choices`. Attention takes two products of T * T' * A * D for
    each sequence.

    Arguments:
      cfg: the model.

    Returns:
      Parts `projections` and `scores` of attention, `dense`, `router`, `experts` and `logits`;
      their sum is the whole.

    >>> parts = forward_flops(ModelConfig())
    >>> parts["dense"] == 2 * 2048 * (128 + 128) * 3 * 2 * 1024 * 8192
    True
    """
    parts: dict[str, float] = dict.fromkeys(
        ("projections", "scores", "dense", "router", "experts", "logits"), 0.0
    )
    source, target = (cfg.sequences * n for n in (cfg.source_length, cfg.target_length))
    shapes: Any = jax.eval_shape(lambda: init_params(jax.random.key(0), cfg))
    parts["logits"] = 2.0 * target * math.prod(shapes["logits"].shape)
    rows = target + cfg.sequences * cfg.prefix_length
    for side, tokens, own in (("encoder", source, cfg), ("decoder", rows, cfg.decoder())):
        for path, leaf in jax.tree_util.tree_flatten_with_path(shapes.get(side, {}))[0]:
            layer, name = path[0].key, path[-1].key
            if len(leaf.shape) < 3:  # a norm of each layer
                continue
            is_memory = layer.startswith("cross") and name in ("key", "value")
            met = 2.0 * (source if is_memory else tokens) * math.prod(leaf.shape)
            if name.startswith("expert_"):
                met *= own.choices / cfg.experts
            parts[_part(layer, name)] += met
            if name == "query":
                looked = cfg.source_length if layer.startswith("cross") else tokens / cfg.sequences
                pairs, width = leaf.shape[0], math.prod(leaf.shape[2:])
                parts["scores"] += 2 * 2.0 * pairs * tokens * looked * width
    return parts


def _part(layer: str, name: str) -> str:
    """The part of the model that a weight belongs to."""
    if layer.startswith(("attention", "cross")):
        return "projections"
    if layer == "moe":
        return "router" if name in ("gate", "noise") else "experts"
    return "dense"


def step_flops(cfg: ModelConfig) -> float:
    """Operations of a training step: three times those of the forward pass."""
    return 3.0 * sum(forward_flops(cfg).values())


def utilisation(flops: float, seconds: float, peak: float) -> float:
    """Model FLOPs utilisation: operations of a step / (seconds of it * peak of all devices).

    Arguments:
      flops: of a step, from `step_flops`.
      seconds: of the step.
      peak: operations per second of all devices together.

    >>> utilisation(step_flops(ModelConfig()), 1.0, 2 * step_flops(ModelConfig()))
    0.5
    """
    return flops / (seconds * peak)
