"""Without any annotation the chooser finds what people write by hand, each where it is the
cheapest.

Programs are whole training steps; what is asserted are the types of the parameters and the
collectives that move activations, weights or gradients (a scalar loss aside).
"""

import math
from collections import Counter
from typing import Any

import jax
import jax.numpy as jnp
import optax
import pytest

import sbp
from benchmarks.faults import budget_gather
from sbp.plan.program import sends
from tests.cases import descent, shape

SMALL = 1024
"""Bytes below which a collective is one of scalars."""


def collectives(plan) -> Counter:
    """How often each collective runs, kernels that send included."""
    found = [s for s in sends(plan.program) if s.bytes > SMALL * s.runs]
    return sum((Counter({s.kind: s.runs}) for s in found), Counter())


mlp_params = lambda d_model, d_ff: {"w1": shape(d_model, d_ff), "w2": shape(d_ff, d_model)}


def sgd(loss):
    def step(p, *batch):
        value, grads = jax.value_and_grad(loss)(p, *batch)
        return jax.tree.map(lambda w, g: w - 0.1 * g, p, grads), value

    return step


mlp_step = sgd(lambda p, x, y: jnp.mean((jax.nn.relu(x @ p["w1"]) @ p["w2"] - y) ** 2))


def planned(fn, *args, devices=8, donated=(0,), **options):
    return sbp.jit(
        fn,
        jax.sharding.AbstractMesh((devices,), ("d",)),
        donate_argnums=donated,
        hardware="tpu-v5p",
        **options,
    ).plan(*args)


def test_data_parallel_when_the_batch_is_large():
    plan = planned(mlp_step, mlp_params(256, 1024), shape(65536, 256), shape(65536, 256))
    (_, x, y), _ = plan.in_types
    assert (x["d"], y["d"]) == (sbp.S(0), sbp.S(0)) and plan.program.typing.optimal
    # Gradients are reduced, as an all-reduce or as its two halves, and nothing else moves.
    assert plan.cost.bytes_per_device == pytest.approx(2 * 7 / 8 * (2 * 256 * 1024 * 4), rel=0.01)


def test_megatron_when_the_weights_are_large():
    plan = planned(mlp_step, mlp_params(8192, 32768), shape(512, 8192), shape(512, 8192))
    (params, _, _), _ = plan.in_types
    assert (params["w1"]["d"], params["w2"]["d"]) == (
        sbp.S(1),
        sbp.S(0),
    ) and plan.program.typing.optimal
    # Three activations; the weights are 64 times as large as one.
    assert plan.cost.bytes_per_device <= 3 * 512 * 8192 * 4


def deep(p, x, y):
    h, _ = jax.lax.scan(lambda h, w: (jnp.tanh(h @ w), None), x, p)
    return jnp.mean((h - y) ** 2)


def adam_step(p, state, x, y):
    value, grads = jax.value_and_grad(deep)(p, x, y)
    updates, state = optax.adam(1e-3).update(grads, state, p)
    return optax.apply_updates(p, updates), state, value


def test_fully_sharded_when_memory_is_short():
    layers, width, batch = 16, 2048, 65536
    p = shape(layers, width, width)
    state = jax.eval_shape(optax.adam(1e-3).init, p)
    args = (adam_step, p, state, shape(batch, width), shape(batch, width))
    free = planned(*args, donated=(0, 1))
    whole = 3 * layers * width * width * 4  # weights and two moments
    assert free.cost.peak_memory_bytes > whole
    tight = planned(*args, donated=(0, 1), memory_limit=free.cost.peak_memory_bytes - whole / 2)
    (weights, adam, x, _), _ = tight.in_types
    assert x["d"] == sbp.S(0)  # still data parallel: the batch is split,
    held = [t for t in jax.tree.leaves((weights, adam)) if t != sbp.B and t["d"] != sbp.B]
    assert len(held) == 3  # and weights and both moments are, too, at rest (ZeRO-3):
    found = collectives(tight)
    # each layer's weights are gathered on the way forward and back, and its gradient is scattered.
    assert found["all_gather"] + found["permute"] + found["all_to_all"] >= 2 * layers
    assert found["all_reduce"] == 0


