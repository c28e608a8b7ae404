"""Results have the shapes, dtypes, weak types and values that `jax.jit` gives them."""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.layout import Format, Layout
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P

import sbp
from sbp.api import jit
from tests.same import assert_same_results, both


class Pair(NamedTuple):
    first: Any
    second: Any


BF16 = jnp.ones(4, jnp.bfloat16)
ZEROS = jnp.zeros

WEAK = {
    "product": (lambda x: x * 2, 1.0),
    "argument": (lambda x: (x, x), 1.0),
    "constants": (lambda x: (1, 1.0, True, 2j, None, np.float64(3), np.arange(3)), 1.0),
    "nested": (lambda x, y: {"a": [x, y, x + y], "b": Pair(x * 2, y * 3)}, 1, jnp.ones(3)),
    "strong by numpy": (lambda x: np.float32(3) * x, 1.0),
    "cond": (lambda p, x: jax.lax.cond(p, lambda x: x, lambda x: x * 2, x), True, 1.0),
    "scan": (lambda x: jax.lax.scan(lambda c, _: (c * 2, c), x, None, length=3), 1.0),
    "while": (lambda x: jax.lax.while_loop(lambda c: c < 10, lambda c: c * 2, x), 1.0),
    "loop": (lambda x: jax.lax.fori_loop(0, 3, lambda i, c: c + i, x), 1),
    "filled": (lambda x: (jnp.full((4,), x), jnp.broadcast_to(x, (8,))), 1.0),
    "gradient": (jax.value_and_grad(lambda x: x * x), 3.0),
    "float0": (jax.grad(lambda x, y: x * y, argnums=(0, 1), allow_int=True), 3.0, 2),
    "weak array": (lambda x: x + 1, jnp.asarray(2)),
    "where": (lambda x: jnp.where(x > 0, 1.0, 0.0), 1),
    "complex": (lambda x: x * 1j, 1.0),
    "bool": (lambda x: (x, x & True, x + 1), True),
    "closed over": (lambda x: (BF16, x * BF16), 1.0),
    "no argument": (lambda: (jnp.arange(4), 1.0),),
    "no result": (lambda x: (None, (), {}), 1.0),
    "callback": (lambda x: (jax.debug.callback(lambda _: None, x), x * 2)[1], 1.0),
    "numpy": (lambda x, y: (x + 1, y, x * y), np.int8(3), np.ones(3)),
    "keys": (lambda k: (k, jax.random.split(k), jax.random.key_data(k)), jax.random.key(0)),
}
EMPTY = {
    "slice": (lambda x: x[:, :0], jnp.ones((8, 4))),
    "constant": (lambda x: ZEROS((8, 0)), 1.0),
    "product": (lambda x: x * 2, ZEROS((0, 8))),
    "contracted": (lambda x, y: x @ y, ZEROS((8, 0)), ZEROS((0, 8))),
    "rows": (lambda x, y: x @ y, ZEROS((0, 8)), ZEROS((8, 8))),
    "with another": (lambda x, y: (jnp.concatenate([x, y]), x), ZEROS((0, 4)), jnp.ones((8, 4))),
    "sums": (lambda x: (x.sum(), x.sum(0), x.sum(1), x.max(0, initial=1.0)), ZEROS((8, 0))),
    "sum of a split dim": (lambda x: sbp.split(x, 0, "x").sum(), ZEROS((0, 8))),
    "scan": (lambda x: jax.lax.scan(lambda c, y: (c + y.sum(), c * y), 0.0, x), ZEROS((0, 8))),
    "gather": (lambda x, i: x[i], jnp.ones((8, 4)), ZEROS((0,), int)),
    "reshape": (lambda x: (x.reshape(0, 4), jnp.sort(x), jnp.cumsum(x, 0)), ZEROS((8, 0))),
    "random": (lambda k: jax.random.normal(k, (8, 0)), jax.random.key(1)),
    "keys": (lambda k: (k, jax.random.key_data(k)), jax.random.split(jax.random.key(1), 8)[:0]),
    "lstsq rows": (jnp.linalg.lstsq, ZEROS((0, 3)), ZEROS((0, 2))),
    "lstsq columns": (jnp.linalg.lstsq, ZEROS((3, 0)), ZEROS((3, 2))),
    "det and inverse": (lambda x: (jnp.linalg.det(x), jnp.linalg.inv(x)), ZEROS((3, 0, 0))),
    "svd and qr": (lambda x: (jnp.linalg.svd(x, False), jnp.linalg.qr(x)), ZEROS((0, 3))),
}
CASES = {
    f"{kind}: {name}": (fn, args)
    for kind, cases in (("weak", WEAK), ("empty", EMPTY))
    for name, (fn, *args) in cases.items()
}


@pytest.fixture(scope="module", params=[(8,), (2, 4)], ids=str)
def mesh(request):
    return sbp.make_mesh(request.param, ("x", "y")[: len(request.param)])


