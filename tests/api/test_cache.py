"""Which calls share a plan, and which plans are kept.

A loop compiles its step once, wherever the first arguments lie.
`plan.save(path)` and `sbp.jit(.., plan=path)`."""

import functools
import json
import os
import subprocess
import sys
import warnings
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.layout import Format, Layout
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P

import sbp
from sbp.api import jit, plan as plans_of_calls
from tests.api.same import assert_same_results, both

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


@pytest.fixture(scope="module")
def mesh():
    return sbp.make_mesh((2, 4), ("x", "y"))


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
    with warnings.catch_warnings(action="error"):
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


# ---- plans in files ------------------------------------------------------------------------------

STEP_TYPES = (("y:S(1)", "y:S(0)"), "x:S(0)")
X = np.random.default_rng(0).normal(size=(16, 8)).astype(np.float32)
W = np.ones((8, 32), np.float32), np.ones((32, 8), np.float32)


def loss(w, x):
    return ((jnp.tanh(x @ w[0]) @ w[1] - x) ** 2).mean()


def step(w, x):
    value, gradient = jax.value_and_grad(loss)(w, x)
    return jax.tree.map(lambda a, b: a - 0.1 * b, w, gradient), value


@pytest.fixture(scope="module")
def path(mesh, tmp_path_factory):
    path = tmp_path_factory.mktemp("plans") / "step.json"
    sbp.jit(step, mesh, in_types=STEP_TYPES).plan(W, X).save(path)
    return path


def no_planning(*_):
    raise AssertionError("a saved plan is not planned again")


def test_a_saved_plan_runs_without_planning(path, mesh, monkeypatch):
    monkeypatch.setattr(plans_of_calls, "fit", no_planning)
    f = sbp.jit(step, mesh, in_types=STEP_TYPES, plan=path)
    assert_same_results(jax.jit(step)(W, X), f(W, X))
    assert f.plan(W, X).report().ok


def test_free_types_take_those_of_the_saved_plan(path, mesh):
    """In a restart the types need not be given again, and shardings of arguments are no pins."""
    f = sbp.jit(step, mesh, plan=str(path))
    w = jax.device_put(W, jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec()))
    with pytest.warns(sbp.SbpWarning, match="input-moved"):
        assert_same_results(jax.jit(step)(W, X), f(w, X))
    assert f.plan(w, X).in_types[0][0] == tuple(map(sbp.parse, STEP_TYPES[0]))


def test_an_abstract_mesh_plans_for_a_mesh_of_devices(mesh, tmp_path):
    f = sbp.jit(
        step, jax.sharding.AbstractMesh((2, 4), ("x", "y")), in_types=STEP_TYPES, hardware="cpu"
    )
    f.plan(W, X).save(tmp_path / "plan.json")
    ours = sbp.jit(step, mesh, in_types=STEP_TYPES, plan=tmp_path / "plan.json")
    assert_same_results(jax.jit(step)(W, X), ours(W, X))


@pytest.mark.parametrize("limit", [None, 1e9])
@pytest.mark.parametrize("budget", [sbp.forbid("permute"), sbp.forbid(None, axis="y")])
def test_a_plan_under_budgets_is_the_plan_again(budget, limit, tmp_path):
    mlp = lambda w, v, x: ((jnp.tanh(x @ w) @ v) ** 2).mean()
    shapes = [jax.ShapeDtypeStruct(s, jnp.float32) for s in ((16, 32), (32, 8), (8, 16))]
    mesh = sbp.make_mesh((4, 2), ("x", "y"))

    def planned(path=None):
        grad = jax.grad(mlp, argnums=(0, 1))
        return sbp.jit(grad, mesh, budgets=[budget], memory_limit=limit, plan=path).plan(*shapes)

    plan = planned()
    plan.save(tmp_path / "plan.json")
    assert str(planned(tmp_path / "plan.json")) == str(plan)


def other(w, x):
    return step(w, x * 2.0)


def with_mesh(sizes, names=("x", "y")):
    return {"mesh": sbp.make_mesh(sizes, names)}


WRONG = {
    "program": ({"fn": other}, "the first difference is mul at .*test_cache.py:"),
    "sizes": ({"args": (W, X[:8])}, "another program: the arguments differ"),
    "mesh": (with_mesh((4, 2)), "made with mesh x=2 y=4, but this call has mesh x=4 y=2"),
    "names": (
        with_mesh((2, 4), ("y", "x")),
        "made with mesh x=2 y=4, but this call has mesh y=2 x=4",
    ),
    "hardware": (
        {"hardware": "tpu-v5e"},
        "made with hardware cpu, but this call has hardware tpu-v5e",
    ),
    "policy": ({"boxing": "reduce"}, "made with boxing auto, but this call has boxing reduce"),
    "budgets": (
        {"budgets": [sbp.forbid("all_to_all")]},
        "made with budgets \\(none\\), but this call has budgets no all",
    ),
    "limit": (
        {"memory_limit": 1e9},
        "made with memory_limit None, but this call has memory_limit 1000000000.0",
    ),
    "input": ({"in_types": (None, "x:S(1)")}, "do not hold in this program: .*input 2 is pinned"),
    "output": ({"out_types": (None, "x:P(sum)")}, "its types do not hold in this program"),
}


@pytest.mark.parametrize("case", WRONG.values(), ids=WRONG)
def test_a_plan_for_something_else_is_refused(case, path, mesh):
    options, said = case
    options = {"fn": step, "mesh": mesh, "plan": path, "args": (W, X)} | options
    args = options.pop("args")
    f = sbp.jit(**options)
    with pytest.raises(sbp.SbpError, match=f"saved-plan: .*{said}") as e:
        f(*args)
    assert "plan again without plan=" in str(e.value) and str(path) in str(e.value)
    (found,) = f.check(*args).diagnostics
    assert found.code == "saved-plan"


