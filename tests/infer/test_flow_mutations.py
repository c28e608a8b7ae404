"""Faults in the walk over a program's decisions are found without the walk: by the plan's verifier,
by the certificate, by the price of the plan's instructions, by the types that were asked, or since
the plan is dearer than the plan from the sound walk."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax import lax
from jax.sharding import AbstractMesh

import sbp
from sbp.errors import SbpInternalError
from sbp.infer import request as requests
from sbp.infer.certificate import certify
from sbp.infer.choose import choose
from sbp.infer.cost import row_seconds
from sbp.infer.flow import Edge, End, Flow, flow_of
from sbp.infer.request import Demand, Request
from sbp.infer.space import from_type
from sbp.machine.mesh import Hardware, mesh_spec
from sbp.plan.ir import Apply, Block, Box, Loop
from sbp.plan.lower import lower
from sbp.plan.verify import verify
from sbp.trace.build import trace
from sbp.types import parse
from tests.hardware import SENDS_FREELY

MESH = AbstractMesh((4,), ("x",))
F32 = jnp.float32


def program(x: Any, w: Any, c: Any, flag: Any) -> Any:
    """A scan with constant, carry, slices and stacked results; a cond; a while; an annotation."""

    def step(carry: Any, row: Any) -> Any:
        out = jnp.tanh(carry @ w + row)
        return out * 0.5, out.sum(1)

    carried, stacked = lax.scan(step, c, x)
    chosen = lax.cond(flag, lambda a: a @ w, lambda a: a * 2.0, carried)
    last, _ = lax.while_loop(
        lambda s: s[1] < 3.0,
        lambda s: (jnp.sin(s[0]) + c, s[1] + s[0].sum()),
        (chosen, stacked[0, 0]),
    )
    return sbp.annotate(last, x=sbp.S(0)).T @ last, carried + last, stacked


def asked(hardware: Hardware | None) -> Request:
    shapes = [(6, 32, 64), (64, 64), (32, 64)]
    args = [jax.ShapeDtypeStruct(s, F32) for s in shapes] + [jax.ShapeDtypeStruct((), jnp.bool_)]
    spec = mesh_spec(MESH, hardware)
    graph, _ = trace(program, args)
    split = from_type(parse("x:S(1)"), spec)
    demand = Demand(inputs=(split, None, None, None), outputs=(None, None, None), tied=((1, 2),))
    return Request(graph=graph, mesh=spec, demand=demand)


def price(request: Request, block: Block, runs: float = 1.0) -> float:
    """Modelled seconds of a plan, from its instructions alone."""
    total = 0.0
    for i in block.instructions:
        match i:
            case Box(steps=steps):
                total += runs * sum(s.seconds for s in steps)
            case Apply(node=node, row=row) if row.kernels:
                shares = request.memory_shares
                total += runs * row_seconds(request.graph, node, row, request.mesh, shares)
            case Loop(node=node, blocks=blocks, trips=trips):
                share = trips if node.op in ("scan", "while") else 1 / len(blocks)
                total += sum(price(request, inner, runs * share) for inner in blocks)
            case _:
                pass
    return total


def judged(request: Request) -> float:
    """The price of the chosen plan, in seconds.

    Raises:
      AssertionError: when the plan does not have the types that were asked, or its price is not the
        seconds of the typing.
      SbpInternalError: by the certificate and the verifier.
    """
    typing = choose(request)
    assert typing is not None
    certify(typing)
    block = lower(typing)
    verify(block, request.mesh)
    for output, entered in request.demand.tied:
        assert typing.outputs[output] == typing.values[request.graph.inputs[entered]]
    for node in request.graph.nodes:
        if node.op == "sbp_annotate":
            assert typing.values[node.outputs[0]] == (1,)
    found = price(request, block)
    assert typing.seconds == pytest.approx(found, rel=1e-6)
    return found


# ---- mutations ----------------------------------------------------------------------------------

Change = Callable[[Edge], Edge | None]


def edges(flow: Flow, change: Change) -> Flow:
    return dataclasses.replace(
        flow, edges=tuple(new for e in flow.edges if (new := change(e)) is not None)
    )


def without(test: Callable[[Edge], bool]) -> Callable[[Flow], Flow]:
    return lambda flow: edges(flow, lambda e: None if test(e) else e)


def altered(test: Callable[[Edge], bool], **fields: Any) -> Callable[[Flow], Flow]:
    return lambda flow: edges(flow, lambda e: dataclasses.replace(e, **fields) if test(e) else e)


def decided(test: Callable[[Any], bool], **fields: Any) -> Callable[[Flow], Flow]:
    return lambda flow: dataclasses.replace(
        flow,
        decisions=tuple(dataclasses.replace(d, **fields) if test(d) else d for d in flow.decisions),
    )


def untied(test: Callable[[Edge], bool]) -> Callable[[Flow], Flow]:
    """The first such edge ends at a decision of its own."""

    def mutate(flow: Flow) -> Flow:
        edge = next(e for e in flow.edges if test(e))
        own = dataclasses.replace(flow.decisions[edge.end.variable], makes=())
        end = End(len(flow.decisions), edge.end.column)
        new = dataclasses.replace(flow, decisions=(*flow.decisions, own))
        return edges(new, lambda e: dataclasses.replace(e, end=end) if e is edge else e)

    return mutate


def weighed(factor: float, test: Callable[[Flow, int], bool]) -> Callable[[Flow], Flow]:
    return lambda flow: dataclasses.replace(
        flow,
        weights={v: w * (factor if test(flow, v) else 1) for v, w in flow.weights.items()},
    )


def columns(kind: str) -> Callable[[Flow], Flow]:
    """Whole values of a kind are taken for slices."""

    def mutate(flow: Flow) -> Flow:
        if kind == "slice":
            return edges(
                flow,
                lambda e: (
                    dataclasses.replace(e, end=End(e.end.variable)) if _enters(e, "slice") else e
                ),
            )
        makers = {
            v: End(e.variable) if flow.decisions[e.variable].sliced else e
            for v, e in flow.makers.items()
        }
        return dataclasses.replace(flow, makers=makers)

    return mutate


def swapped(flow: Flow) -> Flow:
    """The makers of a carry and of a constant of one loop change places."""
    a, b = (next(e.entry for e in flow.edges if _enters(e, k)) for k in ("carry", "constant"))
    node = next(e.node for e in flow.edges if _enters(e, "carry"))
    assert node is not None and a is not None and b is not None
    inside = [node.regions[r].inputs[i] for r, i in (a.inputs[0], b.inputs[0])]
    makers = dict(flow.makers)
    makers[inside[0]], makers[inside[1]] = makers[inside[1]], makers[inside[0]]
    return dataclasses.replace(flow, makers=makers)


def _enters(e: Edge, kind: str) -> bool:
    return e.entry is not None and e.entry.kind == kind


def _leaves(e: Edge, kind: str) -> bool:
    return e.exit is not None and e.exit.kind == kind


MUTATIONS: dict[str, Callable[[Flow], Flow]] = {
    "an operand of products is not read": without(
        lambda e: e.node is not None and e.node.op == "dot_general" and e.number == 0
    ),
    "a constant is not read": without(lambda e: _enters(e, "constant")),
    "a carry does not enter": without(lambda e: _enters(e, "carry")),
    "a carry does not return": without(lambda e: _leaves(e, "carry")),
    "stacked results are not read": without(lambda e: _leaves(e, "stacked")),
    "results of branches are not read": without(lambda e: _leaves(e, "result")),
    "what is annotated is not read": without(lambda e: e.kind == "annotated"),
    "outputs are not read": without(lambda e: e.kind == "output"),
    "a returned carry has a type of its own": untied(lambda e: _leaves(e, "carry")),
    "a branch returns a type of its own": untied(lambda e: _leaves(e, "result")),
    "a tied output has a type of its own": untied(lambda e: e.kind == "output" and e.number == 1),
    "a slice is read as it is": columns("slice"),
    "stacked results are not stacked": columns("stacked"),
    "rows of loops run once": decided(lambda d: d.kind == "row" and d.in_loop, weight=1.0),
    "edges of loops weigh nothing": altered(
        lambda e: e.kind == "operand" and e.in_loop, weight=0.0
    ),
    "values are made once": weighed(1e-6, lambda flow, v: True),
    "an annotation is free": decided(lambda d: d.kind == "annotation", kind="value"),
    "the predicate is any value": decided(lambda d: d.kind == "predicate", kind="output"),
    "a region is not visited": lambda flow: dataclasses.replace(
        flow,
        decisions=tuple(d for d in flow.decisions if not (d.kind == "row" and d.in_loop)),
    ),
    "makers change places": swapped,
}


HARDWARE = (None, SENDS_FREELY)
"""Default hardware, on which the cheapest plan splits nothing, and hardware on which it splits
everything."""


def test_the_walk_itself_is_judged_right() -> None:
    for hardware in HARDWARE:
        assert judged(asked(hardware)) > 0


def outcome(hardware: Hardware | None, sound: float) -> str | type[Exception]:
    """What becomes of the program: "missed", "caught" by a verdict, or the error of a crash.

    Arguments:
      hardware: of the mesh.
      sound: the price of the plan from the sound walk, in seconds.
    """
    try:
        return "caught" if judged(asked(hardware)) > sound * (1 + 1e-9) else "missed"
    except (SbpInternalError, AssertionError):
        return "caught"
    except Exception as error:  # a crash
        return type(error)


@pytest.mark.parametrize("name", MUTATIONS)
def test_a_mutation_is_caught(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    want = [judged(asked(hardware)) for hardware in HARDWARE]
    mutate = MUTATIONS[name]
    monkeypatch.setattr(requests, "flow_of", lambda graph, ties=None: mutate(flow_of(graph, ties)))
    found = {outcome(hardware, sound) for hardware, sound in zip(HARDWARE, want, strict=True)}
    if name == "the predicate is any value":
        # No verdict catches it: the lowering looks for a type that is missing.
        assert found == {AttributeError}, "caught by a verdict now: test it as the others"
    else:
        assert found <= {"caught", "missed"} and "caught" in found, f"{name}: {found}"
