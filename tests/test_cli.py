"""The command line, and the examples of every code.
`sbp check FILE:FUNCTION`, `sbp report FILE:FUNCTION` and `sbp signatures NAME`."""

import json
import os
import re
import shutil
import subprocess
import sys
import warnings
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest

import sbp
from sbp.cli import _PROGRAMS
from sbp.commands.command_line import arguments
from sbp.commands.signatures import signature_page, signatures_page
from sbp.errors import CODES, SbpError, SbpTypeError, SbpWarning
from sbp.report.codes import PAGES, PRELUDE
from sbp.report.concepts import CONCEPTS
from sbp.signatures import known_primitives
from sbp.signatures.examples import SAMPLES, sample
from tests.edits import run_source


def test_every_code_has_a_page_and_every_page_a_code():
    assert set(PAGES) == set(CODES) and all(page.code == code for code, page in PAGES.items())


@pytest.mark.parametrize("code", list(CODES))
def test_explain(code, command):
    out = command("explain", code).out
    assert out.startswith(f"{code}: ")
    assert "a program that gets this code:" in out and "a program that does not:" in out
    assert not [line for line in PAGES[code].right.strip().splitlines() if line not in out]


def codes_of(program):
    """The codes that a program gets, as errors, as warnings or in a report."""
    found, names = set(), {}
    with warnings.catch_warnings(record=True, action="always") as said:
        try:
            names = run_source(PRELUDE + program, "<example>")
        except SbpTypeError as error:
            found |= {d.code for d in error.diagnostics}
        except SbpError as error:
            found.add(error.code)
    found |= {str(w.message).split(":")[0] for w in said if issubclass(w.category, SbpWarning)}
    if "report" in names:
        found |= {d.code for d in names["report"].diagnostics}
    return found


@pytest.mark.parametrize("code", [code for code, page in PAGES.items() if page.runs])
def test_examples_do_what_they_say(code, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)  # some write files
    assert codes_of(PAGES[code].wrong) == {code} and codes_of(PAGES[code].right) == set()


def test_concepts_have_unique_names_that_lead_on():
    words = [word for c in CONCEPTS for word in (c.name, *c.also)]
    assert len({w.casefold() for w in words}) == len(words) and not set(words) & set(CODES)
    assert not [c.name for c in CONCEPTS if not {*c.see} <= {d.name for d in CONCEPTS} - {c.name}]


@pytest.mark.parametrize(
    ("words", "title"),
    [
        (["P"], "P"),
        (["partial"], "P"),
        (["mesh", "axis"], "mesh axis"),
        (["zero"], "ZeRO"),
        (["zero", "1"], "ZeRO"),
        (["all_reduce"], "all-reduce"),
        (["All", "Gather"], "all-gather"),
        (["ring"], "ring"),
    ],
)
def test_explain_a_concept(words, title, command, monkeypatch):
    monkeypatch.setenv("COLUMNS", "40")
    out = command("explain", *words).out.splitlines()
    assert out[0] == title and len(out) > 3 and max(map(len, out)) <= 40


def test_completion_of_training_needs_a_checkout(command, monkeypatch, tmp_path):
    monkeypatch.setattr("sbp.cli._CHECKOUT", tmp_path)
    shown = command("completion", "bash")
    assert "--source" in shown.out and "--preset" not in shown.out
    assert shown.err.startswith(
        "the script does not complete the options of train, check, plan, translate"
    )


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_completion_is_a_script_that_its_shell_reads(shell, command, tmp_path):
    script = command("completion", shell).out
    assert not [
        w for w in ("signatures", "no-signature", "dot_general", "translate") if w not in script
    ]
    assert not [
        o
        for o in ("mesh", "preset", "topology", "beam", "against")
        if not re.search(rf"(--|-l |-){o}\b", script)
    ]
    program = shutil.which(shell)
    if program is not None:
        (tmp_path / "script").write_text(script)
        subprocess.run([program, "-n", str(tmp_path / "script")], check=True)


def test_all_codes_are_listed(command):
    out = command("explain").out
    assert all(code in out and meaning in out for code, meaning in CODES.items())


