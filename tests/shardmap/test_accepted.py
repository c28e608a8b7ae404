"""Right programs are accepted without a finding; that they are right is shown by running them."""

import jax
import numpy as np
import pytest

import sbp
from tests.shardmap.programs.collection import RIGHT, programs
from tests.shardmap.programs.kinds import mesh

PROGRAMS = programs(RIGHT)
CASES = [(name, vma) for name, program in PROGRAMS.items() for vma in program.vma]


@pytest.mark.parametrize(("name", "vma"), CASES)
def test_it_is_accepted(name, vma):
    program = PROGRAMS[name]
    shapes = [jax.ShapeDtypeStruct(a.shape, a.dtype) for a in program.args]
    report = sbp.check_shard_map(program.make(vma), *shapes, mesh=mesh())
    assert [d.code for d in report.diagnostics] == list(program.notes), report.text()
    assert report.ok


@pytest.mark.parametrize(("name", "vma"), CASES)
def test_it_is_right(name, vma):
    program = PROGRAMS[name]
    got = jax.tree.leaves(jax.jit(program.make(vma))(*program.args))
    want = jax.tree.leaves(jax.jit(program.reference)(*program.args))
    assert len(got) == len(want)
    for g, w in zip(got, want, strict=True):
        for shard in g.addressable_shards:
            np.testing.assert_allclose(shard.data, np.asarray(w)[shard.index], rtol=1e-3, atol=1e-4)
