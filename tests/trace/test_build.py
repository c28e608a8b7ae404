"""The graph of a function: which equations become nodes, which effects are refused, and calls of
newer releases of JAX."""

import gc
import subprocess
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jax.experimental.compute_on import compute_on
from jax.experimental.layout import Format, Layout
from jax.sharding import AxisType, NamedSharding, PartitionSpec

import sbp
from sbp.trace.build import trace
from sbp.trace.collectives import evaluate
from sbp.trace.graph import (
    YOUNG,
    Node,
    amount,
    collecting_less,
    interface_of,
    trips_of,
)
from tests.same import assert_close, checked_plan, refused
from tests.signatures.calls import primitives
from tests.trace.test_joins import graph_of

SHAPE = jax.ShapeDtypeStruct((8,), jnp.float32)


by_platform = lambda x: jax.lax.platform_dependent(x, cpu=jnp.sin, tpu=jnp.cos, default=jnp.tan)


@pytest.mark.parametrize(
    ("platform", "ops"),
    [("cpu", ["sin"]), ("tpu", ["cos"]), ("cuda", ["tan"]), (None, ["platform_index", "cond"])],
)
def test_only_the_branch_of_the_platform_is_traced(platform: str | None, ops: list[str]):
    graph, _ = trace(by_platform, [SHAPE], platform=platform)
    assert [n.op for n in graph.nodes if n.op not in ("clamp", "convert_element_type")] == ops


def test_the_platform_is_that_of_the_mesh():
    """`hardware=` says what is modelled; a mesh of devices runs on its own platform. The gradient
    and the mapped function have the branch too."""
    mesh = jax.make_mesh((8,), ("x",))
    x = jnp.arange(8.0)
    for fn, want in (
        (by_platform, jnp.sin(x)),
        (jax.grad(lambda x: by_platform(x).sum()), jnp.cos(x)),
        (jax.vmap(by_platform), jnp.sin(x)),
    ):
        np.testing.assert_allclose(sbp.jit(fn, mesh, hardware="tpu-v5e")(x), want, rtol=1e-6)
    abstract = jax.sharding.AbstractMesh((8,), ("x",))
    nodes = sbp.jit(by_platform, abstract, hardware="tpu-v5e").plan(SHAPE).program.graph.nodes
    assert [n.op for n in nodes] == ["cos"]


# ---- effects -------------------------------------------------------------------------------------


MESH = sbp.make_mesh((2,), ("x",))
VALUES = np.arange(8, dtype=np.float32)


def test_a_ref_from_outside_is_refused():
    ref = jax.new_ref(jnp.zeros(8))
    refused(
        r"^unsupported-effect: .*closes over a Ref", sbp.jit(lambda x: x + ref[...], MESH), VALUES
    )
    refused("input ref is a Ref", sbp.jit(lambda ref: ref[...], MESH), ref, kind=TypeError)


@pytest.mark.filterwarnings("ignore:missing-rule")
def test_a_ref_of_the_program_is_kept():
    def fn(x: Any) -> Any:
        ref = jax.new_ref(x)
        ref[...] = ref[...] * 2
        return ref[...]

    np.testing.assert_array_equal(sbp.jit(fn, MESH)(VALUES), 2 * VALUES)


def test_tokens_are_refused():
    error = refused(
        r"create_token at .* makes a token",
        sbp.jit(lambda x: lax.after_all(lax.create_token()), MESH),
        VALUES,
    )
    assert error.code == "unsupported-effect" and error.span is not None


def test_an_equation_that_evaluates_a_jaxpr_is_a_call():
    """Releases of JAX name its parameter differently."""
    closed = jax.make_jaxpr(lambda x: [jnp.sin(x) * 2])(VALUES)

    def fn(x: Any) -> Any:
        evaluating = primitives()["eval_jaxpr"]
        try:
            return evaluating.bind(x, jaxpr=closed)[0]
        except TypeError:  # a newer release
            return evaluating.bind(x, call_jaxpr=closed)[0]

    np.testing.assert_allclose(sbp.jit(fn, MESH)(VALUES), 2 * np.sin(VALUES), rtol=1e-6)


