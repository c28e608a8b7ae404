"""Grid dims of Pallas kernels: which ones split, and what a kernel computes on shards."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jax.experimental.pallas.ops.tpu.flash_attention import flash_attention

import sbp
from sbp import B
from sbp.signatures import registered
from tests.same import assert_close

X = np.arange(96, dtype=np.float32).reshape(8, 12)


def test_flash_attention_and_its_gradient_split_by_examples_and_heads(mesh):
    """No rule by the user, no warning, no collective; q, k and v draw from one key."""
    q, k, v = jax.random.normal(jax.random.key(0), (3, 2, 4, 128, 128))

    def gradient(*operands):
        with pltpu.force_tpu_interpret_mode():
            loss = lambda *x: jnp.sum(flash_attention(*x, causal=True, sm_scale=0.1) ** 2)
            return jax.grad(loss, (0, 1, 2))(*operands)

    f = sbp.jit(gradient, mesh, in_types=("x:S(0) y:S(1)",) * 3)
    plan = f.plan(q, k, v)
    assert plan.cost.bytes_per_device == 0
    assert {str(t) for t in plan.out_types} == {"x:S(0) y:S(1)"}
    assert_close(plan(q, k, v), jax.jit(gradient)(q, k, v), rtol=1e-4, atol=1e-3)


def doubled(index=lambda i: (i, 0), *, body=None, rows=1, out=None, shape=(8, 12), **options):
    """A kernel over the rows of X."""

    def kernel(x, o, *scratch):
        o[...] = x[...] * 2 + (body(x[...]) if body else 0)

    block = pl.BlockSpec((rows, 12), index)
    return pl.pallas_call(
        kernel,
        jax.ShapeDtypeStruct(shape, np.float32),
        grid=(8 // rows,),
        in_specs=[block],
        out_specs=out or block,
        interpret=True,
        **options,
    )


SCRATCH = [pltpu.VMEM((1, 12), jnp.float32)]
IN_ANY_ORDER = pltpu.CompilerParams(dimension_semantics=("parallel",))
SPLIT = {
    "rows": doubled(),
    "blocks of two rows": doubled(rows=2),
    "scratch memory, in any order": doubled(scratch_shapes=SCRATCH, compiler_params=IN_ANY_ORDER),
    "a batch of kernels": jax.vmap(doubled()),
    "in place": doubled(input_output_aliases={0: 0}),
}
WHOLE = {
    "scratch memory, in order": doubled(scratch_shapes=SCRATCH),
    "its place": doubled(body=lambda x: pl.program_id(0)),
    "its place in a branch": doubled(
        body=lambda x: jax.lax.cond(x[0, 0] > 9, lambda: pl.program_id(0), lambda: 0)
    ),
    "rows in another order": doubled(lambda i: (7 - i, 0)),
    "in place of what all read": doubled(lambda i: (0, 0), input_output_aliases={0: 0}),
    "one block for all": doubled(out=pl.BlockSpec((1, 12), lambda i: (0, 0)), shape=(1, 12)),
}


@pytest.mark.parametrize("name", SPLIT)
def test_a_dim_of_independent_blocks_splits(name, mesh):
    call, x = SPLIT[name], np.stack([X, X + 1]) if name == "a batch of kernels" else X
    f = sbp.jit(call, mesh, in_types="y:S(0)" if x.ndim == 2 else "x:S(0) y:S(1)")
    plan = f.plan(x)
    assert plan.cost.bytes_per_device == 0 and "S" in str(plan.out_types)
    np.testing.assert_array_equal(plan(x), 2 * x)


@pytest.mark.parametrize("name", WHOLE)
def test_a_dim_of_blocks_that_depend_on_each_other_stays_whole(name, mesh):
    f = sbp.jit(WHOLE[name], mesh, in_types="y:S(0)", out_types=B)
    with pytest.warns(sbp.SbpWarning, match="missing-rule.*sbp cannot split any dim of the kernel"):
        plan = f.plan(X)
    assert plan.cost.bytes_per_device > 0
    if name != "its place in a branch":  # which JAX does not interpret
        np.testing.assert_array_equal(plan(X), jax.jit(WHOLE[name])(X))


def test_blocks_that_cross_shards_stay_whole(mesh):
    """8 rows in blocks of 4 over 4 devices; over 2 they split."""
    types = {
        axis: sbp.jit(doubled(rows=4), mesh, in_types=f"{axis}:S(0)").plan(X).cost.bytes_per_device
        for axis in "xy"
    }
    assert types["x"] == 0 and types["y"] > 0


def test_uneven_rows(mesh):
    """7 rows over 4 devices: the last one computes padding, which nobody sees."""

    def call(x):
        block = pl.BlockSpec((1, 12), lambda i: (i, 0))
        kernel = lambda x, o: o.__setitem__(..., jnp.sqrt(x[...]))
        out = jax.ShapeDtypeStruct(x.shape, x.dtype)
        return pl.pallas_call(
            kernel, out, grid=(7,), in_specs=[block], out_specs=block, interpret=True
        )(x)

    f = sbp.jit(lambda x: call(sbp.split(x, 0, "y")), mesh)
    np.testing.assert_allclose(f(X[:7]), np.sqrt(X[:7]), rtol=1e-6)


def test_a_registered_signature_comes_first(mesh):
    call = lambda x: doubled()(x)
    with registered("pallas_call:kernel", local=lambda ctx, x: call(x)):
        plan = sbp.jit(call, mesh, in_types="y:S(0)", out_types=B).plan(X)
        assert plan.cost.bytes_per_device > 0
    assert sbp.jit(call, mesh, in_types="y:S(0)").plan(X).cost.bytes_per_device == 0
