"""The lock: test files that the gate does not run again, because nothing that they ran has changed.

    python -m tests.lock [FILE ..]

runs the gate's cases of each test file that has changed since it was locked, or of the files that
you name, each in a process of its own. For each file that passes, it writes to `lock.json.xz`
which functions of the package ran, which files were read, which folders were listed, and a hash of
all these. `pytest --gate` leaves out a file whose hash is still the same. The hash also covers the
versions of Python and of the packages, the options of pytest, and the lines of `gate.txt` that name
the file. A file that starts other processes depends on the whole package. `make deep` does not use
the lock.
"""

import argparse
import ast
import builtins
import hashlib
import importlib.abc
import importlib.machinery
import importlib.metadata
import json
import lzma
import os
import platform
import subprocess
import sys
import tomllib
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path
from types import CodeType
from typing import Any

import pytest

from tests import definitions
from tests.definitions import ROOT, TEST_FILES

FILE = Path(__file__).with_name("lock.json.xz")
UNLOCKED = ("tests/test_docs.py", "tests/test_gate.py", "tests/test_house.py")
"""Files that always run: they read most of the checkout."""
OF_THE_GATE = tuple(
    f"tests/{name}" for name in ("gate.py", "gate.txt", "lock.py", "case_seconds.py")
)
"""Files that choose and measure cases, and change no verdict."""
UNTRACKED = ("build", "runs", "__pycache__", "sbp_jax.egg-info")
"""Folders that are not in the repository, beside hidden ones."""
SOURCE_READERS = ("linecache.py", "tokenize.py")
"""They read the source of functions that ran, for error messages."""
PROCESS = "process"
"""What a test file depends on if it starts a process: all of the package."""
RAN = "__sbp_ran__"


def unchanged(path: Path) -> bool:
    """Whether a test file has passed with all that it depends on."""
    test = _relative(path)
    if test in UNLOCKED or test not in locked():
        return False
    return locked()[test]["hash"] == hash_of(test, locked()[test]["ran"])


@cache
def locked() -> dict[str, dict[str, Any]]:
    return json.loads(lzma.decompress(FILE.read_bytes())) if FILE.exists() else {}


def hash_of(test: str, ran: Iterable[str]) -> str:
    """The hash of what a test file ran and read, as it is in this checkout."""
    listed = [line for line in _gate_lines() if line.startswith(test)]
    whole = hashlib.sha256("\n".join([*versions(), *listed]).encode())
    for name in ran:
        whole.update(fingerprint(name))
    return whole.hexdigest()[:16]


@cache
def fingerprint(name: str) -> bytes:
    """Of a function (`sbp/a.py:f`), the import of a module (`sbp/a.py:`), a folder (`a/`), or a
    file."""
    if name == PROCESS:
        modules = sorted((ROOT / "sbp").rglob("*.py"))
        return "\n".join(ast.dump(definitions.tree(_relative(p))) for p in modules).encode()
    path, colon, function = name.partition(":")
    if not (ROOT / path).exists():
        return b"absent"
    if colon:
        return definitions.fingerprint(path, function)
    if name.endswith("/"):
        return " ".join(sorted(each for each in os.listdir(ROOT / path) if _counts(each))).encode()
    content = (ROOT / path).read_bytes()
    return content + definitions.references(path) if path.endswith(".py") else content


@cache
def versions() -> tuple[str, ...]:
    """Of Python and of the packages that the verdicts depend on; and the options of pytest."""
    packages = {"jax", "jaxlib", "numpy", "z3-solver", "ml_dtypes", "flax", "optax", "rich"}
    found = {d.name: d.version for d in importlib.metadata.distributions() if d.name in packages}
    options = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["tool"]["pytest"]
    named = (f"{name} {found[name]}" for name in sorted(found))
    return platform.python_version(), str(options), *named


@cache
def _gate_lines() -> tuple[str, ...]:
    return tuple(FILE.with_name("gate.txt").read_text("utf-8").splitlines())


def _relative(path: str | os.PathLike[str]) -> str:
    """A path relative to the checkout; empty for one outside of it."""
    name = os.path.relpath(os.path.abspath(path), ROOT).replace(os.sep, "/")
    return "" if name.startswith("..") else name


def _counts(name: str) -> bool:
    hidden = any(part[:1] == "." or part in UNTRACKED for part in name.split("/"))
    return not hidden and name not in OF_THE_GATE


