"""Right training steps, each with the plain function that it computes: data parallel, ZeRO,
accumulation."""

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import PartitionSpec as PS

from tests.shardmap.programs.kinds import Program, draw, mapped
from tests.shardmap.programs.wrong.layers import W1, X
from tests.shardmap.programs.wrong.training import W, Y, squared

STEP = (PS(), PS("data"), PS("data"))


def step_reference(w, x, y):
    value, g = jax.value_and_grad(squared)(w, x, y)
    return value, w - 0.1 * g


def step_averaged(w, x, y):
    value, g = jax.value_and_grad(squared)(w, x, y)
    value, g = lax.pmean((value, g), "data")
    return value, w - 0.1 * g


def step_of_mean(w, x, y):
    value, g = jax.value_and_grad(lambda w: lax.pmean(squared(w, x, y), "data"))(w)
    return value, w - 0.1 * g


def step_of_mean_unchecked(w, x, y):
    """Without check_vma the gradient of a pmean is a device's own: it is averaged."""
    value, g = jax.value_and_grad(lambda w: lax.pmean(squared(w, x, y), "data"))(w)
    return value, w - 0.1 * lax.pmean(g, "data")


def step_of_sums(w, x, y):
    loss = lambda w: ((x @ w - y) ** 2).sum() / (x.shape[0] * lax.axis_size("data") * y.shape[1])

    value, g = jax.value_and_grad(loss)(w)
    return lax.psum(value, "data"), w - 0.1 * lax.psum(g, "data")


def step_by_hand(w, x, y):
    value, g = jax.value_and_grad(squared)(w, x, y)
    n = lax.axis_size("data")
    return lax.psum(value, "data") / n, w - 0.1 * (lax.psum(g, "data") / n)


def adam_reference(w, m, v, x, y):
    g = jax.grad(squared)(w, x, y)
    m, v = 0.9 * m + 0.1 * g, 0.99 * v + 0.01 * g * g
    return w - 0.1 * m / (jnp.sqrt(v) + 1e-8), m, v


def adam_split(w, m, v, x, y):
    """ZeRO-1: each device keeps the optimiser's state of some rows."""
    g = jax.grad(squared)(w, x, y)
    g = lax.psum_scatter(g, "data", scatter_dimension=0, tiled=True) / lax.axis_size("data")
    m, v = 0.9 * m + 0.1 * g, 0.99 * v + 0.01 * g * g
    rows = m.shape[0]
    mine = lax.dynamic_slice_in_dim(w, lax.axis_index("data") * rows, rows)
    mine = mine - 0.1 * m / (jnp.sqrt(v) + 1e-8)
    return lax.all_gather(mine, "data", tiled=True), m, v


def weights_gathered(w, x, y):
    """ZeRO-3: weights are split; what is gathered in the forward pass is scattered in the backward
    one."""

    loss = lambda w: squared(lax.all_gather(w, "data", tiled=True), x, y)

    value, g = jax.value_and_grad(loss)(w)
    return lax.pmean(value, "data"), w - 0.1 * g / lax.axis_size("data")


def accumulated(w, x, y):
    micro = 2
    xs, ys = x.reshape(micro, -1, x.shape[1]), y.reshape(micro, -1, y.shape[1])

    def body(total, batch):
        value, g = jax.value_and_grad(squared)(w, *batch)
        return (total[0] + value / micro, total[1] + g / micro), None

    (value, g), _ = lax.scan(body, (jnp.float32(0), jnp.zeros_like(w)), (xs, ys))
    value, g = lax.pmean((value, g), "data")
    return value, w - 0.1 * g


def clipped(w, x, y):
    value, g = jax.value_and_grad(squared)(w, x, y)
    g = lax.pmean(g, "data")
    norm = jnp.sqrt((g * g).sum())
    return lax.pmean(value, "data"), w - 0.1 * g * jnp.minimum(1.0, 0.1 / norm)


def clipped_reference(w, x, y):
    value, g = jax.value_and_grad(squared)(w, x, y)
    return value, w - 0.1 * g * jnp.minimum(1.0, 0.1 / jnp.sqrt((g * g).sum()))


def weighted(loss, mask):
    total, count = lax.psum(((loss * mask).sum(), mask.sum()), "data")
    return total / jnp.maximum(count, 1.0)


PROGRAMS = {
    "step_averaged": Program(
        mapped(step_averaged, STEP, (PS(), PS())), step_reference, (W, X, Y), vma=(False,)
    ),
    "step_of_mean": Program(
        mapped(step_of_mean, STEP, (PS(), PS())), step_reference, (W, X, Y), vma=(True,)
    ),
    "step_of_mean_unchecked": Program(
        mapped(step_of_mean_unchecked, STEP, (PS(), PS())), step_reference, (W, X, Y), vma=(False,)
    ),
    "step_of_sums": Program(
        mapped(step_of_sums, STEP, (PS(), PS())), step_reference, (W, X, Y), vma=(False,)
    ),
    "step_by_hand": Program(
        mapped(step_by_hand, STEP, (PS(), PS())), step_reference, (W, X, Y), vma=(False,)
    ),
    "adam_split": Program(
        mapped(
            adam_split,
            (PS(), PS("data"), PS("data"), PS("data"), PS("data")),
            (PS(), PS("data"), PS("data")),
        ),
        adam_reference,
        (W, 0 * W, 0 * W, X, Y),
        vma=(False,),
    ),
    "weights_gathered": Program(
        mapped(weights_gathered, (PS("data"), PS("data"), PS("data")), (PS(), PS("data"))),
        step_reference,
        (W, X, Y),
    ),
    "accumulated": Program(
        mapped(accumulated, STEP, (PS(), PS())), step_reference, (W, X, Y), vma=(False,)
    ),
    "clipped": Program(
        mapped(clipped, STEP, (PS(), PS())), clipped_reference, (W, X, Y), vma=(False,)
    ),
    "norm_of_split_and_whole": Program(
        mapped(
            lambda split, whole: jnp.sqrt(
                lax.psum((split * split).sum(), "model") + (whole * whole).sum()
            ),
            (PS(None, "model"), PS()),
            PS(),
        ),
        lambda a, b: jnp.sqrt((a * a).sum() + (b * b).sum()),
        (W1, X),
    ),
    "weighted": Program(
        mapped(weighted, (PS("data"), PS("data")), PS()),
        lambda x, m: (x * m).sum() / m.sum(),
        (draw(16, seed=12), np.float32(np.arange(16) < 11)),
    ),
}
