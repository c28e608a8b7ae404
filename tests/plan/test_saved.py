"""A saved plan is the plan again, and one that was changed is refused."""

import dataclasses
import itertools
import json
import math
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import sbp
from sbp.plan.saved import SavedPlan, _seal, digests, write_file
from tests.plan import test_peak as peak, test_reuse as reuse, test_saving as saving
from tests.report.programs import PROGRAMS, plan
from tests.run.programs import CASES, NAMES, function_of
from tests.same import checked_plan, refused

MESHES = [(8,), (2, 4), (2, 2, 2)]


def planned(name, sizes):
    case = next(c for c in CASES if c.name == name)
    mesh = jax.sharding.AbstractMesh(sizes, NAMES[: len(sizes)])
    shapes = [jax.ShapeDtypeStruct(s, jnp.float32) for s in case.shapes]
    return sbp.jit(function_of(case, mesh.axis_names), mesh).plan(*shapes).program


@pytest.fixture(scope="module")
def programs():
    found = {f"{c.name} {s}": planned(c.name, s) for c in CASES[::3] for s in MESHES}
    remat = {"remat": saving.plan("scanned").program}
    return found | {name: plan(name).program for name in PROGRAMS} | remat


def test_a_saved_plan_is_the_plan_again(programs):
    assert programs["remat"].removed
    others = {"fastest": peak.plan(**peak.LARGE), "declined": reuse.plan()}
    for name, program in (programs | {k: p.program for k, p in others.items()}).items():
        saved = SavedPlan.of(program)
        again = SavedPlan.loads(saved.dumps()).program_for(program.request)
        assert str(again) == str(program), name
        assert (again.cost, again.faster) == (program.cost, program.faster), name
        assert (again.declined, again.typing.lower_bound) == (
            program.declined,
            program.typing.lower_bound,
        )
        assert SavedPlan.of(again) == saved, "saving is the same a second time"
    fastest = others["fastest"].program
    inside = fastest.within(fastest.request)
    assert fastest.faster and inside and inside.faster is None


def test_folders_whose_names_are_no_utf_8(tmp_path):
    plan = SavedPlan.of(planned(CASES[0].name, (8,)))
    saved = dataclasses.replace(plan, lines=("x  # a/\udce9/é.py:1",))
    write_file(tmp_path / "plan.json", saved.dumps())
    text = (tmp_path / "plan.json").read_text("utf-8")
    assert "é.py" in text and SavedPlan.loads(text) == saved


changed = lambda saved, **fields: SavedPlan.loads(dataclasses.replace(saved, **fields).dumps())


EDITS = (
    (": B = ", ": data:P(sum) = "),
    ("data:S(0)", "data:S(1)"),
    ("model:S(1)", "model:P(sum)"),
    (" B ", " P "),
    ("all_reduce", "slice"),
)


def test_every_line_of_the_text_is_that_of_the_types(programs):
    """Each line left out, and each type and collective of a line replaced, is refused."""
    program = programs["remat"]
    saved = SavedPlan.of(program)
    for number, line in enumerate(saved.lines):
        for lines in [(), *((line.replace(old, new),) for old, new in EDITS if old in line)]:
            text = (*saved.lines[:number], *lines, *saved.lines[number + 1 :])
            refused(
                r"^saved-plan: .*saved plan",
                lambda text=text: changed(saved, lines=text).program_for(program.request),
            )
    # Lines of source may move.
    moved = tuple(line.replace(".py:", ".py:1") for line in saved.lines)
    assert moved != saved.lines
    assert str(changed(saved, lines=moved).program_for(program.request)) == str(program)


def places(x, path=()):
    """Every part of a file with its path."""
    items = x.items() if isinstance(x, dict) else enumerate(x) if isinstance(x, list) else ()
    for key, inner in items:
        yield (*path, key), inner
        yield from places(inner, (*path, key))


def edit(whole, path, value):
    """A copy of a part of a file with another value at a place."""
    whole = json.loads(json.dumps(whole))
    here, (*keys, last) = whole, path
    for key in keys:
        here = here[key]
    here[last] = value
    return whole


def test_removed_conversions_have_to_be_repeats(programs):
    program = programs["remat"]
    saved = SavedPlan.of(program)
    value, _, *rest = saved.removed[0]
    removed = ((value, value - 1, *rest),)
    sealed = changed(saved, removed=removed, seal=_seal(saved.figures, removed))
    refused("conversions that this program does not repeat", sealed.program_for, program.request)


