"""Right programs, each with the plain function that it computes: rings, pipelines, small idioms,
tensor-, sequence- and vocabulary-parallel layers, experts, and training steps."""

from functools import reduce

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import PartitionSpec as PS

from tests.shardmap.programs.kinds import (
    N_DATA,
    N_MODEL,
    Program,
    averaged,
    draw,
    mapped,
    outer_grad,
    valued_step,
)
from tests.shardmap.programs.rings import (
    MICRO,
    STAGES,
    VALUES,
    K,
    Q,
    attention_of_rows,
    pipeline,
    ring_attention,
    ring_product,
    ring_sum,
)
from tests.shardmap.programs.wrong.experts import (
    COMBINE,
    DISPATCH,
    TOKENS,
    W_IN,
    W_OUT,
    E,
    exchanged,
    experts,
)
from tests.shardmap.programs.wrong.layers import MLP, W1, W2, X, mlp, mlp_reduced
from tests.shardmap.programs.wrong.products import BIAS, MATMUL, ROWS, U, V
from tests.shardmap.programs.wrong.training import STEP, W, Y, squared
from tests.shardmap.programs.wrong.vocabulary import (
    IDS,
    LABELS,
    LOGITS,
    TABLE,
    cross_entropy,
    cross_entropy_reference,
    looked_up,
)

# ---- rings, pipelines and small idioms ----------------------------------------------------------


def power_iteration(a):
    """Rows of a symmetric matrix are split; the loop ends when the vector keeps still."""
    n = a.shape[1]

    def turn(state):
        v, _, i = state
        w = lax.all_gather(a @ v, "model", tiled=True)
        w = w / jnp.sqrt((w * w).sum())
        return w, jnp.abs(w - v).max(), i + 1

    start = (jnp.ones(n) / jnp.sqrt(n), jnp.float32(1.0), 0)
    return lax.while_loop(lambda s: (s[1] > 1e-6) & (s[2] < 50), turn, start)[0]


def power_reference(a):
    v = jnp.ones(a.shape[0]) / jnp.sqrt(a.shape[0])
    for _ in range(50):
        v = a @ v
        v = v / jnp.sqrt((v * v).sum())
    return v


SYMMETRIC = np.diag(np.arange(1, 9)).astype(np.float32) + 0.1
SYMMETRIC[7, 7] = 30.0


def standard(x):
    """Batch statistics over all devices."""
    mean = lax.pmean(x.mean(0), "data")
    return (x - mean) / jnp.sqrt(lax.pmean((x * x).mean(0), "data") - mean * mean + 1e-3)


def dropped(x):
    key = jax.random.fold_in(jax.random.key(0), lax.axis_index("data"))
    keep = jax.random.bernoulli(key, 0.5, x.shape)
    return lax.pmean((jnp.where(keep, x, 0.0) + jnp.where(keep, 0.0, x)).mean(), "data")


def deferred(us, v):
    """A sum over microbatches of products stays partial in the carry, and is reduced once."""

    body = lambda total, u: (total + 2.0 * (u @ v), None)

    start = lax.pcast(jnp.zeros((us.shape[1], v.shape[1])), ("data", "model"), to="varying")
    return lax.psum(lax.scan(body, start, us)[0], "model")


def scores_scaled(q, k):
    """The contracted dim is split; its length is the square of a number that is the axis size as
    well."""
    return jax.nn.softmax(lax.psum(q @ k.T, "model") / jnp.sqrt(16.0), -1)


def named(x):
    """Names for `jax.checkpoint` change no value."""
    mean = checkpoint_name(x.mean(0), "mean")
    share = checkpoint_name(checkpoint_name(x.sum(0), "sum") / len(x), "share")
    shift = jnp.log(lax.psum(checkpoint_name(jnp.exp(x), "exp").sum(0), "data"))
    return lax.pmean(mean, "data") + lax.pmean(share, "data") + shift


SPLIT_ROWS = PS("model", None)

