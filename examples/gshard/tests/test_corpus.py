"""The corpus: generated text is right by construction, held-out text unseen; a bad file is named
with its line; catalogues of wheels; vocabularies; batches in an order that resumes."""

import dataclasses
import io
import random
import re
import subprocess
import unicodedata
import zipfile
from collections import Counter, defaultdict

import jax
import numpy as np
import pytest
from babel import Locale
from babel.messages.catalog import Catalog
from babel.messages.mofile import write_mo
from babel.messages.pofile import write_po

from examples.gshard import sources
from examples.gshard.config import TranslationConfig
from examples.gshard.corpus import (
    HELDOUT_SETS,
    Corpus,
    Pair,
    from_pairs,
    generate,
    is_heldout,
    language_counts,
    parts_of,
    read_tsv,
)
from examples.gshard.data import (
    Encoded,
    batches,
    encode_pairs,
    evaluation_batches,
    language_shares,
    make_batch,
    sampled_order,
)
from examples.gshard.phrases import (
    CURRENCIES,
    LANGUAGES,
    TERRITORIES,
    TONGUES,
    UNSEEN_NAMES,
    draw,
    render,
)
from examples.gshard.presets import preset
from examples.gshard.sources import PACKAGES, fetch, language_code, load, read_wheel
from examples.gshard.tests.runs import MODEL, TRAIN as PLAIN
from examples.gshard.tokenizer import Tokenizer
from sbp.moe.checkpoint import describe, differences
from sbp.moe.config import BOS, EOS, PAD
from tests.moe.test_packing import drawn
from tests.same import refused

TRAIN = dataclasses.replace(PLAIN, languages=5, train_pairs=400, heldout_per_language=5)


@pytest.fixture(scope="module")
def corpus():
    return generate(TRAIN)


@pytest.fixture(scope="module")
def vocabularies(corpus) -> tuple[Tokenizer, Tokenizer]:
    return Tokenizer.train([p.source for p in corpus.train], 300), Tokenizer.train(
        [p.target for p in corpus.train], 300
    )


@pytest.mark.parametrize(
    ("meaning", "language", "text"),
    [
        (("date", 2021, 3, 15, "full"), "en", "Monday, March 15, 2021"),
        (("date", 2021, 3, 15, "long"), "de", "15. März 2021"),
        (("quantity", 12.5, "length-kilometer"), "fr", "12,5 kilomètres"),
        (("quantity", 19, "length-kilometer"), "en", "19 kilometers"),
        (("quantity", 19.0, "length-kilometer"), "en", "19 kilometers"),  # on the same side
        (("duration", (3, 2), (20, 1)), "en", "3 hours and 20 minutes"),
        (("relative", -5, 2), "en", "5 hours ago"),
        (("relative", 14, 6), "en", "in 14 years"),
        (("relative", 3, 5), "es", "dentro de 3 meses"),
        (("money", 1234, "EUR"), "en", "1,234 euros"),
        (("percent", 345), "en", "34.5%"),
        (("territories", "DE", "FR", "JP"), "it", "Germania, Francia e Giappone"),
        (("languages", "de", "ja"), "en", "German and Japanese"),
        (("time", 15, 4), "en", "3:04 PM"),
        (("month", 2021, 3), "ru", "март 2021 г."),
        (("visit", "IT", 1999, 1, 2), "en", "Italy and January 2, 1999"),
        (("both", ("percent", 50), ("time", 15, 4)), "de", "5 % und 15:04"),
    ],
)
def test_renderings(meaning, language, text):
    assert render(meaning, language) == text


def test_a_hundred_languages_can_say_things():
    assert len(LANGUAGES) == len(set(LANGUAGES)) == 100
    rng = random.Random(0)
    meanings = [draw(rng) for _ in range(40)]
    for language in LANGUAGES:
        assert sum(render(m, language) is not None for m in meanings) > 15, language


def test_generation_is_deterministic_and_languages_do_not_disturb_each_other(corpus):
    assert generate(TRAIN) == corpus
    more = generate(dataclasses.replace(TRAIN, languages=6, train_pairs=480))
    held = {p for p in corpus.heldout_pairs if p.language == "de"}
    assert held and held <= set(more.heldout_pairs)
    assert generate(dataclasses.replace(TRAIN, seed=1)).train != corpus.train


texts = lambda pairs: {p.target for p in pairs} | {p.source for p in pairs}