def test_a_small_step_takes_less_memory():
    """Prices of memory between the powers of ten have the plan that fits."""

    limit = 2.2 * 2**20
    f = sbp.jit(
        descent(lambda p, x, y: ((jnp.tanh(x @ p["w1"]) @ p["w2"] - y) ** 2).mean()),
        jax.sharding.AbstractMesh((2, 4), ("data", "model")),
        in_types=({"w1": "model:S(1)", "w2": "model:S(0)"}, "data:S(0)", "data:S(0)"),
        donate_argnums=0,
        memory_limit=limit,
    )
    plan = f.plan(mlp_params(256, 1024), shape(512, 256), shape(512, 256))
    assert plan.cost.peak_memory_bytes <= limit


def moe_loss(p, x, y, dispatch, combine):
    tokens = jnp.einsum("gsec,gsm->egcm", dispatch, x)
    hidden = jax.nn.relu(jnp.einsum("egcm,emh->egch", tokens, p["wi"]))
    outputs = jnp.einsum("egch,ehm->egcm", hidden, p["wo"])
    return jnp.mean((jnp.einsum("gsec,egcm->gsm", combine, outputs) - y) ** 2)


def moe_step(p, x, y, dispatch, combine):
    value, (grads, dx) = jax.value_and_grad(moe_loss, argnums=(0, 1))(p, x, y, dispatch, combine)
    return jax.tree.map(lambda w, g: w - 0.1 * g, p, grads), dx, value