# ---- collector -----------------------------------------------------------------------------------
# The collector's thresholds are as they were once nobody plans any more.


@pytest.fixture
def thresholds():
    before = gc.get_threshold()
    gc.set_threshold(700, 11, 12)
    yield (700, 11, 12)
    gc.set_threshold(*before)


def test_what_was_comes_back_after_an_error_inside(thresholds):
    with pytest.raises(ZeroDivisionError), collecting_less(), collecting_less():
        assert gc.get_threshold() == (YOUNG, 11, 12)
        _ = 1 / 0
    assert gc.get_threshold() == thresholds


@pytest.mark.parametrize("own", [(0, 10, 10), (200_000, 10, 10)])
def test_a_collector_that_is_off_or_comes_less_often_stays_as_it_is(own, thresholds):
    gc.set_threshold(*own)
    with collecting_less():
        assert gc.get_threshold() == own
    assert gc.get_threshold() == own


# ---- places --------------------------------------------------------------------------------------
# What a program asks for in JAX's own words: a sharding is a pin at the user's line, and only
# where the user wrote it. Devices, layouts and kinds of memory give one warning a line.


ABSTRACT = jax.sharding.AbstractMesh((2, 4), ("x", "y"))
AUTO = jax.sharding.AbstractMesh((2, 4), ("x", "y"), axis_types=(AxisType.Auto,) * 2)
EXPLICIT = jax.sharding.AbstractMesh((2, 4), ("x", "y"), axis_types=(AxisType.Explicit,) * 2)
ROWS = NamedSharding(AUTO, PartitionSpec("x"))
CONCRETE_ROWS = NamedSharding(sbp.make_mesh((2, 4), ("x", "y")), PartitionSpec("x"))
COLUMNS = NamedSharding(AUTO, PartitionSpec(None, "y"))
OPEN = PartitionSpec.UNCONSTRAINED
HOST = ROWS.with_memory_kind("pinned_host")
MATRIX = jax.ShapeDtypeStruct((8, 4), jnp.float32)
constrain = lax.with_sharding_constraint


def pinned(fn, where):
    """The line and type of each pin of a program, and the code and line of each warning; lines are
    counted from a function's own."""
    first = where.__code__.co_firstlineno
    with warnings.catch_warnings(record=True, action="always") as caught:
        plan = sbp.jit(fn, ABSTRACT, hardware="tpu-v5e").plan(MATRIX)
    pins = [
        (node.stack[0].line - first, repr(node.params["pin"].type))
        for node in plan.program.graph.walk()
        if node.op == "sbp_annotate"
    ]
    warned = [
        (d.code, d.primary.span.line - first)
        for d in plan.report().diagnostics
        if d.code.startswith("ignored") and d.primary
    ]
    assert [str(w.message).split(":")[0] for w in caught] == [code for code, _ in warned]
    assert all(w.category is sbp.SbpWarning for w in caught)
    return pins, warned


CONSTRAINT, MEMORY = "ignored-constraint", "ignored-memory"


def sine(x):
    return constrain(jnp.sin(x), ROWS)


def square(x):
    return constrain(x * x, ROWS)


def row(x):
    return constrain(jnp.sin(x), NamedSharding(AUTO, PartitionSpec(None)))


looped = lambda turn: lambda x: lax.scan(lambda c, _: (turn(c), None), x, None, length=3)[0]


total = lambda fn: lambda x: fn(x).sum()


def of_a_gradient(x):
    g = jax.grad(lambda x: jnp.sin(x).sum())(x)
    return constrain(g, ROWS)


def many_times(x):
    for _ in range(3):
        x = constrain(jnp.sin(x), ROWS)
    return x


def two_lines(x):
    x = constrain(jnp.sin(x), ROWS)
    return constrain(jnp.cos(x), ROWS)