@pytest.mark.parametrize("name", ["version of sbp", "version of JAX"])
def test_another_version_is_refused(name, path, mesh, tmp_path):
    (tmp_path / "plan.json").write_text(path.read_text().replace(f'"{name}": "', f'"{name}": "9.'))
    with pytest.raises(sbp.SbpError, match=f"made with {name} 9\\..*, but this call has"):
        sbp.jit(step, mesh, in_types=STEP_TYPES, plan=tmp_path / "plan.json")(W, X)


def test_a_reduction_that_became_a_slice_is_refused(path, mesh, tmp_path):
    text = path.read_text()
    assert " = all_reduce[" in text
    (tmp_path / "plan.json").write_text(text.replace(" = all_reduce[", " = slice[", 1))
    with pytest.raises(sbp.SbpError, match=r"line \d+ .* = slice.*its types give `.* = all_reduce"):
        sbp.jit(step, mesh, in_types=STEP_TYPES, plan=tmp_path / "plan.json")(W, X)


def test_files_that_are_none(mesh, tmp_path, monkeypatch):
    (tmp_path / "binary").write_bytes(b"\xff\xfe")
    (tmp_path / "no").mkdir()
    sbp.jit(step, mesh).plan(W, X).save(good := tmp_path / "good")
    for wrong, said in (("gone", "cannot read"), ("no", "no .json files"), ("binary", "UTF-8")):
        for plans in (tmp_path / wrong, [tmp_path / wrong, good], [good, tmp_path / wrong]):
            with pytest.raises(sbp.SbpError, match=said):
                sbp.jit(step, mesh, plan=plans)(W, X)
    others: list[Any] = [3, object(), ["a", 3], np.arange(3)]
    for wrong in others:
        with pytest.raises(TypeError, match="path of a file"):
            sbp.jit(step, mesh, plan=wrong)
    for nothing in ([], "", ["a", ""]):
        with pytest.raises(ValueError, match="plan has no path"):
            sbp.jit(step, mesh, plan=nothing)
    plan = sbp.jit(step, mesh).plan(W, X)
    with pytest.raises(sbp.SbpError, match="cannot write"):
        plan.save(tmp_path / "no" / "such" / "folder.json")
    for wrong in (others[0], "a\0b", "\ud800"):
        with pytest.raises(sbp.SbpError, match="path of a file"):
            plan.save(wrong)
    monkeypatch.setattr(os, "listdir", lambda path: os.stat(tmp_path / "gone"))
    with pytest.raises(sbp.SbpError, match=r"cannot read .*no: No such file"):
        sbp.jit(step, mesh, plan=tmp_path / "no")(W, X)


def test_several_plans_for_several_shapes(path, mesh, tmp_path, monkeypatch):
    """Each call runs the plan that was made for it; one without a plan says why each was not."""
    folder = tmp_path / "plans"
    folder.mkdir()
    (folder / "notes.txt").write_text("no plan")
    (folder / "a.json").write_text(path.read_text())
    sbp.jit(step, mesh, in_types=STEP_TYPES).plan(W, X[:8]).save(folder / "b.json")
    monkeypatch.setattr(plans_of_calls, "fit", no_planning)
    for plans in (folder, [folder / "b.json", str(path)]):
        f = sbp.jit(step, mesh, in_types=STEP_TYPES, plan=plans)
        for rows in (16, 8, 16):
            assert_same_results(jax.jit(step)(W, X[:rows]), f(W, X[:rows]))
    with pytest.raises(sbp.SbpError, match="saved-plan: none of 2 saved plans is for this") as e:
        f(W, X[:4])
    assert str(e.value).count("another program: the arguments differ") == 2
    assert f"{path}: the saved plan: it was made" in str(e.value) and "b.json: " in str(e.value)


RESTART = """
import sys, jax
from tests.api import test_cache as t
from sbp.api import plan as plans_of_calls
import sbp
plans_of_calls.fit = t.no_planning
mesh = sbp.make_mesh((2, 4), ("x", "y"))
print(sbp.jit(t.step, mesh, in_types=t.STEP_TYPES, plan=sys.argv[1]).plan(t.W, t.X))
"""


def test_another_process_reads_the_plan(path, mesh):
    done = subprocess.run(
        [sys.executable, "-c", RESTART, str(path)], capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == str(sbp.jit(step, mesh, in_types=STEP_TYPES).plan(W, X))


@pytest.mark.parametrize("change", [("lower_bound", 1e30), ("seconds", 0.0), ("memory_prices", 7)])
def test_changed_figures_are_refused(path, mesh, tmp_path, change):
    """No other check sees them: a plan could say that it is proved cheapest."""
    name, value = change
    whole = json.loads(path.read_text())
    whole["figures"][name] = value
    changed = tmp_path / "changed.json"
    changed.write_text(json.dumps(whole))
    with pytest.raises(
        sbp.SbpError, match=r"saved-plan: .*its `figures` or `removed` were changed"
    ):
        sbp.jit(step, mesh, in_types=STEP_TYPES, plan=changed).plan(W, X)


def test_deep_nesting_is_no_plan(mesh, tmp_path):
    deep = tmp_path / "deep.json"
    deep.write_text("[" * 100_000)
    with pytest.raises(sbp.SbpError, match="saved-plan"):
        sbp.jit(step, mesh, plan=deep).plan(W, X)
