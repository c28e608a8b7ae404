"""Every notebook runs from its first cell to its last; a cell that is meant to raise carries the
tag `raises-exception`."""

from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient

FOLDER = Path(__file__).parents[1] / "notebooks"
NOTEBOOKS = sorted(FOLDER.glob("*.ipynb"))


def test_there_is_a_notebook():
    assert NOTEBOOKS, f"no notebook in {FOLDER.name}/"


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_notebook_runs(path: Path):
    notebook = nbformat.read(path, as_version=4)
    NotebookClient(
        notebook, timeout=600, kernel_name="python3", resources={"metadata": {"path": str(FOLDER)}}
    ).execute()
    cells = [cell for cell in notebook.cells if cell.cell_type == "code" and cell.source.strip()]
    assert cells, "the notebook has no code"
    assert all(cell.execution_count for cell in cells), "a cell did not run"
