"""Programs as they are written in practice: the right ones get no finding, the wrong ones an error
or a warning."""

import os
from typing import Any

import jax
import numpy as np
import pytest

import sbp
from tests.shardmap.practice.case import CASES, Case, devices, mapped

WARNED = {
    ("causal_ring_attention", "key offset of the wrong device"),
    ("causal_ring_attention", "mask by local position"),
    ("collective_matmul", "columns of the wrong owner"),
    ("collective_matmul", "one step short"),
    ("expert_parallel", "not sent at all"),
    ("expert_parallel", "not sent back"),
    ("expert_parallel", "sent back along the wrong dims"),
    ("halo_convolution", "neighbours swapped"),
    ("linear_recurrence", "own shard in the prefix"),
    ("lse_combine", "weights not divided"),
    ("matmul_scattered_in_a_ring", "own block left out"),
    ("pipeline", "one tick short"),
    ("pipeline", "result of the first stage"),
    ("pipeline", "sent backwards"),
    ("pipeline_of_layers", "stages of one layer"),
    ("prefix_sum", "own total in the prefix"),
    ("recurrence_by_doubling", "last doubling left out"),
    ("ring_all_reduce", "chunk of the wrong device gathered"),
    ("ring_all_reduce", "one hop short in the gathering"),
    ("ring_attention", "one step short"),
    ("ring_attention", "only keys go round"),
    ("ring_attention", "sum not rescaled"),
    ("sequence_parallel", "psum in place of psum_scatter"),
    ("ulysses", "values not exchanged"),
    ("vocab_parallel_cross_entropy", "labels not moved"),
    ("vocab_parallel_embedding", "local offset forgotten"),
    ("vocab_parallel_embedding", "mask forgotten"),
    ("zero_3", "psum and sliced from zero"),
    ("zero_3", "scattered along columns"),
}
"""Mistakes that get a warning: the program computes another result on one device, but the types do
not show why."""

UNSEEN = {
    ("dropout_keys", "same key everywhere"),
    ("halo_convolution", "wraps around"),
    ("pipeline_of_layers", "collected one tick early"),
}
"""Mistakes that a run on one device does not show. The run draws other numbers, has a result of
another shape, or makes the same mistake."""

BY_NUMBERS = {"low_rank_adapter"}
"""Right programs that write the number of devices as a number. A warning names the number."""

WRONG = [(name, mistake) for name, case in CASES.items() for mistake in case.mistakes]


def report(case: Case, mistake: str | None) -> Any:
    mesh = devices(case.mesh)
    return sbp.check_shard_map(mapped(case, mistake, mesh), *case.args(), mesh=mesh)


def as_on_one_device(case: Case, mistake: str | None) -> bool:
    args = case.args()
    got = jax.jit(mapped(case, mistake, devices(case.mesh)))(*args)
    return all(
        np.allclose(np.asarray(a), np.asarray(b), rtol=2e-3, atol=1e-4, equal_nan=True)
        for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(case.oracle(*args)), strict=True)
    )


@pytest.mark.parametrize("name", list(CASES))
def test_a_right_program_has_no_finding(name):
    found = report(CASES[name], None)
    assert (found.ok, bool(found.diagnostics)) == (True, name in BY_NUMBERS), found.text()
    assert as_on_one_device(CASES[name], None)


@pytest.mark.parametrize(("name", "mistake"), WRONG)
def test_a_mistake_is_found(name, mistake):
    found = report(CASES[name], mistake)
    severities = {d.severity for d in found.diagnostics}
    if (name, mistake) in UNSEEN:
        assert found.ok
    elif (name, mistake) in WARNED or name in BY_NUMBERS:
        assert "warning" in severities
    else:
        assert "error" in severities


@pytest.mark.skipif(not os.environ.get("SBP_EXHAUSTIVE"), reason="compiles a hundred programs")
@pytest.mark.parametrize(("name", "mistake"), WRONG)
def test_a_mistake_changes_the_result(name, mistake):
    assert not as_on_one_device(CASES[name], mistake)


def test_what_is_not_found_is_still_so():
    assert set(WRONG) >= WARNED | UNSEEN
    assert len(WRONG) >= 89