class Loader(importlib.machinery.SourceFileLoader):
    """Loads a module of the package so that each of its functions notes that it runs."""

    def get_code(self, fullname: str) -> CodeType:
        path = _relative(self.path)
        module = ast.parse(self.get_data(self.path))
        getattr(builtins, RAN)(f"{path}:")
        for name, node in definitions.functions(module.body):
            note = ast.parse(f"{RAN}({f'{path}:{name}'!r})").body[0]
            for each in ast.walk(note):
                ast.copy_location(each, node.body[0])
            node.body.insert(definitions.is_docstring(node.body[0]), note)
        return compile(module, self.path, "exec")


class Recorder(importlib.abc.MetaPathFinder):
    """Records what runs, which files are read and which folders are listed.

    Arguments:
      file: where the names are written.
    """

    def __init__(self, file: Path) -> None:
        self.file = file
        self.ran: set[str] = set()
        setattr(builtins, RAN, self.ran.add)
        sys.meta_path.insert(0, self)
        sys.addaudithook(self.audit)

    def find_spec(self, fullname: str, path: Any = None, target: Any = None) -> Any:
        if fullname.split(".")[0] != "sbp":
            return None
        spec = importlib.machinery.PathFinder.find_spec(fullname, path)
        if spec is not None and spec.origin is not None:
            spec.loader = Loader(fullname, spec.origin)
        return spec

    def audit(self, event: str, arguments: tuple[Any, ...]) -> None:
        if event == "subprocess.Popen":
            self.ran.add(PROCESS)
        elif event in ("open", "os.listdir", "os.scandir"):
            reader = sys._getframe(1).f_code.co_filename
            imported = reader.startswith("<frozen importlib")
            path = arguments[0]
            if not isinstance(path, str | os.PathLike) or reader.endswith(SOURCE_READERS):
                return
            if event != "open" and ("importlib" in reader or f"{os.sep}_pytest{os.sep}" in reader):
                return
            name = _relative(path)
            if name.endswith(".pyc"):
                folder, _, last = name.rpartition("__pycache__/")
                name = f"{folder}{last.split('.')[0]}.py"
            if name and _counts(name) and not (imported and name.startswith("sbp/")):
                self.ran.add(name if event == "open" else f"{name}/")

    def pytest_sessionfinish(self) -> None:
        is_there = lambda name: ":" in name or name == PROCESS or (ROOT / name).exists()
        self.file.write_text("\n".join(sorted(filter(is_there, self.ran))))


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--record", type=Path, metavar="FILE", help="write what runs (tests.lock)")


def pytest_load_initial_conftests(early_config: pytest.Config) -> None:
    file = early_config.known_args_namespace.record
    if file is not None:
        early_config.pluginmanager.register(Recorder(file), "sbp-recorder")


def record(test: str) -> list[str] | None:
    """What a test file runs and reads; None if a case fails or none runs."""
    file = ROOT / "build" / "lock" / f"{test.replace('/', '.')}.txt"
    file.parent.mkdir(parents=True, exist_ok=True)
    command = [sys.executable, "-m", "pytest", "-p", "tests.lock", f"--record={file}", "--gate"]
    process = subprocess.run(
        [*command, "-q", "-p", "no:cacheprovider", "--no-header", test],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    print(f"{test}: {process.stdout.splitlines()[-1]}", flush=True)
    if process.returncode not in (0, pytest.ExitCode.NO_TESTS_COLLECTED):
        print(process.stdout)
        return None
    return file.read_text().splitlines() if process.returncode == 0 else None


def main() -> int:
    """The command line; returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m tests.lock", description=__doc__)
    parser.add_argument("files", nargs="*", metavar="FILE", help="test files")
    every = [test for path in TEST_FILES if (test := _relative(path)) not in UNLOCKED]
    files = parser.parse_args().files or [t for t in every if not unchanged(ROOT / t)]
    found = {test: entry for test, entry in locked().items() if test in every}
    with ThreadPoolExecutor(2) as pool:
        for test, ran in zip(files, pool.map(record, files), strict=True):
            if ran is None:
                found.pop(test, None)
            else:
                found[test] = {"hash": hash_of(test, ran), "ran": ran}
            FILE.write_bytes(lzma.compress(json.dumps(dict(sorted(found.items()))).encode()))
    return 0


if __name__ == "__main__":
    sys.exit(main())
