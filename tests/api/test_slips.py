"""Slips before a program is typed have helps, which are edits that were tried.
Arguments that a function changes in place without returning the change: `lost-state`, for Flax
NNX modules and any other mutable pytree node."""

import textwrap
import warnings
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import pytest

import sbp
from benchmarks.fault_suite import checked
from sbp.errors import SourceEdit
from tests.edits import edited_text

HEAD = textwrap.dedent(
    """
    import jax, jax.numpy as jnp, sbp
    mesh = jax.sharding.AbstractMesh((2, 4), ("data", "model"))
    layout = sbp.Layout(batch="data", heads="model")
    x, w = jax.ShapeDtypeStruct((8, 16), jnp.float32), jax.ShapeDtypeStruct((16, 16), jnp.float32)
    args = (x, {"blocks": [{"up": w}, {"up": w}]})
    def program(x, params):
        {line}
        for p in params["blocks"]:
            x = x @ p["up"]
        return (x * x).mean(), x
    f = sbp.jit(program, mesh{options})
    report = f.check(*args)
    """
)


def mended(line: str = "pass", options: str = "") -> tuple[Any, str]:
    """The diagnostic of a program, and its source after its first help."""
    text = HEAD.replace("{line}", line).replace("{options}", options)
    (diagnostic,) = checked("slip", text).found
    edits = diagnostic.helps[0].edits
    assert all(isinstance(e, SourceEdit) for e in edits)
    after = edited_text(text, [e for e in edits if isinstance(e, SourceEdit)])
    assert not [d for d in checked("mended", after).found if d.severity == "error"]
    return diagnostic, after


@pytest.mark.parametrize(
    ("line", "meant"),
    [
        ('x = sbp.split(x, 0, "dta")', 'x = sbp.split(x, 0, "data")'),
        ('x = sbp.split(x, 2, "data")', 'x = sbp.split(x, 1, "data")'),
        ("x = sbp.annotate(x, modle=sbp.S(1))", "x = sbp.annotate(x, model=sbp.S(1))"),
        ("x = sbp.annotate(x, model=sbp.S(2))", "x = sbp.annotate(x, model=sbp.S(1))"),
        ('x = sbp.annotate(x, "dat:S(0)")', 'x = sbp.annotate(x, "data:S(0)")'),
        ('x = layout(x, "batch", "haeds")', 'x = layout(x, "batch", "heads")'),
    ],
)
def test_a_slip_in_an_annotation(line, meant):
    diagnostic, after = mended(line)
    assert meant in after
    assert diagnostic.primary.span.line == HEAD.splitlines().index("    {line}") + 1


@pytest.mark.parametrize(
    ("options", "meant"),
    [
        (', in_types=("data:S(2)", "B")', '("data:S(1)", "B")'),
        (', out_types=("data:S(1)", "B")', '("B", "data:S(1)")'),
        (', in_types=({"blocks": "B"}, "data:S(0)")', '("data:S(0)", {"blocks": "B"})'),
        (', in_types=("B", {"block": "B"})', '("B", {"blocks": "B"})'),
    ],
)
def test_a_slip_in_an_option(options, meant):
    diagnostic, after = mended(options=options)
    assert meant in after
    line = next(n for n, t in enumerate(HEAD.splitlines(), 1) if t.startswith("f ="))
    assert {label.span.line for label in diagnostic.labels} == {line}