IDIOMS = {
    "ring_attention": Program(
        mapped(ring_attention, (SPLIT_ROWS,) * 3, SPLIT_ROWS), attention_of_rows, (Q, K, VALUES)
    ),
    "ring_product": Program(
        mapped(ring_product, (SPLIT_ROWS, PS(None, "model")), PS(None, "model")),
        lambda x, w: x @ w,
        (X, W1),
        vma=(False,),
    ),
    "ring_sum": Program(
        mapped(ring_sum, (PS("model"),), PS()),
        lambda x: x.reshape(N_MODEL, -1, x.shape[1]).sum(0),
        (X,),
        vma=(False,),
        notes=("differs-on-one-device",),
    ),
    "pipeline": Program(
        mapped(pipeline, (PS("model"), PS()), PS()),
        lambda stages, micro: reduce(lambda x, w: jnp.tanh(x @ w), stages, micro),
        (STAGES, MICRO),
    ),
    "reduce_scatter_by_hand": Program(
        mapped(
            lambda u, v: lax.all_to_all(
                (u @ v).reshape(N_MODEL, -1, v.shape[1]), "model", 0, 0
            ).sum(0),
            (PS(None, "model"), PS("model", None)),
            SPLIT_ROWS,
        ),
        lambda u, v: u @ v,
        (U, V),
    ),
    "gathered_and_summed": Program(
        mapped(lambda u, v: lax.all_gather(u @ v, "model").sum(0), MATMUL, ROWS),
        lambda u, v: u @ v,
        (U, V),
        vma=(False,),
    ),
    "bias_on_first": Program(
        mapped(
            lambda u, v, b: lax.psum(
                u @ v + jnp.where(lax.axis_index("model") == 0, b, 0.0), "model"
            ),
            (*MATMUL, PS()),
            ROWS,
        ),
        lambda u, v, b: u @ v + b,
        (U, V, BIAS),
    ),
    "bias_shared": Program(
        mapped(
            lambda u, v, b: lax.psum(u @ v + b / lax.axis_size("model"), "model"),
            (*MATMUL, PS()),
            ROWS,
        ),
        lambda u, v, b: u @ v + b,
        (U, V, BIAS),
    ),
    "power_iteration": Program(
        mapped(power_iteration, (SPLIT_ROWS,), PS()), power_reference, (SYMMETRIC,), vma=(False,)
    ),
    "standard": Program(
        mapped(standard, (PS("data"),), PS("data")),
        lambda x: (x - x.mean(0)) / jnp.sqrt(x.var(0) + 1e-3),
        (X,),
    ),
    "parts_side_by_side": Program(
        mapped(
            lambda x: ((x * x).sum()[None], lax.psum((x * x).sum(), "data")),
            (PS("data"),),
            (PS("data"), PS()),
        ),
        lambda x: ((x * x).reshape(N_DATA, -1).sum(1), (x * x).sum()),
        (X,),
        notes=("differs-on-one-device",),
    ),
    "dropped": Program(mapped(dropped, (PS("data"),), PS()), lambda x: x.mean(), (X,)),
    "half_precision": Program(
        mapped(
            lambda u, v: lax.psum(
                jnp.matmul(
                    u.astype(jnp.bfloat16),
                    v.astype(jnp.bfloat16),
                    preferred_element_type=jnp.float32,
                ),
                "model",
            ),
            MATMUL,
            ROWS,
        ),
        lambda u, v: (
            u.astype(jnp.bfloat16).astype(jnp.float32) @ v.astype(jnp.bfloat16).astype(jnp.float32)
        ),
        (U, V),
    ),
    "deferred": Program(
        mapped(deferred, (PS(None, "data", "model"), PS("model", None)), ROWS),
        lambda us, v: 2.0 * (us @ v).sum(0),
        (draw(3, 16, 32, seed=8), V),
    ),
    "scores_scaled": Program(
        mapped(scores_scaled, (PS(None, "model"), PS(None, "model")), PS()),
        lambda q, k: jax.nn.softmax(q @ k.T / 4.0, -1),
        (Q, K),
    ),
    "named": Program(
        mapped(named, (PS("data"),), PS()),
        lambda x: 2 * x.mean(0) + jnp.log(jnp.exp(x).sum(0)),
        (X,),
    ),
}


# ---- layers -------------------------------------------------------------------------------------


mlp_loss = lambda x, w1, w2: (mlp(x, w1, w2) ** 2).mean()


@jax.custom_vjp
def enter(x):
    """Megatron's f: the identity, whose gradient is summed."""
    return x


@jax.custom_vjp
def leave(x):
    """Megatron's g: a sum, whose gradient is passed on."""
    return lax.psum(x, "model")


enter.defvjp(lambda x: (x, None), lambda _, ct: (lax.psum(ct, "model"),))
leave.defvjp(lambda x: (lax.psum(x, "model"), None), lambda _, ct: (ct,))


normed = lambda x: x * lax.rsqrt((x * x).mean(-1, keepdims=True) + 1e-6)


def sequence_parallel(x, w1, w2):
    """Tokens are split outside of the two products, features inside."""
    y = jax.nn.gelu(lax.all_gather(normed(x), "model", axis=0, tiled=True) @ w1) @ w2
    return x + lax.psum_scatter(y, "model", scatter_dimension=0, tiled=True)


WQ, WK, WV = (draw(24, 32, seed=30 + i) * 0.2 for i in range(3))


