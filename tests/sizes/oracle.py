"""The oracle of symbolic sizes: the program is traced with numbers, the typing is written onto this
trace, and `certify` says whether it holds."""

import dataclasses
import math
import warnings

import jax
import jax.numpy as jnp

import sbp
from sbp.api.symbolic import SizedReport
from sbp.infer.request import Request
from sbp.infer.typing import Typing, certify
from tests.cases import GRID as MESH, shape as f32

dims = lambda text, *constraints: jax.export.symbolic_shape(text, constraints=constraints)


def nodes_of(graph):
    """The nodes that stand in a trace with numbers, too: what computes a size there is a number
    from the start."""
    known, kept = set(), []
    for node in graph.nodes:
        if node.op == "convert_element_type" and all(
            not isinstance(o, int) or o in known for o in node.inputs
        ):
            known |= set(node.outputs)
        else:
            kept.append(node)
    return kept


def written_onto(typing: Typing, request: Request) -> Typing:
    """The same typing of another trace of the same program. The kernels of its rows are those of
    that trace: a reshape of rows that divide moves nothing, and one of others does."""
    values, rows, returned = {}, {}, {}

    def row_there(node, row):
        there = request.table.rows_in(request.graph, node, request.native)
        return next((r for r in there if (r.ins, r.outs) == (row.ins, row.outs)), row)

    def visit(mine, theirs):
        values.update(zip(theirs.inputs, (typing.values[v] for v in mine.inputs), strict=True))
        assert [n.op for n in nodes_of(mine)] == [n.op for n in nodes_of(theirs)]
        for node, other in zip(nodes_of(mine), nodes_of(theirs), strict=True):
            rows[other.id] = row_there(other, typing.rows[node.id])
            values.update(zip(other.outputs, (typing.values[v] for v in node.outputs), strict=True))
            for k, (a, b) in enumerate(zip(node.regions, other.regions, strict=True)):
                visit(a, b)
                returned[other.id, k] = typing.region_outputs[node.id, k]

    graph = request.graph
    visit(typing.graph, graph)
    return dataclasses.replace(
        typing, request=request, graph=graph, values=values, rows=rows, region_outputs=returned
    )


def divides(shape, codes):
    return all(
        size % math.prod(n for c, n in zip(codes, (2, 4), strict=True) if c == d + 1) == 0
        for d, size in enumerate(shape)
    )


def holds_there(jitted, typing: Typing, args) -> bool:
    """Whether a program at given sizes has a typing, with the boundary that sbp gives it there."""
    held = [typing.values[v] for v in typing.graph.inputs]
    if not all(
        divides(x.shape, codes) for x, codes in zip(jax.tree.leaves(args), held, strict=True)
    ):
        return False  # the trace has other annotations then
    with warnings.catch_warnings(action="ignore", category=sbp.SbpWarning):
        traced = jitted.trace(*args)
    typing = written_onto(typing, traced.request)
    graph = traced.request.graph
    boundary = [
        (graph.aval(o).shape, codes) for o, codes in zip(graph.outputs, typing.outputs, strict=True)
    ]
    if not all(divides(shape, codes) for shape, codes in boundary):
        return False
    try:
        certify(typing)
    except sbp.SbpInternalError:
        return False
    return True


W = {"a": f32(16, 32), "b": f32(32, 4)}


TP = {"a": "model:S(1)", "b": "model:S(0)"}


mlp = lambda w, x: jnp.maximum(x @ w["a"], 0) @ w["b"]


def sized(jitted, *args) -> SizedReport:
    with warnings.catch_warnings(action="ignore", category=sbp.SbpWarning):
        report = jitted.check(*args)
    assert isinstance(report, SizedReport), report.text()
    return report


def check(fn, shapes, constraints, options, names="b"):
    jitted = sbp.jit(fn, MESH, **options)
    return jitted, sized(jitted, *shapes(*dims(names, *constraints)))


def agree(jitted, report, shapes, points):
    """The claimed condition against what happens, at each point."""
    there = lambda point: holds_there(jitted, report.program.typing, shapes(*point.values()))
    wrong = [point for point in points if report.sizes.holds_at(**point) != there(point)]
    assert not wrong, f"{report.sizes}\n{wrong}"
