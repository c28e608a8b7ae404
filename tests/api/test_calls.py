"""Ways to write and to call an `sbp.jit` function that `jax.jit` has.
Static and donated arguments, and arguments that are no arrays, as `jax.jit` takes them."""

import copy
import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import sbp
from tests.cases import case_name
from tests.same import assert_same_results, both, outcome, refused

X = jnp.arange(16.0).reshape(8, 2)


# ---- decorators and meshes ----------------------------------------------------------------------


@sbp.jit
def bare(x):
    return x * 2


@sbp.jit(static_argnames="n")
def with_options(x, n):
    return x * n


@functools.partial(sbp.jit, in_types=("x:S(0)",))
def partial(x):
    return x.sum()


def test_a_decorator_takes_the_mesh_of_the_context(mesh):
    with jax.set_mesh(mesh):
        assert_same_results(X * 2, bare(X))
        assert_same_results(X * 3, with_options(X, 3))
        assert_same_results(X.sum(), partial(X))
        assert bare.mesh == mesh and bare(X).sharding.mesh == mesh
        assert partial.plan(X).in_types[0][0] == sbp.parse("x:S(0)")


def test_each_mesh_of_the_context_has_its_own_plan():
    used = []
    for sizes in ((8,), (2,), (8,)):
        mesh = jax.make_mesh(sizes, ("x",))  # Explicit, as jax.set_mesh is used
        with jax.set_mesh(mesh):
            used.append(partial.plan(X))
            assert partial(X).sharding.mesh == mesh
    assert used[0] is used[2] and used[0] is not used[1]


def test_an_abstract_mesh_of_the_context():
    with jax.sharding.use_abstract_mesh(jax.sharding.AbstractMesh((4,), ("x",))):
        assert partial.plan(X).cost.bytes_per_device > 0


def test_a_mesh_without_axes():
    mesh = jax.sharding.Mesh(np.array(jax.devices()[0]), ())
    step = jax.value_and_grad(lambda x: (jnp.sin(x) @ x.T).sum())
    assert_same_results(step(X), sbp.jit(step, mesh)(X))
    region = sbp.manual(jnp.sin, in_types=("B",), out_types="B")
    for call, said in (
        (lambda: sbp.jit(lambda x: sbp.split(x, 0, "x"), mesh)(X), "unknown-axis"),
        (lambda: sbp.jit(region, mesh)(X), "needs a mesh axis"),
        (lambda: sbp.jit(jnp.sin, mesh).plan(X).report().picture(), "the mesh has no axes"),
    ):
        refused(said, call)


@pytest.mark.parametrize("method", ["__call__", "plan", "lower", "eval_shape", "trace"])
def test_no_mesh_is_an_error_that_says_what_to_do(method):
    refused(r"bare has no mesh; pass mesh= to sbp\.jit, or call it", getattr(bare, method), X)
    (found,) = bare.check(X).diagnostics
    assert "has no mesh" in found.title


REFUSED: dict[str, tuple[type[Exception], str, Any]] = {
    "a mesh in place of the function": (TypeError, "a function, with the mesh after it", sbp.jit),
    "a plan for a closure with a tracer": (
        TypeError,
        "closes over a value that another transformation",
        lambda mesh: jax.jit(lambda x: sbp.jit(lambda y: y * x, mesh).plan(2.0))(1.0),
    ),
    "an unknown option of the compiler": (
        jax.errors.JaxRuntimeError,
        "xla_no_such_option",
        lambda mesh: sbp.jit(jnp.sin, mesh, compiler_options={"xla_no_such_option": 1})(X),
    ),
    "a negative number beyond a variadic call": (
        ValueError,
        "static_argnums has -3, but the call has 1 positional",
        lambda mesh: sbp.jit(lambda *args: args, mesh, static_argnums=-3)(1.0),
    ),
    **{
        f"the {name} of JAX": (
            sbp.SbpError,
            f"takes no {name}=.*the mesh names the devices",
            lambda mesh, name=name: functools.partial(sbp.jit, **{name: "cpu"})(jnp.sin, mesh),
        )
        for name in ("device", "backend")
    },
    "in_shardings beside in_types": (
        sbp.SbpError,
        "set the same types",
        lambda mesh: sbp.jit(jnp.sin, mesh, in_shardings=spec("x"), in_types=(sbp.S(0),)),
    ),
    "out_shardings beside out_types": (
        sbp.SbpError,
        "set the same types",
        lambda mesh: sbp.jit(jnp.sin, mesh, out_shardings=spec("x"), out_types=sbp.S(0)),
    ),
    "a sharding on another mesh": (
        sbp.SbpError,
        "build the sharding on the mesh of sbp.jit",
        lambda mesh: sbp.jit(
            jnp.add,
            mesh,
            in_shardings=(
                spec("x"),
                jax.sharding.NamedSharding(sbp.make_mesh((8,), ("z",)), spec("z")),
            ),
        ),
    ),
}


