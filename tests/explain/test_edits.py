"""An edit of a pin changes only that pin. A help names a variable only if the variable has the
value on that line.

Other tests are about programs whose backward pass runs code of the user (rules of `custom_vjp`, and
forward operations that `jax.checkpoint` repeats), about the place of an annotation that a help
adds, and about the order of helps.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import sbp
from sbp.errors import Help, OptionEdit, SourceEdit
from sbp.explain.helps import Placement, RankedHelp, choose
from sbp.explain.pin_changes import carried_inputs, edits_of, rewrite, set_pins
from sbp.infer.constraints import pin_sites
from sbp.source.editing import statement_span
from sbp.trace.graph import Dataflow
from tests.edits import helped
from tests.explain.expected import MESH, MESH_2D, SQUARE


def pins(request):
    """The pins of the annotations of a program."""
    return [n.params["pin"] for n in request.graph.walk() if n.op == "sbp_annotate"]


@pytest.mark.parametrize(
    ("wanted", "left"),
    [
        ({0: None}, "tensor:S(1)"),
        ({0: 2}, "data:S(1) tensor:S(1)"),
    ],
)
def test_a_changed_pin_keeps_the_dtype_of_its_sums(wanted, left):
    def program(x):
        return sbp.annotate(x, data=sbp.S(0), tensor=sbp.S(1), reduce_dtype=jnp.float32) * 2

    request = sbp.jit(program, MESH_2D).trace(SQUARE).request
    (site,) = pin_sites(request)
    (pin,) = pins(set_pins(request, [(site, wanted)]))
    assert (repr(pin.type), pin.reduce_dtype) == (left, "float32")


def arriving(*spec, mesh=MESH):
    """An argument that arrives with a sharding."""
    sharding = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec(*spec))
    return jax.ShapeDtypeStruct(SQUARE.shape, SQUARE.dtype, sharding=sharding)


def product(x, w):
    return x @ w


def test_in_types_that_free_one_argument_name_the_types_of_the_others():
    """Without `in_types`, the sharding of each argument asks its type; with them, none does."""
    found = helped(product, MESH, (arriving("tensor"), arriving(None, "tensor")), boxing="explicit")
    helps = [h for d in found for h in d.helps if "in_types" in h.text]
    assert helps
    assert all(
        "and write the types of the other inputs there, too" in h.text
        and [e.position for e in h.edits if isinstance(e, OptionEdit)] == [0, 1]
        for h in helps
    )


def test_in_types_do_not_reach_keyword_arguments():
    f = sbp.jit(product, MESH, boxing="explicit")
    traced = f.trace(arriving("tensor"), w=arriving(None, "tensor")).request
    first, second = pin_sites(traced)
    assert traced.demand.sources == ("argument", "keyword argument")
    assert edits_of(traced, first, {0: None}) and carried_inputs(traced, first) == {}
    assert edits_of(traced, second, {0: None}) == ()


# ---- names that are bound again ------------------------------------------------------------------


def swapped(x, w):
    x, w = sbp.split(x, 1, "tensor"), sbp.split(w, 1, "tensor")
    x, w = w, x
    return w @ x


def another_array(x, w):
    x = sbp.split(x, 1, "tensor")
    h = x
    x = w
    return jax.nn.softmax(h) * x


def unpacked(*args):
    x, w = args
    x = sbp.partial(x, "tensor")
    v = x
    x = jnp.zeros(3)
    return jnp.linalg.norm(v) + x + w.sum()


def in_each_layer(x, w):
    for _ in range(2):
        h = sbp.partial(x, "tensor")
        y = h
        h = w
        x = jax.nn.softmax(y) + h
    return x


def operands_in_another_order(x, w):
    x = sbp.split(x, 0, "tensor")
    y = sbp.split(w, 1, "tensor")
    a = x
    x = w
    return jnp.where(a > 0, a, y) + x


def parameters_in_another_order(x, w):
    def inner(w, x):
        return jnp.einsum("ij,jk,kl->il", w, x, jnp.ones((1024, 1024)))

    x, w = sbp.split(x, 1, "tensor"), sbp.split(w, 1, "tensor")
    return inner(x, w)


def an_input_in_another_order(x, w):
    def inner(w, x):
        return jnp.einsum("ij,jk,kl->il", w, x, jnp.ones((1024, 1024)))

    return inner(x, w)


def an_input_rebound(x, w):
    y = x
    x = w
    return jax.nn.softmax(y) * x


def an_einsum_of_expressions(x, w):
    return jnp.einsum("ij,jk->ik", jnp.sin(x), w * 2.0)


PROGRAMS = [
    (swapped, "sbp.replicate(x,", None),
    (another_array, "sbp.replicate(x,", None),
    (unpacked, "sbp.replicate(x,", None),
    (in_each_layer, "sbp.replicate(h,", None),
    (operands_in_another_order, "sbp.split(a, 0", None),
    (parameters_in_another_order, "sbp.split(w, 0", None),
    (an_input_in_another_order, "sbp.split(w, 0", ("tensor:S(1)", "tensor:S(1)")),
    (an_input_rebound, "sbp.replicate(x,", ("tensor:S(1)", None)),
    (
        an_einsum_of_expressions,
        "sbp.replicate(jnp.sin(x),",
        ("tensor:S(0)", "tensor:S(1)"),
    ),
]
"""Programs, each with a help that would name another array, and its `in_types`."""


@pytest.mark.parametrize(
    ("program", "wrong", "in_types"), PROGRAMS, ids=[program.__name__ for program, *_ in PROGRAMS]
)
def test_helps_do_what_they_say_where_names_are_rebound(program, wrong, in_types):
    found = helped(program, MESH, (SQUARE, SQUARE), boxing="explicit", in_types=in_types)
    helps = [h.text for d in found for h in d.helps]
    assert helps and not any(wrong in text for text in helps), helps


def test_an_operand_is_named_as_its_line_reads_it():
    """`jnp.where(p, a, b)` has its operands in the order p, b, a."""
    (found,) = (
        sbp.jit(operands_in_another_order, MESH, boxing="explicit")
        .check(SQUARE, SQUARE)
        .diagnostics
    )
    assert "(a > 0, y, a ->" in found.rule
    assert 'sbp.split(y, 0, "tensor") before line' in " ".join(h.text for h in found.helps)


# ---- backward rules ------------------------------------------------------------------------------

GRID = sbp.make_mesh((2, 4), ("x", "y"))
X = np.ones((8, 8), np.float32)


@jax.custom_vjp
def sine(x):
    return jnp.sin(x)


def sine_backward(x, g):
    g = sbp.split(g, 0, "y")
    return (g * sbp.split(x, 1, "y"),)


sine.defvjp(lambda x: (sine(x), x), sine_backward)


def only_error(fn, *args):
    (found,) = sbp.jit(fn, GRID, boxing="explicit").check(*args).diagnostics
    return found


line_of = lambda fn, label: label.span.line - fn.__code__.co_firstlineno


def test_an_annotation_in_a_backward_rule_has_its_own_line():
    found = only_error(jax.grad(lambda x: sine(x).sum()), X)
    assert {line_of(sine_backward, label) for label in found.labels if not label.primary} == {1, 2}
    edited = {e.span.line for h in found.helps for e in h.edits if isinstance(e, SourceEdit)}
    assert edited and {line - sine_backward.__code__.co_firstlineno for line in edited} <= {1, 2}


@jax.checkpoint
def block(x, w):
    h = sbp.split(jnp.tanh(x @ w), 0, "y")
    return jnp.sin(h)


def pinned_cotangent(w, x):
    y = sbp.annotate(block(x, w), cotangent="y:S(1)")
    return (y * y).sum()


def test_a_recomputed_forward_value_is_no_cotangent():
    found = only_error(jax.grad(pinned_cotangent), X, X)
    assert any(r.remark.startswith("the cotangent fits, the result of its cos") for r in found.rows)
    assert "cotangent from line" not in found.text()


def test_a_value_that_only_the_backward_pass_computes_is_found_by_its_name():
    assert "why `h` is" in str(sbp.jit(jax.grad(pinned_cotangent), GRID).plan(X, X).why("h"))


# ---- where an annotation is added ----------------------------------------------------------------

PAIR = jax.sharding.AbstractMesh((2,), ("x",))


def scaled(a, x):
    return a * 0.5 + jnp.mean(x).astype(jnp.bfloat16)


def test_a_statement_starts_behind_what_makes_its_value():
    """Also in a program that was edited, whose nodes are copies."""
    a, x = jax.ShapeDtypeStruct((8,), jnp.bfloat16), jax.ShapeDtypeStruct((8,), jnp.bfloat16)
    graph = sbp.jit(scaled, PAIR, hardware="cpu").trace(a, x).request.graph
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
    for version in (graph, rewrite(graph, {}, {}, {})):
        placement = Placement(version, dataflow, line, edit)
        found = [
            placement.start(version.nodes, k, dataflow.maker(operand)).id
            for k, node in enumerate(version.nodes)
            for operand in node.inputs
            if isinstance(operand, int)
        ]
        starts.append(found)
    assert starts[0] == starts[1] and len(set(starts[0])) > 1


# ---- the order of helps --------------------------------------------------------------------------


def accepted(number, kind, bytes_, seconds=1.0):
    help_ = Help(
        text=f"{kind} {number}",
        edits=(),
        bytes_per_device=bytes_,
        peak_memory_bytes=None,
        clears_all_errors=True,
    )
    return RankedHelp(help_, kind, seconds)


CONVERSION = accepted(0, "conversion", 8.0)


@pytest.mark.parametrize(
    ("found", "order"),
    [
        # Another split that is no dearer than a conversion.
        ([CONVERSION, accepted(1, "pin", 8.0)], ["pin 1", "conversion 0"]),
        ([CONVERSION, accepted(1, "pin", 9.0)], ["conversion 0", "pin 1"]),
        # A pin whose split a conversion takes back.
        ([CONVERSION, accepted(1, "other pin", 8.0)], ["other pin 1", "conversion 0"]),
        # A cheaper plan is another one: a weight that is B sends nothing, and takes more memory.
        ([CONVERSION, accepted(1, "other pin", 0.0)], ["conversion 0", "other pin 1"]),
        ([CONVERSION, accepted(1, "other pin", 8.0, 2.0)], ["conversion 0", "other pin 1"]),
        # One help of each place.
        (
            [
                *(accepted(n, "conversion", float(n)) for n in range(3)),
                accepted(3, "policy", 0.0),
                accepted(4, "drop", 5.0),
            ],
            ["conversion 0", "drop 4", "policy 3"],
        ),
    ],
)
def test_helps_are_shown_in_order(found, order):
    assert [f.help.text for f in choose(found, 3)] == order
