"""Notes of large matrices that a decomposition or a transform takes whole."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import pytest

import sbp

MESH = jax.sharding.AbstractMesh((2, 4), ("data", "model"))
LARGE = jax.ShapeDtypeStruct((2048, 2048), jnp.float32)
BATCH = jax.ShapeDtypeStruct((16, 512, 512), jnp.float32)


def notes(fn: Callable[[Any], Any], x: jax.ShapeDtypeStruct, pin: str) -> list[sbp.Diagnostic]:
    report = sbp.jit(fn, MESH, in_types=(pin,), hardware="tpu-v5e").check(x)
    return [d for d in report.diagnostics if d.code == "gathered-matrix"]


@pytest.mark.parametrize(
    ("fn", "pin"),
    [
        (lambda x: jnp.linalg.cholesky(x), "model:S(0)"),
        (lambda x: jnp.linalg.qr(x)[0], "model:S(1)"),
        (lambda x: jax.scipy.linalg.solve_triangular(x, jnp.ones((2048, 1))), "data:S(0)"),
        (lambda x: jnp.fft.fft(jnp.cos(x).reshape(-1)), "model:S(0)"),
    ],
    ids=["cholesky", "qr", "solve", "fft"],
)
def test_a_large_matrix_is_noted(fn: Callable[[Any], Any], pin: str):
    found = notes(fn, LARGE, pin)
    assert found and all(d.severity == "note" for d in found)
    (label,) = found[0].labels
    assert label.span.file == __file__ and " whole, so sbp gathers it on `" in label.text
    (note,) = found[0].notes
    assert note.endswith(" only along its batch dims: each device needs the other dims whole")


@pytest.mark.parametrize(
    ("fn", "x", "pin"),
    [
        (lambda x: jnp.linalg.cholesky(x), BATCH, "model:S(0)"),
        (lambda x: jnp.fft.fft(x), LARGE, "model:S(0)"),
        (lambda x: jnp.linalg.cholesky(x[:8, :8]), LARGE, "model:S(0)"),
        (lambda x: x @ x, LARGE, "model:S(0)"),
    ],
    ids=["batch", "other dim", "small", "product"],
)
def test_others_are_not(fn: Callable[[Any], Any], x: jax.ShapeDtypeStruct, pin: str):
    assert not notes(fn, x, pin)
