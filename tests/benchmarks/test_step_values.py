"""Small instances of the everyday steps compute on a mesh what they compute on one device, however
they are split: by sbp, by an expert's marks, by hand."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType

from benchmarks.steps import by_hand_kernels, kernels
from benchmarks.steps.experts import by_capacity, dropless_step, expert_step
from benchmarks.steps.kernels import flash_decoder
from benchmarks.steps.program import ADAMW, Mark, Step, shardings
from benchmarks.steps.serving import decoding
from benchmarks.steps.stages import pipeline
from benchmarks.steps.suite import split_positions
from benchmarks.steps.transformer import Axes, Shape, attention

SHAPE = Shape(
    layers=2, width=32, heads=4, hidden=64, vocabulary=64, batch=4, length=16, scanned=True
)
D8 = (("d", 8),)
D2T4 = (("d", 2), ("t", 4))
STEPS = {
    "long_context": split_positions(SHAPE, (("d", 2), ("s", 4))),
    "moe_capacity": expert_step(
        dataclasses.replace(SHAPE, batch=8), Axes(batch="d"), by_capacity, 8, ("d", None), D8
    ),
    "moe_dropless": dropless_step(SHAPE, 4, D2T4, region=False),
    "moe_dropless_region": dropless_step(SHAPE, 4, D2T4, region=True),
    "gpt_flash": flash_decoder(SHAPE, D2T4, "v5e:2x4"),
    "decoding": dataclasses.replace(decoding(dataclasses.replace(SHAPE, scanned=False)), mesh=D2T4),
    "pipeline": pipeline(dataclasses.replace(SHAPE, layers=4), microbatches=4, data=2),
}


def mesh_of(step: Step):
    sizes, names = tuple(n for _, n in step.mesh), tuple(a for a, _ in step.mesh)
    devices = np.array(jax.devices()[: np.prod(sizes)]).reshape(sizes)
    return jax.sharding.Mesh(devices, names, axis_types=(AxisType.Auto,) * len(names))


@pytest.fixture(autouse=True)
def no_kernel_for_tpu(monkeypatch):
    """These devices cannot run the kernel: plain attention takes its place on both sides."""
    for module in (kernels, by_hand_kernels):
        monkeypatch.setattr(module, "flash", lambda axes, mark: attention)


@functools.cache
def arguments(name: str):
    rng = np.random.default_rng(0)

    def drawn(x):
        if jnp.issubdtype(x.dtype, jnp.integer):
            return jnp.asarray(rng.integers(0, 16, x.shape), x.dtype)
        return jnp.asarray(rng.normal(0, 0.3, x.shape), x.dtype)

    values = list(map(functools.partial(jax.tree.map, drawn), STEPS[name].avals))
    if STEPS[name].donate == (0, 1):  # a training step
        values[1] = ADAMW.init(values[0])
    return tuple(values)


@functools.cache
def on_one_device(name: str):
    return jax.jit(STEPS[name].make(Mark()))(*arguments(name))


def by_sbp(step: Step, mesh):
    return dataclasses.replace(step, donate=()).planned(mesh)


def by_marks(step: Step, mesh):
    return jax.jit(step.make(Mark(mesh)), in_shardings=shardings(mesh, step.in_specs))


def by_hand(step: Step, mesh):
    return jax.jit(step.mapped(mesh, step.in_specs, step.out_specs))


CASES = [
    ("decoding", by_sbp),
    ("pipeline", by_sbp),
    ("pipeline", by_hand),
    ("gpt_flash", by_hand),
    ("long_context", by_hand),
    ("moe_capacity", by_hand),
    ("moe_dropless", by_hand),
    ("moe_dropless", by_sbp),
    ("moe_dropless", by_marks),
    ("moe_dropless_region", by_sbp),
]


@pytest.mark.parametrize(("name", "side"), CASES, ids=lambda x: getattr(x, "__name__", x))
def test_a_split_step_computes_what_one_device_computes(name, side):
    """Products round to bfloat16, so that sums in another order differ: each leaf is compared with
    its largest element. A moment of AdamW after one step is the gradient."""
    got = side(STEPS[name], mesh_of(STEPS[name]))(*arguments(name))
    want = on_one_device(name)
    if name != "decoding":
        got, want = (got[1][0].mu, got[2]), (want[1][0].mu, want[2])
    for x, y in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        x, y = np.asarray(x, np.float32), np.asarray(y, np.float32)
        np.testing.assert_allclose(x, y, atol=0.03 * np.abs(y).max())