def put_on_a_device(x):
    return jax.device_put(jnp.sin(x), jax.devices()[0])


def inner_jit(x):
    return jax.jit(jnp.sin, out_shardings=ROWS)(x)


def in_a_layout(x):
    return jax.device_put(jnp.sin(x), Format(Layout((1, 0)), CONCRETE_ROWS))


def with_memory_kind(x):
    return constrain(jnp.sin(x), HOST)


def offloaded(x):
    block = jax.checkpoint(
        lambda x: jnp.sin(checkpoint_name(jnp.sin(x), "a")),
        policy=jax.checkpoint_policies.save_and_offload_only_these_names(
            names_which_can_be_saved=[],
            names_which_can_be_offloaded=["a"],
            offload_src="device",
            offload_dst="pinned_host",
        ),
    )
    return jax.value_and_grad(lambda x: block(x).sum())(x)


@jax.custom_vjp
def own_sine(x):
    return jnp.sin(x)


own_sine.defvjp(lambda x: (own_sine(x), x), lambda x, g: (constrain(g * jnp.cos(x), ROWS),))


def in_a_backward_rule(x):
    return jax.grad(lambda x: own_sine(x).sum())(x)


@pytest.mark.parametrize(
    ("fn", "where", "pins", "warned"),
    [
        (lambda x: constrain(jnp.sin(x), ROWS), None, [(0, "x:S(0)")], []),
        (jax.value_and_grad(total(sine)), sine, [(1, "x:S(0)")], []),
        (jax.grad(total(lambda x: jnp.sin(square(x)))), square, [(1, "x:S(0)")], []),
        (looped(sine), sine, [(1, "x:S(0)")], []),
        (jax.grad(total(looped(sine))), sine, [(1, "x:S(0)")], []),
        # The gradient needs no value of the constraint, so JAX drops it. JAX reshards the cotangent
        # of the sum, on no line of the user.
        (looped(jax.grad(total(sine))), sine, [], []),
        # The forward pass and its recomputation.
        (
            jax.value_and_grad(total(jax.checkpoint(lambda x: jnp.sin(sine(x))))),
            sine,
            [(1, "x:S(0)")] * 2,
            [],
        ),
        (
            jax.grad(total(looped(jax.checkpoint(lambda x: jnp.sin(sine(x)))))),
            sine,
            [(1, "x:S(0)")] * 2,
            [],
        ),
        (jax.vmap(row), row, [(1, "B")], []),
        (
            lambda x: constrain(jnp.sin(x), NamedSharding(AUTO, PartitionSpec("x", OPEN))),
            None,
            [(0, "x:S(0)")],
            [],
        ),
        (of_a_gradient, None, [(2, "x:S(0)")], []),
        # An equation of the user's backward rule has the line of the rule.
        (in_a_backward_rule, None, [(-3, "x:S(0)")], []),
        (many_times, None, [(2, "x:S(0)")] * 3, []),
        (two_lines, None, [(1, "x:S(0)"), (2, "x:S(0)")], []),
        (
            lambda x: constrain({"a": x * 2, "b": x * 3}, {"a": ROWS, "b": COLUMNS}),
            None,
            [(0, "x:S(0)"), (0, "y:S(1)")],
            [],
        ),
        (lambda x: jax.device_put(jnp.sin(x), ROWS), None, [(0, "x:S(0)")], []),
        (put_on_a_device, None, [], [(CONSTRAINT, 1)]),
        (
            lambda x: jax.sharding.reshard(jnp.sin(x), NamedSharding(EXPLICIT, PartitionSpec("x"))),
            None,
            [(0, "x:S(0)")],
            [],
        ),
        (inner_jit, None, [(1, "x:S(0)")], []),
        (
            lambda x: (
                jax.device_put(
                    jax.device_put(jnp.sin(x), jax.memory.Space.Host), jax.memory.Space.Device
                )
                + 1
            ),
            None,
            [],
            [],
        ),
        # The value is in device memory: this asks for what holds.
        (lambda x: jax.device_put(jnp.sin(x), jax.memory.Space.Device) * 2, None, [], []),
        (in_a_layout, None, [(1, "x:S(0)")], [(CONSTRAINT, 1)]),
        (with_memory_kind, None, [(1, "x:S(0)")], [(MEMORY, 1)]),
        (offloaded, None, [], []),
        (
            lambda x: jax.device_put(jnp.sin(x), ROWS.with_memory_kind("unpinned_host")) + 1,
            None,
            [(0, "x:S(0)")],
            [(MEMORY, 0)],
        ),
        (
            lambda x: jax.jit(jnp.sin, out_shardings=HOST)(x) + 1,
            None,
            [(0, "x:S(0)")],
            [(MEMORY, 0)],
        ),
    ],
    ids=lambda v: getattr(v, "__name__", ""),
)
def test_what_the_user_wrote_is_a_pin_or_a_warning(fn, where, pins, warned):
    assert pinned(fn, where or fn) == (pins, warned)


