"""Where an annotation that a help adds stands in the traced program."""

import jax
import jax.numpy as jnp

import sbp
from sbp.errors import SourceEdit
from sbp.explain.helps import Placement
from sbp.explain.pin_changes import rewrite
from sbp.source.editing import statement_span
from sbp.trace.graph import Dataflow

MESH = jax.sharding.AbstractMesh((2,), ("x",))


def scaled(a, x):
    return a * 0.5 + jnp.mean(x).astype(jnp.bfloat16)


def test_a_statement_starts_behind_what_makes_its_value():
    """Also in a program that was edited, whose nodes are copies."""
    a, x = jax.ShapeDtypeStruct((8,), jnp.bfloat16), jax.ShapeDtypeStruct((8,), jnp.bfloat16)
    graph = sbp.jit(scaled, MESH, hardware="cpu").trace(a, x).request.graph
    dataflow = Dataflow(graph)
    (line,) = {node.span for node in graph.nodes if node.op == "add"}
    assert line is not None
    statement = statement_span(line)
    assert statement is not None
    at = statement.__class__(
        file=line.file, line=statement.line, column=statement.column, end_column=statement.column
    )
    edit = SourceEdit(span=at, replacement="x = sbp.replicate(x, 'x')\n")
    starts = []
    for version in (graph, rewrite(graph)):
        placement = Placement(version, dataflow, line, edit)
        found = [
            placement.start(version.nodes, k, dataflow.maker(operand)).id
            for k, node in enumerate(version.nodes)
            for operand in node.inputs
            if isinstance(operand, int)
        ]
        starts.append(found)
    assert starts[0] == starts[1] and len(set(starts[0])) > 1
