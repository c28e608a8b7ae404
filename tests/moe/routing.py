"""Routers on given logits, as the tests ask for them."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from sbp.moe.config import ModelConfig
from sbp.moe.gating import GatingMetrics, RouterLosses, route
from sbp.moe.routers import Scores


class Routed(NamedTuple):
    """Gating with its slots written out: combine and dispatch are [G, S, E, C]."""

    combine: jax.Array
    dispatch: jax.Array
    aux: jax.Array
    losses: RouterLosses
    metrics: GatingMetrics


def routed(
    logits, capacity, *, mask=None, rnd=None, noise=None, bias=None, **options: Any
) -> Routed:
    """`route` on logits [G, S, E].

    Arguments:
      logits: of the router.
      capacity: slots of an expert in a group.
      mask: [G, S], true for real tokens.
      rnd: the random numbers of the router, when training.
      noise, bias: what the router has besides.
      **options: fields of `ModelConfig`.
    """
    logits = jnp.asarray(logits)
    real = jnp.ones(logits.shape[:2]) if mask is None else jnp.asarray(mask)
    if options.get("router") == "expert_choice":
        options = {"decoder_router": "top2", **options}
    fields: dict[str, Any] = {"experts": logits.shape[-1], "aux_scale": "paper", **options}
    cfg = ModelConfig(**fields)
    seen = Scores(
        logits=logits,
        real=real.astype(logits.dtype),
        draw=None if rnd is None else jnp.asarray(rnd),
        noise=None if noise is None else jnp.asarray(noise),
        bias=None if bias is None else jnp.asarray(bias),
    )
    gating = route(seen, capacity, cfg)
    combine, dispatch = gating.slots()
    return Routed(combine, dispatch, gating.losses.balance, gating.losses, gating.metrics)


def assert_same_counts(got: GatingMetrics, want: GatingMetrics) -> None:
    """Counts are equal; the entropy, a sum of floats, is within rounding."""
    for name in GatingMetrics._fields:
        a, b = np.asarray(getattr(got, name)), np.asarray(getattr(want, name))
        if name == "entropy":
            np.testing.assert_allclose(a, b, rtol=1e-12 if b.dtype == np.float64 else 1e-5)
        else:
            np.testing.assert_array_equal(a, b)
