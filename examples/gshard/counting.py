"""A baseline that only counts: it fills the numbers and names of a text into templates that it saw.

It shows how much of a score the corpus gives away without any learning. Two forms:

* digits: a text with its numbers taken out is a template. The translation of a source template is
  the target template that was most often paired with it; the numbers are put back in.
* digits and names: names are taken out too. A dictionary of names is made by counting: the English
  name is a part of a list, its translation is the longest text that all sources with it share.
"""

from __future__ import annotations

import re
import unicodedata
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from examples.gshard.corpus import Pair

_SLOT = "\0"
_SOURCES = 24
"""Sources that are compared to find the translation of a name."""

Template = tuple[str, tuple[int | str, ...]]
"""A target text with slots; each slot takes a slot of the source by number, or is a fixed text."""


@dataclass(frozen=True, slots=True)
class Abstracted:
    """A text with slots for numbers and names, and the values of the slots in order."""

    text: str
    values: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class _Language:
    """What was counted for one source language."""

    names: Mapping[str, str]
    templates: Mapping[str, Template]


@dataclass(frozen=True, slots=True)
class CountingTranslator:
    """A translator that knows templates and, if asked, names.

    >>> pair = lambda s, t: Pair(source=s, target=t, language="fr")
    >>> known = CountingTranslator.learn([pair("il y a 3 jours", "3 days ago")], names=False)
    >>> known.translate(pair("il y a 14 jours", ""))
    '14 days ago'
    """

    languages: Mapping[str, _Language]

    @classmethod
    def learn(cls, pairs: Iterable[Pair], *, names: bool) -> CountingTranslator:
        """Counts templates in training pairs.

        Arguments:
          pairs: the training text.
          names: whether names are taken out as well as numbers.
        """
        by_language: dict[str, list[Pair]] = defaultdict(list)
        for pair in pairs:
            by_language[pair.language].append(pair)
        return cls({code: _learned(found, names) for code, found in by_language.items()})

    def translate(self, pair: Pair) -> str:
        """The translation of a pair's source; its target is not looked at.

        A source whose template is unknown is given back with its numbers and names in English.
        """
        known = self.languages.get(pair.language, _Language({}, {}))
        source = abstract(pair.source, known.names)
        template = known.templates.get(source.text)
        if template is None:
            return _filled(source.text, source.values)
        text, slots = template
        return _filled(text, [source.values[s] if isinstance(s, int) else s for s in slots])


def abstract(text: str, names: Mapping[str, str]) -> Abstracted:
    """A text with its numbers and names taken out.

    Arguments:
      text: the text.
      names: for each name in the text's language, the value of its slot.

    >>> abstract("34.5 % of Italia", {"Italia": "Italy"}).values
    ('34', '5', 'Italy')
    """
    longest_first = sorted(names, key=lambda name: (-len(name), name))
    pattern = "|".join([r"\d+", *map(re.escape, longest_first)])
    values: list[str] = []

    def take(found: re.Match[str]) -> str:
        word = found[0]
        digits = "".join(str(unicodedata.decimal(ch, "")) for ch in word)
        values.append(names.get(word, digits))
        return _SLOT

    return Abstracted(re.sub(pattern, take, text.replace(_SLOT, " ")), tuple(values))


def _filled(text: str, values: Sequence[str]) -> str:
    rest = iter(values)
    return re.sub(_SLOT, lambda _: next(rest), text)


def _learned(pairs: Sequence[Pair], names: bool) -> _Language:
    found = _names(pairs) if names else {}
    english = {name: name for name in found.values()}
    counts: dict[str, Counter[Template]] = defaultdict(Counter)
    for pair in pairs:
        source, target = abstract(pair.source, found), abstract(pair.target, english)
        counts[source.text][target.text, _slots(source.values, target.values)] += 1
    best = {
        text: min(targets, key=lambda t: (-targets[t], t[0], str(t[1])))
        for text, targets in counts.items()
    }
    return _Language(found, best)


def _slots(source: Sequence[str], target: Sequence[str]) -> tuple[int | str, ...]:
    """For each value of the target the first unused source slot of that value, or the value."""
    free = list(range(len(source)))
    slots: list[int | str] = []
    for value in target:
        at = next((i for i in free if source[i] == value), None)
        if at is None:
            slots.append(value)
        else:
            free.remove(at)
            slots.append(at)
    return tuple(slots)


def _names(pairs: Sequence[Pair]) -> dict[str, str]:
    """English names by their names in the source language."""
    sources: dict[str, list[str]] = defaultdict(list)
    for pair in pairs:
        if not any(ch.isdecimal() for ch in pair.target.split(" and ")[0]):
            for part in re.split(r", and | and |, ", pair.target):
                if not any(ch.isdecimal() for ch in part):
                    sources[part].append(pair.source)
    found: dict[str, str] = {}
    for english, texts in sorted(sources.items()):
        distinct = list(dict.fromkeys(texts))[:_SOURCES]
        if len(distinct) > 1:
            name = _shared(distinct).strip(" ,،、")
            if len(name) > 1 and not any(ch.isdecimal() for ch in name):
                found.setdefault(name, english)
    return found


def _shared(texts: Sequence[str]) -> str:
    """The longest text that all texts contain; the first one of several."""
    shortest = min(texts, key=len)

    def parts(text: str, length: int) -> set[str]:
        return {text[i : i + length] for i in range(len(text) - length + 1)}

    def shared(length: int) -> set[str]:
        return set.intersection(*(parts(text, length) for text in texts))

    # What is shared has shared parts of every length below its own.
    low, high = 0, len(shortest)
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if shared(middle) else (low, middle - 1)
    return min(shared(low), key=shortest.index) if low else ""
