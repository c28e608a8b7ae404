"""Where the text of a run comes from."""

import dataclasses

import pytest

from examples.gshard import sources
from examples.gshard.corpus import read_tsv
from examples.gshard.presets import preset
from examples.gshard.sources import load
from sbp.errors import SbpError
from tests.gshard.test_catalogues import wheel

TRAIN = preset("tiny-test").train


def test_a_test_set_of_the_users_own_is_not_trained_on(tmp_path):
    train, test = tmp_path / "train.tsv", tmp_path / "test.tsv"
    train.write_text("".join(f"wort {i}\tword {i}\tde\n" for i in range(20)), "utf-8")
    test.write_text("Wort  3!\tanother word\tde\nandere\tＷord 5\tfr\n", "utf-8")
    options = dataclasses.replace(TRAIN, data=str(train), eval_data=str(test))
    split = load(options, print)
    assert split.heldout == {"test set": read_tsv(test)}
    assert len(split.train) == 18 and split.discarded == {"have a text of the test set": 2}
    with pytest.raises(SbpError, match="each of the 20 training pairs"):
        load(dataclasses.replace(options, eval_data=str(train)), print)
    with pytest.raises(SbpError, match="give that too"):
        load(dataclasses.replace(options, data=""), print)


def test_catalogues_are_split_by_english_message(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(sources, "PACKAGES", ("One==1.0", "Two==2.0"))
    messages = {f"Message {i}": f"Nachricht {i}" for i in range(200)}
    folder = sources.cache_folder()
    folder.mkdir(parents=True)
    wheel(folder, "one", "1.0", {"de": messages, "fr": {"Yes": "Oui"}})
    wheel(folder, "two", "2.0", {"de": messages, "ja": {"No": "いいえ", "Yes": "はい"}})
    said = []
    options = dataclasses.replace(TRAIN, corpus="catalogues", languages=2)
    split = load(options, said.append)
    assert split.languages == ("de", "ja")
    both = [*split.train, *split.heldout_pairs]
    assert len(both) + sum(split.discarded.values()) == 202
    assert {p.target for p in split.train}.isdisjoint(p.target for p in split.heldout_pairs)
    assert said[0] == "One 1.0 (MIT): 201 messages, 201 translations"
    assert said[-1] == "202 English messages; the 2 languages with most translations of 3"
    with pytest.raises(SbpError, match="two corpora"):
        load(dataclasses.replace(options, data="mine.tsv"), print)
