"""The verdict on these everyday programs depends on the values that they compute, not on their
spelling: means of one row a device, whole values among zeros, gradients by sample, short rings."""

from typing import Any

import jax
import jax.experimental
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import PartitionSpec as PS

import sbp
from tests.shardmap.practice.case import devices, floats
from tests.shardmap.programs.kinds import report_of

N = 8
MESH = devices({"d": N})
RING = [(i, (i + 1) % N) for i in range(N)]
ROWS, WHOLE = PS("d"), PS()


squares = lambda w, x, y: ((x @ w - y) ** 2).sum() / x.shape[0]


def norms(p, s):
    g = jax.vmap(jax.grad(lambda p, x: jnp.tanh(p @ x)), (None, 0))(p, s)
    return jnp.linalg.norm(g, axis=-1).mean()


def scores(steps):
    def region(q, k):
        def turn(carry, _):
            k, y = carry
            return (lax.ppermute(k, "d", RING), y + jnp.tanh(q @ k.T).sum(1)), None

        return lax.scan(turn, (k, jnp.zeros(q.shape[0])), None, length=steps)[0][1]

    return region


def with_rule(fn):
    """The function with a gradient of its own."""
    ruled = jax.custom_vjp(fn)
    ruled.defvjp(lambda q, k: (fn(q, k), (q, k)), lambda r, g: jax.vjp(fn, *r)[1](g))
    return lambda q, k: ruled(q, k)


def of_microbatches(w, x, y):
    pairs = zip(jnp.split(x, 2), jnp.split(y, 2), strict=True)
    return sum(jax.grad(squares)(w, a, b) for a, b in pairs) / 2


STEP, PAIR = (WHOLE, ROWS, ROWS), (ROWS, ROWS)
W, X, Y, U, V = floats((5, 3), (16, 5), (16, 3), (16, 4), (16, 4))
PROGRAMS: dict[str, tuple[Any, Any, Any, tuple[Any, ...], str]] = {
    "one_row": (lambda x: lax.pmean(x.mean(0), "d"), ROWS, WHOLE, (X[:N],), ""),
    "mean": (lambda *a: lax.pmean(jax.grad(squares)(*a), "d"), STEP, WHOLE, (W, X, Y), ""),
    "sum": (
        lambda *a: lax.psum(jax.grad(squares)(*a), "d"),
        STEP,
        WHOLE,
        (W, X, Y),
        "wrong-reduction",
    ),
    "padded": (
        lambda x: lax.psum(jnp.pad(lax.psum(x.sum(0), "d"), (1, 1)), "d"),
        ROWS,
        WHOLE,
        (X,),
        "doubled-reduction",
    ),
    "concatenated": (
        lambda x: lax.psum(jnp.concatenate([lax.psum(x.sum(0), "d"), jnp.zeros(3)]), "d"),
        ROWS,
        WHOLE,
        (X,),
        "doubled-reduction",
    ),
    "by_sample": (
        lambda p, s: lax.pmean(norms(p, s), "d"),
        (WHOLE, ROWS),
        WHOLE,
        (U[0], U),
        "",
    ),
    "microbatches": (
        lambda *a: lax.pmean(of_microbatches(*a), "d"),
        STEP,
        WHOLE,
        (W, X, Y),
        "",
    ),
    "microbatches_alone": (of_microbatches, STEP, WHOLE, (W, X, Y), "missing-reduction"),
    "one_reduced": (
        lambda u, v: lax.psum(u.sum(0), "d") + v.mean(0),
        PAIR,
        WHOLE,
        (U, V),
        "missing-reduction",
    ),
    "ring": (scores(N), PAIR, ROWS, (U, V), ""),
    "ring_one_short": (scores(N - 1), PAIR, ROWS, (U, V), "differs-on-one-device"),
    "ring_with_rule": (with_rule(scores(N)), PAIR, ROWS, (U, V), ""),
    "ring_with_rule_one_short": (
        with_rule(scores(N - 1)),
        PAIR,
        ROWS,
        (U, V),
        "differs-on-one-device",
    ),
}
"""The region, in_specs, out_specs, arguments, and the code of what sbp says; empty for nothing."""


@pytest.mark.parametrize("given", [True, False])
@pytest.mark.parametrize("name", list(PROGRAMS))
def test_the_verdict_is_that_of_the_values(name, given):
    body, ins, outs, args, code = PROGRAMS[name]
    shapes = args if given else [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in args]
    found = report_of(body, ins, outs, *shapes, over=MESH).diagnostics
    assert [d.code for d in found] == [code] * bool(code)


def test_signs_are_no_least_value():
    """sbp does not take steps of nearly one sign for a minimum over devices, and does not propose
    `lax.pmin`."""

    def body(w, x, y):
        m = jax.grad(squares)(w, x, y)
        return w - 0.1 * m / (jnp.abs(m) + 1e-3)

    (found,) = report_of(body, STEP, WHOLE, W, X, Y, over=MESH).diagnostics
    assert found.severity == "error"
    assert not any("pmin" in h.text or "pmax" in h.text for h in found.helps)


