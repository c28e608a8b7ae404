"""Some of the faulty programs are explained; `python -m benchmarks.fault_suite` scores all of
them."""

import pytest

from benchmarks.fault_suite import faulty_programs, scored

SAMPLE = (
    *("accumulate_budget", "clip_contrast", "custom_vjp_backward", "gpt_mlp", "llama_patterns"),
    *("pattern_key", "scan_stacked", "ssm_cumulative", "take_along", "while_power"),
    *("fsdp_master", "grouped_decode", "manual_gate", "manual_in_types", "residual_layers"),
    *("stage_buffer", "symbolic_heads", "symbolic_names"),
)
EXPECTED = {
    # The help makes the two sizes equal; which input has the wrong one is not known.
    "symbolic_names": (True, False, True, True),
    # Another pin is dearer, and is judged first.
    "stage_buffer": (True, False, True, False),
    # The first help gives another typing than the one that was meant.
    "take_along": (True, True, True, False),
    # The annotation costs 9 us, below the 10 us from which one is named.
    "while_power": (False, False, False, False),
}
"""Whether a fault is flagged, with the right core, with a first help that works, that restores what
was meant, for programs of which not all is so."""


@pytest.mark.parametrize("name", SAMPLE)
def test_a_fault_is_explained(name):
    (program,) = (p for p in faulty_programs() if p.name == name)
    score = scored(program)
    expected = EXPECTED.get(name, (True, True, True, True))
    assert (score.flagged, score.core, score.works, score.restores) == expected, score
