"""Decoding with a cache, against searches in NumPy that compute the whole prefix again;
decoder-only models, rotary positions and grouped heads, against loops in NumPy."""

import dataclasses
import itertools
from functools import cache

import jax
import numpy as np
import pytest

import sbp
from sbp.moe.config import BOS, EOS, PAD
from sbp.moe.decode import BeamSearch
from sbp.moe.model import Batch, Memory, continue_prefix, decode, encode, init_params
from sbp.moe.sharding import leaf_types, sharding_of
from tests.moe.loops import ordered, softmax
from tests.moe.test_model import CFG, QUICK, random_batch
from tests.moe.test_packing import assert_packing_changes_nothing
from tests.slices import sliced

# A capacity that would drop most tokens: decoding must not have it.
MODEL = dataclasses.replace(CFG, dtype="float64", eval_capacity_factor_per_choice=0.25)


def sources(cfg):
    """A batch with a place that no sentence fills, and sentences of different lengths."""
    source = random_batch(cfg).source.copy()
    source[1, 1] = PAD
    return source


def weights(cfg, seed=0):
    """Parameters of a model that says EOS now and then."""
    params = init_params(jax.random.key(seed), cfg)
    return {**params, "logits": (2 * params["logits"]).at[:, EOS].multiply(3.0)}


def scorer(cfg, params):
    """A function from (source ids, prefix) to log-probabilities of what follows: the whole decoder,
    on this sentence by itself, with a slot for each token."""
    alone = dataclasses.replace(
        cfg, groups=1, sequences_per_group=1, eval_capacity_factor_per_choice=float(cfg.experts)
    )

    def everything(source, prefix):
        memory, _, _ = encode(params, source, alone)
        return decode(params, Memory(memory, source), prefix, alone)[0][0]

    return log_scorer(jax.jit(everything, compiler_options=QUICK), cfg.target_length)


def log_scorer(logits, length):
    """A function from (source ids, prefix) to log-probabilities of what follows, from logits of the
    targets of one row; it knows its answers."""

    @cache
    def logs(source, prefix):
        ids = np.zeros((1, 1, length), np.int32)
        ids[0, 0, : len(prefix) + 1] = [BOS, *prefix]
        row = np.array(logits(np.asarray(source)[None, None], ids)[len(prefix)])
        row[[PAD, BOS]] = -np.inf
        return row - row.max() - np.log(np.exp(row - row.max()).sum())

    return lambda source, prefix: logs(tuple(source), tuple(prefix))


norm = lambda length, alpha: ((5.0 + length) ** alpha) / ((5.0 + 1.0) ** alpha)


def numpy_beam(logs, source, length, beam, alpha):
    """The search as its docstring says it, with lists."""
    running, closed = [(tuple[int, ...](), 0.0)], []
    for _ in range(length):
        longer = [
            ((*said, token), total + p)
            for said, total in running
            for token, p in enumerate(logs(source, said))
            if p > -np.inf
        ]
        best = sorted(longer, key=lambda h: -h[1])[:beam]
        running = [h for h in best if h[0][-1] != EOS and len(h[0]) < length]
        ended = [h for h in best if h not in running]
        closed += [(ids, total / norm(len(ids), alpha)) for ids, total in ended]
    return sorted(closed, key=lambda h: -h[1])[:beam]


on_one_device = lambda search: jax.jit(search, compiler_options=QUICK)


def assert_same_hypotheses(found, want):
    """One sentence has the same texts in the same order, with the same scores."""
    tokens, scores = (np.asarray(x) for x in found)
    assert [said(row) for row in tokens[: len(want)]] == [ids for ids, _ in want]
    np.testing.assert_allclose(scores[: len(want)], [score for _, score in want], rtol=1e-9)
    assert (scores[len(want) :] == -np.inf).all() and (tokens[len(want) :] == PAD).all()


def said(row):
    """A row of ids without what follows EOS, which must be PAD."""
    ids = tuple(int(i) for i in row)
    end = ids.index(EOS) + 1 if EOS in ids else len(ids)
    assert set(ids[end:]) <= {PAD}
    return ids[:end]


@pytest.fixture(scope="module", autouse=True)
def x64():
    with jax.enable_x64(True):
        yield


@cache
def prepared(**variant):
    """A model with other options, its parameters, sources, and what scores them."""
    cfg = dataclasses.replace(MODEL, **variant)
    params = weights(cfg)
    return cfg, params, sources(cfg), scorer(cfg, params)


def numpy_lists(logs, source, beam, alpha):
    """For each sentence of a batch; none for a place that is not filled."""
    length = MODEL.target_length
    return {
        place: numpy_beam(logs, source[place], length, beam, alpha) if source[place].any() else []
        for place in np.ndindex(*source.shape[:2])
    }