# ---- edited files ------------------------------------------------------------------------------

ROW, GRID = sbp.make_mesh((8,), ("d",)), sbp.make_mesh((2, 4), ("x", "y"))


numbers = lambda *shape: np.random.default_rng(0).normal(size=shape).astype(np.float32)


def reduced(x, w):
    h = sbp.split(x, 1, "d") @ sbp.split(w, 0, "d")
    return jnp.tanh(sbp.replicate(h, "d"))


def carried(c, xs, w):
    def body(c, x):
        c = jnp.tanh(c @ w + x)
        return c, (c * 2).sum(0)

    w = sbp.split(w, 0, "y")
    return jax.lax.scan(body, sbp.split(c, 0, "x"), xs)


def gradient(w, x):
    loss = lambda w, x: ((jnp.tanh(x @ w[0]) @ w[1] - x) ** 2).mean()
    w = sbp.split(w[0], 1, "y"), sbp.split(w[1], 0, "y")
    return jax.grad(loss)(w, sbp.split(x, 0, "x"))


def branches(x, i):
    m = sbp.annotate(sbp.split(x, 1, "y").max(1), y=sbp.P("max"))
    y = jax.lax.cond(i > 0, lambda a: a.sum(0), lambda a: -a.max(0), sbp.split(x, 0, "x"))
    return sbp.replicate(m, "y") * 2, y


def by_hand(x, w):
    specs = jax.P("x", "y"), jax.P("y", None)
    f = jax.shard_map(
        lambda a, b: jax.lax.psum(a @ b, "y"), mesh=GRID, in_specs=specs, out_specs=jax.P("x", None)
    )
    return jnp.tanh(f(x, w)).max(0)


EDITED = {
    "annotation": (reduced, ROW, (numbers(4, 16), numbers(16, 4))),
    "carry": (carried, GRID, (numbers(8, 16), numbers(5, 8, 16), numbers(16, 16))),
    "gradient": (gradient, GRID, ((numbers(8, 32), numbers(32, 8)), numbers(16, 8))),
    "branches": (branches, GRID, (numbers(16, 16), np.int32(1))),
    "by hand": (by_hand, GRID, (numbers(8, 16), numbers(16, 8))),
}


@pytest.mark.parametrize("name", EDITED)
def test_no_choice_can_be_another(name):
    program = sbp.jit(*EDITED[name][:2]).plan(*EDITED[name][2]).program
    saved = SavedPlan.of(program)
    texts = enumerate(map(json.dumps, saved.choices))
    edited = {k: other for k, text in texts if (other := re.sub(r"-?\d+", "0", text)) != text}
    assert edited
    for k, other in edited.items():
        choices = (*saved.choices[:k], json.loads(other), *saved.choices[k + 1 :])
        refused(
            r"^saved-plan: ",
            lambda choices=choices: changed(saved, choices=choices).program_for(program.request),
        )


@pytest.mark.parametrize(
    "value",
    [None, True, 0, -1, 10**400, 1.5, math.nan, math.inf, "x", [], [[]], {}],
    ids=lambda x: repr(x)[:9],
)
def test_each_place_of_a_file_is_checked(value):
    """The file is refused, or the plan is the same but for its figures."""
    fn, mesh, args = EDITED["annotation"]
    program = sbp.jit(fn, mesh).plan(*args).program
    whole = json.loads(SavedPlan.of(program).dumps())
    for path, _ in places(whole):
        edited = edit(whole, path, value)
        edited["seal"] = _seal(edited["figures"], edited["removed"])
        try:
            read = SavedPlan.loads(json.dumps(edited)).program_for(program.request)
        except sbp.SbpError as error:
            assert error.code == "saved-plan", path
        else:
            assert str(read) == str(program), path


# ---- fingerprints -------------------------------------------------------------------------------

MESH = jax.sharding.AbstractMesh((4,), ("x",))
X = jax.ShapeDtypeStruct((8, 8), jnp.float32)


digests_of = lambda fn, *args: digests(sbp.jit(fn, MESH).trace(*(args or (X,))).request.graph)


