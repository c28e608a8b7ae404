"""A reason for a difference excuses only values that depend on it: faults beside ranks, own indices
and numbers that equal the number of devices; and faults of scale behind loops and exchanges."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import PartitionSpec as PS

from tests.shardmap.practice.case import devices
from tests.shardmap.programs.kinds import draw, report_of

N = 4
MESH = devices({"d": N})
ROWS, WHOLE = PS("d"), PS()
X, Y = draw(32, 16), draw(32, N, seed=1)
W, Q = draw(16 * N, seed=2), draw(6, 8, 4, seed=3)

me = lambda: lax.axis_index("d")
summed, averaged = lambda x: lax.psum(x, "d"), lambda x: lax.pmean(x, "d")


def as_wide_as_the_mesh(w, x, y, reduce=averaged):
    """The number 4 is a width, and not the number of devices."""
    return reduce(jax.grad(lambda w: jnp.mean((x @ w.reshape(16, 4) - y) ** 2))(w))


def greedy(x, w, offset=lambda width: me() * width):
    logits = x @ w
    own = logits.argmax(-1)
    score = jnp.take_along_axis(logits, own[:, None], 1)[:, 0]
    token = jnp.where(score == lax.pmax(score, "d"), own + offset(logits.shape[-1]), 10**6)
    return lax.pmin(token, "d")


def running_sum(x, y, reduce=averaged, before=lambda totals: jnp.cumsum(totals, 0) - totals):
    totals = lax.all_gather(x.sum(0), "d")
    return jnp.cumsum(x, 0) + before(totals)[me()], reduce(y.mean())


def hardest(x, y, reduce=averaged):
    """The first rows of each device's own order, and a mean that does not depend on them."""
    return x[jnp.argsort(x[:, 0])[:2]], reduce(jnp.mean(y**2))


def attention(q, k, heads=lambda q: 8):
    """Scaled by the width of all heads."""
    scores = jnp.einsum("qhd,khd->hqk", q, k) / (heads(q) * q.shape[-1]) ** 0.5
    return jax.nn.softmax(scores, -1)


def masked_mean(x, whole=summed):
    seen = (me() * x.shape[0] + jnp.arange(x.shape[0]) < 20).astype(x.dtype)
    return summed((x[:, 0] * seen).sum()) / whole(seen.sum())


def pipeline(w, x, reduce=summed, entering=lambda t: t):
    n = lax.axis_size("d")

    def tick(carry, t):
        h = jnp.tanh(jnp.where(me() == 0, x[jnp.clip(entering(t), 0, 3)], carry) @ w[0])
        return lax.ppermute(h, "d", [(i, (i + 1) % n) for i in range(n)]), h

    _, out = lax.scan(tick, jnp.zeros_like(x[0]), jnp.arange(n + 3))
    return reduce(jnp.where(me() == n - 1, out[n - 1 :], 0.0))


def shares(x, router, mean=averaged):
    chosen = jax.nn.one_hot((x @ router).argmax(-1), lax.axis_size("d"))
    return averaged(chosen.mean(0)), mean((x**2).mean())


def pairs(x, others=lambda x: lax.all_gather(x, "d", tiled=True)):
    """Indices that are too large for a shard give NaN."""
    rows = me() * x.shape[0] + jnp.arange(x.shape[0])
    return averaged(jnp.take_along_axis(x @ others(x).T, rows[:, None], 1).mean())


def own_rows(w, x, y, start=lambda rows: me() * rows, dim=0):
    """The width of `w` is the number of devices."""
    rows = w.shape[0] // lax.axis_size("d")
    mine = lax.dynamic_slice_in_dim(w, start(rows), rows)
    mine = mine - lax.psum_scatter(x.T @ y, "d", tiled=True)
    return lax.all_gather(mine, "d", axis=dim, tiled=True).reshape(w.shape)


def centers(x, y, total=summed, count=summed):
    return total(y.T @ x) / jnp.maximum(count(y.sum(0)), 1)[:, None]


