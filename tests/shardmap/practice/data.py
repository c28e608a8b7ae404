"""Selection, sorting, counting, random numbers."""

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import PartitionSpec as P

from tests.shardmap.practice.case import case, floats, integers


def top(x):
    values, places = lax.top_k(x, 3)
    return values, places


@case(
    {"data": 8},
    top,
    lambda: floats((64,)),
    "local places",
    "local winners only",
    ins=(P("data"),),
    outs=(P(), P()),
)
def distributed_top_k(bug, x):
    n = x.shape[0]
    values, places = lax.top_k(x, 3)
    places = places if bug == "local places" else places + lax.axis_index("data") * n
    if bug == "local winners only":
        return values, places
    values = lax.all_gather(values, "data", tiled=True)
    places = lax.all_gather(places, "data", tiled=True)
    best, which = lax.top_k(values, 3)
    return best, places[which]


counts = lambda x: jnp.bincount(jnp.clip(x, 0, 9), length=10)


@case(
    {"data": 8},
    counts,
    lambda: (integers(0, 12, 64),),
    "not reduced",
    "maximum of counts",
    ins=(P("data"),),
    outs=P(),
)
def histogram(bug, x):
    local = jnp.zeros(10, jnp.int32).at[jnp.clip(x, 0, 9)].add(1)
    if bug == "not reduced":
        return local
    return (lax.pmax if bug == "maximum of counts" else lax.psum)(local, "data")


def dropout(x, key):
    key, shape = jax.random.wrap_key_data(key), (x.shape[0] // 4, x.shape[1])
    keep = [jax.random.bernoulli(jax.random.fold_in(key, i), 0.5, shape) for i in range(4)]
    return jnp.where(jnp.concatenate(keep), x / 0.5, 0.0)


@case(
    {"data": 4},
    dropout,
    lambda: (floats((8, 6))[0], np.array([0, 7], np.uint32)),
    "same key everywhere",
    ins=(P("data"), P()),
    outs=P("data"),
)
def dropout_keys(bug, x, key):
    key = jax.random.wrap_key_data(key)
    key = key if bug == "same key everywhere" else jax.random.fold_in(key, lax.axis_index("data"))
    return jnp.where(jax.random.bernoulli(key, 0.5, x.shape), x / 0.5, 0.0)


total = lambda x: jnp.cumsum(x, 0)


@case(
    {"data": 4},
    total,
    lambda: floats((16, 3)),
    "prefix not added",
    "own total in the prefix",
    ins=(P("data"),),
    outs=P("data"),
)
def prefix_sum(bug, x):
    local = jnp.cumsum(x, 0)
    if bug == "prefix not added":
        return local
    ends = lax.all_gather(local[-1], "data")
    me = lax.axis_index("data")
    index = jnp.arange(lax.axis_size("data"))
    before = index <= me if bug == "own total in the prefix" else index < me
    return local + (ends * before[:, None]).sum(0)


def gramian(x):
    x = x - x.mean(0)
    return x.T @ x / (x.shape[0] - 1)


@case(
    {"data": 2, "model": 4},
    gramian,
    lambda: floats((16, 8)),
    "local mean",
    "columns not gathered",
    "divided by the local count",
    ins=(P("data", "model"),),
    outs=P("model"),
)
def covariance(bug, x):
    """Rows over data, columns over model."""
    x = x - (x.mean(0) if bug == "local mean" else lax.pmean(x.mean(0), "data"))
    rows = x.shape[0] if bug == "divided by the local count" else x.shape[0] * 2
    other = x
    if bug == "columns not gathered":
        other = jnp.tile(x, (1, 4))
    else:
        other = lax.all_gather(x, "model", axis=1, tiled=True)
    return lax.psum(x.T @ other, "data") / (rows - 1)


def power(a, v):
    for _ in range(3):
        v = a @ v
        v = v / jnp.linalg.norm(v)
    return v, v @ (a @ v)


@case(
    {"row": 8},
    power,
    lambda: floats((16, 16), (16,)),
    "norm of the local rows",
    "product not reduced",
    ins=(P("row"), P()),
    outs=(P(), P()),
)
def power_iteration(bug, a, v):
    def body(_, v):
        mine = a @ v
        square = jnp.sum(mine * mine)
        square = square if bug == "norm of the local rows" else lax.psum(square, "row")
        return lax.all_gather(mine / jnp.sqrt(square), "row", tiled=True)

    v = lax.fori_loop(0, 3, body, v)
    n = a.shape[0]
    mine = lax.dynamic_slice_in_dim(v, lax.axis_index("row") * n, n)
    value = mine @ (a @ v)
    return v, value if bug == "product not reduced" else lax.psum(value, "row")


@case(
    {"ring": 4},
    lambda a, b: a @ b,
    lambda: floats((8, 12), (12, 6)),
    "columns of the wrong owner",
    "one step short",
    ins=(P("ring"), P("ring")),
    outs=P("ring"),
)
def collective_matmul(bug, a, b):
    """Rows of both factors are split; the rows of b go round."""
    n, me = lax.axis_size("ring"), lax.axis_index("ring")
    rows = b.shape[0]
    out = jnp.zeros((a.shape[0], b.shape[1]))
    for i in range(n - 1 if bug == "one step short" else n):
        owner = (me - i if bug == "columns of the wrong owner" else me + i) % n
        out = out + lax.dynamic_slice_in_dim(a, owner * rows, rows, 1) @ b
        b = lax.ppermute(b, "ring", [(j, (j - 1) % n) for j in range(n)])
    return out
