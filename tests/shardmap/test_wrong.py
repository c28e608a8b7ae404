"""Every wrong program is rejected, at its line and with its code; its twin is accepted, and
computes what the plain function does."""

import linecache

import jax
import numpy as np
import pytest

import sbp
from sbp.handwritten.compared import DIFFERS
from tests.shardmap.programs.collection import (
    EVERYDAY,
    FIRST,
    PAIRED,
    PLACED,
    PLACED_RIGHT,
    RIGHT,
    SECOND,
    pairs,
    programs,
)
from tests.shardmap.programs.kinds import is_right, mapped, mesh, shapes
from tests.shardmap.programs.wrong import counts, subtle
from tests.shardmap.programs.wrong.counts import NOTED

PAIRS = pairs((*PAIRED, counts, subtle, *PLACED))
HELPED = pairs((*PAIRED, *PLACED))
"""Pairs that say whether a help is expected."""

NOTED_TWINS = {"experts_not_added", "sent_and_kept"}
"""Pairs whose right program gets a note: each device ranks its own tokens or has other experts."""


def jax_accepts(pair, which):
    """Whether JAX, with all its checks, traces a program."""
    try:
        jax.make_jaxpr(pair.program(True, which))(*shapes(pair.args))
    except (ValueError, TypeError, jax.errors.JaxRuntimeError):
        return False
    return True


def reports(pair, which):
    """A report for each setting of check_vma under which JAX accepts the program; at least one."""
    settings = [
        v
        for v in ((True, False) if pair.vma is None else (pair.vma,))
        if not v or jax_accepts(pair, which)
    ]
    assert settings
    for check_vma in settings:
        yield sbp.check_shard_map(pair.program(check_vma, which), *shapes(pair.args), mesh=mesh())


@pytest.mark.parametrize("name", list(PAIRS))
def test_the_wrong_program_is_rejected(name):
    pair = PAIRS[name]
    for report in reports(pair, "wrong"):
        assert report.ok == (pair.severity != "error")
        assert {d.code for d in report.diagnostics} <= {pair.code, *pair.notes}, report.text()
        (found,) = (d for d in report.diagnostics if d.severity == pair.severity)
        assert found.code == pair.code, report.text()
        for axis in ("data", "model"):
            assert (f"`{axis}`" in found.title) == (axis in pair.axes), found.title
        if pair.at:
            assert found.primary is not None
            line = linecache.getline(found.primary.span.file, found.primary.span.line)
            assert pair.at in line, line
        if name in HELPED:
            assert bool(found.helps) == pair.repaired, report.text()
        assert name not in pairs(PAIRED) or all(h.bytes_per_device > 0 for h in found.helps)


@pytest.mark.parametrize("name", list(PAIRS))
def test_the_twin_is_accepted(name):
    for report in reports(PAIRS[name], "right"):
        found = [(d.code, d.severity) for d in report.diagnostics]
        assert found == [(DIFFERS, "note")] * (name in NOTED_TWINS), report.text()


@pytest.mark.parametrize("name", list(PAIRS))
def test_the_twin_computes_what_is_meant_and_the_wrong_program_does_not(name):
    pair = PAIRS[name]
    want = jax.jit(pair.reference)(*pair.args)
    right, wrong = (pair.program(bool(pair.vma), which) for which in ("right", "wrong"))
    assert is_right(right, pair.args, want, 2e-4, 2e-4)
    assert not is_right(wrong, pair.args, want, 1e-3, 1e-3)


def test_jax_accepts_most_of_them():
    """With check_vma=True, JAX accepts the other wrong programs, so a checker is needed."""
    first, second = pairs(FIRST), pairs(SECOND)
    refused = {name for name in first if not jax_accepts(first[name], "wrong")}
    assert (len(first), refused) == (9, {"missing", "gathered_rows"})
    refused = {name for name in second if not jax_accepts(second[name], "wrong")}
    assert (len(second), refused) == (
        33,
        {
            "argmax_by_shard",
            "cross_entropy_by_shard",
            "gathered_over_data",
            "mlp_unreduced",
            "over_wrong_axis",
            "scattered_as_whole",
            "summed_in_a_backward_rule",
            "summed_in_loop",
        },
    )


# ---- right programs ------------------------------------------------------------------------------
# Right programs get no error, and a note only where the table expects one. Running them shows that
# they are right.


PROGRAMS = programs((*RIGHT, *EVERYDAY, *PLACED_RIGHT))
CASES = [(name, vma) for name, program in PROGRAMS.items() for vma in program.vma]


@pytest.mark.parametrize(("name", "vma"), CASES)
def test_it_is_accepted(name, vma):
    program = PROGRAMS[name]
    report = sbp.check_shard_map(program.make(vma), *shapes(program.args), mesh=mesh())
    assert [d.code for d in report.diagnostics] == list(program.notes), report.text()
    assert report.ok


@pytest.mark.parametrize(("name", "vma"), CASES)
def test_it_is_right(name, vma):
    program = PROGRAMS[name]
    want = jax.jit(program.reference)(*program.args)
    assert is_right(program.make(vma), program.args, want, 1e-3, 1e-4)


@pytest.mark.parametrize("name", list(NOTED))
def test_what_may_be_meant_is_said(name):
    body, reference, ins, outs, args, code = NOTED[name]
    region = mapped(body, ins, outs)(False)
    report = sbp.check_shard_map(region, *args, mesh=mesh())
    assert {d.code for d in report.diagnostics} == {code}, report.text()
    got, want = np.asarray(jax.jit(region)(*args)), np.asarray(jax.jit(reference)(*args))
    assert got.shape != want.shape or not np.allclose(got, want, rtol=1e-3, atol=1e-3)
