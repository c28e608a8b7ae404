"""Computations between reversals run in the order of the array, with the same values."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import sbp
from sbp.signatures.alignment import with_alignment
from sbp.signatures.reversal import with_mirrors
from sbp.trace.build import trace
from sbp.trace.evaluate import evaluate
from sbp.trace.graph import Graph
from tests.signatures.test_alignment import drawn, largest, product, recurrence


def flip(x: Any) -> Any:
    return jnp.flip(x, 0)


def scanned(a: Any, b: Any, **options: Any) -> Any:
    return lax.associative_scan(recurrence, (a, b), reverse=True, **options)


def gradient(a: Any, b: Any) -> Any:
    return jax.grad(lambda a, b: jnp.sum(scanned(a, b)[1] ** 2), argnums=(0, 1))(a, b)


def with_indices(a: Any, b: Any) -> Any:
    numbers = lax.broadcasted_iota(jnp.int32, a.shape, 0)
    return lax.associative_scan(largest, (a + b, numbers), reverse=True)


def matrices(a: Any, b: Any) -> Any:
    return lax.associative_scan(product, a[:, :3, None] * b[:, None, :3], reverse=True)


def advantages(reward: Any, value: Any) -> Any:
    """Generalised advantages of one trajectory: sums of what is still to come."""
    wrong = reward + 0.9 * jnp.concatenate([value[1:], value[:1]]) - value
    return scanned(jnp.full_like(wrong, 0.9), wrong)[1]


MIRRORED: dict[str, Callable[..., Any]] = {
    "scan": scanned,
    "last dim": functools.partial(scanned, axis=1),
    "gradient": gradient,
    "largest, with its index": with_indices,
    "matrices": matrices,
    "advantages": advantages,
    "sums of what is to come": lambda a, b: flip(jnp.cumsum(flip(a * 2), 0)) + b,
    "parts": lambda a, b: flip(jnp.concatenate(lax.split(flip(a), (3, 5))[::-1])) + b,
    "roll": lambda a, b: flip(jnp.roll(flip(a), 3, 0)) + b,
    "padded": lambda a, b: flip(lax.pad(flip(a), np.float32(2), [(1, -1, 0), (0, 0, 0)])) + b,
    "strided": lambda a, b: flip(flip(a)[1::3]),
    "counted": lambda a, b: flip(flip(a) * jnp.arange(8)[:, None] + flip(b)),
    "the other dim": lambda a, b: jnp.flip(flip(jnp.flip(flip(a), 1) * 2), 1) * b,
    "in a loop": lambda a, b: lax.fori_loop(0, 2, lambda _, c: scanned(*c), (a, b)),
}
"""Programs of two arrays of shape (8, 4), of which no reversal is left."""

LEFT: dict[str, tuple[Callable[..., Any], int]] = {
    "no other one": (lambda a, b: flip(a) * b, 1),
    "returned, too": (lambda a, b: (lambda r: (r, flip(jnp.cumsum(r, 0))))(flip(a)), 1),
    "operands in both orders": (lambda a, b: flip(flip(a) * b), 1),
    "sorted between": (lambda a, b: flip(jnp.sort(flip(a), 0)), 2),
    "both dims": (lambda a, b: jnp.flip(jnp.flip(a) * 2), 2),
    "the same twice": (lambda a, b: (flip(a), flip(a) * 2), 2),
}
"""Programs with the reversals that are left."""

ARGS = (drawn(8, 4), drawn(8, 4, seed=1))


def graphs(fn: Callable[..., Any], args: tuple[Any, ...]) -> tuple[Graph, Graph]:
    """The program before and after."""
    graph, _ = trace(fn, [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in args])
    return graph, with_mirrors(with_alignment(graph))


def reversals(graph: Graph) -> int:
    """The number of nodes that reverse an array."""
    return [node.op for node in graph.walk()].count("rev")


def assert_same_values(graph: Graph, fn: Callable[..., Any], args: tuple[Any, ...]) -> None:
    found = jax.jit(lambda *args: evaluate(graph, args))(*args)
    for got, want in zip(found, jax.tree.leaves(jax.jit(fn)(*args)), strict=True):
        np.testing.assert_allclose(np.asarray(got), np.asarray(want), rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize("case", MIRRORED)
def test_no_reversal_is_left(case: str):
    before, after = graphs(MIRRORED[case], ARGS)
    assert reversals(before) >= 1 and reversals(after) == 0
    if case != "in a loop":  # `evaluate` has no loops
        assert_same_values(after, MIRRORED[case], ARGS)


@pytest.mark.parametrize("length", [1, 13])
@pytest.mark.parametrize("case", ["scan", "gradient", "largest, with its index"])
def test_lengths(case: str, length: int):
    args = (drawn(length, 4), drawn(length, 4, seed=1))
    after = graphs(MIRRORED[case], args)[1]
    assert (reversals(after) == 0) == (length > 1)
    assert_same_values(after, MIRRORED[case], args)


@pytest.mark.parametrize("case", LEFT)
def test_reversals_that_are_left(case: str):
    fn, count = LEFT[case]
    after = graphs(fn, ARGS)[1]
    assert reversals(after) == count
    assert_same_values(after, fn, ARGS)


def test_operations_before_and_after_stay():
    """Only what lies between the reversals is mirrored, for a plan reads as the program does."""
    before, after = graphs(lambda a, b: flip(jnp.cumsum(flip(jnp.exp(a) * 2), 0)) + b, ARGS)
    kept = [n.id for n in before.nodes if n.op not in ("rev", "cumsum")]
    assert [n.id for n in after.nodes if n.op != "cumsum"] == kept
    assert [n.params["reverse"] for n in after.nodes if n.op == "cumsum"] == [True]


@pytest.mark.parametrize(
    "dtype,left", [("uint8", 1), ("int8", 1), ("bfloat16", 1), ("float16", 0), ("int16", 0)]
)
def test_counters_that_do_not_hold_each_number(dtype: str, left: int):
    """bfloat16 rounds numbers above 256, and an integer of 8 bits starts again."""

    def fn(a: Any) -> Any:
        return flip(flip(a) + lax.iota(dtype, 600).astype("float32"))

    args = (drawn(600),)
    after = graphs(fn, args)[1]
    assert reversals(after) == left
    (got,) = evaluate(after, args)
    want = (args[0][::-1] + np.arange(600).astype(jnp.dtype(dtype)).astype("float32"))[::-1]
    np.testing.assert_allclose(np.asarray(got), want, rtol=2e-5, atol=2e-5)


def test_groups_of_features_have_no_mirror_image():
    def fn(a: Any, b: Any) -> Any:
        image, numbers = jnp.flip(a[None], 2), ("NWC", "WIO", "NWC")
        kernel = b[:1, :4].reshape(1, 2, 2)[:, :, jnp.array([0, 1, 0, 1])]
        y = lax.conv_general_dilated(
            image, kernel, (1,), "VALID", dimension_numbers=numbers, feature_group_count=2
        )
        return jnp.flip(y, 2)

    after = graphs(fn, ARGS)[1]
    assert reversals(after) == 2
    assert_same_values(after, fn, ARGS)


def test_inspected_values_stay():
    def fn(a: Any) -> Any:
        y = jnp.cumsum(flip(a), 0)
        jax.debug.inspect_array_sharding(y, callback=lambda s: None)
        return flip(y) * 2

    after = graphs(fn, ARGS[:1])[1]
    assert {i.value for i in after.inspections} <= {v for n in after.nodes for v in n.outputs}
    assert_same_values(after, fn, ARGS[:1])


@pytest.mark.parametrize("length", [16, 13])
def test_runs_on_split_arrays(length: int):
    mesh = sbp.make_mesh((4,), ("x",))

    def fn(a: Any, b: Any) -> Any:
        return gradient(sbp.split(a, 0, "x"), sbp.split(b, 0, "x"))

    args = (drawn(length, 4), drawn(length, 4, seed=1))
    for got, want in zip(sbp.jit(fn, mesh)(*args), fn(*args), strict=True):
        np.testing.assert_allclose(np.asarray(got), np.asarray(want), rtol=2e-5, atol=2e-5)
