"""The choice of the gate's cases, the lock, mutants, and the measurement of cases."""

import ast
import os
import re
import signal
import subprocess
import sys
import time

import pytest

from tests import definitions, lock
from tests.case_seconds import read_table
from tests.gate import Gate
from tests.mutants import mutate

CASES = [f"tests/test_a.py::test_x[{k}]" for k in range(9)]


def test_a_count_takes_so_many_cases_and_named_ones_beside_them():
    chosen = Gate({"tests/test_a.py::test_x": 2}, frozenset()).taken(CASES)
    assert len(chosen) == 2
    other = sorted(set(CASES) - chosen)[0]
    assert Gate({"tests/test_a.py::test_x": 2}, frozenset([other])).taken(CASES) == chosen | {other}
    assert Gate({}, frozenset()).taken(CASES) == set(CASES)


def test_a_new_case_changes_the_choice_by_itself_only():
    gate = Gate({"tests/test_a.py::test_x": 3}, frozenset())
    before, after = gate.taken(CASES[:-1]), gate.taken(CASES)
    assert len(before - after) <= 1 and after - before <= {CASES[-1]}


@pytest.fixture
def fingerprint_in(tmp_path, monkeypatch):
    """The fingerprint of `f` of `sbp/a.py`, in a package of these two texts."""
    monkeypatch.setattr(definitions, "ROOT", tmp_path)
    (tmp_path / "sbp").mkdir()
    cached = (definitions.tree, definitions.parsed, definitions._definition, definitions._file)

    def fingerprint(a, b=""):
        (tmp_path / "sbp" / "a.py").write_text(a)
        (tmp_path / "sbp" / "b.py").write_text(b)
        for each in cached:
            each.cache_clear()
        return definitions.fingerprint("sbp/a.py", "f")

    yield fingerprint
    for each in cached:
        each.cache_clear()


def test_a_function_depends_on_its_code_and_the_definitions_that_it_names(fingerprint_in):
    code = (
        "from sbp import b\nfrom sbp.b import K, C\n\ndef g(): return 1\n\ndef f(): return {} + g()"
    )
    other = "L = 2\nK = [L]\nclass C:\n    x: int = L\n    def m(self): return 1\n"
    for uses in ("K", "b.K", "C()", "(lambda: C)"):
        before = fingerprint_in(code.format(uses), other)
        assert before != fingerprint_in(code.format(uses), other.replace("L = 2", "L = 3"))
        assert before != fingerprint_in(code.format(f"1 + {uses}"), other)
        equal = [
            (code.format(uses), f"{other}\nM = 5\ndef h(): return 1"),
            (f"# why\n{code.format(uses)}", other),
            # Other functions have fingerprints of their own.
            (code.format(uses).replace("return 1", "return 2"), other),
            (code.format(uses), other.replace("return 1", "return 2")),
        ]
        assert [fingerprint_in(*texts) for texts in equal] == [before] * len(equal)
    lax = "from jax import lax\ndef f(x): return lax.exp(x)"
    assert fingerprint_in(lax) != fingerprint_in(lax.replace("jax import", "numpy import"))
    no_use = fingerprint_in(code.format("1"), other)
    assert no_use == fingerprint_in(code.format("1"), other.replace("L = 2", "L = 3"))


def test_docstrings_and_comments_of_the_package_do_not_count(fingerprint_in):
    first = fingerprint_in('"""A."""\ndef f(x):\n    """B."""\n    return x')
    assert first == fingerprint_in("def f(x): return x  # why")
    assert first != fingerprint_in("def f(x): return -x")


def test_a_module_depends_on_what_acts_when_it_is_imported():
    """A rule is registered by a decorator, so all that import its module depend on its traits."""
    module = definitions.parsed("sbp/signatures/families/windows.py")
    assert any("traits" in ast.dump(effect) for effect in module.effects)
    assert definitions.parsed("sbp/solve/search.py").effects == []


def test_a_recorded_run_names_what_it_ran_and_read(pytest_process, tmp_path):
    text = (
        "from pathlib import Path\n"
        "def test_a():\n"
        "    from sbp.machine.mesh import make_mesh\n"
        "    assert make_mesh((8,), ('d',)).size == 8\n"
        "    assert Path('tests/phrases.txt').read_text() and list(Path('docs').iterdir())\n"
    )
    record = tmp_path / "record"
    said = pytest_process(text, "--gate", f"--record={record}").communicate()[0]
    ran = set(record.read_text().splitlines())
    assert "1 passed" in said
    assert {"sbp/machine/mesh.py:make_mesh", "sbp/types.py:", "tests/phrases.txt", "docs/"} <= ran
    assert "sbp/solve/search.py:solve" not in ran and lock.PROCESS not in ran


def test_the_lock_names_what_is_there():
    assert lock.locked()
    assert not [
        test
        for test, entry in lock.locked().items()
        if not (lock.ROOT / test).exists() or test in lock.UNLOCKED or test not in entry["ran"]
    ]


@pytest.mark.parametrize("area", mutate.AREAS)
def test_mutants_are_programs_that_differ(area):
    found = ((path, mutate.mutants(path, area)) for path in mutate.files(area))
    path, mutants = next(each for each in found if each[1])
    text = path.read_text("utf-8")
    for mutant in mutants[:: max(1, len(mutants) // 5)]:
        changed = mutate.mutated(mutant)
        assert ast.dump(ast.parse(changed)) != ast.dump(ast.parse(text)), mutant
        lines = zip(text.splitlines(), changed.splitlines(), strict=True)
        assert next(k for k, (old, new) in enumerate(lines, 1) if old != new) == mutant.line


@pytest.fixture
def pytest_process(tmp_path):
    """Runs pytest on a test module of this text."""

    def start(text, *arguments):
        (tmp_path / "test_x.py").write_text(text)
        command = [sys.executable, "-m", "pytest", "-p", "conftest", "-q"]
        ours = {name: x for name, x in os.environ.items() if not name.startswith("PYTEST_")}
        return subprocess.Popen(
            [*command, *arguments, "--rootdir", str(tmp_path), str(tmp_path / "test_x.py")],
            cwd=lock.ROOT,
            env=ours | {"PYTEST_ADDOPTS": "-p no:cacheprovider"},
            stdout=subprocess.PIPE,
            text=True,
        )

    return start


def test_a_run_that_is_stopped_names_the_case(pytest_process, tmp_path):
    started = tmp_path / "started"
    body = f"    open({str(started)!r}, 'w').close()\n    time.sleep(60)\n"
    process = pytest_process(f"import time\ndef test_slow():\n{body}")
    while not started.exists() and process.poll() is None:
        time.sleep(0.05)
    process.send_signal(signal.SIGTERM)
    said = process.communicate()[0]
    assert process.returncode == 1
    assert re.search(r"stopped while these cases ran: .*::test_slow", said)


def test_cases_that_passed_are_not_run_again(pytest_process, tmp_path):
    table = tmp_path / "table.tsv"
    text = "def test_a(): pass\ndef test_b(): assert 0\n"
    assert "1 failed, 1 passed" in pytest_process(text, f"--seconds={table}").communicate()[0]
    outcomes = {case.split("::")[1]: how for case, (_, how) in read_table(table).items()}
    assert outcomes == {"test_a": "passed", "test_b": "failed"}
    again = pytest_process(text.replace("assert 0", "pass"), f"--seconds={table}", "--resume")
    assert "1 passed, 1 deselected" in again.communicate()[0]
