"""Wrong programs whose fault is a count: divided twice, added where averages are, hidden by a
gather; and some that types do not settle."""

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import PartitionSpec as PS

from tests.shardmap.programs.kinds import Pair, draw
from tests.shardmap.programs.wrong.layers import W1, X
from tests.shardmap.programs.wrong.training import CHOSEN, GATES, W, Y, sgd, squared

BATCH, STEP = PS("data"), (PS(), PS("data"), PS("data"))
SPLIT = (PS("data"), PS(None, "model"))


# ---- errors -------------------------------------------------------------------------------------


per_token = lambda x, w: lax.psum(((x @ w) ** 2).sum(-1), "model").mean()


def share(w, x, y):
    """The gradient divided by the number of devices."""
    return jax.grad(lambda w: squared(w, x, y) / lax.axis_size("data"))(w)


def summed_shares(w, x, y):
    return w - 0.1 * lax.psum(share(w, x, y), "data")


mean_square = lambda a: (a**2).mean()


two_losses = lambda w, x, other: mean_square(x @ w) + mean_square(other @ w)


def skipped_alone(w, x, y):
    g = jax.grad(squared)(w, x, y)
    new = w - 0.1 * lax.pmean(g, "data")
    return lax.cond(jnp.isfinite(g).all(), lambda: new, lambda: w)


def skipped(agree, choose):
    """A step that is left out when some device's gradient is not finite, as with a scaled loss."""

    def body(w, x, y):
        g = jax.grad(squared)(w, x, y)
        return choose(agree(jnp.isfinite(g).all()), w, w - 0.1 * lax.pmean(g, "data"))

    return body


smallest = lambda ok: lax.pmin(ok.astype(jnp.int32), "data") > 0


kept_or_new = lambda ok, old, new: lax.cond(ok, lambda: new, lambda: old)


def finite_step(w, x, y):
    g = jax.grad(squared)(w, x, y)
    return jnp.where(jnp.isfinite(g).all(), w - 0.1 * g, w)


def unshifted(logits):
    own = logits.max(-1, keepdims=True)
    return jnp.log(lax.psum(jnp.exp(logits - own).sum(-1), "model")) + lax.pmax(own, "model")[:, 0]


def shifted(logits):
    top = lax.pmax(logits.max(-1, keepdims=True), "model")
    return jnp.log(lax.psum(jnp.exp(logits - top).sum(-1), "model")) + top[:, 0]


FLOW = X.copy()
FLOW[3, 3] = np.inf
OTHER = draw(8, 24, seed=75)

