"""Computations on slices move to where their readers put the results, with the same values."""

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
from sbp.trace.graph import Graph
from tests.same import checked_plan
from tests.trace.test_joins import assert_same_values, graph_of, ops

recurrence = lambda p, q: (p[0] * q[0], q[0] * p[1] + q[1])


gated = lambda p, q: (p[0] * q[0], q[0][:, None] * p[1] + q[1])


def largest(p: Any, q: Any) -> Any:
    later = q[0] > p[0]
    return jnp.where(later, q[0], p[0]), jnp.where(later, q[1], p[1])


product = lambda p, q: jnp.einsum("lij,ljk->lik", q, p)


TOLERANCE = 2e-5


drawn = lambda *shape, seed=0: np.random.default_rng(seed).normal(size=shape).astype(np.float32)


pair = lambda length, width=4: (drawn(length, width), drawn(length, width, seed=1))


scanned = lambda a, b, **options: lax.associative_scan(recurrence, (a, b), **options)


def gradient(a: Any, b: Any, **options: Any) -> Any:
    return jax.grad(lambda a, b: jnp.sum(scanned(a, b, **options)[1] ** 2), argnums=(0, 1))(a, b)


def matrices(a: Any, b: Any, **options: Any) -> Any:
    return lax.associative_scan(product, a[:, :3, None] * b[:, None, :3], **options)


def with_indices(a: Any, b: Any, **options: Any) -> Any:
    return lax.associative_scan(
        largest, (a + b, lax.broadcasted_iota(jnp.int32, a.shape, 0)), **options
    )


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


def aligned(fn: Callable[..., Any], args: tuple[Any, ...]) -> tuple[Graph, Graph]:
    """The program before and after."""
    graph = graph_of(fn, args)
    return graph, with_alignment(graph)


@pytest.mark.parametrize("length", [1, 8, 13])
@pytest.mark.parametrize("case", [c for c in SCANS if c != "in a loop"])
def test_scans_keep_their_values(case: str, length: int):
    before, after = aligned(SCANS[case], pair(length))
    assert length == 1 or ops(before) != ops(after)
    assert_same_values(after, SCANS[case], pair(length), TOLERANCE)


@pytest.mark.parametrize("case", SCANS)
def test_nothing_is_put_behind_an_element(case: str):
    """A scan over 16 elements has no concatenation left. The shifts of the last level make the
    elements that nobody reads."""
    before, after = aligned(SCANS[case], pair(16, 16))
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
    assert max(shifts(aligned(scanned, pair(64))[1])) <= 2


grouped = functools.partial(
    lax.conv_general_dilated,
    window_strides=(1,),
    padding="VALID",
    dimension_numbers=("NWC", "WIO", "NWC"),
    feature_group_count=2,
)


def in_groups(x: Any) -> Any:
    """A convolution of two groups of features, behind a feature."""
    y = grouped(x[None, :, 1:], jnp.ones((1, 2, 4), np.float32))
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
    before, after = aligned(KEPT[case], (drawn(8, 5),))
    assert ops(before) == ops(after)


def test_a_convolution_of_each_feature_alone_moves():
    def fn(x: Any) -> Any:
        y = grouped(x[None, :, 1:], jnp.ones((1, 1, 3), np.float32), feature_group_count=3)
        return jnp.concatenate([x[None, :, :1], y], 2)

    assert "concatenate" not in ops(aligned(fn, (drawn(8, 4),))[1])


MOVED: dict[str, Callable[..., Any]] = {
    "differences behind the first": lambda x: jnp.concatenate([x[:1], x[1:] - x[:-1]]),
    "read elsewhere, too": lambda x: (lambda y: (jnp.concatenate([x[:1], y]), jnp.cumsum(y, 0)))(
        x[1:] * 3
    ),
    "its gradient": jax.grad(lambda x: jnp.sum(jnp.concatenate([x[:1], x[1:] * x[:-1]]) ** 3)),
    "put back": lambda x: lax.pad(x[3:5], np.float32(7), [(3, 3, 0), (0, 0, 0)]),
    "zeros between": lambda x: lax.pad(x[2:6], np.float32(7), [(4, 5, 1), (0, 0, 0)]),
    "along the other dim": lambda x: jnp.concatenate([x[:, :1], x[:, 1:] - x[:, :-1]], 1),
    "along a dim that the array lacks": lambda x: jnp.concatenate(
        [x[None, :, :1], x[None, :, 1:] * 2], 2
    ),
}


@pytest.mark.parametrize("case", MOVED)
def test_what_moves_keeps_its_values(case: str):
    before, after = aligned(MOVED[case], pair(8)[:1])
    assert ops(before) != ops(after)
    assert_same_values(after, MOVED[case], pair(8)[:1], TOLERANCE)


@pytest.mark.parametrize("value", [0, 1])
def test_inspected_values_stay(value: int):
    """One that is computed on a slice, and one that is put behind an element."""

    def fn(x: Any, a: Any) -> Any:
        both = x[1:] - x[:-1], (x[1:] - x[:-1]) * a[1:]
        jax.debug.inspect_array_sharding(both[value], callback=lambda s: None)
        return jnp.concatenate([x[:1], both[1]])

    before, after = aligned(fn, pair(8))
    assert {i.value for i in after.inspections} <= {v for n in after.nodes for v in n.outputs}
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

    before, after = aligned(fn, (np.int32(3),))
    assert (ops(before) == ops(after)) == (kind == "keys")
    assert_same_values(after, fn, (np.int32(3),), TOLERANCE)


