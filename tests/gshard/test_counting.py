"""The counting baseline: what it knows are templates and names that it saw, and nothing else."""

import pytest

from examples.gshard.corpus import Pair
from examples.gshard.counting import CountingTranslator, _shared, abstract


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
