"""Scores: those of sacrebleu, by held-out set and by language, beside systems that learn nothing,
and beside other runs (figure 6 of the GShard paper); the loss on held-out text; the page of
curves."""

import dataclasses
import html
import io
import json
import re
from typing import Any

import jax
import numpy as np
import pytest
import sacrebleu
from rich.console import Console

import sbp
from examples.gshard.corpus import Pair, generate
from examples.gshard.counting import CountingTranslator, _shared
from examples.gshard.curves import _drawing, charts
from examples.gshard.deltas import figure6, language_deltas
from examples.gshard.display import show_evaluation
from examples.gshard.drawing import write_drawings
from examples.gshard.evaluate import MODEL, baselines, evaluate, language_groups
from examples.gshard.options import parse_args
from examples.gshard.presets import preset
from examples.gshard.tokenizer import Tokenizer
from examples.gshard.train import plan_loss, sample
from sbp.moe.config import PAD
from sbp.moe.model import init_params, loss_fn
from sbp.moe.sharding import sharding_of
from sbp.moe.trainer import read_metrics

ROWS = [
    Pair(source="der Hund läuft nach Hause", target="the dog runs home now", language="de"),
    Pair(source="le chat dort ici bien", target="the cat sleeps here well", language="fr"),
    Pair(source="le chien dort là bien", target="the dog sleeps there well", language="fr"),
]


def test_a_set_is_scored_by_exact_match_and_by_sacrebleus_chrf():
    nearly = [ROWS[0].target, "the cat sleeps there well", "a dog"]
    result = evaluate(
        {"old": ROWS[:1], "new": ROWS[1:]},
        {MODEL: nearly, "copying": [pair.source for pair in ROWS]},
        ("fr", "de"),
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
    assert result.too_long == 1 and result.overall.model.exact == pytest.approx(200 / 3)
    assert not result.overall.beats_baselines


def test_references_that_the_vocabulary_cannot_spell_are_counted_and_shown():
    rare = [*ROWS, Pair(source="½", target="½ of the dog runs", language="fr")]
    right = [pair.target for pair in rare]
    vocabulary = Tokenizer.train(right * 40, 80)
    systems = {MODEL: right, "copying": right}
    shown = io.StringIO()
    show_evaluation(
        Console(file=shown, width=200), evaluate({"all": rare}, systems, ("de", "fr"), vocabulary)
    )
    assert "the vocabulary cannot spell: 1;" in shown.getvalue()


def test_bleu_is_given_for_a_hundred_sentences_and_not_for_fewer():
    many = [
        Pair(source=f"{i} Hunde laufen nach Hause", target=f"{i} dogs run home now", language="de")
        for i in range(100)
    ]
    right = [pair.target for pair in [*many, *many[:99]]]
    result = evaluate({"all": many, "few": many[:99]}, {MODEL: right, "copying": right}, ("de",))
    assert result.sets[0].model.bleu == pytest.approx(100) and result.sets[1].model.bleu is None
    # Where a baseline is as good as the model, the model is not ahead.
    assert not result.overall.beats_baselines


def test_baselines_see_the_training_text_and_no_reference():
    train = [
        Pair(source=f"il y a {n} jours", target=f"{n} days ago", language="fr") for n in (3, 5)
    ]
    found = baselines(train, [Pair(source="il y a 9 jours", target="", language="fr")])
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
    found = language_deltas(scored(("fr", "sw")), ["one"], {"sw": 10, "fr": 5000})
    assert found.measure == "BLEU" and [one.language for one in found.languages] == ["fr", "sw"]
    for one in found.languages:
        ours, theirs = (
            sacrebleu.BLEU().corpus_score(spoiled(n, REFERENCES), [REFERENCES]).score
            for n in (3, 2)
        )
        assert (one.score, one.baseline) == (ours, theirs) and one.delta == ours - theirs > 0
        assert one.sentences == 120
    assert found.mean == sum(one.delta for one in found.languages) / 2 and found.ahead == 2


def test_deltas_are_of_chrf_where_one_language_has_few_sentences_and_the_best_other_counts():
    result = scored(("sw", "de", "fr"))
    found = language_deltas(result, ["one", "two"], {"de": 300, "fr": 300, "sw": 10})
    assert (found.measure, [one.language for one in found.languages]) == (
        "chrF",
        ["de", "fr", "sw"],
    )
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
    pair("٣ يومًا", "3 days", "ar"),
    *(pair("3 h", text) for text in ("3 hrs", "3 hours", "3 hours")),
    pair("3\0min", "3\0minutes"),  # the counting marks the places of numbers and names with \0
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
        (False, "١٢ يومًا", "ar", "12 days"),
        (False, "9 h", "fr", "9 hours"),
        (True, "9\0min", "fr", "9 minutes"),
    ],
)
def test_templates_and_names(names, source, language, want):
    """The target of the pair is not looked at."""
    counting = CountingTranslator.learn(SEEN, names=names)
    assert counting.translate(pair(source, "7 days", language)) == want


def test_a_name_is_the_longest_text_that_its_sources_share():
    """Compares the name with the result of a search of all parts. Long lines end, too."""
    texts = ["xx Pérou yy Pér", "Pérou zz", "a Pérou, b Pé"]
    parts = {texts[0][i:j] for i in range(len(texts[0])) for j in range(i, len(texts[0]) + 1)}
    longest = max((p for p in parts if all(p in t for t in texts)), key=len)
    assert _shared(texts) == longest == "Pérou" and _shared(["abc", "xyz"]) == ""
    assert _shared(["ab" * 3000 + "Peru", "Peru" + "cd" * 3000]) == "Peru"


