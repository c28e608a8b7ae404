"""The pictures of a program and of its bytes, and its annotated source, show what its plan has."""

import io
import linecache
import math
import re
import sys
from typing import Any
from xml.etree import ElementTree

import jax
import jax.numpy as jnp
import matplotlib.image
import pytest
from rich.cells import cell_len

import sbp
from sbp.plan.program import sends
from sbp.report.device_bytes import MOST_PLACES, matrices
from sbp.report.flows import ProgramFlows, fold, traffic
from sbp.report.pages import SHOWN_CODE, annotated_lines
from sbp.report.parts import NAMESPACE, png_of
from sbp.report.timeline import Schedule, causes
from sbp.report.wording import bytes_text
from tests.cases import GRID as MESH, descent, shape
from tests.same import refused


def layer(x, w_in, w_out):
    h = jax.nn.relu(x @ w_in)
    y = h @ w_out
    return y / jnp.linalg.norm(y)


def loss(weights, x):
    for w_in, w_out in weights:
        x = layer(x, w_in, w_out)
    return jnp.mean(x * x)


WEIGHTS = [(shape(256, 1024), shape(1024, 256))] * 6
TYPES = ([("model:S(1)", "model:S(0)")] * 6, "data:S(0)")


@pytest.fixture(scope="module")
def plan():
    return sbp.jit(descent(loss), MESH, in_types=TYPES, out_types=TYPES[0], boxing="reduce").plan(
        WEIGHTS, shape(64, 256)
    )


lines = lambda function: function.__code__.co_firstlineno


def stop(plan, line, phase):
    stops = ProgramFlows(plan.program).stops
    (found,) = [s for s in stops if s.phase == phase and s.where.endswith(f":{line}")]
    return found


def test_a_partial_value_is_shown_from_its_line_to_its_reduction(plan):
    begins = stop(plan, lines(layer) + 2, "forward")
    assert begins.text == "y = h @ w_out" and begins.born and "model:P(sum)" in repr(begins.type)
    ends = stop(plan, lines(layer) + 3, "forward")
    assert {(t.kind, t.axes) for t in ends.sends if t.reduces and "model" in t.axes} == {
        ("all_reduce", "model")
    }
    assert not stop(plan, lines(layer) + 1, "forward").born


def test_layers_that_python_unrolls_are_one_place_with_their_count(plan):
    assert stop(plan, lines(layer) + 2, "forward").runs == 6
    names = [(s.name, s.phase) for s in ProgramFlows(plan.program).stops]
    assert len(set(names)) == len(names)


def test_each_flow_is_one_of_the_graph(plan):
    flows = ProgramFlows(plan.program)
    assert all(-1 <= f.source < len(flows.stops) and f.source != f.target for f in flows.flows)
    by_line = {(f.source, f.target) for f in flows.flows}
    first = next(n for n, s in enumerate(flows.stops) if s.text.startswith("h = jax.nn.relu"))
    second = next(n for n, s in enumerate(flows.stops) if s.text == "y = h @ w_out")
    assert (first, second) in by_line and (second, first) not in by_line


def test_the_drawing_names_what_the_table_names(plan):
    shown = plan.report().picture(axis="model")
    (svg,) = shown.svg()
    root = ElementTree.fromstring(svg)
    words = [t.text or "" for t in root.iter(f"{{{NAMESPACE}}}text")]
    assert "y = h @ w_out" in words and "forward" in words and "backward" in words
    flows = ProgramFlows(plan.program)
    transfers = sum(len(s.sends) for s in (*flows.stops, flows.results))
    assert len([w for w in words if re.search(r"(all_\w+|reduce_scatter|permute)", w)]) == transfers
    total = sum(s.bytes for s in flows.costliest)
    assert f"{flows.costliest[0].where}: {bytes_text(total)}" in shown.text(400)
    assert all(
        float(box.attrib["x"]) + float(box.attrib["width"]) <= float(root.attrib["width"])
        for box in root.iter(f"{{{NAMESPACE}}}rect")
    ), "a box is cut"


def test_a_picture_as_png_has_its_shapes_and_its_words(plan, monkeypatch):
    shown = plan.report().picture()
    (png,) = shown.png(scale=1)
    pixels = matplotlib.image.imread(io.BytesIO(png))
    (svg,) = shown.svg()
    root = ElementTree.fromstring(svg)
    width, height = (math.ceil(float(root.attrib[name])) for name in ("width", "height"))
    assert pixels.shape[:2] == pytest.approx((height, width), abs=1)
    without = matplotlib.image.imread(io.BytesIO(png_of(re.sub(r"<text.*?</text>", "", svg), 1)))
    assert (pixels[..., :3] < 0.4).sum() > (without[..., :3] < 0.4).sum() + 1000
    monkeypatch.setitem(sys.modules, "resvg_py", None)
    refused(r"install the extra: pip install 'sbp-jax\[png\]'", shown.png)
    refused("a number from", shown.png, scale=-1)