@pytest.mark.parametrize(("kind", "said", "call"), REFUSED.values(), ids=REFUSED)
def test_what_is_refused_says_why(kind, said, call, mesh):
    with pytest.raises(kind, match=said):
        call(mesh)


def test_the_decorator_with_a_mesh(mesh):
    @sbp.jit(mesh=mesh, in_types=("x:S(0)",))
    def f(x):
        """What f is."""
        return x + 1

    assert_same_results(X + 1, f(X))
    assert (f.__name__, f.__doc__) == ("f", "What f is.")


# ---- methods ------------------------------------------------------------------------------------


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class Model:
    w: jax.Array

    def apply(self, x):
        return x @ self.w

    jax_call = jax.jit(apply)
    sbp_call = sbp.jit(apply)

    @functools.partial(sbp.jit, static_argnums=0)
    def constant(self, x):
        return x * 2

    __hash__ = object.__hash__


def test_methods(mesh):
    model = Model(jnp.ones((2, 4)))
    with jax.set_mesh(mesh):
        assert_same_results(model.jax_call(X), model.sbp_call(X))
        plan = model.constant.plan(X)
        for _ in range(2):  # the second call has the key of the first
            assert_same_results(X * 2, model.constant(X))
            assert_same_results(X * 2, plan(model, X))
        assert model.sbp_call.plan(X).in_shardings[0].w.mesh == mesh and model.sbp_call.check(X).ok
        assert model.sbp_call.eval_shape(X).shape == (8, 4)
        assert "jit_apply" in model.sbp_call.lower(X).as_text()
        assert model.sbp_call.trace(X).request.graph.input_names == ("self.w", "x")
        model.sbp_call.clear_cache()
    assert model.constant == model.constant and {model.constant: 1}[model.constant]
    assert model.constant != Model(model.w).constant
    assert model.sbp_call.__name__ == "apply" and isinstance(Model.sbp_call, sbp.Jitted)


def test_attributes_of_the_function_hide_no_method(mesh):
    fn = lambda x: x * 2
    vars(fn)["plan"] = "an attribute"
    assert_same_results(X * 2, sbp.jit(fn, mesh).plan(X)(X))


def test_a_function_that_reads_the_mesh_of_the_context(mesh):
    f = sbp.jit(lambda x: x * (2 if jax.sharding.get_abstract_mesh().empty else 3), mesh)
    assert_same_results(X * 2, f(X))
    with jax.set_mesh(mesh):
        assert_same_results(X * 3, f(X))


# ---- inside other transformations ---------------------------------------------------------------


def test_compiler_options_inside_another_jit(mesh, tmp_path):
    f = sbp.jit(lambda x: x * 2, mesh, compiler_options={"xla_cpu_enable_fast_math": False})
    assert_same_results(X * 2, jax.jit(f)(X))
    assert_same_results(X * 2, f.trace(X).lower().compile()(X))
    f.plan(X).export(tmp_path / "artifact")
    assert "compiler_options={'xla_cpu_enable_fast_math': False}" in f.plan(X).source()


def test_padded_arrays_inside_another_jit(mesh):
    held = sbp.Padded.of(np.ones((13, 8), np.float32), "x:S(0)", mesh)
    with pytest.warns(sbp.SbpWarning, match=r"nested-jit: .*takes sbp\.Partial or sbp\.Padded"):
        doubled = jax.jit(sbp.jit(lambda x: x * 2, mesh, in_types="y:S(1)"))(held)
    np.testing.assert_array_equal(doubled, np.full((13, 8), 2.0))


OUTER = {
    "jit": lambda f: jax.jit(f)(3.0),
    "grad": lambda f: jax.grad(f)(3.0),
    "vmap": lambda f: jax.vmap(f)(jnp.arange(3.0)),
    "scan": lambda f: jax.lax.scan(lambda c, x: (c + f(x), f(c)), 1.0, jnp.arange(3.0)),
    "eval_shape": lambda f: jax.eval_shape(f, 3.0),
}


