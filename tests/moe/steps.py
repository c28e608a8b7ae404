"""Training steps on a mesh beside those on one device, and routers on given logits."""

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

import sbp
from sbp.moe.config import ModelConfig
from sbp.moe.layers import GatingMetrics, RouterLosses, route
from sbp.moe.routers import Scores
from sbp.moe.sharding import PLAIN
from sbp.moe.step import init_state, make_train_step, plan_train_step
from tests.moe.test_model import random_batch


def planned_step(model, train, axes) -> sbp.Plan:
    """The plan of a step on a mesh of simulated devices."""
    mesh = sbp.make_mesh([size for _, size in axes], [name for name, _ in axes])
    return plan_train_step(model, train, mesh)


def run_step(plan, state, batch) -> Any:
    """The state and the metrics after one step of a plan from a state of one device."""
    return plan(jax.device_put(jax.device_get(state), plan.in_shardings[0]), batch)


def assert_leaves_close(got, want, rtol, atol) -> None:
    """Each leaf to `rtol`, and to `atol` times its largest element."""
    for a, b in zip(*map(jax.tree.leaves, (got, want)), strict=True):
        np.testing.assert_allclose(a, b, rtol=rtol, atol=atol * float(np.abs(b).max()))


def assert_equal_to_one_device(run, steps, sharding=PLAIN) -> sbp.Plan:
    """Free-running, in float64: losses, routing, and all of the state. Returns the plan."""
    with jax.enable_x64(True):
        model = dataclasses.replace(run.model, dtype="float64")
        plan = planned_step(model, run.train, run.mesh)
        single = jax.jit(make_train_step(model, run.train, sharding))
        whole = init_state(model, run.train)
        split = jax.device_put(jax.device_get(whole), plan.in_shardings[0])
        for seed in range(steps):
            batch = random_batch(model, seed)
            whole, want = single(whole, batch)
            split, got = plan(split, batch)
            for name in ("loss", "aux", "grad_norm"):
                np.testing.assert_allclose(getattr(got, name), getattr(want, name), rtol=1e-9)
            for side in ("encoder", "decoder"):
                assert_same_counts(getattr(got, side), getattr(want, side))
        assert int(split.step) == steps
        assert_leaves_close(split, whole, 1e-7, 1e-7)
    return plan


class Routed(NamedTuple):
    """Gating with its slots written out: combine and dispatch are [G, S, E, C]."""

    combine: jax.Array
    dispatch: jax.Array
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
    return Routed(combine, dispatch, gating.losses, gating.metrics)


def assert_same_counts(got: GatingMetrics, want: GatingMetrics) -> None:
    """Counts are equal; the entropy, a sum of floats, is within rounding."""
    for name in GatingMetrics._fields:
        a, b = np.asarray(getattr(got, name)), np.asarray(getattr(want, name))
        if name == "entropy":
            np.testing.assert_allclose(a, b, rtol=1e-12 if b.dtype == np.float64 else 1e-5)
        else:
            np.testing.assert_array_equal(a, b)
