"""Reports look the same in JupyterLab, also in a notebook that is not trusted: every property that
its style sheet sets on an element that reports use is set on the element itself."""

import pytest

from sbp.report.rendering import STYLES
from tests.report.test_report import report_of

# @jupyterlab/rendermime 4.6.6 (style/base.css, rules of .jp-RenderedHTMLCommon) and
# @jupyterlab/outputarea 4.6.6 (style/base.css, rules of .jp-OutputArea-output): what they set on an
# element, wherever it stands. The colors of text are those of the theme.
CELL = "vertical-align padding line-height white-space max-width border text-align background"
HOST = {
    "pre": "font-size border margin padding background-color font-family line-height"
    " white-space overflow-x overflow-y word-break word-wrap",
    "code": "border background-color font-family font-size line-height padding white-space",
    "table": "border-collapse border-spacing border font-size table-layout margin-left"
    " margin-right margin-bottom",
    "thead": "border-bottom vertical-align",
    "tr": CELL,
    "td": CELL,
    "th": f"{CELL} font-weight",
    "p": "text-align margin margin-bottom",
    "dl": "display width overflow padding margin",
    "dt": "display font-weight float width padding margin",
    "dd": "display font-weight float width padding margin",
    "img": "max-width height",
}
SHORTHANDS = {
    "font-family": "font",
    "font-size": "font",
    "font-style": "font",
    "font-weight": "font",
    "line-height": "font",
    "background-color": "background",
    "border-bottom": "border",
    "margin-top": "margin",
    "margin-left": "margin",
    "margin-right": "margin",
    "margin-bottom": "margin",
    "overflow-x": "overflow",
    "overflow-y": "overflow",
    "word-wrap": "overflow-wrap",
}


DROPPED = ("inherit", "color-mix", "var(", "anywhere")
"""Values that the sanitizer of @jupyterlab/apputils 4.6.6 drops from outputs that are not
trusted."""


def properties(style):
    """The values of the properties of a style."""
    return {k.strip(): v for k, _, v in (d.partition(":") for d in style.split(";"))}


def missing(element, styles):
    """What the host sets on an element and one of its styles does not."""
    own = [properties(s) for name, s in styles.items() if name.partition(".")[0] == element]
    assert own, f"no report has {element}"
    wanted = HOST[element].split()
    return [p for p in wanted for have in own if not {p, SHORTHANDS.get(p, p)} & have.keys()]


@pytest.mark.parametrize("element", HOST)
def test_what_the_host_sets_is_set_by_ours(element):
    assert not missing(element, STYLES)


def test_a_property_left_to_the_host_is_seen():
    assert missing("dt", STYLES | {"dt": STYLES["dt"].replace("float:none;", "")}) == ["float"]


@pytest.mark.parametrize("name", STYLES)
def test_no_style_is_dropped_where_outputs_are_not_trusted(name):
    found = properties(STYLES[name])
    assert not [v for v in found.values() if any(word in v for word in DROPPED)]
    assert "unicode-bidi" not in found


def test_elements_of_reports_are_known():
    """Those that have a style and that the host leaves alone are listed here."""
    named = {name.partition(".")[0] for name in STYLES}
    assert named - HOST.keys() == {"b", "div", "details", "summary", "i", "span", "h1"}


def test_a_fragment_has_nothing_that_is_dropped():
    """`<style>` and `<svg>` are dropped where outputs are not trusted."""
    report = report_of("megatron_step", ())
    assert not any(tag in report.html() for tag in ("<svg", "<style"))
    assert 3 < report.html().count("<img ") == report.html(standalone=True).count("<svg")
