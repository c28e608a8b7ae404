"""Symbolic sizes: what is claimed of all sizes is what happens at each, found by typing the program
there."""

import dataclasses
import itertools
import math
import warnings

import jax
import jax.numpy as jnp
import pytest
from jax import lax
from jax.export import SymbolicScope, symbolic_shape

import sbp
from sbp import _jax
from sbp.api.sized_report import SizedReport
from sbp.api.symbolic import SizedCall
from sbp.errors import SbpError, SbpInternalError, SbpWarning
from sbp.infer.certificate import certify
from sbp.infer.request import Request
from sbp.infer.typing import Typing
from sbp.signatures import registered
from sbp.sizes.conditions import points
from sbp.sizes.exploration import explore, numbers
from sbp.sizes.expressions import value_of
from sbp.sizes.scope import Fact, Scope

MESH = jax.sharding.AbstractMesh((2, 4), ("data", "model"))
F32 = jnp.float32


def f32(*shape):
    return jax.ShapeDtypeStruct(shape, F32)


def dims(text, *constraints):
    return symbolic_shape(text, constraints=constraints)


# ---- the oracle: the program traced with numbers, the typing written onto it, and certified -----


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
    """The same typing of another trace of the same program."""
    values, rows, returned = {}, {}, {}

    def visit(mine, theirs):
        values.update(zip(theirs.inputs, (typing.values[v] for v in mine.inputs), strict=True))
        assert [n.op for n in nodes_of(mine)] == [n.op for n in nodes_of(theirs)]
        for node, other in zip(nodes_of(mine), nodes_of(theirs), strict=True):
            rows[other.id] = typing.rows[node.id]
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
    with warnings.catch_warnings(action="ignore", category=SbpWarning):
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
    except SbpInternalError:
        return False
    return True


# ---- programs -----------------------------------------------------------------------------------

W = {"a": f32(16, 32), "b": f32(32, 4)}
TP = {"a": "model:S(1)", "b": "model:S(0)"}


def mlp(w, x):
    return jnp.maximum(x @ w["a"], 0) @ w["b"]


def training_step(w, x, y):
    def loss(w):
        return jnp.mean((mlp(w, x) - y) ** 2)

    value, grads = jax.value_and_grad(loss)(w)
    return jax.tree.map(lambda p, g: p - 0.1 * g, w, grads), value


def microbatches(w, x, y):
    def body(grads, batch):
        new, value = training_step(w, *batch)
        return jax.tree.map(jnp.add, grads, new), value

    return lax.scan(
        body, jax.tree.map(jnp.zeros_like, w), (x.reshape(4, -1, 16), y.reshape(4, -1, 4))
    )


def split_in_rows(x):
    return jnp.tanh(x.reshape(6, -1, 16)) * 2


def split_in_columns(x):
    return jnp.tanh(x.reshape(-1, 3, 16)).sum(1)


def merged(x):
    return sbp.split(jnp.tanh(x.reshape(-1, 16)), 0, "data") + 1


def joined(x, y):
    return sbp.split(jnp.concatenate([x, y]), 0, "data") * 2


def halves(x):
    n = x.shape[0] // 2
    return lax.slice_in_dim(x, 0, n) + lax.slice_in_dim(x, n, 2 * n)


def inner_split(x):
    return sbp.split(jnp.exp(x), 0, "data", "model").sum(0)


def shifted(x):
    return lax.slice_in_dim(sbp.split(x, 0, "data"), 1, x.shape[0]) * 2


def rolled(x):
    return jnp.cumsum(sbp.split(x, 0, "model"), axis=0)


def reversed_rows(x):
    return sbp.split(lax.rev(sbp.split(x, 0, "model"), (0,)), 0, "model")


def looked_up(table, tokens):
    return table[tokens] @ jnp.ones((16, 8))


def tokens_merged(x, w):
    b, s, _ = x.shape
    return (x.reshape(b * s, 16) @ w).reshape(b, s, 8)


def attention(x, w):
    q = sbp.split((x @ w).reshape(*x.shape[:2], 4, 4), 2, "model")
    scores = jax.nn.softmax(jnp.einsum("bqhd,bkhd->bhqk", q, q))
    return jnp.einsum("bhqk,bkhd->bqhd", scores, q)


