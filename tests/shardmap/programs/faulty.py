"""Wrong `shard_map` programs whose repair depends on where the fault is: in a gradient, in helper
functions, inside of library functions, in specs."""

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import PartitionSpec as PS

from tests.shardmap.programs.kinds import Faulty, draw, valued_step

X, Y, W, BIAS = (
    draw(16, 32, seed=1),
    draw(16, 24, seed=2),
    draw(32, 24, seed=3) * np.float32(0.3),
    draw(24, seed=4),
)
W1, W2 = draw(32, 64, seed=5) * np.float32(0.2), draw(64, 24, seed=6) * np.float32(0.2)
SQUARE = draw(64, 32, seed=7) * np.float32(0.2)
PARAMS = {"w": W, "b": BIAS}
STEP, MLP = (PS(), PS("data"), PS("data")), (PS("data"), PS(None, "model"), PS("model"))


loss = lambda w, x, y: ((x @ w - y) ** 2).mean()


loss_of_tree = lambda p, x, y: ((jnp.tanh(x @ p["w"]) + p["b"] - y) ** 2).mean()


update = lambda p, g: jax.tree.map(lambda p, g: p - 0.1 * g, p, g)


step, step_of_tree = valued_step(loss), valued_step(loss_of_tree)


def gradients_left(p, x, y):
    value, g = jax.value_and_grad(loss_of_tree)(p, x, y)
    value = lax.pmean(value, "data")
    return value, update(p, g)


def gradients_averaged_again(p, x, y):
    """With check_vma=True, JAX has summed the gradients already."""
    value, g = jax.value_and_grad(loss_of_tree)(p, x, y)
    g = lax.pmean(g, "data")
    return lax.pmean(value, "data"), update(p, g)


def gradients_summed_by_jax(p, x, y, again=lambda g: g):
    def own_loss(p):
        errors = jnp.tanh(x @ p["w"]) + p["b"] - y
        return (errors**2).sum() / errors.size

    value, g = jax.value_and_grad(own_loss)(p)
    return lax.pmean(value, "data"), update(p, again(g))


def gradients_summed_again(p, x, y):
    return gradients_summed_by_jax(p, x, y, lambda g: lax.psum(g, "data"))


def gradients_averaged_in_a_scan(w, x, y):
    """JAX has summed the gradient of each microbatch already; its mean over the devices follows."""

    def add(total, batch):
        return lax.pmean(total + jax.grad(loss)(w, *batch), "data"), None

    parts = x.reshape(4, -1, x.shape[1]), y.reshape(4, -1, y.shape[1])
    return lax.scan(add, jnp.zeros_like(w), parts)[0]


def gradients_of_two(p, x, y):
    """The second variable is the gradient of the bias."""
    own_loss = lambda w, b: loss_of_tree({"w": w, "b": b}, x, y)
    value = lax.pmean(own_loss(p["w"], p["b"]), "data")
    gw, gb = jax.grad(own_loss, (0, 1))(p["w"], p["b"])
    return value, update(p, {"w": gw, "b": gb})


def value_left(w, x, y):
    value, g = jax.value_and_grad(loss)(w, x, y)
    g = lax.pmean(g, "data")
    return value, w - 0.1 * g


def gradients_of_helper(w, x, y):
    def slope(w):
        g = jax.grad(loss)(w, x, y)
        return g

    w = w - 0.1 * slope(w)
    return w - 0.1 * slope(w)


def two_steps(w, x, y):
    w = w - 0.1 * jax.grad(loss)(w, x, y)
    return w - 0.1 * jax.grad(loss)(w, x, y)


def share_left(w, x, y):
    g = jax.grad(loss)(w, x, y)
    return w - 0.1 * (g / lax.axis_size("data"))


def share_averaged(w, x, y):
    g = jax.grad(loss)(w, x, y)
    return w - 0.1 * lax.pmean(g / lax.axis_size("data"), "data")


def scattered_sum(w, x, y):
    g = lax.psum_scatter(jax.grad(loss)(w, x, y), "data", scatter_dimension=0, tiled=True)
    return w[:0].sum() + g


