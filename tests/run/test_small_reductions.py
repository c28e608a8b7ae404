"""What a split dim is reduced to travels, not the dim: softmax, cross-entropy, means, argmax,
top-k, prefixes over a split dim."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import sbp
from tests.run.test_collectives import assert_within_plan

ROWS, VOCABULARY = 512, 8190
"""8190 does not divide by 8: the last shard has padding."""

LOGITS = np.random.default_rng(0).normal(size=(ROWS, VOCABULARY)).astype(np.float32)
LABELS = np.random.default_rng(1).integers(0, VOCABULARY, ROWS).astype(np.int32)


def cross_entropy(logits, labels):
    picked = jnp.take_along_axis(jax.nn.log_softmax(logits), labels[:, None], axis=-1)
    return -jnp.mean(picked)


def one_hot_entropy(logits, labels):
    return -jnp.mean(jnp.sum(jax.nn.log_softmax(logits) * jax.nn.one_hot(labels, VOCABULARY), -1))


def normalised(x, labels):
    centred = x - jnp.mean(x, -1, keepdims=True)
    return jnp.max(centred * lax.rsqrt(jnp.mean(centred**2, -1, keepdims=True) + 1e-6), -1)


SCALARS = 8
"""Reduced values per row that a program may move: some maxima, sums and indices."""

PROGRAMS = {
    "softmax": (lambda x, y: jnp.max(jax.nn.softmax(x) * x, -1), SCALARS),
    "logsumexp": (lambda x, y: jax.nn.logsumexp(x, axis=-1), SCALARS),
    "cross-entropy": (cross_entropy, SCALARS),
    "cross-entropy and its gradient": (
        lambda x, y: jax.tree.map(jnp.max, jax.value_and_grad(cross_entropy)(x, y)),
        2 * SCALARS,
    ),
    "cross-entropy with one-hot labels": (
        lambda x, y: jax.tree.map(jnp.max, jax.value_and_grad(one_hot_entropy)(x, y)),
        2 * SCALARS,
    ),
    "mean": (lambda x, y: jnp.mean(x, -1), SCALARS),
    "layer norm": (normalised, SCALARS),
    "argmax": (lambda x, y: jnp.argmax(x, -1), 4 * SCALARS),
    "top-k": (lambda x, y: lax.top_k(x, 2), 4 * SCALARS),
    "prefix sum": (lambda x, y: jnp.max(jnp.cumsum(x, -1), -1), SCALARS),
}


@pytest.mark.parametrize("shape", [(8,), (2, 4)], ids=["8", "2x4"])
@pytest.mark.parametrize("name", PROGRAMS)
def test_a_split_vocabulary_moves_little(name, shape):
    """Plan and compiled program move a few values per row and device, a hundredth of what gathering
    the rows would."""
    fn, scalars = PROGRAMS[name]
    names = ("x", "y")[: len(shape)]
    mesh = sbp.make_mesh(shape, names)

    def split(x, y):
        return fn(sbp.annotate(x, **{names[-1]: sbp.S(1)}), y)

    f = sbp.jit(split, mesh, in_types=(None, "B"), hardware="tpu-v5e")
    plan = f.plan(LOGITS, LABELS)
    n = shape[-1]
    in_the_middle = sum(p.bytes_per_device for p in plan.program.boxes() if not at_boundary(p))
    moved = in_the_middle + sum(o.bytes_sent * runs for o, runs in plan.program.kernels())
    assert moved <= scalars * ROWS * 4 * n
    assert moved * 25 < (n - 1) / n * LOGITS.nbytes
    assert_within_plan(plan, shape)
    for got, want in zip(
        jax.tree.leaves(f(LOGITS, LABELS)),
        jax.tree.leaves(jax.jit(fn)(LOGITS, LABELS)),
        strict=True,
    ):
        np.testing.assert_allclose(np.asarray(got), np.asarray(want), rtol=2e-4, atol=2e-4)


def at_boundary(planned):
    """Whether a conversion stands at the program's end, or at the annotation: inputs and results
    that do not divide are whole there."""
    reader = planned.box.reader
    return reader is None or reader.op == "sbp_annotate"
