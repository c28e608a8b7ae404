"""Arguments and results that are held as `sbp.Padded` between calls."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import sbp
from sbp.api.symbolic import SizedReport
from sbp.errors import OptionEdit
from sbp.layout import PaddedType
from tests.same import refused

RNG = np.random.default_rng(0)
W = RNG.normal(size=(13, 7)).astype(np.float32)
X = RNG.normal(size=(16, 13)).astype(np.float32)
Y = RNG.normal(size=(16, 7)).astype(np.float32)
EIGHT, ROWS = sbp.make_mesh((8,), ("x",)), sbp.padded("x:S(0)")

LAYOUTS = {
    "2": ((2,), ("x",), "x:S(0)", "x:S(0)"),
    "4": ((4,), ("x",), "x:S(1)", "x:S(0)"),
    "8": ((8,), ("x",), "x:S(0)", "x:S(0)"),
    "2x4, one dim": ((2, 4), ("x", "y"), "x:S(0) y:S(0)", "x:S(0) y:S(0)"),
    "2x4, two dims": ((2, 4), ("x", "y"), "x:S(1) y:S(0)", "x:S(0)"),
    "2x2x2": ((2, 2, 2), ("x", "y", "z"), "x:S(0) y:S(1) z:S(0)", "x:S(0) z:S(0)"),
}


def mesh_of(name):
    sizes, names, *types = LAYOUTS[name]
    return sbp.make_mesh(sizes, names), *types


def with_nan(held: sbp.Padded, mesh: Any) -> sbp.Padded:
    """The same with NaN in its padding."""
    ones = sbp.Padded.of(np.ones(held.shape, bool), held.type, mesh)
    return sbp.Padded(jnp.where(ones.parts, held.parts, jnp.nan), held.shape, held.type, mesh)


loss = lambda w, x, y: ((jnp.tanh(x @ w) - y) ** 2).mean()


def adam(state, x, y):
    value, g = jax.value_and_grad(loss)(state["w"], x, y)
    m, v = 0.9 * state["m"] + 0.1 * g, 0.99 * state["v"] + 0.01 * g * g
    return {"w": state["w"] - 0.1 * m / (jnp.sqrt(v) + 1e-8), "m": m, "v": v}, value


START: dict[str, Any] = {"w": W, "m": np.zeros_like(W), "v": np.zeros_like(W)}


@pytest.mark.parametrize("name", LAYOUTS)
def test_training_with_padded_weights_and_moments(name):
    """The first call takes NumPy arrays, the others what the step returned: one plan for all. What
    padding holds changes nothing, and nothing moves at the boundary."""
    mesh, t, rows = mesh_of(name)
    held = sbp.padded(t)
    step = sbp.jit(adam, mesh, (held, rows, rows), (held, None), donate_argnums=0)
    plain = jax.jit(adam)
    state: Any = START
    want: Any = START
    for _ in range(3):
        if isinstance(state["w"], sbp.Padded):
            given = state = {k: with_nan(v, mesh) for k, v in state.items()}
        else:
            given = {}
        state, value = step(state, X, Y)
        want, wanted = plain(want, X, Y)
        np.testing.assert_allclose(value, wanted, rtol=1e-5)
        assert all(old.parts.is_deleted() for old in given.values())
    assert len(step._plans) == 1
    plan = step.plan(state, X, Y)
    for k, v in state.items():
        assert isinstance(v, sbp.Padded) and v.type == sbp.parse(t)
        np.testing.assert_allclose(v, want[k], rtol=2e-4, atol=1e-6)
        assert not np.isnan(np.asarray(v.parts)).any()
    graph, boxes = plan.program.graph, [p.box for p in plan.program.boxes()]
    names = dict(zip(graph.inputs, graph.input_names, strict=True))
    assert not any(names.get(b.source.value, "") in ("state['m']", "state['v']") for b in boxes)
    assert not any(b.reader is None and graph.avals[b.source.value].shape for b in boxes)


@pytest.mark.parametrize("name", LAYOUTS)
def test_a_padded_argument_needs_no_types(name):
    """It carries its type, as an array with a NamedSharding does, and a donated one comes back."""
    mesh, t, _ = mesh_of(name)
    w = with_nan(sbp.Padded.of(W, t, mesh), mesh)
    fn = lambda w, x: (w * 2 + w.mean(), (x @ w).max(), w.sum(0))
    f = sbp.jit(fn, mesh, donate_argnums=0)
    plan = f.plan(w, X)
    assert plan.in_types[0][0] == plan.out_types[0] == sbp.parse(t)
    got, want = f(w, X), jax.jit(fn)(W, X)
    assert isinstance(got[0], sbp.Padded) and not isinstance(got[2], sbp.Padded)
    for a, b in zip(got, want, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("size", [1, 3, 8, 9, 16, 0])
def test_any_length(size):
    """A result that is asked for as padded is one, whether or not its dim divides."""
    x = np.arange(3 * size, dtype=np.int32).reshape(size, 3)
    fn = lambda x: jax.lax.cumsum(x[::-1], 0) * 2
    f = sbp.jit(fn, EIGHT, ROWS, ROWS)
    y = f(f(x))
    assert isinstance(y, sbp.Padded) and y.shape == x.shape
    np.testing.assert_array_equal(y, fn(fn(x)))
    np.testing.assert_array_equal(y.full(), y)


def test_a_free_type_may_be_uneven():
    f = sbp.jit(lambda x: jnp.exp(sbp.split(x, 0, "x")), EIGHT, sbp.padded(), sbp.padded())
    assert f.plan(W).in_types[0][0] == f.plan(W).out_types == sbp.parse("x:S(0)")
    assert f.plan(W).cost.bytes_per_device == 0
    np.testing.assert_allclose(f(W), np.exp(W), rtol=1e-5)
    half = sbp.jit(lambda x: x * 2, EIGHT, sbp.padded("x:?"), sbp.padded("x:S(1)"))
    np.testing.assert_array_equal(half(W), W * 2)


def test_what_arrives_in_another_layout_is_moved_with_one_warning(mesh):
    w = sbp.Padded.of(W, "x:S(0) y:S(0)", mesh)
    device = jax.device_put(W, jax.devices()[1])
    here = sbp.make_mesh((2,), ("a",))
    for types in (sbp.padded("y:S(1)"), "x:B"):
        f = sbp.jit(lambda w: w + 1, mesh, types)
        with pytest.warns(sbp.SbpWarning, match="input-moved: sbp moved 1 input \\(w\\)") as given:
            np.testing.assert_array_equal(f(w), W + 1)
            np.testing.assert_array_equal(f(device), W + 1)
        assert len(given) == 1
    f = sbp.jit(lambda w: w + 1, here)
    with pytest.warns(sbp.SbpWarning, match="input-moved"):
        np.testing.assert_array_equal(f(w), W + 1)
    np.testing.assert_array_equal(sbp.jit(lambda w: w + 1, mesh)(w=w), W + 1)
    uncommitted = sbp.jit(lambda w: w + 1, mesh, sbp.padded("y:S(1)"))
    np.testing.assert_array_equal(uncommitted(jnp.asarray(W)), W + 1)


def test_a_type_that_is_pinned_without_padding():
    """The result is what `jax.jit` gives, and the warning names the way to keep it split."""
    f = sbp.jit(lambda w: w * 2, EIGHT, out_types="x:S(0)")
    with pytest.warns(
        sbp.SbpWarning, match='uneven-boundary: .*sbp.padded\\("x:S\\(0\\)"\\) to keep'
    ):
        assert isinstance(f(W), jax.Array)
    g = sbp.jit(lambda w: w * 2, EIGHT, in_types="x:S(0)", out_types=sbp.padded("x:S(0)"))
    w = sbp.Padded.of(W, "x:S(0)", EIGHT)
    np.testing.assert_array_equal(g(w), W * 2)  # it is taken as it is, without a warning
    assert g.plan(w).cost.bytes_per_device == 0


def test_fully_sharded_state():
    """Leaves that divide are arrays, those that do not are padded, scalars are whole."""
    state = {"a": np.ones((13, 7)), "b": np.ones((3, 16)), "c": np.ones(3), "n": np.zeros(())}
    types = sbp.fully_sharded("x", padded=True)
    fn = lambda s: jax.tree.map(lambda a: a + 1, s)
    f = sbp.jit(fn, EIGHT, types, types)
    out = f(f(state))
    assert [isinstance(out[k], sbp.Padded) for k in "abcn"] == [True, False, True, False]
    assert f.plan(state).in_types[0][0] == {
        k: sbp.parse(t) for k, t in {"a": "x:S(0)", "b": "x:S(1)", "c": "x:S(0)", "n": "B"}.items()
    }
    for k, a in out.items():
        np.testing.assert_array_equal(a, state[k] + 2)
    by_path = {"s/a": sbp.padded("x:S(1)"), "s/b": lambda path, leaf: sbp.padded("x:S(0)")}
    taken = sbp.jit(fn, EIGHT, by_path).plan(state).in_types[0][0]
    assert (taken["a"], taken["b"]) == (sbp.parse("x:S(1)"), sbp.parse("x:S(0)"))


def test_memory_and_report_count_the_padded_part():
    plan = sbp.jit(lambda w: w * 2, EIGHT, ROWS, ROWS).plan(W)
    assert plan.cost.peak_memory_bytes == 2 * 2 * 7 * 4  # two rows in, two rows out
    assert (
        plan.cost.peak_memory_bytes < sbp.jit(lambda w: w * 2, EIGHT).plan(W).cost.peak_memory_bytes
    )
    text = str(plan.report())
    assert "w (padded)" in text and "result (padded)" in text and "f32[2,7]" in text
    assert not plan.report().diagnostics
    stats = plan.lower().compile().memory_analysis()
    assert stats.argument_size_in_bytes == stats.output_size_in_bytes == 2 * 7 * 4


def test_shardings_have_the_structure_of_arguments_and_results():
    f = sbp.jit(lambda s, x: (s, x), EIGHT, ({"w": ROWS}, None), ({"w": ROWS}, None))
    plan = f.plan({"w": W}, X)
    out = f({"w": W}, X)
    assert jax.tree.structure(plan.out_shardings) == jax.tree.structure(out)
    assert jax.tree.structure(plan.in_shardings[0]) == jax.tree.structure(out[0])
    again = jax.device_put(out[0], plan.in_shardings[0])
    assert again["w"].parts.sharding == plan.in_shardings[0]["w"].parts
    np.testing.assert_array_equal(f(again, X)[0]["w"], W)


def test_saved_plans(tmp_path):
    path = tmp_path / "plan.json"
    sbp.jit(lambda w: w * 2, EIGHT, ROWS, ROWS).plan(W).save(path)
    f = sbp.jit(lambda w: w * 2, EIGHT, out_types=ROWS, plan=path)
    np.testing.assert_array_equal(f(sbp.Padded.of(W, "x:S(0)", EIGHT)), W * 2)
    refused("values held padded input 0, output 0, but this call has values held padded outp", f, W)


def test_symbolic_sizes():
    """The type holds wherever there are elements: nothing has to divide."""
    (n,) = jax.export.symbolic_shape("n")
    report = sbp.jit(lambda x: x + x, sbp.make_mesh((2,), ("x",)), ROWS, ROWS).check(
        jax.ShapeDtypeStruct((n,), np.float32)
    )
    assert isinstance(report, SizedReport)  # as the rows of add
    assert [report.sizes.holds_at(n=n) for n in (1, 2, 3)] == [False, True, True]


def test_under_another_transformation_it_is_a_plain_array():
    w = sbp.Padded.of(W, "x:S(0)", EIGHT)
    f = sbp.jit(lambda w: (w * w).sum(), EIGHT)
    with pytest.warns(sbp.SbpWarning, match="nested-jit"):
        got = jax.jit(lambda w: f(w))(w)
    np.testing.assert_allclose(got, (W * W).sum(), rtol=1e-5)
    with jax.disable_jit():
        np.testing.assert_allclose(f(w), (W * W).sum(), rtol=1e-5)


def test_padding_is_zero_where_values_are_checked_for_nan():
    f = sbp.jit(lambda w: w / w, EIGHT, out_types=sbp.padded("x:S(0)"))
    with jax.debug_nans(True):
        np.testing.assert_array_equal(f(W), np.ones_like(W))
    parts = np.asarray(f(W).parts)
    assert parts.shape == (16, 7) and not parts[13:].any()


def test_a_repeated_call_reads_no_signature(monkeypatch):
    """Calls with what the plan takes are as quick as those with arrays."""
    f = sbp.jit(lambda w: w * 2, EIGHT, ROWS, ROWS)
    w = f(f(W))
    monkeypatch.setattr("sbp.api.call.CallReader.read", None)
    np.testing.assert_array_equal(f(w), W * 8)


def test_why_plans_other_uneven_types():
    mesh = sbp.make_mesh((2,), ("x",))
    plan = sbp.jit(lambda w: w * 2, mesh, sbp.padded("x:S(0)")).plan(W)
    tried = {a.wanted for a in plan.why("w").why.alternatives}
    assert (("x", "S(1)"),) in tried  # 7 columns on two devices
    even = sbp.jit(lambda w: w * 2, mesh, "B").plan(W).why("w").why.alternatives
    assert not any("S" in atom for a in even for _, atom in a.wanted)


def test_helps_keep_an_input_padded():
    """A help that gives a padded input another type says so in its edit."""
    mesh = sbp.make_mesh((2,), ("x",))
    types = (sbp.padded("x:S(0)"), sbp.padded("x:S(1)"))
    add = lambda a, b: a + b
    (fault,) = sbp.jit(add, mesh, types, boxing="explicit").check(W, W).diagnostics
    found = [(edit, help_) for help_ in fault.helps for edit in help_.edits]
    edit, help_ = next(pair for pair in found if getattr(pair[0], "option", "") == "in_types")
    assert isinstance(edit, OptionEdit) and isinstance(edit.value, PaddedType)
    edited = [edit.value if i == edit.position else t for i, t in enumerate(types)]
    plan = sbp.jit(add, mesh, tuple(edited), boxing="explicit").plan(W, W)
    assert plan.cost.bytes_per_device == help_.bytes_per_device


def test_placing_arguments(mesh):
    """They are moved once, to where the plan takes them."""
    types = (sbp.padded("x:S(0)"), "x:S(0)", None)
    args = W, 3, jax.device_put(np.ones((2, 13), np.float32), jax.devices()[2]), 2.0
    plan = sbp.jit(lambda w, n, x, b: (x @ w + b) * n, mesh, types, static_argnums=1).plan(*args)
    placed = plan.place(*args)
    assert isinstance(placed[0], sbp.Padded) and placed[1] == 3 and placed[3] == 2.0
    assert placed[2].sharding == plan.in_shardings[1]
    np.testing.assert_allclose(plan(*placed), (np.ones((2, 13)) @ W + 2.0) * 3, rtol=1e-5)
    assert plan.place(*placed)[0].parts.sharding == placed[0].parts.sharding
    other = plan.place(sbp.Padded.of(W, "y:S(1)", mesh), *args[1:])
    assert other[0].type == sbp.parse("x:S(0)")
    np.testing.assert_array_equal(other[0], W)


WRONG_PLACES: dict[str, Any] = {
    "another shape": (
        (np.ones((12, 7), np.float32),),
        "input w: .* pass the whole array, of shape \\(13, 7\\)",
    ),
    "the padded shape": (
        (np.ones((14, 7), np.float32),),
        "input w: .* pass the whole array, of shape \\(13, 7\\)",
    ),
    "another dtype": ((W.astype(np.int32),), "input w is int32, but the plan takes float32"),
    "a shape": ((jax.ShapeDtypeStruct((13, 7), np.float32),), "input w is a ShapeDtypeStruct"),
    "no array": (("text",), "input w is not an array"),
    "another structure": (([W],), "input w is a list of 1 entry, but the plan takes one array"),
    "too many": ((W, W), r"takes the arguments \(w\); this call has \(w, args\[1\]\)$"),
    "too few": ((), r"takes the arguments \(w\); this call has \(\)$"),
}


@pytest.mark.parametrize(("args", "said"), WRONG_PLACES.values(), ids=WRONG_PLACES)
def test_wrong_arguments_are_not_placed(args, said):
    plan = sbp.jit(lambda w: w * 2, sbp.make_mesh((2,), ("x",)), sbp.padded("x:S(0)")).plan(W)
    refused(said, plan.place, *args)


A = jnp.ones((8, 8))


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class Scaled:
    array: Any
    by: float = dataclasses.field(default=1.0, metadata={"static": True})


TAKEN: dict[str, Any] = {"p": {"w": A, "e": None}, "s": Scaled(A), "n": 3, "b": 2.0}
INSTEAD = "; call the sbp.jit function instead"


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"p": (A, A)}, "input p is a tuple of 2 entries, but the plan takes a dict of 2 entries"),
        ({"p": {"w": A, "v": A}}, "input p has no key 'e', which the plan takes"),
        ({"p": TAKEN["p"] | {"v": A}}, "input p has the key 'v', which the plan does not take"),
        ({"p": {"w": A, "e": A}}, "input p['e'] is one array, but the plan takes None"),
        ({"s": Scaled([A])}, "input s.array is a list of 1 entry, but the plan takes one array"),
        ({"s": Scaled(A, 2.0)}, "input s has the static fields (2.0,), but the plan takes (1.0,)"),
        ({"n": 4}, "static argument n is 4, but the plan was made for 3" + INSTEAD),
        (
            {"s": Scaled(A[:4])},
            "input s.array is float32[4, 8], but the plan takes float32[8, 8]" + INSTEAD,
        ),
        (
            {"b": jnp.float32(2)},
            "input b is float32[], but the plan takes weakly typed float32[]" + INSTEAD,
        ),
        (
            {"more": A},
            "the plan takes the arguments (p, s, n, b=..); this call has (p, s, n, b=..,",
        ),
    ],
)
def test_a_plan_names_the_argument_that_it_does_not_take(changed, said):
    f = sbp.jit(lambda p, s, n, b: (p["w"] + s.array * s.by) * n + b, EIGHT, static_argnums=2)
    call = lambda f, p, s, n, **named: f(p, s, n, **named)
    message = refused(None, call, call(f.plan, **TAKEN), **TAKEN | changed).message
    assert message.startswith(said) and (INSTEAD in said) == message.endswith(INSTEAD)


def test_a_plan_with_types_names_a_missing_argument():
    plan = sbp.jit(lambda x, w: x @ w, EIGHT, ("x:S(0)", None)).plan(A, A)
    refused(r"takes the arguments \(x, w\); this call has \(x\)$", plan, A, kind=TypeError)


@pytest.mark.parametrize("rows", [13, 3, 1])
def test_held_padded_in_host_memory(rows):
    """Results, too, have 0 in their padding, though JAX mixes no values of two memories."""
    host, device = jax.memory.Space.Host, jax.memory.Space.Device
    step = lambda w: jax.device_put(jax.device_put(w, device) + 1, host)
    f, w = sbp.jit(step, EIGHT, in_types=(ROWS,), out_types=ROWS), np.ones((rows, 4), np.float32)
    for count in (2, 3):
        w = f(w)
        assert w.parts.sharding.memory_kind == "pinned_host"
        np.testing.assert_array_equal(w, np.full((rows, 4), count))
        assert np.asarray(w.parts).sum() == 4 * rows * count


@pytest.mark.filterwarnings("ignore:Some donated buffers")  # they have other shapes
def test_a_result_that_is_asked_for_as_b_is_not_held_padded():
    """Nothing is padded in B. A free result has the type of the donated argument."""
    x = {"w": jnp.arange(80.0).reshape(10, 8)}

    for out_types, kind in (("B", jax.Array), ({"w": "data:B"}, jax.Array), (None, sbp.Padded)):
        f = sbp.jit(
            lambda p: {"w": p["w"] * 2},
            sbp.make_mesh((4,), ("data",)),
            in_types=(sbp.padded("data:S(0)"),),
            out_types=out_types,
            donate_argnums=0,
        )
        got = f(jax.tree.map(jnp.copy, x))["w"]
        assert isinstance(got, kind)
        np.testing.assert_array_equal(got, x["w"] * 2)
