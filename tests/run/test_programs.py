"""Values and gradients of the reference programs on every mesh equal `jax.jit` on one device; and
random bits are the slice of the global draw, bit for bit.

What processes compare before they run a plan: equal for one program, unequal for another one.
Primitives of other libraries that are lowered by a function of JAX: that function is typed."""

import functools
import itertools
import re
import warnings
from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import sparse
from jax.experimental.custom_partitioning import custom_partitioning

import sbp
from sbp import _jax
from sbp.api.symbolic import SizedReport
from sbp.run.execute import description, difference, place_array, processes_of, values_digest
from sbp.signatures import registered
from tests.run.programs import CASES, MESHES, NAMES, Case, arguments, assert_same, function_of
from tests.slices import sliced


@cache
def wanted(case: Case):
    """The single-device result: annotations are the identity outside sbp.jit."""
    return jax.jit(function_of(case, NAMES))(*arguments(case))


def shown(x: object) -> str:
    return x.name if isinstance(x, Case) else "x".join(map(str, x)) if isinstance(x, tuple) else ""


@pytest.mark.laws
@pytest.mark.parametrize(
    ("case", "shape"), sliced(itertools.product(CASES, MESHES), 1 / 2), ids=shown
)
def test_equals_one_device(case: Case, shape: tuple[int, ...]):
    names = NAMES[: len(shape)]
    f = sbp.jit(function_of(case, names), sbp.make_mesh(shape, names))
    assert_same(f(*arguments(case)), wanted(case))


@pytest.mark.laws
@pytest.mark.parametrize("shape", [(8,), (2, 4)], ids=["8", "2x4"])
@pytest.mark.parametrize("case", CASES, ids=lambda c: c.name)
def test_all_inputs_split(case: Case, shape: tuple[int, ...]):
    """The same from other types: every first dim that divides is split at the boundary, so
    conversions and uneven slices run too."""
    names = NAMES[: len(shape)]
    mesh = sbp.make_mesh(shape, names)

    def split_first(path, leaf):
        total = 1
        atoms = {}
        for name, n in zip(names, shape, strict=True):
            if leaf.shape and leaf.shape[0] % (total * n) == 0:
                atoms[name], total = sbp.S(0), total * n
        return sbp.NdSbp(atoms)

    f = sbp.jit(function_of(case, names), mesh, in_types=(split_first,) * len(case.shapes))
    assert_same(f(*arguments(case)), wanted(case))


# ---- random bits ---------------------------------------------------------------------------------


def draws(key, x):
    a, b, c = jax.random.split(key, 3)
    uniform = jax.random.uniform(a, x.shape)
    mask = jax.random.bernoulli(b, 0.9, x.shape)
    normal = jax.random.normal(c, (*x.shape, 3))
    return (
        uniform,
        mask,
        jnp.where(mask, x / 0.9, 0),
        normal,
        jax.random.bits(a, x.shape, "uint8"),
        jax.random.randint(b, x.shape, 0, 100),
    )


@cache
def wanted_draws(new_style: bool, rows: int):
    """The draws on one device."""
    key = jax.random.key(7) if new_style else jax.random.PRNGKey(7)
    return jax.jit(draws)(key, jnp.ones((rows, 6)))


DRAWS = list(itertools.product(MESHES, (True, False), (16, 13)))


@pytest.mark.laws
@pytest.mark.parametrize(("shape", "new_style", "rows"), sliced(DRAWS, 1 / 2), ids=str)
def test_draws(shape, new_style, rows):
    names = NAMES[: len(shape)]
    key = jax.random.key(7) if new_style else jax.random.PRNGKey(7)
    x = jnp.ones((rows, 6))

    def split(key, x):
        x = sbp.split(x, 0, *names)
        return jax.tree.map(lambda y: sbp.split(y, 0, *names), draws(key, x))

    f = sbp.jit(split, sbp.make_mesh(shape, names))
    got, want = f(key, x), wanted_draws(new_style, rows)
    for a, b in zip(got, want, strict=True):
        if np.issubdtype(a.dtype, np.floating):
            # Transcendental functions of the same bits differ in the last place between vector
            # lengths.
            np.testing.assert_allclose(a, b, rtol=1e-6)
        else:
            np.testing.assert_array_equal(a, b)
    np.testing.assert_array_equal(np.asarray(got[0]), np.asarray(want[0]))
    bits = [n for n in f.plan(key, x).program.graph.walk() if n.op == "random_bits"]
    typing = f.plan(key, x).program.typing
    if shape != (1,) and rows == 16:
        assert any(any(typing.values[n.outputs[0]]) for n in bits), (
            "no draw was split: the test would show nothing"
        )


