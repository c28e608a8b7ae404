"""Mutants of the package: its source with one small fault each, drawn by a seed."""

import ast
import copy
import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

ROOT = Path(__file__).parents[2]

AREAS = {
    "types": ("sbp/types.py", "sbp/layout.py", "sbp/annotations.py", "sbp/kinds.py"),
    "regions": ("sbp/trace", "sbp/_jax.py", "sbp/signatures/region.py"),
    "rows": ("sbp/signatures/families", "sbp/signatures/*.py"),
    "kernels": ("sbp/signatures/kernels",),
    "infer": ("sbp/infer", "sbp/solve"),
    "plan": ("sbp/plan",),
    "run": ("sbp/run",),
    "explain": ("sbp/explain",),
    "checker": ("sbp/handwritten",),
}
"""Where faults are put, by the name that the table has."""

COMPARISONS: dict[type[ast.cmpop], type[ast.cmpop]] = {
    ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt, ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq, ast.In: ast.NotIn, ast.NotIn: ast.In, ast.Is: ast.IsNot, ast.IsNot: ast.Is,
}  # fmt: skip
OPERATORS: dict[type[ast.operator], type[ast.operator]] = {
    ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.FloorDiv, ast.FloorDiv: ast.Mult,
    ast.Div: ast.Mult, ast.Mod: ast.FloorDiv, ast.BitAnd: ast.BitOr, ast.BitOr: ast.BitAnd,
}  # fmt: skip
CALLS = {"min": "max", "max": "min", "any": "all", "all": "any"}


@dataclass(frozen=True, slots=True, order=True)
class Mutant:
    """One fault.

    Arguments:
      area: a key of `AREAS`.
      path: the file, relative to the checkout.
      line: of the fault, from 1.
      column: of the fault, from 0.
      fault: what was changed, in words.
    """

    area: str
    path: str
    line: int
    column: int
    fault: str

    def __str__(self) -> str:
        return f"{self.path}:{self.line}:{self.column} {self.fault}"


def files(area: str) -> list[Path]:
    """The modules of an area."""
    found: set[Path] = set()
    for pattern in AREAS[area]:
        for path in ROOT.glob(pattern):
            found |= set(path.rglob("*.py")) if path.is_dir() else {path}
    return sorted(found)


def changes(node: ast.AST) -> Iterator[tuple[str, ast.expr | ast.stmt, ast.AST]]:
    """Faults of a node: words, the part that is replaced, and its replacement."""
    match node:
        case ast.Compare(ops=[op]) if type(op) in COMPARISONS:
            new = COMPARISONS[type(op)]
            yield f"{type(op).__name__} becomes {new.__name__}", node, _with(node, ops=[new()])
        case ast.BinOp(op=op) if type(op) in OPERATORS:
            new = OPERATORS[type(op)]
            yield f"{type(op).__name__} becomes {new.__name__}", node, _with(node, op=new())
        case ast.BoolOp(op=op):
            new = ast.Or if isinstance(op, ast.And) else ast.And
            yield f"{type(op).__name__} becomes {new.__name__}", node, _with(node, op=new())
        case ast.UnaryOp(op=ast.Not() | ast.USub() as op, operand=operand):
            yield f"{type(op).__name__} is dropped", node, operand
        case ast.Constant(value=bool(value)):
            yield f"{value} becomes {not value}", node, ast.Constant(not value)
        case ast.Constant(value=int(value)):
            yield f"{value} becomes {value + 1}", node, ast.Constant(value + 1)
        case ast.Call(func=ast.Name(id=name) as func) if name in CALLS:
            yield f"{name} becomes {CALLS[name]}", func, ast.Name(CALLS[name])
        case ast.If(test=test) | ast.IfExp(test=test):
            yield "a condition is negated", test, ast.UnaryOp(ast.Not(), test)
        case ast.comprehension(ifs=[test, *_]):
            yield "a filter is dropped", test, ast.Constant(True)
        case ast.Continue():
            yield "continue becomes pass", node, ast.Pass()
        case ast.Expr(value=ast.Call()) | ast.AugAssign():
            yield "a statement is dropped", node, ast.Pass()
        case _:
            pass


def _with(node: ast.AST, **fields: object) -> ast.AST:
    new = copy.copy(node)
    for name, value in fields.items():
        setattr(new, name, value)
    return new


def _nodes(node: ast.AST) -> Iterator[ast.AST]:
    """The nodes that are changed: no texts, errors, decorators or annotations of types."""
    if isinstance(node, ast.JoinedStr | ast.Raise):
        return
    yield node
    for name, value in ast.iter_fields(node):
        if name not in ("decorator_list", "annotation", "returns"):
            for child in value if isinstance(value, list) else [value]:
                if isinstance(child, ast.AST):
                    yield from _nodes(child)


def _faults(text: str) -> Iterator[tuple[int, int, str, str]]:
    """Each fault of a source: line, column, words, and the source with the fault. Lines keep their
    numbers."""
    starts = [0, *itertools.accumulate(len(t.encode()) for t in text.splitlines(keepends=True))]
    source = text.encode()
    for node in _nodes(ast.parse(text)):
        for fault, old, new in changes(node):
            assert old.end_lineno is not None and old.end_col_offset is not None
            begin = starts[old.lineno - 1] + old.col_offset
            end = starts[old.end_lineno - 1] + old.end_col_offset
            # Lines are kept inside the parentheses, and after a statement.
            written, lines = ast.unparse(new), "\n" * (old.end_lineno - old.lineno)
            written = f"({written}{lines})" if isinstance(old, ast.expr) else written + lines
            whole = source[:begin] + written.encode() + source[end:]
            yield old.lineno, old.col_offset, fault, whole.decode()


def mutants(path: Path, area: str) -> list[Mutant]:
    """All mutants of a module."""
    name = path.relative_to(ROOT).as_posix()
    found = (Mutant(area, name, *fault[:3]) for fault in _faults(path.read_text("utf-8")))
    return list(dict.fromkeys(found))


def mutated(mutant: Mutant) -> str:
    """The source of the mutant's module, with the fault."""
    text = (ROOT / mutant.path).read_text("utf-8")
    place = mutant.line, mutant.column, mutant.fault
    return next(whole for *found, whole in _faults(text) if tuple(found) == place)


def drawn(count: int, seed: int = 0) -> list[Mutant]:
    """`count` mutants, about equally many of each area, each of another place."""
    chosen: list[Mutant] = []
    for number, area in enumerate(AREAS):
        share = count // len(AREAS) + (number < count % len(AREAS))
        every = [m for path in files(area) for m in mutants(path, area)]
        rng = np.random.default_rng([seed, number])
        chosen += [every[k] for k in rng.choice(len(every), share, replace=False)]
    return sorted(chosen)