def test_version(command):
    assert command("--version").out == f"sbp {sbp.__version__}\n"


def test_signatures(command):
    words = command("signatures").out.replace(",", " ").split()
    assert not [name for name in known_primitives() if name not in words]
    assert "S(1)       S(0)        ->  P(sum)" in command("signatures", "dot_general").out


def test_every_sample_holds_its_primitive():
    assert not [name for name in SAMPLES if name not in known_primitives()]
    assert not [name for name in SAMPLES if sample(name) is None]
    assert not [
        name for name in known_primitives() if not signature_page(name).title.startswith(name)
    ]
    assert signatures_page().parts


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["explain", "no-signatur"], 'did you mean "no-signature"?'),
        (["explain", "reduce", "scater"], 'did you mean "reduce-scatter"?'),
        (["explain", "qqqq"], "`sbp explain` lists them"),
        (["signatures", "dot_genral"], 'did you mean "dot_general"?'),
        (["signatures", "zzz"], "`sbp signatures` lists the primitives that have one"),
        (["explian"], 'did you mean "explain"'),
        (["--versoin"], "unrecognized arguments"),
        (
            ["plan", "model.py:step", "--args", "f32[8,16], {'w': i8}"],
            """use sbp report model.py:step --args 'f32[8,16], {'"'"'w'"'"': i8}'""",
        ),
        (["signatures", "softmx"], 'did you mean "softmax"?'),
        (
            ["signatures", "jnp.matmul", "--args", "f32[8,16], f32[8,16]"],
            "does not take these --args",
        ),
        (
            ["signatures", "einsum", "--args", "f32[4]"],
            "--args \"'ij,jk->ik', f32[512,1024], f32[1024,2048]\"",
        ),
        (["signatures", "jnp.interp"], "takes none of the arguments that sbp tries"),
    ],
)
def test_bad_arguments(argv, message, command):
    captured = command(*argv, status=2)
    assert message in captured.err and captured.out == ""


def test_plan_prints_a_model_beside_the_paper(command):
    shown = command("plan", "--preset", "gshard-12l-512e", "--hardware", "tpu-v3").out
    row = next(line for line in shown.splitlines() if "seconds of a step, modelled" in line)
    assert row.split()[-2] == "0.30"


IN_A_CHECKOUT = [*_PROGRAMS]


@pytest.mark.parametrize("name", IN_A_CHECKOUT)
def test_outside_a_checkout_a_command_says_where_it_is(name, command, monkeypatch, tmp_path):
    monkeypatch.setattr("sbp.cli._CHECKOUT", tmp_path)
    said = command(name, "--preset", "tiny-test", status=2).err
    assert said.startswith(f"error[unknown-option]: sbp {name} ") and "gshard of the sbp" in said
    assert said.endswith("; run it in a checkout of the repository\n") and said.count("\n") == 1


def test_a_package_without_the_repository_says_where_training_is(tmp_path):
    """The package alone, as a wheel installs it."""
    (tmp_path / "sbp").symlink_to(Path(__file__).parents[1] / "sbp")
    ran = subprocess.run(
        [sys.executable, "-m", "sbp", IN_A_CHECKOUT[0]],
        env={**os.environ, "PYTHONPATH": str(tmp_path)},
        cwd=tmp_path,
        capture_output=True,
        text=True,
    )
    assert ran.returncode == 2
    assert "of the sbp repository" in ran.stderr and "Traceback" not in ran.stderr


def test_a_program_without_its_libraries_names_the_extra(command, monkeypatch):
    monkeypatch.setitem(sys.modules, "examples.gshard.train", None)
    assert "install the extra: pip install 'sbp-jax[gshard]'" in command("train", status=2).err


def test_a_command_that_ctrl_c_ends_says_so(command, monkeypatch):
    def program(words):
        raise KeyboardInterrupt

    monkeypatch.setattr("sbp.cli._load", lambda *names: program)
    assert command("translate", status=130).err == "interrupted\n"


