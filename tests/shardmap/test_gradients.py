"""Which gradients of hand-written programs are right. For every combination, the checker's verdict
agrees with a run on the devices.

A loss is a mean or a sum over a device's samples, reduced or not before it is differentiated, and
the gradient is reduced or not.
"""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import PartitionSpec as PS

import sbp
from sbp.errors import OptionEdit
from tests.shardmap.programs.faulty import PROGRAMS
from tests.shardmap.programs.kinds import draw, is_right, mesh, report_of
from tests.shardmap.programs.right import enter, leave
from tests.shardmap.programs.wrong.layers import W1, W2, X
from tests.shardmap.programs.wrong.training import W, Y

REDUCE = {"none": lambda x, a: x, "psum": lax.psum, "pmean": lax.pmean}
SAMPLES, BOTH = (PS(), PS("data"), PS("data")), PS(("data", "model"))
TENSOR = (PS(None, "model"), PS("model"), PS("data"))
LOSS = {"mean": lambda e: (e**2).mean(), "sum": lambda e: (e**2).sum()}


def check_verdict(body, ins, outs, vma, args, reference):
    """The checker accepts a gradient if and only if its values on the devices are right."""
    region = jax.shard_map(body, mesh=mesh(), in_specs=ins, out_specs=outs, check_vma=vma)
    try:
        report = sbp.check_shard_map(region, *args, mesh=mesh())
    except ValueError:
        pytest.skip("JAX refuses it: it cannot infer that the result is replicated")
    assert report.ok == is_right(region, args, reference(*args), 1e-3, 1e-5), report.text()


@pytest.mark.parametrize(
    ("loss", "before", "after", "vma"), list(itertools.product(LOSS, REDUCE, REDUCE, (True, False)))
)
def test_data_parallel(loss, before, after, vma):
    def body(w, x, y):
        g = jax.grad(lambda w: REDUCE[before](LOSS[loss](x @ w - y), "data"))(w)
        return REDUCE[after](g, "data")

    check_verdict(
        body, SAMPLES, PS(), vma, (W, X, Y), jax.grad(lambda w, x, y: LOSS[loss](x @ w - y))
    )


@pytest.mark.parametrize(
    ("axes", "after", "vma"), list(itertools.product(("data", "both"), REDUCE, (True, False)))
)
def test_tensor_parallel(axes, after, vma):
    """The gradient of a split weight, inside of the region: without check_vma the transpose of a
    psum is a psum."""

    def body(w1, w2, x):
        def of(w1):
            y = lax.psum(jnp.tanh(x @ w1) @ w2, "model")
            return lax.pmean(LOSS["mean"](y), "data" if axes == "data" else ("data", "model"))

        return REDUCE[after](jax.grad(of)(w1), "data")

    reference = jax.grad(lambda w1, w2, x: LOSS["mean"](jnp.tanh(x @ w1) @ w2))
    check_verdict(body, TENSOR, PS(None, "model"), vma, (W1, W2, X), reference)


@pytest.mark.parametrize("vma", [True, False])
@pytest.mark.parametrize("body", ["pmean", "psum_by_size", "psum"])
def test_the_gradient_of_a_region(body, vma):
    """JAX differentiates the region from outside and reduces the gradients. The residuals that it
    passes to the backward pass keep their types."""

    def loss(w1, w2, x):
        y = lax.psum(jax.nn.gelu(x @ w1) @ w2, "model")
        match body:
            case "pmean":
                return lax.pmean((y**2).mean(), "data")
            case "psum_by_size":
                return lax.psum((y**2).sum(), "data") / (y.size * lax.axis_size("data"))
            case _:
                return lax.psum((y**2).sum(), "data")

    region = jax.shard_map(loss, mesh=mesh(), in_specs=TENSOR, out_specs=PS(), check_vma=vma)
    reduce = jnp.sum if body == "psum" else jnp.mean
    whole = lambda w1, w2, x: reduce((jax.nn.gelu(x @ w1) @ w2) ** 2)
    gradient, reference = jax.grad(region, (0, 1, 2)), jax.grad(whole, (0, 1, 2))
    report = sbp.check_shard_map(gradient, W1, W2, X, mesh=mesh())
    assert not report.diagnostics, report.text()
    for got, want in zip(gradient(W1, W2, X), reference(W1, W2, X), strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-3, atol=1e-4)