def test_very_many_lines_fold_into_functions():
    body = "".join(f"    x = jnp.tanh(x) * {k + 2}\n" for k in range(20))
    parts = "".join(f"def part{n}(x):\n{body}    return x\n" for n in range(6))
    calls = "".join(f"    x = part{n}(x)\n" for n in range(6))
    source = f"{parts}def many(x):\n{calls}    return x\n"
    space: dict[str, Any] = {"jnp": jnp}
    exec(compile(source, "many_lines.py", "exec"), space)
    made = sbp.jit(space["many"], MESH, in_types=("data:S(0)",)).plan(shape(64, 256))
    assert fold(made.program).grouping == "function"
    assert fold(made.program, "line").grouping == "line"
    assert [s.text for s in fold(made.program).stops] == [f"part{n}" for n in range(6)]
    assert "the program by function" in made.report().picture().text()


def test_branches_of_a_conditional_are_all_shown_and_that_is_said():
    def step(x, w, first):
        h = x @ w
        return jax.lax.cond(first, lambda h: jnp.tanh(h.sum(0)), lambda h: jnp.sin(h.max(0)), h)

    plan = sbp.jit(step, MESH, in_types=("data:S(0)", None, None), boxing="reduce").plan(
        shape(64, 256), shape(256, 1024), shape(dtype=bool)
    )
    found = ProgramFlows(plan.program)
    assert found.called == plan.cost.bytes_per_device and found.bytes > found.called * 1.5
    assert all(
        "This counts all branches of conditionals" in " ".join(str(shown).split())
        for shown in (plan.report().picture(), plan.report().bytes(), plan.report().source())
    )


def test_the_numbers_of_layers_fold_and_others_do_not():
    def step(x):
        for number in range(3):
            with jax.named_scope(f"block_{number}"), jax.named_scope("conv2d"):
                x = jnp.tanh(x)
        with jax.named_scope("fc1"):
            x = jnp.sin(x)
        with jax.named_scope("fc2"):
            return jnp.cos(x)

    plan = sbp.jit(step, MESH, in_types="data:S(0)").plan(shape(64))
    names = [s.name for s in ProgramFlows(plan.program, "scope").stops]
    assert names == ["block_*/conv2d", "fc1", "fc2"]


# ---- where loops begin and end ------------------------------------------------------------------

LAYERS = 6


def gelu_layer(x, pair):
    w_in, w_out = pair
    h = jax.nn.gelu(x @ w_in)
    return h @ w_out, None


scanned_loss = lambda weights, x: jnp.mean(jax.lax.scan(gelu_layer, x, weights)[0] ** 2)


def recurrent(w, xs):
    h, _ = jax.lax.scan(lambda h, x: (jnp.tanh(h @ w + x), None), jnp.zeros_like(xs[0]), xs)
    return jnp.mean(h**2)


@pytest.fixture(scope="module")
def scanned_plan():
    types = (("data:S(1) model:S(2)", "data:S(2) model:S(1)"), "data:S(0)")
    return sbp.jit(descent(scanned_loss), MESH, in_types=types, out_types=types[0]).plan(
        (shape(LAYERS, 256, 1024), shape(LAYERS, 1024, 256)), shape(64, 256)
    )


def test_the_caption_says_what_one_collective_sends(scanned_plan):
    found = [send for s in ProgramFlows(scanned_plan.program).costliest for send in s.sends]
    assert {s.kind for s in found} == {"all_reduce"} and len({s.axes for s in found}) == 2
    over = {a: sum(s.bytes for s in found if s.axes == a) for a in ("data", "model")}
    assert over["data"] > over["model"]
    total, most = (bytes_text(sent) for sent in (sum(over.values()), over["data"]))
    assert f"{total} per device, {most} of them by all_reduce over data" in " ".join(
        scanned_plan.report().picture().text().split()
    )


def test_collectives_over_different_axes_have_different_times(scanned_plan):
    found = [c for c in causes(Schedule(scanned_plan.program)) if c.axes]
    here = [
        c for c in found if c.line[1].endswith(f":{lines(gelu_layer) + 2}") and c.phase == "forward"
    ]
    assert sorted((c.what, c.axes, c.runs) for c in here) == [
        ("all_reduce", ("data",), LAYERS),
        ("all_reduce", ("model",), LAYERS),
    ]


def test_a_line_runs_as_often_as_its_loop_however_many_operations_it_has(scanned_plan):
    assert stop(scanned_plan, lines(gelu_layer) + 2, "forward").runs == LAYERS
    assert stop(scanned_plan, lines(gelu_layer) + 2, "backward").runs == LAYERS


