"""A gradient that is scattered before a loop is not left whole in memory while the loop runs."""

import pytest
from jax.sharding import PartitionSpec

from benchmarks.gshard_bytes import held_bytes
from benchmarks.steps.program import aval, training
from benchmarks.steps.transformer import Axes, Shape, language_model_loss, specs_of, weights_of
from sbp.run import interpret

pytestmark = pytest.mark.tpu

SHAPE = Shape(
    layers=2,
    width=2048,
    heads=16,
    hidden=5632,
    vocabulary=32000,
    batch=32,
    length=2048,
    gated=True,
    scanned=True,
)


def held():
    """Bytes that a step of a Llama holds whose weights are split over all devices."""
    axes = Axes(batch="d", weights="d")
    step = training(
        loss=language_model_loss(SHAPE, axes),
        params=weights_of(SHAPE),
        specs=specs_of(SHAPE, axes),
        batch=(aval(SHAPE.batch, SHAPE.length, dtype="int32"),),
        batch_specs=(PartitionSpec("d", None),),
        mesh=(("d", 16),),
    )
    return held_bytes(step.planned(step.devices()).lower().compile())


def test_the_gradient_of_the_table_is_not_held_whole_in_the_backward_loop(monkeypatch):
    early = held()
    monkeypatch.setattr(interpret, "computed_before", lambda *_: {})
    whole = 4 * SHAPE.vocabulary * SHAPE.width
    assert held() - early > 0.8 * whole
