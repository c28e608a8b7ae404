"""The choice of the gate's cases, the lock, mutants, and the measurement of cases."""

import ast
import os
import re
import signal
import subprocess
import sys
import time

import pytest

from tests import lock
from tests.case_seconds import read_table
from tests.gate import LIST, Gate
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


def test_the_lists_name_tests():
    """One name without a test leaves the newest JAX without any."""
    listed = Gate.read()
    assert len(listed.counts) > 20
    newest = LIST.with_name("newest.txt").read_text("utf-8").splitlines()
    for name in (*listed.counts, *listed.cases, *newest):
        file, _, test = name.partition("::")
        text = (lock.ROOT / file).read_text("utf-8")
        assert re.search(rf"def {re.escape(test.split('[')[0])}\(", text), name


def test_a_primitive_is_locked_by_its_rule(monkeypatch):
    """A changed rule changes the hashes of its primitives, and a changed oracle those of all."""
    names = ("neg", "conv_general_dilated", "cumsum", "sort")
    before = {name: lock.of_primitive(name) for name in names}
    digest = lock.digest

    def differ(file):
        changed = lambda path: b"" if path == lock.ROOT / file else digest(path)
        monkeypatch.setattr(lock, "digest", changed)
        return [name for name in names if lock.of_primitive(name) != before[name]]

    assert differ("sbp/signatures/families/windows.py") == ["conv_general_dilated"]
    assert differ("sbp/signatures/families/reduction.py") == ["cumsum", "sort"]
    assert differ("sbp/signatures/laws/oracle.py") == list(names)
    assert differ("sbp/infer/rows.py") == []


def test_docstrings_and_comments_of_the_package_do_not_count():
    texts = '"""A."""\ndef f(x):\n    """B."""\n    return x', "def f(x): return x  # why", "x"
    first, same, other = (lock.code(text.encode()) for text in texts)
    assert first == same != other


def test_a_locked_test_module_is_locked_by_its_data_and_imports():
    files = {str(p.relative_to(lock.ROOT)) for p in lock.files_of("tests/gallery/test_gallery.py")}
    assert "tests/gallery/training.py" in files and "sbp/explain/faults.py" in files
    assert any(name.startswith("tests/gallery/golden/") for name in files)
    assert not any(name.startswith("sbp/moe/") for name in files)


def test_the_lock_names_what_is_there():
    assert lock.read().keys() <= {*lock.primitives(), *lock.MODULES}
    assert lock.key("tests/signatures/test_laws.py::test_rows_hold[scatter-add]") == "scatter-add"
    assert lock.key("tests/signatures/test_proofs.py::test_contractions[max]") is None
    assert lock.key("tests/plan/test_saving.py::test_a[add]") is None


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
        command = [sys.executable, "-m", "pytest", "-p", "tests.conftest", "-q"]
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
