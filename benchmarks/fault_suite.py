"""How well faults are explained, on the programs of `benchmarks/faults`, or of a folder.

    python -m benchmarks.fault_suite [FOLDER]

A program of the folder is right but for one fault: below the faulty line stands `# meant: ` and the
line that was meant. sbp sees the source without these comments. For each program: whether the fault
is flagged, with the right core, with a first help after which the program has no error, and whether
that restores what was meant. `tests/explain/test_faults.py` runs some of them.
"""

from __future__ import annotations

import ast
import contextlib
import dataclasses
import functools
import linecache
import pathlib
import sys
import time
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any
from unittest import mock

import jax

import sbp
from sbp.errors import Diagnostic, OptionEdit, SbpError, SourceEdit
from sbp.report.pages import diagnostics_of
from tests.edits import edited_text, split_edits

FOLDER = pathlib.Path(__file__).parent / "faults"
MARK = "# meant: "


@dataclass(frozen=True, slots=True, kw_only=True)
class FaultyProgram:
    """A program with one fault.

    Arguments:
      name: of its file.
      faulty: the source with the fault.
      meant: the source without it.
      lines: the lines of the fault in `faulty`.
    """

    name: str
    faulty: str
    meant: str
    lines: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Checked:
    """What sbp says of a source.

    Arguments:
      found: errors and warnings.
      mark: what two programs with the same types have in common; None without a plan.
      inputs: the types that are asked for inputs, by name.
      options: flat types of inputs and outputs as options of `sbp.jit`, for edits of single ones.
    """

    found: tuple[Diagnostic, ...]
    mark: Any
    inputs: dict[str, Any]
    options: dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Score:
    """How well a fault was explained: whether it was flagged, with the right core, with a first
    help that works, that restores what was meant; and what went wrong."""

    name: str
    flagged: bool
    core: bool
    works: bool
    restores: bool
    seconds: float
    remark: str = ""


def faulty_programs(folder: pathlib.Path = FOLDER) -> list[FaultyProgram]:
    """The programs of a folder, by name."""
    return [_read(file) for file in sorted(folder.glob("*.py")) if file.name != "__init__.py"]


def _read(file: pathlib.Path) -> FaultyProgram:
    faulty: list[str] = []
    meant: list[str] = []
    lines: list[int] = []
    for line in file.read_text().splitlines():
        if line.strip().startswith(MARK.strip()):
            lines.append(len(faulty))
            meant[-1] = line.strip()[len(MARK) :]
            if not meant[-1].startswith(" "):
                indent = len(faulty[-1]) - len(faulty[-1].lstrip())
                meant[-1] = " " * indent + meant[-1]
            continue
        faulty.append(line)
        meant.append(line)
    text, right = ("\n".join(t) + "\n" for t in (faulty, meant))
    return FaultyProgram(name=file.stem, faulty=text, meant=right, lines=tuple(lines))


def checked(name: str, text: str, edits: Sequence[OptionEdit] = ()) -> Checked:
    """What sbp says of a source.

    Arguments:
      name: of its file.
      text: the source.
      edits: of options of its call of `sbp.jit`, whose flat types are in `edits` already.
    """
    file = f"{name}.py"
    linecache.cache[file] = (len(text), None, text.splitlines(keepends=True), file)
    names: dict[str, Any] = {"__name__": f"fault_{name}"}
    with warnings.catch_warnings(action="ignore"), _with_options(edits) as made:
        try:
            exec(compile(text, file, "exec"), names)
            report = names["report"] if "report" in names else names["f"].check(*names["args"])
        except SbpError as error:
            return Checked(found=diagnostics_of(error), mark=None, inputs={}, options={})
        except (TypeError, ValueError):  # of JAX, which says nothing of types
            return Checked(found=(), mark=None, inputs={}, options={})
        found = tuple(d for d in report.diagnostics if d.severity != "note")
        if not made:
            mark = str(jax.make_jaxpr(names["f"])(*names["args"])) if report.ok else None
            return Checked(found=found, mark=mark, inputs={}, options={})
        inputs, options = {}, {}
        with contextlib.suppress(SbpError):
            inputs, options = _options(made[-1], names["args"])
    return Checked(found=found, mark=_mark(report), inputs=inputs, options=options)


def _mark(report: Any) -> Any:
    program = report.program
    if program is None or not report.ok:
        return None
    request = program.request
    sizes = getattr(report, "sizes", None)
    types = program.typing
    return (
        request.boxing, request.axis_policies, request.budgets, request.memory_limit,
        tuple(types.values[v] for v in request.graph.inputs), types.outputs,
        round(program.cost.bytes_per_device), round(program.cost.peak_memory_bytes),
        sizes.status if sizes else "",
    )  # fmt: skip


