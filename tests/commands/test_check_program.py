"""`sbp check FILE:FUNCTION`, `sbp report FILE:FUNCTION` and `sbp signatures NAME`."""

import json
import sys

import jax
import jax.numpy as jnp
import pytest

import sbp
from sbp.cli import main
from sbp.commands.parser import arguments
from sbp.signatures import known_primitives

PROGRAM = """
import jax, jax.numpy as jnp
import sbp

mesh = jax.sharding.AbstractMesh((2, 4), ("data", "model"))

@sbp.jit(mesh=mesh)
def right(x, w):
    x = sbp.split(x, 0, "data")
    return jnp.tanh(x @ w).sum()

@sbp.jit(mesh=mesh, boxing="explicit")
def wrong(x, w):
    x = sbp.split(x, 1, "model")
    w = sbp.split(w, 1, "model")
    return x @ w

def plain(x, w, *, square=False):
    y = sbp.split(x, 0, "data") @ w["w"]
    return (y * y if square else y).sum()

class Model:
    @sbp.jit(mesh=mesh)
    def method(self, x):
        return x + 1

model = Model()

def program():
    shape = jax.ShapeDtypeStruct
    return right, (shape((8, 16), "float32"), shape((16, 8), "float32"))

def crash(x):
    return undefined_name + x
"""


@pytest.fixture
def folder(tmp_path, monkeypatch):
    (tmp_path / "model.py").write_text(PROGRAM)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    kept = dict(sys.modules)
    yield tmp_path
    for name in set(sys.modules) - set(kept):
        if getattr(sys.modules[name], "__file__", None) == str(tmp_path / "model.py"):
            del sys.modules[name]


MATRICES = "f32[8,16], f32[16,8]"


@pytest.mark.parametrize(
    ("words", "status", "said"),
    [
        (["model.py:program"], 0, "no findings in `right`"),
        (["model.py:right", "--args", MATRICES], 0, "no findings in `right`"),
        (["--args", MATRICES, "model.py:wrong"], 1, "error[no-signature]: `x @ w` has no SBP"),
        (["model:program"], 0, "no findings in `right`"),
        (
            ["model.py:plain", "--mesh", "data=3", "--args", "f32[9,4], {'w': f32[4,2]}"],
            0,
            "mesh           data=3",
        ),
    ],
)
def test_check(words, status, said, folder, capsys):
    assert main(["check", *words]) == status
    assert said in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["model.py:right"], "model.py:right takes x, w; give their shapes"),
        (["model.py:rihgt"], "model.py has no 'rihgt'; did you mean \"right\"?"),
        (["mdel.py:right"], 'no file mdel.py; did you mean "model.py"?'),
        (["model.py:plain", "--args", MATRICES], "has no mesh; give one"),
        (["model.py:right", "--args", "f33[8]"], "no dtype 'f33'; did you mean \"f32\"?"),
        (["model.py:right", "--args", "f32[8"], "is not of the form"),
        (["model.py:right", "--args", "{[1]: f32[8]}"], "is not of the form"),
        (["model.py:right", "--args=" + "-" * 100_000 + "1"], "is not of the form"),
        (["model.py:mesh"], "model.py:mesh is AbstractMesh, not a function"),
        (["model.py:right", "--mesh", "data:2"], "is not of the form data=2,model=4"),
        (["model.py:"], "names no function"),
        (["nothing:f"], "no module nothing"),
        (
            ["model.py:crash", "--args", "f32[8]", "--mesh", "data=2"],
            "NameError: name 'undefined_name' is not defined",
        ),
        (["model.py:right", "--arsg"], "unrecognized arguments"),
        (
            ["model.py:model.method", "--args", "f32[8]", "--mesh", "data=2"],
            "is a method, which keeps the mesh",
        ),
    ],
)
def test_what_cannot_be_checked(words, said, folder, capsys):
    assert main(["check", *words]) == 2
    captured = capsys.readouterr()
    assert said in captured.err and captured.out == ""


def test_a_stack_trace_starts_at_the_users_line(folder, capsys):
    main(["check", "model.py:crash", "--args", "f32[8]", "--mesh", "data=2"])
    first, line, *_ = capsys.readouterr().err.splitlines()
    assert "model.py" in first and line.strip() == "return undefined_name + x"


def test_an_error_of_the_file_itself_is_a_finding(folder, capsys):
    text = PROGRAM + 'again = sbp.jit(plain, mesh, in_types=("dta:S(0)", None))\n'
    (folder / "model.py").write_text(text)
    assert main(["check", "model.py:program"]) == 1
    out = capsys.readouterr().out
    assert "error[unknown-axis]" in out and f"model.py:{text.count(chr(10))}" in out


def test_json_has_the_numbers_of_the_plan(folder, capsys):
    words = ["model.py:program", "--json", "--mesh", "data=4,model=2", "--hardware", "h100"]
    assert main(["check", *words]) == 0
    data = json.loads(capsys.readouterr().out)

    def same(x, w):
        return jnp.tanh(sbp.split(x, 0, "data") @ w).sum()

    mesh = jax.sharding.AbstractMesh((4, 2), ("data", "model"))
    cost = sbp.jit(same, mesh, hardware="h100").plan(*arguments(MATRICES)[0]).cost
    assert data["ok"] and data["plan"]["mesh"] == {"data": 4, "model": 2}
    assert data["plan"]["bytes_sent_per_device"] == cost.bytes_per_device
    assert data["plan"]["peak_memory_bytes_per_device"] == cost.peak_memory_bytes
    assert main(["check", "model.py:wrong", "--args", MATRICES, "--json"]) == 1
    (found,) = json.loads(capsys.readouterr().out)["diagnostics"]
    assert found["code"] == "no-signature" and found["helps"]
    primary = next(label for label in found["labels"] if label["primary"])
    line = PROGRAM.splitlines()[primary["line"] - 1]
    assert line[primary["column"] - 1 : primary["end_column"] - 1] == "x @ w"


