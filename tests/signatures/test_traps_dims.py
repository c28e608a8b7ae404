"""The traps of split dims and of conversions, by number.

What other systems let through, sbp refuses or computes right. Rows are shown absent and refuted;
programs run on eight devices and equal the plain function on one.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from samples import b, f, i
from traps import PMAX, W, X, kinds, on, partial_product, refused, same, unary

import sbp
from sbp.signatures import Row
from sbp.types import B, P, S


def test_6_ties_of_an_argmax_along_a_split_dim(mesh):
    refused("argmax", lambda x: lax.argmax(x, 0, np.int32), (f(6),), unary(S(0), PMAX))
    refused("reduce_max", lambda x: jnp.max(x, 0), (f(6, 3),), unary(S(0), P))
    ties = i(8, 5, low=0, high=2).astype(np.float32)
    same(
        lambda x: (jnp.argmax(sbp.split(x, 0, "x", "y"), 0), jnp.argmin(sbp.split(x, 0, "y"), 0)),
        mesh,
        ties,
    )


def test_7_the_mean_of_uneven_shards(mesh):
    same(
        lambda x: (
            sbp.split(x, 0, "x").mean(0),
            sbp.split(x, 0, "y").mean(),
            sbp.split(x, 0, "x", "y").var(0),
        ),
        mesh,
        f(7, 5),
    )


@pytest.mark.parametrize("n", [2, 3, 5, 8])
def test_10_a_broadcast_value_as_a_partial_one_and_back(n):
    """By masking, not by dividing: bit for bit, integers too."""
    for x in (i(7), f(7) * np.float32(0.1), b(7)):
        monoid = "or" if x.dtype == bool else "sum"
        back = sbp.jit(
            lambda x, m=monoid: sbp.replicate(sbp.partial(sbp.replicate(x), "x", op=m)), on(n)
        )(x)
        assert back.dtype == x.dtype and np.array_equal(back, x)


def test_11_a_split_value_as_a_partial_one(mesh):
    fn = lambda x: sbp.replicate(sbp.partial(sbp.split(x, 0, "x", "y"), "x", "y"))
    for size in (3, 7, 8):
        np.testing.assert_array_equal(sbp.jit(fn, mesh)(f(size, 2)), f(size, 2))


def test_16_padding_is_never_seen(mesh):
    refused("pad", lambda x: lax.pad(x, np.float32(1), [(1, 1, 0)]), (f(5),), Row((P, B), (P,)))

    def fn(x: Any) -> Any:
        x = sbp.split(x, 0, "y")
        return (
            x.sum(0),
            x.max(0),
            jnp.prod(x / 4, 0),
            jax.nn.softmax(x, 0),
            jnp.cumsum(x, 0),
            lax.top_k(x.T, 3),
            jnp.sort(x, 0),
        )

    same(fn, mesh, f(7, 3))
    same(lambda x: sbp.split(jnp.concatenate([sbp.split(x, 0, "x"), x + 1]), 0, "x"), mesh, f(3, 2))


def test_16_padding_a_partial_sum_with_a_constant(mesh):
    """`pad(P, 1.0)` adds 1 for each part in JAX's own unreduced types; here it is added once, and a
    constant is masked for nothing."""
    plan = same(
        lambda x, w: sbp.replicate(jnp.pad(partial_product(x, w), 1, constant_values=1.0)),
        on(2),
        X,
        W,
    )
    assert kinds(plan)["all_reduce"] == 1
    same(lambda x, w: sbp.replicate(jnp.pad(partial_product(x, w), 1)), on(2), X, W)


def test_17_reshapes_of_split_dims(mesh):
    refused("reshape", lambda x: x.reshape(4, 3), (f(12),), Row((S(0),), (S(1),)))
    same(
        lambda x: [
            sbp.split(x, d, "x").reshape(shape)
            for d in (0, 1)
            for shape in ((24,), (4, 6), (2, 3, 4), (6, 1, 4))
        ],
        mesh,
        f(6, 4),
    )


def test_18_positions_in_expert(mesh):
    refused("cumsum", jnp.cumsum, (f(6),), unary(S(0), S(0)), unary(S(0), P))
    same(lambda m: jnp.cumsum(sbp.split(m, 0, "x", "y"), 0) * m - 1, mesh, i(9, 4, low=0, high=2))


def test_19_lookups_in_a_split_table(mesh):
    refused(
        "gather",
        lambda x, k: x.at[k].get(mode="clip"),
        (f(6, 2), i(4, low=0, high=6)),
        Row((S(0), B), (B,)),
        Row((B, P), (P,)),
    )
    ids = np.array([0, 6, -1, 3, 3, 99, -99], np.int32)
    for mode in ("clip", "fill"):
        same(lambda t, k, m=mode: sbp.split(t, 0, "x", "y").at[k].get(mode=m), mesh, f(7, 2), ids)
    same(
        lambda t, k, u: sbp.split(t, 0, "y").at[sbp.split(k, 0, "x")].add(u),
        mesh,
        f(7, 2),
        ids,
        f(7, 2, seed=1),
    )
    same(
        lambda t, k: lax.dynamic_slice_in_dim(sbp.split(t, 0, "y"), k, 3),
        mesh,
        f(8, 2),
        np.int32(7),
    )
    same(
        lambda t, u, k: lax.dynamic_update_slice_in_dim(sbp.split(t, 0, "y"), u, k, 0),
        mesh,
        f(8, 2),
        f(3, 2),
        np.int32(4),
    )


def test_26_axes_of_one_device():
    fn = lambda x, w: (sbp.replicate(jnp.abs(partial_product(x, w))), sbp.split(x, 0, "x").sum(0))
    assert not kinds(same(fn, on(1), X, W)).keys() & {
        "all_reduce",
        "all_gather",
        "reduce_scatter",
        "all_to_all",
    }
    for shape in ((1, 8), (8, 1)):
        same(fn, jax.make_mesh(shape, ("x", "y")), X, W)
