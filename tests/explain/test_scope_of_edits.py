"""A help describes everything that its edit changes: values of other ranks, other reads on the
line, other calls of a helper, and names that have another meaning there.
"""

from typing import Any

import jax
import jax.numpy as jnp
import pytest

import sbp
import sbp as s
from sbp.errors import OptionEdit, SourceEdit
from tests.edits import check_helps, helped
from tests.explain.expected import GRID, MESH, MESH_2D, shape
from tests.explain.test_limits import diagnosed

SQUARE, VECTOR = shape(16, 16), shape(16)


def sgd(params, gradients):
    return jax.tree.map(lambda p, g: p - 0.1 * g, params, gradients)


def sgd_of_two(bias, weight, bias_gradient, weight_gradient):
    return sgd({"b": bias, "w": weight}, {"b": bias_gradient, "w": weight_gradient})


def pins_in_a_loop(w, b, x):
    pinned = {k: sbp.split(v, 0, "tensor") for k, v in {"b": b, "w": w}.items()}
    return sbp.split(x, 0, "tensor") @ pinned["w"] + pinned["b"]


def shared_helper(x, w, b):
    def add(u, v):
        return u + v

    return add(sbp.split(x, 0, "tensor"), sbp.split(w, 1, "tensor")), add(b, b)


def read_through_a_view(x):
    x = sbp.split(x, 0, "tensor")
    return x + x.T


def read_in_a_helper(x):
    def turned(t):
        return t.T * 2

    x = sbp.split(x, 0, "tensor")
    return x + turned(x)


def results_of_one_line(x, w):
    return jnp.sin(sbp.split(x, 0, "tensor")) + jnp.cos(sbp.split(w, 1, "tensor").T).T


def product_before_the_read(h, a, v):
    h = sbp.split(jnp.sin(h), 0, "tensor")
    o = (a * 2.0) @ h + v
    return sbp.split(o, 1, "tensor") + sbp.split(a, 0, "tensor")


def carried_by_a_loop(x):
    for _ in range(3):
        x = sbp.split(x, 0, "tensor") + jnp.cos(x).T
    return x


def one_pin_for_all(x, w, z):
    def pin(t, dim, axis):
        t = sbp.split(t, dim, axis)
        return t

    a = jnp.sin(pin(x, 1, "tensor"))
    b = jnp.sin(pin(z, 1, "data")) + sbp.split(z * 2, 1, "tensor")
    return a + jnp.cos(sbp.split(w, 0, "tensor")), b


def alias_taken(x, w):
    def scaled(s, t):
        return s + t * 2

    return scaled(sbp.split(x, 0, "tensor"), s.split(w, 1, "tensor"))


@pytest.mark.parametrize(
    ("program", "mesh", "options", "args"),
    [
        (sgd_of_two, MESH, {"in_types": (None, "tensor:S(0)", None, "tensor:S(1)")}, "vmvm"),
        (pins_in_a_loop, MESH, {}, "mvm"),
        (shared_helper, MESH, {}, "mmv"),
        (read_through_a_view, MESH, {}, "m"),
        (read_in_a_helper, MESH, {}, "m"),
        (results_of_one_line, MESH, {}, "mm"),
        (product_before_the_read, MESH, {}, "mmv"),
        (carried_by_a_loop, MESH, {}, "m"),
        (one_pin_for_all, MESH_2D, {}, "mmm"),
        (alias_taken, MESH, {}, "mm"),
    ],
    ids=lambda v: getattr(v, "__name__", ""),
)
def test_helps_do_what_they_say(program, mesh, options: dict[str, Any], args):
    options = options | {"boxing": "explicit"}
    args = tuple(SQUARE if a == "m" else VECTOR for a in args)
    found = sbp.jit(program, mesh, **options).check(*args).diagnostics
    errors = [d for d in found if d.severity == "error"]
    assert errors and all(d.helps for d in errors)
    check_helps(program, mesh, options, args, errors)


def in_a_lambda(x, w):
    x, w = sbp.split(x, 1, "tensor"), sbp.split(w, 1, "tensor")
    return jax.tree.map(lambda row: jnp.exp(row @ w), [x, x + 1.0])


def in_a_mapped_lambda(x, w):
    x, w = sbp.split(x, 1, "tensor"), sbp.split(w, 1, "tensor")
    return jax.lax.map(lambda row: row[None] @ w, x)