def test_a_doubled_loss_is_told_once():
    """The gradient is too large by the same factor, for the same reason."""
    program = PROGRAMS["doubled_loss"]
    report = sbp.check_shard_map(program.program(False), *program.args, mesh=mesh())
    assert [d.code for d in report.diagnostics] == ["doubled-reduction"], report.text()
    assert report.diagnostics[0].helps


OPTIMIZERS = {
    "adam": lambda optax: optax.adam(1e-2),
    "clipped adamw": lambda optax: optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-3)),
    "rmsprop": lambda optax: optax.rmsprop(1e-3),
}
"""Updates that hardly depend on the scale of the gradient, so that a sum seems right, too."""


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_missing_mean_before_an_optimizer_is_one_error(name):
    """The mesh has two axes."""
    optax = pytest.importorskip("optax", reason="the environment of the newest JAX has no optax")
    optimizer = OPTIMIZERS[name](optax)

    def step(w, state, x, y):
        gradient = jax.grad(lambda w: LOSS["mean"](x @ w - y))(w)
        updates, state = optimizer.update(gradient, state, w)
        return optax.apply_updates(w, updates), state

    (found,) = report_of(
        step, (PS(), PS(), BOTH, BOTH), (PS(), PS()), W, optimizer.init(W), X, Y
    ).diagnostics
    assert [h.text for h in found.helps] == [
        f"reduce `gradient`, which line {step.__code__.co_firstlineno + 1} sets, with"
        ' lax.pmean(.., ("data", "model"))'
    ]


def check_over_both_axes(body, outs, *, vma=False):
    """The only finding in a region whose samples both mesh axes split."""
    (found,) = report_of(body, (PS(), BOTH, BOTH), outs, W, X, Y, vma=vma).diagnostics
    return found


def _moments(w, x, y):
    mean = x.mean(0)
    return lax.pmean(((x - mean) ** 2).mean(0), ("data", "model"))


def _normalized(gradient):
    return gradient / jnp.sqrt((gradient * gradient).sum())


OVER_BOTH = {
    "a loss": (lambda w, x, y: LOSS["mean"](x @ w - y), "missing-reduction"),
    "a root": (lambda w, x, y: jnp.sqrt(abs(x).mean(0)), "missing-reduction"),
    "moments": (_moments, "misplaced-reduction"),
    "a normalized gradient": (
        lambda w, x, y: _normalized(jax.grad(lambda w: LOSS["mean"](x @ w - y))(w)),
        "missing-reduction",
    ),
}


@pytest.mark.parametrize("name", OVER_BOTH)
def test_a_mean_of_shards_on_two_mesh_axes(name):
    """sbp judges the outer axis like the inner axis. A shard of one device on the outer axis holds
    the shards of all of its devices."""
    body, code = OVER_BOTH[name]
    found = check_over_both_axes(body, PS())
    assert found.code == code and found.title.endswith("on mesh axes `data` and `model`")
    (*_, text) = (x.text for x in found.labels if "(the mean of one shard)" in x.text)
    assert text.startswith("its gradient is") == (name == "a normalized gradient")
    assert 'lax.pmean(.., ("data", "model"))' in found.helps[0].text


