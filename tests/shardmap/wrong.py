"""Wrong `shard_map` programs, each with its corrected twin and the plain function that both are
meant to be.

The first nine are measured programs that partial values are easily written in; the others are bugs
of real code: row-parallel layers, losses, norms, split vocabularies, experts. The body of a wrong
program and that of its twin differ in what is wrong alone.
"""

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import PartitionSpec as PS

from tests.shardmap.pair import N_DATA, N_MODEL, Pair, draw

# ---- the first collection -----------------------------------------------------------------------

U, V, BIAS = draw(16, 32, seed=1), draw(32, 24, seed=2), draw(24, seed=3)
MATMUL = (PS("data", "model"), PS("model", None))
ROWS, BOTH = PS("data", None), PS("data", "model")


def summed_twice(u, v):
    return lax.psum(lax.psum(u @ v, "model"), "model")


def product(u, v):
    return lax.psum(u @ v, "model")


def bias_before(u, v, b):
    return lax.psum(u @ v + b, "model")


def bias_after(u, v, b):
    return lax.psum(u @ v, "model") + b


def tanh_before(u, v):
    return lax.psum(jnp.tanh(u @ v), "model")


def tanh_after(u, v):
    return jnp.tanh(lax.psum(u @ v, "model"))


def averaged_product(u, v):
    return lax.pmean(u @ v, "model")


def averaged_sum(u):
    return lax.pmean(u.sum(), ("data", "model"))


def summed_sum(u):
    return lax.psum(u.sum(), ("data", "model"))


def norm_of_shards(u):
    return lax.psum(jnp.sqrt((u * u).sum()), ("data", "model"))


def norm_of_all(u):
    return jnp.sqrt(lax.psum((u * u).sum(), ("data", "model")))


def left_partial(u, v):
    return u @ v


def scattered(u, v):
    return lax.psum_scatter(u @ v, "model", scatter_dimension=0, tiled=True)


def gathered_rows(u):
    return lax.all_gather(u, "model", axis=0, tiled=True)


def gathered_columns(u):
    return lax.all_gather(u, "model", axis=1, tiled=True)


FIRST = {
    "summed_twice": Pair(
        "doubled-reduction",
        ("model",),
        "lax.psum(lax.psum",
        summed_twice,
        product,
        lambda u, v: u @ v,
        (U, V),
        MATMUL,
        ROWS,
    ),
    "bias_before": Pair(
        "misplaced-reduction",
        ("model",),
        "u @ v + b",
        bias_before,
        bias_after,
        lambda u, v, b: u @ v + b,
        (U, V, BIAS),
        (*MATMUL, PS()),
        ROWS,
    ),
    "tanh_before": Pair(
        "misplaced-reduction",
        ("model",),
        "jnp.tanh(u @ v)",
        tanh_before,
        tanh_after,
        lambda u, v: jnp.tanh(u @ v),
        (U, V),
        MATMUL,
        ROWS,
    ),
    "averaged_product": Pair(
        "wrong-reduction",
        ("model",),
        "lax.pmean(u @ v",
        averaged_product,
        product,
        lambda u, v: u @ v,
        (U, V),
        MATMUL,
        ROWS,
    ),
    "averaged_sum": Pair(
        "wrong-reduction",
        ("data", "model"),
        "lax.pmean(u.sum()",
        averaged_sum,
        summed_sum,
        lambda u: u.sum(),
        (U,),
        (BOTH,),
        PS(),
    ),
    "norm_of_shards": Pair(
        "misplaced-reduction",
        ("data", "model"),
        "jnp.sqrt((u * u)",
        norm_of_shards,
        norm_of_all,
        lambda u: jnp.sqrt((u * u).sum()),
        (U,),
        (BOTH,),
        PS(),
    ),
    "partial_as_split": Pair(
        "wrong-placement",
        ("model",),
        "return u @ v",
        left_partial,
        scattered,
        lambda u, v: u @ v,
        (U, V),
        MATMUL,
        PS(("data", "model"), None),
    ),
    "missing": Pair(
        "missing-reduction",
        ("model",),
        "return u @ v",
        left_partial,
        product,
        lambda u, v: u @ v,
        (U, V),
        MATMUL,
        ROWS,
    ),
    "gathered_rows": Pair(
        "wrong-placement",
        ("model",),
        "lax.all_gather(u",
        gathered_rows,
        gathered_columns,
        lambda u: u,
        (U,),
        (BOTH,),
        ROWS,
        repaired=False,
    ),
}


