"""Each process gives its part: `plan.place` and `sbp.Padded.of(.., shape=)`, uneven splits
included."""

from __future__ import annotations

import pickle
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import sbp
from tests.multiprocess.programs import numbers
from tests.multiprocess.world import assert_shards, mesh_of

pytestmark = pytest.mark.multiprocess

W, X = numbers(13, 7), numbers(16, 13, seed=1)
LAYOUTS = [
    ("8", "data:S(0)"),
    ("8", "data:S(1)"),
    ("2x4", "data:S(0)"),
    ("2x4", "data:S(0) model:S(0)"),
    ("2x4", "data:S(1) model:S(0)"),
    ("2x2x2", "data:S(0) model:S(1) expert:S(0)"),
]


def owner(k: int, size: int, counts: list[int]) -> list[int]:
    """On which index of each mesh axis an element of a dim lives."""
    where = []
    for n in counts:
        size = -(-size // n)
        where.append(k // size)
        k %= size
    return where


def own_part(x: np.ndarray, t: str, mesh: Any) -> np.ndarray:
    """The elements that devices of this process hold, found element by element."""
    atoms, names = sbp.parse(t), list(mesh.axis_names)
    here = [
        dict(zip(names, at, strict=True))
        for at in np.ndindex(mesh.devices.shape)
        if mesh.devices[at].process_index == jax.process_index()
    ]
    for dim in range(x.ndim):
        axes = [a for a in names if atoms.get(a) == sbp.S(dim)]
        counts = [mesh.shape[a] for a in axes]
        held = [[device[a] for a in axes] for device in here]
        size = x.shape[dim]
        x = np.take(x, [k for k in range(size) if owner(k, size, counts) in held], dim)
    return x


@pytest.mark.parametrize(("mesh_name", "t"), LAYOUTS)
def test_a_padded_array_of_parts(mesh_name: str, t: str):
    mesh = mesh_of(mesh_name)
    of_part = sbp.Padded.of(own_part(W, t, mesh), t, mesh, shape=W.shape)
    whole = sbp.Padded.of(W, t, mesh)
    for held in (of_part, whole):
        assert held.type == sbp.parse(t) and not held.parts.is_fully_addressable
        assert_shards(held.full(), W, exact=True)
    for a, b in zip(of_part.parts.addressable_shards, whole.parts.addressable_shards, strict=True):
        np.testing.assert_array_equal(a.data, b.data)


@pytest.mark.parametrize(("mesh_name", "t"), [LAYOUTS[0], LAYOUTS[3], LAYOUTS[5]])
def test_training_on_parts(mesh_name: str, t: str):
    """Weights are the whole in every process, or its part; rows of the batch are its own."""
    mesh = mesh_of(mesh_name)

    def step(w, x):
        loss, g = jax.value_and_grad(lambda w: (jnp.tanh(x @ w) ** 2).mean())(w)
        return w - 0.1 * g, loss

    held = sbp.padded(t)
    f = sbp.jit(step, mesh, (held, "data:S(0)"), (held, None), donate_argnums=0)
    plan = f.plan(jax.ShapeDtypeStruct(W.shape, W.dtype), jax.ShapeDtypeStruct(X.shape, X.dtype))
    rows = own_part(X, "data:S(0)", mesh)
    for start in (W, own_part(W, t, mesh)):
        w, want = start, W
        for _ in range(2):
            w, x = plan.place(w, rows)
            w, loss = plan(w, x)
            want, wanted = jax.jit(step)(want, X)
            assert_shards(loss, wanted)
        assert isinstance(w, sbp.Padded)
        assert_shards(w.full(), want)


def test_parts_of_even_arrays_and_statics():
    mesh = mesh_of("2x4")
    t = "data:S(0) model:S(1)"
    f = sbp.jit(lambda x, n, y: (x * n).sum(0) + y, mesh, (t, None), static_argnums=1)
    x = numbers(16, 8)
    plan = f.plan(jax.ShapeDtypeStruct(x.shape, x.dtype), 3, 1.0)
    for given in (x, own_part(x, t, mesh)):
        placed = plan.place(given, 3, 1.0)
        assert placed[1:] == (3, 1.0) and placed[0].sharding == plan.in_shardings[0]
        assert_shards(f(*placed), (x * 3).sum(0) + 1.0)


def test_what_is_refused():
    mesh = mesh_of("8")
    f = sbp.jit(lambda w: w * 2, mesh, sbp.padded("data:S(0)"))
    with pytest.raises(ValueError, match=r"argument w is pinned data:S\(0\) .*plan\.place"):
        f(W)
    plan = f.plan(jax.ShapeDtypeStruct(W.shape, W.dtype))
    part = own_part(W, "data:S(0)", mesh)
    said = (
        "input w: an array of shape \\(12, 7\\) is neither the whole, \\(13, 7\\), nor the part of"
    )
    with pytest.raises(sbp.SbpError, match=f"{said} process .*, \\({len(part)}, 7\\)"):
        plan.place(W[:12])
    with pytest.raises(sbp.SbpError, match="input w is int32; the plan takes float32"):
        plan.place(W.astype(np.int32))
    with pytest.raises(sbp.SbpError, match=r"place got 2 arguments, .* takes 1"):
        plan.place(W, W)
    (w,) = plan.place(part)
    with pytest.raises(ValueError, match="parts on devices of other processes; call"):
        np.asarray(w)


def test_a_padded_array_of_the_host_is_one_global_value():
    """A saved one says its true shape, so it cannot be taken for a part."""
    mesh = mesh_of("8")
    saved = pickle.dumps(jax.tree.map(np.asarray, sbp.Padded.of(W, "data:S(0)", _alone())))
    f = sbp.jit(lambda w: w * 2, mesh)
    assert_shards(f(pickle.loads(saved)), W * 2)
    with pytest.warns(sbp.SbpWarning, match="input-moved"):
        assert_shards(f(sbp.Padded.of(W, "data:S(0)", _alone())), W * 2)


def _alone() -> Any:
    """A mesh of this process's devices."""
    return jax.sharding.Mesh(np.array(jax.local_devices()), ("data",))
