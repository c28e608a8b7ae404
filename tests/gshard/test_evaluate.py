"""Scores: those of sacrebleu, by held-out set and by language, beside systems that learn nothing,
and beside other runs (figure 6 of the GShard paper)."""

from typing import Any

import pytest
import sacrebleu

from examples.gshard.corpus import Pair
from examples.gshard.counting import CountingTranslator, _shared, abstract
from examples.gshard.deltas import figure6, language_deltas
from examples.gshard.drawing import write_drawings
from examples.gshard.evaluate import MODEL, baselines, evaluate, language_groups

ROWS = [
    Pair(source="der Hund läuft nach Hause", target="the dog runs home now", language="de"),
    Pair(source="le chat dort ici bien", target="the cat sleeps here well", language="fr"),
    Pair(source="le chien dort là bien", target="the dog sleeps there well", language="fr"),
]


def test_a_set_is_scored_by_exact_match_and_by_sacrebleus_chrf():
    nearly = [ROWS[0].target, "the cat sleeps there well", "a dog"]
    copied = [pair.source for pair in ROWS]
    result = evaluate(
        {"old": ROWS[:1], "new": ROWS[1:]}, {MODEL: nearly, "copying": copied}, ("fr", "de")
    )
    old, new = result.sets
    assert (old.name, old.sentences, old.languages) == ("old", 1, ("de",))
    assert old.model.exact == 100 and old.model.chrf == pytest.approx(100)
    assert result.overall.model.exact == pytest.approx(100 / 3)
    want = sacrebleu.corpus_chrf(nearly[1:], [[pair.target for pair in ROWS[1:]]]).score
    assert new.model.chrf == pytest.approx(want)
    assert new.beats_baselines and new.baseline == "copying"
    assert [score.name for score in result.languages] == ["fr", "de"]
    assert [signature.split("|")[3] for signature in result.signatures] == ["nc:6"]


def test_a_text_without_a_translation_counts_as_empty():
    right = [pair.target for pair in ROWS]
    result = evaluate({"all": ROWS}, {MODEL: [*right[:2], None], "copying": right}, ("de", "fr"))
    assert result.too_long == 1
    assert result.overall.model.exact == pytest.approx(200 / 3)
    assert not result.overall.beats_baselines


def test_bleu_is_given_for_a_hundred_sentences_and_not_for_fewer():
    many = [
        Pair(source=f"{i} Hunde laufen nach Hause", target=f"{i} dogs run home now", language="de")
        for i in range(100)
    ]
    right = [pair.target for pair in [*many, *many[:99]]]
    result = evaluate({"all": many, "few": many[:99]}, {MODEL: right, "copying": right}, ("de",))
    assert result.sets[0].model.bleu == pytest.approx(100)
    assert result.sets[1].model.bleu is None
    # Where a baseline is as good as the model, the model is not ahead.
    assert not result.overall.beats_baselines


def test_baselines_see_the_training_text_and_no_reference():
    train = [
        Pair(source=f"il y a {n} jours", target=f"{n} days ago", language="fr") for n in (3, 5)
    ]
    asked = [Pair(source="il y a 9 jours", target="", language="fr")]
    found = baselines(train, asked)
    assert found["templates"] == found["templates, names"] == ["9 days ago"]
    assert found["copying"] == ["il y a 9 jours"]


def test_language_groups_cover_all():
    groups = language_groups([str(i) for i in range(10)])
    assert [name for name, _ in groups] == ["rank 1-3", "rank 4-6", "rank 7-8", "rank 9-10"]
    assert sum((codes for _, codes in groups), ()) == tuple(str(i) for i in range(10))


REFERENCES = [f"on day {n} the cat sees {n + 2} birds" for n in range(120)]
BY_LANGUAGE = {
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
    heldout = {"test set": tuple(pair for code in codes for pair in BY_LANGUAGE[code])}
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


def pair(source, target="", language="fr"):
    return Pair(source=source, target=target, language=language)


SEEN = [
    pair("il y a 3 jours", "3 days ago"),
    pair("il y a 5 jours", "5 days ago"),
    pair("12,5 kilomètres", "12.5 kilometers"),
    pair("Italie et Japon", "Italy and Japan"),
    pair("Chine et Italie", "China and Italy"),
    pair("Japon, Chine et Pérou", "Japan, China, and Peru"),
    pair("Pérou et Japon", "Peru and Japan"),
    pair("Pérou et Chine", "Peru and China"),
    pair("vor 3 Tagen", "3 days ago", "de"),
]


@pytest.mark.parametrize(
    ("names", "source", "language", "want"),
    [
        (False, "il y a 14 jours", "fr", "14 days ago"),
        (False, "vor 8 Tagen", "de", "8 days ago"),
        (False, "7,25 kilomètres", "fr", "7.25 kilometers"),
        (False, "Italie et Pérou", "fr", "Italie et Pérou"),
        (True, "Italie et Pérou", "fr", "Italy and Peru"),
        (True, "Italie, Japon et Chine", "fr", "Italy, Japan, and China"),
        (True, "dans 3 jours", "fr", "dans 3 jours"),
        (True, "il y a 14 jours", "it", "il y a 14 jours"),
    ],
)
def test_templates_and_names(names, source, language, want):
    counting = CountingTranslator.learn(SEEN, names=names)
    assert counting.translate(pair(source, language=language)) == want


def test_the_most_frequent_translation_of_a_template_is_taken():
    rows = ["3 hours", "3 hours", "3 hrs"]
    counting = CountingTranslator.learn([pair("3 h", t) for t in rows], names=False)
    assert counting.translate(pair("9 h")) == "9 hours"


def test_digits_of_any_script_are_numbers():
    assert abstract("١٢ يومًا", {}).values == ("12",)


def test_the_target_is_not_looked_at():
    counting = CountingTranslator.learn(SEEN, names=True)
    assert counting.translate(pair("il y a 9 jours", "7 days ago")) == "9 days ago"


def test_a_zero_character_is_a_space():
    """The counting marks the places of numbers and names with it."""
    counting = CountingTranslator.learn([pair("3\0h", "3\0hours")], names=True)
    assert counting.translate(pair("9\0h")) == "9 hours"


def test_a_name_is_the_longest_text_that_its_sources_share():
    """Against a search of all parts; also of long lines, in a moment."""
    texts = ["xx Pérou yy Pér", "Pérou zz", "a Pérou, b Pé"]
    parts = {texts[0][i:j] for i in range(len(texts[0])) for j in range(i, len(texts[0]) + 1)}
    longest = max((p for p in parts if all(p in t for t in texts)), key=len)
    assert _shared(texts) == longest == "Pérou"
    assert _shared(["abc", "xyz"]) == ""
    assert _shared(["ab" * 3000 + "Peru", "Peru" + "cd" * 3000]) == "Peru"
