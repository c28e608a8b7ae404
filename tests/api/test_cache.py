"""Which calls share a plan, and which plans are kept."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.layout import Format, Layout
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P

import sbp
from sbp.api import jit
from tests.same import assert_same_results, both

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
    noise = jax.random.uniform(jax.random.key(0), (4,))
    return jnp.arange(4.0) @ jnp.arange(4.0), x * y, noise


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


def test_a_mesh_of_the_context_is_no_other_signature(mesh):
    log = []
    f = sbp.jit(functools.partial(traced, log), mesh)
    x = jnp.ones(8)
    f.plan(x, x)
    with jax.set_mesh(mesh):
        f(x, x)
    assert len(log) == 1


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


TYPES = ("d:S(1)", "d:S(0)")
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


CASES = [
    ("NumPy", "NumPy", 8, AxisType.Auto, TYPES, ()),
    ("uncommitted", "uncommitted", 1, AxisType.Auto, TYPES, (0,)),
    ("uncommitted", "uncommitted", 8, AxisType.Auto, TYPES, (0,)),
    ("uncommitted", "uncommitted", 8, AxisType.Auto, None, (0,)),
    ("uncommitted", "NumPy", 8, AxisType.Explicit, None, (0,)),
    ("uncommitted", "split", 8, AxisType.Explicit, TYPES, ()),
    ("NumPy", "split", 8, AxisType.Auto, None, (0,)),
    ("split", "whole", 8, AxisType.Auto, TYPES, ()),
    ("another device", "another device", 8, AxisType.Auto, TYPES, (0,)),
]


@pytest.mark.filterwarnings("ignore:input-moved")
@pytest.mark.parametrize(("w_at", "x_at", "devices", "axis", "types", "donated"), CASES)
def test_a_loop_compiles_once(w_at, x_at, devices, axis, types, donated, compiled):
    mesh = jax.make_mesh((devices,), ("d",), axis_types=(axis,))
    rng = np.random.default_rng(0)
    w, x = (rng.standard_normal(s, "float32") for s in ((16, 16), (8, 16)))
    plain, want = jax.jit(counted_step), w
    f = sbp.jit(
        counted_step,
        mesh,
        in_types=types,
        out_types=types and (TYPES[0], None),
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
    f = sbp.jit(counted_step, sbp.make_mesh((8,), ("d",)), in_types=TYPES)
    w, x = jnp.ones((16, 16)), jnp.ones((8, 16))
    f.lower(w, x).compile()
    f(w, x)
    assert sum("counted_step" in name for name in compiled) == 1, compiled
