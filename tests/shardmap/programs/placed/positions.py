"""Programs in which each device computes its place from its own index: caches split by positions,
tokens sent to experts, rows of a split optimiser.

Each wrong program stands beside its corrected twin, as in the folder `wrong`.
"""

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import PartitionSpec as PS

from tests.shardmap.programs.kinds import N_MODEL, Pair, draw

# ---- a cache split by positions -----------------------------------------------------------------

QUERY, KEYS, VALUES = draw(4, 16, seed=80), draw(32, 16, seed=81), draw(32, 16, seed=82)
LENGTH, CACHE = np.int32(21), (PS(), PS("model"), PS("model"), PS())


def masked_scores(q, k, length):
    rows = k.shape[0]
    at = lax.axis_index("model") * rows + jnp.arange(rows)
    return jnp.where(at[None, :] < length, q @ k.T, -1e30)


def decoded_alone(q, k, v, length):
    weights = jax.nn.softmax(masked_scores(q, k, length), axis=-1)
    return weights @ v


def decoded(q, k, v, length):
    scores = masked_scores(q, k, length)
    weights = jnp.exp(scores - lax.pmax(scores.max(-1, keepdims=True), "model"))
    return lax.psum(weights @ v, "model") / lax.psum(weights.sum(-1, keepdims=True), "model")


def decoded_reference(q, k, v, length):
    scores = jnp.where(jnp.arange(k.shape[0])[None, :] < length, q @ k.T, -1e30)
    return jax.nn.softmax(scores, axis=-1) @ v


# ---- tokens sent to experts ---------------------------------------------------------------------

T, N_EXPERTS, CAPACITY, D, D_FF = 32, 8, 8, 12, 16
TOKENS = draw(T, D, seed=85)


def slots(x, router):
    """The gate of each token, and its slot of its expert on this device."""
    gates = jax.nn.softmax(x @ router, axis=-1)
    chosen = jax.nn.one_hot(jnp.argmax(gates, -1), N_EXPERTS)
    place = jnp.cumsum(chosen, axis=0) * chosen - 1.0
    return gates, chosen[..., None] * jax.nn.one_hot(place.astype(jnp.int32), CAPACITY)


def work(inputs, up, down):
    return jnp.einsum("ech,ehd->ecd", jax.nn.relu(jnp.einsum("ecd,edh->ech", inputs, up)), down)


def sent(x, router, up, down, there=lambda x: x, back=lambda x: x):
    gates, dispatch = slots(x, router)
    outputs = back(work(there(jnp.einsum("tec,td->ecd", dispatch, x)), up, down))
    return jnp.einsum("tec,ecd->td", dispatch * gates[..., None], outputs)


def sent_to_experts(back):
    return lambda *args: sent(
        *args, there=lambda x: lax.all_to_all(x, "model", 0, 1, tiled=True), back=back
    )


def sent_reference(x, *weights):
    alone = jax.vmap(lambda x: sent(x, *weights))
    return alone(x.reshape(N_MODEL, -1, D)).reshape(x.shape)


# ---- rows of a split optimiser ------------------------------------------------------------------

WEIGHTS, X, Y = draw(32, 24, seed=89), draw(16, 32, seed=90), draw(16, 24, seed=91)
MOMENTUM = 0 * WEIGHTS
ZERO = (PS(), PS("data"), PS("data"), PS("data"))


squared = lambda w, x, y: ((x @ w - y) ** 2).mean()


def own_rows(w, m, x, y):
    """This device's rows of the weights after a step with momentum."""
    g = jax.grad(squared)(w, x, y)
    g = lax.psum_scatter(g, "data", scatter_dimension=0, tiled=True) / lax.axis_size("data")
    start = lax.axis_index("data") * m.shape[0]
    mine = lax.dynamic_slice_in_dim(w, start, m.shape[0], axis=0)
    return mine - 0.1 * (0.9 * m + g), start


def rows_written_back(w, m, x, y):
    mine, start = own_rows(w, m, x, y)
    return lax.dynamic_update_slice_in_dim(w, mine, start, axis=0)


def rows_gathered(w, m, x, y):
    mine, _ = own_rows(w, m, x, y)
    return lax.all_gather(mine, "data", axis=0, tiled=True)


def rows_returned(w, m, x, y):
    mine, _ = own_rows(w, m, x, y)
    return mine


step_reference = lambda w, m, x, y: w - 0.1 * (0.9 * m + jax.grad(squared)(w, x, y))


PAIRS = {
    "decoded_by_shard": Pair(
        "misplaced-reduction",
        ("model",),
        "jax.nn.softmax",
        lambda *args: lax.psum(decoded_alone(*args), "model"),
        decoded,
        decoded_reference,
        (QUERY, KEYS, VALUES, LENGTH),
        CACHE,
        PS(),
        repaired=False,
    ),
    "decoded_and_averaged": Pair(
        "misplaced-reduction",
        ("model",),
        "jax.nn.softmax",
        lambda *args: lax.pmean(decoded_alone(*args), "model"),
        decoded,
        decoded_reference,
        (QUERY, KEYS, VALUES, LENGTH),
        CACHE,
        PS(),
        repaired=False,
    ),
    "sent_and_kept": Pair(
        "differs-on-one-device",
        ("model",),
        "",
        sent_to_experts(lambda outputs: outputs.reshape(N_EXPERTS, CAPACITY, D)),
        sent_to_experts(lambda outputs: lax.all_to_all(outputs, "model", 1, 0, tiled=True)),
        sent_reference,
        (
            TOKENS,
            draw(D, N_EXPERTS, seed=86),
            draw(N_EXPERTS, D, D_FF, seed=87),
            draw(N_EXPERTS, D_FF, D, seed=88),
        ),
        (PS("model"), PS(), PS("model"), PS("model")),
        PS("model"),
        repaired=False,
        severity="note",
    ),
    "rows_written_back": Pair(
        "wrong-placement",
        ("data",),
        "lax.dynamic_update_slice",
        rows_written_back,
        rows_gathered,
        step_reference,
        (WEIGHTS, MOMENTUM, X, Y),
        ZERO,
        PS(),
        vma=False,
        repaired=False,
    ),
    "rows_returned": Pair(
        "wrong-placement",
        ("data",),
        "mine - 0.1",
        rows_returned,
        rows_gathered,
        step_reference,
        (WEIGHTS, MOMENTUM, X, Y),
        ZERO,
        PS(),
        vma=False,
    ),
}
