"""A region is compared with the same region on one device: where it differs, sbp says so."""

import warnings
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import sbp
from sbp.errors import SbpInternalError
from sbp.shardmap import emulation
from sbp.shardmap.emulation import CHECKED_ELEMENTS
from tests.shardmap.practice.case import CASES, devices

FOUND = [
    ("causal_ring_attention", "key offset of the wrong device"),
    ("collective_matmul", "one step short"),
    ("halo_convolution", "neighbours swapped"),
    ("linear_recurrence", "own shard in the prefix"),
    ("prefix_sum", "own total in the prefix"),
    ("ring_attention", "one step short"),
    ("ring_attention", "sum not rescaled"),
    ("ulysses", "values not exchanged"),
]
"""Mistakes in what devices send each other."""


def said(fn: Any, ins: Any, outs: Any, mesh: Any, *args: Any) -> tuple[set[str], str]:
    """The severities of what is said of a region on one device, and its titles."""
    region = sbp.manual(fn, in_types=ins, out_types=outs)
    with warnings.catch_warnings(record=True):
        warnings.simplefilter("always")
        report = sbp.jit(lambda *a: region(*a), mesh).check(*args)
    return {d.severity for d in report.diagnostics}, " ".join(d.title for d in report.diagnostics)


def of_case(name: str, mistake: str | None) -> tuple[set[str], str]:
    case = CASES[name]
    p, mesh = case.write(mistake), devices(case.mesh)
    return said(p.region, p.in_specs, p.out_specs, mesh, *case.args())


@pytest.mark.parametrize(("name", "mistake"), FOUND)
def test_a_mistake_shows_on_one_device(name, mistake):
    assert of_case(name, mistake)[0] & {"warning", "error"}


@pytest.mark.parametrize("name", ["causal_ring_attention", "halo_convolution", "prefix_sum"])
def test_a_right_region_computes_the_same(name):
    assert of_case(name, None) == (set(), "")


def test_one_that_may_be_meant_to_differ_says_why():
    severities, titles = of_case("pipeline", None)
    assert severities == {"note"}
    assert "a stage for each device" in titles or "does not run there" in titles


def test_a_number_of_devices_from_outside():
    n = 4
    ring = [(i, (i + 1) % n) for i in range(n)]

    def summed(steps):
        def region(x):
            total, part = x, x
            for _ in range(steps()):
                part = lax.ppermute(part, "model", ring)
                total = total + part
            return jnp.tanh(total.sum(0, keepdims=True) + 0 * x)

        return region

    x, mesh = np.arange(8.0, dtype=np.float32), devices({"model": 4})
    right = said(summed(lambda: n - 1), "model:S(0)", "model:S(0)", mesh, x)
    wrong = said(summed(lambda: n - 2), "model:S(0)", "model:S(0)", mesh, x)
    assert right != wrong and "error" not in right[0]


@pytest.mark.parametrize("axes", [{"x": 2, "y": 4}, {"x": 2, "y": 2, "z": 2}])
def test_on_several_mesh_axes(axes):
    def shift(x, by):
        n = lax.axis_size("y")
        for _ in range(n - by):
            x = lax.ppermute(x, "y", [(i, (i + 1) % n) for i in range(n)])
        return lax.psum(x.sum(0), "x")

    x = np.arange(64.0, dtype=np.float32).reshape(8, 8)
    ins = "x:S(0) y:S(1)"
    assert said(lambda x: shift(x, 0), ins, "y:S(0)", devices(axes), x) == (set(), "")
    severities, titles = said(lambda x: shift(x, 1), ins, "y:S(0)", devices(axes), x)
    assert "warning" in severities and "differs on one device of mesh axis `y`" in titles


def rotated(x):
    n = lax.axis_size("model")
    return lax.ppermute(x, "model", [(i, (i + 1) % n) for i in range(n)])


def test_a_region_that_does_not_run_on_one_device_is_not_compared():
    refused = lambda x: rotated(x)[: 4 // (lax.axis_size("model") - 1)]
    found = said(refused, "model:S(0)", "model:S(0)", devices({"model": 2}), jnp.arange(8.0))
    assert "`model`: it does not run there: integer division" in found[1]


def test_nor_is_one_that_is_too_large():
    x = jax.ShapeDtypeStruct((2 * CHECKED_ELEMENTS,), jnp.float32)
    found = said(rotated, "model:S(0)", "model:S(0)", devices({"model": 2}), x)
    assert "`model`: a value in it has" in found[1]


def test_nor_is_one_whose_collectives_need_devices():
    def swapped(x):
        return lax.ppermute(x, ("x", "y"), [(i, (i + 1) % 4) for i in range(4)])

    x = np.arange(16.0, dtype=np.float32)
    found = said(swapped, "x:S(0) y:S(0)", "x:S(0) y:S(0)", devices({"x": 2, "y": 2}), x)
    assert ": it cannot be run without devices" in found[1]


@pytest.mark.parametrize("outs", ["model:S(0)", "B"])
def test_a_permutation_that_names_a_device_too_many(outs):
    region = sbp.manual(lambda x: lax.ppermute(x, "model", [(0, 1), (1, 5)]), "model:S(0)", outs)
    with pytest.warns(sbp.SbpWarning, match="is not checked"):
        report = sbp.jit(region, devices({"model": 4})).check(jnp.arange(8.0))
    said = " ".join(" ".join((d.title, *d.notes)) for d in report.diagnostics)
    assert "ppermute names index 5 on mesh axis 'model', which has 4 devices" in said


def test_an_error_of_sbp_itself_is_raised(monkeypatch):
    def broken(*_: Any) -> Any:
        raise SbpInternalError("a broken invariant")

    monkeypatch.setattr(emulation, "environment", broken)
    x = jnp.arange(8.0)
    for outs in ("model:S(0)", "B"):  # the comparison with one device, the check of B
        with pytest.raises(SbpInternalError, match="a broken invariant"):
            said(rotated, "model:S(0)", outs, devices({"model": 2}), x)
