"""`sbp.manual` reads the body of a region as `check_shard_map` does: the wrong programs of
`tests/shardmap` are refused as manual regions, and the right ones are not. A region is compared
with the same region on one device: where it differs, sbp says so."""

import re
import warnings
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import sbp
from sbp.errors import Help, OptionEdit, SbpInternalError
from sbp.handwritten import emulation
from sbp.handwritten.emulation import CHECKED_ELEMENTS
from sbp.handwritten.region import tracing_for
from sbp.machine.mesh import mesh_spec
from tests.handwritten.test_manual import MESHES, TWO, arrays, assert_close, mesh_of
from tests.shardmap.practice.case import CASES, devices
from tests.shardmap.programs.collection import (
    EVERYDAY,
    FAULTY,
    PAIRED,
    PLACED,
    PLACED_RIGHT,
    RIGHT,
    programs,
)
from tests.shardmap.programs.kinds import mesh as mesh_of_pairs, shapes
from tests.shardmap.programs.wrong import counts, subtle

PAIRS = {
    f"{module.__name__.rpartition('.')[2]}-{name}": pair
    for module in (*PAIRED, counts, subtle, *PLACED)
    for name, pair in module.PAIRS.items()
    if pair.vma is not True  # JAX's own reductions in gradients, which a manual region has not
}
RIGHT_PROGRAMS = {
    f"{module.__name__.rpartition('.')[2]}-{name}": program
    for module in (*RIGHT, *EVERYDAY, *PLACED_RIGHT)
    for name, program in module.PROGRAMS.items()
    if False in program.vma
}
FAULTY_PROGRAMS = {name: p for name, p in programs(FAULTY).items() if False in p.vma}

AGAINST_THE_MESH = {"subtle-order_of_result", "subtle-order_of_operands"}
"""Wrong programs whose types no manual region can claim: a dim that is split against the order of
the mesh is refused before the body is read."""

DIFFERENT = {"everyday-loss_of_worst"}
"""Right programs that compute another value on one device: the largest of the devices' means."""

NOT_RUN = {"everyday-called_back"}
"""Right programs that cannot be run without devices; a warning says so."""

SHARD_MAP = jax.shard_map


def region(body, *, mesh, in_specs, out_specs, check_vma: bool):
    """An `sbp.manual` in place of a `jax.shard_map`, with the same specs as types."""
    if not isinstance(mesh, jax.sharding.Mesh):  # the `jax.shard_map` of a manual region
        return SHARD_MAP(
            body, mesh=mesh, in_specs=in_specs, out_specs=out_specs, check_vma=check_vma
        )

    def call(*args):
        types = in_specs if isinstance(in_specs, tuple) else (in_specs,) * len(args)
        return sbp.manual(body, types, out_specs)(*args)

    return call


def check(make, args) -> None:
    """Traces a program as `sbp.jit` does; its regions are checked then.

    Arguments:
      make: makes the program.
      args: its arguments.
    """
    with pytest.MonkeyPatch.context() as patch, tracing_for(mesh_spec(mesh_of_pairs())):
        patch.setattr(jax, "shard_map", region)
        program = make()
        jax.make_jaxpr(lambda *a: program(*a))(*shapes(args))


def refused(make, args) -> sbp.SbpTypeError:
    with pytest.raises(sbp.SbpTypeError) as caught:
        check(make, args)
    assert {d.code for d in caught.value.diagnostics} == {"manual-types"}
    return caught.value


@pytest.mark.parametrize("name", list(PAIRS))
def test_a_wrong_program_is_refused(name: str):
    pair = PAIRS[name]
    make = lambda: pair.program(False)
    if name in AGAINST_THE_MESH:
        with pytest.raises(sbp.SbpError, match="in the order of the mesh"):
            check(make, pair.args)
    elif pair.severity == "note":
        check(make, pair.args)
    elif pair.severity == "warning":
        with pytest.warns(sbp.SbpWarning, match="manual-types"):
            check(make, pair.args)
    else:
        (found,) = refused(make, pair.args).diagnostics
        assert f"sbp explain {pair.code}" in found.notes[-1]
        for axis in ("data", "model"):
            assert (f"`{axis}`" in found.title) == (axis in pair.axes), found.title


