"""Every wrong program is rejected, at its line and with its code; its twin is accepted, and
computes what the plain function does."""

import linecache

import jax
import numpy as np
import pytest

import sbp
from tests.shardmap.programs.collection import FIRST, PAIRED, SECOND, pairs
from tests.shardmap.programs.kinds import mesh

PAIRS = pairs(PAIRED)


def flavours(pair):
    return (True, False) if pair.vma is None else (pair.vma,)


def shapes(pair):
    return jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype), pair.args)


def jax_accepts(pair, which):
    """Whether JAX, with all its checks, traces a program."""
    try:
        jax.make_jaxpr(pair.program(which, True))(*shapes(pair))
    except (ValueError, TypeError, jax.errors.JaxRuntimeError):
        return False
    return True


def check(pair, which, check_vma):
    return sbp.check_shard_map(pair.program(which, check_vma), *shapes(pair), mesh=mesh())


@pytest.mark.parametrize("name", list(PAIRS))
def test_the_wrong_program_is_rejected(name):
    pair = PAIRS[name]
    told = 0
    for check_vma in flavours(pair):
        if check_vma and pair.vma is None and not jax_accepts(pair, "wrong"):
            continue
        report = check(pair, "wrong", check_vma)
        told += 1
        assert not report.ok
        errors = [d for d in report.diagnostics if d.severity == "error"]
        assert [d.code for d in errors] == [pair.code], report.text()
        assert {d.code for d in report.diagnostics} <= {pair.code, *pair.notes}, report.text()
        (error,) = errors
        assert error.primary is not None
        line = linecache.getline(error.primary.span.file, error.primary.span.line)
        assert pair.at in line, line
        for axis in ("data", "model"):
            assert (f"`{axis}`" in error.title) == (axis in pair.axes), error.title
        assert bool(error.helps) == pair.repaired, report.text()
        assert all(h.bytes_per_device > 0 for h in error.helps)
    assert told


@pytest.mark.parametrize("name", list(PAIRS))
def test_the_twin_is_accepted(name):
    pair = PAIRS[name]
    accepted = [v for v in flavours(pair) if not v or jax_accepts(pair, "right")]
    assert accepted
    for check_vma in accepted:
        report = check(pair, "right", check_vma)
        assert not report.diagnostics, report.text()


def outcome(pair, which, check_vma):
    """The result, and whether devices that should have the same do."""
    result = jax.jit(pair.program(which, check_vma))(*pair.args)
    seen = {}
    agree = True
    for shard in result.addressable_shards:
        key = str(shard.index)
        agree &= np.allclose(
            seen.setdefault(key, np.asarray(shard.data)), shard.data, rtol=1e-4, atol=1e-4
        )
    return np.asarray(result), agree


@pytest.mark.parametrize("name", list(PAIRS))
def test_the_twin_computes_what_is_meant_and_the_wrong_program_does_not(name):
    pair = PAIRS[name]
    want = np.asarray(jax.jit(pair.reference)(*pair.args))
    right, agree = outcome(pair, "right", bool(pair.vma))
    assert agree
    np.testing.assert_allclose(right, want, rtol=2e-4, atol=2e-4)
    wrong, agree = outcome(pair, "wrong", bool(pair.vma))
    assert (
        not agree or wrong.shape != want.shape or not np.allclose(wrong, want, rtol=1e-3, atol=1e-3)
    )


def test_jax_accepts_most_of_them():
    """Why there is something to do: with check_vma=True, JAX itself has nothing against the
    others."""
    first, second = pairs(FIRST), pairs(SECOND)
    refused = {name for name in first if not jax_accepts(first[name], "wrong")}
    assert (len(first), refused) == (9, {"missing", "gathered_rows"})
    refused = {name for name in second if not jax_accepts(second[name], "wrong")}
    assert len(second) == 30
    assert refused == {
        "argmax_by_shard",
        "cross_entropy_by_shard",
        "gathered_over_data",
        "mlp_unreduced",
        "over_wrong_axis",
        "scattered_as_whole",
        "summed_in_loop",
    }