@pytest.fixture(scope="module")
def whole():
    """The corpus of `make train`."""
    return generate(preset("tiny-mt").train)


def test_heldout_text_is_never_trained_on(corpus, whole):
    for one in (corpus, whole):
        assert texts(one.heldout_pairs).isdisjoint(texts(one.train))
    sizes = [len(pairs) for pairs in whole.heldout.values()]
    assert tuple(whole.heldout) == HELDOUT_SETS and min(sizes) >= 100 and sum(sizes) >= 1000
    for pairs in corpus.heldout.values():
        counts = Counter(pair.language for pair in pairs)
        assert counts == dict.fromkeys(corpus.languages, TRAIN.heldout_per_language)


def test_references_are_long_enough_for_bleu(whole):
    pattern = r"\d+(?:[.,]\d+)*|\w+|[^\w\s]"  # "1,234.5" is one token
    assert min(len(re.findall(pattern, pair.target)) for pair in whole.heldout_pairs) >= 4


NAMES = {
    **{code: ("territories", code) for code in TERRITORIES},
    **{code: ("languages", code) for code in TONGUES},
    **{code: ("currencies", code) for code in CURRENCIES},
}


def named(language):
    """The text of each name but units in a language, from Babel alone."""
    locale = Locale.parse(language)
    found = {code: getattr(locale, table).get(key) for code, (table, key) in NAMES.items()}
    return {code: unicodedata.normalize("NFKC", text) for code, text in found.items() if text}


def test_no_training_text_has_an_unseen_name(whole):
    """A longer name that contains an unseen one does not count, such as Switzerland, which contains
    Sweden in Azeri."""
    sources = defaultdict(list)
    for pair in whole.train:
        sources[pair.language].append(pair.source)
        sources["en"].append(pair.target)
    found = 0
    for language, lines in sources.items():
        known = named(language)
        for code in UNSEEN_NAMES & set(known):
            text = "\n".join(lines)
            for other, name in known.items():
                if other not in UNSEEN_NAMES and known[code] in name:
                    text = text.replace(name, "")
            # A part of a word may be the name by chance where names are two characters long.
            assert len(known[code]) <= 3 or known[code] not in text, (language, code, known[code])
            found += 1
    assert found > 800


def test_unseen_sets_have_what_training_has_not(whole):
    english = named("en")
    unseen = {english[code] for code in UNSEEN_NAMES if code in english} | {"mile", "liter"}

    def stem(text):
        return any(name.split()[-1].rstrip("s") in text for name in unseen) or "kronor" in text

    assert all(stem(pair.target) for pair in whole.heldout["unseen names"])
    assert sum(p.target.count(",") == 3 for p in whole.heldout["unseen templates"]) > 100
    # What is new there is the template alone.
    for pairs in (whole.heldout["unseen templates"], whole.heldout["recombination"]):
        assert not [p for p in pairs if stem(p.target)]
    assert not [p for p in whole.train if re.fullmatch(r"(\w+, ){3}and \w+", p.target)]


@pytest.mark.parametrize(
    ("meaning", "part"),
    [
        (("territories", "DE", "FR", "JP", "IT"), "unseen templates"),
        (("territories", "DE", "SE", "JP"), "unseen names"),
        (("both", ("date", 2021, 3, 15, "long"), ("money", 3, "EUR")), "unseen templates"),
        (("both", ("quantity", 3, "length-mile"), ("time", 3, 4)), "unseen names"),
        (("visit", "UA", 2021, 3, 15), "unseen names"),
        (("money", 12, "BRL"), "unseen names"),
    ],
)
def test_the_set_of_a_meaning(meaning, part):
    assert parts_of(meaning, "") == (part,)


def test_a_known_meaning_is_trained_on_or_recombined():
    meanings = [("territories", a, "JP") for a in ("DE", "FR", "IT", "ES", "PT", "NL", "DK", "PL")]
    found = {parts_of(m, f"{m[1]} {i}") for m in meanings for i in range(20)}
    assert found == {(), ("recombination",)}


def numbered_pairs(source, target, language, count):
    """Pairs whose texts have their number in the place of `#`."""
    return [
        Pair(
            source=source.replace("#", f"{i}"),
            target=target.replace("#", f"{i}"),
            language=language,
        )
        for i in range(count)
    ]