KEYS = list(itertools.product(MESHES, ("rbg", "unsafe_rbg"), (16, 13)))


@pytest.mark.laws
@pytest.mark.parametrize(("shape", "impl", "count"), sliced(KEYS, 1 / 2), ids=str)
def test_draws_of_a_batch_of_keys_of_hardware_generators_split(shape, impl, count):
    """The draws of all keys are one stream: each device computes its piece, bit for bit."""
    names = NAMES[: len(shape)]
    keys = jax.random.split(jax.random.key(3, impl=impl), count)

    def draw(keys):
        return jax.vmap(lambda k: (jax.random.bits(k, (37,)), jax.random.normal(k, (5,))))(keys)

    def split(keys):
        return jax.tree.map(lambda y: sbp.split(y, 0, *names), draw(sbp.split(keys, 0, *names)))

    f = sbp.jit(split, sbp.make_mesh(shape, names))
    got, want = f(keys), jax.jit(draw)(keys)
    np.testing.assert_array_equal(got[0], want[0])
    np.testing.assert_allclose(got[1], want[1], rtol=1e-6)
    program = f.plan(keys).program
    bits = [n for n in program.graph.walk() if n.op == "random_bits"]
    if shape != (1,):
        assert bits and all(any(program.typing.values[n.outputs[0]]) for n in bits)


@pytest.mark.laws
def test_a_batch_of_states_is_one_draw():
    """Under `vmap`, JAX draws once, from the first state. The draw splits, and the state after it
    is that after the whole draw."""
    states = jnp.arange(24, dtype=jnp.uint32).reshape(6, 4)
    of_each = jax.vmap(lambda k: jax.lax.rng_bit_generator(k, (3,)))
    (node,) = [e for e in jax.make_jaxpr(of_each)(states).eqns if e.outvars[1:]]
    assert node.invars[0].aval.shape == (4,) and node.outvars[1].aval.shape == (6, 3)

    def split(states):
        after, bits = of_each(sbp.split(states, 0, "x"))
        return after, sbp.split(bits, 0, "x")

    f = sbp.jit(split, sbp.make_mesh((4,), ("x",)))
    assert_same(f(states), jax.jit(of_each)(states), rtol=0)
    program = f.plan(states).program
    (drawn,) = [n for n in program.graph.walk() if n.op == "rng_bit_generator"]
    assert any(program.typing.values[drawn.outputs[1]])


# ---- agreement -----------------------------------------------------------------------------------

X = np.arange(32, dtype=np.float32).reshape(8, 4)


def parts(fn=lambda x: jnp.sin(x) + X, shape=(2, 4), **options):
    mesh = sbp.make_mesh(shape, ("data", "model"))
    return description(sbp.jit(fn, mesh, **options).plan(X).program, mesh)


def test_a_program_that_is_traced_twice_is_one():
    def fn(x):
        return jnp.sin(x) + X.copy()

    def again(x):
        "On other lines."

        return jnp.sin(x) + X.copy()

    assert parts(fn) == parts(again) == parts()


@pytest.mark.parametrize(
    ("other", "part"),
    [
        (lambda: parts(shape=(4, 2)), "mesh"),
        (lambda: parts(in_types="data:S(1)"), "list of arguments"),
        (lambda: parts(lambda x: jnp.cos(x) + X), "program"),
        (lambda: parts(lambda x: jnp.sin(x) + X + 0), "program"),
        (lambda: parts(lambda x: jnp.sin(x) + (X + 1)), "set of constants"),
        (lambda: parts(in_types="data:S(0)", out_types="data:S(1)"), "choice of types"),
    ],
)
def test_the_first_part_that_differs_is_named(other, part):
    pinned = {"in_types": "data:S(0)", "out_types": "data:S(0)"}
    mine = parts(**(pinned if part in ("list of arguments", "choice of types") else {}))
    said = difference({0: mine, 1: other(), 2: mine})
    assert said.startswith(f"the {part} differs") and "processes 0, 2" in said
    assert not difference({0: mine, 1: mine})


