"""What processes compare before they run a plan: equal for one program, unequal for another one."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

import sbp
from sbp.run.joint import description, difference, placed, processes_of, values_digest

X = np.arange(32, dtype=np.float32).reshape(8, 4)


def parts(fn=lambda x: jnp.sin(x) + X, shape=(2, 4), **options):
    mesh = sbp.make_mesh(shape, ("data", "model"))
    plan = sbp.jit(fn, mesh, **options).plan(X)
    found = description(plan.program, mesh)
    return {name: (part.digest, part.text) for name, part in found.items()}


def test_a_program_that_is_traced_twice_is_one():
    def fn(x):
        return jnp.sin(x) + X.copy()

    def again(x):
        "On other lines."

        return jnp.sin(x) + X.copy()

    assert parts(fn) == parts(again) == parts()


@pytest.mark.parametrize(
    ("other", "part"),
    [
        (lambda: parts(shape=(4, 2)), "mesh"),
        (lambda: parts(in_types="data:S(1)"), "list of arguments"),
        (lambda: parts(lambda x: jnp.cos(x) + X), "program"),
        (lambda: parts(lambda x: jnp.sin(x) + X + 0), "program"),
        (lambda: parts(lambda x: jnp.sin(x) + (X + 1)), "set of constants"),
        (lambda: parts(in_types="data:S(0)", out_types="data:S(1)"), "choice of types"),
    ],
)
def test_the_first_part_that_differs_is_named(other, part):
    pinned = {"in_types": "data:S(0)", "out_types": "data:S(0)"}
    mine = parts(**(pinned if part in ("list of arguments", "choice of types") else {}))
    said = difference({0: mine, 1: other(), 2: mine})
    assert said.startswith(f"its {part} differs") and "processes 0, 2" in said
    assert not difference({0: mine, 1: mine})


def test_elements_are_compared_with_dtype_and_shape():
    values = [X, X + 1, X.astype(np.int32), X.T.copy(), X.astype(jnp.bfloat16), X.reshape(-1)]
    assert len({values_digest(x) for x in values}) == len(values)
    assert values_digest(X) == values_digest(jnp.asarray(X)) == values_digest(X.T.copy().T)
    assert values_digest(3.0) != values_digest(4.0)


def test_one_process_waits_for_none():
    mesh = sbp.make_mesh((8,), ("data",))
    assert processes_of(mesh) == (0,)
    sharding = NamedSharding(mesh, PartitionSpec("data"))
    assert placed(X, sharding).sharding == sharding
    assert sbp.jit(jnp.sin, mesh).plan(X)._joint is None
    assert jax.process_count() == 1