def test_equal_programs_have_equal_digests():
    one = lambda x: jax.nn.gelu(x @ x).sum()

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
            lambda x: jax.lax.fori_loop(0, 3, lambda _, y: y @ y, x),
            lambda x: jax.lax.fori_loop(0, 4, lambda _, y: y @ y, x),
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


# ---- lowering ------------------------------------------------------------------------------------
# If operations read a value in several types, sbp converts it along a tree. The report says what
# the search for the tree left out. In the text of a plan, each collective has a line with its
# bytes, and the numbers of registers are in order.


TYPES = [
    {"data": a, "model": b}
    for a, b in itertools.product(
        (sbp.B, sbp.S(0), sbp.S(1), sbp.S(2)), (sbp.B, sbp.S(0), sbp.S(1))
    )
]


def read_in(count):
    """A program that reads a tensor in so many types besides its own."""

    def program(x):
        x = sbp.annotate(x, data=sbp.S(2), model=sbp.S(2))
        return sum(jnp.sum(jnp.sin(sbp.annotate(x, **t))) for t in TYPES[:count])

    return program


@pytest.mark.parametrize("count", [3, 4, 5, 9])
def test_one_order_of_conversions_is_said(count):
    """In any order, the tree gives every reader its value."""
    plan = checked_plan(
        read_in(count),
        sbp.make_mesh((2, 4), ("data", "model")),
        np.random.default_rng(0).standard_normal((8, 8, 8)).astype(np.float32),
        rtol=2e-5,
        atol=2e-5,
        hardware="tpu-v3",
    )
    assert plan.program.unordered_values == (count > 4)
    text = "sbp tried only one order for the conversions of 1 value to more than 4 types"
    assert (text in plan.report().text(400)) == (count > 4)


# ---- the text of a plan --------------------------------------------------------------------------

SENT = re.compile(r"\)  (\S+) B(?:  #|$)")


def sent(lines):
    """The bytes that the lines of a program or of a body say, each body as often as it runs."""
    total = 0.0
    for line in lines:
        if line.strip() == "}":
            break
        if found := SENT.search(line):
            total += float(found[1])
        if found := re.search(r"= (scan|while|cond)\(.*\)  (\d+) trips?", line):
            bodies = [sent(lines) for _ in range(1 if found[1] == "scan" else 2) if next(lines)]
            # One branch of a cond runs; the dearest counts.
            total += (max if found[1] == "cond" else sum)(bodies) * int(found[2])
    return total


@pytest.mark.parametrize("name", list(PROGRAMS))
def test_bytes_of_the_lines_add_up(name):
    program = plan(name).program
    assert sent(iter(str(program).splitlines())) == pytest.approx(program.cost.bytes_per_device)


def test_registers_are_numbered_in_order_of_appearance():
    text = str(plan("layers").program)
    numbers = [int(n) for n in re.findall(r"%(\d+): ", text)]
    assert numbers == list(range(len(numbers)))
    names = re.findall(r"(%\d+'*): ", text)
    assert len(names) == len(set(names))


def test_what_a_line_says():
    text = str(plan("megatron").program)
    (line,) = re.findall(r".*all_reduce.*", text)
    reduction, comment = line.split("  # ")
    assert re.fullmatch(r"  (%\d+)': .* = all_reduce\[model\]\(\1\)  1536 B", reduction)
    assert re.fullmatch(r"needed by tanh at \S+/programs\.py:30", comment)
    assert re.findall(r"input .*  # (\w+)", text) == ["x", "w_in", "w_out"]


@pytest.mark.parametrize(
    "names", [("1", "a-b"), ("d.x", "compute"), ("α", "S"), ("@", "a/b"), ("𝔡", "P")]
)
def test_names_of_mesh_axes(names):
    f = sbp.jit(
        lambda w, x: jnp.tanh(x @ w).sum(0),
        jax.sharding.AbstractMesh((2, 4), names),
        in_types=(jax.P(None, names[1]), jax.P(names[0])),
    )
    program = f.plan(*[jax.ShapeDtypeStruct((64, 64), jnp.float32)] * 2).program
    saved = SavedPlan.loads(SavedPlan.of(program).dumps())
    assert str(saved.program_for(program.request)) == str(program)
    t = sbp.NdSbp({names[0]: sbp.S(0), names[1]: sbp.P})
    assert sbp.parse(str(t), mesh_axes=names) == t
