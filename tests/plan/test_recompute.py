"""Recomputation to fit a memory limit: plans fit, compute what one device computes, and say so."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import sbp
from sbp.errors import OptionEdit
from tests.same import refused

LAYERS, WIDTH = 6, 16


def loss(weights, x, y):
    for w_in, w_out in weights:
        x = x + jax.nn.gelu(x @ w_in) @ w_out
    return ((x - y) ** 2).mean()


def step(weights, x, y):
    value, gradients = jax.value_and_grad(loss)(weights, x, y)
    return jax.tree.map(lambda w, g: w - 0.1 * g, weights, gradients), value


def arguments(rows):
    draw = np.random.default_rng(0).standard_normal
    weights = [
        (0.3 * draw((WIDTH, 4 * WIDTH)), 0.3 * draw((4 * WIDTH, WIDTH))) for _ in range(LAYERS)
    ]
    given = weights, draw((rows, WIDTH)), draw((rows, WIDTH))
    return jax.tree.map(lambda x: jnp.asarray(x, jnp.float32), given)


def jitted(mesh, share, given, fn=step, **options):
    """A function with a share of the memory of its fastest plan."""
    types = ("B", "data:S(0)", "data:S(0)")
    free = sbp.jit(fn, mesh, in_types=types).plan(*given).cost.peak_memory_bytes
    return sbp.jit(fn, mesh, in_types=types, memory_limit=int(share * free), **options)


MESHES = [((2,), ("data",)), ((4,), ("data",)), ((2, 4), ("data", "model"))]


@pytest.mark.parametrize(("sizes", "names"), MESHES, ids=["2", "4", "2x4"])
@pytest.mark.filterwarnings("ignore:uneven-boundary")  # 2041 rows
@pytest.mark.parametrize("rows", [2048, 2041])
def test_a_plan_that_recomputes_fits_and_computes_the_same(sizes, names, rows):
    given = arguments(rows)
    f = jitted(sbp.make_mesh(sizes, names), 0.75, given)
    plan = f.plan(*given)
    assert plan.program.request.recomputed and plan.program.fits
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5 * float(abs(b).max())),
        f(*given),
        step(*given),
    )
    assert "of the forward pass again, as jax.checkpoint does" in " ".join(
        str(plan.report()).split()
    )


def test_what_runs_again_is_behind_barriers():
    given = arguments(2048)
    plan = jitted(sbp.make_mesh((2,), ("data",)), 0.75, given).plan(*given)
    nodes = plan.program.graph.nodes
    again = [n for n in nodes if n.is_recomputed]
    barriers = sum(n.is_barrier for n in again)
    assert barriers > 1
    # Without recomputation: two products of each layer and their gradients, but not that of `x`.
    products = sum(n.op == "dot_general" for n in nodes)
    assert sum(n.op == "dot_general" for n in again) == products - (6 * LAYERS - 1) >= barriers
    # XLA on CPU devices merges both runs when it compiles this, as it does for `jax.checkpoint`.
    lowered = plan.lower().as_text()
    assert [lowered.count(f"stablehlo.{op}") for op in ("dot_general", "optimization_barrier")] == [
        products,
        barriers,
    ]


@pytest.mark.parametrize("budgets", [[], [sbp.forbid("all_gather")]], ids=["free", "budgets"])
def test_a_saved_plan_recomputes(budgets, tmp_path):
    given, mesh = arguments(2048), sbp.make_mesh((2,), ("data",))
    f = jitted(mesh, 0.75, given, budgets=budgets)
    plan = f.plan(*given)
    assert plan.program.request.recomputed and len(plan.program.request.budgets) == len(budgets)
    plan.save(path := tmp_path / "plan.json")
    loaded = jitted(mesh, 0.75, given, budgets=budgets, plan=path)
    assert str(loaded.plan(*given)) == str(plan)
    jax.tree.map(np.testing.assert_array_equal, loaded(*given), f(*given))
    saved = json.loads(path.read_text())
    for wrong in ([], [[1, 2], True], [[3, 2], False], ["x", 1], [[10**9], False], [1]):
        path.write_text(json.dumps(saved | {"recomputed": wrong}))
        refused("saved-plan", jitted(mesh, 0.75, given, budgets=budgets, plan=path).plan, *given)
    path.write_text(json.dumps(saved))
    refused(
        "remat",
        jitted(mesh, 0.75, given, budgets=budgets, plan=path, remat="never").plan,
        *given,
    )


def test_callbacks_do_not_run_again():
    def called(x):
        shape = jax.ShapeDtypeStruct(x.shape, x.dtype)
        return jax.pure_callback(np.tanh, shape, jax.lax.stop_gradient(x))

    def loss(weights, x, y):
        for w_in, w_out in weights:
            x = x + (jax.nn.gelu(x @ w_in) * called(x @ w_in)) @ w_out
        return ((x - y) ** 2).mean()

    given, mesh = arguments(2048), sbp.make_mesh((2,), ("data",))
    plan = jitted(mesh, 0.8, given, jax.grad(loss)).plan(*given)
    again = [n for n in plan.program.graph.nodes if n.is_recomputed]
    assert again and not any("callback" in n.params for n in again)


def test_without_recomputation_the_error_offers_it():
    given, mesh = arguments(2048), sbp.make_mesh((2,), ("data",))
    (found,) = jitted(mesh, 0.75, given, remat="never").check(*given).diagnostics
    first = found.helps[0]
    line = f"line {loss.__code__.co_firstlineno + 2}"
    assert (
        first.text == f'remat="auto": the backward pass runs {line} again, as with jax.checkpoint'
    )
    assert first.edits == (OptionEdit(option="remat", value="auto"),)