def assert_same_lists(found, want):
    for place, best in want.items():
        assert_same_hypotheses((found.tokens[place], found.scores[place]), best)


@pytest.mark.parametrize(("beam", "reorder"), [(1, False), (4, False), (4, True)])
def test_beams_equal_a_search_without_a_cache(beam, reorder):
    """Both caches; n-best lists and scores in float64, for each sentence by itself. A beam of one
    is greedy."""
    _, params, source, logs = prepared()
    search = BeamSearch(cfg=MODEL, beam=beam, alpha=1.5, reorder=reorder)
    want, plain = (numpy_lists(logs, source, beam, alpha) for alpha in (1.5, 0.0))
    assert_same_lists(on_one_device(search)(params, source), want)
    others = any([h[0] for h in want[place]] != [h[0] for h in plain[place]] for place in want)
    if beam > 1:
        assert others, "the norm decides: without it, others are best"
    else:  # none is as long as the model's targets
        assert {len(lists[0][0]) if lists else 0 for lists in want.values()} == {0, 2, 4}


MESHES = [
    (("data", 2), ("expert", 2)),
    (("data", 4), ("model", 2)),
    (("pod", 2), ("expert", 4)),
    (("expert", 2), ("model", 2)),
]


VARIANTS = [
    {"experts": 0},
    {"dispatch": "gather"},
    {"dispatch": "sort"},
    {"router": "switch"},
    {"router": "noisy_top_k"},
    {"router": "sigmoid", "experts_per_token": 3, "expert_activation": "swiglu"},
    {"router": "top_k", "experts_per_token": 1, "shared_experts": 1},
]


@pytest.mark.laws
@pytest.mark.parametrize(
    ("mesh", "reorder", "variant"),
    [
        *itertools.product(sliced(MESHES, 0.25, laws=0.5), (False, True), [{}]),
        *(((("expert", 2),), False, variant) for variant in sliced(VARIANTS, 0.3, laws=0.5)),
    ],
    ids=str,
)
def test_beams_on_a_mesh_equal_a_search_without_a_cache(mesh, reorder, variant):
    """`make laws` takes half of the meshes, and half of the variants."""
    cfg, params, source, logs = prepared(**variant)
    search = BeamSearch(cfg=cfg, sharding=sharding_of(mesh), beam=3, reorder=reorder)
    names, sizes = zip(*mesh, strict=True)
    plan = sbp.jit(search, sbp.make_mesh(sizes, names), in_types=(leaf_types(mesh), None))
    assert_same_lists(plan(params, source), numpy_lists(logs, source, 3, search.alpha))


def test_a_beam_that_keeps_all_finds_the_best_of_all_texts():
    """Exhaustive search over a vocabulary of three words and EOS."""
    cfg = dataclasses.replace(MODEL, groups=1, target_vocab=6, target_length=3)
    params, source = weights(cfg, seed=1), random_batch(cfg).source
    logs = scorer(cfg, params)
    words = [t for t in range(6) if t not in (PAD, BOS)]
    total = lambda ids: sum(logs(source[0, 0], ids[:i])[ids[i]] for i in range(len(ids)))
    every = [
        (ids, total(ids) / norm(length, 0.8))
        for length in (1, 2, 3)
        for ids in itertools.product(words, repeat=length)
        if EOS not in ids[:-1] and (length == 3 or ids[-1] == EOS)  # it ends with EOS, or is full
    ]
    assert len(every) == 1 + 3 + 9 * 4
    every.sort(key=lambda h: -h[1])
    found = on_one_device(BeamSearch(cfg=cfg, beam=36))(params, source)
    assert_same_hypotheses((found.tokens[0, 0], found.scores[0, 0]), every[:36])


def test_only_the_reordering_beam_moves_keys_and_values():
    """Appendix A.1: the flattened beam permutes masks; its program has no gather on a cache, whose
    last dim is the width of a head."""
    _, params, source, _ = prepared()

    def gathers(reorder):
        search = BeamSearch(cfg=MODEL, beam=3, reorder=reorder)
        lines = jax.jit(search).lower(params, source).as_text().splitlines()
        return [line for line in lines if "gather" in line and f"x{MODEL.head_dim}xf64" in line]

    assert not gathers(reorder=False) and gathers(reorder=True)


# Mixtral's kind of layer: a router's two experts with SwiGLU in each, rotary, two pairs
# of heads that share keys and values.
DECODER = dataclasses.replace(
    CFG,
    dtype="float64",
    encoder_layers=0,
    decoder_layers=2,
    moe_every=1,
    heads=4,
    kv_heads=2,
    position="rotary",
    router="mixtral",
    dispatch="sort",
    expert_activation="swiglu",
    label_smoothing=0.0,
    aux_coefficient=0.0,
)


