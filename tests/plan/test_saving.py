"""What the forward pass has sent is not sent again by rematerialisation, unless memory demands
it."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import sbp
from sbp.plan import fit
from sbp.plan.program import Program
from tests.slices import sliced

pytestmark = pytest.mark.laws

LAYERS, BATCH, WIDTH, HIDDEN = 4, 16, 32, 64


def layer(x, w):
    """A Megatron feed-forward: the hidden dim is split, its product is partial."""
    up, down = w
    up, down = sbp.split(up, 1, "model"), sbp.split(down, 0, "model")
    return sbp.annotate(jnp.tanh(x @ up) @ down, model=sbp.B, data=sbp.S(0))


def scanned(weights, x):
    def body(x, w):
        y = layer(x, w)
        return jnp.tanh(y) + x, None  # the gradient of this tanh needs what was reduced

    return lax.scan(jax.checkpoint(body), x, weights)[0]


def unrolled(weights, x):
    for n in range(LAYERS):
        x = jax.checkpoint(lambda x, w: jnp.tanh(layer(x, w)) + x)(
            x, jax.tree.map(lambda w, n=n: w[n], weights)
        )
    return x


def counted(weights, x):
    """Rematerialised inside of a loop with a carry of its own: the counter is no part of what is
    saved."""

    def body(carry, w):
        x, n = carry
        y = layer(x + n, w)
        return (jnp.tanh(y) + x, n + 1.0), jnp.sum(y)

    (x, _), sums = lax.scan(jax.checkpoint(body), (x, jnp.float32(0.0)), weights)
    return x + sums.sum()


def twice(weights, x):
    """The same layers on two batches: equal weights, other values; nothing may be shared."""
    return scanned(weights, x) + scanned(weights, 2 * x)


def backwards(weights, x):
    return lax.scan(
        jax.checkpoint(lambda x, w: (jnp.tanh(layer(x, w)) + x, None)), x, weights, reverse=True
    )[0]


MODELS = {f.__name__: f for f in (scanned, unrolled, counted, twice, backwards)}


step = lambda model: jax.value_and_grad(lambda w, x: (MODELS[model](w, x) ** 2).sum())


def arguments():
    rng = np.random.default_rng(0)
    shapes = (LAYERS, WIDTH, HIDDEN), (LAYERS, HIDDEN, WIDTH), (BATCH, WIDTH)
    up, down, x = (
        jnp.asarray(rng.standard_normal(s) / np.sqrt(s[-2]), jnp.float32) for s in shapes
    )
    return (up, down), x


ROOM = 2**40
"""A memory limit that every plan meets: all reuses that save time are taken."""

SCALE = 64
"""The planned programs are so much wider, so that a layer's weights are dearer to move than its
activations."""


def crossed(xs, w):
    """Nested loops of one length over the same values: what depends on one index is no copy of what
    depends on the other."""
    a, b = lax.map(lambda xi: lax.map(lambda xj: (jnp.tanh(xj @ w), jnp.tanh(xi @ w)), xs), xs)
    a, b = sbp.split(a, 2, "data"), sbp.split(b, 2, "data")
    f = jax.checkpoint(lambda a: jnp.sum(jnp.sin(sbp.replicate(a, "data"))))
    g = jax.checkpoint(
        lambda b: jnp.sum(
            jnp.sin(sbp.replicate(b, "data")) * jnp.arange(float(len(xs)))[:, None, None, None]
        )
    )
    return f(a) + g(b)


def test_indices_of_nested_loops_are_two():
    rng = np.random.default_rng(1)
    xs, w = (jnp.asarray(rng.standard_normal(s), jnp.float32) for s in ((8, 8, 8), (8, 8)))
    gradient = jax.grad(crossed, (0, 1))
    jax.tree.map(
        lambda g, w: np.testing.assert_allclose(
            g, w, rtol=2e-4, atol=2e-5 * float(jnp.abs(w).max())
        ),
        sbp.jit(gradient, sbp.make_mesh((8,), ("data",)))(xs, w),
        jax.jit(gradient)(xs, w),
    )


@pytest.mark.parametrize(
    "fn",
    [
        lambda x: x,
        lambda x: lax.scan(lambda c, _: ((c[1], c[0]), None), (x, x + 1), None, length=3)[0],
    ],
    ids=["identity", "swap"],
)
def test_blocks_without_operations(fn):
    x = jnp.arange(16.0)
    jax.tree.map(
        np.testing.assert_array_equal, sbp.jit(fn, sbp.make_mesh((8,), ("data",)))(x), fn(x)
    )


def plan(model, memory_limit: float = ROOM):
    wide = lambda a: jax.ShapeDtypeStruct((len(a), *(SCALE * d for d in a.shape[1:])), a.dtype)
    args = jax.tree.map(wide, arguments())
    mesh = jax.sharding.AbstractMesh((2, 4), ("data", "model"))
    return sbp.jit(step(model), mesh, hardware="tpu-v5p", memory_limit=memory_limit).plan(*args)


def runs(program: Program) -> int:
    """Collectives per call."""
    return sum(p.trips for p in program.boxes() for step in p.box.steps if step.bytes_sent)


@pytest.mark.parametrize(
    ("model", "shape"), sliced(itertools.product(MODELS, [(1, 8), (2, 4), (4, 2)]), 1 / 2), ids=str
)
def test_values(model, shape):
    args = arguments()
    jax.tree.map(
        lambda g, w: np.testing.assert_allclose(
            g, w, rtol=2e-4, atol=2e-5 * float(jnp.abs(w).max())
        ),
        sbp.jit(step(model), sbp.make_mesh(shape, ("data", "model")))(*args),
        jax.jit(step(model))(*args),
    )


@pytest.mark.parametrize("model", ["scanned", "unrolled", "counted", "backwards"])
def test_a_reduction_of_the_forward_is_not_repeated(model, monkeypatch):
    saved = plan(model)
    monkeypatch.setattr(fit, "without_repeats", lambda program, _: program)
    repeated = plan(model)
    assert saved.program.typing.saved_seconds > 0 == repeated.program.typing.saved_seconds
    assert (
        runs(saved.program) <= runs(repeated.program) - LAYERS + 1
    )  # the last layer's is not recomputed by every model
    assert saved.cost.bytes_per_device < repeated.cost.bytes_per_device
    assert saved.cost.seconds < repeated.cost.seconds


def test_memory_may_demand_it():
    free = plan("scanned")
    limit = free.cost.peak_memory_bytes - 1
    tight = plan("scanned", memory_limit=limit)
    assert tight.cost.peak_memory_bytes <= limit
    assert tight.program.typing.saved_seconds < free.program.typing.saved_seconds


@pytest.mark.parametrize("count", [1, 7, 12])
def test_a_repeat_is_found_behind_any_number_of_operations(count):
    """The first loop gathers after the operations, the second before them."""

    def waves(x):
        for _ in range(count):
            x = jnp.sin(x)
        return x

    def program(xs):
        late = lax.map(lambda x: sbp.replicate(waves(sbp.split(x, 0, "d")), "d"), xs)
        early = lax.map(lambda x: 2 * waves(sbp.replicate(sbp.split(x, 0, "d"), "d")), xs)
        return late.sum() + (early * jnp.arange(16.0)).sum()

    mesh = jax.sharding.AbstractMesh((8,), ("d",))
    plan = sbp.jit(program, mesh, hardware="tpu-v5p", memory_limit=ROOM).plan(
        jax.ShapeDtypeStruct((4, 8192, 16), jnp.float32)
    )
    gathers = [p for p in plan.program.boxes() for s in p.box.steps if s.kind == "all_gather"]
    assert len(gathers) == 1 and plan.program.typing.saved_seconds > 0


@pytest.mark.parametrize("inner", ["auto", "explicit"])
def test_policies_of_readers_hold(inner):
    """What was made first may be of a type that the reader of the second may not convert."""

    def layer(x, w):
        h = jnp.tanh(x @ w[0])
        with sbp.policy(inner):
            y = h @ w[1]
        return jnp.tanh(y) + x

    def loss(weights, x):
        for n in range(3):
            x = jax.checkpoint(layer)(x, jax.tree.map(lambda w, n=n: w[n], weights))
        return (x**2).sum()

    weights, x = arguments()
    want = jax.jit(jax.value_and_grad(loss))(weights, x)
    for hardware in ("cpu", "tpu-v3"):
        f = sbp.jit(
            jax.value_and_grad(loss),
            sbp.make_mesh((2, 4), ("data", "model")),
            boxing="reduce",
            hardware=hardware,
        )
        jax.tree.map(
            lambda g, w: np.testing.assert_allclose(
                g, w, rtol=2e-4, atol=2e-5 * float(jnp.abs(w).max())
            ),
            f(weights, x),
            want,
        )
        wide = jax.tree.map(
            lambda a: jax.ShapeDtypeStruct(
                (*a.shape[:-2], *(SCALE * d for d in a.shape[-2:])), a.dtype
            ),
            (weights, x),
        )
        assert f.check(*wide).ok


# ---- the search under a memory limit -------------------------------------------------------------
# The search for a plan under a memory limit, and its bound.


SQUARE = jax.ShapeDtypeStruct((8192, 8192), jnp.float32)
WHOLE = 8192 * 8192 * 4


@functools.cache
def product(memory_limit):
    mesh = jax.sharding.AbstractMesh((4, 4), ("x", "y"))
    return sbp.jit(lambda a, b: a @ b, mesh, hardware="tpu-v5p", memory_limit=memory_limit).plan(
        SQUARE, SQUARE
    )


def test_the_constraints_are_written_down_once_for_all_prices(monkeypatch):
    asked, prices = [], []

    def counted(request):
        asked.append(request)  # a list keeps them alive, so that no two have one id
        return written(request)

    def priced(search, price, fuller):
        prices.append(price)
        return at_full(search, price, fuller)

    written, at_full = fit.constraints_of, fit.PlanSearch.at_full
    monkeypatch.setattr(fit, "constraints_of", counted)
    monkeypatch.setattr(fit.PlanSearch, "at_full", priced)
    program = product.__wrapped__(WHOLE / 2).program
    assert sum(r is program.request for r in asked) == 1 and len(prices) > fit.HALVINGS


@pytest.mark.parametrize("limit", [None, 1e12])
def test_without_a_limit_that_binds_no_price_is_tried(limit, monkeypatch):
    monkeypatch.setattr(fit.PlanSearch, "at_full", None)
    assert product.__wrapped__(limit).program.fits


def test_the_bound_holds_whatever_the_memory():
    """A bound on seconds and a price of memory together says nothing of plans that take more memory
    and fit the limit, too."""
    free, tight = product(None), product(WHOLE / 2)
    assert tight.cost.peak_memory_bytes <= WHOLE / 2
    assert tight.program.typing.lower_bound == free.program.typing.lower_bound
    assert not tight.program.typing.optimal and "proved cheapest" in free.report().text(400)
    assert "proved cheapest" not in tight.report().text(400)
