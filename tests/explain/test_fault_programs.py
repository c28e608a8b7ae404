"""Every fifth of the faulty programs is explained; `python -m benchmarks.fault_suite` scores all of
them."""

import pytest

from tests.explain.fault_programs import faulty_programs, scored

NOT_RESTORED = {"take_along", "while_power"}
"""Programs whose first help gives another typing than the one that was meant."""


@pytest.mark.parametrize("program", faulty_programs()[::5], ids=lambda p: p.name)
def test_a_fault_is_explained(program):
    score = scored(program)
    assert score.flagged and score.core and score.works, score
    assert score.restores == (program.name not in NOT_RESTORED), score
