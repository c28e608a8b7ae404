"""The cost model gives the published figures: GShard's figure 8 and table 4, Mesh-TensorFlow's
table 1.

The type of a pin in JAX's own words, against the slices that JAX itself gives each device; and
the errors of a sharding that the mesh cannot have."""

import dataclasses
import itertools
from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec as P

import sbp
from benchmarks.gshard.figure8 import FIGURE8_BANDS, figure8, figure8_ratios
from benchmarks.gshard.table4 import DEVICES, TABLE4, exponent, planned
from benchmarks.gshard_ref import Config, abstract_arguments
from benchmarks.mesh_tensorflow_table1 import TABLE1, kept_bytes, local_flops, plan_layout
from benchmarks.planning_speed import Case, step
from benchmarks.typing_speed import find_rows, traced
from sbp.infer.rows import RowTable
from sbp.signatures import Op, Rule, rule_for
from sbp.trace.graph import Graph
from tests.infer.test_check import shape, traced as request_of


def test_gshard_figure_8():
    found = figure8_ratios(figure8())
    outside = {
        name: value
        for name, value in found.items()
        if not FIGURE8_BANDS[name][0] <= value <= FIGURE8_BANDS[name][1]
    }
    assert not outside, found


def test_figure_8_tells_link_rates_apart():
    v3 = sbp.HARDWARE["tpu-v3"]
    found = figure8_ratios(
        figure8(dataclasses.replace(v3, link_bytes_per_second=2 * v3.link_bytes_per_second))
    )
    assert any(
        not FIGURE8_BANDS[name][0] <= value <= FIGURE8_BANDS[name][1]
        for name, value in found.items()
    ), found


@pytest.mark.parametrize("row", TABLE4, ids=lambda row: row.title)
def test_gshard_table_4(row):
    found = {d: planned(row, d) for d in DEVICES}
    for d, plan in found.items():
        assert plan.kinds <= row.kinds and bool(plan.kinds) == bool(row.kinds), plan
        assert plan.sent == pytest.approx(row.sent(d), rel=1e-9)
    if row.communication is not None:
        assert exponent(DEVICES, [p.communication for p in found.values()]) == pytest.approx(
            row.communication, abs=0.05
        )
    assert exponent(DEVICES, [p.compute for p in found.values()]) == pytest.approx(
        row.compute, abs=0.05
    )


@pytest.mark.parametrize("name", TABLE1)
def test_mesh_tensorflow_table_1(name):
    layout = TABLE1[name]
    plan = plan_layout(layout)
    assert plan.cost.bytes_per_device == layout.bytes_sent and local_flops(plan) == layout.flops
    assert kept_bytes(plan) == layout.kept_bytes
    # Temporaries are hidden activations and gradients before their reduction, up to three of each:
    # the table's three terms again.
    temporaries = plan.cost.peak_memory_bytes - layout.kept_bytes
    assert layout.hidden_bytes <= temporaries <= 3 * layout.hidden_bytes + 3 / 4 * layout.kept_bytes


@pytest.mark.parametrize("name", [name for name, layout in TABLE1.items() if layout.reduced])
def test_free_to_choose_sbp_sends_no_more(name):
    assert plan_layout(TABLE1[name], pinned=False).cost.seconds <= plan_layout(
        TABLE1[name]
    ).cost.seconds * (1 + 1e-9)


# ---- gshard step ---------------------------------------------------------------------------------
# The plan of GShard's step of 12 layers: the bytes it sends, the same work whatever the number of
# devices, and the same text every time. `benchmarks/planning_speed.py` measures the seconds.


def planned_step(cores: int) -> sbp.Plan:
    """The plan for as many experts as cores, from the paper's three annotations."""
    config = Config(layers=12, experts=cores, groups=cores)
    case = Case(axes=(("d", cores),), config=config, limit=0.0)
    return step(case).plan(*abstract_arguments(config))


@cache
def counted(cores: int) -> tuple[sbp.Plan, int]:
    """The plan, and how many times a rule was asked for its rows."""
    asked: list[str] = []

    def ask(name: str):
        asked.append(name)
        return rule_for(name)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("sbp.infer.rows.rule_for", ask)
        return planned_step(cores), len(asked)


def test_bytes_and_gap():
    """DESIGN's figure for an expert's program on 128 cores is 3,189 MiB."""
    plan, _ = counted(128)
    assert plan.program.typing.gap < 1e-3
    assert plan.cost.bytes_per_device / 2**20 == pytest.approx(2930.2, abs=0.5)


