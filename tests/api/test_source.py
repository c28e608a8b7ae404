"""The source of a plan: it runs without sbp, computes the plan's values bit for bit, and sends what
the plan sends."""

import functools
import re
import runpy
import subprocess
import sys
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import sbp
from benchmarks.plan_sources import operations
from sbp._jax import Settings
from tests.fuzz.generate import generate
from tests.fuzz.oracle import jitted
from tests.run.programs import CASES, NAMES, arguments, function_of
from tests.same import refused

COLLECTIVE = re.compile(
    r"= (\S+|\([^)]*\)) (all-reduce|all-gather|reduce-scatter|all-to-all|collective-permute)\("
)


def module(plan: Any) -> dict[str, Any]:
    """The names of the file of a plan."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "emitted.py")
        plan.source(path)
        try:
            return runpy.run_path(str(path))
        finally:  # a file sets it for its process
            jax.config.update("jax_enable_x64", False)


def sent(lowered: Any) -> Counter[tuple[str, ...]]:
    """The collectives of a compiled program, with the shapes of their results."""
    return Counter(COLLECTIVE.findall(lowered.compile().as_text()))


def assert_same_program(plan: Any, args: Any, *, compiled: bool = True) -> None:
    run, (_, leaves) = module(plan)["run"], plan._reader.read(tuple(args), {})
    flat, *_ = plan.holding.taken(leaves)
    copies = jax.tree.map(jnp.copy, flat)  # the plan may take its arguments by donation
    for got, want in zip(run(*copies), plan._executable.jitted(*flat), strict=True):
        if jnp.issubdtype(got.dtype, jax.dtypes.prng_key):
            got, want = jax.random.key_data(got), jax.random.key_data(want)
        np.testing.assert_array_equal(got, want, strict=True)
    if compiled:
        assert sent(run.lower(*plan._executable.shapes)) == sent(plan.lower())


@pytest.mark.parametrize("shape", [(8,), (2, 4), (2, 2, 2)], ids=["8", "2x4", "2x2x2"])
@pytest.mark.parametrize("case", CASES, ids=lambda c: c.name)
def test_the_same_program(case, shape):
    names = NAMES[: len(shape)]
    args = arguments(case)
    assert_same_program(
        sbp.jit(function_of(case, names), sbp.make_mesh(shape, names)).plan(*args), args
    )


REFUSED = {"random_gamma", "reshard"}
"""Operations of generated programs that have no public function."""


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("seed", range(40))
def test_generated_programs(seed):
    f, args = jitted(generate(seed))
    try:
        plan = f.plan(*args)
        plan.source()
    except sbp.SbpError as error:
        if "plan.source" not in str(error):
            pytest.skip("the program has no typing")
        assert any(f"the operation {name} " in str(error) for name in REFUSED), error
        return
    assert_same_program(plan, args, compiled=False)


def step(params, state, batch, *, scale):
    loss = lambda p: scale * jnp.mean((jnp.tanh(batch["x"] @ p["w"]) - batch["y"]) ** 2)
    value, grads = jax.value_and_grad(loss)(params)
    updates, state = optax.adam(0.1).update(grads, state, params)
    return optax.apply_updates(params, updates), state, {"loss": value, "parts": [value, None]}


def test_the_file_takes_and_returns_what_the_function_does():
    f = sbp.jit(step, sbp.make_mesh((8,), ("d",)), in_types=(None, None, "d:S(0)"))
    rng = np.random.default_rng(0)
    params = {"w": jnp.asarray(rng.normal(size=(16, 8)), "float32")}
    batch = {k: jnp.asarray(rng.normal(size=(32, n)), "float32") for k, n in (("x", 16), ("y", 8))}
    args = params, optax.adam(0.1).init(params), batch
    plan = f.plan(*args, scale=jnp.float32(2))
    got, want = (g(*args, scale=jnp.float32(2)) for g in (module(plan)["step"], plan))
    assert jax.tree.structure(got) == jax.tree.structure(want)
    jax.tree.map(np.testing.assert_array_equal, got, want)


def test_the_file_runs_where_sbp_is_not_installed(tmp_path):
    table = jnp.arange(64.0).reshape(8, 8)  # the function closes over it
    f = sbp.jit(lambda x: x @ table, sbp.make_mesh((8,), ("d",)))
    path = tmp_path / "program.py"
    path.write_text("an older file, which is replaced")
    text = f.plan(jnp.ones((8, 8))).source(path)
    assert path.read_text() == text and path.with_suffix(".npz").exists()
    check = "import sys; sys.modules['sbp'] = None; import numpy as np, program;"
    check += "fn = program.x_lambda; print(np.asarray(fn(np.ones((8, 8), 'float32'))).sum())"
    run = [sys.executable, "-c", check]
    found = subprocess.run(run, cwd=tmp_path, capture_output=True, text=True, check=True)
    assert float(found.stdout) == 8 * 64 * 63 / 2


def test_lines_say_types_bytes_and_lines_of_the_program():
    def ffn(x, w_in, w_out):
        h = jax.nn.relu(x @ w_in)
        return h @ w_out

    mesh = sbp.make_mesh((4,), ("model",))
    shapes = [jax.ShapeDtypeStruct(s, "float32") for s in ((8, 16), (16, 32), (32, 16))]
    f = sbp.jit(ffn, mesh, (None, "model:S(1)", "model:S(0)"), "B", boxing="reduce")
    text = f.plan(*shapes).source()
    line = f"test_source.py:{ffn.__code__.co_firstlineno + 2}"
    reduced = [line for line in text.splitlines() if "lax.psum(" in line or "sent," in line]
    assert any("model:P(sum) -> B, 768.0 B sent" in found for found in reduced), text
    assert re.search(rf"h @ w_out  # model:P\(sum\), at .*{line}", text)


NUMBERS = {
    "uint32": lambda x: jnp.where(
        x > 3, jnp.uint32(2**32 - 1), x.astype("uint32") ^ jnp.uint32(3e9)
    ),
    "uint32 alone": lambda x: x.astype("uint32") * jnp.uint32(0x85EBCA6B),
    "26 dims": lambda x: jnp.tensordot(x.reshape((1,) * 26 + (128,)), x.reshape(128), 1),
    "complex": lambda x: x * complex(jnp.inf, 1) + jnp.complex64(complex(-0.0, -1)),
    "bfloat16": functools.partial(lambda c, x: x[:, :4] * c, jnp.ones(4, "bfloat16")),
    "int4": functools.partial(
        lambda c, x: x[:, :4] * c.astype("float32"), jnp.arange(4, dtype="int4")
    ),
    "NaN": functools.partial(lambda c, x: x[:, :2] * c, jnp.asarray([jnp.nan, -jnp.inf])),
    "empty": functools.partial(lambda c, x: jnp.concatenate([c, x]), jnp.zeros((0, 8))),
    "key": functools.partial(lambda k, x: x * jax.random.normal(k, x.shape), jax.random.key(5)),
    "wide": lambda x: (x.astype("float64") * 0.1).astype("float32"),
}


@pytest.mark.parametrize("name", NUMBERS)
def test_numbers_and_arrays_of_the_program(name):
    args = (jnp.arange(128.0).reshape(16, 8),)
    with jax.enable_x64(name == "wide"):
        plan = sbp.jit(NUMBERS[name], sbp.make_mesh((8,), ("d",))).plan(*args)
        assert_same_program(plan, args, compiled=False)


def test_the_precision_of_products_is_written():
    with jax.default_matmul_precision("highest"):
        plan = sbp.jit(lambda x: x @ x, sbp.make_mesh((8,), ("d",))).plan(jnp.ones((8, 8)))
        assert "lax.Precision.HIGHEST" in plan.source()


def run(run, jax, *rest, **named):
    return run * jax + rest[0] + named["class"]


def test_names_that_the_file_uses_itself():
    x = jnp.arange(8.0)
    plan = sbp.jit(run, sbp.make_mesh((8,), ("d",))).plan(x, x, x, **{"class": x})
    np.testing.assert_array_equal(module(plan)["run_2"](x, x, x, **{"class": x}), x * x + 2 * x)


def test_other_shapes_and_dtypes_are_refused():
    plan = sbp.jit(lambda x: x.mean(), sbp.make_mesh((8,), ("d",))).plan(jnp.ones(8))
    for wrong in (jnp.ones(16), jnp.ones(8, "int32")):
        with pytest.raises(ValueError, match=r"the plan takes float32\[8\] and not"):
            module(plan)["x_lambda"](wrong)


def layers(params, x):
    def layer(w, x):
        centered = x - x.mean(-1, keepdims=True)
        return x + jnp.tanh(centered @ w) @ w.T

    def loss(params):
        y = x
        for w in params:
            y = layer(w, y)
        return (y**2).mean()

    return jax.tree.map(lambda w, g: w - 0.1 * g, params, jax.grad(loss)(params))


def test_equal_layers_are_one_function():
    rng = np.random.default_rng(0)
    params = [jnp.asarray(rng.normal(size=(16, 16)), "float32") for _ in range(12)]
    args = params, jnp.asarray(rng.normal(size=(32, 16)), "float32")
    mesh = sbp.make_mesh((2, 4), ("data", "model"))
    plan = sbp.jit(layers, mesh, ("model:S(1)", "data:S(0)")).plan(*args)
    text = plan.source()
    assert "def layer(" in text and "def layer_gradient(" in text
    assert text.count("lax.tanh(") <= 3  # one layer with its neighbors, not twelve
    assert_same_program(plan, args)


def differing_layers(x):
    for k in range(3):  # in an array of more numbers than Python prints, and on one platform
        bias = np.zeros(2048, "float32")
        bias[1000] = k
        x = jax.lax.platform_dependent(x, cpu=lambda x, k=k: x * (k + 1), tpu=lambda x: x * 2)
        x = jnp.tanh(x + jnp.asarray(bias)) * 0.5 + jnp.sin(x) - jnp.cos(x)
        x = x / (1 + jnp.abs(x).max()) + jnp.exp(-x * x)
    return x


def test_layers_that_differ_are_several_functions():
    x = jnp.asarray(np.random.default_rng(0).normal(size=(8, 2048)), "float32")
    plan = sbp.jit(differing_layers, sbp.make_mesh((8,), ("d",)), "d:S(0)").plan(x)
    assert_same_program(plan, (x,), compiled=False)


def test_an_expression_has_the_operations_of_a_line():
    f = sbp.jit(lambda x: jnp.tanh(2 * jnp.exp(x) - 1) / 2, sbp.make_mesh((2,), ("d",)), "d:S(0)")
    assert "lax.tanh(2.0 * lax.exp(x) - 1.0) / 2.0" in f.plan(jnp.ones(8)).source()


def test_a_scan_for_tpu_is_readable_and_the_same_program():
    """Its stacks begin as memory that nothing has written; the file has the function for that."""

    def layers(x, w):
        def layer(h, w):
            return jnp.tanh(h @ w), h

        return jax.lax.scan(layer, x, w, reverse=True)

    mesh = jax.sharding.AbstractMesh((8,), ("d",))
    shapes = (jax.ShapeDtypeStruct(s, "float32") for s in ((64, 32), (5, 32, 32)))
    plan = sbp.jit(layers, mesh, ("d:S(0)", None), hardware="tpu-v5e").plan(*shapes)
    text = plan.source()
    assert "scan_in_place(layer, (x,), (w,), (((8, 32), jnp.float32),), length=5, reverse" in text
    assert "dynamic_slice" not in text
    names: dict[str, Any] = {}
    with mock.patch.object(jax, "make_mesh", jax.sharding.AbstractMesh):
        exec(compile(text, "layers", "exec"), names)
    mine, plans = (
        Counter(operations(jax.make_jaxpr(run)(*plan._executable.shapes), "tpu"))
        for run in (names["run"], plan._executable.jitted)
    )
    assert mine == plans and any(name.startswith("while") for name in mine)


def test_equal_loops_are_one_function():
    def program(x):
        for _ in range(3):
            x, _ = jax.lax.scan(lambda c, _: (jnp.sin(c), None), x, length=3)
        return x

    text = sbp.jit(program, sbp.make_mesh((8,), ("d",))).plan(jnp.ones(8)).source()
    assert text.count("jnp.sin(") + text.count("lax.sin(") <= 2


TABLE = jnp.array([-1.0, 300.0])
LARGE = jnp.linspace(-300.0, 300.0, 32)


@pytest.mark.parametrize(
    "program",
    [
        lambda x: x + TABLE.astype(jnp.uint8)[0] + LARGE.sum(),
        lambda x: jax.lax.scan(lambda c, _: (c + TABLE.astype("u1")[1], None), x, length=2)[0],
        lambda x: jax.lax.fori_loop(0, x.sum().astype(int), lambda i, c: c + LARGE[:2], x),
    ],
    ids=["arrays", "scan", "while"],
)
@pytest.mark.parametrize("literals", [False, True])
def test_jax_computes_with_the_arrays_that_a_function_closes_over(program, literals):
    """Such arrays are constants of a jaxpr, or with a setting of JAX its literals."""
    x = jnp.ones(2)
    jax.config.update("jax_use_simplified_jaxpr_constants", literals)
    try:
        plan = sbp.jit(program, sbp.make_mesh((1,), ("d",))).plan(x)
        assert_same_program(plan, [x], compiled=False)
    finally:
        jax.config.update("jax_use_simplified_jaxpr_constants", False)


def two_sums(x, y):
    return jnp.cumsum(x), jnp.cumsum(y)


def shadowed(x, s):
    return jax.lax.while_loop(lambda c: c.sum() < s, lambda c: c * 2, x)


def named_as_parameters(i, y):
    def s(y):
        return jnp.sin(y) * y + y

    def x(y):
        return jnp.cos(y) * y + y

    return jax.lax.switch(i, [s, x], y)


AXES_OF_TWO = "x:S(0)", "y:S(0)"


@pytest.mark.parametrize(
    ("program", "args", "types"),
    [
        (lambda p, x: jax.lax.cond(p, lambda x: jnp.sin(x), lambda x: jnp.cos(x), x), (True,), ()),
        (lambda i, x: jax.lax.switch(i, [jnp.sin, jnp.cos], x), (1,), ()),
        (two_sums, (jnp.arange(8.0),), AXES_OF_TWO),
        (named_as_parameters, (1,), ()),
    ],
    ids=["cond", "switch", "axes", "names"],
)
def test_functions_that_differ_in_a_word_are_two(program, args, types):
    mesh = sbp.make_mesh((2, 2), ("x", "y"))
    args = (*args, jnp.arange(8.0) + 1)
    assert_same_program(
        sbp.jit(program, mesh, types or None, types or None).plan(*args), args, compiled=False
    )


def test_a_loop_may_read_a_value_with_the_name_of_its_state():
    args = jnp.ones(8), jnp.float32(99)
    plan = sbp.jit(shadowed, sbp.make_mesh((8,), ("d",))).plan(*args)
    assert_same_program(plan, args, compiled=False)


@pytest.mark.parametrize(
    ("program", "named"),
    [
        (lambda x: jax.pure_callback(np.sin, x, x), "pure_callback"),
        (lambda x: jax.random.gamma(jax.random.key(0), x), "random_gamma"),
        (lambda x: x.at[jnp.array([1, 3])].apply(jnp.sin), "scatter"),  # not one that stores
    ],
    ids=["callback", "gamma", "apply"],
)
def test_what_has_no_source_is_named(program, named):
    plan = sbp.jit(program, sbp.make_mesh((2,), ("d",)), in_types="d:S(0)").plan(jnp.ones(8))
    refused(rf"plan\.source: the operation {named} has no source", plan.source)


def test_draws_under_other_settings_have_no_source():
    def draw(x):
        with jax.threefry_partitionable(False):
            return x + jax.random.uniform(jax.random.key(0), x.shape)

    f, x = sbp.jit(draw, sbp.make_mesh((2,), ("d",))), jnp.ones(8)
    refused("random_.* under another jax.threefry_partitionable", f.plan(x).source)
    before = Settings.current().threefry_partitionable
    try:
        with jax.threefry_partitionable(False):
            assert_same_program(f.plan(x), [x], compiled=False)
    finally:  # the file sets what it needs
        jax.config.update("jax_threefry_partitionable", before)
