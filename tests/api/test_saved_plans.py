"""`plan.save(path)` and `sbp.jit(.., plan=path)`."""

import json
import re
import subprocess
import sys
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import sbp
from sbp.api import plan as plans_of_calls
from tests.edits import run_source
from tests.same import assert_same_results, refused

TYPES = (("y:S(1)", "y:S(0)"), "x:S(0)")
X = np.random.default_rng(0).normal(size=(16, 8)).astype(np.float32)
W = np.ones((8, 32), np.float32), np.ones((32, 8), np.float32)


loss = lambda w, x: ((jnp.tanh(x @ w[0]) @ w[1] - x) ** 2).mean()


def step(w, x):
    value, gradient = jax.value_and_grad(loss)(w, x)
    return jax.tree.map(lambda a, b: a - 0.1 * b, w, gradient), value


@pytest.fixture(scope="module")
def path(mesh, tmp_path_factory):
    path = tmp_path_factory.mktemp("plans") / "step.json"
    sbp.jit(step, mesh, in_types=TYPES).plan(W, X).save(path)
    return path


def no_planning(*_):
    raise AssertionError("a saved plan is not planned again")


def test_a_saved_plan_runs_without_planning(path, mesh, monkeypatch):
    monkeypatch.setattr(plans_of_calls, "fit", no_planning)
    f = sbp.jit(step, mesh, in_types=TYPES, plan=path)
    assert_same_results(jax.jit(step)(W, X), f(W, X))
    assert f.plan(W, X).report().ok


def test_free_types_take_those_of_the_saved_plan(path, mesh):
    """In a restart the types need not be given again, and shardings of arguments are no pins."""
    f = sbp.jit(step, mesh, plan=str(path))
    w = jax.device_put(W, jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec()))
    with pytest.warns(sbp.SbpWarning, match="input-moved"):
        assert_same_results(jax.jit(step)(W, X), f(w, X))
    assert f.plan(w, X).in_types[0][0] == tuple(map(sbp.parse, TYPES[0]))


def test_an_abstract_mesh_plans_for_a_mesh_of_devices(mesh, tmp_path):
    abstract = jax.sharding.AbstractMesh((2, 4), ("x", "y"))
    sbp.jit(step, abstract, in_types=TYPES, hardware="cpu").plan(W, X).save(tmp_path / "plan.json")
    ours = sbp.jit(step, mesh, in_types=TYPES, plan=tmp_path / "plan.json")
    assert_same_results(jax.jit(step)(W, X), ours(W, X))


@pytest.mark.parametrize("limit", [None, 1e9])
@pytest.mark.parametrize("budget", [sbp.forbid("permute"), sbp.forbid(None, axis="y")])
def test_a_plan_under_budgets_is_the_plan_again(budget, limit, tmp_path):
    shapes = [jax.ShapeDtypeStruct(s, jnp.float32) for s in ((16, 32), (32, 8), (8, 16))]
    mesh = sbp.make_mesh((4, 2), ("x", "y"))

    def planned(path=None):
        grad = jax.grad(lambda w, v, x: ((jnp.tanh(x @ w) @ v) ** 2).mean(), argnums=(0, 1))
        return sbp.jit(grad, mesh, budgets=[budget], memory_limit=limit, plan=path).plan(*shapes)

    plan = planned()
    plan.save(tmp_path / "plan.json")
    assert str(planned(tmp_path / "plan.json")) == str(plan)


with_mesh = lambda sizes, names=("x", "y"): {"mesh": sbp.make_mesh(sizes, names)}


WRONG = {
    "program": (
        {"fn": lambda w, x: step(w, x * 2.0)},
        "the first difference is mul at .*test_saved_plans.py:",
    ),
    "sizes": ({"args": (W, X[:8])}, "another program: x is "),
    "mesh": (with_mesh((4, 2)), "made with mesh x=2 y=4, but this call has mesh x=4 y=2"),
    "names": (
        with_mesh((2, 4), ("y", "x")),
        "made with mesh x=2 y=4, but this call has mesh y=2 x=4",
    ),
    "hardware": (
        {"hardware": "tpu-v5e"},
        "made with hardware cpu, but this call has hardware tpu-v5e",
    ),
    "policy": ({"boxing": "reduce"}, "made with boxing auto, but this call has boxing reduce"),
    "budgets": (
        {"budgets": [sbp.forbid("all_to_all")]},
        "made with budgets \\(none\\), but this call has budgets no all",
    ),
    "limit": (
        {"memory_limit": 1e9},
        "made with memory_limit None, but this call has memory_limit 1000000000.0",
    ),
    "donation": (
        {"donate_argnums": 1},
        "made with donated inputs \\(none\\), but this .* inputs x",
    ),
    "input": ({"in_types": (None, "x:S(1)")}, "do not hold in this program: .*input 2 is pinned"),
    "output": ({"out_types": (None, "x:P(sum)")}, "its types do not hold in this program"),
}


