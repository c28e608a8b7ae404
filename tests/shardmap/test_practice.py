"""Programs as they are written in practice: the right ones get no finding, the wrong ones an error,
a warning, or a report that says what it did not check."""

import os
from typing import Any

import jax
import numpy as np
import pytest

import sbp
from sbp.shardmap.words import DIFFERS
from tests.shardmap.practice import (
    data,
    dense,
    experts,
    fresh,
    losses,
    rings,
    sequence,
    training,
)
from tests.shardmap.practice.case import CASES, Case, devices, mapped

MODULES = (data, dense, experts, fresh, losses, rings, sequence, training)

WARNED = {
    ("contrastive", "labels not moved"),
    ("contrastive", "texts not gathered"),
    ("covariance", "divided by the local count"),
    ("data_parallel_step", "divided twice"),
    ("dense_mixture", "gates of the first experts"),
    ("expert_parallel", "not sent at all"),
    ("explicit_backward", "psum of means"),
    ("one_hot_cross_entropy", "one_hot of global labels"),
    ("sigmoid_pairs", "diagonal of the first block"),
    ("sequence_parallel", "missing all_gather"),
    ("sequence_parallel", "psum in place of psum_scatter"),
    ("split_cache_decode", "mask by local position"),
    ("zero_3", "psum and sliced from zero"),
    ("zero_3", "scattered along columns"),
}
"""Mistakes that may be meant: a warning says what is wrong otherwise."""

BY_VALUES = {
    ("attention_in_two_directions", "own keys twice"),
    ("attention_in_two_directions", "values of the other direction"),
    ("diffusion", "columns from the wrong side"),
    ("diffusion", "edges of the first step"),
    ("matmul_scattered_in_a_ring", "own block left out"),
    ("pipeline_of_layers", "stages of one layer"),
    ("recurrence_by_doubling", "last doubling left out"),
    ("ring_all_reduce", "chunk of the wrong device gathered"),
    ("ring_all_reduce", "one hop short in the gathering"),
    ("causal_ring_attention", "key offset of the wrong device"),
    ("causal_ring_attention", "mask by local position"),
    ("collective_matmul", "columns of the wrong owner"),
    ("collective_matmul", "one step short"),
    ("expert_parallel", "sent back along the wrong dims"),
    ("halo_convolution", "neighbours swapped"),
    ("halo_convolution", "no halo"),
    ("linear_recurrence", "own shard in the prefix"),
    ("linear_recurrence", "prefix not applied"),
    ("lse_combine", "weights not divided"),
    ("pipeline", "not selected before psum"),
    ("pipeline", "one tick short"),
    ("pipeline", "result of the first stage"),
    ("pipeline", "sent backwards"),
    ("prefix_sum", "own total in the prefix"),
    ("ring_attention", "one step short"),
    ("ring_attention", "only keys go round"),
    ("ring_attention", "sum not rescaled"),
    ("ulysses", "values not exchanged"),
}
"""Mistakes in what has no reading, such as blocks on their way round a ring: a warning, because the
program computes something else on one device."""

UNREAD = {
    ("pipeline_of_layers", "collected one tick early"),
    ("covariance", "columns not gathered"),
    ("dropout_keys", "same key everywhere"),
    ("halo_convolution", "wraps around"),
}
"""Mistakes in what has no reading, which one device does not show: it draws other numbers, has a
result of another shape, or makes the same mistake. No error, and the report names the values."""

SILENT = {("low_rank_adapter", "loss of a shard of the columns")}
"""Mistakes in a number that the program computes from its shapes: nothing tells them."""

WRONG = [(c.name, mistake) for c in CASES.values() for mistake in c.mistakes]


def report(case: Case, mistake: str | None) -> Any:
    mesh = devices(case.mesh)
    return sbp.check_shard_map(mapped(case.write(mistake), mesh), *case.args(), mesh=mesh)


def as_on_one_device(case: Case, mistake: str | None) -> bool:
    args = case.args()
    got = jax.jit(mapped(case.write(mistake), devices(case.mesh)))(*args)
    pairs = zip(jax.tree.leaves(got), jax.tree.leaves(case.oracle(*args)), strict=True)
    return all(
        np.allclose(np.asarray(a), np.asarray(b), rtol=2e-3, atol=1e-4, equal_nan=True)
        for a, b in pairs
    )


@pytest.mark.parametrize("name", list(CASES))
def test_a_right_program_has_no_finding(name):
    assert report(CASES[name], None).diagnostics == ()
    assert as_on_one_device(CASES[name], None)


@pytest.mark.parametrize(("name", "mistake"), WRONG)
def test_a_mistake_is_found_or_said_to_be_unchecked(name, mistake):
    found = report(CASES[name], mistake)
    severities = {d.severity for d in found.diagnostics}
    if (name, mistake) in UNREAD | SILENT:
        assert found.ok
        assert found.coverage.unread or (name, mistake) in SILENT
        return
    if (name, mistake) in BY_VALUES:
        assert [d.code for d in found.diagnostics if d.severity == "warning"] == [DIFFERS]
        return
    assert ("warning" if (name, mistake) in WARNED else "error") in severities


@pytest.mark.skipif(not os.environ.get("SBP_EXHAUSTIVE"), reason="compiles a hundred programs")
@pytest.mark.parametrize(("name", "mistake"), WRONG)
def test_a_mistake_changes_the_result(name, mistake):
    assert not as_on_one_device(CASES[name], mistake)


def test_what_is_not_found_is_still_so():
    assert set(WRONG) >= WARNED | BY_VALUES | UNREAD | SILENT
    assert len(WRONG) >= 119
