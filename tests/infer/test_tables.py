"""The cost model gives the published figures: GShard's figure 8 and table 4, Mesh-TensorFlow's
table 1."""

import dataclasses
import itertools
from collections.abc import Callable
from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
import pytest

import sbp
from benchmarks.gshard.figure8 import FIGURE8_BANDS, figure8, figure8_ratios
from benchmarks.gshard.table4 import DEVICES, TABLE4, exponent, planned
from benchmarks.gshard_ref import Config, abstract_arguments
from benchmarks.mesh_tensorflow_table1 import TABLE1, kept_bytes, local_flops, plan_layout
from benchmarks.planning_speed import Case, step
from benchmarks.typing_speed import find_rows, traced
from sbp.infer.flow import flow_of
from sbp.infer.request import native_partials
from sbp.infer.rows import RowTable
from sbp.infer.space import is_even
from sbp.infer.typing import Typing
from sbp.plan.ir import lower
from sbp.signatures import Op, Rule, rule_for
from tests.infer.test_check import price, shape, traced as request_of
from tests.slices import sliced


@pytest.mark.parametrize(("speed", "fits"), [(1, True), (2, False)], ids=["v3", "fast links"])
def test_gshard_figure_8(speed, fits):
    """All figures are in their bands; on links of twice the rate, some are not."""
    v3 = sbp.HARDWARE["tpu-v3"]
    found = figure8_ratios(
        figure8(dataclasses.replace(v3, link_bytes_per_second=speed * v3.link_bytes_per_second))
    )
    assert fits == all(
        FIGURE8_BANDS[name][0] <= value <= FIGURE8_BANDS[name][1] for name, value in found.items()
    ), found


@pytest.mark.parametrize("row", TABLE4, ids=lambda row: row.title)
def test_gshard_table_4(row):
    found = {d: planned(row, d) for d in DEVICES}
    assert not [
        plan
        for d, plan in found.items()
        if not plan.kinds <= row.kinds
        or bool(plan.kinds) != bool(row.kinds)
        or plan.sent != pytest.approx(row.sent(d), rel=1e-9)
    ]
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
    found = plan.cost.bytes_per_device, local_flops(plan), kept_bytes(plan)
    assert found == (layout.bytes_sent, layout.flops, layout.kept_bytes)
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


def asked_for_rows(run: Callable[[], Any]) -> tuple[Any, int]:
    """What a function returns, and how many times it asks a rule for rows."""
    asked: list[Op] = []

    def noted(name: str) -> Rule | None:
        found = rule_for(name)
        if found is None:
            return None
        ask = found.rows
        return dataclasses.replace(found, rows=lambda op: asked.append(op) or ask(op))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("sbp.infer.rows.rule_for", noted)
        return run(), len(asked)


counted = cache(lambda cores: asked_for_rows(lambda: planned_step(cores)))


def test_bytes_and_gap():
    """DESIGN's figure for an expert's program on 128 cores is 3,189 MiB."""
    plan, _ = counted(128)
    assert plan.program.typing.gap < 1e-3
    assert plan.cost.bytes_per_device / 2**20 == pytest.approx(2930.2, abs=0.5)


def test_the_work_does_not_grow_with_the_device_count():
    (small, few), (large, many) = counted(128), counted(1024)
    assert 0 < many <= few and str(large).count("\n") <= 1.01 * str(small).count("\n")


def test_the_plan_is_the_same_bytes_every_time():
    assert str(planned_step(128)) == str(counted(128)[0])


# ---- rows ----------------------------------------------------------------------------------------
# The table of rows: operators with equal parameters share their rows, and rules are evaluated once
# for each kind of equation and mesh axis, however often the program repeats it.
# `benchmarks/typing_speed.py` measures seconds.


def test_equal_operators_share_rows_and_others_do_not():
    program = lambda x, w: (
        x @ w,
        (x + 1.0) @ (w + 1.0),
        jnp.tanh(x @ w),
        x * w,
        x.sum(0),
        x.sum(1),
    )
    request = request_of(
        program, [shape(16, 16)] * 2, jax.sharding.AbstractMesh((4,), ("x",)), [None, None]
    )
    graph, fresh = request.graph, lambda: RowTable(request.mesh)
    first, second, *_ = [n for n in graph.nodes if n.op == "dot_general"]
    (mul,), table = [n for n in graph.nodes if n.op == "mul"], fresh()
    assert first.params is not second.params
    assert table.rows_in(graph, first, {}) is table.rows_in(graph, second, {})
    rows, columns = [n for n in graph.nodes if n.op == "reduce_sum"]
    assert table.rows_in(graph, rows, {}) != table.rows_in(graph, columns, {})
    # Two operators that have one dictionary of parameters are two.
    add = next(n for n in graph.nodes if n.op == "add")
    product = dataclasses.replace(mul, params=add.params)
    table.rows_in(graph, dataclasses.replace(add, inputs=mul.inputs), {})
    assert table.rows_in(graph, product, {}) == fresh().rows_in(graph, mul, {})


