"""Every Python block of the README and of docs/ runs as written on 8 simulated devices, and prints
and draws what the page shows. `SBP_UPDATE_GOLDEN=1` writes the picture anew."""

import re
import runpy
import warnings
from pathlib import Path

import pytest

from sbp.signatures import known_primitives, unregister
from tests.report.golden import assert_golden

ROOT = Path(__file__).parents[1]
PAGES = [
    ROOT / "README.md",
    ROOT / "CONTRIBUTING.md",
    *sorted(p for p in (ROOT / "docs").rglob("*.md") if "generated" not in p.parts),
]
PICTURE = "ffn.svg"
"""A file of docs/ that one of the examples writes."""


def examples(page: Path):
    """Each Python block of a page with its line, and the text block that follows before the next
    Python block or heading, if any."""
    text = page.read_text("utf-8")
    found = [*re.finditer(r"^```(python|text)\n(.*?)^```$|^#+ ", text, re.MULTILINE | re.DOTALL)]
    for block, after in zip(found, [*found[1:], None], strict=True):
        if block[1] == "python":
            shown = after[2] if after is not None and after[1] == "text" else None
            yield text.count("\n", 0, block.start()) + 1, block[2], shown


EXAMPLES = [
    pytest.param(code, shown, id=f"{page.name}:{line}")
    for page in PAGES
    for line, code, shown in examples(page)
]


def unmatched(shown: str, printed: str) -> str | None:
    """The first line of an excerpt that is not in what was printed, in order; `...` stands for
    lines left out."""
    lines = iter([line.rstrip() for line in printed.splitlines()])
    for line in shown.splitlines():
        if line.strip() != "..." and line.rstrip() not in lines:
            return line
    return None


def test_pages_have_examples():
    assert {page.name for page in PAGES} >= {"README.md", "types.md", "how-it-works.md", "moe.md"}
    assert PICTURE in str(EXAMPLES)
    assert len(EXAMPLES) == sum(page.read_text("utf-8").count("```python\n") for page in PAGES)


@pytest.fixture
def own_signatures():
    """Removes the signatures that an example registers, which other tests of this process list."""
    before = set(known_primitives())
    yield
    for name in set(known_primitives()) - before:
        unregister(name)


@pytest.mark.usefixtures("own_signatures")
@pytest.mark.parametrize(("code", "shown"), EXAMPLES)
def test_example_runs(
    code: str,
    shown: str | None,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
):
    """As `python quickstart.py` in an empty folder, in this process: importing JAX takes longer
    than most examples."""
    monkeypatch.chdir(tmp_path)
    script = tmp_path / "quickstart.py"
    script.write_text(code, "utf-8")
    with warnings.catch_warnings(action="default"):
        runpy.run_path(str(script), run_name="__main__")
    if shown is not None:
        printed = capsys.readouterr().out
        line = unmatched(shown, printed)
        assert line is None, f"the page shows {line!r}; printed was:\n{printed}"
    if PICTURE in code:  # without a gradient, all versions of JAX trace it alike
        assert_golden(PICTURE, (tmp_path / PICTURE).read_text("utf-8"), ROOT / "docs")


def test_excerpts_are_compared():
    assert unmatched("a\n...\nc\n", "a\nb\nc\n") is None
    assert unmatched("c\na\n", "a\nb\nc\n") == "a"