def test_elements_are_compared_with_dtype_and_shape():
    values = [X, X + 1, X.astype(np.int32), X.T.copy(), X.astype(jnp.bfloat16), X.reshape(-1)]
    assert len({values_digest(x) for x in values}) == len(values)
    assert values_digest(X) == values_digest(jnp.asarray(X)) == values_digest(X.T.copy().T)
    assert values_digest(3.0) != values_digest(4.0)


def test_one_process_waits_for_none():
    mesh = sbp.make_mesh((8,), ("data",))
    assert processes_of(mesh) == (0,)
    sharding = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("data"))
    assert place_array(X, sharding).sharding == sharding
    assert sbp.jit(jnp.sin, mesh).plan(X)._joint is None
    assert jax.process_count() == 1


# ---- names ---------------------------------------------------------------------------------------
# The compiled program has the user's names: that of the function, of its arguments and of named
# scopes.


def step(w, batch):
    def loss(w):
        with jax.named_scope("ffn"):
            h = jax.nn.relu(batch["x"] @ w)
            with jax.named_scope("inner"):
                h = jnp.sin(h)

        def layer(h, _):
            with jax.named_scope("mlp"):
                return jax.jit(jnp.tanh)(h @ w), None

        with jax.named_scope("layers"):
            h, _ = jax.lax.scan(layer, h, None, length=3)
        return (h**2).sum()

    with jax.named_scope("backward"):
        return jax.value_and_grad(loss)(w)


@pytest.fixture(scope="module")
def hlo():
    f = sbp.jit(step, sbp.make_mesh((2, 4), ("x", "y")), in_types=("x:S(1)", "y:S(0)"))
    return f.plan(jnp.ones((8, 8)), {"x": jnp.ones((16, 8))}).lower().compile().as_text()


@pytest.mark.parametrize(
    "fn",
    [functools.partial(jnp.add, 1.0), functools.partial(lambda y, x: x, 2), lambda x: x, jnp.sin],
    ids=["partial of a library", "partial", "lambda", "library"],
)
def test_names_of_programs_are_those_of_jax(fn):
    module = re.compile(r"module @(\w+)")
    want = module.search(jax.jit(fn).lower(1.0).as_text())
    got = module.search(sbp.jit(fn, sbp.make_mesh((2,), ("x",))).plan(1.0).lower().as_text())
    assert want and got and want.group(1) == got.group(1)


OPERATIONS = r'op_name="jit\(step\)/shard_map/backward/'


@pytest.mark.parametrize(
    "pattern",
    [
        r"^HloModule jit_step,",
        # Operations have their named scopes.
        OPERATIONS + r'jvp\(ffn\)/dot_general"',
        OPERATIONS + r'jvp\(ffn\)/inner/sin"',
        OPERATIONS + r'transpose\(jvp\(ffn\)\)/inner/mul"',
        OPERATIONS + r'jvp\(layers\)/while/body/(\w+/)?mlp/tanh"',
        OPERATIONS + r'transpose\(jvp\(layers\)\)/while/body/(\w+/)?mlp/transpose"',
        # Collectives have the scope of their reader, and arguments the user's names.
        "all-gather.*" + OPERATIONS + r"jvp\(\w+\)",
        'op_name="w"',
        re.escape("op_name=\"batch[\\'x\\']\""),
    ],
)
def test_the_compiled_program_has_the_users_names(hlo, pattern):
    assert re.search(pattern, hlo)


# ---- primitives of other libraries ---------------------------------------------------------------

LINE = jax.sharding.AbstractMesh((8,), ("data",))