@pytest.mark.parametrize(("fn", "args"), CASES.values(), ids=CASES)
def test_results_are_those_of_jax(fn, args, mesh):
    assert_same_results(jax.jit(fn)(*args), sbp.jit(fn, mesh)(*args))


def test_arrays_without_elements_are_held_whole():
    """JAX cannot read a split array that has no elements."""
    f = sbp.jit(
        lambda x: x * 2, sbp.make_mesh((8,), ("x",)), in_types=("x:S(0)",), out_types="x:S(0)"
    )
    with pytest.warns(sbp.SbpWarning, match="uneven-boundary: .* has no elements to split"):
        got = f(ZEROS((8, 0)))
    assert_same_results(ZEROS((8, 0)), got)


def test_donated_arguments_without_elements():
    f = sbp.jit(lambda x, y: (x + 1, y * 2), sbp.make_mesh((8,), ("x",)), donate_argnums=(0, 1))
    assert_same_results((ZEROS((0, 8)), 2 * jnp.ones(8)), f(ZEROS((0, 8)), jnp.ones(8)))


# ---- results on meshes with Explicit axes --------------------------------------------------------
# Plain JAX code on the results of a plan, by the axis types of the mesh.


TYPES = ("data:S(0) model:S(1)", "model:S(1)")
AMBIGUOUS = {
    "take": lambda e, w: e[jnp.zeros((4, 2), jnp.int32)],
    "matmul": lambda e, w: e @ w.T,
}
OTHERS = {
    "reshape": lambda e, w: e.reshape(4, 4, 8),
    "concatenate": lambda e, w: jnp.concatenate([e, e]),
    "add": lambda e, w: e + jnp.ones_like(e),
}


@pytest.mark.parametrize("make_mesh", [sbp.make_mesh, jax.make_mesh], ids=["auto", "explicit"])
@pytest.mark.parametrize("name", [*AMBIGUOUS, *OTHERS])
def test_plain_jax_takes_results(name, make_mesh):
    """On explicit axes JAX refuses the operations whose result it cannot place."""
    args = jnp.arange(128.0).reshape(16, 8), jnp.ones((8, 8))
    mesh = make_mesh((2, 4), ("data", "model"))
    got = sbp.jit(lambda e, w: (e + 0, w + 0), mesh, TYPES, TYPES)(*args)
    after = {**AMBIGUOUS, **OTHERS}[name]
    if make_mesh is jax.make_mesh and name in AMBIGUOUS:
        with pytest.raises(Exception, match="ambiguous"):
            after(*got)
    else:
        np.testing.assert_allclose(after(*got), after(*args))


# ---- the cache of plans --------------------------------------------------------------------------
# Which calls share a plan, and which plans are kept.


SETTINGS = {
    "x64": lambda: jax.enable_x64(True),
    "matmul precision": lambda: jax.default_matmul_precision("highest"),
    "promotion": lambda: jax.numpy_dtype_promotion("strict"),
    "prng": lambda: jax.default_prng_impl("rbg"),
    "threefry": lambda: jax.threefry_partitionable(False),
    "rank promotion": lambda: jax.numpy_rank_promotion("warn"),
    "nans": lambda: jax.debug_nans(True),
    "keys": lambda: jax.legacy_prng_key("error"),
    "bits": lambda: jax.default_device(jax.devices()[1]),
}


def traced(log, x, y):
    """A function whose trace depends on settings of JAX, and that notes each trace."""
    log.append(None)
    return jnp.arange(4.0) @ jnp.arange(4.0), x * y, jax.random.uniform(jax.random.key(0), (4,))


@pytest.mark.parametrize("setting", SETTINGS.values(), ids=SETTINGS)
def test_each_setting_of_jax_has_its_own_plan(setting, mesh):
    log = []
    plain, ours = both(functools.partial(traced, log), mesh)
    args = np.float32(2), np.float32(3)
    assert_same_results(plain(*args), ours(*args))
    with setting():
        assert_same_results(plain(*args), ours(*args))
        count = len(log)
        ours(*args)
    assert_same_results(plain(*args), ours(*args))
    assert len(log) == count, "a call that has a plan is not traced again"


def test_a_mesh_of_the_context_counts_where_the_function_sees_it(mesh):
    log = []
    f = sbp.jit(functools.partial(traced, log), mesh)
    x = jnp.ones(8)
    for context, count in ((sbp.make_mesh((2,), ("other",)), 1), (mesh, 2)):
        f.plan(x, x)
        with jax.set_mesh(context):
            f(x, x)
        assert len(log) == count


def test_static_arguments_of_equal_value_and_other_type(mesh):
    f = sbp.jit(lambda x, n: x * n, mesh, static_argnums=1)
    assert [f(jnp.ones(4, jnp.int32), n).dtype for n in (1, 1.0, True)] == [
        jnp.int32,
        jnp.float32,
        jnp.int32,
    ]


