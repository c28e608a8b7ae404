"""Meanings that CLDR can say in many languages: drawn at random, rendered by Babel.

A meaning is a plain tuple, its kind first: `("date", 2021, 3, 15, "full")`. The same meaning
rendered in a language and in English is one pair of parallel text whose translation is right by
construction. A meaning has a template and names: `names` gives what stands for one thing (a
country, a language, a unit, a currency), `template` what is left without names and numbers. Some
of both are for evaluation only (`UNSEEN_NAMES`, `UNSEEN_TEMPLATES`).
"""

from __future__ import annotations

import datetime
import random
import unicodedata
from collections.abc import Callable, Sequence
from typing import Any

from babel import Locale, dates, lists, numbers, units

Meaning = tuple[Any, ...]


def _words(text: str) -> tuple[str, ...]:
    return tuple(text.split())


LANGUAGES: tuple[str, ...] = _words(
    "fr de es it pt nl sv da nb ru pl uk cs tr id ro hu fi el vi ja zh ko ar hi he fa th bg hr sr"
    " sk sl lt lv et ca gl is af ms bn ta te ml mr gu kn pa ur ka hy az kk uz ky mk sq sw bs be eu"
    " cy ga ne si km lo my am mn zu fil lb eo fo gd br as or so sd tk jv sc ti rm fy ast dsb hsb"
    " kok nn ia yue ps ku fur oc tt"
)
"""Languages of the embedded corpus, roughly by how much text of each there is in the world; 100 of
them."""

TERRITORIES = _words(
    "FR DE ES IT PT NL SE DK NO RU PL UA CZ TR ID RO HU FI GR VN JP CN KR EG IN IL IR TH BG HR BR"
    " MX CA AU CH AT BE IE IS ZA AR CL PE CO CU MA DZ TN KE ET NG GH SN TZ SA IQ SY JO LB PK BD NP"
    " LK MM KH LA MY PH MN KZ GE AM AL RS SK SI LT LV"
)
TONGUES = _words(
    "fr de es it pt nl sv da ru pl uk cs tr id hu fi el vi ja zh ko ar hi he fa th ro bg hr sr sk"
    " sl lt lv et ca sw mn ka hy"
)
UNITS = (
    "length-kilometer",
    "length-meter",
    "length-centimeter",
    "mass-kilogram",
    "mass-gram",
    "temperature-celsius",
    "speed-kilometer-per-hour",
    "length-mile",
    "area-square-kilometer",
    "volume-liter",
    "duration-second",
    "duration-minute",
    "duration-hour",
    "duration-day",
    "duration-week",
    "duration-month",
    "duration-year",
)
CURRENCIES = _words("EUR USD GBP JPY CHF RUB CNY INR SEK PLN BRL CAD")
UNSEEN_NAMES = frozenset(
    _words("BR CL GR KE KH NP SE UA el sv uk BRL SEK length-mile volume-liter")
)
"""Names that only evaluation uses; a country goes with its language and its currency, whose names
share its stem."""

_PARTS = _words("date month time relative quantity money percent")
"""Kinds that two of a meaning of kind "both" may have."""
UNSEEN_TEMPLATES: frozenset[tuple[Any, ...]] = frozenset(
    {
        ("territories", 4),
        ("languages", 4),
        ("both", "date", "money"),
        ("both", "money", "time"),
        ("both", "month", "quantity"),
        ("both", "percent", "relative"),
        ("both", "quantity", "percent"),
        ("both", "relative", "date"),
        ("both", "time", "month"),
    }
)
"""Templates that only evaluation uses. Their parts are trained on: shorter lists, and each kind
alone and beside others."""
_SPANS = ("second", "minute", "hour", "day", "week", "month", "year")


def _date(rng: random.Random) -> tuple[int, int, int]:
    day = datetime.date(1950, 1, 1) + datetime.timedelta(days=rng.randrange(365 * 90))
    return day.year, day.month, day.day


def _number(rng: random.Random) -> float:
    """Mostly small; a tenth with one decimal."""
    if rng.random() < 0.1:
        return rng.randrange(11, 999) / 10
    return rng.choice((rng.randrange(1, 20), rng.randrange(1, 100), rng.randrange(1, 10_000)))


def _sample(rng: random.Random, names: Sequence[str]) -> tuple[str, ...]:
    return tuple(rng.sample(names, rng.choice((2, 2, 3, 3, 4))))


def _durations(rng: random.Random) -> tuple[tuple[int, int], ...]:
    first = rng.randrange(len(_SPANS) - 1)
    return (rng.randrange(1, 60), first + 1), (rng.randrange(1, 60), first)


def _both(rng: random.Random) -> tuple[Meaning, Meaning]:
    first, second = rng.sample(_PARTS, 2)
    return (first, *_DRAW[first][1](rng)), (second, *_DRAW[second][1](rng))


