"""How the types of arguments and results are named: by prefix, by pattern, by function, and by what
fits; and what is said where that goes wrong.
Shardings of arguments and results, and a PartitionSpec in the program: what JAX refuses is an
error of the same kind at its line, and results have the sharding that was asked for."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec as P, SingleDeviceSharding

import sbp
from sbp.api.trees import matches
from tests.cases import GRID as MESH, case_name
from tests.same import checked_plan, outcome, refused

BLOCK = {"qkv": {"w": (16, 48), "b": (48,)}, "out": {"w": (48, 16), "b": (16,)}}
SPLIT, OTHER = sbp.parse("model:S(1)"), sbp.parse("data:S(0)")


def _arrays(shapes: Any) -> Any:
    return jax.tree.map(
        lambda s: jax.ShapeDtypeStruct(s, jnp.float32), shapes, is_leaf=lambda x: type(x) is tuple
    )


PARAMS = _arrays({"blocks": [BLOCK, BLOCK], "head": (16, 32), "scale": ()})
X = jax.ShapeDtypeStruct((8, 16), jnp.float32)


def loss(params: Any, x: Any) -> Any:
    for block in params["blocks"]:
        x = (x @ block["qkv"]["w"] + block["qkv"]["b"]) @ block["out"]["w"] + block["out"]["b"]
    return (x @ params["head"]).sum() * params["scale"]


def _wanted(fn: Any, in_types: Any, *args: Any, **kwargs: Any) -> dict[str, Any]:
    """The type asked for each input, by name."""
    signature = sbp.jit(fn, MESH, in_types=in_types)._on(MESH).read(args, kwargs)[0]
    return {leaf.name: leaf.type for leaf in signature.leaves if leaf.type is not None}


@pytest.mark.parametrize(
    "in_types",
    [
        ({"blocks/*/qkv/w": "model:S(1)"}, None),
        ({"**/qkv/w": "model:S(1)"}, None),
        ({"b*/?/qkv/w": jax.sharding.PartitionSpec(None, "model")}, None),
        {"blocks/*/qkv/w": "model:S(1)"},
        {"params/blocks/*/qkv/w": SPLIT},
        ({"blocks": {"*/qkv/w": SPLIT}, "head": None, "scale": None}, None),
        ({"blocks/*/qkv/w": lambda path, x: SPLIT if x.ndim == 2 else None}, None),
    ],
    ids=case_name,
)
def test_patterns_name_leaves(in_types):
    assert _wanted(loss, in_types, PARAMS, X) == {
        f"params['blocks'][{k}]['qkv']['w']": SPLIT for k in (0, 1)
    }


def test_a_pattern_names_subtrees_and_the_first_one_counts():
    assert _wanted(
        loss, {"params/blocks/0/qkv/b": "model:S(0)", "params/blocks/0": "B"}, PARAMS, X
    ) == {
        f"params['blocks'][0]['{layer}']['{leaf}']": (
            sbp.parse("model:S(0)") if (layer, leaf) == ("qkv", "b") else sbp.NdSbp()
        )
        for layer in ("qkv", "out")
        for leaf in ("w", "b")
    }


def test_a_dict_with_the_keys_of_the_argument_is_a_prefix():
    """Haiku's parameters have slashes in their keys."""
    shapes = _arrays({"mlp/linear": {"w": (16, 16)}, "mlp/~/norm": {"scale": (16,)}})
    f = lambda params, x: (x @ params["mlp/linear"]["w"]) * params["mlp/~/norm"]["scale"]
    plan = lambda entry: sbp.jit(f, MESH, in_types=(entry, OTHER)).plan(shapes, X).in_types[0][0]
    by_prefix = plan({"mlp/linear": {"w": SPLIT}, "mlp/~/norm": "B"})
    assert by_prefix == plan({"mlp/linear/w": SPLIT, "mlp/*": "B", "**/scale": "B"})
    assert by_prefix["mlp/linear"]["w"] == SPLIT