def moe_plan(devices, k_times_capacity=4):
    e, g, s, m, h = 16, 16, 32, 2048, 8192
    p = {"wi": shape(e, m, h), "wo": shape(e, h, m)}
    masks = shape(g, s, e, k_times_capacity * s // e)
    # Tokens arrive and leave split by groups, as the layers around have them.
    types = (None, "d:S(0)", "d:S(0)", None, None)
    args = (p, shape(g, s, m), shape(g, s, m), masks, masks)
    return planned(moe_step, *args, devices=devices, in_types=types)


@pytest.mark.parametrize(
    ("devices", "k_times_capacity", "ways"),
    [
        # Dispatch and combine, forward and backward.
        (8, 2, {"all_to_all": 4}),
        (16, 2, {"all_to_all": 4}),
        # k times the capacity factor exceeds the devices.
        (2, 4, {"all_gather": 1, "reduce_scatter": 1}),
    ],
)
def test_the_ways_of_experts(devices, k_times_capacity, ways):
    plan = moe_plan(devices, k_times_capacity)
    (params, *_), _ = plan.in_types
    assert params["wi"]["d"] == params["wo"]["d"] == sbp.S(0)
    found = collectives(plan)
    exchanges = {kind: found[kind] for kind in ("all_to_all", "all_gather", "reduce_scatter")}
    assert {kind: times for kind, times in exchanges.items() if times} == ways


def test_the_two_ways_of_experts_send_the_same_at_the_flip():
    tokens = 16 * 32 * 2048 * 4
    # At the flip, 4 tensors of k x capacity / D = 1 token each.
    wanted = {4: 4 * 3 / 4 * tokens, 2: 4 * 1 / 2 * tokens}
    sent = {devices: moe_plan(devices).cost.bytes_per_device for devices in wanted}
    assert sent == pytest.approx(wanted, rel=0.02)


def test_two_dimensional_products_when_memory_is_short():
    n, mesh = 8192, jax.sharding.AbstractMesh((4, 4), ("x", "y"))
    whole = n * n * 4
    limit = 7 / 16 * whole  # 6 / 16 is too little
    plan = sbp.jit(lambda a, b: a @ b, mesh, hardware="tpu-v5p", memory_limit=limit).plan(
        shape(n, n), shape(n, n)
    )
    (a, b), _ = plan.in_types
    assert plan.cost.peak_memory_bytes <= limit
    for t in (a, b, plan.out_types):  # each matrix over both axes
        assert math.prod(4 for axis in ("x", "y") if t[axis] != sbp.B) == 16
    # The volume of SUMMA: 2 (sqrt(p) - 1) blocks.
    assert plan.cost.bytes_per_device <= 2 * 3 * whole / 16


def cross_entropy(p, ids, labels):
    h = jax.nn.relu(p["table"][ids] @ p["w"])
    logits = h @ p["table"].T
    return jnp.mean(
        jax.nn.logsumexp(logits, -1) - jnp.take_along_axis(logits, labels[..., None], -1)[..., 0]
    )


def test_vocabulary_parallel_cross_entropy():
    ids = shape(8, 256, dtype=jnp.int32)
    plan = planned(
        sgd(cross_entropy), {"table": shape(262144, 1024), "w": shape(1024, 1024)}, ids, ids
    )
    (types, _, _), _ = plan.in_types
    assert types["table"]["d"] == sbp.S(0)
    # Four times the tokens; the logits are 256 times as large, the table 128 times.
    assert plan.cost.bytes_per_device <= 4 * 8 * 256 * 1024 * 4


# ---- feasible ------------------------------------------------------------------------------------
# What has a typing gets one: on several mesh axes, under policies and budgets that keep most
# conversions out.


def accumulate(w, batches):
    """Gradients of micro-batches, summed in a loop."""
    loss = lambda w, x: ((jax.nn.relu(x @ w["a"]) @ w["b"] - x) ** 2).mean()
    turn = lambda total, x: (jax.tree.map(jnp.add, total, jax.grad(loss)(w, x)), None)
    return jax.lax.scan(turn, jax.tree.map(jnp.zeros_like, w), batches)[0]


def attend(w, x):
    def loss(w):
        q, k, v = (x @ w[name] for name in "qkv")
        return (jax.nn.softmax(q @ k.swapaxes(-1, -2)) @ v).sum()

    return jax.lax.fori_loop(
        0, 3, lambda _, w: jax.tree.map(lambda p, g: p - 0.1 * g, w, jax.grad(loss)(w)), w
    )


PROGRAMS = {
    "accumulate": (accumulate, ({"a": shape(16, 32), "b": shape(32, 16)}, shape(4, 8, 16))),
    "accumulate, large": (
        accumulate,
        ({"a": shape(1024, 4096), "b": shape(4096, 1024)}, shape(8, 512, 1024)),
    ),
    "attend": (attend, ({n: shape(16, 16) for n in "qkv"}, shape(4, 8, 16))),
}
ASKED: dict[str, dict[str, Any]] = {
    "explicit": {"boxing": "explicit"},
    "reduce": {"boxing": "reduce"},
    "mixed": {"boxing": {"x": "explicit", "y": "reduce"}},
    "loop": {"budgets": [sbp.forbid(where="loop")]},
    "everywhere": {"budgets": [sbp.forbid()]},
}
MESHES = [
    jax.sharding.AbstractMesh((2, 4), ("x", "y")),
    jax.sharding.AbstractMesh((2, 2, 2), ("x", "y", "z")),
]


@pytest.mark.parametrize("asked", ASKED)
@pytest.mark.parametrize("program", PROGRAMS)
@pytest.mark.parametrize("mesh", MESHES, ids=lambda m: "x".join(map(str, m.axis_sizes)))
def test_what_needs_no_collective_has_a_plan(mesh, program, asked):
    """All of them do with every value whole on every device."""
    fn, args = PROGRAMS[program]
    report = sbp.jit(fn, mesh, hardware="tpu-v5e", **ASKED[asked]).check(*args)
    assert report.ok, report.text()


@pytest.mark.parametrize("hardware", ["cpu", "h100", "tpu-v5e"])
@pytest.mark.parametrize("rows", [13, 16, 1023, 8191])
def test_a_budget_counts_effects(rows, hardware):
    """A sum of shards that are padded with zeros is a gather, too."""
    fn = lambda x: jnp.sin(sbp.annotate(x, x=sbp.S(0), y=sbp.S(0)))
    options: Any = {"hardware": hardware, "budgets": [sbp.forbid("all_gather")]}
    with pytest.raises(sbp.SbpTypeError, match="needs a collective that a budget forbids"):
        sbp.jit(fn, MESHES[0], "B", "B", **options).plan(shape(rows, 4))
    for out, needed in (("B", "all_reduce"), ("x:P(sum)", "return")):
        partial = sbp.jit(lambda x: x.sum(0), MESHES[0], "x:S(0)", out, **options)
        assert needed in str(partial.plan(shape(64, 4)))
    padded = sbp.jit(lambda x: 2 * x, MESHES[0], "x:S(0)", "x:P(sum)", **options)
    assert not padded.check(shape(64, 4)).ok  # the caller would add the shards up


def test_no_shared_conversion_is_a_gather_in_parts():
    """Readers share a conversion; one of them, in the forward pass, may not gather."""
    found = sends(budget_gather.f.plan(*budget_gather.args).program)
    sent = {s.kind for s in found if s.phase == "forward" and "model" in s.mesh_axes}
    assert "all_reduce" in sent and not sent & {"all_gather", "zero_pad"}
