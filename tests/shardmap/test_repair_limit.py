"""A finding says where the search for its repairs stopped at a limit."""

import jax
import pytest

from sbp.machine.mesh import mesh_spec
from sbp.shardmap.check import Helper, analysed, traced
from sbp.shardmap.one_device import compared_runs
from sbp.shardmap.words import diagnostic
from tests.shardmap.programs.kinds import mesh
from tests.shardmap.programs.wrong.products import PAIRS


@pytest.mark.parametrize("name", ["bias_before", "tanh_before", "partial_as_split"])
def test_repairs_that_are_not_tried_are_said(name):
    pair, spec = PAIRS[name], mesh_spec(mesh())
    args = tuple(jax.ShapeDtypeStruct(a.shape, a.dtype) for a in pair.args)
    fn = pair.program("wrong", False)
    again = lambda f: traced(f, args, mesh())
    found = analysed(compared_runs(again(fn), fn, again, args, spec), spec)
    (finding,) = found.findings
    for tried, said in ((1, True), (24, False)):
        notes = diagnostic(finding, spec, Helper(spec, found, tried=tried).helps(finding)).notes
        assert ("other repairs were not tried" in notes) == said, (tried, notes)