@pytest.mark.parametrize(
    ("in_types", "args", "pinned"),
    [
        ({"x": OTHER}, ({"w": X}, X), ["x"]),
        ({"p": OTHER, "x": OTHER}, ({"w": X}, X), ["p['w']", "x"]),
        ({"w": OTHER}, ({"w": X}, X), ["p['w']"]),
        ({"p/w": OTHER}, ({"w": X}, X), ["p['w']"]),
        ({"x*": OTHER}, ({"w": X}, X), ["x"]),
        ({"a/~/b": OTHER}, ({"a/~/b": X, "c": X}, X), ["p['a/~/b']"]),
        ({"x": OTHER, "w": None}, ({"w": X}, X), ["x"]),
        ({"p": OTHER}, (X,), ["p"]),
        ({"p": OTHER}, ({"w": X},), ["p['w']"]),
        ({"w": OTHER}, ({"w": X},), ["p['w']"]),
        ({"p": {"w": OTHER}}, ({"p": {"w": X}},), ["p['p']['w']"]),
        ([None, "data:S(0)"], ({"w": X}, X), ["x"]),  # a list is an entry for each argument
    ],
    ids=case_name,
)
def test_one_dict_or_list_for_all_arguments(in_types, args, pinned):
    f = lambda p, x=None: jax.tree.map(jnp.sin, (p, x))
    assert list(_wanted(f, in_types, *args)) == pinned


@pytest.mark.parametrize("args", [(), ({"w": X},), ({"w": X}, X)], ids=len)
def test_one_dict_names_arguments_that_are_passed_by_name(args):
    names = dict(zip("pxy", ({"w": X}, X, X), strict=True))
    rest = {name: x for n, (name, x) in enumerate(names.items()) if n >= len(args)}
    f = lambda p, x, y: jax.tree.map(jnp.sin, (p, x, y))
    for in_types in ({"p": OTHER, "x": OTHER}, {"*w": OTHER, "x": OTHER}):
        assert list(_wanted(f, in_types, *args, **rest)) == ["p['w']", "x"]
    wrong = sbp.jit(f, MESH, in_types={"x": OTHER, "z/*": OTHER, "z": OTHER})
    refused("no leaf has the path 'z/\\*'; the nearest is", lambda: wrong(*args, **rest))


def test_out_types_by_pattern():
    f = sbp.jit(lambda x: {"a": {"y": x * 2, "z": x}}, MESH, out_types={"*/y": "data:S(0)"})
    assert f.plan(X).out_types["a"]["y"] == OTHER


@pytest.mark.parametrize(
    ("pattern", "path", "named"),
    [
        ("a", "a", True),
        ("a", "a b", True),
        ("a/b", "a", False),
        ("/a/b/", "a b", True),
        ("**/c", "a b c", True),
        ("**/c", "c", True),
        ("a/**/d", "a b c d", True),
        ("a/*/d", "a b c d", False),
        ("a*", "abc", True),
        ("A", "a", False),
        ("[ab]/0", "b 0", True),
    ],
)
def test_matches(pattern, path, named):
    assert matches(pattern, path.split()) is named


@pytest.mark.parametrize(
    ("in_types", "message"),
    [
        (
            ({"blocks/*/qvk/w": "B"}, None),
            "in_types[0]: no leaf has the path 'blocks/*/qvk/w'; the nearest is 'blocks/",
        ),
        ({"prams/head": "B"}, "no leaf has the path 'prams/head'; the nearest is 'params/head'"),
        (
            ({"blocks": None, "haed": SPLIT, "scale": None}, None),
            "in_types[0] does not fit params: params has no key 'haed'; did you mean \"head\"?",
        ),
        (
            ({"blocks": None, "head": SPLIT}, None),
            "in_types[0] does not fit params: it has no entry for params['scale']; give it a type",
        ),
        (
            ({"blocks": [None], "head": None, "scale": None}, None),
            "params['blocks'] is a list of 2 entries, but the entry for it is a list of 1 entry",
        ),
        (
            ({"blocks": None, "head": [SPLIT, SPLIT], "scale": None}, None),
            "params['head'] is one array, but the entry for it is a list of 2 entries",
        ),
        (
            ({"blocks": [None, {"qkv": {"w": "B", "c": "B"}, "out": None}], "head": None,
              "scale": None}, None),
            "params['blocks'][1]['qkv'] has no key 'c'; known: b, w",
        ),
        (
            ({"head": "model:S(2)", "blocks": None, "scale": None}, None),
            "in_types[0] for params['head']: model:S(2) splits dim 2, but the tensor has only",
        ),
        (
            (None, jax.sharding.PartitionSpec(None, None, "data")),
            "in_types[1] for x: data:S(2) splits dim 2, but the tensor has only dims 0..1",
        ),
        (
            (lambda path, leaf: "dta:S(0)" if leaf.shape else None, None),
            "in_types[0] for params['blocks'][0]['out']['b']: the mesh",
        ),
        ((sbp.padded, None), "in_types[0]: sbp.padded: too many positional arguments"),
        (("B",), "in_types has 1 entry for 2 non-static positional arguments (params, x)"),
    ],
)  # fmt: skip
def test_errors_name_the_leaf_and_the_nearest(in_types, message):
    assert message in str(
        refused(None, lambda: sbp.jit(loss, MESH, in_types=in_types).plan(PARAMS, X))
    )