def test_what_converts_the_operand_of_a_loop_stands_at_the_loop(scanned_plan):
    (before,) = [s for s in sends(scanned_plan.program) if not s.regions]
    assert before.runs == 1 and before.node is not None and before.node.op == "scan"
    (sent,) = stop(scanned_plan, lines(scanned_loss), "forward").sends
    assert (sent.kind, sent.axes, sent.runs) == (before.kind, before.axes, 1)
    assert all(s.runs == LAYERS for s in stop(scanned_plan, lines(gelu_layer) + 2, "forward").sends)


def test_the_reduction_of_a_gradient_after_a_loop_belongs_to_the_backward_pass():
    plan = sbp.jit(descent(recurrent), MESH, in_types=("B", "data:S(1)"), out_types="B").plan(
        shape(64, 64), shape(16, 32, 64)
    )
    (after,) = [s for s in sends(plan.program) if s.reduces and not s.regions]
    assert after.reader is not None and not after.reader.backward
    assert after.phase == "backward" and after.runs == 1
    assert {phase for _, phase in ProgramFlows(plan.program).sums(lambda s: s.phase)} == {
        "backward"
    }


def test_the_picture_and_the_source_name_the_same_line(scanned_plan):
    most = max(annotated_lines(scanned_plan.program), key=lambda a: a.bytes_per_device)
    (name,) = {s.name for s in ProgramFlows(scanned_plan.program).costliest}
    assert name == f"{most.file}:{most.line}"
    assert f"for line {ProgramFlows(scanned_plan.program).costliest[0].where}" in " ".join(
        scanned_plan.report().picture().text().split()
    )


# ---- bytes by mesh axis, phase and place --------------------------------------------------------


def scoped_loss(weights, x):
    for number, (w_in, w_out) in enumerate(weights):
        with jax.named_scope(f"layer_{number}"):
            x = jax.nn.relu(x @ w_in) @ w_out
    with jax.named_scope("loss"):
        return jnp.mean(x * x)


def scoped_step(weights, x):
    grads = jax.grad(scoped_loss)(weights, x)
    with jax.named_scope("sgd"):
        return jax.tree.map(lambda w, g: w - 0.1 * g, weights, grads)


@pytest.fixture(scope="module")
def scoped_plan():
    types = (TYPES[0][:3], "data:S(0)")
    return sbp.jit(scoped_step, MESH, in_types=types, out_types=types[0], boxing="reduce").plan(
        WEIGHTS[:3], shape(64, 256)
    )


by_moment = lambda found: found.sums(lambda stop: stop.phase)


def listed(program):
    """Bytes that the plan's conversions list, by their mesh axes, times their trips."""
    found = {}
    for planned in program.boxes():
        for one in planned.box.steps:
            names = ", ".join(program.mesh.names[k] for k in one.mesh_axes)
            found[names] = found.get(names, 0.0) + one.bytes_sent * planned.trips
    return {names: bytes_ for names, bytes_ in found.items() if bytes_}


@pytest.mark.parametrize("which", ["plan", "scanned_plan", "scoped_plan"])
@pytest.mark.parametrize("grouping", [None, "line", "function", "scope"])
def test_sums_are_those_of_the_plan(which, grouping, request):
    program = request.getfixturevalue(which).program
    found = traffic(program) if grouping is None else ProgramFlows(program, grouping)
    assert found.bytes == pytest.approx(program.cost.bytes_per_device, rel=1e-12)
    by_axes = {}
    for (axes, _), bytes_ in by_moment(found).items():
        by_axes[axes] = by_axes.get(axes, 0.0) + bytes_
    assert by_axes == pytest.approx(listed(program), rel=1e-12)
    for matrix in matrices((found,)):
        assert sum(matrix.plans[0].values()) == pytest.approx(found.bytes, rel=1e-12)
        assert {r for r, _ in matrix.plans[0]} == set(matrix.rows)
        assert {c for _, c in matrix.plans[0]} == set(matrix.columns)


def test_gradients_are_summed_over_data_once_per_weight(scoped_plan):
    """An all-reduce over two devices sends the whole of its operand once: a quarter of a weight."""
    assert by_moment(traffic(scoped_plan.program))["data", "backward"] == pytest.approx(
        2 * 3 * 256 * 1024 * 4 / 4
    )


def test_bytes_of_the_backward_pass_are_of_what_its_operations_read_and_of_gradients(scoped_plan):
    read = sum(
        one.bytes_sent * planned.trips
        for planned in scoped_plan.program.boxes()
        if any(n is not None and n.backward for n in (planned.box.reader, planned.box.maker))
        for one in planned.box.steps
    )
    sums = by_moment(traffic(scoped_plan.program))
    assert read > 0
    assert sum(b for (_, m), b in sums.items() if m == "backward") == pytest.approx(read)


