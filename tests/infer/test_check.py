"""Z3's verdicts against the chooser's on seeded programs, minimal cores, and certificates."""

import dataclasses
import itertools
import random
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec as P

import sbp
from sbp.infer import request as requests
from sbp.infer.check import Checker, check
from sbp.infer.choose import choose
from sbp.infer.cost import row_seconds
from sbp.infer.flow import Edge, End, Flow, flow_of
from sbp.infer.request import Demand, Request
from sbp.infer.rows import NdRow
from sbp.infer.space import from_type
from sbp.infer.typing import Typing, certify
from sbp.limits import Policy
from sbp.machine.mesh import Hardware, mesh_spec
from sbp.plan.ir import Apply, Block, Box, Loop, lower
from sbp.plan.verify import verify
from sbp.trace.build import trace
from sbp.trace.graph import trips_of
from tests.cases import shape
from tests.hardware import SENDS_FREELY

MESHES = {
    "8": jax.sharding.AbstractMesh((8,), ("x",)),
    "2x4": jax.sharding.AbstractMesh((2, 4), ("x", "y")),
}


def traced(fn, args, mesh, in_types=None, out_types=None, boxing: Policy = "auto") -> Request:
    """A program with the demands of type texts; None is free."""
    spec = mesh_spec(mesh)
    graph, _ = trace(fn, args, [f"arg{i}" for i in range(len(args))])

    def codes(texts, count):
        return tuple(
            None if t is None else from_type(sbp.parse(t), spec) for t in texts or (None,) * count
        )

    demand = Demand(
        inputs=codes(in_types, len(graph.inputs)), outputs=codes(out_types, len(graph.outputs))
    )
    return Request(graph=graph, mesh=spec, demand=demand, boxing=boxing)


def certified(request: Request) -> Typing:
    """The typing that is chosen, which has its certificate."""
    found = choose(request)
    assert found is not None
    certify(found)
    return found


# ---- the verdicts agree -------------------------------------------------------------------------


def pinned(rng: random.Random, x, axes):
    """`x` under a random annotation that its shape allows."""
    axis = rng.choice(axes)
    match rng.choice(["split", "split", "split", "replicate", "partial"]):
        case "split" if x.ndim:
            return sbp.split(x, rng.randrange(x.ndim), axis)
        case "partial":
            return sbp.partial(x, axis)
        case _:
            return sbp.replicate(x, axis)


OPERATORS = [
    *("dot", "dot", "add", "mul", "tanh", "transpose"),
    *("sum", "pin", "reshape", "scan", "cond", "while"),
]


