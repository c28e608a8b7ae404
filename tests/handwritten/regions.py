"""Meshes, arrays and comparisons of the tests of hand-written regions."""

from typing import Any

import jax
import numpy as np

import sbp

ONE, TWO = (("model", 8),), (("data", 2), ("model", 4))
MESHES = [ONE, TWO]


mesh_of = lambda axes: sbp.make_mesh([n for _, n in axes], [name for name, _ in axes])


def arrays(*shapes: tuple[int, ...]) -> list[Any]:
    keys = jax.random.split(jax.random.key(0), len(shapes))
    return [jax.random.normal(k, s) for k, s in zip(keys, shapes, strict=True)]


def assert_close(got: Any, want: Any) -> None:
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(np.asarray(a), np.asarray(b), rtol=2e-5, atol=2e-5),
        got,
        want,
    )