# ---- row-parallel layers ------------------------------------------------------------------------

X, W1, W2, SCALE = (
    draw(16, 24, seed=4),
    draw(24, 32, seed=5),
    draw(32, 24, seed=6),
    draw(24, seed=7),
)
MLP = (PS("data", None), PS(None, "model"), PS("model", None))


def mlp(x, w1, w2):
    return x + jax.nn.gelu(x @ w1) @ w2


def mlp_unreduced(x, w1, w2):
    h = jax.nn.gelu(x @ w1)
    return x + h @ w2


def mlp_reduced(x, w1, w2):
    h = jax.nn.gelu(x @ w1)
    return x + lax.psum(h @ w2, "model")


def mlp_residual_inside(x, w1, w2):
    h = jax.nn.gelu(x @ w1)
    return lax.psum(x + h @ w2, "model")


def gelu_before(u, v):
    h = u @ v
    return lax.psum(jax.nn.gelu(h), "model")


def gelu_after(u, v):
    h = lax.psum(u @ v, "model")
    return jax.nn.gelu(h)


def softmax_before(u, v):
    scores = u @ v
    return lax.psum(jax.nn.softmax(scores, -1), "model")


def softmax_after(u, v):
    scores = lax.psum(u @ v, "model")
    return jax.nn.softmax(scores, -1)


def layernorm(x):
    centred = x - x.mean(-1, keepdims=True)
    return centred / jnp.sqrt((centred * centred).mean(-1, keepdims=True) + 1e-6)


def layernorm_before(u, v):
    h = u @ v
    centred = h - h.mean(-1, keepdims=True)
    scale = lax.psum((centred * centred).mean(-1, keepdims=True), "model")
    return lax.psum(centred, "model") / jnp.sqrt(scale + 1e-6)


def layernorm_after(u, v):
    h = lax.psum(u @ v, "model")
    return layernorm(h)


def over_wrong_axis(u, v):
    return lax.psum(u @ v, "data")


def scattered_as_whole(u, v):
    return lax.psum_scatter(u @ v, "model", scatter_dimension=1, tiled=True)


def int_before(u, v):
    return lax.psum((4.0 * (u @ v)).astype(jnp.int32), "model")


def int_after(u, v):
    return (4.0 * lax.psum(u @ v, "model")).astype(jnp.int32)


def largest_of_parts(u, v):
    return lax.pmax(u @ v, "model")


def predicate_partial(u, v):
    total = (u @ v).sum()
    return lax.cond(total > 0.0, lambda y: y, lambda y: -y, lax.psum(u @ v, "model"))


def predicate_whole(u, v):
    total = lax.psum((u @ v).sum(), ("data", "model"))
    return lax.cond(total > 0.0, lambda y: y, lambda y: -y, lax.psum(u @ v, "model"))


def predicate_reference(u, v):
    y = u @ v
    return jnp.where(y.sum() > 0.0, y, -y)


def summed_in_loop(us, v):
    def body(total, u):
        return lax.psum(total + u @ v, "model"), None

    return lax.scan(body, jnp.zeros((us.shape[1], v.shape[1])), us)[0]


def summed_after_loop(us, v):
    def body(total, u):
        return total + u @ v, None

    total = lax.scan(body, jnp.zeros((us.shape[1], v.shape[1])), us)[0]
    return lax.psum(total, "model")


US = draw(3, 16, 32, seed=8)

