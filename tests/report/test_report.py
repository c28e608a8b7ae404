"""Reports: exact texts; the same facts in terminal and HTML, the same bytes in every process."""

import dataclasses
import functools
import html
import io
import re
from collections import Counter
from pathlib import Path

import jax
import pytest
import rich
from rich.cells import cell_len
from rich.console import Console

import sbp
from sbp.errors import SbpError, SbpTypeError, seconds_text
from sbp.explain.origins import ConversionNeed
from sbp.explain.subjects import AtomChange, ValueName
from sbp.report.facts import collectives
from sbp.report.parts import words
from sbp.report.rendering import wrap
from sbp.report.report import Report, render_error
from sbp.report.wording import bytes_text, full_need_text
from tests.explain.answers import planned, shape
from tests.report import golden, why_programs
from tests.report.golden import assert_golden
from tests.report.programs import MESH, PROGRAMS, plan
from tests.report.samples import DIAGNOSTICS, remember_sources
from tests.same import printed_under_all_hash_seeds, refused

ROOT = Path(__file__).parents[2]


@pytest.fixture(autouse=True)
def _sources():
    remember_sources()


def report_of(name, diagnostics=()):
    made = plan(name)
    return Report(
        program=made.program,
        diagnostics=diagnostics,
        title=name,
        output_names=made.results.names,
    )


REFUSED = Report(program=None, diagnostics=DIAGNOSTICS, title="ffn")

# ---- exact texts --------------------------------------------------------------------------------


def masked(text):
    """The text without the figures that depend on how JAX traces a gradient, because versions of
    JAX differ in this."""
    figures = (
        r"(?<=peak memory    )\S+ \S+|(?<=modelled time  )\S+ \S+|\d+(?= local operations?;)"
        r"|(?<=than )\d\S*(?=% cheaper)|(?<=modelled step over time: )[^%]+(?=% of it spent)"
        r"|(?<=longest collective takes )\d+(?=%: \w+ over [\w, ]+ for\s+the gradient)"
    )
    text = re.sub(r"(>(?:peak memory|modelled time)</dt> <dd[^>]*>)[^<]+", r"\1#", text)
    return re.sub(figures, "#", re.sub(r'(<div class="picture"[^>]*>).*?(?=</div>)', r"\1#", text))


@pytest.mark.parametrize("name", ["chain", "megatron_step", "layers", "choose", "local"])
def test_golden_text(name):
    report = report_of(name)
    assert_golden(
        f"{name}.txt", masked(f"{report.text(100)}\n\n---- short\n\n{report.short().text(100)}\n")
    )


def test_golden_html():
    assert_golden(
        "megatron_step.html",
        masked(report_of("megatron_step", DIAGNOSTICS[2:3]).html(standalone=True)),
    )


def test_golden_findings():
    assert_golden("findings.txt", REFUSED.text(110) + "\n")
    assert_golden("findings.html", REFUSED.html())


def test_a_missing_golden_file_fails(tmp_path, monkeypatch):
    monkeypatch.setattr(golden, "FOLDER", tmp_path)
    monkeypatch.delenv("SBP_UPDATE_GOLDEN", raising=False)
    with pytest.raises(AssertionError, match="is missing"):
        assert_golden("nowhere.txt", "text")
    monkeypatch.setenv("SBP_UPDATE_GOLDEN", "1")
    assert_golden("nowhere.txt", "text")


# ---- terminal and HTML --------------------------------------------------------------------------


UNREAD = re.compile(
    r'<(style|title)\b.*?</\1>|<(\w+) class="(?:rest|unseen)".*?</\2>|<[^>]*>', re.DOTALL
)
"""Parts of an HTML page that are not words: styles, hidden elements, and tags."""


def html_facts(text):
    """The words of an HTML page in order."""
    return facts_of(html.unescape(UNREAD.sub("", text)))


def facts_of(text):
    return [w for w in text.replace("`", "").split() if not re.fullmatch(r"[-^|=:>█▏▎▍▌▋▊▉]+", w)]


WIDE = 10_000


@pytest.mark.parametrize("name", [*PROGRAMS, "a refusal"])
def test_terminal_and_html_carry_the_samefacts_of(name):
    report = report_of(name, DIAGNOSTICS) if name in PROGRAMS else REFUSED
    for shown in (report, report.short()):
        assert html_facts(shown.html()) == facts_of(shown.text(WIDE))


@pytest.mark.parametrize("width", [60, 80, 120])
@pytest.mark.parametrize("name", list(PROGRAMS))
def test_lines_fit(name, width):
    text = report_of(name, DIAGNOSTICS).text(width)
    assert not [line for line in text.splitlines() if cell_len(line) > width]


