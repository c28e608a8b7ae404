"""Which names of mesh axes are refused, and why."""

import os
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AbstractMesh, Mesh

import sbp
from sbp._jax import ENDS_ON_AXIS_NAMES
from sbp.errors import SbpError

OUTSIDE_ASCII, BACKSLASH = "α", "a\\d"
ENDING = [(OUTSIDE_ASCII, 1), (OUTSIDE_ASCII, 8), (BACKSLASH, 8)]
ALONE = """
import sys, jax, numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P
mesh = Mesh(np.array(jax.devices()[: int(sys.argv[2])]), (sys.argv[1],))
x = jax.device_put(np.ones((8, 8)), NamedSharding(mesh, P(sys.argv[1])))
print(float(jax.jit(lambda x: (x @ x).sum())(x)))
"""


@pytest.mark.parametrize("name", ["a b", "x:y", "a,b", "k=1", "(d)", "", "a\tb", "[0]", "#"])
def test_names_that_no_text_can_have(name):
    for mesh in (AbstractMesh((1, 1), (name, "c")), Mesh([[jax.devices()[0]]], (name, "c"))):
        with pytest.raises(SbpError, match="have no blanks"):
            sbp.jit(jnp.sin, mesh).plan(np.ones(8))
    with pytest.raises(SbpError, match="have no blanks"):
        sbp.make_mesh((1, 1), (name, "c"))


@pytest.mark.parametrize(("name", "n"), ENDING)
@pytest.mark.skipif(not ENDS_ON_AXIS_NAMES, reason="this JAX runs with such names")
def test_names_with_which_jax_ends_the_process(name, n):
    with pytest.raises(SbpError, match="this JAX ends the process"):
        sbp.make_mesh((n,), (name,))
    mesh = Mesh(np.array(jax.devices()[:n]), (name,))
    with pytest.raises(SbpError, match="this JAX ends the process"):
        sbp.jit(jnp.sin, mesh).plan(np.ones(8))
    sbp.jit(jnp.sin, AbstractMesh((8,), (name,))).plan(np.ones(8))


@pytest.mark.skipif(not ENDS_ON_AXIS_NAMES, reason="this JAX raises a Python error for a backslash")
def test_a_backslash_runs_on_one_device():
    x = np.arange(8.0, dtype=np.float32)
    f = sbp.jit(jnp.sin, sbp.make_mesh((1,), (BACKSLASH,)))
    np.testing.assert_allclose(np.asarray(f(x)), np.sin(x), rtol=1e-6)


@pytest.mark.skipif(ENDS_ON_AXIS_NAMES, reason="this JAX ends the process")
def test_names_outside_ascii_run():
    x = np.arange(8.0, dtype=np.float32)
    f = sbp.jit(jnp.sin, sbp.make_mesh((8,), (OUTSIDE_ASCII,)), in_types=f"{OUTSIDE_ASCII}:S(0)")
    np.testing.assert_allclose(np.asarray(f(x)), np.sin(x), rtol=1e-6)


@pytest.mark.parametrize(("name", "n"), [*ENDING, (BACKSLASH, 1), ("data", 8)])
def test_jax_alone_ends_the_process(name, n):
    if name == BACKSLASH and not ENDS_ON_AXIS_NAMES:
        pytest.skip("this JAX raises a Python error for a backslash")
    flags = {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": "--xla_force_host_platform_device_count=8"}
    ran = subprocess.run(
        [sys.executable, "-c", ALONE, name, str(n)],
        env=os.environ | flags,
        capture_output=True,
        check=False,
    )
    ends = ENDS_ON_AXIS_NAMES and (name, n) in ENDING
    assert (ran.returncode != 0) == ends
    assert ends or ran.stdout.strip() == b"512.0"
