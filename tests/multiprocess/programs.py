"""Meshes over all processes, arrays on them, and comparison with one device.
Programs that run in several processes, with their arguments on the host and their types."""

import hashlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.experimental import multihost_utils

import sbp

# ---- the world -----------------------------------------------------------------------------------

MESHES = {
    "8": ((8,), ("data",)),
    "2x4": ((2, 4), ("data", "model")),
    "2x2x2": ((2, 2, 2), ("data", "model", "expert")),
}


def mesh_of(name: str) -> jax.sharding.Mesh:
    """A mesh over the devices of all processes."""
    return sbp.make_mesh(*MESHES[name])


def put(x: Any, mesh: jax.sharding.Mesh, *spec: Any) -> jax.Array:
    """A global array; each process gives its part."""
    x, sharding = np.asarray(x), jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec(*spec))
    return jax.make_array_from_callback(x.shape, sharding, lambda index: x[index])


def assert_shards(got: Any, want: Any, *, exact: bool = False) -> None:
    """The shards of this process are those of a value on one device. All processes together
    compare all shards.

    Arguments:
      got: a tree of global arrays.
      want: the same with arrays on one device.
      exact: whether floats are equal to the last bit.
    """
    assert jax.tree.structure(got) == jax.tree.structure(want)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        assert (a.shape, a.dtype) == (b.shape, b.dtype)
        assert (a.sharding.device_set, len(a.addressable_shards)) == (
            set(jax.devices()),
            len(jax.local_devices()),
        )
        whole = np.asarray(b)
        for shard in a.addressable_shards:
            if exact or not np.issubdtype(whole.dtype, np.inexact):
                np.testing.assert_array_equal(shard.data, whole[shard.index])
            else:
                np.testing.assert_allclose(shard.data, whole[shard.index], rtol=2e-5, atol=2e-5)


def in_all(text: str) -> list[bytes]:
    """The digest of a text of each process."""
    digest = np.frombuffer(hashlib.sha256(text.encode()).digest(), np.uint8)
    return [row.tobytes() for row in np.asarray(multihost_utils.process_allgather(digest))]


# ---- programs ------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Case:
    """One program.

    Arguments:
      fn: the function.
      args: its arguments, equal in all processes.
      types: `in_types`.
      exact: whether results are equal to the last bit.
      donate: `donate_argnums`.
      sends: the kinds of conversions that its plan has.
    """

    fn: Callable[..., Any]
    args: tuple[Any, ...]
    types: Any
    exact: bool = False
    donate: tuple[int, ...] = ()
    sends: frozenset[str] = frozenset()


def numbers(*shape: int, seed: int = 0) -> np.ndarray:
    """Normal numbers of a shape."""
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


OPTIMIZER = optax.adam(0.01, 0.9, 0.99, 1e-3)


def train_step(params: Any, state: Any, x: Any, y: Any) -> tuple[Any, Any, Any]:
    """A step of a network of two layers."""

    def loss(params: Any) -> Any:
        return ((jax.nn.relu(x @ params["w1"] + params["b1"]) @ params["w2"] - y) ** 2).mean()

    value, grads = jax.value_and_grad(loss)(params)
    updates, state = OPTIMIZER.update(grads, state, params)
    return optax.apply_updates(params, updates), state, value


def _training(axes: tuple[str, ...], batch: int, hidden: int) -> Case:
    model = axes[-1]
    params = {
        "w1": 0.3 * numbers(12, hidden, seed=1),
        "b1": np.zeros(hidden, np.float32),
        "w2": 0.3 * numbers(hidden, 8, seed=2),
    }
    state = jax.device_get(OPTIMIZER.init(params))
    split = {"w1": f"{model}:S(1)", "b1": None, "w2": f"{model}:S(0)"} if len(axes) > 1 else None
    rows = "data:S(0)"
    return Case(
        train_step,
        (params, state, numbers(batch, 12, seed=3), numbers(batch, 8, seed=4)),
        (split, None, rows, rows),
        donate=(0, 1),
        sends=frozenset({"all_reduce"} if batch % 8 == 0 else ()),
    )


