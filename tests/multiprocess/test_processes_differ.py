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


def on_rows(fn, **options):
    return sbp.jit(fn, mesh_of("2x4"), in_types="data:S(0)", **options)


CALLS = [
    (
        lambda d: sbp.jit(square, sbp.make_mesh((4, 2) if d else (2, 4), ("data", "model"))),
        lambda d: X,
        "its mesh differs: data=2 model=4 on cpu devices",
    ),
    (
        lambda d: sbp.jit(square, Mesh(np.roll(np.array(jax.devices()), int(d)), ("data",))),
        lambda d: X,
        "its mesh differs: data=8 on cpu devices",
    ),
    (
        lambda d: on_rows((lambda x: jnp.sin(x)) if d else jnp.sin),
        None,
        "its name differs: sin in ",
    ),
    (
        lambda d: on_rows(lambda x: jnp.sin(x) if d else jnp.cos(x)),
        None,
        "its program differs between",
    ),
    (lambda d: on_rows(lambda x: jnp.flip(x, int(d))), None, "its program differs between"),
    (
        lambda d: on_rows(lambda x: x * (X[:1] + d)),
        None,
        "its set of constants differs between",
    ),
    (
        lambda d: on_rows(
            lambda x: sbp.annotate(x * 2, model=sbp.S(1) if d else sbp.B) * 2, out_types="data:S(0)"
        ),
        None,
        "its program differs between",
    ),
    (
        lambda d: on_rows(square, out_types="data:S(0)" if d else "data:S(1)"),
        None,
        "its choice of types differs between",
    ),
    (
        lambda d: on_rows(lambda x: x * 2, out_types="data:S(0)", donate_argnums=(0,) if d else ()),
        None,
        "its set of options differs: donated arguments (), keep",
    ),
    (
        lambda d: sbp.jit(lambda x: x.sum(), mesh_of("2x4")),
        lambda d: X[: 8 if d else 16],
        "its list of arguments differs: x: float32[16, 8]",
    ),
    (
        lambda d: sbp.jit(square, mesh_of("2x4")),
        lambda d: X + d,
        "its argument x differs between",
    ),
]
"""A function and its argument, each by whether this process differs; without an argument, rows of a
global array. And what the error says."""


@pytest.mark.parametrize(("call", "argument", "said"), CALLS)
def test_what_differs_is_named_in_every_process(call, argument, said: str):
    x = argument(i_differ()) if argument else put(X, mesh_of("2x4"), "data")
    f = call(i_differ())
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