def test_what_jax_adds_is_no_pin():
    def constants(x):
        return x + jnp.asarray(np.ones((8, 4))) + jax.device_put(jnp.float32(1)) + jnp.zeros((8, 4))

    with jax.set_mesh(jax.make_mesh((2, 4), ("x", "y"))):
        assert pinned(constants, constants) == ([], [])


@pytest.mark.parametrize(
    ("fn", "call"),
    [
        (lambda x: jnp.array(x * 2, device=CONCRETE_ROWS), "device= of array"),
        (lambda x: jnp.asarray(x * 2, device=CONCRETE_ROWS), "device= of asarray"),
        (lambda x: x + jnp.asarray(np.ones((8, 4)), device=CONCRETE_ROWS), "device= of asarray"),
        (lambda x: x[:, 0] + jnp.arange(8.0, device=CONCRETE_ROWS), "device= of arange"),
        (lambda x: (x * 2).to_device(CONCRETE_ROWS), "device= of to_device"),
        (lambda x: jax.device_put(x * 2, ROWS), "device_put"),
        (lambda x: constrain(x * 2, ROWS), "with_sharding_constraint"),
        (inner_jit, "in_shardings or out_shardings of jax.jit"),
    ],
)
def test_a_pin_names_what_the_user_wrote(fn, call):
    nodes = sbp.jit(fn, ABSTRACT, hardware="tpu-v5e").plan(MATRIX).program.graph.walk()
    assert {n.params["pin"].asked_by for n in nodes if n.op == "sbp_annotate"} == {call}


def on_the_host(x):
    with compute_on("device_host"):
        return x * 2


@pytest.mark.parametrize(
    ("fn", "said"),
    [
        (put_on_a_device, "ignored-constraint: device_put"),
        (in_a_layout, "ignored-constraint: the layout of device_put"),
        (with_memory_kind, "ignored-memory: with_sharding_constraint to pinned_host memory"),
        pytest.param(
            on_the_host,
            r'ignored-constraint: compute_on\("device_host"\)',
            marks=pytest.mark.skipif(
                jax.__version_info__ >= (0, 11), reason="compute_on is a primitive"
            ),
        ),
    ],
)
def test_a_warning_names_what_the_user_wrote(fn, said):
    with pytest.warns(sbp.SbpWarning, match=f"^{said} at .* has no effect"):
        sbp.jit(fn, ABSTRACT, hardware="tpu-v5e").plan(MATRIX)


# ---- regions -------------------------------------------------------------------------------------
# What enters and leaves the regions of loops and branches, which compute what JAX computes.


TALL = jnp.arange(12.0).reshape(4, 3) / 7
Y = jnp.arange(8.0).reshape(4, 2) - 3


def _two_of_each(a: Any, b: Any, p: Any, q: Any, xs: Any, ys: Any) -> Any:
    """Constants `a`, `b`; carries of different shapes, swapped roles; two stacked results."""

    def step(carry: Any, x: Any) -> Any:
        (u, v), (row, pair) = carry, x
        return (u * a + row, v + pair.sum() - b), (u - row, v * b)

    return lax.scan(step, (p, q), (xs, ys))