def carried(x):
    def body(c, _):
        return jnp.sin(sbp.split(c, 0, "model")), c.sum()

    return lax.scan(body, x, None, length=3)


def i32(*shape):
    return jax.ShapeDtypeStruct(shape, jnp.int32)


def case(name, fn, shapes, *constraints, holds="every", **options):
    return pytest.param(fn, shapes, constraints, holds, options, id=name)


ONE = [
    case(
        "mlp",
        mlp,
        lambda b: (W, f32(b, 16)),
        in_types=(TP, "data:S(0)"),
        out_types="data:S(0)",
        holds="mod(b, 2) == 0",
    ),
    case("mlp-free", mlp, lambda b: (W, f32(b, 16)), holds="mod(b, 8) == 0"),
    case("mlp-eights", mlp, lambda b: (W, f32(8 * b, 16))),
    case("mlp-constraint", mlp, lambda b: (W, f32(b, 16)), "mod(b, 8) == 0", "b >= 16"),
    case(
        "mlp-both-axes",
        mlp,
        lambda b: (W, f32(b, 16)),
        "mod(b, 4) == 0",
        in_types=(None, "data:S(0) model:S(0)"),
        holds="mod(b, 8) == 0",
    ),
    case("mlp-odd", mlp, lambda b: (W, f32(2 * b + 1, 16)), in_types=(TP, "data:S(0)")),
    case(
        "step",
        training_step,
        lambda b: (W, f32(b, 16), f32(b, 4)),
        in_types=(TP, "data:S(0)", "data:S(0)"),
        holds="b >= 8 and mod(b, 2) == 0",
    ),
    case(
        "step-free",
        training_step,
        lambda b: (W, f32(8 * b, 16), f32(8 * b, 4)),
        donate_argnums=(0,),
    ),
    case(
        "microbatches",
        microbatches,
        lambda b: (W, f32(4 * b, 16), f32(4 * b, 4)),
        in_types=(TP, None, None),
    ),
    case("rows", split_in_rows, lambda b: (f32(6 * b, 16),), in_types=("data:S(0)",)),
    case(
        "columns",
        split_in_columns,
        lambda b: (f32(3 * b, 16),),
        in_types=("data:S(0)",),
        out_types="data:S(0)",
        holds="mod(b, 2) == 0",
    ),
    case(
        "columns-explicit",
        split_in_columns,
        lambda b: (f32(3 * b, 16),),
        in_types=("data:S(0)",),
        boxing="explicit",
        holds="mod(b, 8) == 0",
    ),
    case(
        "merged",
        merged,
        lambda b: (f32(b, 3, 16),),
        in_types=("data:S(0)",),
        holds="mod(b, 8) == 0",
    ),
    case(
        "joined",
        joined,
        lambda b: (f32(b, 8), f32(b + 3, 8)),
        in_types=("data:S(0)", None),
        holds="mod(b, 2) == 0",
    ),
    case(
        "halves",
        halves,
        lambda b: (f32(2 * b, 8),),
        in_types=("data:S(0)",),
        holds="mod(b, 2) == 0",
    ),
    case(
        "inner-split",
        inner_split,
        lambda b: (f32(b, 8),),
        in_types=("B",),
        out_types="B",
        holds="b >= 7",
    ),
    case(
        "shifted",
        shifted,
        lambda b: (f32(b + 1, 8),),
        in_types=("B",),
        out_types="B",
        holds="b >= 2",
    ),
    case(
        "rolled",
        rolled,
        lambda b: (f32(b, 8),),
        in_types=("model:S(0)",),
        out_types="B",
        holds="mod(b, 4) == 0",
    ),
    case(
        "reversed",
        reversed_rows,
        lambda b: (f32(b, 8),),
        in_types=("B",),
        out_types="B",
        holds="b >= 4",
    ),
    case(
        "looked-up",
        looked_up,
        lambda b: (f32(32, 16), i32(b)),
        in_types=("model:S(0)", "data:S(0)"),
        holds="mod(b, 8) == 0",
    ),
    case(
        "carried", carried, lambda b: (f32(b, 8),), in_types=("B",), out_types="B", holds="b >= 4"
    ),
]


