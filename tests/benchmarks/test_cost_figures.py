"""Figures 7, 8 and 9 of the GShard paper from the cost model."""

from functools import cache
from pathlib import Path

import pytest

import sbp
from benchmarks.gshard.figure8 import figure8
from benchmarks.gshard.figures import figure7, figure8_drawing, figure9, model_run
from benchmarks.gshard.study import core_years, study
from examples.gshard.drawing import write_drawings
from sbp.cli import main
from tests.slices import EXHAUSTIVE

V3 = sbp.HARDWARE["tpu-v3"]
DEVICE = 16 * 2**30
"""Bytes of a TPU v3 core."""


@cache
def held(layers):
    """The plan of a model of 128 experts without rematerialisation."""
    return study(model_run(layers, 128, remat=False), "tpu-v3")


def by_hand(layers):
    """Bytes of a device: activations (454 MB a layer of source and target, of 2048 tokens each in
    sequences of 128), replicated weights, and one expert of each MoE layer, all float32. Weights of
    attention: four matrices, twice in a decoder's layer."""
    m, h, heads = 1024, 8192, 16 * 128
    attention = 1.5 * layers * 4 * m * heads
    feed_forward = 2 * layers / 2 * 2 * m * h  # a dense layer and one expert of a pair
    embeddings = (64_000 + 2 * 32_000) * m
    return 454e6 * layers + 4 * (attention + feed_forward + embeddings)


def test_memory_says_which_depths_had_to_recompute():
    """Section 5.1: 12 layers fit a core without rematerialisation, 36 do not."""
    for layers in (12, 36):
        found = held(layers).plan.cost.peak_memory_bytes
        assert (found < DEVICE) == (layers == 12)
        assert by_hand(layers) < found < 1.25 * by_hand(layers)


@pytest.mark.laws
@pytest.mark.skipif(not EXHAUSTIVE, reason="`make laws` runs it")
def test_memory_of_24_and_60_layers():
    """24 layers fit in the paper; the plan has 0.4 % more than a core, and counts gaps between
    buffers (12 % of temporaries), which the arithmetic leaves out. 60 layers do not."""
    shallow, middle, deep, deepest = (held(n).plan.cost.peak_memory_bytes for n in (12, 24, 36, 60))
    assert middle < 1.01 * DEVICE and deepest > 2 * DEVICE
    for layers, found in ((24, middle), (60, deepest)):
        assert by_hand(layers) < found < 1.25 * by_hand(layers)
    # Linear in depth, but for embeddings and logits.
    assert deep - middle == pytest.approx(middle - shallow, rel=0.1)


def test_a_step_that_recomputes_holds_less():
    """R4: less than half, of 12 layers whose activations are most of their memory."""
    again = study(model_run(12, 128, remat=True), "tpu-v3").plan.cost.peak_memory_bytes
    assert again < held(12).plan.cost.peak_memory_bytes / 2


def test_the_dense_model_takes_ten_times_the_core_years():
    """Table 3: 42 days of 2048 cores for T(96L), which the paper rounds to 235.5."""
    assert core_years(42, 2048) == pytest.approx(235.5, abs=0.2)
    assert core_years(42, 2048) > 10 * core_years(4.0, 2048)


def test_figure_8_has_the_papers_shares_beside_ours():
    rows = {row[0]: row for row in figure8_drawing(figure8(V3)).rows}
    few, many = rows["128 experts"], rows["2048 experts"]
    assert (few[-1], many[-1]) == ("1", "1.7")
    assert 1.5 <= float(many[-2]) <= 1.9
    assert float(few[-3]) == pytest.approx(sum(map(float, few[1:6])), abs=0.03)


def test_figure_9_grows_as_the_papers_does():
    """Section 5.3: from 16 to 2048 devices an all-to-all takes 9 times as long, and by the square
    root of the devices 11 times; an all-reduce as long."""
    rows = figure9(V3).rows
    assert [int(row[0]) for row in rows] == [16, 32, 64, 128, 256, 512, 1024, 2048]
    first, last = (list(map(float, row[1:])) for row in (rows[0], rows[-1]))
    for small, large in zip(first[:2], last[:2], strict=True):
        assert 7 < large / small < 11.4
    for small, large in zip(first[2:], last[2:], strict=True):
        assert 0.7 < large / small < 1.5


def test_figures_are_files_and_a_page(tmp_path):
    drawings = (
        figure7([(held(12),), (held(36),)], "tpu-v3"),
        figure8_drawing(figure8(V3)),
        figure9(V3),
    )
    files = write_drawings(tmp_path / "new", "costs.html", "Costs", drawings)
    assert [file.name for file in files] == [
        "figure7.png",
        "figure8.png",
        "figure9.png",
        "costs.html",
    ]
    for file in files[:-1]:
        assert file.read_bytes().startswith(b"\x89PNG") and file.stat().st_size > 10_000
    page = files[-1].read_text("utf-8")
    assert page.count("data:image/png;base64,") == 3
    for drawing in drawings:
        assert all(f"<td>{cell}</td>" in page for row in drawing.rows for cell in row)


def test_a_folder_that_cannot_be_written_is_refused(tmp_path: Path, capsys):
    (tmp_path / "file").write_text("")
    with pytest.raises(sbp.SbpError, match="cannot write figures"):
        write_drawings(tmp_path / "file", "costs.html", "Costs", (figure9(V3),))
    assert main(["plan", "--figures", str(tmp_path), "--hardware", "tpu-v33"]) == 2
    assert 'did you mean "tpu-v3"' in capsys.readouterr().err
