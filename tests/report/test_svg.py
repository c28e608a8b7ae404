"""Drawings are sound XML whatever their words are; reports have the same facts in words."""

from xml.etree import ElementTree

from sbp.report.parts import NAMESPACE, Board, Facts, Ink, Page, Picture
from sbp.report.rendering import page_html, page_lines

WORDS = '<b title="x">&amp;\x00\x1b[31m \u202eright to left\u202c 漢字 ]]>'


def drawing() -> Board:
    board = Board(120, 40)
    board.rect((0, 0), (60, 20), Ink(color="#3b82f6"), title=WORDS)
    board.line([(60, 10), (100, 10), (100, 40)], Ink(dashed=True), arrow=True, title=WORDS)
    board.area([(0, 40), (10, 20), (20, 40)], Ink(color="#f59e0b", width=0), title=WORDS)
    board.text((30, 14), WORDS, Ink(bold=True), anchor="middle")
    return board


def test_a_drawing_is_sound_xml_whatever_its_words_are():
    root = ElementTree.fromstring(drawing().svg(WORDS))
    assert (root.get("width"), root.get("height")) == ("120", "40")
    shown = WORDS.replace("\x00", "\ufffd").replace("\x1b", "\ufffd")
    shown = shown.replace("\u202e", "\ufffd").replace("\u202c", "\ufffd")
    assert [t.text for t in root.iter(f"{{{NAMESPACE}}}title")] == [shown] * 3
    assert [t.text for t in root.iter(f"{{{NAMESPACE}}}text")] == [shown]
    assert root.get("aria-label") == shown


def test_an_arrow_ends_where_its_line_ends():
    root = ElementTree.fromstring(drawing().svg("arrow"))
    arrow = root.findall(f"{{{NAMESPACE}}}polygon")[0].get("points")
    assert arrow is not None and arrow.split()[0] == "100,40"


def test_terminals_and_those_who_cannot_see_get_the_facts_in_words():
    picture = Picture(
        caption="a `box`", svg=drawing().svg("box"), instead=(Facts(pairs=(("a", "b"),)),)
    )
    page = Page(parts=(picture,))
    assert [line.plain for line in page_lines(page, 80)] == ["a `box`", "a  b"]
    shown = page_html(page)
    assert "<svg" in shown and "in words" in shown and "<dd>b</dd>" in shown
    assert "\x1b" not in shown