def sized(jitted, *args) -> SizedReport:
    with warnings.catch_warnings(action="ignore", category=SbpWarning):
        report = jitted.check(*args)
    assert isinstance(report, SizedReport), report.text()
    return report


def check(fn, shapes, constraints, options, names="b"):
    jitted = sbp.jit(fn, MESH, **options)
    return jitted, sized(jitted, *shapes(*dims(names, *constraints)))


def agree(jitted, report, shapes, points):
    """The claimed condition against what happens, at each point."""
    wrong = []
    for point in points:
        claimed = report.sizes.holds_at(**point)
        if claimed != holds_there(jitted, report.program.typing, shapes(*point.values())):
            wrong.append((point, claimed))
    assert not wrong, f"{report.sizes}\n{wrong}"


@pytest.mark.parametrize("fn,shapes,constraints,holds,options", ONE)
def test_what_is_claimed_is_what_happens(fn, shapes, constraints, holds, options):
    jitted, report = check(fn, shapes, constraints, options)
    scope = Scope(("b",), constraints)
    agree(jitted, report, shapes, [{"b": b} for b in range(1, 65) if scope.allows({"b": b})])
    found = report.sizes
    if holds == "every":
        assert found.status == "every" and report.ok and found.counterexample is None
    else:
        assert (found.status, found.holds) == ("some", holds)
        (diagnostic,) = [d for d in report.diagnostics if d.code == "size-condition"]
        assert diagnostic.severity == "error" and not report.ok
        assert found.counterexample is not None and found.holds_at(**found.counterexample) is False
        assert all(found.holds_at(b=b) is not False for b in range(1, found.counterexample["b"]))


TWO = [
    case(
        "merged-and-back",
        tokens_merged,
        lambda b, s: (f32(b, s, 16), f32(16, 8)),
        in_types=("data:S(0)", "model:S(1)"),
        holds="mod(b, 2) == 0",
    ),
    case(
        "both-split",
        tokens_merged,
        lambda b, s: (f32(b, s, 16), f32(16, 8)),
        in_types=("data:S(0) model:S(1)", "B"),
        holds="mod(b, 8) == 0 and mod(s, 4) == 0",
    ),
    case(
        "attention",
        attention,
        lambda b, s: (f32(b, s, 16), f32(16, 16)),
        in_types=("data:S(0)", None),
        holds="mod(b, 2) == 0",
    ),
    case(
        "attention-fours",
        attention,
        lambda b, s: (f32(4 * b, s, 16), f32(16, 16)),
        in_types=("data:S(0)", None),
    ),
    case(
        "joined",
        joined,
        lambda b, s: (f32(b, 8), f32(s, 8)),
        "b >= s",
        in_types=("data:S(0)", None),
        holds="mod(b, 2) == 0 and mod(s, 2) == 0",
    ),
    case(
        "product",
        lambda x: jnp.tanh(x) * 2,
        lambda b, s: (f32(b * s, 16),),
        "mod(s, 8) == 0",
        in_types=("data:S(0) model:S(0)",),
    ),
]


@pytest.mark.parametrize("fn,shapes,constraints,holds,options", TWO)
def test_of_two_symbols(fn, shapes, constraints, holds, options):
    jitted, report = check(fn, shapes, constraints, options, "b, s")
    scope = Scope(("b", "s"), constraints)
    assert report.sizes.status == ("every" if holds == "every" else "some")
    assert holds in ("every", report.sizes.holds)
    points = (
        {"b": b, "s": s}
        for b, s in itertools.product((1, 2, 3, 4, 6, 8, 9, 16), (1, 2, 4, 5, 8, 12, 16))
    )
    agree(jitted, report, shapes, [p for p in points if scope.allows(p)])