def plain(text):
    """Letters and digits without case and marks."""
    return "".join(ch for ch in unicodedata.normalize("NFKD", text.lower()) if ch.isalnum())


WORDS = numbered_pairs("wort #", "word #", "de", 100)


@pytest.mark.parametrize(
    ("pairs", "most"),
    [
        ([*numbered_pairs("mot", "word #", "fr", 100), *WORDS], 3),
        ([*WORDS, *WORDS], 100),
        (
            [
                *numbered_pairs("wort #", "Word #", "de", 200),
                *numbered_pairs("mot #", "WORD #!", "fr", 200),
                *numbered_pairs("WÖRT #.", "other #", "de", 200),
            ],
            50,
        ),
    ],
    ids=["one source, many translations", "equal pairs", "case, marks and punctuation"],
)
def test_a_text_is_on_one_side(pairs, most):
    split = from_pairs(pairs, most)
    for side in ("source", "target"):
        kept, out = (
            {plain(getattr(p, side)) for p in ps} for ps in (split.train, split.heldout_pairs)
        )
        assert kept and out and kept.isdisjoint(out)
    assert len(set(split.heldout_pairs)) == len(split.heldout_pairs) > 1
    # All others went, such as those beyond `most` of a language.
    all_of_them = len(split.train) + len(split.heldout_pairs) + sum(split.discarded.values())
    assert all_of_them == len(pairs)


def test_languages_follow_the_power_law():
    counts = language_counts(("a", "b", "c", "d"), 1000, 1.0)
    assert counts == {"a": 480, "b": 240, "c": 160, "d": 120}
    assert set(language_counts(("a", "b"), 10, 0.0).values()) == {5}


def test_too_many_languages():
    refused("1 to 100", generate, dataclasses.replace(TRAIN, languages=101))


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "cannot read"),
        (b"", "holds no text"),
        (b"\n \n", "holds no text"),
        (b"a line\na\tb\tfr\n", r"corpus.tsv:2: 3 columns; the first line has no tab"),
        (b"a\tb\tfr\nx\ty\n", r"corpus.tsv:2: 2 columns"),
        (b"a\tb\tfr\nx\n", r"corpus.tsv:2: 1 column;"),
        (b"a\tb\tfr\n\tb\tde\n", r"corpus.tsv:2: an empty column"),
        (b"a\tb\tfr\nx\xff\tb\tde\n", r"corpus.tsv:2: byte 2 is not UTF-8"),
    ],
)
def test_bad_files_are_named_with_their_line(tmp_path, content, message):
    path = tmp_path / "corpus.tsv"
    if content is not None:
        path.write_bytes(content)
    refused(f"(?s)^bad-corpus: .*{message}", read_tsv, path)


def test_own_text_is_read_and_split(tmp_path):
    """A byte order mark is no text."""
    path = tmp_path / "corpus.tsv"
    lines = [f"wort {i}\tword {i}\tde\r\n" for i in range(100)]
    path.write_text("".join([*lines, "mot 1\tword 1\tfr\n"]), "utf-8-sig")
    pairs = read_tsv(path)
    assert pairs[0] == Pair(source="wort 0", target="word 0", language="de")
    split = from_pairs(pairs, 3)
    assert split.languages == ("de", "fr") and 0 < len(split.heldout["held out"]) <= 3
    assert not any(is_heldout(p.target) for p in split.train)
    assert from_pairs(pairs, 3, seed=1).heldout != from_pairs(pairs, 3, seed=2).heldout
    assert from_pairs(pairs, 3, seed=1).train == from_pairs(pairs, 3, seed=2).train
    refused("held out", from_pairs, [p for p in pairs if not is_heldout(p.target)], 3)


def test_plain_text_is_split_and_long_lines_are_cut(tmp_path, vocabularies):
    path, test = tmp_path / "corpus.txt", tmp_path / "test.tsv"
    path.write_text("".join(f"{i} is the next word of a text\n" for i in range(100)), "utf-8")
    pairs = read_tsv(path)
    long = Tokenizer.train(["xyz " * 2000, *(pair.target for pair in pairs)], 64)
    assert long.decode(long.encode(["xyz"])) == ["xyz"]
    assert pairs[7] == Pair(source="", target="7 is the next word of a text", language="")
    split = from_pairs(pairs, 3)
    assert split.is_plain and 80 < len(split.train) < 100 and len(split.heldout_pairs) == 3
    short = dataclasses.replace(MODEL, target_length=4)
    encoded = encode_pairs(pairs, vocabularies[0], vocabularies[1], short)
    for i in (0, 99):
        rows = encoded.target[np.asarray(encoded.kept) == i]
        assert len(rows) > 1 and vocabularies[1].decode([rows.ravel()]) == [pairs[i].target]
    test.write_text("a\tb\tfr\n", "utf-8")
    refused(
        "two files of one kind",
        load,
        dataclasses.replace(TRAIN, data=str(path), eval_data=str(test)),
        print,
    )