@pytest.mark.parametrize("option", ["in_types", "out_types"])
@pytest.mark.parametrize("entry", ['"dta:S(0)"', 'jax.sharding.PartitionSpec("dta")'])
def test_a_misspelt_axis_in_an_option_is_refused_at_its_place(option, entry):
    """`sbp.jit` refuses it; where the mesh is that of the context, `check` has helps."""
    options = f", {option}=" + (f"({entry}, None)" if option == "in_types" else f"(None, {entry})")
    text = HEAD.replace("{line}", "pass").replace("{options}", options)
    (found,) = checked("slip", text).found
    assert found.code == "unknown-axis" and found.title.endswith('did you mean "data"?')
    assert found.title.startswith(option) and found.primary is not None
    line = text.splitlines()[found.primary.span.line - 1].encode()
    marked = line[found.primary.span.column - 1 : found.primary.span.end_column - 1].decode()
    assert marked in ('"dta:S(0)"', '"dta"'), marked
    inside = options.replace(", ", "", 1)
    later = text.replace(f"mesh{options})", inside + ")").replace(
        "report =", "with jax.sharding.use_abstract_mesh(mesh):\n    report ="
    )
    (found,) = checked("slip", later).found
    assert next(h.text for h in found.helps) == f"write 'data' for 'dta' in {option}"
    after = edited_text(later, [e for e in found.helps[0].edits if isinstance(e, SourceEdit)])
    assert not checked("slip", after).found


def test_a_misspelt_key_of_a_pattern():
    diagnostic, after = mended(options=', in_types={"blocks/*/upp": "model:S(1)"}')
    assert '{"blocks/*/up": "model:S(1)"}' in after
    assert len(diagnostic.helps) == 1


def test_an_option_in_variables_that_were_swapped():
    swapped = 'one, other = ("B", "B"), ("data:S(2)", "B"); kept = one; one = other; other = kept\n'
    text = HEAD.replace("{line}", "pass").replace("{options}", ", in_types=one")
    (diagnostic,) = checked("swapped", text.replace("f = sbp", f"{swapped}f = sbp")).found
    assert diagnostic.code == "dim-out-of-range" and diagnostic.helps


def test_swapped_entries_are_shown():
    diagnostic, _ = mended(options=', out_types=("data:S(1)", "B")')
    texts = [label.text for label in diagnostic.labels]
    assert texts == ["entries 0 and 1 of out_types look swapped", "the other one"]


def test_two_dims_on_one_axis_show_where_the_layout_maps_them():
    diagnostic, _ = mended('twice = sbp.Layout(a="data", b="data"); x = twice(x, "a", "b")')
    assert [label.text for label in diagnostic.labels if not label.primary] == [
        "'a' and 'b' are mapped to 'data' here"
    ]


def test_a_correction_stays_where_it_was_tried():
    """What an inner `jax.jit` traced under a correction is not found without it."""
    inner = jax.jit(lambda x: sbp.split(x, 2, "data") * 2)
    f = sbp.jit(lambda x: inner(x), jax.sharding.AbstractMesh((2,), ("data",)))
    for _ in range(2):
        report = f.check(jax.ShapeDtypeStruct((8, 4), jnp.float32))
        assert [d.code for d in report.diagnostics] == ["dim-out-of-range"]
        assert report.diagnostics[0].helps


def test_what_is_tried_gives_no_warnings():
    f = sbp.jit(lambda x: x * 2, jax.sharding.AbstractMesh((2,), ("data",)), in_types="data:S(2)")
    report = f.check(jax.ShapeDtypeStruct((13, 9), jnp.float32))  # it divides along no dim
    assert [d.code for d in report.diagnostics] == ["dim-out-of-range"]
    assert [help_.text for help_ in report.diagnostics[0].helps] == [
        f"write {dim} for 2 in in_types" for dim in (1, 0)
    ]


@pytest.mark.parametrize(
    ("shape", "types", "helps", "left"),
    [
        (
            (8, 8),
            ["x:S(2)", *(f"y:S({n % 2}) x:?" for n in range(6))],
            2,
            15 + 2 - 12,
        ),  # swaps and renames
        ((8,) * 5, "x:S(5)", 3, 2),
        ((8,) * 4, "x:S(4)", 3, 1),
        ((8,) * 3, "x:S(3)", 3, 0),
    ],
)
def test_changes_that_were_not_tried_are_counted(shape, types, helps, left):
    """A wrong value is tried also where there are many entries to swap: here 15, beside 2 dims."""
    several = tuple(types) if isinstance(types, list) else (types,)
    mesh = jax.sharding.AbstractMesh((2, 2), ("x", "y"))
    f = sbp.jit(lambda *args: sum(x.sum() for x in args), mesh, in_types=several)
    args = [jax.ShapeDtypeStruct(shape, jnp.float32)] * len(several)
    (found,) = f.check(*args).diagnostics
    assert len(found.helps) == helps
    said = {0: (), 1: ("sbp did not try 1 more change",)}
    assert found.notes == said.get(left, (f"sbp did not try {left} more changes",))


