"""Without a memory limit, a plan reuses what the forward pass sent where that is worth its memory;
the report says what it repeats."""

import dataclasses
import functools
import itertools

import jax
import jax.numpy as jnp
import pytest

import sbp
from sbp.plan import fit, program
from sbp.plan.fit import best_program, room_of, without_repeats
from sbp.plan.saving import repeated_values, repeats
from tests.cases import descent, shape as f32

LAYERS = 8
MESH = jax.sharding.AbstractMesh((16,), ("d",))


def loss(w, x):
    """Fully sharded: the weights of each layer are gathered, again in the gradient."""

    def body(x, w):
        w = sbp.replicate(w.astype(jnp.bfloat16), "d")
        return x + jnp.tanh(x @ w), None

    return (jax.lax.scan(jax.checkpoint(body), x.astype(jnp.bfloat16), w)[0] ** 2).sum()


@functools.cache
def plan(memory_limit=None, width=2048, rows=4096, layers=LAYERS):
    f = sbp.jit(
        lambda w, x: w - 0.1 * jax.grad(loss)(w, x),
        MESH,
        in_types=("d:S(2)", "d:S(0)"),
        donate_argnums=0,
        hardware="tpu-v5e",
        memory_limit=memory_limit,
    )
    return f.plan(f32(layers, width, width), f32(16 * rows, width))


def gathered(plan):
    return sum(p.trips for p in plan.program.boxes() for s in p.box.steps if s.kind == "all_gather")


WEIGHTS = LAYERS * 2048 * 2048 * 2


def test_gathered_weights_are_not_kept_by_default():
    """All layers' gathered weights are much of the memory for little of the time."""
    free, roomy = plan(), plan(2**40)
    assert gathered(free) == 2 * LAYERS and gathered(roomy) == LAYERS
    assert roomy.cost.peak_memory_bytes > free.cost.peak_memory_bytes + WEIGHTS / 2
    assert free.program.typing.saved_seconds == 0 and len(free.program.declined) == 1
    assert not roomy.program.declined
    # A limit says what is kept.
    least, most = free.cost.peak_memory_bytes, roomy.cost.peak_memory_bytes
    assert plan(most).cost == roomy.cost
    assert plan((least + most) / 2).cost.bytes_per_device == free.cost.bytes_per_device


def test_a_plan_that_keeps_values_is_certified_and_verified(monkeypatch):
    seen = []
    for module, name in ((fit, "certify"), (program, "verify")):
        check = getattr(module, name)
        monkeypatch.setattr(
            module, name, lambda x, *rest, check=check: (seen.append(x), check(x, *rest))
        )
    found = plan.__wrapped__(2**40, layers=2).program
    assert found.removed
    assert any(x is found.typing for x in seen) and any(x is found.block for x in seen)


def test_the_report_says_what_is_repeated():
    text = " ".join(plan().report().text(400).split())
    assert "repeats 1 conversion of the forward pass" in text and "memory_limit=" in text
    (declined,) = plan().program.declined
    sent = plan().cost.bytes_per_device - plan(2**40).cost.bytes_per_device
    assert declined.bytes_sent == sent and declined.bytes_kept == WEIGHTS
    assert "of the forward pass" not in plan(2**40).report().text(400)
    tight = plan((plan().cost.peak_memory_bytes + plan(2**40).cost.peak_memory_bytes) / 2)
    assert "which does not fit in memory_limit" in tight.report().text(400)


def test_what_is_cheap_to_keep_is_kept():
    """The same gathers beside activations that are a hundred times larger."""
    wide = plan(width=1024, rows=2**16)
    assert gathered(wide) == LAYERS and not wide.program.declined
    assert plan(2**40, width=1024, rows=2**16).cost == wide.cost


def test_a_little_memory_is_free():
    """A larger rise has to be worth it."""
    program = plan().program
    room = dataclasses.replace(room_of([program]), worth=1e9)
    assert not without_repeats(program, room).removed
    assert len(without_repeats(program, dataclasses.replace(room, worth=0.0)).removed) == 1
    assert without_repeats(program, dataclasses.replace(room, free=float(WEIGHTS))).removed
    assert room.free == pytest.approx(2**34 / 1000)


def test_what_is_worth_it_is_kept_whatever_the_rise():
    """A hard bound on the rise would decline what saves much for a little more."""
    program = plan().program
    half = dataclasses.replace(program.cost, peak_memory_bytes=program.cost.peak_memory_bytes / 2)
    room = room_of([program, dataclasses.replace(program, cost=half)])
    assert room.least == half.peak_memory_bytes and not room.order(program)[0]
    assert without_repeats(program, dataclasses.replace(room, worth=0.0)).removed