def primitive(name, function, multiple=False):
    """A primitive as libraries make them: an implementation, and a lowering by it."""
    found = _jax.Primitive(name)
    found.multiple_results = multiple
    found.def_impl(function)

    def abstract(*avals, **params):
        shapes = jax.eval_shape(lambda *x: function(*x, **params), *avals)
        return jax.tree.map(lambda s: _jax.ShapedArray(s.shape, s.dtype), shapes)

    found.def_abstract_eval(abstract)
    _jax.mlir.register_lowering(found, _jax.mlir.lower_fun(function, multiple_results=multiple))
    _jax.batching.defvectorized(found)
    return found


shifted = primitive("shifted_tanh", lambda x: jnp.tanh(x) + 1)


def both(x, *, like):
    if jax.eval_shape(lambda: x) != like:  # as Lineax does
        raise ValueError("the structure changed")
    return [x.sum(0), jnp.cumsum(x, 1)]


pair = primitive("sum_and_cumsum", both, multiple=True)


def test_their_functions_are_split():
    plan = sbp.jit(lambda x, w: shifted.bind(x @ w) @ w.T, LINE, in_types=("data:S(0)", "B"))
    with warnings.catch_warnings(action="error"):
        plan = plan.plan(jnp.ones((64, 16)), jnp.ones((16, 32)))
    assert plan.cost.bytes_per_device == 0 and "tanh" in str(plan)
    assert "test_programs.py" in str(plan).split("tanh")[1]


@pytest.mark.parametrize("shape", [(16, 8), (5, 3)])
def test_they_compute_what_one_device_does(shape):
    def f(x):
        return shifted.bind(x), *pair.bind(x, like=jax.eval_shape(lambda: x))

    x = jnp.asarray(np.random.default_rng(0).standard_normal(shape), jnp.float32)
    got, want = sbp.jit(f, sbp.make_mesh((2, 4), ("x", "y")))(x), f(x)
    for a, b in zip(got, want, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5)


def test_a_signature_of_the_user_comes_first():
    with registered("shifted_tanh", ["S(0) -> S(0)"]):
        plan = sbp.jit(shifted.bind, LINE, in_types="data:S(0)").plan(jnp.ones((64, 16)))
    assert "shifted_tanh" in str(plan) and plan.cost.bytes_per_device == 0


def test_sparse_products():
    matrix = sparse.BCOO.fromdense(jnp.diag(jnp.arange(1.0, 9.0)))

    def loss(data, v):
        return (sparse.BCOO((data, matrix.indices), shape=matrix.shape) @ v).sum()

    v = jnp.arange(128.0).reshape(8, 16)
    with warnings.catch_warnings(action="error", category=sbp.SbpWarning):
        got = sbp.jit(jax.grad(loss), sbp.make_mesh((8,), ("x",)))(matrix.data, v)
    np.testing.assert_allclose(got, jax.grad(loss)(matrix.data, v), rtol=1e-6)


def partitioned(function):
    """A function with a partitioning of its own, which a plan does not call."""
    found = custom_partitioning(function)
    found.def_partition(
        infer_sharding_from_operands=lambda *a: None,
        partition=lambda *a: None,
        sharding_rule="i j, j k -> i k",
        need_replication_factors=("j",),
    )
    return found


def projected(x, w):
    return jnp.tanh(x / jnp.linalg.norm(x, axis=1, keepdims=True)) @ w


@pytest.mark.parametrize("function", [projected, lambda x, w: x @ w])
def test_partitioned_functions_are_split(function):
    x, w = jnp.arange(64.0).reshape(16, 4), jnp.ones((4, 3))
    f = sbp.jit(partitioned(function), sbp.make_mesh((8,), ("data",)), in_types=("data:S(0)", "B"))
    with warnings.catch_warnings(action="error"):
        assert f.plan(x, w).cost.bytes_per_device == 0
        np.testing.assert_allclose(f(x, w), function(x, w), rtol=1e-6)


def test_at_all_sizes():
    (b,) = jax.export.symbolic_shape("b", constraints=["mod(b, 8) == 0"])
    x = jax.ShapeDtypeStruct((b, 4), jnp.float32)
    report = sbp.jit(shifted.bind, LINE, in_types="data:S(0)").check(x)
    assert isinstance(report, SizedReport)
    assert report.diagnostics == () and report.sizes.status == "every"
