"""Helps that change a costly pin to the type in which the plan without it reads the value."""

import jax
import jax.numpy as jnp

import sbp
from sbp.errors import SourceEdit
from sbp.explain.change import tried
from sbp.explain.edits import drop_pins
from sbp.explain.pin_changes import repinned
from sbp.explain.relaxations import following
from sbp.infer.constraints import pin_sites
from sbp.infer.space import encode
from sbp.plan.fit import best_program
from tests.edits import check_helps

MESH = jax.sharding.AbstractMesh((8,), ("tensor",))
BIG = jax.ShapeDtypeStruct((4096, 4096), jnp.float32)
SMALL = jax.ShapeDtypeStruct((64, 64), jnp.float32)
ROWS = ("tensor:S(0)", None)


def program(x, w):
    h = sbp.replicate(x @ w, "tensor")
    return (jnp.tanh(h) @ w).sum()


def costly(fn):
    found = sbp.jit(fn, MESH, in_types=ROWS).check(BIG, BIG).diagnostics
    check_helps(fn, MESH, {"in_types": ROWS}, (BIG, BIG), found)
    (warning,) = (d for d in found if d.code == "costly-annotation")
    return warning


def test_the_pin_asks_what_its_readers_take():
    first, second = costly(program).helps
    where = f" to tensor:S(0) at line {program.__code__.co_firstlineno + 1}"
    assert first.text.startswith("pin ") and first.text.endswith(where)
    (edit,) = (e for e in first.edits if isinstance(e, SourceEdit))
    assert edit.replacement == 'sbp.split(x @ w, 0, "tensor")'
    assert second.text.startswith("drop ")
    assert first.bytes_per_device == second.bytes_per_device


def sites():
    request = sbp.jit(program, MESH, in_types=ROWS).trace(BIG, BIG).request
    return request, next(s for s in pin_sites(request) if s.source == "annotation")


def test_a_pin_that_is_asked_what_it_asks_gives_no_help():
    """Where the plan reads the value as it is pinned, another type is no better."""
    request, site = sites()
    with_pin = best_program(request)
    assert with_pin is not None and not [*following(request, site, with_pin)]


def test_what_stays_costly_is_no_help(monkeypatch):
    request, site = sites()
    without = best_program(drop_pins(request, site))
    assert without is not None
    assert [*following(request, site, without)]
    monkeypatch.setattr("sbp.explain.relaxations.DEARER", 1e12)
    assert not [*following(request, site, without)]


def accepted(request, site, atom):
    change = repinned(request, site, (encode(atom),))
    return tried([change] if change.edits else [], plans=1).accepted


def test_a_split_of_a_dim_that_is_not_there_has_no_plan():
    request, site = sites()
    assert not accepted(request, site, sbp.S(2))
    ((change, program),) = accepted(request, site, sbp.S(1))
    assert change.text.split(" to ")[1].startswith("tensor:S(1) at line")
    assert change.help(program).bytes_per_device == program.cost.bytes_per_device


def test_a_dim_of_vmap_is_no_dim_for_a_pin():
    """The plan without the pin splits the batch, which the function inside `jax.vmap` does not
    see: no other pin there asks that. A dim that it sees is named as it is written."""

    def batched(x, w):
        def one(row):
            return jnp.tanh(sbp.split(row, 1, "tensor")) @ w

        return jax.vmap(one)(x)

    shapes = jax.ShapeDtypeStruct((8, 64, 64), jnp.float32), SMALL
    request = sbp.jit(batched, MESH).trace(*shapes).request
    site = next(s for s in pin_sites(request) if s.source == "annotation")
    assert not accepted(request, site, sbp.S(0))
    ((change, _),) = accepted(request, site, sbp.S(1))
    assert " to tensor:S(0) at line" in change.text
    (edit,) = (e for e in change.edits if isinstance(e, SourceEdit))
    assert edit.replacement == 'sbp.split(row, 0, "tensor")'
