"""Everyday right programs get no error, and faults of a count get one, or a note; what is right and
what is wrong is shown by running."""

import linecache

import jax
import numpy as np
import pytest

import sbp
from sbp.shardmap.words import DIFFERS
from tests.shardmap.programs.collection import EVERYDAY, programs
from tests.shardmap.programs.kinds import mesh
from tests.shardmap.programs.wrong.counts import NOTED, PAIRS
from tests.shardmap.test_wrong import check, flavours, jax_accepts, outcome

PROGRAMS = programs(EVERYDAY)
CASES = [(name, vma) for name, program in PROGRAMS.items() for vma in program.vma]


@pytest.mark.parametrize(("name", "vma"), CASES)
def test_it_is_accepted(name, vma):
    program = PROGRAMS[name]
    args = jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype), program.args)
    report = sbp.check_shard_map(program.make(vma), *args, mesh=mesh())
    assert report.ok, report.text()
    assert {d.code for d in report.diagnostics} == set(program.notes), report.text()


@pytest.mark.parametrize(("name", "vma"), CASES)
def test_it_is_right(name, vma):
    program = PROGRAMS[name]
    got = jax.tree.leaves(jax.jit(program.make(vma))(*program.args))
    want = jax.tree.leaves(jax.jit(program.reference)(*program.args))
    assert len(got) == len(want)
    for g, w in zip(got, want, strict=True):
        for shard in g.addressable_shards:
            np.testing.assert_allclose(shard.data, np.asarray(w)[shard.index], rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("name", list(PAIRS))
def test_the_wrong_program_is_rejected_and_its_twin_is_not(name):
    pair = PAIRS[name]
    told = 0
    for vma in flavours(pair):
        if vma and not jax_accepts(pair, "wrong"):
            continue
        report = check(pair, "wrong", vma)
        told += 1
        errors = [d for d in report.diagnostics if d.severity == pair.severity]
        assert report.ok == (pair.severity == "warning")
        assert [d.code for d in errors] == [pair.code], report.text()
        (error,) = errors
        assert all(
            (f"`{axis}`" in error.title) == (axis in pair.axes) for axis in ("data", "model")
        ), error.title
        assert error.primary is not None
        line = linecache.getline(error.primary.span.file, error.primary.span.line)
        assert pair.at in line, line
        assert not check(pair, "right", vma).diagnostics
    assert told


@pytest.mark.parametrize("name", list(PAIRS))
def test_it_is_wrong_and_the_twin_is_right(name):
    pair = PAIRS[name]
    want = np.asarray(jax.jit(pair.reference)(*pair.args), np.float32)
    right, agree = outcome(pair, "right", bool(pair.vma))
    assert agree
    np.testing.assert_allclose(np.float32(right), want, rtol=2e-4, atol=2e-4)
    wrong, agree = outcome(pair, "wrong", bool(pair.vma))
    assert (
        not agree
        or wrong.shape != want.shape
        or not np.allclose(np.float32(wrong), want, rtol=1e-3, atol=1e-3)
    )


@pytest.mark.parametrize("name", list(NOTED))
def test_what_may_be_meant_is_said(name):
    body, reference, ins, outs, args = NOTED[name]
    region = jax.shard_map(body, mesh=mesh(), in_specs=ins, out_specs=outs, check_vma=False)
    report = sbp.check_shard_map(region, *args, mesh=mesh())
    codes = {"divided_again": "wrong-reduction", "capacity_of_parts": "misplaced-reduction"}
    assert {d.code for d in report.diagnostics} == {codes.get(name, DIFFERS)}, report.text()
    got, want = np.asarray(jax.jit(region)(*args)), np.asarray(jax.jit(reference)(*args))
    assert got.shape != want.shape or not np.allclose(got, want, rtol=1e-3, atol=1e-3)