def test_microbatches_of_any_number_and_size():
    m, k = dims("m, k", "mod(k, 8) == 0")

    def step(w, x):
        def body(total, part):
            return total + (sbp.split(part, 0, "data") @ w).sum(), None

        return lax.scan(body, 0.0, x.reshape(m, k, 16))[0]

    jitted = sbp.jit(step, MESH, in_types=("model:S(1)", "data:S(0)"))
    report = sized(jitted, f32(16, 32), f32(m * k, 16))
    assert (report.sizes.status, report.sizes.holds) == (
        "some",
        "m >= 2",
    )  # one microbatch: the scan's leading dim has size 1
    with pytest.raises(
        SbpError, match=r"symbolic-sizes: step needs concrete sizes, got the shape \(m, k, 16\)"
    ):
        jitted.plan(f32(16, 32), f32(16, 16))  # it closes over m and k


# ---- what cannot be shown is said ---------------------------------------------------------------


def test_what_z3_does_not_decide_is_not_claimed():
    def program(m, k):
        return sbp.jit(
            lambda x: sbp.split(x.reshape(k + m, m, 16), 0, "data") * 2,
            MESH,
            in_types=("B",),
            out_types="B",
        )

    m, k = dims("m, k")
    report = sized(program(m, k), f32(m * m + m * k, 16))
    assert report.program is not None
    found = report.sizes
    assert found.status == "open" and not report.ok
    (undecided,) = [d for d in report.diagnostics if d.code == "sizes-unproved"]
    assert undecided.notes == (
        (
            "not proved, since Z3 gives up: reshape on (k*m + m^2, 16) takes data:S(0) model:S(1)"
            " to data:S(0) model:S(2); tried at 512 small sizes: not so where k = 1 and m = 2"
        ),
    )
    answers = {True: 0, False: 0, None: 0}
    for m, k in itertools.product(range(1, 13), repeat=2):
        claimed = found.holds_at(m=m, k=k)
        answers[claimed] += 1
        if claimed is not None:
            assert claimed == holds_there(
                program(m, k), report.program.typing, (f32(m * m + m * k, 16),)
            ), (m, k)
    assert all(answers.values()), answers


def test_a_rule_that_wants_numbers_is_not_proved():
    named_p = _jax.Primitive("sized_test")
    named_p.def_abstract_eval(lambda x: x)
    _jax.mlir.register_lowering(named_p, lambda ctx, x: [x])
    rows = lambda op: (
        ["S(0) -> S(0)"] if op.ins[0].shape[0] in dict.fromkeys(range(0, 10**4, 8)) else []
    )
    with registered(named_p, rows, samples=[(named_p.bind, (f32(8, 2),))]):
        (b,) = dims("b")
        f = sbp.jit(
            named_p.bind, MESH, in_types=("data:S(0)",), out_types="data:S(0)", boxing="explicit"
        )
        report = sized(f, f32(b, 4))
    (said,) = [d for d in report.diagnostics if d.code == "sizes-unproved"]
    assert (
        "there are more than 128 cases: sized_test on (b, 4) takes data:S(0) to data:S(0)"
        in said.notes[0]
    )
    assert "not so where b = 2" in said.notes[0] and report.sizes.holds_at(b=40) is True


def test_another_program_with_numbers_is_said():
    (b,) = dims("2*b + 1")
    report = sbp.jit(lambda x: sbp.split(x, 0, "data")[1:] * 2, MESH, in_types=("B",)).check(
        f32(b, 8)
    )
    (said,) = [d for d in report.diagnostics if d.code == "sizes-unproved"]
    assert said.notes == (
        "the first difference: gather with symbols, slice with numbers where b = 40",
    )


def test_a_type_error_says_at_which_sizes():
    (b,) = dims("8*b")
    report = sbp.jit(
        lambda x: jnp.tanh(sbp.partial(x, "data")), MESH, in_types=("data:S(0)",), boxing="explicit"
    ).check(f32(b, 8))
    assert not report.ok and report.program is None
    assert all(
        d.notes[-1] == "symbolic sizes: this is where b = 40; other sizes were not tried"
        for d in report.diagnostics
    )