@pytest.mark.parametrize(("options", "said"), WRONG.values(), ids=WRONG)
def test_a_plan_for_something_else_is_refused(options, said, path, mesh):
    options = {"fn": step, "mesh": mesh, "plan": path, "args": (W, X)} | options
    args = options.pop("args")
    f = sbp.jit(**options)
    text = str(refused(f"saved-plan: .*{said}", f, *args))
    assert "plan again without plan=" in text and str(path) in text
    (found,) = f.check(*args).diagnostics
    assert found.code == "saved-plan"


FIGURES = "saved-plan: .*its `figures` or `removed` were changed"
"""No other check sees them: a plan could say that it is proved cheapest."""
CHANGED = {
    "version of sbp": (
        '("version of sbp"): "',
        r'\1: "9.',
        r"made with version of sbp 9\..*, but this call has",
    ),
    "version of JAX": (
        '("version of JAX"): "',
        r'\1: "9.',
        r"made with version of JAX 9\..*, but this call has",
    ),
    "a reduction": (
        r" = all_reduce\[",
        " = slice[",
        r"line \d+ .* = slice.*its types give `.* = all_reduce",
    ),
    "bound": ('("lower_bound"): [^,}]+', r"\1: 1e30", FIGURES),
    "seconds": ('("seconds"): [^,}]+', r"\1: 0.0", FIGURES),
    "deep nesting": ("(?s).+", "[" * 100_000, "saved-plan"),
    "no JSON": ("(?s).+", "{", r"is not JSON that sbp reads: .*line 1 column 2"),
    "another format": ('"sbp plan": [0-9]+', '"sbp plan": 0', "it has format 0, and this version"),
    "a lost part": ('"choices"', '"choice"', r"(?<! of) the file: `choices` must be a list"),
    "another kind": ('("program"): .*', r"\1: 3,", r"line 15 of the file: `program` must be a str"),
    "lost figures": ('"lower_bound"', '"bound"', FIGURES),
    "no type": (r'("choices"): \[', r'\1: [3, "x", ', r"it has \d+ choices, and this call needs"),
    "another type": (r'("choices"): \[\[', r'\1: [["x", ', "see `choices` in the file|do not hold"),
    **{
        name: ("(?s).+", text, "^saved-plan: ")
        for name, text in {
            "nothing": "",
            "no brace": "plan x=2 {",
            "a list": "[]",
            "another file": '{"a": 1}',
            "a later format": '{"sbp plan": 99}',
            "no text": (
                '{"sbp plan": 5, "made_for": {}, "program": "", "figures": {}, "removed": []}'
            ),
            "wrong kinds": '{"sbp plan": 5, "made_for": [], "program": 3, "figures": 4, "plan": 6}',
        }.items()
    },
}


@pytest.mark.parametrize(("pattern", "text", "said"), CHANGED.values(), ids=CHANGED)
def test_a_changed_file_is_refused(pattern, text, said, path, mesh, tmp_path):
    changed, count = re.subn(pattern, text, path.read_text(), count=1)
    assert count == 1
    (tmp_path / "plan.json").write_text(changed)
    refused(said, sbp.jit(step, mesh, in_types=TYPES, plan=tmp_path / "plan.json"), W, X)


def test_files_that_are_none(mesh, tmp_path):
    (tmp_path / "binary").write_bytes(b"\xff\xfe")
    (tmp_path / "no").mkdir()
    plan = sbp.jit(step, mesh).plan(W, X)
    for wrong, said in (("gone", "cannot read"), ("no", "cannot read"), ("binary", "UTF-8")):
        refused(said, sbp.jit(step, mesh, plan=tmp_path / wrong), W, X)
    for wrong in (3, object(), [], ["a", "b"], np.arange(3)):
        refused("plan must be the path of a file", sbp.jit, step, mesh, plan=wrong, kind=TypeError)
    refused("plan must be the path of a file", sbp.jit, step, mesh, plan="", kind=ValueError)
    refused("cannot write", plan.save, tmp_path / "no" / "such" / "folder.json")
    for wrong in (3, "a\0b", "\ud800"):
        refused("path of a file", plan.save, wrong)


RESTART = """
import sys, jax
from tests.api import test_saved_plans as t
from sbp.api import plan as plans_of_calls
import sbp
plans_of_calls.fit = t.no_planning
mesh = sbp.make_mesh((2, 4), ("x", "y"))
print(sbp.jit(t.step, mesh, in_types=t.TYPES, plan=sys.argv[1]).plan(t.W, t.X))
"""