RUN = parse_args(["--preset", "tiny-test", "--set", "source_length=24", "--set", "dropout=0.3"])


@pytest.fixture(scope="module")
def batches():
    corpus = generate(dataclasses.replace(preset("tiny-test").train, heldout_per_language=2))
    words = [[getattr(pair, side) for pair in corpus.train] for side in ("source", "target")]
    source, target = (Tokenizer.train(texts, 300) for texts in words)
    found = sample(corpus.heldout_pairs, source, target, RUN.model, seed=0)
    again = sample(corpus.heldout_pairs, source, target, RUN.model, seed=0)
    jax.tree.map(np.testing.assert_array_equal, found, again)
    return found


def test_loss_per_token_of_all_batches_equals_one_device(batches):
    assert len(batches) == 1
    # A second batch of other size: its tokens count as much as those of the first.
    both = [
        batches[0],
        jax.tree.map(lambda ids: np.where(np.arange(8)[:, None, None] < 2, ids, PAD), batches[0]),
    ]
    mesh = sbp.make_mesh([2, 4], ["data", "expert"])
    params = init_params(jax.random.key(0), RUN.model)
    shardings = jax.tree.map(
        lambda _: jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec()), params
    )
    loss = plan_loss(RUN.model, sharding_of(RUN.mesh), jax.eval_shape(lambda: params), shardings)
    got = loss(jax.device_put(params, shardings), both)
    alone = [loss_fn(params, batch, RUN.model)[1].nll for batch in both]
    tokens = [np.sum(batch.target_out != PAD) for batch in both]
    assert tokens[0] > tokens[1] > 0
    np.testing.assert_allclose(got, np.average(alone, weights=tokens), rtol=1e-5)


def test_without_a_pair_that_fits_there_is_no_sample(batches):
    long = [Pair(source="wort " * 200, target="word", language="de")]
    words = Tokenizer.train(["wort word"] * 20, 20)
    assert sample(long, words, words, RUN.model, seed=0) == []


def page_of(folder, lines, command):
    """The texts between tags of the page, and the names of all tags."""
    (folder / "metrics.jsonl").write_bytes(b"".join(line + b"\n" for line in lines))
    assert command("curves", str(folder)).out == f"wrote {folder / 'curves.html'}\n"
    page = (folder / "curves.html").read_text("utf-8")
    words = [html.unescape(text).strip() for text in re.split("<[^>]*>", page)]
    return [text for text in words if text], re.findall(r"<(\w+)", page)


step_line = lambda number, **values: json.dumps({"step": number, **values}).encode()


def row_of(name, words):
    """What a table says of a curve."""
    at = words.index(name) + 1
    return words[at : at + 5]


def test_curves_are_drawn_with_their_numbers(tmp_path, command):
    loss = [5.0, 3.0, None, 1.0]
    lines = [step_line(i, loss=v, **{"encoder/0/drop": 0.5}) for i, v in enumerate(loss, start=1)]
    words, tags = page_of(tmp_path, lines, command)
    assert row_of("loss", words) == ["5", "1", "1", "5", "1"]
    assert row_of("encoder/0", words) == ["0.5", "0.5", "0.5", "0.5", "0"]
    assert tags.count("img") == 2 and "script" not in tags
    (line,) = drawn(charts(read_metrics(tmp_path))[0])
    np.testing.assert_array_equal(line, [[1, 5], [2, 3], [3, np.nan], [4, 1]])


def drawn(chart):
    """The points of the lines of a chart."""
    return [line.get_xydata() for line in _drawing(chart).figure.axes[0].lines]


def test_files_that_are_damaged_partial_or_strange(tmp_path, command):
    lines = [
        step_line(3, loss=1.0),
        b'{"step": 1, "loss": NaN, "grad_norm": 1e999}',
        b'{"step": 2, "loss": "<b>", "encoder/0/load": [1, "x"]}',
        step_line(3, loss=2.0, grad_norm=True),  # the run went back to step 2
        step_line(4, loss=[], **{"<i>/load": [1, 3], "$_$/load": [1, 1]}),
        b'{"step": 5, "loss": 1' + b"0" * 400 + b"}",
        b"\xff\x00",
        b'{"step": 6, "lo',
    ]
    words, tags = page_of(tmp_path, lines, command)
    assert row_of("loss", words) == ["2", "2", "2", "2", "4"]
    assert words[words.index("grad_norm") + 1] == "2" and "$_$" in words
    assert row_of("<i>", words)[0] == "1.5" and "b" not in tags and "i" not in tags


def test_numbers_near_the_largest_have_a_place(tmp_path, command):
    words, _ = page_of(tmp_path, [step_line(1, loss=-1.7e308), step_line(2, loss=1.7e308)], command)
    assert row_of("loss", words)[:2] == ["-1.7e+308", "1.7e+308"]


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (None, "has no step of a run"),
        (b"", "has no step of a run"),
        (b"rubbish\n", "has no step of a run"),
        ("a folder", "cannot read"),
    ],
)
def test_a_folder_without_steps_is_refused(content, said, tmp_path, command):
    file = tmp_path / "metrics.jsonl"
    if content is not None:
        file.mkdir() if content == "a folder" else file.write_bytes(content)
    assert said in " ".join(command("curves", str(tmp_path), status=2).err.split())
    assert not (tmp_path / "curves.html").exists()
