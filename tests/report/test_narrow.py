"""Reports are readable in narrow terminals."""

from collections import Counter

import pytest
from rich.cells import cell_len

from tests.report.samples import DIAGNOSTICS
from tests.report.test_report import WIDE, facts_of, report_of


@pytest.mark.parametrize("name", ["layers", "choose"])
@pytest.mark.parametrize("width", [40, 60, 80, 120])
def test_no_fact_is_lost_in_a_narrow_terminal(name, width):
    report = report_of(name, DIAGNOSTICS)
    narrow, wide = (
        Counter(word.removesuffix(";") for word in facts_of(report.text(columns)))
        for columns in (width, WIDE)
    )
    # Rows by themselves name the columns again and again.
    assert narrow == wide if width > 80 else narrow >= wide


@pytest.mark.parametrize("width", [40, 80])
@pytest.mark.parametrize("shown", ["full", "picture", "bytes", "timeline", "memory", "roofline"])
def test_lines_are_as_long_as_the_terminal(shown, width):
    lines = getattr(report_of("megatron_step"), shown)().lines(width)
    words = [w for line in lines if cell_len(line) > width for w in [max(line.split(), key=len)]]
    assert all(cell_len(word) > width - 6 for word in words)  # a word has no place to break


def test_rows_stand_by_themselves_where_columns_have_no_room():
    text = report_of("megatron_step").memory().text(40)
    assert "  class weights; shape " in " ".join(text.split("\n"))
    assert "class weights;" not in report_of("megatron_step").memory().text(120)
