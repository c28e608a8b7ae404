"""The MoE layer: how tokens go to experts and back, kinds of experts, and the data that moves
between devices."""

import re
from collections import Counter
from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import sbp
from sbp.moe import layers
from sbp.moe.config import ModelConfig
from sbp.moe.layers import moe_feed_forward
from sbp.moe.routers import ROUTERS, balanced_bias
from sbp.moe.sharding import PLAIN, Sharding, sharding_of
from tests.moe import loops
from tests.moe.steps import assert_same_counts
from tests.slices import sliced

G, S, M, H, E = 8, 16, 6, 4, 8

PAIRS = [
    (router, dispatch)
    for router in ROUTERS
    for dispatch in ("einsum", "gather", "sort")
    if (router, dispatch) != ("expert_choice", "sort")
]


def config(router="top2", dispatch="einsum", **options) -> ModelConfig:
    fields: dict[str, Any] = {
        "experts": E,
        "model_dim": M,
        "expert_dim": H,
        "capacity_factor_per_choice": 0.75,
        "eval_capacity_factor_per_choice": 0.75,
        "router": router,
        "decoder_router": "top2",
        "dispatch": dispatch,
        **options,
    }
    return ModelConfig(**fields)


def weights(cfg, seed=0):
    """Float64 weights of a layer, as NumPy arrays."""
    rng = np.random.default_rng(seed)
    made = {
        "gate": rng.standard_normal((M, E)),
        "expert_in": rng.standard_normal((E, M, H)),
        "expert_out": rng.standard_normal((E, H, M)),
    }
    if cfg.expert_activation == "swiglu":
        made["expert_linear"] = rng.standard_normal((E, M, H))
    if cfg.router == "noisy_top_k":
        made["noise"] = rng.standard_normal((M, E))
    if cfg.router == "sigmoid":
        made["bias"] = rng.uniform(-0.2, 0.2, E)
    if cfg.shared_experts:
        wide = H * cfg.shared_experts
        made["shared_in"], made["shared_linear"] = rng.standard_normal((2, M, wide))
        made["shared_out"] = rng.standard_normal((wide, M))
        if cfg.expert_activation == "relu":
            del made["shared_linear"]
    return made


def tokens(seed=1):
    rng = np.random.default_rng(seed)
    return rng.standard_normal((G, S, M)), rng.random((G, S)) < 0.9


def expert(x, w_in, w_linear, w_out):
    """relu(x W_in) W_out, or (x W_in * sigmoid(x W_in) * x W_linear) W_out, of one token."""
    h = x @ w_in
    if w_linear is None:
        return np.maximum(h, 0) @ w_out
    return (h / (1 + np.exp(-h)) * (x @ w_linear)) @ w_out


def loop_layer(cfg, p, x, mask, capacity, rnd=None):
    """Each token through each expert that has it, one at a time."""
    out = np.zeros_like(x)
    for g in range(G):
        found = loops.looped(
            cfg.router,
            x[g] @ p["gate"],
            mask[g],
            capacity,
            cfg.choices,
            rnd=None if rnd is None else rnd[g],
            noise=x[g] @ p["noise"] if "noise" in p else None,
            bias=p.get("bias"),
        )
        for s, e in zip(*found.dispatch.sum(-1).nonzero(), strict=True):
            linear = p["expert_linear"][e] if "expert_linear" in p else None
            y = expert(x[g, s], p["expert_in"][e], linear, p["expert_out"][e])
            out[g, s] += found.combine[s, e].sum() * y
        for s in range(S if cfg.shared_experts else 0):
            out[g, s] += expert(x[g, s], p["shared_in"], p.get("shared_linear"), p["shared_out"])
    return out


def layer(cfg, p, x, mask, *, key=None, sharding=PLAIN):
    p = jax.tree.map(jnp.asarray, p)
    return moe_feed_forward(p, jnp.asarray(x), jnp.asarray(mask), cfg, key=key, sharding=sharding)


