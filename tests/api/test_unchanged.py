"""Plans in files for tests, and reports as data."""

import json

import jax
import jax.numpy as jnp
import pytest

import sbp
from sbp.errors import SbpError
from tests.edits import run_source

MESH = jax.sharding.AbstractMesh((2, 4), ("data", "model"))
SHAPES = [jax.ShapeDtypeStruct(s, "float32") for s in ((64, 256), (256, 1024), (1024, 256))]


def ffn(x, w_in, w_out):
    with jax.named_scope("block_7"):
        h = jax.nn.relu(x @ w_in)
        y = h @ w_out
    return y - jnp.mean(y)


def plan_of(rows="data:S(0)"):
    types = (rows, "model:S(1)", "model:S(0)")
    return sbp.jit(ffn, MESH, in_types=types, out_types=rows, boxing="reduce").plan(*SHAPES)


@pytest.fixture(scope="module")
def plan():
    return plan_of()


def test_a_plan_is_compared_with_its_file(plan, tmp_path, monkeypatch):
    file = tmp_path / "plan.txt"
    with pytest.raises(
        AssertionError, match=r"plan\.txt is missing: run the test once with SBP_UPD"
    ):
        sbp.assert_plan_unchanged(plan, file)
    monkeypatch.setenv("SBP_UPDATE_PLANS", "1")
    sbp.assert_plan_unchanged(plan, file)
    monkeypatch.delenv("SBP_UPDATE_PLANS")
    before = file.read_text()
    sbp.assert_plan_unchanged(plan, str(file))
    assert "forward `return y - jnp.mean(y)`: all_reduce on data, P(sum) -> B, 1 runs" in before
    assert "returned: all_reduce on model, P(sum) -> B" in before  # a sum passes what is linear
    with pytest.raises(AssertionError) as caught:
        sbp.assert_plan_unchanged(plan_of("B"), file)
    lines = str(caught.value).splitlines()
    assert "-input x: f32[64,256] data:S(0)" in lines and "+input x: f32[64,256] B" in lines
    assert file.read_text() == before


def test_lines_that_move_change_nothing(plan, tmp_path):
    file, source = tmp_path / "plan.txt", "def f(x):\n    y = x @ x\n    return y / y.sum()\n"
    for number, lead in enumerate(("", "\n# a comment\n\n")):
        f = run_source(lead + source, f"<moved {number}>")["f"]
        made = sbp.jit(f, MESH, in_types=("data:S(1)",)).plan(
            jax.ShapeDtypeStruct((64, 64), "float32")
        )
        sbp.assert_plan_unchanged(made, file, update=number == 0)


def test_files_that_are_none_are_refused(plan, tmp_path):
    (tmp_path / "other.txt").write_text("mine")
    with pytest.raises(SbpError, match="is not a file of assert_plan_unchanged"):
        sbp.assert_plan_unchanged(plan, tmp_path / "other.txt")
    with pytest.raises(SbpError, match="cannot read"):
        sbp.assert_plan_unchanged(plan, tmp_path)
    with pytest.raises(SbpError, match="cannot write"):
        sbp.assert_plan_unchanged(plan, tmp_path / "none" / "plan.txt", update=True)
    with pytest.raises(SbpError, match=r"plan"):
        # A function in place of a plan, which the type checker refuses, too.
        sbp.assert_plan_unchanged(ffn, tmp_path / "plan.txt")  # pyright: ignore
    assert (tmp_path / "other.txt").read_text() == "mine"


def test_the_report_as_data_has_the_figures_of_the_plan(plan):
    data = json.loads(json.dumps(plan.report().to_json()))
    assert (data["format"], data["function"], data["ok"]) == ("sbp report 1", "ffn", True)
    found, cost = data["plan"], plan.program.cost
    assert found["bytes_sent_per_device"] == cost.bytes_per_device
    assert found["strategy"]["model"].startswith("tensor parallel")
    assert [t["type"] for t in found["inputs"]] == ["data:S(0)", "model:S(1)", "model:S(0)"]
    assert [t["on_one_device"] for t in found["inputs"]] == [
        "f32[32,256]",
        "f32[256,256]",
        "f32[256,256]",
    ]
    sent = sum(c["bytes_sent_per_device"] for c in found["collectives"])
    by_module = sum(
        c["bytes_sent_per_device"]
        for phases in found["modules"].values()
        for some in phases.values()
        for c in some
    )
    assert sent == pytest.approx(cost.bytes_per_device) == by_module
    assert set(found["modules"]) <= {"", "block_*"}


def test_a_refusal_as_data_has_its_findings():
    explicit = sbp.jit(
        lambda x, w: x @ w, MESH, in_types=("model:S(1)", "model:S(1)"), boxing="explicit"
    )
    data = explicit.check(SHAPES[0], jax.ShapeDtypeStruct((256, 64), "float32")).to_json()
    assert not data["ok"] and data["plan"] is None
    assert data["diagnostics"][0]["severity"] == "error"