def test_the_end_of_another_axis_name_stays():
    mesh = jax.sharding.AbstractMesh((2, 2), ("xmodel", "model_b"))
    f = sbp.jit(lambda x: sbp.annotate(x, "xmodel:S(0) model:S(1)"), mesh)
    (found,) = f.check(jax.ShapeDtypeStruct((8, 8), jnp.float32)).diagnostics
    (help_,) = found.helps
    assert help_.text.startswith("write 'model_b' for 'model' at line ")


def test_nothing_is_suggested_that_does_not_work():
    mesh = jax.sharding.AbstractMesh((2,), ("data",))
    f = sbp.jit(lambda x: sbp.split(sbp.split(x, 3, "data"), 4, "data"), mesh)
    assert [d.helps for d in f.check(jax.ShapeDtypeStruct((8, 4), jnp.float32)).diagnostics] == [()]


# ---- state that is lost --------------------------------------------------------------------------

MESH = sbp.make_mesh((8,), ("data",))
X = jnp.ones((8, 4))


@jax.tree_util.register_dataclass
@dataclass
class Counter:
    """A mutable node."""

    weight: Any
    steps: Any


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Frozen:
    """A node that only changes inside, such as the state of an environment."""

    info: dict[str, Any]


def flax_net() -> tuple[Any, Any]:
    """Flax NNX, and a net with a batch norm."""
    from flax import nnx  # other tests here run with the newest JAX, without this package

    class Net(nnx.Module):
        def __init__(self, rngs: nnx.Rngs):
            self.up = nnx.Linear(4, 4, rngs=rngs)
            self.norm = nnx.BatchNorm(4, rngs=rngs)

        def __call__(self, x: Any) -> Any:
            return self.norm(self.up(x))

    return nnx, Net(nnx.Rngs(0))


def counter() -> Counter:
    return Counter(jnp.ones(4), jnp.int32(0))


def lost(fn, *args: Any, **kwargs: Any) -> list[str]:
    """The warnings of a call, without their code."""
    with warnings.catch_warnings(record=True, action="always") as caught:
        sbp.jit(fn, MESH)(*args, **kwargs)
    found = [w for w in caught if issubclass(w.category, sbp.SbpWarning)]
    assert all(w.filename == __file__ for w in found)
    texts = [str(w.message) for w in found]
    assert all(text.startswith("lost-state: ") for text in texts)
    return [text.removeprefix("lost-state: ") for text in texts]


def counts(model: Counter, x: Any) -> Any:
    model.steps = model.steps + 1
    return x * model.weight


def counts_and_returns_it(model: Counter, x: Any) -> Any:
    return counts(model, x), model


def counts_and_returns_the_leaf(model: Counter, x: Any) -> Any:
    return counts(model, x), {"steps": model.steps}


def returns_an_old_leaf(model: Counter, x: Any) -> Any:
    old = model.steps
    return counts(model, x), old


def changes_nothing(model: Counter, x: Any) -> Any:
    model.steps = model.steps
    return x * model.weight


def changes_a_copy(model: Counter, x: Any) -> Any:
    return counts(Counter(model.weight, model.steps), x)


def gains_a_leaf(model: Counter, x: Any) -> Any:
    model.steps = {"all": model.steps, "mean": x.mean()}
    return x


def writes_into_a_dict(model: dict[str, Any], x: Any) -> Any:
    model["steps"] = model["steps"] + 1
    return x