ROW_PARALLEL = {
    "mlp_unreduced": Pair(
        "missing-reduction",
        ("model",),
        "x + h @ w2",
        mlp_unreduced,
        mlp_reduced,
        mlp,
        (X, W1, W2),
        MLP,
        ROWS,
    ),
    "mlp_residual_inside": Pair(
        "misplaced-reduction",
        ("model",),
        "x + h @ w2",
        mlp_residual_inside,
        mlp_reduced,
        mlp,
        (X, W1, W2),
        MLP,
        ROWS,
    ),
    "gelu_before": Pair(
        "misplaced-reduction",
        ("model",),
        "jax.nn.gelu(h)",
        gelu_before,
        gelu_after,
        lambda u, v: jax.nn.gelu(u @ v),
        (U, V),
        MATMUL,
        ROWS,
    ),
    "softmax_before": Pair(
        "misplaced-reduction",
        ("model",),
        "jax.nn.softmax(scores",
        softmax_before,
        softmax_after,
        lambda u, v: jax.nn.softmax(u @ v, -1),
        (U, V),
        MATMUL,
        ROWS,
    ),
    "layernorm_before": Pair(
        "misplaced-reduction",
        ("model",),
        "centred * centred",
        layernorm_before,
        layernorm_after,
        lambda u, v: layernorm(u @ v),
        (U, V),
        MATMUL,
        ROWS,
    ),
    "over_wrong_axis": Pair(
        "missing-reduction",
        ("model",),
        "u @ v",
        over_wrong_axis,
        product,
        lambda u, v: u @ v,
        (U, V),
        MATMUL,
        ROWS,
        wrong_outs=PS(None, None),
        notes=("not-analysed",),
    ),
    "scattered_as_whole": Pair(
        "wrong-placement",
        ("model",),
        "lax.psum_scatter",
        scattered_as_whole,
        product,
        lambda u, v: u @ v,
        (U, V),
        MATMUL,
        ROWS,
    ),
    "int_before": Pair(
        "misplaced-reduction",
        ("model",),
        "astype(jnp.int32), ",
        int_before,
        int_after,
        lambda u, v: (4.0 * (u @ v)).astype(jnp.int32),
        (U, V),
        MATMUL,
        ROWS,
    ),
    "largest_of_parts": Pair(
        "wrong-reduction",
        ("model",),
        "lax.pmax",
        largest_of_parts,
        product,
        lambda u, v: u @ v,
        (U, V),
        MATMUL,
        ROWS,
    ),
    "predicate_partial": Pair(
        "misplaced-reduction",
        ("data", "model"),
        "total > 0.0",
        predicate_partial,
        predicate_whole,
        predicate_reference,
        (U, V),
        MATMUL,
        ROWS,
    ),
    "summed_in_loop": Pair(
        "misplaced-reduction",
        ("model",),
        "total + u @ v, ",
        summed_in_loop,
        summed_after_loop,
        lambda us, v: (us @ v).sum(0),
        (US, V),
        (PS(None, "data", "model"), PS("model", None)),
        ROWS,
    ),
}


# ---- losses, gradients, norms, metrics ----------------------------------------------------------

W, Y = draw(24, 8, seed=9), draw(16, 8, seed=10)
STEP = (PS(), PS("data"), PS("data"))


def squared(w, x, y):
    return ((x @ w - y) ** 2).mean()


def mean_loss_summed(w, x, y):
    return lax.psum(((x @ w - y) ** 2).mean(), "data")


def mean_loss_averaged(w, x, y):
    return lax.pmean(((x @ w - y) ** 2).mean(), "data")


def sgd(w, x, y):
    return w - 0.1 * jax.grad(squared)(w, x, y)


def local_gradients(w, x, y):
    g = jax.grad(squared)(w, x, y)
    return w - 0.1 * g


def averaged_gradients(w, x, y):
    g = jax.grad(squared)(w, x, y)
    return w - 0.1 * lax.pmean(g, "data")


def summed_gradients(w, x, y):
    g = jax.grad(squared)(w, x, y)
    return w - 0.1 * lax.psum(g, "data")


def gradients_of_mean(w, x, y):
    g = jax.grad(lambda w: lax.pmean(squared(w, x, y), "data"))(w)
    return w - 0.1 * g


def gradients_summed_again(w, x, y):
    g = jax.grad(lambda w: lax.pmean(squared(w, x, y), "data"))(w)
    return w - 0.1 * lax.psum(g, "data")


def shard_gradients_averaged(x, w1, w2):
    def loss(w1):
        return (lax.psum(jax.nn.gelu(x @ w1) @ w2, "model") ** 2).sum() / lax.axis_size("model")

    return w1 - 0.01 * lax.pmean(lax.psum(jax.grad(loss)(w1), "data"), "model")


def shard_gradients_kept(x, w1, w2):
    def loss(w1):
        return (lax.psum(jax.nn.gelu(x @ w1) @ w2, "model") ** 2).sum() / lax.axis_size("model")

    return w1 - 0.01 * lax.psum(jax.grad(loss)(w1), "data")


def shard_step(x, w1, w2):
    return w1 - 0.01 * jax.grad(lambda w1: ((jax.nn.gelu(x @ w1) @ w2) ** 2).sum())(w1)


def gradient_norm_averaged(g):
    return lax.pmean(jnp.sqrt((g * g).sum()), "model")


def gradient_norm(g):
    return jnp.sqrt(lax.psum((g * g).sum(), "model"))