def as_manual(help_: Help):
    """The text and the edits of a help for a `jax.shard_map`, as they are for `sbp.manual`."""
    edits = [
        replace(
            e,
            option="out_types",
            value=repr(sbp.NdSbp(_atoms(e.value))),
            function="sbp.manual",
        )
        if isinstance(e, OptionEdit)
        else e
        for e in help_.edits
    ]
    return help_.text.replace("out_specs", "out_types"), edits


def _atoms(spec):
    listed = [(d, e if isinstance(e, tuple) else (e,)) for d, e in enumerate(spec) if e]
    return {axis: sbp.S(d) for d, axes in listed for axis in axes}


@pytest.mark.parametrize("name", [n for n, p in PAIRS.items() if p.severity == "error"])
def test_its_helps_are_those_of_check_shard_map(name: str):
    pair = PAIRS[name]
    if name in AGAINST_THE_MESH:
        return
    mesh, program = mesh_of_pairs(), pair.program(False)
    said = sbp.check_shard_map(program, *shapes(pair.args), mesh=mesh).diagnostics
    (wanted,) = (d for d in said if d.severity == "error")
    (found,) = refused(lambda: pair.program(False), pair.args).diagnostics
    assert [(h.text, list(h.edits)) for h in found.helps] == [as_manual(h) for h in wanted.helps]


@pytest.mark.parametrize("name", list(PAIRS))
def test_its_twin_is_not(name: str):
    pair = PAIRS[name]
    check(lambda: pair.program(False, "right"), pair.args)


@pytest.mark.parametrize("name", list(FAULTY_PROGRAMS))
def test_a_fault_that_needs_a_help_is_refused(name: str):
    program = FAULTY_PROGRAMS[name]
    refused(lambda: program.program(False), program.args)


@pytest.mark.parametrize("name", list(RIGHT_PROGRAMS))
def test_a_right_program_is_not_refused(name: str):
    program = RIGHT_PROGRAMS[name]
    said = "changes when mesh axis" if name in DIFFERENT else "sbp cannot run it without devices"
    if name in {*NOT_RUN, *DIFFERENT}:
        with pytest.warns(sbp.SbpWarning, match=said):
            check(lambda: program.make(False), program.args)
    else:
        check(lambda: program.make(False), program.args)


# ---- what is claimed ----------------------------------------------------------------------------

X, W = arrays((8, 16), (16, 4))
MATMUL = ("model:S(1)", "model:S(0)")


@pytest.mark.parametrize("axes", MESHES, ids=["8", "2x4"])
@pytest.mark.parametrize(
    ("body", "text"),
    [
        (lambda x, w: lax.pmean(lax.psum(x @ w, "model") * 2, "model"), ""),
        (lambda x, w: lax.pmean(x @ w, "model"), "averages the parts of a sum"),
        (
            lambda x, w: lax.psum(lax.psum(x @ w, "model"), "model"),
            "reduces a value that is already whole",
        ),
        (lambda x, w: lax.pmax(x @ w, "model"), "reduces a value that is P(sum)"),
    ],
)
def test_a_result_that_depends_on_the_mesh_is_refused(axes, body, text: str):
    """All devices hold the same, and not the product: `pmean` of parts, a second `psum`."""
    report = sbp.jit(sbp.manual(body, MATMUL, "B"), mesh_of(axes)).check(X, W)
    assert report.ok == (not text) and all(text in d.title for d in report.diagnostics)


@pytest.mark.parametrize(
    ("body", "out", "text"),
    [
        (lambda x, w: x @ w, "model:P(sum)", ""),
        (lambda x, w: lax.psum(x @ w, "model"), "model:P(sum)", "is whole .* returned as P"),
        (lambda x, w: lax.psum(x @ w, "model"), "model:P(max)", ""),
        (lambda x, w: lax.pmean(x @ w, "model"), "model:P(sum)", ""),
        (lambda x, w: x @ w + 1.0, "model:P(sum)", "adds a whole value to a partial one"),
        (lambda x, w: x @ w, "model:P(max)", r"is P\(sum\) .* returned as P\(max\)"),
        (lambda x, w: lax.psum(x @ w, "model"), "model:S(0)", "is whole .* returned as S"),
    ],
)
def test_partial_claims(body, out: str, text: str):
    f = sbp.jit(sbp.manual(body, MATMUL, out), mesh_of(TWO), out_types="B")
    report = f.check(X, W)
    assert report.ok == (not text), report.text()
    if text:
        (found,) = report.diagnostics
        assert re.search(text, found.title), found.title
    else:
        assert_close(f(X, W), X @ W)


