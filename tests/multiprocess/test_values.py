"""In several processes programs have the values of one device, and every process has one plan;
`sbp.Partial`, effects and regions written by hand."""

import re
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.experimental import multihost_utils

import sbp
from sbp.moe.hosts import from_first, is_first
from tests.multiprocess.programs import NAMES, cases, numbers
from tests.multiprocess.world import (
    MESHES,
    assert_shards,
    in_all,
    mesh_of,
    put,
    uneven_boundaries,
)

pytestmark = pytest.mark.multiprocess


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("mesh_name", MESHES)
def test_values_and_plans(mesh_name: str, name: str):
    mesh = mesh_of(mesh_name)
    case = cases(mesh.axis_names)[name]
    want = jax.jit(case.fn)(*case.args)
    f = sbp.jit(case.fn, mesh, in_types=case.types, donate_argnums=case.donate)
    shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), case.args)
    with uneven_boundaries():
        plan = f.plan(*shapes)
    assert len(set(in_all(str(plan)))) == 1
    assert case.sends <= {
        step.kind for planned in plan.program.boxes() for step in planned.box.steps
    }

    def fed(x, sharding):
        return jax.make_array_from_callback(x.shape, sharding, lambda index: x[index])

    args = jax.tree.map(fed, case.args, plan.in_shardings)
    with uneven_boundaries():
        got = f(*args)
        assert_shards(got, want, exact=case.exact)
        for number in case.donate:
            assert all(x.is_deleted() for x in jax.tree.leaves(args[number]))
        if case.donate:  # a second step, on what the first returned
            again = f(*got[: len(case.donate)], *args[len(case.donate) :])
            want = jax.jit(case.fn)(*want[: len(case.donate)], *case.args[len(case.donate) :])
            assert_shards(again, want, exact=case.exact)


def test_all_processes_run_a_plan_that_one_wrote(tmp_path_factory: pytest.TempPathFactory):
    mesh = mesh_of("2x4")
    case = cases(mesh.axis_names)["loop"]
    folder = tmp_path_factory.mktemp("plans")
    path = Path(from_first(lambda: str(folder / "loop.json")))
    if is_first():
        sbp.jit(case.fn, mesh).plan(*case.args).save(path)
    multihost_utils.sync_global_devices("written")
    assert_shards(sbp.jit(case.fn, mesh, plan=path)(*case.args), jax.jit(case.fn)(*case.args))


def test_the_recipe(capsys: pytest.CaptureFixture[str]):
    page = Path(__file__).parents[2] / "docs" / "recipes" / "several-processes.md"
    code, shown = re.findall(
        r"^```(?:python|text)\n(.*?)^```$", page.read_text("utf-8"), re.S | re.M
    )
    exec(compile(code, page.name, "exec"), {})
    assert capsys.readouterr().out == (shown if jax.process_index() == 0 else "")


X = numbers(16, 8)


@pytest.mark.parametrize("name", ["8", "2x4"])
@pytest.mark.parametrize("op", ["sum", "max"])
def test_partial_results_come_back_reduced_and_go_in(name: str, op: str):
    mesh = mesh_of(name)
    t = " ".join(f"{axis}:P({op})" for axis in mesh.axis_names)
    spec = tuple(mesh.axis_names)
    fn = (lambda x: x.sum(0)) if op == "sum" else (lambda x: x.max(0))
    y = sbp.jit(fn, mesh, in_types=sbp.NdSbp({a: sbp.S(0) for a in spec}), out_types=t)(
        put(X, mesh, spec)
    )
    assert isinstance(y, sbp.Partial) and y.parts.shape == (*mesh.devices.shape, 8)
    assert_shards(y.reduce(), fn(X))
    assert_shards(sbp.jit(lambda y: y * 2 + 1, mesh, in_types=t)(y), fn(X) * 2 + 1)


def test_callbacks_run_once_over_all_processes(capfd: pytest.CaptureFixture[str]):
    mesh = mesh_of("2x4")
    seen: list[np.ndarray] = []

    def fn(x):
        jax.debug.print("the sum is {}", x.astype(int).sum())
        jax.debug.callback(lambda value: seen.append(np.asarray(value)), x[0])

        def step(total, row):
            jax.debug.callback(lambda value: seen.append(np.asarray(value)), row.sum())
            return total + row.sum(), None

        return lax.scan(step, jnp.float32(0), x)[0]

    x = np.round(X * 4)
    got = sbp.jit(fn, mesh, in_types="data:S(0) model:S(1)")(put(x, mesh, "data", "model"))
    assert_shards(got, x.sum())
    jax.effects_barrier()
    printed = capfd.readouterr().out.count(f"the sum is {int(x.sum())}\n")
    if jax.process_index() == 0:
        assert printed == 1
        assert sorted(v.shape for v in seen) == [()] * 16 + [(8,)]
        np.testing.assert_array_equal(next(v for v in seen if v.shape), x[0])
    else:
        assert not printed and not seen


def test_a_partitioned_callback_sees_the_shards_of_its_process():
    mesh = mesh_of("2x4")
    seen: list[np.ndarray] = []

    def fn(x):
        jax.debug.callback(lambda part: seen.append(np.asarray(part)), x, partitioned=True)
        return x + 1

    x = put(X, mesh, "data", "model")
    sbp.jit(fn, mesh, in_types="data:S(0) model:S(1)")(x)
    jax.effects_barrier()
    want = [np.asarray(s.data) for s in x.addressable_shards]
    assert sorted(v.tobytes() for v in seen) == sorted(v.tobytes() for v in want)


def test_a_pure_callback():
    mesh = mesh_of("8")

    def fn(x):
        return jax.pure_callback(lambda v: np.asarray(v) * 2, jax.typeof(x), x).sum(0)

    assert_shards(sbp.jit(fn, mesh, in_types="data:S(0)")(put(X, mesh, "data")), X.sum(0) * 2)


def test_a_region_written_by_hand():
    """One process may plan and check by itself, which tries the claims of the region."""
    x, w = X, numbers(8, 4, seed=3)
    region = sbp.manual(
        lambda x, w: lax.psum(x @ w, "model"),
        in_types=("data:S(0) model:S(1)", "model:S(0)"),
        out_types="data:S(0)",
    )
    f = sbp.jit(lambda x, w: region(x, w) * 2, mesh_of("2x4"))
    if jax.process_index() == 0:
        assert f.check(x, w).ok and f.plan(x, w).cost.bytes_per_device > 0
    assert_shards(f(x, w), x @ w * 2)