def unit_by_shard(x):
    return x / jnp.sqrt((x * x).sum(-1, keepdims=True))


def unit(x):
    return x / jnp.sqrt(lax.psum((x * x).sum(-1, keepdims=True), "model"))


def rms_by_shard(x):
    return x / jnp.sqrt((x * x).mean(-1, keepdims=True) + 1e-6)


def rms(x):
    return x / jnp.sqrt(lax.pmean((x * x).mean(-1, keepdims=True), "model") + 1e-6)


def masked_mean_of_means(loss, mask):
    return lax.pmean((loss * mask).sum() / mask.sum(), "data")


def masked_mean(loss, mask):
    return lax.psum((loss * mask).sum(), "data") / lax.psum(mask.sum(), "data")


def metric_counted_twice(x):
    positive = lax.psum((x > 0).astype(jnp.float32).sum(), "data")
    return lax.psum(positive, "data")


def metric_counted_once(x):
    return lax.psum((x > 0).astype(jnp.float32).sum(), "data")


def auxiliary_of_parts(gates, chosen):
    share, mean = chosen.mean(0), gates.mean(0)
    return lax.pmean((share * mean).sum(), "data")


def auxiliary_of_means(gates, chosen):
    share, mean = lax.pmean(chosen.mean(0), "data"), lax.pmean(gates.mean(0), "data")
    return (share * mean).sum()


MASK = np.asarray(np.arange(16) < 11, np.float32)
GATES = np.asarray(jax.nn.softmax(draw(16, 4, seed=11)), np.float32)
CHOSEN = np.asarray(np.eye(4)[GATES.argmax(-1)], np.float32)

TRAINING = {
    "mean_loss_summed": Pair(
        "wrong-reduction",
        ("data",),
        "lax.psum(((x @ w - y) ** 2).mean()",
        mean_loss_summed,
        mean_loss_averaged,
        squared,
        (W, X, Y),
        STEP,
        PS(),
    ),
    "local_gradients": Pair(
        "missing-reduction",
        ("data",),
        "((x @ w - y) ** 2).mean()",
        local_gradients,
        averaged_gradients,
        sgd,
        (W, X, Y),
        STEP,
        PS(),
        vma=False,
    ),
    "summed_gradients": Pair(
        "wrong-reduction",
        ("data",),
        "lax.psum(g",
        summed_gradients,
        averaged_gradients,
        sgd,
        (W, X, Y),
        STEP,
        PS(),
        vma=False,
    ),
    "gradients_summed_again": Pair(
        "doubled-reduction",
        ("data",),
        "lax.psum(g",
        gradients_summed_again,
        gradients_of_mean,
        sgd,
        (W, X, Y),
        STEP,
        PS(),
        vma=True,
    ),
    "shard_gradients_averaged": Pair(
        "wrong-placement",
        ("model",),
        "w1 - 0.01",
        shard_gradients_averaged,
        shard_gradients_kept,
        shard_step,
        (X, W1, W2),
        MLP,
        PS(None, "model"),
        vma=False,
        repaired=False,
        notes=("not-analysed",),
    ),
    "gradient_norm_averaged": Pair(
        "misplaced-reduction",
        ("model",),
        "jnp.sqrt((g * g)",
        gradient_norm_averaged,
        gradient_norm,
        lambda g: jnp.sqrt((g * g).sum()),
        (W1,),
        (PS(None, "model"),),
        PS(),
    ),
    "unit_by_shard": Pair(
        "missing-reduction",
        ("model",),
        "jnp.sqrt((x * x)",
        unit_by_shard,
        unit,
        lambda x: x / jnp.sqrt((x * x).sum(-1, keepdims=True)),
        (X,),
        (BOTH,),
        BOTH,
    ),
    "rms_by_shard": Pair(
        "missing-reduction",
        ("model",),
        "jnp.sqrt((x * x)",
        rms_by_shard,
        rms,
        lambda x: x / jnp.sqrt((x * x).mean(-1, keepdims=True) + 1e-6),
        (X,),
        (BOTH,),
        BOTH,
    ),
    "masked_mean_of_means": Pair(
        "misplaced-reduction",
        ("data",),
        "(loss * mask).sum() / mask.sum()",
        masked_mean_of_means,
        masked_mean,
        lambda loss, mask: (loss * mask).sum() / mask.sum(),
        (draw(16, seed=12), MASK),
        (PS("data"), PS("data")),
        PS(),
    ),
    "metric_counted_twice": Pair(
        "doubled-reduction",
        ("data",),
        "lax.psum(positive",
        metric_counted_twice,
        metric_counted_once,
        lambda x: (x > 0).astype(jnp.float32).sum(),
        (X,),
        (PS("data"),),
        PS(),
    ),
    "auxiliary_of_parts": Pair(
        "misplaced-reduction",
        ("data",),
        "share * mean",
        auxiliary_of_parts,
        auxiliary_of_means,
        lambda g, c: (c.mean(0) * g.mean(0)).sum(),
        (GATES, CHOSEN),
        (PS("data"), PS("data")),
        PS(),
    ),
}