@pytest.mark.parametrize("width", [40, 80])
def test_a_long_line_is_shown_at_its_mark(width):
    mesh = sbp.make_mesh((8,), ("d",))
    # The line is longer than the terminal, as it has to be here.
    total = lambda x: (1 + 1 + 1 + 1 + 1 + 1 + 1 + 1 + 1 + 1) * jax.numpy.sum(x).astype(jax.numpy.float32)  # noqa: E501  # fmt: skip
    region = jax.shard_map(
        total, mesh=mesh, in_specs=jax.P("d"), out_specs=jax.P(), check_vma=False
    )
    lines = sbp.check_shard_map(region, shape(8), mesh=mesh).text(width).splitlines()
    assert not [x for x in lines if cell_len(x) > width and "-->" not in x]
    number, line = next((n, x) for n, x in enumerate(lines) if "…" in x)
    marked = range(lines[number + 1].index("^"), lines[number + 1].rindex("^") + 1)
    assert line[marked[0] : marked[-1] + 1] == "jax.numpy.sum(x)"


def test_what_prints_a_report_has_the_width_of_its_terminal(monkeypatch):
    report, console = report_of("megatron", DIAGNOSTICS), rich.get_console()
    monkeypatch.setattr(console, "_force_terminal", True)
    for columns, width in ((80, 80), (30, 40)):
        monkeypatch.setattr(console, "_width", columns)
        assert str(report) == report.text(width)


@pytest.mark.parametrize(
    ("share", "said"),
    [
        (1.0, "the types are proved cheapest in the cost model"),
        (0.8, "no others are more than 20.0% cheaper in the cost model"),
        (0.99999, "no others are more than 0.1% cheaper in the cost model"),
        (0.0, "the cheapest that sbp found; sbp does not know how much cheaper others may be"),
    ],
)
def test_the_bound_of_a_choice_is_said(share, said):
    program = plan("chain").program
    typing = program.typing
    bounded = dataclasses.replace(typing, lower_bound=share * typing.seconds)
    assert said in Report(program=dataclasses.replace(program, typing=bounded)).text(WIDE)


def many(count):
    """The plan of a program with so many inputs, annotations and reductions, each on its line."""
    args = ", ".join(f"x{k}" for k in range(count))
    lines = [f"    y{k} = sbp.annotate(x{k} @ x{k}.T, 'B')\n" for k in range(count)]
    returned = ", ".join(f"y{k}" for k in range(count))
    source = f"def f({args}):\n{''.join(lines)}    return {returned}\n"
    shapes = [shape(8, 16 + 16 * k) for k in range(count)]
    return planned(source, shapes, in_types=("model:S(1)",) * count, out_types="B")


def test_large_programs_fold():
    made = many(18)
    report = Report(program=made.program)
    text = report.text(WIDE)
    assert len(collectives(made.program)) == 18
    folded = (
        "and 6 more groups: 7.9 KiB per device",  # the smallest collectives
        "and 2 smaller ones: 384.0 B per device",  # inputs
        "and 2 smaller ones: 512.0 B per device",  # outputs
    )
    assert [said for said in folded if said not in text] == []
    assert re.search(r"18 annotated tensors\n(.*\n){17} +and 2 more\n", text)
    assert html_facts(report.html()) == facts_of(text) and "made by input x0;" not in text
    assert "made by input x0;" in report.html()  # the folded rows are there
    assert "more group" not in Report(program=many(12).program).text(WIDE)
    short = Report(program=many(9).program).short().text(WIDE)  # it shows those of eight lines
    assert re.search(r"and 1 more group: \d+\.\d (B|KiB) per device", short)


def test_the_layer_that_differs_is_named_first():
    def step(layers, x):
        return jax.grad(lambda w: functools.reduce(jax.numpy.dot, w, x).sum())(layers)

    pins = ["model:S(1)"] * 5
    assert "layers differ" not in str(planned_layers(step, pins))
    pins[3] = "model:S(0)"
    shown = str(planned_layers(step, pins)).splitlines()[4]
    assert shown.startswith("layers differ: `layers[3]` is model:S(0); in 4 other layers it is")


def planned_layers(step, pins):
    layers = [shape(256, 256)] * len(pins)
    return sbp.jit(step, MESH, in_types=(pins, "B")).plan(layers, shape(64, 256)).report()


def test_html_stands_alone():
    text = report_of("megatron_step").html(standalone=True)
    assert not [
        word for word in ("<script", "http:", "https:", "<link", "<img", "onclick") if word in text
    ]


