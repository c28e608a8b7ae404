"""A value that is read in several types is converted along a tree; what its search leaves out is
said. The text of a plan: each collective has its line with its bytes, and registers are numbered in
order."""

import itertools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import sbp
from sbp.plan.saved import SavedPlan
from tests.report.programs import PROGRAMS, plan

AXES = (("data", 2), ("model", 4))
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


@pytest.mark.parametrize("count", [4, 5, 9])
def test_one_order_of_conversions_is_said(count):
    plan = sbp.jit(read_in(count), jax.sharding.AbstractMesh((2, 4), ("data", "model"))).plan(
        jax.ShapeDtypeStruct((8, 8, 8), jnp.float32)
    )
    assert plan.program.unordered_values == (count > 4)
    text = "sbp tried only one order for the conversions of 1 value to more than 4 types"
    assert (text in plan.report().text(400)) == (count > 4)


@pytest.mark.parametrize("count", [3, 9])
def test_the_tree_gives_every_reader_its_value(count):
    x = jnp.asarray(np.random.default_rng(0).standard_normal((8, 8, 8)), jnp.float32)
    mesh = sbp.make_mesh([n for _, n in AXES], [name for name, _ in AXES])
    np.testing.assert_allclose(
        sbp.jit(read_in(count), mesh)(x), read_in(count)(x), rtol=2e-5, atol=2e-5
    )


# ---- the text of a plan --------------------------------------------------------------------------

SENT = re.compile(r"\)  (\S+) B(?:  #|$)")
REGION = re.compile(r"= (scan|while|cond)\(.*\)  (\d+) trips?")


def sent(lines):
    """The bytes that the lines of a program or of a body say, each body as often as it runs."""
    total = 0.0
    for line in lines:
        if line.strip() == "}":
            break
        if found := SENT.search(line):
            total += float(found[1])
        if found := REGION.search(line):
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


def planned_over(names):
    f = sbp.jit(
        lambda w, x: jnp.tanh(x @ w).sum(0),
        jax.sharding.AbstractMesh((2, 4), names),
        in_types=(jax.sharding.PartitionSpec(None, names[1]), jax.sharding.PartitionSpec(names[0])),
    )
    x = jax.ShapeDtypeStruct((64, 64), jnp.float32)
    return f.plan(x, x)


@pytest.mark.parametrize(
    "names", [("1", "a-b"), ("d.x", "compute"), ("α", "S"), ("@", "a/b"), ("𝔡", "P")]
)
def test_names_of_mesh_axes(names):
    program = planned_over(names).program
    saved = SavedPlan.loads(SavedPlan.of(program).dumps())
    assert str(saved.program_for(program.request)) == str(program)
    t = sbp.NdSbp({names[0]: sbp.S(0), names[1]: sbp.P})
    assert sbp.parse(str(t), mesh_axes=names) == t