def test_tokenizer_round_trip_and_determinism(corpus, vocabularies):
    source, target = vocabularies
    texts = [p.target for p in corpus.train[:50]]
    rows = target.encode(texts)
    assert all(row[-1] == EOS and PAD not in row for row in rows) and target.decode(rows) == texts
    assert target.decode([[BOS, *rows[0], 7, 8]]) == texts[:1]
    assert Tokenizer.train([p.source for p in corpus.train], 300).model == source.model
    refused("no vocabulary of 5 pieces", Tokenizer.train, texts, 5)


def test_the_last_batch_of_an_evaluation_is_filled_with_padding(corpus, vocabularies):
    encoded = encode_pairs(corpus.train[:3], vocabularies[0], vocabularies[1], MODEL)
    rows = len(encoded.kept)
    ((where, batch),) = list(evaluation_batches(encoded, MODEL))
    assert where == slice(0, rows)
    np.testing.assert_array_equal(
        batch.source, make_batch(encoded.source, encoded.target, MODEL).source
    )
    assert (batch.target_in.reshape(MODEL.sequences, -1)[rows:] == PAD).all()


def catalogue(messages, *, compiled=True, fuzzy=()):
    catalog = Catalog(locale="de")
    for english, text in messages.items():
        catalog.add(english, text, flags=["fuzzy"] if english in fuzzy else [])
    content = io.BytesIO()
    (write_mo if compiled else write_po)(content, catalog)
    return content.getvalue()


def wheel(folder, name, version, languages, files=None):
    """A wheel with a compiled catalogue for each language, and other files."""
    path = folder / f"{name}-{version}-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as file:
        about = f"Metadata-Version: 2.4\nName: {name.title()}\nVersion: {version}\nLicense: MIT\n"
        file.writestr(f"{name}-{version}.dist-info/METADATA", about)
        for language, messages in languages.items():
            where = f"{name}/locale/{language}/LC_MESSAGES/{name}.mo"
            file.writestr(where, catalogue(messages))
        for where, content in (files or {}).items():
            file.writestr(where, content)
    return path


def test_messages_with_a_translation_are_read(tmp_path):
    messages = {
        "Save  the\nfile": "Datei sichern",
        "OK": "OK",
        "42": "zweiundvierzig",
        "Nothing yet": "",
        ("%(n)d day", "%(n)d days"): ("%(n)d Tag", "%(n)d Tage"),
    }
    source = catalogue({"Open": "Ouvrir", "Shut": "Fermé?"}, compiled=False, fuzzy=("Shut",))
    package = read_wheel(
        wheel(
            tmp_path,
            "demo",
            "1.2",
            {"de_DE": messages, "en_GB": {"Color": "Colour"}, "readme": {"A word": "Ein Wort"}},
            {
                "demo/locale/fr/LC_MESSAGES/demo.po": source,
                # The source of a compiled catalogue is not read besides.
                "demo/locale/de_DE/LC_MESSAGES/demo.po": catalogue({"No": "Nein"}, compiled=False),
            },
        )
    )
    assert {(p.source, p.target, p.language) for p in package.pairs} == {
        ("Datei sichern", "Save the file", "de"),
        ("Ouvrir", "Open", "fr"),
    }
    assert (package.name, package.version, package.licence, package.messages) == (
        "Demo",
        "1.2",
        "MIT",
        2,
    )


@pytest.mark.parametrize(
    ("name", "code"),
    [
        ("pt_BR", "pt"),
        ("pt-PT", "pt_PT"),
        ("zh_Hans_CN", "zh"),
        ("zh_TW", "zh_Hant"),
        ("sr@latin", "sr@latin"),
        ("sr_Latn", "sr_Latn"),
        ("locale", None),
    ],
)
def test_what_goes_without_saying_is_left_out_of_a_code(name, code):
    assert language_code(name) == code