def _nested(a: Any, xs: Any) -> Any:
    def outer(c: Any, row: Any) -> Any:
        inner, ys = lax.scan(lambda d, x: (d + x * a, d), c, row)
        return inner, ys

    return lax.scan(outer, jnp.float32(2), xs)


def _while(limit: Any, add: Any, scale: Any, i: Any, x: Any) -> Any:
    """One constant of the predicate, two of the body, two carries."""
    return lax.while_loop(
        lambda c: c[0] < limit, lambda c: (c[0] + add, c[1] * scale - c[0]), (i, x)
    )


def _branches(k: Any, x: Any, y: Any) -> Any:
    return lax.switch(
        k,
        [lambda x, y: (x + y, x), lambda x, y: (x - y, y), lambda x, y: (x * y, x - 1)],
        x,
        y,
    )


F = jnp.float32
PROGRAMS: dict[str, tuple[Callable[..., Any], tuple[Any, ...]]] = {
    "two of each": (_two_of_each, (F(1.5), F(0.25), TALL[0], F(4), TALL, Y)),
    "reverse": (
        lambda p, xs: lax.scan(lambda c, x: (c * 0.5 + x, c), p, xs, reverse=True),
        (TALL[1], TALL),
    ),
    "carry only": (
        lambda a, p: lax.scan(lambda c, _: (c * a + 1, None), p, None, length=5)[0],
        (F(1.25), F(3)),
    ),
    "stacks only": (lambda a, xs: lax.scan(lambda c, x: (c, x + a), None, xs)[1], (F(2), TALL)),
    "nested": (_nested, (F(0.5), TALL)),
    "while": (_while, (F(9), F(2), F(1.5), F(0), F(3))),
    "while without constants": (
        lambda i: lax.while_loop(lambda c: c < 20, lambda c: c * 2 + 1, i),
        (jnp.int32(1),),
    ),
    "branch 0": (_branches, (jnp.int32(0), F(2), F(5))),
    "branch 2": (_branches, (jnp.int32(2), F(2), F(5))),
    "true": (
        lambda flag, x: lax.cond(flag, lambda x: x * 3, lambda x: -x, x),
        (jnp.bool_(True), F(2)),
    ),
    "false": (
        lambda flag, x: lax.cond(flag, lambda x: x * 3, lambda x: -x, x),
        (jnp.bool_(False), F(2)),
    ),
}


def node_of(name: str) -> Node:
    """The loop or branch of a program."""
    return next(n for n in graph_of(*PROGRAMS[name]).nodes if n.regions)


@pytest.mark.parametrize(("fn", "args"), PROGRAMS.values(), ids=PROGRAMS)
def test_loops_and_branches_compute_what_jax_computes(fn, args) -> None:
    """Evaluated, and planned and run on two devices."""
    planned = sbp.jit(fn, sbp.make_mesh((2,), ("x",)))
    for found in (evaluate(graph_of(fn, args), args), jax.tree.leaves(planned(*args))):
        assert_close([*found], jax.tree.leaves(fn(*args)), rtol=1e-6, atol=0)


@pytest.mark.parametrize("name", PROGRAMS)
def test_each_operand_input_output_and_result_is_named_once(name: str) -> None:
    for node in graph_of(*PROGRAMS[name]).walk():
        interface = interface_of(node)
        if not node.regions:
            assert not interface.entries and not interface.exits and not interface.fed
            continue
        assert [e.operand for e in interface.entries] == list(range(len(node.inputs)))
        for number, region in enumerate(node.regions):
            assert len(interface.fed[number]) == len(region.inputs)
            assert all(
                (number, position) in entry.inputs
                and (number, position) in interface.entries[entry.operand].inputs
                for position, entry in enumerate(interface.fed[number])
            )
            assert [e.output for e in interface.leaving(number)] == list(range(len(region.outputs)))
        assert {e.result for e in interface.exits} - {-1} == set(range(len(node.outputs)))
        assert all(
            interface.exit_to(result).result == result for result in range(len(node.outputs))
        )


