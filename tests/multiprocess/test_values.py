"""In several processes programs have the values of one device, and every process has one plan."""

from __future__ import annotations

import re
from pathlib import Path

import jax
import pytest
from jax.experimental import multihost_utils

import sbp
from tests.multiprocess.programs import NAMES, cases
from tests.multiprocess.world import (
    MESHES,
    assert_shards,
    from_first,
    in_all,
    mesh_of,
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
    kinds = {step.kind for planned in plan.program.boxes() for step in planned.box.steps}
    assert case.sends <= kinds

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
    path = tmp_path_factory.mktemp("plans") / "loop.json"
    shown = str(path) if jax.process_index() == 0 else ""
    path = Path(from_first(shown))
    if jax.process_index() == 0:
        sbp.jit(case.fn, mesh).plan(*case.args).save(path)
    multihost_utils.sync_global_devices("written")
    got = sbp.jit(case.fn, mesh, plan=path)(*case.args)
    assert_shards(got, jax.jit(case.fn)(*case.args))


def test_the_recipe(capsys: pytest.CaptureFixture[str]):
    page = Path(__file__).parents[2] / "docs" / "recipes" / "several-processes.md"
    code, shown = re.findall(
        r"^```(?:python|text)\n(.*?)^```$", page.read_text("utf-8"), re.S | re.M
    )
    exec(compile(code, page.name, "exec"), {})
    assert capsys.readouterr().out == (shown if jax.process_index() == 0 else "")