def _experts(axes: tuple[str, ...]) -> Case:
    """Tokens to the expert of their largest logit, and back: two all-to-alls."""
    axis = axes[-1]

    def fn(x: Any, gate: Any, w: Any) -> Any:
        x = sbp.annotate(x, **{axis: sbp.S(0)})
        chosen = jax.nn.one_hot(jnp.argmax(x @ gate, axis=-1), w.shape[0])
        place = (jnp.cumsum(chosen, axis=1) * chosen).astype(int)
        slots = jax.nn.one_hot(place - 1, 4) * chosen[..., None]
        sent = sbp.annotate(jnp.einsum("gsec,gsm->gecm", slots, x), **{axis: sbp.S(0)})
        sent = sbp.annotate(jnp.swapaxes(sent, 0, 1), **{axis: sbp.S(0)})
        out = jax.nn.relu(jnp.einsum("egcm,emh->egch", sent, w))
        back = sbp.annotate(jnp.swapaxes(out, 0, 1), **{axis: sbp.S(0)})
        return sbp.annotate(jnp.einsum("gsec,gech->gsh", slots, back), **{axis: sbp.S(0)})

    args = numbers(8, 6, 5, seed=5), numbers(5, 8, seed=6), numbers(8, 5, 7, seed=7)
    return Case(fn, args, (f"{axis}:S(0)", None, f"{axis}:S(0)"), sends=frozenset({"all_to_all"}))


def _loop(axes: tuple[str, ...]) -> Case:
    """A recurrent network, with a sum over devices in each step."""
    axis = axes[-1]

    def fn(x: Any, w: Any) -> Any:
        w = sbp.annotate(w, **{axis: sbp.S(0)})

        def step(h: Any, token: Any) -> tuple[Any, Any]:
            h = jnp.tanh(sbp.annotate(h, **{axis: sbp.S(1)}) @ w + token)
            return h, h.sum(-1)

        return jax.lax.scan(step, jnp.zeros(x.shape[1:]), x)

    return Case(fn, (numbers(5, 4, 16, seed=8), 0.2 * numbers(16, 16, seed=9)), None)


def _uneven(axes: tuple[str, ...]) -> Case:
    """Integers, in sizes that do not divide."""
    first, last = axes[0], axes[-1]

    def fn(x: Any, y: Any) -> Any:
        x = sbp.annotate(x, **{first: sbp.S(0)})
        z = sbp.annotate(x @ y, **{last: sbp.S(1)})
        return jnp.cumsum(z, axis=0), jnp.sort(z, axis=1), z.max(), jnp.roll(z, 1, axis=0)

    draw = np.random.default_rng(10)
    args = tuple(draw.integers(-9, 9, shape, np.int32) for shape in ((13, 7), (7, 11)))
    return Case(fn, args, None, exact=True)


def _random(axes: tuple[str, ...]) -> Case:
    """Random bits of split arrays, also of a size that does not divide."""

    def fn(seed: Any) -> Any:
        a, b, c = jax.random.split(jax.random.key(seed), 3)
        bits = sbp.annotate(jax.random.bits(a, (16, 6)), **{axes[0]: sbp.S(0)})
        uneven = sbp.annotate(jax.random.randint(b, (13, 5), 0, 1000), **{axes[-1]: sbp.S(0)})
        return bits, uneven, jax.random.permutation(c, 24), jax.random.key_data(a)

    return Case(fn, (np.uint32(7),), None, exact=True)


def cases(axes: tuple[str, ...]) -> dict[str, Case]:
    """The programs on a mesh with these axes, by name."""
    return {
        "train-16-16": _training(axes, 16, 16),
        "train-13-10": _training(axes, 13, 10),
        "experts": _experts(axes),
        "loop": _loop(axes),
        "uneven": _uneven(axes),
        "random": _random(axes),
    }


NAMES = tuple(cases(("data",)))