def test_numbers_count_within_a_kind_and_carries_return_to_their_entry() -> None:
    interface = interface_of(node_of("while"))
    assert [(e.kind, e.number, e.decides) for e in interface.entries] == [
        ("constant", 0, True),
        ("constant", 1, False),
        ("constant", 2, False),
        ("carry", 0, False),
        ("carry", 1, False),
    ]
    assert [e.kind for e in interface.exits] == ["predicate", "carry", "carry"]
    assert all(
        left.entry is interface.entering("carry")[left.number]
        and [left.entry_position(k) - left.number for k in (0, 1)] == [1, 2]
        for left in interface.leaving(1)
    )


def test_an_amount_is_the_sum_over_trips_or_the_most_of_any_branch() -> None:
    assert amount(node_of("reverse"), [3.0]) == 4 * 3
    assert amount(node_of("while"), [1.0, 2.0]) == trips_of(node_of("while")) * 3
    assert amount(node_of("branch 0"), [1.0, 5.0, 2.0]) == 5


# ---- batched -------------------------------------------------------------------------------------
# What only `jax.vmap` makes: a `while` whose predicate depends on the mapped values, and
# collectives over the mapped axis.


def doubled(x: Any) -> Any:
    """Doubles until 10 is passed; the number of trips is the second result."""
    return lax.while_loop(lambda c: c[0] < 10, lambda c: (c[0] * 2, c[1] + 1), (x, 0))


def bounded(x: Any, bound: Any) -> Any:
    """Predicate and body read a value from outside of the loop, and the carry is a matrix."""
    return lax.while_loop(lambda c: jnp.sum(c) < bound, lambda c: c + bound * jnp.eye(2), x)


def drawn(key: Any) -> Any:
    """Draws until a number is above 0.5; the carry has a key."""
    draw = lambda c: (jax.random.split(c[0])[0], jax.random.uniform(c[0]))
    return lax.while_loop(lambda c: c[1] < 0.5, draw, (key, 0.0))[1]


STARTS = np.arange(1, 9, dtype=np.float32)

LOOPS: dict[str, tuple[Callable[..., Any], tuple[Any, ...]]] = {
    "trips": (jax.vmap(doubled), (STARTS,)),
    "two batches": (jax.vmap(jax.vmap(doubled)), (STARTS.reshape(8, 1) + STARTS[:3],)),
    "values from outside": (jax.vmap(bounded), (np.ones((8, 2, 2), np.float32), 3 * STARTS)),
    "one value from outside": (
        lambda x, b: jax.vmap(lambda y: bounded(y, b[0]))(x),
        (np.ones((8, 2, 2), np.float32) * STARTS[:, None, None], 3 * STARTS),
    ),
    "uneven": (lambda x: jax.vmap(doubled)(x[:7]), (STARTS,)),
    "keys": (
        lambda seeds: jax.vmap(lambda s: drawn(jax.random.key(s)))(seeds),
        (np.arange(8, dtype=np.uint32),),
    ),
    "in a scan": (
        lambda x: lax.scan(lambda c, _: (jax.vmap(doubled)(c)[0] / 3, None), x, length=3)[0],
        (STARTS,),
    ),
}


@pytest.mark.parametrize("axes", [(2,), (8,), (2, 4)], ids=str)
@pytest.mark.parametrize(("fn", "args"), LOOPS.values(), ids=LOOPS)
def test_equals_one_device(fn, args, axes: tuple[int, ...]) -> None:
    mesh = jax.make_mesh(axes, ("x", "y")[: len(axes)])
    for in_types in (None, tuple(sbp.NdSbp({"x": sbp.S(0)}) for _ in args)):
        found = sbp.jit(fn, mesh, in_types=in_types)(*args)
        jax.tree.map(np.testing.assert_array_equal, found, jax.jit(fn)(*args))


