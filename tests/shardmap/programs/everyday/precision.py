"""Right programs of mixed precision: sums in fewer bits, and steps that are skipped where not all
is finite."""

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import PartitionSpec as PS

from tests.shardmap.programs.kinds import N_DATA, Program, draw, mapped
from tests.shardmap.programs.wrong.layers import X
from tests.shardmap.programs.wrong.training import W, Y, squared

BATCH, STEP = PS("data"), (PS(), PS("data"), PS("data"))
BOTH = PS("data", "model")


HALF_TOLERANCE = 0.01
U, V = draw(16, 32, seed=1), draw(32, 24, seed=2)
MATMUL = (BOTH, PS("model"))


def summed_in_half(u, v):
    y = jnp.dot(u, v, preferred_element_type=jnp.float32).astype(jnp.bfloat16)
    return HALF_TOLERANCE * lax.psum(y, "model").astype(jnp.float32)


def scattered_in_half(u, v):
    y = lax.psum_scatter((u @ v).astype(jnp.bfloat16), "model", scatter_dimension=1, tiled=True)
    return HALF_TOLERANCE * y.astype(jnp.float32)


def averaged_in_half(w, x, y):
    g = jax.grad(squared)(w, x, y).astype(jnp.bfloat16)
    return w - 0.01 * lax.pmean(g, "data").astype(jnp.float32)


rounded = lambda u, v: HALF_TOLERANCE * lax.psum(lax.reduce_precision(u @ v, 8, 10), "model")


ROUNDED = (draw(16, 32, seed=1) / 32, draw(32, 24, seed=2) / 4)
BITS = {
    "summed_in_half": Program(
        mapped(summed_in_half, MATMUL, BATCH), lambda u, v: HALF_TOLERANCE * (u @ v), ROUNDED
    ),
    "scattered_in_half": Program(
        mapped(scattered_in_half, MATMUL, BOTH), lambda u, v: HALF_TOLERANCE * (u @ v), ROUNDED
    ),
    "averaged_in_half": Program(
        mapped(averaged_in_half, STEP, PS()),
        lambda w, x, y: w - 0.01 * jax.grad(squared)(w, x, y),
        (W, X, Y),
        vma=(False,),
    ),
    "rounded": Program(
        mapped(rounded, MATMUL, BATCH), lambda u, v: HALF_TOLERANCE * (u @ v), ROUNDED
    ),
}


OVERFLOWN = X.copy()
OVERFLOWN[3, 3] = np.inf


def step_reference(w, x, y):
    g = jax.grad(squared)(w, x, y)
    return jnp.where(jnp.isfinite(g).all(), w - 0.1 * g, w)


def skipped(agree, choose):
    """A step that is left out when some device's gradient is not finite, as with a scaled loss."""

    def body(w, x, y):
        g = jax.grad(squared)(w, x, y)
        return choose(agree(jnp.isfinite(g).all()), w, w - 0.1 * lax.pmean(g, "data"))

    return body


smallest = lambda ok: lax.pmin(ok.astype(jnp.int32), "data") > 0


kept_or_new = lambda ok, old, new: lax.cond(ok, lambda: new, lambda: old)


def skipped_for_loss(w, x, y):
    value, g = jax.value_and_grad(squared)(w, x, y)
    bad = lax.psum(jnp.isnan(value).astype(jnp.float32), "data") > 0
    return jnp.where(bad, w, w - 0.1 * lax.pmean(g, "data"))


def skipped_for_norm(w, x, y):
    g = jax.grad(squared)(w, x, y)
    ok = lax.pmin(jnp.isfinite(jnp.sqrt((g * g).sum())).astype(jnp.int32), "data")
    return jnp.where(ok > 0, w - 0.1 * lax.pmean(g, "data"), w)


def checked_after(w, x, y):
    g = lax.psum(jax.grad(squared)(w, x, y), "data")
    return jnp.where(jnp.isfinite(g).all(), w - 0.1 * g / lax.axis_size("data"), w)


FINITE = {
    f"{name}_{kind}": Program(mapped(body, STEP, PS()), step_reference, (W, x, Y), vma=(False,))
    for kind, x in (("finite", X), ("overflown", OVERFLOWN))
    for name, body in {
        "smallest_where": skipped(smallest, lambda ok, old, new: jnp.where(ok, new, old)),
        "smallest_cond": skipped(smallest, kept_or_new),
        "none_fails": skipped(
            lambda ok: lax.psum((~ok).astype(jnp.int32), "data") == 0, kept_or_new
        ),
        "checked_after": checked_after,
    }.items()
} | {
    "skipped_for_loss": Program(
        mapped(skipped_for_loss, STEP, PS()), step_reference, (W, X, Y), vma=(False,)
    ),
    "skipped_for_norm": Program(
        mapped(skipped_for_norm, STEP, PS()), step_reference, (W, X, Y), vma=(False,)
    ),
    "cleaned": Program(
        mapped(
            lambda w, x, y: w - 0.1 * lax.pmean(jnp.nan_to_num(jax.grad(squared)(w, x, y)), "data"),
            STEP,
            PS(),
        ),
        step_reference,
        (W, X, Y),
        vma=(False,),
    ),
    "devices_that_agree": Program(
        mapped(
            lambda x: lax.psum((x > -9.0).all().astype(jnp.int32), "data") == N_DATA, (BATCH,), PS()
        ),
        lambda x: (x > -9.0).all(),
        (X,),
    ),
}


PROGRAMS = BITS | FINITE