def test_the_table_of_hardware(command):
    lines = [" ".join(line.split()) for line in command("hardware").out.splitlines()]
    assert {
        "tpu-v5p 459 459 95.0 GiB 2765 3-D torus 100 6144 6.25",
        "h100 989 495 74.5 GiB 3350 switch 450 8 50",
    } <= {*lines}
    assert all(any(line.startswith(f"{name} ") for line in lines) for name in sbp.HARDWARE)


# ---- sbp check -----------------------------------------------------------------------------------

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
    (tmp_path / "unclosed.py").write_text("def f(x:\n    pass\n")
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
        (["model.py:plain", "--args", "f32[8]", "--mesh", "data=2"], 2, "was called wrongly"),
    ],
)
def test_check(words, status, said, folder, command):
    assert said in command("check", *words, status=status).out


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["model.py:right"], "model.py:right takes x, w; give their shapes"),
        (["model.py:rihgt"], "model.py has no 'rihgt'; did you mean \"right\"?"),
        (["mdel.py:right"], 'no file mdel.py; did you mean "model.py"?'),
        (["model.py:plain", "--args", MATRICES], "has no mesh; give one"),
        (["model.py:right", "--args", "f33[8]"], "no dtype 'f33'; did you mean \"f32\"?"),
        (["model.py:right", "--args", "float[8]"], "no dtype 'float'; did you mean \"float32\"?"),
        (["model.py:right", "--args", "int[8]"], "no dtype 'int'; did you mean \"int32\"?"),
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
        (["model.py:right", "--mesh", "data=two"], "size of 'data' must be a whole number of 1"),
        (
            ["model.py:plain", "--args=f32[8]"],
            "If it returns (function, arguments), leave out --args",
        ),
        (["model.py:right", "--devices", "-1"], "--devices must be at least 1, got -1"),
        (["unclosed.py:f"], "line 1\n    def f(x:\n         ^\nSyntaxError: '(' was never closed"),
        (
            ["model.py:model.method", "--args", "f32[8]", "--mesh", "data=2"],
            "is a method, which keeps the mesh",
        ),
        # Views that no report can be.
        *(
            (["report", "model.py:right", "--args", MATRICES, *views], views[0])
            for views in (["--json", "--html", "x.html"], ["--short", "--source"], ["--html", ""])
        ),
    ],
)
def test_what_cannot_be_checked(words, said, folder, command):
    captured = command(*(words if words[0] == "report" else ("check", *words)), status=2)
    assert said in captured.err and captured.out == ""


def test_a_stack_trace_starts_at_the_users_line(folder, command):
    words = ["model.py:crash", "--args", "f32[8]", "--mesh", "data=2"]
    first, line, *_ = command("check", *words, status=2).err.splitlines()
    assert "model.py" in first and line.strip() == "return undefined_name + x"


def test_an_error_of_the_file_itself_is_a_finding(folder, command):
    text = PROGRAM + 'again = sbp.jit(plain, mesh, in_types=("dta:S(0)", None))\n'
    (folder / "model.py").write_text(text)
    out = command("check", "model.py:program", status=1).out
    assert "error[unknown-axis]" in out and f"model.py:{text.count(chr(10))}" in out


def test_json_has_the_numbers_of_the_plan(folder, command):
    with (folder / "model.py").open("a") as file:
        file.write("\nprint('a file that prints')\n")
    words = ["model.py:program", "--json", "--mesh", "data=4,model=2", "--hardware", "h100"]
    data = json.loads(command("check", *words).out)
    same = lambda x, w: jnp.tanh(sbp.split(x, 0, "data") @ w).sum()
    mesh = jax.sharding.AbstractMesh((4, 2), ("data", "model"))
    cost = sbp.jit(same, mesh, hardware="h100").plan(*arguments(MATRICES)[0]).cost
    assert data["ok"]
    assert data["plan"] == data["plan"] | {
        "mesh": {"data": 4, "model": 2},
        "bytes_sent_per_device": cost.bytes_per_device,
        "peak_memory_bytes_per_device": cost.peak_memory_bytes,
    }
    (found,) = json.loads(
        command("check", "model.py:wrong", "--args", MATRICES, "--json", status=1).out
    )["diagnostics"]
    assert found["code"] == "no-signature" and found["helps"]
    primary = next(label for label in found["labels"] if label["primary"])
    line = PROGRAM.splitlines()[primary["line"] - 1]
    assert line[primary["column"] - 1 : primary["end_column"] - 1] == "x @ w"


