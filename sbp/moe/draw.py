"""Draws the parameters of layers."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from sbp.moe.config import ModelConfig
from sbp.moe.layers import wide_dtype
from sbp.moe.routers import ROUTERS

Tree = Any


@dataclass(frozen=True, slots=True, kw_only=True)
class Draw:
    """Draws parameters of a model, each with the next key; leaves of layer pairs are stacked on a
    leading dim."""

    cfg: ModelConfig
    keys: Iterator[jax.Array]

    def ones(self, *shape: int) -> jax.Array:
        return jnp.ones(shape, wide_dtype(self.cfg.weight_dtype))

    def normal(self, stddev: float, *shape: int) -> jax.Array:
        dtype = jnp.dtype(self.cfg.weight_dtype)
        return stddev * jax.random.normal(next(self.keys), shape, dtype)

    def uniform(self, fan_in: int, *shape: int) -> jax.Array:
        limit = math.sqrt(3.0 / fan_in)
        dtype = jnp.dtype(self.cfg.weight_dtype)
        return jax.random.uniform(next(self.keys), shape, dtype, -limit, limit)

    def attention(self, pairs: int) -> Tree:
        m, a, d = self.cfg.model_dim, self.cfg.heads, self.cfg.head_dim
        k = self.cfg.key_heads
        return {
            "norm": self.ones(pairs, m),
            "query": self.normal((m * d) ** -0.5, pairs, m, a, d),
            "key": self.normal(m**-0.5, pairs, m, k, d),
            "value": self.normal(m**-0.5, pairs, m, k, d),
            "output": self.normal((a * d) ** -0.5, pairs, a, d, m),
        }

    def feed_forward(self, pairs: int, hidden: int) -> Tree:
        m = self.cfg.model_dim
        return {
            "norm": self.ones(pairs, m),
            "w_in": self.uniform(m, pairs, m, hidden),
            "w_out": self.uniform(hidden, pairs, hidden, m),
        }

    def experts(self, pairs: int, router: str) -> Tree:
        m, e, h = self.cfg.model_dim, self.cfg.experts, self.cfg.expert_dim
        return {
            "norm": self.ones(pairs, m),
            "gate": self.uniform(m, pairs, m, e).astype(wide_dtype(self.cfg.weight_dtype)),
            "expert_in": self.uniform(m, pairs, e, m, h),
            "expert_out": self.uniform(h, pairs, e, h, m),
            **self.experts_besides(pairs, router),
        }

    def experts_besides(self, pairs: int, router: str) -> Tree:
        """What other experts than the paper's have, and other routers."""
        cfg, m, h = self.cfg, self.cfg.model_dim, self.cfg.expert_dim
        dtype, tree, shared = wide_dtype(cfg.weight_dtype), {}, h * cfg.shared_experts
        for name in ROUTERS[router].weights:
            shape = (cfg.experts,) if name == "bias" else (m, cfg.experts)
            tree[name] = jnp.zeros((pairs, *shape), dtype)
        names = ("in", "linear") if cfg.expert_activation == "swiglu" else ("in",)
        if "linear" in names:
            tree["expert_linear"] = self.uniform(m, pairs, cfg.experts, m, h)
        if shared:
            tree |= {f"shared_{name}": self.uniform(m, pairs, m, shared) for name in names}
            tree["shared_out"] = self.uniform(shared, pairs, shared, m)
        return tree

    def stack(self, layers: int, router: str, *, cross: bool) -> Tree:
        """Layer pairs of one side, or layers where all have experts."""
        cfg, tree, pairs = self.cfg, {}, layers // self.cfg.moe_every
        if cfg.moe_every == 2:
            tree["attention1"] = self.attention(pairs)
            tree["dense"] = self.feed_forward(pairs, cfg.ffn_dim)
        tree["attention2"] = self.attention(pairs)
        if cfg.experts:
            tree["moe"] = self.experts(pairs, router)
        else:
            tree["wide"] = self.feed_forward(pairs, 2 * cfg.expert_dim)
        if cross:
            names = ("cross1", "cross2")[2 - cfg.moe_every :]
            tree |= {name: self.attention(pairs) for name in names}
        return tree