def in_a_list(x, w):
    x, w = sbp.split(x, 1, "tensor"), sbp.split(w, 1, "tensor")
    return [jnp.exp(part @ w) for part in (x + 1.0,)]


def in_a_function_of_one_line(x, w):
    x, w = sbp.split(x, 1, "tensor"), sbp.split(w, 1, "tensor")

    def inner(row): return jnp.exp(row @ w)  # fmt: skip

    return inner(x)


def in_a_statement(x, w):
    x, w = sbp.split(x, 1, "tensor"), sbp.split(w, 1, "tensor")
    return jnp.exp(x @ w)


@pytest.mark.parametrize(
    "program,where",
    [
        (in_a_lambda, "row at"),
        (in_a_mapped_lambda, "row at"),
        (in_a_list, "part at"),
        (in_a_function_of_one_line, "row at"),
        (in_a_statement, "x before"),
    ],
    ids=lambda v: getattr(v, "__name__", ""),
)
def test_a_help_says_before_a_line_only_where_its_names_stand_there(program, where):
    texts = [
        h.text for d in helped(program, MESH, (SQUARE, SQUARE), boxing="explicit") for h in d.helps
    ]
    name, place = where.split()
    (first,) = dict.fromkeys(
        t for t in texts if t.startswith((f"sbp.replicate({name}", f"sbp.split({name}"))
    )
    assert f") {place} line " in first, texts


def test_a_local_variable_named_as_the_package_is_not_called():
    found = sbp.jit(alias_taken, MESH, boxing="explicit").check(SQUARE, SQUARE).diagnostics
    edits = [e for d in found for h in d.helps for e in h.edits if isinstance(e, SourceEdit)]
    assert edits and all(e.span.line != alias_taken.__code__.co_firstlineno + 2 for e in edits)


@pytest.mark.filterwarnings("ignore:.*does not divide:sbp.SbpWarning")
def test_an_uneven_type_of_an_input_is_changed_in_in_types():
    def program(x):
        return jnp.cumsum(x, 0)

    args = (shape(15, 16),)
    options: dict[str, Any] = {"boxing": "explicit", "in_types": ("tensor:S(0)",)}
    found = sbp.jit(program, MESH, **options).check(*args).diagnostics
    assert any("leave x free" in h.text for d in found for h in d.helps)
    check_helps(program, MESH, options, args, [d for d in found if d.severity == "error"])


# ---- pins on several mesh axes together ----------------------------------------------------------
# Helps for pins that have a typing on each mesh axis, but not on all axes together.
# Helps that change pins: to another kind of atom, in all layers, two at once; and their dims in
# the user's line, where a library or `jax.vmap` moves them.


EXPLICIT: dict[str, Any] = {"boxing": "explicit"}


def two_conflicts(x, z):
    a = jnp.tanh(sbp.annotate(x, data=sbp.B, model=sbp.S(0)))
    b = jnp.tanh(sbp.annotate(x, data=sbp.S(0), model=sbp.B))
    c = jnp.tanh(sbp.annotate(z, data=sbp.B, model=sbp.S(0)))
    d = jnp.tanh(sbp.annotate(z, data=sbp.S(0), model=sbp.B))
    return a + b, c * d


def error_of(program, options, count):
    (error,) = helped(program, GRID, (SQUARE,) * count, **options)
    assert "on the mesh axes `data`, `model` together" in error.title
    return error


def test_two_pins_are_dropped_where_no_one_pin_helps():
    error = error_of(two_conflicts, EXPLICIT, 2)
    start = two_conflicts.__code__.co_firstlineno
    for help_ in error.helps:
        lines = {e.span.line - start for e in help_.edits if isinstance(e, SourceEdit)}
        assert len(lines & {1, 2}) == len(lines & {3, 4}) == 1, help_
    assert "not shown: 1 more change that fixes this error" in error.notes


def test_a_pin_of_values_of_several_ranks_takes_what_all_of_them_can_have():
    cube = jax.sharding.AbstractMesh((2, 2, 2), ("data", "model", "pipe"))

    def program(x, b):
        def rows(t):
            return sbp.annotate(t, data=sbp.S(0), model=sbp.B, pipe=sbp.B)

        a, c = jnp.tanh(rows(x)), jnp.tanh(rows(b))
        return a + jnp.tanh(sbp.annotate(x, data=sbp.B, model=sbp.S(0), pipe=sbp.S(1))), c

    (error,) = sbp.jit(program, cube, boxing="explicit").check(SQUARE, VECTOR).diagnostics
    (pin,) = (h.text for h in error.helps if h.text.startswith("pin "))
    assert pin.startswith("pin x to data:S(0) model:B pipe:B at line ")