# ---- split vocabularies and sequences -----------------------------------------------------------

LOGITS, LABELS = (
    draw(16, 32, seed=13),
    np.random.default_rng(14).integers(0, 32, 16).astype(np.int32),
)
TABLE, IDS = draw(32, 8, seed=15), np.random.default_rng(16).integers(0, 32, 16).astype(np.int32)


def softmax_by_shard(logits):
    shifted = jnp.exp(logits - logits.max(-1, keepdims=True))
    return shifted / shifted.sum(-1, keepdims=True)


def softmax(logits):
    shifted = jnp.exp(logits - lax.pmax(logits.max(-1, keepdims=True), "model"))
    return shifted / lax.psum(shifted.sum(-1, keepdims=True), "model")


def softmax_own_maximum(logits):
    shifted = jnp.exp(logits - logits.max(-1, keepdims=True))
    return shifted / lax.psum(shifted.sum(-1, keepdims=True), "model")


def own_labels(logits, labels):
    """The logit of each label, on the device that holds it; zero elsewhere."""
    here = labels - lax.axis_index("model") * logits.shape[1]
    mine = (here >= 0) & (here < logits.shape[1])
    picked = jnp.take_along_axis(logits, jnp.clip(here, 0, logits.shape[1] - 1)[:, None], 1)[:, 0]
    return jnp.where(mine, picked, 0.0)


def cross_entropy_by_shard(logits, labels):
    total = jnp.exp(logits).sum(-1)
    return (jnp.log(total) - lax.psum(own_labels(logits, labels), "model")).mean()


def cross_entropy(logits, labels):
    total = lax.psum(jnp.exp(logits).sum(-1), "model")
    return (jnp.log(total) - lax.psum(own_labels(logits, labels), "model")).mean()


def cross_entropy_reference(logits, labels):
    return -jnp.take_along_axis(jax.nn.log_softmax(logits), labels[:, None], 1).mean()


def argmax_by_shard(logits):
    return jnp.argmax(logits, -1)


def argmax(logits):
    best, at = logits.max(-1), jnp.argmax(logits, -1) + lax.axis_index("model") * logits.shape[1]
    top = lax.pmax(best, "model")
    return lax.pmin(jnp.where(best == top, at, logits.shape[1] * N_MODEL), "model")


def looked_up_by_shard(table, ids):
    return lax.psum(table[ids], "model")


def looked_up(table, ids):
    here = ids - lax.axis_index("model") * table.shape[0]
    mine = (here >= 0) & (here < table.shape[0])
    return lax.psum(
        jnp.where(mine[:, None], table[jnp.clip(here, 0, table.shape[0] - 1)], 0.0), "model"
    )


def places_by_shard(mask):
    return jnp.cumsum(mask, 0) - 1.0


def places(mask):
    own = jnp.cumsum(mask, 0)
    before = lax.all_gather(own[-1], "data")
    earlier = jnp.where(jnp.arange(N_DATA)[:, None] < lax.axis_index("data"), before, 0.0).sum(0)
    return own + earlier - 1.0


def gathered_over_data(x):
    return lax.all_gather(x, "data", axis=1, tiled=True)


def gathered_over_model(x):
    return lax.all_gather(x, "model", axis=1, tiled=True)


