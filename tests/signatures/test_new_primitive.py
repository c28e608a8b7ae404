"""A new primitive is described in one place: its rule with its traits. Typing, costs, memory,
reports and the check of hand-written programs then know it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import PartitionSpec

import sbp
from sbp import P, _jax
from sbp.signatures import Traits
from sbp.signatures.factors import linear_rows, rows_beside
from sbp.signatures.rule import remove_rule, rule

doubled_p = _jax.Primitive("test_doubled")
doubled_p.def_abstract_eval(lambda x: _jax.empty_aval(x.shape, x.dtype))
_jax.mlir.register_lowering(doubled_p, _jax.mlir.lower_fun(lambda x: 2 * x, multiple_results=False))

KNOWN = Traits(elementwise=True, pointwise=True, scales="together", fusion="inlined", unnamed=True)
X = (np.random.default_rng(0).integers(-16, 16, (8, 16)) / 4).astype(np.float32)
W = (np.random.default_rng(1).integers(-16, 16, (16, 8)) / 4).astype(np.float32)


def doubled(x: jax.Array) -> jax.Array:
    return doubled_p.bind(x)


@contextmanager
def entered(traits: Traits) -> Iterator[None]:
    """With the one registration."""
    rule("test_doubled", traits=traits)(lambda op: [*rows_beside(op), *linear_rows(op)])
    try:
        yield
    finally:
        remove_rule("test_doubled")


@pytest.fixture(scope="module")
def mesh() -> jax.sharding.Mesh:
    return sbp.make_mesh((4,), ("m",))


def test_it_is_typed_runs_and_is_explained(mesh: jax.sharding.Mesh):
    """A partial product passes through it."""

    def program(x: jax.Array, w: jax.Array) -> jax.Array:
        return doubled(sbp.split(x, 1, "m") @ sbp.split(w, 0, "m"))

    def squared(x: jax.Array, w: jax.Array) -> jax.Array:
        h = sbp.split(x, 1, "m") @ w
        return jnp.exp(doubled(h))

    with entered(KNOWN):
        planned = sbp.jit(program, mesh, boxing="explicit", out_types=sbp.NdSbp({"m": P}))
        np.testing.assert_allclose(planned(X, W).reduce(), 2 * (X @ W), rtol=1e-6)
        (found,) = sbp.jit(squared, mesh, boxing="explicit").check(X, W).diagnostics
    assert found.title == "`jnp.exp(doubled(h))` has no SBP signature on mesh axis `m`"
    assert any(label.text.startswith("doubled(h) is P(sum) here") for label in found.labels)


def test_costs_and_memory_read_its_traits(mesh: jax.sharding.Mesh):
    """A result that is not stored takes no memory, and less time to move."""
    big = jax.ShapeDtypeStruct((1024, 1024), jnp.float32)
    found = {}
    for fusion in ("partly", "free", "inlined"):
        with entered(Traits(fusion=fusion)):
            found[fusion] = sbp.jit(lambda x: (doubled(x) @ x).sum(), mesh).plan(big).cost
    assert found["inlined"].seconds == found["free"].seconds < found["partly"].seconds
    inlined, free, partly = (found[f].peak_memory_bytes for f in ("inlined", "free", "partly"))
    assert inlined == free < partly


def test_hand_written_programs_run_it_by_its_rule_for_vmap(mesh: jax.sharding.Mesh):
    """It has none, so sbp says that the program is not checked."""

    def mean(x: jax.Array) -> jax.Array:
        return lax.pmean(doubled(x.mean()), "m")

    mapped = jax.shard_map(mean, mesh=mesh, in_specs=PartitionSpec("m"), out_specs=PartitionSpec())
    with entered(Traits()):
        (found,) = sbp.check_shard_map(mapped, X, mesh=mesh).diagnostics
    assert (found.code, found.severity) == ("not-analysed", "warning")
    assert "cannot be run without devices" in found.title
