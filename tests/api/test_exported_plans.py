"""`plan.export(path)`: the file runs in a process that cannot import sbp."""

import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import sbp
from tests.api.test_saved_plans import TYPES, W, X, step
from tests.same import assert_same_results

LOADED = """
import pathlib, sys
sys.modules["sbp"] = None
import jax, numpy as np
from jax.export import deserialize
from jax.sharding import AxisType
exported = deserialize(pathlib.Path(sys.argv[1]).read_bytes())
mesh = jax.make_mesh((2, 4), ("x", "y"), axis_types=(AxisType.Auto,) * 2)
shardings = jax.tree.unflatten(exported.in_tree, exported.in_shardings_jax(mesh))
arrays = [np.load(f"{sys.argv[1]}{i}.npy") for i in range(len(exported.in_avals))]
args, kwargs = jax.device_put(jax.tree.unflatten(exported.in_tree, arrays), shardings)
for i, x in enumerate(jax.tree.leaves(exported.call(*args, **kwargs))):
    np.save(f"{sys.argv[1]}{i}.npy", x)
"""


def noisy(key, x, *, scale):
    return {"sum": jnp.cumsum(x, 0) * scale, "noise": jax.random.normal(key, x.shape)}


@pytest.mark.parametrize(
    ("fn", "in_types", "args", "kwargs"),
    [
        (step, TYPES, (W, X), {}),
        (noisy, None, (np.array([0, 1], np.uint32), X), {"scale": np.float32(2)}),
        (noisy, (None, "y:S(1)"), (np.array([0, 1], np.uint32), X[:13]), {"scale": np.float32(2)}),
    ],
)
def test_an_exported_plan_runs_without_sbp(tmp_path, fn, in_types, args, kwargs):
    f = sbp.jit(fn, sbp.make_mesh((2, 4), ("x", "y")), in_types)
    f.plan(*args, **kwargs).export(tmp_path / "plan")
    for i, x in enumerate(jax.tree.leaves((args, kwargs))):
        np.save(tmp_path / f"plan{i}.npy", x)
    subprocess.run([sys.executable, "-c", LOADED, tmp_path / "plan"], check=True)
    want = jax.tree.map(np.asarray, jax.jit(fn)(*args, **kwargs))
    got = [np.load(tmp_path / f"plan{i}.npy") for i in range(len(jax.tree.leaves(want)))]
    assert_same_results(want, jax.tree.unflatten(jax.tree.structure(want), got))


def test_a_plan_on_an_abstract_mesh_is_exported_for_its_hardware(tmp_path):
    mesh = jax.sharding.AbstractMesh((2, 4), ("x", "y"))
    sbp.jit(step, mesh, hardware="tpu-v5e").plan(W, X).export(tmp_path / "plan")
    exported = jax.export.deserialize((tmp_path / "plan").read_bytes())
    assert exported.platforms == ("tpu",) and exported.nr_devices == 8


def test_what_jax_cannot_export_is_refused(tmp_path):
    def printing(x):
        jax.debug.print("{}", x)
        return x

    plan = sbp.jit(printing, sbp.make_mesh((2, 4), ("x", "y"))).plan(X)
    with pytest.raises(sbp.SbpError, match=r"plan\.export: .*callback"):
        plan.export(tmp_path / "plan")
    assert not (tmp_path / "plan").exists()