@pytest.mark.parametrize("outer", OUTER.values(), ids=OUTER)
def test_inside_another_transformation_a_closure_of_its_values_runs_as_it_is(outer, mesh):
    program = lambda jit: lambda x: jit(lambda y: y * x)(2.0)

    with pytest.warns(sbp.SbpWarning, match="nested-jit"):
        got = outer(program(lambda f: sbp.jit(f, mesh)))
    assert_same_results(outer(program(jax.jit)), got) if outer is not OUTER["eval_shape"] else None


def test_disable_jit(mesh):
    with jax.disable_jit():
        assert sbp.jit(lambda x: 2.0 if x > 0 else 3.0, mesh)(1.0) == 2.0


# ---- pytree nodes of the user -------------------------------------------------------------------


@jax.tree_util.register_pytree_with_keys_class
class Strict:
    """A node that takes nothing but arrays."""

    def __init__(self, left, right):
        for leaf in (left, right):
            if not isinstance(leaf, jax.Array | np.ndarray):
                raise TypeError(f"no array: {leaf!r}")
        self.left, self.right = left, right

    def tree_flatten_with_keys(self):
        key = jax.tree_util.GetAttrKey
        return ((key("left"), self.left), (key("right"), self.right)), None

    @classmethod
    def tree_unflatten(cls, _, children):
        return cls(*children)


@pytest.mark.parametrize("in_types", [None, ("x:S(0)", None), (None, {"b": "y:S(0)"})], ids=str)
def test_nodes_that_check_their_leaves(in_types, mesh):
    swap = lambda node, tree: {"n": Strict(node.right, node.left + 1), "t": tree["b"] * 2}
    ours = sbp.jit(swap, mesh, in_types=in_types)
    node, tree = Strict(X, X + 1), {"b": X}
    assert jax.tree.leaves(ours.eval_shape(node, tree))[0].shape == (8, 2)
    plan = ours.plan(node, tree)
    nodes = plan.in_types[0][0], plan.out_shardings["n"], plan.in_shardings[0]
    assert [set(node) for node in nodes] == [{"left", "right"}] * 3
    got = ours(node, tree)
    assert isinstance(got["n"], Strict)
    assert_same_results(jax.tree.leaves(jax.jit(swap)(node, tree)), jax.tree.leaves(got))


def test_donated_nodes_keep_their_types(mesh):
    """A donated argument and the first result of its structure have the same types."""
    f = sbp.jit(
        lambda node, x: (Strict(node.left + x.sum(), node.right), x),
        mesh,
        in_types=("x:S(0)", None),
        donate_argnums=0,
    )
    plan = f.plan(Strict(X, X), X)
    assert plan.out_types[0] == plan.in_types[0][0]


# ---- other ways to ask --------------------------------------------------------------------------


def test_eval_shape_has_weak_types(mesh):
    plain, ours = both(lambda x, n: {"a": x * n, "b": [x + X]}, mesh, static_argnums=1)
    assert plain.eval_shape(1.0, 2) == ours.eval_shape(1.0, 2)
    assert ours.eval_shape(1.0, 2)["a"].weak_type


@pytest.mark.parametrize("keep", [False, True])
def test_unused_arguments(keep, mesh):
    lowered = sbp.jit(lambda x, y: x + 1, mesh, keep_unused=keep).lower(X, X)
    assert len(jax.tree.leaves(lowered.compile().input_shardings)) == 1 + keep


# ---- shardings ----------------------------------------------------------------------------------


spec = jax.sharding.PartitionSpec
SHARDINGS = {
    "one for all": (spec("x"), None),
    "of each argument": ((spec("x"), spec(None, "x")), None),
    "a list": ([spec("x"), None], None),
    "a tree": (({"a": spec("x"), "b": None}, spec()), spec("y")),
    "of results": (None, (spec("y"), [spec("x"), None])),
}


def named(tree, mesh):
    return jax.tree.map(
        lambda s: s if s is None else jax.sharding.NamedSharding(mesh, s),
        tree,
        is_leaf=lambda s: s is None or isinstance(s, jax.sharding.PartitionSpec),
    )


