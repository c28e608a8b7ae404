"""Scores: those of sacrebleu, by held-out set, beside systems that learn nothing."""

import pytest
import sacrebleu

from examples.gshard.corpus import Pair
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
