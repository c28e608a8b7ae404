"""A loop over layers whose weights are on every device takes less time and memory than that of
`jax.jit`."""

import re

import pytest

from benchmarks.gshard_bytes import held_bytes
from benchmarks.hlo.schedule import step_time
from benchmarks.scan_loops import layers

pytestmark = pytest.mark.tpu


def whole_casts(text):
    """The casts of the two stacks of weights in a compiled program."""
    return re.findall(r"= bf16\[6,(?:1024,4096|4096,1024)\]\S* convert\(.*", text)


def test_stacks_start_unwritten_and_casts_stay_in_the_loop():
    step = layers()
    mesh = step.devices()
    theirs, ours = step.expert(mesh), step.planned(mesh).lower().compile()
    assert len(whole_casts(theirs.as_text())) == 2
    assert not whole_casts(ours.as_text())
    before, after = (step_time(c.as_text(), mesh.size, step.chip) for c in (theirs, ours))
    assert before.unknown == after.unknown == ()
    # 0.66 if stacks start unwritten, 0.84 with casts in the loop alone.
    assert after.compute < 0.7 * before.compute
    assert held_bytes(ours) < held_bytes(theirs)