def test_errors_are_not_cut_off():
    wide = {f"layer_number_{k}": (4, 4) for k in range(60)}
    types: dict[str, Any] = dict.fromkeys(wide, None)
    types["layer_number_59"] = {"w": "B"}
    f = sbp.jit(lambda p: p["layer_number_0"], MESH, in_types=(types,))
    assert str(refused(None, f.plan, _arrays(wide))).endswith(
        "p['layer_number_59'] is one array, but the entry for it is a dict of 1 entry"
    )


def test_fully_sharded_splits_where_it_fits():
    """Optimiser states hold leaves that are not shaped like parameters."""
    f = sbp.jit(
        lambda s: jax.tree.map(lambda x: x + 1, s),
        MESH,
        in_types=(sbp.fully_sharded("data", "model"),),
        out_types=sbp.fully_sharded("model"),
    )
    plan = f.plan(
        _arrays({"mu": (24, 16), "row": (24,), "odd": (3, 5), "count": (), "none": (0, 8)})
    )
    split = sbp.parse("data:S(0) model:S(0)")
    assert plan.in_types[0][0] == {
        "mu": split, "row": split, "odd": sbp.NdSbp(), "count": sbp.NdSbp(), "none": sbp.NdSbp(),
    }  # fmt: skip
    assert plan.out_types["mu"] == sbp.parse("model:S(0)")
    refused(
        r"no axis 'modl'; did you mean \"model\"",
        sbp.jit,
        lambda s: s,
        MESH,
        in_types=(sbp.fully_sharded("modl"),),
    )


def test_a_module_that_can_be_called_is_a_tree_of_types():
    import equinox  # other tests here run with the newest JAX, without these packages
    from flax import nnx

    class Affine(equinox.Module):
        w: Any
        b: Any

        def __call__(self, x: Any) -> Any:
            return x @ self.w + self.b

    model = Affine(PARAMS["head"], jax.ShapeDtypeStruct((32,), jnp.float32))
    state = nnx.split(nnx.Linear(16, 32, rngs=nnx.Rngs(0)))[1]
    asked = lambda tree: jax.tree.map(
        lambda a: "model:S(1)" if len(a.shape) == 2 else "model:S(0)", tree
    )
    f = sbp.jit(lambda m, s, x: (m(x), s), MESH, in_types=(asked(model), asked(state), None))
    (model_types, state_types, _), _ = f.plan(model, state, X).in_types
    assert (model_types.w, model_types.b) == (SPLIT, sbp.parse("model:S(0)"))
    assert jax.tree.leaves(state_types) == [sbp.parse("model:S(0)"), SPLIT]
    assert sbp.jit(lambda m: m, MESH, out_types=asked(model)).plan(model).out_types.w == SPLIT


def test_what_patterns_pin_runs():
    rng = np.random.default_rng(0)
    params = jax.tree.map(lambda x: rng.normal(size=x.shape).astype(x.dtype), PARAMS)
    x = rng.normal(size=X.shape).astype(X.dtype)
    types = {"params/**/w": sbp.fully_sharded("model"), "x": "data:S(0)"}
    checked_plan(
        jax.grad(loss),
        sbp.make_mesh((2, 4), ("data", "model")),
        params,
        x,
        rtol=2e-4,
        atol=2e-3,
        in_types=types,
    )


def test_an_undonated_step_returns_what_it_takes():
    def step(params, state, x):
        grads = jax.grad(lambda p: jnp.mean((x @ p["w"] * p["scale"]) ** 2))(params)
        state = jax.tree.map(lambda m, g: 0.9 * m + g, state, grads)
        return jax.tree.map(lambda p, m: p - 0.1 * m, params, state), state

    rows = {"w": "data:S(0)", "scale": "B"}
    params = {"w": jnp.ones((16, 64)), "scale": jnp.ones(64)}
    plan = sbp.jit(step, MESH, in_types=(rows, None, "B")).plan(params, params, jnp.ones((32, 16)))
    assert plan.out_types == plan.in_types[0][:2]


def test_a_function_gets_the_shape_with_its_sharding():
    rows = jax.sharding.NamedSharding(MESH, jax.sharding.PartitionSpec("data", None))
    x = jax.ShapeDtypeStruct((8, 4), jnp.float32, sharding=rows)
    scale = jax.ShapeDtypeStruct((), jnp.float32)
    asked = lambda path, leaf: leaf.sharding
    plan = sbp.jit(lambda x, scale: x * scale, MESH, in_types=asked).plan(x, scale)
    assert jax.tree.leaves(plan.in_types) == [sbp.parse("data:S(0)"), sbp.parse("B")]


