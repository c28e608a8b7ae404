"""Wrong layers of experts, each with its corrected twin."""

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import PartitionSpec as PS

from tests.shardmap.programs.kinds import Pair, draw

G, SIZE, E, CAPACITY, M, H = 8, 8, 8, 4, 12, 16
TOKENS, W_IN, W_OUT = draw(G, SIZE, M, seed=17), draw(E, M, H, seed=18), draw(E, H, M, seed=19)
DISPATCH = np.asarray(np.random.default_rng(20).random((G, SIZE, E, CAPACITY)) < 0.1, np.float32)
COMBINE = np.asarray(
    DISPATCH * np.random.default_rng(21).random((G, SIZE, E, CAPACITY)), np.float32
)


def experts(dispatch, combine, x, w_in, w_out, exchange=lambda tokens, *dims: tokens):
    d = exchange(jnp.einsum("gsec,gsm->egcm", dispatch, x), 0, 1)
    o = jnp.einsum("egch,ehm->egcm", jax.nn.relu(jnp.einsum("egcm,emh->egch", d, w_in)), w_out)
    return jnp.einsum("gsec,egcm->gsm", combine, exchange(o, 1, 0))


def exchanged(*args):
    return experts(*args, exchange=lambda x, *dims: lax.all_to_all(x, "model", *dims, tiled=True))


TOKENS_SPLIT = (PS("model"), PS("model"), PS("model"), PS("model"), PS("model"))
TOKENS_WHOLE = (PS("data"), PS("data"), PS("data"), PS("model"), PS("model"))

PAIRS = {
    "tokens_on_every_expert": Pair(
        "doubled-reduction",
        ("model",),
        "lax.psum(exchanged",
        lambda *args: lax.psum(exchanged(*args), "model"),
        exchanged,
        experts,
        (DISPATCH, COMBINE, TOKENS, W_IN, W_OUT),
        TOKENS_SPLIT,
        PS("model"),
        wrong_ins=TOKENS_WHOLE,
        wrong_outs=PS("data"),
        vma=False,
    ),
}