def test_the_loop_keeps_the_line_and_has_one_predicate() -> None:
    graph, _ = trace(jax.vmap(doubled), [jax.ShapeDtypeStruct((8,), jnp.float32)])
    (loop,) = (n for n in graph.nodes if n.op == "while")
    assert loop.span is not None and loop.span.function == "doubled"
    cond, body = loop.regions
    assert [graph.avals[v].shape for v in cond.outputs if isinstance(v, int)] == [()]
    doubling = next(n for n in body.nodes if n.op == "mul")
    assert doubling.span is not None and doubling.span.file == __file__


def test_devices_agree_on_one_bit_a_trip() -> None:
    """With the batch split, nothing else is sent."""
    mesh = jax.make_mesh((8,), ("x",))
    f = sbp.jit(jax.vmap(doubled), mesh, in_types=("x:S(0)",), out_types=("x:S(0)", "x:S(0)"))
    assert 0 < f.plan(jax.ShapeDtypeStruct((2**24,), jnp.float32)).cost.bytes_per_device < 1024


over_batch = lambda fn, axis="batch": jax.vmap(fn, axis_name=axis)


BATCH = np.arange(7 * 8, dtype=np.float32).reshape(8, 7) / 8
COLLECTIVES: dict[str, Callable[..., Any]] = {
    "sum": over_batch(lambda row: row - lax.psum(row, "batch")),
    "mean of scalars": over_batch(lambda row: row - lax.pmean(jnp.mean(row), "batch")),
    "several": over_batch(lambda row: lax.psum((row, row.sum(), 2), "batch")),
    "extremes": over_batch(lambda row: lax.pmax(row, "batch") - lax.pmin(row, "batch")),
    "a normalised gradient": jax.grad(
        lambda x: jnp.sum(over_batch(lambda row: row - lax.pmean(row, "batch"))(x) ** 3)
    ),
    "one of two": over_batch(over_batch(lambda x: x - lax.psum(x, "inner"), "inner")),
    "two": over_batch(over_batch(lambda x: x - lax.pmean(x, ("inner", "batch")), "inner")),
    "in a scan": lambda x: lax.scan(
        lambda c, _: (over_batch(lambda row: row - lax.pmean(row, "batch"))(c), None), x, length=2
    )[0],
}


@pytest.mark.parametrize("types", [None, "x:S(0)", "y:S(1)"])
@pytest.mark.parametrize("name", COLLECTIVES)
def test_collectives_over_the_mapped_axis(name: str, types: str | None) -> None:
    """Without a warning: the tests' settings make an error of one."""
    x = jnp.asarray(BATCH if types != "y:S(1)" else BATCH[:, :4])
    checked_plan(
        COLLECTIVES[name], jax.make_mesh((2, 4), ("x", "y")), x, rtol=1e-5, in_types=(types,)
    )


def test_a_mean_over_the_mapped_axis_gathers_nothing() -> None:
    norm = over_batch(lambda row: row - lax.pmean(row, "batch"))
    plan = sbp.jit(norm, jax.make_mesh((8,), ("x",)), "x:S(0)", "x:S(0)").plan(jnp.ones((64, 16)))
    assert plan.cost.bytes_per_device == 2 * 7 / 8 * 16 * 4


FROM_ABOVE = """
import sys; sys.path.insert(0, "..")
import jax, sbp
step = sbp.jit(lambda x: sbp.split(x, 0, "d") + 1, jax.sharding.AbstractMesh((2,), ("d",)))
print({n.span.file for n in step.trace(jax.ShapeDtypeStruct((4,), "float32")).request.graph.nodes})
"""


def test_sbp_that_is_imported_from_the_folder_above_is_not_the_users_code():
    """Notebooks of a checkout do that. The package then has the path `notebooks/../sbp`."""
    command, here = (sys.executable, "-c", FROM_ABOVE), Path(__file__).parents[1]
    run = subprocess.run(command, cwd=here, capture_output=True, text=True, check=True)
    assert run.stdout == "{'<string>'}\n"