@pytest.mark.parametrize(
    ("fn", "leaves"),
    [
        (counts, "model.steps"),
        (returns_an_old_leaf, "model.steps"),
        (gains_a_leaf, "model.steps['all'], model.steps['mean']"),
        (counts_and_returns_it, None),
        (counts_and_returns_the_leaf, None),
        (changes_nothing, None),
        (changes_a_copy, None),
    ],
    ids=lambda p: getattr(p, "__name__", None),
)
def test_a_change_that_is_not_returned(fn, leaves: str | None):
    model = counter()
    texts = lost(fn, model, X)
    assert len(texts) == (leaves is not None)
    if leaves is not None:
        assert texts[0].startswith(
            f"input model is changed in {fn.__name__}, which does not return the new {leaves}: "
        )
        assert "your Counter keeps its old state, as under jax.jit" in texts[0]
    before = counter()
    jax.jit(fn)(before, X)
    assert model.steps == before.steps == 0  # what the warning says is so under both


def test_a_dict_is_a_variable_of_the_function():
    assert lost(writes_into_a_dict, {"steps": jnp.int32(0)}, X) == []
    assert lost(lambda s, x: writes_into_a_dict(s.info, x), Frozen({"steps": X}), X) == []
    (text,) = lost(lambda s, x: counts(s.info["m"], x), Frozen({"m": counter()}), X)
    assert text.startswith(
        "input s.info['m'] is changed in <lambda>, which does not return the new"
    )


def test_arguments_inside_of_containers_and_by_keyword():
    def program(flag: bool, pair: Any, *, more: Any) -> Any:
        counts(pair[1]["m"], X)
        counts(more, X)
        return pair[0]

    texts = lost(program, True, (X, {"m": counter()}), more=counter())
    assert [text.split(" is changed")[0] for text in texts] == [
        "input pair[1]['m']",
        "input more",
    ]
    assert "pair[1]['m'].steps: " in texts[0] and "more.steps: " in texts[1]


def test_a_node_that_flattens_to_new_leaves_is_not_judged():
    @jax.tree_util.register_pytree_node_class
    class Doubling:
        def __init__(self, x: Any):
            self.x = x

        def tree_flatten(self) -> Any:
            return (jnp.asarray(self.x) * 1,), None

        @classmethod
        def tree_unflatten(cls, aux: None, children: Any) -> Any:
            return cls(children[0])

    assert lost(lambda model: model.x + 1, Doubling(X)) == []


def test_modules_of_flax_nnx():
    """A batch norm in training changes its means; in evaluation, and where the state is returned,
    nothing is lost."""
    nnx, net = flax_net()
    (text,) = lost(lambda net, x: net(x), net, X)
    assert text.startswith(
        "input net is changed in <lambda>, which does not return the new net.norm.mean"
    )
    assert "your Net keeps its old state" in text
    assert lost(lambda net, x: (net(x), nnx.state(net)), net, X) == []
    assert lost(lambda net, x: (net(x), net), net, X) == []
    net.eval()
    assert lost(lambda net, x: net(x), net, X) == []
    graph, state = nnx.split(net)
    assert lost(lambda state, x: nnx.merge(graph, state)(x), state, X) == []


def test_a_module_that_a_jitted_function_gets():
    """The function inside returns the leaves to the module, changed or not."""
    nnx, net = flax_net()
    inner = nnx.jit(lambda net, x: net(x))
    functions = (inner, nnx.jit(lambda net, x: inner(net, x)), nnx.remat(lambda net, x: net(x)))
    for fn in functions:
        (text,) = lost(lambda net, x, fn=fn: fn(net, x), net, X)
        assert "the new net.norm.mean.value, net.norm.var.value: " in text
    net.eval()
    for fn in functions:
        assert lost(lambda net, x, fn=fn: fn(net, x), net, X) == []
        assert lost(lambda net, x, fn=fn: fn(net, fn(net, x)), net, X) == []


def test_a_check_shows_it():
    with pytest.warns(sbp.SbpWarning, match="lost-state"):
        report = sbp.jit(counts, MESH).check(counter(), X)
    assert [d.code for d in report.diagnostics] == ["lost-state"] and report.ok
