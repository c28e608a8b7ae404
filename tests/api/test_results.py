"""Results have the shapes, dtypes, weak types and values that `jax.jit` gives them."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import sbp
from tests.same import assert_same_results


class Pair(NamedTuple):
    first: Any
    second: Any


BF16 = jnp.ones(4, jnp.bfloat16)
ZEROS = jnp.zeros

WEAK = {
    "product": (lambda x: x * 2, 1.0),
    "argument": (lambda x: (x, x), 1.0),
    "constants": (lambda x: (1, 1.0, True, 2j, None, np.float64(3), np.arange(3)), 1.0),
    "nested": (lambda x, y: {"a": [x, y, x + y], "b": Pair(x * 2, y * 3)}, 1, jnp.ones(3)),
    "strong by numpy": (lambda x: np.float32(3) * x, 1.0),
    "cond": (lambda p, x: lax.cond(p, lambda x: x, lambda x: x * 2, x), True, 1.0),
    "sum of a split dim": (lambda x: sbp.split(x, 0, "x").sum(), ZEROS((0, 8))),
    "scan": (lambda x: lax.scan(lambda c, _: (c * 2, c), x, None, length=3), 1.0),
    "while": (lambda x: lax.while_loop(lambda c: c < 10, lambda c: c * 2, x), 1.0),
    "loop": (lambda x: lax.fori_loop(0, 3, lambda i, c: c + i, x), 1),
    "filled": (lambda x: (jnp.full((4,), x), jnp.broadcast_to(x, (8,))), 1.0),
    "gradient": (jax.value_and_grad(lambda x: x * x), 3.0),
    "float0": (jax.grad(lambda x, y: x * y, argnums=(0, 1), allow_int=True), 3.0, 2),
    "weak array": (lambda x: x + 1, jnp.asarray(2)),
    "where": (lambda x: jnp.where(x > 0, 1.0, 0.0), 1),
    "complex": (lambda x: x * 1j, 1.0),
    "bool": (lambda x: (x, x & True, x + 1), True),
    "closed over": (lambda x: (BF16, x * BF16), 1.0),
    "no argument": (lambda: (jnp.arange(4), 1.0),),
    "no result": (lambda x: (None, (), {}), 1.0),
    "callback": (lambda x: (jax.debug.callback(lambda _: None, x), x * 2)[1], 1.0),
    "numpy": (lambda x, y: (x + 1, y, x * y), np.int8(3), np.ones(3)),
    "keys": (lambda k: (k, jax.random.split(k), jax.random.key_data(k)), jax.random.key(0)),
}
EMPTY = {
    "slice": (lambda x: x[:, :0], jnp.ones((8, 4))),
    "constant": (lambda x: ZEROS((8, 0)), 1.0),
    "product": (lambda x: x * 2, ZEROS((0, 8))),
    "contracted": (lambda x, y: x @ y, ZEROS((8, 0)), ZEROS((0, 8))),
    "rows": (lambda x, y: x @ y, ZEROS((0, 8)), ZEROS((8, 8))),
    "with another": (lambda x, y: (jnp.concatenate([x, y]), x), ZEROS((0, 4)), jnp.ones((8, 4))),
    "sums": (lambda x: (x.sum(), x.sum(0), x.sum(1), x.max(0, initial=1.0)), ZEROS((8, 0))),
    "sum of a split dim": (lambda x: sbp.split(x, 0, "x").sum(), ZEROS((0, 8))),
    "scan": (lambda x: lax.scan(lambda c, y: (c + y.sum(), c * y), 0.0, x), ZEROS((0, 8))),
    "gather": (lambda x, i: x[i], jnp.ones((8, 4)), ZEROS((0,), int)),
    "reshape": (lambda x: (x.reshape(0, 4), jnp.sort(x), jnp.cumsum(x, 0)), ZEROS((8, 0))),
    "random": (lambda k: jax.random.normal(k, (8, 0)), jax.random.key(1)),
    "keys": (lambda k: (k, jax.random.key_data(k)), jax.random.split(jax.random.key(1), 8)[:0]),
    "lstsq rows": (jnp.linalg.lstsq, ZEROS((0, 3)), ZEROS((0, 2))),
    "lstsq columns": (jnp.linalg.lstsq, ZEROS((3, 0)), ZEROS((3, 2))),
    "det and inverse": (lambda x: (jnp.linalg.det(x), jnp.linalg.inv(x)), ZEROS((3, 0, 0))),
    "svd and qr": (lambda x: (jnp.linalg.svd(x, False), jnp.linalg.qr(x)), ZEROS((0, 3))),
    "donated": (lambda x: x + 1, ZEROS((0, 8))),
}
CASES = {
    f"{kind}: {name}": c
    for kind, cs in (("weak", WEAK), ("empty", EMPTY))
    for name, c in cs.items()
}


@pytest.fixture(scope="module", params=[(8,), (2, 4)], ids=str)
def mesh(request):
    return sbp.make_mesh(request.param, ("x", "y")[: len(request.param)])


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_results_are_those_of_jax(case, mesh):
    fn, *args = case
    assert_same_results(jax.jit(fn)(*args), sbp.jit(fn, mesh)(*args))


def test_arrays_without_elements_are_held_whole():
    """JAX cannot read a split array that has no elements."""
    mesh = sbp.make_mesh((8,), ("x",))
    f = sbp.jit(lambda x: x * 2, mesh, in_types=("x:S(0)",), out_types="x:S(0)")
    with pytest.warns(sbp.SbpWarning, match="uneven-boundary: .* has no elements to split"):
        got = f(ZEROS((8, 0)))
    assert_same_results(ZEROS((8, 0)), got)


def test_donated_arguments_without_elements():
    mesh = sbp.make_mesh((8,), ("x",))
    f = sbp.jit(lambda x, y: (x + 1, y * 2), mesh, donate_argnums=(0, 1))
    assert_same_results((ZEROS((0, 8)), 2 * jnp.ones(8)), f(ZEROS((0, 8)), jnp.ones(8)))


# ---- results on meshes with Explicit axes --------------------------------------------------------
# Plain JAX code on the results of a plan, by the axis types of the mesh.


TOKENS = jnp.zeros((4, 2), jnp.int32)
TYPES = ("data:S(0) model:S(1)", "model:S(1)")
AMBIGUOUS = {
    "take": lambda e, w: e[TOKENS],
    "matmul": lambda e, w: e @ w.T,
}
OTHERS = {
    "reshape": lambda e, w: e.reshape(4, 4, 8),
    "concatenate": lambda e, w: jnp.concatenate([e, e]),
    "add": lambda e, w: e + jnp.ones_like(e),
}


@pytest.mark.parametrize("make_mesh", [sbp.make_mesh, jax.make_mesh], ids=["auto", "explicit"])
@pytest.mark.parametrize("name", [*AMBIGUOUS, *OTHERS])
def test_plain_jax_takes_results(name, make_mesh):
    """On explicit axes JAX refuses the operations whose result it cannot place."""
    args = jnp.arange(128.0).reshape(16, 8), jnp.ones((8, 8))
    mesh = make_mesh((2, 4), ("data", "model"))
    got = sbp.jit(lambda e, w: (e + 0, w + 0), mesh, TYPES, TYPES)(*args)
    after = {**AMBIGUOUS, **OTHERS}[name]
    if make_mesh is jax.make_mesh and name in AMBIGUOUS:
        with pytest.raises(Exception, match="ambiguous"):
            after(*got)
    else:
        np.testing.assert_allclose(after(*got), after(*args))
