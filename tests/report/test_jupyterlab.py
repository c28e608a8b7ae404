"""Reports look the same in JupyterLab: every property that its style sheet sets on an element that
reports use is set by ours, with a higher specificity."""

import re

import pytest

from sbp.report.rendering import STYLE

# @jupyterlab/rendermime 4.6.6 (style/base.css, rules of .jp-RenderedHTMLCommon) and
# @jupyterlab/outputarea 4.6.6 (style/base.css, rules of .jp-OutputArea-output): what they set on an
# element, wherever it stands.
CELL = "vertical-align padding line-height white-space max-width border text-align background"
HOST = {
    "pre": "color font-size border margin padding background-color font-family line-height"
    " white-space overflow-x overflow-y word-break word-wrap",
    "code": "border background-color color font-family font-size line-height padding white-space",
    "table": "border-collapse border-spacing border color font-size table-layout margin-left"
    " margin-right margin-bottom",
    "thead": "border-bottom vertical-align",
    "tr": CELL,
    "td": CELL,
    "th": f"{CELL} font-weight",
    "p": "text-align margin margin-bottom",
    "dl": "display width overflow padding margin",
    "dt": "display font-weight float width padding margin",
    "dd": "display font-weight float width padding margin",
    "svg": "max-width height",
}
STRONGEST = (2, 2)
"""Classes (with attributes and pseudo-classes) and element names of the host's strongest selector
on these elements: `.jp-RenderedHTMLCommon tbody tr:nth-child(odd)`."""

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


def rules(style):
    """The selectors of each rule with the properties that it sets."""
    for selectors, body in re.findall(r"([^{}]+)\{([^{}]*)\}", style):
        properties = {d.split(":", 1)[0].strip() for d in body.split(";") if ":" in d}
        yield [s.strip() for s in selectors.split(",")], properties


def specificity(selector):
    classes = len(re.findall(r"[.:\[](?=[\w-])", selector))
    return classes, len(re.findall(r"(?:^|[\s>+~])[a-z][\w-]*", selector))


def set_on(element, style):
    """The properties that are set on an element wherever it stands in a report, by rules that win
    over the host's."""
    found = set()
    for selectors, properties in rules(style):
        for selector in selectors:
            if re.fullmatch(rf"(\.sbp)+ {element}", selector):
                found |= properties if specificity(selector) > STRONGEST else set()
    return found


@pytest.mark.parametrize("element", HOST)
def test_what_the_host_sets_is_set_by_ours(element):
    have = set_on(element, STYLE)
    missing = [p for p in HOST[element].split() if not {p, SHORTHANDS.get(p, p)} & have]
    assert not missing, f"{element}: {', '.join(missing)} would be JupyterLab's"


def test_every_rule_wins_over_the_host():
    weak = [
        selector
        for selectors, _ in rules(STYLE)
        for selector in selectors
        if selector != ".sbp" and specificity(selector) <= STRONGEST
    ]
    assert not weak


def test_a_property_left_to_the_host_is_seen():
    assert "float" in set_on("dt", STYLE)
    assert "float" not in set_on("dt", STYLE.replace("float:none;", ""))
    assert not set_on("dt", STYLE.replace(".sbp.sbp.sbp", ".sbp"))


def test_elements_of_reports_are_known():
    """Those that the style sheet names and the host leaves alone are listed here."""
    named = {
        last
        for selectors, _ in rules(STYLE)
        for s in selectors
        if (last := re.split(r"[ >]", s)[-1].split(":")[0].split(".")[0])
    }
    assert named - HOST.keys() == {"b", "div", "details", "summary", "i", "text"}
