"""What types alone do not tell: divisions by hand, the order of mesh axes, faults beside unknown
values, what the shards picked."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import PartitionSpec as PS

import sbp
from tests.shardmap.pair import N_DATA, Pair, draw, mesh
from tests.shardmap.test_wrong import check, outcome

X, W, Y = draw(16, 32, seed=50), draw(32, 24, seed=51), draw(16, 24, seed=52)
STEP, BOTH = (PS(), PS("data"), PS("data")), PS("data", "model")


def squared(w, x, y):
    return ((x @ w - y) ** 2).mean()


def clipped_by_shard(w, x, y):
    g = jax.grad(squared)(w, x, y)
    g = lax.psum_scatter(g, "data", scatter_dimension=0, tiled=True) / lax.axis_size("data")
    n = jnp.sqrt((g * g).sum())
    mine = lax.dynamic_slice_in_dim(w, lax.axis_index("data") * g.shape[0], g.shape[0], 0)
    return lax.all_gather(mine - g / n, "data", axis=0, tiled=True)


def clipped_by_all(w, x, y):
    g = jax.grad(squared)(w, x, y)
    g = lax.psum_scatter(g, "data", scatter_dimension=0, tiled=True) / lax.axis_size("data")
    n = jnp.sqrt(lax.psum((g * g).sum(), "data"))
    mine = lax.dynamic_slice_in_dim(w, lax.axis_index("data") * g.shape[0], g.shape[0], 0)
    return lax.all_gather(mine - g / n, "data", axis=0, tiled=True)


def clipped(w, x, y):
    g = jax.grad(squared)(w, x, y)
    return w - g / jnp.sqrt((g * g).sum())


def moment_of_sum(v, w, x, y):
    g = lax.psum_scatter(jax.grad(squared)(w, x, y), "data", scatter_dimension=0, tiled=True)
    return 0.9 * v + g * g


def moment_of_mean(v, w, x, y):
    g = lax.psum_scatter(
        jax.grad(squared)(w, x, y), "data", scatter_dimension=0, tiled=True
    ) / lax.axis_size("data")
    return 0.9 * v + g * g


def top_by_shard(x):
    return lax.all_gather(lax.top_k(x, 4)[1], "model", axis=1, tiled=True)[:, :4]


def top(x):
    return lax.top_k(lax.all_gather(lax.top_k(x, 4)[0], "model", axis=1, tiled=True), 4)[0]


def top_within_shard(x):
    return lax.top_k(x, 4)[0]


def over_devices(x):
    return lax.psum(x.sum(0), "data") / lax.axis_size("data")


def over_shard(x):
    return lax.psum(x.sum(0), "data") / x.shape[0]


def over_all(x):
    return lax.psum(x.sum(0), "data") / (x.shape[0] * lax.axis_size("data"))


def over_shard_of_two(x):
    return lax.psum(x.sum(), "data") / x.size


def over_all_of_two(x):
    return lax.psum(x.sum(), "data") / (x.size * lax.axis_size("data"))


def over_devices_by_literal(x):
    return lax.psum(x.sum(1), "model") / 4.0


def sum_only(x):
    return lax.psum(x.sum(1), "model")


def doubled(x):
    return x * 2


def added(x, y):
    return x + y


def gathered_inside_out(x):
    return lax.all_gather(x, ("model", "data"), axis=0, tiled=True)


def gathered_in_order(x):
    return lax.all_gather(x, ("data", "model"), axis=0, tiled=True)


PAIRS = {
    "clipped_by_shard": Pair(
        "missing-reduction",
        ("data",),
        "jnp.sqrt((g * g)",
        clipped_by_shard,
        clipped_by_all,
        clipped,
        (W, X, Y),
        STEP,
        PS(),
        vma=False,
    ),
    "top_within_shard": Pair(
        "local-result",
        ("model",),
        "lax.top_k(x, 4)",
        top_within_shard,
        top,
        lambda x: lax.top_k(x, 4)[0],
        (X,),
        (BOTH,),
        PS("data"),
        vma=False,
    ),
    "moment_of_sum": Pair(
        "wrong-reduction",
        ("data",),
        "lax.psum_scatter",
        moment_of_sum,
        moment_of_mean,
        lambda v, w, x, y: 0.9 * v + jax.grad(squared)(w, x, y) ** 2,
        (np.ones_like(W), W, X, Y),
        (PS("data"), *STEP),
        PS("data"),
        vma=False,
    ),
    "over_devices": Pair(
        "wrong-reduction",
        ("data",),
        "lax.axis_size",
        over_devices,
        over_all,
        lambda x: x.mean(0),
        (X,),
        (PS("data"),),
        PS(),
        severity="warning",
    ),
    "over_shard": Pair(
        "wrong-reduction",
        ("data",),
        "x.shape[0]",
        over_shard,
        over_all,
        lambda x: x.mean(0),
        (X,),
        (PS("data"),),
        PS(),
    ),
    "over_shard_of_two": Pair(
        "wrong-reduction",
        ("data",),
        "x.size",
        over_shard_of_two,
        over_all_of_two,
        lambda x: x.mean(),
        (X,),
        (PS("data"),),
        PS(),
    ),
    "over_devices_by_literal": Pair(
        "wrong-reduction",
        ("model",),
        "/ 4.0",
        over_devices_by_literal,
        sum_only,
        lambda x: x.sum(1),
        (X,),
        (BOTH,),
        PS("data"),
    ),
    "order_of_result": Pair(
        "wrong-placement",
        ("data", "model"),
        "",
        doubled,
        doubled,
        lambda x: x * 2,
        (X,),
        (PS(("data", "model")),),
        PS(("data", "model")),
        wrong_outs=PS(("model", "data")),
    ),
    "order_of_operands": Pair(
        "wrong-placement",
        ("data", "model"),
        "x + y",
        added,
        added,
        lambda x, y: x + y,
        (X, X[::-1]),
        (PS(("data", "model")),) * 2,
        PS(("data", "model")),
        wrong_ins=(PS(("data", "model")), PS(("model", "data"))),
    ),
    "order_of_gather": Pair(
        "wrong-placement",
        ("data", "model"),
        "lax.all_gather",
        gathered_inside_out,
        gathered_in_order,
        lambda x: x,
        (X,),
        (PS(("data", "model")),),
        PS(),
        vma=False,
    ),
}


@pytest.mark.parametrize("name", list(PAIRS))
def test_a_wrong_program_is_rejected_and_its_twin_is_not(name):
    pair = PAIRS[name]
    for vma in (True, False) if pair.vma is None else (pair.vma,):
        report = check(pair, "wrong", vma)
        errors = [d for d in report.diagnostics if d.severity == pair.severity]
        assert report.ok == (pair.severity == "warning")
        assert [d.code for d in errors] == [pair.code], report.text()
        (error,) = errors
        assert all(
            (f"`{axis}`" in error.title) == (axis in pair.axes) for axis in ("data", "model")
        ), error.title
        assert pair.at in report.text()
        assert not check(pair, "right", vma).diagnostics


@pytest.mark.parametrize("name", list(PAIRS))
def test_it_is_wrong_and_the_twin_is_right(name):
    pair = PAIRS[name]
    want = np.asarray(jax.jit(pair.reference)(*pair.args))
    right, agree = outcome(pair, "right", bool(pair.vma))
    assert agree
    np.testing.assert_allclose(right, want, rtol=2e-4, atol=2e-4)
    wrong, agree = outcome(pair, "wrong", bool(pair.vma))
    assert (
        not agree or wrong.shape != want.shape or not np.allclose(wrong, want, rtol=1e-3, atol=1e-3)
    )


# ---- what is not told ---------------------------------------------------------------------------


def program(body, ins: Any, outs: Any):
    return jax.shard_map(body, mesh=mesh(), in_specs=ins, out_specs=outs, check_vma=False)


def noted(body, ins: Any, outs: Any, *args: Any):
    """Codes and severities of what is said of a program without an error."""
    report = sbp.check_shard_map(program(body, ins, outs), *args, mesh=mesh())
    assert report.ok, report.text()
    return [(d.code, d.severity) for d in report.diagnostics]


SQUARE = draw(16, 16, seed=53)
NOT_TOLD = {
    "flattened": (lambda x: x.reshape(-1), lambda x: x.reshape(-1), PS(None, "model"), PS("model")),
    "positions": (
        lambda x: x + jnp.arange(x.shape[0])[:, None],
        lambda x: x + jnp.arange(x.shape[0])[:, None],
        PS("data"),
        PS("data"),
    ),
    "mask": (jnp.tril, jnp.tril, PS("data"), PS("data")),
    "rolled": (lambda x: jnp.roll(x, 1, 0), lambda x: jnp.roll(x, 1, 0), PS("data"), PS("data")),
    "turned": (lambda x: x[::-1], lambda x: x[::-1], PS("data"), PS("data")),
    "one_row": (lambda x: lax.psum(x[0], "data") / N_DATA, lambda x: x[0], PS("data"), PS()),
    "random": (
        lambda x: x * jax.random.normal(jax.random.key(0), x.shape),
        lambda x: x * jax.random.normal(jax.random.key(0), x.shape),
        PS("data"),
        PS("data"),
    ),
}


@pytest.mark.parametrize("name", list(NOT_TOLD))
def test_what_no_rule_covers_is_noted(name):
    body, reference, ins, outs = NOT_TOLD[name]
    assert noted(body, (ins,), outs, SQUARE) == [("not-analysed", "note")]
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
    assert noted(body, ins, PS("data"), X, W) == [("not-analysed", "note")]
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
