"""JAX's own ways to look into a program: they see types and shards, and change no plan."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, PartitionSpec as P

import sbp

MESH = jax.make_mesh((2, 4), ("x", "y"), axis_types=(AxisType.Auto,) * 2)
X = np.arange(64, dtype=np.float32).reshape(8, 8)


@pytest.mark.parametrize(
    ("types", "spec"),
    [
        (("x:S(0)", "y:S(1)"), P("x", "y")),
        (("x:S(1)", "x:S(0) y:S(1)"), P(None, "y", unreduced=frozenset({"x"}))),
        (("x:S(0) y:S(1)", "y:S(0)"), P("x", None, unreduced=frozenset({"y"}))),
    ],
)
def test_inspection_gives_the_type_and_leaves_the_plan(types, spec):
    found = []

    def product(x, w):
        return sbp.annotate(x @ w, "x:S(0)")

    def inspected(x, w):
        y = x @ w
        jax.debug.inspect_array_sharding(y, callback=found.append)
        return sbp.annotate(y, "x:S(0)")

    plan, plain = (sbp.jit(f, MESH, in_types=types).plan(X, X) for f in (inspected, product))
    assert plan.cost == plain.cost
    assert not found
    np.testing.assert_allclose(plan(X, X), X @ X)
    assert [s.spec for s in found] == [spec]
    assert found[0].mesh.devices.tolist() == MESH.devices.tolist()
    assert len(str(plan).splitlines()) == len(str(plain).splitlines())


def test_inspection_of_a_tree_in_a_scan_and_of_a_constant():
    found = []

    def fn(x):
        def body(c, row):
            jax.debug.inspect_array_sharding({"c": c, "row": row}, callback=found.append)
            return c + row, None

        jax.debug.inspect_array_sharding(jnp.ones(3), callback=found.append)
        return jax.lax.scan(body, jnp.zeros(8), x)[0]

    np.testing.assert_allclose(sbp.jit(fn, MESH, in_types="y:S(1)")(X), X.sum(0))
    assert len(found) == 3 and all(len(s.spec) <= 2 for s in found)


def test_visualize(capsys):
    sbp.jit(lambda x: (jax.debug.visualize_array_sharding(x), x * 2)[1], MESH, in_types="x:S(0)")(X)
    assert "CPU 0,1,2,3" in capsys.readouterr().out


def test_visualize_draws_the_parts_of_a_sum(capsys):
    def fn(x, w):
        y = x @ w
        jax.debug.visualize_array_sharding(y)
        return y

    np.testing.assert_allclose(sbp.jit(fn, MESH, in_types=("x:S(1) y:S(0)", "x:S(0)"))(X, X), X @ X)
    assert "CPU 0,4" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("size", "shape"), [(8, (4, 2)), (7, (7, 2))], ids=["even", "an uneven dim is whole"]
)
def test_a_partitioned_callback_sees_the_shard(size, shape):
    seen = []

    def fn(x):
        y = sbp.annotate(x[:size] * 2, "x:S(0) y:S(1)")
        jax.debug.callback(lambda a: seen.append(np.array(a)), y, partitioned=True)
        return y

    jax.block_until_ready(sbp.jit(fn, MESH)(X))
    jax.effects_barrier()
    assert [a.shape for a in seen] == [shape] * 8
    whole = X[:size] * 2
    blocks = {tuple(a.ravel()) for a in seen}
    rows = range(0, 8, shape[0]) if size == 8 else [0]
    expected = {
        tuple(whole[i : i + shape[0], j : j + 2].ravel()) for i in rows for j in range(0, 8, 2)
    }
    assert blocks == expected


@pytest.mark.parametrize(
    "show",
    [
        lambda x: jax.debug.print("{}", x, ordered=True),
        lambda x: jax.debug.callback(lambda a: None, x, ordered=True),
    ],
)
def test_an_ordered_debug_effect_is_refused_in_check_as_in_the_call(show):
    f = sbp.jit(lambda x: (show(x.sum()), x * 2)[1], MESH)
    (found,) = f.check(X).diagnostics
    assert found.code == "unsupported-effect" and found.primary is not None
    assert found.primary.span.file == __file__
    with pytest.raises(sbp.SbpError, match=r"unsupported-effect.* with ordered=True"):
        f(X)


def test_an_ordered_debug_effect_runs_on_one_device(capsys):
    mesh = jax.make_mesh((1,), ("x",), devices=jax.devices()[:1])
    jax.block_until_ready(
        sbp.jit(lambda x: (jax.debug.print("{}", x.sum(), ordered=True), x)[1], mesh)(X)
    )
    jax.effects_barrier()
    assert capsys.readouterr().out == "2016.0\n"
