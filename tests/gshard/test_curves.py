"""The page of curves: what it says of files that are whole, damaged and strange."""

import json
from html.parser import HTMLParser

import pytest

from examples.gshard.curves import charts, thinned
from sbp.cli import main


class Reader(HTMLParser):
    """The points of each drawn path with its style, the text, and the tags."""

    def __init__(self, page):
        super().__init__()
        self.paths, self.words, self.tags, self.labels = [], [], set(), []
        self.feed(page)

    def handle_starttag(self, tag, attrs):
        given = dict(attrs)
        self.tags.add(tag)
        if tag == "path":
            self.paths.append(given["d"])
        if given.get("role") == "img":
            self.labels.append(given["aria-label"])

    handle_startendtag = handle_starttag

    def handle_data(self, data):
        self.words.append(data.strip())


def page_of(folder, lines, capsys):
    (folder / "metrics.jsonl").write_bytes(b"".join(line + b"\n" for line in lines))
    assert main(["curves", str(folder)]) == 0
    assert capsys.readouterr().out == f"wrote {folder / 'curves.html'}\n"
    return Reader((folder / "curves.html").read_text("utf-8"))


def step(number, **values):
    return json.dumps({"step": number, **values}).encode()


def test_curves_go_through_the_numbers(tmp_path, capsys):
    """Against points computed from the axes: 600 wide, values from 4 above to 156 below."""
    loss = [5.0, 3.0, None, 1.0]
    lines = [step(i, loss=v, **{"encoder/0/drop": 0.5}) for i, v in enumerate(loss, start=1)]
    page = page_of(tmp_path, lines, capsys)
    assert page.paths[0] == "M0.0 4.0h0L200.0 80.0M600.0 156.0h0"
    said = "loss: 5 at step 1, 1 at step 4, between 1 and 5, not finite in 1 steps"
    assert said in page.words and "encoder/0: 0.5 at step 1" in " ".join(page.words)
    assert len(page.labels) == 2 and "Loss, steps 1 to 4" in page.labels[0]
    assert "script" not in page.tags


def test_files_that_are_damaged_partial_or_strange(tmp_path, capsys):
    lines = [
        step(3, loss=1.0),
        b'{"step": 1, "loss": NaN, "grad_norm": 1e999}',
        b'{"step": 2, "loss": "<b>", "encoder/0/load": [1, "x"]}',
        step(3, loss=2.0, grad_norm=True),  # the run went back to step 2
        step(4, loss=[], **{"<i>/load": [1, 3]}),
        b'{"step": 5, "loss": 1' + b"0" * 400 + b"}",
        b"\xff\x00",
        b'{"step": 6, "lo',
    ]
    page = page_of(tmp_path, lines, capsys)
    words = " ".join(page.words)
    assert "loss: 2 at step 3, 2 at step 3, between 2 and 2, not finite in 4 steps" in words
    assert "grad_norm: no finite number, not finite in 2 steps" in words
    assert "<i>: 1.5 at step 4" in words and "b" not in page.tags and "i" not in page.tags
    assert not any(word in path for path in page.paths for word in ("nan", "inf"))


def test_numbers_near_the_largest_have_a_place(tmp_path, capsys):
    page = page_of(tmp_path, [step(1, loss=-1.7e308), step(2, loss=1.7e308)], capsys)
    assert page.paths[0] == "M0.0 156.0h0L600.0 4.0"


def test_long_runs_are_drawn_by_means_and_the_page_says_so(tmp_path, capsys):
    lines = [step(i, loss=float(i % 2)) for i in range(1, 1201)]
    page = page_of(tmp_path, lines, capsys)
    assert "per target token, in nats; each point is the mean of 4 steps" in page.words
    assert "between 0 and 1" in " ".join(page.words)  # of all steps
    points = thinned([(i, float(i % 2)) for i in range(1, 1201)])
    assert len(points) == 300 and {value for _, value in points} == {0.5}


def test_load_is_the_busiest_over_the_even_share():
    (chart,) = charts([{"step": 1, "decoder/1/load": [6.0, 2.0, 0.0, 0.0]}])
    assert chart.curves == {"decoder/1": [(1, 3.0)]}


@pytest.mark.parametrize("content", [None, b"", b"rubbish\n"])
def test_a_folder_without_steps_is_refused(content, tmp_path, capsys):
    if content is not None:
        (tmp_path / "metrics.jsonl").write_bytes(content)
    assert main(["curves", str(tmp_path)]) == 2
    assert "has no step of a run" in " ".join(capsys.readouterr().err.split())
    assert not (tmp_path / "curves.html").exists()


def test_metrics_that_cannot_be_read_are_told(tmp_path, capsys):
    (tmp_path / "metrics.jsonl").mkdir()
    assert main(["curves", str(tmp_path)]) == 2
    assert "cannot read" in capsys.readouterr().err
