"""Gating against a sequential loop written from Algorithm 1, and its metamorphic properties."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from sbp.errors import SbpError
from sbp.moe.gating import expert_capacity
from tests.moe.routing import routed
from tests.slices import sliced


def loop_gating(logits, capacity, *, mask=None, rnd=None, counter="lingvo"):
    """Algorithm 1 for one group [S, E], token by token, in float64."""
    size, experts = logits.shape
    logits = logits.astype(np.float64)
    gates = np.exp(logits - logits.max(-1, keepdims=True))
    gates /= gates.sum(-1, keepdims=True)
    mask = np.ones(size, bool) if mask is None else mask
    combine = np.zeros((size, experts, capacity))
    dispatch = np.zeros((size, experts, capacity))
    count = np.zeros(experts, int)
    choices = []
    for s in range(size):
        order = sorted(range(experts), key=lambda e: (-logits[s, e], e))
        choices.append((order[0], order[1]))
    dropped = [0, 0]
    skipped = 0
    for s in range(size):
        if not mask[s]:
            continue
        e1, e2 = choices[s]
        if count[e1] < capacity:
            combine[s, e1, count[e1]] = gates[s, e1] / (gates[s, e1] + gates[s, e2])
            dispatch[s, e1, count[e1]] = 1
        else:
            dropped[0] += 1
        count[e1] += 1
    real = max(mask.sum(), 1)
    mean_gate = gates[mask].sum(0) / real
    aux = float(np.mean(count / real * mean_gate))
    for s in range(size):
        if not mask[s]:
            continue
        e1, e2 = choices[s]
        g2 = gates[s, e2] / (gates[s, e1] + gates[s, e2])
        wanted = rnd is None or 2 * g2 > rnd[s]
        if wanted and count[e2] < capacity:
            combine[s, e2, count[e2]] = g2
            dispatch[s, e2, count[e2]] = 1
        elif wanted:
            dropped[1] += 1
        skipped += not wanted
        if wanted or counter == "paper":
            count[e2] += 1
    return combine, dispatch, aux, dropped, skipped


def random_case(seed, groups=3, size=24, experts=5, scale=2.0):
    rng = np.random.default_rng(seed)
    logits = (scale * rng.standard_normal((groups, size, experts))).astype(np.float32)
    rnd = rng.random((groups, size)).astype(np.float32)
    mask = rng.random((groups, size)) < 0.8
    return logits, rnd, mask


SIZES = [(24, 5, 4), (24, 5, 24), (16, 2, 1), (40, 16, 5), (8, 3, 2)]
LOOPS = [
    (counter, *sizes, training)
    for counter in ("lingvo", "paper")
    for sizes in SIZES
    for training in (True, False)
]


@pytest.mark.laws
@pytest.mark.parametrize(
    ("counter", "size", "experts", "capacity", "training"), sliced(LOOPS, 2 / 5)
)
def test_equals_the_sequential_loop(counter, size, experts, capacity, training):
    for seed in range(4):
        logits, rnd, mask = random_case(seed, size=size, experts=experts)
        got = routed(
            jnp.asarray(logits),
            capacity,
            mask=jnp.asarray(mask),
            rnd=jnp.asarray(rnd) if training else None,
            counter=counter,
        )
        auxes, drops = [], np.zeros(3)
        for g in range(len(logits)):
            combine, dispatch, aux, dropped, skipped = loop_gating(
                logits[g], capacity, mask=mask[g], rnd=rnd[g] if training else None, counter=counter
            )
            np.testing.assert_array_equal(got.dispatch[g], dispatch)
            np.testing.assert_allclose(got.combine[g], combine, atol=1e-6)
            auxes.append(aux)
            drops += [*dropped, skipped]
        np.testing.assert_allclose(got.aux, np.mean(auxes), rtol=1e-5)
        m = got.metrics
        np.testing.assert_array_equal([m.dropped_first, m.dropped_second, m.skipped_second], drops)
        assert m.tokens == mask.sum()
        np.testing.assert_array_equal(m.load, np.asarray(got.dispatch).sum((0, 1, 3)))
        # Every choice is dispatched, dropped or skipped.
        assert m.load.sum() + drops.sum() == 2 * mask.sum()


def test_slots_hold_one_token_each_and_fill_from_zero():
    logits, rnd, mask = random_case(7, size=40)
    dispatch = np.asarray(
        routed(jnp.asarray(logits), 6, mask=jnp.asarray(mask), rnd=jnp.asarray(rnd)).dispatch
    )
    used = dispatch.sum(1)
    assert used.max() <= 1
    assert (np.diff(used, axis=-1) <= 0).all(), "a free slot before a used one"
    assert dispatch.sum((2, 3)).max() <= 2


def test_paper_counters_dispatch_a_subset():
    fewer = 0
    for seed in range(10):
        logits, rnd, _ = random_case(seed, size=64, experts=8, scale=4.0)
        a, b = (
            np.asarray(
                routed(jnp.asarray(logits), 8, rnd=jnp.asarray(rnd), counter=c).dispatch
            ).sum(-1)
            for c in ("lingvo", "paper")
        )
        assert (b <= a).all()
        fewer += int(a.sum() - b.sum())
    assert fewer > 0


def test_first_choices_outrank_second_ones():
    # Token 0 wants expert 0 then 1; token 1 wants expert 1 then 0. One slot each: a token-major
    # order would give both to token 0.
    logits = jnp.asarray([[[2.0, 1.0], [1.0, 2.0]]])
    dispatch = np.asarray(routed(logits, 1).dispatch)[0, :, :, 0]
    np.testing.assert_array_equal(dispatch, [[1, 0], [0, 1]])


def test_overflow_gives_zero_rows():
    logits = jnp.tile(jnp.asarray([5.0, 4.0, -9.0]), (2, 10, 1))
    got = routed(logits, 3)
    rows = np.asarray(got.combine).sum((2, 3))
    assert (np.asarray(got.dispatch).sum((1, 3))[:, :2] == 3).all()
    np.testing.assert_allclose(rows[:, :3], 1.0, rtol=1e-6)
    assert (rows[:, 3:] == 0).all()


def test_groups_are_independent():
    logits, rnd, mask = map(jnp.asarray, random_case(1))
    order = jnp.asarray([2, 0, 1])
    whole = routed(logits, 4, mask=mask, rnd=rnd)
    moved = routed(logits[order], 4, mask=mask[order], rnd=rnd[order])
    np.testing.assert_array_equal(whole.combine[order], moved.combine)
    jac = jax.jacobian(lambda x: routed(x, 4, mask=mask, rnd=rnd).combine.sum((1, 2, 3)))(logits)
    for g in range(3):
        assert (np.asarray(jac[g])[np.arange(3) != g] == 0).all()


def test_aux_of_uniform_routing_and_independence_from_capacity_and_rnd():
    experts = 4
    logits = jnp.asarray(1e-3 * np.tile(np.eye(experts, dtype=np.float32), (2, 3, 1)))
    for scale, value in (("paper", 1 / experts**2), ("lingvo", 1.0)):
        aux = routed(logits, 1, aux_scale=scale).aux
        np.testing.assert_allclose(aux, value, rtol=1e-3)
    logits, rnd, _ = random_case(3)
    auxes = {
        float(routed(jnp.asarray(logits), c, rnd=r).aux)
        for c in (1, 4, 20)
        for r in (None, jnp.asarray(rnd))
    }
    assert len(auxes) == 1


def test_aux_gradient_flows_to_the_gate_through_the_mean_alone():
    with jax.enable_x64(True):
        rng = np.random.default_rng(0)
        x, w = rng.standard_normal((2, 12, 6)), rng.standard_normal((6, 4))

        def aux(w):
            return routed(jnp.einsum("gsm,me->gse", jnp.asarray(x), w), 4).aux

        grad = np.asarray(jax.grad(aux)(jnp.asarray(w)))
        assert grad.dtype == np.float64
        assert np.abs(grad).max() > 1e-4
        h = 1e-6
        for index in [(0, 0), (3, 1), (5, 3)]:
            step = np.zeros_like(w)
            step[index] = h
            slope = (float(aux(jnp.asarray(w + step))) - float(aux(jnp.asarray(w - step)))) / (
                2 * h
            )
            np.testing.assert_allclose(grad[index], slope, rtol=1e-6, atol=1e-9)


def test_the_auxiliary_loss_evens_out_the_load():
    """M12, its load: tokens that prefer one expert spread over all by descent on the auxiliary loss
    alone. Steps with its sign turned make the load less even."""
    rng = np.random.default_rng(0)
    x = jnp.asarray(rng.standard_normal((2, 64, 8)) + 1, jnp.float32)

    def unevenness(w):
        """The coefficient of variation of the first choices."""
        load = np.bincount(np.argmax(np.asarray(x) @ np.asarray(w), -1).ravel(), minlength=6)
        return load.std() / load.mean()

    slope = jax.jit(jax.grad(lambda w: routed(jnp.einsum("gsm,me->gse", x, w), 128).aux))
    first = jnp.asarray(rng.standard_normal((8, 6)) / 2, jnp.float32)
    found = {}
    for way in (1, -1):
        w = first
        for _ in range(200):
            w = w - way * 0.3 * slope(w)
        found[way] = unevenness(w)
    assert found[1] < 0.5 * unevenness(first) < unevenness(first) < found[-1]


def test_random_routing_keeps_the_second_choice_with_probability_two_g2():
    n = 100_000
    for g2 in (0.05, 0.2, 0.45):
        logits = jnp.broadcast_to(jnp.log(jnp.asarray([1 - g2, g2])), (n // 10, 10, 2))
        rnd = jax.random.uniform(jax.random.key(0), (n // 10, 10))
        kept = 1 - float(routed(logits, 10, rnd=rnd).metrics.skipped_second) / n
        assert abs(kept - 2 * g2) < 5 * np.sqrt(2 * g2 * (1 - 2 * g2) / n) + 1e-3
        assert routed(logits, 10).metrics.skipped_second == 0


@pytest.mark.parametrize(
    ("row", "first", "second"),
    [
        ((1e4, -1e4, -1e4), 0, 1),
        ((-1e4, 1e4, 0.0), 1, 2),
        ((0.0, 0.0, 0.0), 0, 1),
        ((-1e4, 3e4, 3e4), 1, 2),
    ],
)
def test_saturated_and_tied_gates(row, first, second):
    logits = jnp.asarray([[row]], jnp.float32)
    got = routed(logits, 2)
    np.testing.assert_array_equal(
        np.asarray(got.dispatch).sum(-1)[0, 0].nonzero()[0], sorted((first, second))
    )
    assert np.isfinite(got.combine).all()
    # The slot of the second choice is taken even where its weight is zero: dispatch is not derived
    # from combine.
    assert np.asarray(got.dispatch).sum() == 2
    grads = jax.grad(lambda x: routed(x, 2).combine.sum())(logits)
    assert np.isfinite(grads).all()


def test_padding_changes_nothing_for_real_tokens():
    logits, rnd, _ = random_case(5, size=16)
    pad = np.random.default_rng(0).standard_normal((3, 8, 5)).astype(np.float32)
    mask = np.concatenate([np.ones((3, 16), bool), np.zeros((3, 8), bool)], axis=1)
    plain = routed(jnp.asarray(logits), 4, rnd=jnp.asarray(rnd))
    padded = routed(
        jnp.asarray(np.concatenate([logits, pad], 1)),
        4,
        mask=jnp.asarray(mask),
        rnd=jnp.asarray(np.concatenate([rnd, np.zeros((3, 8), np.float32)], 1)),
    )
    np.testing.assert_array_equal(plain.combine, padded.combine[:, :16])
    assert (np.asarray(padded.combine[:, 16:]) == 0).all()
    np.testing.assert_allclose(plain.aux, padded.aux, rtol=1e-6)
    jax.tree.map(np.testing.assert_array_equal, plain.metrics, padded.metrics)


def test_a_group_of_padding_alone_is_finite():
    got = routed(jnp.zeros((1, 4, 3)), 2, mask=jnp.zeros((1, 4), bool))
    assert float(got.aux) == 0 and (np.asarray(got.combine) == 0).all()


@pytest.mark.parametrize(
    ("size", "experts", "factor", "slots"),
    [(100, 16, 1.0, 12), (96, 64, 1.0, 3), (1024, 2048, 1.0, 1), (8, 2, 4.0, 8)],
)
def test_capacity(size, experts, factor, slots):
    assert expert_capacity(size, experts, factor) == slots


def test_capacity_of_nothing_is_refused():
    with pytest.raises(SbpError, match="no slot"):
        expert_capacity(512, 2048)
    with pytest.raises(SbpError, match="at least one slot"):
        routed(jnp.zeros((1, 4, 2)), 0)