def turned(head, place, base=10_000.0):
    """A head's numbers as complex ones, i and i + D / 2 together, times exp(i * angle)."""
    real, imaginary = np.split(head, 2)
    angles = place * base ** (-2 * np.arange(len(real)) / len(head))
    z = (real + 1j * imaginary) * np.exp(1j * angles)
    return np.concatenate([z.real, z.imag])


def attended(p, rows):
    """Attention of one sequence [T, M], with loops over tokens and heads."""
    size, heads, kv = len(rows), p["query"].shape[1], p["key"].shape[1]
    out = np.zeros_like(rows)
    for t, h in itertools.product(range(size), range(heads)):
        shared = h * kv // heads
        q = turned(rows[t] @ p["query"][:, h], t)
        scores = [q @ turned(rows[u] @ p["key"][:, shared], u) for u in range(t + 1)]
        for u, weight in enumerate(softmax(np.array(scores))):
            out[t] += weight * (rows[u] @ p["value"][:, shared] @ p["output"][h])
    return out


normed = lambda rows, scale: rows / np.sqrt((rows**2).mean(-1, keepdims=True) + 1e-6) * scale


def written_out(params, ids):
    """Logits [T, V] of a row without padding, by Mixtral's text."""
    x = params["target_embedding"][ids].copy()
    stack = params["decoder"]
    for layer in range(DECODER.decoder_layers):
        p, moe = ({k: w[layer] for k, w in stack[n].items()} for n in ("attention2", "moe"))
        x += attended(p, normed(x, p["norm"]))
        rows = normed(x, moe["norm"])
        for t, row in enumerate(rows):
            logits = row @ moe["gate"]
            best = ordered(logits)[:2]
            for e, weight in zip(best, softmax(logits[best]), strict=True):
                into = row @ moe["expert_in"][e]
                hidden = into / (1 + np.exp(-into)) * (row @ moe["expert_linear"][e])
                x[t] += weight * (hidden @ moe["expert_out"][e])
    return normed(x, params["decoder_norm"]) @ params["logits"] * DECODER.model_dim**-0.5


@pytest.fixture(scope="module")
def params():
    return weights(DECODER)


@pytest.fixture(scope="module")
def logits_of_row(params):
    """Logits of the targets of one row, compiled once."""
    alone = dataclasses.replace(DECODER, groups=1, sequences_per_group=1)
    run = lambda source, target: continue_prefix(params, Batch(source, target, target), alone)[0][0]
    return jax.jit(run, compiler_options=QUICK)


def test_the_whole_model_equals_loops(params, logits_of_row):
    """Source and target in one row; padding between them has no place."""
    source = np.array([5, 7, EOS, PAD, PAD, PAD], np.int32)
    target = np.array([BOS, 9, 4, 11, 6], np.int32)
    found = logits_of_row(source[None, None], target[None, None])
    want = written_out(jax.tree.map(np.asarray, params), np.concatenate([source[:3], target]))
    np.testing.assert_allclose(found, want[3:], rtol=1e-9, atol=1e-10)


@pytest.mark.parametrize("reorder", [False, True])
def test_decoding_with_a_cache_equals_decoding_without(params, logits_of_row, reorder):
    source = random_batch(DECODER).source
    search = BeamSearch(cfg=DECODER, beam=3, alpha=1.5, reorder=reorder)
    want = numpy_lists(log_scorer(logits_of_row, DECODER.target_length), source, 3, 1.5)
    assert_same_lists(on_one_device(search)(params, source), want)


DENSE_SLOTS = {"dispatch": "einsum", "eval_capacity_factor_per_choice": 4.0}  # none is dropped


@pytest.mark.laws
@pytest.mark.parametrize(
    ("axes", "options"),
    sliced(
        [
            ((("data", 2), ("expert", 2)), {}),
            ((("expert", 4),), {"moe_every": 2}),
            ((("model", 2),), DENSE_SLOTS),
            ((("data", 2), ("model", 2)), {"kv_heads": 1, "position": "sinusoidal", "experts": 0}),
        ],
        0.25,
        seed=4,
    ),
    ids=str,
)
def test_packed_rows_on_a_mesh_equal_a_row_for_each_pair(params, axes, options):
    apart = random_batch(dataclasses.replace(DECODER, source_length=4, target_length=4))
    source, target = (
        np.pad(ids.reshape(-1, 4), ((0, 0), (0, 4))) for ids in (apart.source, apart.target_out)
    )
    cfg = dataclasses.replace(DECODER, source_length=8, target_length=8, **options)
    params = init_params(jax.random.key(0), cfg) if options else params
    assert_packing_changes_nothing(cfg, params, axes, source, target)