@pytest.mark.parametrize(("router", "dispatch"), PAIRS)
def test_equals_a_loop_over_tokens_and_experts(router, dispatch):
    """A1: einsum and gather under a capacity, sort without one."""
    cfg = config(router, dispatch)
    p, (x, mask) = weights(cfg), tokens()
    capacity = {"einsum": 3, "gather": 3, "sort": S}[dispatch]
    if router == "switch" and dispatch != "sort":
        capacity = 2  # the ceiling of 1.5
    with jax.enable_x64(True):
        y, _, counts = layer(cfg, p, x, mask)
    np.testing.assert_allclose(y, loop_layer(cfg, p, x, mask, capacity), atol=1e-12)
    assert (float(counts.dropped_first + counts.dropped_second) == 0) == (dispatch == "sort")


def test_random_routing_of_a_layer_equals_a_loop():
    """A1, G10, training: the key's numbers leave out second choices."""
    cfg, key = config(), jax.random.key(3)
    p, (x, mask) = weights(cfg), tokens()
    with jax.enable_x64(True):
        y, _, counts = layer(cfg, p, x, mask, key=key)
        rnd = np.asarray(jax.random.uniform(key, (G, S)))
    assert float(counts.skipped_second) > 0
    np.testing.assert_allclose(y, loop_layer(cfg, p, x, mask, 3, rnd), atol=1e-12)


@pytest.mark.parametrize("dispatch", ["einsum", "gather", "sort"])
@pytest.mark.parametrize(("activation", "shared"), [("swiglu", 0), ("relu", 2), ("swiglu", 1)])
def test_swiglu_and_shared_experts(dispatch, activation, shared):
    """G17: against the formula, and gradients against finite differences."""
    cfg = config("mixtral", dispatch, expert_activation=activation, shared_experts=shared)
    p, (x, mask) = weights(cfg), tokens()
    with jax.enable_x64(True):
        y, _, _ = layer(cfg, p, x, mask)
        want = loop_layer(cfg, p, x, mask, 3 if dispatch != "sort" else S)
        np.testing.assert_allclose(y, want, atol=1e-12)
        probe = np.random.default_rng(2).standard_normal(x.shape)
        value = lambda p: jnp.sum(layer(cfg, p, x, mask)[0] * probe)
        slopes = jax.grad(value)(jax.tree.map(jnp.asarray, p))
        for name in p:
            way = np.random.default_rng(3).standard_normal(p[name].shape)
            ahead, behind = (float(value({**p, name: p[name] + h * way})) for h in (1e-6, -1e-6))
            want = (ahead - behind) / 2e-6
            np.testing.assert_allclose(np.sum(slopes[name] * way), want, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("router", ROUTERS)
def test_gather_equals_einsum(router):
    """A2: values, losses and all gradients, with the randomness of training."""
    with jax.enable_x64(True):
        x, mask = tokens()
        found = []
        for dispatch in ("einsum", "gather"):
            cfg = config(router, dispatch)

            def value(p, x, cfg=cfg):
                y, losses, _ = layer(cfg, p, x, mask, key=jax.random.key(5))
                return jnp.sum(jnp.sin(y)) + sum(losses), y

            p = jax.tree.map(jnp.asarray, weights(cfg))
            found.append(jax.grad(value, argnums=(0, 1), has_aux=True)(p, jnp.asarray(x)))
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-11), *found)


# ---- on meshes -----------------------------------------------------------------------------------

MESHES = (
    (("expert", 1),),
    (("expert", 2),),
    (("expert", 4),),
    (("expert", 8),),
    (("data", 2), ("expert", 4)),
)
CASES = [(*pair, axes) for pair in PAIRS for axes in MESHES]


def training(cfg, sharding):
    """Three steps of gradient descent on a layer, its biases by the load."""

    def run(p, x, mask, target):
        def loss(p, key):
            y, losses, counts = layer(cfg, p, x, mask, key=key, sharding=sharding)
            return jnp.mean((y - target) ** 2) + 0.01 * sum(losses), counts

        seen = []
        for step in range(3):
            (value, counts), slopes = jax.value_and_grad(loss, has_aux=True)(
                p, jax.random.fold_in(jax.random.key(0), step)
            )
            new = jax.tree.map(lambda w, g: w - 0.05 * g, p, slopes)
            if "bias" in p:
                new["bias"] = balanced_bias(p["bias"], counts.demand, 0.01)
            p = new
            seen.append((value, counts))
        return p, seen

    return run