def test_report(folder, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    assert main(["report", "model.py:program", "--html", "out.html"]) == 0
    assert capsys.readouterr().out == "wrote out.html\n"
    assert (folder / "out.html").read_text().startswith("<!doctype html>")
    assert main(["report", "model.py:program"]) == 0
    full = capsys.readouterr().out
    assert main(["report", "model.py:program", "--short"]) == 0
    short = capsys.readouterr().out
    assert "`right` on mesh data=2 model=4" in full and "\x1b" not in full
    assert "2 inputs" in full and "2 inputs" not in short
    assert main(["report", "model.py:program", "--html", "no/out.html"]) == 2
    assert "cannot write no/out.html" in capsys.readouterr().err


def test_a_shard_map_is_checked(folder, capsys):
    (folder / "mapped.py").write_text("""
import functools, jax
from jax.sharding import AxisType, PartitionSpec as Spec
mesh = jax.sharding.AbstractMesh((4,), ("model",), axis_types=(AxisType.Auto,))
specs = {"in_specs": Spec("model"), "out_specs": Spec(), "check_vma": False}
@functools.partial(jax.shard_map, mesh=mesh, **specs)
def total(x):
    return x.sum()
""")
    words = ["mapped.py:total", "--shard-map", "--args", "f32[8]"]
    assert main(["check", *words, "--mesh", "model=4"]) == 1
    assert "error[missing-reduction]" in capsys.readouterr().out
    assert main(["check", *words]) == 2
    assert "--shard-map needs the mesh" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("text", "shapes"),
    [
        ("f32[8,16], i8", [((8, 16), "float32"), ((), "int8")]),
        ("{'a': [bf16[2], (f16[],)]}", [((2,), "bfloat16"), ((), "float16")]),
        ("key[4], bool[3]", [((4,), "key<fry>"), ((3,), "bool")]),
        ("{(0, 1): f32[2]}", [((2,), "float32")]),
        ("", []),
    ],
)
def test_shapes(text, shapes):
    assert [(s.shape, str(s.dtype)) for s in jax.tree.leaves(arguments(text))] == shapes


def test_symbolic_sizes_of_one_call_are_related():
    (x, y), named = arguments("f32[b,16], f32[2*b], flag=True, n=-3, to='relu'")
    assert y.shape[0] == 2 * x.shape[0] and named == {"flag": True, "n": -3, "to": "relu"}


@pytest.mark.parametrize("text", ["open('x')", "f32[-1]", "**{}", "f32[8]) + (3", "x[", "f32[1.5]"])
def test_other_texts_are_refused(text):
    with pytest.raises(sbp.SbpError, match="--args"):
        arguments(text)


def answer(words, capsys):
    assert main(["signatures", *words, "--json"]) == 0
    return json.loads(capsys.readouterr().out)


@pytest.mark.parametrize("name", ["softmax", "jax.nn.softmax", "nn.softmax"])
def test_softmax_has_the_rows_of_its_primitives(name, capsys):
    data = answer([name], capsys)
    assert data["function"] == "jax.nn.softmax"
    rows = {p["primitive"]: p["rows"] for p in data["primitives"]}
    assert {"inputs": ["S(1)"], "outputs": ["P(max)"], "kernel": "local"} in rows["reduce_max"]
    assert {"inputs": ["S(1)"], "outputs": ["P(sum)"], "kernel": "local"} in rows["reduce_sum"]
    sent = {c["inputs"][0]: c["bytes_per_device"] for c in data["calls"]}
    assert sent["S(0)"] == 0 < sent["S(1)"] < sent["P(sum)"]


def test_bytes_of_a_product_are_those_of_its_collective(capsys):
    words = ["jnp.matmul", "--args", "f32[512,1024], f32[1024,2048]"]
    sent = {tuple(c["inputs"]): c for c in answer(words, capsys)["calls"]}
    assert sent["S(0)", "B"]["bytes_per_device"] == 0 and sent["S(0)", "B"]["outputs"] == ["S(0)"]
    # Four devices: a reduce-scatter of the product, 512 x 2048 float32, sends 3/4 of it.
    assert sent["S(1)", "S(0)"]["bytes_per_device"] == 3 / 4 * 512 * 2048 * 4


def test_arguments_are_those_that_are_given(capsys):
    data = answer(["einsum", "--args", "'bij,bjk->bik', f32[4,8,16], f32[4,16,32]"], capsys)
    assert data["inputs"] == ["f32[4,8,16]", "f32[4,16,32]"]
    assert [p["primitive"] for p in data["primitives"]] == ["dot_general"]


def test_a_primitive_goes_before_a_function_of_its_name(capsys):
    data = answer(["dot_general"], capsys)
    assert data["primitive"] == "dot_general" and data["rows"]
    assert answer([], capsys)["primitives"] == sorted(known_primitives())


def test_text_of_signatures(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    assert main(["signatures", "jnp.linalg.norm"]) == 0
    out = capsys.readouterr().out
    assert out.startswith("`jnp.linalg.norm` traced on f32[512,1024]")
    assert "reduce_sum" in out and max(map(len, out.splitlines())) <= 80


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["softmx"], 'did you mean "softmax"?'),
        (["jnp.matmul", "--args", "f32[8,16], f32[8,16]"], "does not take these --args"),
        (["jnp.interp"], "takes none of the arguments that sbp tries"),
    ],
)
def test_what_has_no_answer(words, said, capsys):
    assert main(["signatures", *words]) == 2
    assert said in capsys.readouterr().err
