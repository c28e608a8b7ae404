"""Values with which a checked program runs: its own arguments where these are arrays, and random
ones elsewhere."""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from sbp import _jax
from sbp.handwritten.emulation import atom_of, regions_of
from sbp.trace.graph import Graph
from sbp.types import Split


def positive(x: Any) -> Any:
    return abs(x) + 0.1 if jnp.issubdtype(x.dtype, jnp.floating) else x


def poison(graph: Graph, values: Sequence[Any]) -> list[Any]:
    """Values for programs that test for finite numbers: the last element of each array that a
    region splits is not finite."""
    split = {
        v
        for node in regions_of(graph)
        for v, spec in zip(node.inputs, node.params["in_specs"], strict=True)
        if any(isinstance(atom_of(spec, name), Split) for name in node.params["mesh"].shape)
    }

    def of(value: int, x: Any) -> Any:
        if value not in split or not jnp.issubdtype(x.dtype, jnp.floating):
            return x
        other = np.array(x)
        other[(slice(-1, None),) * other.ndim] = np.nan  # an array may be empty
        return jnp.asarray(other)

    return [of(v, x) for v, x in zip(graph.inputs, values, strict=True)]


def is_value(x: Any) -> bool:
    """Whether an argument is a value that this process has, not a shape."""
    if isinstance(x, jax.Array):
        return not isinstance(x, _jax.Tracer) and x.is_fully_addressable
    return isinstance(x, np.ndarray | np.generic | bool | int | float | complex)


def is_flat(x: Any) -> bool:
    """Whether an argument is an array of equal floats, such as a bias of zeros: it hides faults."""
    several = is_value(x) and np.size(x) > 1 and jnp.issubdtype(x.dtype, jnp.inexact)
    return bool(several and (np.asarray(x) == np.ravel(x)[0]).all())


def is_sorted(x: np.ndarray) -> bool:
    """Whether numbers rise along a dim, as keys to search in or the ids of segments."""
    if x.dtype == np.bool_ or jnp.issubdtype(x.dtype, jnp.complexfloating):
        return False
    return any((np.diff(x, axis=d) >= 0).all() for d in range(x.ndim) if x.shape[d] > 1)


def is_guessed(x: Any) -> bool:
    """Whether an argument is the shape of integers or tests, for which no values are typical."""
    return not (is_value(x) or _jax.is_extended(x.dtype) or jnp.issubdtype(x.dtype, jnp.inexact))


def values_of(leaves: Sequence[Any], seed: int, *, spread: bool = True) -> list[Any]:
    """Values for all arguments. Second values of arrays that are given are the first ones in
    another order, sorted arrays excepted, and random ones for tests that are all equal. Floats that
    are all equal get random numbers added, if they are to be spread."""
    draws = (np.random.default_rng([seed, i]) for i in range(len(leaves)))
    return [_value(x, draw, seed, spread) for x, draw in zip(leaves, draws, strict=True)]


def _value(x: Any, draw: np.random.Generator, seed: int, spread: bool) -> Any:
    if is_value(x):
        if isinstance(x, jax.Array) and _jax.is_extended(x.dtype):
            return x
        x = np.array(x)  # NumPy permutes an empty array in place
        if spread and is_flat(x):
            return x + (draw.random(x.shape) / 2).astype(x.dtype)
        if seed and x.dtype == np.bool_ and x.all() == x.any():
            return draw.random(x.shape) < 0.5
        return draw.permutation(x.ravel()).reshape(x.shape) if seed and not is_sorted(x) else x
    if _jax.is_extended(x.dtype):
        words = draw.integers(0, 2**32, (*x.shape, *_jax.key_shape(x.dtype)), np.uint32)
        return _jax.wrap_key(words, x.dtype)
    if not is_guessed(x):
        return draw.standard_normal(x.shape).astype(x.dtype)
    if x.dtype == np.bool_ or x.shape:
        return draw.integers(0, 2 if x.dtype == np.bool_ else 8, x.shape).astype(x.dtype)
    # A whole number may be a length: one that spreads over several devices.
    return np.asarray((5, 11)[seed % 2], x.dtype)


def values_text(leaves: Sequence[Any], *, spread: bool, reordered: bool) -> str:
    """The values in words."""
    if not all(map(is_value, leaves)):
        return "random values"
    words = ", with random numbers added to equal elements" * spread
    words += ", with the elements of each array in another order" * reordered
    return f"its arguments{words}"