def test_two_plans_stand_side_by_side(scoped_plan):
    other = sbp.jit(scoped_step, MESH, in_types=("B", "data:S(0)")).plan(
        WEIGHTS[:3], shape(64, 256)
    )
    both = traffic(scoped_plan.program), traffic(other.program)
    text = " ".join(scoped_plan.report().bytes(other.report()).text().split())
    mine, theirs = (bytes_text(one.bytes) for one in both)
    assert f"{mine} in all by this plan, {theirs} by the other" in text
    assert all(
        sum(sums.values()) == pytest.approx(one.bytes, rel=1e-12)
        for matrix in matrices(both)
        for sums, one in zip(matrix.plans, both, strict=True)
    )


def test_many_places_are_added_up_in_one_row():
    def many(x, w):
        for k in range(MOST_PLACES + 4):
            with jax.named_scope("s" + chr(ord("a") + k)):
                x = jnp.tanh(x @ w)
        return x

    made = sbp.jit(many, MESH, in_types=("model:S(1)", "model:S(0)"), boxing="reduce")
    found = traffic(made.plan(shape(64, 64), shape(64, 64)).program)
    _, by_place = matrices((found,))
    assert len(found.places) > MOST_PLACES
    assert len(by_place.rows) == MOST_PLACES + 1 and "other place" in by_place.rows[-1]
    assert sum(by_place.plans[0].values()) == pytest.approx(found.bytes, rel=1e-12)


def test_a_plan_that_sends_nothing_says_so():
    made = sbp.jit(jnp.tanh, MESH, in_types=("data:S(0)",)).plan(shape(64, 64))
    assert "no device sends anything" in made.report().bytes().text()


# ---- the annotated source -----------------------------------------------------------------------
# `report.source()`: lines of the user with their types and bytes.


SOURCE = f"""def layer(x, w_in, w_out):
    x = sbp.split(x, 0, "data")
    h = jax.nn.relu(x @ sbp.split(w_in, 1, "model"))
    مرحبا = sbp.partial(h @ w_out, "model")  # العربية
    漢字 = sbp.replicate(مرحبا, "model")
    return 漢字 * {" + ".join(["2.0"] * 40)}
"""


def report_of(source, file):
    """The report on `layer` of a source text; without a file name the text is not at hand."""
    if file:
        linecache.cache[file] = (len(source), None, source.splitlines(keepends=True), file)
    names: dict[str, Any] = {"jax": jax, "sbp": sbp}
    exec(compile(source, file or "<nothing>", "exec"), names)
    return sbp.jit(names["layer"], MESH).plan(shape(8, 16), shape(16, 32), shape(32, 16)).report()


@pytest.fixture(scope="module")
def annotated():
    return report_of(SOURCE, "<annotated>")


def test_lines_have_the_types_that_the_annotations_imply(annotated):
    makes = {a.line: dict(a.makes) for a in annotated_lines(annotated.program)}
    assert [makes[line] for line in range(2, 6)] == [
        {"x": "data:S(0)"},
        {"h": "data:S(0) model:S(1)"},
        {"مرحبا": "data:S(0) model:P(sum)"},
        {"漢字": "data:S(0)"},
    ]
    # Four devices of the axis add float32[4,16], by a ring: 2 * 3/4 of its bytes.
    sent = {a.line: a.bytes_per_device for a in annotated_lines(annotated.program)}
    assert sent[5] == 2 * 3 / 4 * 4 * 16 * 4 == annotated.program.cost.bytes_per_device
    assert not any(count for line, count in sent.items() if line != 5)


@pytest.mark.parametrize("width", [80, 200])
def test_text_keeps_its_width(annotated, width):
    lines = annotated.source().lines(width)
    assert max(map(cell_len, lines)) <= width
    text = "\n".join(lines)
    assert "漢字:" in text and "> 5" in text and "100%" in text


def test_a_long_line_is_cut_with_dots(annotated):
    (cut,) = (line for line in annotated.source().lines(200) if "漢字 * 2.0" in line)
    assert " .." in cut and cut.count("2.0") < 40 and len(SOURCE.splitlines()[-1]) > SHOWN_CODE


def test_html_has_the_same_facts(annotated):
    page = annotated.source().html()
    assert "漢字" in page and "data:S(0) model:P(sum)" in page and "<script" not in page


def test_a_program_without_source_is_readable():
    text = report_of(SOURCE, "").source().text(80)
    assert "(no source at hand)" in text and "data:S(0) model:P(sum)" in text


def test_markup_in_the_source_is_escaped():
    page = report_of(SOURCE.replace("# العربية", "# <b>&amp;`x`"), "<marked>").source().html()
    assert "<b>&amp;" not in page and "&lt;b&gt;&amp;amp;" in page