@pytest.mark.parametrize("case", SHARDINGS.values(), ids=SHARDINGS)
@pytest.mark.parametrize("name", ["specs", "named"])
def test_shardings_are_types(case, name, mesh):
    def f(a, b):
        a = sum(jax.tree.leaves(a))
        return a + b if case is not SHARDINGS["of results"] else (a, [b, a * b])

    ins, outs = case if name == "specs" else (named(t, mesh) for t in case)
    options = {k: v for k, v in (("in_shardings", ins), ("out_shardings", outs)) if v is not None}
    a = {"a": X, "b": X} if case is SHARDINGS["a tree"] else X
    with jax.set_mesh(jax.sharding.Mesh(mesh.devices, mesh.axis_names)):
        want = jax.jit(f, **options)(a, X)
    got = sbp.jit(f, None if name == "named" else mesh, **options)(a, X)
    assert_same_results(want, got)
    assert all(
        asked is None
        or array.sharding.is_equivalent_to(jax.sharding.NamedSharding(mesh, asked), array.ndim)
        for asked, array in zip(
            jax.tree.leaves(
                case[1] if isinstance(case[1], tuple) else (), is_leaf=lambda s: s is None
            ),
            jax.tree.leaves(got),
            strict=False,
        )
    )


@pytest.mark.parametrize(
    ("options", "args", "kwargs"),
    [
        ({"in_shardings": (None,)}, (X, X), {}),
        ({"in_shardings": (spec("x"), None, None)}, (X, X), {}),
        ({"in_shardings": ({"a": None}, None)}, (X, X), {}),
        ({"in_shardings": spec("x")}, (X,), {"b": X}),
        ({"out_shardings": (None, spec("x"))}, (X, X), {}),
    ],
    ids=str,
)
def test_shardings_of_another_structure(options, args, kwargs, mesh):
    plain, ours = both(lambda a, b: a + b, mesh, **options)
    with jax.set_mesh(mesh):
        want = outcome(lambda: plain(*args, **kwargs))
    assert want == "ValueError" == outcome(lambda: ours(*args, **kwargs))


COMPILED = {
    "one": (lambda x, y: jnp.sin(x + y), (X, 2 * X), {}, {}),
    "a tree by name": (lambda p, *, k: {"o": p["a"] * k, "n": None}, ({"a": X},), {"k": X}, {}),
    "static": (lambda x, n: (x * n, [x]), (X, 3), {}, {"static_argnums": 1}),
    "donated": (lambda x, y: x + 1, (X, X), {}, {"donate_argnums": 0}),
    "unused": (lambda x, y: x, (X, X), {}, {"keep_unused": True}),
    "no argument": (lambda: jnp.arange(3), (), {}, {}),
}


@pytest.mark.parametrize(("fn", "args", "kwargs", "options"), COMPILED.values(), ids=COMPILED)
def test_what_lower_compiles_is_called_as_the_function(fn, args, kwargs, options, mesh):
    want, got = (j.lower(*args, **kwargs) for j in both(fn, mesh, **options))
    assert (want.in_tree, want.out_tree, want.donate_argnums) == (
        got.in_tree,
        got.out_tree,
        got.donate_argnums,
    )
    dynamic = args[:1] if "static_argnums" in options else args
    assert all(
        outcome(functools.partial(lowered.compile(), *dynamic, 1, **kwargs)) == "TypeError"
        for lowered in (want, got)
    )
    copies = [jax.tree.map(jnp.copy, dynamic) for _ in range(2)]
    assert_same_results(want.compile()(*copies[0], **kwargs), got.compile()(*copies[1], **kwargs))


def test_what_lower_compiles_takes_and_returns_padded_and_partial(mesh):
    x = jnp.arange(13.0 * 7).reshape(13, 7)
    rows = sbp.padded("x:S(0)")
    f = sbp.jit(lambda x: {"y": x * 2}, mesh, in_types=rows, out_types=rows)
    held = sbp.Padded.of(x, "x:S(0)", mesh)
    np.testing.assert_array_equal(f.lower(held).compile()(held)["y"], x * 2)
    f = sbp.jit(lambda x: x.sum(0), mesh, in_types="x:S(0)", out_types="x:P(sum)")
    (even,) = f.plan(X).place(X)
    np.testing.assert_allclose(f.lower(X).compile()(even).reduce(), X.sum(0), rtol=1e-6)


# ---- arguments and options -----------------------------------------------------------------------