def grow(rng: random.Random, x, y, axes):
    """A random program on two matrices: the operators that keep, contract, reduce and refuse."""
    values = [x, y]
    for _ in range(rng.randrange(2, 6)):
        a, b = rng.choice(values), rng.choice(values)
        match rng.choice(OPERATORS):
            case "dot" if a.ndim == b.ndim == 2 and a.shape[1] == b.shape[0]:
                values.append(a @ b)
            case "add" if a.shape == b.shape:
                values.append(a + b)
            case "mul" if a.shape == b.shape:
                values.append(a * b)
            case "tanh":
                values.append(jnp.tanh(a))
            case "transpose":
                values.append(a.T)
            case "sum" if a.ndim:
                values.append(a.sum(rng.randrange(a.ndim)))
            case "reshape" if a.ndim == 2:
                values.append(a.reshape(2, a.shape[0] // 2, a.shape[1]))
            case "scan" if a.ndim == 2:
                twist = rng.random() < 0.5
                c = values[-1].sum()

                inner = rng.random() < 0.5

                def body(carry, row, twist=twist, inner=inner):
                    row = sbp.split(row, 0, axes[-1]) if inner else row
                    return (carry + (row.sum() if twist else 1.0)), jnp.sin(row)

                carry, rows = jax.lax.scan(body, c, a)
                values += [carry, rows]
            case "cond":
                values.append(jax.lax.cond(b.sum() > 0, lambda v: v + v, lambda v: v * 2, a))
            case "while" if a.ndim == 2 and a.shape[0] == a.shape[1]:
                values.append(
                    jax.lax.while_loop(
                        lambda s: s[0] < 3, lambda s: (s[0] + 1, s[1] @ s[1].T), (0, a)
                    )[1]
                )
            case _:
                values.append(pinned(rng, a, axes))
    return tuple(values[2:])


def seeded(seed: int, mesh: str, boxing: Policy) -> Request:
    """The program of a seed, its inputs free or pinned."""
    rng = random.Random(f"{seed} {mesh}")
    axes = MESHES[mesh].axis_names
    size = rng.choice([8, 16])
    types = [
        rng.choice([None, " ".join(f"{a}:{rng.choice(['B', 'S(0)', 'S(1)'])}" for a in axes)])
        for _ in range(2)
    ]
    args = [shape(size, size)] * 2
    return traced(lambda x, y: grow(rng, x, y, axes), args, MESHES[mesh], types, boxing=boxing)


@pytest.mark.parametrize("mesh", sorted(MESHES))
@pytest.mark.parametrize("policy", ("auto", "reduce", "explicit"))
def test_verdict_is_the_choosers(policy, mesh):
    outcomes = {"sat": 0, "unsat": 0}
    for seed in range(60):
        request = seeded(seed, mesh, policy)
        found = check(request)
        typing = choose(request)
        assert (found.status == "sat") == (typing is not None), (seed, found)
        outcomes[found.status] += 1
        if typing is not None:
            certify(typing)
            own = Demand(
                inputs=tuple(typing.values[v] for v in typing.graph.inputs), outputs=typing.outputs
            )
            certify(dataclasses.replace(typing, request=dataclasses.replace(request, demand=own)))
    assert outcomes["sat"] >= 10 and (outcomes["unsat"] >= 5) == (policy != "auto")


# ---- cores --------------------------------------------------------------------------------------


@pytest.mark.parametrize("policy", ["reduce", "explicit"])
def test_core_is_minimal(policy):
    cores = 0
    for seed in range(25):
        checker = Checker(seeded(seed, "2x4", policy))
        found = checker.check()
        if found.status != "unsat":
            continue
        cores += 1
        axis = checker.axis(next(s for s in checker.systems if s.mesh_axis == found.mesh_axis))
        names = [c.name for c in found.core]
        assert axis.check(names)[0] == "unsat"
        assert {axis.check([n for n in names if n != name])[0] for name in names} == {"sat"}, seed
        assert found.policy and found.pins and found.sink
    assert cores >= 5


def test_core_names_pins_and_operands():
    def program(x, w, z):
        x = sbp.split(x, 1, "x")
        w = sbp.split(w, 1, "x")
        z = sbp.split(z, 0, "x")
        return x @ w, jnp.tanh(z)

    found = check(traced(program, [shape(16, 16)] * 3, MESHES["8"], boxing="explicit"))
    assert [c.because.text for c in found.core] == [
        "annotation is pinned S(1)",
        "annotation is pinned S(1)",
        'boxing is "explicit"',
        "operand 0 of dot_general",
        "operand 1 of dot_general",
    ]
    assert found.made == ((2,), (2,))
    first = program.__code__.co_firstlineno
    assert [c.because.span.line - first for c in found.pins if c.because.span] == [1, 2]


def scores(q, k):
    q = sbp.split(q, 1, "x")
    k = sbp.split(k, 3, "x")
    scores = jnp.einsum("bhqd,bhkd->bhqk", q, k)
    return jax.nn.softmax(scores, axis=-1)


def transposed(q, k):
    q = sbp.split(q, 1, "x")
    k = sbp.split(k, 3, "x")
    scores = q @ k.swapaxes(-1, -2) / 8
    return jax.nn.softmax(jnp.where(scores > 0, scores, -1e9), axis=-1)


def vocabulary(x, table):
    x = sbp.split(x, 0, "x")
    table = sbp.split(table, 1, "x")
    logits = x @ table.T
    return logits.max(-1)


@pytest.mark.parametrize("program", [scores, transposed, vocabulary])
def test_two_pins_are_blamed_where_they_meet(program):
    """One of the two pins alone is at fault below, where its partial result is read."""
    shapes = [shape(8, 8, 16, 64)] * 2 if program in (scores, transposed) else [shape(64, 64)] * 2
    found = check(traced(program, shapes, MESHES["8"], boxing="explicit"))
    assert len(found.pins) == 2
    spans = {c.node.span for c in found.sink if c.node}
    assert {s.line - program.__code__.co_firstlineno for s in spans if s} == {3}


def test_a_pin_that_is_alone_at_fault_is_blamed_alone():
    def program(x, w, v):
        hidden = sbp.split(x, 1, "x") @ w
        other = jnp.exp(hidden)
        return other @ sbp.split(v, 0, "x")

    found = check(traced(program, [shape(16, 16)] * 3, MESHES["8"], boxing="explicit"))
    assert len(found.pins) == 1 and [c.node.op for c in found.sink if c.node] == ["exp"]


# ---- a second look ------------------------------------------------------------------------------


def scanned(x, w):
    def body(carry, w):
        carry = jnp.tanh(carry @ w)
        return carry, carry.sum(0)

    carry, sums = jax.lax.scan(body, sbp.split(x, 0, "x"), w)
    return jax.lax.cond(sums.sum() > 0, lambda c: c * 2, lambda c: c, carry)


@pytest.fixture(scope="module")
def typing():
    args = [shape(16, 16), shape(3, 16, 16)]
    return certified(traced(scanned, args, MESHES["8"], [None, "B"], boxing="reduce"))


def first(typing, op):
    """The first operator of a kind."""
    return next(n for n in typing.graph.walk() if n.op == op)


def returned(typing):
    """The scan's key among the types that regions return, and these types."""
    ((key, types),) = [(k, t) for k, t in typing.region_outputs.items() if len(t) == 2]
    return key, types


WRONG = {
    "a row that is not there": (
        lambda t: {"rows": t.rows | {first(t, "dot_general").id: NdRow(((1,), (1,)), ((1,),))}},
        r"breaks a constraint .*dot_general",
    ),
    "a conversion that the policy forbids": (
        lambda t: {"rows": t.rows | {first(t, "tanh").id: NdRow(((0,),), ((0,),))}},
        r"operand 0 of tanh.*made as S\(0\) and read as B",
    ),
    "a broken pin": (
        lambda t: {"values": t.values | {first(t, "sbp_annotate").outputs[0]: (0,)}},
        r"annotation is pinned S\(0\) at .*test_check.py",
    ),
    "a broken pin of an input": (
        lambda t: {"values": t.values | {t.graph.inputs[1]: (2,)}},
        "input 1 is pinned",
    ),
    "a carry that changes its type": (
        lambda t: {"values": t.values | {first(t, "scan").regions[0].inputs[0]: (2,)}},
        r"scan|dot_general",
    ),
    "a stacked result of another type": (
        lambda t: {
            "region_outputs": t.region_outputs | {returned(t)[0]: (returned(t)[1][0], (5,))}
        },
        "stacked result 0 of scan",
    ),
}


@pytest.mark.parametrize("fault", WRONG)
def test_certify_refuses(typing, fault):
    change, message = WRONG[fault]
    with pytest.raises(sbp.SbpInternalError, match=message):
        certify(dataclasses.replace(typing, **change(typing)))


def test_certify_looks_at_all_axes_together():
    request = traced(
        lambda x: jnp.tanh(x), [shape(8, 8)], MESHES["2x4"], ["x:B y:S(1)"], boxing="explicit"
    )
    typing = certified(request)
    (node,) = request.graph.nodes
    wrong = dataclasses.replace(
        typing,
        request=dataclasses.replace(request, demand=Demand(inputs=((0, 2),), outputs=((2, 2),))),
        rows={node.id: dataclasses.replace(typing.rows[node.id], ins=((2, 2),), outs=((2, 2),))},
        values=typing.values | {node.outputs[0]: (2, 2)},
        outputs=((2, 2),),
    )
    with pytest.raises(sbp.SbpInternalError, match=r"made as \[0, 2\], read as \[2, 2\]"):
        certify(wrong)


# ---- flow mutations ------------------------------------------------------------------------------
# Faults in the walk over a program's decisions are found without the walk: by the plan's verifier,
# by the certificate, by the price of the plan's instructions, by the types that were asked, or
# since the plan is dearer than the plan from the sound walk.


def program(x, w, c, flag):
    """A scan with constant, carry, slices and stacked results; a cond; a while; an annotation."""

    def step(carry, row):
        out = jnp.tanh(carry @ w + row)
        return out * 0.5, out.sum(1)

    carried, stacked = jax.lax.scan(step, c, x)
    chosen = jax.lax.cond(flag, lambda a: a @ w, lambda a: a * 2.0, carried)
    last, _ = jax.lax.while_loop(
        lambda s: s[1] < 3.0,
        lambda s: (jnp.sin(s[0]) + c, s[1] + s[0].sum()),
        (chosen, stacked[0, 0]),
    )
    return sbp.annotate(last, x=sbp.S(0)).T @ last, carried + last, stacked


def asked(hardware: Hardware | None) -> Request:
    args = [jax.ShapeDtypeStruct(s, jnp.float32) for s in [(6, 32, 64), (64, 64), (32, 64)]] + [
        jax.ShapeDtypeStruct((), jnp.bool_)
    ]
    spec = mesh_spec(jax.sharding.AbstractMesh((4,), ("x",)), hardware)
    graph, _ = trace(program, args)
    split = from_type(sbp.parse("x:S(1)"), spec)
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
                total += runs * row_seconds(
                    request.graph, node, row, request.mesh, request.memory_shares
                )
            case Loop(node=node, blocks=blocks):
                share = trips_of(node) if node.op in ("scan", "while") else 1 / len(blocks)
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
    typing = certified(request)
    block = lower(typing)
    verify(block)
    assert all(
        typing.outputs[output] == typing.values[request.graph.inputs[entered]]
        for output, entered in request.demand.tied
    )
    assert all(
        typing.values[node.outputs[0]] == (1,)
        for node in request.graph.nodes
        if node.op == "sbp_annotate"
    )
    found = price(request, block)
    assert typing.seconds == pytest.approx(found, rel=1e-6)
    return found


# ---- mutations ----------------------------------------------------------------------------------


def edges(flow: Flow, change: Callable[[Edge], Edge | None]) -> Flow:
    return dataclasses.replace(
        flow, edges=tuple(new for e in flow.edges if (new := change(e)) is not None)
    )


def without(test: Callable[[Edge], bool]) -> Callable[[Flow], Flow]:
    return lambda flow: edges(flow, lambda e: None if test(e) else e)


def decided(test, **fields) -> Callable[[Flow], Flow]:
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


def swapped(flow: Flow) -> Flow:
    """The makers of a carry and of a constant of one loop change places."""
    a, b = (next(e.entry for e in flow.edges if _enters(e, k)) for k in ("carry", "constant"))
    node = next(e.node for e in flow.edges if _enters(e, "carry"))
    assert node is not None and a is not None and b is not None
    inside = [node.regions[r].inputs[i] for r, i in (a.inputs[0], b.inputs[0])]
    makers = dict(flow.makers)
    makers[inside[0]], makers[inside[1]] = makers[inside[1]], makers[inside[0]]
    return dataclasses.replace(flow, makers=makers)


_enters = lambda e, kind: e.entry is not None and e.entry.kind == kind


_leaves = lambda e, kind: e.exit is not None and e.exit.kind == kind


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
    "a slice is read as it is": lambda flow: edges(
        flow,
        lambda e: dataclasses.replace(e, end=End(e.end.variable)) if _enters(e, "slice") else e,
    ),
    "stacked results are not stacked": lambda flow: dataclasses.replace(
        flow,
        makers={
            v: End(e.variable) if flow.decisions[e.variable].sliced else e
            for v, e in flow.makers.items()
        },
    ),
    "rows of loops run once": decided(lambda d: d.kind == "row" and d.in_loop, weight=1.0),
    "edges of loops weigh nothing": lambda flow: edges(
        flow,
        lambda e: dataclasses.replace(e, weight=0.0) if e.kind == "operand" and e.in_loop else e,
    ),
    "values are made once": lambda flow: dataclasses.replace(
        flow, weights={v: 1e-6 * w for v, w in flow.weights.items()}
    ),
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
    assert all(judged(asked(hardware)) > 0 for hardware in HARDWARE)


def test_a_loop_whose_results_have_another_type_than_its_body_does_not_verify():
    fn = lambda x: jax.lax.while_loop(lambda c: c.sum() < 3, jnp.sin, x)
    f = sbp.jit(fn, AbstractMesh((4,), ("x",)), in_types="B")
    block = f.plan(shape(8)).program.block
    (loop,) = [i for i in block.instructions if isinstance(i, Loop)]
    outs = tuple(dataclasses.replace(o, codes=(1,)) for o in loop.outs)
    assert outs != loop.outs
    changed = [dataclasses.replace(i, outs=outs) if i is loop else i for i in block.instructions]
    with pytest.raises(sbp.SbpInternalError, match="types of the region do not agree"):
        verify(dataclasses.replace(block, instructions=tuple(changed)))


def outcome(hardware: Hardware | None, sound: float) -> str | type[Exception]:
    """What becomes of the program: "missed", "caught" by a verdict, or the error of a crash.

    Arguments:
      hardware: of the mesh.
      sound: the price of the plan from the sound walk, in seconds.
    """
    try:
        return "caught" if judged(asked(hardware)) > sound * (1 + 1e-9) else "missed"
    except (sbp.SbpInternalError, AssertionError):
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


# ---- types of shardings --------------------------------------------------------------------------
# Pins in JAX's words, against the slices that JAX gives each device, and refused shardings.

MESH = sbp.make_mesh((2, 4), ("x", "y"))
FLAT = Mesh(np.array(jax.devices()), ("all",))
CUBE = Mesh(np.array(jax.devices()).reshape(2, 2, 2), ("a", "b", "c"))
BACK = Mesh(np.array(jax.devices())[::-1].reshape(2, 4), ("x", "y"))
HALF = Mesh(np.array(jax.devices()[4:]), ("y",))
ACROSS = Mesh(np.array(jax.devices()).reshape(2, 4).T, ("p", "q"))
IDS = np.vectorize(lambda d: d.id)(MESH.devices)
X = jax.ShapeDtypeStruct((8, 16), jnp.float32)


def constrained(sharding, **options):
    """A value with a sharding, times 2: the plan's type of the pinned value."""
    fn = lambda x: jax.lax.with_sharding_constraint(x + 1, sharding) * 2
    plan = sbp.jit(fn, MESH, **options).plan(X)
    (node,) = [n for n in plan.program.graph.walk() if n.op == "sbp_annotate"]
    return plan, plan.program.typing.type_of(node.outputs[0])


def of_type(t, shape):
    """The slice on each device under a type on `MESH`: written out here, not taken from sbp."""
    found = {}
    for at in np.ndindex(2, 4):
        bounds = [[0, n] for n in shape]
        for axis, size, index in zip(("x", "y"), (2, 4), at, strict=True):
            atom = t.get(axis)
            if isinstance(atom, sbp.S):
                low, high = bounds[atom.dim]
                width = (high - low) // size
                bounds[atom.dim] = [low + index * width, low + (index + 1) * width]
        found[int(IDS[at])] = tuple(map(tuple, bounds))
    return found


SPECS = [
    (a, b)
    for a, b in itertools.product([None, "x", "y", ("x", "y")], repeat=2)
    if not set(np.ravel(a or ())) & set(np.ravel(b or ()))
]


@pytest.mark.parametrize(
    "sharding",
    [
        *(NamedSharding(MESH, P(*spec)) for spec in SPECS),
        NamedSharding(FLAT, P("all")),
        NamedSharding(FLAT, P(None, "all")),
        NamedSharding(CUBE, P("a", ("b", "c"))),
        NamedSharding(CUBE, P(None, ("b", "c"))),
        NamedSharding(ACROSS, P("q", "p")),
        NamedSharding(ACROSS, P(("q", "p"))),
        NamedSharding(
            Mesh(np.array(jax.devices()).reshape(2, 4).T.copy(), ("y", "x")), P("y", "x")
        ),
        NamedSharding(BACK, P()),
    ],
    ids=lambda s: f"{dict(s.mesh.shape)}{s.spec}",
)
def test_the_type_has_the_slices_of_the_sharding(sharding):
    _, t = constrained(sharding)
    assert of_type(t, X.shape) == {
        device.id: tuple(s.indices(n)[:2] for s, n in zip(index, X.shape, strict=True))
        for device, index in sharding.devices_indices_map(X.shape).items()
    }


def test_unreduced_is_partial():
    explicit = AbstractMesh((2, 4), ("x", "y"), axis_types=(AxisType.Explicit,) * 2)
    parts, rows = P(None, None, unreduced=frozenset({"x"})), P("x", None)

    def fn(x):
        x = jax.sharding.reshard(x, NamedSharding(explicit, parts))
        return jax.sharding.reshard(x, NamedSharding(explicit, rows))

    plan = sbp.jit(fn, MESH).plan(X)
    nodes = [n for n in plan.program.graph.walk() if n.op == "sbp_annotate"]
    types = [plan.program.typing.type_of(n.outputs[0]) for n in nodes]
    assert types == [sbp.parse("x:P(sum)"), sbp.parse("x:S(0)")]


def test_an_open_dim_may_be_split():
    """A dim that is left open may be split further, a dim of None may not."""
    pinned = lambda spec: constrained(NamedSharding(MESH, spec))[1]
    assert pinned(P("x", P.UNCONSTRAINED)) == sbp.parse("x:S(0) y:S(1)")
    assert pinned(P("x", None)) == sbp.parse("x:S(0)")


@pytest.mark.parametrize("boxing", ["auto", "explicit"])
def test_a_dim_of_none_is_whole(boxing):
    # Splits of dim 0 are free here, and those of dim 1 cost an all-to-all or are not allowed.
    sharding = NamedSharding(MESH, P(P.UNCONSTRAINED, None))
    _, t = constrained(sharding, in_types=("x:S(0) y:?",), boxing=boxing)
    assert sbp.S(1) not in (t.get("x"), t.get("y"))


def test_the_report_says_which_dim_is_whole():
    plan, _ = constrained(NamedSharding(MESH, P(P.UNCONSTRAINED, "y")))
    assert "y:S(1), no other split of dim 1" in str(plan.report())


@pytest.mark.parametrize(
    ("sharding", "code", "says"),
    [
        (NamedSharding(MESH, P(("y", "x"))), "bad-placement", "in the order of the mesh"),
        (NamedSharding(BACK, P("x")), "bad-placement", "no type on the mesh"),
        (
            NamedSharding(Mesh(np.array(jax.devices()).reshape(4, 2), ("y", "x")), P("y")),
            "bad-placement",
            "no type on the mesh",
        ),
        (NamedSharding(HALF, P("y")), "bad-placement", "no type on the mesh"),
        (NamedSharding(HALF, P()), "bad-placement", "no type on the mesh"),
        (NamedSharding(FLAT, P(P.UNCONSTRAINED, "all")), "bad-placement", "no type on the mesh"),
        (NamedSharding(CUBE, P(("c", "b", "a"))), "bad-placement", "no type on the mesh"),
        (
            NamedSharding(AbstractMesh((4, 2), ("x", "y")), P("x")),
            "bad-placement",
            "has 4 devices in the mesh of this sharding, and 2",
        ),
        (
            NamedSharding(AbstractMesh((2, 4), ("x", "z")), P("z")),
            "unknown-axis",
            "no axis 'z'",
        ),
    ],
)
def test_a_sharding_that_the_mesh_cannot_have_is_an_error_at_its_line(sharding, code, says):
    auto = (AxisType.Auto,) * len(sharding.mesh.axis_names)
    mesh = sharding.mesh
    if isinstance(mesh, AbstractMesh):
        mesh = AbstractMesh(mesh.axis_sizes, mesh.axis_names, axis_types=auto)
        sharding = NamedSharding(mesh, sharding.spec)
    (found,) = (
        sbp.jit(lambda x: jax.lax.with_sharding_constraint(x, sharding), MESH).check(X).diagnostics
    )
    assert found.code == code and says in found.title
    assert found.primary is not None and found.primary.span.file == __file__
    with pytest.raises(sbp.SbpError, match=code):
        constrained(sharding)