def gradient_squared(w, x, y):
    g = jax.grad(loss)(w, x, y)
    return lax.pmean(g * g, "data")


penalised = lambda w, x, y: ((x @ w - y) ** 2).sum() / (16 * 24) + 5e-3 * (w * w).sum()


def penalty_counted_twice(w, x, y):
    value, g = jax.value_and_grad(penalised)(w, x, y)
    return lax.psum(value, "data"), w - 0.1 * lax.psum(g, "data")


def masked_by_shard(w, x, y, m):
    def of(w):
        return (((x @ w - y) ** 2).mean(-1) * m).sum() / m.sum()

    value, g = jax.value_and_grad(of)(w)
    return lax.pmean(value, "data"), w - 0.1 * lax.pmean(g, "data")


def tensor_parallel(x, w1, w2):
    g = jax.grad(lambda w1: (lax.psum(jax.nn.gelu(x @ w1) @ w2, "model") ** 2).mean())(w1)
    return lax.pmean(g, "data")


def tensor_parallel_unreduced(x, w1, w2):
    g = jax.grad(lambda w1: ((jax.nn.gelu(x @ w1) @ w2 + 1.0) ** 2).mean())(w1)
    return lax.pmean(g, "data")


@jax.custom_vjp
def summed(x):
    """The sum over the devices, whose cotangent is the same on all of them."""
    return lax.psum(x, "model")


summed.defvjp(lambda x: (lax.psum(x, "model"), None), lambda _, c: (c,))


@jax.custom_vjp
def summed_twice(x):
    """Its cotangent is summed as well, as the transpose of a psum is."""
    return lax.psum(x, "model")


summed_twice.defvjp(lambda x: (lax.psum(x, "model"), None), lambda _, c: (lax.psum(c, "model"),))


def cotangent_summed(x, w1, w2):
    g = jax.grad(lambda w1: (summed_twice(jax.nn.gelu(x @ w1) @ w2) ** 2).mean())(w1)
    return lax.pmean(g, "data")


def copied_unsummed(x, w1, w2, w0):
    """The cotangent of what every device has is a share on each, and nothing adds them up."""

    def of(w0):
        return (summed(jax.nn.gelu((x @ w0) @ w1) @ w2) ** 2).mean()

    g = jax.grad(of)(w0)
    return lax.pmean(g, "data")


slope = lambda x, w1, w2: jax.grad(lambda w1: ((jax.nn.gelu(x @ w1) @ w2) ** 2).mean())(w1)


WHOLE = draw(32, 32, seed=8) * np.float32(0.2)