# ---- in_shardings and out_shardings --------------------------------------------------------------

DEVICES = Mesh(np.array(jax.devices()).reshape(2, 4), ("x", "y"))
SQUARE = np.arange(64.0, dtype=np.float32).reshape(8, 8)
FREE = P.UNCONSTRAINED


spec_of = lambda spec: NamedSharding(DEVICES, spec)


@pytest.mark.parametrize(
    "spec", [P(), P("x"), P(None, "x"), P("x", None), P(("x", "y")), P("x", "y"), P(("x",), "y")]
)
def test_results_have_the_sharding_that_was_asked_for(spec):
    wanted = jax.jit(lambda x: x + 1, out_shardings=spec_of(spec))(SQUARE)
    result = sbp.jit(lambda x: x + 1, DEVICES, out_shardings=spec_of(spec))(SQUARE)
    assert result.sharding == wanted.sharding == spec_of(spec)
    assert sbp.jit(lambda x: x + 1, DEVICES, out_shardings=spec)(SQUARE).sharding == spec_of(spec)
    np.testing.assert_array_equal(result, SQUARE + 1)


def test_a_sharding_that_does_not_divide_is_not_that_of_the_result():
    """Then the boundary holds the dim whole, and the spec of the user says otherwise."""
    with pytest.warns(sbp.SbpWarning, match="uneven-boundary"):
        result = sbp.jit(lambda x: x[:7], DEVICES, out_shardings=spec_of(P("x")))(SQUARE)
    assert result.sharding.is_fully_replicated


@pytest.mark.parametrize("option", ["in_shardings", "out_shardings"])
@pytest.mark.parametrize("spec", [P("x", FREE), spec_of(P(FREE))])
def test_unconstrained_dims_are_refused(option, spec):
    options: Any = {option: spec}
    with jax.set_mesh(DEVICES), pytest.raises(ValueError, match="Unconstrained"):
        jax.jit(lambda x: x, **options)(SQUARE)
    refused("UNCONSTRAINED", sbp.jit, lambda x: x, DEVICES, kind=ValueError, **options)
    types: Any = {option.replace("shardings", "types"): spec}
    refused("UNCONSTRAINED", lambda: sbp.jit(lambda x: x, DEVICES, **types)(SQUARE))


OTHERS = {
    kind: jax.make_mesh((8,), ("q",), axis_types=(kind,))
    for kind in (AxisType.Auto, AxisType.Explicit)
}


@pytest.mark.parametrize("kind", sorted(OTHERS, key=str))
@pytest.mark.parametrize("put", [jax.lax.with_sharding_constraint, jax.sharding.reshard])
def test_a_spec_of_another_mesh(kind, put):
    """`jax.jit` refuses an axis that the mesh of the context lacks. One that it has is none of the
    mesh of `sbp.jit`."""

    def own_axis(x):
        return put(x * 2, P("x"))

    def other_axis(x):
        return put(x * 2, P("q"))

    with jax.set_mesh(OTHERS[kind]):
        with pytest.raises(ValueError, match="not found in mesh"):
            jax.jit(own_axis)(SQUARE)
        own, other = sbp.jit(own_axis, DEVICES), sbp.jit(other_axis, DEVICES)
        error = refused(r"\(q=8\), but sbp.jit uses", own, SQUARE, kind=ValueError)
        assert error.code == "bad-placement"
        assert error.span and error.span.line == own_axis.__code__.co_firstlineno + 1
        span = refused(r"^(unknown-axis|bad-placement): ", other, SQUARE).span
        assert span and span.line == other_axis.__code__.co_firstlineno + 1
        (found,) = sbp.jit(own_axis, DEVICES).check(SQUARE).diagnostics
        assert found.code == "bad-placement"


def test_other_programs_do_not_see_another_mesh():
    def fails(x):
        raise RuntimeError("of the user")

    with jax.set_mesh(OTHERS[AxisType.Explicit]):
        np.testing.assert_array_equal(sbp.jit(lambda x: x + 1, DEVICES)(SQUARE), SQUARE + 1)
        whole = sbp.jit(lambda x: jax.lax.with_sharding_constraint(x + 1, P()), DEVICES)(SQUARE)
        np.testing.assert_array_equal(whole, SQUARE + 1)
        assert sbp.jit(jnp.sum, DEVICES).eval_shape(SQUARE).shape == ()
        with pytest.raises(RuntimeError, match="of the user"):
            sbp.jit(fails, DEVICES)(SQUARE)


