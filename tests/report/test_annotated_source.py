"""`report.source()`: lines of the user with their types and bytes."""

import linecache
from typing import Any

import jax
import pytest
from rich.cells import cell_len

import sbp
from sbp.report.report import SHOWN_CODE, annotated_lines

MESH = jax.sharding.AbstractMesh((2, 4), ("data", "model"))


shaped = lambda *sizes: jax.ShapeDtypeStruct(sizes, "float32")


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
    arguments = shaped(8, 16), shaped(16, 32), shaped(32, 16)
    return sbp.jit(names["layer"], MESH).plan(*arguments).report()


@pytest.fixture(scope="module")
def report():
    return report_of(SOURCE, "<annotated>")


def test_lines_have_the_types_that_the_annotations_imply(report):
    makes = {a.line: dict(a.makes) for a in annotated_lines(report.program)}
    assert makes[2] == {"x": "data:S(0)"}
    assert makes[3] == {"h": "data:S(0) model:S(1)"}
    assert makes[4] == {"مرحبا": "data:S(0) model:P(sum)"}
    assert makes[5] == {"漢字": "data:S(0)"}


def test_bytes_stand_at_the_line_that_needs_them(report):
    """Four devices of the axis add float32[4,16], by a ring: 2 * 3/4 of its bytes."""
    sent = {a.line: a.bytes_per_device for a in annotated_lines(report.program)}
    assert sent[5] == 2 * 3 / 4 * 4 * 16 * 4 == report.program.cost.bytes_per_device
    assert not any(count for line, count in sent.items() if line != 5)


@pytest.mark.parametrize("width", [80, 200])
def test_text_keeps_its_width(report, width):
    lines = report.source().lines(width)
    assert max(map(cell_len, lines)) <= width
    text = "\n".join(lines)
    assert "漢字:" in text and "> 5" in text and "100 %" in text


def test_a_long_line_is_cut_with_dots(report):
    (cut,) = (line for line in report.source().lines(200) if "漢字 * 2.0" in line)
    assert " .." in cut and cut.count("2.0") < 40 and len(SOURCE.splitlines()[-1]) > SHOWN_CODE


def test_html_has_the_same_facts(report):
    page = report.source().html()
    assert "漢字" in page and "data:S(0) model:P(sum)" in page and "<script" not in page


def test_a_program_without_source_is_readable():
    text = report_of(SOURCE, "").source().text(80)
    assert "(no source at hand)" in text and "data:S(0) model:P(sum)" in text


def test_markup_in_the_source_is_escaped():
    source = SOURCE.replace("# العربية", "# <b>&amp;`x`")
    page = report_of(source, "<marked>").source().html()
    assert "<b>&amp;" not in page and "&lt;b&gt;&amp;amp;" in page
