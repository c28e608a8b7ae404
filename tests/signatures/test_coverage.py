"""Every primitive that JAX has loaded has a rule or a reason, and no table names one twice."""

from __future__ import annotations

import subprocess
import sys

from sbp.signatures import known_primitives
from sbp.signatures.fallback import FALLBACK, REFUSED

LISTING = """
import gc
import jax, jax.numpy, jax.nn, jax.random, jax.scipy.linalg, jax.scipy.signal, jax.scipy.special, jax.scipy.stats, jax.lax.linalg
import jax.ad_checkpoint, jax.custom_derivatives, jax.dtypes, jax.export, jax.flatten_util, jax.image, jax.ops, jax.sharding, jax.tree_util
import sbp
from sbp import _jax
print(*sorted({p.name for p in gc.get_objects() if isinstance(p, _jax.Primitive)}))
"""


def test_every_primitive_has_a_rule_or_a_reason():
    """In a process of its own: what other tests load is theirs."""
    done = subprocess.run([sys.executable, "-c", LISTING], capture_output=True, text=True, check=True)
    loaded = set(done.stdout.split())
    assert len(loaded) > 200
    missing = loaded - set(known_primitives()) - FALLBACK.keys() - REFUSED.keys()
    assert not missing, sorted(missing)


def test_tables_are_disjoint():
    assert not set(known_primitives()) & FALLBACK.keys()
    assert not REFUSED.keys() & (FALLBACK.keys() | set(known_primitives()))
