"""Wrong row-parallel layers, each with its corrected twin."""

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec as PS

from tests.shardmap.programs.kinds import Pair, draw
from tests.shardmap.programs.wrong.products import MATMUL, ROWS, U, V, product

X, W1, W2, SCALE = (
    draw(16, 24, seed=4),
    draw(24, 32, seed=5),
    draw(32, 24, seed=6),
    draw(24, seed=7),
)
MLP = (PS("data", None), PS(None, "model"), PS("model", None))


mlp = lambda x, w1, w2: x + jax.nn.gelu(x @ w1) @ w2


def mlp_unreduced(x, w1, w2):
    h = jax.nn.gelu(x @ w1)
    return x + h @ w2


mlp_reduced = lambda x, w1, w2: x + lax.psum(jax.nn.gelu(x @ w1) @ w2, "model")


def mlp_residual_inside(x, w1, w2):
    h = jax.nn.gelu(x @ w1)
    return lax.psum(x + h @ w2, "model")


def layernorm(x):
    centred = x - x.mean(-1, keepdims=True)
    return centred / jnp.sqrt((centred * centred).mean(-1, keepdims=True) + 1e-6)


def layernorm_before(u, v):
    h = u @ v
    centred = h - h.mean(-1, keepdims=True)
    scale = lax.psum((centred * centred).mean(-1, keepdims=True), "model")
    return lax.psum(centred, "model") / jnp.sqrt(scale + 1e-6)


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
    body = lambda total, u: (lax.psum(total + u @ v, "model"), None)

    return lax.scan(body, jnp.zeros((us.shape[1], v.shape[1])), us)[0]


def summed_after_loop(us, v):
    body = lambda total, u: (total + u @ v, None)

    return lax.psum(lax.scan(body, jnp.zeros((us.shape[1], v.shape[1])), us)[0], "model")


PAIRS = {
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
        "lax.psum(jax.nn.gelu(",
        lambda u, v: lax.psum(jax.nn.gelu(u @ v), "model"),
        lambda u, v: jax.nn.gelu(lax.psum(u @ v, "model")),
        lambda u, v: jax.nn.gelu(u @ v),
        (U, V),
        MATMUL,
        ROWS,
    ),
    "softmax_before": Pair(
        "misplaced-reduction",
        ("model",),
        "lax.psum(jax.nn.softmax(",
        lambda u, v: lax.psum(jax.nn.softmax(u @ v, -1), "model"),
        lambda u, v: jax.nn.softmax(lax.psum(u @ v, "model"), -1),
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
        lambda u, v: layernorm(lax.psum(u @ v, "model")),
        lambda u, v: layernorm(u @ v),
        (U, V),
        MATMUL,
        ROWS,
    ),
    "over_wrong_axis": Pair(
        "missing-reduction",
        ("model",),
        "u @ v",
        lambda u, v: lax.psum(u @ v, "data"),
        product,
        lambda u, v: u @ v,
        (U, V),
        MATMUL,
        ROWS,
        wrong_outs=PS(None, None),
    ),
    "scattered_as_whole": Pair(
        "wrong-placement",
        ("model",),
        "lax.psum_scatter",
        lambda u, v: lax.psum_scatter(u @ v, "model", scatter_dimension=1, tiled=True),
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
        lambda u, v: lax.psum((4.0 * (u @ v)).astype(jnp.int32), "model"),
        lambda u, v: (4.0 * lax.psum(u @ v, "model")).astype(jnp.int32),
        lambda u, v: (4.0 * (u @ v)).astype(jnp.int32),
        (U, V),
        MATMUL,
        ROWS,
    ),
    "largest_of_parts": Pair(
        "wrong-reduction",
        ("model",),
        "lax.pmax",
        lambda u, v: lax.pmax(u @ v, "model"),
        product,
        lambda u, v: u @ v,
        (U, V),
        MATMUL,
        ROWS,
    ),
    "predicate_partial": Pair(
        "missing-reduction",
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
        (draw(3, 16, 32, seed=8), V),
        (PS(None, "data", "model"), PS("model", None)),
        ROWS,
    ),
}
