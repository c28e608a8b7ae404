"""The spec of the result names the axis that the reduction has removed."""

import jax
import jax.numpy as jnp
from jax.sharding import AxisType, PartitionSpec as Spec

import sbp
from benchmarks.fault_shapes import f32

mesh = jax.sharding.AbstractMesh((2, 4), ("data", "model"), axis_types=(AxisType.Auto,) * 2)


def attention(x, wq, wk, wv, wo):
    b, s, _ = x.shape
    q, k, v = ((x @ w).reshape(b, s, -1, 16) for w in (wq, wk, wv))
    scores = jnp.einsum("bqhd,bkhd->bhqk", q, k) / 4.0
    out = jnp.einsum("bhqk,bkhd->bqhd", jax.nn.softmax(scores, -1), v)
    return jax.lax.psum(out.reshape(b, s, -1) @ wo, "model")


def ffn(x, w_in, w_out):
    return jax.lax.psum(jax.nn.gelu(x @ w_in) @ w_out, "model")


def block(p, x):
    x = x + attention(x, p["wq"], p["wk"], p["wv"], p["wo"])
    return x + ffn(x, p["w_in"], p["w_out"])


columns, rows = Spec(None, "model"), Spec("model")
specs = {"wq": columns, "wk": columns, "wv": columns, "wo": rows, "w_in": columns, "w_out": rows}
p = {n: f32(128, 128) for n in ("wq", "wk", "wv", "wo")}
p |= {"w_in": f32(128, 512), "w_out": f32(512, 128)}
args = p, f32(4, 16, 128)
f = jax.shard_map(
    block,
    mesh=mesh,
    in_specs=(specs, Spec("data")),
    out_specs=Spec("data", "model"),
    # meant:     out_specs=Spec("data"),
    check_vma=False,
)
report = sbp.check_shard_map(f, *args, mesh=mesh)