def test_report(folder, command, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    assert command("report", "model.py:program", "--html", "out.html").out == "wrote out.html\n"
    assert (folder / "out.html").read_text().startswith("<!doctype html>")
    full = command("report", "model.py:program").out
    short = command("report", "model.py:program", "--short").out
    assert "`right` on mesh data=2 model=4" in full and "\x1b" not in full
    assert "2 inputs" in full and "2 inputs" not in short
    unwritable = command("report", "model.py:program", "--html", "no/out.html", status=2).err
    assert unwritable.startswith("error[bad-argument]: cannot write")
    assert "/no/out.html: No such file" in unwritable


def test_a_plan_is_written_as_a_file(folder, command):
    words = ["emit", "model.py:right", "--args", MATRICES, "-o", "out.py"]
    assert "wrote out.py" in command(*words).out
    assert "jax.shard_map" in (folder / "out.py").read_text()
    assert "replace it with --force" in command(*words, status=2).err
    command(*words, "--force")


def test_a_shard_map_is_checked(folder, command):
    (folder / "mapped.py").write_text("""
import functools, jax
from jax.sharding import AxisType, PartitionSpec as Spec
mesh = jax.sharding.AbstractMesh((4,), ("model",), axis_types=(AxisType.Auto,))
specs = {"in_specs": Spec("model"), "out_specs": Spec(), "check_vma": False}
@functools.partial(jax.shard_map, mesh=mesh, **specs)
def total(x):
    return x.sum()
def whole(x):
    return x.sum()
""")
    words = ["mapped.py:total", "--shard-map", "--args", "f32[8]"]
    assert "error[missing-reduction]" in command("check", *words, "--mesh", "model=4", status=1).out
    assert "needs its mesh" in command("check", *words, status=2).err
    against = ["mapped.py:total", "--args", "f32[8]", "--mesh", "model=4", "--against"]
    assert "error[missing-reduction]" in command("check", *against, "mapped.py:whole", status=1).out
    assert "no function" in command("check", *against, "mapped.py", status=2).err


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


@pytest.mark.parametrize(
    "text", ["open('x')", "f32[-1]", "**{}", "f32[8]) + (3", "x[", "f32[1.5]", "f32[None]"]
)
def test_other_texts_are_refused(text):
    with pytest.raises(sbp.SbpError, match="--args"):
        arguments(text)


answer = lambda words, command: json.loads(command("signatures", *words, "--json").out)


@pytest.mark.parametrize("name", ["softmax", "jax.nn.softmax", "nn.softmax"])
def test_softmax_has_the_rows_of_its_primitives(name, command):
    data = answer([name], command)
    assert data["function"] == "jax.nn.softmax"
    rows = {p["primitive"]: p["rows"] for p in data["primitives"]}
    assert {"inputs": ["S(1)"], "outputs": ["P(max)"], "kernel": "local"} in rows["reduce_max"]
    assert {"inputs": ["S(1)"], "outputs": ["P(sum)"], "kernel": "local"} in rows["reduce_sum"]


def test_arguments_are_those_that_are_given(command):
    data = answer(["einsum", "--args", "'bij,bjk->bik', f32[4,8,16], f32[4,16,32]"], command)
    assert data["inputs"] == ["f32[4,8,16]", "f32[4,16,32]"]
    assert [p["primitive"] for p in data["primitives"]] == ["dot_general"]


def test_a_primitive_goes_before_a_function_of_its_name(command):
    data = answer(["dot_general"], command)
    assert data["primitive"] == "dot_general" and data["rows"]
    assert answer([], command)["primitives"] == sorted(known_primitives())


def test_text_of_signatures(command, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    out = command("signatures", "jnp.linalg.norm").out
    assert out.startswith("`jnp.linalg.norm` traced on f32[512,1024]")
    assert "reduce_sum" in out and max(map(len, out.splitlines())) <= 80
