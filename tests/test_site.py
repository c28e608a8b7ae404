"""The documentation site builds without a warning, and has what it promises."""

import subprocess
import sys
from inspect import ismodule
from pathlib import Path

import pytest

import sbp
from sbp.errors import CODES

ROOT = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    """The site, built from a copy: the build writes pages beside those that it reads."""
    folder = tmp_path_factory.mktemp("site")
    source = folder / "docs"
    for page in (ROOT / "docs").rglob("*"):
        if page.is_file() and "generated" not in page.parts:
            copy = source / page.relative_to(ROOT / "docs")
            copy.parent.mkdir(parents=True, exist_ok=True)
            copy.write_bytes(page.read_bytes())
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
    pages = [p.relative_to(ROOT / "docs") for p in (ROOT / "docs").glob("*.md")]
    assert len(pages) > 10
    for page in pages:
        assert page.stem == "index" or f'href="{page.stem}.html"' in index, page
    for recipe in (ROOT / "docs" / "recipes").glob("*.md"):
        assert f'href="recipes/{recipe.stem}.html"' in index, recipe


def test_nothing_is_fetched_from_elsewhere(site):
    for page in site.rglob("*.html"):
        text = page.read_text("utf-8")
        assert 'src="http' not in text and 'stylesheet" href="http' not in text, page