def test_rich_consoles_and_plain_text_agree():
    report = report_of("megatron_step", DIAGNOSTICS[:1])
    for shown in (report, report.short()):
        plain = io.StringIO()
        Console(file=plain, width=100).print(shown)
        assert "\n".join(line.rstrip() for line in plain.getvalue().splitlines()) == shown.text(100)
    styled = io.StringIO()
    Console(file=styled, width=100, force_terminal=True).print(report)
    assert "\x1b[" in styled.getvalue()


@pytest.mark.parametrize(
    "make",
    [
        lambda: report_of("chain"),
        lambda: why_programs.plan("accumulated_step").why("total"),
        lambda: plan("chain").diff(plan("chain")),
    ],
    ids=["report", "answer", "difference"],
)
def test_notebooks_get_both(make):
    shown = make()
    assert str(shown) == repr(shown) == shown.text() and shown._repr_html_() == shown.html()
    assert shown._repr_mimebundle_() == {"text/plain": shown.text(), "text/html": shown.html()}


# ---- what is said -------------------------------------------------------------------------------


@pytest.mark.parametrize("shown", ["picture", "bytes", "timeline", "memory", "source"])
def test_a_refused_program_has_no_pictures(shown):
    refused("no plan", getattr(REFUSED, shown))


def test_the_cost_of_the_plan():
    text, cost = report_of("chain").text(), plan("chain").cost
    figures = (
        f"sent per call  {bytes_text(cost.bytes_per_device)} per device",
        f"peak memory    {bytes_text(cost.peak_memory_bytes)} per device",
        f"modelled time  {seconds_text(cost.seconds)}\n",
        "2 local operations; boxing `auto`",
    )
    assert [said for said in figures if said not in text] == []


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("megatron", "made by dot_general `h @ w_out` at"),
        (
            "megatron",
            "needed by tanh `jnp.tanh(y)` at tests/report/programs.py:30, which has no row for"
            " P(sum)",
        ),
        ("iterate", "sbp does not know the trip count of a while loop"),
    ],
)
def test_reasons_are_said(name, said):
    assert said in report_of(name).text(200)