def test_plans_and_calls_want_numbers():
    (b,) = dims("8*b")
    f = sbp.jit(lambda x: x * 2, MESH)
    for use in (f.plan, f, f.trace):
        with pytest.raises(
            SbpError,
            match=(
                r"symbolic-sizes: .* needs concrete sizes, got the shape \(8\*b, 4\); give numbers"
            ),
        ) as error:
            use(f32(b, 4))
        assert error.value.code == "symbolic-sizes"
    assert f.check(f32(b, 4)).ok
    assert f.plan(f32(24, 4)).cost.bytes_per_device == 0


@pytest.mark.parametrize(
    "shapes,message",
    [
        (lambda: (f32(*dims("b, 4")), f32(*dims("b, 4"))), "different scopes"),
        (lambda: (f32(*dims("b, 4", "b >= 5", "b <= 4")),) * 2, "no sizes meet the constraints"),
    ],
    ids=["scopes", "empty"],
)
def test_sizes_that_do_not_fit_together(shapes, message):
    try:
        args = shapes()
    except ValueError:
        return  # this JAX sees itself that the scope is empty
    report = sbp.jit(lambda x, y: (x * 2, y), MESH).check(*args)
    (said,) = report.diagnostics
    assert said.code == "symbolic-sizes" and message in said.title


def test_python_that_asks_a_size():
    (b,) = dims("b")
    report = sbp.jit(lambda x: x * 2 if x.shape[0] > 5 else x, MESH).check(f32(b, 4))
    (said,) = report.diagnostics
    assert (
        said.code == "symbolic-sizes"
        and "'b' > '5' is inconclusive" in said.title
        and "add a constraint" in said.title
    )
    assert said.primary is not None and said.primary.span.file == __file__
    (b,) = dims("b", "b >= 6")
    assert sbp.jit(lambda x: x * 2 if x.shape[0] > 5 else x, MESH).check(f32(8 * b, 4)).ok


def test_one_scope_for_several_inputs():
    scope = SymbolicScope(["b >= 2", "mod(b, 8) == 0"])
    (x,), (y,) = symbolic_shape("b", scope=scope), symbolic_shape("2*b", scope=scope)
    f = sbp.jit(
        lambda x, y: (x.sum(), jnp.tanh(y)), MESH, in_types=("data:S(0)", "data:S(0) model:S(0)")
    )
    report = sized(f, f32(x), f32(y))
    assert report.sizes.status == "every" and report.sizes.asked == "b >= 2 and mod(b, 8) == 0"
    assert report.sizes.holds_at(b=8) is True and report.sizes.holds_at(b=4) is None


def test_the_report_shows_the_sizes():
    (b,) = dims("b")
    f = sbp.jit(mlp, MESH, in_types=(TP, "data:S(0)"), out_types="data:S(0)", memory_limit=1e9)
    report = sized(f, W, f32(b, 16))
    text = report.text()
    for line in (
        "  asked for         every b >= 1; other sizes are not covered",
        "  typing holds for  mod(b, 2) == 0",
        "  planned at        b = 40; bytes, memory and time are of these sizes",
        "  memory limit      met where b = 40; not decided for other sizes",
        (
            "  error[size-condition]: the typing does not hold for every b >= 1; it holds where"
            " mod(b, 2) == 0"
        ),
        (
            "    = note: where b = 1, this is not so: input x of shape (b, 16) divides evenly under"
            " data:S(0)"
        ),
    ):
        assert line in text.split("\n"), text
    assert 'constraints=["mod(b, 2) == 0"]: the typing holds for all of these' in text
    assert "mod(b, 2) == 0" in report.html() and "typing holds for" in str(report.short())
    (b,) = dims("b", "mod(b, 2) == 0")  # the help
    assert sized(f, W, f32(b, 16)).sizes.status == "every"


# ---- facts and Z3 -------------------------------------------------------------------------------


def test_z3_counts_as_python_does():
    texts = (
        "- floordiv(- b, 2)",
        "mod(b - 9, 4)",
        "floordiv(b - 9, s)",
        "mod(7 - b, s)",
        "max(b, 2*s) - min(b, s)",
        "b^2*s - 3",
        "floordiv(3, b)",
    )
    scope = Scope(("b", "s"), ())
    for text, b, s in itertools.product(texts, range(1, 12), range(1, 6)):
        fact = Fact(text, "==", str(value_of(text, {"b": b, "s": s})).replace("-", "- "))
        there = scope.narrowed([Fact("b", "==", str(b)), Fact("s", "==", str(s))])
        assert there.always((fact,)), (text, b, s)
        assert not there.always((fact.opposite,))