@cache
def alone(cfg):
    """The same on one device: arguments and results."""
    x, mask = tokens()
    args = weights(cfg), x, mask, np.random.default_rng(9).standard_normal(x.shape)
    return args, jax.device_get(jax.jit(training(cfg, PLAIN))(*args))


@pytest.mark.laws
@pytest.mark.parametrize(
    ("router", "dispatch", "axes"),
    sliced(CASES, 0.08, laws=0.15, seed=3),
    ids=lambda a: a if isinstance(a, str) else "x".join(str(n) for _, n in a),
)
def test_training_on_meshes_equals_one_device(router, dispatch, axes):
    """A4: in float64 losses and weights to 1e-10 and counts exactly, by every router and
    dispatch. `make laws` takes 15 % of the cases."""
    cfg = config(router, dispatch, expert_activation="swiglu", shared_experts=1, router_z_loss=0.1)
    with jax.enable_x64(True):
        args, want = alone(cfg)
        mesh = sbp.make_mesh([size for _, size in axes], [name for name, _ in axes])
        got = sbp.jit(training(cfg, sharding_of(axes)), mesh)(*args)
    (p, seen), (p_want, seen_want) = jax.device_get(got), want
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-10), p, p_want)
    for (value, counts), (value_want, counts_want) in zip(seen, seen_want, strict=True):
        np.testing.assert_allclose(value, value_want, rtol=1e-10)
        assert_same_counts(counts, counts_want)
    assert seen[2][0] < seen[0][0]


# ---- what moves ----------------------------------------------------------------------------------

DEVICES = 4
SHARDING = sharding_of((("expert", DEVICES),))
MESH = sbp.make_mesh([DEVICES], ["expert"])
COLLECTIVES = r"\b(all_to_all|all_gather|all_reduce|reduce_scatter)\[.*?  (\d+) B "


def sent(plan):
    """The collectives of a plan with the bytes that a device sends."""
    return [(found[1], int(found[2])) for found in re.finditer(COLLECTIVES, str(plan))]


def large(cfg, groups, size, width, hidden):
    """Shapes of a layer's weights and tokens."""
    shape = lambda *dims: jax.ShapeDtypeStruct(dims, jnp.float32)
    p = {
        "gate": shape(width, cfg.experts),
        "expert_in": shape(cfg.experts, width, hidden),
        "expert_out": shape(cfg.experts, hidden, width),
    }
    return p, shape(groups, size, width)


def forward(cfg, sharding):
    def run(p, x):
        y, losses, _ = moe_feed_forward(p, x, jnp.ones(x.shape[:2], bool), cfg, sharding=sharding)
        return y, losses.balance

    return run


def both_ways(cfg, sharding):
    def loss(p, x):
        y, balance = forward(cfg, sharding)(p, x)
        return jnp.sum(y * y) + balance

    return jax.value_and_grad(loss, argnums=(0, 1))


@pytest.mark.parametrize("dispatch", ["einsum", "gather"])
def test_two_all_to_alls_forward_and_four_a_step(dispatch):
    """A3: in the plan and in the compiled program; each sends the payload of section 4.4."""
    cfg = ModelConfig(experts=16, eval_capacity_factor_per_choice=1.0, dispatch=dispatch)
    args = large(cfg, 4, 1024, 64, 256)
    # E * C * M * G / D elements, of which (D - 1) / D leave the device.
    payload = 16 * 128 * 64 * 4 // DEVICES * 4 * (DEVICES - 1) // DEVICES
    for program, count in ((forward, 2), (both_ways, 4)):
        plan = sbp.jit(program(cfg, SHARDING), MESH).plan(*args)
        assert [n for kind, n in sent(plan) if kind == "all_to_all"] == [payload] * count
        compiled = plan.lower().compile().as_text()
        assert len(re.findall(r" all-to-all(?:-start)?\(", compiled)) == count


