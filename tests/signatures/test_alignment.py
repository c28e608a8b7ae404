"""Computations on slices move to where their readers put the results, with the same values."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from sbp.signatures.alignment import with_alignment
from sbp.trace.build import trace
from sbp.trace.evaluate import evaluate
from sbp.trace.graph import Graph


def recurrence(p: Any, q: Any) -> Any:
    return p[0] * q[0], q[0] * p[1] + q[1]


def gated(p: Any, q: Any) -> Any:
    return p[0] * q[0], q[0][:, None] * p[1] + q[1]


def largest(p: Any, q: Any) -> Any:
    later = q[0] > p[0]
    return jnp.where(later, q[0], p[0]), jnp.where(later, q[1], p[1])


def product(p: Any, q: Any) -> Any:
    return jnp.einsum("lij,ljk->lik", q, p)


def drawn(*shape: int, seed: int = 0) -> Any:
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


def scanned(a: Any, b: Any, **options: Any) -> Any:
    return lax.associative_scan(recurrence, (a, b), **options)


def gradient(a: Any, b: Any) -> Any:
    return jax.grad(lambda a, b: jnp.sum(scanned(a, b)[1] ** 2), argnums=(0, 1))(a, b)


def matrices(a: Any, b: Any) -> Any:
    return lax.associative_scan(product, a[:, :3, None] * b[:, None, :3])


def with_indices(a: Any, b: Any) -> Any:
    numbers = lax.broadcasted_iota(jnp.int32, a.shape, 0)
    return lax.associative_scan(largest, (a + b, numbers))


SCANS: dict[str, Callable[..., Any]] = {
    "recurrence": scanned,
    "reverse": functools.partial(scanned, reverse=True),
    "last dim": functools.partial(scanned, axis=1),
    "gates without a dim": lambda a, b: lax.associative_scan(gated, (a[:, 0], b)),
    "largest, with its index": with_indices,
    "matrices": matrices,
    "gradient": gradient,
    "in a loop": lambda a, b: lax.fori_loop(0, 2, lambda _, c: scanned(*c), (a, b)),
    "with what was computed": lambda a, b: (scanned(a, b), (a[:-1] * b[1:])[::2]),
}


def graphs(fn: Callable[..., Any], args: tuple[Any, ...]) -> tuple[Graph, Graph]:
    graph, _ = trace(fn, [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in args])
    return graph, with_alignment(graph)


def ops(graph: Graph) -> list[str]:
    return [node.op for node in graph.walk()]


def assert_same_values(graph: Graph, fn: Callable[..., Any], args: tuple[Any, ...]) -> None:
    found = jax.jit(lambda *args: evaluate(graph, args))(*args)
    wanted = jax.jit(fn)(*args)
    for got, want in zip(found, jax.tree.leaves(wanted), strict=True):
        np.testing.assert_allclose(np.asarray(got), np.asarray(want), rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize("length", [1, 8, 13])
@pytest.mark.parametrize("case", [c for c in SCANS if c != "in a loop"])
def test_scans_keep_their_values(case: str, length: int):
    args = (drawn(length, 4), drawn(length, 4, seed=1))
    before, after = graphs(SCANS[case], args)
    assert length == 1 or ops(before) != ops(after)
    assert_same_values(after, SCANS[case], args)


@pytest.mark.parametrize("case", SCANS)
def test_nothing_is_put_behind_an_element(case: str):
    """Of a scan over 16 elements no concatenation is left. Elements that nobody reads are made by
    shifts of the last level."""
    before, after = graphs(SCANS[case], (drawn(16, 16), drawn(16, 16, seed=1)))
    assert "concatenate" in ops(before) and "concatenate" not in ops(after)


def shifts(graph: Graph) -> list[int]:
    """The sizes of arrays that are padded in front and cut off behind."""
    return [
        graph.avals[node.outputs[0]].shape[0]
        for node in graph.walk()
        if node.op == "pad"
        and node.params["padding_config"][0][0] * -1 < 0
        and node.params["padding_config"][0][1] < 0
    ]


def test_only_the_last_level_is_shifted():
    assert max(shifts(graphs(scanned, (drawn(64, 4), drawn(64, 4, seed=1)))[1])) <= 2


def in_groups(x: Any) -> Any:
    """A convolution of two groups of features, behind a feature."""
    image, kernel = x[None, :, 1:], jnp.ones((1, 2, 4), np.float32)
    numbers = ("NWC", "WIO", "NWC")
    y = lax.conv_general_dilated(
        image, kernel, (1,), "VALID", dimension_numbers=numbers, feature_group_count=2
    )
    return jnp.concatenate([x[None, :, :1], y], 2)


KEPT: dict[str, Callable[..., Any]] = {
    "groups of features": in_groups,
    "neighbours": lambda x: x[1:] - x[:-1],
    "behind a row of its own": lambda x: jnp.concatenate([x[:1] * 2, x * 3]),
    "the gradient of a slice": jax.grad(lambda x: jnp.sum(x[3:5] ** 2)),
    "the gradient of a strided slice": jax.grad(lambda x: jnp.sum(x[1::2] ** 2)),
    "running sums": lambda x: jnp.concatenate([x[:1], jnp.cumsum(x[1:], 0)]),
    "differences that are returned": lambda x: (lambda y: (jnp.concatenate([x[:1], y]), y))(
        x[1:] - x[:-1]
    ),
}


@pytest.mark.parametrize("case", KEPT)
def test_what_is_kept(case: str):
    """A program stays as it is where no element moves less, and where an operator needs the
    others."""
    before, after = graphs(KEPT[case], (drawn(8, 5),))
    assert ops(before) == ops(after)


MOVED: dict[str, Callable[..., Any]] = {
    "differences behind the first": lambda x: jnp.concatenate([x[:1], x[1:] - x[:-1]]),
    "read elsewhere, too": lambda x: (lambda y: (jnp.concatenate([x[:1], y]), jnp.cumsum(y, 0)))(
        x[1:] * 3
    ),
    "its gradient": jax.grad(lambda x: jnp.sum(jnp.concatenate([x[:1], x[1:] * x[:-1]]) ** 3)),
    "put back": lambda x: lax.pad(x[3:5], np.float32(7), [(3, 3, 0), (0, 0, 0)]),
    "zeros between": lambda x: lax.pad(x[2:6], np.float32(7), [(4, 5, 1), (0, 0, 0)]),
    "along the other dim": lambda x: jnp.concatenate([x[:, :1], x[:, 1:] - x[:, :-1]], 1),
}


@pytest.mark.parametrize("case", MOVED)
def test_what_moves_keeps_its_values(case: str):
    args = (drawn(8, 4),)
    before, after = graphs(MOVED[case], args)
    assert ops(before) != ops(after)
    assert_same_values(after, MOVED[case], args)


@pytest.mark.parametrize("value", [0, 1])
def test_inspected_values_stay(value: int):
    """One that is computed on a slice, and one that is put behind an element."""

    def fn(x: Any, a: Any) -> Any:
        both = x[1:] - x[:-1], (x[1:] - x[:-1]) * a[1:]
        jax.debug.inspect_array_sharding(both[value], callback=lambda s: None)
        return jnp.concatenate([x[:1], both[1]])

    before, after = graphs(fn, (drawn(8, 4), drawn(8, 4, seed=1)))
    made = {v for n in after.nodes for v in n.outputs}
    assert {i.value for i in after.inspections} <= made
    assert ops(before) != ops(after)


@pytest.mark.parametrize("kind", ["keys", "words"])
def test_keys_stay(kind: str):
    """There is no key to shift in. The words of keys move."""

    def fn(seed: Any) -> Any:
        keys = jax.random.split(jax.random.key(seed), 8)
        found = keys if kind == "keys" else jax.random.key_data(keys)
        odd = (jnp.arange(7) % 2 == 1).reshape(7, *(1,) * (found.ndim - 1))
        made = jnp.concatenate([found[:1], jnp.where(odd, found[1:], found[:-1])])
        return jax.random.key_data(made) if kind == "keys" else made

    args = (np.int32(3),)
    before, after = graphs(fn, args)
    assert (ops(before) == ops(after)) == (kind == "keys")
    assert_same_values(after, fn, args)
