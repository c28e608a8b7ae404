"""Programs whose verdict is a note or a warning: the checker says what it cannot decide, and only
that."""

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

SHOWN = ("positions", "mask")
"""Programs in which positions that count from zero in each shard show what is wrong."""

RUN = ("rolled", "turned", "one_row")
"""Programs whose results differ on one device, and nothing shows that this may be meant."""


def program(body, ins: Any, outs: Any):
    return jax.shard_map(body, mesh=mesh(), in_specs=ins, out_specs=outs, check_vma=False)


def noted(body, ins: Any, outs: Any, *args: Any):
    """Codes and severities of what is said of a program without an error."""
    report = sbp.check_shard_map(program(body, ins, outs), *args, mesh=mesh())
    assert report.ok, report.text()
    return [(d.code, d.severity) for d in report.diagnostics]


@pytest.mark.parametrize("name", list(NOT_TOLD))
def test_what_no_rule_covers_is_noted(name):
    body, reference, ins, outs = NOT_TOLD[name]
    shown = ("wrong-placement", "warning") if name in SHOWN else ("not-analysed", "note")
    differs = [(DIFFERS, "warning")] if name in RUN else []
    assert sorted(noted(body, (ins,), outs, SQUARE)) == sorted([shown, *differs])
    got = np.asarray(jax.jit(program(body, (ins,), outs))(SQUARE))
    assert not np.allclose(got, np.asarray(jax.jit(reference)(SQUARE)))


def test_the_same_columns_against_different_rows():
    def body(x, w):
        return lax.psum(x[:, : w.shape[0]] @ w, "model")

    def own(x, w):
        return lax.psum(
            lax.dynamic_slice_in_dim(x, lax.axis_index("model") * w.shape[0], w.shape[0], 1) @ w,
            "model",
        )

    ins = (PS("data"), PS("model"))
    assert noted(body, ins, PS("data"), X, W) == [("wrong-placement", "warning")]
    assert noted(own, ins, PS("data"), X, W) == []
    np.testing.assert_allclose(
        jax.jit(program(own, ins, PS("data")))(X, W), X @ W, rtol=1e-4, atol=1e-4
    )
    assert not np.allclose(jax.jit(program(body, ins, PS("data")))(X, W), X @ W, atol=1e-2)


def test_a_literal_that_may_count_something_else():
    """Half of a sum of squares, on two devices."""
    assert noted(lambda x: lax.psum((x * x).sum(), "data") / 2.0, (PS("data"),), PS(), X) == [
        ("wrong-reduction", "warning")
    ]
    assert noted(lambda x: lax.psum(x.sum(0), "data") / 16, (PS("data"),), PS(), X) == []
    assert noted(lambda x: lax.psum(x.sum(), "data") / 32, (PS("data"),), PS(), X) == []


def top_by_shard(x):
    return lax.all_gather(lax.top_k(x, 4)[1], "model", axis=1, tiled=True)[:, :4]


def test_local_indices_stay_local_when_gathered():
    """Places within each shard are none within all of them, unless each device adds where its shard
    starts."""
    report = sbp.check_shard_map(program(top_by_shard, (BOTH,), PS("data")), X, mesh=mesh())
    assert [d.code for d in report.diagnostics] == ["local-result"]

    def places(x):
        best, at = lax.top_k(x, 4)
        at = at + lax.axis_index("model") * x.shape[1]
        best, at = (lax.all_gather(v, "model", axis=1, tiled=True) for v in (best, at))
        return jnp.take_along_axis(at, lax.top_k(best, 4)[1], 1)

    f = program(places, (BOTH,), PS("data"))
    assert sbp.check_shard_map(f, X, mesh=mesh()).ok
    np.testing.assert_array_equal(jax.jit(f)(X), lax.top_k(X, 4)[1])


def test_candidates_alone_are_noted():
    def body(x):
        return lax.all_gather(lax.top_k(x, 4)[0], "model", axis=1, tiled=True)

    assert noted(body, (BOTH,), PS("data"), X) == [("not-analysed", "note")]


def test_a_gather_of_the_outer_axis_first_is_noted():
    def inside_out(x):
        return lax.all_gather(lax.all_gather(x, "data", tiled=True), "model", tiled=True)

    def in_order(x):
        return lax.all_gather(lax.all_gather(x, "model", tiled=True), "data", tiled=True)

    ins = (PS(("data", "model")),)
    assert noted(inside_out, ins, PS(), X) == [("not-analysed", "note")]
    assert noted(in_order, ins, PS(), X) == []
    np.testing.assert_array_equal(jax.jit(program(in_order, ins, PS()))(X), X)
    assert not np.array_equal(jax.jit(program(inside_out, ins, PS()))(X), X)


def test_a_position_in_a_whole_dim_is_no_doubt():
    assert noted(lambda x: x + jnp.arange(x.shape[1])[None], (PS("data"),), PS("data"), X) == []

    def own(x):
        return x + (lax.axis_index("data") * x.shape[0] + jnp.arange(x.shape[0]))[:, None]

    assert noted(own, (PS("data"),), PS("data"), X) == []


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
def test_a_doubt_passes_through_the_carry_of_a_loop(loop):
    region = jax.shard_map(loop, mesh=mesh(), in_specs=STEP, out_specs=PS(), check_vma=False)
    (found,) = sbp.check_shard_map(region, W, X, Y, mesh=mesh()).diagnostics
    assert (found.code, found.severity) == ("not-analysed", "warning")
