"""Catalogues of wheels: which messages are read, and what is said where pip cannot fetch them."""

import io
import subprocess
import zipfile

import pytest
from babel.messages.catalog import Catalog
from babel.messages.mofile import write_mo
from babel.messages.pofile import write_po

from examples.gshard.sources import PACKAGES, fetch, language_code, read_wheel
from sbp.errors import SbpError


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
    assert (package.name, package.version, package.licence) == ("Demo", "1.2", "MIT")
    assert package.messages == 2


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
    with pytest.raises(SbpError, match=r"demo-1\.0.*delete it") as caught:
        read_wheel(path)
    assert caught.value.code == "bad-corpus"


def test_wheels_in_the_cache_are_not_fetched(tmp_path, monkeypatch):
    asked = []

    def run(command, **_):
        asked.append(command)
        return subprocess.CompletedProcess(command, 1, "", "ERROR: no network")

    monkeypatch.setattr(subprocess, "run", run)
    kept = wheel(tmp_path, "my_demo", "1.0", {})
    assert fetch(["My-Demo==1.0"], tmp_path, print) == [kept] and not asked
    said = []
    with pytest.raises(SbpError, match=r"cannot download Other==2.0: ERROR: no network"):
        fetch(["Other==2.0"], tmp_path, said.append)
    assert asked[0][-1] == "Other==2.0" and "Other==2.0" in said[0]
    (tmp_path / "file").write_text("")
    with pytest.raises(SbpError, match="XDG_CACHE_HOME"):
        fetch(["Other==2.0"], tmp_path / "file" / "folder", print)


def test_packages_have_fixed_versions():
    assert all(package.count("==") == 1 for package in PACKAGES)
