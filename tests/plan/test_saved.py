"""A saved plan is the plan again, and one that was changed is refused."""

import dataclasses
import json
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax import lax

import sbp
from sbp.errors import SbpError
from sbp.plan.fingerprint import digests
from sbp.plan.listed import length, wrong_conversions
from sbp.plan.parse import parse_listing
from sbp.plan.saved import SavedPlan
from sbp.plan.text import listing
from tests.report.programs import PROGRAMS, plan
from tests.run.programs import CASES, NAMES, function_of

MESHES = [(8,), (2, 4), (2, 2, 2)]


def planned(name, sizes):
    case = next(c for c in CASES if c.name == name)
    mesh = jax.sharding.AbstractMesh(sizes, NAMES[: len(sizes)])
    shapes = [jax.ShapeDtypeStruct(s, jnp.float32) for s in case.shapes]
    return sbp.jit(function_of(case, mesh.axis_names), mesh).plan(*shapes).program


def rematerialised():
    """A plan without conversions that the backward pass would repeat."""

    def body(x, w):
        up, down = sbp.split(w[0], 1, "model"), sbp.split(w[1], 0, "model")
        y = sbp.annotate(jnp.tanh(x @ up) @ down, model=sbp.B, data=sbp.S(0))
        return jnp.tanh(y) + x, None

    def loss(weights, x):
        return (lax.scan(jax.checkpoint(body), x, weights)[0] ** 2).sum()

    mesh = jax.sharding.AbstractMesh((2, 4), ("data", "model"))
    shapes = [(4, 2048, 4096), (4, 4096, 2048), (16, 2048)]
    up, down, x = (jax.ShapeDtypeStruct(s, jnp.float32) for s in shapes)
    f = sbp.jit(jax.value_and_grad(loss, argnums=(0, 1)), mesh, hardware="tpu-v5p")
    return f.plan((up, down), x).program


@pytest.fixture(scope="module")
def programs():
    found = {f"{c.name} {s}": planned(c.name, s) for c in CASES[::3] for s in MESHES}
    return found | {name: plan(name).program for name in PROGRAMS} | {"remat": rematerialised()}


def test_a_saved_plan_is_the_plan_again(programs):
    assert programs["remat"].removed
    for name, program in programs.items():
        saved = SavedPlan.of(program)
        read = SavedPlan.loads(saved.dumps())
        again = read.program_for(program.request)
        assert str(again) == str(program), name
        assert again.cost == program.cost, name
        assert again.typing.lower_bound == program.typing.lower_bound
        assert SavedPlan.of(again) == saved, "saving is the same a second time"


def test_conversions_of_plans_lead_from_type_to_type(programs):
    for program in programs.values():
        assert not list(wrong_conversions(listing(program)))


def test_each_changed_conversion_is_found_at_its_line(programs):
    """Every conversion of every plan, replaced by every other kind."""
    kinds = (
        "all_reduce",
        "reduce_scatter",
        "all_gather",
        "all_to_all",
        "slice",
        "mask",
        "zero_pad",
    )
    count = 0
    for program in programs.values():
        lines = str(program).splitlines()
        assert length(listing(program).body) + 2 == len(lines)
        for number, line in enumerate(lines):
            kind = next((k for k in kinds if f" = {k}[" in line), None)
            for other in kinds if kind else ():
                if other != kind:
                    text = line.replace(f" = {kind}[", f" = {other}[")
                    changed = [*lines[:number], text, *lines[number + 1 :]]
                    (wrong, *_) = wrong_conversions(parse_listing("\n".join(changed)))
                    assert wrong.number == number + 1
                    count += 1
    assert count > 300


def changed(saved, **fields):
    return SavedPlan.loads(dataclasses.replace(saved, **fields).dumps())


def test_a_reduction_that_became_a_slice_is_refused_with_its_line(programs):
    program = programs["remat"]
    saved = SavedPlan.of(program)
    number, line = next((i, t) for i, t in enumerate(saved.lines) if " = all_reduce[" in t)
    text = list(saved.lines)
    text[number] = line.replace("all_reduce", "slice")
    with pytest.raises(SbpError, match=f"line {number + 1} of the plan does not hold: slice") as e:
        changed(saved, lines=tuple(text)).program_for(program.request)
    assert e.value.code == "saved-plan" and text[number].strip() in str(e.value)


def test_every_line_of_the_text_is_that_of_the_types(programs):
    """Each line left out, and each type of a line replaced, is refused."""
    program = programs["remat"]
    saved = SavedPlan.of(program)
    for number, line in enumerate(saved.lines):
        texts = [[*saved.lines[:number], *saved.lines[number + 1 :]]]
        if ": B = " in line:
            other = line.replace(": B = ", ": data:P(sum) = ")
            texts.append([*saved.lines[:number], other, *saved.lines[number + 1 :]])
        for text in texts:
            with pytest.raises(SbpError, match="saved plan") as e:
                changed(saved, lines=tuple(text)).program_for(program.request)
            assert e.value.code == "saved-plan"


