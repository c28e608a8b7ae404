"""A verdict depends on the program, and not on how it is spelled.

Every program of the other tests is written in six other ways, which trace to the same equations:
the checker finds the same in each, at the same equations.
"""

import ast
import functools
import inspect
from pathlib import Path
from typing import Any

import jax
import pytest

from sbp.machine.mesh import mesh_spec
from sbp.shardmap.check import traced
from sbp.shardmap.regions import analyse
from sbp.shardmap.words import code_of
from sbp.trace.graph import Graph
from tests.shardmap.programs import collection
from tests.shardmap.programs.kinds import mesh
from tests.shardmap.programs.wrong.layers import X
from tests.shardmap.programs.wrong.training import W
from tests.shardmap.respell import STYLES, load, respelled, shared

ORIGINAL = {".".join(module.__name__.split(".")[-2:]): module for module in collection.MODULES}


def programs(module: Any) -> dict[str, tuple[Any, tuple[Any, ...]]]:
    """The programs of a module with their arguments."""
    found: dict[str, tuple[Any, tuple[Any, ...]]] = {}
    for name, pair in getattr(module, "PAIRS", {}).items():
        for which in ("wrong", "right"):
            found[f"{name} {which}"] = pair.program(which, bool(pair.vma)), pair.args
    for name, program in getattr(module, "PROGRAMS", {}).items():
        vma = program.vma[-1]
        make = program.make if hasattr(program, "make") else program.program
        found[name] = make(vma), program.args
    for name, (body, _, ins, outs, args) in (
        getattr(module, "NOTED", {}).items()
        if isinstance(getattr(module, "NOTED", {}), dict)
        else ()
    ):
        found[name] = region(body, ins, outs), args
    for name, (body, _, ins, outs) in getattr(module, "NOT_TOLD", {}).items():
        found[name] = region(body, (ins,), outs), (module.SQUARE,)
    return found


def region(body: Any, ins: Any, outs: Any) -> Any:
    return jax.shard_map(body, mesh=mesh(), in_specs=ins, out_specs=outs, check_vma=False)


def equations(graph: Graph) -> tuple[Any, ...]:
    """The operations of a program, those of regions and loops inside."""
    return tuple(
        (n.op, equations(n.params["body"]) if n.op == "shard_map" else (), n.id)
        for n in graph.walk()
    )


def verdict(fn: Any, args: tuple[Any, ...]) -> tuple[Any, Any]:
    """The equations of a program, and what the checker finds, at which of them."""
    shapes = jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype), args)
    graph = traced(fn, shapes, mesh())
    found = analyse(graph, mesh_spec(mesh()))
    return equations(graph), (
        [
            (
                code_of(f),
                f.severity,
                f.mesh_axes,
                f.fault.kind,
                f.fault.node.id,
                f.observer.id if f.observer else None,
                f.result,
                f.reading.node.id if f.reading else None,
            )
            for f in found.findings
        ],
        [(*d.key, d.severity) for d in found.doubts],
    )


@functools.cache
def originals(name: str) -> dict[str, tuple[Any, Any]]:
    return {key: verdict(fn, args) for key, (fn, args) in programs(ORIGINAL[name]).items()}


@functools.cache
def module(name: str, style: str) -> Any:
    """A module in another style, on others in that style."""
    text = inspect.getsource(ORIGINAL[name])
    source = shared(ast.parse(text)) if style == "shared" else respelled(text, style)
    for other in ORIGINAL:
        line = f"from {ORIGINAL[other].__name__} import"
        if line in source:
            source = source.replace(line, f"from {module(other, style).__name__} import")
    return load(f"respelled_{style}_{name.replace('.', '_')}", source)


@pytest.mark.parametrize("name", list(ORIGINAL))
@pytest.mark.parametrize("style", list(STYLES))
def test_the_verdict_is_that_of_the_program(style: str, name: str):
    made = programs(module(name, style))
    assert made.keys() == originals(name).keys()
    other_equations, other_verdicts = [], []
    for key, (fn, args) in made.items():
        equations, found = verdict(fn, args)
        expected_equations, expected = originals(name)[key]
        if equations != expected_equations:
            other_equations.append(key)
        if found != expected:
            other_verdicts.append((key, expected, found))
    assert not other_equations, "the respeller changed a program"
    assert not other_verdicts


@pytest.mark.parametrize("name", list(ORIGINAL))
def test_helpers_that_all_operations_share(name: str):
    """Findings at one line of a helper are one finding: the codes are those of the program."""
    for key, (fn, args) in programs(module(name, "shared")).items():
        equations, (findings, doubts) = verdict(fn, args)
        expected_equations, (expected_findings, expected_doubts) = originals(name)[key]
        assert equations == expected_equations
        assert {f[:2] for f in findings} == {f[:2] for f in expected_findings}, key
        assert {d[1] for d in doubts} == {d[1] for d in expected_doubts}, key


def test_every_module_is_in_the_collection():
    folder = Path(collection.__file__).parent
    found = {f"{path.parent.name}.{path.stem}" for path in folder.glob("*/*.py")}
    assert found == ORIGINAL.keys()


def test_how_many_programs_there_are():
    assert sum(len(programs(m)) for m in ORIGINAL.values()) >= 200


SHARES = """
import jax
from jax import lax

def on_the_line(w, x):
    g = jax.grad(lambda w: ((x @ w) ** 2).mean())(w) / lax.axis_size("data")
    return lax.pmean(g, "data")

def on_the_line_before(w, x):
    n = lax.axis_size("data")
    g = jax.grad(lambda w: ((x @ w) ** 2).mean())(w) / n
    return lax.pmean(g, "data")

def by_a_literal(w, x):
    g = jax.grad(lambda w: ((x @ w) ** 2).mean())(w) / 2
    return lax.pmean(g, "data")

def on_the_line_of_the_sum(w, x):
    n = lax.axis_size("data"); g = jax.grad(lambda w: ((x @ w) ** 2).mean())(w); g = lax.psum(g, "data") / n; return g
"""  # noqa: E501


def test_a_number_of_devices_however_it_is_written():
    made = load("respelled_shares", SHARES)
    from jax.sharding import PartitionSpec as PS

    args = W, X
    found = {
        name: verdict(region(getattr(made, name), (PS(), PS("data")), PS()), args)[1]
        for name in (
            "on_the_line",
            "on_the_line_before",
            "by_a_literal",
            "on_the_line_of_the_sum",
        )
    }
    assert found.pop("on_the_line_of_the_sum") == ([], [])
    first, *others = found.values()
    assert [(f[0], f[1]) for f in first[0]] == [("wrong-reduction", "warning")]
    assert all(other == first for other in others)
