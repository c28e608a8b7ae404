"""The command line, and the examples of every code."""

import linecache
import os
import re
import shutil
import subprocess
import sys
import warnings
from pathlib import Path

import pytest

import sbp
from sbp.cli import _PROGRAMS, main
from sbp.commands.signatures import signature_page, signatures_page
from sbp.errors import CODES, SbpError, SbpTypeError, SbpWarning
from sbp.report.codes import PAGES, PRELUDE
from sbp.report.concepts import CONCEPTS
from sbp.signatures import known_primitives
from sbp.signatures.examples import SAMPLES, sample


def test_every_code_has_a_page_and_every_page_a_code():
    assert set(PAGES) == set(CODES) and all(page.code == code for code, page in PAGES.items())


@pytest.fixture
def printed(capsys):
    """What a command that succeeds prints."""

    def run(*argv):
        assert main(list(argv)) == 0
        return capsys.readouterr().out

    return run


@pytest.mark.parametrize("code", list(CODES))
def test_explain(code, printed):
    out = printed("explain", code)
    assert out.startswith(f"{code}: ")
    assert "a program that gets this code:" in out and "a program that does not:" in out
    for line in PAGES[code].right.strip().splitlines():
        assert line in out


def codes_of(program):
    """The codes that a program gets, as errors, as warnings or in a report."""
    source, file = PRELUDE + program, "<example>"
    linecache.cache[file] = (len(source), None, source.splitlines(keepends=True), file)
    found, names = set(), {}
    with warnings.catch_warnings(record=True, action="always") as said:
        try:
            exec(compile(source, file, "exec"), names)
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
    for concept in CONCEPTS:
        assert set(concept.see) <= {c.name for c in CONCEPTS} - {concept.name}


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
def test_explain_a_concept(words, title, printed, monkeypatch):
    monkeypatch.setenv("COLUMNS", "40")
    out = printed("explain", *words).splitlines()
    assert out[0] == title and len(out) > 3 and max(map(len, out)) <= 40


def test_completion_of_training_needs_a_checkout(capsys, monkeypatch, tmp_path):
    monkeypatch.setattr("sbp.cli._CHECKOUT", tmp_path)
    assert main(["completion", "bash"]) == 0
    shown = capsys.readouterr()
    assert "--source" in shown.out and "--preset" not in shown.out
    assert shown.err.startswith(
        "the script does not complete the options of train, check, plan, translate"
    )


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_completion_is_a_script_that_its_shell_reads(shell, printed, tmp_path):
    script = printed("completion", shell)
    for word in ("signatures", "no-signature", "dot_general", "translate"):
        assert word in script
    for option in ("mesh", "preset", "topology", "beam", "against"):
        assert re.search(rf"(--|-l |-){option}\b", script)
    program = shutil.which(shell)
    if program is not None:
        (tmp_path / "script").write_text(script)
        subprocess.run([program, "-n", str(tmp_path / "script")], check=True)


def test_all_codes_are_listed(printed):
    out = printed("explain")
    assert all(code in out and meaning in out for code, meaning in CODES.items())


def test_version(printed):
    assert printed("--version") == f"sbp {sbp.__version__}\n"


def test_signatures(printed):
    words = printed("signatures").replace(",", " ").split()
    assert not [name for name in known_primitives() if name not in words]
    assert "S(1)       S(0)        ->  P(sum)" in printed("signatures", "dot_general")


def test_every_sample_holds_its_primitive():
    assert not [name for name in SAMPLES if name not in known_primitives()]
    assert not [name for name in SAMPLES if sample(name) is None]
    for name in known_primitives():
        assert signature_page(name).title.startswith(name)
    assert signatures_page().parts


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["explain", "no-signatur"], 'did you mean "no-signature"?'),
        (["explain", "reduce", "scater"], 'did you mean "reduce-scatter"?'),
        (["explain", "qqqq"], "`sbp explain` lists them"),
        (["signatures", "dot_genral"], 'did you mean "dot_general"?'),
        (["signatures", "zzz"], "`sbp signatures` lists those that have one"),
        (["explian"], 'did you mean "explain"'),
        (["--versoin"], "unrecognized arguments"),
    ],
)
def test_bad_arguments(argv, message, capsys):
    assert main(argv) == 2
    captured = capsys.readouterr()
    assert message in captured.err and captured.out == ""


def test_plan_prints_a_model_beside_the_paper(printed):
    shown = printed("plan", "--preset", "gshard-12l-512e", "--hardware", "tpu-v3")
    row = next(line for line in shown.splitlines() if "seconds of a step, modelled" in line)
    assert row.split()[-2] == "0.30"


IN_A_CHECKOUT = [name for name, (module, _) in _PROGRAMS.items() if not module.startswith("sbp.")]


@pytest.mark.parametrize("name", IN_A_CHECKOUT)
def test_outside_a_checkout_a_command_says_where_it_is(name, capsys, monkeypatch, tmp_path):
    monkeypatch.setattr("sbp.cli._CHECKOUT", tmp_path)
    assert main([name, "--preset", "tiny-test"]) == 2
    said = capsys.readouterr().err
    assert said.startswith(f"error[unknown-option]: sbp {name} ") and "gshard of the sbp" in said
    assert said.endswith("; run it in a checkout of the repository\n") and said.count("\n") == 1


def test_a_package_without_the_repository_says_where_training_is(tmp_path):
    """The package alone, as a wheel installs it."""
    (tmp_path / "sbp").symlink_to(Path(__file__).parents[1] / "sbp")
    ran = subprocess.run(
        [sys.executable, "-m", "sbp.cli", IN_A_CHECKOUT[0]],
        env={**os.environ, "PYTHONPATH": str(tmp_path)},
        cwd=tmp_path,
        capture_output=True,
        text=True,
    )
    assert ran.returncode == 2
    assert "of the sbp repository" in ran.stderr and "Traceback" not in ran.stderr


def test_a_program_without_its_libraries_names_the_extra(capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "examples.gshard.train", None)
    assert main(["train"]) == 2
    assert "install the extra: pip install 'sbp-jax[gshard]'" in capsys.readouterr().err


def test_a_command_that_ctrl_c_ends_says_so(capsys, monkeypatch):
    def program(words):
        raise KeyboardInterrupt

    monkeypatch.setattr("sbp.cli._load", lambda *names: program)
    assert main(["translate"]) == 130
    assert capsys.readouterr().err == "interrupted\n"


def test_the_table_of_hardware(printed):
    lines = [" ".join(line.split()) for line in printed("hardware").splitlines()]
    assert "tpu-v5p 459 459 95.0 GiB 2765 3-D torus 100 6144 6.25" in lines
    assert "h100 989 495 74.5 GiB 3350 switch 450 8 50" in lines
    assert all(any(line.startswith(f"{name} ") for line in lines) for name in sbp.HARDWARE)
