"""Decoder-only models, rotary positions and grouped heads, against loops in NumPy."""

import dataclasses
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from sbp.moe.attention import Rotary, attention, keys_values
from sbp.moe.config import BOS, EOS, PAD
from sbp.moe.decode import BeamSearch
from sbp.moe.model import Batch, continue_prefix, init_params
from tests.moe.loops import ordered, softmax
from tests.moe.test_decode import assert_same_lists, log_scorer, numpy_lists, on_one_device
from tests.moe.test_model import CFG, QUICK, random_batch
from tests.moe.test_packing import assert_packing_changes_nothing
from tests.slices import sliced

# Mixtral's kind of layer: a router's two experts with SwiGLU in each, rotary, two heads that share
# keys and values.
MODEL = dataclasses.replace(
    CFG,
    dtype="float64",
    encoder_layers=0,
    decoder_layers=2,
    moe_every=1,
    kv_heads=1,
    position="rotary",
    router="mixtral",
    dispatch="sort",
    expert_activation="swiglu",
    label_smoothing=0.0,
    aux_coefficient=0.0,
)


def turned(head, place, base=10_000.0):
    """A head's numbers as complex ones, i and i + D / 2 together, times exp(i * angle)."""
    half = len(head) // 2
    out = np.zeros(len(head))
    for i in range(half):
        z = complex(head[i], head[half + i]) * np.exp(1j * place * base ** (-2 * i / len(head)))
        out[i], out[half + i] = z.real, z.imag
    return out


def attended(p, rows, places, sees):
    """Attention of one sequence [T, M], with loops over tokens and heads."""
    size, heads, kv = len(rows), p["query"].shape[1], p["key"].shape[1]
    out = np.zeros_like(rows)
    for t, h in itertools.product(range(size), range(heads)):
        shared = h * kv // heads
        q = turned(rows[t] @ p["query"][:, h], places[t])
        seen = [u for u in range(size) if sees(t, u)]
        if not seen:
            continue
        scores = [q @ turned(rows[u] @ p["key"][:, shared], places[u]) for u in seen]
        for u, weight in zip(seen, softmax(np.array(scores)), strict=True):
            out[t] += weight * (rows[u] @ p["value"][:, shared] @ p["output"][h])
    return out


def normed(rows, scale):
    return rows / np.sqrt((rows**2).mean(-1, keepdims=True) + 1e-6) * scale


def written_out(params, ids):
    """Logits [T, V] of a row without padding, by Mixtral's text."""
    x = params["target_embedding"][ids].copy()
    stack = params["decoder"]
    for layer in range(MODEL.decoder_layers):
        p, moe = ({k: w[layer] for k, w in stack[n].items()} for n in ("attention2", "moe"))
        x += attended(p, normed(x, p["norm"]), range(len(ids)), lambda t, u: u <= t)
        rows = normed(x, moe["norm"])
        for t, row in enumerate(rows):
            logits = row @ moe["gate"]
            best = ordered(logits)[:2]
            for e, weight in zip(best, softmax(logits[best]), strict=True):
                into = row @ moe["expert_in"][e]
                hidden = into / (1 + np.exp(-into)) * (row @ moe["expert_linear"][e])
                x[t] += weight * (hidden @ moe["expert_out"][e])
    return normed(x, params["decoder_norm"]) @ params["logits"] * MODEL.model_dim**-0.5


@pytest.fixture(scope="module")
def params():
    with jax.enable_x64(True):
        drawn = init_params(jax.random.key(0), MODEL)
        yield {**drawn, "logits": (2 * drawn["logits"]).at[:, EOS].multiply(3.0)}


@pytest.fixture(scope="module")
def logits_of_row(params):
    """Logits of the targets of one row, compiled once."""
    alone = dataclasses.replace(MODEL, groups=1, sequences_per_group=1)

    def run(source, target):
        return continue_prefix(params, Batch(source, target, target), alone)[0][0]

    return jax.jit(run, compiler_options=QUICK)


