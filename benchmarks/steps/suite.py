"""The steps that are compared."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from jax.sharding import PartitionSpec as P

from benchmarks.steps import by_hand
from benchmarks.steps.experts import moe_capacity, moe_dropless, moe_dropless_region
from benchmarks.steps.images import resnet, unet
from benchmarks.steps.kernels import gpt_flash
from benchmarks.steps.program import Mark, Step, aval, training, training_step
from benchmarks.steps.serving import decoding
from benchmarks.steps.stages import pipeline
from benchmarks.steps.transformer import (
    Axes,
    Shape,
    classifier_loss,
    contrastive_loss,
    language_model_loss,
    specs_of,
    weights_of,
)

STAGES = (("x", 4), ("y", 4))
STAGED = Axes(batch=("x", "y"), weights=("x", "y"))
"""A mesh of 16 chips as a hand-written program with split weights sees it."""


def _language_model(s: Shape, a: Axes, mesh: tuple[tuple[str, int], ...], topology: str) -> Step:
    step = training(
        loss=language_model_loss(s, a),
        params=weights_of(s),
        specs=specs_of(s, a),
        batch=(aval(s.batch, s.length, dtype="int32"),),
        batch_specs=(P(a.batch, None),),
        mesh=mesh,
        topology=topology,
    )
    if a.length:
        return step
    if a.weights == "d" and a.tensor is None:
        return replace(step, by_hand=by_hand.language_model_step(s, STAGED), stages=STAGES)
    return replace(step, by_hand=by_hand.language_model_step(s, a))


def gpt_data() -> Step:
    """GPT, data parallel. Weights and moments are on every device."""
    s = Shape(layers=4, width=1024, heads=16, hidden=4096, vocabulary=32768, batch=64, length=1024)
    return _language_model(s, Axes(batch="d"), (("d", 16),), "v5e:4x4")


def megatron() -> Step:
    """GPT, tensor and data parallel. Heads and hidden units are split over one axis."""
    s = Shape(layers=4, width=2048, heads=16, hidden=8192, vocabulary=32768, batch=16, length=2048)
    return _language_model(s, Axes(batch="d", tensor="t"), (("d", 4), ("t", 4)), "v5e:4x4")


def llama_fsdp() -> Step:
    """Llama, fully sharded. A scan over layers, whose weights are gathered one by one."""
    s = Shape(
        layers=8,
        width=2048,
        heads=16,
        hidden=5632,
        vocabulary=32000,
        batch=32,
        length=2048,
        gated=True,
        scanned=True,
    )
    return _language_model(s, Axes(batch="d", weights="d"), (("d", 16),), "v5e:4x4")


def fsdp_tensor() -> Step:
    """Llama, tensor parallel and fully sharded. Weights are split over both axes."""
    s = Shape(
        layers=8,
        width=4096,
        heads=32,
        hidden=11264,
        vocabulary=32000,
        batch=16,
        length=2048,
        gated=True,
        scanned=True,
    )
    a = Axes(batch="d", weights="d", tensor="t")
    return _language_model(s, a, (("d", 4), ("t", 4)), "v5e:4x4")


def vocabulary() -> Step:
    """Decoder of 262,144 tokens, split by vocabulary."""
    s = Shape(
        layers=2,
        width=2048,
        heads=16,
        hidden=8192,
        vocabulary=262144,
        batch=8,
        length=2048,
        gated=True,
    )
    return _language_model(s, Axes(batch="d", tensor="t"), (("d", 2), ("t", 4)), "v5e:2x4")


def accumulation() -> Step:
    """Llama, fully sharded, gradients accumulated. Those of eight microbatches are added up in a
    scan."""
    s = Shape(
        layers=4,
        width=2048,
        heads=16,
        hidden=5632,
        vocabulary=32000,
        batch=16,
        length=2048,
        gated=True,
        scanned=True,
    )
    a = Axes(batch="d", weights="d")
    step = training(
        loss=language_model_loss(s, a),
        params=weights_of(s),
        specs=specs_of(s, a),
        batch=(aval(8, s.batch, s.length, dtype="int32"),),
        batch_specs=(P(None, a.batch, None),),
        mesh=(("d", 16),),
        microbatches=True,
    )
    return replace(step, by_hand=by_hand.accumulating_step(s, STAGED), stages=STAGES)


def vit() -> Step:
    """Vision transformer, data parallel."""
    s = Shape(
        layers=6,
        width=1024,
        heads=16,
        hidden=4096,
        vocabulary=1000,
        batch=512,
        length=256,
        causal=False,
    )
    a = Axes(batch="d")
    step = training(
        loss=classifier_loss(s, a),
        params={**weights_of(s), "patch": aval(768, s.width)},
        specs={**specs_of(s, a), "patch": P(None, None)},
        batch=(aval(s.batch, s.length, 768), aval(s.batch, dtype="int32")),
        batch_specs=(P("d", None, None), P("d")),
        mesh=(("d", 16),),
    )
    alone = by_hand.averaged(classifier_loss(s, Axes())(Mark()), "d")
    return replace(step, by_hand=training_step(alone))


def clip() -> Step:
    """CLIP, data parallel. The contrastive loss is that of the whole batch."""
    image = Shape(
        layers=3,
        width=768,
        heads=12,
        hidden=3072,
        vocabulary=1,
        batch=2048,
        length=64,
        causal=False,
    )
    text = Shape(
        layers=3,
        width=768,
        heads=12,
        hidden=3072,
        vocabulary=32768,
        batch=2048,
        length=64,
    )
    a = Axes(batch="d")
    params = {"image": {**weights_of(image), "patch": aval(768, 768)}, "text": weights_of(text)}
    specs = {"image": {**specs_of(image, a), "patch": P(None, None)}, "text": specs_of(text, a)}
    for tree in (params, specs):
        del tree["image"]["embed"]
    step = training(
        loss=contrastive_loss(image, text, a),
        params=params,
        specs=specs,
        batch=(aval(2048, 64, 768), aval(2048, 64, dtype="int32")),
        batch_specs=(P("d", None, None), P("d", None)),
        mesh=(("d", 16),),
    )
    return replace(step, by_hand=training_step(by_hand.contrastive_loss(image, text, a)))


def split_positions(s: Shape, mesh: tuple[tuple[str, int], ...]) -> Step:
    """A step of a decoder whose examples are split over `d`, and their positions over `s`."""
    a = Axes(batch="d", length="s", queries="s")
    step = _language_model(s, a, mesh, "v5e:4x4")
    return replace(
        step,
        in_specs=(*step.in_specs[:-1], P("d", "s")),
        by_hand=training_step(by_hand.split_positions_loss(s, a)),
    )


def long_context() -> Step:
    """Decoder, 8,192 positions that are split. So is its batch."""
    s = Shape(
        layers=4,
        width=1024,
        heads=8,
        hidden=4096,
        vocabulary=32768,
        batch=4,
        length=8192,
        gated=True,
        scanned=True,
    )
    return split_positions(s, (("d", 4), ("s", 4)))


SUITE: dict[str, Callable[[], Step]] = {
    f.__name__: f
    for f in (
        gpt_data,
        megatron,
        llama_fsdp,
        fsdp_tensor,
        accumulation,
        vocabulary,
        vit,
        clip,
        long_context,
        resnet,
        moe_capacity,
        decoding,
        pipeline,
        unet,
        moe_dropless,
        moe_dropless_region,
        gpt_flash,
    )
}
