"""Right layers of experts, each with the plain function that it computes."""

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec as PS

from tests.shardmap.programs.kinds import N_MODEL, Program, draw, mapped, outer_grad
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


def gating(x, wg):
    """Top-1 routing of groups [G, S, M]: dispatch and combine masks, and the auxiliary loss of each
    group."""
    capacity = x.shape[1] // E * 2
    gates = jax.nn.softmax(jnp.einsum("gsm,me->gse", x, wg))
    chosen = jax.nn.one_hot(jnp.argmax(gates, -1), E)
    place = (jnp.cumsum(chosen, 1) - 1.0) * chosen
    kept = chosen * (place < capacity)
    slot = jax.nn.one_hot(place.sum(-1).astype(jnp.int32), capacity)
    return jnp.einsum("gse,gsc->gsec", gates * kept, slot), (chosen.mean(1) * gates.mean(1)).sum(-1)


def moe_reference(x, wg, w_in, w_out):
    combine, auxiliary = gating(x, wg)
    y = experts((combine > 0).astype(x.dtype), combine, x, w_in, w_out)
    return ((x + y) ** 2).mean() + 0.01 * auxiliary.mean()


def moe_mapped(x, wg, w_in, w_out):
    combine, auxiliary = gating(x, wg)
    y = exchanged((combine > 0).astype(x.dtype), combine, x, w_in, w_out)
    return lax.pmean(((x + y) ** 2).mean() + 0.01 * auxiliary.mean(), "model")


def moe_of_tokens(x, wg, w_in, w_out):
    """Each device's tokens are its group; there is no dim of groups."""
    return exchanged_tokens(x, wg, w_in, w_out)


def exchanged_tokens(x, wg, w_in, w_out):
    capacity = x.shape[0] // E * 2
    gates = jax.nn.softmax(x @ wg)
    chosen = jax.nn.one_hot(jnp.argmax(gates, -1), E)
    place = (jnp.cumsum(chosen, 0) - 1.0) * chosen
    kept = chosen * (place < capacity)
    slot = jax.nn.one_hot(place.sum(-1).astype(jnp.int32), capacity)
    combine = jnp.einsum("se,sc->sec", gates * kept, slot)
    d = jnp.einsum("sec,sm->ecm", (combine > 0).astype(x.dtype), x)
    d = lax.all_to_all(d, "model", 0, 1, tiled=True)
    o = jnp.einsum("ech,ehm->ecm", jax.nn.relu(jnp.einsum("ecm,emh->ech", d, w_in)), w_out)
    o = lax.all_to_all(o, "model", 1, 0, tiled=True)
    return jnp.einsum("sec,ecm->sm", combine, o)


def moe_tokens_reference(x, wg, w_in, w_out):
    groups = x.reshape(N_MODEL, -1, x.shape[-1])
    combine, _ = gating(groups, wg)
    return experts((combine > 0).astype(x.dtype), combine, groups, w_in, w_out).reshape(x.shape)


WG = draw(12, E, seed=40)


PROGRAMS = {
    "experts": Program(
        mapped(exchanged, (PS("model"),) * 5, PS("model")),
        experts,
        (DISPATCH, COMBINE, TOKENS, W_IN, W_OUT),
    ),
    "moe_gradient": Program(
        outer_grad(moe_mapped, (PS("model"), PS(), PS("model"), PS("model")), PS(), (0, 1, 2, 3)),
        jax.value_and_grad(moe_reference, (0, 1, 2, 3)),
        (TOKENS, WG, W_IN, W_OUT),
    ),
    "moe_of_tokens": Program(
        mapped(moe_of_tokens, (PS("model"), PS(), PS("model"), PS("model")), PS("model")),
        moe_tokens_reference,
        (draw(64, 12, seed=41), WG, W_IN, W_OUT),
        notes=("differs-on-one-device",),
    ),
}
