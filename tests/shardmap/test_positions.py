"""Programs whose devices compute their place from their own index: wrong ones are rejected, their
twins and other right ones are not, which running all of them shows to be right."""

import linecache

import jax
import numpy as np
import pytest

import sbp
from tests.shardmap.programs.collection import PLACED, PLACED_RIGHT, pairs, programs
from tests.shardmap.programs.kinds import mesh
from tests.shardmap.test_wrong import check, flavours, jax_accepts, outcome

PAIRS, PROGRAMS = pairs(PLACED), programs(PLACED_RIGHT)
CASES = [(name, vma) for name, program in PROGRAMS.items() for vma in program.vma]


@pytest.mark.parametrize("name", list(PAIRS))
def test_a_wrong_program_is_rejected_and_its_twin_is_not(name):
    pair = PAIRS[name]
    told = 0
    for vma in flavours(pair):
        if vma and not jax_accepts(pair, "wrong"):
            continue
        report = check(pair, "wrong", vma)
        told += 1
        assert [d.code for d in report.diagnostics] == [pair.code], report.text()
        (error,) = report.diagnostics
        assert error.severity == pair.severity
        for axis in ("data", "model"):
            assert (f"`{axis}`" in error.title) == (axis in pair.axes), error.title
        if error.severity == "note":  # the devices rank their own tokens
            continue
        assert error.primary is not None
        line = linecache.getline(error.primary.span.file, error.primary.span.line)
        assert pair.at in line, line
        assert bool(error.helps) == pair.repaired, report.text()
    assert told
    for vma in flavours(pair):
        if not vma or jax_accepts(pair, "right"):
            assert all(d.severity == "note" for d in check(pair, "right", vma).diagnostics)


@pytest.mark.parametrize("name", list(PAIRS))
def test_it_is_wrong_and_the_twin_is_right(name):
    pair = PAIRS[name]
    want = np.asarray(jax.jit(pair.reference)(*pair.args))
    right, agree = outcome(pair, "right", False)
    assert agree
    np.testing.assert_allclose(right, want, rtol=2e-4, atol=2e-4)
    wrong, agree = outcome(pair, "wrong", False)
    assert (
        not agree or wrong.shape != want.shape or not np.allclose(wrong, want, rtol=1e-3, atol=1e-3)
    )


@pytest.mark.parametrize(("name", "vma"), CASES)
def test_a_right_program_is_accepted_and_right(name, vma):
    program = PROGRAMS[name]
    shapes = [jax.ShapeDtypeStruct(a.shape, a.dtype) for a in program.args]
    report = sbp.check_shard_map(program.make(vma), *shapes, mesh=mesh())
    assert all(d.severity == "note" for d in report.diagnostics), report.text()
    got = jax.tree.leaves(jax.jit(program.make(vma))(*program.args))
    want = jax.tree.leaves(jax.jit(program.reference)(*program.args))
    for g, w in zip(got, want, strict=True):
        for shard in g.addressable_shards:
            np.testing.assert_allclose(shard.data, np.asarray(w)[shard.index], rtol=1e-3, atol=1e-4)
