"""The text form of plans: it parses back, numbers registers in order, and says where a text is
wrong."""

import re

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import PartitionSpec

import sbp
from sbp.errors import SbpError
from sbp.plan.parse import parse_listing
from sbp.plan.text import ListedConversion, ListedOperation, ListedRegion, listing
from tests.report.programs import PROGRAMS, plan


def all_lines(body):
    for line in body.lines:
        yield line
        if isinstance(line, ListedRegion):
            for inner in line.bodies:
                yield from all_lines(inner)


@pytest.mark.parametrize("name", list(PROGRAMS))
def test_round_trip(name):
    made = listing(plan(name).program)
    assert parse_listing(str(made)) == made
    assert str(parse_listing(str(made))) == str(made)


@pytest.mark.parametrize("name", list(PROGRAMS))
def test_bytes_of_the_lines_add_up(name):
    made = listing(plan(name).program)

    def sent(body, times):
        total = 0.0
        for line in body.lines:
            if isinstance(line, ListedConversion):
                total += line.bytes_sent * times
            elif isinstance(line, ListedRegion):
                inner = [sent(inner, times * line.trips) for inner in line.bodies]
                total += (
                    max(inner) if line.op == "cond" else sum(inner)
                )  # one branch runs; the dearest counts
        return total

    assert sent(made.body, 1) == pytest.approx(made.bytes_per_device)


def test_registers_are_numbered_in_order_of_appearance():
    text = str(listing(plan("layers").program))
    numbers = [int(n) for n in re.findall(r"%(\d+): ", text)]
    assert numbers == list(range(len(numbers)))
    names = re.findall(r"(%\d+'*): ", text)
    assert len(names) == len(set(names))


def test_what_a_listing_says():
    made = listing(plan("megatron").program)
    kinds = [type(line) for line in all_lines(made.body)]
    assert kinds.count(ListedConversion) == 1
    (reduction,) = (line for line in made.body.lines if isinstance(line, ListedConversion))
    assert (reduction.kind, reduction.mesh_axes, reduction.bytes_sent) == (
        "all_reduce",
        ("model",),
        1536.0,
    )
    assert reduction.result.name == reduction.operand + "'"
    assert re.fullmatch(r"needed by tanh at \S+/programs\.py:30", reduction.comment)
    assert [v.argument for v in made.body.inputs] == ["x", "w_in", "w_out"]


def test_regions_hold_their_trips_and_bodies():
    scans = [
        line
        for line in all_lines(listing(plan("layers").program).body)
        if isinstance(line, ListedRegion)
    ]
    assert [(s.op, s.trips, len(s.bodies)) for s in scans] == [("scan", 6, 1), ("scan", 6, 1)]
    (loop,) = (
        line
        for line in all_lines(listing(plan("iterate").program).body)
        if isinstance(line, ListedRegion)
    )
    assert (loop.op, len(loop.bodies)) == ("while", 2)
    (branch,) = (
        line
        for line in all_lines(listing(plan("choose").program).body)
        if isinstance(line, ListedRegion)
    )
    assert (branch.op, branch.trips, len(branch.bodies)) == ("cond", 1, 2)


TEXT = """plan data=2 model=4 boxing=auto 448 B per device {
  input %0: f32[16,32] model:S(1)  # u
  input %1: f32[32,8] model:S(0)
  %2: f32[16,8] model:P(sum) = dot_general(%0, %1)  # at ffn.py:12
  %2': B = all_reduce[model](%2)  448 B  # needed by tanh at ffn.py:13
  %3: f32[16,8] B, %4: i32[] B = cond(0:i32, %2', -0.5:f32, const:bf16[4]{data:S(0)})  1 trip
  {
    input %5: f32[16,8] B
    %6: key<fry>[] B = random_wrap<data=halo, model=mask>(%5, nan:f32, True:bool)
    debug_print()
    return %5, 1:i32
  }
  return %3
}"""


def test_hand_written_text():
    made = parse_listing(TEXT)
    assert str(made) == TEXT
    operation, _, region = made.body.lines
    assert isinstance(operation, ListedOperation) and isinstance(region, ListedRegion)
    assert region.operands == ("0:i32", "%2'", "-0.5:f32", "const:bf16[4]{data:S(0)}")
    first = region.bodies[0].lines[0]
    assert isinstance(first, ListedOperation)
    assert first.kernels == ("data=halo", "model=mask")


@pytest.mark.parametrize(
    ("old", "new", "line", "expected"),
    [
        ("plan data=2", "plan data=two", 1, "plan AXIS=SIZE"),
        ("%0: f32[16,32] model:S(1)", "%0 f32[16,32] model:S(1)", 2, "%NUMBER: SHAPE TYPE"),
        ("model:S(1)  # u", "modle:S(1)  # u", 2, "no axis 'modle'"),
        ("model:P(sum) =", "model:P(sun) =", 4, "a monoid"),
        ("dot_general(%0, %1)", "dot_general(%0, %9)", 4, "defined above, not %9"),
        ("dot_general(%0, %1)", "dot_general(%0 %1)", 4, "RESULTS = OPERATION(OPERANDS)"),
        ("448 B  #", "many B  #", 5, "a number"),
        ("all_reduce[model](%2)", "all_reduce(%2)", 5, "COLLECTIVE[AXES]"),
        ("    return %5, 1:i32\n", "", 11, "RESULTS = OPERATION"),
        ("  return %3\n}", "  return %3", 14, "}"),
        ("return %3\n}", "return %3\n}\nmore", 15, "nothing after"),
        ("(%5, nan:f32", "(%0, nan:f32", 9, "defined above, not %0"),
    ],
)
def test_errors_name_the_line(old, new, line, expected):
    assert TEXT.count(old) == 1
    with pytest.raises(SbpError) as caught:
        parse_listing(TEXT.replace(old, new))
    assert caught.value.code == "type-syntax"
    assert caught.value.message.startswith(f"plan text does not parse at line {line}: ")
    assert expected in caught.value.message


def test_an_empty_text_is_an_error():
    with pytest.raises(SbpError, match="line 1"):
        parse_listing("")


def test_stages_and_wide_sums_parse_back():
    head = "plan d=16 boxing=auto 0 B per device {"
    for how in ("in stages of 4 and 4", "float32 along dim 0"):
        line = f"  %0': d:S(0) = reduce_scatter[d; {how}](%0)  0 B"
        text = "\n".join([head, "  input %0: f32[64] d:P(sum)  # a", line, "  return %0'", "}"])
        assert str(parse_listing(text)) == text
    with pytest.raises(SbpError, match="line 3"):
        parse_listing(text.replace("float32 along dim 0", "in stages of 4"))


def planned_over(names):
    mesh = jax.sharding.AbstractMesh((2, 4), names)
    f = sbp.jit(
        lambda w, x: jnp.tanh(x @ w).sum(0),
        mesh,
        in_types=(PartitionSpec(None, names[1]), PartitionSpec(names[0])),
    )
    x = jax.ShapeDtypeStruct((64, 64), jnp.float32)
    return f.plan(x, x)


@pytest.mark.parametrize(
    "names", [("1", "a-b"), ("d.x", "compute"), ("α", "S"), ("@", "a/b"), ("𝔡", "P")]
)
def test_names_of_mesh_axes(names):
    made = listing(planned_over(names).program)
    assert parse_listing(str(made)) == made
    t = sbp.NdSbp({names[0]: sbp.S(0), names[1]: sbp.P})
    assert sbp.parse(str(t), mesh_axes=names) == t
