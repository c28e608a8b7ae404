"""Every notebook runs from its first cell to its last, and gives the outputs that are committed.

`make notebooks` (`SBP_UPDATE_GOLDEN=1`) writes them anew. A cell that is meant to raise carries the
tag `raises-exception`. Outputs are compared under the version of JAX that made them: another one
traces gradients otherwise, and compiles other collectives for `jax.jit`."""

import difflib
import os
import tempfile
from pathlib import Path
from typing import Any

import jax
import nbformat
import pytest
from nbclient import NotebookClient

FOLDER = Path(__file__).parents[1] / "notebooks"
NOTEBOOKS = sorted(FOLDER.glob("*.ipynb"))
RENEW = "run `make notebooks` and look at the difference"


def test_there_are_nine_notebooks():
    assert [path.name[:2] for path in NOTEBOOKS] == [f"0{i}" for i in range(1, 10)]


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_notebook_gives_the_committed_outputs(path: Path):
    committed = nbformat.read(path, as_version=4)
    ran = executed(nbformat.read(path, as_version=4))
    if os.environ.get("SBP_UPDATE_GOLDEN") == "1":
        ran.metadata["jax"] = jax.__version__
        nbformat.write(ran, path)
        return
    if committed.metadata["jax"] != jax.__version__:
        return  # it has run, with errors in no other cells than those that are meant to raise
    for before, after in zip(committed.cells, ran.cells, strict=True):
        if before.cell_type == "code":
            found = difference(before, after)
            assert not found, f"{path.name}, {before.id}: other outputs; {RENEW}\n{found}"


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_committed_outputs_hold_on_every_machine(path: Path):
    """No warnings (they name files of the kernel), no paths of a machine, no addresses."""
    cells = [c for c in nbformat.read(path, as_version=4).cells if c.cell_type == "code"]
    assert cells, "the notebook has no code"
    for place, cell in enumerate(cells, 1):
        assert cell.execution_count == place, f"{cell.id} has not run; {RENEW}"
        for output in cell.outputs:
            assert output.get("name") != "stderr", f"{cell.id} writes to stderr"
            assert not [
                word
                for word in ("ipykernel", "site-packages", " at 0x", tempfile.gettempdir() + "/")
                if word in str(output)
            ], cell.id


def test_a_changed_output_is_shown_with_its_line():
    def printing(text: str) -> Any:
        stream = nbformat.v4.new_output("stream", name="stdout", text=text)
        return nbformat.v4.new_code_cell("..", outputs=[stream])

    assert not difference(printing("one\ntwo\n"), printing("one\ntwo\n"))
    assert "-two" in difference(printing("one\ntwo\n"), printing("one\nthree\n"))


def executed(notebook: Any) -> Any:
    """The notebook with the outputs of a new kernel, and nothing of the machine beside them."""
    metadata = dict(notebook.metadata)
    NotebookClient(
        notebook,
        timeout=600,
        kernel_name="python3",
        record_timing=False,
        coalesce_streams=True,  # where a kernel cuts a stream depends on time
        resources={"metadata": {"path": str(FOLDER)}},
    ).execute()
    notebook.metadata = nbformat.from_dict(metadata)
    return notebook


def difference(before: Any, after: Any) -> str:
    """What differs in the outputs of a cell, as the lines of a diff; empty where nothing does."""
    for kind in sorted({*texts(before), *texts(after)}, key=lambda kind: (kind != "text", kind)):
        old, new = texts(before).get(kind, ""), texts(after).get(kind, "")
        if old != new:
            lines = difflib.unified_diff(
                old.splitlines(), new.splitlines(), f"{kind}, committed", f"{kind}, now", n=1
            )
            return "\n".join(line[:300] for line in list(lines)[:60])
    return ""


def texts(cell: Any) -> dict[str, str]:
    """The outputs of a cell by kind; the plain ones and the errors as `text`."""
    found: dict[str, str] = {}
    for output in cell.outputs:
        pieces = {"text": output.get("text") or "\n".join(output.get("traceback", ()))}
        pieces |= {k.replace("text/plain", "text"): v for k, v in output.get("data", {}).items()}
        for kind, text in pieces.items():
            found[kind] = found.get(kind, "") + f"{output.output_type}\n{text}\n"
    return found
