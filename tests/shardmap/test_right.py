"""Right programs get no error, and a note where they say so; what may be meant is said. Running
them shows that they are right."""

import jax
import numpy as np
import pytest

import sbp
from sbp.handwritten.check import DIFFERS
from tests.shardmap.programs.collection import EVERYDAY, PLACED_RIGHT, RIGHT, programs
from tests.shardmap.programs.kinds import is_right, mapped, mesh
from tests.shardmap.programs.wrong.counts import NOTED
from tests.shardmap.test_wrong import shapes

PROGRAMS = programs((*RIGHT, *EVERYDAY, *PLACED_RIGHT))
CASES = [(name, vma) for name, program in PROGRAMS.items() for vma in program.vma]


@pytest.mark.parametrize(("name", "vma"), CASES)
def test_it_is_accepted(name, vma):
    program = PROGRAMS[name]
    report = sbp.check_shard_map(program.make(vma), *shapes(program), mesh=mesh())
    assert [d.code for d in report.diagnostics] == list(program.notes), report.text()
    assert report.ok


@pytest.mark.parametrize(("name", "vma"), CASES)
def test_it_is_right(name, vma):
    program = PROGRAMS[name]
    want = jax.jit(program.reference)(*program.args)
    assert is_right(program.make(vma), program.args, want, 1e-3, 1e-4)


@pytest.mark.parametrize("name", list(NOTED))
def test_what_may_be_meant_is_said(name):
    body, reference, ins, outs, args = NOTED[name]
    region = mapped(body, ins, outs)(False)
    report = sbp.check_shard_map(region, *args, mesh=mesh())
    codes = {"divided_again": "wrong-reduction", "capacity_of_parts": "misplaced-reduction"}
    assert {d.code for d in report.diagnostics} == {codes.get(name, DIFFERS)}, report.text()
    got, want = np.asarray(jax.jit(region)(*args)), np.asarray(jax.jit(reference)(*args))
    assert got.shape != want.shape or not np.allclose(got, want, rtol=1e-3, atol=1e-3)
