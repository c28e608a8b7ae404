"""Programs whose shards are used each for itself, or in another order: what sbp says of them."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import PartitionSpec as PS

import sbp
from sbp.shardmap.words import DIFFERS
from tests.shardmap.programs.kinds import mesh
from tests.shardmap.programs.wrong.subtle import BOTH, NOT_TOLD, SQUARE, STEP, W, X, Y, squared

BY_SHARD = ("flattened", "rolled", "turned", "one_row")
"""Programs whose operations reorder or pick the elements of each shard."""

SAME_DRAWS = ("random",)
"""Programs in which only the numbers that devices draw differ; the runs draw a constant."""


def program(body, ins: Any, outs: Any):
    return jax.shard_map(body, mesh=mesh(), in_specs=ins, out_specs=outs, check_vma=False)


def said(body, ins: Any, outs: Any, *args: Any):
    """Codes and severities of what is said of a program."""
    report = sbp.check_shard_map(program(body, ins, outs), *args, mesh=mesh())
    return [(d.code, d.severity) for d in report.diagnostics]


@pytest.mark.parametrize("name", list(NOT_TOLD))
def test_an_operation_on_each_shard_alone(name):
    body, reference, ins, outs = NOT_TOLD[name]
    code = "local-result" if name in BY_SHARD else "wrong-placement"
    assert said(body, (ins,), outs, SQUARE) == [(code, "error")] * (name not in SAME_DRAWS)
    got = np.asarray(jax.jit(program(body, (ins,), outs))(SQUARE))
    assert not np.allclose(got, np.asarray(jax.jit(reference)(SQUARE)))


def test_the_same_columns_against_different_rows():
    body = lambda x, w: lax.psum(x[:, : w.shape[0]] @ w, "model")

    def own(x, w):
        return lax.psum(
            lax.dynamic_slice_in_dim(x, lax.axis_index("model") * w.shape[0], w.shape[0], 1) @ w,
            "model",
        )

    ins = (PS("data"), PS("model"))
    assert said(body, ins, PS("data"), X, W) == [(DIFFERS, "warning")]
    assert said(own, ins, PS("data"), X, W) == []
    np.testing.assert_allclose(
        jax.jit(program(own, ins, PS("data")))(X, W), X @ W, rtol=1e-4, atol=1e-4
    )
    assert not np.allclose(jax.jit(program(body, ins, PS("data")))(X, W), X @ W, atol=1e-2)


@pytest.mark.parametrize("number", [2.0, 16, 32])
def test_a_number_that_is_written_down_is_that_number(number):
    """Half of a sum of squares, on two devices."""
    assert said(lambda x: lax.psum((x * x).sum(), "data") / number, (PS("data"),), PS(), X) == []


def test_a_number_that_is_written_down_may_count_devices():
    ring = lambda x: lax.psum(x.mean(), "model") / 4.0
    assert said(ring, (PS("model"),), PS(), X) == []
    twice = lambda x: lax.psum(x.sum(), "model") / lax.axis_size("model")
    (found,) = said(twice, (PS("model"),), PS(), X)
    assert found[0] == "wrong-reduction"


top_by_shard = lambda x: lax.all_gather(lax.top_k(x, 4)[1], "model", axis=1, tiled=True)[:, :4]


def test_local_indices_stay_local_when_gathered():
    """Places within each shard are none within all of them, unless each device adds where its shard
    starts."""
    report = sbp.check_shard_map(program(top_by_shard, (BOTH,), PS("data")), X, mesh=mesh())
    assert [d.code for d in report.diagnostics] in ([DIFFERS], ["local-result"])

    def places(x):
        best, at = lax.top_k(x, 4)
        at = at + lax.axis_index("model") * x.shape[1]
        best, at = (lax.all_gather(v, "model", axis=1, tiled=True) for v in (best, at))
        return jnp.take_along_axis(at, lax.top_k(best, 4)[1], 1)

    f = program(places, (BOTH,), PS("data"))
    assert sbp.check_shard_map(f, X, mesh=mesh()).ok
    np.testing.assert_array_equal(jax.jit(f)(X), lax.top_k(X, 4)[1])


def test_a_gather_of_the_outer_axis_first():
    def inside_out(x):
        return lax.all_gather(lax.all_gather(x, "data", tiled=True), "model", tiled=True)

    in_order = lambda x: lax.all_gather(lax.all_gather(x, "model", tiled=True), "data", tiled=True)

    ins = (PS(("data", "model")),)
    assert said(inside_out, ins, PS(), X) == [("local-result", "error")]
    assert said(in_order, ins, PS(), X) == []
    np.testing.assert_array_equal(jax.jit(program(in_order, ins, PS()))(X), X)
    assert not np.array_equal(jax.jit(program(inside_out, ins, PS()))(X), X)


def test_a_position_in_a_whole_dim():
    assert said(lambda x: x + jnp.arange(x.shape[1])[None], (PS("data"),), PS("data"), X) == []

    own = lambda x: x + (lax.axis_index("data") * x.shape[0] + jnp.arange(x.shape[0]))[:, None]

    assert said(own, (PS("data"),), PS("data"), X) == []


def mean_divided_again(w, x, y):
    return lax.pmean(jax.grad(squared)(w, x, y), "data") / lax.axis_size("data")


@pytest.mark.parametrize(
    "loop",
    [
        lambda w, x, y: lax.fori_loop(0, 3, lambda i, w: w - mean_divided_again(w, x, y), w),
        lambda w, x, y: lax.scan(
            lambda c, _: (c + mean_divided_again(w, x, y), None), w, None, length=3
        )[0],
        lambda w, x, y: lax.scan(
            lambda c, _: (mean_divided_again(w, x, y), None), w, None, length=3
        )[0],
    ],
)
def test_a_fault_in_a_loop(loop):
    region = jax.shard_map(loop, mesh=mesh(), in_specs=STEP, out_specs=PS(), check_vma=False)
    (found,) = sbp.check_shard_map(region, W, X, Y, mesh=mesh()).diagnostics
    assert found.code == "wrong-reduction"