_DRAW: dict[str, tuple[float, Callable[[random.Random], tuple[Any, ...]]]] = {
    "date": (3.0, lambda r: (*_date(r), r.choice(("full", "long")))),
    "month": (1.0, lambda r: _date(r)[:2]),
    "time": (1.0, lambda r: (r.randrange(24), r.randrange(60))),
    "duration": (1.5, _durations),
    "relative": (1.5, lambda r: (r.choice((-1, 1)) * r.randrange(1, 60), r.randrange(len(_SPANS)))),
    "quantity": (2.0, lambda r: (_number(r), r.choice(UNITS))),
    "money": (1.5, lambda r: (_number(r), r.choice(CURRENCIES))),
    "percent": (0.5, lambda r: (r.randrange(1, 1000),)),
    "territories": (2.0, lambda r: _sample(r, TERRITORIES)),
    "languages": (1.5, lambda r: _sample(r, TONGUES)),
    "visit": (1.0, lambda r: (r.choice(TERRITORIES), *_date(r))),
    "both": (4.0, _both),
}


def draw(rng: random.Random) -> Meaning:
    """Draw one meaning."""
    kinds = tuple(_DRAW)
    (kind,) = rng.choices(kinds, weights=[_DRAW[k][0] for k in kinds])
    return (kind, *_DRAW[kind][1](rng))


def names(meaning: Meaning) -> tuple[str, ...]:
    """Codes of the names in a meaning.

    >>> names(("both", ("money", 12, "EUR"), ("percent", 345)))
    ('EUR',)
    """
    match meaning:
        case ("territories" | "languages", *codes):
            return tuple(codes)
        case ("visit", code, *_) | ("quantity" | "money", _, code):
            return (code,)
        case ("both", first, second):
            return (*names(first), *names(second))
        case _:
            return ()


def template(meaning: Meaning) -> tuple[Any, ...]:
    """What is left of a meaning without its numbers and names; of two parts, their kinds.

    >>> template(("territories", "DE", "FR"))
    ('territories', 2)
    """
    match meaning:
        case ("territories" | "languages" as kind, *codes):
            return (kind, len(codes))
        case ("both", (first, *_), (second, *_)):
            return ("both", first, second)
        case _:
            return meaning[:1]


def _unit(n: float, unit: str, locale: Locale) -> str | None:
    # Where Babel has no pattern of a length it falls back to the unit's identifier, which is no
    # translation.
    for length in ("long", "short"):
        text = units.format_unit(n, unit, length, locale=locale)
        if unit not in text:
            return text
    return None


def _all(parts: Sequence[str | None], locale: Locale) -> str | None:
    return None if None in parts else lists.format_list([p for p in parts if p], locale=locale)


def _names(codes: Sequence[str], known: Any, locale: Locale) -> str | None:
    return _all([known.get(code) for code in codes], locale)


def _render(meaning: Meaning, locale: Locale) -> str | None:
    match meaning:
        case ("date", y, m, d, style):
            return dates.format_date(datetime.date(y, m, d), style, locale=locale)
        case ("month", y, m):
            return dates.format_skeleton("yMMMM", datetime.date(y, m, 1), locale=locale)
        case ("time", h, m):
            return dates.format_time(datetime.time(h, m), "short", locale=locale)
        case ("duration", *parts):
            return _all([_unit(n, f"duration-{_SPANS[span]}", locale) for n, span in parts], locale)
        case ("relative", n, span):
            delta = datetime.timedelta(seconds=n * dates.TIMEDELTA_UNITS[-1 - span][1])
            return dates.format_timedelta(
                delta, granularity=_SPANS[span], threshold=1e9, add_direction=True, locale=locale
            )
        case ("quantity", n, unit):
            return _unit(n, unit, locale)
        case ("money", n, code):
            if code not in locale.currencies:
                return None
            return numbers.format_currency(
                n, code, locale=locale, format_type="name", currency_digits=False
            )
        case ("percent", n):
            return (
                numbers.format_percent(n / 1000, "#,##0.#%", locale=locale)
                if n % 10
                else numbers.format_percent(n / 1000, locale=locale)
            )
        case ("territories", *codes):
            return _names(codes, locale.territories, locale)
        case ("languages", *codes):
            return _names(codes, locale.languages, locale)
        case ("visit", code, y, m, d):
            date = dates.format_date(datetime.date(y, m, d), "long", locale=locale)
            return _all([locale.territories.get(code), date], locale)
        case ("both", *parts):
            return _all([_render(part, locale) for part in parts], locale)
        case _:
            raise AssertionError(f"no rendering for {meaning!r}")


def render(meaning: Meaning, language: str) -> str | None:
    """Say `meaning` in `language`; None where CLDR lacks a part of it.

    The text is NFKC with single plain spaces and without invisible direction marks, so that a
    reference compares equal to what a tokenizer that normalises can produce.
    """
    text = _render(meaning, Locale.parse(language))
    if text is None:
        return None
    text = unicodedata.normalize("NFKC", text)
    text = "".join(ch for ch in text if unicodedata.category(ch) != "Cf" or ch in "\u200c\u200d")
    return " ".join(text.split())
