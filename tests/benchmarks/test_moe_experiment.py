"""The report of the experiment, from folders of runs that were written by hand."""

import json

import pytest

from benchmarks.moe_experiment import (
    CORPORA,
    EXPERTS,
    LAYERS,
    Setting,
    claims,
    collect,
    main,
    read,
    report,
    settings,
)
from sbp.moe.trainer import step_flops


def written(folder, setting, losses, chrf, seconds=0.5):
    """A run with a loss for each step, 1000 tokens each."""
    workdir = folder / setting.folder
    workdir.mkdir()
    steps = [
        {"step": n, "nll": loss, "tokens": 1000.0, "heldout_nll": loss + 1}
        | ({"seconds": seconds} if n else {})
        for n, loss in enumerate(losses)
    ]
    (workdir / "metrics.jsonl").write_text("".join(json.dumps(step) + "\n" for step in steps))
    systems = {"model": {"exact": chrf / 2, "chrf": chrf, "bleu": None}}
    (workdir / "evaluation.json").write_text(json.dumps({"overall": {"systems": systems}}))


setting = lambda layers, experts: Setting(corpus="phrases", layers=layers, experts=experts)


@pytest.fixture
def folder(tmp_path):
    """Experts help less and less, depth hurts translations, and deep models learn sooner."""
    for layers, slower, loss in ((4, 1, 4.0), (8, 2, 3.0)):
        for experts, chrf in ((0, 30.0), (4, 40.0), (8, 45.0), (16, 46.0)):
            falling = [loss - experts / 100 - n / 100 for n in range(60)]
            written(tmp_path, setting(layers, experts), falling, chrf - layers, 0.5 * slower)
    return tmp_path


def test_a_run_is_read_from_its_folder(folder):
    found = read(folder / setting(4, 8).folder)
    assert found is not None and found.steps == 60
    assert found.tokens[-1] == 60_000 and found.seconds == 0.5
    assert (found.chrf, found.exact) == (41.0, 20.5)
    # A mean of the last 20 of a line that falls by 0.01: half of 19 steps above its end.
    assert found.losses[-1] == pytest.approx(4.0 - 0.08 - 0.59 + 0.095)
    assert found.losses[0] == pytest.approx(3.92) and found.tokens_to(found.losses[30]) == 31_000
    assert found.tokens_to(0.0) is None


def test_claims_hold_where_the_runs_say_so(folder):
    said = [str(claim) for claim in claims(collect(folder))]
    assert len(said) == 7
    for claim, (verdict, pairs) in zip(
        said,
        [
            ("holds", "6 of 6"),  # against dense
            ("holds", "4 of 4"),  # more experts
            ("holds", "2 of 2"),  # diminishing
            ("does not hold", "0 of 4"),  # deeper translates better
            ("holds", "4 of 4"),  # deeper learns sooner
            ("holds", "4 of 4"),  # more experts learn sooner
            ("holds", "4 of 4"),  # twice the depth, twice the time
        ],
        strict=True,
    ):
        assert f"**{verdict}**, in {pairs}" in claim


def test_what_is_missing_is_not_compared(tmp_path):
    assert "No run has a step yet" in report(collect(tmp_path))
    written(tmp_path, setting(4, 8), [2.0, 1.0], 30.0)
    (tmp_path / "other").mkdir()
    (tmp_path / setting(4, 16).folder).mkdir()
    found = collect(tmp_path)
    assert list(found) == [setting(4, 8)]
    assert all("not compared yet" in str(claim) for claim in claims(found))


def test_the_report_is_made_again_from_what_is_there(folder, capsys):
    assert main(["--workdir", str(folder), "--report"]) == 0
    shown = capsys.readouterr().out
    row = next(line for line in shown.splitlines() if line.startswith("| MoE(8E, 8L)"))
    assert [cell.strip() for cell in row.split("|")[6:9]] == ["37.0", "18.5", "3.330"]
    assert shown.count("**holds**") == 6


def test_models_of_one_depth_take_as_many_flops():
    """Within 3 %: the routers are what differs."""
    assert len(settings(CORPORA, 1)) == len(CORPORA) * len(LAYERS) * len(EXPERTS)
    for layers in LAYERS:
        flops = [step_flops(setting(layers, experts).config()) for experts in EXPERTS]
        assert max(flops) < 1.03 * min(flops)
