"""The documentation site: `make docs`. Pages of diagnostic codes and of the public names are
written from the package when the site is built."""

import inspect
import re
import textwrap
from pathlib import Path

from pygments.lexers.special import TextLexer
from sphinx.application import Sphinx
from sphinx.highlighting import lexers

import sbp
from sbp.report.codes import PAGES, PRELUDE

HERE = Path(__file__).parent
GENERATED = HERE / "generated"

project = "sbp"
author = "the developers of sbp"
extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
html_theme = "furo"
html_title = "sbp"
exclude_patterns = ["site"]
myst_enable_extensions = ["colon_fence"]
myst_heading_anchors = 4
autodoc_typehints = "none"
autodoc_member_order = "bysource"
autodoc_class_signature = "separated"
default_role = "code"  # docstrings write code in single backticks
napoleon_google_docstring = True
napoleon_use_ivar = True
# Links to files outside of this folder: tests/test_docs.py sees to it that they are there.
suppress_warnings = ["myst.xref_missing"]


def write_codes(folder: Path) -> None:
    """A page for each diagnostic code."""
    folder.mkdir(parents=True, exist_ok=True)
    lines = [
        "# Diagnostic codes",
        "",
        "Errors, warnings and notes carry a code in brackets. `sbp explain CODE` prints these",
        "pages in a terminal. The examples start from",
        "",
        f"```python\n{PRELUDE.strip()}\n```",
        "",
        "```{toctree}",
        *sorted(page.code for page in PAGES.values()),
        "```",
    ]
    (folder / "index.md").write_text("\n".join(lines) + "\n", "utf-8")
    for page in PAGES.values():
        parts = [f"# {page.code}", *page.paragraphs()]
        language = "python" if page.runs else "text"
        for title, code in (("It is said of", page.wrong), ("Repaired", page.right)):
            parts += [f"## {title}", f"```{language}\n{textwrap.dedent(code).strip()}\n```"]
        (folder / f"{page.code}.md").write_text("\n\n".join(parts) + "\n", "utf-8")


def write_api(folder: Path) -> None:
    """All public names, with their docstrings."""
    folder.mkdir(parents=True, exist_ok=True)
    names = sorted((n for n in dir(sbp) if not n.startswith("_")), key=str.lower)
    parts = ["# Public names", "Everything else of the package may change without notice."]
    for name in names:
        thing = getattr(sbp, name)
        if inspect.ismodule(thing):
            continue
        if not inspect.isclass(thing) and not inspect.isfunction(thing):
            shown = textwrap.shorten(repr(thing), 100, placeholder=" ..")
            parts.append(f"## {name}\n\nA `{type(thing).__name__}`: `{shown}`")
            continue
        kind = "class" if inspect.isclass(thing) else "function"
        options = "\n   :members:\n   :undoc-members:" if kind == "class" else ""
        if thing is sbp.Report:  # it shows itself as other pages do
            options += "\n   :inherited-members:"
        directive = f".. auto{kind}:: sbp.{name}{options}"
        parts.append(f"## {name}\n\n```{{eval-rst}}\n{directive}\n```")
    (folder / "api.md").write_text("\n\n".join(parts) + "\n", "utf-8")


def mend_plurals(*event: object) -> None:
    """Puts a mark behind code that an s follows, without which it would not be read as code."""
    lines = event[-1]
    assert isinstance(lines, list)
    lines[:] = [re.sub(r"`s\b(?=[^`]*(?:`[^`]*`[^`]*)*$)", r"`\\ s", line) for line in lines]


def setup(app: Sphinx) -> None:
    """Writes the generated pages before Sphinx looks for pages."""
    lexers["mermaid"] = TextLexer()  # the picture of the folders is shown as text
    app.connect("autodoc-process-docstring", mend_plurals)
    write_codes(GENERATED / "codes")
    write_api(GENERATED)