def test_what_is_moved_is_found_by_shardings(monkeypatch):
    """An error of JAX passes where all arguments lie as the plan takes them, whatever it says."""
    elsewhere = jax.device_put(SQUARE, SingleDeviceSharding(jax.devices()[3]))
    here = jax.device_put(SQUARE, spec_of(P("x")))
    fn = sbp.jit(lambda x: x * 2, DEVICES, in_shardings=spec_of(P("x")))
    with pytest.warns(sbp.SbpWarning, match="input-moved"):
        np.testing.assert_array_equal(fn(elsewhere), SQUARE * 2)
    calls = []

    def refuse(executable, flat):
        calls.append(flat)
        raise ValueError("incompatible devices, committed to another sharding")

    monkeypatch.setattr("sbp.run.execute.Executable.__call__", refuse)
    for x, count in ((here, 1), (elsewhere, 2)):
        calls.clear()
        with pytest.raises(ValueError, match="incompatible devices"):
            fn(x)
        assert len(calls) == count


@pytest.mark.parametrize("order", [slice(4), slice(None, None, -1)], ids=["fewer", "reversed"])
def test_a_set_mesh_of_other_devices(order):
    """The mesh of `sbp.jit` says where the program runs."""
    with jax.set_mesh(jax.sharding.Mesh(DEVICES.devices.flatten()[order], ("q",))):
        fn = sbp.jit(lambda x: x + 1, DEVICES, in_types="x:S(0)")
        for x in (SQUARE, jax.device_put(SQUARE, spec_of(P("x")))):
            np.testing.assert_array_equal(fn(x), SQUARE + 1)
        assert fn.lower(SQUARE).compile() is not None
        parts = sbp.jit(lambda x: x.sum(0), DEVICES, "x:S(0)", "x:P")(SQUARE)
        np.testing.assert_array_equal(parts.reduce(), SQUARE.sum(0))
        uneven = sbp.Padded.of(jax.device_put(SQUARE[:5], spec_of(P())), "x:S(0)", DEVICES)
        np.testing.assert_array_equal(uneven.full(), SQUARE[:5])
        kept = sbp.jit(lambda x: x + 1, DEVICES, out_types=sbp.padded("x:S(0)"))(uneven)
        np.testing.assert_array_equal(kept, SQUARE[:5] + 1)


WRONG = {
    "no such axis": (P("z"), "no axis 'z'"),
    "one of two axes": (P(("x", "z")), "no axis 'z'"),
    "no such dim": (
        P(None, None, "x"),
        r"x:S\(2\) splits dim 2, but the tensor has only dims 0..1",
    ),
    "one device": (SingleDeviceSharding(jax.devices()[0]), "SingleDeviceSharding"),
    "another tree": ({"a": P("x")}, "does not fit"),
}


@pytest.mark.parametrize("option", ["in_shardings", "out_shardings"])
@pytest.mark.parametrize(("sharding", "said"), WRONG.values(), ids=WRONG)
def test_wrong_shardings_are_value_errors_that_name_the_option(option, sharding, said):
    options: Any = {option: sharding}
    with jax.set_mesh(DEVICES):
        assert "ValueError" in outcome(lambda: jax.jit(lambda x: x + 1, **options)(SQUARE))
        text = str(
            refused(said, lambda: sbp.jit(lambda x: x + 1, **options)(SQUARE), kind=ValueError)
        )
    assert option in text and "_types" not in text


def test_keyword_arguments_go_with_in_types_beside_out_shardings():
    options: Any = {"out_shardings": spec_of(P("x"))}
    result = sbp.jit(lambda x, *, y: x + y, DEVICES, in_types=("x:S(0)",), **options)(
        SQUARE, y=SQUARE
    )
    np.testing.assert_array_equal(result, SQUARE + SQUARE)
    refused(
        "in_shardings names positional",
        sbp.jit(lambda x, *, y: x + y, DEVICES, in_shardings=(P("x"),)),
        SQUARE,
        kind=ValueError,
        y=SQUARE,
    )


@pytest.mark.parametrize("option", ["in_types", "out_types", "in_shardings", "out_shardings"])
def test_a_spec_of_more_dims_than_the_array_is_refused(option):
    """As by `jax.jit`, also where the dims are not split."""
    options: Any = {option: P("x", None, None)}
    call = lambda: sbp.jit(lambda x: x, DEVICES, **options).plan(SQUARE)
    refused("is for 3 dims, but the tensor has 2 dims", call, kind=ValueError)
