"""Deltas by language of a run against others, figure 6 of the GShard paper."""

from typing import Any

import sacrebleu

from examples.gshard.corpus import Pair
from examples.gshard.deltas import figure6, language_deltas
from examples.gshard.drawing import write_drawings
from examples.gshard.evaluate import MODEL, evaluate

REFERENCES = [f"on day {n} the cat sees {n + 2} birds" for n in range(120)]
PAIRS = {
    code: tuple(
        Pair(source=f"{code} {n}", target=text, language=code)
        for n, text in enumerate(REFERENCES[:count])
    )
    for code, count in (("fr", 120), ("sw", 120), ("de", 30))
}


def spoiled(every, texts):
    """Texts of which every n-th ends too soon."""
    return [text[:9] if n % every == 0 else text for n, text in enumerate(texts)]


def scored(codes):
    heldout = {"test set": tuple(pair for code in codes for pair in PAIRS[code])}
    texts = [pair.target for pair in heldout["test set"]]
    systems = {MODEL: spoiled(3, texts), "one": spoiled(2, texts), "two": spoiled(4, texts)}
    return evaluate(heldout, {**systems, "copying": texts}, list(codes))


def test_deltas_are_of_bleu_where_there_are_enough_sentences():
    result = scored(("fr", "sw"))
    found = language_deltas(result, ["one"], {"sw": 10, "fr": 5000})
    assert found.measure == "BLEU"
    assert [one.language for one in found.languages] == ["fr", "sw"]
    bleu = sacrebleu.BLEU()
    for one in found.languages:
        ours, theirs = (
            bleu.corpus_score(spoiled(n, REFERENCES), [REFERENCES]).score for n in (3, 2)
        )
        assert (one.score, one.baseline) == (ours, theirs) and one.delta == ours - theirs > 0
        assert one.sentences == 120
    assert found.mean == sum(one.delta for one in found.languages) / 2
    assert found.ahead == 2


def test_deltas_are_of_chrf_where_one_language_has_few_sentences_and_the_best_other_counts():
    result = scored(("sw", "de", "fr"))
    found = language_deltas(result, ["one", "two"], {"de": 300, "fr": 300, "sw": 10})
    assert found.measure == "chrF"
    assert [one.language for one in found.languages] == ["de", "fr", "sw"]
    both = {score.name: score.systems for score in result.languages}
    for one in found.languages:
        assert one.baseline == max(both[one.language][name].chrf for name in ("one", "two"))
        assert one.delta < 0  # "two" spoils fewer
    assert "against one and two; better in 0" in str(found)


def test_the_figure_and_its_page_have_every_language_in_order(tmp_path):
    found = language_deltas(scored(("fr", "sw")), ["one"], {"sw": 10, "fr": 5000})
    drawing = figure6(found)
    assert [row[:3] for row in drawing.rows] == [("fr", "5,000", "120"), ("sw", "10", "120")]
    axes: Any = drawing.figure.axes[0]
    labels = [label.get_text() for label in axes.get_xticklabels()]
    heights = [bar.get_height() for bar in axes.patches]
    assert labels == ["fr", "sw"] and heights == [one.delta for one in found.languages]
    png, page = write_drawings(tmp_path, "figure6.html", "Figure 6", (drawing,))
    assert png.read_bytes().startswith(b"\x89PNG")
    assert f"mean delta {found.mean:+.2f} BLEU over 2 languages" in page.read_text("utf-8")