def test_the_plan_that_was_not_used_for_longest_is_dropped(mesh, monkeypatch):
    monkeypatch.setattr(jit, "MOST_PLANS", 2)
    log = []
    f = sbp.jit(functools.partial(traced, log), mesh)
    one, two, three = (jnp.ones(n) for n in (1, 2, 3))
    f(one, one)
    f(two, two)
    f(one, one)
    with pytest.warns(sbp.SbpWarning, match="many-plans: traced was called with more than 2"):
        f(three, three)  # drops the plan of `two`
    f(one, one)
    assert len(log) == 3
    f(two, two)
    assert len(log) == 4


def test_clear_cache(mesh):
    log = []
    f = sbp.jit(functools.partial(traced, log), mesh)
    for _ in range(2):
        f(jnp.ones(8), 1.0)
        f(jnp.ones(8), jnp.ones(8))
    assert len(log) == 2
    f.clear_cache()
    f(jnp.ones(8), jnp.ones(8))
    assert len(log) == 3


# ---- compilations --------------------------------------------------------------------------------
# A loop compiles its step once, wherever the first arguments lie.


LOOP_TYPES = ("d:S(1)", "d:S(0)")
PLACES = {
    "NumPy": lambda x, mesh: x,
    "uncommitted": lambda x, mesh: jnp.asarray(x),
    "split": lambda x, mesh: jax.device_put(x, NamedSharding(mesh, P("d"))),
    "whole": lambda x, mesh: jax.device_put(x, NamedSharding(mesh, P())),
    "another device": lambda x, mesh: jax.device_put(x, jax.devices()[-1]),
}


@pytest.fixture
def compiled():
    """The names of the programs that JAX compiles meanwhile."""
    names: list[str] = []

    def listener(event: str, duration_secs: float, **kwargs: str | int) -> None:
        if event == "/jax/core/compile/backend_compile_duration":
            names.append(str(kwargs["fun_name"]))

    jax.monitoring.register_event_duration_secs_listener(listener)
    yield names
    jax.monitoring.unregister_event_duration_listener(listener)


def counted_step(w, x):
    return w - 0.1 * (x.T @ jnp.tanh(x @ w)), (x @ w).sum()


@pytest.mark.filterwarnings("ignore:input-moved")
@pytest.mark.parametrize(
    ("w_at", "x_at", "devices", "axis", "types", "donated"),
    [
        ("NumPy", "NumPy", 8, AxisType.Auto, LOOP_TYPES, ()),
        ("uncommitted", "uncommitted", 1, AxisType.Auto, LOOP_TYPES, (0,)),
        ("uncommitted", "uncommitted", 8, AxisType.Auto, LOOP_TYPES, (0,)),
        ("uncommitted", "uncommitted", 8, AxisType.Auto, None, (0,)),
        ("uncommitted", "NumPy", 8, AxisType.Explicit, None, (0,)),
        ("uncommitted", "split", 8, AxisType.Explicit, LOOP_TYPES, ()),
        ("NumPy", "split", 8, AxisType.Auto, None, (0,)),
        ("split", "whole", 8, AxisType.Auto, LOOP_TYPES, ()),
        ("another device", "another device", 8, AxisType.Auto, LOOP_TYPES, (0,)),
    ],
)
def test_a_loop_compiles_once(w_at, x_at, devices, axis, types, donated, compiled):
    mesh = jax.make_mesh((devices,), ("d",), axis_types=(axis,))
    rng = np.random.default_rng(0)
    w, x = (rng.standard_normal(s, "float32") for s in ((16, 16), (8, 16)))
    plain, want = jax.jit(counted_step), w
    f = sbp.jit(
        counted_step,
        mesh,
        in_types=types,
        out_types=types and (LOOP_TYPES[0], None),
        donate_argnums=donated,
    )
    state, x = PLACES[w_at](w, mesh), PLACES[x_at](x, mesh)
    total = sums = np.zeros(())
    compiled.clear()
    for _ in range(3):
        state, total = f(state, x)
    assert sum("counted_step" in name for name in compiled) == 1, compiled
    for _ in range(3):
        want, sums = plain(want, np.asarray(x))
    np.testing.assert_allclose(state, want, rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(total, sums, rtol=1e-4, atol=1e-4)


@pytest.mark.filterwarnings("ignore:input-moved")
@pytest.mark.parametrize("spec", [P("d"), P()])
def test_an_array_in_another_layout_is_taken(spec):
    mesh = sbp.make_mesh((8,), ("d",))
    x = np.arange(128, dtype="float32").reshape(8, 16)
    columns = Format(Layout((1, 0)), NamedSharding(mesh, spec))
    f = sbp.jit(lambda x: x @ x.T, mesh, in_types=("d:S(0)",))
    for _ in range(2):
        np.testing.assert_allclose(f(jax.device_put(x, columns)), x @ x.T, rtol=1e-6)


def test_a_plan_that_was_compiled_by_hand_is_not_compiled_again(compiled):
    f = sbp.jit(counted_step, sbp.make_mesh((8,), ("d",)), in_types=LOOP_TYPES)
    w, x = jnp.ones((16, 16)), jnp.ones((8, 16))
    f.lower(w, x).compile()
    f(w, x)
    assert sum("counted_step" in name for name in compiled) == 1, compiled