PROGRAMS = {
    "rows": (
        (own_rows, {"start": lambda rows: me()}, (WHOLE, ROWS, ROWS), WHOLE, (draw(16, N), X, Y)),
        [("differs-on-one-device", "warning", "depends on the device")],
    ),
    "another dim is gathered": (
        (own_rows, {"dim": 1}, (WHOLE, ROWS, ROWS), WHOLE, (draw(16, N), X, Y)),
        [("wrong-placement", "error", "gathers dim 1 of a value that is S(0)")],
    ),
    "bound": (
        (centers, {"count": lambda x: x}, ROWS, WHOLE, (X, Y**2)),
        [("missing-reduction", "error", "reduce `y.sum(0)` at line")],
    ),
    "width": (
        (as_wide_as_the_mesh, {"reduce": summed}, (WHOLE, ROWS, ROWS), WHOLE, (W, X, Y)),
        [("wrong-reduction", "warning", "if `4` means the number of devices")],
    ),
    "index": (
        (greedy, {"offset": lambda n: 0}, (WHOLE, PS(None, "d")), WHOLE, (X, draw(16, 64))),
        [("local-result", "error", "finds an index within each shard alone")],
    ),
    "carry": (
        (running_sum, {"before": lambda t: jnp.cumsum(t, 0)}, ROWS, (ROWS, WHOLE), (X, Y)),
        [("differs-on-one-device", "warning", "result 0 changes")],
    ),
    "beside an index": (
        (running_sum, {"reduce": summed}, ROWS, (ROWS, WHOLE), (X, Y)),
        [("wrong-reduction", "error", "use lax.pmean for means of shards")],
    ),
    "beside a rank": (
        (hardest, {"reduce": summed}, ROWS, (ROWS, WHOLE), (X, Y)),
        [("wrong-reduction", "error", "use lax.pmean for means of shards")],
    ),
    "heads of a shard": (
        (attention, {"heads": lambda q: q.shape[1]}, PS(None, "d"), ROWS, (Q, draw(6, 8, 4))),
        [("local-result", "error", "2.82843, and not 5.65685 as with one device")],
    ),
    "count of a mask": (
        (masked_mean, {"whole": lambda x: x}, ROWS, WHOLE, (X,)),
        [("missing-reduction", "error", "reduce `seen.sum()` at line")],
    ),
    "wrong microbatch": (
        (
            pipeline,
            {"entering": lambda t: t + 1},
            (ROWS, WHOLE),
            WHOLE,
            (draw(N, 8, 8), draw(4, 6, 8)),
        ),
        [("differs-on-one-device", "warning", "sbp ran its 4 stages one after the other")],
    ),
    "beside an index up to the number of devices": (
        (shares, {"mean": summed}, (ROWS, WHOLE), (WHOLE, WHOLE), (X, draw(16, N))),
        [("wrong-reduction", "error", "use lax.pmean for means of shards")],
    ),
    "not finite on the mesh": (
        (pairs, {"others": lambda x: x}, ROWS, WHOLE, (X,)),
        [("local-result", "error", "each device sees only its own shard")],
    ),
    "mean of stages": (
        (pipeline, {"reduce": averaged}, (ROWS, WHOLE), WHOLE, (draw(N, 8, 8), draw(4, 6, 8))),
        [("wrong-reduction", "error", 'use lax.psum in place of `lax.pmean(x, "d")` at line')],
    ),
}


@pytest.mark.parametrize("name", PROGRAMS)
def test_a_fault_is_not_excused(name):
    (body, change, ins, outs, args), wanted = PROGRAMS[name]
    right = report_of(body, ins, outs, *args, over=MESH)
    assert all(d.severity == "note" for d in right.diagnostics), right.text()
    found = report_of(functools.partial(body, **change), ins, outs, *args, over=MESH)
    said = [(d.code, d.severity) for d in found.diagnostics if d.severity != "note"]
    assert said == [(code, severity) for code, severity, _ in wanted], found.text()
    assert all(text in " ".join(found.text().split()) for *_, text in wanted), found.text()


def test_gradients_of_microbatches_that_jax_has_summed():
    def step(w, x, own=lambda w: lax.pcast(w, "d", to="varying")):
        def turn(g, part):
            return g + jax.grad(lambda w: jnp.mean(jnp.tanh(part @ w) ** 2))(own(w)), None

        g, _ = lax.scan(turn, jnp.zeros_like(own(w)), x.reshape(2, -1, x.shape[-1]))
        return w - 0.1 * g / 2

    check = functools.partial(report_of, over=MESH, vma=True)
    args = draw(16, 5), X
    right = check(lambda w, x: averaged(step(w, x)), (WHOLE, ROWS), WHOLE, *args)
    assert not right.diagnostics
    (d,) = check(lambda w, x: step(w, x, lambda w: w), (WHOLE, ROWS), WHOLE, *args).diagnostics
    assert d.code == "wrong-reduction" and d.primary is not None
    assert "take lax.pmean of the loss inside the gradient" in d.primary.text