@pytest.fixture(scope="module")
def pair():
    return sbp.make_mesh((2,), ("x",))


def two(a, b):
    return a * b


defaulted = lambda a, b=2: (a, b)


variadic = lambda *args, **kwargs: (args[0], kwargs.get("k", 0))


worded = lambda a, word="x": a * len(word)


@pytest.mark.parametrize(
    "options",
    [
        {"static_argnums": 5},
        {"static_argnums": -3},
        {"static_argnums": "a"},
        {"static_argnums": 1.5},
        {"static_argnums": (0, "b")},
        {"static_argnames": "c"},
        {"static_argnames": 3},
        {"static_argnames": (1,)},
        {"donate_argnums": 7},
        {"donate_argnums": -3},
        {"donate_argnums": object()},
        {"donate_argnames": "z"},
        {"donate_argnames": ("a", "z")},
        {"static_argnums": 0, "donate_argnums": 0},
        {"static_argnums": 0, "donate_argnames": "a"},
        {"static_argnames": "a", "donate_argnums": (0, 1)},
        {"in_shardings": "x"},
        {"out_shardings": 3},
        {"in_shardings": ({1: None, "a": None}, None)},
    ],
    ids=case_name,
)
def test_options_are_refused_where_jax_refuses_them(options, pair):
    """Both refuse when the function is decorated, with the same kind of exception."""
    want = outcome(lambda: jax.jit(two, **options))
    assert outcome(lambda: sbp.jit(two, pair, **options)) == want
    if want != "ok":
        refused(None, sbp.jit, two, pair, **options)


@pytest.mark.parametrize(
    "fn", [3, None, "f", staticmethod(two), lambda: (yield 1)], ids=lambda fn: type(fn).__name__
)
def test_what_is_no_function_is_refused(fn, pair):
    assert outcome(lambda: jax.jit(fn)) == "TypeError"
    refused("takes a function", sbp.jit, fn, pair, kind=TypeError)


CALLS = {
    "static": (two, {"static_argnums": 1}, (2.0, 3), {}),
    "static by name": (two, {"static_argnames": "b"}, (2.0,), {"b": 3}),
    "static name, passed by position": (two, {"static_argnames": "b"}, (2.0, 3), {}),
    "static number, passed by name": (two, {"static_argnums": 1}, (2.0,), {"b": 3}),
    "twice": (two, {"static_argnums": (1, 1)}, (2.0, 3), {}),
    "negative": (two, {"static_argnums": -1}, (2.0, 3), {}),
    "both negative": (defaulted, {"static_argnums": (0, -1)}, (1, 3), {}),
    "all static": (two, {"static_argnums": (0, 1)}, (2.0, 3), {}),
    "a set of numbers": (two, {"static_argnums": {1}}, (2.0, 3), {}),
    "a number of NumPy": (two, {"static_argnums": np.int64(1)}, (2.0, 3), {}),
    "True": (two, {"static_argnums": True}, (2.0, 3), {}),
    "left out": (defaulted, {"static_argnums": 1}, (1,), {}),
    "keyword only": (lambda a, *, n: a * n, {"static_argnames": "n"}, (2.0,), {"n": 3}),
    "positional only": (lambda a, /, b: a * b, {"static_argnums": 0}, (2.0, 3), {}),
    "variadic": (variadic, {"static_argnums": 1, "static_argnames": "k"}, (1.0, 2), {"k": 3}),
    "beyond a variadic call": (variadic, {"static_argnums": 3}, (1.0, 2), {}),
    "donated name of a variadic": (variadic, {"donate_argnames": "k"}, (1.0,), {"k": 2.0}),
    "numbers and names": (two, {"static_argnums": 0, "static_argnames": "b"}, (2, 3.0), {}),
    "static and donated, negative": (
        two,
        {"static_argnums": -1, "donate_argnums": 0},
        (2.0, 3),
        {},
    ),
    "not hashable": (two, {"static_argnums": 1}, (2.0, [1]), {}),
    "not hashable by name": (two, {"static_argnames": "b"}, (2.0,), {"b": {}}),
    "a static array": (two, {"static_argnums": 1}, (2.0, jnp.ones(3)), {}),
    "a word": (worded, {}, (2.0, "ab"), {}),
    "a static word": (worded, {"static_argnames": "word"}, (2.0, "ab"), {}),
    "a default word": (worded, {}, (2.0,), {}),
    "an object": (two, {}, (2.0, object()), {}),
    "words of NumPy": (two, {}, (2.0, np.array(["a"])), {}),
    "objects of NumPy": (two, {}, (2.0, np.array([object()])), {}),
    "a date": (lambda a, b: a, {}, (2.0, np.datetime64("2020")), {}),
    "None": (lambda a, b: a, {}, (2.0, None), {}),
    "a list": (lambda a, b: b, {}, (2.0, [1, 2.0, True]), {}),
    "an overflow": (two, {}, (2.0, 2**40), {}),
    "one too few": (two, {}, (2.0,), {}),
    "one too many": (two, {}, (2.0, 3.0, 4.0), {}),
    "an unknown name": (two, {}, (2.0,), {"b": 1.0, "c": 2.0}),
    "a class": (dict, {}, (), {"a": 1.0}),
    "a partial": (functools.partial(two, 2.0), {}, (3.0,), {}),
    "a returned word": (lambda a: "a", {}, (2.0,), {}),
    "a returned object": (lambda a: {"x": [object()]}, {}, (2.0,), {}),
    "a returned type": (lambda a: int, {}, (2.0,), {}),
    "a decision": (lambda a: 1 if a > 0 else 2, {}, (2.0,), {}),
    "scalars of NumPy": (two, {}, (np.float16(2), np.int64(3)), {}),
    "arrays of NumPy": (two, {}, (np.arange(4), np.ones((4, 4))), {}),
    "big-endian": (two, {}, (np.arange(4, dtype=">f4"), 1), {}),
    "Fortran order": (lambda a: a + 1, {}, (np.asfortranarray(np.arange(8.0).reshape(2, 4)),), {}),
}


