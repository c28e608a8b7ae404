"""The links and names on the pages of the documentation lead somewhere, and the examples in
docstrings run. Lists of tests name tests that are there, and docs/checklist.md has every mechanism
once. The documentation site builds without a warning, and has what it promises."""

import doctest
import importlib
import pkgutil
import re
import shutil
import subprocess
import sys
from inspect import ismodule
from pathlib import Path

import pytest

import sbp
from sbp.errors import CODES
from tests.gate import LIST, Gate
from tests.house import PAGE as CONSTANTS, has_test, witnesses
from tests.test_doc_examples import PAGES, ROOT

FILE = re.compile(
    r"[\w./-]*\w\.(?:py|ipynb|md|csv|svg)\b|\b(?:sbp|tests|benchmarks|docs|examples|notebooks)/[\w/-]+(?:\.(?:txt|tsv|json\.xz))?"
)
WRITTEN_BY_READERS = {"ffn.py", "quickstart.py"}
"""Files that the pages tell the reader to write."""


def prose(page: Path) -> str:
    """The text of a page without its blocks of code."""
    return re.sub(r"(?ms)^```.*?^```$", "", page.read_text("utf-8"))


def anchors(page: Path) -> set[str]:
    """What links to parts of a page may name: its headings in lower case, without punctuation and
    with a hyphen for each blank, as GitHub and the site make them, and its labels."""
    text = prose(page)
    headings = re.findall(r"^#+ (.*)$", text, flags=re.MULTILINE)
    plain = (re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings)
    return {*plain, *re.findall(r"^\(([\w-]+)\)=$", text, flags=re.MULTILINE)}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page: Path):
    """To files that exist, and to parts that these pages have."""
    links = re.findall(r"\]\((?!https?:)([^)#]*)#?([^)]*)\)", prose(page))
    assert not [
        f"{target}#{anchor}"
        for target, anchor in links
        if not (page.parent / target).exists()
        or (anchor and anchor not in anchors(page.parent / target if target else page))
    ]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_files_that_are_named_exist(page: Path):
    """A path from the top of the checkout, or the name of a file somewhere in it."""
    folders = ("sbp", "tests", "benchmarks", "docs", "notebooks")
    names = {path.name for folder in folders for path in (ROOT / folder).rglob("*.*")}
    gone = [
        found
        for found in FILE.findall(re.sub(r"https?://\S+", "", prose(page)))
        if not (ROOT / found).exists()
        and not (page.parent / found).exists()
        and not ("/" not in found and found in names | WRITTEN_BY_READERS)
    ]
    assert not gone, f"{page.name} names files that are not there: {gone}"


def test_unclear_phrases_do_not_come_back():
    """`tests/phrases.txt` has parts of sentences that readers had to read twice."""
    phrases = (ROOT / "tests" / "phrases.txt").read_text("utf-8").splitlines()
    files = [*PAGES, *(ROOT / "sbp").rglob("*.py"), *(ROOT / "benchmarks").rglob("*.py")]
    texts = {file.name: " ".join(file.read_text("utf-8").split()) for file in files}
    found = [f"{name}: {p!r}" for name, text in texts.items() for p in phrases if p in text]
    assert phrases and not found, "write it as a colleague would say it:\n" + "\n".join(found)


# ---- checklist -----------------------------------------------------------------------------------


ROWS = {"G": 17, "A": 4, "S": 4, "P": 9, "T": 7, "R": 4, "M": 12, "E": 6, "C": 7}
"""Rows of each part: 70."""


def rows() -> list[list[str]]:
    """The cells of each row of the tables: id, mechanism, source, tests, weaker."""
    lines = [
        line
        for line in (ROOT / "docs" / "checklist.md").read_text("utf-8").splitlines()
        if line.startswith("| ")
    ]
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    return [row for row in cells if row[0] != "id"]


