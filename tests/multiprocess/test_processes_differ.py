"""Processes that are about to run different things get one error, all of them, and do not hang."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import multihost_utils
from jax.sharding import Mesh

import sbp
from sbp import _jax
from sbp.run import joint
from tests.multiprocess.programs import numbers
from tests.multiprocess.world import assert_shards, in_all, mesh_of, put

pytestmark = pytest.mark.multiprocess

X = numbers(16, 8)
LAST = jax.process_count() - 1


def i_differ() -> bool:
    return jax.process_index() == LAST


def square(x):
    return x @ x.T


def another_shape():
    shape = (4, 2) if i_differ() else (2, 4)
    return sbp.jit(square, sbp.make_mesh(shape, ("data", "model"))), X


def other_devices():
    devices = np.roll(np.array(jax.devices()), int(i_differ()))
    return sbp.jit(square, Mesh(devices, ("data",))), X


def another_operation():
    fn = jnp.sin if i_differ() else jnp.cos
    return sbp.jit(lambda x: fn(x), mesh_of("2x4"), in_types="data:S(0)"), None


def another_name():
    fn = (lambda x: jnp.sin(x)) if i_differ() else jnp.sin
    return sbp.jit(fn, mesh_of("2x4"), in_types="data:S(0)"), None


def another_parameter():
    axis = int(i_differ())
    return sbp.jit(lambda x: jnp.flip(x, axis), mesh_of("2x4"), in_types="data:S(0)"), None


def another_constant():
    rows = X[:1] + i_differ()
    return sbp.jit(lambda x: x * rows, mesh_of("2x4"), in_types="data:S(0)"), None


def another_type_inside():
    kind = {"model": sbp.S(1) if i_differ() else sbp.B}
    fn = lambda x: sbp.annotate(x * 2, **kind) * 2
    return sbp.jit(fn, mesh_of("2x4"), in_types="data:S(0)", out_types="data:S(0)"), None


def another_result():
    wanted = "data:S(0)" if i_differ() else "data:S(1)"
    return sbp.jit(square, mesh_of("2x4"), in_types="data:S(0)", out_types=wanted), None


def another_donation():
    donated = (0,) if i_differ() else ()
    rows = "data:S(0)"
    fn = lambda x: x * 2
    return sbp.jit(fn, mesh_of("2x4"), rows, rows, donate_argnums=donated), None


def another_shape_of_argument():
    return sbp.jit(lambda x: x.sum(), mesh_of("2x4")), X[: 8 if i_differ() else 16]


def another_value():
    return sbp.jit(square, mesh_of("2x4")), X + i_differ()


@pytest.mark.parametrize(
    ("call", "said"),
    [
        (another_shape, "its mesh differs: data=2 model=4 on cpu devices"),
        (other_devices, "its mesh differs: data=8 on cpu devices"),
        (another_name, "its name differs: sin in "),
        (another_operation, "its program differs between"),
        (another_parameter, "its program differs between"),
        (another_constant, "its set of constants differs between"),
        (another_type_inside, "its program differs between"),
        (another_result, "its choice of types differs between"),
        (another_donation, "its set of options differs: donated arguments (), keep"),
        (another_shape_of_argument, "its list of arguments differs: x: float32[16, 8]"),
        (another_value, "its argument x differs between"),
    ],
)
def test_what_differs_is_named_in_every_process(call, said: str):
    f, x = call()
    x = put(X, mesh_of("2x4"), "data") if x is None else x
    with pytest.raises(sbp.SbpError) as error:
        f(x)
    assert error.value.code == "processes-differ" and said in str(error.value)
    assert f"process {LAST}" in str(error.value)
    assert len(set(in_all(str(error.value).partition(" has to be called ")[2]))) == 1


def test_plans_alike_are_compared_once_and_leave_nothing_behind():
    mesh = mesh_of("2x4")
    group = joint.processes_of(mesh)
    x = put(X, mesh, "data")
    before = joint._RUNS.get(group, 0)
    for k in range(3):
        f = sbp.jit(lambda x, k=k: x * k, mesh)
        for _ in range(3):
            assert_shards(f(x), X * k)
    assert joint._RUNS[group] == before + 3
    multihost_utils.sync_global_devices("compared")
    folder = f"sbp/{joint._hash(map(str, group))}/{before + 1}/"
    assert not _jax.distributed_client().key_value_dir_get(folder)


def test_a_process_that_does_not_come(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(joint, "WAIT_SECONDS", 0)
    f = sbp.jit(lambda x: x + 1, mesh_of("2x4"))
    for early in (True, False):  # the last process comes when the others have given up
        if early != i_differ():
            with pytest.raises(sbp.SbpError, match="did not come within 0 seconds") as error:
                f(X)
            assert error.value.code == "processes-differ"
        multihost_utils.sync_global_devices(f"early {early}")
    monkeypatch.undo()
    assert_shards(f(X), X + 1)


def test_the_comparison_can_be_turned_off(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("SBP_CHECK_PROCESSES", "0")
    before = dict(joint._RUNS)
    got = sbp.jit(lambda x: x + 1, mesh_of("8"))(X)
    assert_shards(got, X + 1)
    assert before == joint._RUNS