@pytest.mark.parametrize(("fn", "options", "args", "kwargs"), CALLS.values(), ids=CALLS)
def test_calls_end_as_those_of_jax(fn, options, args, kwargs, pair):
    plain, ours = both(fn, pair, **options)
    want = outcome(lambda: plain(*args, **kwargs))
    assert outcome(lambda: ours(*args, **kwargs)) == want
    if want == "ok":
        assert_same_results(plain(*args, **kwargs), ours(*args, **kwargs))


@pytest.mark.parametrize(
    ("options", "deleted"),
    [
        ({"donate_argnums": 0}, (True, False)),
        ({"donate_argnums": (0, 1)}, (True, True)),
        ({"donate_argnums": -1}, (False, True)),
        ({"donate_argnames": "b"}, (False, True)),
        ({"donate_argnums": 0, "donate_argnames": "b"}, (True, False)),
        ({}, (False, False)),
    ],
    ids=case_name,
)
def test_donated_arguments_are_taken(options, deleted, pair):
    f = sbp.jit(lambda a, b: (a + 1, b + 1), pair, **options)
    args = jax.device_put((jnp.ones(8), jnp.ones(8)), f.plan(jnp.ones(8), jnp.ones(8)).in_shardings)
    f(*args)
    assert tuple(x.is_deleted() for x in args) == deleted


@pytest.mark.parametrize("donated", [0, 1, (0, 1)], ids=str)
def test_a_donated_array_is_passed_once(donated, pair):
    """The runtime ends the process where it gets the array twice."""
    f = sbp.jit(lambda a, b: (a + b, a * b), pair, donate_argnums=donated)
    x = jnp.ones((8,))
    refused("is donated, and is the same array as input", f, x, x, kind=ValueError)
    assert not x.is_deleted()
    np.testing.assert_array_equal(f(x, x + 1), ([3] * 8, [2] * 8))


@pytest.mark.parametrize("method", ["__call__", "plan", "lower", "eval_shape", "trace"])
@pytest.mark.parametrize(
    ("args", "kwargs", "said"),
    [
        ((1.0,), {}, "missing 1 required positional argument: 'b'"),
        ((1.0, 2.0, 3.0), {}, "takes 2 positional arguments but 3 were given"),
        ((1.0,), {"b": 1.0, "c": 2.0}, "unexpected keyword argument 'c'"),
        ((1.0, 2.0), {"a": 1.0}, "multiple values for argument 'a'"),
    ],
)
def test_calls_that_the_function_does_not_take(method, args, kwargs, said, pair):
    call = getattr(sbp.jit(two, pair), method)
    refused(f"two was called wrongly: .*{said}", call, *args, kind=TypeError, **kwargs)
    (found,) = sbp.jit(two, pair).check(*args, **kwargs).diagnostics
    assert said in found.title