def test_every_mechanism_has_one_row():
    wanted = [f"{part}{n}" for part, count in ROWS.items() for n in range(1, count + 1)]
    assert [row[0] for row in rows()] == wanted
    assert all(len(row) == 5 and row[1] and row[2] and row[3] for row in rows())
    unsaid = [row[0] for row in rows() if row[3] == "not built" and not row[4]]
    assert not unsaid, f"{unsaid} do not say what is missing"


# ---- tests that are named ------------------------------------------------------------------------

NAMED = {
    "docs/checklist.md": [t.strip("`") for row in rows() for t in row[3].split(", ")],
    "docs/constants.md": [
        f"{file}::{test}" for file, test in witnesses(CONSTANTS.read_text("utf-8"))
    ],
    "tests/gate.txt": [*Gate.read().counts, *Gate.read().cases],
    "tests/newest.txt": LIST.with_name("newest.txt").read_text("utf-8").splitlines(),
}


@pytest.mark.parametrize("place", NAMED)
def test_the_tests_that_are_named_exist(place: str):
    """One name in newest.txt without a test leaves the newest JAX without any."""
    assert len(NAMED[place]) > 20
    assert not [test for test in NAMED[place] if test != "not built" and not has_test(test)]


# ---- docstrings ----------------------------------------------------------------------------------


PLAIN = ("benchmarks.gshard", "examples.gshard")
"""Folders of modules outside the package."""

MODULES = sorted(
    m.name
    for m in (
        *pkgutil.walk_packages(sbp.__path__, "sbp."),
        *(m for f in PLAIN for m in pkgutil.iter_modules([ROOT / f.replace(".", "/")], f"{f}.")),
    )
    if not m.name.endswith("__main__")
)
DOCSTRINGS = [
    pytest.param(example, id=example.name)
    for name in MODULES
    for example in doctest.DocTestFinder(exclude_empty=True).find(importlib.import_module(name))
    if example.examples
]


def test_there_are_examples():
    assert len(DOCSTRINGS) >= 70


@pytest.mark.parametrize("example", DOCSTRINGS)
def test_example(example: doctest.DocTest, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)  # some examples write files
    said: list[str] = []
    failed, tried = doctest.DocTestRunner(verbose=False).run(example, out=said.append)
    assert tried
    assert not failed, "".join(said)


# ---- site ----------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    """The site, built from a copy: the build writes pages beside those that it reads."""
    folder = tmp_path_factory.mktemp("site")
    source = folder / "docs"
    shutil.copytree(ROOT / "docs", source, ignore=shutil.ignore_patterns("generated"))
    build = folder / "build"
    words = ["-m", "sphinx", "--fail-on-warning", "--keep-going", "--quiet", "--builder", "html"]
    done = subprocess.run(
        [sys.executable, *words, str(source), str(build)],
        capture_output=True,
        text=True,
        cwd=ROOT,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return build


def test_every_code_has_a_page(site):
    pages = {page.stem for page in (site / "generated" / "codes").glob("*.html")}
    assert pages - {"index"} == set(CODES)


def test_every_public_name_is_there(site):
    text = (site / "generated" / "api.html").read_text("utf-8")
    names = [n for n in dir(sbp) if not n.startswith("_") and not ismodule(getattr(sbp, n))]
    assert len(names) > 25
    assert not [n for n in names if f'id="{n.lower().replace("_", "-")}"' not in text]


def test_every_page_is_reached_from_the_first(site):
    index = (site / "index.html").read_text("utf-8")
    pages = [
        p.relative_to(ROOT / "docs")
        for folder in ("docs", "docs/recipes")
        for p in (ROOT / folder).glob("*.md")
    ]
    assert len(pages) > 10
    assert not [
        page
        for page in pages
        if str(page) != "index.md" and f'href="{page.with_suffix(".html").as_posix()}"' not in index
    ]


def test_nothing_is_fetched_from_elsewhere(site):
    fetched = re.compile('src="http|stylesheet" href="http')
    assert not [page for page in site.rglob("*.html") if fetched.search(page.read_text("utf-8"))]