def test_a_gather_over_both_axes_is_not_at_fault():
    """The only finding is the loss, which is averaged over one of the two axes."""
    both = ("data", "model")

    def body(w, x, y):
        def loss(w):
            full = lax.all_gather(w, both, tiled=True)
            return lax.pmean(LOSS["mean"](x @ full - y), "data")

        value, gradient = jax.value_and_grad(loss)(w)
        return value, w - gradient / 8

    args = (jax.random.normal(jax.random.key(n), (8, 8)) for n in range(3))
    (found,) = report_of(body, BOTH, (PS(), BOTH), *args).diagnostics
    assert (found.code, found.title[-20:]) == ("missing-reduction", "on mesh axis `model`")


def test_a_sum_of_means_that_is_divided_by_one_of_two_sizes():
    def body(w, x, y):
        loss = LOSS["mean"](x @ w - y)
        return lax.psum(loss, ("data", "model")) / lax.axis_size("data")

    found = check_over_both_axes(body, PS())
    assert found.title.endswith("adds up means of shards on mesh axis `model`")
    assert found.helps[0].text.endswith("by 4, the size of `model`")
    assert found.helps[0].clears_all_errors


def test_a_gradient_and_a_metric_that_are_not_reduced_are_two_errors():
    body = lambda w, x, y: (jax.grad(lambda w: LOSS["mean"](x @ w - y))(w), x.sum())
    found = report_of(body, SAMPLES, PS(), W, X, Y).diagnostics
    assert [d.code for d in found] == 2 * ["missing-reduction"]
    assert {d.primary.text for d in found if d.primary} == {
        "P(sum) from here on",
        "its gradient is a partial value (the mean of one shard) from here on",
    }


def test_a_mean_of_a_loss_and_of_its_gradient():
    """JAX has summed the gradient on both mesh axes."""

    def body(w, x, y):
        pair = jax.value_and_grad(lambda w: LOSS["mean"](x @ w - y))(w)
        return lax.pmean(pair, ("data", "model"))

    found = check_over_both_axes(body, (PS(), PS()), vma=True)
    assert found.title.endswith("adds up means of shards on mesh axes `data` and `model`")
    assert "take lax.pmean of the loss inside the gradient" in found.labels[0].text


def test_a_sum_of_means_inside_a_gradient_becomes_a_mean():
    def body(w, x, y):
        return jax.value_and_grad(lambda w: lax.psum(LOSS["mean"](x @ w - y), "data"))(w)

    (found,) = report_of(body, SAMPLES, (PS(), PS()), W, X, Y, vma=True).diagnostics
    (help_,) = found.helps
    assert help_.text.startswith("use lax.pmean in place of `lax.psum(") and help_.clears_all_errors


def test_gradients_with_one_cause_are_one_error():
    def loss(layers, x, y):
        for w, b in layers:
            x = jnp.tanh(x @ w + b)
        return ((x - y) ** 2).mean()

    def update(layers, x, y):
        gradients = jax.grad(loss)(layers, x, y)
        return jax.tree.map(lambda w, g: w - 0.1 * g, layers, gradients)

    x = draw(16, 8)
    layers = [(x[:8] + n, x[8]) for n in range(3)]
    (d,) = report_of(update, SAMPLES, PS(), layers, x, 2 * x).diagnostics
    # `x @ w` and `x @ w + b` are on one line and share a label.
    assert d.code == "missing-reduction" and [label.primary for label in d.labels] == [True]
    assert d.notes[-1].startswith("the help also mends this: the gradient of `x @ w + b` is left")


# ---- tensor-parallel layers, with the functions of Megatron at both ends -------------------------


def of_columns(entering, leaving):
    """The gradients of a layer with several first weights, behind a norm."""

    def loss(ws, x):
        h = entering(x * lax.rsqrt((x * x).mean(-1, keepdims=True) + 1e-6))
        hidden = [jnp.tanh(h @ w) for w in ws["up"]]
        return ((x + leaving(sum(hidden) @ ws["down"])) ** 2).mean()

    return lambda ws, x: jax.grad(loss, (0, 1))(ws, x)


def of_a_layer(entering, leaving):
    def loss(ws, x):
        return ((x + leaving(jnp.tanh(entering(x) @ ws["up"]) @ ws["down"])) ** 2).mean()

    return jax.grad(loss)