@pytest.mark.parametrize("length", [16, 13])
def test_runs_on_split_arrays(length: int):
    fn = lambda a, b: gradient(sbp.split(a, 0, "x"), sbp.split(b, 0, "x"), reverse=True)
    checked_plan(fn, sbp.make_mesh((4,), ("x",)), *pair(length), rtol=2e-5, atol=2e-5)


# ---- hoisting ------------------------------------------------------------------------------------
# Casts of loop constants stand ahead of their loops, so that half of the bytes are gathered.


SIZE, LARGE = 64, 4096
BF16_GATHER = 7 / 8 * LARGE * LARGE * 2
"""Bytes that a device sends to gather the large weight in bfloat16."""


step = lambda x, w: jnp.tanh(x @ w.astype(jnp.bfloat16))


def summed(fn, wrapped=lambda body: body):
    """A loop that adds up a function of each slice and the weight."""

    def program(w, xs):
        body = lambda total, x: (total + jnp.sum(fn(x, w).astype(jnp.float32)), None)
        return jax.lax.scan(wrapped(body), jnp.float32(0), xs)[0]

    return program


def counted(w, xs):
    """A `while`, whose predicate reads a constant, too."""
    most = jnp.int32(3)
    _, x = jax.lax.while_loop(
        lambda state: state[0] < most,
        lambda state: (state[0] + 1, step(state[1], w)),
        (jnp.int32(0), xs[0]),
    )
    return jnp.sum(x.astype(jnp.float32))


FUNCTIONS = {
    "scanned": summed(step),
    "transposed": summed(lambda x, w: step(x, w.T)),
    "nested": summed(
        lambda x, w: jax.lax.scan(lambda c, _: (step(c, w), None), x, None, length=2)[0]
    ),
    "rematerialised": summed(step, jax.checkpoint),
    "counted": counted,
    # Both the weight and its cast are read in the loop.
    "widened": summed(lambda x, w: jnp.sum(step(x, w).astype(jnp.float32)) + w[0, 0]),
}


def arguments():
    rng = np.random.default_rng(0)
    w = (rng.normal(size=(SIZE, SIZE)) / 8).astype(np.float32)
    return jnp.asarray(w), jnp.asarray(rng.normal(size=(4, 8 * SIZE, SIZE)), jnp.bfloat16)


def checked(fn, shape=(8,), **options):
    """The plan of a loop over split slices with a split weight, after a check of its results."""
    return checked_plan(
        fn,
        sbp.make_mesh(shape, ("x", "y")[: len(shape)]),
        *arguments(),
        in_types=("x:S(0)", "x:S(1)"),
        **options,
    )


@pytest.mark.parametrize("name", FUNCTIONS)
@pytest.mark.parametrize("shape", [(8,), (2, 4)], ids=["8", "2x4"])
def test_values(name, shape):
    checked(FUNCTIONS[name], shape, rtol=2e-2, atol=2e-1)


def large_gathers(fn, **options):
    """Trips and bytes of the gathers in a plan for a large weight."""
    f = sbp.jit(
        fn,
        jax.sharding.AbstractMesh((8,), ("x",)),
        in_types=("x:S(0)", "x:S(1)"),
        hardware="tpu-v5e",
        **options,
    )
    plan = f.plan(
        jax.ShapeDtypeStruct((LARGE, LARGE), jnp.float32),
        jax.ShapeDtypeStruct((4, 16 * LARGE, LARGE), jnp.bfloat16),
    )
    return [
        (one.trips, step.bytes_sent)
        for one in plan.program.boxes()
        for step in one.box.steps
        if step.kind == "all_gather"
    ]


@pytest.mark.parametrize("name", [name for name in FUNCTIONS if name != "widened"])
def test_the_weight_is_gathered_in_bfloat16(name):
    assert large_gathers(FUNCTIONS[name]) == [(1, BF16_GATHER)]


@pytest.mark.parametrize("name", ["scanned", "rematerialised"])
def test_the_backward_pass_reads_what_the_forward_pass_gathered(name):
    gradient = jax.grad(FUNCTIONS[name])
    assert large_gathers(gradient, out_types="x:S(0)") == [(1, BF16_GATHER)]
    checked(gradient, rtol=5e-2, atol=5e-1, out_types="x:S(0)")


def test_a_hoisted_weight_does_not_enter_the_loop():
    graph = checked(FUNCTIONS["scanned"], rtol=2e-2, atol=2e-1).program.graph
    (scan,) = (node for node in graph.walk() if node.op == "scan")
    dtypes = [str(graph.aval(o).dtype) for o in scan.inputs]
    assert dtypes == ["bfloat16", "float32", "bfloat16"] and scan.params["num_consts"] == 1


def test_a_cast_to_a_wider_type_stays():
    def fn(w, xs):
        return jax.lax.scan(lambda c, x: (c + x @ w.astype(jnp.float32), None), xs[0], xs)[0]

    w, xs = arguments()
    graph = (
        sbp.jit(fn, sbp.make_mesh((8,), ("x",)), ("x:S(0)", "x:S(1)"))
        .plan(w.astype(jnp.bfloat16), xs.astype(jnp.float32))
        .program.graph
    )
    (scan,) = (node for node in graph.walk() if node.op == "scan")
    assert "convert_element_type" in [node.op for node in scan.regions[0].nodes]
