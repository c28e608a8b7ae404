"""Decoding with a cache, against searches in NumPy that compute the whole prefix again."""

import dataclasses
import itertools

import jax
import numpy as np
import pytest

from sbp.moe.decode import BeamSearch
from sbp.moe.model import BOS, EOS, PAD, Memory, decode, encode, init_params
from tests.moe.test_model import CFG, random_batch

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

    @jax.jit
    def logits(source, prefix):
        memory, _, _ = encode(params, source, alone)
        return decode(params, Memory(memory, source), prefix, alone)[0][0]

    found = {}

    def logs(source, prefix):
        key = tuple(source), tuple(prefix)
        if key not in found:
            ids = np.zeros((1, 1, cfg.target_length), np.int32)
            ids[0, 0, : len(prefix) + 1] = [BOS, *prefix]
            row = np.array(logits(np.asarray(source)[None, None], ids)[len(prefix)])
            row[[PAD, BOS]] = -np.inf
            top = row.max()
            found[key] = row - top - np.log(np.exp(row - top).sum())
        return found[key]

    return logs


def norm(length, alpha):
    return ((5.0 + length) ** alpha) / ((5.0 + 1.0) ** alpha)


def numpy_beam(logs, source, length, beam, alpha):
    """The search as its docstring says it, with lists."""
    running, closed = [((), 0.0)], []
    for _ in range(length):
        longer = [
            ((*said, token), total + p)
            for said, total in running
            for token, p in enumerate(logs(source, said))
            if p > -np.inf
        ]
        best = sorted(longer, key=lambda h: -h[1])[:beam]
        running = []
        for said, total in best:
            if said[-1] == EOS or len(said) == length:
                closed.append((said, total / norm(len(said), alpha)))
            else:
                running.append((said, total))
    return sorted(closed, key=lambda h: -h[1])[:beam]


def said(row):
    """A row of ids without what follows EOS, which must be PAD."""
    ids = tuple(int(i) for i in row)
    end = ids.index(EOS) + 1 if EOS in ids else len(ids)
    assert set(ids[end:]) <= {PAD}
    return ids[:end]


@pytest.fixture(scope="module")
def model():
    with jax.enable_x64(True):
        params = weights(MODEL)
        yield params, sources(MODEL), scorer(MODEL, params)


def test_a_beam_of_one_is_greedy(model):
    params, source, logs = model
    found = jax.jit(BeamSearch(cfg=MODEL))(params, source)
    lengths = set()
    for g, n in itertools.product(range(MODEL.groups), range(MODEL.sequences_per_group)):
        want = []
        while source[g, n].any() and len(want) < MODEL.target_length and EOS not in want:
            want.append(int(np.argmax(logs(source[g, n], want))))
        assert [i for i in said(found.tokens[g, n, 0]) if i] == want
        lengths.add(len(want))
    assert lengths == {0, 2, 4}  # none is as long as the model's targets