def test_two_inputs_are_left_free():
    types = ("data:S(1) model:S(1)", "data:B model:S(1)") * 2
    error = error_of(lambda x, y, z, w: (x + y, z * w), EXPLICIT | {"in_types": types}, 4)
    assert error.helps[0].text == "leave x free in in_types and leave z free in in_types"
    assert len(error.helps[0].edits) == 2


def test_changes_that_were_not_tried_are_counted():
    (few,) = diagnosed(two_conflicts, (SQUARE, SQUARE), GRID, plans=1)
    assert len(few.helps) == 1 and "not tried: 5 more changes" in few.notes


# ---- changed pins --------------------------------------------------------------------------------

LINE = jax.sharding.AbstractMesh((8,), ("d",))
WIDE = jax.ShapeDtypeStruct((64, 64), jnp.float32)


def helps(fn, *args, **options):
    """The helps of all faults of a program. sbp has tried each of them."""
    return [h for d in helped(fn, LINE, args, **options) for h in d.helps]


def test_a_sum_in_a_loop_stays_partial_under_a_budget():
    def accumulate(xs, w):
        def body(total, x):
            part = sbp.split(x, 0, "d").T @ sbp.split(x, 0, "d")
            return sbp.replicate(total + part, "d"), None

        return jax.lax.scan(body, jnp.zeros((64, 64)), xs)[0] @ w

    xs = jax.ShapeDtypeStruct((4, 64, 64), jnp.float32)
    found = helps(accumulate, xs, WIDE, budgets=[sbp.forbid(where="loop", axis="d")])
    assert "P(sum) on `d`" in found[0].text and found[-1].text.startswith("sbp.forbid(")


@pytest.mark.parametrize("keys", [(0, 1, 2), ("layer_0", "layer_1", "layer_2"), None])
def test_one_leaf_of_all_layers_changes_at_once(keys):
    """In a huge program too, whose limit leaves out most changes."""

    def mlp(blocks, x):
        for p in jax.tree.leaves(blocks, is_leaf=lambda t: "a" in t):
            x = jax.nn.relu(x @ p["a"]) @ jnp.sin(p["b"])
        return x

    layers = [{"a": WIDE, "b": WIDE}] * 3
    blocks = dict(zip(keys, layers, strict=True)) if keys else layers
    options = {"in_types": ({"*/a": "d:S(1)", "*/b": "d:S(1)"}, "B"), "boxing": "reduce"}
    for work in (6000, 1):
        (found,) = diagnosed(mlp, (blocks, WIDE), LINE, options, work=work)
        first = found.helps[0]
        assert first.text.startswith(f"split blocks[{(keys or (0,))[0]!r}]['b'] on dim 0")
        assert "and 2 more like it" in first.text
        edits = [(e.position, e.value) for e in first.edits if isinstance(e, OptionEdit)]
        assert edits == [(1, "d:S(0)"), (3, "d:S(0)"), (5, "d:S(0)")]


def wrong_pin(w, v, x):
    return 2 * w, 2 * v, jax.nn.relu(x @ w) @ v


def costly_pin(w, v, x):
    return 2 * w, 2 * v, (jnp.tanh(sbp.replicate(x @ w, "d")) @ v).sum()


@pytest.mark.parametrize(
    ("fn", "types", "boxing"),
    [
        (wrong_pin, ("d:S(1)", "d:S(1)", "B"), "reduce"),
        (costly_pin, ("B", "B", "d:S(0)"), "auto"),
    ],
)
def test_memory_of_helps_counts_a_donated_buffer_once(fn, types, boxing):
    options = {"in_types": types, "boxing": boxing, "donate_argnums": (0, 1)}
    (fault,) = helped(fn, LINE, (shape(4096, 4096),) * 3, **options)
    assert fault.helps


def test_an_annotation_with_another_split_still_converts():
    """Without the annotation the partial value arrives at the cosine."""

    def program(x, w):
        x = sbp.split(x @ w, 1, "d")
        return jnp.cumsum(jnp.cos(x), axis=1)

    found = helps(program, WIDE, WIDE, in_types=("d:S(1)", "d:S(0)"), boxing="explicit")
    assert found[0].text.startswith("split x on dim 0 at line")


FOUR = (WIDE,) * 4
SIDES = ("d:S(1)", "d:S(1)", "d:S(0)", "d:S(0)")


