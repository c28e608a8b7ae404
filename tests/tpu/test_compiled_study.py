"""`sbp plan --compile`: the step as the TPU compiler has it, beside the plan."""

import pytest

from sbp.cli import main

pytestmark = pytest.mark.tpu

OPTIONS = ("--preset", "tiny-test", "--mesh", "data=2,expert=4")


SIZES = {"head_dim": 128, "model_dim": 256, "expert_dim": 512, "ffn_dim": 512} | dict.fromkeys(
    ("source_length", "target_length"), 128
)
"""They fill tiles of memory. Those of the preset do not, and the plan counts no such padding."""
FILLED = [word for name, size in SIZES.items() for word in ("--set", f"{name}={size}")]


def test_a_compiled_step_sends_and_holds_what_was_planned_or_nearly(capsys):
    assert main(["plan", *OPTIONS, *FILLED, "--topology", "v3:2x2", "--compile"]) == 0
    shown = capsys.readouterr().out
    lines = {line[:34].strip(): line[34:].split() for line in shown.splitlines()}
    assert "compiled by the TPU compiler, in" in shown
    # Of all that is sent, the kinds are the parts.
    kinds = [float(values[0]) for name, values in lines.items() if name.startswith("of it by")]
    assert kinds and sum(kinds) == pytest.approx(
        float(lines["MiB sent in a step, by a device"][1]), abs=0.01 * len(kinds)
    )
    for name in ("MiB sent in a step, by a device", "MiB held by a device"):
        planned, compiled, ratio = map(float, lines[name])
        assert min(planned, compiled) > 0 and 0.5 < ratio < 2


def test_a_slice_that_the_compiler_does_not_know_is_refused(capsys):
    assert (
        main(["plan", *OPTIONS, "--mesh", "data=9,expert=2", "--topology", "v3:3x3", "--compile"])
        == 2
    )
    assert "has no topology 'v3:3x3'" in capsys.readouterr().err
