"""A wrong annotation in the MoE layer of the whole encoder-decoder."""

from __future__ import annotations

import inspect

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AbstractMesh

import sbp
from examples.gshard.presets import preset
from sbp.moe import model as moe_model
from sbp.moe import stack
from sbp.moe.gating import gate
from sbp.moe.sharding import Sharding
from sbp.moe.step import batch_shapes
from tests.explain.expected import check_wording


def wrong_layer(params, x, mask, cfg, *, key=None, sharding):
    """`sbp.moe.experts.moe_feed_forward` with one annotation too many: dispatched tokens are split
    on their slots, not on their experts."""
    gating = gate(params, x, mask, cfg, key=key)
    combine, dispatch = gating.slots()
    expert_in, expert_out = (
        sharding.split_experts(params["expert_in"]),
        sharding.split_experts(params["expert_out"]),
    )
    dispatched = jnp.einsum("gsec,gsm->egcm", dispatch.astype(x.dtype), x)
    dispatched = sbp.annotate(dispatched, expert=sbp.S(1))
    hidden = jax.nn.relu(jnp.einsum("egcm,emh->egch", dispatched, expert_in))  # the fault
    outputs = jnp.einsum("egch,ehm->gecm", hidden, expert_out)
    combined = jnp.einsum("gsec,gecm->gsm", combine.astype(x.dtype), outputs)
    return sharding.split_groups(combined), gating.losses, gating.metrics


@pytest.mark.parametrize("boxing", ["explicit", "reduce"])
def test_a_conflicting_annotation_in_the_moe_layer(boxing, monkeypatch):
    """The loss of the whole encoder-decoder on a mesh of 8: the line of the fault, both pins, and
    an edit with its price."""
    monkeypatch.setattr(stack, "moe_feed_forward", wrong_layer)
    model = preset("tiny-test").model
    sharding = Sharding.over(("data", "expert"), ("expert",))
    params = jax.eval_shape(lambda: moe_model.init_params(jax.random.key(0), model))
    mesh = AbstractMesh((2, 4), ("data", "expert"))
    loss = sbp.jit(
        lambda params, batch: moe_model.loss_fn(params, batch, model, sharding=sharding)[0],
        mesh,
        boxing=boxing,
    )
    found = loss.check(params, batch_shapes(model)).diagnostics
    lines, start = inspect.getsourcelines(wrong_layer)
    line = start + next(i for i, text in enumerate(lines) if text.rstrip().endswith("# the fault"))
    d = next(
        d
        for d in found
        if d.primary is not None and (d.primary.span.file, d.primary.span.line) == (__file__, line)
    )
    assert d.code in ("no-signature", "annotation-conflict") and "mesh axis `expert`" in d.title
    assert d.primary is not None
    text = lines[line - start][d.primary.span.column - 1 : d.primary.span.end_column - 1]
    assert text == 'jnp.einsum("egcm,emh->egch", dispatched, expert_in)'
    # The expert weights' pin is to blame with the added pin; under `explicit` also with the pin of
    # the tokens, which come split as it asks.
    assert any(label.text == "x is S(0) on `expert`, a batch dim" for label in d.labels)
    told = [label.text for label in d.labels]
    assert any("dispatched is S(1)" in text for text in told), d.text()
    check_wording(d)
    edits = [h for h in d.helps if h.text.startswith("drop `self.experts(x, ")]
    assert edits and edits[0].bytes_per_device > 0
