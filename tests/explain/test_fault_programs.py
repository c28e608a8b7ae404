"""Every fifth of the faulty programs is explained; `python -m benchmarks.fault_suite` scores all of
them."""

import pytest

from tests.explain.fault_programs import faulty_programs, scored


@pytest.mark.parametrize("program", faulty_programs()[::5], ids=lambda p: p.name)
def test_a_fault_is_explained(program):
    score = scored(program)
    assert score.flagged and score.core and score.works, score