def test_three_annotations_type_the_layer_and_its_gradient():
    """S3: with no types but the annotations, weights of experts and tokens lie split over the
    devices, and so do their gradients; the router's weight may lie anywhere, and its gradient is
    the one sum over devices of that size."""
    cfg = ModelConfig(experts=16, eval_capacity_factor_per_choice=1.0)
    plan = sbp.jit(both_ways(cfg, SHARDING), MESH).plan(*large(cfg, 4, 1024, 64, 256))
    (weights, tokens), _ = plan.in_types
    loss, (slopes, slope) = plan.out_types
    assert [
        *(types[name] for types in (weights, slopes) for name in ("expert_in", "expert_out")),
        *(tokens, slope),
    ] == [sbp.parse("expert:S(0)")] * 6
    assert loss == sbp.parse("B")
    found = sent(plan)
    assert [kind for kind, _ in found].count("all_to_all") == 4
    # What else moves: the loss, and the router's weight or its gradient, of [M, E].
    sizes = [size for _, size in found]
    assert sum(sizes) - 4 * max(sizes) <= 2 * 64 * 16 * 4 + 64


@pytest.mark.parametrize("choices", [1, 2, 3, 5, 6, 8])
def test_all_gather_and_reduce_scatter_where_choices_pass_the_devices(choices):
    """C4: k copies of a token by all-to-all, or all tokens by all-gather and their outputs by
    reduce-scatter, whichever sends less: they meet at k = D."""
    cfg = ModelConfig(
        experts=16,
        eval_capacity_factor_per_choice=1.0,
        router="top_k",
        experts_per_token=choices,
    )
    size, width = 256, 1024
    types = {"gate": "B", "expert_in": "expert:S(0)", "expert_out": "expert:S(0)"}
    f = sbp.jit(forward(cfg, SHARDING), MESH, in_types=(types, "expert:S(0)"))
    plan = f.plan(*large(cfg, 4, size, width, 4096))
    # Router logits and slot numbers move too; they are small beside the tokens.
    found = Counter(kind for kind, sent_bytes in sent(plan) if sent_bytes > 2**19)
    row = size * width * 4  # bytes of the tokens of a device
    if choices < DEVICES:
        assert found == Counter(all_to_all=2)
        assert plan.cost.bytes_per_device < 1.1 * 2 * choices * row * (DEVICES - 1) / DEVICES
    else:
        assert found == Counter(all_gather=1, reduce_scatter=1)
        assert plan.cost.bytes_per_device < 1.1 * 2 * (DEVICES - 1) * row


def test_split_experts_are_reduced_behind_combine(monkeypatch):
    """C5: with the hidden units of each expert split over `model`, expert outputs may stay partial
    through combine; reduced before it, twice as much is sent on `model` for two choices. The plan
    without such a pin is no slower than either."""
    cfg = ModelConfig(experts=16, eval_capacity_factor_per_choice=1.0)
    mesh = sbp.make_mesh([2, 4], ["expert", "model"])
    sharding = Sharding.over(("expert",), ("expert",))
    p, x = large(cfg, 4, 256, 1024, 4096)
    types = {
        "gate": "B",
        "expert_in": "expert:S(0) model:S(2)",
        "expert_out": "expert:S(0) model:S(1)",
    }
    each = layers._each_expert

    def planned(pin):
        monkeypatch.setattr(layers, "_each_expert", lambda *args: pin(each(*args)))
        plan = sbp.jit(
            forward(cfg, sharding),
            mesh,
            in_types=(types, "expert:S(0)"),
            out_types=("expert:S(0)", "B"),
        ).plan(p, x)
        hits = re.findall(r"(?:all_reduce|reduce_scatter)\[model\].*?  (\d+) B ", str(plan))
        return plan.cost.seconds, [int(hit) for hit in hits if int(hit) > 2**10]

    free, _ = planned(lambda outputs: outputs)
    behind, late = planned(lambda outputs: sbp.annotate(outputs, model=sbp.P))
    before, early = planned(lambda outputs: sbp.annotate(outputs, model=sbp.B))
    # An all-reduce, by a ring of 4, of a device's tokens [G / 2, S, M], or of all their slots.
    assert late == [2 * 3 / 4 * (2 * 256 * 1024 * 4)] and early == [2 * late[0]]
    assert free <= min(behind, before)