def test_the_work_does_not_grow_with_the_device_count():
    (small, few), (large, many) = counted(128), counted(1024)
    assert 0 < many <= few
    assert str(large).count("\n") <= 1.01 * str(small).count("\n")


def test_the_plan_is_the_same_bytes_every_time():
    assert str(planned_step(128)) == str(counted(128)[0])


# ---- rows ----------------------------------------------------------------------------------------
# The table of rows: operators with equal parameters share their rows, and rules are evaluated once
# for each kind of equation and mesh axis, however often the program repeats it.
# `benchmarks/typing_speed.py` measures seconds.


def test_equal_operators_share_rows_and_others_do_not():
    program = lambda x, w: (x @ w, (x + 1.0) @ (w + 1.0), jnp.tanh(x @ w), x * w)
    request = request_of(program, [shape(16, 16)] * 2, AbstractMesh((4,), ("x",)), [None, None])
    graph, fresh = request.graph, lambda: RowTable(request.mesh)
    first, second, *_ = [n for n in graph.nodes if n.op == "dot_general"]
    (mul,), table = [n for n in graph.nodes if n.op == "mul"], fresh()
    assert first.params is not second.params
    assert table.rows_in(graph, first, {}) is table.rows_in(graph, second, {})
    # Two operators that have one dictionary of parameters are two.
    add = next(n for n in graph.nodes if n.op == "add")
    product = dataclasses.replace(mul, params=add.params)
    table.rows_in(graph, dataclasses.replace(add, inputs=mul.inputs), {})
    assert table.rows_in(graph, product, {}) == fresh().rows_in(graph, mul, {})


# ---- evaluations of rules ------------------------------------------------------------------------


def evaluations(monkeypatch: pytest.MonkeyPatch, graph: Graph, sizes: tuple[int, ...]) -> int:
    """How many times a rule is asked for rows."""
    asked: list[Op] = []

    def counted(name: str) -> Rule | None:
        found = rule_for(name)
        if found is None:
            return None

        def ask(op: Op):
            asked.append(op)
            return found.rows(op)

        return dataclasses.replace(found, rows=ask)

    with monkeypatch.context() as patched:
        patched.setattr("sbp.infer.rows.rule_for", counted)
        find_rows(graph, sizes)
    return len(asked)


def nodes(graph: Graph) -> int:
    return sum(1 for _ in graph.walk())


@pytest.mark.parametrize("sizes", [(8,), (2, 4), (2, 2, 2)])
def test_layers_that_are_alike_share_their_rows(
    sizes: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
):
    few, many = traced(alike=True, layers=3), traced(alike=True, layers=16)
    assert nodes(many) > 2000
    found = evaluations(monkeypatch, many, sizes)
    assert 0 < found < nodes(many) and found == evaluations(monkeypatch, few, sizes)


@pytest.mark.parametrize("sizes", [(8,), (2, 4)])
def test_layers_of_their_own_widths_ask_less_often_than_they_have_nodes(
    sizes: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
):
    graph = traced(alike=False)
    assert 0 < evaluations(monkeypatch, graph, sizes) < nodes(graph)


# ---- shardings -----------------------------------------------------------------------------------

MESH = sbp.make_mesh((2, 4), ("x", "y"))
FLAT = Mesh(np.array(jax.devices()), ("all",))
CUBE = Mesh(np.array(jax.devices()).reshape(2, 2, 2), ("a", "b", "c"))
BACK = Mesh(np.array(jax.devices())[::-1].reshape(2, 4), ("x", "y"))
HALF = Mesh(np.array(jax.devices()[4:]), ("y",))
LAID = Mesh(np.array(jax.devices()).reshape(4, 2), ("y", "x"))
TURNED = Mesh(np.array(jax.devices()).reshape(2, 4).T.copy(), ("y", "x"))
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
        NamedSharding(TURNED, P("y", "x")),
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
        (NamedSharding(LAID, P("y")), "bad-placement", "no type on the mesh"),
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
    report = sbp.jit(lambda x: jax.lax.with_sharding_constraint(x, sharding), MESH).check(X)
    (found,) = report.diagnostics
    assert found.code == code and says in found.title
    assert found.primary is not None and found.primary.span.file == __file__
    with pytest.raises(sbp.SbpError, match=code):
        constrained(sharding)