# ---- evaluations of rules ------------------------------------------------------------------------


evaluations = lambda graph, sizes: asked_for_rows(lambda: find_rows(graph, sizes))[1]


nodes = lambda graph: sum(1 for _ in graph.walk())


@pytest.mark.parametrize("sizes", [(8,), (2, 4), (2, 2, 2)])
def test_layers_that_are_alike_share_their_rows(sizes: tuple[int, ...]):
    few, many = traced(alike=True, layers=3), traced(alike=True, layers=16)
    assert nodes(many) > 2000
    found = evaluations(many, sizes)
    assert 0 < found < nodes(many) and found == evaluations(few, sizes)


@pytest.mark.parametrize("sizes", [(8,), (2, 4)])
def test_layers_of_their_own_widths_ask_less_often_than_they_have_nodes(sizes: tuple[int, ...]):
    graph = traced(alike=False)
    assert 0 < evaluations(graph, sizes) < nodes(graph)


# ---- the optimum of small programs ---------------------------------------------------------------
# The chooser against brute force over all typings of small programs, each priced from its plan.


pytestmark = pytest.mark.laws


PROGRAMS = {
    "chain": (lambda u, v, w: (u @ v) @ w, ((8, 64), (64, 8), (8, 16))),
    "forked": (lambda x, w: (lambda h: (jnp.tanh(h), h * 2.0))(x @ w), ((16, 8), (8, 16))),
    "normed": (lambda x: x / jnp.sqrt((x * x).sum()), ((8, 12),)),
    "joined": (lambda a, b: (a + b.T).sum(0), ((8, 16), (16, 8))),
    "tall": (lambda x, w: (x @ w).max(1), ((32, 8), (8, 16))),
}


def typings(typing: Typing, table: RowTable):
    """All typings of a program without regions, on one mesh axis."""
    graph, mesh = typing.graph, typing.mesh
    native = native_partials(flow_of(graph), table, {})
    (n,) = mesh.sizes

    def ends(aval):
        codes = [(0,), *((1 + d,) for d, size in enumerate(aval.shape) if size >= n)]
        return [c for c in codes if is_even(aval.shape, c, mesh.sizes)]

    def rows(node):
        ins, outs = [graph.aval(o) for o in node.inputs], [graph.avals[v] for v in node.outputs]
        return table.rows(
            node,
            False,
            ins,
            outs,
            tuple(
                native.get(o, frozenset()) if isinstance(o, int) else frozenset()
                for o in node.inputs
            ),
        )

    choices = [
        *(ends(graph.avals[v]) for v in graph.inputs),
        *(rows(n) for n in graph.nodes),
        *(ends(graph.aval(o)) for o in graph.outputs),
    ]
    chosen: Any
    for chosen in itertools.product(*choices):
        found = chosen[len(graph.inputs) : len(graph.inputs) + len(graph.nodes)]
        values = dict(zip(graph.inputs, chosen[: len(graph.inputs)], strict=True))
        for node, row in zip(graph.nodes, found, strict=True):
            values.update(zip(node.outputs, row.outs, strict=True))
        yield Typing(
            request=typing.request,
            graph=graph,
            values=values,
            rows={node.id: row for node, row in zip(graph.nodes, found, strict=True)},
            region_outputs={},
            outputs=tuple(chosen[len(graph.inputs) + len(graph.nodes) :]),
            seconds=0.0,
            lower_bound=0.0,
        )


@pytest.mark.parametrize(
    ("name", "hardware"),
    sliced(itertools.product(PROGRAMS, ("tpu-v5p", "cpu")), 1 / 2),
)
def test_no_typing_of_a_small_program_is_cheaper(name, hardware):
    fn, shapes = PROGRAMS[name]
    args = [jax.ShapeDtypeStruct(s, jnp.float32) for s in shapes]
    program = (
        sbp.jit(fn, jax.sharding.AbstractMesh((4,), ("d",)), hardware=hardware).plan(*args).program
    )
    assert program.typing.optimal
    every = [
        price(program.request, lower(typing))
        for typing in typings(program.typing, RowTable(program.mesh))
    ]
    assert len(every) > 50
    # Among equals a partial is carried on: `DEFERRAL` is the only thing the chooser adds to the
    # price.
    assert price(program.request, lower(program.typing)) <= min(every) + 1e-10
