"""Languages drawn by temperature, and the options of vocabularies."""

from collections import Counter

import numpy as np
import pytest

from examples.gshard.config import TranslationConfig
from examples.gshard.corpus import Corpus, Pair
from examples.gshard.data import Encoded, batches, language_shares, sampled_order
from examples.gshard.options import parse_args
from examples.gshard.presets import preset
from examples.gshard.tokenizer import Tokenizer
from sbp.errors import SbpError
from sbp.moe.checkpoint import describe, differences

MODEL = preset("tiny-test").model
COUNTS = (900, 90, 9, 1)


@pytest.mark.parametrize("temperature", [1.0, 2.0, 5.0, 1e9])
def test_frequencies_are_those_of_the_formula(temperature):
    """In one epoch each language has its share to one place; over many the mean is the share; and
    the pairs of a language come equally often to one."""
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


def encoded():
    """400 pairs whose tokens are their numbers, in languages of 390 and 10."""
    numbers = np.arange(4, 404)[:, None]
    return Encoded(
        source=np.repeat(numbers, MODEL.source_length, axis=1),
        target=np.repeat(numbers, MODEL.target_length, axis=1),
        kept=tuple(range(400)),
        languages=np.repeat([0, 1], [390, 10]),
    )


@pytest.mark.parametrize("temperature", [1.0, 5.0])
def test_a_resumed_run_has_the_same_batches(temperature):
    text = encoded()
    first = batches(text, MODEL, 3, temperature=temperature)
    ahead = 400 // MODEL.sequences - 1  # the next batches are of two epochs
    for _ in range(ahead):
        next(first)
    state = first.get_state()
    want = [next(first) for _ in range(3)]
    again = batches(text, MODEL, 3, temperature=temperature)
    again.set_state(state)
    for batch in want:
        np.testing.assert_array_equal(next(again).source, batch.source)


def test_batches_have_the_languages_of_the_temperature():
    run = batches(encoded(), MODEL, 3, temperature=5.0)
    seen = np.concatenate([next(run).source[..., 0].ravel() for _ in range(400)])
    share = 10**0.2 / (10**0.2 + 390**0.2)
    assert abs(np.mean(seen >= 394) - share) < 0.02
    plain = batches(encoded(), MODEL, 3)
    epoch = [next(plain).source[..., 0].ravel() for _ in range(400 // MODEL.sequences)]
    assert Counter(np.concatenate(epoch).tolist()).most_common(1)[0][1] == 1


def test_bytes_spell_what_no_piece_does():
    texts = [f"word {i} of a text" for i in range(200)]
    without, having = (Tokenizer.train(texts, 320, byte_fallback=b) for b in (False, True))
    assert having.decode(having.encode(["word ж"])) == ["word ж"]
    assert "ж" not in without.decode(without.encode(["word ж"]))[0]
    assert len(having) >= 256 > len(without)
    with pytest.raises(SbpError, match="no vocabulary of 200 pieces"):
        Tokenizer.train(texts, 200, byte_fallback=True)


def test_coverage_leaves_out_rare_characters():
    texts = ["abcdefgh " * 20] * 50 + ["ж"]
    all_of_them, most = (Tokenizer.train(texts, 40, coverage=c) for c in (1.0, 0.99))
    assert all_of_them.decode(all_of_them.encode(["ж"])) == ["ж"]
    assert most.decode(most.encode(["ж"])) != ["ж"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ("character_coverage=0.5", "character_coverage is 0.5; SentencePiece takes 0.98 to 1"),
        ("character_coverage=nan", "character_coverage is nan"),
        ("sampling_temperature=0.5", "sampling_temperature is 0.5; it must be at least 1"),
        ("sampling_temperature=inf", "sampling_temperature is inf"),
        ("vocabulary_threads=0", "vocabulary_threads is 0"),
        ("sampling_temperature=5 pack=true", "leave out one of the two"),
    ],
)
def test_options_out_of_bounds(options, message):
    argv = [word for option in options.split() for word in ("--set", option)]
    with pytest.raises(SbpError, match=message):
        parse_args(["--preset", "tiny-test", *argv])


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
