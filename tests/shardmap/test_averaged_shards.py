"""A published tensor-parallel training step, as its author wrote it for `jax.pmap`: no sum after a
layer, and the gradients of different shards of a weight averaged."""

from functools import partial

import jax
import numpy as np
import pytest
from jax import lax
from jax.sharding import PartitionSpec as PS

import sbp
from tests.shardmap.programs.kinds import draw, mesh

LAYERS = [(draw(16, 32, seed=k) / 4, draw(32, 16, seed=k + 9) / 4) for k in (0, 1)]
X, Y = draw(8, 16, seed=4), draw(8, 16, seed=5)
SPLIT = [(PS(None, "model"), PS("model"))] * 2


def update(params, x, y, *, summed, averaged):
    """One step of gradient descent on two layers with a residual branch."""

    def loss_fn(params):
        out = x
        for w1, w2 in params:
            part = jax.nn.relu(out @ w1) @ w2
            out = out + (lax.psum(part, "model") if summed else part)
        return ((out - y) ** 2).mean()

    loss, grads = jax.value_and_grad(loss_fn)(params)
    if averaged:
        grads = lax.pmean(grads, "model")
    return loss, jax.tree.map(lambda w, g: w - 0.1 * g, params, grads)


def region(summed, averaged, check_vma):
    return jax.shard_map(
        lambda p, x, y: update(p, x, y, summed=summed, averaged=averaged),
        mesh=mesh(),
        in_specs=(SPLIT, PS(), PS()),
        out_specs=(PS(), SPLIT),
        check_vma=check_vma,
    )


one_device = partial(update, summed=False, averaged=False)


@pytest.mark.parametrize("summed", [False, True])
def test_it_is_rejected_and_wrong(summed):
    """K21: as written, and with the sum but the averaged gradients of different shards."""
    wrong = region(summed, averaged=True, check_vma=False)
    report = sbp.check_shard_map(wrong, LAYERS, X, Y, mesh=mesh())
    assert not report.ok, report.text()
    found, want = (jax.tree.leaves(f(LAYERS, X, Y)) for f in (wrong, one_device))
    off = [not np.allclose(a, b, rtol=1e-3, atol=1e-4) for a, b in zip(found, want, strict=True)]
    assert any(off[1:])  # the weights
    assert off[0] == (not summed)  # the loss


def test_its_repair_is_accepted_and_right():
    right = region(summed=True, averaged=False, check_vma=True)
    report = sbp.check_shard_map(right, LAYERS, X, Y, mesh=mesh())
    assert report.ok, report.text()
    for a, b in zip(*(jax.tree.leaves(f(LAYERS, X, Y)) for f in (right, one_device)), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-3, atol=1e-4)