def test_no_absolute_path_is_shown(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    text = report_of("megatron").text(200)
    assert str(ROOT) not in text and "report/programs.py:30" in text


def test_bytes_and_times_read_well():
    assert [bytes_text(n) for n in (0, 448, 1023, 1024, 1536, 2**20 - 1, 3 * 2**30, 2**41)] == [
        "0.0 B",
        "448.0 B",
        "1023.0 B",
        "1.0 KiB",
        "1.5 KiB",
        "1.0 MiB",
        "3.0 GiB",
        "2.0 TiB",
    ]
    assert [seconds_text(s) for s in (2.5, 0.0123, 4.56e-6, 7e-11)] == [
        "2.5 s",
        "12.3 ms",
        "4.56 us",
        "0.07 ns",
    ]


def test_code_in_a_sentence_is_not_broken():
    assert wrap("made by `x @ w` at a.py:1", 12) == ["made by", "`x @ w` at", "a.py:1"]
    assert max(map(cell_len, wrap("一 二 三", 5))) <= 5


def test_errors_render_as_lines():
    lines = render_error(SbpTypeError(DIAGNOSTICS[:1]))
    assert lines[0].startswith("error[no-signature]: ")
    assert lines[-1] == "   = more: sbp explain no-signature"
    lines = render_error(
        SbpError(
            "type text does not parse at column 3", code="type-syntax", details=("dat",), column=2
        )
    )
    assert lines[0] == "error[type-syntax]: type text does not parse at column 3"
    assert lines[-1].endswith("= more: sbp explain type-syntax")


# ---- determinism --------------------------------------------------------------------------------

_PRINT_ALL = """
from tests.explain.test_why import ASKED
from tests.report import why_programs
from tests.report.programs import PROGRAMS, plan
from sbp.report.report import Report
for name in PROGRAMS:
    made = plan(name)
    report = Report(program=made.program, title=name, output_names=made.results.names)
    texts = report.text(100), report.short().text(80), report.html(), made.program
    print(*texts, sep="\\n")
for name in ("accumulated_step", "parallel_block"):
    made, asked = why_programs.plan(name), ASKED[name]
    answers = (made.why(a).html() + made.why(a).text() for a in asked)
    print(*answers, made.diff(why_programs.plan("accumulated_step")), sep="\\n")
"""


def test_output_does_not_depend_on_the_hash_seed():
    assert len(printed_under_all_hash_seeds(_PRINT_ALL)) > 15_000


def test_what_a_manual_region_sends_is_listed():
    product = sbp.manual(
        lambda x, w: jax.lax.psum(x @ w, "model"),
        in_types=("model:S(1)", "model:S(0)"),
        out_types="B",
    )
    plan = sbp.jit(product, MESH).plan(shape(16, 8), shape(8, 16))
    found = collectives(plan.program)
    assert [(c.kind, c.mesh_axes) for c in found] == [("all_reduce", "model")]
    assert found[0].bytes_per_device == plan.cost.bytes_per_device == 2 * 3 / 4 * 16 * 16 * 4


# ---- narrow terminals ---------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["layers", "choose"])
@pytest.mark.parametrize("width", [40, 60, 80, 120])
def test_no_fact_is_lost_in_a_narrow_terminal(name, width):
    report = report_of(name, DIAGNOSTICS)
    # Of a long source line, the part with the marks is shown.
    texts = (re.sub(r"(?m)^ *\d+ \| .*$", "", report.text(columns)) for columns in (width, WIDE))
    narrow, wide = (Counter(word.removesuffix(";") for word in facts_of(t)) for t in texts)
    # Rows by themselves name the columns again and again.
    assert narrow == wide if width > 80 else narrow >= wide


@pytest.mark.parametrize("width", [40, 80])
@pytest.mark.parametrize("shown", ["full", "picture", "bytes", "timeline", "memory", "roofline"])
def test_lines_are_as_long_as_the_terminal(shown, width):
    lines = getattr(report_of("megatron_step"), shown)().lines(width)
    longest = [max(words(line), key=len) for line in lines if cell_len(line) > width]
    assert all(cell_len(word) > width - 6 for word in longest)  # it has no place to break


def test_rows_stand_by_themselves_where_columns_have_no_room():
    text = report_of("megatron_step").memory().text(40)
    assert "  class weights; shape " in " ".join(text.split("\n"))
    assert "class weights;" not in report_of("megatron_step").memory().text(120)


# ---- hardware, barriers, reasons ----------------------------------------------------------------


@pytest.mark.parametrize(
    ("mesh", "hardware", "is_said"),
    [
        (MESH, None, True),
        (MESH, "tpu-v3", False),
        (sbp.make_mesh((2,), ("data",)), None, False),
    ],
)
def test_hardware_that_was_assumed_is_said(mesh, hardware, is_said):
    report = sbp.jit(lambda x: x + 1, mesh, hardware=hardware).plan(shape(8, 8)).report()
    said = "hardware tpu-v3 (assumed, since the mesh is abstract; hardware= names another)"
    assert (said in " ".join(report.text().split())) is is_said
    assert (said in " ".join(str(report.short()).split())) is is_said
    assert is_said or hardware or "assumed" not in report.text()


def rematerialised(weights, x):
    for w in weights:
        x = jax.checkpoint(lambda x, w: jax.nn.relu(x @ w[0]) @ w[1])(x, w)
    return (x**2).sum()


def test_a_barrier_reads_a_scalar_and_a_reduced_sum():
    """The reason of a reduction is of the operand that the barrier reads it as."""

    def program(scale, x, w):
        y = x @ w
        scale, z = jax.lax.optimization_barrier((scale, y))
        return scale, jax.nn.relu(y) + z

    types = ("B", "data:S(1)", "data:S(0)")
    report = sbp.jit(program, MESH, in_types=types).check(shape(), shape(8, 8), shape(8, 8))
    assert "needed by max `jax.nn.relu(y)`" in " ".join(report.text().split())


@pytest.mark.parametrize("hardware", ["cpu", "tpu-v5e", "tpu-v5p", "h100"])
@pytest.mark.parametrize("rows", [64, 8192])
def test_a_partial_value_before_a_barrier(rows, hardware):
    """The values of rematerialised programs pass barriers of several operands."""
    weights = [[shape(512, 2048), shape(2048, 512)]] * 3
    pinned = ([["data:B model:S(1)", "data:B model:S(0)"]] * 3, "data:S(0) model:B")
    gradient = jax.value_and_grad(rematerialised)
    for in_types in (None, pinned):
        report = sbp.jit(gradient, MESH, hardware=hardware, in_types=in_types).check(
            weights, shape(rows, 512)
        )
        assert report.ok and report.program is not None
        reasons = [word in report.text() for word in ("needed by", "returned as")]
        assert any(reasons) or not report.program.cost.bytes_per_device


@pytest.mark.parametrize(("count", "said"), [(3, ""), (5, " or 2 more")])
def test_rows_of_partners_past_the_third_are_counted(count, said):
    traced = sbp.jit(jax.numpy.tanh, jax.sharding.AbstractMesh((2,), ("d",))).trace(shape(8))
    (node,) = traced.request.graph.nodes
    partners = (ValueName("y"),), (0,), tuple((c,) for c in range(1, count + 1))
    need = ConversionNeed(
        kind="partners", change=AtomChange(0, -1, 0), node=node, partners=partners
    )
    assert f"`y` S(0) or `y` S(1) or `y` S(2){said}, and `y` is B" in full_need_text(need, ())