def sums(a, b, c, d):
    return (a + b) * (c + d)


def test_a_pair_that_gives_up_a_split_hides_no_change_of_one_place():
    """A row split of `x` with `w` replicated has a typing, too."""
    tanh = lambda x, w: jnp.tanh(sbp.split(x, 1, "d") @ sbp.split(w, 0, "d"))
    (every,) = diagnosed(tanh, (WIDE, WIDE), LINE, shown=100)
    pair = [" on dim 0" in h.text and " and replicate " in h.text for h in every.helps]
    assert sum(pair) == 1 and pair[-1]
    (few,) = diagnosed(tanh, (WIDE, WIDE), LINE, shown=len(pair) - 1)
    assert [" and " in h.text for h in few.helps] == [False] * (len(pair) - 1)


@pytest.mark.parametrize("types", [("d:S(1)", None, "d:S(0)", None), ("d:S(1)", *SIDES[1:3], None)])
def test_where_one_change_works_no_pair_is_offered(types):
    (fault,) = helped(sums, LINE, FOUR, in_types=types, **EXPLICIT)
    assert not any(" and " in h.text for h in fault.helps)


def test_pairs_that_were_not_tried_are_counted():
    options = EXPLICIT | {"in_types": SIDES}
    (every,) = diagnosed(sums, FOUR, LINE, options, plans=100, shown=100)
    assert sum(" and " in h.text for h in every.helps) == 2
    assert not any("not tried" in n for n in every.notes)
    (few,) = diagnosed(sums, FOUR, LINE, options, plans=1)
    assert any("not tried" in n for n in few.notes)


def test_the_dims_of_a_transform_along_another_dim():
    def program(x):
        x = sbp.split(x, 1, "d")
        y = jnp.fft.fft(x, axis=1)
        return jnp.abs(y)

    x = jax.ShapeDtypeStruct((7, 16, 24), jnp.float32)  # dim 0 does not divide
    (found,) = sbp.jit(program, LINE, boxing="explicit").check(x).diagnostics
    rows = {(*r.inputs, *r.outputs) for r in found.rows}
    assert ([label.text for label in found.labels if label.primary], rows) == (
        ["x is S(1) here, which fft does not take"],
        {("B", "B"), ("S(2)", "S(2)")},
    )
    assert any("split x on dim 2" in h.text and "y becomes S(2)" in h.text for h in found.helps)


# ---- dims of jax.vmap ---------------------------------------------------------------------------


def pinned_inside(x, w):
    return jax.vmap(lambda row: sbp.split(row, 1, "d") @ sbp.split(w, 1, "d"))(x)


def pinned_outside(x, w):
    x, w = sbp.split(x, 2, "d"), sbp.split(w, 1, "d")
    return jax.vmap(lambda row: jnp.tanh(row) @ w)(x)


def met_inside(x, w):
    def one(a, b):
        a, b = sbp.split(a, 0, "d"), sbp.split(b, 1, "d")
        return jnp.tanh(a) + jnp.tanh(b)

    return jax.vmap(one)(x, x)


@pytest.mark.parametrize(
    "program,texts",
    [
        (
            pinned_inside,
            (
                "row is S(1) on `d` under vmap, the contracted dim",
                "w is S(1) on `d` under vmap, not contracted",
            ),
        ),
        (
            pinned_outside,
            (
                "jnp.tanh(row) is S(2), w is S(1): they cannot meet here, in dims of the",
                "x is S(2) on `d`: dim 2 of 8x16x16",
                "w is S(1) on `d`, not contracted",
            ),
        ),
        (
            met_inside,
            (
                "a as S(0) and b as S(1) cannot meet in",
                "a is S(0) on `d` under vmap: dim 0 of 16x16",
                "b is S(1) on `d` under vmap: dim 1 of 16x16",
            ),
        ),
    ],
    ids=lambda v: getattr(v, "__name__", ""),
)
def test_dims_under_vmap_are_those_that_the_user_wrote(program, texts):
    """Where it is not known which of the user's dims a dim is, that is said."""
    args = [jax.ShapeDtypeStruct(s, jnp.float32) for s in ((8, 16, 16), (16, 16))]
    (found,) = sbp.jit(program, LINE, boxing="explicit").check(*args).diagnostics
    said = "\n".join([found.title, *(label.text for label in found.labels)])
    assert all(text in said for text in texts), said
    assert found.rule.endswith(", dims of the batched arrays")