PAIRS = {
    "tokens_summed": Pair(
        "wrong-reduction",
        ("data",),
        "per_token(x, w)",
        lambda x, w: lax.psum(per_token(x, w), ("data",)),
        lambda x, w: lax.pmean(per_token(x, w), ("data",)),
        lambda x, w: ((x @ w) ** 2).sum(-1).mean(),
        (X, W1),
        SPLIT,
        PS(),
    ),
    "averaged_shares": Pair(
        "wrong-reduction",
        ("data",),
        "lax.pmean(jax.grad(squared)(w, x, y) / lax.axis_size",
        lambda w, x, y: (
            w - 0.1 * lax.pmean(jax.grad(squared)(w, x, y) / lax.axis_size("data"), "data")
        ),
        summed_shares,
        sgd,
        (W, X, Y),
        STEP,
        PS(),
        vma=False,
    ),
    "averaged_loss_shares": Pair(
        "wrong-reduction",
        ("data",),
        "lax.pmean(share(",
        lambda w, x, y: w - 0.1 * lax.pmean(share(w, x, y), "data"),
        summed_shares,
        sgd,
        (W, X, Y),
        STEP,
        PS(),
        vma=False,
    ),
    "two_losses_summed": Pair(
        "wrong-reduction",
        ("data",),
        "lax.psum(jax.grad(two_losses)",
        lambda w, x, other: w - 0.1 * lax.psum(jax.grad(two_losses)(w, x, other), "data"),
        lambda w, x, other: w - 0.1 * lax.pmean(jax.grad(two_losses)(w, x, other), "data"),
        lambda w, x, other: w - 0.1 * jax.grad(two_losses)(w, x, other),
        (W, X, OTHER),
        (PS(), BATCH, PS()),
        PS(),
        vma=False,
    ),
    "gathered_means_summed": Pair(
        "wrong-reduction",
        ("data",),
        "lax.all_gather(x.mean()",
        lambda x: lax.all_gather(x.mean(), "data").sum(),
        lambda x: lax.all_gather(x.mean(), "data").mean(),
        lambda x: x.mean(),
        (X,),
        (BATCH,),
        PS(),
        vma=False,
    ),
    "gathered_sums_averaged": Pair(
        "wrong-reduction",
        ("data",),
        "lax.all_gather(x.sum(0)",
        lambda x: lax.all_gather(x.sum(0), "data").mean(0),
        lambda x: lax.all_gather(x.sum(0), "data").sum(0),
        lambda x: x.sum(0),
        (X,),
        (BATCH,),
        PS(),
        vma=False,
    ),
    "rounded_before": Pair(
        "misplaced-reduction",
        ("model",),
        "jnp.round",
        lambda u, v: lax.psum(jnp.round((u @ v).astype(jnp.bfloat16)), "model"),
        lambda u, v: jnp.round(lax.psum((u @ v).astype(jnp.bfloat16), "model")),
        lambda u, v: jnp.round((u @ v).astype(jnp.bfloat16)),
        (np.float32(np.arange(64).reshape(2, 32) % 7), np.full((32, 4), 0.1171875, np.float32)),
        (PS(None, "model"), PS("model")),
        PS(),
    ),
    "skipped_alone": Pair(
        "wrong-placement",
        ("data",),
        "jnp.isfinite(g)",
        skipped_alone,
        skipped(smallest, kept_or_new),
        finite_step,
        (W, FLOW, Y),
        STEP,
        PS(),
        vma=False,
    ),
    "unshifted": Pair(
        "misplaced-reduction",
        ("model",),
        "logits - own",
        unshifted,
        shifted,
        lambda x: jax.nn.logsumexp(x, -1),
        (draw(16, 32, seed=81),),
        (PS("data", "model"),),
        BATCH,
    ),
    "merges_summed": Pair(
        "misplaced-reduction",
        ("model",),
        "jax.nn.logsumexp",
        lambda logits: lax.psum(jax.nn.logsumexp(logits, -1), "model"),
        shifted,
        lambda x: jax.nn.logsumexp(x, -1),
        (draw(16, 32, seed=81),),
        (PS("data", "model"),),
        BATCH,
    ),
    "means_as_weights": Pair(
        "misplaced-reduction",
        ("data",),
        "x.sum() / y.sum()",
        lambda x, y: lax.psum(x.sum() / y.sum() * x.sum(), "data") / lax.psum(x.sum(), "data"),
        lambda x, y: lax.psum(x.sum(), "data") / lax.psum(y.sum(), "data"),
        lambda x, y: x.sum() / y.sum(),
        (abs(X) + np.linspace(0, 4, 16, dtype=np.float32)[:, None], abs(Y)),
        (BATCH, BATCH),
        PS(),
    ),
}


# ---- notes --------------------------------------------------------------------------------------


def capacity(combined):
    """A function of the share of choices that are kept, and of the mean gates."""

    def body(chosen, gates):
        place = jnp.cumsum(chosen, 0) * chosen
        return combined((chosen * (place <= 16.0)).mean(0), gates.mean(0))

    return body


NOTED = {
    "divided_again": (
        lambda w, x, y: (
            w - 0.1 * lax.pmean(jax.grad(squared)(w, x, y), "data") / lax.axis_size("data")
        ),
        sgd,
        STEP,
        PS(),
        (W, X, Y),
        "wrong-reduction",
    ),
    "norms_gathered": (
        lambda x: lax.all_gather(jnp.sqrt((x * x).sum()), "data").sum(),
        lambda x: jnp.sqrt((x * x).sum()),
        (BATCH,),
        PS(),
        (X,),
        "differs-on-one-device",
    ),
    "merges_gathered": (
        lambda logits: lax.all_gather(jax.nn.logsumexp(logits, -1), "model").sum(0),
        lambda x: jax.nn.logsumexp(x, -1),
        (PS("data", "model"),),
        BATCH,
        (draw(16, 32, seed=81),),
        "differs-on-one-device",
    ),
    "capacity_of_parts": (
        capacity(lambda share, mean: lax.pmean((share * mean).sum(), "data")),
        capacity(lambda share, mean: (share * mean).sum()),
        (BATCH, BATCH),
        PS(),
        (CHOSEN, GATES),
        "misplaced-reduction",
    ),
    "capacity_of_sum": (
        capacity(lambda share, mean: (lax.pmean(share, "data") * lax.psum(mean, "data")).sum()),
        capacity(lambda share, mean: (share * mean).sum()),
        (BATCH, BATCH),
        PS(),
        (CHOSEN, GATES),
        "wrong-reduction",
    ),
}
"""Body, plain function, in_specs, out_specs, arguments, and the code of what is said."""