@pytest.mark.parametrize("rate", [1e-1, 1e-5])
@pytest.mark.parametrize("scaled", [False, True])
def test_small_updates_count(rate, scaled):
    """The gradient of the weights `v` is zero except for rounding. The step may divide it by its
    size."""

    loss = lambda w, v, x, y: squares(w, x, y) + jax.nn.softmax(x @ v).sum()

    def codes(reduced):
        def step(w, v, x, y):
            grads = map(reduced, jax.grad(loss, (0, 1))(w, v, x, y))
            sizes = lambda g: jnp.sqrt(g * g) + 1e-8 if scaled else 1.0
            return [u - rate * (g / sizes(g)) for u, g in zip((w, v), grads, strict=True)]

        found = report_of(step, (WHOLE, *STEP), WHOLE, W, W, X, Y, over=MESH).diagnostics
        return [d.code for d in found]

    assert [codes(lambda g: lax.pmean(g, "d")), codes(lambda g: g)] == [[], ["missing-reduction"]]


def unrolled(x):
    """Each device has the sum of another half of the rows."""
    part = x
    for _ in range(N // 2):
        part = part + lax.ppermute(part, "d", RING)
    return part.sum(0)


@pytest.mark.parametrize("refuses", [False, True])
def test_a_result_that_differs_between_devices_is_an_error(refuses):
    """If `refuses`, the function cannot run on one device."""

    def body(x):
        assert not (refuses and x.shape[0] > 2), "two rows, please"
        return unrolled(x)

    report = report_of(body, ROWS, WHOLE, X, over=MESH)
    errors = [d for d in report.diagnostics if d.severity == "error"]
    assert [d.code for d in errors] == ["wrong-placement" if refuses else "missing-reduction"]
    assert ("differs between the devices" in errors[0].title) == refuses
    assert not (refuses and errors[0].helps)
    assert any("two rows" in d.title for d in report.diagnostics) == refuses


def test_a_finding_does_not_hide_an_axis_that_is_not_checked():
    mesh = devices({"a": 2, "b": 4})

    def body(x):
        assert lax.axis_size("b") > 1, "four devices, please"
        return lax.psum(x.mean(), "a")

    said = report_of(
        body, PS("a"), WHOLE, *floats((4, 3)), over=mesh, axis_names={"a", "b"}
    ).diagnostics
    assert {d.code for d in said} == {"wrong-reduction", "not-analysed"}
    assert any("`b`" in d.title and "four devices" in d.title for d in said)


def test_a_pipeline_that_runs_on_one_device_only_stage_by_stage():
    """Each stage has one layer, so the program has no loop over the layers of a device."""

    def body(layers, x):
        (w,) = layers
        out = x
        for _ in range(N):
            out = lax.ppermute(jnp.tanh(out @ w), "d", RING)
        return lax.psum(jnp.where(lax.axis_index("d") == 0, out, 0.0), "d") * 2.0

    said = report_of(body, (ROWS, WHOLE), WHOLE, *floats((N, 4, 4), (6, 4)), over=MESH).diagnostics
    assert said and all(d.code in ("differs-on-one-device", "not-analysed") for d in said)


def test_a_check_prints_nothing_and_acts_on_nothing(capfd):
    def body(x):
        jax.debug.print("seen {}", x.sum())
        return lax.pmean(x.mean(), "d")

    assert report_of(body, ROWS, WHOLE, X, over=MESH).diagnostics == ()
    jax.effects_barrier()
    assert "seen" not in capfd.readouterr().out
    acted = []

    def counts(x):
        jax.experimental.io_callback(lambda v: acted.append(v), None, x.sum())
        return lax.pmean(x.mean(), "d")

    assert report_of(counts, ROWS, WHOLE, X, over=MESH).diagnostics == ()
    assert not acted


def test_the_gradients_of_unlike_samples_are_not_added_up():
    """With check_vma=True, JAX adds up the gradients of the samples of all devices."""
    region = jax.shard_map(
        lambda p, s: lax.pmean(norms(p, s), "d"),
        mesh=MESH,
        in_specs=(WHOLE, ROWS),
        out_specs=WHOLE,
        check_vma=True,
    )
    got, want = np.asarray(jax.jit(region)(U[0], U)), np.asarray(norms(U[0], U))
    found = sbp.check_shard_map(region, U[0], U, mesh=MESH)
    assert found.ok == np.allclose(got, want, rtol=1e-3) and not found.ok


def test_a_manual_region_that_counts_a_whole_value_is_refused():
    region = sbp.manual(lambda s: lax.psum(jnp.pad(s, (1, 1)), "d"), in_types="B", out_types="B")
    (found,) = sbp.jit(region, MESH).check(U[0]).diagnostics
    assert (found.code, found.severity) == ("manual-types", "error")
