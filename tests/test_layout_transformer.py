"""The Transformer layout of Mesh-TensorFlow, section 9: vocab, d_ff and heads over one axis, the
batch over the other."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import sbp
from sbp import Layout, NdSbp
from sbp.errors import SbpError
from sbp.infer.rows import seen_codes
from sbp.infer.space import local_shape

MESH = jax.sharding.AbstractMesh((2, 4), ("data", "model"))


def f32(*shape):
    return jax.ShapeDtypeStruct(shape, jnp.float32)


SMALL = {
    "vocab": 64,
    "d_model": 16,
    "d_ff": 64,
    "heads": 8,
    "d_kv": 4,
    "layer": 2,
    "batch": 8,
    "length": 6,
}
PAPER = {
    "vocab": 32768,
    "d_model": 1024,
    "d_ff": 4096,
    "heads": 8,
    "d_kv": 128,
    "layer": 6,
    "batch": 64,
    "length": 256,
}
NAMES = {
    "embed": ("vocab", "d_model"),
    "q": ("layer", "d_model", "heads", "d_kv"),
    "k": ("layer", "d_model", "heads", "d_kv"),
    "v": ("layer", "d_model", "heads", "d_kv"),
    "o": ("layer", "heads", "d_kv", "d_model"),
    "w_in": ("layer", "d_model", "d_ff"),
    "w_out": ("layer", "d_ff", "d_model"),
}
TRANSFORMER = Layout(batch="rows", vocab="cols", d_ff="cols", heads="cols")


def transformer(layout):
    """The loss of a decoder, all tensors with names."""

    def loss(params, tokens):
        params = {k: layout(p, *NAMES[k]) for k, p in params.items()}
        x = layout(params["embed"][tokens], "batch", "length", "d_model")

        def layer(x, p):
            h = x * jax.lax.rsqrt((x * x).mean(-1, keepdims=True) + 1e-6)
            q, k, v = (
                layout(jnp.einsum("bld,dhk->blhk", h, p[n]), "batch", "length", "heads", "d_kv")
                for n in "qkv"
            )
            scores = layout(
                jnp.einsum("blhk,bmhk->bhlm", q, k), "batch", "heads", "length", "memory"
            )
            scores = jnp.where(jnp.tril(jnp.ones(scores.shape[2:], bool)), scores, -1e9)
            seen = jnp.einsum("bhlm,bmhk->blhk", jax.nn.softmax(scores), v)
            x = layout(x + jnp.einsum("blhk,hkd->bld", seen, p["o"]), "batch", "length", "d_model")
            h = layout(jax.nn.relu(x @ p["w_in"]), "batch", "length", "d_ff")
            return layout(x + h @ p["w_out"], "batch", "length", "d_model"), None

        x, _ = jax.lax.scan(layer, x, {k: v for k, v in params.items() if k != "embed"})
        logits = layout(x @ params["embed"].T, "batch", "length", "vocab")
        picked = jax.nn.one_hot(jnp.roll(tokens, -1, axis=1), logits.shape[-1])
        return (jax.nn.logsumexp(logits, -1) - (logits * picked).sum(-1)).mean()

    return loss


def shapes(sizes):
    params = {k: f32(*(sizes[n] for n in names)) for k, names in NAMES.items()}
    return params, jax.ShapeDtypeStruct((sizes["batch"], sizes["length"]), jnp.int32)


def arguments():
    rng = np.random.default_rng(0)
    params, tokens = shapes(SMALL)
    values = {k: (rng.normal(size=p.shape) / 4).astype(np.float32) for k, p in params.items()}
    return values, rng.integers(0, SMALL["vocab"], tokens.shape).astype(np.int32)


def products(typing):
    """For each product of the program, the share of its multiplications that one device does."""
    found = []
    for node in typing.graph.walk():
        if node.op == "dot_general":
            (contracted, _), _ = node.params["dimension_numbers"]
            out = typing.graph.avals[node.outputs[0]].shape
            mine = local_shape(out, typing.rows[node.id].outs[0], typing.mesh.sizes)
            whole = typing.graph.aval(node.inputs[0]).shape
            part = local_shape(whole, seen_codes(typing.rows[node.id])[0], typing.mesh.sizes)
            found.append(
                float(
                    np.prod(mine) / np.prod(out) * np.prod([part[d] / whole[d] for d in contracted])
                )
            )
    return found


@pytest.mark.parametrize("shape", [(2, 4), (4, 2)], ids=str)
@pytest.mark.parametrize("backward", [False, True], ids=["forward", "gradients"])
def test_transformer_layout(shape, backward):
    mesh = sbp.make_mesh(shape, ("rows", "cols"))
    layout, plain = transformer(TRANSFORMER), transformer(lambda x, *names: x)
    fn, expected = (jax.value_and_grad(f) if backward else f for f in (layout, plain))
    types = (TRANSFORMER.types(NAMES), TRANSFORMER.type("batch", "length"))
    options: dict[str, Any] = {
        "in_types": types,
        "out_types": (NdSbp(), types[0]) if backward else NdSbp(),
    }
    count = 27 if backward else 9
    # At the paper's sizes no product is worth doing twice; at small ones it is cheaper than to
    # send, which "reduce" forbids.
    shares = products(
        sbp.jit(fn, mesh, **options, hardware="tpu-v3").plan(*shapes(PAPER)).program.typing
    )
    assert len(shares) == count and set(shares) == {1 / 8}, shares
    f = sbp.jit(fn, mesh, **options, boxing="reduce")
    params, tokens = arguments()
    shares = products(f.plan(params, tokens).program.typing)
    assert len(shares) == count and set(shares) == {1 / 8}, shares
    found, wanted = f(params, tokens), jax.jit(expected)(params, tokens)
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
        np.testing.assert_allclose(a, b, rtol=3e-4, atol=2e-6)
    if backward:
        assert found[1]["w_in"].sharding.spec == jax.sharding.PartitionSpec(None, None, "cols")


def test_no_tensor_of_the_transformer_has_two_dims_on_one_axis():
    """The layout of the paper is legal; with d_model over the same axis it is not, and the first
    tensor that says so is named."""
    wrong = Layout({**TRANSFORMER, "d_model": "cols"})
    with pytest.raises(
        SbpError,
        match=(
            r"layout-conflict: dims 'vocab' and 'd_model' of the tensor \[vocab, d_model\] .* mesh"
            r" axis 'cols'"
        ),
    ):
        sbp.jit(transformer(wrong), jax.sharding.AbstractMesh((2, 4), ("rows", "cols"))).plan(
            *shapes(SMALL)
        )
