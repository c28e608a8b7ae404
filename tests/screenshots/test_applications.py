"""Reports are laid out alike standing alone, in running JupyterLab and in running Notebook 7."""

import linecache

import pytest

pytest.importorskip(
    "axe_playwright_python",
    reason="the extra `screenshots` is not installed: see `make screenshots`",
)
from axe_playwright_python.sync_playwright import Axe

from sbp.errors import Diagnostic, Label, Span
from sbp.report.parts import Facts, Page
from sbp.report.rendering import page_html
from sbp.report.report import Report
from tests.report.samples import DIAGNOSTICS, remember_sources
from tests.report.test_report import report_of
from tests.screenshots import hosts

pytestmark = pytest.mark.skipif(
    not hosts.CHROMIUM, reason="no Chromium here: layouts were not tested"
)
WIDTHS = (360, 500, 1200)

# ---- what is shown ------------------------------------------------------------------------------

ODD_FILE = "odd <b>&amp;.py"
ODD_LINES = (
    'y = f("\u6f22\u5b57 text", x @ w)',  # wide characters
    'z = g("\u05e9\u05dc\u05d5\u05dd", x @ w)',  # from right to left
    "q" * 300 + " = x @ w",
    "\tif ready: return x @ w",
)


def odd_label(line, text):
    start = len(text[: text.index("x @ w")].encode()) + 1
    span = Span(file=ODD_FILE, line=line, column=start, end_column=start + 5, end_line=0)
    return Label(span=span, text="\u05e9\u05dc\u05d5\u05dd, here", primary=line == 1)


def odd():
    """An error whose names and lines are hard to lay out, and one without source."""
    linecache.cache[ODD_FILE] = (1, None, [f"{line}\n" for line in ODD_LINES], ODD_FILE)
    nowhere = Span(file="<stdin>", line=3, column=5, end_column=9, end_line=0)
    return (
        Diagnostic(
            code="no-signature",
            severity="error",
            title=f"`<script>alert(1)</script>` of `{'v' * 200}` has no signature",
            labels=tuple(odd_label(i, line) for i, line in enumerate(ODD_LINES, 1)),
            notes=("many words " * 40,),
        ),
        Diagnostic(
            code="no-signature",
            severity="error",
            title="no source",
            labels=(Label(span=nowhere, text="here", primary=True),),
        ),
    )


@pytest.fixture(scope="module")
def reports():
    remember_sources()
    return [
        Report(program=None, diagnostics=(*odd(), *DIAGNOSTICS), title="ffn"),
        report_of("megatron_step", DIAGNOSTICS[2:3]),
    ]


@pytest.fixture(scope="module")
def browser():
    with hosts.chromium() as browser:
        yield browser


@pytest.fixture(scope="module")
def server(reports, tmp_path_factory):
    server = hosts.Server(tmp_path_factory.mktemp("jupyter"), [r.html() for r in reports])
    yield server
    server.stop()


# ---- layouts ------------------------------------------------------------------------------------


def axe_violations(page):
    found = Axe().run(page, context=".sbp").response
    assert found["passes"], "axe-core looked at nothing"
    return [(v["id"], v["nodes"][0]["failureSummary"]) for v in found["violations"]]


@pytest.mark.parametrize("theme", hosts.THEMES)
def test_in_notebook_applications(theme, server, browser, reports):
    server.wait()
    server.use(theme)
    for name, page in hosts.opened(browser, server, len(reports)).items():
        assert page.evaluate("document.body.dataset.jpThemeLight") == str(theme == "light").lower()
        for width in WIDTHS:
            hosts.sized(page, width)
            assert not hosts.faults(page), f"{name}, {theme}, {width} pixels"
        # The applications drop `tabindex` from outputs that are not trusted.
        left = [v for v in axe_violations(page) if v[0] != "scrollable-region-focusable"]
        assert not left, f"{name}, {theme}"
        page.close()


@pytest.mark.parametrize("theme", hosts.THEMES)
def test_standing_alone(theme, browser, reports):
    for report in reports:
        page = browser.new_page(color_scheme=theme)
        page.set_content(report.html(standalone=True))
        hosts.open_folds(page)
        for width in (*WIDTHS, 1600):
            hosts.sized(page, width)
            assert not hosts.faults(page), f"{theme}, {width} pixels"
        assert not axe_violations(page)
        page.close()


# ---- the checks see what they are there for -----------------------------------------------------

WRONG = {
    "overlap": ".sbp dd{margin-top:-1.5em !important}",
    "is cut by": ".sbp dl div{width:2em;overflow:hidden;white-space:nowrap}",
    "pixels off": ".sbp pre b{margin-left:1em}",
    "is not below": ".sbp pre b{position:relative;top:-2em}",
    "wide in": ".sbp p{white-space:nowrap}",
}


@pytest.mark.parametrize("fault", WRONG)
def test_a_broken_layout_is_seen(fault, browser, reports):
    page = browser.new_page(viewport={"width": 360, "height": 900})
    facts = page_html(Page(parts=(Facts(pairs=(("modelled time", "5.86 ms"),)), "word " * 30)))
    page.set_content(facts + reports[0].html())
    assert not hosts.faults(page)
    page.add_style_tag(content=WRONG[fault])
    assert any(fault in found for found in hosts.faults(page))
    page.close()


def test_axe_sees_a_picture_without_words(browser):
    page = browser.new_page()
    page.set_content(
        '<div class="sbp"><p>text</p><svg role="img" width="9" height="9"></svg></div>'
    )
    assert [name for name, _ in axe_violations(page)] == ["svg-img-alt"]
    page.close()