def test_shards_that_are_added_up_are_refused():
    f = sbp.jit(sbp.manual(lambda x: lax.psum(x, "model"), "model:S(0)", "B"), mesh_of(TWO))
    (found,) = f.check(X).diagnostics
    assert (found.code, found.severity) == ("manual-types", "error")
    assert "adds up the shards of a value that is S(0)" in found.title


# ---- the same region on one device --------------------------------------------------------------

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


def said(fn, ins, outs, mesh, *args) -> tuple[set[str], str]:
    """The severities of what is said of a region on one device, and its titles."""
    region = sbp.manual(fn, in_types=ins, out_types=outs)
    with warnings.catch_warnings(record=True, action="always"):
        report = sbp.jit(lambda *a: region(*a), mesh).check(*args)
    return {d.severity for d in report.diagnostics}, " ".join(d.title for d in report.diagnostics)


def of_case(name: str, mistake: str | None) -> tuple[set[str], str]:
    case = CASES[name]
    return said(*case.write(mistake), devices(case.mesh), *case.args())


@pytest.mark.parametrize(("name", "mistake"), FOUND)
def test_a_mistake_shows_on_one_device(name, mistake):
    assert of_case(name, mistake)[0] & {"warning", "error"}


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
    assert "warning" in severities and "changes when mesh axis `y` has one device" in titles


def rotated(x):
    n = lax.axis_size("model")
    return lax.ppermute(x, "model", [(i, (i + 1) % n) for i in range(n)])


@pytest.mark.parametrize(
    ("body", "types", "axes", "x", "why"),
    [
        (
            lambda x: rotated(x)[: 4 // (lax.axis_size("model") - 1)],
            "model:S(0)",
            {"model": 2},
            jnp.arange(8.0),
            "`model`: it raises an error with one device: integer division",
        ),
        (
            rotated,
            "model:S(0)",
            {"model": 2},
            jax.ShapeDtypeStruct((2 * CHECKED_ELEMENTS,), jnp.float32),
            "`model`: one of its values has",
        ),
        (
            lambda x: lax.ppermute(x, ("x", "y"), [(i, (i + 1) % 4) for i in range(4)]),
            "x:S(0) y:S(0)",
            {"x": 2, "y": 2},
            np.arange(16.0, dtype=np.float32),
            ": sbp cannot run it without devices",
        ),
    ],
    ids=["raises an error", "too large", "a collective over two axes"],
)
def test_what_does_not_run_on_one_device_is_not_compared(body, types, axes, x, why):
    assert why in said(body, types, types, devices(axes), x)[1]


@pytest.mark.parametrize("outs", ["model:S(0)", "B"])
def test_a_permutation_that_names_a_device_too_many(outs):
    region = sbp.manual(lambda x: lax.ppermute(x, "model", [(0, 1), (1, 5)]), "model:S(0)", outs)
    with pytest.warns(sbp.SbpWarning, match="sbp did not check"):
        report = sbp.jit(region, devices({"model": 4})).check(jnp.arange(8.0))
    said = " ".join(" ".join((d.title, *d.notes)) for d in report.diagnostics)
    assert "ppermute names index 5 on mesh axis 'model', which has 4 devices" in said


def test_an_error_of_sbp_itself_is_raised(monkeypatch):
    def broken(*_):
        raise SbpInternalError("a broken invariant")

    monkeypatch.setattr(emulation, "environment", broken)
    x = jnp.arange(8.0)
    for outs in ("model:S(0)", "B"):  # the comparison with one device, the check of B
        with pytest.raises(SbpInternalError, match="a broken invariant"):
            said(rotated, "model:S(0)", outs, devices({"model": 2}), x)