def test_a_damaged_wheel_is_named(tmp_path):
    path = tmp_path / "demo-1.0-py3-none-any.whl"
    path.write_bytes(b"no archive")
    refused(r"^bad-corpus: .*demo-1\.0.*delete it", read_wheel, path)


def test_wheels_in_the_cache_are_not_fetched(tmp_path, monkeypatch):
    asked = []

    def run(command, **_):
        asked.append(command)
        return subprocess.CompletedProcess(command, 1, "", "ERROR: no network")

    monkeypatch.setattr(subprocess, "run", run)
    kept = wheel(tmp_path, "my_demo", "1.0", {})
    assert fetch(["My-Demo==1.0"], tmp_path, print) == [kept] and not asked
    said = []
    refused(
        r"cannot download Other==2.0: ERROR: no network",
        fetch,
        ["Other==2.0"],
        tmp_path,
        said.append,
    )
    assert asked[0][-1] == "Other==2.0" and "Other==2.0" in said[0]
    (tmp_path / "file").write_text("")
    refused("XDG_CACHE_HOME", fetch, ["Other==2.0"], tmp_path / "file" / "folder", print)


def test_packages_have_fixed_versions():
    assert all(package.count("==") == 1 for package in PACKAGES)


def test_a_test_set_of_the_users_own_is_not_trained_on(tmp_path):
    train, test = tmp_path / "train.tsv", tmp_path / "test.tsv"
    train.write_text("".join(f"wort {i}\tword {i}\tde\n" for i in range(20)), "utf-8")
    test.write_text("Wort  3!\tanother word\tde\nandere\tＷord 5\tfr\n", "utf-8")
    options = dataclasses.replace(PLAIN, data=str(train), eval_data=str(test))
    split = load(options, print)
    assert split.heldout == {"test set": read_tsv(test)}
    assert len(split.train) == 18 and split.discarded == {"have a text of the test set": 2}
    refused(
        "each of the 20 training pairs",
        load,
        dataclasses.replace(options, eval_data=str(train)),
        print,
    )
    refused("give that too", load, dataclasses.replace(options, data=""), print)