def test_exploration_is_exact():
    b, s = dims("b, s")
    cases = [
        lambda lift: lift(b) % 3 == 1 or lift(s) * 2 > lift(b),
        lambda lift: math.prod([lift(b), 4]) % 16 == 0 and max(lift(b), lift(s)) > 5,
        lambda lift: -(-lift(b) // 4) >= 2 and bool(lift(s) - 1),
        lambda lift: [6, 7][lift(b) % 2] < lift(s),
        lambda lift: lift(b) in (3, 5, 8),
    ]
    for predicate in cases:
        found = explore(predicate, Scope(("b", "s"), ("s <= 30",)), {"b": 16, "s": 5})
        assert not found.open
        for b_, s_ in itertools.product(range(1, 40), range(1, 30)):
            point = {"b": b_, "s": s_}
            assert found.holds_at(point) == bool(predicate(numbers(point)))


def test_what_wants_numbers_is_not_explored():
    (b,) = dims("b")
    found = explore(lambda lift: hash(lift(b)) % 8 == 0, Scope(("b",), ()), {"b": 16})
    assert (
        "more than 128 cases" in found.open
        and found.holds_at({"b": 16}) is True
        and found.holds_at({"b": 10**6}) is None
    )
    found = explore(lambda lift: isinstance(lift(b), int), Scope(("b",), ()), {"b": 16})
    assert (
        found.open == "its answer on numbers is another one" and found.holds_at({"b": 16}) is True
    )


def moved_rows(x):
    return sbp.split(sbp.split(x, 0, "data").reshape(-1, 3, 16) * 2, 0, "data")


@pytest.mark.parametrize(
    "boxing,holds",
    [
        ("auto", "b >= 2"),
        ({"data": "explicit"}, "mod(b, 2) == 0"),
        ({"model": "explicit"}, "b >= 2"),
    ],
    ids=str,
)
def test_policies_of_axes_are_kept(boxing, holds):
    """A reshape whose rows do not divide moves elements, where the policy of the axis lets it."""
    shapes = lambda b: (f32(3 * b, 16),)
    jitted, report = check(
        moved_rows, shapes, (), {"in_types": ("B",), "out_types": "B", "boxing": boxing}
    )
    assert (report.sizes.status, report.sizes.holds) == ("some", holds)
    agree(jitted, report, shapes, [{"b": b} for b in range(1, 33)])


def test_budgets_are_of_the_sizes_that_are_planned():
    (b,) = dims("8*b")
    report = sized(
        sbp.jit(mlp, MESH, budgets=[sbp.forbid("all_gather", above=2**20)]), W, f32(b, 16)
    )
    assert (
        report.limits == ("budgets",)
        and "met where b = 40; not decided for other sizes" in report.text()
    )


def test_small_points_of_many_symbols_are_few():
    names = tuple(f"s{k}" for k in range(24))
    found = list(points(Scope(names, ("s0 == 1",)), 100))
    assert len(found) == len({tuple(p.values()) for p in found}) == 100
    assert found == sorted(found, key=lambda p: (max(p.values()), tuple(p.values())))


def test_a_copy_of_a_sized_call_is_traced_anew():
    """What one call traces is not what another one, at other sizes, decides."""
    (b,) = dims("8*b")
    signature, _ = sbp.jit(mlp, MESH)._reader.read((W, f32(b, 16)), {})
    call = SizedCall.of(signature, 8)
    copy = dataclasses.replace(call, point={"b": 3})
    call.trace(signature.call, signature.avals, signature.names)
    with pytest.raises(SbpInternalError, match="before it is traced"):
        copy.graph
    again, _ = copy.trace(signature.call, signature.avals, signature.names)
    assert again.aval(again.outputs[0]).shape == (24, 4) and copy.graph is not call.graph
