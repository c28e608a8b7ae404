"""A shard_map training step does not average the gradient of the bias over the batch."""

import jax
import jax.numpy as jnp
from jax.sharding import AxisType, PartitionSpec as Spec

import sbp
from benchmarks.fault_shapes import f32

mesh = jax.sharding.AbstractMesh((8,), ("data",), axis_types=(AxisType.Auto,))


def predict(params, x):
    h = jax.nn.relu(x @ params["w1"] + params["b1"])
    return h @ params["w2"] + params["b2"]


def local_loss(params, x, y):
    return jnp.mean((predict(params, x) - y) ** 2)


def train_step(params, x, y):
    loss, grads = jax.value_and_grad(local_loss)(params, x, y)
    loss = jax.lax.pmean(loss, "data")
    w1 = jax.lax.pmean(grads["w1"], "data")
    w2 = jax.lax.pmean(grads["w2"], "data")
    b1 = grads["b1"]
    # meant: b1 = jax.lax.pmean(grads["b1"], "data")
    b2 = jax.lax.pmean(grads["b2"], "data")
    grads = {"w1": w1, "w2": w2, "b1": b1, "b2": b2}
    params = jax.tree.map(lambda p, g: p - 0.1 * g, params, grads)
    return params, loss


params = {"w1": f32(64, 128), "b1": f32(128), "w2": f32(128, 4), "b2": f32(4)}
args = params, f32(64, 64), f32(64, 4)
specs = Spec(), Spec("data"), Spec("data")
f = jax.shard_map(
    train_step, mesh=mesh, in_specs=specs, out_specs=(Spec(), Spec()), check_vma=False
)
report = sbp.check_shard_map(f, *args, mesh=mesh)