def test_a_wrapper_may_take_other_arguments_than_what_it_wraps(pair):
    @functools.wraps(two)
    def wrapper(a):
        return two(a, 3.0)

    assert_same_results(jax.jit(wrapper)(2.0), sbp.jit(wrapper, pair)(2.0))


def test_errors_of_the_function_pass_unchanged(pair):
    with pytest.raises(TypeError, match="missing 1 required") as raised:
        sbp.jit(lambda x: two(*[x]), pair)(1.0)
    assert not isinstance(raised.value, sbp.SbpError)


@pytest.mark.parametrize(
    "options",
    [
        *({"mesh": wrong} for wrong in (3, "x", [0], {0}, np.ones(3), slice(1), object())),
        *({"boxing": wrong} for wrong in (3, None, np.ones(3), {"x": 3}, {0: "auto"}, ["auto"])),
        *({"reduce_dtype": wrong} for wrong in ("x", {"x": 1}, 3, object())),
        *({"memory_limit": wrong} for wrong in ("1", -1, 0, True, float("nan"), [1])),
        *({"hardware": wrong} for wrong in ("x", 3, [], object())),
        *({"budgets": wrong} for wrong in (3, "x", [3], {"a": 1})),
        *({"plan": wrong} for wrong in (3, object(), [1])),
        *({"compiler_options": wrong} for wrong in (3, "x", [1])),
        {"keep_unused": np.ones(3)},
        {"in_types": (len, None)},
        {"in_types": ("S(9)", None)},
        {"out_types": (None, None)},
    ],
    ids=case_name,
)
def test_options_of_the_wrong_kind(options, pair):
    refused(None, lambda: sbp.jit(two, **({"mesh": pair} | options)).plan(jnp.ones(8), jnp.ones(8)))


def test_a_copy_of_what_was_planned(pair):
    f = sbp.jit(lambda x: x + 1, pair)
    plan = f.plan(jnp.ones(8))
    assert copy.deepcopy({"f": f, "plan": plan}) == {"f": f, "plan": plan}


@pytest.mark.parametrize("held", ["array", "Padded", "Partial"])
def test_a_deleted_array_is_refused(held, pair):
    """The runtime ends the process where a compiled function gets an array that it has taken."""
    rows = {"array": "x:S(0)", "Padded": sbp.padded("x:S(0)"), "Partial": "x:P"}
    f = sbp.jit(lambda a: a * 2, pair, rows[held], rows[held], donate_argnums=0)
    x = sbp.jit(lambda a: a, pair, out_types=rows[held])(
        jnp.ones((13 if held == "Padded" else 16,))
    )
    f(x)
    refused("input a is deleted: an earlier call took it", f, x)
    kept = sbp.jit(lambda a: a * 2, pair, rows[held], rows[held])
    refused("input a is deleted", kept, x)
    if held == "Partial":
        refused("this Partial is deleted", x.reduce)
    if held == "array":
        for take in (kept.plan(jnp.ones(16)).place, lambda x: sbp.Padded.of(x, rows[held], pair)):
            refused("is deleted", take, x)


def test_a_collective_of_a_named_axis_says_where_it_belongs(mesh):
    with pytest.raises(NameError, match="unbound axis name: x") as caught:
        sbp.jit(lambda x: jax.lax.psum(x, "x"), mesh)(X)
    assert any("sbp.manual" in note for note in caught.value.__notes__)


def test_a_policy_for_another_axis_has_its_line(mesh):
    def program(x):
        with sbp.policy("explicit", "z"):
            return x + 1

    (found,) = sbp.jit(program, mesh).check(X).diagnostics
    assert found.primary and (found.code, found.primary.span.file) == ("unknown-axis", __file__)


def test_a_region_that_jit_does_not_check_is_noted(mesh):
    spec = jax.sharding.PartitionSpec("x")
    own = jax.shard_map(jnp.sin, mesh=mesh, in_specs=spec, out_specs=spec)
    checked = sbp.manual(jnp.sin, in_types=("x:S(0)",), out_types="x:S(0)")
    (found,) = sbp.jit(lambda x: checked(own(x)), mesh).check(X).diagnostics
    assert (found.code, found.severity) == ("not-analysed", "note") and " 1 jax" in found.title
