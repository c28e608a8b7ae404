"""Programs that questions are asked about: golden files quote these lines."""

import jax
import jax.numpy as jnp

import sbp


def abstract(*shape):
    return jax.ShapeDtypeStruct(shape, jnp.float32)


MESH = jax.sharding.AbstractMesh((2, 4), ("data", "model"))


def megatron_mlp(x, w_in, w_out):
    h = jax.nn.gelu(x @ w_in)
    y = h @ w_out
    return x + y


def megatron_step(x, target, params):
    def loss_of(params):
        w_in, w_out = params["w_in"], params["w_out"]
        out = megatron_mlp(x, w_in, w_out)
        return ((out - target) ** 2).mean()

    loss, grads = jax.value_and_grad(loss_of)(params)
    return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), loss


def gshard_layer(x, gate, w_in, w_out):
    x = sbp.split(x, 0, "expert")
    logits = jnp.einsum("gsm,me->gse", x, gate)
    weights = jax.nn.softmax(logits)
    chosen = jnp.argmax(weights, -1)
    hot = jax.nn.one_hot(chosen, weights.shape[-1])
    place = (jnp.cumsum(hot, 1) - 1).astype(jnp.int32)
    slots = jax.nn.one_hot(place, 256) * hot[..., None]
    dispatched = jnp.einsum("gsec,gsm->egcm", slots, x)
    dispatched = sbp.split(dispatched, 0, "expert")
    hidden = jax.nn.relu(jnp.einsum("egcm,emh->egch", dispatched, w_in))
    outputs = jnp.einsum("egch,ehm->egcm", hidden, w_out)
    combined = jnp.einsum("gsec,gse,egcm->gsm", slots, weights, outputs)
    return combined


def accumulated_step(w, batches):
    batches = sbp.split(batches, 1, "data")

    def loss_of(w, batch):
        return (jax.nn.relu(batch @ w) ** 2).sum()

    def microbatch(total, batch):
        total = total + jax.grad(loss_of)(w, batch)
        return total, ()

    total, _ = jax.lax.scan(microbatch, jnp.zeros_like(w), batches)
    return w - 0.1 * total


def parallel_block(x, wq, wk, wv, wo, w_in, w_out):
    q, k = jnp.einsum("btm,mhd->bhtd", x, wq), jnp.einsum("btm,mhd->bhtd", x, wk)
    v = jnp.einsum("btm,mhd->bhtd", x, wv)
    scores = jnp.einsum("bhtd,bhud->bhtu", q, k)
    mixed = jnp.einsum("bhtu,bhud->bhtd", jax.nn.softmax(scores), v)
    attended = jnp.einsum("bhtd,hdm->btm", mixed, wo)
    fed = jax.nn.gelu(x @ w_in) @ w_out
    y = attended + fed
    return x + y


HEADS = abstract(1024, 16, 64)
PROGRAMS = {
    "megatron_step": (
        megatron_step,
        MESH,
        (
            abstract(8192, 1024),
            abstract(8192, 1024),
            {"w_in": abstract(1024, 4096), "w_out": abstract(4096, 1024)},
        ),
        ("data:S(0)", "data:S(0)", {"w_in": "model:S(1)", "w_out": "model:S(0)"}),
        ({"w_in": "model:S(1)", "w_out": "model:S(0)"}, "B"),
    ),
    "gshard_layer": (
        gshard_layer,
        jax.sharding.AbstractMesh((8,), ("expert",)),
        (abstract(8, 1024, 512), abstract(512, 8), abstract(8, 512, 2048), abstract(8, 2048, 512)),
        ("expert:S(0)", "B", "expert:S(0)", "expert:S(0)"),
        "expert:S(0)",
    ),
    "accumulated_step": (
        accumulated_step,
        jax.sharding.AbstractMesh((8,), ("data",)),
        (abstract(512, 512), abstract(16, 1024, 512)),
        ("B", "data:S(1)"),
        "B",
    ),
    "parallel_block": (
        parallel_block,
        MESH,
        (
            abstract(8, 256, 1024),
            HEADS,
            HEADS,
            HEADS,
            abstract(16, 64, 1024),
            abstract(1024, 4096),
            abstract(4096, 1024),
        ),
        (
            "data:S(0)",
            "model:S(1)",
            "model:S(1)",
            "model:S(1)",
            "model:S(0)",
            "model:S(1)",
            "model:S(0)",
        ),
        "data:S(0)",
    ),
}
"""By name: the function, the mesh, its arguments, their types, and the types of what it returns."""


def plan(name):
    fn, mesh, args, in_types, out_types = PROGRAMS[name]
    return sbp.jit(fn, mesh, in_types=in_types, out_types=out_types, hardware="tpu-v3").plan(*args)