VOCABULARY = {
    "softmax_by_shard": Pair(
        "missing-reduction",
        ("model",),
        "logits - logits.max",
        softmax_by_shard,
        softmax,
        lambda x: jax.nn.softmax(x, -1),
        (LOGITS,),
        (BOTH,),
        BOTH,
        repaired=False,
    ),
    "softmax_own_maximum": Pair(
        "misplaced-reduction",
        ("model",),
        "logits - logits.max",
        softmax_own_maximum,
        softmax,
        lambda x: jax.nn.softmax(x, -1),
        (LOGITS,),
        (BOTH,),
        BOTH,
    ),
    "cross_entropy_by_shard": Pair(
        "missing-reduction",
        ("model",),
        "jnp.log(total)",
        cross_entropy_by_shard,
        cross_entropy,
        cross_entropy_reference,
        (LOGITS, LABELS),
        (PS(None, "model"), PS()),
        PS(),
    ),
    "argmax_by_shard": Pair(
        "local-result",
        ("model",),
        "jnp.argmax",
        argmax_by_shard,
        argmax,
        lambda x: jnp.argmax(x, -1),
        (LOGITS,),
        (BOTH,),
        PS("data"),
        repaired=False,
    ),
    "looked_up_by_shard": Pair(
        "local-result",
        ("model",),
        "table[ids]",
        looked_up_by_shard,
        looked_up,
        lambda t, i: t[i],
        (TABLE, IDS),
        (PS("model"), PS()),
        PS(),
        repaired=False,
    ),
    "places_by_shard": Pair(
        "local-result",
        ("data",),
        "jnp.cumsum",
        places_by_shard,
        places,
        lambda m: jnp.cumsum(m, 0) - 1.0,
        (CHOSEN,),
        (PS("data"),),
        PS("data"),
        repaired=False,
    ),
    "gathered_over_data": Pair(
        "wrong-placement",
        ("data",),
        "lax.all_gather(x",
        gathered_over_data,
        gathered_over_model,
        lambda x: x,
        (X,),
        (BOTH,),
        PS("data", None),
        wrong_outs=PS(None, "model"),
        repaired=False,
    ),
}


# ---- experts ------------------------------------------------------------------------------------

G, SIZE, E, CAPACITY, M, H = 8, 8, 8, 4, 12, 16
TOKENS, W_IN, W_OUT = draw(G, SIZE, M, seed=17), draw(E, M, H, seed=18), draw(E, H, M, seed=19)
DISPATCH = np.asarray(np.random.default_rng(20).random((G, SIZE, E, CAPACITY)) < 0.1, np.float32)
COMBINE = np.asarray(
    DISPATCH * np.random.default_rng(21).random((G, SIZE, E, CAPACITY)), np.float32
)


def experts(dispatch, combine, x, w_in, w_out):
    d = jnp.einsum("gsec,gsm->egcm", dispatch, x)
    o = jnp.einsum("egch,ehm->egcm", jax.nn.relu(jnp.einsum("egcm,emh->egch", d, w_in)), w_out)
    return jnp.einsum("gsec,egcm->gsm", combine, o)


def exchanged(dispatch, combine, x, w_in, w_out):
    d = jnp.einsum("gsec,gsm->egcm", dispatch, x)
    d = lax.all_to_all(d, "model", 0, 1, tiled=True)
    o = jnp.einsum("egch,ehm->egcm", jax.nn.relu(jnp.einsum("egcm,emh->egch", d, w_in)), w_out)
    o = lax.all_to_all(o, "model", 1, 0, tiled=True)
    return jnp.einsum("gsec,egcm->gsm", combine, o)


def exchanged_and_summed(dispatch, combine, x, w_in, w_out):
    d = jnp.einsum("gsec,gsm->egcm", dispatch, x)
    d = lax.all_to_all(d, "model", 0, 1, tiled=True)
    o = jnp.einsum("egch,ehm->egcm", jax.nn.relu(jnp.einsum("egcm,emh->egch", d, w_in)), w_out)
    o = lax.all_to_all(o, "model", 1, 0, tiled=True)
    return lax.psum(jnp.einsum("gsec,egcm->gsm", combine, o), "model")


TOKENS_SPLIT = (PS("model"), PS("model"), PS("model"), PS("model"), PS("model"))
TOKENS_WHOLE = (PS("data"), PS("data"), PS("data"), PS("model"), PS("model"))

EXPERTS = {
    "tokens_on_every_expert": Pair(
        "wrong-placement",
        ("model",),
        "lax.all_to_all(d",
        exchanged_and_summed,
        exchanged,
        experts,
        (DISPATCH, COMBINE, TOKENS, W_IN, W_OUT),
        TOKENS_SPLIT,
        PS("model"),
        wrong_ins=TOKENS_WHOLE,
        wrong_outs=PS("data"),
        repaired=False,
    ),
}

SECOND = ROW_PARALLEL | TRAINING | VOCABULARY | EXPERTS
PAIRS = FIRST | SECOND