def test_another_process_reads_the_plan(path, mesh):
    done = subprocess.run(
        [sys.executable, "-c", RESTART, str(path)], capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == str(sbp.jit(step, mesh, in_types=TYPES).plan(W, X))


# ---- exported plans ------------------------------------------------------------------------------
# `plan.export(path)`: the file runs in a process that cannot import sbp.


LOADED = """
import pathlib, sys
sys.modules["sbp"] = None
import jax, numpy as np
from jax.export import deserialize
from jax.sharding import AxisType
exported = deserialize(pathlib.Path(sys.argv[1]).read_bytes())
mesh = jax.make_mesh((2, 4), ("x", "y"), axis_types=(AxisType.Auto,) * 2)
shardings = jax.tree.unflatten(exported.in_tree, exported.in_shardings_jax(mesh))
arrays = [np.load(f"{sys.argv[1]}{i}.npy") for i in range(len(exported.in_avals))]
args, kwargs = jax.device_put(jax.tree.unflatten(exported.in_tree, arrays), shardings)
for i, x in enumerate(jax.tree.leaves(exported.call(*args, **kwargs))):
    np.save(f"{sys.argv[1]}{i}.npy", x)
"""


def noisy(key, x, *, scale):
    return {"sum": jnp.cumsum(x, 0) * scale, "noise": jax.random.normal(key, x.shape)}


@pytest.mark.parametrize(
    ("fn", "in_types", "args", "kwargs"),
    [
        (step, TYPES, (W, X), {}),
        (noisy, None, (np.array([0, 1], np.uint32), X), {"scale": np.float32(2)}),
        (noisy, (None, "y:S(1)"), (np.array([0, 1], np.uint32), X[:13]), {"scale": np.float32(2)}),
    ],
)
def test_an_exported_plan_runs_without_sbp(tmp_path, fn, in_types, args, kwargs):
    f = sbp.jit(fn, sbp.make_mesh((2, 4), ("x", "y")), in_types)
    f.plan(*args, **kwargs).export(tmp_path / "plan")
    for i, x in enumerate(jax.tree.leaves((args, kwargs))):
        np.save(tmp_path / f"plan{i}.npy", x)
    subprocess.run([sys.executable, "-c", LOADED, tmp_path / "plan"], check=True)
    want = jax.tree.map(np.asarray, jax.jit(fn)(*args, **kwargs))
    got = [np.load(tmp_path / f"plan{i}.npy") for i in range(len(jax.tree.leaves(want)))]
    assert_same_results(want, jax.tree.unflatten(jax.tree.structure(want), got))


def test_a_plan_on_an_abstract_mesh_is_exported_for_its_hardware(tmp_path):
    mesh = jax.sharding.AbstractMesh((2, 4), ("x", "y"))
    sbp.jit(step, mesh, hardware="tpu-v5e").plan(W, X).export(tmp_path / "plan")
    exported = jax.export.deserialize((tmp_path / "plan").read_bytes())
    assert exported.platforms == ("tpu",) and exported.nr_devices == 8


def test_what_jax_cannot_export_is_refused(tmp_path):
    def printing(x):
        jax.debug.print("{}", x)
        return x

    plan = sbp.jit(printing, sbp.make_mesh((2, 4), ("x", "y"))).plan(X)
    refused(r"plan\.export: .*callback", plan.export, tmp_path / "plan")
    assert not (tmp_path / "plan").exists()


# ---- plans in files for tests --------------------------------------------------------------------
# Plans in files for tests, and reports as data.


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
    function: Any = ffn
    for given, name, update, said in (
        (plan, "other.txt", False, "is not a file of assert_plan_unchanged"),
        (plan, ".", False, "cannot read"),
        (plan, "none/plan.txt", True, "cannot write"),
        (function, "plan.txt", False, "plan"),
    ):
        refused(said, sbp.assert_plan_unchanged, given, tmp_path / name, update=update)
    assert (tmp_path / "other.txt").read_text() == "mine"


def test_the_report_as_data_has_the_figures_of_the_plan(plan):
    data = json.loads(json.dumps(plan.report().to_json()))
    assert (data["format"], data["function"], data["ok"]) == ("sbp report 1", "ffn", True)
    found, cost = data["plan"], plan.program.cost
    assert found["bytes_sent_per_device"] == cost.bytes_per_device
    assert found["strategy"]["model"].startswith("tensor parallel")
    assert [(t["type"], t["on_one_device"]) for t in found["inputs"]] == [
        ("data:S(0)", "f32[32,256]"),
        ("model:S(1)", "f32[256,256]"),
        ("model:S(0)", "f32[256,256]"),
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
    assert (data["ok"], data["plan"], data["diagnostics"][0]["severity"]) == (False, None, "error")