def test_grouped_heads_turned_by_their_places_equal_loops():
    rng = np.random.default_rng(0)
    m, heads, kv, d, n, size = 6, 4, 2, 8, 2, 5
    shapes = {"query": (m, heads, d), "key": (m, kv, d), "value": (m, kv, d)}
    p = {k: rng.standard_normal(s) for k, s in shapes.items()}
    p["output"] = rng.standard_normal((heads, d, m))
    x, allowed = rng.standard_normal((1, n * size, m)), rng.random((1, n, size, size)) < 0.7
    allowed |= np.eye(size, dtype=bool)
    places = rng.integers(0, 50, (1, n, size))
    with jax.enable_x64(True):
        rotary = Rotary(jnp.asarray(places), 10_000.0)
        weights = jax.tree.map(jnp.asarray, p)
        memory = keys_values(weights, jnp.asarray(x), n, rotary)
        assert memory.keys.shape == (1, n, kv, size, d)
        found = attention(weights, jnp.asarray(x), memory, jnp.asarray(allowed), rotary=rotary)
    for i, rows in enumerate(x.reshape(n, size, m)):
        want = attended(p, rows, places[0, i], lambda t, u, i=i: allowed[0, i, t, u])
        np.testing.assert_allclose(found.reshape(n, size, m)[i], want, atol=1e-11)


def test_the_whole_model_equals_loops(params, logits_of_row):
    """Source and target in one row; padding between them has no place."""
    source = np.array([5, 7, EOS, PAD, PAD, PAD], np.int32)
    target = np.array([BOS, 9, 4, 11, 6], np.int32)
    found = logits_of_row(source[None, None], target[None, None])
    want = written_out(jax.tree.map(np.asarray, params), np.concatenate([source[:3], target]))
    np.testing.assert_allclose(found, want[3:], rtol=1e-9, atol=1e-10)


def test_no_gradient_reaches_a_later_token(params):
    """Each token stands once, so the gradient of its embedding is that of its place."""
    cfg = dataclasses.replace(MODEL, groups=1, sequences_per_group=1)
    source, target = np.arange(4, 8)[None, None], np.array([BOS, 9, 10, 11, 12])[None, None]

    def said(table):
        own = {**params, "target_embedding": table}
        return continue_prefix(own, Batch(source, target, target), cfg)[0][0]

    def slope(table, t):
        return jax.grad(lambda table: said(table)[t].sum())(table)

    compiled = jax.jit(slope, compiler_options=QUICK)
    row = [*range(4, 8), BOS, 9, 10, 11, 12]
    for t in range(5):
        reached = np.any(np.asarray(compiled(params["target_embedding"], t)), axis=-1)[
            np.array(row)
        ].tolist()
        assert reached == [place <= 4 + t for place in range(9)]


@pytest.mark.parametrize("reorder", [False, True])
def test_decoding_with_a_cache_equals_decoding_without(params, logits_of_row, reorder):
    source = random_batch(MODEL).source
    search = BeamSearch(cfg=MODEL, beam=3, alpha=1.5, reorder=reorder)
    want = numpy_lists(log_scorer(logits_of_row, MODEL.target_length), source, 3, 1.5)
    assert_same_lists(on_one_device(search)(params, source), want)


DENSE_SLOTS = {"dispatch": "einsum", "eval_capacity_factor_per_choice": 4.0}  # none is dropped
MESHES = [
    ((("data", 2), ("expert", 2)), {}),
    ((("expert", 4),), {"moe_every": 2}),
    ((("model", 2),), {**DENSE_SLOTS, "heads": 4, "kv_heads": 2}),
    ((("data", 2), ("model", 2)), {"kv_heads": 1, "position": "sinusoidal", "experts": 0}),
]


@pytest.mark.laws
@pytest.mark.parametrize(("axes", "options"), sliced(MESHES, 0.25, seed=4), ids=str)
def test_packed_rows_on_a_mesh_equal_a_row_for_each_pair(params, axes, options):
    apart = random_batch(dataclasses.replace(MODEL, source_length=4, target_length=4))
    source, target = (
        np.pad(ids.reshape(-1, 4), ((0, 0), (0, 4))) for ids in (apart.source, apart.target_out)
    )
    cfg = dataclasses.replace(MODEL, source_length=8, target_length=8, **options)
    params = init_params(jax.random.key(0), cfg) if options else params
    assert_packing_changes_nothing(cfg, params, axes, source, target)