@pytest.mark.parametrize("out_types", [None, "d:S(2)", "B"])
def test_a_donated_argument_and_its_result_are_held_once(out_types):
    """Whether the type of the result is free or pinned; of another type it is held beside it."""
    found = sbp.jit(
        lambda w: 2 * w, MESH, in_types="d:S(2)", out_types=out_types, donate_argnums=0
    ).plan(f32(4, 32, 64))
    part = 4 * 32 * 64 * 4 / 16
    assert found.program.reused == (frozenset() if out_types == "B" else {0})
    if out_types != "B":
        assert found.cost.peak_memory_bytes == part


def test_a_faster_plan_of_more_memory_is_named():
    """Of plans with different types, one that holds much more has to be worth it, too."""
    found = plan(width=1024, rows=256, layers=32)
    cost = found.program.faster
    assert cost is not None and cost.seconds < found.cost.seconds
    assert cost.peak_memory_bytes > found.cost.peak_memory_bytes
    assert "a faster plan takes" in found.report().text(400)


# ---- types chosen with what gradients keep -------------------------------------------------------
# Types are chosen with what gradients keep from the forward pass: no types that someone pins by
# hand give a cheaper plan.


EIGHT = jax.sharding.AbstractMesh((8,), ("d",))


def layer(x, w):
    up, down = w
    return x + jax.nn.softmax(jax.nn.gelu(x @ up) @ down, -1)


def scanned(weights, x):
    return jax.lax.scan(jax.checkpoint(lambda x, w: (layer(x, w), None)), x, weights)[0]


def unrolled(weights, x):
    for n in range(3):
        x = jax.checkpoint(lambda x, w: x + jnp.tanh(jnp.tanh(x @ w[0]) @ w[1]))(
            x, jax.tree.map(lambda w, n=n: w[n], weights)
        )
    return x


step = lambda model: descent(lambda w, x: (model(w, x) ** 2).mean())


ARGUMENTS = (f32(3, 1024, 4096), f32(3, 4096, 1024)), f32(256, 1024)


def plan_of(model, hardware, in_types=None, mesh=EIGHT):
    return sbp.jit(
        step(model),
        mesh,
        hardware=hardware,
        donate_argnums=0,
        in_types=in_types,
        memory_limit=2**40,  # every reuse that saves time is taken
    ).plan(*ARGUMENTS)


@pytest.mark.parametrize("hardware", ["tpu-v5p", "h100"])
@pytest.mark.parametrize("model", [scanned, unrolled], ids=lambda f: f.__name__)
def test_no_pinned_plan_is_cheaper(model, hardware):
    free = plan_of(model, hardware)
    typing = free.program.typing
    assert typing.bounds_reuse and typing.saved_seconds > 0
    for up, down, x in itertools.product(
        ("B", "S(1)", "S(2)"), ("B", "S(1)", "S(2)"), ("B", "S(0)", "S(1)")
    ):
        pinned = plan_of(model, hardware, ((f"d:{up}", f"d:{down}"), f"d:{x}"))
        assert typing.lower_bound <= pinned.cost.seconds * (1 + 1e-9), (up, down, x)
        assert free.cost.seconds <= pinned.cost.seconds * (1 + 1e-3), (up, down, x)


@pytest.mark.parametrize(
    ("model", "hardware", "share"),
    [
        # Hardware on which the conversions that are kept take most of the time.
        (scanned, dataclasses.replace(sbp.HARDWARE["tpu-v6e"], whole_scatter_devices=0), 0.9),
        (unrolled, "h100", 0.85),
    ],
    ids=["scanned", "unrolled"],
)
def test_keeping_is_part_of_the_choice(model, hardware, share):
    """Without the reuse of forward conversions, other types are chosen, and the plan costs more."""
    best = plan_of(model, hardware).program
    other = best_program(dataclasses.replace(best.request, reuse=False))
    assert other is not None and not other.typing.bounds_reuse
    assert "sbp did not count that the backward pass" in sbp.Report(program=other).text(400)
    assert best.cost.seconds <= share * other.cost.seconds


@pytest.mark.parametrize("model", [scanned, unrolled], ids=lambda f: f.__name__)
@pytest.mark.parametrize(
    "mesh", [EIGHT, jax.sharding.AbstractMesh((2, 4), ("d", "m"))], ids=["8", "2x4"]
)
def test_what_is_kept_was_foreseen(model, mesh, monkeypatch):
    """The bound waives the conversions of `twins` alone: all that is saved has to be among them."""
    seen: list[int] = []

    def watch(typing, block):
        found = repeats(typing, block)
        assert {r.value for r in found} <= repeated_values(typing.graph)[0]
        seen.extend(r.value for r in found)
        return found

    monkeypatch.setattr("sbp.plan.fit.repeats", watch)
    plan_of(model, "h100", mesh=mesh)
    assert seen


def test_twins_are_counted():
    assert not repeated_values(sbp.jit(scanned, EIGHT).trace(*ARGUMENTS).request.graph)[1]
    again, times = repeated_values(sbp.jit(step(scanned), EIGHT).trace(*ARGUMENTS).request.graph)
    assert set(times.values()) == {2} and len(times) > len(again.intersection(times)) > 0