def of_a_scan(entering, leaving):
    """The backward pass is a scan in reverse: the fault is found in its first trip."""

    def layer(h, ws):
        up, down = ws
        return h + leaving(jnp.tanh(entering(h) @ up) @ down), None

    def loss(ws, x):
        return (lax.scan(layer, x @ ws[0], ws[1])[0] ** 2).mean()

    return jax.grad(loss)


COLUMNS = PS(None, "model")
ONE_LAYER = {"up": COLUMNS, "down": PS("model")}, {"up": draw(8, 16), "down": draw(16, 8)}
SCANNED = (
    (PS(), (PS(None, None, "model"), PS(None, "model"))),
    (draw(8, 8) / 4, (draw(3, 8, 16) / 4, draw(3, 16, 8) / 4)),
)
UNSUMMED, SUMMED_AGAIN = (lambda h: h, leave), (enter, lambda y: lax.psum(y, "model"))
"""Of the functions at both ends, one is wrong."""


@pytest.mark.parametrize(
    ("program", "specs", "ws", "ends", "title"),
    [
        *(
            (
                of_columns,
                {"up": [COLUMNS] * columns, "down": PS("model")},
                {"up": [draw(8, 16) / k for k in range(2, 2 + columns)], "down": draw(16, 8)},
                UNSUMMED,
                "",
            )
            for columns in (1, 2)
        ),
        (
            of_a_layer,
            *ONE_LAYER,
            SUMMED_AGAIN,
            "doubled-reduction: ",
        ),
        (
            of_a_scan,
            *SCANNED,
            UNSUMMED,
            "the gradient of `entering(h) @ up` adds a whole value to a partial",
        ),
        (of_a_scan, *SCANNED, SUMMED_AGAIN, "reduces a value that is already whole"),
    ],
)
def test_gradients_of_tensor_parallel_layers(program, specs, ws, ends, title):
    outs = (specs, PS()) if program is of_columns else specs
    x = draw(16, 8) / (4 if program is of_a_scan else 1)
    assert report_of(program(enter, leave), (specs, PS()), outs, ws, x).ok
    (d,) = report_of(program(*ends), (specs, PS()), outs, ws, x).diagnostics
    assert title in f"{d.code}: {d.title}"
    assert [h.clears_all_errors for h in d.helps] == [True] * (ends is SUMMED_AGAIN)


def test_check_vma_is_a_help_for_gradients_that_it_reduces():
    """A tensor-parallel layer behind a scale: with check_vma=False, the transpose of its psum is a
    psum, and no device has the whole gradient of the scale."""

    def loss(p, x):
        h = jnp.tanh((x * p["scale"]) @ p["w1"]) @ p["w2"]
        return LOSS["mean"](lax.psum(h, "model"))

    def step(p, x):
        return lax.pmean(jax.grad(loss)(p, x), "data")

    def averaged(p, x):
        return jax.grad(lambda p: lax.pmean(loss(p, x), "data"))(p)

    params = {"scale": draw(W1.shape[0], seed=5), "w1": W1, "w2": W2}
    specs = {"scale": PS(), "w1": PS(None, "model"), "w2": PS("model")}
    (found,) = report_of(step, (specs, PS("data")), specs, params, X, vma=False).diagnostics
    (help_,) = found.helps
    assert help_.text.startswith(
        'pass check_vma=True to jax.shard_map, and take lax.pmean(.., "data")'
    )
    assert [e.value for e in help_.edits if isinstance(e, OptionEdit)] == [True]
    region = jax.shard_map(averaged, mesh=mesh(), in_specs=(specs, PS("data")), out_specs=specs)
    whole = lambda p: LOSS["mean"](jnp.tanh((X * p["scale"]) @ p["w1"]) @ p["w2"])
    assert is_right(region, (params, X), jax.grad(whole)(params), 1e-3, 1e-5)