def test_a_device_drops_tokens_over_its_capacity_in_two_choices():
    """The second choices of all tokens come after the first ones, so no dim is split any more."""

    def layer(router, experts, x):
        best = lax.top_k(x @ router, 2)[1]
        chosen = jax.nn.one_hot(best, 8, dtype=jnp.int32).transpose(1, 0, 2)
        place = jnp.cumsum(chosen.reshape(-1, 8), 0).reshape(chosen.shape) - 1
        sent = ((place < 3) * chosen)[..., None] * jax.nn.one_hot(place, 3)
        own = jnp.einsum("ctes,td->esd", sent, x)
        there = lax.all_to_all(own, "d", 0, 1, tiled=True)
        back = lax.all_to_all(jnp.einsum("esd,edf->esf", there, experts), "d", 1, 0, tiled=True)
        return jnp.einsum("ctes,esf->tf", sent, back)

    (d,) = report_of(
        layer, (WHOLE, ROWS, ROWS), ROWS, draw(16, 8), draw(8, 16, 16), X, over=MESH
    ).diagnostics
    assert d.severity == "note" and "ranks its own elements" in d.title


@pytest.mark.parametrize("change", [jnp.multiply, jnp.divide])
def test_a_factor_behind_a_right_reduction_is_not_blamed_on_it(change):
    (d,) = report_of(
        lambda w, x: change(pipeline(w, x), lax.axis_size("d")),
        (ROWS, WHOLE),
        WHOLE,
        draw(N, 8, 8),
        draw(4, 6, 8),
        over=MESH,
    ).diagnostics
    assert (d.code, d.severity) == ("differs-on-one-device", "warning")


def test_parts_have_another_bound_than_their_sum():
    """No help reduces a bounded part, or averages parts that are bounded afterwards."""

    def mean_of_means(x, y):
        count = y.sum(0)
        return averaged((y.T @ x) / jnp.maximum(count, 1)[:, None])

    def masked_means(x, y):
        return averaged((x[:, 0] * y[:, 0]).sum() / jnp.maximum(y[:, 0].sum(), 1.0))

    (d,) = report_of(mean_of_means, ROWS, WHOLE, X, Y**2, over=MESH).diagnostics
    assert "partial value" in d.title and not any("lax.pmean(.." in h.text for h in d.helps)
    (d,) = report_of(masked_means, ROWS, WHOLE, X, Y**2, over=MESH).diagnostics
    (help_,) = d.helps
    assert "reduce `y[:, 0].sum()` at line" in help_.text
    assert "reduce `(x[:, 0] * y[:, 0]).sum()` at line" in help_.text


def test_the_only_element_of_a_shard():
    def member(w, x):
        return averaged(jnp.tanh(x @ w[0]))

    (d,) = report_of(member, (ROWS, WHOLE), WHOLE, draw(N, 16), X, over=MESH).diagnostics
    assert d.severity == "note" and "takes the only element of its shard" in d.title


def test_a_result_that_is_split_along_another_dim():
    softmax = lambda x: jnp.exp(x) / summed(jnp.exp(x).sum(-1, keepdims=True))
    (d,) = report_of(softmax, PS(None, "d"), ROWS, X, over=MESH).diagnostics
    assert [h.text for h in d.helps] == ["split dim 1 over `d` in out_specs of result 0"]


def test_an_offset_by_the_index_on_another_axis():
    def own(table, x):
        offset = lax.axis_index("m") * table.shape[0]
        found = (x >= offset) & (x < offset + table.shape[0])
        return lax.psum(jnp.where(found[:, None], table[(x - offset) % 8], 0.0), "d")

    mesh, ids = devices({"d": 4, "m": 2}), jnp.arange(8) * 3
    text = report_of(own, (ROWS, WHOLE), WHOLE, draw(32, 4), ids, over=mesh).text()
    assert "8, and not 32 as with one device: is it the size of a shard?" in text


def test_a_program_that_does_not_run_with_one_device_is_not_fully_checked():
    shift = np.ones((8, 16), np.float32)
    report = report_of(lambda w: w + shift, ROWS, ROWS, X, over=MESH)
    assert report.ok and "not fully checked in" in report.text()
