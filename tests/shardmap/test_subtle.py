"""The programs of `subtle` are rejected and their twins accepted; running both shows that this is
right."""

import jax
import numpy as np
import pytest

from tests.shardmap.programs.wrong.subtle import PAIRS
from tests.shardmap.test_wrong import check, outcome


@pytest.mark.parametrize("name", list(PAIRS))
def test_a_wrong_program_is_rejected_and_its_twin_is_not(name):
    pair = PAIRS[name]
    for vma in (True, False) if pair.vma is None else (pair.vma,):
        report = check(pair, "wrong", vma)
        errors = [d for d in report.diagnostics if d.severity == pair.severity]
        assert report.ok == (pair.severity == "warning")
        assert [d.code for d in errors] == [pair.code], report.text()
        (error,) = errors
        assert all(
            (f"`{axis}`" in error.title) == (axis in pair.axes) for axis in ("data", "model")
        ), error.title
        assert pair.at in report.text()
        assert not check(pair, "right", vma).diagnostics


@pytest.mark.parametrize("name", list(PAIRS))
def test_it_is_wrong_and_the_twin_is_right(name):
    pair = PAIRS[name]
    want = np.asarray(jax.jit(pair.reference)(*pair.args))
    right, agree = outcome(pair, "right", bool(pair.vma))
    assert agree
    np.testing.assert_allclose(right, want, rtol=2e-4, atol=2e-4)
    wrong, agree = outcome(pair, "wrong", bool(pair.vma))
    assert (
        not agree or wrong.shape != want.shape or not np.allclose(wrong, want, rtol=1e-3, atol=1e-3)
    )