def test_catalogues_are_split_by_english_message(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(sources, "PACKAGES", ("One==1.0", "Two==2.0"))
    messages = {f"Message {i}": f"Nachricht {i}" for i in range(200)}
    folder = sources.cache_folder()
    folder.mkdir(parents=True)
    wheel(folder, "one", "1.0", {"de": messages, "fr": {"Yes": "Oui"}})
    wheel(folder, "two", "2.0", {"de": messages, "ja": {"No": "いいえ", "Yes": "はい"}})
    said = []
    options = dataclasses.replace(PLAIN, corpus="catalogues", languages=2)
    split = load(options, said.append)
    assert split.languages == ("de", "ja")
    assert len([*split.train, *split.heldout_pairs]) + sum(split.discarded.values()) == 202
    assert {p.target for p in split.train}.isdisjoint(p.target for p in split.heldout_pairs)
    assert (said[0], said[-1]) == (
        "One 1.0 (MIT): 201 messages, 201 translations",
        "202 English messages; the 2 languages with most translations of 3",
    )
    refused("two corpora", load, dataclasses.replace(options, data="mine.tsv"), print)


COUNTS = (900, 90, 9, 1)


@pytest.mark.parametrize("temperature", [1.0, 2.0, 5.0, 1e9])
def test_frequencies_are_those_of_the_formula(temperature):
    """In one epoch the count of a language differs from its share by less than one. Over many
    epochs the mean is the share. The counts of two pairs of a language differ by at most one."""
    weights = [n ** (1 / temperature) for n in COUNTS]
    want = np.asarray(weights) / sum(weights) * 1000
    languages = np.repeat(np.arange(4), COUNTS)
    rng = np.random.default_rng(0)
    total = np.zeros(4)
    for _ in range(400):
        order = sampled_order(languages, temperature, rng)
        assert len(order) == 1000
        found = np.bincount(languages[order], minlength=4)
        assert (np.abs(found - want) < 1).all()
        total += found
        often = np.bincount(order, minlength=1000)
        for language in range(4):
            assert np.ptp(often[languages == language]) <= 1
    # The standard deviation of a mean of 400 roundings is at most 0.5 / 20.
    np.testing.assert_allclose(total / 400, want, atol=0.1)


def test_shares_of_many_more_pairs_than_floats_multiply():
    np.testing.assert_allclose(language_shares(np.asarray([10**18, 1]), 1.0), [1, 1e-18])
    np.testing.assert_allclose(language_shares(np.asarray([7, 7, 7]), 3.0), 1 / 3)


def numbered():
    """400 pairs whose tokens are their numbers, in languages of 390 and 10."""
    numbers = np.arange(4, 404)[:, None]
    return Encoded(
        source=np.repeat(numbers, MODEL.source_length, axis=1),
        target=np.repeat(numbers, MODEL.target_length, axis=1),
        kept=tuple(range(400)),
        languages=np.repeat([0, 1], [390, 10]),
    )


def packed():
    """Several pairs in each row."""
    source, target = drawn(1)
    text = Encoded(source=source, target=target, kept=tuple(range(len(source)))).packed(3)
    assert text.filled > 1.5 * np.mean([source != 0, target != 0])
    return text


@pytest.mark.parametrize(("make", "temperature"), [(numbered, 1.0), (numbered, 5.0), (packed, 1.0)])
def test_a_resumed_run_has_the_same_batches(make, temperature):
    text = make()
    first, again = (batches(text, MODEL, 3, temperature=temperature) for _ in range(2))
    for _ in range(len(text.source) // MODEL.sequences - 1):  # the next ones are of two epochs
        next(first)
    again.set_state(first.get_state())
    for _ in range(3):
        jax.tree.map(np.testing.assert_array_equal, next(again), next(first))


def test_batches_have_the_languages_of_the_temperature():
    run = batches(numbered(), MODEL, 3, temperature=5.0)
    seen = np.concatenate([next(run).source[..., 0].ravel() for _ in range(400)])
    assert abs(np.mean(seen >= 394) - 10**0.2 / (10**0.2 + 390**0.2)) < 0.02
    plain = batches(numbered(), MODEL, 3)
    epoch = [next(plain).source[..., 0].ravel() for _ in range(400 // MODEL.sequences)]
    assert Counter(np.concatenate(epoch).tolist()).most_common(1)[0][1] == 1


def test_bytes_spell_what_no_piece_does():
    texts = [f"word {i} of a text" for i in range(200)]
    without, having = (Tokenizer.train(texts, 320, byte_fallback=b) for b in (False, True))
    assert having.decode(having.encode(["word ж"])) == ["word ж"]
    assert "ж" not in without.decode(without.encode(["word ж"]))[0]
    assert len(having) >= 256 > len(without)
    refused("no vocabulary of 200 pieces", Tokenizer.train, texts, 200, byte_fallback=True)


def test_normalization_is_an_option_and_its_losses_are_counted():
    texts = ["½ cup of ﬂour", "Ａｌｌ rights", "plain words"] * 60
    usual, kept = (Tokenizer.train(texts, 60, normalization=n) for n in ("nmt_nfkc", "identity"))
    assert usual.changed(texts[:3]) == 2 and kept.changed(texts[:3]) == 0
    assert usual.decode(usual.encode(["Ａｌｌ"])) == ["All"]


def test_coverage_leaves_out_rare_characters():
    texts = ["abcdefgh " * 20] * 50 + ["ж"]
    all_of_them, most = (Tokenizer.train(texts, 40, coverage=c) for c in (1.0, 0.99))
    assert all_of_them.decode(all_of_them.encode(["ж"])) == ["ж"]
    assert most.decode(most.encode(["ж"])) != ["ж"]


@pytest.mark.parametrize(
    ("options", "text", "named"),
    [
        ({"sampling_temperature": 5.0}, "a", ["train.sampling_temperature"]),
        ({"byte_fallback": True}, "a", ["train.byte_fallback"]),
        ({"character_coverage": 0.99}, "a", ["train.character_coverage"]),
        ({"vocabulary_threads": 4}, "a", []),
        ({}, "b", ["corpus.digest"]),
    ],
)
def test_checkpoints_are_bound_to_the_text_and_the_options_but_threads(options, text, named):
    plain, other = (
        describe(
            MODEL,
            TranslationConfig(**given),
            Corpus(
                train=(Pair(source=source, target="b", language="de"),),
                heldout={},
                languages=("de",),
            ).digest,
        )
        for given, source in (({}, "a"), (options, text))
    )
    assert [line.split(":")[0] for line in differences(plain, other)] == named