GRADIENTS = {
    "gradients_left": Faulty(gradients_left, step_of_tree, (PARAMS, X, Y), STEP, PS()),
    "value_left": Faulty(value_left, step, (W, X, Y), STEP, PS()),
    "gradients_averaged_again": Faulty(
        gradients_averaged_again, step_of_tree, (PARAMS, X, Y), STEP, PS(), vma=(True,)
    ),
    "loss_summed": Faulty(
        lambda w, x, y: jax.grad(lambda w: lax.psum(loss(w, x, y), "data"))(w),
        jax.grad(loss),
        (W, X, Y),
        STEP,
        PS(),
        vma=(True,),
    ),
    **{
        fault.__name__: Faulty(fault, step_of_tree, (PARAMS, X, Y), STEP, PS(), vma=(True,))
        for fault in (gradients_summed_by_jax, gradients_summed_again)
    },
    "gradients_averaged_in_a_scan": Faulty(
        gradients_averaged_in_a_scan,
        jax.grad(lambda w, x, y: 4 * loss(w, x, y)),
        (W, X, Y),
        STEP,
        PS(),
        vma=(True,),
    ),
    "gradients_of_two": Faulty(gradients_of_two, step_of_tree, (PARAMS, X, Y), STEP, PS()),
    "gradient_returned": Faulty(
        lambda w, x, y: jax.grad(loss)(w, x, y), jax.grad(loss), (W, X, Y), STEP, PS()
    ),
    "gradients_of_helper": Faulty(gradients_of_helper, two_steps, (W, X, Y), STEP, PS()),
    "share_left": Faulty(share_left, lambda w, x, y: step(w, x, y)[1], (W, X, Y), STEP, PS()),
    "share_averaged": Faulty(
        share_averaged, lambda w, x, y: step(w, x, y)[1], (W, X, Y), STEP, PS()
    ),
    "scattered_sum": Faulty(scattered_sum, jax.grad(loss), (W, X, Y), STEP, PS("data")),
    "gradient_squared": Faulty(
        gradient_squared, lambda w, x, y: jax.grad(loss)(w, x, y) ** 2, (W, X, Y), STEP, PS()
    ),
    "penalty_counted_twice": Faulty(
        penalty_counted_twice, valued_step(penalised), (W, X, Y), STEP, PS(), helped=False
    ),
    "masked_by_shard": Faulty(
        masked_by_shard,
        valued_step(lambda w, x, y, m: (((x @ w - y) ** 2).mean(-1) * m).sum() / m.sum()),
        (W, X, Y, np.asarray(np.arange(16) < 11, np.float32)),
        (*STEP, PS("data")),
        PS(),
    ),
    "tensor_parallel": Faulty(
        tensor_parallel, slope, (X, W1, W2), MLP, PS(None, "model"), helped=False
    ),
    "tensor_parallel_unreduced": Faulty(
        tensor_parallel_unreduced,
        lambda x, w1, w2: jax.grad(lambda w1: ((jax.nn.gelu(x @ w1) @ w2 + 1.0) ** 2).mean())(w1),
        (X, W1, W2),
        MLP,
        PS(None, "model"),
        helped=False,
        vma=(True, False),
    ),
    "cotangent_summed": Faulty(cotangent_summed, slope, (X, W1, W2), MLP, PS(None, "model")),
    "copied_unsummed": Faulty(
        copied_unsummed,
        lambda x, w1, w2, w0: jax.grad(lambda w0: ((jax.nn.gelu((x @ w0) @ w1) @ w2) ** 2).mean())(
            w0
        ),
        (X, W1, W2, WHOLE),
        (*MLP, PS()),
        PS(),
    ),
}


def bias_inside(x, w1, w2, b):
    h = jax.nn.gelu(x @ w1) @ w2 + b
    return lax.pmean((lax.psum(h, "model") ** 2).mean(), "data")


biased = lambda x, w1, w2, b: ((jax.nn.gelu(x @ w1) @ w2 + b) ** 2).mean()


OUTSIDE = {
    "doubled_loss": Faulty(
        lambda w, x, y: lax.psum(lax.pmean(((x @ w - y) ** 2).mean(), "data"), "data"),
        jax.value_and_grad(loss),
        (W, X, Y),
        STEP,
        PS(),
        vma=(True, False),
        outside=jax.value_and_grad,
    ),
    "summed_means": Faulty(
        lambda w, x, y: lax.psum(((x @ w - y) ** 2).mean(), "data"),
        jax.value_and_grad(loss),
        (W, X, Y),
        STEP,
        PS(),
        vma=(True, False),
        outside=jax.value_and_grad,
    ),
    "bias_inside": Faulty(
        bias_inside,
        jax.grad(biased, (1, 3)),
        (X, W1, W2, BIAS),
        (*MLP, PS()),
        PS(),
        vma=(True, False),
        outside=lambda r: jax.grad(r, (1, 3)),
    ),
}


# ---- helper functions, library functions, specs -------------------------------------------------

layer = lambda x, w1, w2, b: x + lax.psum(jax.nn.relu(x @ w1) @ w2 + b, "model")


def plain_layers(x, w1, w2, b):
    x = x + jax.nn.relu(x @ w1) @ w2 + b
    return x + jax.nn.relu(x @ w1) @ w2 + b


row = lambda h, w: lax.psum(h @ w, "model")


def centred_by_shard(x):
    m = x.mean(0)
    v = lax.pmean(((x - m) ** 2).mean(0), "data")
    return v