def _options(jitted: Any, args: Sequence[Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    reader = jitted._on(jitted.mesh)
    signature, _ = reader.read(tuple(args), {})
    inputs = {leaf.name: leaf.type for leaf in signature.leaves}
    options = {"in_types": ([*inputs.values()], lambda flat: signature.like(flat)[0])}
    with contextlib.suppress(SbpError):
        traced = jitted.trace(*args)
        options["out_types"] = ([x.type for x in traced.results.leaves], traced.results.like)
    return inputs, options


@contextlib.contextmanager
def _with_options(edits: Sequence[OptionEdit]) -> Iterator[list[Any]]:
    """Collects what `sbp.jit` makes inside, with its options edited."""
    real, made = sbp.Jitted.__init__, []

    def init(self: Any, fn: Any, mesh: Any, options: Any) -> None:
        real(self, fn, mesh, functools.reduce(_edited, edits, options))
        made.append(self)

    with mock.patch.object(sbp.Jitted, "__init__", init):
        yield made


def _edited(options: Any, edit: OptionEdit) -> Any:
    if edit.option == "budgets":
        budgets = list(options.budgets)
        assert edit.position is not None
        budgets[edit.position] = dataclasses.replace(budgets[edit.position], above=edit.value)
        return dataclasses.replace(options, budgets=tuple(budgets))
    if edit.option == "boxing":
        axes = edit.value if isinstance(edit.value, dict) else {}
        base = "auto" if axes else edit.value
        return dataclasses.replace(options, boxing=base, axis_policies=axes)
    return dataclasses.replace(options, **{edit.option: edit.value})


def scored(program: FaultyProgram) -> Score:
    """The score of a program."""
    meant = checked(program.name, program.meant)
    errors = [d for d in meant.found if d.severity == "error"]
    assert not errors, f"{program.name} as meant: {errors[0].text()}"
    assert program.meant != program.faulty
    start = time.process_time()
    now = checked(program.name, program.faulty)
    seconds = time.process_time() - start
    others = [d for d in now.found if d.severity == "error"]
    ours = others or [d for d in now.found if d.title not in {m.title for m in meant.found}]
    differing = [n for n, t in now.inputs.items() if n in meant.inputs and t != meant.inputs[n]]
    core = any(_is_core(d, program, differing) for d in ours)
    after, remark = _after_first(program, now, ours)
    before = {m.title for m in meant.found}
    bad = after is None or any(
        d.severity == "error" or (not others and d.title not in before) for d in after.found
    )
    restores = after is not None and not bad and after.mark == meant.mark
    return Score(
        name=program.name, flagged=bool(ours), core=core, works=not bad, restores=restores,
        seconds=seconds, remark=remark,
    )  # fmt: skip


def _is_core(found: Diagnostic, program: FaultyProgram, differing: Sequence[str]) -> bool:
    others = {label.span.line for label in found.labels if not label.primary}
    lines = {n for label in found.labels for n in range(label.span.line, _end(label) + 1)}
    named = any(name in text for name in differing for text in _texts(found))
    return (named or not lines.isdisjoint(program.lines)) and len(others) <= 4


def _end(label: Any) -> int:
    return max(label.span.line, label.span.end_line or 0)


def _texts(found: Diagnostic) -> list[str]:
    return [found.title, *found.notes, *(label.text for label in found.labels)]


def _after_first(
    program: FaultyProgram, now: Checked, found: Sequence[Diagnostic]
) -> tuple[Checked | None, str]:
    """The program after the first help of each finding, all of them together."""
    helps = [d.helps[0] for d in found if d.helps]
    if not found or len(helps) < len(found):
        return None, "no help" if found else "not flagged"
    source, options = split_edits(e for h in helps for e in h.edits)
    source = _distinct(source)
    text = edited_text(program.faulty, source)
    for option in ("in_types", "out_types"):
        parts = [e for e in options if e.option == option and e.position is not None]
        if parts:
            flat, like = now.options[option]
            for e in parts:
                flat[e.position] = e.value
            options = [e for e in options if e not in parts]
            options.append(OptionEdit(option=option, value=like(flat)))
    try:
        ast.parse(text)
        return checked(f"{program.name}_after", text, options), helps[0].text
    except (NameError, SyntaxError, TypeError) as error:
        return None, f"{helps[0].text}: {error!r}"


def _distinct(edits: Sequence[SourceEdit]) -> list[SourceEdit]:
    return list({(e.span, e.replacement): e for e in edits}.values())


def main(folder: str = "") -> None:
    """Scores the programs of a folder."""
    scores: list[Score] = []
    for program in faulty_programs(pathlib.Path(folder) if folder else FOLDER):
        try:
            score = scored(program)
        except Exception as error:
            print(f"{program.name:24} {type(error).__name__}: {str(error)[:600]}")
            continue
        scores.append(score)
        marks = " ".join("x" if v else "." for v in dataclasses.astuple(score)[1:5])
        print(f"{score.name:24} {marks}  {score.seconds:5.1f} s  {score.remark[:150]}", flush=True)
    for part in ("flagged", "core", "works", "restores"):
        print(f"{part:10}{sum(getattr(s, part) for s in scores)} of {len(scores)}")


if __name__ == "__main__":
    main(*sys.argv[1:])
