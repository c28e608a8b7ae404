"""Every primitive that JAX has loaded has a rule or a reason, and no table names one twice."""

from __future__ import annotations

import subprocess
import sys

import jax
import numpy as np

import sbp
from sbp.signatures import known_primitives
from sbp.signatures.fallback import FALLBACK, REFUSED

LISTING = """
import gc
import jax, jax.numpy, jax.nn, jax.random, jax.lax.linalg
import jax.scipy.linalg, jax.scipy.signal, jax.scipy.special, jax.scipy.stats
import jax.ad_checkpoint, jax.custom_derivatives, jax.dtypes, jax.export, jax.flatten_util
import jax.image, jax.ops, jax.sharding, jax.tree_util
import sbp
from sbp import _jax
print(*sorted({p.name for p in gc.get_objects() if isinstance(p, _jax.Primitive)}))
"""


def test_every_primitive_has_a_rule_or_a_reason():
    """In a process of its own: what other tests load is theirs."""
    done = subprocess.run(
        [sys.executable, "-c", LISTING], capture_output=True, text=True, check=True
    )
    loaded = set(done.stdout.split())
    assert len(loaded) > 200
    missing = loaded - set(known_primitives()) - FALLBACK.keys() - REFUSED.keys()
    assert not missing, sorted(missing)


def test_calls_with_a_body_are_typed_inside():
    """Composites, hand-written batching and solves: the trace puts their bodies in their place,
    which compute the same."""
    doubled = jax.custom_batching.custom_vmap(lambda x: x * 2)
    doubled.def_vmap(lambda size, batched, x: (x * 2, True))
    named = jax.lax.composite(lambda x: x + 1, "my.increment")

    def fn(x: jax.Array) -> tuple[jax.Array, ...]:
        x = sbp.split(x, 0, "x")
        solved = jax.lax.custom_linear_solve(
            lambda v: v * 4, x, lambda matvec, y: y / 4, symmetric=True
        )
        linear = jax.custom_derivatives.linear_call(
            lambda scale, v: v * scale, lambda scale, ct: ct * scale, 3.0, x
        )
        return doubled(x), jax.vmap(doubled)(x), named(x), solved, linear

    x = np.arange(12, dtype=np.float32).reshape(6, 2)
    planned = sbp.jit(fn, jax.make_mesh((2,), ("x",), devices=jax.devices()[:2]))
    for got, want in zip(planned(x), (x * 2, x * 2, x + 1, x / 4, x * 3), strict=True):
        np.testing.assert_array_equal(got, want)
        assert got.sharding.spec[0] == "x"


def test_tables_are_disjoint():
    assert not set(known_primitives()) & FALLBACK.keys()
    assert not REFUSED.keys() & (FALLBACK.keys() | set(known_primitives()))