PLACES = {
    "two_layers": Faulty(
        lambda x, w1, w2, b: layer(layer(x, w1, w2, b), w1, w2, b),
        plain_layers,
        (X, W1, SQUARE, draw(32, seed=4)),
        (*MLP, PS()),
        PS("data"),
        vma=(True, False),
    ),
    "second_row_doubled": Faulty(
        lambda x, w1, w2: row(row(jax.nn.relu(x @ w1), w2), jnp.eye(24)),
        lambda x, w1, w2: jax.nn.relu(x @ w1) @ w2,
        (X, W1, W2),
        MLP,
        PS("data"),
        helped=False,
    ),
    "log_sum_of_shards": Faulty(
        lambda x: lax.psum(jax.nn.logsumexp(x, -1), "model"),
        lambda x: jax.nn.logsumexp(x, -1),
        (X,),
        (PS(None, "model"),),
        PS(),
        helped=False,
        vma=(True, False),
    ),
    "variance_of_shards": Faulty(
        lambda x: lax.pmean(x.var(0), "data"),
        lambda x: x.var(0),
        (X,),
        (PS("data"),),
        PS(),
        helped=False,
        vma=(True, False),
    ),
    "centred_by_shard": Faulty(
        centred_by_shard, lambda x: x.var(0), (X,), (PS("data"),), PS(), vma=(True, False)
    ),
    "summed_over_both": Faulty(
        lambda x, w1, w2: lax.psum(jax.nn.gelu(x @ w1) @ w2, ("data", "model")),
        lambda x, w1, w2: jax.nn.gelu(x @ w1) @ w2,
        (X, W1, W2),
        MLP,
        PS("data"),
    ),
    "tokens_left": Faulty(
        lambda x, w: lax.psum(((x @ w) ** 2).sum(-1), "model").mean(),
        lambda x, w: ((x @ w) ** 2).sum(-1).mean(),
        (X, W),
        (PS("data"), PS(None, "model")),
        PS(),
    ),
    "regularised_before": Faulty(
        lambda x: jnp.linalg.cholesky(lax.psum(x.T @ x + jnp.eye(8), "data")),
        lambda x: jnp.linalg.cholesky(x.T @ x + jnp.eye(8)),
        (draw(64, 8, seed=9),),
        (PS("data"),),
        PS(),
        vma=(True, False),
    ),
    "largest_averaged": Faulty(
        lambda x: lax.pmean(x.max(0), "data"),
        lambda x: x.max(0),
        (X,),
        (PS("data"),),
        PS(),
        vma=(True, False),
    ),
}


# Several reductions are missing, and the result is wrong until all of them are there.


def normalised(x):
    mean = x.mean(-1, keepdims=True)
    variance = ((x - mean) ** 2).mean(-1, keepdims=True)
    return (x - mean) / jnp.sqrt(variance + 1e-6)


def two_feed_forwards(x, w1, w2, w3, w4):
    h = jax.nn.relu(x @ w1) @ w2
    return jax.nn.relu(h @ w3) @ w4


def clipped(w, x, y):
    g = jax.grad(loss)(w, x, y)
    return w - 0.1 * g / jnp.maximum(jnp.sqrt((g * g).sum()), 1.0)


def accuracy(x, labels):
    hits = (x.argmax(-1) == labels).sum()
    return hits / labels.shape[0]


FEATURES = PS("data", "model")
SEVERAL = {
    "normalised": Faulty(normalised, normalised, (X,), (FEATURES,), FEATURES),
    "batch_normalised": Faulty(
        lambda x: normalised(x.T).T, lambda x: normalised(x.T).T, (X,), (PS("data"),), PS("data")
    ),
    "two_feed_forwards": Faulty(
        two_feed_forwards, two_feed_forwards, (X, W1, W2, W2.T, W1.T), (*MLP, *MLP[1:]), PS("data")
    ),
    "clipped_locally": Faulty(clipped, clipped, (W, X, Y), STEP, PS()),
    "accuracy": Faulty(
        accuracy,
        accuracy,
        (X, np.where(np.arange(16) < 5, X.argmax(-1), 0).astype(np.int32)),
        (PS("data"), PS("data")),
        PS(),
    ),
}


PROGRAMS = GRADIENTS | OUTSIDE | PLACES | SEVERAL