def attention(x, wq, wk, wv, wo, heads):
    q, k, v = ((x @ w).reshape(*x.shape[:2], heads, -1) for w in (wq, wk, wv))
    scores = jnp.einsum("bqhd,bkhd->bhqk", q, k) / jnp.sqrt(q.shape[-1])
    scores = jnp.where(jnp.tril(jnp.ones(scores.shape[-2:], bool)), scores, -1e9)
    return (
        jnp.einsum("bhqk,bkhd->bqhd", jax.nn.softmax(scores, -1), v).reshape(*x.shape[:2], -1) @ wo
    )


def attention_loss(x, wq, wk, wv, wo):
    @jax.checkpoint
    def block(x):
        return x + lax.psum(attention(normed(x), wq, wk, wv, wo, 4 // N_MODEL), "model")

    return lax.pmean((block(x) ** 2).mean(), "data")


ATTENTION = (PS("data"), PS(None, "model"), PS(None, "model"), PS(None, "model"), PS("model"))


def stable_cross_entropy(logits, labels):
    top = lax.stop_gradient(lax.pmax(lax.stop_gradient(logits).max(-1), "model"))
    total = lax.psum(jnp.exp(logits - top[:, None]).sum(-1), "model")
    here = labels - lax.axis_index("model") * logits.shape[1]
    one_hot = here[:, None] == jnp.arange(logits.shape[1])
    picked = lax.psum(jnp.where(one_hot, logits, 0.0).sum(-1), "model")
    return (jnp.log(total) + top - picked).mean()


LAYERS = {
    "megatron_mlp": Program(mapped(mlp_reduced, MLP, ROWS), mlp, (X, W1, W2)),
    "megatron_mlp_gradient": Program(
        outer_grad(
            lambda x, w1, w2: lax.pmean((mlp_reduced(x, w1, w2) ** 2).mean(), "data"),
            MLP,
            PS(),
            (0, 1, 2),
        ),
        jax.value_and_grad(mlp_loss, (0, 1, 2)),
        (X, W1, W2),
    ),
    "megatron_step": Program(
        mapped(
            valued_step(
                lambda ws, x: ((x + leave(jax.nn.gelu(enter(x) @ ws[0]) @ ws[1])) ** 2).mean(),
                averaged,
                averaged,
            ),
            (MLP[1:], MLP[0]),
            (PS(), MLP[1:]),
        ),
        valued_step(lambda ws, x: mlp_loss(x, *ws)),
        ((W1, W2), X),
        vma=(False,),
    ),
    "sequence_parallel": Program(
        mapped(
            sequence_parallel,
            (PS("model", None), PS(None, "model"), PS("model", None)),
            PS("model", None),
        ),
        lambda x, w1, w2: x + jax.nn.gelu(normed(x) @ w1) @ w2,
        (X, W1, W2),
    ),
    "attention_gradient": Program(
        outer_grad(attention_loss, ATTENTION, PS(), (0, 1, 2, 3, 4)),
        jax.value_and_grad(
            lambda x, wq, wk, wv, wo: ((x + attention(normed(x), wq, wk, wv, wo, 4)) ** 2).mean(),
            (0, 1, 2, 3, 4),
        ),
        (draw(4, 8, 24, seed=34), WQ, WK, WV, draw(32, 24, seed=33) * 0.2),
    ),
    "cross_entropy": Program(
        mapped(cross_entropy, (PS(None, "model"), PS()), PS()),
        cross_entropy_reference,
        (LOGITS, LABELS),
    ),
    "stable_cross_entropy": Program(
        mapped(stable_cross_entropy, (PS(None, "model"), PS()), PS()),
        cross_entropy_reference,
        (LOGITS, LABELS),
    ),
    "cross_entropy_gradient": Program(
        outer_grad(stable_cross_entropy, (PS(None, "model"), PS()), PS(), 0),
        jax.value_and_grad(cross_entropy_reference),
        (LOGITS, LABELS),
    ),
    "embedding": Program(
        mapped(looked_up, (PS("model"), PS()), PS()), lambda t, i: t[i], (TABLE, IDS)
    ),
}


# ---- experts ------------------------------------------------------------------------------------


def routed(x, wg):
    """Top-1 routing of a group [S, M]: its combine mask and its auxiliary loss."""
    capacity = x.shape[0] // E * 2
    gates = jax.nn.softmax(x @ wg)
    chosen = jax.nn.one_hot(jnp.argmax(gates, -1), E)
    place = (jnp.cumsum(chosen, 0) - 1.0) * chosen
    kept = chosen * (place < capacity)
    slot = jax.nn.one_hot(place.sum(-1).astype(jnp.int32), capacity)
    return jnp.einsum("se,sc->sec", gates * kept, slot), (chosen.mean(0) * gates.mean(0)).sum()


def moe_loss(x, wg, w_in, w_out, layer=experts):
    combine, auxiliary = jax.vmap(routed, (0, None))(x, wg)
    y = layer((combine > 0).astype(x.dtype), combine, x, w_in, w_out)
    return ((x + y) ** 2).mean() + 0.01 * auxiliary.mean()


WG = draw(12, E, seed=40)


EXPERTS = {
    "experts": Program(
        mapped(exchanged, (PS("model"),) * 5, PS("model")),
        experts,
        (DISPATCH, COMBINE, TOKENS, W_IN, W_OUT),
    ),
    "moe_gradient": Program(
        outer_grad(
            lambda *args: lax.pmean(moe_loss(*args, layer=exchanged), "model"),
            (PS("model"), PS(), PS("model"), PS("model")),
            PS(),
            (0, 1, 2, 3),
        ),
        jax.value_and_grad(moe_loss, (0, 1, 2, 3)),
        (TOKENS, WG, W_IN, W_OUT),
    ),
}


# ---- training steps: data parallelism, ZeRO, accumulation ---------------------------------------

step_reference = valued_step(squared)


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
    return lax.all_gather(mine - 0.1 * m / (jnp.sqrt(v) + 1e-8), "data", tiled=True), m, v


def accumulated(w, x, y):
    micro = 2
    xs, ys = x.reshape(micro, -1, x.shape[1]), y.reshape(micro, -1, y.shape[1])

    def body(total, batch):
        value, g = jax.value_and_grad(squared)(w, *batch)
        return (total[0] + value / micro, total[1] + g / micro), None

    (value, g), _ = lax.scan(body, (jnp.float32(0), jnp.zeros_like(w)), (xs, ys))
    value, g = lax.pmean((value, g), "data")
    return value, w - 0.1 * g


def clipped(g):
    return g * jnp.minimum(1.0, 0.1 / jnp.sqrt((g * g).sum()))


def weighted(loss, mask):
    total, count = lax.psum(((loss * mask).sum(), mask.sum()), "data")
    return total / jnp.maximum(count, 1.0)


TRAINING = {
    "step_averaged": Program(
        mapped(valued_step(squared, averaged, averaged), STEP, (PS(), PS())),
        step_reference,
        (W, X, Y),
        vma=(False,),
    ),
    "step_of_mean": Program(
        mapped(valued_step(lambda *args: averaged(squared(*args))), STEP, (PS(), PS())),
        step_reference,
        (W, X, Y),
        vma=(True,),
    ),
    # Without check_vma, the gradient of a pmean is a device's own.
    "step_of_mean_unchecked": Program(
        mapped(
            valued_step(lambda *args: averaged(squared(*args)), of_gradient=averaged),
            STEP,
            (PS(), PS()),
        ),
        step_reference,
        (W, X, Y),
        vma=(False,),
    ),
    "step_of_sums": Program(
        mapped(
            valued_step(
                lambda w, x, y: (
                    ((x @ w - y) ** 2).sum() / (x.shape[0] * lax.axis_size("data") * y.shape[1])
                ),
                lambda value: lax.psum(value, "data"),
                lambda g: lax.psum(g, "data"),
            ),
            STEP,
            (PS(), PS()),
        ),
        step_reference,
        (W, X, Y),
        vma=(False,),
    ),
    "step_by_hand": Program(
        mapped(
            valued_step(
                squared,
                lambda value: lax.psum(value, "data") / lax.axis_size("data"),
                lambda g: lax.psum(g, "data") / lax.axis_size("data"),
            ),
            STEP,
            (PS(), PS()),
        ),
        step_reference,
        (W, X, Y),
        vma=(False,),
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
    # ZeRO-3: the forward pass gathers weights, and the backward pass scatters their gradients.
    "weights_gathered": Program(
        mapped(
            valued_step(
                lambda w, x, y: squared(lax.all_gather(w, "data", tiled=True), x, y),
                averaged,
                lambda g: g / lax.axis_size("data"),
            ),
            (PS("data"), PS("data"), PS("data")),
            (PS(), PS("data")),
        ),
        step_reference,
        (W, X, Y),
    ),
    "accumulated": Program(
        mapped(accumulated, STEP, (PS(), PS())), step_reference, (W, X, Y), vma=(False,)
    ),
    "clipped": Program(
        mapped(valued_step(squared, averaged, lambda g: clipped(averaged(g))), STEP, (PS(), PS())),
        valued_step(squared, of_gradient=clipped),
        (W, X, Y),
        vma=(False,),
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


PROGRAMS = LAYERS | TRAINING | EXPERTS | IDIOMS
