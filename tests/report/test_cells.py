"""Errors and reports in a running notebook kernel name the cell and the line, as IPython does."""

import re

import nbclient
import nbformat
import pytest

CELLS = {
    "setup": """
import jax, jax.numpy as jnp
import sbp
mesh = jax.sharding.AbstractMesh((4,), ("model",))
x, w = jnp.ones((8, 16)), jnp.ones((16, 8))
""".strip(),
    "layer": """
def layer(x, w):
    x = sbp.split(x, 1, "model")
    w = sbp.split(w, 1, "model")
    return x @ w
""".strip(),
    "type error": 'step = sbp.jit(layer, mesh, boxing="explicit")\nstep.plan(x, w)',
    "option": "# a comment\nsbp.jit(layer, mesh, in_types=('modle:S(0)', None)).plan(x, w)",
    "report": "print(step.check(x, w))",
    "plan": "plan = sbp.jit(layer, mesh).plan(x, w)\nprint(plan.report())",
    "why": 'print(plan.why("Cell In[2], line 4"))',
    "division": "1 / 0",
    "no source": """
names = dict(globals())
exec("def made(x, w): return sbp.split(x, 1, 'model') @ sbp.split(w, 1, 'model')", names)
sbp.jit(names["made"], mesh, boxing="explicit").plan(x, w)
""".strip(),
    "other cell": "def outer(x, w):\n    y = layer(x, w)\n    return y",
    "twice": 'sbp.jit(outer, mesh, boxing="explicit").plan(x, w)',
}


@pytest.fixture(scope="module")
def said():
    """What each cell prints or raises, by the name of the cell."""
    cells = [nbformat.v4.new_code_cell(source) for source in CELLS.values()]
    notebook = nbformat.v4.new_notebook(cells=cells)
    nbclient.NotebookClient(notebook, allow_errors=True, timeout=120).execute()
    shown = lambda output: output.get("text") or "\n".join(output.get("traceback", ()))
    return {
        name: "\n".join(map(shown, cell.outputs))
        for name, cell in zip(CELLS, notebook.cells, strict=True)
    }


SAID = {
    "type error": ("error[no-signature]: `x @ w`", " --> Cell In[2], line 4  in layer, forward\n"),
    "option": (" --> Cell In[4], line 2\n",),
    "report": (" --> Cell In[2], line 4  in layer, forward\n",),
    "plan": ("Cell In[2], line 2", "Cell In[2], line 3"),
    "why": ("Cell In[2], line 4",),
    "twice": (" --> Cell In[2], line 4  in outer/layer, forward\n",),
    "no source": ("error[no-signature]", "(no source at hand)"),
}


@pytest.mark.parametrize("name", SAID)
def test_what_a_cell_says_names_cells_and_lines(said, name):
    assert [part for part in SAID[name] if part not in said[name] + "\n"] == []


def test_a_type_error_shows_the_line_of_the_cell(said):
    lines = said["type error"].splitlines()
    assert lines[0].startswith("error[no-signature]") and lines[1].startswith(" --> ")
    assert lines[lines.index("4 |     return x @ w") + 1].startswith("  |            ^^^^^")
    assert "Traceback" not in said["type error"] and "no value" not in said["why"]


def test_ipython_says_it_the_same_way(said):
    """The oracle: IPython's own name of a cell, without its colours."""
    assert "Cell In[8], line 1" in re.sub(r"\x1b\[[\d;]*m", "", said["division"])