def test_lines_of_source_may_move(programs):
    program = programs["remat"]
    saved = SavedPlan.of(program)
    moved = tuple(line.replace(".py:", ".py:1") for line in saved.lines)
    assert moved != saved.lines
    assert str(changed(saved, lines=moved).program_for(program.request)) == str(program)


@pytest.mark.parametrize("part", ["values", "rows", "regions", "outputs"])
def test_changed_types_are_refused(part, programs):
    """Every code of every value, row, region and output, replaced by another one."""
    program = programs["remat"]
    saved = SavedPlan.of(program)

    def places(x: Any, path: tuple[Any, ...] = ()):
        if isinstance(x, int):
            yield path
        items = x.items() if isinstance(x, dict) else enumerate(x) if isinstance(x, list) else ()
        for key, inner in items:
            yield from places(inner, (*path, key))

    types = json.loads(json.dumps(saved.types))
    found = list(places(types[part]))
    for path in found[:: max(1, len(found) // 40)]:
        other = json.loads(json.dumps(types))
        here = other[part]
        *keys, last = path
        for key in keys:
            here = here[key]
        here[last] = 1 - min(1, here[last])
        with pytest.raises(SbpError) as e:
            changed(saved, types=other).program_for(program.request)
        assert e.value.code == "saved-plan"


def test_removed_conversions_have_to_be_repeats(programs):
    program = programs["remat"]
    saved = SavedPlan.of(program)
    value, _, *rest = saved.removed[0]
    with pytest.raises(SbpError, match="not those of this program"):
        changed(saved, removed=((value, value - 1, *rest),)).program_for(program.request)


BROKEN = {
    "nothing": "",
    "no JSON": "plan x=2 {",
    "a list": "[]",
    "another file": '{"a": 1}',
    "another format": '{"sbp plan": 99}',
    "no text": '{"sbp plan": 1, "made_for": {}, "program": "", "types": {}, "removed": []}',
    "wrong kinds": '{"sbp plan": 1, "made_for": [], "program": 3, "types": 4, "plan": 6}',
}


@pytest.mark.parametrize("text", BROKEN.values(), ids=BROKEN)
def test_another_file_is_refused(text):
    with pytest.raises(SbpError) as e:
        SavedPlan.loads(text)
    assert e.value.code == "saved-plan"


@pytest.mark.parametrize("types", [{}, {"values": 3}, {"values": {"a": []}, "rows": {}}], ids=str)
def test_types_of_another_kind_are_refused(types, programs):
    program = programs["remat"]
    with pytest.raises(SbpError) as e:
        changed(SavedPlan.of(program), types=types).program_for(program.request)
    assert e.value.code == "saved-plan"


# ---- fingerprints -------------------------------------------------------------------------------

MESH = jax.sharding.AbstractMesh((4,), ("x",))
X = jax.ShapeDtypeStruct((8, 8), jnp.float32)


def digests_of(fn, *args):
    return digests(sbp.jit(fn, MESH).trace(*(args or (X,))).request.graph)


def test_equal_programs_have_equal_digests():
    def one(x):
        return jax.nn.gelu(x @ x).sum()

    def other(renamed):
        y = renamed @ renamed

        return jnp.sum(jax.nn.gelu(y))

    assert digests_of(one) == digests_of(other)


@pytest.mark.parametrize(
    ("one", "other", "differing"),
    [
        (lambda x: x * 2.0, lambda x: x * 3.0, 1),
        (lambda x: x.sum(0), lambda x: x.sum(1), 1),
        (lambda x: jnp.sin(x), lambda x: jnp.cos(x), 1),
        (lambda x: x @ x, lambda x: x @ x.T, None),
        (lambda x: sbp.split(x, 0, "x") * 2, lambda x: sbp.split(x, 1, "x") * 2, 1),
        (
            lambda x: lax.fori_loop(0, 3, lambda _, y: y @ y, x),
            lambda x: lax.fori_loop(0, 4, lambda _, y: y @ y, x),
            None,
        ),
        (lambda x: jnp.sort(x, 0), lambda x: jnp.sort(x, 1), None),
    ],
)
def test_other_programs_have_other_digests(one, other, differing):
    a, b = digests_of(one), digests_of(other)
    assert a != b
    if differing is not None:
        assert sum(p != q for p, q in zip(a, b, strict=True)) == differing


def test_explicit_axes_do_not_change_a_program():
    """There JAX notes shardings of arrays in its types."""
    mesh = jax.make_mesh((8,), ("x",))
    f = sbp.jit(lambda x: jnp.broadcast_to(x.sum(0), (8, 8)) * 2, mesh)
    x = jax.device_put(jnp.ones((8, 8)), jax.NamedSharding(mesh, jax.P("x")))
    with jax.set_mesh(mesh):
        inside = digests(f.trace(x).request.graph)
    assert inside == digests(f.trace(X).request.graph)


def test_arrays_that_a_program_closes_over_count_by_shape():
    a, b, c = jnp.ones((8, 8)), jnp.zeros((8, 8)), jnp.ones((8, 1))
    assert digests_of(lambda x: x + a) == digests_of(lambda x: x + b) != digests_of(lambda x: x + c)
